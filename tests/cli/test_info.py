"""``python -m streamalloc info``: the support tables, and what is missing."""

import dataclasses
import gc
import json
from pathlib import Path
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.driver import internal
from streamalloc.driver.bindings import BINDINGS_VERSION
from tests.cli.conftest import Run, without
from tests.support import Replaced


def test_table_has_every_capability(machine: Any, run: Run) -> None:
    text = run("info")
    lines = text.splitlines()
    for name, answer, about in sa.Device(0).supports.rows():
        row = next(line.split(maxsplit=2) for line in lines if line.split()[:1] == [name])
        assert row[1] == answer.split(" | ")[0]
        assert row[2] == about


def test_versions(machine: Any, run: Run) -> None:
    text = run("info")
    for version in (sa.__version__, BINDINGS_VERSION):
        assert version in text
    number = machine.cuDriverGetVersion()[1]
    assert f"for CUDA {number // 1000}.{number % 1000 // 10}" in text


def test_what_is_missing(run: Run) -> None:
    with sd.use(sd.simulated(devices=1, fabric=False)):
        text = run("info")
    assert "- fabric handles: this device or driver does not offer them" in text
    assert "- multicast: needs at least two GPUs" in text


@pytest.mark.gpus(2)
def test_several_devices(machine: Any, run: Run) -> None:
    text = run("info")
    for device in sa.Device.all():
        assert f"\nDevice {device.ordinal}: {device.name}\n" in text
        assert str(device.uuid) in text
    rows = text[text.index("\nPeer access\n") :].splitlines()
    first = next(line.split() for line in rows if line.strip().startswith("device 0"))
    assert first[2] == "own"
    assert first[3] == ("yes" if sa.Device(0).can_access(sa.Device(1)) else "no")


@pytest.mark.parametrize("permitted", [False, True])
def test_imex_channel(machine: Any, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, permitted: bool) -> None:
    channel = tmp_path / "channel7"
    if permitted:
        channel.touch()
    monkeypatch.setattr(internal, "imex_channels", lambda: [str(channel)])
    assert f"  {channel}  may {'' if permitted else 'not '}be opened\n" in run("info")
    found = json.loads(run("info", "--json"))["imex_channels"]
    assert found == [{"path": str(channel), "permitted": permitted}]


def _sharing(run: Run) -> dict[str, Any]:
    return {one["what"]: one for one in json.loads(run("info", "--json"))["sharing"]}


@pytest.mark.simulated_only("what a real machine can share is not known beforehand")
def test_sharing_is_tried(machine: Any, run: Run) -> None:
    found = _sharing(run)
    of_one_machine = [one for what, one in found.items() if what != "memory between machines"]
    assert len(of_one_machine) == 4
    assert all(one["works"] and "by another process" in one["found"] for one in of_one_machine)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("cuMemPoolExportToShareableHandle", "pool and its allocations"),
        ("cuMemExportToShareableHandle", "memory mapped by cuMemMap"),
        ("cuIpcGetMemHandle", "memory of cuMemAlloc"),
        ("cuIpcGetEventHandle", "event"),
    ],
)
@pytest.mark.supports("fabric_handles", "compression", "dma_buf")
def test_sharing_that_the_driver_refuses(machine: Any, run: Run, name: str, what: str) -> None:
    with sd.use(sd.faulty(machine, name, result="CUDA_ERROR_NOT_SUPPORTED")):
        found = _sharing(run)
    refused = {one["what"] for one in found.values() if one["found"] == "refused: CUDA_ERROR_NOT_SUPPORTED"}
    assert refused == {what}


def test_wrong_bytes_in_the_other_process(machine: Any, run: Run) -> None:
    def fill_with_another(pointer: Any, value: int, count: int, stream: Any) -> Any:
        return machine.cuMemsetD8Async(pointer, value ^ 1, count, stream)

    with sd.use(Replaced(machine, cuMemsetD8Async=fill_with_another)):
        found = _sharing(run)["pool and its allocations"]
    assert (found["works"], found["found"]) == (False, "failed: ValueError: the other process read 4,096 wrong bytes")


def test_json(machine: Any, run: Run) -> None:
    report = json.loads(run("info", "--json"))
    assert report["versions"]["cuda_bindings"] == BINDINGS_VERSION
    devices = sa.Device.all()
    assert [one["uuid"] for one in report["devices"]] == [str(device.uuid) for device in devices]
    supports = devices[0].supports
    found = report["devices"][0]["supports"]
    assert list(found) == [item.name for item in dataclasses.fields(supports)]
    assert found["memory_pools"] is supports.memory_pools
    types = sum(sa.MemHandleType[name] for name in found["pool_handle_types"])
    assert types == supports.pool_handle_types
    assert len(report["peer_access"]) == len(devices)


def test_json_to_a_file(machine: Any, run: Run, tmp_path: Path) -> None:
    target = tmp_path / "info.json"
    text = run("info", "--json", str(target))
    assert "memory_pools" in text
    assert "devices" in json.loads(target.read_text())


def test_changes_no_pool_of_others(traced: Any, run: Run) -> None:
    with sd.use(traced):
        run("info")
    # It makes one pool of its own, to share memory of it.
    own = {int(call.answer[1]) for call in traced.calls if call.name == "cuMemPoolCreate"}
    changed = [call for call in traced.calls if "Pool" in call.name and ("Set" in call.name or "Trim" in call.name)]
    assert len(own) == 1
    assert all(int(call.args[0]) in own for call in changed)


def test_leaves_nothing_behind(checker: Any, run: Run) -> None:
    with sd.use(checker):
        run("info")
        sa.Device(0, driver=checker).synchronize()
    gc.collect()  # what was tried and refused may be in cycles with its error
    checker.assert_nothing_left()


def _trials(run: Run) -> dict[str, Any]:
    report = json.loads(run("info", "--json"))
    return {one["what"]: one for one in report["devices"][0]["virtual_memory"]}


def test_virtual_memory_is_tried(machine: Any, run: Run) -> None:
    text = run("info")
    trials = _trials(run)
    assert list(trials)[:3] == ["device memory", "compressible", "GPUDirect RDMA"]
    for what, one in trials.items():
        assert any(line.startswith(f"  {what}  ") and line.endswith(one["found"]) for line in text.splitlines())
    granularity = vmm.PhysicalMemory.granularity(sa.Device(0))
    assert trials["device memory"] == {
        "what": "device memory",
        "granularity": granularity,
        "recommended": vmm.PhysicalMemory.granularity(sa.Device(0), recommended=True),
        "works": True,
        "found": "allocated",
    }


@pytest.mark.supports("compression")
def test_compression_is_read_from_the_handle(machine: Any, run: Run) -> None:
    def never_compressible(handle: Any) -> Any:
        result, properties = machine.cuMemGetAllocationPropertiesFromHandle(handle)
        properties.allocFlags.compressionType = 0
        return result, properties

    with sd.use(Replaced(machine, cuMemGetAllocationPropertiesFromHandle=never_compressible)):
        found = _trials(run)["compressible"]
    assert (found["works"], found["found"]) == (False, "allocated, but not compressible")


@pytest.mark.parametrize("name", ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemGetHandleForAddressRange"])
@pytest.mark.supports("fabric_handles", "compression", "dma_buf")
def test_what_the_driver_refuses_is_said(machine: Any, run: Run, name: str) -> None:
    with sd.use(sd.faulty(machine, name, result="CUDA_ERROR_NOT_SUPPORTED")):
        # Only this call fails; the report goes on, and later trials show what else there is.
        found = _trials(run)
    refused = {what for what, one in found.items() if one["found"] == "refused: CUDA_ERROR_NOT_SUPPORTED"}
    assert refused == ({"device memory"} if name == "cuMemCreate" else {"DMA-BUF"})


def test_device_whose_memory_cannot_be_mapped_by_hand(machine: Any, run: Run) -> None:
    with sd.use(without(machine, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED")):
        assert _trials(run) == {}
        assert "one granule, tried" not in run("info")


class TestMulticast:
    @staticmethod
    def found(run: Run) -> Any:
        return json.loads(run("info", "--json"))["multicast"]

    @pytest.mark.gpus(2)
    @pytest.mark.simulated_only("whether real devices support multicast is not known beforehand")
    def test_a_team_of_all(self, traced: Any, run: Run) -> None:
        with sd.use(traced):
            found = self.found(run)
        assert found["largest_team"] == 2 and "fails although the devices support it" in found["needs"][1]
        assert not [call for call in traced.calls if "Multicast" in call.name]

    @pytest.mark.gpus(2)
    def test_devices_without_support(self, machine: Any, run: Run) -> None:
        with sd.use(without(machine, "MULTICAST_SUPPORTED")):
            found = self.found(run)
        assert found["largest_team"] == 0 and "nvidia-fabricmanager" in found["needs"][0]

    def test_one_device_alone_is_no_matter_for_the_administrator(self, run: Run) -> None:
        with sd.use(sd.simulated(devices=1)):
            assert self.found(run)["needs"] == ["needs at least two GPUs that NVSwitch joins"]

    def test_a_driver_that_does_not_know(self, machine: Any, run: Run) -> None:
        unknown = machine.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED

        def answer(asked: Any, device: Any) -> Any:
            if asked == unknown:
                return machine.CUresult.CUDA_ERROR_INVALID_VALUE, None
            return machine.cuDeviceGetAttribute(asked, device)

        with sd.use(Replaced(machine, cuDeviceGetAttribute=answer)):
            assert "cannot tell" in self.found(run)["needs"][0]
