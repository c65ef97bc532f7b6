"""A thousand rounds of sharing, opening and closing leave both processes as they were."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import streamalloc as sa
from streamalloc import ipc, vmm
from tests.ipc.support import (
    POSIX,
    make_buffer,
    make_growable,
    make_pool,
    no_more,
    shared_pool,
    state,
    state_there,
)
from tests.processes import SECONDS, Partner, There, eventually
from tests.support import MiB, filled, shows


@pytest.fixture
def rounds(on_cuda: bool) -> int:
    """A real driver takes its time to map and unmap."""
    return 200 if on_cuda else 1000


@pytest.fixture
def unchanged(partner: Partner) -> Iterator[Callable[[Callable[[int], None], int], None]]:
    """Runs rounds, and holds both processes to what they had open after the first few.

    The first rounds may meet a slot table of this process that the partner has not opened before, once for each table.
    """

    def unchanged(run: Callable[[int], None], rounds: int) -> None:
        for number in range(8):
            run(number)
        for last in (False, False, True):
            before, before_there = state(), partner.run(state_there)
            for number in range(rounds):
                run(number)
            with contextlib.nullcontext() if last else contextlib.suppress(AssertionError):
                assert no_more(before, state()) and no_more(before_there, partner.run(state_there))
                return

    yield unchanged


Unchanged = Callable[[Callable[[int], None], int], None]


@pytest.mark.unchecked("counts descriptors, of which the checker has some")
class TestRounds:
    def test_of_a_new_buffer_each(
        self, unchanged: Unchanged, partner: Partner, pool: sa.MemoryPool, stream: sa.Stream, rounds: int
    ) -> None:
        def one(number: int) -> None:
            buffer = pool.allocate(4096, stream)
            buffer.fill(number % 256)
            opened = partner.give(buffer, "it")
            if number % 3:
                opened.close()
            else:
                opened.drop()
            buffer.free()

        unchanged(one, rounds)
        assert eventually(lambda: pool.statistics().used == 0)
        assert pool.statistics().reserved == 32 * MiB

    def test_of_one_buffer(
        self, unchanged: Unchanged, partner: Partner, pool: sa.MemoryPool, stream: sa.Stream, rounds: int
    ) -> None:
        with pool.allocate(4096, stream) as buffer:
            unchanged(lambda number: partner.give(buffer, "it").close(), rounds)

    def test_that_free_while_it_is_open(
        self, unchanged: Unchanged, partner: Partner, pool: sa.MemoryPool, stream: sa.Stream
    ) -> None:
        def one(number: int) -> None:
            with pool.allocate(4096, stream) as buffer:
                opened = partner.give(buffer, "it")
            opened.close()

        unchanged(one, 200)
        assert eventually(lambda: pool.statistics().used == 0)

    def test_of_a_new_pool_each(
        self, unchanged: Unchanged, partner: Partner, device: sa.Device, stream: sa.Stream
    ) -> None:
        """The importer keeps a pool for as long as it runs, as the driver does; its descriptor it does not keep."""
        before, there = state(), partner.run(state_there)
        for number in range(20):
            with shared_pool(device) as pool, pool.allocate(4096, stream) as buffer:
                filled(buffer, number)
                opened = partner.give(buffer, "it")
                assert opened.shows(number)
                opened.close()
            stream.synchronize()
        assert state().descriptors <= before.descriptors + 4
        assert partner.run(state_there).descriptors <= there.descriptors + 4 + 20

    def test_of_mapped_memory(
        self, unchanged: Unchanged, partner: Partner, device: sa.Device, stream: sa.Stream
    ) -> None:
        def one(number: int) -> None:
            with vmm.GrowableBuffer(device, 8 * MiB, MiB, handle_types=POSIX, stream=stream) as buffer:
                partner.give(buffer, "it").close()
                buffer.grow(2 * MiB)
                partner.give(buffer, "it").close()

        free = device.memory_info().free
        unchanged(one, 100)
        assert eventually(lambda: device.memory_info().free == free)

    def test_of_one_range(self, unchanged: Unchanged, partner: Partner, device: sa.Device) -> None:
        with vmm.GrowableBuffer(device, 8 * MiB, 3 * MiB, handle_types=POSIX) as buffer:

            def one(number: int) -> None:
                opened = partner.give(buffer[number : number + 100], "it")
                opened.close() if number % 2 else opened.drop()

            unchanged(one, 200)

    def test_of_events(self, unchanged: Unchanged, partner: Partner, device: sa.Device, stream: sa.Stream) -> None:
        def one(number: int) -> None:
            with device.create_event(interprocess=True) as event:
                stream.record(event)
                partner.give(event, "it").close()

        unchanged(one, 200)

    def test_of_opening_here(self, unchanged: Unchanged, partner: Partner, stream: sa.Stream, rounds: int) -> None:
        partner.run(make_pool)
        partner.run(make_buffer, "buffer", 1)
        partner.run(make_growable, "growable", 1, MiB)

        def one(number: int) -> None:
            for kind in ("buffer", "growable"):
                partner.take(kind, stream).close()

        unchanged(one, rounds // 5)

    def test_of_stale_descriptors(
        self, unchanged: Unchanged, partner: Partner, pool: sa.MemoryPool, stream: sa.Stream
    ) -> None:
        def one(number: int) -> None:
            with pool.allocate(4096, stream) as buffer:
                shared = ipc.share(buffer)
            with pytest.raises(sa.StaleDescriptorError):
                partner.open(shared, fds=shared.fds)

        unchanged(one, 100)

    def test_of_channels(self, unchanged: Unchanged, partner: Partner, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        """Each with a channel of its own, on which the handles go along again."""

        def one(number: int) -> None:
            mine, theirs = ipc.Channel.pair()
            with mine, theirs, pool.allocate(4096, stream) as buffer:
                ipc.send(mine, buffer, timeout=SECONDS)
                ipc.receive(theirs, stream=stream, timeout=SECONDS).close()

        unchanged(one, 200)


class TestProcesses:
    def test_that_come_and_go(self, another: Callable[[], Partner], pool: sa.MemoryPool, stream: sa.Stream) -> None:
        """The exporter has nothing of theirs once they are gone, whether they closed what they had or not."""
        with pool.allocate(4096, stream) as buffer:
            filled(buffer, 1)
            states = []
            for number in range(8):
                one = another()
                opened = one.give(buffer)
                assert opened.shows(1)
                if number % 2:
                    opened.close()
                one.kill()
                states.append(state())
            assert states[-1].descriptors <= states[2].descriptors + 1
            assert states[-1].mappings <= states[2].mappings + 1
            assert eventually(lambda: state().threads <= states[2].threads + 1)

    def test_that_own_memory_and_go(self, another: Callable[[], Partner], stream: sa.Stream) -> None:
        """An importer that outlives many exporters."""
        states = []
        for number in range(8):
            one = another()
            one.run(make_pool)
            one.run(make_buffer, "buffer", number)
            opened = one.take("buffer", stream)
            assert shows(opened, number)
            opened.close()
            stream.synchronize()
            one.kill()
            states.append(state())
        # A pool that was imported stays, as drivers keep it.
        assert states[-1].descriptors <= states[2].descriptors + 7
        assert eventually(lambda: state().threads <= states[2].threads + 1)

    def test_more_than_there_are_places_for(
        self, another: Callable[[], Partner], pool: sa.MemoryPool, stream: sa.Stream
    ) -> None:
        """Forty drivers of one process open a buffer: those that are gone leave their place to the next."""
        buffer = pool.allocate(4096, stream)
        filled(buffer, 1)
        one = another()
        shared = ipc.share(buffer)
        for _ in range(4):
            assert one.run(_open_by_drivers, bytes(shared), 10, fds=shared.fds) == 10
        buffer.free()
        assert eventually(lambda: pool.statistics().used == 0)


def _open_by_drivers(there: There, data: bytes, count: int) -> int:
    import gc

    import streamalloc.driver as sd

    good = 0
    for _ in range(count):
        driver = sd.traced(there.driver)
        device = sa.Device(0, driver=driver)
        fds = [ipc.Fd(os.dup(fd.fileno())) for fd in there.came]
        with device.create_stream() as stream, ipc.open(data, fds, stream=stream, driver=driver) as opened:
            good += shows(opened, 1)
        stream = opened = device = driver = None  # type: ignore[assignment]
        gc.collect()
    return good


def test_dropped_things_are_gone(pool: sa.MemoryPool, stream: sa.Stream, partner: Partner) -> None:
    """Records of a shared object end with it."""
    import gc
    import weakref

    buffer = pool.allocate(4096, stream)
    known = weakref.ref(buffer)
    shared: Any = ipc.share(buffer)
    partner.open(shared).close()
    del buffer, shared
    gc.collect()
    assert known() is None
    stream.synchronize()
    assert eventually(lambda: pool.statistics().used == 0)
