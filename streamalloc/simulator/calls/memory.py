"""Driver calls for memory outside of pools, and for pointer attributes.

The memory is: device memory, pinned and registered host memory, and managed memory with prefetches and advice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from streamalloc.driver.bindings import check_readable, cuda
from streamalloc.simulator import allocations, arguments
from streamalloc.simulator.arguments import DevicePointer, HostPointer, Size, Stream, UnsignedInt
from streamalloc.simulator.calls.base import EDGE_DATA, call
from streamalloc.simulator.calls.virtual import MAPPED_ATTRIBUTES, VirtualMemoryCalls, right_of_current
from streamalloc.simulator.constants import BLOCK, CHUNK, HOST, LEGACY_STREAM, NOWHERE, Location, Place, round_up
from streamalloc.simulator.errors import NotModelled, Result, check, need, need_a, not_modelled
from streamalloc.simulator.memory import Physical, ReservedExtent, is_host_memory
from streamalloc.simulator.scheduler import Operation, QueuedCall

_HOST_ALLOC_FLAGS = 0x7  # portable, device map, write combined
_HOST_REGISTER_FLAGS = 0xF
_HOST_REGISTER_SPECIAL = 0xC  # I/O memory, read only
_PORTABLE, _DEVICE_MAPPED, _WRITE_COMBINED = 1, 2, 4
_SYNC_MEMOPS = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
# -- cuPointerGetAttribute -----------------------------------------------------------------------------------

_MEMORY_TYPE_HOST, _MEMORY_TYPE_DEVICE = 1, 2


_OF_POOLS = (allocations.PoolMemory, allocations.GraphAllocation)
_POINTER_ATTRIBUTES: dict[str, Callable[[allocations.LiveMemory, int], Any]] = {
    "CONTEXT": lambda a, at: cuda.CUcontext(a.context.handle if a.context and not isinstance(a, _OF_POOLS) else 0),
    "MEMORY_TYPE": lambda a, at: _MEMORY_TYPE_HOST if a.on_host else _MEMORY_TYPE_DEVICE,
    "DEVICE_POINTER": lambda a, at: cuda.CUdeviceptr(at) if a.known else None,
    "HOST_POINTER": lambda a, at: at if a.on_host or a.managed else None,
    "SYNC_MEMOPS": lambda a, at: a.waits,
    "BUFFER_ID": lambda a, at: a.id,
    "IS_MANAGED": lambda a, at: a.managed,
    "DEVICE_ORDINAL": lambda a, at: _ordinal(a),
    "IS_LEGACY_CUDA_IPC_CAPABLE": lambda a, at: isinstance(a, allocations.DeviceMemory),
    "RANGE_START_ADDR": lambda a, at: cuda.CUdeviceptr(_range_start(a)),
    "RANGE_SIZE": lambda a, at: a.size,
    "MAPPED": lambda a, at: True,
    "ALLOWED_HANDLE_TYPES": lambda a, at: 0 if a.pool is None else a.pool.handle_types,
    "IS_GPU_DIRECT_RDMA_CAPABLE": lambda a, at: int(isinstance(a, allocations.DeviceMemory) and _has_rdma(a)),
    "ACCESS_FLAGS": lambda a, at: 3,  # 3: the device can read and write.
    "MEMPOOL_HANDLE": lambda a, at: cuda.CUmemoryPool(0 if a.pool is None else a.pool.handle),
}
_PREFIX = "CU_POINTER_ATTRIBUTE_"


def _has_rdma(allocation: allocations.LiveMemory) -> bool:
    return allocation.context is not None and allocation.context.device.attributes["GPU_DIRECT_RDMA_SUPPORTED"] == 1


def _range_start(allocation: allocations.LiveMemory) -> int:
    """Return RANGE_START_ADDR of an allocation.

    For memory of a host pool the driver gives no address, but the offset in the pool's chunk (observed on H200:
    test_plain_memory).
    """
    if isinstance(allocation, allocations.PoolMemory) and allocation.on_host:
        return allocation.block.start % CHUNK
    return allocation.base


def _ordinal(allocation: allocations.LiveMemory) -> int:
    """Return DEVICE_ORDINAL of an allocation: the device of its memory, else that of its context.

    For memory of a device that the process does not see, the value is 0. For memory of ``cuIpcOpenMemHandle``, it is
    the device that opened the memory. These values were read from libcuda, because cuda-bindings 13.3 return 0 for
    every pointer.
    """
    if allocation.device is not None:
        return max(allocation.device, 0)
    return 0 if allocation.context is None else allocation.context.device.ordinal


_ABSENT = {
    **dict.fromkeys(("DEVICE_POINTER", "RANGE_START_ADDR"), cuda.CUdeviceptr(0)),
    **dict.fromkeys(("SYNC_MEMOPS", "IS_MANAGED", "IS_LEGACY_CUDA_IPC_CAPABLE", "MAPPED"), False),
    **{"CONTEXT": cuda.CUcontext(0), "MEMPOOL_HANDLE": cuda.CUmemoryPool(0)},
}
"""Value that ``cuPointerGetAttributes`` gives for an address without an allocation, by attribute. For attributes that
are not listed it is 0.
"""


_GLOBAL, _HOST, _SINGLE = 1, 2, 4  # CUmemAttach_flags
_CPU, _NONE = -1, -2  # CU_DEVICE_CPU, CU_DEVICE_INVALID
_INT = 4


class MemoryCalls(VirtualMemoryCalls):
    """The calls cuMemAlloc, cuMemFree, cuMemHost*, cuMemGetInfo, cuPointer*, cuMemAllocManaged, cuStreamAttachMemAsync,
    cuMemPrefetch*, cuMemDiscard*, cuMemAdvise and cuMemRange*.
    """

    # -- device memory ---------------------------------------------------------------------------------------

    def cuMemAlloc(self, bytesize: Size) -> Any:
        return cuda.CUdeviceptr(self._allocate_plain(bytesize))

    def cuMemAllocPitch(self, WidthInBytes: Size, Height: Size, ElementSizeBytes: UnsignedInt) -> tuple[Any, int]:
        self.current()
        check(ElementSizeBytes in (4, 8, 16) and WidthInBytes and Height)
        pitch = round_up(WidthInBytes, self.profile.pitch)
        return cuda.CUdeviceptr(self._allocate_plain(pitch * Height)), pitch

    def _allocate_plain(self, size: int) -> int:
        context = self.current()
        self._unsafe_during_capture()
        check(size)
        device = context.device
        address, block, _ = need(device.heap.allocate(size), Result.CUDA_ERROR_OUT_OF_MEMORY)
        self.allocations.add(allocations.DeviceMemory(address, size, device.ordinal, context, block))
        return address

    def cuMemFree(self, dptr: DevicePointer) -> None:
        """Wait for all work on the device, then free the memory. Memory of a pool or a graph is freed without a wait.
        The call needs no context. The address 0 has no effect. Any other address at which no allocation begins gives
        CUDA_ERROR_INVALID_VALUE, and so do pinned, opened and mapped memory.
        """
        self._unsafe_during_capture()
        if not dptr:
            return
        allocation = need(self.allocations.at.get(dptr))
        check(isinstance(allocation, (allocations.DeviceMemory, allocations.ManagedMemory, *_OF_POOLS)))
        if isinstance(allocation, allocations.PoolMemory):
            self.allocations.remove(allocation)
            allocation.pool.free_now(allocation.block)
        elif isinstance(allocation, allocations.GraphAllocation):
            self.allocations.remove(allocation)
            allocation.memory.freed(dptr)  # No drain: the host does not wait, as for a pool.
        else:
            self.drain(allocation.device)
            check(self.allocations.at.get(dptr) is allocation)
            self.discard(allocation)

    def cuMemGetInfo(self) -> tuple[int, int]:
        bank = self.current().device.bank
        return bank.free, bank.total

    # -- host memory -----------------------------------------------------------------------------------------

    def _allocate_host(self, size: int, flags: int = 0) -> int:
        context = self.current()
        self._unsafe_during_capture()
        check(flags & ~_HOST_ALLOC_FLAGS == 0)
        if not size:
            return 0
        combined = flags & _WRITE_COMBINED
        got = context.device.pinned.allocate(size, combined, flags & _PORTABLE)
        address, block, portable = need(got, Result.CUDA_ERROR_OUT_OF_MEMORY)
        flags = combined | portable | _DEVICE_MAPPED
        self.allocations.add(allocations.HostMemory(address, size, None, context, block, flags))
        return address

    cuMemAllocHost = cuMemHostAlloc = call(_allocate_host)

    def cuMemFreeHost(self, p: HostPointer) -> None:
        self._unsafe_during_capture()
        if p:
            self._drop_host(p, False, Result.CUDA_ERROR_INVALID_VALUE)

    def cuMemHostRegister(self, p: HostPointer, bytesize: Size, Flags: UnsignedInt) -> None:
        context = self.current()
        self._unsafe_during_capture()
        check(p and bytesize and p + bytesize <= 1 << 64 and Flags & ~_HOST_REGISTER_FLAGS == 0)
        not_modelled(Flags & _HOST_REGISTER_SPECIAL, f"cuMemHostRegister with flags {Flags:#x}")
        end = p + bytesize
        check(not self.allocations.overlapping(p, end), Result.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
        check(not self.banks.arenas.overlapping(p, end) and is_host_memory(p, bytesize))
        self.allocations.add(allocations.HostMemory(p, bytesize, None, context, None, Flags | _DEVICE_MAPPED))

    def cuMemHostUnregister(self, p: HostPointer) -> None:
        # An address inside pinned or registered memory gives another result code (observed on H200: test_plain_memory).
        inside = isinstance(self.allocations.find(p), allocations.HostMemory)
        code = Result.CUDA_ERROR_INVALID_VALUE if inside else Result.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
        self._drop_host(p, True, code)

    def _drop_host(self, address: int, registered: bool, otherwise: Any) -> None:
        allocation = need(self.allocations.at.get(address), otherwise)
        check(isinstance(allocation, allocations.HostMemory) and (allocation.block is None) == registered, otherwise)
        self.drain()
        check(self.allocations.at.get(address) is allocation, otherwise)
        self.discard(allocation)

    def cuMemHostGetDevicePointer(self, p: HostPointer, Flags: UnsignedInt) -> Any:
        self.current()
        check(Flags == 0)
        self._host(p)
        return cuda.CUdeviceptr(p)

    def cuMemHostGetFlags(self, p: HostPointer) -> int:
        self.current()
        return self._host(p).flags

    def _host(self, address: int) -> allocations.HostMemory:
        return need_a(allocations.HostMemory, self.allocations.find(address))

    # -- asking about an address -----------------------------------------------------------------------------

    def cuMemGetAddressRange(self, dptr: DevicePointer) -> tuple[Any, int]:
        self.current()
        allocation = need(self.allocations.find(dptr), Result.CUDA_ERROR_NOT_FOUND)
        check(allocation.known, Result.CUDA_ERROR_NOT_FOUND)
        mapping, base = allocation.mapping, allocation.base
        if mapping is not None:
            not_modelled(mapping.is_multicast, "cuMemGetAddressRange of a multicast object")
            check(right_of_current(self, mapping, "ACCESS_FLAGS"), Result.CUDA_ERROR_NOT_FOUND)
            if mapping.memory.properties.device is None:
                # The driver returns no base address for mapped host memory (observed on H200: test_mappings).
                base = 0
        return cuda.CUdeviceptr(base), allocation.size

    def cuPointerGetAttribute(self, attribute: Any, ptr: DevicePointer) -> Any:
        check(arguments.member("attribute", attribute, cuda.CUpointer_attribute))
        allocation = self.allocations.find(ptr)
        value = self._read_attribute(attribute, allocation, ptr)
        if allocation is not None and attribute.name == "CU_POINTER_ATTRIBUTE_DEVICE_POINTER":
            self.current()  # Without a current context the call is refused (observed on H200: test_contexts).
        return need(value)

    def cuPointerGetAttributes(self, numAttributes: UnsignedInt, attributes: Any, ptr: DevicePointer) -> list[Any]:
        wanted = arguments.members("attributes", attributes, cuda.CUpointer_attribute, numAttributes)
        check(wanted)
        allocation = self.allocations.find(ptr)
        absent = dict(_ABSENT)
        if allocation is None and self.banks.arenas.find(ptr) is not None:
            absent["HOST_POINTER"] = ptr
        values = []
        for one in wanted:
            name, value = one.name.removeprefix(_PREFIX), self._read_attribute(one, allocation, ptr)
            # Without a current context the answer is that for an unknown address.
            if name == "DEVICE_POINTER" and self.current_or_none() is None:
                value = None
            values.append(absent.get(name, 0) if value is None else value)
        return values

    def _read_attribute(self, attribute: Any, allocation: allocations.LiveMemory | None, address: int) -> Any:
        """Return the value of an attribute; None if the driver refuses it, for example for an address without an
        allocation.
        """
        name = attribute.name.removeprefix(_PREFIX)
        check_readable("CUpointer_attribute", attribute)
        not_modelled(name not in _POINTER_ATTRIBUTES, f"cuPointerGetAttribute({attribute.name})")
        if allocation is None:
            return None
        if allocation.mapping is not None:
            not_modelled(allocation.mapping.is_multicast, f"{attribute.name} of a multicast object")
            if name in MAPPED_ATTRIBUTES:
                return MAPPED_ATTRIBUTES[name](self, allocation.mapping, address)
        current = self.current_or_none() if name == "DEVICE_POINTER" else None
        plain = isinstance(allocation, allocations.DeviceMemory)
        if current is not None and plain and not allocations.is_reachable(allocation, current):
            return None  # ACCESS_FLAGS stays 3 without peer access (observed on H200: test_two_devices).
        return _POINTER_ATTRIBUTES[name](allocation, address)

    def cuPointerSetAttribute(self, value: Any, attribute: Any, ptr: DevicePointer) -> None:
        """Store SYNC_MEMOPS, the only attribute that can be set. Gives CUDA_ERROR_INVALID_VALUE for another attribute
        or an unknown address, and CUDA_ERROR_NOT_SUPPORTED for mapped memory.

        The attribute has no effect on copies: the host still does not wait for asynchronous copies (observed on H200:
        test_plain_memory).
        """
        check(arguments.member("attribute", attribute, cuda.CUpointer_attribute) == int(_SYNC_MEMOPS))
        allocation = need(self.allocations.find(ptr))
        check(allocation.mapping is None, Result.CUDA_ERROR_NOT_SUPPORTED)
        allocation.waits = bool(value)

    def cuMemAllocManaged(self, bytesize: Size, flags: UnsignedInt) -> Any:
        context = self.current()
        self._unsafe_during_capture()
        check(bytesize and flags in (_GLOBAL, _HOST))
        check(self.supports("MANAGED_MEMORY", context.device.ordinal), Result.CUDA_ERROR_NOT_SUPPORTED)
        whole, file = round_up(bytesize, BLOCK), self._managed_file
        reservation = self.banks.arenas.add(ReservedExtent(whole, BLOCK, file.fd, file.extend(whole)))
        reservation.readable, device = whole, context.device.ordinal
        self.allocations.add(allocations.ManagedMemory(reservation.base, bytesize, device, context, reservation))
        return cuda.CUdeviceptr(reservation.base)

    @functools.cached_property
    def _managed_file(self) -> Physical:
        return self.banks.arenas.own(Physical("managed", 0))

    def cuStreamAttachMemAsync(self, hStream: Stream, dptr: DevicePointer, length: Size, flags: UnsignedInt) -> None:
        """Check the arguments, and queue an operation without work: on devices with concurrent managed access an
        association has no visible effect.
        """
        allocation = self._managed(dptr, length)
        check(flags in (_GLOBAL, _HOST, _SINGLE) and dptr == allocation.base and length in (0, allocation.size))
        check(flags != _SINGLE or hStream.handle > LEGACY_STREAM)
        not_modelled(allocation.pool is not None, "cuStreamAttachMemAsync of memory of a pool")
        able = self.supports("CONCURRENT_MANAGED_ACCESS", hStream.context.device.ordinal)
        not_modelled(not able, "cuStreamAttachMemAsync on a device without concurrent managed access")
        self._check_launch(hStream, "cuStreamAttachMemAsync")
        hStream.submit(Operation())

    def _managed(self, address: int, size: int) -> allocations.LiveMemory:
        allocation = need(self.allocations.find(address))
        check(allocation.managed and address + size <= allocation.end)
        return allocation

    def _place(self, location: Any, allowed: tuple[int, ...]) -> Place:
        """Check a CUmemLocation, and return it as a :class:`Place`. ``allowed``: location types that the call accepts
        besides devices.

        The nearest NUMA node (HOST_NUMA_CURRENT) is node 0.
        """
        place = arguments.place(location)
        if place.type == Location.DEVICE:
            check(0 <= place.id < len(self.devices), Result.CUDA_ERROR_INVALID_DEVICE)
            # Users report CUDA_ERROR_INVALID_DEVICE for prefetches to a device without concurrent managed access, and
            # for advice about such a device (rapidsai/rmm#2023, intel/llvm#4809, owl-project/owl#43).
            check(self.supports("CONCURRENT_MANAGED_ACCESS", place.id), Result.CUDA_ERROR_INVALID_DEVICE)
            return place
        check(place.type in allowed)
        if place.type == Location.HOST:
            return HOST
        node = place.id if place.type == Location.HOST_NUMA else 0
        not_modelled(not 0 <= node < self.profile.numa_nodes, f"the NUMA node {node} as a location")
        return Place(Location.HOST_NUMA, node)

    # -- prefetches and discards -----------------------------------------------------------------------------

    def cuMemPrefetchAsync(
        self, devPtr: DevicePointer, count: Size, location: cuda.CUmemLocation, flags: UnsignedInt, hStream: Any
    ) -> None:
        place = self._place(location, _ANYWHERE)
        stream = self._find(Stream, hStream)
        check(not flags and count)
        allocation = self._managed(devPtr, count)
        able = self.supports("CONCURRENT_MANAGED_ACCESS", stream.context.device.ordinal)
        check(able, Result.CUDA_ERROR_INVALID_DEVICE)
        self._check_launch(stream, "cuMemPrefetchAsync")
        allocations.advise(allocation, devPtr, count, allocations.prefetch(place))
        stream.submit(Operation())

    def _managed_batch(self, name: str, dptrs: Any, sizes: Any, count: int, *more: Any) -> None:
        """Prefetch or discard several ranges of managed memory.

        ``name``: name of the call. ``more``: its other arguments, that is for a prefetch three that give the locations,
        then flags and a stream.
        """
        *destinations, flags, handle = more
        addresses = [int(one) for one in arguments.structs("dptrs", dptrs, cuda.CUdeviceptr, count)]
        lengths = arguments.numbers(sizes, count)
        check(count and all(lengths) and not flags and handle not in (0, LEGACY_STREAM))
        stream = self.stream(handle)
        concurrent = self.supports("CONCURRENT_MANAGED_ACCESS")
        not_modelled(not concurrent, f"{name} where a device lacks concurrent managed access")
        ranges = list(zip(addresses, lengths, strict=True))
        managed = [self._managed(*one) for one in ranges]
        self._check_launch(stream, name)
        places = self._places_of_batch(count, *destinations) if destinations else []
        for allocation, (address, size), place in zip(managed, ranges, places, strict=False):
            allocations.advise(allocation, address, size, allocations.prefetch(place))
        discard = QueuedCall(lambda: allocations.discard(self.banks, ranges))
        stream.submit(discard if "Discard" in name else Operation())

    cuMemPrefetchBatchAsync = call(_managed_batch, "cuMemPrefetchBatchAsync")
    cuMemDiscardBatchAsync = call(_managed_batch, "cuMemDiscardBatchAsync")
    cuMemDiscardAndPrefetchBatchAsync = call(_managed_batch, "cuMemDiscardAndPrefetchBatchAsync")

    def _places_of_batch(self, count: int, locations: Any, indices: Any, number: int) -> list[Place]:
        given = arguments.structs("prefetchLocs", locations, cuda.CUmemLocation, number)
        begins = arguments.numbers(indices, number)
        return arguments.by_start((self._place(one, _ANYWHERE) for one in given), begins, count)

    # -- advice ----------------------------------------------------------------------------------------------

    def cuMemAdvise(
        self, devPtr: DevicePointer, count: Size, advice: cuda.CUmem_advise, location: cuda.CUmemLocation
    ) -> None:
        allowed, change = need(_ADVICE.get(int(advice)))
        place = self._place(location, allowed) if allowed else NOWHERE
        check(count)
        allocations.advise(self._managed(devPtr, count), devPtr, count, lambda before: change(before, place))

    if not EDGE_DATA:  # In bindings before CUDA 13 these calls take other arguments.
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
        pages = allocations.pages_of(self._managed(address, count))
        advice = [one for _, _, one in pages.over(address, address + count)]
        name = attribute.name.removeprefix("CU_MEM_RANGE_ATTRIBUTE_")
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
        place = allocations.common(one.preferred if what == "PREFERRED" else one.prefetched for one in advice)
        if not part:
            return _number(place)
        if part == "_TYPE":
            return Location.NONE if place is None else place.type
        return _NONE if place is None else place.id  # For the host and for no location the id has no meaning.


_ANYWHERE = (Location.HOST, Location.HOST_NUMA, Location.HOST_NUMA_CURRENT)
_ADVICE: dict[int, tuple[tuple[int, ...], Callable[[allocations.Advice, Place], allocations.Advice]]] = {
    1: ((), lambda before, place: replace(before, read_mostly=True)),
    2: ((), lambda before, place: replace(before, read_mostly=False)),
    3: (_ANYWHERE, lambda before, place: replace(before, preferred=place)),
    4: ((), lambda before, place: replace(before, preferred=None)),
    5: ((Location.HOST,), lambda before, place: replace(before, accessed_by=before.accessed_by | {place})),
    6: ((Location.HOST,), lambda before, place: replace(before, accessed_by=before.accessed_by - {place})),
}
"""For each ``CUmem_advise``: the location types that the call accepts besides devices (empty: it ignores the location),
and the function that changes the advice on a page.
"""


def _number(place: Place | None) -> int:
    """Return the device number of a location: CU_DEVICE_CPU for every host location, CU_DEVICE_INVALID for None."""
    return _NONE if place is None else place.id if place.type == Location.DEVICE else _CPU
