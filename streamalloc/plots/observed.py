"""Figures of pools, of an observer's records and of a traced driver's calls; dispatch for the ``plot()`` methods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from streamalloc.core.errors import size_text
from streamalloc.driver import Call
from streamalloc.formats.html import place
from streamalloc.observing import Allocation, Happening, Observer, Phase
from streamalloc.plots import style
from streamalloc.plots.ranges import address_range
from streamalloc.pool import MemoryPool
from streamalloc.vmm import AddressRange, VirtualBuffer


def pool(of: MemoryPool, *, ax: Axes | None = None) -> Figure:
    """Draw the current statistics of a pool, reserved light and used dark, with the peaks as lines.

    :meth:`MemoryPool.plot` draws it into axes of its own; :doc:`/01-memory-pools` shows such pictures.
    """
    now = of.statistics()
    unit, scale = style.unit_of(now.reserved_high)
    with style.drawing(ax, height=1.7) as (made, axes):
        style.rows(axes, ["reserved", "used"])
        bars = (now.reserved, now.reserved_high, style.RESERVED), (now.used, now.used_high, style.USED)
        for row, (value, peak, color) in enumerate(bars):
            axes.barh(row, value / scale, 0.6, fc=color, ec=style.RESERVED_EDGE)
            axes.plot([peak / scale] * 2, [row - 0.4, row + 0.4], color=style.INK, lw=1.6)
            text, end = f"{size_text(value)}, at most {size_text(peak)}", (max(value, peak) / scale, row)
            axes.annotate(text, end, (7, 0), textcoords="offset points", va="center")
        # More than the peak, for the texts.
        style.whole_numbers(axes.xaxis, 1.3 * now.reserved_high / scale)
        axes.set_xlabel(unit)
        axes.set_title(f"Memory pool{f' {of.name!r}' if of.name else ''} of {place(of.location)}", parse_math=False)
    return made


def memory(of: Observer) -> Figure:
    """Draw the allocated bytes over time by tag or pool, with the phases above; return the figure.

    :meth:`observing.Observer.plot` draws it too; :doc:`/05-one-pool` has an example.

    It begins with the first entry of the history, see ``history=`` of :func:`streamalloc.observing.observe`.
    """
    happened, phases = of.history, [one for one in of.phases if one.ended is not None]
    starts = [one.time for one in happened] + [one.began for one in phases]
    zero = min(starts, default=0)
    end = max([one.time for one in happened] + [one.ended or 0 for one in phases], default=0) - zero
    clock, tick = style.unit_of(end, style.TIMES)
    depth = 1 + max((one.path.count("/") for one in phases), default=-1)
    made, axes = style.figure(
        1 + bool(phases), 1, height=2.6 + 0.36 * depth, sharex=True,
        height_ratios=[0.36 * depth, 2.2] if phases else [1],
    )  # fmt: skip
    ax = axes[-1, 0]
    with style.drawing(ax):
        times, amounts, highest = _by_name(happened, of.live)
        unit, scale = style.unit_of(highest)
        x = [(at - zero) / tick for at in times] + [end / tick]
        stacked = [[value / scale for value in (*values, values[-1])] for values in amounts.values()]
        if stacked:
            labels = [str(name or "other") for name in amounts]
            ax.stackplot(x, stacked, labels=labels, step="post", colors=style.USES, lw=0.5)
        failures = [(one.time - zero) / tick for one in happened if one.action == "failure"]
        if failures:  # an empty plot would still change the limits
            ax.plot(
                failures, [0] * len(failures), "x", color=style.RED, ms=7, mew=2, clip_on=False, label="out of memory"
            )
        ax.set_xlim(0, end / tick or 1)
        style.whole_numbers(ax.yaxis, highest / scale)
        ax.set_xlabel(clock if times else "nothing was recorded")
        if not times:
            ax.set_xticks([])
        ax.set_title(f"Allocated, in {unit}")
        ax.set_title(f"at most {size_text(highest)}", loc="right", color=style.GREY, weight="normal")
        if failures or any(amounts):
            style.legend(made, ncols=6)
    if phases:
        axes[0, 0].set_xlim(0, end / tick or 1)
        with style.drawing(axes[0, 0]):
            _phases(made, axes[0, 0], phases, zero, tick)
    return made


def _by_name(happened: Sequence[Happening], live: Iterable[Allocation]) -> tuple[list[int], dict[str, list[int]], int]:
    """Times of the changes; the bytes from then on by tag, else pool, most bytes first; and the most bytes in all."""
    sign = {"allocate": 1, "free": -1}
    changes = [(one.time, _name(one.allocation), sign[one.action] * one.allocation.nbytes)
               for one in happened if one.action in sign]  # fmt: skip
    first = {one.allocation.address: one for one in reversed(happened)}
    before = [one.allocation for one in first.values() if one.action == "free"]
    before += [one for one in live if one.address not in first]
    if changes:
        changes[:0] = [(happened[0].time, _name(one), one.nbytes) for one in before]
    peaks: Counter[str] = Counter()
    now: Counter[str] = Counter()
    highest = 0
    for _, name, nbytes in changes:
        now[name] += nbytes
        peaks[name] = max(peaks[name], now[name])
        highest = max(highest, now.total())
    shown = [name for name, _ in peaks.most_common() if name][: len(style.USES) - 1]
    amounts: dict[str, list[int]] = {name: [] for name in (*shown, *[""] * (len(peaks) > len(shown)))}
    now.clear()
    for _, name, nbytes in changes:
        now[name if name in amounts else ""] += nbytes
        for each, values in amounts.items():
            values.append(now[each])
    return [time for time, _, _ in changes], amounts, highest


def _name(one: Allocation) -> str:
    return one.tag or one.source.name


def _phases(made: Figure, ax: Axes, phases: Sequence[Phase], zero: int, tick: int) -> None:
    texts = []
    for number, one in enumerate(phases):
        row = one.path.count("/")
        start, stop = ((at - zero) / tick for at in (one.began, one.ended or one.began))
        ax.barh(row, stop - start, 0.88, left=start, color=style.PHASES[1 + number % 2 if row else 0], ec="white", lw=1)
        texts.append((start, stop, row, f"{one.name}\n{size_text(one.peak)}", style.INK))
    style.bare(ax)
    ax.set_ylim(max(row for _, _, row, *_ in texts) + 0.5, -0.5)
    ax.tick_params(labelbottom=False)
    ax.set_title("Phases, and the most that was allocated during each")
    style.inside(made, ax, texts)


class Life(NamedTuple):
    """An allocation, from its allocate call to its free call; ``start`` and ``stop`` count calls.

    :func:`lives` makes them.
    """

    address: int
    nbytes: int
    start: int
    stop: int | None
    stream: int
    why: str
    """Ordering that permitted the reuse, one of ``WHY``; empty: new memory."""


SAME, SYNCHRONISED, EVENT = "same stream", "the host had synchronised", "an event orders them"
OTHER = "the free had run, or the driver waits for it"
WHY = {
    SAME: (style.GREY, "-"),
    SYNCHRONISED: (style.INK, (0, (1, 0.6))),
    EVENT: (style.INK, "-"),
    OTHER: (style.RED, "-"),
}
"""Colour and style of the line for each reason."""


class _Freed(NamedTuple):
    """Freed memory, with the streams that are ordered after the free and the reason for each."""

    address: int
    nbytes: int
    stream: int
    after: dict[int, str]


_Step = tuple[str, tuple[int, ...]]
"""Kind of a call, then (address, size, stream), (stream, event), (stream,), (event,) or ()."""


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


def lives(of: Iterable[Call]) -> list[Life]:
    """Return the allocations, each with the reason why it could reuse freed memory.

    Parameters
    ----------
    of
        Calls of :func:`streamalloc.driver.traced`.
    """
    found: list[Life] = []
    live: dict[int, int] = {}
    freed: list[_Freed] = []
    # By event: the freed memory whose free precedes the event.
    marks: dict[int, list[_Freed]] = {}
    for number, (kind, args) in enumerate(_steps_of_calls(of)):
        if kind == "allocate":
            address, nbytes, stream = args
            former = [one for one in freed if one.address < address + nbytes and address < one.address + one.nbytes]
            reasons = [one.after.get(stream, one.after.get(-1, OTHER)) for one in former]
            # If several freed ranges are reused, the weakest reason counts.
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
        elif kind in ("synchronise", "synchronise event"):
            of_event = kind == "synchronise event"
            for one in marks.get(args[0], ()) if of_event else freed:
                if of_event or not args or args[0] in one.after:
                    one.after.setdefault(-1, SYNCHRONISED)
    return found


def reuse(of: Iterable[Call], *, ax: Axes | None = None) -> Figure:
    """Draw the allocations as boxes over calls and addresses, and return the figure.

    The height of a box shows its size, the colour its stream. The colour of its left edge shows why it could reuse
    freed memory. ``of``: as for :func:`lives`. Unused addresses are left out.
    """
    found = lives(of)
    places = _packed(found)
    top = max((places[one.address] + one.nbytes for one in found), default=0)
    unit, scale = style.unit_of(top)
    with style.drawing(ax, height=4.2) as (made, axes):
        end = 1 + max([one.stop or one.start for one in found], default=0)
        streams = {stream: number for number, stream in enumerate(dict.fromkeys(one.stream for one in found))}
        texts, heights = [], []
        for one in found:
            y, height = places[one.address] / scale, one.nbytes / scale
            left, right = one.start, end if one.stop is None else one.stop
            color = style.STREAMS[streams[one.stream] % len(style.STREAMS)]
            axes.add_patch(Rectangle((left, y), right - left, height, fc=color, ec="white", lw=0.8))
            if one.why:
                color, line = WHY[one.why]
                axes.plot([left, left], [y, y + height], color=color, ls=line, lw=3, solid_capstyle="butt", zorder=3)
            texts.append((left, right, y + height / 2, size_text(one.nbytes), style.INK))
            heights.append(height)
        style.whole_numbers(axes.xaxis, end)
        axes.set_xlim(0, end)
        style.whole_numbers(axes.yaxis, top / scale)
        axes.set_xlabel("call" if found else "nothing was recorded")
        axes.set_ylabel(f"addresses, in {unit}")
        handles: list[Any] = [
            Patch(fc=style.STREAMS[number % len(style.STREAMS)], label=f"stream {number + 1}")
            for number in range(min(len(streams), 8))
        ]
        seen = [why for why in WHY if any(one.why == why for one in found)]
        handles += [Line2D([], [], color=WHY[why][0], ls=WHY[why][1], lw=3, label=f"reused, {why}") for why in seen]
        if handles:
            style.legend(made, handles=handles, ncols=3)
        style.inside(made, axes, texts, heights)
    return made


def _packed(found: Iterable[Life]) -> dict[int, int]:
    """Position of each address in bytes; unused addresses take no space."""
    places: dict[int, int] = {}
    low = start = stop = 0
    for begin, end in sorted({(one.address, one.address + one.nbytes) for one in found}):
        if begin > stop:
            low += stop - start
            start = begin
        stop = max(stop, end)
        places[begin] = low + begin - start
    return places


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
