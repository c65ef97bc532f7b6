"""Other libraries' uses of virtual memory, on these objects.

NVIDIA's samples vectorAddMMAP and memMapIPCDrv (their local halves), HIP's tests of remapping and aliases (hipMemMap),
and plain models of vLLM's sleep mode (``CuMemAllocator``) and of TensorRT-LLM's virtual memory for KV caches
(``CudaVirtualMemoryManager``).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from tests.support import Account, holds, pattern, read
from tests.vmm.support import HOST, PAGE, READWRITE, same, write

COUNT = 50_000  # elements of a vector, as in vectorAddMMAP


@pytest.fixture
def host(device: sa.Device) -> Iterator[sa.MemoryPool]:
    """A pool in host memory that the device may use."""
    with sa.MemoryPool(HOST) as pool:
        pool.set_access(device, READWRITE)
        yield pool


class TestVectorAddMMAP:
    """``simpleMallocMultiDeviceMmap``: one contiguous range, an equal part of it on each device."""

    @pytest.mark.gpus(2)
    @pytest.mark.parametrize("alignment", [0, 16 * PAGE])
    def test_vectors_over_two_devices(self, device: sa.Device, peer: sa.Device, alignment: int) -> None:
        rng = np.random.default_rng(1)
        a, b = (rng.random(COUNT, np.float32) for _ in range(2))
        # Rounded up to whole pages for each of the two devices, as the sample does it.
        expected = -(-4 * COUNT // (2 * PAGE)) * 2 * PAGE
        with (
            vmm.stripe([device, peer], 4 * COUNT, alignment=alignment) as one,
            vmm.stripe([device, peer], 4 * COUNT, alignment=alignment) as two,
            vmm.stripe([device, peer], 4 * COUNT, alignment=alignment) as out,
        ):
            for vector in (one, two, out):
                assert vector.capacity == expected and vector.address % (alignment or PAGE) == 0
                assert [mapping.location.id for mapping in vector.mappings] == [0, 1]
                assert [mapping.nbytes for mapping in vector.mappings] == [expected // 2] * 2
                # The sample gives the handles back once they are mapped; here each piece keeps its own.
                assert [mapping.access(who) for mapping in vector.mappings for who in (device, peer)] == 4 * [READWRITE]
            one.copy_from(a)
            two.copy_from(b)
            found_a, found_b, total = (np.zeros(COUNT, np.float32) for _ in range(3))
            with peer.create_stream() as theirs:
                device.synchronize()
                one.copy_to(found_a, theirs)  # a device reads what the other wrote
                two.copy_to(found_b, theirs)
                theirs.synchronize()
                out.copy_from(found_a + found_b, theirs)
                theirs.synchronize()
            out.copy_to(total)
            device.synchronize()
            assert np.array_equal(total, a + b)

    @pytest.mark.gpus(2)
    def test_by_hand(self, device: sa.Device, peer: sa.Device) -> None:
        """The sample's own steps: reserve, create and map for each device, release the handles, give access."""
        before = [one.memory_info().free for one in (device, peer)]
        data = pattern(2 * PAGE)
        with vmm.AddressRange(2 * PAGE) as addresses:
            for place, owner in enumerate((device, peer)):
                with vmm.PhysicalMemory(owner, PAGE) as memory:
                    addresses.map(memory, place * PAGE)
            addresses.set_access([device, peer])
            whole = addresses.view()
            write(whole, data)
            with peer.create_stream() as theirs:
                seen = np.zeros(2 * PAGE, np.uint8)
                whole.copy_to(seen, theirs)
                theirs.synchronize()
            assert np.array_equal(seen, data) and addresses.draw() == "01"
        assert [one.memory_info().free for one in (device, peer)] == before


class TestMemMapIPCDrv:
    """One range with a piece for each process, of memory that can be exported; here without the other processes."""

    PROCESSES = 4

    def test_local_half(self, machine: Any) -> None:
        account = Account(machine)
        device = account.device
        kind = sa.MemHandleType.POSIX_FILE_DESCRIPTOR
        memories = [vmm.PhysicalMemory(device, PAGE, handle_types=kind) for _ in range(self.PROCESSES)]
        with device.current():
            handles = [memory.export() for memory in memories]
        assert len({fd.fileno() for fd in handles}) == self.PROCESSES  # type: ignore[union-attr]
        with vmm.AddressRange(self.PROCESSES * PAGE, driver=account.driver) as addresses:
            for place, memory in enumerate(memories):
                addresses.map(memory, place * PAGE)
                memory.close()  # the mapping keeps it, as the sample relies on
            addresses.set_access(device)
            for place, mapping in enumerate(addresses.mappings):
                mapping.fill(place + 1)
            found = read(addresses.view())
            assert found.reshape(self.PROCESSES, PAGE)[:, ::4096].max(axis=1).tolist() == [1, 2, 3, 4]
            assert found.reshape(self.PROCESSES, PAGE)[:, ::4096].min(axis=1).tolist() == [1, 2, 3, 4]
        for fd in handles:
            fd.close()  # type: ignore[union-attr]
        assert account.left == {}


class TestHip:
    """Unit tests of ``hipMemMap``."""

    def test_one_handle_remapped_twenty_times(self, device: sa.Device) -> None:
        """The bytes are the memory's, wherever it is mapped."""
        with vmm.AddressRange(8 * PAGE) as addresses, vmm.PhysicalMemory(device, PAGE) as memory:
            data = pattern(PAGE)
            for number in range(20):
                with addresses.map(memory, number % 8 * PAGE, access=device) as mapping:
                    if number == 0:
                        write(mapping, data)
                    assert same(mapping[number * 4096 :][:4096], data[number * 4096 :][:4096])
                    mapping[number * 4096 : number * 4096 + 1].fill(number)
                    data[number * 4096] = number
                assert addresses.mappings == () and memory.mapping_count == 0
            with addresses.map(memory, access=device) as mapping:
                assert same(mapping, data)

    def test_three_aliases_see_one_write(self, device: sa.Device) -> None:
        with vmm.AddressRange(8 * PAGE) as addresses, vmm.PhysicalMemory(device, PAGE) as memory:
            aliases = [addresses.map(memory, place * PAGE, access=device) for place in (0, 1, 4)]
            for number, writer in enumerate(aliases):
                data = write(writer, pattern(PAGE, number))
                assert all(same(alias, data) for alias in aliases)
            assert memory.mapping_count == 3
            addresses.unmap()  # all three and the holes between them


class Sleeper:
    """vLLM's sleep mode: weights are kept in host memory while the engine sleeps, caches are given up."""

    def __init__(self, device: sa.Device, host: sa.MemoryPool) -> None:
        self.device, self.host = device, host
        self.buffers: list[tuple[str, vmm.GrowableBuffer]] = []

    def allocate(self, nbytes: int, tag: str) -> vmm.GrowableBuffer:
        self.buffers.append((tag, vmm.GrowableBuffer(self.device, nbytes, nbytes)))
        return self.buffers[-1][1]

    def sleep(self, offload: tuple[str, ...] = ("weights",)) -> None:
        for tag, buffer in self.buffers:
            buffer.evict(self.host if tag in offload else None)

    def wake_up(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        for tag, buffer in self.buffers:
            if tag in tags and buffer.evicted:
                buffer.restore()


class TaggedMemory:
    """TensorRT-LLM's virtual memory: given back and brought back by tag, the latter for all of a tag or for none."""

    def __init__(self, device: sa.Device, host: sa.MemoryPool) -> None:
        self.device, self.host = device, host
        self.tagged: dict[str, list[vmm.GrowableBuffer]] = {}

    def allocate(self, nbytes: int, tag: str) -> vmm.GrowableBuffer:
        self.tagged.setdefault(tag, []).append(vmm.GrowableBuffer(self.device, nbytes, nbytes))
        return self.tagged[tag][-1]

    def release_with_tag(self, tag: str) -> None:
        for buffer in self.tagged[tag]:
            buffer.evict(self.host)

    def materialize_with_tag(self, tag: str) -> None:
        with contextlib.ExitStack() as undoing:
            for buffer in self.tagged[tag]:
                buffer.restore()
                undoing.callback(buffer.evict, self.host)
            undoing.pop_all()


@pytest.mark.parametrize("model", [Sleeper, TaggedMemory])
def test_models_are_short(model: type) -> None:
    assert len(inspect.getsource(model).splitlines()) <= 22  # with the docstring and the blank lines


class TestSleepMode:
    def test_sleeps_and_wakes(self, machine: Any) -> None:
        account = Account(machine)
        device = account.device
        with sa.MemoryPool(HOST, driver=account.driver) as host:
            host.set_access(device, READWRITE)
            engine = Sleeper(device, host)
            weights = [engine.allocate(nbytes, "weights") for nbytes in (PAGE, 12345)]
            cache = engine.allocate(3 * PAGE, "kv_cache")
            addresses = [buffer.address for _, buffer in engine.buffers]
            data = [write(buffer, pattern(buffer.nbytes, seed)) for seed, buffer in enumerate(weights)]
            for _ in range(2):
                awake = account.physical_bytes
                engine.sleep()
                assert account.physical_bytes == awake - 5 * PAGE
                assert host.statistics().used == PAGE + 12345
                engine.wake_up(("weights",))  # the weights first, to be updated while there is no cache yet
                device.synchronize()
                assert host.statistics().used == 0
                assert all(same(buffer, bytes_) for buffer, bytes_ in zip(weights, data, strict=True))
                with pytest.raises(sa.EvictedError):
                    cache.fill(0)
                engine.wake_up(("kv_cache",))
                cache.fill(0)
                assert holds(cache, 0) and account.physical_bytes == awake
                assert [buffer.address for _, buffer in engine.buffers] == addresses
            for _, buffer in engine.buffers:
                buffer.close()
        del host, engine, weights, cache, buffer
        assert account.left == {}


class TestTags:
    def test_released_and_brought_back(self, device: sa.Device, host: sa.MemoryPool) -> None:
        memory = TaggedMemory(device, host)
        caches, other = [memory.allocate(PAGE, "cache") for _ in range(3)], memory.allocate(PAGE, "other")
        data = [write(buffer, pattern(PAGE, seed)) for seed, buffer in enumerate([*caches, other])]
        before = device.memory_info().free
        memory.release_with_tag("cache")
        assert device.memory_info().free == before + 3 * PAGE and same(other, data[3])
        memory.materialize_with_tag("cache")
        device.synchronize()
        assert all(same(buffer, bytes_) for buffer, bytes_ in zip(caches, data, strict=False))
        assert device.memory_info().free == before and host.statistics().used == 0
        for buffer in (*caches, other):
            buffer.close()

    @pytest.mark.parametrize("nth", [4, 5, 6])
    def test_one_that_fails_takes_the_others_back(self, machine: Any, nth: int) -> None:
        """If the first, second or third of three finds no memory, none is mapped, and all bytes are kept."""
        account = Account(machine)
        device = sa.Device(0, driver=sd.faulty(account.driver, "cuMemCreate", nth))
        with sa.MemoryPool(HOST, driver=device.driver) as host:
            host.set_access(device, READWRITE)
            memory = TaggedMemory(device, host)
            caches = [memory.allocate(PAGE, "cache") for _ in range(3)]
            data = [write(buffer, pattern(PAGE, seed)) for seed, buffer in enumerate(caches)]
            memory.release_with_tag("cache")
            with pytest.raises(sa.OutOfMemoryError):
                memory.materialize_with_tag("cache")
            assert all(buffer.evicted for buffer in caches) and account.mapped == {}
            device.synchronize()
            assert host.statistics().used == 3 * PAGE
            memory.materialize_with_tag("cache")
            device.synchronize()
            assert all(same(buffer, bytes_) for buffer, bytes_ in zip(caches, data, strict=True))
            for buffer in caches:
                buffer.close()
        del host, memory, caches, buffer
        assert account.left == {}
