"""Stream capture: allocations and frees as nodes that the graph owns, launching, and the memory that graphs hold."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.driver.bindings import cuda
from tests.support import GROWTH, MiB, holds, names


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
    def test_allocations_and_frees(self, stream: sa.Stream, pool: sa.MemoryPool) -> None:
        with stream.capture() as graph:
            assert [stream.capturing, graph.complete] == [True, False]
            with sa.allocate(4 * MiB, stream) as one, pool.allocate(4 * MiB, stream) as two:
                assert isinstance(one, sa.GraphBuffer) and isinstance(two, sa.GraphBuffer)
                one.fill(7)
                assert one.address and two.address and [one.owner, two.owner] == [graph, graph]
        assert [stream.capturing, graph.complete] == [False, True]
        assert graph.nodes == ["MEM_ALLOC", "MEM_ALLOC", "MEMSET", "MEM_FREE", "MEM_FREE"]
        graph.close()

    def test_take_nothing_from_the_pool(self, stream: sa.Stream, pool: sa.MemoryPool) -> None:
        with pool.allocate(64, stream):
            before = pool.statistics()
            with stream.capture() as graph, pool.allocate(4 * MiB, stream):
                pass
            assert pool.statistics() == before
            with graph:
                graph.launch(stream)
                stream.synchronize()
                assert pool.statistics() == before

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

    def test_of_nothing(self, stream: sa.Stream) -> None:
        with stream.capture() as graph, sa.allocate(0, stream) as empty:
            assert empty.address == 0
        assert graph.nodes == []
        graph.close()

    def test_of_memory_from_outside(self, stream: sa.Stream, kept: sa.Buffer) -> None:
        with stream.capture() as graph:
            kept.fill(3)
        with graph:
            graph.launch(stream)
            assert holds(kept, 3)

    @pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
    def test_modes(self, stream: sa.Stream, mode: Any) -> None:
        with stream.capture(mode) as graph, sa.allocate(64, stream):
            pass
        assert graph.nodes == ["MEM_ALLOC", "MEM_FREE"]
        graph.close()

    def test_mode_that_there_is_not(self, stream: sa.Stream) -> None:
        with pytest.raises(ValueError, match=r"mode='local'.*relaxed"), stream.capture("local"):  # type: ignore[arg-type]
            pass
        assert not stream.capturing

    def test_on_two_streams(self, device: sa.Device, stream: sa.Stream, kept: sa.Buffer) -> None:
        with device.create_stream() as other:
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

    def test_of_a_capture_that_other_code_began(self, raw: Any, stream: sa.Stream, pool: sa.MemoryPool) -> None:
        mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        foreign = cuda.CUstream(stream.handle)
        assert raw.cuStreamBeginCapture(foreign, mode)[0] == cuda.CUresult.CUDA_SUCCESS
        buffers = [sa.allocate(64, foreign), pool.allocate(64, foreign)]
        kinds, owners = {type(buffer) for buffer in buffers}, {buffer.owner for buffer in buffers}
        buffers.clear()  # the graph's: nothing is freed
        result, graph = raw.cuStreamEndCapture(foreign)
        assert result == cuda.CUresult.CUDA_SUCCESS
        raw.cuGraphDestroy(graph)
        assert kinds == {sa.GraphBuffer} and owners == {None}


class TestForeignMemory:
    def test_is_not_freed_in_a_capture(self, stream: sa.Stream, pool: sa.MemoryPool) -> None:
        """A clear error; the memory stays, and the capture goes on."""
        outside = pool.allocate(64, stream)
        with stream.capture() as graph, sa.allocate(64, stream) as inside:
            with pytest.raises(sa.CaptureError, match=r"captured.*another stream"):
                outside.free()
            inside.fill(1)
        assert graph.nodes == ["MEM_ALLOC", "MEMSET", "MEM_FREE"]
        assert not outside.freed and pool.statistics().used == 64
        outside.free()
        assert pool.statistics().used == 0
        graph.close()

    def test_is_freed_on_another_stream_meanwhile(
        self, device: sa.Device, stream: sa.Stream, pool: sa.MemoryPool
    ) -> None:
        outside = pool.allocate(64, stream)
        stream.synchronize()
        with device.create_stream() as other:
            with stream.capture("relaxed") as graph:
                outside.free(other)
            assert pool.statistics().used == 0
        graph.close()

    def test_of_another_capture(self, stream: sa.Stream) -> None:
        with stream.capture() as first:
            left = sa.allocate(64, stream)
        with stream.capture() as second, pytest.raises(sa.CaptureError):
            left.free()
        assert second.nodes == []
        for graph in (second, first):
            graph.close()

    def test_dropped_in_a_capture_is_freed_after_it(self, stream: sa.Stream, pool: sa.MemoryPool) -> None:
        outside = pool.allocate(64, stream)
        with stream.capture() as graph:
            assert outside.nbytes == 64
            del outside
            gc.collect()
            with sa.allocate(64, stream):
                pass
        assert graph.nodes == ["MEM_ALLOC", "MEM_FREE"] and pool.statistics().used == 0
        graph.close()

    def test_dropped_in_a_capture_that_fails(self, stream: sa.Stream, pool: sa.MemoryPool) -> None:
        outside = pool.allocate(64, stream)
        with pytest.raises(KeyError), stream.capture():
            assert outside.nbytes == 64
            del outside
            raise KeyError
        assert pool.statistics().used == 0


def _free_by_address(stream: sa.Stream, address: int) -> None:
    """Free the memory of the last launch, for which there is no buffer any more."""
    driver: Any = stream.device.driver
    assert not driver.cuMemFreeAsync(address, cuda.CUstream(stream.handle))[0]


class TestTheGraphsMemory:
    def test_freed_twice(self, stream: sa.Stream) -> None:
        with stream.capture() as graph:
            buffer = sa.allocate(64, stream)
            buffer.free()
            with pytest.raises(sa.ClosedError):
                buffer.free()
        assert graph.nodes == ["MEM_ALLOC", "MEM_FREE"]
        graph.close()

    def test_is_there_after_a_launch(self, stream: sa.Stream) -> None:
        with stream.capture() as graph:
            buffer = sa.allocate(64, stream)
        with pytest.raises(sa.InvalidValueError):
            buffer.fill(1)
        graph.launch(stream)
        buffer.fill(5)
        assert holds(buffer, 5)
        buffer.free()
        stream.synchronize()
        graph.close()

    def test_not_freed_before_the_next_launch(self, stream: sa.Stream) -> None:
        with stream.capture() as graph:
            buffer = sa.allocate(64, stream)
        with graph:
            graph.launch(stream)
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

    def test_a_dropped_buffer_frees_nothing(self, traced: Any, device: sa.Device) -> None:
        with device.create_stream() as stream:
            with stream.capture() as graph:
                address = sa.allocate(64, stream).address
            graph.launch(stream)
            gc.collect()
            assert names(traced, "cuMemFreeAsync", "cuMemFree") == []
            _free_by_address(stream, address)
            graph.close()

    def test_belongs_to_the_graph_for_the_checker(self, machine: Any) -> None:
        driver = sd.checked(machine)
        with sa.Device(0, driver=driver).create_stream() as stream:
            with stream.capture() as graph, sa.allocate(64, stream) as buffer:
                buffer.fill(1)
            with graph:
                graph.launch(stream)
                stream.synchronize()
        del graph, buffer, stream
        gc.collect()
        driver.assert_nothing_left()


class TestFailures:
    def test_an_exception_in_the_block(self, machine: Any) -> None:
        driver = sd.checked(machine)
        with sa.Device(0, driver=driver).create_stream() as stream:
            with pytest.raises(KeyError), stream.capture():
                sa.allocate(64, stream)
                raise KeyError
            assert not stream.capturing and "graph" not in driver.outstanding()
            stream.synchronize()
            with sa.allocate(64, stream) as usual:
                assert not isinstance(usual, sa.GraphBuffer)

    def test_a_call_that_a_capture_cannot_have(self, stream: sa.Stream, kept: sa.Buffer) -> None:
        with pytest.raises(sa.CaptureError, match="relaxed") as caught, stream.capture():
            stream.synchronize()
        assert caught.value.name == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
        kept.fill(1)
        assert holds(kept, 1)

    def test_a_capture_that_a_call_has_broken(self, stream: sa.Stream) -> None:
        with pytest.raises(sa.CaptureError) as caught, stream.capture() as graph, pytest.raises(sa.CaptureError):
            stream.synchronize()
        assert caught.value.name == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
        assert not graph.complete and not stream.capturing
        with pytest.raises(sa.ClosedError):
            graph.launch(stream)

    def test_a_stream_that_was_not_joined(self, device: sa.Device, stream: sa.Stream) -> None:
        with device.create_stream() as other:
            with pytest.raises(sa.CaptureError, match="not joined"), stream.capture():
                other.wait(stream)
                sa.allocate(64, other)
            assert not other.capturing and not stream.capturing
            with sa.allocate(64, other) as usual:
                assert not isinstance(usual, sa.GraphBuffer)

    def test_capturing_twice(self, stream: sa.Stream) -> None:
        with stream.capture() as graph:
            with pytest.raises(sa.CaptureError), stream.capture():
                pass
            with sa.allocate(64, stream):
                pass
        assert graph.nodes == ["MEM_ALLOC", "MEM_FREE"]
        graph.close()

    def test_the_legacy_stream(self, device: sa.Device) -> None:
        with pytest.raises(sa.CudaError, match="legacy"), device.default_stream.capture():
            pass

    def test_out_of_memory(self, stream: sa.Stream, pool: sa.MemoryPool) -> None:
        """The capture survives, and nothing is asked that would end it."""
        with stream.capture() as graph:
            for allocate in (sa.allocate, pool.allocate):
                with pytest.raises(sa.OutOfMemoryError) as caught:
                    allocate(1 << 46, stream)
                assert caught.value.requested == 1 << 46
            with sa.allocate(64, stream):
                pass
        assert graph.nodes == ["MEM_ALLOC", "MEM_FREE"]
        graph.close()

    def test_closing_a_stream_that_is_captured(self, stream: sa.Stream) -> None:
        with stream.capture() as graph:
            with pytest.raises(sa.CaptureError, match="end the capture"):
                stream.close()
            with sa.allocate(64, stream):
                pass
        assert graph.nodes == ["MEM_ALLOC", "MEM_FREE"] and not stream.closed
        graph.close()

    def test_a_graph_that_is_not_there_yet(self, stream: sa.Stream) -> None:
        with stream.capture() as graph:
            for use in (lambda: graph.launch(stream), graph.instantiate, lambda: graph.nodes):
                with pytest.raises(sa.ClosedError):
                    use()
        assert graph.nodes == []
        graph.close()

    def test_of_memory_that_was_freed(self, stream: sa.Stream) -> None:
        with sa.allocate(64, stream) as buffer, stream.capture() as graph:
            buffer.fill(1)
        with graph, pytest.raises(sa.InvalidValueError, match="memory that was freed after its capture"):
            graph.launch(stream)

    def test_its_handle_is_for_raw_calls(self, raw: Any, stream: sa.Stream, kept: sa.Buffer) -> None:
        with stream.capture() as graph:
            with pytest.raises(sa.ClosedError, match="capture has not ended"):
                assert graph.handle
            kept.fill(3)
        with graph:
            result, copy = raw.cuGraphClone(cuda.CUgraph(graph.handle))
            assert not result and raw.cuGraphGetNodes(copy, 0)[2] == 1 and not raw.cuGraphDestroy(copy)[0]
        with pytest.raises(sa.ClosedError):
            assert graph.handle

    def test_a_graph_that_was_closed(self, traced: Any, device: sa.Device) -> None:
        with device.create_stream() as stream:
            with stream.capture() as graph, sa.allocate(64, stream):
                assert "without nodes" in repr(graph)
            graph.launch(stream)
            graph.close()
            graph.close()
            with pytest.raises(sa.ClosedError, match="device 0, closed>"):
                graph.launch(stream)
        ends = ("cuGraphDestroy", "cuGraphExecDestroy")
        assert sorted(names(traced, *ends)) == sorted(ends)


class TestGraphMemory:
    def test_from_capture_to_trim(self, device: sa.Device, stream: sa.Stream) -> None:
        """In growth steps, as an H200 counts it: nothing before the launch, and all of it until the trim."""
        memory = device.graph_memory
        memory.trim()
        memory.reset_peaks()
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

    def test_is_named(self, device: sa.Device) -> None:
        assert sa.GraphMemoryStatistics._fields == sa.PoolStatistics._fields
        assert isinstance(device.graph_memory, sa.GraphMemory) and "device 0" in repr(device.graph_memory)

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


class TestHostFunctions:
    def test_are_refused_in_a_capture(self, stream: sa.Stream) -> None:
        """The bindings free what a host function needs after one call; on hardware the second launch crashed."""
        with stream.capture() as graph, pytest.raises(sa.CaptureError, match="once"):
            stream.launch_host_func(lambda: None)
        assert graph.nodes == []
        graph.close()
