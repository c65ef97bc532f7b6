"""The order of release by itself: nodes go after those that come first, each of them once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.core.session import session_of
from streamalloc.vmm.ownership import Allocations, Node

pytestmark = pytest.mark.simulated_only("makes no driver call")


class Thing(Node):
    """Something to release, which may have to be tried several times, or fail first."""

    def __init__(self, log: list[Thing], early: int, failures: int) -> None:
        super().__init__()
        self.log = log
        self.early = early
        self.failures = failures
        self.first: list[Thing] = []

    def before(self) -> list[Thing]:
        return self.first

    def release(self) -> None:
        assert not self.gone
        if self.failures:
            self.failures -= 1
            raise sa.InvalidValueError("CUDA_ERROR_INVALID_VALUE", 1, "cuMemRelease")
        if self.early:
            self.early -= 1
            return
        self.log.append(self)
        self.gone = True


class World:
    """Nodes, and a model of which of them may be released."""

    def __init__(self) -> None:
        self.allocations = Allocations(session_of(sa.Device(0, driver=sd.simulated())))
        self.log: list[Thing] = []
        self.things: list[Thing] = []
        self.related: set[tuple[int, int]] = set()

    def add(self, early: int = 0, failures: int = 0) -> Thing:
        self.things.append(Thing(self.log, early, failures))
        self.things[-1].allocations = self.allocations
        return self.things[-1]

    def relate(self, one: int, other: int) -> None:
        """The one that was added first is released first."""
        first, then = sorted((one, other))
        if first != then and not any(self.things[number].given_up for number in (first, then)):
            self.things[then].first.append(self.things[first])
            self.related.add((first, then))

    def drop(self, thing: Thing) -> None:
        if not thing.given_up:
            thing.drop()

    def check(self) -> None:
        place = {self.things.index(thing): number for number, thing in enumerate(self.log)}
        assert len(place) == len(self.log), "released twice"
        for first, then in self.related:
            assert then not in place or (first in place and place[first] < place[then])


things = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=12)
steps = st.lists(st.tuples(st.sampled_from("rdew"), st.integers(0, 11), st.integers(0, 11)), max_size=40)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(things, steps)
def test_what_is_given_up_goes_once_and_in_order(made: list[tuple[int, int]], does: list[tuple[str, int, int]]) -> None:
    world = World()
    for early, failures in made:
        world.add(early, failures)

    def end(one: int) -> None:
        if not world.things[one].given_up:
            try:
                world.things[one].end()
            except sa.InvalidValueError:
                assert not world.things[one].given_up

    acts: dict[str, Callable[[int, int], object]] = {
        "r": world.relate,
        "d": lambda one, _: world.drop(world.things[one]),
        "e": lambda one, _: end(one),
        "w": lambda *_: world.allocations.work(),
    }
    for act, one, other in does:
        acts[act](one % len(made), other % len(made))
        world.check()
    for thing in world.things:
        world.drop(thing)
    for _ in range(60):
        world.allocations.work()
    world.check()
    assert set(world.log) == set(world.things)
