"""DMA-BUF descriptors of device memory, for other drivers of the machine."""

from __future__ import annotations

import resource

from streamalloc.core.internal import Fd, Memory, check_usable
from streamalloc.core.session import session_of
from streamalloc.driver.internal import cuda

_PAGE = resource.getpagesize()


def dma_buf(memory: Memory, *, pcie: bool = False) -> Fd:
    """Create a DMA-BUF descriptor for device memory, for example for an RDMA network card.

    Calls ``cuMemGetHandleForAddressRange``. The descriptor does not keep the memory: close it before the memory. ::

        with vmm.dma_buf(buffer) as fd:
            register(fd.fileno(), buffer.nbytes)

    Parameters
    ----------
    memory
        Memory of this package that begins and ends at host pages (4 KiB).
    pcie
        If true, request a mapping over PCIe even if the device has another link to the host.

    Raises
    ------
    ValueError
        The memory is empty, or does not begin and end at a page.
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
    session = session_of(memory)
    with memory.stream.device.current():
        return Fd.made_by(session, "cuMemGetHandleForAddressRange", memory.address, memory.nbytes, kind, flags)
