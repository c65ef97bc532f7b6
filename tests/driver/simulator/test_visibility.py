"""Processes of one machine that see different devices of it, each under ordinals of its own."""

from __future__ import annotations

import os
from typing import Any

import pytest

from streamalloc.driver import simulated
from streamalloc.driver.bindings import cuda
from tests.facts.support import DEVICE, PAGE, POSIX_FD, READWRITE, Rig, value

pytestmark = pytest.mark.simulated_only("it sets what a process sees")


def rig_of(monkeypatch: pytest.MonkeyPatch, visible: str, name: str = "shown", **machine: Any) -> Rig:
    """A rig on a machine of three devices, of which it sees these."""
    monkeypatch.setenv("STREAMALLOC_INSTALL", "simulated")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    raw: Any = simulated(devices=3, name=name, **machine)
    value(raw.cuInit(0))
    value(raw.cuCtxSetCurrent(value(raw.cuDevicePrimaryCtxRetain(0))))
    return Rig(raw)


def bus_ids(rig: Rig) -> list[bytes]:
    count = value(rig.raw.cuDeviceGetCount())
    return [value(rig.raw.cuDeviceGetPCIBusId(20, number)) for number in range(count)]


def test_attributes_and_links_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    everything, some = (rig_of(monkeypatch, visible) for visible in ("0,1,2", "2,0"))
    found = bus_ids(everything)
    assert bus_ids(some) == [found[2], found[0]]
    for number, one in enumerate(bus_ids(some)):
        assert int(value(some.raw.cuDeviceGetByPCIBusId(one))) == number


def test_memory_is_taken_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines of one name share the memory of their devices."""
    owner, same, other = (rig_of(monkeypatch, visible, memory=1 << 30) for visible in ("1", "0,1", "0"))
    before = [value(one.raw.cuMemGetInfo())[0] for one in (owner, other)]
    value(owner.raw.cuMemAlloc(64 << 20))
    assert value(owner.raw.cuMemGetInfo())[0] == before[0] - (64 << 20)
    assert value(other.raw.cuMemGetInfo())[0] == before[1]
    same.use(same.device_context(1))
    assert value(same.raw.cuMemGetInfo())[0] == before[0] - (64 << 20)


@pytest.mark.parametrize(("owner", "importer", "ordinal"), [("1", "0,1", 1), ("2", "2,0", 0), ("0,1", "1,2", -2)])
def test_imported_memory(monkeypatch: pytest.MonkeyPatch, owner: str, importer: str, ordinal: int) -> None:
    """Both see the same bytes. A device that the importer does not see has the ordinal -2."""
    rigs = [rig_of(monkeypatch, visible) for visible in (owner, importer)]
    memory = rigs[0].memory(handle_types=POSIX_FD)
    fd_type = cuda.CUmemAllocationHandleType(POSIX_FD)
    fd = int(value(rigs[0].raw.cuMemExportToShareableHandle(memory, fd_type, 0)))
    imported = value(rigs[1].raw.cuMemImportFromShareableHandle(fd, fd_type))
    os.close(fd)
    assert value(rigs[1].raw.cuMemGetAllocationPropertiesFromHandle(imported)).location.id == ordinal
    addresses = []
    for rig, handle in zip(rigs, (memory, imported), strict=True):
        addresses.append(rig.map(rig.reserve(PAGE), handle))
        assert rig.set_access(addresses[-1], PAGE, (DEVICE, 0, READWRITE)) == "SUCCESS"
    value(rigs[0].raw.cuMemsetD8(addresses[0], 7, 64))
    assert bytes(rigs[1].read(addresses[1], 64)) == bytes([7] * 64)
