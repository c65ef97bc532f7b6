"""Memory that can be used: fill, copy, view, and hand to other libraries without a copy.

:class:`Memory` is what all kinds of memory have in common. A kind says its address, size, location and stream, and gets
the operations. :class:`BufferView` is a range of other memory.

Fill, copies, DLPack and the array interface have a fast path (:mod:`streamalloc.core.session`) for memory that has a
plain state: a pointer, a size and a stream, see :attr:`Memory._ptr`.
"""

from __future__ import annotations

import abc
import math
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload

import numpy as np

from streamalloc.core import dlpack
from streamalloc.core.elements import Index, fill_steps, interface_type, part_of, to_element
from streamalloc.core.errors import ClosedError, error_from
from streamalloc.core.html import Row, Shown, mib, place
from streamalloc.core.library_streams import kept_stream
from streamalloc.core.properties import MemLocation, MemLocationType
from streamalloc.core.resource import Unique
from streamalloc.core.session import Session
from streamalloc.core.stream import Stream, StreamLike, as_stream, order_handle_after, queue_handle
from streamalloc.driver.internal import cuda

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Self

# The pattern widths that the driver can fill with, in bytes, and the function for each.
_FILLS = {1: "cuMemsetD8Async", 2: "cuMemsetD16Async", 4: "cuMemsetD32Async"}


ScalarT = TypeVar("ScalarT", bound=np.generic)
OtherT = TypeVar("OtherT", bound=np.generic)

# All classes of memory: to look here takes a fifth of what isinstance takes for an abstract class.
_kinds: set[type] = set()
_cuda_windows = dlpack.cuda_windows
_Array = np.ndarray
# The driver's answer to a copy of pool memory while the context of another device is current.
_WRONG_CONTEXT = cuda.CUresult.CUDA_ERROR_INVALID_VALUE


class Memory(Unique, Shown, abc.ABC):
    """A range of bytes that devices, the host or both can reach.

    Every operation is queued on a stream: the one given, or the memory's own. Nothing is synchronised, except where
    the driver itself waits: a copy into ordinary (pageable) host memory returns when the bytes are there.
    """

    __slots__ = ()

    # The plain state, for fast paths. They look at the pointer first: where it is None the others may be missing.
    _ptr: Any = None
    """Pointer for the driver, ``CUdeviceptr`` or int; None for the slow path."""
    _nbytes: int
    _stream: Stream
    _home: int | None = None
    """Ordinal of the owning device; None for host, managed or unknown memory."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _kinds.add(cls)

    @property
    @abc.abstractmethod
    def address(self) -> int:
        """Address of the first byte; 0 for empty memory. Raises :class:`ClosedError` after it was freed."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Size in bytes, as it was asked for."""

    @property
    @abc.abstractmethod
    def stream(self) -> Stream:
        """The stream that orders operations which name no other."""

    @property
    @abc.abstractmethod
    def location(self) -> MemLocation:
        """Location of the memory."""

    @property
    @abc.abstractmethod
    def owner(self) -> object:
        """Owner of the memory: a pool, a graph, or the memory that this is a view of."""

    @property
    @abc.abstractmethod
    def device_accessible(self) -> bool:
        """Whether the stream's device may use the memory."""

    @property
    def host_accessible(self) -> bool:
        """Whether the CPU may use the memory at the same address."""
        return self.location.on_host

    def fill(
        self, value: int | bytes | np.generic, stream: StreamLike | None = None, *, width: int | None = None
    ) -> None:
        """Fill with a pattern of 1, 2 or 4 bytes (``cuMemsetD8Async``, ``cuMemsetD16Async``, ``cuMemsetD32Async``).

        Parameters
        ----------
        value
            An integer, the bytes of the pattern in memory order, or a numpy scalar of 1, 2 or 4 bytes.
        stream
            The stream to queue on (default: the memory's own).
        width
            Bytes of the pattern for an integer (default 1). A negative integer is stored in two's complement.

        Raises
        ------
        TypeError, ValueError
            The value does not fit the width, or the size or address is no multiple of it.
        """
        ptr = self._ptr
        if ptr is not None and width is None and type(value) is int and 0 <= value < 256:
            own, nbytes = self._stream, self._nbytes
            handle = own._handle if stream is None else None
            if handle is None:
                handle = queue_handle(own if stream is None else stream, own._session)
            if handle is not None and nbytes:
                result = own._session.cuMemsetD8Async(ptr, value, nbytes, handle)[0]
                if result:
                    raise error_from(result, "cuMemsetD8Async", self._access_hint(self._ordered_on(stream)))
                return
        self._fill_slowly(value, stream, width)

    def _fill_slowly(self, value: int | bytes | np.generic, stream: StreamLike | None, width: int | None) -> None:
        number, width = _pattern(value, width)
        count, rest = divmod(self.nbytes, width)
        if rest or self._at % width:
            raise ValueError(f"width={width}: {self.nbytes} bytes at {self._at:#x} are no whole number of patterns")
        ordered = self._ordered_on(stream)
        if count:
            self._await_on(ordered)
            with ordered._context():
                self._session.call(
                    _FILLS[width],
                    self._at,
                    number,
                    count,
                    ordered._checked_raw(),
                    hint=lambda: self._access_hint(ordered),
                )

    def copy_to(self, target: Memory | Any, stream: StreamLike | None = None) -> None:
        """Copy all bytes to ``target``, which must have the same size (``cuMemcpyAsync``, ``cuMemcpyPeerAsync``).

        Parameters
        ----------
        target
            Other memory of ours, of any device; an object with ``__cuda_array_interface__``; or a writable,
            contiguous object with the buffer protocol (a numpy array, a bytearray, a memoryview).
        stream
            The stream to queue on (default: the memory's own). The copy runs under its device's context.

        Raises
        ------
        TypeError, ValueError
            The target is not one of these, is read-only or not contiguous, or has another size.
        """
        if not _copied(self, target, stream, False):
            self._copy_slowly(target, self, stream)

    def copy_from(self, source: Memory | Any, stream: StreamLike | None = None) -> None:
        """Copy all bytes from ``source``, which must have the same size; otherwise as :meth:`copy_to`.

        An ordinary host source may be changed or freed once the call returns: the driver has taken its bytes. One in
        pinned or pool memory is read when the stream gets there. In a capture every source is read, and every target
        written, at each launch; the graph keeps them alive.
        """
        if not _copied(self, source, stream, True):
            self._copy_slowly(self, source, stream)

    def _copy_slowly(self, target: Any, source: Any, stream: StreamLike | None) -> None:
        ordered = self._ordered_on(stream)
        copy_bytes(CopySide.writable(target, self._session), CopySide.readable(source, self._session), ordered)

    def as_array(self, dtype: npt.DTypeLike = np.uint8, shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        """The memory itself as a numpy array, where the host can reach it.

        The array keeps the memory alive but does not keep it from being freed by hand. Synchronise with the stream
        first: neither the allocation nor a queued copy is done before that. A driver that checks stream order takes
        the call for a read by the host.

        Raises
        ------
        ValueError
            The host cannot reach the memory, or ``dtype`` and ``shape`` do not fit its size.
        """
        self._check_usable()
        if not self.host_accessible:
            raise ValueError(f"{self!r} is in device memory, which the host cannot reach: copy it with copy_to")
        listener = self._session.listener
        if listener is not None and self.nbytes:
            listener.used(self.address, self.nbytes, None, False)
        flat = np.asarray(self).view(dtype)
        return flat if shape is None else flat.reshape(shape)

    @overload
    def view_as(
        self, dtype: type[OtherT] | np.dtype[OtherT], shape: tuple[int, ...] | None = None
    ) -> TypedView[OtherT]: ...
    @overload
    def view_as(self, dtype: npt.DTypeLike, shape: tuple[int, ...] | None = None) -> TypedView[Any]: ...
    def view_as(self, dtype: npt.DTypeLike, shape: tuple[int, ...] | None = None) -> TypedView[Any]:
        """The memory as an array of a type and shape, on a device or on the host: what other libraries see of it then.

        Parameters
        ----------
        dtype
            The type of the elements, as numpy says it.
        shape
            The sizes of the dimensions, in C order; one of them may be -1, for what the size leaves. Default: one
            dimension.

        Raises
        ------
        TypeError, ValueError
            The elements are Python objects, do not fill the memory exactly, or are not aligned in it.
        """
        kind, sizes = _array_form(self, dtype, shape)
        return TypedView(self, kind, sizes)

    def used(self, stream: StreamLike | None = None, *, write: bool = True, on_host: bool = False) -> None:
        """Report a use to a driver that checks stream order, such as a kernel of another library.

        With any other driver nothing happens; see :func:`streamalloc.driver.checked`.

        Parameters
        ----------
        stream
            The stream that the kernel was queued on (default: the memory's own).
        write
            Whether the memory is written, and not only read.
        on_host
            The CPU itself uses the memory now, in no stream.

        Raises
        ------
        ClosedError
            The memory was freed.
        """
        address = self._at
        listener = self._session.listener
        if listener is None:
            return
        if on_host:
            listener.used(address, self.nbytes, None, write)
            return
        ordered = self.stream if stream is None else as_stream(stream, self._session)
        with ordered._context():
            listener.used(address, self.nbytes, ordered._checked_raw(), write)

    def view(self, start: int = 0, stop: int | None = None) -> BufferView:
        """The bytes from ``start`` to ``stop`` as memory of their own; also written ``memory[start:stop]``."""
        return self[start:stop]

    def __getitem__(self, item: slice) -> BufferView:
        if type(item) is slice and item.step is None:
            first, last = item.start, item.stop
            if type(first) is int and type(last) is int and 0 <= first <= last <= self.nbytes:
                return BufferView(self, first, last - first)
        return self._view_slowly(item)

    def _view_slowly(self, item: slice) -> BufferView:
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

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the CUDA array interface: flat bytes, to be used in order after :attr:`stream`."""
        ptr = self._ptr
        if ptr is not None:
            stream = self._stream
            if stream._handle is not None and self._home == stream.device.ordinal:
                return {
                    "shape": (self._nbytes,),
                    "typestr": "|u1",
                    "data": (int(ptr), False),
                    "strides": None,
                    "version": 3,
                    "stream": stream._number,
                }
        return self._cuda_interface_slowly()

    def _cuda_interface_slowly(self) -> dict[str, Any]:
        self._check_usable()
        unreadable = self._unreadable()
        if unreadable or not self.device_accessible:
            raise AttributeError(unreadable or f"{self!r} is not accessible from a device")
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, self._read_only(on_host=False)),
            "strides": None,
            "version": 3,
            # 0 is not allowed there: the legacy default stream is 1.
            "stream": self.stream.handle or 1,
        }

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Version 3 of numpy's array interface, so that ``numpy.asarray`` makes no copy of host memory."""
        self._check_usable()
        if not self.host_accessible:
            raise AttributeError(f"{self!r} is not accessible from the host")
        return numpy_interface(self)

    def __dlpack_device__(self) -> tuple[int, int]:
        """The DLPack device type and number."""
        if not self.host_accessible:
            return (dlpack.CUDA, self.location.id)
        if not self.location.on_host:
            return (dlpack.CUDA_MANAGED, self.stream.device.ordinal)
        return (dlpack.CUDA_HOST if self.device_accessible else dlpack.CPU, 0)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """The memory as a DLPack capsule of flat ``uint8``, without a copy.

        ``stream`` is what the Python array API standard says: None or 1 for the legacy default stream, 2 for the
        per-thread one, -1 for no ordering, else a driver handle. It is made to wait for what our stream has queued.

        Raises
        ------
        BufferError
            The memory cannot be read, or only a copy would do.
        """
        if stream == -1 and dl_device is None and not copy:
            ptr = self._ptr
            if ptr is not None:
                nbytes, home = self._nbytes, self._home
                if nbytes and home in _cuda_windows:
                    first = int(ptr) - 1
                    part: Any = _cuda_windows[home][first : first + nbytes]
                    part.memory = self
                    return part.__dlpack__() if max_version is None else part.__dlpack__(max_version=max_version)
        part = self._ordered_part(stream, dl_device, copy)
        return part.__dlpack__() if max_version is None else part.__dlpack__(max_version=max_version)

    def _ordered_part(self, stream: int | None, dl_device: tuple[int, int] | None, copy: bool | None) -> Any:
        """An array of bytes that DLPack exports as the memory; ``stream`` waits for ours, see :meth:`__dlpack__`."""
        self._check_usable()
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
        on_host = device[0] == dlpack.CPU
        if not on_host and stream != -1:
            if stream == 0:
                raise ValueError("stream=0 is ambiguous: the legacy default stream is 1, the per-thread one 2")
            ours = self.stream
            handle = dlpack.LEGACY_STREAM if stream is None else stream
            if handle != ours.handle:
                order_handle_after(handle, ours)
                # A consumer that names no stream for memory that the host can reach, such as NumPy, is the host.
                if self._session.listener is not None and not (stream is None and self.host_accessible):
                    self.used(Stream.of_handle(ours.device, handle, self), write=False)
        # A consumer that names no stream may use the address at once.
        unordered = on_host or stream == -1 or (stream is None and self.host_accessible)
        part = dlpack.part(self, self.address if unordered else self._at, self.nbytes, device)
        if self._read_only(on_host=on_host):
            part.flags.writeable = False
        return part

    @property
    def _session(self) -> Session:
        return self.stream._session

    @property
    def _at(self) -> int:
        """:attr:`address`, for work that a stream orders: after :meth:`_await_on`."""
        return self.address

    def _await_on(self, stream: Stream) -> None:
        """Have a stream wait for contents that are still to come, where :attr:`stream` alone waits for them so far."""

    def _check_usable(self) -> None:
        """Raise where the memory is there but cannot be used now; memory that is gone has no address."""

    def _unreadable(self) -> str:
        """Why ordinary reads mean nothing, as those of a multicast object's mapping; empty where they do."""
        return ""

    def _resident_on(self) -> int | None:
        """The device that copies between devices name as the owner; None where the address is enough."""
        location = self.location
        named = location.type is MemLocationType.DEVICE and location.seen
        return location.id if named and not self.host_accessible else None

    def _read_only(self, on_host: bool) -> bool:
        """Whether the CPU, or else the stream's device, may only read the memory."""
        return False

    def _ordered_on(self, stream: StreamLike | None) -> Stream:
        self._check_usable()
        ordered = self.stream if stream is None else as_stream(stream, self._session)
        ordered._checked_raw()
        return ordered

    def _about(self) -> Iterator[Row]:
        yield "size", mib(self.nbytes)
        yield "address", f"{self._at:#x}"
        yield "memory of", place(self.location)
        yield "stream", self.stream

    def _access_hint(self, stream: Stream) -> str:
        """Why the driver may refuse to let a stream's device use the memory."""
        if self.location == stream.device.location:
            return ""
        return (
            f"the memory is at {self.location} and the stream runs on device {stream.device.ordinal}; "
            f"grant it access: pool.set_access(device, MemAccess.READWRITE)"
        )


class BufferView(Memory):
    """A range of other memory, which it keeps alive. It is valid until that memory is freed."""

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
    def _home(self) -> int | None:  # type: ignore[override]
        return self._parent._home

    @property
    def address(self) -> int:
        """Address of the first byte.

        Raises
        ------
        ClosedError
            The memory was freed, or has shrunk to less than this.
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
        """The stream of the memory it is a view of."""
        return self._parent.stream

    @property
    def owner(self) -> object:
        """The memory it is a view of."""
        return self._parent

    @property
    def location(self) -> MemLocation:
        """Location of the memory."""
        return self._parent.location

    @property
    def host_accessible(self) -> bool:
        """Whether the CPU may use the memory."""
        return self._parent.host_accessible

    @property
    def device_accessible(self) -> bool:
        """Whether the stream's device may use the memory."""
        return self._parent.device_accessible

    def _check_usable(self) -> None:
        self._parent._check_usable()

    def _unreadable(self) -> str:
        return self._parent._unreadable()

    def _resident_on(self) -> int | None:
        return self._parent._resident_on()

    def _read_only(self, on_host: bool) -> bool:
        return self._parent._read_only(on_host)

    def _access_hint(self, stream: Stream) -> str:
        return self._parent._access_hint(stream)

    def _about(self) -> Iterator[Row]:
        yield from super()._about()
        yield "part", f"bytes {self._offset:,} to {self._offset + self._nbytes:,} of {self._parent!r}"

    def _text(self) -> str:
        return f" of bytes {self._offset}:{self._offset + self._nbytes} of {self._parent!r}"


class HasCudaArrayInterface(Protocol):
    """An array of another library in device memory."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The array's address, type and shape."""


class TypedView(BufferView, Generic[ScalarT]):
    """Memory as a C-contiguous array of NumPy's type ``ScalarT``: what :meth:`Memory.view_as` makes.

    Fills, copies and indices are of elements; :attr:`bytes` is the same memory as bytes. The array interfaces and
    DLPack export its type and shape, and :func:`streamalloc.ipc.share` sends them along.

    Examples
    --------
    >>> weights = pool.allocate(4 * 6 * 4, stream).view_as(np.float32, (4, 6))
    >>> weights.fill(1.5)
    >>> weights[1:3].copy_from(np.zeros((2, 6), np.float32))
    >>> weights[0].shape, weights.bytes[0:8].nbytes
    ((6,), 8)
    """

    __slots__ = ("dtype", "shape")

    dtype: np.dtype[ScalarT]
    """The type of the elements."""
    shape: tuple[int, ...]
    """The sizes of the dimensions, in C order."""

    def __init__(self, parent: Memory, dtype: np.dtype[ScalarT], shape: tuple[int, ...]) -> None:
        super().__init__(parent, 0, parent.nbytes)
        self.dtype = dtype
        self.shape = shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Size of an element in bytes."""
        return self.dtype.itemsize

    @property
    def bytes(self) -> BufferView:
        """The same memory as bytes, which fills and copies take as such."""
        return BufferView(self, 0, self._nbytes)

    def fill(self, value: Any, stream: StreamLike | None = None, *, width: None = None) -> None:  # type: ignore[override]
        """Write ``value`` to every element (``cuMemsetD8Async``, ``cuMemsetD16Async``, ``cuMemsetD32Async``).

        Elements that do not repeat a pattern of 1, 2 or 4 bytes, such as most of ``float64``, are copied from the first
        one, twice as many each time (``cuMemcpyAsync``).

        Parameters
        ----------
        value
            A number or another value that ``dtype`` has; of a structure a tuple or a NumPy scalar.
        stream
            The stream to queue on (default: the memory's own).
        width
            For bytes only: :meth:`Memory.fill` of :attr:`bytes`.

        Raises
        ------
        TypeError, ValueError
            ``dtype`` has no such value: 300 in ``uint8``, 0.5 in ``int32``.
        """
        if width is not None:
            raise TypeError(f"width={width!r}: elements of {self.dtype} have one; .bytes.fill takes a width")
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
    ) -> None:
        """Copy all elements to ``target``, of the same type and shape; otherwise as :meth:`Memory.copy_to`.

        Memory without a type counts as bytes.

        Raises
        ------
        TypeError
            The target has another type of elements: take :meth:`Memory.view_as` of it, or :attr:`bytes` of this.
        ValueError
            It has another shape.
        """
        self._check_form(target, "target")
        super().copy_to(target, stream)

    def copy_from(
        self,
        source: TypedView[ScalarT] | npt.NDArray[ScalarT] | HasCudaArrayInterface,
        stream: StreamLike | None = None,
    ) -> None:
        """Copy all elements from ``source``, of the same type and shape; otherwise as :meth:`copy_to`."""
        self._check_form(source, "source")
        super().copy_from(source, stream)

    def _check_form(self, other: object, name: str) -> None:
        form = _form_of(other)
        if form is None:
            return  # of no kind that is copied, which the copy says
        dtype, shape = form
        if dtype != self.dtype:
            raise TypeError(f"{name} has elements of {dtype}, not of {self.dtype}; .bytes copies whatever they are")
        if shape != self.shape:
            raise ValueError(f"{name} has the shape {shape}, not {self.shape}")

    def __getitem__(self, item: Index) -> TypedView[ScalarT]:
        offset, shape = part_of(self.shape, self.itemsize, item)
        return TypedView(BufferView(self, offset, math.prod(shape) * self.itemsize), self.dtype, shape)

    def view(self, start: int = 0, stop: int | None = None) -> TypedView[ScalarT]:
        """The elements from ``start`` to ``stop`` of the first dimension; also written ``memory[start:stop]``."""
        return self[start:stop]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without dimensions has no length")
        return self.shape[0]

    def _interface_type(self) -> dict[str, Any]:
        found = interface_type(self.dtype)
        if found is None:
            raise AttributeError(
                f"array interfaces have no name for {self.dtype}: export view_as('V{self.itemsize}') and view it there"
            )
        return found | {"shape": self.shape}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the CUDA array interface, to be used in order after :attr:`stream`."""
        return super().__cuda_array_interface__ | self._interface_type()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Version 3 of numpy's array interface, so that ``numpy.asarray`` makes no copy of host memory."""
        return super().__array_interface__ | self._interface_type()

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[ScalarT]:
        """The memory itself as a numpy array, as :meth:`as_array`, also of types that array interfaces cannot name."""
        return np.array(self.as_array(), dtype=dtype, copy=copy)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """The memory as a DLPack capsule, without a copy; see :meth:`Memory.__dlpack__`.

        Raises
        ------
        BufferError
            Also where DLPack has no such type.
        """
        part = self._ordered_part(stream, dl_device, copy).view(self.dtype).reshape(self.shape)
        part.memory = self
        try:
            return part.__dlpack__() if max_version is None else part.__dlpack__(max_version=max_version)
        except BufferError as error:
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
        """The memory itself as a numpy array, where the host can reach it; of its own type and shape by default."""
        form = (self.dtype, self.shape) if dtype is None and shape is None else (dtype or self.dtype, shape)
        return self._parent.as_array(*form)

    def _text(self) -> str:
        return f" {self.dtype} {self.shape} of {self._parent!r}"


def _form_of(other: Any) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    """The type and shape of what is copied; None where it is nothing of the kind."""
    if isinstance(other, Memory):
        dtype = getattr(other, "dtype", None)
        return (np.dtype(np.uint8), (other.nbytes,)) if dtype is None else (dtype, other.shape)  # type: ignore[attr-defined]
    interface = getattr(other, "__cuda_array_interface__", None)
    if interface is not None:
        kind = interface["typestr"]
        # The one field without a name stands for the type itself.
        described = [field for field in interface.get("descr") or () if field[0]]
        return np.dtype(interface["descr"] if described else kind), tuple(interface["shape"])
    try:
        array = other if isinstance(other, np.ndarray) else np.asarray(memoryview(other))
    except TypeError:
        return None
    return array.dtype, array.shape


def _array_form(memory: Memory, dtype: npt.DTypeLike, shape: tuple[int, ...] | None) -> tuple[Any, tuple[int, ...]]:
    """A type and a shape that memory has exactly."""
    kind = np.dtype(dtype)
    if kind.subdtype is not None:
        raise TypeError(f"dtype={dtype!r} is an array of {kind.base}: let shape say that")
    if kind.hasobject or not kind.itemsize:
        raise TypeError(f"dtype={dtype!r}: memory of devices has elements of a size, and no Python objects")
    count, rest = divmod(memory.nbytes, kind.itemsize)
    sizes = [-1] if shape is None else [operator.index(size) for size in shape]
    if -1 in sizes:
        place = sizes.index(-1)
        others = math.prod(sizes[:place] + sizes[place + 1 :])
        sizes[place] = count // others if others > 0 else -1
    if rest or min(sizes, default=0) < 0 or math.prod(sizes) != count:
        raise ValueError(f"shape={shape} of {kind} does not fill the {memory.nbytes} bytes of {memory!r}")
    if memory._at % kind.alignment:
        raise ValueError(f"{memory!r} is not aligned for {kind}, which lies at multiples of {kind.alignment} bytes")
    return kind, tuple(sizes)


def numpy_interface(memory: Memory, *, on_host: bool = True) -> dict[str, Any]:
    """Version 3 of numpy's array interface for flat bytes, as the host or else a device may use them."""
    # numpy 2.2 takes the address 0 of empty memory for a missing one; that of no bytes is never used.
    data = (memory.address or 1, memory._read_only(on_host))
    return {"shape": (memory.nbytes,), "typestr": "|u1", "data": data, "version": 3}


def _pattern(value: int | bytes | np.generic, width: int | None) -> tuple[int, int]:
    """A fill pattern as the unsigned number that the driver takes, and its width in bytes."""
    if isinstance(value, np.generic):
        value = value.tobytes()
    if isinstance(value, (bytes, bytearray)):
        if len(value) not in _FILLS or width not in (None, len(value)):
            raise ValueError(f"value={value!r}: a pattern has 1, 2 or 4 bytes{f', and width={width}' if width else ''}")
        return int.from_bytes(value, "little"), len(value)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"value must be an integer, bytes or a numpy scalar, not {type(value).__name__} ({value!r})")
    width = 1 if width is None else width
    if width not in _FILLS:
        raise ValueError(f"width={width!r}: allowed are 1, 2 and 4 bytes")
    number = operator.index(value)
    if not -(1 << 8 * width - 1) <= number < 1 << 8 * width:
        raise ValueError(f"value={number} does not fit a pattern of {width} byte{'s' if width > 1 else ''}")
    return number % (1 << 8 * width), width


class CopySide:
    """One side of a copy: address, size, whose memory it is, and what keeps it alive."""

    __slots__ = ("address", "after", "keep", "nbytes", "ordinal")

    def __init__(self, address: int, nbytes: int, ordinal: int | None, keep: object, after: int | None = None) -> None:
        self.address: int = address
        self.nbytes: int = nbytes
        self.ordinal: int | None = ordinal
        """The device that owns the memory; None for the host's, and where it is not known."""
        self.keep: object = keep
        self.after: int | None = after
        """The handle of a stream after whose work another library's memory may be used; None for at once."""

    @classmethod
    def of(cls, memory: Memory) -> Self:
        """Memory of ours."""
        memory._check_usable()
        return cls(memory._at, memory.nbytes, memory._resident_on(), memory)

    @classmethod
    def readable(cls, source: object, session: Session) -> Self:
        """Source of a copy: memory of ours, of another library, or an object with the buffer protocol."""
        return cls._of_argument(source, session, "source", writable=False)

    @classmethod
    def writable(cls, target: object, session: Session) -> Self:
        """Target of a copy."""
        return cls._of_argument(target, session, "target", writable=True)

    @classmethod
    def _of_argument(cls, other: object, session: Session, name: str, *, writable: bool) -> Self:
        if isinstance(other, Memory):
            if other._session is not session:
                raise ValueError(f"{name} {other!r} belongs to another driver")
            side = cls.of(other)
            unreadable = "" if writable else other._unreadable()
            if unreadable:
                raise ValueError(unreadable)
            if writable and other.location.on_host and other._read_only(on_host=True):
                raise ValueError(f"{name} {other!r} is read-only to the host")
            return side
        interface = getattr(other, "__cuda_array_interface__", None)
        if interface is not None:
            return cls._of_interface(other, interface, name, writable)
        try:
            array = other if isinstance(other, np.ndarray) else np.asarray(memoryview(other))  # type: ignore[arg-type]
        except TypeError as error:
            raise TypeError(
                f"{name} must be a Memory, have __cuda_array_interface__ or the buffer protocol, "
                f"not {type(other).__name__}"
            ) from error
        if not array.flags.c_contiguous:
            raise ValueError(f"{name} is not contiguous: copy it to a contiguous array first")
        if writable and not array.flags.writeable:
            raise ValueError(f"{name} is read-only")
        return cls(array.ctypes.data, array.nbytes, None, array)

    @classmethod
    def _of_interface(cls, other: object, interface: dict[str, Any], name: str, writable: bool) -> Self:
        address, read_only = interface["data"]
        itemsize = np.dtype(interface["typestr"]).itemsize
        shape = tuple(interface["shape"])
        strides = interface.get("strides")
        nbytes = int(np.prod(shape, dtype=np.int64)) * itemsize
        if strides is not None:
            dense = tuple(int(np.prod(shape[i + 1 :], dtype=np.int64)) * itemsize for i in range(len(shape)))
            if tuple(strides) != dense and nbytes:
                raise ValueError(f"{name} is not contiguous: strides {strides} of shape {shape}")
        if writable and read_only:
            raise ValueError(f"{name} is read-only")
        return cls(int(address), nbytes, None, other, interface.get("stream"))


def check_usable(memory: Memory) -> None:
    """Raise where memory cannot be used now: it was freed, evicted or unmapped, or nobody has access to it."""
    memory._check_usable()


def viewed(memory: Memory) -> tuple[Memory, int]:
    """The memory that a view is a view of, and where the view begins in it; of other memory itself and 0."""
    offset = 0
    while isinstance(memory, BufferView):
        offset += memory._offset
        memory = memory._parent
    return memory, offset


def _copied(ours: Memory, other: Any, stream: StreamLike | None, writing: bool) -> bool:
    """The fast path of copies, by which ``ours`` is written, or read; whether it was taken."""
    ptr, home = ours._ptr, ours._home
    if ptr is None or home is None:
        return False
    own, nbytes = ours._stream, ours._nbytes
    session = own._session
    ordered: Any = own if stream is None else stream
    if type(ordered) is not Stream:
        ordered = kept_stream(ordered, session)
        if ordered is None:
            return False
    handle = queue_handle(ordered, session)
    # An empty array has no address that the driver would take.
    if handle is None or not nbytes or ordered.device.ordinal != home:
        return False
    if type(other) is _Array:
        flags = other.flags
        if other.nbytes != nbytes or not flags.c_contiguous:
            return False
        if writing:
            result = session.cuMemcpyHtoDAsync(ptr, other, nbytes, handle)[0]
        elif flags.writeable:
            result = session.cuMemcpyDtoHAsync(other, ptr, nbytes, handle)[0]
        else:
            return False
    elif type(other) in _kinds:
        there = other._ptr
        if there is None or other._home != home or other._nbytes != nbytes or other._stream._session is not session:
            return False
        to, of = (ptr, there) if writing else (there, ptr)
        result = session.cuMemcpyAsync(to, of, nbytes, handle)[0]
    else:
        return False
    if result and (result != _WRONG_CONTEXT or int(session.call("cuCtxGetCurrent")) in (0, int(session.context(home)))):
        name = "cuMemcpyAsync" if type(other) in _kinds else "cuMemcpyHtoDAsync" if writing else "cuMemcpyDtoHAsync"
        raise error_from(result, name, ours._access_hint(ordered))
    return not result


def copy_bytes(target: CopySide, source: CopySide, stream: Stream) -> None:
    """Queue a copy. Between memory of other devices than the stream's, the peer call is used, which needs no access."""
    if target.nbytes != source.nbytes:
        raise ValueError(f"source has {source.nbytes} bytes and target {target.nbytes}: take a view of the larger one")
    if not target.nbytes:
        return
    raw = stream._checked_raw()
    session = stream._session
    for side in (target, source):
        if type(side.keep) in _kinds:
            side.keep._await_on(stream)  # type: ignore[attr-defined]
        elif side.after is not None and side.after != stream.handle:
            stream.wait(Stream.of_handle(stream.device, side.after, side.keep))
    if stream._capture is not None:
        stream._capture.graph.kept += (target.keep, source.keep)
    # Copies of pool memory are refused unless the stream's own context is the current one (programming guide 4.3.5.1).
    with stream.device.current():
        owners = (target.ordinal, source.ordinal)
        if None not in owners and owners != (stream.device.ordinal, stream.device.ordinal):
            to, of = (session.context(ordinal) for ordinal in owners if ordinal is not None)
            session.call("cuMemcpyPeerAsync", target.address, to, source.address, of, target.nbytes, raw)
        else:

            def hint() -> str:
                sides = (side.keep for side in (target, source) if isinstance(side.keep, Memory))
                return next(filter(None, (memory._access_hint(stream) for memory in sides)), "")

            session.call("cuMemcpyAsync", target.address, source.address, target.nbytes, raw, hint=hint)
