"""Figures of the memory of a device by owner: what stays there when a group sleeps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from streamalloc.core.errors import CudaError
from streamalloc.core.html import Row, Shown, mib, table
from streamalloc.core.internal import Device, members
from streamalloc.core.session import session_of
from streamalloc.pool import MemoryPool
from streamalloc.pool.internal import known_pools
from streamalloc.vmm.allocation_handles import allocations_of
from streamalloc.vmm.pages.physical import PhysicalPages
from streamalloc.vmm.physical_memory import PhysicalMemory
from streamalloc.vmm.reservation import Reservation


@dataclass(frozen=True, slots=True, repr=False)
class Residents(Shown):
    """Memory of a device by owner, in bytes, at one moment; prints as a table.

    ``total`` and ``free`` are those of ``cuMemGetInfo``, ``pools`` is the reserved memory of each pool
    (``cuMemPoolGetAttribute``), and ``graphs`` that of CUDA graphs (``cuDeviceGetGraphMemAttribute``). The sizes of
    what this library has created are its own records.

    The driver does not say who has the rest, :attr:`others`. It has no figure for a context, which exists before memory
    can be asked for: in the first reading of a process that has the device alone, all of ``others`` is its context.
    Libraries such as NCCL call the driver themselves, and no observer of this library sees it. Their memory is in
    ``others``, unless they allocate from a bridge to a pool or group, or :meth:`SleepGroup.measure` has measured it.
    """

    device: Device
    """The device."""
    total: int
    """Memory of the device."""
    free: int
    """Free memory."""
    group: Mapping[str, int]
    """Memory of the group's buffers that are awake, by tag."""
    mapped: int
    """Other physical memory that this process made and has mapped: ranges and buffers, also for multicast."""
    pages: int
    """Pages of all arenas: committed, kept, spare, and the page of zeros of each."""
    spare: int
    """Memory that recyclers keep, and that is not mapped."""
    pools: Mapping[str, int]
    """Memory reserved by pools of this process, by name, the device's default pool among them."""
    graphs: int
    """Memory reserved by CUDA graphs that allocate."""
    measured: Mapping[str, int]
    """Memory of the owners that :meth:`SleepGroup.measure` has measured, by name, as it was then."""

    @classmethod
    def of(cls, device: Device, buffers: Mapping[Any, str], measured: Mapping[str, int]) -> Residents:
        """Read the figures; ``buffers`` are those of the group, with their tags, ``measured`` those of other owners."""
        group: dict[str, int] = {}
        for buffer, tag in buffers.items():
            group[tag] = group.get(tag, 0) + sum(_mapped(device, buffer.range._node).values())
        every: dict[object, int] = {}
        allocations = allocations_of(session_of(device))
        for reservation in list(allocations.reservations):
            every |= _mapped(device, reservation)
        mapped, pages, spare = sum(every.values()) - sum(group.values()), 0, 0
        for keeper in members(allocations.recyclers):
            if isinstance(keeper, PhysicalPages):
                pages += keeper.page_bytes(device.location)
            else:
                spare += keeper.unmapped_bytes(device.location)
        info, pools, graphs = device.memory_info(), _pools(device), device.graph_memory.reserved
        return cls(device, info.total, info.free, group, mapped, pages, spare, pools, graphs, dict(measured))

    @property
    def others(self) -> int:
        """Memory of nobody above: contexts with their kernels and local memory, libraries that were not measured,
        :class:`PhysicalMemory` without a mapping, imported memory, and other processes.
        """
        return self.total - self.free - sum(bytes for _, bytes in self._known())

    def _known(self) -> Iterator[tuple[str, int]]:
        for tag, nbytes in self.group.items():
            yield f"group, tag {tag!r}", nbytes
        yield "other mapped memory", self.mapped
        yield "page arenas", self.pages
        yield "recyclers", self.spare
        for name, nbytes in self.pools.items():
            yield name, nbytes
        yield "graphs", self.graphs
        for owner, nbytes in self.measured.items():
            yield f"{owner}, as measured", nbytes

    def rows(self) -> list[tuple[str, int]]:
        """Return owners and bytes, as the table shows them."""
        rest = ("contexts, libraries, other processes", self.others)
        return [*self._known(), rest, ("free", self.free), ("total", self.total)]

    def _about(self) -> Iterator[Row]:
        yield repr(self.device), table(("on the device", ""), ((owner, mib(nbytes)) for owner, nbytes in self.rows()))

    def __repr__(self) -> str:
        shown = [(owner, mib(nbytes)) for owner, nbytes in self.rows()]
        left, right = (max(len(row[column]) for row in shown) for column in (0, 1))
        return "\n".join(f"{owner:<{left}}  {size:>{right}}" for owner, size in shown)


def _mapped(device: Device, reservation: Reservation) -> dict[object, int]:
    """Return the sizes of the physical memory on a device that this process made and has mapped in a range."""
    found: dict[object, int] = {}
    for entry in list(reservation.entries):
        memory, location = entry._memory, None
        if isinstance(memory, PhysicalMemory):
            location = None if entry.state.imported else memory.location
        elif entry._raw is not None:
            location = reservation.maker.prop.location
        if not entry.gone and location == device.location:
            found[entry if memory is None else entry.state] = entry.nbytes
    return found


def _pools(device: Device) -> dict[str, int]:
    session = session_of(device)
    pools = {"default pool": MemoryPool.default(device)} if device.supports.memory_pools else {}
    handles = {pool.handle for pool in pools.values()}
    for pool in known_pools(session):
        if pool.location == device.location and pool.handle not in handles:
            handles.add(pool.handle)
            pools[repr(pool.name or f"pool {pool.handle:#x}")] = pool
    found = {}
    for name, pool in pools.items():
        with contextlib.suppress(CudaError):  # a pool of another process
            found[name] = pool.statistics().reserved
    return found
