"""Real memory under simulated addresses, and how much of it there is."""

from __future__ import annotations

import ctypes
import resource

import numpy as np
import pytest

import streamalloc as sa
from streamalloc.driver import simulated
from streamalloc.simulator.memory import FREED
from tests.facts.support import MiB, Rig
from tests.facts.support import value as ok
from tests.simulator.support import new_rig
from tests.support import KEEP

pytestmark = pytest.mark.simulated_only("tests of the simulated driver itself")


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


def test_devices_of_one_name_have_the_same_uuids() -> None:
    def uuids(**machine: object) -> list[bytes]:
        driver = simulated(devices=2, **machine)  # type: ignore[arg-type]
        ok(driver.cuInit(0))
        return [bytes(ok(driver.cuDeviceGetUuid(ordinal)).bytes) for ordinal in range(2)]

    assert uuids() == uuids()
    assert uuids(name="a") == uuids(name="a", memory=MiB)
    assert len({*uuids(name="a"), *uuids(name="b"), *uuids()}) == 6


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
