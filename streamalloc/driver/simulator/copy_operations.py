"""Copies and fills as stream operations that move bytes step by step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

from .constants import STEP
from .contexts import Context
from .errors import Result
from .machine import Machine
from .memory import view_address
from .multicast import Segment
from .timeline import Operation

Put = Callable[[int, int, int], object]
"""Writes bytes: target address, offset in the operation, size."""


class Move(Operation):
    """Writes bytes step by step. If memory was unmapped meanwhile, the context fails, not the process."""

    def __init__(
        self, machine: Machine, context: Context, target: int, size: int, put: Put, source: int | None = None
    ) -> None:
        self._machine = machine
        self._context = context
        self._target = target
        self._size = size
        self._put = put
        self._done = 0
        self._into_simulated = machine.banks.arenas.find(target) is not None
        self._source = source
        self._from_simulated = source is not None and machine.banks.arenas.find(source) is not None
        self.heavy: bool = size > STEP

    def step(self) -> bool:
        size = min(STEP, self._size - self._done)
        targets, source = self._targets(size), self._source
        here = self._machine.banks.is_there
        if targets and (source is None or here(source + self._done, size, self._from_simulated)):
            for address, at, length in targets:
                self._put(address, self._done + at, length)
            self._done += size
            return self._done >= self._size
        return self.fail()

    def fail(self) -> bool:
        self._context.error = Result.CUDA_ERROR_ILLEGAL_ADDRESS
        return True

    def _targets(self, size: int) -> list[Segment] | None:
        """Targets of the next bytes: one address, or one per replica of multicast memory."""
        target = self._target + self._done
        if self._machine.banks.is_there(target, size, self._into_simulated, write=True):
            return [Segment(target, 0, size)]
        return self._machine.multicast.targets(target, size) if self._into_simulated else None

    def touches(self, start: int, end: int) -> bool:
        ends = ((self._target, self._into_simulated), (self._source or 0, self._from_simulated))
        return any(simulated and one < end and start < one + self._size for one, simulated in ends)


def _copy_row(machine: Machine, context: Context, target: int, source: int | bytes, size: int) -> Move:
    """A copy from an address, or from bytes that were read at the call."""
    taken = isinstance(source, bytes)
    start = view_address(source) if isinstance(source, bytes) else source

    def put(address: int, offset: int, size: int, keep: object = source) -> None:
        ctypes.memmove(address, start + offset, size)

    return Move(machine, context, target, size, put, None if taken else start)


def _fill_row(machine: Machine, context: Context, target: int, pattern: bytes, count: int) -> Move:
    def put(address: int, offset: int, size: int) -> None:
        if len(set(pattern)) == 1:
            ctypes.memset(address, pattern[0], size)
        else:
            ctypes.memmove(address, pattern * (size // len(pattern)), size)

    return Move(machine, context, target, count * len(pattern), put)


class Rows(Operation):
    """Copies or fills the rows of a plane or a box, one after another."""

    def __init__(self, count: int, size: int, row: Callable[[int], Move]) -> None:
        self._count = count
        self._size = size
        self._row = row
        self._done = 0
        self._begun: Move | None = None
        self.heavy: bool = count * size > STEP

    def step(self) -> bool:
        moved = 0
        while self._done < self._count and moved < STEP:
            move = self._begun or self._row(self._done)
            done = move.step()
            self._begun = None if done else move
            self._done += done
            moved += min(self._size, STEP)
        return self._done == self._count

    def touches(self, start: int, end: int) -> bool:
        return any(self._row(at).touches(start, end) for at in range(self._count))


class Shape(NamedTuple):
    """The shape of a copy (a row, a plane or a box of bytes), with the pitches of both sides."""

    width: int
    height: int
    depth: int
    target_pitch: int
    target_slice: int
    source_pitch: int
    source_slice: int
    fits: tuple[bool, bool] = (True, True)
    """For target and source: whether rows fit the pitch, and slices the height."""
    left_out: tuple[int, int] = (0, 0)
    """Bytes skipped before the first written, and before the first read."""

    @classmethod
    def row(cls, size: int) -> Shape:
        return cls(size, 1, 1, size, size, size, size)

    @property
    def size(self) -> int:
        return self.width * self.height * self.depth

    @property
    def target_span(self) -> int:
        """Bytes from the first written to the last."""
        return (self.depth - 1) * self.target_slice + (self.height - 1) * self.target_pitch + self.width

    @property
    def source_span(self) -> int:
        return (self.depth - 1) * self.source_slice + (self.height - 1) * self.source_pitch + self.width

    def copy(self, machine: Machine, context: Context, target: int, source: int | bytes) -> Operation:
        """The copy between two addresses, or from bytes that were read at the call."""
        if self.height * self.depth == 1:
            return _copy_row(machine, context, target, source, self.width)
        start = view_address(source) if isinstance(source, bytes) else source

        def row(number: int, keep: object = source) -> Move:
            z, y = divmod(number, self.height)
            to = target + z * self.target_slice + y * self.target_pitch
            return _copy_row(machine, context, to, start + z * self.source_slice + y * self.source_pitch, self.width)

        return Rows(self.height * self.depth, self.width, row)


def fill(
    machine: Machine, context: Context, target: int, pattern: bytes, count: int, rows: int = 1, pitch: int = 0
) -> Operation:
    """The fill of ``rows`` rows of ``count`` elements each."""
    if rows == 1:
        return _fill_row(machine, context, target, pattern, count)
    size = count * len(pattern)
    return Rows(rows, size, lambda number: _fill_row(machine, context, target + number * pitch, pattern, count))
