"""A cache over a pool, which reuses freed memory without a driver call.

*Size classes.* Each stream has a free list per size class. A request takes the smallest free block of its stream that
fits and is at most five times as large. A block is never split, and serves only one stream. If it is freed on another
stream, it returns to its own stream after an event.

*An allowance.* The cache limits how far the pool grows. Before an allocation from the pool would make it grow, the
cache compares the new size with the allowance: the sum of the peaks of all streams, times a factor. If the new size is
larger, every free block returns to the pool, the pool serves the request from this memory, and the factor grows. An
allocation from a free list does not need this check.

:class:`~streamalloc.vmm.ExpandableCache` is another cache, which reserves hardly more memory than is in use.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from streamalloc.core.errors import CaptureError, ClosedError, OutOfMemoryError, refused, size_text
from streamalloc.core.internal import (
    NOT_CAPTURED,
    Allocator,
    Buffer,
    Device,
    LibraryStream,
    PoolBuffer,
    Stream,
    StreamLike,
    Watcher,
    as_stream,
    deferred_queue,
    filled,
    holders,
    library_stream,
    look,
    record_uncaptured,
)
from streamalloc.core.properties import checked_size, checked_type
from streamalloc.core.resource import Closes
from streamalloc.core.session import session_of
from streamalloc.driver.internal import cuda
from streamalloc.formats.html import Row, Shown, gauge, mib
from streamalloc.pool.cache.blocks import CachedBlock, CachedBuffer, SharedBehind
from streamalloc.pool.cache.state import MAX_RETURNING, CacheState, StreamCache
from streamalloc.pool.ending import pools_of
from streamalloc.pool.pool import MemoryPool

_NOWHERE = object()
"""Key under which no stream has free lists. With this key, each allocation calls
:meth:`CachingAllocator._allocate_checked`.
"""
_ADDRESSES = 1 << 48
"""Number of bytes that addresses of 48 bits can name. A larger size is checked, and is refused or requested from the
pool.
"""


class CacheStatistics(NamedTuple):
    """Memory of a cache and its pool in bytes, and the number of misses.

    :meth:`CachingAllocator.statistics` returns it. :meth:`vmm.ExpandableCache.statistics` says what differs there.

    Attributes
    ----------
    reserved
        Bytes of device or host memory that the pool has reserved, in use or not.
    reserved_high
        Most bytes that the pool had reserved since :meth:`CachingAllocator.reset_peaks`.
    used
        Bytes allocated from the pool, in use or cached. Each block counts with the size of its size class.
    used_high
        Most bytes allocated from the pool since :meth:`CachingAllocator.reset_peaks`.
    in_use
        Bytes allocated from the pool and not cached.
    cached
        Bytes that were freed and that the cache can reuse.
    misses
        Allocations that got memory from the pool, since the cache was made: the cache had no free block, or does not
        cache memory of the stream. Allocations in captures do not count.
    """

    reserved: int
    reserved_high: int
    used: int
    used_high: int
    in_use: int
    cached: int
    misses: int


class CachingAllocator(Allocator, Closes, Shown):
    """A cache of free memory over a pool, for programs that allocate and free often.

    Use a cache like its pool: :meth:`allocate` returns a :class:`Buffer`. Memory of freed or dropped buffers is reused
    on its stream without a driver call. This works on streams of :meth:`Device.create_stream`, on the legacy default
    stream, on per-thread default streams, and on streams of PyTorch, CuPy, Numba and cuda.core. Memory that is freed on
    another stream returns to its own stream after an event.

    Other code may capture a library's stream, a per-thread default stream, and any stream whose handle it has
    (:attr:`Stream.handle`, ``__cuda_stream__``, an exported array). On such a stream each allocation first asks whether
    the stream is being captured (``cuStreamIsCapturing``). A free makes no such query, because no graph may use memory
    after the program has freed it.

    Sizes are rounded up to size classes: multiples of 512 bytes up to 8 KiB, then eight classes for each power of two.
    From 4 KiB on, at most a ninth of a block is wasted by the rounding. If a class has no free block, the request takes
    the smallest larger free block, of up to five times the size. The cache never splits or merges blocks.

    If the pool would grow beyond an allowance, all free blocks first return to the pool. The allowance is 1.05 times
    the sum of the streams' peaks, rounded up to 32 MiB. Each such release raises the factor by 1/32 for each stream, up
    to 2 for one stream and 2.5 for several.

    Not cached are:

    * allocations in captures, which become nodes of the graph;
    * memory on a stream that a library's object only names, such as an ``ExternalStream``, because other code may
      destroy the stream;
    * all memory of a driver of :func:`streamalloc.driver.checked`, because the checker must record each allocation;
    * buffers that are shared with other processes. Their memory leaves the cache for good, because its free is deferred
      until the other processes have closed it.

    When memory runs out, all free blocks return to the pool, and the allocation is repeated. The blocks of one stream
    return when the stream is closed or dropped. The blocks of a per-thread default stream return when its thread ends.
    The blocks of a library's stream return once 64 other streams of libraries were used for the first time after it.

    Threads may use one cache at the same time. For handles for other processes, access and attributes, use
    :attr:`pool`.

    Parameters
    ----------
    pool
        The pool to allocate from. Without a release threshold, the pool releases its unused memory to the device at
        every synchronisation. Cached memory counts as used in the pool's statistics.
    limit
        The most bytes of the pool that may be allocated, cached memory included; 0 for no limit except the pool's
        ``max_size``. Threads that allocate at the same moment may exceed the limit by the size of their requests.

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

    __slots__ = ("_dropped", "_key", "_state", "pool")

    pool: MemoryPool
    """The pool that the cache allocates from."""

    def __init__(self, pool: MemoryPool, *, limit: int | str = 0) -> None:
        checked_type("pool", pool, MemoryPool)
        limit = checked_size("limit", limit)
        if pool.closed:
            raise ClosedError(f"{pool!r} was closed")
        session = session_of(pool)
        self.pool = pool
        self._state = self._make_state()
        self._state.limit = limit
        self._key = self._state.key
        """Key of this cache's free lists in :attr:`Stream.free_lists`; ``_NOWHERE`` to make every allocation a checked
        one.
        """
        self._dropped: deque[CachedBlock] = self._state.dropped
        """Blocks of dropped buffers, see :attr:`CacheState.dropped`."""
        self.location, self.managed = pool.location, pool.managed
        self._bind(session, None, None)
        deferred_queue(session).end_with(self, self._state)
        pools_of(session).caches.add(self)

    def _make_state(self) -> CacheState:
        return CacheState(self.pool)

    @property
    def limit(self) -> int:
        """The most bytes of the pool that may be allocated, cached memory included; 0 for no limit. An
        :class:`~streamalloc.vmm.ExpandableCache` limits its own memory instead.

        Assign a size to change the limit; other values raise TypeError or ValueError. If more is allocated already,
        allocations that need more memory raise OutOfMemoryError.
        """
        return self._state.limit

    @limit.setter
    def limit(self, nbytes: int | str) -> None:
        self._state.limit = checked_size("limit", nbytes)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, or the pool was closed: new allocations raise ClosedError. Buffers stay
        valid.
        """
        return self._state.closed

    def allocate(self, nbytes: int | str, stream: StreamLike) -> Buffer:
        """Allocate in stream order: from the cache if it has a free block, otherwise from the pool
        (``cuMemAllocFromPoolAsync``). An :class:`~streamalloc.vmm.ExpandableCache` uses memory of its own instead of
        the pool's (``cuMemCreate``, ``cuMemMap``).

        Parameters
        ----------
        nbytes
            Size in bytes, or text such as ``"2MiB"``; 0 gives a valid empty buffer. Addresses are multiples of 512
            bytes.
        stream
            The stream that orders the allocation. :class:`CachingAllocator` lists the kinds of streams for which memory
            is cached.

        Returns
        -------
        Buffer
            A buffer whose memory returns to the cache when the buffer is freed or dropped. While ``stream`` is being
            captured, the result is a :class:`GraphBuffer`, which belongs to the graph.

        Raises
        ------
        OutOfMemoryError
            There is not enough memory even after the cache has returned all its free blocks, or the allocation would
            exceed :attr:`limit`.
        TypeError, ValueError
            ``nbytes`` is not a size or out of range, or ``stream`` is not a stream or belongs to another driver.
        NotSupportedError
            ``stream`` is being captured, and graphs cannot allocate from the pool (:meth:`MemoryPool.allocate`).
        CaptureError
            The cache has no free block, and a capture forbids the allocation (:meth:`MemoryPool.allocate`).
        ClosedError
            The cache, its pool or the stream was closed.
        """
        ordered = stream if isinstance(stream, Stream) else library_stream(stream, self._session)
        lists = ordered.free_lists.get(self._key)
        # The stream has no free lists yet, or is of another driver. `_allocate_checked` refuses a stream of another
        # driver, because this driver would crash on the stream's handle.
        if lists is None:
            return self._allocate_checked(nbytes, stream)
        # Memory of a free list needs no driver call. So it does not matter which context is current, even for a default
        # stream.
        usable = ordered.usable
        if ordered.capturable:
            handle, is_capturing = ordered.direct or ordered.ready(), self._session.cuStreamIsCapturing
            usable = handle is not None and is_capturing(handle)[1] is NOT_CAPTURED
        if usable and type(nbytes) is int:
            try:
                block = lists[(nbytes - 1) >> 9].pop()
            except LookupError:
                pass
            else:
                buffer: CachedBuffer = CachedBuffer()
                buffer._ptr = block
                buffer._nbytes = nbytes
                buffer._stream = ordered
                buffer._allocator = self
                buffer.shared = None
                return buffer
        return self._allocate_checked(nbytes, stream, ordered if usable else None)

    @property
    def blocks(self) -> int:
        """Number of blocks of the cache, free or in buffers."""
        return len(self._state.blocks)

    def statistics(self) -> CacheStatistics:
        """Return the pool's figures (``cuMemPoolGetAttribute``), the bytes that are cached and in use, and the number
        of misses. Raises ClosedError if the pool was closed.
        """
        self._state.collect_dropped()
        # The pool is read first, because this read attempts deferred frees, which change the number of cached bytes.
        own = self.pool.statistics()
        cached = self._state.cached
        return CacheStatistics(*own, max(own.used - cached, 0), cached, self._state.misses)

    def reset_peaks(self) -> None:
        """Set the pool's high-water marks to the bytes reserved and used now (``cuMemPoolSetAttribute``). The number of
        misses stays. Raises ClosedError if the pool was closed.
        """
        self.pool.reset_peaks()

    def trim(self, keep: int | str = 0) -> int:
        """Return all cached memory to the pool (``cuMemFreeAsync``), and trim the pool down to ``keep`` bytes
        (:meth:`MemoryPool.trim`). Returns the number of bytes that the pool released.

        The host waits for no stream. If a stream has unfinished work, its frees are pending, their memory is not
        released, and a :class:`PendingFreesWarning` is issued: synchronise with the stream and trim again. Raises
        ClosedError if the cache or its pool was closed, and TypeError or ValueError if ``keep`` is not a size.
        """
        checked_size("keep", keep)
        self._check_open()
        self._state.collect_dropped()
        before = self.pool.attributes.reserved_mem_current  # The synchronisation in `flush` may release memory, too.
        self._state.flush()
        self._state.forget_peaks()
        self.pool.trim(keep)
        return max(before - self.pool.attributes.reserved_mem_current, 0)

    def close(self) -> None:
        """Return all cached memory to the pool (``cuMemFreeAsync``), and stop caching. Buffers in use stay valid, and
        their frees return the memory to the pool. While this package captures a stream, the cached memory returns after
        the capture. An :class:`~streamalloc.vmm.ExpandableCache` releases its own memory instead (``cuMemUnmap``,
        ``cuMemRelease``), once the last buffer was freed and the work that was queued until then is done. Idempotent.
        """
        if self._state.closed:
            return
        self._state.closed = True
        # During a capture the end below is deferred. With this key no allocation uses a free list until then.
        self._key = _NOWHERE
        self._state.collect_dropped()
        deferred_queue(self._session).end(self._state)

    def _allocate_checked(self, nbytes: int | str, stream: StreamLike, ready: Stream | None = None) -> Buffer:
        """Allocate if no free list could serve the request without checks. ``ready`` is the :class:`Stream` if the
        caller has found that this thread may use it now and that it is not captured; None if the stream must be checked
        here.
        """
        state, ordered, cache = self._state, ready, None
        size = nbytes if type(nbytes) is int and 0 < nbytes < _ADDRESSES else 0
        # The key differs if the cache was closed or has watchers, and in a forked child.
        if size and ordered is not None and self._key is state.key and not self._dropped:
            cache = state.of(ordered)
        if ordered is None or cache is None:
            state.session.check_process()
            if self._dropped:
                state.collect_dropped()
            if state.closed:
                self._check_open()
            size = checked_size("nbytes", nbytes)
            for watcher in state.watchers:
                watcher.asked(self, size)
            captured = False
            if ordered is None or session_of(ordered) is not state.session:
                ordered = as_stream(stream, state.session)
                captured = ordered.capturing
            if captured or not self._caches(size, ordered):
                return self._allocate_past(size, ordered, captured)
            cache = state.of(ordered) or state.open(ordered)
        wanted = cache.size_class(size)
        block = cache.take(wanted, size)
        if block is None and self._limit_allows(wanted.nbytes):
            state.keep_allowance(self.pool, wanted)
            block = state.buy(self.pool, wanted, ordered)
        if block is None:
            return self._allocate_past(size, ordered, False)
        buffer: CachedBuffer = filled(CachedBuffer, self, block, size, ordered)
        if cache.ended or state.watchers:
            # With `home` None, a free of the buffer takes the slower path `_free_cached`, which notifies the watchers.
            block.home = None
            for watcher in state.watchers:
                watcher.allocated(self, block.address, size, ordered.checked_raw())
        return buffer

    def _caches(self, nbytes: int, ordered: Stream) -> bool:
        """Return whether an allocation of ``nbytes`` bytes on ``ordered``, which is not being captured, may be served
        from the cache.
        """
        # From a cache, a checked driver could not determine which use belongs to which allocation.
        if not nbytes or self._state.session.listener is not None:
            return False
        # If no owner keeps a library's stream alive, the stream can end without notice, and the driver may give its
        # handle to another stream.
        return not isinstance(ordered, LibraryStream) or ordered.owned

    def _allocate_past(self, nbytes: int, ordered: Stream, captured: bool) -> Buffer:
        """Allocate from the pool. If memory runs out, the pool makes the cache return its free blocks. Raises
        OutOfMemoryError if :attr:`limit` would be exceeded even after the cache has returned its free blocks.
        ``captured``: whether the stream is being captured; the limit does not apply then.
        """
        if not captured and not self._limit_allows(nbytes):
            self._state.flush()
            used = self.pool.attributes.used_mem_current
            if used + nbytes > self.limit:
                raise self._over_limit(nbytes, used)
        buffer = self.pool.allocate(nbytes, ordered)
        self._state.misses += not captured and nbytes > 0
        return buffer

    def _make_room(self, stream: Stream) -> bool:
        self._state.collect_dropped()
        return bool(self._state.flush())

    def _limit_allows(self, nbytes: int) -> bool:
        return not self.limit or self.pool.attributes.used_mem_current + nbytes <= self.limit

    def _over_limit(self, nbytes: int, used: int) -> OutOfMemoryError:
        why = f"the limit of {size_text(self.limit)} leaves no room for {size_text(nbytes)}"
        figures = {"requested": nbytes, "used": used, "limit": self.limit}
        held = holders(self._session, self.location, (self.pool,))
        return refused(OutOfMemoryError, self.alloc_name, why, **figures, holders=held)

    # -- frees that no free list takes directly ------------------------------------------------------------

    def _return_home(self, buffer: CachedBuffer, block: CachedBlock, stream: Stream) -> bool:
        """Have a block return to its own stream's free list after an event on ``stream``, the stream of the free.

        Returns False if this is not possible, and the block must be freed in another way.
        """
        cache = block.size_class.owner
        if len(cache.returning) >= MAX_RETURNING:
            cache.collect()
        if len(cache.returning) >= MAX_RETURNING or cache.ended:
            return False
        event = stream.record() if stream.direct and not stream.capturable else record_uncaptured(stream)
        if event is None:
            return False
        # If two threads free the buffer, only the first still finds the block in the buffer.
        if buffer._ptr is block:
            buffer._ptr = None
            cache.put_behind(event, block)
        return True

    def _free_cached(self, buffer: CachedBuffer, ordered: Stream) -> None:
        """Free a buffer on ``ordered``, a stream that was checked. If this is the block's own stream, the block goes to
        the free list. Otherwise the block returns to its own stream after an event on ``ordered``; if this is not
        possible, it returns to the pool.
        """
        state = self._state
        block, watchers = buffer._ptr, state.watchers
        cache: StreamCache = block.size_class.owner
        if not state.closed and state.of(ordered) is cache:
            # Watchers are notified first, because after `put` another thread may allocate the block and a finaliser may
            # free it again.
            for watcher in watchers:
                watcher.freed(block.address, ordered.checked_raw())
            if buffer._ptr is block:
                buffer._ptr = None
                cache.put(block)
            if watchers:
                look(watchers)
            return
        with contextlib.suppress(CaptureError):
            if not watchers and not state.closed and self._return_home(buffer, block, ordered):
                return
        behind = self._leave_cache(buffer)
        behind.free(None if ordered is behind.stream else ordered)
        buffer.shared = None

    def _leave_cache(self, buffer: CachedBuffer) -> Buffer:
        """Move a buffer's memory out of the cache to a new buffer of the pool, and return the pool's buffer. A later
        free of ``buffer`` frees the pool's buffer.
        """
        state = buffer.shared
        if isinstance(state, SharedBehind):
            return state.behind
        block = buffer._ptr
        if block is None:
            return buffer
        behind: PoolBuffer = filled(PoolBuffer, self.pool, None, buffer._nbytes, buffer.stream)
        pointer = cuda.CUdeviceptr(block.address)
        shared = SharedBehind(behind, pointer)
        self._state.blocks.pop(block.address, None)
        if buffer._ptr is block:
            behind._ptr = pointer
            buffer.shared = shared
            buffer._ptr = None
            block.size_class.count -= 1
        return behind

    # -- as every allocator ----------------------------------------------------------------------------------

    def _watched_by(self, watchers: tuple[Watcher, ...]) -> None:
        self._state.watchers = watchers
        self._key = _NOWHERE if watchers or self._state.closed else self._state.key

    def _shut_after_fork(self) -> None:
        super()._shut_after_fork()
        self._key = _NOWHERE

    def _check_open(self) -> None:
        if self._state.closed:
            raise ClosedError(f"{self!r} was closed")

    def pool_of(self, buffer: Buffer) -> object:
        return self.pool

    def reachable_from(self, device: Device) -> bool:
        return self.pool.reachable_from(device)

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
