"""Captures and graphs."""

import ctypes

from streamalloc.driver.bindings import cuda
from tests.checker.corpus.bench import Bench, hazard, programs
from tests.checker.corpus.nodes import Graph

programs(
    """
race
    a_branch_of_a_capture_is_not_joined_in_time: x = ready; begin a; a > b; fill x 1 b; + b > a; fill x 2 a; - b > a;
        g = end; launch g a
    the_host_writes_pageable_memory_that_a_graph_reads: x = ready; h = pageable; begin a; cuMemcpyHtoDAsync x h 4096 a;
        g = end; launch g a; + synchronize a; poke h; synchronize a
    an_event_is_recorded_by_the_capture_alone: x = ready; e = event; begin a; write x a; cuEventRecordWithFlags e a 1|0;
        g = end; launch g a; cuStreamWaitEvent b e 0; write x b
    a_word_is_written_by_a_graph_too_early: x = ready; w = word; begin a; + write x a; put a w 1; - write x a; g = end;
        launch g a; until b w 1; write x b
use after free
    a_graph_is_launched_after_its_memory_is_freed: x = ready; begin a; fill x 1; g = end; instantiate g; - free x;
        launch g a
use before allocation
    memory_of_a_graph_is_used_before_its_launch: begin a; x = of_current_pool a; g = end; + launch g a; write x a;
        - launch g a; free x a
    memory_of_a_graph_is_used_elsewhere: begin a; x = of_current_pool a; g = end; launch g a; + a > b; write x b; b > a;
        free x a
free racing a use
    memory_is_freed_by_the_next_launch: begin a; x = of_current_pool a; g = end; auto_free g; launch g a; a > b; at x b;
        + b > a; launch g a; cuMemFreeAsync x a
unmap while in use
    unmapped_while_a_graph_runs: m = mapped; begin a; at m a; g = end; launch g b; + synchronize b; unmap m;
        synchronize device
"""
)
programs(
    """
release while in use
    a_source_is_freed_while_its_graph_is_held: x = ready; w = word; p = cuMemHostAlloc 4096 0; begin a;
        cuMemcpyHtoDAsync x p 4096 a; g = end; until a w 1; launch g a; + open w; + synchronize a; - open_soon w;
        cuMemFreeHost p
""",
    simulated="a free of hardware waits there, which nobody has promised",
)


# -- functions of the host in graphs ---------------------------------------------------------------------------


_ONCE = "the bindings let a function of a graph run once"


@hazard("race", simulated=_ONCE)
def a_function_of_a_graph_reads_what_another_stream_copies(b: Bench, right: bool) -> None:
    """An earlier copy of the graph itself is complete at each launch."""
    address, x = b.word(), b.new(b.a, 64)
    b.device.synchronize()
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: b.driver.used(address, 64, None, False))
    stream = cuda.CUstream(b.a.handle)
    with b.a.capture() as graph:
        b.raw("cuMemcpyDtoHAsync", address, x.address, 64, stream)
        b.raw("cuLaunchHostFunc", stream, cuda.CUhostFn(ctypes.cast(function, ctypes.c_void_p).value), 0)
    b.keep(graph)
    for _ in range(2):
        graph.launch(b.a)
        b.a.synchronize()
    b.raw("cuMemcpyDtoHAsync", address, x.address, 64, cuda.CUstream(b.b.handle))
    b.order(b.b, b.a, right)
    graph.launch(b.a)
    b.a.synchronize()  # The function exists until then.


@hazard("race", simulated=_ONCE)
def a_node_calls_a_function_too_early(b: Bench, right: bool) -> None:
    address = b.word()
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: b.driver.used(address, 64, None, True))
    params = cuda.CUDA_HOST_NODE_PARAMS()
    params.fn, params.userData = cuda.CUhostFn(ctypes.cast(function, ctypes.c_void_p).value), 0
    graph = Graph(b)
    filled = graph.fill(address, nbytes=64)
    graph.add("Host", [filled], params)
    assert int(params.fn) == ctypes.cast(function, ctypes.c_void_p).value
    b.raw("cuMemsetD8Async", address, 1, 64, cuda.CUstream(b.b.handle))
    b.order(b.b, b.a, right)
    graph.launch(b.a)
    b.device.synchronize()


@hazard("race", simulated=_ONCE)
def a_callback_comes_before_another_stream(b: Bench, right: bool) -> None:
    address = b.word()
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(
        lambda *_: b.driver.used(address, 64, None, True)
    )
    b.raw("cuMemsetD8Async", address, 1, 64, cuda.CUstream((b.a if right else b.b).handle))
    callback = cuda.CUstreamCallback(ctypes.cast(function, ctypes.c_void_p).value)
    b.raw("cuStreamAddCallback", cuda.CUstream(b.a.handle), callback, 0, 0)
    b.device.synchronize()


# -- nodes that were captured ----------------------------------------------------------------------------------


@hazard("race")
def the_other_node_of_a_graph_was_changed(b: Bench, right: bool) -> None:
    x, y, z = buffers = [b.new(b.a) for _ in range(3)]
    b.a.synchronize()
    graph = Graph(b)
    with b.device.current():
        stream = cuda.CUstream(b.a.handle)
        b.driver.cuStreamBeginCapture(stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        x.fill(1, b.a)
        y.fill(1, b.a)
        captured = b.raw("cuStreamEndCapture", stream)
    nodes = b.raw("cuGraphGetNodes", captured, 2)
    (changed,) = (one for one in nodes if int(b.raw("cuGraphMemsetNodeGetParams", one).dst) == x.address)
    made = b.raw("cuGraphInstantiate", captured, 0)
    graph.change(made, changed, z.address)
    b.raw("cuGraphLaunch", made, stream)
    (x if right else y).fill(2, b.b)
    b.done(*buffers)
    b.raw("cuGraphExecDestroy", made)
    b.raw("cuGraphDestroy", captured)


@hazard("race", simulated="its arguments differ between bindings", bindings="13.0")
def a_capture_goes_on_after_nothing(b: Bench, right: bool) -> None:
    x, y = buffers = [b.new(b.a) for _ in range(2)]
    b.a.synchronize()
    stream = cuda.CUstream(b.a.handle)
    b.raw("cuStreamBeginCapture", stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    x.fill(1, b.a)
    b.raw("cuStreamUpdateCaptureDependencies", stream, None, None, 0, 1)
    (y if right else x).fill(2, b.a)
    b.raw("cuGraphDestroy", b.raw("cuStreamEndCapture", stream))
    b.done(*buffers)
