"""NVIDIA's samples streamOrderedAllocation and streamOrderedAllocationP2P, with fills and copies for kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from tests.support import GROWTH, KEEP, names

COUNT = 1 << 20  # elements of a vector, as in the sample
NBYTES = 4 * COUNT


def _round(stream: sa.Stream, allocate: Any, value: float) -> sa.Buffer:
    """Two inputs from the host, an output made of their halves, and the output on the host; all in stream order."""
    a, b = np.full(COUNT, value, np.float32), np.arange(COUNT, dtype=np.float32)
    one, two, out = (allocate(NBYTES, stream) for _ in range(3))
    one.copy_from(a)
    two.copy_from(b)
    out[: NBYTES // 2].copy_from(one[: NBYTES // 2])
    out[NBYTES // 2 :].copy_from(two[NBYTES // 2 :])
    result = np.zeros(COUNT, np.float32)
    out.copy_to(result)
    for buffer in (one, two):
        buffer.free()
    assert np.array_equal(result[: COUNT // 2], a[: COUNT // 2])
    assert np.array_equal(result[COUNT // 2 :], b[COUNT // 2 :])
    return out  # type: ignore[no-any-return]


class TestStreamOrderedAllocation:
    @pytest.mark.parametrize(("threshold", "kept", "grown"), [(0, 0, 5), (KEEP, GROWTH, 1)])
    def test_rounds_with_a_synchronisation_between(
        self, traced: Any, threshold: int, kept: int, grown: int, device: sa.Device, stream: sa.Stream
    ) -> None:
        """The release threshold decides whether each round takes its memory from the system anew."""
        with sa.MemoryPool(device, release_threshold=threshold) as pool:
            took, addresses = 0, set()
            for number in range(5):
                took += pool.statistics().reserved == 0
                out = _round(stream, pool.allocate, float(number))
                addresses.add(out.address)
                out.free()
                assert pool.statistics() == (GROWTH, GROWTH, 0, 3 * NBYTES)
                stream.synchronize()
                assert pool.statistics().reserved == kept
            assert took == grown and len(addresses) == 1
            assert names(traced, "cuMemPoolTrimTo", "cuCtxSynchronize") == []

    def test_the_threshold_of_the_default_pool(self, device: sa.Device, stream: sa.Stream) -> None:
        default = sa.MemoryPool.default(device)
        default.trim()  # other tests and libraries use it, too
        before = default.attributes.release_threshold
        default.attributes.release_threshold = KEEP
        try:
            for _ in range(3):
                _round(stream, sa.allocate, 2.0).free()
                stream.synchronize()
                assert default.statistics().reserved == GROWTH
        finally:
            default.attributes.release_threshold = before
        assert default.trim() == GROWTH


@pytest.mark.gpus(2)
class TestStreamOrderedAllocationP2P:
    @pytest.fixture
    def source(self, device: sa.Device, peer: sa.Device) -> sa.MemoryPool:
        """A pool of device 0 that device 1 may use."""
        if not peer.can_access(device):
            pytest.skip("the devices are no peers")
        pool = sa.MemoryPool(device, release_threshold=KEEP)
        pool.set_access(peer, sa.MemAccess.READWRITE)
        return pool

    def test_one_reads_what_the_other_wrote(self, source: sa.MemoryPool, stream: sa.Stream, peer: sa.Device) -> None:
        expected = np.arange(COUNT, dtype=np.int32)
        with peer.create_stream() as theirs:
            data = source.allocate(NBYTES, stream)
            data.copy_from(expected)
            data[:4].fill(-1, stream, width=4)
            theirs.wait(stream.record())
            copy = sa.allocate(NBYTES, theirs)
            assert copy.location == peer.location
            copy.copy_from(data, theirs)
            copy[4:8].fill(-2, theirs, width=4)
            data[8:12].fill(-3, theirs, width=4)  # device 1 writes to device 0's memory
            stream.wait(theirs.record())
            result, there = np.zeros(COUNT, np.int32), np.zeros(COUNT, np.int32)
            copy.copy_to(there, theirs)
            data.copy_to(result, stream)
            data.free()
            copy.free()
            for one in (stream, theirs):
                one.synchronize()
        assert there[:3].tolist() == [-1, -2, 2] and np.array_equal(there[2:], expected[2:])
        assert result[:3].tolist() == [-1, 1, -3] and np.array_equal(result[3:], expected[3:])
        source.close()

    def test_memory_of_before_the_grant(self, device: sa.Device, stream: sa.Stream, peer: sa.Device) -> None:
        with sa.MemoryPool(device) as pool, pool.allocate(NBYTES, stream) as data, peer.create_stream() as theirs:
            theirs.wait(stream)
            pool.set_access(peer, sa.MemAccess.READWRITE)
            data.fill(7, theirs)
            stream.wait(theirs)
            target = np.zeros(NBYTES, np.uint8)
            data.copy_to(target)
            assert (target == 7).all()

    def test_freed_on_the_other_s_stream(self, source: sa.MemoryPool, stream: sa.Stream, peer: sa.Device) -> None:
        with peer.create_stream() as theirs:
            data = source.allocate(NBYTES, stream)
            theirs.wait(stream)
            data.fill(1, theirs)
            data.free(theirs)
            theirs.synchronize()
            assert source.statistics() == (GROWTH, GROWTH, 0, NBYTES)
            assert source.trim() == GROWTH
        source.close()
