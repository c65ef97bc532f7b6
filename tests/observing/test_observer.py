"""Observers: what they know of each allocation, and that nothing is left of them when they end."""

import contextlib
import gc
import inspect
import itertools
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import streamalloc as sa
from streamalloc import vmm
from streamalloc.core.allocator import Allocator
from streamalloc.core.internal import watching_of
from streamalloc.interop.bridge import Sources
from streamalloc.observing import LeakError
from streamalloc.observing.observer import Account
from streamalloc.observing.records import places
from tests.interleaving import interleaved
from tests.processes import fork
from tests.support import GROWTH, MiB, beside, collecting_at, each_raises, read


def line() -> int:
    """The line of the caller."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def refuse(_: object) -> None:
    """A hook that raises."""
    raise PermissionError("no")


def functions(allocator: Allocator) -> tuple[Any, Any]:
    return allocator.alloc_function, allocator.free_function


@pytest.fixture
def observer(pool: sa.MemoryPool) -> Iterator[sa.Observer]:
    with sa.observe(pool) as observer:
        yield observer


class TestLive:
    def test_knows_each_allocation(self, observer: sa.Observer, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with observer.tag("weights"), observer.phase("load"), observer.phase("first"):
            buffer = pool.allocate(3000, stream); here = line()  # fmt: skip  # noqa: E702
        (one,) = observer.live
        assert (one.address, one.nbytes, one.stream) == (buffer.address, 3000, stream.handle)
        assert (one.thread, one.tag, one.phase) == (threading.get_ident(), "weights", "load/first")
        (site,) = one.sites
        assert (site.file, site.line) == (__file__, here)
        assert site.function.endswith("test_knows_each_allocation") or site.function.startswith("test")
        assert one.source.kind == "pool" and one.source.location == pool.location
        buffer.free()
        assert observer.live == () and observer.nbytes == 0 and observer.peak == 3000

    def test_keeps_as_many_frames_as_asked(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        def inner() -> sa.Buffer:
            return pool.allocate(1, stream)

        with sa.observe(pool, depth=2) as observer, inner():
            assert [site.function.rpartition(".")[2][:10] for site in observer.live[0].sites] == ["inner", "test_keeps"]
        with sa.observe(pool, depth=0) as observer, pool.allocate(1, stream):
            assert str(observer.leaks().places[0]) == "1 byte in 1 allocation from an unknown line"

    def test_sees_what_is_left_for_later(self, observer: sa.Observer, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        buffer = pool.allocate(8, stream)
        with stream.device.create_stream() as other, other.capture():
            # Nothing is freed while a capture is under way.
            stream.close()
            del buffer
            gc.collect()
        assert observer.live == ()

    def test_of_memory_that_was_shared(self, device: sa.Device, stream: sa.Stream) -> None:
        from streamalloc import ipc

        with (
            sa.MemoryPool(device, handle_types=sa.MemHandleType.POSIX_FILE_DESCRIPTOR) as pool,
            sa.observe(pool) as observer,
        ):
            buffer = pool.allocate(4096, stream)
            ipc.share(buffer)
            # What frees it then is what is left for later.
            del buffer
            assert observer.live == () and pool.statistics().used == 0
            other = pool.allocate(4096, stream)
            ipc.share(other)
            assert observer.nbytes == 4096
            other.free(still_imported="ignore")
            assert observer.live == ()

    def test_nothing_of_0_bytes(self, observer: sa.Observer, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with sa.CachingAllocator(pool) as cache, pool.allocate(0, stream), cache.allocate(0, stream):
            assert not observer.live and not observer.history

    def test_nothing_of_before_and_after(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        before = pool.allocate(8, stream)
        with sa.observe(pool) as observer:
            before.free()
            during = pool.allocate(16, stream)
            assert [one.nbytes for one in observer.live] == [16]
        during.free()
        pool.allocate(32, stream).free()
        assert [one.nbytes for one in observer.live] == [16]
        assert [one.action for one in observer.history] == ["allocate"]

    def test_memory_of_graphs_is_not_seen(self, observer: sa.Observer, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with stream.capture() as graph:
            pool.allocate(4096, stream).free()
        graph.close()
        assert observer.history == ()

    def test_a_free_that_the_driver_refuses(self, faults: Any, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        faults.fail("cuMemFreeAsync", result="CUDA_ERROR_UNKNOWN")
        with sa.observe(pool) as observer:
            buffer = pool.allocate(64, stream)
            each_raises(sa.CudaError, buffer.free)
            assert observer.nbytes == 64 and not buffer.freed
            buffer.free()
            assert observer.live == ()


def test_refused_memory_outside_of_pools(device: sa.Device, stream: sa.Stream) -> None:
    memory = sa.PlainMemory(device)
    with sa.observe(memory) as observer:
        with pytest.raises(sa.OutOfMemoryError):
            memory.allocate(1 << 50, stream)
        assert observer.counters().failures == 1
        assert [(one.action, one.allocation.nbytes) for one in observer.history] == [("failure", 1 << 50)]


def test_words_are_text(observer: sa.Observer) -> None:
    for block in (observer.tag, observer.phase):
        with pytest.raises(TypeError, match="must be a string, not int"), block(3):  # type: ignore[arg-type]
            pass


class TestFastPaths:
    def test_are_the_driver_s_own_before_and_after(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        before = functions(pool)
        with sa.observe(pool):
            assert functions(pool) != before
        assert functions(pool) == before

    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
    def test_several_end_in_any_order(self, pool: sa.MemoryPool, stream: sa.Stream, order: tuple[int, ...]) -> None:
        before = functions(pool)
        observers = [sa.observe(pool).start() for _ in range(3)]
        for count, number in enumerate(order):
            pool.allocate(8, stream).free()
            observers[number].stop()
            assert len(observers[number].history) == 2 * (count + 1)
        assert functions(pool) == before

    def test_a_pool_that_is_closed_meanwhile(self, device: sa.Device, stream: sa.Stream) -> None:
        pool = sa.MemoryPool(device)
        with sa.observe(pool) as observer:
            buffer = pool.allocate(8, stream)
            pool.close()
            with pytest.raises(sa.ClosedError):
                pool.allocate(8, stream)
            buffer.free()
            assert observer.live == ()
        each_raises(sa.ClosedError, lambda: pool.allocate(8, stream), lambda: sa.observe(pool))

    def test_pools_that_are_made_and_dropped_meanwhile(self, device: sa.Device, stream: sa.Stream) -> None:
        with sa.observe(device) as observer:
            pool = sa.MemoryPool(device)
            buffer = pool.allocate(8, stream)
            current = sa.allocate(16, stream)
            assert observer.nbytes == 24
            buffer.free()
            current.free()
            del pool
            gc.collect()
            assert observer.live == ()


class TestMappedMemory:
    def test_growable(self, device: sa.Device) -> None:
        with vmm.GrowableBuffer(device, 64 * MiB, 2 * MiB) as buffer:
            with sa.observe(buffer) as observer:
                assert [(one.nbytes, one.sites) for one in observer.live] == [(2 * MiB, ())]
                buffer.grow(4 * MiB); here = line()  # fmt: skip  # noqa: E702
                first, second = observer.live
                assert (second.address, second.nbytes) == (buffer.address + 2 * MiB, 4 * MiB)
                assert second.sites[0].line == here and second.source.kind == "mapping"
                buffer.resize(2 * MiB)
                assert observer.live == (first,) and observer.peak == 6 * MiB
            assert [one.action for one in observer.history] == ["allocate", "allocate", "free"]

    def test_of_a_device_counts_memory_once(self, device: sa.Device) -> None:
        with sa.observe(device) as observer:
            memory = vmm.PhysicalMemory(device, 2 * MiB)
            with vmm.AddressRange(8 * MiB) as addresses:
                addresses.map(memory, 0)
                addresses.map(memory, 2 * MiB)
                assert observer.nbytes == 2 * MiB
            memory.close()
            assert observer.live == ()

    @pytest.mark.simulated_only("only there addresses are used again at once")
    def test_addresses_of_another(self, device: sa.Device) -> None:
        with vmm.GrowableBuffer(device, 64 * MiB, 2 * MiB) as first, sa.observe(first) as observer:
            address = first.address
            first.close()
            with vmm.GrowableBuffer(device, 64 * MiB, 2 * MiB) as second:
                assert second.address == address and observer.live == ()

    def test_evicted(self, device: sa.Device) -> None:
        with vmm.GrowableBuffer(device, 8 * MiB, 2 * MiB) as buffer, sa.observe(buffer) as observer:
            buffer.evict()
            assert observer.nbytes == 0
            buffer.restore()
            assert observer.nbytes == 2 * MiB

    def test_limit_is_looked_at_before_memory_is_made(self, traced: Any, device: sa.Device) -> None:
        with vmm.GrowableBuffer(device, 64 * MiB, 2 * MiB) as buffer, sa.observe(buffer, limit=4 * MiB):
            del traced.calls[:]
            with pytest.raises(sa.OutOfMemoryError, match="limit, 4 MiB,") as caught:
                buffer.grow(4 * MiB)
            assert not caught.value.asked
            assert "cuMemCreate" not in [call.name for call in traced.calls]
            assert buffer.nbytes == 2 * MiB

    def test_pages(self, device: sa.Device) -> None:
        page = 2 * MiB
        with vmm.PageArena(device) as arena, arena.space(16 * page) as space, vmm.HostTier(device) as tier:
            space.commit([1, 2])
            space.alias(5, space, 2)
            with sa.observe(space) as observer, sa.observe(device, limit=7 * page) as second:
                assert {(one.address - space.address) // page for one in observer.live} == {1, 2}
                space.commit([8, 9]); here = line()  # fmt: skip  # noqa: E702
                assert observer.live[-1].sites[0].line == here and second.nbytes == 2 * page
                space.alias([10, 11], space, [8, 9])
                space.release(8, after=())
                assert {(one.address - space.address) // page for one in second.live} == {9, 10}
                space.make_private([9])
                assert observer.nbytes == 5 * page and second.nbytes == 3 * page
                space.swap_out([9, 10], tier)
                assert second.nbytes == page
                space.swap_in([9, 10])
                with pytest.raises(sa.OutOfMemoryError, match="limit, 14 MiB,"):
                    space.commit(range(8))
                space.alias([12, 13], space, [9, 10])
                second.limit = 4 * page
                with pytest.raises(sa.OutOfMemoryError, match="limit, 8 MiB,"):
                    space.make_private([12, 13])
                assert space.committed.tolist() == [1, 2, 5, *range(9, 14)] and second.nbytes == 3 * page
                space.close()
                assert observer.live == second.live == () and observer.peak == 5 * page

    @pytest.mark.parametrize("count", [0, 1], ids=["the first", "the second"])
    def test_a_hook_that_refuses_pages(self, device: sa.Device, count: int) -> None:
        page = 2 * MiB
        left: list[int] = []

        def refuse_later(_: object) -> None:
            if not left:
                raise PermissionError("no")
            left.pop()

        with vmm.PageArena(device) as arena, arena.space(16 * MiB) as space, vmm.HostTier(device) as tier:
            space.commit([3, 4])
            space.alias([5, 6], space, [3, 4])
            for place in (1, 2):
                space.commit(place)
                space[place * page : (place + 1) * page].fill(place)
            space.swap_out([1, 2], tier)
            with sa.observe(space, on_allocate=refuse_later) as observer:
                before = observer.live, space.numbers.tolist()
                for act in (space.swap_in, space.commit, space.make_private):
                    left[:] = [0] * count
                    with pytest.raises(PermissionError):
                        act([0, 7] if act == space.commit else [1, 2, 5, 6])
                    assert (observer.live, space.numbers.tolist()) == before
            assert space.swap_in([1, 2]) == 2 and space.make_private([5, 6]) == 2
            assert all((read(space[place * page : (place + 1) * page]) == place).all() for place in (1, 2))

    @pytest.mark.gpus(2)
    def test_symmetric(self, device: sa.Device, peer: sa.Device) -> None:
        from streamalloc import multicast

        memory = multicast.SymmetricMemory.local([device, peer], MiB, multicast=False)
        with sa.observe(memory) as observer:
            assert [one.address for one in observer.live] == memory.addresses.tolist()
            assert [one.source.location.id for one in observer.live] == [0, 1]
            assert observer.nbytes == 2 * memory.physical_bytes
            memory.close()
            assert observer.live == ()


class TestPhases:
    def test_of_threads(self, observer: sa.Observer, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        def other(hold: Callable[[], None]) -> None:
            with observer.phase("other"):
                hold()

        with beside(other), observer.phase("mine"), pool.allocate(64, stream):
            pass
        assert {phase.path: phase.peak for phase in observer.phases} == {"other": 64, "mine": 64}

    @pytest.mark.parametrize(
        ("of", "call"),
        [
            (lambda pool: pool, "cuMemAllocFromPoolAsync"),
            (sa.CachingAllocator, "cuMemAllocFromPoolAsync"),
            (vmm.ExpandableCache, "cuMemCreate"),
            (lambda _: sa, "cuMemAllocAsync"),
        ],
    )
    def test_limit_s_call(self, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream, of: Any, call: str) -> None:
        source = of(pool)
        with sa.observe(device, limit=64), pytest.raises(sa.OutOfMemoryError) as caught:
            source.allocate(65, stream)
        assert caught.value.call == call and not caught.value.asked

    def test_limit(self, observer: sa.Observer, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        kept = pool.allocate(60, stream)
        with (
            observer.phase("small", limit=100) as phase,
            pytest.raises(sa.OutOfMemoryError, match="the limit of phase 'small', 100 bytes"),
        ):
            pool.allocate(41, stream)
        assert str(phase) == "<Phase 'small': 60 bytes before, at most 60 bytes, 60 bytes after it>" and not phase.grown
        with pool.allocate(41, stream), kept:
            assert observer.nbytes == 101


class TestHolders:
    """An error of memory that ran out names the pools and the lines that hold it."""

    @pytest.mark.streamalloc(machine={"memory": 512 * MiB})
    def test_of_a_pool(self, device: sa.Device, stream: sa.Stream) -> None:
        memory = device.memory_info().total
        with (
            sa.MemoryPool(device, name="weights") as weights,
            sa.MemoryPool(device, name="activations") as activations,
            sa.observe(device) as observer,
        ):
            with observer.tag("layer"), observer.phase("load"):
                one = weights.allocate(3 * MiB, stream); here = line()  # fmt: skip  # noqa: E702
            many = [activations.allocate(MiB >> number, stream) for number in range(2)]
            with pytest.raises(sa.OutOfMemoryError) as caught:
                activations.allocate(2 * memory, stream)
            pool, first, second = caught.value.holders[:3]
            assert pool == "pool 'weights': 32 MiB reserved, 3 MiB used"
            assert first.startswith(f"3 MiB in 1 allocation from test_observer.py:{here} in ")
            assert first.endswith(", pool 'weights', tag 'layer', phase 'load'")
            assert second.startswith("1,536 KiB in 2 allocations from ")
            assert str(caught.value).endswith("; held by:\n  " + "\n  ".join(caught.value.holders))
            again = pickle.loads(pickle.dumps(caught.value))
            assert again.holders == caught.value.holders
            for buffer in (one, *many):
                buffer.free()

    def test_of_physical_memory(self, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        size = -(-device.memory_info().total // (32 * MiB)) * 32 * MiB
        with pool.allocate(MiB, stream), vmm.GrowableBuffer(device, 4 * MiB) as buffer, sa.observe(buffer):
            buffer.resize(2 * MiB)
            with pytest.raises(sa.OutOfMemoryError) as caught:
                vmm.PhysicalMemory(device, 2 * size)
        pools, mapped = caught.value.holders
        assert pools == f"the pool {pool.handle:#x}: 32 MiB reserved, 1 MiB used"
        assert mapped.startswith("2 MiB in 1 allocation from test_observer.py:")

    def test_of_another_location_does_not(self, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        host = sa.MemoryPool(sa.MemLocation.host(), max_size=32 * MiB)
        with host, sa.observe(), pool.allocate(MiB, stream), pytest.raises(sa.OutOfMemoryError) as caught:
            host.allocate(64 * MiB, stream)
        assert caught.value.holders == ()

    @pytest.mark.parametrize("of", ["pool", "cache", "limited cache", "current pool"])
    def test_of_a_pool_s_own_limit(self, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream, of: str) -> None:
        """Memory of other pools is no reason."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(sa.observe(device))
            stack.enter_context(pool.allocate(8 * MiB, stream))
            own = stack.enter_context(sa.MemoryPool(device, max_size=64 * MiB))
            stack.enter_context(own.make_current())
            cache = stack.enter_context(sa.CachingAllocator(own, limit=63 * MiB if of == "limited cache" else 0))
            allocate = {"pool": own.allocate, "current pool": sa.allocate}.get(of, cache.allocate)
            stack.enter_context(own.allocate(32 * MiB, stream))
            stack.enter_context(allocate(MiB, stream))
            with pytest.raises(sa.OutOfMemoryError) as caught:
                allocate(40 * MiB, stream)
            assert [text.partition("B in ")[0] for text in caught.value.holders] == ["32 Mi", "1 Mi"]

    def test_only_the_largest(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with sa.observe(pool, limit=100) as observer:
            buffers = []
            for number in range(7):
                with observer.tag(str(number)):
                    buffers.append(pool.allocate(8 + number, stream))
            with pytest.raises(sa.OutOfMemoryError) as caught:
                pool.allocate(80, stream)
            *lines, rest = caught.value.holders
        assert [text.rpartition("tag ")[2] for text in lines] == ["'6'", "'5'", "'4'", "'3'", "'2'"]
        assert rest == "17 bytes in 2 allocations from other lines"


class TestLimits:
    def test_raise_before_the_driver_is_asked(self, traced: Any, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with sa.observe(pool, limit=MiB) as observer:
            kept = pool.allocate(MiB - 512, stream); here = line()  # fmt: skip  # noqa: E702
            del traced.calls[:]
            with pytest.raises(sa.OutOfMemoryError) as caught:
                pool.allocate(1024, stream)
            assert traced.calls == []
            error = caught.value
            assert (error.requested, error.used, error.limit, error.asked) == (1024, MiB - 512, MiB, False)
            assert f"test_observer.py:{here}" in str(error)
            observer.limit = 0
            pool.allocate(1024, stream).free()
            kept.free()

    def test_what_was_dropped_makes_room(
        self, pool: sa.MemoryPool, stream: sa.Stream, cache: sa.CachingAllocator
    ) -> None:
        with sa.observe(cache, limit=10_000):
            for _ in range(3):
                cache.allocate(10_000, stream)


class TestHooks:
    @pytest.mark.parametrize("cached", [False, True])
    def test_are_not_called_where_a_library_lets_go(
        self, pool: sa.MemoryPool, stream: sa.Stream, cached: bool, cache: sa.CachingAllocator
    ) -> None:
        """That happens in a finaliser, which may come in the middle of anything."""
        told: list[int] = []
        source = cache if cached else pool
        with sa.observe(source, on_free=lambda one: told.append(one.nbytes)) as observer:
            held = Sources([source]).allocate(8, 0, stream.handle)
            del held
            assert told == []
            assert observer.live == () and 8 in told

    def test_what_a_hook_raises_undoes_the_allocation(self, checker: Any, device: sa.Device) -> None:
        with device.create_stream() as stream:
            with sa.MemoryPool(device) as pool, sa.observe(pool, on_allocate=refuse) as observer:
                with pytest.raises(PermissionError, match="no"):
                    pool.allocate(8, stream)
                assert observer.live == () and pool.statistics().used == 0
                with sa.CachingAllocator(pool) as cache:
                    with sa.observe(cache, on_allocate=refuse) as other, pytest.raises(PermissionError):
                        cache.allocate(8, stream)
                    assert other.live == ()
            stream.synchronize()

    def test_both_hooks_raise(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        def fail(_: object) -> None:
            raise LookupError

        with sa.observe(pool, on_allocate=refuse, on_free=fail) as observer:
            with pytest.raises(PermissionError) as caught:
                pool.allocate(8, stream)
            assert vars(caught.value)["__notes__"] == ["while undoing: LookupError: "]
            assert observer.live == ()
        assert pool.statistics().used == 0

    def test_what_a_hook_raises_leaves_the_memory_freed(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with sa.observe(pool, on_free=refuse) as observer:
            buffer = pool.allocate(8, stream)
            each_raises(PermissionError, buffer.free, match="no")
            assert buffer.freed and observer.live == ()
        assert pool.statistics().used == 0

    def test_may_allocate_and_ask(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        seen: list[int] = []

        def look(one: Any) -> None:
            if one.nbytes == 8:
                with pool.allocate(16, stream):
                    seen.append(watching.nbytes)

        watching = sa.observe(pool, on_allocate=look)
        with watching, pool.allocate(8, stream):
            pass
        assert seen == [24]


class TestReports:
    def test_the_names_of_pools_and_streams(self, device: sa.Device) -> None:
        copies = device.create_stream(name="copies")
        with sa.MemoryPool(device, name="kv") as pool, sa.observe(pool) as observer, sa.CachingAllocator(pool) as cache:
            for allocator in (pool, cache):
                with allocator.allocate(512, copies):
                    assert observer.live[-1].names == (("pool", "kv"), ("stream", "copies"))
                    assert str(observer.leaks().places[0]).endswith("pool 'kv', stream 'copies'")
                    assert "<th style='text-align:left'>stream</th>" in observer._repr_html_()
            copies.close()
            # The driver may give its handle to another stream.
            one = pool.allocate(512, device.create_stream())
            assert observer.live[-1].names == (("pool", "kv"),)
            one.free()

    def test_counters(self, device: sa.Device, stream: sa.Stream) -> None:
        with sa.MemoryPool(device, max_size=GROWTH) as pool, sa.observe(pool) as seen:
            one, two = pool.allocate(1000, stream), pool.allocate(3000, stream)
            one.free()
            with pytest.raises(sa.OutOfMemoryError):
                pool.allocate(4 * GROWTH, stream)
            three = pool.allocate(10, stream)
            found = seen.counters()
            assert found == (3010, 4000, 2, 3, 4010, 2, 3000, found.failures)
            assert found.failures >= 1
            two.free()
            three.free()
            assert seen.counters()[:5] == (0, 4000, 0, 3, 4010)

    def test_leaks_by_place(self, observer: sa.Observer, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        assert not observer.leaks()
        observer.assert_nothing_left()
        kept = [pool.allocate(MiB, stream) for _ in range(3)]; here = line()  # fmt: skip  # noqa: E702
        with observer.tag("<cache>"):
            kept.append(pool.allocate(4 * MiB, stream))
        report = observer.leaks()
        assert [(place.nbytes, len(place.allocations), place.tag) for place in report.places] == [
            (4 * MiB, 1, "<cache>"),
            (3 * MiB, 3, ""),
        ]
        head, first, _ = str(report).splitlines()
        assert head == "7 MiB in 4 allocations still allocated:"
        assert repr(report) == "<LeakReport: 7 MiB in 4 allocations still allocated>"
        assert first.startswith("  4 MiB in 1 allocation from test_observer.py:")
        assert f"3 MiB in 3 allocations from test_observer.py:{here} in " in str(report)
        assert f"test_observer.py:{here} in " in report._repr_html_() and "&lt;cache&gt;" in report._repr_html_()
        assert "<cache>" not in report._repr_html_()
        with pytest.raises(LeakError, match="7 MiB in 4 allocations") as caught:
            observer.assert_nothing_left()
        again = pickle.loads(pickle.dumps(caught.value))
        assert again.report.nbytes == 7 * MiB and str(again) == str(report)
        for buffer in kept:
            buffer.free()


class TestArguments:
    def test_errors_name_them(self, pool: sa.MemoryPool, machine: Any) -> None:
        each_raises(TypeError, lambda: sa.observe(3), match="what: 3 is no device")  # type: ignore[arg-type]
        each_raises(ValueError, lambda: sa.observe(pool, limit=-1), match="limit")
        each_raises(TypeError, lambda: sa.observe(pool, depth="all"), match="depth must be an integer, not str")  # type: ignore[arg-type]
        # A number would name a descriptor: the log would go to the terminal, and close it.
        each_raises(TypeError, lambda: sa.observe(pool, log=True), match="log must be a path, not bool")  # type: ignore[arg-type]
        each_raises(TypeError, lambda: sa.observe(pool, on_free=3), match="on_free must be a function, not int")  # type: ignore[arg-type]
        each_raises(ValueError, lambda: sa.observe(pool, driver=machine), match="driver")

    def test_everything_of_a_driver(self, device: sa.Device, stream: sa.Stream) -> None:
        with sa.observe() as observer, sa.allocate(8, stream), vmm.GrowableBuffer(device, 2 * MiB, 2 * MiB):
            assert observer.nbytes == 8 + 2 * MiB
        assert repr(observer) == "<Observer, stopped: 0 bytes in 0 allocations>"


class TestTogether:
    @pytest.mark.parametrize("read", [lambda observer: observer.nbytes, sa.Observer.stop], ids=["read", "stop"])
    def test_notes_that_come_as_fast_as_they_are_entered(
        self, pool: sa.MemoryPool, stream: sa.Stream, monkeypatch: pytest.MonkeyPatch, read: Any
    ) -> None:
        enter, entered = Account._enter, itertools.count()

        def enter_and_add(account: Account, *note: Any) -> None:
            assert next(entered) < 5_000
            enter(account, *note)
            if account in watching_of(stream._session).watchers:
                account.freed(0, None)

        with sa.observe(pool) as observer, pool.allocate(512, stream):
            monkeypatch.setattr(Account, "_enter", enter_and_add)
            observer._account.freed(0, None)
            assert read(observer) in (512, None)
            monkeypatch.undo()

    def test_a_hook_that_raises_at_the_stop(self, pool: sa.MemoryPool, stream: sa.Stream, tmp_path: Path) -> None:
        before = functions(pool)
        observer = sa.observe(pool, on_free=refuse, log=tmp_path / "log.csv").start()
        pool.allocate(8, stream)  # a finaliser frees it
        each_raises(PermissionError, observer.stop)
        assert not observer.started and functions(pool) == before and observer._account._log is None

    def test_a_fork_while_another_thread_writes(self, pool: sa.MemoryPool, stream: sa.Stream, tmp_path: Path) -> None:
        with sa.observe(pool, log=tmp_path / "log.csv") as observer, pool.allocate(8, stream):
            observer._account._entering = 1  # another thread
            observer._account.freed(0, None)
            child = fork()
            if not child:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(20)
                os._exit(observer.nbytes + observer.started)  # it has stopped
            observer._account._entering = None
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8

    @pytest.mark.parametrize("act", [Account.look, Account._close_log], ids=["reads", "ends the log"])
    def test_a_thread_while_another_enters_notes(self, pool: sa.MemoryPool, tmp_path: Path, act: Any) -> None:
        path, live, ends = tmp_path / "log.csv", list[int](), contextlib.ExitStack()

        def make() -> Account:
            path.unlink(missing_ok=True)
            account = ends.enter_context(sa.observe(pool, log=path))._account
            for address in (8, 16):
                account.allocated(pool, address, 8, 0)
                account.freed(address, 0)  # noted, and entered later
            return account

        def second(account: Account) -> None:
            act(account)
            live.append(len(account.live))

        function = Account._enter_notes if act is Account.look else Account._enter_some
        for _ in interleaved(function, make, Account.look, second, at="line"):
            ends.close()
            assert live.pop() == 0 and len(path.read_text().splitlines()) == 5
        ends.close()

    @pytest.mark.parametrize("listed", [places, weakref.WeakKeyDictionary.keyrefs], ids=["live", "of a pool"])
    def test_an_allocation_while_holders_are_listed(self, device: sa.Device, pool: sa.MemoryPool, listed: Any) -> None:
        """The error for an allocation over the limit names them, and so does the one of a pool without memory."""
        addresses = itertools.count(8, 8)

        def make() -> Account:
            account = sa.observe(pool, limit=1)._account
            account.allocated(pool, next(addresses), 8, 0)
            return account

        def first(account: Account) -> None:
            if listed is places:
                each_raises(sa.OutOfMemoryError, lambda: account.asked(pool, 8), match="in 1 allocation")
            else:
                assert len(account.holders(pool.location, [pool])) == 1

        def second(account: Account) -> None:
            with sa.MemoryPool(device) as other:
                account.allocated(other, next(addresses), 8, 0)

        for _ in interleaved(listed, make, first, second):
            pass

    @pytest.mark.parametrize("name", ["live", "history"])
    def test_a_note_while_the_collector_runs(self, pool: sa.MemoryPool, name: str) -> None:
        """The collector may let other threads run at an allocation of the thread that reads."""
        account = (observer := sa.observe(pool))._account
        addresses = itertools.count(8, 8)

        def enter(*_: object) -> None:
            account.allocated(pool, next(addresses), 8, 0)

        enter()
        with collecting_at(1, enter):
            found = [getattr(observer, name) for _ in range(50)]
        assert len(found[-1]) >= len(found[0])
