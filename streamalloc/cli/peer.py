"""Another Python process that the commands share memory with: a new interpreter, with a driver of the same kind.

It does what it is told over a channel, one thing after the other: the methods of a module's class ``Other``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import streamalloc as sa
from streamalloc import ipc
from streamalloc.core.ownership import Closes
from streamalloc.driver import Driver

__all__ = ["POSIX", "Here", "Peer", "PeerError", "can_share_pools", "environment", "main", "read", "start"]

POSIX = sa.MemHandleType.POSIX_FILE_DESCRIPTOR

# Ample for a new process that makes a context on a GPU, while other processes do the same.
_SECONDS = 60.0


def can_share_pools(device: sa.Device) -> bool:
    """Whether the pools of a device can be shared with another process of the machine."""
    return POSIX in (device.supports.pool_handle_types or sa.MemHandleType.NONE)


def read(memory: Any, stream: sa.Stream) -> np.ndarray[Any, Any]:
    """The bytes of some memory, once the stream has done all that it was given."""
    host = np.full(memory.nbytes, 0xEE, np.uint8)
    memory.copy_to(host, stream)
    stream.synchronize()
    return host


class PeerError(RuntimeError):
    """The other process raised an error: ``kind`` is the class's name, the message is its text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def environment(driver: Driver) -> dict[str, str]:
    """The environment of a process whose default driver is of the same kind, or simulates the same machine."""
    package = str(Path(sa.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    found = {**os.environ, "PYTHONPATH": path, "STREAMALLOC_DRIVER": "cuda"}
    if getattr(driver, "is_simulated", False):
        found |= {"STREAMALLOC_DRIVER": "simulated", "STREAMALLOC_MACHINE": driver.machine_name}  # type: ignore[attr-defined]
    return found


def start(driver: Driver, fd: int, actions: str) -> subprocess.Popen[bytes]:
    """Start the other process with one descriptor of this process."""
    # Not run as a module, which would be another one than the module of the actions imports.
    command = [sys.executable, "-c", f"from {__name__} import main; main()", str(fd), actions]
    nothing = subprocess.DEVNULL
    return subprocess.Popen(command, env=environment(driver), pass_fds=[fd], stdin=nothing, stdout=nothing)


class Peer(Closes):
    """The other process, as the command sees it. Closing it, also by leaving the ``with`` block, waits for its end.

    Parameters
    ----------
    driver
        The driver of this process.
    actions
        The name of the module that says what the other process can do.
    """

    def __init__(self, driver: Driver, actions: str) -> None:
        self.channel: ipc.Channel
        self.channel, theirs = ipc.Channel.pair()
        self.channel.timeout = _SECONDS
        with theirs:
            self.process: subprocess.Popen[bytes] = start(driver, theirs.fileno(), actions)

    def begin(self, action: str, *arguments: Any, fds: Sequence[ipc.Fd | int] = ()) -> None:
        """Have it begin an action; what that needs besides is sent over :attr:`channel`."""
        self.channel.send(json.dumps([action, arguments]).encode(), fds)

    def result(self) -> Any:
        """What the action answered.

        Raises
        ------
        PeerError
            It raised an error.
        PeerGoneError, TimeoutError
            The process has ended, or does not answer.
        """
        failed, answer = json.loads(self.channel.receive().data)
        if failed:
            raise PeerError(*answer)
        return answer

    def ask(self, action: str, *arguments: Any, fds: Sequence[ipc.Fd | int] = ()) -> Any:
        """Have it do an action, and wait for the answer."""
        self.begin(action, *arguments, fds=fds)
        return self.result()

    def give(self, action: str, thing: object, *arguments: Any) -> Any:
        """Have it do an action with something that is shared with it, or was already."""
        # Shared first: where that is refused nothing is left waiting.
        shared = thing if isinstance(thing, ipc.Shared) else ipc.share(thing)
        self.begin(action, *arguments)
        ipc.send(self.channel, shared)
        return self.result()

    def close(self) -> None:
        """Let it end, and wait for that; idempotent."""
        self.channel.close()
        try:
            self.process.wait(_SECONDS)
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise


class Here:
    """What the other process has; the methods of a class of this kind are what it can do."""

    def __init__(self, channel: ipc.Channel) -> None:
        self.channel = channel
        self.device: sa.Device = sa.Device(0)
        self.stream: sa.Stream = self.device.create_stream()
        self.opened: dict[str, Any] = {}
        """What it has opened and not closed, by the names that it was given."""
        self.handles: tuple[ipc.Fd, ...] = ()
        """What came with the action."""
        self.resources: contextlib.ExitStack = contextlib.ExitStack()
        """What lives until its end."""

    def receive(self) -> Any:
        """Something that is shared with this process, opened on its stream."""
        return ipc.receive(self.channel, stream=self.stream)


def main() -> None:
    """The other process, from its beginning to its end: ``FD MODULE`` are its arguments."""
    channel = ipc.Channel.from_fd(int(sys.argv[1]))
    other = importlib.import_module(sys.argv[2]).Other
    try:
        here = other(channel)
        while True:
            message = channel.receive()
            name, arguments = json.loads(message.data)
            here.handles = message.handles
            channel.send(_answer(getattr(here, name), arguments))
    except (ipc.PeerGoneError, KeyboardInterrupt):
        # The command has ended, or was interrupted as this process was.
        return


def _answer(action: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    try:
        return json.dumps([False, action(*arguments)]).encode()
    except ipc.PeerGoneError:
        raise
    except Exception as error:
        return json.dumps([True, [type(error).__name__, str(error)]]).encode()
