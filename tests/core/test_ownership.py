"""One owner for each resource: no copies, and nothing released that others still use."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

import streamalloc as sa
from streamalloc.driver.bindings import cuda
from streamalloc.testing import Gate
from tests.support import read


@pytest.fixture
def owners(device: sa.Device, stream: sa.Stream, pool: sa.MemoryPool) -> Iterator[list[Any]]:
    own = device.create_stream()
    with stream.capture() as graph:
        pass
    buffer = pool.allocate(64, own)
    made = [own, own.record(), sa.MemoryPool(device), buffer, sa.CachingAllocator(pool), graph, Gate(device)]
    yield made
    for owner in reversed(made):
        owner.close()


def test_blocks_of_closed_objects_do_not_begin(owners: list[Any]) -> None:
    for owner in reversed(owners[:-2]):  # those of graphs and gates do
        with owner as same:
            assert same is owner
        with pytest.raises(sa.ClosedError), owner:
            pytest.fail("the block has begun")


def test_arrays_that_a_graph_copies_live_with_it(stream: sa.Stream, pool: sa.MemoryPool) -> None:
    with pool.allocate(64, stream) as buffer:
        with stream.capture() as graph:
            buffer.copy_from(bytes(range(64)))
        gc.collect()
        with graph:
            graph.launch(stream)
            assert read(buffer).tobytes() == bytes(range(64))


def test_finalisers_leave_other_code_s_capture_alone(raw: Any, device: sa.Device, pool: sa.MemoryPool) -> None:
    with device.create_stream() as stream, device.create_stream() as captured:
        buffer = pool.allocate(64, stream)
        closing = sa.MemoryPool(device)
        mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        assert raw.cuStreamBeginCapture(captured.handle, mode)[0] == 0
        del buffer, closing
        gc.collect()
        result, graph = raw.cuStreamEndCapture(captured.handle)
        assert result == 0 and raw.cuGraphDestroy(graph)[0] == 0
        assert pool.statistics().used == 0


def test_dropping_a_buffer_of_a_closed_stream_holds_nobody_up(
    device: sa.Device, pool: sa.MemoryPool, gate: Gate
) -> None:
    with device.create_stream(blocking=True) as bystander:
        stream = device.create_stream()
        buffer = pool.allocate(64, stream)
        gate.hold(stream)
        stream.close()
        del buffer
        gc.collect()
        bystander.record()
        bystander.synchronize()
        gate.open()


def test_a_closed_gate(device: sa.Device, stream: sa.Stream) -> None:
    gate = Gate(device)
    gate.close()
    gate.open()
    with pytest.raises(sa.ClosedError):
        gate.hold(stream)


def test_what_is_no_driver() -> None:
    with pytest.raises(TypeError, match="simulated"):
        sa.Device(0, driver="simulated")  # type: ignore[arg-type]
