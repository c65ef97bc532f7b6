"""Identity of open files by descriptor, without keeping files open.

All handles that a real driver exports are unnamed files of one device, so ``fstat`` cannot tell them apart. An epoll
refers to an open file without keeping it open, and ``kcmp`` compares a descriptor with a file in an epoll.
"""

from __future__ import annotations

import ctypes
import os
import platform
import select
import stat
import struct
from typing import Generic, TypeVar

from streamalloc.checker.notes import Notes

T = TypeVar("T")
_KCMP = {"x86_64": 312, "aarch64": 272}.get(platform.machine())
_syscall = ctypes.CDLL(None).syscall
_EPOLL_TARGET = 7  # KCMP_EPOLL_TFD
_SLOT = struct.Struct("<III")
_MOST_FILES = 256
"""Most recorded files of each of the two sorts."""


class OpenFiles(Generic[T]):
    """A table with a value per open file. Files that cannot be identified have no value."""

    def __init__(self, notes: Notes | None = None) -> None:
        self._notes = Notes() if notes is None else notes
        self._by_inode: dict[tuple[int, int], T] = {}
        self._epoll: select.epoll | None = None
        self._noted: dict[int, T | None] = {}
        """Value by descriptor; None if several files had the descriptor."""

    def find(self, number: int) -> T | None:
        """The value of the file of a descriptor."""
        key = _inode(number)
        if key is not None:
            return self._by_inode.get(key)
        return next((one for noted, one in self._noted.items() if one is not None and self._is(number, noted)), None)

    def note(self, number: int, thing: T) -> None:
        """Set the value of the file of a descriptor."""
        key = _inode(number)
        if key is not None:
            self._by_inode.pop(key, None)
            self._by_inode[key] = thing
            if len(self._by_inode) > _MOST_FILES:
                self._notes.add("imports")
                del self._by_inode[next(iter(self._by_inode))]
            return
        try:
            if self._epoll is None:
                self._epoll = select.epoll()
            # Another open file is in the epoll under the same descriptor number.
            taken = number in self._noted and f"tfd: {number:8d}" in self._targets()
            self._epoll.register(number, 0)
            self._noted.pop(number, None)
            self._noted[number] = None if taken else thing
            if len(self._noted) > _MOST_FILES or taken or _KCMP is None:
                self._notes.add("imports")
            if len(self._noted) > _MOST_FILES:
                del self._noted[next(iter(self._noted))]
        except (OSError, ValueError):
            self._notes.add("imports")

    def close(self) -> None:
        """Remove all files without names."""
        self._noted.clear()
        if self._epoll is not None:
            self._epoll.close()
            self._epoll = None

    def _targets(self) -> str:
        with open(f"/proc/self/fdinfo/{-1 if self._epoll is None else self._epoll.fileno()}") as file:
            return file.read()

    def _is(self, number: int, noted: int) -> bool:
        if _KCMP is None or self._epoll is None:
            return False
        slot = ctypes.create_string_buffer(_SLOT.pack(self._epoll.fileno(), noted, 0), _SLOT.size)
        process = os.getpid()
        call = (_KCMP, process, process, _EPOLL_TARGET, number)
        answer = _syscall(*map(ctypes.c_long, call), ctypes.c_void_p(ctypes.addressof(slot)))
        return bool(answer == 0)


def _inode(number: int) -> tuple[int, int] | None:
    """Device and inode of a regular file; None for other files."""
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None
