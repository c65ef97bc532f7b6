"""Locks, each by an interleaving that goes wrong without it."""

from __future__ import annotations

import threading
from typing import Any

import streamalloc.driver as sd
from streamalloc.core.session import Session
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
