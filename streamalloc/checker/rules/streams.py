"""Rules for calls that order operations: calls for streams, events and values in memory, and calls that end
contexts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from streamalloc.checker import uses
from streamalloc.checker.capture import TrackedEvent, TrackedNode
from streamalloc.checker.clocks import Actor, Obstacle, TrackedStream
from streamalloc.checker.contents import HOST_KINDS
from streamalloc.checker.ranges import NEVER, Access, RecordedOperation
from streamalloc.checker.state import State
from streamalloc.checker.uses import Answer, Arguments, Around, Steps, ends, rules_of
from streamalloc.driver.bindings import cuda, number_of, opaque_bytes
from streamalloc.driver.reports import Stack, from_package

_INTERPROCESS = int(cuda.CUevent_flags.CU_EVENT_INTERPROCESS)
_EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL and CU_EVENT_WAIT_EXTERNAL have this value.


@dataclass(eq=False, slots=True)
class HostCall:
    """Host function in a stream or a graph, with its queued calls and the call that is running."""

    _state: State
    stays: bool
    """Whether a graph contains the function, so that it may be called several times."""
    node: TrackedNode | None = None
    """The node that the call became in a capture; None if the stream was not being captured."""
    cancelled: bool = False
    _queued: deque[tuple[TrackedStream, Obstacle, Obstacle]] = field(default_factory=deque)
    """Queued calls as tuples: the stream, the obstacle that ends with the work before the call, and the obstacle that
    ends with the call.
    """
    _running: list[Obstacle] = field(default_factory=list)

    def queue(self, stream: TrackedStream) -> None:
        """Queue a call of the host function in a stream. Later work of the stream waits until the call ends."""
        if self.cancelled:
            return
        timeline = self._state.timeline
        before, ended = timeline.record(stream), Obstacle()
        timeline.wait(stream, ended)
        self._queued.append((stream, before, ended))

    def begins(self) -> None:
        """Record that the oldest queued call has begun. So the work before it in its stream has ended. If no call was
        queued, all work so far counts as done, with a note.
        """
        timeline = self._state.timeline
        if not self._queued:
            # Another library launched the graph, so no call was queued here.
            timeline.notes.add("waits", "a graph that another library launched")
            timeline.host_observes(timeline.everything())
            return
        stream, before, ended = self._queued.popleft()
        self._running.append(ended)
        self._state.thread().within = stream
        timeline.force_mark(before)
        if before.clock is not None:
            timeline.host_observes(before.clock)

    def ends(self) -> None:
        """Record that the running call has ended. The work after it in its stream can now run."""
        if self._running:
            self._state.timeline.end(self._running.pop(0), self._state.timeline.host)
        self._state.thread().within = None

    def refused(self) -> None:
        """Remove a call that the driver has refused to queue. A function in a graph gets no more calls."""
        if self.stays:
            self.cancelled = True
        else:
            self.skip()

    def skip(self) -> None:
        """Cancel the latest queued call, because the driver has refused to queue the call or to launch its graph."""
        if self._queued:
            self._state.timeline.end(self._queued.pop()[2], self._state.timeline.host)


def _at_launch(state: State, stream: TrackedStream, step: Callable[[TrackedStream], object]) -> bool:
    """Whether a stream is being captured. If so, each launch of the graph calls ``step`` with the stream of the
    launch.
    """
    capture = state.capture_of(stream)
    if capture is not None:
        state.streams.name_nodes(stream, capture.step(step))
    return capture is not None


def event_of(state: State, handle: Any) -> TrackedEvent:
    """Return the event of a handle.

    An event that was not created through this driver counts as an event of another library.
    """
    number = number_of(handle)
    found = state.events.get(number)
    if found is None:
        found = state.events[number] = TrackedEvent(foreign=True)
    return found


def record(state: State, event: TrackedEvent, stream: TrackedStream, external: bool = False) -> None:
    """Record an event in a stream (``cuEventRecord``). If the stream is being captured, the record is a part of the
    capture.

    ``external``: in a capture, each launch of the graph records the event instead.
    """
    capture = state.capture_of(stream)
    if external and _at_launch(state, stream, lambda stream: record(state, event, stream)):
        return
    if capture is not None:
        event.mark, event.captured = None, (capture, capture.record(stream, event, state.place(1)))
    else:
        recorded(state, event, stream)


def recorded(state: State, event: TrackedEvent, stream: TrackedStream) -> None:
    """Record an event in a stream that is not being captured. The record of an interprocess event is announced to other
    processes.
    """
    event.captured, event.mark = None, state.timeline.record(stream)
    event.note(stream, event.mark, state.place(1))
    if event.shared:
        state.sources.clear()
        state.interprocess.notifies(stream)
        number = state.interprocess.recorded(event)

        def publish(stream: TrackedStream) -> None:
            state.timeline.published.learn(stream.clock)
            state.interprocess.covers(event, stream.clock, number)

        state.timeline.submit(stream, publish)


def waited(state: State, actor: Actor, event: TrackedEvent) -> None:
    """Store for reports that ``actor`` waits for ``event``. Nothing is stored if another library or process records the
    event.
    """
    if not (event.foreign or event.elsewhere):
        state.judge.waited(actor, event.wait(state.place(1)))


def wait(state: State, stream: TrackedStream, event: TrackedEvent, external: bool = False) -> None:
    """Make a stream wait for an event (``cuStreamWaitEvent``). If the event was recorded in a capture, the stream joins
    this capture; nothing happens if the capture has ended. A captured stream does not wait for other events, unless
    ``external``.

    ``external``: in a capture, each launch of the graph waits for the event, which is outside of the graph.
    """
    if event.captured is not None:
        of, clock = event.captured
        if not of.ended:
            of.wait(stream, event, clock, state.place(1))
            state.streams.captures[stream] = of
    elif state.capture_of(stream) is not None:
        if external:
            _at_launch(state, stream, lambda stream: wait(state, stream, event))
    else:
        if event.mark is not None:
            state.timeline.wait(stream, event.mark)
        waited(state, stream, event)
        unseen = state.interprocess.recorded_elsewhere(event)
        if unseen is not None:
            state.timeline.submit(stream, lambda stream: stream.clock.learn(unseen))


def write_value(state: State, stream: TrackedStream, address: int, value: int, bits: int) -> None:
    """Queue a write of ``value`` to ``address`` in a stream (``cuStreamWriteValue32``). If the stream is being
    captured, each launch of the graph queues the write. ``bits``: size of the value, 32 or 64.
    """
    if _at_launch(state, stream, lambda stream: write_value(state, stream, address, value, bits)):
        return
    state.sources.polled(stream, address, address + bits // 8)
    state.interprocess.notifies(stream)
    if state.interprocess.uses and _is_shared(state, address):
        state.timeline.submit(stream, lambda stream: state.interprocess.drop_uses(stream.clock.after))
    _use_word(state, stream, f"cuStreamWriteValue{bits}", address, bits // 8)
    state.values.write(stream, address, value)


def _is_shared(state: State, address: int) -> bool:
    """Whether other processes may have the memory at an address open. True for memory that the checker does not
    know.
    """
    found = state.addresses.find(address)
    return found is None or found.bytes.shared


def _use_word(state: State, stream: TrackedStream, what: str, address: int, nbytes: int) -> None:
    """Queue a use of a value in device memory, which must be allocated. Such a use never races with another use."""
    found = state.addresses.find(address)
    if found is None or found.kind in HOST_KINDS:
        return
    piece, stack = (found, address, address + nbytes), state.place()

    def use(stream: TrackedStream) -> None:
        state.judge.use(piece, Access(stream, what, stack, True), stream.clock, races=False)

    state.timeline.submit(stream, use)


def wait_value(state: State, stream: TrackedStream, address: int, value: int, flag: int, bits: int) -> None:
    """Queue a wait of a stream for a value (``cuStreamWaitValue32``). If the stream is being captured, each launch of
    the graph queues the wait. ``flag``: number of the comparison (``CUstreamWaitValue_flags``). ``bits``: size of the
    value, 32 or 64.
    """
    if _at_launch(state, stream, lambda stream: wait_value(state, stream, address, value, flag, bits)):
        return
    _use_word(state, stream, f"cuStreamWaitValue{bits}", address, bits // 8)
    before = stream.obstacle
    state.values.wait(stream, address, value, flag, bits)
    if before is None and stream.obstacle is not None:
        _use_awaited(state, stream, f"cuStreamWaitValue{bits}", address, bits // 8)


def _use_awaited(state: State, stream: TrackedStream, what: str, address: int, nbytes: int) -> None:
    """Record that the memory of a value is in use until the wait for it ends. A free before that is a hazard."""
    last = next((range_.last for range_, _, _ in state.addresses.pieces(address, nbytes)), {})
    before, awaited = last.get(stream.number), Access(stream, what, state.place(), False, time=NEVER)
    last[stream.number] = awaited

    def over(stream: TrackedStream) -> None:
        if last.get(stream.number) is awaited:
            del last[stream.number]
            if before is not None:
                last[stream.number] = before

    state.timeline.submit(stream, over)


def host_function(state: State, stream: TrackedStream) -> HostCall:
    """Queue a call of a host function in a stream. If the stream is being captured, each launch of the graph calls the
    function instead. Returns the record of the function.
    """
    capture = state.capture_of(stream)
    made = HostCall(state, stays=capture is not None)
    if capture is None:
        made.queue(stream)
    else:
        made.node = capture.step(made.queue, made)
    return made


def end_context(state: State, context: int, what: str, stack: Stack) -> None:
    """Record the end of a context with its streams and memory.

    ``what``, ``stack``: the call that ends the context, and its place in the program.
    """
    for handle in state.streams.end_context(context):
        state.account.lost("stream", handle)
    state.access.pop(context, None)
    thread = state.thread()
    state.timeline.host_acts(thread)
    for range_ in state.addresses.living():
        if range_.context == context != 0:
            range_.ended, range_.vacated = RecordedOperation(thread, what, stack), True
            state.account.lost(range_.kind, range_.base)
            state.interprocess.import_ended(range_)


# -- streams -------------------------------------------------------------------------------------------------


def cuStreamCreate(state: State, name: str, args: Arguments, answer: Answer) -> None:
    state.streams.add(int(answer[1]), not int(args[1 if "Green" in name else 0]) & 1, at=state.place(1))


cuStreamCreateWithPriority = cuGreenCtxStreamCreate = cuStreamCreate


def _synchronises(streams: Callable[[State, Arguments], list[TrackedStream]]) -> Around:
    def rule(state: State, name: str, args: Arguments) -> Steps:
        synchronised = uses.synchronising(state, streams(state, args))
        answer = yield
        if not answer[0]:
            synchronised()

    return rule


def _streams_of_context(state: State, args: Arguments) -> list[TrackedStream]:
    return state.streams.all(number_of(args[0]) if args else state.context())


cuStreamDestroy = ends(attrgetter("streams.by_handle"), lambda state, stream: state.streams.retire(stream))
cuStreamSynchronize = _synchronises(lambda state, args: [state.stream(args[0])])
cuCtxSynchronize = cuCtxSynchronize_v2 = _synchronises(_streams_of_context)


def cuStreamQuery(state: State, name: str, args: Arguments) -> Steps:
    stream = state.stream(args[0])
    state.sources.check()
    clock = stream.clock.copy() if stream.obstacle is None and not stream.peers else None
    answer = yield
    if answer[0]:
        return
    if from_package("ipc/"):
        # The package itself writes a shared value from the host if this query finds the stream idle. Reports must not
        # depend on the answer of the query, so the query counts as a write of the value in stream order.
        state.sources.clear()
        state.timeline.published.learn(stream.clock if clock is None else clock)
        state.interprocess.drop_uses((stream.clock if clock is None else clock).after)
    elif clock is None:
        uses.host_waited_for(state, stream)
    else:
        state.timeline.host_observes(clock)


# -- events --------------------------------------------------------------------------------------------------


def cuEventCreate(state: State, name: str, args: Arguments, answer: Answer) -> None:
    state.events[int(answer[1])] = TrackedEvent(bool(int(args[0]) & _INTERPROCESS), made=state.place(1))


cuEventDestroy = ends(attrgetter("events"), lambda state, event: state.interprocess.destroyed(event))


def cuEventRecord(state: State, name: str, args: Arguments, answer: Answer) -> None:
    external = name.endswith("WithFlags") and int(args[2]) & _EXTERNAL
    record(state, event_of(state, args[0]), state.stream(args[1]), bool(external))


cuEventRecordWithFlags = cuEventRecord


def cuCtxRecordEvent(state: State, name: str, args: Arguments, answer: Answer) -> None:
    event, context = event_of(state, args[1]), number_of(args[0])
    # An event records one stream. So an auxiliary stream waits for all streams of the context, and the event records
    # this stream.
    meeting = state.timeline.stream("the context")
    for stream in state.streams.all(context):
        state.timeline.wait(meeting, state.timeline.record(stream))
    recorded(state, event, meeting)
    state.timeline.retire(meeting)


def cuStreamWaitEvent(state: State, name: str, args: Arguments, answer: Answer) -> None:
    external = len(args) > 2 and int(args[2]) & _EXTERNAL
    wait(state, state.stream(args[0]), event_of(state, args[1]), bool(external))


def cuCtxWaitEvent(state: State, name: str, args: Arguments, answer: Answer) -> None:
    """Rule for a call that makes a context wait for an event. The streams of a green context are unknown, so all
    streams wait.
    """
    for stream in state.streams.all(None if "Green" in name else number_of(args[0])):
        wait(state, stream, event_of(state, args[1]))


cuGreenCtxWaitEvent = cuCtxWaitEvent


def cuGreenCtxRecordEvent(state: State, name: str, args: Arguments, answer: Answer) -> None:
    """Rule for ``cuGreenCtxRecordEvent``: the event is recorded after streams of a green context, which are unknown."""
    event = event_of(state, args[1])
    event.mark, event.captured, event.foreign = None, None, True
    state.interprocess.drop_uses(state.timeline.everything().after)


def cuWaitExternalSemaphoresAsync(state: State, name: str, args: Arguments, answer: Answer) -> None:
    """Rule for a wait for another library's semaphore. The wait counts as ordered after all earlier work."""
    wait(state, state.stream(args[-1]), TrackedEvent(foreign=True))


def cuEventSynchronize(state: State, name: str, args: Arguments) -> Steps:
    """Rule for a call whose success shows the host that the events in its arguments are done
    (``cuEventSynchronize``).
    """
    state.sources.check()
    events = [event_of(state, handle) for handle in args[:2]]
    marks = [one.mark for one in events if one.mark is not None]
    answer = yield
    if answer[0]:
        return
    for mark in marks:
        state.timeline.force_mark(mark)
        assert mark.clock is not None
        state.timeline.host_observes(mark.clock)
    for one in events:
        waited(state, state.thread(), one)
        unseen = state.interprocess.recorded_elsewhere(one)
        if unseen is not None:
            state.timeline.host_observes(unseen)


cuEventQuery = cuEventElapsedTime = cuEventSynchronize


def cuIpcGetEventHandle(state: State, name: str, args: Arguments, answer: Answer) -> None:
    data = opaque_bytes(answer[1])
    event = state.interprocess.events[data] = event_of(state, args[0])
    _names_event(state, event, data)


def _names_event(state: State, event: TrackedEvent, data: bytes) -> None:
    """Announce the records of an event on this process's board, under its export data ``data``."""
    event.elsewhere, event.name = True, data
    index = state.interprocess.index(event)
    if index is not None:
        state.interprocess.board.name_entry(index, data)


def cuIpcOpenEventHandle(state: State, name: str, args: Arguments, answer: Answer) -> None:
    data = opaque_bytes(args[0])
    found = state.interprocess.events.setdefault(data, TrackedEvent(shared=True))
    state.events[int(answer[1])] = found
    _names_event(state, found, data)


# -- writes of values, and waits for them --------------------------------------------------------------------


def cuStreamWriteValue32(state: State, name: str, args: Arguments) -> Steps:
    """Rule for a write of a value or a wait for one. The memory is checked before the call.

    Other processes may read the written value during the call. So posts of uses that precede the write are removed
    before the call.
    """
    writes = "Write" in name
    if (state.interprocess.leaving or state.interprocess.uses) and writes:
        stream = state.stream(args[0])
        state.interprocess.notifies(stream)
        if stream.obstacle is None and _is_shared(state, number_of(args[1])):
            state.interprocess.drop_uses(state.timeline.before_next(stream).after)
    report_refused = uses.stale(state, args[0], name, uses.look_up(state, ((args[1], 4, True),)).pieces)
    answer = yield
    report_refused(answer)
    stream, bits = state.stream(args[0]), int(name[-2:])
    if writes and not answer[0]:
        write_value(state, stream, number_of(args[1]), number_of(args[2]), bits)
    elif not answer[0]:
        wait_value(state, stream, number_of(args[1]), number_of(args[2]), int(args[3]), bits)


cuStreamWriteValue64 = cuStreamWaitValue32 = cuStreamWaitValue64 = cuStreamWriteValue32


def cuStreamBatchMemOp(state: State, name: str, args: Arguments, answer: Answer) -> None:
    """Rule for ``cuStreamBatchMemOp``: each operation of the batch is recorded as a single call."""
    batch_of_values(state, state.stream(args[0]), args[2])


def batch_of_values(state: State, stream: TrackedStream, operations: Any) -> None:
    """Queue the writes of values and the waits for values in a list of ``CUstreamBatchMemOpParams``."""
    for one in operations or ():
        kind = getattr(one.operation, "name", "")
        bits = 64 if kind.endswith("64") else 32
        if "WAIT_VALUE" in kind:
            wait = one.waitValue
            value = int(wait.value64 if bits == 64 else wait.value)
            wait_value(state, stream, number_of(wait.address), value, int(wait.flags), bits)
        elif "WRITE_VALUE" in kind:
            write = one.writeValue
            value = int(write.value64 if bits == 64 else write.value)
            write_value(state, stream, number_of(write.address), value, bits)


# -- contexts: their end frees streams, device memory and pinned memory; pools and mappings live on -------------


def cuDevicePrimaryCtxRetain(state: State, name: str, args: Arguments, answer: Answer) -> None:
    state.primary[number_of(args[0])] = int(answer[1])


def _ends_context(context: Callable[[State, Arguments], int], last: bool = False) -> Around:
    """Rule for a call that ends a context after waiting for its work. ``last``: the context ends only with the last
    reference to it.
    """

    def rule(state: State, name: str, args: Arguments) -> Steps:
        ended, stack = context(state, args), state.place()
        synchronised = uses.synchronising(state, state.streams.all(ended))
        answer = yield
        if not (answer[0] or (last and _is_active(state, args[0]))):
            synchronised()
            end_context(state, ended, name, stack)

    return rule


def _is_active(state: State, device: object) -> bool:
    answer = state.ask.values("cuDevicePrimaryCtxGetState", device)
    return not answer or bool(answer[1])


def _primary(state: State, args: Arguments) -> int:
    return state.primary.get(number_of(args[0]), 0)


cuCtxDestroy = _ends_context(lambda state, args: number_of(args[0]))
cuDevicePrimaryCtxReset = _ends_context(_primary)
cuDevicePrimaryCtxRelease = _ends_context(_primary, last=True)


RULES = rules_of(globals())
