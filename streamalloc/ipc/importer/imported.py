"""Imported memory: its import by the driver, its objects in this process, and its release.

The driver returns the same address for a second import of an allocation, and does not count imports. So this process
counts its objects, and releases the import with the last one. A :class:`PoolSource` has the common data of one pool's
allocations. A stream waits for the contents of opened memory; if no stream can, the host waits.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any, NamedTuple

from streamalloc.core.errors import (
    LOST,
    CaptureError,
    ClosedError,
    CudaError,
    StaleDescriptorError,
    attach,
    error_from,
    size_text,
    undoing,
)
from streamalloc.core.html import Row
from streamalloc.core.internal import (
    Deferred,
    DeferredQueue,
    Device,
    Event,
    Fence,
    Memory,
    Stream,
    StreamLike,
    TypedView,
    as_stream,
    deferred_queue,
    direct_handle,
    direct_view,
    of_this_thread,
    ordered_after,
    raw_handle,
    refuse_capture,
    sees_all_work,
    work,
)
from streamalloc.core.properties import MemAccess, MemAccessDesc, MemLocation
from streamalloc.core.resource import Closes
from streamalloc.core.session import Session
from streamalloc.driver.internal import OpaqueStruct, RLock, cuda, opaque_struct
from streamalloc.ipc.wire.control_block import WORD, ControlBlock, ImporterWords, SlotWords, fence, reached
from streamalloc.ipc.wire.descriptor import AllocationFields, Flags, Foreign, PoolHeader
from streamalloc.vmm.internal import After, RemappableBuffer, Rights

_LAZY_PEER_ACCESS = 1
_RANGE_SIZE = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE
_BAD_POINTER = "the owner's process has freed it, or ended"
_STALE = "this memory was freed by its owner before it was opened here"
_BAD_LEASE = "the descriptor has a lease or a hold, but names no control block"
# Seconds between two checks of an announcement by the host.
_PAUSE = 0.0002
# Most attempts of a call that the driver refuses; seconds between two attempts while a device is busy; seconds before
# each query of the devices' work.
_TRIES = 5
_IDLE_PAUSE = 0.02
_QUERIES = (0.0, 0.00005, 0.0002)


class Announcement(NamedTuple):
    """A value of the word ``ready`` in a slot of the exporter's control block. When it is reached, the contents are
    there.
    """

    block: ControlBlock
    slot: int
    generation: int
    ready: int

    @property
    def words(self) -> SlotWords:
        """The exporter's words of the slot."""
        return self.block.slot_words(self.slot)

    @property
    def written(self) -> bool:
        """Whether the exporter has written the value: the contents are there."""
        return reached(self.words.ready.value, self.ready)

    @property
    def lost(self) -> bool:
        """Whether the value was written by another process, because the exporter died."""
        return self.words.was_lost(self.ready)

    def precede(self, stream: Stream) -> None:
        """Make later work of a stream wait for the announcement, unless it is already written."""
        if self.written:
            return
        if not reached(self.words.announced.value, self.ready):
            raise ValueError("the descriptor waits for contents that its exporter has not announced")
        self.block.expect(self.slot, self.ready)
        self.block.wait(stream, self.words.ready, self.ready)

    def wait(self, stream: Stream | None) -> None:
        """Make a stream wait for the announcement. Without a stream, or in a capture, the host waits."""
        if stream is not None:
            with contextlib.suppress(CaptureError):
                self.precede(stream)
                return
        if not self.written:
            self.block.expect(self.slot, self.ready)  # so that the exporter's death ends the wait
            while not self.written:
                time.sleep(_PAUSE)

    # -- memory that was opened without a stream -------------------------------------------------------------
    # After an open without a stream, the device's default stream waits for the contents. Every other stream waits
    # before it first uses the memory. The host waits before it returns an address, because uses by address are not
    # seen, and before a capture, because graphs cannot wait for other processes.

    def await_on(self, memory: Memory, stream: Stream | None) -> None:
        """Make a stream, or the host if None, wait for the contents of ``memory``. Notifies the listener."""
        if stream is None:
            self.wait(None)
        self.notify_listener(memory, stream)
        if stream is not None:
            self.wait(stream)

    def seen(self, memory: Memory) -> bool:
        """Whether the contents of ``memory`` are there now, as seen by the host. If so, notifies the listener."""
        written = self.written
        if written:
            self.notify_listener(memory, None)
        return written

    def notify_listener(self, memory: Memory, stream: Stream | None) -> None:
        """Notify a listener that ``stream``, or the host if None, waits for the contents."""
        listener = self.block.session.listener
        if listener is None:
            return
        name = self.block.announcement(self.slot, self.generation, self.ready)
        with contextlib.nullcontext() if stream is None else stream.device.current():
            raw = None if stream is None else raw_handle(stream)
            listener.opened(memory._at, memory.nbytes, raw, name, int(self.words.ready.pointer))


class Imports:
    """Imports of this process through one driver, and the thread that releases dropped imports."""

    def __init__(self, session: Session) -> None:
        self.session: Session = session
        self.lock: AbstractContextManager[bool] = RLock()
        """Held to count imports. Code under it waits for no stream or process."""
        self.deferred: DeferredQueue = deferred_queue(session)
        self.handles: dict[int, PoolHandle] = {}
        """Pools by ``CUmemoryPool``. The driver returns the same handle for repeated imports."""
        self.allocations: dict[bytes, ImportedAllocation] = {}
        """Pool allocations by the driver's export data."""
        self._dropped: SimpleQueue[bool] = SimpleQueue()
        """Wakes the thread; finalisers may put into a SimpleQueue."""
        self._thread: threading.Thread | None = None

    def start_thread(self) -> None:
        """Start the thread, before the first import that may be dropped. Idempotent."""
        if self._thread is None:
            args = (self._dropped, weakref.ref(self.session))
            thread = threading.Thread(target=_release_dropped, args=args, name="streamalloc drops", daemon=True)
            thread.start()
            self._thread = thread
            weakref.finalize(self, self._dropped.put, False).atexit = False

    def drop(self, item: Deferred) -> None:
        """Submit the release of a dropped object, and wake the thread. For finalisers."""
        self.deferred.submit(item)
        self._dropped.put(True)


def _release_dropped(dropped: SimpleQueue[bool], reference: weakref.ref[Session]) -> None:
    """Thread body: do deferred work after each True in the queue, until a False.

    Without this thread, the process might reach no point of work while a dropped import's owner waits for the release.
    """
    while dropped.get():
        session = reference()
        if session is None or not session.usable:
            return
        work(session)
        del session


class OnceIdle(Deferred):
    """A driver call that waits for the devices, made on its own thread once they are idle.

    While such a call waits, driver 580 blocks all other threads that need the context. If a stream waits for an action
    of this process, the call would never return. ``call`` may run twice.
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
            # After an error of a lost context there is no work to wait for.
            with contextlib.suppress(CudaError), self._session.relaxed():
                if not self._idle():
                    deferred_queue(self._session).submit(self)
                    return
            with contextlib.suppress(CudaError):
                self._call()
                return

    def _idle(self) -> bool:
        """Whether all present work of the devices has completed, within a few short queries."""
        queued = Fence(self._session)
        for pause in _QUERIES:
            time.sleep(pause)
            if queued.done():
                return True
        return False


class HostLease(Deferred):
    """Use of a lease for memory that is not released in stream order. The host counts its close.

    Such memory is a range, or an allocation of ``cuMemAlloc``. As a deferred item, this object counts the close once
    the present work has ended.
    """

    __slots__ = ("_words", "_work", "imports")

    def __init__(
        self, imports: Imports, block: ControlBlock, words: ImporterWords, generation: int, device: Device
    ) -> None:
        self.imports = imports
        self._work: Fence | None = None
        self._words: ImporterWords | None = words
        # No lock needed: once this lease is in ``users``, no other lease counts a close.
        words.users.add(self)
        words.opened.value = (words.opened.value + 1) % WORD
        with undoing(self.end):
            # Count first, then check for a free. The exporter does both in the opposite order.
            block.sync(device)
            if words.slot_words.generation.value != generation:
                raise StaleDescriptorError(_STALE)

    def end(self) -> None:
        """Count the close. All work on the memory must have ended. Idempotent."""
        words, self._words = self._words, None
        if words is not None:
            with self.imports.lock:
                # Read the number first: later opens have a higher one.
                number = words.opened.value
                words.users.discard(self)
                if not words.users:
                    words.closing.value = number
                    words.closed.value = number

    def attempt(self) -> bool:
        if self._work is None:
            self._work = Fence(self.imports.session)
        if not self._work.done():
            return False
        self.end()
        return True


class PoolHandle(Deferred):
    """The driver's handle of another process's pool.

    It is destroyed only after the frees of all imported allocations have run. Driver 580.159 does not wait for them,
    and a later use of the handle kills the process.
    """

    __slots__ = ("_frees", "_raw", "imports", "marks", "users")

    def __init__(self, imports: Imports) -> None:
        self.imports: Imports = imports
        self._raw: Any = None
        self._frees: Fence | None = None
        self.marks: set[tuple[ControlBlock, int]] = set()
        """Marks of the exporter, which show whether its pool still exists."""
        self.users: weakref.WeakSet[ImportedPool] = weakref.WeakSet()

    def watch(self, block: ControlBlock | None, mark: int) -> None:
        """Record the mark that shows the end of the pool; ``ValueError`` if the control block has no such mark."""
        if block is not None:
            block.marked("pool", mark)
            self.marks.add((block, mark))

    def ended(self) -> bool:
        """Whether the marks show that the owner has closed the pool or has died.

        A pool of another library has one mark for each time it was shared.
        """
        marks = list(self.marks)
        gone = [(block, mark) for block, mark in marks if not (block.marked("pool", mark) and block.exporter_alive())]
        if len(gone) < len(marks):
            self.marks.difference_update(gone)
        return len(gone) == len(marks) > 0

    def attempt(self) -> bool:
        imports = self.imports
        if self._frees is None:
            self._frees = Fence(imports.session)
        if not self._frees.done():
            return False
        with imports.lock:
            # If the pool was imported again meanwhile, the driver returned the same handle.
            if self._raw is not None and int(self._raw) not in imports.handles:
                imports.session.release(self, "cuMemPoolDestroy")
        return True


class ImportedPool(Foreign):
    """A pool of another process. Its allocations can be opened here, but this process cannot allocate from it.

    :func:`open` returns it. It needs no ``close``: the driver's handle is destroyed (``cuMemPoolDestroy``) when the
    owner has closed the pool or has ended, and nothing here uses the pool.
    """

    __slots__ = ("__weakref__", "_pool", "device")

    def __init__(self, pool: PoolHandle, device: Device) -> None:
        self._pool = pool
        self.device: Device = device
        """The device that has the memory."""
        pool.users.add(self)

    @property
    def handle(self) -> int:
        """The driver's handle (``CUmemoryPool``) as a number."""
        return int(self._pool._raw)

    @property
    def _session(self) -> Session:
        return self._pool.imports.session

    def set_access(self, device: Device, access: MemAccess = MemAccess.READWRITE) -> None:
        """Give another device of this process access to the pool's memory (``cuMemPoolSetAccess``)."""
        descriptor = MemAccessDesc(device.location, access).to_driver()
        self._session.call("cuMemPoolSetAccess", self._pool._raw, [descriptor], 1)

    def __repr__(self) -> str:
        return f"<ImportedPool {self.handle:#x} on device {self.device.ordinal}>"


class _Source:
    """Imports from one pool, or of one ``cuMemAlloc`` allocation, of another process."""

    __slots__ = ("_default", "allocations", "block", "device", "holds", "imports", "leased", "lock", "session")

    waits = False
    """True if the release of an import may wait for a stream."""

    def __init__(self, imports: Imports, device: Device, block: ControlBlock | None, flags: int) -> None:
        if flags & (Flags.LEASED | Flags.HELD) and block is None:
            raise ValueError(_BAD_LEASE)
        self.imports: Imports = imports
        self.session: Session = imports.session
        self.device: Device = device
        self._default: Stream | None = None
        self.block: ControlBlock | None = block
        """The exporter's control block."""
        self.leased: bool = bool(flags & Flags.LEASED)
        """Whether the control block counts opens and closes."""
        self.holds: bool = bool(flags & Flags.HELD)
        """Whether descriptors hold the allocation until they are opened."""
        self.lock: AbstractContextManager[bool]
        """Held while imports are counted."""
        self.allocations: dict[bytes, ImportedAllocation]
        """Imports by the driver's export data."""

    @property
    def default_stream(self) -> Stream:
        """The device's default stream."""
        if self._default is None or self._default.closed:
            self._default = self.device.default_stream
        return self._default


class PoolSource(_Source):
    """A pool of another process, for allocations with leases in one control block."""

    __slots__ = ("_struct", "handle", "header")

    def __init__(self, header: PoolHeader, handle: PoolHandle, device: Device, block: ControlBlock | None) -> None:
        super().__init__(handle.imports, device, block, header.flags)
        self.header: PoolHeader = header
        self.handle: PoolHandle = handle
        self.lock: AbstractContextManager[bool] = self.imports.lock
        self.allocations: dict[bytes, ImportedAllocation] = self.imports.allocations
        # One struct for all calls, because ``acquire`` is called under the lock.
        self._struct = OpaqueStruct("CUmemPoolPtrExportData")

    def acquire(self, imported: ImportedAllocation) -> None:
        """Import an allocation (``cuMemPoolImportPointer``)."""
        data = self._struct.filled(imported.key)
        result, imported._raw = self.session.cuMemPoolImportPointer(self.handle._raw, data)
        if result:
            imported._raw = None
            raise error_from(result, "cuMemPoolImportPointer", _BAD_POINTER)

    def count_open(self, imported: ImportedAllocation, words: ImporterWords, generation: int) -> None:
        """Count the open in a lease.

        Raises
        ------
        StaleDescriptorError
            The lease has ended.
        """
        imported.words, imported.generation = words, generation
        # Count first, then check for a free. The exporter does both in the opposite order.
        imported.number = number = (words.opened.value + 1) % WORD
        words.opened.value = number
        fence()
        if words.slot_words.generation.value != generation:
            if imported._raw is not None:
                # Keep the import without a lease. This open used no memory, so its end needs no stream.
                words.opened.value, imported.words = (number - 1) % WORD, None
            raise StaleDescriptorError(_STALE)

    def end(self, imported: ImportedAllocation, stream: Stream, handle: Any, sees_all: bool) -> None:
        """End an import after the work of a stream (``cuMemFreeAsync``), and count the close.

        ``handle``, ``sees_all``: as for :meth:`ControlBlock.write_by`.
        """
        raw, imported._raw = imported._raw, None
        if raw is not None:
            result = self.session.cuMemFreeAsync(raw, handle)[0]
            if result:
                error = error_from(result, "cuMemFreeAsync")
                imported._raw = None if isinstance(error, LOST) else raw
                raise error
        if self.allocations.get(imported.key) is imported:
            del self.allocations[imported.key]
        imported.count = 0
        mine = imported.words
        # If the word is higher, a later import of the same slot is open; its end writes the word.
        if mine is None or mine.opened.value != imported.number:
            return
        block: Any = self.block
        before = (imported.number - 1) % WORD
        if not imported.address:
            # Do not count up ``closed``: streams may still write it for earlier imports.
            mine.opened.value = before
            return
        closed = mine.closed.value
        if closed != before and not reached(closed, before):
            # Another stream will still write the end of an earlier import. Wait for it, because the word may only rise.
            block.wait(stream, mine.closed, before)
        block.write_by(handle, sees_all, mine.closed, imported.number)
        mine.closing.value = imported.number


class LegacySource(_Source):
    """A ``cuMemAlloc`` allocation of another process. The driver counts opens, so each object has its own import."""

    __slots__ = ("_lease",)

    waits = True

    def __init__(self, imports: Imports, device: Device, block: ControlBlock | None, flags: int) -> None:
        super().__init__(imports, device, block, flags)
        # A separate lock, because the release waits for a stream.
        self.lock: AbstractContextManager[bool] = RLock()
        self.allocations: dict[bytes, ImportedAllocation] = {}
        self._lease: HostLease | None = None

    def acquire(self, imported: ImportedAllocation) -> None:
        """Open it (``cuIpcOpenMemHandle``)."""
        handle = opaque_struct("CUipcMemHandle", imported.key)
        with self.device.current():
            imported._raw = self.session.call("cuIpcOpenMemHandle", handle, _LAZY_PEER_ACCESS, hint=_BAD_POINTER)

    def count_open(self, imported: ImportedAllocation, words: ImporterWords, generation: int) -> None:
        """Count the open in a lease; errors as for a pool."""
        imported.words = words
        assert self.block is not None
        self._lease = HostLease(self.imports, self.block, words, generation, self.device)

    def end(self, imported: ImportedAllocation, stream: Stream, handle: Any, sees_all: bool) -> None:
        """Close the allocation and count the close (``cuIpcCloseMemHandle``). Not stream-ordered: the host waits."""
        if imported._raw is not None:
            stream.synchronize()
            with self.device.current():
                self.session.release(imported, "cuIpcCloseMemHandle")
        self.allocations.clear()
        if self._lease is not None:
            self._lease.end()


class ImportedAllocation:
    """An allocation of another process, imported once, with one or more :class:`ImportedBuffer` in this process."""

    __slots__ = ("_raw", "address", "count", "generation", "key", "number", "passed", "source", "words")

    def __init__(self, source: PoolSource | LegacySource, key: bytes) -> None:
        self.source: PoolSource | LegacySource = source
        self.key: bytes = key
        """The driver's export data."""
        self.words: ImporterWords | None = None
        """This importer's words of the lease; None without a lease."""
        self.generation: int = 0
        """Generation of the lease's slot."""
        self.number: int = 0
        """Value of ``opened`` that counts this import."""
        self._raw: Any = None
        """``CUdeviceptr``; None before the import and after its release."""
        self.address: int = 0
        self.count: int = 1
        """Open objects."""
        self.passed: tuple[Event, ...] = ()
        """Events after the work of the objects that are already closed; the stream of the last close waits for them."""


def _join(
    imported: ImportedAllocation, source: PoolSource | LegacySource, mine: ImporterWords, generation: int
) -> None:
    """Check that an import has the lease of another descriptor. An import without a lease gets this one."""
    if imported.words is None:
        imported.source = source
        source.count_open(imported, mine, generation)
    elif imported.words is not mine or imported.generation != generation:
        if mine.slot_words.generation.value != generation:
            raise StaleDescriptorError(_STALE)
        raise ValueError("this memory is open here under another lease: close that first")


def _release(owner: ImportedBuffer | _DroppedImport, stream: Stream, *, used: bool = True) -> None:
    """Release one object of an import; the last one ends the import. After an error the call can be repeated.

    ``used``: the import must be released after queued work of ``stream``.
    """
    imported = owner._import
    if imported is None:
        return
    source = imported.source
    if source.session.forked:
        source.session.check_process()
    with source.lock:
        if owner._import is None:
            return  # another thread was first
        if imported.count > 1:
            # The last object's end follows this event.
            imported.passed += (stream.record(),) if used else ()
            imported.count -= 1
            owner._import = None
            return
        for event in imported.passed:
            stream.wait(event)
        handle, sees_all = direct_view(stream, source.session)
        if handle is not None:
            source.end(imported, stream, handle, sees_all)
        else:
            with stream.device.current():
                source.end(imported, stream, raw_handle(stream), sees_all_work(stream))
        owner._import = None


class _DroppedImport(Deferred):
    """An import whose object was dropped. It is released after the work of its stream."""

    __slots__ = ("_import", "_stream")

    def __init__(self, imported: ImportedAllocation, stream: Stream) -> None:
        self._import: ImportedAllocation | None = imported
        self._stream = stream

    def attempt(self) -> bool:
        imported = self._import
        if imported is not None and imported.source.waits:
            imported.source.imports.deferred.submit(OnceIdle(imported.source.session, self._close))
        else:
            self._close()
        return True

    def _close(self) -> None:
        ordered_after(self._stream, functools.partial(_release, self))


class ImportedBuffer(Memory, Closes, Foreign):
    """An allocation of another process, or a part of one, made by :func:`open`.

    Its close is stream-ordered and allows the owner to free the memory. Dropping the object closes it on its own
    stream.
    """

    __slots__ = (
        "__weakref__", "_contents", "_import", "_nbytes", "_offset", "_ready", "_source", "_stream",
        "_words",
    )  # fmt: skip

    def __init__(self, source: PoolSource | LegacySource, fields: AllocationFields, stream: Stream) -> None:
        """Open an allocation, again if it is open already. ``stream`` waits for its contents."""
        slot, generation, ready, offset, size, base_size, hold, key = fields
        block = source.block
        mine: Any = None
        if block is not None:
            mine = block.importer_words(slot, block.importer)
            if source.holds:
                block.mark("hold", hold)  # raises if there is no such mark
        self._import: ImportedAllocation | None = None
        """None once closed."""
        self._source = source
        self._words: ImporterWords | None = mine
        """This importer's words of its slot."""
        self._ready = ready
        """Value of the slot's ``ready`` that announces the contents."""
        self._offset = offset
        self._nbytes = size
        self._stream = stream
        self._contents: Announcement | None = None
        """Set if it was opened without a stream."""
        try:
            self._acquire(key, generation, base_size)
            if block is not None and (mine.slot_words.ready.value != ready or source.session.listener is not None):
                announced = Announcement(block, slot, generation, ready)
                announced.notify_listener(self, stream)
                announced.precede(stream)
        except BaseException as first:
            # A signal handler that raises here may not keep the owner's free waiting for good.
            try:
                _release(self, stream, used=False)
            except CudaError as later:
                attach(first, later)
            raise
        finally:
            if block is not None and source.holds:
                block.end_hold(hold)

    def _acquire(self, key: bytes, generation: int, nbytes: int) -> None:
        """Import the allocation, or join the import that this process has. ``nbytes``: the size in the descriptor."""
        source, session = self._source, self._source.session
        with source.lock:
            imported = source.allocations.get(key)
            if imported is None or imported._raw is None:
                imported = ImportedAllocation(source, key)
                # Set before the acquisition, so that an error releases it.
                source.allocations[key] = self._import = imported
                if source.leased:
                    source.count_open(imported, self._words, generation)  # type: ignore[arg-type]
                source.acquire(imported)
                imported.address = int(imported._raw)
            else:
                imported.count += 1
                self._import = imported
                if source.leased:
                    _join(imported, source, self._words, generation)  # type: ignore[arg-type]
        result, found = session.cuPointerGetAttribute(_RANGE_SIZE, imported.address)
        if result:
            raise error_from(result, "cuPointerGetAttribute")
        if found != nbytes:
            raise ValueError(f"the descriptor says {size_text(nbytes)}, and the driver has {size_text(int(found))}")

    @property
    def address(self) -> int:
        """The device address in this process.

        If the memory was opened without a stream, the host waits until the contents are there.

        Raises
        ------
        ClosedError
            The memory was closed.
        """
        at = self._at
        if self._contents is not None:
            self._contents.await_on(self, None)
        return at

    @property
    def _at(self) -> int:
        return self._checked_import().address + self._offset

    def _await_on(self, stream: Stream) -> None:
        if self._contents is not None:
            self._contents.await_on(self, stream)

    @property
    def nbytes(self) -> int:
        """Size in bytes of the part that was shared."""
        return self._nbytes

    @property
    def stream(self) -> Stream:
        """The stream of the open, which waits for the owner's work. After an open without a stream, the device's
        default stream.

        Memory opened without a stream can be used on any stream: each waits for the owner's work before its first use.
        """
        return self._stream

    @property
    def location(self) -> MemLocation:
        """The device that has the memory."""
        self._checked_import()
        return self._source.device.location

    @property
    def owner(self) -> object:
        """None: the memory belongs to another process."""
        return None

    @property
    def device_accessible(self) -> bool:
        """Whether the stream belongs to the device that owns the memory."""
        self._checked_import()
        return self._stream.device == self._source.device

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._import is None

    @property
    def lost(self) -> bool:
        """Whether the awaited contents never came, because the owner died."""
        self._checked_import()
        return self._words is not None and self._words.slot_words.was_lost(self._ready)

    @property
    def owner_alive(self) -> bool | None:
        """Whether the exporting process is alive; None if unknown."""
        imported = self._checked_import()
        block = self._source.block if imported.words is not None else None
        return None if block is None else block.exporter_alive()

    def close(self, stream: StreamLike | None = None) -> None:
        """Release the memory after the work of ``stream`` (default: its own). Idempotent.

        The owner's free is ordered after that work. The default for the per-thread default stream of another thread is
        the legacy stream, as for :meth:`Buffer.free`.
        """
        if self._import is None:
            return
        source = self._source
        if stream is None and of_this_thread(self._stream) is not self._stream:
            return ordered_after(self._stream, self.close)
        ordered = self._stream if stream is None else as_stream(stream, source.session)
        beside: AbstractContextManager[None] = contextlib.nullcontext()
        if direct_handle(ordered, source.session) is None:
            raw_handle(ordered)
            refuse_capture(ordered, "cuStreamWriteValue32", "memory of other processes cannot be closed in a capture")
            beside = source.session.relaxed()
        with beside:
            if self._contents is not None:
                self._contents.await_on(self, ordered)
            _release(self, ordered)
        if source.imports.deferred.has_work():
            source.imports.deferred.work()

    def _about(self) -> Iterator[Row]:
        yield from super()._about()
        alive = {True: "alive", False: "gone", None: "not known"}[self.owner_alive]
        yield "owner", f"another process, {alive}{', and the contents never came' if self.lost else ''}"

    def _checked_import(self) -> ImportedAllocation:
        if self._import is None:
            raise ClosedError(f"this imported buffer of {size_text(self._nbytes)} was closed")
        return self._import

    def _check_usable(self) -> None:
        self._checked_import()

    @property
    def _session(self) -> Session:
        return self._source.session

    def __del__(self) -> None:
        imported = getattr(self, "_import", None)
        if imported is not None and imported.source.session.usable:
            source = imported.source
            listener = source.session.listener
            if listener is not None and imported.count == 1:
                listener.deferred(int(imported.address))
            source.imports.drop(_DroppedImport(imported, self._stream))

    def _text(self) -> str:
        where = "closed" if self._import is None else f"at {self._at:#x}, {self.location}"
        return f" of {self._nbytes} bytes {where}"


class ImportedArray(TypedView[Any], Closes):
    """An array of another process, with its type and shape, made by :func:`open`.

    :attr:`owner` is the imported memory. Closing either closes both.
    """

    __slots__ = ()

    _parent: ImportedBuffer | ImportedRange

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._parent.closed

    def close(self, stream: StreamLike | None = None) -> None:
        """Release the memory after the work of ``stream`` (default: its own). Idempotent."""
        self._parent.close(stream)


class ImportedRange(RemappableBuffer, Foreign):
    """Physical memory of another process, mapped at one address here, made by :func:`open`.

    The driver keeps the memory while any process has a handle. A range shared by fabric handles with a hold also has a
    lease: its owner keeps the memory until the range is closed here.

    After an open without a stream, each stream waits for the contents before its first use of this object. Uses through
    :attr:`range` are not seen: only the default stream waits for the contents, so order other streams after it.
    """

    __slots__ = ("_announced", "_contents", "_lease")

    def __init__(self, device: Device, capacity: int, rights: Rights, stream: StreamLike | None, offset: int) -> None:
        self._announced: Announcement | None = None
        """That of the last open; None without a control block."""
        self._contents: tuple[Announcement, ...] = ()
        """One for each open without a stream."""
        self._lease: HostLease | None = None
        """That of the last open that had one."""
        super().__init__(device, capacity, rights, stream, offset)

    @property
    def address(self) -> int:
        """The device address. After an open without a stream, the host waits for the contents."""
        at = self._at
        for contents in self._contents:
            contents.await_on(self, None)
        return at

    @property
    def _at(self) -> int:
        return super().address

    def _await_on(self, stream: Stream) -> None:
        for contents in self._contents:
            contents.await_on(self, stream)

    @property
    def lost(self) -> bool:
        """Whether the awaited contents never came, because the owner died."""
        self._check_open()
        return self._announced is not None and self._announced.lost

    @property
    def owner_alive(self) -> bool | None:
        """Whether the exporting process is alive; None if unknown."""
        self._check_open()
        return None if self._announced is None else self._announced.block.exporter_alive()

    def close(self, after: After = None) -> None:
        """Wait for ``after``, then unmap and release the memory, and end its lease. Idempotent."""
        super().close(after)
        self._take_lease(None)

    def _take_lease(self, lease: HostLease | None) -> None:
        ended, self._lease = self._lease, lease
        if ended is not None:
            ended.end()

    def __del__(self) -> None:
        lease = getattr(self, "_lease", None)
        if lease is not None and self._session.usable:
            lease.imports.drop(lease)

    def evict(self, *_: Any, **__: Any) -> None:
        """Not allowed: only the owning process can evict the memory."""
        raise ValueError(f"{self!r} is memory of another process, which evicts it")
