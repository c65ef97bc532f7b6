"""Streams that code past this driver may use as well: those of other libraries, and what they can reach beside them.

Such code may have one of these streams wait for another, which nobody sees: they count as ordered among themselves. It
may wait for them on the host as well: an event behind each operation that is told tells when that may have been.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from streamalloc.driver.bindings import cuda
from streamalloc.driver.checker.clocks import Stream, Timeline

__all__ = ["ForeignStreams"]

_NO_TIMING = int(cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)
_RELAXED = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
_KEPT = 64
"""So many operations of a stream are waited for."""


class ForeignStreams:
    """The streams that other code may use; none before it has shown that it is there."""

    def __init__(self, driver: Any, timeline: Timeline) -> None:
        self._driver = driver
        self._timeline = timeline
        self._reachable: dict[Stream, None] = {}
        """The streams that other code can use, if there is other code."""
        self.is_there: bool = False
        self.pending: dict[Stream, deque[tuple[int, Any]]] = {}
        """The operations whose end nobody has seen, by their times, each with an event behind it."""

    def can_use(self, stream: Stream) -> None:
        """Other code has the handle of a stream, as of a default stream."""
        if self.is_there:
            self._timeline.foreign[stream] = None
        else:
            self._reachable[stream] = None

    def uses(self, stream: Stream) -> None:
        """Other code uses a stream, so that it uses others as well."""
        self.is_there = True
        self._timeline.foreign.update((*self._reachable.items(), (stream, None)))
        self._reachable.clear()

    def ended(self, stream: Stream) -> None:
        """A stream was destroyed."""
        self._reachable.pop(stream, None)

    def did(self, stream: Stream, handle: int) -> None:
        """A stream has got something to do; ``handle``: 0 to 2 for a default stream."""
        if stream not in self._timeline.foreign or stream.obstacle is not None:
            return
        # An event on a default stream could break the captures of others.
        event = None if handle <= 2 else self._record(handle)
        waiting = self.pending.setdefault(stream, deque())
        if event is None or len(waiting) == _KEPT:
            self._end(stream, stream.time)
        if event is not None:
            waiting.append((stream.time, event))

    def look(self) -> None:
        """See which operations are over."""
        failed, mode = self._driver.cuThreadExchangeStreamCaptureMode(_RELAXED)
        for stream, waiting in tuple(self.pending.items()):
            over = [time for time, event in waiting if "NOT_READY" not in self._driver.cuEventQuery(event)[0].name]
            self._end(stream, max(over, default=0))
        if not failed:
            self._driver.cuThreadExchangeStreamCaptureMode(mode)

    def _end(self, stream: Stream, time: int) -> None:
        """The host may know of what a stream did until a time."""
        over = self._timeline.over
        over[stream.number] = max(over.get(stream.number, 0), time)
        waiting = self.pending.get(stream, deque())
        while waiting and waiting[0][0] <= time:
            self._driver.cuEventDestroy(waiting.popleft()[1])
        if not waiting:
            self.pending.pop(stream, None)

    def _record(self, handle: int) -> Any:
        """An event behind all that a stream has queued; None where there can be none."""
        driver, stream = self._driver, cuda.CUstream(handle)
        failed, capturing = driver.cuStreamIsCapturing(stream)
        if failed or int(capturing):
            return None
        failed, context = driver.cuStreamGetCtx(stream)[:2]
        if failed or driver.cuCtxPushCurrent(context)[0]:
            return None
        try:
            failed, event = driver.cuEventCreate(_NO_TIMING)
            if failed:
                return None
            if driver.cuEventRecord(event, stream)[0]:
                driver.cuEventDestroy(event)
                return None
            return event
        finally:
            driver.cuCtxPopCurrent()
