"""Stream capture: allocations and frees as nodes, launching, memory that graphs hold; nodes that are added by hand."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import streamalloc as sa
from streamalloc.core.deferred import DeferredQueue
from streamalloc.driver import simulated
from streamalloc.driver.bindings import cuda
from tests.support import GROWTH, MiB, captured, each_raises, holds, in_threads, names


@pytest.fixture(autouse=True)
def no_graph_memory(device: sa.Device) -> Iterator[None]:
    """Graphs of earlier tests may have left memory reserved on a real device."""
    device.graph_memory.trim()
    device.graph_memory.reset_peaks()
    yield
    device.synchronize()


@pytest.fixture
def kept(pool: sa.MemoryPool, stream: sa.Stream) -> Iterator[sa.Buffer]:
    """64 bytes of a pool with the value 0, for graphs to write to."""
    with pool.allocate(64, stream) as buffer:
        buffer.fill(0)
        stream.synchronize()
        yield buffer


class TestNodes:
    @pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
    def test_allocations_and_frees(self, stream: sa.Stream, pool: sa.MemoryPool, mode: Any) -> None:
        with stream.capture(mode) as graph:
            assert [stream.capturing, graph.complete] == [True, False]
            with sa.allocate(4 * MiB, stream) as one, pool.allocate(4 * MiB, stream) as two:
                assert isinstance(one, sa.GraphBuffer) and isinstance(two, sa.GraphBuffer)
                one.fill(7)
                assert one.address and two.address and [one.owner, two.owner] == [graph, graph]
            each_raises(sa.ClosedError, one.free)
            assert sa.allocate(0, stream).address == 0
        assert [stream.capturing, graph.complete] == [False, True]
        assert graph.nodes == ["MEM_ALLOC", "MEM_ALLOC", "MEMSET", "MEM_FREE", "MEM_FREE"]
        graph.close()

    def test_run_at_each_launch(self, stream: sa.Stream, kept: sa.Buffer) -> None:
        with stream.capture() as graph, sa.allocate(64, stream) as scratch:
            scratch.fill(9)
            kept.copy_from(scratch)
        assert holds(kept, 0)
        with graph:
            for _ in range(2):
                graph.launch(stream)
                assert holds(kept, 9)
                kept.fill(1)

    def test_mode_that_there_is_not(self, stream: sa.Stream) -> None:
        with pytest.raises(ValueError, match=r"mode='local'.*relaxed"), stream.capture("local"):  # type: ignore[arg-type]
            pass
        assert not stream.capturing

    def test_on_two_streams(self, stream: sa.Stream, kept: sa.Buffer, other: sa.Stream) -> None:
        with stream.capture() as graph:
            scratch = sa.allocate(64, stream)
            other.wait(stream)
            assert [stream.capturing, other.capturing] == [True, True]
            inner = sa.allocate(64, other)
            assert isinstance(inner, sa.GraphBuffer) and [inner.owner] == [graph]
            inner.fill(4, other)
            scratch.copy_from(inner, other)
            inner.free(other)
            stream.wait(other)
            kept.copy_from(scratch)
            scratch.free()
        assert [stream.capturing, other.capturing] == [False, False]
        with graph:
            graph.launch(stream)
            assert holds(kept, 4)
        with sa.allocate(64, other) as usual:
            assert not isinstance(usual, sa.GraphBuffer)
        other.synchronize()


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("case", ["dropped", "closed", "interrupted"])
def test_a_launch_keeps_the_arrays_of_a_dropped_graph(
    device: sa.Device, stream: sa.Stream, other: sa.Stream, kept: sa.Buffer, gate: Any, case: str
) -> None:
    # A launch would wait for a copy to pageable memory, and the gate would stay closed.
    hosts = sa.MemoryPool(sa.MemLocation.host(), driver=device.driver)
    hosts.set_access(device, sa.MemAccess.READWRITE)
    target = hosts.allocate(64, stream).as_array()
    alive = weakref.ref(target)
    with stream.capture() as graph:
        kept.copy_to(target)
    if case == "interrupted":  # A signal handler raises in the first launch.
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(DeferredQueue, "end_with", interrupted)
            graph.launch(stream)
    graph.launch(stream)
    graph.launch(other)
    for one in (stream, other):
        one.synchronize()
    gate.hold(other)
    graph.launch(other)
    if case == "closed":
        graph.close()
    del graph, target
    gc.collect()
    stream.synchronize()
    assert alive() is not None
    gate.open()
    other.synchronize()
    assert alive() is None
    hosts.close()


def test_a_launch_keeps_arrays_by_no_further_calls(traced: Any, stream: sa.Stream, kept: sa.Buffer) -> None:
    with stream.capture() as graph:
        kept.fill(3)
    for _ in range(2):
        traced.calls.clear()
        graph.launch(stream)
    assert [call.name for call in traced.calls] == ["cuCtxPushCurrent", "cuGraphLaunch", "cuCtxPopCurrent"]


@pytest.mark.simulated_only("the driver may crash with the handle of a destroyed stream")
def test_a_launch_on_a_stream_that_its_library_destroys(
    raw: Any, device: sa.Device, stream: sa.Stream, pool: sa.MemoryPool, gate: Any
) -> None:
    buffer = pool.allocate(64, stream)
    with stream.capture() as graph:
        buffer.fill(3)
    with device.current():
        handle = raw.cuStreamCreate(1)[1]
    theirs = sa.Stream.of_handle(device, int(handle), None)
    gate.hold(theirs)
    graph.launch(theirs)
    with device.current():
        raw.cuStreamDestroy(handle)
    del graph, buffer
    stream.synchronize()
    assert pool.statistics().used == 64
    gate.open()
    device.synchronize()
    assert pool.statistics().used == 0


def test_a_graph_that_uses_its_own_memory_is_dropped(stream: sa.Stream, pool: sa.MemoryPool, kept: sa.Buffer) -> None:
    with stream.capture() as graph:
        inner = pool.allocate(64, stream)
        inner[:8].fill(3)
        inner.copy_from(kept)
        kept.copy_from(inner)
        inner.free()
    graph.launch(stream)
    dropped = weakref.ref(graph)
    del graph, inner
    assert dropped() is None


def test_a_graph_keeps_the_buffers_that_it_fills(stream: sa.Stream, pool: sa.MemoryPool) -> None:
    buffer = pool.allocate(64, stream)
    with stream.capture() as graph:
        buffer[8:16].fill(3)
    address = buffer.address
    del buffer
    with graph, pool.allocate(64, stream) as other:
        assert other.address != address
        graph.launch(stream)
        stream.synchronize()
    assert pool.statistics().used == 64
    del graph
    stream.synchronize()
    assert pool.statistics().used == 0


class TestForeignMemory:
    def test_is_freed_on_another_stream(self, device: sa.Device, stream: sa.Stream, pool: sa.MemoryPool) -> None:
        outside = pool.allocate(64, stream)
        stream.synchronize()
        with device.create_stream() as other:
            with stream.capture("relaxed") as graph:
                each_raises(sa.CaptureError, outside.free, match=r"captured.*after the capture")
                assert not outside.freed
                outside.free(other)
            assert pool.statistics().used == 0
        assert graph.nodes == []
        graph.close()

    def test_of_another_capture(self, stream: sa.Stream) -> None:
        with stream.capture() as first:
            left = sa.allocate(64, stream)
        with stream.capture() as second, pytest.raises(sa.CaptureError):
            left.free()
        assert second.nodes == []
        for graph in (second, first):
            graph.close()

    @pytest.mark.parametrize("fails", [False, True])
    def test_dropped_in_a_capture_is_freed_after_it(self, stream: sa.Stream, pool: sa.MemoryPool, fails: bool) -> None:
        outside = [pool.allocate(64, stream)]
        with contextlib.suppress(KeyError), stream.capture() as graph:
            outside.clear()
            gc.collect()
            with sa.allocate(64, stream):
                pass
            if fails:
                raise KeyError
        assert fails or graph.nodes == ["MEM_ALLOC", "MEM_FREE"]
        assert pool.statistics().used == 0
        graph.close()


def _free_by_address(stream: sa.Stream, address: int) -> None:
    """Free the memory of the last launch, for which there is no buffer any more."""
    driver: Any = stream.device.driver
    assert not driver.cuMemFreeAsync(address, cuda.CUstream(stream.handle))[0]


class TestTheGraphsMemory:
    def test_is_freed_between_two_launches(self, stream: sa.Stream) -> None:
        with stream.capture() as graph:
            buffer = sa.allocate(64, stream)
        with graph:
            with pytest.raises(sa.InvalidValueError):
                buffer.fill(1)
            graph.launch(stream)
            buffer.fill(5)
            assert holds(buffer, 5)
            with pytest.raises(sa.InvalidValueError, match="auto_free_on_launch"):
                graph.launch(stream)
            address = buffer.address
            buffer.free()
            graph.launch(stream)
            stream.synchronize()
            _free_by_address(stream, address)

    def test_freed_by_the_next_launch(self, stream: sa.Stream) -> None:
        with stream.capture() as graph:
            buffer = sa.allocate(64, stream)
        with graph.instantiate(auto_free_on_launch=True):
            for value in (1, 2):
                graph.launch(stream)
                buffer.fill(value)
                assert holds(buffer, value)
            buffer.free()

    def test_of_a_per_thread_stream_is_freed_on_the_legacy_one_elsewhere(self, traced: Any, device: sa.Device) -> None:
        stream = device.per_thread_stream
        with stream.capture("thread_local") as graph:
            buffer = sa.allocate(64, stream)
        graph.launch(stream)
        in_threads(buffer.free)
        assert [int(call.args[1]) for call in traced.calls if call.name == "cuMemFreeAsync"] == [1]
        graph.close()

    def test_a_dropped_buffer_frees_nothing(self, traced: Any, stream: sa.Stream) -> None:
        with stream.capture() as graph:
            address = sa.allocate(64, stream).address
        graph.launch(stream)
        gc.collect()
        assert names(traced, "cuMemFreeAsync", "cuMemFree") == []
        _free_by_address(stream, address)
        graph.close()


REFUSED: dict[str, tuple[type[Exception], str | None, Callable[[sa.Stream, sa.MemoryPool, sa.Graph], object]]] = {
    "a capture": (sa.CaptureError, None, lambda stream, pool, graph: stream.capture().__enter__()),
    "a close": (sa.CaptureError, "end the capture", lambda stream, pool, graph: stream.close()),
    # The bindings free what a host function needs after one call; on hardware the second launch crashed.
    "a host function": (sa.CaptureError, "once", lambda stream, pool, graph: stream.launch_host_func(lambda: None)),
    "a launch": (sa.ClosedError, None, lambda stream, pool, graph: graph.launch(stream)),
    "an instance": (sa.ClosedError, None, lambda stream, pool, graph: graph.instantiate()),
    "nodes": (sa.ClosedError, None, lambda stream, pool, graph: graph.nodes),
    "a handle": (sa.ClosedError, "capture has not ended", lambda stream, pool, graph: graph.handle),
    "much memory": (sa.OutOfMemoryError, None, lambda stream, pool, graph: sa.allocate(1 << 46, stream)),
    "much memory of a pool": (sa.OutOfMemoryError, None, lambda stream, pool, graph: pool.allocate(1 << 46, stream)),
}


class TestFailures:
    @pytest.mark.parametrize("name", REFUSED)
    def test_what_is_refused_in_a_capture(self, stream: sa.Stream, pool: sa.MemoryPool, name: str) -> None:
        """The capture survives, and nothing is asked that would end it."""
        error, says, use = REFUSED[name]
        with stream.capture() as graph:
            with pytest.raises(error, match=says):
                use(stream, pool, graph)
            with sa.allocate(64, stream):
                pass
        assert graph.nodes == ["MEM_ALLOC", "MEM_FREE"] and not stream.closed
        graph.close()

    def test_an_exception_in_the_block(self, checker: Any, stream: sa.Stream) -> None:
        with pytest.raises(KeyError), stream.capture():
            sa.allocate(64, stream)
            raise KeyError
        assert not stream.capturing and "graph" not in checker.outstanding()
        stream.synchronize()
        with sa.allocate(64, stream) as usual:
            assert not isinstance(usual, sa.GraphBuffer)

    def test_a_call_that_breaks_the_capture(self, stream: sa.Stream, kept: sa.Buffer) -> None:
        refused = pytest.raises(sa.CaptureError, match="relaxed")
        with pytest.raises(sa.CaptureError) as ended, stream.capture() as graph, refused as caught:
            stream.synchronize()
        assert caught.value.name == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
        assert ended.value.name == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
        assert not graph.complete and not stream.capturing
        with pytest.raises(sa.ClosedError):
            graph.launch(stream)
        kept.fill(1)
        assert holds(kept, 1)

    def test_a_stream_that_was_not_joined(self, stream: sa.Stream, other: sa.Stream) -> None:
        with pytest.raises(sa.CaptureError, match="not joined"), stream.capture():
            other.wait(stream)
            sa.allocate(64, other)
        assert not other.capturing and not stream.capturing
        with sa.allocate(64, other) as usual:
            assert not isinstance(usual, sa.GraphBuffer)

    def test_the_legacy_stream(self, device: sa.Device) -> None:
        with pytest.raises(sa.CudaError, match="the legacy default stream cannot"), device.default_stream.capture():
            pass

    def test_of_memory_that_was_freed(self, stream: sa.Stream) -> None:
        with sa.allocate(64, stream) as buffer, stream.capture() as graph:
            buffer.fill(1)
        with graph, pytest.raises(sa.InvalidValueError, match="memory that was freed after its capture"):
            graph.launch(stream)


def test_handles_are_for_raw_calls(raw: Any, stream: sa.Stream, kept: sa.Buffer) -> None:
    with stream.capture() as graph:
        kept.fill(3)
    with graph:
        result, copy = raw.cuGraphClone(cuda.CUgraph(graph.handle))
        assert not result and raw.cuGraphGetNodes(copy, 0)[2] == 1 and not raw.cuGraphDestroy(copy)[0]


class TestGraphMemory:
    def test_from_capture_to_trim(self, device: sa.Device, stream: sa.Stream) -> None:
        """In growth steps, as an H200 counts it: nothing before the launch, and all of it until the trim."""
        memory = device.graph_memory
        assert "device 0" in repr(memory)
        used, _, reserved, _ = before = memory.statistics()
        with stream.capture() as graph, sa.allocate(4 * MiB, stream):
            pass
        graph.instantiate()
        assert memory.statistics() == before
        graph.launch(stream)
        stream.synchronize()
        assert (memory.reserved, memory.reserved_high) == (reserved + GROWTH, reserved + GROWTH)
        assert memory.used_high == used + GROWTH
        graph.close()
        assert memory.trim() == GROWTH
        assert memory.statistics() == (reserved, reserved + GROWTH, used, used + GROWTH)
        memory.reset_peaks()
        assert memory.statistics() == before
        assert memory.trim() == 0

    @pytest.mark.gpus(2)
    def test_is_the_pool_s_device_s(self, device: sa.Device, peer: sa.Device, stream: sa.Stream) -> None:
        device.graph_memory.trim()
        peer.graph_memory.trim()
        before = device.graph_memory.reserved, peer.graph_memory.reserved
        with sa.MemoryPool(peer) as pool:
            with stream.capture() as graph, pool.allocate(MiB, stream):
                pass
            with graph:
                graph.launch(stream)
                stream.synchronize()
                assert (device.graph_memory.reserved, peer.graph_memory.reserved) == (before[0], before[1] + GROWTH)
        assert peer.graph_memory.trim() == GROWTH


def fill(graph: sa.Graph, address: int, value: int, *after: Any) -> Any:
    """Add a node that fills 16 bytes."""
    params = cuda.CUDA_MEMSET_NODE_PARAMS()
    params.dst, params.value, params.width, params.height, params.elementSize = address, value, 16, 1, 1
    raw: Any = graph.device.driver
    with graph.device.current():
        context = raw.cuCtxGetCurrent()[1]
        result, node = raw.cuGraphAddMemsetNode(cuda.CUgraph(graph.handle), list(after), len(after), params, context)
    assert not result
    return node


def test_memory_of_one_launch(device: sa.Device, stream: sa.Stream) -> None:
    with sa.Graph.create(device) as graph:
        buffer = sa.GraphBuffer.add_to(graph, MiB, stream, access=[])
        assert (buffer.owner, buffer.location, buffer.nbytes) == (graph, device.location, MiB)
        filled = fill(graph, buffer.address, 5, buffer.node)
        buffer.add_free(after=[filled])
        assert buffer.freed and sorted(graph.nodes) == ["MEMSET", "MEM_ALLOC", "MEM_FREE"]
        for _ in range(2):
            graph.launch(stream)
        stream.synchronize()
        with pytest.raises(sa.ClosedError):
            buffer.add_free(after=[filled])


def test_a_launch_that_is_refused_does_not_instantiate(device: sa.Device, stream: sa.Stream) -> None:
    with sa.Graph.create(device) as graph:
        each_raises(TypeError, lambda: graph.launch("stream"), match="stream must be a Stream")  # type: ignore[arg-type]
        buffer = sa.GraphBuffer.add_to(graph, 16, stream)
        graph.instantiate(auto_free_on_launch=True)
        graph.launch(stream)
        graph.launch(stream)
        buffer.free()
        stream.synchronize()


def test_memory_that_outlives_a_launch(device: sa.Device, stream: sa.Stream) -> None:
    with sa.Graph.create(device) as graph:
        first = sa.GraphBuffer.add_to(graph, 16, stream)
        second = sa.GraphBuffer.add_to(graph, 16, stream, after=[first.node])
        fill(graph, first.address, 5, first.node)
        fill(graph, second.address, 6, second.node)
        for _ in range(2):
            graph.launch(stream)
            assert holds(first, 5) and holds(second, 6)
            first.free()
            second.free(stream)
        stream.synchronize()


def test_a_free_in_a_graph_of_other_code(machine: Any, device: sa.Device, stream: sa.Stream) -> None:
    with captured(machine, stream):
        buffer = sa.allocate(64, stream)
        assert isinstance(buffer, sa.GraphBuffer)
        each_raises(ValueError, lambda: buffer.add_free(after=[]), match="a graph that other code captured")
        buffer.free()


def test_refused(device: sa.Device, stream: sa.Stream) -> None:
    with sa.Graph.create(device) as graph, sa.Graph.create(device) as other:
        node = sa.GraphBuffer.add_to(other, 16, stream).node
        each_raises(sa.InvalidValueError, lambda: sa.GraphBuffer.add_to(graph, 16, stream, after=[node]))
        each_raises(sa.InvalidValueError, lambda: sa.GraphBuffer.add_to(graph, 0, stream))
        each_raises(TypeError, lambda: sa.GraphBuffer.add_to(graph, 16, 7), match="stream must be a Stream")  # type: ignore[arg-type]
        each_raises(TypeError, lambda: sa.GraphBuffer.add_to(7, 16, stream), match="graph must be a Graph")  # type: ignore[arg-type]
        each_raises(TypeError, lambda: sa.Graph.create("x"), match="device must be a Device")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="access must be a Device"):
            sa.GraphBuffer.add_to(graph, 16, stream, access=[device.location])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="belongs to another driver"):
            sa.GraphBuffer.add_to(graph, 16, stream, access=[sa.Device(0, driver=simulated())])
        buffer = sa.GraphBuffer.add_to(graph, 16, stream)
        graph.launch(stream)
        late = [lambda: sa.GraphBuffer.add_to(graph, 16, stream), lambda: buffer.add_free(after=[buffer.node])]
        each_raises(ValueError, *late, match="instantiated already, and its launches would lack the node")
        assert graph.nodes == ["MEM_ALLOC"] and not graph.closed
        buffer.free()
        graph.close()
        with pytest.raises(sa.ClosedError):
            sa.GraphBuffer.add_to(graph, 16, stream)
        each_raises(sa.ClosedError, graph.__enter__)
        assert graph.closed


def test_an_instance_of_other_code(raw: Any, device: sa.Device, stream: sa.Stream) -> None:
    """The driver allows one of a graph that allocates."""
    with sa.Graph.create(device) as graph:
        sa.GraphBuffer.add_to(graph, 16, stream)
        with device.current():
            instance = raw.cuGraphInstantiate(raw.CUgraph(graph.handle), 0)[1]
        each_raises(sa.NotSupportedError, lambda: graph.launch(stream), match="one instance at a time, and other code")
        raw.cuGraphExecDestroy(instance)
