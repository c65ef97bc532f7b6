"""Timeouts in seconds, and deadlines on the monotonic clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_DAY = 86400.0

now: Callable[[], float] = time.monotonic
"""Seconds on the monotonic clock."""


def deadline_after(timeout: float | None) -> float | None:
    """Return the deadline ``timeout`` seconds from now, in seconds on the monotonic clock; None for none.

    Raises
    ------
    ValueError
        The timeout is negative or not a number.
    """
    if timeout is None:
        return None
    if not timeout >= 0:
        raise ValueError(f"timeout={timeout!r}: it must be 0 or more seconds, or None for no limit")
    return now() + timeout


def left(deadline: float | None) -> float:
    """Return the seconds until a deadline, 0 or more; infinite without a deadline."""
    return math.inf if deadline is None else max(0.0, deadline - now())


def milliseconds(deadline: float | None) -> int:
    """Return the milliseconds until a deadline, at most a day, because ``poll`` takes a 32-bit int."""
    return math.ceil(min(left(deadline), _DAY) * 1000)
