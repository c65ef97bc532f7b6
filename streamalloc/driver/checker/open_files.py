"""Which descriptors are of the same open file, without keeping any open.

What a real driver exports are all files of one device, without names of their own. An epoll notes an open file without
holding it, and Linux tells whether a descriptor is of a file that was noted (``kcmp``).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import select
import stat
import struct
from typing import Generic, TypeVar

__all__ = ["OpenFiles"]

T = TypeVar("T")
_KCMP = {"x86_64": 312, "aarch64": 272}.get(platform.machine())
_syscall = ctypes.CDLL(None).syscall
_EPOLL_TARGET = 7  # KCMP_EPOLL_TFD
_SLOT = struct.Struct("<III")
_KEPT = 256


class OpenFiles(Generic[T]):
    """Something for each open file; nothing where that cannot be known."""

    def __init__(self) -> None:
        self._by_inode: dict[tuple[int, int], T] = {}
        self._epoll: select.epoll | None = None
        self._noted: dict[int, T | None] = {}
        """By the descriptor at that time; None where several files may have had it."""

    def find(self, number: int) -> T | None:
        """What belongs to the file of a descriptor."""
        key = _inode(number)
        if key is not None:
            return self._by_inode.get(key)
        return next((one for noted, one in self._noted.items() if one is not None and self._is(number, noted)), None)

    def note(self, number: int, thing: T) -> None:
        """Something belongs to the file of a descriptor."""
        key = _inode(number)
        if key is not None:
            self._by_inode[key] = thing
            return
        with contextlib.suppress(OSError, ValueError):
            if self._epoll is None:
                self._epoll = select.epoll()
            # That it is there already under this number stands for another file, which somebody still has.
            taken = number in self._noted and f"tfd: {number:8d}" in self._targets()
            self._epoll.register(number, 0)
            self._noted.pop(number, None)
            self._noted[number] = None if taken else thing
            if len(self._noted) > _KEPT:
                del self._noted[next(iter(self._noted))]

    def close(self) -> None:
        """Forget all that have no names."""
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
    """What tells a file from all others; None where nothing does."""
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None
