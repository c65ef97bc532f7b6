"""``open``: memory of another process, checked and mapped here.

Imports are shared: the driver answers a second import of an allocation with the same address and does not count, so
this process counts, and lets go once.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from streamalloc.core.device import Device
from streamalloc.core.door import Door
from streamalloc.core.errors import ClosedError, CudaError, StaleDescriptorError, attach, error_from, undoing
from streamalloc.core.fd import Fd
from streamalloc.core.memory import Memory
from streamalloc.core.ownership import Closes
from streamalloc.core.properties import MemAccess, MemAccessDesc, MemLocation
from streamalloc.core.stream import Event, Stream, StreamLike, as_stream, opened_event
from streamalloc.driver import Driver
from streamalloc.driver import default as default_driver
from streamalloc.driver.internal import OpaqueStruct, cuda, opaque_struct
from streamalloc.ipc.sharing.control_block import (
    SLOTS,
    WORD,
    ControlBlock,
    ImporterWords,
    SlotWords,
    fence,
    next_word,
    reached,
)
from streamalloc.ipc.sharing.descriptor import FABRIC, HEAD_BYTES, Chunk, Descriptor, Flags, Mechanism
from streamalloc.ipc.sharing.lease import making
from streamalloc.ipc.transport.handle_server import fetch
from streamalloc.vmm import PhysicalMemory
from streamalloc.vmm.internal import RemappableBuffer, check_mappable, import_memory

__all__ = ["DriverVersionWarning", "ImportedBuffer", "ImportedPool", "ImportedRange", "open"]

_POSIX_MEMBER = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_LAZY_PEER_ACCESS = 1
_NO_BOARD = bytes(16)
_RANGE_SIZE = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE


class DriverVersionWarning(UserWarning):
    """Exporter and importer run different drivers, which NVIDIA does not support."""


class Handles:
    """The handles that came with one message; what nobody takes is closed."""

    __slots__ = ("_given", "_named", "endpoint")

    endpoint: bytes
    """Where others can be had; zeros where nowhere."""

    def __init__(self, handles: Sequence[Fd]) -> None:
        self._given = handles
        self._named: dict[bytes, Fd] = {}

    def name(self, described: Descriptor) -> None:
        """Tell which handle is which, by the order that the descriptor gives."""
        names = _names(described)
        if len(self._given) != len(names):
            raise ValueError(f"the descriptor needs {len(names)} handles, and {len(self._given)} came along")
        self._named = dict(zip(names, self._given, strict=True))
        self._given = ()

    def take(self, name: bytes) -> Fd:
        """A handle that came along, or else is fetched from the exporter; the caller's from now on."""
        fd = self._named.pop(name, None)
        if fd is not None:
            return fd
        if self.endpoint == bytes(16):
            raise ValueError(
                "a handle that the descriptor needs did not come along: send it with streamalloc.ipc.send, or pass "
                "handles=shared.fds"
            )
        return fetch(self.endpoint, name)

    def take_here(self, name: bytes) -> Fd | None:
        """The same; None where it did not come along and the exporter is not of this machine, or has ended."""
        if name not in self._named and self.endpoint == bytes(16):
            return None
        try:
            return self.take(name)
        except ConnectionError:
            return None

    def close(self) -> None:
        """Close what nobody took."""
        for fd in (*self._given, *self._named.values()):
            fd.close()


class Importer:
    """What one process has opened of others through one driver."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.lock = threading.RLock()
        self.boards: dict[bytes, ControlBlock] = {}
        self.pools: dict[bytes, Any] = {}
        """Pools that were imported, by name; they stay, as importing a pool again gives the same."""
        self.ranges: weakref.WeakValueDictionary[bytes, ImportedRange] = weakref.WeakValueDictionary()
        self.imports: dict[bytes, _Import] = {}
        self.ways: dict[bytes, _PoolWay] = {}
        """How allocations are opened whose descriptors begin so, once one of them was."""
        self.import_pointer: Any = door.driver.cuMemPoolImportPointer
        self._attribute: Any = door.driver.cuPointerGetAttribute
        self.version = int(door.call("cuDriverGetVersion"))
        self._devices: dict[bytes, Device] = {}

    def device(self, described: Descriptor, stream: StreamLike | None) -> Device:
        """The device that has the memory; of memory on another machine, that of the stream."""
        uuid = described.device
        found = self._devices.get(uuid)
        if found is None:
            for device in Device.all(self.door.driver):
                self._devices[device.uuid.bytes] = device
            found = self._devices.get(uuid)
        if found is None and described.handle_type == FABRIC:
            if stream is None:
                raise ValueError(
                    f"the memory is on device {uuid.hex()}, which is not of this machine, or hidden from this process: "
                    "pass stream=, whose device is to have access"
                )
            return as_stream(stream, self.door).device
        if found is None:
            raise ValueError(
                f"the memory is on device {uuid.hex()}, which this process does not see: is it hidden by "
                "CUDA_VISIBLE_DEVICES?"
            )
        return found

    def warn_of_version(self, version: int) -> None:
        """Tell that the exporter runs another driver than this process."""
        warnings.warn(
            f"the exporter runs a driver for CUDA {version // 1000}.{version % 1000 // 10}, this process one for "
            f"{self.version // 1000}.{self.version % 1000 // 10}: NVIDIA supports equal ones only",
            DriverVersionWarning,
            stacklevel=4,
        )

    def board(self, described: Descriptor, handles: Handles) -> ControlBlock | None:
        """The exporter's board; None where the descriptor names none, or with fabric handles one of another machine."""
        if described.board == _NO_BOARD:
            return None
        board = self.boards.get(described.board)
        if board is None:
            self._forget_the_dead()
            fabric = described.handle_type == FABRIC
            fd = handles.take_here(described.board) if fabric else handles.take(described.board)
            if fd is None:
                return None
            with undoing(fd.close):
                board = self.boards[described.board] = ControlBlock.attach(self.door, fd, described.board)
        return board

    def _forget_the_dead(self) -> None:
        """Let go of the boards of exporters that have ended, where nothing of them is open."""
        open_boards = {id(held.way.board) for held in self.imports.values()}
        for name, board in list(self.boards.items()):
            if id(board) not in open_boards and not board.exporter_alive() and board.idle():
                del self.boards[name]
                self.ways = {head: way for head, way in self.ways.items() if way.board is not board}

    def pool(self, described: Descriptor, handles: Handles) -> Any:
        """The driver's handle of an imported pool; it is kept in :attr:`pools` once something was opened with it."""
        raw = self.pools.get(described.origin)
        if raw is None:
            with handles.take(described.origin) as fd:
                raw = self.door.call(
                    "cuMemPoolImportFromShareableHandle", fd.fileno(), _POSIX_MEMBER, 0, hint=_BAD_HANDLE
                )
        return raw

    def size_at(self, address: int) -> int:
        """How many bytes the driver has there (``cuPointerGetAttribute``)."""
        result, size = self._attribute(_RANGE_SIZE, address)
        if result:
            raise error_from(result, "cuPointerGetAttribute")
        return int(size)

    def memory(self, chunk: Chunk, handles: Handles) -> PhysicalMemory:
        """Physical memory; each import holds it by itself."""
        if chunk.fabric:
            return import_memory(self.door, chunk.fabric, chunk.nbytes)
        with handles.take(chunk.id) as fd:
            return import_memory(self.door, fd, chunk.nbytes)


Lessor: TypeAlias = tuple[bytes, int, int]
"""Whose lease it is: board, slot and generation."""


class _Import:
    """One allocation of another process, however many objects of this process name it."""

    __slots__ = ("address", "count", "key", "lessor", "passed", "released", "way", "words")

    def __init__(
        self, key: bytes | None, lessor: Lessor | None, way: _PoolWay | _LegacyWay, words: ImporterWords | None
    ) -> None:
        self.key = key
        """The driver's export data, for which it always gives the same address."""
        self.lessor = lessor
        self.way = way
        self.words = words
        """Ours on the board that keeps account of the lease; None where there is none."""
        self.released = False
        """Whether the driver was told; the board is then still to be."""
        self.address = 0
        self.count = 0
        self.passed: tuple[Event, ...] = ()
        """The ends of the work of objects that were closed before the last one."""


def importer_of(door: Door) -> Importer:
    """What this process has opened through a driver."""
    if door.importer is None:
        with making:
            if door.importer is None:
                door.importer = Importer(door)
    importer: Importer = door.importer
    return importer


def open(
    data: bytes,
    handles: Sequence[Fd] = (),
    *,
    stream: StreamLike | None = None,
    driver: Driver | None = None,
) -> Any:
    """Open what another process shared.

    Parameters
    ----------
    data
        The descriptor's bytes.
    handles
        The handles that came with it, in the order of :attr:`Shared.fds`; they are this call's from now on. Needed once
        for each pool, board and piece of physical memory. Fabric handles are in the descriptor; without the board, no
        stream waits for the contents, see :func:`share`.
    stream
        The stream that orders operations which name no other, and waits for the exporter's work; default: the device's
        default stream. Memory of another machine's device is for the device of this stream.
    driver
        The driver to use; default: the one that :func:`streamalloc.driver.default` names.

    Returns
    -------
    ImportedBuffer, ImportedRange, PhysicalMemory, ImportedPool or Event
        As what was shared. Of an allocation that is open here already, one more object for the same memory. A growable
        buffer that has grown is the same object, grown.

    Raises
    ------
    ValueError
        The bytes are no descriptor, damaged, of an unknown version, or name a device or a size that is not there.
    StaleDescriptorError
        The memory was freed before it was opened.
    InvalidValueError, CudaError
        The driver refuses a handle.
    """
    if type(stream) is Stream and stream._door.driver is driver:
        door = stream._door
    else:
        door = Door.of(driver if driver is not None else default_driver())
    importer = door.importer
    if importer is not None and not handles and type(data) is bytes:
        way = importer.ways.get(data[:HEAD_BYTES])
        if way is not None:
            door.check_process()
            with importer.lock:
                described = Descriptor.from_bytes(data, way.described)
                ordered = _prepared(importer, described, way.device, stream)
                return _open_allocation(way, described, ordered, described.payload)
    given = Handles(handles)
    try:
        door.check_process()
        described = Descriptor.from_bytes(data)
        if handles:
            given.name(described)
        given.endpoint = described.endpoint
        importer = importer_of(door)
        with importer.lock:
            device = importer.device(described, stream)
            ordered = _prepared(importer, described, device, stream)
            return _OPENERS[described.mechanism](importer, described, device, ordered, given)
    finally:
        if handles:
            given.close()


def _prepared(importer: Importer, described: Descriptor, device: Device, stream: StreamLike | None) -> Stream:
    """What is the same for all mechanisms; the stream to use."""
    if described.driver_version != importer.version:
        importer.warn_of_version(described.driver_version)
    if described.slot >= SLOTS:
        raise ValueError(f"the descriptor's slot {described.slot} is none of its board, which has {SLOTS}")
    ordered = device.default_stream if stream is None else stream
    if type(ordered) is not Stream or ordered._direct is not importer.door:
        ordered = as_stream(ordered, importer.door)
        if not ordered.is_default:
            # Of default streams, which others may capture, it is asked where there is something to wait for.
            _refuse_capture(ordered)
    return ordered


def _refuse_capture(stream: Stream) -> None:
    stream._refuse_capture("cuStreamWaitValue32", "memory of other processes cannot be opened in a capture")


def _names(described: Descriptor) -> list[bytes]:
    """The names of the handles that a descriptor needs, in order."""
    names = [chunk.id for chunk in described.chunks if not chunk.fabric]
    if described.mechanism in (Mechanism.POOL, Mechanism.POOL_POINTER):
        names = [described.origin]
    if described.board != _NO_BOARD:
        names.append(described.board)
    return list(dict.fromkeys(names))


def _open_pool(
    importer: Importer, described: Descriptor, device: Device, stream: Stream, handles: Handles
) -> ImportedPool:
    raw = importer.pools[described.origin] = importer.pool(described, handles)
    return ImportedPool(importer, raw, device)


class _PoolWay:
    """How allocations of one pool are opened whose leases are on one board."""

    __slots__ = ("_data", "board", "described", "device", "importer", "pool")

    def __init__(
        self, importer: Importer, described: Descriptor, device: Device, board: ControlBlock | None, pool: Any
    ):
        self.importer = importer
        self.described = described
        """Any of their descriptors."""
        self.device = device
        self.board = board
        self.pool = pool
        # One struct for all: they are opened one at a time.
        self._data = OpaqueStruct("CUmemPoolPtrExportData")

    def acquire(self, held: _Import, data: bytes) -> None:
        """Import an allocation by the driver's export data (``cuMemPoolImportPointer``)."""
        result, address = self.importer.import_pointer(self.pool, self._data.filled(data))
        if result:
            raise error_from(result, "cuMemPoolImportPointer", _BAD_POINTER)
        held.address = int(address)

    def release(self, held: _Import, stream: Stream) -> None:
        """Let go of an allocation, in stream order."""
        door = self.importer.door
        if stream._direct is door:
            result = door.driver.cuMemFreeAsync(held.address, stream._handle)[0]
            if result:
                raise error_from(result, "cuMemFreeAsync")
            held.released = True
        else:
            with stream._context():
                door.call("cuMemFreeAsync", held.address, stream._checked_raw())
                held.released = True


class _LegacyWay:
    """How memory of ``cuMemAlloc`` is opened."""

    __slots__ = ("board", "device", "importer")

    def __init__(self, importer: Importer, device: Device, board: ControlBlock | None) -> None:
        self.importer = importer
        self.device = device
        self.board = board

    def acquire(self, held: _Import, data: bytes) -> None:
        """Open a block (``cuIpcOpenMemHandle``)."""
        handle = opaque_struct("CUipcMemHandle", data)
        with self.device.current():
            call = self.importer.door.call
            held.address = int(call("cuIpcOpenMemHandle", handle, _LAZY_PEER_ACCESS, hint=_BAD_POINTER))

    def release(self, held: _Import, stream: Stream) -> None:
        """Close it, which is not in stream order."""
        stream.synchronize()
        with self.device.current():
            self.importer.door.call("cuIpcCloseMemHandle", held.address)
            held.released = True


def _open_pointer(
    importer: Importer, described: Descriptor, device: Device, stream: Stream, handles: Handles
) -> ImportedBuffer:
    pool = importer.pool(described, handles)
    known = described.origin in importer.pools
    if described.flags & Flags.LEASED:
        importer.pools[described.origin] = pool
    try:
        way = _PoolWay(importer, described, device, importer.board(described, handles), pool)
        opened = _open_allocation(way, described, stream, described.payload)
    except StaleDescriptorError:
        raise
    except BaseException:
        if not known:
            # It may have been another pool's handle that came along.
            importer.pools.pop(described.origin, None)
        raise
    if described.flags & Flags.LEASED:
        importer.ways[described.head] = way
    return opened


def _open_legacy(
    importer: Importer, described: Descriptor, device: Device, stream: Stream, handles: Handles
) -> ImportedBuffer:
    way = _LegacyWay(importer, device, importer.board(described, handles))
    # The driver counts how often such memory is open, so that each object has its own import.
    return _open_allocation(way, described, stream, None)


def _open_allocation(
    way: _PoolWay | _LegacyWay, described: Descriptor, stream: Stream, key: bytes | None
) -> ImportedBuffer:
    importer, board = way.importer, way.board
    flags = described.flags
    words: ImporterWords | None = None
    lessor: Lessor | None = None
    if flags & Flags.LEASED:
        if board is None:
            raise ValueError("the descriptor speaks of a lease, and names no board")
        words = board.importer_words(described.slot, board.importer)
        lessor = (described.board, described.slot, described.generation)
    elif flags & Flags.HELD:
        raise ValueError("the descriptor speaks of a lease, and has none")
    if board is not None and stream._direct is not importer.door and not _is_ready(board, described):
        # Before anything is open here, which could not be closed on that stream.
        _refuse_capture(stream)
    held = None if key is None else importer.imports.get(key)
    if held is not None:
        # First of all: a finaliser that comes in between may let go of the last object that there is.
        held.count += 1
    known = held is not None and not held.released
    if held is None or held.released:
        held = _Import(key, lessor, way, words)
        _import(importer, held, described, stream)
        held.count = 1
        if key is not None:
            importer.imports[key] = held
    try:
        if known:
            if lessor is not None and held.lessor != lessor:
                _check_generation(board, described)
                raise ValueError("this memory is open here under another lease: close that first")
            if described.base_size != importer.size_at(held.address):
                raise ValueError(f"the descriptor says {described.base_size} bytes, which is not what is open here")
        _wait_until_ready(board, described, stream)
    except BaseException as first:
        try:
            _take_back(importer, held, stream)
        except CudaError as later:
            attach(first, later)
        raise
    if words is not None and flags & Flags.HELD:
        words.received.value += 1
    announced = None if board is None else board.slot_words(described.slot)
    return ImportedBuffer(importer, held, described.offset, described.size, stream, announced, described.ready)


def _take_back(importer: Importer, held: _Import, stream: Stream) -> None:
    """Undo what counts one more object, which has not queued anything that others would have to come after."""
    if held.count > 1:
        held.count -= 1
    else:
        _let_go(importer, held, stream)


def _check_generation(board: ControlBlock | None, described: Descriptor) -> None:
    """Raise :class:`StaleDescriptorError` where the slot stands for something else by now."""
    if board is not None and board.slot_words(described.slot).generation.value != described.generation:
        raise StaleDescriptorError("this memory was freed by its owner before it was opened here")


def _import(importer: Importer, held: _Import, described: Descriptor, stream: Stream) -> None:
    """Import an allocation, having said so on the board, unless it was freed."""
    mine = held.words
    before = 0
    if mine is not None:
        before = mine.opened.value
        mine.opened.value = next_word(before)
    try:
        if mine is not None:
            fence()
            _check_generation(held.way.board, described)
        held.way.acquire(held, described.payload)
        size = importer.size_at(held.address)
        if size != described.base_size:
            raise ValueError(f"the descriptor says {described.base_size} bytes, and the driver has {size} there")
    except BaseException as first:
        if held.address:
            try:
                held.way.release(held, stream)
            except CudaError as later:
                attach(first, later)
        if mine is not None:
            # Not by counting on: the streams' writes of earlier closes may still be on their way.
            mine.opened.value = before
        raise


def _is_ready(board: ControlBlock, described: Descriptor) -> bool:
    """Whether the contents are there, as the exporter announced them."""
    return reached(board.slot_words(described.slot).ready.value, described.ready)


def _wait_until_ready(board: ControlBlock | None, described: Descriptor, stream: Stream) -> None:
    """Have ``stream`` wait for the exporter's announcement, if that is still to come."""
    if board is None or _is_ready(board, described):
        return
    words, wanted = board.slot_words(described.slot), described.ready
    if not reached(words.announced.value, wanted):
        raise ValueError("the descriptor waits for contents that its exporter has not announced")
    board.expect(described.slot, wanted)
    board.wait(stream, words.ready_address, wanted)


def _let_go(importer: Importer, held: _Import, stream: Stream) -> None:
    """Close one object of an import; the last one ends it. Where a call fails it can be done again."""
    importer.door.check_process()
    with importer.lock:
        if held.count > 1:
            # The end of this one's work, which the last one has to come after.
            held.passed += (stream.record(),)
            held.count -= 1
            return
        for event in held.passed:
            stream.wait(event)
        held.passed = ()
        if not held.released:
            held.way.release(held, stream)
            if held.key is not None:
                importer.imports.pop(held.key, None)
        board, mine = held.way.board, held.words
        if board is not None and mine is not None:
            opened = mine.opened.value
            if not reached(mine.closed.value, opened - 1):
                # An earlier import's end is still on its way, on another stream: the word only ever counts up.
                board.wait(stream, mine.closed_address, (opened - 1) % WORD)
            board.tell(stream, mine.closed, mine.closed_address, opened, checked=True)
            mine.closing.value = opened
        held.count = 0


class ImportedBuffer(Memory, Closes):
    """An allocation of another process, or a part of one: made by :func:`open`.

    Closing it, which is in stream order, lets the owner free the memory; dropping it does so on its own stream.
    """

    __slots__ = ("__weakref__", "_announced", "_held", "_importer", "_nbytes", "_offset", "_ready", "_stream")

    def __init__(
        self,
        importer: Importer,
        held: _Import,
        offset: int,
        nbytes: int,
        stream: Stream,
        announced: SlotWords | None,
        ready: int,
    ) -> None:
        self._importer = importer
        self._held: _Import | None = held
        self._offset = offset
        self._nbytes = nbytes
        self._stream = stream
        self._announced = announced
        self._ready = ready

    @property
    def address(self) -> int:
        """Where the memory is mapped in this process.

        Raises
        ------
        ClosedError
            It was closed.
        """
        return self._open_import().address + self._offset

    @property
    def nbytes(self) -> int:
        """Size in bytes of the part that was shared."""
        return self._nbytes

    @property
    def stream(self) -> Stream:
        """The stream that it was opened on, which waits for the owner's work."""
        return self._stream

    @property
    def location(self) -> MemLocation:
        """The device that has the memory."""
        return self._open_import().way.device.location

    @property
    def owner(self) -> object:
        """None: the memory belongs to another process."""
        return None

    @property
    def device_accessible(self) -> bool:
        """True where the stream is of the device that has the memory."""
        return self._stream.device == self._open_import().way.device

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._held is None

    @property
    def lost(self) -> bool:
        """Whether the owner died before it had finished the contents that this process waited for."""
        self._open_import()
        return self._announced is not None and self._announced.was_lost(self._ready)

    @property
    def owner_alive(self) -> bool | None:
        """Whether the process that shared it lives; None where that cannot be known."""
        held = self._open_import()
        board = held.way.board if held.words is not None else None
        return None if board is None else board.exporter_alive()

    def close(self, stream: StreamLike | None = None) -> None:
        """Let go of the memory after the work of ``stream`` (default: its own). Idempotent.

        The owner's free waits for that work, in stream order.
        """
        held = self._held
        if held is None:
            return
        ordered = self._stream if stream is None else as_stream(stream, self._door)
        if ordered._direct is not self._importer.door:
            ordered._checked_raw()
            ordered._refuse_capture("cuStreamWriteValue32", "memory of other processes cannot be closed in a capture")
        _let_go(self._importer, held, ordered)
        self._held = None

    def _open_import(self) -> _Import:
        if self._held is None:
            raise ClosedError(f"this imported buffer of {self._nbytes} bytes was closed")
        return self._held

    @property
    def _door(self) -> Door:
        return self._importer.door

    def __del__(self) -> None:
        held = getattr(self, "_held", None)
        if held is None or not self._door.usable:
            return
        self._held = None
        self._door.outside_captures(lambda: self._drop(held))

    def _drop(self, held: _Import) -> None:
        try:
            with self._door.relaxed():
                stream = held.way.device.default_stream if self._stream.closed else self._stream
                if self._stream.closed:
                    held.way.device.synchronize()
                _let_go(self._importer, held, stream)
        except CudaError as error:
            warnings.warn(f"a dropped import could not be closed: {error}", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        where = "closed" if self._held is None else f"at {self.address:#x}, {self.location}"
        return f"<{type(self).__name__} of {self._nbytes} bytes {where}>"


class ImportedPool:
    """A pool of another process. It makes allocations of it known here; nothing can be allocated from it."""

    __slots__ = ("_importer", "_raw", "device")

    device: Device
    """The device that has the memory."""

    def __init__(self, importer: Importer, raw: Any, device: Device) -> None:
        self._importer = importer
        self._raw = raw
        self.device = device

    @property
    def handle(self) -> int:
        """The driver's handle (``CUmemoryPool``) as a number."""
        return int(self._raw)

    def set_access(self, device: Device, access: MemAccess = MemAccess.READWRITE) -> None:
        """Let another device of this process use the pool's memory (``cuMemPoolSetAccess``)."""
        descriptor = MemAccessDesc(device.location, access).to_driver()
        self._importer.door.call("cuMemPoolSetAccess", self._raw, [descriptor], 1)

    def __repr__(self) -> str:
        return f"<ImportedPool {self.handle:#x} on device {self.device.ordinal}>"


class ImportedRange(RemappableBuffer):
    """Physical memory of another process, mapped here at one address: made by :func:`open`.

    The driver keeps the memory for as long as somebody has it, so that no lease is needed.
    """

    __slots__ = ()

    def evict(self, *_: Any, **__: Any) -> None:
        """Refused: the memory belongs to another process."""
        raise ValueError(f"{self!r} is memory of another process, which evicts it")


def _open_physical(
    importer: Importer, described: Descriptor, device: Device, stream: Stream, handles: Handles
) -> PhysicalMemory | ImportedRange:
    chunks = described.chunks
    total = sum(chunk.nbytes for chunk in chunks)
    growable = bool(described.flags & Flags.GROWABLE)
    if not chunks or described.offset + described.size > total or (not growable and described.base_size != total):
        raise ValueError(
            f"the descriptor's {described.size} bytes at {described.offset} do not fit its {len(chunks)} chunks, "
            f"which have {total} bytes"
        )
    if described.origin == bytes(16):
        if len(chunks) != 1:
            raise ValueError(f"the descriptor is of one piece of memory, and names {len(chunks)}")
        memory = importer.memory(chunks[0], handles)
        with undoing(memory.close):
            check_mappable(memory)
            board = importer.board(described, handles)
            _wait_until_ready(board, described, stream)
        return memory
    mapped = importer.ranges.get(described.origin) if growable else None
    if mapped is not None and not mapped.closed:
        _map_rest(importer, mapped, described, handles)
        board = importer.board(described, handles)
        if mapped.stream.handle != stream.handle:
            _wait_until_ready(board, described, mapped.stream)
        _wait_until_ready(board, described, stream)
        return mapped
    capacity = described.base_size if growable else total
    mapped = ImportedRange(device, capacity, {device.location: MemAccess.READWRITE}, stream, described.offset)
    with undoing(mapped.close):
        _map_rest(importer, mapped, described, handles)
        board = importer.board(described, handles)
        _wait_until_ready(board, described, stream)
    if growable:
        importer.ranges[described.origin] = mapped
    return mapped


def _map_rest(importer: Importer, mapped: ImportedRange, described: Descriptor, handles: Handles) -> None:
    """Map what is not mapped yet, and unmap what the owner does not have any more."""
    chunks = described.chunks
    # Whichever handles a chunk is shared by, it is the same.
    names = [chunk[:2] for chunk in chunks]
    mapped.set_chunks(names, lambda place: importer.memory(chunks[place], handles), described.size)


def _open_event(importer: Importer, described: Descriptor, device: Device, stream: Stream, handles: Handles) -> Event:
    handle = opaque_struct("CUipcEventHandle", described.payload)
    with device.current():
        event = opened_event(device, handle)
    return event


_BAD_HANDLE = "the descriptor that came along is no handle of this kind of memory, or of another machine"
_BAD_POINTER = "the owner's process has freed it, or ended"

_OPENERS: dict[Mechanism, Callable[[Importer, Descriptor, Device, Stream, Handles], Any]] = {
    Mechanism.POOL: _open_pool,
    Mechanism.POOL_POINTER: _open_pointer,
    Mechanism.LEGACY: _open_legacy,
    Mechanism.PHYSICAL: _open_physical,
    Mechanism.EVENT: _open_event,
}
