"""Symmetric memory that gives its memory back on all ranks, and gets it back at the same addresses."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc.multicast import SymmetricMemory, SymmetricMemoryError
from streamalloc.testing import Faults
from tests.multicast.ranks import Crew, Rank
from tests.processes import SECONDS
from tests.support import Account, MiB, end_what_was_dropped, every, filled, holds, in_a_thread, shows

NBYTES = 3 * MiB + 40


def backup_for(devices: list[sa.Device]) -> sa.MemoryPool:
    pool = sa.MemoryPool(sa.MemLocation.host(), driver=devices[0].driver)
    for device in devices:
        pool.set_access(device, sa.MemAccess.READWRITE)
    return pool


@pytest.mark.gpus(2)
class TestInOneProcess:
    @pytest.mark.parametrize("keep", [True, False])
    def test_bytes_addresses_and_counters_come_back(self, machine: Any, keep: bool) -> None:
        devices = sa.Device.all(machine)[:2]
        streams = [device.create_stream() for device in devices]
        with backup_for(devices) as pool, SymmetricMemory.local(devices, NBYTES, multicast=False) as memory:
            buffers = memory.buffers
            for rank, buffer in enumerate(buffers):
                filled(buffer, rank)
                memory.signal_pads[rank].fill(5)
            memory.barrier(*streams)
            before, tables = memory.addresses.tolist(), memory.tables(0)
            for device in devices:
                device.synchronize()
            free = [device.memory_info().free for device in devices]
            memory.sleep(pool if keep else None)
            for device, then in zip(devices, free, strict=True):
                assert device.memory_info().free == then + memory.physical_bytes
            assert "asleep" in repr(memory) and not memory.closed
            for use in (
                lambda: memory.buffers,
                lambda: buffers[0].fill(1),
                lambda: memory.barrier(*streams),
                memory.sleep,
            ):
                with pytest.raises(sa.EvictedError):
                    use()
            memory.wake()
            assert (memory.addresses.tolist(), memory.tables(0)) == (before, tables)
            assert all(holds(pad, 5) for pad in memory.signal_pads)
            if keep:
                assert all(shows(buffer, rank) for rank, buffer in enumerate(buffers))
            memory.barrier(*streams)
            buffers[1].fill(9, streams[0])
            memory.barrier(*streams)
            for stream in streams:
                stream.synchronize()
                stream.close()
            assert holds(memory.buffers[1], 9)
            with pytest.raises(sa.EvictedError):
                memory.wake()
            devices[0].synchronize()
            assert pool.statistics().used == 0

    def test_closed_while_it_sleeps(self, machine: Any) -> None:
        devices = sa.Device.all(machine)[:2]
        free = [device.memory_info().free for device in devices]
        with backup_for(devices) as pool:
            memory = SymmetricMemory.local(devices, NBYTES, multicast=False)
            memory.sleep(pool)
            memory.close()
            assert memory.closed
            devices[0].synchronize()
            assert pool.statistics().used == 0
        assert [device.memory_info().free for device in devices] == free

    def test_no_host_memory(self, machine: Any) -> None:
        devices = sa.Device.all(machine)[:2]
        with sa.MemoryPool(sa.MemLocation.host(), max_size=2 * MiB, driver=machine) as pool:
            for device in devices:
                pool.set_access(device, sa.MemAccess.READWRITE)
            with SymmetricMemory.local(devices, 64 * MiB, multicast=False) as memory:
                filled(memory.buffers[0], 3)
                with pytest.raises(SymmetricMemoryError, match="sleep"):
                    memory.sleep(pool)
                assert not memory.asleep and shows(memory.buffers[0], 3)


@pytest.mark.simulated_only("calls that fail are the same on any driver")
@pytest.mark.parametrize("step", ["sleep", "wake"])
@in_a_thread
def test_two_calls_fail(machine: Any, step: str) -> None:
    """No bytes are lost, nothing is unmapped or freed under a copy, and the next attempt succeeds."""
    kind: Any = Faults
    met = set()
    for first in every(3):
        # Alone, and with one that comes soon after it, as those of the undo do.
        for gap in (first % 2 or 3, 1 << 40):
            account = Account(machine)
            outer = kind(inner := kind(account.driver))
            device = sa.Device(0, driver=outer)
            pool = backup_for([device])
            memory = SymmetricMemory.local([device], 5000, multicast=False)
            filled(memory.buffers[0], 3)
            device.synchronize()
            if step == "wake":
                memory.sleep(pool)
            inner.fail(first + gap, result="CUDA_ERROR_UNKNOWN")
            outer.fail(first, result="CUDA_ERROR_UNKNOWN")
            with contextlib.suppress(sa.CudaError, SymmetricMemoryError):
                getattr(memory, step)(*[pool] if step == "sleep" else [])
            reached = [*outer.failed, *inner.failed]
            outer.stop()
            inner.stop()
            for call in reached:
                if call == "cuCtxPopCurrent":
                    machine.cuCtxPopCurrent()  # the context is still there
            met.add(len(reached))
            if memory.asleep:
                memory.wake()
            assert shows(memory.buffers[0], 3), (first, gap, reached)
            memory.close()
            end_what_was_dropped()
            device.synchronize()
            assert pool.statistics().used == 0, (first, gap, reached)
            pool.close()
            del memory, pool, device
            gc.collect()
            assert account.left == {} and account.checked.hazards == [], (first, gap, reached)
        if not reached:
            break
    assert met == {0, 1, 2}


@pytest.mark.simulated_only("calls that fail are the same on any driver")
@pytest.mark.filterwarnings("ignore:.*was dropped without close:ResourceWarning")
@pytest.mark.parametrize("step", ["sleep", "close", "abandon"])
def test_an_error_that_was_dropped_keeps_nothing(machine: Any, step: str) -> None:
    driver: Any = Faults(machine)
    memory = SymmetricMemory.local([sa.Device(0, driver=driver)], 5000, multicast=False)
    driver.fail(2, result="CUDA_ERROR_UNKNOWN")
    gc.disable()
    try:
        with contextlib.suppress(sa.CudaError, SymmetricMemoryError):
            getattr(memory, step)()
        assert driver.failed
        driver.stop()
        found = weakref.ref(memory)
        del memory
        assert found() is None
    finally:
        gc.enable()
        end_what_was_dropped()


@pytest.mark.simulated_only("the ranks are threads, each with a machine of its own")
class TestRanks:
    @pytest.mark.parametrize("multicast", [False, True], ids=["unicast", "multicast"])
    def test_all_of_them_sleep_and_wake(self, multicast: bool) -> None:
        def use(rank: Rank) -> bool:
            with backup_for([rank.device]) as pool, rank.memory(multicast=multicast) as memory:
                mine, view = memory.buffers[rank.number], memory.multicast_address
                filled(mine, rank.number)
                rank.device.synchronize()
                before = memory.addresses.tolist()
                for _ in range(2):
                    memory.sleep(pool)
                    memory.wake()
                seen = [shows(buffer, other) for other, buffer in enumerate(memory.buffers)]
                rank.group.barrier()
                if multicast and rank.number == 0:
                    assert memory.multicast_buffer is not None
                    memory.multicast_buffer.fill(7)
                    rank.device.synchronize()
                rank.group.barrier()
                assert not multicast or holds(mine, 7)
                rank.group.barrier()
                return all(seen) and before == memory.addresses.tolist() and view == memory.multicast_address

        with Crew(3) as crew:
            assert crew.run(use) == [True] * 3
            assert crew.left == [{}] * 3

    @pytest.mark.parametrize(
        ("call", "nth"),
        [("cuMemCreate", 3), ("cuMemImportFromShareableHandle", 2), ("cuMemMap", 3), ("cuMemSetAccess", 2)],
    )
    def test_a_rank_that_fails_to_wake_up(self, call: str, nth: int) -> None:
        """All of them sleep as before, and the next attempt succeeds."""

        def use(rank: Rank) -> tuple[bool, bool]:
            if rank.number == 1:
                rank.fail(call, nth)
            with backup_for([rank.device]) as pool, rank.memory(multicast=False) as memory:
                filled(memory.buffers[rank.number], rank.number)
                rank.device.synchronize()
                memory.sleep(pool)
                failed = False
                try:
                    memory.wake()
                except SymmetricMemoryError as error:
                    failed = error.rank == 1
                    memory.wake()
                seen = [shows(buffer, other) for other, buffer in enumerate(memory.buffers)]
                rank.group.barrier()
                return failed, all(seen)

        with Crew(2) as crew:
            assert crew.run(use) == [(True, True)] * 2
            assert crew.left == [{}] * 2

    @pytest.mark.parametrize("step", ["sleep", "wake"])
    def test_a_call_has_its_own_timeout(self, step: str) -> None:
        """The other rank never calls it. The memory stays as it was."""

        def use(rank: Rank) -> bool:
            memory = rank.memory(multicast=False)
            if step == "wake":
                memory.sleep()
            begun = time.monotonic()
            if rank.number == 0:
                with pytest.raises(SymmetricMemoryError, match="rank 1 did not come"):
                    getattr(memory, step)(timeout=0.2)
                assert memory.asleep == (step == "wake")
            memory.abandon()
            return time.monotonic() - begun < SECONDS / 2

        with Crew(2) as crew:
            assert crew.run(use) == [True, True]
            assert crew.left == [{}] * 2


def test_a_copy_is_an_array_of_bytes(device: sa.Device) -> None:
    with SymmetricMemory.local([device], 100, multicast=False) as memory:
        memory.buffers[0].copy_from(np.arange(100, dtype=np.uint8))
        memory.sleep(backup := backup_for([device]))
        memory.wake()
        read = np.zeros(100, np.uint8)
        memory.buffers[0].copy_to(read)
        device.synchronize()
        assert (read == np.arange(100)).all()
        backup.close()
