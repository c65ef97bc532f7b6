"""Helpers that several test modules use."""

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
    """Return the bytes of ``memory``, after all work of its stream."""
    target = np.zeros(memory.nbytes, np.uint8)
    _bytes_of(memory).copy_to(target)
    memory.stream.synchronize()
    return target


def _bytes_of(memory: sa.Memory) -> sa.Memory:
    return memory.bytes if isinstance(memory, sa.TypedView) else memory


@contextlib.contextmanager
def _look(memory: sa.Memory, before: int) -> Iterator[Bytes]:
    """Read ``memory``, after all work of its stream, into host memory with the bytes ``before``. That is used again,
    because the kernel takes longer to give memory than to copy it.
    """
    kept = _kept.pop() if _kept else np.empty(1 << 24, np.uint8)
    found = kept[: memory.nbytes] if memory.nbytes <= len(kept) else np.empty(memory.nbytes, np.uint8)
    found.fill(before)
    _bytes_of(memory).copy_to(found)
    memory.stream.synchronize()
    yield found
    _kept.append(kept)


_kept: list[Bytes] = []
"""Memory that no :func:`_look` uses at the moment."""


def holds(memory: sa.Memory, value: int) -> bool:
    """Whether every byte of ``memory`` has this value, after all work of its stream."""
    with _look(memory, value ^ 255) as found:
        return not len(found) or bool(found.min() == found.max() == value)


def later_memory_is_whole(pool: sa.Allocator, nbytes: int, stream: sa.Stream, gate: Gate) -> bool:
    """Whether newly allocated memory is intact after the gate was opened: the work that the gate blocked does not
    overwrite it. Opens ``gate``.
    """
    with pool.allocate(nbytes, stream) as again:
        again.fill(2)
        gate.open()
        stream.device.synchronize()
        return holds(again, 2)


def pattern(nbytes: int, seed: int = 0) -> Bytes:
    """Return bytes in which no two blocks of 4 KiB are equal, so that a page in the wrong place is noticed. Another
    ``seed`` gives other bytes.
    """
    words = np.arange(seed * 7919, seed * 7919 + -(-nbytes // 4), dtype=np.uint32) * np.uint32(2654435761)
    data: Bytes = words.view(np.uint8)[:nbytes]
    return data


def filled(memory: sa.Memory, seed: int, stream: sa.Stream | None = None) -> None:
    """Queue a copy of :func:`pattern` into ``memory``, on ``stream`` (default: the memory's own)."""
    _bytes_of(memory).copy_from(pattern(memory.nbytes, seed), stream)


def shows(memory: sa.Memory, seed: int) -> bool:
    """Whether ``memory`` has the bytes of :func:`pattern`, after all work of its stream."""
    with _look(memory, 0) as found:
        return bool(np.array_equal(_words(found), _words(pattern(memory.nbytes, seed))))


def _words(data: Bytes) -> npt.NDArray[Any]:
    """The bytes, eight at a time if they are so many: they are compared in an eighth of the time."""
    return data if len(data) % 8 else data.view(np.uint64)


def eventually(holds: Callable[[], object], within: float = 5.0) -> bool:
    """Whether ``holds()`` becomes true within so many seconds."""
    end = time.monotonic() + within
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.0005)
    return True


def executed(stream: sa.Stream, within: float = 10.0) -> bool:
    """Whether the stream's work is done within so many seconds. A query is no synchronisation, so pools do not observe
    completed frees.
    """
    return eventually(stream.query, within)


def pending(stream: sa.Stream) -> bool:
    """Whether the stream still has work after 5 ms, in which unblocked work would have run."""
    time.sleep(0.005)
    return not stream.query()


def in_threads(*bodies: Callable[[], T]) -> list[T]:
    """Run functions at the same time, each in a new thread, and return their results in order. Raises the error of the
    first function, in this order, that has failed.
    """
    start = threading.Barrier(len(bodies))

    def run(body: Callable[[], T]) -> T:
        start.wait()
        return body()

    with ThreadPoolExecutor(len(bodies)) as threads:
        return [ended.result() for ended in [threads.submit(run, body) for body in bodies]]


def collect_and_freeze() -> None:
    """Collect garbage, and exempt the objects that are left from later collections (``gc.freeze``).

    Every sixteenth call also collects exempt objects, among which are machines of earlier tests.
    """
    if next(_collections) % 16 == 0:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


_collections = itertools.count(1)


def library(name: str) -> Any:
    """Return the module ``name`` of another library. Skips the test if that is not possible, because the module is not
    installed or cannot be loaded.
    """
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
"""Why modules were not loaded, by name. A failed import is not repeated, because some libraries then end the process.
"""


def workout(examples: int, steps: int, **more: Any) -> Any:
    """Return settings of Hypothesis for a state machine: the same sequences in each run, without a time limit."""
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


def bytecodes(work: Callable[[], object]) -> int:
    """Return the number of bytecodes that ``work()`` runs in this thread. Other processes do not change this measure of
    cost. The collector is off meanwhile, because its finalisers would count.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
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
"""Seed of the samples that sweeps try: the date, unless the environment sets it; ``all``: sweeps try everything. The
processes of a run inherit the seed.
"""


def sampled(points: Iterable[T], count: int) -> list[T]:
    """Return ``count`` of the points of a sweep, in their order. Each day has another sample; with the seed ``all``,
    all points are returned.
    """
    points = list(points)
    if SEED == "all" or len(points) <= count:
        return points
    return [points[at] for at in sorted(random.Random(SEED).sample(range(len(points)), count))]


def every(step: int) -> itertools.count[int]:
    """Return an endless count with the given step, for sweeps whose end is not known. It begins between 1 and ``step``,
    each day elsewhere. With the seed ``all`` it has every number from 1 on.
    """
    return itertools.count(1) if SEED == "all" else itertools.count(1 + random.Random(SEED).randrange(step), step)


def in_a_thread(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function run in a thread of its own.

    This is for tests that make many calls. On the simulated driver, a call of the main thread takes half as long again,
    because the driver replaces the signal handlers during the call.
    """

    @functools.wraps(function)
    def run(*args: P.args, **named: P.kwargs) -> T:
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(function, *args, **named).result()

    return run


def names(driver: Any, *functions: str) -> list[str]:
    """Return the names of the calls that a traced driver has recorded; only those of ``functions`` if any are given."""
    return [call.name for call in driver.calls if not functions or call.name in functions]


def makes_no_multicast_object(create: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of the bindings' ``cuMulticastCreate`` for machines on which no test may make a multicast
    object.

    The replacement has the same signature. Arguments that the bindings refuse, it passes to the bindings. A call that
    would reach the driver raises ``AssertionError``, as an error of the test.
    """

    @functools.wraps(create)
    def refuse(*args: Any, **named: Any) -> Any:
        given = inspect.signature(create).bind(*args, **named).arguments.values()
        if all(one is None or isinstance(one, cuda.CUmulticastObjectProp) for one in given):
            raise AssertionError("a multicast object is made on real hardware only with STREAMALLOC_TEST_MULTICAST=1")
        return create(*args, **named)

    return refuse


def end_what_was_dropped() -> None:
    """Make the deferred releases of all drivers, also of machines that no test uses any more."""
    for queue in list(deferred._unfinished):
        with contextlib.suppress(sa.CudaError):  # a machine that has ended
            while queue.work() or any([*queue._working.values()]):  # another thread attempts an item
                time.sleep(0)


def end_simulated_machines() -> None:
    """Wait for the end of simulated machines to which no reference is left. A machine with running work ends on its own
    thread.
    """
    gc.collect()
    ending = True
    while ending:
        call_lock.enter()
        schedulers = [machine.scheduler for machine in list(simulated_machine._machines)]
        ending = any(scheduler.closed and scheduler._worker is not None for scheduler in schedulers)
        call_lock.leave()
        time.sleep(0.001 * ending)


def open_descriptors() -> int:
    """Return the number of file descriptors of this process, after the release of dropped objects."""
    end_simulated_machines()
    end_what_was_dropped()
    return len(os.listdir("/proc/self/fd"))


class Account:
    """Drivers around ``machine`` that record its calls and unreleased handles, and can refuse a call. Tests use
    :attr:`driver`.
    """

    def __init__(
        self, machine: Any, fault: str | int | None = None, nth: int = 1, result: str = "CUDA_ERROR_UNKNOWN"
    ) -> None:
        """``fault``, ``nth`` and ``result``: as for :func:`streamalloc.driver.faulty`; without ``fault`` no call is
        refused.
        """
        self.traced = sd.traced(machine)
        self.checked = sd.checked(self.traced)
        # A call that never comes: the wrapper then only counts.
        self.driver: Any = sd.faulty(self.checked, fault or 1 << 40, nth, result=result)

    @property
    def device(self) -> sa.Device:
        return sa.Device(0, driver=self.driver)

    @property
    def mapped(self) -> dict[int, int]:
        """Sizes of the current mappings in bytes, by address."""
        end_what_was_dropped()
        made = [call.args for call in self.traced.calls if call.name == "cuMemMap" and not call.answer[0]]
        sizes = {int(address): int(size) for address, size, *_ in made}
        return {address: sizes[address] for address in self.checked.outstanding().get("mapping", ())}

    @property
    def physical_bytes(self) -> int:
        """Bytes of physical memory that this process has made and not released, on all devices."""
        left = self.left.get("physical memory", ())
        made = [call for call in self.traced.calls if call.name == "cuMemCreate" and not call.answer[0]]
        sizes = {int(call.answer[1]): int(call.args[0]) for call in made}
        return sum(sizes[handle] for handle in left)

    @property
    def left(self) -> dict[str, Any]:
        """Handles and addresses that are not released, by kind, after the release of dropped objects."""
        end_what_was_dropped()
        if self.checked.outstanding():
            # A pool ends once the host has synchronised with its frees.
            sa.Device(0, driver=self.traced).synchronize()
            end_what_was_dropped()
        for settle in SETTLERS:  # default streams, which live as long as their driver, keep events to record again
            settle()
        return dict(self.checked.outstanding())

    def calls(self, *functions: str) -> list[str]:
        """Return the names of the calls so far; only those of ``functions`` if any are given."""
        return [call.name for call in self.traced.calls if not functions or call.name in functions]


class NoHostMemory:
    """Drivers that refuse, from :meth:`begin` to :meth:`stop`, all calls that pin host memory. Tests use ``driver``."""

    CALLS = ("cuMemHostRegister", "cuMemAllocFromPoolAsync", "cuMemHostAlloc")

    def __init__(self, driver: Any) -> None:
        self._layers: list[Any] = []
        for _ in self.CALLS:
            kind: Any = Faults
            self._layers.append(kind(self._layers[-1] if self._layers else driver))
        self.driver = self._layers[-1]

    def begin(self, registered: int = 0) -> None:
        """Refuse the calls that pin memory. The first ``registered`` calls of ``cuMemHostRegister`` still succeed."""
        for layer, call in zip(self._layers, self.CALLS, strict=True):
            layer.fail(call, registered + 1 if call == self.CALLS[0] else 1, times=1000)

    def stop(self) -> None:
        """Refuse no more calls."""
        for layer in self._layers:
            layer.stop()


def each_raises(error: Any, *uses: Callable[[], object], match: str | None = None) -> None:
    """Assert that each use raises this error, with a text that matches ``match``."""
    __tracebackhide__ = True  # pytest shows the line of the test
    for number, use in enumerate(uses, 1):
        try:
            with pytest.raises(error, match=match):
                use()
        except (pytest.fail.Exception, AssertionError) as failure:
            raise AssertionError(f"use {number} of {len(uses)}: {failure}") from None


@contextlib.contextmanager
def soon(call: Callable[[], object], seconds: float = 0.02) -> Iterator[None]:
    """Call a function on another thread after ``seconds``, while the ``with`` block waits for its effect."""
    timer = threading.Timer(seconds, call)
    timer.start()
    try:
        yield
    finally:
        timer.join()


@contextlib.contextmanager
def beside(run: Callable[[Callable[[], None]], object]) -> Iterator[None]:
    """Within the ``with`` block, another thread is in ``run(hold)``: in the call of ``hold``, which ``run`` makes."""
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        leave.wait(20)

    with soon(lambda: run(hold), 0):
        try:
            assert inside.wait(20)
            yield
        finally:
            leave.set()


@contextlib.contextmanager
def collecting_at(threshold: int, *callbacks: Callable[[str, dict[str, int]], object]) -> Iterator[None]:
    """Within the ``with`` block, collect garbage after so many new objects, and tell the functions as ``gc`` does."""
    before = gc.get_threshold()
    gc.callbacks.extend(callbacks)
    try:
        gc.set_threshold(threshold)
        yield
    finally:
        gc.set_threshold(*before)
        for callback in callbacks:
            gc.callbacks.remove(callback)


@contextlib.contextmanager
def captured(driver: Any, stream: Any, mode: str = "GLOBAL") -> Iterator[None]:
    """Within the ``with`` block, other code captures ``stream``, which is a :class:`Stream` or a handle. Asserts that
    the capture ends without an error.
    """
    raw = cuda.CUstream(int(getattr(stream, "handle", stream)))
    assert not driver.cuStreamBeginCapture(raw, getattr(cuda.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{mode}"))[0]
    try:
        yield
    finally:
        result, graph = driver.cuStreamEndCapture(raw)
    assert not result and not driver.cuGraphDestroy(graph)[0]


class Replaced:
    """Driver in which ``others`` replace functions or other attributes."""

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
    """Return the names of a module's ``__all__``. The ``__all__`` of the package itself is short, for ``help``, so this
    function returns the names of ``dir`` for the package.
    """
    whole = module.__name__ == "streamalloc"
    return [name for name in dir(module) if not name.startswith("_")] if whole else [*module.__all__]
