"""The physical memory of a buffer, which is released and created again, and the steps that do this for several buffers.

:class:`Evictable` is the state of one buffer, with the acts that change it. The classes of steps do these acts for
several buffers, in the order of the lists in :mod:`streamalloc.vmm.sleep`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from streamalloc.core.errors import InUseError, attach, size_text, undo_all
from streamalloc.core.internal import CopySide, Device, Event, Fence, Memory, Stream, StreamLike
from streamalloc.core.properties import MemAccess, MemLocation
from streamalloc.core.session import session_of
from streamalloc.pool import MemoryPool
from streamalloc.vmm.access import After, Rights, wait_for_users
from streamalloc.vmm.address_range import OwnsRange
from streamalloc.vmm.claims import Claimable
from streamalloc.vmm.ownership import allocations_of
from streamalloc.vmm.physical_memory import MemorySpec, PhysicalMemory
from streamalloc.vmm.reservation import MappedBytes
from streamalloc.vmm.stores.blocks import Backup, Bytes, Move, Stored
from streamalloc.vmm.stores.disk import DiskTier, tier_of
from streamalloc.vmm.stores.host import HostTier, backup_in

T = TypeVar("T")

_BATCH = 64 << 20
"""Bytes of a batch of copies. The memory of a batch is unmapped after its copies, while later copies run."""


BackupPlace: TypeAlias = "MemoryPool | HostTier | DiskTier | Memory | Bytes | Backup | None"
"""Type of the argument ``backup``: where the bytes of one buffer are stored. A :class:`Backup` is memory or disk space
that a tier has reserved. None discards the bytes.
"""


class ChunkSpec(NamedTuple):
    """A chunk of physical memory to create: its offset in the buffer and its size in bytes, and its properties."""

    offset: int
    nbytes: int
    spec: MemorySpec


class Eviction(NamedTuple):
    """Physical memory that a buffer has released. :attr:`Evictable.eviction` has it after
    :meth:`VirtualBuffer.evict`.
    """

    chunks: tuple[ChunkSpec, ...]
    """Chunks that :meth:`VirtualBuffer.restore` creates again."""
    held: tuple[MappedBytes, ...] = ()
    """Unmapped memory that still has the bytes, because an eviction and its undo failed. :meth:`VirtualBuffer.restore`
    maps this memory again.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of physical memory that the buffer had, and has again once it is restored."""
        return sum(chunk.nbytes for chunk in self.chunks)


class Evictable(OwnsRange, Claimable):
    """Base class of :class:`VirtualBuffer`: its physical memory, which is mapped from the start of its range on, and
    its state. Each act that a step undoes is followed by its undo.
    """

    def _open(
        self, device: Device, capacity: int, rights: Rights, stream: StreamLike | None, location: MemLocation
    ) -> None:
        """Reserve ``capacity`` bytes of addresses (``cuMemAddressReserve``), and set all attributes. Raises
        AddressSpaceError, TypeError, ValueError.
        """
        self._location = location
        self._rights = rights
        """Permissions by location. While the buffer is frozen, only their read access is granted."""
        self._mapped = 0
        """Number of bytes from the start of :attr:`range` that count as mapped. An eviction does not change this
        number. A failed call may leave more memory mapped after these bytes, which the next growth or eviction
        releases.
        """
        self._nbytes = 0
        self.eviction: Eviction | None = None
        """The released memory; None while the buffer is mapped."""
        self._backup: Backup | None = None
        """The bytes of an evicted or frozen buffer outside of its memory; None if there are none."""
        self._frozen = False
        """Whether the buffer is frozen: read-only, so that its backup stays valid while it is mapped."""
        self._group: weakref.ref[Any] | None = None
        """The :class:`SleepGroup` that took the buffer last, for errors; None before the first."""
        self._reserve(device, capacity, stream)

    @property
    def nbytes(self) -> int:
        """Size in bytes, as requested; 0 if the buffer was closed."""
        return self._nbytes

    @property
    def rights(self) -> Rights:
        """Permissions by location, which memory added later also gets. While the buffer is frozen, only read access."""
        return dict(read_only(self._rights) if self._frozen else self._rights)

    @property
    def frozen(self) -> bool:
        """Whether :meth:`SleepGroup.freeze` has made the buffer read-only."""
        return self._frozen

    @property
    def evicted(self) -> bool:
        """Whether the buffer is evicted, so that its bytes cannot be used."""
        return self.eviction is not None

    def _begin_eviction(self, entries: Sequence[MappedBytes], backup: Backup | None) -> None:
        """Unmap ``entries``, which are all mappings of the buffer, and keep their handles open (``cuMemUnmap``). The
        buffer is then evicted, with the backup ``backup``; a frozen buffer keeps its own. Raises CudaError.
        """
        self.eviction = Eviction(tuple(ChunkSpec(entry.offset, entry.nbytes, _spec_of(entry)) for entry in entries))
        if not self._frozen:
            self._backup = backup
        self.range._node.unmap(entries)

    def _undo_eviction(self, entries: Sequence[MappedBytes]) -> None:
        """Undo :meth:`_begin_eviction`, also if that call was interrupted.

        If the driver refuses the undo, too, the buffer stays evicted without a backup, and :attr:`Eviction.held` keeps
        the memory with the bytes for a later :meth:`restore`. Raises CudaError.
        """
        if self.eviction is not None:
            self.eviction = self.eviction._replace(held=tuple(entries))
            if not self._frozen:
                self._backup = None
            for entry in entries:
                entry.map_again()
            self.range._node.grant(entries, self.rights)
            self.eviction = None

    def _load(self, backup: Backup, made: Sequence[MappedBytes], move: Move, stream: Stream) -> None:
        """Queue the copy of the bytes from ``backup`` to the new mappings ``made``, by ``move``, which queues on
        ``stream``. Raises CudaError.

        If the stream's device has no write access to the memory, it gets this permission until the copy is done, and
        the host waits for the copy.
        """
        target = CopySide(self.address, self._nbytes, self._resident_on(), self)
        writer = stream.device.location
        allowed = self._rights.get(writer, MemAccess.NONE)
        if allowed == MemAccess.READWRITE:
            backup.move(move, target)
            return
        # The device that copies needs write access during the copy.
        self.range._node.grant(made, {writer: MemAccess.READWRITE})
        with backup.stored.moving(stream, out=False) as alone:
            backup.move(alone, target)
        stream.synchronize()
        self.range._node.grant(made, {writer: allowed})

    def _create_chunks(self, chunks: Sequence[ChunkSpec]) -> list[MappedBytes]:
        """Create and map adjacent chunks and set their permissions (``cuMemCreate``, ``cuMemMap``, ``cuMemSetAccess``).
        If a call fails, no chunk is left. Returns the mappings. Raises OutOfMemoryError, CudaError.
        """
        if not chunks:
            return []
        start, node = chunks[0].offset, self.range._node
        # A failed call may have left memory mapped here, and the driver refuses to map other memory there.
        self._release_from(start)
        node.allocations.work()
        for watcher in node.allocations.watchers:
            watcher.to_be_mapped(self.range.address + start, sum(chunk.nbytes for chunk in chunks))
        made = [MappedBytes(node, one.offset, one.offset + one.nbytes, {}, one.spec) for one in chunks]
        return node.map(made, self._rights)

    def _release_from(self, start: int) -> None:
        """Unmap and release all memory from the offset ``start`` (bytes) on, also memory that a failed call has left
        mapped. Raises CudaError.
        """
        node = self.range._node
        entries = node.touching(start, node.nbytes)
        node.unmap(entries)
        for entry in entries:
            entry.release_handle()

    def _reserve_backup(self, backup: BackupPlace, stream: Stream) -> Backup | None:
        if backup is None or isinstance(backup, Backup):
            return backup
        if isinstance(backup, np.ndarray):
            if not (backup.flags.c_contiguous and backup.flags.writeable and backup.nbytes == self._nbytes):
                need = f"a writable, contiguous array of {size_text(self._nbytes)} is needed"
                raise ValueError(f"backup is an array of {size_text(backup.nbytes)}: {need}")
            return backup_in(backup.reshape(-1).view(np.uint8), self._session)
        if not isinstance(backup, Memory):
            tier = tier_of(backup)
            return tier.hold([self._nbytes], stream)[0] if self._nbytes else None
        if session_of(backup) is not self._session:
            raise ValueError(f"backup {backup!r} belongs to another driver")
        if backup.nbytes != self._nbytes:
            raise ValueError(f"backup has {size_text(backup.nbytes)} and the buffer {size_text(self._nbytes)}")
        if self.address - backup.nbytes < backup.address < self.address + self._nbytes:
            raise ValueError(f"backup={backup!r} is the buffer's own memory, which is released")
        return backup_in(backup, self._session)

    def _replace_backup(self, backup: Backup | None) -> None:
        """Make ``backup`` the buffer's backup, in place of the previous one or of :attr:`Eviction.held`."""
        previous, eviction = self._backup, self.eviction
        self._backup = backup
        if eviction is not None:
            self.eviction = eviction._replace(held=())
            for entry in eviction.held:
                entry.release_handle()
        if previous is not None:
            previous.drop()

    def _make_read_only(self) -> None:
        """Make the memory read-only (``cuMemSetAccess``). :meth:`_make_writable` undoes it. Raises CudaError."""
        self.range._node.set_rights(list(self.range._node.table()), read_only(self._rights), ())

    def _make_writable(self) -> None:
        """Make the buffer writable (``cuMemSetAccess``). :meth:`_freeze_again` undoes it. Raises CudaError."""
        # First, because this step and its undo may fail: a writable buffer must not count as frozen.
        self._frozen = False
        self.range._node.grant(list(self.range._node.table()), self._rights)

    def _freeze_again(self) -> None:
        self._make_read_only()
        self._frozen = True

    def _check_thawed(self) -> None:
        """Raise InUseError if the buffer is frozen."""
        if self._frozen:
            raise InUseError(f"{self!r} is frozen: {self._thaw_remedy()} first")

    def _tag(self) -> str | None:
        """Return the tag in the group that took the buffer last; None if this group was closed or dropped, or the
        buffer has left it.
        """
        group = None if self._group is None else self._group()
        tag: str | None = None if group is None else group._members.get(self)
        return tag

    def _thaw_remedy(self) -> str:
        tag = self._tag()
        return "add() it to a SleepGroup and thaw() it there" if tag is None else f"group.thaw({tag!r})"

    def _wake_remedy(self) -> str:
        tag = self._tag()
        return "restore() it" if tag is None else f"group.wake({tag!r}), or restore() it alone,"


def _spec_of(entry: MappedBytes) -> MemorySpec:
    memory = entry._memory
    spec: MemorySpec = memory._spec if isinstance(memory, PhysicalMemory) else entry.spec
    return spec


Step: TypeAlias = "Callable[[], object] | tuple[Callable[[], object], Callable[[], object]]"
"""A step: a function that does it; or a function that does it and a function that undoes it. If the first raises, the
second is called, too, so an undo must check what was done.
"""


def run_steps(*steps: Step, last: Callable[[], T]) -> T:
    """Do the steps in order, then ``last``, and return its result. If a step raises, undo this step and the steps
    before it, the last step first, and raise the error. All undos are called, also after one has failed; their errors
    are attached to the first error. ``last`` cannot be undone.
    """
    undos: list[Callable[[], object]] = []
    try:
        for step in steps:
            act, *undo = step if isinstance(step, tuple) else (step,)
            undos += undo
            act()
    except BaseException as first:
        for one in reversed(undos):
            try:
                one()
            except Exception as later:
                attach(first, later)
        raise
    return last()


Tags: TypeAlias = Mapping[Any, str]
"""Buffers with their tags."""
Reserve: TypeAlias = "Callable[[Tags], Iterator[tuple[Any, Backup | None]]]"
"""Function that reserves memory or disk space for the bytes of buffers, which it gets with their tags. It yields
buffers with their backups; a buffer is left out or comes with None if its bytes are not kept.
"""


class BackupSteps:
    """The steps that make backups of buffers, for :func:`run_steps`. Each method is followed by its undo."""

    def __init__(self, stream: Stream, reserve: Reserve, after: After) -> None:
        self.stream: Stream = stream
        """Stream of the copies."""
        self._reserve = reserve
        self._after = after
        self._tags: Tags = {}
        """The buffers that need a backup, with their tags. :meth:`wait` sets them."""
        self.backups: dict[Evictable, Backup] = {}
        """The new backups."""
        self._batches: list[tuple[list[Evictable], Event]] = []
        """Buffers that are copied in sequence, and the event after their copies. Together the buffers have at least
        ``_BATCH`` bytes, except in a last batch.
        """

    def wait(self, tags: Tags) -> None:
        """Choose the buffers, and have the host wait for the users of their memory. No undo is needed. Errors as for
        :func:`~streamalloc.vmm.access.wait`.
        """
        self._tags = tags
        wait_for_users(self._after, session_of(self.stream), [buffer.rights for buffer in tags])

    def reserve(self) -> None:
        """Reserve memory or disk space for the bytes. Raises the errors of :data:`Reserve`."""
        self.backups.update((buffer, one) for buffer, one in self._reserve(self._tags) if one is not None)

    def undo_reserve(self) -> None:
        """Undo :meth:`reserve`. The room is reused only after the copies that :meth:`copy` has queued."""
        for backup in self.backups.values():
            backup.drop()

    def copy(self) -> None:
        """Queue the copies of the buffers to their backups, and complete the backups (:meth:`Stored.seal`). The host
        waits for copies to disk. No undo is needed, because the buffers do not change. Raises OSError,
        OutOfMemoryError, CudaError.
        """
        batch: list[Evictable] = []
        # The buffers are grouped by store: one `moving` block copies a whole group. A store on disk has its own staging
        # memory, and its block ends when the copies through that memory are done, before the next block begins.
        for stored, several in itertools.groupby(self.backups.items(), lambda item: item[1].stored):
            with stored.moving(self.stream, out=True) as move:
                for buffer, backup in several:
                    backup.move(move, CopySide.of(buffer, session_of(buffer)))
                    batch.append(buffer)
                    if sum(copied.nbytes for copied in batch) >= _BATCH:
                        self._batches.append((batch, self.stream.record()))
                        batch = []
        for stored in {backup.stored for backup in self.backups.values()}:
            stored.seal(self.stream)
        if batch:
            self._batches.append((batch, self.stream.record()))


class EvictSteps(BackupSteps):
    """The steps of an eviction of one or several buffers, for :func:`run_steps`. Each method is followed by its undo.

    :meth:`release_all` is the last step and has no undo: another thread or process could take the released memory at
    once.
    """

    def __init__(self, stream: Stream, reserve: Reserve, after: After, *, shared: bool = False) -> None:
        super().__init__(stream, reserve, after)
        self._shared = shared
        self.entries: dict[Evictable, list[MappedBytes]] = {}
        """Mappings of the buffers that are to be unmapped."""

    def wait(self, tags: Tags) -> None:
        """As :meth:`BackupSteps.wait`. Only mapped buffers will be unmapped; frozen buffers need no backup. Errors as
        for :meth:`VirtualBuffer.evict`.
        """
        allocations_of(session_of(self.stream)).work()  # Objects that were dropped are no other users.
        self._tags = {buffer: tag for buffer, tag in tags.items() if not buffer.frozen}
        self.entries = {buffer: self._evictable(buffer) for buffer in tags if not buffer.evicted}
        rights = (entry.rights for several in self.entries.values() for entry in several)
        wait_for_users(self._after, session_of(self.stream), rights)

    def _evictable(self, buffer: Evictable) -> list[MappedBytes]:
        """Return all mappings of a buffer, each with an open handle of its memory. Raises InUseError if the memory has
        other users, so that it would not be freed; if the memory is shared, other processes do not count.
        """
        buffer._release_from(buffer._mapped)
        entries = list(buffer.range._node.table())
        for memory in (entry.memory for entry in entries if not entry.alone):
            if memory.exported and not self._shared:
                why = "importers would keep it, and the old bytes; shared=True says that all of them have closed it"
                raise InUseError(f"{memory!r} was exported: {why}")
            if memory.mapping_count > 1:
                raise InUseError(f"{memory!r} is mapped in {memory.mapping_count} places: unmap the others")
            if memory._state.bindings:
                raise InUseError(f"{memory!r} is bound to a multicast object, which would keep it: unbind it")
            if len(memory._state.handles) > 1:
                raise InUseError(f"{memory!r} is held by another PhysicalMemory, too: close that")
        for entry in entries:
            entry.retain()
        return entries

    def unmap_all(self) -> None:
        """Unmap the memory of each buffer after its copy, while the copies of later buffers run. Raises CudaError."""
        for batch, copied in self._batches:
            copied.synchronize()
            for buffer in batch:
                buffer._begin_eviction(self.entries[buffer], self.backups[buffer])
        for buffer, entries in self.entries.items():
            if not buffer.evicted:
                buffer._begin_eviction(entries, self.backups.get(buffer))

    def map_all_again(self) -> None:
        """Undo :meth:`unmap_all`. Raises CudaError."""
        undo_all(
            functools.partial(buffer._undo_eviction, entries) for buffer, entries in reversed(self.entries.items())
        )

    def release_all(self) -> int:
        """Release the memory that was unmapped (``cuMemRelease``). Buffers that had no memory get their new backups.
        Returns the bytes released.
        """
        for buffer in self.backups.keys() - self.entries.keys():
            buffer._replace_backup(self.backups[buffer])
        for buffer, entries in self.entries.items():
            for entry in entries:
                entry.release_handle()
            # table() removes the released entries, and so drops their memory objects. As long as such an object exists,
            # the exporter keeps the file descriptors of its memory open, and an open descriptor keeps the memory.
            buffer.range._node.table()
        return sum(entry.nbytes for entries in self.entries.values() for entry in entries)


class RestoreSteps:
    """The steps of a restore of one or several buffers, for :func:`run_steps`. Each method is followed by its undo.

    After an undo all buffers are evicted as before. :meth:`drop_backups` is the last step and has no undo, because the
    room of a dropped backup could get other bytes.
    """

    def __init__(self, buffers: Iterable[Evictable], stream: Stream) -> None:
        self.evictions: dict[Evictable, Eviction] = {one: one.eviction for one in buffers if one.eviction}
        """The released memory of the buffers that are evicted."""
        self._stream = stream
        self._made: dict[Evictable, Sequence[MappedBytes]] = {}
        """The new mappings of each buffer."""

    def map_all(self) -> None:
        """Create and map memory, and queue the copies of the bytes. The first copies run while further memory is
        created. Raises OutOfMemoryError, OSError, DamagedBackupError, CudaError.
        """
        by_store: dict[Stored | None, list[Evictable]] = {}
        for buffer, eviction in self.evictions.items():
            if not eviction.held:
                by_store.setdefault(buffer._backup and buffer._backup.stored, []).append(buffer)
        try:
            for stored, buffers in by_store.items():
                with contextlib.nullcontext() if stored is None else stored.moving(self._stream, out=False) as move:
                    for buffer in buffers:
                        self._create(buffer, move)
        finally:
            self._note_copies()
        # The bytes of a buffer whose sleep failed, together with the undo, are still in its old memory.
        for buffer, eviction in self.evictions.items():
            if eviction.held:
                buffer._undo_eviction(eviction.held)

    def _create(self, buffer: Evictable, move: Move | None) -> None:
        left = buffer.range._node.table()
        if left:  # A restore failed, together with its undo. A hook may have queued work that uses this memory.
            wait_for_users(None, session_of(buffer), (entry.rights for entry in left))
        self._made[buffer] = buffer._create_chunks(self.evictions[buffer].chunks)
        if buffer._backup is not None and move is not None:
            buffer._load(buffer._backup, self._made[buffer], move, self._stream)

    def _note_copies(self) -> None:
        """Have a range that is dropped from now on wait for the copies."""
        # A function of its own: the traceback of an error would keep the fence as a local variable of `map_all`.
        copying = any(buffer._backup for buffer in self._made)
        copies = Fence(session_of(self._stream), [self._stream] if copying else ())
        for buffer in self._made:
            buffer.range._node.copies = copies

    def undo_map_all(self) -> None:
        """Undo :meth:`map_all` and :meth:`protect`. The host first waits for the copies, which may still read a backup
        and write the new memory, and for the work of hooks. Raises CudaError.
        """
        undo_all(functools.partial(self._undo_map, buffer) for buffer in reversed(self.evictions))

    def _undo_map(self, buffer: Evictable) -> None:
        buffer.eviction = eviction = self.evictions[buffer]
        entries = [entry for entry in eviction.held or self._made.get(buffer, ()) if not entry.gone]
        if entries:
            self._stream.synchronize()
            wait_for_users(None, session_of(buffer), (entry.rights for entry in entries))
        buffer.range._node.unmap(entries)
        for entry in () if eviction.held else entries:
            entry.release_handle()

    def protect(self) -> None:
        """Make frozen buffers read-only, after the copies, which write to them. Raises CudaError."""
        for buffer, entries in self._made.items():
            if buffer.frozen:
                self._stream.synchronize()
                buffer.range._node.grant(entries, buffer.rights)

    def set_awake(self) -> None:
        """Let the restored buffers be used."""
        for buffer in self.evictions:
            buffer.eviction = None

    def set_asleep(self) -> None:
        """Undo :meth:`set_awake`."""
        for buffer, eviction in self.evictions.items():
            buffer.eviction = eviction

    def drop_backups(self) -> int:
        """Drop the backups, except those of frozen buffers. Returns the restored bytes."""
        drop_unneeded(self.evictions)
        return sum(eviction.nbytes for eviction in self.evictions.values())


def read_only(rights: Rights) -> Rights:
    """Return ``rights`` as a frozen buffer has them: read access for all locations that have access."""
    return {where: min(allowed, MemAccess.READ) for where, allowed in rights.items()}


def drop_unneeded(buffers: Iterable[Evictable]) -> None:
    """Drop the backups of those ``buffers`` that are neither evicted nor frozen, and so do not need them."""
    for buffer in buffers:
        if not (buffer.evicted or buffer.frozen):
            buffer._replace_backup(None)
