"""Forks, threads, and driver calls that fail."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from streamalloc.ipc import Ring, RingConsumer, RingProducer
from tests.ipc.ring.support import (
    SIZE,
    again,
    all_of,
    close_there,
    consume,
    consumer_of,
    give_there,
    in_flight_there,
    join,
    send,
    send_there,
    shows_there,
    sweep,
    take,
)
from tests.ipc.support import (
    hold,
    idle,
    release,
    shared_pool,
)
from tests.processes import SECONDS, Partner, eventually, holds_there
from tests.support import filled


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

    def test_threads_share_a_producer(self, ring: RingProducer, partner: Partner) -> None:
        join(partner, ring)
        partner.begin(consume)

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
                    partner.run(take)
                    assert partner.run(shows_there, "item", seed)
                    partner.run(hold)
                    partner.run(give_there)
                    again(partial(ring.next, SECONDS)).give_back()
                    partner.run(release)
                    # So that the next round makes the same calls each time.
                    assert partner.run(idle)
                partner.run(close_there)
                again(ring.close)
                yield
                again(stream.synchronize)  # the fault, where this run made fewer calls than the first
                assert eventually(lambda: pool.statistics().used == 0)

        sweep(machine, scenario)

    def test_consumer(self, machine: Any, fills: Partner) -> None:
        def scenario(device: sa.Device) -> Iterator[None]:
            with device.create_stream() as stream:
                yield
                consumer = again(lambda: joined(fills, stream))
                for value in range(2):
                    fills.run(hold)
                    fills.run(send_there, value)
                    item = again(consumer.next)
                    fills.run(release)
                    assert again(partial(all_of, item, value))
                    again(item.release)
                again(consumer.close)
                yield
                again(stream.synchronize)
                assert fills.run(in_flight_there) == 0

        def joined(partner: Partner, stream: sa.Stream) -> RingConsumer:
            try:
                return consumer_of(partner, stream)
            except sa.CudaError:
                with pytest.raises(ipc.PeerGoneError):
                    partner.result()
                raise

        sweep(machine, scenario)
