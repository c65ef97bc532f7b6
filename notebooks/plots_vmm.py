"""The second notebook's pictures: what is mapped where, who may use it, and what growth and eviction take.

All that is drawn was asked of the objects or measured, as in :mod:`plots`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle
from matplotlib.ticker import MultipleLocator
from plots import ADDRESSES, GREY, INK, MINUS, RED, RESERVED, RESERVED_EDGE, TINT, USED, MiB

import streamalloc as sa
from streamalloc import vmm

GREEN = "#5f9467"


def color_of(location: sa.MemLocation) -> str:
    """A colour for each place that memory can be in."""
    return GREEN if location.on_host else ADDRESSES[min(location.id, 1)]


def name_of(location: sa.MemLocation) -> str:
    """A place as a label has it."""
    return "host" if location.on_host else f"GPU {location.id}"


class Piece(NamedTuple):
    """Memory at a place of a range."""

    name: str
    offset: int
    nbytes: int
    location: sa.MemLocation


class Frame(NamedTuple):
    """A call, and what was mapped after it."""

    call: str
    pieces: list[Piece]
    nbytes: int


def frame(call: str, range_: vmm.AddressRange, names: Mapping[str, vmm.PhysicalMemory]) -> Frame:
    """What is mapped in a range now; ``names`` tells the pieces of physical memory apart."""
    pieces = [
        Piece(_name(mapping.memory, names), mapping.offset, mapping.nbytes, mapping.memory.location)
        for mapping in range_.mappings
    ]
    return Frame(call, pieces, range_.nbytes)


def _name(memory: vmm.PhysicalMemory, names: Mapping[str, vmm.PhysicalMemory]) -> str:
    return next((name for name, one in names.items() if one is memory), "")


def _strip(ax: Axes, y: float, height: float, pieces: Sequence[Piece], nbytes: int) -> None:
    """A range of addresses: an empty frame with the pieces in it."""
    ax.add_patch(Rectangle((0, y), nbytes / MiB, height, fc="white", ec=GREY, lw=1, ls=(0, (2, 1.5))))
    for piece in pieces:
        start, width = piece.offset / MiB, piece.nbytes / MiB
        ax.add_patch(Rectangle((start, y), width, height, fc=color_of(piece.location), ec="white", lw=1.5))
        ax.text(start + width / 2, y + height / 2, piece.name, color="white", ha="center", va="center", weight="bold")


def _bare(ax: Axes) -> None:
    ax.spines[:].set_visible(False)
    ax.set_yticks([])
    ax.tick_params(length=0)


def model(range_: vmm.AddressRange, names: Mapping[str, vmm.PhysicalMemory]) -> Figure:
    """Physical memory below, addresses above it, a band for each mapping between them, and on top who has access."""
    figure, ax = plt.subplots(figsize=(9.4, 4.2), layout="constrained")
    total, gap = range_.nbytes / MiB, 2.0
    width = sum(memory.nbytes / MiB + gap for memory in names.values()) - gap
    at = (total - width) / 2
    places = {}
    for name, memory in names.items():
        size = memory.nbytes / MiB
        places[name] = (at, size)
        ax.add_patch(Rectangle((at, 0), size, 1, fc=color_of(memory.location), ec="white", lw=1.5))
        ax.text(at + size / 2, 0.5, name, color="white", ha="center", va="center", weight="bold")
        ax.text(at + size / 2, -0.12, f"{size:.0f} MiB\n{name_of(memory.location)}", ha="center", va="top", color=INK)
        at += size + gap
    pieces = frame("", range_, names).pieces
    _strip(ax, 3, 1, pieces, range_.nbytes)
    for piece, mapping in zip(pieces, range_.mappings, strict=True):
        start, size = places[piece.name]
        left, right = piece.offset / MiB, (piece.offset + piece.nbytes) / MiB
        corners = [(start, 1), (start + size, 1), (right, 3), (left, 3)]
        ax.add_patch(Polygon(corners, fc=color_of(piece.location), alpha=0.22, lw=0))
        rights = [
            f"{name_of(where)} {'reads' if allowed == sa.MemAccess.READ else 'reads, writes'}"
            for where, allowed in mapping.rights.items()
        ]
        ax.text((left + right) / 2, 4.15, "\n".join(rights) or "nobody", ha="center", va="bottom", fontsize=9)
    for y, text in ((4.45, "access"), (3.5, "addresses"), (2, "mappings"), (0.5, "physical\nmemory")):
        ax.text(-0.6, y, text, ha="right", va="center", weight="bold")
    ax.text(0, 2.93, "0", ha="center", va="top", color=GREY)
    ax.text(total, 2.93, f"{total:.0f} MiB", ha="center", va="top", color=GREY)
    ax.set_xlim(-4.5, total + 1)
    ax.set_ylim(-0.9, 5.0)
    ax.set_xticks([])
    _bare(ax)
    return figure


def film(frames: Sequence[Frame]) -> Figure:
    """A range after each of some calls, one below the other."""
    figure, ax = plt.subplots(figsize=(9.4, 0.42 * len(frames) + 0.6), layout="constrained")
    for row, one in enumerate(frames):
        _strip(ax, row + 0.14, 0.72, one.pieces, one.nbytes)
    total = frames[0].nbytes / MiB
    ax.set_xlim(0, total)
    ax.set_ylim(len(frames), 0)
    ax.set_xlabel("MiB from the beginning of the range")
    ax.xaxis.set_major_locator(MultipleLocator(4))
    _bare(ax)
    ax.set_yticks([row + 0.5 for row in range(len(frames))], [one.call for one in frames], family="monospace")
    return figure


def permissions(found: Mapping[str, Mapping[str, bool]]) -> Figure:
    """What came of each attempt: a row for each, a column for each mapping."""
    attempts = list(next(iter(found.values())))
    figure, ax = plt.subplots(figsize=(9.4, 0.42 * len(attempts) + 0.8), layout="constrained")
    for x, answers in enumerate(found.values()):
        for y, attempt in enumerate(attempts):
            allowed = answers[attempt]
            ax.add_patch(Rectangle((x + 0.03, y + 0.08), 0.94, 0.84, fc=TINT if allowed else "#f7ebe9", lw=0))
            text, color = ("done", USED) if allowed else ("refused", RED)
            ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", color=color)
    ax.set_xlim(0, len(found))
    ax.set_ylim(len(attempts), 0)
    _bare(ax)
    ax.set_xticks([x + 0.5 for x in range(len(found))], list(found))
    ax.set_yticks([y + 0.5 for y in range(len(attempts))], attempts)
    ax.xaxis.tick_top()
    return figure


class Growth(NamedTuple):
    """Growth in equal steps: the time of each, in seconds, and the most memory in use during it, in bytes."""

    seconds: list[float]
    peaks: list[int]


def growth(step: int, runs: Mapping[str, Growth]) -> Figure:
    """The time of each step, and the memory that it took, by the size that the buffer had reached."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.8, 3.5), layout="constrained")
    colors = dict(zip(runs, (USED, RED), strict=True))
    for name, run in runs.items():
        sizes = [step / MiB * (number + 1) for number in range(len(run.seconds))]
        left.plot(sizes, [seconds * 1e3 for seconds in run.seconds], "o-", color=colors[name], ms=4, lw=1.4)
        right.step([0, *sizes], [run.peaks[0] / MiB, *(peak / MiB for peak in run.peaks)], color=colors[name], lw=1.8)
        right.annotate(
            name,
            (sizes[-1], run.peaks[-1] / MiB),
            (6, 0),
            textcoords="offset points",
            color=colors[name],
            va="center",
            weight="bold",
        )
        left.annotate(
            name,
            (sizes[-1], run.seconds[-1] * 1e3),
            (6, 0),
            textcoords="offset points",
            color=colors[name],
            va="center",
            weight="bold",
        )
    left.set_title("Time of a step, in milliseconds", fontweight="bold")
    left.set_yscale("log")
    left.yaxis.set_major_formatter("{x:g}")
    right.set_title("Memory in use during it, in MiB", fontweight="bold")
    for ax in (left, right):
        ax.set_xlabel("size that the step led to, in MiB")
        ax.set_xlim(0, None)
        ax.xaxis.set_major_locator(MultipleLocator(4 * step / MiB))
    right.set_ylim(0, None)
    return figure


class Moment(NamedTuple):
    """A call, and where memory was after it, in bytes."""

    call: str
    on_gpu: dict[str, int]
    """Of each buffer."""
    gpu: int
    """What the device says is in use, all in all."""
    backup: int
    """In use in the pool in host memory."""
    reserved: int
    """What this pool holds."""


def moments(steps: Sequence[Moment]) -> Figure:
    """Memory of the device, by buffers, and of the host, after each of some calls."""
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(9.4, 5.2), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    end = len(steps)
    x = range(end + 1)

    def last_again(values: Sequence[float]) -> list[float]:
        return [*values, values[-1]]

    base = [0.0] * (end + 1)
    for name, color in zip(steps[0].on_gpu, ADDRESSES, strict=False):
        values = last_again([step.on_gpu[name] / MiB for step in steps])
        top = [below + value for below, value in zip(base, values, strict=True)]
        upper.fill_between(x, base, top, step="post", color=color, alpha=0.85, lw=0)
        for start, stop in _stretches(base[:-1], top[:-1]):
            middle = (base[start] + top[start]) / 2
            upper.text((start + stop) / 2, middle, name, color="white", weight="bold", ha="center", va="center")
        base = top
    upper.step(x, last_again([step.gpu / MiB for step in steps]), where="post", color=INK, lw=1.6)
    upper.set_title("Memory of the GPU in use, in MiB", fontweight="bold")
    upper.set_title("line: what the driver says", loc="right", color=GREY)
    reserved = last_again([step.reserved / MiB for step in steps])
    used = last_again([step.backup / MiB for step in steps])
    lower.fill_between(x, reserved, step="post", color=RESERVED, lw=0)
    lower.step(x, reserved, where="post", color=RESERVED_EDGE, lw=1)
    lower.step(x, used, where="post", color=USED, lw=1.8)
    lower.set_title("Pool in host memory, in MiB", fontweight="bold")
    lower.text(end + 0.08, reserved[-1], "reserved", color=RESERVED_EDGE, weight="bold", va="center")
    lower.text(end + 0.08, used[-1], "used", color=USED, weight="bold", va="center")
    for ax in (upper, lower):
        ax.set_xlim(0, end)
        ax.set_ylim(0, None)
        ax.yaxis.set_major_locator(MultipleLocator(32))
        ax.tick_params(axis="x", length=0)
        for at, step in enumerate(steps):
            if "evict" in step.call or "restore" in step.call:
                ax.axvline(at, color=GREY, lw=0.8, ls=(0, (1, 2)))
    lower.set_xticks([at + 0.5 for at in range(end)], [step.call.replace("-", MINUS) for step in steps])
    return figure


def _stretches(base: Sequence[float], top: Sequence[float]) -> list[tuple[int, int]]:
    """From where to where an area is of one height, the same above its base, and not empty."""
    stretches = []
    for (below, above), group in itertools.groupby(range(len(base)), key=lambda at: (base[at], top[at])):
        positions = list(group)
        if above > below:
            stretches.append((positions[0], positions[-1] + 1))
    return stretches
