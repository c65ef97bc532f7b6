"""Streams and events: what waits for what, default streams, host functions and the calls in them, attributes."""

import ctypes
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from streamalloc.simulator import DeadlockError
from tests.facts.enums import DEVICE, HOST, HOST_NUMA, LEGACY, NON_BLOCKING, TIMED
from tests.facts.pool_programs import Program
from tests.facts.support import PAGE, UNRESERVED, Rig, said, value
from tests.support import eventually, in_threads


class TestCreation:
    def test_flags(self, rig: Rig) -> None:
        raw = rig.raw
        streams = [rig.stream(0), rig.stream(1), *map(raw.CUstream, (0, 1, 2))]
        assert [value(raw.cuStreamGetFlags(stream)) for stream in streams] == [0, 1, 0, 0, 0]
        assert [said(raw.cuStreamCreate(flags)) for flags in (2, 3, 99)] == ["INVALID_VALUE"] * 3

    def test_flags_of_events(self, rig: Rig) -> None:
        assert all(int(rig.event(flags)) for flags in (0, 1, 2, 3, 6, 7))
        # 4 is interprocess, which has to come with 2, no timing.
        assert [said(rig.raw.cuEventCreate(flags)) for flags in (4, 8, 99)] == ["INVALID_VALUE"] * 3

    def test_priority_out_of_range_is_clamped(self, rig: Rig) -> None:
        streams = rig.stream(), rig.own_stream(rig.raw.cuStreamCreateWithPriority(NON_BLOCKING, -99))
        assert [value(rig.raw.cuStreamGetPriority(stream)) for stream in streams] == [0, -5]

    def test_context_and_device(self, rig: Rig) -> None:
        stream = rig.stream()
        for one in (stream, LEGACY):
            assert int(value(rig.raw.cuStreamGetCtx(one))) == int(rig.context)
        assert int(value(rig.raw.cuStreamGetDevice(stream))) == 0

    def test_ids(self, rig: Rig) -> None:
        raw = rig.raw
        streams = [LEGACY, raw.CUstream(1), rig.per_thread, rig.stream(), rig.stream()]
        legacy, legacy_again, *others = [int(value(raw.cuStreamGetId(stream))) for stream in streams]
        assert legacy == legacy_again
        assert len({legacy, *others}) == 4

    def test_each_thread_has_a_default_stream_of_its_own(self, rig: Rig) -> None:
        """Also a thread to which the system gives the number of one that has ended."""
        seen: list[int] = []

        def ask() -> None:
            value(rig.raw.cuCtxSetCurrent(rig.context))
            seen.append(int(value(rig.raw.cuStreamGetId(rig.per_thread))))

        for _ in range(4):
            in_threads(ask)
        assert len({*seen, int(value(rig.raw.cuStreamGetId(rig.per_thread)))}) == 5


# The legacy stream waits for an event behind a gate.
HELD_LEGACY = "hold s, s>e, e>L, "
ORDER: dict[str, str] = {
    "a stream is held by a word in memory": "idle s, hold s, held s, open, sync s, idle s",
    "a stream waits for an event of another": "hold s, s>e, e>b, held b, open",
    "a wait for an event never recorded is none": "e>b, idle b, b>e",
    "an event never recorded has happened": "done e, await e",
    "an event behind a gate": "hold s, s>e, pending e, open, sync s, done e",
    "an event destroyed while a stream waits for it": "hold s, s>e, e>b, drop e, held b, open, sync_all, idle b",
    "the legacy stream with work while a blocking stream is held": "hold b, fill L, held L",
    "the legacy stream with no work of its own": "hold s, s>e, e>b, held L, idle T",
    "blocking streams wait for the legacy stream, others do not": (
        "hold b, fill L, fill b2, fill s, fill T, executes s, held b2, held T, open, executes T"
    ),
    "an event of the legacy stream waits for blocking streams": "hold b, L>e, held L, pending e, open, await e",
    "blocking streams wait for the event that the legacy stream waits for": HELD_LEGACY + "held L, fill b, held b",
    "a record without time is no work": HELD_LEGACY
    + "b>f, idle b, pending f, f>b, held b",  # it waits even for its own
    "a record is no work either where the event is pending": HELD_LEGACY + "b>e, idle b",
    "a record with time is work": HELD_LEGACY + "b>timed, held b",
    "a wait for what has happened is no work": "t>f, " + HELD_LEGACY + "f>b, idle b",
    "an interprocess event's records happen in turn": "hold s, s>shared, t>shared, held t",
    "those of another event do not": "hold s, s>e, t>e, executes t",
    # That cuCtxRecordEvent succeeds is a reading, what the event then stands for is the documentation's.
    "an event of a context": "C>e, await e, done e",
    "comes after blocking streams": "hold b, C>e, e>t, pending e, held t, open, await e",
    "comes after non-blocking streams": "hold s, C>e, e>t, pending e, held t, open, await e",
    "comes after destroyed blocking streams": "hold b, end b, C>e, pending e, open, await e",
    "comes after destroyed non-blocking streams": "hold s, end s, C>e, pending e, open, await e",
}


@pytest.mark.parametrize("name", ORDER)
def test_order(rig: Rig, name: str) -> None:
    """The legacy stream waits for blocking streams and they for it; others take no part."""
    Program(rig).run(ORDER[name])


def test_a_wait_keeps_the_recording_it_found(rig: Rig) -> None:
    Program(rig).run("s>e, e>t, hold s, s>e, executes t, pending e")


@pytest.mark.parametrize(
    ("location", "policies", "size", "held"),
    [
        pytest.param(DEVICE, "111", 2, False, id="known"),
        pytest.param(DEVICE, "111", 4, True, id="from the end"),
        pytest.param(DEVICE, "111", 40, True, id="growing"),
        pytest.param(DEVICE, "011", 4, False, id="from the end, not looking"),
        pytest.param(DEVICE, "011", 40, False, id="growing, not looking"),
        pytest.param(HOST_NUMA, "111", 2, False, id="known to the host"),
        pytest.param(HOST_NUMA, "111", 4, True, id="from the end for the host"),
    ],
)
def test_an_allocation_is_work_where_it_looks_at_other_streams(
    rig: Rig, location: int, policies: str, size: int, held: bool
) -> None:
    """The case of a pool without free memory whose policy is to follow events."""
    program = Program(rig, policies=policies, location=location)
    program.run(f"a=b:2, c=b:2, a>b, sync_all, {HELD_LEGACY} d=b:{size}, {'held' if held else 'executes'} b")


class TestWaiting:
    def test_work_executes_while_the_host_makes_no_calls(self, rig: Rig) -> None:
        stream, gate, word = rig.stream(), rig.gate(), rig.pinned(64)
        seen = ctypes.c_uint32.from_address(int(word))
        gate.hold(stream)
        value(rig.raw.cuStreamWriteValue32(stream, int(word), 5, 0))
        time.sleep(0.01)
        assert seen.value == 0
        gate.open()
        assert eventually(lambda: seen.value == 5)

    @pytest.mark.parametrize("call", ["cuStreamSynchronize", "cuEventSynchronize"])
    def test_synchronize_waits(self, rig: Rig, call: str) -> None:
        stream, event, gate = rig.stream(), rig.event(), rig.gate()
        gate.hold(stream)
        value(rig.raw.cuEventRecord(event, stream))
        with gate.opening_after(0.05):
            assert said(getattr(rig.raw, call)(event if "Event" in call else stream)) == "SUCCESS"
            assert gate.is_open

    def test_flags_of_a_wait(self, rig: Rig) -> None:
        assert said(rig.raw.cuStreamWaitEvent(rig.stream(), rig.event(), 5)) == "INVALID_VALUE"

    def test_destroyed_with_work_pending(self, rig: Rig) -> None:
        raw, stream, gate, event, pointer = rig.raw, rig.stream(), rig.gate(), rig.event(), rig.plain(4096)
        gate.hold(stream)
        value(raw.cuMemsetD8Async(pointer, 0x5A, 64, stream))
        value(raw.cuEventRecord(event, stream))
        assert said(raw.cuStreamDestroy(rig.disown(stream))) == "SUCCESS"
        assert said(raw.cuEventQuery(event)) == "NOT_READY"
        gate.open()
        assert said(raw.cuEventSynchronize(event)) == "SUCCESS"
        assert rig.read(pointer, 64) == [0x5A] * 64


def _work_beside_a_held_stream(rig: Rig) -> tuple[bool, bool]:
    """Whether work on the legacy stream executes while a non-blocking stream is held, and whether that is held then."""
    pointer, stream, gate = rig.plain(64), rig.stream(), rig.gate()
    value(rig.raw.cuMemsetD8(pointer, 0, 64))  # loads the kernel, which would wait for the held stream
    gate.hold(stream)
    value(rig.raw.cuMemsetD8Async(pointer, 1, 64, LEGACY))
    found = rig.executed(LEGACY), rig.held(stream)
    gate.open()
    return found


def test_the_legacy_stream_waits_for_no_non_blocking_one(in_new_process: Callable[..., tuple[bool, bool]]) -> None:
    assert in_new_process(_work_beside_a_held_stream) == (True, True)


def test_a_host_function_runs_in_stream_order_with_its_argument(rig: Rig) -> None:
    raw, stream, entered, leave = rig.raw, rig.stream(), threading.Event(), threading.Event()
    calls: list[int] = []

    def function(argument: int) -> None:
        entered.set()
        leave.wait(5)
        calls.append(argument)

    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
    address = raw.CUhostFn(ctypes.cast(callback, ctypes.c_void_p).value)
    try:
        assert said(raw.cuLaunchHostFunc(stream, address, 5)) == "SUCCESS"
        assert entered.wait(5)
        assert rig.query(stream) == "NOT_READY"
    finally:
        leave.set()
        assert said(raw.cuStreamSynchronize(stream)) == "SUCCESS"
    assert calls == [5]


class TestMemoryOperations:
    def test_write_and_every_kind_of_wait(self, rig: Rig) -> None:
        raw, stream, pointer = rig.raw, rig.stream(), rig.plain(4096)
        assert said(raw.cuStreamWriteValue32(stream, int(pointer), 77, 0)) == "SUCCESS"
        for operand, comparison in ((0, 0), (77, 1), (64, 2), (1, 3)):  # at least, equal, and, nor
            assert said(raw.cuStreamWaitValue32(stream, int(pointer), operand, comparison)) == "SUCCESS"
        assert rig.executed(stream)
        assert rig.read(pointer, 4) == [77, 0, 0, 0]

    def test_what_is_refused(self, rig: Rig) -> None:
        raw, stream, plain, host = rig.raw, rig.stream(), int(rig.plain(64)), np.zeros(64, np.uint8)
        pooled = [int(rig.allocate(rig.pool(location=location), 64, stream)) for location in (DEVICE, HOST)]
        answers = [raw.cuStreamWaitValue32(stream, address, 0, 0) for address in (plain + 1, host.ctypes.data, *pooled)]
        answers += [raw.cuStreamWriteValue64(stream, plain + 4, 0, 0), raw.cuStreamWaitValue32(stream, plain, 0, 8)]
        assert [said(one) for one in answers] == ["INVALID_VALUE"] * 6


class TestElapsedTime:
    def test_of_events_without_time(self, rig: Rig) -> None:
        stream, start, end = rig.stream(), rig.event(TIMED), rig.event()
        assert said(rig.raw.cuEventElapsedTime(start, rig.event(TIMED))) == "INVALID_HANDLE"
        value(rig.raw.cuEventRecord(start, stream))
        value(rig.raw.cuEventRecord(end, stream))
        value(rig.raw.cuStreamSynchronize(stream))
        assert said(rig.raw.cuEventElapsedTime(start, end)) == "INVALID_HANDLE"

    def test_between_two_events(self, rig: Rig) -> None:
        """Not before both have happened; then both ways."""
        stream, start, end, gate = rig.stream(), rig.event(TIMED), rig.event(TIMED), rig.gate()
        value(rig.raw.cuEventRecord(start, stream))
        gate.hold(stream)
        value(rig.raw.cuEventRecord(end, stream))
        assert said(rig.raw.cuEventElapsedTime(start, end)) == "NOT_READY"
        gate.open()
        value(rig.raw.cuStreamSynchronize(stream))
        elapsed = value(rig.raw.cuEventElapsedTime(start, end))
        assert elapsed >= 0
        assert value(rig.raw.cuEventElapsedTime(end, start)) == -elapsed


WINDOW, POLICY, PRIORITY, DOMAIN_MAP, DOMAIN = 1, 3, 8, 9, 10  # CUstreamAttrID
FORMATS = {WINDOW: "=QQfii", POLICY: "=i", PRIORITY: "=i", DOMAIN_MAP: "=BB", DOMAIN: "=i"}
DEFAULTS = {WINDOW: (0, 0, 0.0, 0, 0), POLICY: (-1,), PRIORITY: (0,), DOMAIN_MAP: (0, 1), DOMAIN: (0,)}


def attribute(rig: Rig, number: int) -> Any:
    return rig.raw.CUstreamAttrID(number)


def read(rig: Rig, stream: Any, number: int) -> tuple[float, ...]:
    got = value(rig.raw.cuStreamGetAttribute(stream, attribute(rig, number)))
    return struct.unpack_from(FORMATS[number], ctypes.string_at(int(got.getPtr()), 64))


def write(rig: Rig, stream: Any, number: int, *given: float) -> str:
    wanted = rig.raw.CUstreamAttrValue()
    packed = struct.pack(FORMATS[number], *given).ljust(64, b"\0")
    ctypes.memmove(int(wanted.getPtr()), packed, 64)
    return said(rig.raw.cuStreamSetAttribute(stream, attribute(rig, number), wanted))


def on_both(rig: Rig, check: Callable[[Any], None]) -> None:
    """Check a stream and a new thread's own default stream, whose attributes no test has set."""

    def in_thread() -> None:
        value(rig.raw.cuCtxSetCurrent(rig.context))
        check(rig.per_thread)

    check(rig.stream())
    in_threads(in_thread)


@pytest.mark.usefixtures("same_architecture")
def test_default_attributes(rig: Rig) -> None:
    """Also of a default stream; other attributes are those of launches."""

    def check(stream: Any) -> None:
        assert {number: read(rig, stream, number) for number in FORMATS} == DEFAULTS
        for one in rig.raw.CUstreamAttrID:
            if int(one) not in FORMATS:
                assert said(rig.raw.cuStreamGetAttribute(stream, one)) == "INVALID_VALUE"

    on_both(rig, check)


ACCEPTED: list[tuple[int, tuple[float, ...], tuple[float, ...]]] = [
    *((POLICY, (1,), (1,)), (POLICY, (4,), (4,))),
    *((PRIORITY, (-5,), (-5,)), (PRIORITY, (-6,), (-5,)), (PRIORITY, (5,), (0,))),
    *((DOMAIN, (1,), (1,)), (DOMAIN_MAP, (2, 3), (2, 3))),
    (WINDOW, (UNRESERVED, 4096, 0.5, 2, 1), (UNRESERVED, 4096, 0.5, 2, 1)),
    (WINDOW, (0, 1 << 27, 1.0, 0, 0), (0, 1 << 27, 1.0, 0, 0)),
]
REFUSED: dict[int, list[tuple[float, ...]]] = {
    POLICY: [(0,), (5,)],
    DOMAIN: [(2,)],
    DOMAIN_MAP: [(0, 4)],
    WINDOW: [(0, 4096, 2.0, 2, 1), (0, 4096, -1.0, 2, 1), (0, 4096, 1.0, 1, 2), (0, 1 << 40, 1.0, 1, 0)],
}


@pytest.mark.usefixtures("same_architecture")
def test_attributes_that_can_be_set(rig: Rig) -> None:
    def check(stream: Any) -> None:
        for number, given, kept in ACCEPTED:
            assert write(rig, stream, number, *given) == "SUCCESS"
            assert read(rig, stream, number) == kept
            if number == PRIORITY:
                assert value(rig.raw.cuStreamGetPriority(stream)) == kept[0]

    on_both(rig, check)


@pytest.mark.usefixtures("same_architecture")
def test_attributes_that_cannot_be_set(rig: Rig) -> None:
    stream = rig.stream()
    for number, wrong in REFUSED.items():
        assert [write(rig, stream, number, *given) for given in wrong] == ["INVALID_VALUE"] * len(wrong)
        assert read(rig, stream, number) == DEFAULTS[number]


def test_copies_of_all_attributes(rig: Rig) -> None:
    raw, source, target = rig.raw, rig.stream(), rig.stream()
    write(rig, source, POLICY, 3)
    write(rig, source, PRIORITY, -2)
    write(rig, source, WINDOW, UNRESERVED, 4096, 0.5, 2, 1)
    assert said(raw.cuStreamCopyAttributes(target, source)) == "SUCCESS"
    assert [read(rig, target, number) for number in FORMATS] == [read(rig, source, number) for number in FORMATS]
    assert said(raw.cuStreamCopyAttributes(target, target)) == "SUCCESS"
    by_flags = (0, 0) if "cuCtxCreate_v4" in dir(raw) else (None, 0, 0)  # with parameters since CUDA 13
    other = value(raw.cuCtxCreate(*by_flags))
    elsewhere = value(raw.cuStreamCreate(1))
    rig.use(rig.context)
    assert said(raw.cuStreamCopyAttributes(elsewhere, source)) == "INVALID_VALUE"
    value(raw.cuCtxDestroy(other))


def test_neither_a_context_nor_a_capture_matters_to_attributes(rig: Rig) -> None:
    raw, stream, other = rig.raw, rig.stream(), rig.stream()

    def outside() -> None:
        assert read(rig, stream, PRIORITY) == (0,)
        assert write(rig, stream, POLICY, 2) == "SUCCESS"
        assert said(raw.cuStreamGetAttribute(LEGACY, attribute(rig, PRIORITY))) == "INVALID_CONTEXT"

    in_threads(outside)
    rig.begin_capture(stream)
    assert read(rig, stream, POLICY) == (2,)
    assert write(rig, stream, POLICY, 1) == "SUCCESS"
    assert said(raw.cuStreamCopyAttributes(other, stream)) == "SUCCESS"
    assert said(raw.cuStreamCopyAttributes(stream, other)) == "SUCCESS"
    assert rig.capture_status(stream) == "ACTIVE"


class TestCallbacks:
    def callback(self, rig: Rig, seen: list[tuple[int, int]]) -> tuple[Any, Any]:
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        function = kind(lambda stream, status, data: seen.append((status, data)))
        return function, rig.raw.CUstreamCallback(ctypes.cast(function, ctypes.c_void_p).value)

    def test_in_stream_order(self, rig: Rig) -> None:
        raw, stream, gate, seen = rig.raw, rig.stream(), rig.gate(), list[tuple[int, int]]()
        kept, handle = self.callback(rig, seen)
        gate.hold(stream)
        assert said(raw.cuStreamAddCallback(stream, handle, 7, 0)) == "SUCCESS"
        assert not seen
        gate.open()
        value(raw.cuStreamSynchronize(stream))
        assert seen == [(0, 7)]
        assert said(raw.cuStreamAddCallback(stream, handle, 7, 1)) == "INVALID_VALUE"
        del kept

    def test_not_during_a_capture(self, rig: Rig) -> None:
        stream = rig.stream()
        kept, handle = self.callback(rig, [])
        rig.begin_capture(stream)
        assert said(rig.raw.cuStreamAddCallback(stream, handle, 7, 0)) == "STREAM_CAPTURE_UNSUPPORTED"
        assert rig.capture_status(stream) == "INVALIDATED"
        del kept


# Calls and their arguments: numbers, or what ``Calls`` has of these names.
MADE = """
    cuInit 0, cuDriverGetVersion, cuGetErrorName code, cuThreadExchangeStreamCaptureMode mode,
    cuMemsetD8Async memory 1 64 stream, cuStreamDestroy new_stream, cuStreamQuery stream, cuStreamSynchronize stream,
    cuStreamWaitEvent stream done 0, cuStreamGetCtx stream, cuStreamGetFlags stream, cuStreamGetPriority stream,
    cuStreamGetId stream, cuStreamIsCapturing stream, cuStreamWriteValue32 stream host 1 0,
    cuStreamWaitValue32 stream host 0 0, cuEventDestroy new_event, cuEventRecord event stream, cuEventQuery done,
    cuEventSynchronize done, cuEventElapsedTime done done, cuGraphLaunch ready stream, cuLaunchHostFunc stream nothing 0
    """
NOT_PERMITTED = """
    cuDeviceGet 0, cuDeviceGetCount, cuDeviceTotalMem 0, cuDeviceCanAccessPeer 0 0, cuDevicePrimaryCtxGetState 0,
    cuDevicePrimaryCtxRetain 0, cuDevicePrimaryCtxRelease 0, cuCtxGetCurrent, cuCtxGetDevice, cuCtxPushCurrent context,
    cuCtxPopCurrent, cuCtxSetCurrent context, cuCtxSynchronize, cuCtxRecordEvent context event, cuMemGetInfo,
    cuMemAlloc 64, cuMemFree memory, cuMemHostAlloc 64 0, cuMemFreeHost host, cuMemHostRegister host 4096 0,
    cuPointerGetAttribute attribute memory, cuMemGetAddressRange memory, cuMemcpyHtoD memory host 64,
    cuMemcpyAsync memory host 64 stream, cuMemcpyHtoDAsync memory host 64 stream, cuMemsetD8 memory 1 64,
    cuMemAllocAsync 64 stream, cuMemAllocFromPoolAsync 64 pool stream, cuMemFreeAsync pooled stream,
    cuMemPoolDestroy pool, cuMemPoolTrimTo pool 0, cuDeviceGetMemPool 0, cuDeviceSetMemPool 0 pool,
    cuMemRelease physical, cuMemAddressReserve 2097152 0 0 0, cuMemAddressFree reserved 2097152,
    cuMemUnmap reserved 2097152, cuStreamCreate 1, cuStreamCreateWithPriority 1 0, cuEventCreate 0, cuGraphCreate 0,
    cuGraphInstantiate graph 0, cuGraphExecDestroy ready, cuGraphDestroy graph, cuDeviceGraphMemTrim 0
    """


class Calls:
    """Makes calls in host functions, with what they take."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.raw, self.context = rig, rig.raw, rig.context
        self.own, self.stream = rig.stream(), rig.stream()
        self.code, self.mode = self.raw.CUresult(1), self.raw.CUstreamCaptureMode(0)
        self.attribute, self.nothing = self.raw.CUpointer_attribute(2), self.function(lambda: None)
        self.new_stream, self.new_event = value(self.raw.cuStreamCreate(1)), value(self.raw.cuEventCreate(0))
        self.pool, self.event, self.done = rig.pool(), rig.event(0), rig.event(0)
        value(self.raw.cuEventRecord(self.done, self.stream))
        self.memory, self.host, self.physical = rig.plain(PAGE), int(rig.pinned(4096)), rig.memory()
        self.pooled, self.reserved = rig.allocate(self.pool, PAGE, self.stream), rig.reserve(PAGE)
        rig.begin_capture(self.stream)
        value(self.raw.cuMemsetD8Async(self.memory, 1, 64, self.stream))
        self.graph = value(rig.end_capture(self.stream))
        self.ready = rig.instantiate(self.graph)
        rig.synchronize()

    def function(self, body: Callable[[], object]) -> Any:
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: body())
        self.rig.own(function, lambda _: None)  # kept until the end
        return self.raw.CUhostFn(ctypes.cast(function, ctypes.c_void_p).value)

    def inside(self, body: Callable[[], str]) -> str:
        """Answer of the body in a host function."""
        found: list[str] = []
        value(self.raw.cuLaunchHostFunc(self.own, self.function(lambda: found.append(body())), 0))
        value(self.raw.cuStreamSynchronize(self.own))
        self.rig.synchronize()
        return found[0]

    def call(self, name: str, *words: str) -> str:
        arguments = [int(word) if word.isdigit() else getattr(self, word) for word in words]
        return self.inside(lambda: said(getattr(self.raw, name)(*arguments)))


@pytest.fixture
def calls(rig: Rig) -> Calls:
    return Calls(rig)


def test_calls_in_a_host_function(calls: Calls) -> None:
    for text, expected in ((MADE, "SUCCESS"), (NOT_PERMITTED, "NOT_PERMITTED")):
        for call in text.split(","):
            assert calls.call(*call.split()) == expected, call
    calls.rig.synchronize()


def test_arguments_of_refused_calls_are_not_looked_at(calls: Calls) -> None:
    assert calls.inside(lambda: said(calls.raw.cuMemFree(12345))) == "NOT_PERMITTED"
    assert calls.inside(lambda: said(calls.raw.cuMemsetD8Async(0, 1, 64, calls.stream))) == "INVALID_VALUE"


def test_the_stream_of_a_host_function_is_not_ready(calls: Calls) -> None:
    assert calls.inside(lambda: said(calls.raw.cuStreamQuery(calls.own))) == "NOT_READY"


@pytest.mark.simulated_only("the real driver waits for ever")
def test_a_host_function_that_waits_for_its_own_stream(calls: Calls) -> None:
    def wait() -> str:
        with pytest.raises(DeadlockError, match="own stream"):
            calls.raw.cuStreamSynchronize(calls.own)
        return "refused"

    assert calls.inside(wait) == "refused"


def test_callbacks_and_host_nodes(calls: Calls) -> None:
    raw, found = calls.raw, list[str]()
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(
        lambda *_: found.append(said(raw.cuMemAlloc(64)))
    )
    callback = raw.CUstreamCallback(ctypes.cast(function, ctypes.c_void_p).value)
    value(raw.cuStreamAddCallback(calls.own, callback, 0, 0))
    value(raw.cuStreamSynchronize(calls.own))
    calls.rig.begin_capture(calls.own)
    value(raw.cuLaunchHostFunc(calls.own, calls.function(lambda: found.append(said(raw.cuMemAlloc(64)))), 0))
    graph = value(calls.rig.end_capture(calls.own))
    ready = calls.rig.own(value(raw.cuGraphInstantiate(graph, 0)), raw.cuGraphExecDestroy)
    value(raw.cuGraphLaunch(ready, calls.own))
    value(raw.cuStreamSynchronize(calls.own))
    assert found == ["NOT_PERMITTED", "NOT_PERMITTED"]
