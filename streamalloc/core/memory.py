"""Memory: its export to other libraries without a copy, and its views.

:class:`Memory` is the base class of all kinds of memory. It has fills and copies (:mod:`~streamalloc.core.copies`), and
the exports: numpy arrays, the buffer protocol, ``__cuda_array_interface__``, ``__array_interface__`` and DLPack. A
subclass defines address, size, location and stream (:mod:`~streamalloc.core.memory_base`). :class:`BufferView` is a
range of bytes of other memory. :class:`TypedView` is other memory with an element type and a shape.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload

from streamalloc.core.copies import Copyable, CopyOptions
from streamalloc.core.errors import ClosedError
from streamalloc.core.memory_base import MemoryBase, Migrating
from streamalloc.core.properties import MemLocation
from streamalloc.core.stream import DEFAULT_HANDLES, LEGACY, Stream, StreamLike
from streamalloc.driver.internal import cuda
from streamalloc.formats.arrays import (
    CPU,
    CUDA,
    CUDA_HOST,
    CUDA_MANAGED,
    Index,
    array_form,
    exported,
    fill_steps,
    host_array,
    interface_form,
    interface_type,
    part_of,
    to_element,
    windows,
)
from streamalloc.formats.html import Row
from streamalloc.formats.lazy_numpy import np

if TYPE_CHECKING:
    import numpy.typing as npt

ScalarT = TypeVar("ScalarT", bound="np.generic")
OtherT = TypeVar("OtherT", bound="np.generic")

_WRITABLE = 1  # PyBUF_WRITABLE


class HasCudaArrayInterface(Protocol):
    """Type of arrays of other libraries in device memory."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """A dict with the array's address, element type and shape, in the form of the CUDA array interface."""


def _flat_bytes(nbytes: int, address: int, read_only: bool, stream: int) -> dict[str, Any]:
    data = address, read_only
    return {"shape": (nbytes,), "typestr": "|u1", "data": data, "strides": None, "version": 3, "stream": stream}


class Memory(Copyable, Migrating):
    """A range of bytes that devices, the host or both can access.

    :class:`Buffer`, :class:`BufferView` and :class:`TypedView` show its use.

    Fills, copies and prefetches are queued on a stream: by default the memory's own :attr:`stream`. The host waits only
    for a copy into pageable host memory, because the driver returns after this copy.
    """

    __slots__ = ()

    @overload
    def view_as(
        self, dtype: type[OtherT] | np.dtype[OtherT], shape: tuple[int, ...] | None = None
    ) -> TypedView[OtherT]: ...
    @overload
    def view_as(self, dtype: npt.DTypeLike, shape: tuple[int, ...] | None = None) -> TypedView[Any]: ...
    def view_as(self, dtype: npt.DTypeLike, shape: tuple[int, ...] | None = None) -> TypedView[Any]:
        """Return a view of the memory as an array with an element type and a shape. Exports of the view have this type
        and shape.

        Parameters
        ----------
        dtype
            The NumPy type of the elements.
        shape
            The sizes of the dimensions, in C order. One size may be -1: it is computed from the size of the memory. By
            default the view has one dimension.

        Raises
        ------
        TypeError, ValueError
            ``dtype`` is no NumPy type or has Python objects as elements. Or the elements do not fill the memory
            exactly, or would not be aligned.
        ClosedError
            The memory was freed.
        """
        kind, sizes = array_form(self, self._at, self.nbytes, dtype, shape)
        return TypedView(self, kind, sizes)

    def view(self, start: int = 0, stop: int | None = None) -> BufferView:
        """Return a view of the bytes from ``start`` to ``stop``; also written ``memory[start:stop]``. The view keeps
        this object alive. A negative number counts from the end, and None as ``stop`` is the end. Raises TypeError if a
        bound is not an integer, and ValueError if the range is outside of the memory.
        """
        return self[start:stop]

    def __getitem__(self, item: slice) -> BufferView:
        if type(item) is slice and item.step is None and type(item.start) is type(item.stop) is int:
            first, last = item.start, item.stop
            if 0 <= first <= last <= self.nbytes:
                return BufferView(self, first, last - first)
        if not isinstance(item, slice):
            raise TypeError(
                f"{item!r} is no range of bytes such as 0:16; copy_to reads single bytes, or as_array in host memory"
            )
        start, stop, step = item.indices(self.nbytes)
        if step != 1:
            raise ValueError(f"step {step}: a view is contiguous")
        for name, bound in (("start", item.start), ("stop", item.stop)):
            if bound is not None and not -self.nbytes <= operator.index(bound) <= self.nbytes:
                raise ValueError(f"{name}={bound} is outside the {self.nbytes} bytes of {self!r}")
        return BufferView(self, start, max(stop - start, 0))

    def __len__(self) -> int:
        return self.nbytes

    def __bool__(self) -> bool:
        return True

    __iter__ = None

    def as_array(self, dtype: npt.DTypeLike = "uint8", shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        """Return a numpy array of the memory, without a copy; the host must have access. By default it has one
        dimension.

        The array keeps this object alive, but :meth:`~streamalloc.Buffer.free` still frees the memory. Synchronise with
        the stream first: the allocation or queued copies may be pending. A checked driver records the call as a read by
        the host.

        Raises
        ------
        TypeError, ValueError
            The host cannot reach the memory, ``dtype`` is no type of elements without Python objects, or ``dtype`` and
            ``shape`` do not fit the size of the memory.
        ClosedError, EvictedError
            The memory was freed, or is evicted.
        """
        flat = self._on_host(ValueError).view(dtype)
        return flat if shape is None else flat.reshape(shape)

    def _on_host(self, refusal: type[Exception]) -> npt.NDArray[np.uint8]:
        """Return the memory as a host array of bytes. Raise an exception of the class ``refusal`` if the host cannot
        access the memory.
        """
        self.check_usable()
        if not self.host_accessible:
            raise refusal(f"{self!r} is in device memory, which the host cannot reach: copy it with copy_to")
        # `np.asarray(self)` would recurse: NumPy tries the buffer protocol first, and `__buffer__` calls this method.
        return np.asarray(SimpleNamespace(memory=self, __array_interface__=self.__array_interface__))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return the memory as a numpy array. The bytes are copied only if ``copy`` is True or ``dtype`` needs it.
        Raises ValueError if the host cannot access the memory, or if ``copy`` is False and ``dtype`` needs a copy.
        """
        return np.array(self.as_array(), dtype=dtype, copy=copy)

    def __buffer__(self, flags: int) -> memoryview:
        """Return the bytes for ``memoryview`` and other users of the buffer protocol (Python 3.12 and newer).

        Synchronise with the stream first, as for :meth:`as_array`.

        Raises
        ------
        BufferError
            The host has no access, or a writable buffer was requested and the host has read access only.
        ClosedError, EvictedError
            The memory was freed, or is evicted.
        """
        view: memoryview = self._on_host(BufferError).data
        if flags & _WRITABLE and view.readonly:
            raise BufferError(f"{self!r} is read-only to the host")
        return view

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the CUDA array interface, as an array of bytes. Other code must order its work after
        :attr:`stream`. Raises AttributeError if devices cannot access the memory, ClosedError if it was freed, and
        EvictedError if it is evicted.
        """
        ptr = self._ptr
        if ptr is not None:
            stream = self._stream
            # For speed, no property is read if the stream accepts direct calls, other code has its handle already
            # (`capturable`), the memory is on the stream's device, and there is no listener. Otherwise `stream.handle`,
            # below, marks the stream as `capturable` and notifies the listener.
            if (
                stream.direct is not None
                and stream.capturable
                and self._ordinal == stream.device.ordinal
                and stream._session.listener is None
            ):
                return _flat_bytes(self._nbytes, int(ptr), False, stream._number)
        self.check_usable()
        unreadable = self._unreadable()
        if unreadable or not self.device_accessible:
            raise AttributeError(unreadable or f"{self!r} is not accessible from a device")
        # The interface forbids 0 as the stream, because it is ambiguous. LEGACY (1) names the same stream.
        return _flat_bytes(self.nbytes, self.address, self._read_only(on_host=False), self.stream.handle or LEGACY)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Version 3 of numpy's array interface, by which ``numpy.asarray`` makes an array of host memory without a
        copy. Raises AttributeError if the host cannot access the memory, ClosedError if it was freed, and EvictedError
        if it is evicted.
        """
        self.check_usable()
        if not self.host_accessible:
            raise AttributeError(f"{self!r} is not accessible from the host")
        self.used(write=False, on_host=True)
        # numpy 2.2 treats the address 0 as missing. Empty memory is never accessed, so it can have any other address.
        data = (self.address or 1, self._read_only(on_host=True))
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": data, "version": 3}

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's device type and device number: CUDA and the ordinal, CUDA managed and the ordinal, CUDA host
        and 0, or CPU and 0.
        """
        if not self.host_accessible:
            return (CUDA, self.location.id)
        if not self.location.on_host:
            return (CUDA_MANAGED, self.stream.device.ordinal)
        return (CUDA_HOST if self.device_accessible else CPU, 0)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule of the memory as ``uint8`` in one dimension, without a copy.

        ``stream`` follows the Python array API standard: None or 1 for the legacy default stream, 2 for the per-thread
        default stream, -1 for no ordering, else the handle of a stream. The named stream waits for the queued work of
        :attr:`stream`.

        Raises
        ------
        BufferError
            The memory cannot be read, or ``dl_device`` or ``copy`` would need a copy.
        TypeError, ValueError
            ``stream`` is not an integer, or is 0.
        ClosedError, EvictedError
            The memory was freed, or is evicted.
        """
        if stream and dl_device is None and not copy:
            ptr = self._ptr
            if ptr is not None:
                nbytes, window = self._nbytes, windows.get((CUDA, self._ordinal))
                if nbytes and window is not None:
                    if stream != -1:
                        self._order(stream)
                    first = int(ptr) - 1  # Index 0 of the window is address 1.
                    part: Any = window[first : first + nbytes]
                    part.memory = self
                    return part.__dlpack__(max_version=max_version)
        return self._ordered_part(stream, dl_device, copy).__dlpack__(max_version=max_version)

    def _ordered_part(self, stream: int | None, dl_device: tuple[int, int] | None, copy: bool | None) -> Any:
        """Return a numpy array of the bytes whose ``__dlpack__`` exports this memory, after the checks of
        :meth:`__dlpack__`. Have ``stream`` wait as :meth:`__dlpack__` does. Raises BufferError, ValueError.
        """
        self.check_usable()
        unreadable = self._unreadable()
        if unreadable:
            raise BufferError(unreadable)
        device = self.__dlpack_device__()
        if dl_device is not None and tuple(dl_device) != device:
            raise BufferError(
                f"the memory is on DLPack device {device}; it cannot be exported for {dl_device} without a copy"
            )
        if copy:
            raise BufferError("the memory is shared as it is; copy it on your side")
        on_host = device[0] == CPU
        # If the caller names no stream for host-accessible memory, as NumPy does, the host will use the memory, perhaps
        # at once.
        of_host = on_host or (stream is None and self.host_accessible)
        if not on_host and stream != -1:
            if stream == 0:
                raise ValueError("stream=0 is ambiguous: the legacy default stream is 1, the per-thread one 2")
            self._order(LEGACY if stream is None else stream, of_host)
        if of_host:
            self.used(write=False, on_host=True)
        address = self.address if of_host or stream == -1 else self._at
        part = exported(self, address, self.nbytes, device)
        if self._read_only(on_host=on_host):
            part.flags.writeable = False
        return part

    def _order(self, handle: int, of_host: bool = False) -> None:
        """Have the stream ``handle`` of other code wait for the work of :attr:`stream`, because other code will use the
        memory there. ``of_host``: whether the host uses the memory instead, so that no use by the stream is recorded.
        """
        ours = self.stream
        if handle != ours._number:
            _precede(ours, handle)
            if ours._session.listener is not None and not of_host:
                self.used(Stream.of_handle(ours.device, handle, self), write=False)


def _precede(stream: Stream, handle: int) -> None:
    """Order later work of another library's stream, whose ``CUstream`` is the number ``handle``, after all queued work
    of ``stream`` (``cuEventRecord``, ``cuStreamWaitEvent``).
    """
    raw, session, spare = stream.direct or stream.ready(), stream._session, stream._spare
    if raw is not None and handle not in DEFAULT_HANDLES:
        # New Event and Stream objects would cost three times as much as both driver calls.
        theirs = cuda.CUstream(handle)  # Raises, before a pop, for a value that is no handle.
        # Python switches no threads within this line, so no other thread can empty the list between the test and the
        # pop.
        event = spare.pop() if spare else None
        if event is not None:
            record, wait = session.cuEventRecord, session.cuStreamWaitEvent
            try:
                failed = record(event, raw)[0] or wait(theirs, event, 0)[0]
            finally:
                spare.keep(event, session)
            if not failed:
                return
    Stream.of_handle(stream.device, handle, None).wait(stream)


class BufferView(Memory):
    """A range of bytes of other memory. The view keeps the other memory's object alive, and is valid until that memory
    is freed.

    Made by a slice of memory, such as ``buffer[:4096]``, or by :meth:`Memory.view`.
    """

    __slots__ = ("__weakref__", "_nbytes", "_offset", "_parent")

    def __init__(self, parent: Memory, offset: int, nbytes: int) -> None:
        self._parent = parent
        self._offset = offset
        self._nbytes = nbytes

    @property
    def _ptr(self) -> int | None:
        parent = self._parent
        whole = parent._ptr
        if whole is None or self._offset + self._nbytes > parent._nbytes:
            return None
        return int(whole) + self._offset

    @property
    def _stream(self) -> Stream:  # type: ignore[override]
        return self._parent._stream

    @property
    def _ordinal(self) -> int | None:  # type: ignore[override]
        return self._parent._ordinal

    @property
    def address(self) -> int:
        """Address of the first byte.

        Raises
        ------
        ClosedError
            The memory was freed, or has shrunk so that this range is outside of it.
        """
        self._check_inside()
        return self._parent.address + self._offset

    @property
    def _at(self) -> int:
        self._check_inside()
        return self._parent._at + self._offset

    def _check_inside(self) -> None:
        if self._offset + self._nbytes > self._parent.nbytes:
            raise ClosedError(f"{self!r} is outside of its memory, which has shrunk")

    def _await_on(self, stream: Stream) -> None:
        self._parent._await_on(stream)

    @property
    def nbytes(self) -> int:
        """Size of the range in bytes."""
        return self._nbytes

    @property
    def stream(self) -> Stream:
        """The stream of the viewed memory, for operations for which the caller names no stream."""
        return self._parent.stream

    @property
    def owner(self) -> object:
        """The memory that this view is a range of."""
        return self._parent

    @property
    def location(self) -> MemLocation:
        """Location of the memory."""
        return self._parent.location

    @property
    def managed(self) -> bool:
        """Whether the driver migrates the memory between devices and host."""
        return self._parent.managed

    @property
    def host_accessible(self) -> bool:
        """Whether the CPU may use the memory."""
        return self._parent.host_accessible

    @property
    def device_accessible(self) -> bool:
        """Whether the stream's device may use the memory."""
        return self._parent.device_accessible

    def check_usable(self) -> None:
        self._parent.check_usable()

    def _unreadable(self) -> str:
        return self._parent._unreadable()

    def _resident_on(self) -> int | None:
        return self._parent._resident_on()

    def _read_only(self, on_host: bool) -> bool:
        return self._parent._read_only(on_host)

    def _kept_by_graphs(self) -> object:
        return self._parent._kept_by_graphs()

    def _kernels_may_use(self, blocks: Any, nbytes: int, write: bool) -> bool:
        return self._parent._kernels_may_use(blocks, nbytes, write)

    def _access_hint(self, stream: Stream) -> str:
        return self._parent._access_hint(stream)

    def _about(self) -> Iterator[Row]:
        yield from super()._about()
        yield "part", f"bytes {self._offset:,} to {self._offset + self._nbytes:,} of {self._parent!r}"

    def _text(self) -> str:
        return f" of bytes {self._offset}:{self._offset + self._nbytes} of {self._parent!r}"


class TypedView(BufferView, Generic[ScalarT]):
    """Memory as a C-contiguous array with elements of the NumPy type ``ScalarT``: the result of :meth:`Memory.view_as`.

    Fills, copies and indices of this view count elements; those of :attr:`bytes` count bytes. The array interfaces,
    DLPack and :func:`streamalloc.ipc.share` export the type and shape.

    Examples
    --------
    >>> weights = pool.allocate(4 * 6 * 4, stream).view_as(np.float32, (4, 6))
    >>> weights.fill(1.5)
    >>> weights[1:3].copy_from(np.zeros((2, 6), np.float32))
    >>> weights[0].shape, weights.bytes[0:8].nbytes
    ((6,), 8)
    """

    __slots__ = ("dtype", "shape")

    def __init__(self, parent: Memory, dtype: np.dtype[ScalarT], shape: tuple[int, ...]) -> None:
        super().__init__(parent, 0, parent.nbytes)
        self.dtype: np.dtype[ScalarT] = dtype
        """The type of the elements."""
        self.shape: tuple[int, ...] = shape
        """The sizes of the dimensions, in C order."""

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> BufferView:
        """The same memory as a view of bytes, whose fills, copies and indices count bytes."""
        return BufferView(self, 0, self._nbytes)

    def fill(self, value: Any, stream: StreamLike | None = None, *, width: None = None) -> None:  # type: ignore[override]
        """Write ``value`` to every element (``cuMemsetD8Async``, ``cuMemsetD16Async``, ``cuMemsetD32Async``).

        Some values, such as most values of ``float64``, are not a repeated pattern of 1, 2 or 4 bytes. Then the first
        element is written, and copied in steps that double the number of written elements (``cuMemcpyAsync``).

        Parameters
        ----------
        value
            A value that ``dtype`` can hold, such as a number; for a structured type a tuple or a NumPy scalar.
        stream
            The stream to queue on (default: the memory's own).
        width
            Not supported here: use :meth:`Memory.fill` of :attr:`bytes`.

        Raises
        ------
        TypeError, ValueError
            ``dtype`` cannot hold the value, such as 300 in ``uint8`` or 0.5 in ``int32``. Or ``width`` was given, or
            ``stream`` is not a stream of this driver.
        ClosedError, EvictedError
            The memory was freed or is evicted, or the stream was closed.
        """
        if width is not None:
            raise TypeError(f"width={width!r}: elements of {self.dtype} have one; .bytes.fill takes a width")
        self._fill_elements(value, stream)
        listener = self._session.listener
        if listener is not None and self._nbytes:
            listener.typed(self._at, self._nbytes, self.dtype, True)

    def _fill_elements(self, value: Any, stream: StreamLike | None) -> None:
        element = to_element(value, self.dtype)
        flat = self.bytes
        pattern, first = fill_steps(element, self.address)
        if pattern or not self._nbytes:
            flat.fill(pattern or 0, stream)
            return
        done = len(element)
        if done < self._nbytes and self._unreadable():
            raise ValueError(f"{self._unreadable()}; value={value!r} of {self.dtype} is written by copies")
        for start, stop, word in first:
            flat[start:stop].fill(word, stream)
        while done < self._nbytes:
            step = min(done, self._nbytes - done)
            flat[done : done + step].copy_from(flat[:step], stream)
            done += step

    def copy_to(
        self,
        target: TypedView[ScalarT] | npt.NDArray[ScalarT] | HasCudaArrayInterface,
        stream: StreamLike | None = None,
        *,
        options: CopyOptions | None = None,
    ) -> None:
        """Copy all elements to ``target``, which must have the same element type and shape (:meth:`Memory.copy_to`).

        Memory without an element type counts as bytes. Further errors are those of :meth:`Memory.copy_to`.

        Raises
        ------
        TypeError
            The target has another element type: use :meth:`Memory.view_as` of the target, or :attr:`bytes` of this
            memory.
        ValueError
            The target has another shape.
        """
        self._check_form(target, "target")
        super().copy_to(target, stream, options=options)
        listener = self._session.listener
        if listener is not None and self._nbytes:
            listener.typed(self._at, self._nbytes, self.dtype, False)

    def copy_from(
        self,
        source: TypedView[ScalarT] | npt.NDArray[ScalarT] | HasCudaArrayInterface,
        stream: StreamLike | None = None,
        *,
        options: CopyOptions | None = None,
    ) -> None:
        """Copy all elements from ``source``, which must have the same element type and shape
        (:meth:`Memory.copy_from`). Errors as for :meth:`copy_to`.
        """
        self._check_form(source, "source")
        super().copy_from(source, stream, options=options)

    def _check_form(self, other: object, name: str) -> None:
        form = form_of(other)
        if form is None:
            # Neither memory nor an array: the copy itself raises the TypeError, which names the allowed types.
            return
        dtype, shape = form
        if dtype != self.dtype:
            raise TypeError(f"{name} has elements of {dtype}, not of {self.dtype}; .bytes copies whatever they are")
        if shape != self.shape:
            raise ValueError(f"{name} has the shape {shape}, not {self.shape}")

    def __getitem__(self, item: Index) -> TypedView[ScalarT]:
        offset, shape = part_of(self.shape, self.dtype.itemsize, item)
        return TypedView(BufferView(self, offset, math.prod(shape) * self.dtype.itemsize), self.dtype, shape)

    def view(self, start: int = 0, stop: int | None = None) -> TypedView[ScalarT]:
        """Return a view of the elements from ``start`` to ``stop`` of the first dimension; also written
        ``memory[start:stop]``. As in NumPy, bounds after the end count as the end. Raises IndexError if the array has
        no dimensions, and TypeError if a bound is not an integer.
        """
        return self[start:stop]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without dimensions has no length")
        return self.shape[0]

    def _interface_type(self) -> dict[str, Any]:
        found = interface_type(self.dtype)
        if found is None:
            way_out = f"export view_as('V{self.dtype.itemsize}') and view it there"
            raise AttributeError(f"array interfaces have no name for {self.dtype}: {way_out}")
        return found | {"shape": self.shape}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the CUDA array interface, with this type and shape. Other code must order its work after
        :attr:`stream`. Errors as for :class:`Memory`, and AttributeError for a type that has no name in the interface.
        """
        return super().__cuda_array_interface__ | self._interface_type()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Version 3 of numpy's array interface, by which ``numpy.asarray`` makes an array of host memory without a
        copy. Errors as for :class:`Memory`, and AttributeError for a type that has no name in the interface.
        """
        return super().__array_interface__ | self._interface_type()

    if TYPE_CHECKING:

        def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[ScalarT]: ...

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule of the memory with this type and shape, without a copy. Arguments as for
        :meth:`Memory.__dlpack__`.

        Raises
        ------
        BufferError
            The errors of :meth:`Memory.__dlpack__`, or DLPack has no such element type.
        """
        part = self._ordered_part(stream, dl_device, copy).view(self.dtype).reshape(self.shape)
        part.memory = self
        try:
            return part.__dlpack__(max_version=max_version)
        except BufferError as error:
            if self.dtype.kind in "biufc":  # NumPy's message names another reason, such as read-only memory.
                raise
            raise BufferError(
                f"NumPy exports no {self.dtype} by DLPack: export view_as of an integer type and view it there"
            ) from error

    @overload
    def as_array(self, dtype: None = None, shape: None = None) -> npt.NDArray[ScalarT]: ...
    @overload
    def as_array(
        self, dtype: npt.DTypeLike | None = None, shape: tuple[int, ...] | None = None
    ) -> npt.NDArray[Any]: ...
    def as_array(self, dtype: npt.DTypeLike | None = None, shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        """Return a numpy array of host-accessible memory, without a copy, by default with this type and shape. With
        ``shape`` alone the type stays; with ``dtype`` alone the array has one dimension. Errors as for
        :meth:`Memory.as_array`.
        """
        form = (self.dtype, self.shape) if dtype is None and shape is None else (dtype or self.dtype, shape)
        return self._parent.as_array(*form)

    def _text(self) -> str:
        return f" {self.dtype} {self.shape} of {self._parent!r}"


def viewed(memory: Memory) -> tuple[Memory, int]:
    """Return the memory below all nested views, and the offset of ``memory`` in it in bytes. If ``memory`` is not a
    view, return ``memory`` and 0.
    """
    offset = 0
    while isinstance(memory, BufferView):
        offset += memory._offset
        memory = memory._parent
    return memory, offset


def form_of(other: Any) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    """Return the NumPy type and the shape of memory or of an array; None for other objects. Memory without an element
    type counts as ``uint8`` in one dimension.
    """
    if isinstance(other, MemoryBase):
        dtype = getattr(other, "dtype", None)
        return (np.dtype(np.uint8), (other.nbytes,)) if dtype is None else (dtype, other.shape)  # type: ignore[attr-defined]
    interface = getattr(other, "__cuda_array_interface__", None)
    if interface is not None:
        return interface_form(interface)
    array = host_array(other)
    return None if array is None else (array.dtype, array.shape)
