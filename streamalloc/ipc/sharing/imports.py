"""The life of an import: an allocation of another process, from the driver's import to its end.

Imports are shared: the driver answers a second import of an allocation with the same address and does not count, so
this process counts, and lets go once. What is the same for all allocations of a pool is in their :class:`PoolWay`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from streamalloc.core.internal import (
    LOST,
    CaptureError,
    ClosedError,
    Closes,
    CudaError,
    Deferred,
    DeferredQueue,
    Device,
    Event,
    MemLocation,
    Memory,
    Row,
    Session,
    StaleDescriptorError,
    Stream,
    StreamLike,
    TypedView,
    as_stream,
    attach,
    deferred_queue,
    direct_handle,
    direct_view,
    error_from,
    ordered_after,
    raw_handle,
    refuse_capture,
    sees_all_work,
    size_text,
)
from streamalloc.driver.internal import OpaqueStruct, cuda, opaque_struct
from streamalloc.ipc.sharing.control_block import WORD, ControlBlock, ImporterWords, fence, reached
from streamalloc.ipc.sharing.descriptor import Flags, Head, Part
from streamalloc.ipc.sharing.drops import Drops, OnceIdle
from streamalloc.ipc.sharing.pools import PoolHandle
from streamalloc.vmm.internal import RemappableBuffer, Rights

__all__ = [
    "Contents",
    "Import",
    "ImportedArray",
    "ImportedBuffer",
    "ImportedRange",
    "LegacyWay",
    "PoolWay",
    "await_on",
    "is_ready",
    "open_import",
    "say_opened",
    "wait_until_ready",
]

_LAZY_PEER_ACCESS = 1
_RANGE_SIZE = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE
_BAD_POINTER = "the owner's process has freed it, or ended"
# Seconds until the host looks again whether contents are there.
_PAUSE = 0.0002


class _Way:
    """How allocations are opened whose descriptors begin alike."""

    __slots__ = ("_default", "block", "deferred", "device", "drops", "held", "imports", "leased", "lock", "session")

    waits = False
    """Whether letting go of an import may wait for a stream."""

    def __init__(self, session: Session, device: Device, block: ControlBlock | None, drops: Drops, flags: int) -> None:
        self.session: Session = session
        self.deferred: DeferredQueue = deferred_queue(session)
        self.device: Device = device
        self.block: ControlBlock | None = block
        """Of the exporter."""
        self.drops: Drops = drops
        self.leased: bool = bool(flags & Flags.LEASED)
        """Whether the block keeps account of who has the memory open."""
        self.held: bool = bool(flags & Flags.HELD) and block is not None
        """Whether descriptors are counted as on their way, until they were opened."""
        self.lock: contextlib.AbstractContextManager[bool] = threading.RLock()
        """Held where imports are counted."""
        self._default: Stream | None = None
        self.imports: dict[bytes, Import] = {}
        """The imports that there are, by the driver's export data."""
        drops.watch()

    def acquire(self, held: Import) -> None:
        """Have the driver import an allocation."""
        raise NotImplementedError

    def release(self, held: Import, stream: Stream, handle: Any) -> None:
        """Have the driver let go of it after the work of a stream, by that and its ``CUstream``."""
        raise NotImplementedError

    def default_stream(self) -> Stream:
        """The default stream of the device, for who names no stream."""
        if self._default is None or self._default.closed:
            self._default = self.device.default_stream
        return self._default


class PoolWay(_Way):
    """How allocations of one pool are opened whose leases are in one control block."""

    __slots__ = ("_struct", "head", "origin", "pool")

    def __init__(
        self,
        head: Head,
        origin: bytes,
        pool: PoolHandle,
        device: Device,
        block: ControlBlock | None,
        drops: Drops,
        imports: dict[bytes, Import],
    ) -> None:
        if head.flags & (Flags.LEASED | Flags.HELD) and (block is None or not head.flags & Flags.LEASED):
            raise ValueError("the descriptor speaks of a lease, and names no control block, or memory without any")
        super().__init__(pool.all.session, device, block, drops, head.flags)
        self.head: Head = head
        """How their descriptors begin."""
        self.origin: bytes = origin
        self.pool: PoolHandle = pool
        self.lock = pool.all.lock
        self.imports = imports
        # One struct for all: they are opened one at a time.
        self._struct = OpaqueStruct("CUmemPoolPtrExportData")

    def acquire(self, held: Import) -> None:
        """Import an allocation by the driver's export data (``cuMemPoolImportPointer``)."""
        result, held._raw = self.session.cuMemPoolImportPointer(self.pool.raw, self._struct.filled(held.key))
        if result:
            held._raw = None
            raise error_from(result, "cuMemPoolImportPointer", _BAD_POINTER)

    def release(self, held: Import, stream: Stream, handle: Any) -> None:
        """Let go of an allocation, in stream order (``cuMemFreeAsync``)."""
        raw = held._raw
        # Nothing is called between the two.
        held._raw = None
        result = self.session.cuMemFreeAsync(raw, handle)[0]
        if result:
            error = error_from(result, "cuMemFreeAsync")
            held._raw = None if isinstance(error, LOST) else raw
            raise error


class LegacyWay(_Way):
    """How memory of ``cuMemAlloc`` is opened. The driver counts how often, so that each object has its own import."""

    __slots__ = ()

    waits = True

    def __init__(self, session: Session, device: Device, block: ControlBlock | None, drops: Drops, flags: int) -> None:
        if flags & (Flags.LEASED | Flags.HELD):
            raise ValueError("the descriptor speaks of a lease, and names memory without any")
        super().__init__(session, device, block, drops, flags)

    def acquire(self, held: Import) -> None:
        """Open a block (``cuIpcOpenMemHandle``)."""
        handle = opaque_struct("CUipcMemHandle", held.key)
        with self.device.current():
            self.session.create(held, "_raw", "cuIpcOpenMemHandle", handle, _LAZY_PEER_ACCESS, hint=_BAD_POINTER)

    def release(self, held: Import, stream: Stream, handle: Any) -> None:
        """Close it, which is not in stream order: the host waits (``cuIpcCloseMemHandle``)."""
        stream.synchronize()
        with self.device.current():
            self.session.release(held, "cuIpcCloseMemHandle")


class Import:
    """One allocation of another process, however many objects of this process name it; :func:`open_import` makes it."""

    __slots__ = ("_raw", "address", "count", "generation", "key", "number", "passed", "way", "words")

    way: PoolWay | LegacyWay
    key: bytes
    """The driver's export data, for which it always gives the same address."""
    words: ImporterWords | None
    """Ours in the control block that keeps account of the lease; None where there is none."""
    generation: int
    """What the slot of the lease stands for."""
    number: int
    """What the word that counts openings is with this one."""
    _raw: Any
    """The driver's ``CUdeviceptr``; None before it has imported the allocation, and after it was told to let go."""
    address: int
    """0 until the driver has imported it."""
    count: int
    passed: tuple[Event, ...]
    """The ends of the work of objects that were closed before the last one."""


def open_import(way: PoolWay | LegacyWay, part: Part, stream: Stream) -> ImportedBuffer:
    """Open an allocation, or open it once more; ``stream`` waits for its contents."""
    slot, generation, ready, offset, size, base_size, hold, key = part
    block = way.block
    mark = block.mark("hold", hold) if way.held else None  # type: ignore[union-attr]
    mine = None if block is None else block.places.get(slot) or block.place(slot)
    opened = ImportedBuffer()
    opened._held = None
    opened._way = way
    opened._place = mine
    opened._ready = ready
    opened._offset = offset
    opened._nbytes = size
    opened._stream = stream
    opened._contents = None
    try:
        with way.lock:
            held = way.imports.get(key)
            if held is None or held._raw is None:
                held = Import()
                held.way = way
                held.key = key
                held.words = mine if way.leased else None
                held.generation = generation
                held.number = held.address = 0
                held._raw = None
                held.count = 1
                held.passed = ()
                # Each has its owner before anything is done that the owner undoes.
                way.imports[key] = opened._held = held
                if mine is not None and way.leased:
                    # Said in the control block before it is looked whether it was freed.
                    number = (mine.opened.value + 1) % WORD
                    # Nothing is called between these two.
                    held.number = number
                    mine.opened.value = number
                    fence()
                    if mine.theirs.generation.value != generation:
                        raise StaleDescriptorError(_STALE)
                way.acquire(held)
                held.address = int(held._raw)
            else:
                opened._held = held
                held.count += 1
                if way.leased and (held.words is not mine or held.generation != generation):
                    _refuse_another(mine, generation)
        result, found = way.session.cuPointerGetAttribute(_RANGE_SIZE, held.address)
        if result:
            raise error_from(result, "cuPointerGetAttribute")
        if found != base_size:
            raise ValueError(f"the descriptor says {size_text(base_size)}, and the driver has {size_text(int(found))}")
        if block is not None and way.session.listener is not None:
            say_opened(opened, block, (slot, generation, ready), stream)
        if mine is not None and mine.theirs.ready.value != ready:
            wait_until_ready(block, slot, ready, stream)
    except BaseException as first:
        try:
            _let_go(opened, stream, used=False)
        except CudaError as later:
            attach(first, later)
        raise
    finally:
        if mark is not None and mark.value == hold >> 32:
            mark.value = 0  # which tells the exporter that the descriptor has arrived
    return opened


_STALE = "this memory was freed by its owner before it was opened here"


def _refuse_another(mine: ImporterWords | None, generation: int) -> None:
    """Raise for an allocation that is open here by another descriptor."""
    if mine is not None and mine.theirs.generation.value != generation:
        raise StaleDescriptorError(_STALE)
    raise ValueError("this memory is open here under another lease: close that first")


def is_ready(block: ControlBlock | None, slot: int, ready: int) -> bool:
    """Whether the contents are there, as the exporter announced them, or nobody can tell."""
    return block is None or reached(block.slot_words(slot).ready.value, ready)


def wait_until_ready(block: ControlBlock | None, slot: int, ready: int, stream: Stream) -> None:
    """Have ``stream`` wait for the exporter's announcement, if that is still to come."""
    if block is None or is_ready(block, slot, ready):
        return
    words = block.slot_words(slot)
    if not reached(words.announced.value, ready):
        raise ValueError("the descriptor waits for contents that its exporter has not announced")
    block.expect(slot, ready)
    block.wait(stream, words.ready, ready)


def say_opened(memory: Memory, block: ControlBlock, announced: tuple[int, int, int], stream: Stream | None) -> None:
    """Notify the listener which stream waits for contents, and for which word.

    ``announced`` is slot, generation, and the value that says that they are there. None for the stream: the host has
    waited.
    """
    word = int(block.slot_words(announced[0]).ready.pointer)
    name = block.announcement(*announced)
    with contextlib.nullcontext() if stream is None else stream.device.current():
        raw = None if stream is None else raw_handle(stream)
        block.session.listener.opened(memory._at, memory.nbytes, raw, name, word)  # type: ignore[union-attr]


def await_on(block: ControlBlock, slot: int, ready: int, stream: Stream | None) -> None:
    """Have a stream wait for an announcement; the host waits where there is none, or a capture that cannot."""
    if stream is not None:
        with contextlib.suppress(CaptureError):
            wait_until_ready(block, slot, ready, stream)
            return
    if not is_ready(block, slot, ready):
        block.expect(slot, ready)  # the exporter's death ends it
        while not is_ready(block, slot, ready):
            time.sleep(_PAUSE)


class Contents:
    """The contents of memory that was opened without a stream: whoever uses them waits until they are there.

    The default stream of the device waits from the opening on. Other streams wait when they use the memory, and the
    host where it asks for an address, whose use nobody sees, or captures the use: graphs wait for no other process.
    """

    __slots__ = ("announced", "block")

    def __init__(self, block: ControlBlock, slot: int, generation: int, ready: int) -> None:
        self.block: ControlBlock = block
        self.announced: tuple[int, int, int] = slot, generation, ready

    @property
    def there(self) -> bool:
        """Whether the exporter's announcement has been seen."""
        slot, _, ready = self.announced
        return is_ready(self.block, slot, ready)

    def await_on(self, memory: Memory, stream: Stream) -> None:
        """Have a stream wait for them."""
        slot, _, ready = self.announced
        if self.block.session.listener is not None:
            say_opened(memory, self.block, self.announced, stream)
        await_on(self.block, slot, ready, stream)

    def await_on_host(self, memory: Memory) -> None:
        """Wait for them."""
        slot, _, ready = self.announced
        await_on(self.block, slot, ready, None)
        if self.block.session.listener is not None:
            say_opened(memory, self.block, self.announced, None)


def _let_go(owner: ImportedBuffer | _DroppedImport, stream: Stream, *, used: bool = True) -> None:
    """Close one object of an import; the last one ends it. Where a call fails it can be done again.

    Unless it was ``used``, nothing was queued that the end of the others would have to come after.
    """
    held = owner._held
    if held is None:
        return
    way = held.way
    if way.session.forked:
        way.session.check_process()
    with way.lock:
        if owner._held is None:
            return  # another thread was first
        if held.count > 1:
            # The end of this one's work, which the last one has to come after.
            passed = (stream.record(),) if used else ()
            # Nothing is called from here on, so that each counts once.
            held.passed += passed
            held.count -= 1
            owner._held = None
            return
        for event in held.passed:
            stream.wait(event)
        handle, sees_all = direct_view(stream, way.session)
        if handle is not None:
            _end(held, stream, handle, sees_all)
        else:
            with stream.device.current():
                _end(held, stream, raw_handle(stream), sees_all_work(stream))
        owner._held = None


def _end(held: Import, stream: Stream, handle: Any, sees_all: bool) -> None:
    """End an import after the work of a stream, by its ``CUstream`` and whether a query of it sees all its work.

    The context of a default stream is current.
    """
    way = held.way
    if held._raw is not None:
        way.release(held, stream, handle)
    if way.imports.get(held.key) is held:
        del way.imports[held.key]
    mine = held.words
    # Where the word went on, another import of the same slot is open, and says so when it is closed.
    if mine is not None and mine.opened.value == held.number:
        block: Any = way.block
        before = (held.number - 1) % WORD
        if not held.address:
            # Not by counting on: the streams' writes of earlier closes may still be on their way.
            mine.opened.value = before
        else:
            closed = mine.closed.value
            if closed != before and not reached(closed, before):
                # An earlier import's end is still on its way, on another stream: the word only ever counts up.
                block.wait(stream, mine.closed, before)
            block.tell_by(handle, sees_all, mine.closed, held.number)
            mine.closing.value = held.number
    held.count = 0


class _DroppedImport(Deferred):
    """An import that was dropped: let go of after the work of its stream."""

    __slots__ = ("_held", "_stream")

    def __init__(self, held: Import, stream: Stream) -> None:
        self._held: Import | None = held
        self._stream = stream

    def attempt(self) -> bool:
        held = self._held
        if held is not None and held.way.waits:
            session = held.way.session
            deferred_queue(session).submit(OnceIdle(session, self._close))
            return True
        self._close()
        return True

    def _close(self) -> None:
        with ordered_after(self._stream) as ordered:
            _let_go(self, ordered)


class ImportedBuffer(Memory, Closes):
    """An allocation of another process, or a part of one: made by :func:`open`.

    Closing it, which is in stream order, lets the owner free the memory; dropping it does so on its own stream.
    """

    __slots__ = ("__weakref__", "_contents", "_held", "_nbytes", "_offset", "_place", "_ready", "_stream", "_way")

    _contents: Contents | None
    """What streams wait for that use the memory; None where it was opened on a stream that was named."""
    _held: Import | None
    """None once it was closed."""
    _way: PoolWay | LegacyWay
    _place: ImporterWords | None
    """Its slot of the control block, if there is one."""
    _ready: int
    """The value of the slot's word when the contents are there."""
    _offset: int
    _nbytes: int
    _stream: Stream

    @property
    def address(self) -> int:
        """Where the memory is mapped in this process.

        Where it was opened without a stream, the host waits until the contents are there.

        Raises
        ------
        ClosedError
            It was closed.
        """
        at = self._at
        if self._contents is not None:
            self._contents.await_on_host(self)
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

        Memory that was opened without a stream can be used on any: each waits for that work when it first uses it.
        """
        return self._stream

    @property
    def location(self) -> MemLocation:
        """The device that has the memory."""
        self._open_import()
        return self._way.device.location

    @property
    def owner(self) -> object:
        """None: the memory belongs to another process."""
        return None

    @property
    def device_accessible(self) -> bool:
        """True where the stream is of the device that has the memory."""
        self._open_import()
        return self._stream.device == self._way.device

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._held is None

    @property
    def lost(self) -> bool:
        """Whether the contents that this process waited for never came: the owner died, or its driver failed before."""
        self._open_import()
        return self._place is not None and self._place.theirs.was_lost(self._ready)

    @property
    def owner_alive(self) -> bool | None:
        """Whether the process that shared it lives; None where that cannot be known."""
        held = self._open_import()
        block = self._way.block if held.words is not None else None
        return None if block is None else block.exporter_alive()

    def close(self, stream: StreamLike | None = None) -> None:
        """Let go of the memory after the work of ``stream`` (default: its own). Idempotent.

        The owner's free waits for that work, in stream order.
        """
        if self._held is None:
            return
        way = self._way
        ordered = self._stream if stream is None else as_stream(stream, way.session)
        if direct_handle(ordered, way.session) is None:
            raw_handle(ordered)
            refuse_capture(ordered, "cuStreamWriteValue32", "memory of other processes cannot be closed in a capture")
        self._await_on(ordered)
        _let_go(self, ordered)
        way.deferred.work()

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
        return self._way.session

    def __del__(self) -> None:
        try:
            if self._held is None:
                return
        except AttributeError:  # it was not made as a whole
            return
        _drop(self)

    def __repr__(self) -> str:
        if not hasattr(self, "_held"):
            return f"<{type(self).__name__} that could not be opened>"
        where = "closed" if self._held is None else f"at {self._at:#x}, {self.location}"
        return f"<{type(self).__name__} of {self._nbytes} bytes {where}>"


def _drop(buffer: ImportedBuffer) -> None:
    held = buffer._held
    if held is None or not held.way.session.usable:
        return
    dropped = _DroppedImport(held, buffer._stream)
    try:
        held.way.drops.submit(dropped)
    except BaseException:
        # The same one again, which lets go once.
        buffer._held = None
        held.way.drops.submit(dropped)
        raise


class ImportedArray(TypedView[Any], Closes):
    """An array of another process, of the type and shape that it was shared with: made by :func:`open`.

    :attr:`owner` is the imported memory. Closing either closes both.
    """

    __slots__ = ()

    _parent: ImportedBuffer | ImportedRange

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._parent.closed

    def close(self, stream: StreamLike | None = None) -> None:
        """Let go of the memory after the work of ``stream``, as the memory itself does. Idempotent."""
        self._parent.close(stream)


class ImportedRange(RemappableBuffer):
    """Physical memory of another process, mapped here at one address: made by :func:`open`.

    The driver keeps the memory for as long as somebody has it, so that no lease is needed.
    """

    __slots__ = ("_contents",)

    _contents: tuple[Contents, ...]
    """As for :class:`ImportedBuffer`, of each time that it was opened."""

    def __init__(self, device: Device, capacity: int, rights: Rights, stream: StreamLike | None, offset: int) -> None:
        self._contents = ()
        super().__init__(device, capacity, rights, stream, offset)

    @property
    def address(self) -> int:
        """Where the bytes begin. Where it was opened without a stream, the host waits until the contents are there."""
        at = self._at
        for contents in self._contents:
            contents.await_on_host(self)
        return at

    @property
    def _at(self) -> int:
        return super().address

    def _await_on(self, stream: Stream) -> None:
        for contents in self._contents:
            contents.await_on(self, stream)

    def evict(self, *_: Any, **__: Any) -> None:
        """Refused: the memory belongs to another process."""
        raise ValueError(f"{self!r} is memory of another process, which evicts it")
