"""A process that keeps the descriptors of a store while its server is dead, and gives them to the next server.

It does nothing else, and reads no contents, so that little can end it. A server sends whole changes: a change that its
death cuts off is dropped by the channel. The connections of two servers are served one after the other, so that the
second server finds all that the first one has sent.
"""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from streamalloc.core.errors import undoing
from streamalloc.core.internal import Fd
from streamalloc.core.resource import Closes, close_all
from streamalloc.ipc.store.protocol import MOST_CHUNKS, decode, encode
from streamalloc.ipc.transport.channel import Channel, ProtocolError

_SECONDS = 30.0


class Kept(NamedTuple):
    """The last complete commit of a key: its description as JSON, and its descriptors."""

    text: str
    handles: tuple[Fd, ...]


class Keeper(Closes):
    """A server's connection to its keeper, which it starts if none is there.

    Raises
    ------
    OSError
        No keeper could be started.
    """

    def __init__(self, path: Path) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            self._channel = Channel.connect(path, timeout=_SECONDS)
            return
        path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "streamalloc.ipc.store.keeper", str(path)]
        # A session of its own, so that a signal to the group of the server's terminal leaves it alive.
        # Nothing of the server's is inherited: a pipe would stay open when the server has ended.
        quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self._process = subprocess.Popen(command, **quiet, start_new_session=True)
        with undoing(self._process.kill):
            deadline = time.monotonic() + _SECONDS
            while True:
                try:
                    self._channel = Channel.connect(path, timeout=_SECONDS)
                    return
                except (ConnectionRefusedError, FileNotFoundError):
                    if time.monotonic() > deadline or self._process.poll() is not None:
                        raise
                    time.sleep(0.02)

    def take(self) -> Iterator[Kept]:
        """Return copies of all that is kept. The caller closes the descriptors."""
        (count,) = self._ask({"take": 1})
        for _ in range(int(count)):
            data, handles = self._channel.receive(timeout=_SECONDS)
            yield Kept(data.decode(), handles)

    def put(self, kept: Sequence[tuple[str, Kept]], dropped: Sequence[str]) -> None:
        """Keep these commits by key in place of others, and drop other keys: all of that, or nothing.

        Once it returns, the death of this process loses none of it.
        """
        handles = [fd for _, one in kept for fd in one.handles]
        self._ask({"put": [[key, one.text, len(one.handles)] for key, one in kept], "drop": list(dropped)}, handles)

    def _ask(self, fields: dict[str, Any], handles: Sequence[Fd] = ()) -> list[Any]:
        self._channel.send(encode(fields), handles, timeout=_SECONDS)
        answer = decode(self._channel.receive(timeout=_SECONDS).data).get("answer")
        if type(answer) is not list:
            raise ProtocolError("the keeper of a store gave no answer")
        return answer

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._channel.closed

    def close(self) -> None:
        """End the keeper, which releases all that it keeps; idempotent."""
        asked = False
        if not self._channel.closed:
            with self._channel, contextlib.suppress(OSError, ValueError):
                self._ask({"end": 1})
                asked = True
        if self._process is not None:
            if not asked:  # it has ended already, or could not be asked
                self._process.kill()
            self._process.wait()


def keep(path: str) -> None:
    """Serve at a path until a server ends it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    kept: dict[str, Kept] = {}
    with Channel.listen(path) as listener:
        going = True
        while going:
            with contextlib.suppress(OSError, ProtocolError), listener.accept() as channel:
                while going:
                    data, handles = channel.receive()
                    going = _answer(channel, kept, decode(data), handles)


def _answer(channel: Channel, kept: dict[str, Kept], fields: dict[str, Any], handles: tuple[Fd, ...]) -> bool:
    """Answer one request; whether more may come."""
    left = list(handles)
    with undoing(lambda: close_all(left)):
        if "take" in fields:
            channel.send(encode({"answer": [len(kept)]}), timeout=_SECONDS)
            for one in kept.values():
                channel.send(one.text.encode(), one.handles, timeout=_SECONDS)
            return True
        if "put" in fields:
            changes = _checked(fields, len(handles))
            for key, text, count in changes:
                before = kept.pop(key, Kept("", ()))
                kept[key] = Kept(text, tuple(left[:count]))
                del left[:count]
                close_all(before.handles)
            for key in fields["drop"]:
                close_all(kept.pop(key, Kept("", ())).handles)
        channel.send(encode({"answer": []}), timeout=_SECONDS)
    return "end" not in fields


def _checked(fields: dict[str, Any], count: int) -> list[tuple[str, str, int]]:
    """Check a change before anything of it is done."""
    try:
        changes = [(key, text, number) for key, text, number in fields["put"]]
        dropped = list(fields["drop"])
    except (KeyError, TypeError, ValueError):
        raise ProtocolError("a change has another form") from None
    texts = [*dropped, *(one for key, text, _ in changes for one in (key, text))]
    numbers = [number for *_, number in changes]
    if not all(type(one) is str for one in texts) or not all(type(one) is int and one > 0 for one in numbers):
        raise ProtocolError("a change has wrong fields")
    if sum(numbers) != count or max(numbers, default=0) > MOST_CHUNKS + 2:
        raise ProtocolError(f"a change has {count} descriptors, and {sum(numbers)} belong to it")
    return changes


if __name__ == "__main__":
    keep(sys.argv[1])
