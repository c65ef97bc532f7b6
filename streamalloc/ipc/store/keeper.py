"""Keepers, which keep the descriptors of a store while its server is dead, and give them to the next server.

A keeper is the descriptor store of systemd, or else a process of its own. The process does nothing else and reads no
contents, so that little can end it. A server sends whole changes: the channel drops a change that the server's death
cuts off. The process serves one connection at a time, so that the next server finds all that the last one has sent.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import re
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

from streamalloc.core.errors import undoing
from streamalloc.core.internal import Fd
from streamalloc.core.resource import Closes, close_all
from streamalloc.ipc.store.protocol import MOST_CHUNKS, decode, encode
from streamalloc.ipc.transport.channel import Channel, ProtocolError, read_file, sealed_file

_SECONDS = 30.0


class Kept(NamedTuple):
    """The last complete commit of a key: its description as JSON, and its descriptors."""

    text: str
    handles: tuple[Fd, ...]


class Keeper(Closes):
    """A server's connection to its keeper. It starts a keeper if the store has no keeper.

    Raises
    ------
    OSError
        No keeper could be started.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ended = False
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            self._channel = Channel.connect(path, timeout=_SECONDS)
            return
        path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "streamalloc.ipc.store.keeper", str(path)]
        # A separate session, so that a signal to the group of the server's terminal leaves the keeper alive.
        # The keeper inherits no file of the server: a pipe would stay open when the server has ended.
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
        """Yield copies of the kept commits. The caller closes their descriptors. Raises ProtocolError, OSError."""
        (count,) = self._ask({"take": 1})
        for _ in range(int(count)):
            data, handles = self._channel.receive(timeout=_SECONDS)
            yield Kept(data.decode(), handles)

    def put(self, kept: Sequence[tuple[str, Kept]], dropped: Sequence[str]) -> None:
        """Keep the commits of ``kept``, pairs of key and commit, in place of earlier commits, and forget the keys
        ``dropped``: the whole change or nothing. After the return, the death of this process loses none of them. Raises
        OSError, ProtocolError.
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
        """Whether the connection to the keeper was closed."""
        return self._channel.closed

    def close(self) -> None:
        """End the keeper's process, which closes all descriptors that it keeps. Idempotent."""
        if self._ended:
            return
        self._ended = True
        asked = self._end()
        if self._process is not None:
            if not asked:  # A keeper that does not answer would block wait().
                self._process.kill()
            self._process.wait()
        elif not asked:
            # The keeper may have refused the last change and closed that connection: ask it on a new connection.
            with contextlib.suppress(OSError, ValueError):
                self._channel = Channel.connect(self._path, timeout=_SECONDS)
                self._end()

    def _end(self) -> bool:
        """Ask the keeper to end. Returns whether it answered."""
        if not self._channel.closed:
            with self._channel, contextlib.suppress(OSError, ValueError):
                self._ask({"end": 1})
                return True
        return False


class ServiceManager(Closes):
    """The descriptor store of the systemd that started this process (``FileDescriptorStoreMax=``).

    Each descriptor is sent in one message, with a name of its own, because the order in which systemd returns them is
    not documented.

    The text of a commit is stored last and removed first, so a commit that has its text is whole. If the server dies
    after it has stored a commit and before it has removed the previous one, systemd has both, and the commit with the
    higher number counts.

    Two epochs may share a file, and systemd drops a duplicate of a descriptor that it has. So files are stored as
    copies.
    """

    def __init__(self, store: str) -> None:
        self._names = f"streamalloc-{store}-"
        self._most = int(os.environ["FDSTORE"])
        self._kept: dict[str, tuple[str, list[str]]] = {}
        """By key: the text of the key's commit, and the names of the commit's descriptors, the text's name first."""
        self._over: list[str] = []
        """Names of descriptors of replaced and dropped commits. They are removed once the new commits are stored."""
        address = os.environ["NOTIFY_SOCKET"]
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with undoing(self._channel.close):
            self._channel.settimeout(_SECONDS)
            self._channel.connect("\0" + address[1:] if address.startswith("@") else address)

    @staticmethod
    def is_there() -> bool:
        """Whether systemd started this process and keeps descriptors for it. systemd says so since version 254.

        Child processes inherit these variables. But systemd takes no descriptor from a child, or never passes one to
        it.
        """
        ours = str(os.getpid())
        keeps = bool(os.environ.get("NOTIFY_SOCKET")) and os.environ.get("FDSTORE", "").isdecimal()
        return keeps and os.environ.get("SYSTEMD_EXEC_PID", ours) == ours

    def take(self) -> Iterator[Kept]:
        """Yield the kept commits. The caller closes their descriptors. Raises ProtocolError if they cannot be read."""
        found: dict[str, dict[str, Fd]] = {}
        for name, fd in _passed(self._names):
            token, _, place = name.rpartition("-")
            found.setdefault(token, {})[place] = fd
        every = [fd for parts in found.values() for fd in parts.values()]
        with undoing(lambda: close_all(every)):
            try:
                left = self._latest(found)
            except (KeyError, TypeError, ValueError) as error:
                raise ProtocolError(
                    f"what systemd has cannot be read: {error!r}. If that is of another release, stop the service, "
                    "which releases it"
                ) from None
        try:
            while left:
                yield left.pop()
        finally:  # If the server refuses a commit, it does not take the rest.
            close_all(fd for kept in left for fd in kept.handles)

    def _latest(self, found: dict[str, dict[str, Fd]]) -> list[Kept]:
        """Return the last commit of each key, and drop all other commits.

        ``found`` has descriptors by token and place. All descriptors of a commit have one token; the place is ``text``,
        or the index among the other descriptors.
        """
        latest: dict[str, tuple[int, str, Kept]] = {}
        for token, parts in found.items():
            last = parts.pop("text", None)
            names = [f"{token}-{place}" for place in ("text", *parts)]
            if last is None:
                self._drop(names, parts.values())
                continue
            with last:
                text = read_file(last).decode()
            about, kept = json.loads(text), Kept(text, tuple(parts[str(place)] for place in range(len(parts))))
            number, before = about["number"], latest.get(about["key"])
            if before is not None and before[0] > number:
                self._drop(names, kept.handles)
                continue
            if before is not None:
                self._drop(self._kept[about["key"]][1], before[2].handles)
            latest[about["key"]], self._kept[about["key"]] = (number, token, kept), (text, names)
        return [kept for _, _, kept in latest.values()]

    def put(self, kept: Sequence[tuple[str, Kept]], dropped: Sequence[str]) -> None:
        """Keep and forget commits as :meth:`Keeper.put` does. Raises OSError (``EMFILE``) if systemd keeps too few
        descriptors, TimeoutError.
        """
        new = {key: one for key, one in kept if self._kept.get(key, ("",))[0] != one.text}
        count = sum(len(names) for _, names in self._kept.values()) + sum(1 + len(one.handles) for one in new.values())
        if count > self._most:
            raise OSError(
                errno.EMFILE, f"FileDescriptorStoreMax= is {self._most}, and {count} descriptors are to be kept"
            )
        for key in (*new, *dropped):
            self._over += self._kept.pop(key, ("", []))[1]
        for key, one in new.items():
            self._kept[key] = one.text, []
            self._store(one, self._kept[key][1])
        if new:
            self._await()
        self._drop(self._over)
        self._over.clear()
        if dropped:  # Otherwise the death of this process could bring the keys back.
            self._await()

    def _store(self, kept: Kept, names: list[str]) -> None:
        """Send the descriptors of a commit to systemd. ``names`` gets the names of these descriptors, the name of the
        text first.
        """
        token = f"{self._names}{token_hex(8)}"
        with contextlib.ExitStack() as files:
            copies = [files.enter_context(sealed_file(read_file(file))) for file in kept.handles[:2]]
            text = files.enter_context(sealed_file(kept.text.encode()))
            for place, fd in (*enumerate((*copies, *kept.handles[2:])), ("text", text)):
                names.insert(0, f"{token}-{place}")
                self._send(f"FDSTORE=1\nFDPOLL=0\nFDNAME={names[0]}", fd.fileno())

    def _drop(self, names: Sequence[str], handles: Iterable[Fd] = ()) -> None:
        for name in names:
            self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")
        close_all(handles)

    def _await(self) -> None:
        """Wait until systemd has processed all messages: it then closes the pipe that ``BARRIER=1`` carries. Raises
        TimeoutError after 30 seconds.
        """
        ours, theirs = map(Fd, os.pipe())
        with ours:
            with theirs:
                self._send("BARRIER=1", theirs.fileno())
            poll = select.poll()
            poll.register(ours.fileno(), select.POLLHUP)
            if not poll.poll(_SECONDS * 1000):
                raise TimeoutError(f"systemd did not take the descriptors within {_SECONDS:g} s")

    def _send(self, state: str, *numbers: int) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers))] if numbers else []
        self._channel.sendmsg([state.encode()], rights)

    @property
    def closed(self) -> bool:
        """Whether the connection was closed."""
        return self._channel.fileno() < 0

    def close(self) -> None:
        """Have systemd remove all descriptors of this store. Idempotent; errors are hidden."""
        if not self.closed:
            with contextlib.closing(self._channel), contextlib.suppress(OSError):
                self._drop(self._over)  # The text of a commit goes first: without it no server takes the rest.
                for _, names in self._kept.values():
                    self._drop(names)


def _passed(names: str) -> Iterator[tuple[str, Fd]]:
    """Yield the descriptors, with their names, that systemd passed to this process under names that begin with
    ``names`` (as ``sd_listen_fds``). A second call yields none.
    """
    if os.environ.get("LISTEN_PID") == str(os.getpid()):
        passed = os.environ["LISTEN_FDNAMES"].split(":")
        # The whole name must match, because the name of another store may begin with this prefix.
        own = re.compile(re.escape(names) + r"[0-9a-f]{16}-(\d+|text)")
        for number, name in enumerate(passed):
            if own.fullmatch(name):
                passed[number] = "taken"
                # After a close, another file may get this number: a second call must not take that file.
                os.environ["LISTEN_FDNAMES"] = ":".join(passed)
                os.set_inheritable(3 + number, False)
                yield name, Fd(3 + number)


def keep(path: str) -> None:
    """Run a keeper: serve servers at the socket ``path``, one after another, until one of them ends the keeper."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    kept: dict[str, Kept] = {}
    with Channel.listen(path) as listener:
        while not listener.closed:
            with contextlib.suppress(OSError, ProtocolError), listener.accept() as channel:
                while not listener.closed:
                    data, handles = channel.receive()
                    fields = decode(data)
                    if "end" in fields:  # Before the answer, so that the next server cannot connect to this keeper.
                        listener.close()
                        close_all(fd for one in kept.values() for fd in one.handles)
                    _answer(channel, kept, fields, handles)


def _answer(channel: Channel, kept: dict[str, Kept], fields: dict[str, Any], handles: tuple[Fd, ...]) -> None:
    """Answer one request of a server: take, put, or end. ``kept``: the commits by key, which a put changes. Raises
    ProtocolError, OSError.
    """
    left = list(handles)
    with undoing(lambda: close_all(left)):
        if "take" in fields:
            channel.send(encode({"answer": [len(kept)]}), timeout=_SECONDS)
            for one in kept.values():
                channel.send(one.text.encode(), one.handles, timeout=_SECONDS)
            return
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


def _checked(fields: dict[str, Any], count: int) -> list[tuple[str, str, int]]:
    """Return the key, text and number of descriptors of each commit in a change. Raises ProtocolError if a part of the
    change is wrong, before any part is done. ``count``: the number of descriptors that came.
    """
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
