"""Every public operation of observers, with each driver call that is made under them failing in turn."""

import os
from collections.abc import Callable
from typing import Any

import pytest

import streamalloc as sa
from streamalloc import observing, vmm
from tests.package.test_sweeps import Faults, fails_in_turn, makers, members
from tests.vmm.support import PAGE

CLASSES: list[type] = [observing.Observer, observing.LeakReport, observing.LiveView, observing.Phase]


class Observed(Faults):
    """An observer of everything, under which something is allocated and freed."""

    def __init__(self, machine: Any) -> None:
        super().__init__(machine)
        keep = self.made.enter_context
        self.pool = keep(sa.MemoryPool(self.device))
        self.observer = observing.observe(driver=self.driver)
        self.made.callback(self.observer.stop)
        self.observer.start()
        with self.observer.phase("one"):
            self.buffer = keep(self.pool.allocate(64, self.stream))
        self.things = {
            observing.Observer: self.observer,
            observing.LeakReport: self.observer.leaks(),
            observing.LiveView: observing.live(self.pool, every=60),
            observing.Phase: self.observer.phases[0],
            object: None,
        }

    def shape(self) -> dict[str, Any]:
        return {**super().shape(), "known": self.observer.nbytes, "live": len(self.observer.live)}

    def close(self) -> None:
        self.things[observing.LiveView].close()
        super().close()


def use(world: Observed) -> None:
    """Operations that observers are notified of."""
    with world.pool.allocate(4096, world.stream) as buffer:
        buffer.fill(1)
        world.shapes.append(world.shape())
    with vmm.GrowableBuffer(world.device, 2 * PAGE, PAGE) as growable:
        world.shapes.append(world.shape())
        growable.grow(PAGE)
        world.shapes.append(world.shape())


def _phase(world: Observed, one: Any) -> None:
    with one.phase("two"), one.tag("there"):
        use(world)


def _again(world: Observed, one: Any) -> None:
    one.stop()
    one.start()
    use(world)


OBSERVER_ACTS: dict[str, Callable[[Any, Any], Any]] = {
    "assert_nothing_left": lambda world, one: None,  # it raises
    "raise_if_any": lambda world, one: None,
    "LiveView.start": lambda world, one: None,  # what it shows are the figures
    "LiveView.stop": lambda world, one: one.stop(),
    "phase": _phase,
    "save_chrome": lambda world, one: one.save_chrome(os.devnull),
    "save_pytorch": lambda world, one: one.save_pytorch(os.devnull),
    "save_rmm": lambda world, one: one.save_rmm(os.devnull),
    "stop": _again,
    "tag": lambda world, one: None,  # with phase
}
MAKERS: dict[str, Callable[[Any], Any]] = {"observe": use}


@pytest.mark.simulated_only("calls that fail are the same on any driver")
@pytest.mark.parametrize(("kind", "act"), [*members(CLASSES, OBSERVER_ACTS), *makers(MAKERS)])
def test_each_call_fails_in_turn(machine: Any, kind: type, act: Any) -> None:
    fails_in_turn(lambda: Observed(machine), kind, act, most=6)
