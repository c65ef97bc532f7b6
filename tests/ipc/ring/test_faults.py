"""Forks, threads, and driver calls that fail."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

import streamalloc.driver as sd
from streamalloc.ipc import RingConsumer, RingProducer
from tests.ipc.ring.support import (
    all_of,
    join,
    send_there,
    take,
)
from tests.processes import Partner, holds_there


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
