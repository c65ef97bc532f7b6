"""Events, also those that several processes share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from .constants import new_handle
from .contexts import Context
from .shared_events import SharedEvent
from .timeline import Clock, Operation, Stream, merge


class Stamp(Operation):
    """Notes when an event happens, for other processes too where they share it."""

    when: float = 0.0
    shared: SharedEvent | None = None
    number = 0
    """Of the recording, among those of all processes."""

    def step(self) -> bool:
        self.when = time.perf_counter()
        if self.shared is not None:
            self.shared.finish(self.number)
        return True


@dataclass(eq=False)
class Record:
    """One recording of an event: where in which stream, and all that comes before it."""

    stream: Stream
    seq: int
    clock: Clock
    stamp: Stamp

    @property
    def complete(self) -> bool:
        return self.stream.done >= self.seq


@dataclass(eq=False)
class Event:
    """An event, and its latest recording: in a stream, or in a graph that is being captured."""

    context: Context
    flags: int
    record: Record | None = None
    capture: Any = None
    nodes: list[Any] = field(default_factory=list)  # what was captured before it
    shared: SharedEvent | None = None
    opened: bool = False  # by a handle: another process's
    handle: int = field(default_factory=new_handle)

    @property
    def complete(self) -> bool:
        if self.shared is not None:
            return self.shared.happened(self.shared.latest)
        return self.record is None or self.record.complete

    @property
    def elsewhere(self) -> SharedEvent | None:
        """The shared event, if its latest recording is not ``record`` but one by another process or handle."""
        if self.shared is None or self.shared.latest == (0 if self.record is None else self.record.stamp.number):
            return None
        return self.shared

    def share(self, shared: SharedEvent) -> SharedEvent:
        """Let other processes see this event, and what was recorded so far."""
        self.shared = shared
        if self.record is not None:
            stamp = self.record.stamp
            stamp.number = shared.begin()
            if self.record.complete:
                shared.finish(stamp.number)
            else:
                stamp.shared = shared
        return shared

    def record_in(self, stream: Stream, after: tuple[tuple[Stream, int], ...] = (), known: Clock | None = None) -> None:
        """Record after all that is in ``stream`` now, and after ``after``, which implies ``known``."""
        stamp = Stamp()
        if self.shared is not None:
            stamp.shared, stamp.number = self.shared, self.shared.begin()
        seq = stream.submit(stamp, after)
        clock = {**stream.clock, stream.id: seq}
        merge(clock, known or {})
        self.record = Record(stream, seq, clock, stamp)
        self.capture = None
        self.nodes = []
