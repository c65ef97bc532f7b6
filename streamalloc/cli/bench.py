"""Measure the library beside the raw driver calls and beside other allocators that are installed.

Whatever is compared runs interleaved, in rounds of short blocks, so that a machine which is slower for a while is so
for all. Figures are medians over the rounds with the 10th and 90th percentile; ratios are medians of each round's.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import streamalloc as sa
from streamalloc.cli import bench_ipc, bench_vmm
from streamalloc.cli.choice import Chosen
from streamalloc.cli.info import add_json_argument, versions, write_json
from streamalloc.cli.measuring import (
    FULL,
    QUICK,
    SIZE,
    Bench,
    Call,
    interleaved,
    judged,
    of_another_library,
    ratio,
    spread,
)
from streamalloc.cli.terminal import Terminal

__all__ = ["ROWS", "add_arguments", "run"]

# The smallest step between two allocations of a pool: the cheapest way to have many.
LIVE_SIZE = 512


# --- what is timed --------------------------------------------------------------------------------------------------


def raw_pair(driver: Any, pool: Any, stream: Any) -> Call:
    """Allocate and free with the bindings' two functions, bound beforehand, and handle objects."""
    allocate, free = driver.cuMemAllocFromPoolAsync, driver.cuMemFreeAsync

    def pair() -> None:
        _, pointer = allocate(SIZE, pool, stream)
        free(pointer, stream)

    return pair


def raw_pair_checked(bench: Bench) -> Call:
    allocate, free = bench.driver.cuMemAllocFromPoolAsync, bench.driver.cuMemFreeAsync
    pool, stream = bench.raw_pool, bench.raw_stream

    def pair() -> None:
        error, pointer = allocate(SIZE, pool, stream)
        if error:
            raise RuntimeError(error)
        (error,) = free(pointer, stream)
        if error:
            raise RuntimeError(error)

    return pair


def our_pair(pool: sa.MemoryPool, stream: sa.Stream) -> Call:
    """Allocate and free with the library."""

    def pair() -> None:
        pool.allocate(SIZE, stream).free()

    return pair


def _cuda_core() -> tuple[Any, Any, Any]:
    try:
        core = importlib.import_module("cuda.core")
        core.DeviceMemoryResource  # noqa: B018  older versions have it elsewhere
    except (ImportError, AttributeError):
        core = importlib.import_module("cuda.core.experimental")
    device = core.Device(0)
    device.set_current()
    return core, core.DeviceMemoryResource(device), device.create_stream()


def cuda_core_pair(bench: Bench) -> Call:
    _, resource, stream = _cuda_core()
    return lambda: resource.allocate(SIZE, stream=stream).close()


def cuda_core_pair_on_stream(bench: Bench) -> Call:
    _, resource, stream = _cuda_core()
    return lambda: resource.allocate(SIZE, stream=stream).close(stream)


def cupy_pair(bench: Bench) -> Call:
    cupy = importlib.import_module("cupy")
    pool = cupy.cuda.MemoryAsyncPool()
    # CuPy frees on the stream that is current when the last reference goes.
    stream = cupy.cuda.Stream(non_blocking=True)
    bench.resources.enter_context(stream)
    return lambda: pool.malloc(SIZE)


def rmm_pair(bench: Bench) -> Call:
    mr = importlib.import_module("rmm.mr")
    stream = importlib.import_module("rmm.pylibrmm.stream").Stream()
    resource = mr.CudaAsyncMemoryResource()

    def pair() -> None:
        resource.deallocate(resource.allocate(SIZE, stream), SIZE, stream)

    return pair


def torch_pair(bench: Bench) -> Call:
    torch = importlib.import_module("torch")
    device = torch.device("cuda", 0)
    return lambda: torch.empty(SIZE, dtype=torch.uint8, device=device)


def raw_fill(bench: Bench) -> Call:
    fill, stream = bench.driver.cuMemsetD8Async, bench.raw_stream
    pointer = bench.driver.CUdeviceptr(bench.buffer().address)
    return lambda: fill(pointer, 7, SIZE, stream)


def our_fill(bench: Bench) -> Call:
    buffer = bench.buffer()
    return lambda: buffer.fill(7)


def raw_copy(bench: Bench) -> Call:
    copy, stream = bench.driver.cuMemcpyAsync, bench.raw_stream
    source, target = (bench.driver.CUdeviceptr(bench.buffer().address) for _ in range(2))
    return lambda: copy(target, source, SIZE, stream)


def our_copy(bench: Bench) -> Call:
    source, target = bench.buffer(), bench.buffer()
    return lambda: source.copy_to(target)


def raw_copy_to_host(bench: Bench) -> Call:
    copy, stream = bench.driver.cuMemcpyAsync, bench.raw_stream
    source = bench.driver.CUdeviceptr(bench.buffer().address)
    array = np.empty(SIZE, np.uint8)
    target = bench.driver.CUdeviceptr(array.ctypes.data)
    bench.kept.append(array)
    return lambda: copy(target, source, SIZE, stream)


def our_copy_to_host(bench: Bench) -> Call:
    source, target = bench.buffer(), np.empty(SIZE, np.uint8)
    return lambda: source.copy_to(target)


@dataclass(frozen=True)
class Group:
    """Rows that do the same thing and are compared with the first of them."""

    title: str
    most: int
    """Calls in a block at most: queues of a GPU that are full would make the host wait."""


@dataclass(frozen=True)
class Row:
    """Something to time: ``setup`` makes the function; where it raises, the row says why there is no figure."""

    group: Group
    name: str
    setup: Callable[[Bench], Call]
    peer: bool = False
    """Another library: it needs a GPU, and to be installed."""
    target: tuple[float | None, float | None] = (None, None)
    """On a GPU, at most this many times the raw calls; simulated, at most this many microseconds."""


PAIR = Group("Allocate and free 4 KiB", 20_000)
FILL = Group("Fill 4 KiB", 200)
COPY = Group("Copy 4 KiB to another buffer", 200)
COPY_TO_HOST = Group("Copy 4 KiB to a numpy array, which waits for it", 200)

ROWS = (
    Row(PAIR, "raw calls", lambda bench: raw_pair(bench.driver, bench.raw_pool, bench.raw_stream)),
    Row(PAIR, "raw calls, results checked", raw_pair_checked),
    Row(PAIR, "streamalloc", lambda bench: our_pair(bench.pool, bench.stream), target=(1.35, 25.0)),
    Row(PAIR, "cuda.core .close()", cuda_core_pair, peer=True),
    Row(PAIR, "cuda.core .close(stream)", cuda_core_pair_on_stream, peer=True),
    Row(PAIR, "CuPy MemoryAsyncPool", cupy_pair, peer=True),
    Row(PAIR, "RMM CudaAsyncMemoryResource", rmm_pair, peer=True),
    Row(PAIR, "PyTorch empty (caching)", torch_pair, peer=True),
    Row(FILL, "raw call", raw_fill),
    Row(FILL, "streamalloc fill", our_fill),
    Row(COPY, "raw call", raw_copy),
    Row(COPY, "streamalloc copy_to", our_copy),
    Row(COPY_TO_HOST, "raw call", raw_copy_to_host),
    Row(COPY_TO_HOST, "streamalloc copy_to", our_copy_to_host),
)
GROUPS = tuple(dict.fromkeys(row.group for row in ROWS))


# --- how it is timed ------------------------------------------------------------------------------------------------


def measure_rows(bench: Bench) -> list[dict[str, Any]]:
    """The rows of every group."""
    return [result for group in GROUPS for result in _measure_group(bench, group)]


def _measure_group(bench: Bench, group: Group) -> Iterator[dict[str, Any]]:
    rows, calls = [], []
    missing: dict[str, str] = {}
    for row in ROWS:
        if row.group is not group or (row.peer and bench.chosen.is_simulated):
            continue
        with of_another_library(row.name, row.peer, missing):
            call = row.setup(bench)
            call()
            rows.append(row)
            calls.append(call)
    times = interleaved(bench, calls, group.most)
    for row, values in zip(rows, times, strict=True):
        yield {
            "group": group.title,
            "name": row.name,
            **spread(values),
            "ratio_to_raw": ratio(values, times[0]),
            **_target(row, bench.chosen.is_simulated),
        }
    for name, reason in missing.items():
        yield {"group": group.title, "name": name, "unavailable": reason}


def _target(row: Row, is_simulated: bool) -> dict[str, Any]:
    times_raw, microseconds = row.target
    if is_simulated:
        return {} if microseconds is None else {"target_us": microseconds}
    return {} if times_raw is None else {"target_ratio": times_raw}


def measure_live(bench: Bench) -> list[dict[str, Any]]:
    """What the library adds to a pair of raw calls, with as many live allocations on both sides."""
    counts = bench.effort.live_simulated if bench.chosen.is_simulated else bench.effort.live
    driver, stream, raw_stream = bench.driver, bench.stream, bench.raw_stream
    allocate = driver.cuMemAllocFromPoolAsync
    our_pool, _ = bench.new_pool()
    _, raw_pool = bench.new_pool()
    calls = (raw_pair(driver, raw_pool, raw_stream), our_pair(our_pool, stream))
    ours: list[sa.Buffer] = []
    raws: list[Any] = []
    results: list[dict[str, Any]] = []
    try:
        for count in counts:
            while len(ours) < count:
                ours.append(our_pool.allocate(LIVE_SIZE, stream))
                error, pointer = allocate(LIVE_SIZE, raw_pool, raw_stream)
                if error:
                    raise RuntimeError(f"cuMemAllocFromPoolAsync answered {error.name} with {count:,} live allocations")
                raws.append(pointer)
            # Twice the rounds: what is sought is a small difference of two figures.
            raw, our = (
                first + second
                for first, second in zip(
                    interleaved(bench, calls, PAIR.most), interleaved(bench, calls, PAIR.most), strict=True
                )
            )
            added = [one - other for one, other in zip(our, raw, strict=True)]
            result = {
                "live": count,
                "raw_us": statistics.median(raw),
                "streamalloc_us": statistics.median(our),
                "added_us": statistics.median(added),
            }
            result["added_ratio"] = result["added_us"] / (results[0] if results else result)["added_us"]
            results.append(result)
    finally:
        for buffer in ours:
            buffer.free()
        for pointer in raws:
            driver.cuMemFreeAsync(pointer, raw_stream)
        stream.synchronize()
    return results


def measure_host_memory(bench: Bench) -> dict[str, Any]:
    """Bytes of host memory that a live buffer takes: the library's objects and the bindings' pointer object.

    A simulated driver keeps its own books in Python as well; what it takes for the same raw allocations is
    subtracted, and the pointer objects are counted by themselves.
    """
    driver, count = bench.driver, bench.effort.host_buffers
    allocate, free = driver.cuMemAllocFromPoolAsync, driver.cuMemFreeAsync

    def raw() -> Any:
        return allocate(SIZE, bench.raw_pool, bench.raw_stream)[1]

    def ours() -> sa.Buffer:
        return bench.pool.allocate(SIZE, bench.stream)

    def traced(make: Callable[[], Any], undo: Callable[[Any], object]) -> float:
        for _ in range(2):
            # The first time fills caches and grows tables, of which the second shows nothing any more.
            kept: list[Any] = [None] * count
            gc.collect()
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            for at in range(count):
                kept[at] = make()
            taken = tracemalloc.get_traced_memory()[0] - before
            tracemalloc.stop()
            for one in kept:
                undo(one)
            bench.stream.synchronize()
        return taken / count

    of_pointers = traced(lambda: driver.CUdeviceptr(1 << 40), lambda _: None)
    of_raw = traced(raw, lambda pointer: free(pointer, bench.raw_stream))
    of_ours = traced(ours, lambda buffer: buffer.free())
    return {"bytes": of_ours - of_raw + of_pointers, "buffers": count, "target_bytes": 250}


_IMPORT = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"


def measure_imports(bench: Bench) -> dict[str, Any]:
    """Seconds that importing takes, each time in a new process."""
    names = ("cuda.bindings.driver, numpy", "streamalloc")
    package = str(Path(sa.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))

    with tempfile.TemporaryDirectory(prefix="streamalloc-bench-") as compiled:
        # Compiled modules of all packages in one place, whatever the environment says about writing them: an
        # installed package has its own.
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONPYCACHEPREFIX": compiled}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)

        def seconds(name: str) -> float:
            command = [sys.executable, "-c", _IMPORT.format(name)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            return float(done.stdout)

        for name in names:
            seconds(name)  # compiles, and reads the files into the page cache
        times = [[seconds(name) for name in names] for _ in range(bench.effort.imports)]
    base, ours = ([one[at] for one in times] for at in range(2))
    return {
        "base": names[0],
        "base_ms": statistics.median(base) * 1e3,
        "base_fastest_ms": min(base) * 1e3,
        "streamalloc_ms": statistics.median(ours) * 1e3,
        "streamalloc_fastest_ms": min(ours) * 1e3,
        "ratio": ratio(ours, base),
        "target_ratio": 1.3,
    }


# --- how it is shown ------------------------------------------------------------------------------------------------


def show_rows(terminal: Terminal, results: list[dict[str, Any]]) -> None:
    """A table for each group of rows."""
    for group in GROUPS:
        terminal.heading(group.title)
        rows = [result for result in results if result["group"] == group.title]
        terminal.table(
            (_shown_row(terminal, result) for result in rows if "unavailable" not in result),
            header=("microseconds", "median", "p10", "p90", "/ raw", "target"),
            align="lrrrrl",
        )
        for result in rows:
            if "unavailable" in result:
                terminal.paragraph(f"{result['name']}: not measured ({result['unavailable']})")


def _shown_row(terminal: Terminal, result: dict[str, Any]) -> tuple[str, ...]:
    # One width for the names of all tables, so that the figures stand below each other.
    name = result["name"].ljust(max(len(row.name) for row in ROWS))
    median, times_raw = f"{result['median_us']:.2f}", f"{result['ratio_to_raw']:.2f}"
    target = ""
    if "target_us" in result:
        target = f"<= {result['target_us']:g} us"
        median = judged(terminal, median, result["median_us"] <= result["target_us"])
    if "target_ratio" in result:
        target = f"<= {result['target_ratio']:g} x raw"
        times_raw = judged(terminal, times_raw, result["ratio_to_raw"] <= result["target_ratio"])
    return (name, median, f"{result['p10_us']:.2f}", f"{result['p90_us']:.2f}", times_raw, target)


def show_live(terminal: Terminal, results: list[dict[str, Any]]) -> None:
    """What the library adds, by live buffers."""
    terminal.heading("What the library adds to the raw pair, by live buffers")
    terminal.table(
        (
            (
                f"{one['live']:,}",
                f"{one['raw_us']:.2f}",
                f"{one['streamalloc_us']:.2f}",
                f"{one['added_us']:.3f}",
                judged(terminal, f"{one['added_ratio']:.2f}", one["added_ratio"] <= 1.15),
                "" if one is results[0] else "<= 1.15 x",
            )
            for one in results
        ),
        header=("live", "raw us", "streamalloc us", "added us", f"/ at {results[0]['live']}", "target"),
        align="rrrrrl",
    )


def show_host_memory(terminal: Terminal, result: dict[str, Any]) -> None:
    """Host memory of a live buffer."""
    terminal.heading("Host memory of a live buffer")
    figure = judged(terminal, f"{result['bytes']:.0f}", result["bytes"] <= result["target_bytes"])
    terminal.line(f"  {figure} bytes (mean of {result['buffers']:,}; target <= {result['target_bytes']})")


def show_imports(terminal: Terminal, result: dict[str, Any]) -> None:
    """Import time."""
    terminal.heading("Import, in a new process")
    figure = judged(terminal, f"{result['ratio']:.2f}", result["ratio"] <= result["target_ratio"])
    terminal.table(
        [
            (f"import {result['base']}", f"{result['base_ms']:.0f}", f"{result['base_fastest_ms']:.0f}", "", ""),
            (
                "import streamalloc",
                f"{result['streamalloc_ms']:.0f}",
                f"{result['streamalloc_fastest_ms']:.0f}",
                figure,
                f"<= {result['target_ratio']:g} x",
            ),
        ],
        header=("milliseconds", "median", "fastest", "ratio", "target"),
        align="lrrrl",
    )


SECTIONS: tuple[tuple[str, Callable[[Bench], Any], Callable[[Terminal, Any], None]], ...] = (
    ("rows", measure_rows, show_rows),
    ("live_buffers", measure_live, show_live),
    ("host_memory", measure_host_memory, show_host_memory),
    *bench_vmm.SECTIONS,
    *bench_ipc.SECTIONS,
    ("import_time", measure_imports, show_imports),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench``."""
    parser.add_argument("--quick", action="store_true", help="a few rounds only: seconds, for a first impression")
    add_json_argument(parser)


def run(chosen: Chosen, terminal: Terminal, options: argparse.Namespace) -> int:
    """Measure every section and show it as soon as it is there. A missed target is shown, and is no failure."""
    tables = options.json != "-"
    found = versions(chosen)
    report: dict[str, Any] = {
        "headline": chosen.headline,
        "simulated": chosen.is_simulated,
        "quick": options.quick,
        "versions": found,
    }
    if tables:
        terminal.line(terminal.bold(chosen.headline))
        terminal.line(
            terminal.dim(
                f"streamalloc {found['streamalloc']}, Python {found['python']}, cuda-bindings {found['cuda_bindings']}"
            )
        )
        if chosen.is_simulated:
            terminal.line(
                terminal.dim("Times are those of the simulation; other libraries are measured on a GPU only.")
            )
    with contextlib.ExitStack() as resources:
        bench = Bench(chosen, QUICK if options.quick else FULL, resources)
        for key, measure, show in SECTIONS:
            report[key] = measure(bench)
            if tables:
                show(terminal, report[key])
        bench.device.synchronize()
    if options.json is not None:
        write_json(report, options.json, terminal)
    return 0
