"""Types of the elements that the host has written: reports copies to the host that read them as another type.

Types are recorded when work is queued. Work without a type, such as a fill or a kernel, makes the memory bytes again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from streamalloc.driver.checker.judge import Judge
from streamalloc.driver.checker.ranges import Addresses, Bytes, Piece
from streamalloc.driver.checker.stacks import Stack, here
from streamalloc.driver.checker.streams import number_of


class Typed(NamedTuple):
    """An interval of bytes with one type."""

    start: int
    end: int
    dtype: np.dtype[Any]
    stack: Stack
    """Place of the write."""


class ElementTypes:
    """The types of the elements in the memory of a driver."""

    def __init__(self, addresses: Addresses, judge: Judge) -> None:
        self._addresses = addresses
        self._judge = judge

    def copied(self, target: Any, source: Any, nbytes: int, what: str) -> None:
        """Record a copy, whose array of the host, if it has one, says the type."""
        if isinstance(source, np.ndarray):
            self.wrote(number_of(target), nbytes, source.dtype, here())
        elif isinstance(target, np.ndarray):
            self.read(number_of(source), nbytes, target.dtype, what)
        else:
            for piece, memory, start, end in self._places(number_of(source), nbytes):
                for one in _within(memory, start, end):
                    first = piece[1] + max(one.start, start) - start - number_of(source) + number_of(target)
                    self.wrote(first, min(one.end, end) - max(one.start, start), one.dtype, one.stack)

    def wrote(self, address: int, nbytes: int, dtype: np.dtype[Any], stack: Stack) -> None:
        """Record a write of elements. Single bytes are no type."""
        if _is_type(dtype):
            for _, memory, start, end in self._places(address, nbytes):
                _cut(memory, start, end)
                memory.types = (*memory.types, Typed(start, end, dtype, stack))

    def read(self, address: int, nbytes: int, dtype: np.dtype[Any], what: str) -> None:
        """Report a read of elements that were written as others."""
        if not _is_type(dtype):
            return
        for (range_, *_), memory, start, end in self._places(address, nbytes):
            for one in _within(memory, start, end):
                if not _fit(one.dtype, dtype):
                    what = f"{what} reads {range_} as {dtype}, but it was written as {one.dtype}."
                    remedy = f"read it as {one.dtype}, or as bytes (uint8) where the pattern is meant."
                    self._judge.report("another type", what, remedy, range_, here(), used=one.stack)
                    return

    def forget(self, pieces: Iterable[tuple[Piece, bool]]) -> None:
        """Make memory bytes that an operation writes."""
        for (range_, low, high), write in pieces:
            if write:
                for memory, start, end in range_.physical(low, high):
                    _cut(memory, start, end)

    def _places(self, address: int, nbytes: int) -> Iterable[tuple[Piece, Bytes, int, int]]:
        for piece in self._addresses.pieces(address, nbytes):
            if piece[0].ended is None:
                for memory, start, end in piece[0].physical(*piece[1:]):
                    yield piece, memory, start, end


def _within(memory: Bytes, start: int, end: int) -> list[Typed]:
    return [one for one in memory.types if one.start < end and start < one.end]


def _cut(memory: Bytes, start: int, end: int) -> None:
    """Take the types from an interval."""
    if memory.types:
        memory.types = tuple(
            one._replace(start=low, end=high)
            for one in memory.types
            for low, high in ((one.start, min(one.end, start)), (max(one.start, end), one.end))
            if low < high
        )


def _is_type(dtype: np.dtype[Any]) -> bool:
    return dtype.itemsize > 1 and dtype.kind in "iufcmM"


def _fit(one: np.dtype[Any], other: np.dtype[Any]) -> bool:
    """Whether elements of a type may be read as another: unsigned integers as patterns, complex numbers as pairs."""
    kinds = {one.kind, other.kind}
    if one.itemsize == other.itemsize:
        return one.newbyteorder("=") == other.newbyteorder("=") or "u" in kinds or kinds <= {"i", "m", "M"}
    return kinds == {"c", "f"} and max(one.itemsize, other.itemsize) == 2 * min(one.itemsize, other.itemsize)
