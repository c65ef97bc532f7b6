"""The fourth notebook's pictures: a team that comes together, what one write reaches, and how all of it ends.

All that is drawn was asked of the objects, read from the memory, or taken from the account of the driver calls, as in
:mod:`plots`. The bytes that cross each link are counted by a model that the notebook states.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from plots import ADDRESSES, GREY, INK, RED, RESERVED, RESERVED_EDGE, TINT, USED

from streamalloc import multicast

GREEN = "#5f9467"
ORANGE = ADDRESSES[1]


def _bare(ax: Axes) -> None:
    ax.spines[:].set_visible(False)
    ax.set_yticks([])
    ax.tick_params(length=0)


def _named(ax: Axes, count: int) -> None:
    """A row for each GPU, the first on top."""
    ax.set_yticks(range(count), [f"GPU {number}" for number in range(count)])


# --- the first picture


class Frame(NamedTuple):
    """A call, and what the team had after it: devices by their numbers."""

    call: str
    devices: frozenset[int]
    bound: frozenset[int]
    mapped: bool
    count: int
    refused: str


def frame(call: str, team: multicast.MulticastObject, refused: str = "") -> Frame:
    """What a multicast object has now; ``refused`` says by which error the call failed."""
    devices = frozenset(device.ordinal for device in team.devices)
    bound = frozenset(binding.device.ordinal for binding in team.bindings)
    return Frame(call, devices, bound, bool(team.mapping_count), team.num_devices, refused)


def film(frames: Sequence[Frame]) -> Figure:
    """A team after each of some calls, one below the other."""
    figure, ax = plt.subplots(figsize=(9.4, 0.36 * len(frames) + 0.7), layout="constrained")
    count = frames[0].count
    view = count + 0.35, 2.6
    for row, one in enumerate(frames):
        if one.refused:
            ax.text(0.05, row + 0.5, one.refused, color=RED, weight="bold", va="center")
            continue
        for number in range(count):
            _cell(ax, number + 0.05, 0.9, row, "bound" if number in one.bound else "added", number in one.devices)
        _cell(ax, *view, row, "mapped", one.mapped, GREEN)
    ax.set_xlim(0, sum(view) + 0.05)
    ax.set_ylim(len(frames), 0)
    _bare(ax)
    ax.set_xticks(
        [*(number + 0.5 for number in range(count)), view[0] + view[1] / 2],
        [*(f"GPU {number}" for number in range(count)), "the view"],
    )
    ax.xaxis.tick_top()
    ax.set_yticks([row + 0.5 for row in range(len(frames))], [one.call for one in frames], family="monospace")
    for label, one in zip(ax.get_yticklabels(), frames, strict=True):
        label.set_color(RED if one.refused else INK)
    return figure


def _cell(ax: Axes, x: float, width: float, row: int, text: str, there: bool, color: str = USED) -> None:
    y, height = row + 0.14, 0.72
    if not there:
        ax.add_patch(Rectangle((x, y), width, height, fc="white", ec=RESERVED_EDGE, lw=0.8, ls=(0, (2, 1.5))))
        return
    face, ink = (RESERVED, INK) if text == "added" else (color, "white")
    ax.add_patch(Rectangle((x, y), width, height, fc=face, lw=0))
    ax.text(x + width / 2, y + height / 2, text, color=ink, ha="center", va="center", fontsize=9)


# --- the second


def replicas(
    before: npt.NDArray[np.uint8], after: npt.NDArray[np.uint8], writes: Mapping[int, tuple[str, int, bool]]
) -> Figure:
    """The bytes of each GPU's memory before and after some writes.

    ``writes`` tells, by the value that was written, how, by which GPU, and whether that was done through the view.
    """
    figure, axes = plt.subplots(1, 2, figsize=(9.8, 3.9), sharey=True, layout="constrained")
    colors = dict(zip(writes, (USED, GREEN, ORANGE, RED), strict=True))
    count, parts = after.shape
    for ax, contents, title in zip(axes, (before, after), ("before", "after"), strict=True):
        ax.set_title(title, fontweight="bold", pad=50 if ax is axes[1] else 6)
        for row, values in enumerate(contents):
            for value, start, stop in _runs(values):
                face = colors.get(value, TINT)
                ax.add_patch(Rectangle((start, row - 0.4), stop - start, 0.8, fc=face, lw=0))
                ink = "white" if value in colors else GREY
                ax.text((start + stop) / 2, row, str(value), color=ink, ha="center", va="center", fontsize=9)
        ax.set_xlim(0, parts)
        ax.set_ylim(count - 0.5, -0.5)
        _bare(ax)
        ax.set_xticks([0, parts], ["0", "2 MiB"])
        for label, where in zip(ax.get_xticklabels(), ("left", "right"), strict=True):
            label.set_ha(where)
    _named(axes[0], count)
    for value, (how, writer, through_view) in writes.items():
        start, stop = next((start, stop) for row in after for found, start, stop in _runs(row) if found == value)
        axes[1].text(
            (start + stop) / 2,
            -0.62,
            f"GPU {writer}\n{how}\n{'the view' if through_view else 'its memory'}",
            color=colors[value],
            weight="bold",
            fontsize=9,
            ha="center",
            va="bottom",
            linespacing=1.1,
        )
    return figure


def _runs(values: npt.NDArray[np.uint8]) -> list[tuple[int, int, int]]:
    """Equal values one after the other: value, start, stop."""
    runs = []
    start = 0
    for value, group in itertools.groupby(values.tolist()):
        stop = start + len(list(group))
        runs.append((value, start, stop))
        start = stop
    return runs


# --- the third


def all_reduce(stages: Mapping[str, npt.NDArray[np.float32]]) -> Figure:
    """What each GPU's memory holds at some moments; its own part of the vector is marked."""
    figure, axes = plt.subplots(1, len(stages), figsize=(9.8, 4.4), sharey=True, layout="constrained")
    largest = max(float(np.abs(values).max()) for values in stages.values())
    for ax, (title, values) in zip(axes, stages.items(), strict=True):
        ax.set_title(title, fontweight="bold")
        count, length = values.shape
        x = np.arange(length)
        for row, curve in enumerate(values):
            own = slice(row * length // count, (row + 1) * length // count)
            ax.axvspan(own.start, own.stop, 1 - (row + 1) / count, 1 - row / count, color=TINT, lw=0)
            # Each row as high as the largest value: the sums tower over what they are the sums of.
            y = row + 0.3 - 0.62 * curve / largest
            ax.plot(x, y, color=RESERVED_EDGE, lw=0.9)
            ax.plot(x[own], y[own], color=USED, lw=1.6)
        ax.set_xlim(0, length)
        ax.set_ylim(count - 0.5, -0.5)
        _bare(ax)
        ax.set_xticks([])
    _named(axes[0], count)
    return figure


# --- the fourth


class Links:
    """A model of what crosses the link between each GPU and the switch, in bytes."""

    def __init__(self, count: int) -> None:
        self.sent = [0] * count
        self.received = [0] * count

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """An ordinary copy: nothing crosses a link where the memory is the GPU's own."""
        if source != target:
            self.sent[source] += nbytes
            self.received[target] += nbytes

    def store(self, source: int, nbytes: int) -> None:
        """A store to the view: it leaves once, and the switch sends it to every replica, the writer's own too."""
        self.sent[source] += nbytes
        self.received = [received + nbytes for received in self.received]

    def load_reduce(self, target: int, nbytes: int) -> None:
        """A reducing load: every replica goes to the switch once, and one result comes back."""
        self.sent = [sent + nbytes for sent in self.sent]
        self.received[target] += nbytes


def traffic(found: Mapping[str, Links], nbytes: int) -> Figure:
    """What each GPU sends (up) and receives (down), in multiples of ``nbytes``, for several ways to do something."""
    figure, axes = plt.subplots(1, len(found), figsize=(9.8, 3.5), sharey=True, layout="constrained")
    for ax, (title, links) in zip(axes, found.items(), strict=True):
        sent = [one / nbytes for one in links.sent]
        received = [one / nbytes for one in links.received]
        numbers = range(len(sent))
        ax.bar(numbers, sent, 0.76, color=USED)
        ax.bar(numbers, [-one for one in received], 0.76, color=ORANGE)
        ax.axhline(0, color=GREY, lw=0.8)
        what, how = title.split(", ", 1)
        ax.set_title(f"{what}\n{how}", fontweight="bold", fontsize=10)
        for values, sign, color in ((sent, 1, USED), (received, -1, ORANGE)):
            most = max(values)
            highest = [number for number, value in enumerate(values) if value == most]
            middle = highest[0] if len(highest) == 1 else (highest[0] + highest[-1]) / 2
            ax.annotate(
                f"{most:g}",
                (middle, sign * most),
                (0, 3 * sign),
                textcoords="offset points",
                color=color,
                weight="bold",
                ha="center",
                va="bottom" if sign > 0 else "top",
            )
        ax.set_xticks(list(numbers))
        ax.tick_params(length=0, labelsize=9)
        ax.spines[["bottom", "left"]].set_visible(False)
    top = max(max(links.sent + links.received) for links in found.values()) / nbytes
    axes[0].set_ylim(-1.15 * top, 1.15 * top)
    axes[0].set_yticks([])
    for sign, text, color in ((1, "vectors that\na GPU sends", USED), (-1, "and receives", ORANGE)):
        axes[0].text(
            -0.04,
            0.5 + 0.25 * sign,
            text,
            color=color,
            weight="bold",
            ha="right",
            va="center",
            transform=axes[0].transAxes,
        )
    figure.supxlabel("GPU", fontsize=10)
    return figure


# --- the fifth

ENDINGS = (
    "unbind",
    "unmap the object",
    "release the object",
    "unmap memory",
    "release memory",
    "free addresses",
)


class Ending(NamedTuple):
    """A driver call that ends something: its number among the calls of that kind, and which of ``ENDINGS`` it is."""

    number: int
    stage: str


def endings(calls: Iterable[Any]) -> list[Ending]:
    """The calls of a trace that end something of a multicast object, of memory or of addresses."""
    objects: set[int] = set()
    mapped: dict[int, int] = {}
    stages: list[str] = []
    for call in calls:
        if call.answer[0]:
            continue
        if call.name == "cuMulticastCreate":
            objects.add(int(call.answer[1]))
        elif call.name == "cuMemMap":
            mapped[int(call.args[0])] = int(call.args[3])
        elif call.name == "cuMulticastUnbind":
            stages.append("unbind")
        elif call.name == "cuMemUnmap":
            start, size = int(call.args[0]), int(call.args[1])
            # One call may unmap several mappings.
            gone = [mapped.pop(address) for address in list(mapped) if start <= address < start + size]
            stages.append("unmap the object" if objects & set(gone) else "unmap memory")
        elif call.name == "cuMemRelease":
            stages.append("release the object" if int(call.args[0]) in objects else "release memory")
        elif call.name == "cuMemAddressFree":
            stages.append("free addresses")
    return [Ending(number, stage) for number, stage in enumerate(stages)]


class Done(NamedTuple):
    """What a program did, and how many ends the driver had seen before."""

    ends: int
    what: str


def teardown(found: Mapping[str, tuple[Sequence[Ending], Sequence[Done]]]) -> Figure:
    """In which order the driver was told of each end, below what the program did."""
    figure, axes = plt.subplots(1, len(found), figsize=(9.8, 3.8), sharex=True, sharey=True, layout="constrained")
    colors = dict(zip(ENDINGS, (RED, GREEN, GREEN, ADDRESSES[0], ADDRESSES[0], GREY), strict=True))
    for ax, (title, (ends, done)) in zip(axes, found.items(), strict=True):
        ax.set_title(title, fontweight="bold", pad=64)
        for row, stage in enumerate(ENDINGS):
            ax.axhline(row, color=TINT, lw=10, zorder=0)
            numbers = [end.number for end in ends if end.stage == stage]
            ax.scatter(numbers, [row] * len(numbers), color=colors[stage], s=26, zorder=3)
        for step, moments in itertools.groupby(done, key=lambda one: one.ends):
            text = "\n".join(moment.what for moment in moments)
            ax.axvline(step - 0.5, color=GREY, lw=0.9, ls=(0, (2, 2)), zorder=1)
            label = ax.text(step - 0.5, -0.75, text, ha="left", va="bottom", fontsize=9, linespacing=1.15)
            label.set_in_layout(False)
        ax.set_ylim(len(ENDINGS) - 0.5, -0.7)
        _bare(ax)
        ax.set_xlabel("driver call")
    axes[0].set_xlim(-1, max(len(ends) for ends, _ in found.values()))
    axes[0].set_yticks(range(len(ENDINGS)), ENDINGS)
    figure.get_layout_engine().set(wspace=0.06)
    return figure


# --- the sixth

_SETTING_UP = {
    "cuMemCreate": "create",
    "cuMulticastCreate": "create",
    "cuMemExportToShareableHandle": "export",
    "cuMemImportFromShareableHandle": "import",
    "cuMulticastAddDevice": "add",
    "cuMulticastBindMem": "bind",
    "cuMemAddressReserve": "reserve",
    "cuMemMap": "map",
    "cuMemSetAccess": "access",
}
_GIVING_BACK = {
    "cuMulticastUnbind": "unbind",
    "cuMemUnmap": "unmap",
    "cuMemRelease": "release",
    "cuMemAddressFree": "free",
}


def ranks(attempts: Mapping[str, Sequence[Sequence[Any]]]) -> Figure:
    """How often each rank made which call, for each of some attempts; the call that failed is marked.

    The values are the ranks' traces of one attempt, by rank.
    """
    columns = [*dict.fromkeys(_SETTING_UP.values()), *_GIVING_BACK.values()]
    first_back = len(columns) - len(_GIVING_BACK)
    stage_of = _SETTING_UP | _GIVING_BACK
    figure, axes = plt.subplots(1, len(attempts), figsize=(9.8, 3.6), sharey=True, layout="constrained")
    for ax, (title, traces) in zip(axes, attempts.items(), strict=True):
        ax.set_title(title, fontweight="bold", pad=58)
        for row, trace in enumerate(traces):
            counts = Counter(stage_of[call.name] for call in trace if call.name in stage_of)
            failed = {stage_of[call.name] for call in trace if call.answer[0] and call.name in stage_of}
            for column, stage in enumerate(columns):
                x = column + 0.5 * (column >= first_back)
                face, ink, text = TINT, INK, ""
                if stage in failed:
                    face, ink, text = RED, "white", "\N{MULTIPLICATION SIGN}"
                elif counts[stage]:
                    face, ink = (RESERVED, INK) if column >= first_back else (USED, "white")
                    text = str(counts[stage])
                ax.add_patch(Rectangle((x + 0.04, row + 0.06), 0.92, 0.88, fc=face, lw=0))
                ax.text(x + 0.5, row + 0.5, text, color=ink, ha="center", va="center", fontsize=9)
        ax.set_xlim(0, len(columns) + 0.5)
        ax.set_ylim(len(traces), 0)
        _bare(ax)
        ax.set_xticks(
            [column + 0.5 + 0.5 * (column >= first_back) for column in range(len(columns))], columns, rotation=90
        )
        ax.xaxis.tick_top()
    axes[0].set_yticks([row + 0.5 for row in range(len(traces))], [f"rank {row}" for row in range(len(traces))])
    return figure
