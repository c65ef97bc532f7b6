"""An exception out of a signal handler, anywhere in a cache: one block may be lost, none is handed out twice."""

from __future__ import annotations

import gc
import random
import signal
import sys
import time
from typing import Any

import pytest

import streamalloc as sa
from streamalloc.pool.cache.blocks import class_size
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
    cache._state.flush()


LOST = (0, *map(class_size, (600, 5000, 16 << 20)))
"""Bytes of nothing, and of any one block."""


def in_use(cache: sa.CachingAllocator, pool: sa.MemoryPool) -> int:
    """Bytes of blocks that are in no list of the cache, where no buffer has one: those that were lost."""
    cache.statistics()
    cache._state.flush()
    return pool.statistics().used


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
        account.driver.used = None  # who is told of uses gets no cached memory
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
        lost = in_use(cache, pool)
        assert lost in LOST[: 1 + 3 * stopped], nth
        distinct(cache, streams)
        assert in_use(cache, pool) == lost, nth
        cache.close()
        assert pool.statistics().used == lost, nth
        for owner in (*streams, pool):
            owner.close()
        device.synchronize()
        del owner, streams, pool, cache, device
        gc.collect()
        assert lost or account.left.keys() <= {"event"} if stopped else account.left == {}, nth
        if not stopped:
            break
        nth += THIN
    assert nth > 100


def test_while_it_is_closed(machine: Any) -> None:
    nth = 1
    while True:
        account = Account(machine)
        account.driver.used = None  # who is told of uses gets no cached memory
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
            lost = list(cache._state.blocks.values())
            del buffer, kept, cache
            gc.collect()
            used = pool.statistics().used
            assert len(lost) <= stopped or not used, nth
        device.synchronize()
        del stream, pool, device, lost
        assert used or account.left == {}, nth
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
                assert in_use(cache, pool) <= came * class_size(5000)
            assert came > 10
            distinct(cache, streams)
            for stream in streams:
                stream.close()
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGALRM, before)
