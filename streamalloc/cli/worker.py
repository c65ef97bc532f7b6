"""The second process that ``info``, ``bench`` and ``tour`` use: a new interpreter with the same driver."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from streamalloc.cli.machine import choose
from streamalloc.core.resource import Closes
from streamalloc.driver import Driver, set_default
from streamalloc.driver.internal import choice_of

SECONDS = 60.0
"""Seconds to wait for the other process. Making a context takes long on a busy GPU."""
context: Any = multiprocessing.get_context("spawn")
"""Context of multiprocessing: spawn, because this process has used CUDA, which a forked child then cannot use."""


class WorkerError(RuntimeError):
    """The other process has ended, or a function has raised an error there. The message has the error's class and
    text.
    """


def start(driver: Driver, half: Callable[..., object], *arguments: Any) -> tuple[Any, Connection]:
    """Start a process that calls ``half(theirs, *arguments)``. ``theirs`` is its end of a pipe. Returns a tuple of the
    process and this process's end of the pipe.

    The process uses the same driver, or simulates the same machine. The process ends without output once this process's
    end of the pipe is closed.
    """
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(choice_of(driver), half, theirs, *arguments), daemon=True)
    with theirs:
        process.start()
    return process, ours


def _run(driver: str, half: Callable[..., object], connection: Connection, *arguments: Any) -> None:
    set_default(choose(driver).driver)
    # Ctrl+C ends the command, and so closes the command's end of the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, ConnectionError):
        half(connection, *arguments)


class Worker(Closes):
    """Another process that calls functions for the command, one after another."""

    def __init__(self, driver: Driver) -> None:
        self.process, self._connection = start(driver, _answer)

    def ask(self, function: Callable[..., object], *arguments: object) -> Any:
        """Call ``function`` in the other process, and return its result.

        Memory and events among the arguments are shared with the other process.

        Raises
        ------
        WorkerError
            The function has raised an error, the process has ended, or an earlier call has timed out.
        TimeoutError
            The process has not answered for 60 s.
        """
        if self._connection.closed:
            raise WorkerError("the other process has not answered an earlier call in time")
        try:
            self._connection.send((function, arguments))
            if not self._connection.poll(SECONDS):
                # The next call would take the late answer as its own.
                self._connection.close()
                raise TimeoutError(f"the other process has not answered for {SECONDS:.0f} s")
            failed, answer = self._connection.recv()
        except (EOFError, ConnectionError):
            raise WorkerError("the other process has ended") from None
        if failed:
            raise WorkerError(answer)
        return answer

    def close(self) -> None:
        """End the process and wait for its end. After 60 s it is killed. Idempotent."""
        self._connection.close()
        try:
            self.process.join(SECONDS)
        finally:
            self.process.kill()
            self.process.join()


def _answer(connection: Connection) -> None:
    """Call the functions that :meth:`Worker.ask` sends, and send their results back, until the command closes its end
    of the pipe.
    """
    while True:
        try:
            function, arguments = connection.recv()
            answer = False, function(*arguments)
        except EOFError:
            return
        except Exception as error:
            answer = True, f"{type(error).__name__}: {error}"
        connection.send(answer)
