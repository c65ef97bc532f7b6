"""Backups in host memory: pieces of a pool, and bytes that are read and replaced while the buffer sleeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.testing import Faults, settle
from streamalloc.vmm import virtual_buffer
from streamalloc.vmm.stores import pool as host
from streamalloc.vmm.stores.staging import host_segments
from tests.support import KEEP, Account, MiB, filled, names, pattern, read, shows
from tests.vmm.support import HOST, READWRITE

PIECE = 1 << 20


@pytest.fixture
def pool(device: sa.Device) -> Iterator[sa.MemoryPool]:
    with sa.MemoryPool(HOST, release_threshold=KEEP) as pool:
        pool.set_access(device, READWRITE)
        yield pool


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "PIECE", PIECE)


def test_the_pool_of_a_group_is_on_the_node_of_its_device(device: sa.Device) -> None:
    with vmm.SleepGroup(device) as group:
        node = device.supports.host_numa_id
        assert device.supports.host_numa_memory_pools and node is not None
        assert group.backup.location == sa.MemLocation.host_numa(node)


@pytest.mark.parametrize("result", ["CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_NOT_SUPPORTED"])
def test_a_node_without_pools(machine: Any, result: str) -> None:
    faults: Any = Faults(machine)
    with vmm.SleepGroup(sa.Device(0, driver=faults)) as group:
        faults.fail("cuMemPoolCreate", result=result)
        assert group.backup.location == sa.MemLocation.host()
        buffer = group.allocate(100)
        filled(buffer, 1)
        group.sleep()
        group.wake()
        assert shows(buffer, 1)
        buffer.close()


def test_a_node_without_memory(machine: Any) -> None:
    account = Account(machine)
    faults: Any = Faults(account.driver)
    device = sa.Device(0, driver=faults)
    with vmm.SleepGroup(device) as group:
        buffer = group.allocate(100)
        for seed in range(2):
            filled(buffer, seed)
            faults.fail("cuMemAllocFromPoolAsync")
            group.sleep()
            faults.stop()
            assert group.backup.statistics().used == 0
            backup = buffer.eviction and buffer.eviction.backup
            assert isinstance(backup, sa.Memory) and backup.location == sa.MemLocation.host()
            del backup
            group.wake()
            assert shows(buffer, seed)
        faults.fail("cuMemAllocFromPoolAsync", times=2)
        with pytest.raises(sa.OutOfMemoryError):
            group.sleep()
        faults.stop()
        assert shows(buffer, 1)
        buffer.close()
    device.synchronize()
    assert account.left == {}


@pytest.mark.usefixtures("small_pieces")
class TestPieces:
    def test_buffers_span_them(self, device: sa.Device, pool: sa.MemoryPool) -> None:
        group = vmm.SleepGroup(device, backup=pool)
        several = [group.allocate(nbytes) for nbytes in (PIECE // 2, 2 * PIECE + 100, 10, PIECE)]
        for seed, buffer in enumerate(several):
            filled(buffer, seed)
        group.sleep()
        evictions = [buffer.eviction for buffer in several]
        # The second begins in the first piece and ends in the third; others are in one.
        assert [eviction is not None and eviction.backup is not None for eviction in evictions] == [1, 0, 1, 0]
        assert pool.statistics().used == sum(buffer.nbytes for buffer in several) + 512 * 2 - 100 - 10
        part = np.zeros(PIECE, np.uint8)
        group.read(several[1], part, PIECE // 2 + 7)
        assert np.array_equal(part, pattern(several[1].nbytes, 1)[PIECE // 2 + 7 :][:PIECE])
        group.write(several[1], part, 3)
        group.wake()
        expected = pattern(several[1].nbytes, 1).copy()
        expected[3 : 3 + PIECE] = part
        assert np.array_equal(read(several[1]), expected)
        assert all(shows(several[seed], seed) for seed in (0, 2, 3))
        device.synchronize()
        assert pool.statistics().used == 0

    def test_no_memory_for_the_last(self, machine: Any) -> None:
        faults: Any = Faults(machine)
        device = sa.Device(0, driver=faults)
        with sa.MemoryPool(HOST, driver=faults) as pool, vmm.SleepGroup(device, backup=pool) as group:
            pool.set_access(device, READWRITE)
            buffer = group.allocate(3 * PIECE)
            filled(buffer, 1)
            faults.fail("cuMemAllocFromPoolAsync", 3)
            with pytest.raises(sa.OutOfMemoryError):
                group.sleep()
            faults.stop()
            device.synchronize()
            assert shows(buffer, 1) and pool.statistics().used == 0
            buffer.close()


def test_copies_run_while_other_memory_is_unmapped_and_made(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_buffer, "_BATCH", 2 * PIECE)
    traced: Any = sd.traced(machine)
    with vmm.SleepGroup(sa.Device(0, driver=traced)) as group:
        several = [group.allocate(PIECE) for _ in range(5)]
        for seed, buffer in enumerate(several):
            filled(buffer, seed)
        traced.calls.clear()
        group.sleep(after=())
        waits = names(traced, "cuEventSynchronize", "cuStreamSynchronize", "cuMemUnmap")
        event, unmap = "cuEventSynchronize", "cuMemUnmap"
        assert waits == [event, unmap, unmap, event, unmap, unmap, "cuStreamSynchronize", unmap]
        traced.calls.clear()
        group.wake()
        assert names(traced, "cuMemCreate", "cuMemcpyAsync") == ["cuMemCreate", "cuMemcpyAsync"] * 5
        assert all(shows(buffer, seed) for seed, buffer in enumerate(several))
        for buffer in several:
            buffer.close()


class TestReplacing:
    def test_bytes_that_were_not_kept(self, device: sa.Device, pool: sa.MemoryPool) -> None:
        with vmm.SleepGroup(device, backup=pool) as group:
            buffer = group.allocate(5000)
            filled(buffer, 1)
            group.sleep(keep=False)
            new = pattern(5000, 2)
            with pytest.raises(ValueError, match="not kept"):
                group.read(buffer, new)
            with pytest.raises(ValueError, match="not kept"):
                group.write(buffer, new[:-1])
            group.write(buffer, new)
            group.write(buffer, np.array([1.5], np.float32), 8)
            group.wake()
            assert read(buffer)[8:12].view(np.float32)[0] == 1.5
            assert np.array_equal(read(buffer)[12:], new[12:])
            device.synchronize()
            assert pool.statistics().used == 0
            buffer.close()

    @pytest.mark.parametrize(
        ("offset", "array", "message"),
        [
            (1, np.zeros(5000, np.uint8), "ends before"),
            (0, np.zeros((4, 4), np.uint8).T[1:], "contiguous"),
            (-1, np.zeros(1, np.uint8), "offset"),
        ],
    )
    def test_wrong_arguments(self, device: sa.Device, offset: int, array: Any, message: str) -> None:
        with vmm.SleepGroup(device) as group:
            buffer = group.allocate(5000)
            with pytest.raises(ValueError, match="awake"):
                group.read(buffer, np.zeros(1, np.uint8))
            group.sleep()
            for call in (group.read, group.write):
                with pytest.raises(ValueError, match=message):
                    call(buffer, array, offset)
            buffer.close()
            for call in (group.read, group.write):
                with pytest.raises(sa.ClosedError):
                    call(buffer, array, offset)

    def test_a_buffer_of_another_group(self, device: sa.Device) -> None:
        with vmm.SleepGroup(device) as group, vmm.SleepGroup(device) as other, group.allocate(5000) as buffer:
            filled(buffer, 1)
            group.sleep()
            for call in (other.read, other.write):
                with pytest.raises(ValueError, match="not in the group"):
                    call(buffer, pattern(5000, 2))
            group.wake()
            assert shows(buffer, 1)


@pytest.mark.parametrize("pinned", [True, False])
def test_segments(machine: Any, pinned: bool) -> None:
    """Zeroed, pinned until they are dropped; if one cannot be pinned, none stays."""
    faults = Faults(machine)
    device = sa.Device(0, driver=faults)

    def known(address: int) -> bool:
        return sa.pointer_attributes(address, driver=faults).kind is not sa.MemoryKind.UNKNOWN

    segments = host_segments(device, [2 * MiB, 34 * MiB], pinned=pinned)
    addresses = [segment.array.ctypes.data for segment in segments]
    assert [segment.array.nbytes for segment in segments] == [2 * MiB, 34 * MiB]
    assert not any(segment.array.any() for segment in segments)
    assert [known(address) for address in addresses] == [pinned, pinned]
    first = segments[0].array
    del segments
    settle()
    assert not any(map(known, addresses))
    first[:] = 1  # the pages stay with the array
    faults.fail("cuMemHostRegister", nth=2)
    if pinned:
        with pytest.raises(sa.OutOfMemoryError):
            host_segments(device, [2 * MiB, 2 * MiB], pinned=True)
        assert len(faults.failed) == 1
        settle()
