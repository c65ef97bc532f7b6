"""Host memory tier for buffers: pinned memory of a pool, in pieces."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence

from streamalloc.core.errors import InvalidValueError, NotSupportedError, OutOfMemoryError, undo_all, undoing
from streamalloc.core.internal import CopySide, Device, Memory, Stream
from streamalloc.core.properties import MemAccess, MemLocation
from streamalloc.core.session import session_of
from streamalloc.pool import MemoryPool
from streamalloc.pool.internal import reachable_from
from streamalloc.vmm.backup import Backup, BackupRange, Copies
from streamalloc.vmm.tiers.tier import Bytes, SavedBytes, overlapping, part_of

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
