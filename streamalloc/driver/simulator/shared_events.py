"""Interprocess events: their state in memory that several processes map.

A process that shares events keeps them on a *table*, an anonymous file; processes that open such an event map its
table. Each recording of an event, by whichever process, takes the event's next number when the call is made, and marks
that number as done when it happens in its stream. Waiting is waiting for one number, so recording the event again does
not move a wait that was made before. A number that its process did not live to mark is never done (observed on H200,
test_sharing: whoever waits for a process that was killed waits for ever).
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Iterator

_WORD = 8
_SLOT_WORDS = 16
_RING = _SLOT_WORDS - 1
"""Recordings of an event that have a slot. An older one counts as done once the recording in its slot is done."""
TABLE_EVENTS = 8192
TABLE_BYTES = TABLE_EVENTS * _SLOT_WORDS * _WORD


class EventTable:
    """The events of one process. Owns ``fd``, a descriptor of its own of the file, until ``close()`` or its end."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.taken: int = 0
        memory = mmap.mmap(fd, TABLE_BYTES)
        self._words = memoryview(memory).cast("Q")
        self.close: Callable[[], object]
        self.close = finalizer = weakref.finalize(self, _close, self._words, memory, fd)
        finalizer.atexit = False

    def take(self) -> SharedEvent | None:
        """A new event; None if the table is full. A slot is never reused: a handle of a destroyed event still opens
        (H200: test_sharing).
        """
        if self.taken == TABLE_EVENTS:
            return None
        self.taken += 1
        return SharedEvent(self, self.taken - 1)

    def read(self, word: int) -> int:
        return self._words[word]

    def write(self, word: int, value: int) -> None:
        self._words[word] = value

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from changing anything; the lock of one that is killed is gone."""
        fcntl.flock(self.fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.fd, fcntl.LOCK_UN)


def _close(words: memoryview, memory: mmap.mmap, fd: int) -> None:
    words.release()
    memory.close()
    os.close(fd)


class SharedEvent:
    """One event on a table: the number of its latest recording, and for the last few which of them are done."""

    def __init__(self, table: EventTable, index: int) -> None:
        self.table = table
        self.index = index
        self._first = index * _SLOT_WORDS

    @property
    def latest(self) -> int:
        """The number of the latest recording, 0 where there is none."""
        return self.table.read(self._first)

    def begin(self) -> int:
        """Take the number of a new recording."""
        with self.table.locked():
            number = self.latest + 1
            self.table.write(self._first, number)
        return number

    def finish(self, number: int) -> None:
        """A recording has happened."""
        with self.table.locked():
            word = self._word(number)
            if self.table.read(word) < number:
                self.table.write(word, number)

    def happened(self, number: int) -> bool:
        return not number or self.table.read(self._word(number)) >= number

    def _word(self, number: int) -> int:
        return self._first + 1 + number % _RING

    def arrival(self) -> Callable[[], bool]:
        """Whether the recording that is the latest now has happened, for asking later."""
        number = self.latest
        return lambda: self.happened(number)
