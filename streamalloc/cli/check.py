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
from streamalloc.driver import DriverMisuseError, checked
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
    with internal.Block() as undo:
        folder = Path(tempfile.mkdtemp(prefix="streamalloc-check-"))
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        follow = _on_simulated if chosen.is_simulated else _on_gpu
        found, notes, ended = follow(chosen, options, folder)
        found += [one for path in sorted(folder.glob("*.json")) for one in json.loads(path.read_text("utf-8"))]
    if options.report:
        write_file(options.report, json.dumps({"hazards": found, "not checked": notes}, indent=1))
    failed = any(one["kind"] != "leak" for one in found)
    if ended is not None and not (failed and isinstance(ended, SystemExit)):
        raise ended
    return int(failed)


_Ended = SystemExit | DriverMisuseError | None
_Found = tuple[list[dict[str, Any]], list[str], _Ended]
"""Result of a check, as a tuple: hazards as plain data, notes on what was not checked, and how the program ended (its
``SystemExit`` or error; None if it came to its end).
"""


def _on_gpu(chosen: Chosen, options: argparse.Namespace, folder: Path) -> _Found:
    checks: list[Any] = []

    def program() -> None:
        with cupti.check(at_once=True, raises=options.raises) as check, check.in_children(folder):
            checks.append(check)
            running.run_program(options)

    ended = _ended(program)
    return described(checks[0].hazards), [*checks[0].notes], ended


def _on_simulated(chosen: Chosen, options: argparse.Namespace, folder: Path) -> _Found:
    # With this variable, child processes of the program are checked too.
    os.environ.setdefault("STREAMALLOC_CHECK", "1")
    driver: Any = checked(chosen.driver, "raise" if options.raises else "report")
    driver.show_at_once(None)
    ended = _ended(lambda: running.run_on(driver, options))
    found = described(driver.finish())
    driver.show_rest()
    return found, [*driver.notes], ended


def _ended(program: Callable[[], object]) -> _Ended:
    """Run the program. Returns its ``SystemExit``, or the error by which the check has ended it; None if it came to its
    end. In a forked child of the program, these are raised: it reports nothing.
    """
    process, ended = os.getpid(), None
    try:
        program()
    except (SystemExit, DriverMisuseError) as error:
        ended = error
    if os.getpid() != process:
        raise ended or SystemExit
    return ended
