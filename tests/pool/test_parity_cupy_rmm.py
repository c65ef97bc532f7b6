"""CuPy's and RMM's tests of their own stream-ordered pools, with this package's names.

CuPy: ``MemoryAsyncPool`` and ``malloc_async`` (tests/cupy_tests/cuda_tests/test_memory.py). RMM:
``CudaAsyncMemoryResource``, its view, pinned and managed relatives, and ``DeviceBuffer`` (python/rmm/rmm/tests).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc.driver.bindings import cuda
from tests.support import GROWTH, KEEP, MiB, executed, holds, read

SIZES = [1, 2, 7, 8, 9, 32, 128]
DTYPES = [np.int8, np.uint16, np.int32, np.float32, np.float64, np.bool_]


class TestCuPyMemoryAsync:
    """One allocation."""

    def test_zero_bytes(self, stream: sa.Stream) -> None:
        buffer = sa.allocate(0, stream)
        assert (buffer.address, buffer.nbytes) == (0, 0)
        buffer.free()

    def test_knows_its_stream(self, device: sa.Device, stream: sa.Stream) -> None:
        for one in (stream, device.default_stream):
            with sa.allocate(100, one) as buffer:
                assert buffer.stream is one

    def test_the_stream_goes_before_the_memory(self, device: sa.Device, pool: sa.MemoryPool) -> None:
        buffer = pool.allocate(100, device.create_stream())
        gc.collect()
        buffer.fill(1)
        assert holds(buffer, 1)
        del buffer
        assert pool.statistics().used == 0

    def test_freed_on_the_same_stream(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        pool.allocate(100, stream).free(stream)
        assert pool.statistics().used == 0

    def test_freed_on_another_stream(self, device: sa.Device, pool: sa.MemoryPool) -> None:
        first = device.create_stream()
        buffer = pool.allocate(100, first)
        first.close()
        with device.create_stream() as second:
            buffer.free(second)
        assert pool.statistics().used == 0

    def test_uses_foreign_streams(self, stream: sa.Stream) -> None:
        class ExternalStream:
            ptr = stream.handle

        with sa.allocate(100, ExternalStream()) as buffer:
            buffer.fill(3)
            stream.synchronize()
            assert holds(buffer, 3)


class TestCuPyMemoryAsyncPool:
    def test_malloc(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(100, stream) as buffer:
            assert buffer.address and buffer.owner is pool

    def test_most_of_the_device(self, device: sa.Device, stream: sa.Stream) -> None:
        """70 % of the memory, then 30 %: the first is used again, so both fit."""
        with sa.MemoryPool(device) as pool:
            total = device.total_memory
            pool.allocate(int(0.7 * total), stream).free()
            pool.allocate(int(0.3 * total), stream).free()
            stream.synchronize()
            assert pool.statistics().reserved == 0

    def test_free_all_blocks(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        pool.allocate(1, stream).free()
        stream.synchronize()
        assert pool.trim() == GROWTH and pool.statistics().reserved == 0

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

    def test_used_and_total_bytes(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        """``used_bytes``, ``free_bytes`` and ``total_bytes`` of CuPy's pools."""
        with pool.allocate(512, stream), pool.allocate(512, stream):
            statistics = pool.statistics()
            assert (statistics.used, statistics.reserved - statistics.used) == (1024, GROWTH - 1024)
        assert pool.statistics() == (GROWTH, GROWTH, 0, 1024)

    def test_a_limit(self, device: sa.Device, stream: sa.Stream) -> None:
        """CuPy's async pool refuses ``set_limit``; here a limit belongs to the pool from the start."""
        with sa.MemoryPool(device, max_size=GROWTH) as pool, pool.allocate(GROWTH, stream):
            with pytest.raises(sa.OutOfMemoryError) as caught:
                pool.allocate(1, stream)
            assert caught.value.limit == GROWTH

    def test_freed_memory_is_used_again(self, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        one = pool.allocate(4 * MiB, stream)
        address = one.address
        one.free()
        with pool.allocate(4 * MiB, stream) as again:
            assert again.address == address

    def test_not_by_a_stream_that_knows_nothing_of_it(
        self, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream
    ) -> None:
        pool.attributes.reuse_allow_opportunistic = False
        one = pool.allocate(4 * MiB, stream)
        address = one.address
        one.free()
        with device.create_stream() as other, pool.allocate(4 * MiB, other) as new:
            assert new.address != address
            other.synchronize()

    def test_current_allocator(self, device: sa.Device, stream: sa.Stream) -> None:
        """``using_allocator``: a block in which everybody allocates from this pool."""
        with sa.MemoryPool(device) as pool:
            with pool.make_current(), sa.allocate(MiB, stream):
                assert pool.statistics().used == MiB
            with sa.allocate(MiB, stream):
                assert pool.statistics().used == 0


class TestRmmCudaAsyncMemoryResource:
    @pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(np.dtype(dtype)))
    @pytest.mark.parametrize("count", SIZES)
    def test_arrays_of_every_kind(self, pool: sa.MemoryPool, stream: sa.Stream, count: int, dtype: Any) -> None:
        array = np.arange(count).astype(dtype)
        with pool.allocate(array.nbytes, stream) as buffer:
            buffer.copy_from(array)
            assert np.array_equal(read(buffer).view(dtype), array)

    @pytest.mark.parametrize("count", SIZES)
    def test_of_the_current_resource(self, device: sa.Device, stream: sa.Stream, count: int) -> None:
        with sa.MemoryPool(device) as resource, resource.make_current():
            assert sa.MemoryPool.current(device) is resource
            with sa.allocate(count, stream) as buffer:
                buffer.copy_from(np.full(count, 5, np.uint8))
                assert holds(buffer, 5)

    def test_enable_ipc(self, device: sa.Device, stream: sa.Stream) -> None:
        handles = sa.MemHandleType.POSIX_FILE_DESCRIPTOR
        with sa.MemoryPool(device, handle_types=handles) as resource, resource.allocate(MiB, stream) as buffer:
            assert sa.pointer_attributes(buffer.address).shareable

    @pytest.mark.supports("fabric_handles")
    def test_enable_fabric(self, device: sa.Device) -> None:
        """RMM's own test cannot know whether to expect success; a device says which handles its pools can have."""
        offered = device.supports.pool_handle_types
        if offered is not None and sa.MemHandleType.FABRIC in offered:
            sa.MemoryPool(device, handle_types=sa.MemHandleType.FABRIC).close()
        else:
            with pytest.raises(sa.CudaError):
                sa.MemoryPool(device, handle_types=sa.MemHandleType.FABRIC)

    @pytest.mark.parametrize("count", SIZES)
    def test_release_threshold(self, device: sa.Device, stream: sa.Stream, count: int) -> None:
        """Whole growth steps count: below one of them nothing is kept."""
        for threshold, kept in ((count, 0), (GROWTH, GROWTH)):
            with sa.MemoryPool(device, release_threshold=threshold) as resource:
                for size in (count, 2 * count):
                    with resource.allocate(size, stream) as buffer:
                        buffer.fill(1)
                    stream.synchronize()
                    assert resource.statistics().reserved == kept

    def test_initial_pool_size(self, device: sa.Device, stream: sa.Stream) -> None:
        """RMM reserves an initial size by one allocation and a free under a threshold; so does a user here."""
        with sa.MemoryPool(device, release_threshold=KEEP) as resource:
            resource.allocate(100 * MiB, stream).free()
            stream.synchronize()
            assert resource.statistics() == (4 * GROWTH, 4 * GROWTH, 0, 100 * MiB)
            with resource.allocate(90 * MiB, stream):
                assert resource.statistics().reserved == 4 * GROWTH

    def test_reuse_options(self, device: sa.Device) -> None:
        with sa.MemoryPool(device) as resource:
            resource.attributes.reuse_follow_event_dependencies = False
            resource.attributes.reuse_allow_opportunistic = False
            resource.attributes.reuse_allow_internal_dependencies = False
            values = dict(resource.attributes)
            assert not any(value for name, value in values.items() if name.startswith("reuse"))

    @pytest.mark.parametrize("size", [-1, -(1 << 40)])
    def test_negative_sizes(self, pool: sa.MemoryPool, stream: sa.Stream, size: int) -> None:
        with pytest.raises(ValueError, match="nbytes"):
            pool.allocate(size, stream)


class TestRmmView:
    """``CudaAsyncViewMemoryResource``: a pool that other code made is used and not destroyed."""

    def test_the_default_pool(self, machine: Any, device: sa.Device, stream: sa.Stream) -> None:
        view = sa.MemoryPool.default(device)
        with view.allocate(1024, stream) as buffer:
            assert view.statistics().used >= 1024 and buffer.owner is view
        view.close()
        assert (
            machine.cuMemPoolGetAttribute(
                machine.cuDeviceGetDefaultMemPool(0)[1], cuda.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT
            )[0]
            == cuda.CUresult.CUDA_SUCCESS
        )


class TestRmmPinned:
    """``CudaAsyncPinnedMemoryResource``: a pool in host memory that the device may use."""

    @pytest.mark.parametrize("count", SIZES)
    def test_host_and_device_share_it(self, device: sa.Device, stream: sa.Stream, count: int) -> None:
        with sa.MemoryPool(sa.MemLocation.host()) as resource:
            resource.set_access(device, sa.MemAccess.READWRITE)
            with resource.allocate(count, stream) as buffer:
                buffer.fill(7)
                stream.synchronize()
                assert (buffer.as_array() == 7).all()
            stream.synchronize()


class TestRmmDeviceBuffer:
    def test_size_and_pointer(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        for size in (0, 1, 1000):
            with pool.allocate(size, stream) as buffer:
                assert buffer.nbytes == len(buffer) == size and bool(buffer.address) == bool(size)

    def test_to_and_from_the_host(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        text = b"abcdefgh" * 100
        with pool.allocate(len(text), stream) as buffer:
            buffer.copy_from(text)
            target = bytearray(len(text))
            buffer.copy_to(target)
            assert bytes(target) == text

    def test_copies_of_another_size_are_refused(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(8, stream) as buffer:
            for wrong in (bytearray(7), bytearray(9)):
                with pytest.raises(ValueError):
                    buffer.copy_to(wrong)

    @pytest.mark.parametrize("transform", [lambda address: address, np.uint64])
    def test_interface(self, pool: sa.MemoryPool, stream: sa.Stream, transform: Callable[[int], Any]) -> None:
        with pool.allocate(8, stream) as buffer:
            interface = buffer.__cuda_array_interface__
            assert interface["data"] == (transform(buffer.address), False)
            assert (interface["shape"], interface["strides"], interface["typestr"]) == ((8,), None, "|u1")
            assert interface["version"] == 3

    def test_deleted_before_its_resource(self, device: sa.Device, stream: sa.Stream) -> None:
        resource = sa.MemoryPool(device)
        buffer = resource.allocate(8, stream)
        del resource
        gc.collect()
        buffer.fill(1)  # a buffer keeps its pool
        assert holds(buffer, 1)
