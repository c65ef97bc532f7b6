"""Memory and its operations: fill, copy, view, and export to other libraries without a copy.

:class:`Memory` is the base class of all kinds of memory. A kind defines its address, size, location and stream
(:mod:`~streamalloc.core.memory_base`), and inherits the operations. :class:`BufferView` is a range of other memory, and
:class:`TypedView` one with a type and a shape.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import numpy as np

from streamalloc.core.array_interfaces import Exportable, HasCudaArrayInterface, array_form, form_of
from streamalloc.core.copies import Copyable, CopyOptions
from streamalloc.core.errors import ClosedError
from streamalloc.core.memory_base import Migrating
from streamalloc.core.properties import MemLocation
from streamalloc.core.stream import Stream, StreamLike
from streamalloc.formats.arrays import Index, fill_steps, interface_type, part_of, to_element
from streamalloc.formats.html import Row

if TYPE_CHECKING:
    import numpy.typing as npt

ScalarT = TypeVar("ScalarT", bound=np.generic)
OtherT = TypeVar("OtherT", bound=np.generic)


class Memory(Copyable, Exportable, Migrating):
    """A range of bytes that devices, the host or both can reach.

    :class:`Buffer`, :class:`BufferView` and :class:`TypedView` show its use.

    Every operation is queued on a stream: the given one, or the memory's own. The host does not wait, except in the
    driver itself: a copy into pageable host memory returns once it is complete.
    """

    __slots__ = ()

    @overload
    def view_as(
        self, dtype: type[OtherT] | np.dtype[OtherT], shape: tuple[int, ...] | None = None
    ) -> TypedView[OtherT]: ...
    @overload
    def view_as(self, dtype: npt.DTypeLike, shape: tuple[int, ...] | None = None) -> TypedView[Any]: ...
    def view_as(self, dtype: npt.DTypeLike, shape: tuple[int, ...] | None = None) -> TypedView[Any]:
        """View the memory as an array of a type and shape. Other libraries then get this type and shape.

        Parameters
        ----------
        dtype
            The NumPy type of the elements.
        shape
            The sizes of the dimensions, in C order. One of them may be -1: it is computed from the size of the memory.
            Default: one dimension.

        Raises
        ------
        TypeError, ValueError
            The element type holds Python objects, or the elements do not fill the memory exactly or are not aligned.
        """
        kind, sizes = array_form(self, dtype, shape)
        return TypedView(self, kind, sizes)

    def view(self, start: int = 0, stop: int | None = None) -> BufferView:
        """A view of the bytes from ``start`` to ``stop``; also written ``memory[start:stop]``."""
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


class BufferView(Memory):
    """A range of other memory, which it keeps alive. The range is valid until that memory is freed.

    A slice of memory makes it: ``buffer[:4096]``, or :meth:`Memory.view`.
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
            The memory was freed, or no longer covers this range.
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


class TypedView(BufferView, Generic[ScalarT]):
    """Memory as a C-contiguous array of the NumPy type ``ScalarT``; the result of :meth:`Memory.view_as`.

    Fills, copies and indices count elements; :attr:`bytes` is the same memory as bytes. The array interfaces, DLPack
    and :func:`streamalloc.ipc.share` export the type and shape.

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
        """The same memory as bytes; its fills and copies count bytes."""
        return BufferView(self, 0, self._nbytes)

    def fill(self, value: Any, stream: StreamLike | None = None, *, width: None = None) -> None:  # type: ignore[override]
        """Write ``value`` to every element (``cuMemsetD8Async``, ``cuMemsetD16Async``, ``cuMemsetD32Async``).

        Some values, such as most of ``float64``, are not a repeated pattern of 1, 2 or 4 bytes. For these the first
        element is written and then copied, doubling the count each time (``cuMemcpyAsync``).

        Parameters
        ----------
        value
            A value of ``dtype``, such as a number; for a structured type a tuple or a NumPy scalar.
        stream
            The stream to queue on (default: the memory's own).
        width
            Not supported here: use :meth:`Memory.fill` of :attr:`bytes`.

        Raises
        ------
        TypeError, ValueError
            ``dtype`` has no such value: 300 in ``uint8``, 0.5 in ``int32``.
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
        """Copy all elements to ``target``, which has the same type and shape. Otherwise as :meth:`Memory.copy_to`.

        Memory without a type counts as bytes.

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
        """Copy all elements from ``source``, which has the same type and shape. Errors as for :meth:`copy_to`."""
        self._check_form(source, "source")
        super().copy_from(source, stream, options=options)

    def _check_form(self, other: object, name: str) -> None:
        form = form_of(other)
        if form is None:
            return  # cannot be copied; the copy raises
        dtype, shape = form
        if dtype != self.dtype:
            raise TypeError(f"{name} has elements of {dtype}, not of {self.dtype}; .bytes copies whatever they are")
        if shape != self.shape:
            raise ValueError(f"{name} has the shape {shape}, not {self.shape}")

    def __getitem__(self, item: Index) -> TypedView[ScalarT]:
        offset, shape = part_of(self.shape, self.itemsize, item)
        return TypedView(BufferView(self, offset, math.prod(shape) * self.itemsize), self.dtype, shape)

    def view(self, start: int = 0, stop: int | None = None) -> TypedView[ScalarT]:
        """A view of the elements from ``start`` to ``stop`` of the first dimension; also written
        ``memory[start:stop]``.
        """
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
        """Version 3 of the CUDA array interface. A user orders its work after :attr:`stream`."""
        return super().__cuda_array_interface__ | self._interface_type()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Version 3 of numpy's array interface: ``numpy.asarray`` then makes no copy of host memory."""
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
        """Export the memory as a DLPack capsule, without a copy; see :meth:`Memory.__dlpack__`.

        Raises
        ------
        BufferError
            As for :meth:`Memory.__dlpack__`, or DLPack has no such type.
        """
        part = self._ordered_part(stream, dl_device, copy).view(self.dtype).reshape(self.shape)
        part.memory = self
        try:
            return part.__dlpack__(max_version=max_version)
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
        """Return a numpy array of host-accessible memory, without a copy; by default of this type and shape."""
        form = (self.dtype, self.shape) if dtype is None and shape is None else (dtype or self.dtype, shape)
        return self._parent.as_array(*form)

    def _text(self) -> str:
        return f" {self.dtype} {self.shape} of {self._parent!r}"


def check_usable(memory: Memory) -> None:
    """Raise if memory cannot be used now: it was freed, evicted or unmapped, or no device has access."""
    memory._check_usable()


def viewed(memory: Memory) -> tuple[Memory, int]:
    """Return the memory under a view, and the view's offset in it. Memory that is no view gives itself and 0."""
    offset = 0
    while isinstance(memory, BufferView):
        offset += memory._offset
        memory = memory._parent
    return memory, offset
