"""Reports of hazards, and places in the user's program.

A place becomes text only when it is shown, to be cheap to record.
"""

from __future__ import annotations

import functools
import linecache
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import CodeType
from typing import Any, TypeAlias

Stack: TypeAlias = "tuple[tuple[CodeType, int], ...]"
"""Code and instruction offset per frame, innermost first."""
LIBRARIES = {
    "cuda": "cuda.core",
    "cupy": "CuPy",
    "cupy_backends": "CuPy",
    "jax": "JAX",
    "jaxlib": "JAX",
    "numba": "Numba",
    "numba_cuda": "Numba",
    "pycuda": "PyCUDA",
    "rmm": "RMM",
    "tensorflow": "TensorFlow",
    "torch": "PyTorch",
    "triton": "Triton",
}
"""Libraries that use the driver, by the folder in which Python finds them."""


class Called(tuple[tuple[CodeType, int], ...]):
    """Place of the program that calls a function of this package."""

    function: str = ""
    """Name of the function."""

    def __new__(cls, stack: Stack, function: str) -> Called:
        """Combine the place ``stack`` and the name of the ``function`` of this package that it calls."""
        made = super().__new__(cls, stack)
        made.function = function
        return made


class Launched(Called):
    """Place of a capture or of a node, together with the place of its launch."""

    launch: Stack
    """Place of the launch."""

    def __new__(cls, stack: Stack, launch: Stack) -> Launched:
        """Combine the place ``stack`` of a capture or node and the place of its ``launch``."""
        made: Any = super().__new__(cls, stack, function_of(stack))
        made.launch = launch
        return made  # type: ignore[no-any-return]


def function_of(stack: Stack) -> str:
    """Return the name of this package's public function that a place calls; empty if it calls the driver itself."""
    found = stack.function if isinstance(stack, Called) else ""
    return "" if found.startswith(("_", "<")) else found


LAUNCHED = ", launched"
"""End of a name in :attr:`Hazard.places`, for the place where the graph of the operation before it was launched."""
_DEPTH = 8
"""Largest number of frames of a place."""
_PACKAGE = str(Path(__file__).resolve().parents[1]) + "/"
# Drivers, their wrappers, and the replacements of an installed driver, which all serve calls that the program makes. No
# place shows their frames, since they say nothing about the program.
_DRIVERS = tuple(f"{_PACKAGE}{part}" for part in ("checker/", "driver/", "simulator/", "testing/installing.py"))
_BETWEEN = 3
"""Largest number of frames of a user's driver between this package and the checker."""
_LIBRARY = f"{Path(linecache.__file__).parent}/"
# A stack ends at frames of a test runner, notebook or process starter.
_RUNNERS = ("/_pytest/", "/pluggy/", "/IPython/", "/ipykernel/", f"{_LIBRARY}multiprocessing/")
# Files of Python whose frames only call functions of the program. They would take places in a report and name no line
# of the program.
_CALLERS = (
    "<frozen ",
    *(f"{_LIBRARY}{name}" for name in ("asyncio/", "concurrent/", "contextlib.py", "runpy.py", "threading.py")),
)
_THEIRS, _FACADE, _SKIPPED, _RUNNER = range(4)
"""Kinds of files: files of the program; files of this package; files that no place shows, such as drivers and Python's
own callers; and files at whose frames a place ends, such as test runners.
"""
_kinds: dict[str, int] = {}
"""Kind of each file, by its path."""


def here(depth: int = _DEPTH) -> Stack:
    """Return the innermost ``depth`` frames of the program: without this package, test runners, threading and runpy."""
    frame = sys._getframe(1)
    function = ""
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < depth:
        code = frame.f_code
        file = code.co_filename
        kind = _kinds.get(file)
        if kind is None:
            kind = _kinds[file] = _kind(file)
        if kind == _SKIPPED:
            pass  # Tested first, because most frames are of this kind.
        elif kind == _THEIRS:
            found.append((code, frame.f_lasti))
        elif kind == _FACADE and not found:
            function = code.co_name
        elif kind == _RUNNER and found:
            break
        frame = frame.f_back  # type: ignore[assignment]
    return Called(tuple(found), function) if function else tuple(found)


def _kind(file: str) -> int:
    if file.startswith(_PACKAGE) and not file.startswith(_DRIVERS):
        return _FACADE
    if file.startswith((_PACKAGE, *_CALLERS)):
        return _SKIPPED
    return _RUNNER if any(part in file for part in _RUNNERS) else _THEIRS


def from_package(area: str = "") -> bool:
    """Whether this package makes the current call, perhaps through a user's driver.

    Calls of its own drivers do not count.

    ``area``: only this folder of the package counts, such as ``"ipc/"``; empty: all do.
    """
    frame = sys._getframe(1)
    others = 0
    while frame is not None and others < _BETWEEN:
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGE):
            others += 1
        elif not file.startswith(_DRIVERS):
            return file.startswith(_PACKAGE + area)
        frame = frame.f_back  # type: ignore[assignment]
    return False


def lines(stack: Stack) -> list[str]:
    """Return the traceback lines of a stack, innermost call last."""
    shown = []
    for code, at in reversed(stack):
        number = line_of(code, at)
        text = linecache.getline(code.co_filename, number).strip()
        file = _cell(code) or f'File "{code.co_filename}"'
        shown.append(f"  {file}, line {number}, in {code.co_name}")
        if text:
            shown.append(f"    {text}")
    return shown


def place_of(stack: Stack) -> str:
    """Return file name and line of the innermost frame, as ``program.py:7``; in a notebook ``cell [3], line 7``."""
    if not stack:
        return "an unknown place"
    code, at = stack[0]
    cell, line = _cell(code), line_of(code, at)
    return f"{cell}, line {line}" if cell else f"{Path(code.co_filename).name}:{line}"


def _cell(code: CodeType) -> str:
    """Return ``cell [3]`` for code of the notebook's input 3; empty for other code.

    The file name of a cell is a hash of its text: only IPython knows which cell it is.
    """
    try:
        _, name = sys.modules["IPython"].get_ipython().compile.format_code_name(code.co_filename)
    except (AttributeError, KeyError, TypeError):  # The code is not of a notebook, or IPython does not run.
        return ""
    return f"cell {name.removeprefix('In').strip()}"


def line_of(code: CodeType, at: int) -> int:
    """Return the line number of the instruction at offset ``at``."""
    for start, end, line in code.co_lines():
        if line is not None and start <= at < end:
            return line
    return code.co_firstlineno


@dataclass(frozen=True, eq=False, repr=False)
class Hazard:
    """Violation of stream order between two places of the program, found by :func:`streamalloc.driver.checked`."""

    kind: str
    """One of: ``"use before allocation"``, ``"use after free"``, ``"free before allocation"``, ``"double free"``,
    ``"free racing a use"``, ``"reuse race"`` (of memory that was freed and allocated again), ``"race"`` (two uses,
    of which one writes), ``"unmap while in use"``, ``"release while in use"``, ``"access without a grant"``,
    ``"out of bounds"`` (a kernel that goes beyond its allocation), ``"export before completion"``,
    ``"free before the importer's"``, ``"uninitialized"`` (a copy of bytes that nothing has written), ``"another type"``
    (a copy to an array whose elements have another type than those that were written), ``"use after destroy"`` (a call
    with a destroyed stream, event or graph), ``"leak"``."""
    what: str
    """The conflicting operations and the missing order, in one sentence."""
    remedy: str
    """Advice, in one sentence."""
    address: int = 0
    """Address of the memory."""
    nbytes: int = 0
    """Size of the memory in bytes."""
    portable: bool = True
    """False if only a choice of the driver gives the order in this run. With another driver, pool setting or run the
    order may be missing.
    """
    places: tuple[tuple[str, Stack], ...] = ()
    """The operations, such as ``"allocated"`` or ``"used"``, each with its place. :attr:`stacks` has them as text."""
    count: int = 1
    """Number of times that the hazard was found at these places, also for other memory. The other fields describe the
    first time.
    """

    def found_again(self) -> None:
        """Count one more time that the hazard was found."""
        # The class is frozen, so that programs cannot change a hazard: plain assignment would raise.
        object.__setattr__(self, "count", self.count + 1)

    @property
    def pair(self) -> tuple[object, ...]:
        """Kind and places of both operations: the same for each hazard of one pair of places."""
        operations = [name for name, _ in self.places if not name.endswith(LAUNCHED)][:2]
        return self.kind, *(stack for name, stack in self.places if name.removesuffix(LAUNCHED) in operations)

    @property
    def stacks(self) -> dict[str, list[str]]:
        """Places in the program, as traceback lines without frames of this package, by operation (``"this call"``,
        ``"allocated"``, ``"freed"``, ``"used"``).
        """
        return {name: lines(stack) for name, stack in self.places}

    def _texts(self) -> list[tuple[str, str]]:
        luck = "" if self.portable else " Not portable: in this run only a choice of the driver orders them."
        found = [("found", f"{self.count:,} times; this is the first.")] if self.count > 1 else []
        return [("what", f"{self.what}{luck}"), ("remedy", self.remedy), *found]

    def _repr_html_(self) -> str:
        rows = self._texts()
        cells = [f"<tr><td>{name}</td><td style='text-align:left'>{escape(text)}</td></tr>" for name, text in rows]
        for name, stack in self.places:
            code = escape("\n".join(line.rstrip() for line in lines(stack)))
            cells.append(f"<tr><td>{escape(name)}</td><td style='text-align:left'><pre>{code}</pre></td></tr>")
        head = f"<b>{escape(self.kind)}</b>, {self.nbytes / 2**20:,.1f} MiB, at {escape(self._place())}"
        return f"<details><summary>{head}</summary><table><tbody>{''.join(cells)}</tbody></table></details>"

    def __repr__(self) -> str:
        return f"<Hazard: {self.kind} at {self._place()}>"

    def _place(self) -> str:
        return place_of(self.places[0][1] if self.places else ())

    def __str__(self) -> str:
        (_, what), *others = self._texts()
        sentences = [f"{self.kind}: {what}", *(f"  {name}: {text}" for name, text in others)]
        fold = functools.partial(textwrap.wrap, width=84, subsequent_indent="    ", break_long_words=False)
        shown = [line for text in sentences for line in fold(text, break_on_hyphens=False)]
        for name, stack in self.places:
            shown += [f"{name}:", *lines(stack)]
        return "\n".join(shown)


class Hazards(list[Hazard]):
    """Hazards in the order in which they were found. Notebooks show each folded."""

    def _repr_html_(self) -> str:
        return "".join(one._repr_html_() for one in self) or "no hazards"


def described(hazards: Iterable[Hazard]) -> list[dict[str, Any]]:
    """Return the hazards as dictionaries that JSON can hold, with the stacks as traceback lines."""
    names = ("kind", "what", "remedy", "address", "nbytes", "portable", "count", "stacks")
    return [{name: getattr(one, name) for name in names} for one in hazards]
