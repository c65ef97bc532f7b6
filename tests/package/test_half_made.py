"""Objects whose making failed: their finalisers say nothing."""

import importlib
import inspect
import pkgutil
from typing import Any

import pytest

import streamalloc as sa

FOLDER = sa.__path__


def classes() -> list[Any]:
    """The classes of the package whose objects are made."""
    found: dict[str, Any] = {}
    for info in pkgutil.walk_packages(FOLDER, "streamalloc."):
        if info.name.endswith("__main__") or ".simulator" in info.name or ".cli" in info.name:
            continue
        for name, value in vars(importlib.import_module(info.name)).items():
            # A class without a module of its own is an alias; what is abstract is never made.
            if inspect.isclass(value) and value.__module__ == info.name and not inspect.isabstract(value):
                found[f"{info.name}.{name}"] = value
    return [value for _, value in sorted(found.items())]


OWNERS = [kind for kind in classes() if hasattr(kind, "__del__")]


def _name(kind: Any) -> str:
    return str(kind.__qualname__)


def test_there_are_owners() -> None:
    assert {"Buffer", "Stream", "Event", "Graph", "AddressRange", "PhysicalMemory"} <= set(map(_name, OWNERS))


@pytest.mark.parametrize("kind", OWNERS, ids=_name)
def test_dropped_before_it_was_made(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", lambda what: told.append(what.exc_value))
    half = kind.__new__(kind)
    del half
    assert told == []
