"""Benchmark rows about virtual memory: growing a buffer, eviction."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import streamalloc as sa
from streamalloc import vmm
from streamalloc.cli.machine import KEEP_ALL, need_host_pool, need_virtual_memory
from streamalloc.cli.measuring import Bench, Measured, Row, Setup, Target, undone, value_of
from streamalloc.core.errors import size_text

STEPS = 16
"""Steps in which a buffer grows."""
STEP, STEP_SIMULATED = 64 << 20, 2 << 20
"""Bytes of a step."""
EVICTED, EVICTED_SIMULATED = 8 << 30, 32 << 20
"""Bytes evicted, at most; on a GPU an eighth of it with ``--quick``."""
PINNED = 2 << 30
"""Bytes of pinned memory, at most: enough to measure the copy rate."""


# --- growth ---------------------------------------------------------------------------------------------------------


class Raw:
    """Address range that is mapped step by step with the bindings' functions, results checked."""

    def __init__(self, bench: Bench, nbytes: int) -> None:
        self._driver = driver = bench.driver
        self._create, self._map, self._set = driver.cuMemCreate, driver.cuMemMap, driver.cuMemSetAccess
        self._nbytes = nbytes
        self._properties = sa.MemAllocationProp(location=bench.device.location).to_driver()
        self._descriptors = [sa.MemAccessDesc(bench.device.location, sa.MemAccess.READWRITE).to_driver()]
        self._handles: list[Any] = []
        self._start = self._end = int(value_of(driver.cuMemAddressReserve(STEPS * nbytes, 0, 0, 0)))

    def grow(self) -> None:
        """Create a step of memory, map it and set access."""
        self._handles.append(value_of(self._create(self._nbytes, self._properties, 0)))
        value_of(self._map(self._end, self._nbytes, 0, self._handles[-1], 0))
        value_of(self._set(self._end, self._nbytes, self._descriptors, 1))
        self._end += self._nbytes

    def close(self) -> None:
        """Wait for the device, unmap and release."""
        value_of(self._driver.cuCtxSynchronize())
        if self._end > self._start:
            value_of(self._driver.cuMemUnmap(self._start, self._end - self._start))
        for handle in self._handles:
            value_of(self._driver.cuMemRelease(handle))
        value_of(self._driver.cuMemAddressFree(self._start, STEPS * self._nbytes))


class Ours:
    """The library's buffer."""

    def __init__(self, bench: Bench, nbytes: int) -> None:
        buffer = vmm.GrowableBuffer(bench.device, STEPS * nbytes)
        self.grow, self.close = functools.partial(buffer.grow, nbytes), buffer.close


class Copied:
    """Memory that grows by allocating, copying and freeing."""

    def __init__(self, bench: Bench, nbytes: int) -> None:
        self._driver, self._stream, self._step = bench.driver, bench.raw_stream, nbytes
        self._held: Any = None
        self._size = 0

    def grow(self) -> None:
        """Allocate a step more, copy, and free the old memory."""
        larger = value_of(self._driver.cuMemAlloc(self._size + self._step))
        if self._held is not None:
            value_of(self._driver.cuMemcpyAsync(larger, self._held, self._size, self._stream))
            value_of(self._driver.cuStreamSynchronize(self._stream))
            self.close()
        self._held, self._size = larger, self._size + self._step

    def close(self) -> None:
        """Free the memory."""
        if self._held is not None:
            value_of(self._driver.cuMemFree(self._held))
            self._held = None


def _grown(kind: Callable[[Bench, int], Any]) -> Setup:
    """Return the time to grow from nothing in steps; the release is not timed."""

    def setup(bench: Bench) -> Measured:
        new = functools.partial(kind, bench, STEP_SIMULATED if bench.chosen.is_simulated else STEP)
        memory = new()
        bench.resources.callback(lambda: memory.close())

        def grow() -> None:
            for _ in range(STEPS):
                memory.grow()

        def renew() -> None:
            nonlocal memory
            memory.close()
            memory = new()

        return undone(grow, renew)

    return setup


# --- evict and restore ----------------------------------------------------------------------------------------------


def _pinned_copy(bench: Bench, *, to_host: bool) -> Measured:
    nbytes = bench.common
    size = min(nbytes, PINNED)
    driver, stream = bench.driver, bench.raw_stream
    pinned = value_of(driver.cuMemHostAlloc(size, 0))
    bench.resources.callback(driver.cuMemFreeHost, pinned)
    buffer = bench.resources.enter_context(vmm.GrowableBuffer(bench.device, size, size, stream=bench.stream))
    ends = [driver.CUdeviceptr(int(pinned)), driver.CUdeviceptr(buffer.address)]
    target, source = ends if to_host else reversed(ends)

    def copy() -> None:
        # As many times as it takes to copy what is evicted.
        for _ in range(nbytes // size):
            value_of(driver.cuMemcpyAsync(target, source, size, stream))
        value_of(driver.cuStreamSynchronize(stream))

    return undone(copy, lambda: None, nbytes)


def _eviction(bench: Bench, *, restore: bool, keep: bool) -> Measured:
    """Evict or restore a buffer, with or without a copy in a warm host pool."""
    location = need_host_pool(bench.device)
    nbytes, keep_open = bench.common, bench.resources.enter_context
    pool = keep_open(sa.MemoryPool(location, release_threshold=KEEP_ALL))
    pool.set_access(bench.device, sa.MemAccess.READWRITE)
    buffer = keep_open(vmm.GrowableBuffer(bench.device, nbytes, nbytes, stream=bench.stream))
    buffer.fill(0x5A)

    def evict() -> None:
        buffer.evict(pool if keep else None)

    def back() -> None:
        buffer.restore()
        bench.stream.synchronize()

    if restore:
        evict()
    return undone(*((back, evict) if restore else (evict, back)), nbytes if keep else 0)


def _need_evicted(bench: Bench) -> None:
    """Choose the bytes to evict. If device or host lack memory, they are less than configured."""
    need_virtual_memory(bench.device)
    size = EVICTED_SIMULATED if bench.chosen.is_simulated else EVICTED // (8 if bench.quick else 1)
    # An eighth of the free memory: six variants have device buffers, and some have host copies.
    spare = min(bench.device.memory_info().free, _free_host_memory()) // 8
    while size > spare and size > EVICTED_SIMULATED:
        size //= 2
    bench.common = size


def _free_host_memory() -> int:
    """Return the bytes of host memory available to new programs."""
    found = re.search(r"^MemAvailable: *(\d+) kB$", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


RAW = "raw calls, results checked"
OURS = "streamalloc"
TO_PINNED = "copy from device to pinned memory"
FROM_PINNED = "copy from pinned memory to device"
EVICT = "streamalloc evict, copy in a warm host pool"
RESTORE = "streamalloc restore from it"

ROWS = (
    Row(
        "growth",
        f"Grow a buffer by {STEPS} steps of {size_text(STEP)}",
        {RAW: _grown(Raw), OURS: _grown(Ours), "cuMemAlloc, copy and cuMemFree": _grown(Copied)},
        (Target(OURS, 1.1, RAW),),
        most=1,
        rounds=(24, 6),
        need=lambda bench: need_virtual_memory(bench.device),
    ),
    Row(
        "eviction",
        "Evict and restore a buffer, beside copies of the same size",
        {
            TO_PINNED: functools.partial(_pinned_copy, to_host=True),
            FROM_PINNED: functools.partial(_pinned_copy, to_host=False),
            EVICT: functools.partial(_eviction, restore=False, keep=True),
            RESTORE: functools.partial(_eviction, restore=True, keep=True),
            "streamalloc evict, without a copy": functools.partial(_eviction, restore=False, keep=False),
            "streamalloc restore, without a copy": functools.partial(_eviction, restore=True, keep=False),
        },
        (Target(EVICT, 1.25, TO_PINNED), Target(RESTORE, 1.25, FROM_PINNED)),
        most=1,
        unit="ms",
        rounds=(9, 3),
        bases={RESTORE: FROM_PINNED},
        need=_need_evicted,
    ),
)
