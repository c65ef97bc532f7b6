"""Capabilities of a device that NVIDIA's documentation tells programs to query before they use the memory APIs.

Each capability is a field of :class:`Capabilities` and a row of the printed table. A new capability that is a device
attribute needs only one new field, which names the attribute.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from streamalloc.core.errors import InvalidValueError
from streamalloc.core.properties import MemHandleType
from streamalloc.core.session import Session
from streamalloc.driver.internal import enum_member, imex_channels
from streamalloc.formats.html import code, table


def _asks(attribute: str, about: str, read: Callable[[int], object] = bool) -> Any:
    """Define a field whose value is the device attribute ``attribute`` after ``read``; None if the attribute is
    unknown.
    """
    return dataclasses.field(metadata={"attribute": f"CU_DEVICE_ATTRIBUTE_{attribute}", "about": about, "read": read})


def _derived(about: str) -> Any:
    """Define a field that is not a device attribute. :func:`query_capabilities` computes its value."""
    return dataclasses.field(metadata={"attribute": None, "about": about})


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities of one device. ``print`` shows them as a table.

    :attr:`Device.supports` returns this object; ``python -m streamalloc info`` prints it.

    Yes-or-no fields are bool; counts and the NUMA node are int. A field other than ``imex_channel`` is None if the
    bindings or the driver do not have its attribute.
    """

    memory_pools: bool | None = _asks("MEMORY_POOLS_SUPPORTED", "stream-ordered pools in device memory")
    pool_handle_types: MemHandleType | None = _asks(
        "MEMPOOL_SUPPORTED_HANDLE_TYPES", "how pools can be shared between processes", MemHandleType
    )
    host_memory_pools: bool | None = _asks("HOST_MEMORY_POOLS_SUPPORTED", "pools in host memory")
    host_numa_memory_pools: bool | None = _asks("HOST_NUMA_MEMORY_POOLS_SUPPORTED", "pools on one host NUMA node")
    managed_memory_pools: bool | None = _derived("pools of managed memory, which all devices must support")
    concurrent_managed_access: bool | None = _asks(
        "CONCURRENT_MANAGED_ACCESS", "managed memory used by host and device at the same time"
    )
    pageable_memory_access: bool | None = _asks("PAGEABLE_MEMORY_ACCESS", "device access to ordinary host memory")
    virtual_memory_management: bool | None = _asks("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "mapping memory by hand")
    host_virtual_memory: bool | None = _asks("HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "mapping host memory by hand")
    host_numa_virtual_memory: bool | None = _asks(
        "HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "mapping memory of one host NUMA node by hand"
    )
    unified_addressing: bool | None = _asks("UNIFIED_ADDRESSING", "one address space for host and devices")
    posix_file_descriptors: bool | None = _asks(
        "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", "sharing memory by file descriptors"
    )
    fabric_handles: bool | None = _asks("HANDLE_TYPE_FABRIC_SUPPORTED", "sharing memory by fabric handles")
    imex_channel: bool = _derived("an IMEX channel this user may open, without which fabric handles fail")
    multicast: bool | None = _asks("MULTICAST_SUPPORTED", "multicast objects over several GPUs")
    ipc_events: bool | None = _asks("IPC_EVENT_SUPPORTED", "events shared between processes")
    compression: bool | None = _asks("GENERIC_COMPRESSION_SUPPORTED", "compressible memory")
    sparse_arrays: bool | None = _asks("SPARSE_CUDA_ARRAY_SUPPORTED", "sparse CUDA arrays")
    hardware_decompression: bool | None = _derived("a decompression engine for pool memory")
    gpu_direct_rdma: bool | None = _asks("GPU_DIRECT_RDMA_SUPPORTED", "access by other PCIe devices")
    gpu_direct_rdma_with_vmm: bool | None = _asks(
        "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED", "GPUDirect RDMA to memory mapped by cuMemMap"
    )
    dma_buf: bool | None = _asks("DMA_BUF_SUPPORTED", "export of address ranges as DMA-BUF")
    stream_memory_operations: bool | None = _asks(
        "CAN_USE_64_BIT_STREAM_MEM_OPS", "streams that wait for values in memory, and write some"
    )
    memory_sync_domains: int | None = _asks("MEM_SYNC_DOMAIN_COUNT", "memory synchronisation domains", int)
    locality_domains: int | None = _asks("LOCALITY_DOMAIN_COUNT", "locality domains of the device's memory", int)
    host_numa_id: int | None = _asks("HOST_NUMA_ID", "the host NUMA node nearest to the device", int)

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield the rows of the table: field name, value as text, description."""
        for item in dataclasses.fields(self):
            yield item.name, _shown(getattr(self, item.name)), item.metadata["about"]

    def __str__(self) -> str:
        rows = list(self.rows())
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        return "\n".join(f"{name:<{widths[0]}}  {answer:<{widths[1]}}  {about}" for name, answer, about in rows)

    def _repr_html_(self) -> str:
        return table(("capability", "", ""), ((code(name), *texts) for name, *texts in self.rows()))


def _shown(value: object) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, MemHandleType):
        return " | ".join(member.name or "" for member in MemHandleType if member and member in value) or "none"
    return str(value)


def _attribute(session: Session, ordinal: int, name: str) -> int | None:
    member = enum_member("CUdevice_attribute", name)
    if member is None:
        return None
    try:
        return int(session.call("cuDeviceGetAttribute", member, ordinal))
    except InvalidValueError:  # The driver is older than the bindings and lacks the attribute.
        return None


def query_capabilities(session: Session, ordinal: int) -> Capabilities:
    """Query every capability of a device (``cuDeviceGetAttribute``). A capability is None if the bindings or the driver
    do not have its attribute. ``imex_channel`` is found by the permissions of the channels' files.
    """
    found: dict[str, Any] = {}
    for item in dataclasses.fields(Capabilities):
        if item.metadata["attribute"] is not None:
            value = _attribute(session, ordinal, item.metadata["attribute"])
            found[item.name] = None if value is None else item.metadata["read"](value)
    algorithms = _attribute(session, ordinal, "CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_ALGORITHM_MASK")
    found["hardware_decompression"] = None if algorithms is None else bool(algorithms)
    found["managed_memory_pools"] = _managed_memory_pools(session)
    found["imex_channel"] = any(os.access(path, os.R_OK | os.W_OK) for path in imex_channels())
    return Capabilities(**found)


def _managed_memory_pools(session: Session) -> bool | None:
    """Return whether pools of managed memory work: the driver must be one for CUDA 13.0 or newer, and every device must
    have concurrent managed access. Return None if the bindings do not define such pools.
    """
    if enum_member("CUmemAllocationType", "CU_MEM_ALLOCATION_TYPE_MANAGED") is None:
        return None
    count = int(session.call("cuDeviceGetCount"))
    asked = "CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS"
    return session.call("cuDriverGetVersion") >= 13000 and all(_attribute(session, i, asked) for i in range(count))
