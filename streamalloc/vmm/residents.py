"""Memory of a device by owner, as a table."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from streamalloc.core.errors import CudaError
from streamalloc.core.internal import Device
from streamalloc.core.session import members, session_of
from streamalloc.formats.html import Row, Shown, mib, table
from streamalloc.pool import MemoryPool
from streamalloc.pool.internal import known_pools
from streamalloc.vmm.ownership import allocations_of
from streamalloc.vmm.physical_memory import PhysicalMemory
from streamalloc.vmm.reservation import Reservation


@dataclass(frozen=True, slots=True, repr=False)
class Residents(Shown):
    """Memory of a device by owner, in bytes, at one moment. ``print`` shows a table.

    ``total`` and ``free`` come from ``cuMemGetInfo``, ``pools`` from ``cuMemPoolGetAttribute``, and ``graphs`` from
    ``cuDeviceGetGraphMemAttribute``. The other sizes are this library's records of memory that it has created.

    The driver reports neither the owners of the rest, :attr:`others`, nor the size of a context. If no other process
    uses the device, ``others`` in a process's first reading is the size of its context. Memory of libraries that call
    the driver directly, such as NCCL, is in ``others``, unless it was measured by :meth:`SleepGroup.measure` or comes
    from a pool or group of this library.
    """

    device: Device
    """The device whose memory is listed."""
    total: int
    """Bytes of the device's memory."""
    free: int
    """Bytes of the device's memory that are free."""
    group: Mapping[str, int]
    """Bytes of the group's awake buffers, by tag."""
    mapped: int
    """Bytes of other physical memory that this process created and mapped."""
    pages: int
    """Bytes of all pages of arenas, including their pages of zeros."""
    pools: Mapping[str, int]
    """Reserved bytes of this process's pools, by name; by handle for a pool without a name."""
    graphs: int
    """Bytes reserved by CUDA graphs that allocate memory."""
    measured: Mapping[str, int]
    """Bytes that :meth:`SleepGroup.measure` measured, by name of the owner."""

    @classmethod
    def of(cls, device: Device, buffers: Mapping[Any, str], measured: Mapping[str, int]) -> Residents:
        """Return the memory of ``device`` now. ``buffers`` are the group's buffers with their tags, ``measured`` the
        bytes of other owners by name. Raises CudaError.
        """
        group: dict[str, int] = {}
        for buffer, tag in buffers.items():
            group[tag] = group.get(tag, 0) + sum(_mapped(device, buffer.range._node).values())
        every: dict[object, int] = {}
        allocations = allocations_of(session_of(device))
        for reservation in list(allocations.reservations):
            every |= _mapped(device, reservation)
        mapped = sum(every.values()) - sum(group.values())
        pages = sum(arena.page_bytes(device.location) for arena in members(allocations.arenas))
        info, pools, graphs = device.memory_info(), _pools(device), device.graph_memory.reserved
        return cls(device, info.total, info.free, group, mapped, pages, pools, graphs, dict(measured))

    @property
    def others(self) -> int:
        """Bytes of no known owner, ``total - free`` less the known bytes: contexts with their kernels and local memory,
        libraries that were not measured, :class:`PhysicalMemory` without a mapping, imported memory, and other
        processes.
        """
        return self.total - self.free - sum(bytes for _, bytes in self._known())

    def _known(self) -> Iterator[tuple[str, int]]:
        for tag, nbytes in self.group.items():
            yield f"group, tag {tag!r}", nbytes
        yield "other mapped memory", self.mapped
        yield "page arenas", self.pages
        yield from self.pools.items()
        yield "graphs", self.graphs
        for owner, nbytes in self.measured.items():
            yield f"{owner}, as measured", nbytes

    def rows(self) -> list[tuple[str, int]]:
        """Return the rows of the table as tuples of owner and bytes: the known owners first, then :attr:`others`, the
        free bytes and all bytes.
        """
        rest = ("contexts, libraries, other processes", self.others)
        return [*self._known(), rest, ("free", self.free), ("total", self.total)]

    def _about(self) -> Iterator[Row]:
        yield repr(self.device), table(("on the device", ""), ((owner, mib(nbytes)) for owner, nbytes in self.rows()))

    def __repr__(self) -> str:
        shown = [(owner, mib(nbytes)) for owner, nbytes in self.rows()]
        left, right = (max(len(row[column]) for row in shown) for column in (0, 1))
        return "\n".join(f"{owner:<{left}}  {size:>{right}}" for owner, size in shown)


def _mapped(device: Device, reservation: Reservation) -> dict[object, int]:
    """Return the bytes of physical memory of ``device`` that this process created and mapped in ``reservation``, with a
    key for each memory.

    Memory with several mappings has only one key, so that its bytes count once.
    """
    found: dict[object, int] = {}
    for entry in list(reservation.entries):
        memory, location = entry._memory, None
        if isinstance(memory, PhysicalMemory):
            location = None if entry.state.imported else memory.location
        elif entry._raw is not None:
            location = entry.spec.prop.location
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
        with contextlib.suppress(CudaError):  # The driver refuses statistics of another process's pool.
            found[name] = pool.statistics().reserved
    return found
