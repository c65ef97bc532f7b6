"""Machines come and go: what they leave behind, forks, the end of the interpreter."""

from __future__ import annotations

import gc
import os
import textwrap
import threading
import time
import warnings

import pytest

from tests.driver.simulator.support import KEEP, new_rig
from tests.facts.support import MiB
from tests.facts.support import value as ok
from tests.processes import finished, python

pytestmark = pytest.mark.simulated_only("tests of the simulated driver itself")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    with open("/proc/self/maps") as lines:
        return sum("memfd:streamalloc" in line for line in lines)


def use() -> None:
    """Leave a machine with live allocations, a held stream, and a worker."""
    rig = new_rig()
    d, stream, pool, word = rig.raw, rig.stream(), rig.pool(KEEP), rig.word()
    address = rig.allocate(pool, MiB, stream)
    rig.hold(stream, word)
    ok(d.cuMemsetD8Async(address, 1, MiB, stream))
    ok(d.cuMemAlloc(4 * MiB))


def test_forgotten_machines_give_everything_back() -> None:
    use()
    gc.collect()
    files, maps, threads = descriptors(), mappings(), threading.active_count()
    for _ in range(100):
        use()
    gc.collect()
    deadline = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.005)
    assert threading.active_count() <= threads
    assert descriptors() <= files
    assert mappings() <= maps


def test_making_a_machine_is_cheap() -> None:
    start = time.perf_counter()
    for _ in range(50):
        new_rig()
    assert (time.perf_counter() - start) / 50 < 0.003


def test_a_child_of_fork_cannot_use_an_initialised_driver() -> None:
    rig = new_rig()
    d, stream, pool = rig.raw, rig.stream(), rig.pool(KEEP)
    code = int(d.CUresult.CUDA_ERROR_NOT_INITIALIZED)
    # in the child even the lock that another thread held at the time of the fork must not matter
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with d._machine.lock:
            held.set()
            let_go.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of forks among threads
        child = os.fork()
    if child == 0:
        answers = [
            d.cuInit(0),
            d.cuDeviceGetCount(),
            d.cuMemAllocFromPoolAsync(4, pool, stream),
            d.cuStreamSynchronize(stream),
            d.cuMemFree(0),
        ]
        os._exit(0 if all(int(answer[0]) == code for answer in answers) else 1)
    let_go.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ok(d.cuStreamSynchronize(stream))


_AT_EXIT = """
    import ctypes, sys
    from streamalloc.driver import simulated

    d = simulated()
    d.cuInit(0)
    d.cuCtxSetCurrent(d.cuDevicePrimaryCtxRetain(0)[1])
    stream = d.cuStreamCreate(1)[1]
    word = d.cuMemHostAlloc(4, 0)[1]
    ctypes.memset(word, 0, 4)
    memory = d.cuMemAllocAsync(1 << 20, stream)[1]
    d.cuStreamWaitValue32(stream, word, 1, 0)
    d.cuMemsetD8Async(memory, 1, 1 << 20, stream)
    busy = d.cuStreamCreate(1)[1]
    large = d.cuMemAlloc(1 << 30)[1]
    d.cuMemsetD8Async(large, 1, 1 << 30, busy)

    class Late:
        def __del__(self, free=d.cuMemFreeAsync, memory=memory, stream=stream):
            free(memory, stream)

    late = sys.late = Late()
    print("end")
"""


def test_the_interpreter_ends_with_work_pending() -> None:
    done = finished(python(textwrap.dedent(_AT_EXIT)))
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_calls_of_what_was_forgotten_with_its_machine() -> None:
    """Its finaliser may come after the machine's where both are one piece of garbage."""
    rig = new_rig()
    rig.raw._machine.close()
    answers = (rig.raw.cuMemRelease(1), rig.raw.cuMemGetInfo(), rig.raw.cuMemFree(1))
    assert {answer[0].name for answer in answers} == {"CUDA_ERROR_DEINITIALIZED"}
