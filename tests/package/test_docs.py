"""The documentation: its programs run, the tests that it names are there, and its reference is complete."""

import ast
import importlib
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import streamalloc.driver as sd
from streamalloc.driver.bindings import cuda
from tests.checker.corpus import CASES, KINDS
from tests.checker.test_museum import EXHIBITS
from tests.interop.standins import STANDINS
from tests.package.test_recipes import PAGES as ALONE
from tests.simulator.test_random_steps import recorded
from tests.support import public_names

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "notebooks" / "docs"
REFERENCE = DOCS / "reference"
PAGES = sorted(DOCS.rglob("*.md"))
PROGRAMS = [ROOT / "README.md", *PAGES]
IN_ORDER = [page for page in PROGRAMS if page not in ALONE]
# A program, and below it what it prints, if the page shows that.
_PROGRAM = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.simulated_only("the programs make their own simulated machines, or take the default driver")
# Beside a checker nothing is cached, so that a pool that is trimmed has frees of its own pending.
@pytest.mark.filterwarnings("ignore::streamalloc.PendingFreesWarning")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.bindings("13.0")] if re.search(r"\.MANAGED|copy_batch\(", text) else [])
        for page in IN_ORDER
        if _PROGRAM.search(text := page.read_text())
    ],
    ids=name,
)
def test_programs_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks marked ``python``, each on its own, with as many devices as a user has: one. The next test runs those
    marked ``py``.

    Nor does any of them do what stream order does not allow, where it does not say so with a driver of its own.
    """
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # for the sockets of stores
    text = page.read_text()
    with sd.use(sd.checked(sd.simulated(), on="raise")):
        for found in _PROGRAM.finditer(text):
            # Lines as in the page, so that an error tells where it is.
            line = text[: found.start()].count("\n") + 1
            exec(compile("\n" * line + found[1], str(page), "exec"), {"__name__": "page"})
            printed = capsys.readouterr().out
            assert found[2] in (None, printed)


_WITH_LIBRARIES = re.compile(r"^```py\n(?!# \w+\.py\n)(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)


@pytest.mark.simulated_only("with stand-ins for the libraries")
@pytest.mark.parametrize("page", [page for page in IN_ORDER if _WITH_LIBRARIES.search(page.read_text())], ids=name)
def test_library_programs_run(page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks marked ``py``, each on its own; those that name a file are run by ``tests/ipc/test_programs.py``.

    Those of the recipes are run by ``test_recipes.py``, beside this file.
    """
    for block, output in _WITH_LIBRARIES.findall(page.read_text()):
        if "live" in block:
            pytest.importorskip("rich")
        machine = sd.simulated()
        for make in STANDINS.values():
            for module, standin in make(machine).items():
                monkeypatch.setitem(sys.modules, module, standin)
        with sd.use(machine):
            exec(compile(block, str(page), "exec"), {"__name__": "page"})
        printed = capsys.readouterr().out
        assert output in ("", printed)


@pytest.mark.parametrize(
    ("page", "folder", "begin"), [("surprises", "tests/facts", "test_"), ("behaviours", "", "tests/")]
)
def test_tests_that_are_named_are_there(page: str, folder: str, begin: str) -> None:
    named = re.findall(rf"`({begin}[\w/]+\.py)::(\w+)`", (DOCS / f"{page}.md").read_text())
    assert len(named) > 15
    for file, function in named:
        tree = ast.parse((ROOT / folder / file).read_text())
        assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, (file, function)


def test_figures_of_the_page_on_tests() -> None:
    programs = [steps for _, steps in recorded()]
    text = (DOCS / "tested.md").read_text()
    assert f"{len(programs)} recorded random programs of {sum(map(len, programs)):,} calls" in text
    assert f"{len(CASES)} planted hazards of {len(KINDS)} kinds" in text
    assert f"{len(EXHIBITS)} public bugs as programs" in text
    assert f"{len(EXHIBITS)} public ones" in (ROOT / "README.md").read_text()


def test_figures_of_the_readme_are_those_of_the_page_on_measurements() -> None:
    page = (DOCS / "verified.md").read_text()
    (rows,) = re.findall(r"^\| operation .*?\n\n", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert rows in page
    shares = re.findall(r"\d\.\d+ times (?:the|this) rate", (ROOT / "README.md").read_text())
    assert len(shares) == 2
    for share in shares:
        assert share in page


def test_the_page_on_tests_has_a_test_of_ours_and_all_marks() -> None:
    page = (DOCS / "writing-tests.md").read_text()
    (example,) = re.findall(r"^```py fragment\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert textwrap.indent(example, "    ") in (ROOT / "tests" / "pool" / "test_pool.py").read_text()
    _, _, marks = page.partition("## Marks")
    listed = re.findall(r"`(\w+)", "".join(re.findall(r"^\| (`.*?) \|", marks.partition("\n## ")[0], re.MULTILINE)))
    project = (ROOT / "pyproject.toml").read_text()
    assert set(listed) == set(re.findall(r'^    "(\w+)(?:\(|: )', project.partition("\nmarkers = ")[2], re.MULTILINE))


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "README.md"]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{name(page)}: {target}"


def test_blocks_fit_their_column() -> None:
    """Else a reader scrolls sideways, at 1400 pixels; ``_static/wide.css`` makes the column."""
    for page in PAGES:
        for block in re.findall(r"^```.*?\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            assert max(map(len, block.splitlines()), default=0) <= 100, (name(page), block)


def test_every_page_is_listed() -> None:
    indices = [ROOT / "notebooks" / "index.md", DOCS / "recipes" / "index.md", REFERENCE / "index.md"]
    listed = "\n".join(index.read_text() for index in indices)
    for page in PAGES:
        assert re.search(rf"(^|[/(]){re.escape(page.stem)}$", listed, re.MULTILINE), name(page)


def test_titles_differ() -> None:
    """Nor do words in the navigation and in search results lead to two pages."""
    pages = [page.read_text().splitlines() for page in PAGES if page.stem != "changelog"]
    titles = [next(line for line in lines if line.startswith("# ")).lower() for lines in pages]
    assert sorted(set(titles)) == sorted(titles)


_REFERENCE = re.compile(r"^:::\{reference\} ([\w.]+)\n(.*?)^:::", re.MULTILINE | re.DOTALL)


def described() -> list[tuple[str, str, str]]:
    """Modules, the names in them that the reference describes, and the texts that it has of its own."""
    text = "\n".join(page.read_text() for page in sorted(REFERENCE.glob("*.md")))
    return [
        (module, one.partition(": ")[0], one.partition(": ")[2])
        for module, names in _REFERENCE.findall(text)
        for one in names.splitlines()
    ]


def test_every_public_name_is_in_the_reference_once() -> None:
    modules = ["streamalloc"]
    for module in modules:  # grows meanwhile
        package = importlib.import_module(module)
        modules += [f"{module}.{one}" for one in public_names(package) if inspect.ismodule(getattr(package, one))]
    public = {id(thing): f"{module}.{one}" for module in modules for one, thing in exported(module).items()}
    listed = [id(exported(module)[one]) for module, one, _ in described()]
    assert {public[one] for one in public.keys() - set(listed)} == set()
    assert len(listed) == len(set(listed))


def exported(module: str) -> dict[str, Any]:
    package = importlib.import_module(module)
    return {one: thing for one in public_names(package) if not inspect.ismodule(thing := getattr(package, one))}


def test_what_the_reference_describes_has_text_and_types() -> None:
    listed = described()
    texts = {(module, name) for module, name, text in listed if text}
    for module, one, _ in listed:
        thing = inspect.unwrap(exported(module)[one])
        assert (module, one) in texts if not (inspect.isclass(thing) or inspect.isfunction(thing)) else thing.__doc__, (
            one
        )
        if inspect.isfunction(thing):
            signature = inspect.signature(thing)
            untyped = [of for of in signature.parameters.values() if of.annotation is of.empty]
            assert not untyped and signature.return_annotation is not signature.empty, f"{module}.{one}"


@pytest.mark.parametrize("page", sorted(REFERENCE.glob("*.md")), ids=name)
def test_each_page_of_the_reference_has_an_example_or_a_link(page: Path) -> None:
    assert re.search(r"^```py|\]\(\.\./", page.read_text(), re.MULTILINE) or page.stem == "index"


_THEIRS = re.compile(r"`((cuda\.core|rmm|cupy|torch|torch_memory_saver)(?:\.\w+)+)")
_OURS = re.compile(
    r"`(?:(?:sa\.)?(vmm|ipc|interop|multicast|driver|traces|plots|testing|observing)\.|sa\.)(?!cu[A-Z])(\w[\w.]*)"
)


def resolved(path: str) -> object:
    """The object of a dotted path: the longest module, and attributes of it."""
    parts = path.split(".")
    found: Any = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        found = getattr(found, part, None) or importlib.import_module(".".join(parts[:number]))
    return found


@pytest.mark.parametrize("library", ["cuda.core", "rmm", "cupy", "torch", "torch_memory_saver"])
def test_names_of_other_libraries_are_theirs(library: str) -> None:
    pytest.importorskip(library, exc_type=ImportError)
    named = {path for path, of in _THEIRS.findall((DOCS / "coming-from.md").read_text()) if of == library}
    modules = {"cuda.core": "cuda.core", "rmm": "rmm.mr", "cupy": "cupy.cuda", "torch": "torch"}
    if library in modules:
        column = 3 + list(modules).index(library)
        rows = [line.split("|") for line in (DOCS / "comparison.md").read_text().splitlines() if line.startswith("|")]
        cells = [row[column] for row in rows if len(row) == 3 + len(modules) + 1]  # the page has other tables, too
        assert cells
        named |= {f"{modules[library]}.{path}" for cell in cells for path in re.findall(r"`([A-Z][\w.]*)`", cell)}
    assert named
    for path in named:
        assert resolved(path) is not None, path


@pytest.mark.bindings("13.4")
def test_calls_that_the_guide_leaves_to_the_driver_are_the_bindings_own() -> None:
    section = (DOCS / "guides" / "handles.md").read_text().partition("\n## Newer and other calls")[2]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `cu")]
    assert len(rows) > 8
    for calls, here in rows:
        for call in re.findall(r"`(cu\w+)\*?`", calls):
            found = [name for name in dir(cuda) if name.startswith(call)]
            assert bool(found) != here.startswith("by no bindings"), call


@pytest.mark.parametrize("page", [page for page in PAGES if _OURS.search(page.read_text())], ids=name)
def test_names_of_ours_are_there(page: Path) -> None:
    for area, path in set(_OURS.findall(page.read_text())):
        assert resolved(".".join(filter(None, ["streamalloc", area, path.rstrip(".")]))), (area, path)
