"""Figures of pools, observed memory, reuse and mappings, drawn with matplotlib.

Pools, address ranges, virtual buffers and observers have a method ``plot()``. :func:`reuse` draws the calls of a traced
driver. The functions that draw return the figure: a new figure, or the figure of the axes ``ax`` that are passed.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamalloc.plots.figures import address_range, draw, drawing, figure, lives, memory, pool, reuse

__all__ = ["address_range", "draw", "drawing", "figure", "lives", "memory", "pool", "reuse"]


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        # Imported at the first use, so that this package can be imported without matplotlib.
        figures = importlib.import_module(f"{__name__}.figures")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        why = "matplotlib is not installed: pip install 'streamalloc[plot]'"
        raise ModuleNotFoundError(why, name="matplotlib") from None
    globals().update({one: getattr(figures, one) for one in __all__})
    return getattr(figures, name)
