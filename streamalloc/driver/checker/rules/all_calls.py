"""The rules of all driver calls, by the name of the call."""

from __future__ import annotations

from streamalloc.driver.checker.rules import contexts, graphs, mappings, memory, order, sharing, work
from streamalloc.driver.checker.rules.rule import Rule

__all__ = ["RULES"]

RULES: dict[str, Rule] = {
    name: rule
    for area in (work, memory, order, contexts, graphs, mappings, sharing)
    for name, rule in area.RULES.items()
}
