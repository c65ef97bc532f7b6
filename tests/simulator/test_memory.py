"""Memory under simulated addresses, also mapped by hand: how much there is, and what becomes of it in this process."""

import ctypes
import fcntl
import mmap
import os
import resource

import numpy as np
import pytest

import streamalloc as sa
from streamalloc.driver import simulated
from streamalloc.simulator.memory import FREED
from tests.facts.enums import HOST, READWRITE
from tests.facts.support import PAGE, MiB, Rig
from tests.facts.support import value as ok
from tests.simulator.support import grant, mapped, new_rig
from tests.support import KEEP, each_raises, end_simulated_machines, open_descriptors

pytestmark = pytest.mark.simulated_only("tests of the simulated driver itself")

GiB = 1 << 30


def has_memory(address: int) -> bool:
    """Whether this process has memory of a simulated device there."""
    with open("/proc/self/maps") as maps:
        return any(line.startswith(f"{address:x}-") and "memfd:streamalloc:memory" in line for line in maps)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_the_whole_device_in_chunks_touches_nothing(rig: Rig) -> None:
    d = rig.raw
    before, files = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, open_descriptors()
    address = rig.reserve(139 * GiB)
    for offset in range(0, 139 * GiB, GiB):
        rig.map(address + offset, rig.memory(GiB), GiB)
    grant(rig, address, 139 * GiB)
    assert rig.device_free() < GiB
    ok(d.cuMemsetD8(address + 139 * GiB - 64, 7, 64))
    ok(d.cuMemcpyDtoD(address + GiB - 32, address + 139 * GiB - 64, 64))
    ok(d.cuCtxSynchronize())
    assert ctypes.string_at(address + GiB - 32, 64) == b"\7" * 64
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
    assert open_descriptors() <= files + 1, "there are limits to how many files a process may have"


def test_memory_that_can_be_exported_has_a_file_of_its_own(rig: Rig) -> None:
    rig.memory()  # the file for all that cannot
    files = open_descriptors()
    one, two = (rig.memory(handle_types=1) for _ in range(2))
    assert open_descriptors() == files + 2
    address = rig.map(rig.reserve(PAGE), one)
    for memory in (one, two):
        ok(rig.raw.cuMemRelease(memory))
    assert open_descriptors() == files + 1, "the first is still mapped"
    ok(rig.raw.cuMemUnmap(address, PAGE))
    assert open_descriptors() == files


def test_memory_counts_for_its_device_until_nobody_has_it() -> None:
    rig = new_rig(devices=2, memory=96 * MiB)
    d = rig.raw
    memory, other, host = rig.memory(64 * MiB), rig.memory(32 * MiB, id=1), rig.memory(64 * MiB, location=HOST)
    assert ok(d.cuMemGetInfo()) == (32 * MiB, 96 * MiB)
    plain = ok(d.cuMemAlloc(32 * MiB))
    assert rig.device_free() == 0
    ok(d.cuMemFree(plain))
    assert d.cuMemCreate(34 * MiB, rig.memory_props(), 0)[0] == d.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    assert d.cuMemAlloc(33 * MiB)[0] == d.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    address = rig.map(rig.reserve(64 * MiB), memory, 64 * MiB)
    assert int(ok(d.cuMemRetainAllocationHandle(address))) == int(memory)
    for _ in range(2):
        assert rig.device_free() == 32 * MiB
        ok(d.cuMemRelease(memory))
    assert rig.device_free() == 32 * MiB
    ok(d.cuMemUnmap(address, 64 * MiB))
    assert rig.device_free() == 96 * MiB
    for handle in (other, host):
        ok(d.cuMemRelease(handle))
    ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(1))))
    assert rig.device_free() == 96 * MiB


@pytest.mark.parametrize("handle_types", [0, 1])
def test_a_machine_that_ends_gives_everything_back(handle_types: int) -> None:
    files = open_descriptors()
    rig = new_rig()
    released, memory = mapped(rig, handle_types=handle_types), rig.memory(handle_types=handle_types)
    kept = rig.map(rig.reserve(PAGE), memory)
    rig.memory(usage=1)
    ok(rig.raw.cuMemsetD8(released, 1, PAGE))
    ok(rig.raw.cuCtxSynchronize())
    assert has_memory(released) and has_memory(kept)
    machine = rig.raw._machine
    del rig
    end_simulated_machines()
    assert not machine.banks.arenas.at
    assert not has_memory(released) and not has_memory(kept)
    assert open_descriptors() == files


# -- work and its memory -----------------------------------------------------------------------------------------------


def test_addresses_that_are_gone_break_the_context_not_the_process(rig: Rig) -> None:
    d, stream, word, address = rig.raw, rig.stream(), rig.word(), mapped(rig)
    rig.hold(stream, word)
    ok(d.cuMemsetD8Async(address, 1, PAGE, stream))
    ok(d.cuMemUnmap(address, PAGE))
    ok(d.cuMemAddressFree(address, PAGE))  # from here on nothing of this machine is there
    word.value = 1
    assert d.cuStreamSynchronize(stream)[0] == d.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS


def test_unmapping_lets_running_work_end(rig: Rig) -> None:
    d, stream, size = rig.raw, rig.stream(), 128 * MiB
    address = mapped(rig, size)
    for value in range(4):
        ok(d.cuMemsetD8Async(address, value, size, stream))
    ok(d.cuMemUnmap(address, size))
    assert rig.query(stream) == "SUCCESS"
    ok(d.cuStreamSynchronize(stream))


def test_with_a_seed_unmapping_lets_nothing_end() -> None:
    def broken(seed: int) -> bool:
        rig = new_rig(seed=seed)
        stream, address = rig.stream(), mapped(rig)
        ok(rig.raw.cuMemsetD8Async(address, 1, PAGE, stream))
        ok(rig.raw.cuMemUnmap(address, PAGE))
        return bool(rig.raw.cuStreamSynchronize(stream)[0])

    assert any(broken(seed) for seed in range(20)), "a missing synchronisation has to show"


def test_mapped_memory_of_another_machine_is_nobodys(rig: Rig) -> None:
    other = new_rig()
    address = mapped(other)
    d = rig.raw
    assert d.cuMemUnmap(address, PAGE)[0] == d.CUresult.CUDA_ERROR_INVALID_VALUE
    assert d.cuMemsetD8(address, 1, 4)[0] == d.CUresult.CUDA_ERROR_INVALID_VALUE
    ok(other.raw.cuMemsetD8(address, 1, 4))


def test_a_dma_buf_has_a_size_and_no_bytes(rig: Rig) -> None:
    kind = rig.raw.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    files = open_descriptors()
    file = ok(rig.raw.cuMemGetHandleForAddressRange(mapped(rig, 2 * PAGE), PAGE, kind, 0))
    try:
        assert os.lseek(file, 0, os.SEEK_END) == PAGE
        assert fcntl.fcntl(file, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        os.lseek(file, 0, os.SEEK_SET)
        each_raises(OSError, lambda: os.read(file, 1))
        each_raises(OSError, lambda: os.write(file, b"x"))
        each_raises(OSError, lambda: mmap.mmap(file, PAGE, prot=mmap.PROT_READ))
    finally:
        os.close(file)
    assert open_descriptors() <= files + 1  # that of the memory


def test_growing_to_the_whole_card_touches_nothing(rig: Rig) -> None:
    d, stream, pool = rig.raw, rig.stream(), rig.pool(KEEP)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    address = rig.allocate(pool, 138 << 30, stream)
    last = address + (138 << 30) - 64
    ok(d.cuMemsetD8Async(last, 7, 64, stream))
    ok(d.cuStreamSynchronize(stream))
    assert ctypes.string_at(last, 64) == b"\7" * 64
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


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


def test_memory_that_only_the_host_may_use_is_copied_as_pageable_memory(rig: Rig) -> None:
    """Its bytes are read before the call returns."""
    d, stream, word, target = rig.raw, rig.stream(), rig.word(), ok(rig.raw.cuMemAlloc(64))
    source = rig.mapping(PAGE, (HOST, 0, READWRITE), location=HOST)
    rig.hold(stream, word)
    ctypes.memset(source, 5, 64)
    ok(d.cuMemcpyHtoDAsync(target, source, 64, stream))
    ctypes.memset(source, 6, 64)
    word.value = 1
    ok(d.cuStreamSynchronize(stream))
    assert rig.read(target, 1) == [5]
