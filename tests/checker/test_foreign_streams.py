"""Streams of other code, whose waits for each other the checker does not see; and what it says of them all the same."""

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.driver.bindings import cuda
from tests.checker.corpus import SIZE, Bench
from tests.checker.corpus.bench import RAW_ACTS, Steps

FLAGS = 2  # CU_EVENT_DISABLE_TIMING


class Library:
    """Other code, which calls the driver itself."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.driver: Any = bench.driver.wrapped
        self.streams: list[Any] = []

    def stream(self) -> Any:
        with self.bench.device.current():
            made = self.driver.cuStreamCreate(1)[1]
        self.streams.append(made)
        return made

    def order(self, before: Any, after: Any) -> None:
        _order_past_it(self.bench, before, after)

    def use(self, memory: Any, stream: Any, write: bool = True) -> None:
        with self.bench.device.current():
            self.bench.driver.used(memory.address, memory.nbytes, stream, write)


class Named:
    """A stream as another library shows it."""

    def __init__(self, handle: Any) -> None:
        self.cuda_stream = int(handle)


@pytest.fixture
def bench(machine: Any) -> Iterator[Bench]:
    with Bench(sd.checked(machine)) as made:
        yield made


@pytest.fixture
def library(bench: Bench) -> Iterator[Library]:
    made = Library(bench)
    yield made
    bench.device.synchronize()
    for stream in made.streams:
        made.driver.cuStreamDestroy(stream)


@pytest.fixture
def memory(bench: Bench) -> Iterator[Any]:
    made = bench.new(bench.a)
    bench.a.synchronize()
    yield made
    bench.done(made)


def kinds(bench: Bench) -> list[str]:
    return [one.kind for one in bench.driver.hazards]


def _order_past_it(bench: Bench, before: Any, after: Any) -> None:
    driver = bench.driver.wrapped
    with bench.device.current():
        event = driver.cuEventCreate(FLAGS)[1]
        assert not driver.cuEventRecord(event, before)[0]
        assert not driver.cuStreamWaitEvent(after, event, 0)[0]
        driver.cuEventDestroy(event)


def _hold_past_it(bench: Bench, stream: Any, word: int) -> None:
    with bench.device.current():
        assert not bench.driver.wrapped.cuStreamWaitValue32(stream, word, 1, 0)[0]


# Calls of the other code, past the checker.
RAW_ACTS.update(order_past_it=_order_past_it, hold_past_it=_hold_past_it)
HELD = "x = ready; t = their_stream; w = word; hold_past_it t w; at x t; "
PROGRAMS: dict[str, tuple[str, list[str]]] = {
    "it orders streams": (
        "x = ready; t = their_stream; u = their_stream; at x t; order_past_it t u; at x u; order_past_it u 0; at x 0; "
        "order_past_it 0 t; at x t",
        [],
    ),
    "the default stream was first": ("x = ready; t = their_stream; at x 0; order_past_it 0 t; at x t", []),
    "the order goes on with what is seen": (
        "x = ready; t = their_stream; u = their_stream; write x a; e = event; record a e; cuStreamWaitEvent t e 0; "
        "order_past_it t u; at x u",
        [],
    ),
    "memory that is not there yet": ("x = new b; t = their_stream; at x t", ["use before allocation"]),
    "the host waits past the checker": (HELD + "open w; finish_past_it t; free x b", []),
    "the host does not wait": (HELD + "free x b; open w; finish_past_it t", ["free racing a use"]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(bench: Bench, name: str) -> None:
    steps, expected = PROGRAMS[name]
    Steps(bench, True).run(steps)
    assert kinds(bench) == expected


def test_a_stream_is_of_the_context_that_the_driver_names(bench: Bench, library: Library, memory: Any) -> None:
    stream, state = library.stream(), bench.driver.state
    library.use(memory, stream)
    with bench.device.current():
        assert state.stream(stream) in state.streams.all(state.context())


@pytest.mark.parametrize("shown", ["handle", "cuda_stream"])
def test_a_stream_of_ours_that_other_code_has(bench: Bench, library: Library, memory: Any, shown: str) -> None:
    side = library.stream()
    raw = cuda.CUstream(bench.b.handle if shown == "handle" else bench.b.__cuda_stream__()[1])
    bench.write(memory, bench.b)
    library.order(raw, side)
    memory.used(Named(side))
    assert kinds(bench) == []


@pytest.mark.parametrize(
    "view", [lambda memory: memory, lambda memory: memory[:64], lambda memory: memory.view_as("u1")]
)
def test_memory_by_its_array_interface(bench: Bench, library: Library, view: Any) -> None:
    """It names the stream of ours, for which the consumer's stream waits past the checker."""
    side, memory = library.stream(), bench.new(bench.b)
    raw = cuda.CUstream(view(memory).__cuda_array_interface__["stream"])
    library.order(raw, side)
    memory.used(Named(side))
    assert kinds(bench) == []
    library.order(side, raw)
    bench.done(memory)
    assert kinds(bench) == []


def test_streams_of_ours_are_as_they_are(bench: Bench, library: Library, memory: Any) -> None:
    """Nobody has their handles."""
    side = library.stream()
    library.use(memory, side)
    library.driver.cuStreamSynchronize(side)
    bench.write(memory, bench.b)
    assert kinds(bench) == []
    bench.write(memory, bench.c)
    assert kinds(bench) == ["race"]
    library.use(memory, side)
    assert kinds(bench) == ["race"] * 2 or kinds(bench) == ["race"] * 3


class Interrupted:
    """A driver during whose ``cuEventQuery`` another thread works."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.work: Any = None
        self.events: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.driver, name)

    def cuEventCreate(self, flags: int) -> Any:
        answer = self.driver.cuEventCreate(flags)
        self.events.add(int(answer[1]))
        return answer

    def cuEventQuery(self, event: Any) -> Any:
        work, self.work = self.work, None
        if work is not None:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join(10)
            assert not thread.is_alive()
        assert int(event) in self.events, "a destroyed event is queried"
        return self.driver.cuEventQuery(event)

    def cuEventDestroy(self, event: Any) -> Any:
        self.events.remove(int(event))
        return self.driver.cuEventDestroy(event)


@pytest.fixture
def interrupted(machine: Any) -> Iterator[tuple[Interrupted, Bench, Library]]:
    driver = Interrupted(machine)
    with Bench(sd.checked(driver)) as bench:
        yield driver, bench, Library(bench)


@pytest.mark.parametrize("count", [1, 100])
def test_it_leaves_no_events(interrupted: tuple[Interrupted, Bench, Library], count: int) -> None:
    driver, bench, library = interrupted
    before = set(driver.events)
    memory, side, gate = bench.new(bench.a), library.stream(), bench.word()
    bench.a.synchronize()
    _hold_past_it(bench, side, gate)
    for _ in range(count):
        library.use(memory, side)
    ctypes.c_uint32.from_address(gate).value = 1
    library.driver.cuStreamSynchronize(side)
    bench.driver.state.look()
    assert bench.driver.state.streams.foreign.pending == {} and driver.events == before
    bench.done(memory)
    library.driver.cuStreamDestroy(side)


@pytest.mark.parametrize("over", [False, True])
def test_another_thread_uses_a_stream_meanwhile(interrupted: tuple[Interrupted, Bench, Library], over: bool) -> None:
    """The checker has no lock while it queries events: another thread records more of them, or finds them over."""
    driver, bench, library = interrupted
    memory, side, gate = bench.new(bench.a), library.stream(), bench.word()
    bench.a.synchronize()
    _hold_past_it(bench, side, gate)
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: setattr(ctypes.c_uint32.from_address(gate), "value", 1))
        library.use(memory, side)
        library.use(memory, side)

        def work() -> None:
            if over:
                stack.close()
                library.driver.cuStreamSynchronize(side)
            library.use(memory, side)

        driver.work = work
        bench.driver.state.look()
        assert driver.work is None
    library.driver.cuStreamSynchronize(side)
    bench.done(memory)
    assert kinds(bench) == []
    library.driver.cuStreamDestroy(side)


@pytest.mark.parametrize("lent", [False, True])
def test_other_code_may_have_written(machine: Any, lent: bool) -> None:
    """By a kernel that it launches on a stream whose handle it was given."""
    driver = sd.checked(machine, uninitialized=True)
    device = sa.Device(0, driver=driver)
    with sa.MemoryPool(device) as pool, device.create_stream() as stream:
        assert not lent or stream.handle
        with pool.allocate(SIZE, stream) as buffer:
            buffer.copy_to(np.zeros(SIZE, np.uint8))
            buffer.copy_from(np.zeros(SIZE // 4, np.float32))
            buffer.copy_to(np.zeros(SIZE // 4, np.int32))
            stream.synchronize()
    assert [one.kind for one in driver.hazards] == ([] if lent else ["uninitialized", "another type"])


def test_a_handle_that_the_driver_refuses_is_no_stream_of_other_code() -> None:
    """On hardware such a call may end the process."""
    with Bench(sd.checked(sd.simulated())) as bench:
        driver: Any = bench.driver
        with bench.device.current():
            assert driver.cuStreamSynchronize(cuda.CUstream(0x1230))[0]
        made = bench.new(bench.a)
        bench.a.synchronize()
        for stream in (bench.a, bench.b):
            assert stream.handle
            bench.write(made, stream)
        assert kinds(bench) == ["race"]
        bench.done(made)
