"""The table of what one process has opened of others through one driver.

Control blocks and pools of processes that have ended, and pools that were closed, are let go of when others come.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable

from streamalloc.core.internal import (
    DeferredQueue,
    Device,
    Fd,
    PerDriver,
    Session,
    StreamLike,
    as_stream,
    deferred_queue,
    undoing,
)
from streamalloc.ipc.sharing.control_block import ControlBlock
from streamalloc.ipc.sharing.descriptor import FABRIC, NOWHERE, Chunk, Descriptor, Flags, Mechanism, head_of
from streamalloc.ipc.sharing.drops import Drops, OnceIdle
from streamalloc.ipc.sharing.handles import Handles
from streamalloc.ipc.sharing.imports import Import, ImportedRange, LegacyWay, PoolWay
from streamalloc.ipc.sharing.pools import PoolHandle, PoolHandles
from streamalloc.vmm import PhysicalMemory
from streamalloc.vmm.internal import import_memory

__all__ = ["DriverVersionWarning", "Importer", "importer_of"]


class DriverVersionWarning(UserWarning):
    """Exporter and importer run different drivers, which NVIDIA does not support."""


class Importer:
    """What one process has opened of others through one driver."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.lock: contextlib.AbstractContextManager[bool] = threading.RLock()
        """Held where imports are counted. Nothing is called then that can wait for a stream or another process."""
        self.deferred: DeferredQueue = deferred_queue(session)
        self.version: int = int(session.call("cuDriverGetVersion"))
        self.drops = Drops(session)
        self.blocks: dict[bytes, ControlBlock] = {}
        self.handles = PoolHandles(session, self.lock)
        """All imported pools."""
        self.pools: dict[bytes, PoolHandle] = {}
        """Imported pools by name, of which more allocations may come without the handle."""
        self.ways: dict[bytes, PoolWay] = {}
        """How allocations are opened whose descriptors begin so, once one of them was."""
        self.imports: dict[bytes, Import] = {}
        """Allocations of pools, by the driver's export data."""
        self.ranges: weakref.WeakValueDictionary[bytes, ImportedRange] = weakref.WeakValueDictionary()
        self._devices: dict[bytes, Device] = {}

    def device(self, described: Descriptor, stream: StreamLike | None) -> Device:
        """The device that has the memory; of memory on another machine, that of the stream."""
        uuid = described.device
        found = self._devices.get(uuid)
        if found is None:
            for device in Device.all(self.session.driver):
                self._devices[device.uuid.bytes] = device
            found = self._devices.get(uuid)
        if found is None and described.handle_type == FABRIC:
            if stream is None:
                raise ValueError(
                    f"the memory is on device {uuid.hex()}, which is not of this machine, or hidden from this process: "
                    "pass stream=, whose device is to have access"
                )
            return as_stream(stream, self.session).device
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
        if described.control_block == NOWHERE:
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
                    block = self.blocks[name] = ControlBlock.attach(self.session, fd, name)
            if block.fd is not fd:
                fd.close()
        return block

    def pool(self, described: Descriptor, handles: Handles) -> PoolHandle:
        """An imported pool; it is in :attr:`pools` where more may come of it without the handle."""
        found = self.pools.get(described.origin)
        if found is not None:
            return found
        self._let_go_of_the_ended()
        # What is destroyed meanwhile may be the same pool: the driver's handle would be that of nothing.
        with handles.take(described.origin) as fd, self.lock:
            found = self.pools.get(described.origin)
            if found is None:
                found = self.handles.opened(fd)
                if described.mechanism is Mechanism.POOL or described.flags & Flags.LEASED:
                    self.pools[described.origin] = found
            return found

    def noted(self, described: Descriptor, handles: Handles, pool: PoolHandle) -> ControlBlock | None:
        """The control block of a pool's owner, which tells when the pool has ended."""
        block = self.block_of(described, handles)
        if block is not None:
            block.marked("pool", described.pool_mark)  # raises where there is no such mark
            pool.marks.add((block, described.pool_mark))
        return block

    def way(self, described: Descriptor, handles: Handles, pool: PoolHandle, device: Device) -> PoolWay:
        """How an allocation of a pool is opened."""
        block = self.noted(described, handles, pool)
        return PoolWay(head_of(described), described.origin, pool, device, block, self.drops, self.imports)

    def keep(self, way: PoolWay) -> None:
        """Open allocations whose descriptors begin like this one's without looking at that again."""
        if way.leased and way.head.plain and way.head.driver_version == self.version:
            self.ways[way.head.data] = way

    def legacy_way(self, described: Descriptor, handles: Handles, device: Device) -> LegacyWay:
        """How memory of ``cuMemAlloc`` is opened."""
        return LegacyWay(self.session, device, self.block_of(described, handles), self.drops, described.flags)

    def _let_go_of_the_ended(self) -> None:
        """Let go of the control blocks and pools of exporters that have ended, and of closed pools."""
        known = self.handles.known
        with self.lock:
            ways = [held.way for held in self.imports.values()]
            pools = {id(way.pool) for way in ways if isinstance(way, PoolWay)}
            blocks = {id(way.block) for way in ways}
            ended = {
                number: pool
                for number, pool in known.items()
                if id(pool) not in pools and not pool.users and pool.ended()
            }
            # Nothing finds them by name from here on, whatever a signal handler raises below.
            gone = set(map(id, ended.values()))
            self.pools = {name: pool for name, pool in self.pools.items() if id(pool) not in gone}
            self.ways = {head: way for head, way in self.ways.items() if way.origin in self.pools}
            for number, pool in ended.items():
                self.deferred.submit(pool)
                del known[number]
            for name, block in list(self.blocks.items()):
                if id(block) not in blocks and not block.exporter_alive() and block.idle():
                    del self.blocks[name]
                    self.deferred.submit(OnceIdle(self.session, block.close))

    def memory(self, chunk: Chunk, handles: Handles) -> PhysicalMemory:
        """Physical memory; each import holds it by itself."""
        if chunk.fabric:
            return import_memory(self.session, chunk.fabric, chunk.nbytes)
        with handles.take(chunk.id) as fd:
            return import_memory(self.session, fd, chunk.nbytes)


importer_of: PerDriver[Importer] = PerDriver(Importer)
"""What this process has opened through a driver."""
