"""Memory without a pool of this package: memory of other code, of ``cuMemAlloc`` and similar calls, and of Python
functions.

The caller says who owns the memory; the owner is never inferred. The driver is queried for kind, device and size of the
memory.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import functools
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from streamalloc.core.errors import CudaError, OutOfMemoryError, size_text, undoing
from streamalloc.core.internal import (
    Allocator,
    Buffer,
    Deferred,
    Device,
    Fence,
    HandleEnd,
    Memory,
    PlainSource,
    PoolBuffer,
    Residence,
    Stream,
    StreamLike,
    as_stream,
    check_location,
    deferred_queue,
    filled,
    location_of,
    read_or_none,
    session_for,
)
from streamalloc.core.properties import MemLocation, MemLocationType, checked_function, checked_number, checked_size
from streamalloc.core.session import PerDriver, Session, session_of
from streamalloc.driver.internal import cuda
from streamalloc.pool.places import Address, has_access, residence_of

if TYPE_CHECKING:
    from streamalloc.core.internal import StillImported
    from streamalloc.driver import Driver

_TRIES = 5
"""Largest number of times that :class:`OnceIdle` repeats its call if the driver refuses it."""
_IDLE_PAUSE = 0.02
"""Shortest time in seconds between two attempts of one :class:`OnceIdle`, each of which queries all streams."""
_PATIENCE = 1.0
"""Longest time in seconds that an attempt of :class:`OnceIdle` waits for its thread."""
_QUERIES = (0.0, 0.00005, 0.0002)
"""Seconds to sleep before each of the three queries of the devices' work."""
THIS = "this"
"""Value of ``owner`` that makes the new object the owner of the memory or handle."""
Allocate: TypeAlias = "Callable[[int, Stream], Memory | int]"
Free: TypeAlias = Callable[[int, int, Stream], object]

_GLOBAL = int(cuda.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)
_PORTABLE, _WRITE_COMBINED = 0x1, 0x4  # CU_MEMHOSTALLOC_*


def is_ours(owner: object) -> bool:
    """Return whether ``owner`` is ``"this"``, so that the new object ends the handle; False for any other object and
    None. Raises ``ValueError`` for another string.
    """
    if isinstance(owner, str) and owner != THIS:
        raise ValueError(
            f"owner={owner!r}: allowed are the object that owns the handle, None if code without such an object does, "
            f"and {THIS!r} if the object made here is to end it"
        )
    return isinstance(owner, str)


def refuse_second_owner(known: object) -> ValueError:
    """Return the error for a handle that is already owned by ``known``, an object of this process."""
    return ValueError(f"owner={THIS!r}: {known!r} owns this handle already, and would end it a second time")


def number_of_handle(name: str, value: Any, kind: type) -> int:
    """Return a driver handle as an int. ``value`` is an integer, a ctypes pointer, or an object of the bindings' class
    ``kind``. Raises TypeError, ValueError with the argument's ``name``.
    """
    value = value.value if isinstance(value, ctypes.c_void_p) else value
    other = type(value).__module__.startswith("cuda.bindings.") and not isinstance(value, kind)
    if other or isinstance(value, (bool, str, bytes, float)) or not hasattr(value, "__int__"):
        raise TypeError(f"{name} must be a {kind.__name__} or its number, not {type(value).__name__} ({value!r})")
    number = checked_number(name, int(value))
    if not number:
        raise ValueError(f"{name}=0 is no handle")
    return number


def check_handle(session: Session, name: str, value: Any, kind: type) -> int:
    """Return ``value``, a handle of the bindings' class ``kind``, as an int. Refuse a handle that would crash the
    driver.

    In driver 580, handles are addresses of this process, which the driver reads without a check. If the handle of the
    primary context is a readable address, the driver uses such handles, and ``value`` must be a readable address, too.
    ``name``: the argument's name, for errors.

    Raises
    ------
    TypeError, ValueError
        ``value`` is no handle of this process.
    """
    number = number_of_handle(name, value, kind)
    if _is_readable(int(session.context(0))) and not _is_readable(number):
        raise ValueError(f"{name}={number:#x} is no handle of this process; handles of others are imported")
    return number


def _is_readable(address: int) -> bool:
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return len(memory.read(8)) == 8
    except (OSError, OverflowError):
        return False


class OnceIdle(Deferred):
    """Queue item for a driver call that waits for the devices. The call is made once they are idle.

    While such a call waits, driver 580 blocks all other threads that need the context. If the device were waiting for
    one of these threads, no thread would ever continue. So the thread that attempts the item checks first whether the
    devices are idle, and queues no work until the call has returned. It asks about the streams of its session only, not
    about those of another driver object for the same device. The call is made on a new thread, which it blocks if
    another thread queues work meanwhile: the attempt then returns after a second. The new thread asks nothing about
    streams, because another library may destroy its streams at any time. ``call`` may run twice, so a second run must
    do nothing.
    """

    __slots__ = ("_call", "_not_before", "_session")

    def __init__(self, session: Session, call: Callable[[], object]) -> None:
        self._session = session
        self._call = call
        self._not_before = 0.0

    def attempt(self) -> bool:
        """If the devices are idle, make the call on a new thread, wait for it for at most a second, and return True.
        Returns False if a device is busy, or if the last attempt was made less than 20 ms ago.
        """
        if time.monotonic() < self._not_before:
            return False
        self._not_before = time.monotonic() + _IDLE_PAUSE
        if not self._idle():
            return False
        ended = _thread.allocate_lock()
        ended.acquire()
        _thread.start_new_thread(self._run, (ended,))
        ended.acquire(timeout=_PATIENCE)
        return True

    def _run(self, ended: _thread.LockType) -> None:
        try:
            for _ in range(_TRIES):
                with contextlib.suppress(CudaError):
                    self._call()
                    return
        finally:
            ended.release()

    def _idle(self) -> bool:
        """Return whether the work that is queued now on known streams completes during three queries in 0.25 ms."""
        with contextlib.suppress(CudaError), self._session.relaxed():
            queued = Fence(self._session)
            for pause in _QUERIES:
                time.sleep(pause)
                if queued.done():
                    break
            else:
                return False
        return True  # Also if the context is lost: no work is left.


class PlainEnd(HandleEnd):
    """Queue item that ends the use of memory after the work of a stream: by a driver call that waits, or by dropping
    the reference to the memory's owner.
    """

    __slots__ = ("_use", "owner", "source", "stream")

    def __init__(self, source: Any, call: str, address: int | None, stream: Stream, owner: object) -> None:
        """Make the item. ``call`` is the name of the driver function that frees the memory at ``address``; empty if
        ``owner`` frees the memory. ``source`` is the allocator, and ``stream`` the stream whose work comes first.
        """
        super().__init__(session_of(source), call, address)
        self.source = source
        self.stream: Stream = stream
        """Stream whose work must finish before the memory ends."""
        self.owner: object = owner
        self._use: Fence | None = None

    def __int__(self) -> int:
        """Return the address, for watchers of frees."""
        return int(self._raw or 0)

    def end(self) -> None:
        """If a driver call frees the memory, have the host wait for the stream, and make the call. Otherwise drop the
        reference to the owner once the stream's work is done. Raises CudaError; the deferred queue then tries again
        later.
        """
        if self._call:
            # The stream of a dropped buffer may be closed. `OnceIdle` has then waited for its work.
            if not self.stream.closed:
                self.stream.synchronize()
            self._session.release(self, self._call)
        else:
            self._use = Fence(self._session, [self.stream])
        deferred_queue(self._session).end(self)

    def attempt(self) -> bool:
        if self._raw is None:
            return True
        if self._call:  # An attempt must not wait, as this call does.
            deferred_queue(self._session).submit(OnceIdle(self._session, self._free))
            return True
        if self._use is None:
            self._use = Fence(self._session, [self.stream], in_item=True)
        if not self._use.done():
            return False
        self._raw = self.owner = None
        return True

    def _free(self) -> None:
        if self._raw is not None:
            self.source.free_function(self, None)


def end_plain(end: PlainEnd, _stream: object) -> tuple[Any]:
    """Call :meth:`PlainEnd.end`. Allocators call this function in place of ``cuMemFreeAsync``, so it has the arguments
    and the result of ``cuMemFreeAsync``.
    """
    end.end()
    return (cuda.CUresult.CUDA_SUCCESS,)


def find(session: Session, address: int, nbytes: int, *, ours: bool) -> tuple[PlainSource, str]:
    """Ask the driver what memory is at ``address`` (``cuPointerGetAttribute``). Return a source for a buffer of
    ``nbytes`` bytes there, and the name of the driver function that frees the memory. Unless ``ours``, the new buffer
    does not free the memory, and the name is ``""``. Raises ValueError as :meth:`Buffer.from_handle` does.
    """
    ask = Address(session, address)
    place = residence_of(session, address)
    if place is None:
        raise ValueError(
            f"address={address:#x} is in no memory that {session.driver!r} knows: it was freed, is pageable host "
            "memory, or of another driver or process"
        )
    with session.relaxed():
        start, size = ask.integer("RANGE_START_ADDR"), ask.integer("RANGE_SIZE")
        stop = start + size
        # Adjacent mappings count as one memory. The driver reports no start address for host memory without access.
        while start and stop < address + nbytes and not ours and residence_of(session, stop) is not None:
            stop += Address(session, stop).integer("RANGE_SIZE")
        if start and address + nbytes > stop:
            raise ValueError(
                f"nbytes={nbytes}: the memory at {address:#x} has {size_text(stop - address)}, to {stop:#x}"
            )
        if not ours:
            return PlainSource(session, place, end_plain), ""
        if start and start != address:
            raise ValueError(f"address={address:#x} is inside of the allocation at {start:#x}, freed as a whole")
        call = _free_call(ask, place)
        return PlainSource(session, place, session.cuMemFreeAsync if call == "cuMemFreeAsync" else end_plain), call


def _free_call(ask: Address, place: Residence) -> str:
    if int(ask.value("MEMPOOL_HANDLE")):
        return "cuMemFreeAsync"
    if place.location is not None and place.location.on_host and not place.managed:
        return "cuMemFreeHost"
    if int(ask.value("CONTEXT")) or place.managed:
        return "cuMemFree"
    raise ValueError(
        f"owner={THIS!r}: the memory at {ask.number:#x} is mapped by cuMemMap, or of a graph, and not freed by its "
        "address; vmm.PhysicalMemory.at owns a handle of mapped memory"
    )


class PlainBuffer(Buffer):
    """A :class:`Buffer` of memory without a pool, or of memory that other code owns. Its :class:`PlainEnd` ends the
    memory after the work of the buffer's stream.
    """

    __slots__ = ("_end",)

    @property
    def _stream(self) -> Stream:
        """Stream whose work must finish before the memory ends."""
        return self._end.stream

    @_stream.setter
    def _stream(self, stream: Stream) -> None:
        self._end.stream = stream

    def __init__(self, end: PlainEnd, nbytes: int) -> None:
        self._end = end
        self._allocator, self._nbytes, self.shared = end.source, nbytes, None
        self._ptr = cuda.CUdeviceptr(int(end))
        deferred_queue(session_of(end.source)).end_with(self, end)

    @property
    def owner(self) -> object:
        """Object that owns the memory, or the allocator that allocated it; None if there is no such object. A buffer of
        :meth:`Buffer.from_handle` drops its reference to the owner once it was freed and the stream's work is done;
        from then on the value is None.
        """
        return self._end.owner

    @property
    def device_accessible(self) -> bool:
        """Whether the stream's device has access to the memory. True for managed memory and for memory on this device.
        For other memory the driver is queried: ``cuMemPoolGetAccess`` for memory of a pool, otherwise
        ``CU_POINTER_ATTRIBUTE_DEVICE_POINTER``. Raises ClosedError if such memory was freed.
        """
        device = self._stream.device
        if self.managed or self.location == device.location:
            return True
        ask = Address(session_of(device), self.address)
        with device.current():
            pool = ask.value("MEMPOOL_HANDLE")
            # ACCESS_FLAGS would be 3 for memory of `cuMemAlloc` on another device also without peer access.
            return has_access(ask.session, pool, device.location) if int(pool) else bool(ask.integer("DEVICE_POINTER"))

    def free(
        self, stream: StreamLike | None = None, still_imported: StillImported = "defer", timeout: float | None = None
    ) -> None:
        """End the use of the memory after the work of ``stream`` (default: the buffer's own). If this buffer owns the
        memory, the host waits for that work and frees the memory (``cuMemFree``, ``cuMemFreeHost``), or the function of
        a :class:`CallbackAllocator` is called. Otherwise the reference to the owner is dropped once the work is done.
        Errors as for :meth:`Buffer.free`.
        """
        self._free_checked(stream, still_imported, timeout)

    def free_on(self, ordered: Stream, handle: Any) -> None:
        ptr, self._ptr = self._ptr, None
        if ptr is None:
            self._live()
        self._end.stream = ordered
        try:
            self._allocator.free_function(self._end, handle)
        except BaseException:
            if self._end.raw is not None:
                self._ptr = ptr
            raise


PlainBuffer.__name__ = PlainBuffer.__qualname__ = "Buffer"

_taken: PerDriver[weakref.WeakValueDictionary[int, Buffer]] = PerDriver(lambda _: weakref.WeakValueDictionary())
"""Buffers that own memory which other code allocated (``owner="this"``), by address."""


def buffer_from_handle(
    address: Any, nbytes: int | str, owner: object, stream: StreamLike | None, driver: Driver | None
) -> Buffer:
    """Return a buffer of memory that other code allocated, as :meth:`Buffer.from_handle` does, with the same errors."""
    session = session_of(stream) if isinstance(stream, Stream) else session_for(None, driver)
    session.check_process()
    number, nbytes = number_of_handle("address", address, cuda.CUdeviceptr), checked_size("nbytes", nbytes)
    taken, ours = _taken(session), is_ours(owner)
    known = taken.get(number)
    if ours and known is not None and not known.freed:
        raise refuse_second_owner(known)
    source, call = find(session, number, nbytes, ours=ours)
    ordinal = None if source.managed else Residence(source.location, managed=False).ordinal
    device = Device(ordinal or 0, driver=session.driver)
    ordered = device.default_stream if stream is None else as_stream(stream, session)
    buffer: Buffer
    if call == "cuMemFreeAsync":
        buffer = filled(PoolBuffer, source, cuda.CUdeviceptr(number), nbytes, ordered)
    else:
        buffer = PlainBuffer(PlainEnd(source, call, number, ordered, None if ours else owner), nbytes)
    if ours:
        taken[number] = buffer
    return buffer


class _Source(Allocator):
    """Base class of allocators without a pool. The :class:`PlainEnd` of a buffer frees it: ``cuMemFree``,
    ``cuMemFreeHost``, or a function of the program.
    """

    def __init__(self, where: Device | MemLocation, managed: bool, driver: Driver | None) -> None:
        self.location = location_of("where", where)
        self.managed = bool(managed)
        session = session_for(where, driver)
        check_location(session, self.location)
        self._bind(session, _obtain, None, end_plain)

    def allocate(self, nbytes: int | str, stream: StreamLike) -> Buffer:
        """Allocate memory that can be used at once, on any stream. ``stream`` only orders the end of the memory.

        Parameters
        ----------
        nbytes
            Size in bytes, or text such as ``"2MiB"``; at least 1.
        stream
            The memory ends after the work of this stream. Operations that name no stream use it, too.

        Raises
        ------
        OutOfMemoryError
            There is not enough memory.
        CaptureError
            The stream is being captured. Or this thread captures another stream in a mode other than ``"relaxed"``; the
            capture is then invalid.
        TypeError, ValueError
            ``nbytes`` is not a size or is 0, or ``stream`` is not a stream of this driver.
        ClosedError
            ``stream`` was closed.
        """
        size, ordered = checked_size("nbytes", nbytes), as_stream(stream, self._session)
        if not size:
            raise ValueError("nbytes=0: only pools have empty buffers")
        ordered.refuse_capture(self.alloc_name, "only pools of device memory allocate in a capture")
        _, end = self.alloc_function(size, (self, ordered), ordered.checked_raw())
        return PlainBuffer(end, size)

    def _end_of_new(self, nbytes: int, stream: Stream) -> PlainEnd:
        """Allocate ``nbytes`` bytes, and return the item that ends the memory after the work of ``stream``. Raises
        OutOfMemoryError, and any error of the function of a :class:`CallbackAllocator`.
        """
        raise NotImplementedError

    def pool_of(self, buffer: Buffer) -> object:
        return self

    def reachable_from(self, device: Device) -> bool:
        return self.managed or self.location in (device.location, MemLocation.host())

    def _text(self) -> str:
        return f" {'managed ' if self.managed else ''}{self.location}"


def _obtain(nbytes: int, request: tuple[_Source, Stream], _: object) -> tuple[Any, PlainEnd]:
    """Allocate memory in place of ``cuMemAllocFromPoolAsync``, with similar arguments and results. ``request`` replaces
    the pool's handle: the allocator and the stream. In place of a pointer, return the item that ends the memory.

    This is not a method: the allocator refers to the function, and a bound method would form a reference cycle with the
    allocator.
    """
    source, stream = request
    return cuda.CUresult.CUDA_SUCCESS, source._end_of_new(nbytes, stream)


class PlainMemory(_Source):
    """Allocator of memory outside of pools (``cuMemAlloc``, ``cuMemAllocManaged``, ``cuMemHostAlloc``). The memory can
    be used at once, and is freed after the host has waited.

    Use it for code that needs such memory: legacy sharing (``cuIpcGetMemHandle``), registration that refuses memory of
    pools, and managed memory if there are no managed pools. Otherwise use a :class:`MemoryPool`, which does not wait.
    ::

        with sa.PlainMemory(device).allocate(2 << 20, stream) as buffer:
            buffer.fill(0)

    ``buffer.free()`` blocks the host until the stream's work is done (``cuMemFree``, ``cuMemFreeHost``). A dropped
    buffer is freed later, once the devices are idle.

    Parameters
    ----------
    where
        A device, or ``MemLocation.host()`` for pinned host memory that every device can access.
    managed
        Whether the memory migrates between the devices and the host.
    write_combined
        Whether host memory is write-combined: fast for the CPU to write, and slow to read.
    driver
        The driver to use if ``where`` is not a device.

    Raises
    ------
    TypeError, ValueError
        ``where`` is another location, or ``managed`` or ``write_combined`` is not possible there.
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
        if not on_host and self.location.type is not MemLocationType.DEVICE:
            raise ValueError(f"where={self.location}: allowed are a device and MemLocation.host()")
        if (on_host and managed) or (write_combined and not on_host):
            raise ValueError(f"where={self.location}: managed is for devices, write_combined for the host")
        self._flags = (_PORTABLE | (_WRITE_COMBINED if write_combined else 0)) if on_host else _GLOBAL

    def _end_of_new(self, nbytes: int, stream: Stream) -> PlainEnd:
        on_host = self.location.on_host
        name = "cuMemHostAlloc" if on_host else "cuMemAllocManaged" if self.managed else "cuMemAlloc"
        more = () if name == "cuMemAlloc" else (self._flags,)
        try:
            return self._create(stream, name, nbytes, *more)[0]
        except OutOfMemoryError as error:  # `allocate_async` needs them: can a free help?
            ask = functools.partial(self._session.call, "cuDeviceTotalMem", self.location.id)
            vars(error).update(requested=nbytes, total=None if more else read_or_none(ask))
            raise

    def _create(self, stream: Stream, name: str, *args: int) -> tuple[PlainEnd, int]:
        """Call driver function ``name``, which allocates. Return the item that ends the memory, and the pitch in bytes;
        0 if the function returns no pitch. Raises OutOfMemoryError, CudaError.
        """
        session, on_host, pitch = self._session, self.location.on_host, 0
        end = PlainEnd(self, "cuMemFreeHost" if on_host else "cuMemFree", None, stream, self)
        # If the caller's context cannot be restored after the allocation, the memory is freed again.
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
            Size of a row in bytes, and the number of rows.
        stream
            As for :meth:`allocate`.
        element
            Size of an element in bytes: 4, 8 or 16.

        Raises
        ------
        ValueError
            The memory is host or managed memory, or a size is negative.
        InvalidValueError
            A size is 0, or ``element`` is not 4, 8 or 16.
        OutOfMemoryError, CaptureError, TypeError, ClosedError
            As for :meth:`allocate`.
        """
        if self.location.on_host or self.managed:
            raise ValueError(f"{self!r} has no rows with a pitch: device memory has")
        ordered = as_stream(stream, self._session)
        ordered.refuse_capture("cuMemAllocPitch", "only pools of device memory allocate in a capture")
        width, height = checked_size("width", width), checked_size("height", height)
        end, pitch = self._create(ordered, "cuMemAllocPitch", width, height, element)
        return PlainBuffer(end, pitch * height), pitch


class _GivenEnd(PlainEnd):
    """Queue item that ends memory which the function of a :class:`CallbackAllocator` returned."""

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
    """Allocator that calls a Python function for its memory, like RMM's ``CallbackMemoryResource``.

    The function can combine other allocators: it can choose one by size, prefetch, or try a second allocator. Observers
    record and limit the allocations as they do for a pool. ::

        small, large = sa.CachingAllocator(pool), sa.MemoryPool(device)

        def allocate(nbytes, stream):
            return (small if nbytes <= 1 << 20 else large).allocate(nbytes, stream)

        both = sa.CallbackAllocator(allocate, where=device)
        with both.allocate(4096, stream) as buffer:
            buffer.fill(0)

    Parameters
    ----------
    allocate
        Function that is called with the size in bytes and the :class:`Stream`. It returns memory of this package, or an
        address. Its errors go to the caller of the allocation.
    free
        Function that is called once per buffer with the address, the size in bytes, and the stream after whose queued
        work the memory is free. For a dropped buffer, any thread may call it later. By default the memory that
        ``allocate`` returned is freed by its ``free(stream)`` or ``close(stream)``.
    where
        The location of the memory that ``allocate`` returns.
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
        self.take: Allocate = checked_function("allocate", allocate)
        """Function that returns new memory."""
        self.free: Free | None = checked_function("free", free, optional=True)
        """Function that frees memory; None if the memory's own ``free`` or ``close`` is called."""
        super().__init__(where, managed, driver)

    def _end_of_new(self, nbytes: int, stream: Stream) -> PlainEnd:
        given = self.take(nbytes, stream)
        if isinstance(given, Memory) and given.nbytes < nbytes:
            raise ValueError(f"{given!r} has less than the {nbytes} bytes that were asked for")
        return _GivenEnd(self, given, nbytes, stream)
