"""Fences, and calls that come after the work of streams. Code that has to come after work chooses by what it may do:

===============================  ===================================================================================
may                              takes
===============================  ===================================================================================
ask, and come again              :class:`Fence` ``.done()``: deferred items, which must not wait
have a stream wait               :class:`Fence` ``.precede(stream)``
wait on the host                 :class:`Fence` ``.synchronize()``; :func:`await_device` for streams that nobody
                                 knows; :func:`all_work` if an event will do
queue work after one stream      :func:`ordered_after`, even if the stream is closed, or of another thread
record an event, or nothing      :func:`record_uncaptured`, :func:`queue_if_allowed`: beside captures by other code
===============================  ===================================================================================

None of these invalidates a capture, with one exception: :func:`all_work` may invalidate captures by other code of
streams that this package does not know. :func:`queue_behind` is the opposite: an item is attempted before a stream gets
more work.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
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
from streamalloc.core.session import Session, members
from streamalloc.core.stream import (
    DefaultStream,
    LegacyStream,
    LibraryStream,
    OwnStream,
    PerThreadStream,
    Stream,
    draining,
    known_streams,
    legacy_stream,
    refuse_capture,
)

if TYPE_CHECKING:
    from streamalloc.core.device import Device

T = TypeVar("T")

_PAUSE = 1e-4
"""Seconds between two looks at a fence while another thread still queues its work."""


class Fence:
    """Work queued so far: before the given events, on the given streams, or by default on all known streams.

    A fence is a tuple of events that have not completed, and of streams that have no event yet. A stream is recorded
    when the fence is made. If it is being captured or the driver refuses, it is recorded at a later question: a record
    during a capture would become a node of the graph, and say nothing about work that runs. No call names a whole
    context or the legacy stream while somebody captures, because it would invalidate the capture. A stream of ours that
    was closed or dropped has left an event after its work. A lost context has no work left.

    Several threads may ask one fence, also by items of finalisers. It has no lock: while one thread recorded streams
    under such a lock, a thread that holds a stream's lock could wait for it, and both would wait for ever. So two
    threads may record one stream twice. Both tuples are right, and either may stay.

    A per-thread default stream among the ends is that of the thread that makes the fence. On another thread the handle
    names another stream. So there, and with ``in_item``, the record comes after the per-thread streams of all threads.

    Parameters
    ----------
    session
        The session of the streams' driver.
    ends
        Events and streams; None for all known streams. Known are the streams of :meth:`Device.create_stream`, also
        closed and dropped ones, the default streams that were used, and streams of other libraries
        while their objects live.
    without
        Streams to leave out.
    in_item
        Whether a deferred item makes the fence. Any thread may attempt an item, so none counts as the one that named
        the ends.
    queueing
        Whether this thread still has to queue some of the work: see :attr:`queueing`.
    """

    __slots__ = ("_ends", "_thread", "began", "queueing", "session")

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
        self._thread = None if ends is None else 0 if in_item else threading.get_ident()
        """The thread that named the ends; 0 for an item, which any thread may attempt; None for all known streams."""
        self.queueing: int = threading.get_ident() if queueing else 0
        """The thread that is still queueing the work, or 0. Until that thread sets 0, the fence is not done, and no
        record of a stream is kept. A signal handler cannot raise while an attribute is set, so the fence is never left
        undone.
        """
        self.began: int = time.monotonic_ns()
        """Time at which the fence was made, in nanoseconds. It covers work that was queued before."""
        several = known_ends(session) if ends is None else dict.fromkeys(ends)
        self._ends: tuple[Event | Stream, ...] = tuple(end for end in several if end not in without)
        self.record()

    def record(self) -> None:
        """Record the streams now if possible, so that the fence does not wait for their later work. Errors of the
        driver are hidden: a later question records again.
        """
        if not self.queueing:
            with contextlib.suppress(CudaError):
                self._recorded()

    def done(self) -> bool:
        """Whether the work is done, without waiting. If so, the host has also synchronised with it, so that pools reuse
        the memory of its frees.
        """
        if self.queueing:
            return False
        with self.session.relaxed():
            left = [*self._recorded()]
            # Stops at the first pending end, because a thousand items may call this.
            while left and isinstance(left[-1], Event) and has_passed(left[-1]):
                del left[-1]
            self._ends = tuple(left)
            return not left

    def synchronize(self) -> None:
        """Block the host until the work is done, except that of streams that are being captured.

        Raises
        ------
        InUseError
            A signal handler has interrupted this thread while it queued the work, and called this.
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
        """Order later work of ``stream`` after this fence's work (``cuStreamWaitEvent``), or after as much of it as is
        queued by now.

        Raises
        ------
        CaptureError
            One of the streams is being captured.
        NotReadyError
            The library of one of the streams has closed it, and the device was not synchronised since then.
        """
        for end in self._recorded():
            if not isinstance(end, Event):
                if _may_work(end):
                    raise _unknown_end(end, "cuStreamWaitEvent")
                raise refused(CaptureError, "cuStreamWaitEvent", f"{end!r} is being captured")
            stream.wait(end)

    def _recorded(self) -> tuple[Event | Stream, ...]:
        """Return the ends, with open events in place of closed ones and of streams that are not being captured."""
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
            # An event that the caller gave may have been closed by its owner before the work was done, so all known
            # streams stand for it. Without given events (`_thread` is None), the closed event is that of a closed
            # stream, whose owner has synchronised with it: nothing is left to wait for.
            return () if self._thread is None else Fence(self.session)._ends
        try:
            return (_record_after(end, self._thread not in (None, threading.get_ident())) or end,)
        except CaptureError:
            return (end,)
        except (ClosedError, InvalidContextError, InvalidHandleError):
            # The stream was closed or destroyed meanwhile. A closed stream of this package has left an event after its
            # work.
            return (end,) if _may_work(end) else end._last
        except LOST:
            return ()


def known_ends(session: Session) -> list[Event | Stream]:
    """Return all known streams, and the events that closed and dropped streams have left."""
    # List the streams before the events. A stream that is dropped in between is then in the first list, or its event is
    # in the second. In the other order it could be in neither.
    return [*_known_streams(session, closed=True), *(item.event for item in members(pending_ends(session)))]


def _known_streams(session: Session, *, closed: bool = False) -> list[Stream]:
    """Return the known streams: ours, default streams that were used, and those of libraries. ``closed``: also streams
    that their libraries have closed and that may have work.
    """

    def counts(stream: Stream) -> bool:
        if isinstance(stream, LibraryStream):
            # A stream that its library's object only names may be destroyed, and a call with its handle can crash the
            # process.
            return stream.owned and (not stream.closed or (closed and not stream.drained))
        return not isinstance(stream, PerThreadStream) or stream._ident == threading.get_ident()

    return list(filter(counts, members(known_streams(session))))


def _may_work(end: Event | Stream) -> bool:
    """Whether ``end`` is a library's stream that was closed and may still have work: the device was not idle since
    then.
    """
    return isinstance(end, LibraryStream) and end.closed and not end.drained


def _unknown_end(stream: Event | Stream, call: str) -> CudaError:
    """Return the error for driver function ``call``, which would have to come after the work of a stream that its
    library has closed (:func:`_may_work`).
    """
    why = f"the library of {stream!r} has closed it, and its work may not be done: synchronise the device first"
    return refused(NotReadyError, call, why)


def _captured_elsewhere(stream: Stream) -> bool:
    """Whether other code captures a stream (``cuStreamIsCapturing``); False if the driver refuses to say."""
    with contextlib.suppress(CudaError, ClosedError):
        return stream.capturable and stream.capturing
    return False


def all_work(device: Device) -> tuple[Event, ...]:
    """Return an event after all queued work of a device's context, on streams of any library (``cuCtxRecordEvent``).

    The driver call invalidates every capture in the context. So while this package captures a stream, or other code
    captures a stream that this package knows, the host waits for the work instead, and the tuple is empty. A caller
    that waits on the host anyway calls :func:`await_device`, which also spares captures of streams that this package
    does not know.
    """
    session = device._session
    queue = deferred_queue(session)
    with queue.beginning, device.current():
        if not (queue.captures or any(map(_captured_elsewhere, _known_streams(session)))):
            event = Event(device)
            session.call("cuCtxRecordEvent", session.context(device.ordinal), event._raw)
            return (event,)
    await_device(session, device.ordinal)
    return ()


def await_device(session: Session, ordinal: int) -> None:
    """Block the host until all work of a device is done, without invalidating captures of any code.

    The function allocates one byte and frees it: ``cuMemFree`` waits for the whole device and, in the relaxed mode,
    leaves captures valid. ``cuCtxSynchronize`` and ``cuCtxRecordEvent`` would invalidate captures in any mode, also
    that of a stream which only another library knows. While ``cuMemFree`` waits, driver 580 blocks all threads that
    need the context. So the host first waits for the known streams.

    Raises
    ------
    CudaError
        The driver refused a call. An item frees the byte later.
    """
    fence = Fence(session, queueing=True)
    # The constructor hides errors of the driver, so with ``queueing`` it records nothing. The next two lines record the
    # streams, and raise such errors.
    fence.queueing = 0
    fence.synchronize()
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

    ``all_threads``: the per-thread default stream stands for those of all threads.
    """
    if all_threads and isinstance(stream, PerThreadStream):
        # Per-thread default streams are blocking streams, so the legacy stream comes after those of all threads.
        stream = legacy_stream(stream.device)
    elif isinstance(stream, LegacyStream):
        # Not on the legacy stream itself: later work of all blocking streams would wait for the record there. A new
        # blocking stream also comes after all queued work of the legacy stream.
        return _on_new_stream(stream.device, lambda behind: behind.record(timing=True), blocking=True)
    return record_uncaptured(stream)


def queue_behind(stream: Stream, item: Deferred) -> None:
    """Submit ``item``, and attempt it before more work is queued on ``stream``. For finalisers.

    Two threads may attempt the item at once, so the item must allow that.
    """
    deferred_queue(stream._session).submit(item)
    stream._before_work.append(item)
    stream._forbid_direct()


def settle(stream: Stream, item: Deferred, *others: Stream | None) -> None:
    """Attempt ``item`` of :func:`queue_behind` now, instead of before the next work of ``stream``. For finalisers.

    ``others``: further streams that the item uses. If another thread closes one of these streams, begins a capture, or
    attempts an item on them, nothing is done: a finaliser must not wait for a lock.
    """

    def attempt() -> None:
        if not stream._closed:
            stream._attempt_before_work(item)

    used = [one._in_use for one in (stream, *others) if one is not None]
    unless_busy(attempt, None, deferred_queue(stream._session).beginning, *used)


def ordered_after(stream: Stream, act: Callable[[Stream], T]) -> T:
    """Call ``act`` with ``stream`` and return its result. If the stream was closed, ``act`` gets a new stream that is
    ordered after the work of the closed one.

    Instead of a per-thread default stream, ``act`` gets the legacy stream, which is ordered after the per-thread
    streams of all threads: deferred items end on any thread, where the handle names another stream.

    During the call no other thread closes the stream or begins to capture it. Work on a default stream would invalidate
    captures of other streams, so during a call with one this package begins no capture at all.

    A stream that its library has closed counts as done only once the device was idle. :func:`await_closed` waits for
    that. This function does not: deferred items call it, and the device may be waiting for the thread that attempts
    them.

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
        # This attempts items of queue_behind, which may take the locks of other streams. If they were attempted below,
        # under this stream's lock, two threads could wait for each other.
        stream._checked_raw()

    def use() -> tuple[T] | None:
        if stream._closed:
            return None
        refuse_capture(stream, "cuMemFreeAsync", "try again once that has ended")
        return (act(stream),)

    used = _while_open(stream, use)
    if used is not None:
        return used[0]
    if isinstance(stream, LibraryStream):
        if not stream.drained:
            raise _unknown_end(stream, "cuMemFreeAsync")

        def act_and_wait(substitute: Stream) -> T:
            result = act(substitute)
            # The pool gives memory that `act` has freed to any stream only once the host has synchronised.
            substitute._call("cuStreamSynchronize")
            return result

        return _on_new_stream(stream.device, act_and_wait)
    return ordered_after_end(stream.device, stream._last, act)


def _on_new_stream(device: Device, act: Callable[[Stream], T], *, blocking: bool = False) -> T:
    """Call ``act`` with a new stream, and close the stream. Returns the result of ``act``.

    The stream is non-blocking by default. If a blocking stream waited for work, the legacy stream would wait, too, and
    with it all other blocking streams.
    """
    with device.create_stream(blocking=blocking) as substitute:
        return act(substitute)


def await_closed(stream: Stream) -> None:
    """Block the host until the work of a stream is done if its library has closed it (:func:`await_device`). For other
    streams return at once. Raises CudaError.
    """
    if _may_work(stream):
        await_device(stream._session, stream.device.ordinal)


def await_closed_streams(session: Session) -> None:
    """Block the host until the work of all streams is done that their libraries have closed (:func:`await_closed`)."""
    for stream in members(known_streams(session)):
        await_closed(stream)


def ordered_after_end(device: Device, last: Sequence[Event], act: Callable[[Stream], T]) -> T:
    """Call ``act`` with a new stream of ``device`` that is ordered after ``last``, the list of an ended stream
    (:func:`end_of`). If that list is empty, the new stream is ordered after all known streams. Raises CaptureError,
    NotReadyError.
    """

    def after_its_work(substitute: Stream) -> T:
        if last and not last[0].closed:
            substitute.wait(last[0])
        else:
            known = known_ends(device._session)
            Fence(device._session, without=[end for end in known if _may_work(end)]).precede(substitute)
        return act(substitute)

    return _on_new_stream(device, after_its_work)


def queue_if_allowed(stream: Stream, act: Callable[[], object], *, mine: bool = False) -> bool:
    """Call ``act``, which queues a record or a wait for a deferred item, unless the stream is captured or closed.
    Returns whether it was called.

    During the call no other thread closes the stream or begins to capture it through this package. Other code may begin
    to capture a stream that this package did not make, at any time. Such a stream is used only on the thread that works
    with it: that of a caller with ``mine``, or one that is about to queue work on the stream and attempts its items
    first (:func:`queue_behind`).
    """
    mine = mine or isinstance(stream, OwnStream) or threading.get_ident() in stream._attempting

    def use() -> bool:
        if not mine or stream.closed or stream._capture or stream.capturing:
            return False
        act()
        return True

    return _while_open(stream, use)


def record_uncaptured(stream: Stream) -> Event | None:
    """Record an event after the queued work of a stream, ours or another library's, and return it; None while the
    stream is being captured. Raises ClosedError, CudaError.
    """

    def record() -> Event | None:
        if stream._captured():
            return None
        event = stream.record()
        # If other code began a capture meanwhile, the record became a node of its graph.
        return None if stream._captured() else event

    return _while_open(stream, record)


def _while_open(stream: Stream, act: Callable[[], T]) -> T:
    """Call ``act`` while no other thread closes ``stream`` or begins to capture it through this package.

    If ``stream`` is a default stream, this package begins no capture at all during the call, because the call would
    invalidate captures of blocking streams. Items of :func:`queue_behind` are not attempted, because they take the
    locks of other streams.
    """
    queue, me = deferred_queue(stream._session), threading.get_ident()
    is_default = isinstance(stream, DefaultStream)
    with queue.beginning if is_default else stream._in_use:
        if is_default:
            queue.refuse_captures("work on a default stream")
        try:
            # Not by `append`: a signal handler could raise after a call, and the entry would be left.
            stream._attempting += (me,)
            return act()
        finally:
            stream._attempting.remove(me)
