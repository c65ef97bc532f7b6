"""Requests and answers between a store's server and its clients: one message of a channel each.

A message is a header of fixed size and a JSON object. The header and answers of kind ``REFUSED`` are the same in all
versions of the protocol, so a client of another version gets a text that it can show. File descriptors travel beside
the JSON (``SCM_RIGHTS``). One table lists the fields of each request; a request with other fields is refused.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import json
import os
import re
import select
import struct
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
from streamalloc.ipc.transport.channel import PACKET_HANDLES, Channel, PeerGoneError, ProtocolError

VERSION = 1
MOST_CHUNKS = 2048
"""Most chunks of physical memory per epoch: their sizes must fit one answer packet."""

_MAGIC = b"SAst"
# Magic, version, kind, size of the JSON object in bytes.
_HEADER = struct.Struct("<4sHHI")
_STORE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_SECONDS = 30.0
"""Seconds that a client waits for an answer."""


class Kind(enum.IntEnum):
    """Kinds of messages."""

    STATUS = 1
    """Client: what the store is and holds in sum."""
    LIST = 2
    """Client: list the keys after a given one, as many as fit a packet."""
    REMOVE = 3
    """Client: remove a key; its memory is freed after its readers have closed it."""
    WRITE = 4
    """Client: begin an epoch. The connection becomes the writer's; its end aborts the epoch."""
    RESERVE = 5
    """Writer: reserve memory for the epoch before creating it."""
    COMMIT = 6
    """Writer: the complete epoch, with manifest and handles. With ``prepare``, CONFIRM publishes it."""
    CONFIRM = 7
    """Writer: publish the prepared epochs of these tokens, all or none."""
    OPEN = 8
    """Client: open the last epoch of a key. The connection becomes a reader's; its end closes the epoch."""
    FETCH = 9
    """Reader: the handles from an index on."""
    DONE = 100
    """Server: the answer."""
    REFUSED = 101
    """Server: kind and text of an error."""


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


_FIELDS: dict[int, dict[str, _Check]] = {
    Kind.STATUS: {},
    Kind.LIST: {"after": lambda value: value == "" or _is_key(value)},
    Kind.REMOVE: {"key": _is_key},
    Kind.WRITE: {"key": _is_key, "device": _is_text("[0-9a-f]{32}"), "replace": _is_flag},
    Kind.RESERVE: {"total": _is_size},
    Kind.COMMIT: {
        "address": _is_size,
        "chunks": _is_list(_is_size),
        "ready": _is_text("|[0-9a-f]{32}( [0-9]{1,10}){3}"),
        "prepare": _is_flag,
        "keep": _is_flag,
    },
    Kind.CONFIRM: {"tokens": _is_list(_is_text("[0-9]{1,10} [0-9]{1,20}"))},
    Kind.OPEN: {"key": _is_key},
    Kind.FETCH: {"start": _is_size},
}


def checked_key(key: object) -> str:
    """Check a key: 1 to 512 printable characters, slashes and dots included. Raises ``ValueError``."""
    if not _is_key(str(checked_type("key", key, str))):  # a plain string, also of numpy.str_
        raise ValueError(f"key={key!r}: allowed are 1 to 512 printable characters")
    return str(key)


def pack(kind: Kind, fields: dict[str, Any]) -> bytes:
    """Make the bytes of a message."""
    body = json.dumps(fields, separators=(",", ":")).encode()
    return _HEADER.pack(_MAGIC, VERSION, kind, len(body)) + body


def _decoded(data: bytes) -> tuple[int, int, dict[str, Any]]:
    """Return version, kind and fields of a message."""
    if len(data) < _HEADER.size:
        raise ProtocolError(f"a message of {len(data)} bytes is none of a store")
    magic, version, kind, nbytes = _HEADER.unpack_from(data)
    if magic != _MAGIC or nbytes != len(data) - _HEADER.size:
        raise ProtocolError("the message is none of a store, or was cut off")
    try:
        fields = json.loads(data[_HEADER.size :])
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the message of a store is no JSON: {error}") from None
    if type(fields) is not dict:
        raise ProtocolError("the message of a store is no JSON object")
    return version, kind, fields


def unpack(data: bytes) -> tuple[Kind, dict[str, Any]]:
    """Check and decode a request.

    Raises
    ------
    StoreError
        The client has another version of the protocol.
    ProtocolError
        The bytes are not a request, or its fields differ from the table.
    """
    version, number, fields = _decoded(data)
    if version != VERSION:
        raise StoreError(
            f"this server has version {VERSION} of the protocol, and the client version {version}: "
            "use the same release of streamalloc in both"
        )
    allowed = _FIELDS.get(number)
    if allowed is None:
        raise ProtocolError(f"a store has no request of kind {number}")
    wrong = allowed.keys() ^ fields.keys() or {name for name, allows in allowed.items() if not allows(fields[name])}
    if wrong:
        raise ProtocolError(f"the request {Kind(number).name} has wrong fields: {', '.join(sorted(wrong))[:200]}")
    return Kind(number), fields


# -- addresses ------------------------------------------------------------------------------------------------------


def folder() -> Path:
    """Return the folder of this user's stores: in ``XDG_RUNTIME_DIR`` if set, otherwise in ``/tmp``."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime, "streamalloc") if runtime else Path(f"/tmp/streamalloc-{os.geteuid()}")


def socket_path(name: str) -> Path:
    """Return the path of the socket of a store.

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
    """Return the names of this user's running stores."""
    found = []
    for path in sorted(folder().glob("*.store")):
        with contextlib.suppress(StoreGoneError, OSError, ValueError), Connection(path.stem):
            found.append(path.stem)
    return found


class Connection(Closes):
    """A client's connection to the server of a store.

    Raises
    ------
    StoreGoneError
        No server runs for a store of this name.
    PermissionError
        The server belongs to another user.
    """

    __slots__ = ("__weakref__", "_channel", "_lock", "_process", "name")

    def __init__(self, name: str) -> None:
        self.name: str = name
        self._process = os.getpid()
        path = socket_path(name)
        self._lock = Lock()
        try:
            self._channel = Channel.connect(path, timeout=_SECONDS)
        except (ConnectionRefusedError, FileNotFoundError):
            raise StoreGoneError(
                f"nobody serves a store {name!r} at {path}: `streamalloc serve {name}` starts one"
            ) from None

    @property
    def closed(self) -> bool:
        """Whether it was closed here."""
        return self._channel.closed

    @property
    def alive(self) -> bool:
        """Whether the server has this connection open. Always False in a forked child."""
        return (
            self._process == os.getpid() and not self._channel.closed and not self._channel._poll(select.POLLRDHUP, 0)
        )

    def ask(self, kind: Kind, handles: Sequence[Fd] = (), **fields: Any) -> tuple[dict[str, Any], tuple[Fd, ...]]:
        """Send a request. Returns the fields and the descriptors of the answer; the caller closes the descriptors.

        Raises
        ------
        StoreError
            The server refused the request.
        StoreGoneError
            The server has ended.
        """
        with self._lock:
            if self._channel.closed:
                raise StoreGoneError(f"the connection to the store {self.name!r} was closed")
            if self._process != os.getpid():
                raise ForkedProcessError(
                    f"this connection to the store {self.name!r} is that of process {self._process}"
                )
            try:
                # A server without a free descriptor refuses a connection before the first request.
                with contextlib.suppress(PeerGoneError):
                    self._channel.send(pack(kind, fields), handles, timeout=_SECONDS)
                data, received = self._channel.receive(timeout=_SECONDS)
            except PeerGoneError:
                self.close()
                raise StoreGoneError(f"the server of the store {self.name!r} has ended") from None
            except BaseException:
                self.close()  # Otherwise a late answer would be taken for the next request's.
                raise
        with undoing(functools.partial(close_all, received)):
            return self._answer(data), received

    def _answer(self, data: bytes) -> dict[str, Any]:
        version, kind, fields = _decoded(data)
        if kind == Kind.REFUSED:
            error = KINDS.get(str(fields.get("error")), StoreError)
            raise error(str(fields.get("text"))[:10_000])
        if version != VERSION or kind != Kind.DONE:
            raise ProtocolError(f"the server answered by kind {kind} of version {version} of the protocol")
        return fields

    def handles(self, count: int, first: Sequence[Fd]) -> list[Fd]:
        """Return the handles of the open epoch: those of the first answer, and the rest by further requests."""
        found = list(first)
        with undoing(lambda: close_all(found)):
            while len(found) < count:
                more = self.ask(Kind.FETCH, start=len(found))[1]
                found += more
                if not more or len(more) > PACKET_HANDLES:
                    raise ProtocolError(f"the server sent {len(found)} handles, and the epoch has {count}")
        return found

    def close(self) -> None:
        """Close the connection, which ends its write or read; idempotent."""
        self._channel.close()
