"""Helpers of several test modules."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import itertools
import os
import random
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.core import deferred
from streamalloc.driver.bindings import cuda
from streamalloc.driver.internal import SETTLERS
from streamalloc.simulator import call_lock
from streamalloc.simulator import machine as simulated_machine
from streamalloc.testing import Faults, Gate

MiB = 1 << 20
GROWTH = 32 * MiB  # the step in which a pool takes memory (tests/facts/test_pool_sizes.py)
KEEP = (1 << 64) - 1  # a release threshold that gives nothing back
# Names of locks, at the end of an item of a ``with`` statement.
LOCK = re.compile(
    r"(\b|_)(lock|beginning|end|filling|growing|grown|in_use|opening|slots|snapshots|starting|locked\(\))$"
)

P = ParamSpec("P")
T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]


def read(memory: sa.Memory) -> Bytes:
    """The bytes of some memory, once all that its stream has queued is done."""
    target = np.zeros(memory.nbytes, np.uint8)
    _bytes_of(memory).copy_to(target)
    memory.stream.synchronize()
    return target


def _bytes_of(memory: sa.Memory) -> sa.Memory:
    return memory.bytes if isinstance(memory, sa.TypedView) else memory


def holds(memory: sa.Memory, value: int) -> bool:
    """Whether every byte of some memory has this value."""
    return bool((read(memory) == value).all())


def later_memory_is_whole(pool: sa.Allocator, nbytes: int, stream: sa.Stream, gate: Gate) -> bool:
    """Whether work that the gate holds until now does not overwrite memory that is allocated and filled before."""
    with pool.allocate(nbytes, stream) as again:
        again.fill(2)
        gate.open()
        stream.device.synchronize()
        return holds(again, 2)


def pattern(nbytes: int, seed: int = 0) -> Bytes:
    """Bytes of which no 4 KiB are like any other, so that a page in the wrong place shows."""
    words = np.arange(seed * 7919, seed * 7919 + -(-nbytes // 4), dtype=np.uint32) * np.uint32(2654435761)
    data: Bytes = words.view(np.uint8)[:nbytes]
    return data


def filled(memory: sa.Memory, seed: int, stream: sa.Stream | None = None) -> None:
    """Queue a pattern into memory."""
    _bytes_of(memory).copy_from(pattern(memory.nbytes, seed), stream)


def shows(memory: sa.Memory, seed: int) -> bool:
    """Whether memory has the pattern, once what its stream has queued is done."""
    return bool(np.array_equal(read(memory), pattern(memory.nbytes, seed)))


def executed(stream: sa.Stream, within: float = 10.0) -> bool:
    """Whether the stream's work is done within a time. Asking is no synchronisation, so frees stay unobserved."""
    end = time.monotonic() + within
    while not stream.query():
        if time.monotonic() > end:
            return False
        time.sleep(0.0005)
    return True


def pending(stream: sa.Stream) -> bool:
    """Whether the stream still has work after a moment in which it could have run it."""
    time.sleep(0.005)
    return not stream.query()


def in_threads(*bodies: Callable[[], T]) -> list[T]:
    """Results of functions that run at once, each in a new thread. Raises the error of the first that fails."""
    start = threading.Barrier(len(bodies))

    def run(body: Callable[[], T]) -> T:
        start.wait()
        return body()

    with ThreadPoolExecutor(len(bodies)) as threads:
        return [ended.result() for ended in [threads.submit(run, body) for body in bodies]]


def collect_and_freeze() -> None:
    """Collect, and exempt what is left from later collections.

    Each sixteenth time the exempt objects are collected as well: machines that lived at a time before are among them.
    """
    if next(_collections) % 16 == 0:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


_collections = itertools.count(1)


def library(name: str) -> Any:
    """Another library's module; skips the test where it is not installed or cannot be loaded."""
    if name not in _not_loaded:
        before = set(sys.modules)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return importlib.import_module(name)
        except Exception as error:
            _not_loaded[name] = f"{name} cannot be imported: {type(error).__name__}: {error}"
            for half in set(sys.modules) - before:  # or those who look for it there find a part of it
                if half.partition(".")[0] == name.partition(".")[0]:
                    del sys.modules[half]
    pytest.skip(_not_loaded[name])


_not_loaded: dict[str, str] = {}
"""Reasons by the names of modules: to import some libraries again after a failure ends the process."""


def workout(examples: int, steps: int, **more: Any) -> Any:
    """Settings of Hypothesis for a state machine: the same sequences in each run, however long they take."""
    # Not a requirement of the other tests.
    from hypothesis import HealthCheck, settings

    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        **more,
    )


def bytecodes(work: Callable[[], object], counts: Callable[[FrameType], bool] = lambda frame: True) -> int:
    """The number of bytecodes that a call runs in this thread, in the frames that count: a cost that no other process
    changes. No collection comes in between: its finalisers would count.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if not counts(frame):
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # sys.settrace of Python 3.12 asks whether any frame has set it
    collects = gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count


SEED = os.environ.setdefault("STREAMALLOC_TEST_SEED", time.strftime("%Y%m%d", time.gmtime()))
"""Chooses what sweeps try: the day, unless it is set; ``all`` for everything. The processes of a run inherit it."""


def sampled(points: Iterable[T], count: int) -> list[T]:
    """So many of the points of a sweep, in their order: others each day."""
    points = list(points)
    if SEED == "all" or len(points) <= count:
        return points
    return [points[at] for at in sorted(random.Random(SEED).sample(range(len(points)), count))]


def every(step: int) -> itertools.count[int]:
    """One number of so many, from 1 on, for sweeps whose end is not known: others each day."""
    return itertools.count(1) if SEED == "all" else itertools.count(1 + random.Random(SEED).randrange(step), step)


def in_a_thread(function: Callable[P, T]) -> Callable[P, T]:
    """Has a function run in a thread of its own.

    For tests that make many calls: those of the main thread take half as long again on the simulated driver, which
    replaces the handlers of signals during each.
    """

    @functools.wraps(function)
    def run(*args: P.args, **named: P.kwargs) -> T:
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(function, *args, **named).result()

    return run


def names(driver: Any, *functions: str) -> list[str]:
    """The calls that a traced driver recorded, only those of the given functions if any are given."""
    return [call.name for call in driver.calls if not functions or call.name in functions]


def makes_no_multicast_object(create: Callable[..., Any]) -> Callable[..., Any]:
    """The bindings' ``cuMulticastCreate`` for machines where no test may make an object.

    It has the same signature, and refuses the arguments that the bindings refuse before they call the driver. All that
    would reach the driver is an error of the test.
    """

    @functools.wraps(create)
    def refuse(*args: Any, **named: Any) -> Any:
        given = inspect.signature(create).bind(*args, **named).arguments.values()
        if all(one is None or isinstance(one, cuda.CUmulticastObjectProp) for one in given):
            raise AssertionError("a multicast object is made on real hardware only with STREAMALLOC_TEST_MULTICAST=1")
        return create(*args, **named)

    return refuse


def end_what_was_dropped() -> None:
    """Come by a point of work of all drivers, also of machines that no test uses any more."""
    for queue in list(deferred._unfinished):
        with contextlib.suppress(sa.CudaError):  # a machine that has ended
            while queue.work() or any([*queue._working.values()]):  # another thread attempts an item
                time.sleep(0)


def end_simulated_machines() -> None:
    """Wait for the machines that nobody refers to any more: one with work under way ends in a thread of its own."""
    gc.collect()
    ending = True
    while ending:
        call_lock.enter()
        schedulers = [machine.scheduler for machine in list(simulated_machine._machines)]
        ending = any(scheduler.closed and scheduler._worker is not None for scheduler in schedulers)
        call_lock.leave()
        time.sleep(0.001 * ending)


def open_descriptors() -> int:
    """The number of descriptors that this process has, once what was dropped has ended."""
    end_simulated_machines()
    end_what_was_dropped()
    return len(os.listdir("/proc/self/fd"))


class Account:
    """A driver around another one that keeps account of what is made, and of what is mapped where. It may fail."""

    def __init__(
        self, machine: Any, fault: str | int | None = None, nth: int = 1, result: str = "CUDA_ERROR_UNKNOWN"
    ) -> None:
        """``fault``, ``nth`` and ``result``: as ``faulty`` has them."""
        self.traced = sd.traced(machine)
        self.checked = sd.checked(self.traced)
        # A call that never comes: the wrapper then only counts.
        self.driver: Any = sd.faulty(self.checked, fault or 1 << 40, nth, result=result)

    @property
    def device(self) -> sa.Device:
        return sa.Device(0, driver=self.driver)

    @property
    def mapped(self) -> dict[int, int]:
        """The mappings that are live: address and size."""
        end_what_was_dropped()
        made = [call.args for call in self.traced.calls if call.name == "cuMemMap" and not call.answer[0]]
        sizes = {int(address): int(size) for address, size, *_ in made}
        return {address: sizes[address] for address in self.checked.outstanding().get("mapping", ())}

    @property
    def physical_bytes(self) -> int:
        """The physical memory that was made and not released: of this process alone, on whatever device."""
        left = self.left.get("physical memory", ())
        made = [call for call in self.traced.calls if call.name == "cuMemCreate" and not call.answer[0]]
        sizes = {int(call.answer[1]): int(call.args[0]) for call in made}
        return sum(sizes[handle] for handle in left)

    @property
    def left(self) -> dict[str, Any]:
        """Whatever was made and not given back, once what was dropped has had its turn."""
        end_what_was_dropped()
        if self.checked.outstanding():
            # A pool ends once the host has synchronised with its frees.
            sa.Device(0, driver=self.traced).synchronize()
            end_what_was_dropped()
        for settle in SETTLERS:  # default streams, which live as long as their driver, keep events to record again
            settle()
        return dict(self.checked.outstanding())

    def calls(self, *functions: str) -> list[str]:
        """The calls so far, only those of the given functions if any are given."""
        return [call.name for call in self.traced.calls if not functions or call.name in functions]


class NoHostMemory:
    """A driver that pins no host memory once it was told so, by any of the calls that do."""

    CALLS = ("cuMemHostRegister", "cuMemAllocFromPoolAsync", "cuMemHostAlloc")

    def __init__(self, driver: Any) -> None:
        self._layers: list[Any] = []
        for _ in self.CALLS:
            kind: Any = Faults
            self._layers.append(kind(self._layers[-1] if self._layers else driver))
        self.driver = self._layers[-1]

    def begin(self, registered: int = 0) -> None:
        """Refuse all calls after so many that register memory."""
        for layer, call in zip(self._layers, self.CALLS, strict=True):
            layer.fail(call, registered + 1 if call == self.CALLS[0] else 1, times=1000)

    def stop(self) -> None:
        """Refuse no more calls."""
        for layer in self._layers:
            layer.stop()


def each_raises(error: Any, *uses: Callable[[], object], match: str | None = None) -> None:
    """Have each use raise this error, with a text that matches."""
    __tracebackhide__ = True  # pytest shows the line of the test
    for number, use in enumerate(uses, 1):
        try:
            with pytest.raises(error, match=match):
                use()
        except (pytest.fail.Exception, AssertionError) as failure:
            raise AssertionError(f"use {number} of {len(uses)}: {failure}") from None


@contextlib.contextmanager
def soon(call: Callable[[], object], seconds: float = 0.02) -> Iterator[None]:
    """Call a function on another thread a moment later, while the block waits for what it does."""
    timer = threading.Timer(seconds, call)
    timer.start()
    try:
        yield
    finally:
        timer.join()


@contextlib.contextmanager
def captured(driver: Any, stream: Any, mode: str = "GLOBAL") -> Iterator[None]:
    """A block in which other code captures a stream, one of ours or a handle; the capture ends well."""
    raw = cuda.CUstream(int(getattr(stream, "handle", stream)))
    assert not driver.cuStreamBeginCapture(raw, getattr(cuda.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{mode}"))[0]
    try:
        yield
    finally:
        result, graph = driver.cuStreamEndCapture(raw)
    assert not result and not driver.cuGraphDestroy(graph)[0]


class Replaced:
    """A driver with some functions, or other attributes, of the test."""

    def __init__(self, driver: Any, **others: Any) -> None:
        self._driver = driver
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def public_names(module: Any) -> list[str]:
    """The names of ``__all__``. That of the package itself is short, for ``help``: those that completion offers."""
    whole = module.__name__ == "streamalloc"
    return [name for name in dir(module) if not name.startswith("_")] if whole else [*module.__all__]
