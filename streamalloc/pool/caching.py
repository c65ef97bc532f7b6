"""A cache over a pool: memory that was freed is handed out again without asking the driver.

Each stream has a list of free blocks for each size class (:class:`_Shelf`). What was freed on a stream may be handed
out on it at once, as the driver's own pools do. It goes to another stream only after an event that was recorded behind
the free has passed (:class:`_Mark`). The fast path counts nothing: figures are those of the pool, and what lies in the
lists.
"""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from streamalloc.core.buffer import Buffer, PlainBuffer
from streamalloc.core.cached import (
    Block,
    Blocks,
    CachedAllocator,
    end_with_stream,
    forbid_lists,
    give_lists,
    leave_stream,
)
from streamalloc.core.device import Device
from streamalloc.core.door import Door, door_behind
from streamalloc.core.errors import ClosedError, OutOfMemoryError, refused, size_text
from streamalloc.core.html import Row, Shown, gauge, mib
from streamalloc.core.later import Deferred, later_of
from streamalloc.core.ownership import Closes
from streamalloc.core.properties import MemLocation, checked_size
from streamalloc.core.stream import (
    Event,
    Stream,
    StreamLike,
    as_stream,
    direct_handle,
    order_after_context,
    ordered_after,
    sees_all_work,
)
from streamalloc.pool.ending import pools_of
from streamalloc.pool.pool import MemoryPool

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CacheStatistics", "CachingAllocator"]

LARGEST = 8 << 20
"""Where classes end by default."""
_UNIT = 512
_FIT = 3
"""How many times as large as asked for a free block may be that is handed out."""
_SOME = 8
"""How many blocks a stream takes of another one at once."""
_LEAST = 32 << 20
_SLACK = 3
"""More of the pool may be used than ever was in use at once: so many bytes, or that divided by this power of two."""
_BULK = 6
"""By this power of two what may be used is divided for what is given back at a time."""


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


class _Mark:
    """Blocks of a shelf that all streams may have once an event has passed."""

    __slots__ = ("blocks", "event")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.event: Event | None = None
        """Recorded after the last block was put in; None until then: only their own stream may have them."""


class _Shelf:
    """The free blocks of one size class and one stream."""

    __slots__ = ("blocks", "lane", "lost", "marks", "nbytes")

    def __init__(self, lane: _Lane, nbytes: int) -> None:
        self.lane = lane
        self.nbytes = nbytes
        self.blocks: list[Block] = []
        """What the fast path takes from."""
        self.marks: list[_Mark] = []
        """Blocks that other streams wait for."""
        self.lost: bool = False
        """Whether another stream has taken some since this one last asked for one."""

    def returned(self) -> None:
        """A block was put back on the slow path: where nobody takes it any more, it is given back."""
        if self.lane.ended:
            later_of(self.lane.door).hand_in(self.lane)

    def take(self) -> Block | None:
        """A block for the shelf's own stream, which has what others wait for, too."""
        blocks = self.blocks
        if self.marks and not blocks:
            for mark in tuple(self.marks):
                with contextlib.suppress(ValueError):
                    self.marks.remove(mark)
                self._empty(mark)
        try:
            return blocks.pop()
        except IndexError:
            return None

    def spare(self) -> list[Block]:
        """Some blocks for any other stream. If there are none yet, some that are free now will be."""
        for mark in tuple(self.marks):
            if mark.event is None or (mark.blocks and not mark.event.query()):
                return []
            some: list[Block] = []
            with contextlib.suppress(IndexError):
                for _ in range(_SOME):
                    some.append(mark.blocks.pop())
            if some:
                self.lost = True
                return some
            with contextlib.suppress(ValueError):
                self.marks.remove(mark)
        if self.blocks:
            self._mark()
        return []

    def _mark(self) -> None:
        stream = self.lane.stream()
        if stream is None or direct_handle(stream, self.lane.door) is None:
            return
        mark = _Mark()
        self.marks.append(mark)
        with contextlib.suppress(IndexError):
            for _ in range(-(-len(self.blocks) // 2)):
                mark.blocks.append(self.blocks.pop(0))
        try:
            with ordered_after(stream) as ordered:
                if ordered is stream:
                    mark.event = stream.record()
        finally:
            # Another thread may have taken it back before the last block was in it.
            if mark not in self.marks:
                self._empty(mark)

    def _empty(self, mark: _Mark) -> None:
        """Put the blocks of a mark that nobody waits for any more back."""
        with contextlib.suppress(IndexError):
            while True:
                self.blocks.append(mark.blocks.pop())

    @property
    def count(self) -> int:
        """How many blocks are free."""
        return len(self.blocks) + sum(len(mark.blocks) for mark in tuple(self.marks))


class _Lane(Deferred):
    """The shelves of one stream. It ends when the stream is closed or dropped, or the cache is closed."""

    __slots__ = (
        "__weakref__", "_blocks", "_key", "_shelf_of", "_sizes", "device", "door", "ended", "lists", "shelves",
        "stream",
    )  # fmt: skip

    def __init__(self, cache: _Cache, stream: Stream) -> None:
        self.door: Door = door_behind(stream)
        self.device: Device = stream.device
        self.stream: weakref.ref[Stream] = weakref.ref(stream)
        self.ended = False
        self.shelves: dict[int, _Shelf] = {}
        """By size class."""
        self._sizes: list[int] = []
        """The classes in order."""
        self._shelf_of: dict[int, _Shelf] = {}
        """The shelf of its own for each requested size in units, whichever list the fast path takes from now."""
        self.lists: dict[int, list[Block]] = {}
        """Their lists for the fast path, by the requested size in units."""
        self._blocks = cache.blocks
        self._key = cache.key
        self.door.shut_with_me(self)

    def shelf(self, nbytes: int) -> _Shelf:
        """The shelf for a size."""
        unit = (nbytes - 1) >> 9
        shelf = self._shelf_of.get(unit)
        if shelf is None:
            size = class_size(nbytes)
            shelf = self.shelves.setdefault(size, _Shelf(self, size))
            self._sizes = sorted(self.shelves)
            self._shelf_of[unit] = shelf
        if not self.ended:
            self.lists[unit] = shelf.blocks
        return shelf

    def larger(self, shelf: _Shelf, nbytes: int) -> Block | None:
        """A block of a larger class. The fast path goes on taking these for the size, until there are none."""
        sizes, most = self._sizes, _FIT * shelf.nbytes
        for at in range(bisect.bisect_right(sizes, shelf.nbytes), len(sizes)):
            if sizes[at] > most:
                break
            blocks = self.shelves[sizes[at]].blocks
            if blocks:
                with contextlib.suppress(IndexError):
                    block = blocks.pop()
                    if not self.ended:
                        self.lists[(nbytes - 1) >> 9] = blocks
                    return block
        return None

    def attempt(self) -> bool:
        self.ended = True
        self.lists.clear()
        self._blocks.mend()
        stream = self.stream()
        if stream is not None and not stream.closed and direct_handle(stream, self.door) is None:
            return False  # It is being captured.
        self.give_back()
        if stream is not None:
            leave_stream(stream, self._key, self)
        return not self.cached

    def give_back(self, enough: int = 1 << 64) -> int:
        """Give free blocks back to the pool in stream order, the largest first, until it is enough; how many bytes."""
        given = 0
        shelves = self.shelves
        free = [shelf for size in sorted(shelves, reverse=True) if (shelf := shelves[size]).blocks or shelf.marks]
        if not free:
            return given
        with self._ordered() as ordered:
            for shelf in free:
                while given < enough and (block := shelf.take()) is not None:
                    plain = self._blocks.hand_over(block, ordered)
                    del block
                    plain.free()
                    given += shelf.nbytes
        return given

    @contextlib.contextmanager
    def _ordered(self) -> Iterator[Stream]:
        """The stream, or one that comes after its work."""
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
        return sum(shelf.nbytes * shelf.count for shelf in tuple(self.shelves.values()))

    def _shut_after_fork(self) -> None:
        self.lists.clear()
        stream = self.stream()
        if stream is not None:
            forbid_lists(stream)


class _Cache(Deferred):
    """What there is of a cache apart from the object that users have, and its end when that is closed or dropped."""

    __slots__ = ("_most", "_room", "blocks", "closed", "door", "key", "lane_of", "lanes", "misses", "pool")

    def __init__(self, pool: MemoryPool) -> None:
        self.pool = pool
        self.door: Door = door_behind(pool)
        self.blocks = Blocks(pool)
        self.key: object = self.blocks.key
        self.closed = False
        self.lanes: dict[_Lane, None] = {}
        self.lane_of: dict[int, _Lane] = {}
        """The latest of them, by the identity of its stream: another object may have that later."""
        self.misses = 0
        self._most = 0
        """How much of the pool may be used before what is free is given back."""
        self._room = 0
        """How much may be allocated before it has to be looked at how much is used."""

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

    @property
    def capturing(self) -> bool:
        """Whether a capture is under way, which the driver's answers about other streams might break."""
        return bool(later_of(self.door).paused)

    def take(self, lane: _Lane, shelf: _Shelf, nbytes: int) -> Block | None:
        """A free block for a size: of the stream's own, a larger one, or one of a stream whose work with it is done."""
        if self.blocks.dropped:
            self.blocks.mend()
        block = shelf.take() or lane.larger(shelf, nbytes)
        if block is not None or len(self.lanes) < 2 or self.capturing:
            return block
        if shelf.lost:
            # Streams that all use the size in turn would take it from each other each time: this one gets its own.
            shelf.lost = False
            return None
        for other in self.live():
            theirs = other.shelves.get(shelf.nbytes)
            if theirs is None or other is lane:
                continue
            some = theirs.spare()
            for block in some:
                self.blocks.move(block, shelf)
            if some:
                shelf.blocks += some[1:]
                return some[0]
        return None

    def flush(self) -> int:
        """Give free blocks back to the pool; how many bytes. None while a capture is under way, which it might break.

        Nothing is waited for: with the streams that have nothing to do the host synchronises, so that the driver sees
        the frees; those of others are pending.
        """
        self.blocks.mend()
        self.blocks.find()
        given = 0
        for lane in () if self.capturing else self.live():
            stream = lane.stream()
            if stream is None or direct_handle(stream, self.door) is None:
                continue  # It ends by itself, or it is being captured.
            idle = _idle(stream)
            here = lane.give_back()
            given += here
            if here and idle:
                stream.synchronize()
        return given

    def keep_small(self, nbytes: int) -> None:
        """Before so much more of the pool is used than ever was in use at once, give the largest free blocks back."""
        self._room -= nbytes
        if self._room >= 0 or self.capturing:
            return
        attributes = self.pool.attributes
        used = attributes.used_mem_current
        need = used + nbytes - self._most
        if need > 0:
            need += self._most >> _BULK
            for lane in self.live():
                stream = lane.stream()
                if need > 0 and stream is not None and direct_handle(stream, self.door) is not None:
                    need -= lane.give_back(need)
            used = attributes.used_mem_current
            if used + nbytes > self._most:
                self._most = used + nbytes + max(_LEAST, used >> _SLACK)
        self._room = self._most - used - nbytes

    @property
    def cached(self) -> int:
        """Bytes that are free."""
        self.blocks.mend()
        return sum(lane.cached for lane in self.live())


def _idle(stream: Stream) -> bool:
    """Whether synchronising with a stream waits for nothing."""
    return stream.query() and (sees_all_work(stream) or stream.device.default_stream.query())


class CachingAllocator(CachedAllocator, Closes, Shown):
    """A cache of free memory over a pool, for programs that allocate and free all the time.

    It is used like the pool: same :meth:`allocate`, same :class:`Buffer`. Memory that was freed on a stream, or
    dropped, is handed out again on that stream without asking the driver. Another stream gets it once the driver has
    seen the stream pass the free (``cuEventQuery``), and only where it has none of its own.

    Sizes are rounded up to classes: multiples of 512 bytes up to 8 KiB, then eight classes to each power of two, so
    that at most a ninth of a block is wasted from 4 KiB on. Where a class has no free block, one of up to three times
    the size is handed out. Blocks are never split, nor do neighbours become one. So that this does not fragment the
    pool, the cache gives the largest free blocks back before more of the pool is used than ever was in use at once,
    and 32 MiB or an eighth. Sizes above ``largest`` are not cached: the driver's pool orders them itself and rounds
    nothing.

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
        return self.pool.trim(keep)

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
        self._check_open()
        cache = self._cache
        if type(stream) is not Stream or direct_handle(stream, cache.door) is None:
            stream = as_stream(stream, cache.door)
            return self._ask(checked_size("nbytes", nbytes), stream)
        size = nbytes if type(nbytes) is int and 0 < nbytes <= self.largest else checked_size("nbytes", nbytes)
        # A driver that checks uses would not see which of them belong to which allocation.
        if not 0 < size <= self.largest or cache.door.used is not None:
            return self._ask(size, stream)
        lane = cache.lane(stream)
        shelf = lane.shelf(size)
        block = cache.take(lane, shelf, size)
        if block is None:
            cache.keep_small(shelf.nbytes)
            if self._limit and self.pool.attributes.used_mem_current + shelf.nbytes > self._limit:
                return self._ask(size, stream)
            try:
                plain = cache.pool.allocate(shelf.nbytes, stream)
            except OutOfMemoryError:
                plain = None
            if plain is None or type(plain) is not PlainBuffer:
                return self._ask(size, stream)
            cache.misses += 1
            block = self._blocks.take_over(plain, shelf)
        if lane.ended or cache.closed:
            block.home = None
        return self._wrap(block, size, stream)

    def _ask(self, nbytes: int, stream: Stream) -> Buffer:
        """A buffer that is the pool's own. Where memory runs out, what is cached is given back first."""
        cache = self._cache
        if self._limit and (direct_handle(stream, cache.door) is not None or not stream.capturing):
            self._keep_limit(nbytes)
        cache.keep_small(nbytes)
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
