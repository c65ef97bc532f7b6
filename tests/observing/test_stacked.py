"""Observers of pools and caches against a model; and that what they export is read back."""

import contextlib
import gc
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import traces
from streamalloc.testing import Faults
from tests.support import each_raises

SIZES = some.sampled_from([0, 1, 512, 5000, 100_000, 3 << 20])
NAMES = some.sampled_from(["", "weights", "cache"])


class Observed(RuleBasedStateMachine):
    """A program with a pool and a cache over it. One observer has both, one the pool alone; they know the same."""

    def __init__(self) -> None:
        super().__init__()
        self.end = contextlib.ExitStack()
        self.device = sa.Device(0, driver=sd.simulated())
        self.streams = [self.end.enter_context(self.device.create_stream()) for _ in range(2)]
        self.pool = self.end.enter_context(sa.MemoryPool(self.device))
        self.cache = self.end.enter_context(sa.CachingAllocator(self.pool))
        self.told: list[int] = []
        hooks: Any = {"on_allocate": lambda one: self.told.append(one.nbytes),
                      "on_free": lambda one: self.told.append(-one.nbytes)}  # fmt: skip
        self.observer = self.end.enter_context(sa.observe(self.cache, **hooks))
        self.beside = self.end.enter_context(sa.observe(self.device, history=3))
        self.buffers: dict[int, sa.Buffer] = {}
        self.live: dict[int, tuple[int, str, str, str]] = {}
        self.expected: list[int] = []
        self.phases: list[tuple[Any, sa.observing.Phase]] = []
        self.peak = 0
        self.peaks: list[int] = []
        """Of the phases that have not ended."""

    @rule(cached=some.booleans(), size=SIZES, at=some.integers(0, 1), tag=NAMES)
    def allocate(self, cached: bool, size: int, at: int, tag: str) -> None:
        source: Any = self.cache if cached else self.pool
        with self.observer.tag(tag):
            buffer = source.allocate(size, self.streams[at])
        if not size:
            return
        path = "/".join(phase.name for _, phase in self.phases)
        self.buffers[buffer.address] = buffer
        self.live[buffer.address] = size, tag, path, "cache" if cached else "pool"
        self.expected.append(size)
        total = sum(one[0] for one in self.live.values())
        self.peak, self.peaks = max(self.peak, total), [max(one, total) for one in self.peaks]

    @rule(choose=some.integers(0), how=some.sampled_from(["free", "free elsewhere", "drop", "cycle"]))
    def free(self, choose: int, how: str) -> None:
        if not self.buffers:
            return
        address = list(self.buffers)[choose % len(self.buffers)]
        buffer = self.buffers.pop(address)
        self.expected.append(-self.live.pop(address)[0])
        if how == "free elsewhere":
            other = self.streams[buffer.stream is self.streams[0]]
            other.wait(buffer.stream)
            buffer.free(other)
        elif how == "free":
            buffer.free()
        elif how == "cycle":
            circle: list[Any] = [buffer]
            circle.append(circle)
            del circle
        del buffer
        gc.collect()

    @rule(name=some.sampled_from(["step", "forward"]))
    def begin(self, name: str) -> None:
        block = self.observer.phase(name)
        self.phases.append((block, block.__enter__()))
        self.peaks.append(sum(one[0] for one in self.live.values()))

    @rule()
    def finish(self) -> None:
        if self.phases:
            block, phase = self.phases.pop()
            block.__exit__(None, None, None)
            assert (phase.peak, phase.after) == (self.peaks.pop(), sum(one[0] for one in self.live.values()))

    @rule()
    def trim(self) -> None:
        with contextlib.suppress(sa.PendingFreesWarning):  # warnings are errors in tests
            self.cache.trim()

    @invariant()
    def knows_the_same(self) -> None:
        found = {one.address: (one.nbytes, one.tag, one.phase, one.source.kind) for one in self.observer.live}
        assert found == self.live
        assert self.observer.nbytes == self.beside.nbytes == sum(one[0] for one in self.live.values())
        assert (self.observer.peak, self.told) == (self.peak, self.expected)
        assert len(self.observer.history) == len(self.expected) and len(self.beside.history) <= 3

    def teardown(self) -> None:
        while self.phases:
            self.finish()
        with tempfile.TemporaryDirectory() as folder, self.end:
            for trace in read_back(self.observer, Path(folder)) if self.expected else ():
                assert len(trace.events) == len(self.expected) and trace.skipped == {}
                assert traces.replay(trace, self.pool, self.device, rounds=1).peak_used == trace.peak
            self.buffers.clear()
            self.device.synchronize()


TestObserved = pytest.mark.simulated_only("a model is checked on machines of its own")(Observed.TestCase)
TestObserved.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)


def read_back(observer: sa.Observer, folder: Path) -> list[traces.Trace]:
    """Exports of observers that can be replayed."""
    observer.save_rmm(folder / "rmm.csv")
    observer.save_pytorch(folder / "torch.pickle")
    return [traces.load(folder / "rmm.csv"), traces.load(folder / "torch.pickle")]


def test_a_limit_counts_what_was_asked_for(device: sa.Device, pool: sa.MemoryPool, stream: sa.Stream) -> None:
    with sa.CachingAllocator(pool) as cache, sa.observe(cache, limit=5000):
        cache.allocate(5000, stream).free()
        with pytest.raises(sa.OutOfMemoryError):
            cache.allocate(5001, stream)


def test_what_the_driver_refuses_to_take_back_was_freed_all_the_same(
    faults: Faults, cache: sa.CachingAllocator, stream: sa.Stream, tmp_path: Path
) -> None:
    faults.fail("cuMemFreeAsync", result="CUDA_ERROR_UNKNOWN")
    with sa.observe(cache) as observer:
        cache.allocate(5000, stream).free()
        each_raises(sa.CudaError, cache.trim)
        assert faults.failed == ["cuMemFreeAsync"]
        assert observer.live == () and len(observer.history) == 2
        cache.allocate(5000, stream).free()
        assert [trace.allocations for trace in read_back(observer, tmp_path)] == [2, 2]


def test_memory_that_other_code_has_freed(machine: Any, device: sa.Device, stream: sa.Stream, tmp_path: Path) -> None:
    with sa.MemoryPool(device) as pool, sa.observe(pool) as observer:
        lost = pool.allocate(4096, stream)
        machine.cuMemFreeAsync(lost.address, machine.CUstream(stream.handle))
        again = pool.allocate(4096, stream)
        assert again.address == lost.address and observer.nbytes == 4096
        again.free()
        lost._ptr = None  # it is gone
        assert [trace.allocations for trace in read_back(observer, tmp_path)] == [2, 2]
