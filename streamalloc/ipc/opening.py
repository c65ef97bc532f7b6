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

from streamalloc.buffer import Memory
from streamalloc.device import Device
from streamalloc.driver import Door, Driver
from streamalloc.driver import default as default_driver
from streamalloc.driver.bindings import cuda, opaque_struct
from streamalloc.errors import ClosedError, CudaError, StaleDescriptorError, attach, error_from, undoing
from streamalloc.fd import Fd
from streamalloc.ipc.board import SLOTS, WORD, Board, fence, next_word, reached
from streamalloc.ipc.descriptor import Chunk, Descriptor, Flags, Mechanism
from streamalloc.ipc.leases import making
from streamalloc.ownership import Closes
from streamalloc.properties import MemAccess, MemAccessDesc, MemLocation
from streamalloc.stream import Event, Stream, StreamLike, as_stream
from streamalloc.vmm import PhysicalMemory, VirtualBuffer
from streamalloc.vmm.addresses import AddressRange, Mapped
from streamalloc.vmm.ordering import accessing, wait

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
        from streamalloc.ipc.endpoint import fetch

        return fetch(self.endpoint, name)

    def close(self) -> None:
        """Close what nobody took."""
        for fd in (*self._given, *self._named.values()):
            fd.close()


class Importer:
    """What one process has opened of others through one driver."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.lock = threading.RLock()
        self.boards: dict[bytes, Board] = {}
        self.pools: dict[bytes, Any] = {}
        """Pools that were imported, by name; they stay, as importing a pool again gives the same."""
        self.ranges: weakref.WeakValueDictionary[bytes, ImportedRange] = weakref.WeakValueDictionary()
        self.imports: dict[bytes, _Import] = {}
        self.version = int(door.call("cuDriverGetVersion"))
        self._devices: dict[bytes, Device] = {}

    def device(self, uuid: bytes) -> Device:
        """The device of this process with a UUID."""
        found = self._devices.get(uuid)
        if found is None:
            for device in Device.all(self.door.driver):
                self._devices[device.uuid.bytes] = device
            found = self._devices.get(uuid)
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
            stacklevel=3,
        )

    def board(self, described: Descriptor, handles: Handles) -> Board | None:
        """The exporter's board; None where the descriptor names none."""
        if described.board == _NO_BOARD:
            return None
        if described.slot >= SLOTS:
            raise ValueError(f"the descriptor's slot {described.slot} is none of its board, which has {SLOTS}")
        board = self.boards.get(described.board)
        if board is None:
            self._forget_the_dead()
            fd = handles.take(described.board)
            with undoing(fd.close):
                board = self.boards[described.board] = Board.attach(self.door, fd, described.board)
        return board

    def _forget_the_dead(self) -> None:
        """Let go of the boards of exporters that have ended, where nothing of them is open."""
        open_boards = {id(held.board) for held in self.imports.values()}
        for name, board in list(self.boards.items()):
            if id(board) not in open_boards and not board.exporter_alive() and board.idle():
                del self.boards[name]

    def pool(self, described: Descriptor, handles: Handles) -> Any:
        """The driver's handle of an imported pool; it is kept in :attr:`pools` once something was opened with it."""
        raw = self.pools.get(described.origin)
        if raw is None:
            with handles.take(described.origin) as fd:
                raw = self.door.call(
                    "cuMemPoolImportFromShareableHandle", fd.fileno(), _POSIX_MEMBER, 0, hint=_BAD_HANDLE
                )
        return raw

    def free(self, held: _Import, stream: Stream) -> None:
        """Let go of an imported allocation, in stream order."""
        if stream._direct is self.door:
            result = self.door.driver.cuMemFreeAsync(held.address, stream._handle)[0]
            if result:
                raise error_from(result, "cuMemFreeAsync")
            held.released = True
        else:
            with stream._context():
                self.door.call("cuMemFreeAsync", held.address, stream._checked_raw())
                held.released = True

    def memory(self, name: bytes, nbytes: int, handles: Handles) -> PhysicalMemory:
        """Physical memory; each import holds it by itself."""
        with handles.take(name) as fd:
            raw = self.door.call("cuMemImportFromShareableHandle", fd.fileno(), _POSIX_MEMBER, hint=_BAD_HANDLE)
        with undoing(lambda: self.door.call("cuMemRelease", raw)):
            return PhysicalMemory._of_handle(self.door, raw, nbytes, imported=True)


Lessor: TypeAlias = tuple[bytes, int, int]
"""Whose lease it is: board, slot and generation."""


class _Import:
    """One allocation of another process, however many objects of this process name it."""

    __slots__ = (
        "address",
        "board",
        "count",
        "device",
        "key",
        "lessor",
        "lost",
        "passed",
        "release",
        "released",
        "slot",
    )

    def __init__(
        self,
        key: bytes | None,
        lessor: Lessor | None,
        device: Device,
        board: Board | None,
        slot: int,
        release: Callable[[_Import, Stream], None],
    ) -> None:
        self.key = key
        """The driver's export data, for which it always gives the same address."""
        self.lessor = lessor
        self.device = device
        self.board = board
        """The board that keeps account of the lease; None where there is none."""
        self.slot = slot
        self.release = release
        self.released = False
        """Whether the driver was told; the board is then still to be."""
        self.address = 0
        self.count = 0
        self.lost = False
        self.passed: list[Event] = []
        """The ends of the work of objects that were closed before the last one."""

    def lose(self) -> None:
        """The owner died before it had finished the contents."""
        self.lost = True


def _nothing() -> None:
    pass


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
        for each pool, board and piece of physical memory.
    stream
        The stream that orders operations which name no other, and waits for the exporter's work; default: the device's
        default stream.
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
    door = Door.of(driver if driver is not None else default_driver())
    given = Handles(handles)
    try:
        door.check_process()
        described = Descriptor.from_bytes(data)
        if handles:
            given.name(described)
        given.endpoint = described.endpoint
        importer = importer_of(door)
        with importer.lock:
            device = importer.device(described.device)
            if described.driver_version != importer.version:
                importer.warn_of_version(described.driver_version)
            ordered = device.default_stream if stream is None else stream
            if type(ordered) is not Stream or ordered._direct is not door:
                ordered = as_stream(ordered, door)
                ordered._refuse_capture(
                    "cuStreamWaitValue32", "memory of other processes cannot be opened in a capture"
                )
            return _OPENERS[described.mechanism](importer, described, device, ordered, given)
    finally:
        if handles:
            given.close()


def _names(described: Descriptor) -> list[bytes]:
    """The names of the handles that a descriptor needs, in order."""
    names = [chunk.id for chunk in described.chunks]
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


def _open_pointer(
    importer: Importer, described: Descriptor, device: Device, stream: Stream, handles: Handles
) -> ImportedBuffer:
    door = importer.door
    pool = importer.pool(described, handles)

    def acquire(held: _Import) -> None:
        data = opaque_struct("CUmemPoolPtrExportData", described.payload)
        held.address = int(door.call("cuMemPoolImportPointer", pool, data, hint=_BAD_POINTER))

    known = described.origin in importer.pools
    if described.flags & Flags.LEASED:
        importer.pools[described.origin] = pool
    try:
        return _open_allocation(importer, described, device, stream, handles, described.payload, acquire, importer.free)
    except StaleDescriptorError:
        raise
    except BaseException:
        if not known:
            # It may have been another pool's handle that came along.
            importer.pools.pop(described.origin, None)
        raise


def _open_legacy(
    importer: Importer, described: Descriptor, device: Device, stream: Stream, handles: Handles
) -> ImportedBuffer:
    door = importer.door
    handle = opaque_struct("CUipcMemHandle", described.payload)

    def acquire(held: _Import) -> None:
        with device.current():
            held.address = int(door.call("cuIpcOpenMemHandle", handle, _LAZY_PEER_ACCESS, hint=_BAD_POINTER))

    def release(held: _Import, stream: Stream) -> None:
        # Closing is not in stream order.
        stream.synchronize()
        with device.current():
            door.call("cuIpcCloseMemHandle", held.address)
            held.released = True

    # The driver counts how often such memory is open, so that each object has its own import.
    return _open_allocation(importer, described, device, stream, handles, None, acquire, release)


def _open_allocation(
    importer: Importer,
    described: Descriptor,
    device: Device,
    stream: Stream,
    handles: Handles,
    key: bytes | None,
    acquire: Callable[[_Import], None],
    release: Callable[[_Import, Stream], None],
) -> ImportedBuffer:
    board = importer.board(described, handles)
    leased = board if described.flags & Flags.LEASED else None
    if leased is None and described.flags & (Flags.LEASED | Flags.HELD):
        raise ValueError("the descriptor speaks of a lease, and names no board")
    lessor = (described.board, described.slot, described.generation) if leased is not None else None
    held = None if key is None else importer.imports.get(key)
    if held is not None and lessor is not None and held.lessor != lessor:
        _check_generation(leased, described)
        raise ValueError("this memory is open here under another lease: close that first")
    if held is None:
        held = _Import(key, lessor, device, leased, described.slot, release)
        _import(importer, held, described, acquire, stream)
        if key is not None:
            importer.imports[key] = held
    elif described.base_size != _size_at(importer.door, held.address):
        raise ValueError(f"the descriptor says {described.base_size} bytes, which is not what is open here")
    held.count += 1
    try:
        _wait_until_ready(held.lose, board, described, stream)
    except BaseException as first:
        try:
            _let_go(importer, held, stream)
        except CudaError as later:
            attach(first, later)
        raise
    if leased is not None and described.flags & Flags.HELD:
        leased.received[described.slot, leased.importer] += 1
    return ImportedBuffer(importer, held, described.offset, described.size, stream)


def _size_at(door: Door, address: int) -> int:
    """How many bytes the driver has there."""
    return int(door.call("cuPointerGetAttribute", _RANGE_SIZE, address))


def _check_generation(board: Board | None, described: Descriptor) -> None:
    """Raise :class:`StaleDescriptorError` where the slot stands for something else by now."""
    if board is not None and int(board.generation[described.slot]) != described.generation:
        raise StaleDescriptorError("this memory was freed by its owner before it was opened here")


def _import(
    importer: Importer, held: _Import, described: Descriptor, acquire: Callable[[_Import], None], stream: Stream
) -> None:
    """Import an allocation, having said so on the board, unless it was freed."""
    board, slot = held.board, held.slot
    before = 0
    if board is not None:
        mine = board.opened[slot]
        before = int(mine[board.importer])
        mine[board.importer] = next_word(before)
    try:
        if board is not None:
            fence()
            _check_generation(board, described)
        acquire(held)
        size = _size_at(importer.door, held.address)
        if size != described.base_size:
            raise ValueError(f"the descriptor says {described.base_size} bytes, and the driver has {size} there")
    except BaseException as first:
        if held.address:
            try:
                held.release(held, stream)
            except CudaError as later:
                attach(first, later)
        if board is not None:
            # Not by counting on: the streams' writes of earlier closes may still be on their way.
            board.opened[slot, board.importer] = before
        raise


def _wait_until_ready(lose: Callable[[], None], board: Board | None, described: Descriptor, stream: Stream) -> None:
    """Have ``stream`` wait for the exporter's announcement, if that is still to come."""
    if board is None:
        return
    slot, wanted = described.slot, described.ready
    if not reached(board.ready[slot], wanted):
        if not reached(board.announced[slot], wanted):
            raise ValueError("the descriptor waits for contents that its exporter has not announced")
        board.wait(stream, board.word("ready", slot), wanted)
        board.expect(slot, wanted, lose)


def _let_go(importer: Importer, held: _Import, stream: Stream) -> None:
    """Close one object of an import; the last one ends it. Where a call fails it can be done again."""
    importer.door.check_process()
    with importer.lock:
        if held.count > 1:
            # The end of this one's work, which the last one has to come after.
            held.passed.append(stream.record())
            held.count -= 1
            return
        for event in held.passed:
            stream.wait(event)
        held.passed.clear()
        if not held.released:
            held.release(held, stream)
            if held.key is not None:
                importer.imports.pop(held.key, None)
        board, slot = held.board, held.slot
        if board is not None:
            opened = int(board.opened[slot, board.importer])
            address = board.word("closed", slot, board.importer)
            if not reached(board.closed[slot, board.importer], opened - 1):
                # An earlier import's end is still on its way, on another stream: the word only ever counts up.
                board.wait(stream, address, (opened - 1) % WORD)
            board.write(stream, address, opened)
            board.closing[slot, board.importer] = opened
        held.count = 0


class ImportedBuffer(Memory, Closes):
    """An allocation of another process, or a part of one: made by :func:`open`.

    Closing it, which is in stream order, lets the owner free the memory; dropping it does so on its own stream.
    """

    __slots__ = ("__weakref__", "_held", "_importer", "_nbytes", "_offset", "_stream")

    def __init__(self, importer: Importer, held: _Import, offset: int, nbytes: int, stream: Stream) -> None:
        self._importer = importer
        self._held: _Import | None = held
        self._offset = offset
        self._nbytes = nbytes
        self._stream = stream

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
        return self._open_import().device.location

    @property
    def owner(self) -> object:
        """None: the memory belongs to another process."""
        return None

    @property
    def device_accessible(self) -> bool:
        """True where the stream is of the device that has the memory."""
        return self._stream.device == self._open_import().device

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._held is None

    @property
    def lost(self) -> bool:
        """Whether the owner died before it had finished the contents that this process waited for."""
        return self._open_import().lost

    @property
    def owner_alive(self) -> bool | None:
        """Whether the process that shared it lives; None where that cannot be known."""
        board = self._open_import().board
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
                stream = held.device.default_stream if self._stream.closed else self._stream
                if self._stream.closed:
                    held.device.synchronize()
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


class ImportedRange(VirtualBuffer):
    """Physical memory of another process, mapped here at one address: made by :func:`open`.

    The driver keeps the memory for as long as somebody has it, so that no lease is needed.
    """

    __slots__ = ("_names", "_offset")

    _offset: int
    _names: list[Chunk]
    """The pieces that are mapped, in the order of addresses."""

    @property
    def address(self) -> int:
        """Where the part that was shared begins."""
        return self.range.address + self._offset

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
        memory = importer.memory(chunks[0].id, chunks[0].nbytes, handles)
        with undoing(memory.close):
            _verify(memory)
            board = importer.board(described, handles)
            _wait_until_ready(_nothing, board, described, stream)
        return memory
    mapped = importer.ranges.get(described.origin) if growable else None
    if mapped is not None and not mapped.closed:
        _map_rest(importer, mapped, described, handles)
        board = importer.board(described, handles)
        if mapped.stream.handle != stream.handle:
            _wait_until_ready(_nothing, board, described, mapped.stream)
        _wait_until_ready(_nothing, board, described, stream)
        return mapped
    mapped = ImportedRange.__new__(ImportedRange)
    mapped._offset = described.offset
    mapped._names = []
    capacity = described.base_size if growable else total
    mapped._open(device, capacity, 0, 0, {device.location: MemAccess.READWRITE}, stream)
    with undoing(mapped.close):
        _map_rest(importer, mapped, described, handles)
        board = importer.board(described, handles)
        _wait_until_ready(_nothing, board, described, stream)
    if growable:
        importer.ranges[described.origin] = mapped
    return mapped


def _verify(memory: PhysicalMemory) -> None:
    """Raise where memory has another size than it is said to: the driver maps it as a whole only."""
    granularity = memory._recipe.granularity
    if memory.nbytes % granularity:
        raise ValueError(f"physical memory of {memory.nbytes} bytes, which are no multiple of {granularity}")
    with AddressRange(memory.nbytes, driver=memory.driver) as addresses:
        addresses.map(memory)


def _map_rest(importer: Importer, mapped: ImportedRange, described: Descriptor, handles: Handles) -> None:
    """Map what is not mapped yet, and unmap what the owner does not have any more."""
    chunks = described.chunks
    same = 0
    while same < min(len(mapped._names), len(chunks)) and mapped._names[same] == chunks[same]:
        same += 1
    have = mapped._pieces_mapped()
    if have[same:]:
        wait(None, mapped._door, accessing(held.rights for held in have[same:]))
        mapped.range._unmap(have[same:])
        mapped._left += [held.memory for held in have[same:]]
        del mapped._names[same:]
        mapped._mapped = have[same].offset
        mapped._nbytes = min(mapped._nbytes, max(mapped._mapped - mapped._offset, 0))
        mapped._give_back()
    made: list[Mapped] = []
    memories: list[PhysicalMemory] = []
    at = mapped._mapped
    try:
        for chunk in chunks[same:]:
            memories.append(importer.memory(chunk.id, chunk.nbytes, handles))
            made.append(mapped.range._map(memories[-1], at))
            at += chunk.nbytes
        if made:
            mapped.range._grant(made, mapped._rights, mapped._structs)
    except BaseException as first:
        mapped._left += [memory for memory in memories if not memory.mapping_count]
        mapped._take_away(made, first)
        raise
    mapped._names += chunks[same:]
    mapped._mapped = at
    mapped._nbytes = described.size


def _open_event(importer: Importer, described: Descriptor, device: Device, stream: Stream, handles: Handles) -> Event:
    handle = opaque_struct("CUipcEventHandle", described.payload)
    with device.current():
        raw = importer.door.call("cuIpcOpenEventHandle", handle, hint="the process that made the event has ended")
        event = Event._of_handle(device, raw)
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
