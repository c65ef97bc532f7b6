"""Every driver call fails in turn: the error is the one injected, nothing is left behind, and a second try succeeds."""

from __future__ import annotations

import gc
import itertools
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.core.internal import spare_events
from streamalloc.driver.wrappers import Wrapper
from streamalloc.testing import Faults
from tests.support import GROWTH, MiB, end_what_was_dropped, every, in_a_thread, names

READWRITE = sa.MemAccess.READWRITE


def _make_pool(device: sa.Device) -> None:
    with sa.MemoryPool(device, release_threshold=MiB) as pool:
        assert pool.attributes.release_threshold == MiB


def _make_host_pool(device: sa.Device) -> None:
    with sa.MemoryPool(sa.MemLocation.host(), release_threshold=MiB, driver=device.driver) as pool:
        assert pool.statistics().used == 0


def _allocate(device: sa.Device) -> None:
    with device.create_stream() as stream, sa.MemoryPool(device) as pool, pool.allocate(64, stream) as buffer:
        assert buffer.nbytes == 64


def _allocate_on_the_default_stream(device: sa.Device) -> None:
    with sa.MemoryPool(device) as pool:
        with pool.allocate(64, device.default_stream) as buffer:
            assert buffer.nbytes == 64
        device.default_stream.synchronize()


def _allocate_from_the_current_pool(device: sa.Device) -> None:
    with device.create_stream() as stream, sa.allocate(64, stream) as buffer:
        assert buffer.nbytes == 64


def _fill(device: sa.Device) -> None:
    with device.create_stream() as stream, sa.MemoryPool(device) as pool, pool.allocate(64, stream) as buffer:
        for width in (1, 2, 4):
            buffer.fill(1, width=width)
        stream.synchronize()
        with pool.allocate(64, device.default_stream) as other:
            other.fill(2)
        device.default_stream.synchronize()


def _copy(device: sa.Device) -> None:
    with device.create_stream() as stream, sa.MemoryPool(device) as pool, pool.allocate(64, stream) as buffer:
        with pool.allocate(64, stream) as other:
            other.copy_from(np.full(64, 7, np.uint8))
            buffer.copy_from(other)
        target = bytearray(64)
        buffer.copy_to(target)
        assert target == bytes([7]) * 64


def _capture(device: sa.Device) -> None:
    with device.create_stream() as stream:
        with stream.capture() as graph, sa.allocate(64, stream) as buffer:
            buffer.fill(1)
        with graph:
            assert graph.nodes == ["MEM_ALLOC", "MEMSET", "MEM_FREE"]
            graph.launch(stream)
            stream.synchronize()
        device.graph_memory.trim()


def _make_current(device: sa.Device) -> None:
    with device.create_stream() as stream, sa.MemoryPool(device) as pool:
        with pool.make_current(), sa.allocate(64, stream):
            assert pool.statistics().used == 64
        assert sa.MemoryPool.current(device) is not pool


def _set_access(device: sa.Device) -> None:
    with sa.MemoryPool(sa.MemLocation.host(), driver=device.driver) as pool:
        pool.set_access(device, READWRITE)
        assert pool.access(device) is READWRITE


def _streams_and_events(device: sa.Device) -> None:
    with device.create_stream() as one, device.create_stream(blocking=True) as two:
        with one.record(timing=True) as start, device.create_event(blocking_sync=True) as event:
            two.wait(start)
            two.record(event)
            one.wait(two)
            one.synchronize()
            event.synchronize()
        device.synchronize()


def _trim(device: sa.Device) -> None:
    with device.create_stream() as stream, sa.MemoryPool(device, release_threshold=1 << 40) as pool:
        pool.allocate(MiB, stream).free()
        stream.synchronize()
        assert pool.trim() == GROWTH
        pool.reset_peaks()
        assert pool.statistics() == (0, 0, 0, 0)


def _try_again(device: sa.Device) -> None:
    with (
        device.create_stream() as stream,
        device.create_stream() as other,
        sa.MemoryPool(device, GROWTH, on_oom="sync-trim-retry") as pool,
    ):
        pool.attributes.reuse_allow_opportunistic = False
        pool.attributes.reuse_allow_internal_dependencies = False
        pool.allocate(GROWTH, other).free()
        with pool.allocate(GROWTH, stream) as buffer:
            assert buffer.nbytes == GROWTH


def _pointers(device: sa.Device) -> None:
    with device.create_stream() as stream, sa.allocate(64, stream) as buffer:
        found = sa.pointer_attributes(buffer.address, driver=device.driver)
        assert found.nbytes == 64 and found.pool is not None


def _hand_over(device: sa.Device) -> None:
    with device.create_stream() as stream, sa.allocate(64, stream) as buffer:
        capsule = buffer.__dlpack__()
        assert buffer.__cuda_array_interface__["version"] == 3
        del capsule


def _cache(device: sa.Device) -> None:
    with (
        device.create_stream() as one,
        device.create_stream() as two,
        sa.MemoryPool(device) as pool,
        sa.CachingAllocator(pool) as cache,
    ):
        for stream in (one, one, two):
            cache.allocate(64, stream).free()
        two.synchronize()
        kept = [cache.allocate(64, one), cache.allocate(64, one), cache.allocate(1 << 24, two)]
        kept.pop(0).free(two)
        kept.pop().free(device.default_stream)
        del kept
        device.synchronize()
        with warnings.catch_warnings():
            # A free that a fault has put off may not have run yet.
            warnings.simplefilter("ignore", sa.PendingFreesWarning)
            cache.trim()
        cache.allocate(64, two).free()
        assert cache.statistics().in_use == 0


SCENARIOS: dict[str, Callable[[sa.Device], None]] = {
    "make a pool with a threshold": _make_pool,
    "make a host pool": _make_host_pool,
    "allocate and free": _allocate,
    "on the default stream": _allocate_on_the_default_stream,
    "from the current pool": _allocate_from_the_current_pool,
    "fill": _fill,
    "copy": _copy,
    "capture": _capture,
    "make a pool current": _make_current,
    "set access": _set_access,
    "streams and events": _streams_and_events,
    "trim": _trim,
    "try again when memory runs out": _try_again,
    "a cache": _cache,
    "pointer attributes": _pointers,
    "hand memory over": _hand_over,
}
# The calls whose failure a scenario is right to survive: it was told to try again, or the answer means "not known".
_FENCE = {
    "cuThreadExchangeStreamCaptureMode", "cuCtxPushCurrent", "cuCtxPopCurrent", "cuEventCreate", "cuEventRecord",
}  # fmt: skip
SURVIVED = {
    # Nor does a wait for the work so far have to succeed, if the second try does.
    ("try again when memory runs out", "CUDA_ERROR_OUT_OF_MEMORY"): {"cuMemAllocFromPoolAsync", *_FENCE},
    ("try again when memory runs out", "CUDA_ERROR_UNKNOWN"): _FENCE,
    # What is dropped is freed later where the driver refuses the mode for that.
    ("a cache", "CUDA_ERROR_OUT_OF_MEMORY"): {"cuMemAllocFromPoolAsync", "cuThreadExchangeStreamCaptureMode"},
    ("a cache", "CUDA_ERROR_UNKNOWN"): {"cuThreadExchangeStreamCaptureMode"},
    ("pointer attributes", "CUDA_ERROR_INVALID_VALUE"): {"cuPointerGetAttribute", "cuMemPoolGetAccess"},
}
# The error that is the first one when a later call of the scenario fails: memory had run out already.
FIRST = {"try again when memory runs out": "cuMemAllocFromPoolAsync answered CUDA_ERROR_OUT_OF_MEMORY"}
# Calls that may fail without an error, because they are made again later.
RELEASES = {"cuMemPoolDestroy", "cuStreamDestroy", "cuEventDestroy", "cuGraphDestroy", "cuGraphExecDestroy"}
# Questions of fast paths: where the driver refuses one, the slow path makes the call.
QUESTIONS = {"cuCtxGetCurrent", "cuStreamIsCapturing"}


class Attempts(Wrapper):
    """A driver that knows whether a call failed in an attempt of the queue of ends, which makes it again."""

    in_attempt = False

    def _observe(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        before = len(self.wrapped.failed)
        answer = function(*args)
        if len(self.wrapped.failed) > before:
            frames = (frame for frame, _ in traceback.walk_stack(None))
            self.in_attempt = any(frame.f_globals["__name__"] == "streamalloc.core.deferred" for frame in frames)
        return answer


def _sweep(machine: Any, name: str, result: str) -> list[str]:
    """Fail the first call of a scenario, then its second, and so on; what was not as it has to be, call by call."""
    scenario, survived = SCENARIOS[name], SURVIVED.get((name, result), set())
    wrong: list[str] = []
    for number in every(3):
        checked = sd.checked(machine)
        driver: Any = Attempts(sd.faulty(checked, number, result=result))  # type: ignore[abstract]
        driver.listener = None  # a listener gets no cached memory
        raised = _error_of(scenario, driver)
        if not driver.failed:
            return wrong if raised is None else [*wrong, f"without a fault: {raised}"]
        (failed,) = driver.failed
        where = f"call {number} ({failed})"
        if failed == "cuCtxPopCurrent":
            machine.cuCtxPopCurrent()  # the context is still there
        if raised is None:
            if failed not in {*RELEASES, *QUESTIONS, *survived} and not driver.in_attempt:
                wrong.append(f"{where}: no error")
        elif raised not in (f"{failed} answered {result}", FIRST.get(name)) and failed not in survived:
            wrong.append(f"{where}: {raised}")
        for _ in range(2):  # where what was dropped is freed, and pools end that were closed too early for the driver
            sa.Device(0, driver=driver).synchronize()
        end_what_was_dropped()  # also of a session that was garbage when its last stream ended
        # A default stream lives as long as its driver, and keeps closed events to record again.
        kept = spare_events(sa.Device(0, driver=driver).default_stream)
        left = {
            what: rest
            for what, made in checked.outstanding().items()
            if (rest := [one for one in made if one not in kept])
        }
        if left:
            wrong.append(f"{where}: left behind {left}")
        if number % 4 == 0:  # the fault is over: the same driver works
            again = _error_of(scenario, driver)
            if again is not None:
                wrong.append(f"{where}: afterwards {again}")
    raise AssertionError("a scenario without an end")


def _error_of(scenario: Callable[[sa.Device], None], driver: Any) -> str | None:
    """The error of a scenario; all that it made has been dropped afterwards."""
    try:
        with sd.use(driver):
            scenario(sa.Device(0, driver=driver))
    except sa.CudaError as error:
        return f"{error.call} answered {error.name}"
    except Exception as error:
        return repr(error)
    finally:
        gc.collect()
    return None


@pytest.mark.parametrize(
    ("name", "result"),
    [
        *itertools.product(SCENARIOS, ["CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_UNKNOWN"]),
        # These take it for an answer, or for a context that is not current.
        *((name, "CUDA_ERROR_INVALID_VALUE") for name in ("fill", "copy", "pointer attributes")),
    ],
)
@in_a_thread
def test_every_call_fails_in_turn(machine: Any, name: str, result: str) -> None:
    try:
        assert _sweep(machine, name, result) == []
    finally:
        machine.cuDeviceSetMemPool(0, machine.cuDeviceGetDefaultMemPool(0)[1])


@pytest.mark.gpus(2)
@pytest.mark.parametrize("result", ["CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_UNKNOWN"])
def test_between_two_devices(machine: Any, result: str) -> None:
    def scenario(device: sa.Device) -> None:
        peer = sa.Device(1, driver=device.driver)
        with sa.MemoryPool(device) as pool, device.create_stream() as stream, peer.create_stream() as theirs:
            pool.set_access(peer, READWRITE)
            with pool.allocate(64, stream) as buffer, sa.allocate(64, theirs) as other:
                buffer.fill(5)
                theirs.wait(stream)
                other.copy_from(buffer)
                theirs.synchronize()

    name = "between two devices"
    SCENARIOS[name] = scenario
    try:
        assert _sweep(machine, name, result) == []
    finally:
        del SCENARIOS[name]


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
    def test_keeps_no_pool(self, machine: Any, call: str) -> None:
        """The pool whose undo failed is destroyed later, while a program keeps the error."""
        checked = sd.checked(machine)
        refusing = sd.faulty(checked, "cuMemPoolSetAttribute", result="CUDA_ERROR_UNKNOWN")
        faults: Any = Faults(refusing)
        device = sa.Device(0, driver=faults)
        faults.fail(call, nth=2 if call == "cuThreadExchangeStreamCaptureMode" else 1, result="CUDA_ERROR_UNKNOWN")
        with pytest.raises(sa.CudaError) as caught:
            sa.MemoryPool(device, release_threshold=1)
        assert faults.failed == [call]
        faults.stop()
        end_what_was_dropped()
        assert "pool" not in checked.outstanding()
        assert caught.value.call == "cuMemPoolSetAttribute"

    def test_of_a_block(self, machine: Any) -> None:
        """A buffer's free fails while the block's own exception is on its way."""
        driver = sd.faulty(machine, "cuMemFreeAsync", result="CUDA_ERROR_UNKNOWN")
        device = sa.Device(0, driver=driver)
        with device.create_stream() as stream, sa.MemoryPool(device) as pool:
            with pytest.raises((KeyError, sa.CudaError)) as caught, pool.allocate(64, stream):
                raise KeyError("the block's own")
            told = _all_that_is_told(caught.value)
            assert "the block's own" in told and "CUDA_ERROR_UNKNOWN" in told

    def test_of_a_capture(self, machine: Any) -> None:
        driver = sd.faulty(machine, "cuStreamEndCapture", result="CUDA_ERROR_UNKNOWN")
        device = sa.Device(0, driver=driver)
        stream = device.create_stream()
        with pytest.raises(KeyError), stream.capture():
            raise KeyError
        machine.cuGraphDestroy(machine.cuStreamEndCapture(stream._raw)[1])
        stream.close()

    def test_of_a_graph_that_cannot_be_destroyed(self, machine: Any) -> None:
        """The launchable form is destroyed all the same."""
        traced = sd.traced(machine)
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


class Failing:
    """A driver of which one function fails while :attr:`broken`."""

    def __init__(self, driver: Any, function: str, values: int) -> None:
        self._driver = driver
        self._function = function
        self._values = values
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._driver, name)
        if name != self._function:
            return function
        refused = (self._driver.CUresult.CUDA_ERROR_UNKNOWN, *[None] * self._values)
        return lambda *args: refused if self.broken else function(*args)


class TestFiguresThatCannotBeRead:
    """An allocation fails for want of memory, and so does a question about it: the first is what is told."""

    def fail(self, machine: Any, function: str, values: int) -> sa.OutOfMemoryError:
        driver: Any = Failing(machine, function, values)
        device = sa.Device(0, driver=driver)
        with device.create_stream() as stream, sa.MemoryPool(device, GROWTH) as pool:
            driver.broken = True
            try:
                with pytest.raises(sa.OutOfMemoryError) as caught:
                    pool.allocate(2 * GROWTH, stream)
            finally:
                driver.broken = False
        error = caught.value
        assert (error.requested, error.limit, error.name) == (2 * GROWTH, GROWTH, "CUDA_ERROR_OUT_OF_MEMORY")
        return error

    def test_of_the_pool(self, machine: Any) -> None:
        error = self.fail(machine, "cuMemPoolGetAttribute", 1)
        assert (error.used, error.reserved) == (None, None) and error.total

    @pytest.mark.parametrize(("function", "values"), [("cuMemGetInfo", 2), ("cuCtxPushCurrent", 0)])
    def test_of_the_device(self, machine: Any, function: str, values: int) -> None:
        error = self.fail(machine, function, values)
        assert (error.free, error.total) == (None, None) and error.used == 0

    def test_of_the_stream(self, machine: Any) -> None:
        self.fail(machine, "cuStreamIsCapturing", 1)


@pytest.mark.parametrize("nth", [1, 2], ids=["asking about the stream", "allocating"])
@in_a_thread  # without a current context, as the fast path of default streams needs one
def test_an_allocation_whose_context_stays_is_freed_at_once(machine: Any, nth: int) -> None:
    """Not when garbage is collected: the error is in no cycle with the frames that hold what was made."""
    faulty: Any = sd.faulty(machine, "cuCtxPopCurrent", nth)
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
