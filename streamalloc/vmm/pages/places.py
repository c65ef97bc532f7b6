"""The places of a space: one for each of its pages. Their mappings are changed as a whole or not at all.

A *place* is the address of one page in a space, named by its index. A place holds a physical page from its commit until
the page is unmapped. After a release the place is *parked* until the work that uses the page is done and the page is
cleared. Then the page is *kept*: it stays mapped at the place and reads as zeros. The next commit of the place uses the
page again without a mapping call, unless another place has taken the page.

A page that other places share is not cleared. Instead the arena's page of zeros, which devices may only read, is mapped
at the released place, as at every place without a page of its own.

States of a place, of a page and of a space, and the attributes that record them:

==============  =======================================  ==============================================================
State           Recorded by                              Meaning
==============  =======================================  ==============================================================
held            :attr:`Places.backing`                   The place has the page; :attr:`Page.users` counts its places.
committed       :attr:`Places.numbers`, not -1           The user may write to the page of the place.
parked          :attr:`Places.parked`                    The place waits for a :class:`Parking`: for work or zeros.
clearing        :attr:`PhysicalPages.clearing`           Zeros are queued for the places of a parking.
kept            :attr:`PhysicalPages.kept`               The page is cleared, and still mapped at its last place.
spare           :attr:`PhysicalPages.spare`              The page has no place.
stored          :attr:`Places.stored`                    The contents of the place are in a tier.
set aside       :attr:`Places.parked`                    The place is parked for a swap that a thread is queueing. It
                                                         may have no page yet.
broken          :attr:`Places.broken`                    A call and its undo failed: the driver may map another page or
                                                         permission than recorded.
==============  =======================================  ==============================================================

A committed, parked or kept place holds a page; only a place that is parked for a swap may have none. A stored place is
not committed.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, filterfalse, groupby, islice
from operator import attrgetter
from threading import get_ident
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from streamalloc.core.errors import (
    ClosedError,
    CudaError,
    OutOfMemoryError,
    attach,
    error_from,
    refused,
    size_text,
    undo_all,
    undoing,
)
from streamalloc.core.internal import Deferred, Device, Fence, HandleEnd, Stream, deferred_queue
from streamalloc.core.properties import MemAccess, MemHandleType, MemLocation, checked_size
from streamalloc.core.session import Session, members, session_of
from streamalloc.driver.internal import RLock
from streamalloc.formats.sizes import counted
from streamalloc.vmm.access import structs_of
from streamalloc.vmm.address_range import AddressRange
from streamalloc.vmm.claims import Claimable, claim_also, claiming
from streamalloc.vmm.ownership import Allocations, allocations_of
from streamalloc.vmm.pages.budget import PageBudget
from streamalloc.vmm.physical_memory import MemorySpec, properties_for, spec_of
from streamalloc.vmm.reservation import MappedBytes, Reservation
from streamalloc.vmm.stores.blocks import Kept, drop_contents

T = TypeVar("T")


_STREAMS = 16
"""Largest number of streams of an arena that clear pages. One stream is not enough, because it may be waiting for other
work.
"""
_CLEARING = 0.05
"""Longest time in seconds that ``make_room`` waits for pages that are being cleared."""
_STEP = 5e-5
"""Seconds between two queries of the work of parked pages."""


class Page(HandleEnd):
    """One physical page, and the only owner of its driver handle. If the page is dropped, the deferred queue releases
    the handle (``cuMemRelease``).
    """

    __slots__ = ("number", "users", "watched_at")

    def __init__(self, session: Session, number: int) -> None:
        super().__init__(session, "cuMemRelease", None)
        self.number: int = number
        """Number of the page in its arena; unique while the page exists."""
        self.users: int = 1
        """Number of places and calls that hold the page; for the page of zeros, the number of spaces and one for the
        open arena. Read and changed under :attr:`PhysicalPages.lock`.
        """
        self.watched_at: int = 0
        """Address at which watchers count the page; 0 if no watcher counts it."""

    def forget(self) -> None:
        """Clear the handle without a driver call, because the context was lost, and its memory with it."""
        self._raw = None

    def __del__(self) -> None:
        if getattr(self, "_raw", None) is not None and self._session.usable:
            deferred_queue(self._session).submit(self)


class Places(MappedBytes):
    """The places of a space: the page and state of each. As a node of the ownership tree, it stands for all mappings of
    the space, which one ``cuMemUnmap`` releases.
    """

    def __init__(self, reservation: Reservation, physical: PhysicalPages) -> None:
        rights = {physical.device.location: MemAccess.READWRITE}
        super().__init__(reservation, 0, reservation.nbytes, rights, physical.spec)
        count = reservation.nbytes // physical.nbytes
        self.physical: PhysicalPages = physical
        self.backing: list[Page | None] = [None] * count
        """Page of each place that is committed, parked or kept; None for the other places, which map zeros."""
        self.parked: dict[int, Parking] = {}
        """Places that wait for a :class:`Parking`: their pages are still in use or being cleared, or a swap is queueing
        copies.
        """
        self.stored: dict[int, Kept] = {}
        """Stored contents of the places that are swapped out."""
        self.numbers: npt.NDArray[np.int64] = np.full(count, -1, np.int64)
        """Number of the page that is committed at each place; -1 if none is."""
        self.broken: set[int] = set(range(count))
        """Places where the mapping or its permission may differ from :attr:`backing`: all places of a new space, and
        places where a driver call and its undo failed. :meth:`repair` makes the mapping again.
        """
        physical.spaces.add(self)

    def _address(self, place: int) -> int:
        return int(self.reservation.raw) + place * self.physical.nbytes

    def locked(self, act: Callable[[], T], *, closing: bool = False) -> T:
        """Call ``act`` while no other thread changes the places (:meth:`PhysicalPages.changing`), and return the result
        of ``act``. Places that are :attr:`broken` are repaired first. With ``closing`` they are not, and a space that
        was closed is accepted.

        Raises
        ------
        InUseError
            A signal handler called this method while its thread was changing mappings.
        ClosedError
            The space was closed.
        """

        def checked() -> T:
            if not closing and (self.gone or self.given_up):
                raise ClosedError("the space was closed")
            if not closing:
                self.repair()
            return act()

        return self.physical.changing(checked)

    def claim(self, places: Sequence[int]) -> tuple[list[int], dict[int, Page]]:
        """Return a list of those ``places`` that already hold an unshared page, and a dict with a new page for each of
        the other places. First notify the watchers, whose errors propagate. Raises OutOfMemoryError, CudaError, and
        ClosedError if a page is needed and the arena was closed.

        Call this only within :meth:`locked`, with places that are not committed.
        """
        self.announce(places)
        ready, _ = self.split(places)
        if len(ready) == len(places):
            return ready, {}
        held = set(ready)
        rest = [place for place in places if place not in held]
        pages = {page for page in (self.backing[place] for place in ready) if page is not None}
        return ready, dict(zip(rest, self.physical.take(len(rest), pages), strict=True))

    def announce(self, places: Collection[int]) -> None:
        """Call ``to_be_mapped`` of each watcher with the address of the first of ``places`` and the number of bytes.
        Errors of the watchers propagate.
        """
        for watcher in self.physical.allocations.watchers if places else ():
            watcher.to_be_mapped(self._address(next(iter(places))), len(places) * self.physical.nbytes)

    def split(self, places: Iterable[int]) -> tuple[list[int], list[int]]:
        """Return two lists of those ``places`` that hold a page. The places are looked at in order. A place is in the
        first list if its page has no user left once this place and the places before it are released. Otherwise it is
        in the second list.
        """
        alone: list[int] = []
        shared: list[int] = []
        left: dict[Page, int] = {}
        for place in places:
            page = self.backing[place]
            if page is not None:
                left[page] = left.get(page, page.users) - 1
                (shared if left[page] else alone).append(place)
        return alone, shared

    def exchange(self, pages: Mapping[int, Page], ready: Sequence[int] = (), parking: Parking | None = None) -> None:
        """Map ``pages``, given by place, and commit these places and the places in ``ready``, which keep their page.
        Either all places change or none. Raises CudaError.

        With ``parking``, the places of ``pages`` are parked instead of committed. Before the call, the caller counts
        one user of a page for each place; after an error this user is removed.

        Each run of adjacent places needs one ``cuMemUnmap``, a ``cuMemMap`` for each page, and one ``cuMemSetAccess``.
        If an error cannot be undone, the next call undoes it, and no page is lost.
        """
        zero = self.physical.zero
        before = {place: self.backing[place] for place in pages}
        begun: set[int] = set()
        try:
            self._put(pages, begun)
            with self.physical.lock, undoing(self.as_now([*pages, *ready])):
                for place, page in pages.items():
                    if self.backing[place] is not None:
                        self._unkeep(place)
                        self._unwatch(place)
                    self.backing[place] = None if page is zero else page
                if parking is None:
                    self.mark_committed([*pages, *ready])
                else:
                    self.park([*pages], parking)
        except BaseException as first:
            self.broken |= begun
            try:
                self.repair()
            except Exception as later:
                attach(first, later)
            raise
        finally:
            # A place holds one of its old and its new page.
            both = [(place, page) for some in (before, pages) for place, page in some.items() if page is not zero]
            self.physical.drop([page for place, page in both if page and page is not self.backing[place]])

    def as_now(self, places: Collection[int]) -> Callable[[], None]:
        """Return a function that sets the records of ``places`` back to what they are now."""
        kept = self.physical.kept
        records = {place: (self.backing[place], self.numbers[place], self.parked.get(place)) for place in places}
        unused = {
            page: (self, place) for place, (page, *_) in records.items() if page and kept.get(page) == (self, place)
        }

        def put_back() -> None:
            with self.physical.lock:
                for place, (page, number, parking) in records.items():
                    self._unwatch(place)
                    self.parked.pop(place, None)
                    if parking is not None:
                        self.parked[place] = parking
                    elif page is not None and number >= 0:
                        self._watch(page, place)
                    self.backing[place] = page
                    self.numbers[place] = number
                kept.update(unused)
            self.notify([place for _, place in unused.values()], released=True)

        return put_back

    def repair(self) -> None:
        """Map the page in :attr:`backing`, or the page of zeros, at each :attr:`broken` place. Raises CudaError."""
        wrong = {place: self.backing[place] or self.physical.zero for place in self.broken}
        self._put(wrong, set())
        self.broken.difference_update(wrong)

    def _put(self, pages: Mapping[int, Page], begun: set[int]) -> None:
        """Map ``pages``, given by place (``cuMemUnmap``, ``cuMemMap``, ``cuMemSetAccess``). The places of each run are
        added to ``begun`` before its first driver call, because this method undoes no error, also not of a signal
        handler.
        """
        size, start, session = self.physical.nbytes, int(self.reservation.raw), self.physical.session
        map_page, zero = session.cuMemMap, self.physical.zero
        zeros = [place for place, page in pages.items() if page is zero]
        others = [place for place in pages if pages[place] is not zero] if zeros else pages
        for places, rights in ((zeros, self.physical.readable), (others, self.physical.writable)):
            for run in adjacent(places):
                at, nbytes = start + run.start * size, len(run) * size
                begun.update(run)
                # `cuMemUnmap` also accepts addresses without memory. A new space has such addresses, and so has a space
                # after a failed call.
                session.call("cuMemUnmap", at, nbytes)
                for place in run:
                    result = map_page(start + place * size, size, 0, pages[place].raw, 0)[0]
                    if result:
                        raise error_from(result, "cuMemMap")
                session.call("cuMemSetAccess", at, nbytes, rights, len(rights))

    def park(self, places: Sequence[int], parking: Parking) -> None:
        """Record that ``places`` are released and wait for the work of ``parking``. After this work,
        :meth:`Parking.finish` keeps or unmaps their pages.
        """
        self.numbers[places] = -1
        for place in places:
            self._unwatch(place)
        self.parked.update(dict.fromkeys(places, parking))
        parking.places |= dict.fromkeys(places)

    def set_aside(self, places: Collection[int], parking: Parking) -> None:
        """Park ``places`` with ``parking`` until a swap has copied contents to them. Places without a page are parked,
        too.
        """
        self.notify(places, released=False)
        with self.physical.lock:
            for place in places:
                self._unkeep(place)
            self.park([*places], parking)

    def notify(self, places: Iterable[int], *, released: bool) -> None:
        """Notify a checked driver that ``places`` were ``released``, or that they are used again. The pages stay
        mapped, so no driver call shows this to the checker.
        """
        listener = self.physical.session.listener
        if listener is not None:
            for run in adjacent(places):
                listener.released(self._address(run.start), len(run) * self.physical.nbytes, released)

    def commit(self, places: Collection[int]) -> None:
        """Call :meth:`mark_committed`. If a signal handler raises, no place changes."""
        with self.physical.lock, undoing(self.as_now(places)):
            self.mark_committed(places)

    def mark_committed(self, places: Collection[int]) -> None:
        """Record that ``places`` are committed with the pages that they hold. A place without a page becomes an
        uncommitted place. The caller undoes a call in which a signal handler raises (:meth:`as_now`).
        """
        with self.physical.lock:
            self.notify(places, released=False)
            for place in places:
                page = self.backing[place]
                self.numbers[place] = -1 if page is None else page.number
                if page is not None:
                    self._unkeep(place)
                    self._watch(page, place)
                self.parked.pop(place, None)

    # Watchers count a page once, at the address of one of its places. Otherwise aliases would count as more memory.

    def _watch(self, page: Page, place: int) -> None:
        if not page.watched_at:
            page.watched_at = self._address(place)
            if self.physical.allocations.watchers:
                self.physical.newly_watched[page.watched_at] = None

    def _unwatch(self, place: int) -> None:
        page = self.backing[place]
        at = self._address(place)
        if page is not None and page.watched_at == at:
            page.watched_at = 0
            self.physical.newly_watched.pop(at, None)
            watchers = self.physical.allocations.watchers
            for watcher in watchers:
                watcher.unmapped(at)
            if watchers and page.users > 1:
                self._watch_elsewhere(page, place)

    def _watch_elsewhere(self, page: Page, besides: int) -> None:
        for places in members(self.physical.spaces):
            for place in np.flatnonzero(places.numbers == page.number).tolist():
                if places is not self or place != besides:
                    places._watch(page, place)
                    return

    def _unkeep(self, place: int) -> None:
        page = self.backing[place]
        if page is not None and self.physical.kept.get(page) == (self, place):
            del self.physical.kept[page]

    def retire(self, places: Collection[int]) -> None:
        """Map the page of zeros at ``places``, which hold a page, and remove one user of each such page. Either all
        places change or none. Raises CudaError.
        """
        self.exchange(dict.fromkeys(places, self.physical.zero))

    def keep(self, places: Collection[int]) -> None:
        """Record that the pages of ``places``, which were released, have been cleared."""
        with self.physical.lock:
            for place in places:
                page = self.backing[place]
                assert page is not None
                self.physical.kept[page] = self, place
                self.parked.pop(place, None)

    def clear(self, places: Collection[int], stream: Stream) -> None:
        """Queue zeros for ``places`` on ``stream``, by one call for each run of adjacent places (``cuMemsetD8Async``).
        Raises ClosedError if the stream was closed, CudaError.
        """
        size, session, raw = self.physical.nbytes, self.physical.session, stream.checked_raw()
        with stream.device.current():
            for run in adjacent(places):
                session.call("cuMemsetD8Async", self._address(run.start), 0, len(run) * size, raw)

    def parkings(self, places: Collection[int]) -> set[Parking]:
        """Return the set of the parkings of ``places``. Places that are not parked add none."""
        return {parking for place in places if (parking := self.parked.get(place)) is not None}

    def release(self) -> None:
        """Unmap all places of a dropped space (``cuMemUnmap``). If another call is changing mappings, or work still
        uses a parked place, do nothing: the deferred queue then tries again. Raises CudaError.
        """

        def unmap() -> None:
            if all(parking.fence.done() for parking in set(self.parked.values())):
                self.unmap_all()

        self.physical.try_changing(unmap, None)

    def unmap_all(self) -> None:
        """Unmap all places by one ``cuMemUnmap``. Idempotent. Call this only within :meth:`locked` or
        :meth:`PhysicalPages.try_changing`. Raises CudaError.
        """
        if not self.gone:
            super().release()
        self.forget()

    def forget(self) -> None:
        """Return all pages to the arena, after they were unmapped. Idempotent.

        If a signal handler raises, the space is closed but not yet gone, so that its release is tried again. Until
        then the arena may still map zeros at a kept page, which is possible only while the addresses are reserved.
        """
        if not self.gone:
            self.given_up = True
            with self.physical.lock:
                self._return_pages()
            stored, self.stored = self.stored, {}
            drop_contents(stored)
        super().forget()

    def _return_pages(self) -> None:
        """Remove the pages of all places from the records, and one user of each and of the page of zeros. If a signal
        handler raises, at most one of them keeps its user; the next call goes on.
        """
        self.numbers[:] = -1
        self.parked.clear()
        zero = [self.physical.zero] if self.backing else []
        while self.backing:
            place = len(self.backing) - 1
            self._unkeep(place)
            self._unwatch(place)
            page = self.backing.pop()
            if page is not None:
                self.physical.drop([page])
        self.physical.drop(zero)


class Parking(Deferred):
    """Released places that wait for work. A first parking waits for the work that uses their pages. A second parking,
    which :meth:`begin` makes, waits for the zeros that are written to the pages.

    :meth:`begin` parks the places with the second parking before it queues the zeros. So if the driver refuses a call
    or a signal handler raises in between, the places still wait for zeros that may have been queued. The fence of the
    second parking is recorded after the zeros. Otherwise it would be done too early, and the zeros would overwrite what
    the next user of the page writes.
    """

    def __init__(self, owner: Places, fence: Fence, before: Fence | None = None) -> None:
        self._owner = owner
        self.before: Fence = fence if before is None else before
        """The work that uses the pages. The zeros are queued after this work."""
        self.fence: Fence = fence
        """The work that the places wait for: the work of :attr:`before`, or the zeros."""
        self.cleared: bool = False
        """Whether :attr:`fence` covers the zeros."""
        self.refused: Exception | None = None
        """Error of a call that should have queued the zeros; None if there was none."""
        self.places: dict[int, None] = {}
        """The places that were parked with this object. Places that were parked with another object or committed since
        then no longer wait for this object.
        """

    def attempt(self) -> bool:
        """Call :meth:`finish`, and return its result. If another call is changing mappings, return False, so that the
        deferred queue tries again. Raises CudaError.
        """
        return self._owner.physical.try_changing(self.finish, otherwise=False)

    def finish(self) -> bool:
        """Keep the pages that are cleared, unmap the other pages, and return True. If the work is not done, do nothing
        and return False. Raises CudaError.

        Call this only within :meth:`Places.locked`.
        """
        owner, physical = self._owner, self._owner.physical
        if owner.gone or owner.given_up:
            return True  # The space's release unmaps them.
        mine = [place for place in self.places if owner.parked.get(place) is self]
        if mine and not self.fence.done():
            return False
        pages = [(place, owner.backing[place]) for place in mine if self.cleared and not physical.closed]
        kept = [place for place, page in pages if page is not None and page.users == 1]
        if len(kept) < len(mine):
            owner.retire([place for place in mine if place not in set(kept)])
        owner.keep(kept)
        return True

    def begin(self, behind: Stream | None = None) -> Parking | None:
        """Queue zeros for the pages that are not shared, and return the new parking of these places; None if nothing
        was queued. Errors of the driver are not raised: the deferred queue unmaps pages that cannot be cleared.

        Call this only within :meth:`Places.locked`. ``behind`` is a stream that has all work that uses the pages: the
        zeros are queued there. With None, they are queued on a stream of the arena, after this work.
        """
        ahead = None
        with contextlib.suppress(CudaError):
            try:
                ahead = self.clear(behind)
            except CudaError as error:
                self.refused = error
            finally:
                if self.places:
                    deferred_queue(self._owner.physical.session).submit(self)
                    self.finish()
        return ahead

    def clear(self, behind: Stream | None) -> Parking | None:
        """Queue the zeros for :meth:`begin` (``cuMemsetD8Async``), on ``behind`` or on an idle stream of the arena.
        Returns the new parking; None if nothing was queued. Raises CudaError.
        """
        owner, physical = self._owner, self._owner.physical
        # Another thread may have committed some of the places meanwhile.
        alone, shared = owner.split([place for place in self.places if owner.parked.get(place) is self])
        done = behind is None and self.fence.done()
        with physical.session.relaxed():
            stream = physical.idle_stream() if alone and behind is None else behind
            if stream is None or not alone or physical.closed:
                return None
            ahead = Parking(owner, Fence(physical.session, [stream], queueing=True), self.fence)
            try:
                if stream in physical.streams:
                    physical.streams[stream] = ahead.fence
                if behind is None and not done:
                    self.fence.precede(stream)
                owner.park(alone, ahead)
                self.places = dict.fromkeys(shared)
                deferred_queue(physical.session).submit(ahead)
                try:
                    owner.clear(alone, stream)
                    ahead.cleared = True
                    owner.notify(alone, released=True)
                except (CudaError, ClosedError) as error:
                    self.refused = error  # Some zeros may have been queued: the places wait for `ahead`.
            finally:
                ahead.fence.queueing = 0
            ahead.fence.record()
        return ahead


class PhysicalPages(Claimable):
    """The physical pages of an arena and its spaces, which all refer to this object.

    :attr:`lock` protects the spare pages and all counts. No other lock is taken and no driver call is made under this
    lock, because deferred items and readers of statistics take it, too, and a driver call may take long.

    :meth:`changing` claims this object, so that only one thread changes mappings of any space: a commit in one space
    may take a page that another space keeps. :attr:`kept` and the page lists of spaces change only under both the claim
    and the lock, so a reader needs only one of the two.
    """

    closed: bool = False

    def __init__(
        self,
        device: Device,
        page_size: int | str,
        limit: int | str | None,
        budget: PageBudget | None,
        patience: float | None,
    ) -> None:
        self.device: Device = device
        self.location: MemLocation = device.location
        self.session: Session = session_of(device)
        self.spec: MemorySpec = spec_of(self.session, properties_for(device, MemHandleType.NONE, False, False))
        self.nbytes: int = self.spec.checked(page_size, name="page_size")
        """Size of a page in bytes."""
        self.limit: int | None = None if limit is None else checked_size("limit", limit)
        """Largest number of bytes of all pages; None for no limit."""
        # The reference is weak; the arena keeps the budget alive. The table of reservations keeps this object, and a
        # strong reference would also keep the budget, its function `on_ask`, and perhaps an arena.
        self.budget: Callable[[], PageBudget | None] = (lambda: None) if budget is None else weakref.ref(budget)
        """Function that returns the budget, a limit shared with other arenas and processes, or None."""
        self.allocations: Allocations = allocations_of(self.session)
        self.spare: list[Page] = []
        """Pages that no place holds."""
        self.count: int = 0
        """Number of pages that exist or are being created."""
        self.writable: list[Any] = structs_of({device.location: MemAccess.READWRITE})
        self.readable: list[Any] = structs_of({device.location: MemAccess.READ})
        self._numbers: list[int] = []
        """Numbers of released pages, for reuse."""
        self._fresh = count()
        """Iterator over numbers that no page has had so far."""
        self.zero: Page = Page(self.session, -1)
        """The page of zeros, which is mapped at places without a page. It is not included in the limit."""
        self.patience: float | None = patience
        """Longest time in seconds that :meth:`changing` waits for parked pages; None for no limit."""
        self.kept: dict[Page, tuple[Places, int]] = {}
        """Released and cleared pages that are still mapped, each with its space and place; the oldest comes first."""
        self.newly_watched: dict[int, None] = {}
        """Addresses of newly committed pages for which watchers have not been notified yet."""
        self.spaces: weakref.WeakSet[Places] = weakref.WeakSet()
        """The :class:`Places` of each space."""
        self.streams: dict[Stream, Fence] = {}
        """Streams that clear pages, each with a fence for its last zeros."""
        self._shut_after_fork()
        self.session.shut_with_me(self)

    def _shut_after_fork(self) -> None:
        """Create the locks anew, because the threads that held the old locks do not exist in a forked child."""
        self.lock: contextlib.AbstractContextManager[bool] = RLock()
        self._filling = RLock()
        """Lock held while the page of zeros is created, so that another space waits until this page has been filled."""
        self._background: ThreadPoolExecutor | None = None
        """Executor of the background thread; None before its first use."""

    def page_bytes(self, location: MemLocation) -> int:
        """Return the bytes of all pages, including the page of zeros, if they are in ``location``; otherwise 0."""
        return self.claimed + self.nbytes * (self.zero.raw is not None) if self.location == location else 0

    @property
    def claimed(self) -> int:
        """Bytes of the pages that exist or are about to be created."""
        return self.count * self.nbytes

    def use_zero(self) -> None:
        """Count one more space that uses :attr:`zero`. The first call creates this page and fills it with zeros
        (``cuMemCreate``, ``cuMemsetD8Async``).

        Raises
        ------
        ClosedError
            The arena was closed.
        OutOfMemoryError, CudaError
            The device has no memory for the page, or the driver refused a call.
        """
        self._check_open()
        self.add_users([self.zero])
        with undoing(lambda: self.drop([self.zero])), self._filling:
            if self.zero.raw is None:
                self._make_zero()

    def _make_zero(self) -> None:
        zero = self.zero
        self.spec.create(zero, self.nbytes)
        with undoing(zero.attempt), self.device.create_stream() as stream, mapped_apart(self, [zero], stream) as at:
            self.session.call("cuMemsetD8Async", at, 0, self.nbytes, stream.checked_raw())

    def __repr__(self) -> str:
        return f"<pages of device {self.device.ordinal}>"

    @property
    def available(self) -> int:
        """Number of pages that can be used without creating one: spare and kept pages."""
        return len(self.spare) + len(self.kept)

    @property
    def clearing(self) -> list[Parking]:
        """Parkings of released places for which zeros are queued."""
        every = {parking for places in members(self.spaces) for parking in set(places.parked.values())}
        return [one for one in every if one.before is not one.fence and not one.fence.queueing]

    @property
    def parked(self) -> int:
        """Number of parked places of all spaces."""
        return sum(len(places.parked) for places in members(self.spaces))

    def notify_watchers(self) -> None:
        """Notify watchers of newly committed pages. Call this without locks: watchers may call anything, and raise."""
        while self.newly_watched:
            try:
                at, _ = self.newly_watched.popitem()
            except KeyError:
                return  # Taken by another thread.
            for watcher in self.allocations.watchers:
                watcher.mapped(at, self)

    def give(self, nbytes: int) -> int:
        """Release unused pages of up to ``nbytes`` bytes, rounded up. Returns the bytes released. Raises CudaError."""
        return self.trim(max(self.available - -(-nbytes // self.nbytes), 0)) * self.nbytes

    def idle_stream(self) -> Stream | None:
        """Return a stream without queued zeros, to clear pages; None if all 16 such streams of the arena are busy. Call
        this only within :meth:`changing`. Raises CudaError.
        """
        for stream, fence in self.streams.items():
            if fence.done():
                return stream
        if len(self.streams) >= _STREAMS:
            return None
        stream = self.device.create_stream()
        self.streams[stream] = Fence(self.session, ())
        return stream

    def changing(self, act: Callable[[], T]) -> T:
        """Call ``act`` while no other thread changes mappings or creates pages.

        ``act`` makes driver calls and waits for no stream. If ``act`` finds no memory, the host waits for the work of
        parked pages, without the claim, so that other threads can release pages meanwhile. When some pages have become
        available, ``act`` is called again. The error propagates if no parked page is left or :attr:`patience` is over.

        Raises
        ------
        InUseError
            A signal handler called this method while its thread was changing mappings.
        """
        parked: list[Parking] = []
        waited: set[Parking] = set()
        until = math.inf

        def attempt() -> T:
            try:
                return act()
            except OutOfMemoryError as error:
                if error.call == "cuMemCreate":
                    # The parkings are listed before the wait: if another thread ends one right after the failure, `act`
                    # must be called again.
                    every = {one for places in members(self.spaces) for one in places.parked.values()}
                    parked[:] = [one for one in every if one not in waited and one.fence.queueing != get_ident()]
                raise

        while True:
            try:
                return claiming((self,), attempt, level=1)
            except OutOfMemoryError:
                if not waited and self.patience is not None:
                    until = time.monotonic() + self.patience
                done = self._finish_first(parked, until)
                if not done:
                    raise
                # If the driver refuses to end a parking, the next round must not wait for it again.
                waited.update(done)

    def _finish_first(self, parked: Collection[Parking], until: float) -> list[Parking]:
        """Wait until the work of at least one of these parkings is done. Finish the parkings whose work is done, and
        return them. Return an empty list at the time ``until`` (``time.monotonic``).

        The host queries all parkings in turn: the work of one may be waiting for this thread, and would never end.
        """
        done: list[Parking] = []
        while parked and not done and time.monotonic() < until:
            time.sleep(_STEP)
            done = [one for one in parked if one.fence.done()]
        if done:
            self.allocations.work()
            # The parkings are finished here, too, because the deferred queue attempts nothing during a capture.
            with contextlib.suppress(CudaError):
                claiming((self,), lambda: [one.finish() for one in done], level=1)
        return done

    def try_changing(self, act: Callable[[], T], otherwise: T) -> T:
        """Call ``act`` as :meth:`changing` does, and return its result. If another call is changing mappings, return
        ``otherwise`` at once. For deferred items, which must not wait.
        """
        return claiming((), lambda: act() if claim_also((self,), wait=False) else otherwise, level=1)

    def take(self, count: int, besides: Collection[Page] = ()) -> list[Page]:
        """Return ``count`` pages with one user each: first spare pages, then kept pages, which are unmapped first, then
        new pages (``cuMemCreate``).

        Kept pages in ``besides`` are not taken. Call this only within :meth:`changing`.

        Raises
        ------
        OutOfMemoryError
            The device has not enough memory, or the limit of the arena or of its budget is reached.
        CudaError
            The driver refused to unmap or to create a page.
        ClosedError
            The arena was closed.
        """
        self._check_open()
        missing = count - len(self.spare)
        if missing > 0:
            usable = len(self.kept) - sum(page in self.kept for page in besides)
            self._check_limit(missing - usable)
            if usable:
                others = ((page, where) for page, where in self.kept.items() if page not in besides)
                self.vacate(dict(islice(others, missing)))
        with self.lock:
            first = max(len(self.spare) - count, 0)
            taken = self.spare[first:]
            del self.spare[first:]
            for page in taken:
                page.users = 1
        if len(taken) == count:
            return taken
        with undoing(lambda: self.drop(taken)):
            return taken + self._create(count - len(taken))

    def vacate(self, kept: Mapping[Page, tuple[Places, int]]) -> None:
        """Unmap the pages of ``kept``, a part of :attr:`kept`, so that they become spare. Each space changes completely
        or not at all. Call this only within :meth:`changing`. Raises CudaError.
        """
        by_space = sorted(kept.values(), key=lambda where: id(where[0]))
        for places, group in groupby(by_space, lambda where: where[0]):
            places.retire([place for _, place in group])

    def finish_clearing(self) -> None:
        """Finish the parkings whose zeros are written. Call this only within :meth:`changing`. Raises CudaError."""
        for parking in self.clearing:
            parking.finish()

    def await_clearing(self) -> None:
        """Block the host until pages are cleared whose earlier work is done. Pages whose zeros wait for unfinished work
        are left out. Call this without locks and outside of :meth:`changing`.
        """
        for parking in self.clearing:
            if parking.before.done():
                parking.fence.synchronize()

    def trim(self, keep: int) -> int:
        """Release unused pages until at most ``keep`` unused pages are left, first the spare pages, then the kept ones
        (``cuMemUnmap``, ``cuMemRelease``). Returns the number of pages released. Raises CudaError.

        The host waits for zeros that are being written to released pages, but not for other work.
        """
        self.await_clearing()

        def vacate() -> None:
            self.finish_clearing()
            self.vacate(dict(islice(self.kept.items(), max(len(self.kept) - keep, 0))))

        self.changing(vacate)
        return self._trim_spare(max(keep - len(self.kept), 0))

    def close(self) -> None:
        """Release all pages that no space uses, and keep no unused pages from now on. Idempotent. Raises CudaError; the
        deferred queue then releases the page later.
        """
        with self.lock:
            first, self.closed = not self.closed, True
        if self._background is not None:
            self._background.shutdown(wait=False)
        if first:
            self.drop([self.zero])
        self.trim(0)

    def in_background(self, function: Callable[[], int]) -> Future[int]:
        """Call ``function`` on the arena's background thread, after functions that were passed before. Returns a future
        for the result of ``function``. Raises ClosedError if the arena was closed.
        """
        with self.lock:
            self._check_open()
            self._background = background = self._background or ThreadPoolExecutor(1, "streamalloc-pages")
        return background.submit(function)

    def make_room(self) -> int:
        """Release all unused pages, because the process needs the memory elsewhere. Waits at most 50 ms for pages that
        are being cleared. Returns the number of bytes released. Errors of the driver are hidden.
        """
        before, until = self.count, time.monotonic() + _CLEARING

        def vacate() -> None:
            while time.monotonic() < until:
                self.finish_clearing()
                if not any(parking.before.done() for parking in self.clearing):
                    break
            self.vacate(self.kept)

        with contextlib.suppress(CudaError):
            self.try_changing(vacate, None)
        with contextlib.suppress(CudaError):
            self._trim_spare(0)
        return (before - self.count) * self.nbytes

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
            # `filterfalse` replaces a loop with an `if`, which must not be here: see `streamalloc.driver.locks`.
            unused = [*filterfalse(attrgetter("users"), dict.fromkeys(dropped))]
            if not self.closed:
                self.spare += unused
                return
        # An error must not hide the result of the caller: pages that the driver refuses to release are released later.
        with contextlib.suppress(CudaError):
            self._release(unused)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the arena was closed")

    def _create(self, count: int) -> list[Page]:
        """Create ``count`` pages with one user each (``cuMemCreate``). After an error, the pages that were created
        before it become spare. Raises OutOfMemoryError if the limit, the budget or the device's memory is exhausted.
        """
        numbers, made = list[int](), list[Page]()

        def undo() -> None:
            self.drop(made)
            self._forget(numbers[len(made) :])
            self._tell_budget()

        with undoing(undo):
            with self.lock:
                self._check_limit(count)
                reused = self._numbers[: -count - 1 : -1]
                del self._numbers[-count:]
                new = [*islice(self._fresh, count - len(reused))]
                # Other processes see the count before the creation. No signal handler raises between these lines.
                numbers += reused + new
                self.count += count
            if (budget := self.budget()) is not None and not budget.settle(self):
                raise self._no_room(count, "budget", "others were asked", budget.used, budget.limit)
            for number in numbers:
                page = Page(self.session, number)
                self.spec.create(page, self.nbytes)
                made.append(page)
        return made

    def _check_limit(self, missing: int) -> None:
        """Raise OutOfMemoryError if ``missing`` more pages would exceed the limit."""
        if self.limit is not None and missing > 0 and self.claimed + missing * self.nbytes > self.limit:
            raise self._no_room(missing, "arena's limit", usage(self), self.claimed, self.limit)

    def _no_room(self, missing: int, name: str, why: str, used: int, limit: int) -> OutOfMemoryError:
        text = f"the {name} of {size_text(limit)} leaves no room for {missing} pages of {size_text(self.nbytes)}: {why}"
        requested = missing * self.nbytes
        return refused(OutOfMemoryError, "cuMemCreate", text, requested=requested, used=used, limit=limit)

    def _release(self, pages: Sequence[Page]) -> None:
        """Release pages (``cuMemRelease``). If the driver refuses a page, the deferred queue releases it later, and the
        first CudaError is raised after all pages were tried.
        """
        later = deferred_queue(self.session)
        self._forget([page.number for page in pages if page is not self.zero])
        try:
            undo_all(functools.partial(later.end, page) for page in pages)
        finally:
            self._tell_budget()

    def _tell_budget(self) -> None:
        """Write the smaller number of bytes to the budget, so that other processes can use them."""
        budget = self.budget()
        if budget is not None and not budget.closed:
            budget.settle()

    def _forget(self, numbers: Sequence[int]) -> None:
        """Stop counting pages that were released or could not be created. New pages reuse their numbers."""
        with self.lock:
            self.count -= len(numbers)
            self._numbers += numbers

    def _trim_spare(self, keep: int) -> int:
        with self.lock:
            released = self.spare[keep:]
            del self.spare[keep:]
        self._release(released)
        return len(released)


def fill(physical: PhysicalPages, count: int) -> int:
    """Create pages until ``count`` pages are spare or kept (``cuMemCreate``), or the arena is closed. Returns the
    number of spare and kept pages. Raises OutOfMemoryError, CudaError.
    """

    def create() -> None:
        if physical.available < count:
            physical.drop(physical._create(1))

    while physical.available < count and not physical.closed:
        # Without the claim, `take` on another thread could find a page that is counted but not yet spare.
        physical.changing(create)
    return physical.available


def usage(physical: PhysicalPages) -> str:
    """Return a text for errors: how many pages are in use, and how many are parked. A page counts as parked if all its
    places are parked. Spare and kept pages are not counted.
    """
    places = Counter(places.backing[place] for places in members(physical.spaces) for place in list(places.parked))
    parked = sum(page is not None and page.users == count for page, count in places.items())
    used = physical.count - physical.available - parked
    return f"{counted(used, 'page')} {'is' if used == 1 else 'are'} in use, and {parked} parked behind queued work"


@contextlib.contextmanager
def mapped_apart(physical: PhysicalPages, pages: Sequence[Page], stream: Stream) -> Iterator[int]:
    """Return a context manager that maps ``pages`` side by side in a new address range (``cuMemMap``). ``with`` gives
    the first address.

    At the end of the block the host waits for ``stream``, then unmaps the pages and frees the addresses. After an error
    in the block, the host waits for the device. If this wait fails, the pages stay mapped there, because queued work
    may use the pages. Raises AddressSpaceError, CudaError.
    """
    size, session = physical.nbytes, physical.session
    addresses = AddressRange(len(pages) * size, driver=session.driver)
    # One node owns all these mappings: if the driver refuses to unmap them, the deferred queue tries again.
    whole = MappedBytes(addresses._node, 0, addresses.nbytes, {physical.device.location: MemAccess.READWRITE})
    addresses._node.add(whole)
    try:
        # After an error, the end of this block waits for the device: queued work may use the pages.
        with addresses:
            for place, page in enumerate(pages):
                session.call("cuMemMap", addresses.address + place * size, size, 0, page.raw, 0)
            addresses._node.grant((whole,), whole.rights)
            yield addresses.address
            with session.relaxed():
                stream.synchronize()
            addresses.unmap(after=())
    finally:
        if not whole.gone:
            # Still mapped: without one more user, the pages would be used for other contents.
            physical.add_users(pages)


def adjacent(places: Iterable[int]) -> Iterator[range]:
    """Yield the runs of adjacent numbers among ``places``, in ascending order."""
    start = stop = 0
    for place in sorted(places):
        if place != stop:
            if start != stop:
                yield range(start, stop)
            start = place
        stop = place + 1
    if start != stop:
        yield range(start, stop)
