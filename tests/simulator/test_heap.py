"""Plain memory as pure bookkeeping: whatever comes and goes, nothing overlaps and nothing is lost."""

from __future__ import annotations

import errno
import itertools
import random
from collections.abc import Iterator

import pytest

from streamalloc.simulator.allocator import Block
from streamalloc.simulator.banks import Bank, Banks
from streamalloc.simulator.constants import BLOCK
from streamalloc.simulator.heap import Heap, Regions
from streamalloc.simulator.memory import Reservation
from tests.support import MiB

pytestmark = pytest.mark.simulated_only("tests of the simulated driver itself")


@pytest.fixture
def bank() -> Bank:
    return Bank(256 * MiB)


@pytest.fixture
def heap(bank: Bank) -> Iterator[Heap]:
    banks = Banks(bank, [])
    regions = Regions(banks, bank.total, (24 * MiB, BLOCK))
    heap = Heap("test", banks, bank, regions)
    yield heap
    heap.close()
    regions.close()


@pytest.mark.parametrize("seed", range(4))
def test_what_comes_and_goes(heap: Heap, bank: Bank, seed: int) -> None:
    dice = random.Random(seed)
    live: dict[int, tuple[int, Block]] = {}
    for _ in range(400):
        if live and dice.random() < 0.45:
            address = dice.choice(list(live))
            heap.free(live.pop(address)[1])
        else:
            size = dice.choice([1, 513, dice.randrange(1, BLOCK), BLOCK, 3 * MiB, 40 * MiB])
            got = heap.allocate(size, dice.choice([0, 4]))
            if got is not None:
                address, piece, _ = got
                live[address] = (size, piece)
        spans = sorted((address, address + size) for address, (size, _) in live.items())
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(spans))
        assert sum(size for size, _ in live.values()) <= bank.used <= bank.total
    for _, piece in live.values():
        heap.free(piece)
    assert bank.used == 0


def test_memory_that_the_system_has_not_is_taken_by_nobody(
    heap: Heap, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = heap.allocate(4 * MiB)
    assert first is not None
    heap.free(first[1])

    def fail(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Reservation, "map", fail)
        with pytest.raises(OSError):
            heap.allocate(4 * MiB)
    assert bank.used == 0
    again = heap.allocate(4 * MiB)
    assert again is not None
    assert again[0] == first[0]
