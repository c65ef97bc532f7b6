"""Copies and fills as stream operations that move bytes step by step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from streamalloc.simulator.constants import STEP
from streamalloc.simulator.contexts import Context
from streamalloc.simulator.errors import Result
from streamalloc.simulator.machine import Machine
from streamalloc.simulator.memory import Shape, Side
from streamalloc.simulator.multicast import Segment
from streamalloc.simulator.scheduler import Operation

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
        self._context.error = self._context.error or Result.CUDA_ERROR_ILLEGAL_ADDRESS
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


def copy(machine: Machine, context: Context, shape: Shape, target: Side, source: Side) -> Operation:
    """The copy between two sides of ordinary memory."""

    def row(number: int) -> Move:
        z, y = divmod(number, shape.height)
        start = source.address + z * source.plane + y * source.pitch

        def put(address: int, offset: int, size: int, keep: object = source.data) -> None:
            ctypes.memmove(address, start + offset, size)

        to = target.address + z * target.plane + y * target.pitch
        return Move(machine, context, to, shape.width, put, start if source.data is None else None)

    return _rows(shape.height * shape.depth, shape.width, row)


def fill(
    machine: Machine, context: Context, target: int, pattern: bytes, count: int, rows: int = 1, pitch: int = 0
) -> Operation:
    """The fill of ``rows`` rows of ``count`` elements each."""

    def put(address: int, offset: int, size: int) -> None:
        if len(set(pattern)) == 1:
            ctypes.memset(address, pattern[0], size)
        else:
            ctypes.memmove(address, pattern * (size // len(pattern)), size)

    size = count * len(pattern)
    return _rows(rows, size, lambda number: Move(machine, context, target + number * pitch, size, put))


def _rows(count: int, size: int, row: Callable[[int], Move]) -> Operation:
    return row(0) if count == 1 else Rows(count, size, row)
