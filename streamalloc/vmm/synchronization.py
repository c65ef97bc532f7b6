"""Host synchronisation before memory is unmapped: ``cuMemUnmap`` does not wait for queued work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from streamalloc.core.internal import (
    CaptureError,
    Event,
    MemAccess,
    MemLocation,
    MemLocationType,
    Session,
    StreamLike,
    as_stream,
    deferred_queue,
    refused,
    session_of,
    work,
)

After: TypeAlias = Event | StreamLike | Iterable[Any] | None
"""Work to wait for: an event, a stream or several; ``()`` for none; None for all work of devices with access."""


def accessing(access: Iterable[dict[MemLocation, MemAccess]]) -> set[int]:
    """Return the ordinals of the devices that have access in any of these permissions."""
    return {
        location.id
        for rights in access
        for location, permission in rights.items()
        if permission and location.type is MemLocationType.DEVICE
    }


def wait_for_users(after: After, session: Session, access: Iterable[dict[MemLocation, MemAccess]]) -> None:
    """Block the host until ``after`` has completed; None means all work of the devices with access."""
    wait(after, session, accessing(access) if after is None else ())


def wait(after: After, session: Session, devices: Iterable[int]) -> None:
    """Block the host until ``after`` has completed; None means all work of ``devices`` (``cuCtxSynchronize``).

    Raises
    ------
    CaptureError
        ``after`` is None and a stream is being captured: a device cannot be synchronised then.
    """
    if after is None:
        for ordinal in sorted(devices):
            if deferred_queue(session).paused:
                why = "a stream is being captured: say with after= which streams or events must have passed"
                raise refused(CaptureError, "cuCtxSynchronize", why)
            with session.current(ordinal):
                session.call("cuCtxSynchronize")
        work(session)
        return
    several: Any = after if _several(after) else (after,)
    for one in several:
        if not isinstance(one, Event):
            one = as_stream(one, session)
        elif session_of(one) is not session:
            raise ValueError(f"after: {one!r} belongs to another driver")
        one.synchronize()


def _several(after: object) -> bool:
    return isinstance(after, (list, tuple, set, frozenset)) or (
        isinstance(after, Iterable) and not hasattr(after, "__cuda_stream__")
    )
