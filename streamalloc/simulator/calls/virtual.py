"""Virtual memory management: physical memory, reserved addresses, mappings and their access rights.

The calls need no context and leave stream captures valid (observed on H200: test_physical_memory's
test_no_call_needs_a_context, test_mappings' TestCapture).

Each piece of exportable memory has a separate file. All other memory is in one sparse file, because a process may open
only about a thousand files, and a growing buffer has more pieces.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Callable
from typing import Any

from streamalloc.driver.bindings import cuda, handle_types_member, read_handle_types
from streamalloc.simulator import arguments
from streamalloc.simulator.allocations import LiveMemory, PoolMemory
from streamalloc.simulator.arguments import DevicePointer, HostPointer, MemoryHandle, Size, UnsignedLongLong
from streamalloc.simulator.banks import Bank
from streamalloc.simulator.calls.base import Calls
from streamalloc.simulator.constants import CHUNK, HOST, PINNED, Handles, HandleType, Location, Place, device_place
from streamalloc.simulator.errors import Fault, NotModelled, Result, check, need, need_a, not_modelled, undo_by
from streamalloc.simulator.memory import Physical, ReservedRange
from streamalloc.simulator.multicast import MulticastMemory
from streamalloc.simulator.physical import CreatedMemory, Mappable, MappedExtent, Properties, connected
from streamalloc.simulator.profiles import Granularity, MachineSpec

_TILE_POOL = 1  # CUmemAllocationProp.allocFlags.usage
_PAGE = 4096
_PLACES = {Location.HOST: "HOST", Location.HOST_NUMA: "HOST_NUMA"}
_DMA_BUF = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_PCIE_MAPPING = 1  # CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE
_LARGEST_ADDRESS = 1 << 47
_TOO_LARGE, _HIGH = 1 << 40, 1 << 45
"""A range of at least the first size (bytes) is never placed above the second address. The driver searches from the
address hint upwards (observed on H200: test_physical_memory).
"""
# Alignment in bytes from which on the result is OUT_OF_MEMORY (observed on H200: test_physical_memory).
_LARGEST_ALIGNMENT = 1 << 46


class VirtualMemoryCalls(Calls):
    """The calls cuMemCreate, cuMemAddress*, cuMemMap and cuMemSetAccess, the calls that undo them, and queries."""

    def __init__(self, spec: MachineSpec) -> None:
        super().__init__(spec)
        self.memories: Handles[Mappable] = Handles()
        """Physical memory and multicast objects by their handles."""
        self._common_file: Physical | None = None

    # -- physical memory -------------------------------------------------------------------------------------

    def cuMemCreate(self, size: Size, prop: cuda.CUmemAllocationProp, flags: UnsignedLongLong) -> Any:
        check(not flags)
        properties = self._properties(prop)
        self._check_supported(properties)
        check(size and size % self._granularity(properties.place.type, properties.handle_types).minimum == 0)
        bank = self.banks.bank(properties.device)
        if size > bank.free:
            not_modelled(self.banks.make_room(bank, size), "cuMemCreate of memory that pools hold in reserve")
            raise Fault(Result.CUDA_ERROR_OUT_OF_MEMORY)
        if properties.handle_types:
            label = self.labels.new("memory", properties.place, properties.compression)
            physical, offset = Physical(str(label), size), 0
        else:
            if self._common_file is None:
                self._common_file = Physical("memory", 0)
            physical, offset = self._common_file, self._common_file.extend(size)
        bank.used += size
        return cuda.CUmemGenericAllocationHandle(self.adopt(physical, offset, size, properties, bank).handle)

    def adopt(
        self, physical: Physical, offset: int, size: int, properties: Properties, bank: Bank | None
    ) -> CreatedMemory:
        """Make an object with a handle for ``size`` bytes of a file, from ``offset`` on.

        ``bank``: the bank that counts these bytes; None for memory of another process.
        """
        arenas = self.banks.arenas
        memory = CreatedMemory(arenas, arenas.own(physical), offset, size, properties, bank)
        self.memories.add(memory)
        return memory

    def _properties(self, props: Any) -> Properties:
        place, kind, handle_types = arguments.place(props.location), int(props.type), read_handle_types(props)
        flags = props.allocFlags
        compression, rdma, usage = int(flags.compressionType), int(flags.gpuDirectRDMACapable), int(flags.usage)
        check(kind == PINNED and handle_types & ~(HandleType.POSIX_FD | HandleType.FABRIC) == 0)
        wanted = place.type
        if wanted == Location.DEVICE:
            check(0 <= place.id < len(self.devices), Result.CUDA_ERROR_INVALID_DEVICE)
            check(compression <= 1)
        elif wanted == Location.HOST_NUMA:
            check(0 <= place.id < self.profile.numa_nodes and not compression and not rdma)
        else:
            check(wanted == Location.HOST and not compression and not rdma and not handle_types)
            place = Place(Location.HOST_NUMA, 0)
        tile_pool = bool(usage & _TILE_POOL)
        check(not (tile_pool and (compression or handle_types)))
        special = tile_pool and (rdma or wanted == Location.HOST_NUMA)
        not_modelled(special, "cuMemCreate of memory for tiles that is RDMA-capable or of a HOST_NUMA")
        if handle_types & HandleType.FABRIC:
            able = self.supports("HANDLE_TYPE_FABRIC_SUPPORTED", place.device)
            not_modelled(not able, "cuMemCreate of memory with fabric handles where these are not supported")
            # By default the machine is like the observed one: its devices support fabric handles, but there is no IMEX
            # channel.
            check(self.fabric is not None, Result.CUDA_ERROR_NOT_PERMITTED)
            not_modelled(place.type != Location.DEVICE, "cuMemCreate of host memory with fabric handles")
        return Properties(place, handle_types, 0 if rdma else compression, rdma, tile_pool)

    def _check_supported(self, properties: Properties) -> None:
        """Refuse properties that the devices of the profile do not support.

        Raises :class:`NotModelled` where the driver's result code is unknown.
        """
        self._check_vmm(properties.device)
        kinds = (
            (properties.handle_types & HandleType.POSIX_FD, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"),
            (properties.compression, "GENERIC_COMPRESSION_SUPPORTED"),
            (properties.rdma, "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"),
            (properties.device is None, "HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"),
        )
        for wanted, name in kinds:
            lacks = wanted and not self.supports(name, properties.device)
            not_modelled(lacks, f"cuMemCreate of memory that needs {name}, which this profile's device lacks")

    def _check_vmm(self, device: int | None = None) -> None:
        """Answer CUDA_ERROR_NOT_SUPPORTED on a device without virtual memory management. ``device``: None for all
        devices.

        Users report this result for virtual GPUs (dmlc/xgboost#12217, OpenPPL/ppl.nn#8).
        """
        check(self.supports("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", device), Result.CUDA_ERROR_NOT_SUPPORTED)

    def _granularity(self, place: int, handle_types: int) -> Granularity:
        found = self.profile.granularity(_PLACES.get(place, "DEVICE"), handle_types)
        return need(found, "memory of a kind that this profile has no granularity for")

    # -- handles, of physical memory and of multicast objects ------------------------------------------------

    def memory(self, handle: int) -> CreatedMemory:
        return need_a(CreatedMemory, self.named(handle), "a multicast object where physical memory is expected")

    def named(self, handle: int) -> Mappable:
        check(handle)
        return need(self.memories.get(handle), "using a memory handle that does not exist: the real driver crashes")

    def named_or_mapped(self, handle: int) -> Mappable:
        """Return the memory with this handle, if cuMemMap accepts the handle.

        The handle of released memory is accepted while the memory is mapped (observed on H200: test_mappings). The
        handle 0 gives CUDA_ERROR_INVALID_VALUE, and any other handle raises :class:`NotModelled`.
        """
        mappings = (one.mapping for one in self.allocations.at.values())
        mapped = (one.memory for one in mappings if one is not None and one.memory.handle == handle)
        return self.memories.get(handle) or next(mapped, None) or self.named(handle)

    def cuMemRelease(self, handle: MemoryHandle) -> None:
        found = need(self.memories.get(handle))
        if found.handles == 1 and isinstance(found, CreatedMemory) and found.tiles:
            raise NotModelled("releasing memory that tiles of an array are mapped to, or will be: unmap them before")
        found.handles -= 1
        if not found.handles:
            del self.memories[handle]
            found.leave()

    def cuMemRetainAllocationHandle(self, addr: HostPointer) -> Any:
        """Add a reference to the memory that is mapped at an address. Returns its handle, which is the same as before.

        This works even if all earlier references were released (observed on H200: test_mappings). An address without
        a mapping gives CUDA_ERROR_INVALID_VALUE.
        """
        found = need(self.mapping_at(addr)).memory
        found.handles += 1
        return cuda.CUmemGenericAllocationHandle(self.memories.add(found).handle)

    def cuMemGetAllocationPropertiesFromHandle(self, handle: MemoryHandle) -> Any:
        what = "cuMemGetAllocationPropertiesFromHandle of a multicast object"
        properties = need_a(CreatedMemory, self.named_or_mapped(handle), what).properties
        props, location = cuda.CUmemAllocationProp(), cuda.CUmemLocation()
        location.type, location.id = cuda.CUmemLocationType(properties.place.type), properties.place.id
        props.type, props.location = cuda.CUmemAllocationType(PINNED), location
        props.requestedHandleTypes = handle_types_member(properties.handle_types)
        props.allocFlags.compressionType = properties.compression
        props.allocFlags.gpuDirectRDMACapable = properties.rdma
        return props

    def cuMemGetAllocationGranularity(
        self, prop: cuda.CUmemAllocationProp, option: cuda.CUmemAllocationGranularity_flags
    ) -> int:
        """Return the granularity in bytes, even for properties that cuMemCreate refuses (observed on H200:
        test_physical_memory). Gives CUDA_ERROR_NOT_SUPPORTED if a device has no virtual memory management. Raises
        :class:`NotModelled` for handle types without a granularity in the profile.
        """
        self._check_vmm()
        return self._granularity(int(prop.location.type), read_handle_types(prop))[int(option)]

    # -- addresses -------------------------------------------------------------------------------------------

    def cuMemAddressReserve(self, size: Size, alignment: Size, addr: DevicePointer, flags: UnsignedLongLong) -> Any:
        check(flags == 0)
        self._check_vmm()
        check(size and size % self.profile.page == 0)
        check(alignment & (alignment - 1) == 0 and alignment < 1 << 63)
        alignment = max(alignment, self.profile.page)
        check(addr % alignment == 0)
        possible = max(size, addr) < _LARGEST_ADDRESS and alignment < _LARGEST_ALIGNMENT
        check(possible, Result.CUDA_ERROR_OUT_OF_MEMORY)
        # Small ranges are placed in the free part of the context's region. When this part is full, and for large
        # ranges, the driver takes low addresses (observed on H200: test_physical_memory).
        ranges = (one for one in self.banks.arenas.at.values() if isinstance(one, ReservedRange))
        near = (one.size for one in ranges if not one.is_placed)
        low = max(size, alignment) >= CHUNK or sum(near) + size > max(self.profile.context_free, default=0)
        found = ReservedRange(size, alignment, low=low, hint=addr)
        if addr >= _HIGH and found.base != addr and size >= _TOO_LARGE:
            found.close()
            raise Fault(Result.CUDA_ERROR_OUT_OF_MEMORY)
        return cuda.CUdeviceptr(self.banks.arenas.add(found).base)

    def cuMemAddressFree(self, ptr: DevicePointer, size: Size) -> None:
        found = need(self.range_of(ptr))
        check((found.base, found.size) == (ptr, size))
        check(not self.mappings(ptr, ptr + size))
        self.banks.arenas.remove(found)

    def range_of(self, address: int) -> ReservedRange | None:
        found = self.banks.arenas.find(address)
        return found if isinstance(found, ReservedRange) else None

    def _segments(self, start: int, end: int) -> list[tuple[ReservedRange, int, int]]:
        """Return the adjacent reservations from ``start`` on, as tuples of the reservation, and start and end of its
        part of the range.

        The last part ends at ``end`` or at the first address that is not reserved.
        """
        segments = []
        while start < end:
            found = self.range_of(start)
            if found is None:
                break
            stop = min(end, found.end)
            segments.append((found, start, stop))
            start = stop
        return segments

    # -- mappings --------------------------------------------------------------------------------------------

    def mapping_at(self, address: int) -> MappedExtent | None:
        found = self.allocations.find(address)
        return None if found is None else found.mapping

    def mappings(self, start: int, end: int) -> list[MappedExtent]:
        """Return the mappings that overlap a range, in the order of their addresses."""
        return [one.mapping for one in self.allocations.overlapping(start, end) if one.mapping is not None]

    def cuMemMap(
        self, ptr: DevicePointer, size: Size, offset: Size, handle: MemoryHandle, flags: UnsignedLongLong
    ) -> None:
        memory = self.named_or_mapped(handle)
        check(flags == 0)
        if isinstance(memory, MulticastMemory):
            memory.wait_for_team("cuMemMap")
            # The handle is looked up again, because another thread may have released the memory during the wait.
            memory = self.named_or_mapped(handle)
        check(ptr and size)
        # The driver checks offset and size before it checks the alignment (observed on H200: test_mappings).
        memory.check_part(offset, size)
        check(ptr % self.profile.page == 0)
        end = ptr + size
        segments = self._segments(ptr, end)
        check(segments and not self.mappings(ptr, end))
        not_modelled(segments[-1][2] < end, "mapping beyond the end of a reservation: the real driver does not notice")
        not_modelled(memory.properties.tile_pool, "cuMemMap of memory for tiles of arrays")
        mapping = MappedExtent(ptr, size, memory)
        memory.lead(mapping, False)
        with undo_by(self._clear, mapping):
            for found, start, stop in segments:
                memory.map_at(found, start, stop - start, offset + start - ptr)
        memory.mappings += 1
        self.allocations.add(LiveMemory(ptr, size, memory.properties.device, None)).mapping = mapping

    def cuMemUnmap(self, ptr: DevicePointer, size: Size) -> None:
        """Unmap whole mappings; holes between them are allowed. Gives CUDA_ERROR_INVALID_VALUE if a part of a mapping
        is outside of the range, or a part of the range is not reserved.

        The call waits for work that can run now (:meth:`.Scheduler.run_down`). Work that waits for something else fails
        later, because its memory is gone (observed on H200: test_mappings).
        """
        end = ptr + size
        check(size)  # The driver accepts any alignment (observed on H200: test_mappings).
        # The wait comes before the look-ups, because other threads may map and unmap memory during the wait.
        self.scheduler.run_down()
        segments = self._segments(ptr, end)
        check(segments and segments[-1][2] == end)
        mappings = self.mappings(ptr, end)
        check(all(ptr <= mapping.base and mapping.end <= end for mapping in mappings))
        for mapping in mappings:
            self._clear(mapping)
            self.allocations.remove(self.allocations.at[mapping.base])
            mapping.memory.mappings -= 1
            mapping.memory.leave()

    def _clear(self, mapping: MappedExtent) -> None:
        """Remove a mapping from its addresses, which stay reserved."""
        for found, start, stop in self._segments(mapping.base, mapping.end):
            found.unmap(start, stop - start)
        mapping.memory.lose_leader(mapping)

    def span(self, address: int, size: int) -> list[MappedExtent]:
        """Return the mappings under a range, which must have no holes. The start and the end of the range may lie
        inside a mapping.

        Gives CUDA_ERROR_INVALID_VALUE if a part of the range is not mapped.
        """
        mappings = self.mappings(address, address + size)
        check(mappings and mappings[0].base <= address and address + size <= mappings[-1].end)
        check(all(one.end == two.base for one, two in itertools.pairwise(mappings)))
        return mappings

    # -- multicast mappings ----------------------------------------------------------------------------------

    def team_at(self, address: int) -> tuple[MappedExtent, MulticastMemory] | None:
        """Return the mapping of a multicast object at an address, and the object; None if no multicast object is mapped
        there.
        """
        mapping = self.mapping_at(address)
        if mapping is None or not isinstance(mapping.memory, MulticastMemory):
            return None
        return mapping, mapping.memory

    # -- access ----------------------------------------------------------------------------------------------

    def cuMemSetAccess(self, ptr: DevicePointer, size: Size, desc: Any, count: Size) -> None:
        descriptors = arguments.structs("desc", desc, cuda.CUmemAccessDesc, count)
        check(count and size)
        # The range must begin at the start of a mapping and end at the end of one; there may be holes.
        within = self.mappings(ptr, ptr + size)
        check(within and within[0].base == ptr and within[-1].end == ptr + size)
        mappings = connected(within)
        wanted = [self._wanted(arguments.place(one.location), int(one.flags)) for one in descriptors]
        self._check_teams(mappings, wanted)
        losing = any(flags < mapping.right(place) for mapping in mappings for place, flags in wanted)
        queued = (one for stream in self.scheduler.streams.values() for one in stream.operations)
        in_use = losing and any(one.touches(ptr, ptr + size) for one in queued)
        not_modelled(in_use, "taking access away while work on the memory is queued")
        for mapping in mappings:
            for place, flags in wanted:
                owner = mapping.memory.properties.device
                unknown = flags and None not in (place.device, owner) and not mapping.is_multicast
                if unknown and not self.has_access(place.id, owner or 0):
                    raise NotModelled("cuMemSetAccess for a device that has no access to the other's memory")
                # The host cannot get access to device memory. This refusal does not undo the grants of earlier entries
                # (observed on H200: test_mappings).
                check(not (flags and place.device is None and owner is not None), Result.CUDA_ERROR_NOT_SUPPORTED)
                mapping.grant(place, flags)

    def _check_teams(self, mappings: list[MappedExtent], wanted: list[tuple[Place, int]]) -> None:
        """Refuse access to a multicast object for a device that was not added to the object's team.

        Users report the result code ILLEGAL_STATE (NVIDIA developer forum, 356726).
        """
        number = self.labels.number
        for mapping in mappings:
            if isinstance(mapping.memory, MulticastMemory):
                team = mapping.memory.table.devices
                outside = any(
                    flags and place.type == Location.DEVICE and number(place.id) not in team for place, flags in wanted
                )
                check(not outside, Result.CUDA_ERROR_ILLEGAL_STATE)

    def _wanted(self, place: Place, flags: int) -> tuple[Place, int]:
        if place.type == Location.DEVICE:
            check(0 <= place.id < len(self.devices))
            return device_place(place.id), flags
        check(place.type in (Location.HOST, Location.HOST_NUMA))
        # The driver also accepts the number of a NUMA node that does not exist (observed on H200: test_mappings).
        return (place if place.type == Location.HOST_NUMA and place.id else HOST), flags

    def cuMemGetAccess(self, location: cuda.CUmemLocation, ptr: DevicePointer) -> int:
        place = arguments.place(location)
        if place.type == Location.DEVICE:
            check(0 <= place.id < len(self.devices), Result.CUDA_ERROR_INVALID_DEVICE)
        else:
            check(place.type in (Location.HOST, Location.HOST_NUMA), Result.CUDA_ERROR_INVALID_DEVICE)
        mapping = need(self.mapping_at(ptr))
        if place.type == Location.HOST:
            return mapping.right_of_host()
        return mapping.right(device_place(place.id) if place.type == Location.DEVICE else HOST)

    # -- handles of address ranges ---------------------------------------------------------------------------

    def cuMemGetHandleForAddressRange(
        self, dptr: DevicePointer, size: Size, handleType: cuda.CUmemRangeHandleType, flags: UnsignedLongLong
    ) -> int:
        """Return the descriptor of a file that has the size of the range, but not the bytes of its memory.

        Devices that could read the memory through the file are not simulated. Gives CUDA_ERROR_INVALID_VALUE unless the
        range is device memory of whole pages of 4 KiB, and CUDA_ERROR_NOT_SUPPORTED with the flag for a mapping over
        PCIe. Raises :class:`NotModelled` for managed memory and multicast objects.
        """
        not_modelled(handleType != _DMA_BUF, f"cuMemGetHandleForAddressRange of {handleType!r}")
        check(flags in (0, _PCIE_MAPPING))
        check(size and dptr % _PAGE == 0 and size % _PAGE == 0)
        self.current()
        allocation = need(self.allocations.find(dptr))
        if allocation.mapping is not None:
            not_modelled(allocation.mapping.is_multicast, "cuMemGetHandleForAddressRange of a multicast object")
            devices = [mapping.memory.properties.device for mapping in self.span(dptr, size)]
        else:
            not_modelled(allocation.managed, "cuMemGetHandleForAddressRange of managed memory")
            devices = [allocation.device]
        check(None not in devices)
        if allocation.mapping is None and not self.banks.is_backed(dptr, size):
            in_pool = isinstance(allocation, PoolMemory)
            not_modelled(in_pool, "a handle for more addresses of a pool than have memory: the real driver crashes")
            raise Fault(Result.CUDA_ERROR_INVALID_VALUE)
        check(flags != _PCIE_MAPPING, Result.CUDA_ERROR_NOT_SUPPORTED)
        # A range inside one chunk of a pool must begin at the start of the chunk (observed on H200:
        # test_physical_memory).
        if isinstance(allocation, PoolMemory):
            at = (allocation.block.start + dptr - allocation.base) % CHUNK
            check(not at or at + size > CHUNK)
        return _unreadable_file(size)


def _unreadable_file(size: int) -> int:
    """Return the descriptor of a new file of ``size`` bytes, which stands for a dma-buf. Reading, writing and mapping
    the file fail.
    """
    file = os.memfd_create("streamalloc:dmabuf", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_CLOEXEC)
    finally:
        os.close(file)


def team_of(machine: VirtualMemoryCalls, handle: int) -> MulticastMemory:
    """Return the multicast object of a handle. Raises :class:`NotModelled` for a handle of physical memory and for an
    unknown handle. Gives CUDA_ERROR_INVALID_VALUE for the handle 0.
    """
    what = "a handle of physical memory where a multicast object is expected"
    return need_a(MulticastMemory, machine.named(handle), what)


# -- cuPointerGetAttribute -----------------------------------------------------------------------------------


def right_of_current(machine: VirtualMemoryCalls, mapping: MappedExtent, name: str) -> int:
    """Return the access right to mapped memory that the device of the current context has.

    ``name``: the pointer attribute that is queried, for the error.

    Raises :class:`NotModelled` without a current context.
    """
    without = f"CU_POINTER_ATTRIBUTE_{name} of mapped memory without a current context"
    return mapping.right(device_place(need(machine.current_or_none(), without).device.ordinal))


MAPPED_ATTRIBUTES: dict[str, Callable[[VirtualMemoryCalls, MappedExtent, int], Any]] = {
    # The range of these two attributes is the reservation, not the mapping.
    "RANGE_START_ADDR": lambda machine, mapping, at: cuda.CUdeviceptr(need(machine.range_of(at)).base),
    "RANGE_SIZE": lambda machine, mapping, at: need(machine.range_of(at)).size,
    "HOST_POINTER": lambda machine, mapping, at: at if mapping.right(HOST) else None,
    "ALLOWED_HANDLE_TYPES": lambda machine, mapping, at: mapping.memory.properties.handle_types,
    "IS_GPU_DIRECT_RDMA_CAPABLE": lambda machine, mapping, at: mapping.memory.properties.rdma,
    "ACCESS_FLAGS": lambda machine, mapping, at: right_of_current(machine, mapping, "ACCESS_FLAGS"),
    "DEVICE_POINTER": lambda machine, mapping, at: (
        cuda.CUdeviceptr(at) if right_of_current(machine, mapping, "DEVICE_POINTER") else None
    ),
}
"""Functions that read the pointer attributes for which mapped memory has another value than other memory, by enum name
without CU_POINTER_ATTRIBUTE_. If a function returns None, the driver refuses the query.
"""
