"""Host writes to a copy's source that are correct, or that another order may allow, are not reported."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.driver.internal import cuda
from tests.driver.checker.corpus import SIZE, Bench


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


def test_reads(source: Source) -> None:
    source.array[:] = 1
    source.copy()
    assert source.memory.as_array()[0] == 1 and not np.array_equal(source.array, np.zeros(SIZE, np.uint8))


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


def test_writes_after_a_query(source: Source) -> None:
    source.copy()
    while not source.stream.query():
        pass
    source.array[:] = 2


def test_writes_by_the_device_behind_the_copy(source: Source) -> None:
    source.copy()
    source.memory.fill(3, source.stream)


def test_writes_by_the_device_before_the_copy(source: Source) -> None:
    source.memory.fill(3, source.stream)
    source.copy()


def test_writes_by_the_device_on_a_stream_that_waits(source: Source) -> None:
    address, stream = source.bench.word(), source.stream
    source.bench.raw("cuStreamWaitValue32", cuda.CUstream(stream._raw), address, 1, 0)
    source.memory.fill(3, stream)
    source.copy()
    ctypes.c_uint32.from_address(address).value = 1
    while source.array[0] != 3:  # not a wait that the checker sees
        pass


def test_writes_in_a_host_function(source: Source) -> None:
    source.copy()
    source.stream.launch_host_func(lambda: source.array.fill(4))


def test_a_stream_that_another_library_has(source: Source) -> None:
    assert source.stream.handle
    source.copy()
    source.array[:] = 5


def test_a_kernel_that_nobody_reports(source: Source) -> None:
    """It may write the memory behind the copy."""
    state = source.bench.driver._state
    source.copy()
    state.unseen_kernels = True
    source.array[:] = 6


def test_a_value_that_the_host_may_poll(source: Source) -> None:
    address = source.bench.word()
    source.copy()
    source.bench.raw("cuStreamWriteValue32", cuda.CUstream(source.stream._raw), address, 1, 0)
    source.array[:] = 7
