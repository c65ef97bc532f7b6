"""Handles and memory of other code, and memory that is not freed in stream order.

The caller says who owns them; that is never inferred. Kind, device and size of memory are those that the driver
reports.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from streamalloc.core.errors import CudaError, size_text
from streamalloc.core.internal import (
    Buffer,
    Deferred,
    Device,
    Fence,
    HandleEnd,
    PlainSource,
    PoolBuffer,
    Residence,
    Stream,
    StreamLike,
    as_stream,
    deferred_queue,
    free_function,
    freed_already,
    refuse_capture,
    session_for,
)
from streamalloc.core.properties import checked_number, checked_size
from streamalloc.core.session import PerDriver, Session, session_of
from streamalloc.driver.internal import cuda
from streamalloc.pool.cache.blocks import filled
from streamalloc.pool.places import Address, has_access, residence_of

if TYPE_CHECKING:
    from streamalloc.core.internal import StillImported
    from streamalloc.driver import Driver

_TRIES = 5
"""Largest number of attempts of a call of :class:`OnceIdle`, after refusals by the driver."""
_IDLE_PAUSE = 0.02
"""Shortest time in seconds between two threads that :class:`OnceIdle` starts while a device is busy. Without it, each
point of work would start a thread.
"""
_QUERIES = (0.0, 0.00005, 0.0002)
"""Seconds before each query of the devices' work. There are few queries, because a later point of work starts another
thread.
"""
THIS = "this"
"""Value of ``owner`` for a handle that its new object ends."""


def is_ours(owner: object) -> bool:
    """Whether ``owner`` is ``"this"``: the new object ends the handle. Raises ``ValueError`` for another string."""
    if isinstance(owner, str) and owner != THIS:
        raise ValueError(
            f"owner={owner!r}: allowed are the object that owns the handle, None if code without such an object does, "
            f"and {THIS!r} if the object made here is to end it"
        )
    return isinstance(owner, str)


def refuse_second_owner(known: object) -> ValueError:
    """Return the error for a handle that an object of this process already ends."""
    return ValueError(f"owner={THIS!r}: {known!r} owns this handle already, and would end it a second time")


def number_of_handle(name: str, value: Any, kind: type) -> int:
    """Return a driver handle as a number. ``value`` is an integer, a ctypes object, or an object of the bindings' class
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
    """Return ``value``, a handle of the class ``kind``, as a number. Refuse a handle that would crash the driver.

    Handles of driver 580 are addresses of this process, which the driver reads unchecked. If the handle of the primary
    context is a readable address, the driver is such a one, and ``value`` must be a readable address, too. ``name``:
    the argument's name, for errors.

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
    """A driver call that waits for the devices, made on a thread of its own once they are idle.

    While such a call waits, driver 580 blocks all other threads that need the context. If the device then waits for an
    act of one of these threads, none of them would ever continue. ``call`` may run twice, so a second run must do
    nothing.
    """

    __slots__ = ("_call", "_not_before", "_session")

    def __init__(self, session: Session, call: Callable[[], object]) -> None:
        self._session = session
        self._call = call
        self._not_before = 0.0

    def attempt(self) -> bool:
        """Start the thread. It submits this item again if a device is busy."""
        if time.monotonic() < self._not_before:
            return False
        self._not_before = time.monotonic() + _IDLE_PAUSE
        _thread.start_new_thread(self._run, ())
        return True

    def _run(self) -> None:
        for _ in range(_TRIES):
            # An error of a lost context goes on to the call: there is no work to wait for.
            with contextlib.suppress(CudaError), self._session.relaxed():
                if not self._idle():
                    deferred_queue(self._session).submit(self)
                    return
            with contextlib.suppress(CudaError):
                self._call()
                return

    def _idle(self) -> bool:
        """Whether the work that is queued now on known streams completes within a few short queries."""
        queued = Fence(self._session)
        for pause in _QUERIES:
            time.sleep(pause)
            if queued.done():
                return True
        return False


class PlainEnd(HandleEnd):
    """The end of memory after the work of a stream: a call of the driver that waits, or the release of a reference to
    the owner.
    """

    __slots__ = ("_use", "owner", "source", "stream")

    def __init__(self, source: Any, call: str, address: int | None, stream: Stream, owner: object) -> None:
        """Make the item. ``call``: the driver function that frees the memory at ``address``; empty if ``owner`` frees
        it. ``source``: the allocator. ``stream``: the stream whose work comes first.
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
        """End the memory now if a driver call frees it: the host waits for the stream first. Otherwise drop the
        reference to the owner once the stream's work is done. Raises CudaError; an item then ends the memory later.
        """
        if self._call:
            # The stream of a dropped buffer may be closed. Its work is done then, so there is nothing to wait for.
            if not self.stream.closed:
                self.stream.synchronize()
            self._session.release(self, self._call)
        else:
            self._use = Fence(self._session, [self.stream])
        deferred_queue(self._session).end(self)

    def attempt(self) -> bool:
        if self._raw is None:
            return True
        if self._call:  # The call waits, which an attempt must not. So a thread makes it once the devices are idle.
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
            free_function(self.source)(self, None)


def end_plain(end: PlainEnd, _stream: object) -> tuple[Any]:
    """End memory (:meth:`PlainEnd.end`). Allocators call this in place of ``cuMemFreeAsync``, so it has the arguments
    and the answer of that function.
    """
    end.end()
    return (cuda.CUresult.CUDA_SUCCESS,)


def find(session: Session, address: int, nbytes: int, *, ours: bool) -> tuple[PlainSource, str]:
    """Return a source with the location of ``nbytes`` bytes at ``address`` (``cuPointerGetAttribute``), and the driver
    function that frees them; ``""`` unless ``ours``: the new buffer is to free them. Raises ValueError as
    :meth:`Buffer.from_handle` does.
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
        # Adjacent mappings count as memory, too. The driver reports no start for host memory without access.
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
    """A :class:`Buffer` of memory that is of no pool, or that other code owns. Its :class:`PlainEnd` ends the memory
    after the work of the buffer's stream.
    """

    __slots__ = ("_end",)

    @property
    def _stream(self) -> Stream:
        """Stream after whose work the memory ends."""
        return self._end.stream

    @_stream.setter
    def _stream(self, stream: Stream) -> None:
        self._end.stream = stream

    def __init__(self, end: PlainEnd, nbytes: int) -> None:
        self._end = end
        self._allocator, self._nbytes, self._shared = end.source, nbytes, None
        self._ptr = cuda.CUdeviceptr(int(end))
        deferred_queue(session_of(end.source)).end_with(self, end)

    @property
    def owner(self) -> object:
        """Object that owns the memory, or the allocator that made it. None if there is no such object, and after the
        memory was released.
        """
        return self._end.owner

    @property
    def device_accessible(self) -> bool:
        """Whether the stream's device may use the memory (``cuMemPoolGetAccess`` for memory of a pool, otherwise
        ``CU_POINTER_ATTRIBUTE_ACCESS_FLAGS``).
        """
        device = self._stream.device
        if self.managed or self.location == device.location:
            return True
        ask = Address(session_of(device), self.address)
        with device.current():
            pool = ask.value("MEMPOOL_HANDLE")
            return has_access(ask.session, pool, device.location) if int(pool) else bool(ask.integer("ACCESS_FLAGS"))

    def free(
        self, stream: StreamLike | None = None, still_imported: StillImported = "defer", timeout: float | None = None
    ) -> None:
        """End the use of the memory after the work of ``stream``, by default the buffer's own: free it if this buffer
        owns it, otherwise let its owner go (:meth:`Buffer.from_handle`). Errors as for :meth:`Buffer.free`.
        """
        self._free_checked(stream, still_imported, timeout)

    def _free_on(self, ordered: Stream, handle: Any) -> None:
        refuse_capture(ordered, "cuMemFree", "memory that is not of a pool cannot be freed in a capture")
        ptr, self._ptr = self._ptr, None
        if ptr is None:
            raise freed_already(self)
        self._end.stream = ordered
        try:
            free_function(self._allocator)(self._end, handle)
        except BaseException:
            if self._end.raw is not None:
                self._ptr = ptr
            raise


PlainBuffer.__name__ = PlainBuffer.__qualname__ = "Buffer"

_taken: PerDriver[weakref.WeakValueDictionary[int, Buffer]] = PerDriver(lambda _: weakref.WeakValueDictionary())
"""Buffers that have taken over memory of other code, by address."""


def buffer_from_handle(
    address: Any, nbytes: int | str, owner: object, stream: StreamLike | None, driver: Driver | None
) -> Buffer:
    """Implement :meth:`Buffer.from_handle`."""
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
