"""Requests and answers between a store's server and its clients. Each is one message of a :class:`Channel`.

A message is a JSON object with the version of the protocol and the fields of a request or an answer. File descriptors
travel beside it (``SCM_RIGHTS``). One table lists the fields of each request; a request with other fields is refused.
The fields ``error`` and ``text`` of a refusal are the same in all versions, so a client of another version gets a text
that it can show.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import select
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from streamalloc.core.errors import undoing
from streamalloc.core.internal import Fd
from streamalloc.core.properties import checked_type
from streamalloc.core.resource import Closes, close_all
from streamalloc.driver import ForkedProcessError
from streamalloc.driver.internal import Lock
from streamalloc.ipc.store.errors import KINDS, StoreError, StoreGoneError
from streamalloc.ipc.store.manifest import read_json
from streamalloc.ipc.transport.channel import Channel, PeerGoneError, ProtocolError
from streamalloc.ipc.wire.descriptor import MOST_CHUNKS

VERSION = 3

_STORE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_SECONDS = 30.0
"""Seconds that a client waits until a message is sent or an answer has come."""


_TEXT = json.JSONEncoder(separators=(",", ":")).encode
_Check: TypeAlias = Callable[[Any], bool]


def _is_text(pattern: str) -> _Check:
    return lambda value: type(value) is str and re.fullmatch(pattern, value) is not None


def _is_list(allowed: _Check) -> _Check:
    return lambda value: type(value) is list and len(value) <= MOST_CHUNKS and all(map(allowed, value))


def _is_key(value: Any) -> bool:
    return type(value) is str and 0 < len(value) <= 512 and value.isprintable()


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 56


def _is_flag(value: Any) -> bool:
    return type(value) is bool


REQUESTS: dict[str, dict[str, _Check]] = {
    "status": {},
    "list": {},
    "remove": {"key": _is_key},
    "trim": {},
    "write": {
        "key": _is_key,
        "device": _is_text("[0-9a-f]{32}"),
        "replace": _is_flag,
        "like": _is_flag,
        "reuse": _is_flag,
    },
    "reserve": {"total": _is_size},
    "commit": {
        "address": _is_size,
        "chunks": _is_list(_is_size),
        "ready": _is_text("|[0-9a-f]{32}( [0-9]{1,10}){3}"),
        "prepare": _is_flag,
        "keep": _is_flag,
        "same": _is_flag,
    },
    "confirm": {"tokens": _is_list(_is_text("[0-9]{1,10} [0-9]{1,20}"))},
    "open": {"key": _is_key},
}
"""Fields of each request, with the check of each field.

* ``status`` and ``list`` return sums and keys, ``remove`` removes a key, ``trim`` releases all spare memory.
* ``write`` begins an epoch; the end of the connection aborts it. With ``like``, the answer has the layout of the last
  commit; with ``reuse`` as well, also memory that no process has any more, if the store kept some.
* ``reserve`` comes before the writer creates memory.
* ``commit`` sends the epoch. With ``same``, the layout is the one that the store gave, so its file is not sent. With
  ``prepare``, nothing is published before ``confirm``. With ``keep``, the connection reads the epoch from then on.
* ``confirm`` publishes the prepared epochs of a group, all or none.
* ``open`` begins to read an epoch; the end of the connection ends the reading.
"""


def checked_key(key: object) -> str:
    """Return ``key`` as a ``str``. Raises TypeError if it is no string, and ValueError unless it has 1 to 512 printable
    characters.
    """
    # ``str`` is called, because the JSON encoder should not get an object of a subclass such as numpy.str_.
    if not _is_key(str(checked_type("key", key, str))):
        raise ValueError(f"key={key!r}: allowed are 1 to 512 printable characters")
    return str(key)


def encode(fields: dict[str, Any]) -> bytes:
    """Return a message as JSON in UTF-8: ``fields``, and the version of the protocol."""
    return _TEXT({"version": VERSION, **fields}).encode()


def decode(data: bytes) -> dict[str, Any]:
    """Return the fields of a message. Raises ``ProtocolError`` if the message is no JSON object."""
    try:
        fields = read_json(data.decode())
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the message of a store is no JSON: {error}") from None
    if type(fields) is not dict:
        raise ProtocolError("the message of a store is no JSON object")
    return fields


def request_in(data: bytes) -> tuple[str, dict[str, Any]]:
    """Return the name of a request and a dictionary of its fields. Raises StoreError if the client has another version
    of the protocol. Raises ProtocolError for a message that is no JSON object, an unknown request, and a field that is
    missing, unknown or not allowed.
    """
    fields = decode(data)
    version, name = fields.pop("version", None), fields.pop("request", None)
    if version != VERSION:
        raise StoreError(
            f"this server has version {VERSION} of the protocol, and the client version {version!r:.20}: "
            "use the same release of streamalloc in both"
        )
    if type(name) is not str or name not in REQUESTS:
        raise ProtocolError(f"a store has no request {name!r:.80}")
    allowed = REQUESTS[name]
    wrong = allowed.keys() ^ fields.keys() or {name for name, allows in allowed.items() if not allows(fields[name])}
    if wrong:
        raise ProtocolError(f"the request {name} has wrong fields: {', '.join(sorted(wrong))[:200]}")
    return name, fields


# -- addresses of servers -------------------------------------------------------------------------------------------


def folder() -> Path:
    """Return the folder with the sockets of this user's stores: in ``XDG_RUNTIME_DIR`` if set, otherwise in
    ``/tmp``.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime, "streamalloc") if runtime else Path(f"/tmp/streamalloc-{os.geteuid()}")


def socket_path(name: str) -> Path:
    """Return the path of the socket of the store ``name``. The store need not exist.

    Raises
    ------
    ValueError
        The name is empty or longer than 64 characters, has characters other than letters, digits, ``_``, ``-`` and
        ``.``, or begins with ``.`` or ``-``.
    """
    if not isinstance(name, str) or not _STORE_NAME.fullmatch(name):
        raise ValueError(f"name={name!r}: a store's name has 1 to 64 letters, digits, '_', '-' and '.'")
    return folder() / f"{name}.store"


def store_names() -> list[str]:
    """Return the names of this user's stores whose servers run, in alphabetical order. Each server is tested by a
    connection.
    """
    found = []
    for path in sorted(folder().glob("*.store")):
        with contextlib.suppress(StoreGoneError, OSError, ValueError), Connection(socket_path(path.stem)):
            found.append(path.stem)
    return found


class Connection(Closes):
    """A client's connection to the server of a store.

    Parameters
    ----------
    path
        Path of the server's socket (:func:`socket_path`).

    Raises
    ------
    StoreGoneError
        No server listens there.
    PermissionError
        The server belongs to another user.
    TimeoutError
        The server accepted no connection within 30 s.
    """

    def __init__(self, path: Path) -> None:
        self.path: Path = path
        self.name: str = path.stem
        self._process = os.getpid()
        self._lock = Lock()
        try:
            self._channel = Channel.connect(path, timeout=_SECONDS)
        except (ConnectionRefusedError, FileNotFoundError):
            raise StoreGoneError(
                f"nobody serves a store {self.name!r} at {path}: `streamalloc serve {self.name}` starts one"
            ) from None

    @property
    def closed(self) -> bool:
        """Whether the connection was closed in this process."""
        return self._channel.closed

    @property
    def alive(self) -> bool:
        """Whether the server still has this connection open. False in a forked child, which must not use the
        connection.
        """
        return (
            self._process == os.getpid() and not self._channel.closed and not self._channel._poll(select.POLLRDHUP, 0)
        )

    def ask(self, request: str, handles: Sequence[Fd] = (), **fields: Any) -> tuple[dict[str, Any], tuple[Fd, ...]]:
        """Send a request with ``fields`` and the descriptors ``handles``. Returns the fields and the file descriptors
        of the answer; the caller closes these descriptors.

        Raises
        ------
        StoreError
            The server refused the request; the subclass tells the reason (:data:`~.errors.KINDS`).
        StoreGoneError
            The server has ended, or this connection was closed.
        ForkedProcessError
            The connection is that of the parent process.
        TimeoutError
            The server did not answer within 30 s. The connection is closed.
        ProtocolError
            The answer of the server is not valid.
        """
        with self._lock:
            if self._channel.closed:
                raise StoreGoneError(f"the connection to the store {self.name!r} was closed")
            if self._process != os.getpid():
                raise ForkedProcessError(
                    f"this connection to the store {self.name!r} is that of process {self._process}"
                )
            try:
                # A server without a free descriptor refuses a connection before the first request, and closes it. Then
                # the send fails, but the refusal can still be received.
                with contextlib.suppress(PeerGoneError):
                    self._channel.send(encode({"request": request, **fields}), handles, timeout=_SECONDS)
                data, received = self._channel.receive(timeout=_SECONDS)
            except PeerGoneError:
                self.close()
                raise StoreGoneError(f"the server of the store {self.name!r} has ended") from None
            except TimeoutError as error:
                self.close()
                raise TimeoutError(f"the server of the store {self.name!r} did not answer: {error}") from None
            except BaseException:
                # The connection is closed, because a late answer would otherwise be taken for the answer to the next
                # request.
                self.close()
                raise
        with undoing(functools.partial(close_all, received)):
            return self._answer(data), received

    def _answer(self, data: bytes) -> dict[str, Any]:
        fields = decode(data)
        if "error" in fields:
            raise KINDS.get(str(fields["error"]), StoreError)(str(fields.get("text"))[:10_000])
        version = fields.pop("version", None)
        if version != VERSION:
            raise ProtocolError(f"the server answered by version {version} of the protocol")
        return fields

    def close(self) -> None:
        """Close the connection. The server then aborts the write of this connection, or ends its read. Idempotent."""
        self._channel.close()
