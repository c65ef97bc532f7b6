"""Order and asynchrony: clocks, the worker, the scheduler by chance."""

from __future__ import annotations

import ctypes
import functools
import random
import threading

import numpy as np
import numpy.typing as npt
import pytest

from streamalloc.simulator import call_lock
from tests.facts.enums import BLOCKING
from tests.facts.support import MiB, Rig
from tests.facts.support import value as ok
from tests.simulator.support import new_rig
from tests.support import KEEP, bytecodes, in_a_thread

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


def test_every_thread_has_its_own_per_thread_stream_and_context(rig: Rig) -> None:
    d = rig.raw
    mine = ok(d.cuStreamGetId(d.CUstream(2)))
    seen: list[object] = []

    def other() -> None:
        seen.append(d.cuStreamGetId(d.CUstream(2))[0])
        ok(d.cuCtxSetCurrent(rig.context))
        seen.append(ok(d.cuStreamGetId(d.CUstream(2))))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen[0] == d.CUresult.CUDA_ERROR_INVALID_CONTEXT
    assert seen[1] != mine


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
