"""Fences, and calls that come after the work of streams. Code that must run after queued work chooses by what it may
do:

===============================  ===================================================================================
the code may                     it calls
===============================  ===================================================================================
ask now, and again later         :class:`Fence` ``.done()``: deferred items, which must not wait
have a stream wait               :class:`Fence` ``.precede(stream)``
wait on the host                 :class:`Fence` ``.synchronize()``; :func:`await_device` for all streams of a device;
                                 :func:`all_work` if an event of them will do
queue work after one stream      :func:`ordered_after`, even if the stream is closed, or of another thread
record an event, or do nothing   :func:`record_uncaptured`, :func:`queue_if_allowed`: beside captures by other code
===============================  ===================================================================================

None of these calls invalidates a capture, with one exception: :func:`all_work` may invalidate captures by other code,
on streams that this package does not know. :func:`queue_behind` does the opposite: it has a deferred item attempted
before a stream gets more work.

A stream may be closed, and the handle of a per-thread default stream names another stream on each thread. Then another
stream stands in. The last column names the locks of the list below.

=============================  ===========================  ==================================  ========================
it calls                       when                         the stream that stands in           takes
=============================  ===========================  ==================================  ========================
:meth:`Stream.of_this_thread`  a call of the user queues    for a per-thread stream, that of    no lock
                               work: ``as_stream``          this thread
:meth:`Stream.covering`        something is to come after   for a per-thread stream of another  no lock
                               the work:                    thread, the legacy stream
                               ``as_stream(after=True)``
:func:`ordered_after`          work on any thread, as of    for a per-thread stream, the        2, for default streams
                               items; the stream may be     legacy stream; for a closed one, a  1, while ``act`` runs
                               closed                       new stream after its work
:func:`ordered_after_end`      only :attr:`Stream.last` is  a new stream after that event;      2 of the known streams
                               left of the stream           without it, after all known         without an event; 1 if
                                                            streams                             memory is lacking
``_record_after``              a fence records an event     for the legacy stream, a new        2, for default streams
                                                            blocking one; for a per-thread      1; for the legacy stream
                                                            stream of another thread or in an   as above
                                                            item, the legacy stream
=============================  ===========================  ==================================  ========================

Three locks keep captures and closes away from such work. A thread takes them in this order:

1. :attr:`DeferredQueue.beginning`: while a thread holds it, no capture by this package begins.
2. ``Stream._in_use``, one for each stream: the stream is not closed, and no such capture of it begins
   (:func:`~streamalloc.core.stream.while_open`). Items of :func:`queue_behind` take the locks of other streams, so they
   are attempted before.
3. ``DeferredQueue._lock``: an item moves between the tables of the queue. No driver call is made.

:func:`unless_in_use`, which finalisers call, takes the first two only if they are free
(:func:`~streamalloc.core.deferred.unless_busy`). Locks of other areas that items need, such as those of leases and
imports, come between 2 and 3. Work under one of them attempts no items of its stream
(:func:`~streamalloc.core.stream.without_items`).
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from streamalloc.core.deferred import Deferred, HandleEnd, deferred_queue, unless_busy
from streamalloc.core.errors import (
    LOST,
    CaptureError,
    ClosedError,
    CudaError,
    InUseError,
    InvalidContextError,
    InvalidHandleError,
    NotReadyError,
    OutOfMemoryError,
    refused,
)
from streamalloc.core.event import Event, has_passed, pending_ends
from streamalloc.core.library_streams import LibraryStream
from streamalloc.core.resource import above
from streamalloc.core.session import Session, members
from streamalloc.core.stream import (
    DefaultStream,
    LegacyStream,
    OwnStream,
    PerThreadStream,
    Stream,
    draining,
    known_streams,
    legacy_stream,
    may_be_captured,
    per_thread_stream,
    while_open,
)

if TYPE_CHECKING:
    from streamalloc.core.device import Device

T = TypeVar("T")

_MOST_KEPT = 64
"""Largest number of fences of a :class:`KeptForWork` for which no completed ones are looked for."""
_PAUSE = 1e-4
"""Seconds between two reads of a fence's ``queueing`` while another thread still queues the fence's work."""


class Fence:
    """The work queued so far before the given events and on the given streams, or by default on all known streams.

    A fence is a tuple of *ends*: events that have not completed, and streams that have no event yet. When the fence is
    made, it records an event on each stream, unless :attr:`queueing` is set. If a stream is being captured or the
    driver refuses, a later call of a method records the event. A record during a capture would become a node of the
    graph, and say nothing about work that runs. No call names a whole context or the legacy stream during a capture,
    because such a call would invalidate the capture. A stream of ours that was closed or dropped has left an event
    after its work. A lost context has no work left.

    Several threads may use one fence. The fence has no lock: a thread that recorded streams under such a lock could
    wait for a thread that holds a stream's lock and waits for the fence's lock, for ever. So two threads may record one
    stream twice. Both resulting tuples are right, and either may stay.

    A per-thread default stream among the ends, given or known, is the stream of the thread that makes the fence. On
    another thread the handle names another stream. So on other threads, and with ``in_item``, the event is recorded
    after the per-thread streams of all threads.

    Parameters
    ----------
    session
        The session of the streams' driver.
    ends
        Events and streams; None for all known streams. Known streams are those of :meth:`Device.create_stream`, also
        closed and dropped ones; the default streams that were used, of the per-thread ones only those of the calling
        thread; and streams that objects of other libraries own (:attr:`LibraryStream.owned`).
    without
        Events and streams to leave out.
    in_item
        Whether a deferred item makes the fence. Any thread may attempt an item, so a per-thread default stream then
        stands for the per-thread streams of all threads.
    queueing
        Whether this thread still has to queue some of the work: see :attr:`queueing`.
    """

    __slots__ = ("_ends", "_given", "_thread", "began", "queueing", "session")

    def __init__(
        self,
        session: Session,
        ends: Iterable[Event | Stream] | None = None,
        *,
        without: Collection[Event | Stream | None] = (),
        in_item: bool = False,
        queueing: bool = False,
    ) -> None:
        self.session: Session = session
        self._given = ends is not None
        """Whether the caller named the ends. False: the ends are all known streams."""
        self._thread = 0 if in_item else threading.get_ident()
        """Identifier of the thread that made the fence. 0 with ``in_item``, and once a given event was closed."""
        self.queueing: int = threading.get_ident() if queueing else 0
        """Identifier of the thread that is still queueing the work, or 0. Until that thread sets 0, the fence is not
        done, and no event of a stream is kept. The thread sets 0 by an assignment, during which no signal handler can
        raise.
        """
        self.began: int = time.monotonic_ns()
        """Time at which the fence was made (``time.monotonic_ns``). The fence covers work that was queued before this
        time.
        """
        several = known_ends(session) if ends is None else dict.fromkeys(ends)
        self._ends: tuple[Event | Stream, ...] = tuple(end for end in several if end not in without)
        self.record()

    def record(self) -> None:
        """Record an event on each stream now if possible, so that the fence does not wait for the stream's later work.
        Errors of the driver are hidden: a later call of a method records again.
        """
        if not self.queueing:
            with contextlib.suppress(CudaError):
                self._recorded()

    def done(self) -> bool:
        """Return whether the work is done, without waiting. If the work is done, the host has also synchronised with
        it, so that pools can reuse the memory of the frees in it. Raises CudaError if the driver refuses a call.
        """
        if self.queueing:
            return False
        with self.session.relaxed():
            left = [*self._recorded()]
            # The loop stops at the first pending end, because a thousand items may call this method.
            while left and isinstance(left[-1], Event) and has_passed(left[-1]):
                del left[-1]
            self._ends = tuple(left)
            return not left

    def synchronize(self) -> None:
        """Block the host until the work is done, except the work of streams that are being captured or that their
        libraries have closed.

        Raises
        ------
        InUseError
            A signal handler called this on the thread that is still queueing the work.
        CudaError
            The driver refused a call.
        """
        if self.queueing == threading.get_ident():
            raise InUseError("a signal handler has interrupted a call that queues this work, on its thread")
        while self.queueing:
            time.sleep(_PAUSE)
        with self.session.relaxed():
            for end in self._recorded():
                if isinstance(end, Event):
                    with contextlib.suppress(*LOST):
                        end.synchronize()

    def precede(self, stream: Stream) -> None:
        """Order later work of ``stream`` after this fence's work (``cuStreamWaitEvent``). While :attr:`queueing` is
        set, only the work that is queued by now counts.

        Raises
        ------
        CaptureError
            One of the streams is being captured.
        NotReadyError
            One of the streams was closed by its library, and the device was not synchronised since then.
        ClosedError
            ``stream`` was closed.
        """
        for end in self._recorded():
            if not isinstance(end, Event):
                if _may_work(end):
                    raise _unknown_end(end, "cuStreamWaitEvent")
                raise refused(CaptureError, "cuStreamWaitEvent", f"{end!r} is being captured")
            stream.wait(end)

    def _recorded(self) -> tuple[Event | Stream, ...]:
        """Return the ends after each closed event, and each stream that is not being captured, was replaced by open
        events.
        """
        queueing, ends = self.queueing, self._ends
        if not all(isinstance(end, Event) and end._raw is not None for end in ends):
            with self.session.relaxed():
                ends = tuple(event for end in ends for event in self._events(end))
            if not queueing:
                self._ends = ends
        return ends

    def _events(self, end: Event | Stream) -> Iterable[Event | Stream]:
        if isinstance(end, Event):
            if end._raw is not None:
                return (end,)
            # Without given events, the closed event is that of a closed stream, and was synchronised before its close:
            # nothing is left to wait for.
            if not self._given:
                return ()
            # The caller may have closed its event before the work was done, so all known streams and the per-thread
            # streams of all threads take the event's place.
            self._thread = 0
            return (*Fence(self.session)._ends, *self._events(per_thread_stream(end.device)))
        try:
            return (_record_after(end, self._thread != threading.get_ident()) or end,)
        except CaptureError:
            return (end,)
        except (ClosedError, InvalidContextError, InvalidHandleError):
            # The stream was closed or destroyed meanwhile. If it is ours, it has left an event after its work, which
            # counts.
            return (end,) if _may_work(end) else [event for event in end.last if not event.closed]
        except LOST:
            return ()


class KeptForWork(Deferred):
    """Queue item that keeps an object until its owner was dropped and the work that uses the object is done. Without
    it, for example, the launch of a dropped graph would write to an array that Python has freed.
    """

    __slots__ = ("_fences", "_kept", "_session", "_streams")

    def __init__(self, session: Session, kept: object) -> None:
        self._session: Session = session
        self._kept: object = kept
        self._streams: dict[object, Sequence[Event | Stream]] = {}
        """Ends of work that uses the object: of a stream of ours its :attr:`Stream.last`, by a weak reference to the
        stream, because the stream must be droppable. Other streams are both key and end.
        """
        self._fences: dict[Fence, None] = {}
        """Fences for work that may not be done. Several threads change this dictionary at the same time."""

    @contextlib.contextmanager
    def queueing(self, stream: Stream) -> Iterator[None]:
        """Keep the object for the work that the ``with`` block queues on ``stream``."""
        if not isinstance(stream, LibraryStream) or stream.owned:
            # No driver call is made here: the fence of these streams is made once the owner was dropped.
            own = isinstance(stream, OwnStream)
            self._streams[weakref.ref(stream) if own else stream] = stream.last if own else (stream,)
            yield
            return
        # The library may destroy the stream before the owner is dropped, so an event is recorded at once.
        fence = Fence(self._session, [stream], queueing=True)
        self._fences[fence] = None
        try:
            yield
        finally:
            fence.queueing = 0
            fence.record()
        if len(self._fences) > _MOST_KEPT:
            with contextlib.suppress(CudaError):  # The work was queued: an error here would deny that.
                self._forget_completed()

    def attempt(self) -> bool:
        if self._streams:
            self._fences[Fence(self._session, self._ends(), in_item=True)] = None
            self._streams.clear()
        self._forget_completed()
        if self._fences:
            return False
        self._kept = None
        return True

    def _ends(self) -> Iterator[Event | Stream]:
        for key, ends in self._streams.items():
            stream = key() if isinstance(key, weakref.ref) else None
            if stream is not None:
                yield stream
            elif ends:
                yield from (end for end in ends if not (isinstance(end, Event) and end.closed))
            else:  # The stream was dropped without an event after its work.
                yield from known_ends(self._session)

    def _forget_completed(self) -> None:
        for one in list(self._fences):
            if one.done():
                self._fences.pop(one, None)


def known_ends(session: Session) -> list[Event | Stream]:
    """Return all known streams (:class:`Fence`), and the events that closed and dropped streams have left."""
    # List the streams before the events. If a stream is dropped in between, the stream is in the first list or its
    # event is in the second. In the other order, a stream could be missing from both.
    return [*_known_streams(session, closed=True), *(item.event for item in members(pending_ends(session)))]


def _known_streams(session: Session, *, closed: bool = False) -> list[Stream]:
    """Return our streams, default streams that were used, and libraries' streams. With ``closed``, also return streams
    that their libraries have closed and that may still have work.
    """

    def counts(stream: Stream) -> bool:
        if isinstance(stream, LibraryStream):
            # If the library's object only names the stream, the stream may have been destroyed. A call with the handle
            # of a destroyed stream can crash the process.
            return stream.owned and (not stream.closed or (closed and not stream.drained))
        return not isinstance(stream, PerThreadStream) or stream.thread == threading.get_ident()

    return list(filter(counts, members(known_streams(session))))


def _may_work(end: Event | Stream) -> bool:
    """Whether ``end`` is a library's stream that was closed and may still have work, because the device was not idle
    since the close.
    """
    return isinstance(end, LibraryStream) and end.closed and not end.drained


def _unknown_end(stream: Event | Stream, call: str) -> CudaError:
    """Return the error for driver function ``call`` that cannot be ordered after the work of ``stream``, because the
    library of the stream has closed it (:func:`_may_work`).
    """
    why = f"the library of {stream!r} has closed it, and its work may not be done: synchronise the device first"
    return refused(NotReadyError, call, why)


def all_work(device: Device) -> tuple[Event, ...]:
    """Return a tuple with an event after all queued work of a device's context, on streams of any library
    (``cuCtxRecordEvent``).

    The driver call invalidates every capture in the context. So while this package captures a stream, or other code
    captures a stream that this package knows, the host waits for the work instead, and the tuple is empty. If the host
    has to wait anyway, call :func:`await_device` instead: it invalidates no capture at all. Raises CudaError.
    """
    session = device._session
    queue = deferred_queue(session)
    with queue.beginning, device.current():
        streams = (one for one in _known_streams(session) if one.capturable)
        if not (queue.captures or any(map(may_be_captured, streams))):
            event = Event(device)
            session.call("cuCtxRecordEvent", session.context(device.ordinal), event._raw)
            return (event,)
    await_device(session, device.ordinal)
    return ()


def await_device(session: Session, ordinal: int) -> None:
    """Block the host until all work of a device is done, without invalidating captures of any code.

    The function allocates one byte and frees it: ``cuMemFree`` waits for the whole device and, in the relaxed mode,
    leaves captures valid. ``cuCtxSynchronize`` and ``cuCtxRecordEvent`` would invalidate captures in any mode, also on
    streams that only another library knows. While ``cuMemFree`` waits, driver 580 blocks all threads that need the
    context. So the host first waits for the known streams, which blocks no other thread.

    Raises
    ------
    CudaError
        The driver refused a call. If this was the free, an item of the deferred queue frees the byte later.
    """
    Fence(session).synchronize()  # Records again the streams whose record was refused, and then raises the error.
    with draining(session, ordinal), session.relaxed(), session.current(ordinal):
        try:
            byte = HandleEnd(session, "cuMemFree", session.call("cuMemAlloc", 1))
        except OutOfMemoryError:
            byte = HandleEnd(session, "cuMemFreeHost", session.call("cuMemHostAlloc", 1, 0))
        try:
            byte.attempt()
        except CudaError:
            deferred_queue(session).submit(byte)
            raise


def _record_after(stream: Stream, all_threads: bool = False) -> Event | None:
    """Record an event after the queued work of a stream; None while the stream is being captured.

    With ``all_threads``, a per-thread default stream stands for the per-thread streams of all threads.
    """
    if all_threads and isinstance(stream, PerThreadStream):
        # Per-thread default streams are blocking streams, so the legacy stream comes after those of all threads.
        stream = legacy_stream(stream.device)
    elif isinstance(stream, LegacyStream):
        # The event is not recorded on the legacy stream itself: later work of all blocking streams would wait for the
        # record. A new blocking stream also comes after all queued work of the legacy stream.
        return _on_new_stream(stream.device, lambda behind: behind.record(timing=True), blocking=True)
    return record_uncaptured(stream)


def queue_behind(stream: Stream, item: Deferred) -> None:
    """Submit ``item`` to the deferred queue, and have it attempted before more work is queued on ``stream``. For
    finalisers.

    Two threads may attempt the item at once, so its ``attempt`` must be safe for that.
    """
    deferred_queue(stream._session).submit(item)
    stream._before_work.append(item)
    stream._forbid_direct()


def settle(stream: Stream, item: Deferred, other: Stream | None = None) -> None:
    """Attempt ``item``, which :func:`queue_behind` submitted, now rather than before the next work of ``stream``. For
    finalisers: the function does nothing if a stream is in use (:func:`unless_in_use`).

    ``other``: the other stream that the item uses; None: it uses all known streams.
    """

    def attempt() -> None:
        if not stream._closed:
            stream._attempt_before_work(item)

    others = _known_streams(stream._session, closed=True) if other is None else [other]
    unless_in_use(attempt, None, stream._session, (stream, *others))


def unless_in_use(act: Callable[[], T], otherwise: T, session: Session, streams: Iterable[Stream] | None = None) -> T:
    """Call ``act`` and return its result. If another thread is closing one of ``streams``, beginning a capture, or
    attempting an item on them, return ``otherwise`` at once. For finalisers, which must not wait for a lock.

    ``streams``: the streams that ``act`` uses; None: all known streams.
    """
    used = [one._in_use for one in (_known_streams(session, closed=True) if streams is None else streams)]
    return unless_busy(act, otherwise, deferred_queue(session).beginning, *used)


def ordered_after(stream: Stream, act: Callable[[Stream], T]) -> T:
    """Call ``act`` with ``stream`` and return the result of ``act``. If the stream was closed, ``act`` gets a new
    stream that is ordered after the work of the closed one.

    In place of a per-thread default stream, ``act`` gets the legacy stream, which is ordered after the per-thread
    streams of all threads. Deferred items call this function on any thread, and there the per-thread handle names
    another stream.

    While ``act`` runs, no other thread closes the stream or begins to capture it through this package. Work on a
    default stream would invalidate captures of other streams, so while ``act`` has a default stream, this package
    begins no capture at all.

    The work of a stream that its library has closed counts as done only once the device was idle. Only
    :func:`await_closed` waits for that. This function does not wait, because deferred items call it, and the device may
    be waiting for the thread that attempts the items.

    Raises
    ------
    CaptureError
        The stream is being captured.
    NotReadyError
        The stream's library has closed it, and the device was not synchronised since then.
    """
    if isinstance(stream, DefaultStream):
        stream = legacy_stream(stream.device)
    if not stream.closed:
        # This attempts items of `queue_behind`, which may take the locks of other streams. If these items were
        # attempted below, under this stream's lock, two threads could wait for each other.
        stream.checked_raw()

    def use() -> tuple[T] | None:
        if stream.closed:
            return None
        stream.refuse_capture("cuMemFreeAsync", "try again once that has ended")
        return (act(stream),)

    used = while_open(stream, use)
    if used is not None:
        return used[0]
    if isinstance(stream, LibraryStream):
        if not stream.drained:
            raise _unknown_end(stream, "cuMemFreeAsync")
        with stream.device.create_stream() as substitute:
            result = act(substitute)
            # Only after the host has synchronised does the pool give memory that `act` has freed to any stream.
            substitute.call("cuStreamSynchronize")
            return result
    return ordered_after_end(stream.device, stream.last, act)


def _on_new_stream(device: Device, act: Callable[[Stream], T], *, blocking: bool = False) -> T:
    """Call ``act`` with a new stream, and close the stream. Returns the result of ``act``.

    The stream is non-blocking by default: if a blocking stream waited for work, the legacy stream and, through it, all
    other blocking streams would wait, too.

    A stream needs memory of the device. If the device has none left, ``act`` gets the legacy stream in spite of these
    waits: without it, no dropped object would release its memory. CaptureError is then raised as by
    :func:`ordered_after`.
    """
    try:
        substitute = device.create_stream(blocking=blocking)
    except OutOfMemoryError:
        return ordered_after(legacy_stream(device), act)
    with substitute:
        return act(substitute)


def await_closed(stream: Stream) -> None:
    """If the library of ``stream`` has closed the stream, block the host until the stream's work is done
    (:func:`await_device`). For other streams, return at once. Raises CudaError.
    """
    if _may_work(stream):
        await_device(stream._session, stream.device.ordinal)


def ordered_after_end(device: Device, last: Sequence[Event], act: Callable[[Stream], T]) -> T:
    """Call ``act`` with a new stream of ``device`` that is ordered after ``last``, the list of an ended stream
    (:attr:`Stream.last`), and return the result of ``act``. If the list is empty, the new stream is ordered after all
    known streams. Raises the errors of :meth:`Fence.precede`.
    """

    def after_its_work(substitute: Stream) -> T:
        if last:
            with contextlib.suppress(ClosedError):  # A closed event had completed.
                substitute.wait(last[0])
        else:
            known = known_ends(device._session)
            Fence(device._session, without=[end for end in known if _may_work(end)]).precede(substitute)
        return act(substitute)

    return _on_new_stream(device, after_its_work)


def queue_if_allowed(stream: Stream, act: Callable[[], object], *, mine: bool = False) -> bool:
    """Call ``act``, which queues a record or a wait for a deferred item, unless the stream is captured or closed.
    Returns whether ``act`` was called.

    While ``act`` runs, no other thread closes the stream or begins to capture it through this package. Other code may
    begin to capture a stream that this package did not make, at any time. So ``act`` uses such a stream only on a
    thread that works with the stream: a caller with ``mine``, or a thread that is about to queue work on the stream and
    first attempts the items of :func:`queue_behind`.
    """
    if not (mine or isinstance(stream, OwnStream) or threading.get_ident() in stream._attempting):
        return False  # Without the lock: the caller may hold another one.

    def use() -> bool:
        if stream.closed or stream._capture or stream.capturing:
            return False
        act()
        return True

    return while_open(stream, use)


def record_uncaptured(stream: Stream) -> Event | None:
    """Record an event after the queued work of a stream, and return the event; None while the stream is being captured.
    Raises ClosedError, CudaError.
    """

    def record() -> Event | None:
        if stream.capturing:
            return None
        event = stream.record()
        # If other code began a capture meanwhile, the record became a node of its graph.
        return None if stream.capturing else event

    return while_open(stream, record)


# The module of graphs, which this module builds on, makes items of this class.
above.kept_for_work = KeptForWork
