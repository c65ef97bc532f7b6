"""Allocating: sizes, streams, requests in other words, captures, memory that runs out, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import interop, observing
from streamalloc.core.library_streams import as_stream
from streamalloc.core.properties import checked_size
from streamalloc.core.session import session_of
from streamalloc.driver.bindings import cuda
from streamalloc.testing import Faults, Gate
from tests.interop.libraries import LibraryStream
from tests.support import GROWTH, KEEP, MiB, captured, each_raises, executed, holds, in_threads, names, pending

Allocate = Callable[[Any, Any], sa.Buffer]


@pytest.fixture(params=["a pool", "the current pool"])
def allocate(request: pytest.FixtureRequest, pool: sa.MemoryPool) -> Allocate:
    """Both ways to allocate."""
    return pool.allocate if request.param == "a pool" else sa.allocate


class TestSizes:
    def test_nothing(self, allocate: Allocate, stream: sa.Stream) -> None:
        """A valid, empty buffer, as the driver has it: address 0."""
        buffer = allocate(0, stream)
        assert (buffer.address, buffer.nbytes, len(buffer)) == (0, 0, 0)
        buffer.fill(1)
        assert buffer[:].nbytes == 0
        buffer.free()
        assert buffer.freed
        each_raises(sa.ClosedError, buffer.free)
        with allocate(0, stream) as other:
            assert other.stream is stream

    def test_addresses_are_multiples_of_512(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        buffers = [pool.allocate(size, stream) for size in (1, 1, 511, 512, 513, 700, 1)]
        addresses = [buffer.address for buffer in buffers]
        assert [address - addresses[0] for address in addresses] == [0, 512, 1024, 1536, 2048, 3072, 4096]
        assert addresses[0] % 512 == 0
        assert pool.statistics().used == 1 + 1 + 511 + 512 + 513 + 700 + 1  # as requested, nothing is rounded

    @pytest.mark.parametrize("size", [np.int64(64), np.uint8(64)])
    def test_numpy_integers(self, allocate: Allocate, stream: sa.Stream, size: Any) -> None:
        with allocate(size, stream) as buffer:
            assert buffer.nbytes == 64 and type(buffer.nbytes) is int

    @pytest.mark.parametrize(
        ("size", "error"),
        [
            (-1, ValueError),
            (-(1 << 70), ValueError),
            (1 << 64, ValueError),
            (1 << 100, ValueError),
            (np.int64(-1), ValueError),
            (64.0, TypeError),
            (1.5, TypeError),
            (np.float32(64), TypeError),
            ("64 sixes", ValueError),
            (None, TypeError),
            (True, TypeError),
            (b"a", TypeError),
        ],
        ids=repr,
    )
    def test_that_are_none(
        self, traced: Any, size: Any, error: type[Exception], device: sa.Device, stream: sa.Stream, pool: sa.MemoryPool
    ) -> None:
        for allocate in (pool.allocate, sa.allocate):
            for one in (stream, device.default_stream):
                with pytest.raises(error, match="nbytes"):
                    allocate(size, one)
        assert names(traced, "cuMemAllocFromPoolAsync", "cuMemAllocAsync") == []

    @pytest.mark.parametrize("size", [1 << 46, 1 << 63, (1 << 64) - 1])
    def test_that_no_device_has(self, device: sa.Device, stream: sa.Stream, size: int) -> None:
        with sa.MemoryPool(device, max_size=GROWTH) as pool:
            with pytest.raises(sa.OutOfMemoryError) as caught:
                pool.allocate(size, stream)
            assert caught.value.requested == size
            with pool.allocate(64, stream) as buffer:
                assert buffer.address


class TestStreams:
    @pytest.mark.parametrize("default", ["default_stream", "per_thread_stream"])
    def test_default_streams(self, device: sa.Device, allocate: Allocate, default: str) -> None:
        stream = getattr(device, default)
        with allocate(64, stream) as buffer:
            assert buffer.stream is stream
            buffer.fill(6)
            assert holds(buffer, 6)

    def test_default_streams_of_a_thread_without_a_context(self, device: sa.Device, allocate: Allocate) -> None:

        def work() -> None:
            for stream in (device.default_stream, device.per_thread_stream):
                with allocate(64, stream) as buffer:
                    buffer.fill(6)
                    assert holds(buffer, 6)

        in_threads(work)

    @pytest.mark.gpus(2)
    def test_of_another_device(self, pool: sa.MemoryPool, peer: sa.Device) -> None:
        with peer.create_stream() as theirs:
            with pool.allocate(MiB, theirs) as buffer:
                assert buffer.stream.device == peer and buffer.location == sa.MemLocation.device(0)
                assert pool.statistics().used == MiB
            with sa.allocate(MiB, theirs) as buffer:
                assert buffer.location == sa.MemLocation.device(1)
                assert buffer.owner is sa.MemoryPool.current(peer)
            theirs.synchronize()

    def test_nothing_is_synchronised(self, allocate: Allocate, stream: sa.Stream, gate: Gate) -> None:
        gate.hold(stream)
        with allocate(64, stream) as buffer:
            buffer.fill(1)
            assert pending(stream)
        gate.open()


class TestAfterTheStreamIsClosed:
    @staticmethod
    def filled(pool: sa.MemoryPool, device: sa.Device) -> sa.Buffer:
        """64 bytes with the value 5, whose stream is closed."""
        with device.create_stream() as stream:
            buffer = pool.allocate(64, stream)
            buffer.fill(5)
        return buffer

    def test_a_free_needs_another_stream(self, pool: sa.MemoryPool, device: sa.Device, stream: sa.Stream) -> None:
        closed = self.filled(pool, device)
        each_raises(sa.ClosedError, closed.free, match="closed")
        assert not closed.freed
        closed.free(stream)
        assert pool.statistics().used == 0

    def test_use_needs_another_stream(self, pool: sa.MemoryPool, device: sa.Device, stream: sa.Stream) -> None:
        closed = self.filled(pool, device)
        each_raises(sa.ClosedError, lambda: closed.fill(1), lambda: closed.copy_to(bytearray(64)))
        device.synchronize()
        target = bytearray(64)
        closed.copy_to(target, stream)
        assert bytes(target) == bytes([5]) * 64
        closed.free(stream)

    def test_drops_come_after_work(self, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream, gate: Gate) -> None:
        """Queued work of the closed stream on the memory runs before the memory is reused."""
        lost = device.create_stream()
        buffer, target = pool.allocate(20 * MiB, lost), pool.allocate(20 * MiB, stream)
        stream.synchronize()
        gate.hold(lost)
        buffer.fill(1)
        target.copy_from(buffer, lost)
        lost.close()
        del buffer
        assert pool.statistics().used == 20 * MiB
        device.default_stream.launch_host_func(lambda: None)
        with pool.allocate(20 * MiB, device.default_stream) as again:
            again.fill(2)
            gate.open()
            device.synchronize()
            assert holds(target, 1)
        target.free()


class TestOutOfMemory:
    @pytest.fixture
    def unseen(self, device: sa.Device, stream: sa.Stream) -> Callable[[str], sa.MemoryPool]:
        """Makes a full pool, all of whose memory was freed on another stream, but which no synchronisation has seen."""

        others: list[sa.Stream] = []

        def make(on_oom: Any) -> sa.MemoryPool:
            pool = sa.MemoryPool(device, max_size=GROWTH, on_oom=on_oom)
            pool.attributes.reuse_allow_opportunistic = False
            pool.attributes.reuse_allow_internal_dependencies = False
            others.append(device.create_stream())  # destroying it would show the driver that the free has run
            pool.allocate(GROWTH, others[-1]).free()
            assert executed(others[-1])
            return pool

        return make

    def test_raise(self, unseen: Callable[[str], sa.MemoryPool], stream: sa.Stream) -> None:
        with unseen("raise") as pool, pytest.raises(sa.OutOfMemoryError) as caught:
            pool.allocate(GROWTH, stream)
        assert (caught.value.used, caught.value.reserved) == (0, GROWTH)

    def test_synchronise_trim_and_try_again(self, unseen: Callable[[str], sa.MemoryPool], stream: sa.Stream) -> None:
        with unseen("sync-trim-retry") as pool, pool.allocate(GROWTH, stream) as buffer:
            assert buffer.address and pool.statistics() == (GROWTH, GROWTH, GROWTH, GROWTH)
            buffer.fill(1)
            assert holds(buffer, 1)

    def test_a_second_try_that_fails(self, traced: Any, device: sa.Device, stream: sa.Stream) -> None:
        with sa.MemoryPool(device, GROWTH, on_oom="sync-trim-retry") as pool:
            with pool.allocate(20 * MiB, stream):
                del traced.calls[:]
                with pytest.raises(sa.OutOfMemoryError) as caught:
                    pool.allocate(20 * MiB, stream)
            tried = ("cuMemAllocFromPoolAsync", "cuMemPoolTrimTo")
            assert names(traced, *tried) == [*tried, tried[0]]
            assert (caught.value.requested, caught.value.used, caught.value.limit) == (20 * MiB, 20 * MiB, GROWTH)

    def test_a_function_is_asked_until_there_is_memory(self, device: sa.Device, stream: sa.Stream) -> None:
        failures: list[sa.OutOfMemoryError] = []

        def release(failure: sa.OutOfMemoryError) -> bool:
            failures.append(failure)
            kept.pop().free()
            return True

        with sa.MemoryPool(device, max_size=GROWTH, on_oom=release) as pool:
            kept = [pool.allocate(GROWTH // 4, stream) for _ in range(4)]
            with pool.allocate(GROWTH // 2, stream):
                assert [one.used for one in failures] == [GROWTH, 3 * GROWTH // 4] and len(kept) == 2
            for buffer in kept:
                buffer.free()

    def test_a_function_is_asked_for_more_than_a_limit_that_the_driver_rounds_up(
        self, device: sa.Device, stream: sa.Stream
    ) -> None:
        def release(failure: sa.OutOfMemoryError) -> bool:
            assert failure.limit == GROWTH
            kept.pop().free()
            return True

        with sa.MemoryPool(device, max_size=MiB, on_oom=release) as pool:
            kept = [pool.allocate(20 * MiB, stream)]
            pool.allocate(20 * MiB, stream).free()
            assert kept == []

    def test_a_function_that_refuses_or_raises(self, device: sa.Device, stream: sa.Stream) -> None:
        asked: list[sa.OutOfMemoryError] = []

        def refuse(failure: sa.OutOfMemoryError) -> bool:
            asked.append(failure)
            return False

        def fail(failure: sa.OutOfMemoryError) -> bool:
            raise KeyError(failure.requested)

        with (
            sa.MemoryPool(device, max_size=GROWTH, on_oom=refuse) as pool,
            pool.make_current(),
            pool.allocate(GROWTH // 2, stream),
        ):
            for allocate in (pool.allocate, sa.allocate):
                with pytest.raises(sa.OutOfMemoryError) as caught:
                    allocate(GROWTH, stream)
                assert asked.pop() is caught.value and asked == []
            pool.on_oom = fail
            with pytest.raises(KeyError, match=str(GROWTH)):
                pool.allocate(GROWTH, stream)
            with pytest.raises(ValueError, match="sync-trim-retry"):
                pool.on_oom = "sync_trim_retry"  # type: ignore[assignment]
            assert pool.on_oom is fail

    @pytest.mark.parametrize("max_size", [GROWTH, 1 << 40])
    def test_a_function_is_not_asked_in_vain(self, device: sa.Device, stream: sa.Stream, max_size: int) -> None:
        """Nor does a task wait for what no free can make room for."""

        def fail(failure: sa.OutOfMemoryError) -> bool:
            raise AssertionError(failure)

        nbytes = 2 * GROWTH if max_size == GROWTH else device.memory_info().total + GROWTH
        with sa.MemoryPool(device, max_size=max_size, on_oom=fail) as pool, pool.make_current():
            for allocate in (pool.allocate, sa.allocate):
                with pytest.raises(sa.OutOfMemoryError, match="the request is larger than the"):
                    allocate(nbytes, stream)
            with pytest.raises(sa.OutOfMemoryError):
                asyncio.run(asyncio.wait_for(pool.allocate_async(nbytes, stream), 1))

    def test_caches_return_their_memory_before(self, device: sa.Device, stream: sa.Stream) -> None:
        def fail(failure: sa.OutOfMemoryError) -> bool:
            raise AssertionError(failure)

        with sa.MemoryPool(device, max_size=GROWTH, on_oom=fail) as pool, sa.CachingAllocator(pool) as cache:
            for allocator in (pool, cache):
                for one in [cache.allocate(MiB, stream) for _ in range(32)]:
                    one.free()
                allocator.allocate(GROWTH, stream).free()

    def test_no_hidden_work_by_default(self, traced: Any, device: sa.Device, stream: sa.Stream) -> None:
        with sa.MemoryPool(device, GROWTH) as pool:
            with pytest.raises(sa.OutOfMemoryError):
                pool.allocate(2 * GROWTH, stream)
            hidden = ("cuCtxSynchronize", "cuStreamSynchronize", "cuMemPoolTrimTo", "cuMemPoolSetAttribute")
            assert names(traced, *hidden) == []
            assert names(traced).count("cuMemAllocFromPoolAsync") == 1

    @pytest.mark.parametrize(
        ("call", "answer", "error"),
        [
            ("cuMemAllocFromPoolAsync", "ILLEGAL_ADDRESS", sa.DeviceLostError),
            ("cuMemAllocAsync", "OUT_OF_MEMORY", sa.OutOfMemoryError),
        ],
    )
    def test_the_call_that_failed_is_named(
        self, faults: Faults, device: sa.Device, stream: sa.Stream, call: str, answer: str, error: type[sa.CudaError]
    ) -> None:
        with sa.MemoryPool(device, on_oom="sync-trim-retry") as pool:
            faults.fail(call, times=2, result=f"CUDA_ERROR_{answer}")
            with pytest.raises(error) as caught:
                (sa if call == "cuMemAllocAsync" else pool).allocate(64, stream)
            assert caught.value.call == call


POSIX = sa.MemHandleType.POSIX_FILE_DESCRIPTOR


@pytest.fixture
def shareable(device: sa.Device) -> Iterator[sa.MemoryPool]:
    with sa.MemoryPool(device, handle_types=POSIX) as pool:
        yield pool


def _by_a_bridge(pool: sa.MemoryPool, stream: sa.Stream) -> sa.Memory:
    return interop.bridge.Sources([pool]).allocate(64, 0, stream.handle)


def _observed(pool: sa.MemoryPool, stream: sa.Stream) -> sa.Memory:
    with observing.observe(pool):
        return pool.allocate(64, stream)


WAYS: dict[str, Callable[[sa.MemoryPool, sa.Stream], sa.Memory]] = {
    "pool": lambda pool, stream: pool.allocate(64, stream),
    "cache": lambda pool, stream: sa.CachingAllocator(pool).allocate(64, stream),
    "bridge": _by_a_bridge,
    "bridge over a cache": lambda pool, stream: interop.bridge.Sources([sa.CachingAllocator(pool)]).allocate(
        64, 0, stream.handle
    ),
    "observed": _observed,
    "borrowed stream": lambda pool, stream: pool.allocate(64, sa.Stream.of_handle(stream.device, stream.handle, None)),
}


def _refused_in_a_capture(stream: sa.Stream, allocate: Callable[[], object], match: str) -> None:
    """The error says what to do, and the capture goes on."""
    target = sa.MemoryPool(stream.device).allocate(64, stream)
    with stream.capture() as graph:
        with pytest.raises(sa.NotSupportedError, match=match) as caught:
            allocate()
        assert "without handle_types" in str(caught.value) and "before the capture" in str(caught.value)
        target.fill(3)
    assert graph.nodes == ["MEMSET"] and caught.value.code == cuda.CUresult.CUDA_ERROR_NOT_SUPPORTED


@pytest.mark.parametrize("way", WAYS)
def test_made_for_sharing(shareable: sa.MemoryPool, stream: sa.Stream, way: str) -> None:
    WAYS[way](shareable, stream)
    _refused_in_a_capture(stream, lambda: WAYS[way](shareable, stream), "was made for sharing .*POSIX_FILE_DESCRIPTOR")


def test_current(shareable: sa.MemoryPool, stream: sa.Stream) -> None:
    with shareable.make_current():
        _refused_in_a_capture(stream, lambda: sa.allocate(64, stream), "made for sharing")


def test_of_the_host(device: sa.Device, stream: sa.Stream) -> None:
    with sa.MemoryPool(sa.MemLocation.host(), driver=device.driver) as pool:
        _refused_in_a_capture(stream, lambda: pool.allocate(64, stream), "not in device memory")


def test_captured_by_other_code(machine: Any, shareable: sa.MemoryPool, stream: sa.Stream) -> None:
    theirs = as_stream(LibraryStream(stream.handle), session_of(stream))
    with captured(machine, stream), pytest.raises(sa.NotSupportedError, match="made for sharing"):
        shareable.allocate(64, theirs)


SIZES = {"4096": 4096, "2GiB": 2 << 30, " 512 mib ": 512 * MiB, "1.5kB": 1500, "0.5KiB": 512, "7b": 7, "1TB": 10**12}


@pytest.mark.parametrize("text", SIZES)
def test_sizes_as_text(text: str) -> None:
    assert checked_size("nbytes", text) == SIZES[text]


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 PiB", "1e3", "0.3B", "1,000", "2 GiB 3", "1/2"])
def test_text_that_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="nbytes="):
        checked_size("nbytes", text)


def test_text_in_calls(device: sa.Device, stream: sa.Stream) -> None:
    with sa.MemoryPool(device, max_size="64MiB", release_threshold="1MiB") as pool:
        assert pool.properties is not None and pool.properties.max_size == 64 * MiB
        assert pool.attributes.release_threshold == MiB
        with pool.allocate("4KiB", stream) as buffer, sa.CachingAllocator(pool).allocate("4KiB", stream) as cached:
            assert buffer.nbytes == cached.nbytes == 4096
        with sa.PlainMemory(device).allocate("4KiB", stream) as buffer:
            assert buffer.nbytes == 4096
        stream.synchronize()
        assert pool.trim("1MiB") >= 0


def test_a_share_of_the_device(device: sa.Device) -> None:
    with sa.MemoryPool(device, max_size=0.25) as pool:
        assert pool.properties is not None
        assert pool.properties.max_size == device.memory_info().total // 4
    for share, where in ((0.0, device), (1.5, device), (0.5, sa.MemLocation.host())):
        with pytest.raises(ValueError, match="is a share"):
            sa.MemoryPool(where, max_size=share, driver=device.driver)


def test_the_ordinal_of_a_device(device: sa.Device) -> None:
    with sd.use(device.driver):
        with sa.MemoryPool(0) as pool:
            assert pool.location == device.location and pool.access(0) is sa.MemAccess.READWRITE
        assert sa.MemoryPool.default(0) is sa.MemoryPool.default(device)
        with pytest.raises(ValueError, match="this driver has"):
            sa.MemoryPool(99)
        wrong: Any = True
        with pytest.raises(TypeError):
            sa.MemoryPool(wrong)


def test_a_primed_pool(device: sa.Device, stream: sa.Stream) -> None:
    with sa.MemoryPool(device, initial_size="40MiB") as pool:
        assert (pool.statistics().reserved, pool.statistics().used) == (2 * GROWTH, 0)
        assert pool.attributes.release_threshold == 2 * GROWTH
        with pool.allocate(40 * MiB, stream):
            assert pool.statistics().reserved == 2 * GROWTH
        stream.synchronize()
    with sa.MemoryPool(device, initial_size=MiB, release_threshold=KEEP) as pool:
        assert pool.statistics().reserved == GROWTH
    with pytest.raises(ValueError, match="initial_size=134217728 is more than max_size=33554432"):
        sa.MemoryPool(device, max_size=GROWTH, initial_size=4 * GROWTH)


@pytest.mark.gpus(2)
def test_a_pool_is_primed_on_its_own_device(machine: Any) -> None:
    driver: Any = sd.traced(machine)
    sa.MemoryPool(1, initial_size=MiB, driver=driver).close()
    assert [int(call.args[0]) for call in driver.calls if call.name == "cuDevicePrimaryCtxRetain"] == [1]


@pytest.mark.gpus(2)
def test_peers(device: sa.Device) -> None:
    other = sa.Device(1, driver=device.driver)
    with sa.MemoryPool(device) as pool:
        assert pool.peers == frozenset()
        pool.peers = [other]
        assert pool.peers == {other} and pool.access(other) is sa.MemAccess.READWRITE
        pool.peers = {1, device}
        assert pool.peers == {other}
        pool.peers = ()
        assert pool.peers == frozenset() and pool.access(other) is sa.MemAccess.NONE
        with pytest.raises(ValueError, match="this driver has"):
            pool.peers = [sa.Device(1, driver=device.driver), 7]
        assert pool.peers == frozenset()


def test_a_cache_counts_its_blocks(pool: sa.MemoryPool, stream: sa.Stream) -> None:
    with sa.CachingAllocator(pool) as cache:
        assert cache.blocks == 0
        with cache.allocate(4096, stream):
            assert cache.blocks == 1
        assert cache.blocks == 1


@pytest.mark.parametrize("cached", [False, True])
def test_a_task_waits_for_memory(device: sa.Device, stream: sa.Stream, cached: bool) -> None:
    """Other tasks run meanwhile; what comes is memory that another one has freed, after its work."""

    async def run(allocator: sa.Allocator) -> None:
        held = allocator.allocate(20 * MiB, stream)
        held.fill(1)
        waiting = asyncio.ensure_future(allocator.allocate_async("20MiB", stream))
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert not waiting.done()
        held.free()
        with await waiting as buffer:
            buffer.fill(2)
            assert holds(buffer, 2)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(allocator.allocate_async(20 * MiB, stream), 0.05)
        with pytest.raises(sa.OutOfMemoryError):
            await allocator.allocate_async(4 * GROWTH, stream)
        with pytest.raises(ValueError):
            await allocator.allocate_async(-1, stream)

    with sa.MemoryPool(device, max_size=GROWTH) as pool:
        with sa.CachingAllocator(pool) if cached else contextlib.nullcontext(pool) as allocator:
            asyncio.run(run(allocator))
        stream.synchronize()
        assert pool.statistics().used == 0


@pytest.mark.simulated_only("the driver is made to refuse")
def test_no_task_waits_in_a_capture(faults: Any, pool: sa.MemoryPool, stream: sa.Stream) -> None:
    faults.fail("cuMemAllocFromPoolAsync", times=1000)
    with stream.capture() as graph, pytest.raises(sa.OutOfMemoryError):
        asyncio.run(asyncio.wait_for(pool.allocate_async(64, stream), 5))
    graph.close()
    assert faults.failed == ["cuMemAllocFromPoolAsync"]


@pytest.mark.simulated_only("a machine with little memory")
def test_a_task_waits_for_memory_outside_of_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    device = sa.Device(0, driver=sd.simulated(memory=64 * MiB))
    memory = sa.PlainMemory(device)
    sleep, pauses = asyncio.sleep, list[float]()

    def pause(seconds: float) -> Any:
        pauses.append(seconds)
        return sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", pause)

    async def run(stream: sa.Stream) -> None:
        held = memory.allocate(40 * MiB, stream)
        waiting = asyncio.ensure_future(memory.allocate_async(40 * MiB, stream))
        while len(pauses) < 7:
            await sleep(0.002)
        assert not waiting.done() and pauses[:7] == [0.001, 0.002, 0.004, 0.008, 0.016, 0.02, 0.02]
        held.free()
        (await waiting).free()
        with pytest.raises(sa.OutOfMemoryError, match=r"requested 68,157,440, total 67,108,864"):
            await asyncio.wait_for(memory.allocate_async(65 * MiB, stream), 5)

    with device.create_stream() as stream:
        asyncio.run(run(stream))
