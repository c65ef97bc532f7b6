"""Bytes of buffers that sleep: the interface of a store, and the store in host memory of a pool.

One call that evicts buffers makes one :class:`Backup` for them, in each piece of memory. Each buffer holds a
:class:`BackupRange`, and nothing else refers to the backup. The backup is released once: after the last buffer has left
it or was dropped, and after all copies that read or write it, on any stream.

A store returns one :class:`SavedBytes` for each buffer. Copies from and to it are queued on one stream
(:class:`Copies`). ``copies.finish_transfers()`` ends the host's reads and writes of files.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from streamalloc.core.errors import LOST, InvalidValueError, NotSupportedError, OutOfMemoryError, undo_all, undoing
from streamalloc.core.internal import (
    Buffer,
    CopySide,
    Deferred,
    Device,
    Fence,
    Memory,
    Stream,
    copy_bytes,
    deferred_queue,
    ordered_after,
)
from streamalloc.core.properties import MemAccess, MemLocation
from streamalloc.core.session import session_of
from streamalloc.pool import MemoryPool
from streamalloc.pool.internal import reachable_from

T = TypeVar("T")

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""A writable, contiguous array of bytes."""


class SavedBytes(Protocol):
    """The bytes of one buffer in a tier."""

    nbytes: int
    """Size in bytes."""

    @property
    def memory(self) -> Memory | None:
        """The bytes as memory; None if they are not in memory, or in several pieces."""

    @property
    def own(self) -> bool:
        """Whether the tier has allocated the memory or file; :meth:`leave` then releases it."""

    def save(self, source: CopySide, copies: Copies, /) -> None:
        """Queue the copy of device memory to the tier. The copy is complete after ``copies.finish_transfers()`` and all
        queued work of the stream.
        """

    def load(self, target: CopySide, copies: Copies, /) -> None:
        """Queue the copy of the bytes to device memory. After ``copies.finish_transfers()`` it is complete for later
        work of the stream.
        """

    def read(self, offset: int, target: Bytes, /) -> None:
        """Copy bytes from ``offset`` on to a host array. Blocks the host."""

    def write(self, offset: int, source: Bytes, /) -> None:
        """Replace bytes from ``offset`` on by those of a host array. Blocks the host."""

    def leave(self) -> None:
        """Drop the bytes after the copies that use them. Idempotent.

        Raises
        ------
        CudaError
            The driver refused the release, which is attempted again later.
        """


class Tier(Protocol):
    """A store for the bytes of device memory."""

    def hold(self, sizes: Sequence[int], stream: Stream, name: str | None = None, /) -> Sequence[SavedBytes]:
        """Reserve room for buffers of these sizes in bytes, each at least 1: for all, or for none after an error.

        Parameters
        ----------
        sizes
            Sizes in bytes.
        stream
            Stream of the copies.
        name
            Name under which a persistent tier stores the bytes; None if they end with the buffers.
        """


def overlapping(pieces: Iterable[tuple[T, int, int]], offset: int, array: Bytes) -> Iterator[tuple[T, int, Bytes]]:
    """Split an array that begins at ``offset`` of a buffer at the ends of the buffer's pieces.

    ``pieces``: the pieces, each with its offset in the buffer and its size in bytes. Yields each piece that the array
    overlaps, the offset in the piece, and the part of the array.
    """
    stop = offset + array.nbytes
    for piece, start, nbytes in pieces:
        begin, end = max(offset, start), min(stop, start + nbytes)
        if begin < end:
            yield piece, begin - start, array[begin - offset : end - offset]


def part_of(side: CopySide, offset: int, nbytes: int) -> Any:
    """Return a part of one side of a copy, from ``offset`` on."""
    return CopySide(side.address + offset, nbytes, side.ordinal, side.keep, side.after)


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
        # First, and by lines that call nothing: if a signal handler raises below, the fence must not stay open, because
        # memory is released behind it.
        copies.stream, copies.fence.queueing = None, 0
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


PIECE = 1 << 30
"""Most bytes per allocation. Equal pieces can be reused, and drivers limit pinned allocations."""
_ALIGNMENT = 512  # bytes between buffers of a piece, the alignment of a pool
_KEEP_ALL = (1 << 64) - 1  # release threshold in bytes: the pool never releases memory by itself


class HostBytes:
    """The bytes of one buffer, stored in several pieces."""

    __slots__ = ("_parts", "nbytes")

    own = True
    memory: Memory | None = None

    def __init__(self, parts: Sequence[BackupRange]) -> None:
        sizes = [part.nbytes for part in parts]
        self.nbytes: int = sum(sizes)
        starts = itertools.accumulate(sizes, initial=0)
        self._parts = list(zip(parts, starts, sizes, strict=False))
        """Pieces, each with its offset in the buffer and its size in bytes."""

    def save(self, source: CopySide, copies: Copies) -> None:
        """Queue the copy of device memory to the pieces."""
        for part, start, nbytes in self._parts:
            part.save(part_of(source, start, nbytes), copies)

    def load(self, target: CopySide, copies: Copies) -> None:
        """Queue the copy of the pieces to device memory."""
        for part, start, nbytes in self._parts:
            part.load(part_of(target, start, nbytes), copies)

    def read(self, offset: int, target: Bytes) -> None:
        """Copy bytes to a host array."""
        for part, begin, array in overlapping(self._parts, offset, target):
            part.read(begin, array)

    def write(self, offset: int, source: Bytes) -> None:
        """Replace bytes by those of a host array."""
        for part, begin, array in overlapping(self._parts, offset, source):
            part.write(begin, array)

    def leave(self) -> None:
        """Drop the bytes. Each piece is freed with the last buffer in it."""
        undo_all(part.leave for part, _, _ in self._parts)


class PoolTier:
    """A pool in host memory, to which the device of the copies has access.

    The buffers of one call are stored side by side in common allocations of at most :data:`PIECE` bytes, because the
    driver pins and frees few large allocations faster than many small ones.
    """

    __slots__ = ("pool",)

    def __init__(self, pool: MemoryPool) -> None:
        self.pool: MemoryPool = pool

    def hold(self, sizes: Sequence[int], stream: Stream, name: str | None = None) -> Sequence[SavedBytes]:
        """Allocate memory for buffers on a stream.

        Raises
        ------
        ValueError
            The pool is of another driver, is not in host memory, or gives the stream's device no access.
        OutOfMemoryError
            There is not enough host memory.
        """
        self._check(stream)
        starts, end = [], 0
        for nbytes in sizes:
            starts.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
            end = starts[-1] + nbytes
        pieces: list[Backup] = []
        with undoing(lambda: undo_all(functools.partial(piece.leave, 0) for piece in pieces)):
            for start in range(0, end, PIECE):
                pieces.append(Backup.allocate(self.pool, min(PIECE, end - start), stream))
        return [self._hold(pieces, start, start + nbytes) for start, nbytes in zip(starts, sizes, strict=True)]

    def _hold(self, pieces: Sequence[Backup], start: int, stop: int) -> SavedBytes:
        parts = []
        while start < stop:
            index, offset = divmod(start, PIECE)
            nbytes = min(stop - start, PIECE - offset)
            parts.append(pieces[index].hold(offset, nbytes))
            start += nbytes
        return parts[0] if len(parts) == 1 else HostBytes(parts)

    def _check(self, stream: Stream) -> None:
        pool = self.pool
        if session_of(pool) is not session_of(stream):
            raise ValueError(f"backup {pool!r} belongs to another driver")
        if not pool.location.on_host:
            raise ValueError(f"backup={pool!r} is not in host memory")
        if not reachable_from(pool, stream.device):
            how = "pool.set_access(device, MemAccess.READWRITE) gives it, so that copies run at full speed"
            raise ValueError(f"backup={pool!r} gives {stream.device!r} no access: {how}")


class NearTier:
    """Host memory on the NUMA node of a device, or on any node if that node has no pools or too little memory.

    Its pools keep their memory until they are trimmed or closed, because pinning memory takes longer than a copy.
    """

    __slots__ = ("_device", "_pools")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pools: list[MemoryPool] = []
        node = device.supports.host_numa_id
        if node is not None and node >= 0:
            with contextlib.suppress(InvalidValueError, NotSupportedError):
                self._add(MemLocation.host_numa(node))
        if not self._pools:
            self._add(MemLocation.host())

    def _add(self, location: MemLocation) -> None:
        pool = MemoryPool(location, release_threshold=_KEEP_ALL, driver=self._device.driver)
        with undoing(pool.close):
            pool.set_access(self._device, MemAccess.READWRITE)
        self._pools.append(pool)

    @property
    def pool(self) -> MemoryPool:
        """The pool that is used first."""
        return self._pools[0]

    def hold(self, sizes: Sequence[int], stream: Stream, name: str | None = None) -> Sequence[SavedBytes]:
        """Allocate memory for buffers on a stream; errors as for :meth:`PoolTier.hold`."""
        try:
            return PoolTier(self.pool).hold(sizes, stream)
        except OutOfMemoryError:
            if self.pool.location == MemLocation.host():
                raise
        if len(self._pools) == 1:
            self._add(MemLocation.host())
        return PoolTier(self._pools[-1]).hold(sizes, stream)

    def close(self) -> None:
        """Close the pools; bytes that are stored stay."""
        for pool in self._pools:
            pool.close()
