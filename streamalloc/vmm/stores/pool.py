"""The store in host memory of a pool, for the bytes of buffers that sleep."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from streamalloc.core.errors import undoing
from streamalloc.core.internal import CopySide, Fence, Memory, Stream, copy_bytes
from streamalloc.core.session import Session, session_of
from streamalloc.pool import MemoryPool
from streamalloc.pool.internal import reachable_from
from streamalloc.vmm.stores.blocks import Addresses, Bytes, Indices, Saved, Tier
from streamalloc.vmm.stores.host import InMemory, MemoryChunk

PIECE = 1 << 30
"""Most bytes per allocation. Equal pieces can be reused, and drivers limit pinned allocations."""
_ALIGNMENT = 512  # bytes between buffers of a piece, the alignment of a pool


class _Piece(MemoryChunk):
    """One allocation of a pool with the bytes of buffers, or memory or an array of the user, which is not freed."""

    def end(self) -> None:
        """Free the memory after the copies that use it."""
        self.release.end()

    def give(self, addresses: Addresses, fences: Sequence[Fence]) -> None:
        """Do nothing: the memory is freed as a whole."""


class _BufferBytes(InMemory):
    """The bytes of buffers in memory."""

    def _move(
        self, stream: Stream, out: bool, blocks: Indices, at: Addresses, side: Any = None, kernels: bool = False
    ) -> None:
        session = session_of(stream)
        for block, address in zip(blocks, at.tolist(), strict=True):
            ours = self._memory(block)
            theirs = CopySide(address, ours.nbytes, side.ordinal, side.keep)
            if out:
                copy_bytes(CopySide.writable(ours, session), theirs, stream)
            else:
                copy_bytes(theirs, CopySide.readable(ours, session), stream)

    def memory(self, blocks: range) -> Memory | Bytes | None:
        """See :meth:`Stored.memory`."""
        return None if len(blocks) > 1 else self._memory(blocks.start)

    def _memory(self, block: int) -> Memory | Bytes:
        base, nbytes = int(self._bases[block]), int(self._sizes[block])
        whole, start = self._chunks[base].memory, int(self._addresses[block]) - base
        found: Memory | Bytes = whole if nbytes == whole.nbytes else whole[start : start + nbytes]
        return found

    def read(self, block: int, offset: int, target: Bytes) -> None:
        """See :meth:`Stored.read`."""
        memory = self._memory(block)[offset : offset + target.nbytes]
        if not isinstance(memory, Memory):
            target[:] = memory
        elif memory.host_accessible:
            target[:] = memory.as_array()
        else:
            memory.copy_to(target)
            memory.stream.synchronize()

    def write(self, block: int, offset: int, source: Bytes) -> None:
        """See :meth:`Stored.write`."""
        memory = self._memory(block)[offset : offset + source.nbytes]
        if not isinstance(memory, Memory):
            memory[:] = source
        elif memory.host_accessible:
            memory.as_array()[:] = source
        else:
            memory.copy_from(source)
            memory.stream.synchronize()


def saved_in(memory: Memory | Bytes, session: Session) -> Saved:
    """Return the bytes of a buffer that fills memory, or an array, of the user. It is kept until the copies are done,
    and not freed.
    """
    stored = _BufferBytes(Tier())
    piece = _Piece(session, memory.nbytes, 1, memory, [memory].clear)
    stored.add(piece, np.array([piece.address]), sizes=memory.nbytes)
    return Saved(stored, range(1))


class PoolTier(Tier):
    """A pool in host memory, to which the device of the copies has access.

    The buffers of one call are stored side by side in common allocations of at most :data:`PIECE` bytes, because the
    driver pins and frees few large allocations faster than many small ones. Each allocation is freed once, after the
    last buffer with bytes in it was dropped, and after all copies that read or write it, on any stream.
    """

    def __init__(self, pool: MemoryPool) -> None:
        super().__init__()
        self.pool: MemoryPool = pool

    def hold(self, sizes: Sequence[int], stream: Stream, name: str | None = None) -> Sequence[Saved]:
        """Allocate memory for buffers on a stream.

        Raises
        ------
        ValueError
            The pool is of another driver, is not in host memory, or gives the stream's device no access.
        OutOfMemoryError
            There is not enough host memory.
        """
        self._check(stream)
        stored, saved, bounds, end = _BufferBytes(self), [], list[tuple[int, int]](), 0
        for nbytes in sizes:
            first, start = len(bounds), -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + nbytes
            cuts = [start, *range((start // PIECE + 1) * PIECE, end, PIECE), end]
            bounds += itertools.pairwise(cuts)
            saved.append(Saved(stored, range(first, len(bounds))))
        with undoing(stored.drop):
            for at in range(0, end, PIECE):
                memory = self.pool.allocate(min(PIECE, end - at), stream)
                piece = _Piece(session_of(memory), memory.nbytes, 1, memory, memory.close)
                mine = np.array([bound for bound in bounds if at <= bound[0] < at + PIECE])
                stored.add(piece, piece.address + mine[:, 0] - at, sizes=mine[:, 1] - mine[:, 0])
        return saved

    def _check(self, stream: Stream) -> None:
        pool = self.pool
        if session_of(pool) is not session_of(stream):
            raise ValueError(f"backup {pool!r} belongs to another driver")
        if not pool.location.on_host:
            raise ValueError(f"backup={pool!r} is not in host memory")
        if not reachable_from(pool, stream.device):
            how = "pool.set_access(device, MemAccess.READWRITE) gives it, so that copies run at full speed"
            raise ValueError(f"backup={pool!r} gives {stream.device!r} no access: {how}")
