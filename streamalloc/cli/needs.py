"""Requirements of tour parts and benchmark rows: each function raises :class:`Unavailable` where one is not met."""

from __future__ import annotations

import streamalloc as sa
from streamalloc.driver import Driver

POSIX = sa.MemHandleType.POSIX_FILE_DESCRIPTOR


class Unavailable(Exception):
    """A part or a row cannot run on this machine; the message gives the reason."""


def need(condition: object, why: str) -> None:
    """Raise :class:`Unavailable` with the reason ``why`` unless the condition is true."""
    if not condition:
        raise Unavailable(why)


def need_virtual_memory(device: sa.Device) -> None:
    """Require virtual memory management."""
    need(device.supports.virtual_memory_management, "this device does not support virtual memory management")


def need_gates(device: sa.Device) -> None:
    """Require ``cuStreamWaitValue32``, which holds streams."""
    why = "this device's streams cannot wait for memory values, so no step can keep work pending"
    need(device.supports.stream_memory_operations, why)


def need_shared_pools(device: sa.Device) -> None:
    """Require pools that another process on this machine can open."""
    need_gates(device)
    kinds = device.supports.pool_handle_types or sa.MemHandleType.NONE
    need(POSIX in kinds, "this device's pools cannot be shared with other processes")


def need_host_pool(device: sa.Device) -> sa.MemLocation:
    """Return a location for a pool in host memory that the device can access."""
    supports = device.supports
    if supports.host_memory_pools:
        return sa.MemLocation.host()
    need(supports.host_numa_memory_pools, "this device, its driver or these bindings have no pools in host memory")
    return sa.MemLocation.host_numa(max(supports.host_numa_id or 0, 0))


def need_peers(driver: Driver) -> list[sa.Device]:
    """Return GPUs, at least two, that all have access to each other's memory, GPU 0 first."""
    devices = sa.Device.all(driver)
    need(len(devices) > 1, "this machine has one GPU")
    peers: list[sa.Device] = []
    for device in devices:
        if all(device.can_access(other) and other.can_access(device) for other in peers):
            peers.append(device)
    need(len(peers) > 1, "no other GPU of this machine has access to the memory of GPU 0 and the reverse")
    return peers
