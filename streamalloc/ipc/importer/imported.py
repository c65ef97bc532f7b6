"""Imported memory: its import by the driver, its objects in this process, and its release.

The driver returns the same address for a second import of an allocation, and does not count imports: so this process
counts its objects, and releases the import with the last of them. A :class:`PoolSource` holds what all allocations of
one pool have in common. A stream waits for the contents of opened memory, or the host where no stream can.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any

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
    Memory,
    QueuedWork,
    Stream,
    StreamLike,
    TypedView,
    as_stream,
    deferred_queue,
    direct_handle,
    direct_view,
    ordered_after,
    raw_handle,
    refuse_capture,
    sees_all_work,
)
from streamalloc.core.properties import MemAccess, MemAccessDesc, MemLocation
from streamalloc.core.resource import Closes
from streamalloc.core.session import Session
from streamalloc.driver.internal import OpaqueStruct, cuda, opaque_struct
from streamalloc.ipc.importer.background import OnceIdle
from streamalloc.ipc.wire.control_block import WORD, ControlBlock, ImporterWords, fence, reached
from streamalloc.ipc.wire.descriptor import Flags, Foreign, Head, Part
from streamalloc.vmm.internal import After, RemappableBuffer, Rights

# Seconds between two checks of the host for contents.
_PAUSE = 0.0002


def is_ready(block: ControlBlock | None, slot: int, ready: int) -> bool:
    """Whether the contents are there. True without a control block, as nothing announces them."""
    return block is None or reached(block.slot_words(slot).ready.value, ready)


def wait_until_ready(block: ControlBlock | None, slot: int, ready: int, stream: Stream) -> None:
    """Make ``stream`` wait for the exporter's announcement, unless it has come."""
    if block is None or is_ready(block, slot, ready):
        return
    words = block.slot_words(slot)
    if not reached(words.announced.value, ready):
        raise ValueError("the descriptor waits for contents that its exporter has not announced")
    block.expect(slot, ready)
    block.wait(stream, words.ready, ready)


def await_on(block: ControlBlock, slot: int, ready: int, stream: Stream | None) -> None:
    """Make a stream wait for an announcement. Without one, or in a capture, the host waits."""
    if stream is not None:
        with contextlib.suppress(CaptureError):
            wait_until_ready(block, slot, ready, stream)
            return
    if not is_ready(block, slot, ready):
        block.expect(slot, ready)  # so that the exporter's death ends the wait
        while not is_ready(block, slot, ready):
            time.sleep(_PAUSE)


def notify_listener(
    memory: Memory, block: ControlBlock, announced: tuple[int, int, int], stream: Stream | None
) -> None:
    """Notify the listener that ``stream``, or the host if None, waits for the contents.

    ``announced``: slot, generation and the value of ``ready``.
    """
    word = int(block.slot_words(announced[0]).ready.pointer)
    name = block.announcement(*announced)
    with contextlib.nullcontext() if stream is None else stream.device.current():
        raw = None if stream is None else raw_handle(stream)
        block.session.listener.opened(memory._at, memory.nbytes, raw, name, word)  # type: ignore[union-attr]


class Contents:
    """The contents of memory that was opened without a stream.

    The device's default stream waits for them from the open on, every other stream before it first uses the memory. The
    host waits before it returns an address, as nothing sees the use of that, and before a capture, as graphs wait for
    no other process.
    """

    __slots__ = ("announced", "block")

    def __init__(self, block: ControlBlock, slot: int, generation: int, ready: int) -> None:
        self.block: ControlBlock = block
        self.announced: tuple[int, int, int] = slot, generation, ready
        """Slot, generation and the value of ``ready``."""

    def complete(self, memory: Memory) -> bool:
        """Whether the host has seen the announcement of the contents; the listener is notified of that."""
        slot, _, ready = self.announced
        seen = is_ready(self.block, slot, ready)
        if seen and self.block.session.listener is not None:
            notify_listener(memory, self.block, self.announced, None)
        return seen

    def await_on(self, memory: Memory, stream: Stream | None) -> None:
        """Make a stream, or the host if None, wait for them."""
        slot, _, ready = self.announced
        listened = self.block.session.listener is not None
        if listened and stream is not None:
            notify_listener(memory, self.block, self.announced, stream)
        await_on(self.block, slot, ready, stream)
        if listened and stream is None:
            notify_listener(memory, self.block, self.announced, None)


class RangeLease(Deferred):
    """The use of a range that its owner keeps until importers have closed it."""

    __slots__ = ("_dropped", "_lock", "_session", "_words", "_work")

    def __init__(
        self,
        block: ControlBlock,
        announced: tuple[int, int, int],
        device: Device,
        lock: AbstractContextManager[bool],
        dropped: SimpleQueue[bool],
    ) -> None:
        slot, generation, _ = announced
        self._session: Session = block.session
        self._dropped = dropped
        self._lock = lock
        self._work: QueuedWork | None = None
        self._words: ImporterWords | None = block.own.get(slot) or block.own_words(slot)
        # Without the lock: once this range is in ``blocks``, no other range counts a close.
        self._words.blocks.add(self)
        self._words.opened.value = (self._words.opened.value + 1) % WORD
        with undoing(self.end):
            # Count first, then check for a free: the exporter does both in the opposite order.
            block.sync(device)
            if self._words.slot_words.generation.value != generation:
                raise StaleDescriptorError(_STALE)

    def end(self) -> None:
        """Count the close; all work on the range has ended. Idempotent."""
        words, self._words = self._words, None
        if words is not None:
            with self._lock:
                # The number is read first: a range that is opened meanwhile has a later one.
                number = words.opened.value
                words.blocks.discard(self)
                if not words.blocks:
                    words.closing.value = number
                    words.closed.value = number

    def drop(self) -> None:
        """Count the close once the work so far has ended."""
        deferred_queue(self._session).submit(self)
        self._dropped.put(True)

    def attempt(self) -> bool:
        if self._work is None:
            self._work = QueuedWork(self._session)
        if not self._work.done():
            return False
        self.end()
        return True


_LAZY_PEER_ACCESS = 1
_RANGE_SIZE = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE
_BAD_POINTER = "the owner's process has freed it, or ended"
_STALE = "this memory was freed by its owner before it was opened here"
_BAD_LEASE = "the descriptor has a lease or a hold, but names no control block"


class PoolHandle(Deferred):
    """The driver's handle of a pool of another process.

    It is destroyed once the frees of all imported allocations have run: the driver waits for nothing, and any later use
    of the handle ends the process (driver 580.159).
    """

    __slots__ = ("_frees", "_raw", "known", "lock", "marks", "session", "users")

    def __init__(self, session: Session, known: dict[int, PoolHandle], lock: AbstractContextManager[bool]) -> None:
        self.session: Session = session
        self.known: dict[int, PoolHandle] = known
        """All handles in use, by ``CUmemoryPool``: the driver has one for each pool, however often it was imported."""
        self.lock: AbstractContextManager[bool] = lock
        """Held while a pool is imported or destroyed."""
        self._raw: Any = None
        self._frees: QueuedWork | None = None
        self.marks: set[tuple[ControlBlock, int]] = set()
        """The exporter's marks, which show that it still has the pool."""
        self.users: weakref.WeakSet[ImportedPool] = weakref.WeakSet()

    def ended(self) -> bool:
        """Whether its owner has closed the pool, or has died, as far as its marks show.

        A pool that another library has made has a mark for each time that it was shared.
        """
        marks = list(self.marks)
        gone = [(block, mark) for block, mark in marks if not (block.marked("pool", mark) and block.exporter_alive())]
        if len(gone) < len(marks):
            self.marks.difference_update(gone)
        return len(gone) == len(marks) > 0

    def attempt(self) -> bool:
        session = self.session
        if self._frees is None:
            self._frees = QueuedWork(session)
        if not self._frees.done():
            return False
        with self.lock:
            # If the pool was imported anew meanwhile, the driver has returned the same handle.
            if self._raw is not None and int(self._raw) not in self.known:
                session.release(self, "cuMemPoolDestroy")
        return True


class ImportedPool(Foreign):
    """A pool of another process: its allocations can be opened here, but nothing can be allocated from it.

    :func:`open` returns it.
    """

    __slots__ = ("__weakref__", "_pool", "device")

    device: Device
    """The device that has the memory."""

    def __init__(self, pool: PoolHandle, device: Device) -> None:
        self._pool = pool
        self.device = device
        pool.users.add(self)

    @property
    def handle(self) -> int:
        """The driver's handle (``CUmemoryPool``) as a number."""
        return int(self._pool._raw)

    @property
    def _session(self) -> Session:
        return self._pool.session

    def set_access(self, device: Device, access: MemAccess = MemAccess.READWRITE) -> None:
        """Give another device of this process access to the pool's memory (``cuMemPoolSetAccess``)."""
        descriptor = MemAccessDesc(device.location, access).to_driver()
        self._session.call("cuMemPoolSetAccess", self._pool._raw, [descriptor], 1)

    def __repr__(self) -> str:
        return f"<ImportedPool {self.handle:#x} on device {self.device.ordinal}>"


class _Source:
    """A pool, or one block of ``cuMemAlloc``, of another process, and its imports in this process."""

    __slots__ = ("_default", "block", "deferred", "device", "dropped", "held", "imports", "leased", "lock", "session")

    waits = False
    """True if the release of an import may wait for a stream."""

    def __init__(
        self, session: Session, device: Device, block: ControlBlock | None, dropped: SimpleQueue[bool], flags: int
    ) -> None:
        if flags & (Flags.LEASED | Flags.HELD) and block is None:
            raise ValueError(_BAD_LEASE)
        self.session: Session = session
        self.deferred: DeferredQueue = deferred_queue(session)
        self.device: Device = device
        self._default: Stream | None = None
        self.block: ControlBlock | None = block
        """The exporter's control block."""
        self.dropped: SimpleQueue[bool] = dropped
        """Wakes the thread that releases dropped imports."""
        self.leased: bool = bool(flags & Flags.LEASED)
        """Whether the block counts opens and closes."""
        self.held: bool = bool(flags & Flags.HELD) and block is not None
        """Whether descriptors keep the allocation until they are opened."""
        self.lock: AbstractContextManager[bool] = threading.RLock()
        """Held while imports are counted."""
        self.imports: dict[bytes, Import] = {}
        """Imports by the driver's export data."""

    @property
    def default_stream(self) -> Stream:
        """The device's default stream."""
        if self._default is None or self._default.closed:
            self._default = self.device.default_stream
        return self._default


class PoolSource(_Source):
    """A pool of another process, for allocations with leases in one control block."""

    __slots__ = ("_struct", "handle", "head")

    def __init__(
        self,
        head: Head,
        handle: PoolHandle,
        device: Device,
        block: ControlBlock | None,
        dropped: SimpleQueue[bool],
        imports: dict[bytes, Import],
    ) -> None:
        super().__init__(handle.session, device, block, dropped, head.flags)
        self.head: Head = head
        self.handle: PoolHandle = handle
        self.lock: AbstractContextManager[bool] = handle.lock
        self.imports = imports
        # One struct for all, as ``acquire`` is called under the lock.
        self._struct = OpaqueStruct("CUmemPoolPtrExportData")

    def acquire(self, held: Import) -> None:
        """Import an allocation (``cuMemPoolImportPointer``)."""
        result, held._raw = self.session.cuMemPoolImportPointer(self.handle._raw, self._struct.filled(held.key))
        if result:
            held._raw = None
            raise error_from(result, "cuMemPoolImportPointer", _BAD_POINTER)

    def release(self, held: Import, stream: Stream, handle: Any) -> None:
        """Release an import after the work of a stream, whose ``CUstream`` is ``handle`` (``cuMemFreeAsync``)."""
        raw, held._raw = held._raw, None
        result = self.session.cuMemFreeAsync(raw, handle)[0]
        if result:
            error = error_from(result, "cuMemFreeAsync")
            held._raw = None if isinstance(error, LOST) else raw
            raise error


class LegacySource(_Source):
    """A block of ``cuMemAlloc`` of another process. The driver counts opens, so that each object has its own import."""

    __slots__ = ()

    waits = True

    def acquire(self, held: Import) -> None:
        """Open the block (``cuIpcOpenMemHandle``)."""
        handle = opaque_struct("CUipcMemHandle", held.key)
        with self.device.current():
            self.session.create(held, "_raw", "cuIpcOpenMemHandle", handle, _LAZY_PEER_ACCESS, hint=_BAD_POINTER)

    def release(self, held: Import, stream: Stream, handle: Any) -> None:
        """Close the block (``cuIpcCloseMemHandle``), which is not stream-ordered: the host waits."""
        stream.synchronize()
        with self.device.current():
            self.session.release(held, "cuIpcCloseMemHandle")


class Import:
    """One imported allocation of another process, for all its objects in this process; see :func:`open_import`."""

    __slots__ = ("_raw", "address", "count", "generation", "key", "number", "passed", "source", "words")

    _raw: Any
    """``CUdeviceptr``; None before the import and after its release."""

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
        self.address: int = 0
        self.count: int = 1
        """Open objects."""
        self.passed: tuple[Event, ...] = ()
        """Ends of the work of objects that were closed before the last one."""

    def count_open(self, words: ImporterWords, generation: int) -> None:
        """Count the open in a lease.

        Raises
        ------
        StaleDescriptorError
            The lease has ended.
        """
        self.words, self.generation = words, generation
        if self.source.waits:
            words.blocks.add(self)
        # Count first, then check for a free: the exporter does both in the opposite order.
        self.number = number = (words.opened.value + 1) % WORD
        words.opened.value = number
        fence()
        if words.slot_words.generation.value != generation:
            if self._raw is not None:
                # Open without a lease. Nothing was used by this one, so its end needs no stream.
                words.opened.value, self.words = (number - 1) % WORD, None
            raise StaleDescriptorError(_STALE)


def open_import(source: PoolSource | LegacySource, part: Part, stream: Stream) -> ImportedBuffer:
    """Open an allocation, or open it once more; ``stream`` waits for its contents."""
    slot, generation, ready, offset, size, base_size, hold, key = part
    block = source.block
    mark = block.mark("hold", hold) if source.held else None  # type: ignore[union-attr]
    mine = None if block is None else block.own.get(slot) or block.own_words(slot)
    opened = ImportedBuffer()
    opened._held = None
    opened._source = source
    opened._words = mine
    opened._ready = ready
    opened._offset = offset
    opened._nbytes = size
    opened._stream = stream
    opened._contents = None
    try:
        with source.lock:
            held = source.imports.get(key)
            if held is None or held._raw is None:
                held = Import(source, key)
                # Set before the acquisition, so that the handler below releases it.
                source.imports[key] = opened._held = held
                if mine is not None and source.leased:
                    held.count_open(mine, generation)
                source.acquire(held)
                held.address = int(held._raw)
            else:
                held.count += 1
                opened._held = held
                if mine is not None and source.leased and held.words is None:
                    # It was opened before by a descriptor without a lease.
                    held.source = source
                    held.count_open(mine, generation)
                elif source.leased and (held.words is not mine or held.generation != generation):
                    if mine is not None and mine.slot_words.generation.value != generation:
                        raise StaleDescriptorError(_STALE)
                    raise ValueError("this memory is open here under another lease: close that first")
        result, found = source.session.cuPointerGetAttribute(_RANGE_SIZE, held.address)
        if result:
            raise error_from(result, "cuPointerGetAttribute")
        if found != base_size:
            raise ValueError(f"the descriptor says {size_text(base_size)}, and the driver has {size_text(int(found))}")
        if block is not None and source.session.listener is not None:
            notify_listener(opened, block, (slot, generation, ready), stream)
        if mine is not None and mine.slot_words.ready.value != ready:
            wait_until_ready(block, slot, ready, stream)
    except BaseException as first:
        try:
            _release(opened, stream, used=False)
        except CudaError as later:
            attach(first, later)
        raise
    finally:
        if mark is not None and mark.value == hold >> 32:
            mark.value = 0  # the descriptor has arrived
    return opened


def _release(owner: ImportedBuffer | _DroppedImport, stream: Stream, *, used: bool = True) -> None:
    """Release one object of an import; the last one ends the import. A call that failed can be repeated.

    ``used``: work on the memory was queued on ``stream``, which the release of the import has to follow.
    """
    held = owner._held
    if held is None:
        return
    source = held.source
    if source.session.forked:
        source.session.check_process()
    with source.lock:
        if owner._held is None:
            return  # another thread was first
        if held.count > 1:
            # The last object's end follows this event.
            held.passed += (stream.record(),) if used else ()
            held.count -= 1
            owner._held = None
            return
        for event in held.passed:
            stream.wait(event)
        handle, sees_all = direct_view(stream, source.session)
        if handle is not None:
            _end(held, stream, handle, sees_all)
        else:
            with stream.device.current():
                _end(held, stream, raw_handle(stream), sees_all_work(stream))
        owner._held = None


def _end(held: Import, stream: Stream, handle: Any, sees_all: bool) -> None:
    """End an import after the work of a stream; ``handle`` and ``sees_all`` as for :meth:`ControlBlock.write_by`."""
    source, mine = held.source, held.words
    if held._raw is not None:
        source.release(held, stream, handle)
    if source.imports.get(held.key) is held:
        del source.imports[held.key]
    held.count = 0
    if source.waits:
        if mine is not None:
            # The work has ended. The number is read first: a block that is opened meanwhile has a later one.
            number = mine.opened.value
            mine.blocks.discard(held)
            if not mine.blocks:
                mine.closed.value = mine.closing.value = number
        return
    # If the word has gone on, another import of the same slot is open, whose end writes it.
    if mine is not None and mine.opened.value == held.number:
        block: Any = source.block
        before = (held.number - 1) % WORD
        if not held.address:
            # Not by counting up: streams may yet write ``closed`` of earlier imports.
            mine.opened.value = before
        else:
            closed = mine.closed.value
            if closed != before and not reached(closed, before):
                # Another stream will yet write the end of an earlier import: the word only ever counts up.
                block.wait(stream, mine.closed, before)
            block.write_by(handle, sees_all, mine.closed, held.number)
            mine.closing.value = held.number


class _DroppedImport(Deferred):
    """An import whose object was dropped: released after the work of its stream."""

    __slots__ = ("_held", "_stream")

    def __init__(self, held: Import, stream: Stream) -> None:
        self._held: Import | None = held
        self._stream = stream

    def attempt(self) -> bool:
        held = self._held
        if held is not None and held.source.waits:
            held.source.deferred.submit(OnceIdle(held.source.session, self._close))
        else:
            self._close()
        return True

    def _close(self) -> None:
        with ordered_after(self._stream) as ordered:
            _release(self, ordered)


class ImportedBuffer(Memory, Closes, Foreign):
    """An allocation of another process, or a part of one, made by :func:`open`.

    Closing it, which is in stream order, lets the owner free the memory. Dropping it closes it on its own stream.
    """

    __slots__ = ("__weakref__", "_contents", "_held", "_nbytes", "_offset", "_ready", "_source", "_stream", "_words")

    _contents: Contents | None
    """Set if it was opened without a stream."""
    _held: Import | None
    """None once closed."""
    _source: PoolSource | LegacySource
    _words: ImporterWords | None
    """This importer's words of its slot."""
    _ready: int
    """Value of the slot's ``ready`` when the contents are there."""
    _offset: int
    _nbytes: int
    _stream: Stream

    @property
    def address(self) -> int:
        """The device address in this process.

        If the memory was opened without a stream, the host waits until the contents are there.

        Raises
        ------
        ClosedError
            It was closed.
        """
        at = self._at
        if self._contents is not None:
            self._contents.await_on(self, None)
        return at

    @property
    def _at(self) -> int:
        return self._open_import().address + self._offset

    def _await_on(self, stream: Stream) -> None:
        if self._contents is not None:
            self._contents.await_on(self, stream)

    @property
    def nbytes(self) -> int:
        """Size in bytes of the part that was shared."""
        return self._nbytes

    @property
    def stream(self) -> Stream:
        """The stream that it was opened on, which waits for the owner's work; without one, the device's default stream.

        Memory that was opened without a stream can be used on any: each waits for that work before its first use.
        """
        return self._stream

    @property
    def location(self) -> MemLocation:
        """The device that has the memory."""
        self._open_import()
        return self._source.device.location

    @property
    def owner(self) -> object:
        """None: the memory belongs to another process."""
        return None

    @property
    def device_accessible(self) -> bool:
        """Whether the stream is of the device that has the memory."""
        self._open_import()
        return self._stream.device == self._source.device

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._held is None

    @property
    def lost(self) -> bool:
        """Whether the contents that this process waited for never came: the owner died, or its driver failed before."""
        self._open_import()
        return self._words is not None and self._words.slot_words.was_lost(self._ready)

    @property
    def owner_alive(self) -> bool | None:
        """Whether the process that shared it lives; None if that cannot be determined."""
        held = self._open_import()
        block = self._source.block if held.words is not None else None
        return None if block is None else block.exporter_alive()

    def close(self, stream: StreamLike | None = None) -> None:
        """Release the memory after the work of ``stream`` (default: its own). Idempotent.

        The owner's free waits for that work, in stream order.
        """
        if self._held is None:
            return
        source = self._source
        ordered = self._stream if stream is None else as_stream(stream, source.session)
        if direct_handle(ordered, source.session) is None:
            raw_handle(ordered)
            refuse_capture(ordered, "cuStreamWriteValue32", "memory of other processes cannot be closed in a capture")
        if self._contents is not None:
            self._contents.await_on(self, ordered)
        _release(self, ordered)
        if source.deferred.has_work():
            source.deferred.work()

    def _about(self) -> Iterator[Row]:
        yield from super()._about()
        alive = {True: "alive", False: "gone", None: "not known"}[self.owner_alive]
        yield "owner", f"another process, {alive}{', and the contents never came' if self.lost else ''}"

    def _open_import(self) -> Import:
        if self._held is None:
            raise ClosedError(f"this imported buffer of {size_text(self._nbytes)} was closed")
        return self._held

    def _check_usable(self) -> None:
        self._open_import()

    @property
    def _session(self) -> Session:
        return self._source.session

    def __del__(self) -> None:
        held = getattr(self, "_held", None)
        if held is not None and held.source.session.usable:
            source = held.source
            listener = source.session.listener
            if listener is not None and held.count == 1:
                listener.deferred(int(held.address))
            source.deferred.submit(_DroppedImport(held, self._stream))
            source.dropped.put(True)

    def _text(self) -> str:
        where = "closed" if self._held is None else f"at {self._at:#x}, {self.location}"
        return f" of {self._nbytes} bytes {where}"


class ImportedArray(TypedView[Any], Closes):
    """An array of another process, of the type and shape that it was shared with, made by :func:`open`.

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
    """Physical memory of another process, mapped here at one address, made by :func:`open`.

    The driver keeps the memory as long as any process has a handle. A range that was shared by fabric handles with a
    hold has a lease, too: its owner keeps what it shared until the range is closed here.

    If it was opened without a stream, each stream waits for the contents before its first use of this object. Uses by
    :attr:`range` are not seen: only the default stream waits then, so order other streams after it.
    """

    __slots__ = ("_announced", "_contents", "_leases")

    _announced: tuple[ControlBlock, int, int] | None
    """The control block, slot and value of ``ready`` of the last open; None without one."""
    _contents: tuple[Contents, ...]
    """One for each open without a stream."""
    _leases: tuple[RangeLease, ...]
    """Leases of the last open that had one."""

    def __init__(self, device: Device, capacity: int, rights: Rights, stream: StreamLike | None, offset: int) -> None:
        self._announced = None
        self._contents = ()
        self._leases = ()
        super().__init__(device, capacity, rights, stream, offset)

    @property
    def address(self) -> int:
        """The device address. If the memory was opened without a stream, the host waits for the contents."""
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
        """Whether the contents that this process waited for never came: the owner died, or its driver failed before."""
        self._check_open()
        if self._announced is None:
            return False
        block, slot, ready = self._announced
        return block.slot_words(slot).was_lost(ready)

    @property
    def owner_alive(self) -> bool | None:
        """Whether the process that shared it lives; None if that cannot be determined."""
        self._check_open()
        return None if self._announced is None else self._announced[0].exporter_alive()

    def close(self, after: After = None) -> None:
        """Wait for ``after``, then unmap and release the memory, and end its lease. Idempotent."""
        super().close(after)
        self._take_lease(())

    def _take_lease(self, leases: tuple[RangeLease, ...]) -> None:
        ended, self._leases = self._leases, leases
        for lease in ended:
            lease.end()

    def __del__(self) -> None:
        leases = getattr(self, "_leases", ())
        if leases and self._session.usable:
            for lease in leases:
                lease.drop()

    def evict(self, *_: Any, **__: Any) -> None:
        """Refused: the memory belongs to another process."""
        raise ValueError(f"{self!r} is memory of another process, which evicts it")
