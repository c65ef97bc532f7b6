"""Arenas: physical pages of one device, which are mapped in the address ranges of spaces."""

from __future__ import annotations

import functools
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamalloc.core.errors import size_text, undoing
from streamalloc.core.internal import Device, Stream, StreamLike, TypedView, as_stream, check_device
from streamalloc.core.properties import MemLocation, checked_number, checked_seconds, checked_type
from streamalloc.core.resource import Closes
from streamalloc.core.session import session_of
from streamalloc.driver import Driver
from streamalloc.driver.internal import RLock
from streamalloc.pool import MemoryPool
from streamalloc.vmm.pages.budget import PageBudget
from streamalloc.vmm.pages.places import PhysicalPages, fill
from streamalloc.vmm.pages.space import PageSpace


class ArenaStatistics(NamedTuple):
    """Statistics of a :class:`PageArena`, in pages."""

    pages: int
    """Physical pages that exist, in use or not. The page of zeros is not counted."""
    spare: int
    """Physical pages that are not mapped in any space."""
    parked: int
    """Released pages of spaces that queued work still uses or that are being cleared, and pages that a swap is moving.
    Pages that share memory count separately.
    """
    kept: int
    """Released and cleared pages that stay mapped until their memory is needed elsewhere."""


class PageArena(Closes):
    """Physical pages of one size on one device, and the address spaces that map them.

    A space has far more addresses than there is memory. Its pages, such as the blocks of a key-value cache, get and
    release memory one by one or in batches. A released page is cleared and keeps its memory, so the next commit of the
    same page makes no driver call. A commit of another page may take this memory. If this process runs out of device
    memory elsewhere, all unused pages are released to the driver. ::

        with vmm.PageArena(device, limit=32 << 30) as arena, arena.space(256 << 30) as cache:
            arena.prepare(1024)
            cache.commit(range(64))                     # one sequence
            cache.commit(range(1000, 1001))             # another one
            cache.alias(range(1001, 1064), cache, range(1, 64))
            cache.release(range(64), after=stream)

    Thread-safe. If an arena is dropped, its spaces stay open and keep their pages. After :meth:`close`, spaces can
    still be used and can release pages, but they get no new pages.

    Parameters
    ----------
    device
        Device of the memory.
    page_size
        Size of a page in bytes, a multiple of the granularity of physical memory, which is 2 MiB.
    limit
        Largest number of bytes of all physical pages, unused pages included. The page of zeros does not count. None for
        no limit.
    budget
        Limit that this arena shares with other arenas, also of other processes.
    patience
        Longest time in seconds that a call without memory waits for the memory of parked pages: released pages that
        queued work still uses. If the time ends before there is enough memory, the call raises
        :class:`OutOfMemoryError`. None to wait until this work is done, 0 to raise at once. It does not limit the wait
        for the work of ``after``, nor for the work of parked pages that the call itself names.

    Raises
    ------
    TypeError, ValueError
        ``device`` is no Device, ``budget`` is no PageBudget, ``page_size`` is zero or not a multiple of the
        granularity, ``limit`` is not a size, or ``patience`` is negative.
    ClosedError
        The budget was closed.
    """

    def __init__(
        self,
        device: Device,
        page_size: int | str = 2 << 20,
        limit: int | str | None = None,
        *,
        budget: PageBudget | None = None,
        patience: float | None = 5.0,
    ) -> None:
        check_device("device", device)
        if budget is not None and not isinstance(budget, PageBudget):
            raise TypeError(f"budget must be a PageBudget, not {type(budget).__name__} ({budget!r})")
        if patience is not None:
            checked_seconds("patience", patience)
        self.budget: PageBudget | None = budget
        """The budget, which is a limit shared with other arenas and processes; None if the arena has none."""
        self._physical = physical = PhysicalPages(device, page_size, limit, budget, patience)
        physical.allocations.arenas.add(physical)
        if budget is not None:
            budget.join(physical)
        self.device: Device = device
        """Device of the memory."""
        self.location: MemLocation = device.location
        """Location of the memory."""
        self.driver: Driver = device.driver
        """Driver that the arena belongs to."""
        self.page_size: int = physical.nbytes
        """Size of a page in bytes."""
        self.limit: int | None = physical.limit
        """Largest number of bytes of all physical pages; None: no limit. A commit beyond it raises OutOfMemoryError."""

    @property
    def closed(self) -> bool:
        """Whether the arena was closed. It makes no more spaces or pages: these calls raise ClosedError."""
        return self._physical.closed

    def space(self, nbytes: int | str, *, stream: StreamLike | None = None) -> PageSpace:
        """Return a new space: addresses that read as zeros, because one page of zeros is mapped everywhere
        (``cuMemAddressReserve``, ``cuMemMap``).

        The call takes about 30 us per page of the space, because the driver sets permissions on each page.

        Parameters
        ----------
        nbytes
            Size in bytes. The range of addresses is rounded up to whole pages.
        stream
            Stream of operations on the space for which the caller names no stream; default: the device's default
            stream.

        Raises
        ------
        TypeError, ValueError
            ``nbytes`` is 0 or not a size, or ``stream`` is not a stream of this driver.
        AddressSpaceError
            The process has no free range of addresses of this size.
        OutOfMemoryError
            There is not enough memory for the page of zeros.
        ClosedError, CudaError
            The arena or ``stream`` was closed, or the driver refused a call.
        """
        self._check_open()
        return PageSpace(self, self._physical, nbytes, stream)

    def prepare(self, count: int) -> Future[int]:
        """Create physical pages on a background thread (``cuMemCreate``), until ``count`` pages are unused: spare or
        kept (:class:`ArenaStatistics`).

        Returns
        -------
        concurrent.futures.Future
            A future whose result is the number of spare and kept pages. The future has an OutOfMemoryError if the
            device has not enough memory or the limit of the arena or of its budget is reached, and another CudaError if
            the driver refuses.

        Raises
        ------
        TypeError, ValueError
            ``count`` is not an integer from 0 on.
        ClosedError
            The arena was closed.
        """
        wanted = checked_number("count", count)
        self._check_open()
        return self._physical.in_background(functools.partial(fill, self._physical, wanted))

    def trim(self, keep: int = 0) -> int:
        """Release unused pages to the driver, first spare, then kept pages (``cuMemUnmap``, ``cuMemRelease``). Returns
        the number of pages released.

        The host waits for zeros that are being written to released pages, but not for other work.

        Parameters
        ----------
        keep
            Number of unused pages that are not released.

        Raises
        ------
        TypeError, ValueError
            ``keep`` is not an integer from 0 on.
        InUseError
            A signal handler called this method during another call on its thread.
        CudaError
            The driver refused to release a page. The other pages were released; the deferred queue tries again with
            this page.
        """
        most = checked_number("keep", keep)
        self._physical.allocations.work()
        return self._physical.trim(most)

    def statistics(self) -> ArenaStatistics:
        """Return the numbers of pages by state. A released page counts as parked until the work that uses it is done
        and its zeros are written. While this package captures a stream, the page counts as parked also after that.
        """
        physical = self._physical
        physical.allocations.work()
        with physical.lock:
            return ArenaStatistics(physical.count, len(physical.spare), physical.parked, len(physical.kept))

    def close(self) -> None:
        """Release all pages that are not committed. Pages that spaces release later are released to the driver, too.
        Idempotent.

        Raises
        ------
        InUseError
            A signal handler called this method during another call on its thread. Unused pages stay until :meth:`trim`.
        CudaError
            The driver refused to release a page. The deferred queue tries again later.
        """
        self._physical.close()

    def _text(self) -> str:
        physical = self._physical
        most = "" if physical.limit is None else f" of at most {size_text(physical.limit)}"
        state = ", closed" if physical.closed else f", {len(physical.spare)} spare, {len(physical.kept)} kept"
        return (
            f" of device {physical.device.ordinal}, {physical.count} pages of {size_text(physical.nbytes)}{most}{state}"
        )


class PageTable(Closes):
    """A page table in device memory. The entry for a page of a space is the number of the physical page, or -1 if the
    page is not committed. The memory comes from the device's current pool (:meth:`MemoryPool.current`).

    :meth:`update` changes the table in stream order: earlier kernels read the old entries, later kernels the new. ::

        table = vmm.PageTable(cache, np.int32, stream=stream)
        cache.release(pages, after=stream)   # kernels that are queued may use the pages
        table.update()                       # kernels that are queued from now on see -1

    Thread-safe.

    Parameters
    ----------
    space
        The space that the table describes.
    dtype
        Type of the entries: ``int32`` or ``int64``.
    stream
        Stream of the table's copies; default: the space's. Work on other streams must be ordered after this stream.

    Raises
    ------
    TypeError, ValueError
        ``space`` is no PageSpace, ``dtype`` is another type, or ``stream`` is not a stream of this driver.
    ClosedError
        The space or the stream was closed.
    OutOfMemoryError
        There is not enough memory.
    """

    def __init__(self, space: PageSpace, dtype: npt.DTypeLike = np.int64, *, stream: StreamLike | None = None) -> None:
        checked_type("space", space, PageSpace)
        kind = np.dtype(dtype)
        if kind not in (np.dtype(np.int32), np.dtype(np.int64)):
            raise TypeError(f"dtype={kind}: allowed are int32 and int64")
        self.space: PageSpace = space
        """Space that the table describes."""
        self.stream: Stream = space.stream if stream is None else as_stream(stream, session_of(space))
        """Stream of the table's allocation and copies."""
        self._lock = RLock()
        self._sent: npt.NDArray[Any] = np.full(space.page_count, -2, kind)
        """Entries as they were at the last queued copy. At first all are -2, which is no possible entry, so that the
        first update copies all entries.
        """
        self._buffer = MemoryPool.current(space.device).allocate(self._sent.nbytes, self.stream)
        with undoing(self._buffer.close):
            self.update()

    @property
    def entries(self) -> TypedView[Any]:
        """The table in device memory, as a one-dimensional array with one element for each page of the space.

        Raises
        ------
        ClosedError
            The table was closed.
        """
        return self._buffer.view_as(self._sent.dtype)

    @property
    def closed(self) -> bool:
        """Whether the table was closed."""
        return self._buffer.freed

    def update(self) -> int:
        """Queue one copy of the entries from the first to the last that has changed since the last update
        (``cuMemcpyHtoDAsync``). Returns the number of changed entries; if it is 0, no copy was queued.

        Raises
        ------
        ClosedError
            The table, the space or the table's stream was closed.
        CaptureError
            Entries have changed, and the table's stream is being captured.
        CudaError
            The driver refused the copy.
        """
        with self._lock:
            entries = self.entries
            now = self.space.numbers.astype(self._sent.dtype)
            changed = np.flatnonzero(now != self._sent)
            if changed.size:
                # In a capture, each launch would write these entries again, over those of later updates.
                self.stream.refuse_capture("cuMemcpyHtoDAsync", "update the table before the launch")
                span = slice(int(changed[0]), int(changed[-1]) + 1)
                entries[span].copy_from(now[span], self.stream)
                self._sent = now
            return int(changed.size)

    def close(self) -> None:
        """Free the table in stream order (``cuMemFreeAsync``). Idempotent."""
        self._buffer.close()

    def _text(self) -> str:
        return f" of {self._sent.size} pages{', closed' if self.closed else ''}"
