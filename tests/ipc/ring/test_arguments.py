"""Arguments, and messages that are none of a ring."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import ipc
from streamalloc.ipc import Ring, RingProducer
from streamalloc.ipc.ring.protocol import ANSWER, END, HELLO, MAGIC, PACKET, VERSION
from tests.ipc.ring.support import SIZE, bytes_there, join, refused, send, shows_there, take, value_there
from tests.ipc.support import synchronize
from tests.processes import SECONDS, Partner


class TestArguments:
    @pytest.mark.parametrize("slot_bytes", [0, -1, 1.5, "4", None, True, 1 << 70])
    def test_bytes(self, pool: sa.MemoryPool, stream: sa.Stream, slot_bytes: Any) -> None:
        with pytest.raises((ValueError, TypeError)):
            Ring.producer(pool, slot_bytes, stream=stream)

    @pytest.mark.parametrize("slots", [0, -1, 257, 1.5, None])
    def test_slots(self, pool: sa.MemoryPool, stream: sa.Stream, slots: Any) -> None:
        with pytest.raises((ValueError, TypeError)):
            Ring.producer(pool, SIZE, slots, stream=stream)

    def test_others(self, pool: sa.MemoryPool, stream: sa.Stream, ring: RingProducer) -> None:
        with pytest.raises(TypeError, match="pool"):
            Ring.producer(stream, SIZE, stream=stream)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="stream"):
            Ring.producer(pool, SIZE, stream=None)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="channel"):
            ring.add(5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="channel"):
            Ring.consumer(5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="ends"):
            Ring()
        assert pool.statistics().used == 4 * SIZE

    def test_pool_that_cannot_be_shared(self, device: sa.Device, stream: sa.Stream) -> None:
        with sa.MemoryPool(device) as pool:
            with pytest.raises(ValueError, match="POSIX_FILE_DESCRIPTOR"):
                Ring.producer(pool, SIZE, stream=stream)
            assert pool.statistics().used == 0

    def test_no_memory(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pytest.raises(sa.OutOfMemoryError):
            Ring.producer(pool, 1 << 40, stream=stream)

    def test_size_of_an_item(self, ring: RingProducer, partner: Partner) -> None:
        join(partner, ring)
        with ring.next() as slot:
            for wrong in (SIZE + 1, -1):
                with pytest.raises(ValueError, match="nbytes_used"):
                    slot.nbytes_used = wrong
            with pytest.raises(TypeError):
                slot.nbytes_used = 1.5  # type: ignore[assignment]
            slot.nbytes_used = 0
        with pytest.raises(ValueError, match=f"{SIZE + 1:,} bytes"):
            ring.put(bytes(SIZE + 1))
        with pytest.raises(TypeError):
            ring.put(5)
        assert ring.statistics() == (1, 0, 1, 3, 1)
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
        with pytest.raises(TimeoutError):
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
            ANSWER.pack(b"SAring", VERSION, 1),
            ANSWER.pack(b"SAring", VERSION + 1, 1) + bytes(4),
            ANSWER.pack(b"SAring", VERSION, 2) + bytes(8),
            ANSWER.pack(b"SAring", VERSION, 1) + struct.pack("<I", 31),
            ANSWER.pack(b"SAring", VERSION, 1) + struct.pack("<I", 1 << 31),
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
        with pytest.raises(ipc.ProtocolError, match="no item"):
            partner.run(take)
        with pytest.raises((sa.ClosedError, ipc.PeerGoneError)):
            partner.run(take)
        with pytest.raises(ipc.PeerGoneError):
            send(ring, 1)

    def test_the_same_slot_twice(self, ring: RingProducer, partner: Partner) -> None:
        channel = join(partner, ring)
        where = send(ring, 1)
        partner.run(take)
        # The words of a slot go on from ring to ring.
        channel.send(PACKET.pack(1, where, 1, partner.run(value_there) + 1, 10))
        with pytest.raises(ipc.ProtocolError):
            partner.run(take)
