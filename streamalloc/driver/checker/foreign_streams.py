"""Streams that other libraries may use: their own, and those whose handles they can reach.

Another library may order any of these streams after another one, which the checker does not see: they count as ordered
among themselves. It may wait for them on the host as well. The checker records an event after each operation in them:
once the event has happened, the host may have waited for the operation.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from streamalloc.driver.bindings import cuda
from streamalloc.driver.checker.clocks import Stream, Timeline

_NO_TIMING = int(cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)
_RELAXED = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
_MOST_EVENTS = 64
"""Operations of one stream that are followed at a time."""


class ForeignStreams:
    """The streams that other libraries may use; none until one of them has used a stream."""

    def __init__(self, driver: Any, timeline: Timeline) -> None:
        self._driver = driver
        self._timeline = timeline
        self._reachable: dict[Stream, None] = {}
        self.is_there: bool = False
        """Whether another library has used a stream."""
        self.may_write: bool = False
        """Whether other code has asked for a stream's handle, by which it can launch kernels unseen."""
        self.pending: dict[Stream, deque[tuple[int, Any]]] = {}
        """Operations that have not ended: the time of each, and an event after it."""

    def is_ours(self, stream: Stream) -> bool:
        """Whether no other library can use a stream."""
        return not self.is_there and stream not in self._reachable

    def can_use(self, stream: Stream) -> None:
        """Record that other libraries can reach a stream, as they can a default stream."""
        if self.is_there:
            self._timeline.foreign[stream] = None
        else:
            self._reachable[stream] = None

    def uses(self, stream: Stream) -> None:
        """Record that another library uses a stream: it may use all streams that it can reach."""
        self.is_there = self.may_write = True
        self._timeline.foreign.update((*self._reachable.items(), (stream, None)))
        self._reachable.clear()

    def ended(self, stream: Stream) -> None:
        """Record that a stream was destroyed."""
        self._reachable.pop(stream, None)

    def did(self, stream: Stream, handle: int) -> None:
        """Record an event after the latest operation of a stream; handles 0 to 2 are default streams."""
        if stream not in self._timeline.foreign or stream.obstacle is not None:
            return
        # An event on a default stream could break the captures of other threads.
        event = None if handle <= 2 else self._record(handle)
        waiting = self.pending.setdefault(stream, deque())
        if event is None or len(waiting) == _MOST_EVENTS:
            self._end(stream, stream.time)
        if event is not None:
            waiting.append((stream.time, event))

    def look(self) -> None:
        """Query the events of pending operations."""
        failed, mode = self._driver.cuThreadExchangeStreamCaptureMode(_RELAXED)
        for stream, waiting in tuple(self.pending.items()):
            over = [time for time, event in waiting if "NOT_READY" not in self._driver.cuEventQuery(event)[0].name]
            self._end(stream, max(over, default=0))
        if not failed:
            self._driver.cuThreadExchangeStreamCaptureMode(mode)

    def _end(self, stream: Stream, time: int) -> None:
        """Record that the host may have waited for a stream's operations up to a time."""
        over = self._timeline.over
        over[stream.number] = max(over.get(stream.number, 0), time)
        waiting = self.pending.get(stream, deque())
        while waiting and waiting[0][0] <= time:
            self._driver.cuEventDestroy(waiting.popleft()[1])
        if not waiting:
            self.pending.pop(stream, None)

    def _record(self, handle: int) -> Any:
        """An event after the queued work of a stream; None where it cannot be recorded."""
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
