"""Replays of a trace on an allocator, with measurements of time and memory, and the allocators to replay on.

One thread makes all calls in recorded order, without pauses, and queues no other work, so that only the allocator's
time is measured. If memory is freed on another stream than its allocation's stream, the freeing stream first waits for
the allocation's stream. Some allocators can free only on the allocation's stream. That stream then waits for the
freeing stream instead.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from streamalloc.core.errors import OutOfMemoryError
from streamalloc.core.internal import Allocator, Buffer, Device, Stream, as_stream
from streamalloc.core.session import session_of
from streamalloc.driver import Traced, traced
from streamalloc.driver.internal import cuda
from streamalloc.pool import MemoryPool
from streamalloc.pool.internal import CachingAllocator
from streamalloc.traces.trace import Trace
from streamalloc.vmm import ExpandableCache

_KEEP_ALL = 2**64 - 1
_RMM_BEGINS = 32 << 20
"""Initial size of RMM's pool in bytes. RMM's default would be half of the device's memory."""


@dataclass
class Subject:
    """Allocator as plain functions, because calls of functions add the least time to a replay."""

    streams: Sequence[Any]
    """Stream objects of the allocator's library, one for each stream of the trace."""
    allocate: Callable[[int, Any], Any]
    """Function (bytes, stream) that allocates memory on a stream and returns the allocation."""
    free: Callable[[Any], object]
    """Function (allocation) that frees on the allocation's stream. The caller passes its last reference."""
    free_on: Callable[[Any, Any, Any], object]
    """Function (allocation, its stream, other stream) that frees an allocation on another stream."""
    out_of_memory: type[Exception] | tuple[type[Exception], ...] = MemoryError
    """The exception that the library raises if there is not enough memory."""
    reserved: Callable[[], int] | None = None
    """Function that returns the bytes reserved from the driver; None if the library does not report them."""
    calls: Callable[[], int] | None = None
    """Function that returns the number of driver calls so far; None if calls are not counted."""
    begin: Callable[[], object] = lambda: None
    """Function that is called before each replay."""


def of_allocator(allocator: Allocator, device: Device, streams: int, resources: contextlib.ExitStack) -> Subject:
    """Return an allocator of streamalloc as a ``Subject``: a pool, or an object with the same ``allocate``.

    ``streams``: number of streams to create. ``resources`` closes the streams at its end.
    """
    driver = device.driver
    ours = [resources.enter_context(device.create_stream()) for _ in range(streams)]
    order = _ordering(device, ours, resources)

    def free_on(buffer: Buffer, own: Stream, other: Stream) -> None:
        order(own, other)
        buffer.free(other)

    calls = (lambda: len(driver.calls)) if isinstance(driver, Traced) else None
    # A lambda, because operator.methodcaller would add 0.1 us to each measured free.
    free: Callable[[Buffer], object] = lambda buffer: buffer.free()  # noqa: E731
    return Subject(ours, allocator.allocate, free, free_on, OutOfMemoryError, _reserved_by(allocator), calls)


def _ordering(device: Device, streams: Sequence[Any], resources: contextlib.ExitStack) -> Callable[[Any, Any], object]:
    """Return a function (first stream, second stream) that makes the second stream wait for the first, by two raw
    driver calls.
    """
    driver = cast(Any, device.driver)
    record, wait = driver.cuEventRecord, driver.cuStreamWaitEvent
    event = cuda.CUevent(resources.enter_context(device.create_event()).handle)
    handles = {id(stream): as_stream(stream, session_of(device)).checked_raw() for stream in streams}

    def order(first: Any, then: Any) -> None:
        (error,) = record(event, handles[id(first)])
        if not error:
            (error,) = wait(handles[id(then)], event, 0)
        if error:
            raise RuntimeError(error)

    return order


def _reserved_by(allocator: Any) -> Callable[[], int] | None:
    """Return a function that returns the bytes that an allocator has reserved; None if the allocator has no pool."""
    if isinstance(allocator, ExpandableCache):
        return lambda: allocator.statistics().reserved
    pool = getattr(allocator, "pool", allocator)
    if not isinstance(pool, MemoryPool):
        return None
    attributes = pool.attributes
    return lambda: attributes.reserved_mem_current


# --- streamalloc and the driver -------------------------------------------------------------------------------------


def _pool(
    device: Device, streams: int, resources: contextlib.ExitStack, *, cache: type[CachingAllocator] | None = None
) -> Subject:
    allocator: Any = resources.enter_context(MemoryPool(device, release_threshold=_KEEP_ALL))
    if cache is not None:
        allocator = resources.enter_context(cache(allocator))
    return of_allocator(allocator, device, streams, resources)


def _raw(device: Device, streams: int, resources: contextlib.ExitStack) -> Subject:
    """Return a ``Subject`` that calls ``cuMemAllocFromPoolAsync`` and ``cuMemFreeAsync`` directly, and checks the
    results.
    """
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

    handles = [stream.checked_raw() for stream in found.streams]
    order = _ordering(device, handles, resources)

    def free_on(thing: tuple[Any, Any], own: Any, other: Any) -> None:
        order(own, other)
        free((thing[0], other))

    return Subject(handles, allocate, free, free_on, MemoryError, found.reserved, found.calls)


# --- other libraries ------------------------------------------------------------------------------------------------


def _cuda_core(device: Device, streams: int, resources: contextlib.ExitStack) -> Subject:
    core = importlib.import_module("cuda.core")
    theirs = core.Device(device.ordinal)
    theirs.set_current()
    # Without options, the resource would use the device's current pool, which other code may also use.
    resource = core.DeviceMemoryResource(theirs, core.DeviceMemoryResourceOptions())
    allocate = resource.allocate
    close = core.Buffer.close
    attributes = getattr(resource, "attributes", None)

    def take(nbytes: int, stream: Any) -> Any:
        try:
            return allocate(nbytes, stream=stream)
        except Exception as error:
            # A CUDAError has no attribute for the error code, so its text is searched.
            raise MemoryError(str(error)) if "OUT_OF_MEMORY" in str(error) else error  # noqa: B904

    def free_on(buffer: Any, own: Any, other: Any) -> None:
        other.wait(own)
        close(buffer, other)

    reserved = None if attributes is None else lambda: int(attributes.reserved_mem_current)
    return Subject([theirs.create_stream() for _ in range(streams)], take, close, free_on, MemoryError, reserved)


def _drop(thing: object) -> None:
    """Do nothing: the caller passes its last reference, and the allocation is freed when the reference ends."""


def _cupy(device: Device, streams: int, resources: contextlib.ExitStack) -> Subject:
    """Return a pool of CuPy as a ``Subject``. CuPy allocates on its current stream, and its frees take no stream."""
    cupy = importlib.import_module("cupy")
    resources.enter_context(cupy.cuda.Device(device.ordinal))
    theirs = [cupy.cuda.Stream(non_blocking=True) for _ in range(streams)]
    resources.enter_context(theirs[0] if theirs else cupy.cuda.Stream(non_blocking=True))
    pool = cupy.cuda.MemoryPool()
    malloc = pool.malloc
    used: Any = None

    def begin() -> None:
        # Code between two replays may have changed CuPy's current stream.
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


def _rmm(device: Device, streams: int, resources: contextlib.ExitStack) -> Subject:
    """Return a pool of RMM that gets its memory from ``cudaMalloc``, as a ``Subject``."""
    mr = importlib.import_module("rmm.mr")
    stream = importlib.import_module("rmm.pylibrmm.stream").Stream
    pool = mr.PoolMemoryResource(mr.CudaMemoryResource(), initial_pool_size=_RMM_BEGINS)
    take, give = pool.allocate, pool.deallocate

    def allocate(nbytes: int, stream: Any) -> tuple[int, int, Any]:
        return take(nbytes, stream), nbytes, stream

    theirs = [stream() for _ in range(streams)]
    order = _ordering(device, theirs, resources)  # RMM has no event class.

    def free_on(thing: tuple[int, int, Any], own: Any, other: Any) -> None:
        order(own, other)
        give(thing[0], thing[1], other)

    return Subject(theirs, allocate, lambda thing: give(*thing), free_on, MemoryError, pool.pool_size)


def _torch(device: Device, streams: int, resources: contextlib.ExitStack) -> Subject:
    """Return PyTorch's caching allocator as a ``Subject``: the two C functions behind ``caching_allocator_alloc`` and
    ``caching_allocator_delete``.
    """
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
    take, give = (getattr(compiled, f"_cuda_cudaCachingAllocator_raw_{one}") for one in ("alloc", "delete"))

    def free_on(address: int, own: int, other: int) -> None:
        by_handle[own].wait_event(by_handle[other].record_event())
        give(address)

    before = int(torch.cuda.memory_reserved(device.ordinal))

    def reserved() -> int:
        return int(torch.cuda.memory_reserved(device.ordinal)) - before

    return Subject([*by_handle], take, give, free_on, torch.cuda.OutOfMemoryError, reserved)


class Entry(NamedTuple):
    """Entry of :data:`ALLOCATORS`: an allocator on which a trace can be replayed."""

    title: str
    make: Callable[[Device, int, contextlib.ExitStack], Subject]
    """Function (device, number of streams, exit stack) that creates the allocator. Raises ``ImportError`` if the
    library is not installed, or if PyTorch has no CUDA.
    """
    other: bool = False
    """Whether the allocator belongs to another library, and so needs a GPU."""


ALLOCATORS: dict[str, Entry] = {
    "raw": Entry("raw calls on a pool, results checked", _raw),
    "pool": Entry("streamalloc MemoryPool", _pool),
    "cached": Entry("streamalloc CachingAllocator", lambda *all: _pool(*all, cache=CachingAllocator)),
    "expandable": Entry("streamalloc ExpandableCache", lambda *all: _pool(*all, cache=ExpandableCache)),
    "cuda.core": Entry("cuda.core DeviceMemoryResource", _cuda_core, other=True),
    "cupy": Entry("CuPy MemoryPool", _cupy, other=True),
    "rmm": Entry("RMM PoolMemoryResource", _rmm, other=True),
    "pytorch": Entry("PyTorch caching allocator", _torch, other=True),
}
"""Allocators on which :func:`~streamalloc.traces.replay` can replay a trace: :class:`Entry` by name. Those of other
libraries (``other``) need a GPU.
"""


# --- replays --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replayed:
    """Measurements of a replay: the result of :func:`replay`."""

    allocator: str
    """Title of the allocator, such as ``"RMM PoolMemoryResource"``."""
    events: int
    """Number of allocations and frees in the trace."""
    seconds: float
    """Seconds that one replay took: the median of all timed replays but the first."""
    first_seconds: float
    """Seconds that the first timed replay took, in which the allocator reserves its memory."""
    failures: int
    """Number of allocations that failed in the measured replay. Their frees are skipped."""
    peak_used: int
    """Most bytes allocated at once, as a sum of requested sizes."""
    peak_reserved: int | None
    """Most bytes reserved from the driver; None if unknown."""
    driver_calls: int | None
    """Number of driver calls of one replay; None if calls are not counted."""

    @property
    def microseconds_per_event(self) -> float:
        """Time of one replay divided by the number of events, in microseconds. An empty trace counts as one event."""
        return self.seconds * 1e6 / max(self.events, 1)

    @property
    def reserved_over_used(self) -> float | None:
        """Ratio of :attr:`peak_reserved` to :attr:`peak_used`; None if ``peak_reserved`` is unknown."""
        return None if self.peak_reserved is None else self.peak_reserved / max(self.peak_used, 1)


class Replay:
    """Trace that is prepared for an allocator, so that the timed loop does little except the allocator's calls: the
    value of a ``with`` block of :func:`prepare`.
    """

    def __init__(self, trace: Trace, subject: Subject) -> None:
        self._subject = subject
        self._failed = subject.out_of_memory
        streams = dict(zip(dict.fromkeys(event.stream for event in trace.events), subject.streams, strict=False))
        own: dict[int, int] = {}
        steps: list[tuple[int, int, Any]] = []
        for event in trace.events:
            if event.action == "allocate":
                own[event.id] = event.stream
                steps.append((event.nbytes, event.id, streams[event.stream]))
            else:
                # A size of -1 marks a free. The third item is the pair of the allocation's and the free's stream, or
                # None if both are equal and no wait is needed.
                both = streams[own[event.id]], streams[event.stream]
                steps.append((-1, event.id, None if own[event.id] == event.stream else both))
        # Numbers of allocations need not be consecutive. As indices of a list, they are faster to look up in the timed
        # loop.
        slots = {number: slot for slot, number in enumerate(own)}
        self._live: list[Any] = [None] * len(slots)
        self._steps = [(nbytes, slots[number], stream) for nbytes, number, stream in steps]
        self.failures: int = 0
        """Number of allocations that failed in the last run."""

    def run(self) -> float:
        """Replay the trace once, then free the memory that is left. Returns the seconds of the replay without these
        frees.
        """
        self.failures = 0
        self._subject.begin()
        collecting = gc.isenabled()
        gc.disable()
        try:
            return self._run(self._steps) / 1e9
        finally:
            if collecting:
                gc.enable()
            self._free_rest()

    def _run(self, steps: list[tuple[int, int, Any]]) -> int:
        subject, failed, live = self._subject, self._failed, self._live
        allocate, free, free_on = subject.allocate, subject.free, subject.free_on
        clock = time.perf_counter_ns
        start = clock()
        for nbytes, slot, stream in steps:
            if nbytes >= 0:
                try:
                    live[slot] = allocate(nbytes, stream)
                except failed:
                    self.failures += 1
            else:
                thing = live[slot]
                live[slot] = None
                if thing is None:
                    continue
                if stream is None:
                    free(thing)
                else:
                    free_on(thing, *stream)
                # The end of the last reference is a part of the measured free. In some libraries only this frees the
                # memory.
                thing = None
        return clock() - start

    def _free_rest(self) -> None:
        live, free = self._live, self._subject.free
        for slot, thing in enumerate(live):
            if thing is not None:
                live[slot] = None
                free(thing)

    def measure(self) -> dict[str, Any]:
        """Replay the trace once, and read the allocator's numbers after each call. Returns the fields ``failures``,
        ``peak_used``, ``peak_reserved`` and ``driver_calls`` of :class:`Replayed`, by name.
        """
        subject, live = self._subject, self._live
        self.failures = 0
        subject.begin()
        used = most_used = most_reserved = calls = 0
        sizes = [0] * len(live)
        for nbytes, slot, stream in self._steps:
            before = subject.calls() if subject.calls else 0
            allocates = nbytes >= 0
            if not allocates and live[slot] is None:
                continue
            self._run([(nbytes, slot, stream)])
            if subject.calls:
                calls += subject.calls() - before
            if not allocates:
                used -= sizes[slot]
            elif live[slot] is not None:
                sizes[slot] = nbytes
                used += nbytes
                most_used = max(most_used, used)
                if subject.reserved:
                    most_reserved = max(most_reserved, subject.reserved())
        self._free_rest()
        return {
            "failures": self.failures,
            "peak_used": most_used,
            "peak_reserved": most_reserved if subject.reserved else None,
            "driver_calls": calls if subject.calls else None,
        }


@contextlib.contextmanager
def prepare(trace: Trace, on: str | Allocator, device: Device) -> Iterator[Replay]:
    """Return a context manager whose block gets a :class:`Replay` of the trace. If ``on`` is a name, a new allocator is
    made, and closed at the end of the block; an allocator is used as it is.

    The context of ``device`` is current in the block. Raises ``KeyError`` for an unknown name, and ``ImportError`` if
    the library is not installed, or if PyTorch has no CUDA. :func:`replay` also measures.
    """
    make = ALLOCATORS[on].make if isinstance(on, str) else functools.partial(of_allocator, on)
    with contextlib.ExitStack() as resources:
        resources.enter_context(device.current())
        resources.callback(device.synchronize)
        subject = make(device, trace.streams, resources)
        # Called before the allocator's close: all frees must have completed on the device by then.
        resources.callback(device.synchronize)
        yield Replay(trace, subject)


def replay(trace: Trace, on: str | Allocator, device: Device | None = None, *, rounds: int = 3) -> Replayed:
    """Replay a trace on an allocator, and return the time and the memory that the replay took.

    One replay measures memory and driver calls, and further replays are timed. If ``on`` is a name, the measured replay
    and the timed replays each use a new allocator. A pool that you pass keeps the memory that it has reserved before.

    Parameters
    ----------
    trace
        The trace to replay.
    on
        A pool, a caching allocator, or a name in :data:`ALLOCATORS`.
    device
        Device of the memory and streams; default: device 0 of the default driver.
    rounds
        Number of timed replays after the first timed replay.

    Raises
    ------
    ImportError
        The other library is not installed, or PyTorch has no CUDA.
    KeyError
        No allocator has this name.
    TypeError, ValueError
        ``trace`` is not a :class:`Trace`, or ``rounds`` is less than 1.
    ClosedError
        The pool or caching allocator was closed.

    Examples
    --------
    >>> replay(training(), "cached").microseconds_per_event
    """
    if not isinstance(trace, Trace):
        raise TypeError(f"trace must be a Trace, not {type(trace).__name__} ({trace!r}); traces.load() reads one")
    if isinstance(on, str) and on not in ALLOCATORS:
        raise KeyError(f"no allocator has the name {on!r}: there are {', '.join(ALLOCATORS)}")
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: at least one")
    device = Device(0) if device is None else device
    title, counted = repr(on), device
    if isinstance(on, str):
        title = ALLOCATORS[on].title
        if not ALLOCATORS[on].other:
            # The allocators of streamalloc call the driver of their device, so a traced driver counts the calls.
            counted = Device(device.ordinal, driver=traced(device.driver))
    with prepare(trace, on, counted) as prepared:
        found = prepared.measure()
    with prepare(trace, on, device) as prepared:
        seconds = []
        for _ in range(rounds + 1):
            device.synchronize()
            seconds.append(prepared.run())
    return Replayed(title, len(trace.events), statistics.median(seconds[1:]), seconds[0], **found)
