"""Items: sizes, order, back pressure, and several consumers."""

from __future__ import annotations

import pytest

import streamalloc as sa
from streamalloc import ipc
from streamalloc.ipc import Ring, RingProducer
from tests.ipc.ring.support import SIZE, consume, iterate, join, send, shows_there, statistics_there, take
from tests.processes import Partner
from tests.support import filled, pattern


class TestItems:
    def test_put(self, ring: RingProducer, pool: sa.MemoryPool, stream: sa.Stream, partner: Partner) -> None:
        """Copies from wherever the bytes are."""
        join(partner, ring)
        partner.begin(consume)
        with pool.allocate(300, stream) as source, sa.MemoryPool(sa.MemLocation.host()) as pinned:
            filled(source, 300)
            ring.put(source)
            ring.put(pattern(100, 100))
            ring.put(bytes(pattern(7, 7)))
            ring.put(bytearray())
            with pinned.allocate(2000, stream) as other:
                stream.synchronize()
                other.as_array()[:] = pattern(2000, 2000)
                ring.put(other)
                ring.put(source[:0])
            ring.close()
            assert partner.result() == [300, 100, 7, 0, 2000, 0]

    def test_whole_slot_unless_said(self, ring: RingProducer, partner: Partner) -> None:
        join(partner, ring)
        with ring.next() as slot:
            assert slot.nbytes == slot.nbytes_used == len(slot) == SIZE
            assert slot.stream is ring.stream and slot.location == ring.stream.device.location
            assert slot.device_accessible and not slot.host_accessible and slot.address % 512 == 0
            assert isinstance(slot.owner, sa.Buffer)
            filled(slot, 3)
            slot.nbytes_used = 100
        assert partner.run(take)[1] == 100
        assert partner.run(shows_there, "item", 3)
        with ring.next() as slot:
            assert slot.nbytes_used == SIZE
        assert partner.run(take, "ring", "other")[1] == SIZE


class TestBackPressure:
    @pytest.mark.parametrize("timeout", [-1, float("nan")])
    def test_impossible_times(self, ring: RingProducer, partner: Partner, timeout: float) -> None:
        join(partner, ring)
        for seed in range(4):
            send(ring, seed)
        with pytest.raises(ValueError, match="timeout"):
            ring.next(timeout)
        with pytest.raises(ValueError, match="timeout"):
            ring.add(ipc.Channel.pair()[0], timeout)


class TestIteration:
    def test_releases_the_one_before(self, ring: RingProducer, partner: Partner) -> None:
        join(partner, ring)
        for seed in range(3):
            send(ring, seed)
        partner.run(iterate, 2)
        assert partner.run(statistics_there) == (2, 1)
        partner.run(iterate, 1)
        assert partner.run(statistics_there) == (3, 1)
        ring.close()
        assert partner.run(iterate, 1) == 0
        assert partner.run(statistics_there) == (3, 0)
        with pytest.raises(EOFError, match="closed the ring"):
            partner.run(take)
        with pytest.raises(EOFError):
            partner.run(take)

    def test_released_by_hand_meanwhile(self, pool: sa.MemoryPool, stream: sa.Stream, partner: Partner) -> None:
        """The same object may stand for a later item by then."""
        with Ring.producer(pool, SIZE, 1, stream=stream) as ring:
            join(partner, ring)
            send(ring, 1)
            partner.run(iterate, 1, True)
            send(ring, 2)
            partner.run(take)
            ring.close()
            assert partner.run(iterate, 1) == 0
            assert partner.run(shows_there, "item", 2)
