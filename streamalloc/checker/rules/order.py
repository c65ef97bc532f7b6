"""Calls that order operations: streams, events and values in memory. Also the life of contexts."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from streamalloc.checker.capture import Event
from streamalloc.checker.clocks import Stream
from streamalloc.checker.rules.rule import Answer, Arguments, Before, ends, rules
from streamalloc.checker.state import State
from streamalloc.checker.uses import Finish, nothing
from streamalloc.driver.bindings import cuda, number_of
from streamalloc.driver.reports import from_package, here

_INTERPROCESS = int(cuda.CUevent_flags.CU_EVENT_INTERPROCESS)
_EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL, CU_EVENT_WAIT_EXTERNAL


# -- streams -------------------------------------------------------------------------------------------------


def _makes_stream(state: State, name: str, args: Arguments, answer: Answer) -> None:
    state.add_stream(int(answer[1]), not int(args[1 if "Green" in name else 0]) & 1, made_at=here(1))


def _synchronises(streams: Callable[[State, Arguments], list[Stream]]) -> Before:
    def rule(state: State, name: str, args: Arguments) -> Finish:
        synchronised = state.synchronising(streams(state, args))
        return lambda answer: None if answer[0] else synchronised()

    return rule


def _streams_of_context(state: State, args: Arguments) -> list[Stream]:
    return state.all_streams(number_of(args[0]) if args else state.context())


def _queries(state: State, name: str, args: Arguments) -> Finish:
    stream = state.stream(args[0])
    state.sources.check()
    clock = stream.clock.copy() if stream.obstacle is None and not stream.peers else None

    def finish(answer: Answer) -> None:
        if answer[0]:
            return
        if from_package("ipc/"):
            # If a stream is idle, the facade's host writes a shared value instead of the stream. Reports must not
            # depend on that, so this query counts as a stream-ordered write of the value.
            state.sources.clear()
            state.timeline.published.learn(stream.clock if clock is None else clock)
            state.interprocess.release(stream.clock if clock is None else clock)
        elif clock is None:
            state.host_waited_for(stream)
        else:
            state.timeline.host_observes(clock)

    return finish


# -- events --------------------------------------------------------------------------------------------------


def _makes_event(state: State, name: str, args: Arguments, answer: Answer) -> None:
    state.events[int(answer[1])] = Event(bool(int(args[0]) & _INTERPROCESS), made=here(1))


def _records(state: State, name: str, args: Arguments, answer: Answer) -> None:
    external = name.endswith("WithFlags") and int(args[2]) & _EXTERNAL
    state.record(state.event(args[0]), state.stream(args[1]), bool(external))


def _records_context(state: State, name: str, args: Arguments, answer: Answer) -> None:
    event, context = state.event(args[1]), number_of(args[0])
    # An auxiliary stream that waits for all streams.
    meeting = state.timeline.stream("the context")
    for stream in state.all_streams(context):
        state.timeline.wait(meeting, state.timeline.record(stream))
    state.recorded(event, meeting)
    state.timeline.retire(meeting)


def _waits(state: State, name: str, args: Arguments, answer: Answer) -> None:
    external = len(args) > 2 and int(args[2]) & _EXTERNAL
    state.wait(state.stream(args[0]), state.event(args[1]), bool(external))


def _context_waits(state: State, name: str, args: Arguments, answer: Answer) -> None:
    """A context waits for an event. The streams of a green context are unknown, so all streams wait."""
    for stream in state.all_streams(None if "Green" in name else number_of(args[0])):
        state.wait(stream, state.event(args[1]))


def _records_elsewhere(state: State, name: str, args: Arguments, answer: Answer) -> None:
    """Record an event after unknown streams of a green context (``cuGreenCtxRecordEvent``)."""
    event = state.event(args[1])
    event.mark, event.captured, event.foreign = None, None, True
    state.interprocess.release(state.timeline.everything())


def _waits_for_others(state: State, name: str, args: Arguments, answer: Answer) -> None:
    """A wait for another library's semaphore. It counts as ordered after all earlier work."""
    state.wait(state.stream(args[-1]), Event(foreign=True))


def _happened(state: State, name: str, args: Arguments) -> Finish:
    """A call that shows the host that its arguments, which are events, have happened."""
    state.sources.check()
    events = [state.event(handle) for handle in args[:2]]
    marks = [one.mark for one in events if one.mark is not None]

    def finish(answer: Answer) -> None:
        if answer[0]:
            return
        for mark in marks:
            state.timeline.force_mark(mark)
            assert mark.clock is not None
            state.timeline.host_observes(mark.clock)
        for one in events:
            state.waited(state.thread(), one)
            unseen = state.interprocess.recorded_elsewhere(one)
            if unseen is not None:
                state.timeline.host_observes(unseen)

    return finish


# -- values --------------------------------------------------------------------------------------------------


def _names_value(state: State, name: str, args: Arguments) -> Finish:
    """Before a call, check the memory of its value. Other processes may see a written value during the call."""
    if (state.interprocess.leaving or state.interprocess.uses) and "Write" in name:
        state.announces(state.stream(args[0]), number_of(args[1]))
    found = state.addresses.find(number_of(args[1]))
    if found is None or found.ended is None:
        return nothing
    return state.stale(args[0], name, ((args[1], 4, True),))


def _value(state: State, name: str, args: Arguments, answer: Answer) -> None:
    stream, bits = state.stream(args[0]), int(name[-2:])
    if "Write" in name:
        state.write_value(stream, number_of(args[1]), number_of(args[2]), bits)
    else:
        state.wait_value(stream, number_of(args[1]), number_of(args[2]), int(args[3]), bits)


def _values(state: State, name: str, args: Arguments, answer: Answer) -> None:
    """``cuStreamBatchMemOp``."""
    batch_of_values(state, state.stream(args[0]), args[2])


def batch_of_values(state: State, stream: Stream, operations: Any) -> None:
    """Queue writes of values and waits for values (``CUstreamBatchMemOpParams``)."""
    for one in operations or ():
        kind = getattr(one.operation, "name", "")
        bits = 64 if kind.endswith("64") else 32
        if "WAIT_VALUE" in kind:
            wait = one.waitValue
            value = int(wait.value64 if bits == 64 else wait.value)
            state.wait_value(stream, number_of(wait.address), value, int(wait.flags), bits)
        elif "WRITE_VALUE" in kind:
            write = one.writeValue
            value = int(write.value64 if bits == 64 else write.value)
            state.write_value(stream, number_of(write.address), value, bits)


# -- contexts: their end frees streams, device memory and pinned memory; pools and mappings live on -------------


def _retains_context(state: State, name: str, args: Arguments, answer: Answer) -> None:
    state.primary[number_of(args[0])] = int(answer[1])


def _ends_context(context: Callable[[State, Arguments], int], last: bool = False) -> Before:
    """A call that ends a context after its work. ``last``: only if it released the last reference."""

    def rule(state: State, name: str, args: Arguments) -> Finish:
        ended, stack = context(state, args), here()
        synchronised = state.synchronising(state.all_streams(ended))

        def finish(answer: Answer) -> None:
            if answer[0] or (last and _is_active(state, args[0])):
                return
            synchronised()
            state.end_context(ended, name, stack)

        return finish

    return rule


def _is_active(state: State, device: object) -> bool:
    answer = state.query("cuDevicePrimaryCtxGetState", device)
    return not answer or bool(answer[1])


def _primary(state: State, args: Arguments) -> int:
    return state.primary.get(number_of(args[0]), 0)


_VALUES = "cuStreamWriteValue32 cuStreamWriteValue64 cuStreamWaitValue32 cuStreamWaitValue64"
RULES = rules(
    after={
        "cuStreamCreate cuStreamCreateWithPriority cuGreenCtxStreamCreate": _makes_stream,
        "cuEventCreate": _makes_event,
        "cuEventRecord cuEventRecordWithFlags": _records,
        "cuCtxRecordEvent": _records_context,
        "cuStreamWaitEvent": _waits,
        "cuCtxWaitEvent cuGreenCtxWaitEvent": _context_waits,
        "cuGreenCtxRecordEvent": _records_elsewhere,
        "cuWaitExternalSemaphoresAsync": _waits_for_others,
        _VALUES: _value,
        "cuStreamBatchMemOp": _values,
        "cuDevicePrimaryCtxRetain": _retains_context,
    },
    before={
        _VALUES: _names_value,
        "cuStreamDestroy": ends(attrgetter("streams"), State.retire),
        "cuStreamSynchronize": _synchronises(lambda state, args: [state.stream(args[0])]),
        "cuCtxSynchronize cuCtxSynchronize_v2": _synchronises(_streams_of_context),
        "cuStreamQuery": _queries,
        "cuEventDestroy": ends(attrgetter("events"), lambda state, event: state.interprocess.destroyed(event)),
        "cuEventSynchronize cuEventQuery cuEventElapsedTime": _happened,
        "cuCtxDestroy": _ends_context(lambda state, args: number_of(args[0])),
        "cuDevicePrimaryCtxReset": _ends_context(_primary),
        "cuDevicePrimaryCtxRelease": _ends_context(_primary, last=True),
    },
)
