"""``open``: memory of another process, checked and mapped here.

Imports are shared: the driver answers a second import of an allocation with the same address and does not count, so
this process counts, and lets go once. Control blocks and pools of processes that have ended, and pools that were
closed, are let go of when others come.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np
from typing_extensions import TypeVar

from streamalloc.core.device import Device
from streamalloc.core.door import Door, PerDriver, door_behind
from streamalloc.core.errors import (
    CaptureError,
    ClosedError,
    CudaError,
    StaleDescriptorError,
    attach,
    error_from,
    size_text,
    undoing,
)
from streamalloc.core.event import Event, context_event, opened_event
from streamalloc.core.fd import Fd
from streamalloc.core.html import Row
from streamalloc.core.later import Deferred, Later, later_of, work
from streamalloc.core.memory import Memory, TypedView
from streamalloc.core.ownership import Closes, finaliser
from streamalloc.core.properties import MemAccess, MemAccessDesc, MemLocation
from streamalloc.core.stream import (
    Stream,
    StreamLike,
    as_stream,
    direct_handle,
    ordered_after,
    raw_handle,
    refuse_capture,
)
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
    reached,
)
from streamalloc.ipc.sharing.descriptor import FABRIC, HEAD_BYTES, Chunk, Descriptor, Flags, Head, Mechanism
from streamalloc.ipc.transport.channel import Channel
from streamalloc.ipc.transport.handle_server import fetch
from streamalloc.vmm import PhysicalMemory
from streamalloc.vmm.internal import RemappableBuffer, check_mappable, import_memory

__all__ = [
    "DriverVersionWarning",
    "Imported",
    "ImportedBuffer",
    "ImportedPool",
    "ImportedRange",
    "importer_of",
    "open",
    "receive",
]

_POSIX_MEMBER = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_LAZY_PEER_ACCESS = 1
_NO_BLOCK = bytes(16)
_RANGE_SIZE = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE
# How often a call that may wait for the device is made again where the driver refuses it.
_TRIES = 5
# Seconds until it is looked again whether the devices have nothing to do; and when, after asking.
_IDLE_PAUSE = 0.02
_LOOKS = (0.0, 0.00005, 0.0002)


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
        names = [chunk.id for chunk in described.chunks if not chunk.fabric]
        if described.mechanism in (Mechanism.POOL, Mechanism.POOL_POINTER):
            names = [described.origin]
        if described.control_block != _NO_BLOCK:
            names.append(described.control_block)
        names = list(dict.fromkeys(names))
        # One more is that by which a message holds the allocation. It is closed with what nobody takes.
        by_the_message = int(bool(described.flags & Flags.HELD) and not described.hold)
        if by_the_message and len(self._given) == 1:
            return
        if len(self._given) != len(names) + by_the_message:
            raise ValueError(
                f"the descriptor needs {len(names) + by_the_message} handles, and {len(self._given)} came along"
            )
        self._named = dict(zip(names, self._given, strict=False))
        self._given = self._given[len(names) :]

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
        if name in self._named or self.endpoint != bytes(16):
            with contextlib.suppress(ConnectionError):
                return self.take(name)
        return None

    def close(self) -> None:
        """Close what nobody took."""
        for fd in (*self._given, *self._named.values()):
            fd.close()


class _OnceIdle(Deferred):
    """A call that waits for the devices, made on a thread of its own. A second call of it does nothing.

    While it waits, the driver makes other threads wait that need the context, such as for a new event (driver 580). And
    a stream may wait for what this process has yet to do, or to tell another process: then nobody would ever go on. So
    the call is made at a moment when the devices have nothing to do.
    """

    __slots__ = ("_call", "_door", "_then")

    def __init__(self, door: Door, call: Callable[[], object]) -> None:
        self._door = door
        self._call = call
        self._then = 0.0

    def attempt(self) -> bool:
        """Begin; it comes back where the devices are at work."""
        if time.monotonic() < self._then:
            return False
        self._then = time.monotonic() + _IDLE_PAUSE
        # One C function: threading.Thread.start breaks the thread where a signal handler raises.
        _thread.start_new_thread(self._run, ())
        return True

    def _run(self) -> None:
        for _ in range(_TRIES):
            # Errors of a context that is lost: nothing is left to wait for.
            with contextlib.suppress(CudaError), self._door.relaxed():
                if not self._idle():
                    later_of(self._door).hand_in(self)
                    return
            with contextlib.suppress(CudaError):
                self._call()
                return

    def _idle(self) -> bool:
        """Whether all work that devices have now is done at once."""
        events = [context_event(Device(ordinal, driver=self._door.driver)) for ordinal in self._door.ordinals]
        for pause in _LOOKS:
            time.sleep(pause)
            if all(event.query() for event in events):
                return True
        return False


class _PoolHandle(Deferred):
    """The driver's handle of a pool of another process.

    It ends once the frees of what was imported have run. The driver waits for nothing then, and what is done with the
    handle afterwards ends the process (driver 580.159).
    """

    __slots__ = ("_events", "_importer", "_raw", "marks", "users")

    def __init__(self, importer: Importer) -> None:
        self._importer = importer
        self._raw: Any = None
        self._events: list[Event] | None = None
        self.marks: set[tuple[ControlBlock, int]] = set()
        """What tells that its owner still has it."""
        self.users: weakref.WeakSet[ImportedPool] = weakref.WeakSet()

    def ended(self) -> bool:
        """Whether its owner has closed it, or has died, as far as can be known."""
        return not all(block.marked("pool", mark) and block.exporter_alive() for block, mark in self.marks)

    def attempt(self) -> bool:
        door = self._importer.door
        if self._events is None:
            self._events = [context_event(Device(ordinal, driver=door.driver)) for ordinal in door.ordinals]
        if not all(event.query() for event in self._events):
            return False
        with self._importer.lock:
            # Where it was imported anew meanwhile, the driver has the same handle.
            if self._raw is not None and int(self._raw) not in self._importer.handles:
                door.give_back(self, "cuMemPoolDestroy")
        return True


class Importer:
    """What one process has opened of others through one driver."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.lock: contextlib.AbstractContextManager[bool] = threading.RLock()
        """Held where imports are counted. Nothing is called then that can wait for a stream or another process."""
        self.blocks: dict[bytes, ControlBlock] = {}
        self.pools: dict[bytes, _PoolHandle] = {}
        """Imported pools by name, of which more allocations may come without the handle."""
        self.ranges: weakref.WeakValueDictionary[bytes, ImportedRange] = weakref.WeakValueDictionary()
        self.imports: dict[bytes, _Import] = {}
        self.later: Later = later_of(door)
        self.ways: dict[bytes, _PoolWay] = {}
        """How allocations are opened whose descriptors begin so, once one of them was."""
        self.version: int = int(door.call("cuDriverGetVersion"))
        self._devices: dict[bytes, Device] = {}
        self._dropped: SimpleQueue[bool] = SimpleQueue()
        """The only kind of queue that a finaliser may put into."""
        self.watching = False
        self.handles: dict[int, _PoolHandle] = {}
        """All imported pools: the driver has one handle of each."""

    def drop(self, dropped: _DroppedImport) -> None:
        """Let go of an import soon. Called by finalisers, which may interrupt anything."""
        later_of(self.door).hand_in(dropped)
        self._dropped.put(True)

    def watch_drops(self) -> None:
        """Have a thread let go of what is dropped: this process may not come to one of the points of work, and the
        owner waits."""
        if self.watching:
            return
        self.watching = True
        args = (self._dropped, weakref.ref(self.door))
        with undoing(lambda: setattr(self, "watching", False)):
            threading.Thread(target=_let_go_of_the_dropped, args=args, name="streamalloc drops", daemon=True).start()
        weakref.finalize(self, self._dropped.put, False).atexit = False

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

    def block_of(self, described: Descriptor, handles: Handles) -> ControlBlock | None:
        """The exporter's control block; None where there is none, or with fabric handles it is of another machine."""
        if described.control_block == _NO_BLOCK:
            return None
        return self.control_block(
            described.control_block, handles.take_here if described.handle_type == FABRIC else handles.take
        )

    def control_block(self, name: bytes, take: Callable[[bytes], Fd | None]) -> ControlBlock | None:
        """The control block of this name; ``take`` gives its file the first time, or None if it cannot be had."""
        block = self.blocks.get(name)
        if block is None:
            self._let_go_of_the_ended()
            fd = take(name)
            if fd is None:
                return None
            with undoing(fd.close), self.lock:
                block = self.blocks.get(name)
                if block is None:
                    block = self.blocks[name] = ControlBlock.attach(self.door, fd, name)
            if block.fd is not fd:
                fd.close()
        return block

    def pool(self, described: Descriptor, handles: Handles) -> _PoolHandle:
        """An imported pool; it is in :attr:`pools` where more may come of it without the handle."""
        found = self.pools.get(described.origin)
        if found is not None:
            return found
        self._let_go_of_the_ended()
        # What is destroyed meanwhile may be the same pool: the driver's handle would be that of nothing.
        with handles.take(described.origin) as fd, self.lock:
            found = self.pools.get(described.origin)
            if found is None:
                made = _PoolHandle(self)
                self.door.create(
                    made, "_raw", "cuMemPoolImportFromShareableHandle", fd.fileno(), _POSIX_MEMBER, 0, hint=_BAD_HANDLE
                )
                found = self.handles.setdefault(int(made._raw), made)
                if described.mechanism is Mechanism.POOL or described.flags & Flags.LEASED:
                    self.pools[described.origin] = found
            return found

    def _let_go_of_the_ended(self) -> None:
        """Let go of the control blocks and pools of exporters that have ended, and of closed pools."""
        later = later_of(self.door)
        with self.lock:
            ways = [held.way for held in self.imports.values()]
            pools = {id(way.pool) for way in ways}
            blocks = {id(way.block) for way in ways}
            ended = {
                number: pool
                for number, pool in self.handles.items()
                if id(pool) not in pools and not pool.users and pool.ended()
            }
            # Nothing finds them by name from here on, whatever a signal handler raises below.
            gone = set(map(id, ended.values()))
            self.pools = {name: pool for name, pool in self.pools.items() if id(pool) not in gone}
            self.ways = {head: way for head, way in self.ways.items() if way.origin in self.pools}
            for number, pool in ended.items():
                later.hand_in(pool)
                del self.handles[number]
            for name, block in list(self.blocks.items()):
                if id(block) not in blocks and not block.exporter_alive() and block.idle():
                    del self.blocks[name]
                    later.hand_in(_OnceIdle(self.door, block.close))

    def memory(self, chunk: Chunk, handles: Handles) -> PhysicalMemory:
        """Physical memory; each import holds it by itself."""
        if chunk.fabric:
            return import_memory(self.door, chunk.fabric, chunk.nbytes)
        with handles.take(chunk.id) as fd:
            return import_memory(self.door, fd, chunk.nbytes)


def _let_go_of_the_dropped(dropped: SimpleQueue[bool], reference: weakref.ref[Door]) -> None:
    while dropped.get():
        door = reference()
        if door is None or not door.usable:
            return
        work(door)
        del door


importer_of: PerDriver[Importer] = PerDriver(Importer)
"""What this process has opened through a driver."""


class _Import:
    """One allocation of another process, however many objects of this process name it."""

    __slots__ = ("_raw", "address", "count", "key", "lessor", "number", "passed", "way", "words")

    def __init__(self, way: _PoolWay | _LegacyWay, described: Descriptor) -> None:
        self.way: _PoolWay | _LegacyWay = way
        self.key: bytes = described.payload
        """The driver's export data, for which it always gives the same address."""
        self.lessor: tuple[bytes, int, int] | None = None
        """Whose lease it is: control block, slot and generation."""
        self.words: ImporterWords | None = None
        """Ours in the control block that keeps account of the lease; None where there is none."""
        self.number: int = 0
        """What the word that counts openings is with this one."""
        self._raw: Any = None
        """The driver's ``CUdeviceptr`` until it was told to let go."""
        self.address: int = 0
        self.count: int = 0
        self.passed: tuple[Event, ...] = ()
        """The ends of the work of objects that were closed before the last one."""
        block = way.block
        if described.flags & Flags.LEASED:
            if block is None or way.pool is None:
                raise ValueError("the descriptor speaks of a lease, and names no control block, or memory without any")
            self.words = block.importer_words(described.slot, block.importer)
            self.lessor = (described.control_block, described.slot, described.generation)
        elif described.flags & Flags.HELD:
            raise ValueError("the descriptor speaks of a lease, and has none")


Imported: TypeAlias = "ImportedArray | ImportedBuffer | ImportedRange | ImportedPool | PhysicalMemory | Event"
"""What :func:`open` gives."""

T = TypeVar(
    "T",
    bound="ImportedArray | ImportedBuffer | ImportedRange | ImportedPool | PhysicalMemory | Event",
    default="ImportedBuffer | ImportedRange",
)


def open(
    data: bytes,
    handles: Sequence[Fd] = (),
    *,
    stream: StreamLike | None = None,
    driver: Driver | None = None,
    kind: type[T] | None = None,
) -> T:
    """Open what another process shared.

    Parameters
    ----------
    data
        The descriptor's bytes.
    handles
        The handles that came with it, in the order of :attr:`Shared.fds`; they are this call's from now on. Needed once
        for each pool, control block and chunk of physical memory. Fabric handles are in the descriptor; without the
        control block, no stream waits for the contents, see :func:`share`.
    stream
        The stream that orders operations which name no other, and waits for the exporter's work; default: the device's
        default stream. Memory of another machine's device is for the device of this stream.
    driver
        The driver to use; default: the one that :func:`streamalloc.driver.default` names.
    kind
        The class of what is expected: one of those below. Default: any of them, of which type checkers assume one that
        is mapped memory.

    Returns
    -------
    ImportedArray, ImportedBuffer, ImportedRange, PhysicalMemory, ImportedPool or Event
        As what was shared: an array for what :meth:`Memory.view_as` made, unless ``kind`` is another. Of an allocation
        that is open here already, one more object for the same memory. A growable buffer that has grown is the same
        object, grown.

    Raises
    ------
    ValueError
        The bytes are no descriptor, damaged, of an unknown version, or name a device or a size that is not there.
    TypeError
        Something else than ``kind`` was shared. Nothing was opened.
    StaleDescriptorError
        The memory was freed before it was opened.
    InvalidValueError, CudaError
        The driver refuses a handle.
    """
    door = door_behind(stream) if type(stream) is Stream else None
    if door is None or door.driver is not driver:
        door = Door.of(driver if driver is not None else default_driver())
    if type(data) is bytes and not handles and (kind is None or kind is ImportedBuffer) and not door.forked:
        # The fast path: an allocation of a pool of which one was opened before.
        importer = importer_of(door)
        way = importer.ways.get(data[:HEAD_BYTES])
        found = None if way is None else way.head.descriptor(data)
        if way is not None and found is not None:
            importer.later.work()
            ordered = _prepared(importer, found, way.device, stream)
            return _open_allocation(way, found, ordered)  # type: ignore[return-value]
    given = Handles(handles)
    try:
        door.check_process()
        work(door)
        importer = importer_of(door)
        described = Descriptor.from_bytes(data)
        opener, gives = _MECHANISMS[described.mechanism]
        if described.mechanism is Mechanism.PHYSICAL and described.origin == bytes(16):
            gives = PhysicalMemory
        if described.flags & Flags.ARRAY and kind in (None, ImportedArray):
            gives = ImportedArray
        if kind is not None and not issubclass(gives, kind):
            raise TypeError(f"kind={kind.__name__}: what was shared is opened as {gives.__name__}")
        if handles:
            given.name(described)
        given.endpoint = described.endpoint
        device = importer.device(described, stream)
        ordered = _prepared(importer, described, device, stream)
        return _as_shared(opener(importer, described, device, ordered, given), described, kind)  # type: ignore[return-value]
    finally:
        # Also that by which a message holds the allocation: last of all.
        given.close()


def receive(
    channel: Channel,
    *,
    stream: StreamLike | None = None,
    timeout: float | None = None,
    driver: Driver | None = None,
    kind: type[T] | None = None,
) -> T:
    """Receive what :func:`send` sent, and open it; see :func:`open` and ``channel.receive``."""
    message = channel.receive(timeout=timeout)
    return open(message.data, message.handles, stream=stream, driver=driver, kind=kind)


def _prepared(importer: Importer, described: Descriptor, device: Device, stream: StreamLike | None) -> Stream:
    """What is the same for all mechanisms; the stream to use."""
    if described.driver_version != importer.version:
        importer.warn_of_version(described.driver_version)
    if described.slot >= SLOTS:
        raise ValueError(f"the descriptor's slot {described.slot} is none of its control block, which has {SLOTS}")
    ordered: Any = device.default_stream if stream is None else stream
    if direct_handle(ordered, importer.door) is None:
        ordered = as_stream(ordered, importer.door)
        if not ordered.is_default:
            # Of default streams, which others may capture, it is asked where there is something to wait for.
            refuse_capture(ordered, "cuStreamWaitValue32", _NOT_IN_A_CAPTURE)
    checked: Stream = ordered
    return checked


def _open_pool(
    importer: Importer, described: Descriptor, device: Device, stream: Stream, handles: Handles
) -> ImportedPool:
    pool = importer.pool(described, handles)
    opened = ImportedPool(importer, pool, device)
    _noted(importer, described, handles, pool)
    return opened


def _noted(importer: Importer, described: Descriptor, handles: Handles, pool: _PoolHandle) -> ControlBlock | None:
    """The control block of a pool's owner, which tells when the pool has ended."""
    block = importer.block_of(described, handles)
    if block is not None:
        block.marked("pool", described.pool_mark)  # raises where there is no such mark
        pool.marks.add((block, described.pool_mark))
    return block


class _PoolWay:
    """How allocations of one pool are opened whose leases are in one control block."""

    __slots__ = ("_data", "block", "device", "head", "importer", "imports", "lock", "origin", "pool")

    waits = False
    """Whether letting go of an import may wait for a stream."""

    def __init__(
        self,
        importer: Importer,
        origin: bytes,
        device: Device,
        block: ControlBlock | None,
        pool: _PoolHandle,
        head: Head,
    ) -> None:
        self.head: Head = head
        """How their descriptors begin."""
        self.importer: Importer = importer
        self.device: Device = device
        self.block: ControlBlock | None = block
        self.origin: bytes = origin
        self.pool: _PoolHandle = pool
        self.lock = importer.lock
        self.imports: dict[bytes, _Import] = importer.imports
        """The imports that there are, by the driver's export data; ``lock`` is held where they are counted."""
        # One struct for all: they are opened one at a time.
        self._data = OpaqueStruct("CUmemPoolPtrExportData")

    def acquire(self, held: _Import) -> None:
        """Import an allocation by the driver's export data (``cuMemPoolImportPointer``)."""
        result, held._raw = self.importer.door.cuMemPoolImportPointer(self.pool._raw, self._data.filled(held.key))
        if result:
            held._raw = None
            raise error_from(result, "cuMemPoolImportPointer", _BAD_POINTER)

    def release(self, held: _Import, stream: Stream) -> None:
        """Let go of an allocation, in stream order."""
        door = self.importer.door
        handle = direct_handle(stream, door)
        if handle is not None:
            door.give_back(held, "cuMemFreeAsync", handle)
            return
        with stream.device.current():
            door.give_back(held, "cuMemFreeAsync", raw_handle(stream))


class _LegacyWay:
    """How memory of ``cuMemAlloc`` is opened. The driver counts how often, so that each object has its own import."""

    __slots__ = ("block", "device", "importer", "imports", "lock")

    pool = None
    waits = True

    def __init__(self, importer: Importer, device: Device, block: ControlBlock | None) -> None:
        self.importer: Importer = importer
        self.device: Device = device
        self.block: ControlBlock | None = block
        self.lock = threading.RLock()
        self.imports: dict[bytes, _Import] = {}

    def acquire(self, held: _Import) -> None:
        """Open a block (``cuIpcOpenMemHandle``)."""
        handle = opaque_struct("CUipcMemHandle", held.key)
        with self.device.current():
            door = self.importer.door
            door.create(held, "_raw", "cuIpcOpenMemHandle", handle, _LAZY_PEER_ACCESS, hint=_BAD_POINTER)

    def release(self, held: _Import, stream: Stream) -> None:
        """Close it, which is not in stream order: the host waits."""
        stream.synchronize()
        with self.device.current():
            self.importer.door.give_back(held, "cuIpcCloseMemHandle")


def _open_pointer(
    importer: Importer, described: Descriptor, device: Device, stream: Stream, handles: Handles
) -> ImportedBuffer:
    known = described.origin in importer.pools
    pool = importer.pool(described, handles)
    try:
        block = _noted(importer, described, handles, pool)
        way = _PoolWay(importer, described.origin, device, block, pool, Head(described.to_bytes()[:HEAD_BYTES]))
        opened = _open_allocation(way, described, stream)
    except (StaleDescriptorError, CaptureError):
        raise
    except BaseException:
        if not known:
            # It may have been another pool's handle that came along.
            importer.pools.pop(described.origin, None)
        raise
    if described.flags & Flags.LEASED:
        importer.ways[way.head.data] = way
    return opened


def _open_legacy(
    importer: Importer, described: Descriptor, device: Device, stream: Stream, handles: Handles
) -> ImportedBuffer:
    return _open_allocation(_LegacyWay(importer, device, importer.block_of(described, handles)), described, stream)


def _open_allocation(way: _PoolWay | _LegacyWay, described: Descriptor, stream: Stream) -> ImportedBuffer:
    importer, block = way.importer, way.block
    on_its_way = block is not None and described.flags & Flags.HELD
    if block is not None:
        if on_its_way:
            block.marked("hold", described.hold)
        if stream.is_default and not _is_ready(block, described):
            # Before anything is open here, which could not be closed on that stream.
            refuse_capture(stream, "cuStreamWaitValue32", _NOT_IN_A_CAPTURE)
    if not importer.watching:
        importer.watch_drops()
    opened = ImportedBuffer(way, described, stream)
    try:
        with way.lock:
            _count_import(way, described, opened)
        if block is not None and opened._announced.ready.value != described.ready:  # type: ignore[union-attr]
            _wait_until_ready(block, described, stream)
    except BaseException as first:
        try:
            _let_go(opened, stream, used=False)
        except CudaError as later:
            attach(first, later)
        raise
    finally:
        if on_its_way:
            block.end_mark("hold", described.hold)  # type: ignore[union-attr]
    return opened


def _count_import(way: _PoolWay | _LegacyWay, described: Descriptor, opened: ImportedBuffer) -> None:
    """Find the import of an allocation, or make it, and have ``opened`` count for it."""
    made = _Import(way, described)
    held = way.imports.get(made.key)
    if held is not None and held._raw is not None:
        opened._held = held
        held.count += 1
        if made.lessor is not None and held.lessor != made.lessor:
            _check_generation(way.block, described)
            raise ValueError("this memory is open here under another lease: close that first")
    else:
        # Each has its owner before anything is done that the owner undoes.
        way.imports[made.key] = opened._held = held = made
        made.count = 1
        mine = made.words
        if mine is not None:
            # Said in the control block before it is looked whether it was freed.
            number = (mine.opened.value + 1) % WORD
            # Nothing is called between these two.
            made.number = number
            mine.opened.value = number
            fence()
            if opened._announced is None or opened._announced.generation.value != described.generation:
                _check_generation(way.block, described)
        way.acquire(made)
        made.address = int(made._raw)
    result, size = way.importer.door.cuPointerGetAttribute(_RANGE_SIZE, held.address)
    if result:
        raise error_from(result, "cuPointerGetAttribute")
    if int(size) != described.base_size:
        raise ValueError(f"the descriptor says {size_text(described.base_size)}, and the driver has {size_text(size)}")


def _check_generation(block: ControlBlock | None, described: Descriptor) -> None:
    """Raise :class:`StaleDescriptorError` where the slot stands for something else by now."""
    if block is not None and block.slot_words(described.slot).generation.value != described.generation:
        raise StaleDescriptorError("this memory was freed by its owner before it was opened here")


def _is_ready(block: ControlBlock, described: Descriptor) -> bool:
    """Whether the contents are there, as the exporter announced them."""
    return reached(block.slot_words(described.slot).ready.value, described.ready)


def _wait_until_ready(block: ControlBlock | None, described: Descriptor, stream: Stream) -> None:
    """Have ``stream`` wait for the exporter's announcement, if that is still to come."""
    if block is None or _is_ready(block, described):
        return
    words, wanted = block.slot_words(described.slot), described.ready
    if not reached(words.announced.value, wanted):
        raise ValueError("the descriptor waits for contents that its exporter has not announced")
    block.expect(described.slot, wanted)
    block.wait(stream, words.ready, wanted)


def _let_go(owner: ImportedBuffer | _DroppedImport, stream: Stream, *, used: bool = True) -> None:
    """Close one object of an import; the last one ends it. Where a call fails it can be done again.

    Unless it was ``used``, nothing was queued that the end of the others would have to come after.
    """
    held = owner._held
    if held is None:
        return
    way = held.way
    if way.importer.door.forked:
        way.importer.door.check_process()
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
        if held._raw is not None:
            way.release(held, stream)
        if way.imports.get(held.key) is held:
            del way.imports[held.key]
        block, mine = way.block, held.words
        # Where the word went on, another import of the same slot is open, and says so when it is closed.
        if block is not None and mine is not None and mine.opened.value == held.number:
            before = (held.number - 1) % WORD
            if not held.address:
                # Not by counting on: the streams' writes of earlier closes may still be on their way.
                mine.opened.value = before
            else:
                closed = mine.closed.value
                if closed != before and not reached(closed, before):
                    # An earlier import's end is still on its way, on another stream: the word only ever counts up.
                    block.wait(stream, mine.closed, before)
                block.tell(stream, mine.closed, held.number, checked=True)
                mine.closing.value = held.number
        held.count = 0
        owner._held = None


class _DroppedImport(Deferred):
    """An import that was dropped: let go of after the work of its stream."""

    __slots__ = ("_held", "_stream")

    def __init__(self, held: _Import, stream: Stream) -> None:
        self._held: _Import | None = held
        self._stream = stream

    def attempt(self) -> bool:
        held = self._held
        if held is not None and held.way.waits:
            door = held.way.importer.door
            later_of(door).hand_in(_OnceIdle(door, self._close))
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

    __slots__ = ("__weakref__", "_announced", "_held", "_nbytes", "_offset", "_ready", "_stream", "_way")

    def __init__(self, way: _PoolWay | _LegacyWay, described: Descriptor, stream: Stream) -> None:
        self._held: _Import | None = None
        self._way = way
        self._offset = described.offset
        self._nbytes = described.size
        self._stream = stream
        self._announced: SlotWords | None = None if way.block is None else way.block.slot_words(described.slot)
        self._ready = described.ready

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
        """Whether the owner died before it had finished the contents that this process waited for."""
        self._open_import()
        return self._announced is not None and self._announced.was_lost(self._ready)

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
        door = self._way.importer.door
        ordered = self._stream if stream is None else as_stream(stream, door)
        if direct_handle(ordered, door) is None:
            raw_handle(ordered)
            refuse_capture(ordered, "cuStreamWriteValue32", "memory of other processes cannot be closed in a capture")
        _let_go(self, ordered)
        self._way.importer.later.work()

    def _about(self) -> Iterator[Row]:
        yield from super()._about()
        alive = {True: "alive", False: "gone", None: "not known"}[self.owner_alive]
        yield "owner", f"another process, {alive}{', which died before the contents were there' if self.lost else ''}"

    def _open_import(self) -> _Import:
        if self._held is None:
            raise ClosedError(f"this imported buffer of {size_text(self._nbytes)} was closed")
        return self._held

    def _check_usable(self) -> None:
        self._open_import()

    @property
    def _door(self) -> Door:
        return self._way.importer.door

    @finaliser
    def __del__(self) -> None:
        held = getattr(self, "_held", None)
        if held is None or not held.way.importer.door.usable:
            return
        dropped = _DroppedImport(held, self._stream)
        try:
            held.way.importer.drop(dropped)
        except BaseException:
            # The same one again, which lets go once.
            self._held = None
            held.way.importer.drop(dropped)
            raise

    def __repr__(self) -> str:
        if not hasattr(self, "_held"):
            return f"<{type(self).__name__} that could not be opened>"
        where = "closed" if self._held is None else f"at {self.address:#x}, {self.location}"
        return f"<{type(self).__name__} of {self._nbytes} bytes {where}>"


class ImportedArray(TypedView, Closes):
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


def _as_shared(opened: Imported, described: Descriptor, kind: type[object] | None) -> Imported:
    """What was opened as the array that it was shared as."""
    if not described.flags & Flags.ARRAY or kind not in (None, ImportedArray):
        return opened
    if not isinstance(opened, (ImportedBuffer, ImportedRange)):
        raise ValueError(f"the descriptor says that {opened!r} is an array")
    return ImportedArray(opened, np.dtype(described.dtype), described.shape)


class ImportedPool:
    """A pool of another process. It makes allocations of it known here; nothing can be allocated from it."""

    __slots__ = ("__weakref__", "_importer", "_pool", "device")

    device: Device
    """The device that has the memory."""

    def __init__(self, importer: Importer, pool: _PoolHandle, device: Device) -> None:
        self._importer = importer
        self._pool = pool
        self.device = device
        pool.users.add(self)

    @property
    def handle(self) -> int:
        """The driver's handle (``CUmemoryPool``) as a number."""
        return int(self._pool._raw)

    @property
    def _door(self) -> Door:
        return self._importer.door

    def set_access(self, device: Device, access: MemAccess = MemAccess.READWRITE) -> None:
        """Let another device of this process use the pool's memory (``cuMemPoolSetAccess``)."""
        descriptor = MemAccessDesc(device.location, access).to_driver()
        self._importer.door.call("cuMemPoolSetAccess", self._pool._raw, [descriptor], 1)

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
    opened: PhysicalMemory | ImportedRange | None
    single = described.origin == bytes(16)
    if single and len(chunks) != 1:
        raise ValueError(f"the descriptor is of one piece of memory, and names {len(chunks)}")
    streams = [stream]
    with contextlib.ExitStack() as undo:
        if single:
            opened = importer.memory(chunks[0], handles)
            undo.enter_context(undoing(opened.close))
            check_mappable(opened)
        else:
            opened = importer.ranges.get(described.origin) if growable else None
            if opened is None or opened.closed:
                capacity = described.base_size if growable else total
                rights = {device.location: MemAccess.READWRITE}
                opened = ImportedRange(device, capacity, rights, stream, described.offset)
                undo.enter_context(undoing(opened.close))
            elif opened.stream.handle != stream.handle:
                streams.append(opened.stream)
            # Whichever handles a chunk is shared by, it is the same.
            names = [chunk[:2] for chunk in chunks]
            opened.set_chunks(names, lambda place: importer.memory(chunks[place], handles), described.size)
        block = importer.block_of(described, handles)
        for ordered in streams:
            _wait_until_ready(block, described, ordered)
    if growable and isinstance(opened, ImportedRange):
        importer.ranges[described.origin] = opened
    return opened


def _open_event(importer: Importer, described: Descriptor, device: Device, stream: Stream, handles: Handles) -> Event:
    handle = opaque_struct("CUipcEventHandle", described.payload)
    return opened_event(device, handle)


_BAD_HANDLE = "the descriptor that came along is no handle of this kind of memory, or of another machine"
_BAD_POINTER = "the owner's process has freed it, or ended"

_NOT_IN_A_CAPTURE = "memory of other processes cannot be opened in a capture"

_Opener: TypeAlias = Callable[[Importer, Descriptor, Device, Stream, Handles], Imported]
# How each mechanism is opened, and what it gives; one chunk of physical memory by itself is that memory.
_MECHANISMS: dict[Mechanism, tuple[_Opener, type[Imported]]] = {
    Mechanism.POOL: (_open_pool, ImportedPool),
    Mechanism.POOL_POINTER: (_open_pointer, ImportedBuffer),
    Mechanism.LEGACY: (_open_legacy, ImportedBuffer),
    Mechanism.PHYSICAL: (_open_physical, ImportedRange),
    Mechanism.EVENT: (_open_event, Event),
}
