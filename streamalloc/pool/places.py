"""Locations of addresses and of pools, also of those that other code allocated, and the default and current pools of a
location.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from streamalloc.core.errors import CudaError, InvalidDeviceError, InvalidValueError, NotSupportedError
from streamalloc.core.internal import Device, Residence
from streamalloc.core.properties import MemAccess, MemAllocationType, MemLocation, MemLocationType, bindings_member
from streamalloc.core.session import PerDriver, Session
from streamalloc.driver.internal import cuda

pool_locations: PerDriver[dict[int, MemLocation]] = PerDriver(lambda _: {})
"""Locations of the pools that have an object in this process, by driver handle."""

_HOST = int(cuda.CUmemorytype.CU_MEMORYTYPE_HOST)


class Address(NamedTuple):
    """The attributes of one address, ``number``. An attribute that the driver refuses to read is 0."""

    session: Session
    number: int

    def value(self, name: str) -> Any:
        """Return the value of the attribute ``CU_POINTER_ATTRIBUTE_<name>`` (``cuPointerGetAttribute``); 0 if the
        driver refuses to read it.
        """
        attribute = getattr(cuda.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
        try:
            return self.session.call("cuPointerGetAttribute", attribute, self.number)
        except InvalidValueError:
            return 0

    def integer(self, name: str) -> int:
        """Return the value of the attribute ``CU_POINTER_ATTRIBUTE_<name>`` as an int; 0 if the driver refuses to read
        it.
        """
        return int(self.value(name))


def residence_of(session: Session, address: int) -> Residence | None:
    """Return the location of the memory at ``address``, and whether it is managed. Return None for pageable host
    memory, freed memory, and addresses without memory.

    The location is found by the memory's pool, context or mapped allocation. ``CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`` is
    not used, because bindings 13.3 return 0 for every device. Captures stay valid.
    """
    with session.relaxed():
        ask = Address(session, address)
        kind = ask.integer("MEMORY_TYPE")
        if not kind:
            return None
        managed = bool(ask.integer("IS_MANAGED"))
        raw, context = ask.value("MEMPOOL_HANDLE"), ask.value("CONTEXT")
        if int(raw):
            allocation_type = MemAllocationType.MANAGED if managed else MemAllocationType.PINNED
            return Residence(location_of_pool(session, raw, kind == _HOST, allocation_type), managed)
        if kind == _HOST and not managed:
            return Residence(MemLocation.host(), managed)
        if int(context):
            return Residence(MemLocation.device(session.device_of(context)), managed)
        return Residence(_location_of_mapped(session, address), managed)


def _location_of_mapped(session: Session, address: int) -> MemLocation | None:
    """Return the location of mapped physical memory at ``address`` (``cuMemRetainAllocationHandle``); None for other
    memory, such as memory of graphs, and for multicast objects.
    """
    try:
        raw = session.call("cuMemRetainAllocationHandle", address)
    except CudaError:
        return None
    try:
        prop = session.call("cuMemGetAllocationPropertiesFromHandle", raw)
        return MemLocation.from_driver(prop.location)
    except CudaError:  # A multicast object has no location.
        return None
    finally:
        session.call("cuMemRelease", raw)


def location_of_pool(
    session: Session, raw: Any, on_host: bool, allocation_type: MemAllocationType
) -> MemLocation | None:
    """Return the location of the pool ``raw`` (``CUmemoryPool``); None if the location cannot be found. ``on_host`` and
    ``allocation_type`` describe the pool's memory.

    Not all bindings can read the location from the driver. If the pool has no object in this process, the location is
    inferred:

    * Device memory is on the only device with access (``cuMemPoolGetAccess``), because a device always has access to
      its own pools.
    * A pool that is the default or the current pool of a location is in that location.
    * Other host memory counts as host memory without a NUMA node.
    """
    known = pool_locations(session).get(int(raw))
    if known is not None:
        return known
    devices = list(map(MemLocation.device, range(int(session.call("cuDeviceGetCount")))))
    managed = allocation_type is MemAllocationType.MANAGED
    if not on_host and not managed:
        candidates = [device for device in devices if has_access(session, raw, device)]
        if len(candidates) == 1:
            return candidates[0]
    else:
        nodes = {Device(device.id, driver=session.driver).supports.host_numa_id for device in devices}
        candidates = [
            MemLocation.host(),
            *(MemLocation.host_numa(node) for node in nodes if node is not None and node >= 0),
        ]
        if managed:
            candidates += [*devices, MemLocation.none()]
    named = (place for place in candidates if int(raw) in _named_pools(session, place, allocation_type))
    return next(named, MemLocation.host() if on_host else None)


def _named_pools(session: Session, location: MemLocation, allocation_type: MemAllocationType) -> list[int]:
    """Return the handles of the default and the current pool of a location as ints; an empty list if the driver or the
    bindings refuse the queries.
    """
    try:
        return [int(existing_pool(session, which, location, allocation_type)) for which in ("Default", "")]
    except (InvalidValueError, InvalidDeviceError, NotSupportedError):
        return []


def has_access(session: Session, raw: Any, device: MemLocation) -> bool:
    """Return whether ``device`` has access to the memory of the pool ``raw`` (``cuMemPoolGetAccess``); False if the
    driver refuses the query.
    """
    try:
        flags = session.call("cuMemPoolGetAccess", raw, device.to_driver())
    except (InvalidValueError, InvalidDeviceError):
        return False
    return int(flags) != MemAccess.NONE


# -- default and current pools -------------------------------------------------------------------------------


def existing_pool(session: Session, which: str, location: MemLocation, allocation_type: MemAllocationType) -> Any:
    """Return the ``CUmemoryPool`` of a location's default pool (``which="Default"``: ``cuDeviceGetDefaultMemPool``,
    ``cuMemGetDefaultMemPool``) or current pool (``which=""``: ``cuDeviceGetMemPool``, ``cuMemGetMemPool``). Raises
    CudaError.
    """
    if has_calls_of_its_own(location, allocation_type):
        return session.call(f"cuDeviceGet{which}MemPool", location.id)
    return session.call(f"cuMemGet{which}MemPool", location.to_driver(), _driver_type(allocation_type))


def set_current_pool(session: Session, raw: Any, location: MemLocation, allocation_type: MemAllocationType) -> None:
    """Make the pool ``raw`` (``CUmemoryPool``) the current pool of a location and allocation type
    (``cuDeviceSetMemPool``, ``cuMemSetMemPool``). Raises CudaError.
    """
    if has_calls_of_its_own(location, allocation_type):
        session.call("cuDeviceSetMemPool", location.id, raw)
    else:
        session.call("cuMemSetMemPool", location.to_driver(), _driver_type(allocation_type), raw)


def has_calls_of_its_own(location: MemLocation, allocation_type: MemAllocationType) -> bool:
    """Return whether the functions ``cuDevice*MemPool``, which all bindings have, serve this location. Other locations
    need ``cuMem*MemPool``.
    """
    return location.type is MemLocationType.DEVICE and allocation_type is MemAllocationType.PINNED


def _driver_type(allocation_type: MemAllocationType) -> Any:
    return bindings_member("CUmemAllocationType", f"CU_MEM_ALLOCATION_TYPE_{allocation_type.name}")
