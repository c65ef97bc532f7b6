"""Multicast objects: memory that is written on every device of a team at once.

A multicast object has no bytes of its own, and the host cannot access its mappings. Work on an address of such a
mapping uses the memory that each device has bound there, also memory of other processes. The behaviour of multicast
objects was never observed on hardware; the model follows NVIDIA's documentation, then the source of their kernel module
(open-gpu-kernel-modules, mem_multicast_fabric.c), then reports of users.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from streamalloc.formats.locks import is_locked, lock
from streamalloc.simulator.allocations import LiveMemory
from streamalloc.simulator.constants import Location, Place
from streamalloc.simulator.errors import DeadlockError, Result, check, need, not_modelled, undo_by
from streamalloc.simulator.files import WORD, Label, SharedWords, reach
from streamalloc.simulator.machine import Machine
from streamalloc.simulator.memory import Physical, ReservedExtent, window
from streamalloc.simulator.physical import CreatedMemory, Mappable, Properties

WAITING, FORMED, NO_SLOT = 0, 1, 2
"""States of a team: devices are missing; all devices were added; all were added, but the switch had no free slot."""

# Indexes of the 64-bit words at the start of a table, before the numbers of added devices and the records of bindings.
_DEVICES, _SIZE, _HANDLE_TYPES, _STATE, _HOLDERS, _RECORDS, _NUMBERS, _ADDED = range(8)
_FIRST_ADDED = 16
_FIRST_RECORD = 512
_RECORD_WORDS = 16
_MAX_RECORDS = 4096
_WORDS = _FIRST_RECORD + _MAX_RECORDS * _RECORD_WORDS

# Offsets in the file of further bytes whose locks have a meaning (:class:`MulticastTable`).
_EXPORTED, _FIRST_HOLDER = 1, 2


class TeamBinding(NamedTuple):
    """Memory of one device that is bound at one offset of a multicast object, as the table records it."""

    number: int
    """Unique number of the binding; 0 in a free record."""
    holder: int
    """Number of the holder that bound the memory."""
    process: int
    fd: int
    """Descriptor number of the file with the memory, in the process of the holder."""
    serial: int
    """Serial number of the memory file; 0 for a file without a label."""
    device: int
    offset: int
    """Offset of the binding in the object in bytes."""
    start: int
    """Offset of the memory in its file in bytes."""
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


def _word(number: int) -> Any:
    return property(lambda table: table.words[number])


class MulticastTable(SharedWords):
    """Table of a multicast object: an anonymous file that all processes with the object map.

    Every handle of the object, in any process, is a *holder* of the table. A holder opens the file again (``physical``)
    and locks bytes of it. Only the locks of these bytes have a meaning, and most of the bytes lie beyond the end of the
    file:

    * one byte is locked while a holder changes the table;
    * one byte is locked by each descriptor that was exported;
    * one byte for each holder is locked as long as the holder exists. Linux unlocks the byte, however the holder ends.

    So the table shows whether the process of a binding was killed, and whether another process may still add a device.
    """

    has_fabric_handle = False
    """Whether this holder has exported a fabric handle. If so, new holders may appear at any time."""

    def __init__(self, physical: Physical) -> None:
        super().__init__(physical, _WORDS)
        with self.locked():
            self.words[_HOLDERS] += 1
            self.holder: int = self.words[_HOLDERS]
        lock(physical.fd, _FIRST_HOLDER + self.holder, fcntl.F_WRLCK, wait=True)

    @classmethod
    def create(cls, name: str, devices: int, size: int, handle_types: int) -> MulticastTable:
        physical = Physical(name, _WORDS * WORD)
        physical.seal()
        table = cls(physical)
        table.words[_DEVICES], table.words[_SIZE], table.words[_HANDLE_TYPES] = devices, size, handle_types
        return table

    @classmethod
    def open(cls, fd: int) -> MulticastTable:
        """Return the table of the file ``fd``, as a new holder. The caller keeps the descriptor."""
        return cls(Physical.adopt(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)))

    @property
    def is_elsewhere(self) -> bool:
        """Whether another holder exists, or an exported descriptor from which a process can become one."""
        return is_locked(self.physical.fd, _EXPORTED, 0)

    def is_alive(self, holder: int) -> bool:
        return holder == self.holder or is_locked(self.physical.fd, _FIRST_HOLDER + holder)

    def export(self) -> int:
        """Return a descriptor for another process. While the descriptor is open, :attr:`is_elsewhere` is True."""
        fd = self.physical.lend()
        with undo_by(os.close, fd):
            lock(fd, _EXPORTED, fcntl.F_RDLCK, wait=True)
        return fd

    # -- devices ---------------------------------------------------------------------------------------------

    device_count: Any = _word(_DEVICES)
    """Number of devices of the team, whether they were added or not."""
    size: Any = _word(_SIZE)
    handle_types: Any = _word(_HANDLE_TYPES)
    state: Any = _word(_STATE)

    @property
    def devices(self) -> tuple[int, ...]:
        """Numbers of the devices that were added by any process, in the order of their addition
        (:meth:`.Labels.number`).
        """
        return tuple(self.words[_FIRST_ADDED : _FIRST_ADDED + self.words[_ADDED]])

    def add(self, device: int, has_slot: bool) -> bool:
        """Add a device to the team. Returns False if it was added before, or if the team is complete already.

        The last device completes the team. ``has_slot``: whether the switch has a free slot, without which the team
        cannot be used.
        """
        with self.locked():
            added = self.devices
            if device in added or len(added) == self.device_count:
                return False
            self.words[_FIRST_ADDED + len(added)] = device
            self.words[_ADDED] += 1
            if self.words[_ADDED] == self.device_count:
                self.words[_STATE] = FORMED if has_slot else NO_SLOT
            return True

    # -- bindings --------------------------------------------------------------------------------------------

    def bindings(self) -> list[TeamBinding]:
        """Return the bindings of live holders, in the order of their offsets."""
        with self.locked():
            found = [binding for binding in map(self._read, range(self.words[_RECORDS])) if binding.number]
        alive = {holder: self.is_alive(holder) for holder in {binding.holder for binding in found}}
        return sorted((one for one in found if alive[one.holder]), key=lambda binding: binding.offset)

    def bind(self, device: int, offset: int, fd: int, serial: int, start: int, size: int) -> TeamBinding | None:
        """Record a binding: ``size`` bytes from ``start`` on in the file ``fd`` are bound at ``offset`` of the object.
        Returns the binding; None if the table is full.
        """
        with self.locked():
            live = {binding.number for binding in self.bindings()}
            count = self.words[_RECORDS]
            # The record of a dead process may be used again.
            place = next((place for place in range(count) if self._read(place).number not in live), count)
            if place == _MAX_RECORDS:
                return None
            self.words[_RECORDS] = max(count, place + 1)
            self.words[_NUMBERS] += 1
            number = self.words[_NUMBERS]
            binding = TeamBinding(number, self.holder, os.getpid(), fd, serial, device, offset, start, size)
            self._write(place, binding)
            return binding

    def unbind(self, number: int) -> None:
        self._forget(lambda binding: binding.number == number)

    def leave(self) -> None:
        """Remove this holder of the table, and all bindings that it has made."""
        self._forget(lambda binding: binding.holder == self.holder)
        self.close()

    def _forget(self, which: Callable[[TeamBinding], bool]) -> None:
        # No loop in this block: on Python 3.12 and newer, an exception of a signal handler in a loop can leave the lock
        # held.
        with self.locked():
            self._clear(which)

    def _clear(self, which: Callable[[TeamBinding], bool]) -> None:
        for place in range(self.words[_RECORDS]):
            if which(self._read(place)):
                self._write(place, TeamBinding(*(0,) * len(TeamBinding._fields)))

    def _read(self, place: int) -> TeamBinding:
        first = _FIRST_RECORD + place * _RECORD_WORDS
        return TeamBinding(*self.words[first : first + len(TeamBinding._fields)])

    def _write(self, place: int, binding: TeamBinding) -> None:
        for word, value in enumerate(binding, _FIRST_RECORD + place * _RECORD_WORDS):
            self.words[word] = value


_OF_A_TEAM = Place(Location.DEVICE, -1)
"""Location of a multicast object. The ordinal is -1, because the object has several devices."""


class Segment(NamedTuple):
    """Bytes that a step of an operation reads or writes: address and size. ``at``: offset of these bytes in the range
    of the step.
    """

    address: int
    at: int
    size: int


class Backing(NamedTuple):
    """Memory that can be bound to a multicast object: bytes of a file from ``start`` on."""

    physical: Physical
    start: int
    device: int | None
    memory: CreatedMemory | None = None
    allocation: LiveMemory | None = None
    """The pool allocation with this memory; None for memory of cuMemCreate."""


class MulticastMemory(Mappable):
    """Multicast object, as one of its handles refers to it.

    The object and the bindings made by this handle exist until all references to the handle are released and nothing is
    mapped. Handles of other processes or other imports are independent.
    """

    def __init__(self, machine: Machine, table: MulticastTable, imported: bool) -> None:
        super().__init__(table.size, Properties(_OF_A_TEAM, table.handle_types))
        self.table = table
        self.imported = imported
        self._machine = machine
        self._bound: dict[int, Backing] = {}  # Memory of the bindings that this holder made, by binding number.
        # Mappings of bound memory, by binding number, of all holders.
        self._windows: dict[int, ReservedExtent] = {}

    @property
    def serial(self) -> str:
        """Serial number in the name of the table's file, equal for all handles of the object."""
        label = Label.of(f"/proc/self/fd/{self.table.physical.fd}")
        assert label is not None
        return label.serial

    def leave(self) -> None:
        if not self.handles and not self.mappings:
            self.close()

    def close(self) -> None:
        for number in list(self._bound):
            self._release(number)
        for there in self._windows.values():
            there.close()
        self._windows.clear()
        self.table.leave()

    # -- as something that is mapped -------------------------------------------------------------------------

    def check_part(self, offset: int, size: int) -> None:
        """Check that cuMemMap can map ``size`` bytes of the object from ``offset`` on. They can be fewer than all bytes
        of the object, as mscclpp maps it.

        Gives CUDA_ERROR_INVALID_VALUE unless ``size`` and ``offset`` are multiples of the granularity, and the bytes
        are in the object. Raises :class:`NotModelled` for another offset than 0.
        """
        check((size | offset) % self._machine.profile.team_page == 0 and offset + size <= self.size)
        not_modelled(offset, "mapping a multicast object from another offset than 0")

    # -- waiting for the team --------------------------------------------------------------------------------

    def wait_for_team(self, call: str) -> None:
        """Block until all devices are added, as the real driver does.

        Raises :class:`DeadlockError` once nobody can add the missing devices, or after the machine's ``patience`` in
        seconds. Gives CUDA_ERROR_OUT_OF_MEMORY if the switch has no slot for the team. ``call``: the driver call that
        waits.
        """
        # The wait counts as a mapping, so that the object is kept if other threads release its handles during the wait.
        self.mappings += 1
        try:
            if self.table.state == WAITING:
                self._wait(call)
            # Without a free slot in the switch this call fails, although the addition of the last device succeeded
            # (NVIDIA/nccl#2077).
            check(self.table.state != NO_SLOT, Result.CUDA_ERROR_OUT_OF_MEMORY)
        finally:
            self.mappings -= 1
            self.leave()

    def _wait(self, call: str) -> None:
        scheduler, table, patience = self._machine.scheduler, self.table, self._machine.spec.patience
        end = time.monotonic() + patience

        def over() -> bool:
            return table.state != WAITING or not self._may_come() or time.monotonic() > end

        scheduler.wait(over, polled=True)
        check(not scheduler.closed, Result.CUDA_ERROR_DEINITIALIZED)
        if table.state != WAITING:
            return
        added = table.devices
        ordinals = ", ".join(str(number % (1 << 32)) for number in added)
        names = f"{len(added)} of {table.device_count} devices were added ({ordinals or 'none'})"
        if self._may_come():
            why = f"nobody has added the others within {patience:g} s"
        else:
            why = "nobody else is there to add the others"
        raise DeadlockError(f"{call} blocks until all devices of the team were added: {names}, and {why}")

    def _may_come(self) -> bool:
        """Whether another process, or another thread of this process, may still add devices."""
        if self.table.is_elsewhere or self.table.has_fabric_handle:
            return True
        here = self._machine.scheduler.caller.ident
        return any(one.ident != here and not one.name.startswith("streamalloc ") for one in threading.enumerate())

    # -- bindings --------------------------------------------------------------------------------------------

    def bind(self, offset: int, size: int, backing: Backing) -> None:
        physical = backing.physical
        device = -1 if backing.device is None else self._machine.labels.number(backing.device)
        check(device in self.table.devices, Result.CUDA_ERROR_INVALID_DEVICE)
        label = Label.of(f"/proc/self/fd/{physical.fd}")
        if label is not None:
            physical.seal()
        serial = 0 if label is None else int(label.serial, 16)
        with self.table.locked():
            there = (one for one in self.table.bindings() if one.device == device)
            check(not any(one.offset < offset + size and offset < one.end for one in there))
            found = self.table.bind(device, offset, physical.fd, serial, backing.start, size)
        binding = need(found, Result.CUDA_ERROR_OUT_OF_MEMORY)
        self._bound[binding.number] = backing
        if backing.memory is not None:
            backing.memory.bindings += 1

    def unbind(self, device: int, offset: int, size: int) -> None:
        """Remove the binding of a device at an offset. Gives CUDA_ERROR_INVALID_VALUE if there is none.

        NVIDIA's documentation leaves the behaviour for a size other than the binding's undefined, and the kernel module
        ignores the size. Here another size raises :class:`NotModelled`, and so does a binding that another process or
        another handle has made.
        """
        there = need(next((one for one in self.table.bindings() if (one.device, one.offset) == (device, offset)), None))
        not_modelled(there.size != size, "cuMulticastUnbind of another size than was bound")
        elsewhere = there.number not in self._bound
        not_modelled(elsewhere, "cuMulticastUnbind of what was bound by another process or another handle")
        self.table.unbind(there.number)
        self._release(there.number)

    def _release(self, number: int) -> None:
        memory = self._bound.pop(number).memory
        there = self._windows.pop(number, None)
        if there is not None:
            there.close()
        if memory is not None:
            memory.bindings -= 1
            memory.leave()

    # -- what work is done on --------------------------------------------------------------------------------

    def replicas(self, offset: int, size: int) -> dict[int, list[Segment]]:
        """Return the memory bound to a range of the object: a list of segments for each device of the team, by the
        number of the device (:meth:`.Labels.number`). Bytes without memory are in no segment.
        """
        found: dict[int, list[Segment]] = {device: [] for device in self.table.devices}
        bindings = self.table.bindings()
        live = {binding.number for binding in bindings}
        for number in [number for number in self._windows if number not in live]:
            self._windows.pop(number).close()
        for binding in bindings:
            first, stop = max(offset, binding.offset), min(offset + size, binding.end)
            there = self._window(binding) if first < stop else None
            if there is not None:
                found[binding.device].append(Segment(there.base + first - binding.offset, first - offset, stop - first))
        return found

    def check_bound(self, offset: int, size: int) -> None:
        """Check, when work is submitted, that every device of the team has memory under a range of the object.

        Raises :class:`NotModelled` if a device has no memory under a part of the range: users report memory errors, but
        not which errors (NVIDIA developer forum, 356726).
        """
        without = incomplete(self.replicas(offset, size), size)
        not_modelled(without, f"work on a multicast object where devices {without} have bound nothing, or freed it")

    def _window(self, binding: TeamBinding) -> ReservedExtent | None:
        """Return a mapping of the memory of a binding; None if that memory was released."""
        backing, found = self._bound.get(binding.number), self._windows.get(binding.number)
        allocation = None if backing is None else backing.allocation
        if allocation is not None and not self._machine.allocations.is_live(allocation):
            return None  # The bytes may belong to other memory of the pool now, so they must not be mapped.
        if found is None:
            if backing is not None:
                fd: int | None = os.dup(backing.physical.fd)
            else:  # Another holder has bound the memory, and its process may have released the memory.
                fd = reach(binding.process, binding.fd, lambda label: int(label.serial, 16) == binding.serial)
            if fd is None:
                return None
            try:
                found = self._windows[binding.number] = window(fd, binding.start, binding.size)
            finally:
                os.close(fd)
        return found


def incomplete(replicas: dict[int, list[Segment]], size: int) -> list[int]:
    """Return the numbers of the devices that have no memory under a part of a range of ``size`` bytes."""
    return [device for device, segments in replicas.items() if sum(segment.size for segment in segments) < size]
