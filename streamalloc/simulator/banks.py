"""Memory of all devices and the host: sizes, reserved addresses, and the pools that can release memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from streamalloc.simulator.allocator import PoolAddresses
from streamalloc.simulator.constants import CHUNK, round_up
from streamalloc.simulator.files import Usage
from streamalloc.simulator.memory import Physical, RangeMap, ReservedExtent, is_accessible, keep_readable


class Bank:
    """The physical memory of one device or the host: its size and the bytes taken."""

    def __init__(self, total: int, overhead: int = 0, addresses: int | None = None) -> None:
        self.total = total
        self.addresses: int = 2 * total if addresses is None else addresses
        """Bytes of addresses of a pool without a limit."""
        self._used = overhead
        self._released: list[Physical] = []
        self._shared: tuple[Usage, int] | None = None

    def share(self, usage: Usage, number: int) -> None:
        """Count the memory that other processes use, and publish the memory used here."""
        self._shared = (usage, number)
        self.used = self._used

    @property
    def used(self) -> int:
        """Bytes that this machine object has taken."""
        return self._used

    @used.setter
    def used(self, used: int) -> None:
        self._used = used
        if self._shared is not None:
            usage, number = self._shared
            usage.put(number, used)

    @property
    def free(self) -> int:
        """Bytes not taken. May be negative if processes take memory concurrently."""
        if self._released:
            self._collect()
        if self._shared is None:
            return self.total - self._used
        usage, number = self._shared
        return max(self.total - self._used - usage.others(number), 0)

    def release(self, physical: Physical) -> None:
        """Close a file whose memory came from this bank. Its bytes count until no process has it."""
        self._released.append(physical)
        self._collect()

    def _collect(self) -> None:
        over = [physical for physical in self._released if not physical.is_elsewhere]
        self._released = [physical for physical in self._released if physical not in over]
        for physical in over:
            self.used -= physical.size
            physical.close()

    def close(self) -> None:
        for physical in self._released:
            physical.close()
        self._released.clear()
        self._shared = None


class Arenas(RangeMap[ReservedExtent]):
    """The reservations of a machine. ``on_add`` is called with the start and end of a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.on_add: Callable[[int, int], None] = lambda start, end: None

    def add(self, extent: ReservedExtent) -> None:
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


class Space:
    """Memory of a pool: an address line, the chunks under it in a file at equal offsets, and the bank that provides
    them. ``on_host``: host arrays can refer to it, even after the free. See :data:`.memory.FREED`.
    """

    def __init__(
        self, name: str, banks: Banks, bank: Bank, capacity: int, ranks: dict[int, int], of_node: bool, on_host: bool
    ) -> None:
        self.line: PoolAddresses = PoolAddresses(round_up(capacity, CHUNK), CHUNK, ranks)
        self.bank = bank
        self.of_node = of_node
        self._name = name
        self._on_host = on_host
        self._used = 0
        """All that was ever backed is below."""
        self._arenas = banks.arenas
        # reserved with the pool, so that no other range gets these addresses (observed on H200: test_pool_creation)
        self._reservation = ReservedExtent(self.line.capacity, CHUNK, low=True)
        self.base: int = self._reservation.base
        self._arenas.add(self._reservation)

    @functools.cached_property
    def physical(self) -> Physical:
        return Physical(self._name, self.line.capacity)

    def back(self, chunks: list[int]) -> None:
        """Map memory at chunks of the line."""
        for first, count in _runs(chunks):
            offset, size = first * CHUNK, count * CHUNK
            self._reservation.map(self.base + offset, size, self.physical.fd, offset)
            self._used = max(self._used, offset + size)
            self.line.back(range(first, first + count))
            self.bank.used += size

    def unback(self, chunks: list[int]) -> None:
        """Unmap and release the memory of chunks of the line."""
        for first, count in _runs(chunks):
            offset, size = first * CHUNK, count * CHUNK
            self._reservation.unmap(self.base + offset, size)
            if self._on_host:
                keep_readable(self.base + offset, self.base + offset + size)
            self.physical.discard(offset, size)
            self.line.unback(range(first, first + count))
            self.bank.used -= size

    def release(self, keep: int, highest: bool = False) -> None:
        """Release memory that is free for all streams until at most ``keep`` bytes are left: first what has been free
        longest, or with ``highest`` the highest addresses.
        """
        excess = -(-(self.line.reserved - keep) // CHUNK)
        if excess > 0:
            spare = self.line.spare()
            self.unback(sorted(spare)[-excess:] if highest else sorted(spare[:excess]))

    def trim(self, keep: int) -> None:
        """Release memory that is free for all streams, but keep at least ``keep`` bytes."""
        self.release(keep + CHUNK - 1, highest=True)

    def close(self) -> None:
        self.bank.used -= self.line.reserved
        self._arenas.remove(self._reservation)
        self._reservation.close(self._used if self._on_host else 0)
        if "physical" in vars(self):
            self.physical.close()


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first number and the length of each run of consecutive numbers."""
    start = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield numbers[start], at - start
            start = at
