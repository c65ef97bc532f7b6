"""Every public operation of bridges and borrowed memory, with each of its driver calls failing in turn."""

import gc
import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import interop
from streamalloc.driver.internal import SETTLERS
from tests.interop.libraries import LIBRARIES, MODULES
from tests.interop.standins import STANDINS
from tests.package.test_sweeps import Faults, fails_in_turn, makers, members
from tests.support import end_what_was_dropped

CLASSES: list[type] = [interop.Borrowed, interop.Bridge, interop.Registration]


class Lending(Faults):
    """A library that allocates from a pool of ours, and an array of another one."""

    told = (sa.CudaError,)  # out of functions that C calls, too

    def __init__(self, machine: Any, name: str = "cupy") -> None:
        super().__init__(machine)
        self.patch = pytest.MonkeyPatch()
        keep = self.made.enter_context
        self.made.callback(self.patch.undo)
        for imported, standin in STANDINS[name](machine).items():
            self.patch.setitem(sys.modules, imported, standin)
        self.library = LIBRARIES[name](importlib.import_module(MODULES.get(name, name)))
        self.pool = keep(sa.MemoryPool(self.device))
        self.buffer = keep(self.pool.allocate(64, self.stream))
        if name == "cupy":
            self.array = self.library.make(64)
            self.borrowed = keep(interop.cupy.memory(self.array, self.stream))
        self.bridge = keep(self.library.use(self.pool, callbacks=True))
        self.things = {interop.Bridge: self.bridge, object: None}
        if name == "cupy":
            self.things[interop.Borrowed] = self.borrowed
            self.things[interop.Registration] = interop.registration(self.buffer, driver=self.driver)

    def shape(self) -> dict[str, Any]:
        # A stream of the sources' own comes when it is needed, and stays as long as they.
        return {kind: count for kind, count in super().shape().items() if kind != "stream"}

    @staticmethod
    def left(checked: Any) -> dict[str, Any]:
        for _ in range(2):
            # The library frees on its own streams, with which nobody has synchronised.
            end_what_was_dropped()
            sa.Device(0).synchronize()
        # RMM's resources are kept for ever, and their sources with them: streams, which keep events to record again.
        for settle in SETTLERS:
            settle()
        return {kind: handles for kind, handles in Faults.left(checked).items() if handles and kind != "stream"}

    def use(self) -> None:
        """Uses of our memory by a library."""
        array = self.library.make(4096)
        self.library.fill(array, 1)
        del array
        gc.collect()

    def close(self) -> None:
        self.faulty.stop()
        self.library.finish(self.bridge)
        super().close()


MAKERS: dict[str, Callable[[Any], Any]] = {
    "array": lambda world: interop.cupy.array(world.buffer, np.float32),
    "borrow": lambda world: interop.borrow(world.array, world.stream),
    "registration": lambda world: interop.registration(world.buffer, driver=world.driver),
}


@pytest.mark.simulated_only("calls that fail are the same on any driver")
@pytest.mark.parametrize(("kind", "act"), [*members(CLASSES, {}), *makers(MAKERS)])
def test_each_call_fails_in_turn(machine: Any, kind: type, act: Any) -> None:
    fails_in_turn(lambda: Lending(machine), kind, act, most=6, errors=LIBRARY_ERRORS)


LIBRARY_ERRORS = (MemoryError, RuntimeError)
"""Objects that the stand-ins make of ours."""


@pytest.mark.simulated_only("calls that fail are the same on any driver")
@pytest.mark.parametrize("name", sorted(LIBRARIES))
def test_while_a_library_allocates(machine: Any, name: str) -> None:
    fails_in_turn(lambda: Lending(machine, name), object, lambda world, one: world.use(), most=6, errors=LIBRARY_ERRORS)
