"""Reports of hazards, and the places in the user's program that they name. A place is a short call stack.

A place is recorded as code objects and offsets, which is cheap. It becomes text only when it is shown.
"""

from __future__ import annotations

import contextlib
import functools
import json
import linecache
import os
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, TypeAlias

Stack: TypeAlias = "tuple[tuple[CodeType, int], ...]"
"""Call stack, innermost frame first: for each frame its code object, and the offset in the bytecode of the instruction
that the frame runs (``f_lasti``).
"""
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
"""Names of libraries that use the driver, by the name of their top-level package."""


class Called(tuple[tuple[CodeType, int], ...]):
    """Place in the program that calls a function of this package."""

    function: str = ""
    """Name of the function of this package that is called."""

    def __new__(cls, stack: Stack, function: str) -> Called:
        """Combine the place ``stack`` with the name of the ``function`` of this package that is called there."""
        made = super().__new__(cls, stack)
        made.function = function
        return made


class Launched(Called):
    """Place of a captured operation or graph node, together with the place at which the graph was launched."""

    launch: Stack
    """Place at which the graph was launched."""

    def __new__(cls, stack: Stack, launch: Stack) -> Launched:
        """Combine the place ``stack`` of a captured operation or node with the place of the graph's ``launch``."""
        made: Any = super().__new__(cls, stack, function_of(stack))
        made.launch = launch
        return made  # type: ignore[no-any-return]


def function_of(stack: Stack) -> str:
    """Return the name of this package's public function that is called at a place; empty if the place calls the driver
    itself, or a private function.
    """
    found = stack.function if isinstance(stack, Called) else ""
    return "" if found.startswith(("_", "<")) else found


LAUNCHED = ", launched"
"""Suffix of a name in :attr:`Hazard.places`. The entry has the place at which the graph of the entry before it was
launched.
"""
_DEPTH = 8
"""Largest number of frames that a place has by default."""
_PACKAGE = str(Path(__file__).resolve().parents[1]) + "/"
# Folders and files of drivers, their wrappers, the replacements of an installed driver, and a decorator of methods. No
# place shows frames of these files, because such frames say nothing about the program.
_DRIVERS = tuple(
    f"{_PACKAGE}{part}" for part in ("checker/", "driver/", "simulator/", "testing/installing.py", "vmm/claims.py")
)
_BETWEEN = 3
"""Largest number of frames of a user's driver between this package and the checker."""
_LIBRARY = f"{Path(linecache.__file__).parent}/"
# A place ends at the first of these frames: those of test runners, notebooks and multiprocessing hide the program's.
_RUNNERS = (
    *("/_pytest/", "/pluggy/", "/pytest_asyncio/", "/IPython/", "/ipykernel/"),
    *(f"{_LIBRARY}{name}" for name in ("multiprocessing/", "unittest/case.py", "unittest/async_case.py")),
)
# Files of Python whose frames only call functions of the program. In a report such frames would use up the limited
# number of frames and name no line of the program.
_CALLERS = (
    "<frozen ",
    *(f"{_LIBRARY}{name}" for name in ("asyncio/", "concurrent/", "contextlib.py", "runpy.py", "threading.py")),
)
_THEIRS, _FACADE, _SKIPPED, _RUNNER = range(4)
"""Kinds of files, in this order: files of the program; files of this package; files that no place shows, such as those
of drivers; and files at whose frames a place ends, such as those of test runners.
"""
_kinds: dict[str, int] = {}
"""Kind of each file, by its path."""


def here(depth: int = _DEPTH) -> Stack:
    """Return the innermost ``depth`` frames of the program, without frames of this package, test runners and some
    modules of Python such as threading.
    """
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
            pass  # This kind is tested first, because most frames are of this kind.
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
    """Return whether this package makes the current driver call, perhaps through up to two frames of a user's driver.

    Calls that this package's own drivers and wrappers make do not count.

    ``area``: count only calls from this folder of the package, such as ``"ipc/"``; empty for all folders.
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
    """Return the lines of a traceback of ``stack``, innermost call last."""
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
    """Return file name and line of the innermost frame, such as ``program.py:7``; in a notebook ``cell [3], line
    7``.
    """
    if not stack:
        return "an unknown place"
    code, at = stack[0]
    cell, line = _cell(code), line_of(code, at)
    return f"{cell}, line {line}" if cell else f"{Path(code.co_filename).name}:{line}"


def _cell(code: CodeType) -> str:
    """Return ``cell [3]`` for code of the notebook's input 3; empty for other code.

    The file name of a cell is a hash of its text. Only IPython has the cell's number.
    """
    try:
        _, name = sys.modules["IPython"].get_ipython().compile.format_code_name(code.co_filename)
    except (AttributeError, KeyError, TypeError):  # Not the code of a notebook, or no IPython.
        return ""
    return f"cell {name.removeprefix('In').strip()}"


def line_of(code: CodeType, at: int) -> int:
    """Return the line number of the instruction at offset ``at`` in the bytecode of ``code``."""
    for start, end, line in code.co_lines():
        if line is not None and start <= at < end:
            return line
    return code.co_firstlineno


@dataclass(frozen=True, eq=False, repr=False)
class Hazard:
    """Violation of stream order between two places of the program, a second free, a use after the end of an object, or
    a leak, found by :func:`streamalloc.driver.checked`.
    """

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
    """Advice on how to correct the program."""
    address: int = 0
    """Address of the memory; of several leaks at one place, that of the first. For ``"double free"``: the handle or
    address that the call named. For ``"use after destroy"``: 0.
    """
    nbytes: int = 0
    """Size of the memory in bytes; 0 if there is no memory. For ``"leak"``: the sum of all memory that was allocated at
    the place and not freed.
    """
    portable: bool = True
    """False if the two operations were in order in this run only by a choice of the driver. With another driver, pool
    setting or run they may not be in order.
    """
    places: tuple[tuple[str, Stack], ...] = ()
    """Names of the operations, such as ``"allocated"`` or ``"used"``, each with its place. :attr:`stacks` has the
    places as text.
    """
    count: int = 1
    """Number of times that the hazard was found at these places, also with other memory. The other fields describe the
    first time.
    """

    def found_again(self) -> None:
        """Add 1 to :attr:`count`."""
        # The class is frozen, so that programs cannot change a hazard: plain assignment would raise.
        object.__setattr__(self, "count", self.count + 1)

    @property
    def pair(self) -> tuple[object, ...]:
        """Tuple of the kind and the places of both operations. Hazards of the same pair of places have equal tuples."""
        operations = [name for name, _ in self.places if not name.endswith(LAUNCHED)][:2]
        return self.kind, *(stack for name, stack in self.places if name.removesuffix(LAUNCHED) in operations)

    @property
    def stacks(self) -> dict[str, list[str]]:
        """Lists of traceback lines, without frames of this package, by name of the operation (such as ``"this call"``,
        ``"allocated"``, ``"freed"``, ``"used"``).
        """
        return {name: lines(stack) for name, stack in self.places}

    def _texts(self) -> list[tuple[str, str]]:
        luck = "" if self.portable else " Not portable: in this run only a choice of the driver orders them."
        found = [("found", f"{self.count:,} times; this is the first.")] if self.count > 1 else []
        return [("what", f"{self.what}{luck}"), ("remedy", self.remedy), *found]

    def _repr_html_(self) -> str:
        # html is imported here, because its table of entities would take a tenth of the package's import time.
        from html import escape

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
    """List of hazards in the order in which they were found. Notebooks show each hazard folded."""

    def _repr_html_(self) -> str:
        return "".join(one._repr_html_() for one in self) or "no hazards"


def described(hazards: Iterable[Hazard]) -> list[dict[str, Any]]:
    """Return a dictionary for each hazard, with values that JSON can represent. The stacks are lists of traceback
    lines.
    """
    names = ("kind", "what", "remedy", "address", "nbytes", "portable", "count", "stacks")
    return [{name: getattr(one, name) for name in names} for one in hazards]


def write_hazards(folder: str | Path, hazards: Iterable[Hazard]) -> None:
    """Add hazards of this process to its file in ``folder``, each as a line of JSON."""
    # The command that made the folder may have ended.
    with contextlib.suppress(OSError), Path(folder, f"{os.getpid()}.json").open("a", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(one)}\n" for one in described(hazards))
