"""Nothing comes in the middle of a simulated call: no other thread, no collection, no signal handler's exception."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import ipc
from streamalloc.simulator import BrokenMachineError, call_lock
from tests.facts.support import MiB, Rig
from tests.facts.support import value as ok
from tests.interrupting import since_3_11
from tests.simulator.support import in_a_call, new_rig
from tests.support import collecting_at, eventually, soon

pytestmark = pytest.mark.simulated_only("tests of the simulated driver itself")


class Interrupted(Exception):
    """Raised by the signal handlers of these tests."""


class Alarm:
    """Has a signal handler raise :class:`Interrupted` in a ``with`` block, some seconds after it began."""

    def __init__(self) -> None:
        self.armed = False
        self.before = signal.signal(signal.SIGALRM, self.ring)
        self.came = 0

    def ring(self, _number: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code is Alarm.__enter__.__code__:  # under load, before the block has begun
            signal.setitimer(signal.ITIMER_REAL, self.seconds)
        elif self.armed:
            self.armed = False
            raise Interrupted

    def __call__(self, seconds: float) -> Alarm:
        self.armed = True
        self.seconds = seconds
        return self

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, kind: object, *_: object) -> bool:
        self.armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.came += kind is Interrupted
        return kind is Interrupted


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    made = Alarm()
    yield made
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, made.before)


@pytest.fixture
def starts() -> Iterator[list[bool]]:
    """For each collection that begins: whether its thread is in the middle of a simulated call."""
    seen: list[bool] = []

    def note(phase: str, _info: object) -> None:
        if phase == "start":
            seen.append(in_a_call())

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(work, range(count)))


class Size:
    """The value of an attribute of a pool; ``during`` is called in the middle of the call that reads it."""

    name = "CU_MEMPOOL_ATTR_RELEASE_THRESHOLD"

    def __init__(self, during: Callable[[], object]) -> None:
        self.during = during

    def getPtr(self) -> int:
        self.during()
        return 0

    def __int__(self) -> int:
        return 7


def test_a_signal_during_a_collection_is_not_lost(alarm: Alarm, rig: Rig) -> None:
    """A function of Python in ``gc.callbacks``, as hypothesis has one, gets what the handler raises, and drops it."""
    ours = [one for one in gc.callbacks if one.__module__.startswith("streamalloc")]
    others, gc.callbacks[:] = [one for one in gc.callbacks if one not in ours], ours
    kept = [[number] for number in range(300_000)]
    try:
        for _ in range(5):
            with alarm(0.002):
                for _ in range(100):
                    gc.collect()
                    ok(rig.raw.cuDeviceGetCount())
    finally:
        gc.callbacks.extend(others)
    assert alarm.came == 5 and len(kept) == 300_000


def test_what_the_program_sets_during_a_call_stays() -> None:
    """As another thread may: whether there are collections, and their thresholds."""
    rig, before = new_rig(), gc.get_threshold()
    pool, attribute = rig.pool(), rig.raw.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD

    def change() -> None:
        assert in_a_call() and not gc.get_threshold()[0]
        gc.disable()
        gc.set_threshold(before[0] + 1)

    try:
        ok(rig.raw.cuMemPoolSetAttribute(pool, attribute, Size(change)))
        assert not gc.isenabled() and gc.get_threshold() == (before[0] + 1, *before[1:])
    finally:
        gc.enable()
        gc.set_threshold(*before)


@pytest.mark.parametrize("threshold", [1, 50, 700])
def test_no_collection_starts_in_a_call(starts: list[bool], threshold: int) -> None:
    device = sa.Device(0, driver=sd.simulated())
    pool = sa.MemoryPool(device, handle_types=sa.MemHandleType.POSIX_FILE_DESCRIPTOR)

    def work(_: int) -> None:
        stream = device.create_stream()
        for _ in range(150):
            buffer = pool.allocate(4096, stream)
            ipc.share(buffer)
            cycle: list[object] = [buffer, stream.record()]
            cycle.append(cycle)
            del buffer, cycle
            stream.synchronize()

    with collecting_at(threshold):
        in_threads(4, work)
    assert starts and not any(starts)
    assert gc.get_threshold()[0]


def test_collections_that_others_force(starts: list[bool], rig: Rig) -> None:
    """Whoever turns collections on meanwhile gets some in the middle of calls: no finaliser runs there."""
    d, inside, finalised = rig.raw, list[bool](), list[int]()
    context = ok(d.cuCtxGetCurrent())
    end = time.monotonic() + 0.3

    class Finalised:
        def __init__(self) -> None:
            self.cycle = self
            self.stream = ok(d.cuStreamCreate(1))

        def __del__(self) -> None:
            inside.append(in_a_call())
            finalised.append(d.cuStreamDestroy(self.stream)[0])

    def work(number: int) -> None:
        ok(d.cuCtxSetCurrent(context))
        for _ in range(300):
            if number:
                Finalised()
        while not number and time.monotonic() < end:
            gc.enable()

    with collecting_at(1):
        in_threads(4, work)
    gc.collect()
    assert finalised and not any(inside) and not any(finalised)
    assert not d._machine.streams


def test_automatic_collections_go_on_while_a_call_waits(rig: Rig) -> None:
    stream, word = rig.stream(), rig.word()
    rig.hold(stream, word)
    context = ok(rig.raw.cuCtxGetCurrent())

    def wait() -> None:
        ok(rig.raw.cuCtxSetCurrent(context))
        ok(rig.raw.cuStreamSynchronize(stream))

    with soon(wait, 0):
        time.sleep(0.05)
        try:
            # Not at once: a thread may be within a call, where collections are put off.
            assert eventually(lambda: bool(gc.get_threshold()[0]))
        finally:
            word.value = 1
    assert gc.get_threshold()[0]


@since_3_11
@pytest.mark.filterwarnings("ignore:Exception ignored in. .function WeakSet")  # where the handler may run, too
def test_an_exception_of_a_handler_comes_after_the_call(alarm: Alarm) -> None:
    """A call ends before the handler runs: at most its answer is lost, and the machine's books are in order."""
    rig, dice = new_rig(), random.Random(7)
    d, stream = rig.raw, rig.stream()
    pool = rig.pool(threshold=0)
    machine = d._machine
    found = machine.pools.get(int(pool))
    end = time.monotonic() + 20
    while alarm.came < 60 and time.monotonic() < end:
        size = dice.randrange(1, 40 * MiB)
        before = set(machine.allocations.at)
        with contextlib.suppress(Interrupted), alarm(dice.random() * 0.0004):
            for _ in range(10):
                d.cuMemFreeAsync(ok(d.cuMemAllocFromPoolAsync(size, pool, stream)), stream)
                d.cuStreamSynchronize(stream)
        left = set(machine.allocations.at) - before
        assert len(left) <= 1
        assert found.used == size * len(left)
        for address in left:
            ok(d.cuMemFreeAsync(address, stream))
    ok(d.cuStreamSynchronize(stream))
    assert alarm.came == 60
    assert rig.reserved(pool) == 0
    block, size = found.line._last, 0
    while block is not None:
        block, size = block.prev, size + block.size
    assert size == found.line.capacity


def test_handlers_are_in_place_between_calls(alarm: Alarm, rig: Rig) -> None:
    """During a call another one is there; a signal that comes runs the handler once, at the end of the call."""
    seen: list[bool] = []
    during: list[Any] = []

    def ring() -> None:
        signal.raise_signal(signal.SIGALRM)
        during.append(signal.getsignal(signal.SIGALRM))

    pool, attribute = rig.pool(), rig.raw.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD

    def handle(*_: object) -> None:
        seen.append(in_a_call())

    signal.signal(signal.SIGALRM, handle)
    ok(rig.raw.cuMemPoolSetAttribute(pool, attribute, Size(ring)))
    assert during != [handle] and seen == [False]
    assert signal.getsignal(signal.SIGALRM) is handle
    assert int(ok(rig.raw.cuMemPoolGetAttribute(pool, attribute))) == 7


def test_a_handler_that_raises_where_handlers_are_noted(alarm: Alarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are noted again in the next call, and all are in place after it."""
    driver = sd.simulated()
    assert driver.cuInit(0)[0] == 0
    raised: list[object] = []

    def is_handler(handler: object) -> bool:
        if not raised:
            raised.append(handler)
            raise Interrupted
        return callable(handler)

    def handle(*_: object) -> None:
        pass

    signal.signal(signal.SIGALRM, handle)
    monkeypatch.setattr(call_lock, "callable", is_handler, raising=False)
    with pytest.raises(Interrupted):
        driver.cuDeviceGetCount()
    assert driver.cuDeviceGetCount()[1] == 1
    assert signal.getsignal(signal.SIGALRM) is handle


def test_a_call_that_was_cut_short_breaks_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler of a signal that calls do not hold raises in the middle of one."""
    rig, other = new_rig(), new_rig()
    pool, stream = rig.pool(), rig.stream()
    machine = rig.raw._machine

    class Stop(BaseException):
        pass

    def stop(*_: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGURG, stop)
    try:
        monkeypatch.setattr(machine.allocations, "add", lambda _: signal.raise_signal(signal.SIGURG))
        with pytest.raises(Stop):
            rig.raw.cuMemAllocFromPoolAsync(64, pool, stream)
    finally:
        signal.signal(signal.SIGURG, before)
    for call in (rig.raw.cuDeviceGetCount, lambda: rig.raw.cuInit(0), lambda: rig.raw.cuStreamDestroy(stream)):
        with pytest.raises(BrokenMachineError, match="cuMemAllocFromPoolAsync"):
            call()
    assert not in_a_call() and gc.get_threshold()[0]
    assert ok(other.raw.cuDeviceGetCount()) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_waiting_can_be_interrupted(alarm: Alarm, rig: Rig) -> None:
    d, stream, word = rig.raw, rig.stream(), rig.word()
    rig.hold(stream, word)
    for call in (lambda: d.cuStreamSynchronize(stream), d.cuCtxSynchronize):
        with alarm(0.1):
            call()
        assert rig.held(stream)
    assert alarm.came == 2
    word.value = 1
    ok(d.cuStreamSynchronize(stream))


def test_a_storm_of_signals_whose_handler_raises(alarm: Alarm, rig: Rig) -> None:
    """In calls that wait and calls that do not: the machine, its lock and the handlers are whole afterwards."""
    d, stream, held = rig.raw, rig.stream(), rig.word()
    context, address = ok(d.cuCtxGetCurrent()), ok(d.cuMemAlloc(64))
    came = 0

    def handle(_: int, frame: FrameType | None) -> None:
        nonlocal came
        files = []
        while frame is not None:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        # Python loses what a handler raises in a finaliser.
        if call_lock.__file__ in files and weakref.__file__ not in files:
            came += 1
            raise Interrupted

    signal.signal(signal.SIGALRM, handle)
    end = time.monotonic() + 20
    gc.disable()  # it runs finalisers
    signal.setitimer(signal.ITIMER_REAL, 2e-4, 2e-4)
    try:
        while came < 100 and time.monotonic() < end:
            for value in (0, 1):
                held.value = value
                with contextlib.suppress(Interrupted):
                    rig.hold(stream, held)
                with contextlib.suppress(Interrupted):
                    d.cuMemsetD8(address, 1, 64)
                with contextlib.suppress(Interrupted):
                    d.cuStreamQuery(stream) if value else d.cuStreamSynchronize(stream)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.enable()
    assert came >= 100
    while call_lock._late:  # of two signals in one call, the next call raises the second
        with contextlib.suppress(Interrupted):
            d.cuStreamQuery(stream)
    d.cuStreamQuery(stream)
    assert signal.getsignal(signal.SIGALRM) is handle

    def work(_: int) -> None:
        ok(d.cuCtxSetCurrent(context))
        ok(d.cuStreamSynchronize(stream))
        ok(d.cuMemFree(address))

    in_threads(1, work)
    assert not in_a_call() and eventually(lambda: gc.get_threshold()[0])  # the device's thread may be at work


def test_a_handler_that_makes_calls(alarm: Alarm, rig: Rig) -> None:
    """In the middle of a wait they are made at once, else after the call."""
    d, stream, word = rig.raw, rig.stream(), rig.word()
    rig.hold(stream, word)
    seen: list[int] = []

    def handle(*_: object) -> None:
        seen.append(int(ok(d.cuMemAlloc(4096))))
        word.value = 1

    signal.signal(signal.SIGALRM, handle)
    with alarm(0.05):
        ok(d.cuStreamSynchronize(stream))
    assert len(seen) == 1
    for _ in range(200):
        with alarm(0.0001):
            ok(d.cuMemFree(ok(d.cuMemAlloc(MiB))))
    for address in seen:
        ok(d.cuMemFree(address))
    assert not [one for one in d._machine.allocations.at if one != ctypes.addressof(word)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_handler_that_makes_calls_while_a_wait_ends(alarm: Alarm) -> None:
    """The handler's call finds the lock free, and leaves it so."""
    device = sa.Device(0, driver=sd.simulated())
    with device.create_stream() as stream, device.create_stream() as other:

        def handle(*_: object) -> None:
            if alarm.armed:
                other.query()
                signal.setitimer(signal.ITIMER_REAL, 2e-4)  # no sooner, or on a busy machine handlers never end

        alarm.armed = True
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 2e-4)
        try:
            for _ in range(200):
                stream.launch_host_func(lambda: time.sleep(3e-4))
                stream.synchronize()
        finally:
            alarm.armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_in_the_middle_of_other_threads_calls(rig: Rig) -> None:
    """The child has its collector back, and can make a machine of its own."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            rig.raw.cuDeviceGetCount()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            child = os.fork()
            if not child:
                good = False
                try:
                    signal.alarm(10)
                    good = gc.get_threshold()[0] > 0 and new_rig().raw.cuDeviceGetCount()[1] == 1
                finally:
                    os._exit(0 if good else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
