"""Figures of the notebooks: pools and ranges call by call, timelines of streams, bars, cells, curves and areas.

All data is measured: the pool's statistics after each step, and the events that each stream has reached.
"""

from __future__ import annotations

import itertools
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from streamalloc import Buffer, Event, PoolStatistics, Stream
from streamalloc.plots import drawing, figure
from streamalloc.plots.ranges import Piece, pieces_of, strip
from streamalloc.plots.style import (
    GREY,
    INK,
    RED,
    RESERVED,
    RESERVED_EDGE,
    TINT,
    USED,
    WIDTH,
    MiB,
    bare,
    inside,
    rows,
    whole_numbers,
)
from streamalloc.vmm import AddressRange, PhysicalMemory

ADDRESSES = ("#3f78b5", "#e0923d", "#8a6fb0", "#5f9467", "#c45d7c", "#4a9aa5", "#a3863c", "#7d8794")
"""Colours of series, in order."""
MINUS = "\N{MINUS SIGN}"
SETTLE = 0.01
"""Seconds in which an idle stream certainly runs a small fill."""


def sizes(ax: Axes) -> None:
    """Set up a y axis of MiB from 0."""
    whole_numbers(ax.yaxis, ax.get_ylim()[1])


class Step(NamedTuple):
    """A call, and the pool's statistics after it."""

    label: str
    after: PoolStatistics


def usage(
    panels: Mapping[str, Sequence[Step]],
    *,
    thresholds: Mapping[str, int] | None = None,
    peaks: bool = False,
    height: float = 1.9,
) -> Figure:
    """Draw a panel for each series of steps: reserved as an area, used as a line, releases as arrows.

    All series have the same calls. ``thresholds`` adds a line at this number of bytes to a panel; ``peaks`` adds the
    high-water marks. ``height`` is that of a panel in inches.
    """
    made, axes = figure(len(panels), 1, height=height * len(panels) + 0.5, sharex=True, sharey=True)
    for ax, (title, steps) in zip(axes[:, 0], panels.items(), strict=True):
        with drawing(ax):
            ax.set_title(title)
            if len(panels) > 1:
                reserved = itertools.pairwise(step.after.reserved // MiB for step in steps)
                grown = [after - before for before, after in reserved if after > before]
                text = f"grew {len(grown)} times, by {sum(grown):,} MiB in all"
                ax.set_title(text, loc="right", color=GREY, weight="normal")
            _usage_panel(ax, steps, peaks)
            if thresholds and title in thresholds:
                level = thresholds[title] / MiB
                ax.axhline(level, color=RED, lw=0.9, ls=(0, (5, 4)))
                ax.text(0.05, level, "threshold", va="bottom", color=RED)
    made.supylabel("MiB", fontsize=10)
    _thin(made, axes[-1, 0])
    for ax, steps in zip(axes[:, 0], panels.values(), strict=True):
        with drawing(ax):
            shown = _SHOWN | (_PEAKS if peaks else {})
            ends = {
                name.replace("_high", ", peak"): (getattr(steps[-1].after, name) / MiB, color)
                for name, color in shown.items()
            }
            end_labels(ax, len(steps), ends)
    return made


def _thin(made: Figure, ax: Axes) -> None:
    """Remove labels of calls so that none overlap: keep every second, every third, and so on."""
    made.draw_without_rendering()
    ticks = ax.get_xticklabels()
    boxes = [tick.get_window_extent() for tick in ticks]
    every = 1
    while any(one.x1 + 3 > other.x0 for one, other in itertools.pairwise(boxes[::every]) if one.width and other.width):
        every += 1
    ax.set_xticks(range(0, len(ticks), every), [tick.get_text() for tick in ticks[::every]])


_SHOWN = {"reserved": RESERVED_EDGE, "used": USED}


_PEAKS = {"reserved_high": RESERVED_EDGE, "used_high": USED}


def _usage_panel(ax: Axes, steps: Sequence[Step], peaks: bool) -> None:
    end = len(steps)
    values = {name: [getattr(step.after, name) / MiB for step in steps] for name in PoolStatistics._fields}
    curves = {name: [*each, each[-1]] for name, each in values.items()}
    x = range(end + 1)
    ax.fill_between(x, curves["reserved"], step="post", color=RESERVED, lw=0)
    ax.step(x, curves["reserved"], where="post", color=RESERVED_EDGE, lw=1)
    ax.step(x, curves["used"], where="post", color=USED, lw=1.8)
    for name, color in _PEAKS.items() if peaks else ():
        ax.step(x, curves[name], where="post", color=color, lw=1.1, ls=(0, (2, 1.5)))
    for at, step in enumerate(steps):
        if step.label and step.label[0] not in "+-":  # neither allocation nor free
            ax.axvline(at, color=GREY, lw=0.8, ls=(0, (1, 2)))
        before, after = curves["reserved"][max(at - 1, 0)], curves["reserved"][at]
        if after < before:
            arrow = {"arrowstyle": "-|>", "color": RED, "lw": 1.2, "shrinkA": 0, "shrinkB": 0}
            ax.annotate("", (at, after), (at, before), arrowprops=arrow)
            ax.text(at + 0.15, (before + after) / 2, f"{MINUS}{before - after:,.0f}", color=RED, va="center")
    lines = max(step.label.count("\n") for step in steps)  # labels of equal height align
    labels = [step.label.replace("-", MINUS) + "\n" * (lines - step.label.count("\n")) for step in steps]
    ax.set_xticks(range(end), labels)
    ax.tick_params(axis="x", length=0)
    ax.set_xlim(-0.2, end)
    sizes(ax)


@dataclass
class Call:
    """A call of the host, on a stream or on none."""

    what: str
    stream: Stream | None
    buffer: Buffer | None
    at: int
    event: Event | None
    end: int | None = None
    """Number of calls when the stream had reached it."""


class Timeline:
    """Record of calls on streams, and of the time at which each stream reached them.

    Time is counted in calls. An event is recorded after each call and queried after later calls. Querying an event
    orders nothing, and has no effect on the reuse of memory.
    """

    def __init__(self, **streams: Stream) -> None:
        self.streams = streams
        self.calls: list[Call] = []
        self.addresses: list[int] = []
        self.buffers: dict[Buffer, int] = {}
        self.outcome = ""

    def note(self, what: str, stream: Stream | None = None, buffer: Buffer | None = None) -> None:
        """Record a call that was just made, and query the events of earlier ones."""
        now = len(self.calls)
        self.calls.append(Call(what, stream, buffer, now, stream.record() if stream else None))
        if what == "allocate" and buffer is not None:
            if buffer.address not in self.addresses:
                self.addresses.append(buffer.address)
            self.buffers[buffer] = self.addresses.index(buffer.address)
            self.outcome = "reused" if len(self.addresses) < len(self.buffers) else "new memory"
        elif what == "out of memory":
            self.outcome = what
        time.sleep(SETTLE)
        for call in self.calls:
            if call.end is None and (call.event is None or call.event.query()):
                call.end = now

    def rows(self) -> list[tuple[str, Stream, Buffer | None]]:
        """Return the rows of a figure: the buffers of each stream, or the stream alone if it has none."""
        rows: list[tuple[str, Stream, Buffer | None]] = []
        for name, stream in self.streams.items():
            mine = [(name, stream, buffer) for buffer in self.buffers if buffer.stream is stream]
            rows += mine or [(name, stream, None)] * bool(self.find(stream=stream))
        return rows

    def find(self, **wanted: object) -> list[Call]:
        """Return the calls with these field values."""
        return [call for call in self.calls if all(getattr(call, name) == value for name, value in wanted.items())]


def timeline(run: Timeline, title: str) -> Figure:
    """Draw one timeline, with every call named; return the figure."""
    with drawing(None, height=2.9) as (made, ax):
        ax.set_title(title)
        _timeline_panel(ax, run, named=True)
        names = {stream: name for name, stream in run.streams.items()}
        labels = [f"{call.what}\n{names[call.stream] if call.stream else 'host'}" for call in run.calls]
        ax.set_xticks([at + 0.5 for at in range(len(labels))], labels)
        ax.tick_params(axis="x", pad=8)
        made.legend(handles=_legend(len(set(run.buffers.values()))), loc="outside lower center", ncols=3)
    return made


def matrix(runs: Mapping[tuple[str, str], Timeline]) -> Figure:
    """Draw a grid of timelines, a row for each situation, a column for each policy; return the figure."""
    situations, policies = (list(dict.fromkeys(names)) for names in zip(*runs, strict=True))
    made, grid = figure(len(situations), len(policies), height=1.55 * len(situations) + 0.6, width=10.4)
    longest = max(len(run.calls) for run in runs.values())
    colors = {"reused": ADDRESSES[0], "new memory": ADDRESSES[1], "out of memory": RED}
    with drawing(grid[0, 0]):
        for (situation, policy), run in runs.items():
            ax = grid[situations.index(situation), policies.index(policy)]
            _timeline_panel(ax, run, named=False)
            ax.set_title(run.outcome, loc="right", color=colors[run.outcome], fontweight="bold", fontsize=10, pad=2)
            ax.set_xlim(0, longest)
            ax.set_xticks([])
            if run.outcome == "reused":
                ax.set_facecolor(TINT)
            if policy != policies[0]:
                ax.set_yticks([])
        for ax, policy in zip(grid[0], policies, strict=True):
            name = textwrap.fill(policy.replace("_", " "), 20)
            ax.annotate(name, (0, 1), (0, 20), xycoords="axes fraction", textcoords="offset points", fontweight="bold")
        for ax, situation in zip(grid[:, 0], situations, strict=True):
            ax.set_ylabel(situation, rotation=0, ha="right", va="center", ma="left", labelpad=10)
        made.legend(handles=_legend(), loc="outside lower center", ncols=3)
    return made


def _timeline_panel(ax: Axes, run: Timeline, named: bool) -> None:
    end, height = len(run.calls), 0.56
    rows = run.rows()

    def box(y: float, start: int, stop: int, **style: Any) -> None:
        ax.add_patch(Rectangle((start, y - height / 2), stop - start, height, **style))

    for y, (_, stream, buffer) in enumerate(rows):
        for call in run.find(what="out of memory", stream=stream):
            ax.plot(call.at + 0.5, y, "x", color=RED, ms=7, mew=2)
        if buffer is None:
            continue
        color = ADDRESSES[min(run.buffers[buffer], 1)]
        allocate, fill, free = (run.find(what=what, buffer=buffer)[0] for what in ("allocate", "fill", "free"))
        begins, filled, ends = (end if call.end is None else call.end for call in (allocate, fill, free))
        box(y, allocate.at, begins, fc="white", ec=color, lw=1.2)
        box(y, begins, ends, fc=color, ec=color, lw=1.2)
        if ends > free.at:
            box(y, max(free.at, begins), ends, fill=False, hatch="////", lw=0)
        ax.plot(filled + 0.5, y, "o", mfc="white", mec=INK, mew=0.5, ms=6 if named else 4)
    for stream in run.streams.values():
        held = [call for call in run.find(stream=stream) if call.end is None or call.end > call.at]
        if not held:
            continue
        start, stop = held[0].at, max(end if call.end is None else call.end for call in held)
        last_row = max(y for y, row in enumerate(rows) if row[1] is stream)
        below = last_row + height / 2 + 0.1
        ax.plot([start, stop], [below, below], color=GREY, lw=4 if named else 3, solid_capstyle="butt")
        why = {"hold": "held by the gate", "wait": "waits for the event"}.get(held[0].what, "waits")
        if named:
            ax.text((start + stop) / 2, below + 0.1, why, color=GREY, ha="center", va="top")
        if held[0].what in ("wait", "allocate"):  # the arrow comes from the free in the row above
            style = "-" if held[0].what == "wait" else (0, (2, 1.5))
            arrow = {"arrowstyle": "->", "color": INK, "lw": 1, "ls": style, "shrinkA": 0, "shrinkB": 0}
            ax.annotate("", (stop, last_row - height / 2), (stop, last_row - 1 + height / 2), arrowprops=arrow)
    ax.set_xlim(0, end)
    ax.set_ylim(len(rows) - 0.4, -0.45)
    ax.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    ax.tick_params(length=0)
    ax.spines[["left", "bottom"]].set_visible(False)


def _legend(memories: int = 2) -> list[Patch | Line2D]:
    first, other = ADDRESSES[:2]
    return [
        Patch(fc=first, ec=first, label="memory of the first allocation"),
        *[Patch(fc=other, ec=other, label="other memory")][: memories - 1],
        Patch(fc="white", ec=first, label="allocated, not reached by the stream"),
        Patch(fc=first, ec="white", hatch="////", label="freed, not reached by the stream"),
        Line2D([], [], ls="", marker="o", mfc="white", mec=INK, mew=0.5, label="fill has run"),
        Line2D([], [], color=GREY, lw=4, label="stream is blocked"),
    ]


def curves(
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    *,
    xlabel: str = "",
    log: Sequence[str] = (),
    steps: Sequence[str] = (),
    height: float = 3.5,
) -> Figure:
    """Draw named curves in panels, and return the figure. A name has the same colour in all panels.

    Parameters
    ----------
    panels
        By title and name: x values and y values.
    log, steps
        Titles of panels with a logarithmic y axis, and of panels drawn as steps.
    height
        Height of the figure in inches.
    """
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    colors = dict(zip(names, ("#1f4e86", "#b3402e", *ADDRESSES[1:]), strict=False))
    made, grid_ = figure(1, len(panels), height=height)
    for ax, (title, panel) in zip(grid_[0], panels.items(), strict=True):
        with drawing(ax):
            ax.set_title(title)
            for name, (x, y) in panel.items():
                if title in steps:
                    ax.step(x, y, color=colors[name], lw=1.8)
                else:
                    ax.plot(x, y, "o-" if len(x) < 40 else "-", color=colors[name], ms=4, lw=1.4)
            ax.set_xlabel(xlabel)
            ax.set_xlim(0, None)
            if title in log:
                ax.set_yscale("log")
                ax.yaxis.set_major_formatter("{x:g}")
            else:
                ax.set_ylim(0, None)
                ax.yaxis.set_major_formatter("{x:,.4g}")
    made.draw_without_rendering()
    for ax, panel in zip(grid_[0], panels.values(), strict=True):
        with drawing(ax):
            ends = {name: (float(y[-1]), colors[name]) for name, (_, y) in panel.items()}
            end_labels(ax, max(float(x[-1]) for x, _ in panel.values()), ends)
    return made


def areas(
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    calls: Sequence[str],
    *,
    lines: Mapping[str, Sequence[float]] | None = None,
    height: float = 5.2,
) -> Figure:
    """Draw stacked areas over a sequence of calls, in panels, and return the figure.

    Parameters
    ----------
    panels
        By title and name: the values after each call, from the lowest area to the highest.
    calls
        Labels of the calls.
    lines
        By title: values of a line over the areas.
    height
        Height of the figure in inches.
    """
    made, axes = figure(len(panels), 1, height=height, sharex=True)
    end = len(calls)
    for ax, (title, named) in zip(axes[:, 0], panels.items(), strict=True):
        with drawing(ax):
            ax.set_title(title)
            base = [0.0] * (end + 1)
            labels = []
            for (name, values), own in zip(named.items(), ADDRESSES, strict=False):
                color = {"used": USED, "free": RESERVED}.get(name, own)
                top = [low + value for low, value in zip(base, [*values, values[-1]], strict=True)]
                ax.fill_between(range(end + 1), base, top, step="post", color=color, alpha=0.85, lw=0)
                for start, stop in _stretches(base[:-1], top[:-1]):
                    ink = INK if color == RESERVED else "white"
                    labels.append(((start + stop) / 2, (base[start] + top[start]) / 2, name, ink))
                base = top
            if lines and title in lines:
                line = [*lines[title], lines[title][-1]]
                ax.step(range(end + 1), line, where="post", color=INK, lw=1.6)
            ax.set_xlim(0, end)
            sizes(ax)
            for x, y, name, ink in labels:
                ax.text(x, y, name, color=ink, weight="bold", ha="center", va="center")
            ax.tick_params(axis="x", length=0)
    axes[-1, 0].set_xticks([at + 0.5 for at in range(end)], calls)
    return made


def _stretches(base: Sequence[float], top: Sequence[float]) -> list[tuple[int, int]]:
    """Return the index ranges in which an area keeps its base and height, and is not empty."""
    stretches = []
    for (low, high), group in itertools.groupby(range(len(base)), key=lambda at: (base[at], top[at])):
        positions = list(group)
        if high > low:
            stretches.append((positions[0], positions[-1] + 1))
    return stretches


def end_labels(ax: Axes, at: float, labels: Mapping[str, tuple[float, str]]) -> None:
    """Write names at the right ends of curves, without overlaps. Set the axis limits first."""
    height = ax.get_window_extent().height
    figure_of: Any = ax.figure
    needed = 1.25 * plt.rcParams["font.size"] * figure_of.dpi / 72 / max(height, 1)
    lowest = -1.0
    for name, (value, color) in sorted(labels.items(), key=lambda item: item[1][0]):
        there = ax.transAxes.inverted().transform(ax.transData.transform((at, value)))[1]
        lowest = max(there, lowest + needed)
        ax.annotate(
            name, (at, lowest), (6, 0), xycoords=("data", "axes fraction"), textcoords="offset points", color=color,
            va="center", weight="bold", annotation_clip=False,
        )  # fmt: skip


class Frame(NamedTuple):
    """A call, and the mappings after it."""

    call: str
    pieces: list[Piece]
    nbytes: int


def frame(call: str, range: AddressRange, names: Mapping[str, PhysicalMemory] | None = None) -> Frame:
    """Return the current mappings of a range; ``names`` labels the physical memory."""
    return Frame(call, pieces_of(range, names or {}), range.nbytes)


def film(frames: Sequence[Frame], *, ax: Axes | None = None) -> Figure:
    """Draw a range after each of several calls, one below the other; return the figure."""
    with drawing(ax, height=0.42 * len(frames) + 0.6) as (made, axes):
        for row, one in enumerate(frames):
            strip(axes, row + 0.14, 0.72, one.pieces, one.nbytes)
        axes.set_xlim(0, max(one.nbytes for one in frames) / MiB)
        axes.set_ylim(len(frames), 0)
        axes.set_xlabel("MiB from the beginning of the range")
        axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 4, 8, 10], integer=True))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        bare(axes)
        axes.set_yticks([row + 0.5 for row in range(len(frames))], [one.call for one in frames], family="monospace")
    return made


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
        inside(made, axes, [(bar.start, bar.stop, at[bar.row], bar.text, bar.ink) for bar in bars])
    return made


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
