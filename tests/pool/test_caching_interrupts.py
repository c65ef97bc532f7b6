"""An exception out of a signal handler, at any point of what a cache does: no memory is lost, none handed out twice."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import sys
import time
from typing import Any

import pytest

import streamalloc as sa
from streamalloc.core import cached
from tests.interrupting import since_3_11
from tests.support import Account
from tests.vmm.test_interrupts import Boom, Interrupted

pytestmark = pytest.mark.simulated_only("where a signal may come is the same on any driver")

THIN = 29
"""Every how many points a signal comes."""


def steps(device: sa.Device, cache: sa.CachingAllocator, streams: list[sa.Stream]) -> None:
    """All that a cache does: hits, misses, drops, other streams, default streams, flushes, statistics."""
    one, two = streams
    first, second = cache.allocate(600, one), cache.allocate(600, one)
    first.free()
    with cache.allocate(600, one):
        second.free(two)
    cache.allocate(5000, one)
    cache.allocate(4900, one)
    cache.allocate(600, two).free()
    device.synchronize()
    for _ in range(2):
        cache.allocate(4900, two).free(device.default_stream)
    cache.allocate(16 << 20, one).free()
    assert cache.statistics().in_use >= 0
    with device.create_stream() as short:
        cache.allocate(600, short).free()
    cache._cache.flush()


def distinct(cache: sa.CachingAllocator, streams: list[sa.Stream]) -> None:
    """What is handed out now is handed out once."""
    buffers = [cache.allocate(600, stream) for stream in streams for _ in range(4)]
    assert len({buffer.address for buffer in buffers}) == len(buffers)
    for buffer in buffers:
        buffer.free()


@pytest.mark.parametrize("first", [1, 14, 28])
def test_at_any_point(machine: Any, first: int) -> None:
    nth = first
    while True:
        account = Account(machine)
        account.driver.listener = None  # a listener gets no cached memory
        device = account.device
        streams = [device.create_stream(), device.create_stream()]
        pool = sa.MemoryPool(device)
        cache = sa.CachingAllocator(pool)
        block = Interrupted(nth)
        stopped = False
        try:
            with block:
                steps(device, cache, streams)
        except Boom:
            stopped = True
        gc.collect()
        cache._cache.flush()  # which finds what an interrupt has left with nobody
        assert cache.statistics().in_use == 0, nth
        distinct(cache, streams)
        assert cache.statistics().in_use == 0, nth
        cache.close()
        assert pool.statistics().used == 0, nth
        for owner in (*streams, pool):
            owner.close()
        device.synchronize()
        del owner, streams, pool, cache, device
        gc.collect()
        assert account.left == {}, nth
        if not stopped:
            break
        nth += THIN
    assert nth > 100


def test_what_is_no_block_yet(pool: sa.MemoryPool, stream: sa.Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver has given memory, and the cache does not know it yet."""

    def stopped(address: int) -> None:
        assert pool.statistics().used == 1024
        raise Boom

    with sa.CachingAllocator(pool) as cache:
        with monkeypatch.context() as patch:
            patch.setattr("streamalloc.core.cached.Block", stopped)
            try:
                cache.allocate(600, stream)
            except Boom:
                pass
            else:
                pytest.fail("was not stopped")
        assert pool.statistics().used == 0
        with cache.allocate(600, stream):
            assert cache.statistics()[4:] == (1024, 0, 1)


def test_while_it_is_closed(machine: Any) -> None:
    nth = 1
    while True:
        account = Account(machine)
        account.driver.listener = None  # a listener gets no cached memory
        device = account.device
        with device.create_stream() as stream, sa.MemoryPool(device) as pool:
            cache = sa.CachingAllocator(pool)
            kept = [cache.allocate(size, stream) for size in (600, 700, 2000)]
            kept.pop().free()
            stopped = False
            try:
                with Interrupted(nth):
                    cache.close()
            except Boom:
                stopped = True
            cache.close()
            for buffer in kept:
                buffer.free()
            del buffer, kept, cache
            gc.collect()
            assert pool.statistics().used == 0, nth
        device.synchronize()
        del stream, pool, device
        assert account.left == {}, nth
        if not stopped:
            return
        nth += 5


@since_3_11
def test_real_signals(machine: Any) -> None:
    """At random times, for half a second."""
    armed = False

    def handler(*_: object) -> None:
        if armed:
            raise Boom

    device, chance = sa.Device(0), random.Random(1)
    before, hook = signal.signal(signal.SIGALRM, handler), sys.unraisablehook
    sys.unraisablehook = lambda found: None  # a finaliser that was interrupted
    try:
        with sa.MemoryPool(device) as pool, sa.CachingAllocator(pool) as cache:
            streams = [device.create_stream(), device.create_stream()]
            # Both know both sizes: a free that goes to the simulated driver can be interrupted in Python.
            cache.allocate(5000, streams[0]).free()
            end = time.monotonic() + 0.5
            came = 0
            while time.monotonic() < end:
                mine: list[sa.Buffer] = []
                # One that comes in a finaliser is told and forgotten.
                soon = time.monotonic() + 0.005
                try:
                    armed = True
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.00002, 0.002))
                    while time.monotonic() < soon:
                        mine.append(cache.allocate(600, streams[0]))
                        mine.append(cache.allocate(5000, streams[1]))
                        cache.allocate(600, streams[1])
                        if len(mine) > 10:
                            mine.pop(3).free()
                            del mine[4]
                            mine.pop().free(streams[0])
                except Boom:
                    came += 1
                finally:
                    armed = False
                    signal.setitimer(signal.ITIMER_REAL, 0)
                addresses = {buffer.address for buffer in mine if not buffer.freed}
                assert len(addresses) == sum(not buffer.freed for buffer in mine)
                for buffer in mine:
                    buffer.close()
                buffer = None  # type: ignore[assignment]
                mine.clear()
                cache._cache.flush()
                # An interrupt may lose the answer of the driver call after which it comes.
                assert cache.statistics().in_use <= 5120 * came
            assert came > 10
            distinct(cache, streams)
            for stream in streams:
                stream.close()
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGALRM, before)


class NoBlock(cached.Block):
    """Where a handler raises that runs as a block is to be made."""

    def __new__(cls, *_: Any) -> Any:
        raise Boom


@pytest.mark.parametrize("observed", [False, True])
def test_an_allocation_whose_stream_is_closed_before_it_is_dropped(
    device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream, observed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sa.CachingAllocator(pool) as cache, sa.observe(cache) if observed else contextlib.nullcontext():
        with monkeypatch.context() as patch:
            patch.setattr(cached, "Block", NoBlock)
            with pytest.raises(Boom), device.create_stream() as other:
                cache.allocate(3000, other)
        gc.collect()
        cache.allocate(70000, stream).free()
        stream.synchronize()
        assert cache.statistics().in_use == 0
        cache.trim()
        assert pool.statistics().used == 0
