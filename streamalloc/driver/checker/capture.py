"""What is captured from streams: judged once by itself, and again at each launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from streamalloc.driver.checker.clocks import Clock, Stream, Timeline
from streamalloc.driver.checker.hazards import Access, Bytes, Judge, Moment, Piece, Range
from streamalloc.driver.checker.reports import Hazard
from streamalloc.driver.checker.stacks import Stack

__all__ = ["Capture", "Node"]


@dataclass
class Node:
    """What a graph does at each launch."""

    kind: str
    """``"use"``, ``"allocate"`` or ``"free"``."""
    what: str = ""
    stack: Stack = ()
    pieces: list[tuple[Piece, bool]] = field(default_factory=list)
    range: Range = field(default_factory=lambda: Range(0, 0, "nothing"))


class Capture:
    """A capture under way. Inside, its streams have an order of their own."""

    def __init__(self, found: Callable[[Hazard], None]) -> None:
        self.nodes: list[Node] = []
        self.ended = False
        self._timeline: Timeline = Timeline()
        self._judge: Judge = Judge(self._timeline, found)
        self._streams: dict[Stream, Stream] = {}
        self._ranges: dict[Range, Range] = {}
        self._bytes: dict[Bytes, Bytes] = {}

    def join(self, stream: Stream, clock: Clock | None = None) -> None:
        """A stream takes part, after what a captured event has recorded."""
        inside = self._streams.get(stream)
        if inside is None:
            inside = self._streams[stream] = self._timeline.stream(stream.name)
        if clock is not None:
            inside.clock.learn(clock)

    def record(self, stream: Stream) -> Clock:
        """What comes before an event."""
        inside = self._streams[stream]
        self._timeline.submit(inside, lambda stream: None)
        return inside.clock.copy()

    def use(self, stream: Stream, pieces: list[tuple[Piece, bool]], what: str, stack: Stack) -> None:
        """A stream is to read and write memory."""
        self.nodes.append(Node("use", what, stack, pieces))
        inside = self._streams[stream]

        def touch(inside: Stream) -> None:
            for (range_, low, high), write in pieces:
                access = Access(inside, what, stack, write)
                self._judge.use(((self._shadow(range_), low, high),), access, inside.clock)

        self._timeline.submit(inside, touch)

    def _shadow(self, range_: Range) -> Range:
        found = self._ranges.get(range_)
        if found is None:
            found = Range(range_.base, range_.size, range_.kind, offset=range_.offset, stack=range_.stack)
            found.bytes = self._bytes.setdefault(range_.bytes, found.bytes)
            self._ranges[range_] = found
        return found

    def allocate(self, stream: Stream, made: Range) -> None:
        """A stream is to allocate memory, which the graph owns."""
        self.nodes.append(Node("allocate", stack=made.stack, range=made))
        inside = self._streams[stream]
        shadow = self._shadow(made)
        self._timeline.submit(inside, lambda inside: self._judge.allocate(shadow, inside))
        made.born = Moment(stream, "allocation at a launch of its graph", made.stack)

    def free(self, stream: Stream, range_: Range, what: str, stack: Stack) -> Callable[[], None]:
        """A stream is to free memory; returns what takes that back."""
        node = Node("free", what, stack, range=range_)
        self.nodes.append(node)
        inside = self._streams[stream]
        shadow = self._shadow(range_)
        self._timeline.submit(inside, lambda inside: self._judge.free(shadow, inside, inside.clock, what, stack))

        def undo() -> None:
            self.nodes.remove(node)
            shadow.ended = None

        return undo
