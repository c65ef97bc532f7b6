"""Addresses of sockets, and the process at the other end of one."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from pathlib import Path
from typing import NamedTuple, TypeAlias, Union

Address: TypeAlias = Union[str, bytes, "os.PathLike[str]"]
"""Address of a :class:`Listener`: a path, or an abstract name with ``@`` or a zero byte first."""


class Peer(NamedTuple):
    """The process that made the other end of a channel, as the kernel reports it.

    For both ends of :meth:`Channel.pair` this is the process that called it, also after an end was passed to another
    process. ``pid`` is 0 for a process of another PID namespace (a container).
    """

    pid: int
    uid: int
    gid: int


_CREDENTIALS = struct.Struct("3i")
_LONGEST_PATH = 107  # bytes: sun_path without its zero at the end


def to_kernel(address: Address) -> str | bytes:
    """An address for the socket functions: bytes with a zero first for an abstract name, else a path."""
    name = os.fsdecode(address)
    found = b"\0" + os.fsencode(name[1:]) if name.startswith(("@", "\0")) else name
    if len(os.fsencode(found)) > _LONGEST_PATH or len(found) < 2:
        raise ValueError(f"{shown(address)!r} is no address: one has 2 to {_LONGEST_PATH} bytes")
    return found


def shown(address: Address) -> str:
    """An address for messages: an abstract name has ``@`` first."""
    name = os.fsdecode(address)
    return "@" + name[1:] if name.startswith("\0") else name


def check_private(path: str) -> None:
    """Raise ``ValueError`` for a path in a directory that other users may enter."""
    directory = Path(path).absolute().parent
    found = os.stat(directory)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ValueError(
            f"{path}: others may enter {directory} and put a socket of their own there: use a directory of mode 700 "
            "that belongs to this user, or no path, for an abstract socket"
        )


def identity(path: str) -> tuple[int, int] | None:
    """Device and inode number of a file, without following a link; None if no file has this path."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def peer_of(connection: socket.socket) -> Peer:
    """The process that made the other end (``SO_PEERCRED``)."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(found))


def admitted(connection: socket.socket) -> Peer:
    """The process that made the other end; ``PermissionError`` if it belongs to another user."""
    peer = peer_of(connection)
    if peer.uid != os.geteuid():
        raise PermissionError(
            errno.EPERM,
            f"the other end belongs to user {peer.uid} (process {peer.pid}): channels are for processes of one user, "
            f"here {os.geteuid()}",
        )
    return peer
