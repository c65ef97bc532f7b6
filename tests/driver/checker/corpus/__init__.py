"""Planted hazards, each with its corrected twin."""

from tests.driver.checker.corpus import (
    contexts,
    copies,
    freed,
    graphs,
    mappings,
    nodes,
    order,
    pools,
    sanitizer,
    sharing,
)
from tests.driver.checker.corpus.bench import CASES, PAGE, SIZE, Bench, Case

AREAS = (pools, order, copies, contexts, graphs, nodes, mappings, freed, sharing, sanitizer)

__all__ = ["AREAS", "CASES", "PAGE", "SIZE", "Bench", "Case"]
