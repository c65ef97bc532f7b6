"""The third notebook's pictures: what several processes do with the same memory, and when.

All times were taken by the processes themselves, from the machine's one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from plots import ADDRESSES, GREY, INK, RED, RESERVED, RESERVED_EDGE, TINT, USED, MiB

GREEN = "#5f9467"
_BAR = 0.52


def _rows(ax: Axes, names: Sequence[str]) -> None:
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def _bar(
    ax: Axes, row: int, start: float, end: float, color: str, text: str = "", ink: str = "white", **how: str
) -> None:
    ax.barh(row, end - start, _BAR, left=start, color=color, **how)
    if text:
        ax.text((start + end) / 2, row, text, color=ink, ha="center", va="center", weight="bold")


# --- the first picture


class HandOff(NamedTuple):
    """A buffer that was handed over: seconds until the answer, and what was sent."""

    seconds: float
    nbytes: int
    handles: int


def hand_offs(found: Sequence[HandOff]) -> Figure:
    """The time of each of some hand-offs, one after the other."""
    figure, ax = plt.subplots(figsize=(9.4, 2.9), layout="constrained")
    times = [one.seconds * 1e3 for one in found]
    colors = [RED if one.handles else USED for one in found]
    ax.vlines(range(1, len(found) + 1), min(times) / 3, times, color=colors, lw=1)
    ax.scatter(range(1, len(found) + 1), times, color=colors, s=22, zorder=3)
    first = found[0]
    ax.annotate(
        f"{first.nbytes} bytes and {first.handles} descriptors: the pool and the board come along",
        (1, times[0]),
        (14, 0),
        textcoords="offset points",
        color=RED,
        weight="bold",
        va="center",
    )
    ax.annotate(
        f"{found[-1].nbytes} bytes each, no descriptor",
        (len(found) / 2, max(times[2:])),
        (0, 12),
        textcoords="offset points",
        color=USED,
        weight="bold",
        ha="center",
    )
    ax.set_title("Milliseconds until the other process has opened, closed and answered", fontweight="bold")
    ax.set_yscale("log")
    ax.set_ylim(min(times) / 2, max(times) * 2)
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_xlabel("buffer")
    ax.set_xlim(0, len(found) + 1)
    return figure


# --- the second


def lease(at: Mapping[str, float]) -> Figure:
    """Where two processes and their streams are while a buffer is shared; ``at`` has seconds by what happened then."""
    zero = at["allocate"]
    ms = {name: (moment - zero) * 1e3 for name, moment in at.items()}
    end = ms["returned"] * 1.06
    names = [
        "producer's host",
        "producer's stream",
        "consumer's host",
        "consumer's stream",
        "the lease",
        "the memory",
    ]
    figure, ax = plt.subplots(figsize=(9.8, 4.3), layout="constrained")
    _rows(ax, names)
    for row in (0, 2):
        ax.hlines(row, 0, end, color=RESERVED_EDGE, lw=1, zorder=1)
    calls = {
        "allocate": (0, "allocate,\nfill"),
        "send": (0, "share,\nsend"),
        "gate": (0, "open\nthe gate"),
        "free": (0, "free"),
        "opened": (2, "open,\ncopy"),
        "contents": (2, "contents\nare there"),
        "closed": (2, "close"),
    }
    for name, (row, text) in calls.items():
        ax.plot(ms[name], row, "o", color=INK, ms=5, zorder=3)
        ax.annotate(
            text, (ms[name], row), (6, 3), textcoords="offset points", fontsize=9, va="bottom", linespacing=1.05
        )
    _bar(ax, 1, ms["allocate"], ms["gate"], RESERVED, "held by the gate: the fill has not run", INK)
    _bar(ax, 3, ms["opened"], ms["contents"], RESERVED, "waits for the ready word", INK)
    _bar(ax, 4, ms["opened"], ms["closed"], GREEN, "the consumer has it open")
    _bar(ax, 5, ms["allocate"], ms["free"], USED, "its owner has it")
    _bar(ax, 5, ms["free"], ms["returned"], ADDRESSES[1], "the free is deferred")
    for name, top, bottom in (("gate", 0, 3), ("free", 0, 5), ("closed", 2, 5)):
        ax.vlines(ms[name], top, bottom + _BAR / 2, color=GREY, lw=0.9, ls=(0, (2, 2)), zorder=0)
    ax.set_xlim(-0.01 * end, end)
    ax.set_xlabel("milliseconds")
    return figure


# --- the third


class Life(NamedTuple):
    """From when to when a consumer had memory open, in seconds, and how that ended."""

    opened: float
    ended: float
    what: str
    how: str


def deaths(lives: Mapping[str, Life], freed: float, used: Sequence[tuple[float, int]]) -> Figure:
    """Consumers of memory that its owner has freed, and what its pool has in use; times in seconds."""
    zero = used[0][0]
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(9.4, 4.2), sharex=True, height_ratios=(4, 3), layout="constrained"
    )
    _rows(upper, list(lives))
    for row, life in enumerate(lives.values()):
        killed = "kill" in life.how
        start, end = ((moment - zero) * 1e3 for moment in (life.opened, life.ended))
        _bar(upper, row, start, end, GREEN, life.what)
        upper.plot(end, row, "X" if killed else "o", color=RED if killed else INK, ms=9 if killed else 6, zorder=3)
        upper.annotate(
            life.how,
            (end, row),
            (9, 0),
            textcoords="offset points",
            color=RED if killed else INK,
            va="center",
            weight="bold" if killed else "normal",
        )
    x = [(moment - zero) * 1e3 for moment, _ in used]
    y = [nbytes / MiB for _, nbytes in used]
    lower.fill_between(x, y, step="post", color=TINT, lw=0)
    lower.step(x, y, where="post", color=USED, lw=1.8)
    lower.set_title("In use in the pool, in MiB", fontweight="bold")
    lower.set_ylim(0, max(y) * 1.25)
    lower.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    moment = (freed - zero) * 1e3
    for ax in (upper, lower):
        ax.axvline(moment, color=GREY, lw=0.9, ls=(0, (2, 2)), zorder=0)
    lower.annotate("the owner frees both", (moment, max(y) * 1.1), (6, 0), textcoords="offset points", va="center")
    lower.set_xlabel("milliseconds")
    lower.set_xlim(0, x[-1])
    return figure


# --- the fourth


class Item(NamedTuple):
    """An item's way through a ring, in seconds: asked for a slot, had it, handed off; taken and released by whom."""

    asked: float
    had: float
    handed: float
    address: int
    consumer: str
    taken: float
    released: float


def ring(items: Sequence[Item]) -> Figure:
    """Which consumer had which slot when, and how long the producer waited for one."""
    zero = items[0].asked
    slots = {address: row for row, address in enumerate(sorted({item.address for item in items}))}
    consumers = sorted({item.consumer for item in items})
    colors = dict(zip(consumers, ((USED, RESERVED), ("#c06f14", "#f6ddbd")), strict=True))
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(9.8, 4.8), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    _rows(upper, [f"slot {row}" for row in slots.values()])
    for item in items:
        dark, light = colors[item.consumer]
        row = slots[item.address]
        handed, taken, released = ((at - zero) * 1e3 for at in (item.handed, item.taken, item.released))
        _bar(upper, row, handed, taken, light)
        _bar(upper, row, taken, released, dark)
    counts = {name: sum(item.consumer == name for item in items) for name in consumers}
    upper.legend(
        handles=[
            Patch(color=colors[name][0], label=f"consumer {name} works ({counts[name]} items)") for name in consumers
        ]
        + [Patch(color=colors[name][1], label=f"filled, for {name}") for name in consumers],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=4,
        frameon=False,
        handlelength=1.1,
        columnspacing=1.4,
        borderaxespad=0.2,
    )
    lower.vlines(
        [(item.had - zero) * 1e3 for item in items],
        0,
        [(item.had - item.asked) * 1e3 for item in items],
        color=RED,
        lw=1.6,
    )
    lower.set_title("How long the producer waited for the next slot, in milliseconds", fontweight="bold")
    lower.set_ylim(0, None)
    lower.set_xlabel("milliseconds")
    lower.set_xlim(0, max((item.released - zero) * 1e3 for item in items) * 1.01)
    return figure
