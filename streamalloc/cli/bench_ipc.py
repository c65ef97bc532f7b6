"""Benchmark row about sharing: send a buffer to another process, and wait for its reply.

The other process is a new interpreter. It opens each buffer, closes it, and sends a reply.
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
import unittest.mock
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import streamalloc as sa
from streamalloc import ipc
from streamalloc.cli.choice import KEEP_ALL
from streamalloc.cli.libraries import CudaCore
from streamalloc.cli.measuring import Bench, Call, Measured, Row, Setup, Target, step_times, value_of
from streamalloc.cli.needs import POSIX, need_shared_pools
from streamalloc.cli.worker import SECONDS, Worker, WorkerBase, environment
from streamalloc.driver.internal import cuda

SIZE = 1 << 20
"""Bytes in the buffer that is sent: 1 MiB."""
SLOTS = 8
"""Slots of a ring."""
MESSAGE = b"m" * 200
HANDLE_BYTES = 64
"""Bytes in the driver's opaque structures: ``CUipcEventHandle``, ``CUmemPoolPtrExportData``."""

_LEAST, _MOST = 20, 500
"""Transfers per block, at least and at most."""
_STREAM = 5
"""A streaming variant makes five times as many transfers per block."""


_POSIX = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _transfers(once: Call, begin: Callable[[int], object], end: Call, streaming: bool = False) -> Measured:
    """Return the microseconds per transfer to the other process: the median, or with ``streaming`` the mean.

    ``begin(count)`` and ``end()`` enclose ``count`` calls of ``once``. With ``streaming``, several transfers overlap,
    so only their total time is measured.
    """

    def measure(number: int) -> float:
        count = max(number, _LEAST) * (_STREAM if streaming else 1)
        begin(count)
        if not streaming:
            times = step_times(once, count)
            end()
            return statistics.median(times)
        start = time.perf_counter_ns()
        for _ in range(count):
            once()
        end()
        return (time.perf_counter_ns() - start) / 1e3 / count

    return Measured(measure)


@dataclass(frozen=True)
class Stage:
    """Objects that a variant is set up with."""

    bench: Bench
    worker: Worker
    pool: sa.MemoryPool
    variant: str
    """Name of the variant, for both processes."""

    @property
    def resources(self) -> contextlib.ExitStack:
        """Resources until the end of the row."""
        return self.bench.resources

    def served(self, once: Call, streaming: bool = False) -> Measured:
        """Return a measurement: ``once`` runs here, and the worker process runs its counterpart of the variant."""
        worker = self.worker
        return _transfers(once, lambda count: worker.begin("serve", self.variant, count), worker.result, streaming)

    def connect(self, ends: tuple[Any, Any], *arguments: str, fds: Sequence[ipc.Fd | int] = ()) -> Any:
        """Send one end of a pipe or channel to the other process and return the other end."""
        ours, theirs = ends
        self.resources.enter_context(ours)
        with theirs:
            self.worker.ask("set_up", self.variant, *arguments, fds=[theirs.fileno(), *fds])
        return ours


def _connection(worker: WorkerBase) -> Any:
    """Return the other process's end of a pipe."""
    return multiprocessing.connection.Connection(worker.handles[0].detach())


def _event(driver: Any) -> tuple[Any, bytes]:
    """Create an interprocess event; return it with its handle as bytes."""
    flags = driver.CUevent_flags
    event = value_of(driver.cuEventCreate(int(flags.CU_EVENT_DISABLE_TIMING) | int(flags.CU_EVENT_INTERPROCESS)))
    handle = value_of(driver.cuIpcGetEventHandle(event))
    return event, ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def _opened(driver: Any, shared: bytes) -> Any:
    """Open an event of the other process."""
    handle = driver.CUipcEventHandle()
    ctypes.memmove(handle.getPtr(), shared, HANDLE_BYTES)
    return value_of(driver.cuIpcOpenEventHandle(handle))


# --- the variants, each with the other process's half of a transfer --------------------------------------------------


def pipe(stage: Stage) -> Measured:
    """Send 200 bytes to the worker and receive them back, without device memory."""
    ours = stage.connect(multiprocessing.Pipe())

    def once() -> None:
        ours.send_bytes(MESSAGE)
        ours.recv_bytes()

    return stage.served(once)


def _serve_pipe(worker: WorkerBase) -> Call:
    connection = _connection(worker)
    return lambda: connection.send_bytes(connection.recv_bytes())


def raw(stage: Stage) -> Measured:
    """Share with the driver's functions, two events and a pipe."""
    driver = stage.bench.driver
    pool, stream = driver.CUmemoryPool(stage.pool.handle), stage.bench.raw_stream
    ready, shared = _event(driver)
    stage.resources.callback(driver.cuEventDestroy, ready)
    with ipc.Fd(value_of(driver.cuMemPoolExportToShareableHandle(pool, _POSIX, 0))) as fd:
        ours = stage.connect(multiprocessing.Pipe(), shared.hex(), fds=[fd])
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


def _serve_raw(worker: WorkerBase, shared: str) -> Call:
    driver = cast(Any, worker.device.driver)
    worker.resources.enter_context(worker.device.current())
    connection = _connection(worker)
    pool = value_of(driver.cuMemPoolImportFromShareableHandle(worker.handles[1].fileno(), _POSIX, 0))
    ready = _opened(driver, bytes.fromhex(shared))
    done, shared_done = _event(driver)
    connection.send_bytes(shared_done)
    stream, new_data = driver.CUstream(worker.stream.handle), driver.CUmemPoolPtrExportData
    import_, wait = driver.cuMemPoolImportPointer, driver.cuStreamWaitEvent
    free, record = driver.cuMemFreeAsync, driver.cuEventRecord

    def once() -> None:
        data = new_data()
        ctypes.memmove(data.getPtr(), connection.recv_bytes(), HANDLE_BYTES)
        imported, pointer = import_(pool, data)
        (waited,) = wait(stream, ready, 0)
        (freed,) = free(pointer, stream)
        (recorded,) = record(done, stream)
        if imported or waited or freed or recorded:
            raise RuntimeError(imported, waited, freed, recorded)
        connection.send_bytes(b"k")

    return once


def ours(stage: Stage) -> Measured:
    """Share with the library: the importer waits for the contents, and the free waits for the importer."""
    channel = stage.connect(ipc.Channel.pair())
    pool, stream = stage.pool, stage.bench.stream

    def once() -> None:
        buffer = pool.allocate(SIZE, stream)
        ipc.send(channel, buffer)
        channel.receive()
        buffer.free()

    return stage.served(once)


def _serve_ours(worker: WorkerBase) -> Call:
    channel = ipc.Channel.from_fd(worker.handles[0])
    stream, driver = worker.stream, worker.device.driver

    def once() -> None:
        ipc.receive(channel, stream=stream, driver=driver).close()
        channel.send(b"k")

    return once


def cuda_core_buffer(stage: Stage) -> Measured:
    """Share with cuda.core, its pool sent beforehand. It orders neither the contents nor the free."""
    cuda = stage.bench.library(CudaCore)
    resource = cuda.core.DeviceMemoryResource(cuda.device, cuda.core.DeviceMemoryResourceOptions(ipc_enabled=True))
    stream = cuda.stream
    stage.resources.callback(resource.close)
    ours = stage.connect(multiprocessing.Pipe(), fds=[int(resource.allocation_handle)])

    def once() -> None:
        buffer = resource.allocate(SIZE, stream=stream)
        ours.send_bytes(pickle.dumps(buffer.ipc_descriptor))
        ours.recv_bytes()
        buffer.close(stream)

    return stage.served(once)


def _serve_cuda_core(worker: WorkerBase) -> Call:
    connection = _connection(worker)
    core = importlib.import_module("cuda.core")
    device = core.Device(0)
    device.set_current()
    stream = device.create_stream()
    resource = core.DeviceMemoryResource.from_allocation_handle(device, worker.handles[1].fileno())
    open_ = core.Buffer.from_ipc_descriptor

    def once() -> None:
        open_(resource, pickle.loads(connection.recv_bytes()), stream=stream).close()
        connection.send_bytes(b"k")

    return once


def _through_queue(stage: Stage, make: Callable[[], Any]) -> Measured:
    """Send objects through a multiprocessing queue, to a process that multiprocessing starts."""
    spawn = multiprocessing.get_context("spawn")
    queue, (replies, theirs) = spawn.SimpleQueue(), spawn.Pipe()
    process = spawn.Process(target=answer_queue, args=(queue, theirs), daemon=True)
    # multiprocessing passes on the environment of this process.
    with unittest.mock.patch.dict(os.environ, environment(stage.bench.chosen.driver)), theirs:
        process.start()

    def once() -> None:
        sent = make()
        queue.put(sent)
        # If the other process has ended, poll() or recv_bytes() raises EOFError.
        if not replies.poll(SECONDS):
            raise TimeoutError("the other process does not answer")
        replies.recv_bytes()
        if isinstance(sent, sa.Buffer):
            sent.free()

    def end() -> None:
        queue.put(None)
        process.join(SECONDS)
        queue.close()
        replies.close()

    stage.resources.callback(end)
    return _transfers(once, lambda count: None, lambda: None)


def answer_queue(queue: Any, replies: Any) -> None:
    """Run in the other process: release each object from the queue and send a reply, until None arrives."""
    for received in iter(queue.get, None):
        if hasattr(received, "close"):
            received.close()
        del received
        replies.send_bytes(b"k")


def torch_queue(stage: Stage) -> Measured:
    """Send a tensor through a torch.multiprocessing queue."""
    torch = importlib.import_module("torch")
    importlib.import_module("torch.multiprocessing")
    device = torch.device("cuda", 0)
    if not torch.cuda.is_available():
        raise ImportError("torch without CUDA")
    return _through_queue(stage, lambda: torch.empty(SIZE, dtype=torch.uint8, device=device))


def _producer(stage: Stage, *fds: int) -> ipc.RingProducer:
    """Create a producer; its consumer is in the other process."""
    producer = stage.resources.enter_context(ipc.Ring.producer(stage.pool, SIZE, SLOTS, stream=stage.bench.stream))
    channel, theirs = ipc.Channel.pair()
    with theirs:
        stage.worker.begin("set_up", stage.variant, fds=[theirs.fileno(), *fds])
    producer.add(channel, timeout=SECONDS)
    stage.worker.result()
    return producer


def _consumer(worker: WorkerBase) -> ipc.RingConsumer:
    return ipc.Ring.consumer(ipc.Channel.from_fd(worker.handles[0]), stream=worker.stream, timeout=SECONDS)


def ring_item(stage: Stage) -> Measured:
    """Send one item through a ring, and wait for the consumer's reply."""
    replies, theirs = ipc.Channel.pair()
    stage.resources.enter_context(replies)
    with theirs:
        producer = _producer(stage, theirs.fileno())

    def once() -> None:
        with producer.next(SECONDS):
            pass
        replies.receive()

    return stage.served(once)


def _serve_ring_item(worker: WorkerBase) -> Call:
    replies = ipc.Channel.from_fd(worker.handles[1])
    ring = _consumer(worker)

    def once() -> None:
        with ring.next():
            replies.send(b"k")

    return once


def ring_stream(stage: Stage) -> Measured:
    """Send items through a ring as fast as the consumer releases the slots."""
    producer = _producer(stage)

    def once() -> None:
        with producer.next(SECONDS):
            pass

    return stage.served(once, streaming=True)


def _serve_ring_stream(worker: WorkerBase) -> Call:
    ring = _consumer(worker)
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

VARIANTS: dict[str, tuple[Callable[[Stage], Measured], Callable[..., Call] | None]] = {
    RAW: (raw, _serve_raw),
    PIPE: (pipe, _serve_pipe),
    OURS: (ours, _serve_ours),
    CUDA_CORE: (cuda_core_buffer, _serve_cuda_core),
    QUEUE: (lambda stage: _through_queue(stage, lambda: stage.pool.allocate(SIZE, stage.bench.stream)), None),
    TORCH: (torch_queue, None),
    RING: (ring_item, _serve_ring_item),
    STREAMING: (ring_stream, _serve_ring_stream),
}
"""Setup functions of this process and the worker; None: own process."""


class WorkerActions(WorkerBase):
    """Actions of the other process."""

    def set_up(self, name: str, *arguments: Any) -> None:
        """Set up this process's half of a variant."""
        serve = VARIANTS[name][1]
        assert serve is not None
        self.opened[name] = serve(self, *arguments)

    def serve(self, name: str, count: int) -> None:
        """Serve ``count`` transfers."""
        once = self.opened[name]
        for _ in range(count):
            once()
        self.stream.synchronize()


def _need(bench: Bench) -> None:
    """Start the other process and create the shared pool, for all variants."""
    need_shared_pools(bench.device)
    worker = bench.resources.enter_context(Worker(bench.chosen.driver, __name__))
    pool = sa.MemoryPool(bench.device, handle_types=POSIX, release_threshold=KEEP_ALL)
    bench.sharing = worker, bench.resources.enter_context(pool)


def _staged(name: str) -> Setup:
    def setup(bench: Bench) -> Measured:
        worker, pool = bench.sharing
        return VARIANTS[name][0](Stage(bench, worker, pool, name))

    return setup


ROWS = (
    Row(
        "share",
        "Send 1 MiB to another process, and wait for its reply",
        {name: _staged(name) for name in VARIANTS},
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
