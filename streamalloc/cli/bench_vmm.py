"""The benchmark's sections about virtual memory: growth in steps and to the whole device, evict and restore."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import streamalloc as sa
from streamalloc import vmm
from streamalloc.cli.choice import host_pool_location
from streamalloc.cli.measuring import KEEP_ALL, Bench, Call, in_turns, judged, ratio, spread, step_times, value_of
from streamalloc.cli.terminal import Terminal, mib

__all__ = ["SECTIONS"]

STEPS = 16
STEP = 64 << 20
# A simulated driver copies with the CPU.
STEP_SIMULATED = 2 << 20
DEVICE_STEP = 1 << 30
# Of the device, left to others and to the driver.
DEVICE_RESERVE = 4 << 30
# Enough to find the speed of copies.
PINNED = 2 << 30

Way = Callable[[Bench, int, int], list[float]]
"""Grows by a number of steps of so many bytes; answers the microseconds of each."""

NO_MAPPING = {"unavailable": "this device's memory cannot be mapped by hand"}


# --- growth ---------------------------------------------------------------------------------------------------------


def raw_growth(bench: Bench, count: int, nbytes: int) -> list[float]:
    """Create, map and set access with the bindings, results checked; microseconds of each step."""
    driver = bench.driver
    create, map_, set_access = driver.cuMemCreate, driver.cuMemMap, driver.cuMemSetAccess
    location = driver.CUmemLocation()
    location.type, location.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, bench.device.ordinal
    properties, access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
    properties.type, properties.location = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, location
    access.location, access.flags = location, driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    descriptors = [access]
    handles: list[Any] = []
    start = int(value_of(driver.cuMemAddressReserve(count * nbytes, 0, 0, 0)))
    end = start

    def step() -> None:
        nonlocal end
        error, handle = create(nbytes, properties, 0)
        if error:
            raise RuntimeError(error)
        handles.append(handle)
        (error,) = map_(end, nbytes, 0, handle, 0)
        if error:
            raise RuntimeError(error)
        (error,) = set_access(end, nbytes, descriptors, 1)
        if error:
            raise RuntimeError(error)
        end += nbytes

    try:
        return step_times(step, count)
    finally:
        if end > start:
            driver.cuMemUnmap(start, end - start)
        for handle in handles:
            driver.cuMemRelease(handle)
        driver.cuMemAddressFree(start, count * nbytes)


def our_growth(bench: Bench, count: int, nbytes: int) -> list[float]:
    """Grow one buffer; microseconds of each step."""
    with vmm.GrowableBuffer(bench.device, count * nbytes) as buffer:
        return step_times(lambda: buffer.grow(nbytes), count)


def copied_growth(bench: Bench, count: int, nbytes: int) -> list[float]:
    """Allocate anew, copy, and free the old memory; microseconds of each step."""
    driver, stream = bench.driver, bench.raw_stream
    held: Any = None
    size = 0

    def step() -> None:
        nonlocal held, size
        larger = value_of(driver.cuMemAlloc(size + nbytes))
        if held is not None:
            (error,) = driver.cuMemcpyAsync(larger, held, size, stream)
            if error:
                raise RuntimeError(error)
            (error,) = driver.cuStreamSynchronize(stream)
            if error:
                raise RuntimeError(error)
            (error,) = driver.cuMemFree(held)
            if error:
                raise RuntimeError(error)
        held, size = larger, size + nbytes

    try:
        return step_times(step, count)
    finally:
        if held is not None:
            driver.cuMemFree(held)


def _grown(bench: Bench, ways: Sequence[Way], count: int, nbytes: int, rounds: int) -> list[list[list[float]]]:
    """Microseconds of each step, by way and round."""
    return in_turns([functools.partial(way, bench, count, nbytes) for way in ways], rounds)


def measure_growth(bench: Bench) -> dict[str, Any]:
    """Growing a buffer in steps: raw calls, the library, and copying into larger memory."""
    if not bench.device.supports.virtual_memory_management:
        return NO_MAPPING
    simulated = bench.chosen.is_simulated
    nbytes = STEP_SIMULATED if simulated else STEP
    ways: tuple[Way, ...] = (raw_growth, our_growth, copied_growth)
    raw, ours, copied = (
        [sum(steps) for steps in runs] for runs in _grown(bench, ways, STEPS, nbytes, bench.effort.growths)
    )
    rows: list[dict[str, Any]] = [
        {"name": name, **spread(times), "ratio_to_raw": ratio(times, raw)}
        for name, times in (
            ("raw calls, results checked", raw),
            ("streamalloc grow", ours),
            ("cuMemAlloc, copy and cuMemFree", copied),
        )
    ]
    result: dict[str, Any] = {
        "steps": STEPS,
        "step_bytes": nbytes,
        "rows": rows,
        "times_faster_than_copying": ratio(copied, ours),
    }
    if not simulated:
        rows[1]["target_ratio"] = 1.1
        result["target_times_faster"] = 10
    return result


def measure_whole_device(bench: Bench) -> dict[str, Any]:
    """Growing a buffer to nearly all memory that is free; whether its size so far makes a step slower."""
    if not bench.device.supports.virtual_memory_management:
        return NO_MAPPING
    count = (bench.device.memory_info().free - DEVICE_RESERVE) // DEVICE_STEP
    if count < 2:
        return {"unavailable": f"less than {mib(DEVICE_RESERVE + 2 * DEVICE_STEP)} of the device's memory are free"}
    found = _grown(bench, (raw_growth, our_growth), count, DEVICE_STEP, bench.effort.whole_devices)
    raw = [sum(steps) for steps in found[0]]
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            **spread([sum(steps) for steps in runs]),
            "first_us": statistics.median(steps[0] for steps in runs),
            "step_us": statistics.median(statistics.median(steps) for steps in runs),
            "last_us": statistics.median(steps[-1] for steps in runs),
            "ratio_to_raw": ratio([sum(steps) for steps in runs], raw),
        }
        for name, runs in zip(("raw calls, results checked", "streamalloc grow"), found, strict=True)
    ]
    if not bench.chosen.is_simulated:
        rows[1]["target_ratio"] = 1.1
    return {"steps": count, "step_bytes": DEVICE_STEP, "rows": rows}


# --- evict and restore ----------------------------------------------------------------------------------------------


def measure_eviction(bench: Bench) -> dict[str, Any]:
    """Evicting and restoring a buffer, beside copies between the device and pinned memory in the same rounds."""
    if not bench.device.supports.virtual_memory_management:
        return NO_MAPPING
    location = host_pool_location(bench.device)
    if location is None:
        return {"unavailable": "there are no pools in host memory here"}
    nbytes = _fitting(bench)
    pinned_bytes = min(nbytes, PINNED)
    driver, stream = bench.driver, bench.stream
    pinned = value_of(driver.cuMemHostAlloc(pinned_bytes, 0))
    try:
        with (
            sa.MemoryPool(location, release_threshold=KEEP_ALL) as pool,
            vmm.GrowableBuffer(bench.device, nbytes, nbytes, stream=stream) as buffer,
        ):
            pool.set_access(bench.device, sa.MemAccess.READWRITE)
            buffer.fill(0x5A)
            host, on_device = driver.CUdeviceptr(int(pinned)), driver.CUdeviceptr(buffer.address)

            def copy(target: Any, source: Any) -> None:
                (error,) = driver.cuMemcpyAsync(target, source, pinned_bytes, bench.raw_stream)
                if error:
                    raise RuntimeError(error)
                stream.synchronize()

            def restore() -> None:
                buffer.restore()
                stream.synchronize()

            seconds = _rounds(
                (
                    lambda: copy(host, on_device),
                    lambda: copy(on_device, host),
                    lambda: buffer.evict(pool),
                    restore,
                    buffer.evict,
                    restore,
                ),
                bench.effort.evictions,
            )
    finally:
        driver.cuMemFreeHost(pinned)
    return {"bytes": nbytes, "pinned_bytes": pinned_bytes, "rows": _eviction_rows(bench, seconds, nbytes, pinned_bytes)}


def _rounds(calls: Sequence[Call], rounds: int) -> list[list[float]]:
    """Seconds that each of some calls takes, by call and round; always one after the other, and once beforehand.

    The first round fills the pool, and touches the memory for the first time.
    """
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 1):
        for at, call in enumerate(calls):
            start = time.perf_counter()
            call()
            times[at].append(time.perf_counter() - start)
    return [values[1:] for values in times]


def _eviction_rows(
    bench: Bench, seconds: Sequence[Sequence[float]], nbytes: int, pinned_bytes: int
) -> list[dict[str, Any]]:
    rates = [[pinned_bytes / one / 1e9 for one in values] for values in seconds[:2]]
    rates += [[nbytes / one / 1e9 for one in values] for values in seconds[2:4]]
    rows: list[dict[str, Any]] = []
    for at, name in enumerate(
        (
            "copy from device to pinned memory",
            "copy from pinned memory to device",
            "evict, copy in a warm host pool",
            "restore from it",
            "evict, bytes given up",
            "restore without them",
        )
    ):
        row: dict[str, Any] = {"name": name, "ms": statistics.median(seconds[at]) * 1e3}
        if at < len(rates):
            row["gb_per_s"] = statistics.median(rates[at])
        if at in (2, 3):
            row["ratio_to_pinned"] = ratio(rates[at], rates[at - 2])
            if not bench.chosen.is_simulated:
                row["target_ratio"] = 0.8
        rows.append(row)
    return rows


def _fitting(bench: Bench) -> int:
    """How large a buffer to evict: as the effort says, unless device or host have less to spare."""
    if bench.chosen.is_simulated:
        return bench.effort.evicted_simulated
    size = bench.effort.evicted
    spare = min(bench.device.memory_info().free, _free_host_memory()) // 2
    while size > spare and size > 32 << 20:
        size //= 2
    return size


def _free_host_memory() -> int:
    """How many bytes of host memory there are for new programs."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) << 10
    return 0


# --- how it is shown ------------------------------------------------------------------------------------------------


def _ratio_and_target(terminal: Terminal, row: dict[str, Any]) -> tuple[str, str]:
    shown = f"{row['ratio_to_raw']:.2f}"
    if "target_ratio" not in row:
        return shown, ""
    target = row["target_ratio"]
    return judged(terminal, shown, row["ratio_to_raw"] <= target), f"<= {target:g} x raw"


def _missing(terminal: Terminal, result: dict[str, Any]) -> bool:
    if "unavailable" in result:
        terminal.paragraph(f"not measured: {result['unavailable']}")
    return "unavailable" in result


def show_growth(terminal: Terminal, result: dict[str, Any]) -> None:
    """Growth in steps."""
    of = f" by {result['steps']} x {mib(result['step_bytes'])}" if "steps" in result else ""
    terminal.heading(f"Grow a buffer{of}")
    if _missing(terminal, result):
        return
    terminal.table(
        (
            (
                row["name"],
                f"{row['median_us']:,.0f}",
                f"{row['p10_us']:,.0f}",
                f"{row['p90_us']:,.0f}",
                *_ratio_and_target(terminal, row),
            )
            for row in result["rows"]
        ),
        header=("microseconds", "median", "p10", "p90", "/ raw", "target"),
        align="lrrrrl",
    )
    times = result["times_faster_than_copying"]
    shown, target = f"{times:.1f}", ""
    if "target_times_faster" in result:
        shown = judged(terminal, shown, times >= result["target_times_faster"])
        target = f" (target: >= {result['target_times_faster']})"
    terminal.line(f"  growing is {shown} times as fast as copying{target}")


def show_whole_device(terminal: Terminal, result: dict[str, Any]) -> None:
    """Growth to the whole device."""
    of = f", {result['steps']} x {mib(result['step_bytes'])}" if "steps" in result else ""
    terminal.heading(f"Grow a buffer to nearly all free memory of the device{of}")
    if _missing(terminal, result):
        return
    terminal.table(
        (
            (
                row["name"],
                f"{row['median_us']:,.0f}",
                f"{row['first_us']:,.1f}",
                f"{row['step_us']:,.1f}",
                f"{row['last_us']:,.1f}",
                *_ratio_and_target(terminal, row),
            )
            for row in result["rows"]
        ),
        header=("microseconds", "in all", "first step", "median step", "last step", "/ raw", "target"),
        align="lrrrrrl",
    )


def show_eviction(terminal: Terminal, result: dict[str, Any]) -> None:
    """Evict and restore."""
    of = f" {mib(result['bytes'])}" if "bytes" in result else ""
    terminal.heading(f"Evict and restore{of}")
    if _missing(terminal, result):
        return
    terminal.table(
        (_shown_eviction(terminal, row) for row in result["rows"]),
        header=("", "ms", "GB/s", "/ pinned", "target"),
        align="lrrrl",
    )


def _shown_eviction(terminal: Terminal, row: dict[str, Any]) -> tuple[str, ...]:
    rate = f"{row['gb_per_s']:.1f}" if "gb_per_s" in row else ""
    times, target = "", ""
    if "ratio_to_pinned" in row:
        times = f"{row['ratio_to_pinned']:.2f}"
        if "target_ratio" in row:
            times = judged(terminal, times, row["ratio_to_pinned"] >= row["target_ratio"])
            target = f">= {row['target_ratio']:g} x pinned"
    return (row["name"], f"{row['ms']:,.2f}", rate, times, target)


SECTIONS: tuple[tuple[str, Callable[[Bench], Any], Callable[[Terminal, Any], None]], ...] = (
    ("growth", measure_growth, show_growth),
    ("growth_to_the_whole_device", measure_whole_device, show_whole_device),
    ("eviction", measure_eviction, show_eviction),
)
