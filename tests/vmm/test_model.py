"""Any sequence of mapping, aliasing, unmapping and resizing, compared with a model that is numpy arrays."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import vmm
from tests.support import Account, Bytes, in_a_thread
from tests.vmm.support import HOST, NONE, PAGE, READ, READWRITE

BLOCK = PAGE // 2  # what is filled and looked at
PAGES = 12


class Model:
    """A range of addresses, memories of one to three pages, and what each block of them holds."""

    def __init__(self, account: Account, seed: int) -> None:
        self.random = random.Random(seed)
        self.device = account.device
        self.range = vmm.AddressRange(PAGES * PAGE, driver=account.driver)
        self.memories = [vmm.PhysicalMemory(self.device, pages * PAGE) for pages in (1, 1, 2, 3)]
        self.blocks = [np.zeros(memory.nbytes // BLOCK, np.uint8) for memory in self.memories]
        self.access = [READWRITE] * PAGES
        # By page of the range: which memory, and its mapping's first page.
        self.table: dict[int, tuple[int, int]] = {}
        for number, memory in enumerate(self.memories):
            self.map(number, 0)
            self.range.mappings[0].fill(0)
            self.unmap(0)
            assert memory.mapping_count == 0

    @property
    def starts(self) -> list[int]:
        return sorted({start for _, start in self.table.values()})

    def map(self, number: int, page: int) -> None:
        """Map a memory, or see it refused where that does not fit."""
        pages = self.memories[number].nbytes // PAGE
        wanted = range(page, page + pages)
        if wanted.stop > PAGES or any(one in self.table for one in wanted):
            with pytest.raises(ValueError):
                self.range.map(self.memories[number], page * PAGE, access=self.device)
            return
        self.range.map(self.memories[number], page * PAGE, access=self.device)
        self.table |= {one: (number, page) for one in wanted}
        self.access[page] = READWRITE

    def unmap(self, start: int, pages: int | None = None) -> None:
        """Unmap a part of the range, or see it refused where it cuts a mapping."""
        stop = start + (pages or self.memories[self.table[start][0]].nbytes // PAGE)
        inside = {page for page in self.table if start <= page < stop}
        cut = any((page in inside) != (self.table[page][1] in inside) for page in self.table) or any(
            page in self.table and self.table[page] == self.table.get(page - 1) for page in (start, stop)
        )
        if cut:
            with pytest.raises(ValueError, match="cuts"):
                self.range.unmap(start * PAGE, stop * PAGE)
            return
        self.range.unmap(start * PAGE, stop * PAGE)
        for page in inside:
            del self.table[page]

    def fill(self, page: int, value: int) -> None:
        """Fill one block by way of one of its mappings, or see it refused."""
        number, start = self.table[page]
        block = 2 * (page - start) + self.random.randrange(2)
        at = start * PAGE + block * BLOCK
        view = self.range.view(at, at + BLOCK)
        if self.access[start] != READWRITE:
            with pytest.raises(ValueError):
                view.fill(value)
            return
        view.fill(value)
        self.blocks[number][block] = value

    def set_access(self, start: int, flags: sa.MemAccess) -> None:
        mapping = next(mapping for mapping in self.range.mappings if mapping.offset == start * PAGE)
        mapping.set_access(self.device, flags)
        self.access[start] = flags

    def step(self, value: int) -> None:
        action = self.random.choice(["map", "map", "map", "fill", "fill", "unmap", "unmap part", "access"])
        if action == "map":
            self.map(self.random.randrange(len(self.memories)), self.random.randrange(PAGES))
        elif action == "unmap part":
            start = self.random.randrange(PAGES)
            self.unmap(start, self.random.randint(1, PAGES - start))
        elif self.table:
            if action == "fill":
                self.fill(self.random.choice(sorted(self.table)), value)
            elif action == "unmap":
                self.unmap(self.random.choice(self.starts))
            else:
                self.set_access(self.random.choice(self.starts), self.random.choice([NONE, READ, READWRITE]))

    def check(self) -> None:
        starts = self.starts
        assert [mapping.offset for mapping in self.range.mappings] == [start * PAGE for start in starts]
        assert [mapping.memory for mapping in self.range.mappings] == [
            self.memories[self.table[start][0]] for start in starts
        ]
        assert self.range.draw() == "".join("0" if page in self.table else "." for page in range(PAGES))
        assert (
            self.range.mapped_bytes
            == PAGES * PAGE - sum(size for _, size in self.range.holes)
            == (len(self.table) * PAGE)
        )
        for number, memory in enumerate(self.memories):
            assert memory.mapping_count == sum(self.table[start][0] == number for start in starts)
        found = np.zeros(1, np.uint8)
        for mapping, start in zip(self.range.mappings, starts, strict=True):
            flags = self.access[start]
            assert mapping.access(self.device) == flags
            if flags:
                for block, value in enumerate(self.blocks[self.table[start][0]]):
                    for at in (block * BLOCK, (block + 1) * BLOCK - 1):
                        mapping[at : at + 1].copy_to(found)
                        mapping.stream.synchronize()
                        assert found[0] == value


@pytest.mark.parametrize("seed", range(4))
@in_a_thread
def test_a_range(machine: Any, seed: int) -> None:
    account = Account(machine)
    model = Model(account, seed)
    for number in range(1, 31):
        model.step(number)
        model.check()
    del model
    gc.collect()
    assert account.left == {}


@pytest.mark.parametrize("seed", range(4))
@in_a_thread
def test_a_growable_buffer(machine: Any, seed: int) -> None:
    """Its bytes are those of a numpy array that is cut and extended; new ones are undefined until they are written."""
    account = Account(machine)
    device = account.device
    chance = random.Random(seed)
    chunk = chance.choice([0, PAGE, 2 * PAGE])
    with sa.MemoryPool(HOST, driver=account.driver) as pool:
        pool.set_access(device, READWRITE)
        buffer = vmm.GrowableBuffer(device, 6 * PAGE, chunk=chunk)
        address = buffer.address
        model: Bytes = np.zeros(0, np.uint8)
        for number in range(1, 25):
            action = chance.choice(["resize", "resize", "write", "write", "evict"])
            if action == "resize":
                # Few sizes are whole pages, and some are the same again.
                size = min(chance.choice([0, 1, PAGE - 1, PAGE, PAGE + 1, chance.randrange(6 * PAGE)]), 6 * PAGE)
                old = len(model)
                buffer.resize(size)
                model = np.concatenate([model[:size], np.zeros(max(size - old, 0), np.uint8)])
                if size > old:
                    buffer[old:].fill(0)
            elif action == "write" and len(model):
                start = chance.randrange(len(model))
                stop = min(start + 5000, len(model))
                buffer[start:stop].fill(number)
                model[start:stop] = number
            elif action == "evict":
                buffer.evict(pool)
                with pytest.raises(sa.EvictedError):
                    buffer.resize(0)
                buffer.restore()
            assert buffer.address == address and buffer.nbytes == len(model)
            assert len(model) <= buffer.mapped_bytes <= 6 * PAGE
            assert sum(account.mapped.values()) == buffer.mapped_bytes
            assert len(account.left.get("physical memory", ())) == len(buffer.mappings)
            check_some(buffer, model, chance)
        buffer.close()
    del buffer, pool
    gc.collect()
    assert account.left == {}


def check_some(buffer: vmm.GrowableBuffer, model: Bytes, chance: random.Random) -> None:
    """Compare both ends of the buffer, and some parts between."""
    if not len(model):
        return
    for start in (0, max(len(model) - 6000, 0), *(chance.randrange(len(model)) for _ in range(6))):
        found = np.zeros(min(6000, len(model) - start), np.uint8)
        buffer[start : start + len(found)].copy_to(found)
        buffer.stream.synchronize()
        assert np.array_equal(found, model[start : start + len(found)])
