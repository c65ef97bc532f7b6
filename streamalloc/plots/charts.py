"""Basic charts: bars in rows over time, cells in a grid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from streamalloc.plots.style import ADDRESSES, GREY, INK, TINT, WIDTH, bare, drawing, rows

_BAR = 0.52


class Bar(NamedTuple):
    """A bar in a row, from ``start`` to ``stop`` on the x axis."""

    row: str
    start: float
    stop: float
    color: str = ADDRESSES[0]
    text: str = ""
    ink: str = "white"


class Mark(NamedTuple):
    """A marker in a row."""

    row: str
    at: float
    text: str = ""
    color: str = INK
    shape: str = "o"
    to: str = ""
    """Row that a dashed line leads down to; empty: no line."""


def spans(
    bars: Iterable[Bar],
    marks: Iterable[Mark] = (),
    *,
    names: Sequence[str] = (),
    legend: Mapping[str, str] | None = None,
    xlabel: str = "",
    thickness: float = _BAR,
    height: float = 0.0,
    ax: Axes | None = None,
) -> Figure:
    """Draw bars and markers in rows, and return the figure.

    Parameters
    ----------
    bars, marks
        The bars and markers. A text wider than its bar is left out.
    names
        The rows from top to bottom; default: in order of the bars.
    legend
        Colours by label.
    xlabel
        Label of the x axis.
    thickness
        Height of the bars, where rows are 1 apart.
    height
        Height of a new figure in inches.
    """
    bars, marks = list(bars), list(marks)
    names = list(names) or list(dict.fromkeys([*(bar.row for bar in bars), *(mark.row for mark in marks)]))
    at = {name: number for number, name in enumerate(names)}
    with drawing(ax, height=height or 0.55 * len(names) + 0.9) as (made, axes):
        rows(axes, names)
        stop = max([one.stop for one in bars] + [one.at for one in marks], default=1)
        start = min([one.start for one in bars] + [one.at for one in marks], default=0)
        room = (stop - start) * 0.01
        if ax is None:
            axes.set_xlim(start - room, stop + 5 * room * any(one.text for one in marks))
            axes.set_xlabel(xlabel)
            axes.xaxis.set_major_formatter("{x:,g}")
        for bar in bars:
            axes.barh(at[bar.row], bar.stop - bar.start, thickness, left=bar.start, color=bar.color)
        for mark in marks:
            if mark.to:
                end = at[mark.to] + thickness / 2
                axes.vlines(mark.at, at[mark.row], end, color=GREY, lw=0.9, ls=(0, (2, 2)), zorder=0)
            axes.plot(mark.at, at[mark.row], mark.shape, color=mark.color, ms=5 if mark.shape == "o" else 8, zorder=3)
            axes.annotate(
                mark.text, (mark.at, at[mark.row]), (6, 3), textcoords="offset points", fontsize=9, va="bottom",
                linespacing=1.05, color=mark.color,
            )  # fmt: skip
        if legend:
            patches = [Patch(color=color, label=name) for name, color in legend.items()]
            axes.legend(
                handles=patches, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(patches), handlelength=1.1,
                columnspacing=1.4, borderaxespad=0.2,
            )  # fmt: skip
        _inside(made, axes, [(bar.start, bar.stop, at[bar.row], bar.text, bar.ink) for bar in bars])
    return made


def _inside(made: Figure, ax: Axes, texts: Iterable[tuple[float, float, float, str, str]]) -> None:
    """Write texts into those bars that are wide enough."""
    made.draw_without_rendering()
    for start, stop, row, text, ink in texts:
        if text:
            label = ax.text((start + stop) / 2, row, text, color=ink, ha="center", va="center", weight="bold")
            label.set_in_layout(False)
            left, right = (ax.transData.transform((x, 0))[0] for x in (start, stop))
            if label.get_window_extent().width > right - left:
                label.remove()


class Cell(NamedTuple):
    """A cell of a grid; ``column`` is its left edge."""

    row: int
    column: float
    text: str = ""
    color: str = TINT
    ink: str = INK
    width: float = 1.0


def grid(
    cells: Iterable[Cell],
    rows: Sequence[str],
    columns: Mapping[str, float] | Sequence[str] = (),
    *,
    height: float = 0.0,
    monospace: bool = False,
    rotation: float = 0,
    ax: Axes | None = None,
) -> Figure:
    """Draw coloured cells with texts, and return the figure.

    Parameters
    ----------
    cells
        The cells; the rest of the grid stays empty.
    rows
        Labels of the rows.
    columns
        Labels of columns of width 1, or labels with their x positions.
    height
        Height of a new figure in inches.
    """
    cells = list(cells)
    heads = columns if isinstance(columns, Mapping) else {name: place + 0.5 for place, name in enumerate(columns)}
    with drawing(ax, height=height or 0.4 * len(rows) + 0.3 + 0.25 * bool(heads), width=WIDTH) as (made, axes):
        for one in cells:
            box = Rectangle((one.column + 0.03, one.row + 0.1), one.width - 0.06, 0.8, fc=one.color, lw=0)
            axes.add_patch(box)
            axes.text(
                one.column + one.width / 2, one.row + 0.5, one.text, color=one.ink, ha="center", va="center", fontsize=9
            )
        axes.set_xlim(0, max((one.column + one.width for one in cells), default=1))
        axes.set_ylim(len(rows), 0)
        bare(axes)
        axes.set_xticks(list(heads.values()), list(heads), rotation=rotation)
        axes.xaxis.tick_top()
        family: Any = {"family": "monospace"} if monospace else {}
        axes.set_yticks([row + 0.5 for row in range(len(rows))], list(rows), **family)
    return made
