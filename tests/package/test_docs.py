"""The documentation: its programs run, the tests that it names are there, and its reference is complete."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import streamalloc
import streamalloc.driver as sd

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "notebooks" / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if page.parent.name != "reference"]
_PROGRAM = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.simulated_only("the programs make their own simulated machines, or take the default driver")
# Beside a checker nothing is cached, so that a pool that is trimmed has frees of its own pending.
@pytest.mark.filterwarnings("ignore::streamalloc.PendingFreesWarning")
@pytest.mark.parametrize("page", [page for page in PAGES if _PROGRAM.search(page.read_text())], ids=name)
def test_programs_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks marked ``python``, one after the other in one namespace; those marked ``py`` need more than a test has.

    Nor does any of them do what stream order does not allow, where it does not say so with a driver of its own.
    """
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # for the sockets of stores
    text = page.read_text()
    names: dict[str, Any] = {"__name__": "page"}
    with sd.use(sd.checked(sd.simulated(devices=2), on="raise")):
        for found in _PROGRAM.finditer(text):
            # Lines as in the page, so that an error tells where it is.
            line = text[: found.start()].count("\n") + 1
            exec(compile("\n" * line + found[1], str(page), "exec"), names)


def test_tests_that_are_named_are_there() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (DOCS / "surprises.md").read_text())
    assert len(named) > 25
    for file, function in named:
        tree = ast.parse((ROOT / "tests" / "facts" / file).read_text())
        assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, (file, function)


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "README.md"]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{name(page)}: {target}"


def test_every_page_is_listed() -> None:
    listed = (ROOT / "notebooks" / "index.md").read_text() + (DOCS / "recipes" / "index.md").read_text()
    for page in PAGES:
        assert re.search(rf"\b{re.escape(page.stem)}$", listed, re.MULTILINE), name(page)


def test_the_reference_is_of_all_public_modules() -> None:
    tree = ast.parse((ROOT / "notebooks" / "conf.py").read_text())
    (areas,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "AREAS"
    )
    public = {"streamalloc"} | {
        f"streamalloc.{one}" for one in dir(streamalloc) if inspect.ismodule(getattr(streamalloc, one))
    }
    # The two inner ones publish their names in the package.
    inner = {"streamalloc.core", "streamalloc.pool"}
    assert {area for area in areas if area.count(".") < 2} == public - inner
    for area in areas:
        module = importlib.import_module(area)
        for exported in module.__all__:
            thing = getattr(module, exported)
            assert not (inspect.isclass(thing) or inspect.isfunction(thing)) or thing.__doc__, f"{area}.{exported}"
