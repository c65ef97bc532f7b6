"""Blocks of a pool's address line, and shelves of free blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator


def round_up(size: int, unit: int) -> int:
    """``size`` rounded up to a multiple of ``unit``."""
    return -(-size // unit) * unit


USED = -1
"""The owner of a block that is not free."""
HEAP = 0
"""Owner of a block free for all streams; other owners are stream numbers."""


class Block:
    """A range of the line. If a stream left the block, it is free once operation ``seq`` of the stream has run."""

    __slots__ = ("next", "owner", "prev", "seq", "size", "stamp", "start")

    def __init__(self, start: int, size: int, owner: int = HEAP, seq: int = 0) -> None:
        self.start: int = start
        self.size: int = size
        self.owner: int = owner
        self.seq: int = seq
        self.stamp: int = 0  # when it was put on its shelf
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def end(self) -> int:
        return self.start + self.size

    def split(self, size: int) -> Block:
        """Cut the block after ``size`` bytes. Returns the rest, which follows it."""
        rest = Block(self.start + size, self.size - size, self.owner, self.seq)
        rest.prev, rest.next, self.next = self, self.next, rest
        if rest.next is not None:
            rest.next.prev = rest
        self.size = size
        return rest

    def absorb(self, following: Block) -> None:
        """Add the block that follows to this one."""
        self.size += following.size
        self.seq = max(self.seq, following.seq)
        self.next = following.next
        if self.next is not None:
            self.next.prev = self


class Shelf:
    """Free blocks of one owner, ordered by size, then by time on the shelf, oldest first."""

    def __init__(self) -> None:
        self._sorted: list[tuple[int, int, Block]] = []
        """Size, stamp and block; stamps are unique."""

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[Block]:
        return (block for _, _, block in self._sorted)

    def put(self, block: Block, stamp: int) -> None:
        block.stamp = stamp
        insort(self._sorted, (block.size, stamp, block))

    def remove(self, block: Block) -> None:
        del self._sorted[bisect_left(self._sorted, (block.size, block.stamp))]

    def best(self, size: int, usable: Callable[[Block], bool] | None = None) -> Block | None:
        """The first block of at least ``size`` bytes for which ``usable`` is true."""
        found = self._sorted
        at = bisect_left(found, (size,))
        if usable is None:
            return found[at][2] if at < len(found) else None
        return next((found[one][2] for one in range(at, len(found)) if usable(found[one][2])), None)
