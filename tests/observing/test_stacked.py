"""Allocators and observers over each other: each allocation and free of a program is one, and exports are read back."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import traces
from tests.support import MiB

Program = Callable[[sa.Device, sa.MemoryPool, sa.CachingAllocator], list[int]]


def _allocate(source: sa.MemoryPool | sa.CachingAllocator, device: sa.Device) -> list[int]:
    sizes = [4096 * (number + 1) for number in range(12)] + [4096] * 6 + [0, 20 * MiB]
    with device.create_stream() as stream:
        held = [source.allocate(size, stream) for size in sizes[:12]]
        for buffer in held[::2]:
            buffer.free()
        held = held[1::2] + [source.allocate(size, stream) for size in sizes[12:]]
        while held:
            held.pop().free()
    return [*sizes[:18], 20 * MiB]


def _on_both(device: sa.Device, pool: sa.MemoryPool, cache: sa.CachingAllocator) -> list[int]:
    return _allocate(cache, device) + _allocate(pool, device)


def _between_streams(device: sa.Device, pool: sa.MemoryPool, cache: sa.CachingAllocator) -> list[int]:
    with device.create_stream() as one, device.create_stream() as two:
        cache.allocate(5000, one).free(two)
        cache.allocate(5000, two).free(one)
        cache.allocate(5000, two).free(one)
        cache.allocate(5000, one).free(device.default_stream)
        cache.allocate(5000, device.default_stream).free()
    return [5000] * 5


def _dropped_and_given_back(device: sa.Device, pool: sa.MemoryPool, cache: sa.CachingAllocator) -> list[int]:
    for size in (600, 5000, 600):
        stream = device.create_stream()
        cache.allocate(size, stream)
        cache.allocate(2 * size, stream).free()
        cache.trim()
        cache.allocate(size, stream)
        del stream
        gc.collect()
        device.synchronize()
    return [size for base in (600, 5000, 600) for size in (base, 2 * base, base)]


PROGRAMS: list[Program] = [_on_both, _between_streams, _dropped_and_given_back]
OBSERVED: dict[str, Callable[[sa.Device, sa.MemoryPool, sa.CachingAllocator], tuple[Any, ...]]] = {
    "the cache": lambda device, pool, cache: (cache,),
    "the cache and its pool": lambda device, pool, cache: (pool, cache),
    "the device": lambda device, pool, cache: (device,),
    "everything": lambda device, pool, cache: (),
}


def read_back(observer: sa.Observer, folder: Path) -> list[traces.Trace]:
    """Exports of observers that can be replayed."""
    observer.save_rmm(folder / "rmm.csv")
    observer.save_pytorch(folder / "torch.pickle")
    return [traces.load(folder / "rmm.csv"), traces.load(folder / "torch.pickle")]


@pytest.mark.parametrize("observed", OBSERVED)
@pytest.mark.parametrize("program", PROGRAMS)
def test_each_allocation_is_one(
    device: sa.Device, pool: sa.MemoryPool, program: Program, observed: str, tmp_path: Path
) -> None:
    allocated: list[int] = []
    freed: list[int] = []
    cache = sa.CachingAllocator(pool)
    what = OBSERVED[observed](device, pool, cache)
    hooks: Any = {
        "on_allocate": lambda one: allocated.append(one.nbytes),
        "on_free": lambda one: freed.append(one.nbytes),
    }
    with sa.observe(pool) as beside, sa.observe(*what, **hooks) as observer:
        asked = program(device, pool, cache)
        device.synchronize()
        observer.assert_nothing_left()
        assert Counter(allocated) == Counter(freed) == Counter(asked)
        cache.close()
        device.synchronize()
        device.synchronize()
        assert beside.live == ()
    for watching in (observer, beside):
        alive: Counter[int] = Counter()
        for one in watching.history:
            alive[one.allocation.address] += {"allocate": 1, "free": -1}[one.action]
            assert alive[one.allocation.address] in (0, 1)
        for trace in read_back(watching, tmp_path):
            assert trace.allocations * 2 == len(trace.events) == len(watching.history) and trace.skipped == {}
            assert traces.replay(trace, pool, device, rounds=1).peak_used == trace.peak
    assert len(observer.history) == 2 * len(asked)


def test_a_limit_counts_what_was_asked_for(device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream) -> None:
    with sa.CachingAllocator(pool) as cache, sa.observe(cache, limit=5000):
        cache.allocate(5000, stream).free()
        with pytest.raises(sa.OutOfMemoryError):
            cache.allocate(5001, stream)


def test_what_the_driver_refuses_to_take_back_was_freed_all_the_same(machine: Any, tmp_path: Path) -> None:
    faulty = sd.faulty(machine, "cuMemFreeAsync", result="CUDA_ERROR_UNKNOWN")
    device = sa.Device(0, driver=faulty)
    with (
        device.create_stream() as stream,
        sa.MemoryPool(device) as pool,
        sa.CachingAllocator(pool) as cache,
        sa.observe(cache) as observer,
    ):
        cache.allocate(5000, stream).free()
        with pytest.raises(sa.CudaError):
            cache.trim()
        assert faulty.failed == ["cuMemFreeAsync"]
        assert observer.live == () and len(observer.history) == 2
        cache.allocate(5000, stream).free()
        assert [trace.allocations for trace in read_back(observer, tmp_path)] == [2, 2]


def test_memory_that_other_code_has_freed(machine: Any, device: sa.Device, stream: sa.Stream, tmp_path: Path) -> None:
    with sa.MemoryPool(device) as pool, sa.observe(pool) as observer:
        lost = pool.allocate(4096, stream)
        machine.cuMemFreeAsync(lost.address, machine.CUstream(stream.handle))
        again = pool.allocate(4096, stream)
        assert again.address == lost.address and observer.nbytes == 4096
        again.free()
        lost._ptr = None  # it is gone
        assert [trace.allocations for trace in read_back(observer, tmp_path)] == [2, 2]
