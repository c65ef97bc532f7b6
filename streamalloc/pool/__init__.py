"""Stream-ordered memory pools: create, tune, measure, trim, and choose the pool that other code allocates from.

Caches and other sources of memory are imported from their files, so that the import of a pool takes no time for them.
"""

from streamalloc.pool.attributes import PoolAttributes, PoolStatistics
from streamalloc.pool.pool import MemoryPool, allocate

__all__ = [
    "MemoryPool",
    "PoolAttributes",
    "PoolStatistics",
    "allocate",
]
