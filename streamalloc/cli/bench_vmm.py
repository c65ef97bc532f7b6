"""The benchmark's sections about virtual memory: growth in steps and to the whole device, evict and restore."""

from __future__ import annotations

import functools
import itertools
import statistics
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import streamalloc as sa
from streamalloc import vmm
from streamalloc.cli.choice import KEEP_ALL, host_pool_location
from streamalloc.cli.figures import SPREAD, TO_RAW, Column, Section, against, begun, ratio, show_table, spread
from streamalloc.cli.measuring import Bench, Call, Unavailable, step_times, value_of
from streamalloc.cli.terminal import Terminal
from streamalloc.core.errors import size_text

__all__ = ["SECTIONS"]

STEPS = 16
STEP = 64 << 20
# A simulated driver copies with the CPU.
STEP_SIMULATED = 2 << 20
EVICTED_SIMULATED = 32 << 20
DEVICE_STEP = 1 << 30
# Of the device, left to others and to the driver.
DEVICE_RESERVE = 4 << 30
# Enough to find the speed of copies.
PINNED = 2 << 30


# --- growth ---------------------------------------------------------------------------------------------------------


def raw_growth(bench: Bench, count: int, nbytes: int) -> list[float]:
    """Create, map and set access with the bindings, results checked; microseconds of each step."""
    driver = bench.driver
    create, map_, set_access = driver.cuMemCreate, driver.cuMemMap, driver.cuMemSetAccess
    properties = sa.MemAllocationProp(location=bench.device.location).to_driver()
    descriptors = [sa.MemAccessDesc(bench.device.location, sa.MemAccess.READWRITE).to_driver()]
    handles: list[Any] = []
    start = int(value_of(driver.cuMemAddressReserve(count * nbytes, 0, 0, 0)))
    end = start

    def step() -> None:
        nonlocal end
        handles.append(value_of(create(nbytes, properties, 0)))
        value_of(map_(end, nbytes, 0, handles[-1], 0))
        value_of(set_access(end, nbytes, descriptors, 1))
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
            value_of(driver.cuMemcpyAsync(larger, held, size, stream))
            value_of(driver.cuStreamSynchronize(stream))
            value_of(driver.cuMemFree(held))
        held, size = larger, size + nbytes

    try:
        return step_times(step, count)
    finally:
        if held is not None:
            driver.cuMemFree(held)


_WAYS: dict[str, Callable[[Bench, int, int], list[float]]] = {
    "raw calls, results checked": raw_growth,
    "streamalloc grow": our_growth,
    "cuMemAlloc, copy and cuMemFree": copied_growth,
}


def in_turns(contenders: Sequence[Callable[[], list[float]]], rounds: int) -> list[list[list[float]]]:
    """What each of some functions answers, by function and round.

    They run once beforehand, and then in all orders by turns: how long the driver takes to make memory depends on who
    gave memory back just before.
    """
    for contender in contenders:
        contender()
    found: list[list[list[float]]] = [[] for _ in contenders]
    orders = itertools.cycle(itertools.permutations(range(len(contenders))))
    for order in itertools.islice(orders, rounds):
        for at in order:
            found[at].append(contenders[at]())
    return found


def _grown(
    bench: Bench, names: Sequence[str], count: int, nbytes: int, rounds: int
) -> tuple[list[dict[str, Any]], list[list[float]]]:
    """A row for each way to grow by so many steps of so many bytes; and the microseconds of all steps, by round."""
    found = in_turns([functools.partial(_WAYS[name], bench, count, nbytes) for name in names], rounds)
    totals = [[sum(steps) for steps in runs] for runs in found]
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            **spread(total),
            "first_us": statistics.median(steps[0] for steps in runs),
            "step_us": statistics.median(statistics.median(steps) for steps in runs),
            "last_us": statistics.median(steps[-1] for steps in runs),
            "ratio_to_raw": ratio(total, totals[0]),
        }
        for name, runs, total in zip(names, found, totals, strict=True)
    ]
    if not bench.chosen.is_simulated:
        rows[1]["target_ratio"] = 1.1
    return rows, totals


def measure_growth(bench: Bench) -> dict[str, Any]:
    """Growing a buffer in steps: raw calls, the library, and copying into larger memory."""
    bench.need_virtual_memory()
    nbytes = STEP_SIMULATED if bench.chosen.is_simulated else STEP
    rows, (_, ours, copied) = _grown(bench, list(_WAYS), STEPS, nbytes, bench.effort.growths)
    target = {} if bench.chosen.is_simulated else {"target_times_faster": 10}
    faster = ratio(copied, ours)
    return {"steps": STEPS, "step_bytes": nbytes, "rows": rows, "times_faster_than_copying": faster, **target}


def measure_whole_device(bench: Bench) -> dict[str, Any]:
    """Growing a buffer to nearly all memory that is free; whether its size so far makes a step slower."""
    bench.need_virtual_memory()
    count = (bench.device.memory_info().free - DEVICE_RESERVE) // DEVICE_STEP
    if count < 2:
        raise Unavailable(f"less than {size_text(DEVICE_RESERVE + 2 * DEVICE_STEP)} of the device's memory are free")
    rows, _ = _grown(bench, list(_WAYS)[:2], count, DEVICE_STEP, bench.effort.whole_devices)
    return {"steps": count, "step_bytes": DEVICE_STEP, "rows": rows}


# --- evict and restore ----------------------------------------------------------------------------------------------


def measure_eviction(bench: Bench) -> dict[str, Any]:
    """Evicting and restoring a buffer, beside copies between the device and pinned memory in the same rounds."""
    bench.need_virtual_memory()
    location = host_pool_location(bench.device)
    if location is None:
        raise Unavailable("there are no pools in host memory here")
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
                value_of(driver.cuMemcpyAsync(target, source, pinned_bytes, bench.raw_stream))
                stream.synchronize()

            def restore() -> None:
                buffer.restore()
                stream.synchronize()

            ways: tuple[tuple[str, Call, int], ...] = (
                ("copy from device to pinned memory", lambda: copy(host, on_device), pinned_bytes),
                ("copy from pinned memory to device", lambda: copy(on_device, host), pinned_bytes),
                ("evict, copy in a warm host pool", lambda: buffer.evict(pool), nbytes),
                ("restore from it", restore, nbytes),
                ("evict, bytes given up", buffer.evict, 0),
                ("restore without them", restore, 0),
            )
            seconds = _rounds([call for _, call, _ in ways], bench.effort.evictions)
    finally:
        driver.cuMemFreeHost(pinned)
    rows: list[dict[str, Any]] = []
    rates: list[list[float]] = []
    for (name, _, moved), values in zip(ways, seconds, strict=True):
        rows.append({"name": name, "ms": statistics.median(values) * 1e3})
        if moved:
            rates.append([moved / one / 1e9 for one in values])
            rows[-1]["gb_per_s"] = statistics.median(rates[-1])
    for at in (2, 3):
        rows[at]["ratio_to_pinned"] = ratio(rates[at], rates[at - 2])
        if not bench.chosen.is_simulated:
            rows[at]["target_ratio"] = 0.8
    return {"bytes": nbytes, "pinned_bytes": pinned_bytes, "rows": rows}


def _rounds(calls: Sequence[Call], rounds: int) -> list[list[float]]:
    """Seconds that each of some calls takes, by call and round; always one after the other, and once beforehand.

    The first round fills the pool, and touches the memory for the first time.
    """
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 1):
        for at, call in enumerate(calls):
            times[at].append(timeit.timeit(call, number=1))
    return [values[1:] for values in times]


def _fitting(bench: Bench) -> int:
    """How large a buffer to evict: as the effort says, unless device or host have less to spare."""
    if bench.chosen.is_simulated:
        return min(bench.effort.evicted, EVICTED_SIMULATED)
    size = bench.effort.evicted
    spare = min(bench.device.memory_info().free, _free_host_memory()) // 2
    while size > spare and size > 32 << 20:
        size //= 2
    return size


def _free_host_memory() -> int:
    """How many bytes of host memory there are for new programs."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    amounts = dict(line.split(":", 1) for line in lines)
    return int(amounts.get("MemAvailable", "0").split()[0]) << 10


# --- how it is shown ------------------------------------------------------------------------------------------------


def show_growth(terminal: Terminal, result: dict[str, Any]) -> None:
    """Growth in steps."""
    if not begun(terminal, "Grow a buffer{}", " by {steps} x {step_bytes}", result):
        return
    figures = [column._replace(shown=",.0f") for column in SPREAD]
    show_table(terminal, "microseconds", result["rows"], *figures, TO_RAW)
    times, target = result["times_faster_than_copying"], result.get("target_times_faster")
    figure, wanted = against(terminal, times, target, ".1f", ">= {:g}")
    terminal.line(f"  growing is {figure} times as fast as copying{wanted and f' (target: {wanted})'}")


def show_whole_device(terminal: Terminal, result: dict[str, Any]) -> None:
    """Growth to the whole device."""
    title = "Grow a buffer to nearly all free memory of the device{}"
    if begun(terminal, title, ", {steps} x {step_bytes}", result):
        show_table(
            terminal,
            "microseconds",
            result["rows"],
            Column("in all", "median_us", ",.0f"),
            Column("first step", "first_us", ",.1f"),
            Column("median step", "step_us", ",.1f"),
            Column("last step", "last_us", ",.1f"),
            TO_RAW,
        )


def show_eviction(terminal: Terminal, result: dict[str, Any]) -> None:
    """Evict and restore."""
    if begun(terminal, "Evict and restore{}", " {bytes}", result):
        to_pinned = Column("/ pinned", "ratio_to_pinned", target="target_ratio", as_target=">= {:g} x pinned")
        figures = (Column("ms", "ms"), Column("GB/s", "gb_per_s", ",.1f"))
        show_table(terminal, "", result["rows"], *figures, to_pinned)


SECTIONS = (
    Section("growth", measure_growth, show_growth),
    Section("growth_to_the_whole_device", measure_whole_device, show_whole_device),
    Section("eviction", measure_eviction, show_eviction),
)
