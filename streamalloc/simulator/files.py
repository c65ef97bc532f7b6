"""Anonymous files that several processes use: their names, opening a file of another process, and the memory usage of
all processes of a named machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import re
import socket
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

from streamalloc.formats.locks import lock
from streamalloc.simulator.constants import HIDDEN, NOWHERE, Place
from streamalloc.simulator.errors import undo_by
from streamalloc.simulator.memory import Physical

_NAME = re.compile(r"/memfd:streamalloc:(\w+):([0-9a-f]{24}):([0-9a-f]{16}):(\d+)\.(\d+)\.(\d+) \(deleted\)")


class Label(NamedTuple):
    """Parts of the name of a shared file."""

    kind: str
    """Kind of the file: pool, memory, multicast, heap, events or usage."""
    machine: str
    """Name of the machine, equal in all its processes: 16 hexadecimal digits for the domain, 8 for the host."""
    serial: str
    """Random number in 16 hexadecimal digits: of the file (:meth:`Labels.new`), or of the machine object
    (:meth:`Labels.own`).
    """
    place: Place
    compression: int = 0
    """Compression type of the memory (``CUmemAllocationCompType``; 0: none). Importers read it from the label."""

    @property
    def domain(self) -> str:
        """First part of the machine's name, without the host. It is equal for the machines of one IMEX domain."""
        return self.machine[:16]

    def __str__(self) -> str:
        return f"{self.kind}:{self.machine}:{self.serial}:{self.place.type}.{self.place.id}.{self.compression}"

    @classmethod
    def of(cls, path: str) -> Label | None:
        """Return the label of the file to which a link in /proc leads; None for a file without a label."""
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
    """Return the label of the file of a descriptor; None for a closed descriptor, and for a file that cannot be used.

    A file cannot be used if it has no label, is not open for reading and writing, or can still shrink. After a shrink,
    a use of its mappings would fault.
    """
    label = Label.of(f"/proc/self/fd/{fd}")
    if label is None:
        return None
    try:
        writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:
        return None
    return label if writable and sealed else None


def reach(process: int, fd: int, fits: Callable[[Label], bool]) -> int | None:
    """Open a file that the process ``process`` has open as the descriptor ``fd``. Returns a new descriptor.

    Returns None if that descriptor is closed or not accessible, if its file has no label for which ``fits`` returns
    True, or if the file cannot be used (:func:`recognise`). Raises ``OSError`` if the file cannot be opened for another
    reason.
    """
    path = f"/proc/{process}/fd/{fd}"
    label = Label.of(path)
    if label is None or not fits(label):
        return None
    try:
        own = os.open(path, os.O_RDWR)
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return None
    label = recognise(own)
    if label is None or not fits(label):
        os.close(own)
        return None
    return own


# -- labels of files, and shared words -------------------------------------------------------------------------


class Labels:
    """Makes the labels (names) of the files of one machine object, and numbers the machine's devices.

    ``host``: the machine's name in its IMEX domain; empty if it is in no domain.
    """

    def __init__(self, identity: str, host: str = "", devices: int = 1) -> None:
        self.numbers: list[int] = list(range(devices))
        """Number of each device in the machine, by the ordinal that the device has in this process."""
        self.domain: str = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self.host: int = int(hashlib.sha256(host.encode()).hexdigest()[:8], 16) if host else 0
        self.machine: str = f"{self.domain}{self.host:08x}"
        self.owner: int = int.from_bytes(os.urandom(8), "little")
        """Random number of this machine object. It is part of IPC handles."""

    def new(self, kind: str, place: Place, compression: int = 0) -> Label:
        """Return the label of a new file whose memory can be exported."""
        there = place if place.device is None else Place(place.type, self.of_machine(place.id))
        return Label(kind, self.machine, os.urandom(8).hex(), there, compression)

    def own(self, kind: str, place: Place = NOWHERE) -> Label:
        """Return the label of a file with cuMemAlloc memory, events or usage.

        Other processes open such a file in /proc, by the id of this process and the number of the file descriptor.
        """
        return Label(kind, self.machine, f"{self.owner:016x}", place)

    def number(self, ordinal: int) -> int:
        """Return the number of a device of this machine, which is unique in the IMEX domain."""
        return self.host << 32 | self.of_machine(ordinal)

    def of_machine(self, ordinal: int) -> int:
        """Return the machine's number of a device, by the ordinal that the device has in this process. :data:`HIDDEN`
        is returned as it is.
        """
        return HIDDEN if ordinal == HIDDEN else self.numbers[ordinal]

    def seen(self, number: int) -> int:
        """Return the ordinal in the process of the machine's device ``number``; :data:`HIDDEN` if the process does not
        see it.
        """
        return self.numbers.index(number) if number in self.numbers else HIDDEN

    def is_own(self, process: int, owner: int) -> bool:
        return owner == self.owner and process == os.getpid()

    def reach(self, process: int, fd: int, owner: int, kind: str) -> int | None:
        """Open the file of kind ``kind`` that a machine object has open in another process (:func:`reach`). ``owner``:
        the :attr:`owner` of that machine object. Returns a new descriptor; None if the file is closed there.
        """
        expected = (kind, self.machine, f"{owner:016x}")
        return reach(process, fd, lambda label: label[:3] == expected)


class SharedWords:
    """``count`` words of 64 bits in an anonymous file that several processes map.

    The object owns ``physical`` until ``close()`` or until it is garbage-collected.
    """

    def __init__(self, physical: Physical, count: int) -> None:
        self.physical = physical
        self._locked = 0
        with undo_by(physical.close):
            self.words: memoryview[int] = memoryview(mmap.mmap(physical.fd, count * WORD)).cast("Q")
        self.close: Callable[[], object]
        self.close = finalizer = weakref.finalize(self, _close, self.words, physical)
        finalizer.atexit = False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes, and other objects of this process, from changing the words within the ``with`` block.
        Reentrant. Linux releases the lock of a process that dies.
        """
        if not self._locked:
            lock(self.physical.fd, _CHANGING, fcntl.F_WRLCK, wait=True)
        self._locked += 1
        try:
            yield
        finally:
            self._locked -= 1
            if not self._locked:
                lock(self.physical.fd, _CHANGING, fcntl.F_UNLCK)


def _close(words: memoryview[int], physical: Physical) -> None:
    words.release()  # Otherwise the file stays mapped.
    physical.close()


WORD, _CHANGING = 8, 0
"""Size of a word in bytes, and the byte of the file that is locked while a process changes the words."""

HOST_BANK = 63
"""Index of the host's word in a file of :class:`Usage`. Words 0 to 62 are those of the first 63 devices of the machine.
"""
_BANKS = 64


class Usage(SharedWords):
    """Number of bytes that one machine object uses of each device and of the host, in an anonymous file that all
    processes of the machine can map.

    Other processes find the file by the name of an abstract socket, which contains the id of the process and its
    descriptor of the file. The socket ends with the process.
    """

    def __init__(self, labels: Labels) -> None:
        super().__init__(Physical(str(labels.own("usage")), _BANKS * WORD), _BANKS)
        self.physical.seal()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._prefix = f"streamalloc:usage:{labels.machine}:"
        # With the number of the machine object, because files may have the same descriptor one after the other.
        self._name = f"{os.getpid()}:{self.physical.fd}:{labels.owner:x}"
        self._socket.bind(f"\0{self._prefix}{self._name}")
        self._others: dict[str, SharedWords] = {}
        """Words of the other machine objects, by the last part of the name of their sockets."""

    def put(self, bank: int, used: int) -> None:
        """Record ``used``, the number of bytes that this machine object uses of the bank with the index ``bank``."""
        self.words[bank] = max(used, 0)

    def others(self, bank: int) -> int:
        """Return the bytes of the bank with the index ``bank`` that all other machine objects use, in this and other
        processes.
        """
        with open("/proc/net/unix", encoding="utf-8", errors="replace") as lines:
            names = re.findall(rf"@{self._prefix}(\d+:\d+:\w+)$", lines.read(), re.MULTILINE)
        found = ((name, self._words_of(name)) for name in names if name != self._name)
        self._others = {name: words for name, words in found if words is not None}
        return sum(one.words[bank] for one in self._others.values())

    def _words_of(self, name: str) -> SharedWords | None:
        """Return the words of another machine object; None if its process has ended, or its file cannot be opened.
        ``name``: last part of the name of its socket.
        """
        process, fd, _ = name.split(":")
        if name in self._others:
            # A forked child may still have the socket of a killed process, so the process itself is checked.
            return self._others[name] if os.path.exists(f"/proc/{process}/fd/{fd}") else None
        own = reach(int(process), int(fd), lambda label: f"streamalloc:{label.kind}:{label.machine}:" == self._prefix)
        return None if own is None else SharedWords(Physical.adopt(own), _BANKS)

    def leave(self) -> None:
        """Remove the file. A forked child may still have the socket and the file, so the words are set to 0."""
        for bank in range(_BANKS):
            self.put(bank, 0)
        self._socket.close()
        self.close()
