"""``open``: what another process shared, checked and mapped here. ``receive``: that, out of a channel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from typing_extensions import TypeVar

from streamalloc.core.internal import (
    CaptureError,
    Device,
    Event,
    Fd,
    MemAccess,
    Memory,
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
    work,
)
from streamalloc.driver import Driver
from streamalloc.driver import default as default_driver
from streamalloc.driver.internal import opaque_struct
from streamalloc.ipc.sharing.control_block import SLOTS, ControlBlock
from streamalloc.ipc.sharing.descriptor import HEAD_BYTES, NOWHERE, Descriptor, Flags, Mechanism, Part, part_of
from streamalloc.ipc.sharing.handles import Handles
from streamalloc.ipc.sharing.importer import Importer, importer_of
from streamalloc.ipc.sharing.imports import (
    Contents,
    ImportedArray,
    ImportedBuffer,
    ImportedRange,
    LegacyWay,
    PoolWay,
    await_on,
    is_ready,
    open_import,
    say_opened,
    wait_until_ready,
)
from streamalloc.ipc.sharing.pools import ImportedPool
from streamalloc.ipc.transport.channel import Channel
from streamalloc.vmm import PhysicalMemory
from streamalloc.vmm.internal import check_mappable

__all__ = ["Imported", "open", "receive"]

Imported: TypeAlias = "ImportedArray | ImportedBuffer | ImportedRange | ImportedPool | PhysicalMemory | Event"
"""What :func:`open` gives."""

T = TypeVar(
    "T",
    bound="ImportedArray | ImportedBuffer | ImportedRange | ImportedPool | PhysicalMemory | Event",
    default="ImportedBuffer | ImportedRange",
)


def open(
    data: bytes,
    handles: Sequence[Fd] = (),
    *,
    stream: StreamLike | None = None,
    driver: Driver | None = None,
    kind: type[T] | None = None,
) -> T:
    """Open what another process shared.

    Parameters
    ----------
    data
        The descriptor's bytes.
    handles
        The handles that came with it, in the order of :attr:`Shared.fds`; they are this call's from now on. Needed once
        for each pool, control block and chunk of physical memory. Fabric handles are in the descriptor; without the
        control block, no stream waits for the contents, see :func:`share`.
    stream
        The stream that orders operations which name no other, and waits for the exporter's work. Others need a
        dependency on it. Default: the device's default stream, and then every other stream waits as well before it uses
        the memory. Where the memory itself is asked for, by :attr:`~Memory.address` or an interface without a stream,
        or used in a capture, the host waits. Memory of another machine's device is for the device of this stream.
    driver
        The driver to use; default: that of ``stream`` where it is a :class:`Stream`, else the one that
        :func:`streamalloc.driver.default` names.
    kind
        The class of what is expected: one of those below. Default: any of them, of which type checkers assume one that
        is mapped memory.

    Returns
    -------
    ImportedArray, ImportedBuffer, ImportedRange, PhysicalMemory, ImportedPool or Event
        As what was shared: an array for what :meth:`Memory.view_as` made, unless ``kind`` is another. Of an allocation
        that is open here already, one more object for the same memory. A growable buffer that has grown is the same
        object, grown.

    Raises
    ------
    ValueError
        The bytes are no descriptor, damaged, of an unknown version, or name a device or a size that is not there.
    TypeError
        Something else than ``kind`` was shared. Nothing was opened.
    StaleDescriptorError
        The memory was freed before it was opened.
    InvalidValueError, CudaError
        The driver refuses a handle.
    """
    session = session_of(stream) if type(stream) is Stream else None
    if session is None or (driver is not None and session.driver is not driver):
        session = Session.of(driver if driver is not None else default_driver())
    if not handles and type(data) is bytes and not session.forked:
        # The fast path: an allocation of a pool of which one was opened before.
        importer = importer_of(session)
        way = importer.ways.get(data[:HEAD_BYTES])
        if way is not None and (kind is None or kind is ImportedBuffer):
            part = way.head.part(data)
            if part is not None:
                importer.deferred.work()
                if direct_handle(stream, session) is not None:  # type: ignore[arg-type]
                    return open_import(way, part, stream)  # type: ignore[arg-type, return-value]
                if stream is not None:
                    return _opened(way, part, _ordered(stream, session))  # type: ignore[return-value]
                return _for_any_stream(_opened(way, part, way.default_stream()), way.block, *part[:3])  # type: ignore[return-value]
    given = Handles(handles)
    try:
        session.check_process()
        work(session)
        importer = importer_of(session)
        described = Descriptor.from_bytes(data)
        opener, gives = _MECHANISMS[described.mechanism]
        if described.mechanism is Mechanism.PHYSICAL and described.origin == NOWHERE:
            gives = PhysicalMemory
        if described.flags & Flags.ARRAY and kind in (None, ImportedArray):
            gives = ImportedArray
        if kind is not None and not issubclass(gives, kind):
            raise TypeError(f"kind={kind.__name__}: what was shared is opened as {gives.__name__}")
        if handles:
            given.name(described)
        given.endpoint = described.endpoint
        device = importer.device(described, stream)
        ordered = _prepared(importer, described, device, stream)
        opened = opener(importer, described, device, ordered, given)
        if stream is None:
            block = importer.blocks.get(described.control_block)
            opened = _for_any_stream(opened, block, described.slot, described.generation, described.ready)
        return _as_shared(opened, described, kind)  # type: ignore[return-value]
    finally:
        # Also that by which a message holds the allocation: last of all.
        given.close()


def receive(
    channel: Channel,
    *,
    stream: StreamLike | None = None,
    timeout: float | None = None,
    driver: Driver | None = None,
    kind: type[T] | None = None,
) -> T:
    """Receive what :func:`send` sent, and open it; see :func:`open` and ``channel.receive``."""
    message = channel.receive(timeout=timeout)
    return open(message.data, message.handles, stream=stream, driver=driver, kind=kind)


def _prepared(importer: Importer, described: Descriptor, device: Device, stream: StreamLike | None) -> Stream:
    """What is the same for all mechanisms; the stream to use."""
    if described.driver_version != importer.version:
        importer.warn_of_version(described.driver_version)
    if described.slot >= SLOTS:
        raise ValueError(f"the descriptor's slot {described.slot} is none of its control block, which has {SLOTS}")
    return device.default_stream if stream is None else _ordered(stream, importer.session)


def _ordered(stream: StreamLike, session: Session) -> Stream:
    """The stream that a caller has named."""
    ordered = as_stream(stream, session)
    if not ordered.is_default:
        # Of default streams, which others may capture, it is asked where there is something to wait for.
        refuse_capture(ordered, "cuStreamWaitValue32", _NOT_IN_A_CAPTURE)
    return ordered


def _opened(way: PoolWay | LegacyWay, part: Part, stream: Stream) -> ImportedBuffer:
    """Open an allocation on any stream."""
    if stream.is_default and not is_ready(way.block, part.slot, part.ready):
        # Before anything is open here, which could not be closed on that stream.
        refuse_capture(stream, "cuStreamWaitValue32", _NOT_IN_A_CAPTURE)
    return open_import(way, part, stream)


def _is_there(opened: Memory, contents: Contents) -> bool:
    """Whether the host has seen the announcement of contents; the listener is notified of that."""
    there = contents.there
    if there and contents.block.session.listener is not None:
        say_opened(opened, contents.block, contents.announced, None)
    return there


def _for_any_stream(opened: Imported, block: ControlBlock | None, slot: int, generation: int, ready: int) -> Imported:
    """What was opened without a stream: on whichever it is used, that waits for the contents."""
    if block is None:
        return opened
    contents = Contents(block, slot, generation, ready)
    if isinstance(opened, ImportedBuffer):
        opened._contents = None if _is_there(opened, contents) else contents
    elif isinstance(opened, ImportedRange) and opened.stream.is_default:
        # Else it was opened on a stream before, which waits.
        opened._contents = tuple(one for one in (*opened._contents, contents) if not _is_there(opened, one))
    elif isinstance(opened, PhysicalMemory):
        # Nobody sees where it will be mapped.
        await_on(block, slot, ready, None)
    return opened


def _open_pool(
    importer: Importer, described: Descriptor, device: Device, stream: Stream, handles: Handles
) -> ImportedPool:
    pool = importer.pool(described, handles)
    opened = ImportedPool(pool, device)
    importer.noted(described, handles, pool)
    return opened


def _open_pointer(
    importer: Importer, described: Descriptor, device: Device, stream: Stream, handles: Handles
) -> ImportedBuffer:
    known = described.origin in importer.pools
    pool = importer.pool(described, handles)
    try:
        way = importer.way(described, handles, pool, device)
        opened = _opened(way, part_of(described), stream)
    except (StaleDescriptorError, CaptureError):
        raise
    except BaseException:
        if not known:
            # It may have been another pool's handle that came along.
            importer.pools.pop(described.origin, None)
        raise
    importer.keep(way)
    return opened


def _open_legacy(
    importer: Importer, described: Descriptor, device: Device, stream: Stream, handles: Handles
) -> ImportedBuffer:
    return _opened(importer.legacy_way(described, handles, device), part_of(described), stream)


def _as_shared(opened: Imported, described: Descriptor, kind: type[object] | None) -> Imported:
    """What was opened as the array that it was shared as."""
    if not described.flags & Flags.ARRAY or kind not in (None, ImportedArray):
        return opened
    if not isinstance(opened, (ImportedBuffer, ImportedRange)):
        raise ValueError(f"the descriptor says that {opened!r} is an array")
    return ImportedArray(opened, np.dtype(described.dtype), described.shape)


def _open_physical(
    importer: Importer, described: Descriptor, device: Device, stream: Stream, handles: Handles
) -> PhysicalMemory | ImportedRange:
    chunks = described.chunks
    total = sum(chunk.nbytes for chunk in chunks)
    growable = bool(described.flags & Flags.GROWABLE)
    if not chunks or described.offset + described.size > total or (not growable and described.base_size != total):
        raise ValueError(
            f"the descriptor's {described.size} bytes at {described.offset} do not fit its {len(chunks)} chunks, "
            f"which have {total} bytes"
        )
    opened: PhysicalMemory | ImportedRange | None
    single = described.origin == NOWHERE
    if single and len(chunks) != 1:
        raise ValueError(f"the descriptor is of one piece of memory, and names {len(chunks)}")
    streams = [stream]
    with contextlib.ExitStack() as undo:
        if single:
            opened = importer.memory(chunks[0], handles)
            undo.enter_context(undoing(opened.close))
            check_mappable(opened)
        else:
            opened = importer.ranges.get(described.origin) if growable else None
            if opened is None or opened.closed:
                capacity = described.base_size if growable else total
                rights = {device.location: MemAccess.READWRITE}
                opened = ImportedRange(device, capacity, rights, stream, described.offset)
                undo.enter_context(undoing(opened.close))
            elif opened.stream.handle != stream.handle:
                streams.append(opened.stream)
            # Whichever handles a chunk is shared by, it is the same.
            names = [chunk[:2] for chunk in chunks]
            opened.set_chunks(names, lambda place: importer.memory(chunks[place], handles), described.size)
        block = importer.block_of(described, handles)
        for ordered in streams:
            if block is not None and importer.session.listener is not None and isinstance(opened, ImportedRange):
                say_opened(opened, block, (described.slot, described.generation, described.ready), ordered)
            wait_until_ready(block, described.slot, described.ready, ordered)
    if growable and isinstance(opened, ImportedRange):
        importer.ranges[described.origin] = opened
    return opened


def _open_event(importer: Importer, described: Descriptor, device: Device, stream: Stream, handles: Handles) -> Event:
    handle = opaque_struct("CUipcEventHandle", described.payload)
    return opened_event(device, handle)


_NOT_IN_A_CAPTURE = "memory of other processes cannot be opened in a capture"

_Opener: TypeAlias = Callable[[Importer, Descriptor, Device, Stream, Handles], Imported]
# How each mechanism is opened, and what it gives; one chunk of physical memory by itself is that memory.
_MECHANISMS: dict[Mechanism, tuple[_Opener, type[Imported]]] = {
    Mechanism.POOL: (_open_pool, ImportedPool),
    Mechanism.POOL_POINTER: (_open_pointer, ImportedBuffer),
    Mechanism.LEGACY: (_open_legacy, ImportedBuffer),
    Mechanism.PHYSICAL: (_open_physical, ImportedRange),
    Mechanism.EVENT: (_open_event, Event),
}
