"""The consumer in this process, and a producer that dies."""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import streamalloc as sa
from streamalloc import ipc
from streamalloc.ipc import Ring, RingConsumer, RingItem
from tests.ipc.ring import support as steps
from tests.ipc.ring.support import SIZE
from tests.ipc.support import hold, synchronize
from tests.processes import SECONDS, Partner, eventually
from tests.support import executed, pending


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
        threading.Timer(0.05, consumer.close).start()
        with pytest.raises(sa.ClosedError):
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
        mine, theirs = ipc.Channel.pair()
        with theirs:
            fills.begin(steps.add_there, fds=[theirs])  # type: ignore[list-item]
        with Ring.consumer(mine) as consumer:
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
    with pytest.raises(ipc.PeerGoneError):
        consumers[0].next()
    for consumer in consumers:
        consumer.close()
    with pytest.raises(sa.ClosedError):
        consumers[1].fileno()


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
        with pytest.raises(ipc.PeerGoneError):
            consumer.next()

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
        with pytest.raises(ipc.PeerGoneError):
            consumer.next()

    def test_while_the_consumer_waits(self, fills: Partner, consumer: RingConsumer) -> None:
        threading.Timer(0.05, os.kill, (fills.pid, 9)).start()
        with pytest.raises(ipc.PeerGoneError):
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
    def test_while_the_channel_lives(
        self, fills: Partner, whose_channel_lives: RingConsumer, timeout: float | None
    ) -> None:
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
        mine, theirs = ipc.Channel.pair()
        with theirs:
            partner.begin(steps.never_joins, fds=[theirs])  # type: ignore[list-item]
        killing = threading.Timer(0.05, partner.kill)
        killing.start()
        with pytest.raises(ipc.PeerGoneError):
            Ring.consumer(mine, stream=own)
        killing.join()
        assert mine.closed
