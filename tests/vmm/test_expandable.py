"""A cache of virtual memory: how much it reserves, where memory moves, whose it is, and what comes back."""

import contextlib
import functools
import itertools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc, vmm
from streamalloc.core.session import session_of
from streamalloc.driver.wrappers import Wrapper
from streamalloc.testing import Gate, settle
from streamalloc.vmm.expandable import FreeRanges, _Ranges, _State
from streamalloc.vmm.internal import unwatch_mappings, watch_mappings
from tests.interleaving import interleaved
from tests.support import MiB, executed, holds, pending

CALLS = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease")


class Held(Wrapper):
    """A driver that keeps the first thread in the call ``held`` until ``go`` is set."""

    def __init__(self, driver: Any) -> None:
        super().__init__(driver)
        self.held = ""
        self.reached, self.go = threading.Event(), threading.Event()

    def _observe(self, name: str, function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name == self.held:
            self.held = ""
            self.reached.set()
            assert self.go.wait(20)
        return function(*args)  # type: ignore[no-any-return]


@pytest.fixture
def cache(device: sa.Device) -> Iterator[vmm.ExpandableCache]:
    with sa.MemoryPool(device) as pool, vmm.ExpandableCache(pool) as cache:
        yield cache


def filled(cache: sa.CachingAllocator, sizes: list[int], stream: sa.Stream) -> list[sa.Buffer]:
    """Buffers of so many MiB, each with its number in each byte."""
    found = [cache.allocate(size * MiB, stream) for size in sizes]
    for number, buffer in enumerate(found):
        buffer.fill(number, stream)
    return found


def test_watchers_are_told_where_memory_will_be_mapped(cache: vmm.ExpandableCache, stream: sa.Stream) -> None:
    class Watcher:
        def __init__(self) -> None:
            self.told: list[range] = []

        def to_be_mapped(self, address: int, nbytes: int) -> None:
            self.told.append(range(address, address + nbytes))

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: None

    watcher: Any = Watcher()
    watch_mappings(session_of(stream), watcher)
    with cache.allocate(4 * MiB, stream) as one, cache.allocate(64 * MiB, stream) as two:
        assert all(any(buffer.address in part for part in watcher.told) for buffer in (one, two))
    unwatch_mappings(session_of(stream), watcher)


class TestFreeRanges:
    def test_beside_a_model(self) -> None:
        """Cuts take the smallest sufficient range, the lowest of equal ones; neighbours are merged."""
        choose, ranges, free, used = random.Random(1), FreeRanges(), {0: 1000}, [(0, 0)]
        ranges.add(0, 1000)
        for _ in range(3000):
            if choose.random() < 0.5:
                size = choose.randint(1, 60)
                fits = [(stop - start, start) for start, stop in free.items() if stop - start >= size]
                start = ranges.cut(size)
                assert start == (min(fits)[1] if fits else None)
                if start is not None:
                    stop = free.pop(start)
                    if stop > start + size:
                        free[start + size] = stop
                    used.append((start, start + size))
            elif len(used) > 1:
                start, stop = used.pop(choose.randrange(1, len(used)))
                ranges.add(start, stop)
                before = next((one for one, end in free.items() if end == start), None)
                stop = free.pop(stop, stop)
                free[start if before is None else before] = stop
            assert {start: stop for start, stop in ranges} == free
            assert all(ranges.end_of(start) == stop and ranges.start_of(stop) == start for start, stop in free.items())

    def test_the_middle_of_a_range(self) -> None:
        ranges = FreeRanges()
        ranges.add(0, 100)
        assert ranges.without((0, 100), 40, 60) == (0, 40)
        assert sorted(ranges) == [(0, 40), (60, 100)]
        assert (ranges.end_of(40), ranges.start_of(60), ranges.end_of(0)) == (40, 60, 40)


class TestMemory:
    def test_of_a_repeated_size_makes_no_call(self, traced: Any, cache: sa.CachingAllocator, stream: sa.Stream) -> None:
        for _ in range(3):
            del traced.calls[:]
            for buffer in [cache.allocate(size * MiB, stream) for size in (64, 8, 200)]:
                buffer.free()
        assert traced.calls == []

    def test_the_peak_outlasts_merges(self, cache: sa.CachingAllocator, stream: sa.Stream) -> None:
        for buffer in [cache.allocate(20 * MiB, stream) for _ in range(3)]:
            buffer.free()
        with cache.allocate(40 * MiB, stream):
            assert (cache.statistics().used, cache.statistics().used_high) == (40 * MiB, 60 * MiB)
            cache.reset_peaks()
            assert cache.statistics().used_high == 40 * MiB

    def test_that_is_free_counts_as_cached(
        self, device: sa.Device, cache: sa.CachingAllocator, stream: sa.Stream
    ) -> None:
        """Also memory of a stream that was closed, or that was merged, which is in no free list."""
        with device.create_stream() as other:
            filled(cache, [20], other)[0].free()
        for buffer in filled(cache, [8] * 3, stream):
            buffer.free()
        with cache.allocate(16 * MiB, stream):
            found = cache.statistics()
            assert found.in_use == 16 * MiB and found.cached == found.reserved - 16 * MiB > 0
        stream.synchronize()
        assert cache.statistics().cached == cache.statistics().reserved == cache.trim()
        assert cache.statistics()[4:6] == (0, 0)

    def test_classes_waste_a_64th(self, cache: sa.CachingAllocator, stream: sa.Stream) -> None:
        with cache.allocate(MiB + 1, stream):
            assert cache.statistics().used == MiB + MiB // 64

    def test_is_split_and_merged(self, cache: sa.CachingAllocator, stream: sa.Stream) -> None:
        for sizes in ([64], [8] * 8, [40, 24], [1] * 64, [64]):
            for buffer in filled(cache, sizes, stream):
                buffer.free()
        assert cache.statistics().reserved_high == 64 * MiB

    def test_moves_while_the_stream_is_busy_and_nothing_waits(
        self, device: sa.Device, cache: sa.CachingAllocator, stream: sa.Stream
    ) -> None:
        """A chunk keeps its old addresses until the work that was queued there is done."""
        with Gate(device) as gate:
            gate.hold(stream)
            blocks = filled(cache, [4] * 16, stream)
            for buffer in blocks[::2]:
                buffer.free()
            with cache.allocate(32 * MiB, stream) as large:
                large.fill(99, stream)
                assert cache.statistics().reserved <= 1.03 * 64 * MiB + 4 * MiB
                assert not stream.query()
                gate.open()
                assert holds(large, 99)
                assert all(holds(buffer, number) for number, buffer in enumerate(blocks) if number % 2)
        for buffer in blocks[1::2]:
            buffer.free()

    def test_that_an_interrupt_has_taken_off_the_list_keeps_its_addresses(
        self, cache: sa.CachingAllocator, stream: sa.Stream
    ) -> None:
        segment = cache._state.segment  # type: ignore[attr-defined]
        with cache.allocate(8 * MiB, stream) as kept:
            lost, segment.chunks[:] = segment.chunks[:], []
            with cache.allocate(8 * MiB, stream) as other:
                assert abs(other.address - kept.address) >= 8 * MiB
            segment.chunks[:0] = lost

    def test_that_is_released_is_unmapped_after_those_before_it(
        self, cache: sa.CachingAllocator, stream: sa.Stream, other: sa.Stream, gate: Gate
    ) -> None:
        segment = cache._state.segment  # type: ignore[attr-defined]
        for buffer in filled(cache, [2, 2], stream):
            buffer.free()
        stream.synchronize()
        chunks = segment.chunks[:2]
        gate.hold(stream)
        for chunk, user in zip(chunks, (stream, other), strict=True):
            segment.release(chunk, user.record())
        other.synchronize()
        segment.unmap_left()
        assert [chunk for _, chunk, _ in segment.left] == chunks and segment.leaving == 4 * MiB
        gate.open()
        stream.synchronize()
        segment.unmap_left()
        assert not segment.left and not segment.leaving and all(chunk.gone for chunk in chunks)

    def test_of_another_stream_moves_after_its_work(
        self, cache: sa.CachingAllocator, stream: sa.Stream, other: sa.Stream, gate: Gate
    ) -> None:
        cache.allocate(64 * MiB, stream).free()
        buffer = cache.allocate(64 * MiB, stream)
        gate.hold(stream)
        buffer.fill(1, stream)
        buffer.free()
        with cache.allocate(64 * MiB, other) as mine:
            mine.fill(2, other)
            assert cache.statistics().reserved <= 1.03 * 64 * MiB + 4 * MiB
            assert pending(other)  # it waits for the first stream
            gate.open()
            assert holds(mine, 2)

    def test_streams_that_are_not_in_use_at_once_share(
        self, cache: sa.CachingAllocator, stream: sa.Stream, other: sa.Stream
    ) -> None:
        for _ in range(3):
            for each in (stream, other):
                cache.allocate(320 * MiB, each).free()
                each.synchronize()
        assert cache.statistics().reserved_high <= 1.03 * 320 * MiB + 4 * MiB

    def test_of_a_stream_that_ended_serves_others(self, cache: sa.CachingAllocator, stream: sa.Stream) -> None:
        with stream.device.create_stream() as short:
            cache.allocate(64 * MiB, short).free()
        stream.device.synchronize()
        with cache.allocate(64 * MiB, stream) as buffer:
            assert cache.statistics().reserved_high == 64 * MiB
            buffer.fill(1)
            assert holds(buffer, 1)

    def test_comes_back_by_a_trim(self, device: sa.Device, cache: sa.CachingAllocator, stream: sa.Stream) -> None:
        free = device.memory_info()[0]
        with cache.allocate(8 * MiB, stream):
            cache.allocate(64 * MiB, stream).free()
            with Gate(device) as gate:
                gate.hold(stream)
                assert cache.trim() == 0
                gate.open()
                stream.synchronize()
            assert cache.trim(keep=32 * MiB) >= 32 * MiB
            assert cache.statistics().reserved >= 32 * MiB
            cache.trim()
            assert cache.statistics().reserved == 8 * MiB
        stream.synchronize()
        assert cache.trim() == 8 * MiB
        assert device.memory_info()[0] == free

    def test_comes_back_when_others_run_out(self, machine: Any) -> None:
        device = sa.Device(0, driver=sd.simulated(memory=256 * MiB))
        with device.create_stream() as stream, sa.MemoryPool(device) as pool, vmm.ExpandableCache(pool) as cache:
            cache.allocate(200 * MiB, stream).free()
            stream.synchronize()
            with vmm.PhysicalMemory(device, 128 * MiB):
                assert cache.statistics().reserved < 100 * MiB
            cache.allocate(200 * MiB, stream).free()
            stream.synchronize()
            with pool.allocate(128 * MiB, stream):
                assert cache.statistics().reserved < 100 * MiB


class TestLimits:
    def test_of_the_device(self, machine: Any) -> None:
        """Free blocks move and merge before memory runs out; the error is the pool's."""
        device = sa.Device(0, driver=sd.simulated(memory=256 * MiB))
        with device.create_stream() as stream, sa.MemoryPool(device) as pool, vmm.ExpandableCache(pool) as cache:
            blocks = filled(cache, [8] * 25, stream)
            for buffer in blocks[::2]:
                buffer.free()
            with cache.allocate(96 * MiB, stream) as large:
                large.fill(99, stream)
                assert holds(large, 99) and all(holds(one, at) for at, one in enumerate(blocks) if at % 2)
                with pytest.raises(sa.OutOfMemoryError) as caught:
                    cache.allocate(200 * MiB, stream)
                assert caught.value.requested == 200 * MiB
                assert all(holds(one, at) for at, one in enumerate(blocks) if at % 2)
            for buffer in blocks[1::2]:
                buffer.free()
            with cache.allocate(150 * MiB, stream):
                pass

    def test_of_its_own(self, cache: sa.CachingAllocator, stream: sa.Stream) -> None:
        cache.limit = 64 * MiB
        with (
            cache.allocate(40 * MiB, stream),
            pytest.raises(sa.OutOfMemoryError, match="the limit of 64 MiB") as caught,
        ):
            cache.allocate(30 * MiB, stream)
        assert (caught.value.requested, caught.value.limit) == (30 * MiB, 64 * MiB)
        assert caught.value.call == "cuMemCreate"
        for _ in range(2):
            with cache.allocate(60 * MiB, stream):
                assert cache.statistics().reserved <= cache.limit == 64 * MiB
        cache.limit = 0
        with cache.allocate(100 * MiB, stream):
            pass

    def test_refuses_without_taking_memory(self, cache: sa.CachingAllocator, stream: sa.Stream) -> None:
        """Memory that was mapped in some of the gaps for a request that cannot fit would stay."""
        cache.limit, chance, live = 512 * MiB, random.Random(3), list[sa.Buffer]()
        for _ in range(80):
            if live and chance.random() < 0.48:
                live.pop(chance.randrange(len(live))).free()
            else:
                live.append(cache.allocate(16 + 4 * int(2 ** chance.uniform(3, 23)), stream))
        for buffer in live:
            buffer.free()
        stream.synchronize()
        before = cache.statistics().reserved
        with pytest.raises(sa.OutOfMemoryError, match="the limit of 512 MiB"):
            cache.allocate(513 * MiB, stream)
        assert cache.statistics().reserved == before

    @pytest.mark.simulated_only("a checked machine is made")
    @pytest.mark.parametrize("kind", [sa.CachingAllocator, vmm.ExpandableCache])
    def test_holds_under_a_checker(self, kind: Any) -> None:
        device = sa.Device(0, driver=sd.checked(sd.simulated()))
        with (
            device.create_stream() as stream,
            sa.MemoryPool(device) as pool,
            kind(pool, limit=64 * MiB) as cache,
            cache.allocate(40 * MiB, stream),
            pytest.raises(sa.OutOfMemoryError, match="the limit of 64 MiB"),
        ):
            cache.allocate(25 * MiB, stream)

    def test_a_trim_releases_chunks_that_two_streams_share(
        self, cache: sa.CachingAllocator, stream: sa.Stream, other: sa.Stream
    ) -> None:
        chance, live = random.Random(5), list[sa.Buffer]()
        for _ in range(120):
            if live and chance.random() < 0.48:
                live.pop(chance.randrange(len(live))).free()
            else:
                live.append(cache.allocate(int(2 ** chance.uniform(10, 23)), chance.choice([stream, other])))
        for buffer in live:
            buffer.free(chance.choice([stream, other]))
        stream.synchronize()
        other.synchronize()
        cache.trim()
        assert cache.statistics().reserved == 0
        with cache.allocate(10 * MiB, other) as buffer:
            buffer.fill(3, other)
            assert holds(buffer, 3)

    def test_leaves_no_room_for_whole_chunks(self, cache: sa.CachingAllocator, stream: sa.Stream) -> None:
        """Chunks are 8 MiB then: 16 MiB would exceed the limit, 10 MiB do not."""
        cache.limit = 1034 * MiB
        with cache.allocate(1024 * MiB, stream), cache.allocate(9 * MiB, stream):
            assert cache.statistics().reserved == cache.limit

    def test_copies_with_no_current_context(self, machine: Any, cache: sa.CachingAllocator, stream: sa.Stream) -> None:
        """The driver refuses a copy beyond one mapping: the stream's context is made current then."""
        (buffer,) = filled(cache, [4], stream)
        assert not int(machine.cuCtxGetCurrent()[1]) and holds(buffer, 0)
        buffer.free()


class TestOwners:
    def test_a_buffer_whose_stream_is_assigned(
        self, device: sa.Device, cache: sa.CachingAllocator, stream: sa.Stream, other: sa.Stream
    ) -> None:
        """Its memory returns after the work of that stream."""
        for drops in (False, True):
            buffer: sa.Buffer | None = cache.allocate(4 * MiB, stream)
            assert buffer is not None
            address = buffer.address
            other.wait(stream)
            buffer.stream = other
            with Gate(device) as gate:
                gate.hold(other)
                buffer.fill(1, other)
                if not drops:
                    buffer.free()
                buffer = None
                again = cache.allocate(4 * MiB, stream)
                assert again.address != address
                gate.open()
            again.free()
            other.synchronize()
            cache.trim()
            assert cache.statistics().used == 0

    def test_cannot_be_shared(self, device: sa.Device, stream: sa.Stream) -> None:
        with (
            sa.MemoryPool(device, handle_types=sa.MemHandleType.POSIX_FILE_DESCRIPTOR) as pool,
            vmm.ExpandableCache(pool) as cache,
            cache.allocate(4 * MiB, stream) as buffer,
        ):
            with pytest.raises((TypeError, ValueError, sa.CudaError)):
                ipc.share(buffer)
            buffer.fill(3)
            assert holds(buffer, 3)

    def test_no_memory_moves_in_captures(self, cache: sa.CachingAllocator, stream: sa.Stream, other: sa.Stream) -> None:
        blocks = filled(cache, [4] * 8, stream)
        for buffer in blocks[::2]:
            buffer.free()
        with other.capture("relaxed") as graph, cache.allocate(16 * MiB, stream) as large:
            assert cache.statistics().reserved == 48 * MiB
            large.fill(9, stream)
        graph.close()
        assert all(holds(one, at) for at, one in enumerate(blocks) if at % 2)
        for buffer in blocks[1::2]:
            buffer.free()

    def test_only_memory_of_a_device(self, machine: Any) -> None:
        with sa.MemoryPool(sa.MemLocation.host()) as pool, pytest.raises(ValueError, match="device alone"):
            vmm.ExpandableCache(pool)
        with pytest.raises(TypeError, match="pool must be a MemoryPool"):
            vmm.ExpandableCache(None)  # type: ignore[arg-type]

    def test_closed_with_live_buffers(self, device: sa.Device, stream: sa.Stream) -> None:
        free = device.memory_info()[0]
        with sa.MemoryPool(device) as pool:
            cache = vmm.ExpandableCache(pool)
            kept = cache.allocate(8 * MiB, stream)
            cache.allocate(64 * MiB, stream).free()
            cache.close()
            with pytest.raises(sa.ClosedError):
                cache.allocate(MiB, stream)
            kept.fill(5)
            assert holds(kept, 5)
            kept.free()
            stream.synchronize()
            del cache, kept
        device.synchronize()
        assert device.memory_info()[0] == free

    def test_a_stream_that_ends_while_its_memory_is_looked_at(self, machine: Any) -> None:
        """What it leaves waits for its work, also if a trim has given that back after its end."""
        kind: Any = Held
        driver = kind(machine)
        device = sa.Device(0, driver=driver)
        with (
            device.create_stream() as other,
            sa.MemoryPool(device) as pool,
            vmm.ExpandableCache(pool) as cache,
            Gate(device) as gate,
            ThreadPoolExecutor(1) as thread,
        ):
            stream = device.create_stream()
            with cache.allocate(64 * MiB, stream) as buffer:
                gate.hold(stream)
                buffer.fill(1, stream)
            driver.held = "cuEventQuery"
            trimmed = thread.submit(cache.trim)
            assert driver.reached.wait(20)
            stream.close()
            del stream, buffer
            driver.go.set()
            assert trimmed.result() == 0
            settle()
            with cache.allocate(64 * MiB, other) as mine:
                mine.fill(2, other)
                assert executed(other)
                gate.open()
                device.synchronize()
                assert holds(mine, 2)

    @pytest.mark.parametrize("call", CALLS)
    def test_who_needs_no_new_memory_waits_for_no_call(self, machine: Any, call: str) -> None:
        """While a thread is in the call, others cut and merge blocks, free them and trim."""
        kind: Any = Held
        driver = kind(machine)
        device = sa.Device(0, driver=driver)
        with (
            device.create_stream() as stream,
            device.create_stream() as other,
            sa.MemoryPool(device) as pool,
            vmm.ExpandableCache(pool) as cache,
            Gate(device) as gate,
            ThreadPoolExecutor(1) as thread,
        ):
            trims = call in ("cuMemUnmap", "cuMemRelease")
            kept = cache.allocate(2048 * MiB, stream)  # the allowance: nothing moves
            cache.allocate(32 * MiB, other).free()
            if trims:
                cache.allocate(16 * MiB, stream).free()
                stream.synchronize()
            gate.hold(other)  # its memory is not released
            driver.held = call
            grow = functools.partial(cache.allocate, 16 * MiB, stream)
            held: Any = thread.submit(cache.trim if trims else grow)
            try:
                assert driver.reached.wait(20)
                for sizes in ((3, 5, 24), (28, 4), (32,)):
                    blocks = filled(cache, [*sizes], other)
                    if len(sizes) == 1:
                        gate.open()
                        assert holds(blocks[0], 0)
                    for buffer in blocks:
                        buffer.free()
                assert cache.trim() == 0
                assert not held.done()
            finally:
                driver.go.set()
            found = held.result()
            if trims:
                assert found == 16 * MiB
            else:
                found.fill(9)
                assert holds(found, 9)
                found.free()
            kept.free()


@pytest.mark.parametrize("act", ["a new size", "the end"])
def test_free_lists_that_another_thread_changes(pool: sa.MemoryPool, stream: sa.Stream, act: str) -> None:
    """A thread that needs memory for another stream counts the bytes without a lock."""

    def make() -> _Ranges:
        cache = vmm.ExpandableCache(pool)
        both = [cache.allocate(size * MiB, stream) for size in (1, 3)]
        del both
        ranges: _Ranges = cache._state.live()[0]
        assert len([*ranges.filled(0)]) == 2
        ranges.size_class(5 * MiB)
        return ranges

    def change(ranges: _Ranges) -> None:
        if act == "the end":
            ranges.classes.clear()
        else:
            ranges.size_class(2 * MiB)
            list(ranges.filled(0))

    for ranges in interleaved(_Ranges.filled, make, lambda ranges: list(ranges.filled(0)), change):
        list(ranges.filled(0))
        sizes, free_lists = ranges.free_lists
        assert sizes == sorted(ranges.classes)
        assert all(one is ranges.classes[size].free for size, one in zip(sizes, free_lists, strict=True))


class TestLocks:
    """No count is lost and no memory has two owners, whenever a second thread comes."""

    class World(NamedTuple):
        cache: vmm.ExpandableCache
        one: sa.Stream
        two: sa.Stream

        def allocate(self, size: int, stream: sa.Stream) -> None:
            self.cache.allocate(size * MiB, stream).free()

    FIRST: ClassVar[dict[str, tuple[Any, Callable[[World], object]]]] = {
        "cut": (_State.cut, lambda world: world.allocate(5, world.one)),
        "merge": (_Ranges.merge, lambda world: world.allocate(12, world.one)),
        "end": (_Ranges.merge, lambda world: world.one.close()),
    }

    @pytest.mark.parametrize("first", FIRST)
    def test_of_free_memory(self, device: sa.Device, pool: sa.MemoryPool, other: sa.Stream, first: str) -> None:
        def make() -> TestLocks.World:
            world = self.World(vmm.ExpandableCache(pool), device.create_stream(), other)
            for buffer in [world.cache.allocate(12 * MiB, stream) for stream in (world.one, world.two)]:
                buffer.free()
            for stream in (world.one, world.two):
                world.allocate(4, stream)  # leaves 8 MiB that were merged, and a free block
            return world

        function, act = self.FIRST[first]
        for world in interleaved(function, make, act, lambda world: world.allocate(6, world.two)):
            state = world.cache._state
            blocks = [(one.address - state.segment.base, one.size_class.nbytes) for one in state.blocks.values()]
            assert state.used == sum(nbytes for _, nbytes in blocks)
            free = [one.ranges for one in state.live()] + [ranges for _, ranges in state.ended]
            parts = sorted([(at, at + nbytes) for at, nbytes in blocks] + [part for one in free for part in one])
            assert all(one[1] <= two[0] for one, two in itertools.pairwise(parts))
            assert sum(stop - start for start, stop in parts) == state.segment.reserved
            world.cache.close()
            world.one.close()

    def test_a_list_that_another_thread_has_emptied_hides_no_other(self) -> None:
        size = SimpleNamespace(nbytes=4 * MiB, count=1)
        free = [SimpleNamespace(address=8 * MiB, size_class=size)]
        cache = SimpleNamespace(segment=SimpleNamespace(base=0), blocks={}, used=4 * MiB, used_high=0)
        merged: Any = SimpleNamespace(cache=cache, filled=lambda least: [[], free], ranges=FreeRanges())
        _Ranges.merge(merged, 1)
        assert [*merged.ranges] == [(8 * MiB, 12 * MiB)] and free == [] and cache.used == size.count == 0

    def test_two_threads_that_need_memory_get_it_from_the_cache(self, pool: sa.MemoryPool, other: sa.Stream) -> None:
        found: list[sa.Buffer] = []

        def allocate(cache: vmm.ExpandableCache) -> None:
            found.append(cache.allocate(2 * MiB, other))

        for cache in interleaved(_State._found, lambda: vmm.ExpandableCache(pool), allocate, allocate, at="line"):
            assert {one.address for one in found} <= {*cache._state.blocks} and len(found) == 2
            while found:
                found.pop().free()
            other.synchronize()  # Otherwise more caches would wait for their end than the module's end has time for.
            cache.close()

    @pytest.mark.parametrize("limit", [0, 96 * MiB])
    def test_free_ranges_of_a_stream_are_used_under_the_lock(
        self, device: sa.Device, pool: sa.MemoryPool, monkeypatch: pytest.MonkeyPatch, limit: int
    ) -> None:
        cache = vmm.ExpandableCache(pool, limit=limit)
        state: Any = cache._state
        unlocked: set[str] = set()

        def beside(function: Any) -> Any:
            def checked(ranges: FreeRanges, *args: Any) -> Any:
                if any(ranges in (one.ranges, one.small) for one in state.live()) and not state.lock._is_owned():
                    unlocked.add(f"{sys._getframe(1).f_code.co_name} calls {function.__name__}")
                return function(ranges, *args)

            return checked

        for name in ("add", "cut", "remove", "without", "__iter__"):
            monkeypatch.setattr(FreeRanges, name, beside(getattr(FreeRanges, name)))
        choose, streams, buffers = random.Random(1), [device.create_stream() for _ in range(3)], list[sa.Buffer]()
        for _ in range(300):
            act, which = choose.random(), choose.randrange(3)
            if act < 0.5:
                size = choose.choice([1 << 10, 100 << 10, MiB, 3 * MiB, 20 * MiB])
                with contextlib.suppress(sa.OutOfMemoryError):
                    buffers.append(cache.allocate(choose.randint(1, 2) * size, streams[which]))
            elif act < 0.9 and buffers:
                buffers.pop(choose.randrange(len(buffers))).free(streams[which])
            elif act < 0.93:
                cache.trim()
            elif act > 0.97:
                streams[which].close()
                streams[which] = device.create_stream()
        assert not unlocked
        for one in (*buffers, cache, *streams):
            one.close()
