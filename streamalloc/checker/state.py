"""The recorded state of a driver: events, values and memory. Base classes add graphs, uses of memory, and streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

from streamalloc.checker.capture import Capture, Event, Graph, Node
from streamalloc.checker.clocks import Actor, Obstacle, Stream
from streamalloc.checker.contents import HOST_KINDS
from streamalloc.checker.open_files import OpenFiles
from streamalloc.checker.ranges import NEVER, Access, Binding, Bytes, Moment, Range, size_text
from streamalloc.checker.streams import Streams
from streamalloc.checker.uses import Finish, UsedMemory, nothing
from streamalloc.driver.account import HandleCounts
from streamalloc.driver.bindings import number_of
from streamalloc.driver.reports import Hazard, Launched, Stack, here

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class HostCall:
    """A host function in a stream, called once or at each launch of a graph."""

    _streams: Streams
    stays: bool
    """Whether a graph contains it, so that it may be called again."""
    node: Node | None = None
    """Node of a capture."""
    cancelled: bool = False
    _queued: deque[tuple[Stream, Obstacle, Obstacle]] = field(default_factory=deque)
    """Queued calls: stream, end of the preceding work, and end of the call."""
    _running: list[Obstacle] = field(default_factory=list)

    def queue(self, stream: Stream) -> None:
        """Queue a call in a stream."""
        if self.cancelled:
            return
        timeline = self._streams.timeline
        before, ended = timeline.record(stream), Obstacle()
        timeline.wait(stream, ended)
        self._queued.append((stream, before, ended))

    def begins(self) -> None:
        """Begin the oldest queued call. The earlier work of its stream has ended."""
        timeline = self._streams.timeline
        if not self._queued:
            # Another library has launched the graph.
            timeline.notes.add("waits", "a graph that another library launched")
            timeline.host_observes(timeline.everything())
            return
        stream, before, ended = self._queued.popleft()
        self._running.append(ended)
        self._streams.thread().within = stream
        timeline.force_mark(before)
        if before.clock is not None:
            timeline.host_observes(before.clock)

    def ends(self) -> None:
        """End the running call."""
        if self._running:
            self._streams.timeline.end(self._running.pop(0), self._streams.timeline.host)
        self._streams.thread().within = None

    def refused(self) -> None:
        """Undo the queueing, because the driver refused the call."""
        if self.stays:
            self.cancelled = True
        else:
            self.skip()

    def skip(self) -> None:
        """Cancel the latest queued call, because the driver refused it or its launch."""
        if self._queued:
            self._streams.timeline.end(self._queued.pop()[2], self._streams.timeline.host)


OPENED = "memory of another process"
"""Kind of a range from ``cuIpcOpenMemHandle``."""
_LEAKS = {
    "allocation": ("freed", "free it before the end: buffer.free(), or cuMemFreeAsync."),
    "import": ("closed", "close it in this process before the end: the opened buffer's close(), or cuMemFreeAsync."),
    OPENED: ("closed", "close it in this process before the end: the opened buffer's close(), or cuIpcCloseMemHandle."),
    "device memory": ("freed", "free it before the end: cuMemFree."),
    "pinned memory": ("freed", "free it before the end: cuMemFreeHost."),
    "array": ("destroyed", "destroy it before the end: cuArrayDestroy."),
    "mapping": ("unmapped", "close it before the end, or call cuMemUnmap and then cuMemRelease."),
    "physical memory": ("released", "close it before the end, or call cuMemRelease."),
}
"""The missing end and the advice for leaks of each kind."""
_ARRAYS = 1 << 64
"""First of the artificial addresses for arrays, beyond those of memory."""
_KEEP_ADDRESSES = ("allocation", "import", "mapping", "array")
"""Kinds whose addresses stay reserved after a free."""


@dataclass(eq=False)
class Array(Range):
    """An array, at addresses that no memory has."""

    pitch: int = 0
    lines: int = 1
    """Rows of a plane."""
    element: int = 1
    """Bytes of an element."""


@dataclass(eq=False)
class Physical:
    """Physical memory, or a multicast object, with its mappings."""

    size: int
    stack: Stack
    device: int | None = None
    bytes: Bytes = field(default_factory=Bytes)
    bindings: list[Binding] | None = None
    """Bound bytes of a multicast object; None for other memory."""
    mappings: list[Range] = field(default_factory=list)
    kind: ClassVar[str] = "physical memory"
    base: ClassVar[int] = 0

    def __str__(self) -> str:
        return f"{self.kind} of {size_text(self.size)}"


@dataclass(eq=False)
class Executable:
    """An executable graph."""

    nodes: list[Node]
    launched: Obstacle | None = None
    """End of the latest launch."""


class State(UsedMemory):
    """All state known from calls, guarded by the lock of its owner."""

    def __init__(self, driver: Any, on_hazard: Callable[[Hazard], None]) -> None:
        super().__init__(driver, on_hazard)
        self.graphs: dict[int, Graph] = {}
        self.executables: dict[int, Executable] = {}
        self.host_calls: dict[int, HostCall] = {}
        """Host functions by the pointer passed to the driver."""
        self.account: HandleCounts = HandleCounts()
        self.physical: dict[int, Physical] = {}
        self.arrays: dict[int, Array] = {}
        self.variables: dict[int, list[Range]] = {}
        """Variables by the handle of their module."""
        self.mipmapped: dict[int, tuple[Any, dict[int, None]]] = {}
        """Descriptor and known levels' handles of each mipmapped array."""
        self.array_end: int = _ARRAYS
        self.primary: dict[int, int] = {}
        """Primary context by device."""
        self._access: dict[int, dict[int, int]] = {}
        """Access of devices to the plain memory of each context."""
        self.pools: dict[int, dict[int, int] | None] = {}
        """Access of devices by pool handle; None: all have access."""
        self.host_pools: set[int] = set()
        """Pools of host memory."""
        self.current_pools: dict[int, int] = {}
        self.files: OpenFiles[Physical] = OpenFiles(self.notes)
        """Exported and imported physical memory, by open file."""

    # -- graphs and their launches -----------------------------------------------------------------------------

    def host_function(self, stream: Stream) -> HostCall:
        """Queue a call of a host function in a stream. If the stream is captured, each launch calls it."""
        capture = self.capture_of(stream)
        made = HostCall(self, stays=capture is not None)
        if capture is None:
            made.queue(stream)
        else:
            made.node = capture.step(made.queue, made)
        return made

    def graph(self, handle: Any) -> Graph:
        """The graph of a handle."""
        return self._built(self.graphs, number_of(handle), Graph)

    def executable(self, handle: Any) -> Executable:
        """The executable graph of a handle."""
        return self._built(self.executables, number_of(handle), partial(Executable, []))

    def _built(self, known: dict[int, T], number: int, make: Callable[[], T]) -> T:
        found = known.get(number)
        if found is None:
            found = known[number] = make()
            self.notes.add("graphs")
        return found

    def launch(self, executable: Executable, stream: Stream, stack: Stack) -> None:
        """Queue a launch of a graph. It runs after earlier launches of the same graph."""
        nodes, capture = executable.nodes, self.capture_of(stream)
        if capture is not None:
            copies = [replace(node, handle=0) for node in nodes]
            for node in copies:
                capture.add(stream, node)
            self.name(stream, *copies)
            return
        if executable.launched is not None:
            self.timeline.wait(stream, executable.launched)
        used = [one for node in nodes if node.enabled for one in node.pieces]
        self._prepare(used)
        together: list[Node] = []
        for node in nodes:
            if node.kind == "step":
                self._run(stream, together, stack)
                together = []
                node.step(stream)
                continue
            together.append(node)
            if node.kind == "allocate":
                if self.addresses.find(node.range.base) is not node.range:
                    self.addresses.add(node.range)
            elif any(piece[0].kind == "mapping" and piece[0].ended for piece, _ in node.pieces):
                # The addresses may be mapped differently since the capture: the launch uses the present mapping.
                node.pieces = self._pieces((low, high - low, write) for (_, low, high), write in node.pieces)
        self._run(stream, together, stack)
        if not any(node.kind == "step" for node in nodes):
            followed = self.sources.followed(used)
            written = [one for one in followed if one[1]]
            for node in nodes if len(written) < len(followed) else ():
                if node.enabled:
                    reads = [one for one in node.pieces if not one[1]]
                    self.sources.add(stream, reads + written, node.what, Launched(node.stack, stack))
        executable.launched = self.timeline.record(stream)

    def _run(self, stream: Stream, nodes: list[Node], stack: Stack) -> None:
        def run(stream: Stream) -> None:
            for node in nodes:
                self.timeline.next(stream)
                if not node.enabled:
                    continue
                launched = Launched(node.stack, stack)
                if node.kind == "use":
                    self.touch(stream, node, launched)
                    self._may_write(stream, node)
                elif node.kind == "free":
                    self.judge.free(node.range, stream, stream.clock, node.what, launched)
                else:
                    made = node.range
                    if not made.pending and made.ended is None:
                        # The graph was instantiated with automatic frees at each launch.
                        self.judge.free(made, stream, stream.clock, "cuGraphLaunch", stack)
                    made.ended = None
                    made.last.clear()
                    made.bytes = Bytes()
                    self.judge.allocate(made, stream)

        self.timeline.submit(stream, run)
        for node in nodes:
            if node.enabled:
                self.held(stream, node, Launched(node.stack, stack))

    # -- events ------------------------------------------------------------------------------------------------

    def event(self, handle: Any) -> Event:
        """The event of a handle."""
        number = number_of(handle)
        found = self.events.get(number)
        if found is None:
            found = self.events[number] = Event(foreign=True)
        return found

    def record(self, event: Event, stream: Stream, external: bool = False) -> None:
        """Record an event in a stream. ``external``: if it is captured, record at each launch."""
        capture = self.capture_of(stream)
        if capture is not None and external:
            self.name(stream, capture.step(lambda stream: self.record(event, stream)))
        elif capture is not None:
            event.mark, event.captured = None, (capture, capture.record(stream, event))
        else:
            self.recorded(event, stream)

    def recorded(self, event: Event, stream: Stream) -> None:
        """Record an event in a stream that is not captured."""
        event.captured, event.mark = None, self.timeline.record(stream)
        event.note(stream, event.mark)
        if event.shared:
            self.sources.clear()
            self.interprocess.notifies(stream)
            number = self.interprocess.recorded(event)
            self.timeline.submit(stream, lambda stream: self._publish(stream, event, number))

    def _publish(self, stream: Stream, event: Event, number: int) -> None:
        self.timeline.published.learn(stream.clock)
        self.interprocess.covers(event, stream.clock, number)

    def waited(self, actor: Actor, event: Event) -> None:
        """Note a wait for an event that only this program records."""
        if not (event.foreign or event.elsewhere):
            self.judge.waited(actor, event.wait())

    def wait(self, stream: Stream, event: Event, external: bool = False) -> None:
        """Make a stream wait for an event. ``external``: if it is captured, each launch waits for the outside event."""
        capture = self.capture_of(stream)
        if event.captured is not None:
            of, clock = event.captured
            if not of.ended:
                of.wait(stream, event, clock)
                self.captures[stream] = of
        elif capture is not None:
            if external:
                self.name(stream, capture.step(lambda stream: self.wait(stream, event)))
        else:
            if event.mark is not None:
                self.timeline.wait(stream, event.mark)
            self.waited(stream, event)
            unseen = self.interprocess.recorded_elsewhere(event)
            if unseen is not None:
                self.timeline.submit(stream, lambda stream: stream.clock.learn(unseen))

    # -- memory ------------------------------------------------------------------------------------------------

    def access_to(self, context: int) -> dict[int, int]:
        """Access of devices to the plain memory of a context."""
        return self._access.setdefault(context, {})

    def allocate(self, address: int, size: int, stream: Stream, grants: dict[int, int] | None, stack: Stack) -> Range:
        """Queue an allocation in a stream."""
        made = Range(address, size, "allocation", stack=stack, grants=grants, pending=True)
        made.born = Moment(stream, "allocation", stack)
        self.addresses.add(made)
        capture = self.capture_of(stream)
        if capture is not None:
            node = Node("allocate", stack=stack, range=made)
            capture.add(stream, node)
            made.born = Moment(stream, "allocation at a launch of its graph", stack)
            self.name(stream, node)
        else:
            self.timeline.submit(stream, lambda stream: self.judge.allocate(made, stream))
            self.foreign.did(stream)
        return made

    def free(self, address: int, stream: Stream, what: str, stack: Stack) -> Finish:
        """Before a free call, queue the free in a stream. Call the result with the driver's answer."""
        found = self.addresses.find(address)
        if found is None or found.base != address:
            self.timeline.submit(stream, lambda stream: None)
            return nothing
        capture = self.capture_of(stream)
        if capture is not None:
            return self._captured_free(capture, stream, Node("free", what, stack, range=found))
        self.sources.check()
        undo = [self.sources.forget((found,))]
        exported = self.interprocess.export_of(found)
        refused: list[bool] = []

        def free(stream: Stream) -> None:
            if not refused:
                self.interprocess.check_importers(found, exported, what, stack)
                undo.append(self.judge.free(found, stream, stream.clock, what, stack))

        def finish(answer: Any) -> None:
            if not answer[0]:
                self.interprocess.freed(found, stream)
                self.foreign.did(stream)
                return
            refused.append(True)
            for step in undo:
                step()

        self.timeline.submit(stream, free)
        return finish

    def _captured_free(self, capture: Capture, stream: Stream, node: Node) -> Finish:
        take_back = capture.add(stream, node)

        def finish(answer: Any) -> None:
            if answer[0]:
                capture.graph.nodes.remove(node)
                take_back()
            else:
                self.name(stream, node)

        return finish

    def end(self, ranges: Iterable[Range], what: str, stack: Stack, ending: str = "") -> Finish:
        """Before a call, free ranges by the host. Call the result with the driver's answer."""
        thread = self.thread()
        self.timeline.host_acts(thread)
        ended = [one for one in ranges if one.ended is None]
        self.sources.check()
        undo = [self.sources.forget(ended)]
        for one in ended:
            self.interprocess.check_importers(one, self.interprocess.export_of(one), what, stack)
            undo.append(self.judge.free(one, thread, self.timeline.host, what, stack, ending))

        def finish(answer: Any) -> None:
            for one in () if answer[0] else ended:
                self.interprocess.freed(one)
                one.vacated = one.kind not in _KEEP_ADDRESSES
            for step in undo if answer[0] else ():
                step()

        return finish

    def note_waiting_free(self, range_: Range, what: str) -> None:
        """Note a synchronous free of memory that queued work still uses: no document says that the driver waits."""
        for use in range_.last.values():
            if not self.timeline.may_be_known(use.actor.number, use.time):
                self.notes.add("frees", f"{what} of {range_.kind} that {use} uses")

    def end_context(self, context: int, what: str, stack: Stack) -> None:
        """Record the end of a context with its streams and memory."""
        for handle in [handle for handle, one in self.streams.items() if one.context == context]:
            self.retire(self.streams.pop(handle))
            self.account.lost("stream", handle)
        for one in [self._legacy.pop(context, None), *(it for it in self._per_thread if it.context == context)]:
            if one is not None:
                self.retire(one)
        self._per_thread = [one for one in self._per_thread if one.context != context]
        self._access.pop(context, None)
        thread = self.thread()
        self.timeline.host_acts(thread)
        for range_ in self.addresses.living():
            if range_.context == context != 0:
                range_.ended, range_.vacated = Moment(thread, what, stack), True
                self.account.lost(range_.kind, range_.base)
                self.interprocess.import_ended(range_)

    def map(self, address: int, size: int, offset: int, memory: Physical, stack: Stack) -> None:
        """Add a mapping."""
        made = Range(address, size, "mapping", memory.bytes, offset, stack, grants={}, bindings=memory.bindings)
        memory.mappings = [one for one in memory.mappings if one.ended is None] + [made]
        self.addresses.add(made)

    def mappings(self, address: int, size: int) -> list[Range]:
        """The mappings in an address range."""
        return [one for one in self.addresses.overlapping(address, address + size) if one.kind == "mapping"]

    # -- values in memory --------------------------------------------------------------------------------------

    def write_value(self, stream: Stream, address: int, value: int, bits: int) -> None:
        """Queue a write of a value in a stream (``cuStreamWriteValue32``)."""
        capture = self.capture_of(stream)
        if capture is not None:
            self.name(stream, capture.step(lambda stream: self.write_value(stream, address, value, bits)))
        else:
            self.sources.polled(stream, address, address + bits // 8)
            self.interprocess.notifies(stream)
            if self.interprocess.uses and self._is_shared(address):
                self.timeline.submit(stream, lambda stream: self.interprocess.release(stream.clock))
            self._use_word(stream, f"cuStreamWriteValue{bits}", address, bits // 8)
            self.values.write(stream, address, value)

    def _is_shared(self, address: int) -> bool:
        """Whether other processes may have the memory at an address open."""
        found = self.addresses.find(address)
        return found is None or found.bytes.shared

    def announces(self, stream: Stream, address: int) -> None:
        """Record that other processes may see a value before the writing call returns."""
        self.interprocess.notifies(stream)
        if stream.obstacle is None and self._is_shared(address):
            self.interprocess.release(self.timeline.before_next(stream))

    def _use_word(self, stream: Stream, what: str, address: int, nbytes: int) -> None:
        """Queue a use of a value in device memory. The memory must be allocated; the use races with no other."""
        found = self.addresses.find(address)
        if found is None or found.kind in HOST_KINDS:
            return
        pieces, stack = ((found, address, address + nbytes),), here()

        def use(stream: Stream) -> None:
            self.judge.use(pieces, Access(stream, what, stack, True), stream.clock, races=False)

        self.timeline.submit(stream, use)

    def wait_value(self, stream: Stream, address: int, value: int, flag: int, bits: int) -> None:
        """Queue a wait for a value in a stream (``cuStreamWaitValue32``)."""
        capture = self.capture_of(stream)
        if capture is not None:
            self.name(stream, capture.step(lambda stream: self.wait_value(stream, address, value, flag, bits)))
        else:
            self._use_word(stream, f"cuStreamWaitValue{bits}", address, bits // 8)
            held = stream.obstacle
            self.values.wait(stream, address, value, flag, bits)
            if held is None and stream.obstacle is not None:
                self._holds(stream, f"cuStreamWaitValue{bits}", address, bits // 8)

    def _holds(self, stream: Stream, what: str, address: int, nbytes: int) -> None:
        """Record that a waited-for value's memory is in use until the wait is over."""
        last = next((range_.last for range_, _, _ in self.addresses.pieces(address, nbytes)), {})
        before, waiting = last.get(stream.number), Access(stream, what, here(), False, time=NEVER)
        last[stream.number] = waiting

        def over(stream: Stream) -> None:
            if last.get(stream.number) is waiting:
                del last[stream.number]
                if before is not None:
                    last[stream.number] = before

        self.timeline.submit(stream, over)

    # -- the end -----------------------------------------------------------------------------------------------

    def defer(self, address: int) -> None:
        """Record that a free was deferred until importers have closed."""
        found = self.addresses.find(address)
        if found is not None:
            found.deferred = True

    def leaks(self) -> list[Hazard]:
        """A hazard for each place in the program that allocated memory which is not freed."""
        resources: list[Range | Physical] = [
            one
            for one in self.addresses.living()
            if not (one.pending or one.deferred) and one.kind != "registered memory"
        ]
        named = (one for one in dict.fromkeys(self.physical.values()) if one.stack)
        resources += [one for one in named if all(mapping.ended for mapping in one.mappings)]
        places: dict[tuple[str, Stack], list[Range | Physical]] = {}
        for one in resources:
            places.setdefault((one.kind, one.stack), []).append(one)
        found = []
        for (_, stack), leaked in places.items():
            more = f", and {len(leaked) - 1} more" if len(leaked) > 1 else ""
            ended, remedy = _LEAKS[leaked[0].kind]
            what, size, at = f"{leaked[0]} was not {ended}{more}.", sum(one.size for one in leaked), leaked[0].base
            found.append(Hazard("leak", what, remedy, at, size, places=(("allocated", stack),)))
        return found

    def close(self) -> None:
        """Check the operations of waiting streams as if they had run, and remove entries that other processes read."""
        self.sources.check()
        for stream in tuple(self.timeline.held):
            self.timeline.force(stream)
        self.interprocess.close()
        self.files.close()
