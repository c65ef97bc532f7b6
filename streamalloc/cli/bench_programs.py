"""Benchmark rows about whole programs: the import of the package, and traces replayed on every installed allocator."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile

from streamalloc import traces
from streamalloc.cli.measuring import Bench, Measured, Row, Setup, Target
from streamalloc.cli.worker import environment

_TIMED = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
BASE = "import cuda.bindings.driver, numpy"
IMPORT = "import streamalloc; streamalloc.MemoryPool"
"""Names a class, because the package loads modules on first use."""


def _import(statement: str) -> Setup:
    """Return the milliseconds of an import in a new process."""

    def setup(bench: Bench) -> Measured:
        # Byte code goes to a folder of its own, because the environment may forbid writing it elsewhere.
        compiled = bench.resources.enter_context(tempfile.TemporaryDirectory(prefix="streamalloc-bench-"))
        variables = {**environment(bench.chosen.driver), "PYTHONPYCACHEPREFIX": compiled}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-c", _TIMED.format(statement.removeprefix("import "))]
        run = functools.partial(subprocess.run, command, env=variables, capture_output=True, text=True, check=True)
        # The first import compiles the modules and fills the page cache.
        return Measured(lambda number: float(run().stdout) * 1e3)

    return setup


OURS = traces.ALLOCATORS["cached"].title
OTHERS = tuple(traces.ALLOCATORS[name].title for name in ("pytorch", "cupy"))


def _on(name: str, trace: str) -> Setup:
    """Return the milliseconds of a replay, with the figures of the first one."""

    def setup(bench: Bench) -> Measured:
        made = _made(trace)
        # A replay of its own: its figures are taken after each allocation, which takes time.
        once = traces.replay(made, name, bench.device, rounds=1)
        measured = ("failures", "peak_used", "peak_reserved", "driver_calls", "reserved_over_used")
        found = {one: getattr(once, one) for one in measured}
        replay = bench.resources.enter_context(traces.prepare(made, name, bench.device))
        extra = {name: value for name, value in found.items() if value is not None}
        return Measured(lambda number: replay.run() * 1e3, extra)

    return setup


@functools.cache
def _made(name: str) -> traces.Trace:
    return traces.WORKLOADS[name]()


ROWS = (
    Row(
        "import",
        "Import, in a new process",
        {one: _import(one) for one in (BASE, IMPORT)},
        (Target(IMPORT, 1.2, BASE),),
        most=1,
        unit="ms",
        rounds="imports",
    ),
    *(
        Row(
            f"replay_{trace}",
            f"Replay of a trace: {trace}",
            {entry.title: _on(name, trace) for name, entry in traces.ALLOCATORS.items()},
            tuple(Target(OURS, 1.0, other, figure) for other in OTHERS for figure in ("", "reserved_over_used")),
            most=1,
            unit="ms",
            rounds="replays",
        )
        for trace in traces.WORKLOADS
    ),
)
