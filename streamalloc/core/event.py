"""Events: points in the work of streams."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from streamalloc.core.deferred import MOST_PER_SYNC, Deferred, deferred_queue, end_handle, work
from streamalloc.core.errors import LOST, ClosedError, error_from
from streamalloc.core.properties import IpcEventHandle, checked_type
from streamalloc.core.resource import Closes, Shareable, made_for_sharing
from streamalloc.core.session import PerDriver, Session, drained
from streamalloc.driver.internal import cuda
from streamalloc.formats.html import Row, Shown

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from streamalloc.core.device import Device
    from streamalloc.core.graph import Capture

_NOT_READY = cuda.CUresult.CUDA_ERROR_NOT_READY
_OF_A_CAPTURE = "the event was last recorded in a capture, and launches of the graph do not record it: record it again"


class EventLike(Protocol):
    """Type of an event of cuda.core. :func:`foreign_event` recognises such an event by the module of its class and by
    the attribute ``is_done``.
    """

    @property
    def is_done(self) -> bool: ...


class Spares(list[Any]):
    """Closed events (``CUevent``) of a stream, kept so that later records use them again.

    Creating an event costs twice as much as recording one, and may wait for the device if the driver must allocate
    memory. It is safe to record an event again: a stream waits for the last record before ``cuStreamWaitEvent``, not
    for later records.
    """

    __slots__ = ("open",)

    most = 16
    """Largest number of events kept for a stream: about the number of batches that a data loader has under way."""

    def __init__(self) -> None:
        self.open: bool = True
        """False once the stream has ended: then no event is kept."""

    def keep(self, raw: Any, session: Session) -> None:
        """Keep ``raw`` (``CUevent``) for a later record; destroy it if another thread has closed the stream
        meanwhile.
        """
        # The event is appended before the check: otherwise, if the stream was closed between the two, the event would
        # stay in the list for ever.
        self.append(raw)
        if not self.open:
            self.destroy_all(session)

    def end(self, session: Session) -> None:
        """Destroy all events (``cuEventDestroy``), and keep none from now on: the stream has ended."""
        self.open = False
        self.destroy_all(session)

    def destroy_all(self, session: Session) -> None:
        """Destroy the events that are kept now (``cuEventDestroy``). More events may be kept later."""
        for raw in drained(self.pop):
            end_handle(session, "cuEventDestroy", raw)


class Event(Closes, Shareable, Shown):
    """A point in a stream's work, recorded by :meth:`Stream.record`.

    Parameters
    ----------
    device
        The device whose streams can record the event.
    timing
        Whether the event measures time, for :meth:`elapsed_since`. Events without timing are cheaper.
    blocking_sync
        Whether :meth:`synchronize` lets the host thread sleep rather than spin.
    interprocess
        Whether other processes can open the event. Such an event cannot measure time.

    Raises
    ------
    ValueError
        Both ``timing`` and ``interprocess`` were given.
    """

    __slots__ = ("__weakref__", "_capture", "_foreign_captures", "_raw", "_session", "_spare", "device", "interprocess")

    interprocess: bool
    """Whether this process made the event for other processes to open. False for an ordinary event, and for one of
    :meth:`from_handle`.
    """

    def __init__(
        self, device: Device, *, timing: bool = False, blocking_sync: bool = False, interprocess: bool = False
    ) -> None:
        self._raw: Any = None
        if timing and interprocess:
            raise ValueError("interprocess=True: an event of several processes cannot measure time (timing=True)")
        kinds = cuda.CUevent_flags
        flags = (
            (0 if timing else int(kinds.CU_EVENT_DISABLE_TIMING))
            | (int(kinds.CU_EVENT_BLOCKING_SYNC) if blocking_sync else 0)
            | (int(kinds.CU_EVENT_INTERPROCESS) if interprocess else 0)
        )
        self._adopt(device, bool(interprocess))
        if interprocess:
            made_for_sharing()
        self._session.create_in(device.ordinal, self, "cuEventCreate", flags)

    @classmethod
    def from_handle(cls, handle: bytes | Any, device: Device) -> Event:
        """Open an event of another process (``cuIpcOpenEventHandle``).

        Parameters
        ----------
        handle
            A ``CUipcEventHandle``, its 64 bytes, or an :class:`IpcEventHandle`, of an event that was created with
            ``CU_EVENT_INTERPROCESS``.
        device
            The device of the event. No function of the driver returns the device of an event.

        Raises
        ------
        TypeError, ValueError
            ``handle`` is not such a handle, or ``device`` is not a :class:`Device`.
        CudaError
            The handle is not the handle of an event, or the event was created by this process. The handle of an event
            whose process has ended raises no error.

        Examples
        --------
        >>> ready = sa.Event.from_handle(message.data, device)  # doctest: +SKIP
        >>> stream.wait(ready)  # doctest: +SKIP
        """
        from streamalloc.core.device import check_device

        check_device("device", device)
        if isinstance(handle, (int, cuda.CUevent)):
            raise TypeError(f"handle={handle!r} is no CUipcEventHandle: pass a CUevent of this process to Stream.wait")
        event = cls.__new__(cls)
        event._raw = None
        event._adopt(device, interprocess=False)
        hint = "the handle is no event's, or of this process"
        opened = IpcEventHandle(handle).to_driver()
        device._session.create_in(device.ordinal, event, "cuIpcOpenEventHandle", opened, hint=hint)
        return event

    def _adopt(self, device: Device, interprocess: bool) -> None:
        self._spare: Spares | None = None
        self.device: Device = device
        self.interprocess = interprocess
        self._session = device._session
        self._capture: Capture | None = None
        """The capture by this package in which the event was recorded; None if the event was recorded outside a
        capture.
        """
        self._foreign_captures = False
        """Whether the event may have been recorded in a capture by other code: on a stream that other code may capture,
        or through the event's handle. A stream that waits for the event then joins that capture.
        """

    @property
    def handle(self) -> int:
        """The driver's handle (``CUevent``) as a number.

        Raises
        ------
        ClosedError
            The event was closed.
        """
        raw = self._checked_raw()
        self._foreign_captures = True
        return int(raw)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called. Then all uses raise :class:`ClosedError`."""
        return self._raw is None

    @property
    def _capture_hint(self) -> str:
        """Text for an error about an event that a capture by this package has recorded; empty for other events."""
        return "" if self._capture is None else _OF_A_CAPTURE

    def _checked_raw(self) -> Any:
        raw = self._raw
        if raw is None:
            raise ClosedError(f"{self!r} was closed")
        return raw

    def query(self) -> bool:
        """Return whether the work before the event is done; True if the event was never recorded (``cuEventQuery``).
        Raises ClosedError if the event was closed. Raises CaptureError if the event was recorded in a capture that has
        not ended, or this thread captures a stream in a mode other than ``"relaxed"``; the capture is then invalid.
        Raises InvalidValueError if the event was last recorded in a capture that has ended.
        """
        raw = self._checked_raw()
        with self._session.beside_captures():
            result = self._session.cuEventQuery(raw)[0]
        return not result or is_done(result, "cuEventQuery", self._capture_hint)

    def synchronize(self) -> None:
        """Block the host until the work before the event's last record is done (``cuEventSynchronize``), then attempt
        deferred releases. If the event was never recorded, the host does not wait. Errors as for :meth:`query`.
        """
        self._session.call("cuEventSynchronize", self._checked_raw(), hint=self._capture_hint)
        work(self._session, MOST_PER_SYNC)

    def __await__(self) -> Generator[Any, None, None]:
        """Wait in a coroutine of :mod:`asyncio` until the work before the event is done. The loop runs other tasks
        meanwhile.

        No thread is used: the loop queries the event at intervals of 1 to 10 ms (``cuEventQuery``), of up to 30 ms if
        there are many waits. If the event is recorded again during the wait, the wait ends with the later record.

        Raises
        ------
        ClosedError
            The event was closed before the wait or during it.
        CaptureError
            The event was recorded in a capture that has not ended. The capture is then invalid.
        InvalidValueError
            The event was last recorded in a capture that has ended.
        """
        return finished(self).__await__()

    def elapsed_since(self, start: Event) -> float:
        """Return the milliseconds from ``start`` to this event (``cuEventElapsedTime``). Both events must measure time.

        Raises
        ------
        TypeError
            ``start`` is not an :class:`Event`.
        ClosedError
            One of the two events was closed.
        InvalidHandleError
            One of the two events does not measure time or was not recorded, or the events are of different devices.
        NotReadyError
            The work before one of the two events is not done.
        """
        checked_type("start", start, Event)
        hint = "record both events with timing=True on one device, and synchronise with the later one before this call"
        return float(self._session.call("cuEventElapsedTime", start._checked_raw(), self._checked_raw(), hint=hint))

    def close(self) -> None:
        """End the use of the event. The stream of :meth:`Stream.record` may keep the driver's event for a later record;
        otherwise the driver's event is destroyed (``cuEventDestroy``). Streams that already wait for the event keep
        waiting. Idempotent.
        """
        if not self._kept_for_later():
            self._session.release(self, "cuEventDestroy")

    def _kept_for_later(self) -> bool:
        """Keep the driver's event for the next record of its stream. Returns False if it must be destroyed: the stream
        has ended or has enough events, or the event was recorded in a capture.
        """
        spare = self._spare
        if spare is None or not spare.open or self._capture is not None or len(spare) >= spare.most:
            return False
        self._session.check_process()
        # There is no call between these two lines, so Python switches no threads there: only one thread takes the
        # handle.
        raw = self._raw
        self._raw = None
        if raw is not None:
            spare.keep(raw, self._session)
        return True

    def __del__(self) -> None:
        raw = getattr(self, "_raw", None)
        if raw is None or not self._session.usable or self._kept_for_later():
            return
        # Other objects of this garbage cycle may still use the event, and must find it closed.
        self._raw = None
        end_handle(self._session, "cuEventDestroy", raw)

    def _about(self) -> Iterator[Row]:
        yield "handle", f"{self.handle:#x}"
        yield "device", self.device
        if self._capture is None:
            with self._session.relaxed():
                yield "done", self.query()

    def _text(self) -> str:
        return f" {'closed' if self._raw is None else hex(int(self._raw))} of device {self.device.ordinal}"


def is_done(result: Any, call: str, hint: str = "") -> bool:
    """Return whether ``result``, the ``CUresult`` of a query, says that the work is done. Raises CudaError with
    ``hint`` if ``result`` is an error. ``call`` is the name of the queried driver function.
    """
    if not result:
        return True
    if result == _NOT_READY:
        return False
    raise error_from(result, call, hint)


def foreign_event(event: object) -> Any | None:
    """Return the ``CUevent`` of an event of cuda.core or of the bindings; None for other objects."""
    if isinstance(event, cuda.CUevent):
        return event
    if type(event).__module__.startswith("cuda.core") and hasattr(event, "is_done"):
        return cuda.CUevent(int(getattr(event, "handle", 0)))
    return None


# -- last events of streams ----------------------------------------------------------------------------------


class _StreamEnd(Deferred):
    """Item of the deferred queue for a stream that was closed or dropped. The item ends once the stream's work is
    done.
    """

    __slots__ = ("__weakref__", "event")

    def __init__(self, event: Event) -> None:
        self.event = event

    def attempt(self) -> bool:
        # A closed event cannot be queried. Its owner has synchronised with it before the close, so it counts as
        # complete.
        return self.event.closed or has_passed(self.event)


pending_ends: PerDriver[weakref.WeakSet[_StreamEnd]] = PerDriver(lambda _: weakref.WeakSet())
"""Items of closed and dropped streams whose work is not done. A fence over all known streams uses the events of these
items.
"""


def defer_end(session: Session, last: Event) -> None:
    """Submit an item to the deferred queue that ends ``last``, the last event of an ending stream, once the event has
    completed. If the event has completed already, nothing is submitted.
    """
    with session.relaxed():
        if not last.query():
            item = _StreamEnd(last)
            pending_ends(session).add(item)
            deferred_queue(session).submit(item)


def has_passed(event: Event) -> bool:
    """Return whether an event has completed, or its context is lost. The result is False for a closed event.

    If the event has completed, the host also synchronises with it (``cuEventSynchronize``). Only then can pools give
    the memory of the frees before the event to any stream.
    """
    try:
        if not event.query():
            return False
        event._session.call("cuEventSynchronize", event._checked_raw())
    except ClosedError:
        return False  # Another thread has closed the event; the next query raises.
    except LOST:
        pass  # The lost context has ended all its work: the event counts as passed.
    return True


# -- await in asyncio ----------------------------------------------------------------------------------------

_TURNS = 1e-4
"""Seconds during which a new wait queries its event at each iteration of the event loop, so that a short wait ends at
once.
"""
_SHORTEST, _LONGEST = 1e-3, 1e-2
"""Shortest and longest pause in seconds between two queries of a wait that is older than ``_TURNS``. Between these
limits the pause is an eighth of the wait's age.
"""
_PER_WAIT, _MANY = 3e-5, 3e-2
"""The pause in seconds is at least ``_PER_WAIT`` times the number of the loop's waits, but this lower limit does not
exceed ``_MANY``. Without it, the queries of many waits would keep the loop busy.
"""

waits: weakref.WeakKeyDictionary[AbstractEventLoop, list[None]] = weakref.WeakKeyDictionary()
"""A list for each event loop, with one None for each unfinished wait. Only the length of the list is used."""


async def finished(event: Event) -> None:
    """Wait until the work before ``event`` is done, without blocking the running event loop.

    The pauses between queries do not depend on how long a query took, because one slow query must not delay the wait's
    end.
    """
    # Imported here, because at module level the import would double the package's import time. A program with a running
    # loop has imported asyncio before.
    from asyncio import get_running_loop, sleep

    loop = get_running_loop()
    began = loop.time()
    several = waits.setdefault(loop, [])
    several.append(None)
    try:
        while True:
            # In another capture mode, a query would invalidate captures of other streams.
            with event._session.relaxed():
                if event.query():
                    event.synchronize()  # Returns at once. Pools only then reuse what was freed before it.
                    return
            age = loop.time() - began
            pause = max(min(max(age / 8, _SHORTEST), _LONGEST), min(_PER_WAIT * len(several), _MANY))
            await sleep(0 if age < _TURNS else pause)
    finally:
        several.pop()  # `waits[loop]` may be missing by now: the loop may be gone.
