"""The package as a stranger finds it: public names, docstrings, one version."""

import ast
import importlib
import inspect
import pkgutil
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import streamalloc as sa
from tests.processes import environment, finished, python
from tests.support import public_names

PACKAGE = Path(sa.__file__).parent
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


# Importing a __main__ module runs it.
MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages([str(PACKAGE)], "streamalloc.")
    if not info.name.endswith("__main__") and ".simulator" not in info.name and ".cli" not in info.name
)
# The modules whose names users import directly.
PUBLIC = [
    "streamalloc", "streamalloc.driver", "streamalloc.pool", "streamalloc.testing", "streamalloc.vmm",
    "streamalloc.ipc", "streamalloc.multicast", "streamalloc.traces",
]  # fmt: skip


def _relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_a_module_says_what_it_is() -> None:
    for name in ["streamalloc", *MODULES]:
        assert (importlib.import_module(name).__doc__ or "").strip(), name


def test_a_class_has_400_lines_and_a_function_45() -> None:
    """At most, without its own docstring, and with those of its methods."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                own = (ast.get_docstring(node, clean=False) or "").splitlines()
                lines = (node.end_lineno or 0) - node.lineno + 1 - len(own)
                assert lines <= (400 if isinstance(node, ast.ClassDef) else 45), f"{_relative(path)}: {node.name}"


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "streamalloc.testing"])
def test_a_public_package_exports_all_that_it_imports_and_nothing_else(name: str) -> None:
    module = importlib.import_module(name)
    tree = ast.parse(Path(str(module.__file__)).read_text())
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)  # also those that only the type checker sees, as they are made when first used
        if isinstance(node, ast.ImportFrom) and node.module not in ("__future__", "typing")
        for alias in node.names
    }
    if name == "streamalloc":  # whose list is short, for ``help``: for type checkers it renames each name to itself
        exported = re.findall(r" import (\w+) as \1$", Path(str(module.__file__)).read_text(), re.MULTILINE)
    else:
        exported = module.__all__
    assert imported == set(exported) == set(public_names(module)) and len(exported) == len(imported)
    assert all(hasattr(module, exported) for exported in imported)


@pytest.mark.parametrize("name", ["streamalloc", "streamalloc.driver", "streamalloc.testing"])
def test_what_is_imported_when_it_is_used_can_be_completed(name: str) -> None:
    module = importlib.import_module(name)
    assert {one for one in dir(module) if not one.startswith("_")} == set(public_names(module))
    assert all(hasattr(module, one) for one in public_names(module))


def test_programs_that_only_allocate_import_no_numpy() -> None:
    """It would take a third of the time of the import."""
    code = "import sys, streamalloc; streamalloc.MemoryPool; print('numpy' in sys.modules)"
    command = [sys.executable, "-c", code]
    run = subprocess.run(
        command, env=environment(STREAMALLOC_DRIVER="cuda"), capture_output=True, text=True, check=True
    )
    assert run.stdout == "False\n"


_INTERRUPTED = """
import signal, streamalloc
from streamalloc.formats.lazy_numpy import np

def interrupt(*_):
    raise TimeoutError

signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, {})
try:
    np.uint8
    signal.pause()
except (TimeoutError, KeyError):  # threading raises KeyError for an exception inside of Thread.start()
    print(np.zeros(2, np.uint8).nbytes)
"""


@pytest.mark.parametrize("seconds", [0.003, 0.01, 0.03])
def test_an_interrupted_import_of_numpy_goes_on(seconds: float) -> None:
    """NumPy cannot be imported again after an exception in its import."""
    run = finished(python(_INTERRUPTED.format(seconds)), STREAMALLOC_DRIVER="cuda")
    assert run.stdout == "2\n", run.stderr


def test_help_is_a_page() -> None:
    assert 20 < pydoc.plain(pydoc.render_doc(importlib.import_module("streamalloc"))).count("\n") < 300


def _public_objects() -> list[tuple[str, Any]]:
    found: dict[str, Any] = {}
    for name in PUBLIC:
        module = importlib.import_module(name)
        for exported in public_names(module):
            member = getattr(module, exported)
            if isinstance(member, ModuleType) or not (inspect.isclass(member) or inspect.isfunction(member)):
                continue
            found[f"{name}.{exported}"] = member
    return sorted(found.items())


def _public_members(owner: type) -> list[str]:
    """Public methods and properties that a class of ours defines itself."""
    members = (name for name, member in vars(owner).items() if callable(member) or isinstance(member, property))
    return [name for name in members if not name.startswith("_")]


def test_public_names_have_docstrings() -> None:
    bare = []
    for name, member in _public_objects():
        bare += [name] if not (inspect.getdoc(member) or "").strip() else []
        if inspect.isclass(member) and name != "streamalloc.driver.Driver":  # NVIDIA documents the Protocol's methods
            members = _public_members(member)
            bare += [f"{name}.{one}" for one in members if not (inspect.getdoc(getattr(member, one)) or "").strip()]
    assert bare == []


def test_the_version_is_stated_once() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev0)?", sa.__version__)
    holders = [_relative(path) for path in SOURCES if re.search(r"^__version__\s*=", path.read_text(), re.M)]
    assert holders == ["__init__.py"]
    project = PACKAGE.parent / "pyproject.toml"
    if project.exists():
        text = project.read_text()
        assert re.search(r'^dynamic = \[.*"version"', text, re.M)
        assert not re.search(r'^version\s*=\s*"', text, re.M)


def test_the_changelog_and_the_citation_know_the_version() -> None:
    """Changes without a release are of a ``.dev0`` version, which is higher than that of the last release."""
    changelog = PACKAGE.parent / "CHANGELOG.md"
    if not changelog.exists():
        pytest.skip("installed without the repository")
    headings = re.findall(r"^## \[(.*?)\](?: - (\S+))?$", changelog.read_text(), re.M)
    unreleased = headings[0] == ("Unreleased", "")
    (released, date), *_ = headings[unreleased:]
    numbers = [tuple(map(int, one.removesuffix(".dev0").split("."))) for one in (released, sa.__version__)]
    assert sa.__version__.endswith(".dev0") and numbers[0] < numbers[1] if unreleased else sa.__version__ == released
    citation = (PACKAGE.parent / "CITATION.cff").read_text()
    assert f"\nversion: {released}\n" in citation and f"\ndate-released: {date}\n" in citation
