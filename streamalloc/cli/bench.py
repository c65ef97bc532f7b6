"""Measure the library beside the raw driver calls and beside other allocators that are installed.

Whatever is compared runs interleaved, in rounds of short blocks, so that a machine which is slower for a while is so
for all. Figures are medians over the rounds with the 10th and 90th percentile; ratios are medians of each round's.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import statistics
import subprocess
import sys
import tempfile
import timeit
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import streamalloc as sa
from streamalloc.cli import bench_ipc, bench_vmm, figures, measuring
from streamalloc.cli.choice import Chosen
from streamalloc.cli.figures import SPREAD, TO_RAW, Column, Section, show_table
from streamalloc.cli.info import add_json_argument, versions, write_json
from streamalloc.cli.measuring import SIZE, Bench, Call, Effort
from streamalloc.cli.peer import environment
from streamalloc.cli.terminal import Terminal

__all__ = ["ROWS", "add_arguments", "run"]

# Rounds, seconds of a block, live allocations, live buffers of host memory; then how often is imported, grown, grown to
# the whole device and evicted, and how much is evicted.
FULL = Effort(25, 0.01, (10, 1_000, 100_000, 1_000_000), 10_000, 15, 24, 6, 9, 8 << 30)
QUICK = Effort(11, 0.002, (10, 1_000, 100_000), 1_000, 3, 6, 2, 3, 1 << 30)

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
    return lambda: pool.allocate(SIZE, stream).free()


def cuda_core_pair(bench: Bench, *, on_stream: bool) -> Call:
    core, device, stream = bench_ipc.cuda_core()
    resource = core.DeviceMemoryResource(device)
    if on_stream:
        return lambda: resource.allocate(SIZE, stream=stream).close(stream)
    return lambda: resource.allocate(SIZE, stream=stream).close()


def cupy_pair(bench: Bench) -> Call:
    cupy = importlib.import_module("cupy")
    pool = cupy.cuda.MemoryAsyncPool()
    # CuPy frees on the stream that is current when the last reference goes.
    bench.resources.enter_context(cupy.cuda.Stream(non_blocking=True))
    return lambda: pool.malloc(SIZE)


def rmm_pair(bench: Bench) -> Call:
    mr = importlib.import_module("rmm.mr")
    stream = importlib.import_module("rmm.pylibrmm.stream").Stream()
    resource = mr.CudaAsyncMemoryResource()
    return lambda: resource.deallocate(resource.allocate(SIZE, stream), SIZE, stream)


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


def raw_copy(bench: Bench, address: int) -> Call:
    copy, stream = bench.driver.cuMemcpyAsync, bench.raw_stream
    target, source = (bench.driver.CUdeviceptr(one) for one in (address, bench.buffer().address))
    return lambda: copy(target, source, SIZE, stream)


def our_copy(bench: Bench, target: Any) -> Call:
    source = bench.buffer()
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
    other: bool = False
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
    Row(PAIR, "cuda.core .close()", lambda bench: cuda_core_pair(bench, on_stream=False), other=True),
    Row(PAIR, "cuda.core .close(stream)", lambda bench: cuda_core_pair(bench, on_stream=True), other=True),
    Row(PAIR, "CuPy MemoryAsyncPool", cupy_pair, other=True),
    Row(PAIR, "RMM CudaAsyncMemoryResource", rmm_pair, other=True),
    Row(PAIR, "PyTorch empty (caching)", torch_pair, other=True),
    Row(FILL, "raw call", raw_fill),
    Row(FILL, "streamalloc fill", our_fill),
    Row(COPY, "raw call", lambda bench: raw_copy(bench, bench.buffer().address)),
    Row(COPY, "streamalloc copy_to", lambda bench: our_copy(bench, bench.buffer())),
    Row(COPY_TO_HOST, "raw call", lambda bench: raw_copy(bench, bench.array.ctypes.data)),
    Row(COPY_TO_HOST, "streamalloc copy_to", lambda bench: our_copy(bench, bench.array)),
)
GROUPS = tuple(dict.fromkeys(row.group for row in ROWS))


# --- how it is timed ------------------------------------------------------------------------------------------------


def timed(bench: Bench, calls: Sequence[Call], most: int) -> list[list[float]]:
    """Microseconds a call, by function and round."""
    timers = [timeit.Timer(call) for call in calls]
    for timer in timers:
        timer.timeit(min(most, 50))
    bench.device.synchronize()
    once = max(timer.timeit(20) / 20 for timer in timers)
    number = max(1, min(most, int(bench.effort.block / once)))
    times: list[list[float]] = [[] for _ in timers]
    for at in measuring.rotated(range(len(timers)), bench.effort.rounds):
        bench.device.synchronize()
        times[at].append(timers[at].timeit(number) / number * 1e6)
    bench.device.synchronize()
    return times


def measure_rows(bench: Bench) -> list[dict[str, Any]]:
    """The rows of every group."""
    return [{"group": group.title, **row} for group in GROUPS for row in _measure_group(bench, group)]


def _measure_group(bench: Bench, group: Group) -> Iterator[dict[str, Any]]:
    def setup(row: Row) -> Call:
        call = row.setup(bench)
        call()
        return call

    ready, missing = measuring.prepared(bench, [row for row in ROWS if row.group is group], setup)
    times = timed(bench, [call for _, call in ready], group.most)
    for (row, _), values in zip(ready, times, strict=True):
        at_most = row.target[bench.chosen.is_simulated]
        target = "target_us" if bench.chosen.is_simulated else "target_ratio"
        yield {
            "name": row.name,
            **figures.spread(values),
            "ratio_to_raw": figures.ratio(values, times[0]),
            **({} if at_most is None else {target: at_most}),
        }
    yield from missing


def measure_live(bench: Bench) -> list[dict[str, Any]]:
    """What the library adds to a pair of raw calls, with as many live allocations on both sides."""
    counts = bench.effort.live[:-1] if bench.chosen.is_simulated else bench.effort.live
    driver, stream, raw_stream = bench.driver, bench.stream, bench.raw_stream
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
                raws.append(measuring.value_of(driver.cuMemAllocFromPoolAsync(LIVE_SIZE, raw_pool, raw_stream)))
            # Twice the rounds: what is sought is a small difference of two figures.
            twice = [timed(bench, calls, PAIR.most) for _ in range(2)]
            raw, our = (first + second for first, second in zip(*twice, strict=True))
            added = statistics.median(one - other for one, other in zip(our, raw, strict=True))
            result = {
                "live": count,
                "raw_us": statistics.median(raw),
                "streamalloc_us": statistics.median(our),
                "added_us": added,
                "added_ratio": added / results[0]["added_us"] if results else 1.0,
                **({"target_ratio": 1.15} if results else {}),
            }
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
    pool, stream = bench.raw_pool, bench.raw_stream

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
    of_raw = traced(lambda: allocate(SIZE, pool, stream)[1], lambda pointer: free(pointer, stream))
    of_ours = traced(lambda: bench.pool.allocate(SIZE, bench.stream), lambda buffer: buffer.free())
    return {"bytes": of_ours - of_raw + of_pointers, "buffers": count, "target_bytes": 250}


_IMPORT = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"


def measure_imports(bench: Bench) -> dict[str, Any]:
    """Milliseconds that importing takes, each time in a new process."""
    names = ("cuda.bindings.driver, numpy", "streamalloc")
    with tempfile.TemporaryDirectory(prefix="streamalloc-bench-") as compiled:
        # Compiled modules of all packages in one place, whatever the environment says about writing them: an
        # installed package has its own.
        variables = {**environment(bench.chosen.driver), "PYTHONPYCACHEPREFIX": compiled}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)

        def milliseconds(name: str) -> float:
            command = [sys.executable, "-c", _IMPORT.format(name)]
            done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
            return float(done.stdout) * 1e3

        for name in names:
            milliseconds(name)  # compiles, and reads the files into the page cache
        base, ours = zip(*([milliseconds(name) for name in names] for _ in range(bench.effort.imports)), strict=True)
    rows: list[dict[str, Any]] = [
        {"name": f"import {name}", "median_ms": statistics.median(times), "fastest_ms": min(times)}
        for name, times in zip(names, (base, ours), strict=True)
    ]
    rows[1] |= {"ratio": figures.ratio(ours, base), "target_ratio": 1.3}
    return {"rows": rows}


# --- how it is shown ------------------------------------------------------------------------------------------------


def show_rows(terminal: Terminal, results: list[dict[str, Any]]) -> None:
    """A table for each group of rows."""
    median = SPREAD[0]._replace(target="target_us", as_target="<= {:g} us")
    # One width for the names of all tables, so that the figures stand below each other.
    names = max(len(row.name) for row in ROWS)
    for group in GROUPS:
        terminal.heading(group.title)
        rows = [result for result in results if result["group"] == group.title]
        show_table(terminal, "microseconds", rows, median, *SPREAD[1:], TO_RAW, names=names)


def show_live(terminal: Terminal, results: list[dict[str, Any]]) -> None:
    """What the library adds, by live buffers."""
    terminal.heading("What the library adds to the raw pair, by live buffers")
    show_table(
        terminal,
        "live".rjust(9),
        [{"name": f"{result['live']:>9,}", **result} for result in results],
        Column("raw us", "raw_us"),
        Column("streamalloc us", "streamalloc_us"),
        Column("added us", "added_us", ",.3f"),
        Column(f"/ at {results[0]['live']}", "added_ratio", target="target_ratio", as_target="<= {:g} x"),
    )


def show_host_memory(terminal: Terminal, result: dict[str, Any]) -> None:
    """Host memory of a live buffer."""
    terminal.heading("Host memory of a live buffer")
    figure, target = figures.against(terminal, result["bytes"], result["target_bytes"], ".0f")
    terminal.line(f"  {figure} bytes (mean of {result['buffers']:,}; target {target})")


def show_imports(terminal: Terminal, result: dict[str, Any]) -> None:
    """Import time."""
    terminal.heading("Import, in a new process")
    figures = (Column("median", "median_ms", ",.0f"), Column("fastest", "fastest_ms", ",.0f"))
    to_base = Column("ratio", "ratio", target="target_ratio", as_target="<= {:g} x")
    show_table(terminal, "milliseconds", result["rows"], *figures, to_base)


SECTIONS = (
    Section("rows", measure_rows, show_rows),
    Section("live_buffers", measure_live, show_live),
    Section("host_memory", measure_host_memory, show_host_memory),
    *bench_vmm.SECTIONS,
    *bench_ipc.SECTIONS,
    Section("import_time", measure_imports, show_imports),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench``."""
    parser.add_argument("--quick", action="store_true", help="a few rounds only: seconds, for a first impression")
    add_json_argument(parser)


def run(chosen: Chosen, terminal: Terminal, options: argparse.Namespace) -> int:
    """Measure every section and show it as soon as it is there. A missed target is shown, and is no failure."""
    tables = options.json != "-"
    found = versions(chosen)
    report: dict[str, Any] = {"headline": chosen.headline, "simulated": chosen.is_simulated}
    report |= {"quick": options.quick, "versions": found}
    if tables:
        terminal.line(terminal.bold(chosen.headline))
        about = f"streamalloc {found['streamalloc']}, Python {found['python']}, cuda-bindings {found['cuda_bindings']}"
        if chosen.is_simulated:
            about += "\nTimes are those of the simulation; other libraries are measured on a GPU only."
        for line in about.splitlines():
            terminal.line(terminal.dim(line))
    with contextlib.ExitStack() as resources:
        bench = Bench(chosen, QUICK if options.quick else FULL, resources)
        for section in SECTIONS:
            try:
                report[section.key] = section.measure(bench)
            except measuring.Unavailable as reason:
                report[section.key] = {"unavailable": str(reason)}
            if tables:
                section.show(terminal, report[section.key])
        bench.device.synchronize()
    if options.json is not None:
        write_json(report, options.json, terminal)
    return 0
