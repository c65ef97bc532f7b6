"""The places of one space: what is mapped where, changes of it that are made whole or not at all, and parked pages.

A place holds a page from its commit until the page is unmapped: after a release it is *parked* until the work that uses
it has completed. A place that holds none has the arena's page of zeros, which devices may only read.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from streamalloc.core.errors import LOST, ClosedError, InUseError, attach, error_from
from streamalloc.core.internal import Deferred, Device, Event, as_stream, context_event
from streamalloc.core.properties import MemAccess
from streamalloc.core.session import session_of
from streamalloc.vmm.access import After, each_of
from streamalloc.vmm.pages.physical import Page, PhysicalPages
from streamalloc.vmm.reservation import MappedBytes, Reservation

if TYPE_CHECKING:
    from streamalloc.vmm.pages.tiers import Stored


class Places(MappedBytes):
    """The places of a space. As a node, all mappings in them: one ``cuMemUnmap`` ends them."""

    __slots__ = (
        "_broken",
        "_lock",
        "_working",
        "backing",
        "failed",
        "mapped",
        "numbers",
        "parked",
        "physical",
        "stored",
    )

    def __init__(self, reservation: Reservation, physical: PhysicalPages) -> None:
        super().__init__(reservation, 0, reservation.nbytes, {physical.device.location: MemAccess.READWRITE})
        count = reservation.nbytes // physical.size
        self.physical: PhysicalPages = physical
        self.mapped: list[Page | None] = [None] * count
        """Page that the driver has at each place; None for a hole, which only a failed call leaves."""
        self.backing: list[Page | None] = [None] * count
        """Page of each place that is committed or parked."""
        self.parked: dict[int, Parking] = {}
        """Places that are released and still mapped."""
        self.stored: dict[int, Stored] = {}
        """Contents of the places that are swapped out."""
        self.numbers: npt.NDArray[np.int64] = np.full(count, -1, np.int64)
        """Number of the page that is committed at each place, or -1."""
        self._broken: set[int] = set()
        """Places that may not have the page, or the permission, that they should; empty outside of :meth:`locked`."""
        self.failed: bool = False
        """True if a call and its undo have failed, and left such places."""
        self._lock = threading.RLock()
        self._working = False

    @property
    def mark(self) -> str:
        """One character for the memory in drawings of an address range."""
        return self.physical.spec.mark

    @contextlib.contextmanager
    def locked(self, *, closing: bool = False) -> Iterator[None]:
        """Block in which no other thread changes the places; it makes driver calls, and waits for no stream.

        Raises
        ------
        InUseError
            A signal handler has interrupted such a block on its own thread.
        ClosedError
            The space was closed.
        """
        with self._lock:
            if self._working:
                raise InUseError("a signal handler has interrupted a call that maps pages, on its thread")
            if not closing and (self.gone or self.given_up):
                raise ClosedError("the space was closed")
            self._working = True
            try:
                if self._broken and not closing:
                    self.put({place: self.backing[place] or self.physical.zero for place in self._broken})
                    self.failed = False
                yield
            finally:
                self._working = False

    @contextlib.contextmanager
    def unless_busy(self) -> Iterator[bool]:
        """Block for items of the deferred queue, which must not wait: whether nobody else changes the places in it."""
        free = self._lock.acquire(blocking=False)
        try:
            yield free and not self._working
        finally:
            if free:
                self._lock.release()

    def exchange(self, pages: Mapping[int, Page]) -> None:
        """Map these pages at these places, and commit the places; places that get :attr:`zero` hold no page then.

        It is made for all places, or for none. The pages have a user for each place, which is dropped after an error.
        Each run of adjacent places takes one ``cuMemUnmap``, a ``cuMemMap`` for each page and one ``cuMemSetAccess``.
        If the undo fails too, the next call tries again, and no page is lost.
        """
        zero, drop = self.physical.zero, self.physical.drop
        before = [page for page in (self.backing[place] for place in pages) if page is not None]
        done: set[int] = set()
        try:
            self.put(pages)
            with self.physical.lock:
                for place, page in pages.items():
                    self.backing[place] = None if page is zero else page
                    done.add(place)
                self._commit(pages)
        except BaseException as first:
            self._repair(pages, first)
            drop([page for place, page in pages.items() if page is not zero and place not in done])
            raise
        drop(before)

    def _repair(self, places: Iterable[int], first: BaseException) -> None:
        """Map what these places should have, after an error."""
        wanted = {place: self.backing[place] or self.physical.zero for place in {*places, *self._broken}}
        wrong = {
            place: page for place, page in wanted.items() if place in self._broken or self.mapped[place] is not page
        }
        self._broken |= set(wrong)
        self.failed = True
        try:
            self.put(wrong)
            self.failed = False
        except Exception as later:
            attach(first, later)

    def put(self, pages: Mapping[int, Page]) -> None:
        """Map pages at places, without undo."""
        for run in runs(sorted(pages), pages, self.physical.zero):
            self._put_run(run, [pages[place] for place in run])

    def _put_run(self, run: range, pages: Sequence[Page]) -> None:
        physical, mapped, session = self.physical, self.mapped, self.physical.session
        size, start = physical.size, int(self.reservation.raw) + run.start * physical.size
        nbytes = len(run) * size
        whole = set(run) - self._broken
        self._broken |= whole
        if any(mapped[run.start : run.stop]):
            result = session.cuMemUnmap(start, nbytes)[0]
            if result:
                self._broken -= whole
                raise error_from(result, "cuMemUnmap")
        mapped[run.start : run.stop] = [None] * len(run)
        at = start
        for place, page in zip(run, pages, strict=True):
            # Listed before the call: an interrupted one may have been made.
            mapped[place] = page
            result = session.cuMemMap(at, size, 0, page.raw, 0)[0]
            if result:
                mapped[place] = None
                raise error_from(result, "cuMemMap")
            at += size
        structs = physical.readable if pages[0] is physical.zero else physical.writable
        result = session.cuMemSetAccess(start, nbytes, structs, len(structs))[0]
        if result:
            raise error_from(result, "cuMemSetAccess")
        self._broken.difference_update(run)

    def park(self, places: Sequence[int], parking: Parking) -> None:
        """Release committed places as soon as the work of ``parking`` has completed."""
        with self.physical.lock:
            self.numbers[places] = -1
            self.parked.update(dict.fromkeys(places, parking))
            self.physical.parked += len(places)

    def unpark(self, places: Collection[int]) -> None:
        """Commit parked places again, with the pages that they hold."""
        with self.physical.lock:
            self._commit(places)

    def _commit(self, places: Collection[int]) -> None:
        for place in places:
            page = self.backing[place]
            self.numbers[place] = -1 if page is None else page.number
            if self.parked.pop(place, None) is not None:
                self.physical.parked -= 1

    def retire(self, places: Collection[int]) -> None:
        """Map zeros at places that hold a page, and count one user less of each page: of all, or of none."""
        self.exchange(dict.fromkeys(places, self.physical.zero))

    def parkings(self, places: Collection[int]) -> set[Parking]:
        """Return what these places are parked for."""
        with self.physical.lock:
            return {self.parked[place] for place in places if place in self.parked}

    def release(self) -> None:
        """Unmap everything, unless another thread is changing the places."""
        with self.unless_busy() as mine:
            if mine:
                if any(self.mapped):
                    super().release()
                else:
                    self.unmapped()

    def unmapped(self) -> None:
        """Return the pages to the arena; idempotent."""
        if not self.gone:
            super().unmapped()
            with self.physical.lock:
                pages = [page for page in self.backing if page is not None]
                self.backing, self.mapped = [], []
                self.physical.parked -= len(self.parked)
                self.parked.clear()
            stored, self.stored = self.stored, {}
            self.physical.drop([*pages, self.physical.zero])
            for one in stored.values():
                one.drop()


class Parking(Deferred):
    """Released places that wait for the work that uses them.

    ``after`` is recorded when it is made: an event stands for the work before it, a stream for what is queued now, and
    None for all work that the device has now.
    """

    __slots__ = ("_events", "_places")

    def __init__(self, places: Places, after: After) -> None:
        self._places = places
        self._events = _events_of(after, places.physical.device)

    def done(self) -> bool:
        """Whether the work has completed."""
        for event in self._events:
            try:
                if not event.query():
                    return False
            except ClosedError:
                # Its owner has closed the event: all work of now includes that before it.
                self._events = [context_event(self._places.physical.device)]
                return False
            except LOST:
                pass  # no work is left
        self._events = []
        return True

    def synchronize(self) -> None:
        """Block the host until the work has completed."""
        while not self.done():
            for event in self._events:
                with contextlib.suppress(ClosedError, *LOST):
                    event.synchronize()

    def attempt(self) -> bool:
        """Unmap the places if the work has completed."""
        places = self._places
        if places.gone:
            return True
        if not self.done():
            return False
        with places.unless_busy() as mine:
            if mine and not places.gone:
                places.retire([place for place, parking in places.parked.items() if parking is self])
        return mine


def _events_of(after: After, device: Device) -> list[Event]:
    session = session_of(device)
    if after is None:
        return [context_event(device)]
    events = []
    for one in each_of(after):
        if not isinstance(one, Event):
            one = as_stream(one, session).record()
        elif session_of(one) is not session:
            raise ValueError(f"after: {one!r} belongs to another driver")
        events.append(one)
    return events


def runs(places: Sequence[int], pages: Mapping[int, Page], zero: Page) -> Iterator[range]:
    """Split sorted places into runs of adjacent ones that get the same permission."""
    start = 0
    for at in range(1, len(places) + 1):
        if (
            at == len(places)
            or places[at] != places[at - 1] + 1
            or (pages[places[at]] is zero) != (pages[places[at - 1]] is zero)
        ):
            yield range(places[start], places[at - 1] + 1)
            start = at
