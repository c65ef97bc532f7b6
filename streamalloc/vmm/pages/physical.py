"""Physical pages of one size on one device: creation, reference counts, and spare pages."""

from __future__ import annotations

import abc
import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from streamalloc.core.errors import ClosedError, CudaError, OutOfMemoryError, refused, size_text, undo_all, undoing
from streamalloc.core.internal import Device, HandleEnd, Stream, deferred_queue, raw_handle
from streamalloc.core.properties import MemAccess, MemHandleType, MemLocation, checked_size
from streamalloc.core.session import Session, session_of
from streamalloc.driver.internal import RLock
from streamalloc.vmm.access import structs_of
from streamalloc.vmm.address_range import AddressRange
from streamalloc.vmm.ownership import Allocations, allocations_of
from streamalloc.vmm.pages.budget import PageBudget
from streamalloc.vmm.physical_memory import MemorySpec, properties_for, spec_of
from streamalloc.vmm.reservation import MappedBytes


class Page(HandleEnd):
    """One physical page. Only this object holds the driver's handle; its finaliser releases it (``cuMemRelease``)."""

    __slots__ = ("number", "users", "watched_at")

    def __init__(self, session: Session, number: int) -> None:
        super().__init__(session, "cuMemRelease", None)
        self.number: int = number
        """Number of the page in its arena; unique while the page exists."""
        self.users: int = 1
        """Number of places that hold the page. :attr:`PhysicalPages.lock` protects it."""
        self.watched_at: int = 0
        """Address at which watchers count the page; 0 if no watcher counts it."""

    def forget(self) -> None:
        """Forget the handle without a driver call, because the context of the page is gone, and its memory with it."""
        self._raw = None

    def __del__(self) -> None:
        if getattr(self, "_raw", None) is not None and self._session.usable:
            deferred_queue(self._session).submit(self)


class PageStock(abc.ABC):
    """All physical pages of an arena, the limit of their bytes, and the spare pages, which no place holds.

    :attr:`lock` protects the spare pages and all counts. It is the innermost lock: no driver call is made under it,
    because finalisers' items and readers of statistics take it, too, and a call may take long.
    """

    def __init__(
        self, device: Device, page_size: int | str, limit: int | str | None, budget: PageBudget | None
    ) -> None:
        self.device: Device = device
        self.location: MemLocation = device.location
        self.session: Session = session_of(device)
        self.spec: MemorySpec = spec_of(self.session, properties_for(device, MemHandleType.NONE, False, False))
        self.size: int = self.spec.checked(page_size, name="page_size")
        """Size of a page in bytes."""
        self.nbytes: int = self.size
        """As :attr:`size`, under the name that observers read."""
        self.limit: int | None = None if limit is None else checked_size("limit", limit)
        """Limit of the bytes of all pages; None: no limit."""
        # A weak reference. The arena keeps the budget. The table of reservations keeps this object, so a strong
        # reference would keep the budget, its function ``on_ask``, and an arena to which that function refers.
        self.budget: Callable[[], PageBudget | None] = (lambda: None) if budget is None else weakref.ref(budget)
        """Function that returns the budget, a limit shared with other arenas and processes; None without a budget."""
        self.allocations: Allocations = allocations_of(self.session)
        self.spare: list[Page] = []
        """Pages that no place holds."""
        self.count: int = 0
        """Number of pages that exist or are being created."""
        self.closed: bool = False
        self.writable: list[Any] = structs_of({device.location: MemAccess.READWRITE})
        self.readable: list[Any] = structs_of({device.location: MemAccess.READ})
        self._numbers: list[int] = []
        """Numbers of released pages, for reuse."""
        self._fresh = itertools.count()
        """Numbers that no page has had so far."""
        self.zero: Page = Page(self.session, -1)
        """The page of zeros, which is mapped at places without a page. It does not count for the limit."""
        self._shut_after_fork()
        self.session.shut_with_me(self)

    def _shut_after_fork(self) -> None:
        """Create locks anew, because a forked child lacks the threads that held the old ones."""
        self.lock: contextlib.AbstractContextManager[bool] = RLock()
        self._filling = RLock()
        """Held while the page of zeros is created, so that a second space waits until it is all zeros."""

    @abc.abstractmethod
    def usage(self) -> str:
        """Return a text for errors: how many pages are in use, and how many are parked."""

    def page_bytes(self, location: MemLocation) -> int:
        """Return the bytes of all pages of the arena, the page of zeros included, if its device is at ``location``;
        otherwise 0.
        """
        zeros = self.zero.raw is not None
        return (self.count + zeros) * self.size if self.location == location else 0

    @property
    def claimed(self) -> int:
        """Bytes of the pages that exist or are about to be created."""
        return self.count * self.size

    def use_zero(self) -> None:
        """Count one more space that uses :attr:`zero`. The first call creates that page and fills it (``cuMemCreate``,
        ``cuMemsetD8Async``).

        Raises
        ------
        ClosedError
            The arena was closed.
        OutOfMemoryError
            The device has no memory for the page.
        """
        self._check_open()
        self.add_users([self.zero])
        with undoing(lambda: self.drop([self.zero])), self._filling:
            if self.zero.raw is None:
                self.spec.create(self.zero, self.size)
                with (
                    undoing(self.zero.attempt),
                    self.device.create_stream() as stream,
                    self.mapped([self.zero], stream) as address,
                ):
                    self.clear(address, self.size, stream)

    @contextlib.contextmanager
    def mapped(self, pages: Sequence[Page], stream: Stream) -> Iterator[int]:
        """Map ``pages`` side by side in a range of their own for a ``with`` block, which gets the address
        (``cuMemMap``).

        At the end of the block the host waits for ``stream``; after an error, for the device. If that fails, pages and
        addresses stay mapped, because queued work may use them.
        """
        size, session = self.size, self.session
        addresses = AddressRange(len(pages) * size, driver=session.driver)
        # One node for all mappings: if the driver refuses to unmap them, the deferred queue tries again.
        whole = MappedBytes(addresses._node, 0, addresses.nbytes, {self.device.location: MemAccess.READWRITE})
        addresses._node.add(whole)
        try:
            # After an error, the end of this block waits for the device: queued work may use the pages.
            with addresses:
                for place, page in enumerate(pages):
                    try:
                        session.call("cuMemMap", addresses.address + place * size, size, 0, page.raw, 0)
                    except CudaError:
                        if not place:
                            whole.unmapped()
                        raise
                session.call("cuMemSetAccess", addresses.address, addresses.nbytes, self.writable, len(self.writable))
                yield addresses.address
                with session.relaxed():
                    stream.synchronize()
                addresses.unmap(after=())
        finally:
            if not whole.gone:
                # The pages are still mapped. One more user keeps them from being used for other contents.
                self.add_users(pages)

    def clear(self, address: int, nbytes: int, stream: Stream) -> None:
        """Queue zeros for ``nbytes`` bytes from ``address`` on (``cuMemsetD8Async``). Raises CudaError."""
        self.session.call("cuMemsetD8Async", address, 0, nbytes, raw_handle(stream))

    def add_users(self, pages: Iterable[Page]) -> None:
        """Count one more user of each page."""
        with self.lock:
            for page in pages:
                page.users += 1

    def drop(self, pages: Iterable[Page]) -> None:
        """Remove one user of each page. A page without users becomes spare, or is released if the arena was closed."""
        dropped = [*pages]
        with self.lock:
            for page in dropped:
                page.users -= 1
            # No loop with an ``if`` in a block under a lock: see the module ``locks`` of the driver.
            unused = [*itertools.filterfalse(attrgetter("users"), dict.fromkeys(dropped))]
            if not self.closed:
                self.spare += unused
                return
        # Pages that the driver refuses to release are released later.
        with contextlib.suppress(CudaError):
            self._release(unused)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the arena was closed")

    def _create(self, count: int) -> list[Page]:
        """Create ``count`` pages with one user each (``cuMemCreate``). After an error, the pages created before it
        become spare. Raises OutOfMemoryError if the limit, the budget or the device has no room.
        """
        with self.lock:
            self._check_limit(count)
            numbers = self._numbers[: -count - 1 : -1]
            del self._numbers[-count:]
            numbers += itertools.islice(self._fresh, count - len(numbers))
            # Before the creation, so that the budget counts these pages, too, and other processes leave the bytes.
            self.count += count
        made: list[Page] = []

        def undo() -> None:
            self.drop(made)
            self._forget(numbers[len(made) :])
            self._tell_budget()

        with undoing(undo):
            budget = self.budget()
            if budget is not None and not budget.settle(self):
                why = f"the budget of {size_text(budget.limit)} leaves no room for {count} pages of"
                error = refused(OutOfMemoryError, "cuMemCreate", f"{why} {size_text(self.size)}: others were asked")
                error.requested, error.used, error.limit = count * self.size, budget.used, budget.limit
                raise error
            for number in numbers:
                page = Page(self.session, number)
                self.spec.create(page, self.size)
                made.append(page)
        return made

    def _check_limit(self, missing: int) -> None:
        """Raise OutOfMemoryError if the limit has no room for ``missing`` more pages."""
        if self.limit is None or missing <= 0 or (self.count + missing) * self.size <= self.limit:
            return
        why = (
            f"the arena's limit of {size_text(self.limit)} leaves no room for {missing} pages of {size_text(self.size)}"
        )
        error = refused(OutOfMemoryError, "cuMemCreate", f"{why}: {self.usage()}")
        error.requested, error.used, error.limit = missing * self.size, self.count * self.size, self.limit
        raise error

    def _release(self, pages: Sequence[Page]) -> None:
        """Release pages (``cuMemRelease``). Raises the first CudaError, after all were attempted. Pages that the driver
        refuses are released later.
        """
        later = deferred_queue(self.session)
        self._forget([page.number for page in pages if page is not self.zero])
        try:
            undo_all(functools.partial(later.end, page) for page in pages)
        finally:
            self._tell_budget()

    def _tell_budget(self) -> None:
        """Tell the other processes, through the budget, that there are fewer pages."""
        budget = self.budget()
        if budget is not None and not budget.closed:
            budget.settle()

    def _forget(self, numbers: Sequence[int]) -> None:
        """Stop counting pages that were released, or were not created. New pages reuse the numbers."""
        with self.lock:
            self.count -= len(numbers)
            self._numbers += numbers

    def _trim_spare(self, keep: int) -> int:
        with self.lock:
            released = self.spare[keep:]
            del self.spare[keep:]
        self._release(released)
        return len(released)
