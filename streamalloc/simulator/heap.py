"""Memory that is allocated and freed outside of stream order: cuMemAlloc and pinned host memory.

The rules for addresses were found from recordings of random programs on an H200 (test_plain_memory). They are the same
on two levels. *Regions* of 32 MiB, or a multiple for a larger allocation, contain large allocations and *blocks* of 2
MiB. Small allocations share blocks. Device and host memory lie side by side in regions. The newest region with room is
used. Within a region, and within all blocks of one kind, the smallest sufficient piece is taken; of equal ones, the one
that has been free longest. Unused blocks and regions are released.
"""

from __future__ import annotations

import functools

from streamalloc.simulator.allocator import HEAP, USED, Block, Shelf
from streamalloc.simulator.banks import Bank, Banks
from streamalloc.simulator.constants import ALIGNMENT, BLOCK, round_up
from streamalloc.simulator.errors import undo_by
from streamalloc.simulator.memory import Physical, ReservedExtent

_REGION = 32 << 20


class Pieces:
    """Ranges of addresses, divided into used and free pieces. Free pieces are found by size."""

    def __init__(self) -> None:
        self._free = Shelf()
        self._clock = 0

    def add(self, start: int, size: int) -> None:
        """Another range, all of it free."""
        self._put(Block(start, size))

    def take(self, size: int) -> Block | None:
        """The first ``size`` bytes of a free piece."""
        block = self._free.best(size)
        if block is None:
            return None
        self._free.remove(block)
        if block.size > size:
            self._put(block.split(size))
        block.owner = USED
        return block

    def free(self, block: Block) -> int | None:
        """Free a used piece. Returns the start of its range if the whole range is then free."""
        before, after = block.prev, block.next
        if after is not None and after.owner == HEAP:
            self._free.remove(after)
            block.absorb(after)
        if before is not None and before.owner == HEAP:
            self._free.remove(before)
            before.absorb(block)
            block = before
        if block.prev is None and block.next is None:
            return block.start
        self._put(block)
        return None

    def _put(self, block: Block) -> None:
        block.owner = HEAP
        self._clock += 1
        self._free.put(block, self._clock)


class Regions:
    """Addresses for cuMemAlloc on a device, and for the pinned memory of its contexts."""

    def __init__(self, banks: Banks, size: int, left_by_context: tuple[int, ...]) -> None:
        self._banks = banks
        self.size: int = round_up(2 * size, _REGION) + 8 * _REGION  # with room for holes
        self._addresses = Pieces()
        """As offsets: from here regions are taken."""
        self._addresses.add(0, self.size)
        self._regions: list[tuple[Block, Pieces]] = []
        """The newest last."""
        for left in left_by_context:
            self._new_region(_REGION).take(_REGION - left)

    @functools.cached_property
    def reservation(self) -> ReservedExtent:
        made = ReservedExtent(self.size, BLOCK)
        self._banks.arenas.add(made)
        return made

    def take(self, size: int) -> Block:
        found = (block for _, pieces in reversed(self._regions) if (block := pieces.take(size)) is not None)
        block = next(found, None) or self._new_region(round_up(size, _REGION)).take(size)
        assert block is not None
        return block

    def free(self, block: Block) -> None:
        """Free a block of :meth:`take`, and its region if it is then empty."""
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

    def close(self) -> None:
        if "reservation" in vars(self):
            self._banks.arenas.remove(self.reservation)
            self.reservation.close()
            del self.reservation


class Heap:
    """Memory of cuMemAlloc, or pinned memory. File offsets equal offsets in the regions' reservation."""

    def __init__(self, name: str, banks: Banks, bank: Bank, regions: Regions) -> None:
        self._name = name
        self._banks = banks
        self._bank = bank
        self._regions = regions
        self._used = 0
        self._small: dict[int, Pieces] = {}
        """Allocations that share blocks, by kind."""
        self._blocks: dict[int, tuple[Block, int, int]] = {}
        """Shared blocks by start: block, kind, flags of its first allocation."""

    @functools.cached_property
    def _physical(self) -> Physical:
        return Physical(self._name, self._regions.size)

    def allocate(self, size: int, kind: int = 0, flags: int = 0) -> tuple[int, Block, int] | None:
        """Allocate. Returns the address, the piece to free and the flags; None if there is not enough memory.

        Only allocations of one kind share a block. All allocations in a block have the flags of its first one.
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
        """Free a piece of :meth:`allocate`."""
        shared = self._blocks.get(piece.start // BLOCK * BLOCK)
        if shared is None:
            self._free_block(piece)
            return
        block, kind, _ = shared
        if self._small[kind].free(piece) is not None:
            del self._blocks[block.start]
            self._free_block(block)

    def locate(self, address: int) -> tuple[Physical, int]:
        """File and file offset of the memory at an address."""
        return self._physical, address - self._regions.reservation.base

    def close(self) -> None:
        self._bank.used -= self._used
        if "_physical" in vars(self):
            self._physical.close()
            del self._physical

    # -- large pieces ----------------------------------------------------------------------------------------

    def take(self, size: int) -> Block | None:
        """A large piece, with memory under it; None if there is not enough memory."""
        if not self._banks.make_room(self._bank, size):
            return None
        reservation = self._regions.reservation
        block = self._regions.take(size)
        with undo_by(self._regions.free, block):
            reservation.map(reservation.base + block.start, size, self._physical.fd, block.start)
        self._used += size
        self._bank.used += size
        return block

    def _free_block(self, block: Block) -> None:
        reservation = self._regions.reservation
        reservation.unmap(reservation.base + block.start, block.size)
        self._physical.discard(block.start, block.size)
        self._used -= block.size
        self._bank.used -= block.size
        self._regions.free(block)
