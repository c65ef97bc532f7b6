"""Planted hazards, each with its corrected twin."""

from tests.checker.corpus import contexts, copies, freed, graphs, mappings, nodes, order, pools, programs, sharing
from tests.checker.corpus.bench import CASES, PAGE, SIZE, Bench, Case

AREAS = (pools, order, copies, contexts, graphs, nodes, mappings, freed, sharing, programs)

__all__ = ["AREAS", "CASES", "KINDS", "PAGE", "SIZE", "Bench", "Case"]
KINDS = {
    *("use before allocation", "use after free", "free before allocation", "double free", "free racing a use"),
    *("reuse race", "race", "unmap while in use", "release while in use", "access without a grant", "out of bounds"),
    *("export before completion", "free before the importer's", "uninitialized", "another type", "leak"),
}
