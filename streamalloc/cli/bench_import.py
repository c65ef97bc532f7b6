"""Benchmark rows about host costs: memory of a buffer object, and import time."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from typing import Any

from streamalloc.cli.measuring import SIZE, Bench, Measured, Row, Setup, Target
from streamalloc.cli.worker import environment


def _host_memory(bench: Bench, *parts: tuple[int, Any, Any]) -> Measured:
    """Return the mean host memory of an object in bytes: the signed sum of parts.

    Each part is (sign, function that creates the object, function that releases it).
    """
    count = bench.effort.host_buffers

    def measure(make: Callable[[], Any], undo: Callable[[Any], object]) -> float:
        for _ in range(2):
            # The first pass fills caches and grows tables; only the second one counts.
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

    return Measured(lambda number: sum(sign * measure(make, undo) for sign, make, undo in parts))


def _of_pointers(bench: Bench) -> tuple[int, Any, Any]:
    return 1, lambda: bench.driver.CUdeviceptr(1 << 40), lambda _: None


def pointer_memory(bench: Bench) -> Measured:
    """Measure the bindings' pointer object."""
    return _host_memory(bench, _of_pointers(bench))


def buffer_memory(bench: Bench) -> Measured:
    """Measure the library's buffer object together with the bindings' pointer object.

    A simulated driver also keeps records in Python. The same raw allocations are measured and subtracted.
    """
    allocate, free = bench.driver.cuMemAllocFromPoolAsync, bench.driver.cuMemFreeAsync
    pool, stream = bench.raw_pool, bench.raw_stream
    ours = (1, lambda: bench.pool.allocate(SIZE, bench.stream), lambda buffer: buffer.free())
    raw = (-1, lambda: allocate(SIZE, pool, stream)[1], lambda pointer: free(pointer, stream))
    return _host_memory(bench, ours, raw, _of_pointers(bench))


_IMPORT = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
BASE = "import cuda.bindings.driver, numpy"
OURS = "import streamalloc; streamalloc.MemoryPool"
"""Names a class, because the package loads modules on first use."""


def _import(statement: str) -> Setup:
    """Return the milliseconds of an import in a new process."""

    def setup(bench: Bench) -> Measured:
        # Byte code goes to a folder of its own, because the environment may forbid writing it elsewhere.
        compiled = bench.resources.enter_context(tempfile.TemporaryDirectory(prefix="streamalloc-bench-"))
        variables = {**environment(bench.chosen.driver), "PYTHONPYCACHEPREFIX": compiled}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-c", _IMPORT.format(statement.removeprefix("import "))]
        run = functools.partial(subprocess.run, command, env=variables, capture_output=True, text=True, check=True)
        # The first import compiles the modules and fills the page cache.
        return Measured(lambda number: float(run().stdout) * 1e3)

    return setup


ROWS = (
    Row(
        "host_memory",
        "Host memory of a live buffer",
        {"the bindings' pointer": pointer_memory, "streamalloc": buffer_memory},
        (Target("streamalloc", 250.0),),
        most=1,
        unit="bytes",
        rounds="once",
    ),
    Row(
        "import",
        "Import, in a new process",
        {one: _import(one) for one in (BASE, OURS)},
        (Target(OURS, 1.2, BASE),),
        1,
        "ms",
        "imports",
    ),
)
