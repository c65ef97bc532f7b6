"""What the multimem instructions of PTX do: reductions over the replicas of multicast memory, and of each of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..multicast import Piece
from .copies import PIECE, Move

if TYPE_CHECKING:
    from ..machine import Context, Machine

_Values = npt.NDArray[Any]

_OPERATIONS: dict[str, Callable[..., _Values]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_OF_INTEGERS = frozenset(_OPERATIONS)
# The PTX manual's table; numpy has no bfloat16. Signed 64-bit integers are added as unsigned ones.
SUPPORTED: dict[str, frozenset[str]] = {
    **dict.fromkeys(("uint32", "int32", "uint64", "int64"), _OF_INTEGERS),
    "float16": frozenset(("add", "min", "max")),
    "float32": frozenset(("add",)),
    "float64": frozenset(("add",)),
}
"""By type, as numpy calls it: the operations that there is an instruction for."""


def check_supported(dtype: str, op: str, address: int, size: int) -> None:
    """Raise ValueError unless hardware has such an instruction, for values in a place like this."""
    if dtype not in SUPPORTED:
        raise ValueError(f"dtype={dtype!r}: multimem instructions are for {', '.join(SUPPORTED)}")
    if op not in SUPPORTED[dtype]:
        raise ValueError(f"op={op!r}: for {dtype} there are {', '.join(sorted(SUPPORTED[dtype]))}")
    itemsize = np.dtype(dtype).itemsize
    if address % itemsize or size % itemsize:
        raise ValueError(f"{size} bytes at {address:#x}: address and size must be multiples of {itemsize}, for {dtype}")


def _at(address: int, size: int, dtype: str) -> _Values:
    return np.frombuffer(memoryview((ctypes.c_ubyte * size).from_address(address)), np.dtype(dtype))


def _combine(op: str, left: _Values, right: _Values) -> _Values:
    with np.errstate(all="ignore"):
        return np.asarray(_OPERATIONS[op](left, right))


class Reduce(Move):
    """``multimem.red``. Atomic towards others of its kind on the same object, also of other processes."""

    def __init__(self, machine: Machine, context: Context, target: int, data: bytes, dtype: str, op: str) -> None:
        super().__init__(machine, context, target, len(data))
        self._data = data
        self._dtype = dtype
        self._op = op

    def step(self) -> bool:
        found = self._machine.multicast.mapping_at(self._target)
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

    def __init__(
        self, machine: Machine, context: Context, target: int, source: int, size: int, dtype: str, op: str
    ) -> None:
        super().__init__(machine, context, target, size)
        self._from = source
        self._dtype = dtype
        self._op = op
        self._values = np.empty(0, dtype)

    def step(self) -> bool:
        machine = self._machine
        size = min(PIECE, self._size - self._done)
        found = machine.multicast.mapping_at(self._from + self._done)
        if found is None:
            self.fail()
            return True
        with found[1].team.locked():
            replicas = machine.multicast.replicas(self._from + self._done, size)
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
        ctypes.memmove(address, self._values.ctypes.data + offset - self._done, size)
