"""Rows of ``bench`` that measure single calls: allocations, fills, copies, and exchange of arrays with other
libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import streamalloc as sa
from streamalloc import vmm
from streamalloc.cli.measuring import SIZE, Bench, BenchRow, Call, CudaCore, CuPy, PyTorch, Setup, Target

RAW = "raw calls"
OURS = "streamalloc"
CACHED = "streamalloc CachingAllocator"
ORDERED = "streamalloc, ordered"
EXPANDABLE = "streamalloc ExpandableCache"
_CACHES: dict[str, Callable[[sa.MemoryPool], Any]] = {CACHED: sa.CachingAllocator, EXPANDABLE: vmm.ExpandableCache}
CUPY_CACHING = "CuPy MemoryPool (caching)"

_QUEUED = 200
"""Largest number of calls that queue work in a block. The queue of a stream holds about 1,000."""


def with_(kind: Callable[[Bench], Any], make: Callable[[Any], Call]) -> Setup:
    """Return the set-up of a variant for another library. ``kind``: class with the library's objects. ``make`` gets an
    object of this class, and returns the call to measure.
    """
    return lambda bench: make(bench.library(kind))


# --- allocate and free ----------------------------------------------------------------------------------------------


def pair(bench: Bench, *, kind: str, drop: bool = False) -> Call:
    """Return a call that allocates 4 KiB and frees the memory. With ``drop``, the call only allocates, and the caller
    drops the result; this is not for the raw calls.

    ``kind``: name of the variant: raw calls, the pool, or a cache. The raw calls are functions of the bindings that get
    handles as objects; their results are not checked.
    """
    pool, raw_pool = bench.new_pool()
    allocator: Any = bench.resources.enter_context(_CACHES[kind](pool)) if kind in _CACHES else pool
    stream = bench.new_stream()
    # The first allocation on a stream takes longer in the driver, so it is made before the measurement.
    allocator.allocate(SIZE, stream).free()
    if drop:
        return partial(allocator.allocate, SIZE, stream)
    if kind != RAW:
        return lambda: allocator.allocate(SIZE, stream).free()
    allocate, free = bench.driver.cuMemAllocFromPoolAsync, bench.driver.cuMemFreeAsync
    raw = stream.checked_raw()
    return lambda: free(allocate(SIZE, raw_pool, raw)[1], raw)


def cuda_core_pair(cuda: CudaCore) -> Call:
    """Return a call that allocates 4 KiB with cuda.core, and frees the memory on cuda.core's stream."""
    resource, stream = cuda.resource, cuda.stream
    return lambda: resource.allocate(SIZE, stream=stream).close(stream)


def torch_pair(torch: PyTorch) -> Call:
    """Return a call that creates a tensor of 4 KiB in PyTorch's caching allocator. The caller drops the tensor."""
    empty, kind, device = torch.torch.empty, torch.torch.uint8, torch.device
    return lambda: empty(SIZE, dtype=kind, device=device)


# --- work on a stream -----------------------------------------------------------------------------------------------


def cupy_copy(cupy: CuPy) -> Call:
    target, source = cupy.array().data, cupy.array().data
    return partial(target.copy_from_device_async, source, SIZE, cupy.stream)


def capsule_of(array: Any, stream: int = -1) -> Call:
    # A lambda, because functools.partial with a keyword argument is slower, and the row measures this call.
    return lambda: array.__dlpack__(stream=stream)


def torch_ordered(torch: PyTorch) -> Call:
    return capsule_of(torch.tensor(), torch.torch.cuda.Stream(torch.device).cuda_stream)


ROWS = (
    BenchRow(
        "pair",
        "Allocate and free 4 KiB",
        {
            **{kind: partial(pair, kind=kind) for kind in (RAW, OURS, CACHED, EXPANDABLE)},
            "cuda.core": with_(CudaCore, cuda_core_pair),
            "CuPy MemoryAsyncPool": with_(CuPy, lambda cupy: partial(cupy.cupy.cuda.MemoryAsyncPool().malloc, SIZE)),
            CUPY_CACHING: with_(CuPy, lambda cupy: partial(cupy.cupy.cuda.MemoryPool().malloc, SIZE)),
            "PyTorch empty (caching)": with_(PyTorch, torch_pair),
        },
        (
            Target(OURS, 1.25, RAW),
            Target(CACHED, 0.4, RAW),
            Target(CACHED, 1.0, CUPY_CACHING),
            Target(EXPANDABLE, 1.05, CACHED),
        ),
    ),
    BenchRow(
        "drop",
        "Allocate 4 KiB and drop the buffer",
        {kind: partial(pair, kind=kind, drop=kind != RAW) for kind in (RAW, OURS, CACHED)},
    ),
    BenchRow(
        "fill",
        "Fill 4 KiB",
        {
            RAW: lambda bench: partial(bench.driver.cuMemsetD8Async, bench.raw_buffer(), 7, SIZE, bench.raw_stream),
            OURS: lambda bench: partial(bench.buffer().fill, 7),
            "cuda.core": with_(CudaCore, lambda cuda: partial(cuda.buffer().fill, 7, stream=cuda.stream)),
            "CuPy memset_async": with_(
                CuPy, lambda cupy: partial(cupy.array().data.memset_async, 7, SIZE, cupy.stream)
            ),
            "PyTorch fill_ (a kernel)": with_(PyTorch, lambda torch: partial(torch.tensor().fill_, 7)),
        },
        (Target(OURS, 1.35, RAW),),
        most=_QUEUED,
    ),
    BenchRow(
        "copy",
        "Copy 4 KiB to another buffer",
        {
            RAW: lambda bench: partial(
                bench.driver.cuMemcpyAsync, bench.raw_buffer(), bench.raw_buffer(), SIZE, bench.raw_stream
            ),
            OURS: lambda bench: partial(bench.buffer().copy_to, bench.buffer()),
            "cuda.core": with_(
                CudaCore, lambda cuda: partial(cuda.buffer().copy_to, cuda.buffer(), stream=cuda.stream)
            ),
            "CuPy": with_(CuPy, cupy_copy),
        },
        (Target(OURS, 1.2, RAW),),
        most=_QUEUED,
    ),
    BenchRow(
        "dlpack",
        "DLPack capsule, without ordering, and ordered for another stream",
        {
            "numpy array": lambda bench: bench.array.__dlpack__,
            OURS: lambda bench: capsule_of(bench.buffer()),
            ORDERED: lambda bench: capsule_of(bench.buffer(), bench.new_stream().handle),
            "cuda.core": with_(CudaCore, lambda cuda: capsule_of(cuda.buffer())),
            "CuPy": with_(CuPy, lambda cupy: capsule_of(cupy.array())),
            "PyTorch": with_(PyTorch, lambda torch: capsule_of(torch.tensor())),
            "PyTorch, ordered": with_(PyTorch, torch_ordered),
        },
        (Target(OURS, 0.6), Target(ORDERED, 2.5)),
        most=_QUEUED,
    ),
)
