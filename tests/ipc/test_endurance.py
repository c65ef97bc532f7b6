"""Threads, the collector, signals and kills, all at once; and what a long life leaves behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

import streamalloc as sa
from streamalloc import ipc
from streamalloc.core.deferred import deferred_queue, work
from streamalloc.ipc.importer.imports import imports_of
from streamalloc.pool.ending import PoolEnd
from tests.ipc.support import at_once, hold, make_buffer, make_pool
from tests.processes import Partner, There, eventually
from tests.support import executed

SIZE = 4096


def unfinished(device: sa.Device) -> list[str]:
    """Items that still wait after a point of work: some of it ends in threads, once the devices are idle.

    Without pools, which wait for buffers that interrupts of other tests have lost.
    """
    later = deferred_queue(device._session)
    work(device._session)
    items = [*later.submitted, *later._new, *later._waiting, *later._working.values()]
    return [type(item).__name__ for item in items if not isinstance(item, PoolEnd)]


class TestThreadsAndTheCollector:
    @pytest.mark.usefixtures("collecting")
    def test_twelve_that_share_and_drop(self, pool: sa.MemoryPool, device: sa.Device) -> None:
        """Shared buffers in garbage cycles: their finalisers run anywhere, also where locks are held."""

        def run(number: int) -> None:
            with device.create_stream() as stream:
                for turn in range(150):
                    buffer = pool.allocate(SIZE, stream)
                    shared = ipc.share(buffer, hold=turn % 3 == 0)
                    cycle: list[Any] = [buffer, shared]
                    cycle.append(cycle)
                    del buffer, shared, cycle
                    if turn % 5 == number % 5:
                        stream.synchronize()

        assert at_once(12, run) == []
        gc.collect()
        assert eventually(lambda: pool.statistics().used == 0)
        assert eventually(lambda: not unfinished(device)), unfinished(device)


class TestALongLife:
    def test_pools_that_their_owner_closes(self, pool: sa.MemoryPool, stream: sa.Stream, partner: Partner) -> None:
        """An importer keeps what is open, and little else."""
        importer = imports_of(stream._session)
        most = 0
        for turn in range(30):
            partner.run(make_pool)
            partner.run(make_buffer, "buffer", 1, SIZE)
            data, fds = partner.shared("buffer")
            with ipc.open(data, fds, stream=stream):
                pass
            stream.synchronize()
            partner.run(_close_pool)
            if turn > 5:
                most = max(most, len(importer.pools))
        assert most <= 4
        assert eventually(lambda: not unfinished(stream.device)), unfinished(stream.device)

    def test_opening_waits_for_no_stream(
        self, device: sa.Device, stream: sa.Stream, another: Callable[[], Partner]
    ) -> None:
        """A stream waits for one exporter, another has died: memory of a third is opened all the same."""
        dead, late, third = another(), another(), another()
        for owner in (dead, late, third):
            owner.run(make_pool)
            owner.run(make_buffer, "buffer", 1, SIZE)
        ipc.open(*dead.shared("buffer"), stream=stream).close()
        stream.synchronize()
        with device.create_stream() as waiting:
            late.run(hold)
            late.run(_fill)
            opened = ipc.open(*late.shared("buffer"), stream=waiting)
            assert not waiting.query()
            dead.kill()
            data, fds = third.shared("buffer")
            assert at_once(1, lambda _: ipc.open(data, fds, stream=stream, driver=device.driver).close()) == []
            assert not waiting.query()
            late.kill()
            assert executed(waiting)
            opened.close()


def _close_pool(there: There) -> None:
    there.kept.pop("buffer").close()
    there.stream.synchronize()
    there.kept.pop("pool").close()
    there.stream.synchronize()


def _fill(there: There) -> None:
    there.kept["buffer"].fill(9)
