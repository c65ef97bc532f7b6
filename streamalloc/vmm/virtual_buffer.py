"""Memory at one address made of chunks: what growing, striped and evictable buffers have in common."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from typing_extensions import Self

from streamalloc.core.internal import (
    ClosedError,
    Closes,
    CopySide,
    CudaError,
    Device,
    Drawn,
    EvictedError,
    Html,
    InUseError,
    MemAccess,
    MemLocation,
    MemLocationType,
    Memory,
    Row,
    Session,
    Stream,
    StreamLike,
    as_stream,
    gauge,
    refuse_capture,
    session_of,
    size_text,
    undo_all,
    undoing,
)
from streamalloc.pool import MemoryPool
from streamalloc.pool.internal import reachable_from
from streamalloc.vmm.access import Access, Rights, rights_of, structs_of
from streamalloc.vmm.address_range import AddressRange, drawn, rights_text
from streamalloc.vmm.address_range import Mapping as MemoryMapping
from streamalloc.vmm.allocations import allocations_of
from streamalloc.vmm.backup import Backup, BackupRange, Copies, copying
from streamalloc.vmm.generic_handle import GenericAllocation
from streamalloc.vmm.physical_memory import MemorySpec, PhysicalMemory
from streamalloc.vmm.reservation import MappedBytes
from streamalloc.vmm.waiting import After, wait_for_users

__all__ = ["ChunkSpec", "Eviction", "VirtualBuffer", "copying_stream", "evict_all", "restore_all"]


class ChunkSpec(NamedTuple):
    """Physical memory that is to be: where in the range, how much, and of which kind."""

    offset: int
    nbytes: int
    spec: MemorySpec


class Eviction(NamedTuple):
    """The physical memory that a buffer has released, and the bytes that it had."""

    pieces: tuple[ChunkSpec, ...]
    saved: BackupRange | None
    """The bytes in a backup; None where they were given up."""

    @property
    def backup(self) -> Memory | None:
        """The copy of the bytes; None where they were given up."""
        return None if self.saved is None else self.saved.memory

    @property
    def own(self) -> bool:
        """Whether the copy was allocated for the buffer, and is freed once it is restored."""
        return self.saved is not None and self.saved.backup.own

    @property
    def nbytes(self) -> int:
        """How much physical memory was given back, in bytes."""
        return sum(piece.nbytes for piece in self.pieces)


class VirtualBuffer(Memory, Closes, Drawn):
    """A buffer whose address stays while the physical memory behind it comes and goes.

    It owns an :class:`AddressRange` and the memory that it maps there from the beginning on, without a hole. It can be
    *evicted*: the physical memory goes back to the driver, with or without a copy in host memory, and :meth:`restore`
    puts memory with the same bytes at the same addresses. :class:`GrowableBuffer` and :func:`stripe` make such buffers.

    Unmapping is not in stream order, see :class:`AddressRange`: :meth:`evict` and :meth:`close` take ``after``.
    An operation that fails leaves the buffer as it was, and can be tried again. Memory that the driver then refuses to
    release is released later. Not to be used from several threads at once.
    """

    __slots__ = (
        "__weakref__", "_device", "_evicted", "_given_stream", "_mapped", "_nbytes", "_plain", "_rights", "_structs",
        "range",
    )  # fmt: skip

    def _open(
        self, device: Device, capacity: int, alignment: int, address: int, rights: Rights, stream: StreamLike | None
    ) -> None:
        """Reserve the addresses; everything else is still to come."""
        self._device = device
        self._given_stream = None if stream is None else as_stream(stream, session_of(device))
        self._rights = rights
        self._structs = structs_of(rights)
        """What the driver takes for :attr:`_rights`."""
        self._mapped = 0
        self._nbytes = 0
        self._evicted: Eviction | None = None
        self._plain: tuple[Any, ...] | None = None
        """What the fast path of growing needs; None where the slow one has to look first."""
        self.range: AddressRange = AddressRange(capacity, alignment=alignment, address=address, driver=device.driver)
        """The addresses, which are the buffer's until it is closed."""
        self.range._owned = True

    @property
    def address(self) -> int:
        """Where the buffer begins; the same from the beginning to the end, also while it is evicted.

        Raises
        ------
        ClosedError
            The buffer was closed.
        """
        return self.range.address

    @property
    def nbytes(self) -> int:
        """Size in bytes, as it was asked for."""
        return self._nbytes

    @property
    def capacity(self) -> int:
        """How many bytes of addresses are reserved."""
        return self.range.nbytes

    @property
    def mapped_bytes(self) -> int:
        """How much physical memory is mapped, in bytes: :attr:`nbytes`, rounded up; 0 while it is evicted."""
        return 0 if self._evicted else self._mapped

    @property
    def mappings(self) -> tuple[MemoryMapping, ...]:
        """The chunks that it is made of, in the order of addresses; the buffer unmaps them."""
        return tuple(MemoryMapping(self.range, entry) for entry in self.range._node.touching(0, self._mapped))

    @property
    def device(self) -> Device:
        """The device that has the memory; of several, the first."""
        return self._device

    @property
    def stream(self) -> Stream:
        """The stream that orders operations which name no other; by default the device's default stream."""
        return self._device.default_stream if self._given_stream is None else self._given_stream

    @property
    def location(self) -> MemLocation:
        """Where the memory is; of several devices, the first."""
        return self._device.location

    @property
    def owner(self) -> object:
        """The address range."""
        return self.range

    @property
    def device_accessible(self) -> bool:
        """Whether the stream's device may use the memory."""
        return bool(self._rights.get(self.stream.device.location, MemAccess.NONE))

    @property
    def host_accessible(self) -> bool:
        """False: the host reaches no device memory."""
        return False

    @property
    def rights(self) -> Rights:
        """Who may use the memory; whatever is mapped later gets the same."""
        return dict(self._rights)

    @property
    def evicted(self) -> bool:
        """Whether the physical memory was given back."""
        return self._evicted is not None

    @property
    def eviction(self) -> Eviction | None:
        """What was given back, and the backup; None while the memory is there."""
        return self._evicted

    @property
    def closed(self) -> bool:
        """Whether the buffer was closed."""
        return self.range.closed

    def set_access(self, access: Access, flags: MemAccess = MemAccess.READWRITE, *, after: After = None) -> None:
        """Set who may use the memory, what is mapped now and what will be (``cuMemSetAccess``).

        Parameters as for :meth:`AddressRange.set_access`. While the buffer is evicted this takes effect when it is
        restored.
        """
        self._check_open()
        rights = device_rights(access, self._session, flags)
        self._plain = None
        self._trim(self._mapped)
        entries = self.range._node.table()
        if rights and entries:
            self.range._node.set_rights(entries, rights, after)
        kept = {where: allowed for where, allowed in {**self._rights, **rights}.items() if allowed}
        # Nothing is called between these two.
        self._structs, self._rights = structs_of(kept), kept

    def evict(
        self,
        backup: MemoryPool | Memory | None = None,
        *,
        stream: StreamLike | None = None,
        after: After = None,
        shared: bool = False,
    ) -> None:
        """Give the physical memory back; the addresses stay reserved. Blocks the host until the bytes are safe.

        Parameters
        ----------
        backup
            Where the bytes go: a pool in host memory that gives the device access (then the copy runs at the speed of
            pinned memory), which the copy is allocated from; or memory of the same size. None gives the bytes up.
        stream
            The stream that copies; default: the buffer's.
        after
            What must have passed before: events, streams, ``()`` for nothing; by default all work of the devices that
            have access.
        shared
            It was exported, and every importer has closed it, as have descriptors that hold its handles. Nobody checks
            that: memory that is open elsewhere is not free then, and keeps its bytes.

        Raises
        ------
        EvictedError
            It is evicted already.
        InUseError
            Some of the memory was exported (and ``shared`` is False), is mapped elsewhere too or bound to a multicast
            object: giving it back here would free nothing.
        OutOfMemoryError
            There is no memory for the backup. Nothing has changed.
        CaptureError
            ``stream`` is being captured, or another stream is and ``after`` is None.
        TypeError, ValueError
            ``backup`` is of another driver or size, or its pool gives the device no access.
        """
        entries = self._evictable(shared=shared)
        ordered = self._copying_stream(stream)
        wait_for_users(after, self._session, (entry.rights for entry in entries))
        saved = self._backup(backup, ordered)
        evict_all({self: entries}, {} if saved is None else {self: saved}, ordered)

    def _evictable(self, *, shared: bool) -> list[MappedBytes]:
        """What is mapped; raises where it cannot be given back."""
        self._check_open()
        if self._evicted:
            raise EvictedError(f"{self!r} is evicted already")
        self._trim(self._mapped)
        entries = list(self.range._node.table())
        allocations_of(self._session).work()
        for memory in (entry.memory for entry in entries if not entry.alone):
            if memory.exported and not shared:
                why = "importers would keep it, and the old bytes; shared=True says that all of them have closed it"
                raise InUseError(f"{memory!r} was exported: {why}")
            if memory.mapping_count > 1:
                raise InUseError(f"{memory!r} is mapped in {memory.mapping_count} places: unmap the others")
            if memory._state.bindings:
                raise InUseError(f"{memory!r} is bound to a multicast object, which would keep it: unbind it")
            if len(memory._state.handles) > 1:
                raise InUseError(f"{memory!r} is held by another PhysicalMemory, too: close that")
        return entries

    def _give_back(self, entries: Sequence[MappedBytes], saved: BackupRange | None) -> None:
        """Unmap the memory, whose bytes are in a backup; the handles stay, see :meth:`_take_back`."""
        chunks = tuple(ChunkSpec(entry.offset, entry.nbytes, _spec_of(entry)) for entry in entries)
        self._plain, self._evicted = None, Eviction(chunks, saved)
        self.range._node.unmap(entries)

    def _take_back(self, entries: Sequence[MappedBytes], stream: Stream) -> None:
        """Undo :meth:`_give_back`, wherever that has stopped. Where this fails the buffer is evicted."""
        evicted = self._evicted
        if evicted is None:
            return
        unmapped = [entry for entry in entries if entry.gone]
        if not all(entry.held for entry in unmapped):
            # Memory that only its mapping has held is gone.
            restore_all({self: evicted}, stream)
            stream.synchronize()
            return
        for entry in unmapped:
            self._map_again(entry)
        if unmapped:
            node = self.range._node
            node.grant(node.touching(0, self._mapped), self._rights, self._structs)
        self._evicted = None

    def _map_again(self, entry: MappedBytes) -> None:
        if entry._memory is not None:
            self.range._map(entry._memory, entry.offset)
            return
        node = self.range._node
        mapped = MappedBytes(node, entry.offset, entry.stop, {})
        try:
            node.add(mapped)
            # Nothing is called between these two.
            mapped._raw, entry._raw = entry._raw, None
            mapped.map(mapped._raw)
        except BaseException as first:
            mapped.undo(first)
            raise

    def restore(self, *, stream: StreamLike | None = None) -> None:
        """Map new physical memory at the same addresses, with the same access, and copy the backup into it.

        The copy is in stream order: use the bytes on ``stream`` (default: the buffer's) or after it. Without a backup
        the bytes are undefined.

        Raises
        ------
        EvictedError
            It is not evicted.
        OutOfMemoryError
            There is not enough memory. The buffer is evicted as before, and the backup whole.
        """
        self._check_open()
        evicted = self._evicted
        if evicted is None:
            raise EvictedError(f"{self!r} is not evicted")
        restore_all({self: evicted}, self._copying_stream(stream))

    def _copying_stream(self, stream: StreamLike | None) -> Stream:
        return copying_stream(self.stream if stream is None else stream, self._session)

    def _load(self, saved: BackupRange, made: Sequence[MappedBytes], copies: Copies, stream: Stream) -> None:
        """Queue the copy of the bytes into the memory that was made for them."""
        target = CopySide(self.address, self._nbytes, self._resident_on(), self)
        writer = stream.device.location
        allowed = self._rights.get(writer, MemAccess.NONE)
        if allowed == MemAccess.READWRITE:
            saved.load(target, copies)
            return
        # The device that copies needs to write meanwhile.
        self.range._node.grant(made, {writer: MemAccess.READWRITE})
        saved.load(target, copies)
        stream.synchronize()
        self.range._node.grant(made, {writer: allowed})

    def close(self, after: After = None) -> None:
        """Unmap and release everything, and give the addresses back, once ``after`` has passed. Idempotent."""
        self._plain = None
        if self.range.closed:
            return
        entries = list(self.range._node.table())
        if entries:
            wait_for_users(after, self._session, (entry.rights for entry in entries))
            self._cut(0, 0)
        evicted = self._evicted
        self._evicted = None
        self._mapped = self._nbytes = 0
        if evicted is not None and evicted.saved is not None:
            evicted.saved.leave()
        self.range._free()

    # -- for the kinds of such buffers -----------------------------------------------------------------------

    def _put(self, chunks: Sequence[ChunkSpec]) -> list[MappedBytes]:
        """Make, map and give access to chunks that lie side by side: all of them, or none."""
        if not chunks:
            return []
        start = chunks[0].offset
        self._trim(start)
        for watcher in self.range._node.allocations.watchers:
            watcher.to_be_mapped(self.range.address + start, sum(chunk.nbytes for chunk in chunks))
        with undoing(lambda: self._trim(start)):
            made = [self._put_one(chunk) for chunk in chunks]
            self.range._node.grant(made, self._rights, self._structs)
        return made

    def _put_one(self, chunk: ChunkSpec) -> MappedBytes:
        """Make and map a chunk, to which nobody has access yet."""
        node, spec = self.range._node, chunk.spec
        if spec is not node.maker:
            memory = spec.make(chunk.nbytes)
            # As long as the error is there nobody else releases it.
            with undoing(memory.close):
                return self.range._map(memory, chunk.offset)
        entry = MappedBytes(node, chunk.offset, chunk.offset + chunk.nbytes, {})
        try:
            node.add(entry)
            spec.obtain(entry, chunk.nbytes)
            entry.map(entry._raw)
        except BaseException as first:
            entry.undo(first)
            raise
        return entry

    def _map_all(self, at: int, memories: Iterable[GenericAllocation]) -> list[MappedBytes]:
        """Map memories side by side and give access to them."""
        made = []
        for memory in memories:
            made.append(self.range._map(memory, at))
            at = made[-1].stop
        self.range._node.grant(made, self._rights, self._structs)
        return made

    def _trim(self, start: int) -> None:
        """Unmap what is mapped from an offset on, where nothing is the buffer's: a call that failed has left it."""
        range = self.range
        table = range._node.table()
        if table and table[-1].stop > start:
            self._discard(range._node.touching(start, range.nbytes))

    def _clear(self) -> None:
        """Unmap what a restore that failed has left, after the work that may use it."""
        entries = list(self.range._node.table())
        if entries:
            wait_for_users(None, self._session, (entry.rights for entry in entries))
            self._discard(entries)

    def _cut(self, mapped: int, nbytes: int) -> None:
        """Keep ``mapped`` bytes, where a chunk ends. Where the driver refuses to unmap, the buffer is as it was."""
        before = self._mapped, self._nbytes
        self._mapped, self._nbytes = mapped, nbytes
        try:
            self._trim(mapped)
        except CudaError:
            self._mapped, self._nbytes = before
            raise

    def _discard(self, entries: Sequence[MappedBytes]) -> None:
        """Unmap memory, and release it: what the driver refuses to release is released later."""
        self._plain = None
        if entries:
            entries = self._reclaim(entries)
            self.range._node.unmap(entries)
            for entry in entries:
                entry.close()

    def _reclaim(self, entries: Sequence[MappedBytes]) -> Sequence[MappedBytes]:
        """What is this buffer's to unmap of mappings that others may have been offered."""
        return entries

    def _backup(self, backup: MemoryPool | Memory | None, stream: Stream) -> BackupRange | None:
        if backup is None:
            return None
        if not isinstance(backup, (MemoryPool, Memory)):
            raise TypeError(f"backup must be a MemoryPool or Memory, not {type(backup).__name__} ({backup!r})")
        if backup._session is not self._session:
            raise ValueError(f"backup {backup!r} belongs to another driver")
        if isinstance(backup, Memory):
            if backup.nbytes != self._nbytes:
                raise ValueError(f"backup has {size_text(backup.nbytes)} and the buffer {size_text(self._nbytes)}")
            if self.address - backup.nbytes < backup.address < self.address + self._nbytes:
                raise ValueError(f"backup={backup!r} is the buffer's own memory, which is given back")
            return Backup(backup, own=False).hold(0, self._nbytes)
        if not backup.location.on_host:
            raise ValueError(f"backup={backup!r} is not in host memory")
        if not reachable_from(backup, stream.device):
            how = "pool.set_access(device, MemAccess.READWRITE) gives it, so that copies run at full speed"
            raise ValueError(f"backup={backup!r} gives {stream.device!r} no access: {how}")
        return Backup.allocate(backup, self._nbytes, stream).hold(0, self._nbytes)

    def _check_open(self) -> None:
        if self.range.closed:
            raise ClosedError(f"{self!r} was closed")

    def _check_usable(self) -> None:
        if self.range.closed:
            self._check_open()
        if self._evicted is not None:
            raise EvictedError(f"{self!r} is evicted: restore() it before it is used")

    def _read_only(self, on_host: bool) -> bool:
        return self._rights.get(self.stream.device.location) == MemAccess.READ

    def _access_hint(self, stream: Stream) -> str:
        where = stream.device.location
        return f"{where} has no access: set_access(device) gives it" if not self._rights.get(where) else ""

    def _about(self) -> Iterator[Row]:
        self._check_open()
        yield from super()._about()
        state = Html("evicted") if self._evicted else gauge(self._mapped, self.capacity)
        yield "mapped", state
        yield "access", rights_text(self._rights)
        yield "chunks", len(self.range._node.table())
        yield "", drawn(self.range)

    @property
    def _session(self) -> Session:
        return self._device._session

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __repr__(self) -> str:
        range_ = getattr(self, "range", None)
        if range_ is None or range_.closed:
            return f"<{type(self).__name__}, closed>"
        state = "evicted" if self._evicted else f"{size_text(self._mapped)} mapped"
        room = f"{state} of {size_text(self.capacity)} [{range_.draw(16)}]"
        return f"<{type(self).__name__} of {size_text(self._nbytes)} at {self._at:#x}, {room}>"


def _spec_of(entry: MappedBytes) -> MemorySpec:
    memory = entry._memory
    spec: MemorySpec = memory._spec if isinstance(memory, PhysicalMemory) else entry.reservation.maker
    return spec


def evict_all(
    entries: Mapping[VirtualBuffer, Sequence[MappedBytes]], saved: Mapping[VirtualBuffer, BackupRange], stream: Stream
) -> None:
    """Copy the bytes of buffers to their ranges of backups, and release their memory: that of all, or of none.

    The memory is released when all of it is unmapped; until then it can be mapped again. A buffer that cannot be is
    evicted, with its backup.
    """
    with copying(stream) as copies:

        def undo() -> None:
            try:
                undo_all(functools.partial(buffer._take_back, several, stream) for buffer, several in entries.items())
            finally:
                undo_all(one.leave for buffer, one in saved.items() if buffer._evicted is None)

        with undoing(undo):
            for buffer, one in saved.items():
                one.save(buffer, copies)
            copies.synchronize()
            for buffer, several in entries.items():
                buffer._give_back(several, saved.get(buffer))
    for buffer, several in entries.items():
        for entry in several:
            entry.close()
        # Without its objects: with them handles stay open that were made to share it, which keep the memory.
        buffer.range._node.table()


def restore_all(evictions: Mapping[VirtualBuffer, Eviction], stream: Stream) -> None:
    """Map new memory for buffers that are evicted, and queue the copies of their bytes: for all, or for none."""
    made: dict[VirtualBuffer, list[MappedBytes]] = {}
    with copying(stream) as copies:

        def undo() -> None:
            # What is unmapped must not be written any more. What stays mapped is unmapped by the next attempt.
            copies.synchronize()
            undo_all(
                functools.partial(buffer._discard, several)
                for buffer, several in made.items()
                if buffer._evicted is not None
            )

        with undoing(undo):
            # First memory for all of them: that it runs out is what is likely to fail.
            for buffer, eviction in evictions.items():
                buffer._clear()
                made[buffer] = buffer._put(eviction.pieces)
            for buffer, eviction in evictions.items():
                if eviction.saved is not None:
                    buffer._load(eviction.saved, made[buffer], copies, stream)
            for buffer in evictions:
                buffer._evicted = None
        for eviction in evictions.values():
            if eviction.saved is not None:
                with contextlib.suppress(CudaError):
                    eviction.saved.leave()


def copying_stream(stream: StreamLike, session: Session) -> Stream:
    """A stream for what is evicted or restored."""
    ordered = as_stream(stream, session)
    refuse_capture(ordered, "cuMemUnmap", "memory cannot be evicted or restored in a capture")
    return ordered


def device_rights(
    access: Access, session: Session, flags: MemAccess = MemAccess.READWRITE, *, devices: Sequence[Device] = ()
) -> Rights:
    """The access to device memory that an argument means; ``devices`` may read and write."""
    rights = {device.location: MemAccess.READWRITE for device in devices} | rights_of(access, session, flags)
    for where, allowed in rights.items():
        if where.type is not MemLocationType.DEVICE and allowed:
            raise ValueError(f"access: {where} cannot be given access to device memory")
    return rights
