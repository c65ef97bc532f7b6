"""The queue of ends: releases that are made later. Each driver has one queue; items are attempted at points of work.

A release that cannot be made yet is an item (:class:`Deferred`), such as a free that waits for importers or for the end
of a capture, or a pool that waits for its last free. An item is independent of the others. Virtual memory and multicast
objects must be released in an order, see :mod:`streamalloc.vmm.ownership`; each dropped one of those is also one item.

**Why finalisers only hand in.** The garbage collector runs them between any two lines of any thread, also while that
thread holds our locks or a lock of the driver. A finaliser that took a lock would wait for its own thread for ever, and
one that waited for a stream would stop a thread that is about to queue what the stream waits for. So it appends its
item to a deque, which is one atomic step, and returns. It makes at most one driver call itself, one that waits for
nothing and needs no state of ours: the free of a buffer, the end of an event or a stream. Some make further such calls:

* The finaliser of a stream asks whether its work is done. If not, it records an event after that work. That of a thread
  does the same for the thread's default stream.
* A finaliser of the bridges records an event and has a stream wait for it, so that the memory is ordered for code that
  allocates by a pool's handle.

**Why items are taken off before they are worked on.** Two threads that end one handle crash the driver, or end a new
handle that got the same number. So a thread moves an item, under the lock, from the queue to its own place before the
attempt, and back if the item has not ended. No lock is held during an attempt: it calls the driver, and may drop the
last reference to objects whose finalisers hand in more.

**Why at named points only.** An attempt may take time and sees what other threads do. Users pay for it only where they
wait anyway, or need the memory:

* the host has synchronised with a stream, an event or a device;
* a pool, physical memory or a range of addresses is made, and memory has run out;
* statistics are read: of a pool, of a device's memory;
* pages of an arena are released, or committed where it has no memory;
* an object is shared, opened, lent to a library or borrowed from one, or such an object is closed;
* a library that names no streams allocates or releases virtual memory, or a free of it was refused;
* a bridge of such a library is stopped;
* the last capture has ended.

**Why never in a capture of ours, and always in the relaxed mode.** A driver call that names a captured stream becomes a
node of its graph: a free would run at each launch. So nothing is attempted while this package captures. Other code may
begin a capture on another thread at any moment. In the mode that threads have by default, a call such as ``cuMemFree``
would invalidate it; in the relaxed mode only calls that name the captured stream do. No thread begins to capture a
stream of ours while the stream's lock is held (``ordered_after`` and ``queue_if_allowed`` of
:mod:`streamalloc.core.fence`). Work on a default stream is queued while no capture of ours can begin
(:attr:`DeferredQueue.beginning`): the driver refuses it during a capture of any blocking stream, and invalidates that
capture. No call is made for a whole context: items wait for the work of each stream that is known
(:class:`~streamalloc.core.fence.Fence`).

An explicit end or commit keeps to one rule beside captures. It waits for the streams or events that it names. If it
names none, it waits for all work of the devices (:func:`~streamalloc.core.fence.all_work`), which breaks no capture
either. What then cannot be released is an item of this queue. The first error propagates, with later ones attached
(:func:`~streamalloc.core.errors.undoing`).
"""

from __future__ import annotations

import abc
import contextlib
import functools
import itertools
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from streamalloc.core.errors import CaptureError, CudaError, error_from, is_gone, refused
from streamalloc.core.session import PerDriver, Session, sessions
from streamalloc.driver.internal import SETTLERS, Lock, RLock

T = TypeVar("T")

MOST_PER_SYNC = 32
"""Largest number of failed attempts at one synchronisation of the host. Programs synchronise often, and without the
limit many items that cannot end yet would make each synchronisation slow.
"""


class Deferred(abc.ABC):
    """One release that is made later, exactly once.

    To prevent a second release, the item clears its handle right before the driver call that ends the handle. If the
    driver refuses, the item has the handle again (:meth:`Session.release`).
    """

    __slots__ = ("_dropped_with", "_round")

    _dropped_with: weakref.ref[object]
    """The object with whose end the item is submitted (:meth:`DeferredQueue.end_with`); often unset."""
    _round: int
    """Number of the round (:meth:`DeferredQueue.work`) of the last attempt; -1 if the item was submitted again during
    that attempt.
    """

    @abc.abstractmethod
    def attempt(self) -> bool:
        """Make the release if possible now; returns whether the item has ended. After the end it returns True and does
        nothing.

        An attempt must not wait for a stream.

        Raises
        ------
        CudaError
            The driver refused a call. The item is attempted again later, unless its handle is gone
            (:func:`~streamalloc.core.errors.is_gone`).
        """

    def forget(self) -> None:  # noqa: B027 (most kinds have nothing to do)
        """Clear the handle, because the object behind it no longer exists."""


_UNGUARDED = contextlib.nullcontext()


class DeferredQueue:
    """The queue of one driver: :func:`deferred_queue`.

    ``guard`` makes the context manager in which items are attempted. An item moves between these tables::

        end_with():  _owned -> (the owner is dropped) -> _orphaned -+
        submit():    submitted -------------------------------------+-> _new -> _working -> ended
                                                                               |     ^
                                                                               +-> _waiting
    """

    def __init__(self, guard: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext) -> None:
        self.captures: dict[object, int] = {}
        """Captures by this package, from :meth:`begin_capture` until their end. The value is the capturing thread if
        the capture forbids unsafe calls of all threads, otherwise 0.
        """
        self.beginning: RLock = RLock()
        """Lock of a thread that enters a capture in this table, or makes a call that would invalidate a capture."""
        self._guard = guard
        self._lock = Lock()
        """Held to move items. Only :meth:`work` takes it, and not on a thread that is already in :meth:`work`. So a
        finaliser or signal handler that comes while the lock is held does not wait for its own thread.
        """
        self._rounds = itertools.count(1)
        self.submitted: deque[Deferred] = deque()
        """Items that :meth:`work` has not taken over. An append needs no lock. The object stays the same for the
        queue's whole life.
        """
        self._owned: dict[weakref.ref[object], Deferred] = {}
        """Items that end with their owner, by weak reference to it."""
        self._orphaned: deque[weakref.ref[object]] = deque()
        """References whose owners were dropped. Their items are due."""
        self._new: dict[Deferred, None] = {}
        """Items taken over and not yet attempted."""
        self._waiting: dict[Deferred, None] = {}
        """Items attempted without success, oldest attempt first."""
        self._working: dict[int, Deferred | None] = {}
        """Threads that are in :meth:`work`, each with the item that it attempts."""
        self.has_work: Callable[[], bool] = functools.partial(
            any, (self.submitted, self._orphaned, self._new, self._waiting)
        )
        """Whether :meth:`work` has items to attempt. A C function without a Python frame, for fast paths."""

    def __len__(self) -> int:
        """Number of items that have not ended."""
        working = sum(item is not None for item in [*self._working.values()])
        return len(self.submitted) + len(self._orphaned) + len(self._new) + len(self._waiting) + working

    @property
    def paused(self) -> bool:
        """Whether this package is capturing a stream; then no item is attempted."""
        return bool(self.captures)

    def begin_capture(self, capture: object, *, forbids: bool = False) -> None:
        """Record a capture before it begins. From now on no item is attempted. ``forbids``: see :attr:`captures`."""
        with self.beginning:
            self.captures[capture] = threading.get_ident() if forbids else 0

    @property
    def forbidding(self) -> bool:
        """Whether a capture forbids unsafe calls of all threads."""
        return any(self.captures.values())

    def beside_captures(self) -> contextlib.AbstractContextManager[object]:
        """A ``with`` block whose unsafe calls break no capture of another thread.

        The thread that captures gets no guard: the driver checks its calls by the mode that its program chose.
        """
        forbidding = {*self.captures.values(), 0} if self.captures else ()
        others = len(forbidding) > 1 and threading.get_ident() not in forbidding
        return self._guard() if others else _UNGUARDED

    def refuse_captures(self, call: str) -> None:
        """Raise if a capture is under way, before a call that would invalidate it. Call this under the lock
        :attr:`beginning`.

        Raises
        ------
        CaptureError
            A capture is under way.
        """
        if self.captures:
            raise refused(CaptureError, call, "a stream is being captured, and the call concerns all streams")

    def end_with(self, owner: object, item: Deferred) -> None:
        """Submit an item when ``owner`` is dropped, by a weak reference's callback."""
        item._dropped_with = weakref.ref(owner, self._orphaned.append)
        self._owned[item._dropped_with] = item
        _unfinished.add(self)

    def submit(self, item: Deferred) -> None:
        """Add an item. The next point of work attempts it. Never raises."""
        self.submitted.append(item)
        # Only this set may still refer to the queue. Without it, a queue could be dropped with its items, and their
        # memory would be lost.
        _unfinished.add(self)

    def end(self, item: Deferred) -> bool:
        """Attempt an item now, and submit it if it has not ended; returns whether it has ended.

        Raises
        ------
        CudaError
            The driver refused a call. The item was submitted.
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
        """Attempt the items, new ones first, and again while some end. Returns the number of items that have ended.

        Nothing is attempted while this package captures a stream, or if this thread is already in an attempt. If the
        driver refuses a call, the other items are still attempted. Any other exception, such as that of a signal
        handler, propagates, and the item stays queued.

        Parameters
        ----------
        most
            Largest number of failed attempts on items that were attempted before. Items that wait longest come first.
            The limit bounds the cost of a frequent point of work, and every item has its turn in the end.
        """
        me = threading.get_ident()
        if not self.has_work() or self.paused or me in self._working:
            return 0
        total, ended, left = 0, 1, math.inf if most is None else most
        try:
            self._working[me] = None
            # An error of the guard, which sets the capture mode, is not raised: the caller's own call has succeeded. A
            # later point of work attempts the items.
            with contextlib.suppress(CudaError), self._guard():
                # Repeat while items end, because another item, such as a pool's, may have waited for them.
                while ended:
                    ended, left = self._round(me, left)
                    total += ended
        finally:
            # If an item is left, an exception such as that of a signal handler has ended its attempt: it is submitted
            # again.
            item = self._working[me]
            del self._working[me]
            if item is not None:
                self.submitted.append(item)
        self._leave_if_empty()
        return total

    def _disown(self, item: Deferred) -> None:
        """Forget the owner of an item that has ended, so that the owner's end does not submit it again."""
        reference = getattr(item, "_dropped_with", None)
        if reference is not None:
            self._owned.pop(reference, None)
            with contextlib.suppress(AttributeError):  # Another thread has ended the item, too.
                del item._dropped_with

    def _leave_if_empty(self) -> None:
        """Let the collector have a queue without items. A finaliser may add an item meanwhile, so the queue is checked
        again.
        """
        if not (len(self) or self._owned):
            _unfinished.discard(self)
            if self.submitted:
                _unfinished.add(self)

    def _round(self, me: int, left: float) -> tuple[int, float]:
        """Attempt each item once, new items first. ``left`` is the number of waiting items whose attempt may still
        fail. Returns how many items ended, and the new ``left``.
        """
        ended, now = 0, next(self._rounds)
        while (taken := self._take(me, now, left > 0)) is not None:
            item, waited = taken
            try:
                done = item.attempt()
            except CudaError as error:
                done = is_gone(error)  # The item is attempted again later. The caller is not concerned.
                if done:
                    item.forget()
            if done and self._let_go(me, now):
                ended += 1
                self._disown(item)
            elif waited:
                left -= 1
        return ended, left

    def _take(self, me: int, now: int, also_waiting: bool) -> tuple[Deferred, bool] | None:
        """Take a new item off the queue; without new items, and with ``also_waiting``, the item whose last attempt is
        longest ago. Returns the item, and whether it was waiting; None if each had its attempt in this round. Before
        that, the last item of this thread goes back if it has not ended.
        """
        with self._lock:
            self._put_back(me)
            self._take_over()
            items = self._new or self._waiting
            item, waited = next(iter(items), None), items is self._waiting
            if item is None or (waited and (item._round >= now or not also_waiting)):
                return None
            item._round = now
            self._working[me] = item
            del items[item]
            return item, waited

    def _take_over(self) -> None:
        """Move submitted items to the table of new items. An item is added to its new table before it is removed from
        the old one, so that an exception of a signal handler in between loses none. An item that is added twice has one
        entry.
        """
        while self._orphaned:
            if self._orphaned[0] in self._owned:
                self._add(self._owned[self._orphaned[0]])
                del self._owned[self._orphaned[0]]
            self._orphaned.popleft()
        while self.submitted:
            self._add(self.submitted[0])
            self.submitted.popleft()

    def _add(self, item: Deferred) -> None:
        if item in self._working.values():
            item._round = -1  # The current attempt may not see why the item was submitted again: repeat it.
        elif item not in self._waiting:
            self._new[item] = None

    def _put_back(self, me: int) -> None:
        """Put the item of this thread back, because its attempt was in vain."""
        item = self._working.get(me)
        if item is not None:
            (self._new if item._round < 0 else self._waiting)[item] = None
            self._working[me] = None

    def _let_go(self, me: int, now: int) -> bool:
        """Forget the item of this thread, because it has ended. Returns False if another thread submitted the item
        again during the attempt: the attempt may not have seen the reason, so it is repeated.
        """
        with self._lock:
            item = self._working[me]
            if item is None or item._round != now:
                return False
            self._working[me] = None
            return True


def unless_busy(act: Callable[[], T], otherwise: T, lock: threading.RLock, *more: threading.RLock) -> T:
    """Call ``act`` under ``lock`` and ``more`` and return its result; return ``otherwise`` if another thread holds one
    of them. For finalisers, which must not wait for a lock.
    """
    free: list[bool] = []
    try:
        # ``+=`` stores the result without a point at which a signal handler can raise in between.
        free += map(lock.acquire, (False,))
        if free == [False]:
            return otherwise
        return unless_busy(act, otherwise, *more) if more else act()
    finally:
        if free == [True]:
            lock.release()


# Queues with items. Nothing else may refer to such a queue, and if it were dropped, the releases that wait in it would
# be lost.
_unfinished: set[DeferredQueue] = set()


def _make(session: Session) -> DeferredQueue:
    queue = DeferredQueue(session.relaxed)
    session.beside_captures = queue.beside_captures
    return queue


deferred_queue: PerDriver[DeferredQueue] = PerDriver(_make)
"""The queue of ends of a driver: ``deferred_queue(session)``."""


class HandleEnd(Deferred):
    """The end of a handle by one driver call, such as ``cuStreamDestroy``."""

    __slots__ = ("_call", "_raw", "_session")

    def __init__(self, session: Session, call: str, raw: Any) -> None:
        self._session = session
        self._call = call
        self._raw = raw

    @property
    def raw(self) -> Any:
        """The handle; None once it was released."""
        return self._raw

    def attempt(self) -> bool:
        self._session.release(self, self._call)
        return True


def end_handle(session: Session, call: str, raw: Any) -> Any:
    """End the handle ``raw`` by driver function ``call``, or later by an item if the driver refuses now. Returns the
    ``CUresult``. Finalisers call this too: it waits for nothing.
    """
    result = getattr(session.driver, call)(raw)[0]
    if result and not is_gone(error_from(result, call)):
        deferred_queue(session).submit(HandleEnd(session, call, raw))
    return result


def work(session: Session, most: int | None = None) -> int:
    """Attempt the items of a driver's queue: :meth:`DeferredQueue.work`. Returns the number that ended."""
    queue = deferred_queue(session)
    # In this order, because `has_work` is cheaper than `usable`, and most calls find no work.
    if not queue.has_work() or not session.usable:
        return 0
    return queue.work(most)


def work_all(hidden: type[Exception] = CudaError) -> int:
    """Attempt the items of all drivers' queues. Returns the number of items that are left. ``hidden``: class of the
    errors that are not raised.
    """
    queues = [deferred_queue(session) for session in sessions()]
    for queue in queues:
        with contextlib.suppress(hidden):
            queue.work()
    return sum(map(len, queues))


# With all errors hidden: an item that fails stays in its queue, and the report of leaks shows it.
SETTLERS.append(functools.partial(work_all, Exception))
