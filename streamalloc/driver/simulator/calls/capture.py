"""Stream capture and graphs."""

from __future__ import annotations

from typing import Any

from streamalloc.driver.bindings import cuda

from .. import arguments, graphs
from ..arguments import Device, Graph, GraphExec, Node, Stream, UnsignedLongLong
from ..constants import PINNED, Location
from ..contexts import Context
from ..errors import Fault, Result, check, not_modelled
from ..graphs import AUTO_FREE_ON_LAUNCH, RELAXED, Capture
from .base import EDGE_DATA
from .copies import FILL_FIELDS, CopyCalls

_ACTIVE = cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
_INACTIVE = cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
_INVALIDATED = cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_INVALIDATED
_UPLOAD, _DEVICE_LAUNCH, _USE_NODE_PRIORITY = 2, 4, 8  # CUgraphInstantiate_flags
_LOCAL_MEMORY = 0x10  # CU_CTX_LMEM_RESIZE_TO_MAX
_SMALL_FILL = 4096
"""Instantiating a graph that fills more bytes sets that flag of the context (observed on H200: test_capture)."""

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

    def cuStreamBeginCapture(self, hStream: Stream, mode: Any) -> None:
        Capture(self._machine.graphs, hStream, self._mode_of_capture(hStream, mode))

    def _mode_of_capture(self, stream: Stream, mode: Any) -> int:
        """The mode of a capture that is to begin in a stream."""
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
            capture: Capture = hStream.capture
            number, graph, behind = capture.id, capture.graph.handle, _nodes(capture.behind(hStream))
        edges = (_edge_data(len(behind)),) if EDGE_DATA else ()
        return (status, cuda.cuuint64_t(number), cuda.CUgraph(graph), behind, *edges, len(behind))

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        number = int(mode)
        check(0 <= number <= RELAXED)
        caller = self._machine.timeline.caller
        previous, caller.capture_mode = caller.capture_mode, number
        return cuda.CUstreamCaptureMode(previous)

    # -- looking at graphs -----------------------------------------------------------------------------------

    def cuGraphGetNodes(self, hGraph: Graph, numNodes: Any = 0) -> tuple[list[Any], int]:
        return self._some(hGraph.nodes, numNodes)

    @staticmethod
    def _some(nodes: list[Node], count: Any) -> tuple[list[Any], int]:
        """As many as are asked for; their number where none is."""
        wanted = arguments.size_t(count)
        return padded(nodes[:wanted], wanted), min(wanted, len(nodes)) if wanted else len(nodes)

    def cuGraphGetEdges(self, hGraph: Graph, numEdges: Any = 0) -> Any:
        edges = [(before, node) for node in hGraph.nodes for before in node.after]
        wanted = arguments.size_t(numEdges)
        some = edges[:wanted]
        data = (_edge_data(wanted),) if EDGE_DATA else ()
        ends = (padded([one for one, _ in some], wanted), padded([two for _, two in some], wanted))
        return (*ends, *data, len(some or edges))

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

    def cuGraphDestroy(self, hGraph: Graph) -> None:
        self._machine.graphs.destroy(hGraph)

    # -- running them ----------------------------------------------------------------------------------------

    def cuGraphInstantiate(self, hGraph: Graph, flags: UnsignedLongLong) -> Any:
        return cuda.CUgraphExec(self._instantiate(hGraph, flags).handle)

    def cuGraphInstantiateWithParams(self, hGraph: Graph, instantiateParams: cuda.CUDA_GRAPH_INSTANTIATE_PARAMS) -> Any:
        flags = int(instantiateParams.flags)
        made = self._instantiate(hGraph, flags, _UPLOAD)
        if flags & _UPLOAD:
            self._upload(made, self._find(Stream, instantiateParams.hUploadStream))
        instantiateParams.result_out = cuda.CUgraphInstantiateResult.CUDA_GRAPH_INSTANTIATE_SUCCESS
        return cuda.CUgraphExec(made.handle)

    def _check_fill_node(self, graph: Graph, values: dict[str, int], context: Context) -> None:
        address, pitch, _, element, width, height = (values[name] for name in FILL_FIELDS)
        check(width and height and element in (1, 2, 4) and address % element == 0)
        check(height == 1 or (pitch >= width * element and pitch % element == 0))
        span = (height - 1) * pitch + width * element
        if graph.holds(address):
            check(graph.covers(address, span))
        else:
            self._check_fill(address, span, context)

    def _instantiate(self, graph: Graph, flags: int, uploads: int = 0) -> GraphExec:
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
        instance = graphs.GraphExec(graph, flags)
        self._machine.graphs.executables[instance.handle] = instance
        instance.hold()
        return instance

    def cuGraphLaunch(self, hGraphExec: GraphExec, hStream: Stream) -> None:
        self._check_launch(hStream, "cuGraphLaunch")
        hGraphExec.launch(self._machine.allocations, hStream)

    def cuGraphUpload(self, hGraphExec: GraphExec, hStream: Stream) -> None:
        self._upload(hGraphExec, hStream)

    def _upload(self, instance: GraphExec, stream: Stream) -> None:
        self._check_launch(stream, "cuGraphUpload")
        instance.upload(stream)

    def cuGraphExecGetFlags(self, hGraphExec: GraphExec) -> Any:
        return cuda.cuuint64_t(hGraphExec.flags & ~_USE_NODE_PRIORITY)

    def cuGraphExecDestroy(self, hGraphExec: GraphExec) -> None:
        self._unsafe_during_capture()
        del self._machine.graphs.executables[hGraphExec.handle]
        hGraphExec.release()

    # -- memory of graphs ------------------------------------------------------------------------------------

    def cuDeviceGetGraphMemAttribute(self, device: Device, attr: Any) -> Any:
        number = arguments.member("attr", attr, cuda.CUgraphMem_attribute)
        return cuda.cuuint64_t(getattr(device.graphs, _MEMORY_ATTRIBUTES[number]))

    def cuDeviceSetGraphMemAttribute(self, device: Device, attr: Any, value: Any) -> None:
        name = _MEMORY_ATTRIBUTES[arguments.member("attr", attr, cuda.CUgraphMem_attribute)]
        value.getPtr()  # the bindings want an object of their own here, and raise AttributeError for others
        check(name in ("used_high", "reserved_high") and int(value) == 0)
        setattr(device.graphs, name, device.graphs.used if name == "used_high" else device.graphs.size)

    def cuDeviceGraphMemTrim(self, device: Device) -> None:
        device.graphs.trim()
