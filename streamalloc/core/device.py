"""GPUs: their properties, their streams and events, and checks of arguments that name a device or a location."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from streamalloc.core.deferred import MOST_PER_SYNC, work, work_all
from streamalloc.core.event import Event
from streamalloc.core.properties import MemLocation, MemLocationType, bindings_member, checked_type
from streamalloc.core.session import Session
from streamalloc.core.stream import OwnStream, Stream, draining, legacy_stream, per_thread_stream
from streamalloc.driver import default as default_driver
from streamalloc.driver.internal import check_name, enum_member
from streamalloc.formats.html import escape, gauge
from streamalloc.formats.sizes import counted

if TYPE_CHECKING:
    import uuid

    from streamalloc.core.capabilities import Capabilities
    from streamalloc.core.graph import GraphMemory
    from streamalloc.driver import Driver


class MemoryInfo(NamedTuple):
    """A device's memory in bytes, as ``cuMemGetInfo`` reports it: the result of :meth:`Device.memory_info`."""

    free: int
    """Free bytes of the device's memory."""
    total: int
    """Total bytes of the device's memory."""


class Device:
    """One GPU of a driver.

    Devices are values: two devices with the same ordinal and driver are equal. All objects that come from a device use
    its driver. The device's primary context is retained on first use and never released. The context is made current
    only for calls that need one.

    Parameters
    ----------
    ordinal
        Number of the GPU, from 0, among those that ``CUDA_VISIBLE_DEVICES`` makes visible.
    driver
        The driver to use; by default the result of :func:`streamalloc.driver.default`.

    Raises
    ------
    DriverNotFoundError
        No driver was named and this machine has none.
    TypeError, ValueError
        ``ordinal`` is not an integer, or there is no such device.
    """

    __slots__ = ("_session", "ordinal")

    def __init__(self, ordinal: int = 0, *, driver: Driver | None = None) -> None:
        ordinal = checked_type("ordinal", ordinal, int)
        self._session = session_for(None, driver)
        count = int(self._session.call("cuDeviceGetCount"))
        if not 0 <= ordinal < count:
            raise ValueError(f"ordinal={ordinal}: this driver has {counted(count, 'device')}, numbered from 0")
        self.ordinal: int = ordinal

    @classmethod
    def _of(cls, ordinal: int, session: Session) -> Device:
        """Return a device for an ordinal that is known to be valid, without a driver call."""
        device = cls.__new__(cls)
        device._session = session
        device.ordinal = ordinal
        return device

    @staticmethod
    def count(driver: Driver | None = None) -> int:
        """Return the number of devices of ``driver``, by default the default driver (``cuDeviceGetCount``). Raises
        DriverNotFoundError if no driver was named and this machine has none.
        """
        return int(session_for(None, driver).call("cuDeviceGetCount"))

    @classmethod
    def all(cls, driver: Driver | None = None) -> list[Device]:
        """Return all devices of ``driver``, by default the default driver, in the order of their ordinals
        (``cuDeviceGetCount``). Raises DriverNotFoundError as the constructor does.
        """
        session = session_for(None, driver)
        return [cls._of(ordinal, session) for ordinal in range(int(session.call("cuDeviceGetCount")))]

    @property
    def driver(self) -> Driver:
        """The driver the device belongs to."""
        return self._session.driver

    @property
    def name(self) -> str:
        """The product name (``cuDeviceGetName``)."""
        raw: bytes = self._session.call("cuDeviceGetName", 256, self.ordinal)
        return raw.split(b"\0")[0].decode()

    @property
    def uuid(self) -> uuid.UUID:
        """UUID of the device, the same in every process (``cuDeviceGetUuid``)."""
        from uuid import UUID

        return UUID(bytes=bytes(self._session.call("cuDeviceGetUuid", self.ordinal).bytes))

    @property
    def pci_bus_id(self) -> str:
        """The PCI address, as ``domain:bus:device.function`` (``cuDeviceGetPCIBusId``)."""
        raw: bytes = self._session.call("cuDeviceGetPCIBusId", 32, self.ordinal)
        return raw.split(b"\0")[0].decode()

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor number of the compute capability (``cuDeviceGetAttribute``)."""
        return self.attribute("COMPUTE_CAPABILITY_MAJOR"), self.attribute("COMPUTE_CAPABILITY_MINOR")

    @property
    def total_memory(self) -> int:
        """The device's memory in bytes (``cuDeviceTotalMem``)."""
        return int(self._session.call("cuDeviceTotalMem", self.ordinal))

    @property
    def location(self) -> MemLocation:
        """The device's memory as a :class:`MemLocation`, for properties of pools and physical memory."""
        return MemLocation.device(self.ordinal)

    @property
    def supports(self) -> Capabilities:
        """Capabilities of the device, queried at each read (``cuDeviceGetAttribute``). ``print`` shows a table."""
        from streamalloc.core.capabilities import query_capabilities

        return query_capabilities(self._session, self.ordinal)

    @property
    def default_stream(self) -> Stream:
        """The legacy default stream, which synchronises with every blocking stream; the same object each time."""
        return legacy_stream(self)

    @property
    def per_thread_stream(self) -> Stream:
        """The calling thread's per-thread default stream. On another thread, the legacy stream stands for this object
        in what comes after its work: in a free, wait, record, query or synchronisation. Work that is queued on this
        object goes to the per-thread stream of the thread that queues it.

        Synchronise the stream before its thread ends. If the stream's work then still uses memory of pools, driver 580
        hangs.
        """
        return per_thread_stream(self)

    @property
    def graph_memory(self) -> GraphMemory:
        """Memory of the device that graphs use and reserve, apart from the device's pools."""
        from streamalloc.core.graph import GraphMemory

        return GraphMemory(self)

    def attribute(self, name: str) -> int:
        """Return the value of a device attribute (``cuDeviceGetAttribute``). ``name`` may omit the prefix
        ``CU_DEVICE_ATTRIBUTE_``.

        Raises
        ------
        TypeError, ValueError
            ``name`` is no text, or no attribute has this name.
        NotSupportedError
            The installed bindings do not have the attribute; newer bindings do.
        InvalidValueError
            The driver does not have the attribute.
        """
        prefix = "CU_DEVICE_ATTRIBUTE_"
        full = prefix + checked_type("name", name, str).removeprefix(prefix)
        if enum_member("CUdevice_attribute", full) is None:
            check_name("CUdevice_attribute", prefix, name.removeprefix(prefix))
        member = bindings_member("CUdevice_attribute", full)
        return int(self._session.call("cuDeviceGetAttribute", member, self.ordinal))

    def memory_info(self) -> MemoryInfo:
        """Make the deferred releases that are possible now, then return the free and total memory in bytes
        (``cuMemGetInfo``).
        """
        work(self._session)
        free, total = self._session.call_in(self.ordinal, "cuMemGetInfo")
        return MemoryInfo(int(free), int(total))

    def can_access(self, peer: Device) -> bool:
        """Whether this device can reach ``peer``'s memory directly (``cuDeviceCanAccessPeer``); True for itself.

        Raises
        ------
        TypeError, ValueError
            ``peer`` is not a Device, or belongs to another driver.
        """
        if checked_type("peer", peer, Device)._session is not self._session:
            raise ValueError(
                f"peer={peer!r} belongs to another driver: {peer._session.driver!r}, not {self._session.driver!r}"
            )
        return peer.ordinal == self.ordinal or bool(
            self._session.call("cuDeviceCanAccessPeer", self.ordinal, peer.ordinal)
        )

    def create_stream(self, *, blocking: bool = False, priority: int = 0, name: str = "") -> Stream:
        """Create a stream (``cuStreamCreateWithPriority``).

        Parameters
        ----------
        blocking
            Whether the stream and the legacy default stream wait for each other.
        priority
            Work of streams with lower numbers runs first. The driver clamps the number to the range of the device.
        name
            A name for error messages, reports and ``repr``. It need not be unique.

        Raises
        ------
        TypeError
            ``priority`` is not an integer, or ``name`` is not a string.
        """
        checked_type("priority", priority, int)
        checked_type("name", name, str)
        return OwnStream._create(self, blocking, priority, name)

    def create_event(self, *, timing: bool = False, blocking_sync: bool = False, interprocess: bool = False) -> Event:
        """Create an event (``cuEventCreate``).

        Parameters
        ----------
        timing, blocking_sync, interprocess
            As for :class:`Event`.

        Raises
        ------
        ValueError
            Both ``timing`` and ``interprocess`` were given.
        """
        return Event(self, timing=timing, blocking_sync=blocking_sync, interprocess=interprocess)

    def synchronize(self) -> None:
        """Block the host until all work of the device's primary context is done (``cuCtxSynchronize``), then attempt
        deferred releases of all drivers.

        Raises
        ------
        CaptureError
            A stream of the device is being captured, or this thread captures a stream in a mode other than
            ``"relaxed"``. The capture is then invalid; await streams or events instead.
        """
        with draining(self._session, self.ordinal):
            self._session.call_in(self.ordinal, "cuCtxSynchronize")
        # Otherwise items of drivers that are no longer used would never be attempted.
        work_all(MOST_PER_SYNC)

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that makes the device's primary context current on this thread, and restores the
        earlier context at its end (``cuCtxPushCurrent``, ``cuCtxPopCurrent``).
        """
        return self._session.current(self.ordinal)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Device):
            return NotImplemented
        return self.ordinal == other.ordinal and self._session is other._session

    def __hash__(self) -> int:
        return hash((self.ordinal, id(self._session)))

    def __copy__(self) -> Device:
        return self

    def __deepcopy__(self, _: object) -> Device:
        return self

    def __reduce__(self) -> NoReturn:
        what = f"a Device belongs to a driver of this process and cannot be pickled: send its ordinal, {self.ordinal}"
        raise TypeError(f"{what}, and make a Device of that there")

    def __repr__(self) -> str:
        return f"<Device {self.ordinal}: {self.name}>"

    def _repr_html_(self) -> str:
        free, total = self.memory_info()
        capability = ".".join(map(str, self.compute_capability))
        about = f"<b>{escape(self.name)}</b> (device {self.ordinal}, compute capability {capability})"
        return f"{about}<br>{gauge(total - free, total)} in use"


DOMAIN_NEEDS = "locality domains need a device with that many of them: see device.supports.locality_domains"
"""Text for errors: the usual cause if the driver refuses memory of a locality domain."""

FABRIC_NEEDS = "fabric handles need a device that offers them and an IMEX channel: see `python -m streamalloc info`"


def location_of(name: str, where: object, allowed: str = "a Device or a MemLocation") -> MemLocation:
    """Return the location of ``where``, which is a Device, an ordinal, or a location. Otherwise raise TypeError: its
    message has the argument's ``name`` and the text ``allowed``.
    """
    if type(where) is int:
        return MemLocation.device(where)
    location = where.location if isinstance(where, Device) else where
    if not isinstance(location, MemLocation):
        raise TypeError(f"{name} must be {allowed}, not {type(where).__name__} ({where!r})")
    return location


def session_for(where: object, driver: Driver | None) -> Session:
    """Return the session of the driver of ``where`` if ``where`` is a Device; otherwise the session of ``driver``, by
    default the default driver. Raises ValueError if ``driver`` is not the driver of the Device ``where``, TypeError if
    ``driver`` is not a driver, and DriverNotFoundError if there is no default driver.
    """
    if not isinstance(where, Device):
        return Session.of(driver if driver is not None else default_driver())
    if driver is not None and driver is not where.driver:
        raise ValueError(f"driver={driver!r}: {where!r} belongs to another driver")
    return where._session


def check_device(name: str, device: object, session: Session | None = None) -> None:
    """Raise TypeError if ``device`` is not a Device, ValueError if it belongs to another driver than ``session``'s.
    ``name``: the argument's name, for errors.
    """
    found = checked_type(name, device, Device)
    if session is not None and found._session is not session:
        raise ValueError(f"{name}={device!r} belongs to another driver")


def check_location(session: Session, location: MemLocation) -> None:
    """Raise ValueError if ``location`` is a device that the driver does not have (``cuDeviceGetCount``), or that only
    other processes can use.
    """
    if not location.seen:
        raise ValueError(f"location={location}: this process does not see that device")
    if location.type is MemLocationType.DEVICE:
        count = int(session.call("cuDeviceGetCount"))
        if location.id >= count:
            raise ValueError(f"location id={location.id}: this driver has {counted(count, 'device')}")


def known_location(session: Session, name: str, where: object) -> MemLocation:
    """Return the location of ``where`` (:func:`location_of`). Raise TypeError if ``where`` names no location, and
    ValueError if ``where`` is a Device of another driver, or if ``session``'s driver has no such device. ``name``: the
    argument's name, for errors.
    """
    location = location_of(name, where)
    if isinstance(where, Device):
        check_device(name, where, session)
    else:
        check_location(session, location)
    return location
