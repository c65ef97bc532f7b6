"""The cache on each kind of stream: driver calls per operation, captures, and memory freed on another stream."""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import traces
from streamalloc.core.internal import leave_stream
from streamalloc.core.session import session_of
from streamalloc.driver.bindings import cuda
from streamalloc.pool.cache import state as state_module
from streamalloc.pool.cache.state import MAX_RETURNING, StreamCache
from streamalloc.testing import Faults, Gate
from streamalloc.traces.replaying import prepare
from tests.interleaving import interleaved
from tests.support import executed, holds

SIZE = 4096


class Theirs:
    """A stream of another library, which destroys it at the end of its object."""

    def __init__(self, device: sa.Device) -> None:
        driver: Any = device.driver
        self._driver = driver
        with device.current():
            self.handle: int | None = int(driver.cuStreamCreate(1)[1])

    def __cuda_stream__(self) -> tuple[int, Any]:
        return (0, self.handle)

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
"""A stream of each kind, and the driver calls of an allocation from the cache, and of a free to it."""


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
        assert (
            buffer.address == address and [call.name for call in traced.calls] == calls * bool(number)
        ) or not number
        del traced.calls[:]
        if end == "free":
            buffer.free()
        elif end == "drop":
            del buffer
        else:
            buffer.free(buffer.stream if kind == "library's" else stream)
        assert end == "free on its stream" or [call.name for call in traced.calls] == calls * (end == "free")
        del traced.calls[:]
    assert cache.statistics().misses == 1
    buffer = None  # type: ignore[assignment]


def test_the_default_stream_has_one_cache_whatever_its_handle(cache: sa.CachingAllocator, device: sa.Device) -> None:
    buffer = cache.allocate(SIZE, Null())
    address = buffer.address
    buffer.free()
    with cache.allocate(SIZE, device.default_stream) as again:
        assert again.address == address


def test_no_context_is_needed_for_a_hit(cache: sa.CachingAllocator, device: sa.Device, traced: Any) -> None:
    cache.allocate(SIZE, device.default_stream).free()
    with contextlib.ExitStack() as undo:
        while int(traced.cuCtxGetCurrent()[1]):
            undo.callback(traced.cuCtxPushCurrent, traced.cuCtxPopCurrent()[1])
        del traced.calls[:]
        cache.allocate(SIZE, device.default_stream).free()
        assert traced.calls == []


@pytest.mark.parametrize("begin", ["before the allocation", "before the free"])
def test_a_stream_that_its_library_captures(cache: sa.CachingAllocator, device: sa.Device, begin: str) -> None:
    """An allocation in the capture is the graph's; memory from outside cannot be freed in it, as with a pool."""
    stream, driver = Theirs(device), device.driver
    raw, relaxed = cuda.CUstream(stream.handle), cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    buffer = cache.allocate(SIZE, stream)
    address = buffer.address
    if begin == "before the allocation":
        buffer.free()
    assert not driver.cuStreamBeginCapture(raw, relaxed)[0]
    if begin == "before the free":
        with pytest.raises(sa.CaptureError):
            buffer.free()
    inside = cache.allocate(SIZE, stream)
    assert type(inside) is sa.GraphBuffer and inside.address != address
    inside.free()
    result, graph = driver.cuStreamEndCapture(raw)
    assert not result
    driver.cuGraphDestroy(graph)
    if begin == "before the free":
        buffer.free()
    with cache.allocate(SIZE, stream) as again:
        assert again.address == address
    assert cache.statistics().misses == 1


def test_a_library_s_stream_that_has_gone(cache: sa.CachingAllocator, device: sa.Device) -> None:
    """Its blocks return to the pool once its work must be done; a stream with the same handle finds none of them."""
    stream = Theirs(device)
    cache.allocate(SIZE, stream).free()
    buffer = cache.allocate(SIZE, stream)
    del stream
    gc.collect()
    buffer.fill(3)  # it keeps its stream
    assert holds(buffer, 3)
    buffer.free()
    del buffer
    gc.collect()
    device.synchronize()
    assert cache.statistics()[4:6] == (0, 0)
    stream = Theirs(device)
    with cache.allocate(SIZE, stream):
        assert cache.statistics().misses == 2


def test_a_block_of_a_stream_that_two_caches_have_used(
    cache: sa.CachingAllocator, device: sa.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that has left the stream leaves its blocks to the pool, although the other has lists there."""
    monkeypatch.setattr(state_module, "_MAX_KEPT_ALIVE", 1)

    class Kept:
        """A stream whose object the cache keeps, as CuPy's."""

        def __init__(self) -> None:
            self._theirs = Theirs(device)
            self.ptr: int = self._theirs.handle or 0

    first, second = Kept(), Kept()
    buffer = cache.allocate(SIZE, first)
    with sa.MemoryPool(device) as pool, sa.CachingAllocator(pool) as other:
        other.allocate(SIZE, first).free()
        cache.allocate(SIZE, second).free()
        buffer.free()
        device.synchronize()
        cache.trim()
        assert cache.pool.statistics().used == 0


def test_a_trim_after_a_library_has_closed_its_stream(cache: sa.CachingAllocator, device: sa.Device) -> None:
    """The blocks return once the device was synchronised; until then others do."""
    stream = Theirs(device)
    with device.create_stream() as own:
        for one in (stream, own):
            cache.allocate(SIZE, one).free()
        stream.close()
        cache.trim()
        own.synchronize()
        assert cache.pool.statistics().used == SIZE
    device.synchronize()
    assert cache.pool.statistics().used == 0


@pytest.mark.filterwarnings("ignore::streamalloc.PendingFreesWarning")
@pytest.mark.parametrize("act", ["trim", "close"])
@pytest.mark.parametrize("result", ["CUDA_ERROR_INVALID_HANDLE", "CUDA_ERROR_INVALID_CONTEXT"])
@pytest.mark.parametrize("call", ["cuStreamIsCapturing", "cuMemFreeAsync", "cuEventRecord"])
def test_a_stream_that_is_destroyed_during(machine: Any, call: str, result: str, act: str) -> None:
    """The call with its handle fails; its memory waits for a synchronisation of the device, other memory does not."""
    faults: Any = Faults(machine)
    device = sa.Device(0, driver=faults)
    with sa.MemoryPool(device) as pool, sa.CachingAllocator(pool) as cache, device.create_stream() as own:
        theirs = Theirs(device)
        for one in (theirs, own):
            cache.allocate(SIZE, one).free()
        faults.fail(call, result=result)
        getattr(cache, act)()
        hit = faults.failed == [call]
        faults.stop()
        own.synchronize()
        assert hit == (act == "trim" or call != "cuEventRecord")
        assert pool.statistics().used == (SIZE if hit and call != "cuEventRecord" else 0)
        device.synchronize()
        assert pool.statistics().used == 0


def test_a_new_stream_with_the_handle_of_one_that_its_library_closed(
    cache: sa.CachingAllocator, device: sa.Device
) -> None:
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


def test_a_block_comes_home_after_its_event(cache: sa.CachingAllocator, device: sa.Device, traced: Any) -> None:
    with device.create_stream() as loader, device.create_stream() as user, Gate(device) as gate:
        batch = cache.allocate(SIZE, loader)
        address = batch.address
        gate.hold(user)
        batch.free(user)
        with cache.allocate(SIZE, loader) as other:
            assert other.address != address
            assert cache.statistics()[4:6] == (SIZE, SIZE)
            gate.open()
            assert executed(user)
            with cache.allocate(SIZE, loader) as again:
                assert again.address == address


def test_events_are_few_and_used_again(cache: sa.CachingAllocator, device: sa.Device, traced: Any) -> None:
    with device.create_stream() as loader, device.create_stream() as user, Gate(device) as gate:
        for held in (True, False):
            batches = [cache.allocate(SIZE, loader) for _ in range(MAX_RETURNING + 8)]
            if held:
                gate.hold(user)
            del traced.calls[:]
            for batch in batches:
                batch.free(user)
            del batch, batches
            made = [call.name for call in traced.calls]
            assert made.count("cuEventCreate") == MAX_RETURNING * held
            if held:
                # The others return to the pool in the order of the stream.
                assert made.count("cuMemFreeAsync") == 8
                gate.open()
                assert executed(user)


@pytest.mark.parametrize("end", ["trim", "close", "close of the stream", "out of memory"])
def test_blocks_on_their_way_home_are_released_after_their_event(device: sa.Device, end: str) -> None:
    """Nothing waits on the host: the home stream waits for the event before the free."""
    with (
        device.create_stream() as user,
        Gate(device) as gate,
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


def test_a_loader_asks_the_pool_no_more(device: sa.Device) -> None:
    """Replays of the made-up traces make no allocation and no free of the driver once the cache has what it needs."""
    driver = sd.traced(device.driver)
    traced = sa.Device(0, driver=driver)
    for name in ("loading", "mixed"):
        trace = traces.WORKLOADS[name](1)
        with (
            sa.MemoryPool(traced, release_threshold=1 << 40) as pool,
            sa.CachingAllocator(pool) as cache,
            prepare(trace, cache, traced) as replay,
        ):
            for _ in range(6):
                misses = cache.statistics().misses
                replay.run()
                traced.synchronize()
            assert cache.statistics().misses - misses <= 3
        del driver.calls[:]


def test_a_cache_that_ends_while_another_begins_on_its_stream(device: sa.Device, pool: sa.MemoryPool) -> None:
    """The other returns its memory when the stream is closed."""

    def make() -> tuple[sa.CachingAllocator, sa.CachingAllocator, sa.Stream]:
        ends, begins, stream = sa.CachingAllocator(pool), sa.CachingAllocator(pool), device.create_stream()
        ends.allocate(SIZE, stream).free()
        return ends, begins, stream

    both = interleaved(
        leave_stream, make, lambda made: made[0].close(), lambda made: made[1].allocate(SIZE, made[2]).free()
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
        cache.trim()
        assert cache.statistics().used == 0


class TestOneQueryForMany:
    """The newest event of a stream stands for those recorded before it, and for no others."""

    def blocks(self, cache: sa.CachingAllocator, stream: sa.Stream, number: int) -> tuple[list[sa.Buffer], list[int]]:
        buffers = [cache.allocate(SIZE, stream) for _ in range(number)]
        return buffers, [buffer.address for buffer in buffers]

    def back(self, cache: sa.CachingAllocator, stream: sa.Stream, number: int) -> list[int]:
        """Addresses of the next blocks of a stream."""
        return [buffer.address for buffer in [cache.allocate(SIZE, stream) for _ in range(number)]]

    def test_of_one_stream(self, cache: sa.CachingAllocator, device: sa.Device, traced: Any) -> None:
        with device.create_stream() as loader, device.create_stream() as user:
            buffers, addresses = self.blocks(cache, loader, 4)
            for buffer in buffers:
                buffer.free(user)
            assert executed(user)
            del traced.calls[:]
            assert sorted(self.back(cache, loader, 4)) == sorted(addresses)
            assert [call.name for call in traced.calls] == ["cuEventQuery"]

    def test_of_another_stream_in_between(self, cache: sa.CachingAllocator, device: sa.Device) -> None:
        with (
            device.create_stream() as loader,
            device.create_stream() as user,
            device.create_stream() as late,
            Gate(device) as gate,
        ):
            buffers, addresses = self.blocks(cache, loader, 3)
            gate.hold(late)
            for buffer, stream in zip(buffers, (user, late, user), strict=True):
                buffer.free(stream)
            assert executed(user)
            assert set(self.back(cache, loader, 3)) & set(addresses) == {addresses[0]}

    def test_of_blocks_of_other_streams(self, cache: sa.CachingAllocator, device: sa.Device, traced: Any) -> None:
        with (
            device.create_stream() as loader,
            device.create_stream() as other,
            device.create_stream() as user,
            Gate(device) as gate,
        ):
            (early, late), addresses = self.blocks(cache, loader, 2)
            (newest,), _ = self.blocks(cache, other, 1)
            early.free(user)
            newest.free(user)
            assert executed(user)
            self.back(cache, other, 1)
            del traced.calls[:]
            assert self.back(cache, loader, 1) == addresses[:1]
            assert traced.calls == []
            gate.hold(user)
            late.free(user)
            assert addresses[1] not in self.back(cache, loader, 1)

    def test_recorded_after_the_newest_by_another_thread(
        self, cache: sa.CachingAllocator, device: sa.Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """That thread was between its record and the queue when the newest was recorded."""
        with device.create_stream() as loader, device.create_stream() as user, Gate(device) as gate:
            buffers, addresses = self.blocks(cache, loader, 2)
            record = StreamCache.record

            def slow(home: StreamCache, stream: sa.Stream) -> sa.Event:
                event = record(home, stream)
                monkeypatch.setattr(StreamCache, "record", record)
                gate.hold(stream)
                buffers[0].free(stream)
                return event

            monkeypatch.setattr(StreamCache, "record", slow)
            buffers[1].free(user)
            event = cache._state.known(loader).returning[-1][0]  # type: ignore[union-attr]
            assert event.query()
            assert addresses[0] not in self.back(cache, loader, 2)

    def test_that_another_thread_takes_off_and_puts_back(self, cache: sa.CachingAllocator, device: sa.Device) -> None:
        """The newest was not asked then."""

        class Taken(deque[Any]):
            def __getitem__(self, at: Any) -> Any:
                if at == 0:
                    self.popleft()
                    raise IndexError
                return super().__getitem__(at)

        with device.create_stream() as loader, device.create_stream() as user, Gate(device) as gate:
            buffers, addresses = self.blocks(cache, loader, 2)
            gate.hold(user)
            for buffer in buffers:
                buffer.free(user)
            home: Any = cache._state.known(loader)
            taken = home.returning[0]
            home.returning = Taken(home.returning)
            assert not set(self.back(cache, loader, 2)) & set(addresses)
            home.returning = deque([taken, *home.returning])

    def test_an_event_that_is_recorded_again_meanwhile(
        self, cache: sa.CachingAllocator, device: sa.Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with device.create_stream() as loader, device.create_stream() as user, Gate(device) as gate:
            buffers, addresses = self.blocks(cache, loader, 2)
            put = StreamCache.put

            def and_free_another(home: StreamCache, block: Any) -> None:
                monkeypatch.setattr(StreamCache, "put", put)
                gate.hold(user)
                buffers[1].free(user)
                put(home, block)

            buffers[0].free(user)
            assert executed(user)
            monkeypatch.setattr(StreamCache, "put", and_free_another)
            assert addresses[1] not in self.back(cache, loader, 2)
