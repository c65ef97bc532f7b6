"""Buffers of virtual memory at a constant address, whose physical memory can be released (evicted) and restored."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from streamalloc.core.errors import CudaError, EvictedError, InUseError, attach, size_text, undo_all
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
from streamalloc.vmm.stores.blocks import Backup, Bytes, Move, Stored
from streamalloc.vmm.stores.disk import DiskTier, tier_of
from streamalloc.vmm.stores.host import HostTier, backup_in

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


RESTORE = "restore() it"
"""Remedy in errors for an evicted buffer. A :class:`SleepGroup` sets another text for its buffers."""


class Eviction(NamedTuple):
    """Physical memory that a buffer has released. :attr:`VirtualBuffer.eviction` has it after
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


class VirtualBuffer(OwnsRange, Drawn, Claimable):
    """A buffer with a constant address whose physical memory can be released and created again.

    A buffer owns an :class:`AddressRange`, and has memory mapped from the range's start on, without a hole.
    :meth:`evict` releases the physical memory, with or without a copy of the bytes in other memory or on disk.
    :meth:`restore` maps new memory at the same addresses, and copies the stored bytes into it. :class:`SleepGroup` does
    the same for many buffers at once: ``sleep()`` evicts, and ``wake()`` restores, either all its buffers or none. A
    buffer of a group can also be restored alone. :class:`GrowableBuffer` and :func:`stripe` make such buffers. ::

        buffer.evict(host_pool)    # frees device memory; buffer.address stays reserved
        buffer.restore()           # same address, same bytes

    Unmapping is not stream-ordered, see :class:`AddressRange`. So :meth:`evict` and :meth:`close` have an argument
    ``after``. After an error the buffer is unchanged, and the operation can be repeated. If the driver also refuses the
    undo of an eviction, the buffer counts as evicted, and :meth:`restore` maps its old memory again. If the driver
    refuses to release memory, the memory is released later.

    Thread-safe: calls that map or unmap the buffer's memory wait for each other, and for a :class:`SleepGroup` that
    puts the buffer to sleep or wakes it. A hook or a signal handler that makes such a call during another one cannot
    wait, and gets :class:`InUseError` if a call on any thread has the buffer. Copies and fills take no lock. If one
    thread queues a copy while another thread unmaps the memory, the driver may crash: hold a lock of your own around
    both calls.
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
        self._remedy = RESTORE
        """Text in errors that says how to make an evicted buffer usable."""
        self._reserve(device, capacity, stream)

    @property
    def nbytes(self) -> int:
        """Size in bytes, as requested; 0 if the buffer was closed."""
        return self._nbytes

    @property
    def capacity(self) -> int:
        """Size of the reserved address range in bytes."""
        return self.range.nbytes

    @property
    def mapped_bytes(self) -> int:
        """Bytes of mapped physical memory; 0 while the buffer is evicted. At least :attr:`nbytes` rounded up to the
        granularity. More after a shrink that left memory mapped: only whole chunks are unmapped, and none with
        ``release=False`` (:meth:`GrowableBuffer.resize`).
        """
        return 0 if self.eviction else self._mapped

    @property
    def mappings(self) -> tuple[Mapping, ...]:
        """Mappings of the buffer's chunks, in the order of addresses; an empty tuple while the buffer is evicted. Only
        the buffer unmaps them.
        """
        return tuple(Mapping(self.range, entry) for entry in self.range._node.touching(0, self._mapped))

    @property
    def location(self) -> MemLocation:
        """Location of the memory; if it is on several devices, the location of the first."""
        return self._location

    @property
    def owner(self) -> object:
        """The address range of the buffer."""
        return self.range

    @property
    def device_accessible(self) -> bool:
        """Whether the device of :attr:`stream` has access to the memory, at least to read."""
        return bool(self._rights.get(self.stream.device.location, MemAccess.NONE))

    @property
    def host_accessible(self) -> bool:
        """Whether the CPU has access to the memory, which it can have only to host memory."""
        return bool(self._rights.get(MemLocation.host(), MemAccess.NONE))

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

    @claimed
    def set_access(self, who: Access, access: MemAccess = MemAccess.READWRITE, *, after: After = None) -> None:
        """Set permissions on the buffer's memory, and on memory that it gets later (``cuMemSetAccess``).

        ``who``, ``access`` and ``after`` as for :meth:`AddressRange.set_access`. If the buffer is evicted, the
        permissions take effect when it is restored.

        Raises
        ------
        ClosedError, CaptureError
            The buffer, or an event or stream of ``after``, was closed; or a stream is being captured.
        InUseError
            The buffer is frozen, or a signal handler or a hook called this method during another call.
        TypeError, ValueError
            ``who`` is no location of the driver, or is the host for a buffer in device memory. Or ``after`` has
            something else than events and streams of the driver.
        CudaError
            The driver refused the call. No permission has changed.
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
        backup: BackupPlace = None,
        *,
        stream: StreamLike | None = None,
        after: After = None,
        shared: bool = False,
    ) -> None:
        """Release the physical memory, but keep the addresses reserved. Blocks the host until the bytes are copied.

        Parameters
        ----------
        backup
            Where the bytes are stored: a pool in host memory to which the device has access; a :class:`HostTier` or
            :class:`DiskTier`; or memory or a writable host array of the same size, which the caller keeps. None
            discards the bytes. The argument has no effect for a frozen buffer, which has its backup already.
        stream
            The stream of the copy; default: the buffer's.
        after
            Events or streams that the host first waits for; ``()`` for none. Default: all work of the devices with
            access.
        shared
            Whether to evict also exported memory. All other processes must have closed this memory, and all descriptors
            of its handles must be closed; this is not checked. Memory that is still open elsewhere is not freed, and
            keeps its bytes.

        Raises
        ------
        ClosedError
            The buffer, ``backup``, ``stream``, or an event or stream of ``after`` was closed.
        EvictedError
            The buffer is evicted already.
        InUseError
            Some of the memory was exported (and ``shared`` is False), is mapped elsewhere, is bound to a multicast
            object, or is held by another :class:`PhysicalMemory`, so that its release here would free nothing. Or a
            signal handler or a hook called this method during another call.
        OutOfMemoryError
            There is not enough memory for the backup. The buffer is unchanged.
        CaptureError
            ``stream``, or a stream of ``after``, is being captured.
        TypeError, ValueError
            ``backup`` is no such place, is of another driver or size, or is memory of the buffer itself. Or the device
            has no access to the pool. Or ``stream`` or ``after`` is no stream or event of the driver.
        OSError, CudaError
            A file cannot be written, or the driver refused a call. The buffer is unchanged, unless the driver also
            refuses the undo: see the class.
        """
        self._check_open()
        if self.eviction:
            raise EvictedError(f"{self!r} is evicted already")
        ordered = copying_stream(stream, self)

        def reserve(tags: abc.Mapping[VirtualBuffer, str]) -> Iterator[tuple[VirtualBuffer, Backup | None]]:
            for buffer in tags:
                yield buffer, buffer._reserve_backup(backup, ordered)

        steps = EvictSteps(ordered, reserve, after, shared=shared)
        steps.wait({self: ""})
        run_steps((steps.reserve, steps.drop_backups), (steps.copy, do_nothing), (steps.unmap, steps.map_again))
        steps.release()

    def _unmap(self, entries: Sequence[MappedBytes], backup: Backup | None) -> None:
        """Unmap ``entries``, which are all mappings of the buffer, and keep their handles open (``cuMemUnmap``). The
        buffer is then evicted, with the backup ``backup``; a frozen buffer keeps its own. Raises CudaError.
        """
        self.eviction = Eviction(tuple(ChunkSpec(entry.offset, entry.nbytes, _spec_of(entry)) for entry in entries))
        if not self._frozen:
            self._backup = backup
        self.range._node.unmap(entries)

    def _map_again(self, entries: Sequence[MappedBytes]) -> None:
        """Undo :meth:`_unmap`, also if that call was interrupted.

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

    @claimed
    def restore(self, *, stream: StreamLike | None = None) -> None:
        """Map new physical memory at the same addresses, with the same permissions, and copy the backup into it.

        The copy is stream-ordered: use the bytes on ``stream`` (default: the buffer's), or after its work. Without a
        backup the bytes are undefined. A buffer that a :class:`SleepGroup` put to sleep can be restored, too.

        Raises
        ------
        ClosedError
            The buffer or ``stream`` was closed.
        EvictedError
            The buffer is not evicted.
        InUseError
            A signal handler or a hook called this method during another call.
        TypeError, ValueError, CaptureError
            ``stream`` is no stream of the driver, or is being captured.
        OutOfMemoryError, CudaError
            There is not enough memory, or the driver refused a call. The buffer is still evicted, and its backup
            complete.
        OSError, DamagedBackupError
            A file of the backup cannot be read, or is damaged. The buffer is still evicted.
        """
        self._check_open()
        if self.eviction is None:
            raise EvictedError(f"{self!r} is not evicted")
        steps = RestoreSteps((self,), copying_stream(stream, self))
        run_steps((steps.map, steps.unmap), (steps.protect, do_nothing), (steps.set_awake, steps.set_asleep))
        steps.drop_backups()

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

    @claimed
    def close(self, after: After = None) -> None:
        """Wait for ``after``, then unmap and release the memory and free the addresses (``cuMemUnmap``,
        ``cuMemRelease``, ``cuMemAddressFree``). Idempotent.

        ``after`` is one or several events or streams; ``()`` for none. Default: all work of the devices with access.
        Raises InUseError if a signal handler or a hook called this method during another call, CudaError if the driver
        refuses to unmap, and the errors that :class:`AddressRange` names for ``after``.
        """
        if self.range.closed:
            return
        entries = list(self.range._node.table())
        if entries:
            wait_for_users(after, self._session, (entry.rights for entry in entries))
            self._shrink_to(0, 0)
        self._mapped = self._nbytes = 0
        self._frozen = False
        self._replace_backup(None)
        self.eviction = None
        self.range._free()

    # -- for subclasses --------------------------------------------------------------------------------------

    def _create_chunks(self, chunks: Sequence[ChunkSpec]) -> list[MappedBytes]:
        """Create and map adjacent chunks and set their permissions (``cuMemCreate``, ``cuMemMap``, ``cuMemSetAccess``).
        If a call fails, no chunk is left. Returns the mappings. Raises OutOfMemoryError, CudaError.
        """
        if not chunks:
            return []
        start, node = chunks[0].offset, self.range._node
        # A failed call or a shrink may have left memory mapped here, and the driver refuses to map other memory there.
        self._release_from(start)
        for watcher in node.allocations.watchers:
            watcher.to_be_mapped(self.range.address + start, sum(chunk.nbytes for chunk in chunks))
        made = [MappedBytes(node, one.offset, one.offset + one.nbytes, {}, one.spec) for one in chunks]
        return node.map(made, self._rights)

    def _release(self, entries: Sequence[MappedBytes]) -> None:
        """Unmap ``entries``, then release their memory. Raises CudaError if the driver refuses to unmap."""
        self.range._node.unmap(entries)
        for entry in entries:
            entry.close()

    def _release_from(self, start: int) -> None:
        """Unmap and release all memory from the offset ``start`` (bytes) on, also memory that a failed call has left
        mapped. Raises CudaError.
        """
        node = self.range._node
        table = node.table()
        if table and table[-1].stop > start:
            self._release(node.touching(start, node.nbytes))

    def _shrink_to(self, mapped: int, nbytes: int) -> None:
        """Release all memory after the first ``mapped`` bytes, which must end with a chunk, and set :attr:`nbytes` to
        ``nbytes``. After an error the buffer is unchanged.
        """
        before = self._mapped, self._nbytes
        self._mapped, self._nbytes = mapped, nbytes
        try:
            self._release_from(mapped)
        except CudaError:
            self._mapped, self._nbytes = before
            raise

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
                entry.close()
        if previous is not None:
            previous.drop()

    def _make_read_only(self) -> None:
        """Make the memory read-only (``cuMemSetAccess``). :meth:`_thaw` undoes it. Raises CudaError."""
        self.range._node.set_rights(list(self.range._node.table()), read_only(self._rights), ())

    def _thaw(self) -> None:
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
        if self._frozen:
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


Step: TypeAlias = "tuple[Callable[[], object], Callable[[], object]]"
"""A step: a function that does it, and a function that undoes it. If the first raises, the second is called, too, so an
undo must check what was done.
"""


def do_nothing() -> None:
    """Do nothing. This is the undo of a step that changes nothing, and of a step whose changes the undo of another step
    removes.
    """


def run_steps(*steps: Step) -> None:
    """Do the steps in order. If a step raises, undo this step and the steps before it, the last step first, and raise
    the error. All undos are called, also after one has failed; their errors are attached to the first error.
    """
    begun: list[Step] = []
    try:
        for step in steps:
            begun.append(step)
            step[0]()
    except BaseException as first:
        for _, undo in reversed(begun):
            try:
                undo()
            except Exception as later:
                attach(first, later)
        raise


Reserve: TypeAlias = "Callable[[abc.Mapping[VirtualBuffer, str]], Iterator[tuple[VirtualBuffer, Backup | None]]]"
"""Function that reserves memory or disk space for the bytes of buffers, which it gets with their tags. It yields
buffers with their backups; a buffer is left out or comes with None if its bytes are not kept.
"""


class BackupSteps:
    """The steps that make backups of buffers, for :func:`run_steps`. Each method is followed by its undo."""

    def __init__(self, tags: abc.Mapping[VirtualBuffer, str], stream: Stream, reserve: Reserve) -> None:
        self._tags = tags
        """The buffers that need a backup, with their tags."""
        self.stream: Stream = stream
        """Stream of the copies."""
        self._reserve = reserve
        self.backups: dict[VirtualBuffer, Backup] = {}
        """The new backups."""
        self._batches: list[tuple[list[VirtualBuffer], Event]] = []
        """Buffers that are copied in sequence, and the event after their copies. Together the buffers have at least
        ``_BATCH`` bytes, except in a last batch.
        """

    def reserve(self) -> None:
        """Reserve memory or disk space for the bytes. Raises the errors of :data:`Reserve`."""
        self.backups.update((buffer, one) for buffer, one in self._reserve(self._tags) if one is not None)

    def drop_backups(self) -> None:
        """Undo :meth:`reserve`. The room is reused only after the copies that :meth:`copy` has queued."""
        for backup in self.backups.values():
            backup.drop()

    def copy(self) -> None:
        """Queue the copies of the buffers to their backups, and complete the backups (:meth:`Stored.seal`). The host
        waits for copies to disk. No undo is needed, because the buffers do not change. Raises OSError,
        OutOfMemoryError, CudaError.
        """
        batch: list[VirtualBuffer] = []
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

    :meth:`release` comes after the steps, because it has no undo: another thread or process could take the released
    memory at once.
    """

    def __init__(self, stream: Stream, reserve: Reserve, after: After, *, shared: bool = False) -> None:
        super().__init__({}, stream, reserve)
        self._after = after
        self._shared = shared
        self.entries: dict[VirtualBuffer, list[MappedBytes]] = {}
        """Mappings of the buffers that are to be unmapped."""

    def wait(self, tags: abc.Mapping[VirtualBuffer, str]) -> None:
        """Choose the buffers, and have the host wait for the users of their memory. Only those that are mapped will be
        unmapped. No undo is needed. Errors as for :meth:`VirtualBuffer.evict`.
        """
        self._tags = {buffer: tag for buffer, tag in tags.items() if not buffer.frozen}
        self.entries = {buffer: self._evictable(buffer) for buffer in tags if not buffer.evicted}
        rights = (entry.rights for several in self.entries.values() for entry in several)
        wait_for_users(self._after, session_of(self.stream), rights)

    def _evictable(self, buffer: VirtualBuffer) -> list[MappedBytes]:
        """Return all mappings of a buffer, each with an open handle of its memory. Raises InUseError if the memory has
        other users, so that it would not be freed; if the memory is shared, other processes do not count.
        """
        buffer._release_from(buffer._mapped)
        entries = list(buffer.range._node.table())
        allocations_of(session_of(buffer)).work()
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

    def unmap(self) -> None:
        """Unmap the memory of each buffer after its copy, while the copies of later buffers run. Raises CudaError."""
        for batch, copied in self._batches:
            copied.synchronize()
            for buffer in batch:
                buffer._unmap(self.entries[buffer], self.backups[buffer])
        for buffer, entries in self.entries.items():
            if not buffer.evicted:
                buffer._unmap(entries, self.backups.get(buffer))

    def map_again(self) -> None:
        """Undo :meth:`unmap`. Raises CudaError."""
        undo_all(functools.partial(buffer._map_again, entries) for buffer, entries in reversed(self.entries.items()))

    def release(self) -> int:
        """Release the memory that was unmapped (``cuMemRelease``). Returns its size in bytes."""
        for buffer, entries in self.entries.items():
            for entry in entries:
                entry.close()
            # table() removes the released entries, and so drops their memory objects. As long as such an object exists,
            # the exporter keeps the file descriptors of its memory open, and an open descriptor keeps the memory.
            buffer.range._node.table()
        return sum(entry.nbytes for entries in self.entries.values() for entry in entries)


class RestoreSteps:
    """The steps of a restore of one or several buffers, for :func:`run_steps`. Each method is followed by its undo.

    After an undo all buffers are evicted as before. :meth:`drop_backups` comes after the steps, because the room of a
    dropped backup could get other bytes.
    """

    def __init__(self, buffers: Iterable[VirtualBuffer], stream: Stream) -> None:
        self.evictions: dict[VirtualBuffer, Eviction] = {one: one.eviction for one in buffers if one.eviction}
        """The released memory of the buffers that are evicted."""
        self._stream = stream
        self._made: dict[VirtualBuffer, Sequence[MappedBytes]] = {}
        """The new mappings of each buffer."""

    def map(self) -> None:
        """Create and map memory, and queue the copies of the bytes. The first copies run while further memory is
        created. Raises OutOfMemoryError, OSError, DamagedBackupError, CudaError.
        """
        by_store: dict[Stored | None, list[VirtualBuffer]] = {}
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
                buffer._map_again(eviction.held)

    def _create(self, buffer: VirtualBuffer, move: Move | None) -> None:
        left = buffer.range._node.table()
        if left:  # A restore failed, together with its undo. A hook may have queued work that uses this memory.
            wait_for_users(None, session_of(buffer), (entry.rights for entry in left))
        self._made[buffer] = buffer._create_chunks(self.evictions[buffer].chunks)
        if buffer._backup is not None and move is not None:
            buffer._load(buffer._backup, self._made[buffer], move, self._stream)

    def _note_copies(self) -> None:
        """Have a range that is dropped from now on wait for the copies."""
        # A function of its own: the traceback of an error would keep the fence as a local variable of `map`.
        copying = any(buffer._backup for buffer in self._made)
        copies = Fence(session_of(self._stream), [self._stream] if copying else ())
        for buffer in self._made:
            buffer.range._node.copies = copies

    def unmap(self) -> None:
        """Undo :meth:`map` and :meth:`protect`. The host first waits for the copies, which may still read a backup and
        write the new memory, and for the work of hooks. Raises CudaError.
        """
        undo_all(functools.partial(self._unmap, buffer) for buffer in reversed(self.evictions))

    def _unmap(self, buffer: VirtualBuffer) -> None:
        buffer.eviction = eviction = self.evictions[buffer]
        entries = [entry for entry in eviction.held or self._made.get(buffer, ()) if not entry.gone]
        if entries:
            self._stream.synchronize()
            wait_for_users(None, session_of(buffer), (entry.rights for entry in entries))
        buffer.range._node.unmap(entries)
        for entry in () if eviction.held else entries:
            entry.close()

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
        """Drop the backups after the steps, except those of frozen buffers. Returns the restored bytes."""
        drop_backups(self.evictions)
        return sum(eviction.nbytes for eviction in self.evictions.values())


def read_only(rights: Rights) -> Rights:
    """Return ``rights`` as a frozen buffer has them: read access for all locations that have access."""
    return {where: min(allowed, MemAccess.READ) for where, allowed in rights.items()}


def drop_backups(buffers: Iterable[VirtualBuffer]) -> None:
    """Drop the backups of those ``buffers`` that are neither evicted nor frozen, and so do not need them."""
    for buffer in buffers:
        if not (buffer.evicted or buffer.frozen):
            buffer._replace_backup(None)


def device_rights(
    access: Access,
    session: Session,
    permission: MemAccess = MemAccess.READWRITE,
    *,
    devices: Sequence[Device] = (),
    location: MemLocation | None = None,
) -> Rights:
    """Return the argument ``access`` as permissions on memory of ``location``. Each of ``devices`` also gets read and
    write access. Locations that are given without a permission get ``permission``. Raises TypeError and ValueError as
    :func:`~streamalloc.vmm.access.rights_of` does, and ValueError if the host would get access to device memory.
    """
    rights = {device.location: MemAccess.READWRITE for device in devices} | rights_of(access, session, permission)
    for where, allowed in rights.items():
        if where.type is not MemLocationType.DEVICE and allowed and not (location and location.on_host):
            raise ValueError(f"access: {where} cannot be given access to device memory")
    return rights
