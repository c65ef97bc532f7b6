"""An exception out of a signal handler, at any point of what a cache does: no memory is handed out or freed twice."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from typing import Any

import pytest

import streamalloc as sa
from tests.interrupting import Interrupt, Interrupted, interrupts, lost_one, since_3_11
from tests.support import Account

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
        late = cache.allocate(3000, short)
    del late  # after its stream
    cache.trim()


def distinct(cache: sa.CachingAllocator, streams: list[sa.Stream]) -> None:
    """Each block is allocated once from now on."""
    buffers = [cache.allocate(600, stream) for stream in streams for _ in range(4)]
    assert len({buffer.address for buffer in buffers}) == len(buffers)
    for buffer in buffers:
        buffer.free()


def at_most_one_is_lost(account: Account) -> None:
    gc.collect()
    account.device.synchronize()
    assert [hazard for hazard in account.checked.hazards if hazard.kind == "double free"] == []
    assert lost_one(account.left)
    account.checked.process = 0  # it was asked here, and reports nothing at the end of the process


@pytest.mark.parametrize("first", [1, 14, 28])
def test_at_any_point(machine: Any, first: int) -> None:
    for nth in itertools.count(first, THIN):
        account = Account(machine)
        account.driver.listener = None  # a listener gets no cached memory
        device = account.device
        streams = [device.create_stream(), device.create_stream()]
        pool = sa.MemoryPool(device)
        cache = sa.CachingAllocator(pool)
        block = Interrupt(nth)
        with contextlib.suppress(Interrupted), block:
            steps(device, cache, streams)
        gc.collect()
        before = cache.statistics().in_use
        distinct(cache, streams)
        assert cache.statistics().in_use == before, (nth, block.came)
        cache.close()
        for owner in (*streams, pool):
            owner.close()
        del owner, streams, pool, cache, device
        at_most_one_is_lost(account)
        if not block.came:
            assert nth > 100
            return


def test_while_it_is_closed(machine: Any) -> None:
    for nth in itertools.count(1, 5):
        account = Account(machine)
        account.driver.listener = None  # a listener gets no cached memory
        with account.device.create_stream() as stream, sa.MemoryPool(account.device) as pool:
            cache = sa.CachingAllocator(pool)
            kept = [cache.allocate(size, stream) for size in (600, 700, 2000)]
            kept.pop().free()
            block = Interrupt(nth)
            with contextlib.suppress(Interrupted), block:
                cache.close()
            cache.close()
            for buffer in kept:
                buffer.free()
            del buffer, kept, cache
        del stream, pool
        at_most_one_is_lost(account)
        if not block.came:
            return


@since_3_11
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_at_random_times(device: sa.Device) -> None:
    with sa.MemoryPool(device) as pool, sa.CachingAllocator(pool) as cache:
        streams = [device.create_stream(), device.create_stream()]
        mine: list[sa.Buffer] = []
        end = time.monotonic() + 0.5
        with interrupts(0.002) as signals:
            # A busy machine sends fewer signals.
            while time.monotonic() < end or signals.came <= 10:
                with contextlib.suppress(Interrupted):
                    while time.monotonic() < end or signals.came <= 10:
                        mine.append(cache.allocate(600, streams[0]))
                        mine.append(cache.allocate(5000, streams[1]))
                        cache.allocate(600, streams[1])
                        if len(mine) > 10:
                            mine.pop(3).free()
                            del mine[4]
                            mine.pop().free(streams[0])
        addresses = {buffer.address for buffer in mine if not buffer.freed}
        assert len(addresses) == sum(not buffer.freed for buffer in mine)
        for buffer in mine:
            buffer.close()
        distinct(cache, streams)
        lost = cache.statistics().in_use
        assert lost <= 5120 * signals.came
        for stream in streams:
            stream.close()
