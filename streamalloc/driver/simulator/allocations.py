"""Live ranges of memory: one small class for each kind."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from .advice import Pages
from .blocks import Block
from .contexts import Context
from .graph_memory import GraphMemory
from .memory import AddressMap, Reservation, is_accessible
from .physical import Mapping
from .pool import ImportedPool, Pool

_numbers = itertools.count(1)


class _Defaults:
    """Attributes that most allocations never set, so that making an allocation costs less."""

    pool: Pool | ImportedPool | None = None
    mapping: Mapping | None = None
    pages: Pages | None = None
    """Advice for managed memory, once there is any."""
    waits: bool = False
    """SYNC_MEMOPS was set."""


@dataclass(eq=False)
class Allocation(_Defaults):
    """A live range of memory. ``device`` is None for host memory."""

    base: int
    size: int
    device: int | None
    context: Context | None
    id: int = field(init=False, default_factory=_numbers.__next__)
    """Number of the allocation, unique in the process."""

    @property
    def managed(self) -> bool:
        """Whether host and devices use it at one address; the driver counts it as device memory."""
        return self.pool is not None and self.pool.managed

    @property
    def on_host(self) -> bool:
        return self.device is None and not self.managed

    @property
    def known(self) -> bool:
        """Whether the driver recognises the address. It recognises host pool memory only if a device has access."""
        return self.pool is None or self.pool.device is not None or self.pool.granted


@dataclass(eq=False)
class DeviceMemory(Allocation):
    """Device memory of cuMemAlloc."""

    block: Block


@dataclass(eq=False)
class ManagedMemory(Allocation):
    """Memory of cuMemAllocManaged, at the beginning of a reservation."""

    reservation: Reservation
    managed = True


@dataclass(eq=False)
class HostMemory(Allocation):
    """Pinned host memory; ``block`` is None where it was registered and is the user's."""

    block: Block | None
    flags: int


@dataclass(eq=False)
class PoolMemory(Allocation):
    """Memory of a pool of this process, or imported from a pool of another process."""

    pool: Pool | ImportedPool = field()
    block: Block


@dataclass(eq=False)
class GraphAllocation(Allocation):
    """An allocation of a graph launch that outlives the launch."""

    memory: GraphMemory


@dataclass(eq=False)
class MappedMemory(Allocation):
    """A range mapped by cuMemMap."""

    mapping: Mapping = field()


@dataclass(eq=False)
class OpenedMemory(Allocation):
    """Another process's plain memory. ``device`` is that of the context which has opened it and may use it: opening it
    enables peer access (NVIDIA's page on cuIpcOpenMemHandle).
    """

    owner: int
    """Device that has the memory."""


def is_gone(allocation: Allocation, address: int, size: int) -> bool:
    """Whether the host has unmapped registered memory, or a part that is in a range."""
    registered = isinstance(allocation, HostMemory) and allocation.block is None
    return registered and not is_accessible(address, size)


def is_reachable(allocation: Allocation, context: Context) -> bool:
    """Whether work in ``context`` may touch the memory directly: its own, the host's, a peer's that was
    enabled.
    """
    ordinal = context.device.ordinal
    if allocation.pool is not None:
        return allocation.pool.accessible(ordinal)
    peer = allocation.context is not None and allocation.context.handle in context.peers
    return allocation.device in (None, ordinal) or peer or allocation.managed


class Allocations(AddressMap[Allocation]):
    """The allocations of a machine by their addresses."""

    def forget_registered(self, start: int, end: int) -> None:
        """Remove registrations of host memory that the program unmapped, because the range has another use now."""
        for allocation in self.overlapping(start, end):
            if isinstance(allocation, HostMemory) and allocation.block is None:
                self.remove(allocation)

    def is_live(self, allocation: Allocation) -> bool:
        return self.at.get(allocation.base) is allocation
