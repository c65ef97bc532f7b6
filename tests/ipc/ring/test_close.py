"""Both ends: a consumer in this process; closes, drops, forks, kills at each step, and threads that close meanwhile."""

import asyncio
import contextlib
import gc
import os
import select
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from streamalloc.core.copies import copy_bytes
from streamalloc.core.deferred import deferred_queue
from streamalloc.ipc import Ring, RingConsumer, RingItem, RingProducer
from streamalloc.ipc.exporter.exports import exports_of
from streamalloc.ipc.ring import producer as producer_module
from streamalloc.testing import Gate
from tests.ipc.ring import support as steps
from tests.ipc.ring.support import SIZE
from tests.ipc.support import hold, no_more, state, synchronize
from tests.processes import SECONDS, Partner, There, holds_there, in_a_child, shows_there
from tests.support import each_raises, eventually, executed, pending, soon


class TestClose:
    def test_producer_first(
        self, joined: RingProducer, partner: Partner, pool: sa.MemoryPool, stream: sa.Stream, gate: Gate
    ) -> None:
        """All that was handed off still arrives, filled by then or not; then the memory is free."""
        gate.hold(stream)
        for value in range(3):
            steps.send_held(joined, value)
        joined.close()
        joined.close()
        assert joined.closed and "closed" in repr(joined)
        gate.open()
        for value in range(3):
            partner.run(steps.take, "ring", f"item {value}")
            assert partner.run(holds_there, f"item {value}", value)
        with pytest.raises(EOFError):
            partner.run(steps.take)
        assert pool.statistics().used
        partner.run(steps.close_there)
        assert eventually(lambda: pool.statistics().used == 0 and not steps.settled(stream))

    def test_busy_consumer(
        self, joined: RingProducer, partner: Partner, pool: sa.MemoryPool, stream: sa.Stream
    ) -> None:
        """The memory is not free before its stream has done that."""
        steps.send(joined, 1)
        stream.synchronize()
        partner.run(steps.take)
        partner.run(hold)
        partner.run(steps.copy_later)
        partner.run(steps.close_there)
        joined.close()
        assert pending(stream)
        with sa.MemoryPool(stream.device) as other, other.allocate(64, stream) as after:
            after.fill(1)
        partner.tell("gate", "open")
        assert executed(stream)
        assert partner.run(shows_there, "copy", 1)
        assert eventually(lambda: pool.statistics().used == 0)

    def test_in_a_block(self, joined: RingProducer) -> None:
        slot = joined.next()
        joined.close()
        each_raises(sa.ClosedError, lambda: slot.address, slot.hand_off, joined.next, lambda: joined.put(b""))
        slot.give_back()
        with pytest.raises(sa.ClosedError):
            joined.add(ipc.Channel.pair()[0])

    @pytest.mark.parametrize("how", ["given back", "dropped"])
    def test_while_a_slot_is_filled(
        self, joined: RingProducer, partner: Partner, pool: sa.MemoryPool, stream: sa.Stream, how: str
    ) -> None:
        """The memory stays until the last copy of another thread's ``put`` is queued."""
        slot = joined.next()
        joined.close()
        partner.run(steps.close_there)
        steps.settled(stream)
        assert pool.statistics().used
        if how == "given back":
            slot.give_back()
        del slot
        assert eventually(lambda: not steps.settled(stream) and pool.statistics().used == 0)

    def test_during_a_put(
        self, joined: RingProducer, partner: Partner, stream: sa.Stream, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The copy is queued before the memory is freed."""
        queued: list[bool] = []

        def close_and_copy(*args: Any) -> None:
            joined.close()
            partner.run(steps.close_there)
            steps.settled(stream)
            copy_bytes(*args)
            queued.append(True)

        monkeypatch.setattr(producer_module, "copy_bytes", close_and_copy)
        with pytest.raises(sa.ClosedError):
            joined.put(b"x")
        assert queued and eventually(lambda: not steps.settled(stream))

    def test_while_it_waits(self, joined: RingProducer) -> None:
        for seed in range(4):
            steps.send(joined, seed)
        with soon(joined.close), pytest.raises(sa.ClosedError):
            joined.next()

    @pytest.mark.parametrize("in_a_cycle", [False, True])
    def test_dropped(self, pool: sa.MemoryPool, stream: sa.Stream, partner: Partner, in_a_cycle: bool) -> None:
        """As if it were closed, at one of the next points of work: nothing refers back to it but what is in use."""
        ring = Ring.producer(pool, SIZE, 2, stream=stream)
        steps.join(partner, ring)
        steps.send(ring, 1)
        slot = ring.next()
        cycle: list[object] = [ring] if in_a_cycle else []
        cycle.append(cycle)
        del ring, cycle
        gc.collect()
        each_raises(sa.ClosedError, slot.hand_off)
        slot.give_back()
        partner.run(steps.take)
        assert partner.run(shows_there, "item", 1)
        stream.synchronize()
        with pytest.raises(EOFError):
            partner.run(steps.take)

    def test_stream_first(self, pool: sa.MemoryPool, device: sa.Device, partner: Partner) -> None:
        stream = device.create_stream()
        ring = Ring.producer(pool, SIZE, 2, stream=stream)
        steps.join(partner, ring)
        steps.send(ring, 1)
        slot = ring.next()
        stream.close()
        each_raises(sa.ClosedError, slot.hand_off)
        del slot
        ring.close()
        partner.run(steps.take)
        assert partner.run(shows_there, "item", 1)
        partner.run(steps.close_there)
        device.synchronize()
        assert eventually(lambda: pool.statistics().used == 0)

    def test_leaves_nothing(
        self, pool: sa.MemoryPool, stream: sa.Stream, partner: Partner, device: sa.Device, gate: Gate
    ) -> None:
        """Descriptors, mappings, threads, memory and words, on both sides."""
        leases = exports_of(device._session)

        def round() -> None:
            with Ring.producer(pool, SIZE, 4, stream=stream) as ring:
                steps.join(partner, ring)
                for seed in range(5):
                    steps.send(ring, seed)
                    partner.run(steps.take)
                    partner.tell("item", "release")
                steps.send(ring, 6)
                steps.join(partner, ring, "other")
                steps.send(ring, 7)
                partner.run(steps.close_there)
            partner.run(steps.close_there, "other")
            assert eventually(lambda: pool.statistics().used == 0 and not steps.settled(stream))

        with Ring.producer(pool, SIZE, 1, stream=stream) as ring:
            # Once there was something to wait for, a thread watches over the producer for good.
            steps.join(partner, ring)
            gate.hold(stream)
            steps.send_held(ring, 1)
            partner.run(steps.take)
            gate.open()
            partner.run(steps.close_there)
        round()
        before, there, free = state(), partner.run(steps.state_there), steps.words(leases)
        for _ in range(4):
            round()
        assert (
            no_more(before, state()) and no_more(there, partner.run(steps.state_there)) and steps.words(leases) == free
        )


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
        mine = steps.connected(dies, steps.never_joins)
        with soon(dies.kill, 0.05), pytest.raises(ipc.PeerGoneError):
            ring.add(mine, SECONDS)
        assert mine.closed
        self.check_goes_on(ring, partner, 0, 0)

    def test_with_an_item(self, ring: RingProducer, dies: Partner, partner: Partner) -> None:
        """The item that it had opened is gone."""
        steps.join(dies, ring)
        for _ in range(4):
            steps.send(ring, SIZE, SIZE)
        dies.run(steps.take, "ring", "one")
        dies.run(steps.take, "ring", "two")
        dies.tell("two", "release")
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
        dies.tell("item", "release")
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

    def test_after_a_close(self, ring: RingProducer, dies: Partner, pool: sa.MemoryPool, stream: sa.Stream) -> None:
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


def _sizes(there: There, name: str = "ring") -> list[int]:
    """Take everything; the sizes."""
    sizes = []
    for item in there.kept[name]:
        sizes.append(item.nbytes)
    there.kept.pop(name).close()
    return sizes


def test_a_consumer_that_is_closed_meanwhile(ring: RingProducer, partner: Partner) -> None:
    """All slots come back, whichever step its other thread is at."""
    for _ in range(10):
        steps.join(partner, ring)
        partner.begin(_close_meanwhile)
        with pytest.raises(ipc.PeerGoneError):
            while True:
                ring.put(b"x", SECONDS)
        partner.result()
        # What it has not opened waits for another consumer; all else has come back.
        assert eventually(lambda: ring.statistics().in_flight == len(ring._deliveries.unsent))
    waiting = ring.statistics().in_flight
    steps.join(partner, ring)
    partner.begin(_sizes)
    assert eventually(lambda: ring.statistics().free == 4)
    ring.close()
    assert partner.result() == [1] * waiting


def _close_meanwhile(there: There) -> None:
    ring: RingConsumer = there.kept.pop("ring")
    with soon(ring.close, 0.01), contextlib.suppress(sa.ClosedError, ipc.PeerGoneError, OSError):
        while True:
            ring.next().release()
    there.device.synchronize()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("how", ["close", "drop"])
def test_the_producer_dies_after_a_consumer_has_closed(
    another: Callable[[], Partner], device: sa.Device, stream: sa.Stream, count: int, how: str
) -> None:
    """The waits of the consumers' streams are released, whichever consumer closed before."""
    dies = another()
    streams = [stream, device.create_stream()][:count]
    rings = []
    dies.run(steps.make_ring)
    for one in streams:
        rings.append(steps.consumer_of(dies, one))
    dies.run(_hand_off_unfilled, count)
    items = [ring.next() for ring in rings]
    if how == "close":
        rings[0].close()
    else:
        del items[0]
        del rings[0]
        gc.collect()
        deferred_queue(device._session).work()
    dies.kill()
    assert all(executed(one) for one in streams)
    assert all(item.lost for item in items)
    for ring in rings:
        ring.close()


def _hand_off_unfilled(there: There, count: int) -> None:
    """The contents never come."""
    there.keep("gate", Gate(there.device)).hold(there.kept["stream"])
    for _ in range(count):
        there.kept["ring"].put(b"x")


@pytest.mark.simulated_only("a forked child of a process that uses CUDA")
def test_fork(joined: RingProducer, partner: Partner, fills: Partner, consumer: RingConsumer) -> None:
    """A child can use neither end, and takes nothing from its parent."""
    slot = joined.next()
    fills.run(steps.send_there, 1)

    uses: list[Callable[[], object]]
    uses = [joined.next, slot.hand_off, lambda: joined.put(b""), joined.close, consumer.next, consumer.close]
    assert in_a_child(lambda: each_raises(sd.ForkedProcessError, *uses)) == 0
    slot.fill(1)
    slot.hand_off()
    partner.run(steps.take)
    assert partner.run(holds_there, "item", 1)
    with consumer.next() as item:
        assert steps.all_of(item, 1)


class TestConsumer:
    @pytest.fixture
    def fills(self, filler: Partner) -> Iterator[Partner]:
        filler.run(steps.make_ring)
        yield filler
        filler.reset()

    def test_what_it_is(self, fills: Partner, consumer: RingConsumer, own: sa.Stream) -> None:
        assert (consumer.slots, consumer.slot_bytes, consumer.taken, consumer.held) == (4, SIZE, 0, 0)
        assert consumer.stream is own and not consumer.closed and "0 items" in repr(consumer)
        fills.run(steps.send_there, 3, 100)
        with consumer.next() as item:
            assert isinstance(item, RingItem)
            assert (item.nbytes, len(item), item.index) == (100, 100, 0)
            assert item.stream is own and item.location == own.device.location
            assert isinstance(item.owner, ipc.ImportedBuffer) and item.device_accessible and not item.lost
            assert steps.all_of(item, 3) and steps.all_of(item[10:20], 3)
            assert "100 bytes" in repr(item)
            assert (consumer.taken, consumer.held) == (1, 1)
        assert (consumer.taken, consumer.held) == (1, 0)
        with pytest.raises(sa.ClosedError):
            steps.all_of(item, 3)

    def test_closed_while_it_waits(self, fills: Partner, own: sa.Stream) -> None:
        consumer = steps.consumer_of(fills, own)
        with soon(consumer.close, 0.05), pytest.raises(sa.ClosedError):
            consumer.next()

    def test_closed_after_its_stream(self, fills: Partner, device: sa.Device) -> None:
        stream = device.create_stream()
        consumer = steps.consumer_of(fills, stream)
        fills.run(steps.send_there, 3)
        consumer.next()
        stream.close()
        consumer.close()
        device.synchronize()
        assert fills.run(steps.in_flight_there) == 0

    def test_stream_of_the_device_by_default(self, fills: Partner, device: sa.Device) -> None:
        with Ring.consumer(steps.connected(fills, steps.add_there)) as consumer:
            fills.result()
            assert consumer.stream.is_default
            fills.run(steps.send_there, 3)
            with consumer.next(SECONDS) as item:
                assert steps.all_of(item, 3)


def test_several_rings_are_waited_for_together(another: Callable[[], Partner], own: sa.Stream) -> None:
    """By their descriptors, which also tell the end of a producer; that of a channel tells when its ring is there."""
    producers = another(), another()
    consumers = []
    for producer in producers:
        producer.run(steps.make_ring)
        consumers.append(steps.consumer_of(producer, own))
    assert select.select(consumers, [], [], 0) == ([], [], [])
    for producer, consumer in zip(producers, consumers, strict=True):
        producer.run(steps.send_there, 3)
        assert select.select(consumers, [], [], SECONDS)[0] == [consumer]
        with consumer.next(0) as item:
            assert steps.all_of(item, 3)
    producers[0].kill()
    assert select.select(consumers, [], [], SECONDS)[0] == consumers[:1]
    each_raises(ipc.PeerGoneError, consumers[0].next)
    for consumer in consumers:
        consumer.close()
    each_raises(sa.ClosedError, consumers[1].fileno)


def test_one_loop_serves_several_rings(another: Callable[[], Partner], own: sa.Stream) -> None:
    """An iteration waits without blocking the loop, releases each item, and tells a close from a death."""
    closes, dies = another(), another()

    async def serve(producer: Partner, seen: list[int]) -> str:
        with steps.consumer_of(producer, own) as consumer:
            try:
                async for item in consumer:
                    assert consumer.held == 1 and steps.all_of(item, item.nbytes % 251)
                    seen.append(item.nbytes)
            except ipc.PeerGoneError:
                return "has died"
            return "has closed"

    async def both() -> tuple[str, str]:
        seen: tuple[list[int], list[int]] = [], []
        several = [asyncio.ensure_future(serve(one, to)) for one, to in zip((closes, dies), seen, strict=True)]
        await asyncio.sleep(0)
        for nbytes in (5, 6):
            for producer, to in zip((dies, closes), reversed(seen), strict=True):
                producer.run(steps.send_there, nbytes, nbytes)
                while nbytes not in to:
                    await asyncio.sleep(0.001)
        closes.run(steps.close_there)
        dies.kill()
        return await several[0], await several[1]

    for producer in (closes, dies):
        producer.run(steps.make_ring)
    assert asyncio.run(asyncio.wait_for(both(), SECONDS)) == ("has closed", "has died")


def test_a_wait_that_is_cancelled_takes_nothing(fills: Partner, consumer: RingConsumer) -> None:
    async def wait() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext_of(consumer), 0.4)  # longer than the check of the producer takes
        fills.run(steps.send_there, 3)
        assert steps.all_of(await anext_of(consumer), 3)

    async def anext_of(consumer: RingConsumer) -> Any:
        async for item in consumer:
            return item

    asyncio.run(wait())


def test_a_channel_is_readable_once_its_ring_is_there(fills: Partner, own: sa.Stream) -> None:
    mine, theirs = ipc.Channel.pair()
    assert select.select([mine], [], [], 0) == ([], [], [])
    with theirs:
        fills.begin(steps.add_there, fds=[theirs])  # type: ignore[list-item]
    assert select.select([mine], [], [], SECONDS)[0] == [mine]
    Ring.consumer(mine, stream=own).close()
    fills.result()


class TestProducerThatDies:
    """Complete items arrive; then an error notifies the consumer, within its timeout."""

    @pytest.mark.parametrize("how", ["kill", "exit"])
    def test_after_complete_items(self, fills: Partner, consumer: RingConsumer, own: sa.Stream, how: str) -> None:
        for value in (1, 2, 3):
            fills.run(steps.send_there, value)
        fills.run(synchronize)
        with consumer.next() as item:
            steps.end(fills, how)
            assert steps.all_of(item, 1) and not item.lost
        for value in (2, 3):
            with consumer.next() as item:
                assert steps.all_of(item, value) and not item.lost
        each_raises(ipc.PeerGoneError, consumer.next)

    def test_before_it_has_filled(self, fills: Partner, consumer: RingConsumer, own: sa.Stream) -> None:
        """A stream that waits for the contents is let go, and the item says that they are lost."""
        fills.run(steps.send_there, 1)
        fills.run(synchronize)
        fills.run(hold)
        fills.run(steps.send_there, 2)
        fills.run(steps.send_there, 3)
        first, second = consumer.next(), consumer.next()
        assert not first.lost and pending(own)
        fills.kill()
        assert executed(own)
        third = consumer.next()
        own.synchronize()
        assert eventually(lambda: (first.lost, second.lost, third.lost) == (False, True, True))
        assert steps.all_of(first, 1)
        for item in (second, first, third):
            item.release()
        each_raises(ipc.PeerGoneError, consumer.next)

    def test_while_the_consumer_waits(self, fills: Partner, consumer: RingConsumer) -> None:
        with soon(lambda: os.kill(fills.pid, 9), 0.05), pytest.raises(ipc.PeerGoneError):
            consumer.next()

    @pytest.fixture
    def whose_channel_lives(self, fills: Partner, own: sa.Stream) -> Iterator[RingConsumer]:
        """A copy of the producer's end in another process keeps nobody waiting."""
        mine, theirs = ipc.Channel.pair()
        with theirs:
            fills.begin(steps.add_there, fds=[theirs])  # type: ignore[list-item]
            with Ring.consumer(mine, stream=own) as consumer:
                fills.result()
                fills.run(steps.send_there, 1)
                yield consumer

    @pytest.mark.parametrize("timeout", [None, 0])
    def test_the_channel_lives(self, fills: Partner, whose_channel_lives: RingConsumer, timeout: float | None) -> None:
        fills.kill()
        with whose_channel_lives.next() as item:
            assert item.nbytes == SIZE
        with pytest.raises(ipc.PeerGoneError, match="died"):
            whose_channel_lives.next(timeout)

    def test_in_a_loop_while_the_channel_lives(self, fills: Partner, whose_channel_lives: RingConsumer) -> None:
        async def serve() -> None:
            async for _ in whose_channel_lives:
                fills.kill()

        with pytest.raises(ipc.PeerGoneError, match="died"):
            asyncio.run(asyncio.wait_for(serve(), SECONDS))

    def test_before_it_introduced_itself(self, another: Callable[[], Partner], own: sa.Stream) -> None:
        partner = another()
        mine = steps.connected(partner, steps.never_joins)
        with soon(partner.kill, 0.05), pytest.raises(ipc.PeerGoneError):
            Ring.consumer(mine, stream=own)
        assert mine.closed
