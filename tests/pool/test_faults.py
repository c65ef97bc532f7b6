"""Every driver call fails in turn: the error is the one injected, nothing is left behind, and a second try succeeds."""

import gc
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.testing import Faults, Gate
from tests.support import GROWTH, MiB, end_what_was_dropped, in_a_thread, names


class TestTheFirstErrorIsKept:
    def test_when_undoing_fails_as_well(self, machine: Any) -> None:
        """The threshold cannot be set, and then the pool cannot be destroyed."""
        driver = sd.faulty(
            sd.faulty(machine, "cuMemPoolSetAttribute", result="CUDA_ERROR_UNKNOWN"),
            "cuMemPoolDestroy",
            result="CUDA_ERROR_LAUNCH_FAILED",
        )
        with pytest.raises(sa.CudaError) as caught:
            sa.MemoryPool(sa.Device(0, driver=driver), release_threshold=1)
        assert caught.value.name == "CUDA_ERROR_UNKNOWN" and caught.value.call == "cuMemPoolSetAttribute"
        assert "CUDA_ERROR_LAUNCH_FAILED" in _all_that_is_told(caught.value)

    @pytest.mark.parametrize(
        "call", ["cuThreadExchangeStreamCaptureMode", "cuDeviceGetMemPool", "cuMemPoolTrimTo", "cuMemPoolDestroy"]
    )
    def test_keeps_no_pool(self, checker: Any, call: str) -> None:
        """The pool whose undo failed is destroyed later, while a program keeps the error."""
        refusing = sd.faulty(checker, "cuMemPoolSetAttribute", result="CUDA_ERROR_UNKNOWN")
        faults: Any = Faults(refusing)
        device = sa.Device(0, driver=faults)
        faults.fail(call, nth=2 if call == "cuThreadExchangeStreamCaptureMode" else 1, result="CUDA_ERROR_UNKNOWN")
        with pytest.raises(sa.CudaError) as caught:
            sa.MemoryPool(device, release_threshold=1)
        assert faults.failed == [call]
        faults.stop()
        end_what_was_dropped()
        assert "pool" not in checker.outstanding()
        assert caught.value.call == "cuMemPoolSetAttribute"

    def test_a_pool_of_a_lost_context_is_ended_once(self, faults: Any, device: sa.Device, stream: sa.Stream) -> None:
        pool = sa.MemoryPool(device)
        buffer, end = pool.allocate(64, stream), pool._end
        pool.close()
        assert end is not None and end._raw is not None
        faults.fail("cuMemPoolGetAttribute", times=9, result="CUDA_ERROR_ILLEGAL_ADDRESS")
        buffer.free()
        end_what_was_dropped()
        assert end._raw is None
        faults.stop()

    def test_of_a_block(self, faults: Faults, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        """A buffer's free fails while the block's own exception is on its way."""
        faults.fail("cuMemFreeAsync", result="CUDA_ERROR_UNKNOWN")
        with pytest.raises((KeyError, sa.CudaError)) as caught, pool.allocate(64, stream):
            raise KeyError("the block's own")
        told = _all_that_is_told(caught.value)
        assert "the block's own" in told and "CUDA_ERROR_UNKNOWN" in told

    def test_of_a_capture(self, faults: Any, stream: sa.Stream) -> None:
        faults.fail("cuStreamEndCapture", result="CUDA_ERROR_UNKNOWN")
        with pytest.raises(KeyError), stream.capture():
            raise KeyError
        faults.cuGraphDestroy(faults.cuStreamEndCapture(stream._raw)[1])

    def test_of_a_graph_that_cannot_be_destroyed(self, traced: Any) -> None:
        """The launchable form is destroyed all the same."""
        driver = sd.faulty(traced, "cuGraphExecDestroy", result="CUDA_ERROR_UNKNOWN")
        with sa.Device(0, driver=driver).create_stream() as stream:
            with stream.capture() as graph:
                pass
            graph.instantiate()
            with pytest.raises(sa.CudaError) as caught:
                graph.close()
            assert caught.value.call == "cuGraphExecDestroy"
            assert "cuGraphDestroy" in names(traced) and "cuGraphExecDestroy" not in names(traced)
            graph.close()
            assert names(traced).count("cuGraphDestroy") == 1 and names(traced).count("cuGraphExecDestroy") == 1


def _all_that_is_told(error: BaseException) -> str:
    """An exception with what is attached to it: its notes, its context and its cause."""
    told, seen = "", error
    while True:
        told += f"{seen!r} {seen} {getattr(seen, '__notes__', '')}"
        following = seen.__cause__ or seen.__context__
        if following is None:
            return told
        seen = following


class TestFiguresThatCannotBeRead:
    """An allocation fails for want of memory, and so does a question about it: the first is what is told."""

    def fail(self, machine: Any, function: str) -> sa.OutOfMemoryError:
        faults: Any = Faults(machine)
        device = sa.Device(0, driver=faults)
        with device.create_stream() as stream, sa.MemoryPool(device, GROWTH) as pool:
            faults.fail(function, times=99, result="CUDA_ERROR_UNKNOWN")
            with pytest.raises(sa.OutOfMemoryError) as caught:
                pool.allocate(2 * GROWTH, stream)
            faults.stop()
        error = caught.value
        assert (error.requested, error.limit, error.name) == (2 * GROWTH, GROWTH, "CUDA_ERROR_OUT_OF_MEMORY")
        return error

    def test_of_the_pool(self, machine: Any) -> None:
        error = self.fail(machine, "cuMemPoolGetAttribute")
        assert (error.used, error.reserved) == (None, None) and error.total

    @pytest.mark.parametrize("function", ["cuMemGetInfo", "cuCtxPushCurrent"])
    def test_of_the_device(self, machine: Any, function: str) -> None:
        error = self.fail(machine, function)
        assert (error.free, error.total) == (None, None) and error.used == 0

    def test_of_the_stream(self, machine: Any) -> None:
        self.fail(machine, "cuStreamIsCapturing")


@in_a_thread  # without a current context, as the fast path of default streams needs one
def test_an_allocation_whose_context_stays_is_freed_at_once(machine: Any) -> None:
    """Not when garbage is collected: the error is in no cycle with the frames that hold what was made."""
    faulty: Any = sd.faulty(machine, "cuCtxPopCurrent", 1)
    device = sa.Device(0, driver=faulty)
    stream = device.default_stream
    gc.disable()
    try:
        with sa.MemoryPool(device) as pool:
            with pytest.raises(sa.CudaError, match="cuCtxPopCurrent"):
                pool.allocate(MiB, stream)
            machine.cuCtxPopCurrent()  # it is still there
            stream.synchronize()
            assert pool.statistics().used == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["default_stream", "per_thread_stream"])
@pytest.mark.parametrize("refused", ["", "cuCtxPushCurrent", "cuCtxPopCurrent"])
@in_a_thread  # without a current context
def test_a_drop_on_a_default_stream_frees_at_once_and_once(machine: Any, refused: str, kind: str) -> None:
    """If the driver refuses to make the context current, the free is deferred."""
    traced = sd.traced(machine)
    faults: Any = Faults(traced)
    device = sa.Device(0, driver=faults)
    with sa.MemoryPool(device) as pool:
        buffer = pool.allocate(MiB, getattr(device, kind))
        traced.calls.clear()
        if refused:
            faults.fail(refused, result="CUDA_ERROR_UNKNOWN")
        del buffer
        faults.stop()
        assert len(names(traced, "cuMemFreeAsync")) == (refused != "cuCtxPushCurrent")
        if refused == "cuCtxPopCurrent":
            machine.cuCtxPopCurrent()  # it is still there
        device.default_stream.synchronize()
        assert pool.statistics().used == 0
        assert len(names(traced, "cuMemFreeAsync")) == 1


@pytest.mark.simulated_only("a context that stays current")
def test_a_cache_miss_whose_context_is_not_restored(faults: Faults, device: sa.Device, pool: sa.MemoryPool) -> None:
    """The cache has the block; the next allocation takes it."""
    with sa.CachingAllocator(pool) as cache:
        cache.allocate(64, device.default_stream).free()
        faults.fail("cuCtxPopCurrent", result="CUDA_ERROR_UNKNOWN")
        with pytest.raises(sa.CudaError, match="cuCtxPopCurrent"):
            cache.allocate(MiB, device.default_stream)
        faults.stop()
        faults.cuCtxPopCurrent()
        assert cache.statistics().cached >= MiB
        misses = cache.statistics().misses
        with cache.allocate(MiB, device.default_stream):
            assert cache.statistics().misses == misses
        cache.trim()
        assert pool.statistics().used == 0


def test_a_block_whose_event_cannot_be_waited_for_stays_in_the_cache(
    faults: Faults, gate: Gate, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream
) -> None:
    """The next trim returns it to the pool."""
    with sa.CachingAllocator(pool) as cache, device.create_stream() as user:
        gate.hold(user)
        cache.allocate(64, stream).free(user)
        faults.fail("cuStreamWaitEvent", result="CUDA_ERROR_UNKNOWN")
        with pytest.raises(sa.CudaError, match="cuStreamWaitEvent"):
            cache.trim()
        faults.stop()
        gate.open()
        cache.trim()
        assert pool.statistics().used == 0
