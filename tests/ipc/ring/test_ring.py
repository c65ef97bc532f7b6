"""A stream of data between processes through slots that are shared once."""

from __future__ import annotations

import gc
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from streamalloc.core.deferred import deferred_queue
from streamalloc.ipc import Ring, RingConsumer, RingItem, RingProducer
from streamalloc.ipc.exporter.leases import leases_of
from streamalloc.ipc.ring.protocol import ANSWER, END, HELLO, MAGIC, PACKET, VERSION
from streamalloc.testing import Gate
from tests.ipc.support import (
    busy,
    hold,
    idle,
    make_pool,
    make_stream,
    no_more,
    release,
    shared_pool,
    state,
    synchronize,
)
from tests.processes import SECONDS, Partner, There, eventually, holds_there
from tests.support import executed, filled, pattern, pending, shows

SIZE = 64 * 1024


@pytest.fixture
def ring(pool: sa.MemoryPool, stream: sa.Stream) -> Iterator[RingProducer]:
    """Four slots, and nobody to take them."""
    with Ring.producer(pool, SIZE, 4, stream=stream) as ring:
        yield ring


# --- what partners do


def _join(there: There, name: str, on: str | None) -> None:
    channel = ipc.Channel.from_fd(there.came[0])
    stream = None if on is None else there.kept[on]
    there.keep(name, Ring.consumer(channel, stream=stream, timeout=SECONDS, driver=there.driver))


def _take(there: There, ring: str = "ring", name: str = "item", timeout: float | None = None) -> tuple[int, int]:
    item = there.keep(name, there.kept[ring].next(timeout))
    return item.index, item.nbytes


def _value(there: There, name: str = "item") -> int:
    value: int = there.kept[name]._value
    return value


def _give(there: There, name: str = "item", on: str | None = None) -> None:
    there.kept[name].release(None if on is None else there.kept[on])


def _shows(there: There, name: str, seed: int) -> bool:
    return shows(there.kept[name], seed)


def _close(there: There, name: str = "ring") -> None:
    there.kept.pop(name).close()


def _drop(there: There, name: str = "ring") -> None:
    del there.kept[name]
    gc.collect()


def _consume(there: There, name: str = "ring", pause: float = 0) -> list[int]:
    """Take everything; the sizes, once the contents were found to be those of that size."""
    sizes = []
    for item in there.kept[name]:
        assert shows(item, item.nbytes), item
        sizes.append(item.nbytes)
        time.sleep(pause)
    return sizes


def _copy_later(there: There, name: str = "item", target: str = "copy") -> None:
    """Queue a copy of an item to memory of one's own, and release it."""
    item = there.kept[name]
    pool = there.keep("own pool", shared_pool(there.device))
    there.keep(target, pool.allocate(item.nbytes, item.stream)).copy_from(item)
    item.release()


def _lost(there: There, name: str = "item") -> bool:
    item = there.kept[name]
    item.stream.synchronize()
    return bool(item.lost)


def _statistics(there: There, name: str = "ring") -> tuple[int, int]:
    return there.kept[name].taken, there.kept[name].held


# --- this end


def join(partner: Partner, ring: RingProducer, name: str = "ring", on: str | None = "stream") -> ipc.Channel:
    """Make a consumer in another process; the channel, which is the ring's."""
    mine, theirs = ipc.Channel.pair()
    with theirs:
        partner.begin(_join, name, on, fds=[theirs])  # type: ignore[list-item]
    ring.add(mine, SECONDS)
    partner.result()
    return mine


def send(ring: RingProducer, seed: int, nbytes: int | None = None) -> int:
    """Hand off an item with a pattern; which slot it is in."""
    with ring.next(SECONDS) as slot:
        if nbytes is not None:
            slot.nbytes_used = nbytes
        filled(slot[: slot.nbytes_used], seed)
        return slot.index


def _synchronize(there: There) -> None:
    """One of the points at which what was dropped ends."""
    there.device.synchronize()


def in_flight(ring: RingProducer, count: int) -> bool:
    """Whether so many items come to be in flight."""
    return eventually(lambda: ring.statistics().in_flight == count)


class TestItems:
    def test_every_size_in_order(self, ring: RingProducer, partner: Partner) -> None:
        join(partner, ring)
        partner.begin(_consume)
        sizes = [1, 2, 511, 512, 513, SIZE - 1, SIZE, 4096] * 5
        for size in sizes:
            send(ring, size, size)
        ring.close()
        assert partner.result() == sizes

    def test_put(self, ring: RingProducer, pool: sa.MemoryPool, stream: sa.Stream, partner: Partner) -> None:
        """Copies from wherever the bytes are."""
        join(partner, ring)
        partner.begin(_consume)
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
        assert partner.run(_take)[1] == 100
        assert partner.run(_shows, "item", 3)
        with ring.next() as slot:
            assert slot.nbytes_used == SIZE
        assert partner.run(_take, "ring", "other")[1] == SIZE

    def test_odd_sizes_do_not_overlap(self, pool: sa.MemoryPool, stream: sa.Stream, partner: Partner) -> None:
        with Ring.producer(pool, 1000, 3, stream=stream) as ring:
            assert (ring.slot_bytes, ring.slots) == (1000, 3)
            join(partner, ring)
            for seed in range(3):
                send(ring, seed)
            for seed in range(3):
                assert partner.run(_take, "ring", f"item {seed}")[1] == 1000
            assert all(partner.run(_shows, f"item {seed}", seed) for seed in range(3))

    def test_is_its_holder_s_only(self, ring: RingProducer, partner: Partner) -> None:
        join(partner, ring)
        with ring.next() as slot:
            filled(slot, 1)
        for use in (lambda: slot.address, lambda: slot.fill(1), lambda: slot[:10].fill(1), slot.hand_off):
            with pytest.raises(sa.ClosedError, match="handed on"):
                use()
        with pytest.raises(AttributeError):
            slot.owner = None  # type: ignore[misc]
        assert "handed on" in repr(slot)
        partner.run(_take)
        partner.run(_give)
        with pytest.raises(sa.ClosedError, match="handed on"):
            partner.run(_shows, "item", 1)

    def test_given_back_unsent(self, ring: RingProducer, partner: Partner) -> None:
        join(partner, ring)
        with pytest.raises(ZeroDivisionError), ring.next() as slot:
            slot.fill(1 // 0)
        with ring.next() as slot:
            slot.give_back()
            slot.give_back()
        assert ring.statistics() == (0, 0, 0, 4, 1)
        send(ring, 1)
        partner.run(_take)
        assert partner.run(_shows, "item", 1)
        with pytest.raises(TimeoutError):
            partner.run(_take, "ring", "none", 0)

    def test_by_hand(self, ring: RingProducer, partner: Partner) -> None:
        join(partner, ring)
        first, second = ring.next(), ring.next()
        assert first.index != second.index and ring.statistics().free == 2
        filled(second, 2)
        second.hand_off()
        filled(first, 1)
        first.hand_off()
        for seed in (2, 1):
            partner.run(_take, "ring", f"item {seed}")
            assert partner.run(_shows, f"item {seed}", seed)

    def test_cannot_be_copied(self, ring: RingProducer, partner: Partner) -> None:
        import pickle

        join(partner, ring)
        for thing in (ring, ring.next()):
            with pytest.raises(TypeError, match="copied or pickled"):
                pickle.dumps(thing)


class TestBackPressure:
    def test_waits_for_a_slot(self, ring: RingProducer, partner: Partner) -> None:
        join(partner, ring)
        for seed in range(4):
            send(ring, seed)
        assert ring.statistics() == (4, 0, 4, 0, 1)
        for timeout in (0, 0.02):
            with pytest.raises(TimeoutError, match=f"within {timeout:g} s: all 4"):
                ring.next(timeout)
        with pytest.raises(TimeoutError):
            ring.put(b"x", timeout=0.01)
        index, _ = partner.run(_take)
        with pytest.raises(TimeoutError):
            ring.next(0.01)
        partner.run(_give)
        partner.run(_give)
        assert ring.next(SECONDS).index == index
        assert partner.run(_statistics) == (1, 0)

    def test_whichever_is_released(self, ring: RingProducer, partner: Partner) -> None:
        """In another order than they were handed off."""
        join(partner, ring)
        where = [send(ring, seed) for seed in range(4)]
        for seed in range(4):
            partner.run(_take, "ring", f"item {seed}")
        for seed in (2, 0, 3):
            partner.run(_give, f"item {seed}")
            assert send(ring, seed) == where[seed]
        assert partner.run(_shows, "item 1", 1)
        assert in_flight(ring, 4)

    def test_slow_consumer(self, ring: RingProducer, partner: Partner) -> None:
        join(partner, ring)
        partner.begin(_consume, "ring", 0.002)
        for size in range(1, 21):
            send(ring, size, size)
        ring.close()
        assert partner.result() == list(range(1, 21))

    def test_slow_producer(self, ring: RingProducer, partner: Partner) -> None:
        join(partner, ring)
        partner.begin(_consume)
        for size in range(1, 11):
            time.sleep(0.002)
            send(ring, size, size)
        ring.close()
        assert partner.result() == list(range(1, 11))

    def test_consumer_waits(self, ring: RingProducer, partner: Partner) -> None:
        join(partner, ring)
        for timeout in (0, 0.02):
            with pytest.raises(TimeoutError):
                partner.run(_take, "ring", "item", timeout)
        partner.begin(_take)
        time.sleep(0.01)
        send(ring, 5)
        partner.result()
        assert partner.run(_shows, "item", 5)

    @pytest.mark.parametrize("timeout", [-1, float("nan")])
    def test_impossible_times(self, ring: RingProducer, partner: Partner, timeout: float) -> None:
        join(partner, ring)
        for seed in range(4):
            send(ring, seed)
        with pytest.raises(ValueError, match="timeout"):
            ring.next(timeout)
        with pytest.raises(ValueError, match="timeout"):
            ring.add(ipc.Channel.pair()[0], timeout)


class TestStreamOrder:
    def test_delayed_producer(self, ring: RingProducer, partner: Partner, gate: Gate) -> None:
        """The item is there before its contents; what reads it waits by itself."""
        join(partner, ring)
        send(ring, 1)
        partner.run(_take)
        assert partner.run(_shows, "item", 1)
        partner.run(_give)
        gate.hold(ring.stream)
        for seed in (2, 3):
            send_held(ring, seed)
            partner.run(_take, "ring", f"item {seed}", 5)
        assert partner.run(busy)
        gate.open()
        for seed in (2, 3):
            assert partner.run(holds_there, f"item {seed}", seed)
            assert not partner.run(_lost, f"item {seed}")

    def test_delayed_consumer(self, ring: RingProducer, partner: Partner) -> None:
        """The host gets the slot at once; its stream waits for the work of the consumer's."""
        join(partner, ring)
        where = send(ring, 1)
        ring.stream.synchronize()
        partner.run(_take)
        partner.run(hold)
        partner.run(_copy_later)
        spare = [ring.next(SECONDS) for _ in range(3)]
        with ring.next(SECONDS) as slot:
            assert slot.index == where
            slot.fill(9)
        assert pending(ring.stream)
        partner.run(release)
        assert executed(ring.stream)
        assert partner.run(_shows, "copy", 1)
        partner.run(_take, "ring", "next")
        assert partner.run(holds_there, "next", 9)
        for one in spare:
            one.give_back()

    def test_released_on_another_stream(self, ring: RingProducer, partner: Partner) -> None:
        """Then that one's work is waited for; also where the consumer closes meanwhile."""
        join(partner, ring)
        partner.run(make_stream, "other")
        for seed in range(4):
            send(ring, seed)
        partner.run(_take)
        partner.run(hold, "other")
        partner.run(_give, "item", "other")
        with ring.next(SECONDS) as slot:
            slot.fill(7)
        assert pending(ring.stream)
        partner.run(_close)
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
            join(partner, ring, on=None if kind == "default" else "stream")
            partner.begin(_consume)
            for size in range(1, 6):
                send(ring, size, size)
            ring.close()
            assert partner.result() == list(range(1, 6))

    def test_capture_is_refused(
        self, ring: RingProducer, partner: Partner, stream: sa.Stream, pool: sa.MemoryPool, gate: Gate
    ) -> None:
        """And goes on; nothing is lost by it."""
        join(partner, ring)
        with stream.capture("relaxed"):
            with pytest.raises(sa.CaptureError, match="capture"):
                ring.next().hand_off()
            with pytest.raises(sa.CaptureError), ring.next() as slot:
                assert slot.nbytes == SIZE
            with pytest.raises(sa.CaptureError):
                Ring.producer(pool, SIZE, stream=stream)
        gate.hold(stream)
        send_held(ring, 1)
        with pytest.raises(sa.CaptureError, match="capture"):
            partner.run(_take_captured)
        gate.open()
        partner.run(_take)
        assert partner.run(holds_there, "item", 1)
        with pytest.raises(sa.CaptureError, match="capture"):
            partner.run(_give_captured)
        partner.run(_give)
        assert in_flight(ring, 0)

    def test_synchronises_nothing(self, ring: RingProducer, partner: Partner, gate: Gate, machine: Any) -> None:
        join(partner, ring)
        gate.hold(ring.stream)
        for _ in range(4):
            with ring.next() as slot:
                slot.fill(1)
        assert not ring.stream.query()
        ring.close()
        assert not ring.stream.query()
        gate.open()


def send_held(ring: RingProducer, value: int) -> None:
    """Hand off an item on a stream that is held: a copy from ordinary memory would wait for it."""
    with ring.next(SECONDS) as slot:
        slot.fill(value)


def _take_captured(there: There) -> None:
    with there.stream.capture("relaxed"):
        there.kept["ring"].next()


def _give_captured(there: There) -> None:
    with there.stream.capture("relaxed"):
        there.kept["item"].release()


class TestIteration:
    def test_releases_the_one_before(self, ring: RingProducer, partner: Partner) -> None:
        join(partner, ring)
        for seed in range(3):
            send(ring, seed)
        partner.run(_iterate, 2)
        assert partner.run(_statistics) == (2, 1)
        partner.run(_iterate, 1)
        assert partner.run(_statistics) == (3, 1)
        ring.close()
        assert partner.run(_iterate, 1) == 0
        assert partner.run(_statistics) == (3, 0)
        with pytest.raises(EOFError, match="closed the ring"):
            partner.run(_take)
        with pytest.raises(EOFError):
            partner.run(_take)

    def test_released_by_hand_meanwhile(self, pool: sa.MemoryPool, stream: sa.Stream, partner: Partner) -> None:
        """The same object may stand for a later item by then."""
        with Ring.producer(pool, SIZE, 1, stream=stream) as ring:
            join(partner, ring)
            send(ring, 1)
            partner.run(_iterate, 1, True)
            send(ring, 2)
            partner.run(_take)
            ring.close()
            assert partner.run(_iterate, 1) == 0
            assert partner.run(_shows, "item", 2)


def _iterate(there: There, count: int, give: bool = False) -> int:
    """Take so many by iteration; how many there were."""
    taken = 0
    for item in there.kept["ring"]:
        taken += 1
        if give:
            item.release()
        if taken == count:
            break
    return taken


class TestSeveralConsumers:
    def test_share_the_work(self, ring: RingProducer, another: Callable[[], Partner]) -> None:
        partners = [another(), another()]
        for partner in partners:
            join(partner, ring)
            partner.begin(_consume, "ring", 0.001)
        for size in range(1, 41):
            send(ring, size, size)
        ring.close()
        taken = [partner.result() for partner in partners]
        assert sorted(taken[0] + taken[1]) == list(range(1, 41))
        # How much each gets is the machine's business, but nobody is left out.
        assert all(each and each == sorted(each) for each in taken)

    def test_who_has_the_fewest_is_next(self, ring: RingProducer, another: Callable[[], Partner]) -> None:
        slow, fast = another(), another()
        join(slow, ring)
        send(ring, 0)
        join(fast, ring)
        send(ring, 1)
        slow.run(_take)
        fast.run(_take)
        assert slow.run(_shows, "item", 0) and fast.run(_shows, "item", 1)
        for seed in (2, 3, 4):
            fast.run(_give)
            send(ring, seed)
            fast.run(_take)
            assert fast.run(_shows, "item", seed)
        with pytest.raises(TimeoutError):
            slow.run(_take, "ring", "none", 0)

    def test_two_in_one_process(self, ring: RingProducer, partner: Partner) -> None:
        """They are one importer, and two consumers all the same."""
        for name in ("one", "two"):
            join(partner, ring, name)
        for seed in range(4):
            send(ring, seed)
        for seed, name in enumerate(["one", "two", "one", "two"]):
            partner.run(_take, name, f"item {seed}")
            assert partner.run(_shows, f"item {seed}", seed)
        partner.run(_close, "one")
        assert in_flight(ring, 2)
        assert partner.run(_shows, "item 1", 1)

    def test_joins_while_it_runs(self, ring: RingProducer, another: Callable[[], Partner]) -> None:
        first, second = another(), another()
        join(first, ring)
        first.begin(_consume, "ring", 0.001)
        adding = threading.Thread(target=lambda: join(second, ring))
        adding.start()
        size = 0
        while adding.is_alive() or size < 20:
            size += 1
            send(ring, size, size)
        second.begin(_consume)
        for _ in range(10):
            size += 1
            send(ring, size, size)
        ring.close()
        adding.join()
        taken = [first.result(), second.result()]
        assert taken[1] and sorted(taken[0] + taken[1]) == list(range(1, size + 1))


class TestNobodyThere:
    def test_until_one_is_added(self, ring: RingProducer, partner: Partner) -> None:
        for use in (lambda: ring.next(0), ring.next, lambda: ring.put(b"x")):
            with pytest.raises(ipc.PeerGoneError, match="no consumer"):
                use()
        assert ring.statistics() == (0, 0, 0, 4, 0)
        join(partner, ring)
        send(ring, 1)
        partner.run(_take)
        assert partner.run(_shows, "item", 1)

    def test_what_it_had_not_taken_goes_to_others(self, ring: RingProducer, another: Callable[[], Partner]) -> None:
        leaves, stays = another(), another()
        join(leaves, ring)
        for seed in range(4):
            send(ring, seed)
        leaves.run(_take)
        leaves.run(_close)
        with pytest.raises(ipc.PeerGoneError):
            send(ring, 4)
        assert ring.statistics() == (4, 0, 3, 1, 0)
        join(stays, ring)
        assert ring.statistics() == (4, 3, 3, 1, 1)
        for seed in (1, 2, 3):
            stays.run(_take, "ring", f"item {seed}")
            assert stays.run(_shows, f"item {seed}", seed)

    def test_slot_stays_held(self, ring: RingProducer, another: Callable[[], Partner]) -> None:
        """Whoever fills it can hand it off when there is somebody again."""
        leaves, stays = another(), another()
        join(leaves, ring)
        slot = ring.next()
        filled(slot, 1)
        leaves.run(_close)
        with pytest.raises(ipc.PeerGoneError):
            slot.hand_off()
        join(stays, ring)
        slot.hand_off()
        stays.run(_take)
        assert stays.run(_shows, "item", 1)

    def test_in_a_block(self, ring: RingProducer, partner: Partner) -> None:
        join(partner, ring)
        with pytest.raises(ipc.PeerGoneError), ring.next() as slot:
            partner.run(_close)
            slot.fill(1)
        assert ring.statistics() == (0, 0, 0, 4, 0)

    def test_dropped(self, ring: RingProducer, partner: Partner) -> None:
        join(partner, ring)
        send(ring, 1)
        partner.run(_take)
        partner.run(_drop)
        partner.run(_synchronize)
        with pytest.raises(ipc.PeerGoneError):
            send(ring, 2)
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
        partner.begin(_consume)
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
            dies.begin(_never, fds=[theirs])  # type: ignore[list-item]
        thread = threading.Timer(0.05, dies.kill)
        thread.start()
        with pytest.raises(ipc.PeerGoneError):
            ring.add(mine, SECONDS)
        thread.join()
        assert mine.closed
        self.check_goes_on(ring, partner, 0, 0)

    def test_after_it_joined(self, ring: RingProducer, dies: Partner, partner: Partner) -> None:
        join(dies, ring)
        dies.kill()
        self.all_gone(ring)
        self.check_goes_on(ring, partner, 0, 0)

    def test_while_the_slot_is_filled(self, ring: RingProducer, dies: Partner, partner: Partner) -> None:
        join(dies, ring)
        with pytest.raises(ipc.PeerGoneError), ring.next() as slot:
            filled(slot, 1)
            dies.kill()
        self.check_goes_on(ring, partner, 0, 0)

    def test_between_packet_and_taking(self, ring: RingProducer, dies: Partner, partner: Partner) -> None:
        """What it never opened another one gets."""
        join(dies, ring)
        for _ in range(2):
            send(ring, SIZE, SIZE)
        dies.kill()
        self.all_gone(ring)
        self.check_goes_on(ring, partner, 2, 2)

    def test_with_an_item(self, ring: RingProducer, dies: Partner, partner: Partner) -> None:
        """What it had opened is gone."""
        join(dies, ring)
        for _ in range(4):
            send(ring, SIZE, SIZE)
        dies.run(_take, "ring", "one")
        dies.run(_take, "ring", "two")
        dies.run(_give, "two")
        dies.kill()
        self.all_gone(ring)
        self.check_goes_on(ring, partner, 4, 2)

    def test_while_its_stream_is_held(self, ring: RingProducer, dies: Partner, partner: Partner) -> None:
        """Our stream waits for its work, and is let go."""
        join(dies, ring)
        for _ in range(4):
            send(ring, SIZE, SIZE)
        ring.stream.synchronize()
        index, _ = dies.run(_take)
        dies.run(hold)
        dies.run(_give)
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
            dies.run(_take)
        threading.Timer(0.05, os.kill, (dies.pid, 9)).start()
        slots = []
        with pytest.raises(ipc.PeerGoneError):
            while True:
                slots.append(ring.next())
        for slot in slots:
            slot.give_back()
        self.check_goes_on(ring, partner, 4, 0)

    def test_a_slot_that_is_dropped_is_free_again(self, ring: RingProducer, partner: Partner) -> None:
        join(partner, ring)
        for _ in range(10):
            ring.next(0)
        assert ring.statistics().free == 4

    def test_others_go_on(self, ring: RingProducer, dies: Partner, partner: Partner) -> None:
        join(dies, ring)
        join(partner, ring)
        for size in range(1, 5):
            send(ring, size, size)
        dies.run(_take)
        dies.kill()
        partner.begin(_consume)
        for size in range(5, 30):
            send(ring, size, size)
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
        dies.run(_take)
        ring.close()
        stream.synchronize()
        assert pool.statistics().used
        dies.kill()
        assert eventually(lambda: pool.statistics().used == 0)
        assert eventually(lambda: not settled(stream))


def _never(there: There) -> None:
    channel = ipc.Channel.from_fd(there.came[0])
    channel.receive()
    time.sleep(SECONDS)


def settled(stream: sa.Stream) -> int:
    """How much waits for other processes, after another look."""
    stream.synchronize()
    return len(deferred_queue(stream._session))


# --- the other way round: the partner fills


def _make_ring(there: There, slots: int = 4, on: str = "stream") -> None:
    if "pool" not in there.kept:
        make_pool(there)
    there.keep("ring", Ring.producer(there.kept["pool"], SIZE, slots, stream=there.kept[on]))


def _add(there: There) -> None:
    there.kept["ring"].add(ipc.Channel.from_fd(there.came[0]), SECONDS)


def _send(there: There, value: int, nbytes: int = SIZE) -> None:
    with there.kept["ring"].next(SECONDS) as slot:
        slot.nbytes_used = nbytes
        slot.fill(value)


def _exit(there: There) -> None:
    os._exit(0)


@pytest.fixture(scope="module")
def filler(on_cuda: bool) -> Iterator[Partner]:
    """A process that lives as long as the tests here."""
    with Partner(on_cuda) as partner:
        yield partner


@pytest.fixture
def fills(another: Callable[[], Partner]) -> Partner:
    """A process with the producer of a ring."""
    partner = another()
    partner.run(_make_ring)
    return partner


@pytest.fixture
def own(device: sa.Device) -> Iterator[sa.Stream]:
    """A stream that nothing of another process is left on at the end."""
    with device.create_stream() as stream:
        yield stream


@pytest.fixture
def consumer(fills: Partner, own: sa.Stream) -> Iterator[RingConsumer]:
    """The other end, in this process."""
    with consumer_of(fills, own) as consumer:
        yield consumer


def consumer_of(partner: Partner, stream: sa.Stream) -> RingConsumer:
    mine, theirs = ipc.Channel.pair()
    with theirs:
        partner.begin(_add, fds=[theirs])  # type: ignore[list-item]
    consumer = Ring.consumer(mine, stream=stream, timeout=SECONDS)
    partner.result()
    return consumer


def all_of(item: sa.Memory, value: int) -> bool:
    target = np.zeros(item.nbytes, np.uint8)
    item.copy_to(target)
    item.stream.synchronize()
    return bool((target == value).all())


class TestConsumer:
    @pytest.fixture
    def fills(self, filler: Partner) -> Iterator[Partner]:
        filler.run(_make_ring)
        yield filler
        filler.reset()

    def test_what_it_is(self, fills: Partner, consumer: RingConsumer, own: sa.Stream) -> None:
        assert (consumer.slots, consumer.slot_bytes, consumer.taken, consumer.held) == (4, SIZE, 0, 0)
        assert consumer.stream is own and not consumer.closed and "0 items" in repr(consumer)
        fills.run(_send, 3, 100)
        with consumer.next() as item:
            assert isinstance(item, RingItem)
            assert (item.nbytes, len(item), item.index) == (100, 100, 0)
            assert item.stream is own and item.location == own.device.location
            assert isinstance(item.owner, ipc.ImportedBuffer) and item.device_accessible and not item.lost
            assert all_of(item, 3) and all_of(item[10:20], 3)
            assert "100 bytes" in repr(item)
            assert (consumer.taken, consumer.held) == (1, 1)
        assert (consumer.taken, consumer.held) == (1, 0)
        with pytest.raises(sa.ClosedError):
            all_of(item, 3)

    def test_writes_are_seen_by_nobody_else(self, fills: Partner, consumer: RingConsumer, own: sa.Stream) -> None:
        """An item can be worked on in place."""
        fills.run(_send, 3)
        with consumer.next() as item:
            item.fill(4)
            assert all_of(item, 4)

    def test_closed(self, fills: Partner, own: sa.Stream) -> None:
        consumer = consumer_of(fills, own)
        fills.run(_send, 3)
        item = consumer.next()
        consumer.close()
        consumer.close()
        assert consumer.closed and "closed" in repr(consumer)
        for use in (consumer.next, lambda: next(consumer), lambda: item.address):
            with pytest.raises(sa.ClosedError):
                use()
        item.release()

    def test_closed_while_it_waits(self, fills: Partner, own: sa.Stream) -> None:
        consumer = consumer_of(fills, own)
        threading.Timer(0.05, consumer.close).start()
        with pytest.raises(sa.ClosedError):
            consumer.next()

    def test_closed_after_its_stream(self, fills: Partner, device: sa.Device) -> None:
        stream = device.create_stream()
        consumer = consumer_of(fills, stream)
        fills.run(_send, 3)
        consumer.next()
        stream.close()
        consumer.close()
        device.synchronize()
        assert fills.run(_in_flight) == 0

    def test_stream_of_the_device_by_default(self, fills: Partner, device: sa.Device) -> None:
        mine, theirs = ipc.Channel.pair()
        with theirs:
            fills.begin(_add, fds=[theirs])  # type: ignore[list-item]
        with Ring.consumer(mine) as consumer:
            fills.result()
            assert consumer.stream.is_default
            fills.run(_send, 3)
            with consumer.next(SECONDS) as item:
                assert all_of(item, 3)


def _in_flight(there: There) -> int:
    there.stream.synchronize()
    return int(there.kept["ring"].statistics().in_flight)


class TestProducerThatDies:
    """What was complete arrives; then the consumer is told, within its time."""

    @pytest.mark.parametrize("how", ["kill", "exit"])
    def test_after_it_was_joined(self, fills: Partner, consumer: RingConsumer, how: str) -> None:
        end(fills, how)
        for _ in range(2):
            with pytest.raises(ipc.PeerGoneError):
                consumer.next(SECONDS)
            with pytest.raises(ipc.PeerGoneError):
                next(consumer)

    @pytest.mark.parametrize("how", ["kill", "exit"])
    def test_after_complete_items(self, fills: Partner, consumer: RingConsumer, own: sa.Stream, how: str) -> None:
        for value in (1, 2, 3):
            fills.run(_send, value)
        fills.run(synchronize)
        with consumer.next() as item:
            end(fills, how)
            assert all_of(item, 1) and not item.lost
        for value in (2, 3):
            with consumer.next() as item:
                assert all_of(item, value) and not item.lost
        with pytest.raises(ipc.PeerGoneError):
            consumer.next()

    def test_before_it_has_filled(self, fills: Partner, consumer: RingConsumer, own: sa.Stream) -> None:
        """A stream that waits for the contents is let go, and the item says that they are lost."""
        fills.run(_send, 1)
        fills.run(synchronize)
        fills.run(hold)
        fills.run(_send, 2)
        fills.run(_send, 3)
        first, second = consumer.next(), consumer.next()
        assert not first.lost and pending(own)
        fills.kill()
        assert executed(own)
        third = consumer.next()
        own.synchronize()
        assert eventually(lambda: (first.lost, second.lost, third.lost) == (False, True, True))
        assert all_of(first, 1)
        for item in (second, first, third):
            item.release()
        with pytest.raises(ipc.PeerGoneError):
            consumer.next()

    def test_while_the_consumer_waits(self, fills: Partner, consumer: RingConsumer) -> None:
        threading.Timer(0.05, os.kill, (fills.pid, 9)).start()
        with pytest.raises(ipc.PeerGoneError):
            consumer.next()

    def test_while_the_channel_lives(self, fills: Partner, own: sa.Stream) -> None:
        """A copy of the producer's end in another process keeps nobody waiting."""
        mine, theirs = ipc.Channel.pair()
        with theirs:
            fills.begin(_add, fds=[theirs])  # type: ignore[list-item]
            with Ring.consumer(mine, stream=own) as consumer:
                fills.result()
                fills.run(_send, 1)
                fills.kill()
                with consumer.next() as item:
                    assert item.nbytes == SIZE
                with pytest.raises(ipc.PeerGoneError, match="died"):
                    consumer.next()

    def test_before_it_introduced_itself(self, another: Callable[[], Partner], own: sa.Stream) -> None:
        partner = another()
        mine, theirs = ipc.Channel.pair()
        with theirs:
            partner.begin(_never, fds=[theirs])  # type: ignore[list-item]
        killing = threading.Timer(0.05, partner.kill)
        killing.start()
        with pytest.raises(ipc.PeerGoneError):
            Ring.consumer(mine, stream=own)
        killing.join()
        assert mine.closed

    def test_new_producer(self, fills: Partner, consumer: RingConsumer, own: sa.Stream, partner: Partner) -> None:
        fills.kill()
        with pytest.raises(ipc.PeerGoneError):
            consumer.next()
        partner.run(_make_ring)
        with consumer_of(partner, own) as other:
            partner.run(_send, 5)
            with other.next() as item:
                assert all_of(item, 5)


def end(partner: Partner, how: str) -> None:
    if how == "kill":
        partner.kill()
    else:
        partner.begin(_exit)
        partner.ended()


class TestClose:
    def test_producer_first(
        self, ring: RingProducer, partner: Partner, pool: sa.MemoryPool, stream: sa.Stream, gate: Gate
    ) -> None:
        """All that was handed off still arrives, filled by then or not; then the memory is free."""
        join(partner, ring)
        gate.hold(stream)
        for value in range(3):
            send_held(ring, value)
        ring.close()
        ring.close()
        assert ring.closed and "closed" in repr(ring)
        gate.open()
        for value in range(3):
            partner.run(_take, "ring", f"item {value}")
            assert partner.run(holds_there, f"item {value}", value)
        with pytest.raises(EOFError):
            partner.run(_take)
        assert pool.statistics().used
        partner.run(_close)
        assert eventually(lambda: pool.statistics().used == 0 and not settled(stream))

    def test_consumer_first(self, ring: RingProducer, partner: Partner, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        join(partner, ring)
        for seed in range(3):
            send(ring, seed)
        partner.run(_take)
        partner.run(_close)
        ring.close()
        assert eventually(lambda: pool.statistics().used == 0 and not settled(stream))

    def test_consumer_with_work_left(
        self, ring: RingProducer, partner: Partner, pool: sa.MemoryPool, stream: sa.Stream
    ) -> None:
        """The memory is not free before its stream has done that."""
        join(partner, ring)
        send(ring, 1)
        stream.synchronize()
        partner.run(_take)
        partner.run(hold)
        partner.run(_copy_later)
        partner.run(_close)
        ring.close()
        assert pending(stream)
        with sa.MemoryPool(stream.device) as other, other.allocate(64, stream) as after:
            after.fill(1)
        partner.run(release)
        assert executed(stream)
        assert partner.run(_shows, "copy", 1)
        assert eventually(lambda: pool.statistics().used == 0)

    def test_nobody_ever_came(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        Ring.producer(pool, SIZE, stream=stream).close()
        assert pool.statistics().used == 0 and not settled(stream)

    def test_in_a_block(self, ring: RingProducer, partner: Partner) -> None:
        join(partner, ring)
        slot = ring.next()
        ring.close()
        for use in (lambda: slot.address, slot.hand_off, ring.next, lambda: ring.put(b"")):
            with pytest.raises(sa.ClosedError):
                use()
        slot.give_back()
        with pytest.raises(sa.ClosedError):
            ring.add(ipc.Channel.pair()[0])

    def test_while_it_waits(self, ring: RingProducer, partner: Partner) -> None:
        join(partner, ring)
        for seed in range(4):
            send(ring, seed)
        threading.Timer(0.02, ring.close).start()
        with pytest.raises(sa.ClosedError):
            ring.next()

    def test_dropped(self, pool: sa.MemoryPool, stream: sa.Stream, partner: Partner) -> None:
        """As if it were closed, at one of the next points of work: nothing refers back to it but what is in use."""
        ring = Ring.producer(pool, SIZE, 2, stream=stream)
        join(partner, ring)
        send(ring, 1)
        slot = ring.next()
        del ring
        with pytest.raises(sa.ClosedError):
            slot.hand_off()
        slot.give_back()
        partner.run(_take)
        assert partner.run(_shows, "item", 1)
        stream.synchronize()
        with pytest.raises(EOFError):
            partner.run(_take)

    def test_stream_first(self, pool: sa.MemoryPool, device: sa.Device, partner: Partner) -> None:
        stream = device.create_stream()
        ring = Ring.producer(pool, SIZE, 2, stream=stream)
        join(partner, ring)
        send(ring, 1)
        slot = ring.next()
        stream.close()
        with pytest.raises(sa.ClosedError):
            slot.hand_off()
        ring.close()
        partner.run(_take)
        assert partner.run(_shows, "item", 1)
        partner.run(_close)
        device.synchronize()
        assert eventually(lambda: pool.statistics().used == 0)

    def test_leaves_nothing(
        self, pool: sa.MemoryPool, stream: sa.Stream, partner: Partner, device: sa.Device, gate: Gate
    ) -> None:
        """Descriptors, mappings, threads, memory and words, on both sides."""
        leases = leases_of(device._session)

        def round() -> None:
            with Ring.producer(pool, SIZE, 4, stream=stream) as ring:
                join(partner, ring)
                for seed in range(5):
                    send(ring, seed)
                    partner.run(_take)
                    partner.run(_give)
                send(ring, 6)
                join(partner, ring, "other")
                send(ring, 7)
                partner.run(_close)
            partner.run(_close, "other")
            assert eventually(lambda: pool.statistics().used == 0 and not settled(stream))

        with Ring.producer(pool, SIZE, 1, stream=stream) as ring:
            # Once there was something to wait for, a thread watches over the producer for good.
            join(partner, ring)
            gate.hold(stream)
            send_held(ring, 1)
            partner.run(_take)
            gate.open()
            partner.run(_close)
        round()
        before, there, free = state(), partner.run(_state), words(leases)
        for _ in range(10):
            round()
        assert no_more(before, state()) and no_more(there, partner.run(_state)) and words(leases) == free


def words(leases: Any) -> int:
    """How many slots of boards can be taken."""
    leases.take().release()
    return int(len(leases._free) + sum(lease.quiet() for lease in leases.leaving))


def _state(there: There) -> Any:
    there.kept.pop("item", None)
    there.device.synchronize()
    return state()


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
        assert partner.run(_take)[1] == 0

    def test_most_slots(self, pool: sa.MemoryPool, stream: sa.Stream, partner: Partner) -> None:
        """As many hand-offs fit the connection of a consumer that does nothing."""
        with Ring.producer(pool, 1, 256, stream=stream) as ring:
            join(partner, ring)
            for value in range(256):
                ring.put(bytes([value]))
            ring.close()
            assert partner.run(_bytes) == list(range(256))


def _bytes(there: There) -> list[int]:
    target = np.zeros(1, np.uint8)
    found = []
    for item in there.kept["ring"]:
        item.copy_to(target)
        item.stream.synchronize()
        found.append(int(target[0]))
    return found


class TestStrangers:
    """What comes is not of a ring, or damaged."""

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
        partner.run(_take)
        assert partner.run(_shows, "item", 1)

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
            partner.run(_take)
        with pytest.raises((sa.ClosedError, ipc.PeerGoneError)):
            partner.run(_take)
        with pytest.raises(ipc.PeerGoneError):
            send(ring, 1)

    def test_the_same_slot_twice(self, ring: RingProducer, partner: Partner) -> None:
        channel = join(partner, ring)
        where = send(ring, 1)
        partner.run(_take)
        # The words of a slot go on from ring to ring.
        channel.send(PACKET.pack(1, where, 1, partner.run(_value) + 1, 10))
        with pytest.raises(ipc.ProtocolError):
            partner.run(_take)


def refused(partner: Partner, data: bytes, handles: tuple[ipc.Fd, ...]) -> bool:
    mine, theirs = ipc.Channel.pair()
    mine.send(data, handles)
    partner.begin(_join, "refused", "stream", fds=[theirs])  # type: ignore[list-item]
    theirs.close()
    try:
        partner.result()
    except (ValueError, sa.CudaError):
        with pytest.raises(ipc.PeerGoneError):
            mine.receive(timeout=SECONDS)
        return True
    finally:
        mine.close()
    partner.run(_close, "refused")
    return False


class TestProcesses:
    @pytest.mark.simulated_only("a forked child of a process that uses CUDA")
    def test_fork(self, ring: RingProducer, partner: Partner, fills: Partner, consumer: RingConsumer) -> None:
        """A child can use neither end, and takes nothing from its parent."""
        join(partner, ring)
        slot = ring.next()
        fills.run(_send, 1)

        def refuses(use: Callable[[], object]) -> bool:
            try:
                use()
            except sd.ForkedProcessError:
                return True
            return False

        child = os.fork()
        if not child:
            uses: list[Callable[[], object]]
            uses = [ring.next, slot.hand_off, lambda: ring.put(b""), ring.close, consumer.next, consumer.close]
            os._exit(0 if all(refuses(use) for use in uses) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        slot.fill(1)
        slot.hand_off()
        partner.run(_take)
        assert partner.run(holds_there, "item", 1)
        with consumer.next() as item:
            assert all_of(item, 1)

    def test_threads_share_a_producer(self, ring: RingProducer, partner: Partner) -> None:
        join(partner, ring)
        partner.begin(_consume)

        def fill(first: int) -> None:
            with ring.stream.device.create_stream() as stream:
                stream.synchronize()
            for size in range(first, 40, 4):
                with ring.next(SECONDS) as slot:
                    slot.nbytes_used = size
                    filled(slot[:size], size)

        threads = [threading.Thread(target=fill, args=(first,)) for first in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ring.close()
        assert sorted(partner.result()) == list(range(1, 40))


class TestFaults:
    """Every driver call of a side fails in turn: the error is the one injected, and a second try succeeds."""

    def test_producer(self, machine: Any, partner: Partner) -> None:
        def scenario(device: sa.Device) -> Iterator[None]:
            with device.create_stream() as stream, shared_pool(device) as pool:
                yield
                ring = again(lambda: Ring.producer(pool, SIZE, 1, stream=stream))
                join(partner, ring)
                for seed in range(2):
                    again(partial(send, ring, seed))
                    partner.run(_take)
                    assert partner.run(_shows, "item", seed)
                    partner.run(hold)
                    partner.run(_give)
                    again(partial(ring.next, SECONDS)).give_back()
                    partner.run(release)
                    # So that the next round makes the same calls each time.
                    assert partner.run(idle)
                partner.run(_close)
                again(ring.close)
                yield
                stream.synchronize()
                assert eventually(lambda: pool.statistics().used == 0)

        sweep(machine, scenario)

    def test_consumer(self, machine: Any, fills: Partner) -> None:
        def scenario(device: sa.Device) -> Iterator[None]:
            with device.create_stream() as stream:
                yield
                consumer = again(lambda: joined(fills, stream))
                for value in range(2):
                    fills.run(hold)
                    fills.run(_send, value)
                    item = again(consumer.next)
                    fills.run(release)
                    assert again(partial(all_of, item, value))
                    again(item.release)
                again(consumer.close)
                yield
                stream.synchronize()
                assert fills.run(_in_flight) == 0

        def joined(partner: Partner, stream: sa.Stream) -> RingConsumer:
            try:
                return consumer_of(partner, stream)
            except sa.CudaError:
                with pytest.raises(ipc.PeerGoneError):
                    partner.result()
                raise

        sweep(machine, scenario)


def again(step: Callable[[], Any]) -> Any:
    """Do something that works the second time if it does not the first."""
    try:
        return step()
    except sa.CudaError as error:
        assert error.name == "CUDA_ERROR_UNKNOWN"
        return step()


def sweep(machine: Any, scenario: Callable[[sa.Device], Iterator[None]]) -> None:
    """Fail each call in turn that a scenario makes between its two stops."""
    kept = []

    def run(fault: int) -> tuple[list[int], list[str]]:
        driver = sd.faulty(machine, fault, result="CUDA_ERROR_UNKNOWN")
        device = sa.Device(0, driver=driver)
        kept.append(device)
        return [len(driver.seen) for _ in scenario(device)], driver.seen

    (first, last), seen = run(10**9)
    for number in range(first, last):
        # A context that was pushed can be popped.
        if seen[number] != "cuCtxPopCurrent":
            run(number + 1)
