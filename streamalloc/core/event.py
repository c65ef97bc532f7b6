"""Events: points in the work of streams."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from streamalloc.core.awaiting import finished
from streamalloc.core.deferred import OFTEN, deferred_queue, refused_to_end, work
from streamalloc.core.errors import ClosedError, error_from
from streamalloc.core.html import Row, Shown
from streamalloc.core.properties import checked_type
from streamalloc.core.resource import Closes, made_for_sharing
from streamalloc.core.session import Session
from streamalloc.driver.internal import cuda

if TYPE_CHECKING:
    from streamalloc.core.device import Device
    from streamalloc.core.graph import Capture

_NOT_READY = cuda.CUresult.CUDA_ERROR_NOT_READY


class EventLike(Protocol):
    """An event of cuda.core."""

    @property
    def is_done(self) -> bool: ...


class Spares(list[Any]):
    """A stream's events (``CUevent``) that were closed, for it to record again.

    Making an event costs twice as much as recording one, and may wait for the device where the driver has to make room.
    A stream that waits for an event waits for the record before ``cuStreamWaitEvent``, also if it is recorded again.
    """

    __slots__ = ("open", "passed")

    most = 16
    """Events kept for a stream. A data loader has about as many batches under way."""

    def __init__(self) -> None:
        self.open: bool = True
        self.passed: int = 0
        """Moment: events that were recorded on the stream before have passed."""

    def end_if_closed(self, session: Session) -> None:
        """Destroy all events if another thread has closed the stream."""
        if not self.open:
            self.end(session)

    def end(self, session: Session) -> None:
        """Destroy all events, and keep no more."""
        self.open = False
        self.destroy_all(session)

    def destroy_all(self, session: Session) -> None:
        """Destroy the events that are kept now."""
        while self:
            try:
                raw = self.pop()
            except IndexError:  # another thread took it
                return
            destroy_event(session, raw)


def destroy_event(session: Session, raw: Any) -> None:
    """Destroy a ``CUevent`` now, or later if the driver refuses (``cuEventDestroy``)."""
    result = session.driver.cuEventDestroy(raw)[0]
    if result:
        refused_to_end(session, "cuEventDestroy", raw, result)


class Event(Closes, Shown):
    """A point in a stream's work, recorded by :meth:`Stream.record`.

    Parameters
    ----------
    device
        The device whose streams can record it.
    timing
        Whether :meth:`elapsed_since` works; events that do not measure time are cheaper.
    blocking_sync
        Whether :meth:`synchronize` sleeps rather than spins.
    interprocess
        Whether other processes can open it; such an event cannot measure time.
    """

    __slots__ = ("__weakref__", "_capture", "_raw", "_session", "_spare", "device", "interprocess")

    interprocess: bool
    """True for an event that other processes can open."""

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
        with device.current():
            self._session.create(self, "_raw", "cuEventCreate", flags)

    def _adopt(self, device: Device, interprocess: bool) -> None:
        self._spare: Spares | None = None
        self.device: Device = device
        self.interprocess = interprocess
        self._session = device._session
        self._capture: Capture | None = None

    @property
    def handle(self) -> int:
        """The driver's handle (``CUevent``) as a number.

        Raises
        ------
        ClosedError
            The event was closed.
        """
        return int(self._checked_raw())

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._raw is None

    def _checked_raw(self) -> Any:
        raw = self._raw
        if raw is None:
            raise ClosedError(f"{self!r} was closed")
        return raw

    def query(self) -> bool:
        """Whether the work before the event is done; True if it was never recorded (``cuEventQuery``)."""
        raw = self._raw
        result = self._session.cuEventQuery(self._checked_raw() if raw is None else raw)[0]
        return not result or is_done(result, "cuEventQuery")

    def synchronize(self) -> None:
        """Block the host until the work before the event is done (``cuEventSynchronize``)."""
        self._session.call("cuEventSynchronize", self._checked_raw())
        work(self._session, OFTEN)

    def __await__(self) -> Generator[Any, None, None]:
        """Wait in a coroutine of :mod:`asyncio` as :meth:`synchronize` does; the loop runs other tasks meanwhile.

        No thread is used: the loop queries the event at intervals of 1 to 10 ms (``cuEventQuery``). An event that is
        recorded again meanwhile is done when the later record is.

        Raises
        ------
        ClosedError
            The event was closed, perhaps during the wait.
        """
        return finished(self).__await__()

    def elapsed_since(self, start: Event) -> float:
        """Milliseconds between two recorded events that measure time (``cuEventElapsedTime``).

        Raises
        ------
        InvalidHandleError
            One of them does not measure time, was not recorded, or is of another device.
        NotReadyError
            The work before one of them is not done.
        """
        checked_type("start", start, Event)
        hint = "both events must be made with timing=True and recorded on the same device"
        return float(self._session.call("cuEventElapsedTime", start._checked_raw(), self._checked_raw(), hint=hint))

    def close(self) -> None:
        """Destroy the event (``cuEventDestroy``); streams that wait for it go on waiting. Idempotent."""
        if not self._kept_for_later():
            self._session.release(self, "cuEventDestroy")

    def _kept_for_later(self) -> bool:
        """Keep the driver's event for the next record of its stream; returns False if it has to be destroyed."""
        spare = self._spare
        if spare is None or not spare.open or self._capture is not None or len(spare) >= spare.most:
            return False
        self._session.check_process()
        # No call between the two, so that two threads do not both take it; nor a function of Python before it is kept.
        raw = self._raw
        self._raw = None
        if raw is not None:
            spare.append(raw)
            spare.end_if_closed(self._session)
        return True

    def __del__(self) -> None:
        raw = getattr(self, "_raw", None)
        if raw is None or not self._session.usable or self._kept_for_later():
            return
        # Other objects of the same garbage cycle may still use the event.
        self._raw = None
        destroy_event(self._session, raw)

    def _about(self) -> Iterator[Row]:
        yield "handle", f"{self.handle:#x}"
        yield "device", self.device
        if self._capture is None:
            with self._session.relaxed():
                yield "done", self.query()

    def _text(self) -> str:
        return f" {'closed' if self._raw is None else hex(int(self._raw))} of device {self.device.ordinal}"


def is_done(result: Any, call: str) -> bool:
    """Whether a query's answer says that the work is done; raises for an error."""
    if not result:
        return True
    if result == _NOT_READY:
        return False
    raise error_from(result, call)


def foreign_event(event: object) -> Any | None:
    """The driver's event behind one of cuda.core or of the bindings; None for anything else."""
    if isinstance(event, cuda.CUevent):
        return event
    if type(event).__module__.startswith("cuda.core") and hasattr(event, "is_done"):
        return cuda.CUevent(int(getattr(event, "handle", 0)))
    return None


def opened_event(device: Device, handle: Any) -> Event:
    """An event that another process made, by the driver's ``CUipcEventHandle`` (``cuIpcOpenEventHandle``)."""
    event = Event.__new__(Event)
    event._raw = None
    event._adopt(device, interprocess=False)
    with device.current():
        hint = "the process that made the event has ended"
        event._session.create(event, "_raw", "cuIpcOpenEventHandle", handle, hint=hint)
    return event


def context_event(device: Device) -> Event:
    """An event after all that a device's context has queued so far (``cuCtxRecordEvent``). For explicit calls only.

    The driver invalidates all captures of the context then, whatever their mode.

    Raises
    ------
    CaptureError
        A capture of ours is under way.
    """
    event = Event(device)
    session = device._session
    queue = deferred_queue(session)
    with device.current(), queue.beginning:
        queue.refuse_captures("cuCtxRecordEvent")
        session.call("cuCtxRecordEvent", session.context(device.ordinal), event._raw)
    return event
