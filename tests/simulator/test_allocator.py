"""The allocator's bookkeeping alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from streamalloc.simulator.allocator import HEAP, USED, Block, Line
from tests.support import bytecodes

pytestmark = pytest.mark.simulated_only("tests of the simulated driver itself")


def nothing(_stream: int) -> int:
    return 0


def everything(_stream: int) -> int:
    return 1 << 62


def find(line: Line, size: int, stream: int, ordered: Any, done: Any) -> Block | None:
    """The block for an allocation by all rules, as pools find it."""
    return line.find_at_hand(size, stream) or line.find_further(size, ordered, done)


def take(line: Line, size: int, stream: int = 1, done: object = nothing, ordered: object = None) -> Block:
    """Allocate, with memory under it."""
    assert callable(done) and (ordered is None or callable(ordered))
    block = find(line, size, stream, ordered, done)
    assert block is not None
    line.back(line.missing(block, size))
    return line.carve(block, size)


def validate(line: Line) -> None:
    """Everything that must hold between two operations."""
    position = 0
    previous: Block | None = None
    shelved = []
    for block in line.blocks():
        assert block.start == position and block.size > 0 and block.prev is previous
        position = block.end
        if previous is not None and block.owner != USED:
            assert previous.owner != block.owner, "neighbours that should have been one"
        if block.owner != HEAP:
            assert not line.missing(block, block.size)
        if block.owner > HEAP:
            assert block in set(line._left[block.owner])
        if block.owner != USED and (block.owner != HEAP or block.next is not None):
            shelved.append(block)
        previous = block
    assert position == line.capacity and line._last is previous
    assert len(line._heap) + sum(map(len, line._left.values())) == len(shelved)
    for shelf in (line._heap, *line._left.values()):
        assert list(shelf) == sorted(shelf, key=lambda block: (block.size, block.stamp))
    for chunk in line.spare():
        inside = [block for block in line.blocks() if block.start < (chunk + 1) * line.chunk]
        assert all(block.owner == HEAP for block in inside if block.end > chunk * line.chunk)


@pytest.mark.parametrize("seed", range(12))
def test_random_use_keeps_the_line_consistent(seed: int) -> None:
    dice = random.Random(seed)
    line = Line(64 * 64, chunk=64)
    live: list[Block] = []
    done = {1: 0, 2: 0, 3: 0}

    def reach(stream: int) -> int:
        return done[stream] - 2

    for _ in range(250):
        stream = dice.choice((1, 2, 3))
        action = dice.random()
        if action < 0.45:
            block = find(line, dice.choice((1, 2, 5, 17, 70, 130)), stream, dice.choice((None, reach)), reach)
            if block is not None:
                size = min(block.size, dice.choice((1, 2, 5, 17)))
                line.back(line.missing(block, size))
                live.append(line.carve(block, size))
        elif action < 0.75 and live:
            done[stream] += 1
            line.free(live.pop(dice.randrange(len(live))), stream, done[stream])
        elif action < 0.8 and live:
            line.free(live.pop())
        elif action < 0.9:
            line.free_left(lambda stream: done[stream] - 1)
        elif action < 0.95:
            line.unback(line.spare()[: dice.choice((1, 3))])
        else:
            block = line.find_left(1)
            if block is not None:
                live.append(line.carve(block, 1))
        validate(line)


def test_streams_that_are_gone_are_forgotten_once_they_left_nothing() -> None:
    ranks = {1: 0, 2: 1}
    line = Line(1 << 40, ranks=ranks)
    line.free(take(line, 4096, 1), 1, 1)
    line.free(take(line, 4096, 2), 2, 1)
    for stream in range(3, 100):  # streams that are gone once they were used
        ranks[stream] = 2
        line.free(take(line, 4096, stream), stream, 1)
        del ranks[stream]
        line.free_left(lambda number: int(number > 2))
    assert set(line.pending_streams()) == {1, 2} <= set(line._left) and len(line._left) < 20


def test_many_holes_cost_no_scan() -> None:
    line = Line(1 << 40)
    blocks = [take(line, 4096) for _ in range(20_000)]
    for seq, block in enumerate(blocks[::2], 1):
        line.free(block, 1, seq)

    def pairs(seq: int) -> None:
        line.free(take(line, 8192, 2), 2, seq + 1)
        line.free(take(line, 4096, 1), 1, 20_000 + seq)

    for seq in range(1000):
        pairs(seq)
    assert bytecodes(lambda: pairs(1000)) < 4_000
    line.free_left(everything)
    validate(line)
