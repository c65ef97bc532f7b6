"""Managed memory, from the driver API's documentation: no reading is from hardware.

Its bytes are at one address for the host and all devices. Which of them holds a page is not simulated: the memory is
none of any device, and ``cuMemGetInfo`` does not show it. What was advised and prefetched is kept for each page.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from .allocations import Advice, Allocation, Allocations, ManagedMemory, Pages
from .banks import Banks
from .blocks import round_up
from .constants import BLOCK, Place
from .contexts import Context
from .errors import operating_system
from .memory import FREED, Physical, Reservation
from .timeline import Operation


def pages_of(allocation: Allocation) -> Pages:
    if allocation.pages is None:
        allocation.pages = Pages(allocation.base, allocation.base + allocation.size)
    return allocation.pages


def prefetch(place: Place) -> Callable[[Advice], Advice]:
    """The change of a prefetch. It is seen at once, also while the work is queued, as documented."""
    return lambda advice: replace(advice, prefetched=place)


def common(places: Iterable[Place | None]) -> Place | None:
    """The place of all pages; None if they have several, or one has none."""
    found = set(places)
    return found.pop() if len(found) == 1 else None


class Discard(Operation):
    """Makes bytes indeterminate: they read as :data:`FREED` until they are written."""

    def __init__(self, banks: Banks, ranges: list[tuple[int, int]]) -> None:
        self._banks = banks
        self._ranges = ranges

    def step(self) -> bool:
        for address, size in self._ranges:
            if self._banks.is_backed(address, size):
                ctypes.memset(address, FREED, size)
        return True


@dataclass(eq=False)
class Managed:
    """The memory of cuMemAllocManaged of a machine."""

    banks: Banks
    allocations: Allocations
    _physical: Physical | None = field(default=None, init=False)

    def allocate(self, size: int, context: Context) -> int:
        whole = round_up(size, BLOCK)
        with operating_system(only_memory=True):
            if self._physical is None:
                self._physical = Physical("managed", 0)
            reservation = Reservation(whole, BLOCK)
            reservation.map(reservation.base, whole, self._physical, self._physical.extend(whole))
        self.banks.arenas.add(reservation)
        self.allocations.add(ManagedMemory(reservation.base, size, context.device.ordinal, context, reservation))
        return reservation.base

    def free(self, memory: ManagedMemory) -> None:
        """Release memory; arrays of the host that refer to it read :data:`FREED`."""
        self.allocations.remove(memory)
        self._close(memory)

    def _close(self, memory: ManagedMemory) -> None:
        self.banks.arenas.remove(memory.reservation)
        memory.reservation.close(memory.reservation.size)

    def close(self) -> None:
        for memory in [one for one in self.allocations.at.values() if isinstance(one, ManagedMemory)]:
            self._close(memory)
        if self._physical is not None:
            self._physical.close()
