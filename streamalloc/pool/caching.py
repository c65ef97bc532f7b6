"""A cache over a pool: memory that was freed is handed out again without asking the driver.

Each stream has a list of free blocks for each size class (:class:`_Shelf`). What was freed on a stream is handed out
on that stream again, as the driver's own pools do, and on no other: between streams memory goes by way of the pool,
and the driver knows when the free has passed. So the cache needs no events.

The fast path counts nothing. How much may lie in the lists is looked at when memory is taken of the pool, and what has
to go is chosen then: :meth:`_Cache.make_room`.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from streamalloc.core.internal import (
    Block,
    Blocks,
    Buffer,
    CachedAllocator,
    CachedBuffer,
    CaptureError,
    ClosedError,
    Closes,
    Deferred,
    DeferredQueue,
    Device,
    Event,
    MemLocation,
    OutOfMemoryError,
    Row,
    Session,
    Shelf,
    Shown,
    Stream,
    StreamLike,
    as_stream,
    checked_size,
    deferred_queue,
    direct_handle,
    end_of,
    end_with_stream,
    forbid_lists,
    gauge,
    give_lists,
    lane_on,
    leave_stream,
    mib,
    ordered_after,
    ordered_after_end,
    refused,
    session_of,
    size_text,
)
from streamalloc.pool.ending import pools_of
from streamalloc.pool.pool import MemoryPool

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CacheStatistics", "CachingAllocator"]

_UNIT = 512
_FIT = 3
"""How many times as large as asked for a free block may be that is handed out."""
_GROWTH = 32 << 20
"""What a pool takes of its device at a time."""
_SHARE = 3
"""By this power of two what may be held is divided for what goes at a time, if that is more."""
_MORE = 7
"""By this power of two it is divided for what there may be more each time."""
_AT_MOST = 2
"""And by this one for the most of that."""
_LARGE = 8 << 20
"""From this size on, a free block of another stream that fits goes first."""
_AMONG = 8
"""How many times as much as has to go is looked at for neighbours."""
_SIZES = 1 << 14
"""Of how many sizes a stream remembers the lists."""
_ALL = 1 << 64
_LOOKS = 1 << 8
"""How often it is looked whether the frees of a stream have passed, which they have soon where it has no other work."""


class CacheStatistics(NamedTuple):
    """What a cache and its pool hold, in bytes, and how often the pool was asked."""

    reserved: int
    """Memory that the pool holds of its device or host."""
    reserved_high: int
    """The most it held since the last reset."""
    used: int
    """Memory of the pool that is allocated: in use or cached. Sizes are those of the classes."""
    used_high: int
    """The most that was allocated since the last reset."""
    in_use: int
    """Memory of the pool that is allocated and not cached."""
    cached: int
    """Memory that was freed and can be handed out again."""
    misses: int
    """How often the cache had nothing and took memory from the pool."""


def class_size(nbytes: int) -> int:
    """The size of the blocks for ``nbytes``: multiples of 512 bytes, and of an eighth of the power of two below."""
    bits = (nbytes - 1).bit_length() - 4
    step = 1 << bits if bits > 9 else _UNIT
    return (nbytes + step - 1) & -step


class _Shelf:
    """The free blocks of one size class and one stream."""

    __slots__ = ("blocks", "count", "fitting", "lane", "nbytes")

    def __init__(self, lane: _Lane, nbytes: int) -> None:
        self.lane = lane
        self.nbytes = nbytes
        self.blocks: list[Block] = []
        """What the fast path takes from."""
        self.count = 0
        self.fitting: tuple[list[Block], ...] = ()
        """Its list, and those of the classes up to ``_FIT`` times the size, in order; ``()`` where not known."""

    def returned(self) -> None:
        """A block was put back on the slow path: where nobody takes it any more, it is given back."""
        if self.lane.ended:
            deferred_queue(self.lane.session).submit(self.lane)


class _Lane(Deferred):
    """The shelves of one stream. It ends when the stream is closed or dropped, or the cache is closed."""

    __slots__ = (
        "__weakref__",
        "_blocks",
        "_last",
        "device",
        "ended",
        "lists",
        "most",
        "session",
        "shelf_of",
        "shelves",
        "stream",
    )  # fmt: skip

    def __init__(self, cache: _Cache, stream: Stream) -> None:
        self.session: Session = session_of(stream)
        self.device: Device = stream.device
        self.stream: weakref.ref[Stream] = weakref.ref(stream)
        self._last = end_of(stream)
        self.ended = False
        self.shelves: dict[int, _Shelf] = {}
        """By size class."""
        self.shelf_of: dict[int, _Shelf] = {}
        """By the requested size in units."""
        self.lists: dict[int, list[Block]] = {}
        """What the fast path takes from, by the requested size in units: the list of the shelf, or of a larger one."""
        self.most = 0
        """The most bytes that were seen in use at once."""
        self._blocks = cache.blocks
        self.session.shut_with_me(self)

    def shelf(self, nbytes: int) -> _Shelf:
        """The shelf for a size."""
        size = class_size(nbytes)
        shelf = self.shelves.get(size)
        if shelf is None:
            shelf = self.shelves.setdefault(size, _Shelf(self, size))
            for other in list(self.shelves.values()):
                other.fitting = ()
        if len(self.shelf_of) >= _SIZES:
            self.shelf_of.clear()
        self.shelf_of[(nbytes - 1) >> 9] = shelf
        return shelf

    def take(self, shelf: _Shelf, nbytes: int) -> Block | None:
        """A free block for a size. The fast path goes on taking from that list for the size, until there are none."""
        for blocks in shelf.fitting or self._fitting(shelf):
            if blocks:
                try:
                    block = blocks.pop()
                except IndexError:  # another thread took it
                    continue
                break
        else:
            block, blocks = None, shelf.blocks
        if not self.ended:
            if len(self.lists) >= _SIZES:
                self.lists.clear()
            self.lists[(nbytes - 1) >> 9] = blocks
        return block

    def _fitting(self, shelf: _Shelf) -> tuple[list[Block], ...]:
        shelves = self.shelves
        sizes = sorted(shelves)
        some = sizes[bisect_left(sizes, shelf.nbytes) : bisect_left(sizes, _FIT * shelf.nbytes + 1)]
        shelf.fitting = tuple(shelves[size].blocks for size in some)
        return shelf.fitting

    def attempt(self) -> bool:
        self.ended = True
        self.lists.clear()
        self._blocks.mend()
        stream = self.stream()
        if stream is not None and not stream.closed and direct_handle(stream, self.session) is None:
            return False  # It is being captured.
        free = [shelf for shelf in list(self.shelves.values()) if shelf.blocks]
        if free:
            with self.ordered() as ordered:
                for shelf in free:
                    self._blocks.give_back(shelf.blocks, ordered)
        if stream is not None:
            leave_stream(stream, self._blocks, self)
        if not any(shelf.count for shelf in list(self.shelves.values())):
            self._last = []
        return not self.cached

    @property
    def usable(self) -> bool:
        """Whether its stream is there, and is not being captured."""
        stream = self.stream()
        return stream is not None and direct_handle(stream, self.session) is not None

    @contextlib.contextmanager
    def ordered(self) -> Iterator[Stream]:
        """The stream, which nobody closes meanwhile, or one that comes after its work."""
        stream = self.stream()
        if stream is not None:
            with ordered_after(stream) as ordered:
                yield ordered
            return
        with ordered_after_end(self.device, self._last) as substitute:
            yield substitute

    @property
    def cached(self) -> int:
        """Bytes that are free."""
        return sum(shelf.nbytes * len(shelf.blocks) for shelf in list(self.shelves.values()))

    def _shut_after_fork(self) -> None:
        self.lists.clear()
        stream = self.stream()
        if stream is not None:
            forbid_lists(stream)


class _Cache(Deferred):
    """What there is of a cache apart from the object that users have, and its end when that is closed or dropped."""

    __slots__ = (
        "_deferred",
        "_most",
        "_times",
        "allowed",
        "blocks",
        "closed",
        "lane_of",
        "lanes",
        "misses",
        "pool",
        "session",
    )  # fmt: skip

    def __init__(self, pool: MemoryPool) -> None:
        self.pool = pool
        self.session: Session = session_of(pool)
        self._deferred: DeferredQueue = deferred_queue(self.session)
        """It tells whether a capture is under way, which frees on other streams might break."""
        self.blocks = Blocks(pool)
        self.closed = False
        self.lanes: dict[_Lane, None] = {}
        self.lane_of: dict[int, _Lane] = {}
        """The latest of them, by the identity of its stream: another object may have that later."""
        self.misses = 0
        self._most = 0
        """The most bytes that were seen in use at once."""
        self._times = 0
        """How often room was made."""
        self.allowed = 0
        """How many bytes of the pool there may be before room is made."""

    def attempt(self) -> bool:
        self.closed = True
        self.blocks.bar()
        self.blocks.mend()
        self.blocks.find()
        for lane in list(self.lanes):
            # Where it has ended, there may be blocks that were dropped since.
            deferred_queue(self.session).end(lane)
        return not len(self.blocks)

    def known(self, stream: Stream) -> _Lane | None:
        """The lane of a stream, if it has one that has not ended."""
        lane = self.lane_of.get(id(stream))
        return None if lane is None or lane.ended or lane.stream() is not stream else lane

    def lane(self, stream: Stream) -> _Lane:
        """The lane of a stream of our own."""
        lane = self.known(stream)
        if lane is None:
            lane = _Lane(self, stream)
            end_with_stream(stream, lane)
            self.lanes[lane] = None
            self.lane_of[id(stream)] = lane
        give_lists(stream, self.blocks, lane, lane.lists)
        return lane

    def live(self) -> list[_Lane]:
        """The lanes that have not ended."""
        if not self.closed:
            for lane in [lane for lane in list(self.lanes) if lane.ended]:
                self.lanes.pop(lane, None)
                for number in [number for number, other in list(self.lane_of.items()) if other is lane]:
                    self.lane_of.pop(number, None)
        return [lane for lane in list(self.lanes) if not lane.ended]

    def make_room(self, shelf: _Shelf) -> None:
        """Before a block is taken of the pool, give free ones back if there would be more of it than is allowed.

        That is halfway between what was in use at most at once, and what it would be if each stream kept its most for
        itself; in steps of the pool's, and more where room was made often.
        """
        if self._deferred.paused:
            return
        asked = shelf.nbytes
        if asked >= _LARGE:
            self._hand_over(shelf)
        in_use = apart = held = self.blocks.held + asked
        for lane in self.live():
            mine = free = 0
            for one in list(lane.shelves.values()):
                mine += one.nbytes * one.count
                free += one.nbytes * len(one.blocks)
            if lane is shelf.lane:
                mine += asked
            lane.most = max(lane.most, mine - free)
            in_use -= free
            # What streams have in use that are gone stays counted.
            apart += lane.most - mine
        self._most = max(self._most, in_use)
        needed = (self._most + max(self._most, apart)) // 2
        allowed = needed + min(needed * self._times >> _MORE, needed >> _AT_MOST)
        self.allowed = allowed = -(-allowed // _GROWTH) * _GROWTH
        if held > allowed:
            self._times += 1
            self.give_back(held - allowed + max(allowed >> _SHARE, _GROWTH))

    def forget(self) -> None:
        """Begin anew with what was in use."""
        self._most = self._times = self.allowed = 0
        for lane in self.live():
            lane.most = 0

    def give_back(self, enough: int = _ALL) -> list[Event]:
        """Give free blocks back to the pool until it is enough; events after the frees, one for each stream.

        Of the largest those go first that are neighbours, the longest stretches of them: the pool can use these for
        anything.
        """
        free = self._take_largest(_AMONG * enough)
        free.sort(key=_ADDRESS)
        stretches: list[list[Block]] = []
        spans: list[int] = []
        end = -1
        for block in free:
            address, nbytes = block.address, block.shelf.nbytes
            if address == end:
                stretches[-1].append(block)
                spans[-1] += nbytes
            else:
                stretches.append([block])
                spans.append(nbytes)
            end = address + nbytes
        going: list[Block] = []
        staying: list[Block] = []
        for number in sorted(range(len(spans)), key=spans.__getitem__, reverse=True):
            if enough > 0:
                going += stretches[number]
            else:
                staying += stretches[number]
            enough -= spans[number]
        self._put_back(staying)
        return self._give(going)

    def _hand_over(self, asked: _Shelf) -> None:
        """Give back a block that another stream has free, if one fits: the pool need not move memory then."""
        least, most = asked.nbytes, _FIT * asked.nbytes
        lanes = [lane for lane in self.live() if lane is not asked.lane and lane.usable]
        shelves = [shelf for lane in lanes for shelf in list(lane.shelves.values()) if least <= shelf.nbytes <= most]
        fitting = [shelf for shelf in shelves if shelf.blocks]
        if fitting:
            blocks = min(fitting, key=_NBYTES).blocks
            with contextlib.suppress(IndexError):  # another thread took it
                self._give([blocks.pop()])

    def _take_largest(self, nbytes: int) -> list[Block]:
        """Take the largest free blocks off their lists, until that is enough.

        Those of streams that are gone end by themselves, and those of captured ones stay.
        """
        lanes = [lane for lane in self.live() if lane.usable]
        shelves = [shelf for lane in lanes for shelf in list(lane.shelves.values()) if shelf.blocks]
        shelves.sort(key=_NBYTES)
        free: list[Block] = []
        while shelves and nbytes > 0:
            shelf = shelves.pop()
            count = len(shelf.blocks)
            nbytes -= shelf.nbytes * count
            with contextlib.suppress(IndexError):  # other threads take them, too
                free.extend(map(list.pop, repeat(shelf.blocks, count)))
        return free

    def _give(self, blocks: list[Block]) -> list[Event]:
        """Give blocks that were taken off their lists back to the pool; events after the frees, one for each stream.

        Those of streams that another thread has begun to capture meanwhile stay.
        """
        by_lane: dict[_Lane, list[Block]] = {}
        for block in blocks:
            by_lane.setdefault(block.shelf.lane, []).append(block)  # type: ignore[attr-defined]
        events = []
        try:
            with self.session.relaxed():
                for lane, some in by_lane.items():
                    with contextlib.suppress(CaptureError), lane.ordered() as ordered:
                        self.blocks.give_back(some, ordered)
                        event = ordered.record()
                        # What other code captures is not known until the driver is asked.
                        if not ordered.capturing:
                            events.append(event)
        finally:
            self._put_back(chain(*by_lane.values()))
        return events

    def _put_back(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            shelf = block.shelf
            shelf.blocks.append(block)
            if shelf.lane.ended:  # type: ignore[attr-defined]
                shelf.returned()

    def flush(self) -> bool:
        """Give all free blocks back; whether there were any. None while a capture is under way.

        Nothing is waited for: with the frees that pass at once the host synchronises, so that the driver sees them; the
        others are pending.
        """
        self.blocks.mend()
        self.blocks.find()
        if self._deferred.paused:
            return False
        frees = self.give_back()
        with self.session.relaxed():
            for event in frees:
                _synchronize_if_passed(event)
        return bool(frees)

    @property
    def cached(self) -> int:
        """Bytes that are free."""
        self.blocks.mend()
        return sum(lane.cached for lane in self.live())


def _synchronize_if_passed(event: Event) -> None:
    with event:
        for _ in range(_LOOKS):
            if event.query():
                event.synchronize()
                return


_ADDRESS = attrgetter("address")
_NBYTES = attrgetter("nbytes")


class CachingAllocator(CachedAllocator, Closes, Shown):
    """A cache of free memory over a pool, for programs that allocate and free all the time.

    It is used like the pool: same :meth:`allocate`, same :class:`Buffer`. Memory that was freed on a stream, or
    dropped, is handed out again on that stream without asking the driver, and on no other: other streams get it from
    the pool, once the cache has given it back there and the driver has seen the free pass.

    Sizes are rounded up to classes: multiples of 512 bytes up to 8 KiB, then eight classes to each power of two, so
    that at most a ninth of a block is wasted from 4 KiB on. Where a class has no free block, one of up to three times
    the size is handed out. Blocks are never split, nor do neighbours become one: that is left to the pool.

    One rule says when the cache gives free blocks back to it: before it would have more memory of the pool than was
    ever in use at once; with several streams, than halfway to what it would be if each kept its most for itself. Then
    an eighth of that goes: of the largest free blocks the longest stretches of neighbours, which the pool can use for
    anything; and before that, for a large size, one that another stream has free. Each time the cache may have a 128th
    more from then on, up to a quarter, so that programs that need it often need it less. What is freed on a stream that
    has never asked for its size goes back at once.

    Some memory goes past the cache, and comes from the pool and returns to it as without one: on default streams and
    streams of other libraries, as nobody tells when these end; in captures, where allocations become nodes of the
    graph; and all of it beside :func:`streamalloc.driver.checked`, which is to see each allocation. A buffer that is
    shared with other processes leaves the cache for good: its free waits for importers as ever.

    When memory runs out, the cache gives back all that is free and tries again. A stream that is closed or dropped
    gives its memory back, too. Threads may use one cache at the same time. Handles for other processes, access and
    attributes are the :attr:`pool`'s.

    Parameters
    ----------
    pool
        The pool that the memory is of. Give it a release threshold, or it returns memory to the device at every
        synchronisation; what is cached counts as used there.
    largest
        The largest size in bytes that is cached (default: all are).
    limit
        The most bytes of the pool that may be used, cached memory included; 0 for no limit but the pool's own
        ``max_size``. Threads that allocate at the same moment may exceed it by what they ask for.

    Raises
    ------
    TypeError, ValueError
        ``pool`` is no pool, or a size is none.
    ClosedError
        The pool was closed.
    """

    __slots__ = ("_cache", "_limit", "largest")

    largest: int
    """The largest size in bytes that is cached."""

    def __init__(self, pool: MemoryPool, *, largest: int = sys.maxsize, limit: int = 0) -> None:
        if not isinstance(pool, MemoryPool):
            raise TypeError(f"pool must be a MemoryPool, not {type(pool).__name__} ({pool!r})")
        self.largest = checked_size("largest", largest)
        self._limit = checked_size("limit", limit)
        if pool.closed:
            raise ClosedError(f"{pool!r} was closed")
        session = session_of(pool)
        self._cache = cache = _Cache(pool)
        self.location: MemLocation = pool.location
        self._over(cache.blocks, session)
        deferred_queue(session).end_with(self, cache)
        pools_of(session).caches.add(self)

    @property
    def pool(self) -> MemoryPool:
        """The pool that the memory is of."""
        return self._cache.pool

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
        return self._cache.closed

    def statistics(self) -> CacheStatistics:
        """The pool's own figures, and what of it is cached and in use."""
        cached = self._cache.cached
        own = self.pool.statistics()
        return CacheStatistics(*own, max(own.used - cached, 0), cached, self._cache.misses)

    def reset_peaks(self) -> None:
        """Set the pool's high-water marks to what is reserved and used now."""
        self.pool.reset_peaks()

    def trim(self, keep: int = 0) -> int:
        """Give what is cached back to the pool, and trim that (:meth:`MemoryPool.trim`); says how many bytes came back.

        The host waits for no stream. Where one still has work to do, what was freed on it is pending, and a
        :class:`PendingFreesWarning` says so: synchronise with it and trim again.
        """
        checked_size("keep", keep)
        self._check_open()
        self._cache.flush()
        self._cache.forget()
        return self.pool.trim(keep)

    def close(self) -> None:
        """Give back what is cached, and keep nothing any more; idempotent. Live buffers stay, and go to the pool."""
        if self._cache.closed:
            return
        self._cache.closed = True
        deferred_queue(self._session).end(self._cache)

    # -- the slow path ---------------------------------------------------------------------------------------

    def _allocate_slowly(self, nbytes: int, stream: StreamLike) -> Buffer:
        blocks, cache = self._blocks, self._cache
        if blocks.dropped:
            blocks.mend()
        lane: _Lane | None = lane_on(stream, blocks)
        if lane is None or type(nbytes) is not int or not 0 < nbytes <= self.largest or blocks.watchers:
            for watcher in blocks.watchers:
                watcher.asked(self, checked_size("nbytes", nbytes))
            if cache.closed:
                self._check_open()
            # A driver that checks uses would not see which of them belong to which allocation.
            if direct_handle(stream, cache.session) is None or cache.session.listener is not None:
                return self._go_past(nbytes, stream)
            nbytes = checked_size("nbytes", nbytes)
            if not 0 < nbytes <= self.largest:
                return self._go_past(nbytes, stream)
            lane = cache.lane(stream)  # type: ignore[arg-type]
        shelf = lane.shelf_of.get((nbytes - 1) >> 9) or lane.shelf(nbytes)
        block = lane.take(shelf, nbytes)
        if block is not None:
            buffer: CachedBuffer | None = self._wrap(block, nbytes, stream)  # type: ignore[arg-type]
        elif self._limit and self.pool.attributes.used_mem_current + shelf.nbytes > self._limit:
            buffer = None
        else:
            if blocks.held + shelf.nbytes > cache.allowed:
                cache.make_room(shelf)
            buffer = blocks.buy(self, nbytes, shelf, stream)  # type: ignore[arg-type]
            cache.misses += buffer is not None
        if buffer is None:
            return self._go_past(nbytes, stream)
        if lane.ended or blocks.watchers:
            self._apart(buffer)
        return buffer

    def _go_past(self, nbytes: int, stream: StreamLike) -> Buffer:
        """A buffer that is the pool's own. Where memory runs out, what is cached is given back first."""
        cache = self._cache
        if self._limit:
            ordered = as_stream(stream, cache.session)
            if direct_handle(ordered, cache.session) is not None or not ordered.capturing:
                self._keep_limit(checked_size("nbytes", nbytes))
        try:
            return cache.pool.allocate(nbytes, stream)
        except OutOfMemoryError:
            if not cache.flush():
                raise
        return cache.pool.allocate(nbytes, stream)

    def _keep_limit(self, nbytes: int) -> None:
        attributes = self.pool.attributes
        if attributes.used_mem_current + nbytes <= self._limit:
            return
        self._cache.flush()
        used = attributes.used_mem_current
        if used + nbytes > self._limit:
            why = f"the limit of {size_text(self._limit)} leaves no room for {size_text(nbytes)}"
            error = refused(OutOfMemoryError, "cuMemAllocFromPoolAsync", why)
            error.requested, error.used, error.limit = nbytes, used, self._limit
            raise error

    def _shelf_for(self, block: Block, stream: Stream) -> Shelf | None:
        cache = self._cache
        if cache.closed or direct_handle(stream, self._session) is None:
            return None
        lane = cache.known(stream)
        return None if lane is None else lane.shelves.get(block.shelf.nbytes)

    def _check_open(self) -> None:
        if self._cache.closed:
            raise ClosedError(f"{self!r} was closed")

    def _pool_of(self, buffer: Buffer) -> object:
        return self.pool

    def _reachable_from(self, device: Device) -> bool:
        return self.pool._reachable_from(device)

    def _is_managed(self) -> bool:
        return self.pool.managed

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def _about(self) -> Iterator[Row]:
        self._check_open()
        now = self.statistics()
        yield "pool", self.pool
        yield "in use", gauge(now.in_use, now.reserved)
        yield "cached", gauge(now.cached, now.reserved)
        yield "limit", mib(self.limit) if self.limit else "none"
        yield "misses", now.misses

    def __repr__(self) -> str:
        if not hasattr(self, "location"):
            return f"<{type(self).__name__} that could not be made>"
        return f"<CachingAllocator over {self.pool!r}{' closed' if self.closed else ''}>"
