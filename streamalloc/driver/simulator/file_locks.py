"""Locks on bytes of a file, which show whether a process lives: the kernel releases the locks of a process that ends.
They belong to the open file description (``F_OFD_SETLK``), and can be beyond the end of the file.
"""

from __future__ import annotations

import fcntl
import os
import struct

_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, process


def lock(fd: int, byte: int, kind: int, *, wait: bool = False) -> None:
    """Lock a byte (``F_RDLCK``, ``F_WRLCK``) or unlock it (``F_UNLCK``)."""
    command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
    fcntl.fcntl(fd, command, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))


def is_locked(fd: int, first: int, count: int = 1) -> bool:
    """Whether somebody else has locked one of some bytes (0: all from there on)."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, count, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
