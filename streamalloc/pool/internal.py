"""Names of ``pool``, beside the public ones, that the areas above use."""

from __future__ import annotations

from typing import Any

from streamalloc.core.internal import Device
from streamalloc.pool.cache.allocator import CacheStatistics, CachingAllocator
from streamalloc.pool.cache.blocks import CachedBlock, CachedBuffer, SharedBehind, SizeClass, class_size, filled
from streamalloc.pool.cache.state import CacheState, StreamCache
from streamalloc.pool.places import location_of_pool, residence_of
from streamalloc.pool.plain import (
    THIS,
    OnceIdle,
    PlainBuffer,
    PlainEnd,
    check_handle,
    end_plain,
    is_ours,
    refuse_second_owner,
)
from streamalloc.pool.pointers import MemoryKind, PointerAttributes, pointer_attributes
from streamalloc.pool.pool import MemoryPool, known_pools, pool_holders, reading


def raw_pool(pool: MemoryPool) -> Any:
    """Return the driver's ``CUmemoryPool``, for calls that do not allocate.

    Raises
    ------
    ClosedError
        The pool was closed.
    """
    return pool._checked_raw()


def reachable_from(pool: MemoryPool, device: Device) -> bool:
    """Whether a device may use a pool's memory (``cuMemPoolGetAccess``)."""
    return pool._reachable_from(device)


def collect_dropped(cache: CachingAllocator) -> None:
    """Put the blocks of dropped buffers into the free lists of ``cache``; otherwise the next miss does so."""
    cache._state.collect_dropped()
