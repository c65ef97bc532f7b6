"""Frees of memory that other processes use."""

import gc
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from streamalloc.core.deferred import deferred_queue
from streamalloc.ipc.exporter.exports import Lease
from streamalloc.ipc.importer.imported import _CloseDropped
from streamalloc.testing import Gate
from tests.ipc import support as steps
from tests.ipc.support import POSIX, shared_pool, uses
from tests.processes import SECONDS, Partner, There
from tests.support import KEEP, MiB, Replaced, eventually, executed, filled, holds, in_threads, names, pending

SIZE = 1 << 16


# What makes a free that waits, given the pool, a buffer and one that is shared as well.
LOOKS: dict[str, Callable[[sa.MemoryPool, sa.Buffer, sa.Buffer], object]] = {
    "statistics": lambda pool, small, shared: pool.statistics(),
    "trim": lambda pool, small, shared: pool.trim(),
    "synchronize": lambda pool, small, shared: small.stream.synchronize(),
    "share": lambda pool, small, shared: ipc.share(small),
    "free": lambda pool, small, shared: shared.free(),
}


class TestFreeWhileItIsOpen:
    @pytest.mark.parametrize("look", LOOKS)
    def test_happens_when_looked_at(self, pool: sa.MemoryPool, buffer: sa.Buffer, partner: Partner, look: str) -> None:
        opened = partner.give(buffer)
        small, shared = (pool.allocate(512, buffer.stream) for _ in range(2))
        ipc.share(shared)
        buffer.free()
        opened.close()
        LOOKS[look](pool, small, shared)
        assert int(pool.attributes.used_mem_current) <= 1024
        small.close()
        shared.close()

    def test_dropped_there_after_its_stream(self, pool: sa.MemoryPool, buffer: sa.Buffer, partner: Partner) -> None:
        partner.run(steps.make_stream, "second")
        opened = partner.give(buffer, on="second")
        partner.kept("second")
        partner.tell("second", "close")
        buffer.free()
        opened.drop()
        assert uses(pool, 0)

    def test_dropped_by_the_owner_in_one_cycle_with_its_descriptor(
        self, pool: sa.MemoryPool, stream: sa.Stream, device: sa.Device, partner: Partner
    ) -> None:
        """The collector finalises both at once. No other buffer may get the slot before the deferred free."""
        buffer = pool.allocate(SIZE, stream)
        shared = ipc.share(buffer)
        slot = shared.descriptor.slot
        with device.create_stream() as captured, captured.capture(mode="relaxed"):  # no deferred free is attempted
            cycle: list[Any] = [buffer, shared]
            cycle.append(cycle)
            del buffer, shared, cycle
            gc.collect()
            for _ in range(3):
                others = [pool.allocate(512, stream) for _ in range(4)]
                assert slot not in [ipc.share(other).descriptor.slot for other in others]
                for other in others:
                    other.free()
        with pool.allocate(512, stream) as other:
            later = ipc.share(other)
            stream.synchronize()
            partner.open(later).close()
        assert uses(pool, 0)

    @pytest.mark.parametrize("freed_before", [True, False])
    def test_stream_closed(self, pool: sa.MemoryPool, device: sa.Device, partner: Partner, freed_before: bool) -> None:
        with device.create_stream() as stream:
            buffer = pool.allocate(SIZE, stream)
            filled(buffer, 1)
            opened = partner.give(buffer)
            if freed_before:
                buffer.free()
        buffer.close()
        assert buffer.freed and opened.shows(1)
        opened.close()
        assert uses(pool, 0)

    def test_the_pool_is_closed(self, traced: Any, device: sa.Device, stream: sa.Stream, partner: Partner) -> None:
        """It ends when the last lease has, and the importer reads until then."""
        pool = shared_pool(device)
        buffer = pool.allocate(SIZE, stream)
        filled(buffer, 1)
        opened = partner.give(buffer)
        buffer.free()
        pool.close()
        stream.synchronize()
        assert opened.shows(1) and names(traced, "cuMemPoolDestroy") == []
        opened.close()
        for _ in range(3):
            stream.synchronize()
        assert names(traced, "cuMemPoolDestroy") == ["cuMemPoolDestroy"]

    def test_memory_runs_out(self, device: sa.Device, stream: sa.Stream, partner: Partner) -> None:
        """Memory that importers have closed meanwhile is reused before the allocation fails."""
        with sa.MemoryPool(device, 64 * MiB, POSIX, KEEP) as pool:
            buffer = pool.allocate(64 * MiB, stream)
            opened = partner.give(buffer)
            buffer.free()
            with pytest.raises(sa.OutOfMemoryError):
                pool.allocate(64 * MiB, stream)
            opened.close()
            pool.allocate(64 * MiB, stream).free()


def _has_let_go(there: There) -> bool:
    """Whether dropped imports are closed, which a thread does. Pools of earlier exporters wait for the held stream."""
    queue = deferred_queue(there.stream._session)
    items = (*queue.submitted, *queue._new, *queue._waiting, *queue._working.values())
    return not any(isinstance(item, _CloseDropped) for item in items)


def test_messages_that_were_opened_or_dropped_keep_nothing(buffer: sa.Buffer) -> None:
    ours, theirs = ipc.Channel.pair()
    opened = []
    for _ in range(10):
        ipc.send(ours, buffer, hold=True)
        for handle in theirs.receive().handles:
            handle.close()
        opened.append(len(os.listdir("/proc/self/fd")))
    assert opened[-1] <= opened[1] + 1


class TestPolicies:
    def test_wait(self, pool: sa.MemoryPool, buffer: sa.Buffer, partner: Partner) -> None:
        partner.give(buffer, "it")
        partner.begin(_close_later, "it", 0.1)
        buffer.free(still_imported="wait", timeout=SECONDS)
        partner.result()
        assert buffer.freed and uses(pool, 0)

    def test_wait_does_not_wait_for_the_importer_s_stream(self, buffer: sa.Buffer, partner: Partner) -> None:
        """The host waits for the importer to close; what its stream still does, our stream waits for."""
        opened = partner.give(buffer)
        partner.run(steps.hold)
        opened.close()
        buffer.free(still_imported="wait", timeout=SECONDS)
        assert pending(buffer.stream)
        partner.tell("gate", "open")
        assert executed(buffer.stream)

    def test_unknown(self, buffer: Any) -> None:
        ipc.share(buffer)
        with pytest.raises(ValueError, match="still_imported='never'"):
            buffer.free(still_imported="never")


def _close_later(there: There, name: str, seconds: float) -> None:
    time.sleep(seconds)
    there.kept[name].close()


def _copy_of(there: There, name: str, copy: str, on: str) -> None:
    """Queue a copy into memory of this process, which shows what was there when the stream came to it."""
    source, aside = there.kept[name], there.kept["aside"]
    there.keep(copy, sa.allocate(source.nbytes, aside))
    aside.synchronize()
    there.kept[copy].copy_from(source, there.kept[on])


def _copy_holds(there: There, copy: str, value: int) -> bool:
    there.device.synchronize()
    return holds(there.kept[copy], value)


def waits(pool: sa.MemoryPool, stream: sa.Stream, partner: Partner, *copies: str) -> bool:
    """Whether the memory's next user waits until the importer's stream is released, and the copies are right."""
    with pool.allocate(SIZE, stream) as other:
        other.fill(9)
        assert pending(stream)
        partner.tell("gate", "open")
        assert executed(stream) and holds(other, 9)
        return all(partner.run(_copy_holds, copy, 7) for copy in copies)


class TestWorkOfImporters:
    """They have closed the memory, and their streams are still at it."""

    @pytest.fixture
    def buffer(self, pool: sa.MemoryPool, stream: sa.Stream, partner: Partner) -> sa.Buffer:
        partner.run(steps.make_stream, "aside")  # now: cuStreamCreate may wait for a stream that is held
        buffer = pool.allocate(SIZE, stream)
        buffer.fill(7)
        return buffer

    @pytest.mark.parametrize("held", [0, 1, 2])
    def test_of_three_streams(self, pool: sa.MemoryPool, buffer: sa.Buffer, partner: Partner, held: int) -> None:
        """The allocation is open three times, on three streams, one of which is held."""
        for number in range(3):
            partner.run(steps.make_stream, f"stream {number}")
            partner.give(buffer, f"it {number}", on=f"stream {number}")
            assert partner.run(steps.idle, f"stream {number}")
        partner.run(steps.hold, f"stream {held}")
        for number in range(3):
            partner.run(_copy_of, f"it {number}", f"copy {number}", f"stream {number}")
        for number in range(3):
            partner.kept(f"it {number}").close()
        address = buffer.address
        buffer.free()
        with pool.allocate(SIZE, buffer.stream) as other:
            assert other.address == address
        assert waits(pool, buffer.stream, partner, *(f"copy {number}" for number in range(3)))

    def test_of_a_stream_that_was_closed(self, pool: sa.MemoryPool, buffer: sa.Buffer, partner: Partner) -> None:
        partner.run(steps.make_stream, "second")
        first, second = partner.give(buffer, "one", on="second"), partner.give(buffer, "two")
        assert partner.run(steps.idle) and partner.run(steps.idle, "second")
        partner.run(steps.hold, "second")
        partner.run(_copy_of, "one", "copy", "second")
        first.close()
        partner.tell("second", "close")
        second.close()
        buffer.free()
        assert waits(pool, buffer.stream, partner, "copy")

    def test_closed_on_another_stream(self, pool: sa.MemoryPool, buffer: sa.Buffer, partner: Partner) -> None:
        partner.run(steps.make_stream, "second")
        opened = partner.give(buffer, "it")
        assert partner.run(steps.idle)
        partner.run(steps.hold, "second")
        partner.run(_copy_of, "it", "copy", "second")
        opened.close(on="second")
        buffer.free()
        assert partner.run(steps.idle) and waits(pool, buffer.stream, partner, "copy")

    def test_dropped_while_its_stream_is_held(self, pool: sa.MemoryPool, buffer: sa.Buffer, partner: Partner) -> None:
        opened = partner.give(buffer, "it")
        # What is left of earlier exporters ends before the stream is held.
        assert eventually(
            lambda: partner.run(steps.idle) and partner.run(steps.synchronize) is None and partner.run(_has_let_go)
        )
        partner.run(steps.hold)
        partner.run(_copy_of, "it", "copy", "stream")
        opened.drop()
        assert eventually(lambda: partner.run(_has_let_go))
        buffer.free()
        assert waits(pool, buffer.stream, partner, "copy")


class TestSlotsAreUsedAgain:
    """A buffer takes the place on the control block of one that was freed, while streams are still busy with that."""

    def test_early_readers_wait(self, pool: sa.MemoryPool, stream: sa.Stream, partner: Partner, gate: Gate) -> None:
        """A word that the place's last owner counted up must not stand for the contents of the next."""
        for _ in range(3):
            first = pool.allocate(512, stream)
            ipc.share(first)
            first.free()
        assert executed(stream)
        gate.hold(stream)
        buffer = pool.allocate(512, stream)
        partner.give(buffer, "it")
        assert partner.run(steps.busy)
        gate.open()
        assert partner.run(steps.idle)
        partner.kept("it").close()
        buffer.free()

    def test_two_thousand(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        """More than a control block has: a second control block is made, and the places come back."""
        for _ in range(2):
            buffers = [pool.allocate(512, stream) for _ in range(1100)]
            blocks = {ipc.share(buffer).descriptor.control_block for buffer in buffers}
            assert len(blocks) == 2
            for buffer in buffers:
                buffer.free()
        stream.synchronize()
        assert uses(pool, 0)


def test_of_two_threads_that_free_one_has_freed(
    pool: sa.MemoryPool, buffer: sa.Buffer, stream: sa.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The free waits for a descriptor in transit, and the other thread finds the buffer freed."""
    shared, end, frees = ipc.share(buffer, hold=True), Lease.end_for_good, [buffer.free]

    def end_beside_another(lease: Lease, *args: Any, **options: Any) -> bool:
        if frees:
            in_threads(frees.pop())
        return end(lease, *args, **options)

    monkeypatch.setattr(Lease, "end_for_good", end_beside_another)
    with pytest.raises(sa.ClosedError, match="was freed"):
        buffer.free()
    shared.cancel()
    stream.synchronize()
    assert uses(pool, 0)


def test_another_thread_has_the_memory_as_soon_as_it_is_free(machine: Any, partner: Partner) -> None:
    """Its lease is its own."""
    then: list[Callable[[], None]] = []

    def free(*arguments: Any) -> Any:
        answer = machine.cuMemFreeAsync(*arguments)
        while then:
            then.pop()()
        return answer

    driver: Any = Replaced(machine, cuMemFreeAsync=free)
    device = sa.Device(0, driver=driver)
    with device.create_stream() as stream, shared_pool(device) as pool:
        first = pool.allocate(MiB, stream)
        ipc.share(first)
        taken: list[tuple[sa.Buffer, ipc.Shared]] = []

        def take() -> None:
            buffer = pool.allocate(MiB, stream)
            taken.append((buffer, ipc.share(buffer)))

        address = first.address
        then.append(take)
        first.free()
        ((second, shared),) = taken
        assert second.address == address
        opened = partner.open(shared)
        second.free()
        stream.synchronize()
        assert pool.statistics().used == MiB
        opened.close()
        stream.synchronize()
        assert eventually(lambda: pool.statistics().used == 0)


class TestStreamsThatAreToldOfByTheHost:
    """A stream without work lets the host write its words; but only where it would wait for nothing else."""

    def writes(self, machine: Any, stream_of: Callable[[sa.Device], sa.Stream], hold: bool) -> list[str]:
        """The driver calls of sharing a buffer on a stream, while another stream is held or not."""
        traced = sd.traced(machine)
        device = sa.Device(0, driver=traced)
        stream = stream_of(device)
        with shared_pool(device) as pool, Gate(device) as gate:
            buffer = pool.allocate(MiB, stream)
            ipc.share(buffer)
            if hold:
                gate.hold(device.create_stream(blocking=True))
            seen = len(traced.calls)
            ipc.share(buffer)
            names = [call.name for call in traced.calls[seen:]]
            gate.open()
            buffer.free()
            stream.synchronize()
        return names

    @pytest.mark.parametrize("hold", [False, True])
    @pytest.mark.parametrize("kind", ["non-blocking", "blocking", "legacy", "per-thread"])
    def test_only_where_it_waits_for_nothing_else(self, machine: Any, kind: str, hold: bool) -> None:
        """A query of a blocking stream does not see the work of the legacy stream, and the host would wait for it."""
        streams: dict[str, Callable[[sa.Device], sa.Stream]] = {
            "non-blocking": lambda device: device.create_stream(),
            "blocking": lambda device: device.create_stream(blocking=True),
            "legacy": lambda device: device.default_stream,
            "per-thread": lambda device: device.per_thread_stream,
        }
        names = self.writes(machine, streams[kind], hold)
        assert ("cuStreamWriteValue32" in names) == (kind in ("blocking", "per-thread") or (kind == "legacy" and hold))
        assert kind != "blocking" or "cuStreamQuery" not in names


@pytest.mark.simulated_only("a machine of four devices")
def test_a_share_makes_no_context_on_another_device() -> None:
    driver: Any = sd.simulated(devices=4)
    device = sa.Device(3, driver=driver)
    with (
        device.create_stream() as stream,
        sa.MemoryPool(device, handle_types=POSIX) as pool,
        pool.allocate(SIZE, stream) as buffer,
    ):
        ipc.share(buffer)
        active = [bool(driver.cuDevicePrimaryCtxGetState(number)[2]) for number in range(4)]
        assert active == [False, False, False, True]


@pytest.mark.parametrize(("direct", "capturable"), [(True, False), (True, True), (False, False), (False, True)])
def test_no_event_of_a_stream_that_other_code_may_capture(direct: bool, capturable: bool) -> None:
    """The announcing stream would become a part of the capture. The word is waited for instead."""
    waited: list[object] = []
    lease: Any = SimpleNamespace(words=SimpleNamespace(ready=SimpleNamespace(value=0)))
    lease.block = SimpleNamespace(wait=lambda stream, word, value: waited.append(value))
    stream: Any = SimpleNamespace(wait=lambda one: waited.append((one, len(one._attempting))))
    announcer: Any = SimpleNamespace(direct=direct or None, capturable=capturable, _attempting=[])
    Lease._follow(lease, stream, announcer, 1)
    # A record on the announcer attempts no items: they could wait for a thread that waits for the lease's lock.
    assert waited == [(announcer, 1) if direct and not capturable else 1]
