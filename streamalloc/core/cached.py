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
from typing import Any, Protocol

from streamalloc.core.buffer import Allocator, Buffer, PlainBuffer, SharedState, StillImported, shared_state
from streamalloc.core.door import Door
from streamalloc.core.errors import error_from
from streamalloc.core.later import Deferred, later_of
from streamalloc.core.stream import Stream, StreamLike, direct_handle
from streamalloc.core.watching import Watcher, look, was_asked
from streamalloc.driver.internal import cuda

__all__ = [
    "Block",
    "Blocks",
    "CachedAllocator",
    "CachedBuffer",
    "Shelf",
    "end_with_stream",
    "forbid_lists",
    "give_lists",
    "has_lists",
    "leave_stream",
    "mend",
]

_DEFER: StillImported = "defer"
_NOWHERE = object()


class Block(cuda.CUdeviceptr):  # type: ignore[misc]  # the bindings have no types
    """The address of memory that a cache has, as the driver takes it."""

    __slots__ = ("home", "shelf")

    home: list[Block] | None
    """Where a free on its own stream puts it; None where only the slow path may free it."""
    shelf: Shelf
    """Where it belongs."""


class Shelf(Protocol):
    """Where blocks of one size and one stream belong."""

    blocks: list[Block]
    nbytes: int

    def returned(self) -> None:
        """A block was put back into the list on the slow path."""


class Blocks:
    """The memory that a cache has of a pool, in lists and in buffers."""

    __slots__ = ("__weakref__", "_all", "_finding", "_pool", "dropped", "key", "watchers")

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

    def __len__(self) -> int:
        """How many blocks there are."""
        return len(self._all)

    def take_over(self, plain: Buffer, shelf: Shelf) -> Block:
        """Make a block of a plain buffer's memory. The buffer counts as freed."""
        address = int(plain._ptr)
        block = Block(address)
        block.shelf = shelf
        block.home = shelf.blocks
        # No call from here on that a signal handler could interrupt.
        self._all[address] = block
        plain._ptr = None
        return block

    def free(self, block: Block, raw: Any) -> tuple[Any]:
        """Give a block back to the driver (``cuMemFreeAsync``): its answer. It stays where that is refused."""
        address = int(block)
        free = self._pool._free
        del self._all[address]
        try:
            answer: tuple[Any] = free(address, raw)
        except BaseException as error:
            if not was_asked(self._pool, address, error):
                self._all[address] = block
            raise
        if answer[0]:
            self._all[address] = block
        return answer

    def give_back(self, blocks: list[Block], stream: Stream, most: int = 1 << 64) -> int:
        """Give free blocks of a list back to the driver in stream order; how many. Those that it refuses stay."""
        given = 0
        while given < most:
            try:
                block = blocks.pop()
            except IndexError:
                break
            result = self.free(block, stream._handle)[0]
            if result:
                blocks.append(block)
                raise error_from(result, "cuMemFreeAsync")
            given += 1
        return given

    def move(self, block: Block, shelf: Shelf) -> None:
        """Let a block that the caller has belong to another shelf."""
        blocks = shelf.blocks
        block.shelf = shelf
        block.home = blocks

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
            every = tuple(self._all.values())
            for block, count in zip(every, _counts(every), strict=True):
                if count == _ALONE:
                    self._put(block)

    def _put(self, block: Block) -> None:
        for watcher in self.watchers:
            watcher.freed(int(block), None)
        shelf = block.shelf
        block.home = shelf.blocks
        shelf.blocks.append(block)
        shelf.returned()

    def bar(self) -> None:
        """Let all blocks that are in buffers go through the slow path when they are freed."""
        for block in tuple(self._all.values()):
            block.home = None

    def leave(self, buffer: CachedBuffer) -> Buffer:
        """Make a plain buffer of a cached one's memory, which from then on frees it: for memory that is shared."""
        state = shared_state(buffer)
        if isinstance(state, _Behind):
            return state.plain
        block = buffer._ptr
        if block is None:
            return buffer
        plain = self._plain(buffer._nbytes, buffer._stream)
        pointer = cuda.CUdeviceptr(int(block))
        address = int(block)
        behind = (_Behind(plain), pointer)
        if buffer._ptr is block:
            del self._all[address]
            plain._ptr = pointer
            buffer._shared = behind
            buffer._ptr = None
        return plain

    def _plain(self, nbytes: int, stream: Stream) -> PlainBuffer:
        plain: PlainBuffer = PlainBuffer()
        plain._nbytes = nbytes
        plain._stream = stream
        plain._allocator = self._pool
        plain._shared = None
        plain._ptr = None
        return plain


def _counts(blocks: tuple[Block, ...]) -> list[int]:
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

    def _over(self, blocks: Blocks, key: object, door: Door) -> None:
        """What takes the place of binding driver functions."""
        self._blocks = blocks
        self._key = key
        self._bind(door, None, None)
        # ``Buffer.free`` called by that name: it goes past the lists.
        self._free = blocks.free

    def _wrap(self, block: Block, nbytes: int, stream: Stream) -> Buffer:
        """A buffer for a block that the caller has."""
        buffer: CachedBuffer = CachedBuffer()
        buffer._ptr = block
        buffer._nbytes = nbytes
        buffer._stream = stream
        buffer._allocator = self
        buffer._shared = None
        watchers = self._blocks.watchers
        if watchers:
            # Its free has to come by here, too.
            block.home = None
            for watcher in watchers:
                watcher.allocated(self, int(block), nbytes, stream._raw)
        return buffer

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
            self._blocks.move(block, shelf)
            home = shelf.blocks
            # Taken before it is put back, so that two threads that free the same buffer do so once.
            watchers = self._blocks.watchers
            for watcher in watchers:
                watcher.freed(int(block), ordered._raw)
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

        It goes to the cache of the stream, and is handed out again on that stream. On a stream without a cache
        (captured, a default stream, of another library) it goes back to the pool (``cuMemFreeAsync``). Arguments and
        errors are those of :meth:`Buffer.free`.
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
        allocator = self._allocator
        if (
            block is not None
            and block.home is not None
            and still_imported is _DEFER
            and stream is not None
            and direct_handle(stream, allocator._door) is not None
        ):
            allocator._put_back(self, stream)  # type: ignore[arg-type]
            return
        self._free_slowly(stream, still_imported, timeout)

    def __del__(self) -> None:
        try:
            block = self._ptr
            if block is None:
                return
            self._ptr = None
            if self._stream._handle is not None and block.home is not None:
                block.home.append(block)
            else:
                self._allocator._blocks.dropped.append(block)
        except AttributeError:  # the call that was to allocate it raised
            return

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


def give_lists(stream: Stream, key: object, lists: dict[int, list[Block]]) -> None:
    """Let the fast path find a cache's lists for a stream, unless that is captured, closed or a default stream."""
    if key in stream._lists:
        return
    stream._lists = {**stream._lists, key: lists}
    # A capture may just have begun.
    if direct_handle(stream, stream._door) is None:
        stream._forbid_direct()


def has_lists(stream: Stream, key: object, lists: dict[int, list[Block]]) -> bool:
    """Whether the fast path finds these lists of a cache for a stream."""
    return stream._lists.get(key) is lists


def forbid_lists(stream: Stream) -> None:
    """Let nothing go past the slow path on a stream any more, as in a forked child."""
    stream._forbid_direct()


def end_with_stream(stream: Stream, item: Deferred) -> None:
    """Have ``item`` end before the stream is closed, or after it was dropped."""
    later_of(stream._door).end_with(stream, item)
    stream._endings += (item,)


def leave_stream(stream: Stream, key: object, item: Deferred) -> None:
    """Forget the lists of a cache, and what was to end with the stream."""
    stream._endings = tuple(other for other in stream._endings if other is not item)
    if key in stream._lists:
        stream._lists = {other: lists for other, lists in stream._lists.items() if other is not key}
