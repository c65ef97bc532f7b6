"""Values in memory that streams write and wait for (``cuStreamWriteValue32``, ``cuStreamWaitValue32``)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from streamalloc.checker.clocks import Clock, Obstacle, Timeline, TrackedStream
from streamalloc.checker.ranges import AddressMap, Bytes, Range
from streamalloc.driver.bindings import WAIT_COMPARISONS

_TYPES: dict[int, Any] = {32: ctypes.c_uint32, 64: ctypes.c_uint64}
_MOST_WRITES, _MOST_ADDRESSES = 16, 10_000
"""Most writes kept per address, and most addresses."""

_Key = tuple[Bytes | None, int]


@dataclass(eq=False, slots=True)
class _Waiting(Obstacle):
    """The wait of a stream for a value in memory."""

    key: _Key = (None, 0)
    range: Range | None = None
    accepts: Callable[[int], bool] = bool
    read: Callable[[], int] | None = None
    """Reads the value; None where the host cannot."""


class WaitValues:
    """The latest values that streams wrote, and the waits for values.

    The checker may not see the write of a value, for example by a kernel. Then the wait lasts until the host sees the
    waiting stream idle, and all earlier work counts as ordered before it.
    """

    def __init__(self, timeline: Timeline, addresses: AddressMap, on_host: Callable[[int], bool]) -> None:
        self._timeline = timeline
        self._addresses = addresses
        self._on_host = on_host
        """Whether the host can read an address outside of all ranges."""
        self._writes: dict[_Key, list[tuple[int, Clock]]] = {}
        self._ignored: set[_Key] = set()

    def _key(self, address: int) -> tuple[_Key, Range | None]:
        pieces = self._addresses.pieces(address, 4)
        places = pieces[0][0].physical(*pieces[0][1:]) if pieces else []
        return (places[0][0], places[0][1]) if places else (None, address), pieces[0][0] if pieces else None

    def ignore(self, address: int) -> None:
        """Give the value at an address no meaning: the facade announces it separately."""
        self._ignored.add(self._key(address)[0])

    def write(self, stream: TrackedStream, address: int, value: int) -> None:
        """Queue a write of a value in a stream."""
        key, range_ = self._key(address)
        shared = range_ is None or range_.bytes.shared

        def write(stream: TrackedStream) -> None:
            writes = self._writes.setdefault(key, [])
            writes.append((value, stream.clock.copy()))
            del writes[:-_MOST_WRITES]
            if len(self._writes) > _MOST_ADDRESSES:
                self._timeline.notes.add("waits", f"for one of more than {_MOST_ADDRESSES:,} values")
                del self._writes[next(iter(self._writes))]
            if shared:
                self._timeline.published.learn(stream.clock)
            for held in tuple(self._timeline.held):
                wait = held.obstacle
                if isinstance(wait, _Waiting) and wait.key == key and wait.accepts(value):
                    self._timeline.end(wait, stream.clock)

        self._timeline.submit(stream, write)

    def wait(self, stream: TrackedStream, address: int, value: int, flag: int, bits: int) -> None:
        """Queue a wait for a value in a stream."""
        key, range_ = self._key(address)
        compare = WAIT_COMPARISONS[flag & 3]
        wait = _Waiting(key=key, range=range_, accepts=lambda there: compare(there, value, bits))
        if self._on_host(address) if range_ is None else range_.kind in ("pinned memory", "registered memory"):
            # Host memory can change without a call.
            wait.read = lambda: int(_TYPES[bits].from_address(address).value)

        def meet(stream: TrackedStream) -> None:
            order: Clock | None = None
            writes = self._writes.get(key, [])
            for written, clock in reversed(writes):
                if not wait.accepts(written):
                    break
                # The stream may see any of these values.
                order = clock if order is None else order.common(clock)
            else:
                if len(writes) == _MOST_WRITES:
                    self._timeline.notes.add("waits", f"for a value that {_MOST_WRITES} or more writes can end")
            if order is not None:
                self._timeline.end(wait, order)
            else:
                self._look(wait)

        self._timeline.submit(stream, meet)
        self._timeline.wait(stream, wait)

    def may_be_over(self, stream: TrackedStream) -> bool:
        """Whether a stream waits, directly or through other streams, for a value that the host cannot read."""
        obstacle = stream.obstacle
        while obstacle is not None and obstacle.source is not None and obstacle.source.obstacle is not None:
            obstacle = obstacle.source.obstacle
        return isinstance(obstacle, _Waiting) and obstacle.read is None

    def look(self) -> None:
        """Check the awaited values in host memory."""
        for stream in tuple(self._timeline.held):
            if isinstance(stream.obstacle, _Waiting):
                self._look(stream.obstacle)

    def _look(self, wait: _Waiting) -> None:
        if wait.read is None:
            return
        gone = wait.range is not None and wait.range.ended is not None
        if gone or wait.accepts(wait.read()):
            clock = self._timeline.host.copy()
            if wait.range is None or wait.range.bytes.shared:
                clock.learn(self._timeline.published)
                if wait.key not in self._ignored:
                    clock.learn(self._timeline.ready)
            self._timeline.end(wait, clock)
