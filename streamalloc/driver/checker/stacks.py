"""Where in a user's program something was asked for: cheap to take, read only where it is shown."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import CodeType
from typing import TypeAlias

__all__ = ["Stack", "from_package", "here", "lines"]

Stack: TypeAlias = "tuple[tuple[CodeType, int], ...]"
"""Code and the place in it, the innermost call first."""

_DEPTH = 8
_PACKAGE = str(Path(__file__).resolve().parents[2]) + "/"
_OWN: dict[CodeType, bool] = {}


def here() -> Stack:
    """The calls that have led here, without those of this package."""
    frame = sys._getframe(1)
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < _DEPTH:
        code = frame.f_code
        own = _OWN.get(code)
        if own is None:
            own = _OWN[code] = code.co_filename.startswith(_PACKAGE)
        if not own:
            found.append((code, frame.f_lasti))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


def from_package() -> bool:
    """Whether code of this package, other than that of drivers, has made the call."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE + "driver/"):
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_PACKAGE)


def lines(stack: Stack) -> list[str]:
    """A stack as a traceback shows it, the innermost call last."""
    shown = []
    for code, at in reversed(stack):
        number = _line(code, at)
        text = linecache.getline(code.co_filename, number).strip()
        shown.append(f'  File "{code.co_filename}", line {number}, in {code.co_name}')
        if text:
            shown.append(f"    {text}")
    return shown


def _line(code: CodeType, at: int) -> int:
    for start, end, line in code.co_lines():
        if line is not None and start <= at < end:
            return line
    return code.co_firstlineno
