"""What the multimem instructions of PTX do: stores to the replicas of multicast memory, and reductions over them.

Each of the three functions makes the operation that :mod:`.multimem` puts into a stream of the simulated driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from streamalloc.driver.simulator import STEP_BYTES, CopyFrom, Launch, Move, Piece

__all__ = ["load_reduce", "reduce", "store"]

_Values = npt.NDArray[Any]

_OPERATIONS: dict[str, Callable[..., _Values]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def store(launch: Launch, address: int, data: bytes) -> Move:
    launch.check_multicast(address, len(data), writes=True)
    return CopyFrom(launch.machine, launch.context, address, data)


def reduce(launch: Launch, address: int, data: bytes, dtype: str, op: str) -> Move:
    launch.check_multicast(address, len(data), writes=True)
    return Reduce(launch, address, data, dtype, op)


def load_reduce(launch: Launch, target: int, address: int, size: int, dtype: str, op: str) -> Move:
    launch.check_multicast(address, size, writes=False)
    launch.check_target(target, size)
    return LoadReduce(launch, target, address, size, dtype, op)


def _at(address: int, size: int, dtype: str) -> _Values:
    return np.frombuffer(memoryview((ctypes.c_ubyte * size).from_address(address)), np.dtype(dtype))


def _combine(op: str, left: _Values, right: _Values) -> _Values:
    with np.errstate(all="ignore"):
        return np.asarray(_OPERATIONS[op](left, right))


class Reduce(Move):
    """``multimem.red``. Atomic towards others of its kind on the same object, also of other processes."""

    def __init__(self, launch: Launch, target: int, data: bytes, dtype: str, op: str) -> None:
        super().__init__(launch.machine, launch.context, target, len(data))
        self._data = data
        self._dtype = dtype
        self._op = op

    def step(self) -> bool:
        found = self.machine.multicast.mapping_at(self.target)
        if found is None:
            self.fail()
            return True
        with found[1].team.locked():
            return super().step()

    def put(self, address: int, offset: int, size: int) -> None:
        replica = _at(address, size, self._dtype)
        values = np.frombuffer(self._data, replica.dtype, size // replica.itemsize, offset)
        replica[:] = _combine(self._op, replica, values)


class LoadReduce(Move):
    """``multimem.ld_reduce``. The replicas are taken in the order in which their devices were added; hardware has no
    particular order. Sums of float16 are rounded once, as with the qualifier ``.acc::f32``.
    """

    def __init__(self, launch: Launch, target: int, source: int, size: int, dtype: str, op: str) -> None:
        super().__init__(launch.machine, launch.context, target, size)
        self._from = source
        self._dtype = dtype
        self._op = op
        self._values = np.empty(0, dtype)

    def step(self) -> bool:
        machine = self.machine
        size = min(STEP_BYTES, self.size - self.done)
        found = machine.multicast.mapping_at(self._from + self.done)
        if found is None:
            self.fail()
            return True
        with found[1].team.locked():
            replicas = machine.multicast.replicas(self._from + self.done, size)
            if replicas is None:
                self.fail()
                return True
            self._values = self._reduced([self._gather(pieces, size) for pieces in replicas.values()])
        return super().step()

    def _gather(self, pieces: list[Piece], size: int) -> _Values:
        values = bytearray(size)
        for address, at, length in pieces:
            values[at : at + length] = ctypes.string_at(address, length)
        return np.frombuffer(values, np.dtype(self._dtype))

    def _reduced(self, replicas: list[_Values]) -> _Values:
        result = replicas[0].astype(np.float32) if self._dtype == "float16" else replicas[0]
        for one in replicas[1:]:
            result = _combine(self._op, result, one.astype(result.dtype))
        return result.astype(self._dtype)

    def put(self, address: int, offset: int, size: int) -> None:
        ctypes.memmove(address, self._values.ctypes.data + offset - self.done, size)
