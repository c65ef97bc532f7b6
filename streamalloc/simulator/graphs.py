"""Graphs, their instances and launches, and the captures of streams that make graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from streamalloc.simulator.allocations import AllocationTable, GraphAllocation
from streamalloc.simulator.call_lock import Caller
from streamalloc.simulator.constants import Handles, new_handle
from streamalloc.simulator.contexts import Event, SimulatedDevice
from streamalloc.simulator.errors import Fault, Result, check, not_modelled
from streamalloc.simulator.graph_memory import GraphHeap
from streamalloc.simulator.pool import Pool
from streamalloc.simulator.scheduler import Operation, QueuedCall, Stream, merge

GLOBAL, THREAD_LOCAL, RELAXED = range(3)  # CUstreamCaptureMode
AUTO_FREE_ON_LAUNCH = 1


Values = dict[str, Any]
"""Parameters of a node: fields of its struct."""
Work = dict[str, Any]
"""Fields of a :class:`GraphNode` that describe its work: ``operation`` or ``enter``, and ``values``, by name."""


@dataclass(eq=False)
class GraphNode:
    """Node of a graph. A launch submits a copy of ``operation``, or calls ``enter`` with the launch's stream.

    An allocation or free node has an address instead.
    """

    kind: str
    graph: NodeGraph
    after: list[GraphNode]
    operation: Operation | None = None
    enter: Callable[[Stream], object] | None = None
    values: Values | None = None
    """Parameters of the node, as queries return them; None if they are not stored."""
    attributes: dict[int, bytes] = field(default_factory=dict)
    """Attributes that were set on a kernel node: their bytes, by attribute number."""
    enabled: bool = True
    """Whether a launch runs the node."""
    child: NodeGraph | None = None
    origin: GraphNode | None = None
    """Node of which this node is a copy, if this node is in a clone or an instance of a graph; otherwise None."""
    address: int = 0
    size: int = 0
    device: int = 0
    """Ordinal of the device on which an allocation node allocates. Other nodes do not use this field."""
    is_other: bool = False
    """Whether a free node frees memory of another graph."""
    handle: int = field(default_factory=new_handle)


@dataclass(eq=False)
class NodeGraph:
    """Graph with its nodes, in the order in which they were captured or added."""

    graphs: Graphs
    handle: int = field(default_factory=new_handle)
    nodes: list[GraphNode] = field(default_factory=list)
    # Addresses of the allocation nodes, by device ordinal.
    memories: dict[int, GraphHeap] = field(default_factory=dict)
    instances: int = 0
    frees: bool = False
    """Whether a free node was added to the graph, or its addition was refused."""
    open: dict[int, GraphNode] = field(default_factory=dict)
    """Allocation nodes whose memory the graph does not free, by address. Their allocations outlive a launch."""

    def add(self, kind: str, after: list[GraphNode], **fields: Any) -> GraphNode:
        """Add a node of this kind after the nodes ``after``. ``fields``: further fields of :class:`GraphNode`. Returns
        the node.
        """
        return self.take(GraphNode(kind, self, after, **fields))

    def take(self, node: GraphNode) -> GraphNode:
        self.nodes.append(node)
        return self.graphs.nodes.add(node)

    def remove(self, node: GraphNode) -> None:
        self.nodes.remove(node)
        del self.graphs.nodes[node.handle]
        if node.child is not None:
            self.graphs.destroy(node.child)
        for other in self.nodes:
            other.after = [one for one in other.after if one is not node]

    def clone(self) -> NodeGraph:
        """Return a copy of the graph with its nodes and child graphs. Graphs with allocations must have been refused
        before.
        """
        made = self.graphs.create()
        copies: dict[GraphNode, GraphNode] = {}
        for node in self.ordered():
            after = [copies[one] for one in node.after]
            child = None if node.child is None else node.child.clone()
            copies[node] = replace(node, graph=made, after=after, origin=node, child=child, handle=new_handle())
        for node in self.nodes:
            made.take(copies[node])
        return made

    def ordered(self) -> list[GraphNode]:
        """Return the nodes in dependency order: passes over the nodes, in the order of their addition, take each node
        whose predecessors were taken before.

        Gives CUDA_ERROR_INVALID_VALUE if the edges form a cycle.
        """
        order: dict[GraphNode, None] = {}
        todo = self.nodes
        while todo:
            for node in todo:
                if all(one in order for one in node.after):
                    order[node] = None
            left = [node for node in todo if node not in order]
            # The driver refuses a cycle only at this point (observed on H200: test_graph_nodes).
            check(len(left) < len(todo))
            todo = left
        return list(order)

    def flat(self) -> list[GraphNode]:
        """Return the nodes in dependency order, with each child graph replaced by its nodes."""
        found = []
        for node in self.ordered():
            found += [node] if node.child is None else node.child.flat()
        return found

    def contains(self, address: int) -> bool:
        """Whether an address is in the range that the graph has for its allocations."""
        return any(memory.contains(address) for memory in self.memories.values())

    def covers(self, address: int, size: int, freed: bool = False) -> bool:
        """Whether one allocation of this graph contains a range. ``freed``: also consider allocations with a free
        node.
        """
        own = [node for node in self.nodes if node.kind == "MEM_ALLOC"] if freed else self.open.values()
        return any(one.address <= address and address + size <= one.address + one.size for one in own)

    def allocate(self, size: int, device: int, after: list[GraphNode], values: Values | None = None) -> GraphNode:
        memory = self.memories.get(device)
        if memory is None:
            memory = self.memories[device] = GraphHeap(self.graphs.devices[device].graphs)
        address = memory.place(size, ancestors(after) if memory.holes else ())
        node = self.open[address] = self.add(
            "MEM_ALLOC", after, values=values, address=address, size=size, device=device
        )
        return node

    def free(self, address: int, after: list[GraphNode]) -> GraphNode:
        """Add a free node for the allocation at ``address``, which this or another graph makes and does not free.

        Gives CUDA_ERROR_INVALID_VALUE for any other address. An address that this graph already frees is refused, too,
        unless an instance from before that free leaves the allocation.
        """
        self.frees = True
        allocation = self.open.pop(address, None)
        if allocation is None:
            check(self.graphs.is_left(address))
            check(not any(node.is_other and node.address == address for node in self.nodes))
        node = self.add("MEM_FREE", after, address=address, is_other=allocation is None)
        if allocation is not None:
            memory = self.memories[allocation.device]
            memory.leave(address, allocation.size, node, ancestors(after) if memory.holes else ())
        return node


class EmptyLaunch(Operation):
    """A launch of a graph without work. Such a launch gives its stream no rank (observed on H200: test_placements)."""

    is_command = False


@dataclass(eq=False)
class GraphExec:
    """Instance of a graph. It has copies of the nodes, which only updates of the instance change."""

    graph: NodeGraph
    flags: int
    handle: int = field(default_factory=new_handle)
    last: tuple[Stream, int] | None = None  # Stream and number of the operation that ends the latest launch.
    nodes: list[GraphNode] = field(init=False)
    """Copies of the nodes in launch order. Later changes of the graph do not affect them."""
    unfreed: list[GraphNode] = field(init=False)
    """Allocation nodes whose memory the graph does not free. Their memory outlives a launch."""

    def __post_init__(self) -> None:
        self.nodes = [replace(node, origin=node) for node in self.graph.flat()]
        self.unfreed = [*self.graph.open.values()]

    def adopt(self, graph: NodeGraph) -> None:
        """Become an instance of another graph with allocations, in an update (``cuGraphExecUpdate``).

        From now on this object counts as an instance of that graph (observed on H200: test_graph_nodes).
        """
        self.release()
        self.graph, self.unfreed = graph, [*graph.open.values()]
        self.keep()

    def keep(self) -> None:
        """Count this object as an instance of its graph. The addresses of the graph stay while it has an instance."""
        self.graph.instances += 1
        for memory in self.graph.memories.values():
            memory.owners += 1

    def release(self) -> None:
        self.graph.instances -= 1
        for memory in self.graph.memories.values():
            memory.disown()

    def launch(self, allocations: AllocationTable, stream: Stream) -> None:
        """Submit all nodes one after another (``cuGraphLaunch``), in one of the orders that the edges allow.

        Gives CUDA_ERROR_INVALID_VALUE if allocations of an earlier launch are live and the instance was made without
        the flag AUTO_FREE_ON_LAUNCH, or if the graph frees memory of another graph that is not allocated. Gives
        CUDA_ERROR_OUT_OF_MEMORY if the device has too little memory.
        """
        live = [(memory, address) for memory in self.graph.memories.values() for address in memory.live]
        check(not live or self.flags & AUTO_FREE_ON_LAUNCH)
        others = [allocations.at.get(node.address) for node in self.nodes if node.is_other]
        check(all(isinstance(other, GraphAllocation) for other in others))
        for memory, address in live:
            allocations.remove(allocations.at[address])
            memory.freed(address)
        carried_out = [node for node in self.nodes if node.enabled and node.kind != "EMPTY"]
        # A launch without work does not wait for earlier launches (observed on H200: test_graph_nodes).
        if not carried_out:
            stream.submit(EmptyLaunch(), clock={})
            return
        self.upload(stream)
        for node in carried_out:
            if node.operation is not None:
                stream.submit(copy.copy(node.operation), clock={})
            elif node.enter is not None:
                node.enter(stream)
            elif node.is_other:
                allocation = allocations.at[node.address]
                assert isinstance(allocation, GraphAllocation)
                allocations.remove(allocation)
                allocation.memory.freed(node.address, stream)
        self._in_use(stream, stream.submit(Operation(), clock={}))
        for node in self.unfreed:
            memory = self.graph.memories[node.device]
            allocations.add(GraphAllocation(node.address, node.size, node.device, stream.context, memory))
            memory.live[node.address] = node.size

    def upload(self, stream: Stream) -> None:
        """Queue the mapping of the graph's memory on ``stream``, as ``cuGraphUpload`` and the first part of a launch
        do. Gives CUDA_ERROR_OUT_OF_MEMORY if the device has too little memory.

        The mapping runs after all earlier launches of the graph, because these may use other chunks at the same
        addresses.
        """
        moved = self.last is not None and self.last[0] is not stream
        if self.graph.memories:
            stream.scheduler.rank(stream)
        earlier = [use for memory in self.graph.memories.values() for use in memory.uses.unfinished()]
        if self.last is not None:
            earlier.append(self.last)
        clock = dict(stream.clock)
        stream.catch_up(clock)
        clock[stream.id] = stream.seq
        for other, seq in earlier:
            merge(clock, {other.id: seq})
        outlives = {node.device for node in self.unfreed}
        memories = self.graph.memories.items()
        chosen = [(memory, memory.prepare(clock, device in outlives, moved)) for device, memory in memories]

        def map_memory() -> None:
            for memory, places in chosen:
                memory.map(places)

        # This wait for earlier launches gives no order that pools use (observed on H200: test_placements).
        self._in_use(stream, stream.submit(QueuedCall(map_memory), tuple(earlier), {}))

    def _in_use(self, stream: Stream, seq: int) -> None:
        self.last = (stream, seq)
        for memory in self.graph.memories.values():
            memory.in_use(stream, seq)


class GraphCapture:
    """Running capture: its streams and, for each stream, the nodes on which the next captured node of the stream will
    depend.
    """

    def __init__(
        self, graphs: Graphs, origin: Stream, mode: int, graph: NodeGraph | None = None, after: Iterable[GraphNode] = ()
    ) -> None:
        self.graph: NodeGraph = graphs.create() if graph is None else graph
        self.origin = origin
        self.mode = mode
        graphs.capture_count += 1
        self.id: int = graphs.capture_count
        self.valid: bool = True
        self._graphs = graphs
        self._caller = origin.scheduler.caller
        self._frontier: dict[Stream, list[GraphNode]] = {origin: list(after)}
        origin.capture = self
        graphs.captures.append(self)

    def forbids(self, caller: Caller) -> bool:
        """Whether this capture forbids unsafe calls of a thread.

        A capture in relaxed mode forbids nothing. A thread in relaxed mode is never forbidden anything. Otherwise the
        capture forbids unsafe calls to its own thread. If capture and thread are both in global mode, the capture
        forbids unsafe calls to other threads, too.
        """
        if caller.capture_mode == RELAXED:
            return False
        if self._caller is caller and self.mode != RELAXED:
            return True
        return caller.capture_mode == GLOBAL and self.mode == GLOBAL

    def fail(self, code: Any) -> NoReturn:
        """Make the capture invalid, and end the call with the result ``code``."""
        self.valid = False
        raise Fault(code)

    @property
    def running(self) -> bool:
        return self in self._graphs.captures

    def behind(self, stream: Stream) -> list[GraphNode]:
        """Return the nodes on which the next node of ``stream`` will depend."""
        return self._frontier.get(stream, [])

    def put_behind(self, stream: Stream, nodes: list[GraphNode], instead: bool) -> None:
        """Make the next node of ``stream`` depend on ``nodes`` too; with ``instead``, only on ``nodes``."""
        before = [] if instead else self._frontier[stream]
        self._frontier[stream] = before + [node for node in nodes if node not in before]

    # -- nodes -----------------------------------------------------------------------------------------------

    def add(self, kind: str, operation: Operation | None, stream: Stream, values: Values | None = None) -> GraphNode:
        node = self.graph.add(kind, self._frontier[stream], operation=operation, values=values)
        self._frontier[stream] = [node]
        return node

    def allocate(self, size: int, pool: Pool, stream: Stream) -> int:
        assert pool.device is not None
        # NVIDIA's guide says that the node gets the access that devices have to the pool now. No observation confirms
        # this, so such access is not modelled.
        peers = [device for device, flags in pool.access.items() if flags and device != pool.device]
        not_modelled(bool(peers), "an allocation in a capture from a pool that further devices have access to")
        stream.scheduler.rank(stream)
        node = self.graph.allocate(size, pool.device, self._frontier[stream])
        self._frontier[stream] = [node]
        return node.address

    def free(self, address: int, stream: Stream) -> None:
        """Add a free node to the capture (:meth:`NodeGraph.free`). An invalid address gives CUDA_ERROR_INVALID_VALUE
        and leaves the capture valid.
        """
        self._frontier[stream] = [self.graph.free(address, self._frontier[stream])]

    # -- forks and joins -------------------------------------------------------------------------------------

    def record(self, event: Event, stream: Stream) -> None:
        event.capture = self
        event.nodes = list(self._frontier[stream])

    def join(self, stream: Stream, event: Event) -> None:
        """Add ``stream`` to the capture, because the stream waits for ``event``, which was recorded in this capture.

        The legacy stream gives CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, a stream of another capture
        CUDA_ERROR_STREAM_CAPTURE_MERGE; the captures concerned become invalid. If this capture is invalid already, its
        own streams give CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, other streams CUDA_ERROR_INVALID_VALUE.
        """
        check(self.valid or stream.capture is self)
        check(self.valid, Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        if stream.capture is not None and stream.capture is not self:
            stream.capture.valid = False
            self.fail(Result.CUDA_ERROR_STREAM_CAPTURE_MERGE)
        if stream.peers is not None:
            self.fail(Result.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        stream.capture = self
        self._frontier.setdefault(stream, [])
        self.put_behind(stream, event.nodes, False)

    def leave(self, stream: Stream) -> None:
        """Remove ``stream``, which is being destroyed, from the capture.

        If the capture began in this stream, the capture ends, and its graph is destroyed.
        """
        if stream is self.origin:
            self._finish()
            self._graphs.destroy(self.graph)
        else:
            self._frontier.pop(stream, None)
            stream.capture = None

    def end(self) -> NodeGraph:
        """End the capture and return the graph.

        Gives CUDA_ERROR_STREAM_CAPTURE_INVALIDATED for an invalid capture, and CUDA_ERROR_STREAM_CAPTURE_UNJOINED if
        another stream has work that the first stream does not wait for; the capture then ends without a graph. Except
        in relaxed mode, only the thread that began the capture may end it; other threads get
        CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, and the capture continues.
        """
        if self.mode != RELAXED:
            check(self._caller is self.origin.scheduler.caller, Result.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)
        joined = ancestors(self._frontier[self.origin])
        unjoined = any(node not in joined for nodes in self._frontier.values() for node in nodes)
        self._finish()
        if not self.valid or unjoined:
            self._graphs.destroy(self.graph)
            check(not self.valid, Result.CUDA_ERROR_STREAM_CAPTURE_UNJOINED)
            raise Fault(Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        return self.graph

    def _finish(self) -> None:
        self._graphs.captures.remove(self)
        for stream in self._frontier:
            stream.capture = None


def ancestors(nodes: Iterable[GraphNode]) -> set[GraphNode]:
    """Return a set of ``nodes`` and all nodes that they depend on, directly or not."""
    found: set[GraphNode] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(node.after)
    return found


@dataclass(eq=False)
class Graphs:
    """Graphs, instances and running captures of a machine."""

    devices: list[SimulatedDevice]
    graphs: Handles[NodeGraph] = field(default_factory=Handles)
    executables: Handles[GraphExec] = field(default_factory=Handles)
    nodes: Handles[GraphNode] = field(default_factory=Handles)
    captures: list[GraphCapture] = field(default_factory=list)
    capture_count: int = 0

    def is_left(self, address: int) -> bool:
        """Whether a graph allocates this address and does not free it. Instances count too, even of a destroyed
        graph.
        """
        left = (node.address for one in self.executables.values() for node in one.unfreed)
        return address in left or any(address in graph.open for graph in self.graphs.values())

    def create(self) -> NodeGraph:
        return self.graphs.add(NodeGraph(self))

    def destroy(self, graph: NodeGraph) -> None:
        """Remove a graph and its child graphs. Instances of the graph stay."""
        self.graphs.pop(graph.handle, None)
        for node in graph.nodes:
            self.nodes.pop(node.handle, None)
            if node.child is not None:
                self.destroy(node.child)
        for memory in graph.memories.values():
            memory.disown()
