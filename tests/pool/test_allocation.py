"""Allocating: sizes, streams, memory that runs out, and what is left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.testing import Gate
from tests.support import GROWTH, MiB, executed, holds, in_threads, names, pending

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
        with pytest.raises(sa.ClosedError):
            buffer.free()
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
        with pytest.raises(sa.ClosedError, match="closed"):
            closed.free()
        assert not closed.freed
        closed.free(stream)
        assert pool.statistics().used == 0

    def test_use_needs_another_stream(self, pool: sa.MemoryPool, device: sa.Device, stream: sa.Stream) -> None:
        closed = self.filled(pool, device)
        with pytest.raises(sa.ClosedError):
            closed.fill(1)
        with pytest.raises(sa.ClosedError):
            closed.copy_to(bytearray(64))
        device.synchronize()
        target = bytearray(64)
        closed.copy_to(target, stream)
        assert bytes(target) == bytes([5]) * 64
        closed.free(stream)

    def test_dropping_frees_after_the_stream_s_last_work(
        self, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream, gate: Gate
    ) -> None:
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

    def test_a_function_that_refuses_or_raises(self, device: sa.Device, stream: sa.Stream) -> None:
        asked: list[sa.OutOfMemoryError] = []

        def refuse(failure: sa.OutOfMemoryError) -> bool:
            asked.append(failure)
            return False

        def fail(failure: sa.OutOfMemoryError) -> bool:
            raise KeyError(failure.requested)

        with sa.MemoryPool(device, max_size=GROWTH, on_oom=refuse) as pool, pool.make_current():
            for allocate in (pool.allocate, sa.allocate):
                with pytest.raises(sa.OutOfMemoryError) as caught:
                    allocate(2 * GROWTH, stream)
                assert asked.pop() is caught.value and asked == []
            pool.on_oom = fail
            with pytest.raises(KeyError, match=str(2 * GROWTH)):
                pool.allocate(2 * GROWTH, stream)

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

    def test_another_failure_is_another_error(self, machine: Any) -> None:
        driver = sd.faulty(machine, "cuMemAllocFromPoolAsync", result="CUDA_ERROR_ILLEGAL_ADDRESS")
        device = sa.Device(0, driver=driver)
        with device.create_stream() as stream, sa.MemoryPool(device, on_oom="sync-trim-retry") as pool:
            with pytest.raises(sa.DeviceLostError) as caught:
                pool.allocate(64, stream)
            assert caught.value.call == "cuMemAllocFromPoolAsync"

    def test_the_call_that_failed_is_named(self, machine: Any) -> None:
        driver = sd.faulty(machine, "cuMemAllocAsync", times=2)
        device = sa.Device(0, driver=driver)
        with device.create_stream() as stream:
            with pytest.raises(sa.OutOfMemoryError) as caught:
                sa.allocate(64, stream)
            assert caught.value.call == "cuMemAllocAsync"
