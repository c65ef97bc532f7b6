"""Every public operation on multicast objects and symmetric memory, with each of its driver calls failing in turn."""

from collections.abc import Callable
from typing import Any

import pytest

import streamalloc as sa
from streamalloc import ipc, multicast, vmm
from streamalloc.multicast import SymmetricMemory, SymmetricMemoryError
from tests.multicast.support import PAGE, SHAREABLE, added
from tests.package.test_sweeps import Faults, fails_in_turn, makers, members

CLASSES: list[type] = [
    multicast.Binding, multicast.MulticastObject, multicast.MulticastView, multicast.SymmetricBuffer,
    multicast.SymmetricMemory,
]  # fmt: skip


class Team(Faults):
    """An object of two devices with memory bound on one, and symmetric memory of both."""

    def __init__(self, machine: Any) -> None:
        super().__init__(machine)
        keep = self.made.enter_context
        self.devices = sa.Device.all(self.driver)
        self.object = keep(added(3 * PAGE, self.devices, handle_types=SHAREABLE))
        self.young = keep(multicast.MulticastObject(PAGE, 2, driver=self.driver))
        memories = [keep(vmm.PhysicalMemory(device, 2 * PAGE, handle_types=SHAREABLE)) for device in self.devices]
        self.binding = keep(self.object.bind(memories[0]))
        self.object.bind(memories[1])
        self.more = keep(vmm.PhysicalMemory(self.devices[0], PAGE, handle_types=SHAREABLE))
        self.symmetric = keep(SymmetricMemory.local(self.devices, 5000))
        self.streams = [keep(device.create_stream()) for device in self.devices]
        self.things = {
            multicast.Binding: self.binding,
            multicast.MulticastObject: self.object,
            multicast.SymmetricMemory: self.symmetric,
            multicast.SymmetricBuffer: self.symmetric.buffers[0],
            object: None,
        }

    def shape(self) -> dict[str, Any]:
        return {**super().shape(), "bound": self.object.closed or len(self.object.bindings)}


class Viewed(Team):
    """The same, and the object mapped."""

    def __init__(self, machine: Any) -> None:
        super().__init__(machine)
        self.things[multicast.MulticastView] = self.made.enter_context(self.object.map(access=self.devices))


def _signalled(world: Team, one: SymmetricMemory) -> None:
    one.put_signal(1, world.streams[0], rank=0)
    one.wait_signal(0, world.streams[1], rank=1)
    world.streams[1].synchronize()


def _deprecated(old: Callable[[], object]) -> None:
    with pytest.deprecated_call():
        old()


TEAM_ACTS: dict[str, Callable[[Any, Any], Any]] = {
    "add_device": lambda world, one: world.young.add_device(world.devices[0]),
    "barrier": lambda world, one: one.barrier(*world.streams),
    "bind": lambda world, one: one.bind(world.more, 2 * PAGE),
    "end": lambda world, one: _deprecated(one.end),
    "MulticastObject.export": lambda world, one: one.export(),
    "from_handle": lambda world, one: one.from_handle(one.export(), 3 * PAGE, 2, driver=world.driver),
    "MulticastObject.granularity": lambda world, one: one.granularity(2, driver=world.driver),
    "local": lambda world, one: one.local(world.devices, 5000),
    "MulticastObject.map": lambda world, one: one.map(access=world.devices),
    "put_signal": _signalled,
    "MulticastView.set_access": lambda world, one: one.set_access(world.devices[1]),
    "MulticastView.copy_from": lambda world, one: None,  # refused: ordinary reads and writes mean nothing there
    "MulticastView.copy_to": lambda world, one: None,
    "MulticastView.fill": lambda world, one: None,
    "team_complete": lambda world, one: _deprecated(one.team_complete),
    "wait_signal": lambda world, one: None,  # with put_signal
}
MAKERS: dict[str, Callable[[Any], Any]] = {
    "MulticastObject": lambda world: multicast.MulticastObject(PAGE, 2, driver=world.driver),
    "SymmetricMemory": lambda world: SymmetricMemory(5000, ipc.SelfCommunicator(), device=world.devices[0]),
}


@pytest.mark.filterwarnings("ignore:.*was dropped without close:ResourceWarning")
@pytest.mark.gpus(2)
@pytest.mark.multicast
@pytest.mark.simulated_only("calls that fail are the same on any driver")
@pytest.mark.parametrize(("kind", "act"), [*members(CLASSES, TEAM_ACTS, inherited=False), *makers(MAKERS)])
def test_each_call_fails_in_turn(machine: Any, kind: type, act: Any) -> None:
    world = Viewed if kind is multicast.MulticastView else Team
    fails_in_turn(
        lambda: world(machine),
        kind,
        act,
        most=4,
        errors=(SymmetricMemoryError,),
        # Where the mode is refused in which a stream ends, or the event after its work, the stream ends later.
        halves=("cuMemUnmap", "cuMulticastUnbind", "cuThreadExchangeStreamCaptureMode", "cuEventRecord"),
    )
