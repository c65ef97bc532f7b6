"""Rows of ``bench`` that measure processes and whole programs: sharing, stores, imports, replays of traces.

The other process is a new interpreter. In the row "share" it opens each buffer, closes it, and sends a reply.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import reduction
from pathlib import Path
from typing import Any, cast

import streamalloc as sa
from streamalloc import ipc, traces, vmm
from streamalloc.cli.machine import KEEP_ALL, POSIX, need_shared_pools, need_virtual_memory
from streamalloc.cli.measuring import (
    Bench,
    BenchRow,
    CudaCore,
    Measured,
    PyTorch,
    Target,
    repeated,
    slow_row,
    undone,
    value_of,
)
from streamalloc.cli.worker import SECONDS, context, start
from streamalloc.core.errors import size_text
from streamalloc.driver.internal import choice_of, cuda, opaque_bytes, opaque_struct

SIZE = 1 << 20
"""Size in bytes of the buffer that is sent: 1 MiB."""
HANDLE_BYTES = 64
"""Size in bytes of ``CUipcEventHandle`` and of ``CUmemPoolPtrExportData``."""

_POSIX = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def environment(driver: Any) -> dict[str, str]:
    """Return environment variables with which a new program uses the same driver, or simulates the same machine."""
    path = os.pathsep.join(filter(None, (str(Path(sa.__file__).parent.parent), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "STREAMALLOC_DRIVER": choice_of(driver)}


# --- sharing: the variants, each with the other process's half of a transfer ----------------------------------------


def _other(bench: Bench, half: Callable[..., None], *arguments: Any) -> Any:
    """Start the other process, which runs ``half``, the other half of each transfer, until the pipe is closed. Returns
    this process's end of the pipe.
    """
    process, ours = start(bench.chosen.driver, half, *arguments)
    bench.resources.callback(process.join, SECONDS)
    return bench.resources.enter_context(ours)


def _shared_pool(bench: Bench) -> sa.MemoryPool:
    need_shared_pools(bench.device)
    return bench.resources.enter_context(sa.MemoryPool(bench.device, handle_types=POSIX, release_threshold=KEEP_ALL))


def _event(driver: Any) -> tuple[Any, bytes]:
    """Make an interprocess event. Returns the event, and its IPC handle as bytes."""
    flags = driver.CUevent_flags
    event = value_of(driver.cuEventCreate(int(flags.CU_EVENT_DISABLE_TIMING) | int(flags.CU_EVENT_INTERPROCESS)))
    return event, opaque_bytes(value_of(driver.cuIpcGetEventHandle(event)))


def _opened(driver: Any, shared: bytes) -> Any:
    """Open an event of the other process (``cuIpcOpenEventHandle``). ``shared``: IPC handle of the event as bytes."""
    return value_of(driver.cuIpcOpenEventHandle(opaque_struct("CUipcEventHandle", shared)))


def raw_share(bench: Bench) -> Measured:
    """Return the variant that shares memory by the driver's functions, two events and a pipe."""
    driver, stream = bench.driver, bench.raw_stream
    pool = driver.CUmemoryPool(_shared_pool(bench).handle)
    ready, shared = _event(driver)
    bench.resources.callback(driver.cuEventDestroy, ready)
    with ipc.Fd(value_of(driver.cuMemPoolExportToShareableHandle(pool, _POSIX, 0))) as fd:
        ours = _other(bench, _serve_raw, reduction.DupFd(fd.fileno()), shared)
    done = _opened(driver, ours.recv_bytes())
    bench.resources.callback(driver.cuEventDestroy, done)
    allocate, export, record = driver.cuMemAllocFromPoolAsync, driver.cuMemPoolExportPointer, driver.cuEventRecord
    wait, free = driver.cuStreamWaitEvent, driver.cuMemFreeAsync

    def once() -> None:
        pointer = value_of(allocate(SIZE, pool, stream))
        data = value_of(export(pointer))
        value_of(record(ready, stream))
        ours.send_bytes(ctypes.string_at(data.getPtr(), HANDLE_BYTES))
        ours.recv_bytes()
        value_of(wait(stream, done, 0))
        value_of(free(pointer, stream))

    return repeated(once)


def _serve_raw(connection: Any, fd: Any, shared: bytes) -> None:
    """Run the other process's half of :func:`raw_share`, until the pipe is closed.

    ``fd``: descriptor of the exported pool. ``shared``: IPC handle of the event that is recorded after the contents.
    """
    device = sa.Device(0)
    driver: Any = device.driver
    with device.current(), device.create_stream() as ours:
        pool = value_of(driver.cuMemPoolImportFromShareableHandle(fd.detach(), _POSIX, 0))
        ready = _opened(driver, shared)
        done, shared_done = _event(driver)
        connection.send_bytes(shared_done)
        stream, new_data = driver.CUstream(ours.handle), driver.CUmemPoolPtrExportData
        import_, wait = driver.cuMemPoolImportPointer, driver.cuStreamWaitEvent
        free, record = driver.cuMemFreeAsync, driver.cuEventRecord
        while True:
            data = new_data()
            ctypes.memmove(data.getPtr(), connection.recv_bytes(), HANDLE_BYTES)
            pointer = value_of(import_(pool, data))
            value_of(wait(stream, ready, 0))
            value_of(free(pointer, stream))
            value_of(record(done, stream))
            connection.send_bytes(b"k")


def our_share(bench: Bench) -> Measured:
    """Return the variant that shares memory by this library: importers wait for the contents, and the free waits for
    importers.
    """
    channel, theirs = ipc.Channel.pair()
    pool, stream = _shared_pool(bench), bench.stream
    with theirs:
        _other(bench, _serve_ours, reduction.DupFd(theirs.fileno()))
    bench.resources.enter_context(channel)

    def once() -> None:
        buffer = pool.allocate(SIZE, stream)
        ipc.send(channel, buffer)
        channel.receive()
        buffer.free()

    return repeated(once)


def _serve_ours(_: Any, fd: Any) -> None:
    channel, device = ipc.Channel.from_fd(fd.detach()), sa.Device(0)
    driver = device.driver
    with device.create_stream() as stream:
        while True:
            ipc.receive(channel, stream=stream, driver=driver).close()
            channel.send(b"k")


def cuda_core_buffer(bench: Bench) -> Measured:
    """Return the variant that shares memory by cuda.core, whose pool was sent before. cuda.core orders neither the
    contents nor the free.
    """
    cuda = bench.library(CudaCore)
    resource = cuda.core.DeviceMemoryResource(cuda.device, cuda.core.DeviceMemoryResourceOptions(ipc_enabled=True))
    stream = cuda.stream
    bench.resources.callback(resource.close)
    ours = _other(bench, _serve_cuda_core, reduction.DupFd(int(resource.allocation_handle)))

    def once() -> None:
        buffer = resource.allocate(SIZE, stream=stream)
        ours.send_bytes(pickle.dumps(buffer.ipc_descriptor))
        ours.recv_bytes()
        buffer.close(stream)

    return repeated(once)


def _serve_cuda_core(connection: Any, fd: Any) -> None:
    core = importlib.import_module("cuda.core")
    device = core.Device(0)
    device.set_current()
    stream = device.create_stream()
    resource = core.DeviceMemoryResource.from_allocation_handle(device, fd.detach())
    open_ = core.Buffer.from_ipc_descriptor
    while True:
        open_(resource, pickle.loads(connection.recv_bytes()), stream=stream).close()
        connection.send_bytes(b"k")


RAW_SHARE = "raw calls and a pipe, results checked"
OUR_SHARE = "streamalloc share and open"
CUDA_CORE = "cuda.core, its pool sent beforehand"

# --- queues of multiprocessing ---------------------------------------------------------------------------------------

QUEUE, TORCH_QUEUE = "streamalloc buffer", "PyTorch tensor"


def _queued(bench: Bench, make: Callable[[], Any]) -> Measured:
    """Return the variant that puts an object into a queue. ``make`` returns the object. The other process takes the
    object, drops it, and replies.
    """
    queue = context.SimpleQueue()
    replies = _other(bench, _answer_queue, queue)
    bench.resources.callback(queue.put, None)

    def once() -> None:
        sent = make()
        queue.put(sent)
        replies.recv_bytes()  # The other process has dropped the object: the free need not wait.
        if isinstance(sent, sa.Buffer):
            sent.free()

    return repeated(once)


def _answer_queue(replies: Any, queue: Any) -> None:
    for received in iter(queue.get, None):
        if hasattr(received, "close"):
            received.close()
        del received
        replies.send_bytes(b"k")


def _torch_queue(bench: Bench) -> Measured:
    torch = bench.library(PyTorch)
    importlib.import_module("torch.multiprocessing")
    return _queued(bench, lambda: torch.torch.empty(SIZE, dtype=torch.torch.uint8, device=torch.device))


def _our_queue(bench: Bench) -> Measured:
    pool = _shared_pool(bench)
    return _queued(bench, lambda: pool.allocate(SIZE, bench.stream))


# --- stores ----------------------------------------------------------------------------------------------------------

CHUNKS, CHUNK, CHUNK_SIMULATED = 4, 256 << 20, 2 << 20
TENSORS, TENSOR, TENSORS_SIMULATED = 20_000, 1 << 20, 200
RAW_ATTACH, OPEN, AGAIN = "raw import, map and access", "streamalloc Store.open", "streamalloc Weights.attach"
EPOCH, LIKE = "streamalloc allocate_all, commit and open", "streamalloc like the previous: commit and attach"


def _need_store(bench: Bench) -> None:
    """Start the server of a store, and open the store as ``bench.common``, which all variants of the row use."""
    need_virtual_memory(bench.device)
    name = f"bench-{os.getpid()}"
    command = [sys.executable, "-m", "streamalloc", "serve", name]
    server = subprocess.Popen(command, env=environment(bench.chosen.driver), stdout=subprocess.PIPE, text=True)
    bench.resources.callback(server.communicate, timeout=SECONDS)
    bench.resources.callback(server.terminate)
    assert server.stdout is not None
    server.stdout.readline()
    bench.common = bench.resources.enter_context(ipc.Store(name))


def _attached(bench: Bench, *, again: bool) -> Measured:
    """Return the variant that opens weights of the store. ``again``: whether it attaches weights that were detached
    before, instead of opening them anew.
    """
    store, key = bench.common, f"again {again}"
    with store.write(key, bench.device) as writer:
        for number in range(CHUNKS):
            writer.allocate(f"layer {number}", CHUNK_SIMULATED if bench.chosen.is_simulated else CHUNK, "uint8")
    opened: list[ipc.Weights] = []
    if not again:
        return undone(lambda: opened.append(store.open(key)), lambda: opened.pop().close(after=()))
    weights = bench.resources.enter_context(store.open(key))
    weights.detach()
    return undone(weights.attach, lambda: weights.detach(after=()))


def _attached_by_raw_calls(bench: Bench) -> Measured:
    driver, keep_open = bench.driver, bench.resources.enter_context
    size = CHUNK_SIMULATED if bench.chosen.is_simulated else CHUNK
    memories = [keep_open(vmm.PhysicalMemory(bench.device, size, handle_types=POSIX)) for _ in range(CHUNKS)]
    files = [keep_open(cast(ipc.Fd, memory.export())) for memory in memories]
    access = [sa.MemAccessDesc(bench.device.location, sa.MemAccess.READ).to_driver()]
    mapped: list[tuple[Any, list[Any]]] = []

    def attach() -> None:
        start = value_of(driver.cuMemAddressReserve(CHUNKS * size, 0, 0, 0))
        handles = [value_of(driver.cuMemImportFromShareableHandle(file.fileno(), _POSIX)) for file in files]
        for number, handle in enumerate(handles):
            value_of(driver.cuMemMap(int(start) + number * size, size, 0, handle, 0))
        value_of(driver.cuMemSetAccess(start, CHUNKS * size, access, 1))
        mapped.append((start, handles))

    def detach() -> None:
        start, handles = mapped.pop()
        value_of(driver.cuMemUnmap(start, CHUNKS * size))
        for handle in handles:
            value_of(driver.cuMemRelease(handle))
        value_of(driver.cuMemAddressFree(start, CHUNKS * size))

    return undone(attach, detach)


def _epochs(bench: Bench, *, like: bool) -> Measured:
    """Return the variant that writes an epoch without contents, after which a reader switches to this epoch.

    ``like``: use the layout and the memory of a previous epoch. Up to three epochs have memory at the same time.
    """
    store, key = bench.common, f"like {like}"
    count = TENSORS_SIMULATED if bench.chosen.is_simulated else TENSORS
    size = min(TENSOR, bench.device.memory_info().free // 8 // count)
    tensors = {f"model.layers.{number}.weight": (size, "uint8") for number in range(count)}

    def write() -> None:
        with store.write(key, bench.device, replace=True) as writer:
            writer.allocate_all(tensors)

    def once() -> None:
        if like:
            store.write(key, bench.device, like="previous").commit()
            weights[0].attach(latest=True, after=())
        else:
            write()
            weights.append(bench.resources.enter_context(store.open(key)))
            weights.pop(0).close(after=())

    write()
    weights = [bench.resources.enter_context(store.open(key))]
    return undone(once, lambda: None)


# --- the import of the package, and replays -------------------------------------------------------------------------

_TIMED = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
BASE = "import cuda.bindings.driver, numpy"
IMPORT = "import streamalloc; streamalloc.MemoryPool"
"""Statement that imports the package and uses a class. The package loads its modules at the first use, so this load is
a part of the measured time.
"""


def _import(bench: Bench, *, statement: str) -> Measured:
    """Return the variant that imports in a new process, which measures the time itself. ``statement``: the import
    statement.
    """
    # The byte code goes to a folder of its own, because the environment may forbid writing it elsewhere.
    compiled = bench.resources.enter_context(tempfile.TemporaryDirectory(prefix="streamalloc-bench-"))
    variables = {**environment(bench.chosen.driver), "PYTHONPYCACHEPREFIX": compiled}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", _TIMED.format(statement.removeprefix("import "))]
    run = functools.partial(subprocess.run, command, env=variables, capture_output=True, text=True, check=True)
    # The first run does not count: only it would compile the modules and fill the page cache.
    return Measured(lambda number: float(run().stdout))


CACHED = traces.ALLOCATORS["cached"].title
EXPANDABLE = traces.ALLOCATORS["expandable"].title
OTHERS = tuple(traces.ALLOCATORS[name].title for name in ("pytorch", "cupy"))
_FIGURES = ("failures", "peak_used", "peak_reserved", "driver_calls", "reserved_over_used")


def _replay(bench: Bench, *, name: str, workload: str) -> Measured:
    """Return the variant that replays the trace of a workload on the allocator ``name``. The figures come from a first
    replay.
    """
    trace = _made(workload)
    # The figures come from a separate replay, because reading them after each allocation takes time.
    once = traces.replay(trace, name, bench.device, rounds=1)
    found = {one: getattr(once, one) for one in _FIGURES}
    replay = bench.resources.enter_context(traces.prepare(trace, name, bench.device))
    return Measured(lambda number: replay.run(), {one: value for one, value in found.items() if value is not None})


@functools.cache
def _made(name: str) -> traces.Trace:
    return traces.WORKLOADS[name]()


ROWS = (
    BenchRow(
        "share",
        "Send 1 MiB to another process, and wait for its reply",
        {RAW_SHARE: raw_share, OUR_SHARE: our_share, CUDA_CORE: cuda_core_buffer},
        (Target(OUR_SHARE, 1.3, RAW_SHARE), Target(OUR_SHARE, 1.1, CUDA_CORE)),
        most=500,
    ),
    BenchRow(
        "queue",
        "Send 1 MiB through a multiprocessing queue, and wait for a reply",
        {"200 bytes": lambda bench: _queued(bench, lambda: bytes(200)), QUEUE: _our_queue, TORCH_QUEUE: _torch_queue},
        (Target(QUEUE, 0.33, TORCH_QUEUE),),
        most=500,
    ),
    BenchRow(
        "store",
        f"Attach {size_text(CHUNKS * CHUNK)} in {CHUNKS} chunks that a store holds",
        {
            RAW_ATTACH: _attached_by_raw_calls,
            OPEN: functools.partial(_attached, again=False),
            AGAIN: functools.partial(_attached, again=True),
        },
        (Target(OPEN, 1.5, RAW_ATTACH),),
        most=20,
        need=_need_store,
    ),
    slow_row(
        "epochs",
        f"A new epoch of {TENSORS:,} tensors in a store, and its reader's switch, without the copies: 12 s in vime's "
        "issue 175, 3.0 s in slime, 1.6 s in SGLang's issue 40230",
        {EPOCH: functools.partial(_epochs, like=False), LIKE: functools.partial(_epochs, like=True)},
        (Target(LIKE, 100),),
        need=_need_store,
    ),
    slow_row(
        "import",
        "Import, in a new process",
        {one: functools.partial(_import, statement=one) for one in (BASE, IMPORT)},
        (Target(IMPORT, 1.2, BASE),),
        rounds=(15, 3),
    ),
    *(
        slow_row(
            f"replay_{workload}",
            f"Replay of a trace: {workload}",
            {
                entry.title: functools.partial(_replay, name=name, workload=workload)
                for name, entry in traces.ALLOCATORS.items()
            },
            (
                *(Target(CACHED, 1.0, other, figure) for other in OTHERS for figure in ("", "reserved_over_used")),
                Target(EXPANDABLE, 1.10, figure="reserved_over_used"),
            ),
        )
        for workload in traces.WORKLOADS
    ),
)
