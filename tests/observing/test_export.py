"""Exports of observers: the fields that readers need, and the same run when it is read back."""

import contextlib
import csv
import gc
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import traces, vmm
from streamalloc.observing import export
from streamalloc.testing import Faults
from tests.support import MiB, each_raises


@pytest.fixture
def observer(machine: Any) -> Iterator[sa.Observer]:
    """A run with allocations on two streams, memory that grows, a failure, and memory that is left."""
    faulty = sd.faulty(machine, "cuMemAllocFromPoolAsync", nth=4)
    device = sa.Device(0, driver=faulty)
    with (
        sa.MemoryPool(device) as pool,
        device.create_stream() as one,
        device.create_stream() as two,
        vmm.GrowableBuffer(device, 32 * MiB, 2 * MiB) as grown,
        sa.observe(pool, grown, depth=2) as observer,
    ):
        with observer.phase("step"), observer.tag("weights"):
            first = pool.allocate(3 * MiB, one)
            second = pool.allocate(MiB, two)
            first.free(two)
            grown.resize(6 * MiB)
        third = pool.allocate(512, one)
        with contextlib.suppress(sa.OutOfMemoryError):
            pool.allocate(99, one)
        grown.resize(2 * MiB)
        yield observer
        second.free()
        third.free()


def test_rmm_s_log_reads_back(observer: sa.Observer, tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    observer.save_rmm(file)
    trace = traces.load(file)
    header = "Thread,Time,Action,Pointer,Size,Stream,Pool,Stream name,Tag,Phase,Line"
    assert file.read_text().splitlines()[0] == header
    assert [(event.action, event.nbytes, event.stream) for event in trace.events] == [
        ("allocate", 2 * MiB, 0),
        ("allocate", 3 * MiB, 1),
        ("allocate", MiB, 2),
        ("free", 3 * MiB, 2),
        ("allocate", 4 * MiB, 0),
        ("allocate", 512, 1),
        ("free", 4 * MiB, 0),
    ]
    assert trace.skipped == {"failed allocations": 1}
    times = [one.time // 1000 - observer.history[0].time // 1000 for one in observer.history if one.action != "failure"]
    assert [event.time // 1000 for event in trace.events] == times


_KILLED = """
import os, signal, sys
import streamalloc as sa

device = sa.Device(0)
stream = device.create_stream(name="a, b")
with sa.MemoryPool(device, name="kv") as pool, sa.observe(pool, history=0, log=sys.argv[1]) as observer:
    first = pool.allocate(512, stream)
    with observer.tag("one\\ntwo"), observer.phase("load"):
        second = pool.allocate(1024, stream)
    first.free()
    try:
        pool.allocate(1 << 60, stream)
    except sa.OutOfMemoryError:
        os.kill(os.getpid(), signal.SIGKILL)
"""


class Named:
    """A path of another library, such as py.path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


class TestLog:
    @pytest.mark.simulated_only("the process ends in the middle of its work")
    def test_of_a_process_that_was_killed(self, tmp_path: Path) -> None:
        file = tmp_path / "log.csv"
        environment = os.environ | {"STREAMALLOC_DRIVER": "simulated"}
        assert subprocess.run([sys.executable, "-c", _KILLED, file], env=environment).returncode == -signal.SIGKILL
        rows = list(csv.DictReader(file.read_text().splitlines()))
        assert [(one["Action"], int(one["Size"]), one["Tag"], one["Phase"]) for one in rows] == [
            ("allocate", 512, "", ""),
            ("allocate", 1024, "one two", "load"),
            ("free", 512, "", ""),
            ("allocate failure", 1 << 60, "", ""),
        ]
        assert {(one["Pool"], one["Stream name"]) for one in rows} == {("kv", "a, b")}
        assert rows[1]["Line"].startswith("<string>:10 in ")
        assert [event.action for event in traces.load(file).events] == ["allocate", "allocate", "free"]

    def test_goes_on_after_a_stop(self, pool: sa.MemoryPool, stream: sa.Stream, tmp_path: Path) -> None:
        file = tmp_path / "log.csv"
        observer = sa.observe(pool, log=file)
        for _ in range(2):
            with observer:
                pool.allocate(512, stream).free()
        assert [line.split(",")[2] for line in file.read_text().splitlines()[1:]] == ["allocate", "free"] * 2

    @pytest.mark.parametrize("path_of", [os.fsencode, Named])
    def test_at_a_path_of_another_type(self, pool: sa.MemoryPool, tmp_path: Path, path_of: Any) -> None:
        with sa.observe(pool, log=path_of(tmp_path / "log.csv")):
            assert (tmp_path / "log.csv").exists()

    def test_of_names_that_are_no_text(self, pool: sa.MemoryPool, stream: sa.Stream, tmp_path: Path) -> None:
        with sa.observe(pool, log=tmp_path / "log.csv") as observer, observer.tag(os.fsdecode(b"\xff")):
            pool.allocate(512, stream).free()
        (tag,) = {one["Tag"] for one in csv.DictReader((tmp_path / "log.csv").read_text().splitlines())}
        assert tag == "\\udcff"

    def test_is_whole_or_an_error(self, observer: sa.Observer, tmp_path: Path) -> None:
        size, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
        try:
            with pytest.raises(OSError, match="too large"):
                observer.save_rmm(tmp_path / "log.csv")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    def test_is_no_descriptor(self, pool: sa.MemoryPool) -> None:
        """True would be that of the standard output, which would be closed."""
        with open(os.devnull, "wb") as file:
            each_raises(TypeError, lambda: sa.observe(pool, log=file.fileno()), match="a path, not int")  # type: ignore[arg-type]
            os.fstat(file.fileno())

    def test_a_full_disk_ends_it(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        each_raises(OSError, sa.observe(pool, log="/dev/full").start, match="No space left")
        observer = sa.observe(pool, log="/dev/full")
        observer._account._logged = True  # it has a header, as before the disk was full
        with observer:
            with pytest.warns(RuntimeWarning, match="No space left"):
                buffer = pool.allocate(512, stream)
            buffer.free()
            assert observer.nbytes == 0


class TestPyTorch:
    @pytest.fixture
    def snapshot(self, observer: sa.Observer, tmp_path: Path) -> dict[str, Any]:
        observer.save_pytorch(tmp_path / "snapshot.pickle")
        data = (tmp_path / "snapshot.pickle").read_bytes()
        assert data[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04")
        found: dict[str, Any] = pickle.loads(data)
        return found

    def test_fields_of_segments_and_blocks(self, observer: sa.Observer, snapshot: dict[str, Any]) -> None:
        live = {one.address: one for one in observer.live}
        seen = set()
        for segment in snapshot["segments"]:
            assert {type(segment[name]) for name in ("device", "address", "total_size", "stream")} == {int}
            assert segment["stream"] == 0
            assert segment["device"] == 0 and segment["segment_type"] in ("large", "small")
            assert type(segment["is_expandable"]) is bool and type(segment["blocks"]) is list
            # Where a block is the viewer finds by adding up the sizes before it.
            at = segment["address"]
            for block in segment["blocks"]:
                assert block["address"] == at
                at += block["size"]
                if block["state"] == "active_allocated":
                    assert block["requested_size"] == block["size"] == live[block["address"]].nbytes
                    seen.add(block["address"])
                else:
                    assert block["state"] == "inactive"
            assert at == segment["address"] + segment["total_size"]
            active = [block["requested_size"] for block in segment["blocks"] if block["state"] == "active_allocated"]
            assert segment["allocated_size"] == segment["active_size"] == sum(active)
        assert seen == set(live)

    def test_of_host_memory_is_empty(self, machine: Any, stream: sa.Stream) -> None:
        with sa.MemoryPool(sa.MemLocation.host()) as pool, sa.observe(pool) as observer, pool.allocate(512, stream):
            found = export.snapshot(observer.history, observer.live)
        assert (found["segments"], found["device_traces"]) == ([], [])

    def test_fields_of_the_trace(self, observer: sa.Observer, snapshot: dict[str, Any]) -> None:
        (entries,) = snapshot["device_traces"]
        for entry in entries:
            assert {type(entry[name]) for name in ("addr", "size", "stream", "time_us")} == {int}
            assert all(set(frame) == {"filename", "line", "name"} for frame in entry["frames"])
        assert [entry["action"] for entry in entries] == [
            "segment_map", "alloc", "alloc", "alloc", "free_requested", "free_completed", "segment_map", "alloc",
            "alloc", "oom", "free_requested", "free_completed", "segment_unmap",
        ]  # fmt: skip
        assert all("device_free" in entry for entry in entries if entry["action"] == "oom")
        frames = entries[2]["frames"]
        assert (frames[0]["filename"], frames[0]["name"].rpartition(".")[2]) == (__file__, "observer")
        assert [frame["filename"] for frame in frames[-2:]] == ["tag: weights", "phase: step"]

    def test_blocks_lie_in_segments_at_all_times(self, snapshot: dict[str, Any]) -> None:
        """The viewer goes back from the end, and cannot draw a block outside of all segments."""
        (entries,) = snapshot["device_traces"]
        segments = [(one["address"], one["address"] + one["total_size"]) for one in snapshot["segments"]]
        blocks = {
            block["address"]
            for segment in snapshot["segments"]
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        }
        for entry in reversed(entries):
            action, begin = entry["action"], entry["addr"]
            end = begin + entry["size"]
            if action == "segment_unmap":
                segments.append((begin, end))
            elif action == "segment_map":
                (whole,) = [one for one in segments if one[0] <= begin and end <= one[1]]
                segments.remove(whole)
                segments += [one for one in ((whole[0], begin), (end, whole[1])) if one[0] < one[1]]
            elif action == "free_completed":
                blocks.add(begin)
            elif action == "alloc":
                blocks.remove(begin)
            assert all(any(start <= block < stop for start, stop in segments) for block in blocks)
        assert not blocks


def test_chrome_s_trace(observer: sa.Observer, tmp_path: Path) -> None:
    observer.save_chrome(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert all({"ph", "name", "pid", "tid", "ts"} <= set(event) for event in events)
    assert _totals(observer, tmp_path / "trace.json") == {
        "pool DEVICE:0": [3 * MiB, 4 * MiB, MiB, MiB + 512],
        "mapping DEVICE:0": [2 * MiB, 6 * MiB, 2 * MiB],
    }
    (phase,) = [event for event in events if event["ph"] == "X"]
    (step,) = observer.phases
    assert (phase["name"], phase["args"]["peak"]) == ("step", step.peak) and step.ended is not None
    assert (phase["ts"], phase["dur"]) == (step.began / 1000, (step.ended - step.began) / 1000)
    assert [event["args"] for event in events if event["ph"] == "i"] == [{"requested": 99}]


def _totals(observer: sa.Observer, path: Path) -> dict[str, list[int]]:
    observer.save_chrome(path)
    found: dict[str, list[int]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "C":
            found.setdefault(event["name"], []).append(event["args"]["allocated bytes"])
    return found


def test_chrome_s_counters_where_the_beginning_is_gone(pool: sa.MemoryPool, stream: sa.Stream, tmp_path: Path) -> None:
    with sa.observe(pool, history=2) as observer:
        buffers = [pool.allocate(nbytes, stream) for nbytes in (100, 200, 300)]
        buffers[0].free()
        buffers[1].free()
        assert _totals(observer, tmp_path / "trace.json") == {"pool DEVICE:0": [500, 300]}


def test_chrome_s_counters_of_a_cache(pool: sa.MemoryPool, stream: sa.Stream, tmp_path: Path) -> None:
    with sa.CachingAllocator(pool) as cache, sa.observe(cache) as observer:
        cache.allocate(1000, stream).free()
        found = _totals(observer, tmp_path / "trace.json")
    assert found == {"cache DEVICE:0": [1000, 0]}


class TestNvtx:
    @pytest.fixture
    def told(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """A stand-in for nvtx that notes what it is told."""
        told: list[Any] = []

        @contextlib.contextmanager
        def annotate(message: str, domain: str) -> Iterator[None]:
            told.append(("push", message, domain))
            yield
            told.append(("pop", message, domain))

        def get_counter(name: str, kind: type) -> Any:
            return types.SimpleNamespace(sample=lambda value: told.append((name, kind, value)))

        nvtx: Any = types.ModuleType("nvtx")
        nvtx.annotate = annotate
        nvtx.get_domain = lambda name: types.SimpleNamespace(get_counter=get_counter)
        monkeypatch.setitem(sys.modules, "nvtx", nvtx)
        return told

    def test_is_told_of_phases_and_sizes(self, told: list[Any], pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with sa.observe(pool, nvtx=True) as observer, observer.phase("step"):
            pool.allocate(64, stream).free()
        size = "allocated bytes", int
        expected = [("push", "step", "streamalloc"), (*size, 64), (*size, 0), ("pop", "step", "streamalloc")]
        assert told == expected

    def test_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch, pool: sa.MemoryPool) -> None:
        monkeypatch.setitem(sys.modules, "nvtx", None)
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'streamalloc\[nvtx\]'"):
            sa.observe(pool, nvtx=True)


# -- observers of pools and caches against a model, and what they export read back -------------------------------------


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
