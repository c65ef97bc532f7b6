"""Run a Python program on the simulated driver: its calls of ``cuda.bindings`` reach that driver."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from streamalloc.cli.choice import Chosen, UsageError
from streamalloc.cli.terminal import Terminal
from streamalloc.driver.internal import as_asked
from streamalloc.testing import install


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    about = "Python file that registers kernels (testing.kernel); it is run before the program and in child processes"
    parser.add_argument("--kernels", metavar="FILE", action="append", default=[], help=about)
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("program", help="Python file, or module with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")


def run(chosen: Chosen, terminal: Terminal, options: argparse.Namespace) -> int:
    """Run the program. Its exceptions and exit code become those of the command."""
    if chosen.not_found:
        print(chosen.headline, file=sys.stderr)
    if not chosen.is_simulated:
        _run(options)
        return 0
    with install(as_asked(chosen.driver), kernels=options.kernels):
        _run(options)
    return 0


def _run(options: argparse.Namespace) -> None:
    sys.argv = [options.program, *options.arguments]
    if options.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
    else:
        if not os.path.exists(options.program):
            raise UsageError(f"there is no file {options.program!r}")
        sys.path.insert(0, os.path.dirname(os.path.abspath(options.program)))
        runpy.run_path(options.program, run_name="__main__")
