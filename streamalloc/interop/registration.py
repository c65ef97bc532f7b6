"""Who will take this memory: what communication libraries need of a buffer, and what the driver says of it."""

from __future__ import annotations

import resource
from dataclasses import dataclass, fields
from typing import Any

from streamalloc.core.internal import CopySide, CudaError, Device, Fd, MemHandleType, Memory, Session, session_of
from streamalloc.driver import Driver
from streamalloc.driver import default as default_driver
from streamalloc.driver.internal import cuda
from streamalloc.pool.internal import MemoryKind, pointer_attributes

__all__ = ["Answer", "Registration", "registration"]

_PAGE = resource.getpagesize()
_POSIX, _FABRIC = MemHandleType.POSIX_FILE_DESCRIPTOR, MemHandleType.FABRIC


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether somebody takes the memory. False in a condition where not."""

    accepted: bool
    """Whether the driver has what is needed."""
    how: str
    """By what, where it is accepted."""
    why: str = ""
    """Why not, or what is lost, and what would help."""

    def __bool__(self) -> bool:
        return self.accepted

    def __str__(self) -> str:
        said = f"yes, {self.how}" if self.accepted else "no"
        return f"{said}; {self.why}" if self.why else said


@dataclass(frozen=True, slots=True)
class Registration:
    """The answer of :func:`registration`; prints as a table. An :class:`Answer` for each who may take the memory."""

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
    """The same over a network card."""
    nvshmem: Answer
    """NVSHMEM: ``nvshmemx_buffer_register_symmetric``."""
    mappings: int
    """How many mappings the memory consists of; 1 for what was not mapped by hand."""
    handle_types: MemHandleType
    """What its pool or its mappings can be exported as; of several mappings what all have."""
    gpu_direct_rdma: bool
    """Whether the driver lets other PCIe devices reach it by the older way, without DMA-BUF."""
    legacy_ipc: bool
    """Whether it has a handle of ``cuIpcGetMemHandle``."""

    def __str__(self) -> str:
        rows = [(field.name, str(getattr(self, field.name))) for field in fields(self)]
        wide = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{wide}}  {said}" for name, said in rows)


@dataclass(frozen=True, slots=True)
class _Said:
    """What the driver says of a range of addresses."""

    kind: MemoryKind
    pool: bool
    mapped: bool
    mappings: int
    handle_types: MemHandleType
    legacy_ipc: bool
    rdma: bool
    dma_buf: Answer


def registration(memory: Any, *, driver: Driver | None = None) -> Registration:
    """Who can register memory or send it, and why not, from what the driver says of its addresses.

    Nothing of the libraries is asked or needed, and nothing stays registered. The driver is asked for the attributes of
    the addresses, for each mapping, and for a DMA-BUF of them, which is closed at once.

    Parameters
    ----------
    memory
        Memory of ours, or an object with ``__cuda_array_interface__``, such as a CuPy array or a PyTorch tensor.
    driver
        The driver to use for what is not ours.

    Raises
    ------
    TypeError, ValueError
        It is no memory, is empty, or unknown to the driver.
    """
    session = session_of(memory) if isinstance(memory, Memory) else Session.of(driver or default_driver())
    span = CopySide.readable(memory, session)
    if not span.nbytes:
        raise ValueError(f"{memory!r} is empty: there is nothing to register")
    said = _asked(session, span.address, span.nbytes)
    return Registration(
        ipc=_ipc(said),
        dma_buf=said.dma_buf,
        gpu_direct_storage=_storage(said),
        nccl=_nccl(said),
        ucx=_ucx(said),
        ucx_network=_network(said),
        nvshmem=_nvshmem(said),
        mappings=said.mappings,
        handle_types=said.handle_types,
        gpu_direct_rdma=said.rdma,
        legacy_ipc=said.legacy_ipc,
    )


def _asked(session: Session, address: int, nbytes: int) -> _Said:
    known = pointer_attributes(address, driver=session.driver)
    if known.kind is MemoryKind.UNKNOWN:
        raise ValueError(f"the driver does not know the address {address:#x}")
    device = known.device or Device(0, driver=session.driver)
    mapped = known.kind is MemoryKind.DEVICE and known.pool is None and not known.legacy_ipc
    types, rdma, count = known.handle_types, known.gpu_direct_rdma, 1
    with device.current():
        if mapped:
            # One answer for each mapping: what asks only once takes the first for the whole.
            count, at = 0, address
            while at < address + nbytes:
                base, size = (int(value) for value in session.call("cuMemGetAddressRange", at))
                one = pointer_attributes(at, driver=session.driver)
                types, rdma, count, at = types & one.handle_types, rdma and one.gpu_direct_rdma, count + 1, base + size
        dma_buf = _dma_buf(session, address, nbytes)
    return _Said(known.kind, known.pool is not None, mapped, count, types, known.legacy_ipc, rdma, dma_buf)


def _dma_buf(session: Session, address: int, nbytes: int) -> Answer:
    """Whether the driver makes a DMA-BUF of the pages that memory lies in."""
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


def _ipc(said: _Said) -> Answer:
    if said.kind is not MemoryKind.DEVICE:
        return Answer(False, "", f"it is {said.kind.value} memory")
    if said.handle_types & (_POSIX | (_FABRIC if said.mapped else _POSIX)):
        return Answer(True, f"{'the pool' if said.pool else 'its mappings'} by {_texts(said.handle_types)}")
    if said.legacy_ipc:
        return Answer(True, "a legacy handle of its whole 2 MiB blocks")
    return Answer(False, "", _NO_HANDLES)


def _storage(said: _Said) -> Answer:
    if said.kind is not MemoryKind.DEVICE:
        return Answer(False, "", f"it is {said.kind.value} memory")
    if said.rdma:
        return Answer(True, "GPUDirect RDMA")
    return Answer(False, "", f"the driver says that it is not capable of GPUDirect RDMA{_rdma_hint(said)}")


def _rdma_hint(said: _Said) -> str:
    if said.mapped:
        return ": make it with gpu_direct_rdma=True"
    return ", as memory of pools never is: use vmm with gpu_direct_rdma=True" if said.pool else ""


def _network(said: _Said) -> Answer:
    if said.dma_buf:
        return Answer(True, "DMA-BUF")
    if said.rdma:
        return Answer(True, "GPUDirect RDMA with the nvidia-peermem module")
    return Answer(False, "", f"no DMA-BUF ({said.dma_buf.why}), and not capable of GPUDirect RDMA{_rdma_hint(said)}")


def _several(said: _Said) -> str:
    """What is lost where memory consists of several mappings."""
    if said.mappings == 1:
        return ""
    return (
        f"it lies in {said.mappings} mappings, and cuMemGetAddressRange answers for the first only: register each, or "
        "make it of one chunk"
    )


def _nccl(said: _Said) -> Answer:
    if said.kind is not MemoryKind.DEVICE:
        return Answer(False, "", f"it is {said.kind.value} memory")
    if said.mapped and said.handle_types:
        several = _several(said)
        return Answer(not several, f"its mapping by {_texts(said.handle_types)}", several)
    if said.legacy_ipc:
        return Answer(True, "a legacy handle; not for NVLink SHARP, which needs memory mapped by hand")
    network = _network(said)
    what = "a pool's allocation has no handle of its own" if said.pool else _NO_HANDLES
    if network:
        return Answer(True, f"{network.how}, for the network only", f"within the machine it is copied: {what}")
    return Answer(False, "", what)


def _ucx(said: _Said) -> Answer:
    if said.kind is not MemoryKind.DEVICE:
        return Answer(False, "", f"it is {said.kind.value} memory")
    if said.legacy_ipc:
        return Answer(True, "a legacy handle")
    if said.handle_types & _FABRIC:
        several = _several(said)
        return Answer(not several, "its fabric handle", several)
    lost = "cuda_ipc takes memory of pools and mapped memory by fabric handles only, and else goes through the host"
    return Answer(False, "", f"{lost}: make it with handle_types=MemHandleType.FABRIC, which needs an IMEX channel")


def _nvshmem(said: _Said) -> Answer:
    if not said.mapped:
        return Answer(False, "", "it takes memory that was mapped by hand: use vmm.GrowableBuffer with handle_types")
    if not said.handle_types:
        return Answer(False, "", _NO_HANDLES)
    several = _several(said)
    return Answer(not several, f"its mapping by {_texts(said.handle_types)}", several)
