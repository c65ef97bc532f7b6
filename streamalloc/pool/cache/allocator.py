"""A cache over a pool. It reuses freed memory without a driver call.

*Size classes.* Each stream has a free list per size class. A request takes the smallest free block of its stream that
fits, up to five times the size. A block is never split, and serves one stream: a block that is freed on another stream
returns to its own after an event.

*An allowance.* The fast path counts nothing. Before the pool grows, the cache compares the pool's new size with the
allowance: the sum of the peaks of all streams, times a factor. If the allowance is exceeded, every free block returns
to the pool, the pool serves the request from this memory, and the factor grows.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from streamalloc.core.errors import (
    CaptureError,
    ClosedError,
    CudaError,
    NotReadyError,
    OutOfMemoryError,
    error_from,
    refused,
    size_text,
)
from streamalloc.core.html import Row, Shown, gauge, mib
from streamalloc.core.internal import (
    LEGACY,
    NOT_CAPTURED,
    PER_THREAD,
    Allocator,
    Buffer,
    Deferred,
    Device,
    Event,
    PlainBuffer,
    Spares,
    Stream,
    StreamLike,
    Watcher,
    as_stream,
    besides,
    deferred_queue,
    direct_handle,
    direct_spares,
    drained,
    give_lists,
    holders,
    is_borrowed,
    kept_stream,
    look,
    moment,
    of_this_thread,
    raw_handle,
    record_uncaptured,
    shared_state,
    thread_of,
)
from streamalloc.core.properties import MemLocation, checked_size, checked_type
from streamalloc.core.resource import Closes
from streamalloc.core.session import Session, session_of
from streamalloc.driver.internal import RLock, cuda
from streamalloc.pool.cache.blocks import UNIT, Block, CachedBuffer, SharedBehind, SizeClass, filled
from streamalloc.pool.cache.stream_cache import MAX_RETURNING, StreamCache
from streamalloc.pool.ending import pools_of
from streamalloc.pool.lost import no_collection_is_left
from streamalloc.pool.pool import MemoryPool

_POOL_STEP = 32 << 20
"""Bytes by which a pool grows on its device."""
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
_NOWHERE = object()


class CacheStatistics(NamedTuple):
    """Memory of a cache and its pool in bytes, and the number of misses.

    :meth:`CachingAllocator.statistics` returns it.
    """

    reserved: int
    """Memory that the pool holds of its device or host."""
    reserved_high: int
    """The most it held since the last reset."""
    used: int
    """Bytes allocated from the pool, in use or cached; sizes are class sizes."""
    used_high: int
    """Most bytes allocated since the last reset."""
    in_use: int
    """Memory of the pool that is allocated and not cached."""
    cached: int
    """Bytes that were freed and can be reused."""
    misses: int
    """Allocations that found no cached block and called the pool."""


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
        self.keys: tuple[object, object, object] = (object(), object(), object())
        """Keys of ``Stream.free_lists``: lists used directly, lists used after a capture query, the stream cache."""
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
        self._room = _POOL_STEP
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
        if self.blocks and not self._all_lost():
            return False
        self.stream_caches.clear()
        return True

    def _all_lost(self) -> bool:
        """Whether all remaining blocks are lost. Lost blocks end with the pool."""
        owner = getattr(self, "_owner", None)  # buffers keep the cache
        if owner is None or owner() is not None or not no_collection_is_left():
            return False
        return not self.dropped and not any(one.free_bytes for one in list(self.stream_caches.values()))

    # -- streams ---------------------------------------------------------------------------------------------

    def known(self, stream: Stream) -> StreamCache | None:
        """The stream cache of a stream if there is one that has not ended."""
        mine = of_this_thread(stream, make=False)
        found = None if mine is None else self.stream_caches.get(_key(mine))
        if found is None or found.ended:
            return None
        owner = found.stream()
        return found if owner is not None and not owner.closed else None

    def open(self, stream: Stream, *, ask: bool) -> StreamCache:
        """Return the stream cache of a stream, and make its free lists usable by the fast path.

        ``ask``: other code may capture the stream, so each allocation first queries whether it does.
        """
        self.session.check_process()
        stream = of_this_thread(stream)
        found = self.known(stream)
        if found is None:
            with self._opening:
                found = self.known(stream) or self._begin(stream)
            self._bound_streams()
        if ask:
            give_lists(stream, self.keys[1], (found.lists, raw_handle(stream)))
        else:
            give_lists(stream, self.keys[0], found.lists)
            if found.threads is None:
                give_lists(stream, self.keys[2], found)
        return found

    def _begin(self, stream: Stream) -> StreamCache:
        before = self.stream_caches.get(_key(stream))
        if before is not None:
            if not before.over:
                # The fast path would free to lists that are no longer used.
                for block in list(self.blocks.values()):
                    if block.size_class.owner is before:
                        block.home = None
            self._queue.submit(before)
        for key, one in list(self.stream_caches.items()):
            if one.over:
                del self.stream_caches[key]
            elif one.ended and one.free_bytes:  # a buffer was freed since
                self._queue.submit(one)
        found = self.stream_caches[_key(stream)] = StreamCache(self, stream)
        return found

    def _bound_streams(self) -> None:
        """End the oldest stream cache that keeps a library's stream alive, if there are too many."""
        kept_alive = [one for one in self.live() if one.kept_alive is not None]
        if len(kept_alive) > _MAX_KEPT_ALIVE:
            self._queue.end(kept_alive[0])

    def live(self) -> list[StreamCache]:
        """The stream caches that have not ended."""
        return [one for one in list(self.stream_caches.values()) if not one.ended]

    # -- blocks ----------------------------------------------------------------------------------------------

    def buy(self, below: MemoryPool, wanted: SizeClass, stream: Stream) -> Block | None:
        """Allocate a new block (``cuMemAllocFromPoolAsync``); None if there is no memory."""
        raw = raw_handle(stream)
        self._pool_free = below._free
        try:
            with stream.device.current() if stream.is_default else contextlib.nullcontext():
                result, pointer = besides(below._alloc, self.watchers)(wanted.nbytes, below._raw, raw)
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
        free = besides(free, self.watchers if notified is None else notified)
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
            home: StreamCache = block.size_class.owner
            event = None
            if home.threads is not None:
                try:
                    event = home.after_all_threads()
                except CudaError:  # another time
                    self.dropped.append(block)
                    return
            for watcher in self.watchers:
                watcher.freed(block.address, None)
            home.put(block) if event is None else home.put_behind(event, block)

    @property
    def cached(self) -> int:
        """Bytes in free lists and returning."""
        return sum(one.free_bytes for one in self.live())

    # -- the allowance ---------------------------------------------------------------------------------------

    def make_room(self, pool: MemoryPool, wanted: SizeClass) -> None:
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
            for released in (False, True):
                reserved, needed = attributes.reserved_mem_current, attributes.used_mem_current + wanted.nbytes
                grown = max(reserved, -(-needed // _POOL_STEP) * _POOL_STEP)
                if released or grown <= self._reserved or grown <= (allowance := self._allowance(wanted)):
                    break
                self._releases += 1
                self.flush()
                if reserved > allowance:
                    pool._call("cuMemPoolTrimTo", allowance)
            self._reserved, self._room = grown, min(grown - needed, _POOL_STEP)

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
        return -(-int(peaks * factor) // _POOL_STEP) * _POOL_STEP

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


class CachingAllocator(Allocator, Closes, Shown):
    """A cache of free memory over a pool, for programs that allocate and free often.

    Use it like the pool: the same :meth:`allocate`, the same :class:`Buffer`. Freed or dropped memory is reused on its
    stream without a driver call. This works on streams of :meth:`Device.create_stream`, on the legacy default stream,
    on the per-thread default stream for each thread, and on streams of PyTorch, CuPy, Numba and cuda.core. On streams
    of other libraries each allocation first queries whether the stream is being captured (``cuStreamIsCapturing``).
    Memory that is freed on another stream returns to its own stream after an event.

    Sizes are rounded up to classes: multiples of 512 bytes up to 8 KiB, then eight classes for each power of two. From
    4 KiB on, at most a ninth of a block is wasted. If a class has no free block, the request takes the smallest larger
    one, of up to five times the size. Blocks are never split or merged: the pool does that.

    The allowance bounds the pool's reserved memory: the sum of each stream's peak use, times 1.05, in steps of 32 MiB.
    Before the pool would grow beyond it, every free block returns to the pool, and the factor grows by 1/32 for each
    stream, up to 2 for one stream and 2.5 for several.

    Some memory is never cached: allocations in captures, which become nodes of the graph, and all allocations on a
    :func:`streamalloc.driver.checked` driver, which must record each one. A buffer that is shared with other processes
    leaves the cache for good: its free waits for importers.

    When memory runs out, the cache returns all free blocks and tries again. A stream that is closed or dropped returns
    its blocks. So does a thread that ends, for its per-thread default stream. Threads may use one cache at the same
    time. Handles for other processes, access and attributes are the :attr:`pool`'s.

    Parameters
    ----------
    pool
        The pool of the memory. Give it a release threshold, or it returns memory to the device at every
        synchronisation; cached memory counts as used there.
    largest
        The largest size in bytes that is cached (default: every size).
    limit
        The most bytes of the pool that may be used, cached memory included; 0 for no limit but the pool's own
        ``max_size``. Threads that allocate at the same moment may exceed it by their requests.

    Raises
    ------
    TypeError, ValueError
        ``pool`` is not a pool, or a size is not valid.
    ClosedError
        The pool was closed.

    Examples
    --------
    >>> cache = sa.CachingAllocator(sa.MemoryPool(device, release_threshold=1 << 40))
    >>> with cache.allocate(4096, stream) as buffer:
    ...     buffer.fill(0)
    """

    __slots__ = (
        "_cache_key", "_is_capturing", "_key", "_library_key", "_limit", "_state", "dropped", "largest", "pool",
    )  # fmt: skip

    pool: MemoryPool
    """The pool of the memory."""
    largest: int
    """The largest size in bytes that is cached."""

    def __init__(self, pool: MemoryPool, *, largest: int = sys.maxsize, limit: int = 0) -> None:
        checked_type("pool", pool, MemoryPool)
        self.largest = checked_size("largest", largest)
        self._limit = checked_size("limit", limit)
        if pool.closed:
            raise ClosedError(f"{pool!r} was closed")
        session = session_of(pool)
        self.pool = pool
        self._state = CacheState(pool)
        self._key, self._library_key, self._cache_key = self._state.keys
        self._is_capturing = session.cuStreamIsCapturing
        self.dropped: deque[Block] = self._state.dropped
        """Dropped buffers' blocks, see :class:`CacheState`."""
        self.location: MemLocation = pool.location
        self._bind(session, None, None)
        # A buffer that left the cache is freed by this. It is bound to the state: bound to the cache, it would form a
        # cycle.
        self._free = self._state.free_past
        deferred_queue(session).end_with(self, self._state)
        pools_of(session).caches.add(self)

    @property
    def limit(self) -> int:
        """The most bytes of the pool that may be used, cached memory included; 0 for none. It can be assigned."""
        return self._limit

    @limit.setter
    def limit(self, nbytes: int) -> None:
        self._limit = checked_size("limit", nbytes)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, or the pool was closed."""
        return self._state.closed

    def allocate(self, nbytes: int, stream: StreamLike) -> Buffer:
        """Allocate in stream order: from the cache if it has a block, otherwise as :meth:`MemoryPool.allocate` does.

        Parameters
        ----------
        nbytes
            Size in bytes; 0 gives a valid empty buffer. Addresses are multiples of 512 bytes.
        stream
            The stream that orders the allocation; :class:`CachingAllocator` lists the kinds with cached memory.

        Returns
        -------
        Buffer
            Its memory returns to the cache when it is freed or dropped. While ``stream`` is being captured, the result
            is a :class:`GraphBuffer`, which belongs to the graph.

        Raises
        ------
        OutOfMemoryError
            There is no memory even after the cache has returned all its free blocks, or the limit is reached.
        TypeError, ValueError
            The size is no integer or out of range, or ``stream`` is no stream or belongs to another driver.
        ClosedError
            The cache, its pool or the stream was closed.
        """
        if type(nbytes) is int:
            if type(stream) is Stream:
                try:
                    block = stream.free_lists[self._key][(nbytes - 1) >> 9].pop()
                except LookupError:
                    pass
                else:
                    buffer: CachedBuffer = CachedBuffer()
                    buffer._ptr = block
                    buffer._nbytes = nbytes
                    buffer._stream = stream
                    buffer._allocator = self
                    buffer._shared = None
                    return buffer
            else:
                kept, owner = self._session.latest_stream
                if owner() is not stream:
                    kept = kept_stream(stream, self._session)
                elif kept.open_check is not None:
                    asks, answer = kept.open_check
                    if asks() != answer:
                        kept = None
                if kept is not None:
                    try:
                        lists = kept.free_lists
                        if self._library_key in lists:
                            found, raw = lists[self._library_key]
                            is_capturing = self._is_capturing
                            free = found[(nbytes - 1) >> 9] if is_capturing(raw) == NOT_CAPTURED else []
                        else:
                            free = lists[self._key][(nbytes - 1) >> 9]
                        block = free.pop()
                    except LookupError:
                        pass
                    else:
                        buffer = CachedBuffer()
                        buffer._ptr = block
                        buffer._nbytes = nbytes
                        buffer._stream = kept
                        buffer._allocator = self
                        buffer._shared = None
                        buffer._owner = stream
                        return buffer
        return self._allocate_slowly(nbytes, stream)

    def statistics(self) -> CacheStatistics:
        """Return the pool's figures, and the bytes that are cached and in use."""
        self._state.collect_dropped()
        own = self.pool.statistics()  # first: it attempts deferred frees
        cached = self._state.cached
        return CacheStatistics(*own, max(own.used - cached, 0), cached, self._state.misses)

    def reset_peaks(self) -> None:
        """Set the pool's high-water marks to what is reserved and used now."""
        self.pool.reset_peaks()

    def trim(self, keep: int = 0) -> int:
        """Return all cached memory to the pool, and trim the pool (:meth:`MemoryPool.trim`). Returns the bytes
        released.

        The host waits for no stream. Frees on a stream with unfinished work are pending, and raise a
        :class:`PendingFreesWarning`: synchronise with the stream and trim again.
        """
        checked_size("keep", keep)
        self._check_open()
        self._state.collect_dropped()
        self._state.flush()
        self._state.forget_peaks()
        for one in self._state.live():
            if one.kept_alive is not None and one.empty:
                deferred_queue(self._session).end(one)
        return self.pool.trim(keep)

    def close(self) -> None:
        """Return all cached memory to the pool, and stop caching; idempotent. Live buffers stay valid and return to the
        pool.
        """
        if self._state.closed:
            return
        self._state.closed = True
        self._state.collect_dropped()
        deferred_queue(self._session).end(self._state)

    def _allocate_slowly(self, nbytes: int, stream: StreamLike) -> Buffer:
        # The common case: only the free list is empty. Watched caches and captured streams have no such key.
        if type(stream) is Stream and type(nbytes) is int and not self.dropped:
            found: StreamCache | None = stream.free_lists.get(self._cache_key)
            if found is not None:
                size = found.class_of.get((nbytes - 1) // UNIT)
                other = None if size is None else found.take(size, nbytes)
                if other is not None:
                    if found.ended:
                        other.home = None
                    return filled(CachedBuffer, self, other, nbytes, stream)
        state = self._state
        if self.dropped:
            self._state.collect_dropped()
        for watcher in state.watchers:
            watcher.asked(self, checked_size("nbytes", nbytes))
        if state.closed:
            self._check_open()
        kept: Stream | None = None
        cache: StreamCache | None = None
        if type(stream) is Stream:
            kept, cache = stream, stream.free_lists.get(self._cache_key)
        if cache is None:
            kept, ask = self._cacheable(stream)
        # With cached memory, a checking driver could not tell which use belongs to which allocation.
        if kept is None or state.session.listener is not None:
            return self._allocate_past(nbytes, stream)
        nbytes = checked_size("nbytes", nbytes)
        if not 0 < nbytes <= self.largest:
            return self._allocate_past(nbytes, stream)
        if cache is None:
            cache = state.open(kept, ask=ask)
        wanted = cache.class_of.get((nbytes - 1) // UNIT) or cache.size_class(nbytes)
        block = cache.take(wanted, nbytes)
        if block is None and not (self._limit and self.pool.attributes.used_mem_current + wanted.nbytes > self._limit):
            state.make_room(self.pool, wanted)
            block = state.buy(self.pool, wanted, kept)
        if block is None:
            return self._allocate_past(nbytes, stream)
        buffer: CachedBuffer = filled(CachedBuffer, self, block, nbytes, kept)
        if kept is not stream:
            buffer._owner = stream
        if cache.ended or state.watchers:
            block.home = None
            for watcher in state.watchers:
                watcher.allocated(self, block.address, nbytes, raw_handle(kept))
        return buffer

    def _cacheable(self, stream: StreamLike) -> tuple[Stream | None, bool]:
        """Return the stream whose free lists serve an allocation, or None, and whether each allocation must query for a
        capture.
        """
        session = self._session
        if type(stream) is Stream:
            kept: Stream | None = stream
        else:
            as_stream(stream, session)
            kept = kept_stream(stream, session)
        if kept is None or session_of(kept) is not session or kept.closed:
            return None, False
        if kept.is_default:
            return (None if int(raw_handle(kept)) == PER_THREAD and kept.capturing else kept), False
        if kept is stream:
            # A stream borrowed by its handle can end without notice, so it is not cached.
            return (None if is_borrowed(kept) or direct_handle(kept, session) is None else kept), False
        result, status = self._is_capturing(raw_handle(kept))
        return (None if result or status else kept), True

    def _allocate_past(self, nbytes: int, stream: StreamLike) -> Buffer:
        """Allocate from the pool directly. If its memory runs out, the pool makes the cache release its free blocks."""
        state = self._state
        if self._limit:
            ordered = as_stream(stream, state.session)
            if direct_handle(ordered, state.session) is not None or not ordered.capturing:
                self._keep_limit(checked_size("nbytes", nbytes))
        return self.pool.allocate(nbytes, stream)

    def _make_room(self, stream: Stream) -> bool:
        self._state.collect_dropped()
        return bool(self._state.flush())

    def _keep_limit(self, nbytes: int) -> None:
        attributes = self.pool.attributes
        if attributes.used_mem_current + nbytes <= self._limit:
            return
        self._state.flush()
        used = attributes.used_mem_current
        if used + nbytes > self._limit:
            why = f"the limit of {size_text(self._limit)} leaves no room for {size_text(nbytes)}"
            error = refused(OutOfMemoryError, "cuMemAllocFromPoolAsync", why)
            error.requested, error.used, error.limit = nbytes, used, self._limit
            error.holders = holders(self._session, self.location)
            raise error

    # -- frees that are not plain ----------------------------------------------------------------------------

    def _return_home(
        self,
        buffer: CachedBuffer,
        block: Block,
        stream: Stream,
        event: Event | None = None,
        source: Spares | None = None,
    ) -> Event | None:
        """Queue a block to return to its own stream, behind an event on the stream of the free.

        ``event`` was recorded on that stream after the last use; default: a new one. ``source``: the
        :func:`direct_spares` of the stream, if the caller has them. Returns the event; None if the block must be freed
        in another way.
        """
        home = block.size_class.owner
        if len(home.returning) >= MAX_RETURNING:
            home.collect()
            if len(home.returning) >= MAX_RETURNING:
                return None
        if home.ended:
            return None
        began = 0
        if event is None:
            source = source if source is not None else direct_spares(stream, self._session)
            if source is None:
                event = record_uncaptured(stream)
            else:
                began = moment()
                event = home.record(stream)
        if event is None:
            return None
        if buffer._ptr is block:
            buffer._ptr = None
            home.put_behind(event, block, source, began)
        return event

    def _free_checked(self, buffer: CachedBuffer, ordered: Stream) -> None:
        """Free a buffer on a checked stream: to a free list if possible, otherwise to the pool."""
        state = self._state
        block, watchers = buffer._ptr, state.watchers
        home: StreamCache = block.size_class.owner
        if not state.closed and state.known(ordered) is home:
            # First, because from ``put`` on a finaliser may free the block without notifying watchers.
            for watcher in watchers:
                watcher.freed(block.address, raw_handle(ordered))
            if buffer._ptr is block:
                buffer._ptr = None
                home.put(block)
            if watchers:
                look(watchers)
            return
        with contextlib.suppress(CaptureError):
            if not watchers and not state.closed and self._return_home(buffer, block, ordered):
                return
        self._leave_cache(buffer).free(ordered)
        buffer._shared = None

    def _leave_cache(self, buffer: CachedBuffer) -> Buffer:
        """Move a buffer's memory out of the cache, to a plain buffer, which will free it."""
        state = shared_state(buffer)
        if isinstance(state, SharedBehind):
            return state.plain
        block = buffer._ptr
        if block is None:
            return buffer
        plain: PlainBuffer = filled(PlainBuffer, self.pool, None, buffer._nbytes, buffer.stream)
        pointer = cuda.CUdeviceptr(block.address)
        behind = (SharedBehind(plain), pointer)
        self._state.blocks.pop(block.address, None)
        if buffer._ptr is block:
            plain._ptr = pointer
            buffer._shared = behind
            buffer._ptr = None
            block.size_class.count -= 1
        return plain

    # -- as every allocator ----------------------------------------------------------------------------------

    def _watched_by(self, watchers: tuple[Watcher, ...]) -> None:
        self._state.watchers = watchers
        # No stream has lists under this key, so every allocation takes the slow path.
        self._key, self._library_key, self._cache_key = (_NOWHERE,) * 3 if watchers else self._state.keys

    def _check_open(self) -> None:
        if self._state.closed:
            raise ClosedError(f"{self!r} was closed")

    def _pool_of(self, buffer: Buffer) -> object:
        return self.pool

    def _reachable_from(self, device: Device) -> bool:
        return self.pool._reachable_from(device)

    @property
    def managed(self) -> bool:
        """Whether the memory migrates between devices and host."""
        return self.pool.managed

    def _about(self) -> Iterator[Row]:
        self._check_open()
        now = self.statistics()
        yield "pool", self.pool
        yield "in use", gauge(now.in_use, now.reserved)
        yield "cached", gauge(now.cached, now.reserved)
        yield "limit", mib(self.limit) if self.limit else "none"
        yield "misses", now.misses

    def _text(self) -> str:
        return f" over {self.pool!r}{' closed' if self.closed else ''}"
