"""Numbers of the driver's enums (the same in every version of the bindings), places, and sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass


class Location:
    """CUmemLocationType."""

    NONE, DEVICE, HOST, HOST_NUMA, HOST_NUMA_CURRENT = range(5)


class Handle:
    """CUmemAllocationHandleType."""

    NONE, POSIX_FD, WIN32, WIN32_KMT, FABRIC = 0, 1, 2, 4, 8


class EventFlag:
    """CUevent_flags."""

    DISABLE_TIMING, INTERPROCESS = 2, 4


NO_ACCESS, READ, READ_WRITE = 0, 1, 3  # CUmemAccess_flags
PINNED, MANAGED = 1, 2  # CUmemAllocationType
LEGACY_STREAM, PER_THREAD_STREAM = 1, 2  # CU_STREAM_LEGACY, CU_STREAM_PER_THREAD

ALIGNMENT = 512
"""Of allocations."""
CHUNK = 32 << 20
"""By which pools grow."""
BLOCK = 2 << 20
"""Plain memory comes in blocks of this size; smaller allocations share one (observed on H200: test_plain_memory)."""
GRANULARITY = 2 << 20
"""Of physical memory, reservations and mappings of any kind (observed on H200: test_physical_memory)."""
TILE_SIZE = 64 << 10
"""Of sparse arrays."""
STEP = 4 << 20
"""How much is moved in one go, a millisecond or so: other streams and threads get turns in between."""
HANDLE_BYTES = 64
"""Of a pointer's export data, of the handles for events and plain memory, and of a fabric handle."""


@dataclass(frozen=True)
class Place:
    """Where memory lives: a location type of the driver (as an int) and its id."""

    type: int
    id: int

    @property
    def device(self) -> int | None:
        """None where it is not a device's."""
        return self.id if self.type == Location.DEVICE else None


NOWHERE = Place(Location.NONE, 0)
HOST = Place(Location.HOST, 0)
"""Whose rights the host's are: those of HOST and of HOST_NUMA 0 are one (observed on H200: test_host_mappings)."""


def device_place(ordinal: int) -> Place:
    return Place(Location.DEVICE, ordinal)


_handles: Iterator[int] = itertools.count(0x5EED_0000_1000, 0x40)


def new_handle() -> int:
    """Of anything. One count for all machines: a handle of one is never valid in another."""
    return next(_handles)
