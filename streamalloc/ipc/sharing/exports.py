"""``share``: the right mechanism for each kind of memory, and a descriptor of it. ``send``: that, over a channel."""

from __future__ import annotations

import functools
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from streamalloc.core.buffer import (
    Buffer,
    GraphBuffer,
    PlainBuffer,
    past_caches,
    plain_parts,
    pool_of,
    set_shared,
    shared_state,
)
from streamalloc.core.device import Device
from streamalloc.core.door import Door, PerDriver, door_behind
from streamalloc.core.errors import error_from, size_text
from streamalloc.core.event import Event
from streamalloc.core.fd import Fd
from streamalloc.core.html import Row, Shown, mib
from streamalloc.core.later import Later, later_of, work
from streamalloc.core.memory import BufferView, CopySide, TypedView, check_usable, viewed
from streamalloc.core.properties import MemHandleType, MemLocationType
from streamalloc.core.stream import Stream, StreamLike, as_stream, direct_handle, raw_handle, refuse_capture
from streamalloc.driver import default as default_driver
from streamalloc.driver.internal import cuda, opaque_bytes
from streamalloc.ipc.sharing import descriptor as wire
from streamalloc.ipc.sharing.control_block import ControlBlock, Mark
from streamalloc.ipc.sharing.descriptor import MOST_CHUNKS, Chunk, Descriptor, Flags, Mechanism
from streamalloc.ipc.sharing.imports import ImportedBuffer, ImportedPool, ImportedRange
from streamalloc.ipc.sharing.lease import Hold, Lease, Leases, hung_up, leases_of
from streamalloc.ipc.transport import handle_server
from streamalloc.ipc.transport.channel import Channel
from streamalloc.pool import MemoryPool
from streamalloc.pool.internal import MemoryKind, pointer_attributes
from streamalloc.vmm import GrowableBuffer, PhysicalMemory, RangeView, VirtualBuffer
from streamalloc.vmm.internal import covering, is_imported

__all__ = ["Exports", "Shared", "exports_of", "send", "serve", "share"]

_POSIX, _FABRIC = MemHandleType.POSIX_FILE_DESCRIPTOR, MemHandleType.FABRIC
_POSIX_MEMBER = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
# Memory of cuMemAlloc is shared in blocks of this size, with whatever else is in them.
_BLOCK = 2 << 20
_POSIX_NUMBER = int(_POSIX)
# Bytes of the driver's export data.
_PAYLOAD = 64
_NOWHERE = bytes(16)

# The handles of this process by their names, for those who got only a descriptor's bytes.
_published: weakref.WeakValueDictionary[bytes, Fd] = weakref.WeakValueDictionary()
# Where to ask for them, by process: a forked child has no server.
_endpoints: dict[int, bytes] = {}
_serving = threading.Lock()


class _Carried:
    """What has gone over a channel."""

    __slots__ = ("latest", "names")

    def __init__(self) -> None:
        self.names: set[bytes] = set()
        """Of handles."""
        self.latest: dict[bytes, Fd] | None = None
        """The handles of a pool and a control block, of which all have gone, as descriptors of its memory have them."""


_carried: weakref.WeakKeyDictionary[Channel, _Carried] = weakref.WeakKeyDictionary()


class Shared(Shown):
    """Something that was shared: a descriptor, and the handles that importers need once.

    ``bytes(shared)`` is the descriptor. The handles go along by :func:`streamalloc.ipc.send`, or with
    ``channel.send(bytes(shared), shared.fds)``; an importer that has had them once needs only the bytes.

    With ``hold=True`` it keeps the allocation from being freed until the descriptor was opened, :meth:`cancel` is
    called, or it is dropped. ``ipc.send`` hands the hold over to the message.
    """

    __slots__ = ("__weakref__", "_data", "_exports", "_hold", "_lease", "handles")

    handles: dict[bytes, Fd]
    """The handles by their names, which the descriptor holds; they stay the exporter's."""

    def __init__(
        self,
        data: bytes,
        handles: dict[bytes, Fd],
        lease: Lease | None = None,
        hold: Hold | None = None,
        exports: Exports | None = None,
    ) -> None:
        self._hold = hold
        self._data = data
        self._exports = exports
        """Of whom importers keep what the handles stand for, so that these need to travel once; else None."""
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

    def hand_over(self, lost: Callable[[], bool]) -> None:
        """Leave the hold to what carries the descriptor; ``lost`` tells when that can bring it to nobody any more."""
        hold = self._hold
        if hold is not None and self._lease is not None:
            hold.carry(lost)
            self._lease.hold(hold)
            self._hold = None

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


class _Route:
    """How allocations of one pool are shared: its name and handle, and what their descriptors have in common.

    It lasts as long as the pool is open or a lease needs it. Its marks tell importers when it ends.
    """

    __slots__ = ("_heads", "_marks", "device", "fd", "origin")

    def __init__(self, pool: MemoryPool, device: bytes) -> None:
        door, raw = door_behind(pool), cuda.CUmemoryPool(pool.handle)
        name = "cuMemPoolExportToShareableHandle"
        self.fd: Fd = Fd.made_by(door, name, raw, _POSIX_MEMBER, 0, hint=_NOT_EXPORTABLE)
        self.origin: bytes = secrets.token_bytes(16)
        self.device: bytes = device
        self._heads: dict[tuple[bytes, bytes], tuple[bytes, dict[bytes, Fd]]] = {}
        """The beginning of the descriptor and the handles, by control block and endpoint."""
        self._marks: dict[bytes, Mark] = {}

    def mark(self, block: ControlBlock) -> int:
        """What says in a control block that the pool lasts."""
        mark = self._marks.get(block.id)
        if mark is None:
            mark = self._marks.setdefault(block.id, block.new_mark("pool"))
        return mark.number

    def head(self, block: ControlBlock, exports: Exports) -> tuple[bytes, dict[bytes, Fd]]:
        """The same for an allocation with its lease in ``block``."""
        key = (block.id, exports.endpoint)
        found = self._heads.get(key)
        if found is None:
            head = wire.head_of(Mechanism.POOL_POINTER, (self.device, self.origin, *key), self.mark(block), _PAYLOAD)
            handles = {self.origin: self.fd, block.id: block.fd}
            _published.update(handles)
            found = self._heads[key] = (head, handles)
        return found


class Exports:
    """What one process has exported through one driver: handles are made once and kept."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.leases: Leases = leases_of(door)
        self.later: Later = later_of(door)
        self.endpoint: bytes = _NOWHERE
        """Where other processes may ask for handles; zeros until :meth:`serve` is called."""
        self.version: int = int(door.call("cuDriverGetVersion"))
        self.routes: weakref.WeakKeyDictionary[MemoryPool, _Route] = weakref.WeakKeyDictionary()
        self._uuids: dict[int, bytes] = {}
        self._handles: weakref.WeakKeyDictionary[PhysicalMemory, dict[MemHandleType, Fd | bytes]]
        self._handles = weakref.WeakKeyDictionary()
        self._names: weakref.WeakKeyDictionary[PhysicalMemory | VirtualBuffer, bytes] = weakref.WeakKeyDictionary()
        self.lock = threading.RLock()
        """Held where a buffer gets its lease."""

    def serve(self) -> None:
        """Hand out handles from now on; descriptors made later say where."""
        if self.endpoint == _NOWHERE:
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
        kept = None if mechanism is Mechanism.PHYSICAL else self
        return Shared(described.to_bytes(), handles, words, exports=kept)

    def uuid(self, device: Device) -> bytes:
        """How descriptors name a device."""
        uuid = self._uuids.get(device.ordinal)
        if uuid is None:
            uuid = self._uuids[device.ordinal] = device.uuid.bytes
        return uuid

    def lease(self, buffer: Buffer, address: int) -> Lease:
        """The lease of a buffer, which frees it from now on."""
        buffer = past_caches(buffer)
        lease = shared_state(buffer)
        if not isinstance(lease, Lease):
            with self.lock:
                lease = shared_state(buffer)
                if not isinstance(lease, Lease):
                    lease = self.leases.take()
                    lease.route = self.route(cast("MemoryPool", pool_of(buffer)))
                    lease.payload = self.pointer(address)
                    set_shared(buffer, lease)
        return lease

    def route(self, pool: MemoryPool) -> _Route:
        """How a pool is shared."""
        route = self.routes.get(pool)
        if route is None:
            if pool.properties is not None and not pool.properties.handle_types & _POSIX:
                raise ValueError(
                    f"{pool!r} cannot be shared: make it with handle_types=MemHandleType.POSIX_FILE_DESCRIPTOR"
                    + (f"; {_NO_FABRIC_POOLS}" if pool.properties.handle_types else "")
                )
            on_device = pool.location.type is MemLocationType.DEVICE
            device = Device(pool.location.id if on_device else 0, driver=self.door.driver)
            route = self.routes[pool] = _Route(pool, self.uuid(device))
            for known in list(self.routes):
                if known.closed:
                    self.routes.pop(known, None)
        return route

    def pointer(self, address: int) -> bytes:
        """The driver's export data of an allocation (``cuMemPoolExportPointer``)."""
        result, data = self.door.cuMemPoolExportPointer(address)
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


def serve(door: Door) -> None:
    """Hand out this process's handles from now on; descriptors made later say where."""
    exports_of(door).serve()


def send(
    channel: Channel,
    thing: object,
    *,
    stream: StreamLike | None = None,
    hold: bool = False,
    timeout: float | None = None,
) -> None:
    """Share something and send it; the other end takes it with :func:`receive`. ``channel.send`` is for bytes.

    The handles of pools and control blocks go along the first time only. From then on this process hands them out to
    whoever asks, so that a receiver which dropped that message asks for what it lacks.

    Parameters
    ----------
    channel
        Where to.
    thing
        As for :func:`share`, or what that returned. If that holds the allocation, the message does from now on.
    stream, hold
        As for :func:`share`. Without ``hold`` the allocation must not be freed before the other end has opened it. With
        it, the message keeps the allocation until it was opened, refused or dropped, or nobody can receive it any more.
    timeout
        Seconds until ``TimeoutError``.
    """
    shared = thing if isinstance(thing, Shared) else share(thing, stream, hold=hold)
    carried, exports = _carried.get(channel), shared._exports
    if carried is None:
        carried = _carried.setdefault(channel, _Carried())
    if exports is not None and shared.handles is carried.latest and shared._hold is None:
        channel.send(shared._data, (), timeout=timeout)
        # While the other end is at work.
        exports.leases.prepare()
        return
    had = carried.names
    handles = shared.fds
    if exports is not None:
        exports.serve()
        if had.issuperset(shared.handles) and exports.endpoint in shared._data:
            handles = ()
            carried.latest = shared.handles
    lease = shared._lease
    if lease is None or not shared.held:
        channel.send(shared.to_bytes(), handles, timeout=timeout)
    else:
        # The message has one end of a pipe, which the kernel closes with it; whoever opens the descriptor closes it
        # when that is done. So the hold ends without anybody's help.
        ours, theirs = Fd.pipe()
        with theirs:
            lease.hold(Hold(functools.partial(hung_up, ours)))
            channel.send(wire.with_hold(shared._data, 0), (*handles, theirs), timeout=timeout)
        shared.cancel()
    had.update(shared.handles)


class _Asked(NamedTuple):
    """What :func:`share` was asked for."""

    stream: StreamLike | None
    hold: bool
    handle_type: MemHandleType | None
    expose_block: bool


def share(
    thing: object,
    stream: StreamLike | None = None,
    *,
    expose_block: bool = False,
    hold: bool = False,
    handle_type: MemHandleType | None = None,
) -> Shared:
    """Make memory, a pool or an event known to other processes of this user on this machine.

    ``thing`` is a :class:`MemoryPool`, a :class:`Buffer` of a pool (or a view of one), :class:`PhysicalMemory`, a
    :class:`Mapping`, :class:`RangeView` or :class:`GrowableBuffer`, an :class:`Event` made with ``interprocess=True``,
    or any object with ``__cuda_array_interface__`` such as a CuPy array or a PyTorch tensor. The driver's mechanism
    follows from what the memory is; it has to have been made for sharing.

    A shared allocation of a pool carries a lease: freeing it waits for importers, see :meth:`Buffer.free`. Memory of
    other libraries is freed by them, and carries none.

    Physical memory and what it is mapped in can be shared by fabric handles, too, and then with processes of other
    machines in the same IMEX domain. Such handles are bytes in the descriptor, so no file descriptor has to travel, and
    nothing keeps the memory before it was opened: it must not be closed until then. The control block, by which
    importers' streams wait for the contents, is of this machine. Elsewhere, and where neither its file descriptor comes
    along nor this process can be asked for it (:func:`streamalloc.ipc.send` and :mod:`multiprocessing` see to that),
    nothing waits: synchronise ``stream`` before the descriptor leaves.

    Parameters
    ----------
    thing
        What to share.
    stream
        The stream after whose work the contents are there; default: the memory's own. Importers' streams wait for it.
    expose_block
        Share memory of ``cuMemAlloc`` although the importer can then read all of its 2 MiB blocks, in which there may
        be other allocations.
    hold
        Keep the allocation from being freed while this descriptor is on its way. The result holds it, until the
        descriptor was opened, :meth:`Shared.cancel` is called, or the result is dropped. :func:`streamalloc.ipc.send`
        hands the hold over to the message, which ends it when it is opened, refused or dropped, or when nobody can
        receive it any more. It makes no difference for what has no lease.
    handle_type
        Of physical memory, and what it is mapped in: ``POSIX_FILE_DESCRIPTOR`` or ``FABRIC``. Default: file descriptors
        where the memory was made with them, else fabric handles. Pools are shared by file descriptors only.

    Raises
    ------
    TypeError
        It is nothing that can be shared.
    ValueError
        It cannot be shared, and why, and what would help.
    NotSupportedError
        The device lacks what this needs.
    CaptureError
        The stream is being captured.
    """
    if type(thing) is PlainBuffer and handle_type is None:
        buffer: Any = thing
        shared = _share_plain(buffer, stream, hold)
        return _share_part(buffer, 0, buffer.nbytes, stream, hold) if shared is None else shared
    if handle_type is not None:
        _check_handle_type(thing, handle_type)
    asked = _Asked(stream, hold, handle_type, expose_block)
    for kind, how in _HOW.items():
        if isinstance(thing, kind):
            return how(thing, asked)
    if hasattr(thing, "__cuda_array_interface__"):
        return _share_foreign(thing, asked)
    raise TypeError(
        f"{thing!r} cannot be shared: allowed are pools, memory, events, and CUDA arrays of other libraries"
    )


def _check_handle_type(thing: object, handle_type: object) -> None:
    """Raise where something is not shared by handles of this type, as far as its kind tells."""
    if not isinstance(handle_type, MemHandleType):
        raise TypeError(f"handle_type must be a MemHandleType, not {type(handle_type).__name__} ({handle_type!r})")
    if handle_type not in (_POSIX, _FABRIC):
        raise ValueError(f"handle_type={handle_type!r}: allowed are POSIX_FILE_DESCRIPTOR and FABRIC")
    if isinstance(thing, Event):
        raise ValueError(f"handle_type={handle_type!r}: {thing!r} is shared without any, leave it out")
    whole = viewed(thing)[0] if isinstance(thing, BufferView) else thing
    if handle_type == _FABRIC and isinstance(whole, (MemoryPool, Buffer)):
        raise ValueError(f"handle_type={handle_type!r}: {whole!r} cannot be shared so, {_NO_FABRIC_POOLS}")


def _handle_type(memories: Iterable[PhysicalMemory], asked: _Asked) -> MemHandleType:
    """By which handles chunks of physical memory are shared; where they have none, exporting them says so."""
    common = _POSIX | _FABRIC
    for memory in memories:
        common &= memory.properties.requested_handle_types
    return asked.handle_type or (_FABRIC if common == _FABRIC else _POSIX)


def _prepared(door: Door) -> Exports:
    """What every kind begins with."""
    if door.forked:
        door.check_process()
    work(door)
    return exports_of(door)


def _ordered(stream: StreamLike, door: Door) -> Stream:
    ordered = as_stream(stream, door)
    refuse_capture(ordered, "cuStreamWriteValue32", _NOT_IN_A_CAPTURE)
    return ordered


def _share_pool(pool: MemoryPool, asked: _Asked) -> Shared:
    exports = _prepared(door_behind(pool))
    route, block = exports.route(pool), exports.leases.block()
    fields = {"origin": route.origin, "control_block": block.id, "pool_mark": route.mark(block)}
    handles = {route.origin: route.fd, block.id: block.fd}
    return exports.describe(Mechanism.POOL, route.device, None, handles, handle_type=_POSIX_NUMBER, **fields)


def _share_buffer(buffer: Buffer, asked: _Asked) -> Shared:
    return _share_part(buffer, 0, buffer.nbytes, asked.stream, asked.hold)


def _share_view(view: BufferView, asked: _Asked) -> Shared:
    check_usable(view)
    if not view.nbytes:
        raise ValueError(f"{view!r} is empty: there is nothing to share")
    parent, offset = viewed(view)
    if isinstance(parent, Buffer):
        return _share_part(parent, offset, view.nbytes, asked.stream, asked.hold)
    if isinstance(parent, (VirtualBuffer, RangeView)):
        return _share_range(parent, asked, offset, view.nbytes)
    if isinstance(parent, (ImportedBuffer, ImportedRange)):
        return _refuse_imported(view, asked)
    raise ValueError(f"{view!r} cannot be shared: share the memory itself in the process that owns it")


def _share_array(view: TypedView, asked: _Asked) -> Shared:
    # numpy writes a structure as bytes of its size, which would come out as just that.
    dtype = view.dtype.str if view.dtype.names is None else str(view.dtype)
    wire.check_array(dtype, view.shape)
    shared = _share_view(view, asked)
    shared._data = wire.with_array(shared._data, dtype, view.shape)
    return shared


def _share_part(buffer: Buffer, offset: int, size: int, stream: StreamLike | None, hold: bool) -> Shared:
    door = door_behind(buffer)
    exports = _prepared(door)
    if isinstance(buffer, GraphBuffer):
        raise ValueError(f"{buffer!r} belongs to a graph and cannot be shared: copy it to memory of a pool")
    nbytes, address = buffer.nbytes, buffer.address
    if not address or not nbytes:
        raise ValueError(f"{buffer!r} is empty: there is nothing to share")
    ordered = buffer.stream if stream is None else stream
    if type(ordered) is not Stream or direct_handle(ordered, door) is None:
        ordered = _ordered(ordered, door)
    return _leased(exports, exports.lease(buffer, address), address, ordered, (offset, size, nbytes), hold)


def _share_plain(buffer: Buffer, stream: StreamLike | None, hold: bool) -> Shared | None:
    """The fast path of allocations: the first descriptor of one, of a pool of which something was shared before.

    None where it is not that, and where anything has to be looked at or explained.
    """
    parts = plain_parts(buffer)
    if parts is None:
        return None
    allocator, pointer, nbytes, ordered = parts
    if stream is not None:
        if type(stream) is not Stream:
            return None
        ordered = stream
    door = door_behind(allocator)
    exports = exports_of(door)
    route = exports.routes.get(allocator)  # type: ignore[call-overload]
    if route is None or not nbytes or direct_handle(ordered, door) is None or door.forked:
        return None
    exports.later.work()
    with exports.lock:
        if shared_state(buffer) is not None:
            return None  # another thread was faster
        lease = exports.leases.take()
        lease.route = route
        result, data = door.cuMemPoolExportPointer(pointer)
        if result:
            raise error_from(result, "cuMemPoolExportPointer", _NOT_EXPORTABLE)
        lease.payload = opaque_bytes(data)
        set_shared(buffer, lease)
    return _leased(exports, lease, pointer, ordered, (0, nbytes, nbytes), hold)


def _leased(
    exports: Exports, lease: Lease, address: Any, stream: Stream, part: tuple[int, int, int], hold: bool
) -> Shared:
    """The descriptor of an allocation that has a lease; ``part`` is offset, size, and size of the allocation."""
    if exports.door.shared is not None:
        _say_ready(exports.door, int(address) + part[0], part[1], stream)
    ready = lease.announce(stream)
    route: Any = lease.route
    head, handles = route.head(lease.block, exports)
    numbers = (Flags.LEASED, lease.slot, lease.generation, ready, exports.version, _POSIX_NUMBER, *part, 0)
    data = wire.joined(head, numbers, _PAYLOAD, 0, lease.payload)
    return Shared(data, handles, lease, Hold() if hold else None, exports)


def _share_physical(memory: PhysicalMemory, asked: _Asked) -> Shared:
    door = door_behind(memory)
    ordered = None if asked.stream is None else as_stream(asked.stream, door)
    return _share_chunks(memory, door, [memory], ordered, asked, size=memory.nbytes, origin=_NOWHERE)


def _share_range(thing: VirtualBuffer | RangeView, asked: _Asked, begin: int = 0, size: int | None = None) -> Shared:
    """Share the chunks that bytes of an address range lie in."""
    fields: dict[str, Any] = {}
    if isinstance(thing, RangeView):
        begin += thing.offset
    else:
        check_usable(thing)
    door = door_behind(thing)
    if size is None:
        size = thing.nbytes
        if isinstance(thing, GrowableBuffer):
            # From its beginning on, so that importers recognise the chunks they have.
            exports = _prepared(door)
            fields = {"origin": exports.name(thing), "flags": Flags.GROWABLE, "base_size": thing.capacity}
    if not size:
        raise ValueError(f"{thing!r} is empty: there is nothing to share")
    ordered = _ordered(thing.stream if asked.stream is None else asked.stream, door)
    mapped = covering(thing.range, begin, begin + size)
    if len(mapped) > MOST_CHUNKS:
        raise ValueError(
            f"{thing!r} lies in {len(mapped)} chunks of physical memory, and at most {MOST_CHUNKS} are shared at once: "
            "grow in larger steps, or share parts of it"
        )
    memories = [chunk.memory for chunk in mapped]
    _say_ready(door, thing.range.address + begin, size, ordered)
    return _share_chunks(thing, door, memories, ordered, asked, offset=begin - mapped[0].offset, size=size, **fields)


def _share_chunks(
    thing: object, door: Door, memories: Sequence[Any], stream: Stream | None, asked: _Asked, **fields: Any
) -> Shared:
    """Share chunks of physical memory that lie side by side."""
    exports = _prepared(door)
    for memory in memories:
        if not isinstance(memory, PhysicalMemory):
            raise ValueError(f"{memory!r} is shared by its own handle: export() it, and share the memory bound to it")
        if is_imported(memory):
            _refuse_imported(thing, asked)
    kind = _handle_type(memories, asked)
    chunks = [exports.memory(memory, kind) for memory in memories]
    fields = {"base_size": sum(chunk.nbytes for chunk, _ in chunks), "origin": secrets.token_bytes(16), **fields}
    handles = {chunk.id: fd for chunk, fd in chunks if fd is not None}
    fields["handle_type"], fields["chunks"] = int(kind), tuple(chunk for chunk, _ in chunks)
    return exports.describe(Mechanism.PHYSICAL, exports.uuid(_device_of(memories[0])), stream, handles, **fields)


def _say_ready(door: Door, address: int, nbytes: int, stream: Stream) -> None:
    """Tell a driver that checks stream order that importers will use memory after what a stream has queued."""
    if door.shared is not None:
        with stream.device.current():
            door.shared(address, nbytes, raw_handle(stream))


def _device_of(memory: PhysicalMemory) -> Device:
    location = memory.location
    return Device(location.id if location.type is MemLocationType.DEVICE else 0, driver=memory.driver)


def _share_event(event: Event, asked: _Asked) -> Shared:
    door = door_behind(event)
    exports = _prepared(door)
    if not event.interprocess:
        raise ValueError(f"{event!r} cannot be shared: make it with interprocess=True, in the process that shares it")
    with event.device.current():
        raw = door.call("cuIpcGetEventHandle", cuda.CUevent(event.handle))
    return exports.describe(Mechanism.EVENT, exports.uuid(event.device), None, {}, payload=opaque_bytes(raw))


def _refuse_imported(thing: object, asked: _Asked) -> Shared:
    raise ValueError(f"{thing!r} was opened here: only the process that owns memory can share it")


def _share_foreign(thing: Any, asked: _Asked) -> Shared:
    """Memory of another library: find out what it is, and share that."""
    interface = thing.__cuda_array_interface__
    driver = default_driver()
    door = Door.of(driver)
    exports = _prepared(door)
    span = CopySide.readable(thing, door)
    if not span.nbytes:
        raise ValueError(f"{thing!r} is empty: there is nothing to share")
    known = pointer_attributes(span.address, driver=driver)
    device = known.device
    if known.kind is MemoryKind.DEVICE and device is None:
        # Of memory that was mapped by hand, the driver tells no device; its handle does.
        device = _device_of(PhysicalMemory.at(span.address, driver=driver))
    if known.kind is not MemoryKind.DEVICE or device is None:
        raise ValueError(f"{thing!r} is not device memory of this process")
    stream = asked.stream
    if stream is None:
        handle = interface.get("stream")
        stream = device.default_stream if handle is None else Stream.of_handle(device, handle, thing)
    ordered = _ordered(stream, door)
    with device.current():
        base, size = (int(value) for value in door.call("cuMemGetAddressRange", span.address))
        if span.address + span.nbytes > base + size:
            raise ValueError(
                f"{thing!r} ends outside of the {size_text(size)} that its allocation has: share what lies in several "
                "allocations one by one"
            )
        where: dict[str, Any] = {"offset": span.address - base, "size": span.nbytes, "base_size": size}
        if known.pool is not None:
            if asked.handle_type == _FABRIC:
                raise ValueError(f"{thing!r} is memory of a pool, and cannot be shared so: {_NO_FABRIC_POOLS}")
            if not known.handle_types & _POSIX:
                raise ValueError(
                    f"{thing!r} is memory of a pool that was not made for sharing: have the library allocate from a "
                    "pool with handle_types=POSIX_FILE_DESCRIPTOR (MemoryPool.make_current), or copy it to such a pool"
                )
            route = _Route(known.pool, exports.uuid(device))
            where |= {"origin": route.origin, "handle_type": _POSIX_NUMBER, "payload": exports.pointer(base)}
            handles = {route.origin: route.fd}
            return exports.describe(Mechanism.POOL_POINTER, route.device, ordered, handles, **where)
        if known.legacy_ipc:
            if asked.handle_type is not None:
                raise ValueError(
                    f"{thing!r} is memory of cuMemAlloc, which is shared without a handle type: leave it out"
                )
            if not asked.expose_block and (base % _BLOCK or size % _BLOCK):
                raise ValueError(
                    f"{thing!r} is not alone in its blocks of 2 MiB: an importer could read the rest of them. Share it "
                    "with expose_block=True if it may, or copy it to a pool or to memory of whole blocks"
                )
            where["payload"] = opaque_bytes(door.call("cuIpcGetMemHandle", base))
            return exports.describe(Mechanism.LEGACY, exports.uuid(device), ordered, {}, **where)
        memory = PhysicalMemory.at(base, driver=driver)
        kind = _handle_type([memory], asked)
        if not memory.properties.requested_handle_types & kind:
            raise ValueError(
                f"{thing!r} is mapped memory that was not made for sharing: create it with handle type {kind.name}"
            )
        if span.address + span.nbytes > base + memory.nbytes:
            raise ValueError(f"{thing!r} lies in several chunks of physical memory: share them one by one")
        return _share_chunks(thing, door, [memory], ordered, asked, **where)


_NOT_IN_A_CAPTURE = "memory cannot be shared in a capture"

_NO_FABRIC_POOLS = "fabric handles of pools are not supported: a refused export as one damages the process's heap"

_NOT_EXPORTABLE = (
    "only allocations of pools made with handle_types=POSIX_FILE_DESCRIPTOR can be shared, "
    "by the process that made them"
)

# The first class that fits says how something is shared.
_HOW: dict[type | tuple[type, ...], Callable[[Any, _Asked], Shared]] = {
    Buffer: _share_buffer,
    MemoryPool: _share_pool,
    (ImportedBuffer, ImportedPool, ImportedRange): _refuse_imported,
    TypedView: _share_array,
    BufferView: _share_view,
    PhysicalMemory: _share_physical,
    (RangeView, VirtualBuffer): _share_range,
    Event: _share_event,
}
