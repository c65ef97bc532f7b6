"""Several copies in one driver call."""

import threading
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import CopyOptions, copy_batch
from tests.core.test_buffer import Interface
from tests.support import holds, names, read

pytestmark = pytest.mark.bindings("13.0")

ORDERS = [CopyOptions(order) for order in ("stream", "during_api_call", "any")]


@pytest.fixture
def buffers(pool: sa.MemoryPool, stream: sa.Stream) -> list[sa.Buffer]:
    return [pool.allocate(64, stream) for _ in range(2)]


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


def test_one_call_in_stream_order(traced: Any, device: sa.Device, stream: sa.Stream, buffers: list[sa.Buffer]) -> None:
    source, target = buffers
    target.fill(0)
    source.fill(3)
    traced.calls.clear()
    hint = CopyOptions(src_location_hint=device, overlap_mode="prefer_overlap_with_compute")
    parts = [[memory[:32], memory[32:48], memory[:0]] for memory in buffers]
    copy_batch(stream, *parts, options=hint)
    (call,) = [call for call in traced.calls if call.name == "cuMemcpyBatchAsync"]
    assert read(target).tolist() == [3] * 48 + [0] * 16
    assert call.args[2] == [32, 16] and call.args[5:7] == ([0], 1)
    assert names(traced, "cuMemcpyAsync") == []


def test_pageable_memory_is_no_part_of_the_batch(traced: Any, stream: sa.Stream, buffers: list[sa.Buffer]) -> None:
    source, target = buffers
    source.fill(3)
    array = np.full(32, 4, np.uint8)
    traced.calls.clear()
    copy_batch(stream, [source[:16], array], [target[:16], target[16:48]], options=ORDERS[1])
    (call,) = [call for call in traced.calls if call.name == "cuMemcpyBatchAsync"]
    assert call.args[2] == [16] and len(names(traced, "cuMemcpyAsync")) == 1
    assert read(target[:48]).tolist() == [3] * 16 + [4] * 32


def test_others_memory_is_waited_for(stream: sa.Stream, buffers: list[sa.Buffer], gate: Any, other: sa.Stream) -> None:
    source, target = buffers
    stream.synchronize()
    gate.hold(other)
    source.fill(3, other)
    copy_batch(stream, [Interface(source, stream=other.handle)], [target])
    assert not stream.query()
    gate.open()
    assert holds(target, 3)


@pytest.mark.parametrize("alone", [False, True])
def test_pageable_memory_is_written_when_the_call_returns(
    stream: sa.Stream, buffers: list[sa.Buffer], gate: Any, alone: bool
) -> None:
    buffers[0].fill(3)
    back = bytearray(64)
    stream.synchronize()
    gate.hold(stream)
    timer = threading.Timer(0.05, gate.open)
    timer.start()
    if alone:
        buffers[0].copy_to(back, options=ORDERS[2])
    else:
        copy_batch(stream, [buffers[0]] * 2, [back, buffers[1]])
    assert set(back) == {3}
    assert alone or holds(buffers[1], 3)
    timer.join()


def test_a_pageable_source_is_read_when_the_call_returns(device: sa.Device, stream: sa.Stream, gate: Any) -> None:
    source = np.full(64, 3, np.uint8)
    with sa.MemoryPool(sa.MemLocation.host(), driver=device.driver) as hosts, hosts.allocate(64, stream) as target:
        stream.synchronize()
        gate.hold(stream)
        timer = threading.Timer(0.05, gate.open)
        timer.start()
        copy_batch(stream, [source], [target])
        source[:] = 4
        timer.join()
        assert set(target.tobytes()) == {3}


def test_options_of_equal_neighbours_are_one(traced: Any, stream: sa.Stream, buffers: list[sa.Buffer]) -> None:
    parts = [buffers[0][at : at + 8] for at in range(0, 64, 8)]
    copy_batch(stream, parts[:4], parts[4:], options=[ORDERS[0], ORDERS[0], ORDERS[2], ORDERS[0]])
    (call,) = [call for call in traced.calls if call.name == "cuMemcpyBatchAsync"]
    assert call.args[5:7] == ([0, 2, 3], 3)


def test_nothing_but_empty_memory(stream: sa.Stream, buffers: list[sa.Buffer]) -> None:
    copy_batch(stream, [buffers[0][:0]], [buffers[0][64:]])


class TestRefused:
    def test_arguments(self, device: sa.Device, stream: sa.Stream, buffers: list[sa.Buffer]) -> None:
        one: Any = buffers[0]
        pair = [one[:8]], [one[8:16]]
        far = CopyOptions(dst_location_hint=sa.MemLocation.device(99))
        cases: list[tuple[Any, Any, Any, type[Exception], str]] = [
            (one, [one], None, TypeError, "srcs must be a sequence"),
            ([one], one, None, TypeError, "dsts must be a sequence"),
            ([], [], None, ValueError, "at least one"),
            ([one], [one, one], None, ValueError, "1 srcs and 2 dsts"),
            (
                [one[:8]] * 2,
                [one[8:16], one[8:24]],
                None,
                ValueError,
                "copy 1: the source has 8 bytes and the target 16",
            ),
            ([one], [3], None, TypeError, "copy 0: target must be"),
            (*pair, [CopyOptions()] * 2, ValueError, "2 options for 1 copies"),
            (*pair, [None], TypeError, "options must be"),
            (*pair, "any", TypeError, "options must be a CopyOptions, not str"),
            (*pair, 3, TypeError, "options must be a CopyOptions, not int"),
            (*pair, far, ValueError, "location id=99"),
        ]
        for srcs, dsts, options, error, words in cases:
            with pytest.raises(error, match=words):
                copy_batch(stream, srcs, dsts, options=options)
        with pytest.raises(ValueError, match="refuses the legacy default stream"):
            copy_batch(device.default_stream, *pair)
        with stream.capture():
            with pytest.raises(sa.CaptureError, match="copy_to makes a node"):
                copy_batch(stream, *pair)
            one[:8].copy_to(one[8:16])
        one.free()
        with pytest.raises(sa.ClosedError):
            copy_batch(stream, [one], [buffers[1]])

    def test_options(self) -> None:
        for wrong in ({"src_access_order": "later"}, {"overlap_mode": True}):
            with pytest.raises(ValueError, match="allowed are"):
                CopyOptions(**wrong)
        with pytest.raises(TypeError, match="src_location_hint must be"):
            CopyOptions(src_location_hint=0.5)  # type: ignore[arg-type]
