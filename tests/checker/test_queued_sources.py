"""Copies whose other side is host memory: objects of the host, and writes to a source that are correct or may be."""

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import testing
from streamalloc.core.deferred import work
from streamalloc.core.session import session_of
from streamalloc.driver.internal import cuda
from streamalloc.interop.loans import Lent
from tests.checker.corpus import SIZE, Bench
from tests.checker.corpus.bench import Steps


class Source:
    """Host memory that has been copied to a device, in a copy that the host has not waited for."""

    def __init__(self, bench: Bench, stack: contextlib.ExitStack) -> None:
        self.bench = bench
        pool = stack.enter_context(sa.MemoryPool(sa.MemPoolProps(location=sa.MemLocation.host()), driver=bench.driver))
        pool.set_access(bench.device, sa.MemAccess.READWRITE)
        self.stream = bench.a
        self.target, self.memory = bench.new(self.stream), pool.allocate(SIZE, self.stream)
        self.stream.synchronize()
        self.array: npt.NDArray[Any] = self.memory.as_array()

    def copy(self) -> None:
        self.target.copy_from(self.memory, self.stream)


@pytest.fixture
def source(machine: Any) -> Iterator[Source]:
    driver = sd.checked(machine)
    with Bench(driver) as bench, contextlib.ExitStack() as stack:
        made = Source(bench, stack)
        yield made
        bench.done(made.target, made.memory)
        assert [str(one) for one in driver.finish() if one.kind != "leak"] == []


@pytest.mark.parametrize(
    "steps",
    [
        "as_array h; poke h; copy_to h x a; as_array h",
        "as_array h; copy_to h x a; poll a; poke h",
        "as_array h; copy_to h x a; fill h 3 a; synchronize a",
        "as_array h; fill h 3 a; copy_to h x a; synchronize a",
        "w = word; as_array h; copy_to h x a; put a w 1; poke h; synchronize a",
        "w = word; as_array h; until a w 1; fill h 3 a; copy_to h x a; open w; finish_past_it a",
        "m = managed; as_array m; as_array h; copy_to h x a; cuMemsetD32Async m 1 1 a; poke h; synchronize a",
        "lend a; as_array h; copy_to h x a; poke h; synchronize a",
        "t = their_stream; as_array h; copy_to h x a; e = event; record a e; cuStreamWaitEvent t e 0; at x t; "
        "finish_past_it t; poke h; synchronize device",
    ],
)
def test_what_is_correct(machine: Any, steps: str) -> None:
    """Reads of the source, writes after a query or by the device, a value or a few bytes that the host may poll, and
    streams that another library has, which it may wait for unseen.
    """
    driver = sd.checked(machine)
    with Bench(driver) as bench:
        Steps(bench, True).run(f"h = of_host_pool; x = new a; {steps}")
    assert driver.hazards == []


def test_the_report_names_the_copy_of_a_graph(source: Source) -> None:
    with source.stream.capture() as graph:
        source.copy()
    with graph:
        graph.launch(source.stream)
        source.array[:] = 1
        source.stream.synchronize()
    driver = source.bench.driver
    (hazard,) = driver.hazards
    driver.hazards.clear()
    assert "source.copy()" in "".join(hazard.stacks["used"]) and "cuMemcpy" in hazard.what
    assert "graph.launch" in "".join(hazard.stacks["used, launched"])


def test_the_next_copy_of_the_same_bytes_shows_the_write(source: Source) -> None:
    for value in (0, 0, 9):
        source.array[:] = value
        source.copy()
    driver = source.bench.driver
    (hazard,) = driver.hazards
    assert hazard.kind == "race" and "source.copy()" in "".join(hazard.stacks["this call"])
    driver.hazards.clear()
    source.stream.synchronize()
    (hazard,) = driver.hazards  # of the first copy: the second one was found
    assert "source.stream.synchronize()" in "".join(hazard.stacks["this call"])
    driver.hazards.clear()


def test_writes_in_a_host_function(source: Source) -> None:
    source.copy()
    source.stream.launch_host_func(lambda: source.array.fill(4))


@testing.kernel("does_not_declare")
def _does_not_declare(address: np.uint64) -> None:
    """Use memory that the checker is not told of."""


@pytest.fixture
def launch(source: Source) -> Iterator[Callable[[int], object]]:
    bench = source.bench
    module = bench.raw("cuModuleLoadData", b"\x7fELF")
    function = bench.raw("cuModuleGetFunction", module, b"does_not_declare")
    shape = (1, 1, 1, 1, 1, 1, 0, cuda.CUstream(source.stream._raw))
    yield lambda address: bench.raw("cuLaunchKernel", function, *shape, ((address,), (ctypes.c_uint64,)), 0)
    bench.raw("cuModuleUnload", module)


@pytest.mark.simulated_only("kernels are functions of the simulated driver")
@pytest.mark.parametrize("when", ["before the copy", "after the copy", "in a graph"])
@pytest.mark.parametrize("named", [True, False])
def test_a_kernel_with_undeclared_uses(source: Source, launch: Callable[[int], object], when: str, named: bool) -> None:
    """It may write the memory that its arguments name, behind or before the copy, and no other memory."""
    driver, address = source.bench.driver, (source.memory if named else source.target).address
    with contextlib.ExitStack() as stack:
        if when == "in a graph":
            with source.stream.capture() as graph:
                launch(address)
            stack.enter_context(graph)
        elif when == "before the copy":
            launch(address)
        source.copy()
        if when == "after the copy":
            launch(address)
        elif when == "in a graph":
            graph.launch(source.stream)
        source.array[:] = 6
        source.stream.synchronize()
    assert [one.kind for one in driver.hazards] == ([] if named else ["race"])
    assert any("do not declare their uses" in one and "(kernel does_not_declare" in one for one in driver.notes)
    driver.hazards.clear()


@pytest.mark.simulated_only("kernels are functions of the simulated driver")
def test_a_kernel_that_has_ended(source: Source, launch: Callable[[int], object]) -> None:
    launch(source.memory.address)
    source.stream.synchronize()
    source.copy()
    source.array[:] = 6
    source.stream.synchronize()
    driver = source.bench.driver
    assert [one.kind for one in driver.hazards] == ["race"]
    driver.hazards.clear()


@pytest.mark.parametrize("host", [np.arange(64, dtype=np.uint8), np.ones((8, 1), np.int64)], ids=["bytes", "words"])
@pytest.mark.usefixtures("checker")
def test_arrays_both_ways(pool: sa.MemoryPool, stream: sa.Stream, host: Any) -> None:
    with pool.allocate(64, stream) as buffer:
        buffer.copy_from(host)
        back = np.zeros_like(host)
        buffer.copy_to(back)
        stream.synchronize()
        assert np.array_equal(back, host)


def test_objects_that_are_no_arrays(checker: Any, pool: sa.MemoryPool, stream: sa.Stream) -> None:
    with pool.allocate(4, stream) as buffer:
        checker.cuMemcpyHtoDAsync(buffer.address, b"abcd", 4, stream.handle)
        back = bytearray(4)
        checker.cuMemcpyDtoHAsync(back, buffer.address, 4, stream.handle)
        stream.synchronize()
        assert back == b"abcd"


@pytest.mark.parametrize("given_back", [True, False])
def test_memory_that_is_freed_while_a_library_has_it(checker: Any, device: sa.Device, given_back: bool) -> None:
    """Nothing reports the library's kernels. They may run until it returns the memory."""
    with device.create_stream() as ours, device.create_stream() as theirs, sa.MemoryPool(device) as pool:
        buffer = pool.allocate(64, ours)
        array = Lent(buffer.view_as(np.uint8), theirs)
        if given_back:
            del array
            gc.collect()
            work(session_of(buffer))  # in which our stream waits for theirs
        buffer.free()
        device.synchronize()
    assert [one.kind for one in checker.hazards] == ([] if given_back else ["free racing a use"])


def test_numpy_takes_pinned_memory_for_itself(checker: Any, device: sa.Device) -> None:
    """It names no stream, and is no work of the legacy one."""
    props = sa.MemPoolProps(location=sa.MemLocation.host())
    with device.create_stream() as stream, sa.MemoryPool(props, driver=checker) as pool:
        pool.set_access(device, sa.MemAccess.READWRITE)
        buffer = pool.allocate(64, stream)
        buffer.fill(3)
        stream.synchronize()
        assert (np.from_dlpack(buffer) == 3).all()
        buffer.free()
        stream.synchronize()
    assert checker.hazards == []
