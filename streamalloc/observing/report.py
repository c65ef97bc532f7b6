"""Reports of memory that is still allocated, by the line that allocated it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from streamalloc.core.errors import size_text
from streamalloc.core.html import code, mib, table
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
        words = "".join(f", {name} {word!r}" for name, word in (("tag", self.tag), ("phase", self.phase)) if word)
        return f"{_amount(self)} from {self.site or 'before the observer'}{words}"


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


def _amount(of: Place | LeakReport) -> str:
    count = len(of.allocations)
    return f"{size_text(of.nbytes)} in {count} allocation{'s' if count > 1 else ''}"


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
        return "\n".join([f"{_amount(self)} still allocated:", *(f"  {place}" for place in self.places)])

    def __repr__(self) -> str:
        return f"<LeakReport: {str(self).splitlines()[0].rstrip(':')}>"

    def _repr_html_(self) -> str:
        if not self:
            return "nothing is allocated"
        rows = (
            (mib(one.nbytes), len(one.allocations), code(str(one.site or "before the observer")), one.tag, one.phase)
            for one in self.places
        )
        return table(("still allocated", "allocations", "from", "tag", "phase"), rows)
