"""The cache on each kind of stream, also on threads' own: driver calls, captures, and frees on another stream."""

import contextlib
import functools
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import streamalloc as sa
from streamalloc import ipc, vmm
from streamalloc.core import library_streams
from streamalloc.core.event import Spares
from streamalloc.core.session import session_of
from streamalloc.driver.bindings import cuda
from streamalloc.pool.cache.state import MAX_RETURNING, StreamCache
from streamalloc.testing import Gate
from tests.interleaving import interleaved
from tests.interop.libraries import LibraryStream
from tests.support import MiB, captured, collecting_at, executed, holds, in_threads, later_memory_is_whole, names

SIZE = 4096


class Theirs(LibraryStream):
    """A stream of another library, which destroys it at the end of its object."""

    __module__ = "cuda.core"  # wrappers of other modules may outlive their stream

    def __init__(self, device: sa.Device) -> None:
        driver: Any = device.driver
        self._driver = driver
        with device.current():
            super().__init__(int(driver.cuStreamCreate(1)[1]))

    def close(self) -> None:
        """Destroy the stream; the object names no handle from then on."""
        handle, self.handle = self.handle, None
        if handle is not None:
            self._driver.cuStreamDestroy(cuda.CUstream(handle))

    __del__ = close


class Null:
    """The legacy default stream as PyTorch names it."""

    cuda_stream = 0
    device_index = 0


@pytest.fixture
def cache(traced: Any, device: sa.Device) -> Iterator[sa.CachingAllocator]:
    with sa.MemoryPool(device) as pool, sa.CachingAllocator(pool) as cache:
        yield cache


def _lent(device: sa.Device) -> sa.Stream:
    stream = device.create_stream()
    assert stream.handle
    return stream


KINDS: dict[str, tuple[Callable[[sa.Device], Any], list[str]]] = {
    "own": (lambda device: device.create_stream(), []),
    "default": (lambda device: device.default_stream, []),
    "default of a library": (lambda device: Null(), []),
    "own, lent": (_lent, ["cuStreamIsCapturing"]),
    "library's": (Theirs, ["cuStreamIsCapturing"]),
    "per-thread": (lambda device: device.per_thread_stream, ["cuCtxGetCurrent", "cuStreamIsCapturing"]),
}
"""A stream of each kind, and the driver calls of an allocation from the cache. A free to it makes none."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ["free", "drop", "free on its stream"])
def test_calls_of_a_hit(cache: sa.CachingAllocator, device: sa.Device, traced: Any, kind: str, end: str) -> None:
    make, calls = KINDS[kind]
    stream = make(device)
    traced.cuCtxSetCurrent(session_of(device).context(0))
    for number in range(4):
        buffer = cache.allocate(SIZE, stream)
        if not number:
            address = buffer.address
        assert not number or (buffer.address == address and [call.name for call in traced.calls] == calls)
        del traced.calls[:]
        if end == "free":
            buffer.free()
        elif end == "drop":
            del buffer
        else:
            buffer.free(buffer.stream)
        assert traced.calls == []
        del traced.calls[:]
    assert cache.statistics().misses == 1
    buffer = None  # type: ignore[assignment]


def test_a_buffer_dropped_while_its_stream_is_in_use(
    cache: sa.CachingAllocator, device: sa.Device, stream: sa.Stream, traced: Any
) -> None:
    """Its block waits for no event of the default stream, which is ordered after blocking streams."""
    buffer = cache.allocate(SIZE, stream)
    address = buffer.address
    stream._forbid_direct()
    del buffer
    stream._allow_direct()
    del traced.calls[:]
    cache.statistics()
    assert names(traced, "cuEventRecord") == [] and cache.allocate(SIZE, stream).address == address


def test_a_block_of_a_dropped_buffer_is_found_when_the_pool_runs_out(device: sa.Device, stream: sa.Stream) -> None:
    with sa.MemoryPool(device, max_size=32 << 20) as pool, device.create_stream() as other:
        cache = sa.CachingAllocator(pool)
        buffer = cache.allocate(20 << 20, stream)
        stream._forbid_direct()
        del buffer
        stream._allow_direct()
        pool.allocate(20 << 20, other).free()
        cache.close()


def test_the_default_stream_has_one_cache_whatever_its_handle(cache: sa.CachingAllocator, device: sa.Device) -> None:
    buffer = cache.allocate(SIZE, Null())
    address = buffer.address
    buffer.free()
    with cache.allocate(SIZE, device.default_stream) as again:
        assert again.address == address


def test_an_unowned_stream_has_no_cache(cache: sa.CachingAllocator, device: sa.Device, stream: sa.Stream) -> None:
    """It may end without notice, and the driver give its handle to another stream."""
    cache.allocate(SIZE, sa.Stream.of_handle(device, stream.handle, None)).free()
    assert cache.statistics()[4:7] == (0, 0, 1)  # in use, cached, misses


def test_kept_for_cached_memory(cache: sa.CachingAllocator, device: sa.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of library streams keeps the latest. The blocks of one that leaves it return to the pool first."""
    monkeypatch.setattr(library_streams, "MOST_KEPT", 2)
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    for _ in range(6):
        theirs = Theirs(device)
        alive.add(theirs)
        cache.allocate(SIZE, theirs).free()
    assert cache.statistics()[4:6] == (0, 2 * SIZE)
    gc.collect()
    assert len(alive) == 2
    with cache.allocate(SIZE, theirs) as buffer:
        for _ in range(2):
            cache.allocate(SIZE, Theirs(device)).free()
        assert cache.statistics().in_use == SIZE
        buffer.fill(3)  # it keeps its stream
        assert holds(buffer, 3)
        cache.allocate(SIZE, theirs).free()
    device.synchronize()
    assert cache.statistics()[4:6] == (0, 2 * SIZE)


@pytest.mark.parametrize("end", ["trim", "close", "out of memory"])
def test_blocks_of_a_stream_that_its_library_has_closed(device: sa.Device, gate: Gate, end: str) -> None:
    """They return once the device is idle, as nothing can be ordered after the stream's work."""
    with sa.MemoryPool(device, max_size=32 << 20) as pool, device.create_stream() as own:
        cache, theirs = sa.CachingAllocator(pool), Theirs(device)
        buffer = cache.allocate(20 << 20, theirs)
        cache.allocate(4 << 20, own).free()
        gate.hold(buffer.stream)
        buffer.fill(1)
        buffer.free()
        theirs.close()
        assert cache._state.flush()  # of the other stream
        threading.Timer(0.05, gate.open).start()
        if end == "out of memory":
            other = cache.allocate(20 << 20, own)
            other.fill(2)
            device.synchronize()
            assert holds(other, 2)
            other.free()
        getattr(cache, "trim" if end == "trim" else "close")()
        pool.statistics()
        device.synchronize()
        assert pool.statistics().used == 0
        cache.close()


def test_a_new_stream_with_the_handle_of_a_closed_one(cache: sa.CachingAllocator, device: sa.Device) -> None:
    first, second = Theirs(device), Theirs(device)
    with cache.allocate(SIZE, first) as buffer:
        cache.allocate(SIZE, first).free()
        handle, first.handle = first.handle, None
        second.close()
        second.handle = handle
        with cache.allocate(SIZE, second):
            assert cache.statistics().misses == 3  # no block of the first stream
        buffer.free(device.default_stream)
        assert buffer.freed


def test_events_are_few_and_used_again(cache: sa.CachingAllocator, device: sa.Device, traced: Any, gate: Gate) -> None:
    with device.create_stream() as loader, device.create_stream() as user:
        for held in (True, False):
            batches = [cache.allocate(SIZE, loader) for _ in range(MAX_RETURNING + 8)]
            if held:
                gate.hold(user)
            del traced.calls[:]
            for batch in batches:
                batch.free(user)
            del batch, batches
            made = [call.name for call in traced.calls]
            assert made.count("cuEventCreate") == MAX_RETURNING - (0 if held else Spares.most)
            if held:
                # The others return to the pool in the order of the stream.
                assert made.count("cuMemFreeAsync") == 8
                gate.open()
                assert executed(user)


@pytest.mark.parametrize("end", ["trim", "close", "close of the stream", "out of memory"])
def test_blocks_on_their_way_home_are_released_after_their_event(device: sa.Device, end: str, gate: Gate) -> None:
    """Nothing waits on the host: the home stream waits for the event before the free."""
    with (
        device.create_stream() as user,
        sa.MemoryPool(device, max_size=32 << 20) as pool,
        contextlib.ExitStack() as resources,
    ):
        loader = device.create_stream()
        cache = sa.CachingAllocator(pool)
        batch = cache.allocate(SIZE, loader)
        gate.hold(user)
        batch.free(user)
        assert cache.statistics().cached == SIZE
        if end == "trim":
            with pytest.warns(sa.PendingFreesWarning):
                cache.trim()
        elif end == "close":
            cache.close()
        elif end == "close of the stream":
            loader.close()
        else:
            pool.attributes.reuse_allow_internal_dependencies = False
            with pytest.raises(sa.OutOfMemoryError):
                cache.allocate(32 << 20, loader)
        assert pool.statistics().used == 0 and cache._state.blocks == {}
        resources.callback(loader.close)
        gate.open()
        device.synchronize()


def test_a_cache_that_ends_while_another_begins_on_its_stream(device: sa.Device, pool: sa.MemoryPool) -> None:
    """The other returns its memory when the stream is closed."""

    def make() -> tuple[sa.CachingAllocator, sa.CachingAllocator, sa.Stream]:
        ends, begins, stream = sa.CachingAllocator(pool), sa.CachingAllocator(pool), device.create_stream()
        ends.allocate(SIZE, stream).free()
        return ends, begins, stream

    both = interleaved(
        StreamCache.attempt, make, lambda made: made[0].close(), lambda made: made[1].allocate(SIZE, made[2]).free()
    )
    for _, begins, stream in both:
        stream.close()
        assert begins.statistics().used == 0
        begins.close()


@pytest.mark.parametrize("function", [StreamCache.take, StreamCache._find_fitting, StreamCache.size_class])
def test_a_stream_that_ends_while_another_thread_allocates_on_it(
    device: sa.Device, cache: sa.CachingAllocator, function: Callable[..., object]
) -> None:
    def make() -> sa.Stream:
        stream = device.create_stream()
        cache.allocate(3 * SIZE, stream).free()
        cache.trim()
        return stream

    def allocate(stream: sa.Stream) -> None:
        with contextlib.suppress(sa.ClosedError):
            cache.allocate(SIZE, stream)

    for stream in interleaved(function, make, allocate, sa.Stream.close):
        assert stream.closed
        device.synchronize()  # a buffer that is dropped on a closed stream is freed after it
        cache.trim()
        assert cache.statistics().used == 0


def test_two_threads_that_take_one_block(device: sa.Device, cache: sa.CachingAllocator) -> None:
    def make() -> tuple[sa.Stream, list[sa.Buffer]]:
        stream = device.create_stream()
        cache.allocate(2 * SIZE, stream).free()
        return stream, []

    def take(made: tuple[sa.Stream, list[sa.Buffer]]) -> None:
        made[1].append(cache.allocate(SIZE, made[0]))

    for _, (one, other) in interleaved(StreamCache.take, make, take, take):
        assert one.address != other.address


def test_a_stream_ends_while_a_block_returns(device: sa.Device, cache: sa.CachingAllocator, stream: sa.Stream) -> None:
    def make() -> tuple[sa.Buffer, sa.Stream]:
        home = device.create_stream()
        return cache.allocate(SIZE, home), home

    both = interleaved(
        sa.CachingAllocator._return_home, make, lambda made: made[0].free(stream), lambda made: made[1].close()
    )
    for buffer, _ in both:
        assert buffer.freed
        device.synchronize()
        assert cache.statistics().used == 0


# -- per-thread default streams, whose handle is another stream on each thread -----------------------------------------


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

    assert any(in_threads(second) == [True] for _ in range(500))
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
