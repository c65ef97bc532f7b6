"""Allocators without a driver's pool: plain memory of ``cuMemAlloc`` and its like, and memory of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from streamalloc.core.errors import undoing
from streamalloc.core.internal import (
    Allocator,
    Buffer,
    Device,
    HandleEnd,
    Memory,
    Stream,
    StreamLike,
    as_stream,
    check_location,
    deferred_queue,
    location_of,
    raw_handle,
    refuse_capture,
    session_for,
)
from streamalloc.core.properties import MemLocation, checked_size
from streamalloc.driver.internal import cuda
from streamalloc.pool.borrowed import PlainBuffer, PlainEnd, end_plain, number_of_handle

if TYPE_CHECKING:
    from streamalloc.driver import Driver

Allocate: TypeAlias = "Callable[[int, Stream], Memory | int]"
Free: TypeAlias = Callable[[int, int, Stream], object]

_GLOBAL = int(cuda.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)
_PORTABLE, _WRITE_COMBINED = 0x1, 0x4  # CU_MEMHOSTALLOC_*


class _Source(Allocator):
    """Base of allocators that do not free by ``cuMemFreeAsync``: each buffer has a :class:`PlainEnd`."""

    def __init__(self, where: Device | MemLocation, managed: bool, driver: Driver | None) -> None:
        self.location = location_of("where", where)
        self._managed = bool(managed)
        session = session_for(where, driver)
        check_location(session, self.location)
        self._bind(session, _obtain, None, end_plain)

    def allocate(self, nbytes: int | str, stream: StreamLike) -> Buffer:
        """Allocate memory at once. ``stream`` orders only the end of the memory, and operations that name no stream.

        Parameters
        ----------
        nbytes
            Size in bytes, at least 1.
        stream
            The stream of operations that name no other, and after whose work the memory ends.

        Raises
        ------
        OutOfMemoryError
            There is no memory.
        CaptureError
            The stream is being captured.
        TypeError, ValueError
            ``nbytes`` is not a size, or ``stream`` is not a stream.
        """
        return self._buffer(checked_size("nbytes", nbytes), as_stream(stream, self._session))

    def _buffer(self, nbytes: int, ordered: Stream) -> Buffer:
        if not nbytes:
            raise ValueError("nbytes=0: only pools have empty buffers")
        refuse_capture(ordered, self._alloc_name, "only pools of device memory allocate in a capture")
        _, end = self._alloc(nbytes, (self, ordered), raw_handle(ordered))
        return PlainBuffer(end, nbytes)

    def _end_of_new(self, nbytes: int, stream: Stream) -> PlainEnd:
        """Obtain ``nbytes`` bytes, and return the item that ends them after the work of ``stream``. Raises
        OutOfMemoryError, or what the function of a :class:`CallbackAllocator` raises.
        """
        raise NotImplementedError

    @property
    def managed(self) -> bool:
        """Whether the memory migrates between devices and host."""
        return self._managed

    def _pool_of(self, buffer: Buffer) -> object:
        return self

    def _reachable_from(self, device: Device) -> bool:
        return self._managed or self.location in (device.location, MemLocation.host())

    def _text(self) -> str:
        return f" {'managed ' if self._managed else ''}{self.location}"


def _obtain(nbytes: int, request: tuple[_Source, Stream], _: object) -> tuple[Any, PlainEnd]:
    """Obtain memory, in place of ``cuMemAllocFromPoolAsync`` and with its arguments and answer. ``request``, in place
    of the pool's handle: the allocator and the stream.

    This is not a method: the allocator keeps the function, and a bound method would form a cycle with the
    allocator.
    """
    source, stream = request
    return cuda.CUresult.CUDA_SUCCESS, source._end_of_new(nbytes, stream)


class PlainMemory(_Source):
    """Memory that is allocated at once and freed after the host has waited: ``cuMemAlloc``, ``cuMemAllocManaged``,
    ``cuMemHostAlloc``.

    For code that needs such memory: legacy sharing (``cuIpcGetMemHandle``), registration that takes no memory of pools,
    and managed memory if there are no managed pools. Otherwise take a :class:`MemoryPool`, which does not wait. ::

        with sa.PlainMemory(device).allocate(2 << 20, stream) as buffer:
            buffer.fill(0)

    ``buffer.free()`` waits for the stream (``cuMemFree``, ``cuMemFreeHost``). A dropped buffer is freed once the
    devices are idle.

    Parameters
    ----------
    where
        A device, or ``MemLocation.host()`` for pinned memory that every device may use.
    managed
        Whether the memory migrates between the devices and the host.
    write_combined
        For host memory: whether it is write-combined, which is fast for the CPU to write and slow to read.
    driver
        The driver to use if ``where`` is not a device.

    Raises
    ------
    TypeError, ValueError
        ``where`` is another location, or an option does not go with it.
    """

    def __init__(
        self,
        where: Device | MemLocation,
        *,
        managed: bool = False,
        write_combined: bool = False,
        driver: Driver | None = None,
    ) -> None:
        super().__init__(where, managed, driver)
        on_host = self.location == MemLocation.host()
        if not on_host and self._ordinal is None and not managed:
            raise ValueError(f"where={self.location}: allowed are a device and MemLocation.host()")
        if (on_host and managed) or (write_combined and not on_host):
            raise ValueError(f"where={self.location}: managed is for devices, write_combined for the host")
        self._flags = (_PORTABLE | (_WRITE_COMBINED if write_combined else 0)) if on_host else _GLOBAL

    def _end_of_new(self, nbytes: int, stream: Stream) -> PlainEnd:
        on_host = self.location.on_host
        name = "cuMemHostAlloc" if on_host else "cuMemAllocManaged" if self._managed else "cuMemAlloc"
        more = () if name == "cuMemAlloc" else (self._flags,)
        return self._create(stream, name, nbytes, *more)[0]

    def _create(self, stream: Stream, name: str, *args: int) -> tuple[PlainEnd, int]:
        """Call driver function ``name``, which allocates; return the item that ends the memory, and the pitch in bytes,
        0 if there is none. Raises OutOfMemoryError, CudaError.
        """
        session, on_host, pitch = self._session, self.location.on_host, 0
        end = PlainEnd(self, "cuMemFreeHost" if on_host else "cuMemFree", None, stream, self)
        # If the context cannot be restored, the memory is freed all the same.
        ordinal, queue = stream.device.ordinal if on_host else self.location.id, deferred_queue(session)
        with undoing(lambda: queue.end(HandleEnd(session, end._call, end._raw))), session.current(ordinal):
            given = session.call(name, *args)
            end._raw, pitch = given if isinstance(given, tuple) else (given, 0)
        return end, int(pitch)

    def allocate_pitched(self, width: int, height: int, stream: StreamLike, *, element: int = 4) -> tuple[Buffer, int]:
        """Allocate rows for two-dimensional copies (``cuMemAllocPitch``). Returns the buffer and the pitch in bytes.

        Parameters
        ----------
        width, height
            Bytes of a row, and the number of rows.
        stream
            As for :meth:`allocate`.
        element
            Size of an element in bytes: 4, 8 or 16.

        Raises
        ------
        ValueError
            The memory is host or managed memory.
        InvalidValueError
            A size is 0, or ``element`` is not 4, 8 or 16.
        OutOfMemoryError, CaptureError
            As for :meth:`allocate`.
        """
        if self.location.on_host or self._managed:
            raise ValueError(f"{self!r} has no rows with a pitch: device memory has")
        ordered = as_stream(stream, self._session)
        refuse_capture(ordered, "cuMemAllocPitch", "only pools of device memory allocate in a capture")
        end, pitch = self._create(ordered, "cuMemAllocPitch", width, height, element)
        return PlainBuffer(end, pitch * height), pitch


class _GivenEnd(PlainEnd):
    """The end of memory that the function of a :class:`CallbackAllocator` returned."""

    __slots__ = ("_memory", "_nbytes")

    def __init__(self, source: CallbackAllocator, given: Memory | int, nbytes: int, stream: Stream) -> None:
        name, kind = "the function's result", cuda.CUdeviceptr
        address = given.address if isinstance(given, Memory) else number_of_handle(name, given, kind)
        super().__init__(source, "", address, stream, source)
        self._memory: Memory | int | None = given
        self._nbytes = nbytes

    def end(self) -> None:
        address, memory = self._raw, self._memory
        self._raw = self._memory = self.owner = None
        if address is None:
            return
        if self.source.free is not None:
            self.source.free(address, self._nbytes, self.stream)
        elif isinstance(memory, Buffer):
            memory.free(self.stream)
        elif close := getattr(memory, "close", None):
            close(self.stream)

    def attempt(self) -> bool:
        self._free()
        return True


class CallbackAllocator(_Source):
    """Allocator whose memory comes from a Python function, as RMM's ``CallbackMemoryResource``.

    The function can combine other allocators: choose one by size, prefetch, or try a second one. Observers with limits,
    logs and statistics accept it as they accept a pool. ::

        small, large = sa.CachingAllocator(pool), sa.MemoryPool(device)

        def allocate(nbytes, stream):
            return (small if nbytes <= 1 << 20 else large).allocate(nbytes, stream)

        both = sa.CallbackAllocator(allocate, where=device)
        with both.allocate(4096, stream) as buffer:
            buffer.fill(0)

    Parameters
    ----------
    allocate
        Called with the size in bytes and the :class:`Stream`; returns memory of this package, or an address. Its errors
        go to the caller of the allocation.
    free
        Called once with the address, the size and the stream after whose queued work the memory is free, also for
        dropped buffers, then at a point of work of any thread. Default: ``free(stream)`` or ``close()`` of the memory
        that ``allocate`` returned.
    where
        The location of the memory.
    managed
        Whether the driver migrates the memory between devices and host.
    driver
        The driver to use if ``where`` is not a device.

    Raises
    ------
    TypeError, ValueError
        ``allocate`` or ``free`` is not a function, or ``where`` is no location of the driver.
    """

    def __init__(
        self,
        allocate: Allocate,
        free: Free | None = None,
        *,
        where: Device | MemLocation,
        managed: bool = False,
        driver: Driver | None = None,
    ) -> None:
        for name, function in (("allocate", allocate), ("free", free)):
            if not callable(function) and (function is not None or name == "allocate"):
                raise TypeError(f"{name} must be a function, not {type(function).__name__}")
        self.take: Allocate = allocate
        """Function that returns new memory."""
        self.free: Free | None = free
        """Function that takes memory back; None if no function is to be called."""
        super().__init__(where, managed, driver)

    def _end_of_new(self, nbytes: int, stream: Stream) -> PlainEnd:
        given = self.take(nbytes, stream)
        if isinstance(given, Memory) and given.nbytes < nbytes:
            raise ValueError(f"{given!r} has less than the {nbytes} bytes that were asked for")
        return _GivenEnd(self, given, nbytes, stream)
