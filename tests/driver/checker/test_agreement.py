"""The checker and the seeded scheduler agree: where the checker is silent, every legal order gives the same bytes."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as some

import streamalloc as sa
import streamalloc.driver as sd
from tests.support import KEEP

STREAMS, BUFFERS, EVENTS = 3, 2, 2
SIZE = 256
SEEDS = (None, 1, 2, 3)

STEPS = some.lists(
    some.tuples(
        some.sampled_from(["fill", "fill", "copy", "record", "wait", "record", "wait", "synchronise", "again"]),
        some.integers(0, STREAMS - 1),
        some.integers(0, BUFFERS - 1),
        some.integers(0, EVENTS - 1),
    ),
    min_size=3,
    max_size=14,
)


def run(driver: Any, steps: list[tuple[str, int, int, int]]) -> list[bytes]:
    """Contents of a program's buffers at its end, and the bytes that it has copied out."""
    device = sa.Device(0, driver=driver)
    streams = [device.create_stream(blocking=number == 2) for number in range(STREAMS)]
    pool = sa.MemoryPool(device, release_threshold=KEEP)
    buffers = [pool.allocate(SIZE, streams[0]) for _ in range(BUFFERS)]
    events = [device.create_event() for _ in range(EVENTS)]
    for buffer in buffers:
        buffer.fill(0)
    streams[0].synchronize()
    for number, (kind, stream, which, event) in enumerate(steps, 1):
        on = streams[stream]
        if kind == "fill":
            buffers[which][: SIZE // (1 + number % 2)].fill(number, on)
        elif kind == "copy":
            buffers[which].copy_to(buffers[which - 1], on)
        elif kind == "record":
            on.record(events[event])
        elif kind == "wait":
            on.wait(events[event])
        elif kind == "synchronise":
            on.synchronize()
        elif kind == "again":
            buffers[which].free(on)
            buffers[which] = pool.allocate(SIZE, on)
            buffers[which].fill(number, on)
    device.synchronize()
    left = []
    for one in buffers:
        data = bytearray(SIZE)
        one.copy_to(data, streams[0])
        streams[0].synchronize()
        left.append(bytes(data))
        one.free(streams[0])
    device.synchronize()
    for owner in (*streams, *events, pool):
        owner.close()
    return left


@settings(max_examples=25, deadline=None)
@given(steps=STEPS)
def test_what_the_checker_lets_pass_has_one_outcome(steps: list[tuple[str, int, int, int]]) -> None:
    """Also: what some seed shows as other bytes, the checker has found."""
    checked = sd.checked(sd.simulated())
    outcomes = [run(checked, steps)]
    if not checked.hazards:
        outcomes += [run(sd.simulated(seed=seed), steps) for seed in SEEDS[1:]]
    assert all(one == outcomes[0] for one in outcomes)


def test_the_scheduler_shows_what_is_missing() -> None:
    """A program with a missing dependency comes out in more than one way, and its twin in one."""
    wrong = [("fill", 0, 0, 0), ("fill", 1, 0, 0)]
    right = [("fill", 0, 0, 0), ("record", 0, 0, 0), ("wait", 1, 0, 0), ("fill", 1, 0, 0)]
    for steps, expected in ((wrong, True), (right, False)):
        checked = sd.checked(sd.simulated())
        run(checked, steps)
        assert bool(checked.hazards) is expected
        ways = {tuple(run(sd.simulated(seed=seed), steps)) for seed in range(12)}
        assert (len(ways) > 1) is expected
