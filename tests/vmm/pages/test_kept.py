"""Released pages: parked while queued work uses them, then kept until another place needs their memory."""

import contextlib
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import vmm
from streamalloc.core.internal import deferred_queue
from streamalloc.core.session import session_of
from streamalloc.testing import Faults, Gate
from streamalloc.vmm.pages.places import Parking, PhysicalPages
from tests.interrupting import Interrupt, Interrupted, lost_one
from tests.support import Account, eventually, every, executed, in_a_thread, names, pending, read, soon
from tests.vmm.pages.conftest import PAGES
from tests.vmm.pages.support import commit_filled, mapping, page, settled, values
from tests.vmm.support import PAGE

EMPTY = [0] * PAGES


class TestRecommit:
    def test_takes_no_call_for_the_mapping(self, traced: Any, arena: vmm.PageArena, space: vmm.PageSpace) -> None:
        pages = [1, 2, 3, 8, 9, 12]
        space.commit(pages)
        before = space.numbers
        traced.calls.clear()
        space.release(pages, after=())
        assert settled(arena) == (6, 0, 6) and space.kept.tolist() == pages
        space.commit(pages)
        assert mapping(traced) == [] and len(names(traced, "cuMemsetD8Async")) == 3
        assert space.numbers.tolist() == before.tolist() and settled(arena) == (6, 0, 0)

    def test_of_prepared_pages(self, traced: Any, arena: vmm.PageArena) -> None:
        with arena.space(100 * PAGE) as space:
            space.commit([3])
            assert space.prepare(range(80)).result() == 79
            assert settled(arena) == (80, 0, 79) and space.committed.tolist() == [3]
            assert not read(space[: 3 * PAGE]).any()
            traced.calls.clear()
            space.commit(range(0, 80, 5))
            assert names(traced) == []
            assert space.prepare(range(80)).result() == 0


def test_releases_do_not_pile_up(space: vmm.PageSpace, gate: Gate, other: sa.Stream) -> None:
    """Nothing else is a point of work in the loop, and some pages wait all the time."""
    queue = deferred_queue(session_of(space))
    space.commit(range(PAGES))
    gate.hold(other)
    space.release([0, 1], after=other)
    before = len(queue)
    for turn in range(50):
        page = 2 + turn % 3
        space.commit(page)
        space.release(page, after=(space.stream, ())[turn % 2])
    assert len(queue) <= before + 8


class TestZeros:
    def test_come_in_the_order_of_the_stream(self, space: vmm.PageSpace, gate: Gate, other: sa.Stream) -> None:
        commit_filled(space, [2, 3])
        space.stream.synchronize()
        both = space[2 * PAGE : 4 * PAGE]
        before, after = np.zeros((2, 2 * PAGE), np.uint8)
        with sa.allocate(4 * PAGE, other) as copies:
            gate.hold(other)
            copies[: 2 * PAGE].copy_from(both, other)
            space.release([2, 3], after=other)
            copies[2 * PAGE :].copy_from(both, other)
            assert pending(other) and space.parked == 2
            gate.open()
            copies[: 2 * PAGE].copy_to(before, other)
            copies[2 * PAGE :].copy_to(after, other)
            other.synchronize()
        assert before[::PAGE].tolist() == [3, 4] and not after.any()

    @pytest.fixture
    def held(self, arena: vmm.PageArena, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Gate:
        """A gate before the zeros of releases that need not wait."""
        stream = arena._physical.idle_stream()
        assert stream is not None
        gate.hold(stream)
        monkeypatch.setattr(type(arena._physical), "idle_stream", lambda _: stream)
        return gate

    def test_are_seen_by_the_stream_of_the_space(self, space: vmm.PageSpace, held: Gate) -> None:
        commit_filled(space, range(PAGES))
        space.stream.synchronize()
        space.release(range(PAGES), after=())
        assert pending(space.stream)
        held.open()
        assert values(space) == EMPTY

    def test_are_written_before_a_commit(
        self, space: vmm.PageSpace, arena: vmm.PageArena, device: sa.Device, held: Gate, other: sa.Stream
    ) -> None:
        """Otherwise they would overwrite what its user writes, on whichever stream."""
        space.commit(1)
        arena.prepare(1).result()  # A commit that is short of memory waits for all zeros.
        space.release(1, after=())
        with soon(held.open):
            space.commit(1)
            page(space, 1).fill(8, other)
        device.synchronize()
        assert values(space)[1] == 8

    def test_are_written_before_a_space_ends(self, space: vmm.PageSpace, arena: vmm.PageArena, held: Gate) -> None:
        space.commit(1)
        space.release(1, after=())
        space._places.release()
        assert not space.closed and arena.statistics() == (1, 0, 1, 0)
        held.open()
        assert settled(arena) == (1, 0, 1)

    @pytest.mark.parametrize("after", [None, "event"])
    def test_are_there_once_the_device_has_synchronised(
        self, space: vmm.PageSpace, device: sa.Device, gate: Gate, other: sa.Stream, after: Any
    ) -> None:
        """No call on the pages is between, and the reader is any stream."""
        commit_filled(space, range(PAGES))
        space.stream.synchronize()
        gate.hold(other)
        space.release(range(PAGES), after=after and other.record())
        gate.open()
        device.synchronize()
        seen = np.ones(PAGES * PAGE, np.uint8)
        space.copy_to(seen, other)
        other.synchronize()
        assert not seen.any()

    def test_of_one_release_do_not_wait_for_another(self, space: vmm.PageSpace, gate: Gate, other: sa.Stream) -> None:
        space.commit([1, 2, 3])
        gate.hold(other)
        space.release(1, after=other.record())
        space.release(2, after=[space.stream, space.stream.record()])
        space.release(3, after=())
        space.commit([2, 3])
        assert pending(other) and space.parked == 1

    def test_of_more_releases_than_there_are_streams(
        self, space: vmm.PageSpace, arena: vmm.PageArena, gate: Gate, other: sa.Stream, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The pages of the others are unmapped after their work."""
        monkeypatch.setattr("streamalloc.vmm.pages.places._STREAMS", 2)
        commit_filled(space, range(4))
        space.stream.synchronize()
        gate.hold(other)
        for one in range(4):
            space.release(one, after=other.record())
        assert arena.statistics().parked == 4
        gate.open()
        assert settled(arena) == (4, 2, 2) and space.kept.tolist() == [0, 1] and values(space) == EMPTY

    @pytest.mark.simulated_only("a call that fails is the same on any driver")
    @pytest.mark.parametrize("call", ["cuMemsetD8Async", "cuEventRecord"])
    @pytest.mark.parametrize("behind", [True, False])
    def test_that_the_driver_refuses(
        self, faults: Faults, space: vmm.PageSpace, arena: vmm.PageArena, call: str, behind: bool
    ) -> None:
        """The pages are unmapped instead, or another record stands for the zeros."""
        stream = space.stream
        commit_filled(space, [1, 3])
        stream.synchronize()
        # The second record is that after the zeros.
        faults.fail(call, 2, result="CUDA_ERROR_UNKNOWN")
        space.release([1, 3], after=stream if behind else stream.record())
        assert faults.failed == [call] and space.committed.size == 0
        assert settled(arena) == ((2, 2, 0) if call == "cuMemsetD8Async" else (2, 0, 2))
        assert values(space) == EMPTY


class TestShared:
    """Memory that several pages share is cleared with the last of them only."""

    def test_a_parked_page_is_a_user(
        self, space: vmm.PageSpace, arena: vmm.PageArena, gate: Gate, other: sa.Stream
    ) -> None:
        """Neither release may clear what work of the other one reads."""
        space.commit(0)
        page(space, 0).fill(7)
        space.stream.synchronize()
        space.alias(1, space, 0)
        seen = np.zeros(PAGE, np.uint8)
        with sa.allocate(PAGE, other) as copy:
            gate.hold(other)
            copy.copy_from(page(space, 0), other)
            space.release(0, after=other)
            space.release(1, after=space.stream)
            space.stream.synchronize()
            assert arena.statistics().parked == 1 and values(space)[1] == 0
            gate.open()
            copy.copy_to(seen, other)
            other.synchronize()
        assert (seen == 7).all()
        assert settled(arena) == (1, 1, 0) and values(space) == EMPTY

    def test_a_copy_that_is_under_way_is_a_user(
        self, space: vmm.PageSpace, arena: vmm.PageArena, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another thread releases both pages while one of them is copied."""
        space.commit(0)
        page(space, 0).fill(3)
        space.alias(1, space, 0)
        copy = vmm.PageSpace._copy

        def slow(*args: Any) -> None:
            space.release([0, 1], after=())
            assert not space.kept.size
            copy(*args)

        monkeypatch.setattr(vmm.PageSpace, "_copy", slow)
        assert space.make_private([0]) == 0
        assert settled(arena) == (2, 2, 0) and values(space) == EMPTY


class TestTaken:
    """Kept pages are taken from their places, which read as zeros then too."""

    def test_before_any_is_created_and_the_oldest_first(self, space: vmm.PageSpace, arena: vmm.PageArena) -> None:
        space.commit(range(4))
        for one in (2, 0, 1):
            space.release(one, after=())
            settled(arena)
        space.commit([8, 9])
        assert space.kept.tolist() == [1] and settled(arena) == (4, 0, 1)

    def test_not_before_they_are_cleared(self, device: sa.Device, gate: Gate, other: sa.Stream) -> None:
        with vmm.PageArena(device, limit=PAGE, patience=0) as arena, arena.space(2 * PAGE, stream=other) as space:
            space.commit(0)
            gate.hold(other)
            space.release(0, after=other)
            with pytest.raises(sa.OutOfMemoryError, match="1 parked"):
                space.commit(1)
            assert arena.trim() == 0
            gate.open()
            other.synchronize()
            space.commit(1)
            assert arena.statistics() == (1, 0, 0, 0)

    def test_a_wait_for_the_place_itself_has_no_limit(self, device: sa.Device, gate: Gate, other: sa.Stream) -> None:
        with vmm.PageArena(device, patience=0) as arena, arena.space(2 * PAGE, stream=other) as space:
            space.commit(0)
            gate.hold(other)
            space.release(0, after=other)
            space.commit(1)
            assert space.parked == 1
            with soon(gate.open):
                space.commit(0)
            assert space.committed.tolist() == [0, 1]

    def test_if_others_have_no_memory(self, faults: Faults, arena: vmm.PageArena, space: vmm.PageSpace) -> None:
        faults.fail("cuMemCreate", 3)
        space.commit(range(2))
        space.release(range(2), after=())
        with vmm.PhysicalMemory(space.device, PAGE):
            assert settled(arena) == (0, 0, 0)
            assert values(space) == EMPTY


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
        commit_filled(space, [2, 3])
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
        arena.prepare(1).result()  # A commit that is short of memory waits for all pages.
        space.release([1, 2], after=other)
        with soon(gate.open):
            space.commit(1)
            assert other.query() and space.committed.tolist() == [1]
            page(space, 1).fill(8)
        assert values(space)[1] == 8
        assert settled(arena) == (3, 1, 1) and values(space)[2] == 0

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
        with soon(gate.open):
            space.commit(2)
            assert other.query()
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
            commit_filled(space, range(5))
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
            with soon(gate.open):
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


def test_a_property_that_is_polled_alone_becomes_final(space: vmm.PageSpace) -> None:
    """Nothing else is a point of work: the stream is only queried."""
    commit_filled(space, range(4))
    space.alias(range(8, 12), space, range(4))
    stream = space.stream
    with vmm.HostTier(space.device) as host:
        space.swap_out(range(8, 12), host, stream)
        assert executed(stream)
        assert eventually(lambda: space.parked == 0)
        space.release([1, 2], after=stream.record())
        assert executed(stream) and eventually(lambda: space.kept.tolist() == [1, 2])


def test_pages_whose_partners_are_gone_are_not_shared(space: vmm.PageSpace, gate: Gate, other: sa.Stream) -> None:
    commit_filled(space, [0, 1])
    for ask in (lambda: space.shared([0, 1]).any(), lambda: space.make_private([0, 1])):
        space.alias([8, 9], space, [0, 1])
        gate.hold(other)
        space.release([8, 9], after=other)
        gate.open()
        assert executed(other) and not ask()


@pytest.mark.parametrize("drop", [False, True])
def test_a_space_ends_after_the_work(arena: vmm.PageArena, other: sa.Stream, gate: Gate, drop: bool) -> None:
    """A close waits for it; the memory of a dropped one stays until then."""
    space = arena.space(4 * PAGE, stream=other)
    space.commit(range(3))
    gate.hold(other)
    space[: 3 * PAGE].fill(1)
    space.release(0, after=other)
    if drop:
        del space
        gc.collect()
        assert arena.statistics() == (3, 0, 1, 0)
        gate.open()
    else:
        with soon(gate.open):
            space.close(after=())
            assert other.query()
    other.synchronize()
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


@pytest.mark.simulated_only("where a signal may come is the same on any driver")
@in_a_thread
def test_an_interrupted_close_leaves_no_page_kept(machine: Any) -> None:
    """The arena would map zeros in their place once the addresses belong to others. One object may be lost."""
    account = Account(machine)
    for nth in every(2):
        with vmm.PageArena(account.device) as arena:
            space = arena.space(4 * PAGE)
            space.commit([0, 1, 2])
            space.release([0, 1], after=())
            account.device.synchronize()
            assert settled(arena)[2] == 2
            block = Interrupt(nth)
            with contextlib.suppress(Interrupted), block:
                space.close(after=())
            if nth % 4 > 1:
                space.close(after=())
            del space
            arena.trim()
            assert settled(arena) in ((0, 0, 0), (1, 0, 0)), block.came
        if not block.came:
            break
    assert nth > 20 and lost_one(account.left) and account.checked.hazards == []


def test_a_call_for_room_waits_for_no_page_that_nobody_clears() -> None:
    looked: list[bool] = []
    pages: Any = SimpleNamespace(count=1, nbytes=PAGE, kept=0, clearing=[], _trim_spare=lambda _: 0)
    pages.finish_clearing = lambda: looked.append(True)
    pages.vacate = lambda _: setattr(pages, "count", 0)
    pages.try_changing = lambda act, _: act()
    assert PhysicalPages.make_room(pages) == PAGE and looked == [True]
