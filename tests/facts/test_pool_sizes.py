"""Reserved and used bytes, growth and placement, release at synchronisation, trimming, and maximum sizes."""

from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.facts.enums import POSIX_FD
from tests.facts.pool_programs import Program, run
from tests.facts.support import IN_CONTEXT, UINT64_MAX, MiB, Rig, Stats, offsets, said, value


class TestAllocation:
    def test_no_bytes(self, rig: Rig) -> None:
        pool, stream = rig.pool(), rig.stream()
        pointer = rig.allocate(pool, 0, stream)
        assert int(pointer) == 0
        assert said(rig.raw.cuMemFreeAsync(pointer, stream)) == "SUCCESS"
        assert rig.reserved(pool) == 0

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


def test_answers_to_frees(rig: Rig) -> None:
    raw, pool, stream = rig.raw, rig.pool(UINT64_MAX), rig.stream()
    first, second = int(rig.allocate(pool, 4096, stream)), rig.allocate(pool, 1, stream)
    for address, on, expected in (
        (0, stream, "SUCCESS"),
        (12345, stream, "INVALID_VALUE"),
        (first + 512, stream, "INVALID_VALUE"),
        (first, stream, "SUCCESS"),
        (first, stream, "INVALID_VALUE"),
        (second, 0, "SUCCESS"),  # the legacy stream
    ):
        assert said(raw.cuMemFreeAsync(address, on)) == expected


STEPS = {32: (1, MiB, 2 * MiB, 2 * MiB + 1, 32 * MiB), 64: (32 * MiB + 1, 64 * MiB), 128: (100 * MiB,)}


@pytest.mark.parametrize(
    ("reserved", "size"), [(steps * MiB, size) for steps, sizes in STEPS.items() for size in sizes]
)
def test_reserved_and_used(rig: Rig, reserved: int, size: int) -> None:
    pool, stream = rig.pool(), rig.stream()
    pointer = rig.allocate(pool, size, stream)
    assert rig.stats(pool) == Stats(reserved, reserved, size, size)
    rig.free(pointer, stream)
    assert rig.stats(pool) == Stats(reserved, reserved, 0, size)
    value(rig.raw.cuStreamSynchronize(stream))
    assert rig.stats(pool) == Stats(0, reserved, 0, size)


LINES: dict[str, str] = {
    "growth extends the free end": (
        "111: a=s:20 @0, b=s:40 @20 =64, c=s:10 @60 =96, d=s:12 @70 =96, a>s, b>s, c>s, d>s, sync s, e=s:90 @0 =96/90"
    ),
    "holes are filled and neighbours joined": (
        "111: a=s:1 @0, b=s:2 @1, c=s:3 @3, d=s:4 @6, e=s:1 @10, b>s, f=s:1 @1, g=s:0.5 @2, c>s, d>s, h=s:7 "
        "@2.5,i=s:2 @11 =32"
    ),
    "the smallest hole that fits": (
        "111: a=s:5 @0, b=s:1 @5, c=s:3 @6, d=s:1 @9, e=s:8 @10, f=s:1 @18, a>s, c>s, e>s, sync s, g=s:3 @6, h=s:2 "
        "@0,i=s:4 @10 =32/12^32/19"
    ),
    "a pending hole is split for its stream only": (
        "000: a=s:20, hold s, a>s, c=s:8 @0, d=s:8 @8 =32/16^32/20, e=t:10 @20 =32/26"
    ),
    "pending holes of two streams are not joined": (
        "000: a=s:16 @0, c=t:16 @16, hold s, hold t, a>s, c>t, d=s:32 @32 =64"
    ),
    "holes of two streams are joined once synchronised": "000: a=s:8 @0, c=t:8 @8, a>s, c>t, sync s, sync t, d=s:16 @0",
    "holes of two streams and the end are joined opportunistically": "111: a=s:8 @0, c=t:8 @8, a>s, c>t, d=s:30 @0 =32",
    "own hole before a smaller one of another stream, by events": (
        "100: a=s:8 @0, c=s:1 @8, d=t:5 @9, e=t:1 @14, a>s, d>t, f=s:4 @0"
    ),
    "own hole before a smaller one of another stream": (
        "110: a=s:8 @0, c=s:1 @8, d=t:5 @9, e=t:1 @14, a>s, d>t, f=s:4 @0"
    ),
    "an executed hole of another stream before the end": "110: a=t:8 @0, c=s:1 @8, a>t, d=s:4 @0",
    "a synchronised hole before the end": "110: a=t:8 @0, c=s:1 @8, a>t, sync_all, d=s:4 @0, e=s:20 @9",
    "only steps that are wholly free are released": (
        "111: keep 0, a=s:20 @0, c=s:20 @20, d=s:20 @40, c>s, sync s =64/40^64/60, d>s, sync s =32/20^64/60"
    ),
    "steps before a live allocation are released": (
        "111: keep 0, a=s:100 @0, c=s:1 @100 =128, a>s, sync s =32/1^128/101"
    ),
    "live memory stays whatever the threshold": "111: a=s:20, c=s:20, keep 0, sync s =64/40^64/40",
    "a released step is backed again": (
        "111: keep 64, a=s:32, c=s:32, d=s:32, a>s, c>s, d>s, sync s, e=s:64 @0, f=s:32 @64 =96"
    ),
    "a trim keeps a step for less": "111: a=s:100, a>s, sync s, trim 10 =32/0^128/100",
    "a maximum of a step": "111/32: a=s:20, s:20! =32/20^32/20",
    "a maximum of a step and a bit": "111/33: a=s:40, b=s:20, s:20! =64/60^64/60",
    "a maximum of two steps": "111/64: a=s:20, b=s:20, c=s:20, s:10! =64/60^64/60",
    "a maximum of two steps that are split": "111/64: a=s:40, s:40! =64/40^64/40",
    "a maximum of more than a step, for a larger one": "111/40: a=s:33, s:33! =64/33^64/33",
    "a failed allocation keeps what the pool has grown by": "111/64: s:100! =64/0^64/0",
    "a failed allocation applies the release threshold": "111/64: keep 0, s:100! =0/0^64/0",
    "a trim around a live allocation": "111: a=s:100, a>s, sync s, c=s:1 @0, trim 0 =32/1^128/100, d=s:40 @1 =64/41",
}


@pytest.mark.parametrize("name", LINES)
def test_line(rig: Rig, name: str) -> None:
    run(rig, LINES[name])


def test_highest_steps_first(rig: Rig) -> None:
    Program(rig).run(
        "keep 64, a=s:32, c=s:32, d=s:32, a>s, c>s, d>s, sync s =64/0^96/96, e=s:32 @0 =64, f=s:32 @32 =64,"
        "g=s:32 @64 =96"
    )


def test_leaves_what_the_host_has_not_seen_freed(rig: Rig) -> None:
    Program(rig).run("keep 0, a=s:20, hold s, a>s, sync t =32/0, trim 0 =32, open, trim 0 =32, sync s =0")


def test_release_in_a_pool_that_can_be_exported(rig: Rig) -> None:
    Program(rig, handle_types=POSIX_FD).run(
        "keep 0, a=s:20, a>s, sync s =0/0^32/20, trim 0 =0/0^32/20, c=s:40 =64/40^64/40"
    )


@pytest.mark.parametrize(("threshold", "kept"), [(16, 0), (32, 32), (40, 32), (64, 64), (70, 64), (96, 64)])
def test_whole_steps_are_released(rig: Rig, threshold: int, kept: int) -> None:
    Program(rig).run(f"keep {threshold}, a=s:20, c=s:20, d=s:20 =64, a>s, c>s, d>s, sync s ={kept}")


@pytest.mark.parametrize(
    ("keep", "kept"), [(0, 0), (1, 32), (32 * MiB, 32), (33 * MiB, 64), (64 * MiB, 64), (65 * MiB, 64), (1 << 40, 64)]
)
def test_a_trim_keeps_whole_steps(rig: Rig, keep: int, kept: int) -> None:
    program = Program(rig)
    program.run("a=s:20, c=s:20, d=s:20, a>s, c>s, d>s, sync s")
    assert said(rig.raw.cuMemPoolTrimTo(program.pool, keep)) == "SUCCESS"
    assert rig.stats(program.pool) == Stats(kept * MiB, 64 * MiB, 0, 60 * MiB)


def test_one_behind_the_other(rig: Rig) -> None:
    pool, stream = rig.pool(UINT64_MAX), rig.stream()
    sizes = (MiB, 2 * MiB, 3 * MiB, 4 * MiB, 512, 700, MiB)
    pointers = [rig.allocate(pool, size, stream) for size in sizes]
    places = [0, MiB, 3 * MiB, 6 * MiB, 10 * MiB, 10 * MiB + 512, 10 * MiB + 512 + 1024]
    assert offsets(pointers) == places
    assert rig.stats(pool)[::2] == (32 * MiB, sum(sizes))


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
DESTROYED = (
    IN_CONTEXT
    + """
pool, stream = rig.pool(UINT64_MAX), rig.stream()
pointer = rig.allocate(pool, 4 << 20, stream)
print(said(raw.cuMemPoolDestroy(pool)))
"""
)
CALLS_ON_IT = """
print(said(raw.cuMemPoolGetAttribute(pool, rig.pool_attribute("RESERVED_MEM_CURRENT"))))
print(said(rig.try_allocate(pool, 4, stream)), said(raw.cuMemPoolTrimTo(pool, 0)))
print(said(raw.cuMemPoolDestroy(pool)), flush=True)
os._exit(0)
"""
USE_OF_ITS_MEMORY = """
print(rig.pointer_attributes(pointer, ["MEMPOOL_HANDLE"])["MEMPOOL_HANDLE"] != 0)
print(said(raw.cuMemsetD8Async(pointer, 1, 4 << 20, stream)))
free = rig.device_free()
print(said(raw.cuMemFreeAsync(pointer, stream)), said(raw.cuStreamSynchronize(stream)))
print(rig.device_free() - free, flush=True)
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
        expected = ["SUCCESS", "True", "SUCCESS", "SUCCESS", "SUCCESS", str(32 * MiB)]
        assert (ended.stdout.split(), ended.stderr) == (expected, "")

    def test_calls_on_a_destroyed_pool(self, python: Callable[..., CompletedProcess[str]]) -> None:
        ended = python(DESTROYED + CALLS_ON_IT)
        assert (ended.stdout.split(), ended.stderr) == (["SUCCESS", *["INVALID_VALUE"] * 4], "")

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
