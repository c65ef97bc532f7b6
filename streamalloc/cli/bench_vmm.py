"""Benchmark rows about virtual memory: growing and shrinking a buffer, eviction, symmetric memory."""

from __future__ import annotations

import contextlib
import functools
import re
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import streamalloc as sa
from streamalloc import vmm
from streamalloc.cli.choice import KEEP_ALL
from streamalloc.cli.measuring import Bench, Call, Measured, Row, Setup, Target, step_times, value_of
from streamalloc.cli.needs import need_host_pool, need_peers, need_virtual_memory
from streamalloc.core.errors import size_text
from streamalloc.multicast import SymmetricMemory

RAW = "raw calls, results checked"
OURS = "streamalloc"
STEPS = 16
"""Steps in which a buffer grows."""
STEP = 64 << 20
"""Bytes of a step: 64 MiB."""
STEP_SIMULATED = 2 << 20
"""Bytes of a step on the simulated driver: 2 MiB."""
EVICTED_SIMULATED = 32 << 20
"""Bytes evicted on the simulated driver, at most: 32 MiB."""
PINNED = 2 << 30
"""Bytes of pinned memory, at most: enough to measure the copy rate."""
SYMMETRIC = 1 << 20
"""Bytes of symmetric memory on each device: 1 MiB."""


def _need(bench: Bench) -> None:
    need_virtual_memory(bench.device)


# --- growth ---------------------------------------------------------------------------------------------------------


class RawRange:
    """Address range that is mapped step by step with the bindings' functions, results checked."""

    def __init__(self, bench: Bench, count: int, nbytes: int) -> None:
        self._driver = driver = bench.driver
        self._create, self._map, self._set = driver.cuMemCreate, driver.cuMemMap, driver.cuMemSetAccess
        self._nbytes = nbytes
        self._size = count * nbytes
        self._properties = sa.MemAllocationProp(location=bench.device.location).to_driver()
        self._descriptors = [sa.MemAccessDesc(bench.device.location, sa.MemAccess.READWRITE).to_driver()]
        self._handles: list[Any] = []
        self._start = self._end = int(value_of(driver.cuMemAddressReserve(self._size, 0, 0, 0)))

    def grow(self) -> None:
        """Create a step of memory, map it and set access."""
        self._handles.append(value_of(self._create(self._nbytes, self._properties, 0)))
        value_of(self._map(self._end, self._nbytes, 0, self._handles[-1], 0))
        value_of(self._set(self._end, self._nbytes, self._descriptors, 1))
        self._end += self._nbytes

    def shrink(self, keep: int = 0) -> None:
        """Wait for the device, then unmap and release all but ``keep`` steps."""
        value_of(self._driver.cuCtxSynchronize())
        left = self._start + keep * self._nbytes
        if self._end > left:
            value_of(self._driver.cuMemUnmap(left, self._end - left))
        self._end = left
        for handle in self._handles[keep:]:
            value_of(self._driver.cuMemRelease(handle))
        del self._handles[keep:]

    def close(self) -> None:
        """Release everything."""
        self.shrink()
        value_of(self._driver.cuMemAddressFree(self._start, self._size))


def raw_growth(bench: Bench, count: int, nbytes: int) -> list[float]:
    """Grow with raw calls; return the microseconds of each step."""
    with contextlib.closing(RawRange(bench, count, nbytes)) as memory:
        return step_times(memory.grow, count)


def our_growth(bench: Bench, count: int, nbytes: int) -> list[float]:
    """Grow the library's buffer; return the microseconds of each step."""
    with vmm.GrowableBuffer(bench.device, count * nbytes) as buffer:
        return step_times(functools.partial(buffer.grow, nbytes), count)


def copied_growth(bench: Bench, count: int, nbytes: int) -> list[float]:
    """Grow by allocating, copying and freeing; return the microseconds of each step."""
    driver, stream = bench.driver, bench.raw_stream
    held: Any = None
    size = 0

    def step() -> None:
        nonlocal held, size
        larger = value_of(driver.cuMemAlloc(size + nbytes))
        if held is not None:
            value_of(driver.cuMemcpyAsync(larger, held, size, stream))
            value_of(driver.cuStreamSynchronize(stream))
            value_of(driver.cuMemFree(held))
        held, size = larger, size + nbytes

    try:
        return step_times(step, count)
    finally:
        if held is not None:
            driver.cuMemFree(held)


def _grown(grow: Callable[[Bench, int, int], list[float]]) -> Setup:
    """Return the microseconds to grow from nothing in steps; the release is not timed."""

    def setup(bench: Bench) -> Measured:
        extra: dict[str, float] = {}

        def measure(number: int) -> float:
            found = grow(bench, STEPS, _step(bench))
            extra.update(first=found[0], step=sorted(found)[len(found) // 2], last=found[-1])
            return sum(found)

        return Measured(measure, extra)

    return setup


def _step(bench: Bench) -> int:
    return STEP_SIMULATED if bench.chosen.is_simulated else STEP


def raw_regrowth(bench: Bench) -> Call:
    """Shrink by half and grow again with raw calls."""
    memory = bench.resources.enter_context(contextlib.closing(RawRange(bench, STEPS, _step(bench))))
    return _regrowth(memory.grow, functools.partial(memory.shrink, STEPS // 2))


def our_regrowth(bench: Bench, *, release: bool) -> Call:
    """Shrink by half and grow again with the library's buffer, which releases the memory or keeps it."""
    nbytes, keep = _step(bench), bench.resources.enter_context
    buffer = keep(vmm.GrowableBuffer(bench.device, STEPS * nbytes, stream=bench.stream))
    shrink = functools.partial(buffer.resize, STEPS // 2 * nbytes, release=release)
    return _regrowth(functools.partial(buffer.grow, nbytes), shrink)


def _regrowth(grow: Call, shrink: Call) -> Call:
    """Grow to the full size; return a function that shrinks by half and grows again."""
    for _ in range(STEPS):
        grow()

    def again() -> None:
        shrink()
        for _ in range(STEPS // 2):
            grow()

    return again


# --- evict and restore ----------------------------------------------------------------------------------------------


def _moving(call: Call, undo: Call, nbytes: int, scale: float = 1.0) -> Measured:
    """Return the milliseconds of a call, and its GB per second; ``undo`` reverses it untimed.

    ``scale`` multiplies the time, if the call moved fewer bytes than ``nbytes``.
    """
    extra: dict[str, float] = {}

    def measure(number: int) -> float:
        seconds = timeit.timeit(call, number=1) * scale
        undo()
        if nbytes:
            extra["gb_per_s"] = nbytes / seconds / 1e9
        return seconds * 1e3

    return Measured(measure, extra)


def _pinned_copy(bench: Bench, *, to_host: bool) -> Measured:
    nbytes = _evicted(bench)
    size = min(nbytes, PINNED)
    driver, stream = bench.driver, bench.raw_stream
    pinned = value_of(driver.cuMemHostAlloc(size, 0))
    bench.resources.callback(driver.cuMemFreeHost, pinned)
    buffer = bench.resources.enter_context(vmm.GrowableBuffer(bench.device, size, size, stream=bench.stream))
    ends = [driver.CUdeviceptr(int(pinned)), driver.CUdeviceptr(buffer.address)]
    target, source = ends if to_host else reversed(ends)

    def copy() -> None:
        value_of(driver.cuMemcpyAsync(target, source, size, stream))
        value_of(driver.cuStreamSynchronize(stream))

    return _moving(copy, lambda: None, nbytes, nbytes / size)


def _eviction(bench: Bench, *, restore: bool, keep: bool) -> Measured:
    """Evict or restore a buffer, with or without a copy in a warm host pool."""
    location = need_host_pool(bench.device)
    nbytes, keep_open = _evicted(bench), bench.resources.enter_context
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
    return _moving(*((back, evict) if restore else (evict, back)), nbytes if keep else 0)


def _evicted(bench: Bench) -> int:
    """Return the bytes to evict. If device or host lack memory, this is less than configured."""
    size = bench.effort.evicted
    if bench.chosen.is_simulated:
        return min(size, EVICTED_SIMULATED)
    # An eighth of the free memory: six variants have device buffers, and some have host copies.
    spare = min(bench.device.memory_info().free, _free_host_memory()) // 8
    while size > spare and size > 32 << 20:
        size //= 2
    return size


def _free_host_memory() -> int:
    """Return the bytes of host memory available to new programs."""
    found = re.search(r"^MemAvailable: *(\d+) kB$", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


# --- symmetric memory -----------------------------------------------------------------------------------------------


def _two_devices(bench: Bench) -> list[sa.Device]:
    need_virtual_memory(bench.device)
    return need_peers(bench.device.driver)[:2]


def raw_symmetric(bench: Bench) -> Any:
    """Create and release the same mappings, signal pads and tables with raw calls, results checked."""
    driver, devices = bench.driver, _two_devices(bench)
    properties = [sa.MemAllocationProp(location=device.location) for device in devices]
    granule = max(vmm.PhysicalMemory.granularity(one, driver=bench.device.driver) for one in properties)
    # 8 KiB more, for signal pad and tables.
    size = -(-(SYMMETRIC + 8192) // granule) * granule
    made = [one.to_driver() for one in properties]
    access = [sa.MemAccessDesc(device.location, sa.MemAccess.READWRITE).to_driver() for device in devices]
    streams = [driver.CUstream(bench.resources.enter_context(one.create_stream()).handle) for one in devices]
    table = (1).to_bytes(16, "little")

    def once() -> None:
        handles = [value_of(driver.cuMemCreate(size, one, 0)) for one in made]
        start = int(value_of(driver.cuMemAddressReserve(size * 2, 0, 0, 0)))
        for at, handle in enumerate(handles):
            value_of(driver.cuMemMap(start + at * size, size, 0, handle, 0))
        value_of(driver.cuMemSetAccess(start, size * 2, access, 2))
        for at, device in enumerate(devices):
            with device.current():
                pad = start + at * size + SYMMETRIC
                value_of(driver.cuMemsetD8Async(pad, 0, 4496, streams[at]))
                for number in range(2):
                    value_of(driver.cuMemcpyHtoDAsync(pad + 4608 + 64 * number, table, 16, streams[at]))
                value_of(driver.cuStreamSynchronize(streams[at]))
        for device in devices:
            with device.current():
                value_of(driver.cuCtxSynchronize())
        value_of(driver.cuMemUnmap(start, size * 2))
        for handle in handles:
            value_of(driver.cuMemRelease(handle))
        value_of(driver.cuMemAddressFree(start, size * 2))

    return once


def our_symmetric(bench: Bench) -> Any:
    """Create and close it with the library, without multicast."""
    devices = _two_devices(bench)
    return lambda: SymmetricMemory.local(devices, SYMMETRIC, multicast=False).close()


TO_PINNED = "copy from device to pinned memory"
FROM_PINNED = "copy from pinned memory to device"
EVICT = "streamalloc evict, copy in a warm host pool"
RESTORE = "streamalloc restore from it"
KEPT = "streamalloc, release=False"
COPIED = "cuMemAlloc, copy and cuMemFree"

ROWS = (
    Row(
        "growth",
        f"Grow a buffer by {STEPS} steps of {size_text(STEP)}",
        {RAW: _grown(raw_growth), OURS: _grown(our_growth), COPIED: _grown(copied_growth)},
        (Target(OURS, 1.1, RAW),),
        most=1,
        rounds="growths",
        need=_need,
    ),
    Row(
        "regrowth",
        f"Shrink a buffer of {STEPS} steps by half, and grow it again",
        {
            RAW: raw_regrowth,
            OURS: functools.partial(our_regrowth, release=True),
            KEPT: functools.partial(our_regrowth, release=False),
        },
        (Target(KEPT, 0.5, RAW),),
        most=1,
        rounds="growths",
        need=_need,
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
        rounds="evictions",
        bases={RESTORE: FROM_PINNED},
        need=_need,
    ),
    Row(
        "symmetric",
        f"Create and close SymmetricMemory.local of {size_text(SYMMETRIC)} on two devices",
        {RAW: raw_symmetric, OURS: our_symmetric},
        (Target(OURS, 1.5, RAW),),
        most=20,
        need=_two_devices,
    ),
)
