"""Dispatch for ``pool.plot()`` and the other ``plot()`` methods."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from streamalloc.observing import Observer
from streamalloc.plots.observed import memory
from streamalloc.plots.pools import pool
from streamalloc.plots.ranges import address_range
from streamalloc.pool import MemoryPool
from streamalloc.vmm import AddressRange, VirtualBuffer

_FUNCTIONS: dict[type | tuple[type, ...], Any] = {
    MemoryPool: pool,
    (AddressRange, VirtualBuffer): address_range,
    Observer: memory,
}


def draw(thing: object, **options: Any) -> Figure:
    """Draw a pool, an address range, virtual memory or an observer; return the figure.

    Raises
    ------
    TypeError
        Objects of this class cannot be drawn.
    """
    for kind, draw_kind in _FUNCTIONS.items():
        if isinstance(thing, kind):
            made: Figure = draw_kind(thing, **options)
            return made
    raise TypeError(f"there is no picture of {thing!r}")
