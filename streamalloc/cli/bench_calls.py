"""The benchmark's rows about single calls: pools, streams, events, copies, views and what other libraries take."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

import streamalloc as sa
from streamalloc.cli.c_loop import c_loop
from streamalloc.cli.libraries import CudaCore, CuPy, PyTorch, Rmm, library
from streamalloc.cli.measuring import SIZE, Bench, Call, Row, Setup, Target, fastest

__all__ = ["ROWS"]

RAW = "raw calls"
OURS = "streamalloc"
CHECKED = "raw calls, results checked"
CACHED = "streamalloc CachingAllocator"
C_LOOP = "C loop"
CUPY_CACHING = "CuPy MemoryPool (caching)"

# Blocks of work that a stream runs: its queue holds about a thousand.
_QUEUED = 200
# The smallest step between two allocations of a pool: the cheapest way to have many.
_LIVE_BYTES = 512


def with_(kind: Callable[[Bench], Any], make: Callable[[Any], Call]) -> Setup:
    """A way of another library, which is set up first."""
    return lambda bench: make(library(kind, bench))


# --- allocate and free ----------------------------------------------------------------------------------------------


def raw_pair(bench: Bench, pool: Any = None, nbytes: int = SIZE) -> Call:
    """Allocate and free with the bindings' two functions, bound beforehand, and handle objects."""
    allocate, free, stream = bench.driver.cuMemAllocFromPoolAsync, bench.driver.cuMemFreeAsync, bench.raw_stream
    pool = bench.raw_pool if pool is None else pool

    def pair() -> None:
        _, pointer = allocate(nbytes, pool, stream)
        free(pointer, stream)

    return pair


def raw_pair_checked(bench: Bench) -> Call:
    """The same, and look at both results."""
    allocate, free = bench.driver.cuMemAllocFromPoolAsync, bench.driver.cuMemFreeAsync
    pool, stream = bench.raw_pool, bench.raw_stream

    def pair() -> None:
        error, pointer = allocate(SIZE, pool, stream)
        if error:
            raise RuntimeError(error)
        (error,) = free(pointer, stream)
        if error:
            raise RuntimeError(error)

    return pair


def our_pair(bench: Bench) -> Call:
    """Allocate and free with the library."""
    pool, stream = bench.pool, bench.stream
    return lambda: pool.allocate(SIZE, stream).free()


def our_cached_pair(bench: Bench) -> Call:
    """The same with the caching allocator."""
    allocator, stream = bench.resources.enter_context(sa.CachingAllocator(bench.pool)), bench.stream
    return lambda: allocator.allocate(SIZE, stream).free()


def our_cached_dropped(bench: Bench) -> Call:
    """The same, and leave the buffer's end to Python."""
    allocator = bench.resources.enter_context(sa.CachingAllocator(bench.pool))
    return functools.partial(allocator.allocate, SIZE, bench.stream)


def our_dropped(bench: Bench) -> Call:
    """Allocate, and leave the free to the end of the buffer."""
    return functools.partial(bench.pool.allocate, SIZE, bench.stream)


def cuda_core_pair(cuda: CudaCore, *, on_stream: bool) -> Call:
    """cuda.core's pair; a stream named for the free costs it something."""
    resource, stream = cuda.resource, cuda.stream
    if on_stream:
        return lambda: resource.allocate(SIZE, stream=stream).close(stream)
    return lambda: resource.allocate(SIZE, stream=stream).close()


def cupy_pair(cupy: CuPy, pool: str) -> Call:
    """One of CuPy's pools; the memory is freed by its last reference."""
    return functools.partial(getattr(cupy.cupy.cuda, pool)().malloc, SIZE)


def rmm_pair(rmm: Rmm) -> Call:
    """RMM's pair."""
    resource, stream = rmm.resource, rmm.stream
    return lambda: resource.deallocate(resource.allocate(SIZE, stream), SIZE, stream)


def torch_pair(torch: PyTorch) -> Call:
    """A tensor of PyTorch's caching allocator."""
    empty, kind, device = torch.torch.empty, torch.torch.uint8, torch.device
    return lambda: empty(SIZE, dtype=kind, device=device)


# --- work on a stream -----------------------------------------------------------------------------------------------


def raw_fill(bench: Bench) -> Call:
    return functools.partial(bench.driver.cuMemsetD8Async, bench.raw_buffer(), 7, SIZE, bench.raw_stream)


def raw_copy(bench: Bench) -> Call:
    target, source = bench.raw_buffer(), bench.raw_buffer()
    return functools.partial(bench.driver.cuMemcpyAsync, target, source, SIZE, bench.raw_stream)


def raw_to_numpy(bench: Bench) -> Call:
    driver, array, source, stream = bench.driver, bench.array, bench.raw_buffer(), bench.raw_stream
    return fastest(
        functools.partial(driver.cuMemcpyDtoHAsync, array, source, SIZE, stream),
        functools.partial(driver.cuMemcpyDtoHAsync, array.ctypes.data, source, SIZE, stream),
        functools.partial(driver.cuMemcpyAsync, driver.CUdeviceptr(array.ctypes.data), source, SIZE, stream),
    )


def raw_from_numpy(bench: Bench) -> Call:
    driver, array, target, stream = bench.driver, bench.array, bench.raw_buffer(), bench.raw_stream
    return fastest(
        functools.partial(driver.cuMemcpyHtoDAsync, target, array, SIZE, stream),
        functools.partial(driver.cuMemcpyHtoDAsync, target, array.ctypes.data, SIZE, stream),
        functools.partial(driver.cuMemcpyAsync, target, driver.CUdeviceptr(array.ctypes.data), SIZE, stream),
    )


def our_copy(bench: Bench, method: str, *, host: bool) -> Call:
    other = bench.array if host else bench.buffer()
    return functools.partial(getattr(bench.buffer(), method), other)


def cupy_copy(cupy: CuPy, method: str) -> Call:
    array, host = cupy.array(), np.zeros(SIZE, np.uint8)
    return functools.partial(array.set, host) if method == "set" else functools.partial(array.get, out=host)


def torch_copy(torch: PyTorch, *, to_host: bool) -> Call:
    tensor, host = torch.tensor(), torch.torch.from_numpy(np.zeros(SIZE, np.uint8))
    target, source = (host, tensor) if to_host else (tensor, host)
    return functools.partial(target.copy_, source)


def cuda_core_copy(cuda: CudaCore) -> Call:
    return functools.partial(cuda.buffer().copy_to, cuda.buffer(), stream=cuda.stream)


def cupy_device_copy(cupy: CuPy) -> Call:
    target, source = cupy.array().data, cupy.array().data
    return functools.partial(target.copy_from_device_async, source, SIZE, cupy.stream)


def raw_order(bench: Bench) -> Call:
    """Make an event, record it, let another stream wait for it, and destroy it."""
    driver, stream = bench.driver, bench.raw_stream
    other = driver.CUstream(bench.resources.enter_context(bench.device.create_stream()).handle)
    make, record, wait, end = (
        driver.cuEventCreate,
        driver.cuEventRecord,
        driver.cuStreamWaitEvent,
        driver.cuEventDestroy,
    )
    flags = int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)

    def order() -> None:
        _, event = make(flags)
        record(event, stream)
        wait(other, event, 0)
        end(event)

    return order


def our_order(bench: Bench) -> Call:
    stream, other = bench.stream, bench.resources.enter_context(bench.device.create_stream())
    return lambda: other.wait(stream.record())


def their_order(stream: Any, other: Any, record: str, wait: str) -> Call:
    record_, wait_ = getattr(stream, record), getattr(other, wait)
    return lambda: wait_(record_())


# --- figures and other libraries ------------------------------------------------------------------------------------


def raw_statistics(bench: Bench) -> Call:
    get, pool, kind = bench.driver.cuMemPoolGetAttribute, bench.raw_pool, bench.driver.CUmemPool_attribute
    a, b, c, d = (
        kind.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
        kind.CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
        kind.CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
        kind.CU_MEMPOOL_ATTR_USED_MEM_HIGH,
    )

    def four() -> None:
        get(pool, a)
        get(pool, b)
        get(pool, c)
        get(pool, d)

    return four


def cuda_core_statistics(cuda: CudaCore) -> Call:
    attributes = cuda.resource.attributes

    def four() -> tuple[Any, ...]:
        return (
            attributes.reserved_mem_current,
            attributes.reserved_mem_high,
            attributes.used_mem_current,
            attributes.used_mem_high,
        )

    return four


def interface_by_hand(bench: Bench) -> Call:
    """The dictionary that version 3 of the interface asks for, its values at hand."""
    data = (bench.buffer().address, False)
    return lambda: {"shape": (SIZE,), "typestr": "|u1", "data": data, "strides": None, "version": 3, "stream": 1}


def interface_of(thing: Any) -> Call:
    return lambda: thing.__cuda_array_interface__


def capsule_of(thing: Any) -> Call:
    # As a program calls it: functools.partial takes longer to pass a name along.
    return lambda: thing.__dlpack__(stream=-1)


def view_of(thing: Any) -> Call:
    return lambda: thing[16:32]


# --- how much lives, and on how many streams ------------------------------------------------------------------------


def _live(kind: str, at: int) -> Setup:
    def setup(bench: Bench) -> Call:
        counts = bench.effort.live[:-1] if bench.chosen.is_simulated else bench.effort.live
        if at >= len(counts):
            raise ImportError("not with this effort")
        pool, raw_pool = bench.new_pool()
        if kind != RAW:
            allocator = pool if kind == OURS else bench.resources.enter_context(sa.CachingAllocator(pool))
            buffers = [allocator.allocate(_LIVE_BYTES, bench.stream) for _ in range(counts[at])]
            bench.resources.callback(_free_all, buffers)
            stream = bench.stream
            return lambda: allocator.allocate(_LIVE_BYTES, stream).free()
        allocate, free = bench.driver.cuMemAllocFromPoolAsync, bench.driver.cuMemFreeAsync
        pointers = [allocate(_LIVE_BYTES, raw_pool, bench.raw_stream)[1] for _ in range(counts[at])]
        bench.resources.callback(lambda: [free(pointer, bench.raw_stream) for pointer in pointers])
        return raw_pair(bench, raw_pool, _LIVE_BYTES)

    return setup


def _free_all(buffers: list[sa.Buffer]) -> None:
    for buffer in buffers:
        buffer.free()


def _on_streams(kind: str, count: int) -> Setup:
    def setup(bench: Bench) -> Call:
        streams = [bench.resources.enter_context(bench.device.create_stream()) for _ in range(count)]
        pool, raw_pool = bench.new_pool()
        if kind != RAW:
            allocator = pool if kind == OURS else bench.resources.enter_context(sa.CachingAllocator(pool))
            following = itertools.cycle(streams).__next__
            return lambda: allocator.allocate(SIZE, following()).free()
        allocate, free = bench.driver.cuMemAllocFromPoolAsync, bench.driver.cuMemFreeAsync
        raw_following = itertools.cycle([bench.driver.CUstream(stream.handle) for stream in streams]).__next__

        def pair() -> None:
            stream = raw_following()
            free(allocate(SIZE, raw_pool, stream)[1], stream)

        return pair

    return setup


def _scaled(key: str, title: str, scales: dict[str, int], setup: Callable[[str, int], Setup]) -> Row:
    """A row of pairs at several scales: how much the library takes beside the raw calls is to stay the same.

    What asks the driver for nothing is to take as long as ever.
    """
    kinds = (RAW, OURS, CACHED)
    ways = {f"{kind}, {scale}": setup(kind, value) for scale, value in scales.items() for kind in kinds}
    bases = {f"{kind}, {scale}": f"{RAW}, {scale}" for scale in scales for kind in kinds}
    first, *others = scales
    targets = [Target(f"{OURS}, {scale}", 1.15, f"{OURS}, {first}", "ratio_to_raw") for scale in others]
    targets += [Target(f"{CACHED}, {scale}", 1.15, f"{CACHED}, {first}") for scale in others]
    return Row(key, title, ways, tuple(targets), bases=bases)


_LIVE = {"10 alive": 0, "1,000 alive": 1, "100,000 alive": 2, "1,000,000 alive": 3}
_ON = {"1 stream": 1, "64 streams": 64}

ROWS = (
    Row(
        "pair",
        "Allocate and free 4 KiB",
        {
            RAW: raw_pair,
            CHECKED: raw_pair_checked,
            OURS: our_pair,
            CACHED: our_cached_pair,
            C_LOOP: c_loop,
            "cuda.core .close()": with_(CudaCore, lambda cuda: cuda_core_pair(cuda, on_stream=False)),
            "cuda.core .close(stream)": with_(CudaCore, lambda cuda: cuda_core_pair(cuda, on_stream=True)),
            "CuPy MemoryAsyncPool": with_(CuPy, lambda cupy: cupy_pair(cupy, "MemoryAsyncPool")),
            CUPY_CACHING: with_(CuPy, lambda cupy: cupy_pair(cupy, "MemoryPool")),
            "RMM CudaAsyncMemoryResource": with_(Rmm, rmm_pair),
            "PyTorch empty (caching)": with_(PyTorch, torch_pair),
        },
        (
            Target(OURS, 1.25, RAW),
            Target(CACHED, 0.75, C_LOOP),
            Target(CACHED, 1.0, CUPY_CACHING),
            Target(OURS, 25.0, simulated=True),
        ),
    ),
    Row(
        "drop",
        "Allocate 4 KiB and drop the buffer",
        {RAW: raw_pair, OURS: our_dropped, CACHED: our_cached_dropped},
    ),
    Row(
        "fill",
        "Fill 4 KiB",
        {
            RAW: raw_fill,
            OURS: lambda bench: functools.partial(bench.buffer().fill, 7),
            "cuda.core": with_(CudaCore, lambda cuda: functools.partial(cuda.buffer().fill, 7, stream=cuda.stream)),
            "CuPy memset_async": with_(
                CuPy, lambda cupy: functools.partial(cupy.array().data.memset_async, 7, SIZE, cupy.stream)
            ),
            "PyTorch fill_ (a kernel)": with_(PyTorch, lambda torch: functools.partial(torch.tensor().fill_, 7)),
        },
        (Target(OURS, 1.35, RAW),),
        most=_QUEUED,
    ),
    Row(
        "order",
        "Record an event, and let another stream wait for it",
        {
            RAW: raw_order,
            OURS: our_order,
            "cuda.core": with_(
                CudaCore, lambda cuda: their_order(cuda.stream, cuda.device.create_stream(), "record", "wait")
            ),
            "CuPy": with_(
                CuPy,
                lambda cupy: their_order(cupy.stream, cupy.cupy.cuda.Stream(non_blocking=True), "record", "wait_event"),
            ),
            "PyTorch": with_(
                PyTorch,
                lambda torch: their_order(
                    torch.stream, torch.torch.cuda.Stream(torch.device), "record_event", "wait_event"
                ),
            ),
        },
        (Target(OURS, 1.35, RAW),),
        most=_QUEUED,
    ),
    Row(
        "statistics",
        "Read four figures of a pool",
        {
            RAW: raw_statistics,
            OURS: lambda bench: bench.pool.statistics,
            "cuda.core": with_(CudaCore, cuda_core_statistics),
        },
        (Target(OURS, 1.35, RAW),),
    ),
    Row(
        "copy",
        "Copy 4 KiB to another buffer",
        {
            RAW: raw_copy,
            OURS: lambda bench: our_copy(bench, "copy_to", host=False),
            "cuda.core": with_(CudaCore, cuda_core_copy),
            "CuPy": with_(CuPy, cupy_device_copy),
        },
        (Target(OURS, 1.2, RAW),),
        most=_QUEUED,
    ),
    Row(
        "to_numpy",
        "Copy 4 KiB to a numpy array, which waits for it",
        {
            RAW: raw_to_numpy,
            OURS: lambda bench: our_copy(bench, "copy_to", host=True),
            "CuPy get": with_(CuPy, lambda cupy: cupy_copy(cupy, "get")),
            "PyTorch copy_": with_(PyTorch, lambda torch: torch_copy(torch, to_host=True)),
        },
        (Target(OURS, 1.2, RAW), Target(OURS, 1.0, "CuPy get")),
        most=_QUEUED,
    ),
    Row(
        "from_numpy",
        "Copy 4 KiB from a numpy array",
        {
            RAW: raw_from_numpy,
            OURS: lambda bench: our_copy(bench, "copy_from", host=True),
            "CuPy set": with_(CuPy, lambda cupy: cupy_copy(cupy, "set")),
            "PyTorch copy_": with_(PyTorch, lambda torch: torch_copy(torch, to_host=False)),
        },
        (Target(OURS, 1.5, RAW), Target(OURS, 1.0, "CuPy set")),
        most=_QUEUED,
    ),
    Row(
        "synchronize",
        "Synchronize a stream that is idle",
        {
            RAW: lambda bench: functools.partial(bench.driver.cuStreamSynchronize, bench.raw_stream),
            OURS: lambda bench: bench.stream.synchronize,
            "cuda.core": with_(CudaCore, lambda cuda: cuda.stream.sync),
            "CuPy": with_(CuPy, lambda cupy: cupy.stream.synchronize),
            "PyTorch": with_(PyTorch, lambda torch: torch.stream.synchronize),
        },
    ),
    Row(
        "query",
        "Ask whether a stream is idle",
        {
            RAW: lambda bench: functools.partial(bench.driver.cuStreamQuery, bench.raw_stream),
            OURS: lambda bench: bench.stream.query,
            "CuPy": with_(CuPy, lambda cupy: lambda: cupy.stream.done),
            "PyTorch": with_(PyTorch, lambda torch: torch.stream.query),
        },
    ),
    Row(
        "dlpack",
        "DLPack capsule, without ordering",
        {
            "numpy array": lambda bench: bench.array.__dlpack__,
            OURS: lambda bench: capsule_of(bench.buffer()),
            "streamalloc, ordered after its stream": lambda bench: functools.partial(
                bench.buffer().__dlpack__, stream=bench.resources.enter_context(bench.device.create_stream()).handle
            ),
            "cuda.core": with_(CudaCore, lambda cuda: capsule_of(cuda.buffer())),
            "CuPy": with_(CuPy, lambda cupy: capsule_of(cupy.array())),
            "PyTorch": with_(PyTorch, lambda torch: capsule_of(torch.tensor())),
        },
        (Target(OURS, 0.6),),
        most=_QUEUED,
    ),
    Row(
        "interface",
        "CUDA array interface",
        {
            "the same dictionary by hand": interface_by_hand,
            OURS: lambda bench: interface_of(bench.buffer()),
            "CuPy": with_(CuPy, lambda cupy: interface_of(cupy.array())),
            "PyTorch": with_(PyTorch, lambda torch: interface_of(torch.tensor())),
        },
        (Target(OURS, 0.4),),
    ),
    Row(
        "view",
        "View of 16 bytes",
        {
            "numpy array": lambda bench: view_of(bench.array),
            OURS: lambda bench: view_of(bench.buffer()),
            "CuPy": with_(CuPy, lambda cupy: view_of(cupy.array())),
            "PyTorch": with_(PyTorch, lambda torch: view_of(torch.tensor())),
        },
        (Target(OURS, 0.6),),
    ),
    _scaled("live", "Allocate and free 512 bytes, with so many alive in the pool", _LIVE, _live),
    _scaled("streams", "Allocate and free 4 KiB, on the next stream each time", _ON, _on_streams),
)
