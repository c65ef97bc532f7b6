"""Run a Python program: its calls of ``cuda.bindings`` reach the simulated driver."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

from streamalloc.cli.machine import Chosen
from streamalloc.cli.terminal import Terminal, UsageError
from streamalloc.driver import use
from streamalloc.driver.internal import as_asked
from streamalloc.testing import install

_for_good = contextlib.ExitStack()
"""The installed machine. Threads and exit functions of the program use it after the program's last line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    about = "Python file that registers kernels (testing.kernel); it is run before the program and in child processes"
    parser.add_argument("--kernels", metavar="FILE", action="append", default=[], help=about)
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("program", help="Python file, or module with -m")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")
    rest.required = False  # argparse names only this argument if both are missing


def run(chosen: Chosen, terminal: Terminal, options: argparse.Namespace) -> int:
    """Run the program; its exceptions and exit codes are those of the command."""
    check_files(options)
    if chosen.not_found:
        print(chosen.headline, file=sys.stderr)
    if chosen.is_simulated:
        run_on(as_asked(chosen.driver), options)
    else:
        run_program(options)
    return 0


def check_files(options: argparse.Namespace) -> None:
    """Refuse names of files that do not exist."""
    for file in (*options.kernels, *[options.program] * (not options.module)):
        if not os.path.exists(file):
            raise UsageError(f"there is no file {file!r}")


def run_on(driver: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Run the program on a machine that replaces the functions of ``cuda.bindings``. Returns the program's
    variables.
    """
    _for_good.enter_context(install(driver, kernels=options.kernels))
    with use(driver):
        return run_program(options)


def reported(program: Callable[[], object], report: Callable[[], object]) -> None:
    """Run a program, then call ``report``, even after an exception. A forked child that reaches this point does not
    report.
    """
    process = os.getpid()
    try:
        kept = program()  # the program's variables hold memory
    except UsageError:
        raise
    except BaseException:  # the traceback holds the variables of functions
        if os.getpid() == process:
            report()
        raise
    if os.getpid() == process:
        report()
    del kept


def run_program(options: argparse.Namespace) -> dict[str, Any]:
    """Run the program in this process as Python does. Returns its variables."""
    sys.argv = [options.program, *options.arguments]
    if options.module:
        sys.path.insert(0, os.getcwd())
        if importlib.util.find_spec(options.program.partition(".")[0]) is None:
            raise UsageError(f"there is no module {options.program!r}")
        return runpy.run_module(options.program, run_name="__main__", alter_sys=True)
    sys.path.insert(0, os.path.dirname(os.path.abspath(options.program)))
    return runpy.run_path(options.program, run_name="__main__")
