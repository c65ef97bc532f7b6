"""Attributes that the driver reports for an address: kind, range, device and pool of the memory, and ways to share
it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamalloc.core.internal import Device, session_for
from streamalloc.core.properties import MemAllocationType, MemHandleType, checked_type
from streamalloc.core.session import Session
from streamalloc.driver.internal import cuda
from streamalloc.pool.places import Address, location_of_pool
from streamalloc.pool.pool import MemoryPool

if TYPE_CHECKING:
    from streamalloc.driver import Driver


class MemoryKind(enum.Enum):
    """Kind of the memory at an address.

    :class:`PointerAttributes` has it as the field ``kind``.
    """

    UNKNOWN = "unknown"
    """Memory that the driver does not know: pageable host memory, freed memory, or an address without memory."""
    DEVICE = "device"
    HOST = "host"
    MANAGED = "managed"


@dataclass(frozen=True, slots=True)
class PointerAttributes:
    """Attributes of the memory at an address. :func:`pointer_attributes` returns them.

    Attributes
    ----------
    address
        The queried address.
    kind
        Kind of the memory: device, host, managed, or unknown to the driver.
    device
        The device of the memory, or of the context that pinned the host memory; None if not known.
    base, nbytes
        Start address of the allocation, and its size in bytes; 0 if not known.
    pool
        The pool that the memory was allocated from, or None.
    device_address, host_address
        The addresses of the memory for the device and for the host; None if the memory is not accessible there.
    handle_types
        Kinds of operating-system handles with which the allocation or its pool can be exported.
    legacy_ipc
        Whether ``cuIpcGetMemHandle`` can share the memory.
    gpu_direct_rdma
        Whether other PCIe devices can access the memory (GPUDirect RDMA).
    """

    address: int
    kind: MemoryKind
    device: Device | None = None
    base: int = 0
    nbytes: int = 0
    pool: MemoryPool | None = None
    device_address: int | None = None
    host_address: int | None = None
    handle_types: MemHandleType = MemHandleType.NONE
    legacy_ipc: bool = False
    gpu_direct_rdma: bool = False

    @property
    def shareable(self) -> bool:
        """Whether the memory can be shared with another process, by a handle type or by ``cuIpcGetMemHandle``."""
        return self.legacy_ipc or bool(self.handle_types)


def pointer_attributes(address: int, *, driver: Driver | None = None) -> PointerAttributes:
    """Return the attributes of an address (``cuPointerGetAttribute``). ``driver`` is the driver to query (default:
    :func:`streamalloc.driver.default`).

    An address that the driver does not know gives :attr:`MemoryKind.UNKNOWN`, not an error. For freed memory no result
    is documented; drivers up to 580 report it as unknown.

    Raises
    ------
    TypeError, ValueError
        ``address`` is not an integer, or does not fit 64 bits.

    Examples
    --------
    >>> found = sa.pointer_attributes(buffer.address)
    >>> found.kind is sa.MemoryKind.DEVICE and found.base == buffer.address
    True
    """
    address = checked_type("address", address, int)
    if not 0 <= address < 1 << 64:
        raise ValueError(f"address={address:#x} is out of range: addresses have 64 bits")
    session = session_for(None, driver)
    ask = Address(session, address)
    kind = _KINDS.get(ask.integer("MEMORY_TYPE"), MemoryKind.UNKNOWN)
    if kind is MemoryKind.UNKNOWN:
        return PointerAttributes(address, kind)
    if ask.integer("IS_MANAGED"):
        kind = MemoryKind.MANAGED
    pool = _pool_at(session, ask, kind)
    device = _device_at(session, ask, pool)
    handle_types = MemHandleType(ask.integer("ALLOWED_HANDLE_TYPES"))
    if pool is not None and pool.properties is not None:
        handle_types |= pool.properties.handle_types
    # The query of the device address needs a current context, of any device.
    with (device or Device(0, driver=session.driver)).current():
        device_address = ask.integer("DEVICE_POINTER")
    return PointerAttributes(
        address=address,
        kind=kind,
        device=device,
        # None for host memory of a pool without access of a device: the driver then reports a size, but no start
        # address.
        base=ask.integer("RANGE_START_ADDR"),
        nbytes=ask.integer("RANGE_SIZE"),
        pool=pool,
        device_address=device_address or None,
        host_address=ask.integer("HOST_POINTER") or None,
        handle_types=handle_types,
        legacy_ipc=bool(ask.integer("IS_LEGACY_CUDA_IPC_CAPABLE")),
        gpu_direct_rdma=bool(ask.integer("IS_GPU_DIRECT_RDMA_CAPABLE")),
    )


_KINDS = {
    int(cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE): MemoryKind.DEVICE,
    int(cuda.CUmemorytype.CU_MEMORYTYPE_HOST): MemoryKind.HOST,
    int(cuda.CUmemorytype.CU_MEMORYTYPE_UNIFIED): MemoryKind.DEVICE,
}


def _pool_at(session: Session, ask: Address, kind: MemoryKind) -> MemoryPool | None:
    raw = ask.value("MEMPOOL_HANDLE")
    if not int(raw):
        return None
    known = MemoryPool._known(session, raw)
    if known is not None:
        return known
    allocation_type = MemAllocationType.MANAGED if kind is MemoryKind.MANAGED else MemAllocationType.PINNED
    location = location_of_pool(session, raw, kind is MemoryKind.HOST, allocation_type)
    return None if location is None else MemoryPool._of_handle(session, raw, location, allocation_type)


def _device_at(session: Session, ask: Address, pool: MemoryPool | None) -> Device | None:
    """Return the device of the memory at an address; None for host memory of a pool and for memory without a context.

    The device is that of the memory's pool or context. ``CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`` is not used, because
    bindings 13.3 return 0 for every device.
    """
    if pool is not None:
        return None if pool.location.on_host else Device(pool.location.id, driver=session.driver)
    context = ask.value("CONTEXT")
    return Device(session.device_of(context), driver=session.driver) if int(context) else None
