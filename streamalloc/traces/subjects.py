"""Allocators that a trace can be replayed on: a table with those of streamalloc and of other libraries."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from streamalloc.core.errors import OutOfMemoryError
from streamalloc.core.internal import Allocator, Buffer, Device, Stream, as_stream, raw_handle
from streamalloc.core.session import session_of
from streamalloc.driver import Traced
from streamalloc.driver.internal import cuda
from streamalloc.pool import CachingAllocator, MemoryPool

_KEEP_ALL = 2**64 - 1
# Initial bytes of RMM's pool; its default is half of the device's memory.
_RMM_BEGINS = 32 << 20


def _nothing() -> None:
    """Default of :attr:`Subject.begin`."""


@dataclass
class Subject:
    """An allocator as plain functions, which add little time to a replay."""

    streams: Sequence[Any]
    """Streams of the allocator's library, one for each stream of the trace."""
    allocate: Callable[[int, Any], Any]
    """Allocates bytes on a stream."""
    free: Callable[[Any], object]
    """Frees an allocation on its own stream, as its last reference."""
    free_on: Callable[[Any, Any, Any], object]
    """Frees an allocation, given with its stream, on another stream."""
    out_of_memory: type[Exception] | tuple[type[Exception], ...] = MemoryError
    """The library's error if memory runs out."""
    reserved: Callable[[], int] | None = None
    """Bytes reserved from the driver; None if unknown."""
    calls: Callable[[], int] | None = None
    """Number of driver calls so far; None if not counted."""
    begin: Callable[[], object] = _nothing
    """Called before each replay."""


def of_allocator(allocator: Allocator, device: Device, streams: int, resources: contextlib.ExitStack) -> Subject:
    """An allocator of streamalloc: a pool, or an object with the same ``allocate``."""
    driver = device.driver
    ours = [resources.enter_context(device.create_stream()) for _ in range(streams)]
    order = _ordering(device, ours, resources)

    def free_on(buffer: Buffer, own: Stream, other: Stream) -> None:
        order(own, other)
        buffer.free(other)

    calls = (lambda: len(driver.calls)) if isinstance(driver, Traced) else None
    # operator.methodcaller takes 0.1 us more than the function that frees.
    free: Callable[[Buffer], object] = lambda buffer: buffer.free()  # noqa: E731
    return Subject(ours, allocator.allocate, free, free_on, OutOfMemoryError, _reserved_by(allocator), calls)


def _ordering(device: Device, streams: Sequence[Any], resources: contextlib.ExitStack) -> Callable[[Any, Any], object]:
    """Return a function that makes the second of two streams wait for the first, by two raw driver calls."""
    driver = cast(Any, device.driver)
    record, wait = driver.cuEventRecord, driver.cuStreamWaitEvent
    event = cuda.CUevent(resources.enter_context(device.create_event()).handle)
    handles = {id(stream): raw_handle(as_stream(stream, session_of(device))) for stream in streams}

    def order(first: Any, then: Any) -> None:
        (error,) = record(event, handles[id(first)])
        if not error:
            (error,) = wait(handles[id(then)], event, 0)
        if error:
            raise RuntimeError(error)

    return order


def _reserved_by(allocator: Any) -> Callable[[], int] | None:
    """A function for the reserved bytes of a pool, or of the pool under an allocator; None without a pool."""
    pool = getattr(allocator, "pool", allocator)
    if not isinstance(pool, MemoryPool):
        return None
    attributes = pool.attributes
    return lambda: attributes.reserved_mem_current


# --- streamalloc and the driver -------------------------------------------------------------------------------------


def _pool(device: Device, streams: int, resources: contextlib.ExitStack, *, cached: bool = False) -> Subject:
    allocator: Any = resources.enter_context(MemoryPool(device, release_threshold=_KEEP_ALL))
    if cached:
        allocator = resources.enter_context(CachingAllocator(allocator))
    return of_allocator(allocator, device, streams, resources)


def _raw(device: Device, streams: int, resources: contextlib.ExitStack) -> Subject:
    """The driver's two functions on a pool, with checked results."""
    pool_object = resources.enter_context(MemoryPool(device, release_threshold=_KEEP_ALL))
    found = of_allocator(pool_object, device, streams, resources)
    driver = cast(Any, device.driver)
    allocate_, free_ = driver.cuMemAllocFromPoolAsync, driver.cuMemFreeAsync
    pool = cuda.CUmemoryPool(pool_object.handle)

    def allocate(nbytes: int, stream: Any) -> tuple[Any, Any]:
        error, pointer = allocate_(nbytes, pool, stream)
        if error:
            raise MemoryError(error)
        return pointer, stream

    def free(thing: tuple[Any, Any]) -> None:
        (error,) = free_(*thing)
        if error:
            raise RuntimeError(error)

    handles = [raw_handle(stream) for stream in found.streams]
    order = _ordering(device, handles, resources)

    def free_on(thing: tuple[Any, Any], own: Any, other: Any) -> None:
        order(own, other)
        free((thing[0], other))

    return Subject(handles, allocate, free, free_on, MemoryError, found.reserved, found.calls)


# --- other libraries ------------------------------------------------------------------------------------------------


def _cuda_core(device: Device, streams: int, resources: contextlib.ExitStack) -> Subject:
    core = importlib.import_module("cuda.core")
    if not hasattr(core, "DeviceMemoryResource"):  # older versions
        core = importlib.import_module("cuda.core.experimental")
    theirs = core.Device(device.ordinal)
    theirs.set_current()
    # With options it makes its own pool, else it uses the current one.
    resource = core.DeviceMemoryResource(theirs, core.DeviceMemoryResourceOptions())
    allocate = resource.allocate
    close = core.Buffer.close
    attributes = getattr(resource, "attributes", None)

    def take(nbytes: int, stream: Any) -> Any:
        try:
            return allocate(nbytes, stream=stream)
        except Exception as error:
            # The name of a CUDAError is in its text only.
            raise MemoryError(str(error)) if "OUT_OF_MEMORY" in str(error) else error  # noqa: B904

    def free_on(buffer: Any, own: Any, other: Any) -> None:
        other.wait(own)
        close(buffer, other)

    reserved = None if attributes is None else lambda: int(attributes.reserved_mem_current)
    return Subject([theirs.create_stream() for _ in range(streams)], take, close, free_on, MemoryError, reserved)


def _drop(thing: object) -> None:
    """Free an allocation by dropping its last reference."""


def _cupy(device: Device, streams: int, resources: contextlib.ExitStack, *, driver_pool: bool = False) -> Subject:
    """CuPy's pool, which allocates and frees on the current stream; that stream waits for others before a free."""
    cupy = importlib.import_module("cupy")
    resources.enter_context(cupy.cuda.Device(device.ordinal))
    theirs = [cupy.cuda.Stream(non_blocking=True) for _ in range(streams)]
    resources.enter_context(theirs[0] if theirs else cupy.cuda.Stream(non_blocking=True))
    pool = cupy.cuda.MemoryAsyncPool() if driver_pool else cupy.cuda.MemoryPool()
    malloc = pool.malloc
    used: Any = None

    def begin() -> None:
        # Other code may have changed the current stream since the last replay.
        nonlocal used
        used = None

    def allocate(nbytes: int, stream: Any) -> Any:
        nonlocal used
        if stream is not used:
            stream.use()
            used = stream
        return malloc(nbytes)

    def free_on(thing: Any, own: Any, other: Any) -> None:
        own.wait_event(other.record())

    out_of_memory = (cupy.cuda.memory.OutOfMemoryError, cupy.cuda.runtime.CUDARuntimeError)
    resources.callback(pool.free_all_blocks)
    return Subject(theirs, allocate, _drop, free_on, out_of_memory, pool.total_bytes, begin=begin)


def _rmm(device: Device, streams: int, resources: contextlib.ExitStack, *, pool: bool = False) -> Subject:
    mr = importlib.import_module("rmm.mr")
    stream = importlib.import_module("rmm.pylibrmm.stream").Stream
    if pool:
        resource = mr.PoolMemoryResource(mr.CudaMemoryResource(), initial_pool_size=_RMM_BEGINS)
    else:
        resource = mr.CudaAsyncMemoryResource()
    take, give = resource.allocate, resource.deallocate

    def allocate(nbytes: int, stream: Any) -> tuple[int, int, Any]:
        return take(nbytes, stream), nbytes, stream

    theirs = [stream() for _ in range(streams)]
    order = _ordering(device, theirs, resources)  # RMM has no events

    def free_on(thing: tuple[int, int, Any], own: Any, other: Any) -> None:
        order(own, other)
        give(thing[0], thing[1], other)

    reserved = resource.pool_size if pool else None
    return Subject(theirs, allocate, lambda thing: give(*thing), free_on, MemoryError, reserved)


def _torch(device: Device, streams: int, resources: contextlib.ExitStack) -> Subject:
    """PyTorch's caching allocator: the two C functions that ``torch.cuda.caching_allocator_alloc`` calls."""
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise ImportError("torch without CUDA")
    torch.cuda.init()
    resources.enter_context(torch.cuda.device(device.ordinal))
    torch.cuda.empty_cache()
    resources.callback(torch.cuda.empty_cache)
    theirs = [torch.cuda.Stream(device.ordinal) for _ in range(streams)]
    by_handle = {stream.cuda_stream: stream for stream in theirs}
    compiled = importlib.import_module("torch._C")
    give = getattr(compiled, "_cuda_cudaCachingAllocator_raw_delete", torch.cuda.caching_allocator_delete)
    take = getattr(compiled, "_cuda_cudaCachingAllocator_raw_alloc", None)
    if take is None:
        whole = torch.cuda.caching_allocator_alloc

        def take(nbytes: int, stream: int) -> int:
            return int(whole(nbytes, device.ordinal, stream))

    def free_on(address: int, own: int, other: int) -> None:
        by_handle[own].wait_event(by_handle[other].record_event())
        give(address)

    before = int(torch.cuda.memory_reserved(device.ordinal))

    def reserved() -> int:
        return int(torch.cuda.memory_reserved(device.ordinal)) - before

    return Subject([*by_handle], take, give, free_on, torch.cuda.OutOfMemoryError, reserved)


class Entry(NamedTuple):
    """An allocator that a trace can be replayed on."""

    title: str
    make: Callable[[Device, int, contextlib.ExitStack], Subject]
    """Makes it for a device and a number of streams; ``ImportError`` if not installed."""
    other: bool = False
    """True: it is of another library, and needs a GPU."""


ALLOCATORS: dict[str, Entry] = {
    "raw": Entry("raw calls on a pool, results checked", _raw),
    "pool": Entry("streamalloc MemoryPool", _pool),
    "cached": Entry("streamalloc CachingAllocator", lambda *all: _pool(*all, cached=True)),
    "cuda.core": Entry("cuda.core DeviceMemoryResource", _cuda_core, other=True),
    "cupy": Entry("CuPy MemoryPool", _cupy, other=True),
    "cupy-async": Entry("CuPy MemoryAsyncPool", lambda *all: _cupy(*all, driver_pool=True), other=True),
    "rmm": Entry("RMM PoolMemoryResource", lambda *all: _rmm(*all, pool=True), other=True),
    "rmm-async": Entry("RMM CudaAsyncMemoryResource", _rmm, other=True),
    "pytorch": Entry("PyTorch caching allocator", _torch, other=True),
}
"""Allocators by name, for :func:`~streamalloc.traces.replay`."""
