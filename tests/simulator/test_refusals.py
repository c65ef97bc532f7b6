"""The simulated driver guesses nothing of streams, contexts and graphs: it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.facts.enums import DEVICE, READWRITE
from tests.facts.support import UNRESERVED, Rig, value
from tests.facts.test_graph_nodes import with_edges
from tests.simulator.support import new_rig


def _word_of_nothing(rig: Rig) -> None:
    stream = rig.stream()
    rig.begin_capture(stream)
    rig.raw.cuStreamWriteValue32(stream, UNRESERVED, 1, 0)


def _no_value(rig: Rig) -> None:
    attribute = rig.raw.CUstreamAttrID.CU_LAUNCH_ATTRIBUTE_PRIORITY
    rig.raw.cuStreamSetAttribute(rig.stream(), attribute, None)


def _no_callback(rig: Rig) -> None:
    rig.raw.cuStreamAddCallback(rig.stream(), None, 0, 0)


def _large_stacks(rig: Rig) -> None:
    rig.raw.cuCtxSetLimit(rig.raw.CUlimit.CU_LIMIT_STACK_SIZE, 200_000)


def _stacks_beyond_the_memory(rig: Rig) -> None:
    new_rig(memory=64 << 20).raw.cuCtxSetLimit(rig.raw.CUlimit.CU_LIMIT_STACK_SIZE, 4096)


def _allocation_node(rig: Rig, device: int = 0) -> object:
    params = rig.raw.CUDA_MEM_ALLOC_NODE_PARAMS()
    params.poolProps, params.bytesize = rig.pool_props(), 64
    if device:
        params.accessDescs, params.accessDescCount = [rig.access(DEVICE, device, READWRITE)], 1
    graph = value(rig.raw.cuGraphCreate(0))
    value(rig.raw.cuGraphAddMemAllocNode(graph, [], 0, params))
    return graph


def _access_of_another_device(rig: Rig) -> None:
    _allocation_node(rig, 1)


def _captured_with_access_of_another_device(rig: Rig) -> None:
    pool, stream = rig.pool(), rig.stream()
    assert rig.grant(pool, (DEVICE, 1, READWRITE)) == "SUCCESS"
    rig.begin_capture(stream)
    rig.raw.cuMemAllocFromPoolAsync(64, pool, stream)


def _child_that_moves(rig: Rig) -> None:
    params = rig.raw.CUgraphNodeParams()
    params.type = rig.raw.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH
    params.graph.graph = _allocation_node(rig)
    params.graph.ownership = rig.raw.CUgraphChildGraphNodeOwnership.CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE
    with_edges(rig.raw.cuGraphAddNode, value(rig.raw.cuGraphCreate(0)), [], None, 0, params)


def _update_with_memory(rig: Rig) -> None:
    instance = rig.instantiate(_allocation_node(rig))
    value(rig.raw.cuGraphLaunch(instance, rig.stream()))
    rig.raw.cuGraphExecUpdate(instance, _allocation_node(rig))


def _rows_behind_a_pool(rig: Rig) -> None:
    copy, stream, pool = rig.raw.CUDA_MEMCPY2D(), rig.stream(), rig.pool()
    copy.dstMemoryType = copy.srcMemoryType = rig.raw.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.dstDevice, copy.srcDevice = rig.allocate(pool, 4096, stream), rig.plain(4096)
    copy.WidthInBytes, copy.Height, copy.srcPitch, copy.dstPitch, copy.dstY = 8, 2, 8, 8, 1 << 40
    rig.raw.cuMemcpy2DAsync(copy, stream)


@pytest.mark.simulated_only("says what is not simulated")
@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (_word_of_nothing, "a word that is not there"),
        (_no_value, "the real driver crashes"),
        (_no_callback, "the real driver crashes"),
        (_large_stacks, "a stack of 200000 bytes"),
        (_stacks_beyond_the_memory, "more memory than there is"),
        (_access_of_another_device, "access for another device"),
        (_captured_with_access_of_another_device, "a pool that further devices have access to"),
        (_child_that_moves, "a child graph that moves into its parent"),
        (_update_with_memory, "what a launch has left is not freed"),
        (_rows_behind_a_pool, "rows that lie behind"),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_what_is_not_known_is_not_guessed(attempt: Callable[[Rig], None], message: str) -> None:
    with pytest.raises(NotImplementedError, match=f"not modelled: .*{message}"):
        attempt(new_rig(devices=2))
