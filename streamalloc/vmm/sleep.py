"""Groups of buffers whose physical memory is released and restored together."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Sequence

from streamalloc.core.errors import EvictedError, InUseError, size_text, undo_all, undoing
from streamalloc.core.internal import Device, Stream, StreamLike, check_device
from streamalloc.core.properties import MemAccess, MemHandleType, MemLocation, checked_size
from streamalloc.core.resource import Closes
from streamalloc.core.session import Session, session_of
from streamalloc.pool import MemoryPool
from streamalloc.vmm.access import After, wait_for_users
from streamalloc.vmm.backup import Backup, BackupRange
from streamalloc.vmm.growable import GrowableBuffer
from streamalloc.vmm.virtual_buffer import VirtualBuffer, copying_stream, evict_all, restore_all

_KEEP_ALL = (1 << 64) - 1  # release threshold in bytes: the pool never releases memory by itself
_ALIGNMENT = 512  # bytes between the ranges of a backup, as between allocations of a pool


class SleepGroup(Closes):
    """Virtual buffers whose physical memory is released and restored together, at the same addresses.

    :meth:`sleep` evicts all buffers of the group and :meth:`wake` restores them, as :meth:`VirtualBuffer.evict` and
    :meth:`VirtualBuffer.restore` do for one buffer. Each call does so for all its buffers or for none: after an error
    every buffer is unchanged, with its bytes, and the call can be repeated. Captured graphs stay valid, as no address
    changes. ::

        with vmm.SleepGroup(device) as group:
            weights = group.allocate(8 << 30, tag="weights")
            cache = group.allocate(16 << 30, tag="cache")
            group.sleep(keep=["weights"])    # frees 24 GiB, keeps the bytes of 8 GiB in host memory
            group.wake()

    Each buffer has a tag. :meth:`sleep` and :meth:`wake` take all buffers, or those with some tags. The buffers of one
    tag that are put to sleep together share one backup, which is freed when none of them needs it any more, after the
    copies that read it. A buffer that is closed or dropped leaves the group and the backup.

    Thread-safe: :meth:`sleep`, :meth:`wake` and :meth:`close` wait for each other; :meth:`allocate` and :meth:`add` do
    not wait.

    Parameters
    ----------
    device
        Device of :meth:`allocate`; its default stream copies if no stream is given.
    backup
        Pool in host memory for the kept bytes, to which the device has access. By default the group makes one, which
        keeps its memory for the next sleep, as pinning memory takes longer than a copy: ``group.backup.trim()``
        releases it.
    handle_types
        Handle types for sharing the memory of :meth:`allocate` with other processes.

    Raises
    ------
    TypeError
        ``device`` is no device, or ``backup`` no pool.
    """

    __slots__ = ("_backup", "_busy", "_handle_types", "_lock", "_members", "_own", "closed", "device")

    def __init__(
        self,
        device: Device,
        *,
        backup: MemoryPool | None = None,
        handle_types: MemHandleType = MemHandleType.NONE,
    ) -> None:
        check_device("device", device)
        self.device: Device = device
        """Device of :meth:`allocate`."""
        self.closed: bool = False
        """True if :meth:`close` was called."""
        if backup is not None and not isinstance(backup, MemoryPool):
            raise TypeError(f"backup must be a MemoryPool, not {type(backup).__name__} ({backup!r})")
        self._backup = backup
        self._own = False
        self._handle_types = handle_types
        self._members: weakref.WeakKeyDictionary[VirtualBuffer, str] = weakref.WeakKeyDictionary()
        # Held by sleep(), wake() and close(). A signal handler on the same thread gets it, and finds _busy set.
        self._lock = threading.RLock()
        self._busy = False

    @property
    def location(self) -> MemLocation:
        """Location of the memory of :meth:`allocate`."""
        return self.device.location

    @property
    def backup(self) -> MemoryPool:
        """Pool in host memory for the kept bytes; the first use makes it."""
        self._check_open()
        return self._backup or self._make_backup()

    def _make_backup(self) -> MemoryPool:
        pool = MemoryPool(MemLocation.host(), release_threshold=_KEEP_ALL, driver=self.device.driver)
        with undoing(pool.close):
            pool.set_access(self.device, MemAccess.READWRITE)
        # Another thread may have made one.
        if self._backup is None:
            self._backup, self._own = pool, True
            return pool
        pool.close()
        return self._backup

    def allocate(self, nbytes: int, stream: StreamLike | None = None, *, tag: str = "") -> VirtualBuffer:
        """Allocate a buffer that belongs to the group; it can be used at once on any stream.

        Parameters
        ----------
        nbytes
            Size in bytes; physical memory is rounded up to the granularity.
        stream
            Stream of operations that name none.
        tag
            Tag for :meth:`sleep` and :meth:`wake`.

        Raises
        ------
        OutOfMemoryError
            There is not enough memory.
        ClosedError
            The group was closed.
        """
        self._check_open()
        size = checked_size("nbytes", nbytes)
        buffer = GrowableBuffer(self.device, max(size, 1), size, handle_types=self._handle_types, stream=stream)
        self._members[buffer] = tag
        return buffer

    def tagged(self, tag: str) -> Tagged:
        """Return an allocator whose buffers get this tag, for ``streamalloc.interop.torch.use``."""
        return Tagged(self, tag)

    def add(self, buffer: VirtualBuffer, tag: str = "") -> None:
        """Add a buffer to the group, or change its tag.

        Raises
        ------
        TypeError, ValueError
            ``buffer`` is no virtual buffer, or belongs to another driver.
        ClosedError
            The group was closed.
        """
        self._check_open()
        if not isinstance(buffer, VirtualBuffer):
            raise TypeError(f"buffer must be a GrowableBuffer or another VirtualBuffer, not {buffer!r}")
        if session_of(buffer) is not self._session:
            raise ValueError(f"{buffer!r} belongs to another driver than the group")
        self._members[buffer] = tag

    def remove(self, buffer: VirtualBuffer) -> None:
        """Remove a buffer from the group.

        Raises
        ------
        EvictedError
            The buffer sleeps: wake it first.
        """
        if buffer.evicted:
            raise EvictedError(f"{buffer!r} sleeps, and its bytes are the group's: wake() it first")
        self._members.pop(buffer, None)

    @property
    def buffers(self) -> dict[VirtualBuffer, str]:
        """Buffers and their tags, in the order in which they were added."""
        # keyrefs() copies the keys in one step: another thread may add buffers meanwhile.
        found = [reference() for reference in self._members.keyrefs()]
        tags = {buffer: self._members.get(buffer) for buffer in found if buffer is not None and not buffer.closed}
        return {buffer: tag for buffer, tag in tags.items() if tag is not None}

    @property
    def asleep(self) -> bool:
        """Whether a buffer of the group sleeps."""
        return any(buffer.evicted for buffer in self.buffers)

    @property
    def mapped_bytes(self) -> int:
        """Physical memory of its buffers, in bytes."""
        return sum(buffer.mapped_bytes for buffer in self.buffers)

    def sleep(
        self,
        *tags: str,
        keep: bool | Collection[str] = True,
        shared: bool = False,
        stream: StreamLike | None = None,
        after: After = None,
    ) -> int:
        """Evict all buffers, or those with these tags; return the released bytes.

        The host waits until the kept bytes are in host memory. Buffers that sleep already are skipped.

        Parameters
        ----------
        tags
            Tags of the buffers, in the order of eviction. By default all buffers, the first added first.
        keep
            True to keep the bytes in host memory, False to discard them, or the tags of buffers to keep.
        shared
            Evict memory that was exported too; see :meth:`VirtualBuffer.evict`.
        stream
            Stream of the copies; default: the device's default stream.
        after
            Events or streams to wait for first, as for :meth:`VirtualBuffer.evict`.

        Raises
        ------
        InUseError
            The memory of a buffer cannot be released, as for :meth:`VirtualBuffer.evict`; or a signal handler has
            called this during another call on the same thread.
        OutOfMemoryError
            There is not enough host memory for the bytes.
        KeyError
            No buffer has such a tag.
        ClosedError
            The group was closed.
        CudaError
            The driver refused a call. In all these cases every buffer is unchanged. If the driver refuses the undo too,
            some buffers sleep with their bytes: :meth:`wake` them.
        """
        return self._alone(lambda: self._sleep(tags, keep, shared, stream, after))

    def _sleep(
        self, tags: Sequence[str], keep: bool | Collection[str], shared: bool, stream: StreamLike | None, after: After
    ) -> int:
        chosen = {buffer: tag for buffer, tag in self._chosen(tags).items() if not buffer.evicted}
        entries = {buffer: buffer._evictable(shared=shared) for buffer in chosen}
        ordered = self._copying_stream(stream)
        wait_for_users(after, self._session, (entry.rights for several in entries.values() for entry in several))
        saved: dict[VirtualBuffer, BackupRange] = {}
        with undoing(lambda: undo_all(one.leave for one in saved.values())):
            for tag in dict.fromkeys(chosen.values()):
                if keep if isinstance(keep, bool) else tag in keep:
                    kept = [buffer for buffer in chosen if chosen[buffer] == tag and buffer.nbytes]
                    saved |= self._ranges(kept, ordered)
        evict_all(entries, saved, ordered)
        return sum(entry.nbytes for several in entries.values() for entry in several)

    def _ranges(self, buffers: Sequence[VirtualBuffer], stream: Stream) -> dict[VirtualBuffer, BackupRange]:
        """Allocate one backup for several buffers: one allocation is pinned and freed faster than many."""
        offsets = []
        end = 0
        for buffer in buffers:
            offsets.append(end)
            end = -(-(end + buffer.nbytes) // _ALIGNMENT) * _ALIGNMENT
        if not end:
            return {}
        backup = Backup.allocate(self.backup, end, stream)
        return {buffer: backup.hold(offset, buffer.nbytes) for buffer, offset in zip(buffers, offsets, strict=True)}

    def wake(self, *tags: str, stream: StreamLike | None = None) -> int:
        """Restore all buffers that sleep, or those with these tags; return the restored bytes.

        The copies are stream-ordered: use the bytes on ``stream`` or after it. Bytes that were not kept are undefined.

        Parameters
        ----------
        tags
            Tags of the buffers, in the order of restoring; none for all.
        stream
            Stream of the copies; default: the device's default stream.

        Raises
        ------
        OutOfMemoryError
            There is not enough memory. All buffers still sleep, with their bytes, and the call can be repeated.
        KeyError
            No buffer has such a tag.
        ClosedError
            The group was closed: :meth:`VirtualBuffer.restore` restores its buffers one by one.
        InUseError
            A signal handler has called this during another call on the same thread.
        CudaError
            The driver refused a call. All buffers still sleep, with their bytes.
        """
        return self._alone(lambda: self._wake(tags, stream))

    def _wake(self, tags: Sequence[str], stream: StreamLike | None) -> int:
        found = {buffer: buffer.eviction for buffer in self._chosen(tags)}
        evictions = {buffer: eviction for buffer, eviction in found.items() if eviction is not None}
        restore_all(evictions, self._copying_stream(stream))
        return sum(eviction.nbytes for eviction in evictions.values())

    def _alone(self, act: Callable[[], int]) -> int:
        """Call ``act`` while no other thread is in :meth:`sleep`, :meth:`wake` or :meth:`close`."""
        with self._lock:
            self._check_idle()
            self._check_open()
            self._busy = True
            try:
                return act()
            finally:
                self._busy = False

    def _check_idle(self) -> None:
        if self._busy:
            raise InUseError(f"{self!r}: a signal handler has interrupted a call that sleeps or wakes, on its thread")

    def _chosen(self, tags: Sequence[str]) -> dict[VirtualBuffer, str]:
        buffers = self.buffers
        unknown = [tag for tag in tags if tag not in buffers.values()]
        if unknown:
            raise KeyError(f"no buffer has the tag {unknown[0]!r}: there are {sorted(set(buffers.values()))}")
        if not tags:
            return buffers
        return {buffer: tag for wanted in tags for buffer, tag in buffers.items() if tag == wanted}

    def _copying_stream(self, stream: StreamLike | None) -> Stream:
        return copying_stream(self.device.default_stream if stream is None else stream, self._session)

    def close(self) -> None:
        """Remove all buffers, which stay unchanged, and close the pool for backups if the group made it. Idempotent.

        A buffer that sleeps keeps its bytes until it is closed, and :meth:`VirtualBuffer.restore` restores it.
        """
        with self._lock:
            self._check_idle()
            self.closed = True
            self._members.clear()
            if self._own and self._backup is not None:
                self._backup.close()
                self._backup, self._own = None, False

    @property
    def _session(self) -> Session:
        return session_of(self.device)

    def _text(self) -> str:
        if self.closed:
            return ", closed"
        buffers = self.buffers
        state = f"{sum(buffer.evicted for buffer in buffers)} asleep, {size_text(self.mapped_bytes)} mapped"
        return f" of {len(buffers)} buffers, {state}"


class Tagged:
    """Allocator of buffers of a :class:`SleepGroup` with one tag; made by :meth:`SleepGroup.tagged`."""

    __slots__ = ("group", "tag")

    def __init__(self, group: SleepGroup, tag: str) -> None:
        self.group: SleepGroup = group
        """Group of the buffers."""
        self.tag: str = tag
        """Tag of the buffers."""

    @property
    def location(self) -> MemLocation:
        """Location of the memory."""
        return self.group.location

    def allocate(self, nbytes: int, stream: StreamLike | None = None) -> VirtualBuffer:
        """Allocate a buffer with the tag, see :meth:`SleepGroup.allocate`."""
        return self.group.allocate(nbytes, stream, tag=self.tag)

    @property
    def _session(self) -> Session:
        return session_of(self.group)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.tag!r} of {self.group!r}>"
