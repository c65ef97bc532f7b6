"""Who may use mapped memory, as arguments take it."""

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
)

__all__ = ["Access", "Rights", "rights_of", "structs_of"]

Place: TypeAlias = Device | MemLocation
Access: TypeAlias = Place | Iterable[Place] | Mapping[Place, MemAccess] | None
"""Who gets access: a device or location, several of them, or a mapping that says which access each gets."""

Rights: TypeAlias = dict[MemLocation, MemAccess]


def rights_of(access: Access, session: Session, flags: MemAccess = MemAccess.READWRITE) -> Rights:
    """The rights that an argument means; ``flags`` are for places that it does not say them of."""
    if access is None:
        return {}
    if isinstance(access, (Device, MemLocation)):
        pairs: Iterable[tuple[object, MemAccess]] = ((access, flags),)
    elif isinstance(access, Mapping):
        pairs = access.items()
    elif isinstance(access, Iterable):
        pairs = ((place, flags) for place in access)
    else:
        raise TypeError(f"access must name Devices or MemLocations, not {type(access).__name__} ({access!r})")
    rights: Rights = {}
    for place, allowed in pairs:
        location = location_of("access", place)
        if isinstance(place, Device) and place._session is not session:
            raise ValueError(f"access: {place!r} belongs to another driver")
        if not isinstance(allowed, MemAccess):
            raise TypeError(f"access of {location} must be a MemAccess, not {type(allowed).__name__} ({allowed!r})")
        if not isinstance(place, Device):
            check_location(session, location)
        # The driver knows one access of the host, under whichever name it was given.
        rights[MemLocation.host() if location.on_host else location] = allowed
    return rights


def structs_of(rights: Rights) -> list[object]:
    """The rights as ``CUmemAccessDesc`` structs."""
    return [MemAccessDesc(location, flags).to_driver() for location, flags in rights.items()]
