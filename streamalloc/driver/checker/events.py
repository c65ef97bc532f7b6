"""Events, as far as the checker knows of them."""

from __future__ import annotations

from streamalloc.driver.checker.announcements import Place
from streamalloc.driver.checker.capture import Capture
from streamalloc.driver.checker.clocks import Clock, Obstacle

__all__ = ["Event"]


class Event:
    """An event, and its latest recording."""

    __slots__ = ("captured", "elsewhere", "foreign", "mark", "place", "shared", "there")

    def __init__(self, shared: bool = False, foreign: bool = False) -> None:
        self.mark: Obstacle | None = None
        """None where it was never recorded, or not by us."""
        self.captured: tuple[Capture, Clock] | None = None
        self.shared = shared
        """Whether other processes may wait for it."""
        self.elsewhere = False
        """Whether another process has it, which may have recorded it."""
        self.foreign = foreign
        """Whether another library has made it, which may have recorded it."""
        self.place: int | None = None
        """Where others are told of its recordings."""
        self.there: Place | None = None
        """Where another process tells of its recordings."""
