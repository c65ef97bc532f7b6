"""The architecture as the imports draw it: arrows point down, areas keep what is private, and nothing goes in circles.

All imports count: those in functions, and those that only a type checker follows.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import streamalloc

PACKAGE = Path(streamalloc.__file__).parent

# From the bottom to the top. Each part may take from those before it.
LAYERS = (
    "driver", "core", "pool", "vmm", "ipc", "multicast", "observing", "interop", "traces", "plots", "testing", "cli",
)  # fmt: skip
ROOMS = {"ipc": ("transport", "sharing", "ring"), "multicast": ("objects", "setup")}
# The part that all areas share: its modules may be imported one by one.
SHARED = "core"
# They name each other in their types, which no order of files could change.
KNOW_EACH_OTHER = {f"streamalloc.core.{name}" for name in ("device", "event", "graph", "stream")}


def _name(path: Path) -> str:
    parts = ["streamalloc", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {_name(path): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
IS_PACKAGE = {_name(path) for path in PACKAGE.rglob("__init__.py")}


def _area(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else ""


def _imports(module: str) -> Iterator[tuple[str, str]]:
    """What a module imports of ours: module and name (empty where it is the module itself)."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "streamalloc")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")[: len(module.split(".")) - node.level + (module in IS_PACKAGE)]
                base = ".".join([*parts, base] if base else parts)
            if base.split(".")[0] != "streamalloc":
                continue
            for alias in node.names:
                inside = f"{base}.{alias.name}"
                yield (inside, "") if inside in TREES else (base, alias.name)


MODULES = [name for name in TREES if _area(name)]


def test_every_part_has_its_place() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(LAYERS)
    assert {name for name in TREES if not _area(name)} == {"streamalloc", "streamalloc.__main__"}


@pytest.mark.parametrize("module", MODULES)
def test_arrows_point_down(module: str) -> None:
    here = LAYERS.index(_area(module))
    wrong = [other for other, _ in _imports(module) if _area(other) and LAYERS.index(_area(other)) > here]
    assert wrong == []


@pytest.mark.parametrize("module", [name for name in MODULES if _area(name) in ROOMS])
def test_arrows_point_down_inside_an_area(module: str) -> None:
    rooms = ROOMS[_area(module)]
    room = module.split(".")[2] if len(module.split(".")) > 2 else ""
    if room in rooms:
        above = rooms[rooms.index(room) + 1 :]
        assert [other for other, _ in _imports(module) if other.split(".")[2:3] and other.split(".")[2] in above] == []


@pytest.mark.parametrize("module", MODULES)
def test_an_area_takes_from_another_what_that_publishes(module: str) -> None:
    """Its public names, or those of its file ``internal``."""
    area = _area(module)
    wrong = []
    for other, name in _imports(module):
        theirs = _area(other)
        if not theirs or theirs in (area, SHARED):
            continue
        if other not in (f"streamalloc.{theirs}", f"streamalloc.{theirs}.internal"):
            wrong.append(f"{other} {name}".strip())
    assert wrong == []


@pytest.mark.parametrize("module", MODULES)
def test_what_is_public_comes_from_the_area_itself(module: str) -> None:
    """No module goes through the package that it is in, nor through the whole library."""
    package = f"streamalloc.{_area(module)}"
    if module != package and _area(module) not in ("cli", "testing"):
        assert [name for other, name in _imports(module) if other in (package, "streamalloc")] == []


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined(area: str) -> set[str]:
    """The private names that an area gives to modules, classes and objects."""
    found: set[str] = set()
    for module in (name for name in TREES if _area(name) == area):
        for node in ast.walk(TREES[module]):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                found.add(node.value)  # of __slots__
    return {name for name in found if _private(name)}


@pytest.mark.parametrize("area", LAYERS)
def test_private_names_stay_in_their_area(area: str) -> None:
    """``self._name`` of a subclass is the exception: its base class may be of another area."""
    own = _defined(area)
    wrong = []
    for module in (name for name in TREES if _area(name) == area):
        wrong += [f"{module}: {other}.{name}" for other, name in _imports(module) if _private(name)
                  and _area(other) != area]  # fmt: skip
        for node in ast.walk(TREES[module]):
            if not isinstance(node, ast.Attribute) or not _private(node.attr) or node.attr in own:
                continue
            text = ast.unparse(node.value)
            foreign = text.split(".")[0] in ("np", "sys", "ctypes", "threading", "numba", "torch")
            if text not in ("self", "cls", "super()") and not foreign and node.attr not in NAMED_TUPLE:
                wrong.append(f"{module}:{node.lineno}: {ast.unparse(node)}")
    assert wrong == []


# Public methods of named tuples in spite of their names.
NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}


def test_nothing_is_imported_in_a_circle() -> None:
    arrows: dict[str, set[str]] = defaultdict(set)
    for module in MODULES:
        arrows[module] = {other for other, _ in _imports(module) if other in TREES and other != module}
    circles = []
    done: set[str] = set()

    def follow(module: str, path: list[str]) -> None:
        if module in path:
            circle = path[path.index(module) :]
            if not set(circle) <= KNOW_EACH_OTHER:
                circles.append(" -> ".join([*circle, module]))
            return
        if module in done:
            return
        for other in sorted(arrows[module]):
            follow(other, [*path, module])
        done.add(module)

    for module in MODULES:
        follow(module, [])
    assert circles == []
