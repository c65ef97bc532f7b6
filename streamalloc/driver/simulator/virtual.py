"""Virtual memory management: physical memory, reserved addresses, and what is mapped where with which rights.

Memory that can be exported is a file of its own. All other memory shares one sparse file, however many pieces there
are: a process may have a thousand files, and a growing buffer has more pieces.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .allocations import MappedMemory
from .constants import NO_ACCESS, Location
from .errors import Fault, NotModelled, Result, check, need
from .memory import AddressMap, AddressRange, Bank, Physical, Window
from .pool import Place

if TYPE_CHECKING:
    from .machine import Machine

GRANULARITY = 2 << 20
"""Of physical memory, reservations and mappings of any kind (observed on H200: test_physical_memory)."""


HOST = Place(Location.HOST, 0)
"""Whose rights the host's are: those of HOST and of HOST_NUMA 0 are one (observed on H200: test_host_mappings)."""

_LARGEST_ADDRESS = 1 << 47
_LARGEST_ALIGNMENT = 1 << 46  # from here on OUT_OF_MEMORY (observed on H200: test_address_ranges)


def device_place(ordinal: int) -> Place:
    return Place(Location.DEVICE, ordinal)


@dataclass(frozen=True)
class Properties:
    """What memory was made with, as it reads back."""

    place: Place
    handle_types: int = 0
    compression: int = 0
    rdma: int = 0
    tile_pool: bool = False
    """Memory for the tiles of sparse arrays; this does not read back (observed on H200: test_sparse_arrays)."""

    @property
    def device(self) -> int | None:
        """Whose memory it is; None for the host's."""
        return self.place.id if self.place.type == Location.DEVICE else None


class Mappable:
    """What a CUmemGenericAllocationHandle names, and how many hold on to it: handles given out, and mappings."""

    def __init__(self, handle: int, size: int, properties: Properties) -> None:
        self.handle = handle
        self.size = size
        self.properties = properties
        self.handles = 1
        self.mappings = 0

    def check_part(self, offset: int, size: int) -> None:
        """Fail unless this part can be mapped."""
        raise NotImplementedError

    def map_at(self, found: AddressRange, start: int, size: int, offset: int) -> None:
        """Put the bytes from ``offset`` on at an address."""
        raise NotImplementedError

    def leave(self) -> None:
        """Give it up if nobody refers to it any more."""
        raise NotImplementedError


class Memory(Mappable):
    """Physical memory, as one handle names it: ``size`` bytes of a file, from ``offset`` on.

    It is there until its handle was released as often as it was given out, and nothing is mapped or bound to a
    multicast object. ``bank`` gets its bytes back then: None where they were never taken, because another process has.
    """

    def __init__(
        self,
        handle: int,
        physical: Physical,
        offset: int,
        size: int,
        properties: Properties,
        bank: Bank | None,
    ) -> None:
        super().__init__(handle, size, properties)
        self.physical = physical
        self.offset = offset
        self.bank = bank
        self.bindings = 0
        """To multicast objects."""
        self.tiles = 0
        """Tiles of arrays that have their memory here, or will once queued work is done."""
        self._window: Window | None = None

    def window(self) -> Window:
        """All of it, for work that does not go by addresses."""
        if self._window is None:
            self._window = Window(self.physical, self.offset, self.size)
        return self._window

    def close_window(self) -> None:
        if self._window is not None:
            self._window.close()
            self._window = None

    def check_part(self, offset: int, size: int) -> None:
        check(size == self.size and not offset, Result.CUDA_ERROR_NOT_SUPPORTED)

    def map_at(self, found: AddressRange, start: int, size: int, offset: int) -> None:
        found.map(start, size, self.physical, self.offset + offset)

    def leave(self) -> None:
        if self.handles or self.mappings or self.bindings:
            return
        self.close_window()
        if self.bank is None:
            self.physical.close()
        elif self.properties.handle_types:
            self.bank.give_up(self.physical)
        else:
            self.bank.used -= self.size
            self.physical.discard(self.offset, self.size)


@dataclass(eq=False)
class Mapping:
    """Memory at an address, and who may use it there."""

    base: int
    size: int
    memory: Mappable
    rights: dict[Place, int] = field(default_factory=dict)
    """By device, and of the host; in the order in which they were set, without those that were taken away."""

    @property
    def end(self) -> int:
        return self.base + self.size

    @property
    def is_multicast(self) -> bool:
        return not isinstance(self.memory, Memory)

    def right(self, place: Place) -> int:
        return self.rights.get(place, NO_ACCESS)

    def grant(self, place: Place, flags: int) -> None:
        self.rights.pop(place, None)
        if flags:
            self.rights[place] = flags

    def right_of_host(self) -> int:
        """What asking about HOST answers: the right of device 0 or of the host, whichever was set last.

        Observed on H200 (test_host_mappings), also for device memory, which the host can never use.
        """
        if any(place.type == Location.DEVICE and place.id for place in self.rights):
            raise NotModelled("cuMemGetAccess for HOST where a device other than 0 has access")
        return next(reversed(self.rights.values()), NO_ACCESS)


def least_right(mappings: Iterable[Mapping], place: Place) -> int:
    """What a place may do with all of these."""
    return min(mapping.right(place) for mapping in mappings)


class VirtualMemory:
    """The physical memory, address ranges and mappings of a machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._named: dict[int, Mappable] = {}
        self._ranges: dict[int, AddressRange] = {}
        self._shared: Physical | None = None
        self.mappings: AddressMap[Mapping] = AddressMap()

    # -- physical memory -------------------------------------------------------------------------------------

    def create(self, size: int, properties: Properties) -> Memory:
        machine = self._machine
        device = properties.device
        bank = machine.host_bank if device is None else machine.devices[device].bank
        if size > bank.free:
            machine.make_room(bank, size)
            if size <= bank.free:
                raise NotModelled("cuMemCreate of memory that pools hold in reserve")
            raise Fault(Result.CUDA_ERROR_OUT_OF_MEMORY)
        if properties.handle_types:
            physical, offset = Physical(str(machine.sharing.label("memory", properties.place)), size), 0
        else:
            if self._shared is None:
                self._shared = Physical("memory", 0)
            physical, offset = self._shared, self._shared.extend(size)
        bank.used += size
        return self.adopt(physical, offset, size, properties, bank)

    def adopt(self, physical: Physical, offset: int, size: int, properties: Properties, bank: Bank | None) -> Memory:
        """Give memory a handle."""
        memory = Memory(self._machine.new_handle(), physical, offset, size, properties, bank)
        self.name(memory)
        return memory

    def memory(self, handle: int) -> Memory:
        found = self.named(handle)
        if not isinstance(found, Memory):
            raise NotModelled("a handle of a multicast object where physical memory is expected")
        return found

    # -- handles, of physical memory and of multicast objects ------------------------------------------------

    def name(self, made: Mappable) -> None:
        """Let it be known by its handle."""
        self._named[made.handle] = made

    def named(self, handle: int) -> Mappable:
        check(handle)
        found = self._named.get(handle)
        if found is None:
            raise NotModelled("using a memory handle that does not exist: the real driver crashes")
        return found

    def release(self, handle: int) -> None:
        found = need(self._named.get(handle))
        if found.handles == 1 and isinstance(found, Memory) and found.tiles:
            raise NotModelled("releasing memory that tiles of an array are mapped to, or will be: unmap them before")
        found.handles -= 1
        if not found.handles:
            del self._named[handle]
            found.leave()

    def retain(self, found: Mappable) -> int:
        """Another reference by the same handle, also where all before were released (H200: test_physical_memory)."""
        found.handles += 1
        self._named[found.handle] = found
        return found.handle

    # -- addresses -------------------------------------------------------------------------------------------

    def reserve(self, size: int, alignment: int, hint: int) -> int:
        check(size and size % GRANULARITY == 0)
        check(alignment & (alignment - 1) == 0 and alignment < 1 << 63)
        alignment = max(alignment, GRANULARITY)
        check(hint % alignment == 0)
        no_room = Result.CUDA_ERROR_OUT_OF_MEMORY
        check(max(size, hint) < _LARGEST_ADDRESS and alignment < _LARGEST_ALIGNMENT, no_room)
        try:
            found = AddressRange(size, alignment, hint)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise Fault(no_room) from error
        self._ranges[found.base] = found
        self._machine.arenas.add(found)
        return found.base

    def free(self, base: int, size: int) -> None:
        found = need(self._ranges.get(base))
        check(found.size == size)
        check(not self.mappings.overlapping(base, base + size))
        del self._ranges[base]
        self._machine.arenas.remove(found)
        found.close()

    def range_of(self, address: int) -> AddressRange | None:
        found = self._machine.arenas.find(address)
        return found if isinstance(found, AddressRange) else None

    def _pieces(self, start: int, end: int) -> list[tuple[AddressRange, int, int]]:
        """The reservations that follow each other from ``start``: each with what it has of the range, up to ``end``
        or to the first address that is not reserved.
        """
        pieces = []
        while start < end:
            found = self.range_of(start)
            if found is None:
                break
            stop = min(end, found.end)
            pieces.append((found, start, stop))
            start = stop
        return pieces

    # -- mappings --------------------------------------------------------------------------------------------

    def map(self, address: int, size: int, offset: int, memory: Mappable) -> None:
        check(address and size and address % GRANULARITY == 0)
        memory.check_part(offset, size)
        end = address + size
        pieces = self._pieces(address, end)
        check(pieces and not self.mappings.overlapping(address, end))
        if pieces[-1][2] < end:
            raise NotModelled("mapping beyond the end of a reservation: the real driver does not notice")
        if memory.properties.tile_pool:
            raise NotModelled("cuMemMap of memory for tiles of arrays")
        try:
            for found, start, stop in pieces:
                memory.map_at(found, start, stop - start, offset + start - address)
        except OSError as error:
            for found, start, stop in pieces:
                found.unmap(start, stop - start)
            if error.errno != errno.ENOMEM:
                raise
            raise Fault(Result.CUDA_ERROR_OUT_OF_MEMORY) from error
        memory.mappings += 1
        mapping = Mapping(address, size, memory)
        self.mappings.add(mapping)
        self._machine.remember(MappedMemory(address, size, memory.properties.device, None, mapping))

    def unmap(self, address: int, size: int) -> None:
        """Whole mappings and the holes between them. Work that is running ends first; work that is still queued then
        is not waited for, and fails when it gets there (observed on H200: test_mappings).
        """
        end = address + size
        check(size and address % GRANULARITY == 0 and size % GRANULARITY == 0)
        self._machine.timeline.run_down()  # first of all: other threads may map and unmap meanwhile
        pieces = self._pieces(address, end)
        check(pieces and pieces[-1][2] == end)
        mappings = self.mappings.overlapping(address, end)
        check(all(address <= mapping.base and mapping.end <= end for mapping in mappings))
        for mapping in mappings:
            for found, start, stop in self._pieces(mapping.base, mapping.end):
                found.unmap(start, stop - start)
            self.mappings.remove(mapping)
            self._machine.allocations.remove(self._machine.allocations.at[mapping.base])
            mapping.memory.mappings -= 1
            mapping.memory.leave()

    def mapping_at(self, address: int) -> Mapping:
        return need(self.mappings.find(address))

    def span(self, address: int, size: int) -> list[Mapping]:
        """The mappings under a range, which has no hole; it may begin and end inside one."""
        mappings = self.mappings.overlapping(address, address + size)
        check(mappings and mappings[0].base <= address and address + size <= mappings[-1].end)
        check(all(one.end == two.base for one, two in itertools.pairwise(mappings)))
        return mappings

    def whole_span(self, address: int, size: int) -> list[Mapping]:
        """The same, for a range of whole mappings."""
        mappings = self.span(address, size)
        check(mappings[0].base == address and mappings[-1].end == address + size)
        return mappings

    # -- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        known = {*self._named.values(), *(mapping.memory for mapping in self.mappings.at.values())}
        memories = [one for one in known if isinstance(one, Memory)]
        for memory in memories:
            memory.close_window()
        for physical in {memory.physical for memory in memories}:
            physical.close()
        if self._shared is not None:
            self._shared.close()
        for found in self._ranges.values():
            self._machine.arenas.remove(found)
            found.close()
        self._ranges.clear()
        self._named.clear()
        self.mappings = AddressMap()
