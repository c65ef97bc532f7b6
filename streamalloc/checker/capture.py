"""Graphs, captured or built node by node, and the events that a capture can record.

A graph is checked once by itself, and again at each launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from streamalloc.checker.clocks import Actor, Clock, Obstacle, Timeline, TrackedStream
from streamalloc.checker.judge import Judge, RecordedEvent, Wait
from streamalloc.checker.ranges import Access, Bytes, Piece, Range
from streamalloc.driver.reports import Hazard, Stack, place_of


class Unseen(NamedTuple):
    """Memory that a kernel without declared uses, or a node of an unknown kind, may use."""

    named: frozenset[Bytes] | None
    """Memory whose addresses are arguments of the kernel; None if the arguments cannot be read."""


@dataclass(eq=False)
class TrackedNode:
    """Operation of a graph, which each launch runs."""

    kind: str
    """``"use"``, ``"allocate"``, ``"free"``, or ``"step"``: a wait, a recording or a host function, which orders
    streams.
    """
    what: str = ""
    stack: Stack = ()
    pieces: list[tuple[Piece, bool]] = field(default_factory=list)
    range: Range = field(default_factory=lambda: Range(0, 0, "nothing"))
    kernel: bool = False
    """Whether the node is a kernel. Its uses have no known order among themselves, and the driver does not check its
    access.
    """
    atomic: bool = False
    """Whether the uses of the node do not race with other atomic uses."""
    unseen: Unseen | None = None
    """Memory that the node may use without having declared it; None if all its uses are known."""
    handle: int = 0
    """Handle of the driver's node; 0 if unknown."""
    nested: bool = False
    """Whether the node belongs to a child graph, which has another handle for it."""
    enabled: bool = True
    captured: int = 0
    """Time of the captured call, see :attr:`.State.now`; 0 if unknown."""
    step: Callable[[TrackedStream], object] = lambda stream: None
    """Function that each launch of a ``"step"`` calls, with the stream of the launch."""
    calls: Any = None
    """The host function (``HostCall``) that ``step`` queues; None for a node without a host function."""

    def accesses(self, actor: Actor, stack: Stack) -> Iterator[tuple[Access, Piece]]:
        """Yield an access for each piece, as one of ``actor``, whose place in the program is ``stack``.

        A kernel has one access for all its reads and one for all its writes.
        """
        made: dict[bool, Access] = {}
        for piece, write in self.pieces:
            access = made.get(write)
            if access is None or not self.kernel:
                access = made[write] = Access(actor, self.what, stack, write, self.atomic)
            yield access, piece


class _Inside:
    """Timeline and ranges for one graph alone, to check its operations against each other."""

    def __init__(self, on_hazard: Callable[[Hazard], None]) -> None:
        self.timeline: Timeline = Timeline()
        self._judge: Judge = Judge(self.timeline, on_hazard)
        self.waited = self._judge.waited
        self._ranges: dict[Range, Range] = {}
        self._bytes: dict[Bytes, Bytes] = {}

    def _shadow(self, range_: Range) -> Range:
        found = self._ranges.get(range_)
        if found is None:
            found = Range(range_.base, range_.size, range_.kind, offset=range_.offset, stack=range_.stack)
            found.bytes = self._bytes.setdefault(range_.bytes, found.bytes)
            self._ranges[range_] = found
        return found

    def judge(self, stream: TrackedStream, node: TrackedNode) -> Callable[[], None]:
        """Check ``node`` in the order of ``stream``, a stream of this timeline. Returns a function that undoes the free
        of a free node, for a free that the driver refuses; it does nothing for other nodes.
        """
        undo: list[Callable[[], None]] = []

        def take_back() -> None:
            for step in undo:
                step()

        self.timeline.submit(stream, lambda stream: self._judge_now(stream, node, undo))
        return take_back

    def _judge_now(self, stream: TrackedStream, node: TrackedNode, undo: list[Callable[[], None]]) -> None:
        if node.kind == "use":
            for access, (range_, low, high) in node.accesses(stream, node.stack):
                self._judge.use(((self._shadow(range_), low, high),), access, stream.clock)
        elif node.kind == "allocate":
            self._judge.allocate(self._shadow(node.range), stream)
        elif node.kind == "free":
            undo.append(self._judge.free(self._shadow(node.range), stream, stream.clock, node.what, node.stack))


class TrackedGraph:
    """Graph whose nodes are in a valid order, unless a call added edges later."""

    def __init__(self, nodes: list[TrackedNode] | None = None) -> None:
        self.nodes: list[TrackedNode] = [] if nodes is None else nodes
        self.handles: dict[int, list[TrackedNode]] = {}
        """By handle of a node that a call such as ``cuGraphAddKernelNode`` added: the checker's nodes for it."""
        self.after: dict[int, list[int]] = {}
        """By handle of a node: the handles of the nodes that it depends on."""

    def add(self, handle: int, node: TrackedNode, after: list[int]) -> None:
        """Add a node of a call such as ``cuGraphAddKernelNode``.

        ``handle``: that of the driver's node. ``after``: the handles of the nodes that it depends on.
        """
        node.handle = handle
        self.nodes.append(node)
        self.handles.setdefault(handle, []).append(node)
        self.after.setdefault(handle, []).extend(after)

    def judge(self, on_hazard: Callable[[Hazard], None]) -> None:
        """Check the nodes that calls have added, in the order of their edges."""
        self.play(_Inside(on_hazard))

    def play(self, inside: _Inside) -> dict[int, TrackedStream]:
        """Run the nodes that calls have added, each in a separate stream of ``inside``.

        Returns the streams by node handle.
        """
        done: dict[int, TrackedStream] = {}
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


class TrackedCapture:
    """Capture that has not ended: its graph so far, and the order of its streams inside the graph."""

    def __init__(self, on_hazard: Callable[[Hazard], None]) -> None:
        self.graph: TrackedGraph = TrackedGraph()
        self.ended = False
        self._inside = _Inside(on_hazard)
        self._streams: dict[TrackedStream, TrackedStream] = {}
        self._done: dict[int, Clock] = {}
        """By handle of a node: the clock of its stream after it, inside the capture."""

    def begin_in(self, graph: TrackedGraph, stream: TrackedStream, after: Iterable[int]) -> None:
        """Begin a capture that adds nodes to an existing graph. ``after``: handles of nodes that come before them."""
        self.graph = graph
        done = graph.play(self._inside)
        for handle in after:
            if handle in done:
                self.join(stream, done[handle].clock)
            elif handle not in graph.handles:
                # It is unknown which captured node has this handle, so the stream comes after all nodes.
                self.join_all(stream)

    def wait(self, stream: TrackedStream, event: TrackedEvent, clock: Clock, place: Stack) -> None:
        """Order a stream after a captured event. ``clock``: that of the recording. ``place``: the place of the wait."""
        self.join(stream, clock)
        self._inside.waited(self._streams[stream], event.wait(place))

    def join(self, stream: TrackedStream, clock: Clock | None = None) -> None:
        """Add a stream to the capture, ordered after ``clock``; None: after nothing."""
        inside = self._streams.get(stream)
        if inside is None:
            inside = self._streams[stream] = self._inside.timeline.stream(stream.name)
        if clock is not None:
            inside.clock.learn(clock)

    def reorder(self, stream: TrackedStream, after: list[int], anew: bool) -> None:
        """Order a stream after the nodes with the handles ``after``. With ``anew``, it is ordered after these alone."""
        if anew:
            # A new stream in the timeline has no earlier order.
            self._streams[stream] = self._inside.timeline.stream(stream.name)
        for handle in after:
            if handle in self._done:
                self.join(stream, self._done[handle])
            else:
                self.join_all(stream)

    def join_all(self, stream: TrackedStream) -> None:
        """Order a stream after all captured operations."""
        self._streams[stream].clock.learn(self._inside.timeline.everything())

    def record(self, stream: TrackedStream, event: TrackedEvent, place: Stack) -> Clock:
        """Record an event in a captured stream. Returns the clock of the recording inside the capture."""
        inside = self._streams[stream]
        mark = self._inside.timeline.record(inside)
        event.note(inside, mark, place)
        assert mark.clock is not None
        return mark.clock

    def step(self, step: Callable[[TrackedStream], object], calls: object = None) -> TrackedNode:
        """Add an operation that orders streams: each launch calls ``step``.

        ``calls``: the host function that it queues.
        """
        node = TrackedNode("step", step=step, calls=calls)
        self.graph.nodes.append(node)
        return node

    def add(self, stream: TrackedStream, node: TrackedNode) -> Callable[[], None]:
        """Add a captured node. The returned function undoes a free that the driver refuses."""
        self.graph.nodes.append(node)
        return self._inside.judge(self._streams[stream], node)

    def name(self, stream: TrackedStream, handle: int, nodes: Iterable[TrackedNode]) -> None:
        """Set the driver's handle of the nodes that a call has just added; 0 if it is unknown.

        Work that later depends on that handle is ordered after all that the stream has done by now.
        """
        for node in nodes:
            node.handle = handle
        if handle:
            self._done[handle] = self._streams[stream].clock.copy()


_RECORDINGS = 4
"""Reports can name at most this many recordings of an event, the latest ones."""


@dataclass(eq=False, slots=True)
class TrackedEvent:
    """Event with its latest recording, and what reports say of its recordings and waits."""

    shared: bool = False
    """Whether the event is an interprocess event."""
    foreign: bool = False
    """Whether another library has the event and may record it."""
    mark: Obstacle | None = None
    """End of the recorded work; None if no recording was seen."""
    captured: tuple[TrackedCapture, Clock] | None = None
    """The capture with the latest recording, and the recording's clock there; None if it was not captured."""
    elsewhere: bool = False
    """Whether another process has the event and may record it."""
    index: int | None = None
    """Index of the event's entry on this process's board; None if the event is not on the board."""
    name: bytes = b""
    """Export data; the event's name on boards of other processes."""
    made: Stack = ()
    """Place in the program where the event was created."""
    recordings: deque[RecordedEvent] = field(default_factory=lambda: deque(maxlen=_RECORDINGS))
    """The last recording, and earlier ones that no stream or thread has waited for."""
    awaited: bool = False
    """Whether a stream or thread has waited for the last recording."""

    def note(self, stream: TrackedStream, mark: Obstacle, place: Stack) -> None:
        """Note a recording and its place in the program, for reports."""
        if self.awaited:
            self.recordings.clear()
        self.awaited = False
        self.recordings.append(RecordedEvent(stream, mark, place))

    def wait(self, place: Stack) -> Wait:
        """Note a wait for the event at ``place``, and describe it for reports."""
        self.awaited = True
        return Wait(place_of(self.made), tuple(self.recordings), place)
