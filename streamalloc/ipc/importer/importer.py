"""The handles, control blocks and imports that one process has of others through one driver.

Control blocks and pools of processes that have ended, and pools that were closed, are released when a new one comes.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from queue import SimpleQueue

from streamalloc.core.internal import (
    DeferredQueue,
    Device,
    Fd,
    PerDriver,
    Session,
    StreamLike,
    as_stream,
    deferred_queue,
)
from streamalloc.driver.internal import cuda
from streamalloc.ipc.importer.background import OnceIdle, release_dropped
from streamalloc.ipc.importer.imported import Import, ImportedRange, LegacySource, PoolHandle, PoolSource
from streamalloc.ipc.transport.handle_server import fetch
from streamalloc.ipc.wire.control_block import ControlBlock
from streamalloc.ipc.wire.descriptor import FABRIC, NOWHERE, Chunk, Descriptor, Flags, Head, Mechanism
from streamalloc.vmm import PhysicalMemory
from streamalloc.vmm.internal import import_memory

__all__ = ["DriverVersionWarning", "Handles", "Importer", "importer_of"]

_POSIX_MEMBER = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_BAD_HANDLE = "the descriptor that came along is no handle of this kind of memory, or of another machine"


class DriverVersionWarning(UserWarning):
    """Exporter and importer run different drivers, which NVIDIA does not support."""


class Handles:
    """The handles that came with a message. :meth:`close` closes those that were not taken."""

    __slots__ = ("_by_id", "_given", "endpoint")

    endpoint: bytes
    """16 bytes: the server of missing handles; zeros without one."""

    def __init__(self, handles: Sequence[Fd]) -> None:
        self._given = handles
        self._by_id: dict[bytes, Fd] = {}

    def identify(self, described: Descriptor) -> None:
        """Assign ids to the handles, in the order that the descriptor defines."""
        self.endpoint = described.endpoint
        if not self._given:
            return
        ids = [chunk.id for chunk in described.chunks if not chunk.fabric]
        if described.mechanism in (Mechanism.POOL, Mechanism.POOL_POINTER):
            ids = [described.origin]
        if described.control_block != NOWHERE:
            ids.append(described.control_block)
        ids = list(dict.fromkeys(ids))
        # The pipe by which the message holds the allocation comes last, and is closed with the handles that remain.
        pipes = int(bool(described.flags & Flags.HELD) and not described.hold)
        if pipes and len(self._given) == 1:
            return
        if len(self._given) != len(ids) + pipes:
            raise ValueError(f"the descriptor needs {len(ids) + pipes} handles, and {len(self._given)} came along")
        self._by_id = dict(zip(ids, self._given, strict=False))
        self._given = self._given[len(ids) :]

    def take(self, name: bytes) -> Fd:
        """Return a handle by its id; fetch it from the exporter if it did not come along. The caller closes it."""
        fd = self._by_id.pop(name, None)
        if fd is not None:
            return fd
        if self.endpoint == NOWHERE:
            raise ValueError(
                "a handle that the descriptor needs did not come along: send it with streamalloc.ipc.send, or pass "
                "handles=shared.fds"
            )
        return fetch(self.endpoint, name)

    def take_local(self, name: bytes) -> Fd | None:
        """Do the same; None if it did not come along and the exporter is on another machine or has ended."""
        if name in self._by_id or self.endpoint != NOWHERE:
            with contextlib.suppress(ConnectionError):
                return self.take(name)
        return None

    def close(self) -> None:
        """Close the handles that were not taken."""
        for fd in (*self._given, *self._by_id.values()):
            fd.close()


class Importer:
    """The imports of one process through one driver."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.lock: AbstractContextManager[bool] = threading.RLock()
        """Held while imports are counted, by code that waits for no stream and no process."""
        self.deferred: DeferredQueue = deferred_queue(session)
        self.version: int = int(session.call("cuDriverGetVersion"))
        self.dropped: SimpleQueue[bool] = SimpleQueue()
        """Wakes the thread that releases dropped imports; finalisers may put into this kind of queue."""
        self._thread: threading.Thread | None = None
        self.blocks: dict[bytes, ControlBlock] = {}
        self.handles: dict[int, PoolHandle] = {}
        """Imported pools by ``CUmemoryPool``."""
        self.pools: dict[bytes, PoolHandle] = {}
        """Imported pools by id, if later descriptors may come without the handle."""
        self.sources: dict[bytes, PoolSource] = {}
        """Sources by descriptor head, once an allocation was opened."""
        self.imports: dict[bytes, Import] = {}
        """Allocations of pools by the driver's export data."""
        self.ranges: weakref.WeakValueDictionary[bytes, ImportedRange] = weakref.WeakValueDictionary()
        self._devices: dict[bytes, Device] = {}

    def device(self, described: Descriptor, stream: StreamLike | None) -> Device:
        """Return the device that has the memory; for memory of another machine, the stream's."""
        uuid = described.device
        found = self.device_of(uuid)
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

    def device_of(self, uuid: bytes) -> Device | None:
        """Return the device with a UUID of 16 bytes; None if this process does not see it."""
        if uuid not in self._devices:
            self._devices.update((device.uuid.bytes, device) for device in Device.all(self.session.driver))
        return self._devices.get(uuid)

    def check_version(self, version: int) -> None:
        """Warn if the exporter runs another driver than this process."""
        if version != self.version:
            warnings.warn(
                f"the exporter runs a driver for CUDA {version // 1000}.{version % 1000 // 10}, this process one for "
                f"{self.version // 1000}.{self.version % 1000 // 10}: NVIDIA supports equal ones only",
                DriverVersionWarning,
                stacklevel=4,
            )

    def block_of(self, described: Descriptor, handles: Handles) -> ControlBlock | None:
        """Return the exporter's control block; None without one, or if that is on another machine."""
        if described.control_block == NOWHERE:
            return None
        take = handles.take_local if described.handle_type == FABRIC else handles.take
        return self.control_block(described.control_block, take)

    def control_block(self, name: bytes, take: Callable[[bytes], Fd | None]) -> ControlBlock | None:
        """Return the control block of an id; ``take`` returns its file the first time, or None without one."""
        block = self.blocks.get(name)
        if block is None:
            self._release_ended()
            fd = take(name)
            if fd is None:
                return None
            try:
                with self.lock:
                    block = self.blocks.get(name)
                    if block is None:
                        block = self.blocks[name] = ControlBlock.attach(self.session, fd, name)
            finally:
                if block is None or block.fd is not fd:
                    fd.close()
        return block

    def pool(self, described: Descriptor, handles: Handles) -> PoolHandle:
        """Return an imported pool; it stays in :attr:`pools` if later descriptors may come without the handle."""
        pool = self.pools.get(described.origin)
        if pool is not None:
            return pool
        self._release_ended()
        fd = handles.take(described.origin)
        try:
            # Under the lock: a pool that is destroyed meanwhile may be the same, and the driver's handle invalid.
            with self.lock:
                pool = self.pools.get(described.origin)
                if pool is None:
                    pool = self._import(fd)
                    if described.mechanism is Mechanism.POOL or described.flags & Flags.LEASED:
                        self.pools[described.origin] = pool
                return pool
        finally:
            fd.close()

    def _import(self, fd: Fd) -> PoolHandle:
        """Import a pool (``cuMemPoolImportFromShareableHandle``). :attr:`lock` is held."""
        pool = PoolHandle(self.session, self.handles, self.lock)
        name = "cuMemPoolImportFromShareableHandle"
        self.session.create(pool, "_raw", name, fd.fileno(), _POSIX_MEMBER, 0, hint=_BAD_HANDLE)
        return self.handles.setdefault(int(pool._raw), pool)

    def watch(self, described: Descriptor, handles: Handles, pool: PoolHandle) -> ControlBlock | None:
        """Note the mark of a pool's owner, which shows when the pool has ended; the owner's control block."""
        block = self.block_of(described, handles)
        if block is not None:
            block.marked("pool", described.pool_mark)  # raises if there is no such mark
            pool.marks.add((block, described.pool_mark))
        return block

    def pool_source(self, head: Head, described: Descriptor, handles: Handles, device: Device) -> PoolSource:
        """Return the source of an allocation of a pool."""
        pool = self.pool(described, handles)
        block = self.watch(described, handles, pool)
        self._start_thread()
        return PoolSource(head, described.origin, pool, device, block, self.dropped, self.imports)

    def legacy_source(self, described: Descriptor, handles: Handles, device: Device) -> LegacySource:
        """Return the source of a block of ``cuMemAlloc``."""
        self._start_thread()
        return LegacySource(self.session, device, self.block_of(described, handles), self.dropped, described.flags)

    def keep(self, source: PoolSource) -> None:
        """Open later descriptors with the same head by the same source, without decoding the head again."""
        if source.leased and source.head.plain and source.head.driver_version == self.version:
            self.sources[source.head.data] = source

    def _start_thread(self) -> None:
        if self._thread is None:
            args = (self.dropped, weakref.ref(self.session))
            self._thread = threading.Thread(target=release_dropped, args=args, name="streamalloc drops", daemon=True)
            try:
                self._thread.start()
            except BaseException:
                self._thread = None
                raise
            weakref.finalize(self, self.dropped.put, False).atexit = False

    def _release_ended(self) -> None:
        """Release the control blocks and pools of exporters that have ended, and closed pools."""
        if not (self.handles or self.blocks):
            return
        with self.lock:
            used: set[object] = set()
            for held in self.imports.values():
                used.add(held.source.block)
                if isinstance(held.source, PoolSource):
                    used.add(held.source.pool)
            for number, pool in list(self.handles.items()):
                if pool not in used and not pool.users and pool.ended():
                    # No descriptor finds the pool from here on.
                    for name in [name for name, known in self.pools.items() if known is pool]:
                        del self.pools[name]
                    for data in [data for data, source in self.sources.items() if source.pool is pool]:
                        del self.sources[data]
                    self.deferred.submit(pool)
                    del self.handles[number]
            for name, block in list(self.blocks.items()):
                if block not in used and not block.exporter_alive() and block.idle():
                    del self.blocks[name]
                    self.deferred.submit(OnceIdle(self.session, block.close))

    def memory(self, chunk: Chunk, handles: Handles) -> PhysicalMemory:
        """Import physical memory. Each import holds it by itself."""
        if chunk.fabric:
            return import_memory(self.session, chunk.fabric, chunk.nbytes)
        with handles.take(chunk.id) as fd:
            return import_memory(self.session, fd, chunk.nbytes)


importer_of: PerDriver[Importer] = PerDriver(Importer)
"""The imports of this process through a driver."""
