"""Elements of arrays as bytes: fill values, indices, and types in array interfaces."""

from __future__ import annotations

import operator
from itertools import groupby
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np

Index: TypeAlias = "int | slice | EllipsisType | tuple[int | slice | EllipsisType | None, ...] | None"
"""A basic index of NumPy."""

_WORDS = (1, 2, 4)
_NUMBERS = (int, float, complex, np.number)


def to_element(value: object, dtype: np.dtype[Any]) -> bytes:
    """The bytes of one element with this value, in memory order.

    Raises
    ------
    TypeError, ValueError
        The type cannot hold the value, except for rounding of floating-point numbers.
    """
    element = np.empty((), dtype)
    try:
        with np.errstate(over="raise", invalid="raise"):
            element[()] = value
            kept = _keeps(element, value)
    except TypeError as error:
        raise TypeError(f"value={value!r} is no value of {dtype}") from error
    except (ValueError, ArithmeticError) as error:
        raise ValueError(f"value={value!r} is no value of {dtype}") from error
    if not kept:
        kind = ValueError if isinstance(value, _NUMBERS) else TypeError
        raise kind(f"value={value!r} is no value of {dtype}")
    return element.tobytes()


def _keeps(element: np.ndarray[Any, Any], value: object) -> bool:
    """Whether an element holds the assigned value, up to floating-point rounding."""
    dtype = element.dtype
    if isinstance(value, (bytes, bytearray)):
        padded = value.ljust(dtype.itemsize, b"\0") if dtype.kind == "S" else value
        return element.tobytes() == padded
    if dtype.names is not None:
        return isinstance(value, (tuple, np.void))
    if dtype.kind == "V" and dtype.type is not np.void:  # of ml_dtypes
        return isinstance(value, _NUMBERS)
    given = np.asarray(value)
    rounds = dtype.kind in "fc" and given.dtype.kind in "biufc"
    return (rounds and np.can_cast(given.dtype, dtype, "same_kind")) or bool(np.all(element == given))


def fill_pattern(value: int | bytes | np.generic, width: int | None) -> tuple[int, int]:
    """The fill pattern as the driver's unsigned number, and its width in bytes.

    Raises
    ------
    TypeError, ValueError
        The value is not a pattern, or does not fit the width.
    """
    if isinstance(value, np.generic):
        value = value.tobytes()
    if isinstance(value, (bytes, bytearray)):
        if len(value) not in _WORDS or width not in (None, len(value)):
            raise ValueError(f"value={value!r}: a pattern has 1, 2 or 4 bytes{f', and width={width}' if width else ''}")
        return int.from_bytes(value, "little"), len(value)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"value must be an integer, bytes or a numpy scalar, not {type(value).__name__} ({value!r})")
    width = 1 if width is None else width
    if width not in _WORDS:
        raise ValueError(f"width={width!r}: allowed are 1, 2 and 4 bytes")
    number = operator.index(value)
    if not -(1 << 8 * width - 1) <= number < 1 << 8 * width:
        raise ValueError(f"value={number} does not fit a pattern of {width} byte{'s' if width > 1 else ''}")
    return number % (1 << 8 * width), width


def fill_steps(element: bytes, address: int) -> tuple[bytes, list[tuple[int, int, bytes]]]:
    """Compute fills that write elements at an address.

    If repetitions of 1, 2 or 4 bytes make all elements, return that pattern and no steps. Otherwise return an empty
    pattern and the fills that make the first element: start byte, end byte (exclusive), pattern.
    """
    size = len(element)
    widths = [width for width in _WORDS if size % width == 0 and address % width == 0]
    for width in widths:
        if element == element[:width] * (size // width):
            return element[:width], []
    width = widths[-1]
    steps, at = [], 0
    for word, run in groupby(element[start : start + width] for start in range(0, size, width)):
        end = at + width * len(list(run))
        steps.append((at, end, word))
        at = end
    return b"", steps


def part_of(shape: tuple[int, ...], itemsize: int, index: Index) -> tuple[int, tuple[int, ...]]:
    """Return offset in bytes and shape of the part of a C-contiguous array that a basic index selects.

    Raises
    ------
    TypeError, IndexError
        The index is not a basic index, or does not fit the shape.
    ValueError
        The selection is not contiguous.
    """
    indices = index if isinstance(index, tuple) else (index,)
    for one in indices:
        if isinstance(one, (bool, np.bool_)) or not (
            one is None or one is Ellipsis or isinstance(one, slice) or hasattr(one, "__index__")
        ):
            raise TypeError(f"{one!r} is no basic index: allowed are integers, slices, ... and None")
    basic = tuple(one if one is None or one is Ellipsis or isinstance(one, slice) else operator.index(one)
                  for one in indices)  # fmt: skip
    # With an ellipsis NumPy returns a view and reads no element, so the array needs no memory.
    basic = basic if Ellipsis in basic else (*basic, Ellipsis)
    strides = [itemsize * int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))]
    whole = np.lib.stride_tricks.as_strided(np.empty((), f"V{itemsize}"), shape, strides)
    part = whole[basic]
    if not part.flags.c_contiguous:
        raise ValueError(f"{index!r} of shape {shape} is not contiguous: a view is")
    return (part.ctypes.data - whole.ctypes.data if part.size else 0), part.shape


def interface_type(dtype: np.dtype[Any]) -> dict[str, Any] | None:
    """The entries of an array interface for a type; None if array interfaces cannot name it."""
    if dtype.names is None:
        return {"typestr": dtype.str} if np.dtype(dtype.str) == dtype else None
    try:
        return {"typestr": dtype.str, "descr": dtype.descr} if np.dtype(dtype.descr) == dtype else None
    except ValueError:  # fields that overlap
        return None
