"""``await event`` and ``await stream``: the loop goes on, and nothing is left of waits that end in other ways."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Awaitable, Iterator
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.core import event as module
from streamalloc.core.session import session_of
from streamalloc.testing import Faults, Gate
from tests.support import GROWTH, MiB, executed, names


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
