"""Stream capture: what may be called while a stream captures, and what ends the capture."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.facts.enums import BLOCKING, HOST, LEGACY
from tests.facts.support import UINT64_MAX, Answer, MiB, Rig, said, value

GLOBAL, THREAD_LOCAL, RELAXED = range(3)


class Scene:
    """A stream to capture, another one, and things to use while it captures."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.raw, self.event = rig, rig.raw, rig.event()
        self.stream, self.other, self.pool = rig.stream(), rig.stream(), rig.pool(UINT64_MAX)
        self.plain, self.pinned = rig.plain(4096), rig.pinned(64)
        rig.allocate(self.pool, 64, self.other)
        rig.synchronize()


@pytest.fixture
def scene(rig: Rig) -> Scene:
    return Scene(rig)


def kept(scene: Scene, answer: Answer, destroy: str) -> Answer:
    """The answer of a call that makes something, which is destroyed at the end."""
    if said(answer) == "SUCCESS":
        scene.rig.own(answer[1], getattr(scene.raw, destroy))
    return answer


def then(scene: Scene, query: str) -> Answer:
    """Record the event in the capture, then ask for it."""
    value(scene.raw.cuEventRecord(scene.event, scene.stream))
    answer: Answer = getattr(scene.raw, query)(scene.event)
    return answer


Call = Callable[[Scene], Answer]

# What each call says in any mode; the capture goes on after SUCCESS and OUT_OF_MEMORY and is invalid after others.
ANY_MODE: dict[str, dict[str, Call]] = {
    "STREAM_CAPTURE_UNSUPPORTED": {
        "synchronize the capturing stream": lambda s: s.raw.cuStreamSynchronize(s.stream),
        "query the capturing stream": lambda s: s.raw.cuStreamQuery(s.stream),
        "synchronize the context": lambda s: s.raw.cuCtxSynchronize(),
    },
    "CAPTURED_EVENT": {
        "query a captured event": lambda s: then(s, "cuEventQuery"),
        "synchronize a captured event": lambda s: then(s, "cuEventSynchronize"),
    },
    "SUCCESS": {
        "copy to host": lambda s: s.raw.cuMemcpyDtoH(np.zeros(4, np.uint8), s.plain, 4),
        "fill on the legacy stream": lambda s: s.raw.cuMemsetD8Async(s.plain, 1, 4, LEGACY),
        "copy from pageable memory": lambda s: s.raw.cuMemcpyHtoDAsync(s.plain, np.zeros(4, np.uint8), 4, s.stream),
        "copy to pageable memory": lambda s: s.raw.cuMemcpyDtoHAsync(np.zeros(4, np.uint8), s.plain, 4, s.stream),
        "wait for a word": lambda s: s.raw.cuStreamWaitValue32(s.stream, int(s.plain), 0, 0),
        "create a stream": lambda s: kept(s, s.raw.cuStreamCreate(1), "cuStreamDestroy"),
        "create an event": lambda s: kept(s, s.raw.cuEventCreate(2), "cuEventDestroy"),
        "record an event": lambda s: s.raw.cuEventRecord(s.event, s.stream),
        "free nothing": lambda s: s.raw.cuMemFreeAsync(0, s.stream),
        "allocate no bytes": lambda s: s.raw.cuMemAllocAsync(0, s.stream),
        "fill past the end": lambda s: s.raw.cuMemsetD8Async(s.plain, 1, 64 * MiB, s.stream),
        "memory info": lambda s: s.raw.cuMemGetInfo(),
    },
    "OUT_OF_MEMORY": {"allocate too much": lambda s: s.raw.cuMemAllocAsync(1 << 50, s.stream)},
}

# Calls that only the relaxed mode allows; the other two say STREAM_CAPTURE_UNSUPPORTED.
RELAXED_MODE: dict[str, Call] = {
    "allocate plain memory": lambda s: kept(s, s.raw.cuMemAlloc(64), "cuMemFree"),
    "free plain memory": lambda s: s.raw.cuMemFree(s.rig.disown(s.plain)),
    "free pinned memory": lambda s: s.raw.cuMemFreeHost(s.rig.disown(s.pinned)),
    "synchronize an event": lambda s: s.raw.cuEventSynchronize(s.event),
    "allocate pinned memory": lambda s: kept(s, s.raw.cuMemHostAlloc(64, 0), "cuMemFreeHost"),
    "synchronize another stream": lambda s: s.raw.cuStreamSynchronize(s.other),
    "query another stream": lambda s: s.raw.cuStreamQuery(s.other),
    "query an event": lambda s: s.raw.cuEventQuery(s.event),
    "create a pool": lambda s: s.rig.create_pool(),
    "trim a pool": lambda s: s.raw.cuMemPoolTrimTo(s.pool, 0),
    "allocate on another stream": lambda s: s.rig.try_allocate(s.pool, 64, s.other),
}

modes = pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED], ids=["global", "thread", "relaxed"])


def check(scene: Scene, mode: int, call: Call, expected: str) -> None:
    rig = scene.rig
    rig.begin_capture(scene.stream, mode)
    assert said(call(scene)) == expected
    goes_on = expected in ("SUCCESS", "OUT_OF_MEMORY")
    assert rig.capture_status(scene.stream) == ("ACTIVE" if goes_on else "INVALIDATED")
    end = rig.end_capture(scene.stream)
    assert said(end) == ("SUCCESS" if goes_on else "STREAM_CAPTURE_INVALIDATED")


@modes
@pytest.mark.parametrize(("expected", "name"), [(said_, name) for said_ in ANY_MODE for name in ANY_MODE[said_]])
def test_call(scene: Scene, expected: str, name: str, mode: int) -> None:
    check(scene, mode, ANY_MODE[expected][name], expected)


@modes
@pytest.mark.parametrize("name", RELAXED_MODE)
def test_call_that_needs_the_relaxed_mode(scene: Scene, name: str, mode: int) -> None:
    expected = "SUCCESS" if mode == RELAXED else "STREAM_CAPTURE_UNSUPPORTED"
    check(scene, mode, RELAXED_MODE[name], expected)


def read_attribute(scene: Scene) -> Answer:
    attribute = scene.rig.pool_attribute("RESERVED_MEM_CURRENT")
    answer: Answer = scene.raw.cuMemPoolGetAttribute(scene.pool, attribute)
    return answer


@pytest.mark.parametrize(("mode", "expected"), [(GLOBAL, "STREAM_CAPTURE_UNSUPPORTED"), (RELAXED, "SUCCESS")])
def test_pool_attribute(scene: Scene, mode: int, expected: str) -> None:
    check(scene, mode, read_attribute, expected)


def test_begin_twice(scene: Scene) -> None:
    rig, mode = scene.rig, scene.raw.CUstreamCaptureMode
    rig.begin_capture(scene.stream, RELAXED)
    assert said(scene.raw.cuStreamBeginCapture(scene.stream, mode(GLOBAL))) == "ILLEGAL_STATE"
    assert rig.capture_status(scene.stream) == "ACTIVE"


def test_capture_info(scene: Scene) -> None:
    assert scene.rig.capture_status(scene.stream) == "NONE"
    scene.rig.begin_capture(scene.stream, RELAXED)
    status, id, graph, dependencies, *_ = value(scene.raw.cuStreamGetCaptureInfo(scene.stream))
    assert status.name == "CU_STREAM_CAPTURE_STATUS_ACTIVE"
    assert int(id) > 0 and int(graph) != 0 and list(dependencies) == []


def test_calls_after_the_capture_became_invalid(scene: Scene) -> None:
    raw, rig, stream = scene.raw, scene.rig, scene.stream
    foreign = rig.allocate(scene.pool, 64, scene.other)
    rig.begin_capture(stream, GLOBAL)
    pointer = value(raw.cuMemAllocAsync(4 * MiB, stream))
    assert said(read_attribute(scene)) == "STREAM_CAPTURE_UNSUPPORTED"
    invalid = "STREAM_CAPTURE_INVALIDATED"
    assert said(raw.cuMemsetD8Async(pointer, 7, 4 * MiB, stream)) == invalid
    assert said(raw.cuStreamQuery(scene.other)) == "STREAM_CAPTURE_UNSUPPORTED"
    for address in (foreign, int(pointer) + 512, scene.plain, pointer):
        assert said(raw.cuMemFreeAsync(address, stream)) == invalid
    assert rig.capture_status(stream) == "INVALIDATED"
    assert said(raw.cuStreamEndCapture(stream)) == invalid


class TestBeginAndEnd:
    def test_end_without_a_beginning(self, scene: Scene) -> None:
        assert said(scene.raw.cuStreamEndCapture(scene.stream)) == "ILLEGAL_STATE"

    def test_on_the_legacy_stream(self, scene: Scene) -> None:
        answer = scene.raw.cuStreamBeginCapture(LEGACY, scene.raw.CUstreamCaptureMode(GLOBAL))
        assert said(answer) == "STREAM_CAPTURE_UNSUPPORTED"

    def test_on_the_per_thread_stream(self, scene: Scene) -> None:
        scene.rig.begin_capture(scene.rig.per_thread, GLOBAL)
        assert said(scene.rig.end_capture(scene.rig.per_thread)) == "SUCCESS"

    def test_the_stream_is_destroyed_meanwhile(self, scene: Scene) -> None:
        scene.rig.begin_capture(scene.other, RELAXED)
        assert said(scene.raw.cuStreamDestroy(scene.rig.disown(scene.other))) == "SUCCESS"


def test_allocation_from_a_host_pool(scene: Scene) -> None:
    rig, pool = scene.rig, scene.rig.pool(UINT64_MAX, location=HOST)
    rig.begin_capture(scene.stream, RELAXED)
    assert said(scene.raw.cuMemAllocFromPoolAsync(64, pool, scene.stream)) == "NOT_SUPPORTED"
    assert said(rig.end_capture(scene.stream)) == "SUCCESS"


@pytest.mark.parametrize(
    "call",
    [
        lambda scene: scene.raw.cuMemsetD8Async(scene.plain, 1, 4, LEGACY),
        lambda scene: scene.raw.cuStreamBeginCapture(LEGACY, scene.raw.CUstreamCaptureMode(GLOBAL)),
        lambda scene: scene.rig.end_capture(LEGACY),
        lambda scene: scene.raw.cuStreamGetPriority(LEGACY),
        lambda scene: scene.raw.cuStreamGetFlags(LEGACY),
        lambda scene: scene.raw.cuStreamGetCtx(LEGACY),
        lambda scene: scene.raw.cuStreamGetDevice(LEGACY),
        lambda scene: scene.raw.cuStreamGetId(LEGACY),
        lambda scene: scene.raw.cuStreamWaitEvent(LEGACY, scene.event, 0),
        lambda scene: scene.raw.cuStreamWaitEvent(LEGACY, scene.event, 1),
    ],
    ids=["work", "begin", "end", "priority", "flags", "context", "device", "id", "wait", "external wait"],
)
def test_in_the_legacy_stream_while_a_blocking_one_captures(scene: Scene, call: Call) -> None:
    rig, blocking = scene.rig, scene.rig.stream(BLOCKING)
    rig.begin_capture(blocking, RELAXED)
    assert said(call(scene)) == "STREAM_CAPTURE_IMPLICIT"
    assert said(rig.end_capture(blocking)) == "STREAM_CAPTURE_INVALIDATED"


def test_time_to_an_event_of_a_capture_that_was_spoilt(scene: Scene) -> None:
    rig, blocking, events = scene.rig, scene.rig.stream(BLOCKING), (scene.rig.event(), scene.rig.event())
    rig.begin_capture(blocking, RELAXED)
    value(rig.raw.cuEventRecord(events[0], blocking))
    assert said(rig.raw.cuStreamWaitEvent(LEGACY, events[1], 0)) == "STREAM_CAPTURE_IMPLICIT"
    assert said(rig.raw.cuEventElapsedTime(*events)) == "INVALID_VALUE"
    assert said(rig.end_capture(blocking)) == "STREAM_CAPTURE_INVALIDATED"


def test_a_launch_outlives_the_executable_graph(scene: Scene) -> None:
    raw, rig, stream, gate = scene.raw, scene.rig, scene.stream, scene.rig.gate()
    rig.begin_capture(stream)
    value(raw.cuMemsetD8Async(scene.plain, 7, 4, stream))
    executable = rig.instantiate(value(rig.end_capture(stream)))
    gate.hold(stream)
    assert said(raw.cuGraphLaunch(executable, stream)) == "SUCCESS"
    assert rig.query(stream) == "NOT_READY"
    assert said(raw.cuGraphExecDestroy(rig.disown(executable))) == "SUCCESS"
    gate.open()
    assert said(raw.cuStreamSynchronize(stream)) == "SUCCESS"
    assert rig.read(scene.plain, 4) == [7] * 4


class TestTwoStreams:
    def fork(self, scene: Scene) -> Any:
        """Capture an allocation, and a fill of it on the other stream."""
        raw = scene.raw
        scene.rig.begin_capture(scene.stream)
        pointer = value(raw.cuMemAllocAsync(MiB, scene.stream))
        value(raw.cuEventRecord(scene.event, scene.stream))
        assert said(raw.cuStreamWaitEvent(scene.other, scene.event, 0)) == "SUCCESS"
        assert scene.rig.capture_status(scene.other) == "ACTIVE"
        assert said(raw.cuMemsetD8Async(pointer, 5, MiB, scene.other)) == "SUCCESS"
        return pointer

    def test_joined(self, scene: Scene) -> None:
        raw, rig, back, pointer = scene.raw, scene.rig, scene.rig.event(), self.fork(scene)
        value(raw.cuEventRecord(back, scene.other))
        value(raw.cuStreamWaitEvent(scene.stream, back, 0))
        assert said(raw.cuMemFreeAsync(pointer, scene.stream)) == "SUCCESS"
        end = rig.end_capture(scene.stream)
        assert said(end) == "SUCCESS"
        assert rig.capture_status(scene.other) == "NONE"
        assert said(raw.cuGraphLaunch(rig.instantiate(value(end)), scene.stream)) == "SUCCESS"
        assert said(raw.cuStreamSynchronize(scene.stream)) == "SUCCESS"

    def test_not_joined(self, scene: Scene) -> None:
        raw, rig = scene.raw, scene.rig
        self.fork(scene)
        assert said(raw.cuStreamEndCapture(scene.stream)) == "STREAM_CAPTURE_UNJOINED"
        assert rig.capture_status(scene.other) == "NONE"
        assert rig.capture_status(scene.stream) == "NONE"

    def test_ended_on_the_wrong_stream(self, scene: Scene) -> None:
        raw, event = scene.raw, scene.rig.event()
        self.fork(scene)
        assert said(raw.cuStreamEndCapture(scene.other)) == "STREAM_CAPTURE_UNMATCHED"
        assert said(raw.cuEventRecord(event, scene.other)) == "STREAM_CAPTURE_INVALIDATED"


ASKED = {
    **dict.fromkeys(("cuStreamGetDevice", "cuStreamGetFlags", "cuStreamGetId"), "STREAM_CAPTURE_UNSUPPORTED"),
    **dict.fromkeys(("cuStreamGetCtx", "cuStreamGetPriority", "cuStreamIsCapturing"), "SUCCESS"),
}


@pytest.mark.parametrize("mode", [GLOBAL, RELAXED])
@pytest.mark.parametrize("name", ASKED)
def test_asking_a_captured_stream(scene: Scene, name: str, mode: int) -> None:
    """Another stream can be asked for anything."""

    def ask(scene: Scene) -> Answer:
        assert said(getattr(scene.raw, name)(scene.other)) == "SUCCESS"
        assert scene.rig.capture_status(scene.stream) == "ACTIVE"
        answer: Answer = getattr(scene.raw, name)(scene.stream)
        return answer

    check(scene, mode, ask, ASKED[name])


@modes
@pytest.mark.parametrize("name", RELAXED_MODE)
def test_a_relaxed_thread_makes_any_call_beside_a_capture_on_another_thread(scene: Scene, name: str, mode: int) -> None:
    rig, raw = scene.rig, scene.raw

    def call() -> str:
        value(raw.cuCtxSetCurrent(rig.context))
        value(raw.cuThreadExchangeStreamCaptureMode(raw.CUstreamCaptureMode(RELAXED)))
        return said(RELAXED_MODE[name](scene))

    rig.begin_capture(scene.stream, mode)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(call).result() == "SUCCESS"
    assert said(rig.end_capture(scene.stream)) == "SUCCESS"


@pytest.mark.parametrize("mode", [0, 1])
def test_a_thread_in_relaxed_mode_breaks_no_capture(rig: Rig, mode: int) -> None:
    captured, stream, pool = rig.stream(), rig.stream(), rig.pool()
    pointer = rig.allocate(pool, 64, stream)
    rig.begin_capture(captured, mode)
    before = value(rig.raw.cuThreadExchangeStreamCaptureMode(rig.raw.CUstreamCaptureMode(2)))
    assert before.name == "CU_STREAM_CAPTURE_MODE_GLOBAL"
    assert said(rig.raw.cuMemFreeAsync(pointer, stream)) == "SUCCESS"
    assert rig.used(pool) == 0
    assert said(rig.raw.cuMemPoolTrimTo(pool, 0)) == "SUCCESS"
    value(rig.raw.cuThreadExchangeStreamCaptureMode(before))
    assert said(rig.end_capture(captured)) == "SUCCESS"


@pytest.mark.parametrize("call", ["free on another stream", "destroy a pool"])
def test_calls_that_break_a_capture_elsewhere(rig: Rig, call: str) -> None:
    captured, stream, pool = rig.stream(), rig.stream(), rig.disown(rig.pool())
    pointer = rig.allocate(rig.pool(), 64, stream)
    rig.begin_capture(captured)
    answer = rig.raw.cuMemFreeAsync(pointer, stream) if "free" in call else rig.raw.cuMemPoolDestroy(pool)
    assert said(answer) == "STREAM_CAPTURE_UNSUPPORTED"
    assert said(rig.end_capture(captured)) == "STREAM_CAPTURE_INVALIDATED"
    value(rig.raw.cuMemPoolDestroy(pool))


class TestEvents:
    def stale(self, rig: Rig, stream: Any) -> Any:
        """An event that was recorded in a capture last, which has ended."""
        event = rig.event()
        rig.begin_capture(stream, 2)
        value(rig.raw.cuEventRecord(event, stream))
        value(rig.end_capture(stream))
        return event

    def test_of_a_capture_that_has_ended(self, rig: Rig) -> None:
        stream = rig.stream()
        event = self.stale(rig, stream)
        assert said(rig.raw.cuEventQuery(event)) == "INVALID_VALUE"
        assert said(rig.raw.cuEventSynchronize(event)) == "INVALID_VALUE"
        assert said(rig.raw.cuStreamWaitEvent(stream, event, 0)) == "INVALID_VALUE"
        rig.begin_capture(stream, 2)
        assert said(rig.raw.cuStreamWaitEvent(stream, event, 0)) == "INVALID_VALUE"
        assert said(rig.end_capture(stream)) == "STREAM_CAPTURE_INVALIDATED"

    def test_of_several_processes(self, rig: Rig) -> None:
        stream, event = rig.stream(), rig.event(6)
        rig.begin_capture(stream, 2)
        assert said(rig.raw.cuEventRecord(event, stream)) == "STREAM_CAPTURE_UNSUPPORTED"
        assert said(rig.end_capture(stream)) == "SUCCESS"
        rig.begin_capture(stream, 2)
        assert said(rig.raw.cuStreamWaitEvent(stream, event, 0)) == "STREAM_CAPTURE_UNSUPPORTED"
        assert said(rig.end_capture(stream)) == "STREAM_CAPTURE_INVALIDATED"

    def test_of_elsewhere(self, rig: Rig) -> None:
        stream, event = rig.stream(), rig.event()
        assert said(rig.raw.cuStreamWaitEvent(stream, event, 1)) == "ILLEGAL_STATE"
        rig.begin_capture(stream, 2)
        assert said(rig.raw.cuStreamWaitEvent(stream, event, 1)) == "SUCCESS"


def test_a_fill_needs_its_memory_where_the_graph_is_instantiated(rig: Rig) -> None:
    stream, pool = rig.stream(), rig.pool()
    pointer = rig.allocate(pool, 64, stream)
    rig.begin_capture(stream, 2)
    value(rig.raw.cuMemsetD8Async(pointer, 1, 64, stream))
    graph = value(rig.end_capture(stream))
    rig.free(pointer, stream)
    assert said(rig.raw.cuGraphInstantiate(graph, 0)) == "INVALID_VALUE"


def test_a_fill_of_nothing_is_no_node(rig: Rig) -> None:
    stream = rig.stream()
    rig.begin_capture(stream, 2)
    value(rig.raw.cuMemsetD8Async(rig.plain(64), 1, 0, stream))
    assert value(rig.raw.cuGraphGetNodes(value(rig.end_capture(stream))))[1] == 0


def test_a_pool_that_can_be_exported_is_not_allocated_from(rig: Rig) -> None:
    stream, pool = rig.stream(), rig.pool(handle_types=1)
    rig.begin_capture(stream, 2)
    assert said(rig.raw.cuMemAllocFromPoolAsync(64, pool, stream)) == "NOT_SUPPORTED"


def test_what_another_graph_allocates_can_be_freed(rig: Rig) -> None:
    stream, pool = rig.stream(), rig.pool()
    rig.begin_capture(stream, 2)
    pointer = int(value(rig.raw.cuMemAllocFromPoolAsync(64, pool, stream)))
    first = rig.instantiate(value(rig.end_capture(stream)))
    rig.begin_capture(stream, 2)
    assert said(rig.raw.cuMemFreeAsync(pointer, stream)) == "SUCCESS"
    second = rig.instantiate(value(rig.end_capture(stream)))
    value(rig.raw.cuGraphLaunch(first, stream))
    value(rig.raw.cuGraphLaunch(second, stream))
    value(rig.raw.cuStreamSynchronize(stream))
    assert said(rig.raw.cuMemFreeAsync(pointer, stream)) == "INVALID_VALUE"


def test_elapsed_time_of_a_captured_event(scene: Scene) -> None:
    # it breaks no capture, and comes before the question whether an event keeps time
    scene.rig.begin_capture(scene.stream, RELAXED)
    value(scene.raw.cuEventRecord(scene.event, scene.stream))
    assert said(scene.raw.cuEventElapsedTime(scene.event, scene.rig.event())) == "CAPTURED_EVENT"
    assert said(scene.rig.end_capture(scene.stream)) == "SUCCESS"


def test_a_broken_capture_s_event_and_stream(scene: Scene) -> None:
    rig, raw = scene.rig, scene.raw
    rig.begin_capture(scene.stream, RELAXED)
    value(raw.cuEventRecord(scene.event, scene.stream))
    assert said(raw.cuStreamQuery(scene.stream)) == "STREAM_CAPTURE_UNSUPPORTED"
    assert said(raw.cuEventSynchronize(scene.event)) == "INVALID_VALUE"
    assert said(raw.cuStreamGetCtx(scene.stream)) == "STREAM_CAPTURE_INVALIDATED"
    assert said(rig.end_capture(scene.stream)) == "STREAM_CAPTURE_INVALIDATED"


def test_a_fill_of_more_than_4_kib_changes_the_flags_of_the_context(rig: Rig) -> None:
    def flags_after(size: int) -> int:
        stream = rig.stream()
        rig.begin_capture(stream, RELAXED)
        value(rig.raw.cuMemsetD8Async(rig.plain(8192), 1, size, stream))
        rig.instantiate(value(rig.end_capture(stream)))
        return int(value(rig.raw.cuCtxGetFlags()))

    before = int(value(rig.raw.cuCtxGetFlags()))
    assert flags_after(4096) == before
    assert flags_after(4097) == before | 0x10
    # nobody has set it
    assert int(value(rig.raw.cuDevicePrimaryCtxGetState(0))[0]) & 0x10 == 0


def test_a_fill_is_instantiated_only_where_one_allocation_is(in_new_process: Callable[..., str]) -> None:
    """In a process with a long history the driver has ended in this call, by a segmentation fault."""
    assert in_new_process(_instantiates_a_fill_of_freed_memory) == "INVALID_VALUE"


def _instantiates_a_fill_of_freed_memory(rig: Rig) -> str:
    pool, stream, captured = rig.pool(UINT64_MAX), rig.stream(), rig.stream()
    pointer = rig.allocate(pool, MiB, stream)
    rig.begin_capture(captured, RELAXED)
    value(rig.raw.cuMemsetD8Async(pointer, 1, MiB, captured))
    graph = value(rig.end_capture(captured))
    rig.free(pointer, stream)
    assert rig.allocate(pool, 64, stream) == pointer
    return said(rig.raw.cuGraphInstantiate(graph, 0))
