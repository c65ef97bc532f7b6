"""Several copies in one driver call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import CopyOptions, copy_batch

pytestmark = pytest.mark.bindings("13.0")

ORDERS = [CopyOptions(order) for order in ("stream", "during_api_call", "any")]


@pytest.mark.parametrize("options", [None, *ORDERS, ORDERS], ids=["none", "stream", "during", "any", "each"])
def test_all_bytes_are_copied(pool: sa.MemoryPool, stream: sa.Stream, options: Any) -> None:
    sizes = (1, 513, 70_000)
    buffers = [[pool.allocate(size, stream) for size in sizes] for _ in range(2)]
    arrays = [np.full(size, number + 1, np.uint8) for number, size in enumerate(sizes)]
    back = [np.zeros(size, np.uint8) for size in sizes]
    for sources, targets in ((arrays, buffers[0]), (buffers[0], buffers[1]), (buffers[1], back)):
        copy_batch(stream, sources, targets, options=options)
    stream.synchronize()
    for one, other in zip(arrays, back, strict=True):
        assert np.array_equal(one, other)


def test_one_call_in_stream_order(device: sa.Device, gate: Any) -> None:
    traced = sd.traced(device.driver)
    own = sa.Device(0, driver=traced)
    with sa.MemoryPool(own) as pool, own.create_stream() as stream:
        source, target = pool.allocate(64, stream), pool.allocate(64, stream)
        target.fill(0)
        source.fill(3)
        traced.calls.clear()
        hint = CopyOptions(src_location_hint=own, overlap_mode="prefer_overlap_with_compute")
        copy_batch(
            stream, [source[:32], source[32:48], source[:0]], [target[:32], target[32:48], target[:0]], options=hint
        )
        (call,) = [call for call in traced.calls if call.name == "cuMemcpyBatchAsync"]
        found = np.zeros(64, np.uint8)
        target.copy_to(found)
        assert list(found) == [3] * 48 + [0] * 16
        assert call.args[2] == [32, 16] and call.args[5:7] == ([0], 1)
        assert not [call for call in traced.calls if call.name == "cuMemcpyAsync"]
        for buffer in (source, target):
            buffer.free()


class Foreign:
    """Memory of another library, to be used after the work of a stream."""

    def __init__(self, buffer: sa.Buffer, stream: sa.Stream) -> None:
        interface = buffer.__cuda_array_interface__
        self.__cuda_array_interface__ = {**interface, "stream": stream.handle}


def test_memory_of_others_is_waited_for(pool: sa.MemoryPool, device: sa.Device, stream: sa.Stream, gate: Any) -> None:
    with pool.allocate(64, stream) as source, pool.allocate(64, stream) as target, device.create_stream() as other:
        stream.synchronize()
        gate.hold(other)
        source.fill(3, other)
        copy_batch(stream, [Foreign(source, other)], [target])
        assert not stream.query()
        gate.open()
        found = np.zeros(64, np.uint8)
        target.copy_to(found)
        stream.synchronize()
        assert set(found) == {3}


def test_options_of_equal_neighbours_are_one(device: sa.Device) -> None:
    traced = sd.traced(device.driver)
    own = sa.Device(0, driver=traced)
    with sa.MemoryPool(own) as pool, own.create_stream() as stream, pool.allocate(64, stream) as buffer:
        parts = [buffer[at : at + 8] for at in range(0, 64, 8)]
        copy_batch(stream, parts[:4], parts[4:], options=[ORDERS[0], ORDERS[0], ORDERS[2], ORDERS[0]])
        (call,) = [call for call in traced.calls if call.name == "cuMemcpyBatchAsync"]
        assert call.args[5:7] == ([0, 2, 3], 3)


def test_nothing_but_empty_memory(pool: sa.MemoryPool, stream: sa.Stream) -> None:
    with pool.allocate(8, stream) as buffer:
        copy_batch(stream, [buffer[:0]], [buffer[8:]])


class TestRefused:
    def test_arguments(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(64, stream) as one:
            for srcs, dsts, error, words in (
                (one, [one], TypeError, "srcs must be a sequence"),
                ([one], one, TypeError, "dsts must be a sequence"),
                ([], [], ValueError, "at least one"),
                ([one], [one, one], ValueError, "1 srcs and 2 dsts"),
                (
                    [one[:8], one[:8]],
                    [one[8:16], one[8:24]],
                    ValueError,
                    "copy 1: the source has 8 bytes and the target 16",
                ),
                ([one], [3], TypeError, "copy 0: target must be"),
            ):
                with pytest.raises(error, match=words):
                    copy_batch(stream, srcs, dsts)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="2 options for 1 copies"):
                copy_batch(stream, [one[:8]], [one[8:16]], options=[CopyOptions()] * 2)
            with pytest.raises(TypeError, match="options must be"):
                copy_batch(stream, [one[:8]], [one[8:16]], options=[None])  # type: ignore[list-item]
            with pytest.raises(ValueError, match="location id=99"):
                hint = CopyOptions(dst_location_hint=sa.MemLocation.device(99))
                copy_batch(stream, [one[:8]], [one[8:16]], options=hint)

    def test_options(self) -> None:
        for wrong in ({"src_access_order": "later"}, {"overlap_mode": True}):
            with pytest.raises(ValueError, match="allowed are"):
                CopyOptions(**wrong)
        with pytest.raises(TypeError, match="src_location_hint must be"):
            CopyOptions(src_location_hint=0)  # type: ignore[arg-type]

    def test_streams(self, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(64, stream) as one:
            with pytest.raises(ValueError, match="refuses the legacy default stream"):
                copy_batch(device.default_stream, [one[:8]], [one[8:16]])
            with stream.capture():
                with pytest.raises(sa.CaptureError, match="copy_to makes a node"):
                    copy_batch(stream, [one[:8]], [one[8:16]])
                one[:8].copy_to(one[8:16])

    def test_freed_memory(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        one, other = pool.allocate(64, stream), pool.allocate(64, stream)
        one.free()
        with pytest.raises(sa.ClosedError):
            copy_batch(stream, [one], [other])
        other.free()
