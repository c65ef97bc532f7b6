"""Groups of virtual buffers that sleep and wake together, and figures of memory by owner."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import vmm
from tests.processes import in_a_child
from tests.support import MiB, each_raises, filled, holds, pattern, shows
from tests.vmm.support import PAGE


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

    def test_a_hook_that_cannot_be_called_is_refused_at_once(self, group: vmm.SleepGroup) -> None:
        (buffer,) = buffers(group, "a")
        each_raises(TypeError, lambda: group.before_sleep(3), match="hook must be a function, not int")  # type: ignore[arg-type]
        each_raises(TypeError, lambda: group.after_wake(print, "undo"), match="undo must be a function, not str")  # type: ignore[arg-type]
        group.sleep()
        group.wake()
        assert shows(buffer, 0)

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

    @pytest.mark.simulated_only("a process that uses a GPU must not be forked")
    def test_a_forked_child_closes_one_without_frozen_buffers(self, group: vmm.SleepGroup) -> None:
        buffers(group, "a")
        assert in_a_child(group.close) == 0

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
