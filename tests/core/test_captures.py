"""Captures that begin on another thread at any call of what was left for later: none is broken, nobody else fails."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import streamalloc as sa
from streamalloc.core.deferred import work
from streamalloc.core.event import context_event
from streamalloc.core.session import session_of
from streamalloc.pool.internal import collect_dropped
from tests.support import KEEP

MODES = ("global", "thread_local", "relaxed")


class BeforeCall:
    """A driver that does something before its n-th call from now on, once."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._left = -1
        self._do: Callable[[], object] = lambda: None
        self.thread = 0
        self.name = ""

    def arm(self, number: int, do: Callable[[], object]) -> None:
        """Count the calls of this thread."""
        self._do, self.thread, self._left = do, threading.get_ident(), number

    def disarm(self) -> bool:
        """Whether the call has come."""
        came = self._left < 0
        self._left = -1
        return came

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._driver, name)
        if not name.startswith("cu") or not callable(function):
            return function

        def call(*args: Any) -> Any:
            if self._left >= 0 and threading.get_ident() == self.thread:
                self._left -= 1
                if self._left < 0:
                    self.name = name
                    self._do()
            return function(*args)

        return call


class Other:
    """A thread that captures streams."""

    def __init__(self, machine: Any) -> None:
        self._machine = machine
        self._thread = ThreadPoolExecutor(1)
        self._captured: list[Any] = []

    def _made(self) -> Any:
        context = self._machine.cuDevicePrimaryCtxRetain(0)[1]
        self._machine.cuCtxSetCurrent(context)
        return self._machine.cuStreamCreate(1)[1]

    def make(self) -> None:
        """A stream as another library makes one."""
        self.stream = self._thread.submit(self._made).result()

    def begin(self, mode: str) -> None:
        """Begin a capture, of which this library does not know."""
        kind = getattr(self._machine.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{mode.upper()}")
        answer = self._thread.submit(self._machine.cuStreamBeginCapture, self.stream, kind).result()
        assert answer[0] == 0

    def end(self) -> str:
        """End it: the driver's answer."""
        answer = self._thread.submit(self._machine.cuStreamEndCapture, self.stream).result()
        if not answer[0]:
            self._machine.cuGraphDestroy(answer[1])
        return str(answer[0].name)

    def close(self) -> None:
        self._thread.submit(self._machine.cuStreamDestroy, self.stream).result()
        self._thread.submit(self._machine.cuCtxSetCurrent, self._machine.CUcontext(0)).result()
        self._thread.submit(self._machine.cuDevicePrimaryCtxRelease, 0).result()
        self._thread.shutdown()


@pytest.fixture
def other(machine: Any) -> Iterator[Other]:
    sa.Device(0)
    other = Other(machine)
    other.make()
    yield other
    other.close()


Steps = Iterator[Callable[[], object]]


def _pool_with_a_free(device: sa.Device) -> Steps:
    with device.create_stream() as stream:
        pool = sa.MemoryPool(device, release_threshold=KEEP)
        pool.allocate(4096, stream).free()
        yield pool.close
        stream.synchronize()


def _dropped_pool(device: sa.Device) -> Steps:
    with device.create_stream() as stream:
        buffer = sa.MemoryPool(device, release_threshold=KEEP).allocate(4096, stream)
        stream.synchronize()
        del buffer
        gc.collect()
        yield device.per_thread_stream.close  # no point of work
        yield _work(device)
        stream.synchronize()


def _work(device: sa.Device) -> Callable[[], object]:
    """A point of work that makes no other call."""
    return lambda: work(session_of(device))


def _dropped_stream_with_cached_memory(device: sa.Device) -> Steps:
    cache = sa.CachingAllocator(sa.MemoryPool(device))
    stream = device.create_stream()
    cache.allocate(4096, stream).free()

    def drop() -> None:
        nonlocal stream
        del stream
        gc.collect()
        _work(device)()

    yield drop
    cache.close()


def _cached_memory_of_a_closed_stream(device: sa.Device) -> Steps:
    cache = sa.CachingAllocator(sa.MemoryPool(device))
    with device.create_stream() as stream:
        held = cache.allocate(4096, stream)
    del stream

    def drop() -> None:
        nonlocal held
        del held
        collect_dropped(cache)
        _work(device)()

    yield drop
    cache.close()


def _dropped_buffer_of_a_closed_stream(device: sa.Device) -> Steps:
    pool = sa.MemoryPool(device)
    with device.create_stream() as stream:
        buffer = pool.allocate(4096, stream)

    def drop() -> None:
        nonlocal buffer
        del buffer
        _work(device)()

    yield drop
    pool.close()


def _closed_cache(device: sa.Device) -> Steps:
    with device.create_stream() as stream:
        cache = sa.CachingAllocator(sa.MemoryPool(device))
        cache.allocate(4096, stream).free()
        yield cache.close


def _closed_stream(device: sa.Device) -> Steps:
    with device.create_stream() as stream:
        cache = sa.CachingAllocator(sa.MemoryPool(device))
        cache.allocate(4096, stream).free()
        yield stream.close


SCENES: dict[str, Callable[[sa.Device], Steps]] = {
    "a pool is closed": _pool_with_a_free,
    "a pool was dropped": _dropped_pool,
    "a stream is dropped that has cached memory": _dropped_stream_with_cached_memory,
    "cached memory comes back on a closed stream": _cached_memory_of_a_closed_stream,
    "a buffer is dropped whose stream was closed": _dropped_buffer_of_a_closed_stream,
    "a cache is closed": _closed_cache,
    "a stream is closed that has cached memory": _closed_stream,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SCENES)
def test_of_another_library_at_each_call(machine: Any, other: Other, name: str, mode: str) -> None:
    number, reached = 0, True
    while reached:
        driver = BeforeCall(machine)
        device = sa.Device(0, driver=driver)
        reached = False
        steps = SCENES[name](device)
        for step in steps:
            driver.arm(number, lambda: other.begin(mode))
            step()
            if driver.disarm() and driver.name and not reached:
                reached = True
                assert other.end() == "CUDA_SUCCESS", (number, driver.name)
        device.synchronize()
        device.synchronize()
        number += 1
    assert number > 2


def test_none_of_ours_begins_while_a_context_is_recorded(machine: Any) -> None:
    driver = BeforeCall(machine)
    device = sa.Device(0, driver=driver)
    stream, begun, recorded = device.create_stream(), threading.Event(), threading.Event()
    capturing: list[Future[str]] = []

    def capture() -> str:
        with stream.capture() as graph:
            begun.set()
            assert recorded.wait(20)
        return repr(graph.nodes)

    with ThreadPoolExecutor(1) as threads:

        def begin() -> None:
            capturing.append(threads.submit(capture))
            begun.wait(0.05)  # it does not begin for as long as the record is made

        number = 0
        while len(capturing) == number:
            begun.clear()
            recorded.clear()
            driver.arm(number, begin)
            # One that comes after the beginning is refused.
            with contextlib.suppress(sa.CaptureError):
                context_event(device).close()
            driver.disarm()
            recorded.set()
            assert capturing[number:] == [] or capturing[number].result() == "[]", (number, driver.name)
            number += 1
    assert number > 3
    stream.close()


def test_a_context_is_not_recorded_during_a_capture_of_ours(device: sa.Device, stream: sa.Stream) -> None:
    with stream.capture() as graph:
        with pytest.raises(sa.CaptureError) as caught:
            context_event(device)
        assert not caught.value.asked
    assert graph.complete
    context_event(device).close()
