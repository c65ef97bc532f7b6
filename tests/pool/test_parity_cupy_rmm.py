"""Tests that CuPy and RMM have of their stream-ordered pools, where no other test of this package says the same.

CuPy: ``MemoryAsyncPool`` and ``malloc_async`` (tests/cupy_tests/cuda_tests/test_memory.py). RMM:
``CudaAsyncMemoryResource`` and ``DeviceBuffer`` (python/rmm/rmm/tests).
"""

from __future__ import annotations

import gc
from typing import Any

import pytest

import streamalloc as sa
from streamalloc.driver.bindings import cuda
from tests.support import GROWTH, KEEP, executed, holds


class TestCuPyMemoryAsync:
    """One allocation."""

    def test_the_stream_goes_before_the_memory(self, device: sa.Device, pool: sa.MemoryPool) -> None:
        buffer = pool.allocate(100, device.create_stream())
        gc.collect()
        buffer.fill(1)
        assert holds(buffer, 1)
        del buffer
        assert pool.statistics().used == 0


class TestCuPyMemoryAsyncPool:
    def test_most_of_the_device(self, device: sa.Device, stream: sa.Stream) -> None:
        """70 % of the memory, then 30 %: the first is used again, so both fit."""
        with sa.MemoryPool(device) as pool:
            total = device.total_memory
            pool.allocate(int(0.7 * total), stream).free()
            pool.allocate(int(0.3 * total), stream).free()
            stream.synchronize()
            assert pool.statistics().reserved == 0

    def test_free_all_blocks_returns_memory_to_others(self, raw: Any, device: sa.Device, stream: sa.Stream) -> None:
        """Memory that a pool keeps, and that no synchronisation has seen freed, is not there for cuMemAlloc."""
        total = device.total_memory
        with sa.MemoryPool(device, release_threshold=KEEP) as pool:
            pool.allocate(int(0.7 * total), stream).free()
            assert executed(stream)
            assert raw.cuMemAlloc(int(0.3 * total) + GROWTH)[0] == cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY
            stream.synchronize()
            pool.trim()
            result, pointer = raw.cuMemAlloc(int(0.3 * total) + GROWTH)
            assert result == cuda.CUresult.CUDA_SUCCESS
            raw.cuMemFree(pointer)

    def test_plain_memory_keeps_a_pool_from_growing(self, raw: Any, device: sa.Device, stream: sa.Stream) -> None:
        total = device.total_memory
        pointer = raw.cuMemAlloc(int(0.7 * total))[1]
        with sa.MemoryPool(device) as pool:
            with pytest.raises(sa.OutOfMemoryError):
                pool.allocate(int(0.35 * total), stream)
            raw.cuMemFree(pointer)
            with pool.allocate(int(0.35 * total), stream) as buffer:
                assert buffer.address
            stream.synchronize()


class TestRmmCudaAsyncMemoryResource:
    @pytest.mark.supports("fabric_handles")
    def test_enable_fabric(self, device: sa.Device) -> None:
        """RMM's own test cannot know whether to expect success; a device says which handles its pools can have."""
        offered = device.supports.pool_handle_types
        if offered is not None and sa.MemHandleType.FABRIC in offered:
            sa.MemoryPool(device, handle_types=sa.MemHandleType.FABRIC).close()
        else:
            with pytest.raises(sa.CudaError):
                sa.MemoryPool(device, handle_types=sa.MemHandleType.FABRIC)
