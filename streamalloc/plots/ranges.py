"""Figures of virtual memory: mappings and access rights, now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

from streamalloc.core.errors import size_text
from streamalloc.core.properties import MemAccess, MemLocation
from streamalloc.formats.html import color_of, place
from streamalloc.plots.style import GREY, INK, MiB, bare, drawing
from streamalloc.vmm import AddressRange, PhysicalMemory, VirtualBuffer


class Piece(NamedTuple):
    """Memory mapped at an offset of a range."""

    name: str
    offset: int
    nbytes: int
    location: MemLocation


def pieces_of(range: AddressRange, names: Mapping[str, PhysicalMemory]) -> list[Piece]:
    """Return the current mappings of a range; ``names`` labels the physical memory."""
    return [Piece(_name(one.memory, names), one.offset, one.nbytes, one.memory.location) for one in range.mappings]


def _name(memory: object, names: Mapping[str, PhysicalMemory]) -> str:
    return next((name for name, one in names.items() if one is memory), "")


def strip(ax: Axes, y: float, height: float, pieces: Sequence[Piece], nbytes: int) -> None:
    """Draw a range as an empty frame with its pieces."""
    ax.add_patch(Rectangle((0, y), nbytes / MiB, height, fc="white", ec=GREY, lw=1, ls=(0, (2, 1.5))))
    for piece in pieces:
        # A small piece gets a visible width.
        start, width = piece.offset / MiB, max(piece.nbytes, nbytes // 300) / MiB
        ax.add_patch(Rectangle((start, y), width, height, fc=color_of(piece.location), ec="white", lw=1.5))
        if width > nbytes / MiB / 60:
            middle = start + width / 2, y + height / 2
            ax.text(*middle, piece.name, color="white", ha="center", va="center", weight="bold")


def address_range(
    of: AddressRange | VirtualBuffer, names: Mapping[str, PhysicalMemory] | None = None, *, ax: Axes | None = None
) -> Figure:
    """Draw physical memory, the addresses above it, a band for each mapping, and the access rights; return the figure.

    :meth:`vmm.AddressRange.plot` draws it, too; :doc:`/02-virtual-memory` shows such pictures.

    Parameters
    ----------
    of
        An address range, or a growable or striped buffer.
    names
        Labels of the physical memory; default: A, B, C.
    """
    addresses = of.range if isinstance(of, VirtualBuffer) else of
    mappings = addresses.mappings
    if names is None:
        several = [one for one in dict.fromkeys(one.memory for one in mappings) if isinstance(one, PhysicalMemory)]
        letters = (chr(65 + number) if number < 26 else str(number) for number in range(len(several)))
        names = dict(zip(letters, several, strict=False))
    total = addresses.nbytes / MiB
    with drawing(ax, height=4.4) as (made, axes):
        places = _side_by_side(names, total)
        for name, memory in names.items():
            at, size = places[name]
            axes.add_patch(Rectangle((at, 0), size, 1, fc=color_of(memory.location), ec="white", lw=1.5))
            if size > total / 60:
                axes.text(at + size / 2, 0.5, name, color="white", ha="center", va="center", weight="bold")
        sizes = [(sum(places[name]) - places[name][1] / 2, _size_of(one)) for name, one in names.items()]
        _labels(axes, sizes, -0.12, "top", total)
        pieces = pieces_of(addresses, names)
        strip(axes, 3, 1, pieces, addresses.nbytes)
        above = []
        for piece, mapping in zip(pieces, mappings, strict=True):
            left, right = piece.offset / MiB, (piece.offset + piece.nbytes) / MiB
            if piece.name in places:
                start, size = places[piece.name]
                corners = [(start, 1), (start + size, 1), (right, 3), (left, 3)]
                axes.add_patch(Polygon(corners, fc=color_of(piece.location), alpha=0.22, lw=0))
            rights = [
                f"{place(where)} {'reads' if allowed == MemAccess.READ else 'reads, writes'}"
                for where, allowed in mapping.rights.items()
                if allowed
            ]
            above.append((max((left + right) / 2, 0.05 * total), "\n".join(rights) or "nobody"))
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
    """Return position and width of each piece of physical memory: to scale, with space for labels if possible."""
    sizes = [max(memory.nbytes / MiB, total / 300) for memory in names.values()]
    rooms = [max(size, _width(_size_of(memory)) * total) for size, memory in zip(sizes, names.values(), strict=True)]
    gap = total / 40
    if sum(rooms) + gap * len(rooms) > total:
        # Unmapped memory may be larger than the range.
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
    """Return the width of a text as a fraction of the range."""
    return 0.0115 * max(map(len, text.splitlines()))


def _size_of(memory: PhysicalMemory) -> str:
    return f"{size_text(memory.nbytes)}\n{place(memory.location)}"


def _labels(ax: Axes, labels: Iterable[tuple[float, str]], y: float, va: str, total: float) -> None:
    """Write a row of labels, without those that would lie on the one before."""
    end = -total
    for x, text in labels:
        half = 0.5 * _width(text) * total
        if x - half > end:
            ax.text(x, y, text, ha="center", va=va, color=INK, fontsize=9)
            end = x + half
