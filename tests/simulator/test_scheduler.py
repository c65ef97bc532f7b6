"""Order and asynchrony: clocks, the worker, the scheduler by chance; graphs, and who has which memory."""

import ctypes
import errno
import functools
import random
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from streamalloc.simulator import call_lock
from tests.facts.enums import BLOCKING
from tests.facts.support import MiB, Rig
from tests.facts.support import value as ok
from tests.simulator.support import new_rig
from tests.support import KEEP, bytecodes, eventually, in_a_thread, in_threads

pytestmark = pytest.mark.simulated_only("tests of the simulated driver itself")


def test_an_event_of_a_context_comes_after_all_its_streams_and_holds_none_of_them(rig: Rig) -> None:
    d, word, event = rig.raw, rig.word(), rig.event()
    held, destroyed, free, waiting = rig.stream(), rig.stream(), rig.stream(BLOCKING), rig.stream()
    second = rig.word()
    rig.hold(held, word)
    rig.hold(destroyed, second)
    ok(d.cuStreamDestroy(destroyed))
    ok(d.cuCtxRecordEvent(rig.context, event))
    ok(d.cuStreamWaitEvent(waiting, event, 0))
    target = ok(d.cuMemAlloc(4))
    for stream in (free, 0):
        ok(d.cuMemsetD8Async(target, 1, 4, stream))
        ok(d.cuStreamSynchronize(stream))
    for gate in (word, second):
        assert d.cuEventQuery(event)[0] == d.CUresult.CUDA_ERROR_NOT_READY
        assert rig.query(waiting) == "NOT_READY"
        gate.value = 1
    ok(d.cuEventSynchronize(event))
    ok(d.cuStreamSynchronize(waiting))


@pytest.mark.parametrize("seed", range(4))
def test_a_synchronised_context_has_seen_its_events(seed: int) -> None:
    rig = new_rig(seed=seed)
    d, event, stream = rig.raw, rig.event(), rig.stream()
    ok(d.cuMemsetD8Async(ok(d.cuMemAlloc(4)), 1, 4, stream))
    ok(d.cuCtxRecordEvent(rig.context, event))
    ok(d.cuCtxSynchronize())
    ok(d.cuEventQuery(event))


def test_the_device_goes_on_after_an_error_of_the_operating_system(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of a process without a free file descriptor, in a look at a word."""
    d, waiting, copying = rig.raw, rig.stream(), rig.stream()
    errors: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    word, found = rig.word(), d._machine.banks.is_mapped

    def is_mapped(*args: Any, **named: Any) -> bool:
        if not errors and threading.current_thread() is not threading.main_thread():
            raise OSError(errno.EMFILE, "no free file descriptor")
        return bool(found(*args, **named))

    monkeypatch.setattr(d._machine.banks, "is_mapped", is_mapped)
    rig.hold(waiting, word)
    assert eventually(lambda: len(errors) == 1)
    target = ok(d.cuMemAlloc(64 * MiB))
    ok(d.cuMemsetD8Async(target, 1, 64 * MiB, copying))  # in several steps, which only the device makes
    assert rig.executed(copying)
    word.value = 1
    ok(d.cuStreamSynchronize(waiting))


def test_a_slow_host_function_stops_no_other_stream(rig: Rig) -> None:
    d, slow, quick = rig.raw, rig.stream(), rig.stream()
    let_go = threading.Event()
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: let_go.wait(10) and None)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    ok(d.cuLaunchHostFunc(slow, d.CUhostFn(address), 0))
    target = ok(d.cuMemAlloc(4096))
    ok(d.cuMemsetD8Async(target, 5, 4096, quick))
    ok(d.cuStreamSynchronize(quick))
    assert rig.query(slow) == "NOT_READY"
    let_go.set()
    ok(d.cuStreamSynchronize(slow))


def test_a_long_copy_does_not_stall_the_gates_of_others(rig: Rig) -> None:
    d, long, gated, word, flag = rig.raw, rig.stream(), rig.stream(), rig.word(), rig.word()
    memory = ok(d.cuMemAlloc(128 * MiB))
    rig.hold(gated, word)
    ok(d.cuStreamWriteValue32(gated, ctypes.addressof(flag), 1, 0))
    ok(d.cuMemsetD8Async(memory, 1, 128 * MiB, long))
    word.value = 1
    ok(d.cuStreamSynchronize(gated))
    assert flag.value == 1
    ok(d.cuStreamSynchronize(long))
    assert ctypes.string_at(int(memory) + 128 * MiB - 1, 1) == b"\1"
    ok(d.cuMemFree(memory))


def test_a_thread_without_a_context_has_no_per_thread_stream(rig: Rig) -> None:
    d = rig.raw
    ((answer, _),) = in_threads(lambda: d.cuStreamGetId(d.CUstream(2)))
    assert answer == d.CUresult.CUDA_ERROR_INVALID_CONTEXT


def test_one_thread_runs_the_work_of_all_streams(rig: Rig) -> None:
    streams, word = [rig.stream() for _ in range(8)], rig.word()
    before = threading.active_count()
    for stream in streams:
        rig.hold(stream, word)
    assert threading.active_count() <= before + 1
    word.value = 1
    for stream in streams:
        ok(rig.raw.cuStreamSynchronize(stream))


@pytest.mark.parametrize("seed", range(4))
def test_chance_keeps_the_order_that_cuda_promises(seed: int) -> None:
    rig = new_rig(seed=seed)
    d, one, two, event = rig.raw, rig.stream(), rig.stream(), rig.event()
    memory = ok(d.cuMemAlloc(256))
    for value in range(1, 6):
        ok(d.cuMemsetD8Async(memory, value, 256, one))
    ok(d.cuEventRecord(event, one))
    ok(d.cuStreamWaitEvent(two, event, 0))
    seen = np.zeros(256, np.uint8)
    ok(d.cuMemcpyDtoHAsync(seen, memory, 256, two))
    assert (seen == 5).all()


def test_chance_shows_a_missing_dependency() -> None:
    stale = 0
    for seed in range(8):
        rig = new_rig(seed=seed)
        d, one, two = rig.raw, rig.stream(), rig.stream()
        memory = ok(d.cuMemAlloc(64))
        ok(d.cuMemsetD8Async(memory, 1, 64, one))
        seen = np.zeros(64, np.uint8)
        ok(d.cuMemcpyDtoHAsync(seen, memory, 64, two))  # a mistake: nothing orders it after the fill
        stale += seen[0] == 0
    assert stale


def test_nothing_runs_in_the_callers_thread_under_chance() -> None:
    rig = new_rig(seed=1)
    call_lock.enter()
    stream = rig.stream()
    memory = ok(rig.raw.cuMemAlloc(64))
    ok(rig.raw.cuMemsetD8Async(memory, 1, 64, stream))
    assert rig.query(stream) == "NOT_READY"
    call_lock.leave()
    ok(rig.raw.cuStreamSynchronize(stream))
    assert rig.query(stream) == "SUCCESS"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("policies", ["000", "100", "110", "111"])
def test_memory_is_never_reused_too_early(policies: str, seed: int) -> None:
    rig = new_rig(seed=seed)
    d, pool = rig.raw, rig.pool(KEEP, policies, max_size=32 * MiB)
    streams = [rig.stream(), rig.stream(), rig.stream(BLOCKING), 0]
    dice = random.Random(seed)
    live: list[tuple[int, int, object]] = []
    expected: list[tuple[int, npt.NDArray[np.uint8]]] = []
    sizes = (3 * MiB, 5 * MiB, 9 * MiB)
    for turn in range(60):
        stream = dice.choice(streams)
        action = dice.random()
        if action < 0.5:
            size = dice.choice(sizes)
            answer = d.cuMemAllocFromPoolAsync(size, pool, stream)
            if answer[0] == 0:
                memory, value = int(answer[1]), turn + 1
                ok(d.cuMemsetD8Async(memory, value, 64, stream))
                live.append((memory, value, stream))
        elif action < 0.8 and live:
            memory, value, owner = live.pop(dice.randrange(len(live)))
            seen = np.ctypeslib.as_array((ctypes.c_uint8 * 64).from_address(ok(d.cuMemHostAlloc(64, 0))))
            ok(d.cuMemcpyDtoHAsync(seen.ctypes.data, memory, 64, owner))
            rig.free(memory, owner)
            expected.append((value, seen))
        elif action < 0.9:
            event = rig.event()
            ok(d.cuEventRecord(event, stream))
            if stream:
                ok(d.cuStreamWaitEvent(dice.choice(streams[:2]), event, 0))
        else:
            ok(d.cuStreamSynchronize(stream))
    ok(d.cuCtxSynchronize())
    assert expected
    for value, seen in expected:
        assert (seen == value).all()


@pytest.mark.parametrize("flags", [0, 1], ids=["blocking", "non-blocking"])
@pytest.mark.parametrize("busy", [False, True])
def test_nothing_is_kept_of_streams_that_are_gone(flags: int, busy: bool, rig: Rig) -> None:
    """Whatever they waited for, and whoever waited for them."""
    d, keeper, other, pool = rig.raw, rig.stream(), rig.stream(), rig.pool()
    machine = d._machine

    def kept() -> int:
        context, scheduler = machine.devices[0].primary, machine.scheduler
        clocks = [stream.clock for stream in scheduler.streams.values()]
        waits = [len(one.after) for stream in scheduler.streams.values() for one in stream.operations]
        sizes = [len(scheduler.streams), len(scheduler.host), len(context.retired), *map(len, clocks), *waits]
        return sum(sizes)

    def round_trip() -> None:
        stream, event = ok(d.cuStreamCreate(flags)), ok(d.cuEventCreate(2))
        address = ok(d.cuMemAllocFromPoolAsync(4096, pool, stream))
        gate = rig.gate() if busy else None
        if gate is not None:
            gate.hold(stream)
        ok(d.cuMemFreeAsync(address, stream))
        ok(d.cuEventRecord(event, stream))
        ok(d.cuStreamWaitEvent(keeper, event, 0))
        ok(d.cuEventRecord(event, keeper))
        ok(d.cuStreamWaitEvent(stream, event, 0))
        ok(d.cuStreamDestroy(stream))
        if gate is not None:
            gate.open()
        ok(d.cuStreamSynchronize(keeper))
        ok(d.cuStreamWaitEvent(other, event, 0))
        ok(d.cuEventDestroy(event))

    for _ in range(3):
        round_trip()
    before = kept()
    for _ in range(200):
        round_trip()
    assert kept() <= before + 60


@pytest.mark.parametrize("flags", [0, 1], ids=["blocking", "non-blocking"])
@in_a_thread
def test_a_stream_costs_the_same_however_many_there_are(flags: int) -> None:
    """To destroy one does not look at all others."""
    d = new_rig().raw

    def cost(count: int) -> int:
        streams = [ok(d.cuStreamCreate(flags)) for _ in range(count)]
        total = sum(bytecodes(functools.partial(d.cuStreamDestroy, stream)) for stream in streams[:20])
        for stream in streams[20:]:
            ok(d.cuStreamDestroy(stream))
        return total

    assert cost(2000) < 2 * cost(100)


STEP = 32 * MiB


def reserved(rig: Rig) -> int:
    """Graph memory of device 0 in steps."""
    d = rig.raw
    size = int(ok(d.cuDeviceGetGraphMemAttribute(0, d.CUgraphMem_attribute.CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT)))
    assert size % STEP == 0
    return size // STEP


def begin(rig: Rig, stream: Any) -> None:
    ok(rig.raw.cuStreamBeginCapture(stream, rig.raw.CUstreamCaptureMode(2)))


class Written:
    """A graph that allocates, fills, waits for a word, copies what is there then to ``out``, and frees."""

    def __init__(self, rig: Rig, value: int, size: int = MiB) -> None:
        d, stream = rig.raw, rig.stream()
        self.value, self._driver = value, d
        self.gate, self._out = rig.word(), rig.word()
        begin(rig, stream)
        self.address = int(ok(d.cuMemAllocAsync(size, stream)))
        ok(d.cuMemsetD8Async(self.address, value, size, stream))
        rig.hold(stream, self.gate)
        ok(d.cuMemcpyDtoHAsync(ctypes.addressof(self._out), self.address + size - 4, 4, stream))
        ok(d.cuMemFreeAsync(self.address, stream))
        self.graph = ok(d.cuStreamEndCapture(stream))
        self.executable = self.instantiate()
        self.gate.value = 1

    def instantiate(self) -> Any:
        return ok(self._driver.cuGraphInstantiate(self.graph, 0))

    def launch(self, stream: Any) -> None:
        ok(self._driver.cuGraphLaunch(self.executable, stream))

    @property
    def right(self) -> bool:
        """Whether what the latest launch copied is what it had written."""
        seen, self._out.value = self._out.value, 0
        return seen == self.value * 0x01010101


def order(rig: Rig, stream: Any, after: Any) -> None:
    event = rig.event()
    ok(rig.raw.cuEventRecord(event, after))
    ok(rig.raw.cuStreamWaitEvent(stream, event, 0))


class TestLaunches:
    def test_of_one_graph_take_turns(self, rig: Rig) -> None:
        d, one, two, word, graph = rig.raw, rig.stream(), rig.stream(), rig.word(), Written(rig, 1)
        rig.hold(one, word)
        graph.launch(one)
        ok(d.cuGraphExecDestroy(graph.executable))
        graph.executable = graph.instantiate()
        graph.launch(two)
        assert rig.query(two) == "NOT_READY"
        word.value = 1
        ok(d.cuStreamSynchronize(two))
        assert graph.right

    def test_that_are_queued_outlive_the_graph(self, rig: Rig) -> None:
        d, stream, graph, machine = rig.raw, rig.stream(), Written(rig, 1), rig.raw._machine
        graph.gate.value = 0
        graph.launch(stream)
        ok(d.cuGraphExecDestroy(graph.executable))
        ok(d.cuGraphDestroy(graph.graph))
        ok(d.cuDeviceGraphMemTrim(0))
        assert reserved(rig) == 1, "it is in use"
        graph.gate.value = 1
        ok(d.cuStreamSynchronize(stream))
        assert graph.right
        ok(d.cuDeviceGraphMemTrim(0))
        assert reserved(rig) == 0
        assert not machine.devices[0].graphs.memories

    def test_for_which_there_is_no_memory(self) -> None:
        rig = new_rig(memory=2 * STEP + 2 * MiB)  # with what the first graph takes
        d, stream, graph = rig.raw, rig.stream(), Written(rig, 1, 40 * MiB)
        plain = ok(d.cuMemAlloc(STEP))
        assert d.cuGraphLaunch(graph.executable, stream)[0] == d.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        ok(d.cuMemFree(plain))
        graph.launch(stream)
        ok(d.cuStreamSynchronize(stream))
        assert graph.right


def test_many_graphs_that_come_and_go_use_no_addresses_up(rig: Rig) -> None:
    d, stream = rig.raw, rig.stream()
    for _ in range(50):
        graph = Written(rig, 1)
        graph.launch(stream)
        ok(d.cuGraphExecDestroy(graph.executable))
        ok(d.cuGraphDestroy(graph.graph))
    assert len(d._machine.devices[0].graphs.memories) <= 1
    assert reserved(rig) == 1


@pytest.mark.parametrize("seed", range(12))
def test_no_launch_sees_the_memory_of_another(seed: int) -> None:
    rig, dice = new_rig(seed=seed), random.Random(seed)
    d = rig.raw
    streams = [rig.stream(), rig.stream(), rig.stream(BLOCKING), 0]
    graphs = [Written(rig, value, dice.choice([4, MiB, 33 * MiB])) for value in range(1, 6)]
    launched: set[int] = set()
    for _ in range(40):
        action = dice.random()
        if action < 0.6:
            number = dice.randrange(len(graphs))
            graphs[number].launch(dice.choice(streams))
            launched.add(number)
        elif action < 0.8:
            order(rig, dice.choice(streams), after=dice.choice(streams))
        elif action < 0.9:
            ok(d.cuDeviceGraphMemTrim(0))
        else:
            ok(d.cuCtxSynchronize())
            assert all(graphs[number].right for number in launched)
            launched.clear()
    ok(d.cuCtxSynchronize())
    assert all(graphs[number].right for number in launched)
    ok(d.cuDeviceGraphMemTrim(0))
    assert reserved(rig) == 0


@pytest.mark.parametrize("captured", [True, False])
def test_a_launch_waits_for_the_latest_recording_when_it_is_submitted(captured: bool, rig: Rig) -> None:
    """A later recording may wait for the launch itself."""
    d, stream, other, event, gate = rig.raw, rig.stream(), rig.stream(), rig.event(), rig.gate()
    if captured:
        begin(rig, stream)
        ok(d.cuStreamWaitEvent(stream, event, 1))
        graph = ok(d.cuStreamEndCapture(stream))
    else:
        graph = ok(d.cuGraphCreate(0))
        ok(d.cuGraphAddEventWaitNode(graph, [], 0, event))
    launch = ok(d.cuGraphInstantiate(graph, 0))
    ok(d.cuEventRecord(event, other))
    gate.hold(stream)
    ok(d.cuGraphLaunch(launch, stream))
    launched = rig.event()
    ok(d.cuEventRecord(launched, stream))
    ok(d.cuStreamWaitEvent(other, launched, 0))
    ok(d.cuEventRecord(event, other))
    gate.open()
    assert rig.executed(stream) and rig.executed(other)
