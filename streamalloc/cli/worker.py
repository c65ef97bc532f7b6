"""Worker: the other process of ``info``, ``bench`` and ``tour``, a new interpreter with the same driver.

It receives actions over a channel, and runs them one by one. They are methods of a subclass of :class:`WorkerBase`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import streamalloc as sa
from streamalloc import ipc
from streamalloc.core.resource import Closes
from streamalloc.driver import Driver
from streamalloc.driver.internal import choice_of

SECONDS = 60.0
"""Seconds to wait for the other process. To make a context takes long on a busy GPU."""


def read(memory: Any, stream: sa.Stream) -> np.ndarray[Any, Any]:
    """Copy memory to the host, wait for the stream, and return the bytes."""
    host = np.full(memory.nbytes, 0xEE, np.uint8)
    memory.copy_to(host, stream)
    stream.synchronize()
    return host


class WorkerError(RuntimeError):
    """An action has raised an error. The message has its class and text."""


def environment(driver: Driver) -> dict[str, str]:
    """Return environment variables with which a new process uses the same driver, or simulates the same machine."""
    package = str(Path(sa.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "STREAMALLOC_DRIVER": choice_of(driver)}


def start(driver: Driver, fd: int, actions: str) -> subprocess.Popen[bytes]:
    """Start the other process, which inherits the file descriptor ``fd``."""
    # Not with -m: this module would exist twice, as __main__ and as the actions import it.
    command = [sys.executable, "-c", f"from {__name__} import main; main()", str(fd), actions]
    nothing = subprocess.DEVNULL
    return subprocess.Popen(command, env=environment(driver), pass_fds=[fd], stdin=nothing, stdout=nothing)


class Worker(Closes):
    """The other process, as the command sees it. A close ends the process and waits for it.

    Parameters
    ----------
    driver
        The driver of this process.
    actions
        The class whose methods it runs.
    """

    def __init__(self, driver: Driver, actions: type[WorkerBase]) -> None:
        self.channel: ipc.Channel
        self.channel, theirs = ipc.Channel.pair()
        self.channel.timeout = SECONDS
        with theirs:
            self.process: subprocess.Popen[bytes] = start(
                driver, theirs.fileno(), f"{actions.__module__}:{actions.__name__}"
            )

    def begin(self, action: str, *arguments: Any, fds: Sequence[ipc.Fd | int] = ()) -> None:
        """Begin an action of the other process. Messages that the action receives follow on :attr:`channel`, and
        :meth:`result` waits for its end.
        """
        self.channel.send(json.dumps([action, arguments]).encode(), fds)

    def result(self) -> Any:
        """Wait for the action that was begun, and return its result.

        Raises
        ------
        WorkerError
            The action has raised an error.
        PeerGoneError, TimeoutError
            The process has ended, or does not answer in time.
        """
        failed, answer = json.loads(self.channel.receive().data)
        if failed:
            raise WorkerError(answer)
        return answer

    def ask(self, action: str, *arguments: Any, fds: Sequence[ipc.Fd | int] = ()) -> Any:
        """Run an action, and return its result."""
        self.begin(action, *arguments, fds=fds)
        return self.result()

    def give(self, action: str, thing: object, *arguments: Any) -> Any:
        """Run an action that receives an object, which is shared first unless it is shared already."""
        # Shared before begin(). If that failed afterwards, the other process would wait for the object for ever.
        shared = thing if isinstance(thing, ipc.Shared) else ipc.share(thing)
        self.begin(action, *arguments)
        ipc.send(self.channel, shared)
        return self.result()

    def close(self) -> None:
        """End the process, and wait for it; idempotent."""
        self.channel.close()
        try:
            self.process.wait(SECONDS)
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise


class WorkerBase:
    """State of the other process. A subclass has the actions as methods."""

    def __init__(self, channel: ipc.Channel) -> None:
        self.channel = channel
        self.device: sa.Device = sa.Device(0)
        self.stream: sa.Stream = self.device.create_stream()
        self.opened: dict[str, Any] = {}
        """Opened objects, by the names that the command gives them."""
        self.handles: tuple[ipc.Fd, ...] = ()
        """File descriptors that came with the present action."""
        self.resources: contextlib.ExitStack = contextlib.ExitStack()
        """Resources that stay until the process ends."""

    def receive(self) -> Any:
        """Receive a shared object, and open it on this process's stream."""
        return ipc.receive(self.channel, stream=self.stream)


def main() -> None:
    """Run the other process. The command-line arguments are a file descriptor and a class of actions."""
    channel = ipc.Channel.from_fd(int(sys.argv[1]))
    actions = pkgutil.resolve_name(sys.argv[2])
    try:
        worker = actions(channel)
        while True:
            message = channel.receive()
            name, arguments = json.loads(message.data)
            worker.handles = message.handles
            channel.send(_answer(getattr(worker, name), arguments))
    except (ipc.PeerGoneError, KeyboardInterrupt):
        # The command has ended, or Ctrl+C has interrupted both processes.
        return


def _answer(action: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    try:
        return json.dumps([False, action(*arguments)]).encode()
    except ipc.PeerGoneError:
        raise
    except Exception as error:
        return json.dumps([True, f"{type(error).__name__}: {error}"]).encode()
