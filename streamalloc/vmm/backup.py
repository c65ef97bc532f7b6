"""Backups: the bytes of buffers while their physical memory is released.

One call that evicts buffers makes one :class:`Backup` for them. Each buffer holds a :class:`BackupRange`, and nothing
else refers to the backup. The backup is released once: after the last buffer has left it or was dropped, and after all
copies that read or write it, on any stream.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from streamalloc.core.errors import LOST
from streamalloc.core.internal import (
    Buffer,
    CopySide,
    Deferred,
    Fence,
    Memory,
    Stream,
    copy_bytes,
    deferred_queue,
    ordered_after,
)
from streamalloc.core.session import session_of
from streamalloc.pool import MemoryPool


class Copies:
    """The copies that one call queues on one stream, from or to backups; made by :func:`copying`."""

    __slots__ = ("_staged", "backups", "fence", "stream", "transfers")

    def __init__(self, stream: Stream) -> None:
        self.backups: weakref.WeakSet[Backup] = weakref.WeakSet()
        """Backups that the copies use; empty after the call."""
        self.stream: Stream | None = stream
        """Stream of the copies; None after the call."""
        self.transfers: dict[Any, Any] = {}
        """Unfinished transfers from and to files, by tier; each has ``finish()`` and ``abandon()``."""
        self._staged = False
        self.fence: Fence = Fence(session_of(stream), [stream], queueing=True)
        """The fence of the copies."""

    def transfer(self, key: object, make: Callable[[Stream], Any]) -> Any:
        """Return the transfer with this key. If it is missing, ``make`` makes it for the stream of the copies."""
        if key not in self.transfers:
            assert self.stream is not None
            self._staged = True
            self.transfers[key] = make(self.stream)
        return self.transfers[key]

    def finish_transfers(self) -> None:
        """Block the host until all transfers are done.

        Raises
        ------
        OSError, DamagedBackupError
            A file cannot be written, or cannot be read.
        """
        for key in list(self.transfers):
            self.transfers[key].finish()
            del self.transfers[key]

    def abandon(self) -> None:
        """Stop the unfinished transfers, after an error."""
        while self.transfers:
            self.transfers.popitem()[1].abandon()

    def synchronize(self) -> None:
        """Block the host until the copies have completed."""
        if (self.backups or self._staged) and self.stream is not None:
            self.stream.synchronize()
        self.fence = Fence(self.fence.session, ())

    def end(self) -> None:
        """Record the end of the copies, if they use a backup that is not released yet."""
        self.stream = None
        self.fence.queueing = 0
        if any(not backup.released for backup in self.backups):
            self.fence.record()
        self.backups.clear()


@contextlib.contextmanager
def copying(stream: Stream) -> Iterator[Copies]:
    """A ``with`` block for copies from or to backups on a stream."""
    copies = Copies(stream)
    try:
        yield copies
    finally:
        copies.abandon()
        copies.end()


class Backup:
    """Memory with the bytes of one or several buffers.

    Parameters
    ----------
    memory
        The memory that stores the bytes.
    own
        Whether the memory is freed with the backup; false for memory of the user.
    """

    __slots__ = ("__weakref__", "_copies", "_ranges", "_release", "memory", "own")

    def __init__(self, memory: Memory, *, own: bool) -> None:
        self.memory: Memory = memory
        self.own: bool = own
        self._ranges: set[int] = set()
        """Offsets of the ranges that buffers hold, in bytes."""
        self._copies: dict[Copies, None] = {}
        self._release: list[_Release] = []
        """The deferred free of the memory, in a list: the thread that takes it leaves the list empty."""
        if own and isinstance(memory, Buffer):
            release = _Release(memory, self._copies)
            deferred_queue(session_of(memory.stream)).end_with(self, release)
            self._release.append(release)

    @classmethod
    def allocate(cls, pool: MemoryPool, nbytes: int, stream: Stream) -> Backup:
        """Make a backup in memory of a pool, allocated on a stream."""
        return cls(pool.allocate(nbytes, stream), own=True)

    @property
    def released(self) -> bool:
        """Whether the backup has no memory left to free."""
        return not (self.own and isinstance(self.memory, Buffer)) or self.memory.freed

    def hold(self, offset: int, nbytes: int) -> BackupRange:
        """Reserve the range of one buffer. Each range needs its own offset."""
        made = BackupRange(self, offset, nbytes)
        self._ranges.add(offset)
        return made

    def use(self, copies: Copies) -> Stream:
        """Register copies that use the memory; return their stream."""
        stream = copies.stream
        assert stream is not None
        copies.backups.add(self)
        self._copies[copies] = None
        return stream

    def leave(self, offset: int) -> None:
        """Drop the range of a buffer; the last one releases the backup. Idempotent.

        Raises
        ------
        CudaError
            The driver refused the release, which is attempted again later.
        """
        self._ranges.discard(offset)
        if self._ranges:
            return
        with contextlib.suppress(IndexError):
            deferred_queue(session_of(self.memory.stream)).end(self._release.pop())


class BackupRange:
    """The range of one buffer in a backup."""

    __slots__ = ("_offset", "backup", "nbytes", "own")

    def __init__(self, backup: Backup, offset: int, nbytes: int) -> None:
        self.backup: Backup = backup
        self.nbytes: int = nbytes
        """Size in bytes, that of the buffer."""
        self.own: bool = backup.own
        """Whether the memory is freed with the backup."""
        self._offset = offset

    @property
    def memory(self) -> Memory:
        """The bytes."""
        whole = self.backup.memory
        return whole if self.nbytes == whole.nbytes else whole[self._offset : self._offset + self.nbytes]

    def read(self, offset: int, target: Any) -> None:
        """Copy bytes from ``offset`` on to a host array. Blocks the host."""
        memory = self.memory[offset : offset + target.nbytes]
        if memory.host_accessible:
            target[:] = memory.as_array()
        else:
            memory.copy_to(target)
            memory.stream.synchronize()

    def write(self, offset: int, source: Any) -> None:
        """Replace bytes from ``offset`` on by those of a host array. Blocks the host."""
        memory = self.memory[offset : offset + source.nbytes]
        if memory.host_accessible:
            memory.as_array()[:] = source
        else:
            memory.copy_from(source)
            memory.stream.synchronize()

    def save(self, source: CopySide, copies: Copies) -> None:
        """Queue the copy of the buffer's bytes into the backup."""
        if self.nbytes:
            stream = self.backup.use(copies)
            copy_bytes(CopySide.writable(self.memory, session_of(stream)), source, stream)

    def load(self, target: CopySide, copies: Copies) -> None:
        """Queue the copy of the bytes into the buffer's memory."""
        if self.nbytes:
            stream = self.backup.use(copies)
            copy_bytes(target, CopySide.readable(self.memory, session_of(stream)), stream)

    def leave(self) -> None:
        """Drop the range, see :meth:`Backup.leave`."""
        self.backup.leave(self._offset)


class _Release(Deferred):
    """The free of a backup's memory after the copies that use it."""

    __slots__ = ("_copies", "_memory")

    gone = LOST

    def __init__(self, memory: Buffer, copies: dict[Copies, None]) -> None:
        self._memory = memory
        self._copies = copies

    def attempt(self) -> bool:
        memory = self._memory
        if memory.freed:
            return True
        copies = [one for one in list(self._copies) if not one.fence.done()]
        stream = copies[0].stream if len(copies) == 1 else None
        if not copies:
            memory.close()
        elif stream is not None:
            ordered_after(stream, memory.free)
        else:
            # A separate stream, so that no stream of the user has to wait for another.
            device = memory.stream.device
            with session_of(device).relaxed(), device.create_stream() as after_all:
                for one in copies:
                    one.fence.precede(after_all)
                memory.free(after_all)
        return True
