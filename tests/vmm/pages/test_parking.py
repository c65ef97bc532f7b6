"""Released pages that queued work still uses."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import vmm
from streamalloc.testing import Gate
from streamalloc.vmm.pages.places import Parking
from tests.interrupting import Interrupt, Interrupted
from tests.support import every, executed, in_a_thread, pending
from tests.vmm.pages.conftest import PAGES
from tests.vmm.pages.support import fill, opening, page, settled, values
from tests.vmm.support import PAGE

AFTER: dict[str, Callable[[sa.Stream], Any]] = {
    "a stream": lambda stream: stream,
    "an event": lambda stream: stream.record(),
    "several": lambda stream: [stream.device.default_stream, stream.record()],
    "all work": lambda stream: None,
}


class TestRelease:
    @pytest.mark.parametrize("name", AFTER)
    def test_does_not_wait(
        self, arena: vmm.PageArena, space: vmm.PageSpace, gate: Gate, other: sa.Stream, name: str
    ) -> None:
        space.commit([2, 3])
        fill(space, [2, 3])
        space.stream.synchronize()
        seen = np.zeros(2 * PAGE, np.uint8)
        gate.hold(other)
        pages = space[2 * PAGE : 4 * PAGE]
        with sa.allocate(2 * PAGE, other) as copy:
            copy.copy_from(pages, other)
            space.release([2, 3], after=AFTER[name](other))
            assert space.committed.size == 0 and space.parked == 2
            assert arena.statistics() == (2, 0, 2, 0)
            assert pending(other)
            gate.open()
            copy.copy_to(seen, other)
            other.synchronize()
        assert seen.reshape(2, -1)[:, ::4096].tolist() == [[3] * 512, [4] * 512]
        assert settled(arena) == (2, 0, 2) and space.kept.tolist() == [2, 3]
        assert values(space) == [0] * PAGES

    def test_of_an_event_that_is_closed(self, arena: vmm.PageArena, space: vmm.PageSpace, gate: Gate) -> None:
        space.commit(1)
        gate.hold(space.stream)
        page(space, 1).fill(3)
        event = sa.Event(space.device)
        space.stream.record(event)
        space.release(1, after=event)
        event.close()
        assert arena.statistics() == (1, 0, 1, 0)
        gate.open()
        assert executed(space.stream)
        assert settled(arena) == (1, 0, 1)


class TestAgain:
    def test_a_commit_waits(self, arena: vmm.PageArena, space: vmm.PageSpace, gate: Gate, other: sa.Stream) -> None:
        space.commit([1, 2])
        gate.hold(other)
        page(space, 1).fill(3, other)
        space.release([1, 2], after=other)
        with opening(gate):
            space.commit(1)
        assert other.query() and space.committed.tolist() == [1]
        page(space, 1).fill(8)
        assert values(space)[1] == 8
        assert settled(arena) == (2, 0, 1) and values(space)[2] == 0

    def test_a_page_that_is_shared_is_exchanged(
        self, arena: vmm.PageArena, space: vmm.PageSpace, gate: Gate, other: sa.Stream
    ) -> None:
        space.commit(1)
        page(space, 1).fill(9)
        space.stream.synchronize()
        space.alias(2, space, 1)
        gate.hold(other)
        page(space, 2).fill(3, other)
        space.release(2, after=other)
        with opening(gate):
            space.commit(2)
        page(space, 2).fill(4)
        assert values(space)[1:3] == [3, 4]
        assert not space.shared([1, 2]).any() and settled(arena) == (2, 0, 0)

    @pytest.mark.parametrize("act", ["commit", "swap in", "make private", "prepare"])
    def test_a_call_without_memory_waits_for_that_of_parked_pages(
        self, device: sa.Device, stream: sa.Stream, other: sa.Stream, gate: Gate, act: str
    ) -> None:
        with (
            vmm.PageArena(device, limit=5 * PAGE) as arena,
            arena.space(PAGES * PAGE, stream=stream) as space,
            vmm.HostTier(device) as tier,
        ):
            space.commit(range(5))
            fill(space, range(5))
            space.swap_out([0, 1], tier)
            space.commit([8])
            space.alias(9, space, 4)
            stream.synchronize()
            gate.hold(other)
            space.release([2, 8], after=other)
            arena._physical.patience = 0
            with pytest.raises(
                sa.OutOfMemoryError, match="room for 2 pages of 2 MiB: 2 pages are in use, and 2 parked"
            ):
                space.commit([10, 11, 12])
            arena._physical.patience = None  # no limit
            with opening(gate):
                if act == "commit":
                    space.commit([10, 11])
                elif act == "swap in":
                    assert space.swap_in([0, 1]) == 2
                elif act == "make private":
                    space.commit([10, 11])
                    space.release(10, after=other)
                    assert space.make_private(4) == 1
                else:
                    assert arena.prepare(3).result() == 3
            settled(arena)
            assert values(space)[:5] == [act == "swap in", 2 * (act == "swap in"), 0, 4, 5]
            assert arena.statistics().pages <= 5

    def test_pages_that_stay_parked_are_waited_for_once(
        self, device: sa.Device, stream: sa.Stream, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with vmm.PageArena(device, limit=PAGE) as arena, arena.space(2 * PAGE, stream=stream) as space:
            space.commit(0)
            with monkeypatch.context() as patch:
                patch.setattr(Parking, "finish", lambda _: False)
                space.release(0, after=stream)
                with pytest.raises(sa.OutOfMemoryError, match="1 parked"):
                    space.commit(1)
            space.commit(1)


class TestEnd:
    def test_a_space_is_closed_after_the_work(self, arena: vmm.PageArena, device: sa.Device, gate: Gate) -> None:
        with device.create_stream() as stream:
            space = arena.space(4 * PAGE, stream=stream)
            space.commit(range(2))
            gate.hold(stream)
            space[: 2 * PAGE].fill(1)
            space.release(0, after=stream)
            with opening(gate):
                space.close(after=())
            stream.synchronize()
        assert settled(arena) == (2, 2, 0)

    def test_a_space_is_dropped_before_the_work(self, arena: vmm.PageArena, device: sa.Device, gate: Gate) -> None:
        with device.create_stream() as stream:
            space = arena.space(4 * PAGE, stream=stream)
            space.commit(range(3))
            gate.hold(stream)
            space[: 3 * PAGE].fill(1)
            space.release(0, after=stream)
            del space
            gc.collect()
            assert arena.statistics() == (3, 0, 1, 0)
            gate.open()
            stream.synchronize()
            assert settled(arena) == (3, 3, 0)


@pytest.mark.simulated_only("where a signal may come is the same on any driver")
@in_a_thread
def test_an_interrupted_release_leaves_no_page_parked(arena: vmm.PageArena, space: vmm.PageSpace) -> None:
    for nth in every(2):
        space.commit([0, 1])
        block = Interrupt(nth)
        with contextlib.suppress(Interrupted), block:
            space.release([0, 1], after=space.stream)
            space.commit([0, 1])
        if not block.came:
            break
        space.release([0, 1])
        space.device.synchronize()
    space.release([0, 1])
    settled(arena)
