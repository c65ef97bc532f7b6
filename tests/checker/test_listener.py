"""The facade does the same with and without a listener, and notifies it of what no driver call shows."""

import contextlib
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from streamalloc.checker.wrapper import Recorder
from streamalloc.driver.internal import Wrapper
from tests.ipc.support import shared_pool

pytestmark = pytest.mark.simulated_only("several drivers in one process, which stand for several processes")
SIZE = 4096
# Each call waits for the work before, so that no choice of the facade depends on the speed of a device.
SLOW = ("cuMemsetD8Async", "cuStreamWriteValue32", "cuMemFreeAsync", "cuMemcpyAsync")


class Settled(Wrapper):
    """A driver in which every stream is idle between two calls of the facade."""

    def __init__(self, driver: Any) -> None:
        super().__init__(driver)
        self.names: list[str] = []

    def _observe(self, name: str, function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.names.append(name)
        answer = function(*args)
        if name in SLOW:
            self.wrapped.cuCtxSynchronize()
        return answer  # type: ignore[no-any-return]


class Notified:
    """A listener that records its notifications."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def used(self, address: int, nbytes: int, stream: Any, write: bool, atomic: bool = False) -> None:
        self.seen.append("used")

    def lent(self, stream: Any, used: bool) -> None:
        self.seen.append("lent")

    def named(self, stream: Any, name: str) -> None:
        self.seen.append("named")

    def shared(self, address: int, nbytes: int, stream: Any, name: bytes) -> None:
        self.seen.append("shared")

    def released(self, address: int, nbytes: int, released: bool) -> None:
        self.seen.append("released" if released else "in use again")

    def deferred(self, address: int) -> None:
        self.seen.append("deferred")

    def typed(self, address: int, nbytes: int, dtype: Any, write: bool) -> None:
        self.seen.append("typed")

    def opened(self, address: int, nbytes: int, stream: Any, name: bytes, word: int) -> None:
        self.seen.append("opened" if stream is not None else "opened by the host")


def _notified(driver: Any, recorder: Notified | None) -> Settled:
    settled: Any = Settled(driver)
    if recorder is not None:
        settled.listener = recorder
    return settled  # type: ignore[no-any-return]


def _share_and_open(machine: Any, recorder: Notified | None) -> list[list[str]]:
    """Share memory by every path and open it on a stream and on none; the driver calls of both sides."""
    drivers = [_notified(one, recorder) for one in (machine, sd.simulated())]
    with contextlib.ExitStack() as stack:
        here, there = (sa.Device(0, driver=one) for one in drivers)
        stream, theirs = stack.enter_context(here.create_stream()), stack.enter_context(there.create_stream())
        blocking = stack.enter_context(here.create_stream(blocking=True, name="blocking"))
        pool = stack.enter_context(shared_pool(here))
        ours, end = (stack.enter_context(one) for one in ipc.Channel.pair())
        for ordered in (stream, stream, stream, blocking, here.default_stream):
            for opened_on in (theirs, None):
                memory = pool.allocate(SIZE, ordered)
                memory.fill(1)
                ipc.send(ours, memory)
                opened: Any = ipc.receive(end, stream=opened_on, driver=drivers[1], timeout=5)
                opened.fill(2, theirs)
                opened.close()
                memory.used(stream)
                memory.free()
        assert stream.handle
    # A notification about a default stream is made in its context.
    return [[name for name in one.names if not name.startswith("cuCtx")] for one in drivers]


def test_calls_that_another_feed_has_seen(machine: Any, traced: Any, device: sa.Device) -> None:
    """Names, arguments, answers, threads and places are enough for the rules: nothing is wrapped."""
    with device.create_stream() as one, device.create_stream() as other, sa.MemoryPool(device) as pool:
        memory = pool.allocate(SIZE, one)
        one.synchronize()
        for stream in (one, other):
            memory.fill(1, stream)
        device.synchronize()
        memory.free()
        with device.current():
            context = int(traced.cuCtxGetCurrent()[1])
    recorder = Recorder(machine, "report")
    code = test_calls_that_another_feed_has_seen.__code__
    for number, call in enumerate(traced.calls):
        recorder.feed(call, context, ((code, 2 * number),))
    (found,) = recorder.finish()
    assert found.kind == "race" and "cuMemsetD8Async" in found.what
    fills = [number for number, call in enumerate(traced.calls) if call.name == "cuMemsetD8Async"]
    assert [at for _, ((_, at),) in found.places[:2]] == [2 * number for number in reversed(fills)]
    assert recorder.notes == ()


def test_a_handle_that_is_older_than_its_feed(machine: Any, traced: Any) -> None:
    """Its end is no double free, unless the driver refuses it."""
    with sa.Device(0, driver=traced).current():
        stream = traced.cuStreamCreate(1)[1]
        before = len(traced.calls)
        assert [bool(traced.cuStreamDestroy(stream)[0]) for _ in range(2)] == [False, True]
    recorder = Recorder(machine, "report")
    found = []
    for call in traced.calls[before : before + 2]:
        recorder.feed(call, 0, ())
        found.append([one.kind for one in recorder.hazards])
    assert found == [[], ["double free"]]


def test_the_facade_makes_the_same_calls(machine: Any) -> None:
    recorder = Notified()
    assert _share_and_open(machine, recorder) == _share_and_open(sd.simulated(), None)
    assert set(recorder.seen) == {"used", "lent", "named", "shared", "opened", "opened by the host"}
    assert recorder.seen.count("shared") == 10
