"""Items: sizes, order, back pressure, streams of every kind, captures; arguments; messages that are none of a ring."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import ipc
from streamalloc.ipc import Ring, RingProducer
from streamalloc.ipc.ring.protocol import ANSWER, END, HELLO, MAGIC, PACKET, VERSION, Introduction
from streamalloc.testing import Gate
from tests.interop.libraries import LibraryStream
from tests.ipc.ring import support as steps
from tests.ipc.ring.support import SIZE, bytes_there, join, refused, send, take
from tests.ipc.support import busy, hold, idle, make_stream, synchronize
from tests.processes import SECONDS, Kept, Partner, holds_there, shows_there
from tests.support import each_raises, executed, filled, pattern, pending


class TestItems:
    def test_put(self, joined: RingProducer, pool: sa.MemoryPool, stream: sa.Stream, partner: Partner) -> None:
        """Copies from wherever the bytes are."""
        partner.begin(steps.consume)
        with pool.allocate(300, stream) as source, sa.MemoryPool(sa.MemLocation.host()) as pinned:
            filled(source, 300)
            joined.put(source)
            joined.put(pattern(100, 100))
            joined.put(bytes(pattern(7, 7)))
            joined.put(bytearray())
            with pinned.allocate(2000, stream) as other:
                stream.synchronize()
                other.as_array()[:] = pattern(2000, 2000)
                joined.put(other)
                joined.put(source[:0])
            joined.close()
            assert partner.result() == [300, 100, 7, 0, 2000, 0]

    def test_whole_slot_unless_said(self, joined: RingProducer, partner: Partner) -> None:
        with joined.next() as slot:
            assert slot.nbytes == slot.nbytes_used == len(slot) == SIZE
            assert slot.stream is joined.stream and slot.location == joined.stream.device.location
            assert slot.device_accessible and not slot.host_accessible and slot.address % 512 == 0
            assert isinstance(slot.owner, sa.Buffer)
            filled(slot, 3)
            slot.nbytes_used = 100
        assert partner.run(steps.take)[1] == 100
        assert partner.run(shows_there, "item", 3)
        with joined.next() as slot:
            assert slot.nbytes_used == SIZE
        assert partner.run(steps.take, "ring", "other")[1] == SIZE


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_impossible_times(joined: RingProducer, timeout: float) -> None:
    for seed in range(4):
        steps.send(joined, seed)
    each_raises(ValueError, lambda: joined.next(timeout), match="timeout")
    one, two = ipc.Channel.pair()
    each_raises(ValueError, lambda: joined.add(one, timeout), match="timeout")
    each_raises(ValueError, lambda: ipc.Ring.consumer(two, timeout=timeout), match="timeout")
    assert not one.closed and not two.closed


class TestIteration:
    def test_releases_the_one_before(self, joined: RingProducer, partner: Partner) -> None:
        for seed in range(3):
            steps.send(joined, seed)
        partner.run(steps.iterate, 2)
        assert partner.run(steps.statistics_there) == (2, 1)
        partner.run(steps.iterate, 1)
        assert partner.run(steps.statistics_there) == (3, 1)
        joined.close()
        assert partner.run(steps.iterate, 1) == 0
        assert partner.run(steps.statistics_there) == (3, 0)
        each_raises(EOFError, lambda: partner.run(steps.take), match="closed the ring")
        each_raises(EOFError, lambda: partner.run(steps.take))

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
            assert partner.run(shows_there, "item", 2)


class TestStreamOrder:
    def test_delayed_producer(self, joined: RingProducer, partner: Partner, gate: Gate) -> None:
        """The item is there before its contents; what reads it waits by itself."""
        steps.send(joined, 1)
        partner.run(steps.take)
        assert partner.run(shows_there, "item", 1)
        partner.tell("item", "release")
        gate.hold(joined.stream)
        for seed in (2, 3):
            steps.send_held(joined, seed)
            partner.run(steps.take, "ring", f"item {seed}", 5)
        assert partner.run(busy)
        gate.open()
        for seed in (2, 3):
            assert partner.run(holds_there, f"item {seed}", seed)
            assert not partner.run(steps.lost_there, f"item {seed}")

    def test_delayed_consumer(self, joined: RingProducer, partner: Partner) -> None:
        """The host gets the slot at once; its stream waits for the work of the consumer's."""
        where = steps.send(joined, 1)
        joined.stream.synchronize()
        partner.run(steps.take)
        partner.run(hold)
        partner.run(steps.copy_later)
        spare = [joined.next(SECONDS) for _ in range(3)]
        with joined.next(SECONDS) as slot:
            assert slot.index == where
            slot.fill(9)
        assert pending(joined.stream)
        partner.tell("gate", "open")
        assert executed(joined.stream)
        assert partner.run(shows_there, "copy", 1)
        partner.run(steps.take, "ring", "next")
        assert partner.run(holds_there, "next", 9)
        for one in spare:
            one.give_back()

    def test_released_on_another_stream(self, joined: RingProducer, partner: Partner) -> None:
        """Then that one's work is waited for; also where the consumer closes meanwhile."""
        partner.run(make_stream, "other")
        for seed in range(4):
            steps.send(joined, seed)
        partner.run(steps.take)
        partner.run(hold, "other")
        partner.tell("item", "release", Kept("other"))
        with joined.next(SECONDS) as slot:
            slot.fill(7)
        assert pending(joined.stream)
        partner.run(steps.close_there)
        assert partner.run(busy, "stream")
        partner.tell("gate", "open")
        assert executed(joined.stream) and partner.run(idle, "stream")

    @pytest.mark.parametrize("kind", ["default", "per thread", "foreign"])
    def test_streams_that_are_not_ours(
        self, pool: sa.MemoryPool, device: sa.Device, stream: sa.Stream, partner: Partner, kind: str
    ) -> None:
        streams: dict[str, Any] = {
            "default": device.default_stream,
            "per thread": device.per_thread_stream,
            "foreign": LibraryStream(stream.handle),
        }
        with Ring.producer(pool, SIZE, 2, stream=streams[kind]) as ring:
            steps.join(partner, ring, on=None if kind == "default" else "stream")
            partner.begin(steps.consume)
            for size in range(1, 6):
                steps.send(ring, size, size)
            ring.close()
            assert partner.result() == list(range(1, 6))

    def test_capture_is_refused(
        self, joined: RingProducer, partner: Partner, stream: sa.Stream, pool: sa.MemoryPool, gate: Gate
    ) -> None:
        """And goes on; nothing is lost by it."""
        with stream.capture("relaxed"):
            each_raises(sa.CaptureError, lambda: joined.next().hand_off(), match="capture")
            with pytest.raises(sa.CaptureError), joined.next() as slot:
                assert slot.nbytes == SIZE
            with pytest.raises(sa.CaptureError):
                Ring.producer(pool, SIZE, stream=stream)
        gate.hold(stream)
        steps.send_held(joined, 1)
        with pytest.raises(sa.CaptureError, match="capture"):
            partner.run(steps.take_captured)
        gate.open()
        partner.run(steps.take)
        assert partner.run(holds_there, "item", 1)
        with pytest.raises(sa.CaptureError, match="capture"):
            partner.run(steps.give_captured)
        partner.tell("item", "release")
        assert steps.in_flight(joined, 0)

    def test_synchronises_nothing(self, joined: RingProducer, gate: Gate, machine: Any) -> None:
        gate.hold(joined.stream)
        for _ in range(4):
            with joined.next() as slot:
                slot.fill(1)
        assert not joined.stream.query()
        joined.close()
        assert not joined.stream.query()
        gate.open()


class TestArguments:
    @pytest.mark.parametrize("slot_bytes", [0, -1, 1.5, "four", None, True, 1 << 70])
    def test_bytes(self, pool: sa.MemoryPool, stream: sa.Stream, slot_bytes: Any) -> None:
        with pytest.raises((ValueError, TypeError)):
            Ring.producer(pool, slot_bytes, stream=stream)

    @pytest.mark.parametrize("slots", [0, -1, 257, 1.5, None])
    def test_slots(self, pool: sa.MemoryPool, stream: sa.Stream, slots: Any) -> None:
        with pytest.raises((ValueError, TypeError)):
            Ring.producer(pool, SIZE, slots, stream=stream)

    def test_others(self, pool: sa.MemoryPool, stream: sa.Stream, ring: RingProducer) -> None:
        each_raises(TypeError, lambda: Ring.producer(stream, SIZE, stream=stream), match="pool")  # type: ignore[arg-type]
        each_raises(TypeError, lambda: Ring.producer(pool, SIZE, stream=None), match="stream")  # type: ignore[arg-type]
        each_raises(TypeError, lambda: ring.add(5), match="channel")  # type: ignore[arg-type]
        each_raises(TypeError, lambda: Ring.consumer(5), match="channel")  # type: ignore[arg-type]
        each_raises(TypeError, Ring, match="ends")
        assert pool.statistics().used == 4 * SIZE

    def test_pool_that_cannot_be_shared(self, device: sa.Device, stream: sa.Stream) -> None:
        with sa.MemoryPool(device) as pool:
            with pytest.raises(ValueError, match="POSIX_FILE_DESCRIPTOR"):
                Ring.producer(pool, SIZE, stream=stream)
            assert pool.statistics().used == 0

    def test_no_memory(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pytest.raises(sa.OutOfMemoryError):
            Ring.producer(pool, 1 << 40, stream=stream)

    def test_size_of_an_item(self, joined: RingProducer, partner: Partner) -> None:
        with joined.next() as slot:
            for wrong in (SIZE + 1, -1):
                with pytest.raises(ValueError, match="nbytes_used"):
                    slot.nbytes_used = wrong
            with pytest.raises(TypeError):
                slot.nbytes_used = 1.5  # type: ignore[assignment]
            slot.nbytes_used = 0
        each_raises(ValueError, lambda: joined.put(bytes(SIZE + 1)), match=f"{SIZE + 1:,} bytes")
        each_raises(TypeError, lambda: joined.put(5))
        assert joined.statistics() == (1, 0, 1, 3, 1)
        assert partner.run(take)[1] == 0

    def test_most_slots(self, pool: sa.MemoryPool, stream: sa.Stream, partner: Partner) -> None:
        """As many hand-offs fit the connection of a consumer that does nothing."""
        with Ring.producer(pool, 1, 256, stream=stream) as ring:
            join(partner, ring)
            for value in range(256):
                ring.put(bytes([value]))
            ring.close()
            assert partner.run(bytes_there) == list(range(256))


class TestStrangers:
    """Packets that are of no ring, or damaged."""

    def test_no_consumer(self, ring: RingProducer) -> None:
        mine, _theirs = ipc.Channel.pair()
        with pytest.raises(TimeoutError, match=r"no consumer has called Ring.consumer within 0\.02 s"):
            ring.add(mine, 0.02)
        assert mine.closed and ring.statistics().consumers == 0

    def test_no_producer(self, stream: sa.Stream) -> None:
        mine, theirs = ipc.Channel.pair()
        with pytest.raises(TimeoutError):
            Ring.consumer(mine, stream=stream, timeout=0.02)
        assert mine.closed
        theirs.close()

    @pytest.mark.parametrize(
        "answer",
        [
            b"",
            b"hello",
            ANSWER.pack(b"SAring", VERSION, 0)[:-4],
            ANSWER.pack(b"SAring", VERSION + 1, 0),
            ANSWER.pack(b"SAring", VERSION, 0) + bytes(4),
            ANSWER.pack(b"SAring", VERSION, 31),
            ANSWER.pack(b"SAring", VERSION, 1 << 31),
        ],
    )
    def test_answers(self, ring: RingProducer, answer: bytes) -> None:
        mine, theirs = ipc.Channel.pair()
        theirs.send(answer)
        with pytest.raises(ipc.ProtocolError):
            ring.add(mine, SECONDS)
        assert mine.closed and ring.statistics().consumers == 0

    def test_introductions(self, ring: RingProducer, stream: sa.Stream, partner: Partner) -> None:
        """Any byte of it changed, cut off, or other handles: refused, or of no effect; nothing is left open."""
        data, handles = ring._hello, ring._handles
        partner.run(synchronize)
        rng = np.random.default_rng(1)
        wrong = [(b"", handles), (data[:-1], handles), (data + b"x", handles), (data[:40], handles), (data, ())]
        wrong += [(data, handles[:1]), (data, (*handles, handles[0])), (data, handles[::-1])]
        wrong += [(MAGIC + data[6 : HELLO.size], handles)]
        for at in rng.choice(len(data), 30, replace=False):
            wrong.append((data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :], handles))
        parts: list[Any] = [SimpleNamespace(data=data, handles=())]
        parts.append(SimpleNamespace(data=data[: HELLO.size], handles=handles))
        for part in parts:
            with pytest.raises(ipc.ProtocolError, match="is inconsistent"):
                Introduction.of(part)
        left = [tried for tried in wrong if not refused(partner, *tried)]
        # The bytes of a slot are the producer's to say, and so are the words: those are numbers without a checksum.
        assert len(left) < 10
        join(partner, ring)
        send(ring, 1)
        partner.run(take)
        assert partner.run(shows_there, "item", 1)

    @pytest.mark.parametrize(
        "packet",
        [
            b"",
            b"x" * PACKET.size,
            PACKET.pack(1, 4, 0, 0, 10),
            PACKET.pack(1, 0, 0, 0, SIZE + 1),
            PACKET.pack(3, 0, 0, 0, 0),
            END + b"x",
            PACKET.pack(1, 0, 1, 1, 10) + b"x",
        ],
    )
    def test_packets(self, ring: RingProducer, partner: Partner, packet: bytes) -> None:
        """The consumer closes the connection, and the producer is told."""
        channel = join(partner, ring)
        channel.send(packet)
        each_raises(ipc.ProtocolError, lambda: partner.run(take), match="no item")
        each_raises((sa.ClosedError, ipc.PeerGoneError), lambda: partner.run(take))
        each_raises(ipc.PeerGoneError, lambda: send(ring, 1))

    def test_the_same_slot_twice(self, ring: RingProducer, partner: Partner) -> None:
        channel = join(partner, ring)
        where = send(ring, 1)
        partner.run(take)
        # The words of a slot go on from ring to ring.
        channel.send(PACKET.pack(1, where, 1, partner.kept("item").ask("_value") + 1, 10))
        with pytest.raises(ipc.ProtocolError):
            partner.run(take)
