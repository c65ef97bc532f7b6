"""Graphs, captured from streams or built node by node, their launches, and updates of their instances.

An update changes the parameters of nodes and never the set of nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from streamalloc.driver.bindings import cuda, opaque_bytes, opaque_struct, read_handle_types
from streamalloc.simulator import arguments, graphs
from streamalloc.simulator.arguments import Device, Function, GraphExec, Node, NodeGraph, Size, Stream, UnsignedInt
from streamalloc.simulator.calls.base import EDGE_DATA, call
from streamalloc.simulator.calls.copies import FILL_FIELDS, PROMISED, CopyCalls, copy_values
from streamalloc.simulator.calls.kernels import KernelCalls, extents_of, node_values
from streamalloc.simulator.calls.streams import StreamCalls
from streamalloc.simulator.constants import BLOCK, PINNED, READ_WRITE, Location
from streamalloc.simulator.contexts import Context
from streamalloc.simulator.errors import Fault, Result, check, need, not_modelled
from streamalloc.simulator.graphs import AUTO_FREE_ON_LAUNCH, RELAXED, GraphCapture, Values, Work
from streamalloc.simulator.memory import Shape

_ACTIVE = cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
_INACTIVE = cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
_INVALIDATED = cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_INVALIDATED
_UPLOAD, _DEVICE_LAUNCH, _USE_NODE_PRIORITY = 2, 4, 8  # CUgraphInstantiate_flags
_LOCAL_MEMORY = 0x10  # CU_CTX_LMEM_RESIZE_TO_MAX
_SMALL_FILL = 4096
"""Size in bytes. A fill node that is larger sets CU_CTX_LMEM_RESIZE_TO_MAX in the context at instantiation (observed on
H200: test_capture).
"""

# Fields of DeviceGraphMemory, in the order of the members of CUgraphMem_attribute.
_MEMORY_ATTRIBUTES = ("used", "used_high", "size", "reserved_high")
_ADD, _SET = 0, 1  # CUstreamUpdateCaptureDependencies_flags
_MOVE = 1  # CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE
_SHAREABLE = 1 | 8
"""Handle types that Linux has: file descriptors and fabric handles (CUmemAllocationHandleType)."""

_IN_PARAMS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "MEMSET": lambda params: (params.memset, params.memset.ctx),
    "MEMCPY": lambda params: (params.memcpy.copyParams, params.memcpy.copyCtx),
    "MEM_ALLOC": lambda params: (params.alloc,),
    "MEM_FREE": lambda params: (params.free.dptr,),
    "HOST": lambda params: (params.host,),
    "EVENT_RECORD": lambda params: (params.eventRecord.event,),
    "WAIT_EVENT": lambda params: (params.eventWait.event,),
    "GRAPH": lambda params: (params.graph.graph,),
    "KERNEL": lambda params: (params.kernel,),
    "EMPTY": lambda params: (),
}
"""Function that reads the arguments of a call such as ``cuGraphAddMemsetNode`` from a CUgraphNodeParams, by node
kind.
"""

_CHANGEABLE = ("MEMSET", "MEMCPY", "KERNEL")
"""Node kinds whose parameters can be changed in an instance, and whose nodes can be disabled."""


def _handles(nodes: list[Node], count: int = 0) -> list[Any]:
    """Return the handles of ``nodes`` as objects of the bindings, followed by null handles up to a length of
    ``count``.
    """
    return [cuda.CUgraphNode(one) for one in (*(node.handle for node in nodes), *[0] * (count - len(nodes)))]


def _edge_data(count: int) -> tuple[Any, ...]:
    """Return default edge data of ``count`` edges, in a tuple to append to a call's result. The tuple is empty for
    bindings without edge data.
    """
    return ([cuda.CUgraphEdgeData() for _ in range(count)],) if EDGE_DATA else ()


def _read_params(params: Any) -> tuple[str, tuple[Any, ...]]:
    """Return the node kind of a CUgraphNodeParams, and the arguments of the call that adds a node of this kind."""
    kind = params.type.name.removeprefix("CU_GRAPH_NODE_TYPE_")
    not_modelled(kind not in _IN_PARAMS, f"a graph node of kind {kind}")
    check(kind != "MEMCPY" or not params.memcpy.flags)
    return kind, _IN_PARAMS[kind](params)


class GraphBuildingCalls(CopyCalls, StreamCalls, KernelCalls):
    """The calls that create, build, query and destroy graphs: cuGraphCreate, cuGraphClone, cuGraphAdd*,
    cuGraph*Node*Params and others.
    """

    # -- building graphs -------------------------------------------------------------------------------------

    def cuGraphCreate(self, flags: UnsignedInt) -> Any:
        check(not flags)
        return cuda.CUgraph(self.graphs.create().handle)

    def cuGraphClone(self, originalGraph: NodeGraph) -> Any:
        return cuda.CUgraph(self._without_memory(originalGraph).clone().handle)

    @staticmethod
    def _without_memory(graph: NodeGraph) -> NodeGraph:
        """Return ``graph``, or fail with CUDA_ERROR_NOT_SUPPORTED if it has allocation nodes or free nodes."""
        check(not graph.memories and not graph.frees, Result.CUDA_ERROR_NOT_SUPPORTED)
        return graph

    def cuGraphNodeFindInClone(self, hOriginalNode: Node, hClonedGraph: NodeGraph) -> Any:
        found = [node for node in hClonedGraph.nodes if node.origin is hOriginalNode]
        check(found)
        return cuda.CUgraphNode(found[0].handle)

    # -- edges -----------------------------------------------------------------------------------------------

    def _given_nodes(self, name: str, given: Any, count: Any) -> list[Node]:
        return [self._find(Node, one) for one in arguments.structs(name, given, cuda.CUgraphNode, count)]

    def _behind(self, hGraph: Any, dependencies: Any, count: Any) -> tuple[NodeGraph, list[Node]]:
        """Return the graph of a handle, and the nodes that the new node depends on. They must be different nodes of
        this graph.
        """
        nodes, graph = self._given_nodes("dependencies", dependencies, count), self._find(NodeGraph, hGraph)
        check(all(node.graph is graph for node in nodes) and len(set(nodes)) == len(nodes))
        return graph, nodes

    def _pairs(self, graph: NodeGraph, from_: Any, to: Any, count: Any) -> list[tuple[Node, Node]]:
        pairs = list(zip(self._given_nodes("from_", from_, count), self._given_nodes("to", to, count), strict=True))
        check(all(one.graph is graph and two.graph is graph and one is not two for one, two in pairs))
        return pairs

    def _connect(self, graph: NodeGraph, from_: Any, to: Any, *more: Any) -> None:
        for one, two in self._pairs(graph, from_, to, more[-1]):
            check(one not in two.after)
            two.after = [*two.after, one]

    def _disconnect(self, graph: NodeGraph, from_: Any, to: Any, *more: Any) -> None:
        for one, two in self._pairs(self._without_memory(graph), from_, to, more[-1]):
            check(one in two.after)
            two.after = [other for other in two.after if other is not one]

    cuGraphAddDependencies = cuGraphAddDependencies_v2 = call(_connect, hGraph=NodeGraph)
    cuGraphRemoveDependencies = cuGraphRemoveDependencies_v2 = call(_disconnect, hGraph=NodeGraph)

    # -- nodes -----------------------------------------------------------------------------------------------

    def _add_node(self, kind: str, hGraph: Any, dependencies: Any, count: Any, *params: Any) -> Any:
        graph, after = self._behind(hGraph, dependencies, count)
        if kind == "MEM_ALLOC":
            node = self._add_allocation(graph, after, *params)
        # The free node need not depend on the allocation node (observed on H200: test_graph_nodes).
        elif kind == "MEM_FREE":
            node = graph.free(arguments.device_pointer(*params), after)
        elif kind == "GRAPH":
            node = graph.add(kind, after, child=self._without_memory(self._find(NodeGraph, *params)).clone())
        else:
            node = graph.add(kind, after, **self._work(kind, graph, *params))
        return cuda.CUgraphNode(node.handle)

    cuGraphAddMemAllocNode = call(_add_node, "MEM_ALLOC")
    cuGraphAddMemFreeNode = call(_add_node, "MEM_FREE")
    cuGraphAddMemsetNode = call(_add_node, "MEMSET")
    cuGraphAddMemcpyNode = call(_add_node, "MEMCPY")
    cuGraphAddEmptyNode = call(_add_node, "EMPTY")
    cuGraphAddHostNode = call(_add_node, "HOST")
    cuGraphAddBatchMemOpNode = call(_add_node, "BATCH_MEM_OP")
    cuGraphAddEventRecordNode = call(_add_node, "EVENT_RECORD")
    cuGraphAddEventWaitNode = call(_add_node, "WAIT_EVENT")
    cuGraphAddKernelNode = call(_add_node, "KERNEL")
    cuGraphAddChildGraphNode = call(_add_node, "GRAPH")

    def _add_any_node(self, hGraph: Any, dependencies: Any, *more: Any) -> Any:
        kind, params = _read_params(more[-1])
        moved = kind == "GRAPH" and int(more[-1].graph.ownership) == _MOVE
        not_modelled(moved, "a child graph that moves into its parent")
        return self._add_node(kind, hGraph, dependencies, more[-2], *params)

    cuGraphAddNode = cuGraphAddNode_v2 = call(_add_any_node)

    def _add_allocation(self, graph: NodeGraph, after: list[Node], params: Any) -> Node:
        props, size = params.poolProps, int(params.bytesize)
        place, handle_types = arguments.place(props.location), read_handle_types(props)
        check(size and arguments.number_in(props, "allocType") == PINNED and not handle_types & ~_SHAREABLE)
        on_host = place.type in (Location.HOST, Location.HOST_NUMA)
        check(not on_host and not handle_types, Result.CUDA_ERROR_NOT_SUPPORTED)
        check(place.type == Location.DEVICE and 0 <= place.id < len(self.devices))
        count = int(params.accessDescCount)
        self._check_grants(params.accessDescs[:count], place.id)
        values = {"maxSize": int(props.maxSize), "usage": int(props.usage), "accessDescCount": count}
        node = graph.allocate(size, place.id, after, values)
        params.dptr = cuda.CUdeviceptr(node.address)
        return node

    def _check_grants(self, grants: Any, device: int) -> None:
        """Check the access grants of an allocation node. Each grant must be for reading and writing, and there must be
        at most as many grants as devices.
        """
        places = [arguments.place(one.location) for one in grants]
        check(len(places) <= len(self.devices))
        for place, grant in zip(places, grants, strict=True):
            if place.type == Location.DEVICE:
                check(0 <= place.id < len(self.devices), Result.CUDA_ERROR_INVALID_DEVICE)
                not_modelled(place.id != device, "an allocation node with access for another device")
            check(int(grant.flags) == READ_WRITE, Result.CUDA_ERROR_NOT_SUPPORTED)

    # -- work of nodes: what a launch does, and the parameters that a query returns --------------------------

    def _work(self, kind: str, graph: NodeGraph, *params: Any) -> Work:
        """Return the work of a node, from the arguments of the call that adds it: the method ``_work_of_KIND`` reads
        them.
        """
        work: Work = getattr(self, f"_work_of_{kind}")(graph, *params) if params else {}
        return work

    def _work_of_MEMSET(self, graph: NodeGraph, params: Any, ctx: Any = None) -> Work:
        context = self._context_of_node(ctx)
        values = {name: int(getattr(params, name)) for name in FILL_FIELDS}
        self._check_fill_node(graph, values, context)
        address, pitch, value, element, width, height = values.values()
        # An address of the graph's own memory gives no context, so the caller must give one (observed on H200:
        # test_graph_nodes).
        check(arguments.context(ctx) or not graph.contains(address))
        pattern = value.to_bytes(8, "little")[:element]
        return {"values": values, "operation": self.filling(context, address, pattern, width, height, pitch)}

    def _check_fill_node(self, graph: NodeGraph, values: dict[str, int], context: Context, freed: bool = False) -> None:
        address, pitch, _, element, width, height = (values[name] for name in FILL_FIELDS)
        check(width and height and element in (1, 2, 4) and address % element == 0)
        check(height == 1 or (pitch >= width * element and pitch % element == 0))
        span = (height - 1) * pitch + width * element
        if graph.contains(address):
            check(graph.covers(address, span, freed))
        else:
            self._check_fill(address, span, context)

    def _context_of_node(self, ctx: Any) -> Context:
        """Return the context that the caller gave, else the current context, else the primary context of device 0."""
        if arguments.context(ctx):
            found: Context = self._find(arguments.Context, ctx)
            return found
        return self.current_or_none() or self.devices[0].primary

    def _work_of_MEMCPY(self, graph: NodeGraph, params: Any, ctx: Any = None) -> Work:
        context = self._context_of_node(ctx)
        shape = Shape(int(params.WidthInBytes), int(params.Height), int(params.Depth))
        check(shape.size)
        target, source, kinds = self._sides(params, shape)
        self._check_copy(target, source, shape, PROMISED.get(kinds, ""), (context, context), graph)
        return {"values": copy_values(params, shape), "operation": self.copying(context, shape, target, source)}

    def _work_of_HOST(self, graph: NodeGraph, params: Any) -> Work:
        operation = self._host_function(int(params.fn), int(params.userData or 0))
        return {"values": {"fn": params.fn, "userData": params.userData}, "operation": operation}

    def _work_of_BATCH_MEM_OP(self, graph: NodeGraph, params: Any) -> Work:
        context = self._find(arguments.Context, params.ctx)
        return {"operation": self._batch(context, params.paramArray, int(params.count), int(params.flags), True)}

    def _work_of_KERNEL(self, graph: NodeGraph, params: Any) -> Work:
        function: Function = self._find(Function, int(params.func) or int(params.kern))
        context = function.module.context or self._context_of_node(params.ctx)
        shape = self._shape(function, (*extents_of(params), int(params.sharedMemBytes)))
        given = int(params.kernelParams), int(params.extra)
        operation, cells = self._launch_of(context, function, shape, given)
        return {"values": node_values(function, shape, cells), "operation": operation}

    def _work_of_EVENT_RECORD(self, graph: NodeGraph, event: Any) -> Work:
        check(arguments.event(event))
        found = self._find(arguments.Event, event)
        return {"values": {"event": found}, "enter": found.record_in, "operation": None}

    def _work_of_WAIT_EVENT(self, graph: NodeGraph, event: Any) -> Work:
        work = self._work_of_EVENT_RECORD(graph, event)
        return {**work, "enter": work["values"]["event"].make_wait}

    # -- parameters of nodes ---------------------------------------------------------------------------------

    def _params_of_node(self, kind: str, struct: str, node: Node) -> Any:
        check(node.kind == kind)
        made = getattr(cuda, struct)()
        values = dict(need(node.values, "the parameters of this node"))
        values.pop("cells", None)  # The entry is no field of the struct. It only keeps the arguments of a kernel alive.
        for name, value in values.items():
            setattr(made, name, cuda.CUmemorytype(value) if name.endswith("MemoryType") else value)
        return made

    cuGraphMemsetNodeGetParams = call(_params_of_node, "MEMSET", "CUDA_MEMSET_NODE_PARAMS")
    cuGraphMemcpyNodeGetParams = call(_params_of_node, "MEMCPY", "CUDA_MEMCPY3D")
    cuGraphKernelNodeGetParams = call(_params_of_node, "KERNEL", "CUDA_KERNEL_NODE_PARAMS")
    cuGraphHostNodeGetParams = call(_params_of_node, "HOST", "CUDA_HOST_NODE_PARAMS")

    # Attributes of kernel nodes are only stored, and have no effect.

    def cuGraphKernelNodeSetAttribute(self, hNode: Node, attr: Any, value: cuda.CUkernelNodeAttrValue) -> None:
        check(hNode.kind == "KERNEL")
        number = arguments.member("attr", attr, cuda.CUkernelNodeAttrID)
        hNode.attributes = {**hNode.attributes, number: opaque_bytes(value)}

    def cuGraphKernelNodeGetAttribute(self, hNode: Node, attr: Any) -> Any:
        check(hNode.kind == "KERNEL")
        number = arguments.member("attr", attr, cuda.CUkernelNodeAttrID)
        kept = need(hNode.attributes.get(number), "an attribute of a kernel node that was not set")
        return opaque_struct("CUkernelNodeAttrValue", kept)

    def cuGraphKernelNodeCopyAttributes(self, dst: Node, src: Node) -> None:
        check(dst.kind == src.kind == "KERNEL")
        dst.attributes = {**dst.attributes, **src.attributes}

    def _event_of_node(self, kind: str, node: Node) -> Any:
        check(node.kind == kind)
        values: Values = need(node.values, "the event of a node that was captured")
        return cuda.CUevent(values["event"].handle)

    cuGraphEventRecordNodeGetEvent = call(_event_of_node, "EVENT_RECORD")
    cuGraphEventWaitNodeGetEvent = call(_event_of_node, "WAIT_EVENT")

    def cuGraphChildGraphNodeGetGraph(self, hNode: Node) -> Any:
        return cuda.CUgraph(need(hNode.child).handle)

    def _set(self, kind: str, node: Node, *params: Any) -> None:
        check(node.kind == kind)
        for name, value in self._work(kind, node.graph, *params).items():
            setattr(node, name, value)

    cuGraphMemsetNodeSetParams = call(_set, "MEMSET")
    cuGraphMemcpyNodeSetParams = call(_set, "MEMCPY")
    cuGraphKernelNodeSetParams = call(_set, "KERNEL")
    cuGraphHostNodeSetParams = call(_set, "HOST")
    cuGraphEventRecordNodeSetEvent = call(_set, "EVENT_RECORD")
    cuGraphEventWaitNodeSetEvent = call(_set, "WAIT_EVENT")

    @staticmethod
    def _params_for(node: Node, given: Any) -> tuple[Any, ...]:
        """Return the arguments of the call that changes a fill, copy or kernel node. ``given``: the CUgraphNodeParams
        with them.
        """
        kind = given.type.name.removeprefix("CU_GRAPH_NODE_TYPE_")
        check(kind == node.kind)
        not_modelled(kind not in _CHANGEABLE, f"other parameters for a node of kind {kind}")
        return _read_params(given)[1]

    def cuGraphNodeSetParams(self, hNode: Node, nodeParams: cuda.CUgraphNodeParams) -> None:
        self._set(hNode.kind, hNode, *self._params_for(hNode, nodeParams))

    # -- looking at graphs -----------------------------------------------------------------------------------

    def cuGraphGetRootNodes(self, hGraph: NodeGraph, numRootNodes: Size = 0) -> tuple[list[Any], int]:
        return self._some([node for node in hGraph.nodes if not node.after], numRootNodes)

    def cuGraphGetNodes(self, hGraph: NodeGraph, numNodes: Size = 0) -> tuple[list[Any], int]:
        return self._some(hGraph.nodes, numNodes)

    @staticmethod
    def _some(nodes: list[Node], count: int) -> tuple[list[Any], int]:
        """Return the handles of the first ``count`` nodes, and their number. For a count of 0, return no handles and
        the number of all nodes.
        """
        return _handles(nodes[:count], count), min(count, len(nodes)) if count else len(nodes)

    def cuGraphGetEdges(self, hGraph: NodeGraph, numEdges: Size = 0) -> Any:
        edges = [(before, node) for node in hGraph.nodes for before in node.after]
        some = edges[:numEdges]
        ends = [_handles([pair[end] for pair in some], numEdges) for end in (0, 1)]
        return (*ends, *_edge_data(numEdges), len(some or edges))

    def cuGraphNodeGetType(self, hNode: Node) -> Any:
        return getattr(cuda.CUgraphNodeType, f"CU_GRAPH_NODE_TYPE_{hNode.kind}")

    def cuGraphMemAllocNodeGetParams(self, hNode: Node) -> Any:
        node, values = hNode, hNode.values or {}
        check(node.kind == "MEM_ALLOC")
        location = cuda.CUmemLocation()
        location.type, location.id = cuda.CUmemLocationType(Location.DEVICE), node.device
        props = cuda.CUmemPoolProps()
        props.allocType, props.location = cuda.CUmemAllocationType(PINNED), location
        props.maxSize, props.usage = values.get("maxSize", 0), values.get("usage", 0)
        params = cuda.CUDA_MEM_ALLOC_NODE_PARAMS()
        params.accessDescCount = values.get("accessDescCount", 0)
        params.poolProps, params.bytesize, params.dptr = props, node.size, cuda.CUdeviceptr(node.address)
        return params

    def cuGraphMemFreeNodeGetParams(self, hNode: Node) -> Any:
        check(hNode.kind == "MEM_FREE")
        return cuda.CUdeviceptr(hNode.address)

    def cuGraphDestroy(self, hGraph: NodeGraph) -> None:
        self.graphs.destroy(hGraph)


class GraphCalls(GraphBuildingCalls):
    """All other calls for graphs: captures (cuStream*Capture*), instances and launches (cuGraphInstantiate*,
    cuGraphExec*, cuGraphUpload, cuGraphLaunch), graph memory (cuDevice*GraphMem*), and the neighbours of a node.
    """

    # -- capture ---------------------------------------------------------------------------------------------

    def cuStreamBeginCapture(self, hStream: Stream, mode: Any) -> None:
        GraphCapture(self.graphs, hStream, self._mode_of_capture(hStream, mode))

    def _mode_of_capture(self, stream: Stream, mode: Any) -> int:
        """Check that a capture may begin in ``stream``. Returns the capture mode as a number."""
        number = int(mode)
        check(0 <= number <= RELAXED)
        self._not_behind_captures(stream)
        check(stream.peers is None, Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        check(stream.capture is None, Result.CUDA_ERROR_ILLEGAL_STATE)
        return number

    def cuStreamEndCapture(self, hStream: Stream) -> Any:
        capture = hStream.capture
        if capture is None:
            self._captured(hStream)
            raise Fault(Result.CUDA_ERROR_ILLEGAL_STATE)
        if capture.origin is not hStream:
            capture.fail(Result.CUDA_ERROR_STREAM_CAPTURE_UNMATCHED)
        return cuda.CUgraph(capture.end().handle)

    def cuStreamIsCapturing(self, hStream: Stream) -> Any:
        return self._capture_status(hStream)

    @staticmethod
    def _capture_status(stream: Stream) -> Any:
        if stream.capture is None:
            capturing = [peer for peer in stream.peers or () if peer.capture is not None]
            check(not capturing, Result.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
            return _INACTIVE
        return _ACTIVE if stream.capture.valid else _INVALIDATED

    def cuStreamGetCaptureInfo(self, hStream: Stream) -> tuple[Any, ...]:
        status = self._capture_status(hStream)
        number, graph, behind = 0, 0, []
        if status is _ACTIVE:
            capture: GraphCapture = hStream.capture
            number, graph, behind = capture.id, capture.graph.handle, _handles(capture.behind(hStream))
        return (status, cuda.cuuint64_t(number), cuda.CUgraph(graph), behind, *_edge_data(len(behind)), len(behind))

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        number = int(mode)
        check(0 <= number <= RELAXED)
        caller = self.scheduler.caller
        previous, caller.capture_mode = caller.capture_mode, number
        return cuda.CUstreamCaptureMode(previous)

    # -- captures that add to a graph ------------------------------------------------------------------------

    def cuStreamBeginCaptureToGraph(
        self, hStream: Stream, hGraph: Any, dependencies: Any, dependencyData: Any, numDependencies: Size, mode: Any
    ) -> None:
        number = self._mode_of_capture(hStream, mode)
        graph, after = self._behind(hGraph, dependencies, numDependencies)
        check(not any(capture.graph is graph for capture in self.graphs.captures), Result.CUDA_ERROR_ILLEGAL_STATE)
        GraphCapture(self.graphs, hStream, number, graph, after)

    def _put_behind(self, stream: Stream, dependencies: Any, *more: Any) -> None:
        count, how = more[-2:]
        check(stream.capture is not None, Result.CUDA_ERROR_ILLEGAL_STATE)
        check(self._captured(stream) and how in (_ADD, _SET))
        capture: GraphCapture = stream.capture
        _, nodes = self._behind(capture.graph.handle, dependencies, count)
        capture.put_behind(stream, nodes, how == _SET)

    cuStreamUpdateCaptureDependencies = cuStreamUpdateCaptureDependencies_v2 = call(_put_behind, hStream=Stream)

    def cuGraphDestroyNode(self, hNode: Node) -> None:
        self._without_memory(hNode.graph).remove(hNode)

    def cuGraphNodeGetDependencies(self, hNode: Node, numDependencies: Size = 0) -> Any:
        return self._neighbours(hNode.after, numDependencies)

    def cuGraphNodeGetDependentNodes(self, hNode: Node, numDependentNodes: Size = 0) -> Any:
        return self._neighbours([one for one in hNode.graph.nodes if hNode in one.after], numDependentNodes)

    def _neighbours(self, nodes: list[Node], count: Any) -> Any:
        some, number = self._some(nodes, count)
        return (some, *_edge_data(len(some)), number)

    # -- nodes of instantiated graphs ------------------------------------------------------------------------

    def cuGraphExecUpdate(self, hGraphExec: GraphExec, hGraph: NodeGraph) -> Any:
        instance, graph = hGraphExec, hGraph
        memory = bool(graph.memories or graph.frees) and graph is not instance.graph
        check(not memory or not graph.instances, Result.CUDA_ERROR_NOT_SUPPORTED)
        not_modelled(any(node.child is not None for node in graph.nodes), "updating from a graph with child graphs")
        nodes = graph.ordered()
        failure = Result.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE
        check(_topology([need(node.origin) for node in instance.nodes]) == _topology(nodes), failure)
        live = any(one.live for one in instance.graph.memories.values())
        not_modelled(memory and live, "updating to other memory while what a launch has left is not freed")
        check(all(_may_replace(old, new) for old, new in zip(instance.nodes, nodes, strict=True)), failure)
        for number, (old, new) in enumerate(zip(instance.nodes, nodes, strict=True)):
            instance.nodes[number] = replace(new, origin=old.origin, enabled=old.enabled)
        if memory:
            instance.adopt(graph)
        return cuda.CUgraphExecUpdateResultInfo()

    @staticmethod
    def _instantiated(instance: GraphExec, node: Node, *kinds: str) -> int:
        """Return the index in ``instance.nodes`` of the node that was made from ``node`` of the graph.

        ``kinds``: the node kinds that the call allows.
        """
        check(node.kind in kinds)
        found = [number for number, one in enumerate(instance.nodes) if one.origin is node]
        check(found)
        return found[0]

    def _change(self, kind: str, instance: GraphExec, node: Node, *params: Any) -> None:
        number = self._instantiated(instance, node, kind)
        changed = replace(instance.nodes[number], **self._work(kind, instance.graph, *params))
        check(_may_replace(instance.nodes[number], changed))
        instance.nodes[number] = changed

    cuGraphExecMemsetNodeSetParams = call(_change, "MEMSET")
    cuGraphExecMemcpyNodeSetParams = call(_change, "MEMCPY")
    cuGraphExecHostNodeSetParams = call(_change, "HOST")
    cuGraphExecKernelNodeSetParams = call(_change, "KERNEL")
    cuGraphExecEventRecordNodeSetEvent = call(_change, "EVENT_RECORD")
    cuGraphExecEventWaitNodeSetEvent = call(_change, "WAIT_EVENT")

    def cuGraphExecNodeSetParams(self, hGraphExec: GraphExec, hNode: Node, nodeParams: cuda.CUgraphNodeParams) -> None:
        self._change(hNode.kind, hGraphExec, hNode, *self._params_for(hNode, nodeParams))

    def cuGraphNodeGetEnabled(self, hGraphExec: GraphExec, hNode: Node) -> int:
        return int(hGraphExec.nodes[self._instantiated(hGraphExec, hNode, *_CHANGEABLE)].enabled)

    def cuGraphNodeSetEnabled(self, hGraphExec: GraphExec, hNode: Node, isEnabled: UnsignedInt) -> None:
        hGraphExec.nodes[self._instantiated(hGraphExec, hNode, *_CHANGEABLE)].enabled = bool(isEnabled)

    # -- running them ----------------------------------------------------------------------------------------

    def cuGraphInstantiate(self, hGraph: NodeGraph, flags: arguments.UnsignedLongLong) -> Any:
        return cuda.CUgraphExec(self._instantiate(hGraph, flags).handle)

    def cuGraphInstantiateWithParams(
        self, hGraph: NodeGraph, instantiateParams: cuda.CUDA_GRAPH_INSTANTIATE_PARAMS
    ) -> Any:
        flags = int(instantiateParams.flags)
        made = self._instantiate(hGraph, flags, _UPLOAD)
        if flags & _UPLOAD:
            self._upload(made, self._find(Stream, instantiateParams.hUploadStream))
        instantiateParams.result_out = cuda.CUgraphInstantiateResult.CUDA_GRAPH_INSTANTIATE_SUCCESS
        return cuda.CUgraphExec(made.handle)

    def _instantiate(self, graph: NodeGraph, flags: int, uploads: int = 0) -> GraphExec:
        self._unsafe_during_capture()
        context = self.current()  # Without a current context the call is refused (observed on H200: test_contexts).
        not_modelled(flags & _DEVICE_LAUNCH and flags != _DEVICE_LAUNCH, f"cuGraphInstantiate with flags {flags:#x}")
        check(not flags & ~(AUTO_FREE_ON_LAUNCH | _USE_NODE_PRIORITY | uploads))
        # A graph with memory nodes can have only one instance at a time (observed on H200: test_graph_memory).
        check(not (graph.memories or graph.frees) or not graph.instances, Result.CUDA_ERROR_NOT_SUPPORTED)
        for node in graph.flat():
            if node.kind == "MEMSET":  # The memory of a fill node must exist (observed on H200: test_capture).
                values = node.values or {}
                self._check_fill_node(graph, values, context, freed=True)
                if values["elementSize"] * values["width"] * values["height"] > _SMALL_FILL:
                    context.implied_flags = _LOCAL_MEMORY
        if context.graph_block is None:
            context.graph_block = context.device.heap.take(BLOCK)
        instance = self.graphs.executables.add(graphs.GraphExec(graph, flags))
        instance.keep()
        return instance

    def cuGraphLaunch(self, hGraphExec: GraphExec, hStream: Stream) -> None:
        self._check_launch(hStream, "cuGraphLaunch")
        hGraphExec.launch(self.allocations, hStream)
        # The launch returns after copies to pageable memory (observed on H200: test_copies).
        if any(map(self._writes_pageable, hGraphExec.nodes)):
            self._finish(hStream)

    def _writes_pageable(self, node: graphs.GraphNode) -> bool:
        values = (node.enabled and node.kind == "MEMCPY" and node.values) or {}
        at = int(values.get("dstHost") or values.get("dstDevice") or 0)
        found = self.allocations.find(at)
        # Memory of graphs that is not allocated now has no allocation, but lies in an arena.
        return bool(at) and (self.banks.arenas.find(at) is None if found is None else not found.known)

    def _upload(self, instance: GraphExec, stream: Stream) -> None:
        self._check_launch(stream, "cuGraphUpload")
        instance.upload(stream)

    cuGraphUpload = call(_upload, hStream=Stream)

    def cuGraphExecGetFlags(self, hGraphExec: GraphExec) -> Any:
        return cuda.cuuint64_t(hGraphExec.flags & ~_USE_NODE_PRIORITY)

    def cuGraphExecDestroy(self, hGraphExec: GraphExec) -> None:
        self._unsafe_during_capture()
        del self.graphs.executables[hGraphExec.handle]
        hGraphExec.release()

    # -- memory of graphs ------------------------------------------------------------------------------------

    def cuDeviceGetGraphMemAttribute(self, device: Device, attr: Any) -> Any:
        number = arguments.member("attr", attr, cuda.CUgraphMem_attribute)
        return cuda.cuuint64_t(getattr(device.graphs, _MEMORY_ATTRIBUTES[number]))

    def cuDeviceSetGraphMemAttribute(self, device: Device, attr: Any, value: Any) -> None:
        name = _MEMORY_ATTRIBUTES[arguments.member("attr", attr, cuda.CUgraphMem_attribute)]
        value.getPtr()  # The bindings accept only their own class here, and raise AttributeError for other objects.
        check(name in ("used_high", "reserved_high") and int(value) == 0)
        setattr(device.graphs, name, device.graphs.used if name == "used_high" else device.graphs.size)

    def cuDeviceGraphMemTrim(self, device: Device) -> None:
        device.graphs.trim()


def _may_replace(old: Node, new: Node) -> bool:
    """Whether a node of an instance may get the parameters of ``new`` (observed on H200: test_graph_nodes).

    A fill of several rows must keep its pitch, width, height and element size. A copy of several rows must keep all its
    parameters. Any other copy must keep the memory types of its source and destination.
    """
    not_modelled(old.kind == "BATCH_MEM_OP", "updating a batch of memory operations")
    if old.kind not in ("MEMSET", "MEMCPY"):
        return True
    before, after = old.values or {}, new.values or {}
    if old.kind == "MEMSET":
        return before == after or _kept(before) == _kept(after)
    flat = all(values["Height"] == values["Depth"] == 1 for values in (before, after))
    kinds = [[int(values[side + "MemoryType"]) for side in ("dst", "src")] for values in (before, after)]
    return before == after or (flat and kinds[0] == kinds[1])


def _kept(values: Values) -> tuple[int, ...]:
    """Return the parameters of a fill that an update cannot change. They are pitch, width, height and element size if
    the fill has several rows; otherwise there are none.
    """
    return (values["pitch"], values["width"], values["height"], values["elementSize"]) if values["height"] > 1 else ()


def _topology(nodes: list[Node]) -> list[tuple[str, list[int]]]:
    """Return a tuple for each node: its kind, and the indexes in ``nodes`` of the nodes that it depends on. Equal
    results mean graphs of equal shape.
    """
    numbers = {node: number for number, node in enumerate(nodes)}
    return [(node.kind, sorted(numbers.get(one, -1) for one in node.after)) for node in nodes]
