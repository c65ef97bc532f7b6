"""Arguments of launches, from every packing that the bindings take."""

from __future__ import annotations

import ctypes
from typing import Any

from streamalloc.driver.bindings import cuda

from ..errors import Result, check, need, not_modelled
from ..memory import is_accessible

CELLS = (ctypes._SimpleCData, ctypes.Structure, ctypes.Array)
Cells = tuple[Any, ...]
"""Copies of arguments as objects of ctypes; objects of the bindings without a known size are themselves."""
_END, _POINTER, _SIZE = 0, 1, 2  # CU_LAUNCH_PARAM_*
_WORD = 8


def unpack(name: str, params: Any, extra: Any, types: tuple[Any, ...] | None) -> Cells:
    """The arguments of a launch of the kernel ``name``, whose parameters have these types where they are known.

    The bindings pack the arguments; what is read is the memory that a driver would get.
    """
    node, buffer = packed(params, extra)
    slots = int(node.kernelParams)
    if buffer:
        return _from_buffer(buffer, _known(name, types))
    if not slots:
        check(not types)
        return ()
    if isinstance(params, tuple):
        count = len(params[0])
        missing = types is not None and count < len(types)
        not_modelled(missing, f"fewer arguments than {name!r} has parameters: the real driver crashes")
        cells = tuple(_given(*one) for one in zip(_addresses(slots, count), *params, strict=True))
        return cells if types is None else cells[: len(types)]
    known = _known(name, types)
    pairs = zip(_addresses(slots, len(known)), known, strict=True)
    return tuple(_read(address, kind) for address, kind in pairs)


def packed(params: Any, extra: Any) -> tuple[Any, int]:
    """The arguments of a launch as the bindings pack them: the node that owns the memory, and the address in ``extra``.
    The driver takes one of the two.
    """
    node = cuda.CUDA_KERNEL_NODE_PARAMS()
    node.kernelParams = params  # raises the errors of the bindings
    buffer = int(extra or 0)
    not_modelled(buffer and not is_accessible(buffer, _WORD), "extra where nothing lies: the real driver crashes")
    check(not (int(node.kernelParams) and buffer))
    return node, buffer


def _known(name: str, types: tuple[Any, ...] | None) -> tuple[Any, ...]:
    return need(types, f"arguments without types for {name!r}: register it with testing.kernel(..., types=...)")


def _addresses(slots: int, count: int) -> tuple[int, ...]:
    """The addresses of the arguments, from a ``void**``."""
    size = _WORD * count
    not_modelled(count and not is_accessible(slots, size), "arguments where nothing lies: the real driver crashes")
    return tuple((ctypes.c_uint64 * count).from_address(slots))


def _read(address: int, kind: Any) -> Any:
    size = ctypes.sizeof(kind)
    not_modelled(not is_accessible(address, size), "an argument where nothing lies: the real driver crashes")
    return kind.from_buffer_copy(ctypes.string_at(address, size))


def _given(address: int, value: Any, kind: Any) -> Any:
    """An argument with a C type, or with None: then it is an object of the bindings or of ctypes."""
    if kind is None:
        number = ctypes.c_int if isinstance(value, int) else ctypes.c_uint64
        kind = type(value) if isinstance(value, CELLS) else number if hasattr(value, "__int__") else None
    return value if kind is None else _read(address, kind)


def plain(cell: Any) -> Any:
    """An argument as kernels get it."""
    return (cell.value or 0) if isinstance(cell, ctypes._SimpleCData) else cell


def _from_buffer(extra: int, types: tuple[Any, ...]) -> Cells:
    """The arguments in a buffer that ``extra`` describes."""
    settings, at = {}, extra
    while (name := ctypes.c_uint64.from_address(at).value) != _END:
        check(name in (_POINTER, _SIZE))
        settings[name] = ctypes.c_uint64.from_address(at + _WORD).value
        at += 2 * _WORD
    check(len(settings) == 2)
    size = ctypes.c_uint64.from_address(settings[_SIZE]).value
    found = []
    for offset, kind in zip(offsets(types), types, strict=True):
        check(offset + ctypes.sizeof(kind) <= size, Result.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES)
        found.append(_read(settings[_POINTER] + offset, kind))
    return tuple(found)


def offsets(types: tuple[Any, ...]) -> list[int]:
    """Offsets of the parameters in bytes: each is aligned as its type is."""
    found, at = [], 0
    for kind in types:
        alignment = ctypes.alignment(kind)
        at = -(-at // alignment) * alignment
        found.append(at)
        at += ctypes.sizeof(kind)
    return found
