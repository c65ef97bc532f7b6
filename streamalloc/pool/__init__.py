"""Stream-ordered memory pools: create, tune, measure, trim, and choose what others allocate from."""

from streamalloc.pool.attributes import PoolAttributes, PoolStatistics
from streamalloc.pool.cache.allocator import CacheStatistics, CachingAllocator
from streamalloc.pool.pool import MemoryPool, allocate
from streamalloc.pool.sources import CallbackAllocator, PlainMemory

__all__ = [
    "CacheStatistics",
    "CachingAllocator",
    "CallbackAllocator",
    "MemoryPool",
    "PlainMemory",
    "PoolAttributes",
    "PoolStatistics",
    "allocate",
]
