"""The memory of a machine: how much each place has, where it has addresses, and who may give some up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .allocator import Line
from .blocks import round_up
from .constants import CHUNK
from .memory import AddressMap, Arena, Bank, Physical, Reservation


@dataclass(eq=False)
class Supply:
    """All memory of a machine."""

    host: Bank
    devices: list[Bank]
    arenas: AddressMap[Reservation] = field(default_factory=AddressMap)
    pools: dict[int, Space] = field(default_factory=dict)
    """What holds memory in reserve, by the handle of the pool."""

    def bank(self, device: int | None) -> Bank:
        """Of a device, or of the host."""
        return self.host if device is None else self.devices[device]

    def make_room(self, bank: Bank, needed: int, asking: Space | None = None) -> None:
        """Take from pools what they hold in reserve, until ``needed`` bytes are free (observed on
        H200: test_pressure).
        """
        for space in self.pools.values():
            if bank.free >= needed:
                return
            if space is not asking and space.bank is bank:
                space.trim(0)

    def is_mapped(self, address: int, size: int) -> bool:
        """False for simulated memory that is gone by now; true for memory that is not simulated."""
        return self.arenas.find(address) is None or self.is_backed(address, size)

    def is_backed(self, address: int, size: int) -> bool:
        """Whether all of a range is simulated memory that is there now. It may reach over reservations that touch."""
        end = address + size
        while address < end:
            reservation = self.arenas.find(address)
            if reservation is None or not reservation.mapped.covers(address, min(end, reservation.end)):
                return False
            address = reservation.end
        return True

    def close(self) -> None:
        for bank in (self.host, *self.devices):
            bank.close()


class Space:
    """A line of addresses, the memory under it, and the bank that memory is taken from."""

    def __init__(self, name: str, supply: Supply, bank: Bank, chunk: int = CHUNK, limit: int = 1 << 47) -> None:
        # room for what the bank has, and for holes; at most ``limit``
        capacity = min(round_up(bank.total + bank.total // 4 + chunk, chunk), limit)
        self.line: Line = Line(capacity, chunk)
        self.bank = bank
        self._name = name
        self._arenas = supply.arenas
        self._on_host = chunk == CHUNK and bank is supply.host  # for arrays that look at a host pool
        self._arena: Arena | None = None

    @property
    def base(self) -> int:
        return self._open().base

    @property
    def physical(self) -> Physical:
        return self._open().physical

    def holds(self, address: int) -> bool:
        return self._arena is not None and 0 <= address - self._arena.base < self.line.capacity

    def _open(self) -> Arena:
        if self._arena is None:
            self._arena = Arena(self._name, self.line.capacity, self.line.chunk, self._on_host)
            self._arenas.add(self._arena.reservation)
        return self._arena

    def back(self, start: int, size: int) -> None:
        """Put physical memory under a void of the line."""
        self._open().back(start, size)
        self.line.back(start, size)
        self.bank.used += size

    def release(self, may: Callable[[int], bool]) -> None:
        """Give physical memory back while ``may(reserved)``."""
        for start, size in self.line.release(may):
            self._open().release(start, size)
            self.bank.used -= size

    def trim(self, keep: int) -> None:
        """Give up what is free, but keep at least ``keep`` bytes."""
        self.release(lambda reserved: reserved - self.line.chunk >= keep)

    def close(self) -> None:
        self.bank.used -= self.line.reserved
        self.line.reserved = 0
        if self._arena is not None:
            self._arenas.remove(self._arena.reservation)
            self._arena.close()
            self._arena = None
