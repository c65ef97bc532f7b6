"""Access permissions on mapped memory (``cuMemSetAccess``), and waits for the devices that have access.

``cuMemUnmap`` does not wait for queued work that uses the memory, so the host waits for this work first.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from streamalloc.core.errors import ClosedError
from streamalloc.core.internal import (
    Device,
    Event,
    Stream,
    StreamLike,
    as_stream,
    await_device,
    known_location,
    work,
)
from streamalloc.core.properties import MemAccess, MemAccessDesc, MemLocation, MemLocationType
from streamalloc.core.session import Session, session_of

Place: TypeAlias = Device | MemLocation
Access: TypeAlias = Place | Iterable[Place] | Mapping[Place, MemAccess] | None
"""Type of the argument ``access``: a device or location, several of these, or a dictionary with the :class:`MemAccess`
of each. None names no device. A device or location without a :class:`MemAccess` gets read and write access, unless the
function has another default.
"""

Rights: TypeAlias = dict[MemLocation, MemAccess]
"""Permission of each location. The host is one location, ``MemLocation.host()``, whatever NUMA node was named."""


def rights_of(access: Access, session: Session, permission: MemAccess = MemAccess.READWRITE) -> Rights:
    """Return the argument ``access`` as a dict of permissions by location. Locations that are given without a
    permission get ``permission``. Raises TypeError for something that is no device, location or permission, and
    ValueError for a device that ``session``'s driver does not have.
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
        # One key for the host: the driver has one permission for it, whatever NUMA node is named.
        rights[MemLocation.host() if location.on_host else location] = allowed
    return rights


def structs_of(rights: Rights) -> list[object]:
    """Return permissions as a list of ``CUmemAccessDesc`` structs. Do not modify the structs, because equal permissions
    give the same list.
    """
    return _structs(tuple(rights.items()))


@functools.lru_cache
def _structs(rights: tuple[tuple[MemLocation, MemAccess], ...]) -> list[object]:
    return [MemAccessDesc(location, permission).to_driver() for location, permission in rights]


After: TypeAlias = Event | StreamLike | Iterable[Any] | None
"""Type of the argument ``after``, the work to wait for: an event, a stream, or several of these. ``()`` means no work.
None means all work of the devices with access.
"""


def accessing(access: Iterable[dict[MemLocation, MemAccess]]) -> set[int]:
    """Return the ordinals of the devices to which at least one of the permission dicts in ``access`` gives access."""
    return {
        location.id
        for rights in access
        for location, permission in rights.items()
        if permission and location.type is MemLocationType.DEVICE
    }


def wait_for_users(after: After, session: Session, access: Iterable[dict[MemLocation, MemAccess]]) -> None:
    """Block the host until the work of ``after`` is done. None means all work of the devices to which ``access`` gives
    a permission; deferred releases are then attempted, too. Raises the errors of :func:`ends_of`, and CudaError.
    """
    if after is None:
        for ordinal in sorted(accessing(access)):
            await_device(session, ordinal)
        work(session)
        return
    for one in [*ends_of(after, session)]:
        with session.relaxed():
            one.synchronize()


def ends_of(after: object, session: Session) -> Iterator[Event | Stream]:
    """Yield the events and streams that the argument ``after`` names, after a check of each. Raises TypeError for other
    objects, ValueError for events and streams of another driver, ClosedError for closed ones, and CaptureError for a
    stream that is being captured.
    """
    for one in each_of(after):
        if not isinstance(one, Event):
            one = as_stream(one, session, after=True, wanted="after must be an Event, a Stream")
            one.refuse_capture("cuStreamSynchronize", "after: name events or streams outside of the capture")
        elif session_of(one) is not session:
            raise ValueError(f"after: {one!r} belongs to another driver")
        elif one.closed:
            raise ClosedError(f"after: {one!r} was closed")
        yield one


def each_of(after: object) -> Iterable[Any]:
    """Return the events and streams that the argument ``after`` names: ``after`` alone if it is one event or stream,
    otherwise its elements. ``after`` must not be None. Nothing is checked.
    """
    several = isinstance(after, (list, tuple, set, frozenset)) or (
        isinstance(after, Iterable) and not hasattr(after, "__cuda_stream__")
    )
    return after if several else (after,)  # type: ignore[return-value]


def listed(after: After) -> list[Any] | None:
    """Return the events and streams that ``after`` names as a list, which can be read more than once, unlike an
    iterator. None, which means all work, stays None.
    """
    return None if after is None else [*each_of(after)]


def copying_stream(stream: StreamLike | None, owner: Any) -> Stream:
    """Return the stream for the copies of an eviction, a restore or a swap: ``stream``, or by default ``owner.stream``.
    Raises TypeError if this is no stream, ValueError if it belongs to another driver, ClosedError if it was closed, and
    CaptureError if it is being captured.
    """
    named: Any = getattr(owner, "stream", None) if stream is None else stream
    ordered = as_stream(named, session_of(owner))
    ordered.refuse_capture("cuMemUnmap", "memory cannot be evicted or restored in a capture")
    return ordered
