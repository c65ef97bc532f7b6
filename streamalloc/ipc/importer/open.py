"""``open`` checks what another process shared, and imports it. ``receive`` does the same from a channel.

:class:`Importer` has the handles, control blocks and imports of this process. When it imports a new one, it releases
those of ended processes and closed pools.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from typing_extensions import TypeVar

from streamalloc.core.errors import CaptureError, StaleDescriptorError, undoing, warn
from streamalloc.core.internal import (
    Device,
    Event,
    Fd,
    Stream,
    StreamLike,
    as_stream,
    direct_handle,
    opened_event,
    raw_handle,
    refuse_capture,
)
from streamalloc.core.properties import MemAccess
from streamalloc.core.session import PerDriver, Session, session_of
from streamalloc.driver import Driver
from streamalloc.driver import default as default_driver
from streamalloc.driver.internal import cuda, opaque_struct
from streamalloc.ipc.importer.imported import (
    Announcement,
    HostLease,
    ImportedArray,
    ImportedBuffer,
    ImportedPool,
    ImportedRange,
    Imports,
    LegacySource,
    OnceIdle,
    PoolHandle,
    PoolSource,
)
from streamalloc.ipc.relay import ImporterRelay
from streamalloc.ipc.transport.channel import Channel
from streamalloc.ipc.transport.handle_server import fetch, published
from streamalloc.ipc.wire.control_block import SLOTS, ControlBlock
from streamalloc.ipc.wire.descriptor import (
    FABRIC,
    HEADER_BYTES,
    NOWHERE,
    AllocationFields,
    Chunk,
    Descriptor,
    Flags,
    Mechanism,
    PoolHeader,
)
from streamalloc.vmm import PhysicalMemory
from streamalloc.vmm.internal import check_mappable, import_memory

_POSIX_MEMBER = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_BAD_HANDLE = "the descriptor that came along is no handle of this kind of memory, or of another machine"


class DriverVersionWarning(UserWarning):
    """Exporter and importer run different drivers, which NVIDIA does not support.

    :func:`open` gives it.
    """


class Handles:
    """The handles that came with a message. :meth:`close` closes those that are left."""

    __slots__ = ("_by_id", "_given", "endpoint")

    endpoint: bytes
    """16 bytes, address of the handle server; zeros without one."""

    def __init__(self, handles: Sequence[Fd]) -> None:
        # Handles that this process has shared stay its own: without them it could not share the memory again.
        ours = {id(reference()) for reference in published.valuerefs()} if handles else ()
        self._given = [Fd(os.dup(fd.fileno())) if id(fd) in ours else fd for fd in handles]
        self._by_id: dict[bytes, Fd] = {}

    def identify(self, described: Descriptor) -> None:
        """Assign ids to the handles, in the descriptor's order."""
        self.endpoint = described.endpoint
        if not self._given:
            return
        ids = [chunk.id for chunk in described.chunks if not chunk.fabric]
        if described.mechanism in (Mechanism.POOL, Mechanism.POOL_POINTER):
            ids = [described.origin]
        if described.control_block != NOWHERE:
            ids.append(described.control_block)
        ids = list(dict.fromkeys(ids))
        # The pipe that holds the allocation comes last. It is closed with the remaining handles.
        pipes = int(bool(described.flags & Flags.HELD) and not described.hold)
        if pipes and len(self._given) == 1:
            return
        if len(self._given) != len(ids) + pipes:
            raise ValueError(f"the descriptor needs {len(ids) + pipes} handles, and {len(self._given)} came along")
        self._by_id = dict(zip(ids, self._given, strict=False))
        self._given = self._given[len(ids) :]

    def take(self, name: bytes) -> Fd:
        """Return a handle by its id. If it did not come with the message, fetch it from the exporter. The caller closes
        it.
        """
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
        """As :meth:`take`; None if the handle did not come and the exporter is on another machine or has ended."""
        if name in self._by_id or self.endpoint != NOWHERE:
            with contextlib.suppress(ConnectionError):
                return self.take(name)
        return None

    def close(self) -> None:
        """Close the handles that were not taken."""
        for fd in (*self._given, *self._by_id.values()):
            fd.close()


class Importer(Imports):
    """The imports of one process through one driver, found by the ids in descriptors."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.version: int = int(session.call("cuDriverGetVersion"))
        self.blocks: dict[bytes, ControlBlock] = {}
        self.pools: dict[bytes, PoolHandle] = {}
        """Imported pools by id."""
        self.sources: dict[bytes, PoolSource] = {}
        """Sources by descriptor header, after the first open: a header that is known is not decoded again."""
        self.ranges: weakref.WeakValueDictionary[bytes, ImportedRange] = weakref.WeakValueDictionary()
        self._devices: dict[bytes, Device] = {}

    def device(self, described: Descriptor, stream: StreamLike | None) -> Device:
        """Return the device that owns the memory; for memory of another machine, the stream's device."""
        uuid = described.device
        found = self.device_of(uuid)
        if found is not None:
            return found
        if described.handle_type == FABRIC and stream is not None:
            return as_stream(stream, self.session).device
        why = "this process does not see: is it hidden by CUDA_VISIBLE_DEVICES?"
        if described.handle_type == FABRIC:
            why = "is not of this machine, or hidden from this process: pass stream=, whose device is to have access"
        raise ValueError(f"the memory is on device {uuid.hex()}, which {why}")

    def device_of(self, uuid: bytes) -> Device | None:
        """Return the device with a UUID of 16 bytes; None if it is not visible to this process."""
        if uuid not in self._devices:
            self._devices.update((device.uuid.bytes, device) for device in Device.all(self.session.driver))
        return self._devices.get(uuid)

    def check_version(self, version: int) -> None:
        """Warn if the exporter runs another driver than this process."""
        if version != self.version:
            warn(
                f"the exporter runs a driver for CUDA {version // 1000}.{version % 1000 // 10}, this process one for "
                f"{self.version // 1000}.{self.version % 1000 // 10}: NVIDIA supports equal ones only",
                DriverVersionWarning,
            )

    def block_of(self, described: Descriptor, handles: Handles, device: Device) -> ControlBlock | None:
        """Return the exporter's control block, or a replica if it is on another machine; None without one."""
        name = described.control_block
        if name == NOWHERE:
            return None
        if described.handle_type != FABRIC:
            return self.control_block(name, handles.take)
        known = self.blocks.get(name)
        relay = None if known is None else known.relay
        if relay is not None and relay.ended and relay.handle != described.payload:
            # The exporter has closed that relay and made another.
            self.blocks.pop(name, None)
            self.deferred.submit(OnceIdle(self.session, relay.close))
        block = self.control_block(name, handles.take_local)
        if block is None:
            with self.session.relaxed():
                relay = ImporterRelay(described.payload, name, device)
            # No lock is held during the wait for the exporter, so another thread may have made one.
            block = self.blocks.setdefault(name, relay.block)
            if block is not relay.block:
                relay.close()
        return block

    def control_block(self, name: bytes, take: Callable[[bytes], Fd | None]) -> ControlBlock | None:
        """Return the control block with an id. ``take`` returns its file for the first time, or None if there is
        none.
        """
        block = self.blocks.get(name)
        if block is not None:
            return block
        self._release_ended()
        fd = take(name)
        if fd is None:
            return None
        try:
            with self.lock:
                block = self.blocks.get(name)
                if block is None:
                    block = self.blocks[name] = ControlBlock.attach(self.session, fd, name)
            return block
        finally:
            if block is None or block.fd is not fd:
                fd.close()

    def pool(self, described: Descriptor, handles: Handles) -> PoolHandle:
        """Return an imported pool. It stays in :attr:`pools`, because later descriptors may come without the handle."""
        pool = self.pools.get(described.origin)
        if pool is None:
            self._release_ended()
            with handles.take(described.origin) as fd, self.lock:
                # Under the lock: otherwise a concurrent destruction of the same pool would make the driver's handle
                # invalid.
                pool = self.pools.get(described.origin)
                if pool is None:
                    new = PoolHandle(self)
                    name = "cuMemPoolImportFromShareableHandle"
                    new._raw = self.session.call(name, fd.fileno(), _POSIX_MEMBER, 0, hint=_BAD_HANDLE)
                    pool = self.pools[described.origin] = self.handles.setdefault(int(new._raw), new)
        return pool

    def _release_ended(self) -> None:
        """Release the control blocks and pools of exporters that have ended, and closed pools."""
        with self.lock:
            self._release_unused()

    def _release_unused(self) -> None:
        sources = [held.source for held in self.allocations.values()]
        used: set[object] = {source.block for source in sources}
        used |= {source.handle for source in sources if isinstance(source, PoolSource)}
        for number, pool in list(self.handles.items()):
            if pool not in used and not pool.users and pool.ended():
                # No descriptor finds the pool from here on.
                for name in [name for name, known in self.pools.items() if known is pool]:
                    del self.pools[name]
                for data in [data for data, source in self.sources.items() if source.handle is pool]:
                    del self.sources[data]
                self.deferred.submit(pool)
                del self.handles[number]
        for name, block in list(self.blocks.items()):
            if block not in used and not block.exporter_alive() and block.idle():
                del self.blocks[name]
                close = block.close if block.relay is None else block.relay.close
                self.deferred.submit(OnceIdle(self.session, close))

    def memory(self, chunk: Chunk, handles: Handles) -> PhysicalMemory:
        """Import physical memory. Each import has a separate handle."""
        if chunk.fabric:
            return import_memory(self.session, chunk.fabric, chunk.nbytes)
        with handles.take(chunk.id) as fd:
            return import_memory(self.session, fd, chunk.nbytes)


importer_of: PerDriver[Importer] = PerDriver(Importer)
"""The imports of this process through a driver."""


Imported: TypeAlias = "ImportedArray | ImportedBuffer | ImportedRange | ImportedPool | PhysicalMemory | Event"
"""The results of :func:`open`."""

T = TypeVar("T", bound="Imported", default="ImportedBuffer | ImportedRange")

_NOT_IN_A_CAPTURE = "memory of other processes cannot be opened in a capture"


def open(
    data: bytes,
    handles: Sequence[Fd] = (),
    *,
    stream: StreamLike | None = None,
    driver: Driver | None = None,
    kind: type[T] | None = None,
) -> T:
    """Open memory, a pool or an event that another process shared.

    Use :func:`receive` for messages of :func:`send`. Open a message of your own like this::

        message = channel.receive()
        with ipc.open(message.data, message.handles, stream=stream) as buffer:
            buffer.copy_to(destination, stream)

    Parameters
    ----------
    data
        The descriptor's bytes.
    handles
        The handles that came with the descriptor, in the order of :attr:`Shared.fds`. This call closes them, except
        those that this process has shared. They are needed once for each pool, control block and chunk of physical
        memory. Fabric handles are in the descriptor. Without the control block, this process waits for the exporter's
        answer through the relay, see :func:`share`.
    stream
        The stream that waits for the exporter's work, and of operations that name no other. Other streams need a
        dependency on it. Default: the device's default stream; then every other stream also waits before it uses the
        memory. The host waits before it returns :attr:`~Memory.address` or an interface without a stream, and before a
        use in a capture. Memory of another machine is opened for the device of this stream. For pools and events, the
        stream only names the driver.
    driver
        The driver to use. Default: that of ``stream`` if that is a :class:`Stream`, else
        :func:`streamalloc.driver.default`.
    kind
        The expected class, one of those below. Default: any class; type checkers assume mapped memory.

    Returns
    -------
    ImportedArray, ImportedBuffer, ImportedRange, PhysicalMemory, ImportedPool or Event
        According to what was shared. A result of :meth:`Memory.view_as` gives an array, unless ``kind`` is another
        class. An allocation that is open already gives a second object for the same memory. A growable buffer that has
        grown gives the same object, grown.

    Raises
    ------
    ValueError
        The bytes are not a descriptor, are damaged, have an unknown version, or name a device or a size that does not
        exist.
    TypeError
        The descriptor is of another kind than ``kind``. Nothing was opened.
    StaleDescriptorError
        The memory was freed before it was opened.
    ConnectionError
        The exporter has ended, or does not answer from its machine.
    InvalidValueError, CudaError
        The driver refuses a handle.
    """
    session = session_of(stream) if isinstance(stream, Stream) else None
    if session is None or (driver is not None and session.driver is not driver):
        session = Session.of(driver if driver is not None else default_driver())
    if not handles and type(data) is bytes and not session.forked and (kind is None or kind is ImportedBuffer):
        # A later descriptor of a known pool: its header is decoded and its handles are imported.
        importer = importer_of(session)
        source = importer.sources.get(data[:HEADER_BYTES])
        fields = None if source is None else source.header.decode(data)
        if source is not None and fields is not None and not importer.deferred.captures:
            if importer.deferred.has_work():
                importer.deferred.work()
            return _open_allocation(source, fields, stream)  # type: ignore[return-value]
    given = Handles(handles)
    try:
        return _open_first(session, data, given, stream, kind)  # type: ignore[return-value]
    finally:
        # Last, because a pipe among them holds the allocation until it is open here.
        given.close()


def receive(
    channel: Channel,
    *,
    stream: StreamLike | None = None,
    timeout: float | None = None,
    driver: Driver | None = None,
    kind: type[T] | None = None,
) -> T:
    """Receive a message of :func:`send`, and open its memory; see :func:`open` and ``channel.receive``.

    ::

        with ipc.receive(channel, stream=stream, timeout=10) as buffer:
            buffer.copy_to(destination, stream)
    """
    message = channel.receive(timeout=timeout)
    return open(message.data, message.handles, stream=stream, driver=driver, kind=kind)


class _Request(NamedTuple):
    """One call of :func:`open` whose descriptor was decoded."""

    importer: Importer
    described: Descriptor
    data: bytes
    handles: Handles
    device: Device
    stream: StreamLike | None
    """The caller's stream; None: every using stream waits."""

    def ordered(self) -> Stream:
        """Return the caller's stream, else the device's default stream."""
        return self.device.default_stream if self.stream is None else _ordered(self.stream, self.importer.session)

    def control_block(self) -> ControlBlock | None:
        """Map the exporter's control block, or make a replica of it; None without one."""
        return self.importer.block_of(self.described, self.handles, self.device)

    def announcement(self) -> Announcement | None:
        """Return the announcement of the contents; None without a control block."""
        described, block = self.described, self.control_block()
        return None if block is None else Announcement(block, described.slot, described.generation, described.ready)

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """A ``with`` block that opens what was shared, after which the hold ends. :class:`ImportedBuffer` ends its hold
        itself, because later descriptors of its pool make no request.
        """
        hold = self.described.hold
        block = self.control_block() if hold else None
        if block is not None:
            block.mark("hold", hold)  # raises if there is no such mark
        try:
            yield
        finally:
            if block is not None:
                block.end_hold(hold)


def _open_first(
    session: Session, data: bytes, handles: Handles, stream: StreamLike | None, kind: type[object] | None
) -> Imported:
    """Decode a descriptor, import its handles, and open it."""
    session.check_process()
    importer = importer_of(session)
    if importer.deferred.has_work():
        importer.deferred.work()
    described = Descriptor.from_bytes(data)
    opener, result = _MECHANISMS[described.mechanism]
    if described.mechanism is Mechanism.PHYSICAL and described.origin == NOWHERE:
        result = PhysicalMemory
    is_array = bool(described.flags & Flags.ARRAY) and kind in (None, ImportedArray)
    if is_array:
        result = ImportedArray
    if kind is not None and not issubclass(result, kind):
        raise TypeError(f"kind={kind.__name__}: what was shared is opened as {result.__name__}")
    handles.identify(described)
    device = importer.device(described, stream)
    importer.check_version(described.driver_version)
    if described.slot >= SLOTS:
        raise ValueError(f"the descriptor's slot {described.slot} does not exist: a control block has {SLOTS}")
    if stream is not None:
        stream = _ordered(stream, session)
    request = _Request(importer, described, bytes(data), handles, device, stream)
    with importer.deferred.beside_captures():
        block = request.control_block() if described.handle_type == FABRIC else None
        if block is not None:
            # Once for the call: the exporter may be on another machine, and has to answer.
            block.sync(device)
        opened = opener(request)
    if not is_array:
        return opened
    if not isinstance(opened, (ImportedBuffer, ImportedRange)):
        raise ValueError(f"the descriptor says that {opened!r} is an array")
    return ImportedArray(opened, np.dtype(described.dtype), described.shape)


def _ordered(stream: StreamLike, session: Session) -> Stream:
    """Return the caller's stream; it must not be captured."""
    if direct_handle(stream, session) is not None:
        return stream  # type: ignore[return-value]
    ordered = as_stream(stream, session)
    if not ordered.is_default:
        # Default streams are checked only before a wait, because other libraries may capture them.
        refuse_capture(ordered, "cuStreamWaitValue32", _NOT_IN_A_CAPTURE)
    return ordered


def _open_allocation(
    source: PoolSource | LegacySource, fields: AllocationFields, stream: StreamLike | None
) -> ImportedBuffer:
    """Open an allocation by its first descriptor or a later one."""
    if direct_handle(stream, source.session) is not None:
        return ImportedBuffer(source, fields, stream)  # type: ignore[arg-type]
    ordered = source.default_stream if stream is None else _ordered(stream, source.session)
    announced: Announcement | None = None
    if source.block is not None:
        announced = Announcement(source.block, fields.slot, fields.generation, fields.ready)
        if ordered.is_default and not announced.written:
            # Before the import, because it could not be released on a captured stream.
            refuse_capture(ordered, "cuStreamWaitValue32", _NOT_IN_A_CAPTURE)
    opened = ImportedBuffer(source, fields, ordered)
    if stream is None and announced is not None and not announced.seen(opened):
        opened._contents = announced
    return opened


def _open_pointer(request: _Request) -> ImportedBuffer:
    importer, described = request.importer, request.described
    known = described.origin in importer.pools
    try:
        pool = importer.pool(described, request.handles)
        block = request.control_block()
        pool.watch(block, described.pool_mark)
        source = PoolSource(PoolHeader(request.data), pool, request.device, block)
        importer.start_thread()
        opened = _open_allocation(source, AllocationFields.of(described), request.stream)
    except (StaleDescriptorError, CaptureError):
        raise
    except BaseException:
        if not known:
            # The handle that came with the message may belong to another pool.
            importer.pools.pop(described.origin, None)
        raise
    if source.leased and source.header.plain and source.header.driver_version == importer.version:
        importer.sources[source.header.data] = source
    return opened


def _open_legacy(request: _Request) -> ImportedBuffer:
    source = LegacySource(request.importer, request.device, request.control_block(), request.described.flags)
    request.importer.start_thread()
    return _open_allocation(source, AllocationFields.of(request.described), request.stream)


def _open_pool(request: _Request) -> ImportedPool:
    pool = request.importer.pool(request.described, request.handles)
    opened = ImportedPool(pool, request.device)
    with request.arriving():
        pool.watch(request.control_block(), request.described.pool_mark)
    return opened


def _open_physical(request: _Request) -> PhysicalMemory | ImportedRange:
    with request.arriving():
        return _open_chunks(request)


def _open_chunks(request: _Request) -> PhysicalMemory | ImportedRange:
    described, chunks = request.described, request.described.chunks
    total = sum(chunk.nbytes for chunk in chunks)
    growable = bool(described.flags & Flags.GROWABLE)
    if not chunks or described.offset + described.size > total or (not growable and described.base_size != total):
        raise ValueError(
            f"the descriptor's {described.size} bytes at {described.offset} do not fit its {len(chunks)} chunks, "
            f"which have {total} bytes"
        )
    return _open_range(request, total, growable) if described.origin != NOWHERE else _open_chunk(request)


def _open_chunk(request: _Request) -> PhysicalMemory:
    chunks = request.described.chunks
    if len(chunks) != 1:
        raise ValueError(f"the descriptor is of one chunk of physical memory, and names {len(chunks)}")
    ordered = request.ordered()
    memory = request.importer.memory(chunks[0], request.handles)
    with undoing(memory.close):
        check_mappable(memory)
        announced = request.announcement()
        if announced is not None:
            announced.precede(ordered)
    if request.stream is None and announced is not None:
        # The using stream is unknown, so the host waits.
        announced.wait(None)
    return memory


def _open_range(request: _Request, total: int, growable: bool) -> ImportedRange:
    importer, described, device = request.importer, request.described, request.device
    streams = [request.ordered()]
    with contextlib.ExitStack() as undo:
        lease: HostLease | None = None
        if described.flags & Flags.LEASED:
            block = request.control_block()
            if block is None:
                raise ValueError("the descriptor is of physical memory, and has a lease without a control block")
            importer.start_thread()
            words = block.importer_words(described.slot, block.importer)
            lease = HostLease(importer, block, words, described.generation, device)
            undo.enter_context(undoing(lease.end))
        opened = importer.ranges.get(described.origin) if growable else None
        if opened is None or opened.closed:
            capacity = described.base_size if growable else total
            rights = {device.location: MemAccess.READWRITE}
            opened = ImportedRange(device, capacity, rights, streams[0], described.offset)
            undo.enter_context(undoing(opened.close))
        elif int(raw_handle(opened.stream)) != int(raw_handle(streams[0])):
            streams.append(opened.stream)
        # Compare without handles: the same chunk may be shared by different handles.
        ids = [chunk[:2] for chunk in described.chunks]
        opened.set_chunks(ids, lambda index: importer.memory(described.chunks[index], request.handles), described.size)
        announced = request.announcement()
        if announced is not None:
            for ordered in streams:
                announced.notify_listener(opened, ordered)
                announced.precede(ordered)
    if lease is not None:
        opened._take_lease(lease)
    if growable:
        importer.ranges[described.origin] = opened
    if announced is not None:
        opened._announced = announced
        if request.stream is None and opened.stream.is_default:
            # If it was opened before on another stream, that stream waits.
            opened._contents = tuple(one for one in (*opened._contents, announced) if not one.seen(opened))
    return opened


def _open_event(request: _Request) -> Event:
    with request.arriving():
        return opened_event(request.device, opaque_struct("CUipcEventHandle", request.described.payload))


# Function and result class by mechanism. A single chunk of physical memory gives the memory itself.
_MECHANISMS: dict[Mechanism, tuple[Callable[[_Request], Imported], type[Imported]]] = {
    Mechanism.POOL: (_open_pool, ImportedPool),
    Mechanism.POOL_POINTER: (_open_pointer, ImportedBuffer),
    Mechanism.LEGACY: (_open_legacy, ImportedBuffer),
    Mechanism.PHYSICAL: (_open_physical, ImportedRange),
    Mechanism.EVENT: (_open_event, Event),
}
