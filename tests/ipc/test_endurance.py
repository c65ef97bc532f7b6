"""Threads, the collector and signals at once; and hundreds of rounds, which leave both processes as they were."""

import contextlib
import gc
import signal
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

import streamalloc as sa
from streamalloc import ipc, vmm
from streamalloc.core.deferred import deferred_queue, work
from streamalloc.ipc.importer.imports import imports_of
from streamalloc.pool.ending import PoolEnd
from tests.ipc.support import POSIX, at_once, hold, make_buffer, make_growable, no_more, shared_pool, state, state_there
from tests.processes import SECONDS, Mortal, Partner, There, holds_there
from tests.support import MiB, eventually, executed, filled, holds, shows

SIZE = 4096


def unfinished(device: sa.Device) -> list[str]:
    """Items that still wait after a point of work: some of it ends in threads, once the devices are idle.

    Without pools, which wait for buffers that interrupts of other tests have lost.
    """
    later = deferred_queue(device._session)
    work(device._session)
    items = [*later.submitted, *later._new, *later._waiting, *later._working.values()]
    return [type(item).__name__ for item in items if not isinstance(item, PoolEnd)]


@pytest.mark.usefixtures("collecting")
def test_twelve_threads_that_share_and_drop(pool: sa.MemoryPool, device: sa.Device) -> None:
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

    def test_opening_does_not_wait(self, device: sa.Device, stream: sa.Stream, another: Callable[[], Partner]) -> None:
        """A stream waits for one exporter, another has died: memory of a third is opened all the same."""
        dead, late, third = another(), another(), another()
        for owner in (dead, late, third):
            owner.run(make_buffer, "buffer", 1, SIZE)
        ipc.open(*dead.shared("buffer"), stream=stream).close()
        stream.synchronize()
        with device.create_stream() as waiting:
            late.run(hold)
            late.tell("buffer", "fill", 9)
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


class Sides(NamedTuple):
    """This process, and another one that opens its memory."""

    partner: Partner
    pool: sa.MemoryPool
    stream: sa.Stream

    def buffer(self, number: int) -> None:
        buffer = self.pool.allocate(4096, self.stream)
        buffer.fill(number % 256)
        opened = self.partner.give(buffer, "it")
        opened.close() if number % 3 else opened.drop()
        buffer.free()

    def growable(self, number: int) -> None:
        device = self.stream.device
        with vmm.GrowableBuffer(device, 8 * MiB, MiB, handle_types=POSIX, stream=self.stream) as buffer:
            for nbytes in (MiB, 2 * MiB):
                buffer.resize(nbytes)
                opened = self.partner.give(buffer, "it")
                opened.close() if number % 2 else opened.drop()

    def event(self, number: int) -> None:
        with self.stream.device.create_event(interprocess=True) as event:
            self.stream.record(event)
            self.partner.give(event, "it").close()

    def opened_here(self, number: int) -> None:
        if not number:
            self.partner.run(make_buffer, "buffer", 1)
            self.partner.run(make_growable, "growable", 1, MiB)
        for kind in ("buffer", "growable"):
            self.partner.take(kind, self.stream).close()

    def stale(self, number: int) -> None:
        with self.pool.allocate(4096, self.stream) as buffer:
            shared = ipc.share(buffer)
        with pytest.raises(sa.StaleDescriptorError):
            self.partner.open(shared, fds=shared.fds)

    def channel(self, number: int) -> None:
        """A channel of its own each time, on which the handles go along again."""
        mine, theirs = ipc.Channel.pair()
        with mine, theirs, self.pool.allocate(4096, self.stream) as buffer:
            ipc.send(mine, buffer, hold=number % 2 == 0, timeout=SECONDS)
            ipc.receive(theirs, stream=self.stream, timeout=SECONDS).close()


ROUNDS: dict[Callable[[Sides, int], None], int] = {
    Sides.buffer: 500, Sides.growable: 60, Sides.event: 100, Sides.opened_here: 100, Sides.stale: 60,
    Sides.channel: 100,
}  # fmt: skip


@pytest.mark.unchecked("counts descriptors, of which the checker has some")
@pytest.mark.parametrize("kind", ROUNDS, ids=lambda kind: kind.__name__)
def test_rounds(unchanged: Unchanged, partner: Partner, pool: sa.MemoryPool, stream: sa.Stream, kind: Any) -> None:
    sides = Sides(partner, pool, stream)
    free = stream.device.memory_info().free
    unchanged(lambda number: kind(sides, number), ROUNDS[kind])
    assert eventually(lambda: pool.statistics().used == 0)
    assert pool.statistics().reserved <= 32 * MiB
    if kind is Sides.growable:
        assert eventually(lambda: stream.device.memory_info().free >= free)


# -- kill -9 before each single call that a process makes of its driver ------------------------------------------------


Another = Callable[[], Partner]
MOST = 60
"""Calls that a scenario may make."""


def mortal(there: There) -> None:
    """From now on, this process's driver can be armed."""
    there.driver = Mortal(there.driver)
    there.device = sa.Device(0, driver=there.driver)
    there.stream = there.kept["stream"] = there.device.create_stream()


def armed(there: There, calls: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that may not come to its end."""
    there.driver.call = calls + 1
    answer = function(there, *args)
    there.driver.call = None
    return answer


def dies(one: Partner, calls: int, function: Callable[..., Any], *args: Any, fds: Any = ()) -> bool:
    """Whether the process dies in this function, when it is killed before that call."""
    try:
        one.run(armed, calls, function, *args, fds=fds)
    except (ConnectionError, OSError):
        assert one.ended() == -signal.SIGKILL
        return True
    return False


def _use(there: There, data: bytes, value: int) -> None:
    """Open, read, write and close in stream order."""
    with there.open(data, there.stream) as opened:
        part = opened[:4096]
        assert holds(part, 1)
        part.fill(value)
    there.device.synchronize()


def _buffer(device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream) -> Any:
    return pool.allocate(2 * MiB, stream)


def _growable(device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream) -> Any:
    return vmm.GrowableBuffer(device, 8 * MiB, 2 * MiB, handle_types=POSIX, stream=stream)


@pytest.mark.parametrize("make", [_buffer, _growable], ids=["buffer", "growable"])
def test_importers(
    make: Any, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream, partner: Partner, another: Another
) -> None:
    """Another one has the memory open all the time; the owner frees it after each death, where it is a buffer."""
    for calls in range(MOST):
        one = another()
        one.run(mortal)
        memory = make(device, pool, stream)
        memory.fill(1)
        shared = ipc.share(memory)
        witness = partner.open(shared)
        died = dies(one, calls, _use, bytes(shared), 9, fds=shared.fds)
        memory.fill(1)
        assert executed(stream)
        new = partner.give(memory)
        assert new.ask("nbytes") == 2 * MiB and partner.run(holds_there, new.name, 1)
        new.close()
        witness.close()
        memory.close()
        assert executed(stream)
        assert eventually(lambda: pool.statistics().used == 0)
        one.close()
        if not died:
            break
    assert 5 < calls < MOST - 1


def _own(there: There) -> None:
    """Make and share memory of each kind, again and again, and free some of it."""
    pool = shared_pool(there.device)
    for number in range(2):
        buffer = pool.allocate(MiB, there.stream)
        buffer.fill(number)
        ipc.share(buffer)
        buffer.free()
    with vmm.GrowableBuffer(there.device, 8 * MiB, MiB, handle_types=POSIX, stream=there.stream) as growable:
        ipc.share(growable)
        growable.grow(2 * MiB)
        ipc.share(growable)
    filled(there.kept["buffer"], 5)
    ipc.share(there.kept["buffer"])
    there.kept["buffer"].free()
    pool.close()
    there.device.synchronize()


def test_exporters(another: Another, stream: sa.Stream) -> None:
    """Objects that were opened before stay, and streams that wait are released."""
    reached = 0
    for calls in range(0, 100, 3):
        one = another()
        one.run(mortal)
        one.run(make_buffer, "buffer", 5)
        one.run(make_growable, "growable", 5, MiB)
        opened = [one.take(name, stream) for name in ("buffer", "growable")]
        died = dies(one, calls, _own)
        assert executed(stream)
        assert all(shows(each, 5) for each in opened)
        filled(opened[0], 6)
        assert shows(opened[0], 6)
        for each in opened:
            each.close()
        assert executed(stream)
        one.close()
        reached = calls
        if not died:
            break
    assert 5 < reached < 99
