"""Rules for calls on captures, graphs and their nodes, and for launches of graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from streamalloc.checker import uses
from streamalloc.checker.capture import TrackedCapture, TrackedGraph, TrackedNode, Unseen
from streamalloc.checker.clocks import TrackedStream
from streamalloc.checker.ranges import Bytes, Range
from streamalloc.checker.rules.streams import batch_of_values, event_of, record, wait
from streamalloc.checker.rules.work import plane, rows
from streamalloc.checker.state import Executable, State
from streamalloc.checker.uses import Answer, Arguments, Steps, Use, ends, rules_of
from streamalloc.driver.bindings import cuda, number_of
from streamalloc.driver.reports import Launched, Stack

T = TypeVar("T")
MakeNodes = Callable[[State, Any], list[TrackedNode]]
"""Function of an argument, such as the parameters of a node, that returns the checker's nodes for it."""
_SET = int(cuda.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES)


def graph_of(state: State, handle: Any) -> TrackedGraph:
    """Return the graph of a handle. If the graph was not built through this driver, return an empty graph, and add a
    note.
    """
    return _built(state, state.graphs, number_of(handle), TrackedGraph)


def executable_of(state: State, handle: Any) -> Executable:
    """Return the executable graph of a handle. If no recorded call made it, return an executable graph without nodes,
    and add a note.
    """
    return _built(state, state.executables, number_of(handle), partial(Executable, []))


def _built(state: State, known: dict[int, T], number: int, make: Callable[[], T]) -> T:
    found = known.get(number)
    if found is None:
        found = known[number] = make()
        state.notes.add("graphs")
    return found


def launch(state: State, executable: Executable, stream: TrackedStream, stack: Stack) -> None:
    """Queue a launch of a graph (``cuGraphLaunch``), after earlier launches of the same graph. ``stack``: place of the
    launch in the program.

    If the stream is being captured, the graph's nodes are added to the capture instead.
    """
    nodes, capture = executable.nodes, state.capture_of(stream)
    if capture is not None:
        copies = [replace(node, handle=0) for node in nodes]
        for node in copies:
            capture.add(stream, node)
        state.streams.name_nodes(stream, *copies)
        return
    if executable.launched is not None:
        state.timeline.wait(stream, executable.launched)
    used = [one for node in nodes if node.enabled for one in node.pieces]
    uses.prepare(state, used)
    together: list[TrackedNode] = []
    for node in nodes:
        if node.kind == "step":
            _run(state, stream, together, stack)
            together = []
            node.step(stream)
            continue
        together.append(node)
        if node.kind == "allocate":
            if state.addresses.find(node.range.base) is not node.range:
                state.addresses.add(node.range)
        elif any(piece[0].kind == "mapping" and piece[0].ended for piece, _ in node.pieces):
            # The addresses may be mapped to other memory since the capture, and a launch uses the mapping of its own
            # time.
            named = ((low, high - low, write) for (_, low, high), write in node.pieces)
            node.pieces = uses.look_up(state, named).pieces
    _run(state, stream, together, stack)
    if not any(node.kind == "step" for node in nodes):
        followed = state.sources.followed(used)
        written = [one for one in followed if one[1]]
        for node in nodes if len(written) < len(followed) else ():
            if node.enabled:
                reads = [one for one in node.pieces if not one[1]]
                state.sources.add(stream, reads + written, node.what, Launched(node.stack, stack))
    executable.launched = state.timeline.record(stream)


def _run(state: State, stream: TrackedStream, nodes: list[TrackedNode], stack: Stack) -> None:
    def run(stream: TrackedStream) -> None:
        for node in nodes:
            state.timeline.next(stream)
            if not node.enabled:
                continue
            launched = Launched(node.stack, stack)
            if node.kind == "use":
                uses.check_uses(state, stream, node, launched)
                uses.may_write(state, stream, node)
            elif node.kind == "free":
                state.judge.free(node.range, stream, stream.clock, node.what, launched)
            else:
                made = node.range
                if not made.pending and made.ended is None:
                    # Otherwise the driver would have refused the launch: the graph has AUTO_FREE_ON_LAUNCH, so each
                    # launch frees what the previous launch has left.
                    state.judge.free(made, stream, stream.clock, "cuGraphLaunch", stack)
                made.ended = None
                made.last.clear()
                made.bytes = Bytes()
                state.judge.allocate(made, stream)

    state.timeline.submit(stream, run)
    for node in nodes:
        if node.enabled:
            uses.record_queued(state, stream, node, Launched(node.stack, stack))


# -- captures ------------------------------------------------------------------------------------------------


def cuStreamBeginCapture(state: State, name: str, args: Arguments, answer: Answer) -> None:
    stream = state.stream(args[0])
    capture = state.streams.captures[stream] = TrackedCapture(state.on_hazard)
    capture.join(stream)
    if name == "cuStreamBeginCaptureToGraph":
        capture.begin_in(graph_of(state, args[1]), stream, [int(one) for one in args[2] or ()])


cuStreamBeginCaptureToGraph = cuStreamBeginCapture


def cuStreamEndCapture(state: State, name: str, args: Arguments) -> Steps:
    capture = state.streams.captures.get(state.stream(args[0]))
    answer = yield
    if capture is None or (answer[0] and state.ask.number("cuStreamIsCapturing", args[0])):
        return
    capture.ended = True
    state.streams.captures = {stream: one for stream, one in state.streams.captures.items() if one is not capture}
    if not answer[0]:
        state.graphs[int(answer[1])] = capture.graph


def cuStreamUpdateCaptureDependencies(state: State, name: str, args: Arguments, answer: Answer) -> None:
    stream = state.stream(args[0])
    if stream in state.streams.captures:
        nodes = list(args[1] or ())[: int(args[-2])]
        state.streams.captures[stream].reorder(stream, [int(one) for one in nodes], bool(int(args[-1]) & _SET))


cuStreamUpdateCaptureDependencies_v2 = cuStreamUpdateCaptureDependencies


# -- explicit graphs ------------------------------------------------------------------------------------------


def cuGraphCreate(state: State, name: str, args: Arguments, answer: Answer) -> None:
    state.graphs[int(answer[1])] = TrackedGraph()


def cuGraphClone(state: State, name: str, args: Arguments, answer: Answer) -> None:
    def in_clone(handle: int) -> int:
        found = state.ask.number("cuGraphNodeFindInClone", cuda.CUgraphNode(handle), answer[1]) if handle else None
        return found or 0

    nodes = graph_of(state, args[0]).nodes
    state.graphs[int(answer[1])] = TrackedGraph([replace(one, handle=in_clone(one.handle)) for one in nodes])


cuGraphDestroy = ends(attrgetter("graphs"))


def _adds(at: int, make: MakeNodes, state: State, name: str, args: Arguments, answer: Answer) -> None:
    """Rule for a call that adds a node. ``make`` returns the checker's nodes for the argument with the index ``at``.

    The nodes are checked only at the instantiation, because edges may be added until then.
    """
    graph = graph_of(state, args[0])
    for node in make(state, args[at]):
        node.what, node.stack = node.what or name, node.stack or state.place()
        graph.add(int(answer[1]), node, [int(one) for one in args[1] or ()])


def _checks(named: Callable[[State, Any], Iterable[Use]], state: State, name: str, args: Arguments) -> Steps:
    """Rule for a call that adds a copy or a fill: report freed memory among the memory that its arguments name.
    ``named`` returns this memory.

    The report is made before the call, because the driver may refuse the call.
    """
    report_refused = uses.stale_at_launch(state, name, uses.look_up(state, named(state, args[3])).pieces)
    answer = yield
    report_refused(answer)
    if not answer[0]:
        _adds(3, partial(_work_node, named), state, name, args, answer)


def _filled(state: State, one: Any) -> list[Use]:
    width, height = int(one.width) * int(one.elementSize), int(one.height) or 1
    return rows(state, number_of(one.dst), int(one.pitch), width, height, True)


def _work_node(named: Callable[[State, Any], Iterable[Use]], state: State, params: Any) -> list[TrackedNode]:
    return [TrackedNode("use", pieces=uses.present(state, uses.look_up(state, named(state, params)), in_graph=True))]


def _allocation_node(state: State, params: Any) -> list[TrackedNode]:
    made = Range(int(params.dptr), int(params.bytesize), "allocation", stack=state.place(), pending=True)
    state.addresses.add(made)
    return [TrackedNode("allocate", range=made)]


def _free_node(state: State, address: Any) -> list[TrackedNode]:
    found = state.addresses.find(number_of(address))
    return [TrackedNode("use") if found is None else TrackedNode("free", range=found)]


def _kernel_node(state: State, params: Any) -> list[TrackedNode]:
    launch = params.func if int(params.func) else params.kern, params.kernelParams, params.extra
    return uses.kernel_nodes(state, uses.KERNEL, state.place(), "of a graph", False, *launch)


def _record_node(state: State, event: Any) -> list[TrackedNode]:
    return [TrackedNode("step", step=lambda stream: record(state, event_of(state, event), stream))]


def _wait_node(state: State, event: Any) -> list[TrackedNode]:
    return [TrackedNode("step", step=lambda stream: wait(state, stream, event_of(state, event)))]


def _value_node(state: State, params: Any) -> list[TrackedNode]:
    return [TrackedNode("step", step=lambda stream: batch_of_values(state, stream, params.paramArray))]


def _child(state: State, handle: Any) -> list[TrackedNode]:
    graph = graph_of(state, handle)
    graph.judge(state.on_hazard)  # The driver copies the child graph as it is now, so its nodes are checked now.
    return [replace(one, nested=True) for one in graph.nodes]


def _host_node(state: State, params: Any) -> list[TrackedNode]:
    call = state.host_calls.get(int(params.fn))
    return [TrackedNode("use") if call is None else TrackedNode("step", step=call.queue, calls=call)]


class _Kind(NamedTuple):
    """Kind of a graph node: its name in the names of calls, its name in ``CUgraphNodeType``, and its field in
    ``CUgraphNodeParams``.
    """

    call: str
    type: str
    field: str
    make: MakeNodes
    sets: str = "Params"
    """Last part of the name of the call that changes the parameters of such a node; empty if there is no call."""


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


def _node(state: State, params: Any) -> list[TrackedNode]:
    """Return the checker's nodes for a ``CUgraphNodeParams``."""
    name = getattr(params.type, "name", "").removeprefix("CU_GRAPH_NODE_TYPE_")
    for kind in _KINDS:
        if kind.type == name:
            return kind.make(state, attrgetter(kind.field)(params))
    state.notes.add("nodes", f"of kind {name}")
    return [TrackedNode("use", unseen=Unseen(None))]


cuGraphAddNode = cuGraphAddNode_v2 = cuGraphAddNode_v3 = partial(_adds, -1, _node)
cuGraphAddEmptyNode = partial(_adds, 0, lambda state, graph: [TrackedNode("use")])


def cuGraphAddDependencies(state: State, name: str, args: Arguments, answer: Answer) -> None:
    graph = graph_of(state, args[0])
    for before, after in zip(args[1] or (), args[2] or (), strict=False):
        edges = graph.after.setdefault(int(after), [])
        if "Add" in name:
            edges.append(int(before))
        elif int(before) in edges:
            edges.remove(int(before))


cuGraphAddDependencies_v2 = cuGraphRemoveDependencies = cuGraphRemoveDependencies_v2 = cuGraphAddDependencies


def cuGraphDestroyNode(state: State, name: str, args: Arguments, answer: Answer) -> None:
    handle = number_of(args[0])
    for graph in state.graphs.values():
        if any(one.handle == handle for one in graph.nodes):
            graph.remove(handle)


def _sets(make: MakeNodes, state: State, name: str, args: Arguments, answer: Answer) -> None:
    """Rule for a call that changes a node of a graph or an executable graph.

    ``make`` returns the checker's nodes for the parameters.
    """
    executable = name.startswith("cuGraphExec")
    handle, params = number_of(args[1 if executable else 0]), args[2 if executable else 1]
    made = make(state, params)
    kernel = make is _kernel_node or "KERNEL" in getattr(getattr(params, "type", None), "name", "")
    for node in made:
        node.what, node.stack, node.handle = node.what or name, state.place(), handle
    if executable:
        changed = executable_of(state, args[0])
        nodes = _replaced(state, changed.nodes, handle, made)
        changed.nodes = _without_kernels(state, nodes) if kernel else nodes
        return
    having = [one for one in state.graphs.values() if any(node.handle == handle for node in one.nodes)]
    for graph in having or state.graphs.values():
        nodes = _replaced(state, graph.nodes, handle, made)
        if nodes != graph.nodes:
            graph.nodes = _without_kernels(state, nodes) if kernel else nodes
        if handle in graph.handles:
            graph.handles[handle] = made


def _without_kernels(state: State, nodes: list[TrackedNode]) -> list[TrackedNode]:
    """Return the nodes without those with the name :data:`~.uses.KERNEL`: of kernels whose uses the program reported
    (:meth:`~.wrapper.Recorder.used`), and of kernels without a name.

    A call has changed a kernel's arguments, so the reported uses may no longer be true.
    """
    if any(one.what == uses.KERNEL for one in nodes):
        state.notes.add("nodes", "reported uses of a kernel that got other arguments")
    return [one for one in nodes if one.what != uses.KERNEL]


def _replaced(state: State, nodes: list[TrackedNode], handle: int, made: list[TrackedNode]) -> list[TrackedNode]:
    """Return ``nodes``, in which ``made`` takes the place of the nodes with the handle ``handle``.

    If no node has this handle, some node without a known handle was changed. Then all nodes without a known handle are
    left out, and a note is added.
    """
    at = next((place for place, one in enumerate(nodes) if one.handle == handle), None)
    if at is not None:
        rest = [one for one in nodes if one.handle != handle]
        return [*rest[:at], *made, *rest[at:]]
    known = [one for one in nodes if one.kind != "use" or (one.handle and not one.nested)]
    if len(known) < len(nodes):
        state.notes.add("nodes", "those without a known handle, after an unknown one was changed")
    return known


def cuGraphNodeSetEnabled(state: State, name: str, args: Arguments, answer: Answer) -> None:
    executable, handle, enabled = executable_of(state, args[0]), number_of(args[1]), bool(int(args[2]))
    changed = [replace(one, enabled=enabled) for one in executable.nodes if one.handle == handle]
    executable.nodes = _replaced(state, executable.nodes, handle, changed)


# -- launches ------------------------------------------------------------------------------------------------


def cuGraphInstantiate(state: State, name: str, args: Arguments, answer: Answer) -> None:
    graph = graph_of(state, args[0])
    graph.judge(state.on_hazard)
    state.executables[int(answer[1])] = Executable(list(graph.nodes))


cuGraphExecDestroy = ends(attrgetter("executables"))


cuGraphInstantiateWithParams = cuGraphInstantiate


def cuGraphExecUpdate(state: State, name: str, args: Arguments, answer: Answer) -> None:
    executable, nodes = executable_of(state, args[0]), graph_of(state, args[1]).nodes
    old = executable.nodes
    if len(old) == len(nodes):
        # Later calls on the executable graph name its nodes by the handles of the first graph, so the new nodes get
        # these handles.
        nodes = [replace(one, handle=was.handle, enabled=was.enabled) for one, was in zip(nodes, old, strict=True)]
    executable.nodes = list(nodes)


def cuGraphLaunch(state: State, name: str, args: Arguments) -> Steps:
    executable, stack = executable_of(state, args[0]), state.place()
    calls = [node.calls for node in executable.nodes if node.calls is not None]
    if calls:
        # A host function of the graph may begin before the call returns, so such a launch is recorded before the call.
        launch(state, executable, state.stream(args[1]), stack)
    answer = yield
    if not answer[0] and not calls:
        launch(state, executable, state.stream(args[1]), stack)
    for call in calls if answer[0] else ():
        call.skip()


_SETTERS = {
    **{f"{kind.call}NodeSet{kind.sets}": kind.make for kind in _KINDS if kind.sets},
    **dict.fromkeys(("NodeSetParams", "NodeSetParams_v2"), _node),
}
RULES = rules_of(
    {
        **globals(),
        **{f"cuGraphAdd{kind.call}Node": partial(_adds, 3, kind.make) for kind in _KINDS},
        "cuGraphAddMemsetNode": partial(_checks, _filled),
        "cuGraphAddMemcpyNode": partial(_checks, plane),
        **{
            f"{graph}{name}": partial(_sets, make)
            for name, make in _SETTERS.items()
            for graph in ("cuGraph", "cuGraphExec")
        },
    }
)
