"""Updates of instantiated graphs: the parameters of nodes change, the set of nodes never."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from streamalloc.driver.bindings import cuda

from .. import arguments
from ..arguments import UnsignedInt
from ..errors import Result, check, need, not_modelled
from ..graphs import GraphExec, Node, Values
from .graph_nodes import GraphNodeCalls


class GraphUpdateCalls(GraphNodeCalls):
    """cuGraphExecUpdate, cuGraphExec*NodeSetParams, cuGraphNodeSetEnabled."""

    def cuGraphExecUpdate(self, hGraphExec: Any, hGraph: Any) -> Any:
        instance, graph = self._graph_exec(hGraphExec), self._graph(hGraph)
        memory = bool(graph.memories or graph.frees) and graph is not instance.graph
        check(not memory or not graph.instances, Result.CUDA_ERROR_NOT_SUPPORTED)
        not_modelled(any(node.child is not None for node in graph.nodes), "updating from a graph with child graphs")
        nodes = graph.ordered()
        failure = Result.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE
        check(_topology([need(node.origin) for node in instance.nodes]) == _topology(nodes), failure)
        live = any(one.live for one in instance.graph.memories.values())
        not_modelled(memory and live, "updating to other memory while what a launch has left is not freed")
        check(all(self._may_replace(old, new) for old, new in zip(instance.nodes, nodes, strict=True)), failure)
        for number, (old, new) in enumerate(zip(instance.nodes, nodes, strict=True)):
            instance.nodes[number] = replace(new, origin=old.origin, enabled=old.enabled)
        if memory:
            instance.adopt(graph)
        return cuda.CUgraphExecUpdateResultInfo()

    def _may_replace(self, old: Node, new: Node) -> bool:
        """Several rows keep their shape, and copied rows their position; a copy keeps the declared types of its ends
        (observed on H200: test_graph_nodes).
        """
        if old.kind not in ("MEMSET", "MEMCPY"):
            not_modelled(old.kind == "BATCH_MEM_OP", "updating a batch of memory operations")
            return True
        before, after = old.values or {}, new.values or {}
        if old.kind == "MEMSET":
            return before == after or _kept(before) == _kept(after)
        flat = all(values["Height"] == values["Depth"] == 1 for values in (before, after))
        kinds = [[int(values[side + "MemoryType"]) for side in ("dst", "src")] for values in (before, after)]
        return before == after or (flat and kinds[0] == kinds[1])

    def _instantiated(self, hGraphExec: Any, hNode: Any, *kinds: str) -> tuple[GraphExec, int]:
        """An instance, and where in it a node of its graph is."""
        instance, node = self._graph_exec(hGraphExec), self._node(hNode)
        check(node.kind in kinds)
        found = [number for number, one in enumerate(instance.nodes) if one.origin is node]
        check(found)
        return instance, found[0]

    def cuGraphExecMemsetNodeSetParams(self, hGraphExec: Any, hNode: Any, memsetParams: Any, ctx: Any) -> None:
        instance, number = self._instantiated(hGraphExec, hNode, "MEMSET")
        params = arguments.struct("memsetParams", memsetParams, cuda.CUDA_MEMSET_NODE_PARAMS)
        values, operation = self._fill_of_node(instance.graph, params, ctx)
        self._change(instance, number, replace(instance.nodes[number], values=values, operation=operation))

    def cuGraphExecMemcpyNodeSetParams(self, hGraphExec: Any, hNode: Any, copyParams: Any, ctx: Any) -> None:
        instance, number = self._instantiated(hGraphExec, hNode, "MEMCPY")
        values, operation = self._copy_of_node(instance.graph, copyParams, ctx)
        self._change(instance, number, replace(instance.nodes[number], values=values, operation=operation))

    def cuGraphExecNodeSetParams(self, hGraphExec: Any, hNode: Any, nodeParams: Any) -> None:
        params = self._check_kind(self._node(hNode), nodeParams)
        instance, number = self._instantiated(hGraphExec, hNode, "MEMSET", "MEMCPY")
        values, operation = self._work_of_node(instance.graph, params)
        self._change(instance, number, replace(instance.nodes[number], values=values, operation=operation))

    def _change(self, instance: GraphExec, number: int, changed: Node) -> None:
        check(self._may_replace(instance.nodes[number], changed))
        instance.nodes[number] = changed

    def cuGraphExecEventRecordNodeSetEvent(self, hGraphExec: Any, hNode: Any, event: Any) -> None:
        self._change_event(hGraphExec, hNode, "EVENT_RECORD", event)

    def cuGraphExecEventWaitNodeSetEvent(self, hGraphExec: Any, hNode: Any, event: Any) -> None:
        self._change_event(hGraphExec, hNode, "WAIT_EVENT", event)

    def _change_event(self, hGraphExec: Any, hNode: Any, kind: str, event: Any) -> None:
        instance, number = self._instantiated(hGraphExec, hNode, kind)
        values, enter = self._event_of(kind, event)
        instance.nodes[number] = replace(instance.nodes[number], values=values, enter=enter, operation=None)

    def cuGraphNodeGetEnabled(self, hGraphExec: Any, hNode: Any) -> int:
        instance, number = self._instantiated(hGraphExec, hNode, "MEMSET", "MEMCPY")
        return int(instance.nodes[number].enabled)

    def cuGraphNodeSetEnabled(self, hGraphExec: Any, hNode: Any, isEnabled: UnsignedInt) -> None:
        instance, number = self._instantiated(hGraphExec, hNode, "MEMSET", "MEMCPY")
        instance.nodes[number].enabled = bool(isEnabled)


def _kept(values: Values) -> tuple[int, ...]:
    """Values of a fill that an update cannot change: the rows, if there are several."""
    return (values["pitch"], values["width"], values["height"], values["elementSize"]) if values["height"] > 1 else ()


def _topology(nodes: list[Node]) -> list[tuple[str, list[int]]]:
    """The kind and the dependencies of each node."""
    numbers = {node: number for number, node in enumerate(nodes)}
    return [(node.kind, sorted(numbers.get(one, -1) for one in node.after)) for node in nodes]
