"""What draws an object: ``pool.plot()`` and the like come here."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from streamalloc.observing import Observer
from streamalloc.plots.observed import memory
from streamalloc.plots.pools import pool
from streamalloc.plots.ranges import address_range
from streamalloc.pool import MemoryPool
from streamalloc.vmm import AddressRange, VirtualBuffer

__all__ = ["draw"]

# The first class that fits.
_HOW: dict[type | tuple[type, ...], Any] = {
    MemoryPool: pool,
    (AddressRange, VirtualBuffer): address_range,
    Observer: memory,
}


def draw(thing: object, **options: Any) -> Figure:
    """Draw a pool, an address range, virtual memory or what an observer knows, by the function for its kind.

    Raises
    ------
    TypeError
        There is no picture of such an object.
    """
    for kind, how in _HOW.items():
        if isinstance(thing, kind):
            made: Figure = how(thing, **options)
            return made
    raise TypeError(f"there is no picture of {thing!r}")
