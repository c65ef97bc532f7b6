"""All rules, by the name of the call.

A rule of ``AFTER`` is told of a call that has succeeded. One of ``BEFORE`` is asked before the call is made, as with a
free, after which the driver may give the memory to others; what it returns is called with the answer, whatever that is.
"""

from __future__ import annotations

from streamalloc.driver.checker.rules import contexts, graphs, mappings, memory, order, sharing, work
from streamalloc.driver.checker.rules.rule import Asked, Finish, Rule

__all__ = ["AFTER", "BEFORE", "Finish"]


_AREAS = (work, memory, order, contexts, graphs, mappings, sharing)

AFTER: dict[str, Rule] = {name: rule for area in _AREAS for name, rule in area.AFTER.items()}
BEFORE: dict[str, Asked] = {name: rule for area in _AREAS for name, rule in area.BEFORE.items()}
