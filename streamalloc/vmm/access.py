"""Access permissions on mapped memory (``cuMemSetAccess``), as arguments give them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from streamalloc.core.internal import (
    Device,
    MemAccess,
    MemAccessDesc,
    MemLocation,
    Session,
    check_location,
    location_of,
    session_of,
)

Place: TypeAlias = Device | MemLocation
Access: TypeAlias = Place | Iterable[Place] | Mapping[Place, MemAccess] | None
"""Permissions: a device or location, or several, which may read and write; or a permission for each in a mapping."""

Rights: TypeAlias = dict[MemLocation, MemAccess]


def rights_of(access: Access, session: Session, permission: MemAccess = MemAccess.READWRITE) -> Rights:
    """Convert an argument to permissions by location; ``permission`` is for locations given without one."""
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
        location = location_of("access", place)
        if isinstance(place, Device) and session_of(place) is not session:
            raise ValueError(f"access: {place!r} belongs to another driver")
        if not isinstance(allowed, MemAccess):
            raise TypeError(f"access of {location} must be a MemAccess, not {type(allowed).__name__} ({allowed!r})")
        if not isinstance(place, Device):
            check_location(session, location)
        # The driver keeps one permission for the host, whichever NUMA node is named.
        rights[MemLocation.host() if location.on_host else location] = allowed
    return rights


def structs_of(rights: Rights) -> list[object]:
    """Convert permissions to ``CUmemAccessDesc`` structs."""
    return [MemAccessDesc(location, permission).to_driver() for location, permission in rights.items()]
