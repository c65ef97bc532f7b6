"""Forks, threads, and driver calls that fail."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

import streamalloc.driver as sd
from streamalloc.ipc import RingConsumer, RingProducer
from tests.ipc.ring.support import (
    all_of,
    consume,
    join,
    send_there,
    take,
)
from tests.processes import SECONDS, Partner, holds_there
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
