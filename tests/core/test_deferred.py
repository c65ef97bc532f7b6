"""The queue of what happens later, alone: whatever the interleaving, each item ends exactly once."""

from __future__ import annotations

import contextlib
import functools
import gc
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamalloc.core import deferred
from streamalloc.core.deferred import Deferred, DeferredQueue
from streamalloc.core.errors import CudaError, DeviceLostError
from tests.interleaving import interleaved
from tests.interrupting import since_3_11
from tests.support import in_threads


class Interrupt(Exception):
    """Comes out of a signal handler."""


def _wait(item: Item) -> bool:
    return False


def _refuse(item: Item) -> bool:
    raise CudaError("CUDA_ERROR_UNKNOWN", 999, "cuMemPoolDestroy")


def _interrupt(item: Item) -> bool:
    raise Interrupt


def _work_again(item: Item) -> bool:
    assert item.deferred.work() == 0
    return False


def _drop_another(item: Item) -> bool:
    """As a finaliser does that the collector runs in the middle of it."""
    item.deferred.submit(Item(item.deferred, item.ended, [_wait]))
    return False


OUTCOMES = (_wait, _refuse, _interrupt, _work_again, _drop_another)


class Item(Deferred):
    """Ends after some attempts that go as its script says."""

    def __init__(self, later: DeferredQueue, ended: list[Item], script: list[Callable[[Item], bool]]) -> None:
        self.deferred = later
        self.ended = ended
        self.script = script
        self.busy = False

    def attempt(self) -> bool:
        assert not self.busy, "two threads have the same item"
        self.busy = True
        try:
            if self.script:
                return self.script.pop()(self)
            assert self not in self.ended
            self.ended.append(self)
            return True
        finally:
            self.busy = False


class Guarded(Item):
    """An item as the queue asks for: a second attempt after its end has no effect."""

    def attempt(self) -> bool:
        return self in self.ended or super().attempt()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Has a test that fails leave no items, which later tests would attempt."""
    before = set(deferred._unfinished)
    yield
    deferred._unfinished.intersection_update(before)


def _work(later: DeferredQueue) -> None:
    with contextlib.suppress(Interrupt):
        later.work()


scripts = st.lists(st.lists(st.sampled_from(OUTCOMES), max_size=4), max_size=8)


@given(scripts, st.lists(st.integers(0, 7), max_size=12))
def test_each_item_ends_once(given_scripts: list[list[Callable[[Item], bool]]], cuts: list[int]) -> None:
    later, ended = DeferredQueue(), list[Item]()
    made = [Item(later, ended, list(script)) for script in given_scripts]
    for number, item in enumerate(made):
        later.submit(item)
        if number in cuts:
            _work(later)
    for _ in range(60):
        _work(later)
    assert len(later) == 0
    assert len(ended) == len(set(ended)) and set(made) <= set(ended)


@pytest.mark.parametrize("function", [DeferredQueue._round, Item.attempt])
def test_two_threads_that_work(function: Callable[..., object]) -> None:
    def make() -> tuple[DeferredQueue, list[Item], list[Item]]:
        later, ended = DeferredQueue(), list[Item]()
        scripts: list[list[Callable[[Item], bool]]] = [
            [],
            [_wait],
            [_refuse, _drop_another],
            [_work_again],
            [_interrupt],
        ]
        made = [Item(later, ended, list(script)) for script in scripts]
        for item in made:
            later.submit(item)
        return later, ended, made

    for later, ended, made in interleaved(function, make, lambda it: _work(it[0]), lambda it: _work(it[0])):
        for _ in range(6):
            _work(later)
        assert len(later) == 0 and len(ended) == len(set(ended)) and set(made) <= set(ended)


def test_threads_for_real() -> None:
    later, ended = DeferredQueue(), list[Item]()
    made: list[Item] = []

    def run(number: int) -> None:
        for turn in range(300):
            item = Item(later, ended, [_wait] * (turn % 3))
            made.append(item)
            later.submit(item)
            later.work()

    in_threads(*[functools.partial(run, number) for number in range(4)])
    for _ in range(3):
        later.work()
    assert len(later) == 0 and len(ended) == len(made) == len(set(ended))


@pytest.fixture
def storm() -> Iterator[Callable[[], int]]:
    """Signals at random points, whose handler raises; says how many did."""
    hits = 0

    def handle(_: int, __: FrameType | None) -> None:
        nonlocal hits
        hits += 1
        raise Interrupt

    before = signal.signal(signal.SIGALRM, handle)
    yield lambda: hits
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@since_3_11
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_signals_lose_no_item_and_end_none_twice(storm: Callable[[], int]) -> None:
    later, ended = DeferredQueue(), list[Item]()
    made = [Guarded(later, ended, [_wait] * (number % 4)) for number in range(200)]
    for number, item in enumerate(made):
        later.submit(item)
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + 1e-6 * (number % 60))
            later.work()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupt:
            pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    for _ in range(4):
        later.work()
    assert storm() > 5
    assert len(later) == 0 and len(made) == len(ended) and set(made) == set(ended)


class Owner:
    """Something that can be dropped."""


class TestEndWith:
    def test_ends_once_its_owner_is_dropped(self) -> None:
        later, ended = DeferredQueue(), list[Item]()
        owner, item = Owner(), Item(later, ended, [_wait])
        later.end_with(owner, item)
        assert later.work() == 0 and len(later) == 0
        del owner
        assert len(later) == 1 and later.work() == 0 and later.work() == 1 and ended == [item]

    def test_in_a_cycle(self) -> None:
        later, ended = DeferredQueue(), list[Item]()
        owner: Any = Owner()
        owner.me = owner
        later.end_with(owner, Item(later, ended, []))
        del owner
        gc.collect()
        assert later.work() == 1 and len(ended) == 1

    def test_what_has_ended_before(self) -> None:
        later, ended = DeferredQueue(), list[Item]()
        owner, item = Owner(), Item(later, ended, [])
        later.end_with(owner, item)
        later.end(item)
        del owner
        assert later.work() == 0 and ended == [item] and len(later) == 0

    @since_3_11
    # A handler may raise in the middle of pytest's own hooks.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_signals_lose_none(self, storm: Callable[[], int]) -> None:
        """However the owner is dropped, and whatever comes out of a handler then."""
        later, ended = DeferredQueue(), list[Item]()
        made: list[Item] = []

        def drop_one() -> None:
            owner, item = Owner(), Guarded(later, ended, [])
            later.end_with(owner, item)
            made.append(item)

        for number in range(300):
            with contextlib.suppress(Interrupt):
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + 1e-6 * (number % 40))
                drop_one()
                later.work()
                signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        later.work()
        assert storm() > 5 and set(made) <= set(ended) and len(later) == 0 and len(ended) == len(set(ended))


def test_an_item_that_is_handed_in_twice_ends_once() -> None:
    later, ended = DeferredQueue(), list[Item]()
    item = Item(later, ended, [_wait])
    later.submit(item)
    later.submit(item)
    assert later.work() == 0 and later.work() == 1 and ended == [item] and len(later) == 0


def _after_another(item: Item) -> bool:
    """The end of a pool, which waits for a free."""
    if item.ended:
        item.ended.append(item)
    return item in item.ended


def test_an_item_that_is_submitted_during_its_attempt_is_attempted_again() -> None:
    """What it got may have come after the attempt, which another point of work must not end then."""
    queue, ended, found = DeferredQueue(), list[Item](), list[list[int]]()
    got = [1]

    def take(item: Item) -> bool:
        found.append(got[:])
        got.clear()
        if len(found) == 1:
            got.append(2)
            queue.submit(item)
            in_threads(queue.work)
        return True

    queue.submit(Item(queue, ended, [take, take]))
    queue.work()
    assert found == [[1], [2]] and not got and not len(queue)


def test_two_threads_end_the_item_of_one_owner() -> None:
    """Neither fails."""

    def make() -> tuple[DeferredQueue, Item]:
        queue = DeferredQueue()
        item = Item(queue, [], [])
        queue.end_with(owner, item)
        return queue, item

    def disown(made: tuple[DeferredQueue, Item]) -> None:
        made[0]._disown(made[1])

    owner = Owner()
    for queue, item in interleaved(disown, make, disown, disown):
        assert not queue._owned and not hasattr(item, "_dropped_with")


def test_what_another_item_waits_for_ends_first() -> None:
    later, ended = DeferredQueue(), list[Item]()
    last = Item(later, ended, [_after_another])
    later.submit(last)
    later.submit(Item(later, ended, []))
    assert later.work() == 2 and ended[-1] is last


class TestEnd:
    def test_at_once(self) -> None:
        later, ended = DeferredQueue(), list[Item]()
        assert later.end(Item(later, ended, [])) and len(later) == 0

    @pytest.mark.parametrize("outcome", [_refuse, _interrupt])
    def test_an_error_is_the_caller_s_and_the_item_stays(self, outcome: Callable[[Item], bool]) -> None:
        later, ended = DeferredQueue(), list[Item]()
        with pytest.raises((CudaError, Interrupt)):
            later.end(Item(later, ended, [outcome]))
        assert len(later) == 1 and later.work() == 1 and len(ended) == 1

    def test_not_while_a_capture_is_under_way(self) -> None:
        later, ended = DeferredQueue(), list[Item]()
        later.begin_capture(later)
        assert not later.end(Item(later, ended, [])) and later.work() == 0
        del later.captures[later]
        assert later.work() == 1


def test_what_is_gone_has_ended() -> None:
    later, forgotten = DeferredQueue(), list[Deferred]()

    class Lost(Deferred):
        def attempt(self) -> bool:
            raise DeviceLostError("CUDA_ERROR_ILLEGAL_ADDRESS", 700, "cuEventQuery")

        def forget(self) -> None:
            forgotten.append(self)

    item = Lost()
    later.submit(item)
    assert later.work() == 1 and forgotten == [item]


def test_what_is_not_the_driver_s_goes_on_to_the_caller() -> None:
    """It may be what a signal handler raises, and nothing tells."""
    later, ended = DeferredQueue(), list[Item]()

    def fail(_: Item) -> bool:
        raise KeyError("of a handler")

    later.submit(Item(later, ended, [fail]))
    later.submit(Item(later, ended, []))
    with pytest.raises(KeyError):
        later.work()
    assert later.work() == 2 and len(ended) == 2 and len(later) == 0


def test_finalisers_hand_in_while_items_move() -> None:
    """The collector runs them wherever a container is made, also with the lock of the queue held."""
    later, ended = DeferredQueue(), list[Item]()

    class Dropped:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            later.submit(Item(later, ended, []))

    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(300):
            Dropped()
            later.work()
    finally:
        gc.set_threshold(*before)
    gc.collect()
    later.work()
    assert len(ended) == 300 and len(later) == 0


class TestMany:
    """Points that come often cost the same however much waits."""

    def test_attempts_in_vain_are_few(self) -> None:
        later, ended, attempts = DeferredQueue(), list[Item](), list[Item]()

        def count(item: Item) -> bool:
            attempts.append(item)
            return False

        for _ in range(1000):
            later.submit(Item(later, ended, [count] * 1000))
        later.work(8)
        assert len(attempts) == 1000  # each is new
        for _ in range(20):
            attempts.clear()
            assert later.work(8) == 0 and len(attempts) == 8

    def test_each_gets_its_turn(self) -> None:
        later, ended = DeferredQueue(), list[Item]()
        made = [Item(later, ended, [_wait] * 2) for _ in range(100)]
        for item in made:
            later.submit(item)
        for _ in range(1 + 2 * -(-100 // 8)):
            later.work(8)
        assert set(ended) == set(made)

    def test_what_ends_costs_the_others_nothing(self) -> None:
        later, ended = DeferredQueue(), list[Item]()
        for _ in range(100):
            later.submit(Item(later, ended, [_wait]))
        assert later.work(8) == 0 and later.work(8) == 100

    def test_a_new_one_does_not_wait_for_the_others(self) -> None:
        later, ended = DeferredQueue(), list[Item]()
        for _ in range(100):
            later.submit(Item(later, ended, [_wait] * 1000))
        later.work(8)
        later.submit(Item(later, ended, []))
        assert later.work(8) == 1

    def test_where_all_are_to_be_tried(self) -> None:
        later, ended = DeferredQueue(), list[Item]()
        for number in range(100):
            later.submit(Item(later, ended, [_wait] * (1 if number == 70 else 1000)))
        later.work(8)
        assert later.work() == 1
