"""Reserved and used bytes, growth and placement, release at synchronisation, trimming, and maximum sizes."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.facts.support import POSIX_FD, UINT64_MAX, MiB, Rig, Stats, offsets, said, value


class TestAllocation:
    def test_no_bytes(self, rig: Rig) -> None:
        pool, stream = rig.pool(), rig.stream()
        pointer = rig.allocate(pool, 0, stream)
        assert int(pointer) == 0
        assert said(rig.raw.cuMemFreeAsync(pointer, stream)) == "SUCCESS"
        assert rig.reserved(pool) == 0

    def test_small_allocations_lie_512_bytes_apart(self, rig: Rig) -> None:
        pool, stream = rig.pool(), rig.stream()
        pointers = [rig.allocate(pool, 1, stream) for _ in range(2)]
        assert int(pointers[0]) % 512 == 0
        assert offsets(pointers) == [0, 512]
        assert rig.stats(pool) == Stats(32 * MiB, 32 * MiB, 2, 2)

    @pytest.mark.parametrize("handle", [0, 2])
    def test_on_the_default_streams(self, rig: Rig, handle: int) -> None:
        rig.allocate(rig.pool(UINT64_MAX), 64, rig.raw.CUstream(handle))

    def test_more_than_there_is(self, rig: Rig) -> None:
        pool, stream = rig.pool(), rig.stream()
        assert said(rig.try_allocate(pool, 1 << 45, stream)) == "OUT_OF_MEMORY"
        assert said(rig.raw.cuMemPoolTrimTo(pool, 0)) == "SUCCESS"

    def test_failed_growth_keeps_what_it_got(self, rig: Rig) -> None:
        """If it has the addresses, which are those of twice the device's memory."""
        pool, free, total = rig.pool(UINT64_MAX), rig.device_free(), value(rig.raw.cuDeviceTotalMem(0))
        assert said(rig.try_allocate(pool, total * 3 // 2, rig.stream())) == "OUT_OF_MEMORY"
        reserved = rig.reserved(pool)
        assert rig.stats(pool) == Stats(reserved, reserved, 0, 0)
        assert reserved % (32 * MiB) == 0
        assert free - 1024 * MiB < reserved <= free


class TestFree:
    def test_once(self, rig: Rig) -> None:
        pool, stream = rig.pool(), rig.stream()
        pointer = rig.allocate(pool, 1, stream)
        assert said(rig.raw.cuMemFreeAsync(pointer, stream)) == "SUCCESS"
        assert said(rig.raw.cuMemFreeAsync(pointer, stream)) == "INVALID_VALUE"

    def test_inside_an_allocation(self, rig: Rig) -> None:
        stream = rig.stream()
        pointer = rig.allocate(rig.pool(), 4096, stream)
        assert said(rig.raw.cuMemFreeAsync(int(pointer) + 512, stream)) == "INVALID_VALUE"

    def test_of_what_is_no_allocation(self, rig: Rig) -> None:
        assert said(rig.raw.cuMemFreeAsync(12345, rig.stream())) == "INVALID_VALUE"

    def test_of_nothing(self, rig: Rig) -> None:
        assert said(rig.raw.cuMemFreeAsync(0, rig.stream())) == "SUCCESS"

    def test_on_the_legacy_stream(self, rig: Rig) -> None:
        pointer = rig.allocate(rig.pool(UINT64_MAX), 1, rig.stream())
        assert said(rig.raw.cuMemFreeAsync(pointer, 0)) == "SUCCESS"


@pytest.mark.parametrize(
    ("size", "reserved"),
    [
        (1, 32 * MiB),
        (MiB, 32 * MiB),
        (2 * MiB, 32 * MiB),
        (2 * MiB + 1, 32 * MiB),
        (32 * MiB, 32 * MiB),
        (32 * MiB + 1, 64 * MiB),
        (64 * MiB, 64 * MiB),
        (100 * MiB, 128 * MiB),
    ],
)
def test_reserved_and_used(rig: Rig, size: int, reserved: int) -> None:
    pool, stream = rig.pool(), rig.stream()
    pointer = rig.allocate(pool, size, stream)
    assert rig.stats(pool) == Stats(reserved, reserved, size, size)
    rig.free(pointer, stream)
    assert rig.stats(pool) == Stats(reserved, reserved, 0, size)
    value(rig.raw.cuStreamSynchronize(stream))
    assert rig.stats(pool) == Stats(0, reserved, 0, size)


class Line:
    """A pool with every release held back, and places in it as offsets in MiB from its first allocation."""

    def __init__(self, rig: Rig, threshold: int = UINT64_MAX, **settings: Any) -> None:
        self.rig, self.stream = rig, rig.stream()
        self.pool = rig.pool(threshold, **settings)
        self.start: int | None = None

    def put(self, mib: float, stream: Any = None) -> float:
        """Offset of an allocation of so many MiB."""
        size = int(mib * MiB)
        pointer = int(self.rig.allocate(self.pool, size, self.stream if stream is None else stream))
        if self.start is None:
            self.start = pointer
        return (pointer - self.start) / MiB

    def free(self, at: float, stream: Any = None) -> None:
        assert self.start is not None
        self.rig.free(self.start + int(at * MiB), self.stream if stream is None else stream)

    def synchronize(self) -> None:
        value(self.rig.raw.cuStreamSynchronize(self.stream))

    @property
    def reserved(self) -> float:
        return self.rig.reserved(self.pool) / MiB

    @property
    def used(self) -> float:
        return self.rig.used(self.pool) / MiB


class TestPlacement:
    def test_growth_extends_the_free_end(self, rig: Rig) -> None:
        line = Line(rig)
        assert (line.put(20), line.put(40), line.reserved) == (0, 20, 64)
        assert (line.put(10), line.reserved) == (60, 96)
        assert (line.put(12), line.reserved) == (70, 96)
        for place in (0, 20, 60, 70):
            line.free(place)
        line.synchronize()
        assert (line.put(90), line.reserved, line.used) == (0, 96, 90)

    def test_one_behind_the_other(self, rig: Rig) -> None:
        pool, stream = rig.pool(UINT64_MAX), rig.stream()
        sizes = (MiB, 2 * MiB, 3 * MiB, 4 * MiB, 512, 700, MiB)
        pointers = [rig.allocate(pool, size, stream) for size in sizes]
        places = [0, MiB, 3 * MiB, 6 * MiB, 10 * MiB, 10 * MiB + 512, 10 * MiB + 512 + 1024]
        assert offsets(pointers) == places
        assert rig.stats(pool)[::2] == (32 * MiB, sum(sizes))

    def test_holes_are_filled_and_neighbours_joined(self, rig: Rig) -> None:
        line = Line(rig)
        assert [line.put(size) for size in (1, 2, 3, 4, 1)] == [0, 1, 3, 6, 10]
        line.free(1)
        assert line.put(1) == 1
        assert line.put(0.5) == 2
        line.free(3)
        line.free(6)
        assert line.put(7) == 2.5
        assert line.put(2) == 11
        assert line.reserved == 32

    def test_smallest_hole_that_fits(self, rig: Rig) -> None:
        line = Line(rig)
        assert [line.put(size) for size in (5, 1, 3, 1, 8, 1)] == [0, 5, 6, 9, 10, 18]
        for place in (0, 6, 10):
            line.free(place)
        line.synchronize()
        assert [line.put(size) for size in (3, 2, 4)] == [6, 0, 10]
        assert rig.stats(line.pool) == Stats(32 * MiB, 32 * MiB, 12 * MiB, 19 * MiB)

    def test_lowest_hole_of_a_size(self, rig: Rig) -> None:
        pool, stream = rig.pool(UINT64_MAX), rig.stream()
        pointers = [rig.allocate(pool, 4096, stream) for _ in range(4)]
        assert offsets(pointers) == [0, 4096, 8192, 12288]
        rig.free(pointers[0], stream)
        rig.free(pointers[2], stream)
        again = [rig.allocate(pool, 4096, stream) for _ in range(3)]
        assert offsets([pointers[0], *again]) == [0, 0, 8192, 16384]

    def test_a_pending_hole_is_split_for_its_stream_only(self, rig: Rig) -> None:
        line, gate, other = Line(rig, policies="000"), rig.gate(), rig.stream()
        line.put(20)
        gate.hold(line.stream)
        line.free(0)
        assert (line.put(8), line.put(8)) == (0, 8)
        assert rig.stats(line.pool) == Stats(32 * MiB, 32 * MiB, 16 * MiB, 20 * MiB)
        assert line.put(10, other) == 20
        assert (line.reserved, line.used) == (32, 26)

    def test_pending_holes_of_two_streams_are_not_joined(self, rig: Rig) -> None:
        line, gate, other = Line(rig, policies="000"), rig.gate(), rig.stream()
        assert (line.put(16), line.put(16, other)) == (0, 16)
        gate.hold(line.stream)
        gate.hold(other)
        line.free(0)
        line.free(16, other)
        assert (line.put(32), line.reserved) == (32, 64)

    def test_holes_of_two_streams_are_joined_once_synchronised(self, rig: Rig) -> None:
        line, other = Line(rig, policies="000"), rig.stream()
        assert (line.put(8), line.put(8, other)) == (0, 8)
        line.free(0)
        line.free(8, other)
        line.synchronize()
        value(rig.raw.cuStreamSynchronize(other))
        assert line.put(16) == 0

    def test_holes_of_two_streams_and_the_end_are_joined_opportunistically(self, rig: Rig) -> None:
        line, other = Line(rig), rig.stream()
        assert (line.put(8), line.put(8, other)) == (0, 8)
        line.free(0)
        line.free(8, other)
        assert rig.executed(line.stream) and rig.executed(other)
        assert (line.put(30), line.reserved) == (0, 32)

    @pytest.mark.parametrize("policies", ["100", "110"])
    def test_own_hole_before_a_smaller_one_of_another_stream(self, rig: Rig, policies: str) -> None:
        line, other = Line(rig, policies=policies), rig.stream()
        places = [line.put(8), line.put(1), line.put(5, other), line.put(1, other)]
        assert places == [0, 8, 9, 14]
        line.free(0)
        line.free(9, other)
        assert rig.executed(line.stream) and rig.executed(other)
        assert line.put(4) == 0

    def test_executed_hole_of_another_stream_before_the_end(self, rig: Rig) -> None:
        line, other = Line(rig, policies="110"), rig.stream()
        assert (line.put(8, other), line.put(1)) == (0, 8)
        line.free(0, other)
        assert rig.executed(other)
        assert line.put(4) == 0

    def test_synchronised_hole_before_the_end(self, rig: Rig) -> None:
        line, other = Line(rig, policies="110"), rig.stream()
        assert (line.put(8, other), line.put(1)) == (0, 8)
        line.free(0, other)
        rig.synchronize()
        assert line.put(4) == 0
        assert line.put(20) == 9


class TestReleaseThreshold:
    @pytest.mark.parametrize(("threshold", "kept"), [(16, 0), (32, 32), (40, 32), (64, 64), (70, 64), (96, 64)])
    def test_whole_steps_are_released(self, rig: Rig, threshold: int, kept: int) -> None:
        line = Line(rig, threshold * MiB)
        places = [line.put(20) for _ in range(3)]
        assert line.reserved == 64
        for place in places:
            line.free(place)
        line.synchronize()
        assert line.reserved == kept

    def test_only_steps_that_are_wholly_free(self, rig: Rig) -> None:
        line = Line(rig, 0)
        assert [line.put(20) for _ in range(3)] == [0, 20, 40]
        line.free(20)
        line.synchronize()
        assert rig.stats(line.pool) == Stats(64 * MiB, 64 * MiB, 40 * MiB, 60 * MiB)
        line.free(40)
        line.synchronize()
        assert rig.stats(line.pool) == Stats(32 * MiB, 64 * MiB, 20 * MiB, 60 * MiB)

    def test_steps_before_a_live_allocation(self, rig: Rig) -> None:
        line = Line(rig, 0)
        assert (line.put(100), line.put(1), line.reserved) == (0, 100, 128)
        line.free(0)
        line.synchronize()
        assert rig.stats(line.pool) == Stats(32 * MiB, 128 * MiB, MiB, 101 * MiB)

    def test_live_memory_stays_whatever_the_threshold(self, rig: Rig) -> None:
        line = Line(rig)
        line.put(20)
        line.put(20)
        rig.set_threshold(line.pool, 0)
        line.synchronize()
        assert rig.stats(line.pool) == Stats(64 * MiB, 64 * MiB, 40 * MiB, 40 * MiB)

    def test_highest_steps_first(self, rig: Rig) -> None:
        line = Line(rig, 64 * MiB)
        places = [line.put(32) for _ in range(3)]
        for place in places:
            line.free(place)
        line.synchronize()
        assert rig.stats(line.pool) == Stats(64 * MiB, 96 * MiB, 0, 96 * MiB)
        assert (line.put(32), line.reserved) == (0, 64)
        assert (line.put(32), line.reserved) == (32, 64)
        assert (line.put(32), line.reserved) == (64, 96)

    def test_a_released_step_is_backed_again(self, rig: Rig) -> None:
        line = Line(rig, 64 * MiB)
        for place in [line.put(32) for _ in range(3)]:
            line.free(place)
        line.synchronize()
        assert (line.put(64), line.put(32), line.reserved) == (0, 64, 96)

    def test_pool_that_can_be_exported(self, rig: Rig) -> None:
        line = Line(rig, 0, handle_types=POSIX_FD)
        line.put(20)
        line.free(0)
        line.synchronize()
        assert rig.stats(line.pool) == Stats(0, 32 * MiB, 0, 20 * MiB)
        value(rig.raw.cuMemPoolTrimTo(line.pool, 0))
        assert rig.stats(line.pool) == Stats(0, 32 * MiB, 0, 20 * MiB)
        line.put(40)
        assert rig.stats(line.pool) == Stats(64 * MiB, 64 * MiB, 40 * MiB, 40 * MiB)


class TestTrim:
    @pytest.mark.parametrize(
        ("keep", "kept"),
        [
            (0, 0),
            (1, 32),
            (32 * MiB, 32),
            (33 * MiB, 64),
            (64 * MiB, 64),
            (65 * MiB, 64),
            (1 << 40, 64),
        ],
    )
    def test_keeps_whole_steps(self, rig: Rig, keep: int, kept: int) -> None:
        line = Line(rig)
        for place in [line.put(20) for _ in range(3)]:
            line.free(place)
        line.synchronize()
        assert said(rig.raw.cuMemPoolTrimTo(line.pool, keep)) == "SUCCESS"
        assert rig.stats(line.pool) == Stats(kept * MiB, 64 * MiB, 0, 60 * MiB)

    def test_keeps_a_step_for_less(self, rig: Rig) -> None:
        line = Line(rig)
        line.put(100)
        line.free(0)
        line.synchronize()
        value(rig.raw.cuMemPoolTrimTo(line.pool, 10 * MiB))
        assert rig.stats(line.pool) == Stats(32 * MiB, 128 * MiB, 0, 100 * MiB)

    def test_around_a_live_allocation(self, rig: Rig) -> None:
        line = Line(rig)
        line.put(100)
        line.free(0)
        line.synchronize()
        assert line.put(1) == 0
        value(rig.raw.cuMemPoolTrimTo(line.pool, 0))
        assert rig.stats(line.pool) == Stats(32 * MiB, 128 * MiB, MiB, 100 * MiB)
        assert (line.put(40), line.reserved, line.used) == (1, 64, 41)

    def test_leaves_what_the_host_has_not_seen_freed(self, rig: Rig) -> None:
        line, gate, other = Line(rig, 0), rig.gate(), rig.stream()
        line.put(20)
        gate.hold(line.stream)
        line.free(0)
        value(rig.raw.cuStreamSynchronize(other))
        assert (line.reserved, line.used) == (32, 0)
        assert said(rig.raw.cuMemPoolTrimTo(line.pool, 0)) == "SUCCESS"
        assert line.reserved == 32
        gate.open()
        assert rig.executed(line.stream)
        assert said(rig.raw.cuMemPoolTrimTo(line.pool, 0)) == "SUCCESS"
        assert line.reserved == 32
        line.synchronize()
        assert line.reserved == 0


@pytest.mark.parametrize(
    ("max_size", "sizes", "results", "reserved", "used"),
    [
        (32, (20, 20), "SO", 32, 20),
        (33, (40, 20, 20), "SSO", 64, 60),
        (64, (20, 20, 20, 10), "SSSO", 64, 60),
        (64, (40, 40), "SO", 64, 40),
        (40, (33, 33), "SO", 64, 33),
        (64, (100,), "O", 64, 0),
    ],
)
def test_max_size(rig: Rig, max_size: int, sizes: tuple[int, ...], results: str, reserved: int, used: int) -> None:
    pool, stream = rig.pool(UINT64_MAX, max_size=max_size * MiB), rig.stream()
    answers = [said(rig.try_allocate(pool, size * MiB, stream)) for size in sizes]
    assert answers == [{"S": "SUCCESS", "O": "OUT_OF_MEMORY"}[result] for result in results]
    assert rig.stats(pool) == Stats(reserved * MiB, reserved * MiB, used * MiB, used * MiB)


def test_max_size_is_rounded_up_to_a_step(rig: Rig) -> None:
    pool, stream = rig.pool(max_size=MiB), rig.stream()
    sizes = (MiB // 2, 2 * MiB, 64 * MiB)
    answers = [said(rig.try_allocate(pool, size, stream)) for size in sizes]
    assert answers == ["SUCCESS", "SUCCESS", "OUT_OF_MEMORY"]


@pytest.mark.parametrize(("threshold", "kept"), [(0, 0), (UINT64_MAX, 64)])
def test_a_failed_allocation_applies_the_release_threshold(rig: Rig, threshold: int, kept: int) -> None:
    pool = rig.pool(threshold, max_size=64 * MiB)
    assert said(rig.try_allocate(pool, 100 * MiB, rig.stream())) == "OUT_OF_MEMORY"
    assert rig.stats(pool) == Stats(kept * MiB, 64 * MiB, 0, 0)


class TestPlainFreeOfPoolMemory:
    """cuMemFree takes memory of a pool: anyone may have it at once, and it counts as used for ever."""

    def test_while_the_stream_is_held(self, rig: Rig) -> None:
        raw, pool, first, second, gate = rig.raw, rig.pool(UINT64_MAX), rig.stream(), rig.stream(), rig.gate()
        pointer = rig.allocate(pool, 4096, first)
        gate.hold(first)
        with gate.opening_after(60):
            assert said(raw.cuMemFree(pointer)) == "SUCCESS"
            assert rig.stats(pool) == Stats(32 * MiB, 32 * MiB, 4096, 4096)
            assert int(rig.allocate(pool, 4096, second)) == int(pointer)
            assert int(rig.allocate(pool, 4096, first)) != int(pointer)
            assert rig.used(pool) == 3 * 4096
            assert not gate.is_open
        rig.synchronize()
        assert rig.used(pool) == 3 * 4096

    def test_while_the_stream_is_idle(self, rig: Rig) -> None:
        pool, stream = rig.pool(UINT64_MAX), rig.stream()
        pointer = rig.allocate(pool, 4096, stream)
        value(rig.raw.cuStreamSynchronize(stream))
        assert said(rig.raw.cuMemFree(pointer)) == "SUCCESS"
        assert rig.stats(pool) == Stats(32 * MiB, 32 * MiB, 4096, 4096)
        assert said(rig.raw.cuMemFree(pointer)) == "INVALID_VALUE"


# A process that destroys a pool with live memory, and later frees that memory, was seen to crash on hardware, some
# time later and in calls that are no cause. These have a process of their own, which ends before anything else.
DESTROYED = """
import os
from streamalloc.driver import default
d = default()
assert d.cuInit(0)[0] == 0 and d.cuCtxSetCurrent(d.cuDevicePrimaryCtxRetain(0)[1])[0] == 0
stream = d.cuStreamCreate(1)[1]
props = d.CUmemPoolProps()
props.allocType = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
location = d.CUmemLocation()
location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
props.location = location
pool = d.cuMemPoolCreate(props)[1]
threshold = d.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
assert d.cuMemPoolSetAttribute(pool, threshold, d.cuuint64_t((1 << 64) - 1))[0] == 0
pointer = d.cuMemAllocFromPoolAsync(4 << 20, pool, stream)[1]
print(d.cuMemPoolDestroy(pool)[0].name)
"""
CALLS_ON_IT = """
print(d.cuMemPoolGetAttribute(pool, d.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)[0].name)
print(d.cuMemAllocFromPoolAsync(4, pool, stream)[0].name)
print(d.cuMemPoolTrimTo(pool, 0)[0].name)
print(d.cuMemPoolDestroy(pool)[0].name, flush=True)
os._exit(0)
"""
USE_OF_ITS_MEMORY = """
result, handle = d.cuPointerGetAttribute(d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, pointer)
print(result.name, int(handle) != 0)
print(d.cuMemsetD8Async(pointer, 1, 4 << 20, stream)[0].name)
free = d.cuMemGetInfo()[1]
print(d.cuMemFreeAsync(pointer, stream)[0].name)
print(d.cuStreamSynchronize(stream)[0].name)
print(d.cuMemGetInfo()[1] - free, flush=True)
os._exit(0)
"""


class TestLifetime:
    def test_free_on_a_stream_not_ordered_after_the_allocation(self, rig: Rig) -> None:
        pointer = rig.allocate(rig.pool(), MiB, rig.stream())
        assert said(rig.raw.cuMemFreeAsync(pointer, rig.stream())) == "SUCCESS"

    def test_fill_of_freed_memory(self, rig: Rig) -> None:
        stream = rig.stream()
        pointer = rig.allocate(rig.pool(), MiB, stream)
        rig.free(pointer, stream)
        assert said(rig.raw.cuMemsetD8Async(pointer, 1, 64, stream)) == "INVALID_VALUE"

    def test_an_allocation_outlives_its_pool(self, python: Callable[..., CompletedProcess[str]]) -> None:
        ended = python(DESTROYED + USE_OF_ITS_MEMORY)
        success = "CUDA_SUCCESS"
        handle = [success, "True"]
        assert (ended.stdout.split(), ended.stderr) == (
            [success, *handle, success, success, success, str(32 * MiB)],
            "",
        )

    def test_calls_on_a_destroyed_pool(self, python: Callable[..., CompletedProcess[str]]) -> None:
        ended = python(DESTROYED + CALLS_ON_IT)
        assert (ended.stdout.split(), ended.stderr) == (["CUDA_SUCCESS", *["CUDA_ERROR_INVALID_VALUE"] * 4], "")

    def test_destroying_gives_back_what_the_host_has_not_seen_freed(self, rig: Rig) -> None:
        stream, gate = rig.stream(), rig.gate()
        pool = rig.disown(rig.pool(UINT64_MAX))
        rig.free(rig.allocate(pool, 4 * MiB, stream), stream)
        assert rig.executed(stream)
        free = rig.device_free()
        gate.hold(stream)
        # The driver may wait for the held stream before it unmaps the memory.
        with gate.opening_after(0.2):
            assert said(rig.raw.cuMemPoolDestroy(pool)) == "SUCCESS"
        assert rig.device_free() - free == 32 * MiB

    def test_destroying_nothing(self, raw: Any) -> None:
        assert said(raw.cuMemPoolDestroy(raw.CUmemoryPool(0))) == "INVALID_VALUE"
