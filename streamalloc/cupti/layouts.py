"""Layout in memory of the arguments of driver functions, derived from the signatures in cuda-bindings.

CUPTI gives a callback the address of a struct with the arguments of the call, in their order. From the bindings come
the types of the arguments (the C signature of each function) and the names of the inputs (the Python function). All
other arguments are pointers through which the driver answers. So there is no table of functions to maintain. Only the
sizes of structs in arrays are listed here (``_ELEMENTS``), because the bindings do not report them.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from streamalloc.driver.bindings import c_signature, cuda, parameters, takes

Read = Callable[[int], Any]
"""Function that takes an address and returns the value that is stored there."""

_NUMBERS: dict[str, Any] = {
    **dict.fromkeys(("int", "CUdevice"), ctypes.c_int32),
    **dict.fromkeys(("unsigned int", "cuuint32_t"), ctypes.c_uint32),
    "unsigned char": ctypes.c_uint8,
    "unsigned short": ctypes.c_uint16,
    "float": ctypes.c_float,
    "PY_LONG_LONG": ctypes.c_int64,
}
"""ctypes type of each number type of C. Values of all other types are handles, addresses and sizes, of 8 bytes."""
_BY_VALUE = {"CUmemLocation": (8, 4), "CUipcMemHandle": (64, 1), "CUipcEventHandle": (64, 1)}
"""Size and alignment in bytes of each struct that is passed by value."""
_ELEMENTS = {"CUmemAccessDesc": 12, "CUmemcpyAttributes": 24, "CUstreamBatchMemOpParams": 48}
"""Size in bytes of each struct that is passed in an array."""
_MOST = 65536
"""Largest number of elements that are read of an array. Without this limit a wrong length could exhaust memory."""


class Layout(NamedTuple):
    """Layout of the struct with the arguments of a driver function. For each argument: offset in bytes, and its
    reader.
    """

    inputs: tuple[tuple[int, Read], ...]
    """Input arguments, in the order of the bindings' Python function."""
    arrays: tuple[tuple[int, int, int, Read], ...]
    """Arrays among the inputs: index of the array, index of its length, size of an element in bytes, and the function
    that reads an element.
    """
    outputs: tuple[tuple[int, Read], ...]
    """Pointer arguments, to which the driver writes its answer."""

    def arguments(self, at: int) -> tuple[Any, ...]:
        """Return the input arguments of the struct at the address ``at``, in the form that the bindings' function
        takes.
        """
        values = [read(at + offset) for offset, read in self.inputs]
        for index, length, size, read in self.arrays:
            first, count = values[index], min(int(values[length] or 0), _MOST)
            values[index] = tuple(read(first + size * one) for one in range(count)) if first else ()
        return tuple(values)

    def answer(self, at: int, result: int) -> tuple[Any, ...]:
        """Return the driver's answer, read through the pointers of the struct at the address ``at``.

        It has the form of the bindings, with the result code first. ``result``: the ``CUresult`` as a number. If it is
        an error, all other items are None; otherwise an item is None if its pointer is null.
        """
        if result:
            return (_member(cuda.CUresult, result), *(None for _ in self.outputs))
        pointers = ((_word(at + offset), read) for offset, read in self.outputs)
        return (cuda.CUresult.CUDA_SUCCESS, *(read(pointer) if pointer else None for pointer, read in pointers))


@functools.cache
def layout(function: str) -> Layout | None:
    """Return the layout of a driver function's arguments; None if the installed bindings lack the function."""
    types, names = c_signature(function), parameters(function)
    if not hasattr(cuda, function):
        return None
    # The bindings' Python function takes only the inputs. The outputs are the first pointers to non-constant memory in
    # the C signature; their number is that of the arguments which the Python function lacks.
    answers = len(types) - len(names)
    inputs: list[tuple[int, Read]] = []
    outputs: list[tuple[int, Read]] = []
    kinds, offset = [], 0
    for kind in types:
        size, alignment = _size(kind)
        offset += -offset % alignment
        if len(outputs) < answers and kind.endswith("*") and "const" not in kind.removesuffix("*"):
            outputs.append((offset, _reads(kind[:-1].strip())))
        else:
            inputs.append((offset, _pointed(kind) if kind.endswith("*") else _reads(kind)))
            kinds.append(kind)
        offset += size
    return Layout(tuple(inputs), tuple(_arrays(function, kinds, names)), tuple(outputs))


def _arrays(function: str, kinds: list[str], names: tuple[str, ...]) -> list[tuple[int, int, int, Read]]:
    listed = [at for at, one in enumerate(takes(function)) if re.search(r": (?:Optional\[)?(?:tuple|list)\[", one)]
    counts = [index for index, name in enumerate(names) if re.search(r"(?i)count|num", name)]
    found = []
    for index in listed:
        # The length of a list is the next argument whose name contains "count" or "num". If no such argument follows
        # the list, the length is the last such argument before it.
        length = next((one for one in counts if one > index), next(reversed(counts), None))
        kind = kinds[index].removesuffix("*").replace("const", "").strip()
        if length is None or not kinds[index].endswith("*"):
            continue
        size = _ELEMENTS.get(kind, 0 if hasattr(cuda, kind) and _is_structure(kind) else _size(kind)[0])
        if size:
            found.append((index, length, size, _structure(kind) if kind in _ELEMENTS else _reads(kind)))
    return found


def _size(kind: str) -> tuple[int, int]:
    """Return size and alignment of a C type, in bytes."""
    if kind in _BY_VALUE:
        return _BY_VALUE[kind]
    found = ctypes.sizeof(_NUMBERS[kind]) if kind in _NUMBERS else 4 if _is_enum(kind) else 8
    return found, found


def _is_enum(kind: str) -> bool:
    found = getattr(cuda, kind, None)
    return isinstance(found, type) and issubclass(found, enum.Enum)


def _is_structure(kind: str) -> bool:
    """Whether the bindings' class ``kind`` is a struct with fields. Classes of handles have no fields."""
    found = getattr(cuda, kind, None)
    return isinstance(found, type) and hasattr(found, "getPtr") and bool(_fields(found))


@functools.cache
def _fields(structure: Any) -> tuple[str, ...]:
    return tuple(one for one in dir(structure) if not one.startswith("_") and one != "getPtr")


def _reads(kind: str) -> Read:
    """Return the function that reads a value of the C type ``kind``, given its address."""
    kind = kind.replace("const", "").strip()
    if kind in _BY_VALUE or _is_structure(kind):
        return _structure(kind)
    if _is_enum(kind):
        members = getattr(cuda, kind)
        return lambda at: _member(members, ctypes.c_int32.from_address(at).value)
    if kind in ("void", "char"):
        return lambda at: None
    number = _NUMBERS.get(kind)
    return _word if number is None else lambda at: number.from_address(at).value


def _pointed(kind: str) -> Read:
    """Return the function that reads an input of a pointer type: it gives the fields of a struct, or else the
    address.
    """
    target = kind.removesuffix("*").replace("const", "").strip()
    if not _is_structure(target) or target in _ELEMENTS:
        return _word
    read = _structure(target)

    def follow(at: int) -> Any:
        address = _word(at)
        return read(address) if address else None

    return follow


def _structure(kind: str) -> Read:
    made = getattr(cuda, kind)
    return lambda at: _copy(made(_ptr=at))


def _copy(value: Any) -> Any:
    """Return a copy of a struct's fields, because the memory of the caller is valid only during the callback."""
    kind: Any = type(value)
    fields = _fields(kind) if hasattr(value, "getPtr") else ()
    if not fields:
        return int(value) if hasattr(value, "getPtr") and hasattr(value, "__int__") else value
    found = SimpleNamespace()
    for name in fields:
        try:
            setattr(found, name, _copy(getattr(value, name)))
        except (TypeError, ValueError, NotImplementedError):
            # The bindings refuse an unknown enum number, and the inactive member of a union. The other fields are still
            # needed.
            setattr(found, name, 0)
    return found


def _member(members: Any, value: int) -> Any:
    try:
        return members(value)
    except ValueError:  # The driver is newer than the bindings, which have no member for this value.
        return value


def _word(at: int) -> int:
    return ctypes.c_uint64.from_address(at).value
