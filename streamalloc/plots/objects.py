"""Figure of a pool, and dispatch for ``pool.plot()`` and the other ``plot()`` methods."""

from __future__ import annotations

from typing import Any, cast

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from streamalloc.core.errors import size_text
from streamalloc.core.html import place
from streamalloc.observing import Observer
from streamalloc.plots.observed import memory
from streamalloc.plots.ranges import address_range
from streamalloc.plots.style import INK, RESERVED, RESERVED_EDGE, USED, drawing, rows, unit_of, whole_numbers
from streamalloc.pool import MemoryPool
from streamalloc.vmm import AddressRange, VirtualBuffer


def pool(of: MemoryPool, *, ax: Axes | None = None) -> Figure:
    """Draw the current statistics of a pool, reserved light and used dark, with the peaks as lines.

    :meth:`MemoryPool.plot` draws it into axes of its own; :doc:`/01-memory-pools` shows such pictures.
    """
    now = of.statistics()
    unit, scale = unit_of(now.reserved_high)
    with drawing(ax, height=1.7) as (made, axes):
        rows(axes, ["reserved", "used"])
        bars = (now.reserved, now.reserved_high, RESERVED), (now.used, now.used_high, USED)
        for row, (value, peak, color) in enumerate(bars):
            axes.barh(row, value / scale, 0.6, fc=color, ec=RESERVED_EDGE)
            axes.plot([peak / scale] * 2, [row - 0.4, row + 0.4], color=INK, lw=1.6)
            text, end = f"{size_text(value)}, at most {size_text(peak)}", (max(value, peak) / scale, row)
            axes.annotate(text, end, (7, 0), textcoords="offset points", va="center")
        # More than the peak, for the texts.
        whole_numbers(axes.xaxis, 1.3 * now.reserved_high / scale)
        axes.set_xlabel(unit)
        axes.set_title(f"Memory pool{f' {of.name!r}' if of.name else ''} of {place(of.location)}", parse_math=False)
    return made


_FUNCTIONS: dict[type | tuple[type, ...], Any] = {
    MemoryPool: pool,
    (AddressRange, VirtualBuffer): address_range,
    Observer: memory,
}


def draw(thing: object, **options: Any) -> Figure:
    """Draw a pool, an address range, virtual memory or an observer; return the figure.

    The ``plot`` methods of these objects call it, such as :meth:`MemoryPool.plot`.

    Raises
    ------
    TypeError
        Objects of this class cannot be drawn.
    """
    for kind, draw_kind in _FUNCTIONS.items():
        if isinstance(thing, kind):
            return cast(Figure, draw_kind(thing, **options))
    raise TypeError(f"there is no picture of {thing!r}")
