"""Dataclasses that mirror two structs: ``CUmemAllocationProp``, which has the properties of physical memory, and
``CUarrayMapInfo``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from streamalloc.core.properties import (
    MemAllocationType,
    MemHandleType,
    MemLocation,
    MemLocationType,
    as_int,
    checked_number,
    checked_type,
    refuse_windows,
)
from streamalloc.driver.internal import cuda, handle_types_member, read_handle_types

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, slots=True)
class MemAllocFlags:
    """Flags of physical memory: the field ``allocFlags`` of ``CUmemAllocationProp``.

    :class:`MemAllocationProp` has it as the field ``alloc_flags``.

    Attributes
    ----------
    compression_type
        1 requests compressible memory (``CU_MEM_ALLOCATION_COMP_GENERIC``); 0 does not.
    gpu_direct_rdma_capable
        Whether other PCIe devices may access the memory.
    usage
        1 requests memory for the tiles of sparse arrays (``CU_MEM_CREATE_USAGE_TILE_POOL``), 2 memory that the
        decompression engine can use (``CU_MEM_CREATE_USAGE_HW_DECOMPRESS``).

    Raises
    ------
    TypeError
        ``usage`` is not an integer.
    ValueError
        ``compression_type`` is neither 0 nor 1, or ``usage`` is negative or does not fit 16 bits.
    """

    compression_type: int = 0
    gpu_direct_rdma_capable: bool = False
    usage: int = 0

    def __post_init__(self) -> None:
        if self.compression_type not in (0, 1):
            raise ValueError(f"compression_type={self.compression_type!r}: allowed are 0 (none) and 1 (generic)")
        if not 0 <= checked_number("usage", self.usage) < 1 << 16:
            raise ValueError(f"usage={self.usage:#x}: the field has 16 bits")


@dataclass(frozen=True, slots=True)
class MemAllocationProp:
    """Properties of physical memory (``CUmemAllocationProp``), checked against the rules of ``cuMemCreate``.

    :class:`~streamalloc.vmm.PhysicalMemory` takes it in place of a device.

    Attributes
    ----------
    type
        PINNED. ``cuMemCreate`` creates no other kind of memory.
    requested_handle_types
        Kinds of handles for sharing with other processes.
    location
        DEVICE, DEVICE_LOCALITY_DOMAIN, HOST or HOST_NUMA; by default device 0. Memory on HOST cannot be shared with
        other processes.
    win32_handle_meta_data
        None. The driver's field is for Windows only.
    alloc_flags
        Compression, GPUDirect RDMA and usage.

    Raises
    ------
    TypeError
        A field has the wrong type.
    ValueError
        A field has a value that ``cuMemCreate`` does not allow. The message names the field and the rule.
    """

    type: MemAllocationType = MemAllocationType.PINNED
    requested_handle_types: MemHandleType = MemHandleType.NONE
    location: MemLocation = field(default_factory=lambda: MemLocation.device(0))
    win32_handle_meta_data: None = None
    alloc_flags: MemAllocFlags = field(default_factory=MemAllocFlags)

    def __post_init__(self) -> None:
        checked_type("type", self.type, MemAllocationType)
        checked_type("requested_handle_types", self.requested_handle_types, MemHandleType)
        checked_type("location", self.location, MemLocation)
        refuse_windows("requested_handle_types", self.requested_handle_types)
        if self.type is not MemAllocationType.PINNED:
            raise ValueError(f"type={self.type.name}: cuMemCreate makes PINNED memory only")
        if self.location.type in (MemLocationType.NONE, MemLocationType.HOST_NUMA_CURRENT):
            raise ValueError(f"location={self.location}: allowed are DEVICE, HOST and HOST_NUMA")
        if self.location.type is MemLocationType.HOST and self.requested_handle_types:
            raise ValueError(
                f"requested_handle_types={self.requested_handle_types}: memory on HOST cannot be shared between "
                "processes; use a HOST_NUMA location or MemHandleType.NONE"
            )
        if self.win32_handle_meta_data is not None:
            raise ValueError("win32_handle_meta_data: only None is allowed on Linux")

    def to_driver(self) -> Any:
        """Return a ``CUmemAllocationProp`` with these properties."""
        struct = cuda.CUmemAllocationProp()
        struct.type = cuda.CUmemAllocationType(int(self.type))
        struct.requestedHandleTypes = handle_types_member(int(self.requested_handle_types))
        struct.location = self.location.to_driver()
        struct.allocFlags.compressionType = self.alloc_flags.compression_type
        struct.allocFlags.gpuDirectRDMACapable = int(self.alloc_flags.gpu_direct_rdma_capable)
        struct.allocFlags.usage = self.alloc_flags.usage
        return struct

    @classmethod
    def from_driver(cls, struct: Any) -> Self:
        """Return the properties in ``struct``, a ``CUmemAllocationProp``."""
        flags = struct.allocFlags
        return cls(
            type=MemAllocationType(int(struct.type)),
            requested_handle_types=MemHandleType(read_handle_types(struct)),
            location=MemLocation.from_driver(struct.location),
            alloc_flags=MemAllocFlags(
                as_int(flags.compressionType), bool(as_int(flags.gpuDirectRDMACapable)), int(flags.usage)
            ),
        )


_SPARSE_LEVEL, _MIPTAIL = (
    getattr(cuda.CUarraySparseSubresourceType, f"CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_{name}")
    for name in ("SPARSE_LEVEL", "MIPTAIL")
)


@dataclass(frozen=True, slots=True)
class ArrayMapInfo:
    """One change of the memory that is mapped into a sparse array (``CUarrayMapInfo``), for ``cuMemMapArrayAsync``.

    :class:`~streamalloc.vmm.SparseArray` makes such changes. For your own driver calls, use ``to_driver()``.

    Attributes
    ----------
    resource
        Number of the ``CUarray``, or of the ``CUmipmappedArray`` if ``mipmapped``.
    mipmapped
        Whether ``resource`` is a ``CUmipmappedArray``.
    level, layer
        Level and layer that are changed. The level is ignored with ``mip_tail``.
    offsets, extents
        For a part of a level: its first element and its size in elements, each as a tuple (x, y, z).
    mip_tail
        For a part of the mip tail: its offset and size in bytes. None for a part of a level.
    mem_handle
        Number of the ``CUmemGenericAllocationHandle`` to map; 0 unmaps the part.
    offset
        Offset in the memory of ``mem_handle``, in bytes.
    device_bit_mask
        One bit: 1 shifted left by the ordinal of the stream's device.

    Raises
    ------
    TypeError
        A field that must be an integer is not one.
    ValueError
        A number is negative, ``device_bit_mask`` does not have exactly one bit, or ``level`` is above 0 for an array
        that is not mipmapped.
    """

    resource: int
    mipmapped: bool = False
    level: int = 0
    layer: int = 0
    offsets: tuple[int, int, int] = (0, 0, 0)
    extents: tuple[int, int, int] = (0, 0, 0)
    mip_tail: tuple[int, int] | None = None
    mem_handle: int = 0
    offset: int = 0
    device_bit_mask: int = 1

    def __post_init__(self) -> None:
        for name in ("resource", "level", "layer", "mem_handle", "offset", "device_bit_mask"):
            checked_number(name, getattr(self, name))
        if int(self.device_bit_mask).bit_count() != 1:
            raise ValueError(f"device_bit_mask={self.device_bit_mask:#x}: one device at a time, that of the stream")
        if self.level and not self.mipmapped:
            raise ValueError(f"level={self.level}: an array that is not mipmapped has level 0 only")

    def to_driver(self) -> Any:
        """Return a ``CUarrayMapInfo`` with this change."""
        info = cuda.CUarrayMapInfo()
        if self.mipmapped:
            info.resourceType = cuda.CUresourcetype.CU_RESOURCE_TYPE_MIPMAPPED_ARRAY
            info.resource.mipmap = cuda.CUmipmappedArray(self.resource)
        else:
            info.resourceType = cuda.CUresourcetype.CU_RESOURCE_TYPE_ARRAY
            info.resource.array = cuda.CUarray(self.resource)
        if self.mip_tail is not None:
            info.subresourceType, tail = _MIPTAIL, info.subresource.miptail
            tail.layer, (tail.offset, tail.size) = self.layer, self.mip_tail
        else:
            info.subresourceType, part = _SPARSE_LEVEL, info.subresource.sparseLevel
            part.level, part.layer = self.level, self.layer
            part.offsetX, part.offsetY, part.offsetZ = self.offsets
            part.extentWidth, part.extentHeight, part.extentDepth = self.extents
        info.memHandleType = cuda.CUmemHandleType.CU_MEM_HANDLE_TYPE_GENERIC
        kinds = cuda.CUmemOperationType
        info.memOperationType = kinds.CU_MEM_OPERATION_TYPE_UNMAP
        if self.mem_handle:
            info.memOperationType = kinds.CU_MEM_OPERATION_TYPE_MAP
            info.memHandle.memHandle = cuda.CUmemGenericAllocationHandle(self.mem_handle)
        info.offset, info.deviceBitMask = self.offset, self.device_bit_mask
        return info
