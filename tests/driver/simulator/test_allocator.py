"""The allocator's bookkeeping alone."""

from __future__ import annotations

import random
import time

import pytest

from streamalloc.driver.simulator.allocator import Line
from streamalloc.driver.simulator.blocks import Block, Gap, State, rank
from streamalloc.driver.simulator.constants import CHUNK
from tests.support import MiB

pytestmark = pytest.mark.simulated_only("tests of the simulated driver itself")


def nothing(_stream: int) -> int:
    return 0


def everything(_stream: int) -> int:
    return 1 << 62


def take(line: Line, size: int, stream: int = 1, reach: object = nothing) -> Block:
    """Allocate, growing where that is needed."""
    assert callable(reach)
    block = line.take(size, stream, reach)
    if block is None:
        for start, length in line.plan(size, stream, reach):
            line.back(start, length)
        block = line.take(size, stream, reach)
    assert block is not None
    return block


def validate(line: Line) -> None:
    """Everything that must hold between two operations."""
    position = reserved = 0
    previous: Block | None = None
    gaps: dict[int, Gap] = {}
    gap: Gap | None = None
    for block in line.blocks():
        assert block.start == position and block.size > 0 and block.prev is previous
        assert block.state is not State.GONE
        position = block.end
        if block.state is not State.VOID:
            reserved += block.size
        if previous is not None and block.state in (State.READY, State.VOID):
            assert previous.state is not block.state, "neighbours that should have been merged"
        if block.state is State.PENDING:
            assert block in line._pending[block.stream]
        if block.is_free:
            if gap is None:
                gap = gaps[block.start] = Gap(block, block)
            gap.last = block
            gap.count(block)
            if block.state is State.READY and block.size >= line.chunk:
                assert block in line._roomy
        else:
            gap = None
        previous = block
    assert position == line.capacity
    assert reserved == line.reserved
    assert set(gaps) == set(line._gaps)
    for start, expected in gaps.items():
        found = line._gaps[start]
        assert (found.first, found.last, found.size) == (expected.first, expected.last, expected.size)
        assert (found.ready, found.pending, found.kind) == (
            expected.ready,
            expected.pending,
            expected.classify(),
        )
        assert rank(found.size, start) in line._index[found.kind]
    assert sum(map(len, line._index.values())) == len(gaps)


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
            size = dice.choice((1, 2, 5, 17, 70, 130))
            block = line.take(size, stream, reach)
            if block is None:
                for start, length in line.plan(size, stream, reach):
                    line.back(start, length)
                block = line.take(size, stream, reach)
            if block is not None:
                assert not block.waits
                live.append(block)
        elif action < 0.75 and live:
            done[stream] += 1
            line.free(live.pop(dice.randrange(len(live))), stream, done[stream])
        elif action < 0.8 and live:
            line.free_ready(live.pop())
        elif action < 0.9:
            line.settle(stream, done[stream] - dice.choice((0, 0, 2)))
        elif action < 0.95:
            line.release(lambda reserved: reserved > 128)
        else:
            block = line.take(20, stream, reach, wait=True)
            if block is not None:
                assert all(seq > reach(other) for other, seq in block.waits.items())
                live.append(block)
        validate(line)


def test_growth_uses_the_free_tail() -> None:
    line = Line(1 << 40)
    assert take(line, 20 * MiB).start == 0
    assert take(line, 40 * MiB).start == 20 * MiB
    assert line.reserved == 64 * MiB


def test_best_fit_then_lowest_address() -> None:
    line = Line(1 << 40)
    blocks = [take(line, size * MiB) for size in (5, 1, 3, 1, 5, 1)]
    for block in blocks[::2]:
        line.free_ready(block)
    assert take(line, 2 * MiB).start == 6 * MiB
    assert take(line, 4 * MiB).start == 0
    assert take(line, 4 * MiB).start == 10 * MiB


def test_pending_memory_is_for_its_own_stream_until_seen() -> None:
    line = Line(CHUNK)
    line.free(take(line, 20 * MiB), 1, 1)
    assert line.take(20 * MiB, 2, nothing) is None
    assert line.settle(1, 0) is False
    assert line.take(20 * MiB, 2, nothing) is None
    assert line.settle(1, 1) is True
    block = line.take(20 * MiB, 2, nothing)
    assert block is not None and block.start == 0


def test_own_pending_memory_merges_with_ready_memory() -> None:
    line = Line(CHUNK)
    line.free(take(line, 20 * MiB), 1, 1)
    assert line.take(32 * MiB, 2, nothing) is None
    assert take(line, 32 * MiB).start == 0


def test_waiting_names_the_frees_to_wait_for() -> None:
    line = Line(CHUNK)
    one, two = take(line, 16 * MiB), take(line, 16 * MiB)
    line.free(one, 1, 7)
    line.free(two, 2, 9)
    block = line.take(32 * MiB, 3, lambda stream: 7 if stream == 1 else 0, wait=True)
    assert block is not None and block.waits == {2: 9}


def test_own_memory_goes_before_completed_memory_of_others() -> None:
    line = Line(1 << 40)
    own, _, other, _ = (take(line, size * MiB) for size in (8, 1, 5, 1))
    line.free(own, 1, 1)
    line.free(other, 2, 1)
    assert take(line, 4 * MiB, 1, everything).start == 0


def test_released_holes_are_backed_again() -> None:
    line = Line(1 << 40)
    large, small = take(line, 64 * MiB), take(line, 1 * MiB)
    line.free_ready(large)
    assert line.release(lambda reserved: True) == [(0, 64 * MiB)]
    assert line.reserved == 32 * MiB
    validate(line)
    assert take(line, 64 * MiB).start == 0
    assert line.reserved == 96 * MiB
    assert small.start == 64 * MiB
    validate(line)


def test_release_takes_the_highest_chunks_first_and_only_whole_ones() -> None:
    line = Line(1 << 40)
    first, rest = take(line, 1 * MiB), take(line, 120 * MiB)
    line.free_ready(rest)
    assert line.release(lambda reserved: reserved > 64 * MiB) == [(64 * MiB, 64 * MiB)]
    assert line.release(lambda reserved: True) == [(32 * MiB, 32 * MiB)]
    assert line.release(lambda reserved: True) == []
    line.free_ready(first)
    assert line.release(lambda reserved: True) == [(0, 32 * MiB)]
    assert line.reserved == 0
    validate(line)


def test_many_holes_cost_no_scan() -> None:
    line = Line(1 << 40)
    blocks = [take(line, 4096) for _ in range(20_000)]
    for seq, block in enumerate(blocks[::2], 1):
        line.free(block, 1, seq)
    start = time.perf_counter()
    for seq in range(1000):
        line.free(take(line, 8192, 2), 2, seq + 1)
        line.free(take(line, 4096, 1), 1, 20_000 + seq)
    assert time.perf_counter() - start < 0.5
    line.settle(1, 1 << 40)
    validate(line)
