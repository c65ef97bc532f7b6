"""Every kind of memory, shared by one process and opened by another."""

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc, vmm
from streamalloc.ipc.exporter.exports import PoolExport
from streamalloc.ipc.wire.descriptor import Mechanism
from tests.ipc import kinds
from tests.ipc import support as steps
from tests.ipc.exporter.test_foreign import Array
from tests.ipc.kinds import Made, closing, range_view, several_chunks
from tests.ipc.support import PAGE, POSIX, shared_pool
from tests.processes import Kept, Partner, There, holds_there
from tests.support import MiB, each_raises, eventually, filled, holds, shows


def memory(nbytes: int, device: sa.Device) -> vmm.PhysicalMemory:
    return vmm.PhysicalMemory(device, nbytes, handle_types=POSIX)


def buffer(device: sa.Device, stream: sa.Stream, pool: sa.MemoryPool) -> Made:
    made = pool.allocate(3 * MiB + 512, stream)
    return made, [made]


def view(device: sa.Device, stream: sa.Stream, pool: sa.MemoryPool) -> Made:
    made = pool.allocate(3 * MiB, stream)
    return made[4096 : 4096 + 100_001], [made]


KINDS: dict[Callable[..., Made], str] = {
    buffer: "ImportedBuffer",
    view: "ImportedBuffer",
    **dict.fromkeys(kinds.KINDS, "ImportedRange"),
}


@pytest.fixture
def make(device: sa.Device, stream: sa.Stream, pool: sa.MemoryPool) -> Any:
    """Makes memory to share, whose owners are closed at the end."""
    with closing(device) as owners:

        def make(kind: Callable[..., Made]) -> Any:
            thing, needed = kind(device, stream, POSIX if kind in kinds.KINDS else pool)
            owners.extend(needed)
            return thing

        yield make


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_pattern_both_ways(make: Any, partner: Partner, kind: Callable[..., Made]) -> None:
    """The importer reads and fills all that it was given; what lies around that in the same memory stays."""
    shared = make(kind)
    whole = shared
    while isinstance(whole, sa.BufferView):
        whole = whole.owner
    whole.fill(7, shared.stream)
    filled(shared, 1)
    opened = partner.give(shared, stream=shared.stream)
    assert (opened.kind, opened.nbytes) == (KINDS[kind], shared.nbytes)
    assert opened.shows(1)
    opened.write(3)
    assert shows(shared, 3)
    if whole is not shared:
        start = shared.address - whole.address
        assert holds(whole[:start], 7) and holds(whole[start + shared.nbytes :], 7)
    opened.close()


class TestFromThere:
    """The other process owns the memory, and this one opens it."""

    def test_buffer(self, partner: Partner, stream: sa.Stream) -> None:
        partner.run(steps.make_buffer, "buffer", 5, 3 * MiB)
        opened = partner.take("buffer", stream)
        assert isinstance(opened, ipc.ImportedBuffer)
        assert shows(opened, 5)
        filled(opened, 6)
        stream.synchronize()
        assert partner.kept("buffer").shows(6)
        assert opened.location == sa.MemLocation.device(0) and opened.owner is None and opened.owner_alive
        assert opened.device_accessible and not opened.host_accessible and not opened.lost
        view = opened[100:200]
        assert view.address == opened.address + 100
        opened.close()
        opened.close()
        assert opened.closed and "closed" in repr(opened)
        each_raises(
            sa.ClosedError, lambda: opened.address, lambda: opened.fill(1), lambda: view.fill(1), lambda: opened.lost
        )

    def test_growable(self, partner: Partner, stream: sa.Stream) -> None:
        partner.run(steps.make_growable, "growable", 5, 5 * MiB)
        with partner.take("growable", stream) as opened:
            assert isinstance(opened, ipc.ImportedRange)
            assert opened.nbytes == 5 * MiB and shows(opened, 5)
            each_raises(ValueError, opened.evict, match="another process")


class TestPool:
    def test_alone(self, pool: sa.MemoryPool, partner: Partner, device: sa.Device) -> None:
        opened = partner.give(pool, "pool")
        assert opened.kind == "ImportedPool"
        assert partner.run(_pool_access) == sa.MemAccess.READWRITE

    def test_then_its_buffers(self, pool: sa.MemoryPool, partner: Partner, stream: sa.Stream) -> None:
        """The pool's handle travels once. Buffers lack only their control block, which holds many of them."""
        whole = ipc.share(pool)
        partner.open(whole)
        sent: list[bytes] = []
        for seed in range(5):
            buffer = pool.allocate(MiB, stream)
            filled(buffer, seed)
            shared = ipc.share(buffer)
            sent += (name for name in shared.handles if name not in partner._had)
            assert partner.open(shared).shows(seed)
        # A process that has shared much may begin another block among these buffers.
        assert len(sent) <= 2 and not {*sent} & {*whole.handles}
        assert len(bytes(shared)) <= 256

    def test_that_another_thread_closes_at_its_first_share(
        self, device: sa.Device, stream: sa.Stream, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pool = shared_pool(device)
        begin = PoolExport.__init__

        def closed_meanwhile(export: PoolExport, *args: Any) -> None:
            begin(export, *args)
            closer = Thread(target=pool.close)
            closer.start()
            closer.join()

        with pool.allocate(MiB, stream) as buffer:
            monkeypatch.setattr(PoolExport, "__init__", closed_meanwhile)
            ipc.share(buffer)
            each_raises(sa.ClosedError, lambda: ipc.share(pool), match="closed")

    def test_of_a_node_s_host_memory(self, machine: Any, partner: Partner) -> None:
        """It can be shared (observed on H200); what opening it does, no reading shows."""
        with sa.MemoryPool(sa.MemLocation.host_numa(0), handle_types=POSIX, driver=machine) as pool:
            shared = ipc.share(pool)
            assert shared.descriptor.mechanism is Mechanism.POOL and len(shared.fds) == 2


def _pool_access(there: There) -> int:
    pool = there.kept["pool"]
    assert pool.device == there.device and "ImportedPool" in repr(pool) and pool.handle
    pool.set_access(there.device)
    location = there.device.location.to_driver()
    return int(there.driver.cuMemPoolGetAccess(there.driver.CUmemoryPool(pool.handle), location)[1])


def test_physical_memory_is_mapped_by_both(device: sa.Device, partner: Partner, stream: sa.Stream) -> None:
    with memory(2 * PAGE, device) as physical, vmm.AddressRange(2 * PAGE, driver=device.driver) as range_:
        mapping = range_.map(physical, access=device)
        filled(mapping, 3, stream)
        stream.synchronize()
        opened = partner.give(physical, "physical")
        assert (opened.kind, opened.nbytes) == ("PhysicalMemory", 2 * PAGE)
        assert partner.run(steps.map_and_see, "physical", 3)
        partner.run(_map_and_write, "physical", 4)
        assert shows(mapping, 4)


def _map_and_write(there: There, name: str, seed: int) -> None:
    physical = there.kept[name]
    with vmm.AddressRange(physical.nbytes, driver=there.driver) as range_:
        filled(range_.map(physical, access=there.device), seed, there.stream)
        there.stream.synchronize()


class TestRanges:
    def test_two_that_overlap(self, device: sa.Device, partner: Partner) -> None:
        """They have a chunk in common; closing one leaves the other, and the chunk can be opened again."""
        range_, _ = several_chunks(device, PAGE, PAGE, PAGE, handle_types=POSIX)
        one, two = range_.view(0, 2 * PAGE), range_.view(PAGE, 3 * PAGE)
        filled(range_.view(), 1)
        theirs = partner.give(one), partner.give(two)
        theirs[0].write(2)
        assert shows(one, 2)
        theirs[0].close()
        filled(two, 3)
        device.synchronize()
        assert theirs[1].shows(3)
        assert partner.give(one).nbytes == 2 * PAGE
        range_.unmap()
        range_.close()

    def test_memory_of_which_only_the_mapping_is_left(self, device: sa.Device, partner: Partner) -> None:
        """Its handle was closed, as code does that has mapped it; the driver gives another one for the address."""
        with vmm.AddressRange(PAGE, driver=device.driver) as range_:
            with memory(PAGE, device) as physical:
                mapping = range_.map(physical, access=device)
            filled(mapping, 1)
            opened = partner.give(mapping)
            assert opened.shows(1)
            opened.close()


class TestGrowableBuffer:
    @pytest.fixture
    def buffer(self, device: sa.Device, stream: sa.Stream) -> Any:
        with vmm.GrowableBuffer(device, 64 * MiB, 3 * MiB, handle_types=POSIX, stream=stream, chunk=2 * PAGE) as buffer:
            yield buffer

    def test_grows(self, buffer: vmm.GrowableBuffer, partner: Partner) -> None:
        """The importer's object grows in place; a descriptor brings the handles of new chunks only."""
        opened = partner.give(buffer, "it")
        for step, nbytes in enumerate((7 * MiB, 7 * MiB + 1, 13 * MiB)):
            buffer.resize(nbytes)
            filled(buffer, step)
            again = partner.give(buffer, f"again {step}")
            assert (again.address, again.nbytes) == (opened.address, nbytes)
            assert partner.run(steps.same, "it", f"again {step}")
            assert opened.shows(step)
            opened.write(step + 10)
            assert shows(buffer, step + 10)

    def test_shrinks(self, buffer: vmm.GrowableBuffer, partner: Partner, device: sa.Device) -> None:
        """The importer releases it too when it opens the next descriptor: then the memory is free."""
        buffer.resize(33 * MiB)
        filled(buffer, 1)
        opened = partner.give(buffer, "it")
        assert opened.ask("mapped_bytes") == 34 * MiB
        free = device.memory_info().free
        buffer.resize(5 * MiB)
        partner.give(buffer, "it")
        assert opened.ask("nbytes") == 5 * MiB and opened.ask("mapped_bytes") == 8 * MiB
        assert eventually(lambda: device.memory_info().free - free == 26 * MiB)
        assert opened.shows(1)

    def test_an_older_descriptor(self, buffer: vmm.GrowableBuffer, partner: Partner) -> None:
        """It names fewer chunks than are there: the object is as large as it says."""
        old = ipc.share(buffer)
        buffer.resize(33 * MiB)
        partner.give(buffer, "it")
        opened = partner.open(old, "it")
        assert opened.nbytes == 3 * MiB
        assert partner.give(buffer, "it").nbytes == 33 * MiB

    def test_evicted_or_empty(self, buffer: vmm.GrowableBuffer) -> None:
        buffer.evict()
        with pytest.raises(sa.EvictedError):
            ipc.share(buffer)
        buffer.restore()
        buffer.resize(0)
        with pytest.raises(ValueError, match="empty"):
            ipc.share(buffer)

    def test_is_not_evicted_while_it_is_shared(self, buffer: vmm.GrowableBuffer) -> None:
        ipc.share(buffer)
        each_raises(sa.InUseError, buffer.evict, match="exported")

    def test_reopened_on_no_stream(self, buffer: vmm.GrowableBuffer, partner: Partner, gate: Any) -> None:
        """It was opened on a stream, which is what waits for the owner also when that is not named again."""
        stream = buffer.stream
        buffer.fill(1)
        stream.synchronize()
        partner.give(buffer, "it")
        gate.hold(stream)
        buffer.fill(2)
        partner.give(buffer, "it", on=None)
        assert partner.run(steps.busy)
        gate.open()
        assert partner.run(holds_there, "it", 2)


class TestEvents:
    @pytest.fixture
    def event(self, device: sa.Device) -> Any:
        with device.create_event(interprocess=True) as event:
            yield event

    def test_holds_a_stream_there(self, event: sa.Event, stream: sa.Stream, partner: Partner, gate: Any) -> None:
        assert partner.give(event, "event").kind == "Event"
        assert partner.tell("event", "query")  # never recorded
        gate.hold(stream)
        stream.record(event)
        assert not partner.tell("event", "query")
        partner.tell("stream", "wait", Kept("event"))
        assert partner.run(steps.busy)
        gate.open()
        assert partner.run(steps.idle) and partner.tell("event", "query")

    def test_not_made_for_it(self, device: sa.Device) -> None:
        with device.create_event() as event, pytest.raises((ValueError, sa.CudaError), match="interprocess=True"):
            ipc.share(event)

    def test_of_there(self, partner: Partner, stream: sa.Stream) -> None:
        partner.run(steps.make_event, "event")
        partner.run(steps.hold)
        partner.tell("stream", "record", Kept("event"))
        with partner.take("event") as event:
            assert not event.query()
            stream.wait(event)
            assert not stream.query()
            partner.tell("gate", "open")
            event.synchronize()
        stream.synchronize()


class TestOrder:
    """Readers wait by themselves until the contents are there."""

    @pytest.mark.parametrize("kind", [buffer, view, range_view, kinds.growable], ids=lambda kind: kind.__name__)
    def test_a_delayed_producer(self, make: Any, stream: sa.Stream, partner: Partner, gate: Any, kind: Any) -> None:
        shared = make(kind)
        shared.fill(1, stream)
        stream.synchronize()
        gate.hold(stream)
        shared.fill(2, stream)
        partner.give(shared, "it", stream=stream)
        partner.begin(holds_there, "it", 2)
        assert not stream.query()
        gate.open()
        assert partner.result()

    def test_on_two_streams(self, make: Any, device: sa.Device, stream: sa.Stream, partner: Partner, gate: Any) -> None:
        """The first stream is held and the second is not: each descriptor waits for its own, in whatever order."""
        shared = make(buffer)
        partner.run(steps.make_stream, "second")
        with device.create_stream() as other:
            other.wait(stream)
            gate.hold(stream)
            partner.give(shared, "first", stream=stream)
            late = ipc.share(shared, other)
            assert partner.run(steps.busy)
            gate.open()
            device.synchronize()
            partner.open(late, "late", on="second")
            assert partner.run(steps.idle) and partner.run(steps.idle, "second")

    def test_what_is_ready_is_not_waited_for(self, make: Any, stream: sa.Stream, partner: Partner, gate: Any) -> None:
        """Work that was queued after sharing holds nobody."""
        shared = make(buffer)
        shared.fill(3)
        descriptor = ipc.share(shared)
        gate.hold(stream)
        partner.open(descriptor, "it")
        assert partner.run(holds_there, "it", 3)
        gate.open()


@pytest.mark.gpus(2)
class TestTwoDevices:
    @pytest.fixture
    def partner(self, on_cuda: bool, machine: Any) -> Any:
        with Partner(on_cuda, devices=2) as partner:
            yield partner

    def test_memory_of_the_second(self, partner: Partner, peer: sa.Device) -> None:
        """The importer finds the device by its UUID."""
        with peer.create_stream() as stream, shared_pool(peer) as pool, pool.allocate(MiB, stream) as buffer:
            filled(buffer, 1)
            opened = partner.give(buffer, "it", on=None)
            assert opened.ask("location") == peer.location and partner.run(_stream_s_device, "it") == 1
            assert opened.shows(1)
            opened.write(2)
            assert shows(buffer, 2)
            opened.close()

    def test_of_both(self, partner: Partner, device: sa.Device, peer: sa.Device, stream: sa.Stream) -> None:
        """One buffer, half of it on each."""
        if not (device.can_access(peer) and peer.can_access(device)):
            pytest.skip("the devices are no peers")
        with vmm.stripe([device, peer], 2 * PAGE, handle_types=POSIX, stream=stream) as striped:
            filled(striped, 1)
            opened = partner.give(striped)
            assert opened.shows(1)
            opened.write(2)
            assert shows(striped, 2)
            opened.close()

    def test_from_the_other_one(self, partner: Partner, device: sa.Device, peer: sa.Device, stream: sa.Stream) -> None:
        """The importer gives its other device access to the pool."""
        if not peer.can_access(device):
            pytest.skip("the devices are no peers")
        with shared_pool(device) as pool, pool.allocate(MiB, stream) as buffer:
            filled(buffer, 1)
            partner.give(pool, "pool")
            partner.give(buffer, "it")
            partner.run(_fill_from_the_other, "it", 9)
            assert holds(buffer, 9)
            partner.kept("it").close()


def _stream_s_device(there: There, name: str) -> int:
    return int(there.kept[name].stream.device.ordinal)


def _fill_from_the_other(there: There, name: str, value: int) -> None:
    other = sa.Device(1, driver=there.driver)
    there.kept["pool"].set_access(other)
    there.stream.synchronize()
    with other.create_stream() as stream:
        there.kept[name].fill(value, stream)
        stream.synchronize()


class TestRefused:
    """Before anything is sent, with a reason and a remedy."""

    def test_not_made_for_it(self, device: sa.Device, stream: sa.Stream) -> None:
        with (
            sa.MemoryPool(device) as pool,
            pool.allocate(64, stream) as buffer,
            sa.allocate(64, stream) as default,
            vmm.PhysicalMemory(device, PAGE) as physical,
            vmm.GrowableBuffer(device, 8 * MiB, MiB) as growable,
        ):
            arrays = [Array(memory.address, 64) for memory in (buffer, default, growable)]
            things = [pool, buffer, buffer[:3], sa.MemoryPool.default(device), default, physical, growable, *arrays]
            for thing in things:
                with pytest.raises(ValueError, match="POSIX_FILE_DESCRIPTOR"):
                    ipc.share(thing)

    @pytest.mark.bindings("13.0")
    def test_pools_that_cannot_be_made_for_it(self, machine: Any) -> None:
        on_one_node = pytest.raises(ValueError, match=r"on one node, MemLocation\.host_numa")
        with sa.MemoryPool(sa.MemLocation.host(), driver=machine) as pool, on_one_node:
            ipc.share(pool)
        if sa.Device(0, driver=machine).supports.managed_memory_pools:
            props = sa.MemPoolProps(alloc_type=sa.MemAllocationType.MANAGED, location=sa.MemLocation.device(0))
            with sa.MemoryPool(props, driver=machine) as pool, pytest.raises(ValueError, match="belong to one process"):
                ipc.share(pool)

    def test_empty_or_of_no_kind(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(0, stream) as empty, pool.allocate(64, stream) as buffer:
            for thing in (empty, buffer[7:7]):
                with pytest.raises(ValueError, match="empty"):
                    ipc.share(thing)
            with pytest.raises(TypeError):
                ipc.share(buffer, 3.5)  # type: ignore[arg-type]
        for other in (None, 5, b"bytes", object()):
            with pytest.raises(TypeError, match="cannot be shared"):
                ipc.share(other)

    def test_in_a_capture(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        buffer = pool.allocate(64, stream)
        with stream.capture() as graph:
            with pytest.raises(sa.CaptureError, match="capture"):
                ipc.share(buffer)
            of_graph = sa.allocate(64, stream)
            with pytest.raises(ValueError, match="graph"):
                ipc.share(of_graph)
            of_graph.free()
        with graph:
            buffer.free()

    def test_what_was_opened_itself(self, partner: Partner, stream: sa.Stream) -> None:
        """Only its owner can share it."""
        partner.run(steps.make_buffer, "buffer", 1)
        partner.run(steps.make_growable, "growable", 1, MiB)
        partner.run(steps.make_event, "event")
        partner.run(steps.make_memory, "memory")
        for name in ("buffer", "growable", "event", "pool", "memory"):
            opened = partner.take(name)
            with pytest.raises((ValueError, TypeError, sa.CudaError), match=r"process|owner|owns"):
                ipc.share(opened)
            for part in (opened[:100], Array(opened.address, 512)) if name in ("buffer", "growable") else ():
                with pytest.raises(ValueError, match=r"process|owner|owns|not made for sharing"):
                    ipc.share(part)
            if name != "pool":
                opened.close()


class TestShared:
    def test_says_what_it_is(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(1000, stream) as buffer:
            shared = ipc.share(buffer[100:300])
            described = shared.descriptor
            assert described.mechanism is Mechanism.POOL_POINTER
            assert (described.offset, described.size, described.base_size) == (100, 200, 1000)
            assert described.device == stream.device.uuid.bytes
            assert bytes(shared) == shared.to_bytes() == described.to_bytes()
            assert "POOL_POINTER" in repr(shared) and "200 bytes" in repr(shared)
            assert isinstance(buffer, sa.Buffer)

    @pytest.mark.simulated_only("several drivers in one process, which stand for several processes")
    def test_opening_it_here_leaves_its_handles(self, pool: sa.MemoryPool, machine: Any) -> None:
        """As another driver of this process does, and a test that plays both parts."""
        shared = ipc.share(pool)
        for driver in (sd.simulated(), sd.simulated()):
            ipc.open(bytes(shared), shared.fds, driver=driver, kind=ipc.ImportedPool)
        assert not any(fd.closed for fd in shared.fds)
