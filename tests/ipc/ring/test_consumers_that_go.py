"""Consumers that close, are dropped, or are killed at each step."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

import streamalloc as sa
from streamalloc import ipc
from streamalloc.ipc import RingProducer
from tests.ipc.ring.support import (
    SIZE,
    consume,
    drop_there,
    give_there,
    in_flight,
    join,
    never_joins,
    send,
    settled,
    shows_there,
    take,
    work_there,
)
from tests.ipc.support import hold
from tests.processes import SECONDS, Partner, eventually
from tests.support import executed, pending


class TestDroppedConsumer:
    def test_dropped_in_a_cycle(self, ring: RingProducer, partner: Partner) -> None:
        """The memory, which another consumer of its process has too, is closed once."""
        join(partner, ring)
        join(partner, ring, "other")
        for seed in range(2):
            send(ring, seed)
        partner.run(take)
        partner.run(take, "other", "there")
        partner.run(drop_there, "item")
        partner.run(drop_there, "ring", True)
        partner.run(work_there)
        assert in_flight(ring, 1)
        assert partner.run(shows_there, "there", 1)
        partner.run(drop_there, "there")
        partner.run(drop_there, "other", True)
        partner.run(work_there)
        assert in_flight(ring, 0)


class TestKilledConsumer:
    """``kill -9`` at each step: slots come back, the others go on, and a new one can join."""

    @pytest.fixture
    def dies(self, another: Callable[[], Partner]) -> Partner:
        return another()

    def check_goes_on(self, ring: RingProducer, partner: Partner, handed_off: int, redelivered: int) -> None:
        """All four slots can be filled, and arrive, besides what the dead had not opened."""
        before = ring.statistics()
        assert (before.handed_off, before.consumers) == (handed_off, 0)
        join(partner, ring)
        assert eventually(lambda: ring.statistics()[1:4] == (redelivered, redelivered, 4 - redelivered))
        partner.begin(consume)
        for size in range(100, 110):
            send(ring, size, size)
        ring.close()
        assert partner.result()[redelivered:] == list(range(100, 110))
        assert executed(ring.stream)

    def all_gone(self, ring: RingProducer) -> None:
        with pytest.raises(ipc.PeerGoneError):
            for _ in range(5):
                send(ring, SIZE, SIZE)

    def test_while_it_joins(self, ring: RingProducer, dies: Partner, partner: Partner) -> None:
        mine, theirs = ipc.Channel.pair()
        with theirs:
            dies.begin(never_joins, fds=[theirs])  # type: ignore[list-item]
        thread = threading.Timer(0.05, dies.kill)
        thread.start()
        with pytest.raises(ipc.PeerGoneError):
            ring.add(mine, SECONDS)
        thread.join()
        assert mine.closed
        self.check_goes_on(ring, partner, 0, 0)

    def test_between_packet_and_taking(self, ring: RingProducer, dies: Partner, partner: Partner) -> None:
        """Another consumer gets the item that it never opened."""
        join(dies, ring)
        for _ in range(2):
            send(ring, SIZE, SIZE)
        dies.kill()
        self.all_gone(ring)
        self.check_goes_on(ring, partner, 2, 2)

    def test_with_an_item(self, ring: RingProducer, dies: Partner, partner: Partner) -> None:
        """The item that it had opened is gone."""
        join(dies, ring)
        for _ in range(4):
            send(ring, SIZE, SIZE)
        dies.run(take, "ring", "one")
        dies.run(take, "ring", "two")
        dies.run(give_there, "two")
        dies.kill()
        self.all_gone(ring)
        self.check_goes_on(ring, partner, 4, 2)

    def test_while_its_stream_is_held(self, ring: RingProducer, dies: Partner, partner: Partner) -> None:
        """Our stream waits for its work, and is let go."""
        join(dies, ring)
        for _ in range(4):
            send(ring, SIZE, SIZE)
        ring.stream.synchronize()
        index, _ = dies.run(take)
        dies.run(hold)
        dies.run(give_there)
        slot = ring.next(SECONDS)
        assert slot.index == index
        slot.fill(9)
        assert pending(ring.stream)
        dies.kill()
        assert executed(ring.stream)
        slot.give_back()
        self.all_gone(ring)
        self.check_goes_on(ring, partner, 4, 3)

    def test_while_the_producer_waits(self, ring: RingProducer, dies: Partner, partner: Partner) -> None:
        """A producer with no time limit is told."""
        join(dies, ring)
        for _ in range(4):
            send(ring, SIZE, SIZE)
            dies.run(take)
        threading.Timer(0.05, os.kill, (dies.pid, 9)).start()
        slots = []
        with pytest.raises(ipc.PeerGoneError):
            while True:
                slots.append(ring.next())
        for slot in slots:
            slot.give_back()
        self.check_goes_on(ring, partner, 4, 0)

    def test_others_go_on(self, ring: RingProducer, dies: Partner, partner: Partner) -> None:
        join(dies, ring)
        join(partner, ring)
        for size in range(1, 5):
            send(ring, size, size)
        dies.run(take)
        dies.kill()
        partner.begin(consume)
        for size in range(5, 30):
            send(ring, size, size)
        # The slot that the dead one has not opened comes back only once its death was noticed.
        for slot in [ring.next(SECONDS) for _ in range(4)]:
            slot.give_back()
        assert ring.statistics().consumers == 1
        ring.close()
        taken = partner.result()
        # The first was opened by the dead one, and the third was on its way to it.
        assert sorted(taken) == list(range(2, 30))

    def test_after_the_producer_has_closed(
        self, ring: RingProducer, dies: Partner, pool: sa.MemoryPool, stream: sa.Stream
    ) -> None:
        join(dies, ring)
        for seed in range(3):
            send(ring, seed)
        dies.run(take)
        ring.close()
        stream.synchronize()
        assert pool.statistics().used
        dies.kill()
        assert eventually(lambda: pool.statistics().used == 0)
        assert eventually(lambda: not settled(stream))
