"""Private names of ``pool`` that other areas of the package may import."""

from __future__ import annotations

from streamalloc.pool.cache.allocator import CacheStatistics, CachingAllocator
from streamalloc.pool.cache.blocks import CachedBlock, CachedBuffer, SharedBehind, SizeClass
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
from streamalloc.pool.pool import MemoryPool, known_pools, pool_holders


def collect_dropped(cache: CachingAllocator) -> None:
    """Put the blocks of dropped buffers into the free lists of ``cache`` now rather than at the next allocation without
    a free block.
    """
    cache._state.collect_dropped()
