"""Ends of streams: deferred until the work of a stream is done, or until finalisers have left it."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from streamalloc.core.deferred import Deferred, HandleEnd, deferred_queue
from streamalloc.core.errors import ClosedError
from streamalloc.core.event import Event
from streamalloc.core.session import PerDriver, Session


class LateEnd(HandleEnd):
    """The end of a stream that was closed while finalisers on other threads freed memory on it."""

    __slots__ = ("_dropping",)

    def __init__(self, session: Session, raw: Any, dropping: list[None]) -> None:
        super().__init__(session, "cuStreamDestroy", raw)
        self._dropping = dropping

    def attempt(self) -> bool:
        return not self._dropping and super().attempt()


class _StreamEnd(Deferred):
    """The end of the work of a stream that was closed or dropped before it was done."""

    __slots__ = ("__weakref__", "event")

    def __init__(self, event: Event) -> None:
        self.event = event

    def attempt(self) -> bool:
        return has_passed(self.event)

    def memory(self) -> int | None:
        return 0


pending_ends: PerDriver[weakref.WeakSet[_StreamEnd]] = PerDriver(lambda _: weakref.WeakSet())
"""Ends that the deferred queue has."""


def defer_end(session: Session, last: Event) -> None:
    """Submit the event after the work of a stream that ends to the deferred queue, unless it has passed."""
    with session.relaxed():
        if not last.query():
            item = _StreamEnd(last)
            pending_ends(session).add(item)
            deferred_queue(session).submit(item)


def has_passed(event: Event) -> bool:
    """Whether an event has passed. Then the host synchronises with it, which shows the pools the frees before it."""
    with contextlib.suppress(ClosedError):  # by the owner of the stream, which has synchronised
        if not event.query():
            return False
        event._session.call("cuEventSynchronize", event._checked_raw())
    return True
