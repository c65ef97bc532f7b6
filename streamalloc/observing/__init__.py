"""Observers of allocations in pools, caches and mappings: which memory is live, since when, and from which line.

:func:`observe` returns an :class:`Observer`. Without an observer, allocations and frees have no extra cost.
"""

from streamalloc.observing.live_view import LiveView, live
from streamalloc.observing.observer import Counters, Observer, observe
from streamalloc.observing.records import Allocation, Happening, LeakError, LeakReport, Phase

__all__ = [
    "Allocation",
    "Counters",
    "Happening",
    "LeakError",
    "LeakReport",
    "LiveView",
    "Observer",
    "Phase",
    "live",
    "observe",
]


def __dir__() -> list[str]:
    return [*__all__]
