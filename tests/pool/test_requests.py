"""Requests to a pool in other words: text, shares, ordinals, a first size, peers; and counts of those so far."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.core.properties import size_of
from tests.support import GROWTH, KEEP, MiB, holds

SIZES = {"4096": 4096, "2GiB": 2 << 30, " 512 mib ": 512 * MiB, "1.5kB": 1500, "0.5KiB": 512, "7b": 7, "1TB": 10**12}


@pytest.mark.parametrize("text", SIZES)
def test_sizes_as_text(text: str) -> None:
    assert size_of("nbytes", text) == SIZES[text]


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 PiB", "1e3", "0.3B", "1,000", "2 GiB 3", "1/2"])
def test_text_that_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="nbytes="):
        size_of("nbytes", text)


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


def test_counters(device: sa.Device, stream: sa.Stream) -> None:
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
        cache = sa.CachingAllocator(pool)
        with cache:
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
