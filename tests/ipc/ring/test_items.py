"""Items: sizes, order, back pressure, streams of every kind, and captures."""

from __future__ import annotations

from typing import Any

import pytest

import streamalloc as sa
from streamalloc import ipc
from streamalloc.ipc import Ring, RingProducer
from streamalloc.testing import Gate
from tests.ipc.ring import support as steps
from tests.ipc.ring.support import SIZE
from tests.ipc.support import busy, hold, idle, make_stream, release
from tests.processes import SECONDS, Partner, holds_there
from tests.support import executed, filled, pattern, pending


class TestItems:
    def test_put(self, ring: RingProducer, pool: sa.MemoryPool, stream: sa.Stream, partner: Partner) -> None:
        """Copies from wherever the bytes are."""
        steps.join(partner, ring)
        partner.begin(steps.consume)
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
        steps.join(partner, ring)
        with ring.next() as slot:
            assert slot.nbytes == slot.nbytes_used == len(slot) == SIZE
            assert slot.stream is ring.stream and slot.location == ring.stream.device.location
            assert slot.device_accessible and not slot.host_accessible and slot.address % 512 == 0
            assert isinstance(slot.owner, sa.Buffer)
            filled(slot, 3)
            slot.nbytes_used = 100
        assert partner.run(steps.take)[1] == 100
        assert partner.run(steps.shows_there, "item", 3)
        with ring.next() as slot:
            assert slot.nbytes_used == SIZE
        assert partner.run(steps.take, "ring", "other")[1] == SIZE


class TestBackPressure:
    @pytest.mark.parametrize("timeout", [-1, float("nan")])
    def test_impossible_times(self, ring: RingProducer, partner: Partner, timeout: float) -> None:
        steps.join(partner, ring)
        for seed in range(4):
            steps.send(ring, seed)
        with pytest.raises(ValueError, match="timeout"):
            ring.next(timeout)
        with pytest.raises(ValueError, match="timeout"):
            ring.add(ipc.Channel.pair()[0], timeout)


class TestIteration:
    def test_releases_the_one_before(self, ring: RingProducer, partner: Partner) -> None:
        steps.join(partner, ring)
        for seed in range(3):
            steps.send(ring, seed)
        partner.run(steps.iterate, 2)
        assert partner.run(steps.statistics_there) == (2, 1)
        partner.run(steps.iterate, 1)
        assert partner.run(steps.statistics_there) == (3, 1)
        ring.close()
        assert partner.run(steps.iterate, 1) == 0
        assert partner.run(steps.statistics_there) == (3, 0)
        with pytest.raises(EOFError, match="closed the ring"):
            partner.run(steps.take)
        with pytest.raises(EOFError):
            partner.run(steps.take)

    def test_released_by_hand_meanwhile(self, pool: sa.MemoryPool, stream: sa.Stream, partner: Partner) -> None:
        """The same object may stand for a later item by then."""
        with Ring.producer(pool, SIZE, 1, stream=stream) as ring:
            steps.join(partner, ring)
            steps.send(ring, 1)
            partner.run(steps.iterate, 1, True)
            steps.send(ring, 2)
            partner.run(steps.take)
            ring.close()
            assert partner.run(steps.iterate, 1) == 0
            assert partner.run(steps.shows_there, "item", 2)


class TestStreamOrder:
    def test_delayed_producer(self, ring: RingProducer, partner: Partner, gate: Gate) -> None:
        """The item is there before its contents; what reads it waits by itself."""
        steps.join(partner, ring)
        steps.send(ring, 1)
        partner.run(steps.take)
        assert partner.run(steps.shows_there, "item", 1)
        partner.run(steps.give_there)
        gate.hold(ring.stream)
        for seed in (2, 3):
            steps.send_held(ring, seed)
            partner.run(steps.take, "ring", f"item {seed}", 5)
        assert partner.run(busy)
        gate.open()
        for seed in (2, 3):
            assert partner.run(holds_there, f"item {seed}", seed)
            assert not partner.run(steps.lost_there, f"item {seed}")

    def test_delayed_consumer(self, ring: RingProducer, partner: Partner) -> None:
        """The host gets the slot at once; its stream waits for the work of the consumer's."""
        steps.join(partner, ring)
        where = steps.send(ring, 1)
        ring.stream.synchronize()
        partner.run(steps.take)
        partner.run(hold)
        partner.run(steps.copy_later)
        spare = [ring.next(SECONDS) for _ in range(3)]
        with ring.next(SECONDS) as slot:
            assert slot.index == where
            slot.fill(9)
        assert pending(ring.stream)
        partner.run(release)
        assert executed(ring.stream)
        assert partner.run(steps.shows_there, "copy", 1)
        partner.run(steps.take, "ring", "next")
        assert partner.run(holds_there, "next", 9)
        for one in spare:
            one.give_back()

    def test_released_on_another_stream(self, ring: RingProducer, partner: Partner) -> None:
        """Then that one's work is waited for; also where the consumer closes meanwhile."""
        steps.join(partner, ring)
        partner.run(make_stream, "other")
        for seed in range(4):
            steps.send(ring, seed)
        partner.run(steps.take)
        partner.run(hold, "other")
        partner.run(steps.give_there, "item", "other")
        with ring.next(SECONDS) as slot:
            slot.fill(7)
        assert pending(ring.stream)
        partner.run(steps.close_there)
        assert partner.run(busy, "stream")
        partner.run(release)
        assert executed(ring.stream) and partner.run(idle, "stream")

    @pytest.mark.parametrize("kind", ["default", "per thread", "foreign"])
    def test_streams_that_are_not_ours(
        self, pool: sa.MemoryPool, device: sa.Device, stream: sa.Stream, partner: Partner, kind: str
    ) -> None:
        class Foreign:
            def __cuda_stream__(self) -> tuple[int, int]:
                return (0, stream.handle)

        streams: dict[str, Any] = {
            "default": device.default_stream,
            "per thread": device.per_thread_stream,
            "foreign": Foreign(),
        }
        with Ring.producer(pool, SIZE, 2, stream=streams[kind]) as ring:
            steps.join(partner, ring, on=None if kind == "default" else "stream")
            partner.begin(steps.consume)
            for size in range(1, 6):
                steps.send(ring, size, size)
            ring.close()
            assert partner.result() == list(range(1, 6))

    def test_capture_is_refused(
        self, ring: RingProducer, partner: Partner, stream: sa.Stream, pool: sa.MemoryPool, gate: Gate
    ) -> None:
        """And goes on; nothing is lost by it."""
        steps.join(partner, ring)
        with stream.capture("relaxed"):
            with pytest.raises(sa.CaptureError, match="capture"):
                ring.next().hand_off()
            with pytest.raises(sa.CaptureError), ring.next() as slot:
                assert slot.nbytes == SIZE
            with pytest.raises(sa.CaptureError):
                Ring.producer(pool, SIZE, stream=stream)
        gate.hold(stream)
        steps.send_held(ring, 1)
        with pytest.raises(sa.CaptureError, match="capture"):
            partner.run(steps.take_captured)
        gate.open()
        partner.run(steps.take)
        assert partner.run(holds_there, "item", 1)
        with pytest.raises(sa.CaptureError, match="capture"):
            partner.run(steps.give_captured)
        partner.run(steps.give_there)
        assert steps.in_flight(ring, 0)

    def test_synchronises_nothing(self, ring: RingProducer, partner: Partner, gate: Gate, machine: Any) -> None:
        steps.join(partner, ring)
        gate.hold(ring.stream)
        for _ in range(4):
            with ring.next() as slot:
                slot.fill(1)
        assert not ring.stream.query()
        ring.close()
        assert not ring.stream.query()
        gate.open()
