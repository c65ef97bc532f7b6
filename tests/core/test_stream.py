"""Streams and events: order, asking, waiting, also by ``await``, closing; and the streams of other libraries."""

import asyncio
import contextlib
import functools
import gc
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.core import event as module
from streamalloc.core.session import Session, session_of
from streamalloc.core.stream import _host_functions
from streamalloc.driver.bindings import cuda
from streamalloc.testing import Faults, Gate
from tests.support import GROWTH, MiB, each_raises, executed, holds, in_threads, names, pending


class TestOrder:
    def test_query(self, device: sa.Device, stream: sa.Stream, gate: Gate) -> None:
        before = stream.record()
        assert stream.query() is True
        gate.hold(stream)
        event = stream.record()
        assert pending(stream) and event.query() is False
        before.synchronize()
        assert before.query() and not stream.query()
        with device.create_stream() as other:  # which is not held
            other.launch_host_func(lambda: None)
            other.synchronize()
        gate.open()
        event.synchronize()
        assert event.query() is True and executed(stream)

    def test_work_runs_after_what_it_waits_for(self, stream: sa.Stream, gate: Gate, other: sa.Stream) -> None:
        order: list[str] = []
        gate.hold(stream)
        stream.launch_host_func(lambda: order.append("first"))
        other.wait(stream.record())
        other.launch_host_func(lambda: order.append("second"))
        assert pending(other) and order == []
        gate.open()
        other.synchronize()
        assert order == ["first", "second"]

    def test_what_comes_after_a_per_thread_stream_of_another_thread(self, device: sa.Device) -> None:
        """Its handle names another stream here, so the legacy stream stands for it."""
        with ThreadPoolExecutor(1) as thread, sa.MemoryPool(device) as pool, Gate(device) as gate:

            def queue() -> sa.Buffer:
                buffer = pool.allocate(MiB, device.per_thread_stream)
                device.per_thread_stream.synchronize()
                gate.hold(device.per_thread_stream)
                buffer.fill(7)
                return buffer

            buffer = thread.submit(queue).result()
            theirs, later = buffer.stream, device.create_stream()
            later.wait(theirs)
            event = theirs.record()
            assert not theirs.query() and not event.query() and pending(later)
            buffer.free(theirs)
            with pool.allocate(MiB, device.per_thread_stream) as mine:
                mine.fill(1)
                gate.open()
                theirs.synchronize()
                assert event.query() and executed(later) and holds(mine, 1)
            later.close()

    @pytest.mark.gpus(2)
    def test_across_devices(self, stream: sa.Stream, gate: Gate, peer: sa.Device) -> None:
        with peer.create_stream() as other:
            gate.hold(stream)
            other.wait(stream.record())
            assert pending(other)
            gate.open()
            other.synchronize()


class TestEvents:
    def test_recorded_again(self, device: sa.Device, stream: sa.Stream, gate: Gate) -> None:
        with device.create_event() as event:
            assert event.query() is True
            event.synchronize()
            stream.wait(event)
            assert executed(stream)
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
        each_raises(sa.InvalidHandleError, lambda: end.elapsed_since(stream.record()), match="timing=True")
        each_raises(TypeError, lambda: end.elapsed_since(stream), match="start must be an Event, not Stream")  # type: ignore[arg-type]

    def test_of_a_capture_that_has_ended(self, stream: sa.Stream) -> None:
        with stream.capture() as graph:
            event = stream.record()
        graph.close()
        uses = event.query, event.synchronize, lambda: stream.wait(event)
        each_raises(sa.InvalidValueError, *uses, match="last recorded in a capture.*record it again")
        stream.record(event)
        event.synchronize()
        assert event.query()

    def test_closed_by_two_threads_at_once(self, stream: sa.Stream, monkeypatch: pytest.MonkeyPatch) -> None:
        """The second close runs where Python may switch threads in the first; the driver's event is reused once."""
        event = stream.record()

        def switch(_: Session) -> None:
            monkeypatch.undo()
            event.close()

        monkeypatch.setattr(Session, "check_process", switch)
        event.close()
        one, other = stream.record(), stream.record()
        assert one.handle != other.handle

    def test_options_that_do_not_go_together(self, device: sa.Device) -> None:
        with pytest.raises(ValueError, match="interprocess"):
            device.create_event(timing=True, interprocess=True)


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
def test_event_flags(traced: Any, device: sa.Device, stream: sa.Stream, options: dict[str, bool], flags: int) -> None:
    with device.create_event(**options) as event:
        (call,) = [call for call in traced.calls if call.name == "cuEventCreate"]
        assert call.args == (flags,)
        stream.record(event).synchronize()


def test_flags_of_an_event_that_a_stream_makes(traced: Any, stream: sa.Stream) -> None:
    for timing, flags in ((False, DISABLE_TIMING), (True, 0)):
        del traced.calls[:]
        stream.record(timing=timing)
        assert [call.args for call in traced.calls if call.name == "cuEventCreate"] == [(flags,)]


class TestHostFunctions:
    def test_run_in_order_on_another_thread(self, stream: sa.Stream, monkeypatch: pytest.MonkeyPatch) -> None:
        """An exception is reported, and the stream goes on. Nothing is kept of them."""
        raised: list[Any] = []
        monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: raised.append(unraisable.exc_type))
        order: list[int] = []
        threads: set[int] = set()
        kept = len(_host_functions)

        def run(number: int) -> None:
            threads.add(threading.get_ident())
            order.append(number)
            if number == 1:
                raise LookupError

        for number in range(5):
            stream.launch_host_func(functools.partial(run, number))
        stream.synchronize()
        assert raised == [LookupError] and order == [0, 1, 2, 3, 4]
        assert threads and threading.get_ident() not in threads and len(_host_functions) == kept

    def test_one_that_was_refused_is_let_go(self, stream: sa.Stream, streamalloc_faults: Faults) -> None:
        streamalloc_faults.fail("cuLaunchHostFunc", result="CUDA_ERROR_UNKNOWN")
        function = functools.partial(int)
        known = weakref.ref(function)
        with pytest.raises(sa.CudaError, match="cuLaunchHostFunc answered"):
            stream.launch_host_func(function)
        del function
        gc.collect()
        assert known() is None

    def test_one_for_a_closed_stream_is_not_kept(self, device: sa.Device) -> None:
        stream, kept = device.create_stream(), len(_host_functions)
        stream.close()
        with pytest.raises(sa.ClosedError):
            stream.launch_host_func(int)
        assert len(_host_functions) == kept


class TestClosing:
    def test_use_afterwards_does_not_reach_the_driver(self, traced: Any, device: sa.Device) -> None:
        stream, other = device.create_stream(), device.create_stream()
        event = stream.record()
        pool = sa.MemoryPool(device)
        buffer = pool.allocate(64, other)
        stream.close()
        event.close()
        del traced.calls[:]
        uses: tuple[Callable[[], object], ...] = (
            lambda: stream.handle,
            lambda: stream.__cuda_stream__(),
            lambda: event.handle,
            lambda: other.wait(event),
            lambda: other.wait(stream),
            lambda: other.record(event),
            lambda: pool.allocate(64, stream),
            lambda: sa.allocate(64, stream),
            lambda: buffer.fill(1, stream),
            lambda: buffer.free(stream),
            lambda: buffer.copy_to(bytearray(64), stream),
        )
        for number, use in enumerate(uses):
            each_raises(sa.ClosedError, use)
            assert names(traced) == [], number
        assert not buffer.freed
        buffer.free()

    def test_leaves_other_people_s_streams(self, traced: Any, device: sa.Device) -> None:
        """Default streams are made anew."""
        device.default_stream.close()
        device.per_thread_stream.close()
        assert names(traced, "cuStreamDestroy") == []
        device.default_stream.synchronize()


class _ByProtocol:
    def __init__(self, handle: int, version: int = 0) -> None:
        self._answer = (version, handle)

    def __cuda_stream__(self) -> tuple[int, int]:
        return self._answer


class TestForeignStreams:
    @pytest.mark.parametrize("what", ["a stream", "an event", "CUevent", "CUstream"])
    def test_work_is_waited_for(self, what: str, stream: sa.Stream, gate: Gate, other: sa.Stream) -> None:
        gate.hold(stream)
        event = stream.record()
        known = {"a stream": stream, "an event": event, "CUevent": cuda.CUevent(event.handle)}
        other.wait(known.get(what, cuda.CUstream(stream.handle)))
        assert pending(other)
        gate.open()
        other.synchronize()

    @pytest.mark.gpus(2)
    def test_of_another_device(self, peer: sa.Device, pool: sa.MemoryPool) -> None:
        with peer.create_stream() as theirs, pool.allocate(64, _ByProtocol(theirs.handle)) as buffer:
            assert buffer.stream.device == peer
            assert buffer.location == sa.MemLocation.device(0)

    def test_ours_follow_the_protocol(self, stream: sa.Stream) -> None:
        assert stream.__cuda_stream__() == (0, stream.handle)
        with pytest.raises(ValueError, match="version 1"):
            stream.wait(_ByProtocol(stream.handle, version=1))

    @pytest.mark.parametrize("other", [None, 0, 1, "stream", object(), SimpleNamespace(ptr="x"), 1.5])
    def test_what_is_no_stream(self, pool: sa.MemoryPool, other: Any) -> None:
        for allocate in (pool.allocate, sa.allocate):
            with pytest.raises(TypeError, match="stream"):
                allocate(64, other)
        assert pool.statistics().used == 0


def test_reprs(device: sa.Device, stream: sa.Stream) -> None:
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


def waits() -> int:
    """The waits of all loops."""
    return sum(map(len, module.waits.values()))


async def started(wait: Awaitable[None]) -> asyncio.Task[None]:
    """A task that waits, once the loop has queried its event."""

    async def run() -> None:
        await wait

    before = waits()
    task = asyncio.ensure_future(run())
    while waits() == before:
        await asyncio.sleep(0)
    assert not task.done()
    return task


@pytest.fixture(params=[lambda stream: stream.record(), lambda stream: stream], ids=["event", "stream"])
def awaited(request: pytest.FixtureRequest) -> Any:
    """A function of a stream that returns what is awaited."""
    return request.param


def test_other_tasks_run_meanwhile(stream: sa.Stream, gate: Gate, awaited: Any) -> None:
    async def main() -> None:
        gate.hold(stream)
        tasks = [await started(awaited(stream)) for _ in range(3)]
        gate.hold(stream)  # work that comes later is not waited for
        gate._value.value = 1
        await asyncio.gather(*tasks)
        assert not stream.query()
        gate.open()
        await stream
        assert stream.query()
        await awaited(stream)

    asyncio.run(main())
    assert not waits()


def test_frees_are_seen(device: sa.Device, stream: sa.Stream, awaited: Any) -> None:
    async def main(pool: sa.MemoryPool) -> None:
        pool.allocate(MiB, stream).free()
        assert executed(stream) and pool.statistics().reserved == GROWTH
        await awaited(stream)
        assert pool.statistics().reserved == 0

    with sa.MemoryPool(device) as pool:
        asyncio.run(main(pool))


def test_cancelled(stream: sa.Stream, gate: Gate, awaited: Any) -> None:
    async def main() -> None:
        gate.hold(stream)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(await started(awaited(stream))), 0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert not waits()

    asyncio.run(main())
    assert not waits()


@pytest.mark.parametrize("error", [sa.ClosedError, sa.DeviceLostError, sd.ForkedProcessError])
def test_errors_end_the_wait(
    stream: sa.Stream, gate: Gate, streamalloc_faults: Faults, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuse(_: object) -> Any:
        raise sd.ForkedProcessError("forked")

    async def main() -> None:
        gate.hold(stream)
        event = stream.record()
        task = await started(event)
        with monkeypatch.context() as patch:
            if error is sa.ClosedError:
                event.close()
            elif error is sa.DeviceLostError:
                streamalloc_faults.fail("cuEventQuery", result="CUDA_ERROR_ILLEGAL_ADDRESS")
            else:
                patch.setattr(type(stream._session), "relaxed", refuse)
            with pytest.raises(error):
                await task

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_loop_that_is_closed(stream: sa.Stream, gate: Gate) -> None:
    gate.hold(stream)
    loop = asyncio.new_event_loop()
    task = loop.run_until_complete(started(stream))
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    gone = weakref.ref(task)
    del task, loop
    gc.collect()
    assert gone() is None and not waits()


def test_a_capture_goes_on(device: sa.Device, stream: sa.Stream, gate: Gate) -> None:
    async def main() -> None:
        gate.hold(stream)
        wait = await started(stream)
        with device.create_stream() as other, other.capture() as graph:
            gate.open()
            await wait
            await device.create_stream().record()
            with pytest.raises(sa.CaptureError):
                await other
            sa.allocate(512, other).free()
        assert graph.nodes == ["MEM_ALLOC", "MEM_FREE"]

    asyncio.run(main())


class Virtual(asyncio.SelectorEventLoop):
    """A loop whose time passes at once."""

    now = 0.0

    def __init__(self) -> None:
        super().__init__()
        self._real: Any = vars(self)["_selector"]
        self._selector: Any = self

    def time(self) -> float:
        return self.now

    def select(self, timeout: float | None) -> list[Any]:
        self.now += timeout or 1e-5
        return []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@pytest.fixture
def virtual() -> Iterator[Virtual]:
    loop = Virtual()
    yield loop
    loop._selector = loop._real
    loop.close()


@pytest.mark.simulated_only("the time of the loop is no real time")
def test_the_loop_rests(traced: Any, stream: sa.Stream, gate: Gate, virtual: Virtual) -> None:
    """Ten seconds: a tenth of a millisecond of turns, and then 1 to 10 ms between queries."""

    async def main() -> None:
        gate.hold(stream)
        tasks = [asyncio.ensure_future(wait(stream)) for _ in range(10)]
        await asyncio.sleep(10)
        assert 1000 <= names(traced).count("cuEventQuery") / 10 <= 1100
        gate.open()
        stream.synchronize()
        await asyncio.gather(*tasks)

    async def wait(stream: sa.Stream) -> None:
        await stream

    virtual.run_until_complete(main())


@pytest.mark.simulated_only("the time of the loop is no real time")
@pytest.mark.parametrize(("count", "once", "each"), [(1, 1.0, 0.0), (20, 1.0, 0.0), (1000, 0.5, 1e-5)])
def test_the_end_comes_soon(
    stream: sa.Stream,
    gate: Gate,
    virtual: Virtual,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    once: float,
    each: float,
) -> None:
    """At most 30 ms and two queries of each wait after the work, however long one query has taken."""
    session, queries = session_of(stream), iter([0.0] * 3 * count + [once])
    query = session.cuEventQuery

    def slow(event: Any) -> Any:
        virtual.now += each + next(queries, 0.0)
        return query(event)

    async def main() -> None:
        gate.hold(stream)
        ends = [asyncio.ensure_future(end()) for _ in range(count)]
        await asyncio.sleep(0.5)
        assert next(queries, None) is None
        gate.open()
        stream.synchronize()
        done = virtual.now
        assert 0 <= max(await asyncio.gather(*ends)) - done <= 0.031 + 2 * count * each

    async def end() -> float:
        await stream
        return virtual.now

    monkeypatch.setattr(session, "cuEventQuery", slow)
    virtual.run_until_complete(main())
