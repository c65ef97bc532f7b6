"""A cache over a pool: memory that was freed is handed out again without asking the driver.

Each stream has a list of free blocks for each size class (:class:`_Shelf`). What was freed on a stream is handed out
on that stream again, as the driver's own pools do, and on no other: between streams memory goes by way of the pool,
and the driver knows when the free has passed. So the cache needs no events.

The fast path counts nothing: figures are those of the pool, and what lies in the lists. How much may lie there is
looked at when the cache takes memory from the pool, by two rules: :meth:`_Cache.look`.
"""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from streamalloc.core.buffer import Buffer, PlainBuffer
from streamalloc.core.cached import (
    Block,
    Blocks,
    CachedAllocator,
    end_with_stream,
    forbid_lists,
    give_lists,
    has_lists,
    leave_stream,
)
from streamalloc.core.device import Device
from streamalloc.core.door import Door, door_behind
from streamalloc.core.errors import ClosedError, OutOfMemoryError, error_from, refused, size_text
from streamalloc.core.html import Row, Shown, gauge, mib
from streamalloc.core.later import Deferred, Later, later_of
from streamalloc.core.ownership import Closes
from streamalloc.core.properties import MemLocation, checked_size
from streamalloc.core.stream import (
    Stream,
    StreamLike,
    as_stream,
    direct_handle,
    order_after_context,
    ordered_after,
    sees_all_work,
)
from streamalloc.driver.internal import cuda
from streamalloc.pool.ending import pools_of
from streamalloc.pool.pool import MemoryPool

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CacheStatistics", "CachingAllocator"]

LARGEST = 12 << 20
"""Where classes end by default."""
_UNIT = 512
_FIT = 3
"""How many times as large as asked for a free block may be that is handed out."""
_STEP = 16 << 20
"""How much is taken of the pool between two looks at its figures."""
_SHARES = 4
"""How much may be free, in quarters of the most ever in use at once: one, and one for each stream, up to all."""
_BULK = 3
"""By this power of two what may be used is divided for what is given back at a time."""
_ALL = 1 << 64
_RESERVED = cuda.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
_USED = cuda.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT


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
    step = max(_UNIT, 1 << max((nbytes - 1).bit_length() - 4, 0))
    return -(-nbytes // step) * step


class _Shelf:
    """The free blocks of one size class and one stream."""

    __slots__ = ("blocks", "fitting", "lane", "nbytes")

    def __init__(self, lane: _Lane, nbytes: int) -> None:
        self.lane = lane
        self.nbytes = nbytes
        self.blocks: list[Block] = []
        """What the fast path takes from."""
        self.fitting: tuple[list[Block], ...] = ()
        """Its list, and those of the classes up to ``_FIT`` times the size, in order; ``()`` where not known."""

    def returned(self) -> None:
        """A block was put back on the slow path: where nobody takes it any more, it is given back."""
        if self.lane.ended:
            later_of(self.lane.door).hand_in(self.lane)


class _Lane(Deferred):
    """The shelves of one stream. It ends when the stream is closed or dropped, or the cache is closed."""

    __slots__ = (
        "__weakref__", "_blocks", "_key", "_shelf_of", "device", "door", "ended", "lists", "shelves", "stream",
    )  # fmt: skip

    def __init__(self, cache: _Cache, stream: Stream) -> None:
        self.door: Door = door_behind(stream)
        self.device: Device = stream.device
        self.stream: weakref.ref[Stream] = weakref.ref(stream)
        self.ended = False
        self.shelves: dict[int, _Shelf] = {}
        """By size class."""
        self._shelf_of: dict[int, _Shelf] = {}
        """By the requested size in units."""
        self.lists: dict[int, list[Block]] = {}
        """What the fast path takes from, by the requested size in units: the list of the shelf, or of a larger one."""
        self._blocks = cache.blocks
        self._key = cache.key
        self.door.shut_with_me(self)

    def shelf(self, nbytes: int) -> _Shelf:
        """The shelf for a size."""
        unit = (nbytes - 1) >> 9
        shelf = self._shelf_of.get(unit)
        if shelf is None:
            size = class_size(nbytes)
            if size not in self.shelves:
                self.shelves.setdefault(size, _Shelf(self, size))
                for other in tuple(self.shelves.values()):
                    other.fitting = ()
            shelf = self._shelf_of[unit] = self.shelves[size]
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
        if stream is not None and not stream.closed and direct_handle(stream, self.door) is None:
            return False  # It is being captured.
        free = [shelf for shelf in tuple(self.shelves.values()) if shelf.blocks]
        if free:
            with self.ordered() as ordered:
                for shelf in free:
                    self._blocks.give_back(shelf.blocks, ordered)
        if stream is not None:
            leave_stream(stream, self._key, self)
        return not self.cached

    @contextlib.contextmanager
    def ordered(self) -> Iterator[Stream]:
        """The stream, which nobody closes meanwhile, or one that comes after its work."""
        stream = self.stream()
        if stream is not None:
            with ordered_after(stream) as ordered:
                yield ordered
            return
        with self.device.create_stream() as substitute:
            order_after_context(substitute)
            yield substitute

    @property
    def cached(self) -> int:
        """Bytes that are free."""
        return sum(shelf.nbytes * len(shelf.blocks) for shelf in tuple(self.shelves.values()))

    def _shut_after_fork(self) -> None:
        self.lists.clear()
        stream = self.stream()
        if stream is not None:
            forbid_lists(stream)


class _Cache(Deferred):
    """What there is of a cache apart from the object that users have, and its end when that is closed or dropped."""

    __slots__ = (
        "_later", "_most", "_unseen", "blocks", "closed", "door", "grown_to", "key", "lane_of", "lanes", "misses",
        "pool",
    )  # fmt: skip

    def __init__(self, pool: MemoryPool) -> None:
        self.pool = pool
        self.door: Door = door_behind(pool)
        self._later: Later = later_of(self.door)
        """It tells whether a capture is under way, which the driver's answers about pools and streams might break."""
        self.blocks = Blocks(pool)
        self.key: object = self.blocks.key
        self.closed = False
        self.lanes: dict[_Lane, None] = {}
        self.lane_of: dict[int, _Lane] = {}
        """The latest of them, by the identity of its stream: another object may have that later."""
        self.misses = 0
        self._most = 0
        """How much of the pool may be used before what is free is given back."""
        self.grown_to = 0
        """The most that the pool was seen to have reserved, less what came back by trimming."""
        self._unseen = 0
        """How much may be taken of the pool before the next look at its figures."""

    def attempt(self) -> bool:
        self.closed = True
        self.blocks.bar()
        self.blocks.mend()
        self.blocks.find()
        for lane in tuple(self.lanes):
            # Where it has ended, there may be blocks that were dropped since.
            later_of(self.door).end(lane)
        return not len(self.blocks)

    def lane(self, stream: Stream) -> _Lane:
        """The lane of a stream of our own."""
        lane = self.lane_of.get(id(stream))
        if lane is not None and has_lists(stream, self.key, lane.lists):
            return lane
        if lane is None or lane.ended or lane.stream() is not stream:
            lane = _Lane(self, stream)
            end_with_stream(stream, lane)
            self.lanes[lane] = None
            self.lane_of[id(stream)] = lane
        give_lists(stream, self.key, lane.lists)
        return lane

    def live(self) -> list[_Lane]:
        """The lanes that have not ended."""
        if not self.closed:
            for lane in [lane for lane in tuple(self.lanes) if lane.ended]:
                self.lanes.pop(lane, None)
                for number in [number for number, other in tuple(self.lane_of.items()) if other is lane]:
                    self.lane_of.pop(number, None)
        return [lane for lane in tuple(self.lanes) if not lane.ended]

    def new(self, shelf: _Shelf, stream: Stream) -> Block | None:
        """A new block; None where there is no memory, or the stream is being captured."""
        self.look(shelf.nbytes)
        try:
            plain = self.pool.allocate(shelf.nbytes, stream)
        except OutOfMemoryError:
            return None
        if type(plain) is not PlainBuffer:
            return None
        self.misses += 1
        return self.blocks.take_over(plain, shelf)

    def look(self, nbytes: int) -> None:
        """Before so much is taken of the pool, see now and then whether the largest free blocks have to be given back.

        They have to where more of it would be used than ever was in use at once, and what may be free besides; and
        where it has grown since, for it lacks them, or is in pieces between them: as much as it has grown.
        """
        self._unseen -= nbytes
        if self._unseen >= 0 or self._later.paused:
            return
        reserved, used = self._figures()
        over = used + nbytes - self._most
        enough = over + (self._most >> _BULK) if over > 0 else 0
        if reserved > self.grown_to:
            enough = max(enough, reserved - self.grown_to)
            self.grown_to = reserved
        if enough:
            self.give_back(enough)
            _, used = self._figures()
            if used + nbytes > self._most:
                shares = min(1 + len(self.lanes), _SHARES)
                self._most = used + nbytes + max(_STEP, used * shares // _SHARES)
        self._unseen = min(max(_STEP, self._most >> 7), self._most - used) - nbytes

    def _figures(self) -> tuple[int, int]:
        """What the pool has reserved, and what of that is used."""
        read, raw = self.door.cuMemPoolGetAttribute, self.pool._checked_raw()
        result, reserved = read(raw, _RESERVED)
        if not result:
            result, used = read(raw, _USED)
        if result:
            raise error_from(result, "cuMemPoolGetAttribute")
        return int(reserved), int(used)

    def give_back(self, enough: int = _ALL) -> list[Stream]:
        """Give free blocks back to the pool, the largest first, until it is enough; on which streams."""
        shelves = [shelf for lane in self.live() for shelf in tuple(lane.shelves.values()) if shelf.blocks]
        shelves.sort(key=attrgetter("nbytes"), reverse=True)
        streams = []
        for shelf in shelves:
            stream = shelf.lane.stream()
            # Of others it ends by itself, or it is being captured.
            if stream is not None and direct_handle(stream, self.door) is not None:
                with shelf.lane.ordered() as ordered:
                    given = self.blocks.give_back(shelf.blocks, ordered, -(-enough // shelf.nbytes))
                streams += [stream] * (given > 0)
                enough -= given * shelf.nbytes
                if enough <= 0:
                    break
        return streams

    def flush(self) -> bool:
        """Give all free blocks back; whether there were any. None while a capture is under way, which it might break.

        Nothing is waited for: with the streams that have nothing to do the host synchronises, so that the driver sees
        the frees; those of others are pending.
        """
        self.blocks.mend()
        self.blocks.find()
        if self._later.paused:
            return False
        idle = [stream for lane in self.live() if (stream := lane.stream()) is not None and self._idle(stream)]
        streams = self.give_back()
        for stream in idle:
            if stream in streams:
                stream.synchronize()
        return bool(streams)

    def _idle(self, stream: Stream) -> bool:
        """Whether synchronising with a stream waits for nothing."""
        if direct_handle(stream, self.door) is None:
            return False
        return stream.query() and (sees_all_work(stream) or stream.device.default_stream.query())

    @property
    def cached(self) -> int:
        """Bytes that are free."""
        self.blocks.mend()
        return sum(lane.cached for lane in self.live())


class CachingAllocator(CachedAllocator, Closes, Shown):
    """A cache of free memory over a pool, for programs that allocate and free all the time.

    It is used like the pool: same :meth:`allocate`, same :class:`Buffer`. Memory that was freed on a stream, or
    dropped, is handed out again on that stream without asking the driver, and on no other: other streams get it from
    the pool, once the cache has given it back there and the driver has seen the free pass.

    Sizes are rounded up to classes: multiples of 512 bytes up to 8 KiB, then eight classes to each power of two, so
    that at most a ninth of a block is wasted from 4 KiB on. Where a class has no free block, one of up to three times
    the size is handed out. Blocks are never split, nor do neighbours become one: that is left to the pool. Two rules
    say when the cache gives the largest free blocks back to it: before more of the pool is used than ever was in use at
    once and half as much again, or twice as much with three streams and more; and when the pool has grown, as much as
    that. Both are looked at for each 16 MiB that is taken of the pool. Sizes above ``largest`` are not cached: the
    driver's pool orders them itself and rounds nothing.

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
        The largest size in bytes that is cached.
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

    def __init__(self, pool: MemoryPool, *, largest: int = LARGEST, limit: int = 0) -> None:
        if not isinstance(pool, MemoryPool):
            raise TypeError(f"pool must be a MemoryPool, not {type(pool).__name__} ({pool!r})")
        self.largest = checked_size("largest", largest)
        self._limit = checked_size("limit", limit)
        if pool.closed:
            raise ClosedError(f"{pool!r} was closed")
        door = door_behind(pool)
        self._cache = cache = _Cache(pool)
        self.location: MemLocation = pool.location
        self._over(cache.blocks, cache.key, door)
        later_of(door).end_with(self, cache)
        pools_of(door).caches.add(self)

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
        given = self.pool.trim(keep)
        self._cache.grown_to -= given
        return given

    def close(self) -> None:
        """Give back what is cached, and keep nothing any more; idempotent. Live buffers stay, and go to the pool."""
        if self._cache.closed:
            return
        self._cache.closed = True
        later_of(self._door).end(self._cache)

    # -- the slow path ---------------------------------------------------------------------------------------

    def _allocate_slowly(self, nbytes: int, stream: StreamLike) -> Buffer:
        for watcher in self._blocks.watchers:
            watcher.asked(self, checked_size("nbytes", nbytes))
        cache = self._cache
        if cache.closed:
            self._check_open()
        if self._blocks.dropped:
            self._blocks.mend()
        direct = direct_handle(stream, cache.door) is not None
        ordered: Stream = stream if direct else as_stream(stream, cache.door)  # type: ignore[assignment]
        size = nbytes if type(nbytes) is int and nbytes >= 0 else checked_size("nbytes", nbytes)
        # A driver that checks uses would not see which of them belong to which allocation.
        if not direct or not 0 < size <= self.largest or cache.door.used is not None:
            return self._go_past(size, ordered, direct)
        lane = cache.lane(ordered)
        shelf = lane.shelf(size)
        block = lane.take(shelf, size)
        if block is None:
            if self._limit and self.pool.attributes.used_mem_current + shelf.nbytes > self._limit:
                return self._go_past(size, ordered, direct)
            block = cache.new(shelf, ordered)
            if block is None:
                return self._go_past(size, ordered, direct)
        if lane.ended or cache.closed:
            block.home = None
        return self._wrap(block, size, ordered)

    def _go_past(self, nbytes: int, stream: Stream, direct: bool) -> Buffer:
        """A buffer that is the pool's own. Where memory runs out, what is cached is given back first."""
        cache = self._cache
        if self._limit and (direct or not stream.capturing):
            self._keep_limit(nbytes)
        if direct:
            # Of other streams it would have to be asked first whether the pool can be asked for figures.
            cache.look(nbytes)
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

    def _shelf_for(self, block: Block, stream: Stream) -> _Shelf | None:
        cache = self._cache
        if cache.closed or direct_handle(stream, self._door) is None:
            return None
        return cache.lane(stream).shelf(block.shelf.nbytes)

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
