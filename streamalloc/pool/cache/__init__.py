"""A cache over a pool: :class:`~streamalloc.pool.cache.allocator.CachingAllocator`."""
