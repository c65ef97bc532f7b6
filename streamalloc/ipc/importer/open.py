"""``open`` checks what another process shared, and imports it. ``receive`` does the same from a channel.

An open of an allocation or a range has four steps. The open is counted in the lease (:mod:`.imports`); the driver
imports the memory; the stream waits for the contents; the hold of the descriptor ends, also after an error
(:meth:`Received.close`). Until the open is counted, only the hold keeps the exporter from freeing the memory. If the
hold ended earlier, the import could find other memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from typing_extensions import TypeVar

from streamalloc.core.errors import CaptureError, StaleDescriptorError, undoing
from streamalloc.core.internal import Device, Event, Fd, Stream, StreamLike, as_stream, session_for
from streamalloc.core.properties import MemAccess, checked_type
from streamalloc.core.session import Session, session_of
from streamalloc.driver import Driver
from streamalloc.ipc.importer.imported import Announcement, ImportedArray, ImportedBuffer, ImportedPool, ImportedRange
from streamalloc.ipc.importer.imports import Import, Imports, LeaseUse, PoolImport, imports_of
from streamalloc.ipc.transport.channel import Channel
from streamalloc.ipc.transport.handle_server import fetch, published
from streamalloc.ipc.wire.control_block import ControlBlock, Mark
from streamalloc.ipc.wire.descriptor import FABRIC, NOWHERE, Descriptor, Flags, Mechanism
from streamalloc.vmm import PhysicalMemory
from streamalloc.vmm.internal import check_mappable

Imported: TypeAlias = "ImportedArray | ImportedBuffer | ImportedRange | ImportedPool | PhysicalMemory | Event"
"""Classes of the objects that :func:`open` returns."""

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
        The file descriptors that came with the descriptor, in the order of :attr:`Shared.fds`. This call closes them,
        except those that this process has shared itself. The handle of each pool, control block and chunk of physical
        memory is needed once. Fabric handles are in the descriptor.
    stream
        The stream that waits for the exporter's work. Operations that name no stream run on it too. Other streams need
        a dependency on this stream. Default: the device's default stream; then every other stream also waits before it
        uses the memory. The host waits before it returns :attr:`~Memory.address` or an interface without a stream, and
        before a use in a capture. Memory of another machine is opened for the device of this stream, and nobody waits
        for its contents. For pools and events, the stream only names the driver.
    driver
        The driver to use. Default: that of ``stream`` if that is a :class:`Stream`, else
        :func:`streamalloc.driver.default`.
    kind
        The expected class, one of the classes below. Default: any class; type checkers then assume an
        :class:`ImportedBuffer` or an :class:`ImportedRange`.

    Returns
    -------
    ImportedArray, ImportedBuffer, ImportedRange, PhysicalMemory, ImportedPool or Event
        The class depends on what was shared. A shared result of :meth:`Memory.view_as` is opened as an array, unless
        ``kind`` is another class. An allocation that is open already gives a second object for the same memory. A
        growable buffer that has grown gives the same object, grown.

    Raises
    ------
    ValueError
        The bytes are not a descriptor, are damaged, have an unknown version, or name a device or a size that does not
        exist. Or ``stream`` belongs to another driver.
    TypeError
        The descriptor is of another kind than ``kind``, ``data`` is not bytes, or ``stream`` is not a stream. Nothing
        was opened.
    StaleDescriptorError
        The memory was freed before it was opened.
    ConnectionError, TimeoutError
        A handle had to be fetched from the exporter, which has ended, or did not answer within 10 s.
    CaptureError
        ``stream`` is being captured.
    ClosedError
        ``stream`` was closed.
    CudaError
        The driver refuses a handle.
    """
    session = session_of(stream) if driver is None and isinstance(stream, Stream) else session_for(None, driver)
    received = Received(session, handles, data, stream)
    try:
        described = received.described
        opener, result = _MECHANISMS[described.mechanism]
        if described.mechanism is Mechanism.PHYSICAL and described.origin == NOWHERE:
            result = PhysicalMemory
        is_array = bool(described.flags & Flags.ARRAY) and kind in (None, ImportedArray)
        if is_array:
            result = ImportedArray
        if kind is not None and not issubclass(result, kind):
            raise TypeError(f"kind={kind.__name__}: what was shared is opened as {result.__name__}")
        with session.beside_captures():
            received.attach()
            opened = opener(received)
        if not is_array:
            return opened  # type: ignore[return-value]
        if not isinstance(opened, (ImportedBuffer, ImportedRange)):
            raise ValueError(f"the descriptor says that {opened!r} is an array")
        return ImportedArray(opened, np.dtype(described.dtype), described.shape)  # type: ignore[return-value]
    finally:
        received.close()


def receive(
    channel: Channel,
    *,
    stream: StreamLike | None = None,
    timeout: float | None = None,
    driver: Driver | None = None,
    kind: type[T] | None = None,
) -> T:
    """Receive a message of :func:`send`, and open its memory, pool or event. ::

        with ipc.receive(channel, stream=stream, timeout=10) as buffer:
            buffer.copy_to(destination, stream)

    Parameters
    ----------
    channel
        The channel to the exporter.
    timeout
        Seconds to wait for the message; None: the channel's.
    stream, driver, kind
        As for :func:`open`.

    Raises
    ------
    TimeoutError, PeerGoneError, ProtocolError, ClosedError
        As for ``channel.receive``.
    ValueError, TypeError, StaleDescriptorError, ConnectionError, TimeoutError, CaptureError, ClosedError, CudaError
        As for :func:`open`.
    """
    message = checked_type("channel", channel, Channel).receive(timeout=timeout)
    return open(message.data, message.handles, stream=stream, driver=driver, kind=kind)


class Received:
    """Arguments of one call of :func:`open`, decoded and checked. :meth:`attach` finds the exporter's words.
    :meth:`close` ends the hold of the descriptor.
    """

    def __init__(self, session: Session, handles: Sequence[Fd], data: bytes, stream: StreamLike | None) -> None:
        self._given = _taken_over(handles) if handles else []
        self._by_id: dict[bytes, Fd] = {}
        self._mark: Mark | None = None
        """The mark of the hold. None before :meth:`attach`, if there is no hold, or if it has a pipe."""
        self.block: ControlBlock | None = None
        """The exporter's control block. None before :meth:`attach`, if there is none, or if it is on another machine.
        """
        self.announced: Announcement | None = None
        """The announcement of the contents; None if there is no control block."""
        try:
            session.check_process()
            self.imports: Imports = imports_of(session)
            self.imports.deferred.work()
            self.described: Descriptor = Descriptor.from_bytes(data)
            self._identify()
            if self.described.driver_version != self.imports.version:
                self.imports.warn_of_version(self.described.driver_version)
            self.device: Device = self.imports.device_for(self.described, stream)
            self.stream: Stream = self.device.default_stream if stream is None else _waiting_stream(stream, session)
            """The stream that waits for the contents: the caller's, or else the device's default stream."""
            self.any_stream: bool = stream is None
            """Whether the caller named no stream: then each stream that uses the memory waits for the contents, too."""
        except BaseException:
            self.close()
            raise

    def _identify(self) -> None:
        """Record which of the received handles has which id of the descriptor (:meth:`Descriptor.handle_ids`), so that
        :meth:`take` finds the handle. Raises ValueError if some handles came, but not as many as there are ids. A
        message may have no handles, or only the pipe of a hold.
        """
        if not self._given:
            return
        ids = self.described.handle_ids()
        pipes = int(bool(self.described.flags & Flags.HELD) and not self.described.hold)
        if pipes and len(self._given) == 1:
            return  # Only the pipe came with this message: a channel carries each of the other handles only once.
        if len(self._given) != len(ids) + pipes:
            raise ValueError(f"the descriptor needs {len(ids) + pipes} handles, and {len(self._given)} came along")
        self._by_id = dict(zip(ids, self._given, strict=False))
        self._given = self._given[len(ids) :]

    def take(self, name: bytes) -> Fd:
        """Return the handle with the id ``name`` (16 bytes); the caller closes it. A handle that did not come with the
        message is fetched from the exporter's process. Raises ValueError if the exporter has no handle server, and the
        errors of :func:`fetch`.
        """
        fd = self._by_id.pop(name, None)
        if fd is not None:
            return fd
        if self.described.endpoint == NOWHERE:
            raise ValueError(
                "a handle that the descriptor needs did not come along: send it with streamalloc.ipc.send, or pass "
                "handles=shared.fds"
            )
        return fetch(self.described.endpoint, name)

    def attach(self) -> None:
        """Map the exporter's control block, if the descriptor names one and it is on this machine, and find the
        announcement and the mark of the hold in it. Raises the errors of :meth:`Imports.control_block`; ValueError if
        there is no such slot or mark.
        """
        imports, described = self.imports, self.described
        if described.control_block == NOWHERE:
            return
        try:
            name = described.control_block
            self.block = block = imports.blocks.get(name) or imports.control_block(name, self.take)
        except ConnectionError:
            if described.handle_type == FABRIC and imports.device_of(described.device) is None:
                return
            raise
        words = block.slots.get(described.slot) or block.exporter_words(described.slot)
        self.announced = Announcement(block, words, described.generation, described.ready)
        if described.hold:
            self._mark = block.mark("hold", described.hold)

    def close(self) -> None:
        """End the hold (:class:`~streamalloc.ipc.exporter.exports.Hold`): set its mark to 0, or close its pipe with the
        other handles that were not taken. By now the allocation is open here, or cannot be opened.
        """
        if self._mark is not None:
            self._mark.clear()
        for fd in (*self._given, *self._by_id.values()):
            fd.close()


def _taken_over(handles: Sequence[Fd]) -> list[Fd]:
    """Return the handles of a message for this process to close. Handles that this process has shared itself are
    replaced by duplicates: the originals must stay open, because the process may share the memory again.
    """
    ours = {id(reference()) for reference in published.valuerefs()}
    given = [checked_type("handles", fd, Fd) for fd in handles]
    return [Fd(os.dup(fd.fileno())) if id(fd) in ours else fd for fd in given]


def _waiting_stream(stream: StreamLike, session: Session) -> Stream:
    """Return the stream of ``stream`` that will wait for the contents. Raises CaptureError if the stream is being
    captured; TypeError, ValueError, ClosedError.

    A default stream, which other libraries may capture, is checked later, and only if it must wait: before an
    allocation is imported (:func:`_open_allocation`), and before the wait.
    """
    ordered = as_stream(stream, session)
    if not ordered.is_default:
        ordered.refuse_capture("cuStreamWaitValue32", _NOT_IN_A_CAPTURE)
    return ordered


def _open_allocation(received: Received, pool: PoolImport | None = None) -> ImportedBuffer:
    ordered, announced = received.stream, received.announced
    if announced is not None and ordered.is_default and not announced.written:
        # The capture is refused before the import, because a captured stream could not release an import again.
        ordered.refuse_capture("cuStreamWaitValue32", _NOT_IN_A_CAPTURE)
    new = Import(received.imports, pool, received.device, received.block, received.described)
    opened = ImportedBuffer(new, received.described, ordered, announced)
    if received.any_stream and announced is not None and not announced.seen(opened):
        opened._contents = (announced,)
    return opened


def _open_pointer(received: Received) -> ImportedBuffer:
    imports, described = received.imports, received.described
    known = imports.pools.get(described.origin)
    try:
        pool = known or imports.pool(described.origin, received.take)
        pool.watch(received.block, described.pool_mark)
        return _open_allocation(received, pool)
    except (StaleDescriptorError, CaptureError):
        raise
    except BaseException:
        if known is None:
            # The handle may be of another pool than the descriptor says, so no later open may use this import.
            imports.pools.pop(described.origin, None)
        raise


def _open_pool(received: Received) -> ImportedPool:
    pool = received.imports.pool(received.described.origin, received.take)
    opened = ImportedPool(pool, received.device)
    pool.watch(received.block, received.described.pool_mark)
    return opened


def _open_physical(received: Received) -> PhysicalMemory | ImportedRange:
    described, chunks = received.described, received.described.chunks
    total = sum(chunk.nbytes for chunk in chunks)
    growable = bool(described.flags & Flags.GROWABLE)
    if not chunks or described.offset + described.size > total or (not growable and described.base_size != total):
        raise ValueError(
            f"the descriptor's {described.size} bytes at {described.offset} do not fit its {len(chunks)} chunks, "
            f"which have {total} bytes"
        )
    return _open_range(received, total, growable) if described.origin != NOWHERE else _open_chunk(received)


def _open_chunk(received: Received) -> PhysicalMemory:
    chunks = received.described.chunks
    if len(chunks) != 1:
        raise ValueError(f"the descriptor is of one chunk of physical memory, and names {len(chunks)}")
    ordered = received.stream
    memory = received.imports.memory(chunks[0], received.take)
    with undoing(memory.close):
        check_mappable(memory)
        announced = received.announced
        if announced is not None:
            announced.precede(ordered)
    if received.any_stream and announced is not None:
        # The stream that will use the memory is unknown, so the host waits.
        announced.wait(None)
    return memory


def _open_range(received: Received, total: int, growable: bool) -> ImportedRange:
    imports, described, device = received.imports, received.described, received.device
    streams = [received.stream]
    with contextlib.ExitStack() as undo:
        lease: LeaseUse | None = None
        if described.flags & Flags.LEASED and received.block is not None:
            imports.start_thread()
            lease = LeaseUse(imports, received.block, described.slot, described.generation)
            undo.enter_context(undoing(lease.take_back))
            lease.begin()
        opened = imports.ranges.get(described.origin) if growable else None
        if opened is None or opened.closed:
            capacity = described.base_size if growable else total
            rights = {device.location: MemAccess.READWRITE}
            opened = ImportedRange(device, capacity, rights, streams[0], described.offset)
            undo.enter_context(undoing(opened.close))
        elif int(opened.stream.checked_raw()) != int(streams[0].checked_raw()):
            streams.append(opened.stream)
        # The ids of chunks are compared, and not their driver handles, because two different handles may name the same
        # chunk.
        ids = [chunk[:2] for chunk in described.chunks]
        opened.set_chunks(ids, lambda index: imports.memory(described.chunks[index], received.take), described.size)
        announced = received.announced
        if announced is not None:
            for ordered in streams:
                announced.precede(ordered, opened)
    if lease is not None:
        opened._replace_lease(lease)
    if growable:
        imports.ranges[described.origin] = opened
    if announced is not None:
        opened._announced = announced
        if received.any_stream and opened.stream.is_default:
            # If the range was opened before on another stream, that stream waits for the contents.
            opened._contents = tuple(one for one in (*opened._contents, announced) if not one.seen(opened))
    return opened


def _open_event(received: Received) -> Event:
    return Event.from_handle(received.described.payload, received.device)


# For each mechanism: the function that opens it, and the class of the result. There are two exceptions: an array is
# opened as :class:`ImportedArray`, and memory of one chunk without an origin as :class:`PhysicalMemory`.
_MECHANISMS: dict[Mechanism, tuple[Callable[[Received], Imported], type[Imported]]] = {
    Mechanism.POOL: (_open_pool, ImportedPool),
    Mechanism.POOL_POINTER: (_open_pointer, ImportedBuffer),
    Mechanism.LEGACY: (_open_allocation, ImportedBuffer),
    Mechanism.PHYSICAL: (_open_physical, ImportedRange),
    Mechanism.EVENT: (_open_event, Event),
}
