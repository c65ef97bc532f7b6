"""Reports of memory that is still allocated, by the line that allocated it."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import NamedTuple

from streamalloc.core.internal import size_text
from streamalloc.observing.records import Allocation, Site


class LeakError(AssertionError):
    """Memory is still allocated; :attr:`report` has the bytes and the lines."""

    def __init__(self, report: LeakReport) -> None:
        super().__init__(str(report))
        self.report: LeakReport = report


class Place(NamedTuple):
    """Live allocations of one line of a program."""

    site: Site | None
    """The line; None for memory allocated before the observer started."""
    tag: str
    phase: str
    allocations: tuple[Allocation, ...]

    @property
    def nbytes(self) -> int:
        """Bytes still allocated."""
        return sum(one.nbytes for one in self.allocations)

    def __str__(self) -> str:
        count = f"{len(self.allocations)} allocation{'s' if len(self.allocations) > 1 else ''}"
        words = "".join(f", {name} {word!r}" for name, word in (("tag", self.tag), ("phase", self.phase)) if word)
        return f"{size_text(self.nbytes)} in {count} from {self.site or 'before the observer'}{words}"


def places(allocations: Iterable[Allocation]) -> list[Place]:
    """Allocations grouped by line, tag and phase, most bytes first."""
    found: dict[tuple[object, ...], list[Allocation]] = {}
    for one in allocations:
        site = one.sites[0] if one.sites else None
        key = (None if site is None else (id(site.code), site.line), one.tag, one.phase)
        found.setdefault(key, []).append(one)
    made = [
        Place(group[0].sites[0] if group[0].sites else None, group[0].tag, group[0].phase, tuple(group))
        for group in found.values()
    ]
    return sorted(made, key=lambda place: -place.nbytes)


class LeakReport:
    """Memory that is still allocated, by line. True in a condition if there is any."""

    def __init__(self, allocations: Iterable[Allocation]) -> None:
        self.allocations: tuple[Allocation, ...] = tuple(allocations)
        self.places: list[Place] = places(self.allocations)
        """Groups by line, tag and phase, most bytes first."""

    @property
    def nbytes(self) -> int:
        """Bytes still allocated."""
        return sum(one.nbytes for one in self.allocations)

    def raise_if_any(self) -> None:
        """Raise :class:`LeakError` if memory is still allocated."""
        if self:
            raise LeakError(self)

    def __bool__(self) -> bool:
        return bool(self.allocations)

    def __str__(self) -> str:
        if not self:
            return "nothing is allocated"
        count = f"{len(self.allocations)} allocation{'s' if len(self.allocations) > 1 else ''}"
        head = f"{size_text(self.nbytes)} in {count} still allocated"
        return "\n".join([f"{head}:", *(f"  {place}" for place in self.places)])

    def __repr__(self) -> str:
        return f"<LeakReport: {str(self).splitlines()[0].rstrip(':')}>"

    def _repr_html_(self) -> str:
        if not self:
            return "nothing is allocated"
        rows = "".join(
            f"<tr><td style='text-align:right'>{place.nbytes / 2**20:,.1f} MiB</td><td>{len(place.allocations)}</td>"
            f"<td style='text-align:left'><code>{escape(str(place.site or 'before the observer'))}</code></td>"
            f"<td>{escape(place.tag)}</td><td>{escape(place.phase)}</td></tr>"
            for place in self.places
        )
        head = "".join(f"<th>{name}</th>" for name in ("still allocated", "allocations", "from", "tag", "phase"))
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
