"""Locks, each by an interleaving that goes wrong without it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.core.session as sessions_module
import streamalloc.driver as sd
from streamalloc.core.allocation_hooks import Watching, tap_of, watching_of
from streamalloc.core.session import Session, session_of, sessions
from streamalloc.driver.checker.driver import Checked
from streamalloc.vmm.release_order import Kind, Node, ReleaseOrder
from tests.interleaving import interleaved


class TestReleaseOrder:
    def test_two_threads_relate_the_same_node_to_others(self) -> None:
        """Neither link is lost: both of the others wait."""

        def make() -> tuple[ReleaseOrder, Node, Node, Node]:
            return ReleaseOrder(), Node(Kind.MAPPING), Node(Kind.RESERVATION), Node(Kind.RESERVATION)

        for order, mapping, one, other in interleaved(
            ReleaseOrder.relate, make, lambda it: it[0].relate(it[1], it[2]), lambda it: it[0].relate(it[1], it[3])
        ):
            assert set(order.after(mapping, Kind.RESERVATION)) == {one, other}

    def test_a_node_is_released_by_one_of_two_threads(self) -> None:
        released: list[Node] = []

        class Counted(Node):
            def release(self) -> None:
                released.append(self)
                self.gone = True

        for _, node in interleaved(
            ReleaseOrder.attempt,
            lambda: (ReleaseOrder(), Counted(Kind.MEMORY)),
            lambda it: it[0].attempt(it[1]),
            lambda it: it[0].attempt(it[1]),
        ):
            assert released == [node]
            released.clear()


def test_a_primary_context_is_retained_once() -> None:
    def make() -> tuple[Any, Session]:
        driver = sd.traced(sd.simulated())
        return driver, Session.of(driver)

    for driver, session in interleaved(Session.context, make, lambda it: it[1].context(0), lambda it: it[1].context(0)):
        assert [call.name for call in driver.calls].count("cuDevicePrimaryCtxRetain") == 1
        assert session.ordinals == [0]


def test_a_hazard_that_two_threads_deliver_is_kept_once() -> None:
    def make() -> Checked:
        machine = sd.simulated()
        checked = sd.checked(machine)
        checked.cuInit(0)
        context = checked.cuDevicePrimaryCtxRetain(0)[1]
        checked.cuCtxSetCurrent(context)
        one, other = checked.cuStreamCreate(1)[1], checked.cuStreamCreate(1)[1]
        address = checked.cuMemAlloc(64)[1]
        checked._deliver = lambda undo=None: None  # type: ignore[method-assign]
        for stream in (one, other, one):
            checked.cuMemsetD8Async(address, 1, 64, stream)
        assert checked._found
        return checked

    kept: list[list[Any]] = []
    guard = threading.Lock()

    def keep(checked: Checked) -> None:
        fresh = checked._collect()
        with guard:
            kept.append(fresh)

    for checked in interleaved(Checked._move_found, make, keep, keep):
        assert sum(map(len, kept)) == len(checked.hazards) == len({id(hazard) for hazard in checked.hazards}) > 0
        kept.clear()


class TestWatching:
    """Watchers of allocators, which are added and removed in two threads."""

    class Watcher:
        def wants(self, allocator: object) -> bool:
            return True

    @pytest.fixture
    def world(self) -> Iterator[tuple[Watching, sa.MemoryPool]]:
        device = sa.Device(0, driver=sd.simulated())
        with sa.MemoryPool(device) as pool:
            yield watching_of(session_of(device)), pool

    @pytest.mark.parametrize("function", [Watching.add, Watching.remove, Watching._watch])
    def test_none_is_lost(self, world: tuple[Watching, sa.MemoryPool], function: Any) -> None:
        watching, pool = world
        one, other = self.Watcher(), self.Watcher()
        first: dict[Any, Callable[[Any], object]] = {
            Watching.add: lambda _: watching.add(one),  # type: ignore[arg-type]
            Watching.remove: lambda _: watching.remove(one),  # type: ignore[arg-type]
            Watching._watch: lambda _: watching.bound(pool),
        }

        def make() -> None:
            watching.remove(other)  # type: ignore[arg-type]
            watching.remove(one)  # type: ignore[arg-type]
            if function is not Watching.add:
                watching.add(one)  # type: ignore[arg-type]

        left = {other} if function is Watching.remove else {one, other}
        for _ in interleaved(function, make, first[function], lambda _: watching.add(other)):  # type: ignore[arg-type]
            tap = tap_of(pool)
            assert tap is not None and set(tap.watchers) == set(watching.watchers) == left


class TestSessions:
    def test_a_driver_has_one(self) -> None:
        found: list[Session] = []

        def find(driver: Any) -> None:
            found.append(Session.of(driver))

        for driver in interleaved(Session.of, sd.simulated, find, find):
            assert found[0] is found[1] is Session.of(driver)
            found.clear()

    def test_they_are_listed_while_one_is_made(self, monkeypatch: pytest.MonkeyPatch) -> None:
        first, second = sd.simulated(), sd.simulated()
        made: list[Session] = []

        def make() -> None:
            monkeypatch.setattr(sessions_module, "_sessions", weakref.WeakValueDictionary())
            made[:] = [Session.of(first)]

        def make_another(_: None) -> None:
            made.append(Session.of(second))

        listed: Any = weakref.WeakValueDictionary.values
        for _ in interleaved(listed, make, lambda _: sessions(), make_another):
            assert {*made} == {*sessions()}
