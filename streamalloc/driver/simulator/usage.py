"""Memory that the processes of a named machine use together.

They share a table in an anonymous file: a slot for each machine object, with the bytes that it uses of each device and
of the host. A process locks its slot, so that the slot of one that has ended is free again. Others find the table by
the name of an abstract socket, which has the process and the descriptor and ends with the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import socket
import time
from collections.abc import Iterator

from .files import Names, is_locked, lock, reach
from .memory import Physical

HOST = 63
"""Number of the host's memory in a slot; devices have their ordinals."""
_BANKS, _SLOTS, _WORD = 64, 1024, 8
_HIGHEST = _SLOTS * _BANKS
"""Word with the number of slots that were ever taken."""
_BYTES = (_HIGHEST + 1) * _WORD
_PATIENCE = 10.0
_LIST = "/proc/net/unix"


class Usage:
    """The slot of a machine object in the table of its machine."""

    def __init__(self, names: Names) -> None:
        with _alone(names.machine):
            self._fd = _table_of_others(names)
            if self._fd is None:
                physical = Physical(str(names.own("usage")), _BYTES)
                physical.seal()
                self._fd = physical.fd
            self._memory = mmap.mmap(self._fd, _BYTES)
            self._words = memoryview(self._memory).cast("Q")
            self._slot = next(slot for slot in range(_SLOTS) if not is_locked(self._fd, slot))
            lock(self._fd, self._slot, fcntl.F_WRLCK)
            self._words[_HIGHEST] = max(self._words[_HIGHEST], self._slot + 1)
            self._words[self._slot * _BANKS : (self._slot + 1) * _BANKS] = memoryview(bytes(_BANKS * _WORD)).cast("Q")
            self._name = _bound(f"streamalloc:usage:{names.machine}:{os.getpid()}:{self._fd}")

    def put(self, bank: int, used: int) -> None:
        """Note how much this object uses."""
        self._words[self._slot * _BANKS + bank] = max(used, 0)

    def others(self, bank: int) -> int:
        """Bytes that all others use."""
        assert self._fd is not None
        found = 0
        for slot in range(self._words[_HIGHEST]):
            used = self._words[slot * _BANKS + bank]
            if used and is_locked(self._fd, slot):  # a lock of one's own is none
                found += used
        return found

    def close(self) -> None:
        """Leave the slot."""
        self._name.close()
        self._words.release()
        self._memory.close()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _bound(name: str) -> socket.socket:
    """A socket of a name that nobody else has; it ends with the process."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        made.bind(f"\0{name}")
    except OSError:
        made.close()
        raise
    return made


@contextlib.contextmanager
def _alone(machine: str) -> Iterator[None]:
    """Keeps two processes from making the table at the same time."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            held = _bound(f"streamalloc:starting:{machine}")
            break
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                raise
            time.sleep(0.001)
    try:
        yield
    finally:
        held.close()


def _table_of_others(names: Names) -> int | None:
    """A descriptor of the table that another process, or object, of the machine has; None where there is none."""
    with open(_LIST, encoding="utf-8", errors="replace") as lines:
        found = re.findall(rf"@streamalloc:usage:{names.machine}:(\d+):(\d+)$", lines.read(), re.MULTILINE)
    for process, fd in found:
        own = reach(int(process), int(fd), lambda label: (label.kind, label.machine) == ("usage", names.machine))
        if own is not None:
            return own
    return None
