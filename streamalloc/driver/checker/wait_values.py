"""Words in memory that streams write and wait for."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from streamalloc.driver.checker.clocks import Clock, Obstacle, Stream, Timeline
from streamalloc.driver.checker.hazards import Addresses, Bytes, Range

__all__ = ["WaitValues"]

_COMPARISONS: dict[int, Callable[[int, int, int], bool]] = {
    0: lambda word, value, bits: (word - value) % (1 << bits) < 1 << (bits - 1),  # GEQ, cyclic
    1: lambda word, value, bits: word == value,
    2: lambda word, value, bits: word & value != 0,
    3: lambda word, value, bits: ~(word | value) % (1 << bits) != 0,
}
_TYPES: dict[int, Any] = {32: ctypes.c_uint32, 64: ctypes.c_uint64}
_WRITES_KEPT, _WORDS_KEPT = 16, 10_000

_Key = tuple[Bytes | None, int]


class _Waiting(Obstacle):
    """A stream waits for a value of a word."""

    __slots__ = ("accepts", "key", "range", "read")

    def __init__(self, key: _Key, range_: Range | None, accepts: Callable[[int], bool]) -> None:
        super().__init__()
        self.key = key
        self.range = range_
        self.accepts = accepts
        self.read: Callable[[], int] | None = None
        """Reads the word, where the host can."""


class WaitValues:
    """The latest values of words, as far as they are known, and who waits for which.

    A word that something else has written, such as a kernel, holds who waits for it until the host sees that stream
    come on; then all that was queued before counts as ordered.
    """

    def __init__(self, timeline: Timeline, addresses: Addresses, on_host: Callable[[int], bool]) -> None:
        self._timeline = timeline
        self._addresses = addresses
        self._on_host = on_host
        """Whether the host can read unknown memory."""
        self._writes: dict[_Key, list[tuple[int, Clock]]] = {}
        self.published: Clock = Clock()
        """All that comes before something that other processes can wait for."""
        self.ready: Clock = Clock()
        """All that other processes have told by words of the library."""
        self._known: set[_Key] = set()

    def _key(self, address: int) -> tuple[_Key, Range | None]:
        pieces = self._addresses.pieces(address, 4)
        places = pieces[0][0].physical(*pieces[0][1:]) if pieces else []
        return (places[0][0], places[0][1]) if places else (None, address), pieces[0][0] if pieces else None

    def know(self, address: int) -> None:
        """What a word tells is known otherwise."""
        self._known.add(self._key(address)[0])

    def write(self, stream: Stream, address: int, value: int) -> None:
        """A stream is to write a word, after all that it has queued."""
        key, range_ = self._key(address)
        shared = range_ is None or range_.bytes.shared

        def write(stream: Stream) -> None:
            writes = self._writes.setdefault(key, [])
            writes.append((value, stream.clock.copy()))
            del writes[:-_WRITES_KEPT]
            if len(self._writes) > _WORDS_KEPT:
                del self._writes[next(iter(self._writes))]
            if shared:
                self.published.learn(stream.clock)
            for held in tuple(self._timeline.held):
                word = held.obstacle
                if isinstance(word, _Waiting) and word.key == key and word.accepts(value):
                    self._timeline.end(word, stream.clock)

        self._timeline.submit(stream, write)

    def wait(self, stream: Stream, address: int, value: int, flag: int, bits: int) -> None:
        """A stream is to wait for a value of a word."""
        key, range_ = self._key(address)
        compare = _COMPARISONS[flag & 3]
        word = _Waiting(key, range_, lambda there: compare(there, value, bits))
        if self._on_host(address) if range_ is None else range_.kind in ("pinned memory", "registered memory"):
            # Of other memory than that of devices nobody tells us who writes it.
            word.read = lambda: int(_TYPES[bits].from_address(address).value)

        def meet(stream: Stream) -> None:
            order: Clock | None = None
            for written, clock in reversed(self._writes.get(key, ())):
                if not word.accepts(written):
                    break
                # Any of these may be what the stream sees.
                order = clock if order is None else order.common(clock)
            if order is not None:
                self._timeline.end(word, order)
            else:
                self._look(word)

        self._timeline.submit(stream, meet)
        self._timeline.wait(stream, word)

    def may_be_over(self, stream: Stream) -> bool:
        """Whether what a stream waits for in the end is a word that the host cannot read."""
        obstacle = stream.obstacle
        while obstacle is not None and obstacle.source is not None and obstacle.source.obstacle is not None:
            obstacle = obstacle.source.obstacle
        return isinstance(obstacle, _Waiting) and obstacle.read is None

    def look(self) -> None:
        """See which words that streams wait for the host or another process has written meanwhile."""
        for stream in tuple(self._timeline.held):
            if isinstance(stream.obstacle, _Waiting):
                self._look(stream.obstacle)

    def _look(self, word: _Waiting) -> None:
        if word.read is None:
            return
        gone = word.range is not None and word.range.ended is not None
        if gone or word.accepts(word.read()):
            clock = self._timeline.host.copy()
            if word.range is None or word.range.bytes.shared:
                clock.learn(self.published)
                if word.key not in self._known:
                    clock.learn(self.ready)
            self._timeline.end(word, clock)
