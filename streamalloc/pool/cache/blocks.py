"""Blocks of a cache, their size classes, and the buffers that hold them.

A :class:`CachedBlock` is always in exactly one container: in a free list, in a buffer, or in the queue ``returning`` of
a stream. If it were in two, two buffers would get the same memory. So each removal and each insertion is one atomic
list or deque operation, and a buffer clears its pointer before its block is inserted elsewhere. An exception of a
signal handler may lose the one block that is being moved. This block stays allocated until the pool ends.
"""

from __future__ import annotations

import functools
from threading import get_ident
from typing import TYPE_CHECKING, Any

from streamalloc.core.internal import Buffer, SharedState, Stream, StreamLike
from streamalloc.driver.internal import cuda

if TYPE_CHECKING:
    from streamalloc.core.internal import StillImported

    # For type checkers only, because the bindings have no types.
    class _Pointer:
        def __init__(self, address: int) -> None: ...
        def __int__(self) -> int: ...
else:
    _Pointer = cuda.CUdeviceptr

UNIT = 512
"""The size of each block is a multiple of this number of bytes. Pools align addresses to it, so smaller steps would
save nothing.
"""
_DEFER: StillImported = "defer"


@functools.lru_cache(1 << 12)
def class_size(nbytes: int, finer: int = 0) -> int:
    """Return the block size in bytes for a request of ``nbytes`` bytes, at least 1. The size is rounded up to a
    multiple of 512; above 8 KiB, to a multiple of an eighth of the next lower power of two. Each increment of ``finer``
    doubles the number of sizes: with 1, above 16 KiB, the step is a sixteenth.
    """
    bits = (nbytes - 1).bit_length() - 4 - finer
    step = 1 << bits if bits > 9 else UNIT
    return (nbytes + step - 1) & -step


class SizeClass:
    """The blocks of one size on one stream: a list of the free blocks, and the number of all blocks."""

    __slots__ = ("count", "fitting", "free", "nbytes", "owner")

    def __init__(self, owner: Any, nbytes: int) -> None:
        self.owner: Any = owner
        """The :class:`StreamCache` of the stream that the blocks serve."""
        self.nbytes: int = nbytes
        self.free: list[CachedBlock] = []
        """Free blocks. The block that was freed last is reused first."""
        self.count: int = 0
        """Number of blocks, free or in buffers. May be inexact, because concurrent updates can be lost."""
        self.fitting: tuple[list[CachedBlock], ...] = ()
        """Free lists of this and larger sizes that can serve a request of this size, smallest first. Empty until the
        first :meth:`StreamCache.take` of this size, and again after the stream gets a new size.
        """


class CachedBlock(_Pointer):
    """An allocation of the pool that a cache holds. The class is a subclass of ``CUdeviceptr``, so the driver accepts a
    block as an address.
    """

    __slots__ = ("address", "home", "size_class")

    address: int
    """Device address."""
    home: list[CachedBlock] | None
    """Free list to which a free on the block's stream returns the block. None if watchers must be notified of the free,
    or the stream cache has ended: :meth:`CachingAllocator._free_cached` then makes the free.
    """
    size_class: SizeClass
    """Size class of the block on the stream that the block serves."""


class CachedBuffer(Buffer):
    """A buffer whose block returns to a cache when the buffer is freed or dropped."""

    __slots__ = ()

    if not TYPE_CHECKING:
        __init__ = object.__init__

    _allocator: Any

    @property
    def address(self) -> int:
        """Address of the first byte. Raises ClosedError once the buffer was freed."""
        block = self._ptr
        return int(self._live()) if block is None else block.address

    def free(
        self, stream: StreamLike | None = None, still_imported: StillImported = _DEFER, timeout: float | None = None
    ) -> None:
        """Free the memory in stream order. Earlier work may still use the memory; later work must not.

        The cache reuses the memory on the buffer's stream, in the order of that stream, without a driver call. A free
        does not query whether the stream is being captured: the next allocation does.

        A free on another stream records an event on that stream (``cuEventRecord``). The memory returns to the buffer's
        own stream once the event has completed. If 64 blocks of that stream already wait for events, the memory returns
        to the pool instead (``cuMemFreeAsync``). Arguments and errors are those of :meth:`Buffer.free`.
        """
        block, own = self._ptr, self._stream
        if block is not None and still_imported is _DEFER and (stream is None or stream is own):
            home = block.home
            # A block of another thread's per-thread stream is not put into its list here: that thread's work may come
            # after this free. `_ptr` is read again, because another thread may have freed the buffer during the call of
            # `get_ident`.
            if (
                home is not None
                and own.usable
                and (own.thread is None or (own.thread == get_ident() and self._ptr is block))
            ):
                self._ptr = None
                home.append(block)
                return
        self._free_checked(stream, still_imported, timeout)

    def __del__(self) -> None:
        try:
            block = self._ptr
        except AttributeError:  # The allocation raised, so this buffer owns no memory.
            return
        if block is None:
            return
        self._ptr = None
        home, own = block.home, self._stream
        if home is not None and own.usable and (own.thread is None or own.thread == get_ident()):
            home.append(block)
        else:
            self._allocator._dropped.append(block)

    def free_on(self, ordered: Stream, handle: Any) -> None:
        self._allocator._free_cached(self, ordered)

    def past_caches(self) -> Buffer:
        behind: Buffer = self._allocator._leave_cache(self)
        return behind


CachedBuffer.__name__ = CachedBuffer.__qualname__ = "Buffer"


class SharedBehind(SharedState):
    """State of a cached buffer whose memory has left the cache. A free of the cached buffer frees :attr:`behind`, the
    pool's buffer that now owns the memory.
    """

    __slots__ = ("behind",)

    def __init__(self, behind: Buffer, pointer: Any) -> None:
        self.behind: Buffer = behind
        self.pointer = pointer

    def begin_free(self, buffer: Buffer, stream: Stream, still_imported: StillImported, timeout: float | None) -> bool:
        try:
            self.behind.free(None if stream is self.behind.stream else stream, still_imported, timeout)
        finally:
            if self.behind.freed:
                buffer.shared = None
        return False

    def drop(self, buffer: Buffer) -> None:
        """Do nothing, because :attr:`behind` has its own finaliser."""
