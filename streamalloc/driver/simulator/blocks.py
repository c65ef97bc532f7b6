"""The parts of a pool's address line: blocks, and the gaps that free ones form."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator


def round_up(size: int, unit: int) -> int:
    """``size`` rounded up to a multiple of ``unit``."""
    return -(-size // unit) * unit


class State(enum.Enum):
    USED = "used"
    READY = "ready"
    PENDING = "pending"
    VOID = "void"
    GONE = "gone"  # merged into a neighbour: no longer part of the line


class Block:
    """A part of the line; ``stream`` and ``seq`` say which free a pending block waits for."""

    __slots__ = ("gap", "next", "prev", "seq", "size", "start", "state", "stream", "waits")

    def __init__(self, start: int, size: int, state: State) -> None:
        self.start: int = start
        self.size: int = size
        self.state: State = state
        self.stream: int = 0
        self.seq: int = 0
        self.prev: Block | None = None
        self.next: Block | None = None
        self.gap: Gap | None = None  # kept on the first and the last block of a gap only
        self.waits: dict[int, int] = {}  # of a used block: the frees its stream must be made to wait for

    @property
    def end(self) -> int:
        return self.start + self.size

    @property
    def is_free(self) -> bool:
        return self.state is State.READY or self.state is State.PENDING

    def __repr__(self) -> str:
        owner = f" by {self.stream}@{self.seq}" if self.state is State.PENDING else ""
        return f"<Block {self.start:#x}+{self.size:#x} {self.state.value}{owner}>"


class Gap:
    """A run of neighbouring free blocks: how many are pending in each stream, and how many are ready."""

    __slots__ = ("first", "kind", "last", "pending", "ready", "size")

    def __init__(self, first: Block, last: Block) -> None:
        self.first: Block = first
        self.last: Block = last
        self.size: int = 0
        self.ready: int = 0
        self.pending: dict[int, int] = {}
        self.kind: Kind = READY

    def count(self, block: Block, by: int = 1) -> None:
        self.size += block.size * by
        if block.state is State.READY:
            self.ready += by
            return
        left = self.pending.get(block.stream, 0) + by
        if left:
            self.pending[block.stream] = left
        else:
            del self.pending[block.stream]

    def classify(self) -> Kind:
        if not self.pending:
            return READY
        if len(self.pending) > 1:
            return SEVERAL
        (stream,) = self.pending
        return (stream, self.ready > 0)


Kind = tuple[int, bool]
"""Whose pending blocks a gap holds (a stream, or one of the two below), and whether ready blocks lie between
them.
"""
READY: Kind = (-1, True)
SEVERAL: Kind = (-2, True)

Found = tuple[int, int, Block]
"""A run that can serve: its size, its address, its first block. The least one is the best fit."""


ADDRESS_MASK = (1 << 64) - 1


def rank(size: int, start: int) -> int:
    """Orders gaps by size, then by address, as one number: cheaper to compare than a pair."""
    return size << 64 | start


def runs(gap: Gap, usable: Callable[[Block], bool]) -> Iterator[Found]:
    """The longest runs of usable blocks within a gap."""
    first: Block | None = None
    size = 0
    block: Block | None = gap.first
    while block is not None:
        if usable(block):
            if first is None:
                first, size = block, 0
            size += block.size
        elif first is not None:
            yield size, first.start, first
            first = None
        if block is gap.last:
            break
        block = block.next
    if first is not None:
        yield size, first.start, first
