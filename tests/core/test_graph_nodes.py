"""Graphs that are built by nodes: allocations and frees beside nodes of raw calls."""

from __future__ import annotations

from typing import Any

import pytest

import streamalloc as sa
from streamalloc.driver import simulated
from streamalloc.driver.bindings import cuda
from tests.support import MiB, holds


def fill(graph: sa.Graph, address: int, value: int, *after: Any) -> Any:
    """Add a node that fills 16 bytes."""
    params = cuda.CUDA_MEMSET_NODE_PARAMS()
    params.dst, params.value, params.width, params.height, params.elementSize = address, value, 16, 1, 1
    raw: Any = graph.device.driver
    with graph.device.current():
        context = raw.cuCtxGetCurrent()[1]
        result, node = raw.cuGraphAddMemsetNode(cuda.CUgraph(graph.handle), list(after), len(after), params, context)
    assert not result
    return node


def test_memory_of_one_launch(device: sa.Device, stream: sa.Stream) -> None:
    with sa.Graph.create(device) as graph:
        buffer = sa.GraphBuffer.add_to(graph, MiB, stream, access=[])
        assert (buffer.owner, buffer.location, buffer.nbytes) == (graph, device.location, MiB)
        filled = fill(graph, buffer.address, 5, buffer.node)
        buffer.add_free(after=[filled])
        assert buffer.freed and sorted(graph.nodes) == ["MEMSET", "MEM_ALLOC", "MEM_FREE"]
        for _ in range(2):
            graph.launch(stream)
        stream.synchronize()
        with pytest.raises(sa.ClosedError):
            buffer.add_free(after=[filled])


def test_memory_that_outlives_a_launch(device: sa.Device, stream: sa.Stream) -> None:
    with sa.Graph.create(device) as graph:
        first = sa.GraphBuffer.add_to(graph, 16, stream)
        second = sa.GraphBuffer.add_to(graph, 16, stream, after=[first.node])
        fill(graph, first.address, 5, first.node)
        fill(graph, second.address, 6, second.node)
        for _ in range(2):
            graph.launch(stream)
            assert holds(first, 5) and holds(second, 6)
            first.free()
            second.free(stream)
        stream.synchronize()


def test_refused(device: sa.Device, stream: sa.Stream) -> None:
    with sa.Graph.create(device) as graph, sa.Graph.create(device) as other:
        node = sa.GraphBuffer.add_to(other, 16, stream).node
        with pytest.raises(sa.InvalidValueError):
            sa.GraphBuffer.add_to(graph, 16, stream, after=[node])
        with pytest.raises(sa.InvalidValueError):
            sa.GraphBuffer.add_to(graph, 0, stream)
        with pytest.raises(TypeError, match="access must be a Device"):
            sa.GraphBuffer.add_to(graph, 16, stream, access=[device.location])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="belongs to another driver"):
            sa.GraphBuffer.add_to(graph, 16, stream, access=[sa.Device(0, driver=simulated())])
        graph.close()
        with pytest.raises(sa.ClosedError):
            sa.GraphBuffer.add_to(graph, 16, stream)
