"""Figures of pools, observers, traced calls and virtual memory, and their style: colours, fonts, axes."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Polygon, Rectangle
from matplotlib.ticker import MaxNLocator

from streamalloc.core.errors import size_text
from streamalloc.core.properties import MemLocation, checked_type
from streamalloc.driver import Call
from streamalloc.formats.html import color_of, place
from streamalloc.observing import Allocation, Happening, Observer, Phase
from streamalloc.pool import MemoryPool
from streamalloc.vmm import AddressRange, PhysicalMemory, VirtualBuffer
from streamalloc.vmm.internal import rights_text

MiB = 1 << 20
WIDTH = 9.4
"""Width of a figure in inches, which fits into a notebook."""

# A colour has the same meaning in all figures. The colours of locations are in streamalloc.formats.html.
INK, GREY = "#24292f", "#6e7781"
RESERVED, RESERVED_EDGE, USED = "#cfe0f1", "#7ba3cf", "#1f4e86"
RED = "#b3402e"
"""Colour of failures, and of reuse that depends on timing."""
USES = (USED, "#93b1d6", "#4c74a8", "#7599c6", "#2c548a", "#5f87bb")
"""Colours of allocated memory; each tag or pool gets the next colour."""
STREAMS = ("#9fd3c7", "#f4d58d", "#d8b4e2", "#b7d58f", "#f2b5a7", "#c8c2b4", "#e6a4c4", "#aeb9c7")
"""Colours of streams, in the order in which the streams appear."""
PHASES = ("#d5dae0", "#e4e7eb", "#eef0f3")
"""Colours of phases: one colour for outermost phases, and two alternating colours for inner phases."""

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
"""Settings (``rcParams``) of matplotlib while a figure is drawn."""


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Return a context manager that sets the style of figures within its ``with`` block.

    ``plt.rc_context`` is not used, because it would also undo the settings that a notebook's backend makes with its
    first figure.
    """
    before = {name: plt.rcParams[name] for name in STYLE}
    plt.rcParams.update(STYLE)
    try:
        yield
    finally:
        plt.rcParams.update(before)


class Picture(Figure):
    """Figure that a notebook cell shows only once, even if the figure is the value of the cell's last line.

    The notebook's backend shows all open figures at the end of a cell. The value of the last line would be shown a
    second time, so the figure is closed when it is displayed as a value.
    """

    def _ipython_display_(self) -> None:
        if "inline" in plt.get_backend():
            plt.close(self)
        raise NotImplementedError("IPython draws the figure itself")


class Unit(NamedTuple):
    """Unit of the values of an axis. ``scale``: number of bytes or nanoseconds in one unit."""

    name: str
    scale: int


_UNITS = (Unit("GiB", 1 << 30), Unit("MiB", MiB), Unit("KiB", 1 << 10), Unit("bytes", 1))
TIMES = (Unit("seconds", 10**9), Unit("milliseconds", 10**6), Unit("microseconds", 1000))


def unit_of(most: float, units: Sequence[Unit] = _UNITS) -> Unit:
    """Return the largest unit in which ``most`` (bytes or nanoseconds) is at least 2, or the smallest unit if there is
    none. For 0, return the second unit.
    """
    return next((one for one in units if most >= 2 * one.scale), units[-1]) if most else units[1]


def whole_numbers(axis: Axis, most: float) -> None:
    """Scale an axis from 0 to a little above ``most``, with at most six labels, which are whole numbers."""
    axis.set_view_interval(0, 1.08 * max(most, 1), ignore=True)
    axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 4, 5, 8, 10], integer=True))
    axis.set_major_formatter("{x:,.0f}")


def figure(
    nrows: int = 1, ncols: int = 1, *, height: float = 2.9, width: float = WIDTH, **options: Any
) -> tuple[Figure, Any]:
    """Create a figure in the package's style. Returns the figure, and its axes as a 2-D array.

    ``height`` and ``width`` are in inches. ``options`` are passed to ``plt.subplots``.

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
    """Return a context manager that sets the style. The value of its ``with`` block is a tuple: figure and axes. The
    axes are ``ax``, or new axes of a new figure if ``ax`` is None.

    ``options``: arguments of :func:`figure` for a new figure.
    """
    with styled():
        if ax is None:
            made, grid = figure(**options)
            yield made, grid[0, 0]
        else:
            whole: Any = ax.figure
            yield whole, ax


def bare(ax: Axes) -> None:
    """Remove the frame, the tick marks and the labels of the vertical axis, which would have no meaning in the plot."""
    ax.spines[:].set_visible(False)
    ax.set_yticks([])
    ax.tick_params(length=0)


def rows(ax: Axes, names: Sequence[str]) -> None:
    """Label the rows of a plot with names, the first name on top. A row is one unit high."""
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def legend(made: Figure, **options: Any) -> None:
    """Write the legend of a figure below its axes. Dollar signs in names are not read as formulas."""
    for text in made.legend(loc="outside lower left", **options).get_texts():
        text.set_parse_math(False)


def inside(
    made: Figure,
    ax: Axes,
    texts: Iterable[tuple[float, float, float, str, str]],
    heights: Iterable[float] = itertools.repeat(1),
) -> None:
    """Write a text into each bar: the whole text, or its first line, or nothing, depending on the size of the bar.

    ``texts`` has for each bar: start, stop, row, text, and colour of the text. ``heights``: heights of the bars in
    rows.
    """
    made.draw_without_rendering()
    zero = ax.transData.transform((0, 0))
    for (start, stop, row, text, ink), height in zip(texts, heights, strict=False):
        width, tall = map(abs, ax.transData.transform((stop - start, height)) - zero)
        for shown in (text.replace("\n", ": "), text.partition("\n")[0]) if text else ():
            # A character is at least 3 pixels wide. To measure a text is slow, so a text that cannot fit is skipped
            # before.
            if 3 * len(shown) > width:
                continue
            label = ax.text((start + stop) / 2, row, shown, color=ink, ha="center", va="center", weight="bold")
            label.set(in_layout=False, parse_math=False)
            box = label.get_window_extent()
            if box.width <= width and box.height <= tall:
                break
            label.remove()


def pool(of: MemoryPool, *, ax: Axes | None = None) -> Figure:
    """Draw the current statistics of a pool: reserved and used memory as bars, and their peaks as lines.

    Returns the figure: that of the axes ``ax``, or a new one. Raises :class:`ClosedError` for a closed pool.
    :meth:`MemoryPool.plot` draws the same. :doc:`/01-memory-pools` shows examples.
    """
    now = checked_type("of", of, MemoryPool).statistics()
    unit, scale = unit_of(now.reserved_high)
    with drawing(ax, height=1.7) as (made, axes):
        rows(axes, ["reserved", "used"])
        bars = (now.reserved, now.reserved_high, RESERVED), (now.used, now.used_high, USED)
        for row, (value, peak, color) in enumerate(bars):
            axes.barh(row, value / scale, 0.6, fc=color, ec=RESERVED_EDGE)
            axes.plot([peak / scale] * 2, [row - 0.4, row + 0.4], color=INK, lw=1.6)
            text, end = f"{size_text(value)}, at most {size_text(peak)}", (max(value, peak) / scale, row)
            axes.annotate(text, end, (7, 0), textcoords="offset points", va="center")
        # The texts are to the right of the bars, so the axis must extend beyond the peak.
        whole_numbers(axes.xaxis, 1.3 * now.reserved_high / scale)
        axes.set_xlabel(unit)
        axes.set_title(f"Memory pool{f' {of.name!r}' if of.name else ''} of {place(of.location)}", parse_math=False)
    return made


def memory(of: Observer) -> Figure:
    """Draw the allocated bytes of an observer over time, by tag or pool, and its phases above. Returns the figure.

    :meth:`observing.Observer.plot` draws the same figure; :doc:`/05-one-pool` has an example. The figure begins with
    the first entry of the history (``history=`` of :func:`streamalloc.observing.observe`). Five tags or pools, those
    with the highest peaks, have areas of their own; the area "other" has the other bytes.
    """
    happened, phases = checked_type("of", of, Observer).history, [one for one in of.phases if one.ended is not None]
    starts = [one.time for one in happened] + [one.began for one in phases]
    zero = min(starts, default=0)
    end = max([one.time for one in happened] + [one.ended or 0 for one in phases], default=0) - zero
    clock, tick = unit_of(end, TIMES)
    depth = 1 + max((one.path.count("/") for one in phases), default=-1)
    made, axes = figure(
        1 + bool(phases), 1, height=2.6 + 0.36 * depth, sharex=True,
        height_ratios=[0.36 * depth, 2.2] if phases else [1],
    )  # fmt: skip
    ax = axes[-1, 0]
    with drawing(ax):
        times, amounts, highest = _by_name(happened, of.live)
        unit, scale = unit_of(highest)
        x = [(at - zero) / tick for at in times] + [end / tick]
        stacked = [[value / scale for value in (*values, values[-1])] for values in amounts.values()]
        if stacked:
            labels = [str(name or "other") for name in amounts]
            ax.stackplot(x, stacked, labels=labels, step="post", colors=USES, lw=0.5)
        failures = [(one.time - zero) / tick for one in happened if one.action == "failure"]
        if failures:  # A plot without points would change the limits of the axes.
            ax.plot(failures, [0] * len(failures), "x", color=RED, ms=7, mew=2, clip_on=False, label="out of memory")
        ax.set_xlim(0, end / tick or 1)
        whole_numbers(ax.yaxis, highest / scale)
        ax.set_xlabel(clock if times else "nothing was recorded")
        if not times:
            ax.set_xticks([])
        ax.set_title(f"Allocated, in {unit}")
        ax.set_title(f"at most {size_text(highest)}", loc="right", color=GREY, weight="normal")
        if failures or any(amounts):
            legend(made, ncols=6)
    if phases:
        axes[0, 0].set_xlim(0, end / tick or 1)
        with drawing(axes[0, 0]):
            _phases(made, axes[0, 0], phases, zero, tick)
    return made


def _by_name(happened: Sequence[Happening], live: Iterable[Allocation]) -> tuple[list[int], dict[str, list[int]], int]:
    """Return three results: the times of the changes in nanoseconds, the bytes after each change by tag or pool, and
    the most bytes of all together.

    Tags and pools beyond the first five, in order of peak bytes, are added up under ``""``.
    """
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
    shown = [name for name, _ in peaks.most_common() if name][: len(USES) - 1]
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
        ax.barh(row, stop - start, 0.88, left=start, color=PHASES[1 + number % 2 if row else 0], ec="white", lw=1)
        texts.append((start, stop, row, f"{one.name}\n{size_text(one.peak)}", INK))
    bare(ax)
    ax.set_ylim(max(row for _, _, row, *_ in texts) + 0.5, -0.5)
    ax.tick_params(labelbottom=False)
    ax.set_title("Phases, and the most that was allocated during each")
    inside(made, ax, texts)


class Life(NamedTuple):
    """Allocation, from the call that allocates to the call that frees. :func:`lives` returns a list of these objects.

    ``start`` and ``stop`` are indices of these calls. Only successful calls count, of functions that allocate, free,
    record and wait in stream order (``cuMemAllocAsync``, ``cuStreamSynchronize`` and others). ``stop`` is None for
    memory that was not freed.
    """

    address: int
    nbytes: int
    start: int
    stop: int | None
    stream: int
    why: str
    """Why the driver could reuse freed memory: a key of ``WHY``; empty for memory that was not used before."""


SAME, SYNCHRONISED, EVENT = "same stream", "the host had synchronised", "an event orders them"
OTHER = "the free had run, or the driver waits for it"
WHY = {SAME: (GREY, "-"), SYNCHRONISED: (INK, (0, (1, 0.6))), EVENT: (INK, "-"), OTHER: (RED, "-")}
"""Colour and style of the line for each reason why freed memory could be reused. Later reasons are weaker."""


class _Freed(NamedTuple):
    """Memory that a call has freed on ``stream``, and that the driver may reuse."""

    address: int
    nbytes: int
    stream: int
    after: dict[int, str]
    """By handle of each stream that is ordered after the free: the reason, a key of ``WHY``. The key -1 is for all
    streams.
    """


_Step = tuple[str, tuple[int, ...]]
"""Kind of a call, and its handles or numbers: (address, bytes, stream), (stream, event), (stream,), (event,) or ()."""


_ALLOCATIONS = {"cuMemAllocAsync": 1, "cuMemAllocFromPoolAsync": 2}
"""Driver functions that allocate, with the position of the stream in their arguments."""
_ORDERINGS = {
    "cuEventRecord": ("record", (1, 0)),
    "cuStreamWaitEvent": ("wait", (0, 1)),
    "cuStreamSynchronize": ("synchronise", (0,)),
    "cuEventSynchronize": ("synchronise event", (0,)),
    "cuCtxSynchronize": ("synchronise", ()),
}
"""Driver functions that order work, with the kind for ``_Step`` and the positions of its handles in the arguments."""


def _steps(calls: Iterable[Call]) -> Iterator[_Step]:
    sizes: dict[int, int] = {}
    for call in calls:
        if int(call.answer[0]):
            continue
        if call.name in _ALLOCATIONS and int(call.answer[1]):
            address = int(call.answer[1])
            sizes[address] = int(call.args[0])
            yield "allocate", (address, sizes[address], int(call.args[_ALLOCATIONS[call.name]] or 0))
        elif call.name == "cuMemFreeAsync" and int(call.args[0]) in sizes:
            address = int(call.args[0])
            yield "free", (address, sizes[address], int(call.args[1] or 0))
        elif call.name in _ORDERINGS:
            kind, positions = _ORDERINGS[call.name]
            yield kind, tuple(int(call.args[position] or 0) for position in positions)


def lives(of: Iterable[Call]) -> list[Life]:
    """Return the allocations of a traced driver in the order of the calls, each with the reason why the driver could
    reuse freed memory for it. Only successful calls of ``cuMemAllocAsync`` and ``cuMemAllocFromPoolAsync`` count.

    Parameters
    ----------
    of
        Calls that a driver of :func:`streamalloc.driver.traced` has recorded (``driver.calls``).
    """
    found: list[Life] = []
    live: dict[int, int] = {}
    freed: list[_Freed] = []
    # By event: freed memory whose free precedes the last record.
    marks: dict[int, list[_Freed]] = {}
    for number, (kind, args) in enumerate(_steps(of)):
        if kind == "allocate":
            address, nbytes, stream = args
            former = [one for one in freed if one.address < address + nbytes and address < one.address + one.nbytes]
            reasons = [one.after.get(stream, one.after.get(-1, OTHER)) for one in former]
            # If the memory consists of several freed ranges, the reason that comes last in WHY (the weakest) counts.
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
    """Draw allocations as rectangles: calls on the horizontal axis, addresses on the vertical axis. Returns the figure.

    The height of a rectangle is the size of the allocation, and the colour shows its stream. The colour and style of
    the left edge show why the driver could reuse freed memory (``WHY``). Unused addresses are left out. ``of``: the
    calls, as for :func:`lives`. ``ax``: axes to draw into; default: those of a new figure.
    """
    found = lives(of)
    places = _packed(found)
    top = max((places[one.address] + one.nbytes for one in found), default=0)
    unit, scale = unit_of(top)
    with drawing(ax, height=4.2) as (made, axes):
        end = 1 + max([one.stop or one.start for one in found], default=0)
        streams = {stream: number for number, stream in enumerate(dict.fromkeys(one.stream for one in found))}
        texts, heights = [], []
        for one in found:
            y, height = places[one.address] / scale, one.nbytes / scale
            left, right = one.start, end if one.stop is None else one.stop
            color = STREAMS[streams[one.stream] % len(STREAMS)]
            axes.add_patch(Rectangle((left, y), right - left, height, fc=color, ec="white", lw=0.8))
            if one.why:
                color, line = WHY[one.why]
                axes.plot([left, left], [y, y + height], color=color, ls=line, lw=3, solid_capstyle="butt", zorder=3)
            texts.append((left, right, y + height / 2, size_text(one.nbytes), INK))
            heights.append(height)
        whole_numbers(axes.xaxis, end)
        axes.set_xlim(0, end)
        whole_numbers(axes.yaxis, top / scale)
        axes.set_xlabel("call" if found else "nothing was recorded")
        axes.set_ylabel(f"addresses, in {unit}")
        handles: list[Any] = [
            Patch(fc=STREAMS[number % len(STREAMS)], label=f"stream {number + 1}")
            for number in range(min(len(streams), 8))
        ]
        seen = [why for why in WHY if any(one.why == why for one in found)]
        handles += [Line2D([], [], color=WHY[why][0], ls=WHY[why][1], lw=3, label=f"reused, {why}") for why in seen]
        if handles:
            legend(made, handles=handles, ncols=3)
        inside(made, axes, texts, heights)
    return made


def _packed(found: Iterable[Life]) -> dict[int, int]:
    """Return the vertical position of each address in bytes. Gaps of unused addresses are left out."""
    places: dict[int, int] = {}
    low = start = stop = 0
    for begin, end in sorted({(one.address, one.address + one.nbytes) for one in found}):
        if begin > stop:
            low += stop - start
            start = begin
        stop = max(stop, end)
        places[begin] = low + begin - start
    return places


# -- virtual memory: mappings and access rights, now -------------------------------------------------------------


def _box(ax: Axes, left: float, width: float, y: float, name: str, location: MemLocation, total: float) -> None:
    """Draw memory as a box from ``left`` on, ``width`` wide, at height ``y``. Its name is written if the box is wide
    enough.

    ``total``: width of the whole address range. All widths are in MiB.
    """
    ax.add_patch(Rectangle((left, y), width, 1, fc=color_of(location), ec="white", lw=1.5))
    if width > total / 60:
        ax.text(left + width / 2, y + 0.5, name, color="white", ha="center", va="center", weight="bold")


def address_range(
    of: AddressRange | VirtualBuffer, names: Mapping[str, PhysicalMemory] | None = None, *, ax: Axes | None = None
) -> Figure:
    """Draw the addresses of a range above physical memory, with a band for each mapping, and the access rights.

    Returns the figure. :meth:`vmm.AddressRange.plot` draws the same figure. :doc:`/02-virtual-memory` shows examples.

    Parameters
    ----------
    of
        An address range, or a growable or striped buffer.
    names
        The physical memory to draw, by its label. Default: all mapped memory, with the labels A, B, C and so on.
    ax
        Axes to draw into. Default: the axes of a new figure.
    """
    addresses = of.range if isinstance(of, VirtualBuffer) else checked_type("of", of, AddressRange)
    mappings = addresses.mappings
    if names is None:
        several = [one for one in dict.fromkeys(one.memory for one in mappings) if isinstance(one, PhysicalMemory)]
        letters = (chr(65 + number) if number < 26 else str(number) for number in range(len(several)))
        names = dict(zip(letters, several, strict=False))
    total = addresses.nbytes / MiB
    with drawing(ax, height=4.4) as (made, axes):
        places = _side_by_side(names, total)
        for name, memory in names.items():
            _box(axes, *places[name], 0, name, memory.location, total)
        sizes = [(sum(places[name]) - places[name][1] / 2, _size_of(one)) for name, one in names.items()]
        _labels(axes, sizes, -0.12, "top", total)
        labels = {id(memory): name for name, memory in names.items()}
        axes.add_patch(Rectangle((0, 3), total, 1, fc="white", ec=GREY, lw=1, ls=(0, (2, 1.5))))
        above = []
        for one in mappings:
            name, left, width = labels.get(id(one.memory), ""), one.offset / MiB, one.nbytes / MiB
            # A small mapping would be invisible to scale, so a minimum width is used.
            _box(axes, left, max(width, total / 300), 3, name, one.memory.location, total)
            if name in places:
                start, size = places[name]
                corners = [(start, 1), (start + size, 1), (left + width, 3), (left, 3)]
                axes.add_patch(Polygon(corners, fc=color_of(one.memory.location), alpha=0.22, lw=0))
            above.append((max(left + width / 2, 0.05 * total), rights_text(one.rights).replace(", ", "\n")))
        _labels(axes, above, 4.15, "bottom", total)
        top = 5 + 0.4 * max([text.count("\n") for _, text in above], default=0)
        for y, text in ((4.45, "access"), (3.5, "addresses"), (2, "mappings"), (0.5, "physical\nmemory")):
            axes.text(-0.02 * total, y, text, ha="right", va="center", weight="bold")
        axes.text(0, 2.93, "0", ha="center", va="top", color=GREY)
        axes.text(total, 2.93, size_text(addresses.nbytes), ha="center", va="top", color=GREY)
        axes.set_xlim(-0.14 * total, 1.03 * total)
        axes.set_ylim(-0.9, top)
        axes.set_xticks([])
        bare(axes)
    return made


def _side_by_side(names: Mapping[str, PhysicalMemory], total: float) -> dict[str, tuple[float, float]]:
    """Return position and width in MiB of each physical memory, by label. The boxes are to scale, and spaced for their
    texts if the range is wide enough.
    """
    sizes = [max(memory.nbytes / MiB, total / 300) for memory in names.values()]
    rooms = [max(size, _width(_size_of(memory)) * total) for size, memory in zip(sizes, names.values(), strict=True)]
    gap = total / 40
    if sum(rooms) + gap * len(rooms) > total:
        # The texts do not all fit. Unmapped memory may even be larger than the range, so the boxes are made smaller.
        shrunk = min(1.0, 0.8 * total / sum(sizes))
        sizes = rooms = [size * shrunk for size in sizes]
        gap = (total - sum(rooms)) / len(rooms)
    at = (total - sum(rooms) - gap * (len(rooms) - 1)) / 2
    places = {}
    for name, size, room in zip(names, sizes, rooms, strict=True):
        places[name] = (at + (room - size) / 2, size)
        at += room + gap
    return places


def _width(text: str) -> float:
    """Return the approximate width of a text, as a fraction of the width of the range."""
    return 0.0115 * max(map(len, text.splitlines()))


def _size_of(memory: PhysicalMemory) -> str:
    return f"{size_text(memory.nbytes)}\n{place(memory.location)}"


def _labels(ax: Axes, labels: Iterable[tuple[float, str]], y: float, va: str, total: float) -> None:
    """Write a row of labels. A label that would overlap the label before it is left out."""
    end = -total
    for x, text in labels:
        half = 0.5 * _width(text) * total
        if x - half > end:
            ax.text(x, y, text, ha="center", va=va, color=INK, fontsize=9)
            end = x + half


_FUNCTIONS: dict[type | tuple[type, ...], Any] = {
    MemoryPool: pool,
    (AddressRange, VirtualBuffer): address_range,
    Observer: memory,
}


def draw(thing: object, **options: Any) -> Figure:
    """Draw a pool, an address range, a virtual buffer or an observer. Returns the figure.

    The ``plot`` methods of these objects, such as :meth:`MemoryPool.plot`, call this function. ``options`` are the
    keyword arguments of :func:`pool` or :func:`address_range`; :func:`memory`, for an observer, has none.

    Raises
    ------
    TypeError
        Objects of this class cannot be drawn, or the function does not have one of the ``options``.
    ClosedError
        ``thing`` is a closed pool.
    """
    for kind, draw_kind in _FUNCTIONS.items():
        if isinstance(thing, kind):
            return cast(Figure, draw_kind(thing, **options))
    raise TypeError(f"there is no picture of {thing!r}")
