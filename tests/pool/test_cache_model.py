"""Any sequence of uses of a cache, beside a model: no byte of a live buffer changes, whoever frees, captures, refuses.

Each buffer is filled with a value of its own on its stream, which a gate may hold, and is copied there before its free.
If memory were handed out too early, the copy or the next owner would have the other's bytes.
"""

import contextlib
import functools
import gc
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.driver.bindings import cuda
from streamalloc.testing import Faults, Gate
from streamalloc.vmm import expandable
from tests.support import GROWTH, KEEP, MiB, holds, workout

pytest.importorskip("hypothesis", reason="a test requirement that is not installed here")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

GRAPH_VALUE = 255
STREAMS = 6
RELAXED = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
CALLS = (
    "cuMemAllocFromPoolAsync", "cuMemFreeAsync", "cuEventRecord", "cuEventQuery", "cuStreamIsCapturing",
    "cuMemPoolGetAttribute", "cuMemPoolTrimTo", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap",
    "cuMemRelease", "cuStreamWaitEvent",
)  # fmt: skip

a_stream = some.integers(0, STREAMS - 1)
a_buffer = some.integers(0, 1 << 16)
a_size = some.sampled_from([500, 4096, 4096, 9000, 3 * MiB, 5 * MiB, 14 * MiB])
what_follows = some.sampled_from(["nothing", "allocate", "trim", "another cache"])


class CuPy:
    """A stream of another library."""

    def __init__(self, stream: sa.Stream) -> None:
        self.ptr = stream.handle


class Owned(NamedTuple):
    """A buffer of the model."""

    buffer: sa.Buffer
    value: int
    at: int
    """Its stream."""


class Cache(RuleBasedStateMachine):
    """A cache, its streams, and what the model knows of its buffers."""

    def __init__(self, machine: Any, kind: type[sa.CachingAllocator]) -> None:
        super().__init__()
        self.driver = driver = Faults(machine)
        self.device = device = sa.Device(0, driver=driver)
        self.undo = contextlib.ExitStack()
        self.undo.enter_context(device.current())
        self.pool = self.undo.enter_context(sa.MemoryPool(device))
        self.host = self.undo.enter_context(sa.MemoryPool(sa.MemLocation.host(), driver=driver, release_threshold=KEEP))
        self.host.set_access(device, sa.MemAccess.READWRITE)
        self.make = functools.partial(kind, self.pool)
        self.cache = self.make()
        self.closed: list[sa.CachingAllocator] = []
        self.theirs = self.undo.enter_context(device.create_stream())
        lent = device.create_stream()
        assert lent.handle
        own = [device.create_stream() for _ in range(2)]
        self.streams: list[Any] = [*own, lent, CuPy(self.theirs), device.default_stream, device.per_thread_stream]
        self.gates = [self.undo.enter_context(Gate(device)) for _ in self.streams]
        self.live: list[Owned] = []
        self.read: list[tuple[int, sa.Buffer, np.ndarray[Any, Any]]] = []
        self.captured: int | None = None
        self.graphs: list[tuple[Any, int]] = []
        self.values = itertools.cycle(range(1, GRAPH_VALUE))

    def stream(self, at: int) -> sa.Stream:
        """The stream by which the model queues work."""
        return self.theirs if at == 3 else self.streams[at]

    # -- allocation and free --------------------------------------------------------------------------------------

    @rule(at=a_stream, size=a_size)
    def allocate(self, at: int, size: int) -> None:
        buffer = self.cache.allocate(size, self.streams[at])
        if at == self.captured:
            assert type(buffer) is sa.GraphBuffer
            buffer.fill(GRAPH_VALUE)
            buffer.free()
            return
        assert type(buffer) is not sa.GraphBuffer
        owned = Owned(buffer, next(self.values), at)
        buffer.fill(owned.value, self.stream(at))
        self.live.append(owned)

    def copied(self, owned: Owned, user: sa.Stream) -> None:
        """Copy a buffer's bytes in the order of a stream that comes after the buffer's own."""
        target = self.host.allocate(owned.buffer.nbytes, user)
        target.copy_from(owned.buffer, user)
        self.read.append((owned.value, target, target.as_array()))

    @rule(which=a_buffer, named=some.booleans())
    def free(self, which: int, named: bool) -> None:
        if owned := self.pop(which):
            with contextlib.suppress(sa.CaptureError):  # a block whose stream the cache has left is the pool's
                owned.buffer.free(owned.buffer.stream if named else None)
            if not owned.buffer.freed:
                assert owned.at == self.captured
                self.live.append(owned)

    def pop(self, which: int) -> Owned | None:
        """Remove a buffer from the model, after a last use on its stream."""
        if not self.live:
            return None
        owned = self.live.pop(which % len(self.live))
        if owned.at != self.captured:
            self.copied(owned, self.stream(owned.at))
        return owned

    @precondition(lambda self: self.captured is None)
    @rule(which=a_buffer, user=a_stream, follows=what_follows)
    def free_on_another_stream(self, which: int, user: int, follows: str) -> None:
        if owned := self.pop(which):
            self.stream(user).wait(self.stream(owned.at))
            self.hold(user)
            self.copied(owned, self.stream(user))
            owned.buffer.free(self.streams[user])
            assert owned.buffer.freed
            self.follow(follows, owned.at, owned.buffer.nbytes)

    def follow(self, what: str, at: int, size: int) -> None:
        """What may hand out memory too early, at once after its free."""
        if what == "trim":
            self.trim()
        elif what == "another cache":
            self.begin_another_cache()
        for _ in range(3 * (what != "nothing")):
            self.allocate(at, size)

    @precondition(lambda self: self.captured is None)
    @rule(at=a_stream)
    def scatter(self, at: int) -> None:
        """Of six blocks, every second one is freed; then one block needs as much memory."""
        first = len(self.live)
        for _ in range(6):
            self.allocate(at, 2 * MiB)
        for which in (4, 2, 0):
            self.free(first + which, False)
        self.allocate(at, 6 * MiB)

    @rule(which=a_buffer)
    def drop(self, which: int) -> None:
        self.pop(which)

    @precondition(lambda self: self.captured is None)
    @rule(which=a_buffer, drops=some.booleans(), follows=what_follows)
    def end_on_another_thread(self, which: int, drops: bool, follows: str) -> None:
        """After a use on that thread's default stream, which a gate holds, if the buffer is of this thread's."""
        if not (owned := self.pop(which)):
            return
        after, held, at, size = self.stream(owned.at).record(), [owned], owned.at, owned.buffer.nbytes
        del owned

        def end() -> None:
            if at == STREAMS - 1:
                mine = self.device.per_thread_stream
                with self.device.current():
                    mine.wait(after)
                    self.gates[-1].hold(mine)
                    self.copied(held[0], mine)
            if not drops:
                held[0].buffer.free()
            held.clear()

        # The thread lives on: an H200's driver hangs once one has ended whose stream still works on memory of pools.
        self.undo.enter_context(ThreadPoolExecutor(1)).submit(end).result()
        self.follow(follows, at, size)

    # -- streams --------------------------------------------------------------------------------------------------

    @rule(at=a_stream)
    def hold(self, at: int) -> None:
        if self.captured is None:
            self.gates[at].hold(self.stream(at))

    @rule(at=a_stream)
    def open(self, at: int) -> None:
        self.gates[at].open()

    @precondition(lambda self: self.captured is None)
    @rule(at=some.sampled_from([2, 3]))
    def begin_capture(self, at: int) -> None:
        raw = cuda.CUstream(self.stream(at).handle)
        assert not self.driver.cuStreamBeginCapture(raw, RELAXED)[0]
        self.captured = at

    @precondition(lambda self: self.captured is not None)
    @rule()
    def end_capture(self) -> None:
        at, self.captured = self.captured, None
        assert at is not None
        result, graph = self.driver.cuStreamEndCapture(cuda.CUstream(self.stream(at).handle))
        assert not result
        instance = self.driver.cuGraphInstantiate(graph, 0)[1]
        self.graphs.append((instance, at))
        self.undo.callback(self.driver.cuGraphDestroy, graph)
        self.undo.callback(self.driver.cuGraphExecDestroy, instance)

    @precondition(lambda self: self.graphs and self.captured is None)
    @rule(which=a_buffer)
    def launch(self, which: int) -> None:
        """The graph writes all memory that it was given."""
        instance, at = self.graphs[which % len(self.graphs)]
        assert not self.driver.cuGraphLaunch(instance, cuda.CUstream(self.stream(at).handle))[0]

    @rule(at=some.integers(0, 1))
    def close_stream(self, at: int) -> None:
        if self.captured is None:
            for owned in [owned for owned in self.live if owned.at == at]:
                self.live.remove(owned)
                owned.buffer.close()
            self.streams[at].close()
            self.streams[at] = self.device.create_stream()

    # -- the cache ------------------------------------------------------------------------------------------------

    @rule()
    @pytest.mark.filterwarnings("ignore::streamalloc.PendingFreesWarning")
    def trim(self) -> None:
        if self.captured is None:
            self.cache.trim()

    @precondition(lambda self: self.captured is None)
    @rule()
    def begin_another_cache(self) -> None:
        self.cache.close()
        self.closed.append(self.cache)
        self.cache = self.make()

    @precondition(lambda self: self.captured is None)
    @rule(call=some.sampled_from(CALLS), at=a_stream, which=a_buffer, size=a_size)
    def refused(self, call: str, at: int, which: int, size: int) -> None:
        """The driver refuses one call of an allocation, a free and a trim: nothing is freed twice, and none is lost."""
        self.driver.fail(call, result="CUDA_ERROR_UNKNOWN")
        buffer = owned = None
        with contextlib.suppress(sa.CudaError):
            buffer = self.cache.allocate(size, self.streams[at])
        if self.live:
            owned = self.live.pop(which % len(self.live))
            with contextlib.suppress(sa.CudaError):
                owned.buffer.free(self.streams[owned.at])
        with contextlib.suppress(sa.CudaError):
            self.cache.trim()
        self.driver.stop()
        if buffer is not None:
            self.live.append(Owned(buffer, next(self.values), at))
            buffer.fill(self.live[-1].value, self.stream(at))
        if owned is not None and not owned.buffer.freed:
            self.live.append(owned)

    @precondition(lambda self: self.captured is None)
    @rule()
    def look(self) -> None:
        """All that was copied, and all that lives, has the bytes of its owner."""
        for gate in self.gates:
            gate.open()
        self.device.synchronize()
        for value, target, array in self.read:
            assert (array == value).all()
            del array
            target.free(self.device.default_stream)
        self.read.clear()
        for owned in self.live:
            assert holds(owned.buffer, owned.value)

    @invariant()
    def live_buffers_lie_apart(self) -> None:
        ranges = sorted((one.buffer.address, one.buffer.address + one.buffer.nbytes) for one in self.live)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))

    def teardown(self) -> None:
        with self.undo:
            if self.captured is not None:
                self.end_capture()
            self.look()
            for owned in self.live:
                owned.buffer.free()
            self.live.clear()
            gc.collect()
            self.begin_another_cache()
            self.device.synchronize()
            assert not any(cache._state.blocks for cache in self.closed)
            assert self.pool.statistics().used == 0
            for at in (0, 1, 2):
                self.streams[at].close()


@pytest.mark.timeout(300)  # beside other work on the machine
@pytest.mark.filterwarnings("ignore::streamalloc.PendingFreesWarning")
@pytest.mark.parametrize(
    ("kind", "allowance", "examples"),
    [(sa.CachingAllocator, 0, 50), (vmm.ExpandableCache, 1.03, 30), (vmm.ExpandableCache, 0, 30)],
)
def test_a_cache_beside_a_model(
    machine: Any, kind: type[sa.CachingAllocator], allowance: float, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an allowance, an expandable cache moves memory, within and between streams, wherever it can."""
    monkeypatch.setattr(expandable, "_ALLOWANCE", allowance)
    make: Any = functools.partial(Cache, machine, kind)
    run_state_machine_as_test(make, settings=workout(examples, 40))


# -- pools: what is used, what lies where, what stays reserved ---------------------------------------------------------


# One example is a whole workout; deadlines would measure the machine that the tests run on.
WORKOUT = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

SIZES = some.one_of(
    some.integers(0, 2048),
    some.integers(1, 4 * MiB),
    some.sampled_from([1, 511, 512, 513, MiB, GROWTH - 1, GROWTH, GROWTH + 1, 40 * MiB]),
)
STEPS = some.lists(
    some.one_of(
        some.tuples(some.just("allocate"), SIZES, some.integers(0, 1)),
        some.tuples(some.sampled_from(["free", "drop"]), some.integers(0, 1 << 16), some.integers(0, 1)),
        some.tuples(
            some.sampled_from(["synchronize", "trim", "reset peaks", "order"]), some.just(0), some.integers(0, 1)
        ),
    ),
    max_size=40,
)


class Model:
    """Expected answers of a pool, by the rules alone."""

    def __init__(self) -> None:
        self.live: list[sa.Buffer] = []
        self.used_high = 0

    @property
    def used(self) -> int:
        return sum(buffer.nbytes for buffer in self.live)

    def check(self, pool: sa.MemoryPool) -> None:
        self.used_high = max(self.used_high, self.used)
        found = pool.statistics()
        assert found.used == self.used
        assert found.used_high == self.used_high
        assert found.reserved % GROWTH == 0 and found.used <= found.reserved <= found.reserved_high
        # An empty buffer is nowhere; the others lie apart, each at a multiple of 512 bytes.
        ranges = sorted((buffer.address, buffer.address + buffer.nbytes) for buffer in self.live if buffer.nbytes)
        assert all(start % 512 == 0 for start, _ in ranges)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))


@WORKOUT
@given(steps=STEPS, threshold=some.sampled_from([0, GROWTH, KEEP]))
@pytest.mark.filterwarnings("ignore::streamalloc.PendingFreesWarning")
def test_a_workout(device: sa.Device, steps: list[tuple[str, int, int]], threshold: int) -> None:
    driver = sd.checked(device.driver)
    mine = sa.Device(0, driver=driver)
    model = Model()
    with (
        mine.create_stream() as one,
        mine.create_stream() as two,
        sa.MemoryPool(mine, release_threshold=threshold) as pool,
    ):
        for step, number, which in steps:
            _do(model, pool, (one, two)[which], (two, one)[which], step, number)
            model.check(pool)
        model.live.clear()
        mine.synchronize()
        reserved = pool.statistics().reserved
        assert reserved <= threshold and pool.trim() == reserved
        assert pool.statistics()[::2] == (0, 0)
    del pool, one, two
    driver.assert_nothing_left()


def _do(model: Model, pool: sa.MemoryPool, stream: sa.Stream, other: sa.Stream, step: str, number: int) -> None:
    if step == "allocate":
        model.live.append(pool.allocate(number, stream))
    elif step == "free" and model.live:
        model.live.pop(number % len(model.live)).free(stream)
    elif step == "drop" and model.live:
        del model.live[number % len(model.live)]
    elif step == "synchronize":
        stream.synchronize()
    elif step == "trim":
        pool.trim()
    elif step == "reset peaks":
        pool.reset_peaks()
        model.used_high = model.used
    elif step == "order":
        stream.wait(other)
