"""Buffers of mapped chunks at a constant address, which can be evicted and restored."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import abc
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from streamalloc.core.errors import CudaError, EvictedError, InUseError, attach, size_text
from streamalloc.core.internal import CopySide, Device, Event, Fence, Memory, Stream, StreamLike
from streamalloc.core.properties import MemAccess, MemLocation, MemLocationType
from streamalloc.core.session import Session, session_of
from streamalloc.formats.html import Drawn, Html, Row, gauge
from streamalloc.pool import MemoryPool
from streamalloc.vmm.access import Access, After, Rights, copying_stream, rights_of, wait_for_users
from streamalloc.vmm.address_range import Mapping, OwnsRange, drawn, rights_text
from streamalloc.vmm.claims import Claimable, claimed
from streamalloc.vmm.ownership import allocations_of
from streamalloc.vmm.physical_memory import MemorySpec, PhysicalMemory
from streamalloc.vmm.reservation import MappedBytes
from streamalloc.vmm.stores.blocks import Bytes, Move, Saved, Stored
from streamalloc.vmm.stores.disk import DiskTier, tier_of
from streamalloc.vmm.stores.host import HostTier, saved_in

_BATCH = 64 << 20
"""Bytes of a batch, which is unmapped after its copy while later copies run."""


Backup: TypeAlias = "MemoryPool | HostTier | DiskTier | Memory | Bytes | Saved | None"
"""Place for the bytes of one buffer. :class:`Saved` is room that a tier has reserved; None discards the bytes."""


class ChunkSpec(NamedTuple):
    """A chunk of physical memory to create: offset and size in bytes, and its properties."""

    offset: int
    nbytes: int
    spec: MemorySpec


RESTORE = "restore() it"
"""Advice in errors for an evicted buffer. A :class:`SleepGroup` replaces the advice in its buffers."""


class Eviction(NamedTuple):
    """Physical memory that a buffer has released, and its saved bytes.

    :attr:`VirtualBuffer.eviction` returns it after :meth:`VirtualBuffer.evict`.
    """

    pieces: tuple[ChunkSpec, ...]
    """Chunks that :meth:`VirtualBuffer.restore` creates again."""
    saved: Saved | None
    """The bytes in a backup; None without a backup."""
    held: tuple[MappedBytes, ...] = ()
    """Unmapped memory that still has the bytes, because an eviction and its undo failed. :meth:`VirtualBuffer.restore`
    maps it again.
    """

    @property
    def nbytes(self) -> int:
        """Physical memory that was released, in bytes."""
        return sum(piece.nbytes for piece in self.pieces)

    def _drop(self) -> None:
        """Release the held memory, and drop the saved bytes."""
        for entry in self.held:
            entry.close()
        if self.saved is not None:
            self.saved.drop()


class VirtualBuffer(OwnsRange, Drawn, Claimable):
    """A buffer with a constant address whose physical memory can be released and created again.

    It owns an :class:`AddressRange`, and maps memory from its start, without a hole. :meth:`evict` releases the
    physical memory of one buffer, with or without a copy in host memory; :meth:`restore` maps memory with the same
    bytes at the same addresses. :class:`SleepGroup` does the same for many buffers at once: ``sleep()`` evicts and
    ``wake()`` restores either all of them or none. A buffer of a group can also be restored alone.
    :class:`GrowableBuffer` and :func:`stripe` make such buffers. ::

        buffer.evict(host_pool)    # frees device memory; buffer.address stays reserved
        buffer.restore()           # same address, same bytes

    Unmapping is not stream-ordered, see :class:`AddressRange`: :meth:`evict` and :meth:`close` take ``after``.
    After an error the buffer is unchanged and the operation can be repeated. Memory that the driver refuses to release
    is released later.

    Thread-safe: calls that map or unmap the buffer's memory wait for each other, and for a :class:`SleepGroup` that
    puts the buffer to sleep or wakes it. A hook or a signal handler that runs within such a call cannot wait for it,
    and gets :class:`InUseError`. Copies and fills take no lock. If another thread queues a copy while memory is
    unmapped, the copy may find no memory at its address, and the driver crashes: hold a lock of your own around both.
    """

    def _open(
        self, device: Device, capacity: int, rights: Rights, stream: StreamLike | None, location: MemLocation
    ) -> None:
        """Reserve ``capacity`` bytes of addresses (``cuMemAddressReserve``) and set all attributes. Raises
        AddressSpaceError, TypeError, ValueError.
        """
        self._location = location
        self._rights = rights
        """Permissions by location. While the buffer is frozen, the memory has only those to read."""
        self._mapped = 0
        """Bytes from the start of :attr:`range` that count as mapped; an eviction does not change it. After a failed
        call more may be mapped behind them, which the next growth or eviction releases.
        """
        self._nbytes = 0
        self.eviction: Eviction | None = None
        """The released memory and its backup; None while the buffer is mapped."""
        self._frozen: Saved | None = None
        """Backup of a frozen buffer. It stays valid while the buffer is awake, because nobody may write to it."""
        self._remedy = RESTORE
        """Remedy that errors name while the buffer is evicted."""
        self._reserve(device, capacity, stream)

    @property
    def nbytes(self) -> int:
        """Size in bytes, as requested."""
        return self._nbytes

    @property
    def capacity(self) -> int:
        """Reserved addresses in bytes."""
        return self.range.nbytes

    @property
    def mapped_bytes(self) -> int:
        """Mapped physical memory in bytes: :attr:`nbytes` rounded up to whole chunks, and memory that a shrink left
        mapped. 0 while the buffer is evicted.
        """
        return 0 if self.eviction else self._mapped

    @property
    def mappings(self) -> tuple[Mapping, ...]:
        """Mappings of the buffer's chunks, in the order of addresses. Only the buffer unmaps them."""
        return tuple(Mapping(self.range, entry) for entry in self.range._node.touching(0, self._mapped))

    @property
    def location(self) -> MemLocation:
        """Location of the memory; with several devices, of the first."""
        return self._location

    @property
    def owner(self) -> object:
        """The address range."""
        return self.range

    @property
    def device_accessible(self) -> bool:
        """Whether the stream's device has access."""
        return bool(self._rights.get(self.stream.device.location, MemAccess.NONE))

    @property
    def host_accessible(self) -> bool:
        """Whether the CPU has access, as to host memory."""
        return bool(self._rights.get(MemLocation.host(), MemAccess.NONE))

    @property
    def rights(self) -> Rights:
        """Permissions by location, which later chunks also get."""
        return dict(self._rights if self._frozen is None else read_only(self._rights))

    @property
    def frozen(self) -> bool:
        """Whether :meth:`SleepGroup.freeze` has made the buffer read-only."""
        return self._frozen is not None

    @property
    def evicted(self) -> bool:
        """Whether the buffer is evicted, so that its bytes cannot be used."""
        return self.eviction is not None

    @claimed
    def set_access(self, who: Access, access: MemAccess = MemAccess.READWRITE, *, after: After = None) -> None:
        """Set permissions on the buffer's memory, also on that which it gets later (``cuMemSetAccess``).

        ``who``, ``access``, ``after`` and errors as for :meth:`AddressRange.set_access`; InUseError if the buffer is
        frozen. While the buffer is evicted, the permissions take effect when it is restored.
        """
        self._check_open()
        self._check_thawed()
        rights = device_rights(who, self._session, access, location=self._location)
        self._release_from(self._mapped)
        self.range._node.set_rights(self.range._node.table(), rights, after)
        self._rights = {where: allowed for where, allowed in {**self._rights, **rights}.items() if allowed}

    @claimed
    def evict(
        self,
        backup: Backup = None,
        *,
        stream: StreamLike | None = None,
        after: After = None,
        shared: bool = False,
    ) -> None:
        """Release the physical memory; the addresses stay reserved. Blocks the host until the bytes are copied.

        Parameters
        ----------
        backup
            A pool in host memory with access for the device, from which the copy is allocated (pinned memory, so the
            copy is fast); a :class:`HostTier` or :class:`DiskTier`; or memory, or a writable host array, of the same
            size, which stays the caller's. None discards the bytes. A frozen buffer has its backup already.
        stream
            The stream of the copy; default: the buffer's.
        after
            Events or streams to wait for first; ``()`` for none. Default: all work of the devices with access.
        shared
            Also evict exported memory. All importers and all descriptors of its handles must be closed; this is not
            checked. Memory that is still open elsewhere is not freed, and keeps its bytes.

        Raises
        ------
        EvictedError
            The buffer is evicted already.
        InUseError
            Some of the memory was exported (and ``shared`` is False), is mapped elsewhere, or is bound to a multicast
            object: releasing it here would free nothing.
        OutOfMemoryError
            There is not enough memory for the backup. The buffer is unchanged.
        CaptureError
            ``stream``, or a stream of ``after``, is being captured.
        TypeError, ValueError
            ``backup`` is of another driver or size, or its pool gives the device no access.
        OSError
            A file cannot be written. The buffer is unchanged.
        """
        entries = self._evictable(shared=shared)
        ordered = copying_stream(stream, self)
        wait_for_users(after, self._session, (entry.rights for entry in entries))
        saved = None if self._frozen else self._backup(backup, ordered)
        new = {} if saved is None else {self: saved}

        def steps() -> Steps:
            # The backup was made above. This step only drops it if a later step fails.
            yield do_nothing, functools.partial(drop_all, new)
            yield from evict_steps({self: entries}, new, ordered)

        run_steps(steps())
        release_all({self: entries})

    def _evictable(self, *, shared: bool) -> list[MappedBytes]:
        """Return the mappings, each with an open handle of its memory. Raises ClosedError, EvictedError, and InUseError
        if other users would keep the memory, except importers with ``shared``.
        """
        self._check_open()
        if self.eviction:
            raise EvictedError(f"{self!r} is evicted already")
        self._release_from(self._mapped)
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
        for entry in entries:
            entry.retain()
        return entries

    def _unmap(self, entries: Sequence[MappedBytes], saved: Saved | None) -> None:
        """Unmap ``entries``, all mappings of the buffer, and keep their handles open (``cuMemUnmap``). From now on the
        buffer is evicted, with the backup ``saved``. Raises CudaError.
        """
        chunks = tuple(ChunkSpec(entry.offset, entry.nbytes, _spec_of(entry)) for entry in entries)
        self.eviction = Eviction(chunks, saved)
        self.range._node.unmap(entries)

    def _map_again(self, entries: Sequence[MappedBytes]) -> None:
        """Undo :meth:`_unmap`, even if it was not completed.

        If the driver refuses that, too, the buffer stays evicted, and :attr:`Eviction.held` keeps the memory with the
        bytes, for a later :meth:`restore`. The buffer's backup is forgotten. Raises CudaError.
        """
        if self.eviction is not None:
            self.eviction = self.eviction._replace(saved=None, held=tuple(entries))
            for entry in entries:
                entry.map_again()
            self.range._node.grant(entries, self.rights)
            self.eviction = None

    @claimed
    def restore(self, *, stream: StreamLike | None = None) -> None:
        """Map new physical memory at the same addresses, with the same permissions, and copy the backup into it.

        The copy is stream-ordered: use the bytes on ``stream`` (default: the buffer's) or after it. Without a backup
        the bytes are undefined. A buffer that a :class:`SleepGroup` put to sleep can be restored too.

        Raises
        ------
        EvictedError
            The buffer is not evicted.
        OutOfMemoryError
            There is not enough memory. The buffer is still evicted, and its backup complete.
        OSError, DamagedBackupError
            A file cannot be read, or is damaged. The buffer is still evicted.
        """
        self._check_open()
        evicted = self.eviction
        if evicted is None:
            raise EvictedError(f"{self!r} is not evicted")
        ordered = copying_stream(stream, self)
        run_steps(restore_steps({self: evicted}, ordered))
        drop_woken({self: evicted})

    def _load(self, saved: Saved, made: Sequence[MappedBytes], move: Move, stream: Stream) -> None:
        """Queue the copy of the bytes from the backup ``saved`` to the new mappings ``made``, by the function ``move``
        on ``stream``. Raises CudaError.

        If the stream's device may not write to the memory, the device gets that permission until the copy is done, and
        the host waits for that.
        """
        target = CopySide(self.address, self._nbytes, self._resident_on(), self)
        writer = stream.device.location
        allowed = self._rights.get(writer, MemAccess.NONE)
        if allowed == MemAccess.READWRITE:
            saved.move(move, target)
            return
        # The copying device needs write access during the copy.
        self.range._node.grant(made, {writer: MemAccess.READWRITE})
        with saved.stored.moving(stream, out=False) as alone:
            saved.move(alone, target)
        stream.synchronize()
        self.range._node.grant(made, {writer: allowed})

    @claimed
    def close(self, after: After = None) -> None:
        """Unmap and release the memory and free the addresses (``cuMemUnmap``, ``cuMemRelease``, ``cuMemAddressFree``),
        after the host has waited for ``after``. Idempotent.

        ``after``: events or streams; by default all work of the devices with access, ``()`` for none.
        """
        if self.range.closed:
            return
        entries = list(self.range._node.table())
        if entries:
            wait_for_users(after, self._session, (entry.rights for entry in entries))
            self._shrink_to(0, 0)
        evicted, frozen = self.eviction, self._frozen
        self.eviction = self._frozen = None
        self._mapped = self._nbytes = 0
        if evicted is not None:
            evicted._drop()
        if frozen is not None:
            frozen.drop()
        self.range._free()

    # -- for subclasses --------------------------------------------------------------------------------------

    def _create_chunks(self, chunks: Sequence[ChunkSpec]) -> list[MappedBytes]:
        """Create and map adjacent chunks and set their permissions: all of them, or none (``cuMemCreate``,
        ``cuMemMap``, ``cuMemSetAccess``). Returns the mappings. Raises OutOfMemoryError, CudaError.
        """
        if not chunks:
            return []
        start, node = chunks[0].offset, self.range._node
        # A failed call or a shrink may have left memory mapped here, and the driver refuses to map over it.
        self._release_from(start)
        for watcher in node.allocations.watchers:
            watcher.to_be_mapped(self.range.address + start, sum(chunk.nbytes for chunk in chunks))
        made = [MappedBytes(node, one.offset, one.offset + one.nbytes, {}, one.spec) for one in chunks]
        return node.map(made, self._rights)

    def _release(self, entries: Sequence[MappedBytes]) -> None:
        """Unmap ``entries``, then release their memory. Raises CudaError for a refused unmap."""
        self.range._node.unmap(entries)
        for entry in entries:
            entry.close()

    def _release_from(self, start: int) -> None:
        """Unmap and release all memory from the offset ``start`` on, also what a failed call has left mapped."""
        node = self.range._node
        table = node.table()
        if table and table[-1].stop > start:
            self._release(node.touching(start, node.nbytes))

    def _shrink_to(self, mapped: int, nbytes: int) -> None:
        """Release all memory behind ``mapped`` bytes, the end of a chunk. After an error the buffer is unchanged."""
        before = self._mapped, self._nbytes
        self._mapped, self._nbytes = mapped, nbytes
        try:
            self._release_from(mapped)
        except CudaError:
            self._mapped, self._nbytes = before
            raise

    def _backup(self, backup: Backup, stream: Stream) -> Saved | None:
        if backup is None or isinstance(backup, Saved):
            return backup
        if isinstance(backup, np.ndarray):
            if not (backup.flags.c_contiguous and backup.flags.writeable and backup.nbytes == self._nbytes):
                need = f"a writable, contiguous array of {size_text(self._nbytes)} is needed"
                raise ValueError(f"backup is an array of {size_text(backup.nbytes)}: {need}")
            return saved_in(backup.reshape(-1).view(np.uint8), self._session)
        if not isinstance(backup, Memory):
            tier = tier_of(backup)
            return tier.hold([self._nbytes], stream)[0] if self._nbytes else None
        if session_of(backup) is not self._session:
            raise ValueError(f"backup {backup!r} belongs to another driver")
        if backup.nbytes != self._nbytes:
            raise ValueError(f"backup has {size_text(backup.nbytes)} and the buffer {size_text(self._nbytes)}")
        if self.address - backup.nbytes < backup.address < self.address + self._nbytes:
            raise ValueError(f"backup={backup!r} is the buffer's own memory, which is released")
        return saved_in(backup, self._session)

    def _check_thawed(self) -> None:
        """Raise InUseError if the buffer is frozen."""
        if self._frozen is not None:
            raise InUseError(f"{self!r} is frozen: thaw() its tag in the group first")

    def check_usable(self) -> None:
        if self.range.closed:
            self._check_open()
        if self.eviction is not None:
            raise EvictedError(f"{self!r} is evicted: {self._remedy} before it is used")

    def _read_only(self, on_host: bool) -> bool:
        return self.rights.get(MemLocation.host() if on_host else self.stream.device.location) == MemAccess.READ

    def _access_hint(self, stream: Stream) -> str:
        where = stream.device.location
        if self._frozen is not None:
            return f"{self!r} is frozen and can only be read: thaw() its tag in the group before it is written"
        return f"{where} has no access: set_access(device) gives it" if not self._rights.get(where) else ""

    def _about(self) -> Iterator[Row]:
        self._check_open()
        yield from super()._about()
        state = Html("evicted") if self.eviction else gauge(self._mapped, self.capacity)
        yield "mapped", state
        yield "access", rights_text(self.rights)
        yield "chunks", len(self.range._node.table())
        yield "", drawn(self.range)

    def _text(self) -> str:
        if self.range.closed:
            return ", closed"
        state = "evicted" if self.eviction else f"{size_text(self._mapped)} mapped"
        state = f"frozen, {state}" if self._frozen else state
        room = f"{state} of {size_text(self.capacity)} [{self.range.draw(16)}]"
        return f" of {size_text(self._nbytes)} at {self._at:#x}, {room}"


def _spec_of(entry: MappedBytes) -> MemorySpec:
    memory = entry._memory
    spec: MemorySpec = memory._spec if isinstance(memory, PhysicalMemory) else entry.spec
    return spec


# Eviction and restore of several buffers: each is a sequence of steps, which :func:`run_steps` does or undoes as a
# whole. A step is made when the steps before it are done, because it may need their results: a hook may close a buffer,
# and a copy needs the new memory. Acts that cannot be undone come after :func:`run_steps`: another process could take
# released memory at once, and the room of a dropped backup could get other bytes.

Step: TypeAlias = "tuple[Callable[[], object], Callable[[], object]]"
"""An act and its undo. If the act fails, its undo is called, too, so an undo checks what was done."""
Steps: TypeAlias = "Generator[Step, None, None]"


def do_nothing() -> None:
    """Do nothing: the act of a step that has only an undo, or the undo of a step that has only an act."""


def run_steps(steps: Steps) -> None:
    """Do steps in order. If one raises, undo it and the steps before it, the last first, and raise its error. All undos
    are called, also after one has failed; their errors are attached to the first error.
    """
    undos: list[Callable[[], object]] = []
    try:
        for do, undo in steps:
            undos.append(undo)
            do()
    except BaseException as first:
        for undo in (steps.close, *reversed(undos)):
            try:
                undo()
            except Exception as later:
                attach(first, later)
        raise


Batch: TypeAlias = "tuple[list[VirtualBuffer], Event]"
"""Buffers that are copied in sequence, of at least ``_BATCH`` bytes unless it is the last batch, and the event after
their copies.
"""


def queue_copies(saved: abc.Mapping[VirtualBuffer, Saved], stream: Stream) -> list[Batch]:
    """Queue the copies of buffers to their backups. Returns the buffers in batches, in the order of the copies."""
    batches: list[Batch] = []
    batch: list[VirtualBuffer] = []
    # The copies to a backup end before the copies to the next begin, because each file has its own staging memory.
    for stored, several in itertools.groupby(saved.items(), lambda item: item[1].stored):
        with stored.moving(stream, out=True) as move:
            for buffer, one in several:
                one.move(move, CopySide.of(buffer, session_of(buffer)))
                batch.append(buffer)
                if sum(copied.nbytes for copied in batch) >= _BATCH:
                    batches.append((batch, stream.record()))
                    batch = []
    for contents in {one.stored for one in saved.values()}:
        contents.seal(stream)
    return [*batches, (batch, stream.record())] if batch else batches


def evict_steps(
    entries: abc.Mapping[VirtualBuffer, Sequence[MappedBytes]],
    saved: abc.Mapping[VirtualBuffer, Saved],
    stream: Stream,
    *,
    copied: bool = False,
) -> Steps:
    """Yield the steps that copy the bytes of buffers to their backups, and unmap their memory.

    The memory is not released: another thread or process could take it at once, and a step that fails later could not
    be undone. :func:`release_all` releases it once all steps are done. Memory is unmapped after its own copy, while the
    copies of later buffers run.

    Parameters
    ----------
    entries
        Mappings of each buffer.
    saved
        New backups of buffers whose bytes are kept; a frozen buffer has its own. An earlier step of the caller drops
        them when it is undone.
    stream
        Stream of the copies.
    copied
        Whether the backups have the bytes already.
    """

    def unmap(buffer: VirtualBuffer) -> Step:
        act = functools.partial(buffer._unmap, entries[buffer], saved.get(buffer, buffer._frozen))
        return act, functools.partial(buffer._map_again, entries[buffer])

    # Not a step: copies change no buffer. An undo of the caller drops the backups, and their room is reused only after
    # the copies.
    left = dict.fromkeys(entries)
    for batch, end in () if copied else queue_copies(saved, stream):
        end.synchronize()
        for buffer in batch:
            yield unmap(buffer)
            del left[buffer]
    yield from map(unmap, left)


def release_all(entries: abc.Mapping[VirtualBuffer, Sequence[MappedBytes]]) -> None:
    """Release the memory that :func:`evict_steps` has unmapped."""
    for buffer, several in entries.items():
        for entry in several:
            entry.close()
        # Drop the memory objects, because handles that were exported from them would keep the memory.
        buffer.range._node.table()


def restore_steps(evictions: abc.Mapping[VirtualBuffer, Eviction], stream: Stream) -> Steps:
    """Yield the steps that map memory for evicted buffers, and queue the copies of their bytes on ``stream``.

    After an undo all buffers are evicted as before, with their backups. Queued copies may still read a backup and write
    the new memory, so an undo waits for them before it unmaps the memory.
    """
    made: dict[VirtualBuffer, Sequence[MappedBytes]] = {}
    by_backup: dict[Stored | None, list[VirtualBuffer]] = {}
    for buffer, eviction in evictions.items():
        if not eviction.held:
            by_backup.setdefault(eviction.saved and eviction.saved.stored, []).append(buffer)

    def create(buffer: VirtualBuffer, move: Move | None) -> None:
        _release_awaited(buffer, buffer.range._node.table())  # Left if an earlier restore and its undo failed.
        eviction = evictions[buffer]
        made[buffer] = buffer._create_chunks(eviction.pieces)
        if eviction.saved is not None and move is not None:
            buffer._load(eviction.saved, made[buffer], move, stream)

    def note_copies() -> None:
        copies = Fence(session_of(stream), [stream] if any(by_backup) else ())
        for buffer in made:
            buffer.range._node.copies = copies

    def release(buffer: VirtualBuffer) -> None:
        note_copies()
        stream.synchronize()
        _release_awaited(buffer, made.pop(buffer, ()))

    def set_evictions(evicted: abc.Mapping[VirtualBuffer, Eviction]) -> None:
        for buffer in made:
            buffer.eviction = evicted.get(buffer)

    # The first copies run while further memory is created. If a step fails, :func:`run_steps` closes this generator,
    # which abandons the copies without waiting for the threads that read files.
    for stored, buffers in by_backup.items():
        with contextlib.nullcontext() if stored is None else stored.moving(stream, out=False) as move:
            for buffer in buffers:
                yield functools.partial(create, buffer, move), functools.partial(release, buffer)
    yield note_copies, do_nothing  # From now on a range that is dropped waits for the copies.
    frozen = frozen_backups(evictions)
    if frozen:
        yield stream.synchronize, do_nothing  # The copies write to the memory, which is protected after them.
        for buffer in frozen:
            yield functools.partial(protect, buffer, buffer.rights), do_nothing
    for buffer, eviction in evictions.items():
        if eviction.held:  # A sleep and its undo failed, so the bytes are still in the old memory.
            yield functools.partial(buffer._map_again, eviction.held), functools.partial(_unmap_held, buffer, eviction)
    yield functools.partial(set_evictions, {}), functools.partial(set_evictions, evictions)


def _release_awaited(buffer: VirtualBuffer, entries: Iterable[MappedBytes]) -> None:
    """Unmap and release memory, after the host has waited for work that may use it: a hook of a failed wake may have
    queued some.
    """
    several = list(entries)
    if several:
        wait_for_users(None, session_of(buffer), (entry.rights for entry in several))
        buffer._release(several)


def _unmap_held(buffer: VirtualBuffer, eviction: Eviction) -> None:
    """Unmap the memory of :attr:`Eviction.held`, and keep its handles."""
    mapped = [entry for entry in eviction.held if not entry.gone]
    wait_for_users(None, session_of(buffer), (entry.rights for entry in mapped))
    buffer.eviction = eviction
    buffer.range._node.unmap(mapped)


def read_only(rights: Rights) -> Rights:
    """Return the permissions of a frozen buffer: reads for all that have access."""
    return {where: min(allowed, MemAccess.READ) for where, allowed in rights.items()}


def protect(buffer: VirtualBuffer, rights: Rights) -> None:
    """Set the permissions ``rights`` on all memory of a buffer (``cuMemSetAccess``). Raises CudaError."""
    buffer.range._node.grant(list(buffer.range._node.table()), rights)


def frozen_backups(buffers: Iterable[VirtualBuffer]) -> dict[VirtualBuffer, Saved]:
    """Return the backups of the frozen buffers among these. Such a backup has the present bytes of its buffer."""
    return {buffer: buffer._frozen for buffer in buffers if buffer._frozen is not None}


def drop_woken(evictions: abc.Mapping[VirtualBuffer, Eviction]) -> None:
    """Drop the backups of buffers that have woken, except those of frozen buffers."""
    drop_all({buffer: eviction.saved for buffer, eviction in evictions.items() if not buffer.frozen})


def drop_all(saved: abc.Mapping[VirtualBuffer, Saved | None]) -> None:
    """Drop backups, each after the copies that use it. A refused release is made later."""
    for one in saved.values():
        if one is not None:
            with contextlib.suppress(CudaError):
                one.drop()


def device_rights(
    access: Access,
    session: Session,
    permission: MemAccess = MemAccess.READWRITE,
    *,
    devices: Sequence[Device] = (),
    location: MemLocation | None = None,
) -> Rights:
    """Return the argument ``access`` as permissions on memory of ``location``. Each of ``devices`` also has read and
    write access. ``permission``: for locations named without one. Raises TypeError, and ValueError if the host would
    get access to device memory.
    """
    rights = {device.location: MemAccess.READWRITE for device in devices} | rights_of(access, session, permission)
    for where, allowed in rights.items():
        if where.type is not MemLocationType.DEVICE and allowed and not (location and location.on_host):
            raise ValueError(f"access: {where} cannot be given access to device memory")
    return rights
