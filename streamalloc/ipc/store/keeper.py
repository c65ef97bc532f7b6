"""Keepers, which keep the file descriptors of a store while its server is dead, and pass them to the next server.

The keeper is systemd, or else a process of the package (:class:`KeeperProcess`). That process does nothing else and
reads no contents, so that few errors can end it. Both keepers store descriptors under names, drop the descriptor of a
name, and pass all descriptors to the next server. :class:`Keeper` stores whole commits in this way.
"""

from __future__ import annotations

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

from streamalloc.core.errors import ClosedError, undoing
from streamalloc.core.internal import Fd
from streamalloc.core.resource import Closes, close_all
from streamalloc.ipc.transport.channel import (
    Channel,
    Listener,
    Message,
    ProtocolError,
    read_file,
    rights_of,
    sealed_file,
)

_SECONDS = 30.0


class Kept(NamedTuple):
    """Last complete commit of a key: its description as JSON text, and its file descriptors."""

    text: str
    handles: tuple[Fd, ...]


class Keeper(Closes):
    """Keeps the complete commits of a store in systemd or in a keeper process.

    Each descriptor is sent in one message, with a name of its own, because the order in which systemd returns them is
    not documented.

    The text of a commit is stored last and removed first, so a commit that has its text is whole. If the server dies
    after it has stored a commit and before it has removed the previous commit, both are kept, and the commit with the
    higher number is used.

    Two epochs may share a file, and systemd drops a duplicate of a descriptor that it already has. So copies of the
    files are stored.

    Parameters
    ----------
    store
        Name of the store.
    path
        Path of the socket of the keeper process.

    Raises
    ------
    OSError
        No keeper process could be started.
    """

    def __init__(self, store: str, path: Path) -> None:
        self._names = f"streamalloc-{store}-"
        self._place = Systemd(self._names) if Systemd.is_there() else KeeperProcess(path)
        self._kept: dict[str, tuple[str, list[str]]] = {}
        """For each key: the text of its commit, and the names of the commit's descriptors, the name of the text
        first.
        """
        self._over: list[str] = []
        """Names of the descriptors of replaced and removed commits. They are dropped from the keeper once the new
        commits are stored.
        """
        self.closed: bool = False
        """Whether the connection to the keeper was closed."""

    def take(self) -> Iterator[Kept]:
        """Yield the last commit of each key that the keeper has; other commits are dropped from the keeper. The caller
        closes the descriptors. Raises ProtocolError if a commit cannot be read, and OSError if the keeper has ended or
        does not answer within 30 s.
        """
        found: dict[str, dict[str, Fd]] = {}
        for name, fd in self._place.passed():
            token, _, place = name.rpartition("-")
            found.setdefault(token, {})[place] = fd
        every = [fd for parts in found.values() for fd in parts.values()]
        with undoing(lambda: close_all(every)):
            try:
                left = self._latest(found)
            except (KeyError, TypeError, ValueError) as error:
                raise ProtocolError(
                    f"what the keeper has cannot be read: {error!r}. If that is of another release, end the keeper, or "
                    "stop the service, which releases it"
                ) from None
        try:
            while left:
                yield left.pop()
        # If the server refuses a commit, it takes no further commit. The descriptors of the others are closed here.
        finally:
            close_all(fd for kept in left for fd in kept.handles)

    def _latest(self, found: dict[str, dict[str, Fd]]) -> list[Kept]:
        """Return the last commit of each key, and drop all other commits.

        ``found``: for each commit's token, its descriptors by place. The place is ``text``, or the index among the
        other descriptors.
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
        """Keep the commits of ``kept``, tuples of key and commit, in place of earlier commits of these keys. Remove the
        commits of the keys in ``dropped``. After the return, the death of this process loses none of the kept commits.
        Raises OSError if systemd keeps too few descriptors (``EMFILE``), or if the keeper has ended or does not answer
        within 30 s.
        """
        new = {key: one for key, one in kept if self._kept.get(key, ("",))[0] != one.text}
        count = sum(len(names) for _, names in self._kept.values()) + sum(1 + len(one.handles) for one in new.values())
        if count > self._place.most:
            raise OSError(
                errno.EMFILE, f"FileDescriptorStoreMax= is {self._place.most}, and {count} descriptors are to be kept"
            )
        for key in (*new, *dropped):
            self._over += self._kept.pop(key, ("", []))[1]
        for key, one in new.items():
            self._kept[key] = one.text, []
            self._store(one, self._kept[key][1])
        if new:
            self._place.wait()
        self._drop(self._over)
        self._over.clear()
        if dropped:  # Without this wait, dropped keys could come back if this process dies.
            self._place.wait()

    def _store(self, kept: Kept, names: list[str]) -> None:
        """Send the descriptors of a commit to the keeper. The names of these descriptors are put into ``names``, the
        name of the text first.
        """
        token = f"{self._names}{token_hex(8)}"
        with contextlib.ExitStack() as files:
            copies = [files.enter_context(sealed_file(read_file(file))) for file in kept.handles[:2]]
            text = files.enter_context(sealed_file(kept.text.encode()))
            for place, fd in (*enumerate((*copies, *kept.handles[2:])), ("text", text)):
                names.insert(0, f"{token}-{place}")
                self._place.send(f"FDSTORE=1\nFDPOLL=0\nFDNAME={names[0]}", fd)

    def _drop(self, names: Sequence[str], handles: Iterable[Fd] = ()) -> None:
        for name in names:
            self._place.send(f"FDSTOREREMOVE=1\nFDNAME={name}")
        close_all(handles)

    def leave(self) -> None:
        """Close the connection. All kept descriptors stay for the next server."""
        self.closed = True
        self._place.close()

    def close(self) -> None:
        """Release all kept descriptors, close the connection, and end the keeper process. Idempotent. Errors of the
        keeper are hidden.
        """
        if not self.closed:
            with contextlib.suppress(OSError, ClosedError):
                # The text of a commit is removed first: without the text no server takes the commit's other
                # descriptors.
                self._drop(self._over)
                for _, names in self._kept.values():
                    self._drop(names)
            self.leave()
            self._place.end()


class Systemd:
    """The descriptor store of the systemd that started this process (``FileDescriptorStoreMax=``)."""

    def __init__(self, names: str) -> None:
        self._names = names
        self.most: int = int(os.environ["FDSTORE"])
        """Largest number of descriptors that systemd keeps for the service."""
        address = os.environ["NOTIFY_SOCKET"]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with undoing(self._socket.close):
            self._socket.settimeout(_SECONDS)
            self._socket.connect("\0" + address[1:] if address.startswith("@") else address)

    @staticmethod
    def is_there() -> bool:
        """Whether systemd started this process (``SYSTEMD_EXEC_PID``) and keeps descriptors for it (``FDSTORE``, which
        systemd sets since version 254). Without ``SYSTEMD_EXEC_PID``, this process counts as started by systemd.

        A child process inherits these variables. ``SYSTEMD_EXEC_PID`` then names another process, so the result is
        False: systemd takes no descriptors from the child, or would not pass them to it.
        """
        ours = str(os.getpid())
        keeps = bool(os.environ.get("NOTIFY_SOCKET")) and os.environ.get("FDSTORE", "").isdecimal()
        return keeps and os.environ.get("SYSTEMD_EXEC_PID", ours) == ours

    def passed(self) -> Iterator[tuple[str, Fd]]:
        """Yield tuples of name and descriptor: those of this store that systemd passed to this process (as
        ``sd_listen_fds``). A second call yields none.
        """
        if os.environ.get("LISTEN_PID") == str(os.getpid()):
            passed = os.environ["LISTEN_FDNAMES"].split(":")
            # The whole name must match, because the name of another store may begin with the same prefix.
            own = re.compile(re.escape(self._names) + r"[0-9a-f]{16}-(\d+|text)")
            for number, name in enumerate(passed):
                if own.fullmatch(name):
                    passed[number] = "taken"
                    # After the descriptor is closed, another file may get its number. Because of the new name, a second
                    # call does not take that file.
                    os.environ["LISTEN_FDNAMES"] = ":".join(passed)
                    os.set_inheritable(3 + number, False)
                    yield name, Fd(3 + number)

    def send(self, state: str, *handles: Fd) -> None:
        """Send systemd a message as ``sd_notify`` does, with at most one descriptor. ``state``: lines such as
        ``"FDSTORE=1"``. Raises OSError if the socket fails, or if the message is not sent within 30 seconds.
        """
        self._socket.sendmsg([state.encode()], rights_of(handles))

    def wait(self) -> None:
        """Wait until systemd has handled all messages: systemd then closes the pipe that comes with the message
        ``BARRIER=1``. Raises TimeoutError after 30 seconds, and the errors of :meth:`send`.
        """
        ours, theirs = map(Fd, os.pipe())
        with ours:
            with theirs:
                self.send("BARRIER=1", theirs)
            poll = select.poll()
            poll.register(ours.fileno(), select.POLLHUP)
            if not poll.poll(_SECONDS * 1000):
                raise TimeoutError(f"systemd did not take the descriptors within {_SECONDS:g} s")

    def close(self) -> None:
        """Close the socket. systemd still has the descriptors."""
        self._socket.close()

    def end(self) -> None:
        """Do nothing: systemd has released the dropped descriptors already, and ends by itself."""


class KeeperProcess:
    """The connection to a keeper process (:func:`keep`). The process is started if the store has none. Raises OSError
    if it cannot be started, or does not listen within 30 s.
    """

    most = sys.maxsize
    """Largest number of descriptors that the process keeps: in effect, no limit."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            self._channel = Channel.connect(path, timeout=_SECONDS)
            return
        path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "streamalloc.ipc.store.keeper", str(path)]
        # The keeper gets its own session, so that signals to the foreground process group of the server's terminal do
        # not end it. It inherits no file of the server: an inherited pipe would stay open after the server has ended.
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

    def passed(self) -> Iterator[tuple[str, Fd]]:
        """Yield tuples of name and descriptor for all kept descriptors. The descriptors are duplicates. Raises
        the errors of :meth:`Channel.send` and :meth:`Channel.receive`: TimeoutError if the process does not answer
        within 30 s.
        """
        self.send("PASS=1")
        while (message := self._answer()).handles:
            yield message.data.decode(), message.handles[0]

    def _answer(self) -> Message:
        try:
            return self._channel.receive(timeout=_SECONDS)
        except TimeoutError:
            process = f"the keeper of the store, process {self._channel.peer.pid},"
            raise TimeoutError(f"{process} has not answered within {_SECONDS:g} s: let it run, or end it") from None

    def send(self, state: str, *handles: Fd) -> None:
        """Send a message to the keeper, with at most one descriptor. ``state``: lines such as ``"FDSTORE=1"``. Raises
        the errors of :meth:`Channel.send`.
        """
        self._channel.send(state.encode(), handles, timeout=_SECONDS)

    def wait(self) -> None:
        """Wait until the process has handled all messages. Raises TimeoutError after 30 s, and PeerGoneError if the
        process has ended.
        """
        self.send("BARRIER=1")
        self._answer()

    def close(self) -> None:
        """Close the connection. The process still has the descriptors, and waits for the next server."""
        self._channel.close()

    def end(self) -> None:
        """Close the connection, and end the keeper process, which then releases all descriptors. Errors of the
        connection are hidden.
        """
        # A new connection is used, because the process closes a connection after a message that it refuses.
        self.close()
        with contextlib.suppress(OSError, ValueError), Channel.connect(self._path, timeout=_SECONDS) as channel:
            channel.send(b"END=1", timeout=_SECONDS)
            channel.receive(timeout=_SECONDS)
        if self._process is not None:
            self._process.kill()  # It has answered that it ends, or will never answer.
            self._process.wait()


def keep(path: str) -> None:
    """Run the keeper process: keep descriptors by name for one server after another, until a server sends ``END``.
    ``path``: path of the socket.

    A message has the fields that systemd takes, or ``PASS`` or ``END``. A connection with any other message is closed.

    A connection waits for another only while that one gets the descriptors. Messages of older connections are handled
    first, so that the next server gets everything that the last server has sent before it died.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    kept: dict[str, Fd] = {}
    channels: list[Channel] = []
    with Channel.listen(path) as listener:
        while not listener.closed:
            poll = select.poll()
            for one in (*channels, listener):
                poll.register(one.fileno(), select.POLLIN)
            ready = dict(poll.poll())
            channel = next((one for one in channels if one.fileno() in ready), None)
            if channel is None:
                with contextlib.suppress(OSError):
                    channels.append(listener.accept(timeout=0))
                continue
            try:
                _handle_message(channel, kept, listener)
            except (OSError, ValueError, KeyError):
                channels.remove(channel)
                channel.close()


def _handle_message(channel: Channel, kept: dict[str, Fd], listener: Listener) -> None:
    """Receive one message from ``channel``, and change ``kept``, the descriptors by name. Raises OSError, ValueError or
    KeyError if the other end has ended, does not read, or sends a message of another form.
    """
    data, handles = channel.receive(timeout=_SECONDS)
    fields = dict(line.split("=", 1) for line in data.decode().split("\n"))
    if "FDSTORE" in fields:
        (kept[fields["FDNAME"]],) = handles
        return
    close_all(handles)
    if "FDSTOREREMOVE" in fields:
        # The name may be unknown: a commit that the death of a server cut off has no text.
        kept.pop(fields["FDNAME"], None)
        return
    for name, fd in kept.items() if "PASS" in fields else ():
        channel.send(name.encode(), [fd], timeout=_SECONDS)
    # The listener closes before the answer, so that the next server cannot connect to this process any more.
    if "END" in fields:
        listener.close()
        close_all(kept.values())
    channel.send(b"", timeout=_SECONDS)


if __name__ == "__main__":
    keep(sys.argv[1])
