"""Benchmark row about the time of importing the package."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile

from streamalloc.cli.measuring import Bench, Measured, Row, Setup, Target
from streamalloc.cli.worker import environment

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
        "import",
        "Import, in a new process",
        {one: _import(one) for one in (BASE, OURS)},
        (Target(OURS, 1.2, BASE),),
        1,
        "ms",
        "imports",
    ),
)
