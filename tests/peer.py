"""Another process with a driver of the same kind, made to do driver calls one by one.

A test says ``peer.said("cuMemPoolTrimTo", Kept("pool"), 0)`` as it would say ``said(raw.cuMemPoolTrimTo(pool, 0))``:
the call is made over there, with what was kept there under a name. The process is a fresh interpreter, never a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import streamalloc.driver as sd
from tests.facts.support import Rig, said

_ROOT = Path(__file__).resolve().parent.parent
_LARGEST = 1 << 16
OPAQUE_BYTES = 64


class Kept(NamedTuple):
    """Stands for what the other process keeps under a name."""

    name: str


class Descriptor(NamedTuple):
    """Stands for a descriptor of this process, and is sent along: a duplicate of it over there."""

    fd: int


class Opaque(NamedTuple):
    """Stands for a struct of the bindings that holds these 64 bytes."""

    name: str
    data: bytes


class Member(NamedTuple):
    """Stands for a member of an enum of the bindings."""

    name: str
    number: int


def bytes_of(struct: Any) -> bytes:
    """The 64 bytes of an opaque struct, which not every version of the bindings shows."""
    return ctypes.string_at(int(struct.getPtr()), OPAQUE_BYTES)


def opaque(struct: Any, data: bytes) -> Any:
    """The struct, with these bytes put into it."""
    assert len(data) == OPAQUE_BYTES
    ctypes.memmove(int(struct.getPtr()), data, OPAQUE_BYTES)
    return struct


class Peer:
    """The other process; device 0's primary context is current there. ``machine``: arguments of ``simulated``."""

    def __init__(self, on_cuda: bool, **machine: Any) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(60)
        code = f"from tests.peer import serve; serve({theirs.fileno()}, {on_cuda}, {machine})"
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": path},
        )
        theirs.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- driver calls over there

    def said(self, function: str, *arguments: Any, keep: str | None = None) -> str:
        """The result code of a driver call; what it returns is kept under a name if one is given."""
        return str(self._ask("raw", function, arguments, keep)[0])

    def value(self, function: str, *arguments: Any, keep: str | None = None) -> Any:
        """What a successful driver call returns: a handle as a number, an opaque struct as bytes."""
        result, returned = self._ask("raw", function, arguments, keep)
        assert result == "SUCCESS", (function, result)
        return returned

    # --- other things

    def rig(self, method: str, *arguments: Any, keep: str | None = None, **options: Any) -> Any:
        """Call a method of the other process's :class:`Rig`."""
        return self._ask("rig", method, arguments, keep, options)

    def tell(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a method of something that is kept there."""
        return self._ask(name, method, arguments, None)

    def fetch(self, fd: int) -> int:
        """A duplicate of a descriptor of the other process."""
        self._send("fetch", "", (fd,), None, {})
        _, fds, _, _ = socket.recv_fds(self._channel, _LARGEST, 1)
        return fds[0]

    def reset(self) -> None:
        """Undo there what was made there."""
        self._ask("reset", "", (), None)

    def end(self) -> int:
        """Let the interpreter end as at the end of a program, with all that it has; its exit code."""
        self._channel.close()
        return self.process.wait(60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._channel.close()

    def close(self) -> None:
        """End the process, in whatever state it is."""
        if self.process.poll() is None:
            self.kill()
        self._channel.close()

    def _send(
        self, target: str, name: str, arguments: Sequence[Any], keep: str | None, options: dict[str, Any]
    ) -> None:
        fds = [one.fd for one in arguments if isinstance(one, Descriptor)]
        socket.send_fds(self._channel, [pickle.dumps((target, name, arguments, keep, options))], fds)

    def _ask(
        self,
        target: str,
        name: str,
        arguments: Sequence[Any],
        keep: str | None,
        options: dict[str, Any] | None = None,
    ) -> Any:
        self._send(target, name, arguments, keep, options or {})
        reply = self._channel.recv(_LARGEST)
        assert reply, "the other process has ended"
        failed, answer = pickle.loads(reply)
        if failed:
            raise AssertionError(f"in the other process: {answer}")
        return answer


# --- the other process


def serve(channel: int, on_cuda: bool, machine: dict[str, Any]) -> None:
    """What the other process does until the channel is closed."""
    raw: Any = sd.real() if on_cuda else sd.simulated(**machine)
    assert raw.cuInit(0)[0] == 0
    assert raw.cuCtxSetCurrent(raw.cuDevicePrimaryCtxRetain(0)[1])[0] == 0
    with socket.socket(fileno=channel) as connected:
        _Server(raw, connected).run()


class _Server:
    def __init__(self, raw: Any, channel: socket.socket) -> None:
        self._raw = raw
        self._channel = channel
        self._rig = Rig(raw)
        self._kept: dict[str, Any] = {}
        self._received: list[int] = []

    def run(self) -> None:
        while True:
            request, fds, _, _ = socket.recv_fds(self._channel, _LARGEST, 8)
            if not request:
                return
            self._received += fds
            target, name, arguments, keep, options = pickle.loads(request)
            if target == "fetch":
                socket.send_fds(self._channel, [b"fd"], [arguments[0]])
                continue
            try:
                objects = [self._object(one, fds) for one in arguments]
                reply = False, self._do(target, name, objects, keep, options)
            except BaseException:
                reply = True, traceback.format_exc()
            self._channel.send(pickle.dumps(reply))

    def _object(self, one: Any, fds: list[int]) -> Any:
        if isinstance(one, Kept):
            return self._kept[one.name]
        if isinstance(one, Descriptor):
            return fds.pop(0)
        if isinstance(one, Opaque):
            return opaque(getattr(self._raw, one.name)(), one.data)
        if isinstance(one, Member):
            return getattr(self._raw, one.name)(one.number)
        return one

    def _do(self, target: str, name: str, arguments: list[Any], keep: str | None, options: dict[str, Any]) -> Any:
        if target == "reset":
            self._reset()
            return None
        if target == "raw":
            return self._call(name, arguments, keep)
        answer = getattr(self._rig if target == "rig" else self._kept[target], name)(*arguments, **options)
        if keep is not None:
            self._kept[keep] = answer
        return _plain(answer)

    def _call(self, name: str, arguments: list[Any], keep: str | None) -> tuple[str, Any]:
        if name in ("cuEventDestroy", "cuStreamDestroy"):
            self._rig.disown(arguments[0])
        answer = getattr(self._raw, name)(*arguments)
        returned = answer[1:] if len(answer) > 2 else answer[-1] if len(answer) == 2 else None
        if said(answer) == "SUCCESS":
            self._undo_later(name, answer)
            if keep is not None:
                self._kept[keep] = returned
        return said(answer), _plain(returned)

    def _undo_later(self, name: str, answer: Any) -> None:
        rig, raw = self._rig, self._raw
        if name == "cuMemPoolImportPointer":
            rig.keep(answer)
        elif name == "cuIpcOpenMemHandle":
            rig.own(answer[1], raw.cuIpcCloseMemHandle)
        elif name == "cuIpcOpenEventHandle":
            rig.own(answer[1], raw.cuEventDestroy)
        elif name == "cuMemImportFromShareableHandle":
            rig.own(answer[1], raw.cuMemRelease)

    def _reset(self) -> None:
        self._rig.close()
        self._kept.clear()
        self._rig = Rig(self._raw)
        for fd in self._received:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._received.clear()


def _plain(returned: Any) -> Any:
    """What can be sent of something: numbers, text, several of these, and the bytes of opaque structs."""
    if isinstance(returned, (list, tuple)):
        return [_plain(one) for one in returned]
    if returned is None or isinstance(returned, (str, bytes)):
        return returned
    if hasattr(returned, "getPtr") and not hasattr(returned, "__int__"):
        return bytes_of(returned)
    return int(returned) if hasattr(returned, "__int__") else None
