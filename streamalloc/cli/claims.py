"""Claims: checks of a tour step's results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamalloc.cli.worker import WorkerError
from streamalloc.core.internal import size_text


@dataclass(frozen=True)
class Claim:
    """One check: the expected and the found value as text, and whether they agree."""

    what: str
    expected: str
    found: str
    holds: bool
    error: str = ""
    """Text of an error, printed below the step."""


def equal(what: str, found: Any, expected: Any, show: Callable[[Any], str] = str) -> Claim:
    """Claim that a result equals the expected value."""
    return Claim(what, show(expected), show(found), bool(found == expected))


def at_least(what: str, found: int, least: int) -> Claim:
    """Claim that a number of bytes is at least ``least``."""
    return Claim(what, f"at least {size_text(least)}", size_text(found), found >= least)


def every_byte(what: str, found: np.ndarray[Any, Any], expected: int) -> Claim:
    """Claim that all bytes of an array have one value."""
    wrong = int(np.count_nonzero(found != expected))
    shown = f"{wrong:,} differ" if wrong else "all equal"
    return Claim(what, f"{found.size:,} bytes {expected:#04x}", shown, wrong == 0)


def ends_and_middle(found: np.ndarray[Any, Any], ends: int, middle: int) -> tuple[Claim, Claim]:
    """Claim that the first and last quarter of an array have one value, and the middle half another."""
    quarters = found.reshape(4, -1)
    return every_byte("the ends", quarters[[0, 3]], ends), every_byte("the middle", quarters[1:3], middle)


def raised(what: str, kind: type[Exception], call: Callable[[], object]) -> Claim:
    """Claim that a call raises this error, here or in the other process."""
    try:
        call()
    except WorkerError as error:
        return Claim(what, kind.__name__, error.kind, error.kind == kind.__name__, str(error))
    except kind as error:
        return Claim(what, kind.__name__, type(error).__name__, True, str(error))
    return Claim(what, kind.__name__, "no error", False)
