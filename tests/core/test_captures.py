"""Captures that begin on another thread at any call of what was left for later: none is broken, nobody else fails."""

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc, vmm
from streamalloc.core.deferred import deferred_queue, work
from streamalloc.core.fence import all_work
from streamalloc.core.graph import Capture
from streamalloc.core.library_streams import as_stream
from streamalloc.core.session import session_of
from streamalloc.driver.bindings import cuda
from streamalloc.driver.wrappers import Wrapper
from streamalloc.interop.bridge import FreeAfterAll, free_after_all
from streamalloc.interop.loans import Lent
from streamalloc.pool.internal import OnceIdle, collect_dropped
from streamalloc.testing import Gate
from tests.support import GROWTH, KEEP, each_raises, holds, names

PAGE = 2 << 20
RELAXED = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


class BeforeCall(Wrapper):
    """A driver that tells the name of each call before it makes it."""

    def __init__(self, driver: Any) -> None:
        super().__init__(driver)
        self.tell: Callable[[str], object] = len

    def _observe(self, name: str, function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.tell(name)
        return function(*args)  # type: ignore[no-any-return]


class Other:
    """A thread that captures a stream of which this library does not know."""

    def __init__(self, machine: Any, stream: sa.Stream) -> None:
        self._machine, self._raw = machine, cuda.CUstream(stream.handle)
        self._thread = ThreadPoolExecutor(1, initializer=stream.device.current().__enter__)

    def begin(self) -> None:
        """Begin a capture. What breaks one in another mode breaks this one."""
        mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        assert not self._thread.submit(self._machine.cuStreamBeginCapture, self._raw, mode).result()[0]

    def end(self) -> str:
        """End it: the driver's answer."""
        answer = self._thread.submit(self._machine.cuStreamEndCapture, self._raw).result()
        if not answer[0]:
            self._machine.cuGraphDestroy(answer[1])
        return str(answer[0].name)


Steps = Iterator[Callable[[], object]]
Scene = Callable[[sa.Device], Steps]


def _dropping(device: sa.Device, held: list[Any]) -> Callable[[], None]:
    """Drop objects, and come by a point of work that makes no other call."""

    def drop() -> None:
        held.clear()
        gc.collect()
        work(session_of(device))

    return drop


def _closed_pool(stream_of: Callable[[sa.Device], sa.Stream]) -> Scene:
    def steps(device: sa.Device) -> Steps:
        with stream_of(device) as stream:
            pool = sa.MemoryPool(device, release_threshold=KEEP)
            pool.allocate(4096, stream).free()
            yield pool.close
            yield _dropping(device, [])
            stream.synchronize()

    return steps


def _dropped(make: Callable[[sa.Device, sa.MemoryPool, sa.Stream], list[Any]]) -> Scene:
    def steps(device: sa.Device) -> Steps:
        with sa.MemoryPool(device) as pool, device.create_stream() as stream:
            yield _dropping(device, make(device, pool, stream))

    return steps


def _virtual_memory(device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream) -> list[Any]:
    buffer = vmm.GrowableBuffer(device, 2 * PAGE, PAGE)
    buffer.fill(1, stream)
    return [buffer, vmm.PhysicalMemory(device, PAGE)]


def _memory_of_a_closed_stream(device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream) -> list[Any]:
    with device.create_stream() as closed:
        return [pool.allocate(4096, closed)]


def _dropped_pool(device: sa.Device) -> Steps:
    with device.create_stream() as stream:
        buffer = sa.MemoryPool(device, release_threshold=KEEP).allocate(4096, stream)
        stream.synchronize()
        del buffer
        gc.collect()
        yield _dropping(device, [])


def _dropped_stream_with_cached_memory(device: sa.Device) -> Steps:
    with sa.CachingAllocator(sa.MemoryPool(device)) as cache:
        held = [device.create_stream()]
        cache.allocate(4096, held[0]).free()
        yield _dropping(device, held)


def _cached_memory_of_a_closed_stream(device: sa.Device) -> Steps:
    with sa.CachingAllocator(sa.MemoryPool(device)) as cache:
        with device.create_stream() as stream:
            held = [cache.allocate(4096, stream)]
        del stream

        def drop() -> None:
            held.clear()
            collect_dropped(cache)
            work(session_of(device))

        yield drop


def _closed_with_cached_memory(name: str) -> Scene:
    def steps(device: sa.Device) -> Steps:
        with device.create_stream() as stream, sa.CachingAllocator(sa.MemoryPool(device)) as cache:
            cache.allocate(4096, stream).free()
            yield stream.close if name == "stream" else cache.close

    return steps


def _free_after_all_work(device: sa.Device) -> Steps:
    with sa.MemoryPool(device) as pool, device.create_stream() as stream:
        buffer = pool.allocate(4096, stream)
        yield lambda: free_after_all(FreeAfterAll(buffer))


def _call_that_waits_for_idle_devices(device: sa.Device) -> Steps:
    with device.create_stream() as stream, sa.MemoryPool(device) as pool:
        pool.allocate(4096, stream).free()
        yield OnceIdle(session_of(device), lambda: None).attempt


def _dropped_stream(device: sa.Device) -> Steps:
    with Gate(device) as gate:
        held = [device.create_stream()]
        gate.hold(held[0])
        yield _dropping(device, held)
        gate.open()


SCENES: dict[str, Scene] = {
    "a pool is closed": _closed_pool(sa.Device.create_stream),
    "a pool is closed after a free on a default stream": _closed_pool(lambda device: device.default_stream),
    "a pool is closed after a free on a per-thread stream": _closed_pool(lambda device: device.per_thread_stream),
    "a pool was dropped": _dropped_pool,
    "a stream is dropped that has cached memory": _dropped_stream_with_cached_memory,
    "cached memory comes back on a closed stream": _cached_memory_of_a_closed_stream,
    "a buffer is dropped whose stream was closed": _dropped(_memory_of_a_closed_stream),
    "a cache is closed": _closed_with_cached_memory("cache"),
    "a stream is closed that has cached memory": _closed_with_cached_memory("stream"),
    "virtual memory is dropped": _dropped(_virtual_memory),
    "a loan ends whose stream is not known": _dropped(
        lambda device, pool, stream: [Lent(pool.allocate(4096, stream).view_as(np.uint8), None)]
    ),
    "memory is freed after the work of all streams": _free_after_all_work,
    "a call waits until the devices are idle": _call_that_waits_for_idle_devices,
    "a stream is dropped with work": _dropped_stream,
}


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "non-blocking"])
@pytest.mark.parametrize("name", SCENES)
def test_of_another_library_at_each_call(machine: Any, name: str, blocking: bool) -> None:
    """A capture begins before the n-th call of each step, once for each n that some step reaches."""
    this, number, reached, made = threading.get_ident(), 0, True, list[str]()

    def tell(call: str) -> None:
        if threading.get_ident() == this:
            made.append(call)
            if len(made) == number + 1:
                other.begin()

    with sa.Device(0, driver=machine).create_stream(blocking=blocking) as theirs:
        other = Other(machine, theirs)
        while reached:
            driver: Any = BeforeCall(machine)
            reached = False
            device = sa.Device(0, driver=driver)
            for step in SCENES[name](device):
                made.clear()
                driver.tell = tell
                step()
                driver.tell = len
                if len(made) > number:
                    reached = True
                    assert other.end() == "CUDA_SUCCESS", (number, made[number])
            device.synchronize()
            device.synchronize()
            number += 1
    assert number > 2


class TestBlockingStreams:
    """Captured: allocations and frees on the legacy stream would invalidate the capture."""

    @pytest.mark.parametrize("whose", ["ours", "another library's"])
    def test_a_drop_is_deferred(self, machine: Any, device: sa.Device, pool: sa.MemoryPool, whose: str) -> None:
        buffer: Any = pool.allocate(4096, device.default_stream)
        used = pool.statistics().used
        with _capturing(machine, device, whose):
            del buffer
            gc.collect()
        device.synchronize()
        assert used == 4096 and pool.statistics().used == 0

    def test_what_is_explicit_is_refused_in_ours(self, machine: Any, device: sa.Device, pool: sa.MemoryPool) -> None:
        with device.current():
            buffer = pool.allocate(4096, device.default_stream)
            with _capturing(machine, device, "ours"):
                each_raises(sa.CaptureError, lambda: pool.allocate(4096, device.default_stream), buffer.free)
                assert not buffer.freed
            buffer.free()
            pool.allocate(4096, device.default_stream).free()


def test_a_whole_context_is_not_recorded_during_a_capture_of_ours(machine: Any, device: sa.Device) -> None:
    with _capturing(machine, device, "ours"):
        assert all_work(device) == ()
    assert all_work(device)[0].query()


def test_a_record_of_a_whole_context_waits_while_a_capture_begins(device: sa.Device) -> None:
    queue = deferred_queue(session_of(device))
    with ThreadPoolExecutor(1) as pool:
        with queue.beginning:
            recorded = pool.submit(all_work, device)
            assert not wait([recorded], 0.05).done
        (event,) = recorded.result()
        assert event.query()


@contextlib.contextmanager
def _capturing(machine: Any, device: sa.Device, whose: str) -> Iterator[None]:
    """A block during which a blocking stream is captured: the capture ends well."""
    with device.create_stream(blocking=True) as stream:
        if whose == "ours":
            with stream.capture("thread_local") as graph:
                yield
            assert graph.nodes == []
        else:
            other = Other(machine, stream)
            other.begin()
            yield
            assert other.end() == "CUDA_SUCCESS"


# -- ends and commits on one thread, while another thread captures -----------------------------------------------------


def _left(owner: Any) -> Callable[[], None]:
    """The end of a block of the owner."""

    def leave() -> None:
        with owner:
            pass
        assert owner.closed

    return leave


def _mapping(device: sa.Device, stream: sa.Stream) -> Steps:
    with vmm.PhysicalMemory(device, PAGE) as memory, vmm.AddressRange(PAGE, driver=device.driver) as addresses:
        mapping = addresses.map(memory, access=device)
        yield lambda: mapping.revoke(device)
        yield mapping.close


def _growable(device: sa.Device, stream: sa.Stream) -> Steps:
    buffer = vmm.GrowableBuffer(device, 4 * PAGE, 2 * PAGE, chunk=PAGE, stream=stream)
    buffer.fill(1)
    yield lambda: (buffer.evict(), buffer.restore())
    yield lambda: buffer.resize(PAGE)
    yield _left(buffer)


def _pages(device: sa.Device, stream: sa.Stream) -> Steps:
    with vmm.PageArena(device) as arena:
        space = arena.space(8 * PAGE, stream=stream)
        space.commit([0, 1])
        space.alias(2, space, 1)
        yield lambda: space.make_private(2)
        yield lambda: space.release([0])
        yield _left(space)


def _store(device: sa.Device, stream: sa.Stream) -> Steps:
    name = f"beside-captures-{os.getpid()}"
    with ipc.Store.serve(name, driver=device.driver), ipc.Store(name) as store:

        def write() -> None:
            with store.write("key", device, True, stream=stream) as writer:
                writer.allocate("a", 1024, np.uint8).fill(1)

        def use() -> None:
            write()
            write()
            with pytest.raises(ZeroDivisionError), store.write("key", device, True, stream=stream) as it:
                it.allocate("a", 1024, np.uint8).fill(1)
                raise ZeroDivisionError
            with store.open("key", device, stream=stream) as weights:
                weights.detach()
                weights.attach(latest=True)
            assert weights.closed

        yield use
        assert [entry.epoch for entry in store.list()] == [2]


def _shared(device: sa.Device, stream: sa.Stream) -> Steps:
    kind = sa.MemHandleType.POSIX_FILE_DESCRIPTOR
    with (
        sa.MemoryPool(device, handle_types=kind) as pool,
        vmm.GrowableBuffer(device, PAGE, PAGE, handle_types=kind, stream=stream) as growable,
    ):
        buffer = pool.allocate(64, stream)

        def use() -> None:
            for thing in (buffer, growable, buffer):
                shared = ipc.share(thing)
                handles = [ipc.Fd(os.dup(fd.fileno())) for fd in shared.fds]
                ipc.open(shared.to_bytes(), handles=handles, stream=stream).close()
            buffer.free()

        yield use


def _exhausted(device: sa.Device, stream: sa.Stream) -> Steps:
    with (
        device.create_stream() as other,
        sa.MemoryPool(device, GROWTH, release_threshold=KEEP, on_oom="sync-trim-retry") as pool,
    ):
        pool.allocate(GROWTH, other).free()
        yield lambda: pool.allocate(GROWTH, stream).free()


def _other_work(device: sa.Device, stream: sa.Stream) -> Steps:
    with stream.capture() as graph:
        pass
    graph.instantiate()
    pool = sa.MemoryPool(device)

    def use() -> None:
        with pool.allocate(4096, stream) as buffer:
            buffer.fill(1)
            with stream.record() as event:
                stream.wait(event)
            stream.synchronize()
            assert stream.query()
        with device.create_stream() as other:
            freed_later = pool.allocate(4096, other)
        freed_later.close()
        graph.close()
        pool.close()

    yield use


def _figures(device: sa.Device, stream: sa.Stream) -> Steps:
    """Questions, as a thread that exports metrics asks them, and calls that make things."""
    with sa.MemoryPool(device) as pool, sa.CachingAllocator(pool) as cache, vmm.SleepGroup(device) as group:
        group.allocate(PAGE, stream)
        begin, end = stream.record(timing=True), stream.record(timing=True)
        cache.allocate(4096, stream).free()

        def ask() -> None:
            end.synchronize()
            assert end.query() and end.elapsed_since(begin) >= 0
            assert pool.statistics().used <= pool.attributes.reserved_mem_current
            pool.attributes.release_threshold = 0
            pool.reset_peaks()
            assert pool.access(device) is sa.MemAccess.READWRITE
            pool.set_access(device, sa.MemAccess.READWRITE)
            assert cache.statistics().in_use == 0
            cache.trim()
            pool.trim()
            assert device.memory_info().free < device.memory_info().total
            assert group.resident().total > 0
            assert stream.priority <= 0 and not stream.capturing

        def make() -> None:
            with sa.MemoryPool(device) as other, sa.PlainMemory(device).allocate(4096, stream):
                other.allocate(4096, stream).free()
            sa.Event(device, timing=True).close()
            with device.create_stream() as new:
                new.record().close()

        yield ask
        yield make


ENDS: dict[str, Callable[[sa.Device, sa.Stream], Steps]] = {
    "work of another stream": _other_work,
    "a mapping": _mapping,
    "a growable buffer": _growable,
    "pages": _pages,
    "a store": _store,
    "shared memory": _shared,
    "exhausted memory": _exhausted,
    "figures": _figures,
}


@pytest.mark.parametrize("mode", ["thread_local", "relaxed", "global"])
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "non-blocking"])
@pytest.mark.parametrize("name", ENDS)
def test_an_end_beside_a_capture_on_another_thread(device: sa.Device, name: str, mode: Any, blocking: bool) -> None:
    with device.create_stream() as stream, device.create_stream(blocking=blocking) as captured:
        for end in ENDS[name](device, stream):
            stream.synchronize()
            capture = Capture(captured, mode)
            with ThreadPoolExecutor(1) as thread:
                thread.submit(capture.__enter__).result()
                try:
                    end()
                finally:
                    thread.submit(capture.__exit__, None, None, None).result()
            assert capture.graph.nodes == []
            capture.graph.close()


def _exported(own: sa.Stream) -> int:
    with sa.MemoryPool(own.device) as pool, pool.allocate(64, own) as buffer:
        return int(buffer.__cuda_array_interface__["stream"])


def _join_by_an_event_of_ours(driver: Any, own: sa.Stream, foreign: Any) -> None:
    with as_stream(foreign, session_of(own)).record() as event:
        own.wait(event)


def _join_by_their_event(driver: Any, own: sa.Stream, foreign: Any) -> None:
    event = driver.cuEventCreate(2)[1]
    assert not driver.cuEventRecord(event, foreign)[0]
    own.wait(event)
    assert not driver.cuEventDestroy(event)[0]


def _join_by_our_event_that_they_record(driver: Any, own: sa.Stream, foreign: Any) -> None:
    with own.device.create_event() as event:
        assert not driver.cuEventRecord(cuda.CUevent(event.handle), foreign)[0]
        own.wait(event)


LENT: dict[str, Callable[[sa.Stream], int]] = {
    "handle": lambda own: own.handle,
    "__cuda_stream__": lambda own: own.__cuda_stream__()[1],
    "array interface": _exported,
}
JOINED: dict[str, Callable[[Any, sa.Stream, Any], None]] = {
    "wait for their stream": lambda driver, own, foreign: own.wait(foreign),
    "wait for an event on their stream": _join_by_an_event_of_ours,
    "wait for their event": _join_by_their_event,
    "wait for our event that they record": _join_by_our_event_that_they_record,
}
"""Ways by which a stream of ours becomes part of a capture of other code's stream."""


@contextlib.contextmanager
def _capture_by_other_code(driver: Any, own: sa.Stream, way: str) -> Iterator[Callable[[], None]]:
    """A block in which a stream of ours is part of a capture. Its graph can be launched once, after the block."""

    def launch() -> None:
        instance = driver.cuGraphInstantiate(graph, 0)[1]
        assert not driver.cuGraphLaunch(instance, known)[0]
        own.device.synchronize()
        assert not driver.cuGraphExecDestroy(instance)[0] and not driver.cuGraphDestroy(graph)[0]
        assert not driver.cuStreamDestroy(foreign)[0]

    result, foreign = driver.cuStreamCreate(1)
    known = cuda.CUstream(LENT[way](own)) if way in LENT else foreign
    assert not result and not driver.cuStreamBeginCapture(known, RELAXED)[0]
    if way in JOINED:
        JOINED[way](driver, own, foreign)
    yield launch
    if way in JOINED:
        with own.record() as event:
            assert not driver.cuStreamWaitEvent(foreign, cuda.CUevent(event.handle), 0)[0]
    result, graph = driver.cuStreamEndCapture(known)
    assert not result


class TestStreamsOfOursThatOtherCodeCaptures:
    """Known by their handle, or part of a capture since a wait: only the driver can tell."""

    @pytest.mark.parametrize("checked", [False, pytest.param(True, id="checked")])
    @pytest.mark.parametrize("allocator", ["pool", "cache"])
    @pytest.mark.parametrize("way", [*LENT, *JOINED])
    def test_memory(self, machine: Any, way: str, allocator: str, checked: bool) -> None:
        driver: Any = sd.checked(machine) if checked else machine
        device = sa.Device(0, driver=driver)
        with device.current(), device.create_stream() as own, sa.MemoryPool(device, release_threshold=KEEP) as pool:
            with sa.CachingAllocator(pool) as cache:
                source: Any = cache if allocator == "cache" else pool
                kept, dropped, free = ([source.allocate(4096, own)] for _ in range(3))
                free.pop().free()
                with _capture_by_other_code(driver, own, way) as launch:
                    inside = source.allocate(4096, own)
                    address = inside.address
                    inside.fill(9)
                    inside.free()
                    assert (type(inside), inside.owner, inside.freed) == (sa.GraphBuffer, None, True)
                    assert inside.address == address  # which stays true for each launch
                    with pytest.raises(sa.ClosedError):
                        inside.fill(1)
                    if allocator == "cache" and not checked:
                        kept.pop().free()  # a cache takes it back, and nobody gets it in the capture
                    each_raises(sa.CaptureError, own.close, *[buffer.free for buffer in kept])
                    dropped.clear()
                    gc.collect()
                    work(session_of(device))
                assert not own.capturing and not any(buffer.freed for buffer in kept)
                kept += [source.allocate(4096, own) for _ in range(3)]
                for buffer in kept:
                    buffer.fill(1)
                launch()
                assert all(holds(buffer, 1) for buffer in kept)
                for buffer in kept:
                    buffer.free()
                device.synchronize()
            assert pool.statistics().used == 0

    @pytest.mark.parametrize("end", ["close", "drop"])
    def test_a_stream_that_ends(self, traced: Any, device: sa.Device, pool: sa.MemoryPool, end: str) -> None:
        """It is destroyed after the capture, and its end becomes no part of that."""
        own: Any = device.create_stream()
        raw = cuda.CUstream(own.handle)
        pool.allocate(4096, own).free()
        own.synchronize()
        assert not traced.cuStreamBeginCapture(raw, RELAXED)[0]
        if end == "close":
            each_raises(sa.CaptureError, own.close, match="end the capture first")
        else:
            del own
            gc.collect()
        work(session_of(device))
        assert "cuStreamDestroy" not in names(traced)
        result, graph = traced.cuStreamEndCapture(raw)
        assert not result and not traced.cuGraphGetNodes(graph, 0)[2] and not traced.cuGraphDestroy(graph)[0]
        if end == "close":
            own.close()
        device.synchronize()
        assert names(traced).count("cuStreamDestroy") == 1

    def test_a_fork_by_others(self, machine: Any, device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        """Memory of the other stream belongs to the graph too, and each stream may free it."""
        with device.current(), device.create_stream() as side:
            with stream.capture() as graph:
                with stream.record() as event:
                    assert not machine.cuStreamWaitEvent(side.handle, cuda.CUevent(event.handle), 0)[0]
                buffer = pool.allocate(4096, side)
                stream.wait(side)
                buffer.free(stream)
            assert graph.nodes == ["MEM_ALLOC", "MEM_FREE"] and type(buffer) is sa.GraphBuffer
            graph.close()


def test_streams_of_ours_ask_nothing(traced: Any, device: sa.Device, stream: sa.Stream, pool: sa.MemoryPool) -> None:
    """Work between streams of ours, their exports without a stream, and the package's own use of handles."""
    with device.create_stream() as other, pool.allocate(64, stream) as buffer:
        stream.wait(other)
        stream.wait(other.record())
        buffer.__dlpack__(stream=-1)
        buffer.fill(1, other)
        assert repr(stream) and not stream.capturing
        traced.calls.clear()
        pool.allocate(64, stream).free()
        assert names(traced) == ["cuMemAllocFromPoolAsync", "cuMemFreeAsync"]


@pytest.mark.parametrize("kind", ["legacy", "per-thread"])
@pytest.mark.parametrize("act", ["allocate", "free"])
def test_a_capture_that_begins_while_the_context_is_read(
    device: sa.Device, pool: sa.MemoryPool, monkeypatch: pytest.MonkeyPatch, kind: str, act: str
) -> None:
    session, began, done = session_of(device), threading.Event(), threading.Event()
    stream = device.default_stream if kind == "legacy" else device.per_thread_stream
    read = session.cuCtxGetCurrent
    threads: list[Future[None]] = []

    def capture() -> None:
        with device.create_stream(blocking=True) as blocking, blocking.capture("global") as graph:
            began.set()
            done.wait(5)
        graph.close()  # raises above if the capture was invalidated

    def read_and_capture() -> Any:
        answer = read()
        if not threads:
            threads.append(executor.submit(capture))
            began.wait(5)
        return answer

    with device.current(), ThreadPoolExecutor(1) as executor:
        buffer = pool.allocate(64, stream)
        stream.synchronize()
        monkeypatch.setattr(session, "cuCtxGetCurrent", read_and_capture)
        with contextlib.suppress(sa.CaptureError):
            buffer.free() if act == "free" else pool.allocate(64, stream).free()
        monkeypatch.undo()
        done.set()
        threads[0].result()
        buffer.close()
        stream.synchronize()
