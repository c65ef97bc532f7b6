"""Driver calls that fail, and then their undo; every call in turn is in test_sweeps."""

from __future__ import annotations

from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import multicast, vmm
from tests.multicast.support import PAGE
from tests.support import Account

pytestmark = [
    pytest.mark.gpus(2),
    pytest.mark.multicast,
    pytest.mark.simulated_only("calls that fail are the same on any driver"),
]


@pytest.mark.parametrize("failing", ["cuMemFree", "cuMulticastUnbind", "cuMemUnmap", "cuMemRelease"])
def test_what_a_dropped_range_has_left_can_be_tried_again(machine: Any, failing: str) -> None:
    account = Account(machine)
    driver = sd.faulty(account.driver, failing, result="CUDA_ERROR_UNKNOWN")
    made = multicast.MulticastObject(PAGE, 2, driver=driver)
    for device in sa.Device.all(driver):
        made.add_device(device)
    memory = vmm.PhysicalMemory(made.devices[0], PAGE)
    made.bind(memory)
    view = made.map(access=made.devices)
    del view
    with pytest.raises(sa.CudaError, match=f"{failing} answered CUDA_ERROR_UNKNOWN"):
        made.close()
    assert made.handle and made.mapping_count == 0
    made.close()
    assert account.mapped == {}
    memory.close()
    assert account.left == {}


def test_a_refused_binding_holds_nothing(machine: Any) -> None:
    """Neither the memory, which goes when it is closed, nor its place in the object."""
    account = Account(machine)
    driver = sd.faulty(account.driver, "cuMulticastBindMem", result="CUDA_ERROR_UNKNOWN")
    made = multicast.MulticastObject(PAGE, 2, driver=driver)
    for device in sa.Device.all(driver):
        made.add_device(device)
    memory, other = (vmm.PhysicalMemory(made.devices[0], PAGE) for _ in range(2))
    with pytest.raises(sa.CudaError, match="cuMulticastBindMem answered") as caught:
        made.bind(memory)
    handle = memory.handle
    memory.close()
    released = [call for call in account.traced.calls if call.name == "cuMemRelease"]
    assert [int(call.args[0]) for call in released] == [handle] and made.bindings == ()
    del caught
    made.bind(other).close()
    other.close()
    made.close()
    assert account.left == {}
