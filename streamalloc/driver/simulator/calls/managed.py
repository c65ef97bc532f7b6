"""Managed memory: allocation, prefetches, advice and the queries of both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from streamalloc.driver.bindings import cuda

from .. import arguments
from ..allocations import Advice, Allocation
from ..arguments import DevicePointer, Size, Stream, UnsignedInt
from ..constants import HOST, LEGACY_STREAM, Location, Place
from ..errors import NotModelled, Result, check, need, not_modelled
from ..managed import Discard, common, pages_of, prefetch
from ..timeline import Operation
from .base import EDGE_DATA, Calls, call

_GLOBAL, _HOST, _SINGLE = 1, 2, 4  # CUmemAttach_flags
_READ_MOSTLY, _PREFERRED, _ACCESSED_BY = (1, 2), (3, 4), (5, 6)  # CUmem_advise: to set, to unset
_CPU, _NONE = -1, -2  # CU_DEVICE_CPU, CU_DEVICE_INVALID
_INT = 4
_PREFIX = "CU_MEM_RANGE_ATTRIBUTE_"


class ManagedCalls(Calls):
    """cuMemAllocManaged, cuMemPrefetch*, cuMemDiscard*, cuMemAdvise, cuMemRangeGet*, cuStreamAttachMemAsync."""

    def cuMemAllocManaged(self, bytesize: Size, flags: UnsignedInt) -> Any:
        context = self._machine.current()
        self._unsafe_during_capture()
        check(bytesize and flags in (_GLOBAL, _HOST))
        able = self._machine.supports("MANAGED_MEMORY", context.device.ordinal)
        check(able, Result.CUDA_ERROR_NOT_SUPPORTED)
        return cuda.CUdeviceptr(self._machine.managed.allocate(bytesize, context))

    def cuStreamAttachMemAsync(self, hStream: Stream, dptr: DevicePointer, length: Size, flags: UnsignedInt) -> None:
        """On devices with concurrent managed access an association has no effect, and nothing shows it."""
        allocation = self._managed(dptr, length)
        check(flags in (_GLOBAL, _HOST, _SINGLE) and dptr == allocation.base and length in (0, allocation.size))
        check(flags != _SINGLE or hStream.handle > LEGACY_STREAM)
        not_modelled(allocation.pool is not None, "cuStreamAttachMemAsync of memory of a pool")
        able = self._machine.supports("CONCURRENT_MANAGED_ACCESS", hStream.context.device.ordinal)
        not_modelled(not able, "cuStreamAttachMemAsync on a device without concurrent managed access")
        self._check_launch(hStream, "cuStreamAttachMemAsync")
        hStream.submit(Operation())

    def _managed(self, address: int, size: int) -> Allocation:
        allocation = need(self._machine.allocations.find(address))
        check(allocation.managed and address + size <= allocation.base + allocation.size)
        return allocation

    def _place(self, location: Any, allowed: tuple[int, ...]) -> Place:
        """A location; the NUMA node nearest to the caller is node 0."""
        place = arguments.place(location)
        if place.type == Location.DEVICE:
            check(0 <= place.id < len(self._machine.devices), Result.CUDA_ERROR_INVALID_DEVICE)
            # as users report of prefetches and advice (rapidsai/rmm#2023, intel/llvm#4809, owl-project/owl#43)
            able = self._machine.supports("CONCURRENT_MANAGED_ACCESS", place.id)
            check(able, Result.CUDA_ERROR_INVALID_DEVICE)
            return place
        check(place.type in allowed)
        if place.type == Location.HOST:
            return HOST
        node = place.id if place.type == Location.HOST_NUMA else 0
        not_modelled(not 0 <= node < self._machine.profile.numa_nodes, f"the NUMA node {node} as a location")
        return Place(Location.HOST_NUMA, node)

    # -- prefetches and discards -----------------------------------------------------------------------------

    def cuMemPrefetchAsync(
        self, devPtr: DevicePointer, count: Size, location: cuda.CUmemLocation, flags: UnsignedInt, hStream: Any
    ) -> None:
        place = self._place(location, _ANYWHERE)
        stream = self._find(Stream, hStream)
        check(not flags and count)
        allocation = self._managed(devPtr, count)
        able = self._machine.supports("CONCURRENT_MANAGED_ACCESS", stream.context.device.ordinal)
        check(able, Result.CUDA_ERROR_INVALID_DEVICE)
        self._check_launch(stream, "cuMemPrefetchAsync")
        pages_of(allocation).change(devPtr, devPtr + count, prefetch(place))
        stream.submit(Operation())

    def _managed_batch(self, name: str, dptrs: Any, sizes: Any, count: int, *more: Any) -> None:
        """``more``: where prefetches go to, if there are any, then flags and a stream."""
        *destinations, flags, handle = more
        addresses = [int(one) for one in arguments.structs("dptrs", dptrs, cuda.CUdeviceptr, count)]
        lengths = arguments.numbers(sizes, count)
        check(count and all(lengths) and not flags and handle not in (0, LEGACY_STREAM))
        stream = self._machine.stream(handle)
        concurrent = self._machine.supports("CONCURRENT_MANAGED_ACCESS")
        not_modelled(not concurrent, f"{name} where a device lacks concurrent managed access")
        ranges = list(zip(addresses, lengths, strict=True))
        allocations = [self._managed(*one) for one in ranges]
        self._check_launch(stream, name)
        places = self._places_of_batch(*destinations, count) if destinations else []
        for allocation, (address, size), place in zip(allocations, ranges, places, strict=False):
            pages_of(allocation).change(address, address + size, prefetch(place))
        stream.submit(Discard(self._machine.banks, ranges) if "Discard" in name else Operation())

    _RANGES, _LAST = "dptrs sizes count:Size", "flags:UnsignedLongLong hStream"
    _TO_PLACES = f"{_RANGES} prefetchLocs prefetchLocIdxs numPrefetchLocs:Size {_LAST}"
    cuMemPrefetchBatchAsync = call(_TO_PLACES, _managed_batch, "cuMemPrefetchBatchAsync")
    cuMemDiscardBatchAsync = call(f"{_RANGES} {_LAST}", _managed_batch, "cuMemDiscardBatchAsync")
    cuMemDiscardAndPrefetchBatchAsync = call(_TO_PLACES, _managed_batch, "cuMemDiscardAndPrefetchBatchAsync")

    def _places_of_batch(self, locations: Any, indices: Any, number: int, count: int) -> list[Place]:
        """The place of each range: that of the last index that is not behind it."""
        given = arguments.structs("prefetchLocs", locations, cuda.CUmemLocation, number)
        begins = arguments.numbers(indices, number)
        check(begins and begins[0] == 0 and begins[-1] < count and begins == sorted(set(begins)))
        places = [self._place(one, _ANYWHERE) for one in given]
        return [places[sum(begin <= at for begin in begins) - 1] for at in range(count)]

    # -- advice ----------------------------------------------------------------------------------------------

    def cuMemAdvise(
        self, devPtr: DevicePointer, count: Size, advice: cuda.CUmem_advise, location: cuda.CUmemLocation
    ) -> None:
        number = int(advice)
        places = {
            _PREFERRED[0]: (Location.HOST, Location.HOST_NUMA, Location.HOST_NUMA_CURRENT),
            **dict.fromkeys(_ACCESSED_BY, (Location.HOST,)),
        }
        place = self._place(location, places[number]) if number in places else None
        check(count)
        allocation = self._managed(devPtr, count)

        def change(before: Advice) -> Advice:
            if number in _READ_MOSTLY:
                return replace(before, read_mostly=number == _READ_MOSTLY[0])
            if number in _PREFERRED:
                return replace(before, preferred=place)
            assert place is not None
            by = before.accessed_by
            return replace(before, accessed_by=by | {place} if number == _ACCESSED_BY[0] else by - {place})

        check(number in (*_READ_MOSTLY, *_PREFERRED, *_ACCESSED_BY))
        pages_of(allocation).change(devPtr, devPtr + count, change)

    if not EDGE_DATA:  # earlier bindings take other arguments
        del cuMemPrefetchAsync, cuMemAdvise

    def cuMemRangeGetAttribute(self, dataSize: Size, attribute: Any, devPtr: DevicePointer, count: Size) -> Any:
        arguments.member("attribute", attribute, cuda.CUmem_range_attribute)
        return self._read_range(dataSize, attribute, devPtr, count)

    def cuMemRangeGetAttributes(
        self, dataSizes: Any, attributes: Any, numAttributes: Size, devPtr: DevicePointer, count: Size
    ) -> list[Any]:
        wanted = arguments.members("attributes", attributes, cuda.CUmem_range_attribute, numAttributes)[:numAttributes]
        sizes = arguments.numbers(dataSizes, numAttributes)
        check(numAttributes)
        return [self._read_range(size, one, devPtr, count) for size, one in zip(sizes, wanted, strict=True)]

    def _read_range(self, size: int, attribute: Any, address: int, count: int) -> Any:
        check(count)
        advice = pages_of(self._managed(address, count)).over(address, address + count)
        name = attribute.name.removeprefix(_PREFIX)
        if name == "ACCESSED_BY":
            check(size and size % _INT == 0)
            common_to_all = frozenset.intersection(*(one.accessed_by for one in advice))
            numbers = sorted((_number(place) for place in common_to_all), key=lambda one: (one < 0, one))
            fits = size // _INT
            return [*numbers[:fits], *[_NONE] * (fits - len(numbers))]
        check(size == _INT)
        if name == "READ_MOSTLY":
            return int(all(one.read_mostly for one in advice))
        what, _, part = name.partition("_LOCATION")
        if what not in ("PREFERRED", "LAST_PREFETCH"):
            raise NotModelled(f"cuMemRangeGetAttribute({attribute.name})")
        place = common(one.preferred if what == "PREFERRED" else one.prefetched for one in advice)
        if not part:
            return _number(place)
        if part == "_TYPE":
            return Location.NONE if place is None else place.type
        return _NONE if place is None else place.id  # to be ignored where the type is none, or the host


_ANYWHERE = (Location.HOST, Location.HOST_NUMA, Location.HOST_NUMA_CURRENT)


def _number(place: Place | None) -> int:
    """A place as a device id; all of the host is one."""
    return _NONE if place is None else place.id if place.type == Location.DEVICE else _CPU
