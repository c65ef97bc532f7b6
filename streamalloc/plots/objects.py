"""Figure of a pool, and dispatch for ``pool.plot()`` and the other ``plot()`` methods."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from streamalloc.core.html import place
from streamalloc.observing import Observer
from streamalloc.plots.observed import memory
from streamalloc.plots.ranges import address_range
from streamalloc.plots.style import RED, RESERVED_EDGE, USED, MiB, drawing, rows
from streamalloc.pool import MemoryPool
from streamalloc.vmm import AddressRange, VirtualBuffer


def pool(of: MemoryPool, *, ax: Axes | None = None) -> Figure:
    """Draw the current statistics of a pool, reserved light and used dark, with the peaks as lines."""
    now = of.statistics()
    with drawing(ax, height=1.7) as (made, axes):
        rows(axes, ["reserved", "used"])
        for row, (value, peak, color) in enumerate(
            ((now.reserved, now.reserved_high, RESERVED_EDGE), (now.used, now.used_high, USED))
        ):
            axes.barh(row, value / MiB, 0.6, color=color)
            axes.plot([peak / MiB] * 2, [row - 0.4, row + 0.4], color=RED, lw=1.6)
            axes.annotate(
                f"{value / MiB:,.1f}, at most {peak / MiB:,.1f}", (max(value, peak) / MiB, row), (7, 0),
                textcoords="offset points", va="center",
            )  # fmt: skip
        # 35 % more, for the texts.
        axes.set_xlim(0, max(now.reserved_high, MiB) / MiB * 1.35)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("MiB")
        axes.set_title(f"Memory pool of {place(of.location)}")
    return made


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
