"""The command line of streamalloc: finds the command, has its driver chosen, and gives the exit code."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import streamalloc
from streamalloc.cli.machine import choose
from streamalloc.cli.terminal import OutputError, Terminal, UsageError, check_output
from streamalloc.driver import DriverNotFoundError, use

_COMMANDS = {
    "tour": "show the library at work and check each result",
    "info": "print the features that this machine supports or lacks",
    "profile": "write what this machine is like to a file that simulated machines are made of",
    "bench": "measure the library beside raw driver calls and other libraries",
    "replay": "replay recorded allocations on pools and other allocators",
    "serve": "hold weights in GPU memory for engines that come and go",
    "store": "list, show or remove what stores hold",
    "run": "run a program on the simulated driver",
    "check": "run a program and report missing order among all its GPU work",
    "memory": "run a program and show which library and line takes its device memory",
    "record": "run a program and record its allocations for replay",
}
"""Commands with their help texts. Each command is a module in this folder. The module is imported only when the command
runs.
"""

_WITHOUT_DRIVER = ("serve", "store")
"""Commands that choose a driver themselves, or use none."""

_OUTPUTS = ("html", "json", "output", "picture", "report")
"""Options whose values name files that a command writes at its end. The files are checked before the command runs,
because a program or a measurement may run for hours.
"""

_READER_LEFT = 128 + 13
"""Exit code if the reader of the output has closed the pipe, as after SIGPIPE."""
_INTERRUPTED = 128 + 2
"""Exit code after an interrupt (Ctrl+C), as after SIGINT."""

_EPILOG = """\
--driver or STREAMALLOC_DRIVER selects the driver; the default is the machine's own. Without a GPU and a selection,
all commands except profile run on the simulated driver. The first line of the output of tour, info, bench and replay
names the driver; that of run does so if nothing was selected.
"""


def _module(command: str) -> Any:
    return importlib.import_module(f"streamalloc.cli.{command}")


class _Parser(argparse.ArgumentParser):
    """Argument parser that suggests the most similar word for an unknown word."""

    def error(self, message: str) -> NoReturn:
        choices = re.findall(r"[\w-]+", message.partition("choose from")[2])
        for word in map("".join, re.findall(r"invalid choice: '([^']*)'|\s(-[\w-]+)", message)):
            near = difflib.get_close_matches(word, [*choices, *self._option_string_actions], 1, cutoff=0.65)
            message += f"; did you mean {near[0]}?" if near and near[0] != word else ""
        super().error(message)


class _Command(_Parser):
    """Parser of one command. For unknown arguments it prints the usage of the command, not that of the whole
    program.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    about = "GPU memory in stream order, on a real CUDA driver or on a simulated one."
    as_module = Path(sys.argv[0]).parts[-2:] == ("streamalloc", "__main__.py")
    parser = _Parser("python -m streamalloc" if as_module else "streamalloc", description=about, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"streamalloc {streamalloc.__version__}")
    _add_driver_arguments(parser, None)
    commands = parser.add_subparsers(dest="command", metavar="command", parser_class=_Command)
    for name, about in _COMMANDS.items():
        # Without "resolve", a command could not define its own option --devices.
        command = commands.add_parser(name, help=about, conflict_handler="resolve")
        if name in words:
            module = _module(name)
            command.description = module.__doc__
            # These options may also stand after the command. SUPPRESS keeps a value that stands before the command.
            _add_driver_arguments(command, argparse.SUPPRESS)
            module.add_arguments(command)
    return parser


def _add_driver_arguments(parser: argparse.ArgumentParser, default: str | None) -> None:
    about = (
        "cuda, simulated, or with settings: simulated:devices=4,seed=7 (default: STREAMALLOC_DRIVER, or else cuda, or "
        "where there is none simulated)"
    )
    parser.add_argument("--driver", metavar="DRIVER", default=default, help=about)
    about = "number of GPUs of the simulated machine (default: 2 if it was not asked for, otherwise 1)"
    parser.add_argument("--devices", metavar="N", type=int, default=default, help=about)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` name (default: ``sys.argv[1:]``). Returns its exit code.

    * 0: success.
    * 1: ``tour`` found a wrong result, ``check`` found something other than a leak, or ``replay`` replayed nothing.
    * 2: wrong arguments, no driver, or output that cannot be written.
    * 130: interrupted.
    * 141: the reader of a pipe has closed it.

    The commands ``run``, ``check``, ``memory`` and ``record`` run a program: its exceptions and its ``SystemExit`` pass
    through this function. Arguments that the parser refuses, ``--help`` and ``--version`` raise ``SystemExit``, too.
    """
    # The name of a device may have characters that the terminal's encoding lacks. Such characters are printed as "?".
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    words = sys.argv[1:] if arguments is None else arguments
    parser = _parser(words)
    options = parser.parse_args(words)
    try:
        return _run(parser, options)
    except OutputError as error:
        _drop_output()
        if isinstance(error.__cause__, BrokenPipeError):
            return _READER_LEFT
        print(f"{parser.prog}: cannot write the output: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if options.command in ("run", "check", "memory", "record"):
            # Ctrl+C is meant for the program that the command runs. So the interrupt ends this process as it would end
            # the program.
            raise
        return _INTERRUPTED


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    terminal = Terminal(getattr(options, "json", None))
    if options.command is None:
        terminal.line(parser.format_help().rstrip())
        return 0
    try:
        for path in (getattr(options, name, None) for name in _OUTPUTS):
            if path not in (None, "-"):
                check_output(path)
        if options.command in _WITHOUT_DRIVER:
            return int(_module(options.command).run(terminal, options))
        try:
            chosen = choose(options.driver, options.devices)
        except (DriverNotFoundError, ValueError) as error:
            print(f"{parser.prog}: {error}", file=sys.stderr)
            return 2
        with use(chosen.driver):
            return int(_module(options.command).run(chosen, terminal, options))
    except UsageError as error:
        print(f"{parser.prog} {options.command}: {error}", file=sys.stderr)
        return 2


def _drop_output() -> None:
    """Redirect the standard output to the null device.

    Otherwise the interpreter's flush at exit would fail, and print a second error.
    """
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
