"""The package as a stranger finds it: public names, docstrings, one version, one session to the bindings."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import streamalloc as sa
from streamalloc.driver.bindings import version_that_added
from streamalloc.driver.protocol import FUNCTIONS

PACKAGE = Path(sa.__file__).parent
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@pytest.fixture(autouse=True, scope="module")
def _forget_trees() -> Iterator[None]:
    """Later collections in this process do not go through the trees of the whole package."""
    yield
    _nodes.cache_clear()


# Importing a __main__ module runs it.
MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages([str(PACKAGE)], "streamalloc.")
    if not info.name.endswith("__main__") and ".simulator" not in info.name and ".cli" not in info.name
)
# The modules whose names users import directly.
PUBLIC = [
    "streamalloc",
    "streamalloc.driver",
    "streamalloc.pool",
    "streamalloc.testing",
    "streamalloc.vmm",
    "streamalloc.ipc",
    "streamalloc.multicast",
    "streamalloc.traces",
]


def _relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def _imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in the file."""
    found: set[str] = set()
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def test_the_package_has_the_modules_that_the_design_names() -> None:
    core = {path.stem for path in (PACKAGE / "core").iterdir()}
    assert {"properties", "errors", "device", "stream", "allocator", "buffer", "memory", "copies"} <= core
    assert (PACKAGE / "py.typed").exists()
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert {"core", "driver", "ipc", "multicast", "pool", "vmm"} <= folders


def test_only_the_door_imports_the_bindings() -> None:
    importers = {
        _relative(path)
        for path in SOURCES
        if any(name == "cuda" or name.startswith("cuda.") for name in _imports(path))
    }
    assert importers
    assert {name for name in importers if not name.startswith("driver/")} <= {"cli/bench.py"}


def test_whoever_else_imports_nvidia_s_packages_does_not_use_the_bindings() -> None:
    # The benchmark measures cuda.core where it is installed; its own driver calls go through the session.
    for path in SOURCES:
        if not _relative(path).startswith("driver/"):
            assert not any(name.startswith("cuda.bindings") for name in _imports(path)), path


def test_nothing_reaches_the_bindings_by_another_way() -> None:
    for path in SOURCES:
        # The benchmark compares with a loop of C, which calls the driver past the bindings.
        if _relative(path).startswith(("driver/", "cli/c_loop")):
            continue
        for node in _nodes(path):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert not called.endswith(("import_module", "__import__")) or "bindings" not in ast.unparse(node), path
                assert not called.endswith(("CDLL", "LoadLibrary")), path


def test_the_facade_never_asks_which_driver_it_is() -> None:
    for path in SOURCES:
        name = _relative(path)
        if not name.startswith(("driver/", "cli/")) and name != "__main__.py":
            assert "is_simulated" not in path.read_text(), name


def test_the_facade_does_not_import_the_command_line_or_the_simulator() -> None:
    for path in SOURCES:
        name = _relative(path)
        if not name.startswith(("driver/", "cli/")) and name != "__main__.py":
            imported = _imports(path)
            assert not any(".simulator" in module or ".cli" in module for module in imported), name


def test_a_module_says_what_it_is() -> None:
    for name in ["streamalloc", *MODULES]:
        assert (importlib.import_module(name).__doc__ or "").strip(), name


def test_a_public_package_has_what_it_exports() -> None:
    for name in PUBLIC:
        module = importlib.import_module(name)
        exported = module.__all__
        assert len(exported) == len(set(exported)), name
        assert [one for one in exported if not hasattr(module, one)] == [], name


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
    assert imported == set(module.__all__)
    assert all(hasattr(module, exported) for exported in imported)


@pytest.mark.parametrize("name", ["streamalloc", "streamalloc.driver", "streamalloc.testing"])
def test_what_is_imported_when_it_is_used_can_be_completed(name: str) -> None:
    module = importlib.import_module(name)
    assert {one for one in dir(module) if not one.startswith("_")} == set(module.__all__)


def _public_objects() -> list[tuple[str, Any]]:
    found: dict[str, Any] = {}
    for name in PUBLIC:
        module = importlib.import_module(name)
        for exported in module.__all__:
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


def test_public_functions_are_typed_throughout() -> None:
    functions = [
        one
        for _, member in _public_objects()
        for one in ([member] if inspect.isfunction(member) else vars(member).values())
        if inspect.isfunction(one)
    ]
    bare = []
    for function in functions:
        if function.__module__.startswith("streamalloc") and not function.__name__.startswith("__"):
            signature = inspect.signature(function)
            given = [one for one in signature.parameters.values() if one.name not in ("self", "cls")]
            if signature.empty in (signature.return_annotation, *(one.annotation for one in given)):
                bare.append(function.__qualname__)
    assert bare == []


def test_the_version_is_stated_once() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev0)?", sa.__version__)
    holders = [_relative(path) for path in SOURCES if re.search(r"^__version__\s*=", path.read_text(), re.M)]
    assert holders == ["__init__.py"]
    project = PACKAGE.parent / "pyproject.toml"
    if project.exists():
        text = project.read_text()
        assert 'dynamic = ["version"]' in text
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


def test_the_protocol_names_what_the_package_calls() -> None:
    """Functions that only newer bindings have are asked for by name, and stand in no Protocol."""
    called: set[str] = set()
    for path in SOURCES:
        if _relative(path).startswith(
            (
                "driver/simulator/",
                "driver/checker/",
                "driver/account",
                "driver/wrappers",
                "driver/protocol",
                "driver/bindings",
                "cli/",
                "traces/",
            )
        ):
            continue
        for node in _nodes(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                called |= set(re.findall(r"^cu[A-Z]\w+$", node.value))
            elif isinstance(node, ast.Attribute) and re.match(r"cu[A-Z]", node.attr):
                called.add(node.attr)
    # One name is put together: cuDeviceGet[Default]MemPool and cuMemGet[Default]MemPool.
    called = (called - {"cuMemGet", "cuDeviceGet"}) | {"cuDeviceGetDefaultMemPool", "cuDeviceGetMemPool"}
    newer = {name for name in called if version_that_added(name) != "a newer version"}
    assert called - newer == set(FUNCTIONS)
