"""Driver calls for memory pools and for stream-ordered allocation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamalloc.driver.bindings import check_readable, cuda, read_handle_types
from streamalloc.simulator import arguments
from streamalloc.simulator.allocations import DeviceMemory, GraphAllocation, PoolMemory
from streamalloc.simulator.arguments import Device, DeviceNumber, DevicePointer, PoolHandle, Size, Stream
from streamalloc.simulator.calls.base import Calls
from streamalloc.simulator.constants import MANAGED, NO_ACCESS, PINNED, READ, READ_WRITE, HandleType, Location, Place
from streamalloc.simulator.errors import Result, check, need, not_modelled
from streamalloc.simulator.pool import OpenedPool, Pool
from streamalloc.simulator.scheduler import Operation

_USAGE_FLAGS = 0xFFFF
_TOO_LARGE_MAX_SIZE = 1 << 46

_SWITCHES = {1: "follow_events", 2: "opportunistic", 3: "internal_dependencies"}
_NUMBERS = {4: "threshold", 5: "reserved", 6: "reserved_high", 7: "used", 8: "used_high"}
"""Names of fields of :class:`Pool` by the number of the attribute (CUmemPool_attribute), as ``_SWITCHES`` has them for
the reuse policies.
"""
_PROPERTIES: dict[int, tuple[int, Callable[[Pool], Any]]] = {
    9: (13010, lambda pool: pool.allocation_type),
    10: (13010, lambda pool: pool.handle_types),
    11: (13010, lambda pool: pool.place.id),
    12: (13010, lambda pool: pool.place.type),
    13: (13010, lambda pool: cuda.cuuint64_t(pool.max_size)),
    14: (13010, lambda pool: 0),
    15: (13040, lambda pool: -1),
}
"""Further members of CUmemPool_attribute: for each, the first driver version that has it, and a function that reads its
value from a pool.
"""


class PoolCalls(Calls):
    """The calls cuMemPool* without those for sharing, cuMemAllocAsync, cuMemAllocFromPoolAsync, cuMemFreeAsync, and the
    calls for default and current pools (cu*MemPool).
    """

    # -- making and ending -----------------------------------------------------------------------------------

    def cuMemPoolCreate(self, poolProps: cuda.CUmemPoolProps) -> Any:
        props = poolProps
        self._unsafe_during_capture()
        place = arguments.place(props.location)
        kind, handle_types = int(props.allocType), read_handle_types(props)
        max_size, usage = int(props.maxSize), int(props.usage)
        if kind == MANAGED:
            check(self._is_place(place) or place.type == Location.NONE)
            check(not handle_types and not max_size and not usage)
            # As documented, devices without concurrent managed access give this result code.
            check(self.supports("CONCURRENT_MANAGED_ACCESS"), Result.CUDA_ERROR_NOT_SUPPORTED)
        else:
            check(kind == PINNED and self._is_place(place))
            check(handle_types & ~(HandleType.POSIX_FD | HandleType.FABRIC) == 0)
            check(not (place.type == Location.HOST and handle_types))
            check(usage & ~_USAGE_FLAGS == 0)
            check(max_size < _TOO_LARGE_MAX_SIZE, Result.CUDA_ERROR_OUT_OF_MEMORY)
            self._check_kind_of_pool(place, handle_types)
        return cuda.CUmemoryPool(self.pools.create(place, kind, handle_types, max_size, usage=usage).handle)

    def _check_kind_of_pool(self, place: Place, handle_types: int) -> None:
        """Raise :class:`NotModelled` for a kind of pool that the devices of this profile do not support: the real
        driver's result code is unknown.
        """
        devices = self.devices if place.device is None else [self.devices[place.device]]
        unable = [one for one in devices if handle_types & ~one.attributes.get("MEMPOOL_SUPPORTED_HANDLE_TYPES", 0)]
        not_modelled(unable, "cuMemPoolCreate with handle types that this profile's device lacks")
        name = {Location.HOST: "HOST_MEMORY_POOLS", Location.HOST_NUMA: "HOST_NUMA_MEMORY_POOLS"}.get(place.type)
        lacks = name and not self.supports(f"{name}_SUPPORTED")
        not_modelled(lacks, f"cuMemPoolCreate where this profile's device lacks {name}_SUPPORTED")

    def _is_place(self, place: Place) -> bool:
        if place.type == Location.DEVICE:
            return 0 <= place.id < len(self.devices)
        if place.type == Location.HOST_NUMA:
            return 0 <= place.id < self.profile.numa_nodes
        return place.type == Location.HOST

    def cuMemPoolDestroy(self, pool: PoolHandle) -> None:
        imported = self.pools.opened.get(pool)
        if imported is not None:
            self._destroy_imported(imported)
            return
        found = self.pools.get(pool)
        self._unsafe_during_capture()
        check(not found.implicit)
        current = self.pools.current
        for key in [key for key, value in current.items() if value is found]:
            del current[key]
        found.destroy()

    def _destroy_imported(self, pool: OpenedPool) -> None:
        """Destroy an imported pool. First the host waits for the frees of its allocations, and the work before them.

        Gives CUDA_ERROR_INVALID_VALUE while an allocation of the pool is imported.
        """
        check(not pool.imports)
        self.scheduler.wait(lambda: not pool.freed.unfinished())
        check(
            not pool.imports and self.pools.opened.pop(pool.handle, None)
        )  # Another thread may have destroyed the pool during the wait.
        pool.close()

    def _pool_or_import(self, handle: int) -> Pool | OpenedPool:
        return self.pools.opened.get(handle) or self.pools.get(handle)

    # -- attributes ------------------------------------------------------------------------------------------

    def cuMemPoolGetAttribute(self, pool: PoolHandle, attr: Any) -> Any:
        number = arguments.member("attr", attr, cuda.CUmemPool_attribute)
        check_readable("CUmemPool_attribute", attr)
        self._unsafe_during_capture()
        found = self.pools.get(pool)
        if number in _SWITCHES:
            return getattr(found, _SWITCHES[number])
        if number in _NUMBERS:
            return cuda.cuuint64_t(getattr(found, _NUMBERS[number]))
        since, read = _PROPERTIES[number]
        check(self.profile.driver_version >= since)
        not_modelled(found.managed or found.usage, f"{attr.name} of a managed pool, or of one with a usage")
        return read(found)

    def cuMemPoolSetAttribute(self, pool: PoolHandle, attr: Any, value: Any) -> None:
        number = arguments.member("attr", attr, cuda.CUmemPool_attribute)
        if number in _SWITCHES:
            switch = int(arguments.signed_int(value) != 0)
            self._unsafe_during_capture()
            setattr(self.pools.get(pool), _SWITCHES[number], switch)
            return
        if number not in _NUMBERS:
            raise TypeError(f"Unsupported attribute: {attr.name}")
        value.getPtr()  # The bindings accept only their own class here, and raise AttributeError for other objects.
        wanted = int(value)
        self._unsafe_during_capture()
        found = self.pools.get(pool)
        field = _NUMBERS[number]
        if field == "threshold":
            found.set_threshold(wanted)
            return
        # Only high-water marks among these attributes can be set, and only to 0. The mark then gets the current value.
        check(field.endswith("_high") and not wanted)
        setattr(found, field, getattr(found, field.removesuffix("_high")))

    def cuMemPoolTrimTo(self, pool: PoolHandle, minBytesToKeep: Size) -> None:
        self._unsafe_during_capture()
        self.pools.get(pool).trim(minBytesToKeep)

    # -- access ----------------------------------------------------------------------------------------------

    def cuMemPoolSetAccess(self, pool: PoolHandle, map: Any, count: Size) -> None:
        descriptors = arguments.structs("map", map, cuda.CUmemAccessDesc, count)
        found = self._pool_or_import(pool)
        check(count)
        wanted = [(arguments.place(one.location), int(one.flags)) for one in descriptors]
        if found.managed:
            return
        devices = [place.id for place, flags in wanted if place.type == Location.DEVICE and flags != READ]
        check(all(0 <= one < len(self.devices) for one in devices), Result.CUDA_ERROR_INVALID_DEVICE)
        self._unsafe_during_capture()
        check(all(flags != READ for _, flags in wanted), Result.CUDA_ERROR_NOT_SUPPORTED)
        for place, flags in wanted:
            self._check_access(found, place, flags)
        for place, flags in wanted:
            if place.device is not None and found.device is not None and flags == READ_WRITE:
                refused = not self.has_access(place.device, found.device)
                not_modelled(refused, "cuMemPoolSetAccess for a device that has no access to the other's memory")
        for place, flags in wanted:
            if place.type == Location.DEVICE and place.id != found.device:
                found.access[place.id] = flags

    @staticmethod
    def _check_access(pool: Pool | OpenedPool, place: Place, flags: int) -> None:
        if place.type == Location.DEVICE:
            check(not (place.id == pool.device and flags == NO_ACCESS), Result.CUDA_ERROR_INVALID_DEVICE)
        else:
            # The access of the host cannot change: the host can use all host pools, and no device pool.
            check(pool.device is None, Result.CUDA_ERROR_NOT_SUPPORTED)
            check(place.type in (Location.HOST, Location.HOST_NUMA))
            check(flags == READ_WRITE, Result.CUDA_ERROR_NOT_SUPPORTED)

    def cuMemPoolGetAccess(self, memPool: PoolHandle, location: cuda.CUmemLocation) -> Any:
        place = arguments.place(location)
        pool = self._pool_or_import(memPool)
        self._unsafe_during_capture()
        check(place.type in (Location.DEVICE, Location.HOST, Location.HOST_NUMA))
        check(place.device is None or 0 <= place.id < len(self.devices))
        allowed = pool.device is None if place.device is None else pool.accessible(place.id)
        allowed = allowed and not pool.managed
        return cuda.CUmemAccess_flags(READ_WRITE if allowed else NO_ACCESS)

    # -- default and current pools ---------------------------------------------------------------------------

    def cuDeviceGetDefaultMemPool(self, dev: Device) -> Any:
        return cuda.CUmemoryPool(self.pools.default(Place(Location.DEVICE, dev.ordinal)).handle)

    def cuDeviceGetMemPool(self, dev: DeviceNumber) -> Any:
        return cuda.CUmemoryPool(self.pools.current_or_default(self._device_place(dev)).handle)

    def cuDeviceSetMemPool(self, dev: DeviceNumber, pool: PoolHandle) -> None:
        self._set_current(self._device_place(dev), PINNED, pool)

    def _device_place(self, ordinal: int) -> Place:
        """Return the location of a device.

        In calls for a device's pools an unknown device gives CUDA_ERROR_INVALID_VALUE, not INVALID_DEVICE (observed on
        H200: test_contexts).
        """
        check(0 <= ordinal < len(self.devices))
        return Place(Location.DEVICE, ordinal)

    def cuMemGetDefaultMemPool(self, location: cuda.CUmemLocation, typename: cuda.CUmemAllocationType) -> Any:
        place, kind = self._location(location, typename)
        return cuda.CUmemoryPool(self.pools.default(place, kind).handle)

    def cuMemGetMemPool(self, location: cuda.CUmemLocation, typename: cuda.CUmemAllocationType) -> Any:
        place, kind = self._location(location, typename)
        return cuda.CUmemoryPool(self.pools.current_or_default(place, kind).handle)

    def cuMemSetMemPool(self, location: Any, typename: Any, pool: PoolHandle) -> None:
        self.pools.get(pool)
        self._unsafe_during_capture()  # The driver checks this before the location (observed on H200: test_pools).
        location = arguments.struct("location", location, cuda.CUmemLocation)
        kind = arguments.number("typename", typename, cuda.CUmemAllocationType)
        self._set_current(*self._location(location, kind), pool)

    def _location(self, location: Any, kind: int) -> tuple[Place, int]:
        place = arguments.place(location)
        check(place.type != Location.HOST_NUMA_CURRENT, Result.CUDA_ERROR_NOT_SUPPORTED)
        check(kind in (PINNED, MANAGED))
        check(self._is_place(place) or (place.type == Location.NONE and kind == MANAGED))
        return place, kind

    def _set_current(self, place: Place, kind: int, pool: int) -> None:
        found = self.pools.get(pool)
        self._unsafe_during_capture()
        key = self.pools.key(place, kind)
        check(self.pools.key(found.place, found.allocation_type) == key)
        self.pools.current[key] = found

    # -- allocation ------------------------------------------------------------------------------------------

    def cuMemAllocAsync(self, bytesize: Size, hStream: Stream) -> Any:
        pool = self.pools.current_or_default(Place(Location.DEVICE, hStream.context.device.ordinal))
        return cuda.CUdeviceptr(self._allocate_ordered(bytesize, pool, hStream))

    def cuMemAllocFromPoolAsync(self, bytesize: Size, pool: PoolHandle, hStream: Stream) -> Any:
        return cuda.CUdeviceptr(self._allocate_ordered(bytesize, self.pools.get(pool), hStream))

    def _allocate_ordered(self, size: int, pool: Pool, stream: Stream) -> int:
        captured = False
        if self.graphs.captures:
            captured = self._captured(stream)
            if not captured:
                self._unsafe_during_capture()
        if not size:
            return 0
        if captured:
            not_modelled(pool.managed, "allocating from a managed pool during a capture")
            check(pool.device is not None and not pool.handle_types, Result.CUDA_ERROR_NOT_SUPPORTED)
            return int(stream.capture.allocate(size, pool, stream))
        address, block = pool.take(size, stream)
        self.allocations.add(PoolMemory(address, size, pool.device, stream.context, pool, block))
        return address

    def cuMemFreeAsync(self, dptr: DevicePointer, hStream: Stream) -> None:
        stream = hStream
        if self.graphs.captures:
            if self._captured(stream):
                if dptr:
                    stream.capture.free(dptr, stream)
                return
            self._unsafe_during_capture()
        if not dptr:
            return
        allocation = need(self.allocations.at.get(dptr))
        check(isinstance(allocation, (PoolMemory, GraphAllocation, DeviceMemory)))
        self.scheduler.rank(stream)
        if isinstance(allocation, PoolMemory):
            self.allocations.remove(allocation)
            allocation.pool.free(allocation.block, allocation.size, stream)
        elif isinstance(allocation, GraphAllocation):
            self.allocations.remove(allocation)
            allocation.memory.freed(dptr, stream)
        else:
            self.freed.append((allocation, stream, stream.submit(Operation())))
