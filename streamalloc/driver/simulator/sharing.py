"""What processes that simulate the same machine share: pools, allocations, physical memory, events.

All of it is memory in anonymous files. A file's name says what it is and of which machine, so a descriptor is all that
an importer needs; it travels by whatever means its users have, and the memory is there as long as anybody has it.
Handles of 64 bytes name a file by process and descriptor number instead, and open for processes of the same user while
that process lives. Nothing is kept in a file system, so nothing can stay behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .allocations import OpenedMemory, PoolMemory
from .allocator import CHUNK
from .blocks import Block, State
from .constants import READ_WRITE, Handle, Location
from .errors import Fault, NotModelled, Result, check, need
from .heap import BLOCK
from .locks import is_locked, lock
from .memory import Physical, Reservation
from .pool import Place, Pool
from .shared_events import BOARD_BYTES, Board, SharedEvent
from .timeline import Operation, Stream

if TYPE_CHECKING:
    from .allocations import Allocation
    from .machine import Context, Event, Machine

HANDLE_BYTES = 64
"""Of a pointer's export data, of the handles for events and plain memory, and of a fabric handle."""

_VIEW = 16 << 30
"""How many bytes of another process's pool get addresses at first."""
_INVALID_DEVICE = -2  # CU_DEVICE_INVALID
_NOWHERE = Place(0, 0)
_NAME = re.compile(r"/memfd:streamalloc:(\w+):([0-9a-f]{16}):([0-9a-f]{16}):(\d+)\.(\d+) \(deleted\)")


class Label(NamedTuple):
    """What a file's name says: ``kind`` is pool, memory, multicast, heap or events."""

    kind: str
    machine: str
    """The same for all processes that simulate the same machine."""
    serial: str
    """Tells apart what this machine's processes share."""
    place: Place

    def __str__(self) -> str:
        return f"{self.kind}:{self.machine}:{self.serial}:{self.place.type}.{self.place.id}"

    @classmethod
    def of(cls, path: str) -> Label | None:
        """What the file behind a link under /proc is; None where it is none of these."""
        try:
            found = _NAME.fullmatch(os.readlink(path))
        except OSError:
            return None
        if found is None:
            return None
        kind, machine, serial, place, number = found.groups()
        return cls(kind, machine, serial, Place(int(place), int(number)))


def recognise(fd: int) -> Label | None:
    """What a descriptor is; None unless it is of a file that can be mapped without surprises."""
    label = Label.of(f"/proc/self/fd/{fd}")
    if label is None:
        return None
    try:
        writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:
        return None
    return label if writable and sealed else None


def has_ended(process: int) -> bool:
    """Whether a process is gone, reaped or not."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            state = file.read().rpartition(b") ")[2][:1]
    except OSError:
        return True
    return state in b"ZX"


def reach(process: int, fd: int, fits: Callable[[Label], bool]) -> int | None:
    """A descriptor of our own for another process's, or None where that is gone or something else by now."""
    path = f"/proc/{process}/fd/{fd}"
    label = Label.of(path)
    if label is None or not fits(label):
        return None
    try:
        own = os.open(path, os.O_RDWR)
    except OSError:
        return None
    label = recognise(own)
    if label is None or not fits(label):
        os.close(own)
        return None
    return own


@contextlib.contextmanager
def operating_system() -> Iterator[None]:
    """A block in which the system may run out of something, descriptors for one."""
    try:
        yield
    except OSError as error:
        raise Fault(Result.CUDA_ERROR_OPERATING_SYSTEM) from error


# -- what lives ----------------------------------------------------------------------------------------------


def mark(fd: int, number: int, *, alive: bool) -> None:
    """Let other processes see, or see no more, that something in a file lives: by a lock on the byte of that number.

    It is there for as long as this descriptor's file is open, and whether or not there is such a byte.
    """
    lock(fd, number, fcntl.F_WRLCK if alive else fcntl.F_UNLCK)


def lives(fd: int, number: int) -> bool:
    """Whether something in another process's file is marked as living."""
    return is_locked(fd, number)


# -- 64 bytes ------------------------------------------------------------------------------------------------


def pack(kind: str, *words: int) -> bytes:
    """Words and their checksum; what is not used is zero."""
    data = struct.pack(f"<{len(words)}Q", *words)
    return (data + struct.pack("<Q", zlib.crc32(data, zlib.crc32(kind.encode())))).ljust(HANDLE_BYTES, b"\0")


def unpack(kind: str, data: bytes, count: int) -> tuple[int, ...] | None:
    """The words of such data, None where it was damaged or is of another kind."""
    words: tuple[int, ...] = struct.unpack_from(f"<{count}Q", data)
    return words if pack(kind, *words) == data else None


def pack_memory(serial: int, *words: int) -> bytes:
    """Five words as a handle for plain memory, of which the driver does not look at the bytes 0-7 and 32-39 (observed
    on H200: damaged there, it opens).
    """
    data = pack("memory", *words)
    unread = struct.pack("<Q", serial)
    return unread + data[:24] + unread + data[24:48]


def unpack_memory(data: bytes) -> tuple[int, ...] | None:
    return unpack("memory", (data[8:32] + data[40:64]).ljust(HANDLE_BYTES, b"\0"), 5)


# -- what was imported ---------------------------------------------------------------------------------------


class ImportedPool:
    """Another process's pool. Its allocations lie in the same order as there, at addresses of this process."""

    managed = False
    handle_types = Handle.NONE  # what is imported cannot be exported again (observed on H200: test_sharing)

    def __init__(self, machine: Machine, handle: int, label: Label, fd: int) -> None:
        self._machine = machine
        self.handle = handle
        self.serial: int = int(label.serial, 16)
        self.place: Place = label.place
        self.device: int = label.place.id
        self.access: dict[int, int] = {}
        self.imports: int = 0
        """Allocations of it that are imported now."""
        self._freed: dict[int, tuple[Stream, int]] = {}
        """By stream: the last free of an import."""
        physical = Physical.adopt(os.dup(fd))
        self._whole = physical.size
        try:
            # The file is sparse, and what the owner's pool grows by is there. Most pools are far smaller than their
            # device, and a process has addresses for some hundred of these only.
            self._views = [Reservation(min(self._whole, _VIEW), CHUNK)]
            self._views[0].map(self._views[0].base, self._views[0].size, physical, 0)
        finally:
            physical.close()
        machine.arenas.add(self._views[0])

    def _address(self, offset: int, size: int) -> int:
        check(offset + size <= self._whole)
        if offset + size > self._views[-1].size:
            with operating_system():
                view = Reservation(self._whole, CHUNK)
                view.map_again(self._views[0])
            self._views.append(view)
            self._machine.arenas.add(view)
        return next(view for view in self._views if offset + size <= view.size).base + offset

    @property
    def granted(self) -> bool:
        return True  # it is device memory

    def accessible(self, device: int) -> bool:
        """Whether work of ``device`` may touch this memory."""
        return device == self.device or self.access.get(device, 0) == READ_WRITE

    def import_pointer(self, offset: int, size: int) -> int:
        """Always the same address for the same memory, however often; one free ends the import (H200: test_sharing)."""
        machine, address = self._machine, self._address(offset, size)
        there = machine.allocations.overlapping(address, address + size)
        if not there:
            self.imports += 1
            block = Block(offset, size, State.USED)
            machine.remember(PoolMemory(address, size, self.device, None, self, block))
        elif (there[0].base, there[0].size) != (address, size):
            raise NotModelled("importing memory while something is imported that was freed by its owner before")
        return address

    def give_back(self, block: Block, size: int, stream: Stream) -> None:
        """End an import: a matter of this process alone, which keeps its place in the stream."""
        self.imports -= 1
        self._freed[stream.id] = (stream, stream.submit(Operation()))

    def give_back_now(self, block: Block) -> None:
        """The same as cuMemFree does it."""
        self.imports -= 1

    @property
    def is_touched(self) -> bool:
        """Whether work is queued that may touch what was imported."""
        return any(stream.done < seq for stream, seq in self._freed.values())

    def close(self) -> None:
        for view in self._views:
            self._machine.arenas.remove(view)
            view.close()


@dataclass(eq=False)
class OpenedBlock:
    """A block of another process's plain memory, and how many allocations in it are open here."""

    reservation: Reservation
    allocations: int = 0


@dataclass(eq=False)
class Opening:
    """An allocation of another process. ``times`` it was opened, and not closed."""

    allocation: Allocation
    block: OpenedBlock
    times: int = 1


# -- all of a machine ----------------------------------------------------------------------------------------


class Sharing:
    """What a machine shares with other processes, and has of them."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._identity = hashlib.sha256(machine.identity.encode()).hexdigest()[:16]
        self._owner = int.from_bytes(os.urandom(8), "little")  # whose handles are our own
        self.pools: dict[int, ImportedPool] = {}  # by handle
        self._handed_out: dict[int, int] = {}  # descriptors of plain memory with handles, by the allocations' numbers
        self._blocks: dict[tuple[int, ...], OpenedBlock] = {}  # by process and descriptor, owner, offset
        self._opened: dict[tuple[int, ...], Opening] = {}  # by what the handle says
        self._own_boards: list[Board] = []
        self._boards: weakref.WeakValueDictionary[tuple[int, ...], Board] = weakref.WeakValueDictionary()

    def label(self, kind: str, place: Place) -> Label:
        """The name of a new file that may be shared."""
        return Label(kind, self._identity, os.urandom(8).hex(), place)

    def own_label(self, kind: str, place: Place = _NOWHERE) -> Label:
        """The name of a file that is found by process and descriptor: with plain memory, or with events."""
        return Label(kind, self._identity, f"{self._owner:016x}", place)

    def _is_own(self, process: int, owner: int) -> bool:
        return owner == self._owner and process == os.getpid()

    def _reach(self, process: int, fd: int, owner: int, kind: str) -> int | None:
        expected = (kind, self._identity, f"{owner:016x}")
        return reach(process, fd, lambda label: label[:3] == expected)

    def recognise(self, fd: int, kind: str) -> Label:
        """What a descriptor is that should be a pool or memory of this machine; with memory goes a multicast object."""
        label = recognise(fd)
        known = label is not None and label.machine == self._identity and label.kind in ("pool", "memory", "multicast")
        check(known, Result.CUDA_ERROR_UNKNOWN)
        assert label is not None
        if label.kind == "multicast":
            if kind == "pool":
                raise NotModelled("importing a multicast object as a pool")
            return label
        check(label.kind == kind, Result.CUDA_ERROR_NOT_SUPPORTED)
        if label.place.type != Location.DEVICE:
            raise NotModelled(f"importing a {kind} of host memory" if kind == "pool" else "importing host memory")
        if label.place.id >= len(self._machine.devices):
            if kind == "pool":
                raise NotModelled("importing a pool of a device that this process does not have")
            # so it is where CUDA_VISIBLE_DEVICES hides the device (seen on H200; no test can hide one)
            return label._replace(place=Place(Location.DEVICE, _INVALID_DEVICE))
        return label

    # -- fabric handles --------------------------------------------------------------------------------------

    def fabric_handle(self, kind: str, physical: Physical) -> bytes:
        """``kind`` is pool or memory, the latter for multicast objects too."""
        return pack(f"fabric {kind}", os.getpid(), physical.fd, self._owner)

    def open_fabric(self, kind: str, data: bytes) -> int:
        """A descriptor for what another process of this machine, or this one, has exported."""
        words = need(unpack(f"fabric {kind}", data, 3))
        kinds = ("memory", "multicast") if kind == "memory" else (kind,)
        fd = reach(words[0], words[1], lambda label: label.kind in kinds and label.machine == self._identity)
        if fd is None:
            raise NotModelled("importing from a fabric handle of a process that has given the memory up")
        fcntl.flock(fd, fcntl.LOCK_SH)  # as a descriptor that was exported: see Physical.lend
        return fd

    # -- pools -----------------------------------------------------------------------------------------------

    def import_pool(self, fd: int) -> ImportedPool:
        """The same pool every time (observed on H200: test_sharing)."""
        label = self.recognise(fd, "pool")
        serial = int(label.serial, 16)
        pool = next((pool for pool in self.pools.values() if pool.serial == serial), None)
        if pool is None:
            with operating_system():
                pool = ImportedPool(self._machine, self._machine.new_handle(), label, fd)
            self.pools[pool.handle] = pool
        return pool

    def destroy_pool(self, pool: ImportedPool) -> None:
        """Waits for what is queued before the last frees of what was imported."""
        check(not pool.imports)
        self._machine.timeline.wait(lambda: not pool.is_touched)
        check(not pool.imports and self.pools.pop(pool.handle, None))  # other threads may have been here meanwhile
        pool.close()

    def export_pointer(self, pool: Pool, offset: int, size: int) -> bytes:
        return pack("pointer", os.getpid(), 1, int(pool.label.serial, 16), offset, size)

    def import_pointer(self, pool: ImportedPool, data: bytes) -> int:
        words = need(unpack("pointer", data, 5))
        check(words[2] == pool.serial)
        return pool.import_pointer(words[3], words[4])

    # -- plain memory ----------------------------------------------------------------------------------------

    def memory_handle(self, allocation: Allocation) -> bytes:
        """The same for every address within an allocation."""
        assert allocation.device is not None
        physical, offset = self._machine.devices[allocation.device].heap.locate(allocation.base)
        physical.seal()
        physical.kept = True  # importers go on reading what the owner frees (observed on H200: test_sharing)
        if allocation.id not in self._handed_out:
            mark(physical.fd, allocation.id, alive=True)
            self._handed_out[allocation.id] = physical.fd
        where = os.getpid() << 32 | physical.fd
        return pack_memory(allocation.id, where, allocation.size, offset, self._owner, allocation.id)

    def withdraw(self, allocation: Allocation) -> None:
        """Plain memory is freed: its handle opens nothing any more, unless it is open already."""
        fd = self._handed_out.pop(allocation.id, None)
        if fd is not None:
            mark(fd, allocation.id, alive=False)

    def open_memory(self, data: bytes, context: Context) -> int:
        """Open memory of another process, and count how often. The block around it is mapped with it.

        What is open, or in a block that is, can be opened also after its owner has freed it (H200: test_sharing).
        """
        words = need(unpack_memory(data))
        where, size, offset, owner, number = words
        check(not self._is_own(where >> 32, owner), Result.CUDA_ERROR_INVALID_CONTEXT)
        found = self._opened.get(words)
        if found is not None:
            found.times += 1
            return found.allocation.base
        start = offset // BLOCK * BLOCK
        key = (where, owner, start)
        own = self._reach_heap(where >> 32, where & 0xFFFFFFFF, owner)
        try:
            block = self._blocks.get(key)
            if block is None:
                check(lives(own, number))
                end = -(-(offset + size) // BLOCK) * BLOCK
                block = self._blocks[key] = self._map_block(own, start, end, context)
        finally:
            os.close(own)
        address = block.reservation.base + offset - start
        if address + size > block.reservation.end or self._machine.allocations.overlapping(address, address + size):
            raise NotModelled("opening memory while something is open that was freed by its owner before")
        block.allocations += 1
        allocation = self._machine.remember(OpenedMemory(address, size, context.device.ordinal, context))
        self._opened[words] = Opening(allocation, block)
        return address

    def _reach_heap(self, process: int, fd: int, owner: int) -> int:
        """A descriptor for the file with another process's plain memory."""
        own = self._reach(process, fd, owner, "heap")
        if own is None:
            check(not has_ended(process), Result.CUDA_ERROR_INVALID_HANDLE)
            raise Fault(Result.CUDA_ERROR_INVALID_VALUE)  # all that was in the file is freed
        return own

    def _map_block(self, fd: int, start: int, end: int, context: Context) -> OpenedBlock:
        label, size = recognise(fd), os.fstat(fd).st_size
        check(label is not None and end <= size)
        assert label is not None
        if label.place.id != context.device.ordinal:
            raise NotModelled("opening plain memory of another device than the current context's")
        with operating_system():
            physical = Physical.adopt(os.dup(fd))
            try:
                reservation = Reservation(end - start, BLOCK)
                reservation.map(reservation.base, end - start, physical, start)
            finally:
                physical.close()
        self._machine.arenas.add(reservation)
        return OpenedBlock(reservation)

    def _unmap_block(self, block: OpenedBlock) -> None:
        self._machine.arenas.remove(block.reservation)
        block.reservation.close()

    def opened_at(self, address: int) -> Opening:
        return need(next((one for one in self._opened.values() if one.allocation.base == address), None))

    def close_memory(self, opened: Opening) -> None:
        opened.times -= 1
        if not opened.times:
            self.forget_memory(opened.allocation)

    def forget_memory(self, allocation: Allocation) -> None:
        """Unmap opened memory, however often it was opened."""
        words, opened = next((words, one) for words, one in self._opened.items() if one.allocation is allocation)
        del self._opened[words]
        self._machine.allocations.remove(allocation)
        opened.block.allocations -= 1
        if not opened.block.allocations:
            key = next(key for key, block in self._blocks.items() if block is opened.block)
            del self._blocks[key]
            self._unmap_block(opened.block)

    # -- events ----------------------------------------------------------------------------------------------

    def event_handle(self, event: Event) -> bytes:
        shared = event.shared or event.share(self._new_event())
        return pack("event", os.getpid(), shared.board.fd, shared.index, self._owner)

    def _new_event(self) -> SharedEvent:
        shared = self._own_boards[-1].take() if self._own_boards else None
        if shared is None:
            with operating_system():
                physical = Physical(str(self.own_label("events")), BOARD_BYTES)
                physical.seal()
                self._own_boards.append(Board(physical.fd))
            shared = self._own_boards[-1].take()
            assert shared is not None
        return shared

    def open_event(self, data: bytes) -> SharedEvent:
        words = need(unpack("event", data, 4), Result.CUDA_ERROR_MAP_FAILED)
        process, fd, index, owner = words
        check(not self._is_own(process, owner), Result.CUDA_ERROR_INVALID_CONTEXT)
        board = self._boards.get((process, fd, owner))
        if board is None:
            own = need(self._reach(process, fd, owner, "events"), Result.CUDA_ERROR_MAP_FAILED)
            with operating_system():
                board = self._boards[process, fd, owner] = Board(own)
        return SharedEvent(board, index)

    # -- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()
        for block in self._blocks.values():
            self._unmap_block(block)
        self.pools.clear()
        self._blocks.clear()
        self._opened.clear()
        for board in (*self._own_boards, *self._boards.values()):
            board.close()
        self._own_boards.clear()
