"""Numbers of the driver's enums: the same in every version of the bindings."""

from __future__ import annotations


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
