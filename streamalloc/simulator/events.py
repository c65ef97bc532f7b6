"""Events, including those shared by several processes."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from streamalloc.simulator.constants import EventFlag, new_handle
from streamalloc.simulator.contexts import Context
from streamalloc.simulator.errors import undo_by
from streamalloc.simulator.scheduler import Clock, Mark, Operation, Points, Queue, Until, merge

# -- events of several processes -------------------------------------------------------------------------------

# A process that shares events keeps them in a *table*, an anonymous file. Processes that open such an event map its
# table. Each recording of an event, by any process, takes the event's next number at the call, and marks that number as
# done when it runs in its stream. A wait is for one number, so a later recording does not affect it. If a process dies
# before it marks a number, that number is never done (observed on H200, test_sharing: a waiter for a killed process
# waits forever).

_WORD = 8
_SLOT_WORDS = 16
_RING = _SLOT_WORDS - 1
"""Recordings per event with a slot. An older one counts as done once its slot's newer recording is done."""
TABLE_EVENTS = 8192
TABLE_BYTES = TABLE_EVENTS * _SLOT_WORDS * _WORD


class EventTable:
    """The events of one process. Owns ``fd``, a separate descriptor of the file, until ``close()`` or the object's
    end.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.taken: int = 0
        with undo_by(os.close, fd):
            self.words: memoryview = memoryview(mmap.mmap(fd, TABLE_BYTES)).cast("Q")
        self.close: Callable[[], object]
        self.close = finalizer = weakref.finalize(self, _close, self.words, fd)
        finalizer.atexit = False

    def take(self) -> SharedEvent | None:
        """A new event; None if the table is full. Slots are never reused, because a handle of a destroyed event still
        opens (H200: test_sharing).
        """
        if self.taken == TABLE_EVENTS:
            return None
        self.taken += 1
        return SharedEvent(self, self.taken - 1)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """A ``with`` block in which no other process changes the table. The kernel releases the lock of a killed
        process.
        """
        fcntl.flock(self.fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.fd, fcntl.LOCK_UN)


def _close(words: memoryview, fd: int) -> None:
    words.release()  # and the mapping with it
    os.close(fd)


class SharedEvent:
    """One event in a table: the number of its latest recording, and for the last few recordings whether they are
    done.
    """

    def __init__(self, table: EventTable, index: int) -> None:
        self.table = table
        self.index = index
        self._first = index * _SLOT_WORDS

    @property
    def latest(self) -> int:
        """The number of the latest recording; 0 if there is none."""
        return self.table.words[self._first]

    def begin(self) -> int:
        """Take the number of a new recording."""
        with self.table.locked():
            number = self.latest + 1
            self.table.words[self._first] = number
        return number

    def finish(self, number: int) -> None:
        """A recording has happened."""
        with self.table.locked():
            word, words = self._word(number), self.table.words
            words[word] = max(words[word], number)

    def happened(self, number: int) -> bool:
        return not number or self.table.words[self._word(number)] >= number

    def _word(self, number: int) -> int:
        return self._first + 1 + number % _RING

    def arrival(self) -> Callable[[], bool]:
        """Return a function that tells whether the present latest recording has run."""
        number = self.latest
        return lambda: self.happened(number)


# -- events ----------------------------------------------------------------------------------------------------


class Record(Operation):
    """One recording of an event: its stream, its position there, and its time; for a shared event visible to other
    processes.
    """

    def __init__(self, stream: Queue, shared: SharedEvent | None) -> None:
        self.stream = stream
        self.clock: Clock = {}
        """The clock of the record."""
        self.ranked: bool = stream.id in stream.scheduler.ranks
        self.others: Points = ()
        """Operations of other streams to wait for, in a recording without work."""
        self.when: float = 0.0
        self.shared = shared
        self.number: int = shared.begin() if shared is not None else 0
        """Among those of all processes."""

    def step(self) -> bool:
        self.when = time.perf_counter()
        if self.shared is not None:
            self.shared.finish(self.number)
        return True

    @property
    def complete(self) -> bool:
        return self.stream.done >= self.seq and all(other.done >= seq for other, seq in self.others)


@dataclass(eq=False)
class QueueEvent:
    """An event with its latest recording, in a stream or in a graph under capture."""

    context: Context
    flags: int
    record: Record | None = None
    capture: Any = None
    nodes: list[Any] = field(default_factory=list)  # captured nodes that precede it
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
        """The shared event if another process or handle made its latest recording; otherwise None."""
        if self.shared is None or self.shared.latest == (0 if self.record is None else self.record.number):
            return None
        return self.shared

    def share(self, shared: SharedEvent) -> SharedEvent:
        """Move the event and its recordings to memory that other processes can map."""
        self.shared = shared
        if self.record is not None:
            self.record.number = shared.begin()
            if self.record.complete:
                shared.finish(self.record.number)
            else:
                self.record.shared = shared
        return shared

    def make_wait(self, stream: Queue) -> None:
        """Have a stream wait for the latest recording."""
        elsewhere, record = self.elsewhere, self.record
        if elsewhere is not None:
            stream.submit(Until(elsewhere.arrival()))
        elif self.flags & EventFlag.INTERPROCESS:
            # This counts as work of the stream even if the event has completed or was never recorded, but pools ignore
            # the order (observed on H200: test_events, test_placements).
            stream.submit(Operation(), () if record is None else ((record.stream, record.seq), *record.others))
        elif record is not None:
            scheduler = stream.scheduler
            if record.stream is not stream or record.others:
                # a wait for completed work is no work (observed on H200: test_events)
                joins = stream.peers is not None or not record.complete
                stream.submit(Mark(), ((record.stream, record.seq), *record.others), joins=joins)
                if record.ranked:
                    scheduler.rank(stream)
            # a recording knows the legacy stream's order, even if its own stream does not (H200: test_placements)
            merge(stream.clock, {number: seq for number, seq in record.clock.items() if number in scheduler.streams})

    def record_in(self, stream: Queue, after: Points = ()) -> None:
        """Record after all present work of ``stream``, and after ``after``."""
        earlier, record = self.record, Record(stream, self.shared)
        shared = self.flags & EventFlag.INTERPROCESS
        if shared and earlier is not None and earlier.stream is not stream:
            after += ((earlier.stream, earlier.seq),)  # recordings run in sequence (observed on H200: test_events)
            stream.submit(Operation())  # earlier frees are seen before that wait (observed on H200: test_reuse)
        # an interprocess recording also gives the stream the legacy stream's order (observed on H200: test_placements)
        clock = stream.clock if shared or stream.peers is not None else dict(stream.clock)
        untimed = not shared and self.flags & EventFlag.DISABLE_TIMING
        record.counts = record.is_command = not untimed
        if untimed and stream.legacy is not None:
            record.others = stream.catch_up(clock)
        if record.others:
            record.seq = stream.seq  # the event waits for the legacy stream, this one does not (H200: test_events)
        else:
            record.seq = stream.submit(record, after, clock)
        record.clock = {**clock, stream.id: record.seq}
        self.record, self.capture, self.nodes = record, None, []
