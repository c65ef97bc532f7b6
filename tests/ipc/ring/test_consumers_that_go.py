"""Consumers that close, are dropped, or are killed at each step."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

import streamalloc as sa
from streamalloc import ipc
from streamalloc.ipc import RingProducer
from tests.ipc.ring import support as steps
from tests.ipc.ring.support import SIZE
from tests.ipc.support import hold
from tests.processes import SECONDS, Partner, eventually
from tests.support import executed, pending


class TestKilledConsumer:
    """``kill -9`` at each step: slots come back, the others go on, and a new one can join."""

    @pytest.fixture
    def dies(self, another: Callable[[], Partner]) -> Partner:
        return another()

    def check_goes_on(self, ring: RingProducer, partner: Partner, handed_off: int, redelivered: int) -> None:
        """All four slots can be filled, and arrive, besides what the dead had not opened."""
        before = ring.statistics()
        assert (before.handed_off, before.consumers) == (handed_off, 0)
        steps.join(partner, ring)
        assert eventually(lambda: ring.statistics()[1:4] == (redelivered, redelivered, 4 - redelivered))
        partner.begin(steps.consume)
        for size in range(100, 110):
            steps.send(ring, size, size)
        ring.close()
        assert partner.result()[redelivered:] == list(range(100, 110))
        assert executed(ring.stream)

    def all_gone(self, ring: RingProducer) -> None:
        with pytest.raises(ipc.PeerGoneError):
            for _ in range(5):
                steps.send(ring, SIZE, SIZE)

    def test_while_it_joins(self, ring: RingProducer, dies: Partner, partner: Partner) -> None:
        mine, theirs = ipc.Channel.pair()
        with theirs:
            dies.begin(steps.never_joins, fds=[theirs])  # type: ignore[list-item]
        thread = threading.Timer(0.05, dies.kill)
        thread.start()
        with pytest.raises(ipc.PeerGoneError):
            ring.add(mine, SECONDS)
        thread.join()
        assert mine.closed
        self.check_goes_on(ring, partner, 0, 0)

    def test_with_an_item(self, ring: RingProducer, dies: Partner, partner: Partner) -> None:
        """The item that it had opened is gone."""
        steps.join(dies, ring)
        for _ in range(4):
            steps.send(ring, SIZE, SIZE)
        dies.run(steps.take, "ring", "one")
        dies.run(steps.take, "ring", "two")
        dies.run(steps.give_there, "two")
        dies.kill()
        self.all_gone(ring)
        self.check_goes_on(ring, partner, 4, 2)

    def test_while_its_stream_is_held(self, ring: RingProducer, dies: Partner, partner: Partner) -> None:
        """Our stream waits for its work, and is let go."""
        steps.join(dies, ring)
        for _ in range(4):
            steps.send(ring, SIZE, SIZE)
        ring.stream.synchronize()
        index, _ = dies.run(steps.take)
        dies.run(hold)
        dies.run(steps.give_there)
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
        steps.join(dies, ring)
        for _ in range(4):
            steps.send(ring, SIZE, SIZE)
            dies.run(steps.take)
        threading.Timer(0.05, os.kill, (dies.pid, 9)).start()
        slots = []
        with pytest.raises(ipc.PeerGoneError):
            while True:
                slots.append(ring.next())
        for slot in slots:
            slot.give_back()
        self.check_goes_on(ring, partner, 4, 0)

    def test_others_go_on(self, ring: RingProducer, dies: Partner, partner: Partner) -> None:
        steps.join(dies, ring)
        steps.join(partner, ring)
        for size in range(1, 5):
            steps.send(ring, size, size)
        dies.run(steps.take)
        dies.kill()
        partner.begin(steps.consume)
        for size in range(5, 30):
            steps.send(ring, size, size)
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
        steps.join(dies, ring)
        for seed in range(3):
            steps.send(ring, seed)
        dies.run(steps.take)
        ring.close()
        stream.synchronize()
        assert pool.statistics().used
        dies.kill()
        assert eventually(lambda: pool.statistics().used == 0)
        assert eventually(lambda: not steps.settled(stream))
