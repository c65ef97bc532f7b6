"""Recorded state of events."""

from __future__ import annotations

from streamalloc.driver.checker.announcements import Entry
from streamalloc.driver.checker.capture import Capture
from streamalloc.driver.checker.clocks import Clock, Obstacle


class Event:
    """An event, and its latest recording."""

    __slots__ = ("captured", "elsewhere", "foreign", "index", "mark", "shared", "there")

    def __init__(self, shared: bool = False, foreign: bool = False) -> None:
        self.mark: Obstacle | None = None
        """End of the recorded work; None where no recording was seen."""
        self.captured: tuple[Capture, Clock] | None = None
        self.shared: bool = shared
        """Whether the event is an interprocess event."""
        self.elsewhere: bool = False
        """Whether another process has it and may record it."""
        self.foreign: bool = foreign
        """Whether another library has it and may record it."""
        self.index: int | None = None
        """Entry on the board of this process."""
        self.there: Entry | None = None
        """Entry on the board of another process."""
