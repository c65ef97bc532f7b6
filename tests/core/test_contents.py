"""Contents at once: copies that allocate, bytes in and out, options of single copies; and the stream of a drop."""

import pickle
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc.testing import Gate, settle
from tests.support import KEEP, MiB, each_raises, holds, pattern, pending


class TestBytes:
    def test_in_and_out(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        data = pattern(3000)
        for given in (data, data.tobytes(), data.view(np.uint32).reshape(2, -1)):
            with pool.to_device(given, stream) as buffer:
                assert buffer.nbytes == 3000 and buffer.tobytes() == data.tobytes()
                assert buffer[8:16].tobytes() == data.tobytes()[8:16]
                assert buffer.view_as(np.uint32).tobytes() == data.tobytes()
                again = pool.to_device(pickle.loads(pickle.dumps(buffer.tobytes())), stream)
                assert again.tobytes(stream) == data.tobytes()
        with pool.to_device(b"", stream) as empty:
            assert empty.tobytes() == b""
        wrong: Any = 5
        with pytest.raises(TypeError):
            pool.to_device(wrong, stream)
        assert pool.statistics().used == again.nbytes

    def test_of_another_stream(self, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream, gate: Gate) -> None:
        with device.create_stream() as other, pool.to_device(bytes(64), stream) as buffer:
            other.wait(stream)
            gate.hold(stream)
            assert buffer.tobytes(other) == bytes(64)
            gate.open()


class TestCopy:
    def test_sizes(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.to_device(pattern(4096), stream) as buffer:
            for nbytes in (None, 4096, 1000, 10_000, 0):
                with buffer.copy(nbytes=nbytes) as made:
                    size = 4096 if nbytes is None else nbytes
                    assert (made.nbytes, made.owner, made.stream) == (size, pool, stream)
                    both = min(size, 4096)
                    assert made[:both].tobytes() == pattern(4096)[:both].tobytes()

    def test_to_another_allocator(self, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.to_device(pattern(4096), stream) as buffer, sa.MemoryPool(device) as other:
            with buffer.copy(allocator=other) as made:
                assert made.owner is other and made.tobytes() == buffer.tobytes()
            borrowed = sa.Buffer.from_handle(buffer.address, 4096, owner=buffer, stream=stream)
            each_raises(ValueError, borrowed.copy, match="has no allocator")
            with borrowed.copy(allocator=other) as made:
                assert made.tobytes() == buffer.tobytes()
            stream.synchronize()
        each_raises(sa.ClosedError, buffer.copy)

    @pytest.mark.bindings("13.0")
    def test_options(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        early = sa.CopyOptions(src_access_order="during_api_call")
        with pool.allocate(4096, stream) as buffer, pool.allocate(4096, stream) as other:
            buffer.copy_from(pattern(4096), options=early)
            buffer.copy_to(other, options=sa.CopyOptions(overlap_mode="prefer_overlap_with_compute"))
            other.view_as(np.uint32).copy_to(found := np.zeros(1024, np.uint32), options=sa.CopyOptions())
            stream.synchronize()
            assert found.tobytes() == pattern(4096).tobytes()


class TestStreamOfADrop:
    @pytest.mark.parametrize("kind", ["pool", "cache", "plain", "shared"])
    def test_comes_after_the_new_stream(self, device: sa.Device, stream: sa.Stream, gate: Gate, kind: str) -> None:
        posix = sa.MemHandleType.POSIX_FILE_DESCRIPTOR
        with sa.MemoryPool(device, release_threshold=KEEP, handle_types=posix) as pool, device.create_stream() as later:
            sources: dict[str, Any] = {"cache": sa.CachingAllocator(pool), "plain": sa.PlainMemory(device)}
            buffer = sources.get(kind, pool).allocate(MiB, stream)
            if kind == "shared":
                sa.ipc.share(buffer)
            address = buffer.address
            stream.synchronize()
            buffer.stream = later
            assert buffer.stream is later and buffer.address == address
            gate.hold(later)
            buffer.fill(1)
            del buffer
            settle()
            if kind == "plain":
                assert sa.pointer_attributes(address, driver=device.driver).kind is sa.MemoryKind.DEVICE
            else:
                with pool.allocate(MiB, stream) as other:  # not the same memory: its work is not done
                    assert other.address != address
                    other.fill(2)
                    stream.synchronize()
                    assert pending(later) and holds(other, 2)
            gate.open()
            later.synchronize()
            settle()

    def test_refused(self, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        buffer = pool.allocate(4, stream)
        with pytest.raises(TypeError):
            buffer.stream = 5  # type: ignore[assignment]
        other = device.create_stream()
        other.close()
        with pytest.raises(sa.ClosedError):
            buffer.stream = other
        assert buffer.stream is stream
        buffer.free()
        with pytest.raises(sa.ClosedError):
            buffer.stream = stream


@pytest.mark.managed
class TestManaged:
    @pytest.fixture
    def memories(self, device: sa.Device, stream: sa.Stream) -> list[sa.Buffer]:
        plain = sa.PlainMemory(device, managed=True)
        return [plain.allocate(MiB, stream) for _ in range(2)]

    @pytest.mark.bindings("13.0")
    def test_batches(self, device: sa.Device, stream: sa.Stream, memories: list[sa.Buffer]) -> None:
        sa.prefetch_batch(stream, memories, device)
        assert [one.range_attributes().last_prefetch_location for one in memories] == [device.location] * 2
        sa.prefetch_batch(stream, memories, [sa.MemLocation.host(), device])
        found = [one.range_attributes().last_prefetch_location for one in memories]
        assert found == [sa.MemLocation.host(), device.location]
        with pytest.raises(ValueError, match="1 locations for 2 memories"):
            sa.prefetch_batch(stream, memories, [device])
        sa.discard_prefetch_batch(stream, memories, sa.MemLocation.host())
        sa.discard_batch(stream, memories)
        stream.synchronize()
        several: list[Any] = [[], [b"bytes"]]
        for wrong in several:
            with pytest.raises((TypeError, ValueError), match="memories"):
                sa.discard_batch(stream, wrong)
        with pytest.raises(ValueError, match="legacy default stream"):
            sa.discard_batch(device.default_stream, memories)

    @pytest.mark.bindings("13.0")
    def test_properties(self, device: sa.Device, memories: list[sa.Buffer]) -> None:
        memory, host = memories[0], sa.MemLocation.host()
        assert (memory.read_mostly, memory.preferred_location, memory.accessed_by) == (False, None, frozenset())
        memory.read_mostly, memory.preferred_location, memory.accessed_by = True, device, {device, host}
        assert (memory.read_mostly, memory.preferred_location) == (True, device.location)
        assert memory.accessed_by == {device.location, host}
        memory.read_mostly, memory.preferred_location, memory.accessed_by = False, None, [host]
        assert (memory.read_mostly, memory.preferred_location, memory.accessed_by) == (False, None, frozenset([host]))
