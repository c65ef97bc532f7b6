"""Memory of all devices and of the host: sizes, reserved addresses, and the memory of ``cuMemAlloc`` and of pinned host
allocations.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from streamalloc.formats.ranges import RangeMap
from streamalloc.simulator.allocator import FREE_FOR_ALL, USED, Block, Shelf
from streamalloc.simulator.constants import ALIGNMENT, BLOCK, round_up
from streamalloc.simulator.errors import undo_by
from streamalloc.simulator.files import Usage
from streamalloc.simulator.memory import Physical, ReservedExtent, is_accessible


class Bank:
    """Physical memory of one device or of the host: its size and the number of used bytes. ``overhead``: bytes that
    count as used from the start.
    """

    def __init__(self, total: int, overhead: int = 0, addresses: int | None = None) -> None:
        self.total = total
        self.addresses: int = 2 * total if addresses is None else addresses
        """Number of bytes of addresses that a pool in this memory reserves if the pool has no maximum size."""
        self._used = overhead
        self._released: list[Physical] = []
        self._shared: tuple[Usage, int] | None = None

    def share(self, usage: Usage, number: int) -> None:
        """Record the bytes that this process uses in ``usage``, a file that all processes of the machine read.

        From then on, :attr:`free` subtracts the bytes of the other processes. ``number``: the bank's index in
        ``usage``.
        """
        self._shared = (usage, number)
        self.used = self._used

    @property
    def used(self) -> int:
        """Number of bytes that this process uses. Assigning a value also records it in the shared file."""
        return self._used

    @used.setter
    def used(self, used: int) -> None:
        self._used = used
        if self._shared is not None:
            usage, number = self._shared
            usage.put(number, used)

    @property
    def free(self) -> int:
        """Number of unused bytes. If the bank is shared (:meth:`share`), bytes that other processes of the machine use
        are not among them.
        """
        if self._released:
            self._collect()
        if self._shared is None:
            return self.total - self._used
        usage, number = self._shared
        return max(self.total - self._used - usage.others(number), 0)

    def release(self, physical: Physical) -> None:
        """Close the file of released memory, and count its bytes as free, once no other process has the file open. This
        is tested now, at the next release, and whenever :attr:`free` is read.
        """
        self._released.append(physical)
        self._collect()

    def _collect(self) -> None:
        over = [physical for physical in self._released if not physical.is_elsewhere]
        self._released = [physical for physical in self._released if physical not in over]
        for physical in over:
            self.used -= physical.size
            physical.close()


T = TypeVar("T")


class Arenas(RangeMap[ReservedExtent]):
    """Reservations of a machine by address. The table also records the files and mappings of the machine, but does not
    keep them alive.

    At the end of the machine, :meth:`close` closes those that still exist.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_add: Callable[[int, int], None] = lambda start, end: None
        """Function that is called with the start and the end of each new reservation."""
        self._owned: weakref.WeakSet[Any] = weakref.WeakSet()

    def own(self, made: T) -> T:
        """Record an object that has a method ``close``, and return the object.

        :meth:`close` closes the object, unless it was garbage-collected before.
        """
        self._owned.add(made)
        return made

    def add(self, extent: ReservedExtent) -> ReservedExtent:
        self.on_add(extent.base, extent.end)
        return super().add(self.own(extent))

    def remove(self, extent: ReservedExtent) -> None:
        """Remove a reservation, and close it."""
        super().remove(extent)
        extent.close()

    def close(self) -> None:
        owned = list(self._owned)
        # The look-ups are emptied first: otherwise a kernel that still runs would find an unmapped address and crash
        # the process.
        self.at, self._bases = {}, []
        for one in owned:
            one.close()


class Reserve(Protocol):
    """A pool, which may have memory that is free for all streams."""

    bank: Bank

    def trim(self, keep: int) -> None:
        """Release memory that is free for all streams, but keep at least ``keep`` bytes."""


@dataclass(eq=False)
class Banks:
    """Banks of all devices and of the host, with the reservations of the machine and the memory of its pools."""

    host: Bank
    devices: list[Bank]
    alone: bool = False
    """Whether the machine has only one device, counting devices that this process does not see."""
    arenas: Arenas = field(default_factory=Arenas)
    pools: dict[int, Reserve] = field(default_factory=dict)
    """Pools by handle."""
    reserves: list[tuple[Bank, Callable[[], None]]] = field(default_factory=list)
    """Tuples of a bank and a function that releases the bank's unused graph memory."""

    def bank(self, device: int | None) -> Bank:
        """Return the bank of the device with this ordinal; None: the bank of the host."""
        return self.host if device is None else self.devices[device]

    def make_room(self, bank: Bank, needed: int, asking: Reserve | None = None) -> bool:
        """Release unused memory of the pools in ``bank`` until the bank has ``needed`` free bytes (observed on H200:
        test_placements).

        The pool ``asking`` keeps its memory. Returns whether ``needed`` bytes are free.
        """
        for pool in self.pools.values():
            if bank.free >= needed:
                return True
            if pool is not asking and pool.bank is bank:
                pool.trim(0)
        return bank.free >= needed

    def trim(self, asking: Reserve, of_node: bool) -> None:
        """Release unused memory of graphs, and of pools other than ``asking``, the pool that needs memory. ``of_node``:
        whether that pool is for one NUMA node.

        For a pool of a device, memory of that device is released. For a pool of a NUMA node, memory of the host is
        released. For any other host pool, memory of all devices is released. Observed on H200 (test_placements); the
        last case on a machine of one device.
        """
        of_host = asking.bank is self.host and not of_node
        banks = self.devices if of_host else [asking.bank]
        for pool in self.pools.values():
            if pool is not asking and pool.bank in banks:
                pool.trim(0)
        for bank, release in self.reserves:
            if bank in banks:
                release()

    def is_mapped(self, address: int, size: int, write: bool = False) -> bool:
        """Whether a range of simulated or other memory is mapped and readable. ``write``: whether it is also
        writable.
        """
        return self.is_there(address, size, self.arenas.find(address) is not None, write)

    def is_there(self, address: int, size: int, simulated: bool, write: bool = False) -> bool:
        """Return what :meth:`is_mapped` returns. ``simulated``: whether a reservation of this machine has ``address``,
        which the caller has looked up already.
        """
        return self.is_backed(address, size) if simulated else is_accessible(address, size, write)

    def is_backed(self, address: int, size: int) -> bool:
        """Whether all of a range is simulated memory with mapped chunks. The range may span adjacent reservations."""
        end = address + size
        while address < end:
            reservation = self.arenas.find(address)
            if reservation is None or not reservation.mapped.covers(address, min(end, reservation.end)):
                return False
            address = reservation.end
        return True


# -- cuMemAlloc and pinned host memory, outside of stream order ------------------------------------------------

# Rules for addresses, from recordings of random programs on an H200 (test_plain_memory). *Regions* of 32 MiB, or a
# multiple for a larger allocation, contain large allocations and *blocks* of 2 MiB, which small allocations share.
# Regions have device and host memory. The newest region with enough free space is used. A large allocation takes the
# smallest sufficient piece of the region, a small one that of all blocks of its kind; of equal pieces, the one that has
# been free longest. Unused blocks and regions are released.
_REGION = 32 << 20


class Pieces:
    """Ranges of addresses, divided into used and free pieces. A request takes the smallest free piece that fits."""

    def __init__(self) -> None:
        self._free = Shelf()
        self._clock = 0

    def add(self, start: int, size: int) -> None:
        """Add a range of addresses as one free piece."""
        self._put(Block(start, size))

    def take(self, size: int) -> Block | None:
        """Take the first ``size`` bytes of the smallest free piece that fits; None if no piece is large enough."""
        block = self._free.best(size)
        if block is None:
            return None
        self._free.remove(block)
        if block.size > size:
            self._put(block.split(size))
        block.owner = USED
        return block

    def free(self, block: Block) -> int | None:
        """Free a used piece. If no piece of its range is in use any more, the range is removed, and its start is
        returned; otherwise None.
        """
        block.owner = FREE_FOR_ALL
        block = block.merge(self._free.remove)
        if block.prev is None and block.next is None:
            return block.start
        self._put(block)
        return None

    def _put(self, block: Block) -> None:
        block.owner = FREE_FOR_ALL
        self._clock += 1
        self._free.put(block, self._clock)


class Regions:
    """Addresses for the ``cuMemAlloc`` memory of a device, and for the pinned memory of the device's contexts.

    ``size``: bytes of memory for which the addresses must suffice. ``left_by_context``: number of free bytes in each of
    the first regions. The other bytes of these regions belong to the context itself.
    """

    def __init__(self, banks: Banks, size: int, left_by_context: tuple[int, ...]) -> None:
        self._banks = banks
        # There are more addresses than memory, because freed pieces leave holes between the addresses in use.
        self.size: int = round_up(2 * size, _REGION) + 8 * _REGION
        self._addresses = Pieces()
        """The addresses that are divided into regions, as offsets in bytes in the reservation."""
        self._addresses.add(0, self.size)
        self._regions: list[tuple[Block, Pieces]] = []
        """For each region a tuple of its addresses and the pieces in it; the newest region is last."""
        for left in left_by_context:
            self._new_region(_REGION).take(_REGION - left)

    @functools.cached_property
    def reservation(self) -> ReservedExtent:
        return self._banks.arenas.add(ReservedExtent(self.size, BLOCK))

    def take(self, size: int) -> Block:
        found = (block for _, pieces in reversed(self._regions) if (block := pieces.take(size)) is not None)
        block = next(found, None) or self._new_region(round_up(size, _REGION)).take(size)
        assert block is not None
        return block

    def free(self, block: Block) -> None:
        """Free a block that :meth:`take` returned, and its region if nothing else in the region is in use."""
        at = next(at for at, (whole, _) in enumerate(self._regions) if whole.start <= block.start < whole.end)
        whole, pieces = self._regions[at]
        if pieces.free(block) is not None:
            del self._regions[at]
            self._addresses.free(whole)

    def _new_region(self, size: int) -> Pieces:
        whole, pieces = self._addresses.take(size), Pieces()
        assert whole is not None
        pieces.add(whole.start, size)
        self._regions.append((whole, pieces))
        return pieces


class Heap:
    """Memory of ``cuMemAlloc``, or pinned memory, of one bank, stored in a file.

    File offsets equal offsets in the regions' reservation.
    """

    def __init__(self, name: str, banks: Banks, bank: Bank, regions: Regions) -> None:
        self._name = name
        self._banks = banks
        self._bank = bank
        self._regions = regions
        self._small: dict[int, Pieces] = {}
        """Pieces of the blocks that small allocations share, by kind of the allocations."""
        self._blocks: dict[int, tuple[Block, int, int]] = {}
        """Shared blocks by start address: the block, the kind of its allocations, and the flags of its first
        allocation.
        """

    @functools.cached_property
    def _physical(self) -> Physical:
        return self._banks.arenas.own(Physical(self._name, self._regions.size))

    def allocate(self, size: int, kind: int = 0, flags: int = 0) -> tuple[int, Block, int] | None:
        """Allocate ``size`` bytes. Returns a tuple of the address, the piece for :meth:`free`, and the flags; None if
        the bank has not enough memory.

        Only allocations of one ``kind`` share a block. All allocations in a block have the flags of the first one.
        """
        rounded = round_up(size, ALIGNMENT)
        if rounded >= BLOCK:
            large = self.take(round_up(size, BLOCK))
            return None if large is None else (self._regions.reservation.base + large.start, large, flags)
        pieces = self._small.setdefault(kind, Pieces())
        piece = pieces.take(rounded)
        if piece is None:
            block = self.take(BLOCK)
            if block is None:
                return None
            self._blocks[block.start] = (block, kind, flags)
            pieces.add(block.start, BLOCK)
            piece = pieces.take(rounded)
            assert piece is not None
        return self._regions.reservation.base + piece.start, piece, self._blocks[piece.start // BLOCK * BLOCK][2]

    def free(self, piece: Block) -> None:
        """Free a piece that :meth:`allocate` returned."""
        shared = self._blocks.get(piece.start // BLOCK * BLOCK)
        if shared is None:
            self._free_block(piece)
            return
        block, kind, _ = shared
        if self._small[kind].free(piece) is not None:
            del self._blocks[block.start]
            self._free_block(block)

    def locate(self, address: int) -> tuple[Physical, int]:
        """Return the file with the memory at ``address``, and the offset in bytes in the file."""
        return self._physical, address - self._regions.reservation.base

    # -- large pieces ----------------------------------------------------------------------------------------

    def take(self, size: int) -> Block | None:
        """Take addresses of ``size`` bytes, whole blocks, and map memory under them. None if the bank has not enough
        memory. Raises ``OSError`` if the operating system refuses.
        """
        if not self._banks.make_room(self._bank, size):
            return None
        reservation = self._regions.reservation
        block = self._regions.take(size)
        with undo_by(self._regions.free, block):
            reservation.map(reservation.base + block.start, size, self._physical.fd, block.start)
        self._bank.used += size
        return block

    def _free_block(self, block: Block) -> None:
        reservation = self._regions.reservation
        reservation.unmap(reservation.base + block.start, block.size)
        self._physical.discard(block.start, block.size)
        self._bank.used -= block.size
        self._regions.free(block)
