"""Physical pages of one size on one device: creation, reference counts, and spare pages."""

from __future__ import annotations

import _thread
import contextlib
import functools
import math
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import filterfalse, groupby, islice
from operator import attrgetter
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from streamalloc.core.errors import (
    LOST,
    ClosedError,
    CudaError,
    OutOfMemoryError,
    refused,
    size_text,
    undo_all,
    undoing,
)
from streamalloc.core.internal import Device, Fence, Stream, await_device, deferred_queue, raw_handle
from streamalloc.core.properties import MemAccess, MemHandleType, MemLocation, checked_size
from streamalloc.core.session import Session, members, session_of
from streamalloc.driver.internal import RLock
from streamalloc.vmm.access import structs_of
from streamalloc.vmm.address_range import AddressRange
from streamalloc.vmm.claims import Claim, Claimable, claiming
from streamalloc.vmm.ownership import Allocations, OwnedHandle, allocations_of
from streamalloc.vmm.pages.budget import PageBudget
from streamalloc.vmm.physical_memory import MemorySpec, properties_for, spec_of
from streamalloc.vmm.reservation import MappedBytes

if TYPE_CHECKING:
    from streamalloc.vmm.pages.places import Parking, Places

T = TypeVar("T")
_STREAMS = 16
"""Most streams that clear pages. Each may be waiting for other work."""
_CLEARING = 0.05
"""Most seconds that ``make_room`` waits for pages to be cleared."""
_STEP = 5e-5
"""Seconds between queries of the work of parked pages."""


def _finish(parkings: Iterable[Parking], _: Claim) -> None:
    for one in parkings:
        one.finish()


class Page(OwnedHandle):
    """One physical page."""

    __slots__ = ("number", "users", "watched_at")

    def __init__(self, session: Session, number: int) -> None:
        super().__init__(session)
        self.number: int = number
        """Number of the page in its arena; unique while the page exists."""
        self.users: int = 1
        """Number of places that hold it, protected by :attr:`PhysicalPages.lock`."""
        self.watched_at: int = 0
        """Address of the committed place at which watchers count the page; 0 for none."""


class PhysicalPages(Claimable):
    """The physical pages of an arena and its spaces. The object lives as long as any of these.

    :attr:`lock` protects the spare pages and all counts. It is the innermost lock: no driver call is made under it.
    :meth:`changing` claims this object, so that only one thread changes mappings of any space: a commit in one space
    may take a page that another space keeps. :attr:`kept` and the page lists of spaces change only under the lock and
    the claim together, so a reader needs one of them only.
    """

    def __init__(
        self, device: Device, page_size: int, limit: int | None, budget: PageBudget | None, patience: float | None
    ) -> None:
        self.device: Device = device
        self.session: Session = session_of(device)
        self.spec: MemorySpec = spec_of(self.session, properties_for(device, MemHandleType.NONE, False, False))
        self.size: int = self.spec.checked(page_size, name="page_size")
        """Size of a page in bytes."""
        self.limit: int | None = None if limit is None else checked_size("limit", limit)
        """Bytes of all pages; None for no limit."""
        self.patience: float | None = patience
        """Most seconds that :meth:`changing` waits for parked pages; None for no limit."""
        # A weak reference: the arena keeps the budget. The table of reservations keeps this object, and so a strong
        # reference would keep the budget, its function ``on_ask``, and an arena that the function refers to.
        self.budget: Callable[[], PageBudget | None] = (lambda: None) if budget is None else weakref.ref(budget)
        """Limit shared with other arenas and processes; None if there is none."""
        self.allocations: Allocations = allocations_of(self.session)
        self._shut_after_fork()
        self.session.shut_with_me(self)
        self.spare: list[Page] = []
        self.kept: dict[Page, tuple[Places, int]] = {}
        """Released and cleared pages that are still mapped, each with its place; the oldest first."""
        self.newly_watched: dict[int, None] = {}
        """Addresses of newly committed pages that watchers are not yet notified of."""
        self.clearing: dict[Parking, None] = {}
        """Parkings of released places for which zeros are queued."""
        self.count: int = 0
        """Number of pages that exist or are being created."""
        self._granted: int = 0
        """Number of pages that were requested from the budget and are not created yet."""
        self.spaces: weakref.WeakSet[Places] = weakref.WeakSet()
        """Places of each space."""
        self.closed: bool = False
        self.writable: list[Any] = structs_of({device.location: MemAccess.READWRITE})
        self.readable: list[Any] = structs_of({device.location: MemAccess.READ})
        self._numbers: list[int] = []
        """Numbers of released pages, for reuse."""
        self.zero: Page = Page(self.session, -1)
        """The page of zeros, which is mapped at places without a page. It does not count for the limit."""
        self._claim = None
        self._tasks: deque[tuple[Future[int], Callable[[], int]]] = deque()
        """Functions to call in the background."""
        self._streams: dict[Stream, Fence] = {}
        """Streams that clear pages, each with the fence of its last zeros."""
        self.allocations.arenas.add(self)
        if budget is not None:
            budget.join(self)

    def _shut_after_fork(self) -> None:
        """Create locks and flags anew, because a forked child lacks the threads that held the old ones."""
        self.lock: contextlib.AbstractContextManager[bool] = RLock()
        self._filling = RLock()
        self._working = False
        """Whether the background thread is running."""

    def __repr__(self) -> str:
        return f"<pages of device {self.device.ordinal}>"

    @property
    def parked(self) -> int:
        """Number of places that wait for the work that uses them."""
        return sum(len(places.parked) for places in members(self.spaces))

    @property
    def nbytes(self) -> int:
        """Size of a page in bytes, under the name that observers read."""
        return self.size

    @property
    def location(self) -> MemLocation:
        """Location of the memory."""
        return self.device.location

    def page_bytes(self, location: MemLocation) -> int:
        """Bytes of all pages at a location, including the page of zeros."""
        zeros = self.zero.raw is not None
        return (self.count + zeros) * self.size if self.location == location else 0

    def notify_watchers(self) -> None:
        """Notify watchers of newly committed pages. Call without locks: watchers may call functions of the user."""
        while self.newly_watched:
            try:
                at, _ = self.newly_watched.popitem()
            except KeyError:
                return  # another thread has taken the last address
            for watcher in self.allocations.watchers:
                watcher.mapped(at, self)

    @property
    def claimed(self) -> int:
        """Bytes of the pages that exist or are about to be created."""
        return (self.count + self._granted) * self.size

    def give(self, nbytes: int) -> int:
        """Release unused pages of at most ``nbytes``, rounded up to whole pages. Returns the bytes released."""
        return self.trim(max(self.available - -(-nbytes // self.size), 0)) * self.size

    @property
    def available(self) -> int:
        """Number of pages available without creating one."""
        return len(self.spare) + len(self.kept)

    def idle_stream(self) -> Stream | None:
        """Return a stream without queued work, to clear pages; None if all are busy. Call within :meth:`changing`."""
        for stream, fence in self._streams.items():
            if fence.done():
                return stream
        if len(self._streams) >= _STREAMS:
            return None
        stream = self.device.create_stream()
        self._streams[stream] = Fence(self.session, ())
        return stream

    def used(self, stream: Stream, fence: Fence) -> None:
        """Record the last work of a stream, if the stream is one that the arena made to clear pages."""
        if stream in self._streams:
            self._streams[stream] = fence

    def changing(self, act: Callable[[], T]) -> T:
        """Call ``act`` while no other thread changes mappings or creates pages.

        ``act`` makes driver calls and waits for no stream. If it finds no memory, wait for the work that parked pages
        wait for, without the claim, and call ``act`` again each time that some have come back: until it succeeds, no
        parked page is left, or :attr:`patience` has run out.

        Raises
        ------
        InUseError
            A signal handler called this during such a call of its thread.
        """
        parked: list[Parking] = []
        waited: set[Parking] = set()
        until = math.inf

        def attempt(_: Claim) -> T:
            try:
                return act()
            except OutOfMemoryError as error:
                if error.call == "cuMemCreate":
                    # Listed here, because no other thread can end a parking between the failure and this line.
                    every = {one for places in members(self.spaces) for one in places.parked.values()}
                    parked[:] = [one for one in every if one not in waited and one.fence.queueing != get_ident()]
                raise

        while True:
            try:
                return claiming((self,), attempt, level=1)
            except OutOfMemoryError:
                if not waited and self.patience is not None:
                    until = time.monotonic() + self.patience
                done = self._first_done(parked, until)
                if not done:
                    raise
                # The driver may refuse to end a parking. It is not waited for again.
                waited.update(done)
                self.allocations.work()
                # The queue attempts nothing during a capture, and a refused item is attempted again by the next call.
                with contextlib.suppress(CudaError):
                    claiming((self,), functools.partial(_finish, done), level=1)

    def _first_done(self, parked: Collection[Parking], until: float) -> list[Parking]:
        """Wait until the work of some of these has completed; return those. None at the time ``until``.

        Queries, because any of them may be the first, and others may wait for an act of this thread.
        """
        done: list[Parking] = []
        while parked and not done and time.monotonic() < until:
            time.sleep(_STEP)
            done = [one for one in parked if one.fence.done()]
        return done

    def try_changing(self, act: Callable[[], T], otherwise: T) -> T:
        """Call ``act`` as :meth:`changing` does, or return ``otherwise`` while another call is changing mappings. For
        deferred items, which must not wait.
        """
        return claiming((), lambda claim: act() if claim.take((self,), wait=False) else otherwise, level=1)

    def use_zero(self) -> None:
        """Add a space as a user of :attr:`zero`. The first space creates that page.

        Raises
        ------
        ClosedError
            The arena was closed.
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
        """Map pages side by side in a separate range for a ``with`` block, which gets the address.

        At the end of the block the host waits for ``stream``. If that fails, pages and addresses stay mapped, because
        queued work may use them.
        """
        size, session = self.size, self.session
        addresses = AddressRange(len(pages) * size, driver=session.driver)
        node = addresses._node
        # One node for all mappings: if the driver refuses to unmap them, the deferred queue tries again.
        whole = MappedBytes(node, 0, addresses.nbytes, {self.device.location: MemAccess.READWRITE})
        node.add(whole)
        done = True
        try:
            for place, page in enumerate(pages):
                try:
                    session.call("cuMemMap", addresses.address + place * size, size, 0, page.raw, 0)
                except CudaError:
                    if not place:
                        whole.unmapped()
                    raise
            session.call("cuMemSetAccess", addresses.address, addresses.nbytes, self.writable, len(self.writable))
            done = False
            try:
                yield addresses.address
            finally:
                try:
                    with session.relaxed():
                        stream.synchronize()
                except CudaError as error:
                    if not isinstance(error, LOST):
                        await_device(session, self.device.ordinal)
                    done = True
                    raise
                done = True
        finally:
            if done:
                with addresses:
                    addresses.unmap(after=())
            else:
                self.add_users(pages)

    def take(self, count: int, besides: Collection[Page] = ()) -> list[Page]:
        """Return ``count`` pages: spare ones, then kept ones, which are unmapped, then new ones.

        Each has one user. Pages of ``besides`` are not taken. Call within :meth:`changing`.

        Raises
        ------
        OutOfMemoryError
            The device has not enough memory, or the limit of the arena is reached.
        ClosedError
            The arena was closed.
        """
        self._check_open()
        missing = count - len(self.spare)
        victims: dict[Page, tuple[Places, int]] = {}
        if missing > 0:
            usable = len(self.kept) - sum(page in self.kept for page in besides)
            self._check_limit(missing - usable)
            if usable:
                others = ((page, where) for page, where in self.kept.items() if page not in besides)
                victims = dict(islice(others, missing))
        self.vacate(victims)
        with self.lock:
            first = max(len(self.spare) - count, 0)
            taken = self.spare[first:]
            del self.spare[first:]
            for page in taken:
                page.users = 1
        if len(taken) == count:
            return taken
        with undoing(lambda: self.drop(taken)), self._room(count - len(taken)) as room:
            while len(taken) < count:
                taken.append(self._create(room))
        return taken

    @contextlib.contextmanager
    def _room(self, count: int) -> Iterator[list[None]]:
        """A ``with`` block that creates at most ``count`` pages, after the budget has granted them. It gets a list with
        one item for each page that may still be created; :meth:`_create` removes items.
        """
        room = [None] * max(count, 0)
        budget = self.budget()
        if budget is None or not room:
            yield room
            return
        with self.lock:
            self._granted += count
        try:
            if not budget.settle(self):
                why = f"the budget of {size_text(budget.limit)} leaves no room for {count} pages of"
                error = refused(OutOfMemoryError, "cuMemCreate", f"{why} {size_text(self.size)}: others were asked")
                error.requested, error.used, error.limit = count * self.size, budget.used, budget.limit
                raise error
            yield room
        finally:
            if room:
                with self.lock:
                    self._granted -= len(room)
                budget.settle()

    def vacate(self, kept: Mapping[Page, tuple[Places, int]]) -> None:
        """Unmap kept pages, which become spare. Each space changes completely or not at all. Call within
        :meth:`changing`.
        """
        by_space = sorted(kept.values(), key=lambda where: id(where[0]))
        for places, group in groupby(by_space, lambda where: where[0]):
            places.retire([place for _, place in group])

    def fill(self, count: int) -> int:
        """Create pages until ``count`` are spare or kept. Return the number of spare and kept pages."""

        def create() -> None:
            if self.available < count:
                with self._room(1) as room:
                    self.drop([self._create(room)])

        while self.available < count and not self.closed:
            # Claimed, so that take() on another thread does not find a page that counts but is not spare yet.
            self.changing(create)
        return self.available

    def clear(self, address: int, nbytes: int, stream: Stream) -> None:
        """Queue zeros on a stream (``cuMemsetD8Async``)."""
        self.session.call("cuMemsetD8Async", address, 0, nbytes, raw_handle(stream))

    def finish_clearing(self, *, wait: bool = False) -> None:
        """Keep the pages that are cleared by now. Call within :meth:`changing`.

        With ``wait``, instead only wait until zeros are written that no earlier work delays. Call that form without
        locks and outside of :meth:`changing`.
        """
        for parking in list(self.clearing):
            if not wait:
                parking.finish()
            elif parking.before.done():
                parking.fence.synchronize()

    def add_users(self, pages: Iterable[Page]) -> None:
        """Count another user of each page."""
        with self.lock:
            for page in pages:
                page.users += 1

    def drop(self, pages: Iterable[Page]) -> None:
        """Remove one user of each page. A page without users becomes spare, or is released if the arena was closed."""
        dropped = [*pages]
        with self.lock:
            for page in dropped:
                page.users -= 1
            # Without an `if` in a loop: see the module `locks` of the driver.
            unused = [*filterfalse(attrgetter("users"), dict.fromkeys(dropped))]
            if not self.closed:
                self.spare += unused
                return
        # Pages that the driver refuses to release are released later.
        with contextlib.suppress(CudaError):
            self._release(unused)

    def trim(self, keep: int) -> int:
        """Release spare pages, then kept ones, until ``keep`` are left; return how many were released."""
        self.finish_clearing(wait=True)

        def vacate() -> None:
            self.finish_clearing()
            self._vacate_most(keep)

        self.changing(vacate)
        return self._trim_spare(max(keep - len(self.kept), 0))

    def _vacate_most(self, keep: int) -> None:
        self.vacate(dict(islice(self.kept.items(), max(len(self.kept) - keep, 0))))

    def _trim_spare(self, keep: int) -> int:
        with self.lock:
            released = self.spare[keep:]
            del self.spare[keep:]
        self._release(released)
        return len(released)

    def close(self) -> None:
        """Release all pages that no space uses, and keep no pages from now on; idempotent."""
        with self.lock:
            first, self.closed = not self.closed, True
        for future, _ in list(self._tasks):
            future.cancel()  # without a lock, because cancel() calls callbacks of the user
        if first:
            self.drop([self.zero])
        self.trim(0)

    def in_background(self, function: Callable[[], int]) -> Future[int]:
        """Call a function on the background thread, after earlier ones.

        Raises
        ------
        ClosedError
            The arena was closed.
        """
        with self.lock:
            self._check_open()
            if not self._working:
                # Written in C: a thread pool would keep a lock if a signal handler raised in submit().
                _thread.start_new_thread(self._work, ())
                self._working = True
            # Queue the task after the start of the thread, which may fail. The thread waits for the lock.
            future: Future[int] = Future()
            self._tasks.append((future, function))
            return future

    def _work(self) -> None:
        while True:
            with self.lock:
                if not self._tasks:
                    self._working = False
                    return
                future, function = self._tasks.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            del future, function

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the arena was closed")

    def make_room(self) -> int:
        """Release all unused pages, because another user needs the memory. Returns the bytes released."""
        before, until = self.count, time.monotonic() + _CLEARING

        def vacate() -> None:
            while time.monotonic() < until:
                self.finish_clearing()
                if not any(parking.before.done() for parking in self.clearing):
                    break
            self._vacate_most(0)

        with contextlib.suppress(CudaError):
            self.try_changing(vacate, None)
        with contextlib.suppress(CudaError):
            self._trim_spare(0)
        return (before - self.count) * self.size

    def _create(self, room: list[None]) -> Page:
        with self.lock:
            self._check_limit(1)
            number = self._numbers.pop() if self._numbers else self.count
            self.count += 1
            if self.budget() is not None:
                self._granted -= 1
                del room[0]
        page = Page(self.session, number)
        with undoing(lambda: self._forget([page])):
            self.spec.create(page, self.size)
        return page

    def _check_limit(self, missing: int) -> None:
        """Raise if the limit has no room for this many more pages."""
        if self.limit is None or missing <= 0 or (self.count + missing) * self.size <= self.limit:
            return
        places = Counter(places.backing[place] for places in members(self.spaces) for place in list(places.parked))
        # Not a page that a committed place shares.
        parked = sum(page is not None and page.users == count for page, count in places.items())
        used = f"{self.count - self.available - parked} pages are in use, and {parked} parked behind queued work"
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
        try:
            undo_all(functools.partial(later.end, page) for page in pages)
        finally:
            budget = self.budget()
            if budget is not None and not budget.closed:
                budget.settle()

    def _forget(self, pages: Sequence[Page]) -> None:
        numbers = [page.number for page in pages if page is not self.zero]
        with self.lock:
            self.count -= len(numbers)
            self._numbers += numbers
