"""The architecture as the imports draw it: arrows point down, areas keep what is private, and nothing goes in circles.

All imports count: those in functions, and those that only a type checker follows.
"""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

import streamalloc
from streamalloc.driver.bindings import version_that_added
from streamalloc.driver.protocol import FUNCTIONS

PACKAGE = Path(streamalloc.__file__).parent

# From the bottom to the top. Each part may take from those before it.
LAYERS = (
    "formats", "driver", "simulator", "checker", "cupti", "core", "pool", "vmm", "ipc", "multicast", "observing",
    "interop", "traces", "plots", "testing", "cli",
)  # fmt: skip
# Rooms of one place take nothing from each other.
ROOMS = {"ipc": ("transport", "wire", "exporter importer", "ring store"), "multicast": ("objects", "setup")}
# Modules of core that are faces beside ``internal``: the words in which all areas speak of memory and of failures.
VOCABULARY = ("errors", "properties", "resource", "session")
# Modules of other people's formats, which know nothing of ours.
FORMATS = ("arrays", "html", "lazy_numpy", "locks", "ranges", "sizes")
# They name each other in their types, which no order of files could change; no import at the top goes in a circle.
KNOW_EACH_OTHER = [{f"streamalloc.core.{name}" for name in names.split()} for names in ("device event graph stream",)]


def _name(path: Path) -> str:
    parts = ["streamalloc", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def _area(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else ""


@functools.cache
def _nodes(module: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(FILES[module].read_text())))


@pytest.fixture(autouse=True, scope="module")
def _forget_trees() -> Iterator[None]:
    """Later collections in this process do not go through the trees of the whole package."""
    yield
    _nodes.cache_clear()


@functools.cache
def _imports(module: str) -> list[tuple[str, str]]:
    """Imports of our own modules: module and name (empty where it is the module itself)."""
    found = []
    for node in _nodes(module):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names if alias.name.split(".")[0] == "streamalloc"]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                is_package = FILES[module].name == "__init__.py"
                parts = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*parts, base] if base else parts)
            if base.split(".")[0] != "streamalloc":
                continue
            for alias in node.names:
                inside = f"{base}.{alias.name}"
                found.append((inside, "") if inside in FILES else (base, alias.name))
    return found


MODULES = [name for name in FILES if _area(name)]


def _wrong(allowed: Callable[[str, str, str], bool], modules: Iterable[str] = MODULES) -> list[str]:
    """The imports for which ``allowed(module, other, name)`` is not true."""
    imports = [(module, *one) for module in modules for one in _imports(module)]
    return [f"{module}: {other} {name}".rstrip() for module, other, name in imports if not allowed(module, other, name)]


def test_every_part_has_its_place() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(LAYERS)
    assert {name for name in FILES if not _area(name)} == {"streamalloc", "streamalloc.__main__"}


def test_arrows_point_down() -> None:
    def allowed(module: str, other: str, name: str) -> bool:
        return not _area(other) or LAYERS.index(_area(other)) <= LAYERS.index(_area(module))

    assert _wrong(allowed) == []


def test_arrows_point_down_inside_an_area() -> None:
    def room(module: str) -> tuple[int, str] | None:
        """A module's room in its area, and how far up that is."""
        inside = "".join(module.split(".")[2:3])
        places = (place for place, rooms in enumerate(ROOMS[_area(module)]) if inside in rooms.split())
        return next(((place, inside) for place in places), None)

    def allowed(module: str, other: str, name: str) -> bool:
        here, there = room(module), room(other) if _area(other) == _area(module) else None
        return here is None or there is None or there == here or there[0] < here[0]

    assert _wrong(allowed, [name for name in MODULES if _area(name) in ROOMS]) == []


def test_an_area_takes_from_another_what_that_publishes() -> None:
    """Its public names, or those of its file ``internal``; of core also those of the vocabulary."""
    faces = {f"streamalloc.{area}{inside}" for area in LAYERS for inside in ("", ".internal")}
    faces |= {f"streamalloc.core.{module}" for module in VOCABULARY}
    faces |= {f"streamalloc.formats.{module}" for module in FORMATS}

    def allowed(module: str, other: str, name: str) -> bool:
        theirs = _area(other)
        door = theirs == "driver" and _area(module) in ("simulator", "checker", "cupti")  # they are drivers themselves
        feed = theirs == "checker" and _area(module) == "cupti"  # another feed of the checker, beside its wrapper
        return not theirs or theirs == _area(module) or door or feed or other in faces

    assert _wrong(allowed) == []


def test_what_is_public_comes_from_the_area_itself() -> None:
    """No module goes through the package that it is in, nor through the whole library."""

    def allowed(module: str, other: str, name: str) -> bool:
        package = f"streamalloc.{_area(module)}"
        return module == package or _area(module) in ("cli", "testing") or other not in (package, "streamalloc")

    assert _wrong(allowed) == []


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined(area: str) -> set[str]:
    """The private names that an area gives to modules, classes and objects."""
    found: set[str] = set()
    for module in (name for name in FILES if _area(name) == area):
        for node in _nodes(module):
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
    for module in (name for name in FILES if _area(name) == area):
        wrong += [f"{module}: {other}.{name}" for other, name in _imports(module) if _private(name)
                  and _area(other) != area]  # fmt: skip
        for node in _nodes(module):
            if not isinstance(node, ast.Attribute) or not _private(node.attr) or node.attr in own:
                continue
            text = ast.unparse(node.value)
            foreign = text.split(".")[0] in ("np", "sys", "ctypes", "threading", "pickle", "numba", "torch")
            if text not in ("self", "cls", "super()") and not foreign and node.attr not in NAMED_TUPLE:
                wrong.append(f"{module}:{node.lineno}: {ast.unparse(node)}")
    assert wrong == []


# Public methods of named tuples in spite of their names.
NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}


def test_nothing_is_imported_in_a_circle() -> None:
    arrows: dict[str, set[str]] = defaultdict(set)
    for module in MODULES:
        arrows[module] = {other for other, _ in _imports(module) if other in FILES and other != module}
    circles = []
    done: set[str] = set()

    def follow(module: str, path: list[str]) -> None:
        if module in path:
            circle = path[path.index(module) :]
            if not any(set(circle) <= known for known in KNOW_EACH_OTHER):
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


_DRIVERS = ("driver/", "simulator/", "checker/", "cupti/")


def _outside(*folders: str) -> list[str]:
    """The modules outside of folders, or files, of the package."""
    return [name for name, path in FILES.items() if not str(path.relative_to(PACKAGE)).startswith(folders)]


def test_only_the_door_imports_the_bindings() -> None:
    wrong = []
    for module in _outside(*_DRIVERS):
        for node in _nodes(module):
            names: list[str | None] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            elif isinstance(node, ast.Call):
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                libraries = called in ("CDLL", "LoadLibrary")
                modules = called in ("import_module", "__import__") and "bindings" in ast.unparse(node)
                names = ["cuda"] if libraries or modules else []
            wrong += [(module, name) for name in names if name and name.split(".")[0] == "cuda"]
    assert wrong == []


def test_the_facade_never_asks_which_driver_it_is() -> None:
    assert [name for name in _outside(*_DRIVERS, "cli/") if "is_simulated" in FILES[name].read_text()] == []


def test_the_protocol_names_what_the_package_calls() -> None:
    """Functions that only newer bindings have are asked for by name, and stand in no Protocol."""
    drivers = ("account", "wrappers", "protocol", "bindings")
    called: set[str] = set()
    inside = (*(f"driver/{one}" for one in drivers), "simulator/", "checker/", "cupti/", "cli/", "traces/")
    for module in _outside(*inside):
        for node in _nodes(module):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                called |= set(re.findall(r"^cu[A-Z]\w+$", node.value))
            elif isinstance(node, ast.Attribute) and re.match(r"cu[A-Z]", node.attr):
                called.add(node.attr)
    # One name is put together: cuDeviceGet[Default]MemPool and cuMemGet[Default]MemPool.
    called = (called - {"cuMemGet", "cuDeviceGet"}) | {"cuDeviceGetDefaultMemPool", "cuDeviceGetMemPool"}
    newer = {name for name in called if version_that_added(name) != "a newer version"}
    assert called - newer == set(FUNCTIONS)
