"""Reports of memory that is still allocated, by the line that allocated it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from streamalloc.core.errors import size_text
from streamalloc.core.html import code, mib, table
from streamalloc.observing.records import Allocation, Site


class LeakError(AssertionError):
    """Memory is still allocated; ``report`` lists the bytes and lines.

    :meth:`Observer.assert_nothing_left` raises it.
    """

    def __init__(self, report: LeakReport) -> None:
        super().__init__(report)
        self.report: LeakReport = report


class Place(NamedTuple):
    """Live allocations of one program line with equal names.

    A :class:`LeakReport` lists them.
    """

    site: Site | None
    """The line; None if none was recorded: of memory from before the observer started, or with ``depth=0``."""
    tag: str
    phase: str
    allocations: tuple[Allocation, ...]

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        """The names of their pool, stream, tag and phase (:attr:`Allocation.names`)."""
        return self.allocations[0].names

    @property
    def nbytes(self) -> int:
        """Bytes still allocated."""
        return sum(one.nbytes for one in self.allocations)

    def __str__(self) -> str:
        words = "".join(f", {name} {word!r}" for name, word in self.names)
        return f"{_amount(self.allocations)} from {self.site or 'an unknown line'}{words}"


def places(allocations: Iterable[Allocation]) -> list[Place]:
    """Allocations grouped by line and names, most bytes first."""
    found: dict[tuple[object, ...], list[Allocation]] = {}
    for one in allocations:
        site = one.sites[0] if one.sites else None
        key = (None if site is None else (id(site.code), site.line), one.names)
        found.setdefault(key, []).append(one)
    made = [Place(next(iter(one.sites), None), one.tag, one.phase, (one, *rest)) for one, *rest in found.values()]
    return sorted(made, key=lambda place: -place.nbytes)


def largest(allocations: Iterable[Allocation]) -> list[str]:
    """Lines of text for the five places with the most bytes, and one line for the others."""
    found = places(allocations)
    rest = tuple(one for place in found[5:] for one in place.allocations)
    lines = [str(place) for place in found[:5]]
    return lines + [f"{_amount(rest)} from other lines"] * bool(rest)


def _amount(allocations: Sequence[Allocation]) -> str:
    count = len(allocations)
    return f"{size_text(sum(one.nbytes for one in allocations))} in {count} allocation{'s' if count > 1 else ''}"


class LeakReport:
    """Memory that is still allocated, by line. True as a condition if there is any.

    :meth:`Observer.leaks` returns it.
    """

    def __init__(self, allocations: Iterable[Allocation]) -> None:
        self.allocations: tuple[Allocation, ...] = tuple(allocations)
        self.places: list[Place] = places(self.allocations)
        """Groups by line and names, most bytes first."""

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
        return "\n".join([f"{_amount(self.allocations)} still allocated:", *(f"  {place}" for place in self.places)])

    def __repr__(self) -> str:
        return f"<LeakReport: {str(self).splitlines()[0].rstrip(':')}>"

    def _repr_html_(self) -> str:
        if not self:
            return "nothing is allocated"
        given = {name for one in self.places for name, _ in one.names}
        named = [name for name in ("pool", "stream", "tag", "phase") if name in given]
        rows = []
        for one in self.places:
            words = (dict(one.names).get(name, "") for name in named)
            rows.append((mib(one.nbytes), len(one.allocations), code(str(one.site or "an unknown line")), *words))
        return table(("still allocated", "allocations", "from", *named), rows)
