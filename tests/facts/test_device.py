"""Answers of a device, its contexts and the driver about themselves."""

from __future__ import annotations

from typing import Any

import pytest

from tests.facts.conftest import CAPABILITY, DRIVER_VERSION, NAME
from tests.facts.support import Rig, said, value

# Left out: attributes whose values depend on the host (the PCI address, the board's number) and those that the
# readings' bindings did not know.
ATTRIBUTES = {
    "MAX_THREADS_PER_BLOCK": 1024,
    "MAX_BLOCK_DIM_X": 1024,
    "MAX_BLOCK_DIM_Y": 1024,
    "MAX_BLOCK_DIM_Z": 64,
    "MAX_GRID_DIM_X": 2147483647,
    "MAX_GRID_DIM_Y": 65535,
    "MAX_GRID_DIM_Z": 65535,
    "MAX_SHARED_MEMORY_PER_BLOCK": 49152,
    "TOTAL_CONSTANT_MEMORY": 65536,
    "WARP_SIZE": 32,
    "MAX_PITCH": 2147483647,
    "MAX_REGISTERS_PER_BLOCK": 65536,
    "TEXTURE_ALIGNMENT": 512,
    "GPU_OVERLAP": 1,
    "INTEGRATED": 0,
    "CAN_MAP_HOST_MEMORY": 1,
    "SURFACE_ALIGNMENT": 512,
    "CONCURRENT_KERNELS": 1,
    "TCC_DRIVER": 0,
    "MAX_THREADS_PER_MULTIPROCESSOR": 2048,
    "UNIFIED_ADDRESSING": 1,
    "TEXTURE_PITCH_ALIGNMENT": 32,
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "STREAM_PRIORITIES_SUPPORTED": 1,
    "GLOBAL_L1_CACHE_SUPPORTED": 1,
    "LOCAL_L1_CACHE_SUPPORTED": 1,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 233472,
    "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
    "MANAGED_MEMORY": 1,
    "SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO": 2,
    "CONCURRENT_MANAGED_ACCESS": 1,
    "COMPUTE_PREEMPTION_SUPPORTED": 1,
    "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": 1,
    "COOPERATIVE_LAUNCH": 1,
    "COOPERATIVE_MULTI_DEVICE_LAUNCH": 1,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
    "CAN_FLUSH_REMOTE_WRITES": 0,
    "HOST_REGISTER_SUPPORTED": 1,
    "VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED": 1,
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 1,
    "HANDLE_TYPE_WIN32_HANDLE_SUPPORTED": 0,
    "HANDLE_TYPE_WIN32_KMT_HANDLE_SUPPORTED": 0,
    "MAX_BLOCKS_PER_MULTIPROCESSOR": 32,
    "GENERIC_COMPRESSION_SUPPORTED": 1,
    "MAX_ACCESS_POLICY_WINDOW_SIZE": 134217728,
    "RESERVED_SHARED_MEMORY_PER_BLOCK": 1024,
    "SPARSE_CUDA_ARRAY_SUPPORTED": 1,
    "READ_ONLY_HOST_REGISTER_SUPPORTED": 1,
    "TIMELINE_SEMAPHORE_INTEROP_SUPPORTED": 1,
    "MEMORY_POOLS_SUPPORTED": 1,
    "CLUSTER_LAUNCH": 1,
    "DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED": 1,
    "CAN_USE_64_BIT_STREAM_MEM_OPS": 1,
    "CAN_USE_STREAM_WAIT_VALUE_NOR": 1,
    "IPC_EVENT_SUPPORTED": 1,
    "MEM_SYNC_DOMAIN_COUNT": 4,
    "TENSOR_MAP_ACCESS_SUPPORTED": 1,
    "UNIFIED_FUNCTION_POINTERS": 1,
    "HOST_MEMORY_POOLS_SUPPORTED": 1,
    "HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
}

# Those that differ from one board or host to another of the same architecture.
BOARD_ATTRIBUTES = {
    "CLOCK_RATE": 1980000,
    "MULTIPROCESSOR_COUNT": 132,
    "KERNEL_EXEC_TIMEOUT": 0,
    "COMPUTE_MODE": 0,
    "ECC_ENABLED": 1,
    "MEMORY_CLOCK_RATE": 3201000,
    "GLOBAL_MEMORY_BUS_WIDTH": 6016,
    "L2_CACHE_SIZE": 62914560,
    "ASYNC_ENGINE_COUNT": 3,
    "HOST_NATIVE_ATOMIC_SUPPORTED": 0,
    "PAGEABLE_MEMORY_ACCESS": 0,
    "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES": 0,
    "DIRECT_MANAGED_MEM_ACCESS_FROM_HOST": 0,
    "MAX_PERSISTING_L2_CACHE_SIZE": 39321600,
    "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED": 1,
    "GPU_DIRECT_RDMA_SUPPORTED": 1,
    "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS": 1,
    "GPU_DIRECT_RDMA_WRITES_ORDERING": 100,
    "MEMPOOL_SUPPORTED_HANDLE_TYPES": 9,
    "DMA_BUF_SUPPORTED": 1,
    "HANDLE_TYPE_FABRIC_SUPPORTED": 1,
    "NUMA_CONFIG": 0,
    "NUMA_ID": -1,
    "MPS_ENABLED": 0,
    "HOST_NUMA_ID": 0,
    "D3D12_CIG_SUPPORTED": 0,
    "MEM_DECOMPRESS_ALGORITHM_MASK": 0,
    "MEM_DECOMPRESS_MAXIMUM_LENGTH": 0,
    "VULKAN_CIG_SUPPORTED": 0,
    "GPU_PCI_DEVICE_ID": 590680286,
    "HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
    "HOST_NUMA_MEMORY_POOLS_SUPPORTED": 1,
    "HOST_NUMA_MULTINODE_IPC_SUPPORTED": 0,
    "HOST_ALLOC_DMA_BUF_SUPPORTED": 0,
    "ONLY_PARTIAL_HOST_NATIVE_ATOMIC_SUPPORTED": 0,
}

# The limits of textures and surfaces, and the stream memory operations of before CUDA 12.
MORE_ATTRIBUTES = {
    "MAXIMUM_TEXTURE1D_WIDTH": 131072,
    "MAXIMUM_TEXTURE2D_WIDTH": 131072,
    "MAXIMUM_TEXTURE2D_HEIGHT": 65536,
    "MAXIMUM_TEXTURE3D_WIDTH": 16384,
    "MAXIMUM_TEXTURE3D_HEIGHT": 16384,
    "MAXIMUM_TEXTURE3D_DEPTH": 16384,
    "MAXIMUM_TEXTURE2D_LAYERED_WIDTH": 32768,
    "MAXIMUM_TEXTURE2D_ARRAY_WIDTH": 32768,
    "MAXIMUM_TEXTURE2D_LAYERED_HEIGHT": 32768,
    "MAXIMUM_TEXTURE2D_ARRAY_HEIGHT": 32768,
    "MAXIMUM_TEXTURE2D_LAYERED_LAYERS": 2048,
    "MAXIMUM_TEXTURE2D_ARRAY_NUMSLICES": 2048,
    "MAXIMUM_TEXTURE1D_LAYERED_WIDTH": 32768,
    "MAXIMUM_TEXTURE1D_LAYERED_LAYERS": 2048,
    "CAN_TEX2D_GATHER": 1,
    "MAXIMUM_TEXTURE2D_GATHER_WIDTH": 32768,
    "MAXIMUM_TEXTURE2D_GATHER_HEIGHT": 32768,
    "MAXIMUM_TEXTURE3D_WIDTH_ALTERNATE": 8192,
    "MAXIMUM_TEXTURE3D_HEIGHT_ALTERNATE": 8192,
    "MAXIMUM_TEXTURE3D_DEPTH_ALTERNATE": 32768,
    "MAXIMUM_TEXTURECUBEMAP_WIDTH": 32768,
    "MAXIMUM_TEXTURECUBEMAP_LAYERED_WIDTH": 32768,
    "MAXIMUM_TEXTURECUBEMAP_LAYERED_LAYERS": 2046,
    "MAXIMUM_SURFACE1D_WIDTH": 32768,
    "MAXIMUM_SURFACE2D_WIDTH": 131072,
    "MAXIMUM_SURFACE2D_HEIGHT": 65536,
    "MAXIMUM_SURFACE3D_WIDTH": 16384,
    "MAXIMUM_SURFACE3D_HEIGHT": 16384,
    "MAXIMUM_SURFACE3D_DEPTH": 16384,
    "MAXIMUM_SURFACE1D_LAYERED_WIDTH": 32768,
    "MAXIMUM_SURFACE1D_LAYERED_LAYERS": 2048,
    "MAXIMUM_SURFACE2D_LAYERED_WIDTH": 32768,
    "MAXIMUM_SURFACE2D_LAYERED_HEIGHT": 32768,
    "MAXIMUM_SURFACE2D_LAYERED_LAYERS": 2048,
    "MAXIMUM_SURFACECUBEMAP_WIDTH": 32768,
    "MAXIMUM_SURFACECUBEMAP_LAYERED_WIDTH": 32768,
    "MAXIMUM_SURFACECUBEMAP_LAYERED_LAYERS": 2046,
    "MAXIMUM_TEXTURE1D_LINEAR_WIDTH": 268435456,
    "MAXIMUM_TEXTURE2D_LINEAR_WIDTH": 131072,
    "MAXIMUM_TEXTURE2D_LINEAR_HEIGHT": 65000,
    "MAXIMUM_TEXTURE2D_LINEAR_PITCH": 2097120,
    "MAXIMUM_TEXTURE2D_MIPMAPPED_WIDTH": 32768,
    "MAXIMUM_TEXTURE2D_MIPMAPPED_HEIGHT": 32768,
    "MAXIMUM_TEXTURE1D_MIPMAPPED_WIDTH": 32768,
    "CAN_USE_STREAM_MEM_OPS_V1": 0,
    "CAN_USE_64_BIT_STREAM_MEM_OPS_V1": 0,
    "CAN_USE_STREAM_WAIT_VALUE_NOR_V1": 0,
}

# Attributes that the bindings list and this driver does not know.
UNKNOWN_ATTRIBUTES = (
    "ATOMIC_REDUCTION_SUPPORTED",
    "D3D12_CIG_STREAMS_SUPPORTED",
    "DMA_BUF_MMAP_SUPPORTED",
    "LOGICAL_ENDPOINT_UNICAST_SUPPORTED",
    "LOGICAL_ENDPOINT_MULTICAST_SUPPORTED",
    "LOGICAL_ENDPOINT_COUNTED_OPS_SUPPORTED",
    "LOGICAL_ENDPOINT_UNICAST_ACCESS_ON_OWNER_DEVICE_SUPPORTED",
)


def device_attribute(raw: Any, name: str) -> Any:
    member = getattr(raw.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
    if member is None:
        pytest.skip("these bindings do not name the attribute")
    return member


@pytest.mark.usefixtures("same_architecture")
@pytest.mark.parametrize(("name", "reading"), ATTRIBUTES.items(), ids=ATTRIBUTES)
def test_attribute(raw: Any, name: str, reading: int) -> None:
    assert value(raw.cuDeviceGetAttribute(device_attribute(raw, name), 0)) == reading


@pytest.mark.usefixtures("same_gpu")
@pytest.mark.parametrize(("name", "reading"), BOARD_ATTRIBUTES.items(), ids=BOARD_ATTRIBUTES)
def test_attribute_of_the_board(raw: Any, name: str, reading: int) -> None:
    assert value(raw.cuDeviceGetAttribute(device_attribute(raw, name), 0)) == reading


@pytest.mark.usefixtures("same_architecture")
def test_more_attributes(raw: Any) -> None:
    answers = {name: value(raw.cuDeviceGetAttribute(device_attribute(raw, name), 0)) for name in MORE_ATTRIBUTES}
    assert answers == MORE_ATTRIBUTES


@pytest.mark.usefixtures("same_driver")
@pytest.mark.parametrize("name", UNKNOWN_ATTRIBUTES)
def test_attribute_that_the_driver_does_not_know(raw: Any, name: str) -> None:
    assert said(raw.cuDeviceGetAttribute(device_attribute(raw, name), 0)) == "INVALID_VALUE"


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
    attribute = device_attribute(raw, "MULTICAST_SUPPORTED")
    assert value(raw.cuDeviceGetAttribute(attribute, 0)) == int(count > 1)


@pytest.mark.gpus(2)
def test_multicast_of_two_devices(raw: Any) -> None:
    attribute = device_attribute(raw, "MULTICAST_SUPPORTED")
    assert [value(raw.cuDeviceGetAttribute(attribute, device)) for device in (0, 1)] == [1, 1]


@pytest.mark.usefixtures("same_driver")
def test_driver_version(raw: Any) -> None:
    assert value(raw.cuDriverGetVersion()) == DRIVER_VERSION


def test_device_count(raw: Any) -> None:
    assert value(raw.cuDeviceGetCount()) >= 1


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


@pytest.mark.parametrize("ordinal", [-1, 99])
def test_device_that_is_not_there(raw: Any, ordinal: int) -> None:
    assert said(raw.cuDeviceGet(ordinal)) == "INVALID_DEVICE"


def test_init_takes_no_flags(raw: Any) -> None:
    assert said(raw.cuInit(1)) == "INVALID_VALUE"


def test_init_again(raw: Any) -> None:
    assert said(raw.cuInit(0)) == "SUCCESS"


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
class TestBeforeInit:
    def test_device_count(self, machine: Any) -> None:
        assert said(machine.cuDeviceGetCount()) == "NOT_INITIALIZED"

    def test_driver_version(self, machine: Any) -> None:
        assert value(machine.cuDriverGetVersion()) == 13000

    def test_plain_allocation(self, machine: Any) -> None:
        assert said(machine.cuMemAlloc(1)) == "NOT_INITIALIZED"

    def test_error_name(self, machine: Any) -> None:
        error = machine.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        assert value(machine.cuGetErrorName(error)) == b"CUDA_ERROR_OUT_OF_MEMORY"

    def test_init_with_flags(self, machine: Any) -> None:
        assert said(machine.cuInit(1)) == "INVALID_VALUE"
