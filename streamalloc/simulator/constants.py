"""Numbers of the driver's enums, which are equal in all versions of the bindings; classes for locations and handles;
sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Location:
    """The numbers of CUmemLocationType."""

    NONE, DEVICE, HOST, HOST_NUMA, HOST_NUMA_CURRENT = range(5)


class HandleType:
    """The numbers of CUmemAllocationHandleType."""

    NONE, POSIX_FD, WIN32, WIN32_KMT, FABRIC = 0, 1, 2, 4, 8


class EventFlag:
    """The numbers of CUevent_flags that the simulator uses."""

    DISABLE_TIMING, INTERPROCESS = 2, 4


NO_ACCESS, READ, READ_WRITE = 0, 1, 3  # CUmemAccess_flags
PINNED, MANAGED = 1, 2  # CUmemAllocationType
LEGACY_STREAM, PER_THREAD_STREAM = 1, 2  # CU_STREAM_LEGACY, CU_STREAM_PER_THREAD

Dim3 = tuple[int, int, int]
"""Sizes in x, y and z of a grid, a block or an array."""

ALIGNMENT = 512
"""Alignment in bytes of the addresses of allocations: in pools, in graphs, and of ``cuMemAlloc``. The size of an
allocation is rounded up to a multiple of it.
"""
CHUNK = 32 << 20
"""Number of bytes by which pools grow: the size of a chunk of physical memory."""
BLOCK = 2 << 20
"""Size in bytes of a block of cuMemAlloc. Smaller allocations share blocks (observed on H200: test_plain_memory)."""
TILE_SIZE = 64 << 10
"""Size in bytes of a tile of a sparse array."""
STEP = 4 << 20
"""Number of bytes that a copy moves in one step. A step takes about 1 ms, and other streams and threads run between two
steps.
"""
HANDLE_BYTES = 64
"""Size in bytes of pointer export data, IPC handles and fabric handles."""


def round_up(size: int, unit: int) -> int:
    """Return ``size`` rounded up to a multiple of ``unit``."""
    return -(-size // unit) * unit


@dataclass(frozen=True)
class Place:
    """Location in memory (a CUmemLocation) as two numbers: location type and id."""

    type: int
    id: int

    @property
    def device(self) -> int | None:
        """Ordinal of the device; None for a location that is not a device."""
        return self.id if self.type == Location.DEVICE else None


HIDDEN = -2
"""CU_DEVICE_INVALID, used as ordinal of a device that CUDA_VISIBLE_DEVICES hides from the process."""
NOWHERE = Place(Location.NONE, 0)
HOST = Place(Location.HOST, 0)
"""Location under which the access rights of the host are stored: HOST and HOST_NUMA 0 have the same rights (observed on
H200: test_mappings).
"""


def device_place(ordinal: int) -> Place:
    return Place(Location.DEVICE, ordinal)


_handles: Iterator[int] = itertools.count(0x5EED_0000_1000, 0x40)


def new_handle() -> int:
    """Return a new handle, unique among all machines of the process."""
    return next(_handles)


class _HasHandle(Protocol):
    handle: int


H = TypeVar("H", bound=_HasHandle)


class Handles(dict[int, H]):
    """Objects of one kind that belong to a machine, by handle."""

    def add(self, made: H) -> H:
        """Add an object under its handle, and return the object."""
        self[made.handle] = made
        return made
