"""Physical memory: which properties make it, what its handle says of it, and when the device has it back."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.facts.enums import (
    DEVICE,
    FABRIC,
    HOST,
    HOST_NUMA,
    HOST_NUMA_CURRENT,
    NOWHERE,
    POSIX_FD,
    READWRITE,
    WIN32,
    WIN32_KMT,
)
from tests.facts.support import PAGE, PROGRAM, UINT64_MAX, MiB, Rig, in_new_thread, said, value

Props = dict[str, int]

# What the handle of new memory says where it is not what was asked for.
AS_HOST_NUMA = {"location": HOST_NUMA, "id": 0}
NO_USAGE = {"usage": 0}

MADE: dict[str, tuple[Props, Props]] = {
    "device": ({}, {}),
    "compressed": ({"compression": 1}, {}),
    "RDMA": ({"rdma": 1}, {}),
    "file descriptor": ({"handle_types": POSIX_FD}, {}),
    "tile pool": ({"usage": 1}, NO_USAGE),
    "usage 2": ({"usage": 2}, NO_USAGE),
    "usage 4": ({"usage": 4}, NO_USAGE),
    "usage 8": ({"usage": 8}, NO_USAGE),
    "compressed, RDMA": ({"compression": 1, "rdma": 1}, {"compression": 0}),
    "compressed, file descriptor": ({"compression": 1, "handle_types": POSIX_FD}, {}),
    "RDMA, file descriptor": ({"rdma": 1, "handle_types": POSIX_FD}, {}),
    "host": ({"location": HOST}, AS_HOST_NUMA),
    "host, id 7": ({"location": HOST, "id": 7}, AS_HOST_NUMA),
    "host, tile pool": ({"location": HOST, "usage": 1}, AS_HOST_NUMA | NO_USAGE),
    "host NUMA": ({"location": HOST_NUMA}, {}),
    "host NUMA, file descriptor": ({"location": HOST_NUMA, "handle_types": POSIX_FD}, {}),
}
REFUSED: dict[str, tuple[str, Props]] = {
    # These two of a machine without an IMEX channel.
    "fabric": ("NOT_PERMITTED", {"handle_types": FABRIC}),
    "file descriptor and fabric": ("NOT_PERMITTED", {"handle_types": POSIX_FD | FABRIC}),
    "Win32": ("INVALID_VALUE", {"handle_types": WIN32}),
    "Win32 KMT": ("INVALID_VALUE", {"handle_types": WIN32_KMT}),
    "compression 2": ("INVALID_VALUE", {"compression": 2}),
    "tile pool, compressed": ("INVALID_VALUE", {"usage": 1, "compression": 1}),
    "tile pool, file descriptor": ("INVALID_VALUE", {"usage": 1, "handle_types": POSIX_FD}),
    "allocation type 0": ("INVALID_VALUE", {"allocation_type": 0}),
    "device that is not there": ("INVALID_DEVICE", {"id": 9}),
    "device -1": ("INVALID_DEVICE", {"id": -1}),
    "nowhere": ("INVALID_VALUE", {"location": NOWHERE}),
    "host, file descriptor": ("INVALID_VALUE", {"location": HOST, "handle_types": POSIX_FD}),
    "host, RDMA": ("INVALID_VALUE", {"location": HOST, "rdma": 1}),
    "host, compressed": ("INVALID_VALUE", {"location": HOST, "compression": 1}),
    "host NUMA 99": ("INVALID_VALUE", {"location": HOST_NUMA, "id": 99}),
    "host NUMA, fabric": ("NOT_PERMITTED", {"location": HOST_NUMA, "handle_types": FABRIC}),
    "host NUMA, RDMA": ("INVALID_VALUE", {"location": HOST_NUMA, "rdma": 1}),
    "host NUMA, compressed": ("INVALID_VALUE", {"location": HOST_NUMA, "compression": 1}),
    "current host NUMA": ("INVALID_VALUE", {"location": HOST_NUMA_CURRENT}),
}
ANY = {name: props for name, (props, _) in MADE.items()} | {name: props for name, (_, props) in REFUSED.items()}


def test_granularity_is_the_same_for_any_properties(rig: Rig) -> None:
    for props in ANY.values():
        for flag in map(rig.raw.CUmemAllocationGranularity_flags, (0, 1)):
            assert value(rig.raw.cuMemGetAllocationGranularity(rig.memory_props(**props), flag)) == PAGE


@pytest.mark.parametrize("name", MADE)
def test_memory(rig: Rig, name: str) -> None:
    wanted, changed = MADE[name]
    memory = rig.memory(**wanted)
    props = value(rig.raw.cuMemGetAllocationPropertiesFromHandle(memory))
    assert read(props) == read(rig.memory_props(**(wanted | changed)))
    assert rig.release(memory) == "SUCCESS"


def read(props: Any) -> list[int]:
    flags, location = props.allocFlags, props.location
    found = (props.type, location.type, location.id, props.requestedHandleTypes)
    return [int(one) for one in (*found, flags.compressionType, flags.gpuDirectRDMACapable, flags.usage)]


def test_memory_that_is_refused(rig: Rig) -> None:
    for name, (expected, wanted) in REFUSED.items():
        assert said(rig.create_memory(**wanted)) == expected, name
    minimum = rig.raw.CUmemAllocationGranularity_flags(0)
    assert said(rig.raw.cuMemGetAllocationGranularity(None, minimum)) == "INVALID_VALUE"
    for props, flags in ((None, 0), (rig.memory_props(), 1)):
        assert said(rig.keep_memory(rig.raw.cuMemCreate(PAGE, props, flags))) == "INVALID_VALUE"


SIZES = {
    "INVALID_VALUE": (0, 1, 4096, PAGE - 1, PAGE + 4096, UINT64_MAX),
    "SUCCESS": (3 * PAGE, 64 * MiB),
    "OUT_OF_MEMORY": (1 << 63, UINT64_MAX + 1 - PAGE),
}


class TestSize:
    def test_of_device_and_host_memory(self, rig: Rig) -> None:
        for expected, sizes in SIZES.items():
            assert [said(rig.create_memory(size)) for size in sizes] == [expected] * len(sizes)
        _, total = value(rig.raw.cuMemGetInfo())
        assert said(rig.create_memory(-(-total // PAGE) * PAGE)) == "OUT_OF_MEMORY"
        for location in (HOST, HOST_NUMA):
            assert said(rig.create_memory(4096, location=location)) == "INVALID_VALUE"
        assert said(rig.create_memory(1 << 42, location=HOST)) == "OUT_OF_MEMORY"

    def test_negative(self, rig: Rig) -> None:
        with pytest.raises(OverflowError, match=r"^can't convert negative value to size_t$"):
            rig.create_memory(-1)


class TestDeviceMemory:
    """Its effect on cuMemGetInfo."""

    @pytest.mark.parametrize("name", MADE)
    def test_is_taken_at_once_and_comes_back_at_the_release(self, rig: Rig, name: str) -> None:
        props, _ = MADE[name]
        # The first host memory of a process takes some of the device for good.
        assert rig.release(rig.memory(location=HOST)) == "SUCCESS"
        free = rig.device_free()
        memory = rig.memory(**props)
        assert free - rig.device_free() == (0 if "location" in props else PAGE)
        assert rig.release(memory) == "SUCCESS"
        assert rig.device_free() == free

    def test_comes_back_when_no_handle_and_no_mapping_is_left(self, rig: Rig) -> None:
        step, taken = 64 * MiB, 256 * MiB
        free = rig.device_free()
        memories = [rig.memory(step) for _ in range(4)]
        assert free - rig.device_free() == taken
        start = rig.reserve(taken)
        for number, memory in enumerate(memories):
            rig.map(start + number * step, memory, step)
        assert free - rig.device_free() == taken
        assert rig.set_access(start, taken, (DEVICE, 0, READWRITE)) == "SUCCESS"
        assert free - rig.device_free() == taken
        assert [rig.release(memory) for memory in memories] == ["SUCCESS"] * 4
        assert free - rig.device_free() == taken
        value(rig.raw.cuMemUnmap(start, taken))
        # Hardware keeps up to two pages, for what describes the range.
        assert free - rig.device_free() <= 2 * PAGE


class TestHandle:
    def test_release_twice(self, rig: Rig) -> None:
        memory = rig.memory()
        assert [rig.release(memory), rig.release(memory)] == ["SUCCESS", "INVALID_VALUE"]
        assert said(rig.raw.cuMemGetAllocationPropertiesFromHandle(0)) == "INVALID_VALUE"
        assert said(rig.raw.cuMemRelease(0)) == "INVALID_VALUE"

    def test_fresh_memory_has_no_access_for_anyone(self, rig: Rig) -> None:
        address = rig.mapping()
        assert rig.get_access(address) == 0
        assert said(rig.raw.cuMemsetD8(address, 1, PAGE)) == "INVALID_VALUE"


def test_no_call_needs_a_context(rig: Rig) -> None:
    raw = rig.raw

    def call() -> None:
        minimum = raw.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        assert value(raw.cuMemGetAllocationGranularity(rig.memory_props(), minimum)) == PAGE
        memory = rig.memory()
        value(raw.cuMemGetAllocationPropertiesFromHandle(memory))
        address = rig.map(rig.reserve(PAGE), memory)
        assert rig.set_access(address, PAGE, (DEVICE, 0, READWRITE)) == "SUCCESS"
        assert rig.get_access(address) == READWRITE
        retained = value(rig.keep_memory(raw.cuMemRetainAllocationHandle(address)))
        assert int(retained) == int(memory)
        assert said(raw.cuMemUnmap(address, PAGE)) == "SUCCESS"
        assert [rig.release(retained), rig.release(memory)] == ["SUCCESS"] * 2
        assert rig.free_range(address, PAGE) == "SUCCESS"

    in_new_thread(call)


def test_no_call_makes_the_primary_context(python: Callable[..., CompletedProcess[str]]) -> None:
    ended = python(
        PROGRAM
        + """
rig = Rig(raw)
address = rig.mapping(PAGE, (DEVICE, 0, READWRITE))
assert raw.cuDevicePrimaryCtxGetState(0)[1:] == (0, 0)
value(raw.cuMemUnmap(address, PAGE))
value(raw.cuMemAddressFree(address, PAGE))
assert raw.cuDevicePrimaryCtxGetState(0)[1:] == (0, 0)
"""
    )
    assert (ended.returncode, ended.stderr) == (0, "")
