"""All rules, by the name of the call.

A rule of ``AFTER`` is told of a call that has succeeded. One of ``BEFORE`` is asked before the call is made, as with a
free, after which the driver may give the memory to others; what it returns is called with the answer, whatever that is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from streamalloc.driver.checker.rules import graphs, mappings, memory, order, sharing, work
from streamalloc.driver.checker.state import State

__all__ = ["AFTER", "BEFORE", "Finish"]

Arguments: TypeAlias = "tuple[Any, ...]"
Answer: TypeAlias = "tuple[Any, ...]"
Finish: TypeAlias = "Callable[[Answer], object]"

_AREAS = (work, memory, order, graphs, mappings, sharing)

AFTER: dict[str, Callable[[State, str, Arguments, Answer], object]] = {
    name: rule for area in _AREAS for name, rule in area.AFTER.items()
}
BEFORE: dict[str, Callable[[State, str, Arguments], Finish]] = {
    name: rule for area in _AREAS for name, rule in area.BEFORE.items()
}
