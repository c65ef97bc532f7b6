"""An exception out of a signal handler, at any point of an operation: nothing is released twice, or half made."""

import contextlib
import functools
import gc
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest

from streamalloc import vmm
from tests.interrupting import Interrupt, Interrupted, lost_one
from tests.package.test_sweeps import ACTS, CHANGES, MAKERS, Virtual
from tests.support import in_a_thread
from tests.vmm.support import PAGE

pytestmark = pytest.mark.simulated_only("where a signal may come is the same on any driver")

THIN = int(os.environ.get("STREAMALLOC_TEST_THIN", "23"))
"""Every how many points a signal comes; 1 takes half a minute."""


def _change(world: Virtual, name: str) -> None:
    CHANGES[name](world, world.growable)


STEPS: dict[str, Callable[[Any], object]] = {
    **{name: functools.partial(_change, name=name) for name in CHANGES},
    "close": lambda world: world.growable.close(),
    "map": lambda world: ACTS["map"](world, world.range),
    "unmap": lambda world: world.range.unmap(),
    "unmap one": lambda world: world.mapping.close(),
    "change access": lambda world: ACTS["AddressRange.set_access"](world, world.range),
    "revoke": lambda world: world.mapping.revoke(world.device),
    "find": lambda world: vmm.PhysicalMemory.at(world.mapping.address, driver=world.driver),
    "make": MAKERS["GrowableBuffer"],
    "stripe": MAKERS["stripe"],
}


@pytest.mark.parametrize("name", STEPS)
@in_a_thread
def test_at_any_point(machine: Any, name: str) -> None:
    """The remaining objects are used and closed, or dropped after every other interrupt."""
    for nth in itertools.count(1, THIN):
        world = Virtual(machine)
        checked, block = world.checked, Interrupt(nth)
        with contextlib.suppress(Interrupted), block:
            STEPS[name](world)
        if not block.came:
            assert nth > 1
            world.close()
            return
        gc.collect()
        growable = world.growable
        assert set(checked.outstanding()["mapping"]) == world.mapped(), (nth, block.came)
        if nth % 2 and not growable.closed:
            if growable.evicted:
                growable.restore()
            growable.set_access(world.device)
            growable.resize(4 * PAGE)
            assert len(growable.mappings) == 4 and set(checked.outstanding()["mapping"]) == world.mapped()
            growable.fill(1)
        if nth % 2:
            world.close()
        vars(world).clear()
        del world, growable
        left = Virtual.left(checked)
        assert lost_one(left) and not [one for one in checked.hazards if one.kind == "double free"], (block.came, left)
