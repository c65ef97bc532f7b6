"""Stream capture and graphs."""

from __future__ import annotations

from typing import Any

from streamalloc.driver.bindings import cuda

from .. import arguments
from ..arguments import UnsignedLongLong
from ..constants import PINNED, Location
from ..contexts import Context
from ..errors import Fault, Result, check, need, not_modelled
from ..graphs import AUTO_FREE_ON_LAUNCH, RELAXED, Capture, Graph, GraphExec, Node
from ..timeline import Stream
from .base import EDGE_DATA
from .copies import FILL_FIELDS, CopyCalls

_ACTIVE = cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
_INACTIVE = cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
_INVALIDATED = cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_INVALIDATED
_UPLOAD, _DEVICE_LAUNCH, _USE_NODE_PRIORITY = 2, 4, 8  # CUgraphInstantiate_flags
_LOCAL_MEMORY = 0x10  # CU_CTX_LMEM_RESIZE_TO_MAX
_SMALL_FILL = 4096
"""Instantiating a graph that fills more bytes sets that flag of the context (observed on H200: test_capture)."""
_NODE_TYPE = "CU_GRAPH_NODE_TYPE_"

# Fields of DeviceGraphMemory, in the order of CUgraphMem_attribute.
_MEMORY_ATTRIBUTES = ("used", "used_high", "size", "reserved_high")


def _nodes(nodes: list[Node]) -> list[Any]:
    return [cuda.CUgraphNode(node.handle) for node in nodes]


def padded(nodes: list[Node], count: int) -> list[Any]:
    """``count`` handles as the bindings return them: null handles follow the existing ones."""
    return _nodes(nodes) + [cuda.CUgraphNode(0) for _ in range(count - len(nodes))]


def _edge_data(count: int) -> list[Any]:
    return [cuda.CUgraphEdgeData() for _ in range(count)]


class CaptureCalls(CopyCalls):
    """cuStream*Capture*, cuGraph*, cuDevice*GraphMem*."""

    # -- capture ---------------------------------------------------------------------------------------------

    def cuStreamBeginCapture(self, hStream: Any, mode: Any) -> None:
        stream, number = self._stream_to_capture(hStream, mode)
        Capture(self._machine.graphs, stream, number)

    def _stream_to_capture(self, hStream: Any, mode: Any) -> tuple[Stream, int]:
        stream, number = self._stream(hStream), int(mode)
        check(0 <= number <= RELAXED)
        self._not_behind_captures(stream)
        check(stream.peers is None, Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        check(stream.capture is None, Result.CUDA_ERROR_ILLEGAL_STATE)
        return stream, number

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
        stream = self._stream(hStream)
        status = self._capture_status(stream)
        number, graph, behind = 0, 0, []
        if status is _ACTIVE:
            capture: Capture = stream.capture
            number, graph, behind = capture.id, capture.graph.handle, _nodes(capture.behind(stream))
        edges = (_edge_data(len(behind)),) if EDGE_DATA else ()
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
        return padded(nodes[:wanted], wanted), min(wanted, len(nodes)) if wanted else len(nodes)

    def cuGraphGetEdges(self, hGraph: Any, numEdges: Any = 0) -> Any:
        edges = [(before, node) for node in self._graph(hGraph).nodes for before in node.after]
        wanted = arguments.size_t(numEdges)
        some = edges[:wanted]
        data = (_edge_data(wanted),) if EDGE_DATA else ()
        ends = (padded([one for one, _ in some], wanted), padded([two for _, two in some], wanted))
        return (*ends, *data, len(some or edges))

    def cuGraphNodeGetType(self, hNode: Any) -> Any:
        return getattr(cuda.CUgraphNodeType, _NODE_TYPE + self._node(hNode).kind)

    def cuGraphMemAllocNodeGetParams(self, hNode: Any) -> Any:
        node = self._node(hNode)
        check(node.kind == "MEM_ALLOC")
        location, values = cuda.CUmemLocation(), node.values or {}
        location.type, location.id = cuda.CUmemLocationType(Location.DEVICE), node.device
        props = cuda.CUmemPoolProps()
        props.allocType, props.location = cuda.CUmemAllocationType(PINNED), location
        props.maxSize, props.usage = values.get("maxSize", 0), values.get("usage", 0)
        params = cuda.CUDA_MEM_ALLOC_NODE_PARAMS()
        params.accessDescCount = values.get("accessDescCount", 0)
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
        flags = int(params.flags)
        made = self._instantiate(hGraph, flags, _UPLOAD)
        if flags & _UPLOAD:
            self._graph_exec(made).upload(self._stream_to_launch_in(params.hUploadStream, "cuGraphUpload"))
        params.result_out = cuda.CUgraphInstantiateResult.CUDA_GRAPH_INSTANTIATE_SUCCESS
        return made

    def _check_fill_node(self, graph: Graph, values: dict[str, int], context: Context) -> None:
        address, pitch, _, element, width, height = (values[name] for name in FILL_FIELDS)
        check(width and height and element in (1, 2, 4) and address % element == 0)
        check(height == 1 or (pitch >= width * element and pitch % element == 0))
        span = (height - 1) * pitch + width * element
        if graph.holds(address):
            check(graph.covers(address, span))
        else:
            self._check_fill(address, span, context)

    def _instantiate(self, hGraph: Any, flags: int, uploads: int = 0) -> Any:
        graph = self._graph(hGraph)
        self._unsafe_during_capture()
        context = self._machine.current()  # refused where none is current (observed on H200: test_contexts)
        not_modelled(flags & _DEVICE_LAUNCH and flags != _DEVICE_LAUNCH, f"cuGraphInstantiate with flags {flags:#x}")
        check(not flags & ~(AUTO_FREE_ON_LAUNCH | _USE_NODE_PRIORITY | uploads))
        # a graph with memory nodes has one instance at a time (observed on H200: test_graph_memory)
        check(not (graph.memories or graph.frees) or not graph.instances, Result.CUDA_ERROR_NOT_SUPPORTED)
        for node in graph.flat():
            if node.kind == "MEMSET":  # its memory has to be there (observed on H200: test_capture)
                values = node.values or {}
                self._check_fill_node(graph, values, context)
                if values["elementSize"] * values["width"] * values["height"] > _SMALL_FILL:
                    context.implied_flags = _LOCAL_MEMORY
        if context.graph_block is None:
            context.graph_block = context.device.heap.keep()
        machine = self._machine
        instance = GraphExec(graph, flags)
        machine.graphs.executables[instance.handle] = instance
        instance.hold()
        return cuda.CUgraphExec(instance.handle)

    def _graph_exec(self, graph_exec: Any) -> GraphExec:
        return need(self._machine.graphs.executables.get(arguments.graph_exec(graph_exec)))

    def cuGraphLaunch(self, hGraphExec: Any, hStream: Any) -> None:
        instance, stream = self._graph_exec(hGraphExec), self._stream_to_launch_in(hStream, "cuGraphLaunch")
        instance.launch(self._machine.allocations, stream)

    def cuGraphUpload(self, hGraphExec: Any, hStream: Any) -> None:
        self._graph_exec(hGraphExec).upload(self._stream_to_launch_in(hStream, "cuGraphUpload"))

    def cuGraphExecGetFlags(self, hGraphExec: Any) -> Any:
        return cuda.cuuint64_t(self._graph_exec(hGraphExec).flags & ~_USE_NODE_PRIORITY)

    def cuGraphExecDestroy(self, hGraphExec: Any) -> None:
        instance = self._graph_exec(hGraphExec)
        self._unsafe_during_capture()
        del self._machine.graphs.executables[instance.handle]
        instance.release()

    # -- memory of graphs ------------------------------------------------------------------------------------

    def cuDeviceGetGraphMemAttribute(self, device: Any, attr: Any) -> Any:
        number = arguments.member("attr", attr, cuda.CUgraphMem_attribute)
        return cuda.cuuint64_t(getattr(self._device(device).graphs, _MEMORY_ATTRIBUTES[number]))

    def cuDeviceSetGraphMemAttribute(self, device: Any, attr: Any, value: Any) -> None:
        number = arguments.member("attr", attr, cuda.CUgraphMem_attribute)
        value.getPtr()  # the bindings want an object of their own here, and raise AttributeError for others
        found, name = self._device(device).graphs, _MEMORY_ATTRIBUTES[number]
        check(name in ("used_high", "reserved_high") and int(value) == 0)
        setattr(found, name, found.used if name == "used_high" else found.size)

    def cuDeviceGraphMemTrim(self, device: Any) -> None:
        self._device(device).graphs.trim()
