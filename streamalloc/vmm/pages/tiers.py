"""Tiers: host memory for the contents of pages that are swapped out."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence

from streamalloc.core.errors import ClosedError, CudaError, size_text, undo_all, undoing
from streamalloc.core.internal import CopySide, Device, Stream, check_device
from streamalloc.core.properties import MemAccess, MemLocation, checked_size
from streamalloc.core.resource import Closes
from streamalloc.pool import MemoryPool
from streamalloc.vmm.backup import Backup, BackupRange, Copies, copying

_KEEP_ALL = (1 << 64) - 1  # release threshold in bytes: the pool never releases memory by itself


class Stored:
    """The contents of one page in a tier."""

    __slots__ = ("_checksum", "_saved")

    def __init__(self, saved: BackupRange) -> None:
        self._saved = saved
        self._checksum: int | None = None

    def _sum(self) -> int:
        return zlib.crc32(self._saved.memory.as_array().data)

    def seal(self) -> None:
        """Compute a checksum of the contents, which are complete."""
        self._checksum = self._sum()

    def check(self) -> None:
        """Raise ``ValueError`` if the contents have changed since :meth:`seal`."""
        if self._checksum is not None and self._sum() != self._checksum:
            raise ValueError("the contents of a page have changed while it was swapped out: its checksum differs")

    def load(self, page: CopySide, copies: Copies) -> None:
        """Queue the copy of the contents to a page."""
        self._saved.load(page, copies)

    def drop(self) -> None:
        """Release the memory after the copies that use it; idempotent. If the driver refuses, it is released later."""
        with contextlib.suppress(CudaError):
            self._saved.leave()


class HostTier(Closes):
    """Pinned host memory for pages that are swapped out; it grows as needed, and is kept for later swaps.

    Thread-safe. Contents stay until they are swapped in or released, also after :meth:`close`.

    Parameters
    ----------
    device
        Device of the pages.
    limit
        Bytes of host memory at most; None for no limit.
    check
        Whether contents get a checksum, which :meth:`PageSpace.swap_in` checks. :meth:`PageSpace.swap_out` then blocks
        the host until the copies have completed.

    Raises
    ------
    TypeError
        ``device`` is no device.
    """

    __slots__ = ("__weakref__", "_check", "_pool", "closed", "device")

    def __init__(self, device: Device, limit: int | None = None, *, check: bool = False) -> None:
        check_device("device", device)
        self.device: Device = device
        """Device of the pages."""
        self.closed: bool = False
        """Whether it was closed."""
        self._check = check
        most = 0 if limit is None else checked_size("limit", limit)
        self._pool = MemoryPool(MemLocation.host(), max_size=most, release_threshold=_KEEP_ALL, driver=device.driver)
        with undoing(self._pool.close):
            self._pool.set_access(device, MemAccess.READWRITE)

    def save(self, pages: Sequence[CopySide], stream: Stream) -> list[Stored]:
        """Queue the copies of pages to host memory: of all, or of none."""
        if self.closed:
            raise ClosedError(f"{self!r} was closed")
        saved: list[BackupRange] = []
        with undoing(lambda: undo_all(one.leave for one in saved)), copying(stream) as copies:
            for page in pages:
                saved.append(Backup.allocate(self._pool, page.nbytes, stream).hold(0, page.nbytes))
            for one, page in zip(saved, pages, strict=True):
                one.save(page, copies)
        return [Stored(one) for one in saved]

    def settle(self, stored: Sequence[Stored], stream: Stream) -> None:
        """Compute the checksums, once the copies have completed."""
        if self._check and stored:
            stream.synchronize()
            for one in stored:
                one.seal()

    @property
    def used(self) -> int:
        """Bytes of the contents."""
        return self._pool.statistics().used

    def trim(self) -> None:
        """Release the host memory that holds no contents."""
        self._pool.trim()

    def close(self) -> None:
        """Take no more contents, and release the memory when the last of them leaves. Idempotent."""
        self.closed = True
        self._pool.close()

    def _text(self) -> str:
        return ", closed" if self.closed else f", {size_text(self.used)} used"
