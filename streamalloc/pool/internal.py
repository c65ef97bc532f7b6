"""What the areas above take of pools beside their public names."""

from __future__ import annotations

from streamalloc.core.device import Device
from streamalloc.pool.attributes import ATTRIBUTES
from streamalloc.pool.pointers import MemoryKind, pointer_attributes
from streamalloc.pool.pool import MemoryPool

__all__ = ["ATTRIBUTES", "MemoryKind", "pointer_attributes", "reachable_from"]


def reachable_from(pool: MemoryPool, device: Device) -> bool:
    """Whether a device may use a pool's memory (``cuMemPoolGetAccess``)."""
    return pool._reachable_from(device)
