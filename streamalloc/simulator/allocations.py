"""Live allocations, registrations and mappings, with a class for each kind of memory; advice on the pages of managed
memory.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from streamalloc.formats.ranges import Extent, RangeMap, Runs
from streamalloc.simulator.allocator import Block
from streamalloc.simulator.banks import Banks
from streamalloc.simulator.constants import Place, round_up
from streamalloc.simulator.contexts import Context
from streamalloc.simulator.graph_memory import GraphHeap
from streamalloc.simulator.memory import FREED, ReservedExtent, is_accessible
from streamalloc.simulator.physical import MappedExtent
from streamalloc.simulator.pool import OpenedPool, Pool

PAGE = 4096
"""Size of a page in bytes. Ranges of advice and prefetches are rounded to whole pages."""


@dataclass(frozen=True)
class Advice:
    """Advice on one page of managed memory, as ``cuMemAdvise`` and prefetches have set it."""

    read_mostly: bool = False
    preferred: Place | None = None
    accessed_by: frozenset[Place] = frozenset()
    prefetched: Place | None = None
    """Location to which the last prefetch moved the page; None before any prefetch."""


_numbers = itertools.count(1)


class _Defaults(Extent):
    """Attributes that few allocations set. Their defaults are attributes of the class, so that making an allocation
    takes no time for them.
    """

    pool: Pool | OpenedPool | None = None
    mapping: MappedExtent | None = None
    """The mapping by ``cuMemMap`` that this range is; None for all other memory."""
    pages: Runs[Advice] | None = None
    """Advice on the pages of managed memory; None until a call sets or queries advice."""
    waits: bool = False
    """Value of the pointer attribute ``SYNC_MEMOPS`` (``cuPointerSetAttribute``). It has no effect here, but can be
    queried.
    """


@dataclass(eq=False)
class LiveMemory(_Defaults):
    """One live allocation, registration or mapping: ``size`` bytes at address ``base``.

    ``device``: ordinal of its device; None for host memory, -1 for a mapping of a multicast object, :data:`.HIDDEN` for
    a device that this process does not see. ``context``: None for mappings, and for memory imported from a pool.
    """

    base: int
    size: int
    device: int | None
    context: Context | None
    id: int = field(init=False, default_factory=_numbers.__next__)
    """Number of the allocation, unique in the process (CU_POINTER_ATTRIBUTE_BUFFER_ID)."""

    @property
    def managed(self) -> bool:
        """Whether this is managed memory, which host and devices use at the same address.

        The driver counts it as device memory.
        """
        return self.pool is not None and self.pool.managed

    @property
    def on_host(self) -> bool:
        return self.device is None and not self.managed

    @property
    def known(self) -> bool:
        """Whether the driver finds the allocation by an address. It finds memory of a host pool only if a device has
        access.
        """
        return self.pool is None or self.pool.device is not None or self.pool.granted


@dataclass(eq=False)
class DeviceMemory(LiveMemory):
    """Device memory of ``cuMemAlloc``. ``block``: its piece of the heap (:class:`.banks.Heap`)."""

    block: Block


@dataclass(eq=False)
class ManagedMemory(LiveMemory):
    """Memory of ``cuMemAllocManaged``, modelled after the driver API's documentation without readings from hardware.
    Each allocation has its own reservation, and begins at the reservation's start.

    Its bytes are at one address for the host and all devices. The residence of pages is not simulated: no bank counts
    the memory, so ``cuMemGetInfo`` never includes it. Advice and prefetches are recorded for each page.
    """

    reservation: ReservedExtent
    managed = True


@dataclass(eq=False)
class HostMemory(LiveMemory):
    """Pinned host memory. ``block``: its piece of the heap (:class:`.banks.Heap`); None for registered memory of the
    program. ``flags``: the flags that ``cuMemHostGetFlags`` returns.
    """

    block: Block | None
    flags: int


@dataclass(eq=False)
class PoolMemory(LiveMemory):
    """Allocation in a pool of this process or in an imported pool. ``block``: the bytes of the pool that the allocation
    occupies.
    """

    pool: Pool | OpenedPool = field()
    block: Block


@dataclass(eq=False)
class GraphAllocation(LiveMemory):
    """Allocation that is still live after the launch of a graph, because the graph does not free it. ``memory``: the
    graph's heap with the allocation's address.
    """

    memory: GraphHeap


@dataclass(eq=False)
class OpenedMemory(LiveMemory):
    """Memory of ``cuMemAlloc`` in another process, opened by ``cuIpcOpenMemHandle``.

    ``device``: the device of the context that opened the memory and may use it. Opening enables peer access to the
    memory's device (NVIDIA's page on cuIpcOpenMemHandle).
    """

    block: ReservedExtent
    """The mapped blocks that contain the memory: the driver maps whole blocks, in which other opened memory may lie
    too.
    """
    words: tuple[int, ...]
    """The integers in the IPC handle. Handles with the same integers name the same memory."""
    times: int = 1
    """Number of opens of the memory minus the number of closes. At 0 the memory is unmapped."""


def is_gone(allocation: LiveMemory, address: int, size: int) -> bool:
    """Whether the program has unmapped a part of the ``size`` bytes at ``address`` since it registered them.
    ``allocation``: the allocation that contains them; False unless it is registered host memory.
    """
    registered = isinstance(allocation, HostMemory) and allocation.block is None
    return registered and not is_accessible(address, size)


def is_reachable(allocation: LiveMemory, context: Context) -> bool:
    """Whether work in ``context`` may use the memory without staging by the driver. Not for mappings, which have access
    rights of their own.

    For memory of a pool: whether the device of ``context`` may use the pool (:meth:`.Accessible.usable`). True for
    other memory if it is managed memory, or if it belongs to the device of ``context``, to the host, or to a context to
    which peer access was enabled.
    """
    ordinal = context.device.ordinal
    if allocation.pool is not None:
        return allocation.pool.usable(ordinal)
    peer = allocation.context is not None and allocation.context.handle in context.peers
    return allocation.device in (None, ordinal) or peer or allocation.managed


class AllocationTable(RangeMap[LiveMemory]):
    """Table of the live allocations, registrations and mappings of a machine, by address."""

    def forget_registered(self, start: int, end: int) -> None:
        """Remove registrations of host memory that overlap the addresses from ``start`` up to ``end`` (exclusive).

        This is called for each new reservation. Its addresses are free only if the program has unmapped the registered
        memory there.
        """
        for allocation in self.overlapping(start, end):
            if isinstance(allocation, HostMemory) and allocation.block is None:
                self.remove(allocation)

    def is_live(self, allocation: LiveMemory) -> bool:
        return self.at.get(allocation.base) is allocation


def pages_of(allocation: LiveMemory) -> Runs[Advice]:
    if allocation.pages is None:
        allocation.pages = Runs(Advice())
    return allocation.pages


def advise(allocation: LiveMemory, address: int, size: int, change: Callable[[Advice], Advice]) -> None:
    """Apply ``change`` to the advice of each page that the ``size`` bytes at ``address`` touch."""
    pages_of(allocation).change(address // PAGE * PAGE, round_up(address + size, PAGE), change)


def prefetch(place: Place) -> Callable[[Advice], Advice]:
    """Return the change that a prefetch to ``place`` makes to the advice on a page.

    The change takes effect at the call: as documented, queries return the new location before the prefetch has run.
    """
    return lambda advice: replace(advice, prefetched=place)


def common(places: Iterable[Place | None]) -> Place | None:
    """Return the location that all pages have; None if two pages differ, or if the pages have no location."""
    found = set(places)
    return found.pop() if len(found) == 1 else None


def discard(banks: Banks, ranges: list[tuple[int, int]]) -> None:
    """Overwrite ``ranges``, tuples of address and size in bytes, with :data:`FREED`: after a discard the contents are
    undefined.

    A range without memory is skipped.
    """
    for address, size in ranges:
        if banks.is_backed(address, size):
            ctypes.memset(address, FREED, size)
