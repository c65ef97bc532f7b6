"""Run a Python program, unchanged, and report where its GPU work lacks an order: a tensor that is dropped while another
stream reads it, a buffer that is written before its copy has ended, a missing wait between two streams.

On a GPU the command follows the driver calls of all libraries (PyTorch, CuPy, Numba and others) through NVIDIA's CUPTI,
also in the Python processes that the program starts. On the simulated driver it follows programs that call
cuda.bindings, and lists leaks, too. The exit status is 1 if something other than a leak was found, and otherwise that
of the program.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable
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
    found: list[dict[str, Any]] = []
    with internal.Block() as undo:
        folder = Path(tempfile.mkdtemp(prefix="streamalloc-check-"))
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        program, finish = (_on_simulated if chosen.is_simulated else _on_gpu)(chosen, options, folder)

        def report() -> None:
            hazards, notes = finish()
            found.extend(hazards)
            found.extend(one for path in sorted(folder.glob("*.json")) for one in json.loads(path.read_text("utf-8")))
            if options.report:
                write_file(options.report, json.dumps({"hazards": found, "not checked": notes}, indent=1))

        try:
            running.reported(program, report)
        except SystemExit:
            if all(one["kind"] == "leak" for one in found):
                raise
    return int(any(one["kind"] != "leak" for one in found))


_Findings = tuple[list[dict[str, Any]], list[str]]
_Parts = tuple[Callable[[], None], Callable[[], _Findings]]
"""A function that runs the program, and a function that then returns the findings of this process: hazards as plain
data, and notes on what was not checked.
"""


def _on_gpu(chosen: Chosen, options: argparse.Namespace, folder: Path) -> _Parts:
    checks: list[Any] = []

    def program() -> None:
        with cupti.check(at_once=True, raises=options.raises) as check, check.in_children(folder):
            checks.append(check)
            running.run_program(options)

    def finish() -> _Findings:
        return described(one for check in checks for one in check.hazards), [n for check in checks for n in check.notes]

    return program, finish


def _on_simulated(chosen: Chosen, options: argparse.Namespace, folder: Path) -> _Parts:
    # With these variables, child processes of the program are checked too, and write what they find to the folder.
    os.environ.setdefault("STREAMALLOC_CHECK", "1")
    os.environ["STREAMALLOC_CHECK_FOLDER"] = str(folder)
    driver: Any = checked(chosen.driver, "raise" if options.raises else "report")
    driver.show_at_once(None)

    def program() -> None:
        running.run_on(driver, options)

    def finish() -> _Findings:
        found = described(driver.finish())
        driver.show_rest()
        return found, [*driver.notes]

    return program, finish
