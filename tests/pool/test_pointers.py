"""The answers of ``pointer_attributes`` for an address."""

import gc
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import MemoryKind, PointerAttributes, pointer_attributes
from streamalloc.driver.bindings import cuda
from tests.support import in_threads

POSIX = sa.MemHandleType.POSIX_FILE_DESCRIPTOR
NONE, DEVICE, HOST = sa.MemLocation.none(), sa.MemLocation.device(0), sa.MemLocation.host()
NODE = sa.MemLocation.host_numa(0)


class TestPools:
    @pytest.mark.parametrize("offset", [0, 1, 999])
    def test_device_memory(self, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream, offset: int) -> None:
        with pool.allocate(1000, stream) as buffer:
            assert pointer_attributes(buffer.address + offset) == PointerAttributes(
                address=buffer.address + offset,
                kind=MemoryKind.DEVICE,
                device=device,
                base=buffer.address,
                nbytes=1000,
                pool=pool,
                device_address=buffer.address + offset,
                host_address=None,
                handle_types=sa.MemHandleType.NONE,
                legacy_ipc=False,
                gpu_direct_rdma=False,
            )

    def test_is_shareable_as_its_pool_is(self, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(64, stream) as buffer:
            assert not pointer_attributes(buffer.address).shareable
        with sa.MemoryPool(device, handle_types=POSIX) as shared, shared.allocate(64, stream) as buffer:
            found = pointer_attributes(buffer.address)
            assert found.shareable and POSIX in found.handle_types

    def test_after_a_free(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        buffer = pool.allocate(64, stream)
        address = buffer.address
        buffer.free()
        found = pointer_attributes(address)
        assert found == PointerAttributes(address, MemoryKind.UNKNOWN)
        assert not (found.shareable or found.gpu_direct_rdma)

    @pytest.mark.parametrize("where", [sa.MemLocation.host(), sa.MemLocation.host_numa(0)], ids=str)
    def test_host_memory(self, device: sa.Device, stream: sa.Stream, where: sa.MemLocation) -> None:
        with sa.MemoryPool(where) as pool, pool.allocate(1000, stream) as buffer:
            found = pointer_attributes(buffer.address)
            assert (found.kind, found.device, found.pool, found.nbytes) == (MemoryKind.HOST, None, pool, 1000)
            assert (found.host_address, found.device_address) == (buffer.address, None)
            pool.set_access(device, sa.MemAccess.READWRITE)
            found = pointer_attributes(buffer.address)
            assert (found.host_address, found.device_address) == (buffer.address, buffer.address)

    def test_a_pool_of_other_code(self, machine: Any, device: sa.Device, stream: sa.Stream) -> None:
        handle = machine.cuMemPoolCreate(sa.MemPoolProps(location=sa.MemLocation.device(0)).to_driver())[1]
        raw = cuda.CUstream(stream.handle)
        pointer = machine.cuMemAllocFromPoolAsync(64, handle, raw)[1]
        found = pointer_attributes(int(pointer))
        assert found.pool is not None
        assert (found.pool.handle, found.pool.owned) == (int(handle), False)
        assert (found.pool.location, found.device) == (sa.MemLocation.device(0), device)
        machine.cuMemFreeAsync(pointer, raw)
        del found
        gc.collect()
        stream.synchronize()
        assert machine.cuMemPoolDestroy(handle)[0] == cuda.CUresult.CUDA_SUCCESS

    @pytest.mark.bindings("13.0")
    @pytest.mark.parametrize(
        ("kind", "where"),
        [
            ("PINNED", NODE),
            *(pytest.param("MANAGED", where, marks=pytest.mark.managed) for where in (NONE, DEVICE, HOST, NODE)),
        ],
        ids=str,
    )
    def test_a_default_pool(self, machine: Any, stream: sa.Stream, kind: str, where: sa.MemLocation) -> None:
        raw_kind = getattr(cuda.CUmemAllocationType, f"CU_MEM_ALLOCATION_TYPE_{kind}")
        handle = machine.cuMemGetDefaultMemPool(where.to_driver(), raw_kind)[1]
        pointer = machine.cuMemAllocFromPoolAsync(64, handle, cuda.CUstream(stream.handle))[1]
        found = pointer_attributes(int(pointer)).pool
        assert found is sa.MemoryPool.default(where, sa.MemAllocationType[kind]) and found.location == where
        if kind == "MANAGED":
            with found.make_current():
                pass
        machine.cuMemFreeAsync(pointer, cuda.CUstream(stream.handle))

    @pytest.mark.gpus(2)
    @pytest.mark.parametrize("granted", [False, True])
    def test_a_peer_s_memory(self, device: sa.Device, peer: sa.Device, stream: sa.Stream, granted: bool) -> None:
        with sa.MemoryPool(peer) as pool, pool.allocate(64, stream) as buffer:
            if granted:
                pool.set_access(device, sa.MemAccess.READWRITE)
            found = pointer_attributes(buffer.address)
            assert (found.device, found.pool) == (peer, pool)

    def test_a_pool_that_was_closed(self, machine: Any, device: sa.Device, stream: sa.Stream) -> None:
        """Memory that other code allocated by the handle keeps it from being destroyed; its object is a closed one."""
        pool, raw = sa.MemoryPool(device), cuda.CUstream(stream.handle)
        address = machine.cuMemAllocFromPoolAsync(64, cuda.CUmemoryPool(pool.handle), raw)[1]
        pool.close()
        del pool
        gc.collect()
        found = pointer_attributes(int(address)).pool
        assert found is not None and found.closed
        assert not machine.cuMemFreeAsync(address, raw)[0]


class TestOtherMemory:
    def test_plain(self, raw: Any, device: sa.Device) -> None:
        pointer = raw.cuMemAlloc(5000)[1]
        found = pointer_attributes(int(pointer) + 7)
        raw.cuMemFree(pointer)
        assert (found.kind, found.device, found.base, found.nbytes) == (MemoryKind.DEVICE, device, int(pointer), 5000)
        assert found.pool is None and found.host_address is None and found.device_address == int(pointer) + 7
        assert found.legacy_ipc and found.shareable and found.gpu_direct_rdma == device.supports.gpu_direct_rdma

    def test_asking_leaves_the_context_as_it_was(self, raw: Any) -> None:
        before = int(raw.cuCtxGetCurrent()[1])
        pointer = raw.cuMemAlloc(64)[1]
        pointer_attributes(int(pointer))
        assert int(raw.cuCtxGetCurrent()[1]) == before
        raw.cuMemFree(pointer)

    def test_pinned(self, raw: Any, device: sa.Device) -> None:
        address = int(raw.cuMemHostAlloc(100, 0)[1])
        found = pointer_attributes(address)
        raw.cuMemFreeHost(address)
        assert (found.kind, found.device, found.base, found.nbytes) == (MemoryKind.HOST, device, address, 100)
        assert (found.host_address, found.device_address) == (address, address)
        assert found.pool is None and not found.shareable

    def test_pageable(self, device: sa.Device) -> None:
        address = np.zeros(64, np.uint8).ctypes.data
        assert pointer_attributes(address) == PointerAttributes(address, MemoryKind.UNKNOWN)

    def test_without_a_context(self, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(64, stream) as buffer:
            address, driver = buffer.address, device.driver
            (found,) = in_threads(lambda: pointer_attributes(address, driver=driver))
            assert found.pool is pool


class TestArguments:
    @pytest.mark.parametrize("address", [1.0, "0", None, True, b"1"])
    def test_wrong_type(self, machine: Any, address: Any) -> None:
        with pytest.raises(TypeError, match="address"):
            pointer_attributes(address)

    @pytest.mark.parametrize("address", [-1, 1 << 64])
    def test_out_of_range(self, machine: Any, address: int) -> None:
        with pytest.raises(ValueError, match="address"):
            pointer_attributes(address)
