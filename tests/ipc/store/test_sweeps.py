"""Every public operation of stores, with each of its driver calls failing in turn, as in tests/package."""

import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import ipc
from tests.ipc.store.support import write
from tests.package.test_sweeps import Faults, fails_in_turn, makers, members

CLASSES: list[type] = [ipc.Store, ipc.StoredView, ipc.Weights, ipc.WeightsWriter]
KEPT = {"registered memory", "registered host memory", "pinned memory"}
_numbers = itertools.count()


class Stored(Faults):
    """A store, weights that are open, and a writer, through a driver that can be told to fail."""

    counts_descriptors = True

    def __init__(self, machine: Any) -> None:
        super().__init__(machine)
        keep = self.made.enter_context
        self.server = keep(ipc.Store.serve(f"sweep-{os.getpid()}-{next(_numbers)}"))
        self.store = keep(ipc.Store(self.server.name, driver=self.driver))
        write(self.store, "key", 1, device=self.device)
        self.weights = keep(self.store.open("key"))
        self.writer = self.store.write("next", self.device)
        self.made.callback(self.writer.abort)
        self.writer.allocate("one", 64, np.uint8)
        self.device.synchronize()
        self.things = {
            ipc.Store: self.store,
            ipc.StoredView: self.weights.memory,
            ipc.Weights: self.weights,
            ipc.WeightsWriter: self.writer,
            object: None,
        }

    def shape(self) -> dict[str, Any]:
        found = {kind: count for kind, count in super().shape().items() if kind not in KEPT}
        weights, writer = self.weights, self.writer
        state = weights.closed or weights.attached, weights.epoch, len(writer), writer.closed
        return {**found, "weights": state[:2], "writer": state[2:]}

    @staticmethod
    def left(checked: Any) -> dict[str, Any]:
        found = {kind: handles for kind, handles in Faults.left(checked).items() if kind not in KEPT}
        # The simulated machine looks now whether descriptors of released memory are still open, as they were before.
        sa.Device(0, driver=checked).memory_info()
        return found


def _again(world: Stored, weights: ipc.Weights) -> None:
    weights.detach()
    world.shapes.append(world.shape())
    weights.attach()


def _renewed(world: Stored, weights: ipc.Weights) -> None:
    write(world.store, "key", 2, replace=True, device=world.device)
    world.shapes.append(world.shape())
    weights.attach(latest=True)


def _committed(world: Stored) -> None:
    with world.store.write("other", world.device) as weights:
        weights.allocate("all", 8, np.uint8)


STORE_ACTS: dict[str, Callable[[Any, Any], Any]] = {
    "fill": lambda world, one: None,  # refused by the driver
    "copy_from": lambda world, one: None,
    "view": lambda world, one: one.view(0, 64),
    "get": lambda world, one: (one.get("all"), None)[1],
    "items": lambda world, one: (list(one.items()), None)[1],
    "keys": lambda world, one: (list(one.keys()), None)[1],
    "values": lambda world, one: (list(one.values()), None)[1],
    "list": lambda world, one: (one.list(), None)[1],
    "load": lambda world, one: None,  # by itself
    "open": lambda world, one: one.open("key"),
    "remove": lambda world, one: None,  # makes no driver calls
    "serve": lambda world, one: None,
    "statistics": lambda world, one: (one.statistics(), None)[1],
    "trim": lambda world, one: None,
    "write": lambda world, one: None,  # by itself
    "attach": _renewed,
    "detach": _again,
    "fabric_descriptor": lambda world, one: None,  # refused: the memory was not made for that
    "allocate": lambda world, one: (one.allocate("two", 3 << 20, np.uint8), None)[1],
    "allocate_all": lambda world, one: one.allocate_all({"two": (3 << 20, np.uint8), "five": ((2, 3), "int8")}),
    "place": lambda world, one: (one.place("three", ipc.Tensor("uint8", (3,), None, 0)), None)[1],
    "reserve": lambda world, one: (one.reserve(8 << 20), None)[1],
    "tie": lambda world, one: (one.tie("four", "one"), None)[1],
}


def _committed_like(world: Stored) -> None:
    """On memory that is created, and on memory of an epoch before."""
    for _ in range(3):
        with world.store.write("key", world.device, like="previous"):
            world.device.synchronize()


MAKERS: dict[str, Callable[[Stored], Any]] = {"write": _committed, "write like": _committed_like}


@pytest.mark.simulated_only("calls that fail are the same on any driver")
@pytest.mark.parametrize(("kind", "act"), [*members(CLASSES, STORE_ACTS, inherited=False), *makers(MAKERS)])
def test_each_call_fails_in_turn(machine: Any, kind: type, act: Any) -> None:
    # Where the mode is refused in which memory is released, it is released later.
    halves = ("cuMemUnmap", "cuThreadExchangeStreamCaptureMode")
    fails_in_turn(lambda: Stored(machine), kind, act, most=5, halves=halves)
