"""Access permissions on mapped memory (``cuMemSetAccess``), and waits for the devices that have access.

``cuMemUnmap`` does not wait for queued work, so the host waits for that work before memory is unmapped.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from streamalloc.core.internal import (
    Device,
    Event,
    Stream,
    StreamLike,
    as_stream,
    await_device,
    known_location,
    refuse_capture,
    work,
)
from streamalloc.core.properties import MemAccess, MemAccessDesc, MemLocation, MemLocationType
from streamalloc.core.session import Session, session_of

Place: TypeAlias = Device | MemLocation
Access: TypeAlias = Place | Iterable[Place] | Mapping[Place, MemAccess] | None
"""Permissions: one or several devices or locations, which get read and write access; or a dictionary with a permission
for each device or location.
"""

Rights: TypeAlias = dict[MemLocation, MemAccess]
"""Permission of each location. The host is one location, ``MemLocation.host()``, whatever NUMA node was named."""


def rights_of(access: Access, session: Session, permission: MemAccess = MemAccess.READWRITE) -> Rights:
    """Return the argument ``access`` as permissions by location; ``permission`` is for locations given without one.
    Raises TypeError, ValueError for anything that is no location of ``session``'s driver.
    """
    if access is None:
        return {}
    if isinstance(access, (Device, MemLocation)):
        pairs: Iterable[tuple[object, MemAccess]] = ((access, permission),)
    elif isinstance(access, Mapping):
        pairs = access.items()
    elif isinstance(access, Iterable):
        pairs = ((place, permission) for place in access)
    else:
        raise TypeError(f"access must name Devices or MemLocations, not {type(access).__name__} ({access!r})")
    rights: Rights = {}
    for place, allowed in pairs:
        location = known_location(session, "access", place)
        if not isinstance(allowed, MemAccess):
            raise TypeError(f"access of {location} must be a MemAccess, not {type(allowed).__name__} ({allowed!r})")
        # The driver has one permission for the whole host, whatever NUMA node is named.
        rights[MemLocation.host() if location.on_host else location] = allowed
    return rights


def structs_of(rights: Rights) -> list[object]:
    """Return permissions as ``CUmemAccessDesc`` structs. Nobody may modify them, because calls with equal permissions
    share them.
    """
    return _structs(tuple(rights.items()))


@functools.lru_cache
def _structs(rights: tuple[tuple[MemLocation, MemAccess], ...]) -> list[object]:
    return [MemAccessDesc(location, permission).to_driver() for location, permission in rights]


After: TypeAlias = Event | StreamLike | Iterable[Any] | None
"""Work to wait for: an event, a stream, or several of these; ``()`` waits for nothing, None for all work of devices
with access.
"""


def accessing(access: Iterable[dict[MemLocation, MemAccess]]) -> set[int]:
    """Return the ordinals of the devices that at least one of these permissions gives access to."""
    return {
        location.id
        for rights in access
        for location, permission in rights.items()
        if permission and location.type is MemLocationType.DEVICE
    }


def wait_for_users(after: After, session: Session, access: Iterable[dict[MemLocation, MemAccess]]) -> None:
    """Block the host until ``after`` has completed; None means all work of the devices that ``access`` gives a
    permission. Raises ValueError, CaptureError, CudaError.
    """
    wait(after, session, accessing(access) if after is None else ())


def wait(after: After, session: Session, devices: Iterable[int]) -> None:
    """Block the host until ``after`` has completed; None means all work of ``devices``, which are ordinals. Raises
    ValueError for another driver's events and streams, CaptureError, CudaError.
    """
    if after is None:
        for ordinal in sorted(devices):
            await_device(session, ordinal)
        work(session)
        return
    for one in [*ends_of(after, session)]:
        with session.relaxed():
            one.synchronize()


def ends_of(after: object, session: Session) -> Iterator[Event | Stream]:
    """Yield the events and streams that the argument ``after`` names. Raises TypeError, ValueError for other objects
    and other drivers, CaptureError if a stream is being captured.
    """
    for one in each_of(after):
        if not isinstance(one, Event):
            one = as_stream(one, session)
            refuse_capture(one, "cuStreamSynchronize", "after: name events or streams outside of the capture")
        elif session_of(one) is not session:
            raise ValueError(f"after: {one!r} belongs to another driver")
        yield one


def each_of(after: object) -> Iterable[Any]:
    """Return the events and streams that the argument ``after`` names: itself if it is one, otherwise its elements.
    Nothing is checked.
    """
    several = isinstance(after, (list, tuple, set, frozenset)) or (
        isinstance(after, Iterable) and not hasattr(after, "__cuda_stream__")
    )
    return after if several else (after,)  # type: ignore[return-value]


def listed(after: After) -> list[Any] | None:
    """Return the events and streams that ``after`` names, as a list, because an iterator can be read only once. None,
    which means all work, stays None.
    """
    return None if after is None else [*each_of(after)]


def copying_stream(stream: StreamLike | None, owner: Any) -> Stream:
    """Return the stream for the copies of an eviction, a restore or a swap: ``stream``, or by default ``owner.stream``.
    Raises TypeError if there is neither, ValueError, ClosedError, and CaptureError if the stream is being captured.
    """
    named: Any = getattr(owner, "stream", None) if stream is None else stream
    ordered = as_stream(named, session_of(owner))
    refuse_capture(ordered, "cuMemUnmap", "memory cannot be evicted or restored in a capture")
    return ordered
