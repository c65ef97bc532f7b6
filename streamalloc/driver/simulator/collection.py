"""Keeps Python's garbage collector out of the simulated driver.

The real driver runs no Python. Here a collection in the middle of a call could run finalisers, which make driver calls
of their own on the same thread, past the lock, while the machine's state is half changed.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["pause", "paused", "resume"]


def pause() -> bool:
    """Stop automatic collections; whether they were on, for :func:`resume`."""
    was_on = gc.isenabled()
    gc.disable()
    return was_on


def resume(was_on: bool) -> None:
    """Undo :func:`pause`."""
    if was_on:
        gc.enable()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """A block without automatic collections."""
    was_on = pause()
    try:
        yield
    finally:
        resume(was_on)
