"""Streams and events: order, asking, waiting, closing; and the streams of other libraries."""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.driver.bindings import cuda
from streamalloc.testing import Gate
from tests.support import executed, holds, in_threads, names, pending


class TestOrder:
    def test_work_of_one_stream_runs_in_order(self, stream: sa.Stream, pool: sa.MemoryPool) -> None:
        order: list[int] = []
        for number in range(5):
            stream.launch_host_func(functools.partial(order.append, number))
        stream.synchronize()
        assert order == [0, 1, 2, 3, 4]

    def test_query(self, stream: sa.Stream, gate: Gate) -> None:
        assert stream.query() is True
        gate.hold(stream)
        assert pending(stream)
        gate.open()
        assert executed(stream)

    def test_a_held_stream_holds_no_other(self, device: sa.Device, stream: sa.Stream, gate: Gate) -> None:
        gate.hold(stream)
        with device.create_stream() as other:
            other.launch_host_func(lambda: None)
            other.synchronize()
            assert pending(stream)

    def test_wait_for_an_event(self, device: sa.Device, stream: sa.Stream, gate: Gate) -> None:
        order: list[str] = []
        with device.create_stream() as other:
            gate.hold(stream)
            stream.launch_host_func(lambda: order.append("first"))
            other.wait(stream.record())
            other.launch_host_func(lambda: order.append("second"))
            assert pending(other) and order == []
            gate.open()
            other.synchronize()
            assert order == ["first", "second"]

    def test_wait_for_a_stream(self, device: sa.Device, stream: sa.Stream, gate: Gate) -> None:
        with device.create_stream() as other:
            gate.hold(stream)
            other.wait(stream)
            gate.open()
            other.synchronize()
            assert stream.query()

    def test_an_event_holds_what_was_queued_before_it(self, stream: sa.Stream, gate: Gate) -> None:
        event = stream.record()
        gate.hold(stream)
        event.synchronize()
        assert event.query() and pending(stream)

    @pytest.mark.gpus(2)
    def test_across_devices(self, stream: sa.Stream, gate: Gate, peer: sa.Device) -> None:
        with peer.create_stream() as other:
            gate.hold(stream)
            other.wait(stream.record())
            assert pending(other)
            gate.open()
            other.synchronize()

    def test_the_legacy_stream_waits_for_blocking_ones_only(self, device: sa.Device, gate: Gate) -> None:
        with device.create_stream(blocking=True) as bound, device.create_stream() as free:
            gate.hold(free)
            assert device.default_stream.query()
            gate.hold(bound)
            device.default_stream.launch_host_func(lambda: None)
            assert pending(device.default_stream)
            gate.open()
            device.default_stream.synchronize()


class TestEvents:
    def test_query_and_synchronize(self, stream: sa.Stream, gate: Gate) -> None:
        gate.hold(stream)
        event = stream.record()
        assert event.query() is False
        gate.open()
        event.synchronize()
        assert event.query() is True

    def test_never_recorded(self, device: sa.Device, stream: sa.Stream) -> None:
        with device.create_event() as event:
            assert event.query() is True
            event.synchronize()
            stream.wait(event)
            assert executed(stream)

    def test_recorded_again(self, device: sa.Device, stream: sa.Stream, gate: Gate) -> None:
        with device.create_event() as event:
            assert stream.record(event) is event
            event.synchronize()
            gate.hold(stream)
            stream.record(event)
            assert event.query() is False
            gate.open()
            event.synchronize()

    def test_time(self, stream: sa.Stream, gate: Gate) -> None:
        start = stream.record(timing=True)
        gate.hold(stream)
        end = stream.record(timing=True)
        with pytest.raises(sa.NotReadyError):
            end.elapsed_since(start)
        gate.open()
        end.synchronize()
        took = end.elapsed_since(start)
        assert took >= 0 and start.elapsed_since(end) == pytest.approx(-took)

    def test_time_needs_events_that_measure_it(self, stream: sa.Stream) -> None:
        start, end = stream.record(), stream.record()
        end.synchronize()
        with pytest.raises(sa.InvalidHandleError, match="timing=True"):
            end.elapsed_since(start)
        with pytest.raises(TypeError, match="start must be an Event, not Stream"):
            end.elapsed_since(stream)  # type: ignore[arg-type]

    def test_options_that_do_not_go_together(self, device: sa.Device) -> None:
        with pytest.raises(ValueError, match="interprocess"):
            device.create_event(timing=True, interprocess=True)

    def test_options(self, device: sa.Device, stream: sa.Stream) -> None:
        for event in (device.create_event(interprocess=True), device.create_event(blocking_sync=True, timing=True)):
            stream.record(event).synchronize()
            event.close()

    def test_closing_does_not_release_who_waits(self, device: sa.Device, stream: sa.Stream, gate: Gate) -> None:
        with device.create_stream() as other:
            gate.hold(stream)
            event = stream.record()
            other.wait(event)
            event.close()
            assert pending(other)
            gate.open()
            other.synchronize()


DISABLE_TIMING, BLOCKING_SYNC, INTERPROCESS = 2, 1, 4


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, DISABLE_TIMING),
        ({"timing": True}, 0),
        ({"blocking_sync": True}, DISABLE_TIMING | BLOCKING_SYNC),
        ({"interprocess": True}, DISABLE_TIMING | INTERPROCESS),
        ({"timing": True, "blocking_sync": True}, BLOCKING_SYNC),
    ],
)
def test_flags_of_an_event(traced: Any, device: sa.Device, options: dict[str, bool], flags: int) -> None:
    with device.create_event(**options):
        (call,) = [call for call in traced.calls if call.name == "cuEventCreate"]
        assert call.args == (flags,)


def test_flags_of_an_event_that_a_stream_makes(traced: Any, device: sa.Device) -> None:
    with device.create_stream() as stream:
        for timing, flags in ((False, DISABLE_TIMING), (True, 0)):
            del traced.calls[:]
            stream.record(timing=timing)
            assert [call.args for call in traced.calls if call.name == "cuEventCreate"] == [(flags,)]


class TestHostFunctions:
    def test_run_on_another_thread(self, stream: sa.Stream) -> None:
        seen: list[int] = []
        stream.launch_host_func(lambda: seen.append(threading.get_ident()))
        stream.synchronize()
        assert seen and seen[0] != threading.get_ident()

    def test_an_exception_is_reported_and_the_stream_goes_on(
        self, stream: sa.Stream, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        raised: list[Any] = []
        monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: raised.append(unraisable.exc_type))
        done: list[bool] = []

        def fail() -> None:
            raise LookupError

        stream.launch_host_func(fail)
        stream.launch_host_func(lambda: done.append(True))
        stream.synchronize()
        assert raised == [LookupError] and done == [True]

    def test_nothing_is_kept_of_them(self, stream: sa.Stream) -> None:
        from streamalloc.core.stream import _host_functions

        before = len(_host_functions)
        for _ in range(3):
            stream.launch_host_func(lambda: None)
        stream.synchronize()
        assert len(_host_functions) == before

    def test_one_that_was_refused_is_let_go(self, machine: Any) -> None:
        driver = sd.faulty(machine, "cuLaunchHostFunc", result="CUDA_ERROR_UNKNOWN")
        with sa.Device(0, driver=driver).create_stream() as stream:
            function = functools.partial(int)
            known = weakref.ref(function)
            with pytest.raises(sa.CudaError, match="cuLaunchHostFunc answered"):
                stream.launch_host_func(function)
            del function
            gc.collect()
            assert known() is None


class TestClosing:
    def test_is_idempotent(self, device: sa.Device) -> None:
        stream, event = device.create_stream(), device.create_event()
        assert [stream.closed, event.closed] == [False, False]
        for one in (stream, event):
            one.close()
            one.close()
            assert "closed" in repr(one)
        assert [stream.closed, event.closed] == [True, True]

    def test_use_afterwards_does_not_reach_the_driver(self, traced: Any, device: sa.Device) -> None:
        stream, other = device.create_stream(), device.create_stream()
        event = stream.record()
        pool = sa.MemoryPool(device)
        buffer = pool.allocate(64, other)
        stream.close()
        event.close()
        del traced.calls[:]
        uses: tuple[Callable[[], object], ...] = (
            stream.synchronize,
            stream.query,
            stream.record,
            lambda: stream.handle,
            lambda: stream.wait(other),
            lambda: other.wait(event),
            lambda: other.wait(stream),
            lambda: stream.launch_host_func(lambda: None),
            lambda: stream.__cuda_stream__(),
            lambda: pool.allocate(64, stream),
            lambda: sa.allocate(64, stream),
            lambda: buffer.fill(1, stream),
            lambda: buffer.free(stream),
            lambda: buffer.copy_to(bytearray(64), stream),
            event.query,
            event.synchronize,
            lambda: event.handle,
            lambda: other.record(event),
        )
        for number, use in enumerate(uses):
            with pytest.raises(sa.ClosedError):
                use()
            assert names(traced) == [], number
        assert not buffer.freed
        buffer.free()

    def test_queued_work_still_runs(self, device: sa.Device, gate: Gate) -> None:
        done: list[bool] = []
        stream = device.create_stream()
        gate.hold(stream)
        stream.launch_host_func(lambda: done.append(True))
        stream.close()
        assert done == []
        gate.open()
        device.synchronize()
        assert done == [True]

    def test_leaves_other_people_s_streams(self, traced: Any, device: sa.Device) -> None:
        device.default_stream.close()
        device.per_thread_stream.close()
        assert names(traced, "cuStreamDestroy") == []

    def test_default_streams_are_made_anew(self, device: sa.Device) -> None:
        device.default_stream.close()
        device.default_stream.synchronize()


class _ByProtocol:
    def __init__(self, handle: int, version: int = 0) -> None:
        self._answer = (version, handle)

    def __cuda_stream__(self) -> tuple[int, int]:
        return self._answer


# How the streams of other libraries tell their handle: by the protocol (as a method, or as cuda.core once had it, a
# property), PyTorch, CuPy, Numba, and NVIDIA's bindings.
FOREIGN: dict[str, Any] = {
    "__cuda_stream__": _ByProtocol,
    "__cuda_stream__ property": lambda handle: SimpleNamespace(__cuda_stream__=(0, handle)),
    "PyTorch": lambda handle: SimpleNamespace(cuda_stream=handle),
    "CuPy": lambda handle: SimpleNamespace(ptr=handle),
    "Numba": lambda handle: SimpleNamespace(handle=ctypes.c_void_p(handle)),
    "bindings": lambda handle: cuda.CUstream(handle),
}


class TestForeignStreams:
    @pytest.mark.parametrize("library", FOREIGN)
    def test_are_accepted_wherever_ours_are(
        self, library: str, device: sa.Device, stream: sa.Stream, pool: sa.MemoryPool
    ) -> None:
        foreign = FOREIGN[library](stream.handle)
        with pool.allocate(64, foreign) as buffer:
            assert buffer.stream.handle == stream.handle and buffer.stream.device == device
            buffer.fill(3, foreign)
            target = bytearray(64)
            buffer.copy_to(target, foreign)
            stream.synchronize()
            assert bytes(target) == bytes([3]) * 64
            buffer.free(foreign)
        with sa.allocate(64, foreign) as buffer:
            assert buffer.nbytes == 64
        with device.create_stream() as other:
            other.wait(foreign)

    @pytest.mark.parametrize("library", FOREIGN)
    def test_their_work_is_waited_for(self, library: str, device: sa.Device, stream: sa.Stream, gate: Gate) -> None:
        gate.hold(stream)
        with device.create_stream() as other:
            other.wait(FOREIGN[library](stream.handle))
            assert pending(other)
            gate.open()
            other.synchronize()

    @pytest.mark.gpus(2)
    def test_of_another_device(self, peer: sa.Device, pool: sa.MemoryPool) -> None:
        with peer.create_stream() as theirs, pool.allocate(64, _ByProtocol(theirs.handle)) as buffer:
            assert buffer.stream.device == peer
            assert buffer.location == sa.MemLocation.device(0)

    @pytest.mark.parametrize("handle", [0, 1, 2])
    def test_default_streams_are_the_current_device_s(
        self, device: sa.Device, pool: sa.MemoryPool, handle: int
    ) -> None:
        with device.current(), pool.allocate(64, _ByProtocol(handle)) as buffer:
            assert buffer.stream.is_default and buffer.stream.device == device
            buffer.fill(4)
            assert holds(buffer, 4)

    def test_ours_follow_the_protocol(self, stream: sa.Stream) -> None:
        assert stream.__cuda_stream__() == (0, stream.handle)

    def test_are_never_destroyed(self, traced: Any, device: sa.Device, stream: sa.Stream) -> None:
        pool = sa.MemoryPool(device)
        pool.allocate(64, _ByProtocol(stream.handle)).stream.close()
        assert names(traced, "cuStreamDestroy") == []
        stream.synchronize()

    def test_unknown_protocol_version(self, stream: sa.Stream, pool: sa.MemoryPool) -> None:
        with pytest.raises(ValueError, match="version 1"):
            pool.allocate(64, _ByProtocol(stream.handle, version=1))

    @pytest.mark.parametrize("other", [None, 0, 1, "stream", object(), SimpleNamespace(ptr="x"), 1.5])
    def test_what_is_no_stream(self, pool: sa.MemoryPool, other: Any) -> None:
        with pytest.raises(TypeError, match="stream"):
            pool.allocate(64, other)
        assert pool.statistics().used == 0

    def test_what_is_no_stream_for_the_current_pool(self, machine: Any) -> None:
        with pytest.raises(TypeError, match="stream"):
            sa.allocate(64, None)  # type: ignore[arg-type]


class TestReadability:
    def test_reprs(self, device: sa.Device, stream: sa.Stream) -> None:
        assert hex(stream.handle) in repr(stream) and "device 0" in repr(stream)
        assert "legacy default" in repr(device.default_stream) and "per-thread" in repr(device.per_thread_stream)
        with device.create_event() as event:
            assert hex(event.handle) in repr(event)


def test_what_ends_later_does_not_meet_a_stream_that_is_being_closed(device: sa.Device, pool: sa.MemoryPool) -> None:
    """Threads end each other's dropped buffers on streams that their owners close at that time."""

    def run() -> None:
        for number in range(60):
            with device.create_stream(blocking=True) as stream:
                default = pool.allocate(64, device.default_stream)
                buffer = pool.allocate(64, stream)
                cycle: list[object] = [buffer, default]
                cycle.append(cycle)
                del buffer, default, cycle
                if number % 3 == 0:
                    gc.collect()
                device.synchronize()

    in_threads(*[run] * 6)
    gc.collect()
    device.synchronize()
