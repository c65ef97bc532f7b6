"""Timeouts in seconds, and deadlines on the monotonic clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_DAY = 86400.0

now: Callable[[], float] = time.monotonic
"""Seconds on the monotonic clock."""


def end_of(wait: float | None) -> float | None:
    """Return the deadline of a timeout, in seconds on the monotonic clock; None for none.

    Raises
    ------
    ValueError
        The timeout is negative or not a number.
    """
    if wait is None:
        return None
    if not wait >= 0:
        raise ValueError(f"timeout={wait!r}: it must be 0 or more seconds, or None for no limit")
    return now() + wait


def left(end: float | None) -> float:
    """Seconds until a deadline, 0 or more."""
    return math.inf if end is None else max(0.0, end - now())


def milliseconds(end: float | None) -> int:
    """Milliseconds until a deadline, at most a day, because ``poll`` takes a 32-bit int."""
    return math.ceil(min(left(end), _DAY) * 1000)
