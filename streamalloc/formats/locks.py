"""Locks on bytes of a file (``F_OFD_SETLK``). They show whether a process is alive.

Such a lock belongs to an open file description. Linux releases it when the last descriptor is closed, also by the death
of the process. The bytes may be beyond the end of the file.
"""

from __future__ import annotations

import fcntl
import os
import struct

_FLOCK = struct.Struct("hhqqi4x")  # The fields of struct flock: type, whence, start, length, process.


def flock(kind: int, byte: int, count: int = 1) -> bytes:
    """Return the ``struct flock`` of a lock of this kind. A ``count`` of 0 means all bytes from ``byte`` on."""
    return _FLOCK.pack(kind, os.SEEK_SET, byte, count, 0)


def lock(fd: int, byte: int, kind: int, *, wait: bool = False) -> None:
    """Lock a byte (``F_RDLCK``, ``F_WRLCK``), or unlock it (``F_UNLCK``).

    If another open file has locked it, wait for that, or without ``wait`` raise ``BlockingIOError``.
    """
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, flock(kind, byte))


def try_lock(fd: int, byte: int) -> bool:
    """Lock a byte exclusively. Returns False if another open file has locked it."""
    try:
        lock(fd, byte, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    return True


def is_locked(fd: int, first: int, count: int = 1) -> bool:
    """Whether another open file has locked a byte of a range. A ``count`` of 0 means all bytes from ``first`` on."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, flock(fcntl.F_WRLCK, first, count))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
