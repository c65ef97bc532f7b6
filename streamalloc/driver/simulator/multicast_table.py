"""The table of a multicast object, in an anonymous file that all processes with the object map.

Every handle of an object, in whatever process, is a *holder* of its table, and opens the file anew: holders lock bytes
of it that way (the bytes stand for nothing, and most lie beyond the end). One byte is the lock around changes. One is
each holder's own, and free again when the holder is gone, however that came. One is shared by the descriptors that
were exported. So the table tells a binding whose process was killed from one that is there, and whether anybody else
may still add a device.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .files import is_locked, lock
from .memory import Physical

WAITING, FORMED, NO_SLOT = 0, 1, 2
"""State: devices are missing; all were added; all were added, but the switch has no slot."""

_DEVICES, _SIZE, _HANDLE_TYPES, _STATE, _CHANGES, _HOLDERS, _RECORDS, _NUMBERS, _ADDED = range(9)
_FIRST_ADDED = 16
_FIRST_RECORD = 512
_RECORD_WORDS = 16
_MAX_RECORDS = 4096
_WORD = 8
_BYTES = (_FIRST_RECORD + _MAX_RECORDS * _RECORD_WORDS) * _WORD

_CHANGING, _EXPORTED, _FIRST_HOLDER = 0, 1, 2  # bytes to lock


class Binding(NamedTuple):
    """Memory of one device at one offset of a multicast object."""

    number: int
    """Unique number; 0 in a free record."""
    holder: int
    process: int
    fd: int
    """Descriptor of the memory file in that process."""
    serial: int
    """Serial number of that file; 0 for a file without a label."""
    device: int
    offset: int
    """In the object."""
    start: int
    """In the file."""
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


def _word(number: int) -> Any:
    return property(lambda table: table._words[number])


class MulticastTable:
    """A holder's view of the table. Owns ``physical``, a file description that nobody else has."""

    has_fabric_handle = False
    """A fabric handle was exported: a new holder can come at any time."""

    def __init__(self, physical: Physical) -> None:
        self.physical = physical
        self._locked = 0
        self._memory = mmap.mmap(physical.fd, _BYTES)
        self._words = memoryview(self._memory).cast("Q")
        self._seen = -1
        self._bindings: list[Binding] = []
        with self.locked():
            self._words[_HOLDERS] += 1
            self.holder: int = self._words[_HOLDERS]
        lock(physical.fd, _FIRST_HOLDER + self.holder, fcntl.F_WRLCK, wait=True)

    @classmethod
    def create(cls, name: str, devices: int, size: int, handle_types: int) -> MulticastTable:
        physical = Physical(name, _BYTES)
        physical.seal()
        table = cls(physical)
        table._words[_DEVICES], table._words[_SIZE], table._words[_HANDLE_TYPES] = devices, size, handle_types
        return table

    @classmethod
    def open(cls, fd: int) -> MulticastTable:
        """A new holder, by anybody's descriptor; the descriptor stays the caller's."""
        return cls(Physical.adopt(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)))

    # -- locks -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other holders from changing anything; the lock of one that is killed is gone. May be nested."""
        if not self._locked:
            lock(self.physical.fd, _CHANGING, fcntl.F_WRLCK, wait=True)
        self._locked += 1
        try:
            yield
        finally:
            self._locked -= 1
            if not self._locked:
                lock(self.physical.fd, _CHANGING, fcntl.F_UNLCK)

    @property
    def is_elsewhere(self) -> bool:
        """Whether there is another holder, or a descriptor by which there may be one."""
        return is_locked(self.physical.fd, _EXPORTED, 0)

    def is_alive(self, holder: int) -> bool:
        return holder == self.holder or is_locked(self.physical.fd, _FIRST_HOLDER + holder)

    def export(self) -> int:
        """A descriptor for another process."""
        fd = self.physical.lend()
        lock(fd, _EXPORTED, fcntl.F_RDLCK, wait=True)
        return fd

    # -- devices ---------------------------------------------------------------------------------------------

    device_count: Any = _word(_DEVICES)
    """The number of devices of the team, added or not."""
    size: Any = _word(_SIZE)
    handle_types: Any = _word(_HANDLE_TYPES)
    state: Any = _word(_STATE)

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that were added, by whichever process, in that order."""
        return tuple(self._words[_FIRST_ADDED : _FIRST_ADDED + self._words[_ADDED]])

    def add(self, device: int, has_slot: bool) -> bool:
        """Add a device; False for one that was added before, or too many. The last one forms the team, if the switch
        has room for another.
        """
        with self.locked():
            added = self.devices
            if device in added or len(added) == self.device_count:
                return False
            self._words[_FIRST_ADDED + len(added)] = device
            self._words[_ADDED] += 1
            if self._words[_ADDED] == self.device_count:
                self._words[_STATE] = FORMED if has_slot else NO_SLOT
            return True

    # -- bindings --------------------------------------------------------------------------------------------

    def bindings(self) -> list[Binding]:
        """Bindings of live processes, by offset."""
        changes = self._words[_CHANGES]
        if changes != self._seen:
            with self.locked():
                places = range(self._words[_RECORDS])
                found = [binding for binding in map(self._read, places) if binding.number]
                changes = self._words[_CHANGES]
            self._bindings = sorted(found, key=lambda binding: binding.offset)
            self._seen = changes
        alive = {holder: self.is_alive(holder) for holder in {binding.holder for binding in self._bindings}}
        return [binding for binding in self._bindings if alive[binding.holder]]

    def bind(self, device: int, offset: int, fd: int, serial: int, start: int, size: int) -> Binding | None:
        """Note a binding; None where the table is full."""
        with self.locked():
            live = {binding.number for binding in self.bindings()}
            count = self._words[_RECORDS]
            # also in the record of a process that has died
            free = (place for place in range(count) if self._read(place).number not in live)
            place = next(free, count)
            if place == _MAX_RECORDS:
                return None
            self._words[_RECORDS] = max(count, place + 1)
            self._words[_NUMBERS] += 1
            number = self._words[_NUMBERS]
            binding = Binding(number, self.holder, os.getpid(), fd, serial, device, offset, start, size)
            self._write(place, binding)
            return binding

    def unbind(self, number: int) -> None:
        self._forget(lambda binding: binding.number == number)

    def leave(self) -> None:
        """Remove this holder with its bindings."""
        self._forget(lambda binding: binding.holder == self.holder)
        self._words.release()
        self._memory.close()
        self.physical.close()

    def _forget(self, which: Callable[[Binding], bool]) -> None:
        with self.locked():
            for place in range(self._words[_RECORDS]):
                if which(self._read(place)):
                    self._write(place, Binding(*(0,) * len(Binding._fields)))

    def _read(self, place: int) -> Binding:
        first = _FIRST_RECORD + place * _RECORD_WORDS
        return Binding(*self._words[first : first + len(Binding._fields)])

    def _write(self, place: int, binding: Binding) -> None:
        self._words[_CHANGES] += 1
        first = _FIRST_RECORD + place * _RECORD_WORDS
        for word, value in enumerate(binding, first):
            self._words[word] = value
