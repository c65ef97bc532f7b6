"""Groups of buffers that sleep: their memory goes back to the driver together, and comes back together."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Sequence

from streamalloc.core.internal import (
    ClosedError,
    Closes,
    Device,
    EvictedError,
    InUseError,
    MemAccess,
    MemHandleType,
    MemLocation,
    Session,
    Stream,
    StreamLike,
    check_device,
    checked_size,
    session_of,
    size_text,
    undo_all,
    undoing,
)
from streamalloc.pool import MemoryPool
from streamalloc.vmm.backup import Backup, BackupRange
from streamalloc.vmm.growable import GrowableBuffer
from streamalloc.vmm.virtual_buffer import VirtualBuffer, copying_stream, evict_all, restore_all
from streamalloc.vmm.waiting import After, wait_for_users

__all__ = ["SleepGroup", "Tagged"]

_KEEP = (1 << 64) - 1
# Backups lie at multiples of this in the memory that they share, as allocations do.
_ALIGNMENT = 512


class SleepGroup(Closes):
    """Virtual buffers that give their physical memory back together and get it back together, at the same addresses.

    Each has a tag, such as ``"weights"``. :meth:`sleep` and :meth:`wake` take all buffers, or those of some tags. They
    do it for all of them or for none: a call that fails leaves every buffer as it was, with its bytes, and can be made
    again. What was captured into graphs stays valid, as no address changes.

    The buffers of one tag that are put to sleep together share one backup. It is freed when none of them needs it any
    more, in the order of the copies that read it. A buffer that is closed or dropped leaves the group and the backup.

    Where two threads call :meth:`sleep`, :meth:`wake` or :meth:`close`, one waits until the other has done it;
    :meth:`allocate` and :meth:`add` do not wait.

    Parameters
    ----------
    device
        Whose memory :meth:`allocate` gives, and whose default stream copies where no stream is named.
    backup
        A pool in host memory, to which the device has access, for the bytes that are kept. Default: one of the group's
        own, which keeps what it has once got, as pinning memory takes longer than a copy: ``group.backup.trim()`` gives
        it back.
    handle_types
        How the memory that :meth:`allocate` gives can be shared with other processes.

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
        """The device that it allocates from."""
        self.closed: bool = False
        """Whether :meth:`close` was called."""
        if backup is not None and not isinstance(backup, MemoryPool):
            raise TypeError(f"backup must be a MemoryPool, not {type(backup).__name__} ({backup!r})")
        self._backup = backup
        self._own = False
        self._handle_types = handle_types
        self._members: weakref.WeakKeyDictionary[VirtualBuffer, str] = weakref.WeakKeyDictionary()
        # Held by the thread that sleeps, wakes or closes; a signal handler on that thread finds it busy.
        self._lock = threading.RLock()
        self._busy = False

    @property
    def location(self) -> MemLocation:
        """Where :meth:`allocate` takes memory."""
        return self.device.location

    @property
    def backup(self) -> MemoryPool:
        """The pool in host memory that takes the bytes; made when it is first asked for."""
        self._check_open()
        return self._backup or self._make_backup()

    def _make_backup(self) -> MemoryPool:
        pool = MemoryPool(MemLocation.host(), release_threshold=_KEEP, driver=self.device.driver)
        with undoing(pool.close):
            pool.set_access(self.device, MemAccess.READWRITE)
        # Another thread may have made one. Nothing is called between these two.
        if self._backup is None:
            self._backup, self._own = pool, True
            return pool
        pool.close()
        return self._backup

    def allocate(self, nbytes: int, stream: StreamLike | None = None, *, tag: str = "") -> VirtualBuffer:
        """A buffer of its own that belongs to the group; it can be used at once.

        Parameters
        ----------
        nbytes
            Size in bytes; physical memory is rounded up to the granularity.
        stream
            The stream that orders operations which name no other.
        tag
            What :meth:`sleep` and :meth:`wake` know it by.

        Raises
        ------
        OutOfMemoryError
            There is no memory.
        ClosedError
            The group was closed.
        """
        self._check_open()
        size = checked_size("nbytes", nbytes)
        buffer = GrowableBuffer(self.device, max(size, 1), size, handle_types=self._handle_types, stream=stream)
        self._members[buffer] = tag
        return buffer

    def tagged(self, tag: str) -> Tagged:
        """The group as an allocator whose buffers have this tag: for ``streamalloc.interop.torch.use``."""
        return Tagged(self, tag)

    def add(self, buffer: VirtualBuffer, tag: str = "") -> None:
        """Take a buffer into the group, or give it another tag.

        Raises
        ------
        TypeError, ValueError
            It is no virtual buffer, or of another driver.
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
        """Take a buffer out of the group, which must be awake.

        Raises
        ------
        EvictedError
            It sleeps.
        """
        if buffer.evicted:
            raise EvictedError(f"{buffer!r} sleeps, and its bytes are the group's: wake() it first")
        self._members.pop(buffer, None)

    @property
    def buffers(self) -> dict[VirtualBuffer, str]:
        """The buffers in the order in which they came, with their tags."""
        # Listed in one call, as another thread may add some meanwhile.
        found = [reference() for reference in self._members.keyrefs()]
        tags = {buffer: self._members.get(buffer) for buffer in found if buffer is not None and not buffer.closed}
        return {buffer: tag for buffer, tag in tags.items() if tag is not None}

    @property
    def asleep(self) -> bool:
        """Whether a buffer of it sleeps."""
        return any(buffer.evicted for buffer in self.buffers)

    @property
    def mapped_bytes(self) -> int:
        """How much physical memory its buffers have now, in bytes."""
        return sum(buffer.mapped_bytes for buffer in self.buffers)

    def sleep(
        self,
        *tags: str,
        keep: bool | Collection[str] = True,
        shared: bool = False,
        stream: StreamLike | None = None,
        after: After = None,
    ) -> int:
        """Give the memory of all buffers back, or of those with these tags; how many bytes that are.

        The host waits until the bytes that are kept are in host memory. Buffers that sleep already go on doing so.

        Parameters
        ----------
        tags
            Whose buffers; they are taken in this order. None means all, in the order in which they came.
        keep
            Whether their bytes are kept in host memory, or the tags of which they are.
        shared
            Memory that was shared is taken as well: every importer has closed it. Nobody checks that. One that has not
            keeps the old memory, which is not free then.
        stream
            The stream that copies; default: the device's default stream.
        after
            What must have passed before, as for :meth:`VirtualBuffer.evict`.

        Raises
        ------
        InUseError
            A buffer cannot give its memory back, as for :meth:`VirtualBuffer.evict`; or a signal handler has called
            this on a thread that is in such a call.
        OutOfMemoryError
            There is no host memory for the bytes.
        KeyError
            No buffer has such a tag.
        ClosedError
            The group was closed.
        CudaError
            The driver refused. In all these cases nothing has changed. Where the driver refuses the undo as well, some
            buffers sleep with their bytes: :meth:`wake` them.
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
        """One backup for buffers, which pinning and freeing are quicker for."""
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
        """Give all buffers that sleep memory and bytes again, or those with these tags; how many bytes of memory.

        The copies are in stream order: use the bytes on ``stream`` or after it. Bytes that were not kept are undefined.

        Parameters
        ----------
        tags
            Whose buffers, in this order; none for all.
        stream
            The stream that copies; default: the device's default stream.

        Raises
        ------
        OutOfMemoryError
            There is not enough memory. All of them sleep as before, with their bytes, and it can be tried again.
        KeyError
            No buffer has such a tag.
        ClosedError
            The group was closed: :meth:`VirtualBuffer.restore` wakes its buffers one by one.
        InUseError
            A signal handler has called this on a thread that is in such a call.
        CudaError
            The driver refused, likewise.
        """
        return self._alone(lambda: self._wake(tags, stream))

    def _wake(self, tags: Sequence[str], stream: StreamLike | None) -> int:
        found = {buffer: buffer.eviction for buffer in self._chosen(tags)}
        evictions = {buffer: eviction for buffer, eviction in found.items() if eviction is not None}
        restore_all(evictions, self._copying_stream(stream))
        return sum(eviction.nbytes for eviction in evictions.values())

    def _alone(self, act: Callable[[], int]) -> int:
        """Do something while no other thread sleeps, wakes or closes."""
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
        """Remove the buffers, which stay as they are, and close the pool for backups if it is the group's own.

        A buffer that sleeps keeps its bytes until it is closed, and :meth:`VirtualBuffer.restore` wakes it. A closed
        group takes no buffers. Idempotent.
        """
        with self._lock:
            self._check_idle()
            self.closed = True
            self._members.clear()
            if self._own and self._backup is not None:
                self._backup.close()
                self._backup, self._own = None, False

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"{self!r} was closed")

    @property
    def _session(self) -> Session:
        return session_of(self.device)

    def __repr__(self) -> str:
        if not hasattr(self, "_members"):
            return f"<{type(self).__name__} that could not be made>"
        if self.closed:
            return f"<{type(self).__name__}, closed>"
        buffers = self.buffers
        state = f"{sum(buffer.evicted for buffer in buffers)} asleep, {size_text(self.mapped_bytes)} mapped"
        return f"<{type(self).__name__} of {len(buffers)} buffers, {state}>"


class Tagged:
    """An allocator whose buffers belong to a :class:`SleepGroup` by one tag: made by :meth:`SleepGroup.tagged`."""

    __slots__ = ("group", "tag")

    def __init__(self, group: SleepGroup, tag: str) -> None:
        self.group: SleepGroup = group
        """The group that its buffers belong to."""
        self.tag: str = tag
        """Their tag."""

    @property
    def location(self) -> MemLocation:
        """Where the memory is."""
        return self.group.location

    def allocate(self, nbytes: int, stream: StreamLike | None = None) -> VirtualBuffer:
        """As :meth:`SleepGroup.allocate`, with the tag."""
        return self.group.allocate(nbytes, stream, tag=self.tag)

    @property
    def _session(self) -> Session:
        return self.group._session

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.tag!r} of {self.group!r}>"
