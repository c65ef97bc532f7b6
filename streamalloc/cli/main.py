"""The command line: its arguments, and what is common to all commands (choice of driver, exit codes, pipes)."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import streamalloc
from streamalloc.cli.choice import choose
from streamalloc.cli.terminal import Terminal
from streamalloc.driver import DriverNotFoundError, use

__all__ = ["main"]

# Each is a module of this package, which is imported when it is asked for.
_COMMANDS = {
    "tour": "watch the library at work, each result checked",
    "info": "print what this machine supports, and what is missing",
    "bench": "measure beside the raw driver calls and other allocators",
    "replay": "replay recorded allocations on pools and other allocators",
}

# As the shell reports a program that SIGPIPE ended: the reader of our output left, which is no failure of ours.
_READER_LEFT = 128 + 13
_INTERRUPTED = 128 + 2

_EPILOG = """\
The driver is the machine's own, or the one that --driver or STREAMALLOC_DRIVER names. Where there is no GPU and
nothing is named, the commands run on the simulated driver and say so in their first line.
"""


def _module(command: str) -> Any:
    return importlib.import_module(f"streamalloc.cli.{command}")


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    about = "GPU memory in stream order, on a real CUDA driver or on a simulated one."
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(_program(), description=about, epilog=_EPILOG, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"streamalloc {streamalloc.__version__}")
    _add_driver_arguments(parser, None)
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, about in _COMMANDS.items():
        command = commands.add_parser(name, help=about)
        if name in words:
            module = _module(name)
            command.description = module.__doc__
            module.add_arguments(command)
            # Behind the command, too; what is not given there does not take back what was given before it.
            _add_driver_arguments(command, argparse.SUPPRESS)
    return parser


def _program() -> str:
    """How this was started, for messages."""
    return "python -m streamalloc" if Path(sys.argv[0]).parts[-2:] == ("streamalloc", "__main__.py") else "streamalloc"


def _add_driver_arguments(parser: argparse.ArgumentParser, default: str | None) -> None:
    about = "cuda, simulated, or with settings: simulated:devices=4,seed=7"
    parser.add_argument("--driver", metavar="DRIVER", default=default, help=about)
    about = "how many GPUs the simulated machine has"
    parser.add_argument("--devices", metavar="N", type=int, default=default, help=about)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0: all went well. 1: a result was not what it should be. 2: the arguments or the choice of driver are wrong.
    """
    # Names of devices come from elsewhere: what the terminal's encoding lacks is shown as "?".
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    words = sys.argv[1:] if arguments is None else arguments
    parser = _parser(words)
    try:
        options = parser.parse_args(words)
        code = _run(parser, options)
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        return _READER_LEFT
    except KeyboardInterrupt:
        return _INTERRUPTED
    return code


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.command is None:
        parser.print_help()
        return 0
    try:
        chosen = choose(options.driver, options.devices)
    except (DriverNotFoundError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    with use(chosen.driver):
        return int(_module(options.command).run(chosen, Terminal(), options))


def _drop_output() -> None:
    """Send what is still buffered nowhere, so that the interpreter's own flush at exit does not fail as well."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
