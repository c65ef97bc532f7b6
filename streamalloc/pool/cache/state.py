"""The state of a cache: the blocks of each stream, and the allowance.

It outlives the allocator until all blocks have returned to the pool. A stream's blocks return when it ends.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from streamalloc.core.errors import CaptureError, ClosedError, CudaError, NotReadyError, OutOfMemoryError, error_from
from streamalloc.core.internal import (
    LEGACY,
    Deferred,
    Device,
    Event,
    Spares,
    Stream,
    Threads,
    Watcher,
    deferred_queue,
    end_of,
    end_with_stream,
    free_refused,
    give_lists,
    is_uncaptured,
    keeps_alive,
    leave_stream,
    may_be_captured,
    moment,
    of_this_thread,
    ordered_after,
    ordered_after_end,
    raw_handle,
    thread_of,
    watching_for_destruction,
    without_notifying,
)
from streamalloc.core.session import Session, drained, session_of
from streamalloc.driver.internal import RLock, cuda
from streamalloc.pool.attributes import PoolAttributes
from streamalloc.pool.cache.blocks import UNIT, Block, SizeClass, class_size
from streamalloc.pool.pool import POOL_STEP, MemoryPool

_LARGEST_FIT = 5
"""A request may take a free block of up to five times its size."""
_LARGEST_KEPT = 2
"""The fast path keeps taking from a larger class only below this multiple of the request's class. From the multiple on,
if the request's class has blocks of its own, each request first searches its own class. Otherwise half-precision
tensors would use up the blocks of full-precision ones.
"""
_MAX_SIZES = 1 << 14
"""Number of requested sizes whose free list a stream remembers, in 1 MiB of dictionary."""
MAX_RETURNING = 64
"""Blocks per stream that may wait for an event; enough for data loaders."""
_ALLOWANCE = 1.05
"""Initial factor of the streams' peaks. A pool without a cache reserves about as much."""
_ALLOWANCE_STEP = 1 / 32
"""Growth of the factor per stream and release: programs with many sizes settle."""
_MAX_ALLOWANCE = 2.0
"""Largest factor for one stream. Caches that split blocks reserve 1.2 to 2.5 times the peaks."""
_MAX_OF_SEVERAL = 2.5
"""Largest factor for several streams. They share free memory through the pool only, and in pieces."""
_QUERIES = 1 << 8
"""Event queries before a trim: enough for an idle stream. A busy stream is not waited for."""
_MAX_KEPT_ALIVE = 256
"""Number of CuPy and Numba streams kept alive because the cache has their memory."""


Returning: TypeAlias = "tuple[Event, Block, Spares | None, int, int]"
"""The event that a block freed on another stream waits for, and the block. For an event of :meth:`StreamCache.record`:
also the spare events of its stream, which stand for the stream, and the times before and after the record.
"""


class ListKeys(NamedTuple):
    """The keys of one cache in ``Stream.free_lists``."""

    lists: object
    """Free lists by size, for the fast path: a dictionary, or the :class:`StreamCache` if other code may capture the
    stream.
    """
    stream_cache: object
    """The :class:`StreamCache`, for the slow path."""


class StreamCache(Deferred):
    """The size classes of one stream. It ends when the stream is closed or dropped, or the cache is closed."""

    __slots__ = (
        "_last", "_passed", "asks", "cache", "class_of", "classes", "device", "ended", "kept_alive", "lists",
        "peak", "returning", "session", "stream", "thread", "threads",
    )  # fmt: skip

    def __init__(self, cache: CacheState, stream: Stream) -> None:
        self.cache: CacheState = cache
        self.session: Session = session_of(stream)
        self.device: Device = stream.device
        self.stream: weakref.ref[Stream] = weakref.ref(stream)
        thread, threads = thread_of(stream)
        self.thread: int = thread
        self.threads: Threads | None = threads
        self._last = end_of(stream)
        self.kept_alive: Stream | None = keeps_alive(stream)
        """Keeps alive a library's object whose finaliser destroys the stream."""
        self.ended: bool = False
        self.asks: bool = False
        """Whether other code may capture the stream: each allocation and free first asks the driver."""
        self.classes: dict[int, SizeClass] = {}
        """Size classes by block size in bytes."""
        self.class_of: dict[int, SizeClass] = {}
        """Size classes by requested size, in units of 512 bytes."""
        self.lists: dict[int, list[Block]] = {}
        """Free lists for the fast path, by requested size in units."""
        self.returning: deque[Returning] = deque()
        """Blocks freed on other streams."""
        self._passed: list[Event] = []
        """Completed events, to be recorded again."""
        self.peak: int = 0
        """Most bytes in use, as of the last count."""
        end_with_stream(stream, self)

    def ask(self) -> None:
        """From now on ask whether other code captures the stream before memory is handed out or taken back."""
        if not self.asks:
            self.asks = True
            for size_class in list(self.classes.values()):
                size_class.home = size_class
            for block in list(self.cache.blocks.values()):
                if block.size_class.owner is self and block.home is not None:
                    block.home = block.size_class

    def here(self) -> bool:
        """Whether the stream is that of the calling thread, or of all threads."""
        return self.threads is None or self.threads.number == self.thread

    def uncaptured(self) -> bool:
        """Whether memory may be handed out or taken back now on a stream that other code may capture."""
        stream = self.stream()
        return stream is not None and self.here() and is_uncaptured(stream)

    def __getitem__(self, size: int) -> list[Block]:
        """The free list that serves a requested size, in units; LookupError if the slow path must find a block."""
        free = self.lists[size]
        if not free or not self.uncaptured():
            raise LookupError
        return free

    def size_class(self, nbytes: int) -> SizeClass:
        """The size class for a request."""
        size = class_size(nbytes)
        found = self.classes.get(size)
        if found is None:
            found = self.classes.setdefault(size, SizeClass(self, size))
            for other in list(self.classes.values()):
                other.fitting = ()
            if not self.asks:
                found.home = found.free
        if len(self.class_of) >= _MAX_SIZES:
            self.class_of.clear()
        self.class_of[(nbytes - 1) // UNIT] = found
        return found

    def take(self, wanted: SizeClass, nbytes: int) -> Block | None:
        """Remove the smallest free block that fits. The fast path then takes from that free list until it is empty."""
        if self.returning:
            self.collect()
        block, served_from = None, wanted.free
        for free in wanted.fitting or self._find_fitting(wanted):
            if free:
                try:
                    block = free.pop()
                except IndexError:  # another thread took it
                    continue
                served_from = free
                break
        if not self.ended:
            if len(self.lists) >= _MAX_SIZES:
                self.lists.clear()
            if wanted.count and block is not None and block.size_class.nbytes >= _LARGEST_KEPT * wanted.nbytes:
                served_from = wanted.free
            self.lists[(nbytes - 1) // UNIT] = served_from
        return block

    def _find_fitting(self, wanted: SizeClass) -> tuple[list[Block], ...]:
        sizes = sorted(self.classes)
        some = sizes[bisect_left(sizes, wanted.nbytes) : bisect_left(sizes, _LARGEST_FIT * wanted.nbytes + 1)]
        # The end of the stream on another thread removes the classes.
        found = map(self.classes.get, some)
        wanted.fitting = tuple(one.free for one in found if one is not None)
        return wanted.fitting

    def collect(self) -> None:
        """Move blocks freed on other streams to their free lists, up to the first whose event has not completed.

        A completed event proves that all earlier events of its stream have completed, for any cache. So the newest
        event is queried first.
        """
        returning, newest = self.returning, self._ask_newest()
        last: Event | None = None
        while returning:
            try:
                entry = returning.popleft()
            except IndexError:  # another thread took it
                return
            event, block, source, began, recorded = entry
            if source is None or (recorded >= source.passed and entry is not newest):
                completed = False
                try:
                    completed = (source is None and event is last) or event.query()
                finally:
                    if not completed:
                        returning.appendleft(entry)
                if not completed:
                    return
                if source is not None:
                    source.passed = max(source.passed, began)
            last = event
            # An event that `record` did not make may belong to several blocks.
            if source is not None and event.device is self.device and not self.ended:
                self._passed.append(event)
            self.put(block)

    def _ask_newest(self) -> Returning | None:
        """Query the newest event; returns its entry if it has completed and is of the same stream as the oldest."""
        if len(self.returning) < 2:
            return None
        try:
            oldest, newest = self.returning[0], self.returning[-1]
        except IndexError:  # another thread took them
            return None
        event, _, source, began, _ = newest
        if source is None or source is not oldest[2] or not event.query():
            return None
        source.passed = max(source.passed, began)
        return newest

    def record(self, stream: Stream) -> Event:
        """Record an event after the queued work of one of our streams, for one block."""
        try:
            again = self._passed.pop() if stream.device is self.device else None
        except IndexError:
            again = None
        return stream.record(again)

    def put_behind(self, event: Event, block: Block, source: Spares | None = None, began: int = 0) -> None:
        """Put a block into the free list of its size class once an event has completed.

        For an event of :meth:`record`, ``source`` is the stream's spare events and ``began`` a time before the record.
        """
        self.returning.append((event, block, source, began, moment()))
        if self.ended:
            deferred_queue(self.session).submit(self)

    def put(self, block: Block) -> None:
        """Put a block into the free list of its size class. If this cache has ended, a point of work releases the
        block.
        """
        owner = block.size_class
        if not self.cache.closed:
            block.home = owner.home
        owner.free.append(block)
        if self.ended:
            deferred_queue(self.session).submit(self)

    def release(self, ordered: Stream) -> None:
        """Return all free blocks to the pool in the order of ``ordered`` (``cuMemFreeAsync``).

        The device waits for the events of blocks freed on other streams; the host does not.
        """
        for entry in drained(self.returning.popleft):
            event, block = entry[:2]
            try:
                if not event.query():
                    ordered.wait(event)
            except BaseException:
                self.returning.appendleft(entry)
                raise
            block.size_class.free.append(block)
        raw = raw_handle(ordered)
        context = ordered.device.current() if ordered.is_default else contextlib.nullcontext()
        with context:
            for size_class in list(self.classes.values()):
                for block in drained(size_class.free.pop):
                    refused = self.cache.free_block(block, raw)
                    if refused:
                        size_class.free.append(block)
                        raise free_refused(refused, ordered)

    def after_all_threads(self) -> Event:
        """Record an event after the work of the per-thread default streams of all threads, ended ones included.

        Raises
        ------
        CaptureError
            A blocking stream is being captured.
        """

        def record(ordered: Stream) -> Event:
            for last in self._last:
                if not last.closed:
                    ordered.wait(last)
            return ordered.record()

        with self.session.relaxed():
            return ordered_after(self.device.per_thread_stream, record)

    @property
    def free_bytes(self) -> int:
        """Bytes in free lists and returning."""
        free = sum(one.nbytes * len(one.free) for one in list(self.classes.values()))
        return free + sum(block.size_class.nbytes for _, block, *_ in tuple(self.returning))

    def attempt(self) -> bool:
        if not self.ended:
            self.ended = True
            # The free lists are not used any more. Another cache may have lists on the stream, so that blocks would
            # still be appended to them.
            for block in list(self.cache.blocks.values()):
                if block.size_class.owner is self:
                    block.home = None
        self.lists.clear()
        self._passed.clear()
        self.cache.collect_dropped()
        stream = self.stream()
        if self.free_bytes:
            with contextlib.suppress(CaptureError, NotReadyError):
                self.ordered(self.release)
            if self.free_bytes and stream is not None:
                return False
        if stream is None and self.threads is not None:
            stream = self.device.per_thread_stream  # it has the lists of all threads, and outlives the threads
        if stream is not None:
            leave_stream(stream, self.cache.keys, self)
        if self.finished:
            self._last = []
            self.kept_alive = None
            # These cycles would keep the cache and its pool until a garbage collection.
            self.classes.clear()
            self.class_of.clear()
        return not self.free_bytes

    @property
    def finished(self) -> bool:
        """Whether this cache has ended and has no block, free or in a buffer."""
        return self.ended and self.empty

    @property
    def empty(self) -> bool:
        """Whether it has no block, free or in a buffer."""
        return not any(one.count for one in list(self.classes.values()))

    def ordered(self, act: Callable[[Stream], object]) -> None:
        """Call ``act`` with the stream, or after its end with a stream ordered after its work. Prevents a concurrent
        close.
        """
        stream = self.stream()
        if stream is None:
            ordered_after_end(self.device, self._last, act)
        else:
            with watching_for_destruction(stream):
                ordered_after(stream, act)


class CacheState(Deferred):
    """The blocks and streams of a cache. It outlives the allocator until all blocks have returned to the pool."""

    __slots__ = (
        "_opening", "_pool", "_pool_free", "_queue", "_releases", "_reserved", "_room", "blocks", "closed", "dropped",
        "keys", "misses", "session", "stream_caches", "watchers",
    )  # fmt: skip

    def __init__(self, pool: MemoryPool) -> None:
        # The queue keeps this item. A strong reference to the pool would keep its `on_oom` function, and through that
        # the cache.
        self._pool = weakref.ref(pool)
        self._pool_free: Any = pool._free
        self.session: Session = session_of(pool)
        self._queue = deferred_queue(self.session)
        self.keys: ListKeys = ListKeys(object(), object())
        self.watchers: tuple[Watcher, ...] = ()
        """Watchers of allocations and frees, see :mod:`streamalloc.core.allocation_hooks`."""
        self.blocks: dict[int, Block] = {}
        """Blocks by address, free or in buffers."""
        self.stream_caches: dict[tuple[int, int, int], StreamCache] = {}
        """The latest per device, stream handle and thread; ended ones are removed."""
        self.dropped: deque[Block] = deque()
        """Blocks of dropped buffers that only the slow path may free."""
        self.closed: bool = False
        self.misses: int = 0
        self._opening = RLock()
        """Held while a stream is opened. No finaliser takes it."""
        self._reserved = 0
        """Bytes that the pool would reserve, computed at the last query."""
        self._room = POOL_STEP
        """Bytes to allocate before the next query of the pool."""
        self._releases = 0

    def attempt(self) -> bool:
        self.closed = True
        for block in list(self.blocks.values()):
            block.home = None
        self.collect_dropped()
        for one in list(self.stream_caches.values()):
            # Attempt ended ones again: buffers may have been dropped since.
            self._queue.end(one)
        if self.blocks:
            return False
        self.stream_caches.clear()
        return True

    # -- streams ---------------------------------------------------------------------------------------------

    def known(self, stream: Stream) -> StreamCache | None:
        """The stream cache of a stream if there is one that has not ended."""
        mine = of_this_thread(stream, make=False)
        found = None if mine is None else self.stream_caches.get(_key(mine))
        if found is None or found.ended:
            return None
        owner = found.stream()
        return found if owner is not None and not owner.closed else None

    def open(self, stream: Stream) -> StreamCache:
        """Return the stream cache of a stream, and make its free lists usable by the fast path."""
        self.session.check_process()
        stream = of_this_thread(stream)
        found = self.known(stream)
        if found is None:
            with self._opening:
                found = self.known(stream) or self._begin(stream)
            self._limit_kept_alive()
        if may_be_captured(stream):
            found.ask()
            give_lists(stream, self.keys.lists, found, ask=True)
        else:
            give_lists(stream, self.keys.lists, found.lists, ask=False)
            give_lists(stream, self.keys.stream_cache, found, ask=False)
        return found

    def _begin(self, stream: Stream) -> StreamCache:
        before = self.stream_caches.get(_key(stream))
        if before is not None:
            self._queue.submit(before)
        for key, one in list(self.stream_caches.items()):
            if one.finished:
                del self.stream_caches[key]
            elif one.ended and one.free_bytes:  # a buffer was freed since
                self._queue.submit(one)
        found = self.stream_caches[_key(stream)] = StreamCache(self, stream)
        return found

    def _limit_kept_alive(self) -> None:
        """End the oldest stream cache that keeps a library's stream alive, if there are too many."""
        kept_alive = [one for one in self.live() if one.kept_alive is not None]
        if len(kept_alive) > _MAX_KEPT_ALIVE:
            self._queue.end(kept_alive[0])

    def live(self) -> list[StreamCache]:
        """The stream caches that have not ended."""
        return [one for one in list(self.stream_caches.values()) if not one.ended]

    # -- blocks ----------------------------------------------------------------------------------------------

    def buy(self, upstream: MemoryPool, wanted: SizeClass, stream: Stream) -> Block | None:
        """Allocate a new block (``cuMemAllocFromPoolAsync``); None if there is no memory."""
        raw = raw_handle(stream)
        self._pool_free = upstream._free
        try:
            with stream.device.current() if stream.is_default else contextlib.nullcontext():
                result, pointer = without_notifying(upstream._alloc, self.watchers)(wanted.nbytes, upstream._raw, raw)
        except OutOfMemoryError:  # the limit of a watcher of the pool
            return None
        if result:
            if result == cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                return None
            raise error_from(result, "cuMemAllocFromPoolAsync")
        address = int(pointer)
        block = Block(address)
        block.address = address
        block.size_class = wanted
        block.home = wanted.home
        self.blocks[address] = block
        wanted.count += 1
        self.misses += 1
        return block

    def free_past(self, block: Block, raw: Any) -> tuple[Any]:
        """Free a block without caching it; returns a tuple with a ``CUresult``, as ``cuMemFreeAsync`` does."""
        return (self.free_block(block, raw, notified=()) or cuda.CUresult.CUDA_SUCCESS,)

    def free_block(self, block: Block, raw: Any, notified: tuple[Watcher, ...] | None = None) -> Any:
        """Return a block to the pool (``cuMemFreeAsync``). Returns None, or the ``CUresult`` if the driver refuses.

        ``notified``: watchers that have already recorded the free. Default: all of the cache, as for a block in a free
        list.
        """
        address = block.address
        # Before the call: another thread may get the address at once.
        self.blocks.pop(address, None)
        pool = self._pool()
        free = self._pool_free if pool is None else pool._free
        free = without_notifying(free, self.watchers if notified is None else notified)
        refused = free(block, raw)[0]
        if refused:
            self.blocks[address] = block
            return refused
        block.size_class.count -= 1
        return None

    def collect_dropped(self) -> None:
        """Move blocks of dropped buffers to their free lists. A per-thread stream's blocks first wait for an event
        after all threads' work.
        """
        for block in drained(self.dropped.popleft):
            cache: StreamCache = block.size_class.owner
            event = None
            if cache.threads is not None:
                try:
                    event = cache.after_all_threads()
                except CudaError:  # another time
                    self.dropped.append(block)
                    return
            for watcher in self.watchers:
                watcher.freed(block.address, None)
            cache.put(block) if event is None else cache.put_behind(event, block)

    @property
    def cached(self) -> int:
        """Bytes in free lists and returning."""
        return sum(one.free_bytes for one in self.live())

    # -- the allowance ---------------------------------------------------------------------------------------

    def keep_allowance(self, pool: MemoryPool, wanted: SizeClass) -> None:
        """Release all free blocks if an allocation of this size would grow the pool beyond its allowance.

        The pool is queried (``cuMemPoolGetAttribute``) only after the cache has allocated as many bytes as were free at
        the last query, 32 MiB at most. During a capture of this package nothing is released. A capture by other code
        stays valid, because the thread is in relaxed capture mode (``cuThreadExchangeStreamCaptureMode``).
        """
        self._room -= wanted.nbytes
        if self._room >= 0 or self._queue.paused:
            return
        with self.session.relaxed():
            attributes = pool.attributes
            reserved, needed, grown = _growth(attributes, wanted)
            if grown > self._reserved and grown > (allowance := self._allowance(wanted)):
                self._releases += 1
                self.flush()
                if reserved > allowance:
                    pool._call("cuMemPoolTrimTo", allowance)
                _, needed, grown = _growth(attributes, wanted)
            self._reserved, self._room = grown, min(grown - needed, POOL_STEP)

    def _allowance(self, wanted: SizeClass) -> int:
        """Bytes that the pool may reserve: the sum of the streams' peaks times the factor, in whole growth steps.

        A block of size ``wanted`` counts as in use.
        """
        peaks, streams = 0, self.live()
        for one in streams:
            in_use = sum(size.nbytes * (size.count - len(size.free)) for size in list(one.classes.values()))
            one.peak = max(one.peak, in_use + wanted.nbytes if one is wanted.owner else in_use)
            peaks += one.peak
        most = _MAX_ALLOWANCE if len(streams) == 1 else _MAX_OF_SEVERAL
        factor = min(_ALLOWANCE + self._releases * len(streams) * _ALLOWANCE_STEP, most)
        return -(-int(peaks * factor) // POOL_STEP) * POOL_STEP

    def forget_peaks(self) -> None:
        """Begin anew with the allowance."""
        self._releases = self._reserved = 0
        for one in self.live():
            one.peak = 0

    def flush(self) -> bool:
        """Return all free blocks to the pool. Returns whether any were released; during a capture none are.

        The host does not wait for pending work. It synchronises only with frees that have already run: then the driver
        may reuse their memory on any stream.
        """
        if self._queue.paused:
            return False
        frees: list[Event] = []

        def release(one: StreamCache, ordered: Stream) -> None:
            one.release(ordered)
            event = ordered.record()
            # Other code may have begun a capture of the stream.
            if not ordered.capturing:
                frees.append(event)

        with self.session.relaxed():
            for one in self.live():
                if one.free_bytes:
                    # A captured stream keeps its blocks. So does a stream that its library has closed, until the device
                    # is idle.
                    with contextlib.suppress(CaptureError, ClosedError, NotReadyError):
                        one.ordered(functools.partial(release, one))
            for event in frees:
                with event:
                    if any(event.query() for _ in range(_QUERIES)):
                        event.synchronize()
        return bool(frees)


def _key(stream: Stream) -> tuple[int, int, int]:
    """Device, handle and thread of a stream. The legacy stream has two handles."""
    return stream.device.ordinal, int(raw_handle(stream)) or LEGACY, thread_of(stream)[0]


def _growth(attributes: PoolAttributes, wanted: SizeClass) -> tuple[int, int, int]:
    """Bytes that a pool reserves, that it needs with one more block, and that it will reserve for them."""
    reserved, needed = attributes.reserved_mem_current, attributes.used_mem_current + wanted.nbytes
    return reserved, needed, max(reserved, -(-needed // POOL_STEP) * POOL_STEP)
