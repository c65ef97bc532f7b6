"""Machines come and go: what they leave behind, forks, the end of the interpreter."""

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable

import pytest

from streamalloc.simulator import call_lock
from tests.facts.support import MiB
from tests.facts.support import value as ok
from tests.processes import finished, fork, python
from tests.simulator.support import mappings, new_rig
from tests.support import KEEP, beside, bytecodes, eventually, in_a_thread, open_descriptors

pytestmark = pytest.mark.simulated_only("tests of the simulated driver itself")


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
    files, maps, threads = open_descriptors(), mappings(), threading.active_count()
    for _ in range(100):
        use()
    assert open_descriptors() <= files
    assert eventually(lambda: threading.active_count() <= threads, 60)
    assert mappings() <= maps


def test_an_ended_context_leaves_no_streams() -> None:
    """Neither its default streams, nor their ranks."""
    rig = new_rig()
    d = rig.raw
    scheduler = d._machine.scheduler
    before = len(scheduler.streams)
    for _ in range(3):
        for stream in (1, 2):
            ok(d.cuMemFreeAsync(ok(d.cuMemAllocAsync(MiB, stream)), stream))
            ok(d.cuStreamSynchronize(stream))
        assert len(scheduler.streams) == before + 2
        ok(d.cuDevicePrimaryCtxReset(0))
        assert len(scheduler.streams) == before and not scheduler.ranks


@pytest.mark.parametrize("own", [True, False])
def test_captures_end_with_their_context(own: bool) -> None:
    """Otherwise they would forbid unsafe calls for ever."""
    rig = new_rig()
    d = rig.raw
    stream = ok(d.cuStreamCreate(1)) if own else rig.per_thread
    ok(d.cuStreamBeginCapture(stream, d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    ok(d.cuDevicePrimaryCtxReset(0))
    ok(d.cuMemFree(ok(d.cuMemAlloc(MiB))))


@in_a_thread
def test_making_a_machine_is_cheap() -> None:
    new_rig()
    assert bytecodes(new_rig) < 20_000


def test_a_child_of_fork_cannot_use_an_initialised_driver() -> None:
    rig = new_rig()
    d, stream, pool = rig.raw, rig.stream(), rig.pool(KEEP)
    code = int(d.CUresult.CUDA_ERROR_NOT_INITIALIZED)

    # in the child even the lock that another thread held at the time of the fork must not matter
    def locked(hold: Callable[[], None]) -> None:
        call_lock.enter()
        hold()
        call_lock.leave()

    with beside(locked):
        child = fork()
        if child == 0:
            answers = [
                d.cuInit(0),
                d.cuDeviceGetCount(),
                d.cuMemAllocFromPoolAsync(4, pool, stream),
                d.cuStreamSynchronize(stream),
                d.cuMemFree(0),
            ]
            os._exit(0 if all(int(answer[0]) == code for answer in answers) else 1)
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


ENDS = """
import atexit, gc, random, sys, threading, time
import streamalloc as sa
from streamalloc import ipc, vmm
from streamalloc.testing import Gate

dice = random.Random(int(sys.argv[1]))
device = sa.Device(0, driver=sa.driver.simulated(seed=dice.choice([None, 7])))
stream, other = device.create_stream(), device.create_stream()
pool = sa.MemoryPool(device, handle_types=sa.MemHandleType.POSIX_FILE_DESCRIPTOR)
evicted = vmm.GrowableBuffer(device, 64 << 20, 4 << 20, stream=other)
evicted.evict()
kept = [evicted]
gate = Gate(device)
gate.hold(stream)
if dice.random() < 0.5:
    gate.hold(other)

def in_calls():
    own = device.create_stream()
    while True:
        pool.allocate(4096, own).free()

def finished():
    own = device.create_stream()
    kept.extend([own, pool.allocate(4096, own)])

def cycle():
    garbage = [pool.allocate(4096, stream), device.create_stream(), stream.record()]
    garbage.append(garbage)

def shared():
    buffer = pool.allocate(4096, stream)
    kept.append(ipc.share(buffer))
    buffer.free(still_imported="defer")

def closed_pool():
    with sa.MemoryPool(device) as brief:
        kept.append(brief.allocate(10, stream))

def daemon(work):
    threading.Thread(target=work, daemon=True).start()

steps = [
    lambda: daemon(in_calls),
    lambda: daemon(stream.synchronize),
    lambda: threading.Thread(target=finished).start(),
    lambda: kept.append(pool.allocate(1 << 20, stream)),
    lambda: pool.allocate(1 << 20, stream).free(),
    lambda: kept.append(vmm.GrowableBuffer(device, 64 << 20, 2 << 20, stream=other)),
    lambda: atexit.register(lambda: (pool.allocate(64, other), gc.collect())),
    cycle, shared, closed_pool,
]
for step in dice.choices(steps, k=8):
    step()
end = dice.randrange(4)
if end == 0:
    del kept, pool, gate, evicted
elif end == 1:
    sys.exit(0)
elif end == 2:
    gc.set_threshold(1)
"""


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 20))])
def test_the_interpreter_ends_whatever_is_held(seed: int) -> None:
    """Closed gates, evicted memory, deferred frees, daemon threads in the middle of calls."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(seed)], capture_output=True, text=True, timeout=25, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Fatal" not in done.stderr


LATE = '''
import os, sys, threading, time
import streamalloc.driver as sd

class Late:
    def __init__(self, driver, stream, memory):
        self.driver, self.write = driver, os.write
        self.stream, self.memory = stream, memory

    def __del__(self):
        d = self.driver
        calls = [d.cuMemFree(self.memory), d.cuStreamSynchronize(self.stream), d.cuMemAlloc(64), d.cuInit(0)]
        self.write(1, " ".join([answer[0].name[5:] for answer in calls]).encode())

driver = sd.simulated()
driver.cuInit(0)
driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
stream, large = driver.cuStreamCreate(1)[1], driver.cuMemAlloc(1 << 28)[1]
driver.cuMemsetD8Async(large, 1, 1 << 28, stream)
place, kept = sys.argv[1], Late(driver, stream, driver.cuMemAlloc(1 << 20)[1])
if place == "a cycle":
    kept = [kept]
    kept.append(kept)
elif place == "sys":
    sys.kept = kept
elif place == "held":
    word = driver.cuMemHostAlloc(64, 0)[1]
    driver.cuStreamWaitValue32(stream, word, 1, 0)
elif place == "stopped":
    names = {}  # not those of this module, which the thread would keep
    exec("""
from streamalloc.simulator.call_lock import enter
from time import sleep

def stop():
    enter()
    sleep(100)
""", names)
    threading.Thread(target=names["stop"], daemon=True).start()
    time.sleep(0.1)
'''


@pytest.mark.parametrize(
    ("place", "answers"),
    [
        ("a module", [True, True, True, True]),
        ("a cycle", [True, True, True, True]),
        ("held", [False, False, True, True]),  # the real driver would wait for ever
        ("sys", [False, False, False, False]),  # names of modules, with which calls are made, are gone
        ("stopped", [False, False, False, False]),  # a thread that never runs again holds the lock
    ],
)
def test_calls_of_finalisers_while_the_interpreter_exits(place: str, answers: list[bool]) -> None:
    """On an H200 they are all made."""
    ended = finished(python(LATE, place))
    results = ["SUCCESS" if made else "ERROR_DEINITIALIZED" for made in answers]
    assert (ended.stdout.split(), ended.stderr) == (results, "")
