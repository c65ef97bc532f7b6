"""Figures of the memory of a device by owner."""

from __future__ import annotations

from typing import Any

import pytest

import streamalloc as sa
from streamalloc import vmm
from tests.support import MiB
from tests.vmm.support import PAGE


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
