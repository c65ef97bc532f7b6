"""Limits and settings of contexts."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.facts.support import MiB, Rig, said, value

STACK, PRINTF, HEAP, DEPTH, LAUNCHES, GRANULARITY, PERSISTING, SHARED, GRAPHICS, FALLBACK = range(10)  # CUlimit
PAGE = 2 << 20


@pytest.fixture(autouse=True)
def unchanged(rig: Rig) -> Iterator[None]:
    """Limits are those of the primary context, which other tests use.

    The first launch after a change of the stack's size makes launches on all other streams wait for it. It is made
    here, where no test holds its stream.
    """
    limits = {number: rig.raw.cuCtxGetLimit(limit(rig, number)) for number in range(GRANULARITY + 2)}
    yield
    rig.settle()
    for number, answer in limits.items():
        if said(answer) == "SUCCESS":
            rig.raw.cuCtxSetLimit(limit(rig, number), answer[1])
    rig.raw.cuMemsetD8(rig.plain(MiB), 0, MiB)
    rig.synchronize()


def limit(rig: Rig, number: int) -> Any:
    return rig.raw.CUlimit(number)


def put(rig: Rig, number: int, wanted: int) -> int | str:
    """Set a limit: what it is then, or what the call says where it fails."""
    answer = rig.raw.cuCtxSetLimit(limit(rig, number), wanted)
    return int(value(rig.raw.cuCtxGetLimit(limit(rig, number)))) if said(answer) == "SUCCESS" else said(answer)


@pytest.fixture
def persisting(rig: Rig) -> int:
    """A tenth of the cache that can be set aside: the step of that limit."""
    return rig.device_attribute("MAX_PERSISTING_L2_CACHE_SIZE") // 10


@pytest.mark.usefixtures("same_architecture")
def test_defaults(rig: Rig, persisting: int) -> None:
    expected = {
        STACK: 1024,
        PRINTF: 8650752,
        HEAP: 8 << 20,
        DEPTH: "UNSUPPORTED_LIMIT",
        LAUNCHES: 2048,
        GRANULARITY: 64,
        PERSISTING: 3 * persisting,
        SHARED: rig.device_attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        GRAPHICS: 0,
        FALLBACK: "UNSUPPORTED_LIMIT",
    }
    for number, known in expected.items():
        answer = rig.raw.cuCtxGetLimit(limit(rig, number))
        assert (answer[1] if said(answer) == "SUCCESS" else said(answer)) == known
    assert said(rig.raw.cuCtxGetLimit(rig.raw.CUlimit.CU_LIMIT_MAX)) == "INVALID_VALUE"


SETTABLE = [
    (STACK, 1, 16),
    (STACK, 1000, 1008),
    (STACK, 512 << 10, "INVALID_VALUE"),
    (PRINTF, 0, 524288),
    (PRINTF, 1000001, 1000192),
    (PRINTF, 1 << 45, 1 << 31),
    (HEAP, 1000, 4 << 20),
    (HEAP, 5000001, 5046272),
    (LAUNCHES, 1, 32),
    (LAUNCHES, 33, 33),
    (LAUNCHES, 1 << 20, 599186),
    (GRANULARITY, 0, 0),
    (GRANULARITY, 33, 33),
    (GRANULARITY, 129, "INVALID_VALUE"),
    (SHARED, 1024, "NOT_PERMITTED"),
    (GRAPHICS, 0, "NOT_PERMITTED"),
    (DEPTH, 2, "UNSUPPORTED_LIMIT"),
]
"""A limit, the size that is asked for, and the size that it has then or the answer."""


@pytest.mark.usefixtures("same_architecture")
def test_what_can_be_set(in_new_process: Callable[..., list[int | str]]) -> None:
    """Once a kernel that prints was launched, the size for that is refused."""
    wanted = [(number, size) for number, size, _ in SETTABLE]
    assert in_new_process(_put_each, wanted) == [kept for *_, kept in SETTABLE]


def _put_each(rig: Rig, wanted: list[tuple[int, int]]) -> list[int | str]:
    found = []
    for number, size in wanted:
        before = rig.raw.cuCtxGetLimit(limit(rig, number))
        found.append(put(rig, number, size))
        if said(before) == "SUCCESS":
            put(rig, number, before[1])
    return found


@pytest.mark.usefixtures("same_architecture")
def test_cache_that_is_set_aside(rig: Rig, persisting: int) -> None:
    assert put(rig, PERSISTING, 1) == persisting
    assert put(rig, PERSISTING, persisting + 1) == 2 * persisting
    assert put(rig, PERSISTING, 10 * persisting + 1) == "INVALID_VALUE"


def test_stacks_take_memory(rig: Rig, in_new_process: Callable[..., list[int]]) -> None:
    """One for every thread that can run at a time. Kernels that have run keep the stacks that they needed."""
    sizes = [512, 2048, 3008, 4096]
    readings = in_new_process(_free_with_stacks, [1024, *(size for one in sizes for size in (one, 1024))])
    multiprocessors = rig.device_attribute("MULTIPROCESSOR_COUNT")
    threads = multiprocessors * rig.device_attribute("MAX_THREADS_PER_MULTIPROCESSOR")
    before = readings[0]
    assert readings[::2] == [before] * 5
    expected = [(size * threads // PAGE - 1024 * threads // PAGE) * PAGE for size in sizes]
    assert [before - reading for reading in readings[1::2]] == expected


def _free_with_stacks(rig: Rig, sizes: list[int]) -> list[int]:
    """The device's free memory after the stacks were given each of these sizes."""
    readings = []
    for size in sizes:
        assert put(rig, STACK, size) == size
        readings.append(rig.device_free())
    return readings


def test_other_stacks_wait_for_all_streams(rig: Rig) -> None:
    gate = rig.gate()
    for number, wanted, waits in ((STACK, 2048, True), (HEAP, 16 << 20, False), (GRANULARITY, 32, False)):
        gate.hold(rig.stream())
        with gate.opening_after(0.05 if waits else 5):
            assert put(rig, number, wanted) == wanted
            assert gate.is_open == waits
        rig.synchronize()


def _size_that_takes_memory(rig: Rig) -> int:
    """A size of stacks that the context has no memory for; kernels of other tests leave some."""
    for size in (2048, 4096, 8192, 16384):
        put(rig, STACK, 1024)
        before = rig.device_free()
        put(rig, STACK, size)
        taken = before - rig.device_free()
        put(rig, STACK, 1024)
        if taken:
            return size
    pytest.skip("the stacks of this process take no more memory")


def test_not_during_a_capture(rig: Rig) -> None:
    wanted = _size_that_takes_memory(rig)
    stream = rig.stream()
    rig.begin_capture(stream)
    assert said(rig.raw.cuCtxGetLimit(limit(rig, STACK))) == "SUCCESS"
    assert rig.capture_status(stream) == "ACTIVE"
    assert put(rig, STACK, wanted) == "STREAM_CAPTURE_UNSUPPORTED"
    assert rig.capture_status(stream) == "INVALIDATED"


def test_settings(rig: Rig) -> None:
    raw = rig.raw
    assert int(value(raw.cuCtxGetCacheConfig())) == 0
    assert said(raw.cuCtxSetCacheConfig(raw.CUfunc_cache(1))) == "SUCCESS"
    assert int(value(raw.cuCtxGetCacheConfig())) == 1
    value(raw.cuCtxSetCacheConfig(raw.CUfunc_cache(0)))
    assert said(raw.cuCtxResetPersistingL2Cache()) == "SUCCESS"
    target, scope = raw.CUflushGPUDirectRDMAWritesTarget(0), raw.CUflushGPUDirectRDMAWritesScope(100)
    assert said(raw.cuFlushGPUDirectRDMAWrites(target, scope)) == "SUCCESS"
    capability = tuple(rig.device_attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
    assert value(raw.cuDeviceComputeCapability(0)) == capability
    properties = value(raw.cuDeviceGetProperties(0))
    assert (properties.maxThreadsPerBlock, properties.SIMDWidth) == (1024, 32)
    assert list(properties.maxThreadsDim) == [1024, 1024, 64]


def test_all_streams_wait_for_an_event(rig: Rig) -> None:
    """Also streams that are made later. A stream without work is done."""
    raw, stream, gate, event, plain = rig.raw, rig.stream(), rig.gate(), rig.event(), rig.plain(64)
    other = rig.stream()
    assert said(raw.cuCtxWaitEvent(rig.context, event)) == "SUCCESS"
    gate.hold(stream)
    value(raw.cuEventRecord(event, stream))
    assert said(raw.cuCtxWaitEvent(rig.context, event)) == "SUCCESS"
    for one in (other, rig.stream()):
        assert rig.query(one) == "SUCCESS"
        value(raw.cuMemsetD8Async(plain, 1, 64, one))
        assert rig.held(one)
    gate.open()
    assert rig.executed(other)
    assert said(raw.cuCtxWaitEvent(None, event)) == "INVALID_CONTEXT"
    rig.begin_capture(stream)
    assert said(raw.cuCtxWaitEvent(rig.context, event)) == "STREAM_CAPTURE_UNSUPPORTED"
    assert rig.capture_status(stream) == "INVALIDATED"
