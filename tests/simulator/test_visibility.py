"""Processes of one machine that see different devices of it, each under ordinals of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import streamalloc
from streamalloc.driver.bindings import cuda
from tests.facts.enums import DEVICE, POSIX_FD, READWRITE
from tests.facts.support import PAGE, Rig, said, value
from tests.simulator.support import new_rig

PROFILE = Path(streamalloc.__file__).parent / "simulator" / "h200.json"

pytestmark = pytest.mark.simulated_only("it sets what a process sees")


def rig_of(monkeypatch: pytest.MonkeyPatch, visible: str, name: str = "shown", **machine: Any) -> Rig:
    """A rig on a machine of three devices, of which it sees these."""
    monkeypatch.setenv("STREAMALLOC_INSTALL", "simulated")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return new_rig(devices=3, name=name, **machine)


def bus_ids(rig: Rig) -> list[bytes]:
    count = value(rig.raw.cuDeviceGetCount())
    return [value(rig.raw.cuDeviceGetPCIBusId(20, number)) for number in range(count)]


def test_attributes_and_links_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    everything, some = (rig_of(monkeypatch, visible) for visible in ("0,1,2", "2,0"))
    found = bus_ids(everything)
    assert bus_ids(some) == [found[2], found[0]]
    for number, one in enumerate(bus_ids(some)):
        assert int(value(some.raw.cuDeviceGetByPCIBusId(one))) == number


def test_links_are_those_of_the_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    profile = json.loads(PROFILE.read_text())
    link = profile["links"][0]
    pairs = [(one, two) for one in range(3) for two in range(3) if one != two]
    profile["links"] = [{**link, "from": one, "to": two, "access": int(2 in (one, two))} for one, two in pairs]
    profile["devices"] = [profile["devices"][0]] * 3
    path = tmp_path / "uneven.json"
    path.write_text(json.dumps(profile))
    for visible, access in (("0,1", 0), ("2,0", 1), ("1,2", 1)):
        raw = rig_of(monkeypatch, visible, profile=str(path)).raw
        assert value(raw.cuDeviceCanAccessPeer(0, 1)) == access, visible


def test_a_team_of_devices_that_each_see_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rigs = [rig_of(monkeypatch, visible) for visible in ("0", "1")]
    properties = cuda.CUmulticastObjectProp()
    properties.numDevices, properties.size, properties.handleTypes = 2, 512 << 20, POSIX_FD
    team = value(rigs[0].raw.cuMulticastCreate(properties))
    same = rigs[1].imported(rigs[0].exported(team))
    added = [said(rig.raw.cuMulticastAddDevice(handle, 0)) for rig, handle in zip(rigs, (team, same), strict=True)]
    assert added == ["SUCCESS", "SUCCESS"]


def test_memory_is_taken_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines of one name share the memory of their devices."""
    owner, same, other = (rig_of(monkeypatch, visible, memory=1 << 30) for visible in ("1", "0,1", "0"))
    before = [value(one.raw.cuMemGetInfo())[0] for one in (owner, other)]
    stream = owner.stream()
    owner.allocate(owner.pool(), 64 << 20, stream)
    assert value(owner.raw.cuMemGetInfo())[0] == before[0] - (64 << 20)
    assert value(other.raw.cuMemGetInfo())[0] == before[1]
    same.use(same.device_context(1))
    assert value(same.raw.cuMemGetInfo())[0] == before[0] - (64 << 20)


@pytest.mark.parametrize(("owner", "importer", "ordinal"), [("1", "0,1", 1), ("2", "2,0", 0), ("0,1", "1,2", -2)])
def test_imported_memory(monkeypatch: pytest.MonkeyPatch, owner: str, importer: str, ordinal: int) -> None:
    """Both see the same bytes. A device that the importer does not see has the ordinal -2."""
    rigs = [rig_of(monkeypatch, visible) for visible in (owner, importer)]
    memory = rigs[0].memory(handle_types=POSIX_FD)
    imported = rigs[1].imported(rigs[0].exported(memory))
    assert value(rigs[1].raw.cuMemGetAllocationPropertiesFromHandle(imported)).location.id == ordinal
    addresses = []
    for rig, handle in zip(rigs, (memory, imported), strict=True):
        addresses.append(rig.map(rig.reserve(PAGE), handle))
        assert rig.set_access(addresses[-1], PAGE, (DEVICE, 0, READWRITE)) == "SUCCESS"
    value(rigs[0].raw.cuMemsetD8(addresses[0], 7, 64))
    assert bytes(rigs[1].read(addresses[1], 64)) == bytes([7] * 64)
