"""Style of all figures: colours, fonts and axes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

MiB = 1 << 20
WIDTH = 9.4
"""Inches: the width of a figure in a notebook."""

# Each colour has one meaning in all figures. Locations use :func:`streamalloc.formats.html.color_of`.
INK, GREY = "#24292f", "#6e7781"
RESERVED, RESERVED_EDGE, USED = "#cfe0f1", "#7ba3cf", "#1f4e86"
RED = "#b3402e"
"""Failures, and results that depend on timing."""
USES = (USED, "#93b1d6", "#4c74a8", "#7599c6", "#2c548a", "#5f87bb")
"""Used memory by name, in order."""
STREAMS = ("#9fd3c7", "#f4d58d", "#d8b4e2", "#b7d58f", "#f2b5a7", "#c8c2b4", "#e6a4c4", "#aeb9c7")
"""Streams, in order."""
PHASES = ("#d5dae0", "#e4e7eb", "#eef0f3")
"""Colours of phases: outermost first; inner ones alternate."""

STYLE: dict[str, Any] = {
    **dict.fromkeys(("figure.facecolor", "savefig.facecolor", "axes.facecolor", "hatch.color"), "white"),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), GREY),
    **dict.fromkeys(("axes.labelcolor", "text.color", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.spines.right", "axes.spines.top", "legend.frameon"), False),
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "figure.dpi": 80,
    "font.size": 10,
    "hatch.linewidth": 1.2,
}
"""``rcParams`` of matplotlib while a figure is drawn."""


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Apply the style in a ``with`` block.

    ``plt.rc_context`` would also reset the settings that a notebook's backend makes when its first figure loads it.
    """
    before = {name: plt.rcParams[name] for name in STYLE}
    plt.rcParams.update(STYLE)
    try:
        yield
    finally:
        plt.rcParams.update(before)


class Picture(Figure):
    """A figure that a cell of a notebook draws once.

    At the end of a cell the notebook backend draws all open figures, and would draw the value of the last line again.
    """

    def _ipython_display_(self) -> None:
        if "inline" in plt.get_backend():
            plt.close(self)
        raise NotImplementedError("IPython draws the figure itself")


class Unit(NamedTuple):
    """A unit for the values of an axis."""

    name: str
    scale: int


_UNITS = (Unit("GiB", 1 << 30), Unit("MiB", MiB), Unit("KiB", 1 << 10), Unit("bytes", 1))
TIMES = (Unit("seconds", 10**9), Unit("milliseconds", 10**6), Unit("microseconds", 1000))


def unit_of(most: float, units: Sequence[Unit] = _UNITS) -> Unit:
    """The largest unit in which ``most`` (bytes or nanoseconds) is at least 2. For 0, the second unit."""
    return next((one for one in units if most >= 2 * one.scale), units[-1]) if most else units[1]


def whole_numbers(axis: Axis, most: float) -> None:
    """Scale an axis from 0 to slightly above ``most``, with at most six labels, all whole numbers."""
    axis.set_view_interval(0, 1.08 * max(most, 1), ignore=True)
    axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 4, 5, 8, 10], integer=True))
    axis.set_major_formatter("{x:,.0f}")


def figure(
    nrows: int = 1, ncols: int = 1, *, height: float = 2.9, width: float = WIDTH, **options: Any
) -> tuple[Figure, Any]:
    """Create a figure in the style; return it with a 2-D array of its axes. ``options`` go to ``plt.subplots``.

    Examples
    --------
    >>> made, axes = plots.figure(1, 2)
    >>> plots.pool(pool, ax=axes[0, 0])
    """
    subplots: Any = plt.subplots
    with styled():
        made: tuple[Figure, Any] = subplots(
            nrows, ncols, FigureClass=Picture, figsize=(width, height), squeeze=False, layout="constrained", **options
        )
    return made


@contextlib.contextmanager
def drawing(ax: Axes | None, **options: Any) -> Iterator[tuple[Figure, Axes]]:
    """Apply the style in a ``with`` block; yield figure and axes: of ``ax``, or new ones.

    :func:`figure` makes several axes at once.
    """
    with styled():
        if ax is None:
            made, grid = figure(**options)
            yield made, grid[0, 0]
        else:
            whole: Any = ax.figure
            yield whole, ax


def bare(ax: Axes) -> None:
    """Remove frame and ticks."""
    ax.spines[:].set_visible(False)
    ax.set_yticks([])
    ax.tick_params(length=0)


def rows(ax: Axes, names: Sequence[str]) -> None:
    """Label rows with names, the first on top."""
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def legend(made: Figure, **options: Any) -> None:
    """Write a legend below the axes. Names may have dollar signs, which enclose no formulas."""
    for text in made.legend(loc="outside lower left", **options).get_texts():
        text.set_parse_math(False)


def inside(
    made: Figure,
    ax: Axes,
    texts: Iterable[tuple[float, float, float, str, str]],
    heights: Iterable[float] = itertools.repeat(1),
) -> None:
    """Write texts into the bars that are large enough. If two lines do not fit, write only the first.

    A text is start and stop of the bar, its row, the text and its colour. ``heights`` are those of the bars.
    """
    made.draw_without_rendering()
    zero = ax.transData.transform((0, 0))
    for (start, stop, row, text, ink), height in zip(texts, heights, strict=False):
        width, tall = map(abs, ax.transData.transform((stop - start, height)) - zero)
        for shown in (text.replace("\n", ": "), text.partition("\n")[0]) if text else ():
            # Checked first, because making a text is slow; no character has less than 3 pixels.
            if 3 * len(shown) > width:
                continue
            label = ax.text((start + stop) / 2, row, shown, color=ink, ha="center", va="center", weight="bold")
            label.set(in_layout=False, parse_math=False)
            box = label.get_window_extent()
            if box.width <= width and box.height <= tall:
                break
            label.remove()
