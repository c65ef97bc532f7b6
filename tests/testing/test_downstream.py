"""A project that uses streamalloc, with bugs planted: each test of it fails, by its bug alone, and its twin passes."""

import re

import pytest

from tests.processes import ROOT
from tests.testing.conftest import Run

PROJECT = """
import _thread
import multiprocessing
import os
import threading

import numpy as np
from streamalloc import ipc

N = 1 << 16


class Loader:
    def __init__(self):
        self.device = sa.Device(0)
        self.stream = self.device.create_stream(name="loads")
        self.host = sa.MemoryPool(sa.MemLocation.host(), name="staging")
        self.host.set_access(self.device, sa.MemAccess.READWRITE)
        self.pool = sa.MemoryPool(self.device, name="batches")
        self.staging = self.host.allocate(N, self.stream)
        self.stream.synchronize()

    def load(self, array, value):
        array[:] = value
        batch = self.pool.allocate(N, self.stream)
        batch.copy_from(self.staging, self.stream)
        return batch

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stream.synchronize()
        self.staging.free()
        self.device.synchronize()
        for one in (self.host, self.pool, self.stream):
            one.close()


@pytest.fixture(params=[True, False], ids=["right", "wrong"])
def right(request):
    return request.param


@pytest.mark.parametrize("view", [lambda staging: staging.as_array(), np.asarray], ids=["as_array", "asarray"])
def test_a_pinned_source_that_is_overwritten(streamalloc_machine, right, view):
    with Loader() as loader:
        array = view(loader.staging)
        first = loader.load(array, 1)
        if right:
            loader.stream.synchronize()
        loader.load(array, 2).free()
        first.free()


def test_pinned_memory_of_the_driver(streamalloc_machine, right):
    import ctypes

    driver = streamalloc_machine
    with Loader() as loader, loader.device.current(), loader.pool.allocate(N, loader.stream) as batch:
        address = int(driver.cuMemHostAlloc(N, 0)[1])
        array = np.frombuffer((ctypes.c_uint8 * N).from_address(address), np.uint8)
        batch.copy_from(array)
        if right:
            loader.stream.synchronize()
        array[:] = 2
        loader.stream.synchronize()
        driver.cuMemFreeHost(address)


def test_memory_that_is_never_written(streamalloc_machine, right):
    with Loader() as loader, loader.pool.allocate(N, loader.stream) as batch:
        if right:
            batch.fill(0)
        batch.copy_to(np.zeros(N, np.uint8))


@pytest.mark.parametrize("dtype", ["f4", "u4"])
def test_another_type(streamalloc_machine, right, dtype):
    with Loader() as loader, loader.pool.allocate(4 * 1024, loader.stream) as batch:
        batch.copy_from(np.arange(1024, dtype="i4"))
        with loader.pool.allocate(4 * 1024, loader.stream) as copied:
            copied.copy_from(batch)
            copied.copy_to(np.zeros(1024, "i4" if right and dtype == "f4" else dtype))


def test_another_type_of_a_view(streamalloc_machine, right):
    with Loader() as loader, loader.pool.allocate(4 * 1024, loader.stream) as batch:
        batch.view_as("f4").fill(1)
        if right:
            batch.fill(0)
        batch.view_as("f8").copy_to(np.zeros(512))


kept = []


@pytest.fixture(scope="module", autouse=True)
def end():
    yield
    for one in kept:
        if isinstance(one, threading.Event):
            one.set()
        for number in one if isinstance(one, tuple) and isinstance(one[0], int) else ():
            os.close(number)


@pytest.mark.parametrize("open_it", [ipc.Channel.pair, ipc.Channel.listen, os.pipe], ids=["pair", "listen", "pipe"])
def test_what_is_left_open(streamalloc_machine, right, open_it):
    kept.append(open_it())
    if right:
        made = kept.pop()
        for one in made if isinstance(made, tuple) else [made]:
            os.close(one) if isinstance(one, int) else one.close()


def test_a_thread_that_is_left_running(streamalloc_machine, right):
    stop = threading.Event()
    kept.append(stop)
    _thread.start_new_thread(threading.current_thread, ())  # as threads of the driver do
    thread = threading.Thread(target=stop.wait, name="prefetch", daemon=True)
    thread.start()
    if right:
        stop.set()


def other(buffer, right):
    with buffer, buffer.stream.device.create_stream() as reader:
        buffer.fill(3)
        if right:
            reader.wait(buffer.stream)
        buffer.copy_to(np.zeros(N, np.uint8), reader)
        buffer.stream.device.synchronize()


def test_a_missing_wait_in_another_process(streamalloc_machine, right):
    device = sa.Device(0)
    types = sa.MemHandleType.POSIX_FILE_DESCRIPTOR
    with device.create_stream() as stream, sa.MemoryPool(device, handle_types=types) as pool:
        with pool.allocate(N, stream) as buffer:
            buffer.fill(1)
            process = multiprocessing.get_context("spawn").Process(target=other, args=(ipc.share(buffer), right))
            process.start()
            process.join()
            assert process.exitcode == 0
        device.synchronize()
"""

FOUND = {
    "test_a_pinned_source_that_is_overwritten[wrong-as_array]": "race: the host wrote allocation of 64 KiB",
    "test_a_pinned_source_that_is_overwritten[wrong-asarray]": "race: the host wrote allocation of 64 KiB",
    "test_pinned_memory_of_the_driver[wrong]": "race: the host wrote pinned memory of 64 KiB",
    "test_memory_that_is_never_written[wrong]": "uninitialized: cuMemcpyDtoHAsync",
    "test_another_type[wrong-f4]": "another type: a copy reads allocation of 4 KiB",
    "test_another_type_of_a_view[wrong]": "another type: a copy reads allocation of 4 KiB",
    "test_what_is_left_open[wrong-pair]": "Channel to the other end",
    "test_what_is_left_open[wrong-listen]": "Listener at ",
    "test_what_is_left_open[wrong-pipe]": "file descriptor ",
    "test_a_thread_that_is_left_running[wrong]": "thread 'prefetch' of ",
    "test_a_missing_wait_in_another_process[wrong]": "in process ",
}


@pytest.mark.simulated_only("bugs are planted on a simulated machine")
def test_each_bug_is_found_by_its_test(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    result = run(PROJECT, "--streamalloc-check", "--streamalloc-leaks")
    reports = dict(
        re.findall(r"_+ ERROR at teardown of (\S+) _+\n((?:.*\n)+?)(?=_+ ERROR |={3,})", result.stdout.str())
    )
    assert {name: found for name, found in FOUND.items() if found not in reports.get(name, "")} == {}
    assert reports.keys() == FOUND.keys()
    # The unsigned pattern of an integer is no other type.
    result.assert_outcomes(passed=24, errors=len(FOUND))
