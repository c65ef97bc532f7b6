"""What the areas above take of pools beside their public names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from streamalloc.core.internal import Device, Session
from streamalloc.pool.attributes import ATTRIBUTES
from streamalloc.pool.cache.blocks import CachedBuffer
from streamalloc.pool.ending import pools_of
from streamalloc.pool.pointers import MemoryKind, pointer_attributes
from streamalloc.pool.pool import MemoryPool

__all__ = ["ATTRIBUTES", "CachedBuffer", "MemoryKind", "known_pools", "pointer_attributes", "reachable_from", "reading"]


def known_pools(session: Session) -> list[MemoryPool]:
    """The pools of a driver that this process has objects of."""
    return [pool for pool in list(pools_of(session).alive.values()) if isinstance(pool, MemoryPool) and not pool.closed]


@contextlib.contextmanager
def reading(pool: MemoryPool) -> Iterator[None]:
    """A block in which a pool that was found open is not destroyed, whichever thread closes it."""
    end = pool._end
    if end is None:
        yield
        return
    # No thread comes between reading and writing it, as no function is called there.
    end.readers += 1
    try:
        yield
    finally:
        end.readers -= 1


def reachable_from(pool: MemoryPool, device: Device) -> bool:
    """Whether a device may use a pool's memory (``cuMemPoolGetAccess``)."""
    return pool._reachable_from(device)
