"""A cache over a pool. It reuses freed memory without a driver call.

*Size classes.* Each stream has a free list per size class. A request takes the smallest free block of its stream that
fits, up to five times the size. A block is never split, and serves one stream: a block that is freed on another stream
returns to its own after an event.

*An allowance.* The cache limits how far the pool grows. Before an allocation from the pool would make it grow, the
cache compares the new size with the allowance: the sum of the peaks of all streams, times a factor. If the new size is
larger, every free block returns to the pool, the pool serves the request from this memory, and the factor grows. An
allocation from a free list needs no such check.

A cache that reserves hardly more than is in use is :class:`~streamalloc.vmm.ExpandableCache`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from streamalloc.core.errors import CaptureError, ClosedError, OutOfMemoryError, refused, size_text
from streamalloc.core.internal import (
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
    direct_handle,
    holders,
    is_captured,
    library_stream,
    look,
    raw_handle,
    record_uncaptured,
    shared_state,
)
from streamalloc.core.properties import MemLocation, checked_size, checked_type
from streamalloc.core.resource import Closes
from streamalloc.core.session import session_of
from streamalloc.driver.internal import cuda
from streamalloc.formats.html import Row, Shown, gauge, mib
from streamalloc.pool.cache.blocks import CachedBlock, CachedBuffer, SharedBehind, filled
from streamalloc.pool.cache.state import MAX_RETURNING, CacheState, StreamCache
from streamalloc.pool.ending import pools_of
from streamalloc.pool.pool import MemoryPool

_NOWHERE = object()
"""Key under which no stream has free lists: with it, each allocation takes the checked way."""
_ADDRESSES = 1 << 48
"""Bytes that addresses of 48 bits reach. A larger size takes the checked way, which refuses it or asks the pool."""


class CacheStatistics(NamedTuple):
    """Memory of a cache and its pool in bytes, and the number of misses.

    :meth:`CachingAllocator.statistics` returns it.
    """

    reserved: int
    """Bytes of the device or host that the pool holds."""
    reserved_high: int
    """Most bytes that it held since the last reset."""
    used: int
    """Bytes allocated from the pool, in use or cached; sizes are class sizes."""
    used_high: int
    """Most bytes allocated since the last reset."""
    in_use: int
    """Bytes allocated from the pool and not cached."""
    cached: int
    """Bytes that were freed and can be reused."""
    misses: int
    """Allocations that found no cached block and called the pool."""


class CachingAllocator(Allocator, Closes, Shown):
    """A cache of free memory over a pool, for programs that allocate and free often.

    Use it like the pool: the same :meth:`allocate`, the same :class:`Buffer`. Freed or dropped memory is reused on its
    stream without a driver call. This works on streams of :meth:`Device.create_stream`, on the legacy default stream,
    on the per-thread default stream for each thread, and on streams of PyTorch, CuPy, Numba and cuda.core. Memory that
    is freed on another stream returns to its own stream after an event.

    Other code may capture a stream that it knows: a library's stream, the per-thread default stream, and a stream whose
    handle it got (:attr:`Stream.handle`, ``__cuda_stream__``, an exported array). On such a stream each allocation
    first asks whether the stream is being captured (``cuStreamIsCapturing``). A free does not ask, because no graph may
    use memory after the program has freed it.

    Sizes are rounded up to classes: multiples of 512 bytes up to 8 KiB, then eight classes for each power of two. From
    4 KiB on, at most a ninth of a block is wasted. If a class has no free block, the request takes the smallest larger
    one, of up to five times the size. Blocks are never split or merged: the pool does that.

    If the pool would grow beyond an allowance, all free blocks first return to it. The allowance is 1.05 times the sum
    of the streams' peaks, in steps of 32 MiB. Each such release raises the factor by 1/32 for each stream, up to 2 for
    one stream and 2.5 for several.

    Not cached are:

    * allocations in captures, which become nodes of the graph;
    * all memory of a driver of :func:`streamalloc.driver.checked`, which must record each allocation;
    * a buffer that is shared with other processes: it leaves the cache for good, because its free waits for importers.

    All free blocks return to the pool when memory runs out; the allocation is then attempted again. The blocks of one
    stream return when it is closed or dropped. Those of a per-thread default stream return when its thread ends, and
    those of a library's stream when it is no longer among the 64 latest ones.

    Threads may use one cache at the same time. Handles for other processes, access and attributes are those of
    :attr:`pool`.

    Parameters
    ----------
    pool
        The pool of the memory. Without a release threshold it releases memory to the device at every synchronisation.
        Cached memory counts as used in the pool's figures.
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

    __slots__ = ("_dropped", "_key", "_state", "limit", "pool")

    pool: MemoryPool
    """The pool of the memory."""
    limit: int
    """The most bytes of the pool that may be used, cached memory included; 0 for none. It can be assigned."""

    def __init__(self, pool: MemoryPool, *, limit: int | str = 0) -> None:
        checked_type("pool", pool, MemoryPool)
        most = checked_size("limit", limit)
        if pool.closed:
            raise ClosedError(f"{pool!r} was closed")
        session = session_of(pool)
        self.pool = pool
        self._state = self._make_state()
        self.limit = most
        self._key = self._state.key
        """Key of the free lists of this cache. Under any other key a stream has no lists."""
        self._dropped: deque[CachedBlock] = self._state.dropped
        """Blocks of dropped buffers; see :class:`CacheState`."""
        self.location: MemLocation = pool.location
        self._bind(session, None, None)
        deferred_queue(session).end_with(self, self._state)
        pools_of(session).caches.add(self)

    def _make_state(self) -> CacheState:
        return CacheState(self.pool)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, or the pool was closed."""
        return self._state.closed

    def allocate(self, nbytes: int | str, stream: StreamLike) -> Buffer:
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
            The size is not an integer or out of range, or ``stream`` is not a stream or belongs to another driver.
        ClosedError
            The cache, its pool or the stream was closed.
        """
        ordered = stream if isinstance(stream, Stream) else library_stream(stream, self._session)
        lists = ordered.free_lists.get(self._key)
        # The stream has no free lists yet, or is of another driver. The checked way refuses a stream of another driver:
        # this driver would crash on its handle.
        if lists is None:
            return self._allocate_checked(nbytes, stream)
        # Memory of a free list needs no driver call, and so no context for a default stream.
        usable = ordered.ready(True) is not None if ordered.capturable else ordered.caller is True
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
                buffer._shared = None
                return buffer
        return self._allocate_checked(nbytes, stream, ordered if usable else None)

    @property
    def blocks(self) -> int:
        """Number of blocks that the cache holds, free or in buffers."""
        return len(self._state.blocks)

    def statistics(self) -> CacheStatistics:
        """Return the pool's figures (``cuMemPoolGetAttribute``), the bytes that are cached and in use, and the number
        of misses. Raises ClosedError if the pool was closed.
        """
        self._state.collect_dropped()
        # Read the pool first. That attempts deferred frees, which change the cached bytes.
        own = self.pool.statistics()
        cached = self._state.cached
        return CacheStatistics(*own, max(own.used - cached, 0), cached, self._state.misses)

    def reset_peaks(self) -> None:
        """Set the pool's high-water marks to the bytes reserved and used now (``cuMemPoolSetAttribute``)."""
        self.pool.reset_peaks()

    def trim(self, keep: int | str = 0) -> int:
        """Return all cached memory to the pool (``cuMemFreeAsync``), and trim the pool down to ``keep`` bytes
        (:meth:`MemoryPool.trim`). Returns the bytes released.

        The host waits for no stream. Frees on a stream with unfinished work are pending, and lead to a
        :class:`PendingFreesWarning`: synchronise with the stream and trim again.
        """
        checked_size("keep", keep)
        self._check_open()
        self._state.collect_dropped()
        self._state.flush()
        self._state.forget_peaks()
        return self.pool.trim(keep)

    def close(self) -> None:
        """Return all cached memory to the pool (``cuMemFreeAsync``), and stop caching; idempotent. Live buffers stay
        valid, and their frees return the memory to the pool.
        """
        if self._state.closed:
            return
        self._state.closed = True
        # The item below is not attempted during a capture. Until then no stream has lists under the new key.
        self._key = _NOWHERE
        self._state.collect_dropped()
        deferred_queue(self._session).end(self._state)

    def _allocate_checked(self, nbytes: int | str, stream: StreamLike, ready: Stream | None = None) -> Buffer:
        """Allocate if no free list serves the request directly. ``ready``: the stream as an object, if it is ready and
        not captured; None: it is resolved and checked here.
        """
        state, ordered, cache = self._state, ready, None
        size = nbytes if type(nbytes) is int and 0 < nbytes < _ADDRESSES else 0
        # A cache that was closed or is watched, or a forked child's, has another key.
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
                captured = is_captured(ordered)
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
            # Without a home the block takes the checked way, which notifies the watchers of its free.
            block.home = None
            for watcher in state.watchers:
                watcher.allocated(self, block.address, size, raw_handle(ordered))
        return buffer

    def _caches(self, nbytes: int, ordered: Stream) -> bool:
        """Whether an allocation of ``nbytes`` bytes on ``ordered``, which is not being captured, is served from the
        cache.
        """
        # With cached memory, a checking driver could not tell which use belongs to which allocation.
        if not nbytes or self._state.session.listener is not None:
            return False
        # Without an owner, the stream can end without notice, and the driver may give its handle to another stream.
        return not isinstance(ordered, LibraryStream) or ordered.owned

    def _allocate_past(self, nbytes: int, ordered: Stream, captured: bool) -> Buffer:
        """Allocate from the pool. If memory runs out, the pool makes the cache return its free blocks. Raises
        OutOfMemoryError if the limit stays exceeded after the cache has returned them. ``captured``: the stream is
        being captured, and the limit does not count.
        """
        if not captured and not self._limit_allows(nbytes):
            self._state.flush()
            used = self.pool.attributes.used_mem_current
            if used + nbytes > self.limit:
                raise self._over_limit(nbytes, used)
        return self.pool.allocate(nbytes, ordered)

    def _make_room(self, stream: Stream) -> bool:
        self._state.collect_dropped()
        return bool(self._state.flush())

    def _limit_allows(self, nbytes: int) -> bool:
        return not self.limit or self.pool.attributes.used_mem_current + nbytes <= self.limit

    def _over_limit(self, nbytes: int, used: int) -> OutOfMemoryError:
        why = f"the limit of {size_text(self.limit)} leaves no room for {size_text(nbytes)}"
        figures = {"requested": nbytes, "used": used, "limit": self.limit}
        held = holders(self._session, self.location, (self.pool,))
        return refused(OutOfMemoryError, self._alloc_name, why, **figures, holders=held)

    # -- frees that no free list takes directly ------------------------------------------------------------

    def _return_home(self, buffer: CachedBuffer, block: CachedBlock, stream: Stream) -> bool:
        """Queue a block to return to its own stream, behind an event on the stream of the free.

        Returns False if the block must be freed in another way.
        """
        cache = block.size_class.owner
        if len(cache.returning) >= MAX_RETURNING:
            cache.collect()
        if len(cache.returning) >= MAX_RETURNING or cache.ended:
            return False
        event = stream.record() if direct_handle(stream, self._session) else record_uncaptured(stream)
        if event is None:
            return False
        # Only the first of two threads that free the buffer still finds the block in it.
        if buffer._ptr is block:
            buffer._ptr = None
            cache.put_behind(event, block)
        return True

    def _free_cached(self, buffer: CachedBuffer, ordered: Stream) -> None:
        """Free a buffer on ``ordered``, a checked stream. On the block's own stream the block goes to the free list.
        Otherwise it returns to its own stream behind an event of ``ordered``, or, if that is not possible, to the pool.
        """
        state = self._state
        block, watchers = buffer._ptr, state.watchers
        cache: StreamCache = block.size_class.owner
        if not state.closed and state.of(ordered) is cache:
            # First, because from ``put`` on a finaliser may free the block without a notification.
            for watcher in watchers:
                watcher.freed(block.address, raw_handle(ordered))
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
        buffer._shared = None

    def _leave_cache(self, buffer: CachedBuffer) -> Buffer:
        """Move a buffer's memory out of the cache, to a buffer of the pool, and return that. A later free of ``buffer``
        frees the pool's buffer.
        """
        state = shared_state(buffer)
        if isinstance(state, SharedBehind):
            return state.behind
        block = buffer._ptr
        if block is None:
            return buffer
        behind: PoolBuffer = filled(PoolBuffer, self.pool, None, buffer._nbytes, buffer.stream)
        pointer = cuda.CUdeviceptr(block.address)
        shared = (SharedBehind(behind), pointer)
        self._state.blocks.pop(block.address, None)
        if buffer._ptr is block:
            behind._ptr = pointer
            buffer._shared = shared
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
