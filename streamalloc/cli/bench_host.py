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

from streamalloc.cli.measuring import SIZE, Bench, Row, Setup, Target
from streamalloc.cli.worker import environment


class HostMemory:
    """Mean host memory of an object in bytes.

    Each part is (sign, function that creates the object, function that releases it).
    """

    def __init__(self, count: int, settle: Callable[[], object], parts: list[tuple[int, Any, Any]]) -> None:
        self._count = count
        self._settle = settle
        self._parts = parts

    def measure(self, number: int) -> float:
        """Return the signed sum of the parts in bytes."""
        return sum(sign * self._measured(make, undo) for sign, make, undo in self._parts)

    def _measured(self, make: Callable[[], Any], undo: Callable[[Any], object]) -> float:
        for _ in range(2):
            # The first pass fills caches and grows tables; only the second one counts.
            kept: list[Any] = [None] * self._count
            gc.collect()
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            for at in range(self._count):
                kept[at] = make()
            taken = tracemalloc.get_traced_memory()[0] - before
            tracemalloc.stop()
            for one in kept:
                undo(one)
            self._settle()
        return taken / self._count


def _of_pointers(bench: Bench) -> tuple[int, Any, Any]:
    return 1, lambda: bench.driver.CUdeviceptr(1 << 40), lambda _: None


def pointer_memory(bench: Bench) -> HostMemory:
    """Measure the bindings' pointer object."""
    return HostMemory(bench.effort.host_buffers, bench.stream.synchronize, [_of_pointers(bench)])


def buffer_memory(bench: Bench) -> HostMemory:
    """Measure the library's buffer object together with the bindings' pointer object.

    A simulated driver also keeps records in Python. The same raw allocations are measured and subtracted.
    """
    allocate, free = bench.driver.cuMemAllocFromPoolAsync, bench.driver.cuMemFreeAsync
    pool, stream = bench.raw_pool, bench.raw_stream
    ours = (1, lambda: bench.pool.allocate(SIZE, bench.stream), lambda buffer: buffer.free())
    raw = (-1, lambda: allocate(SIZE, pool, stream)[1], lambda pointer: free(pointer, stream))
    return HostMemory(bench.effort.host_buffers, bench.stream.synchronize, [ours, raw, _of_pointers(bench)])


_IMPORT = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
BASE = "import cuda.bindings.driver, numpy"
OURS = "import streamalloc; streamalloc.MemoryPool"
"""Names a class, because the package loads modules on first use."""


class Import:
    """Milliseconds of an import in a new process."""

    def __init__(self, statement: str, bench: Bench) -> None:
        # Byte code goes to a folder of its own, because the environment may forbid writing it elsewhere.
        compiled = bench.resources.enter_context(tempfile.TemporaryDirectory(prefix="streamalloc-bench-"))
        self._environment = {**environment(bench.chosen.driver), "PYTHONPYCACHEPREFIX": compiled}
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._command = [sys.executable, "-c", _IMPORT.format(statement.removeprefix("import "))]

    def measure(self, number: int) -> float:
        """Import once. The first import compiles the modules and fills the page cache."""
        done = subprocess.run(self._command, env=self._environment, capture_output=True, text=True, check=True)
        return float(done.stdout) * 1e3


def _imports(*statements: str) -> dict[str, Setup]:
    return {statement: functools.partial(Import, statement) for statement in statements}


ROWS = (
    Row(
        "host_memory",
        "Host memory of a live buffer",
        {"the bindings' pointer": pointer_memory, "streamalloc": buffer_memory},
        (Target("streamalloc", 250.0), Target("streamalloc", 250.0, simulated=True)),
        most=1,
        unit="bytes",
        rounds="once",
    ),
    Row("import", "Import, in a new process", _imports(BASE, OURS), (Target(OURS, 1.2, BASE),), 1, "ms", "imports"),
)
