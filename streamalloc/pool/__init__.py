"""Stream-ordered memory pools: create, tune, measure and trim pools, and choose the current pool of a device.

This module does not import caches and other sources of memory, so that programs without them start faster.
"""

from streamalloc.pool.attributes import PoolAttributes, PoolStatistics
from streamalloc.pool.pool import MemoryPool, allocate

__all__ = [
    "MemoryPool",
    "PoolAttributes",
    "PoolStatistics",
    "allocate",
]
