"""Memory that is allocated and freed at once, out of stream order: cuMemAlloc and pinned host memory."""

from __future__ import annotations

import errno
from collections.abc import Callable

from .allocator import ALIGNMENT, Line
from .blocks import Block, round_up
from .memory import AddressMap, Arena, Bank, Physical, Reservation

BLOCK = 2 << 20
"""Physical memory comes in blocks of this size; smaller allocations share one (observed on H200: test_plain_memory)."""

_SMALL_SPACE = 16 << 30


class Space:
    """A line of addresses, the memory under it, and the bank that memory is taken from."""

    def __init__(
        self,
        name: str,
        bank: Bank,
        arenas: AddressMap[Reservation],
        chunk: int,
        limit: int = 1 << 47,
        on_host: bool = False,
    ) -> None:
        # room for what the bank has, and for holes; at most ``limit``
        capacity = min(round_up(bank.total + bank.total // 4 + chunk, chunk), limit)
        self.line: Line = Line(capacity, chunk)
        self.bank = bank
        self._name = name
        self._on_host = on_host
        self._arenas = arenas
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

    def close(self) -> None:
        self.bank.used -= self.line.reserved
        self.line.reserved = 0
        if self._arena is not None:
            self._arenas.remove(self._arena.reservation)
            self._arena.close()
            self._arena = None


def _nothing(_stream: int) -> int:
    return 0


class Heap:
    """The plain memory of one place: small allocations share blocks, large ones have their own."""

    def __init__(
        self, name: str, bank: Bank, arenas: AddressMap[Reservation], make_room: Callable[[Bank, int], None]
    ) -> None:
        self._small = Space(name, bank, arenas, BLOCK, _SMALL_SPACE)
        self._large = Space(name, bank, arenas, BLOCK)
        self._make_room = make_room

    def allocate(self, size: int) -> tuple[int, Block] | None:
        """An address and the block to free it with, or None when there is not enough memory."""
        got = self._allocate_in(self._small, round_up(size, ALIGNMENT)) if size < BLOCK else None
        return got or self._allocate_in(self._large, round_up(size, BLOCK))

    def _allocate_in(self, space: Space, size: int) -> tuple[int, Block] | None:
        block = space.line.take(size, 0, _nothing)
        if block is None:
            ranges = space.line.plan(size, 0, _nothing)
            needed = sum(length for _, length in ranges)
            if needed > space.bank.free:
                self._make_room(space.bank, needed)
            if not ranges or needed > space.bank.free:
                return None
            try:
                for start, length in ranges:
                    space.back(start, length)
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
                return None
            block = space.line.take(size, 0, _nothing)
            assert block is not None
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
        space.release(lambda reserved: True)

    def close(self) -> None:
        self._small.close()
        self._large.close()
