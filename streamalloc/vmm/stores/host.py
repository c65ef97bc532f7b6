"""Store in pinned host memory for the contents of swapped-out pages."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from streamalloc.core.errors import size_text
from streamalloc.core.internal import Device, Fence, HandleEnd, Stream, deferred_queue
from streamalloc.core.session import Session, session_of
from streamalloc.vmm.stores.blocks import Addresses, BlockTier, Chunk, Stored, copy_batch
from streamalloc.vmm.stores.disk_file import DamagedBackupError

_PORTABLE = 1


class _End(HandleEnd):
    """Release of a chunk (``cuMemFreeHost``) after the copies that use it."""

    __slots__ = ("fences",)

    def __init__(self, session: Session) -> None:
        super().__init__(session, "cuMemFreeHost", None)
        self.fences: dict[Fence, None] = {}
        """Copies that may still use the chunk. Several threads change this dictionary at the same time."""

    def allocate(self, device: Device, nbytes: int) -> int:
        """Allocate the chunk (``cuMemHostAlloc``) and return its address."""
        with self._session.relaxed(), device.current():
            address = self._raw = int(self._session.call("cuMemHostAlloc", nbytes, _PORTABLE))
        return address

    def attempt(self) -> bool:
        self.forget_completed()
        return not self.fences and super().attempt()

    def forget_completed(self) -> None:
        """Forget copies that have completed."""
        for one in list(self.fences):
            if one.done():
                self.fences.pop(one, None)


class _Pinned(Chunk):
    """Pinned host memory for some blocks."""

    __slots__ = ("_end",)

    def __init__(self, device: Device, nbytes: int, count: int) -> None:
        session = session_of(device)
        self._end = _End(session)
        # Register the release before the allocation: if a later line fails, the memory is still released.
        deferred_queue(session).end_with(self, self._end)
        super().__init__(nbytes, count, self._end.allocate(device, nbytes * count), nbytes)

    def use(self, fence: Fence) -> None:
        """Keep the memory until copies have completed."""
        end = self._end
        end.fences[fence] = None
        if len(end.fences) > 64:
            end.forget_completed()


class _Contents(Stored):
    """The contents of blocks in pinned host memory."""

    __slots__ = ("_check", "_sums")

    def __init__(self, tier: BlockTier, nbytes: int, check: bool) -> None:
        super().__init__(tier, nbytes)
        self._check = check
        self._sums: Sequence[int] = ()

    def save(self, source: Addresses, stream: Stream) -> None:
        """Queue the copies, after earlier copies from or to the same memory. With checksums, wait for the copies and
        compute the checksums.
        """
        self._copy(self._addresses, source, self._bases, stream)
        if self._check and len(self):
            stream.synchronize()
            self.seal()

    def load(self, blocks: Sequence[int] | Addresses, target: Addresses, stream: Stream) -> None:
        """Queue the copies, after earlier copies from or to the same memory."""
        self._copy(target, self._addresses[blocks], self._bases[blocks], stream)

    def _copy(self, targets: Addresses, sources: Addresses, bases: Addresses, stream: Stream) -> None:
        with self.in_use():
            before = self._fences
            for one in before:
                one.precede(stream)
            try:
                copy_batch(targets, sources, self.nbytes, bases, stream)
            finally:
                fence = Fence(session_of(stream), [stream])
                for chunk in self._chunks.values():
                    chunk.use(fence)
                with self.tier._lock:
                    self._fences = (*(one for one in self._fences if one not in before), fence)

    def seal(self) -> None:
        """Compute checksums. The copies must be complete."""
        self._sums = [zlib.crc32(self.array(block).data) for block in range(len(self))]

    def array(self, block: int) -> npt.NDArray[np.uint8]:
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
        return _Pinned(self.device, nbytes, count)

    def _stored(self, nbytes: int) -> Stored:
        return _Contents(self, nbytes, self._check)

    def _text(self) -> str:
        return ", closed" if self.closed else f", {size_text(self.used)} used"
