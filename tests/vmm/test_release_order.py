"""The order of release by itself: related things go in the order of their kinds, each of them once."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from streamalloc.vmm.release_order import Kind, Node, ReleaseOrder


class Thing(Node):
    """Something to release, which may have to be tried several times, or fail first."""

    def __init__(self, kind: Kind, log: list[Thing], early: int, failures: int) -> None:
        super().__init__(kind)
        self.log = log
        self.early = early
        self.failures = failures

    def release(self) -> None:
        assert not self.gone
        if self.failures:
            self.failures -= 1
            raise OSError
        if self.early:
            self.early -= 1
            return
        self.log.append(self)
        self.gone = True


class World:
    """Nodes, their relations, and the queue of a worker."""

    def __init__(self) -> None:
        self.order = ReleaseOrder()
        self.log: list[Thing] = []
        self.things: list[Thing] = []
        self.related: set[tuple[Thing, Thing]] = set()
        self.queue: list[Node] = []

    def add(self, kind: Kind, early: int = 0, failures: int = 0) -> Thing:
        self.things.append(Thing(kind, self.log, early, failures))
        return self.things[-1]

    def relate(self, one: Thing, other: Thing) -> None:
        if one.kind == other.kind or other.gone or one.gone or one.given_up or other.given_up:
            return
        self.order.relate(one, other)
        self.related.add((one, other) if one.kind < other.kind else (other, one))

    def drop(self, thing: Thing) -> None:
        if not thing.given_up:
            thing.give_up()
            self.queue.append(thing)

    def work(self) -> None:
        """Each item has its turn; whoever has gone passes the turn on."""
        items, self.queue = self.queue, []
        while items:
            node = items.pop(0)
            try:
                if not self.order.attempt(node):
                    self.queue.append(node)
            except OSError:
                self.queue.append(node)
            self.order.pass_on(items.append)

    def check(self) -> None:
        place = {thing: number for number, thing in enumerate(self.log)}
        assert len(place) == len(self.log), "released twice"
        for first, then in self.related:
            assert then not in place or (first in place and place[first] < place[then])


things = st.lists(st.tuples(st.sampled_from(Kind), st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=12)
steps = st.lists(st.tuples(st.sampled_from("rdw"), st.integers(0, 11), st.integers(0, 11)), max_size=40)


@settings(max_examples=300, deadline=None)
@given(things, steps)
def test_whatever_is_given_up_goes_once_and_in_order(
    made: list[tuple[Kind, int, int]], does: list[tuple[str, int, int]]
) -> None:
    world = World()
    for kind, early, failures in made:
        world.add(kind, early, failures)
    acts: dict[str, Callable[[Thing, Thing], None]] = {
        "r": world.relate,
        "d": lambda one, _: world.drop(one),
        "w": lambda *_: world.work(),
    }
    for act, one, other in does:
        count = len(made)
        acts[act](world.things[one % count], world.things[other % count])
        world.check()
    for thing in world.things:
        world.drop(thing)
    for _ in range(60):
        world.work()
    world.check()
    assert set(world.log) == set(world.things)


def test_what_others_have_to_wait_for_stays_until_it_is_given_up() -> None:
    world = World()
    binding, memory, range = world.add(Kind.BINDING), world.add(Kind.MEMORY), world.add(Kind.RESERVATION)
    world.relate(memory, binding)
    world.relate(range, memory)
    world.drop(range)
    world.drop(memory)
    world.work()
    assert world.log == []
    world.order.unrelate(binding, memory)
    world.order.pass_on(world.queue.append)
    world.work()
    assert world.log == [memory, range]


def test_what_has_gone_holds_nobody_up() -> None:
    """Also where taking it out of the way was interrupted."""
    world = World()
    mapping, range = world.add(Kind.MAPPING), world.add(Kind.RESERVATION)
    world.relate(mapping, range)
    mapping.gone = True
    range.give_up()
    assert world.order.attempt(range) and world.log == [range]


def test_several_threads() -> None:
    """They release each node once, and in order."""
    world = World()
    things = [world.add(kind) for kind in Kind for _ in range(40)]
    for number, one in enumerate(things):
        for other in things[number + 1 :: 7]:
            world.relate(one, other)
    start = threading.Barrier(4)

    def work(mine: list[Thing]) -> None:
        start.wait()
        items: list[Node] = list(mine)
        while items:
            node = items.pop(0)
            node.give_up()
            if not world.order.attempt(node):
                items.append(node)
            world.order.pass_on(items.append)

    threads = [threading.Thread(target=work, args=(things[number::4],)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    world.check()
    assert len(world.log) == len(things)
