"""The state of a cache: the blocks of each stream, and the allowance.

**When memory may be handed out.** Memory of a free list is handed out without a driver call, so no driver would notice
a mistake: two owners would write the same bytes. Memory is handed out:

* on its stream alone, where the next work comes after the last owner's. A block that was freed on another stream is in
  no free list until an event on that stream has completed (``returning``).
* by the stream's thread alone, if it is a per-thread stream: on another thread its handle names another stream. Blocks
  that were dropped elsewhere first wait for the legacy stream (:meth:`CacheState.collect_dropped`).
* not in a capture. The graph would write the memory at each launch, also when it has another owner.
* not after the stream has ended, because nothing can be ordered after its work then. All its blocks return to the pool:
  before its end, or after its last event.
* not while watchers, such as an observer, have to see each allocation.

A block is taken from a list and put into one by a single atomic step, so no lock is held, and a finaliser can put one.
The state outlives the allocator until all blocks have returned to the pool.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from streamalloc.core.errors import (
    CaptureError,
    ClosedError,
    CudaError,
    NotReadyError,
    OutOfMemoryError,
    error_from,
    is_gone,
)
from streamalloc.core.internal import (
    Deferred,
    DeferredQueue,
    Device,
    Event,
    OwnStream,
    PerThreadStream,
    Stream,
    Watcher,
    deferred_queue,
    end_of,
    end_with_stream,
    free_function,
    free_refused,
    in_context,
    leave_stream,
    ordered_after,
    ordered_after_end,
    raw_handle,
    without_notifying,
)
from streamalloc.core.session import Session, drained, session_of
from streamalloc.driver.internal import RLock, cuda
from streamalloc.pool.attributes import PoolAttributes
from streamalloc.pool.cache.blocks import UNIT, CachedBlock, SizeClass, class_size
from streamalloc.pool.pool import POOL_STEP, MemoryPool

_LARGEST_FIT = 5
"""A request may take a free block of up to five times its size."""
_LARGEST_KEPT = 2
"""Limit for the size of a larger class's blocks, as a multiple of the request's class.

Below it, the larger class's free list serves the next requests of the same size, too. From it on, the next request
first searches its own class, if that has blocks, free or in use. Otherwise half-precision tensors would use up the
blocks of full-precision ones, which are twice as large.
"""
_MAX_SIZES = 1 << 14
"""Number of requested sizes whose free list a stream remembers, in 1 MiB of dictionary."""
MAX_RETURNING = 64
"""Blocks per stream that may wait for an event; enough for data loaders."""
_ALLOWANCE = 1.05
"""Initial factor of the streams' peaks. A pool without a cache reserves about as much."""
_ALLOWANCE_STEP = 1 / 32
"""Growth of the factor at each release, for each stream. So even a program with many sizes comes to need no release."""
_MAX_ALLOWANCE = 2.0
"""Largest factor for one stream. Caches that split blocks reserve 1.2 to 2.5 times the peaks."""
_MAX_OF_SEVERAL = 2.5
"""Largest factor for several streams. They share free memory through the pool only, and in pieces."""
_QUERIES = 1 << 8
"""Largest number of queries of the event behind the frees of a stream's free blocks: enough for an idle stream to reach
the event. If a stream did not reach it in time, the next event is queried only once, because nobody waits for a busy
stream.
"""


class StreamCache(Deferred):
    """The size classes of one stream.

    It ends when the stream is closed or dropped, when the stream's thread ends or its library's object leaves the table
    of library streams, or when the cache is closed.
    """

    def __init__(self, cache: CacheState, stream: Stream) -> None:
        self.cache: CacheState = cache
        self.device: Device = stream.device
        self.stream: weakref.ref[Stream] = weakref.ref(stream)
        # Our own stream ends when it is dropped. Other streams are needed to order the return of the blocks.
        self._kept = None if isinstance(stream, OwnStream) else stream
        self._last: Sequence[Event] = end_of(stream)
        self.per_thread: bool = isinstance(stream, PerThreadStream)
        """Whether the stream is the per-thread default stream of a thread. On other threads its handle names another
        stream.
        """
        self.ended: bool = False
        self.classes: dict[int, SizeClass] = {}
        """Size classes by block size in bytes."""
        self.lists: dict[int, list[CachedBlock]] = {}
        """Free lists that serve direct calls, by requested size in units: the stream's ``free_lists`` of this cache."""
        self.returning: deque[tuple[Event, CachedBlock]] = deque()
        """Blocks freed on other streams, each behind the event after its last use."""
        self.peak: int = 0
        """Most bytes in use at any count, which :meth:`CacheState._allowance` makes."""
        end_with_stream(stream, self)

    def size_class(self, nbytes: int) -> SizeClass:
        """Return the size class for a request of ``nbytes`` bytes, and make it if there is none."""
        size = class_size(nbytes, self.cache.finer)
        found = self.classes.get(size)
        if found is None:
            found = self.classes.setdefault(size, SizeClass(self, size))
            for other in list(self.classes.values()):
                other.fitting = ()
        return found

    def take(self, wanted: SizeClass, nbytes: int) -> CachedBlock | None:
        """Remove and return the smallest free block that fits ``wanted``; None if there is none. The free list that had
        it then serves direct requests of ``nbytes`` bytes.
        """
        if self.returning:
            self.collect()
        block, served_from = None, wanted.free
        for free in wanted.fitting or self._find_fitting(wanted):
            if free:
                try:
                    block = free.pop()
                except IndexError:  # Another thread has taken it.
                    continue
                served_from = free
                break
        if wanted.count and block is not None and block.size_class.nbytes >= _LARGEST_KEPT * wanted.nbytes:
            served_from = wanted.free
        self.serve(nbytes, served_from)
        return block

    def serve(self, nbytes: int, free: list[CachedBlock]) -> None:
        """Have direct requests of ``nbytes`` bytes take blocks from the list ``free``. Nothing is done once the stream
        cache has ended.
        """
        if not self.ended:
            if len(self.lists) >= _MAX_SIZES:
                self.lists.clear()
            self.lists[(nbytes - 1) // UNIT] = free

    def _find_fitting(self, wanted: SizeClass) -> tuple[list[CachedBlock], ...]:
        sizes = sorted(self.classes)
        some = sizes[bisect_left(sizes, wanted.nbytes) : bisect_left(sizes, _LARGEST_FIT * wanted.nbytes + 1)]
        # The end of the stream on another thread removes the classes.
        found = map(self.classes.get, some)
        wanted.fitting = tuple(one.free for one in found if one is not None)
        return wanted.fitting

    def collect(self) -> None:
        """Move blocks that were freed on other streams to their free lists, up to the first whose event has not
        completed (``cuEventQuery``).
        """
        for entry in drained(self.returning.popleft):
            event, block = entry
            done = False
            try:
                done = event.query()
            finally:
                if not done:
                    self.returning.appendleft(entry)
            if not done:
                return
            self.put(block)

    def put_behind(self, event: Event, block: CachedBlock) -> None:
        """Have ``block`` put into the free list of its size class once ``event`` has completed. If this stream cache
        has ended, a point of work releases the block.
        """
        self.returning.append((event, block))
        if self.ended:
            self.cache.queue.submit(self)

    def put(self, block: CachedBlock) -> None:
        """Put a block into the free list of its size class. If this stream cache has ended, a point of work releases
        the block.
        """
        size_class = block.size_class
        if not (self.cache.closed or self.ended):
            block.home = size_class.free
        size_class.free.append(block)
        if self.ended:
            self.cache.queue.submit(self)

    def release(self, ordered: Stream) -> None:
        """Return all free blocks to the pool in the order of ``ordered`` (``cuMemFreeAsync``).

        The device waits for the events of blocks freed on other streams; the host does not.
        """
        self.collect_behind(ordered)
        in_context(ordered, self._free_blocks, ordered, raw_handle(ordered))

    def collect_behind(self, ordered: Stream) -> None:
        """Move all blocks that were freed on other streams to free lists, and have ``ordered`` wait for their events
        (``cuStreamWaitEvent``). The blocks may then be used in the order of that stream.
        """
        for entry in drained(self.returning.popleft):
            event, block = entry
            try:
                if not event.query():
                    ordered.wait(event)
            except BaseException:
                self.returning.appendleft(entry)
                raise
            block.size_class.free.append(block)

    def _free_blocks(self, ordered: Stream, raw: Any) -> None:
        for size_class in [one for one in list(self.classes.values()) if one.free]:
            for block in drained(size_class.free.pop):
                self.cache.free_block(block, ordered, raw)

    @property
    def free_bytes(self) -> int:
        """Bytes of blocks in free lists, and of blocks that wait for an event."""
        free = sum([one.nbytes * len(one.free) for one in list(self.classes.values()) if one.free])
        return free + sum(block.size_class.nbytes for _, block in tuple(self.returning))

    def serve_no_more(self) -> None:
        """End the stream cache: no new buffer gets a block of its free lists, and blocks of live buffers come back by
        :meth:`put`.
        """
        if not self.ended:
            self.ended = True
            # Without a home, the block of a buffer comes back by :meth:`put` when the buffer is freed, and :meth:`put`
            # submits this item again. Otherwise nobody would release the block.
            for block in list(self.cache.blocks.values()):
                if block.size_class.owner is self:
                    block.home = None
        self.lists.clear()

    def attempt(self) -> bool:
        self.serve_no_more()
        self.cache.collect_dropped()
        if self.free_bytes:
            with contextlib.suppress(CaptureError, NotReadyError):
                self.ordered(self.release)
        if self.free_bytes:
            return False
        stream = self.stream()
        if stream is not None:
            leave_stream(stream, self.cache.key, self)
        if self.finished:
            self._last, self._kept = (), None
            # Each size class refers to this object. That cycle would keep the cache and its pool until a garbage
            # collection.
            self.classes.clear()
        return True

    @property
    def finished(self) -> bool:
        """Whether this cache has ended and has no block, free or in a buffer."""
        return self.ended and not any(one.count for one in list(self.classes.values()))

    def ordered(self, act: Callable[[Stream], object]) -> None:
        """Call ``act`` with the stream or, after the stream's end, with a new stream that is ordered after its work. No
        other thread can close the stream meanwhile. Raises CaptureError, NotReadyError.
        """
        stream = self.stream()
        if stream is None:
            ordered_after_end(self.device, self._last, act)
        else:
            ordered_after(stream, act)


class CacheState(Deferred):
    """The blocks and streams of a cache. It outlives the allocator until all blocks have returned to the pool."""

    kind: type[StreamCache] = StreamCache
    """Class of the stream caches."""
    finer: int = 0
    """Doublings of the number of size classes, see :func:`class_size`."""

    def __init__(self, pool: MemoryPool) -> None:
        # A weak reference: the queue keeps this item, and through the pool it would keep the pool's `on_oom` function
        # and all that this refers to, perhaps the cache itself.
        self._pool = weakref.ref(pool)
        self._pool_free: Any = free_function(pool)
        self.session: Session = session_of(pool)
        self.queue: DeferredQueue = deferred_queue(self.session)
        self.key: object = object()
        """Key of this cache in the ``free_lists`` of streams."""
        self.watchers: tuple[Watcher, ...] = ()
        """Watchers of allocations and frees, see :mod:`streamalloc.core.allocation_hooks`."""
        self.blocks: dict[int, CachedBlock] = {}
        """Blocks by address, free or in buffers."""
        self.stream_caches: dict[int, StreamCache] = {}
        """Stream caches by ``id`` of the stream. A later stream may have the ``id`` of an ended one."""
        self.dropped: deque[CachedBlock] = deque()
        """Blocks of buffers that were dropped while their streams were not ready."""
        self.closed: bool = False
        self.misses: int = 0
        self._opening = RLock()
        """Held while a stream is opened. No finaliser takes it."""
        self._reserved = 0
        """Bytes that the pool would reserve, as computed at the last query."""
        self._room = POOL_STEP
        """Bytes to allocate before the next query of the pool."""
        self._releases = 0
        """Number of releases of all free blocks since the last reset of the peaks. Each makes the allowance grow."""
        self._queries = _QUERIES

    def attempt(self) -> bool:
        self.closed = True
        for block in list(self.blocks.values()):
            block.home = None
        self.collect_dropped()
        for one in list(self.stream_caches.values()):
            # Also those that have ended: buffers may have been dropped since, and their blocks are free now.
            self.queue.end(one)
        if self.blocks:
            return False
        self.stream_caches.clear()
        return True

    # -- streams ---------------------------------------------------------------------------------------------

    def of(self, stream: Stream) -> StreamCache | None:
        """Return the stream cache of a stream; None if there is none, or if it has ended."""
        found = self.stream_caches.get(id(stream))
        return found if found is not None and not found.ended and found.stream() is stream else None

    def open(self, stream: Stream) -> StreamCache:
        """Return the stream cache of a stream, and make it if there is none."""
        self.session.check_process()
        with self._opening:
            found = self.of(stream)
            if found is None:
                self._forget_ended(self.stream_caches.pop(id(stream), None))
                found = self.stream_caches[id(stream)] = self.kind(self, stream)
                self.session.shut_with_me(stream)
                stream.free_lists[self.key] = found.lists
        return found

    def _forget_ended(self, before: StreamCache | None) -> None:
        """Remove the stream caches that have ended and have no block. Submit those that have ended and have free
        blocks, so that the queue releases the blocks.

        ``before``: the stream cache of an earlier stream that had the ``id`` of the new one; None if there is
        none.
        """
        for one in [*self.stream_caches.values(), *([] if before is None else [before])]:
            if one.ended and one.free_bytes:  # A buffer was freed after the end, so the item releases its block.
                self.queue.submit(one)
        self.stream_caches = {at: one for at, one in self.stream_caches.items() if not one.finished}

    def live(self) -> list[Any]:
        """Return the stream caches that have not ended."""
        return [one for one in list(self.stream_caches.values()) if not one.ended]

    # -- blocks ----------------------------------------------------------------------------------------------

    def buy(self, upstream: MemoryPool, wanted: SizeClass, stream: Stream) -> CachedBlock | None:
        """Allocate a block of the size class ``wanted`` from ``upstream`` on ``stream`` (``cuMemAllocFromPoolAsync``);
        return None if there is no memory. Raises CudaError for other refusals.
        """
        self._pool_free = free_function(upstream)
        alloc = without_notifying(upstream._alloc, self.watchers)
        bought: list[CachedBlock] = []

        def buy_here(handle: Any) -> Any:
            # The cache lists the block before the context is restored, because the driver may refuse that.
            result, pointer = alloc(wanted.nbytes, upstream._raw, handle)
            if not result:
                bought.append(self._new_block(int(pointer), wanted))
            return result

        try:
            result = in_context(stream, buy_here, raw_handle(stream))
        except OutOfMemoryError:  # A watcher of the pool refused, because its limit was reached.
            return None
        except CudaError:
            # The memory was allocated, and then the driver failed to restore the context: keep the block.
            wanted.free += bought
            raise
        if result and result != cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise error_from(result, "cuMemAllocFromPoolAsync")
        return bought[0] if bought else None

    def _new_block(self, address: int, wanted: SizeClass) -> CachedBlock:
        block = CachedBlock(address)
        block.address = address
        block.size_class = wanted
        block.home = wanted.free
        self.blocks[address] = block
        wanted.count += 1
        self.misses += 1
        return block

    def free_block(self, block: CachedBlock, ordered: Stream, raw: Any) -> None:
        """Return a block to the pool on ``ordered``, whose ``CUstream`` is ``raw`` (``cuMemFreeAsync``).

        Raises
        ------
        CudaError
            The driver refused. The block is in its free list again, unless other code has freed its memory.
        """
        address = block.address
        # Before the call, because another thread may get the address right after it.
        self.blocks.pop(address, None)
        pool = self._pool()
        free = self._pool_free if pool is None else free_function(pool)
        free = without_notifying(free, self.watchers)  # The watchers of the cache have recorded the free already.
        refused = free(block, raw)[0]
        if refused and not is_gone(free_refused(refused, ordered)):
            self.blocks[address] = block
            block.size_class.free.append(block)
        else:
            block.size_class.count -= 1
        if refused:
            raise free_refused(refused, ordered)

    def collect_dropped(self) -> None:
        """Move blocks of dropped buffers to their free lists. Blocks of a per-thread stream first wait for an event on
        the legacy stream, which is ordered after the work of all threads.
        """
        for block in drained(self.dropped.popleft):
            cache: StreamCache = block.size_class.owner
            event = None
            if cache.per_thread and not cache.ended:
                try:
                    with self.session.relaxed():
                        event = ordered_after(cache.device.default_stream, Stream.record)
                except CudaError:  # A later point of work tries again with this block.
                    self.dropped.append(block)
                    return
            for watcher in self.watchers:
                watcher.freed(block.address, None)
            cache.put(block) if event is None else cache.put_behind(event, block)

    @property
    def cached(self) -> int:
        """Bytes of free blocks of all streams, including those that wait for an event."""
        return sum(one.free_bytes for one in self.live())

    # -- the allowance ---------------------------------------------------------------------------------------

    def keep_allowance(self, pool: MemoryPool, wanted: SizeClass) -> None:
        """Return all free blocks to the pool if a block of the class ``wanted`` would make it grow beyond the
        allowance, and trim the pool to the allowance (``cuMemPoolTrimTo``).

        The pool is queried (``cuMemPoolGetAttribute``) only after the cache has allocated as many bytes as were free at
        the last query, 32 MiB at most. During a capture of this package nothing is released. A capture by other code
        stays valid, because the thread is in relaxed capture mode (``cuThreadExchangeStreamCaptureMode``).
        """
        self._room -= wanted.nbytes
        if self._room >= 0 or self.queue.paused:
            return
        with self.session.relaxed():
            attributes = pool.attributes
            reserved, needed, grown = _growth(attributes, wanted)
            # The allowance is computed only if the pool would grow, because it counts the bytes in use of each size
            # class of each stream.
            if grown > self._reserved and grown > (allowance := self._allowance(wanted)):
                self._releases += 1
                self.flush()
                if reserved > allowance:
                    pool._call("cuMemPoolTrimTo", allowance)
                _, needed, grown = _growth(attributes, wanted)
            self._reserved, self._room = grown, min(grown - needed, POOL_STEP)

    def _allowance(self, wanted: SizeClass) -> int:
        """Return the bytes that the pool may reserve: the sum of the streams' peaks times the factor, in whole growth
        steps. A block of the class ``wanted`` counts as in use.
        """
        peaks, streams = 0, self.live()
        for one in streams:
            in_use = sum(size.nbytes * (size.count - len(size.free)) for size in list(one.classes.values()))
            one.peak = max(one.peak, in_use + wanted.nbytes if one is wanted.owner else in_use)
            peaks += one.peak
        most = _MAX_ALLOWANCE if len(streams) == 1 else _MAX_OF_SEVERAL
        factor = min(_ALLOWANCE + self._releases * len(streams) * _ALLOWANCE_STEP, most)
        return _whole_steps(peaks * factor)

    def forget_peaks(self) -> None:
        """Reset the peaks and the factor, so that the next allowance depends on the bytes in use then."""
        self._releases = self._reserved = 0
        for one in self.live():
            one.peak = 0

    def flush(self) -> bool:
        """Return all free blocks to the pool. Returns whether any were released; during a capture none are.

        The host does not wait for pending work. If the frees of a stream have run already, the host also synchronises
        with them, so that the driver reuses their memory on any stream.
        """
        if self.queue.paused:
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
                    stream = one.stream()
                    if stream is not None and stream.closed:
                        # This stream cache ends by an item of the queue, which may have to wait until the device is
                        # idle.
                        continue
                    # The blocks of a captured or closed stream stay.
                    with contextlib.suppress(CaptureError, ClosedError):
                        one.ordered(functools.partial(release, one))
            for event in frees:
                with event:
                    done = any(event.query() for _ in range(self._queries))
                    self._queries = _QUERIES if done else 1
                    if done:
                        event.synchronize()
        return bool(frees)


def _growth(attributes: PoolAttributes, wanted: SizeClass) -> tuple[int, int, int]:
    """Return three numbers of bytes of a pool (``cuMemPoolGetAttribute``): those reserved now, those needed with one
    more block of the class ``wanted``, and those reserved then.
    """
    reserved, needed = attributes.reserved_mem_current, attributes.used_mem_current + wanted.nbytes
    return reserved, needed, max(reserved, _whole_steps(needed))


def _whole_steps(nbytes: float) -> int:
    """Return ``nbytes`` rounded up to :data:`POOL_STEP`, the step in which pools grow."""
    return -(-int(nbytes) // POOL_STEP) * POOL_STEP
