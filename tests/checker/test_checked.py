"""Reports of a checked driver, their forms, and their costs."""

import contextlib
import ctypes
import gc
import mmap
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.checker import poison, report, uses, wrapper
from streamalloc.checker.capture import TrackedGraph, TrackedNode, _Inside
from streamalloc.checker.report import LEFT_OUT
from streamalloc.checker.rules.table import RULES
from streamalloc.driver import selection
from streamalloc.driver.account import COUNTED
from streamalloc.driver.bindings import cuda, parameters
from streamalloc.testing import Gate
from tests.checker.corpus import PAGE, SIZE, Bench
from tests.checker.corpus.bench import Steps
from tests.checker.corpus.nodes import Graph, fill_params
from tests.processes import SECONDS
from tests.support import KEEP, bytecodes, end_what_was_dropped, in_threads, names, read

FLAGS = 2  # CU_EVENT_DISABLE_TIMING


@pytest.fixture
def bench(machine: Any) -> Iterator[Bench]:
    """Its end adds no hazard."""
    driver = sd.checked(machine)
    with Bench(driver) as bench:
        yield bench
        found = len(driver.hazards)
    assert len(driver.hazards) == found


def race(bench: Bench) -> None:
    """Two streams that write the same memory."""
    memory = bench.new(bench.a)
    bench.a.synchronize()
    bench.write(memory, bench.a)
    try:
        bench.write(memory, bench.b)
    finally:
        bench.done(memory)


class TestModes:
    def test_report_collects(self, bench: Bench) -> None:
        race(bench)
        (found,) = bench.driver.hazards
        assert found.kind == "race" and found.nbytes == SIZE and found.portable
        assert f"must wait for an event recorded on stream {bench.a._raw!r}"[:40] in found.remedy
        assert {"this call", "used", "allocated"} == set(found.stacks)
        for name, code in (("this call", "bench.write(memory, bench.b)"), ("used", "bench.write(memory, bench.a)")):
            assert any(code in line for line in found.stacks[name])
        assert not any("streamalloc/core" in line for lines in found.stacks.values() for line in lines)

    def test_one_missing_wait_is_reported_once(self, bench: Bench) -> None:
        memory = bench.new(bench.a)
        memory.used(bench.a)
        memory.used(bench.b)
        memory.free(bench.b)
        use, free = bench.driver.hazards
        assert (use.kind, free.kind) == ("use before allocation", "free before allocation")
        assert all("after its kernel" in one.remedy for one in (use, free))
        assert any("memory.used(bench.a)" in line for line in use.stacks["used"])

    def test_a_pair_of_places_is_reported_once_with_a_count(self, bench: Bench) -> None:
        for again in range(2):
            memories = [bench.new(bench.a) for _ in range(20)]
            seen = set()
            for memory in memories:
                memory.used(bench.b)
                seen.update(bench.driver.hazards)
            (found,) = seen
            assert found.count == 20 and "found: 20 times" in str(found)
            assert found.address == memories[0].address
            if not again:
                bench.driver.hazards.clear()  # begins anew

    @pytest.mark.parametrize("path", ["fast", "slow"])
    def test_one_copy_of_another_type_is_found_once(self, bench: Bench, path: str) -> None:
        memory, array = bench.new(bench.a, 64), np.zeros(16, np.int32)
        memory.view_as(np.float32, (16,)).copy_from(np.ones(16, np.float32))
        if path == "slow":  # of a subclass, the driver gets the address instead of the array
            array = array.view(type("Array", (np.ndarray,), {}))
        memory.view_as(np.int32, (16,)).copy_to(array)
        bench.a.synchronize()
        (found,) = bench.driver.hazards
        assert (found.kind, found.count) == ("another type", 1)

    def test_the_function_that_the_program_calls_is_named(self, bench: Bench) -> None:
        with vmm.GrowableBuffer(bench.device, 8 << 20, 2 << 20, stream=bench.a) as buffer:
            buffer.grow(2 << 20)
            early = bench.b.record()
            buffer.used(bench.b)
            buffer.resize(0, after=early)
            assert "unmap while in use: cuMemUnmap in resize() by host thread" in str(bench.driver.hazards[-1])

    def test_raises_for_each_address(self, machine: Any) -> None:
        driver = sd.checked(machine, on="raise")
        with Bench(driver) as bench:
            for memory in [bench.new(bench.a) for _ in range(3)]:
                with pytest.raises(sd.DriverMisuseError, match="free before allocation"):
                    memory.free(bench.b)
                memory.free()
        assert [one.count for one in driver.hazards] == [3]

    def test_a_hazard_of_other_memory_comes_out_of_a_free_that_was_made(self, machine: Any) -> None:
        class Opens:
            """A driver behind whose free another thread opens the gate."""

            def __getattr__(self, name: str) -> Any:
                return getattr(machine, name)

            def cuMemFreeAsync(self, *args: Any) -> Any:
                answer = machine.cuMemFreeAsync(*args)
                gates.pop().open()
                return answer

        with Bench(sd.checked(Opens(), on="raise")) as bench, Gate(bench.device) as gate:
            gates, memory, other = [gate], bench.new(bench.a), bench.new(bench.c)
            bench.a.synchronize()
            gate.hold(bench.a)
            bench.write(memory, bench.a)
            bench.write(memory, bench.b)  # is judged when the gate opens
            with pytest.raises(sd.DriverMisuseError, match="race"):
                other.free()
            assert other.freed
            gates.append(gate)
            bench.done(memory)

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_a_drop_that_was_refused_is_made_later(self, machine: Any) -> None:
        with Bench(sd.checked(machine, on="raise")) as bench:
            memory = bench.pool.allocate(4096, bench.a)
            bench.b.wait(bench.a.record())
            memory.fill(1, bench.b)
            del memory  # not ordered after the fill
            bench.a.synchronize()  # attempts the free again, and has no part in the hazard
            bench.device.synchronize()
            end_what_was_dropped()
            assert {one.kind for one in bench.driver.hazards} == {"free racing a use"}
            assert bench.pool.statistics().used == 0

    def test_more_hazards_than_are_kept_are_noted(self, checker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(report, "_MOST_HAZARDS", 0)
        with Bench(checker) as bench:
            race(bench)
        assert checker.hazards == [] and "hazards after the first" in checker.notes[0]

    def test_warn_warns(self, machine: Any) -> None:
        driver = sd.checked(machine, on="warn")
        with Bench(driver) as bench, pytest.warns(RuntimeWarning, match="race: "):
            race(bench)
        assert len(driver.hazards) == 1

    def test_no_other_thread_takes_the_hazard_of_a_free(self, traced: Any) -> None:
        driver: Any = sd.checked(traced, on="raise")

        class Lock:
            """A lock behind whose release another thread makes a call."""

            def __enter__(self) -> None:
                self.lock.acquire()

            def __exit__(self, *_: object) -> None:
                self.lock.release()
                if threading.current_thread() is threading.main_thread():
                    with ThreadPoolExecutor(1) as pool:
                        pool.submit(driver.cuStreamSynchronize, cuda.CUstream(raw)).exception(SECONDS)

            def __init__(self) -> None:
                self.lock = driver._turn.lock
                self.acquire, self.release = self.lock.acquire, self.lock.release

        with Bench(driver) as bench:
            memory, raw = bench.new(bench.a), bench.c._raw
            driver._turn.lock = Lock()
            with pytest.raises(sd.DriverMisuseError, match="free before allocation"):
                memory.free(bench.b)
            driver._turn.lock = driver._turn.lock.lock
            assert names(traced, "cuMemFreeAsync") == []
            memory.free()

    def test_a_second_free_is_answered_where_it_does_not_raise(self, traced: Any) -> None:
        driver = sd.checked(traced)
        with Bench(driver) as bench:
            memory = bench.new(bench.a)
            address = memory.address
            memory.free()
            answer = driver.cuMemFreeAsync(address, cuda.CUstream(bench.a.handle))
            assert answer == (cuda.CUresult.CUDA_ERROR_INVALID_VALUE,)
            assert names(traced, "cuMemFreeAsync") == ["cuMemFreeAsync"]
        assert [one.kind for one in driver.hazards] == ["double free"]
        assert set(driver.hazards[0].stacks) == {"this call", "freed", "allocated"}

    def test_what_the_driver_refuses_has_not_happened(self, machine: Any) -> None:
        driver = sd.checked(sd.faulty(machine, "cuMemFreeAsync", result="CUDA_ERROR_UNKNOWN"))
        with Bench(driver) as bench:
            memory = bench.new(bench.a)
            with pytest.raises(sa.CudaError):
                memory.free()
            bench.write(memory, bench.a)
            memory.free()
        assert driver.hazards == []

    @pytest.mark.parametrize("captured", [False, True])
    def test_a_refused_second_free_changes_nothing(self, bench: Bench, captured: bool) -> None:
        """The memory stays freed: a later use is reported, and no leak."""
        with bench.a.capture() as graph:
            memory = bench.pool.allocate(SIZE, bench.a)
            address = memory.address
            memory.free()
            if captured:
                assert bench.driver.cuMemFreeAsync(address, cuda.CUstream(bench.a.handle))[0]
                bench.driver.used(address, SIZE, cuda.CUstream(bench.a.handle), False)
        if not captured:
            bench.keep(graph).launch(bench.a)
            bench.a.synchronize()
            assert bench.driver.cuMemFreeAsync(address, cuda.CUstream(bench.a.handle))[0]
            bench.driver.used(address, SIZE, cuda.CUstream(bench.a.handle), False)
        assert bench.driver.leaks() == []
        assert [one.kind for one in bench.driver.hazards] == ["double free", "use after free"]

    def test_what_raises_has_not_happened(self, bench: Bench) -> None:
        memory = bench.new(bench.a)
        with pytest.raises(TypeError):
            bench.driver.cuMemFreeAsync(memory.address, cuda.CUstream(bench.a.handle), "too much")
        bench.write(memory, bench.a)
        memory.free()
        assert bench.driver.hazards == []

    def test_a_finaliser_that_calls_the_driver_while_it_is_asked(self, bench: Bench) -> None:
        """Frees of other threads in the middle of a call do not wait for it, and are not lost."""
        cycles: list[Any] = []
        for _ in range(50):
            cycle: list[Any] = [bench.pool.allocate(SIZE, bench.a)]
            cycle.append(cycle)
            cycles.append(cycle)
        del cycle
        cycles = [cycles]
        other = threading.Thread(target=gc.collect)
        cycles.clear()
        other.start()
        while other.is_alive():
            bench.device.default_stream.synchronize()
            bench.done(bench.new(bench.device.default_stream))
        other.join()
        gc.collect()
        assert bench.driver.hazards == [] and "pool allocation" not in bench.driver.outstanding()

    def test_a_finaliser_at_the_end_of_a_record(self, bench: Bench) -> None:
        """Its free comes before the next call, which may get the address that it has freed."""
        memory = bench.pool.allocate(SIZE, bench.a)
        address = memory.address
        bench.driver._turn.thread = threading.get_ident()  # the record has just ended
        del memory
        bench.driver._turn.thread = 0
        again = bench.new(bench.a)
        assert again.address == address
        again.free()
        assert bench.driver.hazards == []

    def test_a_finaliser_notifies_in_the_middle_of_a_record(self, bench: Bench) -> None:
        memory = bench.new(bench.a)
        bench.driver._turn.thread = threading.get_ident()
        bench.driver.deferred(memory.address)
        bench.driver._turn.thread = 0
        assert bench.driver.leaks() == []

    def test_a_host_function_that_the_bindings_refuse(self, bench: Bench) -> None:
        """Its stream does not wait for it."""
        memory = bench.new(bench.b)
        for function, data in ((cuda.CUhostFn(1), "no pointer"), (object(), 0)):
            with pytest.raises(TypeError):
                bench.raw("cuLaunchHostFunc", cuda.CUstream(bench.a.handle), function, data)
        bench.write(memory, bench.a)
        assert [one.kind for one in bench.driver.hazards] == ["use before allocation"]

    def test_ended_streams_threads_and_events_are_forgotten(self, bench: Bench) -> None:
        state = bench.driver.state
        for _ in range(80):
            with bench.device.create_stream():
                event = bench.raw("cuEventCreate", 6)
                bench.raw("cuIpcGetEventHandle", event)
                bench.raw("cuEventDestroy", event)
                in_threads(bench.device.synchronize)
            bench.raw("cuMemFree", bench.raw("cuMemAlloc", SIZE))
        assert len(state.timeline.host.known) < 60
        assert len(state.streams._over) == len(state.interprocess.events) == 0

    def test_two_threads_use_a_context_for_the_first_time(self, machine: Any) -> None:
        """The driver is asked without the checker's lock: one thread is asked while the other one goes on."""
        asked, answer = threading.Event(), threading.Event()

        class Slow:
            def __getattr__(self, name: str) -> Any:
                return getattr(machine, name)

            def cuCtxGetDevice(self) -> Any:
                if threading.current_thread() is not threading.main_thread():
                    asked.set()
                    assert answer.wait(SECONDS)
                return machine.cuCtxGetDevice()

        driver = sd.checked(Slow())
        device = sa.Device(0, driver=driver)
        made: list[sa.Stream] = []
        other = threading.Thread(target=lambda: made.append(device.create_stream()))
        other.start()
        assert asked.wait(SECONDS)
        made.append(device.create_stream())
        answer.set()
        other.join()
        with sa.MemoryPool(device) as pool:
            for one in made:
                pool.allocate(512, one).free()
        assert len(made) == 2 and driver.hazards == []

    def test_other_modes_there_are_not(self, machine: Any) -> None:
        with pytest.raises(ValueError, match="allowed are 'raise', 'report', 'warn'"):
            sd.checked(machine, on="shout")  # type: ignore[arg-type]


_WAITS_AT = r"stream 0x\w+ waits at \S+ for the event"


class TestWords:
    """The text of a hazard."""

    @pytest.mark.parametrize(
        ("steps", "words"),
        [
            (
                "record a e; write x a; wait b e; write x b",
                _WAITS_AT + r" recorded at \S+, before the kernel of \S+: rec",
            ),
            (
                "begin a; record a e; write x a; wait b e; write x b; record b e; wait a e; g = end",
                _WAITS_AT + r" recorded at \S+, before the kernel of",
            ),
            (
                "record a e; write x a; synchronize e; host_writes x",
                r"the host waits at \S+ for the event recorded at \S+, before the kernel of",
            ),
            (
                "write x a; wait b e; write x b",
                _WAITS_AT + r" made at \S+, which nothing had recorded by then: record it",
            ),
            (
                "write x a; record a e; record c e; wait b e; write x b",
                _WAITS_AT + r" .* after the kernel of .*, but the recording of \S+ has replaced that one",
            ),
            (
                "write x a; record a e; wait a e; record c e; wait b e; write x b",
                r"^stream 0x\w+ must wait for an event recorded on stream 0x\w+ after its kernel\.",
            ),
            (
                "record c e; wait b e; write x a; write x b",
                r"^stream 0x\w+ must wait for an event recorded on stream 0x\w+ after its kernel\.",
            ),
        ],
    )
    def test_a_wait_that_has_no_effect(self, bench: Bench, steps: str, words: str) -> None:
        Steps(bench, True).run(f"x = ready; e = event; {steps}")
        assert re.search(words, self._only(bench.driver).remedy), self._only(bench.driver).remedy

    @pytest.mark.simulated_only("a call with a destroyed handle may end the process")
    @pytest.mark.parametrize("name", ["cuMemFreeAsync", "cuMemsetD8Async", "cuEventRecord", "cuStreamDestroy"])
    def test_a_destroyed_stream(self, bench: Bench, name: str) -> None:
        memory, stream = bench.new(bench.a), bench.raw("cuStreamCreate", 1)
        bench.raw("cuStreamDestroy", stream)
        first = {"cuEventRecord": (0,), "cuStreamDestroy": ()}.get(name, (memory.address,))
        rest = (0, SIZE) if name == "cuMemsetD8Async" else ()
        assert isinstance(bench.raw(name, *first, *rest, stream), cuda.CUresult)
        found = self._only(bench.driver)
        kind, place = ("double free", "freed") if name == "cuStreamDestroy" else ("use after destroy", "destroyed")
        assert found.kind == kind and f"{int(stream):#x}" in found.what
        assert any('bench.raw("cuStreamDestroy", stream)' in line for line in found.stacks[place])

    @pytest.mark.simulated_only("it has the memory of another process in the same one")
    def test_the_call_that_a_leak_misses(self) -> None:
        machine = sd.simulated(name="two")
        owner, driver = sd.simulated(name="two"), sd.checked(machine)
        for one in (owner, driver):
            _with_context(one)
        plain = owner.cuMemAlloc(SIZE)[1]
        shared = driver.cuIpcOpenMemHandle(owner.cuIpcGetMemHandle(plain)[1], 1)[1]
        kept = [driver.cuMemAlloc(SIZE)[1], driver.cuMemHostAlloc(SIZE, 0)[1]]
        remedies = "".join(one.remedy for one in driver.leaks())
        assert all(name in remedies for name in ("cuIpcCloseMemHandle", "cuMemFree.", "cuMemFreeHost"))
        driver.cuIpcCloseMemHandle(shared)
        driver.cuMemFree(kept[0])
        driver.cuMemFreeHost(kept[1])
        assert driver.leaks() == []

    @staticmethod
    def _only(driver: Any) -> sd.Hazard:
        (found,) = driver.hazards
        return found  # type: ignore[no-any-return]

    def test_where_the_streams_were_created(self, bench: Bench) -> None:
        race(bench)
        found = self._only(bench.driver)
        assert found.what.count("created at bench.py:") == 2
        assert "after its kernel" in found.remedy

    def test_the_name_of_a_stream(self, checker: Any) -> None:
        with Bench(checker) as bench, bench.device.create_stream(name="loader") as loader:
            memory = bench.new(bench.a)
            memory.used(loader)
        assert "stream 'loader' (created at test_checked.py:" in self._only(checker).what

    def test_where_a_graph_was_launched(self, bench: Bench) -> None:
        memory = bench.new(bench.a)
        bench.a.synchronize()
        with bench.a.capture() as graph:
            memory.fill(1)  # captured
        bench.keep(graph).launch(bench.a)  # launched
        bench.write(memory, bench.b)
        stacks = self._only(bench.driver).stacks
        assert any("# captured" in line for line in stacks["used"])
        assert any("# launched" in line for line in stacks["used, launched"])

    def test_whose_the_memory_was_before(self, bench: Bench) -> None:
        memory = bench.new(bench.a)
        address = memory.address
        memory.free()  # freed
        again = bench.new(bench.a)
        assert again.address == address
        bench.at(address, bench.b)
        found = self._only(bench.driver)
        assert "before that allocation of 4 KiB" in found.what
        assert any("# freed" in line for line in found.stacks["freed before"])

    @pytest.mark.simulated_only("it is looked at while a function of the host runs")
    def test_each_use_of_a_kernel_is_compared_with_its_memory(self, bench: Bench) -> None:
        used = [(bench.ready().address, SIZE + more, True) for more in (0, 1)]
        uses.check_extent(bench.driver.state, "a kernel", used, (), True)
        bench.a.synchronize()  # The next call adds the hazard.
        assert self._only(bench.driver).kind == "out of bounds"

    def test_a_context_lasts_until_its_last_reference(self, bench: Bench) -> None:
        memory = int(bench.raw("cuMemAlloc", SIZE))
        bench.raw("cuDevicePrimaryCtxRetain", 0)
        bench.raw("cuDevicePrimaryCtxRelease", 0)
        bench.at(memory, bench.a)
        bench.a.synchronize()
        bench.raw("cuMemFree", memory)
        assert bench.driver.hazards == []

    def test_no_synchronising_in_a_function_of_the_host(self, bench: Bench) -> None:
        address = bench.word()
        bench.raw("cuMemsetD8Async", address, 1, 64, cuda.CUstream(bench.b.handle))
        bench.a.launch_host_func(lambda: bench.driver.used(address, 64, None, False))
        bench.device.synchronize()
        found = self._only(bench.driver)
        assert "synchronise" not in found.remedy and "the host function of stream" in found.what
        assert "before the host function is queued" in found.remedy

    def test_before_the_call_is_made(self, traced: Any) -> None:
        with Bench(sd.checked(traced, on="raise")) as bench:
            address = int(bench.raw("cuMemAlloc", SIZE))
            bench.raw("cuMemFree", address)
            with pytest.raises(sd.DriverMisuseError, match="use after free") as caught:
                bench.raw("cuMemsetD8", address, 1, SIZE)
            assert names(traced, "cuMemsetD8") == []
            assert {"this call", "freed", "allocated"} == set(caught.value.hazard.stacks)  # type: ignore[union-attr]


@pytest.mark.parametrize("freed", [True, False])
def test_what_queued_work_keeps_is_no_leak(
    machine: Any, checker: Any, device: sa.Device, monkeypatch: pytest.MonkeyPatch, freed: bool
) -> None:
    """Memory that the program has dropped is released when that work is done."""
    with device.create_stream() as stream, Gate(device) as gate:
        gate.hold(stream)
        buffer = [vmm.GrowableBuffer(device, PAGE, PAGE, stream=stream)]
        buffer[0].fill(1)
        if freed:
            buffer.clear()

        def pause(_: float) -> None:
            gate.open()
            machine.cuStreamSynchronize(stream.handle)

        monkeypatch.setattr(wrapper, "sleep", pause)
        monkeypatch.setattr(wrapper, "_PATIENCE", 0.1)
        assert [one.kind for one in checker.finish() if "pinned" not in one.what] == ["leak"] * (not freed)
        gate.open()
        stream.synchronize()
    buffer.clear()


def test_a_node_that_nobody_knows_hides_no_others(bench: Bench) -> None:
    """The nodes of a graph within the graph have handles of their own there."""
    x, y, z = (bench.new(bench.a) for _ in range(3))
    bench.a.synchronize()
    inner, outer = Graph(bench), Graph(bench)
    inner.fill(x.address)
    child = outer.add("ChildGraph", [], inner.handle)
    outer.fill(y.address)
    (node,) = bench.raw("cuGraphGetNodes", bench.raw("cuGraphChildGraphNodeGetGraph", child), 1)
    bench.raw("cuGraphMemsetNodeSetParams", node, fill_params(z.address))
    outer.launch(bench.a)
    x.fill(1, bench.b)
    assert bench.driver.hazards == [] and sum("nodes of a graph" in one for one in bench.driver.notes) == 1
    y.fill(1, bench.b)
    assert [one.kind for one in bench.driver.hazards] == ["race"]


def test_a_destroyed_node_leaves_no_edges() -> None:
    """A new node may get its handle. Nodes in a circle are left out."""
    graph, inside = TrackedGraph(), _Inside(lambda _: None)
    graph.add(1, TrackedNode("step"), [])
    graph.add(2, TrackedNode("step"), [1])
    graph.remove(1)
    graph.add(1, TrackedNode("step"), [2])
    assert [*graph.play(inside)] == [2, 1]
    graph.after[2].append(1)
    assert graph.play(inside) == {}


@pytest.mark.simulated_only("nobody has read what hardware does next")
def test_a_capture_goes_on_after_another_thread_ends_it(bench: Bench) -> None:
    memory, stream = bench.new(bench.a), cuda.CUstream(bench.a._raw)
    bench.a.synchronize()
    bench.raw("cuStreamBeginCapture", stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    with ThreadPoolExecutor(1) as other:
        assert "WRONG_THREAD" in other.submit(bench.raw, "cuStreamEndCapture", stream).result().name
    memory.fill(1, bench.a)
    bench.raw("cuGraphDestroy", bench.raw("cuStreamEndCapture", stream))
    bench.write(memory, bench.c)  # nothing has run
    assert bench.driver.hazards == []


def test_each_reason_to_leave_something_out_is_used_and_explained() -> None:
    package = Path(report.__file__).parent
    code = "".join(path.read_text("utf-8") for path in package.rglob("*.py"))
    used = re.findall(r'notes\.add(?:\(|, )"(\w+)"', code) + re.findall(r'notes\.add, "(\w+)"', code)
    assert set(used) == set(LEFT_OUT)
    page = (package.parents[1] / "notebooks/docs/comparison.md").read_text("utf-8")
    assert [text for text in LEFT_OUT.values() if f"| {text} |" not in page or " (" in text] == []


class TestUsed:
    def test_nothing_happens_with_other_drivers(self, traced: Any, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(64, stream) as memory:
            before = len(traced.calls)
            memory.used(stream)
            memory[8:].used(stream.device.default_stream, write=False)
            assert len(traced.calls) == before
            memory.free()
            with pytest.raises(sa.ClosedError):
                memory.used()

    def test_of_no_bytes_is_none(self, bench: Bench) -> None:
        memory = bench.new(bench.a)
        memory[8:8].used(bench.b)
        memory[8:8].view_as("f4", (0, 5)).__dlpack__()
        bench.raw("cuMemcpyAsync", memory.address + 8, memory.address + 16, 0, bench.b.handle)
        assert bench.driver.hazards == []


def test_poison(machine: Any) -> None:
    """Memory that nobody has written shows, also where its bytes were somebody's before."""
    device = sa.Device(0, driver=sd.checked(machine, poison=True))
    with device.create_stream() as stream, sa.MemoryPool(device, release_threshold=KEEP) as pool:
        memory = pool.allocate(SIZE, stream)
        assert (read(memory) == 0xCB).all()
        memory.fill(1)
        assert (read(memory) == 1).all()
        address = memory.address
        memory.free()
        again = pool.allocate(SIZE, stream)
        assert again.address == address and (read(again) == 0xCB).all()
        again.free()
    assert not device.driver.hazards  # type: ignore[attr-defined]


def test_poison_of_other_memory(machine: Any) -> None:
    """Plain, pinned and mapped memory; what is mapped again keeps its bytes."""
    driver: Any = sd.checked(machine, poison=True)
    device = sa.Device(0, driver=driver)
    with device.create_stream(), device.current():
        read_back = (ctypes.c_ubyte * SIZE)()
        plain = driver.cuMemAlloc(SIZE)[1]
        driver.cuMemcpyDtoH(ctypes.addressof(read_back), plain, SIZE)
        assert set(read_back) == {0xCB}
        pinned = int(driver.cuMemHostAlloc(SIZE, 0)[1])
        assert set((ctypes.c_ubyte * SIZE).from_address(pinned)) == {0xCB}
        driver.cuMemFree(plain)
        driver.cuMemFreeHost(pinned)
        step = PAGE
        with vmm.PhysicalMemory(device, 2 * step) as memory, vmm.AddressRange(2 * step, driver=driver) as addresses:
            with addresses.map(memory, 0, access=device) as mapped:
                assert set(read(mapped).tolist()) == {0xCB}
                mapped.fill(1)
                device.synchronize()
            with addresses.map(memory, 0, access=device) as mapped:
                assert set(read(mapped).tolist()) == {1}
    assert not driver.hazards


def test_poison_is_no_part_of_a_graph(traced: Any) -> None:
    driver: Any = sd.checked(traced, poison=True)
    stream = cuda.CUstream(2)  # the default stream of this thread
    with sa.Device(0, driver=driver).current():
        driver.cuStreamBeginCapture(stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        driver.cuMemFreeAsync(driver.cuMemAllocAsync(SIZE, stream)[1], stream)
        driver.cuGraphDestroy(driver.cuStreamEndCapture(stream)[1])
    assert names(traced, "cuMemsetD8Async") == []


@pytest.mark.simulated_only("copies of a real driver are not delayed")
@pytest.mark.parametrize("waits", [True, False])
def test_poison_of_what_a_copy_has_not_reached(machine: Any, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that reads the target of a copy before a wait does not see the copied bytes by luck."""
    monkeypatch.setattr(poison, "_LONGEST_DELAY", SECONDS)
    driver: Any = sd.checked(machine, poison=True)
    with sa.Device(0, driver=driver).current():
        stream, source = driver.cuStreamCreate(1)[1], driver.cuMemAlloc(SIZE)[1]
        target = int(driver.cuMemHostAlloc(SIZE, 0)[1])
        driver.cuMemsetD8Async(source, 1, SIZE, stream)
        driver.cuMemcpyDtoHAsync(target, source, SIZE, stream)
        if waits:
            driver.cuStreamSynchronize(stream)
        assert set((ctypes.c_ubyte * SIZE).from_address(target)) == {1 if waits else 0xCB}
        driver.cuStreamSynchronize(stream)
        assert set((ctypes.c_ubyte * SIZE).from_address(target)) == {1}
        driver.cuMemFree(source)
        driver.cuMemFreeHost(target)
        driver.cuStreamDestroy(stream)
    assert not driver.hazards


@pytest.mark.parametrize("waits", [True, False])
def test_a_free_that_waits_is_noted(checker: Any, waits: bool) -> None:
    with sa.Device(0, driver=checker).current():
        stream, memory = checker.cuStreamCreate(1)[1], checker.cuMemAlloc(SIZE)[1]
        checker.cuMemsetD8Async(memory, 1, SIZE, stream)
        if waits:
            checker.cuStreamSynchronize(stream)
        checker.cuMemFree(memory)
        checker.cuStreamDestroy(stream)
    assert not checker.hazards
    assert len(checker.notes) == (not waits) and all("cuMemFree of device memory" in one for one in checker.notes)


@pytest.mark.simulated_only("plain memory that was freed is not there")
def test_poison_of_plain_memory_that_was_freed(machine: Any) -> None:
    class Watching:
        """A driver that looks at memory right before it is freed."""

        def __getattr__(self, name: str) -> Any:
            return getattr(machine, name)

        def cuMemFree(self, pointer: Any) -> Any:
            seen.append(set((ctypes.c_ubyte * SIZE).from_address(int(pointer))))
            return machine.cuMemFree(pointer)

    seen: list[set[int]] = []
    driver: Any = sd.checked(Watching(), poison=True)
    with sa.Device(0, driver=driver).current():
        driver.cuMemFree(driver.cuMemAlloc(SIZE)[1])
    assert seen == [{0xDB}]


@pytest.mark.simulated_only("a copy of memory that was freed may end the process")
def test_poison_of_what_was_freed(machine: Any) -> None:
    device = sa.Device(0, driver=sd.checked(machine, poison=True))
    with device.create_stream() as stream, sa.MemoryPool(device, release_threshold=KEEP) as pool:
        memory = pool.allocate(SIZE, stream)
        memory.fill(1)
        address = memory.address
        memory.free()
        stream.synchronize()
        there = (ctypes.c_ubyte * SIZE).from_address(address)
        assert set(there) == {0xDB}


_PROGRAM = """
import streamalloc as sa
from streamalloc import vmm
device = sa.Device(0)
pool = sa.MemoryPool(device)
one, two = device.create_stream(), device.create_stream()
memory = pool.allocate(64, one)
memory.fill(1, two)
device.synchronize()
garbage = [pool.allocate(128, one)]
garbage.append(garbage)
growable = vmm.GrowableBuffer(device, 8 << 20, 2 << 20)
del garbage, growable
print(type(device.driver).__name__, type(sa.driver.default()).__name__)
"""


def test_a_process_reports_to_its_end(python: Callable[..., CompletedProcess[str]]) -> None:
    """Memory in garbage, and memory whose release was put off, is no leak."""
    done = python(_PROGRAM, STREAMALLOC_CHECK="1")
    assert done.returncode == 0 and done.stdout.split() == ["CheckedDriver", "CheckedDriver"]
    assert "use before allocation: cuMemsetD8Async" in done.stderr
    assert done.stderr.count("leak: ") == done.stderr.count("leak: allocation of 64 bytes") == 1


def test_a_checked_driver_reports_at_the_end(python: Callable[..., CompletedProcess[str]]) -> None:
    """All that the program did not take by finish(), and what was not checked."""
    program = """
import threading
import streamalloc as sa
driver = sa.driver.checked(sa.driver.simulated())
device = sa.Device(0, driver=driver)
pool = sa.MemoryPool(device)
one, two = device.create_stream(), device.create_stream()
memory = pool.allocate(64, one)
threads = [threading.Thread(target=lambda: memory.used(two, write=False)) for _ in range(3)]
for thread in threads:
    thread.start(); thread.join()
class Theirs:
    cuda_stream = int(one.handle)
memory.used(Theirs(), write=False)
"""
    done = python(program)
    lines = done.stderr.splitlines()
    assert lines[0].startswith("use before allocation: a kernel") and "  found: 3 times; this is the first." in lines
    assert max(map(len, lines[: lines.index("this call:")])) <= 84
    assert "threading.py" not in done.stderr
    at = lines.index("streamalloc check: 1 hazard, 1 leak")
    rest = [line.removeprefix("streamalloc check: not checked: ") for line in lines[at + 1 :]]
    assert [line.partition(":")[0].split(" ", 2)[:2] for line in rest] == [["unwritten", "bytes"], ["the", "order"]]


@pytest.mark.parametrize(
    ("value", "on"), [("1", "report"), ("report", "report"), ("raise", "raise"), ("0", ""), ("", "")]
)
def test_the_environment_asks_for_it(
    machine: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str, on: str
) -> None:
    monkeypatch.setattr(selection, "_CHECK", value)
    driver: Any = selection.as_asked(machine)
    assert getattr(driver, "_on", "") == on and selection.as_asked(driver) is driver
    if on:
        raises: Any = pytest.raises(sd.DriverMisuseError) if on == "raise" else contextlib.nullcontext()
        with Bench(driver) as bench, raises:  # type: ignore[arg-type]
            race(bench)
        assert "race: " in capsys.readouterr().err
    monkeypatch.setattr(selection, "_CHECK", "yes")
    with pytest.raises(ValueError, match="STREAMALLOC_CHECK='yes'"):
        selection.as_asked(sd.simulated())


class _Stub:
    """A driver that does nothing, quickly."""

    def __init__(self) -> None:
        self._ok = (cuda.CUresult.CUDA_SUCCESS,)
        self._free = [1 << 30]

    def cuStreamCreate(self, flags: int) -> Any:
        return (*self._ok, cuda.CUstream(0x1000))

    def cuMemAllocFromPoolAsync(self, size: int, pool: Any, stream: Any) -> Any:
        return (*self._ok, cuda.CUdeviceptr(self._free[0]))

    def cuMemFreeAsync(self, pointer: Any, stream: Any) -> Any:
        return self._ok

    cuMemsetD8Async = cuEventRecord = cuStreamWaitEvent = cuStreamSynchronize = lambda self, *args: self._ok


def test_an_operation_takes_little() -> None:
    """1,500 bytecodes for each call at most, however many were made before."""
    driver: Any = sd.checked(_Stub())  # type: ignore[arg-type]
    stream, pool, event = driver.cuStreamCreate(1)[1], cuda.CUmemoryPool(1), cuda.CUevent(1)

    def steps() -> None:
        pointer = driver.cuMemAllocFromPoolAsync(SIZE, pool, stream)[1]
        driver.cuMemsetD8Async(pointer, 0, SIZE, stream)
        driver.cuEventRecord(event, stream)
        driver.cuStreamWaitEvent(stream, event, 0)
        driver.cuMemFreeAsync(pointer, stream)

    for _ in range(200):
        steps()
    bytecodes(steps)  # The checker looks up each frame once, also those of the count.
    assert bytecodes(steps) < 5 * 1_500
    assert driver.hazards == []


class TestQuestions:
    """Calls of the checker itself in the middle of a record."""

    def test_another_thread_records_meanwhile(self, checker: Any) -> None:
        inside: list[bool] = []

        def ask() -> None:
            inside.append(checker._turn.mine())
            other = threading.Thread(target=checker._turn.alone, args=(int,), daemon=True)
            other.start()
            other.join(SECONDS)
            assert not other.is_alive()

        def alone() -> None:
            checker._turn.outside(ask, ())
            inside.append(checker._turn.mine())

        checker._turn.alone(alone)
        assert inside == [False, True] and not checker._turn.mine()

    def test_a_finaliser_revives_the_driver(self, machine: Any) -> None:
        """A deferred release may do so: it still holds the driver whose garbage it was found in."""
        revived: list[Any] = []

        class Dropped:
            def __init__(self, driver: Any) -> None:
                self.driver, self.cycle = driver, self

            def __del__(self) -> None:
                revived.append(self.driver)

        Dropped(sd.checked(machine))
        gc.collect()
        (driver,) = revived
        with sa.Device(0, driver=driver).create_stream() as stream:
            stream.synchronize()
        assert driver.hazards == []


class TestWrongArguments:
    """The driver's answer to them, or the error of the bindings, reaches the program as without a checker.

    On hardware some of these calls end the process.
    """

    @pytest.mark.parametrize("wrong", [None, "x"])
    @pytest.mark.parametrize("poison", [False, True])
    def test_each_call(self, wrong: object, poison: bool) -> None:
        def outcome(driver: Any, name: str, count: int) -> str:
            try:
                return str(getattr(driver, name)(*[wrong] * count)[0])
            except Exception as error:
                return repr(error)

        calls = {*RULES, *COUNTED, *wrapper._QUEUES_HOST_FUNCTION, *wrapper._NODE_OF_HOST_FUNCTION}
        plain, checked = (_with_context(sd.simulated()) for _ in range(2))
        checked = sd.checked(checked, poison=poison)
        for name in sorted(name for name in calls if hasattr(cuda, name)):
            for count in range(len(parameters(name)) + 1):
                there = outcome(plain, name, count)
                assert outcome(checked, name, count) == there, f"{name} of {count} arguments"

    def test_a_late_record(self) -> None:
        """A finaliser makes the call while its own thread records another one."""
        driver: Any = sd.checked(_with_context(sd.simulated()))
        driver._turn.alone(lambda: driver.cuMemcpy2D(None))
        assert not driver.hazards

    def test_a_host_function_at_0(self) -> None:
        driver: Any = sd.checked(_with_context(sd.simulated()))
        assert driver.cuLaunchHostFunc(0, 0, 0) == (cuda.CUresult.CUDA_ERROR_INVALID_VALUE,)
        for stream, function in ((-1, 1), (0, -1)):
            with pytest.raises(OverflowError):
                driver.cuLaunchHostFunc(stream, function, 0)

    def test_an_array_frees_host_memory(self) -> None:
        """The bindings take the address of an object with a buffer."""
        driver: Any = sd.checked(_with_context(sd.simulated()))
        _, address = driver.cuMemHostAlloc(64, 0)
        array = np.ctypeslib.as_array((ctypes.c_uint8 * 64).from_address(int(address)))
        assert not driver.cuMemFreeHost(array)[0]
        assert not driver.outstanding()

    def test_a_mistake_of_a_rule_is_no_wrong_argument(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def mistake(*_: object) -> Any:
            raise AttributeError("a mistake")

        driver: Any = sd.checked(_with_context(sd.simulated()))
        _, address = driver.cuMemAlloc(64)
        monkeypatch.setitem(RULES, "cuMemsetD8", RULES["cuMemsetD8"]._replace(around=mistake))
        assert driver.cuMemsetD8(1, 0, 64) == (cuda.CUresult.CUDA_ERROR_INVALID_VALUE,)
        with pytest.raises(AttributeError, match="a mistake"):
            driver.cuMemsetD8(address, 0, 64)


def _with_context(driver: Any) -> Any:
    """The driver, with device 0's primary context current."""
    driver.cuInit(0)
    driver.cuCtxPushCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
    return driver


def test_a_mapped_file_whose_name_is_no_text(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff")).write_bytes(bytes(mmap.PAGESIZE))
    device = sa.Device(0, driver=sd.checked(sd.simulated()))
    array = np.zeros(64)
    with open(tmp_path / os.fsdecode(b"\xff"), "r+b") as file, mmap.mmap(file.fileno(), 0), device.current():
        assert not device.driver.cuMemHostRegister(array.ctypes.data, array.nbytes, 0)[0]
        assert not device.driver.cuMemHostUnregister(array.ctypes.data)[0]
