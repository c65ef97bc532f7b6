"""The exporting process: leases of shared allocations, and the handles that were exported.

A lease concerns two processes. Only the exporter frees the memory. Importers count their opens and closes in the
control block (:mod:`streamalloc.ipc.wire.control_block`). The free has to wait for the importers: otherwise the driver
would return the memory to the pool while their kernels still read it, and the next allocation would overwrite it.

If an importer still uses the memory, the free becomes an item of the queue of deferred releases
(:mod:`streamalloc.core.deferred`). The module of the control blocks says how a free and an open at the same time find
each other, and what a death changes.

The stream's write of ``ready`` is queued before the descriptor is sent. So a write that the driver refuses leaves no
descriptor whose importer would wait for ever.

Finalisers take none of the locks of this file: the finaliser of a lease only makes its descriptors stale and puts its
slot into a list.
"""

from __future__ import annotations

import functools
import secrets
import select
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from streamalloc.core.errors import ClosedError, CudaError, StillImportedError, error_from
from streamalloc.core.internal import (
    Buffer,
    Deferred,
    DeferredQueue,
    Device,
    Fd,
    PoolBuffer,
    SharedState,
    StillImported,
    Stream,
    deferred_queue,
    notify_freed,
    ordered_after,
    without_items,
)
from streamalloc.core.properties import MemHandleType, MemLocationType
from streamalloc.core.session import PerDriver, Session
from streamalloc.driver.internal import RLock, cuda, opaque_bytes
from streamalloc.ipc.transport.channel import Channel
from streamalloc.ipc.transport.handle_server import published, serve
from streamalloc.ipc.wire.control_block import WORD, ControlBlock, ExporterMark, ExporterWords, fence, reached
from streamalloc.ipc.wire.descriptor import NOWHERE, ChunkHandle
from streamalloc.pool import MemoryPool
from streamalloc.pool.internal import pointer_attributes
from streamalloc.vmm import PhysicalMemory, VirtualBuffer

POSIX = MemHandleType.POSIX_FILE_DESCRIPTOR
_POSIX_MEMBER = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
NO_FABRIC_POOLS = "fabric handles of pools are not supported: a refused export as one damages the process's heap"
_NOT_EXPORTABLE = (
    "only allocations of pools made with handle_types=POSIX_FILE_DESCRIPTOR can be shared, "
    "by the process that made them"
)
# Seconds between two checks in a wait for importers.
_PAUSE = 0.0005


class Hold:
    """Keeps an allocation while one of its descriptors is in transit.

    A hold belongs to the carrier of the descriptor: a :class:`Shared`, a message or a connection. The hold ends once
    the importer has counted its open, also if the open fails, or once the carrier is lost. The importer signals its
    open (``importer.open.Received.close``) in one of two ways:

    * A message of :func:`streamalloc.ipc.send` carries one end of a pipe as its last handle. The importer closes that
      end with the handles that it did not take, and the kernel closes it with a message that nobody receives.
    * A descriptor that travels as bytes has the number of a mark, a word of the control block that the importer sets to
      0. The kernel tells nobody when bytes are lost, so the function ``lost`` returns whether the carrier can no longer
      deliver the bytes.

    A dropped :class:`Shared` ends its hold. Assigning ``lost`` moves the hold to another carrier.
    """

    __slots__ = ("_mark", "lost")

    def __init__(self, lost: Callable[[], bool] = bool) -> None:
        self.lost: Callable[[], bool] = lost
        self._mark: ExporterMark | None = None

    def mark(self, block: ControlBlock) -> int:
        """Return the number of a mark in ``block``. When the importer opens the descriptor, it sets this mark to 0. The
        first call makes the mark.
        """
        if self._mark is None:
            self._mark = ExporterMark(block, "hold")
        return self._mark.number

    def over(self) -> bool:
        """Whether the hold has ended: the mark was set to 0, or ``lost`` returns True. If so, the mark and the carrier
        are released.
        """
        mark = self._mark
        over = (mark is not None and not mark.stands()) or self.lost()
        if over:
            self.end()
        return over

    def end(self) -> None:
        """End the hold, so that it no longer delays the free of the allocation. Idempotent."""
        self.lost, self._mark = (lambda: True), None


def _lasting(holds: list[Hold]) -> list[Hold]:
    return [hold for hold in holds if not hold.over()]


def hung_up(end: Fd | Channel | int) -> bool:
    """Whether every process has closed the other end of a pipe or a connection (``poll``). ``end``: the end of this
    process, or its file descriptor number.
    """
    poll = select.poll()
    poll.register(end, 0)
    return bool(poll.poll(0))


class Lease(SharedState):
    """A slot of a control block: words in shared memory by which importers count their uses of one allocation, or wait
    for one announcement.

    The lease of a buffer says when the buffer is freed (:class:`SharedState`): importers must have closed the memory,
    and no descriptor may be in transit. Two methods end the lease then; ``stream`` waits for the importers' work:

    ============================  =======================================  ===========================================
    Caller                        Call                                     If the lease cannot end yet
    ============================  =======================================  ===========================================
    :meth:`begin_free`: "defer"   ``end_for_good(stream)``                 a :class:`_DeferredFree` frees later, and
                                                                           nobody opens the memory any more
    :class:`_DeferredFree`, also  ``end_for_good(None)``, then             the item stays
    of a dropped buffer           ``end_for_good(stream)``
    ``_await``: "wait", "raise"   ``end_if_closed(stream)``                the buffer and its descriptors stay valid
    :meth:`unused`                ``end_if_closed(None)``                  the object of another library is kept, and
                                                                           its descriptors stay valid
    ``_await``: "ignore"          ``make_stale()``                         the buffer is freed all the same
    ============================  =======================================  ===========================================

    If the driver refuses the free after :meth:`begin_free`, :meth:`end_free` makes the descriptors valid again. The end
    of the lease object releases the slot (:meth:`release`). Another lease can have the slot once it is :meth:`quiet`.
    """

    __slots__ = (
        "__weakref__", "_announcer", "_exports", "_holds", "_owned", "block", "generation", "lock", "payload", "pool",
        "slot", "words",
    )  # fmt: skip

    def __init__(self, exports: Exports, block: ControlBlock, slot: int) -> None:
        self._owned = True
        """Whether this object owns the slot; False after :meth:`release`."""
        self._exports = exports
        self.block: ControlBlock = block
        self.slot: int = slot
        self.words: ExporterWords = block.slots.get(slot) or block.exporter_words(slot)
        self.generation: int = self.words.generation.value
        self.payload: bytes = b""
        """The driver's export data of the allocation: 64 bytes of ``cuMemPoolExportPointer``. Empty for the lease of an
        announcement.
        """
        self.pool: object = None
        """The :class:`PoolExport` of the allocation, kept because its mark must exist while descriptors are valid."""
        self._announcer: Stream | None = None
        """Stream of the last announcement; None before the first."""
        self.lock: AbstractContextManager[bool] = RLock()
        """Lock that is held to announce contents, and to decide whether the memory can be freed."""
        self._holds: list[Hold] = []

    # -- announcements ---------------------------------------------------------------------------------------

    def announce(self, stream: Stream, address: int = 0, nbytes: int = 0) -> int:
        """Make ``stream`` write the next value to the word ``ready`` after the stream's queued work
        (``cuStreamWriteValue32``). Returns this value, for which importers wait. If ``address`` is not 0, the checker
        of the driver is told that the value announces ``nbytes`` bytes at ``address``.

        Raises
        ------
        CaptureError, CudaError, ClosedError
            The stream is being captured, the driver refuses the write, or the stream was closed. The lease is as
            before.
        """
        stream.checked_raw()  # Attempts the items of `queue_behind`.
        with self.lock:
            value = without_items(stream, functools.partial(self._write_next, stream))
        listener = self.block.session.listener
        if listener is not None and address:
            name = self.block.announcement(self.slot, self.generation, value)
            with stream.device.current():
                listener.shared(address, nbytes, stream.checked_raw(), name)
        return value

    def _write_next(self, stream: Stream) -> int:
        words = self.words
        last = words.last_announced
        if self._announcer is not stream:
            if self._announcer is not None:  # Without an announcer no write of a value is pending.
                self._follow(stream, self._announcer, last)
            self._announcer = stream
        # The value counts as used before the write is queued: if a signal handler raises, no later announcement repeats
        # it. ``announced`` is set, too, because importers refuse to wait for a value above it.
        words.last_announced = words.announced.value = value = (last + 1) % WORD
        try:
            self.block.write(stream, words.ready, value)
        except (CudaError, ClosedError):
            words.last_announced = words.announced.value = last
            raise
        except BaseException:
            # A signal handler raised an exception, so the write may not be queued, and a later announcement would wait
            # for it. If the write is queued, a second write of the same value changes nothing.
            self.block.write(stream, words.ready, value)
            raise
        return value

    def _follow(self, stream: Stream, announcer: Stream, last: int) -> None:
        """Order the writes of ``stream`` after those of ``announcer``, which has announced values up to ``last``.
        Raises CudaError.
        """
        words = self.words
        if not reached(words.ready.value, last):
            if announcer.direct and not announcer.capturable:
                # The stream waits for an event and not for ``ready``, because importers can write to ``ready``.
                without_items(announcer, functools.partial(stream.wait, announcer))
            else:
                # Other code may begin to capture ``announcer`` at any time, also right after it was asked, and an event
                # would then make ``stream`` a part of that capture.
                self.block.wait(stream, words.ready, last)

    def add_hold(self, hold: Hold) -> None:
        """Add a hold for a descriptor in transit."""
        with self.lock:
            # Two older holds are checked for each new one. Otherwise memory that is sent again and again, and is not
            # freed, would keep a pipe for each message.
            self._holds = [*self._holds[2:], hold, *_lasting(self._holds[:2])]

    def _in_transit(self) -> bool:
        """Whether a descriptor of the lease is in transit: one of its holds has not ended. Ended holds are removed from
        the list.
        """
        self._holds = _lasting(self._holds)
        return bool(self._holds)

    # -- importers -------------------------------------------------------------------------------------------

    def _using(self) -> list[int]:
        """Return the indexes of the importers that still use the memory. From now on a thread waits for the death of
        each of them.
        """
        if self.block.all_closed(self.words):
            return []
        importers: list[int] = (self.block.opened[self.slot] != self.block.closed[self.slot]).nonzero()[0].tolist()
        for importer in importers:
            self.block.watch_importer(importer)
        return importers

    def quiet(self) -> bool:
        """Whether all queued work on the slot's words has run, so that another lease can use the slot."""
        ready, last = self.words.ready.value, self.words.last_announced
        if ready != last and not reached(ready, last):
            return False
        return self.block.all_closed(self.words) or not self._using()

    def end_for_good(self, stream: Stream | None) -> bool:
        """Make the descriptors stale and end the lease if all importers have closed the memory; ``stream`` then waits
        for their work. Returns whether the lease has ended. If it has not, the descriptors stay stale. While a
        descriptor is in transit, nothing changes. ``stream=None``: nothing is queued. Raises CudaError.
        """
        with self.lock:
            if self._in_transit():
                return False
            self.make_stale()
            return self.block.all_closed(self.words) or self._follow_importers(stream)

    def end_if_closed(self, stream: Stream | None) -> bool:
        """End the lease as :meth:`end_for_good` does, but only if all importers have closed the memory. Returns whether
        the lease has ended. If it has not, nothing has changed. Raises CudaError.
        """
        with self.lock:
            # Under the lock: otherwise an importer that opens the memory now could find its descriptor stale for a
            # moment.
            if self._in_transit() or not self._all_closing(self._using()):
                return False
            ended = False
            try:
                ended = self.end_for_good(stream)  # False if an importer has opened the memory after the look.
            finally:
                if not ended:
                    self.words.generation.value = self.generation
        return ended

    def make_stale(self) -> None:
        """Make the descriptors stale: an importer that opens the memory from now on is refused. If an importer has
        opened the memory before, this process sees it in the words that it reads from now on.
        """
        with self.lock:
            self.words.generation.value = (self.generation + 1) % WORD
            fence()

    def _all_closing(self, importers: list[int]) -> bool:
        """Whether all ``importers``, given by their indexes, have written ``closing``: then their writes of ``closed``
        are queued.
        """
        return all(self.block.opened[self.slot, one] == self.block.closing[self.slot, one] for one in importers)

    def _follow_importers(self, stream: Stream | None) -> bool:
        """Make ``stream`` wait for the importers that have not written ``closed`` yet, if all of these have written
        ``closing``. Returns whether they have. Raises CudaError.
        """
        using = self._using()
        if not self._all_closing(using):
            return False
        if stream is None:
            return True
        for importer in using:
            theirs = self.block.importer_words(self.slot, importer)
            # Not ``opened``: it rises briefly while an importer refuses a stale descriptor, and ``closed`` would not
            # reach that value.
            without_items(stream, functools.partial(self.block.wait_closed, stream, theirs, theirs.closing.value))
        return True

    def unused(self) -> bool:
        """Whether nobody uses the memory any more: every hold has ended, and every importer has closed the memory and
        finished its work. The call makes the descriptors stale if every hold has ended and every importer has closed
        the memory, even if work of importers is left.
        """
        return self.end_if_closed(None) and self.block.all_closed(self.words)

    # -- the buffer ------------------------------------------------------------------------------------------

    def begin_free(self, buffer: Buffer, stream: Stream, still_imported: StillImported, timeout: float | None) -> bool:
        """End the lease and return True, so that the buffer frees the memory on ``stream`` now, after the work of
        importers that have closed the memory. If importers have it open and ``still_imported`` is ``"defer"``, submit
        the free to the queue of deferred releases, and return False.
        """
        if still_imported != "defer":
            self._await(buffer, stream, still_imported, timeout)
        elif not self.end_for_good(stream):
            self._defer(buffer, stream)
            return False
        return True

    def end_free(self, freed: bool) -> None:
        # The buffer may be freed even if the driver has refused the call: other code has then freed the memory.
        if freed:
            self._exports.with_memory.discard(self)
            self._exports.deferred.work()
        else:
            self.words.generation.value = self.generation

    def _await(self, buffer: Buffer, stream: Stream, still_imported: StillImported, timeout: float | None) -> None:
        """End the lease for a free with ``still_imported="raise"``, ``"wait"`` or ``"ignore"``: at once, or after at
        most ``timeout`` seconds. ``"ignore"`` only makes descriptors stale. Raises StillImportedError.
        """
        if still_imported == "ignore":
            self.make_stale()
            return
        end = None if timeout is None else time.monotonic() + timeout
        while not self.end_if_closed(stream):
            if still_imported == "raise" or (end is not None and time.monotonic() >= end):
                raise StillImportedError(f"{buffer!r} is open in another process, or in transit to one")
            time.sleep(_PAUSE)

    @property
    def readers(self) -> int:
        """Number of other processes that have the memory open now, or whose work on it goes on after the close."""
        return len(self._using())

    def drop(self, buffer: Buffer) -> None:
        """Submit the free of a dropped buffer to the queue of deferred releases; the free comes after the work of the
        buffer's stream.
        """
        self._defer(buffer, buffer.stream)

    def _defer(self, buffer: Buffer, stream: Stream) -> None:
        # Python switches no threads within this line, so only one of two threads frees the buffer.
        shared, buffer.shared = buffer.shared, None
        if shared is None:
            buffer.check_usable()  # Raises.
        listener = self._exports.session.listener
        if listener is not None:
            listener.deferred(int(self.pointer))
        self._exports.deferred.submit(_DeferredFree(self, stream))

    def release(self) -> None:
        """Make descriptors stale and release the slot, which is reused once it is quiet. Idempotent."""
        if self._owned:
            self._owned = False
            self.words.generation.value = (self.generation + 1) % WORD
            self._announcer = self.pool = None
            self._exports.leaving.append(self)

    def __del__(self) -> None:
        # A forked child has a copy of this object. Its release would free words that the parent still uses.
        if getattr(self, "words", None) is not None and not self._exports.session.forked:
            self.release()


class _DeferredFree(Deferred):
    """Item of the queue of deferred releases (:mod:`streamalloc.core.deferred`): a free that waits until importers have
    closed the memory.
    """

    __slots__ = ("_lease", "_raw", "_stream")

    def __init__(self, lease: Lease, stream: Stream) -> None:
        self._lease: Lease | None = lease
        self._stream = stream
        self._raw = lease.pointer

    def attempt(self) -> bool:
        lease = self._lease
        if lease is not None and self._raw is not None:
            # The first call makes no driver call. Most attempts end there, without a stream that stands for another.
            freed = lease.end_for_good(None) and ordered_after(self._stream, lambda ordered: self._free(lease, ordered))
            if not freed:
                return False
        self.forget()
        return True

    def _free(self, lease: Lease, ordered: Stream) -> bool:
        # From the start, because another thread's ``end_if_closed`` may have made the descriptors valid meanwhile.
        if not lease.end_for_good(ordered):
            return False
        session, raw = lease._exports.session, ordered.checked_raw()
        with notify_freed(session, int(self._raw), raw):
            ordered.in_context(session.release, self, "cuMemFreeAsync", raw)
        return True

    def forget(self) -> None:
        lease, self._raw, self._lease = self._lease, None, None
        if lease is not None:
            lease._exports.with_memory.discard(lease)


class KeptReferences(Deferred):
    """Item of the queue of deferred releases. It keeps a shared object that is no buffer, until its lease is unused
    (:meth:`Lease.unused`). Otherwise the library that owns the memory could free the memory while importers use it.
    """

    def __init__(self, lease: Lease, ordinal: int, things: object) -> None:
        self._lease = lease
        self._ordinal = ordinal
        self._things = things

    def attempt(self) -> bool:
        if not self._lease.unused():
            return False
        # The device is made current, because another library may free its memory on the default stream of the current
        # device.
        with self._lease.block.session.current(self._ordinal):
            self._things = None
        return True


class PoolExport:
    """The exported handle and the id of one pool.

    The object exists until the pool was closed or dropped, and its leases have ended. Its end sets its marks, words in
    control blocks, to 0. By this change importers detect the end of the pool.
    """

    def __init__(self, pool: MemoryPool, exports: Exports, device: Device) -> None:
        name = "cuMemPoolExportToShareableHandle"
        self.fd: Fd = Fd.made_by(exports.session, name, pool.checked_raw(), _POSIX_MEMBER, 0, hint=_NOT_EXPORTABLE)
        self.origin: bytes = secrets.token_bytes(16)
        published[self.origin] = self.fd
        self.device: Device = device
        self._marks: dict[bytes, ExporterMark] = {}

    def mark(self, block: ControlBlock) -> int:
        """Return the number of the pool's mark in ``block``, which keeps its value while this object exists. The first
        call makes the mark.
        """
        found = self._marks.get(block.id) or self._marks.setdefault(block.id, ExporterMark(block, "pool"))
        return found.number


class Exports:
    """The handles that this process has exported through one driver, and the leases of what it has shared."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.deferred: DeferredQueue = deferred_queue(session)
        self.blocks: list[ControlBlock] = []
        self.leaving: deque[Lease] = deque()
        """Released leases whose slots are not free yet, because a stream may still have to write a word of the slot."""
        self.lock: AbstractContextManager[bool] = RLock()
        """Lock that is held while a buffer gets its lease, or a pool its exported handle."""
        self.with_memory: set[Lease] = set()
        """Leases with memory that is not freed, kept alive here. Otherwise the garbage collector could end a buffer and
        its lease in one cycle, and the deferred free of the buffer needs the lease, its holds and its slot.
        """
        self._slots = RLock()
        """Lock that is held while slots are taken. It is not :attr:`lock`, because some callers of :meth:`new_leases`
        hold that lock and others do not.
        """
        self.endpoint: bytes = NOWHERE
        """16 bytes that name the socket of the handle server; zeros before :meth:`serve`."""
        self.version: int = int(session.call("cuDriverGetVersion"))
        self._uuids: dict[int, bytes] = {}
        self._handles = weakref.WeakKeyDictionary[PhysicalMemory, dict[MemHandleType, Fd | bytes]]()
        self._ids: weakref.WeakKeyDictionary[PhysicalMemory | VirtualBuffer, bytes] = weakref.WeakKeyDictionary()

    def serve(self) -> bytes:
        """Start the handle server of this process, from which importers fetch file descriptors. Descriptors made later
        carry its endpoint. Returns the endpoint (16 bytes).
        """
        if self.endpoint == NOWHERE:
            self.endpoint = serve()
        return self.endpoint

    def uuid(self, device: Device) -> bytes:
        """Return the UUID of ``device`` as 16 bytes, for descriptors. The first call for a device reads the UUID from
        the driver (``cuDeviceGetUuid``).
        """
        return self._uuids.get(device.ordinal) or self._uuids.setdefault(device.ordinal, device.uuid.bytes)

    # -- slots and leases ------------------------------------------------------------------------------------

    def new_leases(self, count: int = 1) -> list[Lease]:
        """Return ``count`` leases on free slots of one control block. If no block has so many free slots, a new block
        is made. Raises OSError if no file can be made for it, and CudaError if the driver refuses.
        """
        while not (leases := self._next_free(count)):
            self._add_block()
        return leases

    def _next_free(self, count: int) -> list[Lease]:
        """Return leases on ``count`` free slots of one control block; an empty list if no block has so many."""
        with self._slots:
            # The slots that were released first are checked first, because they become quiet first. With two checks for
            # each slot that is taken, released slots are soon used again, so few slots are in use, and the CPU's cache
            # keeps their words.
            checks = min(2 * count, len(self.leaving))
            if checks:
                fence()
            for _ in range(checks):
                lease = self.leaving.popleft()
                if lease.quiet():
                    lease.block.free_slots.append(lease.slot)
                else:
                    self.leaving.append(lease)
            block = next((block for block in self.blocks if len(block.free_slots) >= count), None)
            return [] if block is None else [Lease(self, block, block.free_slots.pop()) for _ in range(count)]

    def block(self) -> ControlBlock:
        """Return a control block of this process for marks, which any block can have. If there is no block, one is
        made; errors as for :meth:`new_leases`.
        """
        if not self.blocks:
            self._add_block()
        return self.blocks[0]

    def _add_block(self) -> None:
        block = ControlBlock.create(self.session)
        published[block.id] = block.fd
        self.blocks.append(block)

    def lease(self, buffer: Buffer) -> Lease:
        """Return the lease of a buffer, which from then on decides when the buffer is freed. The first call exports the
        allocation (``cuMemPoolExportPointer``). Raises ValueError if the pool was not made for sharing, ClosedError if
        the buffer was freed or the pool closed, and CudaError if the driver refuses.
        """
        buffer = buffer.past_caches()
        with self.lock:
            lease: Any = buffer.shared
            if lease is None:
                # A buffer made by ``Buffer.from_handle`` has no pool object, so the driver is queried for the pool.
                known = buffer.owner if type(buffer) is PoolBuffer else None
                owner: Any = known or pointer_attributes(buffer.address, driver=self.session.driver).pool
                pool, (lease,) = self.pool(owner), self.new_leases()
                lease.pool, lease.payload = pool, self.export_pointer(buffer.address)
                buffer.free_by(lease)  # Raises if another thread has freed the buffer meanwhile.
                self.with_memory.add(lease)
        return lease  # type: ignore[no-any-return]

    def export_pointer(self, pointer: Any) -> bytes:
        """Return the driver's export data for the allocation at ``pointer``, 64 bytes (``cuMemPoolExportPointer``).
        Raises CudaError.
        """
        result, data = self.session.cuMemPoolExportPointer(pointer)
        if result:
            raise error_from(result, "cuMemPoolExportPointer", _NOT_EXPORTABLE)
        return opaque_bytes(data)

    # -- handles ---------------------------------------------------------------------------------------------

    def pool(self, pool: MemoryPool) -> PoolExport:
        """Return the exported pool of ``pool``. The first call exports it (``cuMemPoolExportToShareableHandle``).
        Raises ValueError if the pool was not made for sharing (the message says how to make one), ClosedError if it was
        closed, and CudaError if the driver refuses.
        """
        with self.lock:
            found: PoolExport | None = pool.exported
            if found is None:
                if pool.properties is not None and not pool.properties.handle_types & POSIX:
                    remedy = "make it with handle_types=MemHandleType.POSIX_FILE_DESCRIPTOR"
                    if pool.properties.handle_types:
                        remedy += f"; {NO_FABRIC_POOLS}"
                    elif pool.managed:
                        remedy = "managed pools belong to one process"
                    elif pool.location.type is MemLocationType.HOST:
                        remedy = f"{remedy} on one node, MemLocation.host_numa(0)"
                    raise ValueError(f"{pool!r} cannot be shared: {remedy}")
                on_device = pool.location.type is MemLocationType.DEVICE
                device = Device(pool.location.id if on_device else 0, driver=self.session.driver)
                found = pool.exported = PoolExport(pool, self, device)
                if pool.closed:  # Closed by another thread, which may not have ended this handle.
                    pool.exported = None
            return found

    def memory(self, memory: PhysicalMemory, handle_type: MemHandleType) -> tuple[ChunkHandle, Fd | None]:
        """Return the part of a descriptor that describes ``memory``, and the exported file descriptor, or None for a
        fabric handle. The first call exports the memory (``cuMemExportToShareableHandle``). Raises ValueError if
        the memory was not made with this handle type, ClosedError if it was closed, and CudaError if the driver
        refuses.
        """
        handles = self._handles.setdefault(memory, {})
        if handle_type not in handles:
            handles.setdefault(handle_type, memory.export(handle_type))
        handle = handles[handle_type]
        name = self.id(memory)
        if not isinstance(handle, Fd):
            return ChunkHandle(name, memory.nbytes, handle), None
        published[name] = handle
        return ChunkHandle(name, memory.nbytes), handle

    def id(self, thing: PhysicalMemory | VirtualBuffer) -> bytes:
        """Return the id of memory or of a growable buffer: 16 random bytes by which importers recognise it."""
        return self._ids.get(thing) or self._ids.setdefault(thing, secrets.token_bytes(16))


exports_of: PerDriver[Exports] = PerDriver(Exports)
"""The :class:`Exports` object of each driver in this process."""


def exports_for(session: Session) -> Exports:
    """Return the :class:`Exports` of a session's driver, for a call that shares. Items of the queue of deferred
    releases are attempted first. Raises ForkedProcessError in a forked child.
    """
    session.check_process()
    exports = exports_of(session)
    exports.deferred.work()
    return exports
