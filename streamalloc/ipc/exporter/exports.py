"""Handles that this process has exported: of pools, of physical memory, and of relays.

A :class:`ExportedPool` has the common part of the descriptors of one pool's allocations.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any, cast

from streamalloc.core.internal import (
    Buffer,
    DeferredQueue,
    Device,
    Fd,
    deferred_queue,
    past_caches,
    pool_of,
    shared_state,
    work,
)
from streamalloc.core.properties import MemHandleType, MemLocationType
from streamalloc.core.session import PerDriver, Session
from streamalloc.driver.internal import Lock, cuda
from streamalloc.ipc.exporter.leases import NOT_EXPORTABLE, Hold, Lease, Leases, leases_of
from streamalloc.ipc.relay import ExporterRelay
from streamalloc.ipc.transport import handle_server
from streamalloc.ipc.wire.control_block import ControlBlock, Mark
from streamalloc.ipc.wire.descriptor import NOWHERE, PAYLOAD_BYTES, Chunk, Descriptor, Flags, Mechanism, PoolHeader
from streamalloc.pool import MemoryPool
from streamalloc.pool.internal import raw_pool
from streamalloc.vmm import PhysicalMemory, VirtualBuffer

POSIX = MemHandleType.POSIX_FILE_DESCRIPTOR
_POSIX_MEMBER = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
NO_FABRIC_POOLS = "fabric handles of pools are not supported: a refused export as one damages the process's heap"

# Handles by id. The handle server sends them to processes that received only a descriptor's bytes.
_published: weakref.WeakValueDictionary[bytes, Fd] = weakref.WeakValueDictionary()
publish: Callable[[dict[bytes, Fd]], None] = _published.update
"""Publish handles by id, for the handle server."""
# Endpoint of the handle server by process id, because a forked child has none.
_endpoints: dict[int, bytes] = {}
_serving = Lock()


class ExportedPool:
    """The handle, the id and the descriptor headers of one pool's allocations.

    The object exists while the pool is open or a lease needs it. Importers detect its end by its marks.
    """

    __slots__ = ("__weakref__", "_marks", "device", "exports", "fd", "headers", "origin")

    def __init__(self, pool: MemoryPool, exports: Exports, device: Device) -> None:
        name = "cuMemPoolExportToShareableHandle"
        self.exports: Exports = exports
        self.fd: Fd = Fd.made_by(exports.session, name, raw_pool(pool), _POSIX_MEMBER, 0, hint=NOT_EXPORTABLE)
        self.origin: bytes = secrets.token_bytes(16)
        self.device: Device = device
        self.headers: dict[tuple[ControlBlock, bytes], tuple[PoolHeader, dict[bytes, Fd]]] = {}
        """The results of :meth:`header`, by control block and endpoint."""
        self._marks: dict[bytes, Mark] = {}

    def mark(self, block: ControlBlock) -> int:
        """Return the number of the mark that keeps its value while this object exists."""
        mark = self._marks.get(block.id)
        if mark is None:
            mark = self._marks.setdefault(block.id, block.new_mark("pool"))
        return mark.number

    def header(self, block: ControlBlock) -> tuple[PoolHeader, dict[bytes, Fd]]:
        """Return the descriptors' header, and the handles by id, of allocations with leases in ``block``."""
        endpoint = self.exports.endpoint
        found = self.headers.get((block, endpoint))
        if found is None:
            exports = self.exports
            described = Descriptor(
                Mechanism.POOL_POINTER, exports.uuid(self.device), self.origin, block.id, endpoint, Flags.LEASED,
                driver_version=exports.version, handle_type=int(POSIX), payload=bytes(PAYLOAD_BYTES),
                pool_mark=self.mark(block),
            )  # fmt: skip
            header = PoolHeader(described.to_bytes())
            handles = {self.origin: self.fd, block.id: block.fd}
            publish(handles)
            found = self.headers[block, endpoint] = (header, handles)
        return found


exported_pools: dict[weakref.ref[Any], weakref.ref[ExportedPool]] = {}
"""Exported pools by pool, for fast paths. :class:`Exports` keeps them alive."""


class Exports:
    """The handles that one process has exported through one driver."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.leases: Leases = leases_of(session)
        self.deferred: DeferredQueue = deferred_queue(session)
        self.endpoint: bytes = NOWHERE
        """16 bytes, address of the handle server; zeros before :meth:`serve`."""
        self.version: int = int(session.call("cuDriverGetVersion"))
        self._pools: weakref.WeakKeyDictionary[MemoryPool, ExportedPool] = weakref.WeakKeyDictionary()
        self._uuids: dict[int, bytes] = {}
        self._handles: weakref.WeakKeyDictionary[PhysicalMemory, dict[MemHandleType, Fd | bytes]]
        self._handles = weakref.WeakKeyDictionary()
        self._ids: weakref.WeakKeyDictionary[PhysicalMemory | VirtualBuffer, bytes] = weakref.WeakKeyDictionary()
        self._by_address: weakref.WeakValueDictionary[int, Lease] = weakref.WeakValueDictionary()
        """Leases of other libraries' allocations, by address."""
        self._relays: dict[ControlBlock, ExporterRelay] = {}

    def serve(self) -> None:
        """Start the handle server of this process. Descriptors made later carry its address."""
        if self.endpoint == NOWHERE:
            with _serving:
                process = os.getpid()
                if process not in _endpoints:
                    _endpoints[process] = handle_server.serve(_published.get)
                self.endpoint = _endpoints[process]

    def uuid(self, device: Device) -> bytes:
        """Return a device's UUID for descriptors. The driver is asked once."""
        uuid = self._uuids.get(device.ordinal)
        if uuid is None:
            uuid = self._uuids[device.ordinal] = device.uuid.bytes
        return uuid

    def lease(self, buffer: Buffer, pointer: Any) -> Lease:
        """Return the lease of a buffer. From now on the lease frees the buffer."""
        buffer = past_caches(buffer)
        with self.leases.lock:
            pool = cast("MemoryPool", pool_of(buffer))
            return cast("Lease", shared_state(buffer) or self.leases.add(buffer, pointer, self.pool(pool)))

    def lease_at(self, address: int, hold: Hold) -> Lease:
        """Return the lease of another library's allocation, and add a hold that keeps the lease valid."""
        with self.leases.lock:
            lease = self._by_address.get(address)
            if lease is None or not lease.hold(hold, kept=False):
                lease = self._by_address[address] = self.leases.take()
                lease.hold(hold, kept=False)
            return lease

    def pool(self, pool: MemoryPool) -> ExportedPool:
        """Return an exported pool; export it first if necessary."""
        with self.leases.lock:
            found = self._pools.get(pool)
            if found is None:
                if pool.properties is not None and not pool.properties.handle_types & POSIX:
                    raise ValueError(
                        f"{pool!r} cannot be shared: make it with handle_types=MemHandleType.POSIX_FILE_DESCRIPTOR"
                        + (f"; {NO_FABRIC_POOLS}" if pool.properties.handle_types else "")
                    )
                on_device = pool.location.type is MemLocationType.DEVICE
                device = Device(pool.location.id if on_device else 0, driver=self.session.driver)
                found = self._pools[pool] = ExportedPool(pool, self, device)
                forget = exported_pools.pop
                exported_pools[weakref.ref(pool, lambda gone: forget(gone, None))] = weakref.ref(found)
                for closed in [*filter(attrgetter("closed"), list(self._pools))]:
                    self._pools.pop(closed, None)
            return found

    def memory(self, memory: PhysicalMemory, handle_type: MemHandleType) -> tuple[Chunk, Fd | None]:
        """Return the chunk of a descriptor for physical memory, and the handle if it is a file descriptor."""
        handles = self._handles.setdefault(memory, {})
        if handle_type not in handles:
            handles.setdefault(handle_type, memory.export(handle_type))
        handle = handles[handle_type]
        file, fabric = (handle, b"") if isinstance(handle, Fd) else (None, handle)
        return Chunk(self.id(memory), memory.nbytes, fabric), file

    def relay(self, block: ControlBlock, device: Device) -> bytes:
        """Return the fabric handle of a control block's relay; make that first if necessary, on ``device``."""
        with self.leases.lock:
            relay = self._relays.get(block)
            if relay is None or relay.ended:
                with self.session.relaxed():
                    relay = self._relays[block] = ExporterRelay(block, device)
        relay.hurry()
        return relay.handle

    def id(self, thing: PhysicalMemory | VirtualBuffer) -> bytes:
        """Return the id, 16 bytes, of memory or of a growable buffer, for importers."""
        return self._ids.get(thing) or self._ids.setdefault(thing, secrets.token_bytes(16))


exports_of: PerDriver[Exports] = PerDriver(Exports)
"""The exports of this process through a driver."""


def exports_for(session: Session) -> Exports:
    """Check the process, do deferred work, and return the exports of a driver."""
    session.check_process()
    work(session)
    return exports_of(session)
