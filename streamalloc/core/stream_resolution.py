"""Resolution of streams: from an object of any library, a driver handle, or a device's default stream.

:func:`as_stream` finds the :class:`Stream` for an argument, :func:`queue_handle` and :func:`direct_handle` find the
``CUstream`` for a direct driver call. :mod:`streamalloc.core.library_streams` reads the objects of other libraries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamalloc.core.deferred import deferred_queue
from streamalloc.core.library_streams import (
    device_of_library_stream,
    handle_of_library_stream,
    keep_stream,
    kept_stream,
    kept_streams,
)
from streamalloc.core.session import PerDriver, Session, members, sessions
from streamalloc.core.stream import DEFAULT_HANDLES, PER_THREAD, Kind, Stream, StreamLike, Threads, created_streams
from streamalloc.driver.internal import SETTLERS, cuda

if TYPE_CHECKING:
    from streamalloc.core.device import Device


def as_stream(stream: StreamLike, session: Session) -> Stream:
    """``stream`` as a :class:`Stream` of ``session``'s driver.

    Raises
    ------
    TypeError
        The object is no stream.
    ValueError
        The stream belongs to another driver. Streams of other devices of the same driver are accepted.
    ClosedError
        The stream was closed.
    """
    if isinstance(stream, Stream):
        if stream._session is not session:
            raise ValueError(
                f"{stream!r} belongs to another driver: {stream._session.driver!r}, not {session.driver!r} "
                "(driver.use() chooses one for its own thread or task only, driver.set_default() for all)"
            )
        stream._checked_raw()
        return stream
    from streamalloc.core.device import Device

    number = handle_of_library_stream(stream)
    if number in DEFAULT_HANDLES:
        # A default stream's handle names no device. Use the library's device, or the current context's.
        named = device_of_library_stream(stream)
        ordinal = _current_ordinal(session) if named is None else Device(named, driver=session.driver).ordinal
        found = default_stream(Device._of(ordinal, session), number)
        keep_stream(stream, number, found, session)
    else:
        known = kept_stream(stream, session)
        if known is None:
            # Not cuStreamGetDevice: on a captured stream it invalidates the capture.
            ordinal = session.device_of(session.call("cuStreamGetCtx", cuda.CUstream(number)))
            known = Stream.of_handle(Device._of(ordinal, session), number, None)
            keep_stream(stream, number, known, session)
        found = known._of_library(stream)  # a copy that keeps the library's object alive: the kept stream does not
    if not isinstance(stream, cuda.CUstream):
        found._notify_lent(found._raw, used=True)
    return found


def _current_ordinal(session: Session) -> int:
    """The ordinal of the current context's device; without a context 0, as in the runtime API."""
    session.check_process()
    result, device = session.driver.cuCtxGetDevice()
    if result == cuda.CUresult.CUDA_ERROR_INVALID_CONTEXT:
        return 0
    return int(device) if not result else int(session.call("cuCtxGetDevice"))


_default_streams: PerDriver[dict[tuple[int, int], Stream]] = PerDriver(lambda _: {})
"""Default streams by device ordinal and handle."""


def default_stream(device: Device, handle: int) -> Stream:
    """The default stream of a device: handles 0 and 1 are the legacy one, 2 is the per-thread one."""
    streams = _default_streams(device._session)
    found = streams.get((device.ordinal, handle))
    if found is None:
        found = Stream.__new__(Stream)
        found._prepare(device, Kind.DEFAULT, cuda.CUstream(handle), None, may_be_direct=False)
        if handle == PER_THREAD:
            found._threads = Threads()
        found._open()
        found = streams.setdefault((device.ordinal, handle), found)
    return found


def captures_changed(session: Session) -> None:
    """Allow direct calls, or forbid them while this package captures a stream: on default streams, and in the mode
    ``"global"`` on all streams (:meth:`Stream._context`).
    """
    forbidding = deferred_queue(session).forbidding
    for stream in [*_default_streams(session).values(), *members(created_streams(session)), *kept_streams(session)]:
        if forbidding:
            stream._forbid_direct()
        stream._allow_direct()


def _destroy_spare_events() -> None:
    """Destroy the spare events of default and kept streams, before a leak report."""
    for session in sessions():
        for stream in {*_default_streams(session).values(), *kept_streams(session)}:
            if session.usable:
                stream._spare.destroy_all(session)


SETTLERS.append(_destroy_spare_events)


def direct_handle(stream: StreamLike, session: Session) -> Any | None:
    """``CUstream`` for direct calls to the session's driver; None if such calls are not allowed.

    They are allowed for an open stream of this package that is not being captured.
    """
    return stream._handle if type(stream) is Stream and stream._direct is session else None


def queue_handle(stream: StreamLike, session: Session) -> Any | None:
    """``CUstream`` if calls that queue work may go directly to the driver; else None."""
    if type(stream) is Stream:
        known: Any = stream
    else:
        known, owner = session.latest_stream
        if owner() is not stream:
            known = kept_stream(stream, session)
    if known is None or known._session is not session:
        return None
    handle = known._handle
    return known._asked_handle() if handle is None else handle


def direct_view(stream: StreamLike, session: Session) -> tuple[Any | None, bool]:
    """The results of :func:`direct_handle` and :func:`sees_all_work`, for fast paths."""
    if type(stream) is Stream and stream._direct is session:
        return stream._handle, stream._sees_all
    return None, False


def order_handle_after(handle: int, ours: Stream) -> None:
    """Order later work of another library's stream, given by its ``CUstream``, after all queued work of ``ours``."""
    default = handle in DEFAULT_HANDLES
    theirs = default_stream(ours.device, handle)._asked_handle() if default else cuda.CUstream(handle)
    if theirs is None or not ours._order(theirs):
        Stream.of_handle(ours.device, handle, ours).wait(ours)
