"""Graphs that are built node by node, and what of one that was instantiated can be changed."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from tests.facts.enums import DEVICE, FABRIC, HOST, HOST_NUMA, LEGACY, NOWHERE, POSIX_FD, READ, READWRITE, WIN32
from tests.facts.support import PAGE, UNRESERVED, Answer, MiB, Rig, said, value
from tests.support import in_threads

pytestmark = pytest.mark.usefixtures("nothing_reserved")

STEP = 32 * MiB
USE_NODE_PRIORITY, UPLOAD = 8, 2
HOST_KIND, DEVICE_KIND, UNIFIED = 1, 2, 4  # CUmemorytype


class Nodes:
    """A graph, and short ways to add to it. Each answers what the call does."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.raw = rig, rig.raw
        self.graph = rig.own(value(rig.raw.cuGraphCreate(0)), rig.raw.cuGraphDestroy)

    def params(self, size: int, access: tuple[tuple[int, int, int], ...] = (), **props: int) -> Any:
        params = self.raw.CUDA_MEM_ALLOC_NODE_PARAMS()
        params.poolProps, params.bytesize = self.rig.pool_props(**props), size
        if access:
            params.accessDescs = [self.rig.access(*one) for one in access]
            params.accessDescCount = len(access)
        return params

    def allocate(self, size: int, *after: Any) -> tuple[Any, int]:
        """An allocation node and its address."""
        params = self.params(size)
        node = value(self.raw.cuGraphAddMemAllocNode(self.graph, list(after), len(after), params))
        return node, int(params.dptr)

    def free(self, address: int, *after: Any) -> Answer:
        answer: Answer = self.raw.cuGraphAddMemFreeNode(self.graph, list(after), len(after), address)
        return answer

    def empty(self, *after: Any) -> Any:
        return value(self.raw.cuGraphAddEmptyNode(self.graph, list(after), len(after)))

    def fill_params(self, address: int, **fields: int) -> Any:
        params = self.raw.CUDA_MEMSET_NODE_PARAMS()
        for name, number in {"value": 1, "width": 16, "height": 1, "elementSize": 1, **fields}.items():
            setattr(params, name, number)
        params.dst = address
        return params

    def fill(self, address: int, *after: Any, **fields: int) -> Answer:
        params, context = self.fill_params(address, **fields), self.rig.context
        answer: Answer = self.raw.cuGraphAddMemsetNode(self.graph, list(after), len(after), params, context)
        return answer

    def copy_params(self, target: int, source: int, kinds: tuple[int, int], **fields: Any) -> Any:
        params = self.raw.CUDA_MEMCPY3D()
        for side, kind, address in (("dst", kinds[0], target), ("src", kinds[1], source)):
            setattr(params, f"{side}MemoryType", self.raw.CUmemorytype(kind))
            setattr(params, f"{side}Host" if kind == HOST_KIND else f"{side}Device", address)
        for name, number in {"WidthInBytes": 16, "Height": 1, "Depth": 1, **fields}.items():
            setattr(params, name, number)
        return params

    def copy(
        self, target: int, source: int, *after: Any, kinds: tuple[int, int] = (DEVICE_KIND, DEVICE_KIND), **fields: Any
    ) -> Answer:
        params, context = self.copy_params(target, source, kinds, **fields), self.rig.context
        answer: Answer = self.raw.cuGraphAddMemcpyNode(self.graph, list(after), len(after), params, context)
        return answer

    def instantiate(self, flags: int = 0) -> Any:
        return self.rig.instantiate(self.graph, flags)


@pytest.fixture
def nodes(rig: Rig) -> Nodes:
    return Nodes(rig)


PROPS: dict[str, tuple[dict[str, Any], str]] = {
    "no size": ({"size": 0}, "INVALID_VALUE"),
    "host": ({"location": HOST}, "NOT_SUPPORTED"),
    "host NUMA": ({"location": HOST_NUMA}, "NOT_SUPPORTED"),
    "nowhere": ({"location": NOWHERE}, "INVALID_VALUE"),
    "no such device": ({"id": 99}, "INVALID_VALUE"),
    "for a file": ({"handle_types": POSIX_FD}, "NOT_SUPPORTED"),
    "for fabric": ({"handle_types": FABRIC}, "NOT_SUPPORTED"),
    "for another system": ({"handle_types": WIN32}, "INVALID_VALUE"),
    "a maximum": ({"max_size": 1}, "SUCCESS"),
    "a usage": ({"usage": 2}, "SUCCESS"),
    "access": ({"access": ((DEVICE, 0, READWRITE),)}, "SUCCESS"),
    "access to read": ({"access": ((DEVICE, 0, READ),)}, "NOT_SUPPORTED"),
    "access of the host": ({"access": ((HOST, 0, READWRITE),)}, "SUCCESS"),
    "access of no such device": ({"access": ((DEVICE, 99, READWRITE),)}, "INVALID_DEVICE"),
}


def test_what_can_be_allocated(nodes: Nodes) -> None:
    for case, (given, expected) in PROPS.items():
        params = nodes.params(**{"size": 100, **given})
        answer = nodes.raw.cuGraphAddMemAllocNode(nodes.graph, [], 0, params)
        assert said(answer) == expected, case
        if expected == "SUCCESS":
            kept = value(nodes.raw.cuGraphMemAllocNodeGetParams(answer[1]))
            assert (kept.bytesize, int(kept.dptr)) == (100, int(params.dptr))
            assert kept.poolProps.maxSize == given.get("max_size", 0)
            assert kept.accessDescCount == len(given.get("access", ()))
    count = value(nodes.raw.cuDeviceGetCount()) + 1
    params = nodes.params(size=100, access=((DEVICE, 0, READWRITE),) * count)
    assert said(nodes.raw.cuGraphAddMemAllocNode(nodes.graph, [], 0, params)) == "INVALID_VALUE"


@pytest.mark.gpus(2)
def test_access_twice_where_there_are_two_devices(nodes: Nodes) -> None:
    params = nodes.params(size=100, access=((DEVICE, 0, READWRITE),) * 2)
    assert said(nodes.raw.cuGraphAddMemAllocNode(nodes.graph, [], 0, params)) == "SUCCESS"


def test_addresses(nodes: Nodes) -> None:
    """One after the other; what comes behind a free gets its place."""
    first, start = nodes.allocate(100)
    assert nodes.allocate(1000)[1] == start + 512
    assert nodes.allocate(MiB, first)[1] == start + 1536
    other = Nodes(nodes.rig)
    first, start = other.allocate(MiB)
    freed = value(other.free(start, other.empty(first)))
    assert other.allocate(MiB, freed)[1] == start
    assert other.allocate(MiB, first)[1] == start + MiB
    assert other.allocate(1024, freed)[1] == start + 2 * MiB
    assert nodes.rig.graph_memory() == (0, 0, 0, 0)


def test_what_is_freed_beside_an_earlier_hole_takes_it_along(nodes: Nodes) -> None:
    first, start = nodes.allocate(4096)
    second, address = nodes.allocate(512)
    freed = value(nodes.free(address, second))
    last = value(nodes.free(start, first, freed))
    assert nodes.allocate(512, freed)[1] == start + 4096 + 512
    assert nodes.allocate(4096 + 512, last)[1] == start


def test_of_two_holes_without_order_a_free_takes_one_along(nodes: Nodes) -> None:
    """Which of them differs from graph to graph, also in one process."""
    small, start = nodes.allocate(512)
    before = value(nodes.free(start, small))
    second, address = nodes.allocate(1024)
    second = value(nodes.free(address, second))
    third, beside = nodes.allocate(4096, second)
    behind = value(nodes.free(beside, third))
    between, again = nodes.allocate(1024, before, behind)
    assert (address, beside, again) == (start + 512, start + 1536, start + 512)
    last = value(nodes.free(again, between))
    assert nodes.allocate(512 + 1024 + 4096, last)[1] == start + 512 + 1024 + 4096
    assert nodes.allocate(512 + 1024, last)[1] in (start, start + 512)


def test_of_equal_holes_that_which_has_been_there_longest(nodes: Nodes) -> None:
    node, addresses = None, []
    for _ in range(3):
        node, address = nodes.allocate(1024, *([] if node is None else [node]))
        addresses.append(address)
    for at in (2, 0):
        node = value(nodes.free(addresses[at], node))
    assert nodes.allocate(1024, node)[1] == addresses[2]


def test_addresses_are_there_for_more_than_the_device_has(nodes: Nodes) -> None:
    """Nothing is launched: on hardware that took what there was, and kept it."""
    raw, total = nodes.raw, value(nodes.raw.cuDeviceTotalMem(0))
    first, both = (-(-size // STEP) * STEP for size in (total + STEP, 2 * total))
    nodes.allocate(first)
    assert said(raw.cuGraphAddMemAllocNode(nodes.graph, None, 0, nodes.params(1 << 45))) == "OUT_OF_MEMORY"
    nodes.allocate(both - first)


def test_what_can_be_freed(nodes: Nodes) -> None:
    """Memory that the graph allocates, in any order, or that another graph allocates and does not free; once."""
    rig, (allocation, start) = nodes.rig, nodes.allocate(4096)
    pool = rig.allocate(rig.pool(), MiB, rig.stream())
    for address in (start + 512, 0, UNRESERVED, pool, int(rig.plain(4096))):
        assert said(nodes.free(address, allocation)) == "INVALID_VALUE"
    assert said(nodes.free(start)) == "SUCCESS"
    assert said(nodes.free(start, allocation)) == "INVALID_VALUE"
    other, third = Nodes(rig), Nodes(rig)
    _, left = other.allocate(100)
    assert said(nodes.free(left)) == "SUCCESS"
    assert said(nodes.free(left)) == "INVALID_VALUE"
    assert said(third.free(left)) == "SUCCESS"


def test_dependencies(nodes: Nodes) -> None:
    raw, (allocation, _), params = nodes.raw, nodes.allocate(100), nodes.params(100)
    foreign = Nodes(nodes.rig).empty()
    assert said(raw.cuGraphAddMemAllocNode(nodes.graph, [foreign], 1, params)) == "INVALID_VALUE"
    assert said(raw.cuGraphAddMemAllocNode(nodes.graph, [allocation] * 2, 2, params)) == "INVALID_VALUE"
    assert said(raw.cuGraphAddMemAllocNode(nodes.graph, None, 0, params)) == "SUCCESS"
    assert said(raw.cuGraphAddMemAllocNode(nodes.graph, [], 0, None)) == "INVALID_VALUE"
    with pytest.raises(RuntimeError, match="List is too small: 1 < 2"):
        raw.cuGraphAddEmptyNode(nodes.graph, [allocation], 2)
    assert said(raw.cuGraphCreate(1)) == "INVALID_VALUE"


def with_edges(call: Callable[..., Answer], *arguments: Any) -> Answer:
    """The answer to a call with no data of edges: None, an argument which the bindings before CUDA 13 lack."""
    try:
        return call(*arguments)
    except TypeError:
        return call(*(one for one in arguments if one is not None))


def connect(nodes: Nodes, before: Any, behind: Any, call: str = "cuGraphAddDependencies") -> str:
    return said(with_edges(getattr(nodes.raw, call), nodes.graph, [before], [behind], None, 1))


def test_edges_can_be_changed_until_the_graph_has_memory(nodes: Nodes) -> None:
    raw, one = nodes.raw, nodes.empty()
    two = nodes.empty(one)
    three = nodes.empty(two)
    assert connect(nodes, one, three) == "SUCCESS"
    assert connect(nodes, one, three) == "INVALID_VALUE"
    assert connect(nodes, one, one) == "INVALID_VALUE"
    assert value(raw.cuGraphNodeGetDependencies(three))[-1] == 2
    some, *_, count = value(raw.cuGraphNodeGetDependentNodes(one, 5))
    assert (count, [int(node) for node in some]) == (2, [int(two), int(three), 0, 0, 0])
    assert connect(nodes, one, three, "cuGraphRemoveDependencies") == "SUCCESS"
    assert connect(nodes, one, three, "cuGraphRemoveDependencies") == "INVALID_VALUE"
    assert said(raw.cuGraphDestroyNode(two)) == "SUCCESS"
    assert value(raw.cuGraphNodeGetDependencies(three))[-1] == 0
    allocation, _ = nodes.allocate(100)
    assert connect(nodes, one, allocation) == "SUCCESS"
    assert connect(nodes, one, allocation, "cuGraphRemoveDependencies") == "NOT_SUPPORTED"
    assert said(raw.cuGraphDestroyNode(one)) == "NOT_SUPPORTED"
    assert said(raw.cuGraphDestroyNode(allocation)) == "NOT_SUPPORTED"
    assert said(raw.cuGraphClone(nodes.graph)) == "NOT_SUPPORTED"
    assert said(raw.cuGraphAddChildGraphNode(Nodes(nodes.rig).graph, [], 0, nodes.graph)) == "NOT_SUPPORTED"


def test_a_circle_is_refused_when_the_graph_is_instantiated(nodes: Nodes) -> None:
    one = nodes.empty()
    two = nodes.empty(one)
    assert connect(nodes, two, one) == "SUCCESS"
    assert said(nodes.raw.cuGraphInstantiate(nodes.graph, 0)) == "INVALID_VALUE"


FILLS: dict[str, tuple[dict[str, int], str]] = {
    "": ({}, "SUCCESS"),
    "rows": ({"width": 4, "height": 3, "pitch": 64}, "SUCCESS"),
    "rows that overlap": ({"width": 4, "height": 3, "pitch": 3}, "INVALID_VALUE"),
    "rows of 32 bits": ({"width": 4, "height": 3, "pitch": 64, "elementSize": 4}, "SUCCESS"),
    "an odd pitch": ({"width": 2, "height": 2, "pitch": 7, "elementSize": 2}, "INVALID_VALUE"),
    "no width": ({"width": 0}, "INVALID_VALUE"),
    "no height": ({"height": 0}, "INVALID_VALUE"),
    "24 bits": ({"elementSize": 3}, "INVALID_VALUE"),
    "64 bits": ({"elementSize": 8}, "INVALID_VALUE"),
    "a value of more bits": ({"value": 256}, "SUCCESS"),
}


def test_fills(nodes: Nodes) -> None:
    plain = int(nodes.rig.plain(4096))
    for case, (fields, expected) in FILLS.items():
        answer = nodes.fill(plain, **fields)
        assert said(answer) == expected, case
        if expected == "SUCCESS":
            params = value(nodes.raw.cuGraphMemsetNodeGetParams(answer[1]))
            assert all(getattr(params, name) == number for name, number in fields.items())


def test_memory_is_checked_when_a_node_is_added(nodes: Nodes) -> None:
    rig, raw = nodes.rig, nodes.raw
    plain, pinned = int(rig.plain(MiB)), int(rig.pinned(4096))
    readable, untouchable = rig.mapping(PAGE, (DEVICE, 0, READ)), rig.mapping(PAGE)
    allocation, own = nodes.allocate(4096)
    for address in (plain + MiB - 8, 0, UNRESERVED, readable, untouchable, own + 4088):
        assert said(nodes.fill(address, allocation)) == "INVALID_VALUE"
        assert said(nodes.copy(address, plain, allocation)) == "INVALID_VALUE"
    for address in (plain, pinned, own):
        assert said(nodes.fill(address, allocation)) == "SUCCESS"
        assert said(nodes.copy(address, plain + 64, allocation)) == "SUCCESS"
    assert said(nodes.copy(plain + MiB - 8, own, allocation)) == "INVALID_VALUE"
    overlap: dict[str, Any] = {"Height": 3, "srcPitch": 8, "dstPitch": 16}
    for fields in ({"WidthInBytes": 0}, {"Height": 0}, {"Depth": 0}, overlap):
        assert said(nodes.copy(plain, plain + 64, **fields)) == "INVALID_VALUE"
    node = value(nodes.copy(plain, plain + 64, Height=3, srcPitch=64, dstPitch=32, srcY=1))
    params = value(raw.cuGraphMemcpyNodeGetParams(node))
    assert (params.Height, params.srcPitch, params.dstPitch, params.srcY, params.dstHeight) == (3, 64, 32, 1, 0)
    assert (int(params.dstDevice), int(params.srcMemoryType)) == (plain, DEVICE_KIND)


def on_memory(nodes: Nodes, address: int, *after: Any) -> set[str]:
    """What a fill and copies of memory are answered."""
    plain = int(nodes.rig.plain(4096))
    answers = nodes.fill(address, *after), nodes.copy(plain, address, *after), nodes.copy(address, plain, *after)
    return set(map(said, answers))


def test_no_node_is_added_for_memory_that_another_node_frees(nodes: Nodes) -> None:
    """Whatever the order of the two; nodes that were there before stay right."""
    allocation, start = nodes.allocate(MiB)
    assert on_memory(nodes, start, allocation) == on_memory(nodes, start) == {"SUCCESS"}
    free = value(nodes.free(start, allocation))
    for after in ((allocation,), (free,), ()):
        assert on_memory(nodes, start, *after) == {"INVALID_VALUE"}
    smaller, again = nodes.allocate(4096, free)
    assert again == start
    assert on_memory(nodes, start, allocation) == on_memory(nodes, start) == {"SUCCESS"}
    for beyond in (4096 - 8, 8192):
        assert on_memory(nodes, start + beyond, smaller) == {"INVALID_VALUE"}
    value(nodes.free(again, allocation))
    assert on_memory(nodes, start, smaller) == {"INVALID_VALUE"}
    nodes.instantiate()


def test_without_a_context(nodes: Nodes) -> None:
    """Everything but instantiating."""
    plain = int(nodes.rig.plain(4096))

    def build() -> None:
        allocation, start = nodes.allocate(100)
        assert said(nodes.free(start, allocation)) == "SUCCESS"
        params = nodes.fill_params(plain)
        assert said(nodes.raw.cuGraphAddMemsetNode(nodes.graph, [], 0, params, None)) == "SUCCESS"
        assert said(nodes.raw.cuGraphInstantiate(nodes.graph, 0)) == "INVALID_CONTEXT"

    in_threads(build)


def test_a_launch(nodes: Nodes) -> None:
    rig, raw, stream, plain = nodes.rig, nodes.raw, nodes.rig.stream(), nodes.rig.plain(MiB)
    allocation, start = nodes.allocate(MiB)
    filled = value(nodes.fill(start, allocation, value=7, width=MiB))
    copied = value(nodes.copy(int(plain), start, filled, WidthInBytes=MiB))
    value(nodes.free(start, copied))
    instance = nodes.instantiate()
    assert rig.graph_memory() == (0, 0, 0, 0)
    value(raw.cuGraphLaunch(instance, stream))
    assert rig.read(int(plain) + MiB - 2, 2) == [7, 7]
    assert rig.graph_memory() == (STEP,) * 4
    assert said(raw.cuMemFreeAsync(start, stream)) == "INVALID_VALUE"
    assert said(raw.cuMemsetD8(start, 1, 16)) == "INVALID_VALUE"
    assert said(raw.cuGraphInstantiate(nodes.graph, 0)) == "NOT_SUPPORTED"
    assert said(raw.cuGraphNodeSetEnabled(instance, filled, 0)) == "SUCCESS"
    for node in (allocation, nodes.empty()):
        assert said(raw.cuGraphNodeGetEnabled(instance, node)) == "INVALID_VALUE"


def test_memory_that_is_left_lies_where_another_launch_had_its_own(nodes: Nodes) -> None:
    rig, raw, stream, other = nodes.rig, nodes.raw, nodes.rig.stream(), Nodes(nodes.rig)
    allocation, start = nodes.allocate(MiB)
    value(nodes.free(start, allocation))
    value(raw.cuGraphLaunch(nodes.instantiate(), stream))
    rig.synchronize()
    _, left = other.allocate(3 * MiB)
    value(raw.cuGraphLaunch(other.instantiate(), stream))
    assert rig.graph_memory() == (STEP,) * 4
    value(raw.cuMemFreeAsync(left, stream))


COUNTERS = [  # MiB that are allocated one behind the other; steps of 32 MiB that are used and reserved
    ([20, 12], 1, 1),
    ([20, 13], 2, 2),
    ([33], 2, 2),
    ([1, 33], 2, 3),
    ([1, 33, 1], 2, 3),
    ([33, 31], 2, 2),
    ([33, 33], 3, 4),
    ([33, 30, 33], 3, 4),
    ([40, 20, 20], 3, 3),
    ([20, 40, 20], 3, 3),
    ([10] * 7, 3, 3),
    ([64, 64], 4, 4),
    ([33, 33, 33, 33, 3], 5, 6),
]


@pytest.mark.parametrize(("sizes", "used", "kept"), COUNTERS)
@pytest.mark.parametrize("freed", [False, True])
def test_counters(nodes: Nodes, sizes: list[int], used: int, kept: int, freed: bool) -> None:
    """Used is as much as has addresses. Where there is too little for an allocation, as much as all of it is added."""
    rig, raw, stream, allocations = nodes.rig, nodes.raw, nodes.rig.stream(), list[tuple[Any, int]]()
    for size in sizes:
        allocations.append(nodes.allocate(size * MiB, *[node for node, _ in allocations[-1:]]))
    if freed:
        for _, address in allocations:
            value(nodes.free(address, allocations[-1][0]))
    value(raw.cuGraphLaunch(nodes.instantiate(), stream))
    assert rig.graph_memory() == (kept * STEP, kept * STEP, used * STEP, used * STEP)
    for _, address in allocations:
        assert said(raw.cuMemFreeAsync(address, stream)) == ("INVALID_VALUE" if freed else "SUCCESS")


def test_memory_that_outlives_its_launch(nodes: Nodes) -> None:
    raw, stream, (allocation, start) = nodes.raw, nodes.rig.stream(), nodes.allocate(3 * MiB)
    value(nodes.fill(start, allocation))
    instance = nodes.instantiate()
    assert said(raw.cuMemFreeAsync(start, stream)) == "INVALID_VALUE"
    value(raw.cuGraphLaunch(instance, stream))
    assert nodes.rig.pointer_attribute(start, "RANGE_SIZE") == 3 * MiB
    assert said(raw.cuGraphLaunch(instance, stream)) == "INVALID_VALUE"
    assert said(raw.cuMemFreeAsync(start, stream)) == "SUCCESS"
    assert said(raw.cuMemFreeAsync(start, stream)) == "INVALID_VALUE"
    freeing = Nodes(nodes.rig)
    value(freeing.free(start))
    other = freeing.instantiate()
    assert said(raw.cuGraphLaunch(other, stream)) == "INVALID_VALUE"
    value(raw.cuGraphLaunch(instance, stream))
    assert said(raw.cuGraphLaunch(other, stream)) == "SUCCESS"
    assert said(raw.cuGraphLaunch(other, stream)) == "INVALID_VALUE"


def test_the_order_is_that_of_the_edges(nodes: Nodes) -> None:
    """And what was instantiated does not change with the graph."""
    raw, stream, plain = nodes.raw, nodes.rig.stream(), int(nodes.rig.plain(64))
    first, second = value(nodes.fill(plain, value=1)), value(nodes.fill(plain, value=2))
    assert connect(nodes, second, first) == "SUCCESS"
    instance = nodes.instantiate()
    value(nodes.fill(plain, first, value=3))
    value(raw.cuGraphLaunch(instance, stream))
    assert nodes.rig.read(plain, 2) == [1, 1]


def test_children_are_copies(nodes: Nodes) -> None:
    raw, stream, plain = nodes.raw, nodes.rig.stream(), int(nodes.rig.plain(64))
    value(nodes.fill(plain, value=4))
    outer = Nodes(nodes.rig)
    child = value(raw.cuGraphAddChildGraphNode(outer.graph, [], 0, nodes.graph))
    last = value(outer.fill(plain + 8, child, value=7))
    value(nodes.fill(plain, value=5))
    value(raw.cuMemsetD8(plain, 0, 64))
    nodes.rig.synchronize()  # the stream of the launch does not wait for the legacy one
    value(raw.cuGraphLaunch(outer.instantiate(), stream))
    assert nodes.rig.read(plain, 32) == [4] * 8 + [7] * 16 + [0] * 8
    assert value(raw.cuGraphGetNodes(value(raw.cuGraphChildGraphNodeGetGraph(child))))[-1] == 1
    clone = nodes.rig.own(value(raw.cuGraphClone(outer.graph)), raw.cuGraphDestroy)
    found = value(raw.cuGraphNodeFindInClone(last, clone))
    assert value(raw.cuGraphMemsetNodeGetParams(found)).value == 7
    assert said(raw.cuGraphNodeFindInClone(value(nodes.fill(plain)), clone)) == "INVALID_VALUE"


def test_events(nodes: Nodes) -> None:
    rig, raw, stream, gate, event = nodes.rig, nodes.raw, nodes.rig.stream(), nodes.rig.gate(), nodes.rig.event()
    recording = value(raw.cuGraphAddEventRecordNode(nodes.graph, [], 0, event))
    assert int(value(raw.cuGraphEventRecordNodeGetEvent(recording))) == int(event)
    assert said(raw.cuGraphAddEventRecordNode(nodes.graph, [], 0, None)) == "INVALID_VALUE"
    waiting = Nodes(rig)
    value(raw.cuGraphAddEventWaitNode(waiting.graph, [], 0, event))
    assert said(raw.cuGraphAddEventWaitNode(waiting.graph, [], 0, None)) == "INVALID_VALUE"
    other, wait = rig.stream(), waiting.instantiate()
    value(raw.cuGraphLaunch(wait, other))
    assert rig.executed(other)
    gate.hold(stream)
    value(raw.cuGraphLaunch(nodes.instantiate(), stream))
    assert said(raw.cuEventQuery(event)) == "NOT_READY"
    value(raw.cuGraphLaunch(wait, other))
    assert rig.held(other)
    gate.open()
    assert rig.executed(other)
    assert said(raw.cuEventQuery(event)) == "SUCCESS"


def test_host_functions_and_words(nodes: Nodes) -> None:
    raw, stream, word, seen = nodes.raw, nodes.rig.stream(), nodes.rig.word(), list[int]()
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: seen.append(data))
    params = raw.CUDA_HOST_NODE_PARAMS()
    assert said(raw.cuGraphAddHostNode(nodes.graph, [], 0, params)) == "INVALID_VALUE"
    params.fn, params.userData = raw.CUhostFn(ctypes.cast(function, ctypes.c_void_p).value), 77
    called = value(raw.cuGraphAddHostNode(nodes.graph, [], 0, params))
    write, batch = raw.CUstreamBatchMemOpParams(), raw.CUDA_BATCH_MEM_OP_NODE_PARAMS()
    write.operation = raw.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
    write.writeValue.operation = write.operation
    write.writeValue.address, write.writeValue.value = ctypes.addressof(word), 42
    batch.ctx, batch.count, batch.paramArray = nodes.rig.context, 1, [write]
    value(raw.cuGraphAddBatchMemOpNode(nodes.graph, [called], 1, batch))
    value(raw.cuGraphLaunch(nodes.instantiate(), stream))
    value(raw.cuStreamSynchronize(stream))
    assert (seen, word.value) == ([77], 42)


def test_flags(nodes: Nodes) -> None:
    raw = nodes.raw
    for flags in (1, 8, 9):
        instance = value(raw.cuGraphInstantiate(nodes.graph, flags))
        assert int(value(raw.cuGraphExecGetFlags(instance))) == flags & ~USE_NODE_PRIORITY
        value(raw.cuGraphExecDestroy(instance))
    assert [said(raw.cuGraphInstantiate(nodes.graph, flags)) for flags in (2, 16, 17)] == ["INVALID_VALUE"] * 3


def test_an_instance_can_be_uploaded_at_once(nodes: Nodes) -> None:
    raw, stream, params = nodes.raw, nodes.rig.stream(), nodes.raw.CUDA_GRAPH_INSTANTIATE_PARAMS()
    params.flags, params.hUploadStream = UPLOAD, stream
    value(raw.cuGraphExecDestroy(value(raw.cuGraphInstantiateWithParams(nodes.graph, params))))


Build = Callable[[Nodes, int, int], object]
ROWS: dict[str, Any] = {"width": 8, "height": 2, "pitch": 64}
PLANE: dict[str, Any] = {"Height": 2, "srcPitch": 64, "dstPitch": 64}
BOTH_UNIFIED = (UNIFIED, UNIFIED)
UPDATES: dict[str, tuple[Build, Build, bool]] = {
    "value": (lambda n, p, q: n.fill(p), lambda n, p, q: n.fill(p, value=9), True),
    "address": (lambda n, p, q: n.fill(p), lambda n, p, q: n.fill(q), True),
    "width": (lambda n, p, q: n.fill(p), lambda n, p, q: n.fill(p, width=64), True),
    "element": (lambda n, p, q: n.fill(p), lambda n, p, q: n.fill(p, elementSize=4), True),
    "to rows": (lambda n, p, q: n.fill(p), lambda n, p, q: n.fill(p, **ROWS), False),
    "value of rows": (lambda n, p, q: n.fill(p, **ROWS), lambda n, p, q: n.fill(p, **ROWS, value=3), True),
    "address of rows": (lambda n, p, q: n.fill(p, **ROWS), lambda n, p, q: n.fill(q, **ROWS), True),
    "pitch": (lambda n, p, q: n.fill(p, **ROWS), lambda n, p, q: n.fill(p, **{**ROWS, "pitch": 32}), False),
    "width of rows": (lambda n, p, q: n.fill(p, **ROWS), lambda n, p, q: n.fill(p, **{**ROWS, "width": 4}), False),
    "from rows": (lambda n, p, q: n.fill(p, **ROWS), lambda n, p, q: n.fill(p), False),
    "end of a copy": (lambda n, p, q: n.copy(p, q), lambda n, p, q: n.copy(p + 64, q), True),
    "size of a copy": (lambda n, p, q: n.copy(p, q), lambda n, p, q: n.copy(p, q, WidthInBytes=64), True),
    "copy to a plane": (lambda n, p, q: n.copy(p, q), lambda n, p, q: n.copy(p, q, **PLANE), False),
    "same plane": (lambda n, p, q: n.copy(p, q, **PLANE), lambda n, p, q: n.copy(p, q, **PLANE), True),
    "end of a plane": (lambda n, p, q: n.copy(p, q, **PLANE), lambda n, p, q: n.copy(p + 256, q, **PLANE), False),
    "kind of ends": (lambda n, p, q: n.copy(p, q), lambda n, p, q: n.copy(p, q, kinds=BOTH_UNIFIED), False),
    "empty": (lambda n, p, q: n.empty(), lambda n, p, q: n.empty(), True),
    "nothing": (lambda n, p, q: n.empty(), lambda n, p, q: None, False),
    "another kind": (lambda n, p, q: n.fill(p), lambda n, p, q: n.copy(p, q), False),
    "one more": (lambda n, p, q: n.fill(p), lambda n, p, q: (n.fill(p), n.fill(q)), False),
    "other edges": (lambda n, p, q: (n.fill(p), n.fill(q)), lambda n, p, q: n.fill(q, value(n.fill(p))), False),
    "order of adding": (lambda n, p, q: (n.fill(p), n.copy(p, q)), lambda n, p, q: (n.copy(p, q), n.fill(p)), False),
}


@pytest.mark.parametrize("case", UPDATES)
def test_updates(rig: Rig, case: str) -> None:
    build, change, fits = UPDATES[case]
    plain, other = int(rig.plain(4096)), int(rig.plain(4096))
    before, after = Nodes(rig), Nodes(rig)
    build(before, plain, other)
    change(after, plain, other)
    instance = before.instantiate()
    answer = rig.raw.cuGraphExecUpdate(instance, after.graph)
    assert said(answer) == ("SUCCESS" if fits else "GRAPH_EXEC_UPDATE_FAILURE")
    value(rig.raw.cuGraphLaunch(instance, rig.stream()))


def test_single_nodes_of_an_instance_can_be_changed(nodes: Nodes) -> None:
    rig, raw, stream = nodes.rig, nodes.raw, nodes.rig.stream()
    plain, pinned = int(rig.plain(4096)), int(rig.pinned(4096))
    node = value(nodes.fill(plain))
    copying = value(nodes.copy(plain + 1024, plain, node))
    instance = nodes.instantiate()

    def fill(address: int, **fields: int) -> str:
        params = nodes.fill_params(address, **fields)
        return said(raw.cuGraphExecMemsetNodeSetParams(instance, node, params, rig.context))

    def copy(kinds: tuple[int, int], target: int, source: int, **fields: int) -> str:
        params = nodes.copy_params(target, source, kinds, **fields)
        return said(raw.cuGraphExecMemcpyNodeSetParams(instance, copying, params, rig.context))

    assert fill(pinned) == "SUCCESS"
    assert fill(UNRESERVED) == "INVALID_VALUE"
    assert fill(plain, **ROWS) == "INVALID_VALUE"
    assert fill(plain, value=5, width=64) == "SUCCESS"
    assert copy((DEVICE_KIND, HOST_KIND), plain + 1024, pinned) == "INVALID_VALUE"
    assert copy((DEVICE_KIND, DEVICE_KIND), plain + 1024, plain, **PLANE) == "INVALID_VALUE"
    assert copy((DEVICE_KIND, DEVICE_KIND), plain + 2048, plain) == "SUCCESS"
    value(raw.cuMemsetD8(plain, 0, 4096))
    rig.synchronize()  # the stream of the launch does not wait for the legacy one
    value(raw.cuGraphLaunch(instance, stream))
    assert rig.read(plain, 64) == [5] * 64
    assert (rig.read(plain + 1024, 1), rig.read(plain + 2048, 16)) == ([0], [5] * 16)
    assert value(raw.cuGraphMemsetNodeGetParams(node)).value == 1
    assert said(raw.cuGraphMemsetNodeSetParams(node, nodes.fill_params(plain, value=6))) == "SUCCESS"
    assert value(raw.cuGraphMemsetNodeGetParams(node)).value == 6
    assert value(raw.cuGraphNodeGetEnabled(instance, copying)) == 1
    assert said(raw.cuGraphNodeSetEnabled(instance, copying, 0)) == "SUCCESS"
    assert value(raw.cuGraphNodeGetEnabled(instance, copying)) == 0
    value(raw.cuMemsetD8(plain, 0, 4096))
    rig.synchronize()  # the stream of the launch does not wait for the legacy one
    value(raw.cuGraphLaunch(instance, stream))
    assert (rig.read(plain, 1), rig.read(plain + 2048, 1)) == ([5], [0])


def test_updates_from_a_graph_with_memory(nodes: Nodes) -> None:
    """It may have no instance of its own but the one that is updated."""
    raw, other, instance = nodes.raw, Nodes(nodes.rig), None
    value(nodes.fill(int(nodes.rig.plain(64))))
    instance = nodes.instantiate()
    other.allocate(100)
    assert said(raw.cuGraphExecUpdate(instance, other.graph)) == "GRAPH_EXEC_UPDATE_FAILURE"
    of_its_own = other.instantiate()
    assert said(raw.cuGraphExecUpdate(instance, other.graph)) == "NOT_SUPPORTED"
    assert said(raw.cuGraphExecUpdate(of_its_own, other.graph)) == "SUCCESS"


def test_an_update_to_a_graph_with_memory_uses_that(nodes: Nodes) -> None:
    """The instance is then the other graph's."""
    rig, raw, stream, other = nodes.rig, nodes.raw, nodes.rig.stream(), Nodes(nodes.rig)
    (one, first), (two, second) = nodes.allocate(MiB), other.allocate(MiB)
    value(nodes.fill(first, one))
    value(other.fill(second, two, value=2))
    instance = nodes.instantiate()
    assert said(raw.cuGraphExecUpdate(instance, other.graph)) == "SUCCESS"
    value(raw.cuGraphLaunch(instance, stream))
    assert rig.read(second, 2) == [2, 2]
    assert said(raw.cuMemFreeAsync(first, stream)) == "INVALID_VALUE"
    assert said(raw.cuMemFreeAsync(second, stream)) == "SUCCESS"
    assert said(raw.cuGraphInstantiate(other.graph, 0)) == "NOT_SUPPORTED"
    nodes.instantiate()


class TestCapturesIntoAGraph:
    def begin(self, nodes: Nodes, stream: Any, *after: Any, graph: Any = None) -> str:
        mode = nodes.raw.CUstreamCaptureMode(2)
        given = nodes.graph if graph is None else graph
        return said(nodes.raw.cuStreamBeginCaptureToGraph(stream, given, list(after), None, len(after), mode))

    def put_behind(self, nodes: Nodes, stream: Any, *after: Any, flags: int) -> str:
        call = nodes.raw.cuStreamUpdateCaptureDependencies
        return said(with_edges(call, stream, list(after), None, len(after), flags))

    def kinds(self, nodes: Nodes) -> list[str]:
        found, count = value(nodes.raw.cuGraphGetNodes(nodes.graph, 9))
        names: list[str] = [value(nodes.raw.cuGraphNodeGetType(node)).name for node in found[:count]]
        return [name.removeprefix("CU_GRAPH_NODE_TYPE_") for name in names]

    def test_nodes_come_behind_others(self, nodes: Nodes) -> None:
        raw, stream, first = nodes.raw, nodes.rig.stream(), nodes.empty()
        plain = nodes.rig.plain(64)
        assert self.put_behind(nodes, stream, first, flags=0) == "ILLEGAL_STATE"
        assert self.begin(nodes, stream, first) == "SUCCESS"
        value(raw.cuMemsetD8Async(plain, 1, 16, stream))
        second = nodes.empty()
        assert self.put_behind(nodes, stream, second, flags=0) == "SUCCESS"
        value(raw.cuMemsetD8Async(plain, 2, 16, stream))
        assert self.put_behind(nodes, stream, first, flags=1) == "SUCCESS"
        assert self.put_behind(nodes, stream, first, flags=2) == "INVALID_VALUE"
        value(raw.cuMemsetD8Async(plain, 3, 16, stream))
        assert self.begin(nodes, nodes.rig.stream()) == "ILLEGAL_STATE"
        assert int(value(raw.cuStreamEndCapture(stream))) == int(nodes.graph)
        assert self.kinds(nodes) == ["EMPTY", "MEMSET", "EMPTY", "MEMSET", "MEMSET"]
        assert value(raw.cuGraphGetEdges(nodes.graph))[-1] == 4
        assert self.begin(nodes, stream) == "SUCCESS"
        assert self.begin(nodes, stream) == "ILLEGAL_STATE"
        value(raw.cuStreamEndCapture(stream))

    def test_what_is_refused(self, nodes: Nodes) -> None:
        stream = nodes.rig.stream()
        assert self.begin(nodes, stream, Nodes(nodes.rig).empty()) == "INVALID_VALUE"
        assert self.begin(nodes, stream, graph=nodes.raw.CUgraph(0)) == "INVALID_VALUE"
        assert self.begin(nodes, LEGACY) == "STREAM_CAPTURE_UNSUPPORTED"
        assert nodes.rig.capture_status(stream) == "NONE"

    def test_a_capture_that_fails_takes_the_graph_with_it(self, nodes: Nodes) -> None:
        raw, stream = nodes.raw, nodes.rig.stream()
        graph = nodes.rig.disown(nodes.graph)
        assert self.begin(nodes, stream) == "SUCCESS"
        assert said(raw.cuStreamQuery(stream)) == "STREAM_CAPTURE_UNSUPPORTED"
        assert said(raw.cuStreamEndCapture(stream)) == "STREAM_CAPTURE_INVALIDATED"
        assert said(raw.cuGraphGetNodes(graph)) == "INVALID_VALUE"


def test_nodes_of_any_kind(nodes: Nodes) -> None:
    """``cuGraphAddNode`` does what the calls for single kinds do."""
    rig, raw, kinds, plain = nodes.rig, nodes.raw, nodes.raw.CUgraphNodeType, int(nodes.rig.plain(64))

    def params(kind: str) -> Any:
        made = raw.CUgraphNodeParams()
        made.type = getattr(kinds, f"CU_GRAPH_NODE_TYPE_{kind}")
        return made

    def add(given: Any, *after: Any) -> Answer:
        return with_edges(raw.cuGraphAddNode, nodes.graph, list(after), None, len(after), given)

    allocation = params("MEM_ALLOC")
    allocation.alloc.poolProps, allocation.alloc.bytesize = rig.pool_props(), 64
    first = value(add(allocation))
    own = int(allocation.alloc.dptr)
    fill = params("MEMSET")
    fill.memset.dst, fill.memset.value, fill.memset.elementSize = own, 7, 1
    fill.memset.width, fill.memset.height = 64, 1
    assert said(add(fill, first)) == "INVALID_VALUE"
    fill.memset.ctx = rig.context
    second = value(add(fill, first))
    copy = params("MEMCPY")
    copy.memcpy.copyParams = nodes.copy_params(plain, own, (DEVICE_KIND, DEVICE_KIND), WidthInBytes=64)
    third = value(add(copy, second))
    copy.memcpy.flags = 1
    assert said(add(copy, second)) == "INVALID_VALUE"
    freeing = params("MEM_FREE")
    freeing.free.dptr = own
    value(add(freeing, third))
    event = rig.event()
    recording = params("EVENT_RECORD")
    recording.eventRecord.event = event
    value(add(recording, value(add(params("EMPTY")))))
    value(raw.cuGraphLaunch(nodes.instantiate(), rig.stream()))
    assert rig.read(plain, 64) == [7] * 64


def test_events_of_nodes_can_be_changed(nodes: Nodes) -> None:
    rig, raw, stream, gate = nodes.rig, nodes.raw, nodes.rig.stream(), nodes.rig.gate()
    event, other = rig.event(), rig.event()
    node = value(raw.cuGraphAddEventRecordNode(nodes.graph, [], 0, event))
    instance = nodes.instantiate()
    assert said(raw.cuGraphEventRecordNodeSetEvent(node, None)) == "INVALID_VALUE"
    assert said(raw.cuGraphEventWaitNodeSetEvent(node, other)) == "INVALID_VALUE"
    assert said(raw.cuGraphEventRecordNodeSetEvent(node, other)) == "SUCCESS"
    assert int(value(raw.cuGraphEventRecordNodeGetEvent(node))) == int(other)
    assert said(raw.cuGraphExecEventRecordNodeSetEvent(instance, node, other)) == "SUCCESS"
    gate.hold(stream)
    value(raw.cuGraphLaunch(instance, stream))
    assert (said(raw.cuEventQuery(event)), said(raw.cuEventQuery(other))) == ("SUCCESS", "NOT_READY")


def test_a_capture_can_record_an_event_for_others(nodes: Nodes) -> None:
    rig, raw, stream, gate, event = nodes.rig, nodes.raw, nodes.rig.stream(), nodes.rig.gate(), nodes.rig.event()
    assert said(raw.cuEventRecordWithFlags(event, stream, 1)) == "ILLEGAL_STATE"
    rig.begin_capture(stream)
    assert said(raw.cuEventRecordWithFlags(event, stream, 1)) == "SUCCESS"
    graph = value(rig.end_capture(stream))
    node = value(raw.cuGraphGetNodes(graph, 1))[0][0]
    assert int(value(raw.cuGraphEventRecordNodeGetEvent(node))) == int(event)
    gate.hold(stream)
    value(raw.cuGraphLaunch(rig.instantiate(graph), stream))
    assert said(raw.cuEventQuery(event)) == "NOT_READY"


@pytest.mark.parametrize("disabled", [False, True])
def test_a_launch_of_nothing_waits_for_no_other(nodes: Nodes, disabled: bool) -> None:
    rig, raw = nodes.rig, nodes.raw
    gate, first, second = rig.gate(), rig.stream(), rig.stream()
    nodes.empty()
    work = value(nodes.fill(int(rig.plain(64)))) if disabled else None
    instance = nodes.instantiate()
    if work is not None:
        value(raw.cuGraphNodeSetEnabled(instance, work, 0))
    gate.hold(first)
    for stream in (first, second):
        value(raw.cuGraphLaunch(instance, stream))
    assert rig.held(first)
    assert rig.executed(second)
