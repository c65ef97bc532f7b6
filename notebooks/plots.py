"""The notebooks' pictures: what a pool holds after each call, and when streams get to their work.

All that is drawn was measured. The curves are what the pool reported after each step, and the timelines are what
events said about how far the streams had come.
"""

from __future__ import annotations

import itertools
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MultipleLocator

import streamalloc as sa

MiB = 1 << 20
MINUS = "\N{MINUS SIGN}"

INK, GREY, TINT = "#24292f", "#6e7781", "#eef4fa"
RESERVED, RESERVED_EDGE, USED, RED = "#cfe0f1", "#7ba3cf", "#1f4e86", "#b3402e"
ADDRESSES = ("#3f78b5", "#e0923d")  # the memory that was handed out first, and any other
SETTLE = 0.01  # seconds: ample for a stream that nothing holds to run a small fill

plt.rcParams.update(
    {
        "figure.facecolor": "white",
        "savefig.facecolor": "white",
        "axes.facecolor": "white",
        "axes.edgecolor": GREY,
        "axes.labelcolor": INK,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
        "figure.dpi": 80,
        "font.size": 10,
        "hatch.color": "white",
        "hatch.linewidth": 1.2,
        "text.color": INK,
        "xtick.color": GREY,
        "ytick.color": GREY,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
    }
)


class Step(NamedTuple):
    """A call, and what the pool reported after it."""

    label: str
    after: sa.PoolStatistics


def taken(steps: Sequence[Step]) -> list[int]:
    """How many MiB the pool took from its device, each time that it grew."""
    reserved = [step.after.reserved // MiB for step in steps]
    return [after - before for before, after in itertools.pairwise(reserved) if after > before]


def usage(
    panels: Mapping[str, Sequence[Step]],
    *,
    thresholds: Mapping[str, int] | None = None,
    peaks: bool = False,
    height: float = 1.9,
) -> Figure:
    """A panel for each series of steps: reserved as an area, used as a line, and what was given back where.

    ``thresholds`` gives panels a line at so many bytes; ``peaks`` draws the high-water marks too.
    """
    figure, grid = plt.subplots(
        len(panels),
        1,
        figsize=(9.4, height * len(panels) + 0.5),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for ax, (title, steps) in zip(grid[:, 0], panels.items(), strict=True):
        ax.set_title(title, fontweight="bold")
        if len(panels) > 1:
            grown = taken(steps)
            ax.set_title(f"grew {len(grown)} times, by {sum(grown)} MiB in all", loc="right", color=GREY)
        _usage_panel(ax, steps, peaks)
        if thresholds and title in thresholds:
            level = thresholds[title] / MiB
            ax.axhline(level, color=RED, lw=0.9, ls=(0, (5, 4)))
            ax.text(0.05, level, "threshold", va="bottom", color=RED)
    figure.supylabel("MiB", fontsize=10)
    return figure


def _usage_panel(ax: Axes, steps: Sequence[Step], peaks: bool) -> None:
    end = len(steps)
    curves = {name: [getattr(s.after, name) / MiB for s in steps] for name in sa.PoolStatistics._fields}
    for values in curves.values():
        values.append(values[-1])
    x = range(end + 1)
    ax.fill_between(x, curves["reserved"], step="post", color=RESERVED, lw=0)
    ax.step(x, curves["reserved"], where="post", color=RESERVED_EDGE, lw=1)
    ax.step(x, curves["used"], where="post", color=USED, lw=1.8)
    shown = {"reserved": RESERVED_EDGE, "used": USED}
    if peaks:
        shown |= {"reserved_high": RESERVED_EDGE, "used_high": USED}
        for name in ("reserved_high", "used_high"):
            ax.step(x, curves[name], where="post", color=shown[name], lw=1.1, ls=(0, (2, 1.5)))
    lowest = 0.0
    for name in sorted(shown, key=lambda name: (curves[name][-1], name == "reserved")):
        lowest = max(curves[name][-1], lowest)  # no two names on top of each other
        text = name.replace("_high", ", peak")
        ax.text(end + 0.1, lowest, text, color=shown[name], va="center", fontweight="bold")
        lowest += 0.09 * max(curves["reserved"])
    for at, step in enumerate(steps):
        if step.label and step.label[0] not in "+-":  # neither an allocation nor a free: synchronise, trim, reset
            ax.axvline(at, color=GREY, lw=0.8, ls=(0, (1, 2)))
        before, after = curves["reserved"][max(at - 1, 0)], curves["reserved"][at]
        if after < before:
            arrow = {"arrowstyle": "-|>", "color": RED, "lw": 1.2, "shrinkA": 0, "shrinkB": 0}
            ax.annotate("", (at, after), (at, before), arrowprops=arrow)
            ax.text(at + 0.15, (before + after) / 2, f"{MINUS}{before - after:.0f}", color=RED, va="center")
    lines = max(step.label.count("\n") for step in steps)  # as many in every label, so that they stand on one line
    labels = [step.label.replace("-", MINUS) + "\n" * (lines - step.label.count("\n")) for step in steps]
    ax.set_xticks(range(end), labels)
    ax.tick_params(axis="x", length=0)
    ax.set_xlim(-0.2, end)
    ax.set_ylim(0, None)
    ax.yaxis.set_major_locator(MultipleLocator(32))


@dataclass
class Call:
    """A call of the host, on one stream or on none."""

    what: str
    stream: sa.Stream | None
    buffer: sa.Buffer | None
    at: int
    event: sa.Event | None
    end: int | None = None
    """When the stream had come to it."""


class Timeline:
    """Notes calls on streams, and asks after every one of them which earlier ones have run.

    The time is the number of calls so far. An event behind each call tells when its stream had come to it: asking an
    event orders nothing, and the driver does not learn of frees by it.
    """

    def __init__(self, **streams: sa.Stream) -> None:
        self.streams = streams
        self.calls: list[Call] = []
        self.addresses: list[int] = []
        self.buffers: dict[sa.Buffer, int] = {}
        self.outcome = ""

    def note(self, what: str, stream: sa.Stream | None = None, buffer: sa.Buffer | None = None) -> None:
        """Note a call that was just made."""
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

    def rows(self) -> list[tuple[str, sa.Stream, sa.Buffer | None]]:
        """What a picture has rows for: the buffers of each stream, and streams that got none."""
        rows: list[tuple[str, sa.Stream, sa.Buffer | None]] = []
        for name, stream in self.streams.items():
            mine = [(name, stream, buffer) for buffer in self.buffers if buffer.stream is stream]
            rows += mine or [(name, stream, None)] * bool(self.find(stream=stream))
        return rows

    def find(self, **wanted: object) -> list[Call]:
        """The calls that have these fields."""
        return [call for call in self.calls if all(getattr(call, name) == value for name, value in wanted.items())]


def timeline(run: Timeline, title: str) -> Figure:
    """One run, with every call named."""
    figure, ax = plt.subplots(figsize=(9.4, 2.9), layout="constrained")
    ax.set_title(title, fontweight="bold")
    _timeline_panel(ax, run, named=True)
    names = {stream: name for name, stream in run.streams.items()}
    labels = [f"{call.what}\n{names[call.stream] if call.stream else 'host'}" for call in run.calls]
    ax.set_xticks([at + 0.5 for at in range(len(labels))], labels)
    ax.tick_params(axis="x", pad=8)
    figure.legend(handles=_legend(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def matrix(runs: Mapping[tuple[str, str], Timeline]) -> Figure:
    """Small multiples: a row for each situation, a column for each choice of policies."""
    situations, policies = (list(dict.fromkeys(names)) for names in zip(*runs, strict=True))
    figure, grid = plt.subplots(
        len(situations),
        len(policies),
        figsize=(10.4, 1.55 * len(situations) + 0.6),
        squeeze=False,
        layout="constrained",
    )
    longest = max(len(run.calls) for run in runs.values())
    colors = {"reused": ADDRESSES[0], "new memory": ADDRESSES[1], "out of memory": RED}
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
    figure.legend(handles=_legend(), loc="outside lower center", ncols=3, frameon=False)
    return figure


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
        if held[0].what in ("wait", "allocate"):  # what it waits for is the free in the row above
            style = "-" if held[0].what == "wait" else (0, (2, 1.5))
            arrow = {"arrowstyle": "->", "color": INK, "lw": 1, "ls": style, "shrinkA": 0, "shrinkB": 0}
            ax.annotate("", (stop, last_row - height / 2), (stop, last_row - 1 + height / 2), arrowprops=arrow)
    ax.set_xlim(0, end)
    ax.set_ylim(len(rows) - 0.4, -0.45)
    ax.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    ax.tick_params(length=0)
    ax.spines[["left", "bottom"]].set_visible(False)


def _legend() -> list[Patch | Line2D]:
    first, other = ADDRESSES
    return [
        Patch(fc=first, ec=first, label="the memory handed out first"),
        Patch(fc=other, ec=other, label="other memory"),
        Patch(fc="white", ec=first, label="allocated, but its stream is not there yet"),
        Patch(fc=first, ec="white", hatch="////", label="freed, but its stream is not there yet"),
        Line2D([], [], ls="", marker="o", mfc="white", mec=INK, mew=0.5, label="fill has run"),
        Line2D([], [], color=GREY, lw=4, label="stream is held up"),
    ]
