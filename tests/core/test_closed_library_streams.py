"""Streams that their library closes while memory of ours was allocated on them, as cuda.core's may be.

The handle of a destroyed stream crashes the process on hardware: no call may have it.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.core import stream as stream_module
from streamalloc.core.closed_streams import unknown_ends
from streamalloc.core.fence import Fence
from streamalloc.core.session import session_of
from streamalloc.driver.bindings import cuda
from streamalloc.interop.loans import borrow
from streamalloc.pool.cache import state
from streamalloc.testing import Gate
from tests.support import GROWTH, KEEP, MiB, end_what_was_dropped, holds, in_threads, names
from tests.vmm.support import HOST, PAGE, READWRITE


class Theirs:
    """A stream of a library."""

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
        if self.raw is None:
            raise RuntimeError("Stream has been closed")
        return 0, int(self.raw)


class OfCudaCore(Closable):
    """A stream with the interface of cuda.core 1.2."""

    @property
    def is_closed(self) -> bool:
        return self.raw is None


class Scene(NamedTuple):
    driver: Any
    device: sa.Device
    pool: sa.MemoryPool
    theirs: Closable
    own: sa.Stream

    def closed(self, of: Any = None) -> Any:
        """Memory that was allocated on their stream, which is closed by now."""
        buffer = (of or self.pool).allocate(MiB, self.theirs)
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
def scene(machine: Any, request: pytest.FixtureRequest) -> Iterator[Scene]:
    driver = sd.traced(machine)
    device = sa.Device(0, driver=driver)
    with sa.MemoryPool(device, release_threshold=KEEP) as pool, device.create_stream() as own:
        scene = Scene(driver, device, pool, request.param(device), own)
        yield scene
        if scene.theirs.raw is None:
            assert not [call for call in driver.calls[: scene.reused()] if names_it(call.args, scene.theirs.was)]
        scene.theirs.close()
        device.synchronize()
        assert scene.used == 0


def names_it(values: Iterable[Any], handle: int) -> bool:
    return any(isinstance(one, cuda.CUstream) and int(one) == handle for one in values)


def dropping(scene: Scene, buffer: list[Any]) -> None:
    buffer.clear()
    end_what_was_dropped()


def written(scene: Scene, gate: Gate, source: Any, count: int) -> list[sa.Buffer]:
    """Memory that the work of their stream, which the gate holds until it is written, does not overwrite."""
    others = [source.allocate(MiB, scene.own) for _ in range(count)]
    for other in others:
        other.fill(2)
    scene.own.synchronize()
    gate.open()
    scene.device.synchronize()
    assert all(holds(other, 2) for other in others)
    return others


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


@pytest.mark.parametrize("stream", ["theirs", "handle"])
def test_it_can_be_named_no_more(scene: Scene, stream: str) -> None:
    scene.pool.allocate(64, scene.theirs).free()
    scene.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            scene.pool.allocate(64, scene.theirs)


@pytest.mark.parametrize("end", ["drop", "close"])
@pytest.mark.parametrize("cached", [False, True])
def test_the_memory_is_free_once_the_device_was_synchronized(
    machine: Any, scene: Scene, end: str, cached: bool
) -> None:
    """Not before: work of the stream may still write it."""
    cache = sa.CachingAllocator(scene.pool)
    with Gate(scene.device) as gate:
        buffer = [(cache if cached else scene.pool).allocate(MiB, scene.theirs)]
        gate.hold(scene.theirs)
        buffer[0].fill(1)
        scene.close()
        if end == "drop":
            dropping(scene, buffer)
        else:
            with pytest.raises(sa.NotReadyError, match="synchronise the device"):
                buffer[0].close()
        others = written(scene, gate, cache if cached else scene.pool, 3)
        if end == "close":
            buffer[0].close()
        for other in others:
            other.free()
    cache.close()
    end_what_was_dropped()
    scene.device.synchronize()
    assert scene.used == 0


def test_many_that_another_thread_drops(scene: Scene) -> None:
    buffers = [scene.pool.allocate(4096, scene.theirs) for _ in range(20)]
    scene.close()
    in_threads(buffers.clear)
    scene.device.synchronize()
    assert scene.used == 0


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("gone", [False, True], ids=["closed", "dropped"])
def test_a_pool_that_runs_out_synchronizes(scene: Scene, cached: bool, gone: bool) -> None:
    with sa.MemoryPool(scene.device, max_size=32 * MiB) as pool:
        cache = sa.CachingAllocator(pool)
        source, stream = (cache if cached else pool), type(scene.theirs)(scene.device)
        buffer = [source.allocate(20 * MiB, stream)]
        dropping(scene, buffer)
        stream.close()
        if gone:
            del stream
        source.allocate(20 * MiB, scene.own).free()
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
        dropping(scene, buffer)
        assert not scene.driver.cuStreamBeginCapture(other.raw, getattr(modes, f"CU_STREAM_CAPTURE_MODE_{mode}"))[0]
        (found,) = in_threads(allocate)
        result, graph = scene.driver.cuStreamEndCapture(other.raw)
        assert not result and not scene.driver.cuGraphDestroy(graph)[0]
        found.free()
    other.close()


def test_memory_that_sleeps(scene: Scene) -> None:
    with sa.MemoryPool(HOST, driver=scene.driver) as host:
        host.set_access(scene.device, READWRITE)
        group = vmm.SleepGroup(scene.device, backup=host)
        buffer = group.allocate(5000)
        buffer.fill(3, scene.theirs)
        group.sleep(stream=scene.theirs)
        scene.close()
        group.wake()
        scene.device.synchronize()
        assert holds(buffer, 3)
        group.close()
        buffer.close()


def test_virtual_memory_is_unmapped(scene: Scene) -> None:
    buffer = vmm.GrowableBuffer(scene.device, 64 * MiB, 2 * MiB, stream=scene.own)
    buffer.fill(1, scene.theirs)
    scene.close()
    del buffer
    end_what_was_dropped()
    scene.device.synchronize()


@pytest.mark.parametrize("kind", ["closed", "closed and dropped", "dropped"])
@pytest.mark.parametrize("scene", [OfCudaCore], indirect=True)
def test_dropped_virtual_memory_waits_for_the_work_of_closed_streams(scene: Scene, kind: str) -> None:
    theirs: Any = OfCuPy(scene.device) if kind == "dropped" else OfCudaCore(scene.device)
    buffer = [vmm.GrowableBuffer(scene.device, 2 * MiB, 2 * MiB, stream=scene.own)]
    end_what_was_dropped()
    with Gate(scene.device) as gate:
        gate.hold(theirs)
        buffer[0].fill(1, theirs)
        if kind != "dropped":
            theirs.close()
        if kind != "closed":
            del theirs
        scene.driver.calls.clear()
        dropping(scene, buffer)
        assert "cuMemUnmap" not in names(scene.driver)
        gate.open()
        scene.device.synchronize()
        assert "cuMemUnmap" in names(scene.driver)


@pytest.mark.simulated_only("memory of a known size")
def test_virtual_memory_that_runs_out_awaits_closed_streams(machine: Any) -> None:
    device = sa.Device(0, driver=sd.simulated(memory=64 * MiB))
    size = device.memory_info().free // 2 // PAGE * PAGE + PAGE
    for _ in range(3):
        buffer = vmm.GrowableBuffer(device, size, size)
        buffer.fill(1, OfCuPy(device))
        del buffer


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
        dropping(scene, borrowed)
        scene.own.synchronize()
        assert gone() is None


@pytest.mark.parametrize("scene", [OfCudaCore], indirect=True)
def test_a_trim_while_their_library_closes_the_stream(scene: Scene) -> None:
    """The memory stays until the device was synchronised, and the caller gets no error."""

    class Closing(OfCudaCore):
        asked = left = 0

        @property
        def is_closed(self) -> bool:
            self.asked += 1
            if self.asked == self.left:
                self.close()
            return self.raw is None

    cache = sa.CachingAllocator(scene.pool)
    left, asked = 0, 0
    while asked >= left:
        left += 1
        theirs = Closing(scene.device)
        cache.allocate(MiB, theirs).free()
        theirs.asked, theirs.left = 0, left
        cache.trim()
        asked = theirs.asked
        theirs.close()
        scene.device.synchronize()
    assert left > 2
    cache.close()
    scene.close()


def free_under_work(cache: sa.CachingAllocator, theirs: Any, gate: Gate, held: Any) -> None:
    """Free cached memory that work of their stream writes; the gate holds the stream, by this name of it."""
    cache.allocate(MiB, theirs).free()
    buffer = cache.allocate(MiB, theirs)
    gate.hold(held)
    buffer.fill(1)
    buffer.free()


@pytest.mark.parametrize("closes", [False, True])
def test_cached_memory_when_their_object_dies(scene: Scene, closes: bool) -> None:
    """Its death ends the driver's stream as a close does: work of the stream may still write the memory."""
    cache = sa.CachingAllocator(scene.pool)
    theirs = type(scene.theirs)(scene.device)
    with Gate(scene.device) as gate:
        free_under_work(cache, theirs, gate, theirs)
        raw = theirs.raw
        if closes:
            theirs.close()
        del theirs
        end_what_was_dropped()
        for other in written(scene, gate, scene.pool, GROWTH // MiB + 2):
            other.free()
    if not closes:
        assert not scene.driver.cuStreamDestroy(raw)[0]
    cache.close()
    scene.device.synchronize()


class OfCuPy(Theirs):
    """A stream that is destroyed with its object only."""

    @property
    def ptr(self) -> int:
        return int(self.raw)

    def __del__(self) -> None:
        self.close()


class OfNumba(Theirs):
    def __del__(self) -> None:
        self.close()

    @property
    def handle(self) -> Any:
        return self.raw and ctypes.c_void_p(int(self.raw))


class ExternalStream(OfCuPy):
    """A stream of other code that the object only names."""

    def __del__(self) -> None: ...


@pytest.mark.parametrize("kind", [OfCuPy, OfNumba, ExternalStream])
@pytest.mark.parametrize("scene", [Closable], indirect=True)
def test_cached_memory_when_their_object_dies_with_work_under_way(
    scene: Scene, kind: Callable[[sa.Device], Any]
) -> None:
    cache = sa.CachingAllocator(scene.pool)
    theirs = kind(scene.device)
    raw = theirs.raw
    with Gate(scene.device) as gate:
        free_under_work(cache, theirs, gate, raw)
        del theirs
        end_what_was_dropped()
        for other in written(scene, gate, cache, GROWTH // MiB + 2):
            other.free()
    cache.trim()
    assert scene.used == 0
    if kind is ExternalStream:
        assert not scene.driver.cuStreamDestroy(raw)[0]


@pytest.mark.parametrize("kind", [OfCuPy, OfNumba])
@pytest.mark.parametrize("scene", [Closable], indirect=True)
def test_few_streams_live_for_their_cached_memory(
    scene: Scene, kind: Callable[[sa.Device], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "_MAX_KEPT_ALIVE", 2)
    cache = sa.CachingAllocator(scene.pool)
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    for _ in range(6):
        theirs = kind(scene.device)
        alive.add(theirs)
        cache.allocate(MiB, theirs).free()
    assert len(alive) == 2 and theirs in alive
    with cache.allocate(MiB, theirs) as buffer:
        scene.theirs.close()
        del theirs
        cache.close()
        assert len(alive) == 1  # of the buffer
    del buffer
    scene.device.synchronize()
    assert not alive


@pytest.mark.parametrize("kind", [OfCuPy, OfNumba])
@pytest.mark.parametrize("scene", [Closable], indirect=True)
def test_no_stream_lives_for_memory_that_was_trimmed(scene: Scene, kind: Callable[[sa.Device], Any]) -> None:
    cache = sa.CachingAllocator(scene.pool)
    theirs = kind(scene.device)
    gone = weakref.ref(theirs)
    cache.allocate(MiB, theirs).free()
    del theirs
    assert gone() is not None
    cache.trim()
    assert gone() is None
    cache.close()


@pytest.mark.parametrize("scene", [Closable], indirect=True)
def test_a_block_of_a_stream_whose_memory_was_returned(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """It returns as well when its buffer is freed, though the stream has other cached memory by then."""
    monkeypatch.setattr(state, "_MAX_KEPT_ALIVE", 2)
    cache = sa.CachingAllocator(scene.pool)
    streams = [OfCuPy(scene.device) for _ in range(3)]
    buffer = cache.allocate(MiB, streams[0])
    for theirs in (*streams[1:], streams[0]):
        cache.allocate(MiB, theirs).free()
    scene.device.synchronize()
    cache.allocate(MiB, streams[0]).free()
    buffer.free()
    cache.close()
    scene.device.synchronize()
    used = scene.used
    del buffer, cache, streams, theirs
    gc.collect()
    assert used == 0


@pytest.mark.parametrize("kind", [ExternalStream, OfCuPy, OfNumba, Closable])
@pytest.mark.parametrize("scene", [Closable], indirect=True)
def test_another_object_that_names_the_stream(scene: Scene, kind: Any) -> None:
    """Cached memory of the first object returns after the work of the stream."""

    def named() -> Any:
        one = kind.__new__(kind)
        one._driver, one.raw = scene.driver, scene.theirs.raw
        named_ones.append(one)
        return one

    named_ones: list[Any] = []
    cache = sa.CachingAllocator(scene.pool)
    with Gate(scene.device) as gate:
        first = named()
        cache.allocate(MiB, first).free()
        buffer = cache.allocate(MiB, first)
        gate.hold(scene.theirs.raw)
        buffer.fill(1)
        buffer.free()
        del buffer
        cache.allocate(64, named()).free()
        end_what_was_dropped()
        for other in written(scene, gate, scene.pool, GROWTH // MiB + 2):
            other.free()
    cache.close()
    scene.device.synchronize()
    for one in named_ones:
        one.raw = None


def test_a_synchronization_between_the_close_and_ours(scene: Scene) -> None:
    """The end of the work is known then, though nobody had used the stream since its close."""
    buffers = [scene.pool.allocate(64, scene.theirs) for _ in range(2)]
    assert buffers[0]._stream is not buffers[1]._stream
    scene.close()
    scene.device.synchronize()
    for buffer in buffers:
        buffer.close()


def test_a_later_close_that_another_thread_finds_meanwhile(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a synchronisation, which makes the end of the first stream known."""
    other = type(scene.theirs)(scene.device)
    buffers = [scene.pool.allocate(MiB, theirs) for theirs in (scene.theirs, other)]
    first, second = (buffer.stream for buffer in buffers)
    scene.close()
    session, begin = session_of(scene.device), stream_module.moment

    def find_other() -> int:
        monkeypatch.undo()
        found = begin()
        scene.device.synchronize()
        other.close()
        assert second.closed and len(unknown_ends(session)) == 1
        return found

    monkeypatch.setattr(stream_module, "moment", find_other)
    assert first.closed
    assert [one._number for one in unknown_ends(session)] == [second._number]
    scene.device.synchronize()
    assert not unknown_ends(session)
    buffers.clear()


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
    asked: list[int] = []

    class Counting(type(scene.theirs)):  # type: ignore[misc]
        def __cuda_stream__(self) -> Any:
            asked.append(1)
            return super().__cuda_stream__()

    def is_closed(self: Any) -> bool:
        asked.append(1)
        return self.raw is None

    if hasattr(scene.theirs, "is_closed"):
        Counting.is_closed = property(is_closed)
    theirs = Counting(scene.device)
    scene.pool.allocate(64, theirs).free()
    asked.clear()
    buffer = scene.pool.allocate(64, theirs)
    assert len(asked) == 1
    buffer.free()
    assert len(asked) == 2
    theirs.close()


def test_a_garbage_cycle_frees_its_own_memory(scene: Scene) -> None:
    """Weak references to the library's object are cleared by then."""

    class Holder:
        def __init__(self) -> None:
            self.stream = type(scene.theirs)(scene.device)
            self.buffer, self.cycle = scene.pool.allocate(MiB, self.stream), self

        def __del__(self) -> None:
            if not self.buffer.freed:
                self.buffer.free()
            self.stream.close()

    Holder()
    gc.collect()
    scene.device.synchronize()
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

        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, self.ptr

    assert scene.pool.allocate(64, CuPy())._stream.open_check is None
    asked = scene.pool.allocate(64, scene.theirs)
    assert asked._stream.open_check is not None
    asked.free()
