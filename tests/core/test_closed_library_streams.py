"""Streams that their library closes while memory of ours was allocated on them, as cuda.core's may be.

The handle of a destroyed stream crashes the process on hardware: no call may have it.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import streamalloc as sa
from streamalloc.core.fence import Fence
from streamalloc.core.session import session_of
from streamalloc.driver.bindings import cuda
from streamalloc.interop.loans import borrow
from streamalloc.testing import Gate
from tests.support import GROWTH, MiB, end_what_was_dropped, holds, in_threads


class Theirs:
    """A stream of a library."""

    asked = 0
    """The number of questions whether it is open."""

    def __init__(self, device: sa.Device) -> None:
        driver: Any = device.driver
        self._driver = driver
        with device.current():
            result, raw = driver.cuStreamCreate(int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING))
        assert not result
        self.raw, self.was = raw, int(raw)

    def close(self) -> None:
        raw, self.raw = self.raw, None
        if raw is not None:
            assert not self._driver.cuStreamDestroy(raw)[0]


class Closable(Theirs):
    """A stream of an unknown library."""

    def __cuda_stream__(self) -> tuple[int, int]:
        self.asked += 1
        if self.raw is None:
            raise RuntimeError("Stream has been closed")
        return 0, int(self.raw)


class OfCudaCore(Closable):
    """A stream with the interface of cuda.core 1.2."""

    @property
    def is_closed(self) -> bool:
        self.asked += 1
        return self.raw is None


class OfCuPy(Theirs):
    """A stream that is destroyed with its object only."""

    @property
    def ptr(self) -> int:
        return int(self.raw)

    def __del__(self) -> None:
        self.close()


class OfNumba(Theirs):
    """A stream that is destroyed with its object only."""

    @property
    def handle(self) -> Any:
        return self.raw and ctypes.c_void_p(int(self.raw))

    def __del__(self) -> None:
        self.close()


class ExternalStream(OfCuPy):
    """A stream of other code that the object only names."""

    def __del__(self) -> None: ...


class Scene(NamedTuple):
    driver: Any
    device: sa.Device
    pool: sa.MemoryPool
    theirs: Closable
    own: sa.Stream

    def closed(self) -> sa.Buffer:
        """Memory that was allocated on their stream, which is closed by now."""
        buffer = self.pool.allocate(MiB, self.theirs)
        buffer.fill(1)
        self.close()
        return buffer

    def close(self) -> None:
        self.theirs.close()
        self.driver.calls.clear()

    def reused(self) -> int | None:
        """Index of the call that has given the handle to a new stream."""
        made = (n for n, call in enumerate(self.driver.calls) if names_it(call.answer[1:], self.theirs.was))
        return next(made, None)

    @property
    def used(self) -> int:
        return self.pool.statistics().used


@pytest.fixture(params=[Closable, OfCudaCore])
def scene(
    traced: Any, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream, request: pytest.FixtureRequest
) -> Iterator[Scene]:
    scene = Scene(traced, device, pool, request.param(device), stream)
    yield scene
    if scene.theirs.raw is None:
        assert not [call for call in traced.calls[: scene.reused()] if names_it(call.args, scene.theirs.was)]
    scene.theirs.close()
    device.synchronize()
    assert scene.used == 0
    forget_streams(device)


def forget_streams(device: sa.Device) -> None:
    """Empty the table of library streams."""
    session = session_of(device)
    session.library_streams.clear()
    session.latest_library_stream = object(), None


def names_it(values: Iterable[Any], handle: int) -> bool:
    return any(isinstance(one, cuda.CUstream) and int(one) == handle for one in values)


def others_are_whole(scene: Scene, gate: Gate, source: sa.Allocator) -> None:
    """Later memory is not overwritten by the work of their stream, which the gate holds until that is written."""
    others = [source.allocate(MiB, scene.own) for _ in range(GROWTH // MiB + 2)]
    for other in others:
        other.fill(2)
    scene.own.synchronize()
    gate.open()
    scene.device.synchronize()
    for other in others:
        assert holds(other, 2)
        other.free()


def free_under_work(cache: sa.CachingAllocator, theirs: Any, gate: Gate) -> None:
    """Free cached memory that work of their stream writes, which the gate holds."""
    cache.allocate(MiB, theirs).free()
    buffer = cache.allocate(MiB, theirs)
    gate.hold(theirs.raw)
    buffer.fill(1)
    buffer.free()


USES: dict[str, Callable[[Scene, Any], object]] = {
    "fill": lambda scene, buffer: buffer.fill(2),
    "copy": lambda scene, buffer: buffer.copy_to(np.zeros(MiB, np.uint8)),
    "free": lambda scene, buffer: buffer.free(),
    "record": lambda scene, buffer: buffer.stream.record(),
    "wait": lambda scene, buffer: scene.own.wait(buffer.stream),
    "be waited for": lambda scene, buffer: buffer.stream.wait(scene.own),
    "synchronize": lambda scene, buffer: buffer.stream.synchronize(),
    "query": lambda scene, buffer: buffer.stream.query(),
    "handle": lambda scene, buffer: buffer.stream.handle,
    "capture": lambda scene, buffer: buffer.stream.capturing,
}


@pytest.mark.parametrize("use", USES)
def test_a_use_is_refused(scene: Scene, use: str) -> None:
    buffer = scene.closed()
    with pytest.raises(sa.ClosedError, match="closed"):
        USES[use](scene, buffer)
    assert "closed" in repr(buffer.stream) and buffer.stream.closed
    buffer.fill(3, scene.own)
    buffer.free(scene.own)


def test_it_can_be_named_no_more(scene: Scene) -> None:
    scene.pool.allocate(64, scene.theirs).free()
    scene.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            scene.pool.allocate(64, scene.theirs)


@pytest.mark.parametrize("end", ["drop", "close", "out of memory"])
@pytest.mark.parametrize("cached", [False, True])
def test_the_memory_is_free_once_the_device_is_idle(scene: Scene, end: str, cached: bool) -> None:
    """Not before: work of the stream may still write it. The host waits where memory runs out, or in ``close``."""
    with sa.MemoryPool(scene.device, max_size=32 * MiB) as pool:
        cache = sa.CachingAllocator(pool)
        source: Any = cache if cached else pool
        with Gate(scene.device) as gate:
            buffer = [source.allocate(20 * MiB, scene.theirs)]
            gate.hold(scene.theirs)
            buffer[0].fill(1)
            scene.close()
            opening = threading.Timer(0.1, gate.open)
            opening.start()
            if end == "close":
                buffer[0].close()
            in_threads(buffer.clear)
            if end == "drop":
                end_what_was_dropped()
            with source.allocate(20 * MiB, scene.own) as other:
                other.fill(2)
                scene.own.synchronize()
                scene.device.synchronize()
                assert holds(other, 2)
            opening.join()
        cache.close()


@pytest.mark.parametrize("mode", ["GLOBAL", "THREAD_LOCAL", "RELAXED"])
@pytest.mark.parametrize("scene", [OfCudaCore], indirect=True)
def test_a_pool_that_runs_out_invalidates_no_capture_of_another_thread(scene: Scene, mode: str) -> None:
    modes, other = cuda.CUstreamCaptureMode, Theirs(scene.device)

    def allocate() -> sa.Buffer:
        scene.driver.cuThreadExchangeStreamCaptureMode(modes.CU_STREAM_CAPTURE_MODE_RELAXED)
        return pool.allocate(20 * MiB, scene.own)

    with sa.MemoryPool(scene.device, max_size=32 * MiB) as pool:
        buffer = [pool.allocate(20 * MiB, scene.theirs)]
        scene.close()
        buffer.clear()
        end_what_was_dropped()
        assert not scene.driver.cuStreamBeginCapture(other.raw, getattr(modes, f"CU_STREAM_CAPTURE_MODE_{mode}"))[0]
        (found,) = in_threads(allocate)
        result, graph = scene.driver.cuStreamEndCapture(other.raw)
        assert not result and not scene.driver.cuGraphDestroy(graph)[0]
        found.free()
    other.close()


@pytest.mark.parametrize("end", ["close", "drop"])
def test_a_borrowed_array_is_released_after_our_work(scene: Scene, end: str) -> None:
    class Array: ...

    array: Any = Array()
    with scene.pool.allocate(64, scene.own) as memory:
        array.__cuda_array_interface__ = memory.__cuda_array_interface__ | {"stream": None}
        borrowed = [borrow(array, scene.own, lender=scene.theirs)]
        array, gone = None, weakref.ref(array)
        borrowed[0].fill(1)
        scene.close()
        if end == "close":
            borrowed[0].close()
        borrowed.clear()
        end_what_was_dropped()
        scene.own.synchronize()
        assert gone() is None


@pytest.mark.parametrize("kind", [OfCuPy, OfNumba, ExternalStream])
@pytest.mark.parametrize("scene", [Closable], indirect=True)
def test_cached_memory_when_their_object_dies_with_work_under_way(scene: Scene, kind: type[Theirs]) -> None:
    cache, theirs = sa.CachingAllocator(scene.pool), kind(scene.device)
    raw = theirs.raw
    with Gate(scene.device) as gate:
        free_under_work(cache, theirs, gate)
        del theirs
        end_what_was_dropped()
        others_are_whole(scene, gate, cache)
    cache.trim()
    assert scene.used == 0
    if kind is ExternalStream:
        assert not scene.driver.cuStreamDestroy(raw)[0]


@pytest.mark.parametrize("kind", [ExternalStream, OfCuPy, OfNumba, Closable])
@pytest.mark.parametrize("scene", [Closable], indirect=True)
def test_another_object_that_names_the_stream(scene: Scene, kind: type[Any]) -> None:
    """Cached memory of the first object returns after the work of the stream."""
    first, second = named = [object.__new__(kind) for _ in range(2)]
    for one in named:
        one._driver, one.raw = scene.driver, scene.theirs.raw
    with sa.CachingAllocator(scene.pool) as cache, Gate(scene.device) as gate:
        free_under_work(cache, first, gate)
        cache.allocate(64, second).free()
        end_what_was_dropped()
        others_are_whole(scene, gate, scene.pool)
    scene.device.synchronize()
    for one in named:
        one.raw = None


def test_recorded_work_waits_for_a_synchronization(scene: Scene) -> None:
    buffer = scene.pool.allocate(64, scene.theirs)
    stream = buffer.stream
    scene.close()
    work = Fence(session_of(scene.device), [stream])
    assert not work.done()
    with pytest.raises(sa.NotReadyError):
        work.precede(scene.own)
    scene.device.synchronize()
    assert work.done()
    buffer.free(scene.own)


def test_each_call_asks_once(scene: Scene) -> None:
    theirs = scene.theirs
    scene.pool.allocate(64, theirs).free()
    before = theirs.asked
    buffer = scene.pool.allocate(64, theirs)
    assert theirs.asked == before + 1
    buffer.free()
    assert theirs.asked == before + 2


@pytest.mark.parametrize("kind", [OfCuPy, OfNumba, OfCudaCore])
@pytest.mark.parametrize("kept", [False, True], ids=["by the cycle alone", "in the table"])
@pytest.mark.parametrize("scene", [Closable], indirect=True)
def test_a_garbage_cycle_with_a_stream(scene: Scene, kind: Any, kept: bool) -> None:
    """The collector calls finalisers in any order: the stream may be destroyed before its memory is dropped."""
    cycle: list[Any] = [kind(scene.device)]
    was = cycle[0].was
    cycle += [scene.pool.allocate(MiB, cycle[0]) for _ in range(3)]
    cycle.append(cycle)
    if not kept:
        forget_streams(scene.device)
    del cycle
    gc.collect()
    destroyed = [n for n, call in enumerate(scene.driver.calls) if call.name == "cuStreamDestroy"]
    assert len(destroyed) == (not kept and kind is not OfCudaCore)
    if destroyed:
        assert not any(names_it(call.args, was) for call in scene.driver.calls[destroyed[0] + 1 :])
    scene.device.synchronize()
    end_what_was_dropped()
    assert scene.used == 0


def test_the_protocol_as_an_attribute(scene: Scene) -> None:
    class Named:
        handle: int | None = scene.own.handle

        @property
        def __cuda_stream__(self) -> tuple[int, Any]:
            return 0, self.handle

    theirs: Any = Named()
    buffer = scene.pool.allocate(64, theirs)
    buffer.fill(1)
    theirs.handle = None
    with pytest.raises(sa.ClosedError):
        buffer.fill(2)
    buffer.free(scene.own)


def test_streams_that_live_as_long_as_their_object_are_not_asked(scene: Scene) -> None:
    class CuPy:
        ptr = scene.own.handle
        asked = 0

        def __cuda_stream__(self) -> tuple[int, int]:
            self.asked += 1
            return 0, self.ptr

    theirs, closable = CuPy(), scene.theirs
    for stream in (theirs, closable):
        scene.pool.allocate(64, stream).free(scene.own)
    before = theirs.asked, closable.asked
    for stream in (theirs, closable):
        scene.pool.allocate(64, stream).free(scene.own)
    assert theirs.asked == before[0] and closable.asked > before[1]


def test_a_stream_that_is_opened_again_has_work_again(device: sa.Device, pool: sa.MemoryPool) -> None:
    """Its handle may be the same. That the device was idle after the first close says nothing about later work."""
    theirs = Closable(device)
    with pool.allocate(MiB, theirs) as buffer:
        first, raw = buffer.stream, theirs.raw
    theirs.raw = None  # as if it were closed
    device.synchronize()
    theirs.raw = raw
    with pool.allocate(MiB, theirs) as buffer:
        assert buffer.stream is not first and not buffer.stream.drained
    theirs.close()
    device.synchronize()
