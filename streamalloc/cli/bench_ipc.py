"""The benchmark's section about sharing: handing a buffer to another process, and hearing that it is done with it.

The other process is a new interpreter (:mod:`streamalloc.cli.bench_peer`); it takes part in one contender at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import multiprocessing
import os
import pickle
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import streamalloc as sa
from streamalloc import ipc
from streamalloc.cli.bench_peer import HANDLE_BYTES, answer_queue, cuda_core
from streamalloc.cli.measuring import (
    KEEP_ALL,
    Bench,
    Call,
    judged,
    of_another_library,
    ratio,
    spread,
    step_times,
    value_of,
)
from streamalloc.cli.peer import Peer, environment
from streamalloc.cli.terminal import Terminal, mib

__all__ = ["SECTIONS", "WAYS"]

SIZE = 1 << 20
SLOTS = 8
MESSAGE = b"m" * 200

_POSIX = sa.MemHandleType.POSIX_FILE_DESCRIPTOR
# Of one contender in one round: hand-offs at least and at most, and how many more a stream of them has.
_LEAST, _MOST, _STREAM = 5, 500, 10
_SECONDS = 60.0


class Contender:
    """One way to hand something to another process; ``values(count)`` answers microseconds of each hand-off."""

    def __init__(self, once: Call, begin: Callable[[int], object], end: Call) -> None:
        self.once = once
        self.begin = begin
        self.end = end

    def median(self, count: int) -> float:
        """The median time of ``count`` hand-offs, in microseconds."""
        self.begin(count)
        times = step_times(self.once, count)
        self.end()
        return statistics.median(times)


class Streaming(Contender):
    """The same, where only all of them together have a time: many are on their way at once."""

    def median(self, count: int) -> float:
        """The mean time of so many hand-offs, in microseconds, until the last one has arrived."""
        count *= _STREAM
        self.begin(count)
        start = time.perf_counter_ns()
        for _ in range(count):
            self.once()
        self.end()
        return (time.perf_counter_ns() - start) / 1e3 / count


class Stage:
    """What the contenders share."""

    def __init__(self, bench: Bench, peer: Peer, resources: contextlib.ExitStack) -> None:
        self.bench = bench
        self.peer = peer
        self.resources = resources
        self.pool: sa.MemoryPool = resources.enter_context(
            sa.MemoryPool(bench.device, handle_types=_POSIX, release_threshold=KEEP_ALL)
        )

    def served(self, way: str, once: Call, kind: type[Contender] = Contender) -> Contender:
        """A contender of which the other process has the other half, under a name."""
        return kind(once, lambda count: self.peer.begin("serve", way, count), self.peer.result)

    def pipe(self) -> tuple[Any, Any]:
        """Both ends of a pipe of multiprocessing."""
        ours, theirs = multiprocessing.Pipe()
        self.resources.enter_context(ours)
        return ours, theirs


# --- the contenders -------------------------------------------------------------------------------------------------


def pipe(stage: Stage) -> Contender:
    """A round trip of 200 bytes, without any memory."""
    ours, theirs = stage.pipe()
    with theirs:
        stage.peer.ask("set up", "pipe", fds=[theirs.fileno()])

    def once() -> None:
        ours.send_bytes(MESSAGE)
        ours.recv_bytes()

    return stage.served("pipe", once)


def raw(stage: Stage) -> Contender:
    """As one would write it by hand: the driver's functions, two events and a pipe."""
    driver, resources = stage.bench.driver, stage.resources
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    pool, stream = driver.CUmemoryPool(stage.pool.handle), stage.bench.raw_stream
    flags = driver.CUevent_flags
    ready = value_of(driver.cuEventCreate(int(flags.CU_EVENT_DISABLE_TIMING) | int(flags.CU_EVENT_INTERPROCESS)))
    resources.callback(driver.cuEventDestroy, ready)
    handle = ctypes.string_at(value_of(driver.cuIpcGetEventHandle(ready)).getPtr(), HANDLE_BYTES)
    ours, theirs = stage.pipe()
    fd = ipc.Fd(value_of(driver.cuMemPoolExportToShareableHandle(pool, kind, 0)))
    with theirs, fd:
        stage.peer.ask("set up", "raw", handle.hex(), fds=[theirs.fileno(), fd])
    handle = driver.CUipcEventHandle()
    ctypes.memmove(handle.getPtr(), ours.recv_bytes(), HANDLE_BYTES)
    done = value_of(driver.cuIpcOpenEventHandle(handle))
    resources.callback(driver.cuEventDestroy, done)
    allocate, export, record, wait, free = (
        driver.cuMemAllocFromPoolAsync,
        driver.cuMemPoolExportPointer,
        driver.cuEventRecord,
        driver.cuStreamWaitEvent,
        driver.cuMemFreeAsync,
    )

    def once() -> None:
        error, pointer = allocate(SIZE, pool, stream)
        if error:
            raise RuntimeError(error)
        error, data = export(pointer)
        if error:
            raise RuntimeError(error)
        (error,) = record(ready, stream)
        if error:
            raise RuntimeError(error)
        ours.send_bytes(ctypes.string_at(data.getPtr(), HANDLE_BYTES))
        ours.recv_bytes()
        (error,) = wait(stream, done, 0)
        if error:
            raise RuntimeError(error)
        (error,) = free(pointer, stream)
        if error:
            raise RuntimeError(error)

    return stage.served("raw", once)


def ours(stage: Stage) -> Contender:
    """With a ready word and a lease."""
    channel, theirs = ipc.Channel.pair()
    stage.resources.enter_context(channel)
    with theirs:
        stage.peer.ask("set up", "streamalloc", fds=[theirs.fileno()])
    pool, stream = stage.pool, stage.bench.stream

    def once() -> None:
        buffer = pool.allocate(SIZE, stream)
        ipc.send(channel, buffer)
        channel.receive()
        buffer.free()

    return stage.served("streamalloc", once)


def cuda_core_buffer(stage: Stage) -> Contender:
    """cuda.core with its pool sent beforehand; it has neither events nor leases."""
    core, device, stream = cuda_core()
    resource = core.DeviceMemoryResource(device, core.DeviceMemoryResourceOptions(ipc_enabled=True))
    stage.resources.callback(resource.close)
    ours, theirs = stage.pipe()
    with theirs:
        stage.peer.ask("set up", "cuda.core", fds=[theirs.fileno(), int(resource.allocation_handle)])

    def once() -> None:
        buffer = resource.allocate(SIZE, stream=stream)
        ours.send_bytes(pickle.dumps(buffer.ipc_descriptor))
        ours.recv_bytes()
        buffer.close(stream)

    return stage.served("cuda.core", once)


def _through_queue(stage: Stage, once: Callable[[Any, Any], object]) -> Contender:
    """A process of multiprocessing, as it alone can be given a queue."""
    spawn = multiprocessing.get_context("spawn")
    things, answers = spawn.SimpleQueue(), spawn.SimpleQueue()
    process = spawn.Process(target=answer_queue, args=(things, answers), daemon=True)
    with _environment(stage.bench.chosen.driver):
        process.start()

    def end() -> None:
        things.put(None)
        process.join(_SECONDS)
        things.close()
        answers.close()

    stage.resources.callback(end)
    return Contender(lambda: once(things, answers), lambda count: None, lambda: None)


@contextlib.contextmanager
def _environment(driver: sa.driver.Driver) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(environment(driver))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def our_queue(stage: Stage) -> Contender:
    """A buffer as an item of a queue of multiprocessing."""
    pool, stream = stage.pool, stage.bench.stream

    def once(things: Any, answers: Any) -> None:
        buffer = pool.allocate(SIZE, stream)
        things.put(buffer)
        answers.get()
        buffer.free()

    return _through_queue(stage, once)


def torch_queue(stage: Stage) -> Contender:
    """A tensor as an item of such a queue, by torch.multiprocessing."""
    torch = importlib.import_module("torch")
    importlib.import_module("torch.multiprocessing")
    device = torch.device("cuda", 0)
    if not torch.cuda.is_available():
        raise ImportError("torch without CUDA")

    def once(things: Any, answers: Any) -> None:
        tensor = torch.empty(SIZE, dtype=torch.uint8, device=device)
        things.put(tensor)
        answers.get()

    return _through_queue(stage, once)


def _producer(stage: Stage, way: str, *others: ipc.Channel) -> ipc.RingProducer:
    producer = stage.resources.enter_context(ipc.Ring.producer(stage.pool, SIZE, SLOTS, stream=stage.bench.stream))
    channel, theirs = ipc.Channel.pair()
    with theirs:
        stage.peer.begin("set up", way, fds=[theirs.fileno(), *(other.fileno() for other in others)])
    producer.add(channel, timeout=_SECONDS)
    stage.peer.result()
    return producer


def ring_item(stage: Stage) -> Contender:
    """One item through a ring, and the consumer's word that it has it."""
    replies, theirs = ipc.Channel.pair()
    stage.resources.enter_context(replies)
    with theirs:
        producer = _producer(stage, "ring item", theirs)

    def once() -> None:
        with producer.next(_SECONDS):
            pass
        replies.receive()

    return stage.served("ring item", once)


def ring_stream(stage: Stage) -> Contender:
    """Items one after the other, as fast as the consumer gives their slots back."""
    producer = _producer(stage, "ring stream")

    def once() -> None:
        with producer.next(_SECONDS):
            pass

    return stage.served("ring stream", once, Streaming)


@dataclass(frozen=True)
class Target:
    """How a row should compare with another one."""

    to: str
    at_most: float | None = None
    """Times that row's time."""
    at_least: float | None = None
    """Times as fast as that row."""


@dataclass(frozen=True)
class Way:
    """A row; ``setup`` makes its contender, and where it raises, the row says why there is no figure."""

    name: str
    setup: Callable[[Stage], Contender]
    other: bool = False
    """Another library: it needs a GPU, and to be installed."""
    targets: tuple[Target, ...] = ()


PIPE, RAW, CUDA_CORE, TORCH = (
    "200 bytes through a pipe and back",
    "raw calls and a pipe, results checked",
    "cuda.core, its pool sent beforehand",
    "torch.multiprocessing queue",
)
WAYS = (
    Way(PIPE, pipe),
    Way(RAW, raw),
    Way("streamalloc share and open", ours, targets=(Target(RAW, at_most=1.3), Target(CUDA_CORE, at_most=1.1))),
    Way(CUDA_CORE, cuda_core_buffer, other=True),
    Way("streamalloc, multiprocessing queue", our_queue, targets=(Target(TORCH, at_least=3),)),
    Way(TORCH, torch_queue, other=True),
    Way("streamalloc Ring, one item and a reply", ring_item, targets=(Target(PIPE, at_most=1.2),)),
    Way(f"streamalloc Ring, streaming, {SLOTS} slots", ring_stream, targets=(Target(CUDA_CORE, at_least=3),)),
)


# --- how it is timed ------------------------------------------------------------------------------------------------


def measure_sharing(bench: Bench) -> dict[str, Any]:
    """Hand-offs between two processes, by each way."""
    supports = bench.device.supports
    if _POSIX not in (supports.pool_handle_types or sa.MemHandleType.NONE) or not supports.stream_memory_operations:
        return {"unavailable": "this device's pools cannot be shared between processes"}
    simulated = bench.chosen.is_simulated
    contenders: dict[str, Contender] = {}
    missing: dict[str, str] = {}
    with contextlib.ExitStack() as resources:
        peer = resources.enter_context(Peer(bench.chosen.driver, "streamalloc.cli.bench_peer"))
        stage = Stage(bench, peer, resources)
        for way in WAYS:
            if way.other and simulated:
                continue
            with of_another_library(way.name, way.other, missing):
                contender = way.setup(stage)
                contender.median(_LEAST)
                contenders[way.name] = contender
        times = _timed(bench, contenders)
        bench.device.synchronize()
    return {"bytes": SIZE, "rows": [*_rows(times, simulated), *_unavailable(missing)]}


def _timed(bench: Bench, contenders: dict[str, Contender]) -> dict[str, list[float]]:
    """Microseconds a hand-off, by way and round."""
    once = {name: contender.median(_LEAST * 2) for name, contender in contenders.items()}
    count = max(_LEAST, min(_MOST, int(bench.effort.block * 1e6 / max(once.values()))))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(bench.effort.rounds):
        # Each round begins with another way, so that none always follows the same one.
        for name in itertools.islice(itertools.cycle(names), number % len(names), number % len(names) + len(names)):
            bench.device.synchronize()
            times[name].append(contenders[name].median(count))
    return times


def _rows(times: dict[str, list[float]], simulated: bool) -> Iterator[dict[str, Any]]:
    for way in WAYS:
        values = times.get(way.name)
        if values is None:
            continue
        row: dict[str, Any] = {"name": way.name, **spread(values), "ratio_to_raw": ratio(values, times[RAW])}
        row["per_second"] = 1e6 / row["median_us"]
        row["compared"] = [
            _compared(target, values, times[target.to], simulated) for target in way.targets if target.to in times
        ]
        yield row


def _compared(target: Target, values: Sequence[float], base: Sequence[float], simulated: bool) -> dict[str, Any]:
    if target.at_most is not None:
        found = {"to": target.to, "times_the_time": ratio(values, base), "at_most": target.at_most}
    else:
        found = {"to": target.to, "times_as_fast": ratio(base, values), "at_least": target.at_least}
    if simulated:
        # Targets are for a GPU.
        found.pop("at_most", None)
        found.pop("at_least", None)
    return found


def _unavailable(missing: dict[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "unavailable": reason} for name, reason in missing.items()]


# --- how it is shown ------------------------------------------------------------------------------------------------


def show_sharing(terminal: Terminal, result: dict[str, Any]) -> None:
    """Hand-offs between two processes."""
    of = f" {mib(result['bytes'])}" if "bytes" in result else ""
    terminal.heading(f"Hand{of} to another process, and hear that it is done")
    if "unavailable" in result:
        terminal.paragraph(f"not measured: {result['unavailable']}")
        return
    rows = [row for row in result["rows"] if "unavailable" not in row]
    terminal.table(
        (
            (
                row["name"],
                f"{row['median_us']:.1f}",
                f"{row['p10_us']:.1f}",
                f"{row['p90_us']:.1f}",
                f"{row['per_second']:,.0f}",
                f"{row['ratio_to_raw']:.2f}",
            )
            for row in rows
        ),
        header=("microseconds", "median", "p10", "p90", "a second", "/ raw"),
        align="lrrrrr",
    )
    for row in rows:
        for compared in row["compared"]:
            terminal.line(f"  {row['name']}: {_shown(terminal, compared)}")
    for row in result["rows"]:
        if "unavailable" in row:
            terminal.paragraph(f"{row['name']}: not measured ({row['unavailable']})")


def _shown(terminal: Terminal, compared: dict[str, Any]) -> str:
    if "times_the_time" in compared:
        found, what, sign, target = compared["times_the_time"], "times the time of", "<=", compared.get("at_most")
        met = target is None or found <= target
    else:
        found, what, sign, target = compared["times_as_fast"], "times as fast as", ">=", compared.get("at_least")
        met = target is None or found >= target
    figure = f"{found:.2f}"
    if target is None:
        return f"{figure} {what} {compared['to']}"
    return f"{judged(terminal, figure, met)} {what} {compared['to']} (target: {sign} {target:g})"


SECTIONS: tuple[tuple[str, Callable[[Bench], Any], Callable[[Terminal, Any], None]], ...] = (
    ("sharing", measure_sharing, show_sharing),
)
