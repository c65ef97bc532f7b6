"""Where in a user's program something was asked for: cheap to take, read only where it is shown."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import CodeType
from typing import TypeAlias

__all__ = ["Launched", "Stack", "from_package", "here", "line_of", "lines", "place_of"]

Stack: TypeAlias = "tuple[tuple[CodeType, int], ...]"
"""Code and the place in it, the innermost call first."""


class Launched(tuple[tuple[CodeType, int], ...]):
    """Where something was captured, or put into a graph, with the place of a launch of that."""

    launch: Stack

    def __new__(cls, stack: Stack, launch: Stack) -> Launched:
        """Two places in one."""
        made = super().__new__(cls, stack)
        made.launch = launch
        return made


_DEPTH = 8
_PACKAGE = str(Path(__file__).resolve().parents[2]) + "/"
_BETWEEN = 3  # calls of a driver around a driver that is the user's own
# What runs a test or a process is no part of it.
_RUNNERS = ("/_pytest/", "/pluggy/", f"{Path(linecache.__file__).parent}/multiprocessing/")
_THEIRS, _OWN, _RUNNER = range(3)
_kinds: dict[str, int] = {}
"""By the name of the file."""


def here(depth: int = _DEPTH) -> Stack:
    """The calls that have led here, without those of this package, and from a test on where pytest runs one.

    ``depth`` is how many of them, the innermost.
    """
    frame = sys._getframe(1)
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < depth:
        code = frame.f_code
        file = code.co_filename
        kind = _kinds.get(file)
        if kind is None:
            kind = _kinds[file] = _kind(file)
        if kind == _THEIRS:
            found.append((code, frame.f_lasti))
        elif kind == _RUNNER and found:
            break
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


def _kind(file: str) -> int:
    if file.startswith(_PACKAGE):
        return _OWN
    return _RUNNER if any(part in file for part in _RUNNERS) else _THEIRS


def from_package(area: str = "") -> bool:
    """Whether code of this package, except that of drivers, has made the call, perhaps through a user's driver.

    ``area``: whether the code is in this folder of the package.
    """
    frame = sys._getframe(1)
    others = 0
    while frame is not None and others < _BETWEEN:
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGE):
            others += 1
        elif not file.startswith(_PACKAGE + "driver/"):
            return file.startswith(_PACKAGE + area)
        frame = frame.f_back  # type: ignore[assignment]
    return False


def lines(stack: Stack) -> list[str]:
    """A stack as a traceback shows it, the innermost call last."""
    shown = []
    for code, at in reversed(stack):
        number = line_of(code, at)
        text = linecache.getline(code.co_filename, number).strip()
        shown.append(f'  File "{code.co_filename}", line {number}, in {code.co_name}')
        if text:
            shown.append(f"    {text}")
    return shown


def place_of(stack: Stack) -> str:
    """The innermost place of a stack in short."""
    if not stack:
        return "an unknown place"
    code, at = stack[0]
    return f"{Path(code.co_filename).name}:{line_of(code, at)}"


def line_of(code: CodeType, at: int) -> int:
    """The line of a place in code."""
    for start, end, line in code.co_lines():
        if line is not None and start <= at < end:
            return line
    return code.co_firstlineno
