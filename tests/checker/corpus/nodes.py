"""Graphs that are built node by node."""

from typing import Any

from streamalloc.driver.bindings import cuda
from tests.checker.corpus.bench import RAW_ACTS, SIZE, THINGS, Bench, hazard, programs


class Graph:
    """A graph by raw calls. What it was given stays as it is until the end."""

    def __init__(self, b: Bench) -> None:
        self.b = b
        self.handle = b.raw("cuGraphCreate", 0)
        self.allocated = 0
        with b.device.current():
            self.context = b.driver.cuCtxGetCurrent()[1]
        b._stack.callback(lambda: b.raw("cuGraphDestroy", self.handle))

    def add(self, kind: str, after: list[Any], *params: Any) -> Any:
        return self.b.raw(f"cuGraphAdd{kind}Node", self.handle, after, len(after), *params)

    def change(self, runs: Any, node: Any, address: int) -> None:
        """Let a node of a graph that was instantiated fill other memory."""
        self.b.raw("cuGraphExecMemsetNodeSetParams", runs, node, fill_params(address), self.context)

    def fill(self, address: int, *after: Any, nbytes: int = SIZE) -> Any:
        return self.add("Memset", list(after), fill_params(address, nbytes), self.context)

    def allocate(self) -> Any:
        """A node that allocates, whose memory is the latest of the graph."""
        params = cuda.CUDA_MEM_ALLOC_NODE_PARAMS()
        params.poolProps.allocType = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        params.poolProps.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        params.poolProps.location.id = 0
        params.bytesize = SIZE
        node = self.add("MemAlloc", [], params)
        self.allocated = int(params.dptr)
        return node

    def free(self, address: int, *after: Any) -> Any:
        return self.add("MemFree", list(after), cuda.CUdeviceptr(address))

    def launchable(self) -> Any:
        made = self.b.raw("cuGraphInstantiate", self.handle, 0)
        self.b._stack.callback(lambda: self.b.raw("cuGraphExecDestroy", made))
        return made

    def launch(self, *streams: Any) -> None:
        made = self.launchable()
        for stream in streams:
            self.b.raw("cuGraphLaunch", made, cuda.CUstream(stream.handle))


def fill_params(address: int, nbytes: int = SIZE) -> Any:
    params = cuda.CUDA_MEMSET_NODE_PARAMS()
    params.dst, params.pitch, params.value = cuda.CUdeviceptr(address), nbytes, 1
    params.elementSize, params.width, params.height = 1, nbytes, 1
    return params


THINGS["graph"] = Graph
RAW_ACTS["node"] = lambda b, graph, address, *after: graph.fill(address, *after)
RAW_ACTS["change"] = lambda b, graph, *args: graph.change(*args)
RAW_ACTS["change_node"] = lambda b, node, address: b.raw("cuGraphMemsetNodeSetParams", node, fill_params(address))
RAW_ACTS["recording"] = lambda b, graph, event, *after: graph.add("EventRecord", list(after), event)
THINGS["empty"] = lambda b, graph: graph.add("Empty", [])
THINGS["allocated"] = lambda b, graph: graph.allocated
RAW_ACTS["child"] = lambda b, graph, inner: graph.add("ChildGraph", [], inner.handle)
programs(
    """
race
    two_nodes_without_an_edge: x = ready; g = graph; n = node g x; + node g x n; - node g x; launch g a
    a_graph_within_a_graph: x = ready; i = graph; g = graph; node i x; child g i; launch g a; + a > b; read x b
    two_nodes_of_a_graph_within_a_graph: x = ready; i = graph; g = graph; n = node i x; + node i x n; - node i x;
        child g i; launch g a
    the_node_between_two_was_destroyed: x = ready; y = ready; g = graph; m = node g y; node g x m;
        cuGraphDestroyNode m; launch g a; + a > b; fill x 2 b
    a_node_of_a_graph_is_switched_off_and_on: x = ready; g = graph; n = node g x; r = launchable g;
        cuGraphNodeSetEnabled r n 0; write x b; - cuGraphNodeSetEnabled r n 1; cuGraphLaunch r a
    a_node_comes_after_one_that_is_switched_off: x = ready; y = ready; g = graph; m = node g y; node g x m;
        r = launchable g; cuGraphNodeSetEnabled r m 0; cuGraphLaunch r a; + a > b; write x b
    a_node_was_given_other_memory: x = ready; y = ready; z = ready; g = graph; n = node g x; node g z; r = launchable g;
        change g r n y; write x b; cuGraphLaunch r a; change_node n x|z; b > a; launch g a
    an_event_that_a_node_records: x = ready; e = event; g = graph; + n = node g x; + recording g e n; - recording g e;
        - node g x; launch g a; wait b e; - record a e; write x b
use before allocation
    a_node_uses_memory_that_another_allocates: g = graph; m = allocate g; x = allocated g; n = empty g;
        u = node g x m|n; free g x u m; launch g a; synchronize a
free racing a use
    a_node_frees_what_another_uses: g = graph; m = allocate g; x = allocated g; u = node g x m; free g x u|m;
        launch g a; synchronize a
"""
)


@hazard("race")
def an_edge_that_is_added_leads_elsewhere(b: Bench, right: bool) -> None:
    x = b.ready()
    graph = Graph(b)
    first, other = graph.fill(x.address), graph.add("Empty", [])
    second = graph.fill(x.address)
    with b.device.current():
        rest = ([cuda.CUgraphEdgeData()], 1) if hasattr(cuda, "CUgraphEdgeData") and _takes_data() else (1,)
        b.driver.cuGraphAddDependencies(graph.handle, [first if right else other], [second], *rest)
    graph.launch(b.a)


@hazard("race", simulated="its arguments differ between bindings")
def captured_beside_a_node_of_the_graph(b: Bench, right: bool) -> None:
    x = b.ready()
    graph = Graph(b)
    node, stream = graph.fill(x.address), cuda.CUstream(b.a.handle)
    after, relaxed = [node] if right else [], cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    b.raw("cuStreamBeginCaptureToGraph", stream, graph.handle, after, None, len(after), relaxed)
    x.fill(2, b.a)
    b.raw("cuStreamEndCapture", stream)
    graph.launch(b.a)


def _takes_data() -> bool:
    """Whether edges have data in these bindings, from 13 on."""
    return "edgeData" in (cuda.cuGraphAddDependencies.__doc__ or "").split("\n")[0]
