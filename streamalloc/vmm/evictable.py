"""The physical memory of one buffer, which can be released and created again, and the buffer's state."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from streamalloc.core.errors import CudaError, InUseError, size_text
from streamalloc.core.internal import CopySide, Device, Memory, Stream, StreamLike
from streamalloc.core.properties import MemAccess, MemLocation
from streamalloc.core.session import session_of
from streamalloc.pool import MemoryPool
from streamalloc.vmm.access import Rights
from streamalloc.vmm.address_range import OwnsRange
from streamalloc.vmm.claims import Claimable
from streamalloc.vmm.physical_memory import MemorySpec
from streamalloc.vmm.reservation import MappedBytes
from streamalloc.vmm.stores.blocks import Backup, Bytes, Move
from streamalloc.vmm.stores.disk import DiskTier, tier_of
from streamalloc.vmm.stores.host import HostTier, backup_in

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
    its state. Each method that a step calls is followed by the method that undoes it. The steps
    (:mod:`streamalloc.vmm.steps`) call these methods; programs do not.
    """

    _inner = (
        *Memory._inner, "begin_eviction", "check_thawed", "create_chunks", "freeze_again", "load_backup",
        "make_read_only", "make_writable", "release_from", "replace_backup", "reserve_backup", "shrink_to",
        "undo_eviction",
    )  # fmt: skip

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
        """Whether :meth:`SleepGroup.freeze` has made the buffer read-only. Fills and copies to it then raise
        :class:`CudaError`.
        """
        return self._frozen

    @property
    def evicted(self) -> bool:
        """Whether the buffer is evicted. Until it is restored, uses of its bytes raise :class:`EvictedError`."""
        return self.eviction is not None

    def begin_eviction(self, entries: Sequence[MappedBytes], backup: Backup | None) -> None:
        """Unmap ``entries``, which are all mappings of the buffer, and keep their handles open (``cuMemUnmap``). The
        buffer is then evicted, with the backup ``backup``; a frozen buffer keeps the backup that it has. Raises
        CudaError.
        """
        self.eviction = Eviction(tuple(ChunkSpec(entry.offset, entry.nbytes, entry.spec) for entry in entries))
        if not self._frozen:
            self._backup = backup
        self.range._node.unmap(entries)

    def undo_eviction(self, entries: Sequence[MappedBytes]) -> None:
        """Undo :meth:`begin_eviction`, also if that call was interrupted.

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

    def load_backup(self, backup: Backup, made: Sequence[MappedBytes], move: Move, stream: Stream) -> None:
        """Queue the copy of the bytes from ``backup`` to the new mappings ``made``, by ``move``, which queues on
        ``stream``. Raises CudaError.

        If the stream's device has no write access to the memory, the device gets this access until the copy is done,
        and the host waits for the copy.
        """
        target = CopySide(self.address, self._nbytes, self._resident_on(), self)
        writer = stream.device.location
        allowed = self._rights.get(writer, MemAccess.NONE)
        if allowed == MemAccess.READWRITE:
            backup.move(move, target)
            return
        # Without write access of the device that copies, the driver refuses the copy.
        self.range._node.grant(made, {writer: MemAccess.READWRITE})
        with backup.stored.moving(stream, out=False) as alone:
            backup.move(alone, target)
        stream.synchronize()
        self.range._node.grant(made, {writer: allowed})

    def create_chunks(self, chunks: Sequence[ChunkSpec]) -> list[MappedBytes]:
        """Create and map adjacent chunks and set their permissions (``cuMemCreate``, ``cuMemMap``, ``cuMemSetAccess``).
        If a call fails, no chunk is left. Returns the mappings. Raises OutOfMemoryError, CudaError.
        """
        if not chunks:
            return []
        start, node = chunks[0].offset, self.range._node
        # A failed call may have left memory mapped here, and the driver refuses to map other memory there.
        self.release_from(start)
        node.allocations.work()
        for watcher in node.allocations.watchers:
            watcher.to_be_mapped(self.range.address + start, sum(chunk.nbytes for chunk in chunks))
        made = [MappedBytes(node, one.offset, one.offset + one.nbytes, {}, one.spec) for one in chunks]
        return node.map(made, self._rights)

    def release_from(self, start: int) -> None:
        """Unmap and release all memory from the offset ``start`` (bytes) on, also memory that a failed call has left
        mapped. Raises CudaError.
        """
        node = self.range._node
        entries = node.touching(start, node.nbytes)
        node.unmap(entries)
        for entry in entries:
            entry.release_handle()

    def shrink_to(self, mapped: int, nbytes: int) -> None:
        """Release all memory after the first ``mapped`` bytes, which must end with a chunk, and set :attr:`nbytes` to
        ``nbytes``. After an error the buffer is unchanged.
        """
        # Leftovers of a failed call may have gaps, so they are unmapped first. The chunks up to the end are adjacent:
        # one call unmaps them all, or is refused and unmaps none.
        self.release_from(self._mapped)
        before = self._mapped, self._nbytes
        # Before the unmap: if a signal handler raises during it, no size counts memory that is unmapped, and the next
        # growth releases what is still mapped.
        self._mapped, self._nbytes = mapped, nbytes
        try:
            self.release_from(mapped)
        except CudaError:
            self._mapped, self._nbytes = before
            raise

    def reserve_backup(self, backup: BackupPlace, stream: Stream) -> Backup | None:
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

    def replace_backup(self, backup: Backup | None) -> None:
        """Make ``backup`` the buffer's backup, in place of the previous one or of :attr:`Eviction.held`."""
        previous, eviction = self._backup, self.eviction
        self._backup = backup
        if eviction is not None:
            self.eviction = eviction._replace(held=())
            for entry in eviction.held:
                entry.release_handle()
        if previous is not None:
            previous.drop()

    def make_read_only(self) -> None:
        """Make the memory read-only (``cuMemSetAccess``). :meth:`make_writable` undoes it. Raises CudaError."""
        self.range._node.set_rights(list(self.range._node.table()), read_only(self._rights), ())

    def make_writable(self) -> None:
        """Make the buffer writable (``cuMemSetAccess``). :meth:`freeze_again` undoes it. Raises CudaError."""
        # First, because this step and its undo may fail: a writable buffer must not count as frozen.
        self._frozen = False
        self.range._node.grant(list(self.range._node.table()), self._rights)

    def freeze_again(self) -> None:
        self.make_read_only()
        self._frozen = True

    def check_thawed(self) -> None:
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


def read_only(rights: Rights) -> Rights:
    """Return ``rights`` as a frozen buffer has them: read access for all locations that have access."""
    return {where: min(allowed, MemAccess.READ) for where, allowed in rights.items()}
