"""Timeouts as callers give them, and the moments on the monotonic clock at which they end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NoReturn

__all__ = ["end_of", "left", "milliseconds", "now", "refuse"]

_DAY = 86400.0

now: Callable[[], float] = time.monotonic
"""Seconds on the monotonic clock."""


def refuse(wait: float) -> NoReturn:
    """Raise ``ValueError`` for a timeout that is none."""
    raise ValueError(f"timeout={wait!r}: it must be 0 or more seconds, or None for no limit")


def end_of(wait: float | None) -> float | None:
    """When a wait of so many seconds ends, on the monotonic clock; None: never."""
    if wait is None:
        return None
    if not wait >= 0:
        refuse(wait)
    return now() + wait


def left(end: float | None) -> float:
    """The seconds left."""
    return math.inf if end is None else max(0.0, end - now())


def milliseconds(end: float | None) -> int:
    """What is left for one call of ``poll``, which takes no more than some weeks."""
    return math.ceil(min(left(end), _DAY) * 1000)
