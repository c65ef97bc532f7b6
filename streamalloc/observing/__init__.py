"""Who has which memory, since when and from which line: observers of pools, caches, growable and symmetric memory.

:func:`observe` makes an :class:`Observer`. While none is there, allocations and frees cost what they cost without this
package.
"""

from streamalloc.observing.live_view import LiveView, PoolFigures, live
from streamalloc.observing.observer import Observer, observe
from streamalloc.observing.records import Allocation, Happening, Phase, Site, Source
from streamalloc.observing.report import LeakError, LeakReport, Place

__all__ = [
    "Allocation",
    "Happening",
    "LeakError",
    "LeakReport",
    "LiveView",
    "Observer",
    "Phase",
    "Place",
    "PoolFigures",
    "Site",
    "Source",
    "live",
    "observe",
]
