"""What is captured from streams or put into a graph by hand: judged once by itself, and again at each launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from streamalloc.driver.checker.clocks import Clock, Stream, Timeline
from streamalloc.driver.checker.hazards import Bytes, Judge, Piece, Range, accesses
from streamalloc.driver.checker.reports import Hazard
from streamalloc.driver.checker.stacks import Stack

__all__ = ["Capture", "Graph", "Node"]


@dataclass(eq=False)
class Node:
    """What a graph does at each launch."""

    kind: str
    """``"use"``, ``"allocate"``, ``"free"`` or, what orders streams, ``"step"``."""
    what: str = ""
    stack: Stack = ()
    pieces: list[tuple[Piece, bool]] = field(default_factory=list)
    range: Range = field(default_factory=lambda: Range(0, 0, "nothing"))
    kernel: bool = False
    """Whether its uses have an order of their own."""
    handle: int = 0
    """Of the driver's node; 0 where that is not known."""
    nested: bool = False
    """Whether it is in a graph within the graph, where it has another handle."""
    enabled: bool = True
    step: Callable[[Any], object] = lambda handle: None
    """Called with the handle of the stream of a launch."""
    calls: Any = None
    """The function of the host that a step is."""


class _Inside:
    """Ranges as a graph sees them, while it is made: nobody else uses them, and streams have an order of their own."""

    def __init__(self, found: Callable[[Hazard], None]) -> None:
        self.timeline: Timeline = Timeline()
        self._judge: Judge = Judge(self.timeline, found)
        self._ranges: dict[Range, Range] = {}
        self._bytes: dict[Bytes, Bytes] = {}

    def _shadow(self, range_: Range) -> Range:
        found = self._ranges.get(range_)
        if found is None:
            found = Range(range_.base, range_.size, range_.kind, offset=range_.offset, stack=range_.stack)
            found.bytes = self._bytes.setdefault(range_.bytes, found.bytes)
            self._ranges[range_] = found
        return found

    def judge(self, stream: Stream, node: Node) -> Callable[[], None]:
        """Judge a node in a stream; returns what takes a free back."""
        self.timeline.submit(stream, lambda stream: self._judge_now(stream, node))
        return lambda: setattr(self._shadow(node.range), "ended", None)

    def _judge_now(self, stream: Stream, node: Node) -> None:
        if node.kind == "use":
            for access, (range_, low, high) in accesses(stream, node.pieces, node.what, node.stack, kernel=node.kernel):
                self._judge.use(((self._shadow(range_), low, high),), access, stream.clock)
        elif node.kind == "allocate":
            self._judge.allocate(self._shadow(node.range), stream)
        elif node.kind == "free":
            self._judge.free(self._shadow(node.range), stream, stream.clock, node.what, node.stack)


class Graph:
    """A graph: its nodes, in an order that is possible unless edges were added later."""

    def __init__(self, nodes: list[Node] | None = None) -> None:
        self.nodes: list[Node] = [] if nodes is None else nodes
        self.handles: dict[int, list[Node]] = {}
        """The nodes that were added by hand."""
        self.after: dict[int, list[int]] = {}
        """What these come after."""

    def add(self, handle: int, node: Node, after: list[int]) -> None:
        """A node was added by hand."""
        node.handle = handle
        self.nodes.append(node)
        self.handles.setdefault(handle, []).append(node)
        self.after.setdefault(handle, []).extend(after)

    def clear(self) -> None:
        """Know nothing of it any more."""
        self.nodes, self.handles, self.after = [], {}, {}

    def judge(self, found: Callable[[Hazard], None]) -> None:
        """Judge the nodes that were added by hand, in the order that their edges give."""
        self.play(_Inside(found))

    def play(self, inside: _Inside) -> dict[int, Stream]:
        """Run the nodes that were added by hand, each in a stream of its own."""
        done: dict[int, Stream] = {}
        waiting = list(self.handles)
        while waiting:
            ready = [one for one in waiting if all(it in done or it not in self.handles for it in self.after[one])]
            if not ready:
                break
            for handle in ready:
                nodes = self.handles[handle]
                stream = done[handle] = inside.timeline.stream(f"graph node {len(done) + 1} ({nodes[0].what})")
                for it in self.after[handle]:
                    if it in done:
                        stream.clock.learn(done[it].clock)
                for node in nodes:
                    inside.judge(stream, node)
            waiting = [one for one in waiting if one not in done]
        return done


class Capture:
    """A capture under way."""

    def __init__(self, found: Callable[[Hazard], None]) -> None:
        self.graph: Graph = Graph()
        self.ended = False
        self._inside = _Inside(found)
        self._streams: dict[Stream, Stream] = {}
        self._done: dict[int, Clock] = {}
        """What comes before what follows a node, by the handle of that."""

    def begin_in(self, graph: Graph, stream: Stream, after: Iterable[int]) -> None:
        """Capture into a graph, beginning after some of its nodes."""
        self.graph = graph
        done = graph.play(self._inside)
        for handle in after:
            if handle in done:
                self.join(stream, done[handle].clock)
            elif handle not in graph.handles:
                # A captured node, of which nobody knows which one it is.
                self.join_all(stream)

    def join(self, stream: Stream, clock: Clock | None = None) -> None:
        """A stream takes part, after what a captured event has recorded."""
        inside = self._streams.get(stream)
        if inside is None:
            inside = self._streams[stream] = self._inside.timeline.stream(stream.name)
        if clock is not None:
            inside.clock.learn(clock)

    def reorder(self, stream: Stream, after: list[int], anew: bool) -> None:
        """A stream is to come after some nodes, too; ``anew``: after nothing else."""
        if anew:
            # Another stream, which does not come after its own operations.
            self._streams[stream] = self._inside.timeline.stream(stream.name)
        for handle in after:
            if handle in self._done:
                self.join(stream, self._done[handle])
            else:
                self.join_all(stream)

    def join_all(self, stream: Stream) -> None:
        """A stream is to come after whatever was captured."""
        self._streams[stream].clock.learn(self._inside.timeline.everything())

    def record(self, stream: Stream) -> Clock:
        """What comes before an event."""
        inside = self._streams[stream]
        self._inside.timeline.submit(inside, lambda stream: None)
        return inside.clock.copy()

    def step(self, step: Callable[[Any], object], calls: object = None) -> Node:
        """A stream is to do something that orders streams, at each launch; ``calls``: a function of the host."""
        node = Node("step", step=step, calls=calls)
        self.graph.nodes.append(node)
        return node

    def add(self, stream: Stream, node: Node) -> Callable[[], None]:
        """Something is captured; returns what takes a free back."""
        self.graph.nodes.append(node)
        return self._inside.judge(self._streams[stream], node)

    def name(self, stream: Stream, handle: int, nodes: Iterable[Node]) -> None:
        """The latest nodes that a stream has captured are one node of the driver, with this handle."""
        for node in nodes:
            node.handle = handle
        if handle:
            self._done[handle] = self._streams[stream].clock.copy()
