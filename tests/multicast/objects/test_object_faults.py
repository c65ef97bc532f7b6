"""Every driver call fails in turn: the error is the one injected, nothing is lost, and the same step then succeeds."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import multicast, vmm
from tests.multicast.support import PAGE, misorders
from tests.support import Account
from tests.vmm import test_faults as vmm_faults

pytestmark = [
    pytest.mark.gpus(2),
    pytest.mark.multicast,
    pytest.mark.simulated_only("calls that fail are the same on any driver"),
]


class Case(vmm_faults.Case):
    """Something prepared with a multicast object, and one step."""

    made: multicast.MulticastObject

    def end(self) -> None:
        self.made.close()


class Add(Case):
    def prepare(self) -> None:
        self.made = multicast.MulticastObject(PAGE, 2, driver=self.account.driver)

    def step(self) -> None:
        for device in self.devices[len(self.made.devices) :]:
            self.made.add_device(device)

    def check_failed(self, failed: str) -> None:
        assert not self.made.complete

    def check_done(self) -> None:
        assert self.made.complete


class Bind(Add):
    def prepare(self) -> None:
        super().prepare()
        super().step()
        self.memory = vmm.PhysicalMemory(self.devices[1], PAGE)

    def step(self) -> None:
        self.binding = self.made.bind(self.memory)

    def check_failed(self, failed: str) -> None:
        assert self.made.bindings == () and self.memory.handle

    def check_done(self) -> None:
        assert self.made.bindings == (self.binding,)

    def end(self) -> None:
        self.memory.close()
        self.made.close()


class BindMapped(Bind):
    def prepare(self) -> None:
        super().prepare()
        self.range = vmm.AddressRange(PAGE, driver=self.account.driver)
        self.mapping = self.range.map(self.memory)

    def step(self) -> None:
        self.binding = self.made.bind(self.mapping)

    def end(self) -> None:
        self.range.unmap()
        self.range.close()
        super().end()


class Unbind(Bind):
    """The memory was closed before and goes with the binding."""

    def prepare(self) -> None:
        super().prepare()
        super().step()
        self.view = self.made.map(access=self.devices)
        self.memory.close()

    def step(self) -> None:
        self.binding.close()

    def check_failed(self, failed: str) -> None:
        assert self.binding.closed == (failed == "cuMemRelease")

    def check_done(self) -> None:
        assert self.made.bindings == ()

    def end(self) -> None:
        self.view.close()
        self.made.close()


class Map(Bind):
    view: multicast.MulticastView

    def prepare(self) -> None:
        super().prepare()
        super().step()

    def step(self) -> None:
        self.view = self.made.map(access=self.devices)

    def check_failed(self, failed: str) -> None:
        gc.collect()
        assert self.made.mapping_count == 0 and self.account.mapped == {}
        assert "address range" not in self.account.left

    def check_done(self) -> None:
        assert self.made.mapping_count == 1 and len(self.view.rights) == 2

    def end(self) -> None:
        self.view.close()
        super().end()


class CloseView(Map):
    def prepare(self) -> None:
        super().prepare()
        self.view = self.made.map(access=self.devices)

    def step(self) -> None:
        self.view.close()

    def check_failed(self, failed: str) -> None:
        assert not self.view.range.closed and self.view.closed == (failed == "cuMemAddressFree")

    def check_done(self) -> None:
        assert self.made.mapping_count == 0 and self.view.range.closed


class Close(Map):
    """Unbinds two, of which one was closed before, and releases both it and the object."""

    def prepare(self) -> None:
        super().prepare()
        self.other = vmm.PhysicalMemory(self.devices[0], PAGE)
        self.made.bind(self.other)
        self.other.close()

    def step(self) -> None:
        self.made.close()

    def check_failed(self, failed: str) -> None:
        assert self.made.closed == (failed == "cuMemRelease" and self.account.driver.seen.count("cuMemRelease") == 2)

    def check_done(self) -> None:
        assert self.made.closed and self.made.bindings == ()

    def end(self) -> None:
        self.memory.close()


class Leave(CloseView):
    """A block that is left, with a view and a mapping."""

    def prepare(self) -> None:
        super().prepare()
        self.range = vmm.AddressRange(PAGE, driver=self.account.driver)
        self.mapping = self.range.map(self.made, access=self.devices[0])

    def step(self) -> None:
        self.made.__exit__(None, None, None)

    def check_failed(self, failed: str) -> None:
        assert not self.made.closed

    def check_done(self) -> None:
        assert self.made.closed and self.view.closed and self.mapping.closed and self.account.mapped == {}

    def end(self) -> None:
        self.view.close()
        self.range.close()
        self.memory.close()


CASES = [Add, Bind, BindMapped, Unbind, Map, CloseView, Close, Leave]


LATER = {"cuMemRelease", "cuThreadExchangeStreamCaptureMode"}
"""Calls whose failure only delays the release of what waited for the step."""


def assert_nothing_left(account: Account) -> None:
    gc.collect()
    assert account.left == {}


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("kind", CASES)
def test_every_call_fails_in_turn(machine: Any, kind: type[Case], again: bool) -> None:
    """Afterwards the step is taken again, or everything is dropped."""
    numbers = vmm_faults.calls_of(machine, kind, 2)
    assert len(numbers) >= 1
    for number in numbers:
        account = Account(machine, number)
        case = kind(account, 2)
        assert len(account.driver.seen) == numbers.start - 1
        raised: list[tuple[str, str]] = []
        try:
            case.step()
        except sa.CudaError as error:
            raised.append((error.call, error.name))
        (failed,) = account.driver.failed
        if failed == "cuCtxPopCurrent":
            machine.cuCtxPopCurrent()  # the context is still there
        if raised:
            assert raised == [(failed, "CUDA_ERROR_UNKNOWN")]
            case.check_failed(failed)
        else:
            assert failed in LATER
            case.check_done()
        begun = len(account.traced.calls)
        if again and raised:
            case.step()
            case.check_done()
            case.end()
        del case
        assert_nothing_left(account)
        if not again:
            assert misorders(account.traced.calls, begun) == []


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


class TestTwoFaults:
    """The undoing of a failed step fails as well: the first error is told, and what is left goes later."""

    @pytest.mark.parametrize("later", ["cuMemUnmap", "cuMemAddressFree"])
    def test_of_mapping(self, machine: Any, later: str) -> None:
        account = Account(machine)
        driver: Any = sd.faulty(account.driver, "cuMemSetAccess", result="CUDA_ERROR_UNKNOWN")
        driver = sd.faulty(driver, later, result="CUDA_ERROR_UNKNOWN")
        devices = sa.Device.all(driver)
        made = multicast.MulticastObject(PAGE, 2, driver=driver)
        for device in devices:
            made.add_device(device)
        with pytest.raises(sa.CudaError) as caught:
            made.map(access=devices)
        assert caught.value.call == "cuMemSetAccess" and later in "".join(getattr(caught.value, "__notes__", []))
        del caught
        gc.collect()
        made.close()
        assert account.left == {}

    def test_of_closing(self, machine: Any) -> None:
        """Memory that cannot be released with the object is released later."""
        account = Account(machine)
        driver = sd.faulty(account.driver, "cuMemRelease", nth=2, times=2, result="CUDA_ERROR_UNKNOWN")
        made = multicast.MulticastObject(PAGE, 2, driver=driver)
        memories = []
        for device in sa.Device.all(driver):
            made.add_device(device)
            memories.append(vmm.PhysicalMemory(device, PAGE))
        for memory in memories:
            made.bind(memory)
            memory.close()
        made.close()
        assert made.closed and driver.failed == 2 * ["cuMemRelease"]
        del memory, memories
        gc.collect()
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
