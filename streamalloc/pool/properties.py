"""The properties of pools: a dataclass that mirrors ``CUmemPoolProps``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from streamalloc.core.errors import size_text, unsupported
from streamalloc.core.properties import (
    MemAllocationType,
    MemHandleType,
    MemLocation,
    MemLocationType,
    as_int,
    bindings_member,
    checked_number,
    checked_type,
    refuse_windows,
)
from streamalloc.driver.internal import BINDINGS_VERSION, cuda, handle_types_member, read_handle_types

if TYPE_CHECKING:
    from typing_extensions import Self

# Field of CUmemPoolProps in bindings 13.4 and newer.
_RDMA = "gpuDirectRDMACapable"

# The driver reserves addresses (48 bits) for a pool's maximum size. With sizes near 2**64, cuMemPoolCreate of driver
# 580 never returns.
_LARGEST_POOL = 1 << 48


@dataclass(frozen=True, slots=True)
class MemPoolProps:
    """Properties of a pool (``CUmemPoolProps``), checked against the rules of ``cuMemPoolCreate``: an argument of
    :class:`MemoryPool`, and the value of :attr:`MemoryPool.properties`.

    Attributes
    ----------
    alloc_type
        Pinned memory (the default), or managed memory.
    handle_types
        Kinds of handles for sharing the pool with other processes.
    location
        The location of the memory; for managed memory, the preferred location.
    win32_security_attributes
        None. The driver's field is for Windows only.
    max_size
        The most bytes that the pool may reserve; 0 for the system's limit. The driver rounds the number up to its
        growth step.
    usage
        ``CU_MEM_POOL_CREATE_USAGE_*`` bits, such as 2 for memory that the decompression engine may use.
    gpu_direct_rdma_capable
        Whether other PCIe devices may access the memory. Needs bindings 13.4 or newer.

    Raises
    ------
    TypeError, ValueError
        A field has the wrong type or breaks a documented rule. The message names the field and the rule.
    """

    alloc_type: MemAllocationType = MemAllocationType.PINNED
    handle_types: MemHandleType = MemHandleType.NONE
    location: MemLocation = field(default_factory=MemLocation)
    win32_security_attributes: None = None
    max_size: int = 0
    usage: int = 0
    gpu_direct_rdma_capable: bool = False

    def __post_init__(self) -> None:
        checked_type("alloc_type", self.alloc_type, MemAllocationType)
        checked_type("handle_types", self.handle_types, MemHandleType)
        checked_type("location", self.location, MemLocation)
        checked_number("max_size", self.max_size, _LARGEST_POOL)
        if not 0 <= checked_number("usage", self.usage) < 1 << 16:
            raise ValueError(f"usage={self.usage:#x}: the field has 16 bits")
        refuse_windows("handle_types", self.handle_types)
        managed, where, shared = self.alloc_type is MemAllocationType.MANAGED, self.location.type, self.handle_types
        windows: object = self.win32_security_attributes
        rules: tuple[tuple[object, str], ...] = (
            (self.alloc_type is MemAllocationType.INVALID, "alloc_type=INVALID: allowed are PINNED and MANAGED"),
            (
                where is MemLocationType.HOST_NUMA_CURRENT,
                "location=HOST_NUMA_CURRENT: a pool must name its NUMA node (HOST_NUMA) or take any (HOST)",
            ),
            (
                where is MemLocationType.NONE and not managed,
                "location=NONE: only managed pools may have no preferred location",
            ),
            (shared and managed, f"handle_types={shared}: managed pools cannot be shared between processes"),
            (
                shared and where is MemLocationType.HOST,
                f"handle_types={shared}: pools on HOST cannot be shared; use HOST_NUMA, or no handle types",
            ),
            (managed and self.max_size, f"max_size={size_text(self.max_size)}: a managed pool's must be 0"),
            (managed and self.usage, f"usage={self.usage:#x}: a managed pool's must be 0"),
            (windows is not None, "win32_security_attributes: only None is allowed on Linux"),
        )
        for broken, text in rules:
            if broken:
                raise ValueError(text)

    def to_driver(self) -> Any:
        """Return a ``CUmemPoolProps`` with these properties. Raises NotSupportedError if the bindings do not have one
        of the properties.
        """
        struct = cuda.CUmemPoolProps()
        struct.allocType = bindings_member("CUmemAllocationType", f"CU_MEM_ALLOCATION_TYPE_{self.alloc_type.name}")
        struct.handleTypes = handle_types_member(int(self.handle_types))
        struct.location = self.location.to_driver()
        struct.maxSize = self.max_size
        struct.usage = self.usage
        if self.gpu_direct_rdma_capable:
            if not hasattr(struct, _RDMA):
                raise unsupported(f"CUmemPoolProps.{_RDMA}", "cuda-bindings 13.4", f"cuda-bindings {BINDINGS_VERSION}")
            setattr(struct, _RDMA, 1)
        return struct

    @classmethod
    def from_driver(cls, struct: Any) -> Self:
        """Return the properties in ``struct``, a ``CUmemPoolProps``. Raises ValueError if they break a rule of
        ``cuMemPoolCreate``.
        """
        return cls(
            alloc_type=MemAllocationType(int(struct.allocType)),
            handle_types=MemHandleType(read_handle_types(struct)),
            location=MemLocation.from_driver(struct.location),
            max_size=int(struct.maxSize),
            usage=int(struct.usage),
            gpu_direct_rdma_capable=bool(as_int(getattr(struct, _RDMA, 0))),
        )
