"""The end of things: collection in any order, drops, captures, threads, interpreter exit and forks."""

import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.core.deferred import work
from streamalloc.core.session import session_of
from streamalloc.testing import Gate
from streamalloc.vmm.internal import RemappableBuffer
from streamalloc.vmm.ownership import allocations_of
from tests.support import Account, each_raises, end_what_was_dropped, holds, names, pattern, read
from tests.vmm.support import HOST, PAGE, READWRITE, same, write

Python = Callable[..., CompletedProcess[str]]


def everything(device: sa.Device) -> list[object]:
    """One of each kind of object, in every state that a user can drop it in."""
    driver = device.driver
    pool = sa.MemoryPool(HOST, driver=driver)
    pool.set_access(device, READWRITE)
    memory, host = vmm.PhysicalMemory(device, PAGE), vmm.PhysicalMemory(HOST, PAGE, driver=driver)
    addresses = vmm.AddressRange(6 * PAGE, driver=driver)
    first, alias = addresses.map(memory, access=device), addresses.map(memory, 2 * PAGE, access=device)
    shared = addresses.map(host, PAGE, access=[device, HOST])
    gone = addresses.map(memory, 5 * PAGE)
    gone.close()
    released = vmm.PhysicalMemory(device, PAGE)
    addresses.map(released, 3 * PAGE)
    released.close()
    growable = vmm.GrowableBuffer(device, 4 * PAGE, 3 * PAGE, chunk=PAGE)
    piece = growable.mappings[0]
    found = vmm.PhysicalMemory.at(growable.address, driver=driver)
    evicted = vmm.GrowableBuffer(device, PAGE, 4096)
    evicted.evict(pool)
    given_up = vmm.GrowableBuffer(device, PAGE, 4096)
    given_up.evict()
    striped = vmm.stripe([device], PAGE)
    closed = vmm.GrowableBuffer(device, PAGE, 1)
    view = closed[:1]
    closed.close()
    return [
        device, pool, memory, host, addresses, first, alias, shared, gone, released, growable, piece, found, evicted,
        given_up, striped, closed, view, addresses.view(0, 3 * PAGE), first[8:16], growable[PAGE:][4:8], striped[:],
        shared.as_array(), growable.__dlpack__(stream=-1), addresses.mappings, evicted.eviction, evicted[:8],
    ]  # fmt: skip


def addresses(things: list[object]) -> vmm.AddressRange:
    """The range among them that belongs to no buffer."""
    return next(thing for thing in things if isinstance(thing, vmm.AddressRange))


class TestGarbage:
    def test_closed_in_any_order(self, machine: Any) -> None:
        """Nothing that can be closed minds what was closed before it, except a range that has mappings."""
        for seed in range(5):
            account = Account(machine)
            things = everything(account.device)
            random.Random(seed).shuffle(things)
            for thing in things:
                if isinstance(thing, vmm.AddressRange):
                    thing.unmap()
                if isinstance(thing, vmm.Mapping) and thing.range is not addresses(things):
                    continue  # a piece of a buffer, which is the buffer's to unmap
                if hasattr(thing, "close"):
                    thing.close()
                    thing.close()
            account.device.synchronize()
            left = {kind for kind in account.left if kind not in ("event", "stream")}
            assert left == set(), (seed, left)
            del thing, things

    @pytest.mark.parametrize("keep", ["mapping", "view", "slice", "array", "memory"])
    def test_what_is_kept_alive(self, account: Account, keep: str) -> None:
        """A piece keeps its range mapped; memory alone keeps only itself."""
        addresses = vmm.AddressRange(2 * PAGE, driver=account.driver)
        memory = vmm.PhysicalMemory(HOST, PAGE, driver=account.driver)
        mapping = addresses.map(memory, PAGE, access=[account.device, HOST])
        kept: Any = {
            "mapping": mapping,
            "view": addresses.view(PAGE, 2 * PAGE),
            "slice": mapping[16:32],
            "array": mapping.as_array(),
            "memory": memory,
        }[keep]
        del addresses, memory, mapping
        gc.collect()
        assert len(account.mapped) == (0 if keep == "memory" else 1)
        if keep == "array":
            kept[:] = 3
            assert (kept == 3).all()
        elif keep != "memory":
            kept.fill(3)
            assert holds(kept, 3)

    def test_a_driver_that_has_ended_is_no_news(self, machine: Any) -> None:
        driver = sd.faulty(machine, "cuMemAddressFree", result="CUDA_ERROR_DEINITIALIZED")
        addresses = vmm.AddressRange(PAGE, driver=driver)
        address = addresses.address
        del addresses
        end_what_was_dropped()
        assert driver.failed == ["cuMemAddressFree"]
        machine.cuMemAddressFree(address, PAGE)

    def test_dropped_memory_that_nobody_may_use_is_not_waited_for(self, account: Account) -> None:
        addresses, memory = vmm.AddressRange(PAGE, driver=account.driver), vmm.PhysicalMemory(account.device, PAGE)
        addresses.map(memory)
        del addresses, memory
        gc.collect()
        assert account.left == {} and account.calls("cuMemFree") == []


class TestCapture:
    def test_dropped_while_a_stream_is_captured(self, account: Account) -> None:
        """The device cannot be synchronised then: it is unmapped when the capture has ended."""
        device = account.device
        with device.create_stream() as stream:
            buffer: Any = vmm.GrowableBuffer(device, PAGE, PAGE)
            other = vmm.GrowableBuffer(device, PAGE, PAGE)
            with stream.capture() as graph:
                other.fill(1, stream)
                before = account.calls("cuMemFree", "cuMemUnmap")
                del buffer
                gc.collect()
                assert account.calls("cuMemFree", "cuMemUnmap") == before
                assert len(account.mapped) == 2
                other.fill(2, stream)
            assert len(account.mapped) == 1 and graph.nodes == ["MEMSET", "MEMSET"]
            with graph:
                graph.launch(stream)
                stream.synchronize()
            assert holds(other, 2)
            other.close()

    def test_a_graph_keeps_what_it_uses(self, account: Account) -> None:
        device = account.device
        with device.create_stream() as stream:
            buffer = vmm.GrowableBuffer(device, PAGE, PAGE)
            source = pattern(64)
            with stream.capture() as graph:
                buffer[:64].copy_from(source, stream)
            del buffer
            gc.collect()
            assert len(account.mapped) == 1
            graph.launch(stream)
            stream.synchronize()
            graph.close()


EXIT = """
import streamalloc as sa
from streamalloc import vmm
from streamalloc.testing import Gate
PAGE = 2 << 20
device = sa.Device(0); stream = device.create_stream()
pool = sa.MemoryPool(sa.MemLocation.host()); pool.set_access(device, sa.MemAccess.READWRITE)
buffer = vmm.GrowableBuffer(device, 4 * PAGE, PAGE, chunk=PAGE); buffer.fill(1); view = buffer[8:]
memory = vmm.PhysicalMemory(device, PAGE); addresses = vmm.AddressRange(PAGE)
mapping = addresses.map(memory, access=device)
evicted = vmm.GrowableBuffer(device, PAGE, PAGE); evicted.evict(pool)
array = vmm.SparseArray(device, (256, 256)); tiles = vmm.TilePool(device, PAGE); array.map(tiles, stream=stream)
pending = vmm.GrowableBuffer(device, PAGE, PAGE)
gate = Gate(device); gate.hold(stream); pending.fill(1, stream); gate.open()
holder = [pending, evicted]; holder.append(holder)
"""


def test_interpreter_exit(python: Python) -> None:
    """With live objects in a module, a cycle of them, and work that is pending."""
    done = python(EXIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# -- dropped objects end at a point of work, after the work that may use them; buffers that are remapped; their chunks


class TestQueuedWork:
    def test_is_not_waited_for_and_keeps_the_memory(self, account: Account) -> None:
        device = account.device
        stream = device.create_stream()
        buffer: Any = vmm.GrowableBuffer(device, 4 * PAGE, 2 * PAGE, chunk=PAGE)
        with Gate(device) as gate:
            gate.hold(stream)
            buffer.fill(5, stream)
            del buffer
            gc.collect()
            assert "cuMemFree" not in account.calls()
            for _ in range(3):
                vmm.PhysicalMemory(device, PAGE).close()
                assert len(account.mapped) == 2
            gate.open()
        device.synchronize()
        assert account.mapped == {} and "address range" not in account.left
        stream.close()

    def test_is_recorded_once_for_all_that_was_dropped_before(self, traced: Any, device: sa.Device) -> None:
        """However many streams there are; what is dropped later waits for a record of its own."""
        streams = [device.create_stream() for _ in range(5)]

        def mapped() -> int:
            work(session_of(device))
            calls = [call.name for call in traced.calls]
            return calls.count("cuMemMap") - calls.count("cuMemUnmap")

        with Gate(device) as gate:
            gate.hold(streams[0])
            buffers = [vmm.GrowableBuffer(device, 4 * PAGE, PAGE, chunk=PAGE) for _ in range(30)]
            late: Any = vmm.GrowableBuffer(device, 4 * PAGE, PAGE, chunk=PAGE)
            assert mapped() == 31
            buffers.clear()
            gc.collect()
            before = sum(call.name == "cuEventRecord" for call in traced.calls)
            assert mapped() == 31
            records = sum(call.name == "cuEventRecord" for call in traced.calls) - before
            assert records <= 2 * len(streams)
            with Gate(device) as other:
                other.hold(streams[1])
                late.fill(1, streams[1])
                del late
                gc.collect()
                gate.open()
                streams[0].synchronize()
                assert mapped() == 1
                other.open()
        device.synchronize()
        assert mapped() == 0
        for stream in streams:
            stream.close()

    @pytest.mark.simulated_only("memory of a known size")
    def test_that_is_done_lets_memory_that_has_run_out_be_made(self) -> None:
        """Dropped memory is released before an error says that there is none."""
        driver = sd.simulated(memory=64 << 20)
        device = sa.Device(0, driver=driver)
        size = device.memory_info().free // 2 // PAGE * PAGE + PAGE
        for _ in range(3):
            buffer = vmm.GrowableBuffer(device, size, size)
            buffer.fill(1)
            device.default_stream.synchronize()
            del buffer
        with pytest.raises(sa.OutOfMemoryError):
            kept = [vmm.GrowableBuffer(device, size, size) for _ in range(2)]
            del kept


class TestRemapping:
    """All of it, or the buffer stays as it was."""

    @staticmethod
    def make(device: sa.Device) -> Any:
        return lambda _: vmm.PhysicalMemory(device, PAGE)

    def test_maps_what_is_new_and_unmaps_what_is_gone(self, account: Account) -> None:
        device = account.device
        buffer = RemappableBuffer(device, 8 * PAGE, {device.location: READWRITE}, None, 0)
        for chunks in ("ab", "abc", "a", "axyz", "", "q"):
            staying = [mapping.memory for mapping in buffer.mappings]
            buffer.set_chunks(chunks, self.make(device), len(chunks) * PAGE)
            assert buffer.nbytes == buffer.mapped_bytes == len(chunks) * PAGE == len(account.mapped) * PAGE
            if chunks and staying and chunks[0] == "a":
                assert buffer.mappings[0].memory is staying[0]
            buffer.fill(7)
        buffer.close()
        each_raises(sa.ClosedError, lambda: buffer.set_chunks("q", self.make(device), PAGE))


def test_items_share_a_fence_that_is_younger(device: sa.Device) -> None:
    allocations = allocations_of(session_of(device))
    first = allocations.fence_since(0)
    assert allocations.fence_since(first.began - 1) is first
    assert allocations.fence_since(first.began) is not first


PACKAGE = str(Path(sa.__file__).parent)
DRIVERS = tuple(f"{PACKAGE}/{folder}/" for folder in ("checker", "driver", "simulator"))


@pytest.fixture
def buffer(account: Account) -> Iterator[vmm.GrowableBuffer]:
    """Three chunks of a page, made by the fast path, with bytes in them."""
    with vmm.GrowableBuffer(account.device, 8 * PAGE) as buffer:
        for _ in range(3):
            buffer.grow(PAGE)
        write(buffer, pattern(3 * PAGE))
        yield buffer


def handles(account: Account) -> int:
    return len(account.left.get("physical memory", ()))


class TestMemory:
    def test_as_an_object(self, account: Account, buffer: vmm.GrowableBuffer) -> None:
        mapping = buffer.mappings[1]
        memory = mapping.memory
        assert isinstance(memory, vmm.PhysicalMemory) and mapping.memory is memory is buffer.mappings[1].memory
        assert (memory.nbytes, memory.location, memory.mapping_count) == (PAGE, account.device.location, 1)
        assert memory.handle in account.left["physical memory"] and handles(account) == 3
        assert memory.properties == buffer.properties == memory.query()
        assert f"{memory.handle:#x}" in repr(memory) and repr(memory) in repr(mapping)
        assert buffer.range.draw(8) == "000....." and same(buffer, pattern(3 * PAGE))

    def test_mapped_elsewhere(self, account: Account, buffer: vmm.GrowableBuffer) -> None:
        memory = buffer.mappings[2].memory
        with vmm.AddressRange(PAGE, driver=account.driver) as other:
            alias = other.map(memory, access=account.device)
            assert same(alias, pattern(3 * PAGE)[2 * PAGE :])
            with pytest.raises(sa.InUseError, match="mapped in 2 places"):
                buffer.evict()
            buffer.resize(2 * PAGE)
            assert memory.closed and same(alias, pattern(3 * PAGE)[2 * PAGE :])
        assert handles(account) == 2

    def test_kept_longer_than_the_buffer(self, account: Account) -> None:
        buffer = vmm.GrowableBuffer(account.device, 8 * PAGE, PAGE)
        buffer.grow(PAGE)
        write(buffer, pattern(2 * PAGE))
        memory = buffer.mappings[1].memory
        del buffer
        gc.collect()
        assert list(account.left) == ["physical memory"] and handles(account) == 1 and not memory.closed
        with vmm.AddressRange(PAGE, driver=account.driver) as other:
            assert same(other.map(memory, access=account.device), pattern(2 * PAGE)[PAGE:])
        del memory
        assert account.left == {}

    @pytest.mark.parametrize("asked", [False, True])
    def test_of_what_is_gone(self, account: Account, buffer: vmm.GrowableBuffer, asked: bool) -> None:
        mapping = buffer.mappings[2]
        before = mapping.memory if asked else None
        buffer.resize(2 * PAGE)
        assert mapping.closed and isinstance(mapping.memory, vmm.PhysicalMemory) and mapping.memory.closed
        assert mapping.memory is (before or mapping.memory) and mapping.memory.nbytes == PAGE
        assert "closed" in repr(mapping) and handles(account) == 2
        with pytest.raises(sa.ClosedError):
            _ = mapping.memory.handle


class TestOneStep:
    def test_keeps_one_object(self, account: Account) -> None:
        def ours() -> Counter[str]:
            gc.collect()
            kinds = (type(one) for one in gc.get_objects())
            return Counter(kind.__name__ for kind in kinds if str(kind.__module__).startswith("streamalloc.vmm"))

        with vmm.GrowableBuffer(account.device, 256 * PAGE, PAGE) as buffer:
            buffer.grow(PAGE)
            before = ours()
            for _ in range(100):
                buffer.grow(PAGE)
            assert ours() - before == {"MappedBytes": 100}

    def test_asks_for_room_where_others_keep_memory(self) -> None:
        driver = sd.traced(sd.simulated(memory=16 * PAGE))
        device = sa.Device(0, driver=driver)
        with vmm.PageArena(device) as arena, vmm.GrowableBuffer(device, 32 * PAGE, PAGE) as buffer:
            arena.prepare(8).result()
            before = len(driver.calls)
            buffer.grow(8 * PAGE)
            made = [name for name in names(driver)[before:] if name != "cuThreadExchangeStreamCaptureMode"]
            assert made == ["cuMemCreate", *8 * ["cuMemRelease"], "cuMemCreate", "cuMemMap", "cuMemSetAccess"]
            with pytest.raises(sa.OutOfMemoryError, match="physical memory is exhausted") as caught:
                buffer.grow(8 * PAGE)
            assert caught.value.requested == 8 * PAGE and buffer.mapped_bytes == 9 * PAGE
            buffer.grow(PAGE)
            buffer.fill(1)
            assert (read(buffer) == 1).all() and len(buffer.mappings) == 3
