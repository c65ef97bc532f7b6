"""Where sockets of this user's processes are, and who is at the other end of one."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from pathlib import Path
from typing import NamedTuple, TypeAlias, Union

__all__ = ["Address", "Peer", "admitted", "check_private", "identity", "peer_of", "shown", "to_kernel"]

Address: TypeAlias = Union[str, bytes, "os.PathLike[str]"]
"""Where a :class:`Listener` is: the path of a socket, or an abstract name with ``@`` or a zero byte first."""


class Peer(NamedTuple):
    """Who made the other end of a channel, as the kernel says it.

    For the ends of :meth:`Channel.pair` that is the process that made the pair, whoever holds the ends now. ``pid`` is
    0 for a process of another PID namespace (a container).
    """

    pid: int
    uid: int
    gid: int


_CREDENTIALS = struct.Struct("3i")
_LONGEST_PATH = 107


def to_kernel(address: Address) -> str | bytes:
    """An address as the socket functions take it: bytes with a zero first for an abstract one, else a path."""
    name = os.fsdecode(address)
    place = b"\0" + os.fsencode(name[1:]) if name.startswith(("@", "\0")) else name
    if len(os.fsencode(place)) > _LONGEST_PATH or len(place) < 2:
        raise ValueError(f"{shown(address)!r} is no address: one has 2 to {_LONGEST_PATH} bytes")
    return place


def shown(address: Address) -> str:
    """An address as people read it: an abstract one has ``@`` first."""
    name = os.fsdecode(address)
    return "@" + name[1:] if name.startswith("\0") else name


def check_private(path: str) -> None:
    """Raise ``ValueError`` for a path in a directory that others than this user may enter."""
    directory = Path(path).absolute().parent
    found = os.stat(directory)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ValueError(
            f"{path}: others may enter {directory} and put a socket of their own there: use a directory of mode 700 "
            "that belongs to this user, or no path, for an abstract socket"
        )


def identity(path: str) -> tuple[int, int] | None:
    """Which file is there now."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def peer_of(connection: socket.socket) -> Peer:
    """Who made the other end (``SO_PEERCRED``)."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(found))


def admitted(connection: socket.socket) -> Peer:
    """Who made the other end; ``PermissionError`` where that is another user."""
    peer = peer_of(connection)
    if peer.uid != os.geteuid():
        raise PermissionError(
            errno.EPERM,
            f"the other end belongs to user {peer.uid} (process {peer.pid}): channels are for processes of one user, "
            f"here {os.geteuid()}",
        )
    return peer
