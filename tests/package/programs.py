"""A process that runs programs, each in a fork of its own: a new process, without the time that imports take."""

import contextlib
import gc
import importlib
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.processes import environment, fork, python


class Finished(NamedTuple):
    """A program that has ended."""

    code: int
    output: str
    errors: str


class Runner:
    """The process, seen from here."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, folder: Path, *arguments: str) -> Finished:
        """Run ``python ARGUMENTS`` in a folder, to its end."""
        assert self._process.stdin and self._process.stdout
        with tempfile.TemporaryDirectory() as written:
            print(folder, written, *arguments, file=self._process.stdin, flush=True)
            code = int(self._process.stdout.readline())
            return Finished(code, *(Path(written, name).read_text() for name in ("1", "2")))


@contextlib.contextmanager
def runner(on_cuda: bool, **variables: str) -> Iterator[Runner]:
    """Start the process, with these environment variables."""
    with subprocess.Popen(
        python("from tests.package.programs import serve; serve()"),
        env=environment(on_cuda, PYTHONWARNINGS="error", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", **variables),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        yield Runner(process)


_AREAS = ("checker", "interop", "ipc", "multicast", "simulator", "vmm")


def serve() -> None:
    """Run a program for each line of the standard input, and write its exit code."""
    # What programs would import, each for itself.
    for name in ("pytest", "streamalloc.testing.leaks", *(f"streamalloc.{area}" for area in _AREAS)):
        importlib.import_module(name)
    # The end of a program collects what it has made only: with all modules it takes four times as long.
    gc.freeze()
    for line in iter(sys.stdin.readline, ""):
        folder, written, *arguments = line.split()
        child = fork()
        if not child:
            os.chdir(folder)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number in (1, 2):
                os.dup2(os.open(f"{written}/{number}", os.O_CREAT | os.O_WRONLY), number)
            _run(arguments)
            return  # to the end of the program, as that of a new process
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, os.getcwd()
        runpy.run_path(os.path.abspath(arguments[0]), run_name="__main__")
