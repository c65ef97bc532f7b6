"""Every public operation on what is shared, with each of its driver calls failing in turn, as in tests/package.

Sharing and opening are operations as well. The other process is another simulated machine of this one.
"""

import functools
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc, vmm
from streamalloc.ipc.exporter.exports import exports_of
from streamalloc.testing import Gate
from tests.ipc.support import PAGE, POSIX, PlainMemory, again, shared_pool
from tests.package.test_sweeps import Faults, fails_in_turn, makers, members
from tests.support import end_what_was_dropped, eventually

CLASSES: list[type] = [ipc.ImportedArray, ipc.ImportedBuffer, ipc.ImportedPool, ipc.ImportedRange, ipc.Shared]
FABRIC = sa.MemHandleType.FABRIC
# What stays for as long as the driver: the control block, and pools of others.
KEPT = {"registered memory", "registered host memory", "imported pool", "pinned memory"}


def check_slots(device: sa.Device) -> None:
    """No slot of a control block is given to two leases, once all that was shared has ended."""
    leases = exports_of(device._session)
    for _ in range(len(leases.leaving)):
        leases._next_free(1)  # what has left is free, or leaves again
    free = [(block, slot) for block in leases.blocks for slot in block.free_slots]
    places = [*free, *((one.block, one.slot) for one in leases.leaving)]
    assert len(places) == len(set(places))


class Sharing(Faults):
    """One of each class, through a driver that can be told to fail; and the owner of what is imported."""

    whole = ("shared",)
    counts_descriptors = True

    def __init__(self, machine: Any) -> None:
        super().__init__(machine)
        keep = self.made.enter_context
        theirs = sa.Device(0, driver=sd.simulated(fabric=True))
        self.their_stream = their_stream = keep(theirs.create_stream())
        their_pool = keep(shared_pool(theirs))
        self.of_theirs: dict[str, Any] = {
            "buffer": keep(their_pool.allocate(4096, their_stream)),
            "more": keep(their_pool.allocate(4096, their_stream)),
            "array": keep(their_pool.allocate(4096, their_stream)),
            "growable": keep(vmm.GrowableBuffer(theirs, 2 * PAGE, PAGE, handle_types=POSIX, stream=their_stream)),
            "memory": keep(vmm.PhysicalMemory(theirs, PAGE, handle_types=POSIX)),
            "fabric": keep(vmm.GrowableBuffer(theirs, 2 * PAGE, PAGE, handle_types=FABRIC, stream=their_stream)),
            "fabric memory": keep(vmm.PhysicalMemory(theirs, PAGE, handle_types=FABRIC)),
            "event": keep(theirs.create_event(interprocess=True)),
            "plain": PlainMemory(theirs, their_stream),
            "pool": their_pool,
        }
        their_stream.record(self.of_theirs["event"])
        self.array = ipc.share(self.of_theirs["array"].view_as(np.float32))
        theirs.synchronize()
        self.pool = keep(shared_pool(self.device))
        self.buffer = keep(self.pool.allocate(4096, self.stream))
        self.growable = keep(vmm.GrowableBuffer(self.device, 2 * PAGE, PAGE, handle_types=POSIX, stream=self.stream))
        self.memory = keep(vmm.PhysicalMemory(self.device, PAGE, handle_types=POSIX))
        self.event = keep(self.device.create_event(interprocess=True))
        self.shared = keep(self.pool.allocate(4096, self.stream))
        self.kept_shared = ipc.share(self.shared, hold=True)
        self.lent = keep(self.pool.allocate(4096, self.stream))
        lent = ipc.share(self.lent)
        self.there: Any = keep(ipc.open(bytes(lent), again(lent.fds), stream=their_stream, driver=theirs.driver))
        self.things = {
            ipc.ImportedArray: keep(self.opened(self.array)),
            ipc.ImportedBuffer: keep(self.open("buffer")),
            ipc.ImportedPool: self.open("pool"),
            ipc.ImportedRange: keep(self.open("growable")),
            ipc.Shared: ipc.share(self.buffer, hold=True),
            object: None,
        }
        self.stream.synchronize()

    def opened(self, shared: ipc.Shared) -> Any:
        return ipc.open(bytes(shared), again(shared.fds), stream=self.stream, driver=self.driver)

    def open(self, name: str) -> Any:
        if name == "grown":
            name = "growable"
            self.of_theirs[name].resize(2 * PAGE)
        with sd.use(self.their_stream.device.driver):
            shared = ipc.share(self.of_theirs[name])
        return self.opened(shared)

    def open_early(self) -> Any:
        """Open a buffer whose contents are not there yet."""
        with Gate(self.their_stream.device) as gate:
            gate.hold(self.their_stream)
            self.of_theirs["more"].fill(1)
            return self.open("more")

    def free_while_it_is_open(self) -> None:
        """The free is made once the other machine has closed the buffer."""
        self.lent.free()
        self.there.close()
        self.shapes.append(self.shape())
        self.stream.synchronize()

    def free_while_it_is_used(self) -> None:
        """The free waits for a stream of the other machine."""
        with Gate(self.their_stream.device) as gate:
            gate.hold(self.their_stream)
            self.there.close()
            self.lent.free()
        self.shapes.append(self.shape())
        self.stream.synchronize()

    def share(self, name: str) -> None:
        ipc.share(getattr(self, name))

    def shape(self) -> dict[str, Any]:
        # Pools, control blocks and the threads that watch over them come and stay.
        found = {kind: count for kind, count in super().shape().items() if kind not in KEPT}
        return {**found, "shared": (self.shared.freed, self.shared.shared is not None)}

    def close(self) -> None:
        shared = self.things.get(ipc.Shared)
        if shared is not None:
            shared.cancel()
            self.kept_shared.cancel()
        super().close()
        check_slots(self.device)

    @staticmethod
    def left(checked: Any) -> dict[str, Any]:
        def found() -> dict[str, Any]:
            end_what_was_dropped()
            return {kind: handles for kind, handles in checked.outstanding().items() if kind not in KEPT}

        if found():
            gc.collect()
            eventually(lambda: not found(), 1.0)
        return found()


SHARED_ACTS: dict[str, Callable[[Any, Any], Any]] = {
    "set_access": lambda world, one: one.set_access(world.device),
    "evict": lambda world, one: None,  # refused before the driver is asked
    "carried": lambda world, one: (one.carried(lambda: True), None)[1],
    "set_chunks": lambda world, one: world.open("grown"),
    "ImportedPool.from_handle": lambda world, one: one.from_handle(
        world.of_theirs["pool"].handles().fds[0], driver=world.driver
    ),
    "ImportedPool.open": lambda world, one: one.open(world.of_theirs["buffer"].handles().data, stream=world.stream),
    "to_bytes": lambda world, one: (one.to_bytes(), None)[1],
}
MAKERS: dict[str, Callable[[Sharing], Any]] = {
    **{
        f"open {name}": functools.partial(Sharing.open, name=name)
        for name in ("more", "growable", "memory", "fabric", "fabric memory", "event", "plain", "pool")
    },
    "open early": Sharing.open_early,
    "free while it is open": Sharing.free_while_it_is_open,
    "free while it is used": Sharing.free_while_it_is_used,
    "free what is shared": lambda world: world.shared.free(still_imported="ignore"),
    "open again": lambda world: world.open("buffer"),
    **{
        f"share {name}": functools.partial(Sharing.share, name=name)
        for name in ("pool", "buffer", "growable", "memory", "event")
    },
}


@pytest.mark.fabric
@pytest.mark.simulated_only("calls that fail are the same on any driver")
@pytest.mark.parametrize(("kind", "act"), [*members(CLASSES, SHARED_ACTS, inherited=False), *makers(MAKERS)])
def test_each_call_fails_in_turn(machine: Any, kind: type, act: Any) -> None:
    fails_in_turn(lambda: Sharing(machine), kind, act, halves=("cuMemUnmap",))
