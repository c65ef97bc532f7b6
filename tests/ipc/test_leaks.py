"""Hundreds of rounds of sharing, opening and closing leave both processes as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

import streamalloc as sa
from streamalloc import ipc, vmm
from tests.ipc.support import POSIX, make_buffer, make_growable, make_pool, no_more, state, state_there
from tests.processes import SECONDS, Partner, eventually
from tests.support import MiB


@pytest.fixture
def unchanged(partner: Partner) -> Iterator[Callable[[Callable[[int], None], int], None]]:
    """Runs rounds, and holds both processes to what they had open after the first few.

    The first rounds may meet a slot table of this process that the partner has not opened before, once for each table.
    """

    def unchanged(run: Callable[[int], None], rounds: int) -> None:
        for number in range(8):
            run(number)
        for last in (False, False, True):
            before, before_there = state(), partner.run(state_there)
            for number in range(rounds):
                run(number)
            with contextlib.nullcontext() if last else contextlib.suppress(AssertionError):
                assert no_more(before, state()) and no_more(before_there, partner.run(state_there))
                return

    yield unchanged


Unchanged = Callable[[Callable[[int], None], int], None]


class Sides(NamedTuple):
    """This process, and another one that opens its memory."""

    partner: Partner
    pool: sa.MemoryPool
    stream: sa.Stream

    def buffer(self, number: int) -> None:
        buffer = self.pool.allocate(4096, self.stream)
        buffer.fill(number % 256)
        opened = self.partner.give(buffer, "it")
        opened.close() if number % 3 else opened.drop()
        buffer.free()

    def growable(self, number: int) -> None:
        device = self.stream.device
        with vmm.GrowableBuffer(device, 8 * MiB, MiB, handle_types=POSIX, stream=self.stream) as buffer:
            for nbytes in (MiB, 2 * MiB):
                buffer.resize(nbytes)
                opened = self.partner.give(buffer, "it")
                opened.close() if number % 2 else opened.drop()

    def event(self, number: int) -> None:
        with self.stream.device.create_event(interprocess=True) as event:
            self.stream.record(event)
            self.partner.give(event, "it").close()

    def opened_here(self, number: int) -> None:
        if not number:
            self.partner.run(make_pool)
            self.partner.run(make_buffer, "buffer", 1)
            self.partner.run(make_growable, "growable", 1, MiB)
        for kind in ("buffer", "growable"):
            self.partner.take(kind, self.stream).close()

    def stale(self, number: int) -> None:
        with self.pool.allocate(4096, self.stream) as buffer:
            shared = ipc.share(buffer)
        with pytest.raises(sa.StaleDescriptorError):
            self.partner.open(shared, fds=shared.fds)

    def channel(self, number: int) -> None:
        """A channel of its own each time, on which the handles go along again."""
        mine, theirs = ipc.Channel.pair()
        with mine, theirs, self.pool.allocate(4096, self.stream) as buffer:
            ipc.send(mine, buffer, hold=number % 2 == 0, timeout=SECONDS)
            ipc.receive(theirs, stream=self.stream, timeout=SECONDS).close()


ROUNDS: dict[Callable[[Sides, int], None], int] = {
    Sides.buffer: 500, Sides.growable: 60, Sides.event: 100, Sides.opened_here: 100, Sides.stale: 60,
    Sides.channel: 100,
}  # fmt: skip


@pytest.mark.unchecked("counts descriptors, of which the checker has some")
@pytest.mark.parametrize("kind", ROUNDS, ids=lambda kind: kind.__name__)
def test_rounds(unchanged: Unchanged, partner: Partner, pool: sa.MemoryPool, stream: sa.Stream, kind: Any) -> None:
    sides = Sides(partner, pool, stream)
    free = stream.device.memory_info().free
    unchanged(lambda number: kind(sides, number), ROUNDS[kind])
    assert eventually(lambda: pool.statistics().used == 0)
    assert pool.statistics().reserved <= 32 * MiB
    if kind is Sides.growable:
        assert eventually(lambda: stream.device.memory_info().free >= free)
