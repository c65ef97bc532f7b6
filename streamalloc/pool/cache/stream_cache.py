"""The free blocks of one stream, and their release when the stream ends."""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from streamalloc.core.errors import CaptureError, NotReadyError
from streamalloc.core.internal import (
    Deferred,
    Device,
    Event,
    Spares,
    Stream,
    deferred_queue,
    end_of,
    end_with_stream,
    forbid_lists,
    free_refused,
    keeps_alive,
    leave_stream,
    moment,
    ordered_after,
    ordered_after_end,
    raw_handle,
    thread_of,
    watching_for_destruction,
)
from streamalloc.core.session import Session, session_of
from streamalloc.pool.cache.blocks import UNIT, Block, SizeClass, class_size

_LARGEST_FIT = 5
"""A free block serves a request of at least a fifth of its size. A smaller factor splits memory among more classes."""
_LARGEST_KEPT = 2
"""The fast path takes further blocks of a class that is smaller than this multiple of the request's. Beyond, if the
request's class has blocks, each request looks for one of them first: tensors of half precision would keep the blocks of
those of full precision.
"""
_MAX_SIZES = 1 << 14
"""Requested sizes whose free list a stream remembers: 1 MiB of dictionary."""
MAX_RETURNING = 64
"""Events per stream for blocks freed elsewhere. Data loaders have a few batches under way at a time."""


Returning: TypeAlias = "tuple[Event, Block, Spares | None, int, int]"
"""A block that was freed on another stream, behind an event. If that was recorded for this block: the spare events of
the stream, and the moments before and after the record."""


class Cache(Protocol):
    """The state that the streams of one cache share."""

    @property
    def closed(self) -> bool: ...

    @property
    def keys(self) -> tuple[object, ...]: ...

    def free_block(self, block: Block, raw: Any, /) -> Any: ...

    def collect_dropped(self) -> None: ...


class StreamCache(Deferred):
    """The size classes of one stream. It ends when the stream is closed or dropped, or the cache is closed."""

    __slots__ = (
        "__weakref__", "_last", "_passed", "cache", "class_of", "classes", "device", "ended", "kept_alive", "lists",
        "peak", "returning", "session", "stream", "thread", "threads",
    )  # fmt: skip

    def __init__(self, cache: Cache, stream: Stream) -> None:
        self.cache: Cache = cache
        self.session: Session = session_of(stream)
        self.device: Device = stream.device
        self.stream: weakref.ref[Stream] = weakref.ref(stream)
        self.thread, self.threads = thread_of(stream)
        self._last = end_of(stream)
        self.kept_alive: Stream | None = keeps_alive(stream)
        """Keeps a library's object that destroys its stream when it dies: no event can be recorded after that."""
        self.ended: bool = False
        self.classes: dict[int, SizeClass] = {}
        """Size classes by block size in bytes."""
        self.class_of: dict[int, SizeClass] = {}
        """Size classes by requested size, in units of 512 bytes."""
        self.lists: dict[int, list[Block]] = {}
        """Free lists for the fast path, by requested size in units."""
        self.returning: deque[Returning] = deque()
        """Blocks freed on other streams."""
        self._passed: list[Event] = []
        """Events of blocks that have returned, to record again."""
        self.peak: int = 0
        """Bytes in use at once, at most, when that was last counted."""
        end_with_stream(stream, self)
        self.session.shut_with_me(self)

    def size_class(self, nbytes: int) -> SizeClass:
        """The size class for a request."""
        size = class_size(nbytes)
        found = self.classes.get(size)
        if found is None:
            found = self.classes.setdefault(size, SizeClass(self, size))
            for other in list(self.classes.values()):
                other.fitting = ()
        if len(self.class_of) >= _MAX_SIZES:
            self.class_of.clear()
        self.class_of[(nbytes - 1) // UNIT] = found
        return found

    def take(self, wanted: SizeClass, nbytes: int) -> Block | None:
        """Remove the smallest free block that fits; the fast path takes from the same list until it is empty."""
        if self.returning:
            self.collect()
        for free in wanted.fitting or self._find_fitting(wanted):
            if free:
                try:
                    block = free.pop()
                except IndexError:  # another thread took it
                    continue
                break
        else:
            block, free = None, wanted.free
        if not self.ended:
            if len(self.lists) >= _MAX_SIZES:
                self.lists.clear()
            if wanted.count and block is not None and block.size_class.nbytes >= _LARGEST_KEPT * wanted.nbytes:
                free = wanted.free
            self.lists[(nbytes - 1) // UNIT] = free
        return block

    def _find_fitting(self, wanted: SizeClass) -> tuple[list[Block], ...]:
        sizes = sorted(self.classes)
        some = sizes[bisect_left(sizes, wanted.nbytes) : bisect_left(sizes, _LARGEST_FIT * wanted.nbytes + 1)]
        # The end of the stream on another thread removes the classes.
        found = map(self.classes.get, some)
        wanted.fitting = tuple(one.free for one in found if one is not None)
        return wanted.fitting

    def collect(self) -> None:
        """Put blocks freed on other streams into their lists, up to the first whose event has not passed.

        If an event has passed, so have all that were recorded on its stream before, for any cache: the newest is asked.
        """
        returning = self.returning
        newest: Returning | None = None
        if len(returning) > 1:
            with contextlib.suppress(IndexError):  # another thread took it
                oldest, latest = returning[0], returning[-1]
                if (source := latest[2]) is not None and source is oldest[2] and latest[0].query():
                    newest, source.passed = latest, max(source.passed, latest[3])
        last: Event | None = None
        while returning:
            try:
                entry = returning.popleft()
            except IndexError:  # another thread took it
                return
            event, block, source, began, recorded = entry
            if source is None or (recorded >= source.passed and entry is not newest):
                passed = False
                try:
                    passed = (source is None and event is last) or event.query()
                finally:
                    if not passed:
                        returning.appendleft(entry)
                if not passed:
                    return
                if source is not None:
                    source.passed = max(source.passed, began)
            last = event
            # Blocks may share an event that was not recorded here.
            if source is not None and event.device is self.device and not self.ended:
                self._passed.append(event)
            self.put(block)

    def record(self, stream: Stream) -> Event:
        """An event after the queued work of a stream of ours, for one block."""
        try:
            again = self._passed.pop() if stream.device is self.device else None
        except IndexError:
            again = None
        return stream.record(again)

    def put_behind(self, event: Event, block: Block, source: Spares | None = None, began: int = 0) -> None:
        """Put a block into the free list of its size class once an event has passed.

        ``source`` and ``began`` if :meth:`record` recorded it: the spare events of the stream, and a moment before.
        """
        self.returning.append((event, block, source, began, moment()))
        if self.ended:
            deferred_queue(self.session).submit(self)

    def put(self, block: Block) -> None:
        """Put a block into the free list of its size class. After the end it is released at a later point of work."""
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
        while self.returning:
            with contextlib.suppress(IndexError):  # another thread took it
                entry = self.returning.popleft()
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
                while size_class.free:
                    try:
                        block = size_class.free.pop()
                    except IndexError:  # another thread took it
                        break
                    refused = self.cache.free_block(block, raw)
                    if refused:
                        size_class.free.append(block)
                        raise free_refused(refused, ordered)

    def after_all_threads(self) -> Event:
        """An event after the work of the per-thread default streams of all threads, and of this one if it has ended.

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
        self.ended = True
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
            stream = self.device.per_thread_stream  # it has lists for the threads, and outlives them
        if stream is not None:
            leave_stream(stream, self.cache.keys, self)
        if self.over:
            self._last = []
            self.kept_alive = None
            # Cycles would keep the cache and its pool until a collection.
            self.classes.clear()
            self.class_of.clear()
        return not self.free_bytes

    @property
    def over(self) -> bool:
        """Whether it has ended, and has no block, free or in a buffer."""
        return self.ended and self.empty

    @property
    def empty(self) -> bool:
        """Whether it has no block, free or in a buffer."""
        return not any(one.count for one in list(self.classes.values()))

    def ordered(self, act: Callable[[Stream], object]) -> None:
        """Call ``act`` with the stream, which no other thread closes meanwhile, or one that comes after its work."""
        stream = self.stream()
        if stream is None:
            ordered_after_end(self.device, self._last, act)
        else:
            with watching_for_destruction(stream):
                ordered_after(stream, act)

    def _shut_after_fork(self) -> None:
        self.lists.clear()
        stream = self.stream()
        if stream is not None:
            forbid_lists(stream)
