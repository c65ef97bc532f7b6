"""Figures of an observer's records or a traced driver's calls: memory over time, and its reuse."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from streamalloc.driver import Call
from streamalloc.observing import Happening, Observer, Phase
from streamalloc.plots.style import (
    ADDRESSES,
    GREY,
    INK,
    RED,
    RESERVED,
    TINT,
    USED,
    MiB,
    bare,
    drawing,
    figure,
    inside,
    sizes,
)


def memory(of: Observer) -> Figure:
    """Draw the allocated bytes over time, with the phases above; return the figure.

    The observer must keep its history, which is the default.
    """
    happened, phases = of.history, [one for one in of.phases if one.ended is not None]
    starts = [one.time for one in happened] + [one.began for one in phases]
    zero = min(starts, default=0)
    depth = 1 + max((one.path.count("/") for one in phases), default=-1)
    made, axes = figure(
        1 + bool(phases), 1, height=2.6 + 0.36 * depth, sharex=True,
        height_ratios=[0.36 * depth, 2.2] if phases else [1],
    )  # fmt: skip
    ax = axes[-1, 0]
    with drawing(ax):
        x, y, failures = [0.0], [0.0], []
        for one in happened:
            now = (one.time - zero) / 1e6
            if one.action == "failure":
                failures.append(now)
                continue
            change = one.allocation.nbytes / MiB
            x.append(now)
            y.append(y[-1] + (change if one.action == "allocate" else -change))
        end = max([x[-1], *((one.ended - zero) / 1e6 for one in phases if one.ended is not None)])
        x.append(max(end, x[-1]))
        y.append(y[-1])
        ax.fill_between(x, y, step="post", color=RESERVED, lw=0)
        ax.step(x, y, where="post", color=USED, lw=1.6)
        if failures:  # an empty plot would still change the limits
            ax.plot(failures, [0] * len(failures), "x", color=RED, ms=7, mew=2, clip_on=False)
        sizes(ax)
        ax.set_xlim(0, x[-1] or 1)
        ax.set_ylim(0, 1.12 * max(y) or 1)
        ax.set_xlabel("milliseconds")
        highest = max(range(len(y)), key=y.__getitem__)
        ax.set_title("Allocated, in MiB")
        ax.set_title(f"at most {y[highest]:,.1f}", loc="right", color=GREY, weight="normal")
    if phases:
        axes[0, 0].set_xlim(0, x[-1] or 1)
        with drawing(axes[0, 0]):
            _phases(made, axes[0, 0], phases, zero)
    return made


def _phases(made: Figure, ax: Axes, phases: Sequence[Phase], zero: int) -> None:
    texts = []
    for number, one in enumerate(phases):
        row = one.path.count("/")
        start, stop = ((at - zero) / 1e6 for at in (one.began, one.ended or one.began))
        ax.barh(row, stop - start, 0.88, left=start, color=(RESERVED, TINT)[number % 2] if row else "#b9c9dc")
        texts.append((start, stop, row, f"{one.name}: {one.peak / MiB:,.0f} MiB", INK))
    bare(ax)
    ax.set_ylim(max(row for _, _, row, *_ in texts) + 0.5, -0.5)
    ax.tick_params(labelbottom=False)
    ax.set_title("Phases, and the most that was allocated during each")
    inside(made, ax, texts)


class Life(NamedTuple):
    """An allocation, from its allocate call to its free call; ``start`` and ``stop`` count calls."""

    address: int
    nbytes: int
    start: int
    stop: int | None
    stream: int
    why: str
    """Ordering that permitted the reuse, one of ``WHY``; empty: new memory."""


SAME, SYNCHRONISED, EVENT, OTHER = (
    "same stream",
    "the host had synchronised",
    "an event orders them",
    "the free had run, or the driver waits for it",
)
WHY = {SAME: GREY, SYNCHRONISED: "#5f9467", EVENT: INK, OTHER: RED}


class _Freed(NamedTuple):
    """Freed memory, with the streams that are ordered after the free and the reason for each."""

    address: int
    nbytes: int
    stream: int
    after: dict[int, str]


def lives(of: Observer | Iterable[Call]) -> list[Life]:
    """Return the allocations, each with the reason why it could reuse freed memory.

    Parameters
    ----------
    of
        Calls of :func:`streamalloc.driver.traced`, which include events and synchronizations; or an observer, whose
        records only show whether the stream is the same.
    """
    if isinstance(of, Observer):
        return _lives(_steps(of.history))
    return _lives(_steps_of_calls(of))


_Step = tuple[str, tuple[int, ...]]
"""Kind of a call, then (address, size, stream), (stream, event), (stream,), (event,) or ()."""


def _steps(happened: Iterable[Happening]) -> list[_Step]:
    return [
        (one.action, (one.allocation.address, one.allocation.nbytes, one.stream))
        for one in happened
        if one.action != "failure"
    ]


_ALLOCATIONS = {"cuMemAllocAsync": 1, "cuMemAllocFromPoolAsync": 2}
"""Position of the stream in the arguments."""
_ORDERINGS = {
    "cuEventRecord": ("record", (1, 0)),
    "cuStreamWaitEvent": ("wait", (0, 1)),
    "cuStreamSynchronize": ("synchronise", (0,)),
    "cuEventSynchronize": ("synchronise event", (0,)),
    "cuCtxSynchronize": ("synchronise", ()),
}
"""Kind of step, and the positions of its arguments."""


def _steps_of_calls(calls: Iterable[Call]) -> list[_Step]:
    steps: list[_Step] = []
    sizes_: dict[int, int] = {}
    for call in calls:
        if int(call.answer[0]):
            continue
        if call.name in _ALLOCATIONS and int(call.answer[1]):
            address = int(call.answer[1])
            sizes_[address] = int(call.args[0])
            steps.append(("allocate", (address, sizes_[address], int(call.args[_ALLOCATIONS[call.name]] or 0))))
        elif call.name == "cuMemFreeAsync" and int(call.args[0]) in sizes_:
            address = int(call.args[0])
            steps.append(("free", (address, sizes_[address], int(call.args[1] or 0))))
        elif call.name in _ORDERINGS:
            kind, positions = _ORDERINGS[call.name]
            steps.append((kind, tuple(int(call.args[position] or 0) for position in positions)))
    return steps


def _lives(steps: Sequence[_Step]) -> list[Life]:
    found: list[Life] = []
    live: dict[int, int] = {}
    freed: list[_Freed] = []
    # By event: the freed memory whose free precedes the event.
    marks: dict[int, list[_Freed]] = {}
    for number, (kind, args) in enumerate(steps):
        if kind == "allocate":
            address, nbytes, stream = args
            former = [one for one in freed if one.address < address + nbytes and address < one.address + one.nbytes]
            reasons = [one.after.get(stream, one.after.get(-1, OTHER)) for one in former]
            # If the memory of several frees is reused, the weakest reason counts.
            why = max(reasons, key=list(WHY).index, default="")
            freed = [one for one in freed if one not in former]
            live[address] = len(found)
            found.append(Life(address, nbytes, number, None, stream, why))
        elif kind == "free" and args[0] in live:
            address, nbytes, stream = args
            at = live.pop(address)
            found[at] = found[at]._replace(stop=number)
            freed.append(_Freed(address, nbytes, stream, {stream: SAME}))
        elif kind == "record":
            marks[args[1]] = [one for one in freed if args[0] in one.after]
        elif kind == "wait":
            for one in marks.get(args[1], ()):
                one.after.setdefault(args[0], EVENT)
        elif kind == "synchronise":
            for one in freed:
                if not args or args[0] in one.after:
                    one.after.setdefault(-1, SYNCHRONISED)
        elif kind == "synchronise event":
            for one in marks.get(args[0], ()):
                one.after.setdefault(-1, SYNCHRONISED)
    return found


def reuse(of: Observer | Iterable[Call], *, ax: Axes | None = None) -> Figure:
    """Draw the allocations as boxes over calls and addresses, and return the figure.

    The height of a box is its size, its colour the stream. The colour of its left edge is the reason why it could reuse
    freed memory; ``of`` is as for :func:`lives`. Unused addresses are left out.
    """
    found = lives(of)
    with drawing(ax, height=4.2) as (made, axes):
        end = 1 + max([one.stop or one.start for one in found], default=0)
        places = _packed(found)
        streams = {stream: number for number, stream in enumerate(dict.fromkeys(one.stream for one in found))}
        for one in found:
            y, height = places[one.address], one.nbytes / MiB
            left, right = one.start, end if one.stop is None else one.stop
            color = ADDRESSES[streams[one.stream] % len(ADDRESSES)]
            axes.add_patch(Rectangle((left, y), right - left, height, fc=color, ec="white", lw=0.8, alpha=0.85))
            if one.why:
                axes.plot([left, left], [y, y + height], color=WHY[one.why], lw=3, solid_capstyle="butt", zorder=3)
        axes.set_xlim(0, end)
        axes.set_ylim(0, max((places[one.address] + one.nbytes / MiB for one in found), default=1) * 1.02)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("call")
        axes.set_ylabel("addresses, in MiB")
        handles: list[Any] = [
            Patch(fc=ADDRESSES[number % len(ADDRESSES)], alpha=0.85, label=f"stream {number + 1}")
            for number in list(streams.values())[:8]
        ]
        seen = [why for why in WHY if any(one.why == why for one in found)]
        handles += [Line2D([], [], color=WHY[why], lw=3, label=f"reused, {why}") for why in seen]
        made.legend(handles=handles, loc="outside lower left", ncols=3)
    return made


def _packed(found: Iterable[Life]) -> dict[int, float]:
    """Return the y position of each address in MiB; unused addresses take no space."""
    pieces = sorted({(one.address, one.address + one.nbytes) for one in found})
    places: dict[int, float] = {}
    low = 0.0
    start = stop = 0
    for begin, end in pieces:
        if begin > stop:
            low += (stop - start) / MiB
            start = begin
        stop = max(stop, end)
        places[begin] = low + (begin - start) / MiB
    return places
