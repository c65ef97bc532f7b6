"""Streams that their library has closed. Work can be ordered after theirs only once the device was synchronised."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from streamalloc.core.errors import InvalidContextError, InvalidHandleError, NotReadyError, refused
from streamalloc.core.session import PerDriver, Session, members
from streamalloc.core.stream import Kind, Stream, awaited_ends, closable_streams, latest_closed, moment, notice_close

_synchronized: PerDriver[dict[int, int]] = PerDriver(lambda _: {})
"""Start of the latest synchronisation of each device (:func:`moment`), by ordinal."""


@contextlib.contextmanager
def synchronizing(session: Session, ordinal: int) -> Iterator[None]:
    """Wrap a synchronisation of a device. Afterwards the work of all streams closed before is known to be done."""
    _find_closed(session)
    began = moment()
    yield
    _synchronized(session)[ordinal] = began
    awaited = awaited_ends(session)
    awaited.difference_update([stream for stream in [*awaited] if end_is_known(stream)])


def end_is_known(stream: Stream) -> bool:
    """Whether later work can be ordered after all work of a stream.

    After the library has closed its stream, this needs a synchronisation of the device (:meth:`Device.synchronize`).
    """
    closed = stream._closed_at
    return closed is None or _synchronized(stream._session).get(stream.device.ordinal, -1) > closed


def unknown_ends(session: Session) -> list[Stream]:
    """Streams that their library has closed and whose work may not be done: for each device the latest one."""
    _find_closed(session)
    return [stream for stream in [*latest_closed(session).values()] if not end_is_known(stream)]


def record_unknown_end(stream: Stream) -> None:
    """Record that memory waits for a stream that its library has closed."""
    awaited_ends(stream._session).add(stream)


@contextlib.contextmanager
def watching_for_destruction(stream: Stream) -> Iterator[None]:
    """Wrap the use of a stream that other code may destroy at the same time.

    Raises
    ------
    NotReadyError
        Other code has destroyed the stream. It counts as closed by its library from now on.
    """
    try:
        yield
    except (InvalidContextError, InvalidHandleError) as error:
        if stream._kind is not Kind.BORROWED:
            raise
        stream._close_by_library()
        why = f"its owner has destroyed {stream!r}, and its work may not be done: synchronise the device first"
        raise refused(NotReadyError, error.call, why) from None


def _find_closed(session: Session) -> None:
    """Mark the streams as closed that their library has closed."""
    for stream in members(closable_streams(session)):
        notice_close(stream)
