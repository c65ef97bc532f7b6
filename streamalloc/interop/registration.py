"""Check whether communication libraries can register a buffer, from what the driver reports about its addresses."""

from __future__ import annotations

import resource
from dataclasses import dataclass, fields
from typing import Any

from streamalloc.core.errors import CudaError
from streamalloc.core.internal import CopySide, Device, Fd, Memory
from streamalloc.core.properties import MemHandleType
from streamalloc.core.session import Session, session_of
from streamalloc.driver import Driver
from streamalloc.driver import default as default_driver
from streamalloc.driver.internal import cuda
from streamalloc.pool.internal import MemoryKind, pointer_attributes

_PAGE = resource.getpagesize()
_POSIX, _FABRIC = MemHandleType.POSIX_FILE_DESCRIPTOR, MemHandleType.FABRIC


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer for one library; true in a condition if the library can use the memory."""

    accepted: bool
    """True if the library can register or send the memory."""
    how: str
    """Mechanism that the library uses; empty if not accepted."""
    why: str = ""
    """Reason for a refusal or a loss, and a remedy."""

    def __bool__(self) -> bool:
        return self.accepted

    def __str__(self) -> str:
        answer = f"yes, {self.how}" if self.accepted else "no"
        return f"{answer}; {self.why}" if self.why else answer


@dataclass(frozen=True, slots=True)
class Registration:
    """The result of :func:`registration`: one :class:`Answer` for each library. Prints as a table."""

    ipc: Answer
    """Other processes: :func:`streamalloc.ipc.share`."""
    dma_buf: Answer
    """Other drivers of this machine: :func:`streamalloc.vmm.dma_buf`."""
    gpu_direct_storage: Answer
    """cuFile: ``cuFileBufRegister``, without a bounce buffer."""
    nccl: Answer
    """NCCL: ``ncclCommRegister``, ``ncclCommWindowRegister``."""
    ucx: Answer
    """UCX, and nixl on it, to another process of this machine: ``cuda_ipc``."""
    ucx_network: Answer
    """UCX, and nixl on it, over a network card."""
    nvshmem: Answer
    """NVSHMEM: ``nvshmemx_buffer_register_symmetric``."""
    mappings: int
    """Number of mappings that the memory spans; 1 for memory of a pool."""
    handle_types: MemHandleType
    """Handle types of the pool, or of all the mappings."""
    gpu_direct_rdma: bool
    """True if PCIe devices can access it without DMA-BUF (nvidia-peermem)."""
    legacy_ipc: bool
    """True if ``cuIpcGetMemHandle`` gives a handle."""

    def __str__(self) -> str:
        rows = [(field.name, str(getattr(self, field.name))) for field in fields(self)]
        wide = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{wide}}  {text}" for name, text in rows)


@dataclass(frozen=True, slots=True)
class _Attributes:
    """Attributes of a range of addresses, as the driver reports them."""

    kind: MemoryKind
    pool: bool
    mapped: bool
    mappings: int
    handle_types: MemHandleType
    legacy_ipc: bool
    rdma: bool
    dma_buf: Answer


def registration(memory: Any, *, driver: Driver | None = None) -> Registration:
    """Check which communication libraries can register or send memory, and why others cannot.

    No library is called, and nothing stays registered. The driver is queried for the pointer attributes of each mapping
    (``cuPointerGetAttributes``, ``cuMemGetAddressRange``) and for a DMA-BUF of the range
    (``cuMemGetHandleForAddressRange``), which is closed at once.

    Parameters
    ----------
    memory
        A memory object, or any object with ``__cuda_array_interface__``, such as a CuPy array or a PyTorch tensor.
    driver
        The driver to use if ``memory`` is an object of another library.

    Raises
    ------
    TypeError, ValueError
        ``memory`` is no memory, is empty, or has an address that the driver did not allocate.

    Examples
    --------
    >>> if not registration(buffer).nccl:
    ...     print(registration(buffer).nccl.why)
    """
    session = session_of(memory) if isinstance(memory, Memory) else Session.of(driver or default_driver())
    span = CopySide.readable(memory, session)
    if not span.nbytes:
        raise ValueError(f"{memory!r} is empty: there is nothing to register")
    found = _queried(session, span.address, span.nbytes)
    return Registration(
        ipc=_ipc(found),
        dma_buf=found.dma_buf,
        gpu_direct_storage=_storage(found),
        nccl=_nccl(found),
        ucx=_ucx(found),
        ucx_network=_network(found),
        nvshmem=_nvshmem(found),
        mappings=found.mappings,
        handle_types=found.handle_types,
        gpu_direct_rdma=found.rdma,
        legacy_ipc=found.legacy_ipc,
    )


def _queried(session: Session, address: int, nbytes: int) -> _Attributes:
    known = pointer_attributes(address, driver=session.driver)
    if known.kind is MemoryKind.UNKNOWN:
        raise ValueError(f"the driver does not know the address {address:#x}")
    device = known.device or Device(0, driver=session.driver)
    mapped = known.kind is MemoryKind.DEVICE and known.pool is None and not known.legacy_ipc
    types, rdma, count = known.handle_types, known.gpu_direct_rdma, 1
    with device.current():
        if mapped:
            # Attributes may differ between mappings: query each.
            count, at = 0, address
            while at < address + nbytes:
                base, size = (int(value) for value in session.call("cuMemGetAddressRange", at))
                one = pointer_attributes(at, driver=session.driver)
                types, rdma, count, at = types & one.handle_types, rdma and one.gpu_direct_rdma, count + 1, base + size
        dma_buf = _dma_buf(session, address, nbytes)
    return _Attributes(known.kind, known.pool is not None, mapped, count, types, known.legacy_ipc, rdma, dma_buf)


def _dma_buf(session: Session, address: int, nbytes: int) -> Answer:
    """The answer for a DMA-BUF of the pages that contain the memory."""
    start = address // _PAGE * _PAGE
    size = -(-(address + nbytes - start) // _PAGE) * _PAGE
    kind = cuda.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    try:
        Fd.made_by(session, "cuMemGetHandleForAddressRange", start, size, kind, 0).close()
    except (CudaError, NotImplementedError) as error:
        return Answer(False, "", str(error))
    whole = start == address and size == nbytes
    return Answer(True, "DMA-BUF", "" if whole else "of whole pages, as it does not begin and end at pages")


_NO_HANDLES = "it was made without handle types: make it with handle_types=MemHandleType.POSIX_FILE_DESCRIPTOR"


def _texts(types: MemHandleType) -> str:
    return " and ".join(kind.name or "" for kind in (_POSIX, _FABRIC) if types & kind)


def _ipc(found: _Attributes) -> Answer:
    if found.kind is not MemoryKind.DEVICE:
        return Answer(False, "", f"it is {found.kind.value} memory")
    if found.handle_types & (_POSIX | (_FABRIC if found.mapped else _POSIX)):
        return Answer(True, f"{'the pool' if found.pool else 'its mappings'} by {_texts(found.handle_types)}")
    if found.legacy_ipc:
        return Answer(True, "a legacy handle of its whole 2 MiB blocks")
    return Answer(False, "", _NO_HANDLES)


def _storage(found: _Attributes) -> Answer:
    if found.kind is not MemoryKind.DEVICE:
        return Answer(False, "", f"it is {found.kind.value} memory")
    if found.rdma:
        return Answer(True, "GPUDirect RDMA")
    return Answer(False, "", f"the driver reports no GPUDirect RDMA for it{_rdma_hint(found)}")


def _rdma_hint(found: _Attributes) -> str:
    if found.mapped:
        return ": make it with gpu_direct_rdma=True"
    return ", as memory of pools never is: use vmm with gpu_direct_rdma=True" if found.pool else ""


def _network(found: _Attributes) -> Answer:
    if found.dma_buf:
        return Answer(True, "DMA-BUF")
    if found.rdma:
        return Answer(True, "GPUDirect RDMA with the nvidia-peermem module")
    return Answer(False, "", f"no DMA-BUF ({found.dma_buf.why}), and not capable of GPUDirect RDMA{_rdma_hint(found)}")


def _several(found: _Attributes) -> str:
    """The loss if memory spans several mappings, as text; empty if it spans one."""
    if found.mappings == 1:
        return ""
    return (
        f"it lies in {found.mappings} mappings, and cuMemGetAddressRange answers for the first only: register each, or "
        "make it of one chunk"
    )


def _nccl(found: _Attributes) -> Answer:
    if found.kind is not MemoryKind.DEVICE:
        return Answer(False, "", f"it is {found.kind.value} memory")
    if found.mapped and found.handle_types:
        several = _several(found)
        return Answer(not several, f"its mapping by {_texts(found.handle_types)}", several)
    if found.legacy_ipc:
        return Answer(True, "a legacy handle; not for NVLink SHARP, which needs memory mapped by hand")
    network = _network(found)
    what = "a pool's allocation has no handle of its own" if found.pool else _NO_HANDLES
    if network:
        return Answer(True, f"{network.how}, for the network only", f"within the machine it is copied: {what}")
    return Answer(False, "", what)


def _ucx(found: _Attributes) -> Answer:
    if found.kind is not MemoryKind.DEVICE:
        return Answer(False, "", f"it is {found.kind.value} memory")
    if found.legacy_ipc:
        return Answer(True, "a legacy handle")
    if found.handle_types & _FABRIC:
        several = _several(found)
        return Answer(not several, "its fabric handle", several)
    lost = "cuda_ipc takes memory of pools and mapped memory by fabric handles only, and else goes through the host"
    return Answer(False, "", f"{lost}: make it with handle_types=MemHandleType.FABRIC, which needs an IMEX channel")


def _nvshmem(found: _Attributes) -> Answer:
    if not found.mapped:
        return Answer(False, "", "it takes memory that was mapped by hand: use vmm.GrowableBuffer with handle_types")
    if not found.handle_types:
        return Answer(False, "", _NO_HANDLES)
    several = _several(found)
    return Answer(not several, f"its mapping by {_texts(found.handle_types)}", several)
