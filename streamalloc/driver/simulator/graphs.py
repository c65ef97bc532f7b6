"""Stream capture, the graphs it makes, and the memory that graphs own."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from .allocator import ALIGNMENT, CHUNK
from .blocks import round_up
from .errors import Fault, Result, check
from .machine import Device, Event, Machine
from .memory import Arena
from .pool import Pool
from .timeline import Operation, Stream

GLOBAL, THREAD_LOCAL, RELAXED = range(3)  # CUstreamCaptureMode
AUTO_FREE_ON_LAUNCH = 1


@dataclass(eq=False)
class Node:
    """One node. ``operation`` is what a launch does; allocations and frees have an address instead."""

    handle: int
    kind: str
    graph: Graph
    after: list[Node]
    operation: Operation | None = None
    address: int = 0
    size: int = 0
    pool: Pool | None = None


class GraphMemory:
    """The memory of one graph's allocations on one device: fixed addresses, backed while the graph is in use.

    Unlike the driver, graphs do not share physical memory here.
    """

    def __init__(self, machine: Machine, device: Device) -> None:
        self._machine = machine
        self.device = device
        self._arena: Arena | None = None
        self._size = 0
        self._backed = 0
        self._uses: dict[int, tuple[Stream, int]] = {}
        self.live: set[int] = set()
        self.owners = 1
        machine.graph_memories.add(self)

    def place(self, size: int) -> int:
        """An address for an allocation node."""
        check(self._size + size <= self.device.bank.total, Result.CUDA_ERROR_OUT_OF_MEMORY)
        if self._arena is None:
            self._arena = Arena("graph", round_up(self.device.bank.total, CHUNK), CHUNK)
            self._machine.arenas.add(self._arena.reservation)
        address = self._arena.base + self._size
        self._size += round_up(size, ALIGNMENT)
        return address

    def prepare(self) -> None:
        """Put physical memory under the allocations. The device counts whole chunks as used (observed on
        H200).
        """
        needed = round_up(self._size, CHUNK)
        if self._arena is None or self._backed:
            return
        bank = self.device.bank
        if needed > bank.free:
            self._machine.make_room(bank, needed)
        check(needed <= bank.free, Result.CUDA_ERROR_OUT_OF_MEMORY)
        self._arena.back(0, needed)
        self._backed = needed
        self._account(needed)

    def _account(self, change: int) -> None:
        device = self.device
        device.bank.used += change
        device.graph_used += change
        device.graph_reserved += change
        device.graph_used_high = max(device.graph_used_high, device.graph_used)
        device.graph_reserved_high = max(device.graph_reserved_high, device.graph_reserved)

    def used_until(self, stream: Stream, seq: int) -> None:
        self._uses[stream.id] = (stream, seq)

    def freed(self, address: int, stream: Stream | None = None) -> None:
        """An allocation that outlived its launch was freed."""
        self.live.discard(address)
        if stream is not None:
            self.used_until(stream, stream.submit(Operation()))

    def trim(self) -> None:
        """Give the physical memory back unless something still needs it, and the addresses once no graph
        does.
        """
        if self.live or any(stream.done < seq for stream, seq in self._uses.values()):
            return
        if self._backed:
            assert self._arena is not None
            self._arena.release(0, self._backed)
            self._account(-self._backed)
            self._backed = 0
        if not self.owners:
            self.close()

    def disown(self) -> None:
        self.owners -= 1
        if not self.owners and not self._backed:
            self.close()

    def close(self) -> None:
        self._machine.graph_memories.discard(self)
        if self._arena is not None:
            self._machine.arenas.remove(self._arena.reservation)
            self._arena.close()
            self._arena = None


@dataclass(eq=False)
class Graph:
    """A graph, in the order its nodes were captured."""

    handle: int
    nodes: list[Node] = field(default_factory=list)
    memories: dict[int, GraphMemory] = field(default_factory=dict)
    instances: int = 0

    def unfreed(self) -> list[Node]:
        """Allocation nodes without a free node: these allocations outlive a launch."""
        freed = {node.address for node in self.nodes if node.kind == "MEM_FREE"}
        return [node for node in self.nodes if node.kind == "MEM_ALLOC" and node.address not in freed]


@dataclass(eq=False)
class GraphExec:
    """An instantiated graph."""

    handle: int
    graph: Graph
    flags: int

    def launch(self, machine: Machine, stream: Stream) -> None:
        """Submit all nodes, one after the other: a stricter order than the graph asks for."""
        memories = self.graph.memories.values()
        live = [(memory, address) for memory in memories for address in memory.live]
        check(not live or self.flags & AUTO_FREE_ON_LAUNCH)
        for memory, address in live:
            machine.allocations.remove(machine.allocations.at[address])
            memory.freed(address)
        for memory in memories:
            memory.prepare()
        for node in self.graph.nodes:
            if node.operation is not None:
                stream.submit(copy.copy(node.operation))
        seq = stream.submit(Operation())
        for memory in memories:
            memory.used_until(stream, seq)
        for node in self.graph.unfreed():
            assert node.pool is not None and node.pool.device is not None
            memory = self.graph.memories[node.pool.device]
            allocation = machine.remember(node.address, node.size, "graph", node.pool.device, stream.context)
            allocation.graph = memory
            memory.live.add(node.address)


class Capture:
    """A capture in progress: which streams take part, and behind which nodes each of them is."""

    def __init__(self, machine: Machine, graph: Graph, origin: Stream, mode: int, number: int) -> None:
        self.machine = machine
        self.graph = graph
        self.origin = origin
        self.mode = mode
        self.id = number
        self.valid = True
        self._thread = threading.get_ident()
        self._frontier: dict[Stream, list[Node]] = {origin: []}
        self._open: set[int] = set()  # addresses allocated and not freed
        origin.capture = self
        machine.captures.append(self)

    def forbids(self, thread_mode: int) -> bool:
        """Whether the calling thread, in this mode of its own, may make no unsafe call because of this
        capture.
        """
        if thread_mode == RELAXED:
            return False
        if self._thread == threading.get_ident() and self.mode != RELAXED:
            return True
        return thread_mode == GLOBAL and self.mode == GLOBAL

    def invalidate(self) -> None:
        self.valid = False

    def behind(self, stream: Stream) -> list[Node]:
        """The nodes that the next one of ``stream`` will depend on."""
        return self._frontier.get(stream, [])

    # -- nodes -----------------------------------------------------------------------------------------------

    def add(self, kind: str, operation: Operation | None, stream: Stream) -> Node:
        node = Node(self.machine.new_handle(), kind, self.graph, self._frontier[stream], operation)
        self.graph.nodes.append(node)
        self.machine.graph_nodes[node.handle] = node
        self._frontier[stream] = [node]
        return node

    def allocate(self, size: int, pool: Pool, stream: Stream) -> int:
        assert pool.device is not None
        memory = self.graph.memories.get(pool.device)
        if memory is None:
            memory = self.graph.memories[pool.device] = GraphMemory(self.machine, self.machine.devices[pool.device])
        address = memory.place(size)
        node = self.add("MEM_ALLOC", None, stream)
        node.address, node.size, node.pool = address, size, pool
        self._open.add(address)
        return address

    def free(self, address: int, stream: Stream) -> None:
        """Only what the graph allocated can be freed in it; a mistake here does not spoil the capture."""
        check(address in self._open)
        self._open.remove(address)
        self.add("MEM_FREE", None, stream).address = address

    # -- forks and joins -------------------------------------------------------------------------------------

    def record(self, event: Event, stream: Stream) -> None:
        event.capture = self
        event.nodes = list(self._frontier[stream])

    def join(self, stream: Stream, event: Event) -> None:
        """``stream`` waits for an event that was recorded in this capture: it takes part from now on."""
        check(self in self.machine.captures, Result.CUDA_ERROR_CAPTURED_EVENT)
        check(self.valid, Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        if stream.capture is not None and stream.capture is not self:
            stream.capture.invalidate()
            self.invalidate()
            raise Fault(Result.CUDA_ERROR_STREAM_CAPTURE_MERGE)
        if stream.peers is not None:
            self.invalidate()
            raise Fault(Result.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        stream.capture = self
        nodes = self._frontier.setdefault(stream, [])
        self._frontier[stream] = nodes + [node for node in event.nodes if node not in nodes]

    def leave(self, stream: Stream) -> None:
        """The stream is destroyed."""
        if stream is self.origin:
            self._finish()
            self.discard()
        else:
            self._frontier.pop(stream, None)
            stream.capture = None

    def end(self) -> Graph:
        """The graph; fails where the capture was spoilt or left work behind in another stream."""
        if self.mode != RELAXED:
            check(self._thread == threading.get_ident(), Result.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)
        joined = _ancestors(self._frontier[self.origin])
        unjoined = any(node not in joined for nodes in self._frontier.values() for node in nodes)
        self._finish()
        if not self.valid or unjoined:
            self.discard()
            raise Fault(
                Result.CUDA_ERROR_STREAM_CAPTURE_UNJOINED
                if self.valid
                else Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
            )
        return self.graph

    def _finish(self) -> None:
        self.machine.captures.remove(self)
        for stream in self._frontier:
            stream.capture = None

    def discard(self) -> None:
        destroy_graph(self.machine, self.graph)


def _ancestors(nodes: Iterable[Node]) -> set[Node]:
    found: set[Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(node.after)
    return found


def destroy_graph(machine: Machine, graph: Graph) -> None:
    """Forget a graph; what was instantiated from it stays."""
    machine.graphs.pop(graph.handle, None)
    for node in graph.nodes:
        machine.graph_nodes.pop(node.handle, None)
    for memory in graph.memories.values():
        memory.disown()
