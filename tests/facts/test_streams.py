"""Streams: creation, waiting, the legacy and per-thread streams, host functions and words in memory."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import numpy as np

from tests.facts.enums import BLOCKING, DEVICE, HOST, LEGACY, NON_BLOCKING
from tests.facts.support import Rig, in_new_thread, said, value


class TestCreation:
    def test_flags(self, rig: Rig) -> None:
        raw = rig.raw
        streams = [rig.stream(0), rig.stream(1), *map(raw.CUstream, (0, 1, 2))]
        assert [value(raw.cuStreamGetFlags(stream)) for stream in streams] == [0, 1, 0, 0, 0]
        assert [said(raw.cuStreamCreate(flags)) for flags in (2, 3, 99)] == ["INVALID_VALUE"] * 3

    def test_priority_out_of_range_is_clamped(self, rig: Rig) -> None:
        streams = rig.stream(), rig.own_stream(rig.raw.cuStreamCreateWithPriority(NON_BLOCKING, -99))
        assert [value(rig.raw.cuStreamGetPriority(stream)) for stream in streams] == [0, -5]

    def test_context_and_device(self, rig: Rig) -> None:
        stream = rig.stream()
        assert int(value(rig.raw.cuStreamGetCtx(stream))) == int(rig.context)
        assert int(value(rig.raw.cuStreamGetCtx(LEGACY))) == int(rig.context)
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
            in_new_thread(ask)
        assert len({*seen, int(value(rig.raw.cuStreamGetId(rig.per_thread)))}) == 5


class TestWaiting:
    def test_held_by_a_word_in_memory(self, rig: Rig) -> None:
        stream, gate = rig.stream(), rig.gate()
        assert rig.query(stream) == "SUCCESS"
        gate.hold(stream)
        assert rig.held(stream)
        gate.open()
        assert said(rig.raw.cuStreamSynchronize(stream)) == "SUCCESS"
        assert rig.query(stream) == "SUCCESS"

    def test_work_executes_while_the_host_makes_no_calls(self, rig: Rig) -> None:
        stream, gate, word = rig.stream(), rig.gate(), rig.pinned(64)
        seen = ctypes.c_uint32.from_address(int(word))
        gate.hold(stream)
        value(rig.raw.cuStreamWriteValue32(stream, int(word), 5, 0))
        time.sleep(0.01)
        assert seen.value == 0
        gate.open()
        end = time.monotonic() + 5
        while seen.value == 0 and time.monotonic() < end:
            time.sleep(0.0005)
        assert seen.value == 5

    def test_synchronize_waits(self, rig: Rig) -> None:
        stream, gate = rig.stream(), rig.gate()
        gate.hold(stream)
        with gate.opening_after(0.05):
            assert said(rig.raw.cuStreamSynchronize(stream)) == "SUCCESS"
            assert gate.is_open

    def test_waits_for_an_event_of_another_stream(self, rig: Rig) -> None:
        first, second, event, gate = rig.stream(), rig.stream(BLOCKING), rig.event(), rig.gate()
        gate.hold(first)
        value(rig.raw.cuEventRecord(event, first))
        assert said(rig.raw.cuStreamWaitEvent(second, event, 0)) == "SUCCESS"
        assert rig.held(second)
        gate.open()
        assert rig.executed(second)

    def test_wait_for_an_event_never_recorded(self, rig: Rig) -> None:
        stream, event = rig.stream(BLOCKING), rig.event()
        assert said(rig.raw.cuStreamWaitEvent(stream, event, 0)) == "SUCCESS"
        assert rig.query(stream) == "SUCCESS"
        value(rig.raw.cuEventRecord(event, stream))
        assert said(rig.raw.cuStreamWaitEvent(stream, event, 5)) == "INVALID_VALUE"

    def test_a_wait_keeps_the_recording_it_found(self, rig: Rig) -> None:
        first, second, event, gate = rig.stream(), rig.stream(), rig.event(), rig.gate()
        value(rig.raw.cuEventRecord(event, first))
        value(rig.raw.cuStreamWaitEvent(second, event, 0))
        gate.hold(first)
        value(rig.raw.cuEventRecord(event, first))
        assert rig.executed(second)
        assert said(rig.raw.cuEventQuery(event)) == "NOT_READY"

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


class TestLegacyStream:
    """The legacy stream waits for blocking streams and they for it; others take no part."""

    def test_is_not_ready_while_a_blocking_stream_is_held(self, rig: Rig) -> None:
        stream, gate = rig.stream(BLOCKING), rig.gate()
        gate.hold(stream)
        value(rig.raw.cuMemsetD8Async(rig.plain(64), 1, 64, LEGACY))
        assert rig.held(LEGACY)

    def test_is_not_ready_even_with_no_work_of_its_own(self, rig: Rig) -> None:
        first, second, event, gate = rig.stream(), rig.stream(BLOCKING), rig.event(), rig.gate()
        gate.hold(first)
        value(rig.raw.cuEventRecord(event, first))
        value(rig.raw.cuStreamWaitEvent(second, event, 0))
        assert rig.held(LEGACY)
        assert rig.query(rig.per_thread) == "SUCCESS"

    def test_blocking_streams_wait_for_it(self, rig: Rig) -> None:
        first, second, other, gate = rig.stream(BLOCKING), rig.stream(BLOCKING), rig.stream(), rig.gate()
        pointer = rig.plain(64)
        gate.hold(first)
        for stream in (LEGACY, second, other, rig.per_thread):
            value(rig.raw.cuMemsetD8Async(pointer, 1, 64, stream))
        assert rig.executed(other)
        assert rig.held(second)
        assert rig.held(rig.per_thread)
        gate.open()
        assert rig.executed(second)
        assert rig.executed(rig.per_thread)

    def test_does_not_wait_for_a_non_blocking_stream(self, in_new_process: Callable[..., tuple[bool, bool]]) -> None:
        assert in_new_process(_work_beside_a_held_stream) == (True, True)

    def test_an_event_recorded_there_waits_for_blocking_streams(self, rig: Rig) -> None:
        stream, event, gate = rig.stream(BLOCKING), rig.event(), rig.gate()
        gate.hold(stream)
        value(rig.raw.cuEventRecord(event, LEGACY))
        time.sleep(0.01)
        assert said(rig.raw.cuEventQuery(event)) == "NOT_READY"
        gate.open()
        assert said(rig.raw.cuEventSynchronize(event)) == "SUCCESS"

    def test_blocking_streams_wait_for_the_event_that_it_waits_for(self, rig: Rig) -> None:
        held, blocking, event, gate = rig.stream(), rig.stream(BLOCKING), rig.event(), rig.gate()
        gate.hold(held)
        value(rig.raw.cuEventRecord(event, held))
        value(rig.raw.cuStreamWaitEvent(LEGACY, event, 0))
        assert rig.held(LEGACY)
        value(rig.raw.cuMemsetD8Async(rig.plain(64), 1, 8, blocking))
        assert rig.held(blocking)

    def test_is_held_by_a_word_in_memory(self, rig: Rig) -> None:
        assert said(rig.raw.cuStreamWaitValue32(LEGACY, int(rig.pinned(64)), 0, 0)) == "SUCCESS"
        assert rig.executed(LEGACY)


class TestHostFunction:
    def test_runs_in_stream_order_with_its_argument(self, rig: Rig) -> None:
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

    def test_wait_for_64_bits(self, rig: Rig) -> None:
        stream, pointer = rig.stream(), rig.plain(64)
        value(rig.raw.cuMemsetD8Async(pointer, 0, 64, stream))
        assert said(rig.raw.cuStreamWaitValue64(stream, int(pointer), 0, 0)) == "SUCCESS"
        assert rig.executed(stream)

    def test_what_is_refused(self, rig: Rig) -> None:
        raw, stream, plain, host = rig.raw, rig.stream(), int(rig.plain(64)), np.zeros(64, np.uint8)
        pooled = [int(rig.allocate(rig.pool(location=location), 64, stream)) for location in (DEVICE, HOST)]
        answers = [raw.cuStreamWaitValue32(stream, address, 0, 0) for address in (plain + 1, host.ctypes.data, *pooled)]
        answers += [raw.cuStreamWriteValue64(stream, plain + 4, 0, 0), raw.cuStreamWaitValue32(stream, plain, 0, 8)]
        assert [said(one) for one in answers] == ["INVALID_VALUE"] * 6
