"""The cache over a pool: who gets which memory when, what comes back, and that errors are those of the pool."""

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.driver.bindings import cuda
from streamalloc.pool.cache import allocator as allocators
from streamalloc.pool.cache.blocks import class_size
from streamalloc.testing import Gate
from tests.support import GROWTH, KEEP, MiB, captured, each_raises, executed, holds, names

SIZE = 4096


def asked(driver: Any) -> list[str]:
    """The calls by which memory came and went."""
    return names(driver, "cuMemAllocFromPoolAsync", "cuMemFreeAsync", "cuMemAllocAsync")


class TestReuse:
    def test_is_a_buffer_like_any_other(self, cache: sa.CachingAllocator, stream: sa.Stream) -> None:
        for _ in range(2):
            with cache.allocate(1000, stream) as buffer:
                assert isinstance(buffer, sa.Buffer) and type(buffer).__name__ == "Buffer"
                assert (buffer.nbytes, buffer.stream, buffer.owner) == (1000, stream, cache.pool)
                assert buffer.location == cache.location and buffer.device_accessible and not buffer.host_accessible
                buffer.fill(7)
                assert holds(buffer, 7) and holds(buffer[10:20], 7)
                assert buffer.__cuda_array_interface__["data"] == (buffer.address, False)
                assert "1000 bytes at 0x" in repr(buffer)
            assert buffer.freed and "freed" in repr(buffer)
            with pytest.raises(sa.ClosedError, match="was freed"):
                _ = buffer.address

    @pytest.mark.parametrize("size", [SIZE, 8 * SIZE])
    @pytest.mark.parametrize("default", [False, True])
    def test_a_block_freed_on_another_stream_returns_home(
        self, traced: Any, cache: sa.CachingAllocator, stream: sa.Stream, other: sa.Stream, size: int, default: bool
    ) -> None:
        """Blocks would pile up on the stream that frees them, whether it has asked for their size or not."""
        with stream.device.current():
            user = stream.device.default_stream if default else other
            cache.allocate(size, user).free()
            addresses = set()
            for _ in range(3):
                batch = cache.allocate(SIZE, stream)
                addresses.add(batch.address)
                del traced.calls[:]
                batch.free(user)
                assert batch.freed and asked(traced) == [] and names(traced, "cuEventRecord") == ["cuEventRecord"]
                with pytest.raises(sa.ClosedError):
                    batch.free(user)
                assert cache.statistics()[4:] == (0, SIZE + size, 2)
                assert executed(user)
            assert len(addresses) == 1


class TestSizes:
    @pytest.mark.parametrize(("more", "share"), [((), 8), ((3,), 64)], ids=["a cache", "an expandable cache"])
    def test_classes(self, more: tuple[int, ...], share: int) -> None:
        before = 0
        for size in range(1, 700_000, 371):
            block = class_size(size, *more)
            assert block >= size and block % 512 == 0 and block >= before
            assert block - size < max(512, size / share)
            assert class_size(block, *more) == block
            before = block
        assert [class_size(size) for size in (1, 512, 513, 8192, 8193, 1 << 20, (1 << 20) + 1)] == [
            512, 512, 1024, 8192, 9216, 1 << 20, (1 << 20) + (1 << 17)
        ]  # fmt: skip

    def test_a_larger_block_will_do(self, cache: sa.CachingAllocator, stream: sa.Stream) -> None:
        """A block of up to five times the size serves the request, and returns to its own class."""
        with cache.allocate(16 * 1024, stream) as buffer:
            address = buffer.address
        for _ in range(2):
            with cache.allocate(8 * 1024, stream) as smaller:
                assert (smaller.address, smaller.nbytes) == (address, 8 * 1024)
        with cache.allocate(3 * 1024, stream) as too_small, cache.allocate(16 * 1024, stream) as again:
            assert too_small.address != address == again.address
        assert cache.statistics()[4:] == (0, 19 * 1024, 2)

    def test_the_largest_block_that_will_do(self, cache: sa.CachingAllocator, stream: sa.Stream) -> None:
        for size, fits in ((20 * 1024, True), (22 * 1024, False)):
            with cache.allocate(size, stream) as buffer:
                address = buffer.address
            with cache.allocate(4 * 1024, stream) as smaller:
                assert (smaller.address == address) is fits
            cache.trim()

    def test_a_large_block_serves_while_no_smaller_is_free(self, cache: sa.CachingAllocator, stream: sa.Stream) -> None:
        small, *large = (cache.allocate(size, stream) for size in (8 * MiB, 16 * MiB, 16 * MiB))
        address = small.address
        for buffer in large:
            buffer.free()
        with cache.allocate(8 * MiB, stream) as twice_as_large:
            assert twice_as_large.address != address
            small.free()
            with cache.allocate(8 * MiB, stream) as again:
                assert again.address == address
        assert cache.statistics().misses == 3

    def test_allowance_of_two_streams(self, cache: sa.CachingAllocator, stream: sa.Stream, other: sa.Stream) -> None:
        held = [cache.allocate(320 * MiB, each) for each in (stream, other)]
        (wanted, _) = (cache._state.of(each).size_class(320 * MiB) for each in (stream, other))  # type: ignore[union-attr]
        for buffer in held:
            buffer.free()
        allowances = []
        for releases in (0, 1, 2, 100):
            cache._state._releases = releases
            allowances.append(cache._state._allowance(wanted) // MiB)
        # 640 MiB times 1.05, 1.1125, 1.175 and 2.5, in steps of 32 MiB
        assert allowances == [672, 736, 768, 1600]

    def test_a_much_larger_block_serves_at_once_if_there_is_none_of_the_size(
        self, cache: sa.CachingAllocator, stream: sa.Stream, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for buffer in [cache.allocate(16 * MiB, stream) for _ in range(2)]:
            buffer.free()
        with cache.allocate(8 * MiB, stream):
            monkeypatch.setattr(type(cache), "_allocate_checked", None)
            cache.allocate(8 * MiB, stream).free()
        assert cache.statistics().misses == 2

    def test_no_more_is_held_than_was_in_use_at_once(self, cache: sa.CachingAllocator, stream: sa.Stream) -> None:
        """Programs whose sizes change do not collect memory of every size that they ever used."""
        most = 0
        for size in range(MiB, 7 * MiB, MiB // 4):
            buffers = [cache.allocate(size, stream) for _ in range(64 * MiB // size)]
            assert cache.statistics().in_use >= 54 * MiB
            for buffer in buffers:
                buffer.free()
            most = max(most, cache.statistics().used)
        assert 60 * MiB < most < 150 * MiB

    def test_a_block_that_others_freed_is_freed_once(self, machine: Any, device: sa.Device, stream: sa.Stream) -> None:
        """Something else may have its address at a second attempt."""
        with sa.MemoryPool(device, release_threshold=KEEP) as pool, sa.CachingAllocator(pool) as cache:
            buffer = cache.allocate(SIZE, stream)
            address = buffer.address
            buffer.free()
            assert not machine.cuMemFreeAsync(cuda.CUdeviceptr(address), cuda.CUstream(stream.handle))[0]
            each_raises(sa.InvalidValueError, cache.trim)
            assert (cache.blocks, cache.statistics().cached) == (0, 0)
            other = pool.allocate(SIZE, stream)
            assert other.address == address
            other.fill(7)
            cache.trim()
            pool.allocate(SIZE, stream).fill(9)
            assert holds(other, 7)
            other.free()

    def test_blocks_return_before_the_pool_outgrows_the_allowance(
        self, traced: Any, cache: sa.CachingAllocator, stream: sa.Stream
    ) -> None:
        """The allowance is 1.05 times the peak, grows by 1/32 of it at each release, and is twice the peak at most."""
        held, misses = [], []
        for number in range(64):
            size = (64, 8)[number % 2] * MiB  # neither serves for the other
            for buffer in [cache.allocate(size, stream) for _ in range(512 * MiB // size)]:
                buffer.free()
            held.append(cache.pool.attributes.reserved_mem_high // MiB)
            misses.append(cache.statistics().misses)
        assert held[:2] == [512, 544]  # 1.05 in steps of 32 MiB
        assert misses[:2] == [8, 8 + 64]
        assert held[2] == 576  # after one release: 1.08
        assert held[-1] == held[-2] <= 1024 and misses[-1] == misses[-2]  # at rest
        assert "cuMemPoolTrimTo" not in names(traced, "cuMemPoolTrimTo")
        assert cache.trim() > 0
        assert (cache._state._releases, cache._state._reserved) == (0, 0)

    def test_a_trim_forgets_the_peaks(self, cache: sa.CachingAllocator, stream: sa.Stream) -> None:
        cache.allocate(320 * MiB, stream).free()
        wanted = cache._state.of(stream).size_class(MiB)  # type: ignore[union-attr]
        assert cache._state._allowance(wanted) == 352 * MiB
        cache._state._releases = 1000
        assert cache._state._allowance(wanted) == 640 * MiB
        stream.synchronize()
        cache.trim()
        assert cache._state._allowance(wanted) == 32 * MiB

    def test_a_pool_that_has_not_grown_is_not_trimmed(self, cache: sa.CachingAllocator, stream: sa.Stream) -> None:
        """Memory that others have freed stays in the pool."""
        others = cache.pool.allocate(512 * MiB, stream)
        kept = [cache.allocate(64 * MiB, stream)]
        others.free()
        stream.synchronize()
        kept.append(cache.allocate(64 * MiB, stream))
        assert cache.pool.statistics().reserved == 576 * MiB

    def test_a_pool_beyond_the_allowance_is_trimmed(self, cache: sa.CachingAllocator, stream: sa.Stream) -> None:
        cache.pool.allocate(1 << 30, stream).free()
        stream.synchronize()
        kept = [cache.allocate(64 * MiB, stream) for _ in range(8)]
        assert cache.pool.statistics().reserved == len(kept) * 64 * MiB

    def test_most_sizes(self, cache: sa.CachingAllocator, stream: sa.Stream, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("streamalloc.pool.cache.state._MAX_SIZES", 50)
        for size in range(1, 200_000, 600):
            cache.allocate(size, stream).free()
        (known,) = cache._state.live()
        assert 0 < len(known.lists) <= 50

    @pytest.mark.parametrize(("named", "error"), [({"limit": -1}, ValueError), ({"limit": 1.5}, TypeError)], ids=str)
    def test_bad_ones(self, pool: sa.MemoryPool, named: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match=next(iter(named))):
            sa.CachingAllocator(pool, **named)
        with sa.CachingAllocator(pool, limit="1MiB") as cache:
            with pytest.raises(error, match="limit"):
                cache.limit = named["limit"]
            assert cache.limit == MiB
            cache.limit = "2MiB"
            assert cache.limit == 2 * MiB

    def test_what_no_cache_serves_is_no_miss(self, cache: sa.CachingAllocator, stream: sa.Stream) -> None:
        cache.allocate(0, stream).free()
        with stream.capture() as graph:
            cache.allocate(SIZE, stream).free()
        graph.close()
        assert cache.statistics().misses == 0

    def test_only_over_pools(self, pool: sa.MemoryPool, cache: sa.CachingAllocator) -> None:
        for thing in (cache, None, "pool"):
            with pytest.raises(TypeError, match="pool must be a MemoryPool"):
                sa.CachingAllocator(thing)  # type: ignore[arg-type]


def _freed(allocate: Callable[[int, sa.Stream], sa.Buffer], stream: sa.Stream) -> sa.Buffer:
    buffer = allocate(SIZE, stream)
    buffer.free()
    return buffer


def _in_a_capture(buffer: sa.Buffer, stream: sa.Stream) -> None:
    with stream.capture():
        buffer.free()


def _closed(stream: sa.Stream) -> sa.Stream:
    with stream.device.create_stream() as closed:
        pass
    return closed


# What is done wrong, with something to allocate from and a stream.
MISTAKES: dict[str, Callable[[Any, sa.Stream], object]] = {
    "a negative size": lambda from_, stream: from_.allocate(-1, stream),
    "a very negative size": lambda from_, stream: from_.allocate(-(1 << 70), stream),
    "a size beyond all": lambda from_, stream: from_.allocate(1 << 64, stream),
    "a size that no device has": lambda from_, stream: from_.allocate(1 << 50, stream),
    "True": lambda from_, stream: from_.allocate(True, stream),
    "a float": lambda from_, stream: from_.allocate(4096.0, stream),
    "text": lambda from_, stream: from_.allocate("4096 of them", stream),
    "no stream": lambda from_, stream: from_.allocate(SIZE, None),
    "a list for a stream": lambda from_, stream: from_.allocate(SIZE, []),
    "a stream of another driver": lambda from_, stream: from_.allocate(
        SIZE, sa.Device(0, driver=sd.traced(stream.device.driver)).default_stream
    ),
    "a closed stream": lambda from_, stream: from_.allocate(SIZE, _closed(stream)),
    "a second free": lambda from_, stream: _freed(from_.allocate, stream).free(),
    "a free on a closed stream": lambda from_, stream: from_.allocate(SIZE, stream).free(_closed(stream)),
    "a free after its stream was closed": lambda from_, stream: _on_its_own(from_).free(),
    "a free on nothing": lambda from_, stream: from_.allocate(SIZE, stream).free(7),
    "a free with a policy that is none": lambda from_, stream: from_.allocate(SIZE, stream).free(None, "never"),
    "a free in a capture": lambda from_, stream: _in_a_capture(from_.allocate(SIZE, stream), stream),
    "use after free": lambda from_, stream: _freed(from_.allocate, stream).fill(1),
}


def _on_its_own(allocator: Any) -> Any:
    with sa.Device(0).create_stream() as stream:
        return allocator.allocate(SIZE, stream)


@pytest.mark.parametrize("name", MISTAKES)
def test_errors_are_the_pool_s(pool: sa.MemoryPool, cache: sa.CachingAllocator, stream: sa.Stream, name: str) -> None:
    """Also where the cache has memory of the size in question."""
    for _ in range(3):
        cache.allocate(SIZE, stream).free()
        cache.allocate(1, stream).free()
    told = []
    for allocator in (pool, cache):
        with pytest.raises(Exception) as caught:
            MISTAKES[name](allocator, stream)
        text = str(caught.value).split("0x")[0].split(" [bytes")[0]
        told.append((type(caught.value), text, getattr(caught.value, "requested", None)))
    assert told[0] == told[1]
    assert not isinstance(caught.value.__context__, (LookupError, AttributeError))  # of the fast path


class TestComesBack:
    def test_by_trim(self, cache: sa.CachingAllocator, stream: sa.Stream) -> None:
        buffers = [cache.allocate(size, stream) for size in range(1, 60_000, 1777)]
        total = sum(class_size(buffer.nbytes) for buffer in buffers)
        kept = buffers.pop()
        for buffer in buffers:
            buffer.free()
        cached = total - class_size(kept.nbytes)
        figures = cache.statistics()
        assert (figures.used, figures.cached, figures.in_use) == (total, cached, total - cached)
        assert figures[:4] == cache.pool.statistics()
        kept.free()
        stream.synchronize()
        assert cache.trim() == GROWTH
        assert cache.pool.statistics()[::2] == (0, 0) and cache.statistics().cached == 0
        cache.reset_peaks()
        assert cache.statistics()[:4] == (0, 0, 0, 0)

    def test_a_trim_counts_what_its_own_synchronisation_releases(self, stream: sa.Stream) -> None:
        with sa.MemoryPool(stream.device) as pool, sa.CachingAllocator(pool) as cache:
            cache.allocate(SIZE, stream).free()
            stream.synchronize()
            assert (cache.trim(), pool.statistics().reserved) == (GROWTH, 0)

    def test_when_the_stream_is_closed(self, device: sa.Device, cache: sa.CachingAllocator, gate: Gate) -> None:
        stream = device.create_stream()
        kept = cache.allocate(SIZE, stream)
        gate.hold(stream)
        cache.allocate(SIZE, stream).free()
        stream.close()
        assert cache.statistics().cached == 0 and cache.pool.statistics().used == SIZE
        with pytest.raises(sa.ClosedError, match="was closed"):
            cache.allocate(SIZE, stream)
        kept.close()
        assert cache.pool.statistics().used == 0
        gate.open()

    def test_when_the_cache_is_closed(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        cache = sa.CachingAllocator(pool)
        kept, dropped = cache.allocate(SIZE, stream), cache.allocate(SIZE, stream)
        cache.allocate(SIZE, stream).free()
        states = [cache.closed]
        cache.close()
        cache.close()
        states.append(cache.closed)
        assert states == [False, True] and "closed" in repr(cache) and pool.statistics().used == 2 * SIZE
        uses: list[Callable[[], object]] = [lambda: cache.allocate(SIZE, stream), cache.trim, cache.__enter__]
        each_raises(sa.ClosedError, *uses, match=r"CachingAllocator.*was closed")
        kept.fill(3)
        assert holds(kept, 3)
        kept.free()
        assert pool.statistics().used == SIZE
        del dropped
        assert pool.statistics().used == 0 and not pool.closed

    def test_when_it_is_closed_in_a_capture_of_others(self, raw: Any, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        """The free block stays until the capture ends, also at a trim. It is not allocated again."""
        cache = sa.CachingAllocator(pool)
        cache.allocate(SIZE, stream).free()
        with captured(raw, stream, "RELAXED"):
            cache.trim()
            assert cache.statistics().cached == SIZE
            cache.close()
            with pytest.raises(sa.ClosedError):
                cache.allocate(SIZE, stream)
        assert pool.statistics().used == 0

    def test_dropped_caches_need_no_collection(self, device: sa.Device, stream: sa.Stream) -> None:
        gc.collect()
        gc.disable()
        try:
            pools = []
            for _ in range(3):
                cache = sa.CachingAllocator(sa.MemoryPool(device))
                pools.append(weakref.ref(cache.pool))
                cache.allocate(SIZE, stream).free()
                kept = cache.allocate(SIZE, stream)
                del cache, kept
            device.synchronize()
            assert [pool() for pool in pools] == [None] * 3
        finally:
            gc.enable()

    def test_streams_that_end_leave_the_cache(self, device: sa.Device, cache: sa.CachingAllocator) -> None:
        for _ in range(8):
            with device.create_stream() as short, device.create_stream():
                cache.allocate(SIZE, short).free()
            device.synchronize()
        assert len(cache._state.stream_caches) <= 2

    def test_when_its_pool_is_closed(self, traced: Any, device: sa.Device, stream: sa.Stream) -> None:
        pool = sa.MemoryPool(device)
        cache = sa.CachingAllocator(pool)
        kept = cache.allocate(SIZE, stream)
        cache.allocate(SIZE, stream).free()
        pool.close()
        assert cache.closed
        each_raises(sa.ClosedError, lambda: cache.allocate(SIZE, stream), lambda: sa.CachingAllocator(pool))
        kept.free()
        stream.synchronize()
        assert names(traced, "cuMemPoolDestroy") == ["cuMemPoolDestroy"]

    def test_nothing_of_a_cache_stays_with_its_stream(self, device: sa.Device, stream: sa.Stream) -> None:
        before = len(stream.endings)
        for _ in range(3):
            with sa.MemoryPool(device) as pool, sa.CachingAllocator(pool) as cache:
                cache.allocate(SIZE, stream).free()
        assert len(stream.endings) == before and not stream.free_lists


class TestDropped:
    def test_freed_by_a_finaliser_of_the_same_cycle(self, cache: sa.CachingAllocator, stream: sa.Stream) -> None:
        """Whichever comes first, its memory comes back once."""

        class Owner:
            def __init__(self) -> None:
                self.buffer = cache.allocate(SIZE, stream)
                self.me = self

            def __del__(self) -> None:
                self.buffer.close()

        for _ in range(3):
            Owner()
            gc.collect()
            assert cache.statistics()[4:] == (0, SIZE, 1)
            with cache.allocate(SIZE, stream) as one, cache.allocate(SIZE, stream) as two:
                assert one.address != two.address
            cache.trim()
            cache._state.misses = 0

    def test_makes_no_call(self, traced: Any, stream: sa.Stream, cache: sa.CachingAllocator) -> None:
        buffer = cache.allocate(SIZE, stream)
        with stream.capture():
            del traced.calls[:]
            del buffer
            gc.collect()
            assert traced.calls == []
        cache.allocate(SIZE, stream).free()
        assert cache.statistics().misses == 1


class TestStepsAside:
    def test_asks_the_pool_nothing_while_another_stream_is_captured(
        self, traced: Any, cache: sa.CachingAllocator, stream: sa.Stream, other: sa.Stream
    ) -> None:
        kept = [cache.allocate(8 * MiB, stream) for _ in range(4)]
        for buffer in kept:
            buffer.free()
        with stream.capture("relaxed") as graph:
            del traced.calls[:]
            with cache.allocate(MiB, other), cache.allocate(40 * MiB, other):
                assert not cache._state.flush()
            assert names(traced, "cuMemPoolGetAttribute", "cuMemFreeAsync") == []
        graph.close()
        assert cache.statistics().cached == 73 * MiB

    def test_a_block_that_cannot_return_home_returns_to_the_pool(
        self, cache: sa.CachingAllocator, stream: sa.Stream, other: sa.Stream, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Other code begins a capture in the middle of the free."""
        monkeypatch.setattr(allocators, "record_uncaptured", lambda _: None)
        cache.allocate(SIZE, other).free()
        buffer = cache.allocate(SIZE, stream)
        assert other.handle
        buffer.free(other)
        assert buffer.freed and cache.statistics()[4:6] == (0, SIZE)

    def test_asks_in_the_relaxed_mode_only(self, traced: Any, device: sa.Device, cache: sa.CachingAllocator) -> None:
        """Another library may be capturing."""
        del traced.calls[:]
        cache.allocate(40 * MiB, device.default_stream).free()
        assert names(traced, "cuMemPoolGetAttribute", "cuThreadExchangeStreamCaptureMode") == [
            "cuThreadExchangeStreamCaptureMode",
            "cuMemPoolGetAttribute", "cuMemPoolGetAttribute",
            "cuThreadExchangeStreamCaptureMode",
        ]  # fmt: skip


class TestLimits:
    def test_of_the_pool(self, device: sa.Device, stream: sa.Stream, other: sa.Stream) -> None:
        """If memory runs out, cached blocks are released first."""
        with sa.MemoryPool(device, max_size=GROWTH) as pool, sa.CachingAllocator(pool) as cache:
            buffers = [cache.allocate(MiB, stream) for _ in range(32)]
            with pytest.raises(sa.OutOfMemoryError) as caught:
                cache.allocate(MiB, stream)
            assert caught.value.requested == MiB and caught.value.limit == GROWTH
            for buffer in buffers:
                buffer.free()
            stream.synchronize()
            assert cache.statistics().cached == GROWTH
            with cache.allocate(GROWTH, stream):
                assert cache.statistics().cached == 0
            with cache.allocate(3 * SIZE, other):
                assert cache.statistics().in_use == 3 * SIZE

    def test_the_last_bytes_are_not_rounded(self, device: sa.Device, stream: sa.Stream) -> None:
        with sa.MemoryPool(device, max_size=GROWTH) as pool, sa.CachingAllocator(pool) as cache:
            size = 9 * MiB + 512
            with cache.allocate(size, stream), cache.allocate(size, stream), cache.allocate(size, stream) as last:
                assert last.nbytes == size and pool.statistics().used <= GROWTH

    def test_of_its_own(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with sa.CachingAllocator(pool, limit=10 * SIZE) as cache:
            buffers = [cache.allocate(SIZE, stream) for _ in range(10)]
            for size in (1, SIZE, 2 * MiB):
                with pytest.raises(sa.OutOfMemoryError, match="the limit of 40 KiB") as caught:
                    cache.allocate(size, stream)
                error = caught.value
                assert (error.requested, error.used, error.limit) == (size, 10 * SIZE, 10 * SIZE)
                assert not error.asked
            buffers.pop().free()
            with cache.allocate(SIZE, stream):
                pass
            with cache.allocate(600, stream):  # which makes the cache give back the 4 KiB
                assert cache.statistics().cached == 0
            cache.limit = 0
            with cache.allocate(2 * MiB, stream):
                assert cache.limit == 0
            with stream.capture() as graph:  # the memory of graphs is not of the pool
                cache.limit = 1
                cache.allocate(MiB, stream).free()
            graph.close()
            for buffer in buffers:
                buffer.free()


@pytest.mark.gpus(2)
def test_on_another_device(device: sa.Device, peer: sa.Device, stream: sa.Stream) -> None:
    with sa.MemoryPool(peer) as pool, sa.CachingAllocator(pool) as cache, peer.create_stream() as theirs:
        for one in (theirs, stream):
            for _ in range(2):
                with cache.allocate(SIZE, one) as buffer:
                    assert buffer.location == peer.location
                    assert buffer.device_accessible == (one is theirs)
        assert cache.statistics().misses == 2


def test_a_driver_that_checks_uses_sees_every_allocation(checker: Any, device: sa.Device) -> None:
    """For the driver, memory that the cache reuses without a call would be the same allocation."""
    with sa.MemoryPool(device) as pool, sa.CachingAllocator(pool) as cache, device.create_stream() as first:
        with device.create_stream() as second:
            buffer = cache.allocate(4096, first)
            buffer.fill(1)
            buffer.free()
            again = cache.allocate(4096, first)
            again.fill(2, second)  # in no order with the allocation
            second.synchronize()
            again.free()
            first.synchronize()
        assert cache.statistics().cached == 0
    assert "use before allocation" in {hazard.kind for hazard in checker.hazards}


@pytest.mark.parametrize("call", ["cuMemFreeAsync", "cuEventRecord", "cuStreamIsCapturing", "cuEventQuery"])
@pytest.mark.parametrize("where", ["trim", "out of memory"])
def test_streams_that_others_close_before_each_call(machine: Any, where: str, call: str) -> None:
    """Streams that another thread closes while memory on them is given back: no call gets a handle of theirs."""
    driver = Closing(machine, call)
    device = sa.Device(0, driver=driver)
    with sa.MemoryPool(device, max_size=GROWTH) as pool, device.create_stream() as stream:
        cache = sa.CachingAllocator(pool)
        short = device.create_stream()
        # The driver is asked for captures only of streams whose handle other code has.
        assert call != "cuStreamIsCapturing" or short.handle
        cache.allocate(SIZE, short).free()
        cache.allocate(SIZE, stream).free()
        driver.stream = short
        if where == "trim":
            cache.trim()
        else:
            with pytest.raises(sa.OutOfMemoryError):
                cache.allocate(2 * GROWTH, stream)
        driver.closer.result()
        assert short.closed and driver.stream is None
        assert driver.after == []
        cache.close()
        device.synchronize()


class Closing:
    """A driver before whose first call of a name another thread closes a stream, or waits to do so."""

    def __init__(self, driver: Any, name: str) -> None:
        self._driver = driver
        self._name = name
        self.stream: Any = None
        self.after: list[str] = []
        """The calls that got the stream's handle after it was destroyed."""
        self._threads = ThreadPoolExecutor(1)
        self._gone = 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._driver, name)
        if not name.startswith("cu") or not callable(function):
            return function

        def call(*args: Any) -> Any:
            if self.stream is not None and name == self._name:
                stream, self.stream = self.stream, None
                self.closer = self._threads.submit(stream.close)
                self._threads.shutdown(wait=False)
                wait([self.closer], 0.05)  # it waits for who uses the stream
            if self._gone and any(isinstance(one, cuda.CUstream) and int(one) == self._gone for one in args):
                self.after.append(name)
            answer = function(*args)
            if name == "cuStreamDestroy":
                self._gone = int(args[0])
            elif name.startswith("cuStreamCreate") and int(answer[1]) == self._gone:
                self._gone = 0
            return answer

        return call
