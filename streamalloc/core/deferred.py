"""The queue of ends: releases that cannot be made at once and are attempted again later. Each driver has one queue.

Each such release is an item of the queue (:class:`Deferred`), for example a free that waits for importers or for the
end of a capture, or a pool that waits for its last free. Items are independent of each other. Virtual memory and
multicast objects, which must be released in a certain order, are one item per dropped object
(:mod:`streamalloc.vmm.ownership`).

**Why finalisers only hand in.** The garbage collector runs finalisers between any two lines of any thread, also while
that thread holds our locks or a lock of the driver. A finaliser that waited for a lock could wait for its own thread
for ever. A finaliser that waited for a stream could stop the thread that is about to queue what the stream waits for.
So a finaliser waits for nothing. Most append an item to a deque, which is one atomic step. The finaliser of a buffer
frees the memory, and that of an event or a stream ends the handle; it appends an item only if that is not possible.
Some do more:

* The finaliser of a stream queries whether the stream's work is done. If not, it records an event after that work.
* The finaliser of imported memory (:mod:`streamalloc.ipc.importer`) also wakes a thread, which attempts the items.
* A finaliser of the bridges to other libraries (:mod:`streamalloc.interop`) records an event and has a stream wait for
  that event. Code that allocates by a pool's raw handle then gets the memory after its last use.

**Why items are taken off before they are worked on.** If two threads ended one handle, the driver would crash, or the
second call would end a new handle that got the same number. So before the attempt, and under the lock, a thread moves
the item from the queue to its own entry (``_working``), and back if the release was not possible. No lock is held
during an attempt: it calls the driver, and may drop the last reference to objects whose finalisers hand in more.

**Why at named points only.** An attempt may take time. Users pay for it only in calls that wait anyway, or that need
the memory. Such a call is a point of work. Items are attempted mainly when:

* the host has synchronised with a stream or an event, or with a device (items of all drivers, also of dropped ones);
* a pool, physical memory or a range of addresses is made, or memory has run out;
* a pool is trimmed or closed, the default or current pool of a location is looked up, or statistics are read (of a
  pool, of a device's memory);
* pages of an arena are released, committed while the arena has no memory left, or made private, or their state is read
  (``parked``, ``kept``, ``shared``);
* an object is shared, opened, lent to a library or borrowed from one, or such an object is closed;
* a library that names no streams allocates or releases virtual memory, the driver refused such a free, or the bridge to
  such a library is stopped;
* the last capture has ended.

**Why never in a capture of ours, and always in the relaxed mode.** A driver call that names a captured stream becomes a
node of its graph: a free would run at each launch. So nothing is attempted while this package captures. Other code may
begin a capture on another thread at any moment. In the default capture mode, a call such as ``cuMemFree`` would
invalidate that capture. In the relaxed mode, only calls that name the captured stream invalidate it. No thread begins
to capture a stream of ours while the stream's lock is held (``ordered_after`` and ``queue_if_allowed`` of
:mod:`streamalloc.core.fence`). Work on a default stream is queued under a lock that keeps our captures from beginning
(:attr:`DeferredQueue.beginning`). During a capture of any blocking stream, the driver refuses such work and invalidates
the capture. Items make no call that waits for a whole context: they wait for the work of each known stream
(:class:`~streamalloc.core.fence.Fence`).

**Lists.** An item is in the queue (:class:`DeferredQueue` shows its tables), and perhaps also in a list of a stream,
which gives it one more occasion. If both attempt it, it ends once all the same.

=======================  ==============================  =======================================  ====================
List                     Added by                        Attempted                                Example
=======================  ==============================  =======================================  ====================
``submitted``            ``submit``                      at a point of work                       ``_FreeDropped``
``_owned``               ``end_with``, when the owner    at a point of work after the owner was   ``PoolEnd``
                         is made                         dropped, or by the owner's ``close``
``Stream._before_work``  ``queue_behind``, which also    before more work is queued on the        ``loans._End``
                         submits it                      stream
``Stream.endings``       a cache, at its first use of    by the close of a stream of ours; other  ``StreamCache``
                         the stream, which also owns it  streams submit it at their end
=======================  ==============================  =======================================  ====================

``Stream.last`` and ``event.pending_ends`` have no releases. They have the events that closed and dropped streams leave
after their work, and later work is ordered after these events.

**Explicit ends and commits.** A call such as ``close`` waits for the streams or events that the caller names. If the
caller names none, it waits for all work of the devices (:func:`~streamalloc.core.fence.await_device`), which breaks no
capture that this package can find. What then cannot be released becomes an item of this queue. The first error
propagates, with later errors attached (:func:`~streamalloc.core.errors.undoing`).
"""

from __future__ import annotations

import abc
import contextlib
import functools
import itertools
import math
import operator
import threading
import weakref
from collections import deque
from collections.abc import Callable
from itertools import compress
from typing import Any, TypeVar

from streamalloc.core.errors import CudaError, error_from, is_gone
from streamalloc.core.session import PerDriver, Session
from streamalloc.driver.internal import SETTLERS, Lock, RLock

T = TypeVar("T")

MOST_PER_SYNC = 32
"""Largest number of failed attempts at one synchronisation of the host. Programs synchronise often: without the limit,
many items that cannot end yet would make each synchronisation slow.
"""


class Deferred(abc.ABC):
    """One release that is made later, exactly once.

    To prevent a second release, an item that ends a handle clears its attribute with the handle right before the driver
    call. If the driver refuses the call, the item stores the handle again unless the handle is gone
    (:meth:`Session.release`).
    """

    __slots__ = ("_dropped_with", "_round")

    _dropped_with: weakref.ref[object]
    """Reference to the object whose end submits the item (:meth:`DeferredQueue.end_with`). Unset for other items."""
    _round: int
    """Number of the pass over the queue (:meth:`DeferredQueue.work`) in which the item was last attempted; -1 if the
    item was submitted again during that attempt.
    """

    @abc.abstractmethod
    def attempt(self) -> bool:
        """Make the release if it is possible now. Returns True if the release is done, also if an earlier attempt did
        it.

        The method must not wait for a stream.

        Raises
        ------
        CudaError
            The driver refused a call. The queue attempts the item again later, unless the error says that the handle no
            longer exists (:func:`~streamalloc.core.errors.is_gone`).
        """

    def forget(self) -> None:  # noqa: B027 (most kinds have nothing to do)
        """Clear the handle, because the object behind it no longer exists. By default nothing is done."""


_UNGUARDED = contextlib.nullcontext()


class DeferredQueue:
    """The queue of the releases of one driver, which :func:`deferred_queue` returns.

    ``guard`` returns the context manager in which items are attempted (default: one that does nothing). An item moves
    between these tables::

        end_with():  _owned -> (the owner is dropped) -> _orphaned -+
        submit():    submitted -------------------------------------+-> _new -> _working -> ended
                                                                               |     ^
                                                                               +-> _waiting
    """

    def __init__(self, guard: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext) -> None:
        self.captures: dict[object, int] = {}
        """Captures by this package, from :meth:`begin_capture` until their end. With an entry, no item is attempted.
        The value is the identifier of the capturing thread if the capture forbids unsafe calls of all threads (mode
        ``"global"``), otherwise 0.
        """
        self.beginning: RLock = RLock()
        """Lock that a thread holds while it adds to ``captures``, or makes a call that would invalidate a capture."""
        self._guard = guard
        self._lock = Lock()
        """Held to move items. Only :meth:`work` takes this lock, and not on a thread that is already in :meth:`work`.
        So a finaliser or signal handler that runs while its thread holds the lock does not wait for that thread.
        """
        self._rounds = itertools.count(1)
        self.submitted: deque[Deferred] = deque()
        """Items that were submitted and that :meth:`work` has not moved yet. An append needs no lock. ``has_work``
        refers to this deque, so it is never replaced.
        """
        self._owned: dict[weakref.ref[object], Deferred] = {}
        """Items that are submitted when their owner is dropped, by weak reference to the owner."""
        self._orphaned: deque[weakref.ref[object]] = deque()
        """Keys of ``_owned`` whose owners were dropped. The items of these keys are attempted at the next point of
        work.
        """
        self._new: dict[Deferred, None] = {}
        """Items that :meth:`work` has moved here and not yet attempted."""
        self._waiting: dict[Deferred, None] = {}
        """Items attempted without success, oldest attempt first."""
        self._working: dict[int, Deferred | None] = {}
        """Identifiers of threads that are in :meth:`work`, each with the item that the thread attempts, or None."""
        self.has_work: Callable[[], bool] = functools.partial(
            any, (self.submitted, self._orphaned, self._new, self._waiting)
        )
        """Returns whether :meth:`work` has items to attempt. The function is in C without a Python frame, for fast
        paths.
        """

    def __len__(self) -> int:
        """Number of submitted items that have not ended. Items of :meth:`end_with` count once their owners were
        dropped.
        """
        working = sum(item is not None for item in [*self._working.values()])
        return len(self.submitted) + len(self._orphaned) + len(self._new) + len(self._waiting) + working

    def begin_capture(self, capture: object, *, forbids: bool = False) -> None:
        """Add a capture to ``captures``, before it begins. Until the caller removes it, no item is attempted.
        ``forbids``: whether the capture's mode is ``"global"``, which forbids unsafe calls of all threads.
        """
        with self.beginning:
            self.captures[capture] = threading.get_ident() if forbids else 0

    @property
    def forbidding(self) -> bool:
        """Whether this package makes a capture that forbids unsafe calls of all threads (mode ``"global"``)."""
        return any(self.captures.values())

    def beside_captures(self) -> contextlib.AbstractContextManager[object]:
        """Return a context manager in which calls of this thread, such as ``cuMemFree``, invalidate no capture that
        this package makes on another thread. It does nothing if no other thread makes such a capture in the mode
        ``"global"``.

        It also does nothing on a thread that captures in this mode: the driver checks the thread's calls by the mode
        that its program chose.
        """
        forbidding = {*self.captures.values(), 0} if self.captures else ()
        others = len(forbidding) > 1 and threading.get_ident() not in forbidding
        return self._guard() if others else _UNGUARDED

    def end_with(self, owner: object, item: Deferred) -> None:
        """Have ``item`` submitted when ``owner`` is dropped, by a weak reference's callback."""
        item._dropped_with = weakref.ref(owner, self._orphaned.append)
        self._owned[item._dropped_with] = item
        _unfinished.add(self)

    def submit(self, item: Deferred) -> None:
        """Add an item. The next point of work attempts it. If the same item is submitted again, it has one entry. Never
        raises.
        """
        self.submitted.append(item)
        # Only this set may still refer to the queue. Without it, a queue could be dropped with its items, and their
        # memory would be lost.
        _unfinished.add(self)

    def end(self, item: Deferred) -> bool:
        """Attempt an item now. If its release is not possible yet, or this package captures a stream, submit the item.
        Returns whether the release is done.

        Raises
        ------
        CudaError
            The driver refused a call. The item was submitted.
        """
        ended = False
        try:
            if not self.captures:
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
        """Attempt all items, new items first, and repeat as long as some of them end. Returns the number of items that
        ended.

        Nothing is attempted while this package captures a stream, or if this thread is already in an attempt. If the
        driver refuses a call, the other items are still attempted. Any other exception, such as that of a signal
        handler, propagates, and the item stays queued.

        Parameters
        ----------
        most
            Largest number of failed attempts on items that were attempted before; None for no limit. The limit bounds
            the cost of frequent calls, such as a synchronisation. The item whose last attempt is longest ago comes
            first, so every item is attempted in the end.
        """
        me = threading.get_ident()
        if not self.has_work() or self.captures or me in self._working:
            return 0
        total, ended, left = 0, 1, math.inf if most is None else most
        try:
            self._working[me] = None
            with contextlib.suppress(CudaError), contextlib.ExitStack() as guard:
                # The guard sets the capture mode. If the driver refuses, a later point of work attempts the items; no
                # error is raised, because the caller's own call has succeeded. A lost driver has no captures.
                try:
                    guard.enter_context(self._guard())
                except CudaError as error:
                    ended = is_gone(error)
                # Repeat while items end, because another item, such as a pool's, may have waited for them.
                while ended:
                    ended, left = self._round(me, left)
                    total += ended
        finally:
            # If an item is left, an exception, such as that of a signal handler, has interrupted its attempt. The item
            # is submitted again.
            item = self._working[me]
            del self._working[me]
            if item is not None:
                self.submitted.append(item)
        self._leave_if_empty()
        return total

    def _disown(self, item: Deferred) -> None:
        """Remove the entry of an item that has ended from ``_owned``, so that the owner's end does not submit the item
        again.
        """
        reference = getattr(item, "_dropped_with", None)
        if reference is not None:
            self._owned.pop(reference, None)
            with contextlib.suppress(AttributeError):  # Another thread may have removed it first.
                del item._dropped_with

    def _leave_if_empty(self) -> None:
        """Drop the reference that keeps a queue alive (``_unfinished``) if the queue has no items. A finaliser may add
        an item meanwhile, so the queue is checked again.
        """
        if not (len(self) or self._owned):
            _unfinished.discard(self)
            if self.submitted:
                _unfinished.add(self)

    def _round(self, me: int, left: float) -> tuple[int, float]:
        """Attempt each item once, new items first. ``left`` is how many more attempts on waiting items may fail.
        Returns the number of items that ended, and the new value of ``left``. ``me`` is the identifier of this thread.
        """
        ended, now = 0, next(self._rounds)
        while (taken := self._take(me, now, left > 0)) is not None:
            item, waited = taken
            try:
                done = item.attempt()
            except CudaError as error:
                done = is_gone(error)  # The caller's own call has succeeded, so nothing is raised.
                if done:
                    item.forget()
            if done and self._let_go(me, now):
                ended += 1
                self._disown(item)
            elif waited:
                left -= 1
        return ended, left

    def _take(self, me: int, now: int, also_waiting: bool) -> tuple[Deferred, bool] | None:
        """Take the next item off the queue, and put back the last item of this thread if it has not ended. The next
        item is a new one; without new items, and with ``also_waiting``, it is the item whose last attempt is longest
        ago. Returns the item, and whether it was attempted before; None if no item is left for the pass with number
        ``now``.
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
        the old table, so that an exception of a signal handler in between loses no item. An item that is added twice
        has one entry.
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
            item._round = -1  # The running attempt may be too early for the new reason: repeat it.
        elif item not in self._waiting:
            self._new[item] = None

    def _put_back(self, me: int) -> None:
        """Put the item of this thread back into a table, because its attempt has not ended it."""
        item = self._working.get(me)
        if item is not None:
            (self._new if item._round < 0 else self._waiting)[item] = None
            self._working[me] = None

    def _let_go(self, me: int, now: int) -> bool:
        """Remove the item of this thread from ``_working``, because it has ended. Returns False if another thread
        submitted the item again during the attempt: the attempt is then repeated, because it may have been too early.
        """
        with self._lock:
            item = self._working[me]
            if item is None or item._round != now:
                return False
            self._working[me] = None
            return True


_acquire_now, _release = operator.methodcaller("acquire", False), operator.methodcaller("release")


def unless_busy(act: Callable[[], T], otherwise: T, *locks: Lock | RLock) -> T:
    """Call ``act`` while this thread holds ``locks``, and return the result of ``act``. If another thread holds one of
    these locks, return ``otherwise`` at once. For finalisers, which must not wait for a lock.
    """
    free: list[bool] = []
    try:
        # One bytecode instruction acquires all locks and stores the results, and one call releases them: a signal
        # handler cannot raise in between and leave a lock held.
        free += map(_acquire_now, locks)
        return act() if all(free) else otherwise
    finally:
        any(map(_release, compress(locks, free)))


# Queues with items. Perhaps nothing else refers to such a queue. If the queue were dropped, the releases that wait in
# it would be lost.
_unfinished: set[DeferredQueue] = set()


def _make(session: Session) -> DeferredQueue:
    queue = DeferredQueue(session.relaxed)
    session.beside_captures = queue.beside_captures
    return queue


deferred_queue: PerDriver[DeferredQueue] = PerDriver(_make)
"""``deferred_queue(session)`` returns the queue of ends of the session's driver."""


class HandleEnd(Deferred):
    """Queue item that ends the handle ``raw`` by one driver function with the name ``call``, such as
    ``cuStreamDestroy``.
    """

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
    """End the handle ``raw`` by driver function ``call``. If the driver refuses, and the handle still exists, an item
    of the queue tries again later. Returns the ``CUresult``. Finalisers call this function too, because it waits for
    nothing.
    """
    result = getattr(session.driver, call)(raw)[0]
    if result and not is_gone(error_from(result, call)):
        deferred_queue(session).submit(HandleEnd(session, call, raw))
    return result


def work(session: Session, most: int | None = None) -> int:
    """Attempt the items of a driver's queue (:meth:`DeferredQueue.work`). Returns the number of items that ended; 0 in
    a forked child. ``most`` limits the number of failed attempts.
    """
    queue = deferred_queue(session)
    # In this order, because `has_work` is cheaper than `usable`, and most calls find no work.
    if not queue.has_work() or not session.usable:
        return 0
    return queue.work(most)


def work_all(most: int | None = None, hidden: type[Exception] = CudaError) -> int:
    """Attempt the items of all drivers' queues, also of drivers that nobody uses any more. ``most`` limits the number
    of failed attempts in each queue. Returns the number of items that are left. Errors of the class ``hidden`` are not
    raised.
    """
    for queue in list(_unfinished):
        with contextlib.suppress(hidden):
            queue.work(most)
    return sum(map(len, list(_unfinished)))


# Errors are hidden, so that one item does not stop the report of leaks, which lists items that fail.
SETTLERS.append(functools.partial(work_all, hidden=Exception))
