"""Contents of blocks in memory, and the store in pinned host memory for pages that are swapped out."""

from __future__ import annotations

import abc
import contextlib
import ctypes
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from streamalloc.core.errors import size_text, undoing
from streamalloc.core.internal import Deferred, Device, Fence, HandleEnd, Stream, deferred_queue
from streamalloc.core.session import Session, session_of
from streamalloc.vmm.stores.blocks import (
    Addresses,
    BlockTier,
    Bytes,
    Chunk,
    Indices,
    Move,
    Stored,
    Tier,
    copy_batch,
    may_run,
)
from streamalloc.vmm.stores.disk_file import DamagedBackupError

_PORTABLE = 1


class AfterCopies(Deferred):
    """The release of host memory after the copies that use it."""

    __slots__ = ("_release", "fences")

    def __init__(self, release: Callable[[], object]) -> None:
        self._release = release
        self.fences: dict[Fence, None] = {}
        """Copies that may still use the memory. Several threads change this dictionary at the same time."""

    def attempt(self) -> bool:
        self.forget_completed()
        if self.fences:
            return False
        self._release()
        return True

    def forget_completed(self) -> None:
        """Forget copies that have completed."""
        for one in list(self.fences):
            if one.done():
                self.fences.pop(one, None)


class MemoryChunk(Chunk):
    """Memory with room for some blocks, which is released after it was dropped and the copies that use it are done."""

    __slots__ = ("_end",)

    def __init__(self, session: Session, nbytes: int, count: int, address: int, release: Callable[[], object]) -> None:
        super().__init__(nbytes, count, address, nbytes)
        self._end = AfterCopies(release)
        deferred_queue(session).end_with(self, self._end)

    def use(self, fence: Fence) -> None:
        """Keep the memory until copies have completed."""
        end = self._end
        end.fences[fence] = None
        if len(end.fences) > 64:
            end.forget_completed()


class InMemory(Stored):
    """The contents of blocks in memory. Copies are stream-ordered: to the memory after all earlier copies from or to
    it, and from the memory after those to it.
    """

    __slots__ = ("_written",)

    def __init__(self, tier: Tier, nbytes: int = 0) -> None:
        super().__init__(tier, nbytes)
        self._written: Sequence[Fence] = ()
        """The copies to the memory."""

    @contextlib.contextmanager
    def moving(self, stream: Stream, *, out: bool) -> Iterator[Move]:
        """See :meth:`Stored.moving`."""
        with self.in_use():
            before = self._fences if out else self._written
            for one in before:
                one.precede(stream)
            try:
                yield functools.partial(self._move, stream, out)
            finally:
                fence = Fence(session_of(stream), [stream])
                for chunk in self._chunks.values():
                    chunk.use(fence)
                with self.tier._lock:
                    self._fences = (*(one for one in self._fences if one not in before and may_run(one)), fence)
                    self._written = (fence,) if out else self._written

    @abc.abstractmethod
    def _move(self, stream: Stream, out: bool, blocks: Indices, at: Addresses, side: Any = None) -> None:
        """Queue copies, see :class:`Move`."""

    def seal(self, stream: Stream) -> None:
        """Do nothing: later work of the stream finds the bytes."""


class _HostContents(InMemory):
    """The contents of blocks in pinned host memory."""

    __slots__ = ("_check", "_sums")

    def __init__(self, tier: BlockTier, nbytes: int, check: bool) -> None:
        super().__init__(tier, nbytes)
        self._check = check
        self._sums: Sequence[int] = ()

    def _move(self, stream: Stream, out: bool, blocks: Indices, at: Addresses, side: Any = None) -> None:
        bases, host = self._bases[blocks], self._addresses[blocks]
        copy_batch(*((host, at) if out else (at, host)), self._sizes[blocks], bases, stream)

    def seal(self, stream: Stream) -> None:
        """Wait for the copies and compute the checksums, if the tier checks contents."""
        if self._check and len(self):
            stream.synchronize()
            self._sums = [zlib.crc32(self.array(block).data) for block in range(len(self))]

    def array(self, block: int) -> Bytes:
        """The contents of a block. The copies must be complete."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(int(self._addresses[block])))

    def check(self, blocks: Iterable[int]) -> None:
        """Compare checksums."""
        for block in blocks if self._sums else ():
            with self.tier._lock:  # another thread may drop the block
                changed = self._present[block] and zlib.crc32(self.array(block).data) != self._sums[block]
            if changed:
                why = "the contents of a page have changed while it was swapped out: its checksum differs"
                raise DamagedBackupError(why, block)


class HostTier(BlockTier):
    """Pinned host memory for swapped-out pages. It grows as needed, and is kept for later swaps.

    It grows in chunks of at least 32 MiB (``cuMemHostAlloc``). Thread-safe. Contents stay until they are swapped in or
    released, even after :meth:`close`.

    Parameters
    ----------
    device
        Device of the pages.
    limit
        Most bytes of host memory; None for no limit.
    check
        Whether contents get a checksum, which :meth:`PageSpace.swap_in` verifies. :meth:`PageSpace.swap_out` then
        blocks the host until the copies are complete.

    Raises
    ------
    TypeError
        ``device`` is no device.
    """

    __slots__ = ("_check",)

    _call = "cuMemHostAlloc"

    def __init__(self, device: Device, limit: int | None = None, *, check: bool = False) -> None:
        super().__init__(device, limit)
        self._check = check

    def _chunk(self, nbytes: int, count: int) -> Chunk:
        session, size = session_of(self.device), nbytes * count
        end = HandleEnd(session, "cuMemFreeHost", None)
        with undoing(lambda: deferred_queue(session).end(end)), session.relaxed(), self.device.current():
            end._raw = int(session.call("cuMemHostAlloc", size, _PORTABLE))
        return MemoryChunk(session, nbytes, count, end.raw, end.attempt)

    def _stored(self, nbytes: int) -> Stored:
        return _HostContents(self, nbytes, self._check)

    def _text(self) -> str:
        return ", closed" if self.closed else f", {size_text(self.used)} used"
