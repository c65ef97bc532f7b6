"""The state of a cache: the blocks of each stream, and the allowance, which limits how far the pool grows.

**When memory may be handed out.** Memory of a free list is handed out without a driver call, so the driver would not
detect a mistake: two owners would write the same bytes. Memory is handed out:

* only on the block's own stream, where the next owner's work comes after the last owner's work. A block that was freed
  on another stream is in no free list until an event on that stream has completed (``returning``).
* only on the stream's own thread, if the stream is a per-thread default stream: on another thread its handle names
  another stream. Blocks of buffers that were dropped on other threads first wait for the legacy stream
  (:meth:`CacheState.collect_dropped`).
* not in a capture. The graph would write the memory at each launch, also when the memory has another owner.
* not after the stream has ended, because nothing can be ordered after its work then. All its blocks return to the pool:
  before the stream's end, or after its last event.
* only by a checked allocation while there are watchers, such as an observer: it notifies them.

A block is taken from a list, and put into a list, by a single atomic step. So no lock is needed, and a finaliser can
put a block into a list. The state exists until all blocks have returned to the pool, also after the end of the
allocator.
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
    free_refused,
    ordered_after,
    ordered_after_end,
    without_notifying,
)
from streamalloc.core.session import Session, drained, session_of
from streamalloc.driver.internal import RLock, cuda
from streamalloc.pool.attributes import PoolAttributes
from streamalloc.pool.cache.blocks import UNIT, CachedBlock, SizeClass, class_size
from streamalloc.pool.pool import POOL_STEP, MemoryPool, whole_steps

_LARGEST_FIT = 5
"""A request may take a free block that is up to this many times as large as its size class."""
_LARGEST_KEPT = 2
"""Limit for the size of a larger class's blocks, as a multiple of the request's class.

If the block found is smaller than this limit, its free list also serves the next requests of the same size. Otherwise,
if the request's own class has blocks, the next request first searches this class. Without this, half-precision tensors
would use up the blocks of full-precision tensors, which are twice as large.
"""
_MAX_SIZES = 1 << 14
"""Largest number of entries of :attr:`StreamCache.lists`, whose dict then has about 1 MiB."""
MAX_RETURNING = 64
"""Largest number of blocks of a stream that wait for an event; enough for data loaders."""
_ALLOWANCE = 1.05
"""Initial factor by which the sum of the streams' peaks is multiplied. A pool without a cache reserves about as
much.
"""
_ALLOWANCE_STEP = 1 / 32
"""Increase of the factor at each release of all free blocks, times the number of streams. So even a program with many
sizes reaches a state without releases.
"""
_MAX_ALLOWANCE = 2.0
"""Largest factor if the cache has one stream. For comparison, caches that split blocks reserve 1.2 to 2.5 times the
peaks.
"""
_MAX_OF_SEVERAL = 2.5
"""Largest factor if the cache has several streams, which share free memory only through the pool."""
_QUERIES = 1 << 8
"""Largest number of queries of the event after the frees of a stream's free blocks: enough for an idle stream to reach
the event. If a stream did not reach its event in time, the next event is queried only once, so that no time is lost on
busy streams.
"""


class StreamCache(Deferred):
    """Blocks of one stream, by size class.

    A stream cache ends when its stream is closed or dropped, when the thread of a per-thread default stream ends, when
    a library's stream leaves the table of library streams, or when the whole cache is closed.
    """

    def __init__(self, cache: CacheState, stream: Stream) -> None:
        self.cache: CacheState = cache
        self.device: Device = stream.device
        self.stream: weakref.ref[Stream] = weakref.ref(stream)
        # A stream of ours must be droppable, and leaves an event after its work. Other streams are kept alive, because
        # the return of the blocks is ordered on them.
        self._kept = None if isinstance(stream, OwnStream) else stream
        self._last: Sequence[Event] = stream.last
        self.per_thread: bool = isinstance(stream, PerThreadStream)
        """Whether the stream is the per-thread default stream of a thread, whose handle names another stream on other
        threads.
        """
        self.ended: bool = False
        self.classes: dict[int, SizeClass] = {}
        """Size classes by block size in bytes."""
        self.lists: dict[int, list[CachedBlock]] = {}
        """Free lists that :meth:`CachingAllocator.allocate` uses without checks, by requested size in units of 512
        bytes. Also stored in the stream's ``free_lists``.
        """
        self.returning: deque[tuple[Event, CachedBlock]] = deque()
        """Blocks that were freed on other streams, each with the event after its last use."""
        self.peak: int = 0
        """Most bytes in use at any of the counts that :meth:`CacheState._allowance` makes."""
        cache.queue.end_with(stream, self)
        stream.endings.append(self)

    def size_class(self, nbytes: int) -> SizeClass:
        """Return the size class for a request of ``nbytes`` bytes. Make it if the stream has none."""
        size = class_size(nbytes, self.cache.finer)
        found = self.classes.get(size)
        if found is None:
            found = self.classes.setdefault(size, SizeClass(self, size))
            for other in list(self.classes.values()):
                other.fitting = ()
        return found

    def take(self, wanted: SizeClass, nbytes: int) -> CachedBlock | None:
        """Remove and return the smallest free block that fits ``wanted``; None if there is none. Later requests of
        ``nbytes`` bytes take blocks from the free list of this block or of ``wanted`` without a search (:meth:`serve`).
        """
        if self.returning:
            self.collect()
        block, served_from = None, wanted.free
        for free in wanted.fitting or self._find_fitting(wanted):
            if free:
                try:
                    block = free.pop()
                except IndexError:  # Taken by another thread.
                    continue
                served_from = free
                break
        if wanted.count and block is not None and block.size_class.nbytes >= _LARGEST_KEPT * wanted.nbytes:
            served_from = wanted.free
        self.serve(nbytes, served_from)
        return block

    def serve(self, nbytes: int, free: list[CachedBlock]) -> None:
        """Have later requests of ``nbytes`` bytes take blocks from the list ``free`` without a search. Do nothing if
        the stream cache has ended.
        """
        if not self.ended:
            if len(self.lists) >= _MAX_SIZES:
                self.lists.clear()
            self.lists[(nbytes - 1) // UNIT] = free

    def _find_fitting(self, wanted: SizeClass) -> tuple[list[CachedBlock], ...]:
        sizes = sorted(self.classes)
        some = sizes[bisect_left(sizes, wanted.nbytes) : bisect_left(sizes, _LARGEST_FIT * wanted.nbytes + 1)]
        # If the stream ends on another thread meanwhile, its classes are removed: `get` then gives None.
        found = map(self.classes.get, some)
        wanted.fitting = tuple(one.free for one in found if one is not None)
        return wanted.fitting

    def collect(self) -> None:
        """Move blocks that were freed on other streams to their free lists, in order, until an event has not completed
        (``cuEventQuery``).
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
        has ended, the deferred queue returns the block to the pool.
        """
        self.returning.append((event, block))
        if self.ended:
            self.cache.queue.submit(self)

    def put(self, block: CachedBlock) -> None:
        """Put a block into the free list of its size class. If this stream cache has ended, the deferred queue returns
        the block to the pool.
        """
        size_class = block.size_class
        if not (self.cache.closed or self.ended):
            block.home = size_class.free
        size_class.free.append(block)
        if self.ended:
            self.cache.queue.submit(self)

    def release(self, ordered: Stream) -> None:
        """Return all free blocks to the pool in the order of stream ``ordered`` (``cuMemFreeAsync``).

        The stream waits for the events of blocks that were freed on other streams; the host does not wait.
        """
        self.collect_behind(ordered)
        ordered.in_context(self._free_blocks, ordered, ordered.checked_raw())

    def collect_behind(self, ordered: Stream) -> None:
        """Move all blocks that were freed on other streams to their free lists, and have stream ``ordered`` wait for
        the blocks' events (``cuStreamWaitEvent``). The blocks may then be used in the order of ``ordered``.
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
        return free + sum(block.size_class.nbytes for _, block in [*self.returning])

    def serve_no_more(self) -> None:
        """End the stream cache: no new buffer gets a block of its free lists, and blocks of buffers in use return by
        :meth:`put`.
        """
        if not self.ended:
            self.ended = True
            # With `home` None, a freed buffer's block returns by `put`, which submits this item again. Otherwise
            # nothing would return the block to the pool.
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
            with contextlib.suppress(ValueError):
                stream.endings.remove(self)
            stream.free_lists.pop(self.cache.key, None)
        if self.finished:
            self._last, self._kept = (), None
            # The size classes are dropped, because each refers to this object: the cycle would keep the cache and its
            # pool alive until a garbage collection.
            self.classes.clear()
        return True

    @property
    def finished(self) -> bool:
        """Whether this stream cache has ended and has no block left, free or in a buffer."""
        return self.ended and not any(one.count for one in list(self.classes.values()))

    def ordered(self, act: Callable[[Stream], object]) -> None:
        """Call ``act`` with the stream. After the stream's end, call ``act`` with a new stream that is ordered after
        its work. While ``act`` runs, no other thread closes the stream. Raises CaptureError, NotReadyError.
        """
        stream = self.stream()
        if stream is None:
            ordered_after_end(self.device, self._last, act)
        else:
            ordered_after(stream, act)


class CacheState(Deferred):
    """The blocks and streams of a cache. The state exists until all blocks have returned to the pool, also after the
    end of the allocator.
    """

    kind: type[StreamCache] = StreamCache
    """Class of the stream caches."""
    finer: int = 0
    """Number of times that the number of size classes is doubled, see :func:`class_size`."""

    def __init__(self, pool: MemoryPool) -> None:
        # The reference is weak: the deferred queue keeps this item alive. A strong reference would also keep the pool,
        # its `on_oom` function, and perhaps through this function the cache itself.
        self._pool = weakref.ref(pool)
        self._pool_free: Any = pool.free_function
        self.session: Session = session_of(pool)
        self.queue: DeferredQueue = deferred_queue(self.session)
        self.key: object = object()
        """Key of this cache in the ``free_lists`` of streams."""
        self.watchers: tuple[Watcher, ...] = ()
        """Watchers that are notified of allocations and frees (:mod:`streamalloc.core.allocation_hooks`)."""
        self.blocks: dict[int, CachedBlock] = {}
        """All blocks of the cache by address, free or in buffers."""
        self.stream_caches: dict[int, StreamCache] = {}
        """Stream caches by ``id`` of the stream. A new stream may have the same ``id`` as a stream that has ended."""
        self.dropped: deque[CachedBlock] = deque()
        """Blocks of dropped buffers whose finalisers could not put them into a free list, for example because the
        stream had ended, or was another thread's.
        """
        self.closed: bool = False
        self.limit: int = 0
        """Largest number of bytes, see :attr:`CachingAllocator.limit`; 0 for no limit."""
        self.misses: int = 0
        self._opening = RLock()
        """Lock held while a stream cache is made. No finaliser takes this lock."""
        self._reserved = 0
        """Bytes that the pool was expected to reserve after the last query of the pool."""
        self._room = POOL_STEP
        """Bytes that the cache may still allocate from the pool before the next query of the pool."""
        self._releases = 0
        """Number of releases of all free blocks since the last reset of the peaks. Each release increases the
        allowance.
        """
        self._queries = _QUERIES

    def attempt(self) -> bool:
        self.closed = True
        self.collect_dropped()
        for one in list(self.stream_caches.values()):
            # Stream caches that have ended are included: buffers may have been dropped since, and their blocks are free
            # now.
            self.queue.end(one)
        if self.blocks:
            return False
        self.stream_caches.clear()
        return True

    # -- caches of streams -----------------------------------------------------------------------------------

    def of(self, stream: Stream) -> StreamCache | None:
        """Return the stream cache of ``stream``; None if there is none, or if it has ended."""
        found = self.stream_caches.get(id(stream))
        return found if found is not None and not found.ended and found.stream() is stream else None

    def open(self, stream: Stream) -> StreamCache:
        """Return the stream cache of ``stream``. Make it if there is none."""
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
        """Remove stream caches that have ended and have no block. Submit stream caches that have ended and have free
        blocks, so that the deferred queue returns the blocks to the pool.

        ``before`` is the stream cache of an ended stream that had the same ``id`` as a new stream, or None.
        """
        for one in [*self.stream_caches.values(), *([] if before is None else [before])]:
            if one.ended and one.free_bytes:  # By a free after the end.
                self.queue.submit(one)
        self.stream_caches = {at: one for at, one in self.stream_caches.items() if not one.finished}

    def live(self) -> list[Any]:
        """Return the stream caches that have not ended."""
        return [one for one in list(self.stream_caches.values()) if not one.ended]

    # -- blocks ----------------------------------------------------------------------------------------------

    def buy(self, upstream: MemoryPool, wanted: SizeClass, stream: Stream) -> CachedBlock | None:
        """Allocate a block of the size class ``wanted`` from the pool ``upstream`` on ``stream``
        (``cuMemAllocFromPoolAsync``). Return None if there is not enough memory, or if a watcher raises
        OutOfMemoryError. Raises CudaError for other errors of the driver.
        """
        self._pool_free = upstream.free_function
        alloc = without_notifying(upstream.alloc_function, self.watchers)
        bought: list[CachedBlock] = []

        def buy_here(handle: Any) -> Any:
            # The block is added to the cache before the caller's context is restored: the driver may refuse to restore
            # the context, and the block would be lost.
            result, pointer = alloc(wanted.nbytes, upstream._raw, handle)
            if not result:
                bought.append(self._new_block(int(pointer), wanted))
            return result

        try:
            result = stream.in_context(buy_here, stream.checked_raw())
        except OutOfMemoryError:  # Refused by a watcher, such as an observer with a limit.
            return None
        except CudaError:
            # If the memory was allocated, and then the context could not be restored, the block is kept as a free one.
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
            The driver refused the free. The block is put back into its free list, unless its memory no longer exists.
        """
        address = block.address
        # Removed before the driver call, because another thread may get the same address right after the call.
        self.blocks.pop(address, None)
        pool = self._pool()
        free = self._pool_free if pool is None else pool.free_function
        free = without_notifying(free, self.watchers)  # They have recorded the free.
        refused = free(block, raw)[0]
        if refused and not is_gone(free_refused(refused, ordered)):
            self.blocks[address] = block
            block.size_class.free.append(block)
        else:
            block.size_class.count -= 1
        if refused:
            raise free_refused(refused, ordered)

    def collect_dropped(self) -> None:
        """Move blocks of dropped buffers (:attr:`dropped`) to their free lists. Blocks of a per-thread default stream
        first wait for an event on the legacy stream, which is ordered after the per-thread streams of all threads.
        """
        for block in drained(self.dropped.popleft):
            cache: StreamCache = block.size_class.owner
            event = None
            if cache.per_thread and not cache.ended:
                try:
                    with self.session.relaxed():
                        event = ordered_after(cache.device.default_stream, Stream.record)
                except CudaError:  # Kept for the next call.
                    self.dropped.append(block)
                    return
            for watcher in self.watchers:
                watcher.freed(block.address, None)
            cache.put(block) if event is None else cache.put_behind(event, block)

    @property
    def cached(self) -> int:
        """Bytes of free blocks of all streams, including blocks that wait for an event."""
        return sum(one.free_bytes for one in self.live())

    # -- the allowance: how far the pool may grow ------------------------------------------------------------

    def keep_allowance(self, pool: MemoryPool, wanted: SizeClass) -> None:
        """If a new block of the class ``wanted`` would make the pool grow beyond the allowance, return all free blocks
        to the pool, and trim the pool to the allowance (``cuMemPoolTrimTo``).

        The pool is queried (``cuMemPoolGetAttribute``) only after the cache has allocated as many bytes as the pool had
        unused at the last query, at most 32 MiB. During a capture of this package nothing is released. A capture by
        other code stays valid, because the thread is in relaxed capture mode (``cuThreadExchangeStreamCaptureMode``).
        """
        self._room -= wanted.nbytes
        if self._room >= 0 or self.queue.captures:
            return
        with self.session.relaxed():
            attributes = pool.attributes
            reserved, needed, grown = _growth(attributes, wanted)
            # The allowance is computed only if the pool would then be larger than this cache found or expected at its
            # last query, because the computation reads each size class of each stream.
            if grown > self._reserved and grown > (allowance := self._allowance(wanted)):
                self._releases += 1
                self.flush()
                if reserved > allowance:
                    pool._call("cuMemPoolTrimTo", allowance)
                _, needed, grown = _growth(attributes, wanted)
            self._reserved, self._room = grown, min(grown - needed, POOL_STEP)

    def _allowance(self, wanted: SizeClass) -> int:
        """Return the number of bytes that the pool may reserve: the sum of the streams' peaks times the factor, rounded
        up to :data:`POOL_STEP`. A new block of the class ``wanted`` counts as in use.
        """
        peaks, streams = 0, self.live()
        for one in streams:
            in_use = sum(size.nbytes * (size.count - len(size.free)) for size in list(one.classes.values()))
            one.peak = max(one.peak, in_use + wanted.nbytes if one is wanted.owner else in_use)
            peaks += one.peak
        most = _MAX_ALLOWANCE if len(streams) == 1 else _MAX_OF_SEVERAL
        factor = min(_ALLOWANCE + self._releases * len(streams) * _ALLOWANCE_STEP, most)
        return whole_steps(peaks * factor)

    def forget_peaks(self) -> None:
        """Reset the peaks and the factor, so that the next allowance depends on the bytes that are in use then."""
        self._releases = self._reserved = 0
        for one in self.live():
            one.peak = 0

    def flush(self) -> bool:
        """Return all free blocks to the pool. Returns whether any block was returned; during a capture of this package
        none is.

        The host does not wait for pending work. If the frees of a stream have already run, the host also synchronises
        with an event after the frees, so that the driver can reuse the memory on any stream.
        """
        if self.queue.captures:
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
                        # The deferred queue returns the blocks of a closed stream, perhaps only when the device is
                        # idle.
                        continue
                    # Kept if the stream is captured (a free would be a node of the graph), or was closed meanwhile.
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
    """Return three numbers of bytes of a pool (``cuMemPoolGetAttribute``): the bytes reserved now, the bytes used with
    one more block of the class ``wanted``, and the bytes reserved with this block.
    """
    reserved, needed = attributes.reserved_mem_current, attributes.used_mem_current + wanted.nbytes
    return reserved, needed, max(reserved, whole_steps(needed))
