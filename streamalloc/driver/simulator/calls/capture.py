"""Stream capture and graphs."""

from __future__ import annotations

from typing import Any

from streamalloc.driver.bindings import cuda

from .. import arguments
from ..arguments import UnsignedLongLong
from ..errors import Fault, Result, check, need, not_modelled
from ..graphs import AUTO_FREE_ON_LAUNCH, RELAXED, Capture, Graph, GraphExec, Node
from ..moves import Fill
from ..timeline import Stream
from .base import EDGE_DATA, Calls

_ACTIVE = cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
_INACTIVE = cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
_INVALIDATED = cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_INVALIDATED
_NODE_TYPE = "CU_GRAPH_NODE_TYPE_"

# CUgraphMem_attribute, in the order of the enum, as fields of what a device has for graphs.
_MEMORY_ATTRIBUTES = ("size", "used_high", "size", "reserved_high")


def _nodes(nodes: list[Node]) -> list[Any]:
    return [cuda.CUgraphNode(node.handle) for node in nodes]


def _edge_data(count: int) -> list[Any]:
    return [cuda.CUgraphEdgeData() for _ in range(count)]


class CaptureCalls(Calls):
    """cuStream*Capture*, cuGraph*, cuDevice*GraphMem*."""

    # -- capture ---------------------------------------------------------------------------------------------

    def cuStreamBeginCapture(self, hStream: Any, mode: Any) -> None:
        stream = self._stream(hStream)
        number = int(mode)
        check(0 <= number <= RELAXED)
        check(stream.peers is None, Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        check(stream.capture is None, Result.CUDA_ERROR_ILLEGAL_STATE)
        Capture(self._machine.graphs, stream, number)

    def cuStreamEndCapture(self, hStream: Any) -> Any:
        stream = self._stream(hStream)
        capture = stream.capture
        if capture is None:
            self._captured(stream)
            raise Fault(Result.CUDA_ERROR_ILLEGAL_STATE)
        if capture.origin is not stream:
            capture.invalidate()
            raise Fault(Result.CUDA_ERROR_STREAM_CAPTURE_UNMATCHED)
        return cuda.CUgraph(capture.end().handle)

    def cuStreamIsCapturing(self, hStream: Any) -> Any:
        return self._capture_status(self._stream(hStream))

    @staticmethod
    def _capture_status(stream: Stream) -> Any:
        if stream.capture is None:
            capturing = [peer for peer in stream.peers or () if peer.capture is not None]
            check(not capturing, Result.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
            return _INACTIVE
        return _ACTIVE if stream.capture.valid else _INVALIDATED

    def cuStreamGetCaptureInfo(self, hStream: Any) -> tuple[Any, ...]:
        return self._capture_info(hStream, EDGE_DATA)

    def cuStreamGetCaptureInfo_v3(self, hStream: Any) -> tuple[Any, ...]:
        return self._capture_info(hStream, True)

    def _capture_info(self, hStream: Any, with_edges: bool) -> tuple[Any, ...]:
        stream = self._stream(hStream)
        status = self._capture_status(stream)
        number, graph, behind = 0, 0, []
        if status is _ACTIVE:
            capture: Capture = stream.capture
            number, graph, behind = capture.id, capture.graph.handle, _nodes(capture.behind(stream))
        edges = (_edge_data(len(behind)),) if with_edges else ()
        return (status, cuda.cuuint64_t(number), cuda.CUgraph(graph), behind, *edges, len(behind))

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        number = int(mode)
        check(0 <= number <= RELAXED)
        caller = self._machine.timeline.caller
        previous, caller.capture_mode = caller.capture_mode, number
        return cuda.CUstreamCaptureMode(previous)

    # -- looking at graphs -----------------------------------------------------------------------------------

    def _graph(self, graph: Any) -> Graph:
        return need(self._machine.graphs.graphs.get(arguments.graph(graph)))

    def _node(self, node: Any) -> Node:
        return need(self._machine.graphs.nodes.get(arguments.graph_node(node)))

    def cuGraphGetNodes(self, hGraph: Any, numNodes: Any = 0) -> tuple[list[Any], int]:
        return self._some(self._graph(hGraph).nodes, numNodes)

    @staticmethod
    def _some(nodes: list[Node], count: Any) -> tuple[list[Any], int]:
        """As many as are asked for; their number where none is."""
        wanted = arguments.size_t(count)
        return _nodes(nodes[:wanted]), min(wanted, len(nodes)) if wanted else len(nodes)

    def cuGraphGetRootNodes(self, hGraph: Any, numRootNodes: Any = 0) -> tuple[list[Any], int]:
        return self._some([node for node in self._graph(hGraph).nodes if not node.after], numRootNodes)

    def cuGraphGetEdges(self, hGraph: Any, numEdges: Any = 0) -> Any:
        return self._edges(hGraph, numEdges, EDGE_DATA)

    def cuGraphGetEdges_v2(self, hGraph: Any, numEdges: Any = 0) -> Any:
        return self._edges(hGraph, numEdges, True)

    def _edges(self, hGraph: Any, numEdges: Any, with_data: bool) -> Any:
        edges = [(before, node) for node in self._graph(hGraph).nodes for before in node.after]
        some = edges[: arguments.size_t(numEdges)]
        data = ([cuda.CUgraphEdgeData() for _ in some],) if with_data else ()
        return (_nodes([one for one, _ in some]), _nodes([two for _, two in some]), *data, len(some or edges))

    def cuGraphNodeGetType(self, hNode: Any) -> Any:
        return getattr(cuda.CUgraphNodeType, _NODE_TYPE + self._node(hNode).kind)

    def cuGraphMemAllocNodeGetParams(self, hNode: Any) -> Any:
        node = self._node(hNode)
        check(node.kind == "MEM_ALLOC")
        assert node.pool is not None
        location = cuda.CUmemLocation()
        location.type, location.id = cuda.CUmemLocationType(node.pool.place.type), node.pool.place.id
        props = cuda.CUmemPoolProps()
        props.allocType, props.location = cuda.CUmemAllocationType(node.pool.allocation_type), location
        params = cuda.CUDA_MEM_ALLOC_NODE_PARAMS()
        params.poolProps, params.bytesize, params.dptr = props, node.size, cuda.CUdeviceptr(node.address)
        return params

    def cuGraphMemFreeNodeGetParams(self, hNode: Any) -> Any:
        node = self._node(hNode)
        check(node.kind == "MEM_FREE")
        return cuda.CUdeviceptr(node.address)

    def cuGraphDestroy(self, hGraph: Any) -> None:
        self._machine.graphs.destroy(self._graph(hGraph))

    # -- running them ----------------------------------------------------------------------------------------

    def cuGraphInstantiate(self, hGraph: Any, flags: UnsignedLongLong) -> Any:
        return self._instantiate(hGraph, flags)

    def cuGraphInstantiateWithParams(self, hGraph: Any, instantiateParams: Any) -> Any:
        params = arguments.struct("instantiateParams", instantiateParams, cuda.CUDA_GRAPH_INSTANTIATE_PARAMS)
        return self._instantiate(hGraph, int(need(params).flags))

    def _instantiate(self, hGraph: Any, flags: int) -> Any:
        graph = self._graph(hGraph)
        self._unsafe_during_capture()
        self._machine.current()  # refused where no context is current (observed on H200: test_contexts)
        not_modelled(flags & ~AUTO_FREE_ON_LAUNCH, f"cuGraphInstantiate with flags {flags:#x}")
        # a graph with memory nodes has one instance at a time (observed on H200: test_graph_memory)
        check(not (graph.memories or graph.frees) or not graph.instances, Result.CUDA_ERROR_NOT_SUPPORTED)
        for node in graph.nodes:
            if isinstance(node.operation, Fill):  # its memory has to be there (observed on H200: test_capture)
                at = node.operation.target
                own = any(memory.holds(at) for memory in graph.memories.values())
                check(own or self._machine.allocations.find(at) is not None)
        machine = self._machine
        instance = GraphExec(graph, flags)
        machine.graphs.executables[instance.handle] = instance
        graph.instances += 1
        for memory in graph.memories.values():
            memory.owners += 1
        return cuda.CUgraphExec(instance.handle)

    def _graph_exec(self, graph_exec: Any) -> GraphExec:
        return need(self._machine.graphs.executables.get(arguments.graph_exec(graph_exec)))

    def cuGraphLaunch(self, hGraphExec: Any, hStream: Any) -> None:
        instance, stream = self._graph_exec(hGraphExec), self._stream_to_launch_in(hStream, "cuGraphLaunch")
        instance.launch(self._machine.allocations, stream)

    def cuGraphUpload(self, hGraphExec: Any, hStream: Any) -> None:
        self._graph_exec(hGraphExec).upload(self._stream_to_launch_in(hStream, "cuGraphUpload"))

    def cuGraphExecGetFlags(self, hGraphExec: Any) -> Any:
        return cuda.cuuint64_t(self._graph_exec(hGraphExec).flags)

    def cuGraphExecDestroy(self, hGraphExec: Any) -> None:
        instance = self._graph_exec(hGraphExec)
        self._unsafe_during_capture()
        del self._machine.graphs.executables[instance.handle]
        instance.graph.instances -= 1
        for memory in instance.graph.memories.values():
            memory.disown()

    # -- memory of graphs ------------------------------------------------------------------------------------

    def cuDeviceGetGraphMemAttribute(self, device: Any, attr: Any) -> Any:
        number = arguments.member("attr", attr, cuda.CUgraphMem_attribute)
        return cuda.cuuint64_t(getattr(self._device(device).graphs, _MEMORY_ATTRIBUTES[number]))

    def cuDeviceSetGraphMemAttribute(self, device: Any, attr: Any, value: Any) -> None:
        number = arguments.member("attr", attr, cuda.CUgraphMem_attribute)
        value.getPtr()  # the bindings want an object of their own here, and raise AttributeError for others
        found, name = self._device(device).graphs, _MEMORY_ATTRIBUTES[number]
        check(name != "size" and int(value) == 0)
        setattr(found, name, found.size)

    def cuDeviceGraphMemTrim(self, device: Any) -> None:
        self._device(device).graphs.trim()
