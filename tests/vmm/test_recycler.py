"""Physical memory that is kept for whoever needs some next."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.testing import Gate
from streamalloc.vmm.recycler import RecyclingSpec
from streamalloc.vmm.reservation import MappedBytes
from tests.interleaving import interleaved
from tests.support import Account, read
from tests.vmm.support import HOST, PAGE, READWRITE, assert_unique

LIMIT = 8 * PAGE
POSIX = sa.MemHandleType.POSIX_FILE_DESCRIPTOR


@pytest.fixture
def account(machine: Any) -> Account:
    return Account(machine)


@pytest.fixture
def device(account: Account) -> sa.Device:
    return account.device


@pytest.fixture
def recycler(device: sa.Device) -> vmm.MemoryRecycler:
    return vmm.MemoryRecycler(device, LIMIT)


def made(account: Account) -> int:
    return len(account.calls("cuMemCreate"))


def released(account: Account) -> int:
    return len(account.calls("cuMemRelease"))


class TestTake:
    def test_what_was_closed_is_taken_again(self, account: Account, recycler: vmm.MemoryRecycler) -> None:
        memory = recycler.take(PAGE)
        handle = memory.handle
        memory.close()
        assert recycler.statistics() == (PAGE, 1, 0, 1, 0)
        again = recycler.take(PAGE)
        assert again.handle == handle and not again.closed
        assert memory.closed and again is not memory
        assert made(account) == 1 and released(account) == 0
        assert recycler.statistics() == vmm.RecyclerStatistics(kept=0, pieces=0, recycled=1, made=1, released=0)

    def test_what_was_dropped_is_taken_again(self, account: Account, recycler: vmm.MemoryRecycler) -> None:
        memory = recycler.take(PAGE)
        handle = memory.handle
        del memory
        gc.collect()
        assert recycler.take(PAGE).handle == handle
        assert made(account) == 1

    @pytest.mark.supports("compression", "gpu_direct_rdma_with_vmm")
    @pytest.mark.parametrize(("compressible", "rdma"), [(False, False), (True, False), (False, True)])
    def test_memory_has_the_properties_asked_for(self, device: sa.Device, compressible: bool, rdma: bool) -> None:
        recycler = vmm.MemoryRecycler(device, LIMIT, compressible=compressible, gpu_direct_rdma=rdma)
        for _ in range(2):
            with recycler.take(PAGE) as memory:
                assert memory.compressible == compressible
                assert memory.query().alloc_flags.gpu_direct_rdma_capable == rdma

    def test_another_size_is_new(self, account: Account, recycler: vmm.MemoryRecycler) -> None:
        recycler.take(2 * PAGE).close()
        memory = recycler.take(PAGE)
        assert memory.nbytes == PAGE and made(account) == 2
        assert recycler.statistics().kept == 2 * PAGE

    def test_it_has_the_properties_of_the_recycler(self, device: sa.Device) -> None:
        with vmm.MemoryRecycler(device, LIMIT, handle_types=POSIX) as recycler:
            for _ in range(2):
                memory = recycler.take(PAGE)
                assert memory.properties == recycler.properties
                assert memory.properties.requested_handle_types == POSIX
                assert memory.location == recycler.location == device.location
                memory.close()
            assert recycler.statistics().recycled == 1

    def test_host_memory(self, account: Account) -> None:
        with vmm.MemoryRecycler(HOST, LIMIT, driver=account.driver) as recycler:
            recycler.take(1, round_up=True).close()
            assert recycler.take(recycler.granularity).location == HOST
            assert recycler.statistics().recycled == 1

    def test_the_old_object_stays_closed(self, device: sa.Device, recycler: vmm.MemoryRecycler) -> None:
        memory = recycler.take(PAGE)
        memory.close()
        again = recycler.take(PAGE)
        memory.close()
        assert not again.closed
        with pytest.raises(sa.ClosedError):
            vmm.AddressRange(PAGE, driver=device.driver).map(memory)

    def test_the_bytes_are_those_that_it_had(self, device: sa.Device, recycler: vmm.MemoryRecycler) -> None:
        with vmm.AddressRange(PAGE, driver=device.driver) as addresses:
            for value in (None, 5):
                memory = recycler.take(PAGE)
                mapping = addresses.map(memory, access=device)
                if value is None:
                    mapping.fill(5)
                    device.synchronize()
                else:
                    assert np.all(read(mapping) == value)
                mapping.close()
                memory.close()

    @pytest.mark.parametrize("nbytes", [0, 1, PAGE + 1, -PAGE])
    def test_sizes_that_there_are_not(self, recycler: vmm.MemoryRecycler, nbytes: int) -> None:
        with pytest.raises(ValueError, match="nbytes="):
            recycler.take(nbytes)

    def test_arguments(self, account: Account, device: sa.Device) -> None:
        with pytest.raises(TypeError, match="limit must be an integer"):
            vmm.MemoryRecycler(device, "much")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="where must be"):
            vmm.MemoryRecycler("device", LIMIT)  # type: ignore[arg-type]
        tiles = sa.MemAllocationProp(location=device.location, alloc_flags=sa.MemAllocFlags(usage=1))
        with pytest.raises(ValueError, match="tile pools are not recycled"):
            vmm.MemoryRecycler(tiles, LIMIT, driver=account.driver)
        assert_unique(vmm.MemoryRecycler(device, LIMIT))


class TestBound:
    def test_what_was_kept_longest_goes_first(self, account: Account, device: sa.Device) -> None:
        recycler = vmm.MemoryRecycler(device, 3 * PAGE)
        memories = [recycler.take(size * PAGE) for size in (2, 1, 1)]
        handles = [memory.handle for memory in memories]
        for memory in memories:
            memory.close()
        assert recycler.statistics() == (2 * PAGE, 2, 0, 3, 1)
        (call,) = [call for call in account.traced.calls if call.name == "cuMemRelease"]
        assert int(call.args[0]) == handles[0]

    def test_more_than_the_limit_is_not_kept(self, account: Account, recycler: vmm.MemoryRecycler) -> None:
        recycler.take(PAGE).close()
        recycler.take(LIMIT + PAGE).close()
        assert recycler.statistics() == (PAGE, 1, 0, 2, 1)

    def test_nothing_is_kept_with_a_limit_of_nothing(self, account: Account, device: sa.Device) -> None:
        recycler = vmm.MemoryRecycler(device, 0)
        recycler.take(PAGE).close()
        assert account.left == {} and recycler.statistics() == (0, 0, 0, 1, 1)

    def test_trim(self, account: Account, recycler: vmm.MemoryRecycler) -> None:
        for memory in [recycler.take(PAGE) for _ in range(4)]:
            memory.close()
        assert recycler.trim(keep=2 * PAGE) == 2 * PAGE
        assert recycler.statistics() == (2 * PAGE, 2, 0, 4, 2)
        assert recycler.trim() == 2 * PAGE and recycler.trim() == 0
        assert account.left == {}

    def test_close(self, account: Account, recycler: vmm.MemoryRecycler) -> None:
        kept, used = recycler.take(PAGE), recycler.take(PAGE)
        kept.close()
        recycler.close()
        recycler.close()
        assert recycler.closed and "closed" in repr(recycler)
        assert account.left == {"physical memory": [used.handle]}
        with pytest.raises(sa.ClosedError):
            recycler.take(PAGE)
        with pytest.raises(sa.ClosedError):
            vmm.GrowableBuffer(account.device, PAGE, recycler=recycler)
        used.close()
        assert account.left == {}

    def test_dropping_it_gives_back_what_it_keeps(self, account: Account, device: sa.Device) -> None:
        recycler = vmm.MemoryRecycler(device, LIMIT)
        used = recycler.take(PAGE)
        recycler.take(PAGE).close()
        del recycler
        gc.collect()
        # What is out would come back to it.
        assert not used.closed
        used.close()
        del used
        gc.collect()
        assert account.left == {}

    def test_dropping_it_while_memory_is_out(self, account: Account, device: sa.Device) -> None:
        """It keeps nothing any more, neither what it has nor what comes back."""
        recycler = vmm.MemoryRecycler(device, LIMIT)
        used, other = recycler.take(PAGE), recycler.take(PAGE)
        recycler.take(PAGE).close()
        del recycler
        gc.collect()
        device.synchronize()
        assert account.left == {"physical memory": sorted([used.handle, other.handle])}
        used.close()
        assert account.left == {"physical memory": [other.handle]}
        other.close()
        assert account.left == {}

    def test_a_cycle_that_has_all_of_it(self, account: Account, device: sa.Device) -> None:
        recycler: Any = vmm.MemoryRecycler(device, LIMIT)
        things: list[Any] = [recycler, recycler.take(PAGE), vmm.GrowableBuffer(device, PAGE, PAGE, recycler=recycler)]
        recycler.take(2 * PAGE).close()
        things.append(things)
        del recycler, things
        gc.collect()
        device.synchronize()
        assert account.left == {}


class TestNotRecycled:
    """Memory that others may hold is released to the driver."""

    def test_exported(self, account: Account, device: sa.Device) -> None:
        recycler = vmm.MemoryRecycler(device, LIMIT, handle_types=POSIX)
        memory = recycler.take(PAGE)
        memory.export().close()  # type: ignore[union-attr]
        memory.close()
        assert recycler.statistics() == (0, 0, 0, 1, 1) and account.left == {}

    def test_exported_by_another_object(self, account: Account, device: sa.Device) -> None:
        recycler = vmm.MemoryRecycler(device, LIMIT, handle_types=POSIX)
        with vmm.AddressRange(PAGE, driver=device.driver) as addresses:
            memory = recycler.take(PAGE)
            addresses.map(memory, access=device)
            with vmm.PhysicalMemory.at(addresses.address, driver=device.driver) as other:
                other.export().close()  # type: ignore[union-attr]
            memory.close()
        assert recycler.statistics().kept == 0 and account.left == {}

    def test_held_by_another_object(self, account: Account, recycler: vmm.MemoryRecycler, device: sa.Device) -> None:
        with vmm.AddressRange(PAGE, driver=device.driver) as addresses:
            memory = recycler.take(PAGE)
            addresses.map(memory, access=device)
            other = vmm.PhysicalMemory.at(addresses.address, driver=device.driver)
            addresses.unmap()
            memory.close()
            assert recycler.statistics().kept == 0
            assert account.left["physical memory"] == [other.handle]
            other.close()
        assert account.left == {}

    def test_with_a_dma_buf(self, account: Account, recycler: vmm.MemoryRecycler, device: sa.Device) -> None:
        if not device.supports.dma_buf:
            pytest.skip("no DMA-BUF here")
        with vmm.GrowableBuffer(device, 4 * PAGE, 2 * PAGE, chunk=PAGE, recycler=recycler) as buffer:
            vmm.dma_buf(buffer[PAGE : 2 * PAGE]).close()
        assert recycler.statistics() == (PAGE, 1, 0, 2, 1)

    def test_shared(self, account: Account, device: sa.Device) -> None:
        recycler = vmm.MemoryRecycler(device, LIMIT, handle_types=POSIX)
        from streamalloc import ipc

        with vmm.GrowableBuffer(device, 4 * PAGE, PAGE, recycler=recycler) as buffer:
            shared = ipc.share(buffer)
            buffer.grow(PAGE)
        # The chunk that came later was not shared.
        assert recycler.statistics() == (PAGE, 1, 0, 2, 1)
        del shared


class TestMapped:
    def test_closed_while_it_is_mapped(self, account: Account, recycler: vmm.MemoryRecycler, device: sa.Device) -> None:
        with vmm.AddressRange(2 * PAGE, driver=device.driver) as addresses:
            memory = recycler.take(PAGE)
            handle = memory.handle
            addresses.map(memory, access=device)
            addresses.map(memory, PAGE, access=device)
            memory.close()
            assert memory.closed and recycler.statistics().kept == 0
            addresses.unmap(0, PAGE)
            assert recycler.statistics().kept == 0
            addresses.unmap(PAGE)
            assert recycler.statistics().kept == PAGE
        assert recycler.take(PAGE).handle == handle

    @pytest.mark.parametrize("what", ["memory", "range"])
    def test_dropped_while_work_uses_it(
        self, account: Account, recycler: vmm.MemoryRecycler, device: sa.Device, what: str
    ) -> None:
        stream, gate = device.create_stream(), Gate(device)
        addresses: Any = vmm.AddressRange(PAGE, driver=device.driver)
        memory: Any = recycler.take(PAGE)
        mapping: Any = addresses.map(memory, access=device)
        gate.hold(stream)
        mapping.fill(7, stream)
        if what == "memory":
            memory.close()
        del memory, mapping, addresses
        gc.collect()
        assert recycler.statistics().kept == 0
        other = recycler.take(PAGE)
        assert made(account) == 2, "handed out while the fill is still to come"
        gate.open()
        stream.synchronize()
        assert recycler.statistics().kept == PAGE
        other.close()
        stream.close()
        gate.close()


class TestBuffers:
    def test_shrink_and_grow(self, account: Account, recycler: vmm.MemoryRecycler, device: sa.Device) -> None:
        with vmm.GrowableBuffer(device, 8 * PAGE, chunk=PAGE, recycler=recycler) as buffer:
            for _ in range(3):
                buffer.resize(4 * PAGE)
                buffer.fill(3)
                buffer.resize(PAGE)
                assert np.all(read(buffer) == 3)
            assert made(account) == 4 and released(account) == 0
            assert buffer.mappings[0].access(device) == READWRITE
        assert recycler.statistics() == (4 * PAGE, 4, 6, 4, 0)
        recycler.close()
        assert account.left == {}

    def test_what_a_buffer_shrinks_by_stays_mapped(
        self, account: Account, recycler: vmm.MemoryRecycler, device: sa.Device
    ) -> None:
        with vmm.GrowableBuffer(device, 8 * PAGE, 4 * PAGE, chunk=PAGE, recycler=recycler) as buffer:
            buffer.fill(4)
            for size in (3, 2):
                buffer.resize(size * PAGE)
                assert buffer.mapped_bytes == size * PAGE and len(buffer.mappings) == size
            assert recycler.statistics().kept == 2 * PAGE
            before = len(account.calls("cuMemMap", "cuMemUnmap", "cuMemSetAccess"))
            buffer.resize(4 * PAGE)
            assert len(account.calls("cuMemMap", "cuMemUnmap", "cuMemSetAccess")) == before
            assert np.all(read(buffer) == 4) and buffer.mapped_bytes == 4 * PAGE
            assert recycler.statistics() == (0, 0, 2, 4, 0)

    def test_until_somebody_takes_it(self, account: Account, recycler: vmm.MemoryRecycler, device: sa.Device) -> None:
        with vmm.GrowableBuffer(device, 8 * PAGE, 4 * PAGE, chunk=PAGE, recycler=recycler) as buffer:
            buffer.resize(PAGE)
            taken = recycler.take(PAGE)
            assert made(account) == 4 and len(account.mapped) == 3 and taken.mapping_count == 0
            assert recycler.statistics().kept == 2 * PAGE
            buffer.resize(4 * PAGE)
            assert made(account) == 5 and len(account.mapped) == 4
            assert taken.handle not in {mapping.memory.handle for mapping in buffer.mappings}
            buffer.fill(1)
            taken.close()

    def test_until_it_is_trimmed(self, account: Account, recycler: vmm.MemoryRecycler, device: sa.Device) -> None:
        with vmm.GrowableBuffer(device, 8 * PAGE, 4 * PAGE, chunk=PAGE, recycler=recycler) as buffer:
            buffer.resize(PAGE)
            assert recycler.trim(keep=2 * PAGE) == PAGE
            assert len(account.mapped) == 3 and released(account) == 1
            recycler.close()
            assert len(account.mapped) == 1 and released(account) == 3
            buffer.resize(2 * PAGE)
            buffer.resize(0)
            assert account.mapped == {} and "physical memory" not in account.left

    def test_beyond_the_limit(self, account: Account, device: sa.Device) -> None:
        recycler = vmm.MemoryRecycler(device, 2 * PAGE)
        with vmm.GrowableBuffer(device, 8 * PAGE, 4 * PAGE, chunk=PAGE, recycler=recycler) as buffer:
            buffer.resize(0)
            assert len(account.mapped) == 2 and recycler.statistics() == (2 * PAGE, 2, 0, 4, 2)
            buffer.resize(4 * PAGE)
            buffer.fill(1)
        assert recycler.statistics().kept == 2 * PAGE

    def test_access_is_set_anew(self, account: Account, recycler: vmm.MemoryRecycler, device: sa.Device) -> None:
        """Spares that stay mapped have their earlier access."""
        with vmm.GrowableBuffer(device, 8 * PAGE, 2 * PAGE, chunk=PAGE, recycler=recycler) as buffer:
            buffer.resize(PAGE)
            buffer.set_access(device, sa.MemAccess.READ)
            buffer.resize(2 * PAGE)
            assert [mapping.access(device) for mapping in buffer.mappings] == [sa.MemAccess.READ] * 2

    @pytest.mark.parametrize("chunk", [0, PAGE])
    def test_other_sizes(self, account: Account, recycler: vmm.MemoryRecycler, device: sa.Device, chunk: int) -> None:
        with vmm.GrowableBuffer(device, 8 * PAGE, chunk=chunk, recycler=recycler) as buffer:
            sizes = (1, 3, 7, 3, 5, 1, 8, 0, 2, 8, 4, 6, 3, 1, 7, 0)
            for size in sizes:
                old = buffer.nbytes
                buffer.resize(size * PAGE - size)
                if buffer.nbytes > old:
                    buffer[old:].fill(size)
                assert size * PAGE <= buffer.mapped_bytes <= 8 * PAGE
                assert buffer.mapped_bytes == sum(mapping.nbytes for mapping in buffer.mappings)
        assert account.mapped == {}
        recycler.close()
        assert account.left == {}

    def test_exported_memory_does_not_stay(self, account: Account, device: sa.Device) -> None:
        recycler = vmm.MemoryRecycler(device, LIMIT, handle_types=POSIX)
        with vmm.GrowableBuffer(device, 8 * PAGE, 2 * PAGE, chunk=PAGE, recycler=recycler) as buffer:
            buffer.mappings[1].memory.export().close()  # type: ignore[union-attr]
            buffer.resize(0)
            assert account.mapped == {} and recycler.statistics() == (PAGE, 1, 0, 2, 1)

    def test_dropped_with_memory_that_it_could_have_back(
        self, account: Account, recycler: vmm.MemoryRecycler, device: sa.Device
    ) -> None:
        buffer: Any = vmm.GrowableBuffer(device, 8 * PAGE, 4 * PAGE, chunk=PAGE, recycler=recycler)
        buffer.resize(PAGE)
        del buffer
        gc.collect()
        taken = recycler.take(PAGE)
        device.synchronize()
        assert recycler.statistics().kept == 3 * PAGE and account.mapped == {} and made(account) <= 5
        taken.close()
        recycler.close()
        assert account.left == {}

    def test_threads(self, account: Account, device: sa.Device) -> None:
        """Each thread has a buffer; all take what the others shrink by."""
        recycler = vmm.MemoryRecycler(device, 5 * PAGE)
        wrong: list[object] = []

        def run(seed: int) -> None:
            try:
                with vmm.GrowableBuffer(device, 8 * PAGE, chunk=PAGE, recycler=recycler) as buffer:
                    for turn in range(60):
                        size = (turn * (seed + 3)) % 6
                        buffer.resize(size * PAGE, after=())
                        if size:
                            buffer.fill(seed)
                            if not np.all(read(buffer[-8:]) == seed):
                                wrong.append((seed, turn))
                        if turn % 20 == seed:
                            recycler.trim(PAGE)
                    device.synchronize()
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert account.mapped == {}
        figures = recycler.statistics()
        assert figures.made - figures.released == figures.pieces and figures.kept <= 5 * PAGE
        recycler.close()
        assert account.left == {}

    def test_evict_and_restore(self, account: Account, recycler: vmm.MemoryRecycler, device: sa.Device) -> None:
        with (
            sa.MemoryPool(HOST, driver=account.driver) as pool,
            vmm.GrowableBuffer(device, 4 * PAGE, 2 * PAGE, chunk=PAGE, recycler=recycler) as buffer,
        ):
            pool.set_access(device, READWRITE)
            buffer.fill(9)
            buffer.evict(pool)
            assert recycler.statistics().kept == 2 * PAGE
            buffer.restore()
            assert np.all(read(buffer) == 9)
        assert made(account) == 2

    @pytest.mark.gpus(2)
    def test_a_striped_buffer(self, account: Account) -> None:
        devices = [sa.Device(ordinal, driver=account.driver) for ordinal in range(2)]
        recyclers = [vmm.MemoryRecycler(device, LIMIT) for device in devices]
        for _ in range(3):
            with vmm.stripe(devices, 2 * PAGE, recyclers=recyclers) as buffer:
                buffer.fill(1)
        assert [recycler.statistics()[2:] for recycler in recyclers] == [(2, 1, 0), (2, 1, 0)]
        with pytest.raises(ValueError, match="was asked for"):
            vmm.stripe(devices, 2 * PAGE, recyclers=recyclers[::-1])
        with pytest.raises(ValueError, match="one for each of 2 devices"):
            vmm.stripe(devices, 2 * PAGE, recyclers=recyclers[:1])

    def test_properties_are_those_of_the_recycler(self, account: Account, device: sa.Device) -> None:
        with vmm.MemoryRecycler(device, LIMIT, handle_types=POSIX) as recycler:
            with vmm.GrowableBuffer(device, PAGE, PAGE, recycler=recycler) as buffer:
                assert buffer.properties == recycler.properties
            with pytest.raises(ValueError, match="give the properties to it alone"):
                vmm.GrowableBuffer(device, PAGE, recycler=recycler, gpu_direct_rdma=True)
        with pytest.raises(ValueError, match="was asked for"):
            vmm.GrowableBuffer(device, PAGE, recycler=vmm.MemoryRecycler(HOST, LIMIT, driver=account.driver))
        with pytest.raises(TypeError, match="recycler must be a MemoryRecycler"):
            vmm.GrowableBuffer(device, PAGE, recycler=device)  # type: ignore[arg-type]
        stranger = vmm.MemoryRecycler(sa.Device(0, driver=sd.simulated()), LIMIT)
        with pytest.raises(ValueError, match="another driver"):
            vmm.GrowableBuffer(device, PAGE, recycler=stranger)


class TestOutOfMemory:
    """Kept memory is released if another allocation finds no memory."""

    @pytest.mark.simulated_only("a device of this size")
    def test_other_memory(self) -> None:
        device = sa.Device(0, driver=sd.simulated(memory=16 * PAGE))
        recycler = vmm.MemoryRecycler(device, 16 * PAGE)
        for memory in [recycler.take(PAGE) for _ in range(12)]:
            memory.close()
        with vmm.GrowableBuffer(device, 16 * PAGE, 8 * PAGE) as buffer:
            buffer.fill(1)
            assert recycler.statistics().kept == 0
            with pytest.raises(sa.OutOfMemoryError) as told:
                recycler.take(32 * PAGE)
            assert told.value.requested == 32 * PAGE

    def test_once_more_and_not_again(self, machine: Any) -> None:
        account = Account(machine)
        recycler = vmm.MemoryRecycler(account.device, LIMIT)
        recycler.take(2 * PAGE).close()
        failing = sd.faulty(machine, "cuMemCreate", 1, result="CUDA_ERROR_OUT_OF_MEMORY")
        device = sa.Device(0, driver=failing)
        with pytest.raises(sa.OutOfMemoryError):  # there is nothing that could be given back
            vmm.PhysicalMemory(device, PAGE)


def test_threads(account: Account, device: sa.Device) -> None:
    """Each piece has one owner, however many threads take and close, and the bound holds."""
    recycler = vmm.MemoryRecycler(device, 6 * PAGE)
    out: dict[int, int] = {}
    wrong: list[object] = []

    def run(seed: int) -> None:
        try:
            for turn in range(150):
                memory = recycler.take((1 + (turn + seed) % 2) * PAGE)
                if out.setdefault(memory.handle, seed) != seed:
                    wrong.append(memory)
                handle = memory.handle
                if turn % 16 == 0:
                    recycler.trim(keep=2 * PAGE)
                del out[handle]
                if turn % 3:
                    memory.close()
                del memory
                if recycler.statistics().kept > 12 * PAGE:
                    wrong.append(recycler.statistics())
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    device.synchronize()
    figures = recycler.statistics()
    assert figures.recycled + figures.made == 8 * 150 and figures.kept <= recycler.limit
    assert figures.made - figures.released == figures.pieces
    assert len(account.left.get("physical memory", ())) == figures.pieces
    recycler.close()
    assert account.left == {}


@pytest.mark.simulated_only("threads interleave in the same way on any driver")
class TestInterleaved:
    """Two threads, one of which runs between any two bytecodes of the other."""

    class World:
        """A recycler with some kept pages, and a buffer with spares behind its end."""

        def __init__(self, device: sa.Device, kept: int, spares: int = 0) -> None:
            self.recycler = vmm.MemoryRecycler(device, LIMIT)
            self.taken: list[vmm.PhysicalMemory] = []
            self.buffer = vmm.GrowableBuffer(device, 4 * PAGE, chunk=PAGE, recycler=self.recycler)
            self.pages = [self.recycler.take(PAGE) for _ in range(kept)]
            self.buffer.resize((1 + spares) * PAGE)
            self.buffer.resize(PAGE, after=())

        def close_pages(self) -> None:
            for page in self.pages:
                page.close()

        def take(self) -> None:
            self.taken.append(self.recycler.take(PAGE))

        def end(self) -> None:
            """Each handle has one owner, and the figures are those of the tables."""
            figures, owners = self.recycler.statistics(), [*self.taken, *(one.memory for one in self.buffer.mappings)]
            assert figures.kept == figures.pieces * PAGE
            handles = [one.handle for one in owners]
            assert len(handles) == len(set(handles))
            assert all(one.handle in one._node.allocations.by_handle for one in owners)
            for memory in self.taken:
                memory.close()
            self.buffer.close()
            self.recycler.close()
            assert self.recycler.statistics()[:2] == (0, 0)

    @staticmethod
    def check_left(account: Account) -> None:
        gc.collect()  # the last world, in which the second thread did not begin
        account.device.synchronize()
        assert account.left == {}

    def test_two_take_one_piece(self, account: Account, device: sa.Device) -> None:
        def make() -> TestInterleaved.World:
            world = self.World(device, 1)
            world.close_pages()
            return world

        for world in interleaved(RecyclingSpec.obtain, make, self.World.take, self.World.take):
            assert world.recycler.statistics()[:3] == (0, 0, 1)
            world.end()
        self.check_left(account)

    def test_two_are_closed(self, account: Account, device: sa.Device) -> None:
        for world in interleaved(
            RecyclingSpec.keep,
            lambda: self.World(device, 2),
            lambda world: world.pages[0].close(),
            lambda world: world.pages[1].close(),
        ):
            assert world.recycler.statistics()[:2] == (2 * PAGE, 2)
            world.end()
        self.check_left(account)

    def test_unmapped_bytes_are_read_while_a_page_is_closed(self, account: Account, device: sa.Device) -> None:
        found: list[int] = []
        for world in interleaved(
            RecyclingSpec.unmapped_bytes,
            lambda: self.World(device, 1),
            lambda it: found.append(it.recycler._spec.unmapped_bytes(device.location)),
            self.World.close_pages,
        ):
            assert found.pop() in (0, PAGE)
            world.end()
        self.check_left(account)

    @pytest.mark.parametrize("function", [RecyclingSpec.trim, RecyclingSpec._release])
    @pytest.mark.parametrize("spares", [0, 1])
    def test_one_takes_what_the_other_trims(
        self, account: Account, device: sa.Device, spares: int, function: Any
    ) -> None:
        def make() -> TestInterleaved.World:
            world = self.World(device, 1 - spares, spares)
            world.close_pages()
            return world

        for world in interleaved(function, make, lambda it: it.recycler.trim(), self.World.take):
            assert world.recycler.statistics()[:2] == (0, 0)
            world.end()
        self.check_left(account)

    def test_a_buffer_grows_over_what_another_takes(self, account: Account, device: sa.Device) -> None:
        for world in interleaved(
            RecyclingSpec.claim,
            lambda: self.World(device, 0, 1),
            lambda it: it.buffer.resize(2 * PAGE, after=()),
            self.World.take,
        ):
            assert len(world.buffer.mappings) == 2 and len(world.taken) == 1
            world.end()
        self.check_left(account)

    @pytest.mark.parametrize("taken", [False, True])
    def test_a_buffer_grows_over_what_is_unmapped(self, account: Account, device: sa.Device, taken: bool) -> None:
        """It waits until its spare is unmapped, and maps other memory there."""
        for world in interleaved(
            MappedBytes.release,
            lambda: self.World(device, 0, 1),
            self.World.take if taken else lambda it: it.recycler.trim(),
            lambda it: it.buffer.resize(2 * PAGE, after=()),
        ):
            assert [account.mapped.get(one.address) for one in world.buffer.mappings] == [PAGE, PAGE]
            world.end()
        self.check_left(account)

    def test_a_buffer_shrinks_while_a_page_is_closed(self, account: Account, device: sa.Device) -> None:
        for world in interleaved(
            RecyclingSpec.offer,
            lambda: self.World(device, 1),
            lambda it: it.buffer.resize(0, after=()),
            self.World.close_pages,
        ):
            assert world.recycler.statistics()[:2] == (2 * PAGE, 2)
            world.end()
        self.check_left(account)

    def test_a_buffer_shrinks_while_its_spare_is_taken(self, account: Account, device: sa.Device) -> None:
        for world in interleaved(
            RecyclingSpec._unmap_one,
            lambda: self.World(device, 0, 1),
            self.World.take,
            lambda it: it.buffer.resize(0, after=()),
        ):
            assert world.recycler.statistics()[:2] == (PAGE, 1)
            world.end()
        self.check_left(account)

    def test_a_buffer_grows_over_its_spare_while_a_page_is_closed(self, account: Account, device: sa.Device) -> None:
        for world in interleaved(
            RecyclingSpec.claim,
            lambda: self.World(device, 1, 1),
            lambda it: it.buffer.resize(2 * PAGE, after=()),
            self.World.close_pages,
        ):
            assert world.recycler.statistics()[:2] == (PAGE, 1)
            world.end()
        self.check_left(account)
