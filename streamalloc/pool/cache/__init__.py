"""A cache over a pool: :class:`CachingAllocator`."""

from streamalloc.pool.cache.allocator import CacheStatistics, CachingAllocator

__all__ = ["CacheStatistics", "CachingAllocator"]
