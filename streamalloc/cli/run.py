"""Run a Python program: its calls of ``cuda.bindings`` reach the simulated driver, or the machine's own driver, if that
is chosen.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import runpy
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from streamalloc.cli.machine import Chosen
from streamalloc.cli.terminal import Terminal, UsageError
from streamalloc.driver import use
from streamalloc.driver.internal import as_asked
from streamalloc.testing import install

_for_good = contextlib.ExitStack()
"""Keeps the installed machine until the process ends, because threads and exit functions use it after the program's
last line.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--kernels``, ``-m``, the program and its arguments to the parser of the command."""
    about = "Python file that registers kernels (testing.kernel); it is run before the program and in child processes"
    parser.add_argument("--kernels", metavar="FILE", action="append", default=[], help=about)
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("program", help="Python file, or module with -m")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")
    rest.required = False  # If the program is missing, argparse would otherwise name these arguments in its error too.


def run(chosen: Chosen, terminal: Terminal, options: argparse.Namespace) -> int:
    """Run the program on the chosen driver: a simulated one, or the machine's own. Returns the exit code 0.

    Exceptions and exit codes of the program are those of the command. Raises :class:`UsageError` if the program or a
    file of ``--kernels`` does not exist.
    """
    check_files(options)
    if chosen.not_found:
        print(chosen.headline, file=sys.stderr)
    if chosen.is_simulated:
        run_on(as_asked(chosen.driver), options)
    else:
        run_program(options)
    return 0


def check_files(options: argparse.Namespace) -> None:
    """Raise :class:`UsageError` if the program or a file of ``--kernels`` does not exist."""
    for file in (*options.kernels, *[options.program] * (not options.module)):
        if not os.path.exists(file):
            raise UsageError(f"there is no file {file!r}")


def run_on(driver: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Run the program with a simulated machine in place of ``cuda.bindings``. Returns the global variables of the
    program. The machine stays in place of ``cuda.bindings`` until this process ends.
    """
    _for_good.enter_context(install(driver, kernels=options.kernels))
    with use(driver):
        return run_program(options)


def reported(program: Callable[[], object], report: Callable[[], object]) -> object:
    """Run a program, then call ``report``, also after an exception of the program. Returns the result of ``program``.

    A forked child of the program does not call ``report``. After a ``UsageError`` there is no report.

    During the report, the result keeps the program's variables, because they hold memory that the report has to show.
    After an exception, its traceback keeps the variables of the program's functions.
    """
    process = os.getpid()
    try:
        return program()
    except UsageError:
        process = 0
        raise
    finally:
        if os.getpid() == process:
            report()


def run_program(options: argparse.Namespace) -> dict[str, Any]:
    """Run the program in this process, as ``python`` would, until its threads have ended that are no daemons. Returns
    the global variables of the program. After an error other than ``SystemExit``, the threads are not awaited.

    ``sys.argv`` and ``sys.path`` are set for the program, and stay so. Raises :class:`UsageError` if there is no such
    module, or the package or folder has no ``__main__``.
    """
    sys.argv = [options.program, *options.arguments]
    if options.module:
        sys.path.insert(0, os.getcwd())
        if importlib.util.find_spec(options.program.partition(".")[0]) is None:
            raise UsageError(f"there is no module {options.program!r}")
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(options.program)))
    try:
        if options.module:
            return runpy.run_module(options.program, run_name="__main__", alter_sys=True)
        # As with python, ``__file__`` is absolute: the program may change its folder, and then open a file beside it.
        return runpy.run_path(os.path.abspath(options.program), run_name="__main__")
    except BaseException as error:
        if isinstance(error, ImportError) and _in_program(error.__traceback__) is None:
            raise UsageError(str(error)) from None
        if sys.excepthook is sys.__excepthook__:  # Otherwise the program has chosen how its errors are shown.
            sys.excepthook = _show_error
        raise
    finally:
        # The interpreter also makes this call at its end. It ends idle threads of executors, which a join would not.
        if sys.exc_info()[0] in (None, SystemExit):
            importlib.import_module("concurrent.futures.thread")  # After the shutdown, its first import would raise.
            threading._shutdown()  # type: ignore[attr-defined]


def _show_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error with its traceback, as ``python`` would, without the frames before those of the program."""
    shown = _in_program(trace)
    sys.__excepthook__(kind, error.with_traceback(shown), shown)


def _in_program(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames before those of the program; None if nothing of the program has run. The
    traceback of an error of a command itself is returned whole.
    """
    shown, inside = trace, False
    while shown is not None and not (inside and shown.tb_frame.f_globals.get("__name__") != "runpy"):
        inside = inside or shown.tb_frame.f_code is run_program.__code__
        shown = shown.tb_next
    return shown if inside else trace
