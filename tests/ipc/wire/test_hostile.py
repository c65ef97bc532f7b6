"""An importer can write all memory that it shares with the exporter, at any time.

It can keep memory from being freed, as it can by not closing it, until it dies. It cannot crash the exporter, nor have
it free by its own words what another process has open, nor hold its streams for longer than it lives.
"""

import contextlib
import gc
import itertools
import mmap
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from streamalloc.ipc.importer.imports import imports_of
from streamalloc.ipc.wire import control_block
from streamalloc.ipc.wire.control_block import IMPORTERS, SLOTS, WORD
from tests.ipc.support import opened_by, shared_pool
from tests.support import end_what_was_dropped, eventually, executed, soon

pytestmark = [pytest.mark.simulated_only("several drivers in one process, which stand for several processes")]

BYTES = 4096
HALF = WORD // 2
VALUES = (0, 1, 2, 7, HALF - 1, HALF, HALF + 1, WORD - 2, WORD - 1)
STEPS = (-2, -1, 1, 2, HALF - 1, HALF)
EXPORTERS = ("generation", "announced", "ready", "lost", "pool", "hold")
IMPORTERS_OWN = ("opened", "closing", "closed")
REFUSED = (ValueError, sa.CudaError, sa.StaleDescriptorError, sa.StillImportedError, sa.ClosedError)
"""Errors that may reach users."""


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Stand-ins of other processes end with the test."""
    yield
    gc.collect()
    end_what_was_dropped()


class Words:
    """A control block as whoever has its file can write it."""

    def __init__(self, fd: ipc.Fd) -> None:
        self._map = mmap.mmap(fd.fileno(), 0)
        self.all = np.frombuffer(self._map, np.uint32)

    def place(self, kind: str, slot: int, importer: int = 0) -> int:
        begin, step = control_block._LAYOUT[kind]
        return (begin + step * slot + 4 * importer) // 4

    def spoil(self, chance: random.Random, kind: str, slot: int, importer: int = 0) -> None:
        at = self.place(kind, slot, importer)
        moved = int(self.all[at]) + chance.choice(STEPS)
        self.all[at] = chance.choice((*VALUES, *[moved % WORD] * len(VALUES)))

    def let_all_go(self, stream: sa.Stream) -> None:
        """End what a stream waits for, whatever that is: one of these is beyond it."""
        end = time.monotonic() + 5
        for quarter in itertools.cycle(range(4)):
            if stream.query() or time.monotonic() > end:
                return
            self.all[control_block._HEADER_BYTES // 4 :] = quarter << 30
            executed(stream, 0.005)


def live(seed: int) -> None:
    """An exporter shares and frees while an importer writes what it likes; that dies, and all is well again."""
    chance = random.Random(seed)
    exporter: Any = sd.checked(sd.simulated())
    honest, hostile = sd.simulated(), sd.simulated()
    device = sa.Device(0, driver=exporter)
    with contextlib.ExitStack() as ending:
        pool = ending.enter_context(shared_pool(device))
        streams = [ending.enter_context(device.create_stream()) for _ in range(2)]
        buffers = [pool.allocate(BYTES, chance.choice(streams)) for _ in range(3)]
        shared = [ipc.share(one, chance.choice(streams), hold=chance.random() < 0.3) for one in buffers]
        slots = [one.descriptor.slot for one in shared]
        kept = opened_by(honest, shared[0])
        words = Words(shared[0].handles[shared[0].descriptor.control_block])
        opened = [opened_by(hostile, one) for one in shared]
        own = imports_of(opened[0]._session).blocks[shared[0].descriptor.control_block].importer
        for _ in range(16):
            buffer, act = chance.choice(buffers), chance.randrange(8)
            with contextlib.suppress(*REFUSED):
                if act < 5:
                    kind = chance.choice((*EXPORTERS, *IMPORTERS_OWN, *IMPORTERS_OWN))
                    slot = chance.choice(slots) if chance.random() < 0.9 else chance.randrange(SLOTS)
                    importer = chance.choice((own, own, IMPORTERS - 1)) if kind in IMPORTERS_OWN else 0
                    words.spoil(chance, kind, slot, importer)
                elif act == 5 and not buffer.freed:
                    shared.append(ipc.share(buffer, chance.choice(streams)))
                elif act == 6:
                    buffer.free(chance.choice(streams), still_imported=chance.choice(("raise", "defer")))
                else:
                    opened.append(opened_by(hostile, chance.choice(shared)))
                    if chance.random() < 0.5:
                        opened.pop(chance.randrange(len(opened))).close()
        while opened:
            with contextlib.suppress(*REFUSED):
                opened.pop().close()
        shared.clear()
        # It dies: its lock goes with its driver.
        del hostile
        gc.collect()
        for buffer in [one for one in buffers if not one.freed]:
            buffer.free(still_imported="defer")
        with pool.allocate(BYTES, streams[0]) as after:
            ipc.share(after)

        def used() -> int:
            end_what_was_dropped()
            return pool.statistics().used

        assert eventually(lambda: used() == BYTES), (seed, used())
        assert all(executed(stream) for stream in streams), seed
        kept.close()
        assert eventually(lambda: not used()), (seed, used())
    wrong = [str(one) for one in exporter.hazards if one.kind == "double free"]
    assert not wrong, (seed, wrong)


class TestTheExporterGoesOn:
    @pytest.mark.parametrize("kind", ["announced", "ready"])
    def test_with_words_of_its_own(self, pool: sa.MemoryPool, stream: sa.Stream, device: sa.Device, kind: str) -> None:
        """It knows how far it is; whether the contents are there it does not ask importers either."""
        with pool.allocate(BYTES, stream) as buffer, device.create_stream() as other:
            shared = ipc.share(buffer)
            described = shared.descriptor
            words = Words(shared.handles[described.control_block])
            words.all[words.place(kind, described.slot)] = 7 if kind == "announced" else WORD - 7
            other.wait(stream)
            ipc.share(buffer, other)
            try:
                assert executed(other)
            finally:
                words.all[words.place("ready", described.slot)] = 100

    def test_once_an_importer_is_dead_that_has_put_its_words_back(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        buffer = pool.allocate(BYTES, stream)
        shared = ipc.share(buffer)
        hostile: Any = sd.simulated()
        opened = opened_by(hostile, shared)
        described = shared.descriptor
        block = imports_of(opened._session).blocks[described.control_block]
        words = Words(shared.handles[described.control_block])
        opened_at, closing_at = (words.place(kind, described.slot, block.importer) for kind in ("opened", "closing"))
        words.all[closing_at] = words.all[opened_at]
        buffer.free(still_imported="raise")
        assert not executed(stream, 0.01)
        words.all[opened_at] -= 1
        block._own.close()  # as its death does
        try:
            assert executed(stream)
        finally:
            words.all[words.place("closed", described.slot, block.importer)] = words.all[closing_at]


@pytest.mark.parametrize("seed", range(8))
def test_exporter_survives(seed: int) -> None:
    live(seed)


def ring_lives(seed: int) -> None:
    """A producer goes on while a consumer writes what it likes into the words of slots; that dies, and all is well."""
    chance = random.Random(seed)
    exporter: Any = sd.checked(sd.simulated())
    hostile: Any = sd.simulated()
    device = sa.Device(0, driver=exporter)
    with contextlib.ExitStack() as ending:
        pool = ending.enter_context(shared_pool(device))
        stream = ending.enter_context(device.create_stream())
        ring = ipc.Ring.producer(pool, 256, 4, stream=stream)
        mine, theirs = ipc.Channel.pair()
        made: list[ipc.RingConsumer] = []
        with soon(lambda: made.append(ipc.Ring.consumer(theirs, timeout=5, driver=hostile)), 0):
            ring.add(mine, 5)
        consumer = made.pop()
        block = consumer._items[0]._block
        words = Words(block.fd)
        items: list[ipc.RingItem] = []
        for _ in range(24):
            act = chance.randrange(8)
            with contextlib.suppress(*REFUSED, ConnectionError, TimeoutError, EOFError):
                if act < 3:
                    kind = chance.choice(("announced", "ready", *IMPORTERS_OWN, *IMPORTERS_OWN))
                    slot = chance.choice(consumer._items)._number
                    words.spoil(chance, kind, slot, block.importer if kind in IMPORTERS_OWN else 0)
                elif act < 5:
                    ring.put(np.zeros(256, np.uint8), 0.001)
                elif act < 7:
                    items.append(consumer.next(0.001))
                elif items:
                    items.pop().release()
        # It dies: its lock goes, and its connection.
        theirs.shutdown()
        block._own.close()
        with contextlib.suppress(ConnectionError, TimeoutError):
            ring.next(0.1).give_back()
        ring.close()

        def used() -> int:
            end_what_was_dropped()
            return pool.statistics().used

        assert eventually(lambda: not used()), (seed, used())
        assert executed(stream), seed
        with contextlib.suppress(*REFUSED):
            consumer.close()
        words.let_all_go(consumer.stream)
    wrong = [str(one) for one in exporter.hazards if one.kind == "double free"]
    assert not wrong, (seed, wrong)


@pytest.mark.parametrize("seed", [*range(4), 32])
def test_producer_survives(seed: int) -> None:
    ring_lives(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 2000, 50))
def test_both_survive_many(seed: int) -> None:
    for one in range(seed, seed + 50):
        live(one)
        ring_lives(one)
