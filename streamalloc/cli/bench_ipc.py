"""The benchmark's row about sharing: handing a buffer to another process, and hearing that it is done with it.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import streamalloc as sa
from streamalloc import ipc
from streamalloc.cli.choice import KEEP_ALL
from streamalloc.cli.libraries import CudaCore, library
from streamalloc.cli.measuring import Bench, Call, Row, Setup, Target, Unavailable, step_times, value_of
from streamalloc.cli.peer import POSIX, Here, Peer, can_share_pools, environment

__all__ = ["ROWS", "Other", "answer_queue"]

SIZE = 1 << 20
SLOTS = 8
MESSAGE = b"m" * 200
# What the driver's opaque structures for other processes have.
HANDLE_BYTES = 64

# Of one contender in one round: hand-offs at least and at most, and how many more a stream of them has.
_LEAST, _MOST, _STREAM = 20, 500, 5
_SECONDS = 60.0


@dataclass(frozen=True)
class HandOffs:
    """One way to hand something to another process: ``begin(count)`` and ``end()`` stand around the calls of ``once``.

    Where ``streaming``, only all hand-offs together have a time, as many are on their way at once.
    """

    once: Call
    begin: Callable[[int], object]
    end: Call
    streaming: bool = False

    def measure(self, number: int) -> float:
        """Microseconds of a hand-off: the median of so many, or where they stream the mean of more of them."""
        count = max(number, _LEAST)
        if not self.streaming:
            self.begin(count)
            times = step_times(self.once, count)
            self.end()
            return statistics.median(times)
        count *= _STREAM
        self.begin(count)
        start = time.perf_counter_ns()
        for _ in range(count):
            self.once()
        self.end()
        return (time.perf_counter_ns() - start) / 1e3 / count


@dataclass(frozen=True)
class Stage:
    """What a contender is set up with."""

    bench: Bench
    peer: Peer
    pool: sa.MemoryPool
    way: str
    """What the other process calls it."""

    @property
    def resources(self) -> contextlib.ExitStack:
        """What lives as long as the row is measured."""
        return self.bench.resources

    def served(self, once: Call, streaming: bool = False) -> HandOffs:
        """A contender of which the other process has the other half."""
        return HandOffs(once, lambda count: self.peer.begin("serve", self.way, count), self.peer.result, streaming)

    def pipe(self, *arguments: str, fds: Sequence[ipc.Fd | int] = ()) -> Any:
        """This end of a pipe of multiprocessing, of which the other process has been given the other end."""
        ours, theirs = multiprocessing.Pipe()
        self.resources.enter_context(ours)
        with theirs:
            self.peer.ask("set_up", self.way, *arguments, fds=[theirs.fileno(), *fds])
        return ours


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


def pipe(stage: Stage) -> HandOffs:
    """A round trip of 200 bytes, without any memory."""
    ours = stage.pipe()

    def once() -> None:
        ours.send_bytes(MESSAGE)
        ours.recv_bytes()

    return stage.served(once)


def _serve_pipe(here: Here) -> Call:
    connection = _connection(here)
    return lambda: connection.send_bytes(connection.recv_bytes())


def raw(stage: Stage) -> HandOffs:
    """As one would write it by hand: the driver's functions, two events and a pipe."""
    driver = stage.bench.driver
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    pool, stream = driver.CUmemoryPool(stage.pool.handle), stage.bench.raw_stream
    ready, shared = _event(driver)
    stage.resources.callback(driver.cuEventDestroy, ready)
    with ipc.Fd(value_of(driver.cuMemPoolExportToShareableHandle(pool, kind, 0))) as fd:
        ours = stage.pipe(shared.hex(), fds=[fd])
    done = _opened(driver, ours.recv_bytes())
    stage.resources.callback(driver.cuEventDestroy, done)
    allocate, export, record = driver.cuMemAllocFromPoolAsync, driver.cuMemPoolExportPointer, driver.cuEventRecord
    wait, free = driver.cuStreamWaitEvent, driver.cuMemFreeAsync

    def once() -> None:
        allocated, pointer = allocate(SIZE, pool, stream)
        exported, data = export(pointer)
        (recorded,) = record(ready, stream)
        if allocated or exported or recorded:
            raise RuntimeError(allocated, exported, recorded)
        ours.send_bytes(ctypes.string_at(data.getPtr(), HANDLE_BYTES))
        ours.recv_bytes()
        (waited,) = wait(stream, done, 0)
        (freed,) = free(pointer, stream)
        if waited or freed:
            raise RuntimeError(waited, freed)

    return stage.served(once)


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
        imported, pointer = import_(pool, data)
        (waited,) = wait(stream, ready, 0)
        (freed,) = free(pointer, stream)
        (recorded,) = record(done, stream)
        if imported or waited or freed or recorded:
            raise RuntimeError(imported, waited, freed, recorded)
        connection.send_bytes(b"k")

    return once


def ours(stage: Stage) -> HandOffs:
    """With a ready word and a lease."""
    channel, theirs = ipc.Channel.pair()
    stage.resources.enter_context(channel)
    with theirs:
        stage.peer.ask("set_up", stage.way, fds=[theirs.fileno()])
    pool, stream = stage.pool, stage.bench.stream

    def once() -> None:
        buffer = pool.allocate(SIZE, stream)
        ipc.send(channel, buffer)
        channel.receive()
        buffer.free()

    return stage.served(once)


def _serve_ours(here: Here) -> Call:
    channel = ipc.Channel.from_fd(here.handles[0])
    stream, driver = here.stream, here.device.driver

    def once() -> None:
        ipc.receive(channel, stream=stream, driver=driver).close()
        channel.send(b"k")

    return once


def cuda_core_buffer(stage: Stage) -> HandOffs:
    """cuda.core with its pool sent beforehand; it has neither events nor leases."""
    cuda = library(CudaCore, stage.bench)
    resource = cuda.core.DeviceMemoryResource(cuda.device, cuda.core.DeviceMemoryResourceOptions(ipc_enabled=True))
    stream = cuda.stream
    stage.resources.callback(resource.close)
    ours = stage.pipe(fds=[int(resource.allocation_handle)])

    def once() -> None:
        buffer = resource.allocate(SIZE, stream=stream)
        ours.send_bytes(pickle.dumps(buffer.ipc_descriptor))
        ours.recv_bytes()
        buffer.close(stream)

    return stage.served(once)


def _serve_cuda_core(here: Here) -> Call:
    connection = _connection(here)
    core = importlib.import_module("cuda.core")
    device = core.Device(0)
    device.set_current()
    stream = device.create_stream()
    resource = core.DeviceMemoryResource.from_allocation_handle(device, here.handles[1].fileno())
    open_ = core.Buffer.from_ipc_descriptor

    def once() -> None:
        open_(resource, pickle.loads(connection.recv_bytes()), stream=stream).close()
        connection.send_bytes(b"k")

    return once


def _through_queue(stage: Stage, make: Callable[[], Any]) -> HandOffs:
    """Things go through a queue to a process of multiprocessing, as it alone can be given one."""
    spawn = multiprocessing.get_context("spawn")
    things, (answers, theirs) = spawn.SimpleQueue(), spawn.Pipe()
    process = spawn.Process(target=answer_queue, args=(things, theirs), daemon=True)
    # A process of multiprocessing inherits the environment.
    before = dict(os.environ)
    os.environ.update(environment(stage.bench.chosen.driver))
    try:
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
        theirs.close()

    def once() -> None:
        thing = make()
        things.put(thing)
        # Ends with EOFError where the other process has.
        if not answers.poll(_SECONDS):
            raise TimeoutError("the other process does not answer")
        answers.recv_bytes()
        if isinstance(thing, sa.Buffer):
            thing.free()

    def end() -> None:
        things.put(None)
        process.join(_SECONDS)
        things.close()
        answers.close()

    stage.resources.callback(end)
    return HandOffs(once, lambda count: None, lambda: None)


def answer_queue(things: Any, answers: Any) -> None:
    """The other process: take what comes through a queue, let go of it, and say so; None is the end."""
    for thing in iter(things.get, None):
        if hasattr(thing, "close"):
            thing.close()
        del thing
        answers.send_bytes(b"k")


def our_queue(stage: Stage) -> HandOffs:
    """A buffer as an item of a queue of multiprocessing."""
    return _through_queue(stage, lambda: stage.pool.allocate(SIZE, stage.bench.stream))


def torch_queue(stage: Stage) -> HandOffs:
    """A tensor as an item of such a queue, by torch.multiprocessing."""
    torch = importlib.import_module("torch")
    importlib.import_module("torch.multiprocessing")
    device = torch.device("cuda", 0)
    if not torch.cuda.is_available():
        raise ImportError("torch without CUDA")
    return _through_queue(stage, lambda: torch.empty(SIZE, dtype=torch.uint8, device=device))


def _producer(stage: Stage, *fds: int) -> ipc.RingProducer:
    """A producer whose consumer is in the other process."""
    producer = stage.resources.enter_context(ipc.Ring.producer(stage.pool, SIZE, SLOTS, stream=stage.bench.stream))
    channel, theirs = ipc.Channel.pair()
    with theirs:
        stage.peer.begin("set_up", stage.way, fds=[theirs.fileno(), *fds])
    producer.add(channel, timeout=_SECONDS)
    stage.peer.result()
    return producer


def _consumer(here: Here) -> ipc.RingConsumer:
    return ipc.Ring.consumer(ipc.Channel.from_fd(here.handles[0]), stream=here.stream, timeout=_SECONDS)


def ring_item(stage: Stage) -> HandOffs:
    """One item through a ring, and the consumer's word that it has it."""
    replies, theirs = ipc.Channel.pair()
    stage.resources.enter_context(replies)
    with theirs:
        producer = _producer(stage, theirs.fileno())

    def once() -> None:
        with producer.next(_SECONDS):
            pass
        replies.receive()

    return stage.served(once)


def _serve_ring_item(here: Here) -> Call:
    replies = ipc.Channel.from_fd(here.handles[1])
    ring = _consumer(here)

    def once() -> None:
        with ring.next():
            replies.send(b"k")

    return once


def ring_stream(stage: Stage) -> HandOffs:
    """Items one after the other, as fast as the consumer gives their slots back."""
    producer = _producer(stage)

    def once() -> None:
        with producer.next(_SECONDS):
            pass

    return stage.served(once, streaming=True)


def _serve_ring_stream(here: Here) -> Call:
    ring = _consumer(here)
    return lambda: ring.next().release()


# --- the row --------------------------------------------------------------------------------------------------------

RAW = "raw calls and a pipe, results checked"
PIPE = "200 bytes through a pipe and back"
OURS = "streamalloc share and open"
CUDA_CORE = "cuda.core, its pool sent beforehand"
QUEUE = "streamalloc, multiprocessing queue"
TORCH = "PyTorch, multiprocessing queue"
RING = "streamalloc Ring, one item and a reply"
STREAMING = f"streamalloc Ring, streaming, {SLOTS} slots"

# What makes each way's half here, and what makes the other process's; none where that has a process of its own.
WAYS: dict[str, tuple[Callable[[Stage], HandOffs], Callable[..., Call] | None]] = {
    RAW: (raw, _serve_raw),
    PIPE: (pipe, _serve_pipe),
    OURS: (ours, _serve_ours),
    CUDA_CORE: (cuda_core_buffer, _serve_cuda_core),
    QUEUE: (our_queue, None),
    TORCH: (torch_queue, None),
    RING: (ring_item, _serve_ring_item),
    STREAMING: (ring_stream, _serve_ring_stream),
}


class Other(Here):
    """What the other process does."""

    def set_up(self, name: str, *arguments: Any) -> None:
        """Take part in a way."""
        serve = WAYS[name][1]
        assert serve is not None
        self.opened[name] = serve(self, *arguments)

    def serve(self, name: str, count: int) -> None:
        """Take so many hand-offs."""
        once = self.opened[name]
        for _ in range(count):
            once()
        self.stream.synchronize()


def _need(bench: Bench) -> None:
    """The other process, and the pool that is shared with it, for all ways."""
    if not can_share_pools(bench.device) or not bench.device.supports.stream_memory_operations:
        raise Unavailable("this device's pools cannot be shared between processes")
    peer = bench.resources.enter_context(Peer(bench.chosen.driver, __name__))
    pool = sa.MemoryPool(bench.device, handle_types=POSIX, release_threshold=KEEP_ALL)
    bench.sharing = peer, bench.resources.enter_context(pool)


def _staged(name: str) -> Setup:
    def setup(bench: Bench) -> HandOffs:
        peer, pool = bench.sharing
        return WAYS[name][0](Stage(bench, peer, pool, name))

    return setup


ROWS = (
    Row(
        "share",
        "Hand 1 MiB to another process, and hear that it is done",
        {name: _staged(name) for name in WAYS},
        (
            Target(OURS, 1.3, RAW),
            Target(OURS, 1.1, CUDA_CORE),
            Target(QUEUE, 1 / 3, TORCH),
            Target(RING, 1.2, PIPE),
            Target(STREAMING, 1 / 3, CUDA_CORE),
        ),
        most=_MOST,
        need=_need,
    ),
)
