"""Names and parameters of the kernels in PTX, and its global variables. Nothing else of it is read."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, field
from typing import Any

_TYPES: dict[str, Any] = {
    **dict.fromkeys(("u8", "b8"), ctypes.c_uint8),
    **dict.fromkeys(("u16", "b16", "f16"), ctypes.c_uint16),
    **dict.fromkeys(("u32", "b32"), ctypes.c_uint32),
    **dict.fromkeys(("u64", "b64"), ctypes.c_uint64),
    **{"s8": ctypes.c_int8, "s16": ctypes.c_int16, "s32": ctypes.c_int32, "s64": ctypes.c_int64},
    **{"f32": ctypes.c_float, "f64": ctypes.c_double},
}
_ENTRY = re.compile(r"\.entry\s+([\w$%]+)\s*(?:\(([^)]*)\))?")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([busf]\d+)\s+(?:\.ptr\b[^,]*?\s)?[\w$%]+(?:\[(\d+)\])?")
_GLOBAL = re.compile(
    r"^\s*(?:\.(?:visible|weak|common)\s+)?\.(?:global|const)\s+(?:\.align\s+\d+\s+)?\.([busf]\d+)\s+([\w$%]+)"
    r"(?:\[(\d+)\])?\s*(=[^;]*)?;",
    re.MULTILINE,
)
_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True)
class Contents:
    """The kernels of a module with the types of their parameters, and its variables with their sizes in bytes."""

    kernels: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    variables: dict[str, int] = field(default_factory=dict)
    initialised: frozenset[str] = frozenset()
    """Variables with values, which are not read."""


def read(text: str) -> Contents:
    """The contents of a module in PTX."""
    text = _COMMENTS.sub("", text)
    kernels = {name: tuple(map(_type, _PARAMETER.finditer(given))) for name, given in _ENTRY.findall(text)}
    variables, initialised = {}, set()
    for kind, name, count, value in _GLOBAL.findall(text):
        variables[name] = ctypes.sizeof(_TYPES[kind]) * int(count or 1)
        if value:
            initialised.add(name)
    return Contents(kernels, variables, frozenset(initialised))


def _type(found: re.Match[str]) -> Any:
    kind, count = _TYPES[found[1]], found[2]
    return kind * int(count) if count else kind
