"""Array interfaces of memory: numpy arrays, ``__cuda_array_interface__``, ``__array_interface__`` and DLPack."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from streamalloc.core.memory_base import MemoryBase
from streamalloc.core.stream import LEGACY, Stream
from streamalloc.formats.arrays import (
    CPU,
    CUDA,
    CUDA_HOST,
    CUDA_MANAGED,
    exported,
    host_array,
    interface_form,
    windows,
)

if TYPE_CHECKING:
    import numpy.typing as npt

_WRITABLE = 1  # PyBUF_WRITABLE


class HasCudaArrayInterface(Protocol):
    """An array of another library in device memory."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The array's address, type and shape."""


class Exportable(MemoryBase):
    """Memory that numpy and other libraries can use without a copy."""

    __slots__ = ()

    def as_array(self, dtype: npt.DTypeLike = np.uint8, shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        """Return a numpy array of the memory, without a copy; the host must have access.

        The array keeps this object alive, but :meth:`~streamalloc.Buffer.free` still frees the memory. Synchronise with
        the stream first: the allocation or queued copies may be pending. The checker records the call as a read by the
        host.

        Raises
        ------
        ValueError
            The host cannot reach the memory, or ``dtype`` and ``shape`` do not fit its size.
        """
        flat = self._on_host(ValueError).view(dtype)
        return flat if shape is None else flat.reshape(shape)

    def _on_host(self, refusal: type[Exception]) -> npt.NDArray[np.uint8]:
        """The bytes as a host array; raises ``refusal`` if the host cannot access them."""
        self._check_usable()
        if not self.host_accessible:
            raise refusal(f"{self!r} is in device memory, which the host cannot reach: copy it with copy_to")
        return np.asarray(_Interface(self))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return the memory as a numpy array, without a copy. This works for all element types."""
        return np.array(self.as_array(), dtype=dtype, copy=copy)

    def __buffer__(self, flags: int) -> memoryview:
        """The bytes for ``memoryview`` and other users of the buffer protocol (Python 3.12 and newer), if the host has
        access.

        Synchronise with the stream first, as for :meth:`as_array`.

        Raises
        ------
        BufferError
            The host has no access, or a writable buffer was requested and the host has read access only.
        """
        view: memoryview = self._on_host(BufferError).data
        if flags & _WRITABLE and view.readonly:
            raise BufferError(f"{self!r} is read-only to the host")
        return view

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the CUDA array interface, as flat bytes. A user orders its work after :attr:`stream`."""
        ptr = self._ptr
        if ptr is not None:
            stream = self._stream
            # The first time the stream is marked as lent. A listener must be notified each time.
            if (
                stream.direct is not None
                and stream.capturable
                and self._ordinal == stream.device.ordinal
                and stream._session.listener is None
            ):
                return _flat_bytes(self._nbytes, int(ptr), False, stream._number)
        self._check_usable()
        unreadable = self._unreadable()
        if unreadable or not self.device_accessible:
            raise AttributeError(unreadable or f"{self!r} is not accessible from a device")
        # The interface does not allow 0; 1 is the legacy default stream.
        return _flat_bytes(self.nbytes, self.address, self._read_only(on_host=False), self.stream.handle or LEGACY)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Version 3 of numpy's array interface: ``numpy.asarray`` then makes no copy of host memory."""
        self._check_usable()
        if not self.host_accessible:
            raise AttributeError(f"{self!r} is not accessible from the host")
        self.used(write=False, on_host=True)
        # numpy 2.2 takes an address of 0 as missing. Empty memory is never accessed, so any other address will do.
        data = (self.address or 1, self._read_only(on_host=True))
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": data, "version": 3}

    def __dlpack_device__(self) -> tuple[int, int]:
        """The DLPack device type and number."""
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
        """Export the memory as a DLPack capsule of flat ``uint8``, without a copy.

        ``stream`` follows the Python array API standard: None or 1 for the legacy default stream, 2 for the per-thread
        one, -1 for no ordering, else a driver handle. It waits for the queued work of :attr:`stream`.

        Raises
        ------
        BufferError
            The memory cannot be read, or the request needs a copy.
        """
        if stream == -1 and dl_device is None and not copy:
            ptr = self._ptr
            if ptr is not None:
                nbytes, window = self._nbytes, windows.get((CUDA, self._ordinal))
                if nbytes and window is not None:
                    first = int(ptr) - 1
                    part: Any = window[first : first + nbytes]
                    part.memory = self
                    return part.__dlpack__(max_version=max_version)
        return self._ordered_part(stream, dl_device, copy).__dlpack__(max_version=max_version)

    def _ordered_part(self, stream: int | None, dl_device: tuple[int, int] | None, copy: bool | None) -> Any:
        """Return an array of bytes that DLPack exports as this memory. Orders ``stream`` as :meth:`__dlpack__` does."""
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
        on_host = device[0] == CPU
        # A consumer that names no stream for host-accessible memory, such as NumPy, is the host. It may access the
        # memory at once.
        of_host = on_host or (stream is None and self.host_accessible)
        if not on_host and stream != -1:
            if stream == 0:
                raise ValueError("stream=0 is ambiguous: the legacy default stream is 1, the per-thread one 2")
            ours = self.stream
            handle = LEGACY if stream is None else stream
            if handle != ours._number:
                Stream.of_handle(ours.device, handle, ours).wait(ours)
                if self._session.listener is not None and not of_host:
                    self.used(Stream.of_handle(ours.device, handle, self), write=False)
        if of_host:
            self.used(write=False, on_host=True)
        address = self.address if of_host or stream == -1 else self._at
        part = exported(self, address, self.nbytes, device)
        if self._read_only(on_host=on_host):
            part.flags.writeable = False
        return part


def _flat_bytes(nbytes: int, address: int, read_only: bool, stream: int) -> dict[str, Any]:
    data = address, read_only
    return {"shape": (nbytes,), "typestr": "|u1", "data": data, "strides": None, "version": 3, "stream": stream}


class _Interface:
    """Memory with an array interface but no buffer protocol. NumPy tries the buffer protocol first, which uses this
    array.
    """

    def __init__(self, memory: Exportable) -> None:
        self._memory = memory
        self.__array_interface__: dict[str, Any] = memory.__array_interface__


def form_of(other: Any) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    """The type and shape of memory or of an array; None for other objects."""
    if isinstance(other, MemoryBase):
        dtype = getattr(other, "dtype", None)
        return (np.dtype(np.uint8), (other.nbytes,)) if dtype is None else (dtype, other.shape)  # type: ignore[attr-defined]
    interface = getattr(other, "__cuda_array_interface__", None)
    if interface is not None:
        return interface_form(interface)
    array = host_array(other)
    return None if array is None else (array.dtype, array.shape)


def array_form(memory: MemoryBase, dtype: npt.DTypeLike, shape: tuple[int, ...] | None) -> tuple[Any, tuple[int, ...]]:
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
        form = f"shape={shape} of {kind}" if shape is not None else f"no number of {kind} (each {kind.itemsize} bytes)"
        verb = "does not fill" if shape is not None else "fills"
        raise ValueError(f"{form} {verb} the {memory.nbytes} bytes of {memory!r}; memory[start:stop] is a part of it")
    if memory._at % kind.alignment:
        raise ValueError(f"{memory!r} is not aligned for {kind}, which lies at multiples of {kind.alignment} bytes")
    return kind, tuple(sizes)
