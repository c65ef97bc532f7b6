"""Planted hazards, each with its corrected twin."""

from tests.driver.checker.corpus import graphs, mappings, order, pools, sanitizer, sharing
from tests.driver.checker.corpus.bench import CASES, PAGE, SIZE, Bench, Case

__all__ = ["CASES", "PAGE", "SIZE", "Bench", "Case", "graphs", "mappings", "order", "pools", "sanitizer", "sharing"]
