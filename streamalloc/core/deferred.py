"""What happens later: undos that cannot be made yet, in one queue for each driver.

A free may have to wait for importers or for the end of a capture, a pool for its last free, a ring for its consumers.
Each of these is a :class:`Deferred`. The rules:

* Everybody hands in: :meth:`DeferredQueue.submit` takes no lock and makes no driver call, so that finalisers and signal
  handlers may use it. A finaliser makes at most one driver call itself, one that waits for nothing and needs no state
  of ours: the free of a plain buffer, the end of an event or a stream. Those of the bridges also record an event and
  have a stream wait for it, so that the memory is there for who allocates by a pool's handle.
* Work is done at the points that :data:`POINTS` names, and nowhere else.
* An item is taken off, under the lock, before it is worked on: one thread at a time has it, and it is not in the queue
  meanwhile. It comes back if it has not ended.
* No lock is held while an item is worked on.
* A capture may begin on another thread at any moment. Items are worked on in the relaxed capture mode, in which calls
  break no capture of streams that they do not name. A stream of ours begins to be captured by nobody while its lock is
  held (:func:`~streamalloc.core.stream.ordered_after`, :func:`~streamalloc.core.stream.may_queue`). A call for a whole
  context is made while no capture of ours can begin (:meth:`DeferredQueue.no_capture`).

What a signal handler raises may come between any two calls, but not between two lines that call nothing. The lines that
move an item call nothing, so that it is always in one place at least.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from streamalloc.core.errors import LOST, CaptureError, CudaError, InvalidHandleError, error_from, refused
from streamalloc.core.session import PerDriver, Session
from streamalloc.driver.internal import SETTLERS

__all__ = [
    "OFTEN",
    "POINTS",
    "Deferred",
    "DeferredQueue",
    "HandleEnd",
    "deferred_queue",
    "queues",
    "refused_to_end",
    "work",
]

POINTS = (
    "the host has synchronised with a stream, an event or a device",
    "a pool, physical memory or a range of addresses is made, and memory has run out",
    "figures are read: of a pool, of a device's memory",
    "something is shared, opened, lent to a library or borrowed of one, or closed that was",
    "a library that does not name streams allocates from us, or gives virtual memory back",
    "the last capture has ended",
)
"""Where :meth:`DeferredQueue.work` is called."""

OFTEN = 32
"""How many attempts may be made in vain where the host synchronises, which programs do all the time."""


class Deferred(abc.ABC):
    """Something that ends later, exactly once.

    One thread at a time has it. It guards its undo itself: it lets go of the handle right before the driver call that
    gives it back, with no call in between, and takes it again if the driver has refused.
    """

    __slots__ = ("_owner", "_round")

    _owner: weakref.ref[object]
    """What it ends with, see :meth:`DeferredQueue.end_with`; unset for most."""
    _round: int
    gone: ClassVar[tuple[type[CudaError], ...]] = (*LOST, InvalidHandleError)
    """The errors by which a later attempt tells that nothing is left to give back: the item has ended then."""

    @abc.abstractmethod
    def attempt(self) -> bool:
        """End it if that can be done now; whether it has ended. After the end: True, and nothing is done.

        It must not wait for a stream.

        Raises
        ------
        CudaError
            The driver refused a call. The item is tried again later.
        """

    def forget(self) -> None:  # noqa: B027 (most kinds have nothing to do)
        """What it was to end is gone, see :attr:`gone`."""


class DeferredQueue:
    """The queue of one driver: :func:`deferred_queue`.

    ``guard`` makes a ``with`` block around what is worked on.
    """

    __slots__ = (
        "__weakref__",
        "_beginning",
        "_guard",
        "_lock",
        "_new",
        "_orphaned",
        "_owned",
        "_rounds",
        "_waiting",
        "_working",
        "captures",
        "has_work",
        "submitted",
    )

    def __init__(self, guard: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext) -> None:
        self.captures: dict[object, None] = {}
        """The captures of ours that are under way. Entered by :meth:`begin_capture`; who ended one takes it out."""
        self._beginning = threading.RLock()
        """Held while a capture is entered, and by :meth:`no_capture`."""
        _queues.add(self)
        self._guard = guard
        self._lock = threading.Lock()
        """Held to move items about, by nobody who calls anything else meanwhile; finalisers never take it."""
        self._rounds = 0
        self.submitted: deque[Deferred] = deque()
        """What nobody has tried to end yet; always the same object."""
        self._owned: dict[weakref.ref[object], Deferred] = {}
        """What ends when an object is dropped, by reference to the object."""
        self._orphaned: deque[weakref.ref[object]] = deque()
        """The references whose objects were dropped."""
        self._new: dict[Deferred, None] = {}
        """What was taken over and not worked on yet."""
        self._waiting: dict[Deferred, None] = {}
        """In the order in which they were worked on last."""
        self._working: dict[int, Deferred] = {}
        """What is worked on now, by thread."""
        self.has_work: Callable[[], bool] = functools.partial(
            any, (self.submitted, self._orphaned, self._new, self._waiting)
        )
        """Whether :meth:`work` has items to try; a call without a Python frame, for fast paths."""

    def __len__(self) -> int:
        """How many items have not ended."""
        submitted = len(self.submitted) + len(self._orphaned) + len(self._new)
        return submitted + len(self._waiting) + len(self._working)

    @property
    def paused(self) -> bool:
        """Whether a capture of ours is under way: nothing is worked on meanwhile."""
        return bool(self.captures)

    def begin_capture(self, capture: object) -> None:
        """Enter a capture, before it begins: from then on no call is made for a whole context."""
        with self._beginning:
            self.captures[capture] = None

    @contextlib.contextmanager
    def no_capture(self, call: str) -> Iterator[None]:
        """A block in which no capture of ours begins, for one driver call that would break it and waits for nothing.

        Raises
        ------
        CaptureError
            One is under way.
        """
        with self._beginning:
            if self.captures:
                raise refused(CaptureError, call, "a stream is being captured, and the call concerns all streams")
            yield

    @contextlib.contextmanager
    def unless_busy(self) -> Iterator[bool]:
        """A block for finalisers: whether :meth:`no_capture` will not wait for another thread in it."""
        free = self._beginning.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self._beginning.release()

    def end_with(self, owner: object, item: Deferred) -> None:
        """Take over an item when ``owner`` is dropped.

        No Python function runs then that a signal handler could interrupt, as one could ``__del__``.
        """
        item._owner = weakref.ref(owner, self._orphaned.append)
        self._owned[item._owner] = item
        _unfinished.add(self)

    def submit(self, item: Deferred) -> None:
        """Take over an item, which ends at one of the next points of work. Never raises."""
        self.submitted.append(item)
        # Whoever has items left has to stay, also where all other objects of the driver have gone.
        _unfinished.add(self)

    def end(self, item: Deferred) -> bool:
        """End an item now if possible, else take it over; whether it has ended.

        Raises
        ------
        CudaError
            The driver refused a call. The item was taken over all the same.
        """
        ended = False
        try:
            if not self.paused:
                with self._guard():
                    ended = item.attempt()
        finally:
            if not ended:
                self.submit(item)
        if ended:
            self._disown(item)
            self._leave_if_empty()
        return ended

    def work(self, most: int | None = None) -> int:
        """Try to end each item, until none can be ended; how many have ended.

        ``most``: no more attempts than that are made in vain on items that were tried before, those first that were
        tried longest ago. So points that come often cost the same however much waits, and each item gets its turn.

        Where the driver refuses an item, the others get their turn. Anything else that comes out of one, such as what
        a signal handler raises, goes on to the caller, and the item stays. Nothing is done while a capture is under
        way, and where this thread is at work already.
        """
        # Mostly there is nothing, at points that come often.
        if not self.has_work() or self.paused:
            return 0
        me = threading.get_ident()
        if me in self._working:
            return 0
        with self._guard():
            total = self._work_until_none_ends(me, [math.inf if most is None else most])
        self._leave_if_empty()
        return total

    def _work_until_none_ends(self, me: int, left: list[float]) -> int:
        """Go through all items again as long as some end: another, such as a pool, may have waited for them.

        ``left``: how many attempts may still be made in vain.
        """
        total = 0
        while ended := self._work(me, left):
            total += ended
        return total

    def _disown(self, item: Deferred) -> None:
        reference = getattr(item, "_owner", None)
        if reference is not None:
            self._owned.pop(reference, None)
            del item._owner

    def _leave_if_empty(self) -> None:
        if not (len(self) or self._owned):
            _unfinished.discard(self)
            if self.submitted:
                _unfinished.add(self)

    def _work(self, me: int, left: list[float]) -> int:
        ended = 0
        with self._lock:
            self._rounds += 1
            now = self._rounds
        while True:
            try:
                if not self._take_off(me, now, left):
                    return ended
                item = self._working[me]
                try:
                    done = item.attempt()
                except item.gone:
                    item.forget()
                    done = True
                if done:
                    del self._working[me]
                    ended += 1
                    left[0] += 1
                    self._disown(item)
            except CudaError:
                pass  # Tried again the next time: the caller of this has nothing to do with it.
            finally:
                # No call from here on: see the module's description.
                if me in self._working:
                    self._waiting[self._working[me]] = None
                    del self._working[me]

    def _take_over(self) -> None:
        """Put an item that was handed in with those that wait."""
        # No loop in here: Python 3.12 and 3.13 do not leave the block where a signal comes at its jump back.
        with self._lock:
            if self._orphaned:
                if self._orphaned[0] in self._owned:
                    self.submitted += (self._owned[self._orphaned[0]],)
                    del self._owned[self._orphaned[0]]
                del self._orphaned[0]
            elif self.submitted:
                if self.submitted[0] not in self._working.values() and self.submitted[0] not in self._waiting:
                    self.submitted[0]._round = -1
                    self._new[self.submitted[0]] = None
                del self.submitted[0]

    def _take_off(self, me: int, now: int, left: list[float]) -> bool:
        """Take a new item, or that which was worked on longest ago; False where all have had their turn."""
        while self._orphaned or self.submitted:
            self._take_over()
        with self._lock:
            items = self._new or self._waiting
            for item in items:
                if items is self._waiting:
                    if item._round >= now or left[0] <= 0:
                        return False
                    left[0] -= 1
                item._round = now
                self._working[me] = item
                del items[item]
                return True
            return False


# Queues with items in them, which have to stay.
_unfinished: set[DeferredQueue] = set()
_queues: weakref.WeakSet[DeferredQueue] = weakref.WeakSet()


def _make(session: Session) -> DeferredQueue:
    return DeferredQueue(session.relaxed)


deferred_queue: PerDriver[DeferredQueue] = PerDriver(_make)
"""The queue of a driver: ``deferred_queue(session)``."""


class HandleEnd(Deferred):
    """The end of a handle that one call of the driver gives back, such as ``cuStreamDestroy``."""

    __slots__ = ("_call", "_raw", "_session")

    def __init__(self, session: Session, call: str, raw: Any) -> None:
        self._session = session
        self._call = call
        self._raw = raw

    @property
    def raw(self) -> Any:
        """The handle; None once it was given back."""
        return self._raw

    def attempt(self) -> bool:
        self._session.give_back(self, self._call)
        return True


def refused_to_end(session: Session, call: str, raw: Any, result: Any) -> None:
    """Hand in a handle whose end the driver has refused with ``result``, unless it is lost."""
    if not isinstance(error_from(result, call), LOST):
        deferred_queue(session).submit(HandleEnd(session, call, raw))


def queues() -> tuple[DeferredQueue, ...]:
    """The queues of all drivers."""
    return tuple(_queues)


def work(session: Session, most: int | None = None) -> int:
    """Attempt the items of a driver's queue, see :meth:`DeferredQueue.work`; the number that ended."""
    later = deferred_queue(session)
    # Before it is asked whether the driver can be used.
    if not (later.submitted or later._orphaned or later._new or later._waiting) or not session.usable:
        return 0
    return later.work(most)


def _work_everywhere() -> None:
    for later in queues():
        # What fails stays, and is reported as left.
        with contextlib.suppress(Exception):
            later.work()


SETTLERS.append(_work_everywhere)
