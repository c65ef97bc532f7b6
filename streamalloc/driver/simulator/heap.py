"""Memory that is allocated and freed at once, out of stream order: cuMemAlloc and pinned host memory."""

from __future__ import annotations

from .blocks import Block, round_up
from .constants import ALIGNMENT, BLOCK
from .errors import operating_system
from .memory import Bank, Physical
from .supply import Space, Supply

_SMALL_SPACE = 16 << 30
_NOBODY = -2
"""In place of a stream."""


def _nothing(_stream: int) -> int:
    return 0


class Heap:
    """The plain memory of one place: small allocations share blocks, large ones have their own."""

    def __init__(self, name: str, supply: Supply, bank: Bank) -> None:
        self._small = Space(name, supply, bank, _SMALL_SPACE, BLOCK)
        self._large = Space(name, supply, bank, bank.total + bank.total // 4 + BLOCK, BLOCK)  # with room for holes
        self._supply = supply

    def allocate(self, size: int) -> tuple[int, Block] | None:
        """An address and the block to free it with, or None when there is not enough memory."""
        got = self._allocate_in(self._small, round_up(size, ALIGNMENT)) if size < BLOCK else None
        return got or self._allocate_in(self._large, round_up(size, BLOCK))

    def _allocate_in(self, space: Space, size: int) -> tuple[int, Block] | None:
        line = space.line
        block = line.find(size, _NOBODY, None, _nothing)
        if block is None:
            return None
        missing = line.missing(block, size)
        if missing:
            needed = len(missing) * line.chunk
            if needed > space.bank.free:
                self._supply.make_room(space.bank, needed)
            if needed > space.bank.free:
                return None
            with operating_system(only_memory=True):
                space.back(missing)
        block = line.carve(block, size)
        return space.base + block.start, block

    def locate(self, address: int) -> tuple[Physical, int]:
        """Where the memory at an address is: the file and the place in it."""
        space = self._space(address)
        return space.physical, address - space.base

    def _space(self, address: int) -> Space:
        return self._small if self._small.holds(address) else self._large

    def free(self, address: int, block: Block) -> None:
        space = self._space(address)
        space.line.free_ready(block)
        space.release(0)

    def close(self) -> None:
        self._small.close()
        self._large.close()
