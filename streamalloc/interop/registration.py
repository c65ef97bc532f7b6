"""Check which communication libraries can register a piece of memory, by attributes that the driver reports."""

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
from streamalloc.pool.internal import MemoryKind, PointerAttributes, pointer_attributes

_PAGE = resource.getpagesize()
_POSIX, _FABRIC = MemHandleType.POSIX_FILE_DESCRIPTOR, MemHandleType.FABRIC


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of :func:`registration` for one library. Its truth value is :attr:`accepted`.

    Several fields of :class:`Registration` are answers.
    """

    accepted: bool
    """Whether the library can register or send the memory."""
    how: str
    """Mechanism that the library would use; empty if the library refuses the memory."""
    why: str = ""
    """Reason for a refusal or for a slower mechanism, with the remedy; empty if there is none."""

    def __bool__(self) -> bool:
        return self.accepted

    def __str__(self) -> str:
        answer = f"yes, {self.how}" if self.accepted else "no"
        return f"{answer}; {self.why}" if self.why else answer


@dataclass(frozen=True, slots=True)
class Registration:
    """Result of :func:`registration`: an answer for each library, and the attributes of the memory that decide.
    ``print`` shows a table.
    """

    ipc: Answer
    """Whether other processes can open the memory (:func:`streamalloc.ipc.share`)."""
    dma_buf: Answer
    """Whether other device drivers on this machine can use the memory as a DMA-BUF (:func:`streamalloc.vmm.dma_buf`).
    """
    gpu_direct_storage: Answer
    """Whether cuFile can use the memory without a bounce buffer (``cuFileBufRegister``)."""
    nccl: Answer
    """Whether NCCL can register the memory (``ncclCommRegister``, ``ncclCommWindowRegister``)."""
    ucx: Answer
    """Whether UCX (and nixl, which uses UCX) can send the memory to another process on this machine (``cuda_ipc``)."""
    ucx_network: Answer
    """Whether UCX (and nixl, which uses UCX) can send the memory over a network card."""
    nvshmem: Answer
    """Whether NVSHMEM can register the memory (``nvshmemx_buffer_register_symmetric``)."""
    mappings: int
    """Number of mappings (``cuMemMap``) that the memory spans; 1 for memory that was not mapped."""
    handle_types: MemHandleType
    """Handle types of the memory's pool; for mapped memory, the handle types that all mappings have; otherwise NONE."""
    gpu_direct_rdma: bool
    """Whether PCIe devices can access the memory without DMA-BUF (nvidia-peermem)."""
    legacy_ipc: bool
    """Whether ``cuIpcGetMemHandle`` returns a handle for the memory."""

    def __str__(self) -> str:
        rows = [(field.name, str(getattr(self, field.name))) for field in fields(self)]
        wide = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{wide}}  {text}" for name, text in rows)


def registration(memory: Any, *, driver: Driver | None = None) -> Registration:
    """Return a :class:`Registration`: which communication libraries can register or send memory, and why the other
    libraries cannot.

    No library is called, and nothing is registered. The driver is queried for the pointer attributes of each mapping
    (``cuPointerGetAttribute``, ``cuMemGetAddressRange``) and for a DMA-BUF of the range
    (``cuMemGetHandleForAddressRange``), which is closed at once.

    Parameters
    ----------
    memory
        A memory object, or any object with ``__cuda_array_interface__``, such as a CuPy array or a PyTorch tensor.
    driver
        The driver to use if ``memory`` is an object of another library; default: the default driver of the package.

    Raises
    ------
    TypeError, ValueError
        ``memory`` is of another type, not contiguous or empty, or its address is unknown to the driver.
    ClosedError
        The memory was freed.

    Examples
    --------
    >>> if not registration(buffer).nccl:
    ...     print(registration(buffer).nccl.why)
    """
    session = session_of(memory) if isinstance(memory, Memory) else Session.of(driver or default_driver())
    span = CopySide.of(memory, session)
    if not span.nbytes:
        raise ValueError(f"{memory!r} is empty: there is nothing to register")
    address, nbytes = span.address, span.nbytes
    known = pointer_attributes(address, driver=session.driver)
    if known.kind is MemoryKind.UNKNOWN:
        raise ValueError(f"the driver does not know the address {address:#x}")
    device = known.device or Device(0, driver=session.driver)
    mapped = known.kind is MemoryKind.DEVICE and known.pool is None and not known.legacy_ipc
    types, rdma, count = known.handle_types, known.gpu_direct_rdma, 1
    with device.current():
        if mapped:
            # Two mappings may have different attributes, so the attributes of each mapping are queried.
            count, at = 0, address
            while at < address + nbytes:
                base, size = (int(value) for value in session.call("cuMemGetAddressRange", at))
                one = pointer_attributes(at, driver=session.driver)
                types, rdma, count, at = types & one.handle_types, rdma and one.gpu_direct_rdma, count + 1, base + size
        dma_buf = _dma_buf(session, address, nbytes)
    answers = _answers(known, mapped, types, rdma, count, dma_buf)
    return Registration(
        **answers,
        dma_buf=dma_buf,
        mappings=count,
        handle_types=types,
        gpu_direct_rdma=rdma,
        legacy_ipc=known.legacy_ipc,
    )


def _dma_buf(session: Session, address: int, nbytes: int) -> Answer:
    """Return the answer for a DMA-BUF of the whole pages that contain the memory
    (``cuMemGetHandleForAddressRange``).
    """
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
_NOT_MAPPED = "it takes memory that was mapped by cuMemMap: use vmm.GrowableBuffer with handle_types"
_THROUGH_HOST = (
    "cuda_ipc takes memory of pools and mapped memory by fabric handles only, and else goes through the host: make it "
    "with handle_types=MemHandleType.FABRIC, which needs an IMEX channel"
)
_SEVERAL = (
    "it lies in {} mappings, and cuMemGetAddressRange answers for the first only: register each, or use one chunk"
)


def _answers(
    known: PointerAttributes, mapped: bool, types: MemHandleType, rdma: bool, mappings: int, dma_buf: Answer
) -> dict[str, Answer]:
    """Return the answer for each library, by field name of :class:`Registration`: that of the first rule that applies.

    ``known``: attributes of the first mapping. ``mapped``: whether the memory was mapped by ``cuMemMap``. ``types``,
    ``rdma``: handle types that all mappings have, and whether all have GPUDirect RDMA. ``mappings``: number of
    mappings.
    """
    in_pool, legacy = known.pool is not None, known.legacy_ipc
    names = " and ".join(kind.name or "" for kind in (_POSIX, _FABRIC) if types & kind)
    several = _SEVERAL.format(mappings) if mappings > 1 else ""
    of_mapping = Answer(not several, f"its mapping by {names}", several)
    hint = ", as memory of pools never is: use vmm with gpu_direct_rdma=True" if in_pool else ""
    hint = ": make it with gpu_direct_rdma=True" if mapped else hint
    whose = "the pool" if in_pool else "its mappings"
    here = "a pool's allocation has no handle of its own" if in_pool else _NO_HANDLES
    network = _first(
        (dma_buf, Answer(True, "DMA-BUF")),
        (rdma, Answer(True, "GPUDirect RDMA with the nvidia-peermem module")),
        (True, _refusal(f"no DMA-BUF ({dma_buf.why}), and not capable of GPUDirect RDMA{hint}")),
    )
    in_device_memory = {
        "ipc": _first(
            (types & (_POSIX | _FABRIC if mapped else _POSIX), Answer(True, f"{whose} by {names}")),
            (legacy, Answer(True, "a legacy handle of its whole 2 MiB blocks")),
            (True, _refusal(_NO_HANDLES)),
        ),
        "gpu_direct_storage": _first(
            (rdma, Answer(True, "GPUDirect RDMA")),
            (True, _refusal(f"the driver reports no GPUDirect RDMA for it{hint}")),
        ),
        "nccl": _first(
            (mapped and types, of_mapping),
            (legacy, Answer(True, "a legacy handle; not for NVLink SHARP, which needs memory mapped by cuMemMap")),
            (network, Answer(True, f"{network.how}, for the network only", f"within the machine it is copied: {here}")),
            (True, _refusal(here)),
        ),
        "ucx": _first(
            (legacy, Answer(True, "a legacy handle")),
            (types & _FABRIC, Answer(not several, "its fabric handle", several)),
            (True, _refusal(_THROUGH_HOST)),
        ),
    }
    if known.kind is not MemoryKind.DEVICE:
        in_device_memory = dict.fromkeys(in_device_memory, _refusal(f"it is {known.kind.value} memory"))
    nvshmem = _first((not mapped, _refusal(_NOT_MAPPED)), (not types, _refusal(_NO_HANDLES)), (True, of_mapping))
    return {**in_device_memory, "ucx_network": network, "nvshmem": nvshmem}


def _refusal(why: str) -> Answer:
    return Answer(False, "", why)


def _first(*rules: tuple[object, Answer]) -> Answer:
    """Return the answer of the first rule whose condition holds. A rule is a condition and an answer."""
    return next(answer for applies, answer in rules if applies)
