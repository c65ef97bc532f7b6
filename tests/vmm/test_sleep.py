"""Groups of virtual buffers that sleep and wake together, and figures of memory by owner."""

import gc
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from tests.support import Account, MiB, each_raises, filled, holds, pattern, shows
from tests.vmm.support import HOST, PAGE, READ, READWRITE, same, write


def buffers(group: vmm.SleepGroup, *tags: str) -> list[vmm.VirtualBuffer]:
    """A buffer of 2 MiB and some bytes for each tag, with a pattern of its own."""
    made = []
    for seed, tag in enumerate(tags):
        made.append(group.allocate(2 * MiB + 100, tag=tag))
        filled(made[-1], seed)
    return made


class TestSleepAndWake:
    def test_bytes_and_addresses_come_back(self, device: sa.Device, group: vmm.SleepGroup) -> None:
        several = buffers(group, "a", "b", "a")
        device.synchronize()
        addresses = [buffer.address for buffer in several]
        assert group.mapped_bytes == 12 * MiB
        assert group.sleep() == 12 * MiB
        assert group.asleep and group.mapped_bytes == 0 and all(buffer.evicted for buffer in several)
        with pytest.raises(sa.EvictedError):
            several[0].fill(1)
        assert group.wake() == 12 * MiB
        assert group.mapped_bytes == 12 * MiB
        assert [buffer.address for buffer in several] == addresses
        assert all(shows(buffer, seed) for seed, buffer in enumerate(several))

    @pytest.mark.parametrize("keep", [{"weights"}, "weights"])
    @pytest.mark.parametrize("other", ["cache", "weight", ""])
    def test_only_what_is_to_be_kept_is_copied(self, group: vmm.SleepGroup, keep: Any, other: str) -> None:
        weights, cache = buffers(group, "weights", other)
        group.sleep(keep=keep)
        assert weights.eviction and weights._backup is not None
        assert cache.eviction and cache._backup is None
        group.wake()
        assert shows(weights, 0)
        cache.fill(3)
        cache.stream.synchronize()

    def test_a_function_gives_each_buffer_its_backup(self, device: sa.Device, group: vmm.SleepGroup) -> None:
        several = buffers(group, "array", "memory", "tier", "none", "left out")
        array = np.zeros(several[0].nbytes, np.uint8)
        asked: list[str] = []
        with sa.MemoryPool(sa.MemLocation.host()) as pool:
            pool.set_access(device, sa.MemAccess.READWRITE)
            memory = pool.allocate(several[1].nbytes, device.default_stream)
            places = {"array": array, "memory": memory, "tier": pool, "none": None}

            def place(buffer: vmm.VirtualBuffer, tag: str) -> Any:
                assert group.buffers[buffer] == tag and not buffer.evicted
                asked.append(tag)
                return places[tag]

            group.sleep(backup=place, keep=list(places))
            assert sorted(asked) == sorted(places) and all(buffer.evicted for buffer in several)
            assert [bool(one._backup) for one in several] == [True] * 3 + [False] * 2
            assert np.array_equal(memory.as_array(), pattern(memory.nbytes, 1))
            part = np.zeros(100, np.uint8)
            group.read(several[0], part, 7)
            assert (part == array[7:107]).all() and len(set(array.tolist())) > 1
            group.write(several[0], part[::-1].copy(), 7)
            assert (array[7:107] == part[::-1]).all()
            array[7:107] = part
            group.wake()
            assert all(shows(buffer, seed) for seed, buffer in enumerate(several[:3]))
            memory.free()

    def test_a_function_that_raises_changes_nothing(self, group: vmm.SleepGroup) -> None:
        first, second = buffers(group, "a", "b")

        def place(buffer: vmm.VirtualBuffer, tag: str) -> Any:
            if tag == "b":
                raise RuntimeError("no place")
            return np.zeros(buffer.nbytes, np.uint8)

        with pytest.raises(RuntimeError, match="no place"):
            group.sleep(backup=place)
        assert not (first.evicted or second.evicted) and shows(first, 0) and shows(second, 1)

    def test_without_copies_no_host_memory_is_taken(self, device: sa.Device) -> None:
        with sa.MemoryPool(sa.MemLocation.host()) as pool:
            group = vmm.SleepGroup(device, backup=pool)
            several = buffers(group, "a", "a")
            group.sleep(keep=False)
            assert pool.statistics().used_high == 0
            group.wake()
            assert len(several) == 2 and group.mapped_bytes == 8 * MiB

    def test_empty_buffers_and_empty_groups(self, group: vmm.SleepGroup) -> None:
        assert group.sleep() == group.wake() == 0
        empty = group.allocate(0)
        group.sleep()
        group.wake()
        assert empty.nbytes == 0

    def test_graphs_stay_valid(self, device: sa.Device, group: vmm.SleepGroup, stream: sa.Stream) -> None:
        (buffer,) = buffers(group, "a")
        device.synchronize()
        with stream.capture() as graph:
            buffer[0:4096].fill(7, stream)
            buffer[4096:8192].copy_from(buffer[0:4096], stream)
        group.sleep()
        group.wake(stream=stream)
        graph.launch(stream)
        stream.synchronize()
        assert holds(buffer[:8192], 7)


class TestMembers:
    def test_other_buffers_join(self, device: sa.Device, group: vmm.SleepGroup) -> None:
        with vmm.GrowableBuffer(device, 8 * MiB, 4 * MiB) as buffer, vmm.stripe([device], 4 * MiB) as striped:
            group.add(buffer, "mine")
            group.add(striped)
            filled(buffer, 5)
            assert group.sleep("mine") == 4 * MiB
            assert buffer.evicted and not striped.evicted
            each_raises(sa.EvictedError, lambda: group.remove(buffer), match="wake")
            each_raises(sa.EvictedError, lambda: buffer.fill(1), match=r"group\.wake\('mine'\)")
            group.wake()
            assert shows(buffer, 5)
            group.remove(buffer)
            buffer.evict()
            with pytest.raises(sa.EvictedError, match=r"is evicted: restore\(\) it before"):
                buffer.fill(1)
            assert group.buffers == {striped: ""}

    def test_what_is_dropped_or_closed_leaves(self, device: sa.Device, group: vmm.SleepGroup) -> None:
        several = buffers(group, "a", "b", "c")
        group.sleep()
        several.pop()
        gc.collect()
        several[0].close()
        assert list(group.buffers.values()) == ["b"]
        group.wake()
        assert shows(several[1], 1)
        device.synchronize()
        group.backup.trim()
        assert group.backup.used == group.backup.reserved == 0

    def test_a_closed_group_takes_no_buffers(self, device: sa.Device, group: vmm.SleepGroup) -> None:
        (buffer,) = buffers(group, "a")
        tagged = group.tagged("a")
        group.close()
        group.close()
        assert group.closed and not group.buffers and shows(buffer, 0) and "closed" in repr(group)
        each_raises(
            sa.ClosedError,
            lambda: group.allocate(1),
            lambda: tagged.allocate(1),
            lambda: group.add(buffer),
            lambda: group.backup,
            group.sleep,
            group.wake,
            match="closed",
        )
        buffer.close()

    def test_an_error_names_no_group_that_cannot_help(self, device: sa.Device, stream: sa.Stream) -> None:
        one, other = vmm.SleepGroup(device), vmm.SleepGroup(device)
        (buffer,) = buffers(one, "a")
        other.add(buffer, "b")
        one.close()
        other.freeze()
        each_raises(sa.InUseError, lambda: buffer.set_access(device), match=r"is frozen: group\.thaw\('b'\)")
        other.sleep()
        each_raises(sa.EvictedError, lambda: buffer.fill(1, stream), match=r"is evicted: group\.wake\('b'\)")
        other.wake()
        each_raises(
            sa.CudaError, lambda: buffer.fill(1, stream), match=r"read: group\.thaw\('b'\) before it is written"
        )
        del other
        gc.collect()
        remedy = r"add\(\) it to a SleepGroup and thaw\(\) it there"
        each_raises(sa.CudaError, lambda: buffer.fill(1, stream), match=f"read: {remedy} before it is written")
        each_raises(sa.InUseError, lambda: buffer.set_access(device), match=f"is frozen: {remedy}")
        buffer.evict()
        each_raises(sa.EvictedError, lambda: buffer.fill(1, stream), match=r"is evicted: restore\(\) it before")
        with vmm.SleepGroup(device) as third:
            third.add(buffer)
            third.thaw()
        buffer.restore()
        assert shows(buffer, 0)
        buffer.close()

    def test_a_group_that_is_closed_thaws_for_all(self, device: sa.Device, group: vmm.SleepGroup) -> None:
        with vmm.SleepGroup(device) as other:
            (buffer,) = buffers(other, "a")
            group.add(buffer)
            group.freeze()
        assert not buffer.frozen and buffer in group.buffers and shows(buffer, 0)

    def test_an_allocator_for_each_tag(self, device: sa.Device, group: vmm.SleepGroup, stream: sa.Stream) -> None:
        source = group.tagged("weights")
        buffer = source.allocate(100, stream)
        assert group.buffers == {buffer: "weights"}
        assert source.location == device.location and buffer.stream is stream

    def test_unknown_tags(self, group: vmm.SleepGroup) -> None:
        several = buffers(group, "a")
        for call in (group.sleep, group.wake):
            with pytest.raises(KeyError, match=r"'b'.*\['a'\]"):
                call("b")
        assert not several[0].evicted

    @pytest.mark.parametrize("wrong", [None, 3, b"a", ["a"]])
    def test_tags_that_are_no_text(self, group: vmm.SleepGroup, wrong: Any) -> None:
        (buffer,) = buffers(group, "a")
        calls: list[Callable[[], object]] = [
            lambda: group.allocate(64, tag=wrong),
            lambda: group.add(buffer, wrong),
            lambda: group.tagged(wrong).allocate(64),
            *(partial(group.sleep, keep=keep) for keep in ([3], 3, None)),  # type: ignore[arg-type]
            *(partial(call, wrong) for call in (group.sleep, group.wake, group.freeze, group.thaw)),
        ]
        each_raises(TypeError, *calls, match="tag must be")
        assert group.buffers == {buffer: "a"} and not buffer.evicted

    @pytest.mark.parametrize("wrong", [None, 5, "a"])
    def test_other_things_are_refused(self, group: vmm.SleepGroup, wrong: Any) -> None:
        calls: list[Callable[[], object]] = [
            *(partial(call, wrong) for call in (group.add, group.remove)),
            *(partial(call, wrong, np.zeros(4, np.uint8)) for call in (group.read, group.write)),
        ]
        each_raises(TypeError, *calls, match="buffer must be a VirtualBuffer")

    def test_a_backup_that_is_no_pool(self, device: sa.Device) -> None:
        with pytest.raises(TypeError, match="backup must be a MemoryPool, HostTier or DiskTier, not Device"):
            vmm.SleepGroup(device, backup=device)  # type: ignore[arg-type]


def test_a_buffer_that_cannot_sleep(device: sa.Device, group: vmm.SleepGroup) -> None:
    several = buffers(group, "a", "b")
    shared = vmm.GrowableBuffer(device, 2 * MiB, 2 * MiB, handle_types=sa.MemHandleType.POSIX_FILE_DESCRIPTOR)
    group.add(shared, "c")
    memory = shared.mappings[0].memory
    with memory.export():  # type: ignore[union-attr]
        pass
    with pytest.raises(sa.InUseError, match="shared=True"):
        group.sleep()
    assert not group.asleep and all(shows(buffer, seed) for seed, buffer in enumerate(several))
    # Whoever had it has closed it.
    filled(shared, 9)
    assert group.sleep(shared=True) == 10 * MiB
    group.wake()
    assert shows(shared, 9)


def test_a_misspelt_tag_loses_no_bytes(device: sa.Device) -> None:
    with vmm.SleepGroup(device) as group:
        weights = group.allocate(100, tag="weights")
        filled(weights, 1)
        for keep in ("wieghts", ["weights", "other"]):
            with pytest.raises(KeyError, match="there are \\['weights'\\]"):
                group.sleep(keep=keep)
        assert not weights.evicted and shows(weights, 1)
        weights.close()


def test_each_owner_has_its_bytes(device: sa.Device, stream: sa.Stream) -> None:
    default = sa.MemoryPool.default(device).statistics().reserved
    with vmm.SleepGroup(device) as group, sa.MemoryPool(device, release_threshold=1 << 40, name="steps") as pool:
        weights = group.allocate(4 * PAGE, tag="weights")
        cache = group.allocate(2 * PAGE, tag="cache")
        before = group.resident()
        other = vmm.GrowableBuffer(device, 4 * PAGE, 3 * PAGE)
        with vmm.AddressRange(2 * PAGE) as range, vmm.PhysicalMemory(device, PAGE) as memory:
            for offset in (0, PAGE):  # mapped twice, and there once
                range.map(memory, offset)
            pool.allocate(1000, stream).free(stream)
            now = group.resident()
            assert dict(now.group) == {"weights": 4 * PAGE, "cache": 2 * PAGE}
            assert now.mapped - before.mapped == 4 * PAGE
            assert now.pools["'steps'"] == pool.statistics().reserved > 0
            assert now.pools["default pool"] == default
            assert now.graphs == device.graph_memory.reserved
            assert sum(nbytes for owner, nbytes in now.rows()[:-1]) == now.total
        group.sleep("cache", keep=False)
        asleep = group.resident()
        assert dict(asleep.group) == {"weights": 4 * PAGE, "cache": 0}
        assert asleep.mapped - before.mapped == 3 * PAGE
        text, page = repr(asleep), asleep._repr_html_()
        assert "group, tag 'weights'" in text and "8.0 MiB" in text and "contexts" in page and "<table>" in page
        for buffer in (weights, cache, other):
            buffer.close()


def test_reading_them_changes_nothing(device: sa.Device) -> None:
    """The chunks of a buffer stay without objects, so that growing it stays as fast."""
    with vmm.SleepGroup(device) as group:
        buffer = group.allocate(PAGE, tag="a")
        group.resident()
        assert all(entry.alone for entry in buffer.range._node.table())
        buffer.close()


def test_memory_of_graphs(device: sa.Device, stream: sa.Stream) -> None:
    with vmm.SleepGroup(device) as group:
        device.graph_memory.trim()
        before = group.resident().graphs
        with stream.capture() as graph:
            buffer = sa.MemoryPool.default(device).allocate(MiB, stream)
            buffer.fill(1, stream)
            buffer.free(stream)
        graph.launch(stream)
        stream.synchronize()
        assert group.resident().graphs > before
        graph.close()
        device.graph_memory.trim()


def test_pages(device: sa.Device) -> None:
    with vmm.SleepGroup(device) as group:
        before = group.resident()
        with vmm.PageArena(device) as arena, arena.space(16 * PAGE) as space:
            space.commit(range(3))
            arena.prepare(2).result()
            space.release(2)
            now = group.resident()
            # Three committed or released ones, two that were prepared unless one was released, and that of zeros.
            assert now.pages - before.pages == (arena.statistics().pages + 1) * PAGE
            assert now.mapped == before.mapped


@pytest.mark.simulated_only("other processes, and the driver itself, use memory meanwhile")
def test_memory_of_another_library_is_measured(device: sa.Device) -> None:
    """It is in no figure of this library: another owner of the driver has allocated it."""
    driver: Any = device.driver
    with vmm.SleepGroup(device) as group:
        before = group.resident()
        allocated, mine = [], []
        with group.measure("NCCL"), device.current():
            allocated.append(driver.cuMemAlloc(8 * PAGE)[1])
            mine.append(group.allocate(PAGE, tag="a"))
            arena = vmm.PageArena(device)
            arena.prepare(3).result()
        with group.measure("NCCL"), device.current():
            allocated.append(driver.cuMemAlloc(4 * PAGE)[1])
        now = group.resident()
        assert dict(now.measured) == {"NCCL": 12 * PAGE} and now.group["a"] == PAGE
        assert now.others == before.others and "NCCL, as measured" in repr(now)
        with device.current():
            for address in allocated:
                driver.cuMemFree(address)
        mine[0].close()
        arena.close()


def test_a_figure_that_cannot_be_read_hides_no_error_of_the_block(device: sa.Device) -> None:
    group = vmm.SleepGroup(device)
    with pytest.raises(KeyError), group.measure("NCCL"):
        group.close()
        raise KeyError


# -- evicting and restoring: the memory goes, the addresses stay, and the bytes come back ------------------------------


SIZE = 2 * PAGE + 12345
MAPPED = 3 * PAGE


@pytest.fixture
def device(account: Account) -> Iterator[sa.Device]:
    """Device 0, through a driver that keeps account of what is made."""
    with sd.use(account.driver):
        yield account.device


@pytest.fixture
def buffer(device: sa.Device) -> Iterator[vmm.GrowableBuffer]:
    """A buffer of two and a bit of eight pages, in pieces of a page."""
    with vmm.GrowableBuffer(device, 8 * PAGE, SIZE, chunk=PAGE) as buffer:
        yield buffer


class TestWithoutBackup:
    @pytest.mark.parametrize(
        "use",
        [
            lambda buffer: buffer.fill(1),
            lambda buffer: buffer.copy_to(np.zeros(SIZE, np.uint8)),
            lambda buffer: buffer.copy_from(np.zeros(SIZE, np.uint8)),
            lambda buffer: buffer[8:16].fill(1),
            lambda buffer: buffer[8:16].copy_to(bytearray(8)),
            lambda buffer: buffer.__cuda_array_interface__,
            lambda buffer: buffer.__dlpack__(),
            lambda buffer: buffer[8:16].__cuda_array_interface__,
            lambda buffer: buffer.resize(PAGE),
            lambda buffer: buffer.resize(SIZE),
            lambda buffer: buffer.grow(1),
            lambda buffer: vmm.dma_buf(buffer[:PAGE]),
        ],
    )
    def test_used_meanwhile(self, buffer: vmm.GrowableBuffer, use: Callable[[vmm.GrowableBuffer], object]) -> None:
        view, (mapping, *_) = buffer[8:16], buffer.mappings
        buffer.evict()
        each_raises(sa.EvictedError, lambda: use(buffer), match=r"restore\(\)")
        each_raises(sa.EvictedError, lambda: view.fill(1))
        each_raises(sa.ClosedError, lambda: mapping.fill(1))
        assert buffer.evicted
        buffer.restore()
        view.fill(1)
        assert holds(view, 1)

    def test_what_it_waits_for(self, account: Account) -> None:
        device = account.device
        waits = ("cuMemFree", "cuStreamSynchronize", "cuEventSynchronize", "cuMemUnmap")
        with (
            device.create_stream() as stream,
            stream.record() as event,
            vmm.GrowableBuffer(device, PAGE, PAGE) as buffer,
        ):
            for after, expected in (((), []), (stream, ["cuStreamSynchronize"]), ([event], ["cuEventSynchronize"])):
                done = len(account.calls(*waits))
                buffer.evict(after=after)
                assert account.calls(*waits)[done:] == [*expected, "cuMemUnmap"]
                buffer.restore()
            buffer.evict()  # after all work of the device
            assert account.calls("cuMemFree", "cuMemUnmap")[-2:] == ["cuMemFree", "cuMemUnmap"]


class TestWithBackup:
    def test_no_slower_copy_by_mistake(self, device: sa.Device, buffer: vmm.GrowableBuffer) -> None:
        """A pool whose memory the device may not use is refused: copies would go through a bounce buffer."""
        data = write(buffer, pattern(SIZE))
        with sa.MemoryPool(HOST) as pool:
            with pytest.raises(ValueError, match=r"pool.set_access\(device"):
                buffer.evict(pool)
            assert not buffer.evicted and pool.statistics().used == 0
        assert same(buffer, data)

    def test_what_is_refused(
        self, machine: Any, buffer: vmm.GrowableBuffer, pool: sa.MemoryPool, host: sa.MemoryPool, stream: sa.Stream
    ) -> None:
        """Memory of another kind, size or driver, freed memory, and the buffer itself, which would be gone."""
        data = write(buffer, pattern(SIZE))
        small, freed = host.allocate(SIZE - 1, stream), host.allocate(SIZE, stream)
        freed.free()
        with sa.MemoryPool(HOST, driver=sd.traced(machine)) as foreign:
            wrong: list[tuple[Any, type[Exception], str]] = [
                (3, TypeError, "backup"),
                (np.zeros(SIZE - 1, np.uint8), ValueError, "writable, contiguous array"),
                (np.zeros((SIZE, 2), np.uint8)[:, 0], ValueError, "writable, contiguous array"),
                (np.frombuffer(bytes(SIZE), np.uint8), ValueError, "writable, contiguous array"),
                (pool, ValueError, "host memory"),
                (small, ValueError, "backup has .* and the buffer"),
                (foreign, ValueError, "another driver"),
                (buffer, ValueError, "own memory"),
                (buffer[:], ValueError, "own memory"),
                (freed, sa.ClosedError, "freed"),
            ]
            for backup, error, words in wrong:
                with pytest.raises(error, match=words):
                    buffer.evict(backup)
                assert not buffer.evicted
        assert same(buffer, data) and pool.statistics().used == 0
        small.free()

    def test_freed_meanwhile(
        self, account: Account, buffer: vmm.GrowableBuffer, host: sa.MemoryPool, stream: sa.Stream
    ) -> None:
        """The restore says so, takes nothing, and can be given up by closing."""
        backup, before = host.allocate(SIZE, stream), account.physical_bytes
        buffer.evict(backup, stream=stream)
        backup.free()
        for _ in range(2):
            with pytest.raises(sa.ClosedError):
                buffer.restore()
            assert buffer.evicted and account.physical_bytes == before - MAPPED
        buffer.close()


@pytest.mark.gpus(2)
@pytest.mark.parametrize("flags", [READ, READWRITE])
def test_access_of_peers(device: sa.Device, peer: sa.Device, host: sa.MemoryPool, flags: sa.MemAccess) -> None:
    with vmm.GrowableBuffer(device, 4 * PAGE, SIZE, access={peer: flags}, chunk=PAGE) as buffer:
        data = write(buffer, pattern(SIZE))
        buffer.evict(host)
        assert peer.memory_info().total
        buffer.restore()
        device.synchronize()
        assert [mapping.access(peer) for mapping in buffer.mappings] == 3 * [flags]
        assert [mapping.access(device) for mapping in buffer.mappings] == 3 * [READWRITE]
        with peer.create_stream() as theirs, vmm.GrowableBuffer(peer, SIZE, SIZE, stream=theirs) as copy:
            copy.copy_from(buffer)
            assert same(copy, data)


def test_a_close_leaves_a_backup_of_somebody_else(device: sa.Device, host: sa.MemoryPool, stream: sa.Stream) -> None:
    with host.allocate(PAGE, stream) as backup:
        with vmm.GrowableBuffer(device, PAGE, PAGE) as buffer:
            data = write(buffer, pattern(PAGE))
            buffer.evict(backup)
        assert not backup.freed and np.array_equal(backup.as_array(), data)


class TestCapture:
    def test_evicting(self, buffer: vmm.GrowableBuffer, host: sa.MemoryPool, stream: sa.Stream) -> None:
        """Refused, with nothing added to the graph, on whatever stream."""
        data = write(buffer, pattern(SIZE))
        with stream.capture() as graph:
            ways: list[dict[str, Any]] = [{"stream": stream}, {"stream": stream, "after": ()}]
            for options, backup in itertools.product(ways, (host, None)):
                with pytest.raises(sa.CaptureError):
                    buffer.evict(backup, **options)
                assert not buffer.evicted
        assert graph.nodes == []
        graph.close()
        assert same(buffer, data) and host.statistics().used == 0

    def test_restoring(self, buffer: vmm.GrowableBuffer, host: sa.MemoryPool, stream: sa.Stream) -> None:
        """A copy that is captured would be made at the launch, or never."""
        data = write(buffer, pattern(SIZE))
        buffer.evict(host)
        with stream.capture() as graph:
            with pytest.raises(sa.CaptureError):
                buffer.restore(stream=stream)
            assert buffer.evicted
        assert graph.nodes == []
        graph.close()
        buffer.restore()
        assert same(buffer, data)


@pytest.mark.simulated_only("takes all memory of the device")
@pytest.mark.parametrize("room", [0, 1, 2])
def test_out_of_memory_in_the_middle_of_a_restore(room: int) -> None:
    """It stays evicted, with the whole backup, and takes nothing; later it can be restored."""
    machine: Any = sd.simulated(memory=16 * PAGE)
    account = Account(machine)
    device = account.device
    with sa.MemoryPool(HOST, driver=account.driver) as host:
        host.set_access(device, READWRITE)
        with vmm.GrowableBuffer(device, 8 * PAGE, SIZE, chunk=PAGE) as buffer:
            data, address = write(buffer, pattern(SIZE)), buffer.address
            buffer.evict(host)
            others = [vmm.PhysicalMemory(device, PAGE) for _ in range(16 - room)]
            for _ in range(2):
                with pytest.raises(sa.OutOfMemoryError, match="physical memory is exhausted") as caught:
                    buffer.restore()
                assert (caught.value.requested, caught.value.free) == (PAGE, 0)
                assert device.memory_info().free == room * PAGE
                assert buffer.evicted and buffer.mappings == () and buffer.nbytes == SIZE
                assert buffer.eviction is not None and buffer.eviction.nbytes == MAPPED
                kept = np.empty(SIZE, np.uint8)
                assert buffer._backup is not None
                buffer._backup.read(0, kept)
                assert np.array_equal(kept, data)
            for other in others[: 3 - room]:
                other.close()
            buffer.restore()
            buffer.stream.synchronize()
            assert buffer.address == address and same(buffer, data)
            assert host.statistics().used == 0
            for other in others:
                other.close()
    del host
    assert account.left == {} and device.memory_info().free == 16 * PAGE
