"""Streams that their library has closed: later work can come after theirs once the device was synchronised."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from streamalloc.core.deferred import deferred_queue
from streamalloc.core.errors import InvalidContextError, InvalidHandleError, NotReadyError, OutOfMemoryError, refused
from streamalloc.core.session import PerDriver, Session, members
from streamalloc.core.stream import Kind, Stream, awaited_ends, closable_streams, latest_closed, moment

_synchronized: PerDriver[dict[int, int]] = PerDriver(lambda _: {})
"""Moments at which the latest synchronisations of devices began, by ordinal."""


@contextlib.contextmanager
def synchronizing(session: Session, ordinal: int) -> Iterator[None]:
    """A block that synchronises with a device: the end of what libraries have closed before is known after it."""
    _find_closed(session)
    began = moment()
    yield
    _synchronized(session)[ordinal] = began
    awaited = awaited_ends(session)
    awaited.difference_update([stream for stream in [*awaited] if end_is_known(stream)])


def end_is_known(stream: Stream) -> bool:
    """Whether later work can come after all work of a stream.

    If the library has closed its stream, only a synchronisation of the device (:meth:`Device.synchronize`) shows that
    the work is done.
    """
    closed = stream._closed_at
    return closed is None or _synchronized(stream._session).get(stream.device.ordinal, -1) > closed


def unknown_ends(session: Session) -> list[Stream]:
    """Streams that their library has closed, until their end is known: for each device the latest one."""
    _find_closed(session)
    return [stream for stream in [*latest_closed(session).values()] if not end_is_known(stream)]


def record_unknown_end(stream: Stream) -> None:
    """Record that memory waits for the end of a stream that its library has closed."""
    awaited_ends(stream._session).add(stream)


@contextlib.contextmanager
def watching_for_destruction(stream: Stream) -> Iterator[None]:
    """A block that uses a stream; other code may destroy one that it made meanwhile.

    Raises
    ------
    NotReadyError
        It has done so: the stream counts as closed by its library from now on.
    """
    try:
        yield
    except (InvalidContextError, InvalidHandleError) as error:
        if stream._kind is not Kind.BORROWED:
            raise
        stream._close_by_library()
        why = f"its owner has destroyed {stream!r}, and its work may not be done: synchronise the device first"
        raise refused(NotReadyError, error.call, why) from None


def await_unknown_ends(session: Session, ordinal: int) -> bool:
    """Wait for all work of a device if memory may wait for streams that their library has closed; whether it may."""
    unknown = unknown_ends(session)
    if awaited_ends(session) or (unknown and deferred_queue(session).has_work()):
        with contextlib.suppress(OutOfMemoryError):  # the driver's own memory is exhausted as well
            await_device(session, ordinal)
            return True
    return False


def await_device(session: Session, ordinal: int) -> None:
    """Block the host until all work of a device is done, and invalidate no capture of other code (``cuMemFree``).

    ``cuCtxSynchronize`` would, whatever the mode of the capture and of the thread.
    """
    with synchronizing(session, ordinal), session.relaxed(), session.current(ordinal):
        session.call("cuMemFree", session.call("cuMemAlloc", 1))


def _find_closed(session: Session) -> None:
    """Close the streams that their library has closed."""
    for stream in members(closable_streams(session)):
        _ = stream.closed
