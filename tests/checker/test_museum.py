"""Public bugs as small programs of plain driver calls: the checker finds each, and nothing in its fixed twin.

A program names its expected report beside the lines: ``# this call: race`` on the line that the report is of, and
``# used``, ``# freed``, ``# allocated``, ``# imported`` or ``# destroyed`` on the other one. A leak has
``# allocated: leak``. ``# noted`` stands where the checker says that it cannot follow a source. With the argument
``fixed``, a program is its corrected twin. Those in ``libraries`` are the same bugs in PyTorch, CuPy and Numba, for a
GPU.

Tables and programs of the page ``museum.md`` are made from them: ``python -m tests.checker.test_museum`` writes it.
"""

import ast
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import streamalloc.driver as sd
from streamalloc import testing
from streamalloc.driver.reports import line_of
from tests.checker.corpus import KINDS
from tests.processes import ROOT, environment

MUSEUM = Path(__file__).parent / "museum"
LIBRARIES = MUSEUM / "libraries"
PAGE = ROOT / "notebooks" / "docs" / "museum.md"
_BEGINNINGS = ("start", "paged", "shared")
"""Modules that the programs import."""
_MARK = re.compile(r"(?:this call|allocated): (?P<kind>[\w' ]+)|used|freed|allocated|imported|destroyed|noted")
_DOCSTRING = re.compile(r"(?P<library>[^:]+): (?P<what>.+)\n\n(?P<address>https://\S+)\n.+", re.DOTALL)
_GROUPS = {
    "Freed too early, twice, or never": {
        *("free racing a use", "free before allocation", "use before allocation", "double free"),
        *("release while in use", "leak"),
    },
    "A wait that is missing": {"race"},
    "Mapped, shared, captured, destroyed": {
        *("unmap while in use", "use after free", "use after destroy", "uninitialized"),
        *("export before completion", "free before the importer's"),
    },
}
"""Headings of the page, by kinds of hazards."""


@dataclass(frozen=True)
class Exhibit:
    """A program, with what its comments and its docstring say."""

    path: Path
    library: str
    what: str
    address: str
    kind: str
    marks: dict[str, set[int]]
    """Lines by the name of the place in the report."""


def _exhibit(path: Path) -> Exhibit:
    text = path.read_text()
    said = _DOCSTRING.fullmatch(ast.get_docstring(ast.parse(text)) or "")
    assert said is not None, path
    kinds, marks = _marks(text)
    (kind,) = kinds
    return Exhibit(path, said["library"], said["what"], said["address"], kind, marks)


def _marks(text: str) -> tuple[set[str], dict[str, set[int]]]:
    """The kinds and the places that comments name."""
    kinds: set[str] = set()
    marks: dict[str, set[int]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        for part in line.partition("  # ")[2].split("; "):
            if (found := _MARK.fullmatch(part)) is not None:
                kinds |= {found["kind"]} - {None}
                marks.setdefault(part.partition(":")[0], set()).add(number)
    return kinds, marks


EXHIBITS = [_exhibit(path) for path in sorted(MUSEUM.glob("*.py")) if path.stem not in _BEGINNINGS]
_each = pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda one: one.path.stem)


def ran(exhibit: Exhibit, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """The checked machine on which the program ran."""
    driver = sd.checked(sd.simulated(devices=2), uninitialized=exhibit.kind == "uninitialized")
    monkeypatch.setattr(sys, "argv", [str(exhibit.path), *arguments])
    monkeypatch.syspath_prepend(MUSEUM)
    for name in _BEGINNINGS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    with testing.install(driver):
        runpy.run_path(str(exhibit.path), run_name="__main__")
        if exhibit.kind == "leak":
            driver.finish()
    for name in _BEGINNINGS:
        sys.modules.pop(name, None)
    return driver


def _lines(hazard: sd.Hazard, path: Path) -> dict[str, int]:
    """The line of the program in each place of a report."""
    return {
        name: next(line_of(*frame) for frame in stack if frame[0].co_filename == str(path))
        for name, stack in hazard.places
    }


def _notes(driver: Any) -> list[str]:
    return [one for one in driver.state.notes.texts() if not one.startswith("host writes to memory that queued")]


@pytest.mark.simulated_only("it installs a machine; a wrong program may break a context")
@_each
def test_is_found(exhibit: Exhibit, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = ran(exhibit, monkeypatch)
    found = [_lines(one, exhibit.path) for one in driver.hazards]
    assert {one.kind for one in driver.hazards} == {exhibit.kind}
    for name, lines in exhibit.marks.items():
        if name != "noted":
            assert {places[name] for places in found} == lines, name
    assert _notes(driver) == []


@pytest.mark.simulated_only("it installs a machine")
@_each
def test_the_twin_is_not_reported(exhibit: Exhibit, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = ran(exhibit, monkeypatch, "fixed")
    assert [str(one) for one in driver.hazards] == []
    assert _notes(driver) == []
    assert bool(driver.state.notes.texts()) is ("noted" in exhibit.marks)


@_each
def test_is_a_small_program_of_plain_calls(exhibit: Exhibit) -> None:
    text = exhibit.path.read_text()
    assert "streamalloc" not in text.replace("pip install streamalloc", "")
    place = "allocated" if exhibit.kind == "leak" else "this call"
    assert exhibit.kind in KINDS | {"use after destroy"} and place in exhibit.marks
    assert len(text.splitlines()) <= 55 and max(map(len, text.splitlines())) <= 120
    assert "FIXED" in text


_each_of_a_library = pytest.mark.parametrize("path", sorted(LIBRARIES.glob("*.py")), ids=lambda path: path.stem)


@_each_of_a_library
def test_of_a_library_is_one_of_these_bugs(path: Path) -> None:
    text = path.read_text()
    compile(text, str(path), "exec")
    (exhibit,) = (one for one in EXHIBITS if one.path.stem == path.stem)
    kinds, marks = _marks(text)
    assert kinds == {exhibit.kind} and marks.keys() == exhibit.marks.keys() - {"noted"}
    assert "FIXED" in text and '"right bytes" if ' in text


@_each_of_a_library
def test_of_a_library_ends_with_right_bytes(path: Path, on_cuda: bool) -> None:
    """The fixed program; how often the wrong one goes wrong is the GPU's business."""
    if not on_cuda:
        pytest.skip("its library runs on GPUs only")
    for module in re.findall(r"^(?:import|from) (torch|cupy|numba)\b", path.read_text(), re.MULTILINE):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    done = subprocess.run([sys.executable, str(path), "fixed"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "right bytes\n"), done.stderr


def test_there_are_many() -> None:
    assert len(EXHIBITS) >= 30 and len(list(LIBRARIES.glob("*.py"))) >= 12
    assert Counter(one.address for one in EXHIBITS).most_common(1)[0][1] == 1
    assert {one.kind for one in EXHIBITS} == set().union(*_GROUPS.values())


# -- the page --------------------------------------------------------------------------------------------------

_COMMAND = "python -m streamalloc check --driver simulated torchrec_stash.py"


def page(report: str) -> str:
    """The text of the page, with the report of the first program and the parts that are made from the programs."""
    count = f"{len(EXHIBITS)} public bugs, {len(list(LIBRARIES.glob('*.py')))} of them also"
    text = _replaced(PAGE.read_text(), r"\d+ public bugs, \d+ of them also", count)
    text = _replaced(text, r"(?<=```text\n).*?(?=```)", report)
    for heading, kinds in _GROUPS.items():
        shown = sorted((one for one in EXHIBITS if one.kind in kinds), key=lambda one: one.library.lower())
        rows = [
            f"| [{one.library}]({one.address}) | {one.what[0].upper()}{one.what[1:]} | {one.kind} |" for one in shown
        ]
        made = "\n".join([f"## {heading}\n\n| library | what went wrong | report |\n| --- | --- | --- |", *rows, ""])
        text = _replaced(text, rf"^## {heading}\n.*?(?=^## )", "".join([made, *map(_program, shown), "\n"]))
    return text


def _replaced(text: str, pattern: str, new: str) -> str:
    """The text with another first match."""
    found = re.search(pattern, text, re.DOTALL | re.MULTILINE)
    assert found is not None, pattern
    return text[: found.start()] + new + text[found.end() :]


def _program(one: Exhibit) -> str:
    """The program, folded, with its form in a library."""
    included = [f"museum/{one.path.name}"]
    if (LIBRARIES / one.path.name).exists():
        included.append(f"museum/libraries/{one.path.name}")
    blocks = "".join(
        f":::{{literalinclude}} ../../tests/checker/{name}\n:language: python\n:::\n\n" for name in included
    )
    return f"\n<details>\n<summary>{one.library}: <code>{one.path.name}</code></summary>\n\n{blocks}</details>\n"


def _report() -> str:
    done = subprocess.run(
        [sys.executable, *_COMMAND.split()[1:]],
        cwd=MUSEUM,
        env=environment(STREAMALLOC_CHECK=None, STREAMALLOC_DRIVER=None),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    return done.stderr.replace(f"{MUSEUM}{os.sep}", "")  # `__file__` of a program is absolute.


@pytest.mark.simulated_only("the page shows it on a simulated machine")
def test_the_page_is_made_from_the_programs() -> None:
    assert _COMMAND in PAGE.read_text()
    assert PAGE.read_text() == page(_report()), "python -m tests.checker.test_museum writes it"


if __name__ == "__main__":
    PAGE.write_text(page(_report()))
