"""Deferred ends of streams: after the stream's work, or after the finalisers that use the stream."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from streamalloc.core.deferred import Deferred, HandleEnd, deferred_queue
from streamalloc.core.errors import ClosedError
from streamalloc.core.event import Event
from streamalloc.core.session import PerDriver, Session


class LateEnd(HandleEnd):
    """Destruction of a stream that was closed while finalisers on other threads freed memory on it."""

    __slots__ = ("_dropping",)

    def __init__(self, session: Session, raw: Any, dropping: list[None]) -> None:
        super().__init__(session, "cuStreamDestroy", raw)
        self._dropping = dropping

    def attempt(self) -> bool:
        return not self._dropping and super().attempt()


class _StreamEnd(Deferred):
    """Item that ends with the work of a stream that was closed or dropped earlier."""

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
    """Submit the last event of an ending stream to the deferred queue, unless it has completed."""
    with session.relaxed():
        if not last.query():
            item = _StreamEnd(last)
            pending_ends(session).add(item)
            deferred_queue(session).submit(item)


def has_passed(event: Event) -> bool:
    """Whether an event has completed; then synchronise with it, so that pools can reuse the memory of earlier frees."""
    with contextlib.suppress(ClosedError):  # closed by the stream's owner, which has synchronised
        if not event.query():
            return False
        event._session.call("cuEventSynchronize", event._checked_raw())
    return True
