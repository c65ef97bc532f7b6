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
    Threads,
    deferred_queue,
    drained,
    end_of,
    end_with_stream,
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
"""A request may take a free block of up to five times its size."""
_LARGEST_KEPT = 2
"""The fast path keeps taking from a larger class only below this multiple of the request's class. From the multiple on,
if the request's class has blocks of its own, each request first searches its own class. Otherwise half-precision
tensors would use up the blocks of full-precision ones.
"""
_MAX_SIZES = 1 << 14
"""Number of requested sizes whose free list a stream remembers, in 1 MiB of dictionary."""
MAX_RETURNING = 64
"""Blocks per stream that may wait for an event; enough for data loaders."""


Returning: TypeAlias = "tuple[Event, Block, Spares | None, int, int]"
"""A block freed on another stream, with the event it waits for. For an event of :meth:`StreamCache.record`: also the
spare events of the stream, and the times before and after the record.
"""


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
        "_last", "_passed", "cache", "class_of", "classes", "device", "ended", "kept_alive", "lists",
        "peak", "returning", "session", "stream", "thread", "threads",
    )  # fmt: skip

    def __init__(self, cache: Cache, stream: Stream) -> None:
        self.cache: Cache = cache
        self.session: Session = session_of(stream)
        self.device: Device = stream.device
        self.stream: weakref.ref[Stream] = weakref.ref(stream)
        thread, threads = thread_of(stream)
        self.thread: int = thread
        self.threads: Threads | None = threads
        self._last = end_of(stream)
        self.kept_alive: Stream | None = keeps_alive(stream)
        """Keeps alive a library's object whose finaliser destroys the stream."""
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
        """Completed events, to be recorded again."""
        self.peak: int = 0
        """Most bytes in use, as of the last count."""
        end_with_stream(stream, self)

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
        """Remove the smallest free block that fits. The fast path then takes from that free list until it is empty."""
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
        """Move blocks freed on other streams to their free lists, up to the first whose event has not completed.

        A completed event proves that all earlier events of its stream have completed, for any cache. So the newest
        event is queried first.
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
            # An event that `record` did not make may belong to several blocks.
            if source is not None and event.device is self.device and not self.ended:
                self._passed.append(event)
            self.put(block)

    def record(self, stream: Stream) -> Event:
        """Record an event after the queued work of one of our streams, for one block."""
        try:
            again = self._passed.pop() if stream.device is self.device else None
        except IndexError:
            again = None
        return stream.record(again)

    def put_behind(self, event: Event, block: Block, source: Spares | None = None, began: int = 0) -> None:
        """Put a block into the free list of its size class once an event has completed.

        For an event of :meth:`record`, ``source`` is the stream's spare events and ``began`` a time before the record.
        """
        self.returning.append((event, block, source, began, moment()))
        if self.ended:
            deferred_queue(self.session).submit(self)

    def put(self, block: Block) -> None:
        """Put a block into the free list of its size class. If this cache has ended, a point of work releases the
        block.
        """
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
        for entry in drained(self.returning.popleft):
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
                for block in drained(size_class.free.pop):
                    refused = self.cache.free_block(block, raw)
                    if refused:
                        size_class.free.append(block)
                        raise free_refused(refused, ordered)

    def after_all_threads(self) -> Event:
        """Record an event after the work of the per-thread default streams of all threads, ended ones included.

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
            stream = self.device.per_thread_stream  # it has the lists of all threads, and outlives the threads
        if stream is not None:
            leave_stream(stream, self.cache.keys, self)
        if self.over:
            self._last = []
            self.kept_alive = None
            # These cycles would keep the cache and its pool until a garbage collection.
            self.classes.clear()
            self.class_of.clear()
        return not self.free_bytes

    @property
    def over(self) -> bool:
        """Whether this cache has ended and has no block, free or in a buffer."""
        return self.ended and self.empty

    @property
    def empty(self) -> bool:
        """Whether it has no block, free or in a buffer."""
        return not any(one.count for one in list(self.classes.values()))

    def ordered(self, act: Callable[[Stream], object]) -> None:
        """Call ``act`` with the stream, or after its end with a stream ordered after its work. Prevents a concurrent
        close.
        """
        stream = self.stream()
        if stream is None:
            ordered_after_end(self.device, self._last, act)
        else:
            with watching_for_destruction(stream):
                ordered_after(stream, act)
