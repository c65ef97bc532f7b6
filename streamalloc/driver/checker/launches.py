"""Host functions that streams call, and launches of graphs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from streamalloc.driver.checker.capture import Graph, Node
from streamalloc.driver.checker.clocks import Actor, Obstacle, Stream, Timeline
from streamalloc.driver.checker.ranges import Bytes
from streamalloc.driver.checker.reports import Hazard
from streamalloc.driver.checker.stacks import Launched, Stack
from streamalloc.driver.checker.streams import number_of
from streamalloc.driver.checker.uses import Uses


class HostCall:
    """A host function that a stream calls: once, or at each launch of a graph."""

    __slots__ = ("_queued", "_running", "_stream", "_thread", "_timeline", "cancelled", "node", "stays")

    def __init__(
        self, timeline: Timeline, stream: Callable[[Any], Stream], thread: Callable[[], Actor], stays: bool = False
    ) -> None:
        self._timeline = timeline
        self._stream = stream
        """Finds the stream of a handle."""
        self._thread = thread
        """Finds the calling host thread."""
        self._queued: deque[tuple[Stream, Obstacle, Obstacle]] = deque()
        """Stream, end of the work before, and end of the call itself, for each queued call."""
        self._running: list[Obstacle] = []
        self.node: Node | None = None
        """Node of a capture."""
        self.stays: bool = stays
        """Whether a graph has it, which may be launched again."""
        self.cancelled: bool = False

    def queue(self, handle: Any) -> None:
        """Queue a call in a stream."""
        if self.cancelled:
            return
        timeline, stream = self._timeline, self._stream(handle)
        before, ended = timeline.record(stream), Obstacle()
        timeline.wait(stream, ended)
        self._queued.append((stream, before, ended))

    def begins(self) -> None:
        """Begin the oldest queued call: the earlier work of its stream has ended."""
        timeline = self._timeline
        if not self._queued:
            # Another library has launched the graph.
            timeline.host_observes(timeline.everything())
            return
        stream, before, ended = self._queued.popleft()
        self._running.append(ended)
        self._thread().within = stream
        timeline.force_mark(before)
        if before.clock is not None:
            timeline.host_observes(before.clock)

    def ends(self) -> None:
        """End the running call."""
        if self._running:
            self._timeline.end(self._running.pop(0), self._timeline.host)
        self._thread().within = None

    def refused(self) -> None:
        """Undo the queueing where the driver has refused it."""
        if self.stays:
            self.cancelled = True
        else:
            self.skip()

    def skip(self) -> None:
        """Remove the latest queued call."""
        if self._queued:
            self._timeline.end(self._queued.pop()[2], self._timeline.host)


class Launches(Uses):
    """The graphs of a driver, and their launches."""

    def __init__(self, driver: Any, found: Callable[[Hazard], None]) -> None:
        super().__init__(driver, found)
        self.graphs: dict[int, Graph] = {}
        self.executables: dict[int, list[Node]] = {}
        self.launched: dict[int, Obstacle] = {}
        """End of the latest launch of each executable graph."""
        self.host_calls: dict[int, HostCall] = {}
        """Host functions by the pointer that the driver has."""

    def host_call(self, stays: bool) -> HostCall:
        """A new host function; ``stays``: a graph has it."""
        return HostCall(self.timeline, self.stream, self.thread, stays)

    def host_function(self, handle: Any) -> HostCall:
        """Queue a call of a host function in a stream; a captured stream calls it at each launch."""
        capture = self.capture_of(self.stream(handle))
        made = self.host_call(stays=capture is not None)
        if capture is None:
            made.queue(handle)
        else:
            made.node = capture.step(made.queue, made)
        return made

    def graph(self, handle: Any) -> Graph:
        """The graph of a handle."""
        return self.graphs.setdefault(number_of(handle), Graph())

    def launch(self, executable: int, handle: Any, stack: Stack) -> None:
        """Queue a launch of a graph, which runs after earlier launches of the same."""
        stream = self.stream(handle)
        nodes = self.executables.get(executable, [])
        capture = self.capture_of(stream)
        if capture is not None:
            copies = [replace(node, handle=0) for node in nodes]
            for node in copies:
                capture.add(stream, node)
            self.name(handle, *copies)
            return
        before = self.launched.get(executable)
        if before is not None:
            self.timeline.wait(stream, before)
        used = [one for node in nodes if node.enabled for one in node.pieces]
        self._prepare(used)
        together: list[Node] = []
        for node in nodes:
            if node.kind == "step":
                self._run(stream, together, stack)
                together = []
                node.step(handle)
                continue
            together.append(node)
            if node.kind == "allocate":
                if self.addresses.find(node.range.base) is not node.range:
                    self.addresses.add(node.range)
            elif any(piece[0].kind == "mapping" and piece[0].ended for piece, _ in node.pieces):
                # The graph uses the memory that is mapped there now.
                node.pieces = self._pieces((low, high - low, write) for (_, low, high), write in node.pieces)
        self._run(stream, together, stack)
        if stream.obstacle is not None:
            for (range_, _, _), write in used:
                range_.held_write |= write
        elif not any(node.kind == "step" for node in nodes):
            self.sources.add(stream, used, "cuGraphLaunch", stack)
        self.launched[executable] = self.timeline.record(stream)

    def _run(self, stream: Stream, nodes: list[Node], stack: Stack) -> None:
        def run(stream: Stream) -> None:
            device = self.devices.get(stream)
            for node in nodes:
                self.timeline.next(stream)
                if not node.enabled:
                    continue
                launched = Launched(node.stack, stack)
                if node.kind == "use":
                    self.touch(stream, node.pieces, node.what, launched, kernel=node.kernel, device=device)
                elif node.kind == "free":
                    self.judge.free(node.range, stream, stream.clock, node.what, launched)
                else:
                    made = node.range
                    if not made.pending and made.ended is None:
                        # The graph was instantiated with a free at each launch.
                        self.judge.free(made, stream, stream.clock, "cuGraphLaunch", stack)
                    made.ended = None
                    made.last.clear()
                    made.bytes = Bytes()
                    self.judge.allocate(made, stream)

        self.timeline.submit(stream, run)
