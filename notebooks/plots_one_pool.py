"""The fifth notebook's pictures: what pools hold for several libraries, who sleeps, and who takes which memory.

All that is drawn was asked of the objects, as in :mod:`plots`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plots import ADDRESSES, GREY, INK, RED, RESERVED, RESERVED_EDGE, TINT, USED, MiB

from streamalloc import interop

GREEN = "#5f9467"


class Step(NamedTuple):
    """What was done, and the figures after it in bytes, by name."""

    label: str
    after: dict[str, int]


def use(steps: Sequence[Step]) -> Figure:
    """A bar for each step: what a pool has reserved, and what of it is used."""
    figure, axes = plt.subplots(figsize=(9, 0.36 * len(steps) + 0.9), layout="constrained")
    places = range(len(steps))
    reserved = [step.after["reserved"] / MiB for step in steps]
    axes.barh(places, reserved, color=RESERVED, edgecolor=RESERVED_EDGE, label="reserved")
    axes.barh(places, [step.after["used"] / MiB for step in steps], height=0.4, color=USED, label="used")
    _rows(axes, [step.label for step in steps], "MiB of the one pool")
    figure.legend(frameon=False, loc="outside lower center", ncols=2)
    return figure


def peaks(found: Mapping[str, interop.PeakReserved]) -> Figure:
    """For each measurement the pools of their own end to end, and the one pool below."""
    figure, axes = plt.subplots(figsize=(9, 0.95 * len(found) + 0.9), layout="constrained")
    labels = []
    colors = (USED, ADDRESSES[1], GREEN, GREY)
    for place, (name, peak) in enumerate(found.items()):
        left = 0.0
        for number, (library, nbytes) in enumerate(peak.each.items()):
            axes.barh(2.4 * place, nbytes / MiB, left=left, color=colors[number % 4], edgecolor="white")
            axes.text(left + nbytes / MiB / 2, 2.4 * place, library, ha="center", va="center", color="white", size=9)
            left += nbytes / MiB
        axes.barh(2.4 * place + 1, peak.together / MiB, color=RESERVED, edgecolor=RESERVED_EDGE)
        axes.text(peak.together / MiB / 2, 2.4 * place + 1, "one pool", ha="center", va="center", color=INK)
        labels.append((2.4 * place + 0.5, name))
    axes.set_yticks([place for place, _ in labels], [name for _, name in labels])
    axes.invert_yaxis()
    axes.set_xlabel("MiB reserved at most")
    axes.spines.left.set_visible(False)
    axes.tick_params(left=False)
    return figure


def sleep(steps: Sequence[Step]) -> Figure:
    """For each step the memory on the device by tag, and what lies in host memory."""
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(steps) + 0.9), layout="constrained")
    colors = {"weights": USED, "cache": ADDRESSES[1], "host": GREEN}
    names = {"weights": "weights on the device", "cache": "cache on the device", "host": "copy in host memory"}
    for place, step in enumerate(steps):
        left = 0.0
        for name in ("weights", "cache"):
            size = step.after[name] / MiB
            axes.barh(place, size, left=left, color=colors[name], edgecolor="white")
            left += size
        axes.barh(place + 0.32, step.after["host"] / MiB, height=0.22, color=colors["host"])
    for name, color in colors.items():
        axes.barh(0, 0, color=color, label=names[name])
    _rows(axes, [step.label for step in steps], "MiB")
    figure.legend(frameon=False, loc="outside lower center", ncols=3)
    return figure


def registrations(found: Mapping[str, interop.Registration]) -> Figure:
    """A table: which memory (rows) is taken by whom (columns)."""
    who = ("ipc", "dma_buf", "gpu_direct_storage", "nccl", "ucx", "ucx_network", "nvshmem")
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(found) + 1.0), layout="constrained")
    for row, one in enumerate(found.values()):
        for column, name in enumerate(who):
            answer = getattr(one, name)
            partly = bool(answer) and bool(answer.why)
            color = TINT if not answer else "#e9d8a6" if partly else GREEN
            axes.barh(row, 0.94, left=column, height=0.86, color=color)
            said = "no" if not answer else "partly" if partly else "yes"
            axes.text(column + 0.47, row, said, ha="center", va="center", color=RED if not answer else INK)
    axes.set_xticks([column + 0.47 for column in range(len(who))], [name.replace("_", "\n") for name in who])
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.tick_params(left=False, top=False)
    for side in ("left", "bottom", "top"):
        axes.spines[side].set_visible(False)
    return figure


def _rows(axes: Axes, labels: Sequence[str], what: str) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel(what)
    axes.spines.left.set_visible(False)
    axes.tick_params(left=False)
