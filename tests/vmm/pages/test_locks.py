"""Locks of pages, each by an interleaving that goes wrong without it."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.core.fence import Fence
from streamalloc.core.session import session_of
from streamalloc.vmm.claims import Claim, claiming
from streamalloc.vmm.ownership import allocations_of
from streamalloc.vmm.pages import places as places_module
from streamalloc.vmm.pages import space as space_module
from streamalloc.vmm.pages.places import Page, Parking, PhysicalPages, Places
from streamalloc.vmm.stores import host as host_module
from streamalloc.vmm.stores.host import InMemory as Stored
from tests.interleaving import interleaved
from tests.processes import in_a_child
from tests.support import beside, holds, names, read
from tests.vmm.pages import support
from tests.vmm.support import PAGE

pytestmark = pytest.mark.simulated_only("threads of Python are the same on any driver")


class World:
    """An arena and a space of three pages."""

    def __init__(self, stream: sa.Stream, *, spaces: int = 1) -> None:
        self.stream = stream
        self.arena = vmm.PageArena(stream.device)
        self.physical = self.arena._physical
        self.spaces = [self.arena.space(3 * PAGE, stream=stream) for _ in range(spaces)]
        self.found: list[Any] = []

    @property
    def space(self) -> vmm.PageSpace:
        return self.spaces[0]

    @property
    def places(self) -> Places:
        return self.space._places

    def kept(self, *pages: int) -> World:
        """Have these pages memory that they keep."""
        self.space.commit(pages)
        self.space.release(pages, ())
        self.clear()
        return self

    def clear(self) -> None:
        """Wait for the zeros of released pages."""
        for _ in range(100):
            if not self.physical.parked:
                return
            self.physical.await_clearing()
            self.physical.changing(self.physical.finish_clearing)
        raise AssertionError("pages stay parked")

    def check(self) -> None:
        """All records agree, and nothing is left at the end."""
        physical = self.physical
        users: dict[Page, int] = {}
        for space in self.spaces:
            places = space._places
            for place, page in enumerate(places.backing):
                if page is not None:
                    users[page] = users.get(page, 0) + 1
                committed = bool(places.numbers[place] >= 0)
                assert not committed or (page is not None and page.number == places.numbers[place])
                held = page is not None and physical.kept.get(page) == (places, place)
                assert committed + (place in places.parked) + held == (page is not None)
        assert physical.parked == sum(len(space._places.parked) for space in self.spaces)
        assert all(page.users == users[page] for page in users)
        assert len({*physical.spare}) == len(physical.spare) and not {*physical.spare} & {*users}
        assert physical.count == len(users) + len(physical.spare)
        for space in self.spaces:
            space.close(())
        self.arena.close()
        assert physical.count == physical.parked == 0 and sorted(physical._numbers) == list(
            range(len(physical._numbers))
        )


@pytest.fixture(scope="module")
def stream() -> Iterator[sa.Stream]:
    with sa.Device(0, driver=sd.traced(sd.simulated())).create_stream() as stream:
        yield stream


class TestPhysicalPages:
    """The pages of an arena, without spaces."""

    @pytest.fixture
    def make(self, stream: sa.Stream) -> Callable[[], PhysicalPages]:
        return lambda: vmm.PageArena(stream.device)._physical

    def pages(self, physical: PhysicalPages, count: int) -> list[Page]:
        return physical._create(count) if count else []

    def test_mappings_are_changed_by_one_thread(self, make: Callable[[], PhysicalPages]) -> None:
        inside: list[None] = []

        def alone() -> None:
            assert not inside
            inside.append(None)
            inside.pop()

        def change(physical: PhysicalPages) -> None:
            physical.changing(alone)

        for function in (alone, claiming, Claim.take):
            for _ in interleaved(function, make, change, change):
                assert not inside

    def test_deferred_items_do_not_wait_for_who_changes_mappings(self, make: Callable[[], PhysicalPages]) -> None:
        found: list[bool] = []

        def body() -> None:
            found.append(True)
            found.append(True)

        def change(physical: PhysicalPages) -> None:
            physical.changing(body)

        def attempt(physical: PhysicalPages) -> None:
            found.append(physical.try_changing(lambda: True, otherwise=False))

        outcomes = set()
        for _ in interleaved(body, make, change, attempt, at="line"):
            outcomes.add(found.pop(found.index(False)) if False in found else True)
            assert found in ([True] * 2, [True] * 3)
            found.clear()
        assert False in outcomes

    def test_the_page_of_zeros_is_created_once(self, make: Callable[[], PhysicalPages], stream: sa.Stream) -> None:
        driver: Any = stream.device.driver
        driver.calls.clear()
        use = PhysicalPages.use_zero
        for physical in interleaved(use, make, use, use, at="line"):
            assert names(driver, "cuMemCreate") == ["cuMemCreate"] and physical.zero.users == 3
            physical.drop([physical.zero, physical.zero])
            physical.close()
            driver.calls.clear()

    def test_a_closed_arena_has_no_page_of_zeros(self, make: Callable[[], PhysicalPages]) -> None:
        refused: list[bool] = []

        def use(physical: PhysicalPages) -> None:
            try:
                physical.use_zero()
            except sa.ClosedError:
                refused.append(True)

        for physical in interleaved(PhysicalPages.use_zero, make, use, PhysicalPages.close, at="line"):
            assert bool(refused) == (physical.zero.raw is None) == (not physical.zero.users)
            if physical.zero.users:
                physical.drop([physical.zero])
            refused.clear()

    @pytest.mark.parametrize("act", ["add_users", "drop"])
    def test_users_are_counted(self, make: Callable[[], PhysicalPages], act: str) -> None:
        pages: list[Page] = []

        def begin() -> PhysicalPages:
            physical = make()
            pages[:] = self.pages(physical, 1)
            pages[0].users = 2
            return physical

        def count(physical: PhysicalPages) -> None:
            getattr(physical, act)(pages)

        for physical in interleaved(getattr(PhysicalPages, act), begin, count, count):
            assert pages[0].users == (4 if act == "add_users" else 0) and len(physical.spare) == (act == "drop")
            physical.spare[:] = pages
            physical.close()

    def test_a_spare_page_is_taken_or_released(self, make: Callable[[], PhysicalPages]) -> None:
        taken: list[Page] = []

        def begin() -> PhysicalPages:
            physical = make()
            physical.drop(self.pages(physical, 2))
            return physical

        def take(physical: PhysicalPages) -> None:
            taken.extend(physical.take(1))

        for physical in interleaved(PhysicalPages.take, begin, take, lambda it: it._trim_spare(0), at="line"):
            assert taken[0].raw is not None and not physical.spare and physical.count == 1
            physical.drop(taken)
            taken.clear()
            physical.close()

    def test_pages_created_in_advance_leave_room_up_to_the_limit(self, stream: sa.Stream) -> None:
        taken: list[Page] = []

        def begin() -> PhysicalPages:
            return vmm.PageArena(stream.device, limit=2 * PAGE)._physical

        def take(physical: PhysicalPages) -> None:
            taken.extend(physical.changing(lambda: physical.take(2)))

        def fill(physical: PhysicalPages) -> None:
            with contextlib.suppress(sa.OutOfMemoryError):  # all are taken
                places_module.fill(physical, 1)

        for physical in interleaved(PhysicalPages._create, begin, fill, take, at="line"):
            assert len(taken) == physical.count == 2
            physical.drop(taken)
            taken.clear()
            physical.close()

    def test_no_page_is_lost_between_its_last_user_and_a_trim(self, make: Callable[[], PhysicalPages]) -> None:
        pages: list[Page] = []

        def begin() -> PhysicalPages:
            physical = make()
            pages[:] = self.pages(physical, 2)
            physical.drop(pages[:1])
            return physical

        def trim(physical: PhysicalPages) -> None:
            physical._trim_spare(0)

        for physical in interleaved(PhysicalPages._trim_spare, begin, trim, lambda it: it.drop(pages[1:])):
            assert physical.count == len(physical.spare) == sum(page.raw is not None for page in pages)
            physical.close()

    @pytest.mark.parametrize("act", ["_create", "_forget"])
    def test_pages_have_numbers_of_their_own(self, make: Callable[[], PhysicalPages], act: str) -> None:
        pages: list[Page] = []

        def begin() -> PhysicalPages:
            physical = make()
            pages[:] = self.pages(physical, 2 if act == "_forget" else 0)
            return physical

        def change(which: int) -> Callable[[PhysicalPages], None]:
            if act == "_create":
                return lambda it: pages.extend(it._create(1))
            return lambda it: it._forget([pages[which].number])

        for physical in interleaved(getattr(PhysicalPages, act), begin, change(0), change(1)):
            numbers = physical._numbers if act == "_forget" else [page.number for page in pages]
            assert sorted(numbers) == [0, 1] and physical.count == (2 if act == "_create" else 0)

    def test_what_a_budget_refuses_is_not_counted(self, make: Callable[[], PhysicalPages]) -> None:
        told: list[int] = []

        def begin() -> PhysicalPages:
            physical = make()

            def settle(asking: object = None) -> bool:
                told.append(physical.claimed)
                return asking is None

            budget = SimpleNamespace(settle=settle, closed=False, limit=PAGE, used=PAGE)
            physical.budget = lambda: budget  # type: ignore[assignment, return-value]
            return physical

        def ask(physical: PhysicalPages) -> None:
            with pytest.raises(sa.OutOfMemoryError, match="the budget of 2 MiB leaves no room for 2 pages"):
                physical._create(2)

        for physical in interleaved(PhysicalPages._create, begin, ask, ask):
            assert physical.count == 0 and sorted(physical._numbers) == list(range(len(physical._numbers)))
            assert told[0] >= 2 * PAGE and told[-1] == 0
            told.clear()

    def test_two_threads_close_one(self, make: Callable[[], PhysicalPages]) -> None:
        for physical in interleaved(PhysicalPages.close, make, PhysicalPages.close, PhysicalPages.close):
            assert physical.zero.users == 0

    def test_one_background_thread(self, make: Callable[[], PhysicalPages], monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[Any] = []

        class Threads:
            submit = print

            def __init__(self, *_: object) -> None:
                made.append(self)

        monkeypatch.setattr(places_module, "ThreadPoolExecutor", Threads)

        def submit(physical: PhysicalPages) -> None:
            physical.in_background(int)

        for _ in interleaved(PhysicalPages.in_background, make, submit, submit):
            assert len(made) == 1
            made.clear()

    def test_a_forked_child_waits_for_no_thread_of_its_parent(self, make: Callable[[], PhysicalPages]) -> None:
        physical = make()
        physical.in_background(int).result()  # on a thread that the child lacks

        def lock(hold: Callable[[], None]) -> None:
            with physical.lock, physical._filling:
                hold()

        def use() -> None:
            with pytest.raises(sa.ForkedProcessError):
                physical.take(1)
            physical.in_background(int).result()

        with beside(lock):
            assert in_a_child(use) == 0


def _commit(world: World) -> None:
    with contextlib.suppress(sa.ClosedError):
        world.space.commit(0)


def _release(world: World) -> None:
    world.space.release(0, ())


def _swap_out(world: World) -> None:
    with vmm.HostTier(world.stream.device) as tier:
        world.space.swap_out(0, tier)


def _swap_in(world: World) -> None:
    world.found.append(world.space.swap_in(0))


def _fail_to_swap_out(world: World) -> None:
    class Contents(Stored):
        def save(self, source: Any, stream: sa.Stream, kernels: bool = False) -> None:
            raise MemoryError

    class Failing(vmm.HostTier):
        def _stored(self, *about: Any) -> Contents:
            return Contents(self, *about)

    with Failing(world.stream.device) as tier, pytest.raises(MemoryError) as raised:
        world.space.swap_out(0, tier)
    assert not hasattr(raised.value, "__notes__")  # the undo has worked


def _share(world: World) -> None:
    world.space.commit(0)
    world.space.alias(1, world.space, 0)


class Change(NamedTuple):
    """Two calls that change the places of a space."""

    function: Any
    """Function that the first thread is stopped in."""
    first: Callable[[World], object]
    second: Callable[[World], object]
    state: Callable[[World], object] = lambda _: None
    committed: list[int] | None = None
    """The committed pages at the end; None: they depend on who comes first."""
    pages: int = 3
    """Most pages that may have been made."""


CHANGES = {
    "two commits": Change(Places.claim, _commit, _commit, committed=[0], pages=1),
    "commit, close": Change(Places.claim, _commit, lambda it: it.space.close(())),
    "trim, commit": Change(
        PhysicalPages.vacate, lambda it: it.physical.trim(0), _commit, lambda it: it.kept(0), committed=[0]
    ),
    "prepare, commit": Change(vmm.PageSpace._prepare, lambda it: it.space._prepare([0]), _commit, committed=[0]),
    "end of prepare, commit": Change(Parking.finish, lambda it: it.space._prepare([0]), _commit, committed=[0]),
    "two releases": Change(
        Places.park, _release, lambda it: it.space.release(1, ()), lambda it: it.space.commit([0, 1]), committed=[]
    ),
    "copy, release": Change(
        vmm.PageSpace.make_private,
        lambda it: it.space.make_private(1),
        lambda it: it.space.release([0, 1], ()),
        _share,
        committed=[],
    ),
    "swap out, release": Change(vmm.PageSpace.swap_out, _swap_out, _release, _commit, committed=[]),
    "swap out, swap in": Change(vmm.PageSpace.swap_out, _swap_out, _swap_in, _commit),
    "end of swap out, swap in": Change(Parking.clear, _swap_out, _swap_in, _commit, committed=[0]),
    "failed swap, release": Change(vmm.PageSpace._forget_stored, _fail_to_swap_out, _release, _commit),
    "close, commit": Change(Places.unmap_all, lambda it: it.space.close(()), _commit),
}


@pytest.mark.parametrize("name", CHANGES)
def test_records_agree(stream: sa.Stream, name: str) -> None:
    change = CHANGES[name]

    def make() -> World:
        world = World(stream)
        change.state(world)
        return world

    for world in interleaved(change.function, make, change.first, change.second, at="line"):
        world.clear()
        if world.space.closed:
            world.spaces.clear()
        elif change.committed is not None:
            assert world.space.committed.tolist() == change.committed
            assert world.physical.count <= change.pages
        elif world.found:  # by swap_in
            assert len(world.space.committed) == world.found[0]
        world.check()


class Beside(vmm.HostTier):
    """A tier that calls a function before copies are queued, once; no lock is held then."""

    def __init__(self, device: sa.Device, call: Callable[[], object]) -> None:
        super().__init__(device)
        self._calls = [call]

    def _stored(self, *about: Any) -> Stored:
        calls = self._calls

        class Contents(Stored):
            def _move(self, *args: Any) -> None:
                while calls:
                    calls.pop()()
                super()._move(*args)

        return Contents(self, *about)


def test_room_of_a_released_page_is_not_used_before_its_copy_is_queued(stream: sa.Stream) -> None:
    world = World(stream)
    world.space.commit([0, 1])
    for index in range(2):
        support.page(world.space, index).fill(index + 1)

    def use_room() -> None:
        world.space.release(0, ())
        world.space.swap_out(1, tier)

    with Beside(stream.device, use_room) as tier:
        world.space.swap_out(0, tier)
        assert tier.used == PAGE
        world.space.swap_in(1)
        assert holds(support.page(world.space, 1), 2)
    world.clear()
    world.check()


def test_contents_are_released_before_the_copy_is_queued(stream: sa.Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """The closed tier frees their room after the copy."""
    world = World(stream)
    load = Stored.load

    def release_first(stored: Stored, *args: Any) -> None:
        world.space.release(0, ())
        load(stored, *args)

    with vmm.HostTier(stream.device) as tier:
        world.space.commit(0)
        world.space.swap_out(0, tier)
    monkeypatch.setattr(Stored, "load", release_first)
    world.space.swap_in(0)
    assert tier.used == 0 and world.space.committed.tolist() == []
    world.clear()
    world.check()


def test_a_page_about_to_be_swapped_in_is_not_prepared(stream: sa.Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space_module, "_BATCH", 1)
    world = World(stream)
    world.space.commit([0, 1])

    def prepare() -> None:
        world.space.release(1, ())
        world.found.append(world.space._prepare([1]))  # committed then, it would lose its memory to the swap

    with Beside(stream.device, int) as tier:
        world.space.swap_out([0, 1], tier)
        world.clear()
        world.arena.trim(0)
        tier._calls.append(prepare)
        world.space.swap_in([0, 1])
    assert world.found == [0] and world.space.committed.tolist() == [0]
    world.clear()
    world.check()


def test_a_swap_that_fails_leaves_the_places_of_another_one(stream: sa.Stream) -> None:
    world = World(stream)
    another = Parking(world.places, Fence(session_of(stream), ()))
    physical = world.physical
    with vmm.HostTier(stream.device) as tier, pytest.MonkeyPatch.context() as patch:
        world.space.commit(0)
        world.space.swap_out(0, tier)
        world.clear()
        world.arena.trim(0)
        physical.limit = 0
        give_back = vmm.PageSpace._give_back

        def begin_another(*args: Any) -> None:
            world.places.locked(lambda: world.places.set_aside([0], another))
            give_back(*args)

        patch.setattr(vmm.PageSpace, "_give_back", begin_another)
        with pytest.raises(sa.OutOfMemoryError):
            world.space.swap_in(0)
        assert world.places.parked == {0: another}
        world.places.locked(lambda: world.places.commit([0]))
        world.space.release(0, ())
    world.check()


class Growing(weakref.WeakSet[Any]):
    """A set to which another thread adds while it is read."""

    def __iter__(self) -> Iterator[Any]:
        for one in super().__iter__():
            if len(self) == 1:
                another.append(User())
                self.add(another[-1])
            yield one


another: list[User] = []


@pytest.mark.parametrize("reader", ["make_room", "resident", "settle", "give"])
def test_an_arena_is_made_while_the_others_are_asked(stream: sa.Stream, tmp_path: Path, reader: str) -> None:
    budget, user = vmm.PageBudget(tmp_path / "budget", PAGE), User()
    allocations = allocations_of(session_of(stream))
    group = vmm.SleepGroup(stream.device)
    calls: dict[str, Callable[[], object]] = {
        "make_room": allocations.make_room,
        "resident": group.resident,
        "settle": lambda: budget.settle(User()),
        "give": lambda: budget._give(1),
    }
    user.claimed = 2 * PAGE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "_users", Growing([user]))
        patch.setattr(allocations, "arenas", Growing([user]))
        calls[reader]()
    user.claimed = 0
    budget.close()
    group.close()


class Copied:
    """A copy that has not completed."""

    def __init__(self) -> None:
        self.awaited = False

    def done(self) -> bool:
        return False

    def precede(self, _: object) -> None:
        self.awaited = True


class TestTiers:
    SIZE = 4096

    @pytest.fixture
    def make(self, stream: sa.Stream) -> Callable[..., vmm.HostTier]:
        """Makes a tier, and releases the memory of the one before."""
        made: list[vmm.HostTier] = []

        def begin(**options: bool) -> vmm.HostTier:
            for chunk in [chunk for tier in made for chunk in tier._chunks]:
                chunk.release.end()  # type: ignore[attr-defined]
            made[:] = [vmm.HostTier(stream.device, **options)]
            return made[0]

        return begin

    def stored(self, tier: vmm.HostTier) -> Any:
        return tier._take(2, self.SIZE)

    def test_each_copy_is_awaited(
        self, make: Callable[[], vmm.HostTier], stream: sa.Stream, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A later user of the memory waits for each copy, or for one that has waited for it."""
        made: list[Any] = []

        def behind(*_: object) -> Any:
            made.append(Copied())
            return made[-1]

        monkeypatch.setattr(host_module, "copy_batch", lambda *_, **options: None)
        monkeypatch.setattr(host_module, "Fence", behind)

        def begin() -> Any:
            made.clear()
            return self.stored(make())

        def copy(stored: Stored) -> None:
            stored.load([0], np.zeros(1, np.int64), stream)

        moving: Any = Stored.moving

        for stored in interleaved(moving.__wrapped__, begin, copy, copy):
            assert len(made) == 2 and all(one in stored.room.fences or one.awaited for one in made)

    def test_contents_are_dropped_while_checked(self, make: Callable[..., vmm.HostTier], stream: sa.Stream) -> None:
        def begin() -> Any:
            stored = self.stored(make(check=True))
            stored.array(0)[:] = 1
            stored.seal(stream)
            return stored

        def drop(stored: Stored) -> None:
            memory = stored.array(0)
            stored.drop()
            memory[:] = 2  # as the next user of the memory

        for stored in interleaved(Stored.check, begin, lambda it: it.check([0]), drop):
            assert not stored.tier.used

    def test_blocks_are_returned_once(self, make: Callable[[], vmm.HostTier]) -> None:
        for stored in interleaved(Stored.drop, lambda: self.stored(make()), Stored.drop, Stored.drop, at="line"):
            assert stored.tier.used == 0

    def test_users_of_room_are_counted(self, make: Callable[[], vmm.HostTier]) -> None:
        """Room that is dropped meanwhile is returned once the last of them has ended."""

        users: list[Any] = []

        def use(stored: Stored) -> None:
            with stored.in_use():
                pass

        def enter(stored: Stored) -> None:
            users.append(stored.in_use())
            users[-1].__enter__()

        in_use: Any = Stored.in_use
        for stored in interleaved(in_use.__wrapped__, lambda: self.stored(make()), use, enter):
            stored.drop()
            assert stored.tier.used == 2 * self.SIZE
            users.pop().__exit__(None, None, None)
            assert stored.tier.used == 0

    def test_a_reserve_counts_another_one(self, make: Callable[[], vmm.HostTier]) -> None:
        def reserve(tier: vmm.HostTier) -> None:
            tier.reserve(1, self.SIZE)

        for tier in interleaved(vmm.HostTier.reserve, make, reserve, reserve):
            assert len(tier._chunks) == 1

    @pytest.mark.parametrize("act", ["hold", "prepare"])
    def test_memory_is_pinned_once(
        self, make: Callable[[], vmm.HostTier], stream: sa.Stream, monkeypatch: pytest.MonkeyPatch, act: str
    ) -> None:
        monkeypatch.setattr(host_module, "LEAST", 4 * PAGE)
        held: list[Any] = []

        def pin(tier: vmm.HostTier) -> None:
            held.append(tier.hold([PAGE], stream) if act == "hold" else tier.prepare(PAGE, background=True))

        for tier in interleaved(vmm.HostTier._begin, make, pin, pin, at="line"):
            assert tier.prepare(PAGE).result(20) == tier.reserved == 4 * PAGE
            held.clear()

    def test_a_failure_to_pin_is_told_to_one_who_waits(self, make: Callable[[], vmm.HostTier]) -> None:
        def begin() -> vmm.HostTier:
            tier = make()
            tier._failure = MemoryError()
            return tier

        def place(tier: vmm.HostTier) -> None:
            with contextlib.suppress(MemoryError):
                tier._free_place(tier._stored(np.array([PAGE])), range(1))

        for tier in interleaved(vmm.HostTier._free_place, begin, place, place):
            assert tier._failure is None

    def test_memory_is_prepared_when_its_future_is_done(self, make: Callable[[], vmm.HostTier]) -> None:
        futures: list[Any] = []

        def prepare(tier: vmm.HostTier) -> None:
            futures.append(tier.prepare(PAGE, background=True))

        end = vmm.HostTier._end_preparations
        for _ in interleaved(end, make, end, prepare, at="line"):
            assert futures.pop().result(20) >= PAGE

    @pytest.mark.parametrize("act", ["_take", "_forget_unused"])
    def test_memory_is_taken_once(self, make: Callable[[], vmm.HostTier], act: str) -> None:
        taken: list[Stored] = []

        def begin() -> vmm.HostTier:
            tier = make()
            if act == "_forget_unused":
                tier.reserve(1, self.SIZE)
            return tier

        def take(tier: vmm.HostTier) -> None:
            taken.append(self.stored(tier))

        first = take if act == "_take" else vmm.HostTier._forget_unused
        at = "opcode" if act == "_take" else "line"
        for tier in interleaved(getattr(vmm.HostTier, act), begin, first, take, at=at):
            addresses = np.concatenate([one.room.addresses for one in taken]).tolist()
            assert len(addresses) == len({*addresses}) and tier.used == len(addresses) * self.SIZE
            taken.clear()


class User:
    """An arena as far as its budget uses it."""

    claimed = 0

    def make_room(self) -> int:
        return 0

    def give(self, nbytes: int) -> int:
        return 0

    def page_bytes(self, location: object) -> int:
        return 0


class TestBudgets:
    @pytest.fixture
    def make(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], vmm.PageBudget]]:
        listening: list[vmm.PageBudget] = []

        def listen(budget: vmm.PageBudget) -> None:
            assert budget not in listening
            listening.append(budget)
            budget._end_of_thread = threading.Event()

        monkeypatch.setattr(vmm.PageBudget, "_listen", listen)
        made = [vmm.PageBudget(tmp_path / "budget", PAGE)]

        def begin() -> vmm.PageBudget:
            made.append(vmm.PageBudget(tmp_path / "budget"))
            return made[-1]

        yield begin
        for budget in made:
            budget.close()

    def test_what_is_published_is_the_latest(self, make: Callable[[], vmm.PageBudget]) -> None:
        users: list[Any] = []

        def begin() -> vmm.PageBudget:
            users[:] = [User()]
            budget = make()
            budget.join(users[0])
            return budget

        def claim(budget: vmm.PageBudget) -> None:
            users[0].claimed = 512
            budget.settle()

        for budget in interleaved(vmm.PageBudget.settle, begin, lambda it: it.settle(), claim):
            assert budget.used == 512
            users[0].claimed = 0
            budget.close()

    def test_requests_are_read_from_an_open_file(self, make: Callable[[], vmm.PageBudget]) -> None:
        def read_requests(budget: vmm.PageBudget) -> None:
            with contextlib.suppress(sa.ClosedError):
                assert budget._requests() == (0, 0)

        for _ in interleaved(vmm.PageBudget._requests, make, read_requests, vmm.PageBudget.close):
            pass

    def test_one_thread_listens(self, make: Callable[[], vmm.PageBudget]) -> None:
        def join(budget: vmm.PageBudget) -> None:
            budget.join(User())

        for budget in interleaved(vmm.PageBudget.join, make, join, join):
            budget.close()

    def test_two_threads_close_one(self, make: Callable[[], vmm.PageBudget]) -> None:
        for budget in interleaved(vmm.PageBudget.close, make, vmm.PageBudget.close, vmm.PageBudget.close):
            assert budget.closed


def _parked(stream: sa.Stream, pages: list[int], spaces: int = 1) -> World:
    """Committed pages, parked behind nothing; of two spaces two other pages are kept."""
    world = World(stream, spaces=spaces)
    if spaces > 1:
        world.kept(0, 1)
    world.space.commit(pages)
    world.places.locked(lambda: world.places.park(pages, Parking(world.places, Fence(session_of(stream), ()))))
    return world


def _set_aside(world: World) -> None:
    parking = Parking(world.places, Fence(session_of(world.stream), ()))
    world.places.locked(lambda: world.places.set_aside([0, 1], parking))


class Reading(NamedTuple):
    """A reader, and a call that changes what it reads. What is read is the state before or after the change."""

    function: Any
    """Function that the first thread is stopped in."""
    make: Callable[[sa.Stream], World]
    read: Callable[[World], Any]
    change: Callable[[World], object]
    allowed: list[Any]
    reads_first: bool = True
    end: Callable[[World], object] = lambda _: None


def _committed(world: World) -> Any:
    return world.space.committed.tolist()


def _kept(world: World) -> Any:
    return world.spaces[1].kept.tolist()


def _shared(stream: sa.Stream) -> World:
    world = World(stream)
    world.space.commit(0)
    return world


def _filled(stream: sa.Stream) -> World:
    world = World(stream)
    places_module.fill(world.physical, 1)
    return world


def _two_kept(stream: sa.Stream) -> World:
    return World(stream, spaces=2).kept(0, 1)


KEPT: Any = vmm.PageSpace.kept
READINGS = {
    "a commit is of all pages": Reading(
        Places.mark_committed, World, _committed, lambda it: it.space.commit([0, 1]), [[], [0, 1]], reads_first=False
    ),
    "pages that could not be swapped out": Reading(
        Places.mark_committed,
        lambda stream: _parked(stream, [0, 1]),
        _committed,
        lambda it: it.places.locked(lambda: it.places.commit([0, 1])),
        [[], [0, 1]],
        reads_first=False,
    ),
    "a trim is of all pages": Reading(
        Places.exchange,
        _two_kept,
        lambda it: it.space.kept.tolist(),
        lambda it: it.arena.trim(0),
        [[0, 1], []],
        reads_first=False,
    ),
    "kept, commit": Reading(KEPT.fget, _two_kept, _kept, lambda it: it.space.commit(1), [[]]),
    "kept, keep": Reading(
        KEPT.fget,
        lambda stream: _parked(stream, [2], 2),
        _kept,
        lambda it: it.places.locked(lambda: it.places.keep([2])),
        [[]],
    ),
    "kept, set aside": Reading(
        KEPT.fget,
        _two_kept,
        _kept,
        _set_aside,
        [[]],
        end=lambda it: it.places.locked(functools.partial(it.places.commit, [0, 1])),
    ),
    "kept, close": Reading(
        KEPT.fget, _two_kept, _kept, lambda it: it.space.close(()), [[]], end=lambda it: it.spaces.pop(0)
    ),
    "shared": Reading(
        vmm.PageSpace.shared,
        _shared,
        lambda it: it.space.shared([0, 1]).tolist(),
        lambda it: it.space.alias(1, it.space, 0),
        [[False, False], [True, True]],
    ),
    "statistics": Reading(
        vmm.PageArena.statistics,
        _filled,
        lambda it: it.arena.statistics()[:2],
        lambda it: it.arena.trim(0),
        [(0, 0), (1, 1)],
    ),
}


@pytest.mark.parametrize("name", READINGS)
def test_what_is_read_is_the_state_before_or_after(stream: sa.Stream, name: str) -> None:
    reading = READINGS[name]

    def read_it(world: World) -> None:
        world.found.append(reading.read(world))

    acts = (read_it, reading.change) if reading.reads_first else (reading.change, read_it)
    for world in interleaved(
        reading.function, lambda: reading.make(stream), *acts, at="opcode" if name == "statistics" else "line"
    ):
        assert len(world.found) == 1 and world.found[0] in reading.allowed
        reading.end(world)
        world.check()


def test_a_table_of_pages(stream: sa.Stream) -> None:
    tables: list[vmm.PageTable] = []

    def make() -> World:
        world = World(stream)
        tables[:] = [vmm.PageTable(world.space)]
        world.space.commit(0)
        return world

    def change(world: World) -> None:
        world.space.commit(1)
        tables[0].update()

    for world in interleaved(vmm.PageTable.update, make, lambda _: tables[0].update(), change, at="line"):
        assert read(tables[0].entries).view(np.int64).tolist() == world.space.numbers.tolist()
        tables[0].close()
        world.check()
