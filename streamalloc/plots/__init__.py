"""Figures of memory, drawn with matplotlib: contents of pools, reuse of memory, mappings of address ranges.

* Current state: ``pool.plot()``, ``range.plot()``, ``plot()`` of growable memory, and :func:`memory` and :func:`reuse`
  of an observer.
* History of a program, call by call: :func:`usage`, :class:`Timeline` and :func:`film`.
* Basic charts: :func:`spans`, :func:`grid`, :func:`curves` and :func:`areas`.

Each function returns a figure, or draws into the axes ``ax``.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamalloc.plots.charts import Bar, Cell, Mark, areas, curves, grid, spans
    from streamalloc.plots.objects import draw
    from streamalloc.plots.observed import Life, lives, memory, reuse
    from streamalloc.plots.pools import Step, Timeline, matrix, pool, timeline, usage
    from streamalloc.plots.ranges import Frame, Piece, address_range, film, frame
    from streamalloc.plots.style import STYLE, drawing, figure

__all__ = [
    "STYLE",
    "Bar",
    "Cell",
    "Frame",
    "Life",
    "Mark",
    "Piece",
    "Step",
    "Timeline",
    "address_range",
    "areas",
    "curves",
    "draw",
    "drawing",
    "figure",
    "film",
    "frame",
    "grid",
    "lives",
    "matrix",
    "memory",
    "pool",
    "reuse",
    "spans",
    "timeline",
    "usage",
]

_MODULES = {
    "charts": ("Bar", "Cell", "Mark", "areas", "curves", "grid", "spans"),
    "objects": ("draw",),
    "observed": ("Life", "lives", "memory", "reuse"),
    "pools": ("Step", "Timeline", "matrix", "pool", "timeline", "usage"),
    "ranges": ("Frame", "Piece", "address_range", "film", "frame"),
    "style": ("STYLE", "drawing", "figure"),
}
"""Public names by module. Modules are imported on use, so this package can be imported without matplotlib."""


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = importlib.import_module(f"{__name__}.{module}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        why = "matplotlib is not installed: pip install 'streamalloc[plot]'"
        raise ModuleNotFoundError(why, name="matplotlib") from None
    globals().update({one: getattr(found, one) for one in _MODULES[module]})
    return globals()[name]
