"""Answers of a device, its contexts and the driver about themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from streamalloc.simulator.profiles import built_in
from tests.facts.conftest import CAPABILITY, DRIVER_VERSION, NAME
from tests.facts.support import Rig, said, value

# The readings of attributes are in the profile of an H200, h200.json. Left out are those that depend on the host (the
# PCI address, the board's number) or on a second device.
OF_THE_HOST = """
    PCI_BUS_ID PCI_DEVICE_ID PCI_DOMAIN_ID MULTI_GPU_BOARD MULTI_GPU_BOARD_GROUP_ID GPU_PCI_SUBSYSTEM_ID
    MULTICAST_SUPPORTED
"""
READINGS = {name: reading for name, reading in built_in("h200").attributes.items() if name not in OF_THE_HOST.split()}

# Those that differ from one board or host to another of the same architecture.
OF_THE_BOARD = """
    CLOCK_RATE MULTIPROCESSOR_COUNT KERNEL_EXEC_TIMEOUT COMPUTE_MODE ECC_ENABLED MEMORY_CLOCK_RATE
    GLOBAL_MEMORY_BUS_WIDTH L2_CACHE_SIZE ASYNC_ENGINE_COUNT HOST_NATIVE_ATOMIC_SUPPORTED PAGEABLE_MEMORY_ACCESS
    PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES DIRECT_MANAGED_MEM_ACCESS_FROM_HOST MAX_PERSISTING_L2_CACHE_SIZE
    GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED GPU_DIRECT_RDMA_SUPPORTED GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
    GPU_DIRECT_RDMA_WRITES_ORDERING MEMPOOL_SUPPORTED_HANDLE_TYPES DMA_BUF_SUPPORTED HANDLE_TYPE_FABRIC_SUPPORTED
    NUMA_CONFIG NUMA_ID MPS_ENABLED HOST_NUMA_ID D3D12_CIG_SUPPORTED MEM_DECOMPRESS_ALGORITHM_MASK
    MEM_DECOMPRESS_MAXIMUM_LENGTH VULKAN_CIG_SUPPORTED GPU_PCI_DEVICE_ID
    HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED HOST_NUMA_MEMORY_POOLS_SUPPORTED HOST_NUMA_MULTINODE_IPC_SUPPORTED
    HOST_ALLOC_DMA_BUF_SUPPORTED ONLY_PARTIAL_HOST_NATIVE_ATOMIC_SUPPORTED
"""

# Attributes that the bindings list and this driver does not know.
UNKNOWN_ATTRIBUTES = """
    ATOMIC_REDUCTION_SUPPORTED D3D12_CIG_STREAMS_SUPPORTED DMA_BUF_MMAP_SUPPORTED LOGICAL_ENDPOINT_UNICAST_SUPPORTED
    LOGICAL_ENDPOINT_MULTICAST_SUPPORTED LOGICAL_ENDPOINT_COUNTED_OPS_SUPPORTED
    LOGICAL_ENDPOINT_UNICAST_ACCESS_ON_OWNER_DEVICE_SUPPORTED
"""


def answers(raw: Any, names: Iterable[str]) -> dict[str, int | str]:
    """What the driver says of those attributes that the bindings name."""
    members = {name: getattr(raw.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None) for name in names}
    found = {name: raw.cuDeviceGetAttribute(one, 0) for name, one in members.items() if one is not None}
    return {name: one[1] if said(one) == "SUCCESS" else said(one) for name, one in found.items()}


def check(raw: Any, names: Iterable[str]) -> None:
    found = answers(raw, names)
    assert found == {name: READINGS[name] for name in found} and len(found) > 20


@pytest.mark.usefixtures("same_architecture")
def test_attributes(raw: Any) -> None:
    check(raw, READINGS.keys() - OF_THE_BOARD.split())


@pytest.mark.usefixtures("same_gpu")
def test_attributes_of_the_board(raw: Any) -> None:
    check(raw, READINGS.keys() & OF_THE_BOARD.split())


@pytest.mark.usefixtures("same_driver")
def test_attributes_that_the_driver_does_not_know(raw: Any) -> None:
    assert {*answers(raw, UNKNOWN_ATTRIBUTES.split()).values()} <= {"INVALID_VALUE"}


# The bindings of 12.9 name a number there that the driver does know.
@pytest.mark.bindings("13.0")
@pytest.mark.usefixtures("same_driver")
def test_attribute_behind_the_last(raw: Any) -> None:
    attribute = raw.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX
    assert said(raw.cuDeviceGetAttribute(attribute, 0)) == "INVALID_VALUE"


def test_attribute_of_a_device_that_is_not_there(raw: Any) -> None:
    assert said(raw.cuDeviceGetAttribute(raw.CUdevice_attribute(1), 99)) == "INVALID_DEVICE"


@pytest.mark.usefixtures("same_gpu", "all_devices")
def test_multicast_needs_a_second_device(raw: Any) -> None:
    count = value(raw.cuDeviceGetCount())
    attribute = raw.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
    assert value(raw.cuDeviceGetAttribute(attribute, 0)) == int(count > 1)


@pytest.mark.gpus(2)
def test_multicast_of_two_devices(raw: Any) -> None:
    attribute = raw.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
    assert [value(raw.cuDeviceGetAttribute(attribute, device)) for device in (0, 1)] == [1, 1]


@pytest.mark.usefixtures("same_driver")
def test_driver_version(raw: Any) -> None:
    assert value(raw.cuDriverGetVersion()) == DRIVER_VERSION


def test_name_is_padded_to_the_length_asked_for(raw: Any) -> None:
    name = value(raw.cuDeviceGetName(64, 0))
    assert len(name) == 64 and name.rstrip(b"\0").decode().isprintable()


@pytest.mark.simulated_only("which must not skip what other machines do")
def test_machine_of_the_readings(raw: Any) -> None:
    assert value(raw.cuDeviceGetName(64, 0)).rstrip(b"\0").decode() == NAME
    assert value(raw.cuDeviceComputeCapability(0)) == CAPABILITY
    assert value(raw.cuDriverGetVersion()) == DRIVER_VERSION


@pytest.mark.usefixtures("same_gpu")
def test_total_memory(raw: Any) -> None:
    assert value(raw.cuDeviceTotalMem(0)) == 150109880320


def test_memory_info(raw: Any) -> None:
    free, total = value(raw.cuMemGetInfo())
    assert total == value(raw.cuDeviceTotalMem(0))
    assert 0 < free < total


def test_uuid(raw: Any) -> None:
    assert len(value(raw.cuDeviceGetUuid(0)).bytes) == 16


def test_device_that_is_not_there(raw: Any) -> None:
    assert [said(raw.cuDeviceGet(ordinal)) for ordinal in (-1, 99)] == ["INVALID_DEVICE"] * 2


def test_init_again(raw: Any) -> None:
    assert [said(raw.cuInit(flags)) for flags in (0, 1)] == ["SUCCESS", "INVALID_VALUE"]


def test_error_name_and_string(raw: Any) -> None:
    error = raw.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    assert value(raw.cuGetErrorName(error)) == b"CUDA_ERROR_OUT_OF_MEMORY"
    assert value(raw.cuGetErrorString(error)) == b"out of memory"


def test_errors_that_only_newer_bindings_name(raw: Any) -> None:
    for error in raw.CUresult:
        (code, name), (_, text) = raw.cuGetErrorName(error), raw.cuGetErrorString(error)
        assert (name is None) == (text is None) == (code == raw.CUresult.CUDA_ERROR_INVALID_VALUE), error


@pytest.mark.usefixtures("same_architecture")
def test_stream_priority_range(raw: Any) -> None:
    assert value(raw.cuCtxGetStreamPriorityRange()) == (0, -5)


@pytest.mark.usefixtures("same_driver")
def test_context_api_version(rig: Rig) -> None:
    assert value(rig.raw.cuCtxGetApiVersion(rig.context)) == 3020


def test_context_flags_of_a_primary_context(raw: Any) -> None:
    map_host, resize_local_memory = 8, 16  # the second is set by the CUDA runtime, where a library has loaded that
    assert value(raw.cuCtxGetFlags()) & ~resize_local_memory == map_host


@pytest.mark.simulated_only("a process is initialised once")
def test_before_init(machine: Any) -> None:
    assert value(machine.cuDriverGetVersion()) == 13000
    assert said(machine.cuDeviceGetCount()) == said(machine.cuMemAlloc(1)) == "NOT_INITIALIZED"
