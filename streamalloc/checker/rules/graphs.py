"""Captures, graphs and their launches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from streamalloc.checker.capture import Capture, Graph, Node, Unseen
from streamalloc.checker.ranges import Range
from streamalloc.checker.rules.order import batch_of_values
from streamalloc.checker.rules.rule import Answer, Arguments, ends, rules
from streamalloc.checker.rules.work import plane, rows
from streamalloc.checker.state import Executable, State
from streamalloc.checker.uses import KERNEL, Finish, Touch
from streamalloc.driver.bindings import cuda, number_of
from streamalloc.driver.reports import here

_SET = int(cuda.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES)


# -- captures ------------------------------------------------------------------------------------------------


def _begins_capture(state: State, name: str, args: Arguments, answer: Answer) -> None:
    stream = state.stream(args[0])
    capture = state.captures[stream] = Capture(state.on_hazard)
    capture.join(stream)
    if name == "cuStreamBeginCaptureToGraph":
        capture.begin_in(state.graph(args[1]), stream, [int(one) for one in args[2] or ()])


def _ends_capture(state: State, name: str, args: Arguments) -> Callable[[Answer], None]:
    capture = state.captures.get(state.stream(args[0]))

    def finish(answer: Answer) -> None:
        if capture is None or (answer[0] and state.ask("cuStreamIsCapturing", args[0])):
            return
        capture.ended = True
        state.captures = {stream: one for stream, one in state.captures.items() if one is not capture}
        if not answer[0]:
            state.graphs[int(answer[1])] = capture.graph

    return finish


def _reorders_capture(state: State, name: str, args: Arguments, answer: Answer) -> None:
    stream = state.stream(args[0])
    if stream in state.captures:
        nodes = list(args[1] or ())[: int(args[-2])]
        state.captures[stream].reorder(stream, [int(one) for one in nodes], bool(int(args[-1]) & _SET))


# -- explicit graphs ------------------------------------------------------------------------------------------


def _makes_graph(state: State, name: str, args: Arguments, answer: Answer) -> None:
    state.graphs[int(answer[1])] = Graph()


def _clones_graph(state: State, name: str, args: Arguments, answer: Answer) -> None:
    def in_clone(handle: int) -> int:
        found = state.ask("cuGraphNodeFindInClone", cuda.CUgraphNode(handle), answer[1]) if handle else None
        return found or 0

    nodes = state.graph(args[0]).nodes
    state.graphs[int(answer[1])] = Graph([replace(one, handle=in_clone(one.handle)) for one in nodes])


def _adds(
    at: int, make: Callable[[State, Any], list[Node]], state: State, name: str, args: Arguments, answer: Answer
) -> None:
    """Add the nodes made from argument ``at``. The graph is checked at its instantiation, because edges may be added
    until then.
    """
    graph = state.graph(args[0])
    for node in make(state, args[at]):
        node.what, node.stack = node.what or name, node.stack or here()
        graph.add(int(answer[1]), node, [int(one) for one in args[1] or ()])


def _use(state: State, touched: Iterable[Touch]) -> list[Node]:
    return [Node("use", pieces=state.node_pieces(touched))]


def _checks(touched: Callable[[State, Any], Iterable[Touch]], state: State, name: str, args: Arguments) -> Finish:
    """Before a call that adds a node: find freed memory in its arguments. The driver may refuse the call."""
    return state.stale_at_launch(name, touched(state, args[3]))


def _filled(state: State, one: Any) -> list[Touch]:
    width, height = int(one.width) * int(one.elementSize), int(one.height) or 1
    return rows(state, number_of(one.dst), int(one.pitch), width, height, True)


def _work_node(touched: Callable[[State, Any], Iterable[Touch]], state: State, params: Any) -> list[Node]:
    return _use(state, touched(state, params))


def _allocation_node(state: State, params: Any) -> list[Node]:
    made = Range(int(params.dptr), int(params.bytesize), "allocation", stack=here(), pending=True)
    state.addresses.add(made)
    return [Node("allocate", range=made)]


def _free_node(state: State, address: Any) -> list[Node]:
    found = state.addresses.find(number_of(address))
    return [Node("use") if found is None else Node("free", range=found)]


def _kernel_node(state: State, params: Any) -> list[Node]:
    function = params.func if int(params.func) else params.kern
    return state.kernel_nodes(KERNEL, here(), "of a graph", False, function, params.kernelParams, params.extra)


def _record_node(state: State, event: Any) -> list[Node]:
    return [Node("step", step=lambda stream: state.record(state.event(event), stream))]


def _wait_node(state: State, event: Any) -> list[Node]:
    return [Node("step", step=lambda stream: state.wait(stream, state.event(event)))]


def _value_node(state: State, params: Any) -> list[Node]:
    return [Node("step", step=lambda stream: batch_of_values(state, stream, params.paramArray))]


def _child(state: State, handle: Any) -> list[Node]:
    graph = state.graph(handle)
    graph.judge(state.on_hazard)  # the driver copies the graph as it is now
    return [replace(one, nested=True) for one in graph.nodes]


def _host_node(state: State, params: Any) -> list[Node]:
    call = state.host_calls.get(int(params.fn))
    return [Node("use") if call is None else Node("step", step=call.queue, calls=call)]


class _Kind(NamedTuple):
    """A kind of node: its name in call names and in CUgraphNodeType, and its field in CUgraphNodeParams."""

    call: str
    type: str
    field: str
    make: Callable[[State, Any], list[Node]]
    sets: str = "Params"
    """End of the name of the call that changes such a node; may be empty."""


_KINDS = (
    _Kind("Memcpy", "MEMCPY", "memcpy.copyParams", partial(_work_node, plane)),
    _Kind("Memset", "MEMSET", "memset", partial(_work_node, _filled)),
    _Kind("Kernel", "KERNEL", "kernel", _kernel_node),
    _Kind("ChildGraph", "GRAPH", "graph.graph", _child),
    _Kind("EventWait", "WAIT_EVENT", "eventWait.event", _wait_node, "Event"),
    _Kind("EventRecord", "EVENT_RECORD", "eventRecord.event", _record_node, "Event"),
    _Kind("BatchMemOp", "BATCH_MEM_OP", "memOp", _value_node),
    _Kind("Host", "HOST", "host", _host_node),
    _Kind("MemAlloc", "MEM_ALLOC", "alloc", _allocation_node, ""),
    _Kind("MemFree", "MEM_FREE", "free.dptr", _free_node, ""),
)


def _node(state: State, params: Any) -> list[Node]:
    """Nodes for ``CUgraphNodeParams``."""
    name = getattr(params.type, "name", "").removeprefix("CU_GRAPH_NODE_TYPE_")
    for kind in _KINDS:
        if kind.type == name:
            return kind.make(state, attrgetter(kind.field)(params))
    state.notes.add("nodes", f"of kind {name}")
    return [Node("use", unseen=Unseen(None))]


def _changes_edges(state: State, name: str, args: Arguments, answer: Answer) -> None:
    graph = state.graph(args[0])
    for before, after in zip(args[1] or (), args[2] or (), strict=False):
        edges = graph.after.setdefault(int(after), [])
        if "Add" in name:
            edges.append(int(before))
        elif int(before) in edges:
            edges.remove(int(before))


def _ends_node(state: State, name: str, args: Arguments, answer: Answer) -> None:
    handle = number_of(args[0])
    for graph in state.graphs.values():
        if any(one.handle == handle for one in graph.nodes):
            graph.nodes = [one for one in graph.nodes if one.handle != handle]
            graph.handles.pop(handle, None)


def _sets(make: Callable[[State, Any], list[Node]], state: State, name: str, args: Arguments, answer: Answer) -> None:
    """A call that changes a node of a graph or an executable graph."""
    executable = name.startswith("cuGraphExec")
    handle, params = number_of(args[1 if executable else 0]), args[2 if executable else 1]
    made = make(state, params)
    kernel = make is _kernel_node or "KERNEL" in getattr(getattr(params, "type", None), "name", "")
    for node in made:
        node.what, node.stack, node.handle = node.what or name, here(), handle
    if executable:
        changed = state.executable(args[0])
        nodes = _replaced(state, changed.nodes, handle, made)
        changed.nodes = _without_kernels(state, nodes) if kernel else nodes
        return
    having = [one for one in state.graphs.values() if any(node.handle == handle for node in one.nodes)]
    for graph in having or state.graphs.values():
        if having or len(_known(graph.nodes)) < len(graph.nodes):
            nodes = _replaced(state, graph.nodes, handle, made)
            graph.nodes = _without_kernels(state, nodes) if kernel else nodes
            if handle in graph.handles:
                graph.handles[handle] = made


def _without_kernels(state: State, nodes: list[Node]) -> list[Node]:
    """Remove reported kernels from nodes, after one of them got other arguments."""
    if any(one.what == KERNEL for one in nodes):
        state.notes.add("nodes", "reported uses of a kernel that got other arguments")
    return [one for one in nodes if one.what != KERNEL]


def _replaced(state: State, nodes: list[Node], handle: int, made: list[Node]) -> list[Node]:
    """Nodes with those of a handle replaced."""
    at = _place_of(state, nodes, handle)
    if at is None:
        return _known(nodes)
    rest = [one for one in nodes if one.handle != handle]
    return [*rest[:at], *made, *rest[at:]]


def _known(nodes: list[Node]) -> list[Node]:
    """The nodes whose operation is still known, after an unknown node was changed."""
    return [one for one in nodes if one.kind != "use" or (one.handle and not one.nested)]


def _place_of(state: State, nodes: list[Node], handle: int) -> int | None:
    """Index of the first node of a handle."""
    at = next((place for place, one in enumerate(nodes) if one.handle == handle), None)
    if at is None and len(_known(nodes)) < len(nodes):
        state.notes.add("nodes", "those without a known handle, after an unknown one was changed")
    return at


def _enables(state: State, name: str, args: Arguments, answer: Answer) -> None:
    executable, handle, enabled = state.executable(args[0]), number_of(args[1]), bool(int(args[2]))
    nodes = executable.nodes
    if _place_of(state, nodes, handle) is None:
        nodes = _known(nodes)
    executable.nodes = [replace(one, enabled=enabled) if one.handle == handle else one for one in nodes]


# -- launches ------------------------------------------------------------------------------------------------


def _instantiates(state: State, name: str, args: Arguments, answer: Answer) -> None:
    graph = state.graph(args[0])
    graph.judge(state.on_hazard)
    state.executables[int(answer[1])] = Executable(list(graph.nodes))


def _updates_executable(state: State, name: str, args: Arguments, answer: Answer) -> None:
    executable, nodes = state.executable(args[0]), state.graph(args[1]).nodes
    old = executable.nodes
    if len(old) == len(nodes):
        # The nodes keep the handles of the graph that was instantiated.
        pairs = zip(nodes, old, strict=True)
        nodes = [replace(one, handle=was.handle, enabled=was.enabled) for one, was in pairs]
    executable.nodes = list(nodes)


def _launches(state: State, name: str, args: Arguments) -> Callable[[Answer], None]:
    executable, stack = state.executable(args[0]), here()
    calls = [node.calls for node in executable.nodes if node.calls is not None]
    if calls:
        # Host functions of the graph may begin before the call returns.
        state.launch(executable, state.stream(args[1]), stack)

    def finish(answer: Answer) -> None:
        if not answer[0] and not calls:
            state.launch(executable, state.stream(args[1]), stack)
        for call in calls if answer[0] else ():
            call.skip()

    return finish


_SETTERS = {
    **{f"{kind.call}NodeSet{kind.sets}": kind.make for kind in _KINDS if kind.sets},
    **dict.fromkeys(("NodeSetParams", "NodeSetParams_v2"), _node),
}
RULES = rules(
    after={
        "cuStreamBeginCapture cuStreamBeginCaptureToGraph": _begins_capture,
        "cuStreamUpdateCaptureDependencies cuStreamUpdateCaptureDependencies_v2": _reorders_capture,
        "cuGraphCreate": _makes_graph,
        "cuGraphClone": _clones_graph,
        **{f"cuGraphAdd{kind.call}Node": partial(_adds, 3, kind.make) for kind in _KINDS},
        "cuGraphAddEmptyNode": partial(_adds, 0, lambda state, graph: [Node("use")]),
        "cuGraphAddNode cuGraphAddNode_v2 cuGraphAddNode_v3": partial(_adds, -1, _node),
        "cuGraphAddDependencies cuGraphAddDependencies_v2": _changes_edges,
        "cuGraphRemoveDependencies cuGraphRemoveDependencies_v2": _changes_edges,
        "cuGraphDestroyNode": _ends_node,
        "cuGraphInstantiate cuGraphInstantiateWithParams": _instantiates,
        "cuGraphExecUpdate": _updates_executable,
        "cuGraphNodeSetEnabled": _enables,
        **{f"cuGraph{name} cuGraphExec{name}": partial(_sets, make) for name, make in _SETTERS.items()},
    },
    before={
        "cuGraphDestroy": ends(attrgetter("graphs")),
        "cuGraphExecDestroy": ends(attrgetter("executables")),
        "cuStreamEndCapture": _ends_capture,
        "cuGraphLaunch": _launches,
        "cuGraphAddMemsetNode": partial(_checks, _filled),
        "cuGraphAddMemcpyNode": partial(_checks, plane),
    },
)
