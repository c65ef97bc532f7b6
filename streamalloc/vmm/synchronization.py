"""Waiting for work before memory is unmapped, which the driver does at once whatever is queued."""

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
    work,
)

__all__ = ["After", "accessing", "wait", "wait_for_users"]

After: TypeAlias = Event | StreamLike | Iterable[Any] | None
"""What must have passed: an event, a stream, or several of them; nothing (``()``); or None for all work of the devices
that have access."""


def accessing(access: Iterable[dict[MemLocation, MemAccess]]) -> set[int]:
    """The ordinals of the devices that have access in any of these records."""
    return {
        location.id
        for record in access
        for location, flags in record.items()
        if flags and location.type is MemLocationType.DEVICE
    }


def wait_for_users(after: After, session: Session, access: Iterable[dict[MemLocation, MemAccess]]) -> None:
    """Block the host until ``after`` has passed; for None until all devices with access have done all their work."""
    wait(after, session, accessing(access) if after is None else ())


def wait(after: After, session: Session, devices: Iterable[int]) -> None:
    """Block the host until ``after`` has passed; for None until ``devices`` have done all their work.

    Raises
    ------
    CaptureError
        A stream is being captured, and None was given: devices cannot be synchronised then.
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
        elif one._session is not session:
            raise ValueError(f"after: {one!r} belongs to another driver")
        one.synchronize()


def _several(after: object) -> bool:
    return isinstance(after, (list, tuple, set, frozenset)) or (
        isinstance(after, Iterable) and not hasattr(after, "__cuda_stream__")
    )
