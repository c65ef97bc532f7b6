"""Graphs that are built node by node. Their allocations, frees and launches are those of captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamalloc.driver.bindings import cuda, read_handle_types

from .. import arguments
from ..arguments import DevicePointer, UnsignedInt
from ..constants import PINNED, READ_WRITE, Location
from ..contexts import Context
from ..copy_operations import fill
from ..errors import NotModelled, Result, check, need, not_modelled
from ..graphs import Capture, Graph, Node, Values
from ..timeline import Operation, Stream
from .base import EDGE_DATA
from .capture import CaptureCalls
from .copies import FILL_FIELDS
from .copies_2d import PROMISED, Copy2DCalls, copy_values
from .stream_memory import StreamMemoryCalls

_ADD, _SET = 0, 1  # CUstreamUpdateCaptureDependencies_flags
_SHAREABLE = 1 | 8
"""Handle types that there are on this system."""


def _struct(cls: Any, values: Values | None) -> Any:
    made = cls()
    for name, value in (values or {}).items():
        setattr(made, name, cuda.CUmemorytype(value) if name.endswith("MemoryType") else value)
    return made


def _kind(params: Any) -> str:
    name: str = params.type.name
    return name.removeprefix("CU_GRAPH_NODE_TYPE_")


class GraphNodeCalls(CaptureCalls, Copy2DCalls, StreamMemoryCalls):
    """cuGraphCreate, cuGraphAdd*, cuGraphNodeGet*."""

    def cuGraphCreate(self, flags: UnsignedInt) -> Any:
        check(not flags)
        return cuda.CUgraph(self._machine.graphs.create().handle)

    def cuGraphClone(self, originalGraph: Any) -> Any:
        return cuda.CUgraph(self._without_memory(originalGraph).clone().handle)

    def _without_memory(self, hGraph: Any) -> Graph:
        """A graph with which more can be done than with one that allocates or frees."""
        graph = self._graph(hGraph)
        check(not graph.memories and not graph.frees, Result.CUDA_ERROR_NOT_SUPPORTED)
        return graph

    def cuGraphNodeFindInClone(self, hOriginalNode: Any, hClonedGraph: Any) -> Any:
        original, clone = self._node(hOriginalNode), self._graph(hClonedGraph)
        found = [node for node in clone.nodes if node.origin is original]
        check(found)
        return cuda.CUgraphNode(found[0].handle)

    # -- edges -----------------------------------------------------------------------------------------------

    def _behind(self, hGraph: Any, dependencies: Any, count: Any) -> tuple[Graph, list[Node]]:
        """A graph, and the nodes that a new node depends on."""
        given = arguments.structs("dependencies", dependencies, cuda.CUgraphNode, arguments.size_t(count))
        graph = self._graph(hGraph)
        nodes = [self._node(one) for one in given]
        check(all(node.graph is graph for node in nodes) and len(set(nodes)) == len(nodes))
        return graph, nodes

    def _pairs(self, graph: Graph, from_: Any, to: Any, count: Any) -> list[tuple[Node, Node]]:
        number = arguments.size_t(count)
        before = arguments.structs("from_", from_, cuda.CUgraphNode, number)
        behind = arguments.structs("to", to, cuda.CUgraphNode, number)
        pairs = [(self._node(one), self._node(two)) for one, two in zip(before, behind, strict=True)]
        check(all(one.graph is graph and two.graph is graph and one is not two for one, two in pairs))
        return pairs

    def _connect(self, hGraph: Any, from_: Any, to: Any, count: Any) -> None:
        for one, two in self._pairs(self._graph(hGraph), from_, to, count):
            check(one not in two.after)
            two.after = [*two.after, one]

    def _disconnect(self, hGraph: Any, from_: Any, to: Any, count: Any) -> None:
        for one, two in self._pairs(self._without_memory(hGraph), from_, to, count):
            check(one in two.after)
            two.after = [other for other in two.after if other is not one]

    def cuGraphAddDependencies_v2(self, hGraph: Any, from_: Any, to: Any, edgeData: Any, numDependencies: Any) -> None:
        self._connect(hGraph, from_, to, numDependencies)

    def cuGraphRemoveDependencies_v2(
        self, hGraph: Any, from_: Any, to: Any, edgeData: Any, numDependencies: Any
    ) -> None:
        self._disconnect(hGraph, from_, to, numDependencies)

    if EDGE_DATA:
        cuGraphAddDependencies = cuGraphAddDependencies_v2
        cuGraphRemoveDependencies = cuGraphRemoveDependencies_v2
    else:

        def cuGraphAddDependencies(  # type: ignore[misc]
            self, hGraph: Any, from_: Any, to: Any, numDependencies: Any
        ) -> None:
            self._connect(hGraph, from_, to, numDependencies)

        def cuGraphRemoveDependencies(  # type: ignore[misc]
            self, hGraph: Any, from_: Any, to: Any, numDependencies: Any
        ) -> None:
            self._disconnect(hGraph, from_, to, numDependencies)

    # -- captures that add to a graph ------------------------------------------------------------------------

    def cuStreamBeginCaptureToGraph(
        self, hStream: Any, hGraph: Any, dependencies: Any, dependencyData: Any, numDependencies: Any, mode: Any
    ) -> None:
        stream, number = self._stream_to_capture(hStream, mode)
        graph, after = self._behind(hGraph, dependencies, numDependencies)
        taken = any(capture.graph is graph for capture in self._machine.graphs.captures)
        check(not taken, Result.CUDA_ERROR_ILLEGAL_STATE)
        Capture(self._machine.graphs, stream, number, graph, after)

    def _put_behind(self, hStream: Any, dependencies: Any, count: Any, flags: Any) -> None:
        stream, how = self._stream(hStream), arguments.unsigned_int(flags)
        check(stream.capture is not None, Result.CUDA_ERROR_ILLEGAL_STATE)
        check(self._captured(stream) and how in (_ADD, _SET))
        capture: Capture = stream.capture
        _, nodes = self._behind(cuda.CUgraph(capture.graph.handle), dependencies, count)
        capture.put_behind(stream, nodes, how == _SET)

    def cuStreamUpdateCaptureDependencies_v2(
        self, hStream: Any, dependencies: Any, dependencyData: Any, numDependencies: Any, flags: Any
    ) -> None:
        self._put_behind(hStream, dependencies, numDependencies, flags)

    if EDGE_DATA:
        cuStreamUpdateCaptureDependencies = cuStreamUpdateCaptureDependencies_v2
    else:

        def cuStreamUpdateCaptureDependencies(  # type: ignore[misc]
            self, hStream: Any, dependencies: Any, numDependencies: Any, flags: Any
        ) -> None:
            self._put_behind(hStream, dependencies, numDependencies, flags)

    def cuGraphDestroyNode(self, hNode: Any) -> None:
        node = self._node(hNode)
        self._without_memory(node.graph.handle)
        node.graph.remove(node)

    def cuGraphNodeGetDependencies(self, hNode: Any, numDependencies: Any = 0) -> Any:
        return self._neighbours(self._node(hNode).after, numDependencies)

    def cuGraphNodeGetDependentNodes(self, hNode: Any, numDependentNodes: Any = 0) -> Any:
        node = self._node(hNode)
        return self._neighbours([one for one in node.graph.nodes if node in one.after], numDependentNodes)

    def _neighbours(self, nodes: list[Node], count: Any) -> Any:
        some, number = self._some(nodes, count)
        return (some, [cuda.CUgraphEdgeData() for _ in some], number) if EDGE_DATA else (some, number)

    # -- nodes of memory -------------------------------------------------------------------------------------

    def cuGraphAddMemAllocNode(self, hGraph: Any, dependencies: Any, numDependencies: Any, nodeParams: Any) -> Any:
        graph, after = self._behind(hGraph, dependencies, numDependencies)
        params = arguments.struct("nodeParams", nodeParams, cuda.CUDA_MEM_ALLOC_NODE_PARAMS)
        return cuda.CUgraphNode(self._add_allocation(graph, after, params).handle)

    def _add_allocation(self, graph: Graph, after: list[Node], params: Any) -> Node:
        props, size = params.poolProps, int(params.bytesize)
        place, handle_types = arguments.place(props.location), read_handle_types(props)
        check(size and arguments.number_in(props, "allocType") == PINNED and not handle_types & ~_SHAREABLE)
        on_host = place.type in (Location.HOST, Location.HOST_NUMA)
        check(not on_host and not handle_types, Result.CUDA_ERROR_NOT_SUPPORTED)
        check(place.type == Location.DEVICE and 0 <= place.id < len(self._machine.devices))
        count = int(params.accessDescCount)
        self._check_grants(params.accessDescs[:count], place.id)
        values = {"maxSize": int(props.maxSize), "usage": int(props.usage), "accessDescCount": count}
        node = graph.allocate(size, place.id, after, values)
        params.dptr = cuda.CUdeviceptr(node.address)
        return node

    def _check_grants(self, grants: Any, device: int) -> None:
        """Access grants of an allocation node: read and write only, at most one for each device."""
        places = [arguments.place(one.location) for one in grants]
        check(len(places) <= len(self._machine.devices))
        for place, grant in zip(places, grants, strict=True):
            if place.type == Location.DEVICE:
                check(0 <= place.id < len(self._machine.devices), Result.CUDA_ERROR_INVALID_DEVICE)
                not_modelled(place.id != device, "an allocation node with access for another device")
            check(int(grant.flags) == READ_WRITE, Result.CUDA_ERROR_NOT_SUPPORTED)

    def cuGraphAddMemFreeNode(self, hGraph: Any, dependencies: Any, numDependencies: Any, dptr: DevicePointer) -> Any:
        # It need not depend on the allocation (observed on H200: test_graph_nodes).
        graph, after = self._behind(hGraph, dependencies, numDependencies)
        return cuda.CUgraphNode(graph.free(dptr, after).handle)

    # -- fills and copies ------------------------------------------------------------------------------------

    def cuGraphAddMemsetNode(
        self, hGraph: Any, dependencies: Any, numDependencies: Any, memsetParams: Any, ctx: Any
    ) -> Any:
        graph, after = self._behind(hGraph, dependencies, numDependencies)
        params = arguments.struct("memsetParams", memsetParams, cuda.CUDA_MEMSET_NODE_PARAMS)
        values, operation = self._fill_of_node(graph, params, ctx)
        return cuda.CUgraphNode(graph.add("MEMSET", after, operation, values).handle)

    def _fill_of_node(self, graph: Graph, params: Any, ctx: Any) -> tuple[Values, Operation]:
        context = self._context_of_node(ctx)
        values = {name: int(getattr(params, name)) for name in FILL_FIELDS}
        self._check_fill_node(graph, values, context)
        address, pitch, value, element, width, height = values.values()
        # where the memory is the graph's own nothing else says whose it is (observed on H200: test_graph_nodes)
        check(arguments.context(ctx) or not graph.holds(address))
        pattern = value.to_bytes(8, "little")[:element]
        return values, fill(self._machine, context, address, pattern, width, height, pitch)

    def _context_of_node(self, ctx: Any) -> Context:
        """The context given, or the current one. A node can be made without either."""
        if arguments.context(ctx):
            return self._alive(ctx)
        return self._machine.current_or_none() or self._machine.devices[0].primary

    def cuGraphMemsetNodeGetParams(self, hNode: Any) -> Any:
        return _struct(cuda.CUDA_MEMSET_NODE_PARAMS, self._of_kind(hNode, "MEMSET").values)

    def cuGraphMemsetNodeSetParams(self, hNode: Any, nodeParams: Any) -> None:
        node = self._of_kind(hNode, "MEMSET")
        params = arguments.struct("nodeParams", nodeParams, cuda.CUDA_MEMSET_NODE_PARAMS)
        node.values, node.operation = self._fill_of_node(node.graph, params, None)

    def _of_kind(self, hNode: Any, kind: str) -> Node:
        node = self._node(hNode)
        check(node.kind == kind)
        return node

    def cuGraphAddMemcpyNode(
        self, hGraph: Any, dependencies: Any, numDependencies: Any, copyParams: Any, ctx: Any
    ) -> Any:
        graph, after = self._behind(hGraph, dependencies, numDependencies)
        values, operation = self._copy_of_node(graph, copyParams, ctx)
        return cuda.CUgraphNode(graph.add("MEMCPY", after, operation, values).handle)

    def _copy_of_node(self, graph: Graph, copyParams: Any, ctx: Any) -> tuple[Values, Operation]:
        copy = arguments.struct("copyParams", copyParams, cuda.CUDA_MEMCPY3D)
        context = self._context_of_node(ctx)
        height, depth = int(copy.Height), int(copy.Depth)
        check(int(copy.WidthInBytes) and height and depth)
        target, source, kinds, shape = self._rows_of(copy, height, depth)
        ends = self._check_copy(target, source, shape, PROMISED.get(kinds, ""), (context, context), graph)
        if not shape.fits:
            self._check_loose(*ends, True)
        return copy_values(copy, height, depth), shape.copy(self._machine, context, target, source)

    def cuGraphMemcpyNodeGetParams(self, hNode: Any) -> Any:
        return _struct(cuda.CUDA_MEMCPY3D, self._of_kind(hNode, "MEMCPY").values)

    def cuGraphMemcpyNodeSetParams(self, hNode: Any, nodeParams: Any) -> None:
        node = self._of_kind(hNode, "MEMCPY")
        node.values, node.operation = self._copy_of_node(node.graph, nodeParams, None)

    # -- other nodes -----------------------------------------------------------------------------------------

    def cuGraphAddEmptyNode(self, hGraph: Any, dependencies: Any, numDependencies: Any) -> Any:
        graph, after = self._behind(hGraph, dependencies, numDependencies)
        return cuda.CUgraphNode(graph.add("EMPTY", after).handle)

    def cuGraphAddHostNode(self, hGraph: Any, dependencies: Any, numDependencies: Any, nodeParams: Any) -> Any:
        graph, after = self._behind(hGraph, dependencies, numDependencies)
        params = arguments.struct("nodeParams", nodeParams, cuda.CUDA_HOST_NODE_PARAMS)
        return cuda.CUgraphNode(self._add_host_function(graph, after, params).handle)

    def _add_host_function(self, graph: Graph, after: list[Node], params: Any) -> Node:
        operation = self._host_function(int(params.fn), int(params.userData or 0))
        return graph.add("HOST", after, operation, {"fn": params.fn, "userData": params.userData})

    def cuGraphAddBatchMemOpNode(self, hGraph: Any, dependencies: Any, numDependencies: Any, nodeParams: Any) -> Any:
        graph, after = self._behind(hGraph, dependencies, numDependencies)
        params = arguments.struct("nodeParams", nodeParams, cuda.CUDA_BATCH_MEM_OP_NODE_PARAMS)
        operation = self._batch(self._alive(params.ctx), params.paramArray, int(params.count), int(params.flags), True)
        return cuda.CUgraphNode(graph.add("BATCH_MEM_OP", after, operation).handle)

    def cuGraphAddEventRecordNode(self, hGraph: Any, dependencies: Any, numDependencies: Any, event: Any) -> Any:
        graph, after = self._behind(hGraph, dependencies, numDependencies)
        return cuda.CUgraphNode(self._add_event(graph, after, "EVENT_RECORD", event).handle)

    def cuGraphAddEventWaitNode(self, hGraph: Any, dependencies: Any, numDependencies: Any, event: Any) -> Any:
        graph, after = self._behind(hGraph, dependencies, numDependencies)
        return cuda.CUgraphNode(self._add_event(graph, after, "WAIT_EVENT", event).handle)

    def _add_event(self, graph: Graph, after: list[Node], kind: str, event: Any) -> Node:
        values, enter = self._event_of(kind, event)
        node = graph.add(kind, after, values=values)
        node.enter = enter
        return node

    def _event_of(self, kind: str, event: Any) -> tuple[Values, Callable[[Stream], object]]:
        check(arguments.event(event))
        found = self._event(event)
        return {"event": found}, found.record_in if kind == "EVENT_RECORD" else found.hold

    def _event_of_node(self, hNode: Any, kind: str) -> Any:
        values = self._of_kind(hNode, kind).values
        not_modelled(values is None, "the event of a node that was captured")
        return cuda.CUevent((values or {})["event"].handle)

    def cuGraphEventRecordNodeGetEvent(self, hNode: Any) -> Any:
        return self._event_of_node(hNode, "EVENT_RECORD")

    def cuGraphEventWaitNodeGetEvent(self, hNode: Any) -> Any:
        return self._event_of_node(hNode, "WAIT_EVENT")

    def cuGraphEventRecordNodeSetEvent(self, hNode: Any, event: Any) -> None:
        self._set_event(self._of_kind(hNode, "EVENT_RECORD"), event)

    def cuGraphEventWaitNodeSetEvent(self, hNode: Any, event: Any) -> None:
        self._set_event(self._of_kind(hNode, "WAIT_EVENT"), event)

    def _set_event(self, node: Node, event: Any) -> None:
        node.values, node.enter = self._event_of(node.kind, event)
        node.operation = None

    def cuGraphAddChildGraphNode(self, hGraph: Any, dependencies: Any, numDependencies: Any, childGraph: Any) -> Any:
        graph, after = self._behind(hGraph, dependencies, numDependencies)
        return cuda.CUgraphNode(self._add_child(graph, after, childGraph).handle)

    def _add_child(self, graph: Graph, after: list[Node], childGraph: Any) -> Node:
        child = self._without_memory(childGraph).clone()
        node = graph.add("GRAPH", after)
        node.child = child
        return node

    def cuGraphChildGraphNodeGetGraph(self, hNode: Any) -> Any:
        child = need(self._node(hNode).child)
        return cuda.CUgraph(child.handle)

    # -- nodes of any kind -----------------------------------------------------------------------------------

    def _work_of_node(self, graph: Graph, params: Any) -> tuple[Values, Operation]:
        """Values and operation of a fill node or a copy node."""
        if _kind(params) == "MEMSET":
            return self._fill_of_node(graph, params.memset, params.memset.ctx)
        check(not params.memcpy.flags)
        return self._copy_of_node(graph, params.memcpy.copyParams, params.memcpy.copyCtx)

    def _check_kind(self, node: Node, nodeParams: Any) -> Any:
        """Parameters that a fill or a copy is to get."""
        params = arguments.struct("nodeParams", nodeParams, cuda.CUgraphNodeParams)
        check(_kind(params) == node.kind)
        not_modelled(node.kind not in ("MEMSET", "MEMCPY"), f"other parameters for a node of kind {node.kind}")
        return params

    def cuGraphNodeSetParams(self, hNode: Any, nodeParams: Any) -> None:
        node = self._node(hNode)
        node.values, node.operation = self._work_of_node(node.graph, self._check_kind(node, nodeParams))

    def _add_node(self, hGraph: Any, dependencies: Any, count: Any, nodeParams: Any) -> Any:
        graph, after = self._behind(hGraph, dependencies, count)
        params = arguments.struct("nodeParams", nodeParams, cuda.CUgraphNodeParams)
        kind = _kind(params)
        if kind in ("MEMSET", "MEMCPY"):
            values, operation = self._work_of_node(graph, params)
            node = graph.add(kind, after, operation, values)
        elif kind == "MEM_ALLOC":
            node = self._add_allocation(graph, after, params.alloc)
        elif kind == "MEM_FREE":
            node = graph.free(int(params.free.dptr), after)
        elif kind == "HOST":
            node = self._add_host_function(graph, after, params.host)
        elif kind == "EVENT_RECORD":
            node = self._add_event(graph, after, kind, params.eventRecord.event)
        elif kind == "WAIT_EVENT":
            node = self._add_event(graph, after, kind, params.eventWait.event)
        elif kind == "GRAPH":
            node = self._add_child(graph, after, params.graph.graph)
        elif kind == "EMPTY":
            node = graph.add(kind, after)
        else:
            raise NotModelled(f"a graph node of kind {kind}")
        return cuda.CUgraphNode(node.handle)

    def cuGraphAddNode_v2(
        self, hGraph: Any, dependencies: Any, dependencyData: Any, numDependencies: Any, nodeParams: Any
    ) -> Any:
        return self._add_node(hGraph, dependencies, numDependencies, nodeParams)

    if EDGE_DATA:
        cuGraphAddNode = cuGraphAddNode_v2
    else:

        def cuGraphAddNode(  # type: ignore[misc]
            self, hGraph: Any, dependencies: Any, numDependencies: Any, nodeParams: Any
        ) -> Any:
            return self._add_node(hGraph, dependencies, numDependencies, nodeParams)
