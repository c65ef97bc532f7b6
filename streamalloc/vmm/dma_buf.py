"""Device memory for other drivers of this machine: DMA-BUF."""

from __future__ import annotations

import resource

from streamalloc.core.internal import Fd, Memory, check_usable
from streamalloc.driver.internal import cuda
from streamalloc.vmm.allocation_handles import allocations_of

__all__ = ["dma_buf"]

_PAGE = resource.getpagesize()


def dma_buf(memory: Memory, *, pcie: bool = False) -> Fd:
    """A DMA-BUF descriptor for device memory, as RDMA network cards and other drivers take it.

    ``cuMemGetHandleForAddressRange``. The memory stays where it is, and the descriptor does not keep it: close the one
    before the other.

    Parameters
    ----------
    memory
        Memory of ours; it begins and ends at host pages (4 KiB).
    pcie
        Ask for a mapping over PCIe where the device also has another way to the host.

    Raises
    ------
    ValueError
        The memory does not begin or end at a page, or is empty.
    NotSupportedError
        The device has no DMA-BUF (:attr:`Capabilities.dma_buf`), or not this kind of mapping.
    """
    if not isinstance(memory, Memory):
        raise TypeError(f"memory must be Memory, not {type(memory).__name__} ({memory!r})")
    check_usable(memory)
    if not memory.nbytes or memory.address % _PAGE or memory.nbytes % _PAGE:
        raise ValueError(f"{memory!r} does not consist of host pages of {_PAGE} bytes, as a DMA-BUF does")
    flags = int(cuda.CUmemRangeFlags.CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE) if pcie else 0
    kind = cuda.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    for state in allocations_of(memory._session).mapped_at(memory.address, memory.nbytes):
        # Nothing here tells until when.
        state.elsewhere = True
    with memory.stream.device.current():
        return Fd.made_by(memory._session, "cuMemGetHandleForAddressRange", memory.address, memory.nbytes, kind, flags)
