"""Allocate and free of memory that a cache keeps: the fast paths, and who has which block.

The shape is that of :mod:`streamalloc.core.buffer`. The plain case takes a block off a list of its stream, or puts it
back there; no driver is asked. Whatever is not plain finds no list, and falls through to the slow path.

A :class:`Block` is in one place: a list, a buffer, or the hands of a thread. Taking it off a list and putting it back
is one step that no thread and no signal handler can divide. What a signal handler raises in between, or in a finaliser,
leaves a block with nobody but the :class:`Blocks` that know them all, which then find it.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from streamalloc.core.allocation_hooks import Watcher, besides, look
from streamalloc.core.buffer import (
    Allocator,
    Buffer,
    PlainBuffer,
    SharedState,
    StillImported,
    free_refused,
    shared_state,
)
from streamalloc.core.deferred import Deferred, deferred_queue
from streamalloc.core.errors import OutOfMemoryError, error_from
from streamalloc.core.session import NOT_CALLED, Session
from streamalloc.core.stream import Stream, StreamLike, direct_handle
from streamalloc.driver.internal import cuda

__all__ = [
    "Block",
    "Blocks",
    "CachedAllocator",
    "CachedBuffer",
    "Lane",
    "Shelf",
    "end_with_stream",
    "forbid_lists",
    "give_lists",
    "lane_on",
    "leave_stream",
    "mend",
]

B = TypeVar("B", bound=Buffer)

_DEFER: StillImported = "defer"
_NOWHERE = object()


class Block(cuda.CUdeviceptr):  # type: ignore[misc]  # the bindings have no types
    """The address of memory that a cache has, as the driver takes it."""

    __slots__ = ("address", "home", "shelf")

    address: int
    home: list[Block] | None
    """Where a free on its own stream puts it; None where only the slow path may free it."""
    shelf: Shelf
    """Where it belongs."""


class Shelf(Protocol):
    """Where blocks of one size and one stream belong."""

    blocks: list[Block]
    count: int
    """How many belong here, in the list or in buffers; a figure that threads may get a little wrong."""
    nbytes: int

    def returned(self) -> None:
        """A block was put back into the list on the slow path."""


class Lane(Protocol):
    """What a cache has for one stream."""

    @property
    def shelves(self) -> Mapping[int, Shelf]:
        """Those that there are, by size."""


class Blocks:
    """The memory that a cache has of a pool, in lists and in buffers."""

    __slots__ = ("__weakref__", "_all", "_finding", "_pool", "dropped", "held", "key", "watchers")

    def __init__(self, pool: Allocator) -> None:
        self._pool = pool
        self.key: object = object()
        """What the lists are found by in a stream."""
        self.watchers: tuple[Watcher, ...] = ()
        """Who is told of what is handed out and comes back."""
        self._all: dict[int, Block] = {}
        """By address."""
        self.dropped: deque[Block] = deque()
        """What was dropped where only the slow path may free it."""
        self._finding = threading.RLock()
        """Held while lost blocks are looked for; no finaliser takes it."""
        self.held = 0
        """Bytes of all of them, as exact as :attr:`Shelf.count`."""

    def __len__(self) -> int:
        """How many blocks there are."""
        return len(self._all)

    def buy(self, cache: CachedAllocator, nbytes: int, shelf: Shelf, stream: Stream) -> CachedBuffer | None:
        """A buffer with a new block (``cuMemAllocFromPoolAsync``); None where there is no memory or it is not plain."""
        pool = self._pool
        handle = direct_handle(stream, pool._session)
        if handle is None:
            return None
        # The buffer is there before its memory, and where this is interrupted frees what is no block yet.
        buffer: CachedBuffer = CachedBuffer()
        buffer._nbytes = nbytes
        buffer._stream = stream
        buffer._allocator = cache
        buffer._shared = None
        try:
            # A loop, before whose end Python does not look for signals.
            alloc = besides(pool._alloc, self.watchers)
            for answer in map(alloc, (shelf.nbytes,), (pool._raw,), (handle,)):
                result, buffer._ptr = answer
                break
        except OutOfMemoryError:  # the limit of who watches the pool
            return None
        if result:
            if result == cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                return None
            raise error_from(result, "cuMemAllocFromPoolAsync")
        address = int(buffer._ptr)
        block = Block(address)
        block.address = address
        block.shelf = shelf
        block.home = shelf.blocks
        # No call from here on that a signal handler could interrupt.
        self._all[address] = block
        buffer._ptr = block
        shelf.count += 1
        self.held += shelf.nbytes
        return buffer

    def give_up(self, buffer: CachedBuffer, pointer: Any) -> None:
        """Free what is no block yet, as a plain buffer that is dropped does."""
        _filled(PlainBuffer, self._pool, pointer, buffer._nbytes, buffer._stream)

    def free(self, block: Block, raw: Any, told: tuple[Watcher, ...] = ()) -> tuple[Any]:
        """Give a block back to the driver (``cuMemFreeAsync``): its answer. It stays where that is refused.

        ``told``: the watchers that know already that it is free.
        """
        address, shelf = block.address, block.shelf
        free = besides(self._pool._free, told)
        del self._all[address]
        try:
            answer: tuple[Any] = free(address, raw)
        except NOT_CALLED:
            self._all[address] = block
            raise
        if answer[0]:
            self._all[address] = block
        else:
            shelf.count -= 1
            self.held -= shelf.nbytes
        return answer

    def give_back(self, blocks: list[Block], stream: Stream) -> None:
        """Give the free blocks of a list back to the driver in stream order. Those that it refuses stay.

        Raises
        ------
        CaptureError
            Other code captures the stream.
        """
        # Read once: a finaliser may forbid fast paths meanwhile.
        raw = stream._checked_raw()
        while blocks:
            try:
                block = blocks.pop()
            except IndexError:  # another thread took it
                return
            result = self.free(block, raw, self.watchers)[0]
            if result:
                blocks.append(block)
                raise free_refused(result, stream)

    def free_on(self, buffer: CachedBuffer, block: Block, stream: Stream, handle: Any) -> Any:
        """Free a buffer on another stream of ours: the driver's refusal, or nothing.

        It is kept for that stream if that has asked for the size before, and else goes back to the pool.
        """
        lane: Lane | None = stream._lists.get(self)
        shelf = None if lane is None else lane.shelves.get(block.shelf.nbytes)
        if shelf is not None:
            self.move(block, shelf)
            if buffer._ptr is block:
                buffer._ptr = None
                shelf.blocks.append(block)
                shelf.returned()
            return None
        if buffer._ptr is not block:  # another thread has freed it
            return None
        buffer._ptr = None
        try:
            return self.free(block, handle)[0]
        finally:
            if self._all.get(block.address) is block:
                buffer._ptr = block

    def move(self, block: Block, shelf: Shelf) -> None:
        """Let a block that the caller has belong to another shelf."""
        blocks, before = shelf.blocks, block.shelf
        block.shelf = shelf
        block.home = blocks
        before.count -= 1
        shelf.count += 1

    def mend(self) -> None:
        """Put blocks that were dropped back into their lists."""
        while self.dropped:
            try:
                block = self.dropped.popleft()
            except IndexError:  # another thread took it
                return
            self._put(block)

    def find(self) -> None:
        """Put blocks that an interrupt has left with nobody back into their lists."""
        with self._finding:
            # A tuple would be made when the iterator is there: a collection then, whose finalisers change the
            # dictionary or let other threads do so, would end in an error.
            every = list(self._all.values())
            for block, count in zip(every, _counts(every), strict=True):
                if count == _ALONE:
                    self._put(block)

    def _put(self, block: Block) -> None:
        for watcher in self.watchers:
            watcher.freed(block.address, None)
        shelf = block.shelf
        block.home = shelf.blocks
        shelf.blocks.append(block)
        shelf.returned()

    def bar(self) -> None:
        """Let all blocks that are in buffers go through the slow path when they are freed."""
        for block in list(self._all.values()):
            block.home = None

    def leave(self, buffer: CachedBuffer) -> Buffer:
        """Make a plain buffer of a cached one's memory, which from then on frees it: for memory that is shared."""
        state = shared_state(buffer)
        if isinstance(state, _Behind):
            return state.plain
        block = buffer._ptr
        if block is None:
            return buffer
        plain: PlainBuffer = _filled(PlainBuffer, self._pool, None, buffer._nbytes, buffer._stream)
        address, shelf = block.address, block.shelf
        pointer = cuda.CUdeviceptr(address)
        behind = (_Behind(plain), pointer)
        if buffer._ptr is block:
            del self._all[address]
            plain._ptr = pointer
            buffer._shared = behind
            buffer._ptr = None
            shelf.count -= 1
            self.held -= shelf.nbytes
        return plain


def _filled(kind: type[B], allocator: Allocator, pointer: Any, nbytes: int, stream: Stream) -> B:
    """A new buffer with what it is to have; the pointer last, as it is then the buffer's."""
    buffer: B = kind()
    buffer._nbytes = nbytes
    buffer._stream = stream
    buffer._allocator = allocator
    buffer._shared = None
    buffer._ptr = pointer
    return buffer


def _counts(blocks: Sequence[Block]) -> list[int]:
    """How many references there are to each block, these ones included."""
    return [sys.getrefcount(block) for block in blocks]


def _alone() -> int:
    """The count of a block that only a dictionary and a tuple of its values have."""
    known = {0: Block(0)}
    return _counts(tuple(known.values()))[0]


_ALONE = _alone()


class CachedAllocator(Allocator):
    """An allocator that has lists of memory on the streams it was used with."""

    __slots__ = ("_blocks", "_key")

    _key: object
    """What its lists are found by in a stream."""
    _blocks: Blocks

    def allocate(self, nbytes: int, stream: StreamLike) -> Buffer:
        """Allocate in stream order, from the cache if it has something: otherwise as :meth:`MemoryPool.allocate`.

        Parameters
        ----------
        nbytes
            Size in bytes; 0 gives a valid empty buffer. Addresses are multiples of 512 bytes.
        stream
            The stream that orders the allocation. Only open streams of this library that are neither captured nor
            default streams have cached memory.

        Returns
        -------
        Buffer
            Freed on such a stream, or dropped, its memory goes back to the cache. While ``stream`` is being captured,
            a :class:`GraphBuffer`, which belongs to the graph.

        Raises
        ------
        OutOfMemoryError
            There is no memory, nor would there be if the cache gave back all it has; or the limit does not allow it.
        TypeError, ValueError
            The size is no integer or out of range; the stream is none, or of another driver.
        ClosedError
            The cache, its pool or the stream was closed.
        """
        if type(nbytes) is int:
            try:
                blocks = stream._lists[self._key][(nbytes - 1) >> 9]  # type: ignore[union-attr]
                block = blocks.pop() if blocks else None
            except (LookupError, AttributeError, TypeError):
                block = None
            if block is not None:
                # An interrupt from here on leaves the block to be found.
                buffer: CachedBuffer = CachedBuffer()
                buffer._ptr = block
                buffer._nbytes = nbytes
                buffer._stream = stream  # type: ignore[assignment]
                buffer._allocator = self
                buffer._shared = None
                return buffer
        return self._allocate_slowly(nbytes, stream)

    def _over(self, blocks: Blocks, session: Session) -> None:
        """What takes the place of binding driver functions."""
        self._blocks = blocks
        self._key = blocks.key
        self._bind(session, None, None)
        # ``Buffer.free`` called by that name: it goes past the lists.
        self._free = blocks.free

    def _wrap(self, block: Block, nbytes: int, stream: Stream) -> CachedBuffer:
        """A buffer for a block that the caller has."""
        buffer: CachedBuffer = _filled(CachedBuffer, self, block, nbytes, stream)
        return buffer

    def _apart(self, buffer: CachedBuffer) -> None:
        """Let the free of a buffer come by the slow path, and tell who watches of its allocation."""
        block = buffer._ptr
        block.home = None
        for watcher in self._blocks.watchers:
            watcher.allocated(self, block.address, buffer._nbytes, buffer._stream._raw)

    def _watched_by(self, watchers: tuple[Watcher, ...]) -> None:
        self._blocks.watchers = watchers
        # No stream has lists by this one.
        self._key = _NOWHERE if watchers else self._blocks.key

    def _shelf_for(self, block: Block, stream: Stream) -> Shelf | None:
        """Where a block goes that is freed on ``stream``; None where the driver gets it back."""
        raise NotImplementedError

    def _put_back(self, buffer: CachedBuffer, ordered: Stream) -> None:
        """The slow path of a free, after the checks."""
        block = buffer._ptr
        shelf = self._shelf_for(block, ordered)
        if shelf is not None:
            home = shelf.blocks
            watchers = self._blocks.watchers
            # Before it has a home: who drops the buffer from then on tells nobody.
            for watcher in watchers:
                watcher.freed(block.address, ordered._raw)
            self._blocks.move(block, shelf)
            # Taken before it is put back, so that two threads that free the same buffer do so once.
            if buffer._ptr is block:
                buffer._ptr = None
                home.append(block)
                shelf.returned()
            if watchers:
                look(watchers)
            return
        # As for memory that is shared: where the driver refuses, the buffer still has it.
        self._blocks.leave(buffer)
        buffer.free(ordered)


class CachedBuffer(Buffer):
    """A buffer whose memory goes back to a cache, when it is freed or dropped."""

    __slots__ = ()

    __init__ = object.__init__

    _allocator: CachedAllocator

    def free(
        self,
        stream: StreamLike | None = None,
        still_imported: StillImported = _DEFER,
        timeout: float | None = None,
    ) -> None:
        """Free the memory in stream order: later work must not use it; earlier work may.

        It goes to the cache of the stream, and is handed out again on that stream; to that of another stream where
        that has asked for this size before. Otherwise, and on streams without a cache (captured, a default stream, of
        another library), it goes back to the pool (``cuMemFreeAsync``). Arguments and errors are those of
        :meth:`Buffer.free`.
        """
        block = self._ptr
        if (
            (stream is None or stream is self._stream)
            and still_imported is _DEFER
            and block is not None
            and self._stream._handle is not None
            and block.home is not None
        ):
            # Nothing is called between these that a signal handler could interrupt: the memory is freed once.
            self._ptr = None
            block.home.append(block)
            return
        if block is not None and block.home is not None and still_imported is _DEFER and stream is not None:
            allocator = self._allocator
            handle = direct_handle(stream, allocator._session)
            if handle is not None:
                result = allocator._blocks.free_on(self, block, stream, handle)  # type: ignore[arg-type]
                if result:
                    raise free_refused(result, self._ordered_on(stream))
                return
        self._free_slowly(stream, still_imported, timeout)

    def __del__(self) -> None:
        block = None
        try:
            block = self._ptr
            if block is None:
                return
            self._ptr = None
            # The block is looked at first: what is none yet has no home.
            if block.home is not None and self._stream._handle is not None:
                block.home.append(block)
            else:
                self._allocator._blocks.dropped.append(block)
        except AttributeError:  # the call that was to allocate it raised
            if block is not None and type(block) is not Block:
                self._allocator._blocks.give_up(self, block)

    def _free_on(self, ordered: Stream) -> None:
        # Freed to a list, or past the cache.
        self._allocator._put_back(self, ordered)

    def _past_caches(self) -> Buffer:
        return self._allocator._blocks.leave(self)


CachedBuffer.__name__ = CachedBuffer.__qualname__ = "Buffer"


class _Behind(SharedState):
    """Frees memory that has left the cache by the plain buffer that has it now."""

    __slots__ = ("plain",)

    def __init__(self, plain: Buffer) -> None:
        self.plain: Buffer = plain

    def free(self, buffer: Buffer, stream: Stream, still_imported: StillImported, timeout: float | None) -> None:
        try:
            self.plain.free(stream, still_imported, timeout)
        finally:
            if self.plain.freed:
                buffer._shared = None

    def drop(self, buffer: Buffer) -> None:
        """Nothing to do: the plain buffer is dropped, too."""


def mend(cache: CachedAllocator) -> None:
    """Put blocks that were dropped back into a cache's lists."""
    cache._blocks.mend()


# -- what caches need of streams -----------------------------------------------------------------------------


def give_lists(stream: Stream, blocks: Blocks, lane: Lane, lists: dict[int, list[Block]]) -> None:
    """Let the fast path find a cache's lists for a stream, unless that is captured, closed or a default stream."""
    if blocks.key in stream._lists:
        return
    stream._lists = {**stream._lists, blocks.key: lists, blocks: lane}
    # A capture may just have begun.
    if direct_handle(stream, stream._session) is None:
        stream._forbid_direct()


def lane_on(stream: StreamLike, blocks: Blocks) -> Any:
    """What a cache has for a stream, where the fast path finds its lists."""
    return stream._lists.get(blocks) if type(stream) is Stream else None


def forbid_lists(stream: Stream) -> None:
    """Let nothing go past the slow path on a stream any more, as in a forked child."""
    stream._forbid_direct()


def end_with_stream(stream: Stream, item: Deferred) -> None:
    """Have ``item`` end before the stream is closed, or after it was dropped."""
    deferred_queue(stream._session).end_with(stream, item)
    stream._endings += (item,)


def leave_stream(stream: Stream, blocks: Blocks, item: Deferred) -> None:
    """Forget the lists of a cache, and what was to end with the stream."""
    stream._endings = tuple(other for other in stream._endings if other is not item)
    if blocks in stream._lists:
        stream._lists = {key: found for key, found in stream._lists.items() if key not in (blocks, blocks.key)}
