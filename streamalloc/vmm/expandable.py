"""A cache that reserves hardly more memory than is in use, because its memory can move to other addresses.

*One range of addresses.* A free block stays whole, in a free list of :mod:`streamalloc.pool.cache`, for the next
request of its size. If the list is empty, the request merges free blocks of its size and above into free ranges, and
takes the smallest free range that is large enough. If there is none, smaller blocks of more than 128 KiB are merged,
too. Blocks of up to 128 KiB are merged only if memory is short.

*Memory at the addresses that need it.* Memory is created in chunks, which are mapped at the addresses that blocks use.
All chunks together grow up to the *allowance*: 1.03 times the highest number of bytes in use at once. A request that
needs more takes free ranges of other streams, and moves chunks of free ranges to addresses without memory. The cache
grows beyond the allowance only if this is not enough. A mapping of any size costs the driver about 50 us, so the size
of new chunks grows with the memory of the cache.

*In stream order.* A chunk that moves also stays mapped at its old addresses, where the stream's earlier work may still
use it. So neither the host nor the stream waits. The old addresses are unmapped once an event after this work has
completed, because work at an unmapped address breaks the context. If another stream had the memory, the requesting
stream waits for that stream's work.

*Two locks.* ``lock`` guards the free ranges. Each request that finds no free block takes this lock, so no driver call
that may take long is made under it. ``growing`` guards addresses and chunks, and is held during such driver calls.
Other threads, which need only ``lock``, continue meanwhile. So before these calls the ranges in question are removed
from the free ranges.
"""

from __future__ import annotations

import contextlib
import functools
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator

from streamalloc.core.errors import CaptureError, ClosedError, NotReadyError, OutOfMemoryError
from streamalloc.core.internal import (
    Buffer,
    Device,
    Event,
    Stream,
    record_uncaptured,
    unless_busy,
)
from streamalloc.core.properties import MemAccess, MemHandleType, MemLocation, MemLocationType, checked_size
from streamalloc.core.session import session_of
from streamalloc.driver.internal import RLock
from streamalloc.pool import MemoryPool
from streamalloc.pool.internal import (
    CachedBlock,
    CachedBuffer,
    CacheState,
    CacheStatistics,
    CachingAllocator,
    PlainBuffer,
    PlainEnd,
    SharedBehind,
    SizeClass,
    StreamCache,
    end_plain,
)
from streamalloc.vmm.access import Rights
from streamalloc.vmm.address_range import AddressRange
from streamalloc.vmm.physical_memory import MemorySpec, properties_for, spec_of
from streamalloc.vmm.reservation import START, STOP, MappedBytes, overlapping

_ALLOWANCE = 1.03
"""Ratio of the allowance to the highest number of bytes in use at once. With a ratio of 1, each growth would move
chunks.
"""
_ADDRESSES = 4
"""The reserved addresses are this multiple of the device's memory. More than 1 is needed, because moved chunks leave
addresses without memory.
"""
_SMALLEST_SHARE = 96
"""A new chunk has at most a 96th of the cache's memory. Larger chunks would waste memory after the last block, smaller
chunks would need more driver calls.
"""
_LARGEST_CHUNK = 128 << 20
_SMALL, _SLAB = 128 << 10, 2 << 20
"""Blocks of up to ``_SMALL`` bytes are cut from slabs, which are free ranges of ``_SLAB`` bytes."""
_SHIFT = 48
_OFFSET = (1 << _SHIFT) - 1  # A free range is one int: size in bits 48 and up, offset in bits 0 to 47.
_QUERIES = 1 << 8
"""Number of queries of an event after which its stream counts as busy and keeps its memory. The event of an idle stream
completes within fewer queries.
"""


class FreeRanges:
    """Free ranges of addresses with memory. Starts and ends of ranges are offsets in bytes. Adjacent ranges are merged,
    and :meth:`cut` uses the smallest range that is large enough.

    A range is free only if it is in the list by size. It is removed from this list before it is removed from the two
    dicts, and added after it. So an exception of a signal handler in between may lose the range, but never gives it to
    two owners.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        """The free ranges, sorted, each as one int with size and offset. The comparison of ints runs no Python code, so
        no signal handler can interrupt an insertion.
        """
        self._starts: dict[int, int] = {}
        """Start of each range by its end. A range that is not in :attr:`_sizes` is not free any more."""
        self._stops: dict[int, int] = {}
        """End of each range by its start. A range that is not in :attr:`_sizes` is not free any more."""

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield start and end of each free range, the largest range first."""
        for key in reversed(self._sizes[:]):
            yield key & _OFFSET, (key & _OFFSET) + (key >> _SHIFT)

    def cut(self, nbytes: int) -> int | None:
        """Remove the first ``nbytes`` bytes of the smallest range that is large enough, and return the offset of these
        bytes; None if no range is large enough.
        """
        sizes = self._sizes
        at = bisect_left(sizes, nbytes << _SHIFT)
        if at == len(sizes):
            return None
        key = sizes.pop(at)
        start = key & _OFFSET
        rest = key - (nbytes << _SHIFT)
        stop = self._stops.pop(start, 0)
        if rest > _OFFSET:
            at = start + nbytes
            self._stops[at] = stop
            self._starts[stop] = at
            insort(sizes, rest + nbytes)
        else:
            self._starts.pop(stop, None)
        return start

    def add(self, start: int, stop: int) -> None:
        """Add the range from ``start`` to ``stop``, and merge it with adjacent free ranges."""
        before, after = self._starts.get(start), self._stops.get(stop)
        if before is not None and self.remove(before, start):
            start = before
        if after is not None and self.remove(stop, after):
            stop = after
        self._stops[start] = stop
        self._starts[stop] = start
        insort(self._sizes, (stop - start) << _SHIFT | start)

    def update(self, parts: Iterable[tuple[int, int]]) -> None:
        """Add ``parts``, pairs of start and end, as :meth:`add` does."""
        for part in parts:
            self.add(*part)

    def remove(self, start: int, stop: int) -> bool:
        """Remove the free range from ``start`` to ``stop``. Returns False if there is no such free range."""
        at = self._find(start, stop)
        if at is not None:
            del self._sizes[at]
        self._stops.pop(start, None)
        self._starts.pop(stop, None)
        return at is not None

    def without(self, part: tuple[int, int], start: int, stop: int) -> tuple[int, int]:
        """Remove the bytes from ``start`` to ``stop`` from the free range ``part``. Returns start and end of the bytes
        of ``part`` before ``start``. If ``part`` is not free any more, nothing is removed.
        """
        if self.remove(*part):
            if part[0] < start:
                self.add(part[0], start)
            if stop < part[1]:
                self.add(stop, part[1])
        return part[0], start

    def start_of(self, stop: int) -> int:
        """Return the start of the free range that ends at ``stop``; ``stop`` if no free range ends there."""
        start = self._starts.get(stop, stop)
        return stop if self._find(start, stop) is None else start

    def end_of(self, start: int) -> int:
        """Return the end of the free range that begins at ``start``; ``start`` if no free range begins there."""
        stop = self._stops.get(start, start)
        return start if self._find(start, stop) is None else stop

    def _find(self, start: int, stop: int) -> int | None:
        """Return the index of the range from ``start`` to ``stop`` in the list by size; None if it is no free range."""
        key = (stop - start) << _SHIFT | start
        at = bisect_left(self._sizes, key)
        return at if at < len(self._sizes) and self._sizes[at] == key else None


class _Segment:
    """The address range of a cache, and the chunks of physical memory that are mapped there. Offsets are in bytes."""

    def __init__(self, device: Device) -> None:
        self.spec: MemorySpec = spec_of(session_of(device), properties_for(device, MemHandleType.NONE, False, False))
        self.page: int = self.spec.granularity
        total = device.memory_info()[1]
        self.range = AddressRange(self.spec.round_up(_ADDRESSES * total), driver=device.driver)
        self.range._owned = True
        self.base: int = self.range.address
        self.most: int = self.range.nbytes
        """Size of the address range in bytes."""
        self._rights: Rights = {device.location: MemAccess.READWRITE}
        self.top: int = 0
        """Highest offset that an allocation has reached so far, rounded up to a whole page. It never decreases."""
        self.chunks: list[MappedBytes] = []
        """Mappings of the chunks in the order of addresses. Addresses between the chunks have no memory."""
        self.left: deque[tuple[Event, MappedBytes, bool]] = deque()
        """Old mappings, each with the event after which it is unmapped, and whether its memory is then released. The
        memory of a moved chunk is not released, because it is mapped at its new offset.
        """
        self.leaving: int = 0
        """Bytes of chunks whose release waits for an event. :attr:`reserved` still includes these bytes."""
        self.reserved: int = 0
        """Bytes of all chunks, including chunks whose release waits for an event."""
        self.reserved_high: int = 0
        """Highest value of :attr:`reserved` since the peaks were reset."""

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the parts without memory between two offsets as pairs of start and end, in whole pages and in
        order.
        """
        start, stop, found = start - start % self.page, stop + -stop % self.page, []
        for chunk in overlapping(self.chunks, start, stop):
            if chunk.offset > start:
                found.append((start, chunk.offset))
            start = chunk.stop
        return [*found, (start, stop)] if start < stop else found

    def backed(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the parts with memory between two offsets as pairs of start and end, in order."""
        edges = [start, *(edge for gap in self.gaps(start, stop) for edge in gap), stop]
        return [(first, last) for first, last in zip(edges[::2], edges[1::2], strict=True) if first < last]

    def chunk_within(self, start: int, stop: int, most: int) -> MappedBytes | None:
        """Return the last chunk that lies between two offsets and has at most ``most`` bytes; None if there is none."""
        inside = self.chunks[bisect_left(self.chunks, start, key=START) : bisect_right(self.chunks, stop, key=STOP)]
        return next((one for one in reversed(inside) if one.nbytes <= most and not one.gone), None)

    @property
    def step(self) -> int:
        """Size of a new chunk in bytes, which grows with the memory of the cache."""
        return max(self.page, min(1 << (self.reserved // _SMALLEST_SHARE).bit_length() >> 1, _LARGEST_CHUNK))

    def created(self, at: int, nbytes: int) -> MappedBytes:
        """Create a chunk of ``nbytes`` bytes (``cuMemCreate``). Return an entry for its mapping at the offset ``at``,
        which :meth:`map` then makes. Raises OutOfMemoryError, CudaError.
        """
        entry = MappedBytes(self.range._node, at, at + nbytes, {}, self.spec)
        for watcher in self.spec.allocations.watchers:
            watcher.to_be_mapped(self.base + at, nbytes)
        self.spec.create(entry, nbytes)
        return entry

    def moved(self, chunk: MappedBytes, at: int, after: Event) -> MappedBytes:
        """Remove a chunk from its offset. Return an entry for its mapping at the offset ``at``, which :meth:`map` then
        makes. The old addresses are unmapped once the event ``after`` has completed.
        """
        entry = MappedBytes(self.range._node, at, at + chunk.nbytes, {}, chunk.spec)
        if self.spec.allocations.watchers or chunk._memory is not None:
            entry._memory = chunk.as_object()
        self._take_out(chunk, after, False)
        entry._raw, chunk._raw = chunk._raw, None
        self.reserved -= chunk.nbytes
        return entry

    def map(self, entries: Iterable[MappedBytes]) -> list[MappedBytes]:
        """Map new adjacent chunks (``cuMemMap``), and give the device access (``cuMemSetAccess``). If a call fails,
        none stays mapped. Returns the mappings. Raises CudaError, and the errors of the iterator.
        """
        made = self.range._node.map(entries, self._rights)
        for entry in made:
            insort(self.chunks, entry, key=START)
            self.reserved += entry.nbytes
        self.reserved_high = max(self.reserved_high, self.reserved)
        return made

    def _take_out(self, chunk: MappedBytes, after: Event, releases: bool) -> None:
        del self.chunks[bisect_left(self.chunks, chunk.offset, key=START)]
        self.left.append((after, chunk, releases))

    def release(self, chunk: MappedBytes, after: Event) -> None:
        """Have :meth:`unmap_left` unmap and release a chunk once the event ``after`` has completed."""
        self._take_out(chunk, after, True)
        self.leaving += chunk.nbytes

    def unmap_left(self) -> None:
        """Unmap the mappings in :attr:`left`, in order, until an event has not completed (``cuMemUnmap``). Release the
        memory of those that are marked for release. Raises CudaError.
        """
        passed: dict[Event, bool] = {}
        ready = []
        for one in self.left:
            event = one[0]
            if event not in passed:
                passed[event] = event.query()
            if not passed[event]:
                break
            ready.append(one)
        # The chunks are sorted by address, because one driver call unmaps adjacent chunks.
        self.range._node.unmap(sorted((chunk for _, chunk, _ in ready if not chunk.gone), key=START))
        for _, chunk, releases in ready:
            self.left.popleft()
            if releases:
                self.leaving -= chunk.nbytes
                self.reserved -= chunk.nbytes
                chunk.release_handle()

    def is_left(self, start: int, stop: int) -> bool:
        """Return whether memory that is not in :attr:`chunks` is mapped between two offsets: chunks that were moved or
        released but not unmapped yet, or that an exception of a signal handler has left. ``cuMemMap`` would fail there.
        """
        return len(self.range._node.touching(start, stop)) > len(overlapping(self.chunks, start, stop))

    def drop(self) -> None:
        """Drop the address range. The deferred queue releases the range and its memory once the work that is queued now
        is done.
        """
        del self.range
        self.chunks, self.reserved = [], 0
        self.left.clear()


class _Ranges(StreamCache):
    """The blocks of one stream, and the free ranges that the stream's next work can use without waiting."""

    __slots__ = ("free_lists", "ranges", "small")

    cache: _State

    def __init__(self, cache: CacheState, stream: Stream) -> None:
        self.ranges = FreeRanges()
        """Free ranges outside of slabs."""
        self.small = FreeRanges()
        """Free parts of slabs, for small blocks. Small blocks in other free ranges would prevent the move of large
        chunks.
        """
        self.free_lists: tuple[list[int], list[list[CachedBlock]]] = [], []
        """Block sizes of the size classes in ascending order, and the free lists of these classes. Both are set by one
        assignment, because some readers hold no lock.
        """
        super().__init__(cache, stream)

    def take(self, wanted: SizeClass, nbytes: int) -> CachedBlock | None:
        """Remove and return a free block of the class ``wanted``, or cut one from a free range. Returns None if neither
        is possible.
        """
        if self.returning:
            self.collect()
        self.serve(nbytes, wanted.free)
        if wanted.free:
            with contextlib.suppress(IndexError):  # Another thread has taken the last block.
                return wanted.free.pop()
        return self.cache.cut(self, wanted)

    def filled(self, least: int) -> Iterator[list[CachedBlock]]:
        """Yield the free lists that have blocks of at least ``least`` bytes, the smallest blocks first."""
        sizes, free_lists = self.free_lists
        if len(sizes) != len(self.classes):
            # The dict is copied, because a stream that ends on another thread may remove classes meanwhile.
            classes = dict(sorted(self.classes.items()))
            sizes, free_lists = [*classes], [one.free for one in classes.values()]
            self.free_lists = sizes, free_lists
        return filter(None, free_lists[bisect_left(sizes, least) :])

    @property
    def listed(self) -> int:
        """Bytes of the blocks in free lists."""
        return sum(block.size_class.nbytes * len(free) for free in self.filled(0) for block in free[:1])

    def merge(self, least: int) -> None:
        """Merge free blocks of at least ``least`` bytes into the free ranges. The caller holds the cache's ``lock``."""
        state = self.cache
        for free in self.filled(least):
            base, forget = state.segment.base, state.blocks.pop
            state.used_high = max(state.used_high, state.used)
            try:
                one = free[-1].size_class
                nbytes = one.nbytes
                add = self.ranges.add if nbytes > _SMALL else self.small.add
                while free:
                    address = free.pop().address
                    forget(address, None)
                    one.count -= 1
                    state.used -= nbytes
                    add(address - base, address - base + nbytes)
            except IndexError:  # Another thread has taken the last block.
                continue
        if not least:
            self._join_small(_SLAB)

    def _join_small(self, least: int) -> None:
        """Move free parts of slabs with at least ``least`` bytes from :attr:`small` to :attr:`ranges`, so that large
        blocks can be cut from these parts.
        """
        for part in self.small:
            if part[1] - part[0] < least:
                break  # The largest part comes first, so all later parts are too small.
            if self.small.remove(*part):
                self.ranges.add(*part)

    def idle(self) -> Event | None:
        """Record an event after all work of the stream, and return the event if it completes within ``_QUERIES``
        queries. Return None if the stream is busy, captured, closed or a per-thread default stream.
        """
        stream = self.stream()
        if stream is not None and not self.per_thread:
            with contextlib.suppress(CaptureError, ClosedError, NotReadyError):
                event = record_uncaptured(stream)
                if event is not None and any(event.query() for _ in range(_QUERIES)):
                    return event
        return None

    def attempt(self) -> bool:
        self.serve_no_more()
        if self.ranges or self.small:  # Without free ranges other streams get nothing.
            with contextlib.suppress(CaptureError, NotReadyError):
                self.ordered(self.release)
            if self.ranges or self.small:
                return False
        return super().attempt()

    def release(self, ordered: Stream) -> None:
        """Give the free ranges to other streams, which may use them once the work that is queued now on stream
        ``ordered`` is done.
        """
        self.collect_behind(ordered)
        event = ordered.record()
        with self.cache.lock:
            self.merge(0)
            self._join_small(0)
            ranges, self.ranges = self.ranges, FreeRanges()
            self.cache.ended.append((event, ranges))


class _State(CacheState):
    """The address range, chunks and stream caches of an :class:`ExpandableCache`."""

    kind = _Ranges
    finer = 3

    def __init__(self, pool: MemoryPool) -> None:
        super().__init__(pool)
        self.segment = _Segment(Device(pool.location.id, driver=self.session.driver))
        self.ended: deque[tuple[Event, FreeRanges]] = deque()
        """Free ranges of streams that have ended, each with an event after the stream's work."""
        self.used: int = 0
        """Bytes of all blocks, in use or in free lists."""
        self.used_high: int = 0
        """Highest value of :attr:`used`, as measured at merges."""
        self.peak: int = 0
        """Highest number of bytes in use at once, as counted when a request needs memory. The allowance depends on this
        number.
        """
        self.busy: bool = False
        """Whether a call is creating, moving or releasing memory. An allocation of a signal handler must not do so at
        the same time.
        """
        self.segment.spec.allocations.arenas.add(self)
        self._shut_after_fork()
        self.session.shut_with_me(self)

    def _shut_after_fork(self) -> None:
        """Create the locks anew, because the threads that held the old locks do not exist in a forked child."""
        self.lock = RLock()
        """Lock for the free ranges. No driver call that may take long is made under this lock, because each request
        without a free block takes it.
        """
        self.growing = RLock()
        """Lock for the segment. It is taken before ``lock``, and only by calls that create, move or release memory."""

    # -- blocks ----------------------------------------------------------------------------------------------

    def cut(self, cache: _Ranges, wanted: SizeClass) -> CachedBlock | None:
        """Cut a block of the class ``wanted`` from the free ranges of a stream, and return it; None if no range is
        large enough.
        """
        nbytes = wanted.nbytes
        with self.lock:
            if nbytes > _SMALL:
                cache.merge(nbytes)
                start = cache.ranges.cut(nbytes)
            else:
                start = cache.small.cut(nbytes)
                if start is None:
                    slab = cache.ranges.cut(_SLAB)
                    if slab is not None:
                        cache.small.add(slab, slab + _SLAB)
                        start = cache.small.cut(nbytes)
            if start is None:
                return None
            self.used += nbytes
            return self._new_block(self.segment.base + start, wanted)

    def keep_allowance(self, pool: MemoryPool, wanted: SizeClass) -> None:
        """Do nothing, because :meth:`buy` keeps the memory within the allowance."""

    def buy(self, upstream: MemoryPool, wanted: SizeClass, stream: Stream) -> CachedBlock | None:
        """Merge free blocks and cut a block of the class ``wanted`` from a free range. If this is not possible, move or
        create memory for the block (``cuMemMap``, ``cuMemCreate``). Returns None if there is no memory. The pool
        ``upstream`` is not used. Raises CudaError.
        """
        cache: _Ranges = wanted.owner
        if wanted.nbytes > self.segment.most:
            return None
        with self.lock:
            cache.merge(_SMALL + 1)
            block = self.cut(cache, wanted)
        if block is not None:
            return block
        with self.growing:
            if self.busy:
                return None
            self.busy = True
            try:
                with self.session.relaxed():
                    return self._found(cache, wanted, stream)
            finally:
                self.busy = False

    def _found(self, cache: _Ranges, wanted: SizeClass, stream: Stream) -> CachedBlock | None:
        nbytes, segment = wanted.nbytes if wanted.nbytes > _SMALL else _SLAB, self.segment
        needed = self.used - sum(one.listed for one in self.live()) + nbytes
        if self.limit and needed > self.limit:
            return None  # No move of chunks can help, and memory that is mapped for the request would stay.
        self.peak = max(self.peak, needed)
        # The first attempt keeps small blocks, so that small allocations stay fast. The second merges them. The third
        # exceeds the allowance.
        for least, exceeds in ((_SMALL + 1, False), (0, False), (0, True)):
            with self.lock:
                cache.merge(least)
                self._take_ended(cache)
            block = self.cut(cache, wanted)
            if block is None:
                if segment.reserved - segment.leaving + nbytes > self.most and not self.queue.captures:
                    with self.lock:
                        for one in self.live():
                            one.merge(least)
                    block = self._borrowed(cache, wanted, nbytes, stream)
                limit = segment.most if exceeds else self.most
                block = block or self._extended(cache, wanted, nbytes, stream, limit)
            if block is not None:
                return block
        return None

    @property
    def most(self) -> int:
        """The allowance in bytes. All chunks together exceed this size only if moved chunks do not give enough
        memory.
        """
        most = int(self.peak * _ALLOWANCE) + self.segment.page
        return min(most, self.limit - self.segment.leaving) if self.limit else most

    def _borrowed(self, cache: _Ranges, wanted: SizeClass, nbytes: int, stream: Stream) -> CachedBlock | None:
        """Return a block from the free ranges of another stream; None if these do not suffice. The first attempt takes
        one range that is large enough. The second takes all ranges of a stream and merges them with the ranges of
        ``stream``. ``stream`` waits for the other stream's work (``cuStreamWaitEvent``).
        """
        others = [one for one in self.live() if one is not cache and not one.per_thread]
        for all_ranges in (False, True):
            for owner in others:
                with self.lock:
                    if all_ranges:
                        parts, owner.ranges = [*owner.ranges], FreeRanges()
                    else:
                        start = owner.ranges.cut(nbytes)
                        parts = [] if start is None else [(start, start + nbytes)]
                if parts:
                    to = owner
                    try:
                        if self._after(owner, stream) is not None:
                            to = cache
                    finally:
                        self._give(to, parts)
                    block = self.cut(cache, wanted)
                    if block is not None:
                        return block
        return None

    def _give(self, to: _Ranges, parts: Iterable[tuple[int, int]]) -> None:
        """Add ``parts``, pairs of start and end, to the free ranges of the stream cache ``to``. If ``to`` has ended,
        the deferred queue gives its ranges to other streams.
        """
        with self.lock:
            to.ranges.update(parts)
        if to.ended:
            self.queue.submit(to)

    def _after(self, owner: _Ranges, stream: Stream) -> Event | None:
        """Have ``stream`` wait for the work of ``owner``'s stream, and return an event on ``stream`` after this wait.
        Return None if one of the two streams is captured or closed.

        The caller must take the memory of ``owner`` before this call. The event does not cover memory that ``owner``
        frees later, which two streams would then write at the same time.
        """
        other = owner.stream()
        if other is not None:
            with contextlib.suppress(CaptureError, ClosedError, NotReadyError):
                if other is not stream:
                    event = record_uncaptured(other)
                    if event is None:
                        return None
                    stream.wait(event)
                return record_uncaptured(stream)
        return None

    def _take_ended(self, cache: _Ranges) -> None:
        """Give ``cache`` the free ranges of ended streams whose work is done (``cuEventQuery``). The caller must hold
        ``lock``.
        """
        while self.ended and self.ended[0][0].query():
            cache.ranges.update(self.ended.popleft()[1])

    def _extended(
        self, cache: _Ranges, wanted: SizeClass, nbytes: int, stream: Stream, limit: int
    ) -> CachedBlock | None:
        """Map memory at addresses between free ranges of the stream, or after the last chunk, and return a block there.
        Return None if there is no memory or no addresses. ``limit`` is the largest number of bytes of all chunks.
        """
        ranges, segment = cache.ranges, self.segment
        segment.unmap_left()
        with self.lock:
            start = self._place(ranges, nbytes)
            if start is None:
                return None
            stop = start + nbytes
            if stop > segment.top:
                whole = segment.top + -(-(stop - segment.top) // segment.step) * segment.step
                if segment.reserved - segment.leaving + whole - start <= self.most:
                    stop = whole
                segment.top = stop + -stop % segment.page
            for first, last in segment.backed(start, stop):
                ranges.without((first, ranges.end_of(first)), first, last)
        backed = False
        try:
            backed = self._back(start, stop, cache, stream, limit)
        finally:
            with self.lock:
                for first, last in segment.backed(start, stop):
                    ranges.add(first, last)
        return self.cut(cache, wanted) if backed else None

    def _place(self, ranges: FreeRanges, nbytes: int) -> int | None:
        """Return the offset at which the fewest new bytes of memory give ``nbytes`` free bytes; None if no addresses
        are left.

        A gap is a range of addresses without memory. The addresses after the last chunk are the last gap.
        """
        segment = self.segment
        gaps, page, place, least = segment.gaps(0, segment.most), segment.page, None, segment.most
        for at, (first, last) in enumerate(gaps):
            start, stop = ranges.start_of(first), ranges.end_of(last)
            if last < segment.most and stop - nbytes >= first:
                # Larger than needed: use its end, because the free range after it then saves new memory.
                start = (stop - nbytes) // page * page
            end, lacking, number = start + nbytes, 0, at
            while lacking < least:
                lacking += min(gaps[number][1], end + -end % page) - max(gaps[number][0], start)
                reached = ranges.end_of(gaps[number][1])
                if reached >= end:
                    if lacking < least and end <= segment.most and not segment.is_left(start, end):
                        place, least = start, lacking
                    break
                number += 1
                if number == len(gaps) or gaps[number][0] != reached:
                    break
        return place

    def _back(self, start: int, stop: int, cache: _Ranges, stream: Stream, limit: int) -> bool:
        """Map memory at all addresses from ``start`` to ``stop`` that have none. The rest of the last page becomes a
        free range. Returns whether there was enough memory, with at most ``limit`` bytes of chunks in total.
        """
        segment = self.segment
        while gaps := segment.gaps(start, stop):
            at, end = gaps[-1]
            with self.lock:
                steps, is_enough = self._plan(at, end, cache, limit)
            moves = any(chunk for chunk, _ in steps)
            event = self._after(cache, stream) if moves and is_enough else None
            try:
                if not is_enough or (moves and event is None):
                    return False
                with contextlib.suppress(OutOfMemoryError):
                    for entry in segment.map(self._chunks(steps, at, event)):
                        at = entry.stop
                if at < end:
                    limit = 0  # No memory is left: only moves help.
            finally:
                self._give(cache, [(chunk.offset, chunk.stop) for chunk, _ in steps if chunk])
            if at > stop:
                self._give(cache, [(stop, at)])
        return True

    def _plan(self, at: int, end: int, cache: _Ranges, limit: int) -> tuple[list[tuple[MappedBytes | None, int]], bool]:
        """Choose the memory for the addresses from ``at`` to ``end``, with at most ``limit`` bytes of chunks in total.
        The caller must hold ``lock``.

        Returns a list of steps, and whether they cover all of these addresses. A step is a chunk to move and its size,
        or None and the size of a chunk to create. Chunks to move are removed from their free ranges.
        """
        segment = self.segment
        steps: list[tuple[MappedBytes | None, int]] = []
        reserved = segment.reserved - segment.leaving
        if self.limit:
            limit = min(limit, self.limit - segment.leaving)
        while at < end:
            nbytes = min(segment.step, end - at)
            chunk = self._taken(cache, end - at) if reserved + nbytes > min(self.most, limit) else None
            if chunk is None:
                nbytes = min(nbytes, (limit - reserved) // segment.page * segment.page)
                reserved += nbytes
            else:
                nbytes = chunk.nbytes
            if nbytes <= 0:
                return steps, False
            steps.append((chunk, nbytes))
            at += nbytes
        return steps, True

    def _taken(self, cache: _Ranges, most: int) -> MappedBytes | None:
        """Remove a chunk of at most ``most`` bytes from a free range of ``cache``, and return the chunk. Return None if
        there is none, or while this package captures a stream.
        """
        # Not during a capture: the event after the chunk's work could be recorded in the capture, and never complete.
        for part in () if self.queue.captures else cache.ranges:
            if part[1] - part[0] < self.segment.page:
                break
            chunk = self.segment.chunk_within(*part, most)
            if chunk is not None:
                cache.ranges.without(part, chunk.offset, chunk.stop)
                return chunk
        return None

    def _chunks(
        self, steps: list[tuple[MappedBytes | None, int]], at: int, event: Event | None
    ) -> Iterator[MappedBytes]:
        """Yield entries for the mappings of moved and created chunks, and remove their steps from the list. Stop
        without an error if the device has no memory, so that the chunks before are mapped.
        """
        with contextlib.suppress(OutOfMemoryError):
            while steps:
                chunk, nbytes = steps[0]
                entry = self.segment.moved(chunk, at, event) if chunk and event else self.segment.created(at, nbytes)
                del steps[0]
                at = entry.stop
                yield entry

    # -- giving back -----------------------------------------------------------------------------------------

    def flush(self) -> bool:
        """Release the chunks of free ranges whose work is done. Returns whether any chunk was released."""
        return bool(self.make_room())

    def make_room(self, keep: int = 0) -> int:
        """Release the chunks of free ranges whose work is done, but keep at least ``keep`` bytes of chunks
        (``cuMemUnmap``, ``cuMemRelease``). Returns the number of bytes released. Arenas that run out of memory also
        call this method, so it waits neither for work of streams nor for another thread.
        """
        return unless_busy(functools.partial(self._release_spare, keep), 0, self.growing)

    def _release_spare(self, keep: int) -> int:
        segment, before = self.segment, self.segment.reserved
        if self.busy or self.queue.captures:
            return 0
        self.busy = True
        try:
            with self.session.relaxed():
                self._release_idle(keep)
                segment.unmap_left()
        finally:
            self.busy = False
        return before - segment.reserved

    def _release_idle(self, keep: int) -> None:
        """Have :meth:`_Segment.unmap_left` release the chunks of all idle streams, but keep ``keep`` bytes of chunks.
        Any stream may take the free ranges that stay, because their work is done. Raises CudaError.
        """
        spare, after = FreeRanges(), None
        try:
            # The ranges of all streams are merged, because a chunk may reach from a range of one stream into another's.
            while self.ended and self.ended[0][0].query():
                after, ranges = self.ended.popleft()
                spare.update(ranges)
            for one in self.live():
                one.collect()
                # The ranges leave the stream cache before the record: the event would not cover memory that the stream
                # frees later.
                with self.lock:
                    one.merge(0)
                    ranges, one.ranges = one.ranges, FreeRanges()
                done = None
                try:
                    done = one.idle() if ranges else None
                finally:
                    if done is None:
                        self._give(one, ranges)
                if done is not None:
                    after = done
                    spare.update(ranges)
            if after is not None:
                self._release_parts(spare, after, keep)
        finally:
            if spare and after is not None:
                self.ended.append((after, spare))

    def _release_parts(self, ranges: FreeRanges, event: Event, keep: int) -> None:
        segment = self.segment
        for part in ranges:
            while chunk := segment.chunk_within(*part, segment.reserved - segment.leaving - keep):
                part = ranges.without(part, chunk.offset, chunk.stop)
                segment.release(chunk, event)

    def page_bytes(self, location: MemLocation) -> int:
        """Return 0, because all memory of this cache counts as mapped memory. For an arena, the method returns the
        bytes of its pages.
        """
        return 0

    def forget_peaks(self) -> None:
        super().forget_peaks()
        self.peak = 0

    def attempt(self) -> bool:
        done = super().attempt()
        if done:
            self.segment.drop()
        return done


class _BlockEnd(PlainEnd):
    """Queue item that returns a block to its cache after the work of a stream."""

    __slots__ = ("_block",)

    def __init__(self, cache: ExpandableCache, block: CachedBlock, stream: Stream) -> None:
        super().__init__(cache, "", block.address, stream, cache)
        self._block: CachedBlock | None = block

    def attempt(self) -> bool:
        done = super().attempt()
        block, self._block = (self._block, None) if done else (None, self._block)
        if block is not None:
            block.size_class.owner.put(block)
        return done


class ExpandableCache(CachingAllocator):
    """A cache that uses virtual memory to reserve hardly more device memory than is in use at once.

    Use it like a :class:`CachingAllocator`. If a block of the requested size is free, a request is as fast as with that
    class. Other requests split or merge free memory in about five microseconds, mostly without a driver call. ::

        with sa.MemoryPool(device) as pool, vmm.ExpandableCache(pool) as cache:
            with cache.allocate("64MiB", stream) as buffer:
                buffer.fill(0)

    *Memory.* The cache creates memory of its own and does not use the pool's. It reserves addresses for four times the
    device's memory (``cuMemAddressReserve``), and maps chunks of 2 MiB to 128 MiB there (``cuMemCreate``,
    ``cuMemMap``). Free blocks are split and merged. Sizes are rounded up to 64 size classes for each power of two.

    *Allowance.* All chunks together have at most 1.03 times the highest number of bytes in use at once on all streams.
    To keep this limit, a request takes free memory of another stream, or chunks of free ranges are moved to addresses
    without memory. The cache exceeds the limit only if this does not give enough memory.

    *Order.* If a stream takes memory that another stream has freed, it waits for the other stream's work
    (``cuStreamWaitEvent``). The host does not wait: a moved chunk stays mapped at its old addresses until the work
    there is done. A thread that reuses free memory does not wait for a thread that creates or releases memory.

    *Not cached.* Allocations in captures come from the pool. Without a ``limit``, so do requests for which the device
    has no memory. The cache's memory cannot be shared with other processes, and other devices have no access to it: use
    a :class:`CachingAllocator` for this. For streams, captures, threads, watchers and closing, the rules of
    :class:`CachingAllocator` hold.

    Parameters
    ----------
    pool
        A pool of one device's memory, for allocations that are not cached.
    limit
        Largest number of bytes of the cache's own memory; 0 for no limit. A request that would need more raises
        OutOfMemoryError.

    Raises
    ------
    TypeError, ValueError
        ``pool`` is not a pool of one device's memory, or ``limit`` is not a size.
    NotSupportedError
        The device has no virtual memory management.
    AddressSpaceError
        The process has no free range of addresses of four times the device's memory.
    ClosedError
        The pool was closed.
    """

    __slots__ = ()

    alloc_name = "cuMemCreate"
    _state: _State

    def __init__(self, pool: MemoryPool, *, limit: int | str = 0) -> None:
        if isinstance(pool, MemoryPool) and (pool.location.type is not MemLocationType.DEVICE or pool.managed):
            raise ValueError(f"{pool!r} has no memory of a device alone, which an ExpandableCache is for")
        super().__init__(pool, limit=limit)
        self.free_function = end_plain  # For buffers whose memory has left the cache.

    def _make_state(self) -> _State:
        return _State(self.pool)

    def statistics(self) -> CacheStatistics:
        """Return the statistics of the cache's own memory, in bytes. Memory of the pool is not included. The driver is
        not queried, so the call also works on a closed cache.

        ``reserved`` has the bytes of all chunks. ``cached`` has those of these bytes that no buffer uses: free blocks
        and free ranges of all streams, also of closed ones. ``used`` has the bytes of all blocks, in use or free, but
        not those of free ranges. ``misses`` counts the allocations for which there was no free block: their block was
        cut from a free range, got new memory, or came from the pool.
        """
        state = self._state
        state.collect_dropped()
        segment, used = state.segment, state.used
        in_use = used - state.cached
        cached = max(segment.reserved - segment.leaving - in_use, 0)
        figures = used, max(state.used_high, used), in_use, cached, state.misses
        return CacheStatistics(segment.reserved, segment.reserved_high, *figures)

    def reset_peaks(self) -> None:
        """Set ``used_high`` and ``reserved_high`` of :meth:`statistics` to the bytes that are used and reserved now."""
        state = self._state
        state.used_high, state.segment.reserved_high = state.used, state.segment.reserved

    def trim(self, keep: int | str = 0) -> int:
        """Release free memory to the driver until ``keep`` bytes of the cache's memory are left (``cuMemUnmap``,
        ``cuMemRelease``). Returns the number of bytes released.

        The host waits for no stream. Memory of a stream with unfinished work is not released: synchronise with the
        stream and trim again. Nothing is released during a capture by this package, or while another thread creates or
        releases memory. The allowance then begins anew: it depends on the bytes in use at later requests only. Raises
        ClosedError, CudaError, and TypeError or ValueError if ``keep`` is not a size.
        """
        least = checked_size("keep", keep)
        self._check_open()
        self._state.collect_dropped()
        self._state.forget_peaks()
        return self._state.make_room(least)

    def _allocate_past(self, nbytes: int, ordered: Stream, captured: bool) -> Buffer:
        if self.limit and not captured and self._caches(nbytes, ordered):
            raise self._over_limit(nbytes, self._state.segment.reserved)
        return super()._allocate_past(nbytes, ordered, captured)

    def _limit_allows(self, nbytes: int) -> bool:
        # `_plan` enforces the limit, because it can move chunks. With a checked driver nothing is cached, so the limit
        # is compared with the pool's memory, as in the base class.
        return self._state.session.listener is None or super()._limit_allows(nbytes)

    def _leave_cache(self, buffer: CachedBuffer) -> Buffer:
        """Move a buffer's block to a new buffer, whose stream can be assigned, and return the new buffer. The free of
        the new buffer returns the block to the cache.
        """
        shared, block = buffer.shared, buffer._ptr
        if isinstance(shared, SharedBehind):
            return shared.behind
        if block is None:
            return buffer
        block.home = None
        behind = PlainBuffer(_BlockEnd(self, block, buffer.stream), buffer.nbytes)
        buffer._ptr, buffer.shared = None, SharedBehind(behind, behind._ptr)
        return behind

    def pool_of(self, buffer: Buffer) -> object:
        return self

    def reachable_from(self, device: Device) -> bool:
        return device.location == self.location
