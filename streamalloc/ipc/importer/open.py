"""``open``: check what another process shared, and import it. ``receive``: the same, from a channel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from typing_extensions import TypeVar

from streamalloc.core.internal import (
    CaptureError,
    Device,
    Event,
    Fd,
    MemAccess,
    Session,
    StaleDescriptorError,
    Stream,
    StreamLike,
    as_stream,
    direct_handle,
    opened_event,
    refuse_capture,
    session_of,
    undoing,
)
from streamalloc.driver import Driver
from streamalloc.driver import default as default_driver
from streamalloc.driver.internal import opaque_struct
from streamalloc.ipc.importer.contents import Contents, await_on, is_ready, notify_listener, wait_until_ready
from streamalloc.ipc.importer.imported import (
    ImportedArray,
    ImportedBuffer,
    ImportedPool,
    ImportedRange,
    LegacySource,
    PoolSource,
    open_import,
)
from streamalloc.ipc.importer.importer import Handles, Importer, importer_of
from streamalloc.ipc.transport.channel import Channel
from streamalloc.ipc.wire.control_block import SLOTS
from streamalloc.ipc.wire.descriptor import HEAD_BYTES, NOWHERE, Descriptor, Flags, Head, Mechanism, Part
from streamalloc.vmm import PhysicalMemory
from streamalloc.vmm.internal import check_mappable

Imported: TypeAlias = "ImportedArray | ImportedBuffer | ImportedRange | ImportedPool | PhysicalMemory | Event"
"""The results of :func:`open`."""

T = TypeVar(
    "T",
    bound="ImportedArray | ImportedBuffer | ImportedRange | ImportedPool | PhysicalMemory | Event",
    default="ImportedBuffer | ImportedRange",
)

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

    For descriptors that :func:`send` has sent, use :func:`receive`. Here a message carries several::

        message = channel.receive()
        with ipc.open(message.data, message.handles, stream=stream) as buffer:
            buffer.copy_to(destination, stream)

    Parameters
    ----------
    data
        The descriptor's bytes.
    handles
        The handles that came with it, in the order of :attr:`Shared.fds`; this call closes them. They are needed once
        for each pool, control block and chunk of physical memory. Fabric handles are in the descriptor; without the
        control block, no stream waits for the contents, see :func:`share`.
    stream
        The stream that waits for the exporter's work, and orders operations which name no other. Other streams need a
        dependency on it. Default: the device's default stream; then every other stream waits as well before it uses the
        memory. The host waits before it returns :attr:`~Memory.address` or an interface without a stream, and before a
        use in a capture. Memory of another machine's device is opened for the device of this stream.
    driver
        The driver to use. Default: that of ``stream`` if that is a :class:`Stream`, else
        :func:`streamalloc.driver.default`.
    kind
        The expected class, one of those below. Default: any; type checkers assume mapped memory.

    Returns
    -------
    ImportedArray, ImportedBuffer, ImportedRange, PhysicalMemory, ImportedPool or Event
        By the kind of what was shared. An array for the result of :meth:`Memory.view_as`, unless ``kind`` is another
        class. For an allocation that is open here already, one more object for the same memory. For a growable buffer
        that has grown, the same object, grown.

    Raises
    ------
    ValueError
        The bytes are no descriptor, damaged, of an unknown version, or name a device or a size that does not exist.
    TypeError
        The descriptor is of another kind than ``kind``. Nothing was opened.
    StaleDescriptorError
        The memory was freed before it was opened.
    InvalidValueError, CudaError
        The driver refuses a handle.
    """
    session = session_of(stream) if type(stream) is Stream else None
    if session is None or (driver is not None and session.driver is not driver):
        session = Session.of(driver if driver is not None else default_driver())
    if not handles and type(data) is bytes and not session.forked and (kind is None or kind is ImportedBuffer):
        # A later descriptor of a pool: its head was decoded and its handles imported before.
        importer = importer_of(session)
        source = importer.sources.get(data[:HEAD_BYTES])
        part = None if source is None else source.head.part(data)
        if source is not None and part is not None:
            if importer.deferred.has_work():
                importer.deferred.work()
            return _open_part(source, part, stream)  # type: ignore[return-value]
    given = Handles(handles)
    try:
        return _open_first(session, data, given, stream, kind)  # type: ignore[return-value]
    finally:
        # Last, as the pipe among them keeps the allocation until it is open here.
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
    """The caller's; None: contents are awaited by every stream that uses the memory."""

    @property
    def ordered(self) -> Stream:
        """The caller's stream, else the device's default stream."""
        return self.device.default_stream if self.stream is None else _ordered(self.stream, self.importer.session)

    @property
    def announced(self) -> tuple[int, int, int]:
        """Slot, generation and the value of ``ready``."""
        return self.described.slot, self.described.generation, self.described.ready


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
    opened = opener(_Request(importer, described, bytes(data), handles, device, stream))
    if not is_array:
        return opened
    if not isinstance(opened, (ImportedBuffer, ImportedRange)):
        raise ValueError(f"the descriptor says that {opened!r} is an array")
    return ImportedArray(opened, np.dtype(described.dtype), described.shape)


def _ordered(stream: StreamLike, session: Session) -> Stream:
    """Return the caller's stream, which must not be captured."""
    ordered = as_stream(stream, session)
    if not ordered.is_default:
        # Default streams are checked only if they have to wait: other libraries may capture them.
        refuse_capture(ordered, "cuStreamWaitValue32", _NOT_IN_A_CAPTURE)
    return ordered


def _open_part(source: PoolSource | LegacySource, part: Part, stream: StreamLike | None) -> ImportedBuffer:
    """Open an allocation by its first descriptor or a later one."""
    if direct_handle(stream, source.session) is not None:  # type: ignore[arg-type]
        return open_import(source, part, stream)  # type: ignore[arg-type]
    ordered = source.default_stream if stream is None else _ordered(stream, source.session)
    if ordered.is_default and not is_ready(source.block, part.slot, part.ready):
        # Before the import, which could not be released on a captured stream.
        refuse_capture(ordered, "cuStreamWaitValue32", _NOT_IN_A_CAPTURE)
    opened = open_import(source, part, ordered)
    if stream is None and source.block is not None:
        contents = Contents(source.block, part.slot, part.generation, part.ready)
        opened._contents = None if contents.complete(opened) else contents
    return opened


def _open_pointer(request: _Request) -> ImportedBuffer:
    importer, described, data, handles, device, stream = request
    known = described.origin in importer.pools
    try:
        source = importer.pool_source(Head(data[:HEAD_BYTES]), described, handles, device)
        opened = _open_part(source, described.part, stream)
    except (StaleDescriptorError, CaptureError):
        raise
    except BaseException:
        if not known:
            # The handle that came along may have been another pool's.
            importer.pools.pop(described.origin, None)
        raise
    importer.keep(source)
    return opened


def _open_legacy(request: _Request) -> ImportedBuffer:
    importer, described, _, handles, device, stream = request
    return _open_part(importer.legacy_source(described, handles, device), described.part, stream)


def _open_pool(request: _Request) -> ImportedPool:
    importer, described, _, handles, device, _ = request
    pool = importer.pool(described, handles)
    opened = ImportedPool(pool, device)
    importer.watch(described, handles, pool)
    return opened


def _open_physical(request: _Request) -> PhysicalMemory | ImportedRange:
    importer, described, _, handles, _, stream = request
    chunks = described.chunks
    total = sum(chunk.nbytes for chunk in chunks)
    growable = bool(described.flags & Flags.GROWABLE)
    if not chunks or described.offset + described.size > total or (not growable and described.base_size != total):
        raise ValueError(
            f"the descriptor's {described.size} bytes at {described.offset} do not fit its {len(chunks)} chunks, "
            f"which have {total} bytes"
        )
    if described.origin != NOWHERE:
        return _open_range(request, total, growable)
    if len(chunks) != 1:
        raise ValueError(f"the descriptor is of one chunk of physical memory, and names {len(chunks)}")
    ordered = request.ordered
    memory = importer.memory(chunks[0], handles)
    with undoing(memory.close):
        check_mappable(memory)
        block = importer.block_of(described, handles)
        wait_until_ready(block, described.slot, described.ready, ordered)
    if stream is None and block is not None:
        # No stream is known that will use the memory, wherever that is mapped: the host waits.
        await_on(block, described.slot, described.ready, None)
    return memory


def _open_range(request: _Request, total: int, growable: bool) -> ImportedRange:
    importer, described, _, handles, device, stream = request
    chunks = described.chunks
    streams = [request.ordered]
    with contextlib.ExitStack() as undo:
        opened = importer.ranges.get(described.origin) if growable else None
        if opened is None or opened.closed:
            capacity = described.base_size if growable else total
            opened = ImportedRange(
                device, capacity, {device.location: MemAccess.READWRITE}, streams[0], described.offset
            )
            undo.enter_context(undoing(opened.close))
        elif opened.stream.handle != streams[0].handle:
            streams.append(opened.stream)
        # Without the handles: a chunk is the same by whichever handle it is shared.
        ids = [chunk[:2] for chunk in chunks]
        opened.set_chunks(ids, lambda index: importer.memory(chunks[index], handles), described.size)
        block = importer.block_of(described, handles)
        for ordered in streams:
            if block is not None and importer.session.listener is not None:
                notify_listener(opened, block, request.announced, ordered)
            wait_until_ready(block, described.slot, described.ready, ordered)
    if growable:
        importer.ranges[described.origin] = opened
    if stream is None and block is not None and opened.stream.is_default:
        # On another stream, it was opened before on that stream, which waits.
        contents = (*opened._contents, Contents(block, *request.announced))
        opened._contents = tuple(one for one in contents if not one.complete(opened))
    return opened


def _open_event(request: _Request) -> Event:
    return opened_event(request.device, opaque_struct("CUipcEventHandle", request.described.payload))


# Function and result by mechanism; for one chunk of physical memory by itself, the result is that memory.
_MECHANISMS: dict[Mechanism, tuple[Callable[[_Request], Imported], type[Imported]]] = {
    Mechanism.POOL: (_open_pool, ImportedPool),
    Mechanism.POOL_POINTER: (_open_pointer, ImportedBuffer),
    Mechanism.LEGACY: (_open_legacy, ImportedBuffer),
    Mechanism.PHYSICAL: (_open_physical, ImportedRange),
    Mechanism.EVENT: (_open_event, Event),
}
