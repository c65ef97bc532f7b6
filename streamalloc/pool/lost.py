"""Allocations whose address nobody has: search in a dropped pool, and free.

If a signal handler raises between the driver's answer and the line that keeps it, the allocation is lost. The driver
cannot destroy the pool safely while an allocation lives (:mod:`streamalloc.pool.ending`), so a lost one would keep the
whole pool for the life of the process. Once no object, no queue and no other code can have an allocation of the pool,
all that the pool still counts as used is lost. The driver names the range and the pool of each address
(``cuPointerGetAttribute``), so a walk over the addresses near a new allocation finds it.
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
"""Maximum number of addresses to query, 0.1 s: they span 64 MiB, twice the growth step of a pool."""
_SIZE = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE
_POOL = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE


def no_collection_is_left() -> bool:
    """Whether no other thread collects garbage now; finalisers of buffers may be left in such a collection."""
    young = gc.get_stats()[0]["collections"]
    # If another thread is collecting, this returns at once and the count stays.
    gc.collect(0)
    return bool(gc.get_stats()[0]["collections"] > young)


def free_lost(session: Session, pool: Any, location: MemLocation, used: int) -> bool:
    """Free all allocations of a pool, ``used`` bytes, after the work of all streams.

    False, and nothing is freed, if other allocations are found than the pool counts.
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
    """The addresses of a pool's allocations around another one, ``used`` bytes in all; none if that is not so."""
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
