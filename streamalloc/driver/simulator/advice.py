"""Advice for the pages of managed memory, and the places that they were prefetched to."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from .blocks import round_up
from .constants import Place

PAGE = 4096
"""Bytes: advice and prefetches are rounded to pages of the host."""


@dataclass(frozen=True)
class Advice:
    """Advice for a page."""

    read_mostly: bool = False
    preferred: Place | None = None
    accessed_by: frozenset[Place] = frozenset()
    prefetched: Place | None = None
    """Place of the last prefetch."""


class Pages:
    """The advice for each page of an allocation, as runs of equal pages."""

    def __init__(self, start: int, end: int) -> None:
        self._starts = [start]
        self._advice = [Advice()]
        self._end = end

    def _split(self, at: int) -> int:
        """The number of the run that begins at an address, which is made if need be."""
        if at >= self._end:
            return len(self._starts)
        number = bisect_left(self._starts, at)
        if number == len(self._starts) or self._starts[number] != at:
            self._starts.insert(number, at)
            self._advice.insert(number, self._advice[number - 1])
        return number

    def change(self, start: int, end: int, change: Callable[[Advice], Advice]) -> None:
        """Change the pages that a range touches."""
        first = self._split(max(start // PAGE * PAGE, self._starts[0]))
        last = self._split(min(round_up(end, PAGE), self._end))
        self._advice[first:last] = [change(one) for one in self._advice[first:last]]
        merged = [at for at in range(len(self._starts)) if at == 0 or self._advice[at] != self._advice[at - 1]]
        self._starts = [self._starts[at] for at in merged]
        self._advice = [self._advice[at] for at in merged]

    def over(self, start: int, end: int) -> list[Advice]:
        """The advice of the pages of a range."""
        return self._advice[max(bisect_right(self._starts, start) - 1, 0) : bisect_left(self._starts, end)]
