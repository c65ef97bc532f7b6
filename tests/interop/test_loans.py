"""Memory of ours as arrays of libraries, and their arrays as memory of ours, in stream order both ways."""

import contextlib
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import interop, vmm
from streamalloc.driver.bindings import cuda
from streamalloc.formats.arrays import tensor_in
from streamalloc.testing import Gate
from tests.interop.conftest import Get
from tests.support import MiB, each_raises, holds, pending, read

pytestmark = pytest.mark.leaves("current context", "finalisers of libraries' arrays make their own context current")


def used(pool: sa.MemoryPool, device: sa.Device) -> int:
    gc.collect()
    device.synchronize()
    return pool.statistics().used


def waits(theirs: Any, gate: Gate) -> None:
    """A library's stream comes to its end once the gate is open."""
    with gate.device.create_stream() as probe:
        probe.wait(theirs)
        assert pending(probe)
        gate.open()
        probe.synchronize()


LEND: dict[str, Callable[[Any, Any], Any]] = {
    "cupy": lambda library, memory: interop.cupy.array(memory),
    "torch": lambda library, memory: interop.torch.tensor(memory),
    "numba": lambda library, memory: interop.numba.array(memory),
    "cuda_core": lambda library, memory: interop.cuda_core.buffer(memory, library.default),
}
"""An array over memory, by the library's name."""


class TestLent:
    @pytest.mark.parametrize("name", LEND)
    def test_memory_that_sleeps_is_refused(self, get: Get, name: str, device: sa.Device, stream: sa.Stream) -> None:
        library = get(name)
        with vmm.GrowableBuffer(device, 2 * MiB, 2 * MiB, stream=stream) as buffer:
            buffer.evict()
            each_raises(sa.EvictedError, lambda: LEND[name](library, buffer))

    def test_form(self, get: Get, pool: sa.MemoryPool, stream: sa.Stream, device: sa.Device) -> None:
        library = get("cupy")
        buffer = pool.allocate(64, stream)
        buffer.fill(5)
        for memory, arguments, shape in (
            (buffer, (), (64,)),
            (buffer, (np.float32, (4, -1)), (4, 4)),
            (buffer.view_as(np.int16, (2, 16)), (), (2, 16)),
            (buffer.view_as(np.int16), (None, (4, 8)), (4, 8)),
        ):
            array = interop.cupy.array(memory, *arguments)
            assert array.shape == shape and library.holds(array, 5)
            assert array.data.ptr == buffer.address
        del array, memory, buffer
        assert used(pool, device) == 0

    @pytest.mark.parametrize("name", LEND)
    def test_lives_as_long_as_the_array(self, get: Get, pool: sa.MemoryPool, stream: sa.Stream, name: str) -> None:
        library = get(name)
        buffer = pool.allocate(1000, stream)
        buffer.fill(9)
        array = LEND[name](library, buffer)
        del buffer
        assert used(pool, stream.device) == 1000
        assert library.holds(array, 9)
        library.fill(array, 4)
        assert library.holds(array, 4)
        del array
        assert used(pool, stream.device) == 0

    def test_the_library_waits_for_us(self, get: Get, pool: sa.MemoryPool, stream: sa.Stream, gate: Gate) -> None:
        library = get("cupy")
        theirs = library.stream()
        buffer = pool.allocate(4096, stream)
        gate.hold(stream)
        buffer.fill(1)
        array = interop.cupy.array(buffer, stream=theirs)
        library.fill(array, 2, theirs)
        waits(theirs, gate)
        assert holds(buffer, 2)

    @pytest.mark.parametrize("use", ["fill", "record", "free", "cached", "allocate", "dropped with it"])
    def test_whatever_comes_next_waits(
        self, get: Get, pool: sa.MemoryPool, stream: sa.Stream, device: sa.Device, gate: Gate, use: str
    ) -> None:
        """Without a point of work in between; and after it the stream is as direct as before."""
        library = get("cupy")
        theirs = library.stream()
        with sa.CachingAllocator(pool) as cache:
            source = cache if use == "cached" else pool
            buffer = source.allocate(MiB, stream)
            array = interop.cupy.array(buffer, stream=theirs)
            gate.hold(theirs)
            library.fill(array, 2, theirs)
            del array
            if use == "fill":
                buffer.fill(1)
            elif use == "record":
                assert not stream.record().query()
            elif use in ("free", "cached"):
                buffer.free()
            elif use == "allocate":
                pool.allocate(64, stream).free()
            else:
                del buffer
            other = source.allocate(MiB, stream)
            other.fill(3)
            assert not stream.capturable
            assert pending(stream)
            gate.open()
            device.synchronize()
            assert holds(other, 3) and (use != "fill" or holds(buffer, 1))

    def test_after_its_stream_was_closed(self, get: Get, pool: sa.MemoryPool, device: sa.Device, gate: Gate) -> None:
        """Deferred work waits for the library, and blocks no other call."""
        library = get("cupy")
        theirs = library.stream()
        with device.create_stream() as own:
            array = interop.cupy.array(pool.allocate(MiB, own), stream=theirs)
        gate.hold(theirs)
        library.fill(array, 2, theirs)
        del array
        gc.collect()
        assert pool.statistics().used == MiB
        gate.open()
        device.synchronize()
        assert used(pool, device) == 0

    @pytest.mark.parametrize("name", LEND)
    def test_the_memory_is_there_for_others_at_once(
        self, get: Get, machine: Any, pool: sa.MemoryPool, stream: sa.Stream, device: sa.Device, name: str
    ) -> None:
        """For those who allocate from the pool by its handle, with no call of the package in between."""
        library = get(name)
        array = LEND[name](library, pool.allocate(MiB, stream))
        library.fill(array, 9)
        device.synchronize()
        attribute = cuda.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT
        assert int(machine.cuMemPoolGetAttribute(cuda.CUmemoryPool(pool.handle), attribute)[1]) == MiB
        del array
        gc.collect()
        assert int(machine.cuMemPoolGetAttribute(cuda.CUmemoryPool(pool.handle), attribute)[1]) == 0


def _bytes_at(address: int, **fields: Any) -> Any:
    interface = {"shape": (64,), "typestr": "|u1", "data": (address, False), "version": 3, **fields}
    return SimpleNamespace(__cuda_array_interface__=interface)


def _in_a_pool(device: sa.Device, stream: sa.Stream, stack: contextlib.ExitStack) -> Any:
    buffer = stack.enter_context(sa.MemoryPool(device).allocate(64, stream))
    buffer.fill(7)
    return _bytes_at(buffer.address, stream=stream.handle)


def _in_a_pool_of_other_code(device: sa.Device, stream: sa.Stream, stack: contextlib.ExitStack) -> Any:
    driver: Any = device.driver
    raw = cuda.CUstream(stream.handle)
    pool = driver.cuMemPoolCreate(sa.MemPoolProps(location=device.location).to_driver())[1]
    address = driver.cuMemAllocFromPoolAsync(64, pool, raw)[1]
    stack.callback(driver.cuMemPoolDestroy, pool)
    stack.callback(stream.synchronize)
    stack.callback(driver.cuMemFreeAsync, address, raw)
    assert not driver.cuMemsetD8Async(address, 7, 64, raw)[0]
    return _bytes_at(int(address))


def _plain(device: sa.Device, stream: sa.Stream, stack: contextlib.ExitStack) -> Any:
    driver: Any = device.driver
    with device.current():
        address = driver.cuMemAlloc(64)[1]
        stack.callback(driver.cuMemFree, address)
        assert not driver.cuMemsetD8(address, 7, 64)[0]
    return _bytes_at(int(address), stream=1)


def _mapped(device: sa.Device, stream: sa.Stream, stack: contextlib.ExitStack) -> Any:
    buffer = stack.enter_context(vmm.GrowableBuffer(device, 2 << 20, 2 << 20, stream=stream))
    buffer.fill(7)
    return _bytes_at(buffer.address)


PLACES: dict[str, Callable[[sa.Device, sa.Stream, contextlib.ExitStack], Any]] = {
    "pool": _in_a_pool,
    "pool of other code": _in_a_pool_of_other_code,
    "plain": _plain,
    "mapped": _mapped,
}
"""Arrays with 64 times 7 in memory of a device."""


class TestBorrowed:
    @pytest.mark.parametrize("name", ["cupy", "torch", "numba"])
    def test_reads_and_writes(self, get: Get, stream: sa.Stream, name: str) -> None:
        library = get(name)
        array = library.make(4096)
        library.fill(array, 6)
        with getattr(interop, name).memory(array, stream) as memory:
            assert isinstance(memory, interop.Borrowed) and (memory.dtype.str, memory.shape) == ("|u1", (4096,))
            assert memory.nbytes == 4096 and memory.owner is not None and memory.location == sa.MemLocation.device(0)
            assert (read(memory) == 6).all()
            memory.fill(7)
        assert memory.closed
        memory.close()
        with pytest.raises(sa.ClosedError):
            memory.fill(1)
        assert library.holds(array, 7)

    def test_we_wait_for_the_library(self, get: Get, stream: sa.Stream, gate: Gate) -> None:
        library = get("cupy")
        theirs = library.stream()
        array = library.make(4096, theirs)
        gate.hold(theirs)
        library.fill(array, 1, theirs)
        with theirs:
            memory = interop.cupy.memory(array, stream)
        assert pending(stream)
        gate.open()
        assert (read(memory) == 1).all()

    def test_the_library_waits_for_us_at_the_end(self, get: Get, stream: sa.Stream, gate: Gate) -> None:
        library = get("cupy")
        theirs = library.stream()
        array = library.make(4096, theirs)
        with theirs:
            memory = interop.cupy.memory(array, stream)
        gate.hold(stream)
        memory.fill(1)
        memory.close()
        library.fill(array, 2, theirs)
        waits(theirs, gate)
        assert library.holds(array, 2, theirs)

    @pytest.mark.parametrize("name", ["cupy", "torch", "numba"])
    def test_an_array_that_is_dropped_is_the_library_s_at_once(
        self, get: Get, pool: sa.MemoryPool, stream: sa.Stream, gate: Gate, name: str
    ) -> None:
        """Though our work on it is queued: the library's stream waits for that."""
        library = get(name)
        # A library's own free may wait for the device.
        bridge = library.use(pool, callbacks=True)
        array = library.make(4096)
        memory = getattr(interop, name).memory(array, stream)
        gate.hold(stream)
        memory.fill(1)
        array = weakref.ref(array)
        del memory
        gc.collect()
        assert array() is None
        gate.open()
        stream.synchronize()
        library.finish(bridge)

    def test_without_a_lender_the_array_is_kept_until_our_work_is_done(
        self, pool: sa.MemoryPool, stream: sa.Stream, gate: Gate, device: sa.Device
    ) -> None:
        with device.create_stream() as other:
            buffer = pool.allocate(64, other)
            memory = interop.borrow(buffer, stream)
            gate.hold(stream)
            memory.fill(3)
            del buffer
            memory.close()
            gc.collect()
            assert pool.statistics().used == 64
            gate.open()
            device.synchronize()
            assert pool.statistics().used == 0

    @pytest.mark.parametrize("dtype", ["<i4", "<u4", "<f4", "<c8", "|b1"])
    def test_dropped(self, pool: sa.MemoryPool, stream: sa.Stream, device: sa.Device, dtype: str) -> None:
        kind = np.dtype(dtype)
        shape = (32 // kind.itemsize, 2)
        memory = interop.borrow(pool.allocate(64, stream).view_as(kind, shape), stream)
        assert (memory.dtype, memory.shape) == (kind, shape) and f"{kind} {shape}" in repr(memory)
        assert used(pool, device) == 64
        del memory
        assert used(pool, device) == 0

    @pytest.mark.parametrize("thing", [None, 5, b"bytes"])
    def test_no_array(self, stream: sa.Stream, thing: Any) -> None:
        with pytest.raises(TypeError, match="__dlpack__"):
            interop.borrow(thing, stream)

    def test_host_memory_is_refused(self, stream: sa.Stream) -> None:
        with pytest.raises(ValueError, match="not in device memory"):
            interop.borrow(np.zeros(4), stream)

    def test_what_dlpack_describes_is_device_memory(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(16, stream) as buffer, interop.borrow(buffer, stream) as borrowed:
            assert (borrowed.location, borrowed.managed, borrowed.host_accessible) == (buffer.location, False, False)

    @pytest.mark.parametrize(("bits", "lanes"), [(4, 1), (12, 1), (4, 3)])
    def test_elements_of_no_whole_bytes(self, pool: sa.MemoryPool, stream: sa.Stream, bits: int, lanes: int) -> None:
        class Array:
            def __dlpack_device__(self) -> tuple[int, int]:
                return buffer.__dlpack_device__()

            def __dlpack__(self, *, stream: int) -> Any:
                capsule = buffer.__dlpack__(stream=stream)
                tensor = tensor_in(capsule)
                tensor.bits, tensor.lanes = bits, lanes
                return capsule

        with pool.allocate(16, stream) as buffer, pytest.raises(ValueError, match=f"elements of {bits * lanes} bits"):
            interop.borrow(Array(), stream)

    @pytest.mark.parametrize("kind", PLACES)
    @pytest.mark.gpus(2)
    def test_memory_of_another_device(self, device: sa.Device, peer: sa.Device, stream: sa.Stream, kind: str) -> None:
        """The interface names no device, so the driver is asked; copies with the array, borrowed or not, go."""
        with peer.create_stream() as there, contextlib.ExitStack() as stack:
            array = PLACES[kind](peer, there, stack)
            target = stack.enter_context(sa.MemoryPool(device).allocate(64, stream))
            back = stack.enter_context(sa.MemoryPool(peer).allocate(64, there))
            there.synchronize()
            borrowed = stack.enter_context(interop.borrow(array, stream))
            assert (borrowed.location, borrowed.__dlpack_device__()) == (peer.location, (2, peer.ordinal))
            for source in (array, borrowed):
                target.fill(0)
                target.copy_from(source)
                assert holds(target, 7)
                back.copy_from(source, there)
                assert holds(back, 7)
            target.fill(8)
            target.copy_to(array)
            target.copy_from(borrowed)
            assert holds(target, 8)
            device.synchronize()
            peer.synchronize()

    def test_pinned_memory(self, machine: Any, device: sa.Device, stream: sa.Stream) -> None:
        with device.current():
            result, address = machine.cuMemHostAlloc(64, 0)
            assert not result
            with interop.borrow(_bytes_at(int(address)), stream) as borrowed:
                borrowed.fill(6)
                stream.synchronize()
                assert borrowed.location == sa.MemLocation.host() and borrowed.__dlpack_device__() == (3, 0)
                assert (borrowed.as_array() == 6).all()
            stream.synchronize()
            assert not machine.cuMemFreeHost(address)[0]

    def test_pageable_memory_is_refused(self, stream: sa.Stream) -> None:
        memory = np.zeros(64, np.uint8)
        with pytest.raises(ValueError, match="pageable host memory"):
            interop.borrow(_bytes_at(memory.ctypes.data), stream)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"mask": object()}, "has a mask"),
        ({"shape": (-1,)}, "a negative size"),
        ({"typestr": "|O"}, "Python objects"),
        ({"shape": (2, 8), "strides": (1, 2)}, "is not contiguous"),
        ({"shape": (8,), "strides": (2,)}, "is not contiguous"),
        ({"shape": (2, 2, 4), "strides": (16, 4, 1)}, "is not contiguous"),
    ],
)
def test_interfaces_that_are_refused(pool: sa.MemoryPool, stream: sa.Stream, wrong: dict[str, Any], says: str) -> None:
    """By borrowing, and by copies to and from them: their bytes would be taken for what they are not."""
    with pool.allocate(16, stream) as buffer, pool.allocate(16, stream) as other:
        interface = other.__cuda_array_interface__ | wrong
        array: Any = SimpleNamespace(__cuda_array_interface__=interface)
        each_raises(
            (TypeError, ValueError),
            lambda: interop.borrow(array, stream),
            lambda: buffer.copy_from(array),
            lambda: buffer.copy_to(array),
            match=says,
        )


def test_an_array_in_place_of_memory_is_refused(stream: sa.Stream) -> None:
    array: Any = np.zeros(4)
    each_raises(
        TypeError,
        lambda: interop.torch.tensor(array),
        lambda: interop.cupy.array(array),
        lambda: interop.numba.array(array),
        lambda: interop.jax.array(array),
        lambda: interop.cuda_core.buffer(array, stream),
        match="memory must be a Memory, not ndarray",
    )


def test_an_interface_of_more_elements_than_64_bits_count(pool: sa.MemoryPool, stream: sa.Stream) -> None:
    with pool.allocate(16, stream) as buffer:
        array: Any = SimpleNamespace(__cuda_array_interface__=buffer.__cuda_array_interface__ | {"shape": (1 << 62, 4)})
        with interop.borrow(array, stream) as borrowed:
            assert borrowed.nbytes == 1 << 64
