"""The cache on each kind of stream: driver calls per operation, captures, and memory freed on another stream."""

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import streamalloc as sa
from streamalloc.core import library_streams
from streamalloc.core.event import Spares
from streamalloc.core.session import session_of
from streamalloc.driver.bindings import cuda
from streamalloc.pool.cache.state import MAX_RETURNING, StreamCache
from streamalloc.testing import Gate
from tests.interleaving import interleaved
from tests.interop.libraries import LibraryStream
from tests.support import executed, holds

SIZE = 4096


class Theirs(LibraryStream):
    """A stream of another library, which destroys it at the end of its object."""

    __module__ = "cuda.core"  # wrappers of other modules may outlive their stream

    def __init__(self, device: sa.Device) -> None:
        driver: Any = device.driver
        self._driver = driver
        with device.current():
            super().__init__(int(driver.cuStreamCreate(1)[1]))

    def close(self) -> None:
        """Destroy the stream; the object names no handle from then on."""
        handle, self.handle = self.handle, None
        if handle is not None:
            self._driver.cuStreamDestroy(cuda.CUstream(handle))

    __del__ = close


class Null:
    """The legacy default stream as PyTorch names it."""

    cuda_stream = 0
    device_index = 0


@pytest.fixture
def cache(traced: Any, device: sa.Device) -> Iterator[sa.CachingAllocator]:
    with sa.MemoryPool(device) as pool, sa.CachingAllocator(pool) as cache:
        yield cache


def _lent(device: sa.Device) -> sa.Stream:
    stream = device.create_stream()
    assert stream.handle
    return stream


KINDS: dict[str, tuple[Callable[[sa.Device], Any], list[str]]] = {
    "own": (lambda device: device.create_stream(), []),
    "default": (lambda device: device.default_stream, []),
    "default of a library": (lambda device: Null(), []),
    "own, lent": (_lent, ["cuStreamIsCapturing"]),
    "library's": (Theirs, ["cuStreamIsCapturing"]),
    "per-thread": (lambda device: device.per_thread_stream, ["cuCtxGetCurrent", "cuStreamIsCapturing"]),
}
"""A stream of each kind, and the driver calls of an allocation from the cache. A free to it makes none."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ["free", "drop", "free on its stream"])
def test_calls_of_a_hit(cache: sa.CachingAllocator, device: sa.Device, traced: Any, kind: str, end: str) -> None:
    make, calls = KINDS[kind]
    stream = make(device)
    traced.cuCtxSetCurrent(session_of(device).context(0))
    for number in range(4):
        buffer = cache.allocate(SIZE, stream)
        if not number:
            address = buffer.address
        assert not number or (buffer.address == address and [call.name for call in traced.calls] == calls)
        del traced.calls[:]
        if end == "free":
            buffer.free()
        elif end == "drop":
            del buffer
        else:
            buffer.free(buffer.stream)
        assert traced.calls == []
        del traced.calls[:]
    assert cache.statistics().misses == 1
    buffer = None  # type: ignore[assignment]


def test_the_default_stream_has_one_cache_whatever_its_handle(cache: sa.CachingAllocator, device: sa.Device) -> None:
    buffer = cache.allocate(SIZE, Null())
    address = buffer.address
    buffer.free()
    with cache.allocate(SIZE, device.default_stream) as again:
        assert again.address == address


def test_an_unowned_stream_has_no_cache(cache: sa.CachingAllocator, device: sa.Device, stream: sa.Stream) -> None:
    """It may end without notice, and the driver give its handle to another stream."""
    cache.allocate(SIZE, sa.Stream.of_handle(device, stream.handle, None)).free()
    assert cache.statistics()[4:7] == (0, 0, 1)  # in use, cached, misses


def test_kept_for_cached_memory(cache: sa.CachingAllocator, device: sa.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of library streams keeps the latest. The blocks of one that leaves it return to the pool first."""
    monkeypatch.setattr(library_streams, "MOST_KEPT", 2)
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    for _ in range(6):
        theirs = Theirs(device)
        alive.add(theirs)
        cache.allocate(SIZE, theirs).free()
    assert cache.statistics()[4:6] == (0, 2 * SIZE)
    gc.collect()
    assert len(alive) == 2
    with cache.allocate(SIZE, theirs) as buffer:
        for _ in range(2):
            cache.allocate(SIZE, Theirs(device)).free()
        assert cache.statistics().in_use == SIZE
        buffer.fill(3)  # it keeps its stream
        assert holds(buffer, 3)
        cache.allocate(SIZE, theirs).free()
    device.synchronize()
    assert cache.statistics()[4:6] == (0, 2 * SIZE)


@pytest.mark.parametrize("end", ["trim", "close", "out of memory"])
def test_blocks_of_a_stream_that_its_library_has_closed(device: sa.Device, gate: Gate, end: str) -> None:
    """They return once the device is idle, as nothing can be ordered after the stream's work."""
    with sa.MemoryPool(device, max_size=32 << 20) as pool, device.create_stream() as own:
        cache, theirs = sa.CachingAllocator(pool), Theirs(device)
        buffer = cache.allocate(20 << 20, theirs)
        gate.hold(buffer.stream)
        buffer.fill(1)
        buffer.free()
        theirs.close()
        threading.Timer(0.05, gate.open).start()
        if end == "out of memory":
            other = cache.allocate(20 << 20, own)
            other.fill(2)
            device.synchronize()
            assert holds(other, 2)
            other.free()
        getattr(cache, "trim" if end == "trim" else "close")()
        pool.statistics()
        device.synchronize()
        assert pool.statistics().used == 0
        cache.close()


def test_a_new_stream_with_the_handle_of_a_closed_one(cache: sa.CachingAllocator, device: sa.Device) -> None:
    first, second = Theirs(device), Theirs(device)
    with cache.allocate(SIZE, first) as buffer:
        cache.allocate(SIZE, first).free()
        handle, first.handle = first.handle, None
        second.close()
        second.handle = handle
        with cache.allocate(SIZE, second):
            assert cache.statistics().misses == 3  # no block of the first stream
        buffer.free(device.default_stream)
        assert buffer.freed


def test_events_are_few_and_used_again(cache: sa.CachingAllocator, device: sa.Device, traced: Any, gate: Gate) -> None:
    with device.create_stream() as loader, device.create_stream() as user:
        for held in (True, False):
            batches = [cache.allocate(SIZE, loader) for _ in range(MAX_RETURNING + 8)]
            if held:
                gate.hold(user)
            del traced.calls[:]
            for batch in batches:
                batch.free(user)
            del batch, batches
            made = [call.name for call in traced.calls]
            assert made.count("cuEventCreate") == MAX_RETURNING - (0 if held else Spares.most)
            if held:
                # The others return to the pool in the order of the stream.
                assert made.count("cuMemFreeAsync") == 8
                gate.open()
                assert executed(user)


@pytest.mark.parametrize("end", ["trim", "close", "close of the stream", "out of memory"])
def test_blocks_on_their_way_home_are_released_after_their_event(device: sa.Device, end: str, gate: Gate) -> None:
    """Nothing waits on the host: the home stream waits for the event before the free."""
    with (
        device.create_stream() as user,
        sa.MemoryPool(device, max_size=32 << 20) as pool,
        contextlib.ExitStack() as resources,
    ):
        loader = device.create_stream()
        cache = sa.CachingAllocator(pool)
        batch = cache.allocate(SIZE, loader)
        gate.hold(user)
        batch.free(user)
        assert cache.statistics().cached == SIZE
        if end == "trim":
            with pytest.warns(sa.PendingFreesWarning):
                cache.trim()
        elif end == "close":
            cache.close()
        elif end == "close of the stream":
            loader.close()
        else:
            pool.attributes.reuse_allow_internal_dependencies = False
            with pytest.raises(sa.OutOfMemoryError):
                cache.allocate(32 << 20, loader)
        assert pool.statistics().used == 0 and cache._state.blocks == {}
        resources.callback(loader.close)
        gate.open()
        device.synchronize()


def test_a_cache_that_ends_while_another_begins_on_its_stream(device: sa.Device, pool: sa.MemoryPool) -> None:
    """The other returns its memory when the stream is closed."""

    def make() -> tuple[sa.CachingAllocator, sa.CachingAllocator, sa.Stream]:
        ends, begins, stream = sa.CachingAllocator(pool), sa.CachingAllocator(pool), device.create_stream()
        ends.allocate(SIZE, stream).free()
        return ends, begins, stream

    both = interleaved(
        StreamCache.attempt, make, lambda made: made[0].close(), lambda made: made[1].allocate(SIZE, made[2]).free()
    )
    for _, begins, stream in both:
        stream.close()
        assert begins.statistics().used == 0
        begins.close()


@pytest.mark.parametrize("function", [StreamCache.take, StreamCache._find_fitting, StreamCache.size_class])
def test_a_stream_that_ends_while_another_thread_allocates_on_it(
    device: sa.Device, cache: sa.CachingAllocator, function: Callable[..., object]
) -> None:
    def make() -> sa.Stream:
        stream = device.create_stream()
        cache.allocate(3 * SIZE, stream).free()
        cache.trim()
        return stream

    def allocate(stream: sa.Stream) -> None:
        with contextlib.suppress(sa.ClosedError):
            cache.allocate(SIZE, stream)

    for stream in interleaved(function, make, allocate, sa.Stream.close):
        assert stream.closed
        device.synchronize()  # a buffer that is dropped on a closed stream is freed after it
        cache.trim()
        assert cache.statistics().used == 0


def test_a_stream_ends_while_a_block_returns(device: sa.Device, cache: sa.CachingAllocator, stream: sa.Stream) -> None:
    def make() -> tuple[sa.Buffer, sa.Stream]:
        home = device.create_stream()
        return cache.allocate(SIZE, home), home

    both = interleaved(
        sa.CachingAllocator._return_home, make, lambda made: made[0].free(stream), lambda made: made[1].close()
    )
    for buffer, _ in both:
        assert buffer.freed
        device.synchronize()
        assert cache.statistics().used == 0
