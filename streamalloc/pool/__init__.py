"""Stream-ordered memory pools: create, tune, measure, trim, and choose what others allocate from."""

from streamalloc.pool.attributes import PoolAttributes, PoolStatistics
from streamalloc.pool.cache.allocator import CacheStatistics, CachingAllocator
from streamalloc.pool.pool import MemoryPool, allocate

__all__ = ["CacheStatistics", "CachingAllocator", "MemoryPool", "PoolAttributes", "PoolStatistics", "allocate"]
