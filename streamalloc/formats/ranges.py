"""Ranges of addresses, and a table that finds the range that contains an address."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Generic, TypeVar


class Extent:
    """Range of addresses: the first address ``base``, and the number of bytes ``size``."""

    base: int
    size: int

    @property
    def end(self) -> int:
        """First address after the range."""
        return self.base + self.size


E = TypeVar("E", bound=Extent)


class RangeMap(Generic[E]):
    """Table of ranges that do not overlap. :meth:`find` returns the range that contains an address."""

    # An exception of a signal handler in `add` or `remove` may leave an entry of `_bases` without a range in `at`.
    # Look-ups skip such an entry.

    def __init__(self) -> None:
        self.at: dict[int, E] = {}
        """Ranges by first address. Most look-ups need only this dict."""
        self._bases: list[int] = []

    def add(self, extent: E) -> E:
        """Add ``extent``, and return it. A range that begins at the same address is replaced."""
        at = bisect_left(self._bases, extent.base)
        if self._bases[at : at + 1] != [extent.base]:
            self._bases.insert(at, extent.base)
        self.at[extent.base] = extent
        return extent

    def remove(self, extent: E) -> None:
        """Remove the range that begins at the same address as ``extent``. No effect if there is none."""
        self.at.pop(extent.base, None)
        at = bisect_left(self._bases, extent.base)
        if self._bases[at : at + 1] == [extent.base]:
            del self._bases[at]

    def find(self, address: int) -> E | None:
        """Return the range that contains ``address``; None if no range does."""
        found = self.at.get(address)
        if found is not None:
            return found
        at = bisect_right(self._bases, address)
        while at:
            at -= 1
            found = self.at.get(self._bases[at])
            if found is not None:
                return found if address < found.end else None
        return None

    def overlapping(self, start: int, end: int) -> list[E]:
        """Return a list of the ranges that overlap the addresses from ``start`` to ``end`` (exclusive), sorted by
        address.
        """
        first = self.find(start)
        bases = self._bases[bisect_right(self._bases, start) : bisect_left(self._bases, end)]
        later = [one for base in bases if (one := self.at.get(base)) is not None]
        return [first, *later] if first is not None and first.base < end else later
