"""Run a Python program, unchanged, and report where its GPU work lacks an order: a tensor that is dropped while another
stream reads it, a buffer that is written before its copy has ended, a missing wait between two streams.

On a GPU the command follows the driver calls of all libraries (PyTorch, CuPy, Numba and others) through NVIDIA's CUPTI,
also in the Python processes that the program starts. On the simulated driver it follows programs that call
cuda.bindings or use this package, and lists leaks, too. The exit status is 1 if something other than a leak was found,
and otherwise that of the program.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from streamalloc import cupti
from streamalloc.cli import run as running
from streamalloc.cli.machine import Chosen
from streamalloc.cli.terminal import Terminal, write_file
from streamalloc.cupti import internal
from streamalloc.driver import checked
from streamalloc.driver.internal import described


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--raise``, ``--json`` and the arguments of the program to the parser of this command."""
    about = "end the program at the first finding, by an exception in its main thread"
    parser.add_argument("--raise", dest="raises", action="store_true", help=about)
    parser.add_argument("--json", dest="report", metavar="FILE", help="write what was found to a file, too")
    running.add_arguments(parser)


def run(chosen: Chosen, terminal: Terminal, options: argparse.Namespace) -> int:
    """Run the program, and check its GPU work. Returns the exit code: 1 if something other than a leak was found, else
    0.

    Exceptions and exit codes of the program are those of the command; but if something other than a leak was found, a
    ``SystemExit`` of the program becomes the exit code 1. With ``--raise`` a hazard raises ``DriverMisuseError``.
    Raises :class:`UsageError` if the program or a file of ``--kernels`` does not exist, or if the file of ``--json``
    cannot be written.
    """
    running.check_files(options)
    checks: list[Any] = []
    found: list[dict[str, Any]] = []
    with internal.Block() as undo:
        folder = Path(tempfile.mkdtemp(prefix="streamalloc-check-"))
        undo.callback(shutil.rmtree, folder, ignore_errors=True)

        def report() -> None:
            found.extend(described(one for check in checks for one in check.hazards))
            own = folder / f"{os.getpid()}.json"
            files = [path for path in sorted(folder.glob("*.json")) if path != own]
            found.extend(json.loads(line) for path in files for line in path.read_text("utf-8").splitlines())
            if options.report:
                notes = [note for check in checks for note in check.notes]
                write_file(options.report, json.dumps({"hazards": found, "not checked": notes}, indent=1))

        follow = _on_simulated if chosen.is_simulated else _on_gpu
        try:
            running.reported(lambda: follow(chosen, options, folder, checks), report)
        except SystemExit:
            if all(one["kind"] == "leak" for one in found):
                raise
    return int(any(one["kind"] != "leak" for one in found))


def _on_gpu(chosen: Chosen, options: argparse.Namespace, folder: Path, checks: list[Any]) -> None:
    """Run the program. Its check is added to ``checks``."""
    with cupti.check(at_once=True, raises=options.raises) as check, check.in_children(folder):
        checks.append(check)
        running.run_program(options)


def _on_simulated(chosen: Chosen, options: argparse.Namespace, folder: Path, checks: list[Any]) -> None:
    """Run the program. The driver that checks it is added to ``checks``."""
    # Without these variables, child processes of the program would not be checked, and their hazards not be counted.
    os.environ.setdefault("STREAMALLOC_CHECK", "1")
    os.environ["STREAMALLOC_CHECK_FOLDER"] = str(folder)
    driver: Any = checked(chosen.driver, "raise" if options.raises else "report")
    driver.show_at_once(None)
    checks.append(driver)

    def program() -> None:  # The program's variables are dropped: memory that only they keep is no leak.
        running.run_on(driver, options)

    running.reported(program, lambda: (driver.finish(), driver.show_rest()))
