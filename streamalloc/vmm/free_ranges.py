"""Free memory by address: the smallest sufficient range is found first, and adjacent ones are merged."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

_SHIFT = 48
_OFFSET = (1 << _SHIFT) - 1


class FreeRanges:
    """Free ranges with memory, by size and by address, as offsets in bytes.

    The list by size alone says which ranges are free. A range leaves it first and enters it last, so an exception of a
    signal handler in between loses the range, and never hands it out twice.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        """Sorted numbers made of size and offset. To compare numbers runs no Python code."""
        self._starts: dict[int, int] = {}
        """First offset of each range, by its last one. May have entries of lost ranges."""
        self._stops: dict[int, int] = {}
        """Last offset of each range, by its first one. May have entries of lost ranges."""

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """First and last offset of each range, the largest first."""
        for key in reversed(self._sizes[:]):
            yield key & _OFFSET, (key & _OFFSET) + (key >> _SHIFT)

    def cut(self, nbytes: int) -> int | None:
        """Remove the first bytes of the smallest sufficient range, and return their offset."""
        sizes = self._sizes
        at = bisect_left(sizes, nbytes << _SHIFT)
        if at == len(sizes):
            return None
        key = sizes.pop(at)
        start = key & _OFFSET
        rest = key - (nbytes << _SHIFT)
        stop = self._stops.pop(start, 0)
        if rest > _OFFSET:
            at = start + nbytes
            self._stops[at] = stop
            self._starts[stop] = at
            insort(sizes, rest + nbytes)
        else:
            self._starts.pop(stop, None)
        return start

    def add(self, start: int, stop: int) -> None:
        """Add a range, and merge it with its neighbours."""
        before, after = self._starts.get(start), self._stops.get(stop)
        if before is not None and self.remove(before, start):
            start = before
        if after is not None and self.remove(stop, after):
            stop = after
        self._stops[start] = stop
        self._starts[stop] = start
        insort(self._sizes, (stop - start) << _SHIFT | start)

    def remove(self, start: int, stop: int) -> bool:
        """Remove a whole range. Returns False if it is not free."""
        sizes, key = self._sizes, (stop - start) << _SHIFT | start
        at = bisect_left(sizes, key)
        found = at < len(sizes) and sizes[at] == key
        if found:
            del sizes[at]
        self._stops.pop(start, None)
        self._starts.pop(stop, None)
        return found

    def without(self, part: tuple[int, int], start: int, stop: int) -> tuple[int, int]:
        """Remove the bytes between two offsets from a range, and return what is left before them."""
        if self.remove(*part):
            if part[0] < start:
                self.add(part[0], start)
            if stop < part[1]:
                self.add(stop, part[1])
        return part[0], start

    def start_of(self, stop: int) -> int:
        """Return the first offset of the range that ends at ``stop``; ``stop`` if there is none."""
        start = self._starts.get(stop, stop)
        return start if self._is_free(start, stop) else stop

    def end_of(self, start: int) -> int:
        """Return the last offset of the range that begins at ``start``; ``start`` if there is none."""
        stop = self._stops.get(start, start)
        return stop if self._is_free(start, stop) else start

    def _is_free(self, start: int, stop: int) -> bool:
        key = (stop - start) << _SHIFT | start
        at = bisect_left(self._sizes, key)
        return at < len(self._sizes) and self._sizes[at] == key
