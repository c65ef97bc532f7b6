"""A full device: whose free memory a growing pool or a plain allocation gets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.facts.support import UINT64_MAX, MiB, Rig, said, value

STEP = 32 * MiB


@pytest.fixture
def most(rig: Rig) -> int:
    """About two thirds of the device's free memory: it cannot be had twice."""
    return rig.device_free() * 2 // 3 // STEP * STEP


def cached(rig: Rig, size: int, stream: Any, policies: str = "111") -> Any:
    """A pool that holds so much free memory, of which the host knows."""
    pool = rig.pool(UINT64_MAX, policies)
    rig.free(rig.allocate(pool, size, stream), stream)
    value(rig.raw.cuStreamSynchronize(stream))
    assert rig.reserved(pool) == size
    return pool


def test_a_pool_gets_what_another_holds_free(rig: Rig, most: int) -> None:
    stream, growing = rig.stream(), rig.pool(UINT64_MAX)
    holding = cached(rig, most, stream)
    rig.allocate(growing, most, stream)
    assert (rig.reserved(holding), rig.reserved(growing)) == (0, most)


def test_a_plain_allocation_gets_what_pools_hold_free(rig: Rig, most: int) -> None:
    holding = cached(rig, most, rig.stream())
    rig.plain(most)
    assert rig.reserved(holding) == 0


def test_a_pool_does_not_get_what_the_host_has_not_seen_freed(rig: Rig, most: int) -> None:
    first, second = rig.stream(), rig.stream()
    holding, growing = rig.pool(UINT64_MAX, "110"), rig.pool(UINT64_MAX)
    rig.free(rig.allocate(holding, most, first), first)
    assert rig.executed(first)
    assert said(rig.try_allocate(growing, most, second)) == "OUT_OF_MEMORY"
    assert rig.reserved(holding) == most
    kept = rig.reserved(growing)
    assert 0 < kept < most
    # The one that failed keeps what it got, and the other gets that when it grows in turn.
    assert said(rig.try_allocate(holding, 2 * most, first)) == "OUT_OF_MEMORY"
    assert (rig.reserved(holding), rig.reserved(growing)) == (most + kept, 0)


class TestDefaultPool:
    @pytest.fixture
    def pool(self, rig: Rig) -> Iterator[Any]:
        pool = value(rig.raw.cuDeviceGetDefaultMemPool(0))
        rig.set_threshold(pool, UINT64_MAX)
        yield pool
        rig.settle()
        rig.set_threshold(pool, 0)
        rig.synchronize()
        value(rig.raw.cuMemPoolTrimTo(pool, 0))

    def test_a_plain_allocation_gets_what_it_holds_free(self, rig: Rig, pool: Any, most: int) -> None:
        stream = rig.stream()
        pointer = value(rig.keep(rig.raw.cuMemAllocAsync(most, stream)))
        rig.free(pointer, stream)
        value(rig.raw.cuStreamSynchronize(stream))
        rig.plain(most)
        assert rig.reserved(pool) == 0

    def test_another_stream_is_made_to_wait_where_the_device_is_full(self, rig: Rig, pool: Any, most: int) -> None:
        first, second, gate = rig.stream(), rig.stream(), rig.gate()
        pointer = rig.allocate(pool, most, first)
        gate.hold(first)
        rig.free(pointer, first)
        assert said(rig.try_allocate(pool, most, second)) == "SUCCESS"
        assert rig.held(second)
        gate.open()
        assert rig.executed(second)
