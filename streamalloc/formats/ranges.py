"""Ranges of addresses, a table that finds the range that contains an address, and values and sets of addresses."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
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


V = TypeVar("V")


class Runs(Generic[V]):
    """A value for each address, stored once for each run of adjacent addresses that have equal values."""

    def __init__(self, value: V) -> None:
        self._starts = [0]
        self._values = [value]

    def change(self, start: int, end: int, change: Callable[[V], V]) -> None:
        """Replace the value of each address from ``start`` up to ``end`` by ``change(value)``."""
        first, last, values = self._split(start), self._split(end), self._values
        for at in range(first, last):
            values[at] = change(values[at])
        for at in range(last, max(first - 1, 0), -1):
            if values[at] == values[at - 1]:
                del self._starts[at], values[at]

    def put(self, start: int, end: int, value: V) -> None:
        """Give each address from ``start`` up to ``end`` the value ``value``."""
        self.change(start, end, lambda _: value)

    def _split(self, at: int) -> int:
        """Make a run begin at address ``at``, if none does. Returns the run's index."""
        number = bisect_left(self._starts, at)
        if number == len(self._starts) or self._starts[number] != at:
            self._starts.insert(number, at)
            self._values.insert(number, self._values[number - 1])
        return number

    def over(self, start: int, end: int) -> Iterator[tuple[int, int, V]]:
        """Yield start, end and value of each run between ``start`` and ``end``. The first and the last run are cut to
        this range.
        """
        first, last = bisect_right(self._starts, start) - 1, bisect_left(self._starts, end)
        bounds = [start, *self._starts[first + 1 : last], end]
        return zip(bounds, bounds[1:], self._values[first:last], strict=False)


class Intervals(Runs[bool]):
    """Set of addresses. Iteration yields a tuple for each range, in order: its first address, and the first address
    after it.
    """

    def __init__(self) -> None:
        super().__init__(False)

    def add(self, start: int, end: int) -> None:
        """Add the addresses from ``start`` up to ``end``."""
        self.put(start, end, True)

    def remove(self, start: int, end: int) -> None:
        """Remove the addresses from ``start`` up to ``end``."""
        self.put(start, end, False)

    def covers(self, start: int, end: int) -> bool:
        """Whether all addresses from ``start`` up to ``end`` are in the set."""
        at = bisect_right(self._starts, start) - 1
        return self._values[at] and self._starts[at + 1] >= end

    def within(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges of the set between ``start`` and ``end``, as iteration yields them."""
        return [(low, high) for low, high, there in self.over(start, end) if there]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        runs = zip(self._starts, self._starts[1:], self._values, strict=False)
        return ((start, end) for start, end, there in runs if there)
