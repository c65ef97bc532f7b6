"""Libraries that allocate from our memory: from handles of pools, and by callbacks; also for another process."""

import contextlib
import functools
import gc
import itertools
import sys
import time
import weakref
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import interop, vmm
from streamalloc.core.internal import deferred_queue
from streamalloc.core.session import session_of
from streamalloc.driver.bindings import cuda
from streamalloc.interop import rmm as rmm_bridge
from streamalloc.interop import torch as torch_bridge
from streamalloc.interop.bridge import BATCH, FreeAfterAll, Ledger, Sources
from streamalloc.interop.cupy import _in_relaxed_mode
from streamalloc.testing import Faults, Gate
from tests.interop.conftest import Get
from tests.interop.libraries import LIBRARIES, Library, LibraryStream
from tests.interop.standins import STANDINS
from tests.ipc.conftest import partner, processes  # noqa: F401  (fixtures)
from tests.ipc.support import shared_pool
from tests.processes import Partner, holds_there
from tests.support import GROWTH, KEEP, MiB, captured, each_raises, holds, in_threads, later_memory_is_whole

N = 2 * MiB


def used(pool: sa.MemoryPool) -> int:
    gc.collect()
    return pool.statistics().used


def ended(library: Library, bridge: interop.Bridge, device: sa.Device) -> None:
    """Have the library drop and give back what it keeps, once all work is done."""
    gc.collect()
    library.finish(bridge)
    device.synchronize()


class ByHandle:
    """The pool as a library uses it that has its handle: past the package."""

    def __init__(self, machine: Any, pool: sa.MemoryPool) -> None:
        self.machine = machine
        self.raw = cuda.CUmemoryPool(pool.handle)

    def __call__(self, name: str, *args: Any) -> Any:
        result, *values = getattr(self.machine, name)(*args)
        assert not result, f"{name}: {result}"
        return values[0] if values else None

    def figure(self, name: str) -> int:
        attribute = getattr(cuda.CUmemPool_attribute, f"CU_MEMPOOL_ATTR_{name}")
        return int(self("cuMemPoolGetAttribute", self.raw, attribute))

    def allocate(self, nbytes: int, stream: sa.Stream) -> Any:
        return self("cuMemAllocFromPoolAsync", nbytes, self.raw, cuda.CUstream(stream.handle))


@pytest.fixture
def by_handle(machine: Any, pool: sa.MemoryPool) -> ByHandle:
    return ByHandle(machine, pool)


class TestStartAndStop:
    @pytest.mark.parametrize("callbacks", [False, True], ids=["handles", "callbacks"])
    def test_memory_comes_from_the_pool_and_goes_back(
        self, library: Library, pool: sa.MemoryPool, device: sa.Device, callbacks: bool
    ) -> None:
        before = library.make(N)
        assert used(pool) == 0
        with library.use(pool, callbacks=callbacks) as bridge:
            assert "started" in repr(bridge)
            array = library.make(N)
            assert used(pool) >= N
            library.fill(array, 7)
            assert library.holds(array, 7)
        assert "stopped" in repr(bridge) and not bridge.started
        inside = used(pool)
        after = library.make(N)
        assert used(pool) == inside and library.holds(array, 7)
        library.fill(array, 9)
        assert library.holds(array, 9)
        del array, before, after
        ended(library, bridge, device)
        assert used(pool) == 0

    @pytest.mark.parametrize("threshold", [0, 5 * MiB])
    @pytest.mark.parametrize("name", ["cupy", "cuda_core"])
    def test_pools_are_as_before(
        self, get: Get, pool: sa.MemoryPool, device: sa.Device, name: str, threshold: int
    ) -> None:
        """Both libraries raise the release threshold of the pools that they are given, and of current ones."""
        library = get(name)
        pool.attributes.release_threshold = threshold
        current = sa.MemoryPool.current(device)
        before = current.attributes.release_threshold
        with library.use(pool, callbacks=False):
            assert (sa.MemoryPool.current(device) is pool) == (name == "cupy")
        assert pool.attributes.release_threshold == threshold
        assert sa.MemoryPool.current(device) is current and current.attributes.release_threshold == before

    def test_inside_each_other(self, library: Library, device: sa.Device) -> None:
        with sa.MemoryPool(device) as one, sa.MemoryPool(device) as two:
            outer = library.use(one, callbacks=True)
            inner = library.use(two, callbacks=True)
            arrays = [library.make(N)]
            assert (used(one), used(two) >= N) == (0, True)
            inner.stop()
            arrays.append(library.make(N))
            assert used(one) >= N
            if library.name == "torch":  # of which each thread has a route of its own
                inner.start()
                outer.stop()
                before = used(one)
                arrays.append(library.make(N))
                assert used(one) == before
            arrays.clear()
            gc.collect()
            for bridge in (inner, outer):
                library.finish(bridge)
            device.synchronize()

    def test_it_goes_on_when_it_is_dropped(self, library: Library, pool: sa.MemoryPool, device: sa.Device) -> None:
        bridge = weakref.ref(library.use(pool, callbacks=True))
        gc.collect()
        array = library.make(N)
        assert used(pool) >= N
        kept = bridge()
        assert kept is not None
        del array
        library.finish(kept)
        device.synchronize()


class TestSources:
    @pytest.mark.parametrize("wrong", [None, 5, "pool"])
    def test_other_things(self, wrong: Any) -> None:
        for use in (interop.cupy.use, interop.numba.use, interop.torch.use, interop.rmm.use, interop.cuda_core.use):
            with pytest.raises(TypeError, match="allocator"):
                use(wrong)

    def test_none_two_of_a_device_and_host_memory(self, device: sa.Device, pool: sa.MemoryPool) -> None:
        each_raises(ValueError, interop.cupy.use, match="at least one")
        each_raises(ValueError, lambda: interop.cupy.use(pool, sa.MemoryPool.default(device)), match="both of device 0")
        with sa.MemoryPool(sa.MemLocation.host()) as host, pytest.raises(ValueError, match="not in device memory"):
            interop.cupy.use(host)

    def test_of_different_drivers(self, pool: sa.MemoryPool) -> None:
        other = sa.Device(1, driver=sd.simulated(devices=2))
        with sa.MemoryPool(other) as second, pytest.raises(ValueError, match="different drivers"):
            interop.cupy.use(pool, second)

    @pytest.mark.gpus(2)
    def test_one_for_each_device(self, get: Get, pool: sa.MemoryPool, peer: sa.Device) -> None:
        library = get("cupy")
        with sa.MemoryPool(peer) as second:
            for callbacks in (False, True):
                with library.use(pool, second, callbacks=callbacks):
                    with library.module.cuda.Device(1):
                        array = library.make(N)
                        assert (used(pool), used(second)) == (0, N)
                    del array
                    assert used(second) == 0
            with library.use(pool, callbacks=True), library.module.cuda.Device(1), pytest.raises(ValueError, match="1"):
                library.make(N)

    @pytest.mark.parametrize("mode", ["relaxed", "thread_local", "global"])
    @pytest.mark.parametrize("handle", [0, 2], ids=["legacy", "per thread"])
    def test_memory_that_is_dropped_during_a_capture_is_freed(
        self, stream: sa.Stream, pool: sa.MemoryPool, by_handle: ByHandle, mode: Any, handle: int
    ) -> None:
        """By another thread, whose library would otherwise fill the device until the end of the capture."""
        sources = Sources([pool])

        def allocate_and_drop() -> None:
            with stream.device.current():
                for _ in range(3):
                    sources.allocate(N, 0, handle)

        with stream.capture(mode):
            in_threads(allocate_and_drop)
        assert by_handle.figure("USED_MEM_HIGH") == N

    def test_a_library_that_is_not_there(self, pool: sa.MemoryPool, monkeypatch: pytest.MonkeyPatch) -> None:
        # The submodules count, too: other tests may have imported them.
        for module, extra in (("cupy", r"bridges-cuda1\d"), ("numba", r"bridges-cuda1\d"), ("torch", "bridges-torch")):
            for name in {module, *(name for name in sys.modules if name.startswith(f"{module}."))}:
                monkeypatch.setitem(sys.modules, name, None)
            with pytest.raises(ModuleNotFoundError, match=rf"^{module}[.\w]* is not installed: pip install .*{extra}"):
                getattr(interop, module).use(pool)


class TestOrder:
    @pytest.mark.parametrize("callbacks", [False, True], ids=["handles", "callbacks"])
    def test_what_is_dropped_is_used_again_after_its_last_use(
        self, ordered: Library, device: sa.Device, gate: Gate, callbacks: bool
    ) -> None:
        """A held stream, an array of it dropped on another thread, and another stream that would get its memory."""
        with sa.MemoryPool(device, release_threshold=KEEP) as pool:
            bridge = ordered.use(pool, callbacks=callbacks)
            one, two = ordered.stream(), ordered.stream()
            gate.hold(one)
            box = [ordered.make(N, one)]
            if ordered.fills_without_waiting:
                ordered.fill(box[0], 1, one)
            in_threads(box.clear)
            gc.collect()
            other = ordered.make(N, two)
            if ordered.fills_without_waiting:
                ordered.fill(other, 2, two)
            gate.open()
            device.synchronize()
            assert not ordered.fills_without_waiting or ordered.holds(other, 2, two)
            del other
            ended(ordered, bridge, device)
            assert used(pool) == 0

    @pytest.mark.gpus(2)
    def test_dropped_with_another_device_current(self, get: Get, pool: sa.MemoryPool, device: sa.Device) -> None:
        library = get("cupy")
        with library.use(pool, callbacks=True):
            arrays = [library.make(N), library.make(N, library.stream())]
            with library.module.cuda.Device(1):
                arrays.clear()
                gc.collect()
        device.synchronize()
        assert used(pool) == 0

    def test_per_thread_streams(self, get: Get, pool: sa.MemoryPool, device: sa.Device, gate: Gate) -> None:
        """The handle is the same, the stream another: the free waits for the thread that allocated."""
        library = get("cupy")
        ptds = library.module.cuda.Stream.ptds
        with library.use(pool, callbacks=True):
            box: list[Any] = []
            with device.current():
                gate.hold(device.per_thread_stream)
                box.append(library.make(N, ptds))
                in_threads(box.clear)
                # It is freed with the next synchronisation at the latest, after this thread's work.
                gate.open()
                device.synchronize()
            assert used(pool) == 0
            mine = library.make(N, ptds)
            del mine
            assert used(pool) == 0

    def test_a_drop_on_another_thread_makes_room_for_the_next_request(
        self, get: Get, pool: sa.MemoryPool, by_handle: ByHandle
    ) -> None:
        """Also if the program calls nothing else of the package."""
        library = get("cupy")
        ptds = library.module.cuda.Stream.ptds
        with library.use(pool, callbacks=True):
            for _ in range(4):
                box = [library.make(N, ptds)]
                in_threads(box.clear)
                assert by_handle.figure("USED_MEM_CURRENT") <= 2 * N

    @pytest.mark.parametrize("source", ["pool", "cache"])
    def test_small_numba_arrays_are_freed_together(self, get: Get, machine: Any, source: str) -> None:
        """However many streams are known, and also if the host never synchronises."""
        traced: Any = sd.traced(machine)
        device = sa.Device(0, driver=traced)
        library = get("numba")
        with contextlib.ExitStack() as stack, sa.MemoryPool(device, release_threshold=KEEP) as pool:
            cache = stack.enter_context(sa.CachingAllocator(pool))
            bridge = stack.enter_context(library.use(pool if source == "pool" else cache, callbacks=True))
            stack.enter_context(device.current())
            for _ in range(20):
                stack.enter_context(device.create_stream())
            for _ in range(2 * BATCH):
                library.make(4096)
            by_handle = ByHandle(machine, pool)
            del traced.calls[:]
            for _ in range(10 * BATCH):
                library.make(4096)
                assert by_handle.figure("USED_MEM_CURRENT") <= 3 * BATCH * 4096
                assert len(deferred_queue(session_of(device))) <= 2  # batches that were freed leave it
            # A free after all work makes three calls for each stream.
            assert len(traced.calls) < 8 * 10 * BATCH
            bridge.stop()
            assert source == "cache" or pool.statistics().used == 0

    @pytest.mark.parametrize(("count", "nbytes"), [(1, N), (2 * BATCH, 4096)], ids=["one", "many small ones"])
    @pytest.mark.parametrize("source", ["pool", "cache"])
    def test_numba_arrays_wait_for_streams_that_numba_does_not_know(
        self, get: Get, pool: sa.MemoryPool, by_handle: ByHandle, gate: Gate, source: str, count: int, nbytes: int
    ) -> None:
        """Work of a non-blocking stream on arrays that are dropped meanwhile comes before their next use."""
        library, device = get("numba"), gate.device
        with (
            sa.CachingAllocator(pool) as cache,
            library.use(pool if source == "pool" else cache, callbacks=True),
            device.create_stream() as outside,
            device.create_stream() as other,
        ):

            def fill(arrays: list[Any], value: int, stream: sa.Stream) -> None:
                for array in arrays:
                    address = array.__cuda_array_interface__["data"][0]
                    by_handle("cuMemsetD8Async", address, value, nbytes, cuda.CUstream(stream.handle))

            arrays = [library.make(nbytes) for _ in range(count)]
            gate.hold(outside)
            fill(arrays, 1, outside)
            arrays.clear()
            gc.collect()
            arrays = [library.make(nbytes) for _ in range(count)]
            other.wait(device.default_stream)
            fill(arrays, 2, other)
            gate.open()
            device.synchronize()
            assert all(library.holds(array, 2) for array in arrays)
            arrays.clear()

    def test_a_batch_that_two_threads_free_at_once_is_freed_once(self, device: sa.Device, pool: sa.MemoryPool) -> None:
        batch = FreeAfterAll(pool.allocate(4096, device.default_stream))
        assert batch.add(pool.allocate(4096, device.default_stream))
        again: list[bool] = []

        def attempt_again(frame: Any, event: str, _: object) -> None:
            # Between the look at the pointer and the free.
            if event == "call" and frame.f_code.co_name == "_free_on" and not again:
                in_threads(lambda: again.append(batch.attempt()))

        sys.setprofile(attempt_again)
        try:
            assert batch.attempt()
        finally:
            sys.setprofile(None)
        assert again == [True] and not batch.add(pool.allocate(64, device.default_stream))
        device.synchronize()
        assert used(pool) == 0

    @pytest.mark.resets_contexts
    def test_small_numba_arrays_of_a_context_that_was_reset(self, get: Get, machine: Any) -> None:
        """The next ones are freed all the same."""
        device, library = sa.Device(0, driver=machine), get("numba")
        for _ in range(2):
            pool = sa.MemoryPool(device)
            with library.use(pool, callbacks=True):
                library.make(4096)
                device.synchronize()
                assert pool.statistics().used == 0
                library.make(4096)
                machine.cuDevicePrimaryCtxReset(0)

    @pytest.mark.parametrize("name", ["cupy", "cuda_core", "numba", "rmm"])
    def test_what_is_dropped_is_there_for_others_at_once(
        self, get: Get, pool: sa.MemoryPool, device: sa.Device, by_handle: ByHandle, name: str
    ) -> None:
        """They allocate from the pool by its handle, and nobody calls the package in between."""
        library, size = get(name), 48 * MiB
        with device.create_stream() as stream:
            bridge = library.use(pool, callbacks=True)
            for _ in range(4):
                array = library.make(size)
                library.fill(array, 1)
                device.synchronize()
                del array
                gc.collect()
                assert by_handle.figure("USED_MEM_CURRENT") == 0
                with device.current():
                    by_handle("cuCtxSynchronize")
                pointer = by_handle.allocate(size, stream)
                by_handle("cuMemFreeAsync", pointer, cuda.CUstream(stream.handle))
            assert by_handle.figure("RESERVED_MEM_HIGH") <= size + GROWTH
            library.finish(bridge)

    @pytest.mark.parametrize(
        "refused", ["cuThreadExchangeStreamCaptureMode", "cuEventRecord", "cuStreamWaitEvent", "cuMemFreeAsync"]
    )
    def test_a_free_after_all_work_that_is_refused_is_made_later(
        self, faults: Faults, device: sa.Device, pool: sa.MemoryPool, refused: str
    ) -> None:
        faults.fail(refused, result="CUDA_ERROR_UNKNOWN")
        buffer = pool.allocate(N, device.default_stream)
        interop.bridge.free_after_all(FreeAfterAll(buffer))
        assert faults.failed == [refused]
        told = interop.bridge.dropped_of(session_of(device)).refused  # Numba's next allocation tries again.
        assert told is (refused != "cuThreadExchangeStreamCaptureMode")
        device.synchronize()
        assert buffer.freed and pool.statistics().used == 0


@pytest.mark.parametrize("callbacks", [False, True], ids=["handles", "callbacks"])
def test_out_of_memory_is_the_library_s_own_error(library: Library, device: sa.Device, callbacks: bool) -> None:
    with sa.MemoryPool(device, max_size=64 * MiB, release_threshold=KEEP) as pool:
        bridge = library.use(pool, callbacks=callbacks)
        kept = library.make(N)
        with pytest.raises(library.ends_with):
            library.make(512 * MiB)
        # It goes on afterwards.
        library.fill(kept, 5)
        other = library.make(N)
        assert library.holds(kept, 5)
        del kept, other
        ended(library, bridge, device)


class Broken:
    """An allocator that fails by more than a lack of memory."""

    def __init__(self, pool: sa.MemoryPool, error: BaseException) -> None:
        self.location = pool.location
        self._session = pool._session
        self.error = error

    def allocate(self, nbytes: int, stream: Any) -> Any:
        raise self.error


class TestExceptions:
    def test_never_get_into_c_code(self, get: Get, pool: sa.MemoryPool, monkeypatch: pytest.MonkeyPatch) -> None:
        library = get("torch")
        seen: list[Any] = []
        monkeypatch.setattr("sys.unraisablehook", seen.append)
        broken = Broken(pool, ZeroDivisionError("broken"))
        with library.use(broken, callbacks=True), pytest.raises(library.ends_with):
            library.make(N)
        assert {type(one.exc_value) for one in seen} == {ZeroDivisionError}

    def test_an_interrupt_comes_after_the_c_code(self, get: Get, pool: sa.MemoryPool) -> None:
        library = get("torch")
        # It may come as soon as the C code has returned.
        with pytest.raises(KeyboardInterrupt):
            with library.use(Broken(pool, KeyboardInterrupt()), callbacks=True), pytest.raises(library.ends_with):
                library.make(N)
            for _ in range(500):
                time.sleep(0.01)

    def test_of_a_free_are_not_raised(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """RMM would end the process, and a trim of PyTorch's segments goes on to the next one."""

        def fail(*_: object) -> NoReturn:
            raise ZeroDivisionError

        seen: list[Any] = []
        monkeypatch.setattr("sys.unraisablehook", seen.append)
        monkeypatch.setattr(torch_bridge, "_made", [])
        ledger: Any = SimpleNamespace(allocate=fail, free=fail)
        rmm_bridge._callbacks(ledger, 0)[1](4096, 64, SimpleNamespace(__cuda_stream__=lambda: (0, 1)))
        assert torch_bridge.Callbacks(ledger)._free(4096) == 0
        assert [type(one.exc_value) for one in seen] == [ZeroDivisionError]

    def test_of_python_callers_go_on_to_them(self, get: Get, pool: sa.MemoryPool) -> None:
        library = get("cupy")
        broken = Broken(pool, ZeroDivisionError("broken"))
        with library.use(broken, callbacks=True), pytest.raises(ZeroDivisionError):
            library.make(N)


class TestKindsOfMemory:
    def test_from_the_cache(self, library: Library, cache: sa.CachingAllocator, device: sa.Device) -> None:
        with library.use(cache, callbacks=False) as bridge:
            stream = library.stream()
            for value in range(5):
                array = library.make(N, stream)
                library.fill(array, value, stream)
                assert library.holds(array, value, stream)
                del array
        ended(library, bridge, device)

    def test_the_cache_serves_streams_of_libraries(self, get: Get, traced: Any, cache: sa.CachingAllocator) -> None:
        library = get("cupy")
        with library.use(cache, callbacks=False):
            for stream, asks in ((library.stream(), ["cuStreamIsCapturing"]), (None, [])):
                library.make(100_000, stream)
                for _ in range(2):
                    library.make(100_000, stream)
                    del traced.calls[:]
                array = library.make(100_000, stream)
                address = array.data.ptr
                del array
                assert library.make(100_000, stream).data.ptr == address
                assert [call.name for call in traced.calls] == 2 * asks

    @pytest.mark.parametrize("freed_asleep", [False, True])
    def test_virtual_memory(self, library: Library, device: sa.Device, freed_asleep: bool) -> None:
        """Memory that is freed while it sleeps takes its backup with it."""
        group = vmm.SleepGroup(device)
        with library.use(group.tagged("weights"), callbacks=True) as bridge:
            stream = library.stream()
            array = library.make(N, stream)
            library.fill(array, 6, stream)
            assert library.holds(array, 6, stream)
            device.synchronize()
            group.sleep()
            assert group.mapped_bytes == 0 < group.backup.used
            if not freed_asleep:
                group.wake()
                device.synchronize()
                assert library.holds(array, 6, stream)
            del array
        ended(library, bridge, device)
        assert group.mapped_bytes == group.backup.used == 0


@pytest.mark.parametrize("closed", [None, 0])
@pytest.mark.parametrize("ledger", [False, True])
def test_a_stream_with_the_handle_of_a_closed_one(
    cache: sa.CachingAllocator, stream: sa.Stream, ledger: bool, closed: int | None
) -> None:
    sources = Sources([cache])
    held = Ledger(sources)
    first, second = LibraryStream(stream.handle), LibraryStream(stream.handle)
    for theirs in (first, second):
        if ledger:
            address = held.allocate(N, 0, stream.handle, theirs)
            memory = held._held[address][0]
            held.free(address, 0, stream.handle)
        else:
            memory = sources.allocate(N, 0, stream.handle, theirs)
        assert memory.stream.handle == stream.handle
        del memory
        theirs.handle = closed


def test_memory_is_freed_on_the_stream_that_the_library_names(
    pool: sa.MemoryPool, device: sa.Device, stream: sa.Stream, gate: Gate
) -> None:
    """RMM and cuda.core name the stream of the last use, which may be another one than that of the allocation."""
    ledger = Ledger(Sources([pool]))
    with device.create_stream() as last:
        address = ledger.allocate(N, 0, stream.handle)
        last.wait(stream)
        gate.hold(last)
        ledger._held[address][0].fill(1, last)
        assert ledger.free(address, 0, last.handle) == N
        assert later_memory_is_whole(pool, N, stream, gate)


def test_a_free_that_the_driver_refuses_is_made_later(faults: Faults, device: sa.Device, stream: sa.Stream) -> None:
    with sa.MemoryPool(device) as pool, device.create_stream() as last:
        ledger = Ledger(Sources([pool]))
        address = ledger.allocate(N, 0, stream.handle)
        faults.fail("cuMemFreeAsync")
        assert ledger.free(address, 0, last.handle) == N
        assert pool.statistics().used == 0 and faults.failed == ["cuMemFreeAsync"]


class TestCaptures:
    @pytest.mark.parametrize("callbacks", [False, True], ids=["handles", "callbacks"])
    @pytest.mark.parametrize("mode", ["GLOBAL", "THREAD_LOCAL", "RELAXED"])
    def test_cupy_allocates_in_a_capture_of_other_code(
        self, get: Get, pool: sa.MemoryPool, device: sa.Device, by_handle: ByHandle, mode: str, callbacks: bool
    ) -> None:
        """On the stream that is captured, as inside ``torch.cuda.graph``: the memory is the graph's."""
        library = get("cupy")
        with library.use(pool, callbacks=callbacks), device.current(), device.create_stream() as stream:
            theirs = library.module.cuda.Stream.from_external(stream)
            raw = cuda.CUstream(stream.handle)
            mode_of_driver = getattr(cuda.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{mode}")
            by_handle("cuStreamBeginCapture", raw, mode_of_driver)
            array = library.make(N, theirs)
            library.fill(array, 4, theirs)
            graph = by_handle("cuStreamEndCapture", raw)
            executable = by_handle("cuGraphInstantiate", graph, 0)
            by_handle("cuGraphLaunch", executable, raw)
            assert library.holds(array, 4, theirs) and used(pool) == 0
            address = array.data.ptr
            del array
            if callbacks:  # the bridge leaves it to the graph
                by_handle("cuMemFreeAsync", address, raw)
            stream.synchronize()
            by_handle("cuGraphExecDestroy", executable)
            by_handle("cuGraphDestroy", graph)
        device.graph_memory.trim()

    @pytest.mark.parametrize("mode", ["GLOBAL", "THREAD_LOCAL", "RELAXED"])
    def test_cupy_allocates_beside_a_capture_of_other_code(
        self, get: Get, pool: sa.MemoryPool, device: sa.Device, by_handle: ByHandle, mode: str
    ) -> None:
        """Ordinary memory, on another stream and another thread; the capture goes on."""
        library = get("cupy")
        with library.use(pool, callbacks=False), device.create_stream() as stream:
            theirs = library.stream()
            kept: list[Any] = []

            def allocate() -> None:
                with device.current():
                    kept.append(library.make(N, theirs))

            with captured(by_handle.machine, stream, mode):
                in_threads(allocate)
            library.fill(kept[0], 5, theirs)
            assert library.holds(kept[0], 5, theirs)
            kept.clear()
            device.synchronize()

    @pytest.mark.parametrize("callbacks", [False, True], ids=["handles", "callbacks"])
    @pytest.mark.parametrize("name", ["cupy", "cuda_core", "numba", "rmm"])
    def test_a_bridge_starts_and_stops_in_a_capture_of_other_code(
        self, get: Get, pool: sa.MemoryPool, device: sa.Device, machine: Any, name: str, callbacks: bool
    ) -> None:
        library = get(name)
        before = pool.attributes.release_threshold, sa.MemoryPool.current(device)
        with device.create_stream() as stream, captured(machine, stream):
            bridge = library.use(pool, callbacks=callbacks)
            assert bridge.started
            bridge.stop()
        assert (pool.attributes.release_threshold, sa.MemoryPool.current(device)) == before
        library.finish(bridge)

    def test_pytorch_gets_ordinary_memory(self, get: Get, pool: sa.MemoryPool, device: sa.Device) -> None:
        """Its memory stays when the graph is launched again, and exists at once."""
        library = get("torch")
        bridge = library.use(pool, callbacks=True)
        with device.create_stream() as stream:
            sources = bridge.sources
            with stream.capture("relaxed") as graph:
                memory = sources.allocate(N, 0, stream.handle, in_capture=False)
                memory.fill(8, stream)
            assert type(memory).__name__ != "GraphBuffer" and used(pool) == N
            for _ in range(2):
                graph.launch(stream)
            stream.synchronize()
            del memory
        library.finish(bridge)

    @pytest.mark.parametrize("size", [4096, N])
    @pytest.mark.parametrize("mode", ["global", "relaxed"])
    def test_what_is_dropped_in_a_capture_of_ours_is_freed_after_it(
        self, get: Get, pool: sa.MemoryPool, device: sa.Device, mode: Any, size: int
    ) -> None:
        library = get("numba")
        with library.use(pool, callbacks=True), device.create_stream() as stream:
            kept = pool.allocate(64, stream)
            arrays = [library.make(size) for _ in range(BATCH + 1)]
            with stream.capture(mode) as graph:
                kept.fill(1)
                arrays.clear()
                gc.collect()
            assert used(pool) == 64
            graph.launch(stream)
            assert holds(kept, 1)

    @pytest.mark.parametrize("dropped", ["numba", "cupy"])
    @pytest.mark.parametrize("capturing", ["cupy", "torch"])
    def test_what_is_dropped_in_a_capture_of_a_library_is_freed_after_it(
        self, get: Get, pool: sa.MemoryPool, device: sa.Device, machine: Any, capturing: str, dropped: str
    ) -> None:
        """The package sees nothing of the capture."""
        library = get(dropped)
        other = library if capturing == dropped else get(capturing)
        with library.use(pool, callbacks=True):
            array = library.make(N)
            theirs = other.stream()
            device.synchronize()
            with device.current(), other.current(theirs), captured(machine, other.handle(theirs)):
                del array
                gc.collect()
            device.synchronize()
            assert used(pool) == 0

    @pytest.mark.parametrize("name", ["cupy", "numba", "rmm"])
    def test_what_is_dropped_while_a_blocking_stream_is_captured_is_freed_after_it(
        self, get: Get, pool: sa.MemoryPool, device: sa.Device, machine: Any, name: str
    ) -> None:
        """The legacy stream, for which the memory was allocated, takes no work meanwhile."""
        library = get(name)
        with device.create_stream(blocking=True) as blocking:
            bridge = library.use(pool, callbacks=True)
            array = library.make(N)
            device.synchronize()
            with captured(machine, blocking):
                del array
                gc.collect()
            device.synchronize()
            assert used(pool) == 0
            library.finish(bridge)


def test_threads_that_allocate_while_others_drop(
    library: Library, pool: sa.MemoryPool, device: sa.Device, watchdog: None
) -> None:
    bridge = library.use(pool, callbacks=True)
    if library.name == "torch":
        bridge.stop()  # it is for this thread
    end = time.monotonic() + 0.3
    counts = itertools.count()

    def work() -> None:
        with device.current(), library.routed(bridge):
            stream = library.stream()
            kept: list[Any] = []
            while time.monotonic() < end:
                kept.append(library.make((1 + next(counts) % 5) * 300_000, stream))
                if len(kept) > 8:
                    del kept[::2]

    in_threads(*[work] * 4)
    ended(library, bridge, device)
    device.synchronize()
    assert used(pool) == 0


LIVE = """
import importlib, os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import streamalloc as sa
import streamalloc.driver as sd
from tests.interop.standins import STANDINS
from tests.interop.libraries import LIBRARIES, MODULES

class Cycle: pass

pool, kept = sa.MemoryPool(sa.Device(0), release_threshold=1 << 40), []
for name in {names}:
    if os.environ["STREAMALLOC_DRIVER"] != "cuda":
        sys.modules.update(STANDINS[name](sd.default()))
    library = LIBRARIES[name](importlib.import_module(MODULES.get(name, name)))
    bridge, stream, cycle = library.use(pool, callbacks=True), library.stream(), Cycle()
    cycle.cycle, cycle.array = cycle, library.make(1 << 20, stream)
    kept += [bridge, library.make(1 << 20), library.make(1 << 20, stream)]
"""


def test_a_process_ends_with_live_arrays(get: Get, python: Callable[..., Any]) -> None:
    names = []
    for name in LIBRARIES:
        with contextlib.suppress(pytest.skip.Exception):
            names.append(get(name).name)
    done = python(LIVE.format(names=names))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and names


def test_a_capture_mode_that_the_driver_refuses(
    faults: Faults, stream: sa.Stream, pool: sa.MemoryPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a finaliser or the library raises then is what it would raise."""
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    sources = Sources([pool])
    held = sources.allocate(512, 0, stream.handle)
    faults.fail("cuThreadExchangeStreamCaptureMode", result="CUDA_ERROR_UNKNOWN")
    del held
    stream.synchronize()
    assert used(pool) == 0 and raised == []
    faults.fail("cuThreadExchangeStreamCaptureMode", result="CUDA_ERROR_UNKNOWN")
    allocate = _in_relaxed_mode(sources, lambda nbytes: nbytes // 0)
    with pytest.raises(ZeroDivisionError):
        allocate(512)


NAMES = {"cupy": "CuPy", "torch": "PyTorch", "numba": "Numba", "rmm": "RMM", "cuda_core": "cuda.core", "jax": "JAX"}


@pytest.mark.simulated_only("the libraries are on the real driver there")
@pytest.mark.parametrize("name", NAMES)
def test_memory_of_a_simulated_driver_is_refused(
    machine: Any, pool: sa.MemoryPool, stream: sa.Stream, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a library that was imported from its files: before it fails in the CUDA driver."""
    jax = {imported: ModuleType(imported) for imported in ("jax", "jax.dlpack")}
    modules = jax if name == "jax" else STANDINS[name](machine)
    for imported, standin in modules.items():
        standin.__spec__ = ModuleSpec(imported, None)
        monkeypatch.setitem(sys.modules, imported, standin)
    if name != "numba":  # Only Numba calls what `testing.install` replaces.
        monkeypatch.setattr(cuda, "cuInit", functools.wraps(cuda.cuInit)(lambda flags: None))
    bridge = getattr(interop, name)
    with pool.allocate(64, stream) as buffer:
        taken = {
            "use": (pool,),
            "resource": (pool,),
            "array": (buffer,),
            "tensor": (buffer,),
            "buffer": (buffer, stream),
        }
        for use, arguments in taken.items():
            if hasattr(bridge, use):
                with pytest.raises(ValueError, match=rf"^{NAMES[name]} uses the CUDA driver.*<SimulatedDriver"):
                    getattr(bridge, use)(*arguments)
        foreign = type("Array", (), {"__module__": f"{next(iter(modules)).partition('.')[0]}.arrays"})()
        if name != "cuda_core":
            with pytest.raises(ValueError, match=f"^{NAMES[name]} uses the CUDA driver"):
                interop.borrow(foreign, stream)
    assert used(pool) == 0


def test_all_at_once_under_a_checked_driver(get: Get, checker: Any, pool: sa.MemoryPool, device: sa.Device) -> None:
    """Each allocates from one pool while the others do; nothing is left, and nothing is freed twice."""
    libraries = [get(name) for name in ("cupy", "torch", "numba")]
    bridges = [library.use(pool, callbacks=True) for library in libraries]
    streams = [library.stream() for library in libraries]
    for value in range(3):
        arrays = [library.make(MiB, stream) for library, stream in zip(libraries, streams, strict=True)]
        for library, stream, array in zip(libraries, streams, arrays, strict=True):
            library.fill(array, value, stream)
        for library, stream, array in zip(libraries, streams, arrays, strict=True):
            assert library.holds(array, value, stream)
        del array, arrays
    gc.collect()
    for library, bridge in zip(libraries, reversed(bridges), strict=True):
        library.finish(bridge)
    device.synchronize()
    assert pool.statistics().used == 0


# -- arrays of libraries in memory of ours, opened by another process -------------------------------------------------


def test_two_libraries_share_one_pool_while_another_process_opens_their_arrays(
    get: Get,
    device: sa.Device,
    partner: Partner,  # noqa: F811
) -> None:
    with shared_pool(device) as pool:
        libraries = [get("cupy"), get("torch")]
        bridges = [library.use(pool, callbacks=False) for library in libraries]
        arrays = [library.make(3 * MiB) for library in libraries]
        assert pool.statistics().used >= 6 * MiB
        for value, (library, array) in enumerate(zip(libraries, arrays, strict=True), 5):
            library.fill(array, value)
        for value, array in enumerate(arrays, 5):
            opened = partner.give(array, f"array {value}")
            assert (opened.kind, opened.nbytes) == ("ImportedBuffer", 3 * MiB)
            assert partner.run(holds_there, f"array {value}", value)
        partner.reset()
        del array, arrays
        gc.collect()
        for library, bridge in zip(libraries, bridges, strict=True):
            library.finish(bridge)
        device.synchronize()
        assert pool.statistics().used == 0
