"""The queue of what happens later, alone: whatever the interleaving, each item ends exactly once."""

from __future__ import annotations

import contextlib
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
from streamalloc.driver.internal import Lock
from tests.interleaving import interleaved
from tests.interrupting import since_3_11
from tests.support import each_raises, in_threads


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


def _work(later: DeferredQueue, most: int | None = None) -> None:
    with contextlib.suppress(Interrupt):
        later.work(most)


@pytest.fixture
def later() -> DeferredQueue:
    return DeferredQueue()


@pytest.fixture
def ended() -> list[Item]:
    return []


class Owner:
    """Something that can be dropped."""


def submit_twice(later: DeferredQueue, item: Item) -> None:
    later.submit(item)
    later.submit(item)


def end(later: DeferredQueue, item: Item) -> None:
    item.script = [one for one in item.script if one is not _work_again]  # which may end others
    errors: dict[Any, type[Exception]] = {_refuse: CudaError, _interrupt: Interrupt}
    expected = errors.get(item.script[-1]) if item.script else None  # an error is the caller's, and the item stays
    with pytest.raises(expected) if expected else contextlib.nullcontext():
        assert later.end(item) == (item in item.ended)


def drop_the_owner(later: DeferredQueue, item: Item) -> None:
    owner = Owner()
    later.end_with(owner, item)
    _work(later)
    assert item not in item.ended
    del owner


def end_before_the_owner(later: DeferredQueue, item: Item) -> None:
    owner = Owner()
    later.end_with(owner, item)
    end(later, item)
    _work(later)
    del owner


WAYS = (DeferredQueue.submit, submit_twice, end, drop_the_owner, end_before_the_owner)
scripts = st.lists(st.sampled_from(OUTCOMES), max_size=4)


@given(st.lists(st.tuples(st.sampled_from(WAYS), scripts, st.sampled_from([None, 0, 2])), max_size=8))
def test_each_item_ends_once(steps: list[tuple[Callable[[DeferredQueue, Item], None], Any, int | None]]) -> None:
    later, ended, made = DeferredQueue(), list[Item](), list[Item]()
    for way, script, most in steps:
        made.append(Item(later, ended, list(script)))
        way(later, made[-1])
        if most is not None:
            _work(later, most)
    for _ in range(60):
        _work(later)
    assert len(later) == 0 and not later._owned
    assert len(ended) == len(set(ended)) and set(made) <= set(ended)


@since_3_11
# A handler may raise in the middle of pytest's own hooks.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_signals_lose_no_item_and_end_none_twice(later: DeferredQueue, ended: list[Item]) -> None:
    """However the owner is dropped, and whatever comes out of a handler then, at random points."""
    made: list[Item] = []
    hits = 0

    def handle(_: int, __: FrameType | None) -> None:
        nonlocal hits
        hits += 1
        raise Interrupt

    def drop_one(script: list[Callable[[Item], bool]]) -> None:
        owner, item = Owner(), Guarded(later, ended, script)
        later.end_with(owner, item)
        made.append(item)

    before = signal.signal(signal.SIGALRM, handle)
    for number in range(400):
        with contextlib.suppress(Interrupt):
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + 1e-6 * (number % 60))
            drop_one([_wait] * (number % 4))
            later.work()
            signal.setitimer(signal.ITIMER_REAL, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    for _ in range(4):
        later.work()
    assert hits > 5 and set(made) <= set(ended) and len(later) == 0 and len(ended) == len(set(ended))


def _after_another(item: Item) -> bool:
    """The end of a pool, which waits for a free."""
    if item.ended:
        item.ended.append(item)
    return item in item.ended


def test_an_item_submitted_during_its_attempt_is_attempted_again(later: DeferredQueue, ended: list[Item]) -> None:
    """What it got may have come after the attempt, which another point of work must not end then."""
    found = list[list[int]]()
    got = [1]

    def take(item: Item) -> bool:
        found.append(got[:])
        got.clear()
        if len(found) == 1:
            got.append(2)
            later.submit(item)
            in_threads(later.work)
        return True

    later.submit(Item(later, ended, [take, take]))
    later.work()
    assert found == [[1], [2]] and not got and not len(later)


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


def test_what_another_item_waits_for_ends_first(later: DeferredQueue, ended: list[Item]) -> None:
    last = Item(later, ended, [_after_another])
    later.submit(last)
    later.submit(Item(later, ended, []))
    assert later.work() == 2 and ended[-1] is last


def test_nothing_ends_while_a_capture_is_under_way(later: DeferredQueue, ended: list[Item]) -> None:
    later.begin_capture(later)
    assert not later.end(Item(later, ended, [])) and later.work() == 0
    del later.captures[later]
    assert later.work() == 1


def test_what_is_gone_has_ended(later: DeferredQueue) -> None:
    forgotten = list[Deferred]()

    class Lost(Deferred):
        def attempt(self) -> bool:
            raise DeviceLostError("CUDA_ERROR_ILLEGAL_ADDRESS", 700, "cuEventQuery")

        def forget(self) -> None:
            forgotten.append(self)

    item = Lost()
    later.submit(item)
    assert later.work() == 1 and forgotten == [item]


def test_what_is_not_the_driver_s_goes_on_to_the_caller(later: DeferredQueue, ended: list[Item]) -> None:
    """It may be what a signal handler raises, and nothing tells."""

    later.submit(Item(later, ended, [_interrupt]))
    later.submit(Item(later, ended, []))
    each_raises(Interrupt, later.work)
    assert later.work() == 2 and len(ended) == 2 and len(later) == 0


@pytest.mark.usefixtures("collecting")
def test_finalisers_hand_in_while_items_move(later: DeferredQueue, ended: list[Item]) -> None:
    """The collector runs them wherever a container is made, also with the lock of the queue held."""

    class Dropped:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            later.submit(Item(later, ended, []))

    gc.set_threshold(1)
    for _ in range(300):
        Dropped()
        later.work()
    gc.collect()
    later.work()
    assert len(ended) == 300 and len(later) == 0


class TestMany:
    """Points that come often cost the same however much waits."""

    def test_attempts_in_vain_are_few(self, later: DeferredQueue, ended: list[Item]) -> None:
        attempts: list[Item] = []

        def count(item: Item) -> bool:
            attempts.append(item)
            return False

        for number in range(1000):
            later.submit(Item(later, ended, [count] * (2 if number == 70 else 1000)))
        later.work(8)
        assert len(attempts) == 1000  # each is new
        for _ in range(3):
            attempts.clear()
            assert later.work(8) == 0 and len(attempts) == 8
        later.submit(Item(later, ended, []))
        assert later.work(8) == 1  # a new one does not wait for the others
        attempts.clear()
        for _ in range(10):
            later.submit(Item(later, ended, []))
        assert later.work(8) == 10 and len(attempts) == 8  # and those that end do not pay for more attempts
        assert later.work() == 0 and later.work() == 1  # all are tried

    def test_each_gets_its_turn(self, later: DeferredQueue, ended: list[Item]) -> None:
        made = [Item(later, ended, [_wait] * 2) for _ in range(100)]
        for item in made:
            later.submit(item)
        for _ in range(-(-100 // 8)):
            assert later.work(8) == 0
        assert later.work(8) == 100  # the first that ends costs the others nothing
        assert set(ended) == set(made)


def test_any_number_of_locks_is_taken_or_none() -> None:
    """There is a lock for each stream of the process."""
    locks = [Lock() for _ in range(3000)]
    assert deferred.unless_busy(lambda: all(lock.locked() for lock in locks), False, *locks)
    with locks[7]:
        assert deferred.unless_busy(lambda: 1, 2, *locks) == 2
        assert [at for at, lock in enumerate(locks) if lock.locked()] == [7]
    assert not any(lock.locked() for lock in locks)
