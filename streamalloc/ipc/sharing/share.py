"""``share``: the right mechanism for each kind of memory, and a descriptor of it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from streamalloc.core.internal import (
    Buffer,
    BufferView,
    CopySide,
    Device,
    Event,
    GraphBuffer,
    MemHandleType,
    MemLocationType,
    PlainBuffer,
    Session,
    Stream,
    StreamLike,
    TypedView,
    as_stream,
    check_usable,
    direct_handle,
    plain_parts,
    raw_handle,
    refuse_capture,
    session_of,
    size_text,
    viewed,
    work,
)
from streamalloc.driver import default as default_driver
from streamalloc.driver.internal import cuda, opaque_bytes
from streamalloc.ipc.sharing import descriptor as wire
from streamalloc.ipc.sharing.descriptor import MOST_CHUNKS, NOWHERE, Flags, Mechanism
from streamalloc.ipc.sharing.exports import NO_FABRIC_POOLS, POSIX, Exports, Route, Shared, exports_of
from streamalloc.ipc.sharing.imports import ImportedBuffer, ImportedRange
from streamalloc.ipc.sharing.lease import Hold, Lease
from streamalloc.ipc.sharing.pools import ImportedPool
from streamalloc.pool import MemoryPool
from streamalloc.pool.internal import MemoryKind, pointer_attributes
from streamalloc.vmm import GrowableBuffer, PhysicalMemory, RangeView, VirtualBuffer
from streamalloc.vmm.internal import covering, is_imported

__all__ = ["share"]

_FABRIC = MemHandleType.FABRIC
# Memory of cuMemAlloc is shared in blocks of this size, with whatever else is in them.
_BLOCK = 2 << 20
_POSIX_NUMBER = int(POSIX)


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
    if handle_type not in (POSIX, _FABRIC):
        raise ValueError(f"handle_type={handle_type!r}: allowed are POSIX_FILE_DESCRIPTOR and FABRIC")
    if isinstance(thing, Event):
        raise ValueError(f"handle_type={handle_type!r}: {thing!r} is shared without any, leave it out")
    whole = viewed(thing)[0] if isinstance(thing, BufferView) else thing
    if handle_type == _FABRIC and isinstance(whole, (MemoryPool, Buffer)):
        raise ValueError(f"handle_type={handle_type!r}: {whole!r} cannot be shared so, {NO_FABRIC_POOLS}")


def _handle_type(memories: Iterable[PhysicalMemory], asked: _Asked) -> MemHandleType:
    """By which handles chunks of physical memory are shared; where they have none, exporting them says so."""
    common = POSIX | _FABRIC
    for memory in memories:
        common &= memory.properties.requested_handle_types
    return asked.handle_type or (_FABRIC if common == _FABRIC else POSIX)


def _prepared(session: Session) -> Exports:
    """What every kind begins with."""
    if session.forked:
        session.check_process()
    work(session)
    return exports_of(session)


def _ordered(stream: StreamLike, session: Session) -> Stream:
    ordered = as_stream(stream, session)
    refuse_capture(ordered, "cuStreamWriteValue32", _NOT_IN_A_CAPTURE)
    return ordered


def _share_pool(pool: MemoryPool, asked: _Asked) -> Shared:
    exports = _prepared(session_of(pool))
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


def _share_array(view: TypedView[Any], asked: _Asked) -> Shared:
    # numpy writes a structure as bytes of its size, which would come out as just that.
    dtype = view.dtype.str if view.dtype.names is None else str(view.dtype)
    wire.check_array(dtype, view.shape)
    shared = _share_view(view, asked)
    shared._data = wire.with_array(shared._data, dtype, view.shape)
    return shared


def _share_part(buffer: Buffer, offset: int, size: int, stream: StreamLike | None, hold: bool) -> Shared:
    session = session_of(buffer)
    exports = _prepared(session)
    if isinstance(buffer, GraphBuffer):
        raise ValueError(f"{buffer!r} belongs to a graph and cannot be shared: copy it to memory of a pool")
    nbytes, address = buffer.nbytes, buffer.address
    if not address or not nbytes:
        raise ValueError(f"{buffer!r} is empty: there is nothing to share")
    ordered = buffer.stream if stream is None else stream
    if type(ordered) is not Stream or direct_handle(ordered, session) is None:
        ordered = _ordered(ordered, session)
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
    session = session_of(allocator)
    exports = exports_of(session)
    route = exports.routes.get(allocator)  # type: ignore[call-overload]
    if route is None or not nbytes or direct_handle(ordered, session) is None or session.forked:
        return None
    exports.deferred.work()
    lease = route.lease(buffer, pointer)
    return None if lease is None else _leased(exports, lease, pointer, ordered, (0, nbytes, nbytes), hold)


def _leased(
    exports: Exports, lease: Lease, address: Any, stream: Stream, part: tuple[int, int, int], hold: bool
) -> Shared:
    """The descriptor of an allocation that has a lease; ``part`` is offset, size, and size of the allocation."""
    ready = lease.announce(stream)
    if exports.session.listener is not None:
        say_ready(lease, ready, int(address) + part[0], part[1], stream)
    route: Any = lease.route
    head, handles = route.head(lease.block)
    data = head.descriptor(lease.slot, lease.generation, ready, *part, lease.payload)
    return Shared(data, handles, lease, Hold() if hold else None, exports, once=True)


def _share_physical(memory: PhysicalMemory, asked: _Asked) -> Shared:
    session = session_of(memory)
    ordered = None if asked.stream is None else as_stream(asked.stream, session)
    return _share_chunks(memory, session, [memory], ordered, asked, size=memory.nbytes, origin=NOWHERE)


def _share_range(thing: VirtualBuffer | RangeView, asked: _Asked, begin: int = 0, size: int | None = None) -> Shared:
    """Share the chunks that bytes of an address range lie in."""
    fields: dict[str, Any] = {}
    if isinstance(thing, RangeView):
        begin += thing.offset
    else:
        check_usable(thing)
    session = session_of(thing)
    if size is None:
        size = thing.nbytes
        if isinstance(thing, GrowableBuffer):
            # From its beginning on, so that importers recognise the chunks they have.
            exports = _prepared(session)
            fields = {"origin": exports.name(thing), "flags": Flags.GROWABLE, "base_size": thing.capacity}
    if not size:
        raise ValueError(f"{thing!r} is empty: there is nothing to share")
    ordered = _ordered(thing.stream if asked.stream is None else asked.stream, session)
    mapped = covering(thing.range, begin, begin + size)
    if len(mapped) > MOST_CHUNKS:
        raise ValueError(
            f"{thing!r} lies in {len(mapped)} chunks of physical memory, and at most {MOST_CHUNKS} are shared at once: "
            "grow in larger steps, or share parts of it"
        )
    memories = [chunk.memory for chunk in mapped]
    shared = _share_chunks(
        thing, session, memories, ordered, asked, offset=begin - mapped[0].offset, size=size, **fields
    )
    if session.listener is not None and shared._lease is not None:
        say_ready(shared._lease, shared.descriptor.ready, thing.range.address + begin, size, ordered)
    return shared


def _share_chunks(
    thing: object, session: Session, memories: Sequence[Any], stream: Stream | None, asked: _Asked, **fields: Any
) -> Shared:
    """Share chunks of physical memory that lie side by side."""
    exports = _prepared(session)
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


def say_ready(lease: Lease, ready: int, address: int, nbytes: int, stream: Stream) -> None:
    """Notify the listener that importers may use memory after the work that a stream has queued."""
    name = lease.block.announcement(lease.slot, lease.generation, ready)
    with stream.device.current():
        lease.block.session.listener.shared(address, nbytes, raw_handle(stream), name)  # type: ignore[union-attr]


def _device_of(memory: PhysicalMemory) -> Device:
    location = memory.location
    return Device(location.id if location.type is MemLocationType.DEVICE else 0, driver=memory.driver)


def _share_event(event: Event, asked: _Asked) -> Shared:
    session = session_of(event)
    exports = _prepared(session)
    if not event.interprocess:
        raise ValueError(f"{event!r} cannot be shared: make it with interprocess=True, in the process that shares it")
    with event.device.current():
        raw = session.call("cuIpcGetEventHandle", cuda.CUevent(event.handle))
    return exports.describe(Mechanism.EVENT, exports.uuid(event.device), None, {}, payload=opaque_bytes(raw))


def _refuse_imported(thing: object, asked: _Asked) -> Shared:
    raise ValueError(f"{thing!r} was opened here: only the process that owns memory can share it")


def _share_foreign(thing: Any, asked: _Asked) -> Shared:
    """Memory of another library: find out what it is, and share that."""
    interface = thing.__cuda_array_interface__
    driver = default_driver()
    session = Session.of(driver)
    exports = _prepared(session)
    span = CopySide.readable(thing, session)
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
    ordered = _ordered(stream, session)
    with device.current():
        base, size = (int(value) for value in session.call("cuMemGetAddressRange", span.address))
        if span.address + span.nbytes > base + size:
            raise ValueError(
                f"{thing!r} ends outside of the {size_text(size)} that its allocation has: share what lies in several "
                "allocations one by one"
            )
        where: dict[str, Any] = {"offset": span.address - base, "size": span.nbytes, "base_size": size}
        if known.pool is not None:
            if asked.handle_type == _FABRIC:
                raise ValueError(f"{thing!r} is memory of a pool, and cannot be shared so: {NO_FABRIC_POOLS}")
            if not known.handle_types & POSIX:
                raise ValueError(
                    f"{thing!r} is memory of a pool that was not made for sharing: have the library allocate from a "
                    "pool with handle_types=POSIX_FILE_DESCRIPTOR (MemoryPool.make_current), or copy it to such a pool"
                )
            route = Route(known.pool, exports, exports.uuid(device))
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
            where["payload"] = opaque_bytes(session.call("cuIpcGetMemHandle", base))
            return exports.describe(Mechanism.LEGACY, exports.uuid(device), ordered, {}, **where)
        memory = PhysicalMemory.at(base, driver=driver)
        kind = _handle_type([memory], asked)
        if not memory.properties.requested_handle_types & kind:
            raise ValueError(
                f"{thing!r} is mapped memory that was not made for sharing: create it with handle type {kind.name}"
            )
        if span.address + span.nbytes > base + memory.nbytes:
            raise ValueError(f"{thing!r} lies in several chunks of physical memory: share them one by one")
        return _share_chunks(thing, session, [memory], ordered, asked, **where)


_NOT_IN_A_CAPTURE = "memory cannot be shared in a capture"

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
