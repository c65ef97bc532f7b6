"""Real memory under simulated addresses, and how much of it there is."""

from __future__ import annotations

import ctypes
import resource

import numpy as np
import pytest

import streamalloc as sa
from streamalloc.driver import simulated
from streamalloc.simulator.banks import Bank, Banks, Space
from streamalloc.simulator.memory import FREED, AddressMap, AddressRange, Extent, Intervals
from tests.facts.support import MiB, Rig
from tests.facts.support import value as ok
from tests.simulator.support import new_rig
from tests.support import KEEP

pytestmark = pytest.mark.simulated_only("tests of the simulated driver itself")


def test_intervals_merge_and_split() -> None:
    ranges = Intervals()
    ranges.add(0, 10)
    ranges.add(20, 30)
    ranges.add(10, 20)
    assert list(ranges) == [(0, 30)]
    ranges.remove(5, 25)
    assert list(ranges) == [(0, 5), (25, 30)]
    assert ranges.covers(0, 5) and not ranges.covers(0, 6) and not ranges.covers(10, 11)
    ranges.add(4, 26)
    assert list(ranges) == [(0, 30)]


def test_address_map_finds_what_holds_an_address() -> None:
    class Part(Extent):
        def __init__(self, base: int, size: int) -> None:
            self.base, self.size = base, size

    found: AddressMap[Part] = AddressMap()
    extents = [Part(base, 10) for base in range(100, 1000, 20)]
    for extent in extents:
        found.add(extent)
    assert found.find(105) is extents[0]
    assert found.find(115) is None
    found.remove(extents[0])
    assert found.find(105) is None and found.find(125) is extents[1]


def test_a_pool_s_memory_is_zero_after_its_release() -> None:
    bank = Bank(64 * MiB)
    banks = Banks(bank, [])
    space = Space("test", banks, bank, 64 * MiB, {}, of_node=False, on_host=False)
    space.back([1])
    address = space.base + 32 * MiB
    ctypes.memset(address, 7, 16)
    space.unback([1])
    assert not banks.is_mapped(address, 1) and bank.used == 0
    space.back([1])
    assert ctypes.string_at(address, 16) == bytes(16)
    space.close()
    assert bank.used == 0


def test_growing_to_the_whole_card_touches_nothing(rig: Rig) -> None:
    d, stream, pool = rig.raw, rig.stream(), rig.pool(KEEP)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    address = rig.allocate(pool, 138 << 30, stream)
    last = address + (138 << 30) - 64
    ok(d.cuMemsetD8Async(last, 7, 64, stream))
    ok(d.cuStreamSynchronize(stream))
    assert ctypes.string_at(last, 64) == b"\7" * 64
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_memory_limits_devices_one_by_one() -> None:
    rig = new_rig(devices=2, memory=96 * MiB)
    d, stream, pool = rig.raw, rig.stream(), rig.pool(KEEP)
    assert ok(d.cuMemGetInfo()) == (96 * MiB, 96 * MiB)
    rig.allocate(pool, 60 * MiB, stream)
    assert ok(d.cuMemGetInfo()) == (32 * MiB, 96 * MiB)
    assert d.cuMemAlloc(33 * MiB)[0] == d.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    plain = ok(d.cuMemAlloc(32 * MiB))
    assert ok(d.cuMemGetInfo())[0] == 0
    ok(d.cuMemFree(plain))
    ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(1))))
    assert ok(d.cuMemGetInfo())[0] == 96 * MiB


def test_a_growth_that_fails_gives_back_what_the_threshold_does_not_cover(rig: Rig) -> None:
    d, stream, pool = rig.raw, rig.stream(), rig.pool(32 * MiB, max_size=128 * MiB)
    live = rig.allocate(pool, 40 * MiB, stream)
    no_memory = d.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    assert d.cuMemAllocFromPoolAsync(200 * MiB, pool, stream)[0] == no_memory
    assert rig.reserved(pool) == 64 * MiB, "live memory stays, whatever the threshold"
    rig.free(live, stream)
    assert d.cuMemAllocFromPoolAsync(200 * MiB, pool, stream)[0] == no_memory
    assert rig.reserved(pool) == 32 * MiB, "what is free by now does not"
    ok(d.cuStreamSynchronize(stream))
    assert d.cuMemAllocFromPoolAsync(200 * MiB, pool, stream)[0] == no_memory
    assert rig.reserved(pool) == 32 * MiB


def test_a_growth_that_fails_gives_back_memory_although_waiting_helps(rig: Rig) -> None:
    d, one, two, word, pool = rig.raw, rig.stream(), rig.stream(), rig.word(), rig.pool(0, max_size=96 * MiB)
    freed = rig.allocate(pool, 64 * MiB, one)
    rig.hold(one, word)
    rig.free(freed, one)
    assert rig.allocate(pool, 50 * MiB, two) == freed
    assert rig.reserved(pool) == 64 * MiB
    assert rig.query(two) == "NOT_READY"
    word.value = 1
    ok(d.cuStreamSynchronize(two))


def test_memory_that_vanished_breaks_the_context_not_the_process(rig: Rig) -> None:
    d, stream, pool, word = rig.raw, rig.stream(), rig.pool(KEEP), rig.word()
    address = rig.allocate(pool, MiB, stream)
    rig.hold(stream, word)
    ok(d.cuMemsetD8Async(address, 1, MiB, stream))
    ok(d.cuMemFree(address))  # a mistake: the fill is still queued
    ok(d.cuMemPoolTrimTo(pool, 0))
    word.value = 1
    error = d.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    assert d.cuStreamSynchronize(stream)[0] == error
    assert d.cuMemAlloc(4)[0] == error, "the context stays broken"


def test_devices_of_one_name_have_the_same_uuids() -> None:
    def uuids(**machine: object) -> list[bytes]:
        driver = simulated(devices=2, **machine)  # type: ignore[arg-type]
        ok(driver.cuInit(0))
        return [bytes(ok(driver.cuDeviceGetUuid(ordinal)).bytes) for ordinal in range(2)]

    assert uuids() == uuids()
    assert uuids(name="a") == uuids(name="a", memory=MiB)
    assert len({*uuids(name="a"), *uuids(name="b"), *uuids()}) == 6


def test_host_memory_that_is_gone_leaves_room_for_large_ranges() -> None:
    """Its beginning stays readable, and so breaks up the addresses of the process: that is kept of the latest only."""
    bank = Bank(1 << 40)
    for _ in range(100):
        space = Space("host", Banks(bank, []), bank, 1 << 40, {}, of_node=False, on_host=True)
        space.back([0])
        space.close()
    AddressRange(64 << 40, 2 << 20).close()


@pytest.mark.parametrize("destroyed", [False, True])
def test_an_array_that_outlives_host_memory(destroyed: bool) -> None:
    """It reads as freed, instead of ending the process without a word; nobody else's memory is touched by it."""
    device = sa.Device(0, driver=simulated())
    stream = device.create_stream()
    pool = sa.MemoryPool(sa.MemPoolProps(location=sa.MemLocation.host()), driver=device.driver)
    pool.set_access(device, sa.MemAccess.READWRITE)
    buffer = pool.allocate(40 << 20, stream)
    array = buffer.as_array(np.uint8)
    array[:] = 7
    stream.synchronize()
    buffer.free()
    stream.synchronize()
    if destroyed:
        pool.close()
        stream.synchronize()
        sa.MemoryPool(device)  # whose addresses may be the same
    assert array[0] == array[-1] == array[33 << 20] == FREED
    array[:] = 9
    if not destroyed:
        again = pool.allocate(40 << 20, stream)
        again.fill(1)
        stream.synchronize()
        assert (again.as_array(np.uint8) == 1).all()
