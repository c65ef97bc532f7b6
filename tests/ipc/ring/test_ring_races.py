"""Rings under threads, the collector and kills: slots come back, and no item comes twice."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from streamalloc.core.deferred import deferred_queue
from streamalloc.ipc import Ring, RingConsumer, RingProducer
from streamalloc.testing import Gate
from tests.ipc.ring.support import add_there, all_of, join, make_ring, send_there, take
from tests.processes import SECONDS, Partner, There, eventually, holds_there
from tests.support import executed


def _sizes(there: There, name: str = "ring") -> list[int]:
    """Take everything; the sizes."""
    sizes = []
    for item in there.kept[name]:
        sizes.append(item.nbytes)
    there.kept.pop(name).close()
    return sizes


class TestThreads:
    def test_a_consumer_that_is_closed_meanwhile(self, ring: RingProducer, partner: Partner) -> None:
        """All slots come back, whichever step its other thread is at."""
        for _ in range(10):
            join(partner, ring)
            partner.begin(_close_meanwhile)
            with pytest.raises(ipc.PeerGoneError):
                while True:
                    ring.put(b"x", SECONDS)
            partner.result()
            # What it has not opened waits for another consumer; all else has come back.
            assert eventually(lambda: ring.statistics().in_flight == len(ring._deliveries.unsent))
        waiting = ring.statistics().in_flight
        join(partner, ring)
        partner.begin(_sizes)
        assert eventually(lambda: ring.statistics().free == 4)
        ring.close()
        assert partner.result() == [1] * waiting


def _close_meanwhile(there: There) -> None:
    ring: RingConsumer = there.kept.pop("ring")
    timer = threading.Timer(0.01, ring.close)
    timer.start()
    try:
        while True:
            ring.next().release()
    except (sa.ClosedError, ipc.PeerGoneError, OSError):
        pass
    timer.join()
    there.device.synchronize()


class TestTheProducerDies:
    @pytest.mark.parametrize("count", [1, 2])
    @pytest.mark.parametrize("how", ["close", "drop"])
    def test_after_a_consumer_has_closed(
        self, another: Callable[[], Partner], device: sa.Device, stream: sa.Stream, count: int, how: str
    ) -> None:
        """The waits of the consumers' streams are released, whichever consumer closed before."""
        dies = another()
        streams = [stream, device.create_stream()][:count]
        rings = []
        dies.run(make_ring)
        for one in streams:
            mine, theirs = ipc.Channel.pair()
            with theirs:
                dies.begin(add_there, fds=[theirs])  # type: ignore[list-item]
            rings.append(Ring.consumer(mine, stream=one, timeout=SECONDS))
            dies.result()
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


class TestProcesses:
    @pytest.mark.simulated_only("a forked child of a process that uses CUDA")
    def test_fork(self, ring: RingProducer, partner: Partner, fills: Partner, consumer: RingConsumer) -> None:
        """A child can use neither end, and takes nothing from its parent."""
        join(partner, ring)
        slot = ring.next()
        fills.run(send_there, 1)

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
        partner.run(take)
        assert partner.run(holds_there, "item", 1)
        with consumer.next() as item:
            assert all_of(item, 1)
