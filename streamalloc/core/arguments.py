"""Arguments that name a device or a location, checked before the driver is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamalloc.core.device import Device
from streamalloc.core.properties import MemLocation, MemLocationType
from streamalloc.core.session import Session
from streamalloc.driver import default as default_driver

if TYPE_CHECKING:
    from streamalloc.driver import Driver

FABRIC_NEEDS = "fabric handles need a device that offers them and an IMEX channel: see `python -m streamalloc info`"


def location_of(name: str, where: object, allowed: str = "a Device or a MemLocation") -> MemLocation:
    """The location of a device, or the location itself; ``name`` is the name of the argument, for errors."""
    location = where.location if isinstance(where, Device) else where
    if not isinstance(location, MemLocation):
        raise TypeError(f"{name} must be {allowed}, not {type(where).__name__} ({where!r})")
    return location


def session_for(where: object, driver: Driver | None) -> Session:
    """The session of a device's driver, else of the driver given, else of the default one."""
    if not isinstance(where, Device):
        return Session.of(driver if driver is not None else default_driver())
    if driver is not None and driver is not where.driver:
        raise ValueError(f"driver={driver!r}: {where!r} belongs to another driver")
    return where._session


def check_device(name: str, device: object, session: Session | None = None) -> None:
    """Raise unless ``device`` is a Device, of the session's driver; ``name`` is the name of the argument."""
    if not isinstance(device, Device):
        raise TypeError(f"{name} must be a Device, not {type(device).__name__} ({device!r})")
    if session is not None and device._session is not session:
        raise ValueError(f"{name}={device!r} belongs to another driver")


def check_location(session: Session, location: MemLocation) -> None:
    """Raise ``ValueError`` for a device that this driver does not have."""
    if not location.seen:
        raise ValueError(f"location id={location.id}: this process does not see that device")
    if location.type is MemLocationType.DEVICE:
        count = int(session.call("cuDeviceGetCount"))
        if location.id >= count:
            raise ValueError(f"location id={location.id}: this driver has {count} device{'' if count == 1 else 's'}")
