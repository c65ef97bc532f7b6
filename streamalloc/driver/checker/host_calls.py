"""Host functions that streams call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from streamalloc.driver.checker.capture import Node
from streamalloc.driver.checker.clocks import Actor, Obstacle, Stream, Timeline


class HostCall:
    """A host function that a stream calls: once, or at each launch of a graph."""

    __slots__ = ("_queued", "_running", "_stream", "_thread", "_timeline", "cancelled", "node", "stays")

    def __init__(
        self, timeline: Timeline, stream: Callable[[Any], Stream], thread: Callable[[], Actor], stays: bool = False
    ) -> None:
        self._timeline = timeline
        self._stream = stream
        """Finds the stream of a handle."""
        self._thread = thread
        """Finds the calling host thread."""
        self._queued: deque[tuple[Stream, Obstacle, Obstacle]] = deque()
        """Stream, end of the work before, and end of the call itself, for each queued call."""
        self._running: list[Obstacle] = []
        self.node: Node | None = None
        """Node of a capture."""
        self.stays: bool = stays
        """Whether a graph has it, which may be launched again."""
        self.cancelled: bool = False

    def queue(self, handle: Any) -> None:
        """Queue a call in a stream."""
        if self.cancelled:
            return
        timeline, stream = self._timeline, self._stream(handle)
        before, ended = timeline.record(stream), Obstacle()
        timeline.wait(stream, ended)
        self._queued.append((stream, before, ended))

    def begins(self) -> None:
        """Begin the oldest queued call: the earlier work of its stream has ended."""
        timeline = self._timeline
        if not self._queued:
            # Another library has launched the graph.
            timeline.host_observes(timeline.everything())
            return
        stream, before, ended = self._queued.popleft()
        self._running.append(ended)
        self._thread().within = stream
        timeline.force_mark(before)
        if before.clock is not None:
            timeline.host_observes(before.clock)

    def ends(self) -> None:
        """End the running call."""
        if self._running:
            self._timeline.end(self._running.pop(0), self._timeline.host)
        self._thread().within = None

    def refused(self) -> None:
        """Undo the queueing where the driver has refused it."""
        if self.stays:
            self.cancelled = True
        else:
            self.skip()

    def skip(self) -> None:
        """Remove the latest queued call."""
        if self._queued:
            self._timeline.end(self._queued.pop()[2], self._timeline.host)
