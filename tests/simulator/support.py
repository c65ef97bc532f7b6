"""A rig on a simulated machine of its own."""

from typing import Any

import pytest

from streamalloc.driver import simulated
from streamalloc.simulator import call_lock
from tests.facts.support import PAGE, Rig, value


def new_rig(**machine: Any) -> Rig:
    """A rig on a new machine, with device 0's primary context current. ``machine``: arguments of ``simulated``."""
    return rig_on(simulated(**machine))


def rig_on(raw: Any) -> Rig:
    value(raw.cuInit(0))
    value(raw.cuCtxSetCurrent(value(raw.cuDevicePrimaryCtxRetain(0))))
    return Rig(raw)


def on(**machine: Any) -> pytest.MarkDecorator:
    """Gives a test the fixture ``rig`` on a machine of these arguments."""
    return pytest.mark.parametrize("rig", [machine], indirect=True, ids=str)


def mapped(rig: Rig, size: int = PAGE, **properties: int) -> int:
    """Memory at an address of its own, with access for device 0, which goes when it is unmapped."""
    memory = rig.memory(size, **properties)
    address = rig.map(rig.reserve(size), memory, size)
    assert rig.release(memory) == "SUCCESS"
    grant(rig, address, size)
    return address


def grant(rig: Rig, address: int, size: int = PAGE, flags: int = 3, location: int = 1) -> None:
    """Give a location access, device 0 unless another is named."""
    assert rig.set_access(address, size, (location, 0, flags)) == "SUCCESS"


def mappings() -> int:
    """How many mappings of memory of simulated devices this process has."""
    with open("/proc/self/maps") as lines:
        return sum("memfd:streamalloc" in line for line in lines)


def in_a_call() -> bool:
    """Whether the calling thread is in the middle of a simulated call."""
    owner: Any = call_lock._release
    return owner.__self__._is_owned() and call_lock._depth > 0
