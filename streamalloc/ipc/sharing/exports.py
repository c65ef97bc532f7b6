"""The table of what one process has exported through one driver, and what its descriptors hold on to."""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

from streamalloc.core.internal import (
    Buffer,
    DeferredQueue,
    Device,
    Fd,
    MemHandleType,
    MemLocationType,
    PerDriver,
    Row,
    Session,
    Shown,
    Stream,
    Unique,
    deferred_queue,
    error_from,
    mib,
    past_caches,
    pool_of,
    session_of,
    set_shared,
    shared_state,
)
from streamalloc.driver.internal import cuda, opaque_bytes
from streamalloc.ipc.sharing import descriptor as wire
from streamalloc.ipc.sharing.control_block import ControlBlock, Mark
from streamalloc.ipc.sharing.descriptor import NOWHERE, Chunk, Descriptor, Flags, Head, Mechanism
from streamalloc.ipc.sharing.lease import Hold, Lease, Leases, leases_of
from streamalloc.ipc.transport import handle_server
from streamalloc.pool import MemoryPool
from streamalloc.pool.internal import raw_pool
from streamalloc.vmm import PhysicalMemory, VirtualBuffer

__all__ = ["NO_FABRIC_POOLS", "POSIX", "Exports", "Route", "Shared", "exports_of", "serve"]

POSIX = MemHandleType.POSIX_FILE_DESCRIPTOR
_POSIX_NUMBER = int(POSIX)
_POSIX_MEMBER = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
NO_FABRIC_POOLS = "fabric handles of pools are not supported: a refused export as one damages the process's heap"
_NOT_EXPORTABLE = (
    "only allocations of pools made with handle_types=POSIX_FILE_DESCRIPTOR can be shared, "
    "by the process that made them"
)

# The handles of this process by their names, for those who got only a descriptor's bytes.
_published: weakref.WeakValueDictionary[bytes, Fd] = weakref.WeakValueDictionary()
# Where to ask for them, by process: a forked child has no server.
_endpoints: dict[int, bytes] = {}
_serving = threading.Lock()


class Shared(Unique, Shown):
    """Something that was shared: a descriptor, and the handles that importers need once.

    ``bytes(shared)`` is the descriptor. The handles go along by :func:`streamalloc.ipc.send`, or with
    ``channel.send(bytes(shared), shared.fds)``; an importer that has had them once needs only the bytes.

    With ``hold=True`` it keeps the allocation from being freed until the descriptor was opened, :meth:`cancel` is
    called, or it is dropped. ``ipc.send`` hands the hold over to the message, and so does :mod:`multiprocessing`, whose
    queues, pipes and arguments give the other process the memory itself.
    """

    __slots__ = ("__weakref__", "_data", "_exports", "_hold", "_lease", "_once", "handles")

    handles: dict[bytes, Fd]
    """The handles by their names, which the descriptor holds; they stay the exporter's."""

    def __init__(
        self,
        data: bytes,
        handles: dict[bytes, Fd],
        lease: Lease | None = None,
        hold: Hold | None = None,
        exports: Exports | None = None,
        *,
        once: bool = False,
    ) -> None:
        self._hold = hold
        self._data = data
        self._exports = exports
        self._once = once
        """Whether importers keep what the handles stand for, so that these need to travel once."""
        self._lease = lease
        """The slot of the announcement or the allocation; an announcement's is given back with this object."""
        self.handles = handles
        if lease is not None and hold is not None:
            lease.hold(hold, kept=False)

    @property
    def descriptor(self) -> Descriptor:
        """The descriptor's fields."""
        return Descriptor.from_bytes(self._data)

    @property
    def fds(self) -> tuple[Fd, ...]:
        """The handles in the order in which :func:`streamalloc.ipc.open` expects them."""
        return tuple(self.handles.values())

    @property
    def held(self) -> bool:
        """Whether it keeps the allocation from being freed."""
        return self._hold is not None and not self._hold.over()

    def to_bytes(self) -> bytes:
        """The descriptor as it travels."""
        if self._hold is None or self._lease is None or self._hold.over():
            return self._data
        return wire.with_hold(self._data, self._hold.mark(self._lease.block))

    __bytes__ = to_bytes

    def cancel(self) -> None:
        """End the hold: the descriptor is not going to be opened. Idempotent."""
        if self._hold is not None:
            self._hold.end()

    def carried(self, lost: Callable[[], bool]) -> bytes:
        """The descriptor for what carries bytes only; ``lost`` tells when that can bring it to nobody any more.

        Whoever opens it asks this process for handles. It holds an allocation from now on, whether this object did or
        did not.
        """
        described, exports = self.descriptor, self._exports
        if exports is not None:
            exports.serve()
            if described.endpoint != exports.endpoint:
                self._data = described._replace(endpoint=exports.endpoint).to_bytes()
        if self._lease is None or not described.flags & Flags.LEASED:
            return self._data
        hold = self._hold if self._hold is not None and self.held else Hold()
        hold.carry(lost)
        self._lease.hold(hold)
        self._hold = None
        return wire.with_hold(self._data, hold.mark(self._lease.block))

    def _about(self) -> Iterator[Row]:
        described = self.descriptor
        yield "shared", f"{mib(described.size)} by {described.mechanism.name.lower()}"
        yield "descriptor", f"{len(bytes(self))} bytes and {len(self.handles)} handles"
        yield "held", "until it was opened or cancelled" if self.held else "no"
        if self._lease is not None:
            yield "open in", f"{self._lease.readers} other processes"

    def __repr__(self) -> str:
        described = self.descriptor
        held = ", held" if self.held else ""
        return f"<Shared {described.mechanism.name} of {described.size} bytes, {len(self.handles)} handles{held}>"


class Route:
    """How allocations of one pool are shared: its name and handle, and what their descriptors have in common.

    It lasts as long as the pool is open or a lease needs it. Its marks tell importers when it ends.
    """

    __slots__ = ("__weakref__", "_heads", "_marks", "device", "exports", "fd", "origin")

    def __init__(self, pool: MemoryPool, exports: Exports, device: bytes) -> None:
        session, raw = session_of(pool), raw_pool(pool)
        name = "cuMemPoolExportToShareableHandle"
        self.exports: Exports = exports
        self.fd: Fd = Fd.made_by(session, name, raw, _POSIX_MEMBER, 0, hint=_NOT_EXPORTABLE)
        self.origin: bytes = secrets.token_bytes(16)
        self.device: bytes = device
        self._heads: dict[tuple[ControlBlock, bytes], tuple[Head, dict[bytes, Fd]]] = {}
        """The head of the descriptor and the handles, by control block and endpoint."""
        self._marks: dict[bytes, Mark] = {}

    def mark(self, block: ControlBlock) -> int:
        """What says in a control block that the pool lasts."""
        mark = self._marks.get(block.id)
        if mark is None:
            mark = self._marks.setdefault(block.id, block.new_mark("pool"))
        return mark.number

    def head(self, block: ControlBlock) -> tuple[Head, dict[bytes, Fd]]:
        """The head and the handles of descriptors of allocations that have their leases in ``block``."""
        endpoint = self.exports.endpoint
        found = self._heads.get((block, endpoint))
        if found is None:
            names = (self.device, self.origin, block.id, endpoint)
            head = Head.of(names, self.mark(block), Flags.LEASED, self.exports.version, _POSIX_NUMBER)
            handles = {self.origin: self.fd, block.id: block.fd}
            _published.update(handles)
            found = self._heads[block, endpoint] = (head, handles)
        return found

    def lease(self, buffer: Buffer, pointer: Any) -> Lease | None:
        """A lease for a buffer that has none, which frees it from now on; None where another thread was faster."""
        exports = self.exports
        with exports.lock:
            if shared_state(buffer) is not None:
                return None
            lease = exports.leases.take()
            lease.route = self
            lease.payload = exports.pointer(pointer)
            set_shared(buffer, lease)
        return lease


class Exports:
    """What one process has exported through one driver: handles are made once and kept."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.leases: Leases = leases_of(session)
        self.deferred: DeferredQueue = deferred_queue(session)
        self.endpoint: bytes = NOWHERE
        """Where other processes may ask for handles; zeros until :meth:`serve` is called."""
        self.version: int = int(session.call("cuDriverGetVersion"))
        self.routes: weakref.WeakKeyDictionary[MemoryPool, Route] = weakref.WeakKeyDictionary()
        self._uuids: dict[int, bytes] = {}
        self._handles: weakref.WeakKeyDictionary[PhysicalMemory, dict[MemHandleType, Fd | bytes]]
        self._handles = weakref.WeakKeyDictionary()
        self._names: weakref.WeakKeyDictionary[PhysicalMemory | VirtualBuffer, bytes] = weakref.WeakKeyDictionary()
        self.lock = threading.RLock()
        """Held where a buffer gets its lease, and a pool its handle."""

    def serve(self) -> None:
        """Hand out handles from now on; descriptors made later say where."""
        if self.endpoint == NOWHERE:
            with _serving:
                process = os.getpid()
                if process not in _endpoints:
                    _endpoints[process] = handle_server.serve(_published.get)
                self.endpoint = _endpoints[process]

    def describe(
        self, mechanism: Mechanism, uuid: bytes, stream: Stream | None, handles: dict[bytes, Fd], **fields: Any
    ) -> Shared:
        """The descriptor, with a slot of a control block and the announcement there that the contents are ready.

        The slot is taken for this announcement alone, until the result is dropped.
        """
        words: Lease | None = None
        if stream is not None:
            words = self.leases.take()
            fields["ready"] = words.announce(stream)
            fields["control_block"], fields["slot"], fields["generation"] = words.block.id, words.slot, words.generation
            handles = {**handles, words.block.id: words.block.fd}
        _published.update(handles)
        described = Descriptor(mechanism, uuid, endpoint=self.endpoint, driver_version=self.version, **fields)
        return Shared(described.to_bytes(), handles, words, None, self, once=mechanism is not Mechanism.PHYSICAL)

    def uuid(self, device: Device) -> bytes:
        """How descriptors name a device."""
        uuid = self._uuids.get(device.ordinal)
        if uuid is None:
            uuid = self._uuids[device.ordinal] = device.uuid.bytes
        return uuid

    def lease(self, buffer: Buffer, pointer: Any) -> Lease:
        """The lease of a buffer, which frees it from now on."""
        buffer = past_caches(buffer)
        with self.lock:
            lease = shared_state(buffer)
            if lease is None:
                lease = self.route(cast("MemoryPool", pool_of(buffer))).lease(buffer, pointer)
            return cast("Lease", lease)

    def route(self, pool: MemoryPool) -> Route:
        """How a pool is shared."""
        route = self.routes.get(pool)
        if route is None:
            if pool.properties is not None and not pool.properties.handle_types & POSIX:
                raise ValueError(
                    f"{pool!r} cannot be shared: make it with handle_types=MemHandleType.POSIX_FILE_DESCRIPTOR"
                    + (f"; {NO_FABRIC_POOLS}" if pool.properties.handle_types else "")
                )
            on_device = pool.location.type is MemLocationType.DEVICE
            device = Device(pool.location.id if on_device else 0, driver=self.session.driver)
            with self.lock:
                route = self.routes.get(pool)
                if route is None:
                    route = self.routes[pool] = Route(pool, self, self.uuid(device))
            for known in list(self.routes):
                if known.closed:
                    self.routes.pop(known, None)
        return route

    def pointer(self, address: Any) -> bytes:
        """The driver's export data of an allocation (``cuMemPoolExportPointer``)."""
        result, data = self.session.cuMemPoolExportPointer(address)
        if result:
            raise error_from(result, "cuMemPoolExportPointer", _NOT_EXPORTABLE)
        return opaque_bytes(data)

    def memory(self, memory: PhysicalMemory, handle_type: MemHandleType) -> tuple[Chunk, Fd | None]:
        """Physical memory as a descriptor has it, and the file descriptor that goes along, if one does."""
        handles = self._handles.setdefault(memory, {})
        if handle_type not in handles:
            handles.setdefault(handle_type, memory.export(handle_type))
        name, handle = self.name(memory), handles[handle_type]
        if isinstance(handle, Fd):
            return Chunk(name, memory.nbytes), handle
        return Chunk(name, memory.nbytes, handle), None

    def name(self, thing: PhysicalMemory | VirtualBuffer) -> bytes:
        """Sixteen bytes that stand for memory, or a buffer that may grow, so that importers know it again."""
        return self._names.get(thing) or self._names.setdefault(thing, secrets.token_bytes(16))


exports_of: PerDriver[Exports] = PerDriver(Exports)
"""What this process has exported through a driver."""


def serve(session: Session) -> None:
    """Hand out this process's handles from now on; descriptors made later say where."""
    exports_of(session).serve()
