"""Physical pages of one size on one device: creation, counts of their users, and the pages that are spare."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from streamalloc.core.errors import (
    ClosedError,
    CudaError,
    OutOfMemoryError,
    refused,
    size_text,
    undo_all,
    undoing,
)
from streamalloc.core.internal import Device, HandleEnd, deferred_queue, raw_handle
from streamalloc.core.properties import MemAccess, MemHandleType, checked_size
from streamalloc.core.session import Session, session_of
from streamalloc.vmm.access import structs_of
from streamalloc.vmm.address_range import AddressRange
from streamalloc.vmm.allocation_handles import Allocations, allocations_of
from streamalloc.vmm.physical_memory import MemorySpec, properties_for, spec_of
from streamalloc.vmm.reservation import MappedBytes


class Page(HandleEnd):
    """One physical page; its end is ``cuMemRelease``. A dropped page is released by the deferred queue."""

    __slots__ = ("number", "users")

    def __init__(self, session: Session, number: int) -> None:
        super().__init__(session, "cuMemRelease", None)
        self.number: int = number
        """Number of the page in its arena; unique while the page exists."""
        self.users: int = 1
        """Number of places that hold it; :attr:`PhysicalPages.lock` protects it."""

    def forget(self) -> None:
        """Drop the handle: the driver has ended."""
        self._raw = None

    def __del__(self) -> None:
        raw = getattr(self, "_raw", None)
        if raw is not None and self._session.usable:
            self._raw = None
            deferred_queue(self._session).submit(HandleEnd(self._session, "cuMemRelease", raw))


class PhysicalPages:
    """The physical pages of an arena and its spaces. It lives as long as the last of them.

    :attr:`lock` protects the spare pages, all counts, and the page lists of spaces. It is the innermost lock: no driver
    call is made under it.
    """

    def __init__(self, device: Device, page_size: int, limit: int | None) -> None:
        self.device: Device = device
        self.session: Session = session_of(device)
        self.spec: MemorySpec = spec_of(self.session, properties_for(device, MemHandleType.NONE, False, False))
        self.size: int = self.spec.checked(page_size)
        """Size of a page in bytes."""
        self.limit: int | None = None if limit is None else checked_size("limit", limit)
        """Bytes of all pages; None for no limit."""
        self.allocations: Allocations = allocations_of(self.session)
        self.lock: contextlib.AbstractContextManager[bool] = threading.RLock()
        self.spare: list[Page] = []
        self.count: int = 0
        """Number of pages that exist, or are being created."""
        self.parked: int = 0
        """Number of places that wait for the work that uses them."""
        self.closed: bool = False
        self.writable: list[Any] = structs_of({device.location: MemAccess.READWRITE})
        self.readable: list[Any] = structs_of({device.location: MemAccess.READ})
        self._numbers: list[int] = []
        """Numbers of pages that were released, for new ones."""
        self.zero: Page = Page(self.session, -1)
        """The page of zeros, at all places that hold no page. It does not count for the limit; the arena is a user."""
        self._filling = threading.RLock()
        self.allocations.recyclers.add(self)

    def hold_zero(self) -> None:
        """Count a space that maps :attr:`zero`, which the first one creates.

        Raises
        ------
        ClosedError
            The arena was closed.
        """
        with self._filling:
            if self.zero.raw is None and not self.closed:
                self._obtain(self.zero)
                with (
                    undoing(self.zero.attempt),
                    self.mapped([self.zero]) as address,
                    self.device.create_stream() as stream,
                ):
                    self.session.call("cuMemsetD8Async", address, 0, self.size, raw_handle(stream))
                    stream.synchronize()
        with self.lock:
            self._check_open()
            self.zero.users += 1

    @contextlib.contextmanager
    def mapped(self, pages: Sequence[Page]) -> Iterator[int]:
        """Map pages side by side in a range of their own for a ``with`` block, which gets the address.

        The block waits for the work that it queues.
        """
        size, session = self.size, self.session
        with AddressRange(len(pages) * size, driver=session.driver) as addresses:
            node = addresses._node
            # One node for all mappings: if the driver refuses to unmap them, the deferred queue tries again.
            whole = MappedBytes(node, 0, addresses.nbytes, {self.device.location: MemAccess.READWRITE})
            node.add(whole)
            try:
                for place, page in enumerate(pages):
                    try:
                        session.call("cuMemMap", addresses.address + place * size, size, 0, page.raw, 0)
                    except CudaError:
                        if not place:
                            whole.unmapped()
                        raise
                session.call("cuMemSetAccess", addresses.address, addresses.nbytes, self.writable, len(self.writable))
                yield addresses.address
            finally:
                addresses.unmap(after=())

    def take(self, count: int) -> list[Page]:
        """Return spare pages, and create those that are missing; all of them have one user.

        Raises
        ------
        OutOfMemoryError
            The device has not enough memory, or the limit of the arena is reached.
        ClosedError
            The arena was closed.
        """
        with self.lock:
            self._check_open()
            self._check_limit(count - len(self.spare))
            first = max(len(self.spare) - count, 0)
            taken = self.spare[first:]
            del self.spare[first:]
            for page in taken:
                page.users = 1
        with undoing(lambda: self.drop(taken)):
            while len(taken) < count:
                taken.append(self._create())
        return taken

    def fill(self, count: int) -> int:
        """Create pages until ``count`` are spare; return how many are."""
        while len(self.spare) < count and not self.closed:
            self.drop([self._create()])
        return len(self.spare)

    def hold(self, pages: Iterable[Page]) -> None:
        """Count another user of each page."""
        with self.lock:
            for page in pages:
                page.users += 1

    def drop(self, pages: Iterable[Page]) -> None:
        """Count one user less of each page. A page without users is spare, or is released if the arena was closed."""
        unused = []
        with self.lock:
            for page in pages:
                page.users -= 1
                if not page.users:
                    unused.append(page)
            if not self.closed:
                self.spare += unused
                return
        # Pages that the driver refuses are released later.
        with contextlib.suppress(CudaError):
            self._release(unused)

    def trim(self, keep: int) -> int:
        """Release spare pages until ``keep`` are left; return how many were released."""
        with self.lock:
            released = self.spare[keep:]
            del self.spare[keep:]
        self._release(released)
        return len(released)

    def close(self) -> None:
        """Release all spare pages, and keep none from now on; idempotent."""
        with self.lock:
            first, self.closed = not self.closed, True
        if first:
            self.drop([self.zero])
        self.trim(0)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the arena was closed")

    def make_room(self) -> int:
        """Release all spare pages, for another user of device memory; return their size in bytes."""
        before = len(self.spare)
        with contextlib.suppress(CudaError):
            self.trim(0)
        return before * self.size

    def _create(self) -> Page:
        with self.lock:
            self._check_limit(1)
            number = self._numbers.pop() if self._numbers else self.count
            self.count += 1
        page = Page(self.session, number)
        with undoing(lambda: self._forget([page])):
            self._obtain(page)
        return page

    def _obtain(self, page: Page) -> None:
        """Create the memory of a page (``cuMemCreate``)."""
        session = self.session
        session.check_process()
        for last in (False, True):
            result, raw = session.cuMemCreate(self.size, self.spec.struct, 0)
            if not result:
                page._raw = raw
                return
            self.spec.refused(result, self.size, last=last)

    def _check_limit(self, missing: int) -> None:
        """Raise if the limit leaves no room for so many more pages."""
        if self.limit is None or missing <= 0 or (self.count + missing) * self.size <= self.limit:
            return
        used = f"{self.count - len(self.spare)} pages are in use, and {self.parked} parked behind queued work"
        why = (
            f"the arena's limit of {size_text(self.limit)} leaves no room for {missing} pages of {size_text(self.size)}"
        )
        error = refused(OutOfMemoryError, "cuMemCreate", f"{why}: {used}")
        error.requested, error.used, error.limit = missing * self.size, self.count * self.size, self.limit
        raise error

    def _release(self, pages: Sequence[Page]) -> None:
        """Release pages. Pages that the driver refuses are released later."""
        later = deferred_queue(self.session)
        self._forget(pages)
        undo_all(functools.partial(later.end, page) for page in pages)

    def _forget(self, pages: Sequence[Page]) -> None:
        numbers = [page.number for page in pages if page is not self.zero]
        with self.lock:
            self.count -= len(numbers)
            self._numbers += numbers
