"""Blocks of a pool's address line, and shelves that hold the free blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator


def round_up(size: int, unit: int) -> int:
    """``size`` rounded up to a multiple of ``unit``."""
    return -(-size // unit) * unit


USED = -1
"""The owner of a block that is not free."""
HEAP = 0
"""The owner of a block that is free for everybody. Any other owner is a stream, by its number."""


class Block:
    """A range of the line. A block that a stream left is free once operation ``seq`` of the stream is done."""

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


class Shelf:
    """Free blocks of one owner, by size, then by time on the shelf, the oldest first."""

    def __init__(self) -> None:
        self._keys: list[int] = []
        self._blocks: dict[int, Block] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Block]:
        """In the order in which they were put here."""
        return iter(self._blocks.values())

    def put(self, block: Block, stamp: int) -> None:
        block.stamp = stamp
        self._blocks[stamp] = block
        insort(self._keys, block.size << 64 | stamp)

    def remove(self, block: Block) -> None:
        del self._blocks[block.stamp]
        del self._keys[bisect_left(self._keys, block.size << 64 | block.stamp)]

    def fitting(self, size: int) -> Iterator[Block]:
        """The blocks of at least ``size`` bytes, the best fit first."""
        for at in range(bisect_left(self._keys, size << 64), len(self._keys)):
            yield self._blocks[self._keys[at] & _STAMP]

    def best(self, size: int, usable: Callable[[Block], bool] | None = None) -> Block | None:
        """The first of :meth:`fitting` that is ``usable``."""
        if usable is None:
            at = bisect_left(self._keys, size << 64)
            return self._blocks[self._keys[at] & _STAMP] if at < len(self._keys) else None
        return next((block for block in self.fitting(size) if usable(block)), None)


_STAMP = (1 << 64) - 1
