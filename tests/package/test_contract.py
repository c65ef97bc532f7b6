"""The names and calls that users rely on (the design's "Public shape")."""

import dataclasses
import inspect
from typing import Any

import pytest

import streamalloc as sa
from streamalloc import interop, ipc, vmm
from streamalloc.driver.bindings import cuda
from tests.support import public_names

# Each driver enum, and the prefix that ours leave out.
ENUMS = [
    (sa.MemLocationType, "CUmemLocationType", "CU_MEM_LOCATION_TYPE_"),
    (sa.MemAllocationType, "CUmemAllocationType", "CU_MEM_ALLOCATION_TYPE_"),
    (sa.MemHandleType, "CUmemAllocationHandleType", "CU_MEM_HANDLE_TYPE_"),
    (sa.MemAccess, "CUmemAccess_flags", "CU_MEM_ACCESS_FLAGS_PROT_"),
]


AREAS = ("driver", "interop", "ipc", "multicast", "observing", "plots", "testing", "traces", "vmm")


@pytest.mark.parametrize("area", AREAS)
def test_completion_offers_public_names(area: str) -> None:
    assert {name for name in dir(getattr(sa, area)) if not name.startswith("_")} == {*getattr(sa, area).__all__}


def test_completion_leaves_out_what_only_other_areas_use(device: sa.Device, stream: sa.Stream) -> None:
    pool = sa.MemoryPool.default(device)
    with pool.allocate(64, stream) as buffer:
        for thing in (stream, pool, buffer, buffer[:8]):
            assert thing._inner and all(hasattr(thing, name) for name in thing._inner)
            assert not {*dir(thing)} & {*thing._inner} and "__repr__" in dir(thing)


def test_dataclasses_are_frozen_and_slotted() -> None:
    public = [getattr(area, name) for area in (sa, vmm, ipc, interop, sa.driver) for name in public_names(area)]
    kinds = [one for one in public if inspect.isclass(one) and dataclasses.is_dataclass(one)]
    known = {sa.MemLocation, sa.CopyOptions, vmm.Residents, ipc.StoreEntry, interop.Registration, sa.driver.Hazard}
    assert known < {*kinds}
    for kind in kinds:
        one: Any = object.__new__(kind)
        for name in (dataclasses.fields(kind)[0].name, "made_up"):
            with pytest.raises((AttributeError, TypeError)):
                setattr(one, name, None)
        with_dict = (ipc.StoreEntry, ipc.StoreStatistics, sa.driver.Call, sa.driver.Hazard)
        assert hasattr(one, "__dict__") == (kind in with_dict)


@pytest.mark.parametrize(("ours", "theirs", "prefix"), ENUMS)
def test_enum_members_are_the_driver_s_without_the_prefix(ours: Any, theirs: str, prefix: str) -> None:
    members = {member.name: int(member) for member in ours}
    if ours is sa.MemHandleType:
        members["NONE"] = int(sa.MemHandleType.NONE)  # a flag of no bits is not listed as a member
    assert members
    for name, value in members.items():
        known = getattr(getattr(cuda, theirs), prefix + name, None)
        # NONE came to CUmemLocationType and MANAGED to CUmemAllocationType with version 13.
        assert known is None or int(known) == value, name


def test_locations() -> None:
    kind = sa.MemLocationType
    assert sa.MemLocation.device(3) == sa.MemLocation(kind.DEVICE, 3)
    assert sa.MemLocation.host() == sa.MemLocation(kind.HOST, 0)
    assert sa.MemLocation.host_numa(1) == sa.MemLocation(kind.HOST_NUMA, 1)
    assert sa.MemLocation.none() == sa.MemLocation(kind.NONE, 0)


def test_errors() -> None:
    assert issubclass(sa.CudaError, RuntimeError)
    assert issubclass(sa.OutOfMemoryError, sa.CudaError) and issubclass(sa.OutOfMemoryError, MemoryError)


def test_statistics_are_four_numbers_in_this_order() -> None:
    assert sa.PoolStatistics._fields == ("reserved", "reserved_high", "used", "used_high")


def test_the_design_s_example(device: sa.Device) -> None:
    stream, other = device.create_stream(), device.create_stream()
    pool = sa.MemoryPool(device, max_size=0, handle_types=sa.MemHandleType.NONE, release_threshold=None)
    buffer = pool.allocate(64, stream)
    assert isinstance(buffer.address, int) and buffer.address and buffer.nbytes == 64
    buffer.fill(1, stream)
    event = stream.record()
    other.wait(event)
    part = buffer[8:16]
    assert (part.address, part.nbytes) == (buffer.address + 8, 8)
    pool.attributes.release_threshold = 64
    assert pool.attributes.release_threshold == 64
    assert pool.statistics().used == 64
    assert pool.access(device) is sa.MemAccess.READWRITE
    buffer.free(stream=None)
    stream.synchronize()
    assert event.query()
    pool.reset_peaks()
    pool.trim(keep=0)
    pool.set_access(device, sa.MemAccess.READWRITE)
    with sa.allocate(nbytes=64, stream=stream) as current:
        assert current.owner is sa.MemoryPool.current(device) is not pool
        assert sa.pointer_attributes(current.address, driver=None).address == current.address
        with pool.make_current(), sa.allocate(64, stream) as own:
            assert own.owner is pool
            own.copy_to(current, stream=stream)
            own.copy_from(current, stream=stream)
    assert sa.MemoryPool.default(device).location == sa.MemLocation.device(0)
    sa.MemoryPool(sa.MemPoolProps(location=sa.MemLocation.device(0)), driver=None).close()
    sa.MemoryPool(device, on_oom="sync-trim-retry").close()
    pool.close()


def test_drivers() -> None:
    machine = sa.driver.simulated(devices=2, memory=1 << 30, profile="h200", multicast=True, fabric=True, seed=1)
    for driver in (
        machine,
        sa.driver.checked(machine),
        sa.driver.traced(machine),
        sa.driver.faulty(machine, "cuMemPoolCreate"),
        sa.driver.faulty(machine, 3),
    ):
        with sa.driver.use(driver):
            assert sa.driver.default() is driver is sa.Device(0).driver
    assert sa.Device.count(sa.driver.simulated()) == 1 and sa.Device(1, driver=machine).driver is machine
