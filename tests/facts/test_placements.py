"""Placements of a pool: reused memory, growth and release, one short program a rule; and a full device."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.facts.enums import BLOCKING, DEVICE, HOST, HOST_NUMA, INTERPROCESS, UNTIMED
from tests.facts.pool_programs import Program, run
from tests.facts.support import UINT64_MAX, MiB, Rig, said, value

PLACES: dict[str, str] = {
    "own memory before what others left and before the end": "111: a=s1:20, b=s1:1, a>s0, c=s0:4 @0",
    "own memory although the end fits better": "111: a=s0:40, b=s0:40, c=s0:1, b>s0, d=s0:3 @40",
    "own memory that is next to the end stays apart from it": "000: a=s0:22, b=s1:1, b>s1, c=s1:2 @23",
    "neighbours that one stream left are one": "000: a=s0:8, b=s0:8, c=s0:1, a>s0, b>s0, d=s0:16 @0",
    "what was split off stays the other stream's": "010: a=s0:96, a>s0, b=L:33 @0, b>L, c=s0:1 @33",
    "streams by their first use of the pool, then the best fit": "111: a=s1:32, b=s0:4, a>s1, b>s0, c=s2:4 @0",
    "streams also by their first wait for an event of one that used a pool": (
        "010: x=s0:1, s0>e, e>s2, a=s1:4, b=s2:4, a>s1, b>s2, c=s0:4 @5"
    ),
    "not for an event recorded before that": "010: s0>e, x=s0:1, e>s2, a=s1:4, b=s2:4, a>s1, b>s2, c=s0:4 @1",
    "what is done joins where it is too small": "111: a=s1:1, a>s1, b=s0:16 @0",
    "what has joined is free for everybody from then on": (
        "111: a=s0:22, b=s0:30, c=s0:1, a>s0, d=s0:100, b>s0, e=s0:30 @22, f=s0:1 @0"
    ),
    "what is free for everybody before what others left": (
        "111: a=s1:70, b=s0:64, c=s1:48, d=s1:10, b>s0, c>s1, sync s0, e=s2:32 @70"
    ),
    "the best fit of what is free for everybody": (
        "000: a=s0:16, b=s0:1, c=s0:6, d=s0:1, a>s0, c>s0, sync s0, e=s1:4 @17"
    ),
    "the end of the line last, also where it fits better": "000: a=s0:32, b=s1:8, a>s0, sync s0, c=s1:24 @0",
    "of equal ones that which has been free longest": (
        "000: a=s0:8, b=s0:1, c=s1:8, d=s0:1, c>s1, sync s1, a>s0, sync s0, e=s2:4 @9"
    ),
    "what becomes free for everybody at once: the latest first": (
        "000: a=s0:8, b=s0:1, c=s0:8, d=s0:1, a>s0, c>s0, sync s0, e=s1:8 @9"
    ),
    "the latest free first, also where a part of it was used again": (
        "000: a=s0:24, b=s0:1, c=s0:8, d=s0:1, a>s0, c>s0, e=s0:16 @0, sync s0, f=s1:8 @25"
    ),
    "an event lets other streams have it, after what is free for everybody": (
        "100: a=s1:8, b=s1:1, a>s1, s1>e, e>s0, c=s0:4 @0"
    ),
    "an event of several processes does not": "100: a=s1:8, b=s1:1, a>s1, s1>shared, shared>s0, c=s0:4 @9",
    "the legacy stream's order does": "100: a=L:8, b=L:1, a>L, c=b:4 @0",
    "addresses without memory come after what others left": (
        "111: keep 0, a=s1:70, b=s1:31, c=s2:20, a>s1, sync s1, c>s2, d=s1:1 @101"
    ),
    "once what is done has joined, the best fit with memory or without": (
        "010: a=s0:32, b=s0:1, c=s1:20, d=s2:20, x=s0:1, keep 0, a>s0, sync s0, c>s1, d>s2, e=s3:30 @0"
    ),
    "memory goes first where it has been free longest": (
        "111: keep 96, a=s0:40, b=s1:1, c=s0:64, d=s1:2, a>s0, c>s0, sync s0, e=s2:8 @0"
    ),
    "memory goes first from the end of the line": (
        "111: keep 96, a=s0:64, b=s1:1, c=s0:63, a>s0, sync s0, c>s0, sync s0, d=s2:64 @0"
    ),
    "a block that grows at its end keeps its age": (
        "111: x=s0:4, a=s0:60, b=s1:1, c=s0:63, d=s1:2, x>s0, sync s0, c>s0, sync s0, keep 128, a>s0, sync s0 =128, "
        "e=s2:40 @65"
    ),
    "so does the rest of a block": (
        "111: a=s0:64, b=s1:1, c=s0:63, d=s1:2, x=s1:2, c>s0, sync s0, a>s0, sync s0, e=s2:4 @65, keep 128, x>s1, "
        "sync s1 =128, f=s2:40 @0"
    ),
    "a trim takes memory first from the highest addresses": (
        "000: a=s0:32, b=s1:1, c=s0:64, d=s1:2, a>s0, sync s0, c>s0, sync s0, trim 96, e=s2:32 @0"
    ),
    "looking at what others left tells the legacy stream of the blocking ones": "100: a=T:40, a>T, x=L:50, c=b:20 @0",
    "taking what is at hand does not": "100: x=L:8, a=T:40, x>L, a>T, y=L:4 @0, c=b:20 @48",
    "addresses without memory before the end of the line": (
        "000: keep 32, a=s0:37, a>s0, b=s1:15, b>s1, sync s0, c=s0:1 @0"
    ),
}

AMOUNTS: dict[str, str] = {
    "memory that lies free elsewhere is moved before the pool grows": (
        "010: a=s0:32, b=s0:32, c=s0:40 =128, b>s0, d=s0:48 =128"
    ),
    "also beyond the threshold": "011: a=s0:32, b=s0:32 =64, keep 16, a>s0, c=s0:48 =96",
    "a failed growth gives back what is done": "111/32: keep 1, a=s0:19, a>s0, s1:38! =0",
    "synchronising a stream does not show what the legacy stream did meanwhile": (
        "000: keep 0, a=b:20, a>L, sync b =32, sync L =0"
    ),
    "it does for what was there before its latest work": "000: keep 0, a=b:20, c=b:1, a>L, c>b, sync b =0",
    "a wait for an event of several processes tells the stream of the legacy one": (
        "000: keep 0, a=b:20, a>L, shared>b, sync b =0"
    ),
    "so does a record of one": "000: keep 0, a=b:20, a>L, b>shared, sync b =0",
    "so does a wait for an event of its own": "000: keep 0, a=b:20, a>L, b>e, e>b, sync b =0",
    "a record alone does not": "000: keep 0, a=b:20, a>L, b>e, sync b =32, sync L =0",
    "an event of the legacy stream knows of the blocking ones": "010: keep 0, a=b:20, a>b, L>e, await e =0",
    "an event of several processes tells nothing": (
        "000: keep 0, a=s0:20, a>s0, s0>shared, await shared =32, sync s0 =0"
    ),
    "a stream that is destroyed shows what came before it": (
        "100/32: keep 0, a=s0:7, a>s0, s1:1000!, s0>e, e>s1, end s1 =0"
    ),
    "synchronising a stream that never used a pool releases nothing": (
        "111: a=s0:64, b=s1:1, a>s0, sync s0, keep 16, sync s2 =96, sync s1 =32"
    ),
    "synchronising releases what it has not freed only after the threshold was lowered": (
        "111: keep 64, a=s0:24, b=s1:48, c=s0:48 =128, a>s0, c>s0, b>s1, d=s0:64, sync s1 =128, keep 32, sync s1 =64"
    ),
    "cuMemFree releases": "111: keep 0, a=s0:65, free a =0",
    "cuMemFree releases only what lies under the memory that it frees": (
        "111: keep 0, a=s0:64, b=s1:64, c=s1:40 =192, a>s0, b>s1, d=s2:66 @0 =192, free c =128, trim 0 =96"
    ),
    "so many bytes to keep that they overflow are none": "111: a=s0:20, a>s0, sync s0, trim all =0",
    "an allocation is no work where it takes what is at hand": (
        "000: keep 0, a=b:20, b=L:20, a>b, b>L, c=b:1, sync b =64"
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_place(rig: Rig, name: str) -> None:
    run(rig, PLACES[name])


@pytest.mark.parametrize("name", AMOUNTS)
def test_reserved(rig: Rig, name: str) -> None:
    run(rig, AMOUNTS[name])


def caching(rig: Rig, size: int, stream: Any, *kinds: dict[str, Any]) -> list[Any]:
    """Pools that hold free memory of this size, of which the host knows."""
    pools = [rig.pool(UINT64_MAX, **kind) for kind in kinds]
    for pool in pools:
        rig.free(rig.allocate(pool, size, stream), stream)
    value(rig.raw.cuStreamSynchronize(stream))
    return pools


class TestAddresses:
    """A pool of the only device has addresses for twice of what it may hold. With several devices it has more."""

    @pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.gpus(2))])
    def only(self, raw: Any, all_devices: None) -> bool:
        """Whether there is one device only."""
        return bool(value(raw.cuDeviceGetCount()) == 1)

    def test_what_has_no_addresses_releases_nothing(self, rig: Rig, only: bool) -> None:
        left = 32 if only else 0
        Program(rig, policies="111", max_size=32 * MiB).run(f"keep 0, a=s0:19, a>s0, s1:70! ={left}, sync s0 ={left}")

    def test_what_has_addresses_takes_what_others_hold_free_in_vain(self, rig: Rig, only: bool) -> None:
        stream, full = rig.stream(), rig.pool(UINT64_MAX, max_size=32 * MiB)
        (holding,) = caching(rig, 20 * MiB, stream, {})
        rig.allocate(full, 28 * MiB, stream)
        assert said(rig.try_allocate(full, 40 * MiB, stream)) == "OUT_OF_MEMORY"
        assert rig.reserved(holding) == (32 * MiB if only else 0)
        assert said(rig.try_allocate(full, 28 * MiB, stream)) == "OUT_OF_MEMORY"
        assert rig.reserved(holding) == 0

    @pytest.mark.gpus(2)
    @pytest.mark.parametrize("ordinal", [0, 1])
    def test_it_takes_from_pools_of_its_own_device(self, rig: Rig, ordinal: int) -> None:
        """Whatever device's context is current, and of whatever device the stream is."""
        full = rig.pool(UINT64_MAX, id=ordinal, max_size=64 * MiB)
        rig.device_context(1)
        stream = rig.stream()
        holding = caching(rig, 33 * MiB, stream, {"id": 0}, {"id": 1})
        rig.allocate(full, 33 * MiB, stream)
        assert said(rig.try_allocate(full, 33 * MiB, stream)) == "OUT_OF_MEMORY"
        assert [rig.reserved(pool) for pool in holding] == ([0, 64 * MiB] if ordinal == 0 else [64 * MiB, 0])

    @pytest.mark.parametrize(
        ("asking", "left"),
        [(HOST_NUMA, {HOST: 0, HOST_NUMA: 0, DEVICE: 32}), (HOST, {HOST: 32, HOST_NUMA: 32, DEVICE: 0})],
        ids=["NUMA node", "host"],
    )
    def test_from_whom_pools_of_the_host_take(self, rig: Rig, asking: int, left: dict[int, int]) -> None:
        stream, full = rig.stream(), rig.pool(UINT64_MAX, location=asking, max_size=32 * MiB)
        holding = caching(rig, 20 * MiB, stream, *({"location": place} for place in left))
        rig.allocate(full, 28 * MiB, stream)
        assert said(rig.try_allocate(full, 28 * MiB, stream)) == "OUT_OF_MEMORY"
        assert [rig.reserved(pool) // MiB for pool in holding] == list(left.values())


def test_pools_release_together(rig: Rig) -> None:
    """Pools release at a synchronisation that tells of something new to any of them, or after one was destroyed."""
    stream, other = rig.stream(), rig.disown(rig.pool(UINT64_MAX))
    rig.free(rig.allocate(other, MiB, stream), stream)
    assert rig.executed(stream)
    value(rig.raw.cuStreamSynchronize(stream))
    program = Program(rig, policies="111")
    # what another stream has taken together is free, but that is no news
    program.run("keep 0, a=s0:40, b=s1:40, a>s0, b>s1, c=s2:50 @0, sync s2 =96")
    rig.free(rig.allocate(other, MiB, stream), stream)
    assert rig.executed(stream)
    value(rig.raw.cuStreamSynchronize(stream))
    assert rig.reserved(program.pool) == 64 * MiB
    program.run("d=s0:40, e=s1:40, d>s0, e>s1, f=s2:50, sync s2 =160")
    value(rig.raw.cuMemPoolDestroy(other))
    program.run("sync s2 =128")


def order_of(rig: Rig, pool: Any, *streams: Any) -> list[int]:
    """The streams whose memory another stream gets, one after the other."""
    taken = []
    for stream in streams:
        taken.append(rig.allocate(pool, 2 * MiB, stream))
        rig.allocate(pool, 512, streams[0])
    for stream, pointer in zip(streams, taken, strict=True):
        rig.free(pointer, stream)
        assert rig.executed(stream)
    asking = rig.stream()
    return [taken.index(rig.allocate(pool, 2 * MiB, asking)) for _ in streams]


# Streams in the order in which they are made; steps; streams that free memory; the order in which another gets that.
RANKS: dict[str, tuple[str, str, str, list[int]]] = {
    "used in another pool": ("s t u", "elsewhere u, sync_all", "t s u", [2, 0, 1]),
    "the place of one that was destroyed": ("s t", "use s, use t, end s", "u v t", [0, 2, 1]),
    "work in a blocking stream": ("b s", "use L, fill b", "s b", [1, 0]),
    "work in the per-thread stream": ("s", "use L, fill T, executes T", "s T", [1, 0]),
    "a record in a blocking stream": ("b s", "use L, b>e", "s b", [0, 1]),
    "a wait for an event of several processes": ("b s", "use L, shared>b", "s b", [1, 0]),
    "a wait for one that was recorded": ("b s", "use L, s>shared, sync s, shared>b", "s b", [1, 0]),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.simulated_only("elsewhere it has its place already")] * ("T" in row[2]))
        for name, row in RANKS.items()
    ],
)
def test_rank(rig: Rig, name: str) -> None:
    """Streams are ordered by their first use of any pool, not of this one. A blocking stream comes into the order with
    its first work, where the legacy stream is in it.
    """
    made, steps, frees, expected = RANKS[name]
    program = Program(rig, policies="010")
    for stream in made.split():
        program.stream(stream)
    program.run(steps)
    streams = [program.stream(stream) for stream in frees.split()]
    assert order_of(rig, program.pool, *streams) == expected


def test_a_launch_of_an_empty_graph(rig: Rig) -> None:
    blocking, one, pool = rig.stream(BLOCKING), rig.stream(), rig.pool(UINT64_MAX, "010")
    legacy = rig.raw.CUstream(1)
    rig.free(rig.allocate(pool, 512, legacy), legacy)
    assert rig.executed(legacy)
    rig.begin_capture(one)
    value(rig.raw.cuGraphLaunch(rig.instantiate(value(rig.end_capture(one))), blocking))
    assert rig.executed(blocking)
    assert order_of(rig, pool, one, blocking) == [0, 1]


def test_a_free_of_memory_of_no_pool(rig: Rig) -> None:
    freeing, one, pool = rig.stream(), rig.stream(), rig.pool(UINT64_MAX, "010")
    rig.free(value(rig.raw.cuMemAlloc(512)), freeing)
    assert rig.executed(freeing)
    assert order_of(rig, pool, one, freeing) == [1, 0]


@pytest.mark.parametrize("frees", [False, True], ids=["and a free of it elsewhere", "and frees"])
def test_a_launch_that_allocates(rig: Rig, frees: bool) -> None:
    captured, launching, freeing, one = (rig.stream() for _ in range(4))
    rig.begin_capture(captured)
    memory = value(rig.raw.cuMemAllocAsync(512, captured))
    if frees:
        rig.free(memory, captured)
    value(rig.raw.cuGraphLaunch(rig.instantiate(value(rig.end_capture(captured))), launching))
    assert rig.executed(launching)
    ranked = launching
    if not frees:
        rig.free(memory, freeing)
        assert rig.executed(freeing)
        ranked = freeing
    assert order_of(rig, rig.pool(UINT64_MAX, "010"), one, ranked) == [1, 0]


def test_a_captured_allocation(rig: Rig) -> None:
    captured, one, pool = rig.stream(), rig.stream(), rig.pool(UINT64_MAX, "010")
    rig.begin_capture(captured)
    value(rig.raw.cuMemAllocAsync(512, captured))
    value(rig.end_capture(captured))
    assert order_of(rig, pool, one, captured) == [1, 0]


STEP = 32 * MiB


@pytest.fixture
def most(rig: Rig) -> int:
    """About two thirds of the device's free memory: it cannot be had twice."""
    return rig.device_free() * 2 // 3 // STEP * STEP


def test_a_pool_gets_what_another_holds_free(rig: Rig, most: int) -> None:
    stream, growing = rig.stream(), rig.pool(UINT64_MAX)
    (holding,) = caching(rig, most, stream, {})
    assert rig.reserved(holding) == most
    rig.allocate(growing, most, stream)
    assert (rig.reserved(holding), rig.reserved(growing)) == (0, most)


def test_a_plain_allocation_gets_what_pools_hold_free(rig: Rig, most: int) -> None:
    (holding,) = caching(rig, most, rig.stream(), {})
    assert rig.reserved(holding) == most
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
    assert rig.reserved(growing) == 0
    # It also gets what other processes on the GPU have freed meanwhile.
    assert rig.reserved(holding) >= most + kept


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


# -- when freed memory is used again: the three policies, and which calls tell the host of an executed free -----------


SIZE = 20 * MiB


REUSES: dict[str, str] = {
    "same stream, free pending": "000: a=s:20, hold s, a>s, c=s:20 @0 =32",
    "ordered by an event after the pending free, no policy": (
        "000: a=s:20, hold s, a>s, s>e, e>t, c=t:20 @!0 =64, held t"
    ),
    "ordered by an event after the pending free, opportunistic": (
        "010: a=s:20, hold s, a>s, s>e, e>t, c=t:20 @!0 =64, held t"
    ),
    "ordered by an event after the pending free, events": "100: a=s:20, hold s, a>s, s>e, e>t, c=t:20 @0 =32, held t",
    "ordered by an event after the pending free, both": "110: a=s:20, hold s, a>s, s>e, e>t, c=t:20 @0 =32, held t",
    "free executed, not synchronised, no policy": "000: a=s:20, a>s, c=t:20 @!0 =64",
    "free executed, not synchronised, opportunistic": "010: a=s:20, a>s, c=t:20 @0 =32",
    "free pending and no dependency, events": "100: a=s:20, hold s, a>s, c=t:20 @!0",
    "free pending and no dependency, both": "110: a=s:20, hold s, a>s, c=t:20 @!0",
    "free pending and the pool may not grow": "000/32: a=s:20, hold s, a>s, t:20!",
    "internal dependency where the pool may not grow": "001/32: a=s:20, hold s, a>s, idle t, c=t:20 @0, held t, open",
    "no internal dependency where the pool may grow": "001: a=s:20, hold s, a>s, c=t:20 @!0 =64, idle t",
    "no internal dependency where the end of the pool is enough": (
        "001/32: a=s:20, hold s, a>s, c=t:4 @20, idle t, d=t:20 @0, held t"
    ),
    "host synchronised": "000: a=s:20, a>s, sync s, c=t:20 @0",
    "by events over a third stream": "100: a=s:20, hold s, a>s, s>e, e>t, t>f, f>u, c=u:20 @0, held u",
    "by an event that was complete when waited for": "100: a=s:20, a>s, s>e, e>t, c=t:20 @0",
    "freed on a blocking stream, allocated on the legacy one": "100: a=b:20, hold b, a>b, c=L:20 @0 =32",
    "freed on the legacy stream, allocated on a blocking one": "100: a=L:20, hold b, a>L, c=b2:20 @0 =32",
    "legacy work between two blocking streams": "100: a=b:20, hold b, a>b, fill L, c=b2:20 @0",
    "a destroyed stream shows its frees": "000: a=s:20, a>s, end s, c=t:20 @0",
    "a destroyed stream applies the release threshold": "111: keep 0, a=s:20, a>s =32, end s =0",
    "a destroyed stream shows pending frees once they have run": (
        "000: a=s:20, hold s, a>s, s>e, end s, c=t:20 @!0, open, reached e, d=t:20 @0"
    ),
    "an event recorded before the free releases nothing": (
        "111: keep 0, a=s:20, s>e, a>s, await e =32, sync t =32, sync s =0"
    ),
}


@pytest.mark.parametrize("name", REUSES)
def test_reuse(rig: Rig, name: str) -> None:
    run(rig, REUSES[name])


def test_event_recorded_before_the_free(rig: Rig) -> None:
    run(rig, "100: a=s:20, hold s, s>e, a>s, e>t, c=t:20 @!0")


# What the host may do after the stream s has executed a free and, behind it, the record of e.
CALLS: dict[str, str] = {
    "cuStreamQuery": "idle s",
    "cuEventQuery": "done e",
    "cuStreamSynchronize of another stream": "sync t",
    "cuStreamSynchronize of the legacy stream": "sync L",
    "cuMemcpyDtoH": "copy",
    "cuMemPoolTrimTo": "trim 0",
    "cuEventSynchronize": "await e",
    "cuCtxSynchronize": "sync_all",
}
ONLY_FOR_REUSE: dict[str, str] = {
    "cuMemcpyDtoHAsync to pageable memory": "copy s",
    "cuMemAlloc and cuMemFree": "plain",
    "cuStreamSynchronize of a dependent stream": "s>f, f>t, sync t",
}
ONLY_FOR_RELEASE: dict[str, str] = {"cuMemGetInfo": "info", "cuCtxPushCurrent and cuCtxPopCurrent": "push_and_pop"}
# Those by which it knows of the free.
TELL = ("cuEventSynchronize", "cuCtxSynchronize", "cuStreamSynchronize of a dependent stream")


@pytest.mark.parametrize("name", CALLS | ONLY_FOR_REUSE)
def test_another_stream_reuses_after(rig: Rig, name: str) -> None:
    calls, found = (CALLS | ONLY_FOR_REUSE)[name], "@0 =32/20^32/20" if name in TELL else "@!0 =64/20^64/20"
    run(rig, f"000: a=s:20, a>s, s>e, {calls}, c=t:20 {found}")


@pytest.mark.parametrize("name", CALLS | ONLY_FOR_RELEASE)
def test_pool_releases_after(rig: Rig, name: str) -> None:
    left = 0 if name in TELL else 32
    run(rig, f"111: keep 0, a=s:20, a>s, s>e, {(CALLS | ONLY_FOR_RELEASE)[name]} ={left}/0^32/20")


def test_synchronising_with_a_context_s_event_shows_no_frees(rig: Rig) -> None:
    run(rig, "000: keep 0, a=s:20, a>s, C>e, await e =32")


@pytest.mark.parametrize("asks", ["own", "another"])
@pytest.mark.parametrize(
    ("steps", "known"),
    [
        ("", True),
        ("event", True),
        ("event record", True),
        ("event allocate", True),
        ("event fill", False),
        ("event free", False),
        ("event gate", False),
        ("event fill event", False),
        ("fill event", True),
        ("fill event fill", True),
        ("gate fill", True),
        ("gate event fill", True),
        ("gate fill event", True),
        ("shared", True),
    ],
    ids=lambda given: (given or "nothing") if isinstance(given, str) else None,
)
def test_a_free_is_known_once_the_next_command_is_reached(rig: Rig, asks: str, steps: str, known: bool) -> None:
    """A command of the same stream takes the mark along, behind the events that it waits for. Where nothing is left to
    do, no mark is needed; a record without time and an allocation are nothing to do, and no commands. A record of an
    event of several processes is a command before it waits for the event's earlier record.
    """
    pool, elsewhere = rig.pool(UINT64_MAX), rig.pool(UINT64_MAX)
    stream, held, gate, plain, event = rig.stream(), rig.stream(), rig.gate(), rig.plain(512), rig.event()
    freed = rig.allocate(pool, 8 * MiB, stream)
    rig.free(freed, stream)
    assert rig.executed(stream)
    for step in steps.split():
        if step == "event":
            gate.hold(held)
            value(rig.raw.cuEventRecord(event, held))
            value(rig.raw.cuStreamWaitEvent(stream, event, 0))
        elif step == "gate":
            gate.hold(stream)
        elif step == "shared":  # this record waits for the earlier one
            gate.hold(held)
            shared = rig.event(UNTIMED | INTERPROCESS)
            for recorder in (held, stream):
                value(rig.raw.cuEventRecord(shared, recorder))
        elif step == "fill":
            value(rig.raw.cuMemsetD8Async(plain, 0, 512, stream))
        elif step == "record":
            value(rig.raw.cuEventRecord(rig.event(), stream))
        else:
            pointer = rig.allocate(elsewhere, MiB, stream)
            if step == "free":
                rig.free(pointer, stream)
    time.sleep(0.02)  # the device reaches the gate, also beside other processes
    joined = rig.allocate(pool, 16 * MiB, stream if asks == "own" else rig.stream())
    assert joined - freed == (0 if known else 8 * MiB)


@pytest.mark.parametrize("again", [False, True], ids=["of what it gets", "of something else"])
def test_who_waits_for_memory_waits_for_the_last_free_of_the_stream(rig: Rig, again: bool) -> None:
    pool, elsewhere = rig.pool(UINT64_MAX, "001", max_size=32 * MiB), rig.pool(UINT64_MAX)
    freeing, asking, gate = rig.stream(), rig.stream(), rig.gate()
    freed, other = rig.allocate(pool, SIZE, freeing), rig.allocate(elsewhere, MiB, freeing)
    rig.free(freed, freeing)
    assert rig.executed(freeing)
    gate.hold(freeing)
    if again:
        rig.free(other, freeing)
    assert rig.allocate(pool, SIZE, asking) == freed
    assert rig.held(asking) == again
