"""Memory of all devices and the host: sizes, reserved addresses, and the pools that can release memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .allocator import Line
from .blocks import round_up
from .constants import CHUNK
from .errors import operating_system
from .memory import AddressMap, Arena, Bank, Reservation, is_accessible


class Arenas(AddressMap[Reservation]):
    """The reservations of a machine. ``on_add`` is called with the start and end of a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.on_add: Callable[[int, int], None] = lambda start, end: None

    def add(self, extent: Reservation) -> None:
        self.on_add(extent.base, extent.end)
        super().add(extent)


@dataclass(eq=False)
class Banks:
    """The memory banks of a machine."""

    host: Bank
    devices: list[Bank]
    alone: bool = False
    """Whether the machine has only one device, visible or not."""
    arenas: Arenas = field(default_factory=Arenas)
    pools: dict[int, Space] = field(default_factory=dict)
    """Memory of each pool, by pool handle."""
    reserves: list[tuple[Bank, Callable[[], None]]] = field(default_factory=list)
    """A bank, and a function that releases its unused graph memory."""

    def bank(self, device: int | None) -> Bank:
        """The bank of a device; None: the host."""
        return self.host if device is None else self.devices[device]

    def make_room(self, bank: Bank, needed: int, asking: Space | None = None) -> bool:
        """Release unused memory of other pools until ``needed`` bytes are free (observed on H200: test_pressure).
        Returns whether they are.
        """
        for space in self.pools.values():
            if bank.free >= needed:
                return True
            if space is not asking and space.bank is bank:
                space.trim(0)
        return bank.free >= needed

    def trim(self, asking: Space) -> None:
        """Release unused memory of other pools and of graphs. Which: for a device's pool that device's; for a pool of a
        NUMA node the host's; for another host pool that of all devices.

        Observed on H200 (test_placements); the last case on a machine of one device.
        """
        of_host = asking.bank is self.host and not asking.of_node
        banks = self.devices if of_host else [asking.bank]
        for space in self.pools.values():
            if space is not asking and space.bank in banks:
                space.trim(0)
        for bank, release in self.reserves:
            if bank in banks:
                release()

    def is_mapped(self, address: int, size: int, write: bool = False) -> bool:
        """Whether a range is mapped and readable, or with ``write`` writable. It may be simulated or other memory of
        the process.
        """
        return self.is_there(address, size, self.arenas.find(address) is not None, write)

    def is_there(self, address: int, size: int, simulated: bool, write: bool = False) -> bool:
        """As :meth:`is_mapped`, if the caller has checked whether the memory is simulated."""
        return self.is_backed(address, size) if simulated else is_accessible(address, size, write)

    def is_backed(self, address: int, size: int) -> bool:
        """Whether a whole range is simulated memory with mapped chunks. It may span adjacent reservations."""
        end = address + size
        while address < end:
            reservation = self.arenas.find(address)
            if reservation is None or not reservation.mapped.covers(address, min(end, reservation.end)):
                return False
            address = reservation.end
        return True


class Space(Arena):
    """An arena with an address line, the chunks under it, and the bank that provides the memory."""

    def __init__(
        self,
        name: str,
        banks: Banks,
        bank: Bank,
        capacity: int,
        ranks: dict[int, int] | None = None,
        of_node: bool = False,
        on_host: bool = False,
    ) -> None:
        self.line: Line = Line(round_up(capacity, CHUNK), CHUNK, ranks)
        self.bank = bank
        self.of_node = of_node
        self._arenas = banks.arenas
        # reserved with the pool, so that no other range gets these addresses (observed on H200: test_pool_creation)
        with operating_system(only_memory=True):
            super().__init__(name, self.line.capacity, CHUNK, on_host=on_host, low=True)
        self._arenas.add(self.reservation)

    def back(self, chunks: list[int]) -> None:
        """Map memory at chunks of the line."""
        for first, count in _runs(chunks):
            self.map_part(first * self.line.chunk, count * self.line.chunk)
            self.line.back(range(first, first + count))
            self.bank.used += count * self.line.chunk

    def unback(self, chunks: list[int]) -> None:
        """Unmap and release the memory of chunks of the line."""
        for first, count in _runs(chunks):
            self.unmap_part(first * self.line.chunk, count * self.line.chunk)
            self.line.unback(range(first, first + count))
            self.bank.used -= count * self.line.chunk

    def release(self, keep: int) -> None:
        """Release memory that is free for all streams until at most ``keep`` bytes are left."""
        excess = -(-(self.line.reserved - keep) // self.line.chunk)
        if excess > 0:
            self.unback(sorted(self.line.spare()[:excess]))

    def trim(self, keep: int) -> None:
        """Release memory that is free for all streams, but keep at least ``keep`` bytes."""
        self.release(keep + self.line.chunk - 1)

    def close(self) -> None:
        self.bank.used -= self.line.reserved
        self.line.unback_all()
        self._arenas.remove(self.reservation)
        super().close()


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first number and the length of each run of consecutive numbers."""
    start = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield numbers[start], at - start
            start = at
