"""Locks on bytes of a file (``F_OFD_SETLK``), by which other processes see whether the process with the lock is alive.

Such a lock belongs to an open file description. Linux releases the lock when the last descriptor is closed, also at the
death of the process. The locked bytes may be beyond the end of the file.
"""

from __future__ import annotations

import fcntl
import os
import struct

_FLOCK = struct.Struct("hhqqi4x")  # The fields of struct flock: type, whence, start, length, process.


def flock(kind: int, byte: int, count: int = 1) -> bytes:
    """Return the ``struct flock`` for a lock of ``kind`` (such as ``F_WRLCK``) on ``count`` bytes from offset ``byte``
    on. A ``count`` of 0 means all bytes from ``byte`` on.
    """
    return _FLOCK.pack(kind, os.SEEK_SET, byte, count, 0)


def lock(fd: int, byte: int, kind: int, *, wait: bool = False) -> None:
    """Lock the byte at offset ``byte`` of a file (``kind`` is ``F_RDLCK`` or ``F_WRLCK``), or unlock it (``F_UNLCK``).

    If the byte is locked through another open file description, wait until it is unlocked; without ``wait``, raise
    ``BlockingIOError``. Raises ``OSError`` if ``fd`` is not open for reading (``F_RDLCK``) or writing (``F_WRLCK``).
    """
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, flock(kind, byte))


def try_lock(fd: int, byte: int) -> bool:
    """Lock the byte at offset ``byte`` exclusively, without waiting. Returns whether the byte is now locked: False if
    another open file description has a lock on it. Raises ``OSError`` if ``fd`` is not open for writing.
    """
    try:
        lock(fd, byte, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    return True


def is_locked(fd: int, first: int, count: int = 1) -> bool:
    """Return whether another open file description has locked one of ``count`` bytes from offset ``first`` on. A
    ``count`` of 0 means all bytes from ``first`` on.
    """
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, flock(fcntl.F_WRLCK, first, count))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
