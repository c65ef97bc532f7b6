"""The steps of a sleep, a wake and a freeze, and the function that does steps and undoes them after an error.

The classes of steps change several buffers, in the order of the lists in :mod:`streamalloc.vmm.sleep`, by the acts of
:class:`Evictable` on one buffer.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from streamalloc.core.errors import CudaError, InUseError, attach, undo_all
from streamalloc.core.internal import CopySide, Event, Fence, Stream
from streamalloc.core.session import Session, session_of
from streamalloc.vmm.access import After, wait_for_users
from streamalloc.vmm.evictable import Evictable, Eviction
from streamalloc.vmm.ownership import allocations_of
from streamalloc.vmm.reservation import MappedBytes
from streamalloc.vmm.stores.blocks import Backup, Move, Stored

T = TypeVar("T")

_BATCH = 64 << 20
"""Bytes of a batch of copies. The memory of a batch is unmapped after its copies, while later copies run."""

Step: TypeAlias = "Callable[[], object] | tuple[Callable[[], object], Callable[[], object]]"
"""A step: a function that does it; or a function that does it and a function that undoes it. If the first raises, the
second is called, too, so an undo must check what was done.
"""


def run_steps(session: Session, *steps: Step, last: Callable[[], T]) -> T:
    """Do the steps in order, then ``last``, and return its result. If a step raises, undo this step and the steps
    before it, the last step first, and raise the error. If an undo raises an Exception, this is attached to the first
    error, and the other undos are still called. After a KeyboardInterrupt in an undo they are not. ``last`` cannot be
    undone.

    In the steps and undos, the thread is in the relaxed capture mode. Otherwise a wait would invalidate a capture that
    other code makes on another thread in the global mode.
    """
    undos: list[Callable[[], object]] = []
    try:
        with session.relaxed():  # Ends before ``last``: if the driver refuses the earlier mode, the steps are undone.
            for step in steps:
                act, *undo = step if isinstance(step, tuple) else (step,)
                undos += undo
                act()
    except BaseException as first:
        with contextlib.ExitStack() as mode:
            with contextlib.suppress(CudaError):  # An undo is made even if it ends captures.
                mode.enter_context(session.relaxed())
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
        :func:`~streamalloc.vmm.access.wait_for_users`.
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
        # The buffers are grouped by store, so that one `moving` block copies a whole group. The block of a store on
        # disk ends only when its copies are done. With a block for each buffer, the host would wait after each buffer.
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
        """Choose the buffers, and have the host wait for the users of their memory (:meth:`BackupSteps.wait`). Only
        mapped buffers will be unmapped; frozen buffers need no backup. Errors as for :meth:`VirtualBuffer.evict`.
        """
        allocations_of(session_of(self.stream)).work()  # Otherwise dropped objects would count as users.
        self._tags = {buffer: tag for buffer, tag in tags.items() if not buffer.frozen}
        self.entries = {buffer: self._evictable(buffer) for buffer in tags if not buffer.evicted}
        rights = (entry.rights for several in self.entries.values() for entry in several)
        wait_for_users(self._after, session_of(self.stream), rights)

    def _evictable(self, buffer: Evictable) -> list[MappedBytes]:
        """Return all mappings of a buffer, each with an open handle of its memory. Raises InUseError if the memory has
        other users, so that it would not be freed; if the memory is shared, other processes do not count.
        """
        buffer.release_from(buffer._mapped)
        entries = list(buffer.range._node.table())
        for memory in (entry.as_object() for entry in entries if not entry.alone):
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
                buffer.begin_eviction(self.entries[buffer], self.backups[buffer])
        for buffer, entries in self.entries.items():
            if not buffer.evicted:
                buffer.begin_eviction(entries, self.backups.get(buffer))

    def map_all_again(self) -> None:
        """Undo :meth:`unmap_all`: map the memory of each buffer at its addresses again (``cuMemMap``,
        ``cuMemSetAccess``). Raises CudaError.
        """
        undo_all(functools.partial(buffer.undo_eviction, entries) for buffer, entries in reversed(self.entries.items()))

    def release_all(self) -> int:
        """Release the memory that was unmapped (``cuMemRelease``). Buffers that had no memory get their new backups.
        Returns the bytes released.
        """
        for buffer in self.backups.keys() - self.entries.keys():
            buffer.replace_backup(self.backups[buffer])
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

    def __init__(self, buffers: Collection[Evictable], stream: Stream) -> None:
        self._buffers = buffers
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
        # If the sleep of a buffer and the undo have failed, its bytes are in its old memory, which is mapped again.
        for buffer, eviction in self.evictions.items():
            if eviction.held:
                buffer.undo_eviction(eviction.held)

    def _create(self, buffer: Evictable, move: Move | None) -> None:
        left = buffer.range._node.table()
        if left:  # A restore failed, together with its undo. A hook may have queued work that uses this memory.
            wait_for_users(None, session_of(buffer), (entry.rights for entry in left))
        self._made[buffer] = buffer.create_chunks(self.evictions[buffer].chunks)
        if buffer._backup is not None and move is not None:
            buffer.load_backup(buffer._backup, self._made[buffer], move, self._stream)

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
        """Make frozen buffers read-only (``cuMemSetAccess``). The host first waits for the copies, because they write
        to these buffers. Raises CudaError.
        """
        for buffer, entries in self._made.items():
            if buffer.frozen:
                self._stream.synchronize()
                buffer.range._node.grant(entries, buffer.rights)

    def set_awake(self) -> None:
        """Mark the buffers as restored, so that their bytes can be used."""
        for buffer in self.evictions:
            buffer.eviction = None

    def set_asleep(self) -> None:
        """Undo :meth:`set_awake`."""
        for buffer, eviction in self.evictions.items():
            buffer.eviction = eviction

    def drop_backups(self) -> int:
        """Drop the backups of the buffers, except those of frozen buffers. Backups that an interrupted wake has left
        are dropped, too. Returns the number of restored bytes.
        """
        drop_unneeded(self._buffers)
        return sum(eviction.nbytes for eviction in self.evictions.values())


def drop_unneeded(buffers: Iterable[Evictable]) -> None:
    """Drop the backups of those ``buffers`` that are neither evicted nor frozen, and so do not need them."""
    for buffer in buffers:
        if not (buffer.evicted or buffer.frozen):
            buffer.replace_backup(None)
