"""What a device offers of virtual memory, found by trying: attributes say what can be asked for, handles what is given.

Each trial makes one granule and gives it back at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import streamalloc as sa
from streamalloc import vmm
from streamalloc.cli.terminal import Terminal, mib
from streamalloc.core.errors import size_text
from streamalloc.core.properties import MemAllocFlags

__all__ = ["Trial", "show_virtual_memory", "try_virtual_memory"]

# Addresses have 47 bits in a process.
_MOST_ADDRESSES = 1 << 47
_LEAST_ADDRESSES = 2 << 20


class Trial(NamedTuple):
    """One kind of memory, or one thing to do with it."""

    what: str
    granularity: int | None
    """What sizes have to be a multiple of, in bytes; None where that is not the question."""
    recommended: int | None
    """The granularity with the best performance, in bytes."""
    works: bool
    found: str


def try_virtual_memory(device: sa.Device) -> list[Trial]:
    """Try each kind of physical memory, DMA-BUF, and how many addresses there are; nothing where none can be mapped."""
    if not device.supports.virtual_memory_management:
        return []
    location = device.location
    node = max(device.supports.host_numa_id or 0, 0)
    return [
        _memory(device, "device memory", _asking(location), _made),
        _memory(device, "compressible", _asking(location, compression_type=1), _compressible),
        _memory(device, "GPUDirect RDMA", _asking(location, gpu_direct_rdma_capable=True), _for_rdma),
        _memory(device, "host memory", _asking(sa.MemLocation.host()), _node),
        _memory(device, f"host NUMA node {node}", _asking(sa.MemLocation.host_numa(node)), _node),
        _dma_buf(device),
        _addresses(device),
    ]


def _asking(location: sa.MemLocation, **flags: Any) -> sa.MemAllocationProp:
    return sa.MemAllocationProp(location=location, alloc_flags=MemAllocFlags(**flags))


def _memory(
    device: sa.Device, what: str, prop: sa.MemAllocationProp, verify: Callable[[vmm.PhysicalMemory], tuple[bool, str]]
) -> Trial:
    granularity = recommended = None
    try:
        granularity = vmm.PhysicalMemory.granularity(prop, driver=device.driver)
        recommended = vmm.PhysicalMemory.granularity(prop, recommended=True, driver=device.driver)
        with vmm.PhysicalMemory(granularity, prop, driver=device.driver) as memory:
            return Trial(what, granularity, recommended, *verify(memory))
    except sa.CudaError as error:
        return Trial(what, granularity, recommended, False, f"refused: {error.name}")


def _made(memory: vmm.PhysicalMemory) -> tuple[bool, str]:
    return True, "made"


def _compressible(memory: vmm.PhysicalMemory) -> tuple[bool, str]:
    return (True, "made, and its handle says so") if memory.compressible else (False, "made, but not compressible")


def _for_rdma(memory: vmm.PhysicalMemory) -> tuple[bool, str]:
    if memory.query().alloc_flags.gpu_direct_rdma_capable:
        return True, "made, and its handle says so"
    return False, "made, but not for RDMA"


def _node(memory: vmm.PhysicalMemory) -> tuple[bool, str]:
    where = memory.query().location
    on_node = where.type is sa.MemLocationType.HOST_NUMA
    return True, f"made, on NUMA node {where.id}" if on_node else "made"


def _dma_buf(device: sa.Device) -> Trial:
    try:
        granule = vmm.PhysicalMemory.granularity(device)
        with vmm.AddressRange(granule, driver=device.driver) as addresses:
            with vmm.PhysicalMemory(granule, device) as memory:
                mapping = addresses.map(memory, access=device)
            vmm.dma_buf(mapping).close()
            return Trial("DMA-BUF", None, None, True, f"made; {_over_pcie(mapping)}")
    except sa.CudaError as error:
        return Trial("DMA-BUF", None, None, False, f"refused: {error.name}")


def _over_pcie(mapping: vmm.Mapping) -> str:
    try:
        vmm.dma_buf(mapping, pcie=True).close()
    except sa.CudaError as error:
        return f"over PCIe alone refused: {error.name}"
    return "over PCIe alone as well"


def _addresses(device: sa.Device) -> Trial:
    """The largest power of two that can be reserved in one range now."""
    size = _MOST_ADDRESSES
    while size >= _LEAST_ADDRESSES:
        try:
            vmm.AddressRange(size, driver=device.driver).close()
        except sa.CudaError:
            size //= 2
        else:
            return Trial("address range", None, None, True, f"up to {size_text(size)} can be reserved")
    return Trial("address range", None, None, False, "none can be reserved")


def show_virtual_memory(trials: list[Trial], terminal: Terminal) -> None:
    """The table of the trials."""
    terminal.table(
        (
            (
                trial.what,
                "" if trial.granularity is None else mib(trial.granularity),
                "" if trial.recommended is None else mib(trial.recommended),
                trial.found if trial.works else terminal.odd(trial.found),
            )
            for trial in trials
        ),
        header=("virtual memory", "granularity", "recommended", "one granule, tried"),
        align="lrrl",
    )
