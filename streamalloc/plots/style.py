"""Style of all figures: colours, fonts and axes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

MiB = 1 << 20
WIDTH = 9.4
"""Inches: the width of a figure in a notebook."""

INK, GREY, TINT = "#24292f", "#6e7781", "#eef4fa"
RESERVED, RESERVED_EDGE, USED, RED = "#cfe0f1", "#7ba3cf", "#1f4e86", "#b3402e"
GREEN, ORANGE, LIGHT = "#5f9467", "#e0923d", "#f6ddbd"
ADDRESSES = ("#3f78b5", ORANGE, "#8a6fb0", GREEN, "#c45d7c", "#4a9aa5", "#a3863c", "#7d8794")
"""Colours of series, in order."""

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


def figure(
    nrows: int = 1, ncols: int = 1, *, height: float = 2.9, width: float = WIDTH, **options: Any
) -> tuple[Figure, Any]:
    """Create a figure in the style; return it with a 2-D array of its axes. ``options`` go to ``plt.subplots``."""
    subplots: Any = plt.subplots
    with styled():
        made: tuple[Figure, Any] = subplots(
            nrows, ncols, figsize=(width, height), squeeze=False, layout="constrained", **options
        )
    return made


@contextlib.contextmanager
def drawing(ax: Axes | None, **options: Any) -> Iterator[tuple[Figure, Axes]]:
    """Apply the style in a ``with`` block; yield figure and axes: of ``ax``, or new ones."""
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


def sizes(ax: Axes) -> None:
    """Set up a y axis of MiB from 0, with at most five labels."""
    ax.set_ylim(0, 1.08 * ax.get_ylim()[1])
    ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 4, 8, 10], integer=True))
    ax.yaxis.set_major_formatter("{x:,.0f}")


def inside(made: Figure, ax: Axes, texts: Iterable[tuple[float, float, float, str, str]]) -> None:
    """Write texts into those bars that are wide enough."""
    made.draw_without_rendering()
    for start, stop, row, text, ink in texts:
        if text:
            label = ax.text((start + stop) / 2, row, text, color=ink, ha="center", va="center", weight="bold")
            label.set_in_layout(False)
            left, right = (ax.transData.transform((x, 0))[0] for x in (start, stop))
            if label.get_window_extent().width > right - left:
                label.remove()
