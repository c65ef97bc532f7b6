"""Queued work of streams: wait for it, order work after it, and attempt items before more is queued."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from streamalloc.core.closed_streams import end_is_known, record_unknown_end, synchronizing, unknown_ends
from streamalloc.core.deferred import Deferred, deferred_queue, unless_busy
from streamalloc.core.errors import (
    CaptureError,
    ClosedError,
    CudaError,
    InvalidContextError,
    InvalidHandleError,
    NotReadyError,
    OutOfMemoryError,
    refused,
)
from streamalloc.core.event import Event, has_passed, pending_ends
from streamalloc.core.library_streams import names_handle, owned_streams
from streamalloc.core.session import PerDriver, Session, members
from streamalloc.core.stream import (
    LEGACY,
    PER_THREAD,
    Kind,
    Stream,
    awaited_ends,
    created_streams,
    moment,
    refuse_capture,
)
from streamalloc.core.stream_resolution import _default_streams, default_stream
from streamalloc.driver.internal import RLock

if TYPE_CHECKING:
    from streamalloc.core.device import Device

T = TypeVar("T")


class QueuedWork:
    """The work queued so far on the given streams, or on all known streams except ``without``.

    Known are the streams of :meth:`Device.create_stream`, also closed and dropped ones, the default streams that were
    used, and streams of other libraries (:func:`owned_streams`). For a stream that its library has closed, the work is
    done once the device was synchronised. No call names a context or the legacy stream, because that would invalidate
    captures by other code. A stream that is being captured is recorded after its capture has ended. If the per-thread
    default stream is given, the work of all threads counts, because deferred items are attempted on any thread.
    Otherwise only the calling thread's counts.
    """

    __slots__ = ("_asking", "_events", "_given", "_session", "_streams", "began")

    def __init__(self, session: Session, *streams: Stream, without: tuple[Stream | None, ...] = ()) -> None:
        self._session = session
        self._asking = RLock()
        self._given = bool(streams)
        self.began: int = moment()
        """The moment at which its recording began, see :func:`moment`."""
        known = streams or (*_known_streams(session), *unknown_ends(session))
        self._streams = [stream for stream in dict.fromkeys(known) if stream not in without]
        """Streams that are not recorded yet."""
        # After the streams: a stream dropped meanwhile is either among them, or has left its end event here.
        self._events = [] if streams else [item.event for item in members(pending_ends(session))]
        with session.relaxed():
            self._record()

    def _record(self) -> None:
        for stream in tuple(self._streams):
            try:
                event = _record_after(stream, self._given)
                if event is None:
                    continue
            except CaptureError:
                continue
            except (ClosedError, InvalidContextError, InvalidHandleError):
                # Closed or destroyed meanwhile. A stream that was made here has kept its end event.
                if not end_is_known(stream):
                    continue
                event = None
            self._events += (event,) if event else stream._last
            self._streams.remove(stream)

    def done(self) -> bool:
        """Whether the work is done; then the host has also synchronised with it. The host does not wait.

        False while another thread is in this call.
        """
        return unless_busy(self._ask, False, self._asking)

    def _ask(self) -> bool:
        with self._session.relaxed():
            self._record()
            # Stop at the first pending event: a thousand items may call this.
            while self._events and has_passed(self._events[-1]):
                del self._events[-1]
            return not (self._events or self._streams)

    def synchronize(self) -> None:
        """Block the host until the work is done, except that of streams that are being captured."""
        with self._session.relaxed():
            self._record()
            for event in tuple(self._events):
                with contextlib.suppress(ClosedError):  # closed by the stream's owner, which has synchronised
                    event.synchronize()

    def precede(self, stream: Stream) -> None:
        """Order later work of ``stream`` after this work.

        Raises
        ------
        CaptureError
            One of the streams is being captured.
        NotReadyError
            The library of one of the streams has closed it.
        """
        if self._streams:
            first = self._streams[0]
            _refuse_unknown_end(first, "cuStreamWaitEvent")
            raise refused(CaptureError, "cuStreamWaitEvent", f"{first!r} is being captured")
        for event in self._events:
            stream.wait(event)


def _known_streams(session: Session) -> tuple[Stream, ...]:
    return (
        *members(created_streams(session)),
        *_default_streams(session).values(),
        *owned_streams(session),
    )


def _captured_elsewhere(stream: Stream) -> bool:
    """Whether other code captures a stream."""
    with contextlib.suppress(CudaError, ClosedError):
        return stream._foreign_captures and stream.capturing
    return False


def context_event(device: Device) -> Event | None:
    """Record an event after all queued work of a device's context, on streams of any library (``cuCtxRecordEvent``).

    The call invalidates every capture in the context. So it is not made while this library captures a stream, or other
    code captures a stream that this library knows; then the result is None.
    """
    session = device._session
    queue = deferred_queue(session)
    with queue.beginning, device.current():
        if queue.captures or any(map(_captured_elsewhere, _known_streams(session))):
            return None
        event = Event(device)
        session.call("cuCtxRecordEvent", session.context(device.ordinal), event._raw)
        return event


def all_work(device: Device) -> tuple[Event, ...]:
    """Events after all queued work of a device. While this library captures a stream, the host waits for the work
    instead, and the tuple is empty.
    """
    event = context_event(device)
    if event is not None:
        return (event,)
    await_device(device._session, device.ordinal)
    return ()


def await_all_work(device: Device) -> None:
    """Block the host until all work of a device is done, without invalidating a capture of this library."""
    session = device._session
    with synchronizing(session, device.ordinal), session.relaxed():
        for event in all_work(device):
            with event:
                event.synchronize()


def await_device(session: Session, ordinal: int) -> None:
    """Block the host until all work of a device is done, without invalidating captures of any code (``cuMemFree``).

    ``cuCtxSynchronize`` would invalidate them, whatever the mode of the capture and of the thread. While ``cuMemFree``
    waits, driver 580 blocks all threads that need the context. So the host first waits for the streams that are known.
    """
    QueuedWork(session).synchronize()
    with synchronizing(session, ordinal), session.relaxed(), session.current(ordinal):
        try:
            session.call("cuMemFree", session.call("cuMemAlloc", 1))
        except OutOfMemoryError:
            session.call("cuMemFreeHost", session.call("cuMemHostAlloc", 1, 0))


def await_unknown_ends(session: Session, ordinal: int) -> bool:
    """Wait for all work of a device if memory may wait for closed streams of libraries. Returns whether it waited."""
    unknown = unknown_ends(session)
    if awaited_ends(session) or (unknown and deferred_queue(session).has_work()):
        with contextlib.suppress(OutOfMemoryError):  # the driver's own memory is exhausted as well
            await_device(session, ordinal)
            return True
    return False


_latest_work: PerDriver[list[QueuedWork]] = PerDriver(lambda _: [])


def work_since(session: Session, dropped: int) -> QueuedWork:
    """The work that all known streams had queued at a :func:`moment`, and perhaps some later work.

    Items dropped before the record share it, so a thousand items need one record per stream.
    """
    latest = _latest_work(session)
    if not latest or latest[0].began < dropped:
        latest[:] = [QueuedWork(session)]
    return latest[0]


def _record_after(stream: Stream, all_threads: bool = False) -> Event | None:
    """Record an event after the queued work of a stream; None while the stream is being captured.

    ``all_threads``: the per-thread default stream stands for those of all threads.
    """
    if all_threads and stream._number == PER_THREAD and not stream._closed:
        stream = default_stream(stream.device, LEGACY)  # comes after all blocking streams
    elif stream._sees_all and stream._kind is Kind.DEFAULT:
        # A blocking stream's work runs after all queued work of the legacy stream.
        with stream.device.create_stream(blocking=True) as behind:
            return behind.record(timing=True)
    owner = stream._weak_owner and stream._weak_owner()  # a reference keeps the driver's stream
    if stream._weak_owner and not names_handle(owner, stream._number):
        raise ClosedError(f"{stream!r} has ended")
    return record_uncaptured(stream)


def queue_behind(stream: Stream, item: Deferred) -> None:
    """Submit ``item``, and attempt it before more work is queued on ``stream``. For finalisers.

    Two threads may attempt the item at once, so the item must allow that.
    """
    deferred_queue(stream._session).submit(item)
    stream._before_work.append(item)
    stream._forbid_direct()


def settle(stream: Stream, item: Deferred, *others: Stream | None) -> None:
    """Attempt an item of :func:`queue_behind` now. For finalisers, which hold the object that the item releases.

    ``others`` are further streams that the item uses. Nothing is done if another thread is closing one of the streams,
    beginning a capture, or attempting an item on them: a finaliser must not wait for a lock.
    """

    def attempt() -> None:
        if not stream._closed:
            stream._attempt_before_work(item)

    used = [one._in_use for one in (stream, *others) if one is not None]
    unless_busy(attempt, None, deferred_queue(stream._session).beginning, *used)


def ordered_after(stream: Stream, act: Callable[[Stream], T]) -> T:
    """Call ``act`` with the stream. If it was closed, call it with a new stream ordered after its work.

    For an open per-thread default stream, ``act`` gets the legacy stream, which is ordered after those of all threads:
    deferred items end on any thread, where the handle would name another stream. During the call no other thread closes
    the stream or begins to capture it. Work on a default stream would invalidate captures of other streams, so for one
    this package begins no capture at all.

    Raises
    ------
    CaptureError
        The stream is being captured.
    NotReadyError
        The stream's library has closed it, and the device has not been synchronised since then.
    """
    if stream._number == PER_THREAD and not stream._closed:
        stream = default_stream(stream.device, LEGACY)
    if not stream.closed:
        # Attempts items of queue_behind, which may need other streams' locks: not below, under the lock of this one.
        stream._checked_raw()

    def use() -> tuple[T] | None:
        if stream._closed:
            return None
        refuse_capture(stream, "cuMemFreeAsync", "try again once that has ended")
        return (act(stream),)

    used = _held_open(stream, use)
    if used is not None:
        return used[0]
    _refuse_unknown_end(stream, "cuMemFreeAsync")
    return ordered_after_end(stream.device, stream._last, act)


def _refuse_unknown_end(stream: Stream, call: str) -> None:
    if not end_is_known(stream):
        record_unknown_end(stream)
        why = f"the library of {stream!r} has closed it, and its work may not be done: synchronise the device first"
        raise refused(NotReadyError, call, why)


def ordered_after_end(device: Device, last: Sequence[Event], act: Callable[[Stream], T]) -> T:
    """Call ``act`` with a new stream that is ordered after the work of an ended stream: see :func:`end_of`."""
    # A non-blocking stream: a wait on the default stream would delay all blocking streams.
    with device.create_stream() as substitute:
        if last and not last[0].closed:
            substitute.wait(last[0])
        else:
            QueuedWork(device._session, without=(*unknown_ends(device._session),)).precede(substitute)
        return act(substitute)


def queue_if_allowed(stream: Stream, act: Callable[[], object], *, mine: bool = False) -> bool:
    """Call ``act``, which queues a record or a wait for a deferred item, unless the stream is captured or closed.
    Returns whether it was called.

    During the call no other thread closes the stream or begins to capture it through this library. Other code may
    capture a stream that this package did not make. Such a stream is used only on its own thread: ``mine`` means that
    the caller runs on it, and so does a thread that is about to queue work on the stream (:func:`queue_behind`).
    """
    mine = mine or stream._kind is Kind.MADE or threading.get_ident() in stream._attempting

    def use() -> bool:
        if not mine or stream.closed or stream._capture or stream.capturing:
            return False
        act()
        return True

    return _held_open(stream, use)


def record_uncaptured(stream: Stream) -> Event | None:
    """Record an event after the queued work of any library's stream; None while the stream is being captured."""

    def record() -> Event | None:
        if stream.capturing:
            return None
        event = stream.record()
        # If other code began a capture meanwhile, the record became a node of its graph.
        return None if stream.capturing else event

    return _held_open(stream, record)


def _held_open(stream: Stream, act: Callable[[], T]) -> T:
    """Call ``act`` while no other thread closes a stream or begins to capture it through this library.

    Work on a default stream would invalidate captures of blocking streams, so for one this package begins no capture at
    all. Items of :func:`queue_behind` are not attempted meanwhile, because they take the locks of other streams.
    """
    queue, me = deferred_queue(stream._session), threading.get_ident()
    is_default = stream._kind is Kind.DEFAULT
    with queue.beginning if is_default else stream._in_use:
        if is_default:
            queue.refuse_captures("work on a default stream")
        try:
            stream._attempting += (me,)  # no call here: a signal handler could raise after it
            return act()
        finally:
            stream._attempting.remove(me)
