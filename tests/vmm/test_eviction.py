"""Evicting and restoring: the memory goes, the addresses stay, and the bytes come back."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from tests.support import Account, each_raises, holds, pattern
from tests.vmm.support import HOST, PAGE, READ, READWRITE, same, write

SIZE = 2 * PAGE + 12345
MAPPED = 3 * PAGE


@pytest.fixture
def device(account: Account) -> Iterator[sa.Device]:
    """Device 0, through a driver that keeps account of what is made."""
    with sd.use(account.driver):
        yield account.device


@pytest.fixture
def buffer(device: sa.Device) -> Iterator[vmm.GrowableBuffer]:
    """A buffer of two and a bit of eight pages, in pieces of a page."""
    with vmm.GrowableBuffer(device, 8 * PAGE, SIZE, chunk=PAGE) as buffer:
        yield buffer


class TestWithoutBackup:
    @pytest.mark.parametrize(
        "use",
        [
            lambda buffer: buffer.fill(1),
            lambda buffer: buffer.copy_to(np.zeros(SIZE, np.uint8)),
            lambda buffer: buffer.copy_from(np.zeros(SIZE, np.uint8)),
            lambda buffer: buffer[8:16].fill(1),
            lambda buffer: buffer[8:16].copy_to(bytearray(8)),
            lambda buffer: buffer.__cuda_array_interface__,
            lambda buffer: buffer.__dlpack__(),
            lambda buffer: buffer[8:16].__cuda_array_interface__,
            lambda buffer: buffer.resize(PAGE),
            lambda buffer: buffer.resize(SIZE),
            lambda buffer: buffer.grow(1),
            lambda buffer: vmm.dma_buf(buffer[:PAGE]),
        ],
    )
    def test_used_meanwhile(self, buffer: vmm.GrowableBuffer, use: Callable[[vmm.GrowableBuffer], object]) -> None:
        view, (mapping, *_) = buffer[8:16], buffer.mappings
        buffer.evict()
        each_raises(sa.EvictedError, lambda: use(buffer), match=r"restore\(\)")
        each_raises(sa.EvictedError, lambda: view.fill(1))
        each_raises(sa.ClosedError, lambda: mapping.fill(1))
        assert buffer.evicted
        buffer.restore()
        view.fill(1)
        assert holds(view, 1)

    def test_what_it_waits_for(self, account: Account) -> None:
        device = account.device
        waits = ("cuMemFree", "cuStreamSynchronize", "cuEventSynchronize", "cuMemUnmap")
        with (
            device.create_stream() as stream,
            stream.record() as event,
            vmm.GrowableBuffer(device, PAGE, PAGE) as buffer,
        ):
            for after, expected in (((), []), (stream, ["cuStreamSynchronize"]), ([event], ["cuEventSynchronize"])):
                done = len(account.calls(*waits))
                buffer.evict(after=after)
                assert account.calls(*waits)[done:] == [*expected, "cuMemUnmap"]
                buffer.restore()
            buffer.evict()  # after all work of the device
            assert account.calls("cuMemFree", "cuMemUnmap")[-2:] == ["cuMemFree", "cuMemUnmap"]


class TestWithBackup:
    def test_no_slower_copy_by_mistake(self, device: sa.Device, buffer: vmm.GrowableBuffer) -> None:
        """A pool whose memory the device may not use is refused: copies would go through a bounce buffer."""
        data = write(buffer, pattern(SIZE))
        with sa.MemoryPool(HOST) as pool:
            with pytest.raises(ValueError, match=r"pool.set_access\(device"):
                buffer.evict(pool)
            assert not buffer.evicted and pool.statistics().used == 0
        assert same(buffer, data)

    def test_what_is_refused(
        self, machine: Any, buffer: vmm.GrowableBuffer, pool: sa.MemoryPool, host: sa.MemoryPool, stream: sa.Stream
    ) -> None:
        """Memory of another kind, size or driver, freed memory, and the buffer itself, which would be gone."""
        data = write(buffer, pattern(SIZE))
        small, freed = host.allocate(SIZE - 1, stream), host.allocate(SIZE, stream)
        freed.free()
        with sa.MemoryPool(HOST, driver=sd.traced(machine)) as foreign:
            wrong: list[tuple[Any, type[Exception], str]] = [
                (3, TypeError, "backup"),
                (np.zeros(SIZE - 1, np.uint8), ValueError, "writable, contiguous array"),
                (np.zeros((SIZE, 2), np.uint8)[:, 0], ValueError, "writable, contiguous array"),
                (np.frombuffer(bytes(SIZE), np.uint8), ValueError, "writable, contiguous array"),
                (pool, ValueError, "host memory"),
                (small, ValueError, "backup has .* and the buffer"),
                (foreign, ValueError, "another driver"),
                (buffer, ValueError, "own memory"),
                (buffer[:], ValueError, "own memory"),
                (freed, sa.ClosedError, "freed"),
            ]
            for backup, error, words in wrong:
                with pytest.raises(error, match=words):
                    buffer.evict(backup)
                assert not buffer.evicted
        assert same(buffer, data) and pool.statistics().used == 0
        small.free()

    def test_freed_meanwhile(
        self, account: Account, buffer: vmm.GrowableBuffer, host: sa.MemoryPool, stream: sa.Stream
    ) -> None:
        """The restore says so, takes nothing, and can be given up by closing."""
        backup, before = host.allocate(SIZE, stream), account.physical_bytes
        buffer.evict(backup, stream=stream)
        backup.free()
        for _ in range(2):
            with pytest.raises(sa.ClosedError):
                buffer.restore()
            assert buffer.evicted and account.physical_bytes == before - MAPPED
        buffer.close()


@pytest.mark.gpus(2)
@pytest.mark.parametrize("flags", [READ, READWRITE])
def test_access_of_peers(device: sa.Device, peer: sa.Device, host: sa.MemoryPool, flags: sa.MemAccess) -> None:
    with vmm.GrowableBuffer(device, 4 * PAGE, SIZE, access={peer: flags}, chunk=PAGE) as buffer:
        data = write(buffer, pattern(SIZE))
        buffer.evict(host)
        assert peer.memory_info().total
        buffer.restore()
        device.synchronize()
        assert [mapping.access(peer) for mapping in buffer.mappings] == 3 * [flags]
        assert [mapping.access(device) for mapping in buffer.mappings] == 3 * [READWRITE]
        with peer.create_stream() as theirs, vmm.GrowableBuffer(peer, SIZE, SIZE, stream=theirs) as copy:
            copy.copy_from(buffer)
            assert same(copy, data)


def test_a_close_leaves_a_backup_of_somebody_else(device: sa.Device, host: sa.MemoryPool, stream: sa.Stream) -> None:
    with host.allocate(PAGE, stream) as backup:
        with vmm.GrowableBuffer(device, PAGE, PAGE) as buffer:
            data = write(buffer, pattern(PAGE))
            buffer.evict(backup)
        assert not backup.freed and np.array_equal(backup.as_array(), data)


class TestCapture:
    def test_evicting(self, buffer: vmm.GrowableBuffer, host: sa.MemoryPool, stream: sa.Stream) -> None:
        """Refused, with nothing added to the graph, on whatever stream."""
        data = write(buffer, pattern(SIZE))
        with stream.capture() as graph:
            ways: list[dict[str, Any]] = [{"stream": stream}, {"stream": stream, "after": ()}]
            for options, backup in itertools.product(ways, (host, None)):
                with pytest.raises(sa.CaptureError):
                    buffer.evict(backup, **options)
                assert not buffer.evicted
        assert graph.nodes == []
        graph.close()
        assert same(buffer, data) and host.statistics().used == 0

    def test_restoring(self, buffer: vmm.GrowableBuffer, host: sa.MemoryPool, stream: sa.Stream) -> None:
        """A copy that is captured would be made at the launch, or never."""
        data = write(buffer, pattern(SIZE))
        buffer.evict(host)
        with stream.capture() as graph:
            with pytest.raises(sa.CaptureError):
                buffer.restore(stream=stream)
            assert buffer.evicted
        assert graph.nodes == []
        graph.close()
        buffer.restore()
        assert same(buffer, data)


@pytest.mark.simulated_only("takes all memory of the device")
@pytest.mark.parametrize("room", [0, 1, 2])
def test_out_of_memory_in_the_middle_of_a_restore(room: int) -> None:
    """It stays evicted, with the whole backup, and takes nothing; later it can be restored."""
    machine: Any = sd.simulated(memory=16 * PAGE)
    account = Account(machine)
    device = account.device
    with sa.MemoryPool(HOST, driver=account.driver) as host:
        host.set_access(device, READWRITE)
        with vmm.GrowableBuffer(device, 8 * PAGE, SIZE, chunk=PAGE) as buffer:
            data, address = write(buffer, pattern(SIZE)), buffer.address
            buffer.evict(host)
            others = [vmm.PhysicalMemory(device, PAGE) for _ in range(16 - room)]
            for _ in range(2):
                with pytest.raises(sa.OutOfMemoryError, match="physical memory is exhausted") as caught:
                    buffer.restore()
                assert (caught.value.requested, caught.value.free) == (PAGE, 0)
                assert device.memory_info().free == room * PAGE
                assert buffer.evicted and buffer.mappings == () and buffer.nbytes == SIZE
                assert buffer.eviction is not None and buffer.eviction.nbytes == MAPPED
                kept = np.empty(SIZE, np.uint8)
                assert buffer._backup is not None
                buffer._backup.read(0, kept)
                assert np.array_equal(kept, data)
            for other in others[: 3 - room]:
                other.close()
            buffer.restore()
            buffer.stream.synchronize()
            assert buffer.address == address and same(buffer, data)
            assert host.statistics().used == 0
            for other in others:
                other.close()
    del host
    assert account.left == {} and device.memory_info().free == 16 * PAGE
