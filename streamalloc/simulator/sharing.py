"""Pools, allocations, physical memory and events shared between processes of a machine.

All shared memory is in anonymous files. A file's name contains its kind and machine, so an importer needs only a
descriptor. The memory exists while any process has the descriptor. Handles of 64 bytes name a file by process and
descriptor number. Processes of the same user can open them while that process lives. No file has a path, so nothing
remains on disk.

Machines with a host name that are otherwise equal form one IMEX domain. They share only fabric handles of physical
memory and multicast objects.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from streamalloc.driver.processes import alive
from streamalloc.formats.locks import is_locked, lock
from streamalloc.simulator.allocations import AllocationTable, LiveMemory, OpenedMemory, PoolMemory
from streamalloc.simulator.allocator import USED, Block
from streamalloc.simulator.banks import Banks
from streamalloc.simulator.constants import BLOCK, HANDLE_BYTES, HIDDEN, Handles, Location, device_place
from streamalloc.simulator.contexts import TABLE_BYTES, Context, EventTable, QueueEvent, SharedEvent, SimulatedDevice
from streamalloc.simulator.errors import Fault, NotModelled, Result, check, need, need_a, not_modelled
from streamalloc.simulator.files import Label, Labels, reach, recognise
from streamalloc.simulator.memory import Physical, ReservedExtent
from streamalloc.simulator.pool import OpenedPool, Pool
from streamalloc.simulator.scheduler import Scheduler

# -- 64 bytes ------------------------------------------------------------------------------------------------


def pack(kind: str, *words: int) -> bytes:
    """Return integers and their checksum as 64 bytes, padded with zeros. ``kind`` enters the checksum."""
    data = struct.pack(f"<{len(words)}Q", *words)
    return (data + struct.pack("<Q", zlib.crc32(data, zlib.crc32(kind.encode())))).ljust(HANDLE_BYTES, b"\0")


def unpack(kind: str, data: bytes, count: int) -> tuple[int, ...] | None:
    """Return the ``count`` integers that :func:`pack` packed; None if the bytes are damaged or of another kind."""
    words: tuple[int, ...] = struct.unpack_from(f"<{count}Q", data)
    return words if pack(kind, *words) == data else None


def pack_memory(serial: int, *words: int) -> bytes:
    """Pack five integers as an IPC memory handle, around bytes that the driver does not read.

    It reads no bytes 0-7 and 32-39 of such a handle (observed on H200: test_sharing's
    test_bytes_that_are_not_looked_at).
    """
    data = pack("memory", *words)
    unread = struct.pack("<Q", serial)
    return unread + data[:24] + unread + data[24:48]


def _block_of(words: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the identity of the first block of the memory that an IPC memory handle names.

    It is process and descriptor in one number, the machine object, and the block's number in the file.
    """
    where, _, offset, owner, _ = words
    return where, owner, offset // BLOCK


# -- all of a machine ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Sharing:
    """Objects that this process exports to other processes or imports from them."""

    labels: Labels
    banks: Banks
    allocations: AllocationTable
    scheduler: Scheduler
    devices: list[SimulatedDevice]
    pools: Handles[OpenedPool] = field(default_factory=Handles)
    _own_tables: list[EventTable] = field(default_factory=list)
    _tables: WeakValueDictionary[tuple[int, ...], EventTable] = field(default_factory=WeakValueDictionary)

    def recognise(self, fd: int, kind: str, *, fabric: bool = False) -> Label:
        """Return the label of a descriptor of this machine's pool or memory (``kind``); with ``fabric``, of its domain.

        Multicast objects count as memory. Gives CUDA_ERROR_UNKNOWN for other files, and CUDA_ERROR_NOT_SUPPORTED for
        the other kind.
        """
        label = recognise(fd)
        if label is None or label.kind not in ("pool", "memory", "multicast"):
            raise Fault(Result.CUDA_ERROR_UNKNOWN)
        local = label.machine == self.labels.machine
        check(local or (fabric and label.domain == self.labels.domain), Result.CUDA_ERROR_UNKNOWN)
        not_modelled(not local and kind == "pool", "importing a pool of another host")
        if label.kind == "multicast":
            not_modelled(kind == "pool", "importing a multicast object as a pool")
            return label
        check(label.kind == kind, Result.CUDA_ERROR_NOT_SUPPORTED)
        if label.place.type != Location.DEVICE:
            raise NotModelled(f"importing a {kind} of host memory" if kind == "pool" else "importing host memory")
        return label._replace(place=device_place(self.labels.seen(label.place.id) if local else HIDDEN))

    # -- fabric handles --------------------------------------------------------------------------------------

    def fabric_handle(self, kind: str, physical: Physical) -> bytes:
        """Return a fabric handle of a file. ``kind``: pool, or memory, also for multicast objects."""
        label = need(Label.of(f"/proc/self/fd/{physical.fd}"))
        return pack(f"fabric {kind}", os.getpid(), physical.fd, int(label.serial, 16))

    def open_fabric(self, kind: str, data: bytes) -> int:
        """Open the file behind a fabric handle, which any process of the domain may have exported.

        Raises :class:`NotModelled` if that process has given the memory up.
        """
        words = need(unpack(f"fabric {kind}", data, 3))
        kinds = ("memory", "multicast") if kind == "memory" else (kind,)
        wanted = (self.labels.domain, f"{words[2]:016x}")
        fd = reach(words[0], words[1], lambda label: label.kind in kinds and (label.domain, label.serial) == wanted)
        own = need(fd, "importing from a fabric handle of a process that has given the memory up")
        fcntl.flock(own, fcntl.LOCK_SH)  # as for an exported descriptor: see Physical.lend
        return own

    # -- pools -----------------------------------------------------------------------------------------------

    def import_pool(self, fd: int, fabric: bool) -> OpenedPool:
        """Import a pool by its descriptor. Each import gives the same pool (observed on H200: test_sharing)."""
        label = self.recognise(fd, "pool", fabric=fabric)
        serial = int(label.serial, 16)
        pool = next((pool for pool in self.pools.values() if pool.serial == serial), None)
        if pool is None:
            pool = self.pools.add(OpenedPool(self.banks, label, fd))
        return pool

    def destroy_pool(self, pool: OpenedPool) -> None:
        """Destroy an imported pool, after a wait for the work before the frees of its allocations.

        Gives CUDA_ERROR_INVALID_VALUE while an allocation of it is imported.
        """
        check(not pool.imports)
        self.scheduler.wait(lambda: all(stream.done >= seq for stream, seq in pool.freed.values()))
        check(not pool.imports and self.pools.pop(pool.handle, None))  # another thread may have done so meanwhile
        pool.close()

    def export_pointer(self, pool: Pool, offset: int, size: int) -> bytes:
        return pack("pointer", os.getpid(), 1, int(pool.label.serial, 16), offset, size)

    def import_pointer(self, pool: OpenedPool, data: bytes) -> int:
        """Import an allocation and return its address.

        Repeated imports give the same address, and one free ends them all (H200: test_sharing).
        """
        words = need(unpack("pointer", data, 5))
        check(words[2] == pool.serial)
        offset, size = words[3:]
        address = pool.address(offset, size)
        there = self.allocations.overlapping(address, address + size)
        if not there:
            pool.imports += 1
            self.allocations.add(PoolMemory(address, size, pool.device, None, pool, Block(offset, size, USED)))
        elif (there[0].base, there[0].size) != (address, size):
            raise NotModelled("importing memory while something is imported that was freed by its owner before")
        return address

    # -- plain memory ----------------------------------------------------------------------------------------

    def memory_handle(self, allocation: LiveMemory) -> bytes:
        """Return the IPC handle of an allocation, equal for all addresses in it."""
        assert allocation.device is not None
        physical, offset = self.devices[allocation.device].heap.locate(allocation.base)
        physical.seal()
        physical.kept = True  # importers can still read memory freed by the owner (observed on H200: test_sharing)
        lock(physical.fd, allocation.id, fcntl.F_WRLCK)
        where = os.getpid() << 32 | physical.fd
        return pack_memory(allocation.id, where, allocation.size, offset, self.labels.owner, allocation.id)

    def withdraw(self, allocation: LiveMemory) -> None:
        """Record a free of cuMemAlloc memory. Other processes can no longer open it by its IPC handle.

        Those that have memory of the same block open still can.
        """
        if allocation.device is not None:
            physical, _ = self.devices[allocation.device].heap.locate(allocation.base)
            if physical.kept:
                lock(physical.fd, allocation.id, fcntl.F_UNLCK)

    def open_memory(self, data: bytes, context: Context) -> int:
        """Open memory of another process, count the open, and return the address.

        The whole block is mapped. Memory in an open block can be opened even after its owner has freed it (H200:
        test_sharing). Gives CUDA_ERROR_INVALID_CONTEXT for memory of this process.
        """
        words = need(unpack("memory", (data[8:32] + data[40:64]).ljust(HANDLE_BYTES, b"\0"), 5))
        where, size, offset, owner, number = words
        check(not self.labels.is_own(where >> 32, owner), Result.CUDA_ERROR_INVALID_CONTEXT)
        opened = self._opened()
        for one in opened:
            if one.words == words:
                one.times += 1
                return one.base
        start = offset // BLOCK * BLOCK
        own = self._reach_heap(where >> 32, where & 0xFFFFFFFF, owner)
        try:
            block = next((one.block for one in opened if _block_of(one.words) == _block_of(words)), None)
            if block is None:
                check(is_locked(own, number))
                end = -(-(offset + size) // BLOCK) * BLOCK
                check(end <= os.fstat(own).st_size)
                block = self.banks.arenas.add(ReservedExtent(end - start, BLOCK, own, start))
        finally:
            os.close(own)
        address = block.base + offset - start
        if address + size > block.end or self.allocations.overlapping(address, address + size):
            raise NotModelled("opening memory while something is open that was freed by its owner before")
        self.allocations.add(OpenedMemory(address, size, context.device.ordinal, context, block, words))
        return address

    def _opened(self) -> list[OpenedMemory]:
        return [one for one in self.allocations.at.values() if isinstance(one, OpenedMemory)]

    def _reach_heap(self, process: int, fd: int, owner: int) -> int:
        """Open the file with the cuMemAlloc memory of another process, and return the descriptor.

        Gives CUDA_ERROR_INVALID_HANDLE if the process has ended, CUDA_ERROR_INVALID_VALUE if all memory in the file is
        freed.
        """
        own = self.labels.reach(process, fd, owner, "heap")
        if own is None:
            check(alive(process), Result.CUDA_ERROR_INVALID_HANDLE)
            raise Fault(Result.CUDA_ERROR_INVALID_VALUE)  # All memory in the file is freed.
        return own

    def opened_at(self, address: int) -> OpenedMemory:
        return need_a(OpenedMemory, self.allocations.at.get(address))

    def forget_memory(self, opened: OpenedMemory) -> None:
        """Unmap opened memory, regardless of the number of opens. The block stays while other memory in it is open."""
        self.allocations.remove(opened)
        if not any(one.block is opened.block for one in self._opened()):
            self.banks.arenas.remove(opened.block)

    # -- events ----------------------------------------------------------------------------------------------

    def event_handle(self, event: QueueEvent) -> bytes:
        shared = event.shared or event.share(self._new_event())
        return pack("event", os.getpid(), shared.table.fd, shared.index, self.labels.owner)

    def _new_event(self) -> SharedEvent:
        shared = self._own_tables[-1].take() if self._own_tables else None
        if shared is None:
            physical = Physical(str(self.labels.own("events")), TABLE_BYTES)
            physical.seal()
            self._own_tables.append(self.banks.arenas.own(EventTable(physical.fd)))
            shared = self._own_tables[-1].take()
            assert shared is not None
        return shared

    def open_event(self, data: bytes) -> SharedEvent:
        process, fd, index, owner = need(unpack("event", data, 4), Result.CUDA_ERROR_MAP_FAILED)
        check(not self.labels.is_own(process, owner), Result.CUDA_ERROR_INVALID_CONTEXT)
        table = self._tables.get((process, fd, owner))
        if table is None:
            # The real driver still opens such an event (observed on H200: test_sharing). Here the file is gone.
            not_modelled(not os.path.exists(f"/proc/{process}"), "opening an event of a process that has ended")
            own = need(self.labels.reach(process, fd, owner, "events"), Result.CUDA_ERROR_MAP_FAILED)
            table = self._tables[process, fd, owner] = self.banks.arenas.own(EventTable(own))
        return SharedEvent(table, index)
