"""Memory that a captured graph allocates: its addresses, its life, and what the device reserves for it."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.facts.support import UINT64_MAX, MiB, Rig, Stats, said, value

pytestmark = pytest.mark.usefixtures("nothing_reserved")

AUTO_FREE_ON_LAUNCH = 1
STEP = 32 * MiB


def reserved(rig: Rig) -> tuple[int, ...]:
    """Graph memory in steps of 32 MiB: used, its peak, reserved, its peak."""
    stats = rig.graph_memory()
    sizes = (stats.used, stats.used_high, stats.reserved, stats.reserved_high)
    assert all(size % STEP == 0 for size in sizes)
    return tuple(size // STEP for size in sizes)


def capture_allocation(rig: Rig, stream: Any, free: bool) -> tuple[Any, Any]:
    """A graph that allocates 4 MiB, fills them and, where asked, frees them; and their address."""
    rig.begin_capture(stream)
    pointer = value(rig.raw.cuMemAllocAsync(4 * MiB, stream))
    value(rig.raw.cuMemsetD8Async(pointer, 9, 4 * MiB, stream))
    if free:
        rig.free(pointer, stream)
    return value(rig.end_capture(stream)), pointer


class TestCapture:
    def test_in_relaxed_mode(self, rig: Rig) -> None:
        raw, stream, other = rig.raw, rig.stream(), rig.stream()
        pool = rig.pool(UINT64_MAX)
        foreign, plain = rig.allocate(pool, 64, other), rig.plain(64)
        rig.begin_capture(stream, mode=2)
        first = value(raw.cuMemAllocAsync(4 * MiB, stream))
        second = value(raw.cuMemAllocFromPoolAsync(4 * MiB, pool, stream))
        assert rig.reserved(pool) == STEP
        assert said(raw.cuMemsetD8Async(first, 7, 4 * MiB, stream)) == "SUCCESS"

        for name in ("MEMPOOL_HANDLE", "MEMORY_TYPE"):
            assert rig.pointer_attribute(second, name) == "INVALID_VALUE"
        assert said(raw.cuMemGetAddressRange(second)) == "NOT_FOUND"

        for address in (foreign, int(first) + 512, plain):
            assert said(raw.cuMemFreeAsync(address, stream)) == "INVALID_VALUE"
        assert rig.capture_status(stream) == "ACTIVE"
        assert said(raw.cuMemFreeAsync(first, stream)) == "SUCCESS"
        assert said(raw.cuMemFreeAsync(first, stream)) == "INVALID_VALUE"
        assert said(raw.cuMemFreeAsync(second, stream)) == "SUCCESS"
        graph = value(rig.end_capture(stream))
        assert reserved(rig) == (0, 0, 0, 0)

        count = value(raw.cuGraphGetNodes(graph))[-1]
        nodes = value(raw.cuGraphGetNodes(graph, count))[0]
        kinds = [value(raw.cuGraphNodeGetType(node)).name for node in nodes]
        names = [kind.removeprefix("CU_GRAPH_NODE_TYPE_") for kind in kinds]
        assert names == ["MEM_ALLOC", "MEM_ALLOC", "MEMSET", "MEM_FREE", "MEM_FREE"]
        allocation = value(raw.cuGraphMemAllocNodeGetParams(nodes[0]))
        assert (allocation.bytesize, int(allocation.dptr)) == (4 * MiB, int(first))
        assert allocation.accessDescCount == 0
        assert int(allocation.poolProps.allocType) == 1
        assert allocation.poolProps.location.id == 0
        assert int(value(raw.cuGraphMemFreeNodeGetParams(nodes[3]))) == int(first)

    def test_takes_nothing_from_the_pool(self, rig: Rig) -> None:
        stream, pool = rig.stream(), rig.pool(UINT64_MAX)
        rig.allocate(pool, 64, stream)
        rig.begin_capture(stream)
        pointer = value(rig.raw.cuMemAllocFromPoolAsync(4 * MiB, pool, stream))
        rig.free(pointer, stream)
        executable = rig.instantiate(value(rig.end_capture(stream)))
        value(rig.raw.cuGraphLaunch(executable, stream))
        value(rig.raw.cuStreamSynchronize(stream))
        assert rig.stats(pool) == Stats(STEP, STEP, 64, 64)
        assert reserved(rig) == (1, 1, 1, 1)


class TestGraphThatLeavesItsMemory:
    def test_address_before_the_launch(self, rig: Rig) -> None:
        stream = rig.stream()
        _, pointer = capture_allocation(rig, stream, free=False)
        assert said(rig.raw.cuMemsetD8Async(pointer, 1, 64, stream)) == "INVALID_VALUE"
        assert said(rig.raw.cuMemFreeAsync(pointer, stream)) == "INVALID_VALUE"

    def test_life(self, rig: Rig) -> None:
        raw, stream = rig.raw, rig.stream()
        graph, pointer = capture_allocation(rig, stream, free=False)
        executable = rig.instantiate(graph)
        assert said(raw.cuGraphLaunch(executable, stream)) == "SUCCESS"
        assert reserved(rig) == (1, 1, 1, 1)
        assert said(raw.cuGraphLaunch(executable, stream)) == "INVALID_VALUE"
        assert said(raw.cuMemsetD8Async(pointer, 3, 64, stream)) == "SUCCESS"
        assert rig.pointer_attribute(pointer, "MEMPOOL_HANDLE") == 0
        assert rig.read(pointer, 128) == [3] * 64 + [9] * 64
        assert said(raw.cuMemFreeAsync(pointer, stream)) == "SUCCESS"
        assert reserved(rig) == (1, 1, 1, 1)
        assert said(raw.cuGraphLaunch(executable, stream)) == "SUCCESS"
        assert said(raw.cuMemFree(pointer)) == "SUCCESS"
        assert said(raw.cuMemFreeAsync(pointer, stream)) == "INVALID_VALUE"
        value(raw.cuStreamSynchronize(stream))
        assert reserved(rig) == (1, 1, 1, 1)

    def test_freed_by_the_next_launch_where_asked(self, rig: Rig) -> None:
        raw, stream = rig.raw, rig.stream()
        graph, pointer = capture_allocation(rig, stream, free=False)
        executable = rig.instantiate(graph, AUTO_FREE_ON_LAUNCH)
        assert said(raw.cuGraphLaunch(executable, stream)) == "SUCCESS"
        assert said(raw.cuGraphLaunch(executable, stream)) == "SUCCESS"
        value(raw.cuStreamSynchronize(stream))
        assert reserved(rig) == (1, 1, 1, 1)
        # The memory outlives the executable graph.
        assert said(raw.cuGraphExecDestroy(rig.disown(executable))) == "SUCCESS"
        assert reserved(rig) == (1, 1, 1, 1)
        assert said(raw.cuMemFreeAsync(pointer, stream)) == "SUCCESS"
        assert reserved(rig) == (1, 1, 1, 1)
        value(raw.cuStreamSynchronize(stream))
        assert said(raw.cuDeviceGraphMemTrim(0)) == "SUCCESS"
        assert reserved(rig) == (0, 1, 0, 1)


class TestAttributes:
    @pytest.mark.parametrize(
        ("name", "number", "expected"),
        [
            ("USED_MEM_HIGH", 0, "SUCCESS"),
            ("USED_MEM_HIGH", 1, "INVALID_VALUE"),
            ("USED_MEM_CURRENT", 0, "INVALID_VALUE"),
            ("RESERVED_MEM_HIGH", 0, "SUCCESS"),
        ],
    )
    def test_only_peaks_are_set_and_only_to_zero(self, rig: Rig, name: str, number: int, expected: str) -> None:
        attribute = getattr(rig.raw.CUgraphMem_attribute, f"CU_GRAPH_MEM_ATTR_{name}")
        answer = rig.raw.cuDeviceSetGraphMemAttribute(0, attribute, rig.raw.cuuint64_t(number))
        assert said(answer) == expected

    def test_kind_of_value(self, raw: Any) -> None:
        attribute = raw.CUgraphMem_attribute.CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT
        assert type(value(raw.cuDeviceGetGraphMemAttribute(0, attribute))) is raw.cuuint64_t


Case = tuple[list[str], str, list[tuple[int, ...]]]
ONE, TRIMMED = (1, 1, 1, 1), (0, 1, 0, 1)
LIVES: dict[str, Case] = {
    "of a graph that frees": (["a=4 -a"], "? 0! ? sync ? 0! sync trim ? -0 ?", [(0,) * 4, ONE, ONE, TRIMMED, TRIMMED]),
    "of a few bytes": (["a=0.0001 -a"], "0! ? sync ?", [ONE, ONE]),
    "of two graphs that use the same": (
        ["a=20 -a b=20 -b"] * 2,
        "? 0! ? 1! ? sync ? -0 ? trim ? -1 trim ?",
        [(0,) * 4, ONE, ONE, ONE, ONE, TRIMMED, TRIMMED],
    ),
}
NOT_NEEDED: dict[str, Case] = {
    "given back by what lives": (["a=13 b=13 c=33"], "0 ? trim ?", [(2, 2, 3, 3), (2, 2, 2, 3)]),
    "given back step by step": (["a=1 b=32 c=8 -a d=8 -d -b e=1 -c"], "0 trim ?", [(1, 2, 1, 2)]),
    "goes to another graph": (["a=13 b=13 c=33", "a=1 -a"], "0 1 ?", [(3, 3, 3, 3)]),
    "of a graph that took over": (["a=1 b=18 c=35 -b d=1 -a -c -d", "a=1"], "0 ? 1 0 ?", [(2, 2, 3, 3), (3, 3, 4, 4)]),
    "taken after what other graphs used": (
        ["a=1 b=33 -a -b", "a=1", "a=1", "a=1"],
        "0 1 ? 2 ? 3 ?",
        [(2, 2, 3, 3), (2, 2, 3, 3), (3, 3, 3, 3)],
    ),
    "of an instance that is gone, taken first": (["a=1 -a b=33 -b c=12", "a=1"], "0 -0 1 ?", [(2, 2, 3, 3)]),
    "beside what lives": (["a=1 b=33 -b", "a=1", "a=1"], "0 1 ? 2 ?", [(2, 2, 3, 3), (3, 3, 3, 3)]),
    "new ones first": (["a=19 -a", "a=1 b=106 -a -b"], "0 1 ? 1 ?", [(5, 5, 5, 5), (5, 5, 5, 5)]),
    "then the newest": (
        ["a=1 b=33 -a -b", "a=1", "a=1 b=33 -a -b"],
        "0 1 ? 2 ? 0 ?",
        [(2, 2, 3, 3), (4, 4, 4, 4), (4, 4, 4, 4)],
    ),
    "newest once its graph moves": (["a=1 b=33 -a -b", "a=1"], "0 0@1 ? 1@1 ?", [(2, 2, 3, 3), (3, 3, 3, 3)]),
    "as old as before where it stays": (["a=1 b=33 -a -b", "a=1"], "0 0 ? 1@1 ?", [(2, 2, 3, 3), (2, 2, 3, 3)]),
}


def memory_of_graphs(rig: Rig, graphs: list[str], steps: str) -> list[tuple[int, ...]]:
    """Capture each graph: ``a=20`` allocates 20 MiB, ``-a`` frees them. Then launch graphs by number, also in another
    stream (``0@1``) or without waiting (``0!``) until ``sync``, destroy their instances (``-0``), trim, and read the
    graph memory (``?``).
    """
    stream, other, instances, found = rig.stream(), rig.stream(), [], []
    for words in graphs:
        made: dict[str, Any] = {}
        rig.begin_capture(stream)
        for word in words.split():
            name, _, size = word.partition("=")
            if size:
                made[name] = value(rig.raw.cuMemAllocAsync(int(float(size) * MiB), stream))
            else:
                rig.free(made[name.lstrip("-")], stream)
        instances.append(rig.instantiate(value(rig.end_capture(stream))))
    for step in steps.split():
        if step == "?":
            found.append(reserved(rig))
        elif step == "trim":
            value(rig.raw.cuDeviceGraphMemTrim(0))
        elif step == "sync":
            value(rig.raw.cuStreamSynchronize(stream))
        elif step.startswith("-"):
            value(rig.raw.cuGraphExecDestroy(rig.disown(instances[int(step[1:])])))
        else:
            number, _, at = step.removesuffix("!").partition("@")
            launched_in = other if at else stream
            value(rig.raw.cuGraphLaunch(instances[int(number)], launched_in))
            if not step.endswith("!"):
                value(rig.raw.cuStreamSynchronize(launched_in))
    return found


@pytest.mark.parametrize("name", LIVES)
def test_life(rig: Rig, name: str) -> None:
    graphs, steps, expected = LIVES[name]
    assert memory_of_graphs(rig, graphs, steps) == expected


@pytest.mark.parametrize("name", NOT_NEEDED)
def test_what_a_launch_reserves_and_does_not_need(in_new_process: Callable[..., Any], name: str) -> None:
    """A launch reserves more than it uses where an allocation does not fit into a step. What it does not use is there
    for other graphs. In a new process, because graphs of earlier tests leave memory that would be taken first.
    """
    graphs, steps, expected = NOT_NEEDED[name]
    assert in_new_process(memory_of_graphs, graphs, steps) == expected


def test_what_an_instance_of_a_graph_that_is_gone_left_can_be_freed_in_a_capture(rig: Rig) -> None:
    raw, stream = rig.raw, rig.stream()
    graph, pointer = capture_allocation(rig, stream, free=False)
    value(raw.cuGraphLaunch(rig.instantiate(graph), stream))
    value(raw.cuGraphDestroy(rig.disown(graph)))
    rig.begin_capture(stream)
    assert said(raw.cuMemFreeAsync(pointer, stream)) == "SUCCESS"
    value(raw.cuGraphLaunch(rig.instantiate(value(rig.end_capture(stream))), stream))
    rig.synchronize()
    assert said(raw.cuMemFreeAsync(pointer, stream)) == "INVALID_VALUE"
