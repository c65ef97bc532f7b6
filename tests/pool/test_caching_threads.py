"""The cache on the per-thread default stream, whose handle is another stream on each thread."""

import contextlib
import functools
import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import streamalloc as sa
from streamalloc import ipc, vmm
from streamalloc.driver.bindings import cuda
from streamalloc.pool.cache.state import MAX_RETURNING
from streamalloc.testing import Gate
from tests.support import MiB, captured, collecting_at, holds, in_threads, later_memory_is_whole

SIZE = 4096
Worker = Callable[[Callable[[], Any]], Any]
_ends_with_work = pytest.mark.simulated_only(
    "an H200's driver never returns from cuCtxSynchronize once a thread has ended whose per-thread stream still works "
    "on memory of pools"
)
RELAXED = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


@pytest.fixture
def worker() -> Iterator[Worker]:
    """Runs functions on one other thread, which ends after the test."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda function: pool.submit(function).result()


def held_block(cache: sa.CachingAllocator, device: sa.Device, gate: Gate) -> int:
    """Address of a block of this thread's stream, filled and freed behind the gate."""
    buffer = cache.allocate(SIZE, device.per_thread_stream)
    gate.hold(device.per_thread_stream)
    buffer.fill(1)
    address = buffer.address
    buffer.free()
    return address


def next_address(cache: sa.CachingAllocator, device: sa.Device) -> int:
    """Address of this thread's next block, which returns to the cache."""
    with cache.allocate(SIZE, device.per_thread_stream) as buffer:
        return buffer.address


@pytest.mark.parametrize("end", ["trim", "close", "out of memory"])
@pytest.mark.parametrize(
    "lives", [pytest.param(False, id="ended", marks=_ends_with_work), pytest.param(True, id="alive")]
)
def test_a_thread_s_blocks_return_after_its_work(device: sa.Device, worker: Worker, lives: bool, end: str) -> None:
    with device.create_stream() as own, sa.MemoryPool(device, max_size=32 * MiB) as pool, Gate(device) as gate:
        cache = sa.CachingAllocator(pool)
        (worker if lives else in_threads)(lambda: held_block(cache, device, gate))
        with contextlib.ExitStack() as expected:
            if end == "trim":
                expected.enter_context(pytest.warns(sa.PendingFreesWarning))
                cache.trim()
            elif end == "close":
                cache.close()
            else:
                pool.attributes.reuse_allow_internal_dependencies = False
                expected.enter_context(pytest.raises(sa.OutOfMemoryError))
                cache.allocate(32 * MiB, own)
        assert pool.statistics().used == 0
        pool.attributes.reuse_allow_internal_dependencies = True
        assert later_memory_is_whole(pool, SIZE, own, gate)
        cache.close()


@_ends_with_work
def test_a_thread_with_the_number_of_an_ended_one(device: sa.Device, cache: sa.CachingAllocator, gate: Gate) -> None:
    """It finds none of that thread's blocks, nor may it free them in the order of its own stream."""
    kept: list[sa.Buffer] = []

    def first() -> tuple[int, int]:
        kept.append(cache.allocate(SIZE, device.per_thread_stream))
        kept[0].fill(1)
        return held_block(cache, device, gate), threading.get_ident()

    ((address, ident),) = in_threads(first)

    def second() -> bool:
        if threading.get_ident() != ident:
            return False
        addresses = {kept[0].address, address}
        assert next_address(cache, device) not in addresses
        kept.clear()
        gc.collect()
        assert next_address(cache, device) not in addresses
        return True

    assert any(in_threads(second) == [True] for _ in range(50))
    gate.open()
    device.synchronize()
    assert cache.statistics().in_use == 0


@_ends_with_work
def test_a_block_outlives_its_thread(device: sa.Device, cache: sa.CachingAllocator, gate: Gate) -> None:
    """Freed afterwards, it is the pool's: behind the stream of the thread as well if it was dropped."""
    for dropped in (True, False):

        def use(dropped: bool = dropped) -> sa.Buffer:
            buffer = cache.allocate(SIZE, device.per_thread_stream)
            if dropped:
                gate.hold(device.per_thread_stream)
            buffer.fill(1)
            return buffer

        buffers = in_threads(use)
        if not dropped:
            device.synchronize()
            buffers.pop().free()
        buffers.clear()
        gc.collect()
        cache.statistics()
        with device.create_stream() as other:
            again = cache.pool.allocate(SIZE, other)
            again.fill(2)
            gate.open()
            device.synchronize()
            assert holds(again, 2)
            again.free()
        device.synchronize()
        assert cache.statistics()[4:6] == (0, 0) and cache.pool.statistics().used == 0


def test_a_buffer_that_is_freed_at_the_end_of_its_thread(device: sa.Device, cache: sa.CachingAllocator) -> None:
    """No stream is made for the thread then, which would live for ever."""

    def streams() -> set[int]:
        return {id(one) for one in gc.get_referrers(device.per_thread_stream) if isinstance(one, sa.Stream)}

    local, before = threading.local(), streams()

    class Holder:
        def __init__(self) -> None:
            self.buffer = cache.allocate(SIZE, device.per_thread_stream)

        def __del__(self) -> None:
            self.buffer.free()

    def use() -> None:
        local.holder = Holder()

    for _ in range(3):
        in_threads(use)
    device.synchronize()
    gc.collect()
    assert streams() <= before and cache.statistics()[4:6] == (0, 0)


def test_a_cache_whose_threads_have_ended_leaves_the_stream(device: sa.Device, pool: sa.MemoryPool) -> None:
    before = len(device.per_thread_stream.free_lists)
    with sa.CachingAllocator(pool) as cache:
        in_threads(lambda: next_address(cache, device))
    device.synchronize()
    assert len(device.per_thread_stream.free_lists) == before


def test_a_thread_that_other_code_captures(device: sa.Device, cache: sa.CachingAllocator, worker: Worker) -> None:
    """An allocation in the capture is the graph's; other threads go on, and do not break the capture."""
    driver: Any = device.driver
    with device.current():
        address = next_address(cache, device)
        theirs = worker(lambda: next_address(cache, device))
        held = [worker(lambda: cache.allocate(SIZE, device.per_thread_stream))]
        with captured(driver, 2, "RELAXED"):
            inside = cache.allocate(SIZE, device.per_thread_stream)
            assert type(inside) is sa.GraphBuffer
            inside.free()
            held.clear()
            assert worker(lambda: next_address(cache, device)) not in (address, theirs)
        assert next_address(cache, device) == address
    device.synchronize()
    assert worker(lambda: cache.statistics()).in_use == 0


@pytest.mark.parametrize(
    "who", ["another thread", pytest.param("a thread with the same identifier", marks=_ends_with_work)]
)
def test_buffers_that_others_drop(device: sa.Device, pool: sa.MemoryPool, gate: Gate, worker: Worker, who: str) -> None:
    """It is freed after the work of all threads, also of those that have ended."""
    pool.allocate(MiB, device.per_thread_stream).free()

    def use() -> tuple[sa.Buffer, int]:
        with device.current():
            pool.allocate(MiB, device.per_thread_stream).free()
            buffer = pool.allocate(MiB, device.per_thread_stream)
            gate.hold(device.per_thread_stream)
            buffer.fill(1)
        return buffer, threading.get_ident()

    other = device.create_stream()  # a new one may wait for streams that are held
    if who == "another thread":
        buffer, ident = worker(use)
    else:
        ((buffer, ident),) = in_threads(use)
    held = [buffer]
    del buffer

    def drop() -> bool:
        if threading.get_ident() != ident and who != "another thread":
            return False
        with device.current():
            held.clear()
            gc.collect()
        return True

    if who == "another thread":
        assert drop()
    elif not any(in_threads(drop) == [True] for _ in range(50)):
        pytest.skip("the system has not used the identifier again")
    pool.statistics()
    with other:
        assert later_memory_is_whole(pool, MiB, other, gate)


@pytest.mark.parametrize("end", ["free", "close", "shared"])
@pytest.mark.parametrize("current", [False, True])
def test_buffers_freed_by_others(device: sa.Device, gate: Gate, worker: Worker, end: str, current: bool) -> None:
    """It is freed after the work of the thread that allocated it."""
    with contextlib.ExitStack() as entered:
        if current:
            entered.enter_context(device.current())
        kind = sa.MemHandleType.POSIX_FILE_DESCRIPTOR if end == "shared" else sa.MemHandleType.NONE
        pool = entered.enter_context(sa.MemoryPool(device, handle_types=kind))

        def use() -> sa.Buffer:
            buffer = pool.allocate(MiB, device.per_thread_stream)
            gate.hold(device.per_thread_stream)
            buffer.fill(1)
            return buffer

        buffer = worker(use)
        if end == "shared":
            ipc.share(buffer)
        (buffer.close if end == "close" else buffer.free)()
        assert buffer.freed
        other = entered.enter_context(device.create_stream())
        assert later_memory_is_whole(pool, MiB, other, gate)


def test_many_blocks_freed_elsewhere(device: sa.Device, cache: sa.CachingAllocator, gate: Gate, worker: Worker) -> None:
    """The others return to the pool, after the work of their thread."""

    def use() -> list[sa.Buffer]:
        buffers = [cache.allocate(SIZE, device.per_thread_stream) for _ in range(MAX_RETURNING + 1)]
        gate.hold(device.per_thread_stream)
        for buffer in buffers:
            buffer.fill(1)
        return buffers

    buffers = worker(use)
    with Gate(device) as mine, device.create_stream() as other:
        mine.hold(device.per_thread_stream)
        for buffer in buffers:
            buffer.free()
        mine.open()
        time.sleep(0.01)
        assert later_memory_is_whole(cache.pool, SIZE, other, gate)


@pytest.mark.usefixtures("collecting")
@pytest.mark.parametrize("kind", [sa.CachingAllocator, vmm.ExpandableCache])
@pytest.mark.parametrize("shared", [False, True], ids=["streams of their own", "one stream"])
def test_threads_that_free_each_other_s_blocks(
    device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream, kind: type[sa.CachingAllocator], shared: bool
) -> None:
    """Each buffer holds what its thread wrote until it is freed, also where threads end meanwhile."""
    shelf: list[sa.Buffer] = []
    cache = kind(pool)
    on = stream if shared else device.per_thread_stream

    def run(number: int) -> None:
        draw = random.Random(number)
        mine: list[sa.Buffer] = []
        for _ in range(60):
            step = draw.random()
            if step < 0.4 or not mine:
                mine.append(cache.allocate(draw.choice((512, 600, SIZE, SIZE, 3 * MiB)), on))
                mine[-1].fill(number)
            elif step < 0.6:
                buffer = mine.pop()
                assert holds(buffer, number)
                buffer.free()
            elif step < 0.7:
                del mine[-1]
            elif step < 0.85:
                on.synchronize()
                shelf.append(mine.pop())
            else:
                with contextlib.suppress(IndexError):
                    taken = shelf.pop()
                    taken.fill(200)
                    if draw.random() < 0.5:
                        taken.free()
                    del taken

    for first in (1, 5):
        in_threads(*[functools.partial(run, number) for number in range(first, first + 8)])
    shelf.clear()
    gc.collect()
    device.synchronize()
    assert cache.statistics().in_use == 0
    cache.close()
    device.synchronize()
    assert pool.statistics().used == 0


def test_a_free_on_another_stream_while_bytes_are_counted(
    device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream, gate: Gate
) -> None:
    """The collector may let other threads free at an allocation of the thread that counts."""

    def free(*_: object) -> None:
        if buffers:
            buffers.pop().free(other)

    with device.create_stream() as other, sa.CachingAllocator(pool) as cache:
        buffers = [cache.allocate(SIZE, stream) for _ in range(32)]
        own = cache._state.of(stream)
        assert own is not None
        gate.hold(other)
        free()
        with collecting_at(1, free):
            counted = [own.free_bytes for _ in range(5)]
        assert counted == sorted(counted) and counted[-1] <= 32 * SIZE
        buffers.clear()
        gate.open()
