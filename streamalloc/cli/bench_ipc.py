"""The benchmark's section about sharing: handing a buffer to another process, and hearing that it is done with it.

The other process is a new interpreter; it takes part in one contender at a time. It takes what it is handed, says so,
and does nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import streamalloc as sa
from streamalloc import ipc
from streamalloc.cli.measuring import (
    KEEP_ALL,
    SPREAD,
    TO_RAW,
    Bench,
    Call,
    Column,
    Section,
    Unavailable,
    begun,
    cuda_core,
    judged,
    prepared,
    ratio,
    rotated,
    show_table,
    spread,
    step_times,
    value_of,
)
from streamalloc.cli.peer import POSIX, Action, Here, Peer, can_share_pools, environment
from streamalloc.cli.terminal import Terminal

__all__ = ["ACTIONS", "SECTIONS", "WAYS", "answer_queue"]

SIZE = 1 << 20
SLOTS = 8
MESSAGE = b"m" * 200
# What the driver's opaque structures for other processes have.
HANDLE_BYTES = 64

# Of one contender in one round: hand-offs at least and at most, and how many more a stream of them has.
_LEAST, _MOST, _STREAM = 5, 500, 10
_SECONDS = 60.0


class Contender:
    """One way to hand something to another process.

    ``begin(count)`` and ``end()`` stand around ``count`` calls of ``once``.
    """

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
            sa.MemoryPool(bench.device, handle_types=POSIX, release_threshold=KEEP_ALL)
        )

    def served(self, way: str, once: Call, kind: type[Contender] = Contender) -> Contender:
        """A contender of which the other process has the other half, under a name."""
        return kind(once, lambda count: self.peer.begin("serve", way, count), self.peer.result)

    def pipe(self, way: str, *arguments: str, fds: Sequence[ipc.Fd | int] = ()) -> Any:
        """This end of a pipe of multiprocessing, of which the other process has been given the other end."""
        ours, theirs = multiprocessing.Pipe()
        self.resources.enter_context(ours)
        with theirs:
            self.peer.ask("set up", way, *arguments, fds=[theirs.fileno(), *fds])
        return ours

    def channel(self) -> tuple[ipc.Channel, ipc.Channel]:
        """Both ends of a channel; this one is closed at the end."""
        ours, theirs = ipc.Channel.pair()
        return self.resources.enter_context(ours), theirs


def _connection(here: Here) -> Any:
    """The other process's end of a pipe."""
    return multiprocessing.connection.Connection(here.handles[0].detach())


def _event(driver: Any) -> tuple[Any, bytes]:
    """A new event for other processes, and what those open it with."""
    flags = driver.CUevent_flags
    event = value_of(driver.cuEventCreate(int(flags.CU_EVENT_DISABLE_TIMING) | int(flags.CU_EVENT_INTERPROCESS)))
    return event, ctypes.string_at(value_of(driver.cuIpcGetEventHandle(event)).getPtr(), HANDLE_BYTES)


def _opened(driver: Any, shared: bytes) -> Any:
    """An event of the other process."""
    handle = driver.CUipcEventHandle()
    ctypes.memmove(handle.getPtr(), shared, HANDLE_BYTES)
    return value_of(driver.cuIpcOpenEventHandle(handle))


# --- the contenders, each with what the other process does for one hand-off -----------------------------------------


def pipe(stage: Stage) -> Contender:
    """A round trip of 200 bytes, without any memory."""
    ours = stage.pipe("pipe")

    def once() -> None:
        ours.send_bytes(MESSAGE)
        ours.recv_bytes()

    return stage.served("pipe", once)


def _serve_pipe(here: Here) -> Call:
    connection = _connection(here)
    return lambda: connection.send_bytes(connection.recv_bytes())


def raw(stage: Stage) -> Contender:
    """As one would write it by hand: the driver's functions, two events and a pipe."""
    driver = stage.bench.driver
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    pool, stream = driver.CUmemoryPool(stage.pool.handle), stage.bench.raw_stream
    ready, shared = _event(driver)
    stage.resources.callback(driver.cuEventDestroy, ready)
    with ipc.Fd(value_of(driver.cuMemPoolExportToShareableHandle(pool, kind, 0))) as fd:
        ours = stage.pipe("raw", shared.hex(), fds=[fd])
    done = _opened(driver, ours.recv_bytes())
    stage.resources.callback(driver.cuEventDestroy, done)
    allocate, export, record = driver.cuMemAllocFromPoolAsync, driver.cuMemPoolExportPointer, driver.cuEventRecord
    wait, free = driver.cuStreamWaitEvent, driver.cuMemFreeAsync

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


def _serve_raw(here: Here, shared: str) -> Call:
    driver = cast(Any, here.device.driver)
    here.resources.enter_context(here.device.current())
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    connection = _connection(here)
    pool = value_of(driver.cuMemPoolImportFromShareableHandle(here.handles[1].fileno(), kind, 0))
    ready = _opened(driver, bytes.fromhex(shared))
    done, shared_done = _event(driver)
    connection.send_bytes(shared_done)
    stream, make = driver.CUstream(here.stream.handle), driver.CUmemPoolPtrExportData
    import_, wait = driver.cuMemPoolImportPointer, driver.cuStreamWaitEvent
    free, record = driver.cuMemFreeAsync, driver.cuEventRecord

    def once() -> None:
        data = make()
        ctypes.memmove(data.getPtr(), connection.recv_bytes(), HANDLE_BYTES)
        error, pointer = import_(pool, data)
        if error:
            raise RuntimeError(error)
        (error,) = wait(stream, ready, 0)
        if error:
            raise RuntimeError(error)
        (error,) = free(pointer, stream)
        if error:
            raise RuntimeError(error)
        (error,) = record(done, stream)
        if error:
            raise RuntimeError(error)
        connection.send_bytes(b"k")

    return once


def ours(stage: Stage) -> Contender:
    """With a ready word and a lease."""
    channel, theirs = stage.channel()
    with theirs:
        stage.peer.ask("set up", "streamalloc", fds=[theirs.fileno()])
    pool, stream = stage.pool, stage.bench.stream

    def once() -> None:
        buffer = pool.allocate(SIZE, stream)
        ipc.send(channel, buffer)
        channel.receive()
        buffer.free()

    return stage.served("streamalloc", once)


def _serve_ours(here: Here) -> Call:
    channel = ipc.Channel.from_fd(here.handles[0])
    stream, driver = here.stream, here.device.driver

    def once() -> None:
        ipc.receive(channel, stream=stream, driver=driver).close()
        channel.send(b"k")

    return once


def cuda_core_buffer(stage: Stage) -> Contender:
    """cuda.core with its pool sent beforehand; it has neither events nor leases."""
    core, device, stream = cuda_core()
    resource = core.DeviceMemoryResource(device, core.DeviceMemoryResourceOptions(ipc_enabled=True))
    stage.resources.callback(resource.close)
    ours = stage.pipe("cuda.core", fds=[int(resource.allocation_handle)])

    def once() -> None:
        buffer = resource.allocate(SIZE, stream=stream)
        ours.send_bytes(pickle.dumps(buffer.ipc_descriptor))
        ours.recv_bytes()
        buffer.close(stream)

    return stage.served("cuda.core", once)


def _serve_cuda_core(here: Here) -> Call:
    connection = _connection(here)
    core, device, stream = cuda_core()
    resource = core.DeviceMemoryResource.from_allocation_handle(device, here.handles[1].fileno())
    open_ = core.Buffer.from_ipc_descriptor

    def once() -> None:
        open_(resource, pickle.loads(connection.recv_bytes()), stream=stream).close()
        connection.send_bytes(b"k")

    return once


def _through_queue(stage: Stage, make: Callable[[], Any]) -> Contender:
    """Things go through a queue to a process of multiprocessing, as it alone can be given one."""
    spawn = multiprocessing.get_context("spawn")
    things, answers = spawn.SimpleQueue(), spawn.SimpleQueue()
    process = spawn.Process(target=answer_queue, args=(things, answers), daemon=True)
    with _environment(stage.bench.chosen.driver):
        process.start()

    def once() -> None:
        thing = make()
        things.put(thing)
        answers.get()
        if isinstance(thing, sa.Buffer):
            thing.free()

    def end() -> None:
        things.put(None)
        process.join(_SECONDS)
        things.close()
        answers.close()

    stage.resources.callback(end)
    return Contender(once, lambda count: None, lambda: None)


def answer_queue(things: Any, answers: Any) -> None:
    """The other process: take what comes through a queue, let go of it, and say so; None is the end."""
    while True:
        thing = things.get()
        if thing is None:
            return
        if hasattr(thing, "close"):
            thing.close()
        del thing
        answers.put(True)


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
    return _through_queue(stage, lambda: stage.pool.allocate(SIZE, stage.bench.stream))


def torch_queue(stage: Stage) -> Contender:
    """A tensor as an item of such a queue, by torch.multiprocessing."""
    torch = importlib.import_module("torch")
    importlib.import_module("torch.multiprocessing")
    device = torch.device("cuda", 0)
    if not torch.cuda.is_available():
        raise ImportError("torch without CUDA")
    return _through_queue(stage, lambda: torch.empty(SIZE, dtype=torch.uint8, device=device))


def _producer(stage: Stage, way: str, *others: ipc.Channel) -> ipc.RingProducer:
    producer = stage.resources.enter_context(ipc.Ring.producer(stage.pool, SIZE, SLOTS, stream=stage.bench.stream))
    channel, theirs = ipc.Channel.pair()
    with theirs:
        stage.peer.begin("set up", way, fds=[theirs.fileno(), *(other.fileno() for other in others)])
    producer.add(channel, timeout=_SECONDS)
    stage.peer.result()
    return producer


def _consumer(here: Here) -> ipc.RingConsumer:
    return ipc.Ring.consumer(ipc.Channel.from_fd(here.handles[0]), stream=here.stream, timeout=_SECONDS)


def ring_item(stage: Stage) -> Contender:
    """One item through a ring, and the consumer's word that it has it."""
    replies, theirs = stage.channel()
    with theirs:
        producer = _producer(stage, "ring item", theirs)

    def once() -> None:
        with producer.next(_SECONDS):
            pass
        replies.receive()

    return stage.served("ring item", once)


def _serve_ring_item(here: Here) -> Call:
    replies = ipc.Channel.from_fd(here.handles[1])
    ring = _consumer(here)

    def once() -> None:
        with ring.next():
            replies.send(b"k")

    return once


def ring_stream(stage: Stage) -> Contender:
    """Items one after the other, as fast as the consumer gives their slots back."""
    producer = _producer(stage, "ring stream")

    def once() -> None:
        with producer.next(_SECONDS):
            pass

    return stage.served("ring stream", once, Streaming)


def _serve_ring_stream(here: Here) -> Call:
    ring = _consumer(here)
    return lambda: ring.next().release()


_SERVED: dict[str, Callable[..., Call]] = {
    "pipe": _serve_pipe,
    "raw": _serve_raw,
    "streamalloc": _serve_ours,
    "cuda.core": _serve_cuda_core,
    "ring item": _serve_ring_item,
    "ring stream": _serve_ring_stream,
}


def _set_up(here: Here, way: str, *arguments: Any) -> None:
    here.opened[way] = _SERVED[way](here, *arguments)


def _serve(here: Here, way: str, count: int) -> None:
    once = here.opened[way]
    for _ in range(count):
        once()
    here.stream.synchronize()


ACTIONS: dict[str, Action] = {"set up": _set_up, "serve": _serve}


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


PIPE = "200 bytes through a pipe and back"
RAW = "raw calls and a pipe, results checked"
CUDA_CORE = "cuda.core, its pool sent beforehand"
TORCH = "torch.multiprocessing queue"
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
    if not can_share_pools(bench.device) or not bench.device.supports.stream_memory_operations:
        raise Unavailable("this device's pools cannot be shared between processes")
    with contextlib.ExitStack() as resources:
        stage = Stage(bench, resources.enter_context(Peer(bench.chosen.driver, __name__)), resources)

        def setup(way: Way) -> Contender:
            contender = way.setup(stage)
            contender.median(_LEAST)
            return contender

        ready, missing = prepared(bench, WAYS, setup)
        times = _timed(bench, {way.name: contender for way, contender in ready})
        bench.device.synchronize()
    rows = []
    for way, _ in ready:
        found = spread(times[way.name])
        compared = [_compared(bench, target, way, times) for target in way.targets if target.to in times]
        to_raw = ratio(times[way.name], times[RAW])
        row = {"ratio_to_raw": to_raw, "per_second": 1e6 / found["median_us"], "compared": compared}
        rows.append({"name": way.name, **found, **row})
    return {"bytes": SIZE, "rows": [*rows, *missing]}


def _timed(bench: Bench, contenders: dict[str, Contender]) -> dict[str, list[float]]:
    """Microseconds a hand-off, by way and round."""
    slowest = max(contender.median(_LEAST * 2) for contender in contenders.values())
    count = max(_LEAST, min(_MOST, int(bench.effort.block * 1e6 / slowest)))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for name in rotated(list(contenders), bench.effort.rounds):
        bench.device.synchronize()
        times[name].append(contenders[name].median(count))
    return times


def _compared(bench: Bench, target: Target, way: Way, times: dict[str, list[float]]) -> dict[str, Any]:
    values, base = times[way.name], times[target.to]
    if target.at_most is not None:
        found, wanted = {"times_the_time": ratio(values, base)}, {"at_most": target.at_most}
    else:
        found, wanted = {"times_as_fast": ratio(base, values)}, {"at_least": target.at_least or 0.0}
    # Targets are for a GPU.
    return {"to": target.to, **found, **({} if bench.chosen.is_simulated else wanted)}


# --- how it is shown ------------------------------------------------------------------------------------------------


def show_sharing(terminal: Terminal, result: dict[str, Any]) -> None:
    """Hand-offs between two processes."""
    if not begun(terminal, "Hand{} to another process, and hear that it is done", " {bytes}", result):
        return
    figures = [column._replace(shown=",.1f") for column in SPREAD]
    a_second = Column("a second", "per_second", ",.0f")
    show_table(terminal, "microseconds", result["rows"], *figures, a_second, TO_RAW._replace(target=""))
    for row in result["rows"]:
        for compared in row.get("compared", ()):
            terminal.line(f"  {row['name']}: {_shown(terminal, compared)}")


def _shown(terminal: Terminal, compared: dict[str, Any]) -> str:
    slower = "times_the_time" in compared
    what, sign = ("times the time of", "<=") if slower else ("times as fast as", ">=")
    found = compared["times_the_time" if slower else "times_as_fast"]
    target = compared.get("at_most" if slower else "at_least")
    if target is None:
        return f"{found:.2f} {what} {compared['to']}"
    figure = judged(terminal, f"{found:.2f}", found <= target if slower else found >= target)
    return f"{figure} {what} {compared['to']} (target: {sign} {target:g})"


SECTIONS = (Section("sharing", measure_sharing, show_sharing),)
