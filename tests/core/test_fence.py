"""Fences mean the work queued before they were made, whatever happens to its streams; ``settle``, what was dropped."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.core.fence import Fence, ordered_after, queue_behind, queue_if_allowed, record_uncaptured
from streamalloc.core.internal import Deferred, deferred_queue
from streamalloc.core.session import members, session_of
from streamalloc.driver.internal import cuda
from streamalloc.testing import Faults, Gate, settle
from tests.support import MiB, each_raises, eventually, executed, in_threads, names, pending

ENDS: dict[str, Callable[[sa.Stream], Any]] = {
    "a stream": lambda stream: [stream],
    "an event": lambda stream: [stream.record()],
    "both": lambda stream: [stream.record(), stream],
    "all known": lambda stream: None,
}


@pytest.mark.parametrize("name", ENDS)
def test_ends_with_the_work_before_it(device: sa.Device, stream: sa.Stream, gate: Gate, name: str) -> None:
    gate.hold(stream)
    fence = Fence(session_of(device), ENDS[name](stream))
    assert not fence.done()
    with device.create_stream() as later, device.create_stream() as unordered:
        fence.precede(later)
        assert pending(later) and executed(unordered)
        gate.open()
        fence.synchronize()
        assert fence.done() and executed(later)
    gate.hold(stream)
    fence.synchronize()  # does not wait for later work
    assert fence.done() and not stream.query()


@pytest.mark.parametrize("how", ["drop", "close"])
def test_a_stream_that_ends_leaves_its_work(device: sa.Device, gate: Gate, how: str) -> None:
    stream = device.create_stream()
    gate.hold(stream)
    early = Fence(session_of(device), [stream])
    if how == "close":
        stream.close()
    del stream
    gc.collect()
    late = Fence(session_of(device))
    assert not early.done() and not late.done()
    gate.open()
    late.synchronize()
    assert early.done() and late.done()


def test_a_captured_stream_is_recorded_after_its_capture(device: sa.Device, stream: sa.Stream, gate: Gate) -> None:
    with device.create_stream() as later:
        with stream.capture() as graph:
            fences = [Fence(session_of(device), [stream]), Fence(session_of(device))]
            for fence in fences:
                assert not fence.done()
                fence.synchronize()  # does not wait for it
                with pytest.raises(sa.CaptureError):
                    fence.precede(later)
        assert graph.nodes == [], "a record is no node"
        gate.hold(stream)
        assert not any(fence.done() for fence in fences)
        gate.open()
        for fence in fences:
            fence.synchronize()
            assert fence.done()
            fence.precede(later)


def test_an_event_that_its_owner_closes(device: sa.Device, stream: sa.Stream, gate: Gate) -> None:
    """Nobody knows whether its work is done: the fence stands for all known streams then."""
    gate.hold(stream)
    event = stream.record()
    event._spare = None  # so that it is destroyed
    asked, first, waited_for = fences = [Fence(session_of(device), [event]) for _ in range(3)]
    event.close()
    with device.create_stream() as later:
        assert not asked.done()
        first.precede(later)
        assert pending(later)
        threading.Timer(0.05, gate.open).start()
        waited_for.synchronize()
        assert stream.query() and executed(later)
        for fence in fences:
            fence.synchronize()
            assert eventually(fence.done)


def test_a_stream_of_another_thread_that_was_captured(device: sa.Device, gate: Gate) -> None:
    """The fence of all known streams records it later, on any thread: after the default streams of all threads."""
    theirs: Any = device.driver
    mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED

    def make() -> Fence:
        with device.current():
            gate.hold(device.per_thread_stream)
            theirs.cuStreamBeginCapture(cuda.CUstream(2), mode)
            fence = Fence(session_of(device))
            result, graph = theirs.cuStreamEndCapture(cuda.CUstream(2))
            assert not result
            theirs.cuGraphDestroy(graph)
            return fence

    with ThreadPoolExecutor(1) as thread:
        fence = thread.submit(make).result()
        assert not fence.done()
        gate.open()
        fence.synchronize()
        assert fence.done()
        thread.submit(lambda: device.per_thread_stream.synchronize()).result()


def test_an_event_of_another_thread_that_its_owner_closes(device: sa.Device, gate: Gate) -> None:
    """Its work is on that thread's default stream, which is a known stream of that thread alone."""

    def record() -> sa.Event:
        gate.hold(device.per_thread_stream)
        event = device.per_thread_stream.record()
        event._spare = None
        return event

    with ThreadPoolExecutor(1) as thread:
        event = thread.submit(record).result()
        fence = Fence(session_of(device), [event])
        event.close()
        assert not fence.done()
        gate.open()
        fence.synchronize()
        assert fence.done()
        thread.submit(lambda: device.per_thread_stream.synchronize()).result()


def test_a_default_stream_is_recorded_after_a_capture(device: sa.Device, stream: sa.Stream, gate: Gate) -> None:
    """A call that names one would invalidate captures of blocking streams."""
    mine = device.per_thread_stream
    gate.hold(mine)
    with stream.capture():
        fence = Fence(session_of(device), [mine])
        assert not fence.done()
    assert not fence.done()
    gate.open()
    fence.synchronize()
    assert fence.done() and mine.query()


def test_work_that_a_thread_is_still_queueing(device: sa.Device, stream: sa.Stream, gate: Gate) -> None:
    fence = Fence(session_of(device), [stream], queueing=True)
    assert executed(stream) and not fence.done()
    each_raises(sa.InUseError, fence.synchronize)
    fence.record()
    with device.create_stream() as later:
        fence.precede(later)  # after what is queued so far
        assert executed(later)
        gate.hold(stream)
        fence.precede(later)
        assert pending(later)
        waiter = threading.Thread(target=fence.synchronize)
        waiter.start()
        assert waiter.is_alive() and not fence.done()
        fence.queueing = 0
        assert not fence.done()
        gate.open()
        waiter.join()
        assert fence.done()


def test_a_refused_record_is_made_later(device: sa.Device, stream: sa.Stream, streamalloc_faults: Faults) -> None:
    with device.create_stream() as later:
        streamalloc_faults.fail("cuEventRecord", times=2)
        fence = Fence(session_of(device), [stream])
        with pytest.raises(sa.OutOfMemoryError):
            fence.precede(later)
        fence.precede(later)
        fence.synchronize()
        assert fence.done()


def _legacy_work(device: sa.Device, gate: Gate) -> object:
    """Memory whose end waits for the legacy stream."""
    memory = vmm.GrowableBuffer(device, capacity=32 * MiB, nbytes=2 * MiB)
    gate.hold(device.default_stream)
    return memory


def _closed_stream(device: sa.Device, gate: Gate) -> object:
    """Memory of a stream that is closed before its work is done."""
    pool = sa.MemoryPool(device)
    with device.create_stream() as stream:
        memory = pool.allocate(64, stream)
        gate.hold(stream)
    return memory


@pytest.mark.parametrize("memory_of", [_legacy_work, _closed_stream])
def test_without_memory_for_a_stream_dropped_memory_ends(
    device: sa.Device, gate: Gate, streamalloc_faults: Faults, memory_of: Callable[[sa.Device, Gate], object]
) -> None:
    """A stream needs memory of the device. Memory that is dropped must not need any to end."""
    before = settle()
    memory = memory_of(device, gate)
    streamalloc_faults.fail("cuStreamCreateWithPriority", times=1000)
    del memory
    assert settle() > before
    gate.open()
    device.synchronize()
    assert settle() == before


def test_no_call_names_a_context_or_the_legacy_stream_in_a_capture(traced: Any, device: sa.Device) -> None:
    device.default_stream.synchronize()
    with device.create_stream(blocking=True) as stream, device.create_stream() as other:
        with stream.capture() as graph:
            traced.calls.clear()
            fence = Fence(session_of(device))
            assert not fence.done()
            fence.synchronize()
        assert graph.nodes == [] and names(traced, "cuCtxRecordEvent", "cuCtxSynchronize") == []
        other.synchronize()
        fence.synchronize()
        assert fence.done()


def test_threads_that_ask_at_once(device: sa.Device, stream: sa.Stream, gate: Gate) -> None:
    gate.hold(stream)
    fence = Fence(session_of(device))
    for done in (False, True):
        assert in_threads(*[fence.done] * 4) == [done] * 4
        gate.open()
        in_threads(*[fence.synchronize] * 4)


def test_ends_what_was_dropped_of_every_driver(machine: Any) -> None:
    drivers = [sd.checked(machine), sd.checked(machine)]
    for driver in drivers:
        pool = sa.MemoryPool(sa.Device(0, driver=driver))
        holder: list[Any] = [pool]
        holder.append(holder)
        del pool, holder
    before = settle()
    for driver in drivers:
        driver.assert_nothing_left()
    assert before == settle()


def test_says_what_waits(device: sa.Device, stream: sa.Stream, gate: Gate) -> None:
    before = settle()
    pool = sa.MemoryPool(device)
    buffer = pool.allocate(64, stream)
    gate.hold(stream)
    buffer.free()
    pool.close()
    assert settle() == before + 1
    gate.open()
    stream.synchronize()
    assert settle() == before


def test_raises_what_a_signal_handler_raises(device: sa.Device) -> None:
    class Interrupted(Deferred):
        raised = False

        def attempt(self) -> bool:
            if not self.raised:
                self.raised = True
                raise TimeoutError("by a signal handler")
            return True

    deferred_queue(session_of(device)).submit(Interrupted())
    each_raises(TimeoutError, settle)
    settle()


def test_a_list_of_streams_ends_at_the_limit_of_recursion() -> None:
    """A RecursionError is a RuntimeError, as is that of a set which another thread changes meanwhile."""
    refusals = [RecursionError("too deep"), RuntimeError("Set changed size during iteration")]

    class Changing(weakref.WeakSet[sa.Stream]):
        def __iter__(self) -> Iterator[sa.Stream]:
            if refusals:
                raise refusals.pop()
            return super().__iter__()

    with pytest.raises(RecursionError):
        members(Changing())
    assert members(Changing()) == []


def test_a_close_beside_an_item_that_holds_up_captures(device: sa.Device) -> None:
    """The stream is closed with an item left that uses the default stream; the other item records on the stream."""
    closing, stream = threading.Event(), device.create_stream()

    class UsesDefault(Deferred):
        def attempt(self) -> bool:
            closing.set()
            return queue_if_allowed(device.default_stream, lambda: None, mine=True)

    def record(_: sa.Stream) -> object:
        closer.start()
        assert closing.wait(5)
        return record_uncaptured(stream)

    queue_behind(stream, UsesDefault())
    closer = threading.Thread(target=stream.close, daemon=True)
    recorder = threading.Thread(target=ordered_after, args=(device.default_stream, record), daemon=True)
    recorder.start()
    recorder.join(5)
    closer.join(5)
    assert not (recorder.is_alive() or closer.is_alive())


def test_a_stream_of_other_code_is_left_to_its_threads(device: sa.Device) -> None:
    """Without a wait for the lock, which another thread may hold."""
    beginning = deferred_queue(session_of(device)).beginning
    with beginning:
        assert in_threads(lambda: queue_if_allowed(device.default_stream, lambda: None)) == [False]
