"""Recovery of allocations whose address no object has, in a dropped pool.

If a signal handler raises after the driver has allocated and before Python stores the address, the allocation is lost.
A pool with a live allocation cannot be destroyed safely (:mod:`streamalloc.pool.ending`), so the whole pool would stay
until the process ends. Once no object, queue or other code can have an allocation of the pool, everything that it
counts as used is lost. The driver reports the range and the pool of an address (``cuPointerGetAttribute``). So the
search makes a new allocation and queries the addresses around it.
"""

from __future__ import annotations

import gc
from typing import Any

from streamalloc.core.internal import Device, QueuedWork, notify_freed, raw_handle
from streamalloc.core.properties import MemLocation, MemLocationType
from streamalloc.core.session import Session
from streamalloc.driver.internal import cuda

_STEP = 512
"""Bytes: the alignment of allocations."""
_PROBES = 1 << 17
"""Most addresses to query (0.1 s); they span 64 MiB, two growth steps."""
_SIZE = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE
_POOL = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE


def no_collection_is_left() -> bool:
    """Whether no other thread is in a garbage collection, where finalisers of buffers may still be pending."""
    young = gc.get_stats()[0]["collections"]
    # If another thread is collecting, this returns at once and the count stays.
    gc.collect(0)
    return bool(gc.get_stats()[0]["collections"] > young)


def free_lost(session: Session, pool: Any, location: MemLocation, used: int) -> bool:
    """Free all allocations of a pool, ``used`` bytes, after the work of all streams.

    Returns False and frees nothing if the allocations found do not add up to ``used``.
    """
    device = Device(location.id if location.type is MemLocationType.DEVICE else 0, driver=session.driver)
    with device.create_stream() as stream:
        raw = raw_handle(stream)
        near = session.call("cuMemAllocFromPoolAsync", 1, pool, raw)
        try:
            found = _find(session, int(pool), int(near), used)
        finally:
            session.call("cuMemFreeAsync", near, raw)
        if not found:
            return False
        QueuedWork(session).precede(stream)
        for address in found:
            with notify_freed(session, address, raw):
                session.call("cuMemFreeAsync", address, raw)
    return True


def _find(session: Session, pool: int, near: int, used: int) -> list[int]:
    """Return the addresses of a pool's allocations around ``near``; empty unless they add up to ``used`` bytes."""
    found: list[int] = []
    low = high = near
    for _ in range(_PROBES // 2):
        low -= _STEP
        if size := _size(session, pool, low):
            low -= (size - 1) // _STEP * _STEP  # from the last step of the range to the first
            found.append(low)
            used -= size
        high += _STEP
        if size := _size(session, pool, high):
            found.append(high)
            used -= size
            high += (size - 1) // _STEP * _STEP
        if used <= 0:
            break
    return found if not used else []


def pool_of_address(session: Session, address: int) -> int:
    """The ``CUmemoryPool`` of the allocation at an address; 0 for other memory."""
    result, owner = session.cuPointerGetAttribute(_POOL, address)
    return 0 if result else int(owner)


def _size(session: Session, pool: int, address: int) -> int:
    """The size of the pool's allocation at an address, in bytes; 0 where there is none."""
    if pool_of_address(session, address) != pool:
        return 0
    return int(session.call("cuPointerGetAttribute", _SIZE, address))
