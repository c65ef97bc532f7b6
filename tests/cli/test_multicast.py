"""Multicast and symmetric memory in the tour, and what ``info`` says of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.cli import tour
from streamalloc.cli.steps import Tour
from streamalloc.cli.terminal import Terminal
from streamalloc.multicast import MulticastObject
from tests.cli.conftest import Altered, Run, without

VARIABLE = "STREAMALLOC_TEST_MULTICAST"
ON_REQUEST = f"multicast objects are created on real GPUs only with {VARIABLE}=1"

Show = Callable[[Any], tuple[Tour, str]]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    """Show the parts about multicast alone; the tour, and what it printed."""

    def show(driver: Any) -> tuple[Tour, str]:
        with sd.use(driver), Tour(Terminal()) as shown:
            for part in tour.TOURS["multicast"]:
                shown.run(part)
        return shown, capsys.readouterr().out

    return show


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multicast objects may be made: tests with this fixture have the mark that asks users first."""
    monkeypatch.setenv(VARIABLE, "1")


@pytest.mark.gpus(2)
@pytest.mark.multicast
@pytest.mark.usefixtures("asked_for")
class TestTour:
    def test_every_check_holds(self, machine: Any, show: Show) -> None:
        tour, text = show(machine)
        assert (tour.failed, tour.skipped) == (0, 0), text
        assert tour.checks >= 20
        count = sa.Device.count(machine)
        assert f"the driver would block: 1 of the {count} devices" in text

    @pytest.mark.simulated_only("what fails half-way would leave real switches in an unknown state")
    @pytest.mark.parametrize(
        "name",
        [
            "cuMulticastCreate",
            "cuMulticastAddDevice",
            "cuMulticastBindMem",
            "cuStreamWriteValue32",
        ],
    )
    def test_a_refused_call_is_found(self, machine: Any, show: Show, name: str) -> None:
        accounts = sd.checked(sd.faulty(machine, name, result="CUDA_ERROR_UNKNOWN"))
        tour, text = show(accounts)
        assert tour.failed >= 1
        assert f"{name} answered CUDA_ERROR_UNKNOWN" in text

    def test_write_that_does_not_reach_all_is_found(self, machine: Any, show: Show) -> None:
        objects: list[int] = []
        mapped: dict[bool, int] = {}  # the first address of an object, and of memory

        def create(properties: Any) -> Any:
            answer = machine.cuMulticastCreate(properties)
            objects.append(int(answer[1]))
            return answer

        def map(address: Any, size: int, offset: int, handle: Any, flags: int) -> Any:
            mapped.setdefault(int(handle) in objects, int(address))
            return machine.cuMemMap(address, size, offset, handle, flags)

        def fill(address: Any, value: int, count: int, stream: Any) -> Any:
            inside = int(address) - mapped.get(True, 1 << 60)
            at = mapped[False] + inside if 0 <= inside < 4 << 20 else address
            return machine.cuMemsetD8Async(at, value, count, stream)

        text = show(Altered(machine, cuMulticastCreate=create, cuMemMap=map, cuMemsetD8Async=fill))[1]
        assert "FAILED  GPU 0 fills the mapping" in text
        assert "on GPU 0: expected" not in text
        assert "on GPU 1: expected 4,194,304 bytes 0x2d, found" in text

    def test_wrong_bytes_on_all_are_found(self, machine: Any, show: Show) -> None:
        def fill_with_another(address: Any, value: int, count: int, stream: Any) -> Any:
            return machine.cuMemsetD8Async(address, value ^ 1, count, stream)

        text = show(Altered(machine, cuMemsetD8Async=fill_with_another))[1]
        assert "FAILED  each GPU stores its part on all" in text


def test_one_simulated_device_gets_a_machine_of_its_own(show: Show) -> None:
    tour, text = show(sd.simulated(devices=1))
    assert (tour.failed, tour.skipped) == (0, 0), text
    assert text.count("simulated with 4 devices") == 2


@pytest.mark.gpus(2)
def test_real_hardware_makes_no_multicast_object_unless_asked(
    machine: Any, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    calls = sd.traced(machine)
    tour, text = show(Altered(calls, is_simulated=False))
    assert f"skipped  {ON_REQUEST}" in text
    # The other half of symmetric memory is shown all the same.
    assert (tour.failed, tour.skipped) == (0, 1), text
    assert "no multicast view" in text
    assert "each GPU stores its part on all" in text
    assert not [call for call in calls.calls if call.name.startswith("cuMulticast")]


def test_one_real_gpu(machine: Any, show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    one = Altered(machine, is_simulated=False, cuDeviceGetCount=lambda: (machine.CUresult.CUDA_SUCCESS, 1))
    tour, text = show(one)
    assert (tour.failed, tour.skipped) == (0, 2), text
    assert "skipped  this machine has one GPU" in text


@pytest.mark.gpus(2)
@pytest.mark.simulated_only("the machine of the tour is simulated without support")
def test_devices_without_support(show: Show) -> None:
    tour, text = show(sd.simulated(devices=2, multicast=False))
    assert (tour.failed, tour.skipped) == (0, 1), text
    assert "skipped  this machine has no two GPUs that support multicast objects" in text
    assert "no multicast view" in text


@pytest.mark.gpus(2)
def test_devices_that_do_not_reach_each_other(machine: Any, show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    apart = Altered(
        machine, is_simulated=False, cuDeviceCanAccessPeer=lambda here, there: (machine.CUresult.CUDA_SUCCESS, 0)
    )
    assert "skipped  no other GPU of this machine has access to the memory of GPU 0" in show(apart)[1]


class TestInfo:
    @staticmethod
    def report(run: Run) -> Any:
        return json.loads(run("info", "--json")[1])["multicast"]

    @staticmethod
    def part(run: Run) -> str:
        text = run("info")[1]
        return text[text.index("\nMulticast\n") : text.index("\nPool attributes")]

    @pytest.mark.gpus(2)
    def test_devices(self, machine: Any, run: Run) -> None:
        found, shown = self.report(run), self.part(run)
        devices = sa.Device.all()
        assert found["devices"] == [
            {"ordinal": device.ordinal, "supported": device.supports.multicast} for device in devices
        ]
        for device in devices:
            assert f"device {device.ordinal}  {'yes' if device.supports.multicast else 'no'}  " in shown

    @pytest.mark.gpus(2)
    @pytest.mark.simulated_only("whether real devices support multicast is not known beforehand")
    def test_granularity(self, machine: Any, run: Run) -> None:
        found = self.report(run)
        assert found["largest_team"] == 2
        assert [one["handle_type"] for one in found["granularity"]] == ["NONE", "POSIX_FILE_DESCRIPTOR", "FABRIC"]
        for one in found["granularity"]:
            kind = sa.MemHandleType[one["handle_type"]]
            assert one["minimum"] == MulticastObject.granularity(2, handle_types=kind)
            assert one["recommended"] == MulticastObject.granularity(2, handle_types=kind, recommended=True)
        shown = self.part(run)
        assert "  within this process" in shown and "2 MiB" in shown and "512 MiB" in shown
        assert "A team has up to 2 devices of this process" in shown

    @pytest.mark.gpus(2)
    def test_makes_nothing(self, machine: Any, run: Run) -> None:
        calls = sd.traced(machine)
        with sd.use(calls):
            run("info")
        assert {call.name for call in calls.calls if "Multicast" in call.name} <= {"cuMulticastGetGranularity"}

    @pytest.mark.gpus(2)
    @pytest.mark.simulated_only("whether real devices support multicast is not known beforehand")
    def test_refusal_is_said(self, machine: Any, run: Run) -> None:
        with sd.use(sd.faulty(machine, "cuMulticastGetGranularity", result="CUDA_ERROR_SYSTEM_NOT_READY")):
            assert "refused: CUDA_ERROR_SYSTEM_NOT_READY" in self.part(run)

    @pytest.mark.gpus(2)
    def test_handle_types_that_are_not_offered(self, machine: Any, run: Run) -> None:
        with sd.use(without(machine, "HANDLE_TYPE_FABRIC_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")):
            assert {one["handle_type"] for one in self.report(run)["granularity"]} <= {"NONE"}

    @pytest.mark.gpus(2)
    def test_without_support_the_granularity_is_not_asked(self, machine: Any, run: Run) -> None:
        calls = sd.traced(without(machine, "MULTICAST_SUPPORTED"))
        with sd.use(calls):
            found = self.report(run)
        assert (found["largest_team"], found["granularity"]) == (0, [])
        assert not [call for call in calls.calls if "Multicast" in call.name]
        assert any("ask the administrator" in line and "nvidia-fabricmanager" in line for line in found["needs"])

    def test_one_device_alone_is_no_matter_for_the_administrator(self, run: Run) -> None:
        with sd.use(sd.simulated(devices=1)):
            found = self.report(run)
        assert found["needs"] == []

    def test_driver_that_does_not_know(self, machine: Any, run: Run) -> None:
        unknown = machine.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED

        def answer(asked: Any, device: Any) -> Any:
            if asked == unknown:
                return machine.CUresult.CUDA_ERROR_INVALID_VALUE, None
            return machine.cuDeviceGetAttribute(asked, device)

        with sd.use(Altered(machine, cuDeviceGetAttribute=answer)):
            found = self.report(run)
            assert "device 0  unknown  " in self.part(run)
        assert found["devices"][0]["supported"] is None
        assert any("cannot tell" in line for line in found["needs"])
