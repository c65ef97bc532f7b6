"""Anonymous files that processes share: their names, locks on them, and access to the files of another process."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import struct
from collections.abc import Callable
from typing import NamedTuple

from .constants import NOWHERE, Place

_NAME = re.compile(r"/memfd:streamalloc:(\w+):([0-9a-f]{24}):([0-9a-f]{16}):(\d+)\.(\d+)\.(\d+) \(deleted\)")


class Label(NamedTuple):
    """The parts of a file's name. ``kind`` is pool, memory, multicast, heap or events."""

    kind: str
    machine: str
    """The same for all processes that simulate the same machine: 16 digits of the domain, 8 of the host."""
    serial: str
    """Random number, unique for the files of this machine object."""
    place: Place
    compression: int = 0
    """Compression type of memory; an importer reads it."""

    @property
    def domain(self) -> str:
        """The same for all hosts of an IMEX domain."""
        return self.machine[:16]

    def __str__(self) -> str:
        return f"{self.kind}:{self.machine}:{self.serial}:{self.place.type}.{self.place.id}.{self.compression}"

    @classmethod
    def of(cls, path: str) -> Label | None:
        """The label of the file behind a link under /proc; None for a file of another kind."""
        try:
            found = _NAME.fullmatch(os.readlink(path))
        except OSError:
            return None
        if found is None:
            return None
        kind, machine, serial, *numbers = found.groups()
        place, number, compression = map(int, numbers)
        return cls(kind, machine, serial, Place(place, number), compression)


def recognise(fd: int) -> Label | None:
    """The label of a descriptor; None unless its file can be mapped safely."""
    label = Label.of(f"/proc/self/fd/{fd}")
    if label is None:
        return None
    try:
        writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:
        return None
    return label if writable and sealed else None


def has_ended(process: int) -> bool:
    """Whether a process is gone, reaped or not."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            state = file.read().rpartition(b") ")[2][:1]
    except OSError:
        return True
    return state in b"ZX"


def reach(process: int, fd: int, fits: Callable[[Label], bool]) -> int | None:
    """A descriptor of our own for another process's, or None where that is gone or something else by now."""
    path = f"/proc/{process}/fd/{fd}"
    label = Label.of(path)
    if label is None or not fits(label):
        return None
    try:
        own = os.open(path, os.O_RDWR)
    except OSError:
        return None
    label = recognise(own)
    if label is None or not fits(label):
        os.close(own)
        return None
    return own


# -- locks on bytes of a file, which show whether a process lives ----------------------------------------------

# The kernel releases the locks of a process that ends. They belong to the open file description (F_OFD_SETLK), and can
# be beyond the end of the file.

_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, process


def lock(fd: int, byte: int, kind: int, *, wait: bool = False) -> None:
    """Lock a byte (``F_RDLCK``, ``F_WRLCK``) or unlock it (``F_UNLCK``)."""
    command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
    fcntl.fcntl(fd, command, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))


def is_locked(fd: int, first: int, count: int = 1) -> bool:
    """Whether somebody else has locked one of some bytes (0: all from there on)."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, count, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


# -- names -----------------------------------------------------------------------------------------------------


class Names:
    """Makes the labels of a machine's files. ``host`` is the machine's name in its IMEX domain; "": it is alone."""

    def __init__(self, identity: str, host: str = "") -> None:
        self.domain: str = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self.host: int = int(hashlib.sha256(host.encode()).hexdigest()[:8], 16) if host else 0
        self.machine: str = f"{self.domain}{self.host:08x}"
        self.owner: int = int.from_bytes(os.urandom(8), "little")
        """Random number of this machine object, part of its 64-byte handles."""

    def new(self, kind: str, place: Place, compression: int = 0) -> Label:
        """The label of a new file that can be shared."""
        return Label(kind, self.machine, os.urandom(8).hex(), place, compression)

    def own(self, kind: str, place: Place = NOWHERE) -> Label:
        """The label of a file with device memory or events, which others find by process and descriptor."""
        return Label(kind, self.machine, f"{self.owner:016x}", place)

    def number(self, ordinal: int) -> int:
        """The number of a device of this machine, unique in the domain."""
        return self.host << 32 | ordinal

    def is_own(self, process: int, owner: int) -> bool:
        return owner == self.owner and process == os.getpid()

    def reach(self, process: int, fd: int, owner: int, kind: str) -> int | None:
        """A descriptor of our own for such a file of another process of this machine, or None where it is gone."""
        expected = (kind, self.machine, f"{owner:016x}")
        return reach(process, fd, lambda label: label[:3] == expected)
