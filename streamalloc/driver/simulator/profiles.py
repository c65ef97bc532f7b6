"""What a simulated machine is: its description, and one table for each kind of device, as read from the real one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Profile:
    """A kind of device and the host it sits in."""

    name: str
    total_memory: int
    context_overhead: int
    """Bytes of the device's memory that the driver keeps for itself."""
    host_memory: int
    numa_nodes: int
    driver_version: int
    context_api_version: int
    context_flags: int
    stream_priorities: tuple[int, int]
    """Least and greatest."""
    multicast_granularity: int
    """The recommended one; the smallest is 2 MiB everywhere."""
    attributes: Mapping[str, int] = field(repr=False)
    """Device attributes by enum name without CU_DEVICE_ATTRIBUTE_; what is not here is
    CUDA_ERROR_INVALID_VALUE.
    """
    peer_attributes: Mapping[str, int] = field(repr=False)
    """The same between two devices, by enum name without CU_DEVICE_P2P_ATTRIBUTE_."""


# Read from an H200 with driver 580.159 (CUDA 13.0).
_H200_ATTRIBUTES = {
    "MAX_THREADS_PER_BLOCK": 1024,
    "MAX_BLOCK_DIM_X": 1024,
    "MAX_BLOCK_DIM_Y": 1024,
    "MAX_BLOCK_DIM_Z": 64,
    "MAX_GRID_DIM_X": 2147483647,
    "MAX_GRID_DIM_Y": 65535,
    "MAX_GRID_DIM_Z": 65535,
    "MAX_SHARED_MEMORY_PER_BLOCK": 49152,
    "SHARED_MEMORY_PER_BLOCK": 49152,
    "TOTAL_CONSTANT_MEMORY": 65536,
    "WARP_SIZE": 32,
    "MAX_PITCH": 2147483647,
    "MAX_REGISTERS_PER_BLOCK": 65536,
    "REGISTERS_PER_BLOCK": 65536,
    "CLOCK_RATE": 1980000,
    "TEXTURE_ALIGNMENT": 512,
    "GPU_OVERLAP": 1,
    "MULTIPROCESSOR_COUNT": 132,
    "KERNEL_EXEC_TIMEOUT": 0,
    "INTEGRATED": 0,
    "CAN_MAP_HOST_MEMORY": 1,
    "COMPUTE_MODE": 0,
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
    "SURFACE_ALIGNMENT": 512,
    "CONCURRENT_KERNELS": 1,
    "ECC_ENABLED": 1,
    "PCI_BUS_ID": 0,
    "PCI_DEVICE_ID": 6,
    "TCC_DRIVER": 0,
    "MEMORY_CLOCK_RATE": 3201000,
    "GLOBAL_MEMORY_BUS_WIDTH": 6016,
    "L2_CACHE_SIZE": 62914560,
    "MAX_THREADS_PER_MULTIPROCESSOR": 2048,
    "ASYNC_ENGINE_COUNT": 3,
    "UNIFIED_ADDRESSING": 1,
    "MAXIMUM_TEXTURE1D_LAYERED_WIDTH": 32768,
    "MAXIMUM_TEXTURE1D_LAYERED_LAYERS": 2048,
    "CAN_TEX2D_GATHER": 1,
    "MAXIMUM_TEXTURE2D_GATHER_WIDTH": 32768,
    "MAXIMUM_TEXTURE2D_GATHER_HEIGHT": 32768,
    "MAXIMUM_TEXTURE3D_WIDTH_ALTERNATE": 8192,
    "MAXIMUM_TEXTURE3D_HEIGHT_ALTERNATE": 8192,
    "MAXIMUM_TEXTURE3D_DEPTH_ALTERNATE": 32768,
    "PCI_DOMAIN_ID": 0,
    "TEXTURE_PITCH_ALIGNMENT": 32,
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
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MAXIMUM_TEXTURE1D_MIPMAPPED_WIDTH": 32768,
    "STREAM_PRIORITIES_SUPPORTED": 1,
    "GLOBAL_L1_CACHE_SUPPORTED": 1,
    "LOCAL_L1_CACHE_SUPPORTED": 1,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 233472,
    "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
    "MANAGED_MEMORY": 1,
    "MULTI_GPU_BOARD": 0,
    "MULTI_GPU_BOARD_GROUP_ID": 0,
    "HOST_NATIVE_ATOMIC_SUPPORTED": 0,
    "SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO": 2,
    "PAGEABLE_MEMORY_ACCESS": 0,
    "CONCURRENT_MANAGED_ACCESS": 1,
    "COMPUTE_PREEMPTION_SUPPORTED": 1,
    "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": 1,
    "CAN_USE_STREAM_MEM_OPS_V1": 0,
    "CAN_USE_64_BIT_STREAM_MEM_OPS_V1": 0,
    "CAN_USE_STREAM_WAIT_VALUE_NOR_V1": 0,
    "COOPERATIVE_LAUNCH": 1,
    "COOPERATIVE_MULTI_DEVICE_LAUNCH": 1,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
    "CAN_FLUSH_REMOTE_WRITES": 0,
    "HOST_REGISTER_SUPPORTED": 1,
    "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES": 0,
    "DIRECT_MANAGED_MEM_ACCESS_FROM_HOST": 0,
    "VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED": 1,
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 1,
    "HANDLE_TYPE_WIN32_HANDLE_SUPPORTED": 0,
    "HANDLE_TYPE_WIN32_KMT_HANDLE_SUPPORTED": 0,
    "MAX_BLOCKS_PER_MULTIPROCESSOR": 32,
    "GENERIC_COMPRESSION_SUPPORTED": 1,
    "MAX_PERSISTING_L2_CACHE_SIZE": 39321600,
    "MAX_ACCESS_POLICY_WINDOW_SIZE": 134217728,
    "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED": 1,
    "RESERVED_SHARED_MEMORY_PER_BLOCK": 1024,
    "SPARSE_CUDA_ARRAY_SUPPORTED": 1,
    "READ_ONLY_HOST_REGISTER_SUPPORTED": 1,
    "TIMELINE_SEMAPHORE_INTEROP_SUPPORTED": 1,
    "MEMORY_POOLS_SUPPORTED": 1,
    "GPU_DIRECT_RDMA_SUPPORTED": 1,
    "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS": 1,
    "GPU_DIRECT_RDMA_WRITES_ORDERING": 100,
    "MEMPOOL_SUPPORTED_HANDLE_TYPES": 9,
    "CLUSTER_LAUNCH": 1,
    "DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED": 1,
    "CAN_USE_64_BIT_STREAM_MEM_OPS": 1,
    "CAN_USE_STREAM_WAIT_VALUE_NOR": 1,
    "DMA_BUF_SUPPORTED": 1,
    "IPC_EVENT_SUPPORTED": 1,
    "MEM_SYNC_DOMAIN_COUNT": 4,
    "TENSOR_MAP_ACCESS_SUPPORTED": 1,
    "HANDLE_TYPE_FABRIC_SUPPORTED": 1,
    "UNIFIED_FUNCTION_POINTERS": 1,
    "NUMA_CONFIG": 0,
    "NUMA_ID": -1,
    "MULTICAST_SUPPORTED": 1,
    "MPS_ENABLED": 0,
    "HOST_NUMA_ID": 0,
    "D3D12_CIG_SUPPORTED": 0,
    "MEM_DECOMPRESS_ALGORITHM_MASK": 0,
    "MEM_DECOMPRESS_MAXIMUM_LENGTH": 0,
    "VULKAN_CIG_SUPPORTED": 0,
    "GPU_PCI_DEVICE_ID": 590680286,
    "GPU_PCI_SUBSYSTEM_ID": 415174878,
    "HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
    "HOST_NUMA_MEMORY_POOLS_SUPPORTED": 1,
    "HOST_NUMA_MULTINODE_IPC_SUPPORTED": 0,
    "HOST_MEMORY_POOLS_SUPPORTED": 1,
    "HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
    "HOST_ALLOC_DMA_BUF_SUPPORTED": 0,
    "ONLY_PARTIAL_HOST_NATIVE_ATOMIC_SUPPORTED": 0,
}

H200 = Profile(
    name="NVIDIA H200",
    total_memory=150109880320,
    context_overhead=150109880320 - 149557477376,
    host_memory=256 << 30,
    numa_nodes=1,
    driver_version=13000,
    context_api_version=3020,
    context_flags=8,
    stream_priorities=(0, -5),
    # Not read from hardware: what users were told by H100s (microsoft/mscclpp, DefaultNvlsBufferSize), and the page
    # size in NVIDIA's kernel module. That 2 MiB will do is known from NCCL, which binds as little (NVIDIA/nccl#2077).
    multicast_granularity=512 << 20,
    attributes=_H200_ATTRIBUTES,
    peer_attributes={
        "PERFORMANCE_RANK": 0,
        "ACCESS_SUPPORTED": 1,
        "NATIVE_ATOMIC_SUPPORTED": 1,
        "ACCESS_ACCESS_SUPPORTED": 1,
        "CUDA_ARRAY_ACCESS_SUPPORTED": 1,
        "ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED": 0,
    },
)

PROFILES: Mapping[str, Profile] = {"h200": H200}


@dataclass(frozen=True)
class MachineSpec:
    """What describes a machine: the arguments of :func:`streamalloc.driver.simulated`, which says what they are."""

    devices: int = 1
    memory: int | None = None
    profile_name: str = "h200"
    multicast: bool | None = None
    fabric: bool | None = None
    seed: int | None = None
    name: str | None = None
    multicast_slots: int = 128
    patience: float = 10.0

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ValueError(f"devices must be at least 1, got {self.devices}")
        if self.profile_name not in PROFILES:
            raise ValueError(f"profile must be one of {sorted(PROFILES)}, got {self.profile_name!r}")
        if self.memory is not None and self.memory < 1:
            raise ValueError(f"memory must be at least 1 byte, got {self.memory}")

    @property
    def profile(self) -> Profile:
        return PROFILES[self.profile_name]

    @property
    def has_multicast(self) -> bool:
        """By default as on hardware, where it needs two devices."""
        return self.devices > 1 if self.multicast is None else self.multicast

    @property
    def identity(self) -> str:
        """Machines of the same name, or made by the same arguments where they have none, are the same one."""
        named = self.name or os.environ.get("STREAMALLOC_MACHINE")
        return named or (
            f"{self.profile_name} x{self.devices} memory={self.memory} multicast={self.multicast} fabric={self.fabric}"
        )
