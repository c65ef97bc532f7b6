"""``share`` makes a descriptor of memory by the mechanism of its kind. ``send`` also sends the descriptor."""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from streamalloc.core.errors import size_text
from streamalloc.core.internal import (
    Buffer,
    BufferView,
    CopySide,
    Device,
    Event,
    Fd,
    GraphBuffer,
    PoolBuffer,
    Stream,
    StreamLike,
    TypedView,
    as_stream,
    viewed,
)
from streamalloc.core.properties import (
    IpcEventHandle,
    IpcMemHandle,
    MemFabricHandle,
    MemHandleType,
    MemLocationType,
    MemPoolPtrExportData,
    checked_type,
)
from streamalloc.core.resource import RawHandles, Unique
from streamalloc.core.session import Session, session_of
from streamalloc.driver import Driver
from streamalloc.driver import default as default_driver
from streamalloc.driver.internal import cuda, opaque_bytes
from streamalloc.formats.html import Row, Shown, mib
from streamalloc.ipc.exporter.exports import (
    NO_FABRIC_POOLS,
    POSIX,
    Exports,
    Hold,
    KeptReferences,
    Lease,
    PoolExport,
    exports_for,
    exports_of,
    hung_up,
)
from streamalloc.ipc.transport.channel import Channel
from streamalloc.ipc.wire.descriptor import MOST_CHUNKS, NOWHERE, Descriptor, Flags, Foreign, Mechanism, check_array
from streamalloc.pool import MemoryPool
from streamalloc.pool.internal import CachingAllocator, MemoryKind, PlainBuffer, pointer_attributes
from streamalloc.vmm import GrowableBuffer, PhysicalMemory, RangeView, VirtualBuffer
from streamalloc.vmm.internal import covering, is_imported

_FABRIC = MemHandleType.FABRIC
# Size in bytes of a block of ``cuMemAlloc``. ``cuIpcGetMemHandle`` shares whole blocks, with all allocations in them.
_LEGACY_BLOCK = 2 << 20
_NOT_IN_A_CAPTURE = "memory cannot be shared in a capture"


class Shared(Unique, Shown):
    """The result of :func:`share`: a descriptor, and the file descriptors that each importer needs once.

    ``bytes(shared)`` is the descriptor. Send the file descriptors together with it, by :func:`streamalloc.ipc.send` or
    ``channel.send(bytes(shared), shared.fds)``. An importer that has received the file descriptors once needs only the
    bytes of later descriptors.

    With ``hold=True`` the object keeps the shared memory until the descriptor is opened, :meth:`cancel` is called, or
    the object is dropped. ``ipc.send`` and :mod:`multiprocessing` move the hold to the message. A process that receives
    the object by :mod:`multiprocessing` gets the opened memory.

    The object keeps a reference to what was shared until :meth:`cancel` is called or :func:`send` moves the hold to a
    message. There is one exception: it keeps no reference to a buffer of a pool of this package.
    """

    def __init__(
        self,
        descriptor: Descriptor,
        handles: dict[bytes, Fd],
        lease: Lease | None = None,
        hold: Hold | None = None,
        exports: Exports | None = None,
    ) -> None:
        self.descriptor: Descriptor = descriptor
        """The descriptor's fields, without the hold."""
        self.handles: dict[bytes, Fd] = handles
        """The file descriptors by their ids in the descriptor. The exporter owns them."""
        self._lease = lease
        """Lease with the slot of the allocation or of the announcement. A lease of an announcement is released with
        this object.
        """
        self._hold = hold
        """The hold; None if there is none, or if it has moved to a message."""
        self._exports = exports
        self._again: Callable[[], Shared] | None = None
        """Function that shares the thing again, with a hold. None for buffers of a pool, and after :meth:`cancel`."""

    def __del__(self) -> None:
        hold = getattr(self, "_hold", None)
        if hold is not None:
            hold.end()

    @property
    def fds(self) -> tuple[Fd, ...]:
        """The file descriptors, in the order that :func:`streamalloc.ipc.open` expects."""
        return tuple(self.handles[name] for name in self.descriptor.handle_ids())

    @property
    def held(self) -> bool:
        """Whether this object keeps the shared memory from being freed. False without ``hold=True``, and after the hold
        has ended or has moved to a message.
        """
        return self._hold is not None and not self._hold.over()

    def to_bytes(self) -> bytes:
        """Return the descriptor's bytes, as ``bytes(shared)`` does. While this object has a hold, the bytes name its
        mark, so that their opening ends the hold.
        """
        if self._hold is None or self._lease is None or self._hold.over():
            return self.descriptor.to_bytes()
        return self.descriptor.to_bytes(self._hold.mark(self._lease.block))

    __bytes__ = to_bytes

    def cancel(self) -> None:
        """End the hold, for a descriptor that will not be opened. From then on the memory can be freed. Idempotent."""
        self._again = None
        if self._hold is not None:
            self._hold.end()

    def carried(self, lost: Callable[[], bool]) -> bytes:
        """Return the descriptor's bytes for a carrier that transports no file descriptors, and move the hold to that
        carrier.

        The importer fetches the handles from this process. From now on the shared memory is held, even if this object
        had no hold: anything but a pool allocation is then shared again, with the errors of :func:`share`. The hold
        ends when ``lost()`` returns True, because the carrier can no longer deliver the descriptor.
        """
        hold, lease = self._hold if self.held else None, self._lease
        if hold is None and self._again is not None:
            return self._again().carried(lost)
        if self._exports is not None and self.descriptor.endpoint == NOWHERE:
            self.descriptor = self.descriptor._replace(endpoint=self._exports.serve())
        if lease is None or (hold is None and not self.descriptor.flags & Flags.LEASED):
            return self.descriptor.to_bytes()
        if hold is None:
            hold = Hold(lost)
            lease.add_hold(hold)
        self._hold, hold.lost = None, lost
        return self.descriptor.to_bytes(hold.mark(lease.block))

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


class _Options(NamedTuple):
    """The arguments of :func:`share`."""

    thing: object
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
    """Share memory, a pool or an event with other processes of this user on this machine.

    Send the result with :func:`send`; the other process opens it with :func:`receive`, or with :func:`open`::

        pool = sa.MemoryPool(device, handle_types=sa.MemHandleType.POSIX_FILE_DESCRIPTOR)
        buffer = pool.allocate(1 << 20, stream)
        ipc.send(channel, ipc.share(buffer, hold=True))

    ``thing`` is a :class:`MemoryPool`, a :class:`Buffer` of a pool (or a view of one), :class:`PhysicalMemory`, a
    :class:`Mapping`, :class:`RangeView` or :class:`GrowableBuffer`, an :class:`Event` made with ``interprocess=True``,
    or any object with ``__cuda_array_interface__`` such as a CuPy array or a PyTorch tensor. The kind of memory
    determines the driver's mechanism. The memory must have been made for sharing.

    A shared allocation of a pool has a lease: its free is deferred until importers have closed it, see
    :meth:`Buffer.free`. Other libraries free their memory when the last reference to the array is dropped;
    ``hold=True`` keeps a reference.

    Physical memory, and ranges that map it, can also be shared by fabric handles, with processes of other machines in
    the same IMEX domain. Fabric handles are bytes in the descriptor, so any transport of bytes works. They do not keep
    the memory alive: use ``hold=True``, or close the memory only after it was opened. The first such call of a process
    starts a thread, as :func:`serve` does. Other machines cannot reach the exporter's control block: synchronise before
    you send the descriptor there, and end its hold by :meth:`Shared.cancel` once it is open.

    Parameters
    ----------
    thing
        The memory, pool or event.
    stream
        The stream whose work writes the contents; default: the memory's own. Importers' streams wait for it. Refused
        for pools and events, which have no contents.
    expose_block
        Share memory of ``cuMemAlloc`` even if its blocks of 2 MiB may contain other allocations, which the importer
        could then read. Only for memory of other libraries.
    hold
        Keep the shared memory while this descriptor is in transit: until the descriptor is opened,
        :meth:`Shared.cancel` is called, or the result is dropped. :func:`streamalloc.ipc.send` moves the hold to the
        message. Then the hold ends when the message is opened, refused or dropped, or can no longer be received. After
        the end of its hold, a descriptor of a range with fabric handles is stale, unless an importer has the range
        open.

        During a hold the free of an allocation waits. For everything else the hold keeps a reference and the file
        descriptors. For ranges with fabric handles it keeps the memory, even if it is closed and unmapped here. Do not
        close pools, events, or :class:`PhysicalMemory` with a fabric handle during a hold.

        After the open, these are kept until all importers have closed them and their work has ended: an array of
        another library in memory of ``cuMemAlloc`` or of a pool (until its whole allocation is closed), and a range
        with fabric handles, or an array in one. An array in mapped memory that was shared by file descriptors is not
        kept: its library may reuse the memory, so keep the array while other processes use it.
    handle_type
        Of physical memory and ranges: ``POSIX_FILE_DESCRIPTOR`` or ``FABRIC``. Default: file descriptors if the memory
        was made with them, else fabric handles. Pools are shared by file descriptors only.

    Raises
    ------
    TypeError
        ``thing`` cannot be shared, or ``stream`` is not a stream.
    ValueError
        This memory cannot be shared; the message says why, and how to make it. Or ``stream`` belongs to another driver.
    NotSupportedError
        The device lacks a capability for it.
    CaptureError
        The stream is being captured.
    ClosedError, CudaError
        ``thing`` or the stream was closed, or the pool of memory that was not shared before; or the driver refuses a
        call.
    """
    if handle_type is not None:
        _check_handle_type(thing, handle_type)
    options = _Options(thing, stream, hold, handle_type, expose_block)
    for kind, function in _KINDS.items():
        if isinstance(thing, kind):
            if expose_block and not isinstance(thing, PlainBuffer):
                raise ValueError(f"expose_block=True is for memory of cuMemAlloc, which {thing!r} is not: leave it out")
            if stream is not None and isinstance(thing, (MemoryPool, Event)):
                raise ValueError(f"stream={stream!r}: {thing!r} has no contents that a stream writes, leave it out")
            exports = exports_for(session_of(thing))  # type: ignore[arg-type]
            with exports.session.beside_captures():
                return _published(function(thing, options, exports), options, exports)
    if hasattr(thing, "__cuda_array_interface__"):
        exports = exports_for(Session.of(default_driver()))
        return _published(_share_array_of_others(thing, options, exports), options, exports)
    raise TypeError(
        f"{thing!r} cannot be shared: allowed are pools, memory, events, and CUDA arrays of other libraries"
    )


def send(
    channel: Channel,
    thing: object,
    *,
    stream: StreamLike | None = None,
    hold: bool = False,
    timeout: float | None = None,
) -> None:
    """Share memory, a pool or an event, and send it; the other end calls :func:`receive`.

    ``channel.send`` is for bytes. A channel carries the handles of each pool and control block once, with the first
    message that needs them. This process also serves the handles, so that a receiver that dropped the first message can
    fetch them.

    Parameters
    ----------
    channel
        The channel to the other process.
    thing
        As for :func:`share`, or a result of it, whose hold moves to the message.
    stream, hold
        As for :func:`share`. With a result of it, ``stream`` is not allowed, and ``hold`` only if the result is
        :attr:`~Shared.held`. Without a hold, do not free the memory before the other end has opened it. With a hold,
        the message keeps the memory until the message is opened, refused or dropped, or can no longer be received.
    timeout
        Seconds until ``TimeoutError``; None: the channel's.

    Raises
    ------
    ValueError
        As for :func:`share`. Or ``thing`` is a result of :func:`share`, and ``stream`` was given, or ``hold`` although
        ``thing`` is not held.
    TypeError, NotSupportedError, CaptureError, ClosedError, CudaError
        As for :func:`share`. Nothing was sent.
    TimeoutError, PeerGoneError, ClosedError
        As for ``channel.send``. The memory stays shared.
    """
    checked_type("channel", channel, Channel)
    if isinstance(thing, Shared):
        if stream is not None or hold > thing.held:
            raise ValueError("stream and hold are arguments of share: what it has returned is sent without them")
        shared = thing
    else:
        shared = share(thing, stream, hold=hold)
    described, sent = shared.descriptor, channel._sent
    # Importers keep the handles of pools and control blocks, so a channel carries each of these handles only once. A
    # descriptor that was made before :func:`serve` names no server for lost handles: its message always carries them.
    exports = None if described.mechanism is Mechanism.PHYSICAL else shared._exports
    known = exports is not None and exports.serve() == described.endpoint and sent.issuperset(shared.handles)
    handles = () if known else shared.fds
    if shared._lease is None or not shared.held:
        channel.send(described.to_bytes(), handles, timeout=timeout)
    else:
        # The message has a hold of its own, because importers of other bytes of ``shared`` end the hold of those. The
        # last handle is one end of a pipe: when every process has closed it, the hold ends (class Hold).
        ours, theirs = map(Fd, os.pipe())
        hold_of_message = Hold(functools.partial(hung_up, ours))
        shared._lease.add_hold(hold_of_message)
        with theirs:
            try:
                channel.send(described.to_bytes(0), (*handles, theirs), timeout=timeout)
            except BaseException:
                hold_of_message.end()
                raise
        shared.cancel()
    sent.update(shared.handles)


def raw_handles(thing: object, *, handle_type: MemHandleType | None = None, expose_block: bool = False) -> RawHandles:
    """Export memory, a pool or an event for a program without this package: C++, RMM, Vulkan, raw Python.

    The program opens the handles by the driver's own calls, see :doc:`/docs/guides/handles`. The program is not
    notified when the contents are complete, nor this process when the program has closed the handles. So synchronise,
    or record an event for the program, before the program reads. Free the memory after the program has closed the
    handles.

    Parameters
    ----------
    thing
        As for :func:`share`, also written ``thing.handles()``. An array of another library gives the handles of its
        allocation.
    handle_type, expose_block
        As for :func:`share`.

    Raises
    ------
    TypeError, ValueError, NotSupportedError, ClosedError, CudaError
        As for :func:`share`.

    Examples
    --------
    >>> pool = sa.MemoryPool(device, handle_types=sa.MemHandleType.POSIX_FILE_DESCRIPTOR)
    >>> exported = pool.allocate(4096, stream).handles()
    >>> len(exported.fds), len(exported.data), exported.nbytes
    (1, 64, 4096)
    """
    shared = share(thing, handle_type=handle_type, expose_block=expose_block)
    described = shared.descriptor
    names = [chunk.id for chunk in described.chunks] or [described.origin]
    data = _DATA.get(described.mechanism)
    return RawHandles(
        described.device,
        tuple(Fd(os.dup(shared.handles[name].fileno())) for name in names if name in shared.handles),
        tuple(MemFabricHandle(chunk.fabric) for chunk in described.chunks if chunk.fabric),
        None if data is None else data(described.payload),
        tuple(chunk.nbytes for chunk in described.chunks) or (described.base_size,) * bool(described.base_size),
        described.offset,
        described.size,
    )


_DATA: dict[Mechanism, Callable[[bytes], MemPoolPtrExportData | IpcMemHandle | IpcEventHandle]] = {
    Mechanism.POOL_POINTER: MemPoolPtrExportData,
    Mechanism.LEGACY: IpcMemHandle,
    Mechanism.EVENT: IpcEventHandle,
}


def serve(driver: Driver | None = None) -> None:
    """Serve the handles of descriptors that are shared from now on, to other processes of this user.

    A thread of this process serves them on a private socket. :func:`send` and :mod:`multiprocessing` call this
    function. Call it yourself before you transport a descriptor's bytes by other means. Idempotent.

    Parameters
    ----------
    driver
        The driver whose memory is shared; default: :func:`streamalloc.driver.default`.
    """
    exports_of(Session.of(driver if driver is not None else default_driver())).serve()


# -- the steps of a share ------------------------------------------------------------------------------------


class _Thing(NamedTuple):
    """Result of the function for a kind of memory: the descriptor, and what :func:`_published` needs to complete it."""

    described: Descriptor
    """Descriptor with the fields of the memory. :func:`_published` adds the exporter's fields: device, endpoint, slot.
    """
    device: Device
    stream: Stream | None = None
    """The stream whose work writes the contents; None if there are no contents to announce."""
    address: int = 0
    """Device address of the contents in this process; 0 if there are none."""
    lease: Lease | None = None
    """Lease of a buffer; None for everything else."""
    pool: PoolExport | None = None
    """Pool of the memory. The pool's handle is sent with the descriptor, and the number of its mark: a word that
    changes when the pool ends.
    """
    handles: Mapping[bytes, Fd] = MappingProxyType({})
    kept: object = None
    """Memory that is kept alive until the hold has ended and the lease is unused."""


def _published(thing: _Thing, options: _Options, exports: Exports) -> Shared:
    """Make a :class:`Shared` of ``thing``: add the parts of its kind to its descriptor. Raises CudaError.

    =============================  =============================  ============================  =========  ===========
    Kind                           Slot                           Announced by                  Pool mark  Handles
    =============================  =============================  ============================  =========  ===========
    buffer of a pool               that of its lease              its stream, or ``stream``     yes        pool
    array in memory of a pool      new                            its stream, or ``stream``     yes        pool
    array of ``cuMemAlloc``        new                            its stream, or ``stream``     no         none
    range, array in mapped memory  new                            its stream, or ``stream``     no         chunks
    physical memory                new: with ``stream`` or hold   ``stream``, if it was given   no         chunks
    pool                           new: with a hold               nobody                        yes        pool
    event                          new: with a hold               nobody                        no         none
    =============================  =============================  ============================  =========  ===========

    A hold needs a slot, a slot or mark needs a control block, and the control block is a further handle. Chunks with
    fabric handles have no file descriptors. A hold keeps what has a new slot by a :class:`KeptReferences`.

    The hold begins first, then the contents are announced, and only then can anybody have the descriptor. So a refused
    call leaves nothing for importers to wait for, and a free in another thread finds the hold.
    """
    hold, lease = Hold() if options.hold else None, thing.lease
    if lease is None and (hold is not None or thing.stream is not None):
        (lease,) = exports.new_leases()
    try:
        if lease is not None and hold is not None:
            lease.add_hold(hold)
        pool, handles = thing.pool, dict(thing.handles)
        uuid = exports.uuid(thing.device)
        added: dict[str, Any] = {"device": uuid, "endpoint": exports.endpoint, "driver_version": exports.version}
        block = None if lease is None else lease.block
        if pool is not None:
            block = block or exports.block()
            handles[pool.origin] = pool.fd
            added.update(origin=pool.origin, handle_type=int(POSIX), pool_mark=pool.mark(block))
        if block is not None:
            handles[block.id] = block.fd
            added["control_block"] = block.id
        if lease is not None:
            ready = lease.words.last_announced
            if thing.stream is not None:
                ready = lease.announce(thing.stream, thing.address, thing.described.size)
            added.update(slot=lease.slot, generation=lease.generation, ready=ready)
        shared = Shared(thing.described._replace(**added), handles, lease, hold, exports)
    except BaseException:
        if hold is not None:
            hold.end()
        raise
    if thing.lease is None:
        shared._again = functools.partial(share, **options._replace(hold=True)._asdict())
        if hold is not None and lease is not None:
            kept = options.thing, handles, pool, thing.kept
            exports.deferred.submit(KeptReferences(lease, thing.device.ordinal, kept))
    return shared


# -- kinds of memory -----------------------------------------------------------------------------------------


def _share_buffer(buffer: Buffer, options: _Options, exports: Exports, part: tuple[int, int] | None = None) -> _Thing:
    """Describe an allocation, or ``part`` of it (offset, bytes). Raises ValueError, CaptureError, CudaError."""
    if isinstance(buffer, GraphBuffer):
        raise ValueError(f"{buffer!r} belongs to a graph and cannot be shared: copy it to memory of a pool")
    if isinstance(buffer, PlainBuffer) or (
        not isinstance(buffer, PoolBuffer) and isinstance(buffer.owner, CachingAllocator)
    ):
        start, size = part or (0, buffer.nbytes)
        return _share_array_of_others(buffer[start : start + size], options, exports)
    nbytes, address = buffer.nbytes, buffer.address
    if not address or not nbytes:
        raise ValueError(f"{buffer!r} is empty: there is nothing to share")
    ordered = _announcing_stream(buffer.stream if options.stream is None else options.stream, exports.session)
    lease = exports.lease(buffer)
    pool: Any = lease.pool
    offset, size = part or (0, nbytes)
    described = Descriptor(
        Mechanism.POOL_POINTER, flags=Flags.LEASED, offset=offset, size=size, base_size=nbytes, payload=lease.payload
    )
    return _Thing(described, pool.device, ordered, address + offset, lease, pool)


def _announcing_stream(stream: StreamLike, session: Session) -> Stream:
    """Return the stream that will announce the contents. Raises CaptureError if the stream is being captured, because a
    graph cannot notify other processes; TypeError, ValueError, ClosedError.
    """
    ordered = as_stream(stream, session, after=True)
    ordered.refuse_capture("cuStreamWriteValue32", _NOT_IN_A_CAPTURE)
    return ordered


def _share_view(view: BufferView, options: _Options, exports: Exports) -> _Thing:
    view.check_usable()
    if not view.nbytes:
        raise ValueError(f"{view!r} is empty: there is nothing to share")
    parent, offset = viewed(view)
    if isinstance(parent, Foreign):
        return _refuse_imported(view)
    if isinstance(parent, Buffer):
        return _share_buffer(parent, options, exports, (offset, view.nbytes))
    if isinstance(parent, (VirtualBuffer, RangeView)):
        return _share_range(parent, options, exports, offset, view.nbytes)
    raise ValueError(f"{view!r} cannot be shared: share the memory itself in the process that owns it")


def _share_array(view: TypedView[Any], options: _Options, exports: Exports) -> _Thing:
    # ``check_array`` refuses structures. Its error shows the dtype of a structure in full, because ``dtype.str`` gives
    # only the size.
    dtype = view.dtype.str if view.dtype.names is None else str(view.dtype)
    check_array(dtype, view.shape)
    thing = _share_view(view, options, exports)
    flags = thing.described.flags | Flags.ARRAY
    return thing._replace(described=thing.described._replace(flags=flags, dtype=dtype, shape=view.shape))


def _share_pool(pool: MemoryPool, options: _Options, exports: Exports) -> _Thing:
    found = exports.pool(pool)
    return _Thing(Descriptor(Mechanism.POOL), found.device, pool=found)


def _share_event(event: Event, options: _Options, exports: Exports) -> _Thing:
    if not event.interprocess:
        raise ValueError(f"{event!r} cannot be shared: make it with interprocess=True, in the process that shares it")
    with event.device.current():
        raw = exports.session.call("cuIpcGetEventHandle", cuda.CUevent(event.handle))
    return _Thing(Descriptor(Mechanism.EVENT, payload=opaque_bytes(raw)), event.device)


def _refuse_imported(thing: object, *_: object) -> _Thing:
    raise ValueError(f"{thing!r} was opened here: only the process that owns memory can share it")


def _share_physical(memory: PhysicalMemory, options: _Options, exports: Exports) -> _Thing:
    memory._check_open()
    stream = None if options.stream is None else as_stream(options.stream, exports.session, after=True)
    # Without an origin, so that importers open physical memory as a chunk, and not as a range.
    return _share_chunks(memory, exports, [memory], stream, options, Descriptor(Mechanism.PHYSICAL, size=memory.nbytes))


def _share_range(
    thing: VirtualBuffer | RangeView, options: _Options, exports: Exports, begin: int = 0, size: int | None = None
) -> _Thing:
    """Describe ``size`` bytes of ``thing`` from the offset ``begin`` on: the chunks of physical memory that contain
    them. ``size=None``: all bytes from ``begin`` on. Raises ValueError, CaptureError.
    """
    described = Descriptor(Mechanism.PHYSICAL, origin=secrets.token_bytes(16))
    if isinstance(thing, RangeView):
        begin += thing.offset
    else:
        thing.check_usable()
    if size is None:
        size = thing.nbytes
        if isinstance(thing, GrowableBuffer):
            # The offset counts from the first byte of the range, so that importers recognise chunks that they have
            # mapped.
            described = described._replace(origin=exports.id(thing), flags=Flags.GROWABLE, base_size=thing.capacity)
    if not size:
        raise ValueError(f"{thing!r} is empty: there is nothing to share")
    ordered = _announcing_stream(thing.stream if options.stream is None else options.stream, exports.session)
    mapped = covering(thing.range, begin, begin + size)
    if len(mapped) > MOST_CHUNKS:
        raise ValueError(
            f"{thing!r} lies in {len(mapped)} chunks of physical memory, and at most {MOST_CHUNKS} are shared at once: "
            "grow in larger steps, or share parts of it"
        )
    memories, offsets = zip(*mapped, strict=True)
    described = described._replace(offset=begin - offsets[0], size=size)
    at = [thing.range.address + offset for offset in offsets]
    return _share_chunks(thing, exports, memories, ordered, options, described, at)


def _share_chunks(
    thing: object,
    exports: Exports,
    memories: Sequence[Any],
    stream: Stream | None,
    options: _Options,
    described: Descriptor,
    addresses: Sequence[int] = (),
) -> _Thing:
    """Describe chunks of physical memory in address order. ``addresses``: addresses of the chunks in this process.
    Raises ValueError, CudaError.
    """
    for memory in memories:
        if not isinstance(memory, PhysicalMemory):
            raise ValueError(f"{memory!r} is shared by its own handle: export() it, and share the memory bound to it")
        if is_imported(memory):
            _refuse_imported(thing)
    kind = _handle_type(memories, options)
    exported = [exports.memory(memory, kind) for memory in memories]
    chunks = tuple(chunk for chunk, _ in exported)
    base_size = described.base_size or sum(chunk.nbytes for chunk in chunks)
    flags, kept = described.flags, None
    if kind == _FABRIC and (options.hold or stream is not None):
        # The handle server must run, so that importers can get the control block when they have only the bytes of the
        # descriptor.
        exports.serve()
    if kind == _FABRIC and options.hold:
        # File descriptors keep physical memory alive that is closed here; fabric handles do not, so the hold keeps it.
        kept = [PhysicalMemory.at(address, driver=exports.session.driver) for address in addresses]
        flags |= 0 if described.origin == NOWHERE else Flags.LEASED
    described = described._replace(base_size=base_size, handle_type=int(kind), chunks=chunks, flags=flags)
    handles = {chunk.id: fd for chunk, fd in exported if fd is not None}
    at = addresses[0] + described.offset if addresses else 0
    return _Thing(described, _device_of(memories[0]), stream, at, handles=handles, kept=kept)


def _device_of(memory: PhysicalMemory) -> Device:
    location = memory.location
    return Device(location.id if location.type is MemLocationType.DEVICE else 0, driver=memory.driver)


def _handle_type(memories: Iterable[PhysicalMemory], options: _Options) -> MemHandleType:
    """Return the requested handle type. Without a request, return one that all ``memories`` have, file descriptors
    first. If there is none, the later export of a chunk raises the error.
    """
    common = POSIX | _FABRIC
    for memory in memories:
        common &= memory.properties.requested_handle_types
    return options.handle_type or (_FABRIC if common == _FABRIC else POSIX)


def _check_handle_type(thing: object, handle_type: object) -> None:
    """Raise ValueError if ``thing`` is of a kind that cannot be shared by this handle type."""
    if handle_type not in (POSIX, _FABRIC):
        raise ValueError(f"handle_type={handle_type!r}: allowed are POSIX_FILE_DESCRIPTOR and FABRIC")
    if isinstance(thing, Event):
        raise ValueError(f"handle_type={handle_type!r}: events have no handle type, leave it out")
    whole = viewed(thing)[0] if isinstance(thing, BufferView) else thing
    if handle_type == _FABRIC and isinstance(whole, (MemoryPool, Buffer)):
        raise ValueError(f"handle_type={handle_type!r}: {whole!r} cannot be shared so, {NO_FABRIC_POOLS}")


# -- memory of other libraries -------------------------------------------------------------------------------


def _share_array_of_others(thing: Any, options: _Options, exports: Exports) -> _Thing:
    """Describe an array of another library. Its memory determines the mechanism: of a pool, of ``cuMemAlloc``, or
    mapped. Raises ValueError for memory that cannot be shared, CaptureError, CudaError.
    """
    session, driver = exports.session, exports.session.driver
    span = CopySide.of(thing, session)
    if not span.nbytes:
        raise ValueError(f"{thing!r} is empty: there is nothing to share")
    known = pointer_attributes(span.address, driver=driver)
    device = known.device
    if known.kind is MemoryKind.DEVICE and device is None:
        # The driver reports no device for an address of mapped memory, so the device is read from the allocation
        # handle.
        device = _device_of(PhysicalMemory.at(span.address, driver=driver))
    if known.kind is not MemoryKind.DEVICE or device is None:
        raise ValueError(f"{thing!r} is not device memory of this process, but {known.kind.value} memory")
    if isinstance(thing, BufferView):
        own = thing.stream
    else:
        handle = thing.__cuda_array_interface__.get("stream")
        own = device.default_stream if handle is None else Stream.of_handle(device, handle, thing)
    ordered = _announcing_stream(own if options.stream is None else options.stream, session)
    with device.current():
        base, size = (int(value) for value in session.call("cuMemGetAddressRange", span.address))
        # Memory of ``cuMemMap`` is checked below: if it cannot be shared at all, the error has to say so first.
        if span.address + span.nbytes > base + size and (known.pool is not None or known.legacy_ipc):
            raise ValueError(
                f"{thing!r} ends outside of the {size_text(size)} that its allocation has: share memory of several "
                "allocations one by one"
            )
        described = Descriptor(Mechanism.PHYSICAL, offset=span.address - base, size=span.nbytes, base_size=size)
        flags = Flags.LEASED if options.hold else 0
        if known.pool is not None:
            _check_pool_array(thing, options, known.handle_types)
            pool = exports.pool(known.pool)
            payload = exports.export_pointer(base)
            described = described._replace(mechanism=Mechanism.POOL_POINTER, flags=flags, payload=payload)
            return _Thing(described, device, ordered, pool=pool)
        if known.legacy_ipc:
            _check_block_array(thing, options, base, size)
            payload = opaque_bytes(session.call("cuIpcGetMemHandle", base))
            described = described._replace(mechanism=Mechanism.LEGACY, flags=flags, payload=payload)
            return _Thing(described, device, ordered)
        memory = PhysicalMemory.at(base, driver=driver)
        _check_mapped_array(thing, options, memory, span.address - base + span.nbytes)
        described = described._replace(origin=secrets.token_bytes(16))
        return _share_chunks(thing, exports, [memory], ordered, options, described)


def _check_pool_array(thing: object, options: _Options, handle_types: MemHandleType) -> None:
    if options.handle_type == _FABRIC:
        raise ValueError(f"{thing!r} is memory of a pool, and cannot be shared so: {NO_FABRIC_POOLS}")
    if not handle_types & POSIX:
        raise ValueError(
            f"{thing!r} is memory of a pool that was not made for sharing: have the library allocate from a "
            "pool with handle_types=POSIX_FILE_DESCRIPTOR (MemoryPool.make_current), or copy it to such a pool"
        )


def _check_block_array(thing: object, options: _Options, base: int, size: int) -> None:
    if options.handle_type is not None:
        raise ValueError(f"{thing!r} is memory of cuMemAlloc, which is shared without a handle type: leave it out")
    if not options.expose_block and (base % _LEGACY_BLOCK or size % _LEGACY_BLOCK):
        raise ValueError(
            f"{thing!r} is not alone in its blocks of 2 MiB: an importer could read the rest of them. Share it "
            "with expose_block=True if it may, or copy it to a pool or to memory of whole blocks"
        )


def _check_mapped_array(thing: object, options: _Options, memory: PhysicalMemory, end: int) -> None:
    kind = _handle_type([memory], options)
    if not memory.properties.requested_handle_types & kind:
        raise ValueError(
            f"{thing!r} is mapped memory that was not made for sharing: create it with handle type {kind.name}, or "
            "copy it to a pool with handle types, alone or under a CachingAllocator (memory of an ExpandableCache or a "
            "PageArena cannot have them)"
        )
    if end > memory.nbytes:
        raise ValueError(f"{thing!r} lies in several chunks of physical memory: share them one by one")


# Function for each class of shared things; the first match counts.
_KINDS: dict[type, Callable[[Any, _Options, Exports], _Thing]] = {
    Buffer: _share_buffer,
    MemoryPool: _share_pool,
    Foreign: _refuse_imported,
    TypedView: _share_array,
    BufferView: _share_view,
    PhysicalMemory: _share_physical,
    RangeView: _share_range,
    VirtualBuffer: _share_range,
    Event: _share_event,
}
