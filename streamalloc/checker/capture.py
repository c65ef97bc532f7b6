"""Graphs, captured or built node by node, and the events that a capture can record.

The operations of a graph are checked against each other during its capture; those of a built graph when it is
instantiated or added to another graph. Each launch is checked against the work outside of the graph.
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
    """Memory that a node of a graph may use without having declared the use. The node is a kernel without declared
    uses, or a node of an unknown kind.
    """

    named: frozenset[Bytes] | None
    """Memory whose addresses are among the kernel's arguments; None if the arguments cannot be read."""


@dataclass(eq=False)
class TrackedNode:
    """Operation that uses memory or orders streams. If it is the node of a graph, every launch runs it while it is
    enabled.
    """

    kind: str
    """``"use"``, ``"allocate"``, ``"free"`` or ``"step"``. A ``"step"`` orders streams: a wait, the record of an event,
    or a host function.
    """
    what: str = ""
    stack: Stack = ()
    pieces: list[tuple[Piece, bool]] = field(default_factory=list)
    range: Range = field(default_factory=lambda: Range(0, 0, "nothing"))
    kernel: bool = False
    """Whether the node is a kernel. The uses of a kernel have no known order among themselves, and the driver does not
    check a kernel's access rights.
    """
    atomic: bool = False
    """Whether the uses of the node are atomic, so that they do not race with other atomic uses."""
    unseen: Unseen | None = None
    """Memory that the node may use without having declared the use; None if all uses of the node are known."""
    handle: int = 0
    """Handle of the driver's node; 0 if unknown."""
    nested: bool = False
    """Whether the node belongs to a child graph, in which it has another handle."""
    enabled: bool = True
    captured: int = 0
    """Time of the call that captured the node, see :attr:`.State.now`; 0 if unknown."""
    step: Callable[[TrackedStream], object] = lambda stream: None
    """Function that each launch of a ``"step"`` calls, with the stream of the launch."""
    calls: Any = None
    """The host function (``HostCall``) that the node runs; None for a node without a host function."""

    def accesses(self, actor: Actor, stack: Stack) -> Iterator[tuple[Access, Piece]]:
        """Yield tuples of access and piece, one for each piece that the node uses. ``actor``: who makes the access;
        ``stack``: place in the program.

        A kernel has one access for all its reads and one for all its writes.
        """
        made: dict[bool, Access] = {}
        for piece, write in self.pieces:
            access = made.get(write)
            if access is None or not self.kernel:
                access = made[write] = Access(actor, self.what, stack, write, self.atomic)
            yield access, piece


class _Inside:
    """Separate timeline with copies of ranges. In it the operations of one graph are checked against each other,
    without the operations outside of the graph.
    """

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
        """Check ``node`` as the next operation of ``stream``, a stream of this timeline. Returns a function that undoes
        the free of a free node, if the driver refuses the node; for other nodes the function does nothing.
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
                self._judge.use((self._shadow(range_), low, high), access, stream.clock)
        elif node.kind == "allocate":
            self._judge.allocate(self._shadow(node.range), stream)
        elif node.kind == "free":
            undo.append(self._judge.free(self._shadow(node.range), stream, stream.clock, node.what, node.stack))


class TrackedGraph:
    """Graph with its nodes. The nodes are in a valid order, unless a call has added edges later."""

    def __init__(self, nodes: list[TrackedNode] | None = None) -> None:
        self.nodes: list[TrackedNode] = [] if nodes is None else nodes
        self.handles: dict[int, list[TrackedNode]] = {}
        """The checker's nodes, by the handle of the driver's node that a call such as ``cuGraphAddKernelNode`` has
        added.
        """
        self.after: dict[int, list[int]] = {}
        """Handles of the nodes on which a node depends, by the handle of the node."""

    def add(self, handle: int, node: TrackedNode, after: list[int]) -> None:
        """Add a node that a call such as ``cuGraphAddKernelNode`` has added.

        ``handle``: handle of the driver's node. ``after``: handles of the nodes that it depends on.
        """
        node.handle = handle
        self.nodes.append(node)
        self.handles.setdefault(handle, []).append(node)
        self.after.setdefault(handle, []).extend(after)

    def remove(self, handle: int) -> None:
        """Remove the node with this handle, and its edges: the driver may give the handle to a new node."""
        self.nodes = [one for one in self.nodes if one.handle != handle]
        self.handles.pop(handle, None)
        self.after.pop(handle, None)
        for before in self.after.values():
            before[:] = [one for one in before if one != handle]

    def judge(self, on_hazard: Callable[[Hazard], None]) -> None:
        """Check the nodes that calls have added against each other, in the order of their edges. ``on_hazard`` is
        called with each hazard.
        """
        self.play(_Inside(on_hazard))

    def play(self, inside: _Inside) -> dict[int, TrackedStream]:
        """Check the nodes that calls have added, in the order of their edges. The nodes of each handle run in a
        separate stream of ``inside``.

        Returns these streams by the handles of the nodes.
        """
        done: dict[int, TrackedStream] = {}
        left = list(self.handles)
        while left:
            ready = [one for one in left if all(it in done or it not in self.handles for it in self.after[one])]
            if not ready:
                break  # A cycle, which would never become ready. The driver refuses its instantiation.
            for handle in ready:
                nodes = self.handles[handle]
                stream = done[handle] = inside.timeline.stream(f"graph node {len(done) + 1} ({nodes[0].what})")
                for it in self.after[handle]:
                    if it in done:
                        stream.clock.learn(done[it].clock)
                for node in nodes:
                    inside.judge(stream, node)
            left = [one for one in left if one not in done]
        return done


class TrackedCapture:
    """Stream capture, with its graph so far, and the order of its streams inside the graph."""

    def __init__(self, on_hazard: Callable[[Hazard], None]) -> None:
        self.graph: TrackedGraph = TrackedGraph()
        self.ended = False
        self._inside = _Inside(on_hazard)
        self._streams: dict[TrackedStream, TrackedStream] = {}
        self._done: dict[int, Clock] = {}
        """Clock of the stream after a captured node, by the handle of the node. The clock belongs to the timeline
        inside the capture.
        """

    def begin_in(self, graph: TrackedGraph, stream: TrackedStream, after: Iterable[int]) -> None:
        """Have the capture of ``stream`` add its nodes to ``graph`` (``cuStreamBeginCaptureToGraph``). ``stream`` must
        have joined this capture. ``after``: handles of the nodes that the captured nodes depend on. A handle of an
        unknown node stands for all nodes of the graph.
        """
        self.graph = graph
        done = graph.play(self._inside)
        for handle in after:
            if handle in done:
                self.join(stream, done[handle].clock)
            elif handle not in graph.handles:
                # The captured node with this handle is unknown, so the stream is ordered after all nodes.
                self.join_all(stream)

    def wait(self, stream: TrackedStream, event: TrackedEvent, clock: Clock, place: Stack) -> None:
        """Add a stream to the capture, and order it after an event that was recorded in the capture. ``clock``: clock
        of the record. ``place``: place of the wait in the program.
        """
        self.join(stream, clock)
        self._inside.waited(self._streams[stream], event.wait(place))

    def join(self, stream: TrackedStream, clock: Clock | None = None) -> None:
        """Add a stream to the capture, unless it is there, and order it after the operations in ``clock``; None: after
        none.
        """
        inside = self._streams.get(stream)
        if inside is None:
            inside = self._streams[stream] = self._inside.timeline.stream(stream.name)
        if clock is not None:
            inside.clock.learn(clock)

    def reorder(self, stream: TrackedStream, after: list[int], anew: bool) -> None:
        """Order a stream after the nodes with the handles ``after`` (``cuStreamUpdateCaptureDependencies``). A handle
        of an unknown node stands for all operations captured so far. ``anew``: whether the stream's earlier order is
        dropped.
        """
        if anew:
            # A new stream of the timeline has no earlier order. So with ``anew`` it replaces the old stream.
            self._streams[stream] = self._inside.timeline.stream(stream.name)
        for handle in after:
            if handle in self._done:
                self.join(stream, self._done[handle])
            else:
                self.join_all(stream)

    def join_all(self, stream: TrackedStream) -> None:
        """Order a stream after all operations captured so far."""
        self._streams[stream].clock.learn(self._inside.timeline.everything())

    def record(self, stream: TrackedStream, event: TrackedEvent, place: Stack) -> Clock:
        """Record an event in a captured stream. Returns the clock of the record inside the capture."""
        inside = self._streams[stream]
        mark = self._inside.timeline.record(inside)
        event.note(inside, mark, place)
        assert mark.clock is not None
        return mark.clock

    def step(self, step: Callable[[TrackedStream], object], calls: object = None) -> TrackedNode:
        """Add an operation that orders streams: each launch calls ``step``.

        ``calls``: the host function that the operation runs; None if it runs none.
        """
        node = TrackedNode("step", step=step, calls=calls)
        self.graph.nodes.append(node)
        return node

    def add(self, stream: TrackedStream, node: TrackedNode) -> Callable[[], None]:
        """Add a captured node. Returns a function that undoes the free of a free node, if the driver refuses the
        node.
        """
        self.graph.nodes.append(node)
        return self._inside.judge(self._streams[stream], node)

    def name(self, stream: TrackedStream, handle: int, nodes: Iterable[TrackedNode]) -> None:
        """Set the driver's handle of the nodes that a call has just added; 0 if it is unknown.

        Work that later depends on this handle is ordered after all operations of ``stream`` so far.
        """
        for node in nodes:
            node.handle = handle
        if handle:
            self._done[handle] = self._streams[stream].clock.copy()


_RECORDINGS = 4
"""Largest number of records of an event that reports can name; older ones are dropped."""


@dataclass(eq=False, slots=True)
class TrackedEvent:
    """Event with its latest record, and the places of records and waits for reports."""

    shared: bool = False
    """Whether the event is an interprocess event."""
    foreign: bool = False
    """Whether another library has the event, and may record it by calls that the checker does not record."""
    mark: Obstacle | None = None
    """Obstacle that ends with the recorded work; None if no record is known to the checker, or the latest record is in
    a capture.
    """
    captured: tuple[TrackedCapture, Clock] | None = None
    """The capture with the latest record, and the clock of the record in it; None if the latest record is not in a
    capture.
    """
    elsewhere: bool = False
    """Whether another process has the event and may record it."""
    index: int | None = None
    """Index of the event's entry on this process's board (:mod:`.interprocess`); None if the event has none."""
    name: bytes = b""
    """Export data of the event, by which it is found on boards of other processes; empty if it is not exported."""
    made: Stack = ()
    """Place in the program where the event was created."""
    recordings: deque[RecordedEvent] = field(default_factory=lambda: deque(maxlen=_RECORDINGS))
    """The last record, and earlier records that no stream or thread has waited for."""
    awaited: bool = False
    """Whether a stream or thread has waited for the last record."""

    def note(self, stream: TrackedStream, mark: Obstacle, place: Stack) -> None:
        """Store a record of the event and the record's place in the program, for reports. ``mark``: obstacle that ends
        with the recorded work.
        """
        if self.awaited:
            self.recordings.clear()
        self.awaited = False
        self.recordings.append(RecordedEvent(stream, mark, place))

    def wait(self, place: Stack) -> Wait:
        """Record that a stream or thread waits for the event. ``place``: place of the wait in the program. Returns a
        description of this wait for reports.
        """
        self.awaited = True
        return Wait(place_of(self.made), tuple(self.recordings), place)
