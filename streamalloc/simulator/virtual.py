"""Virtual memory management: physical memory, reserved addresses, mappings and their access rights.

Exportable memory is a separate file. All other memory shares one sparse file, because a process may open only about a
thousand files, and a growing buffer has more segments.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from streamalloc.simulator.allocations import AllocationTable, LiveMemory
from streamalloc.simulator.banks import Bank, Banks
from streamalloc.simulator.constants import CHUNK, Handles
from streamalloc.simulator.errors import Fault, NotModelled, Result, check, need, need_a, not_modelled, undo_by
from streamalloc.simulator.files import Labels
from streamalloc.simulator.memory import Physical, ReservedRange
from streamalloc.simulator.physical import CreatedMemory, Mappable, MappedExtent, Properties
from streamalloc.simulator.profiles import Profile
from streamalloc.simulator.scheduler import Scheduler

_LARGEST_ADDRESS = 1 << 47
_TOO_LARGE, _HIGH = 1 << 40, 1 << 45
"""A range of the first size is never placed above the second address. The driver searches from the hint on (observed on
H200: test_physical_memory).
"""
_LARGEST_ALIGNMENT = 1 << 46  # from here on OUT_OF_MEMORY (observed on H200: test_physical_memory)


@dataclass(eq=False)
class VirtualMemory:
    """Physical memory, address ranges and mappings of a machine."""

    labels: Labels
    banks: Banks
    allocations: AllocationTable
    scheduler: Scheduler
    profile: Profile
    """The profile. Addresses and sizes are multiples of its ``page``."""
    handles: Handles[Mappable] = field(default_factory=Handles)
    _shared: Physical | None = None

    # -- physical memory -------------------------------------------------------------------------------------

    def create(self, size: int, properties: Properties) -> CreatedMemory:
        bank = self.banks.bank(properties.device)
        if size > bank.free:
            not_modelled(self.banks.make_room(bank, size), "cuMemCreate of memory that pools hold in reserve")
            raise Fault(Result.CUDA_ERROR_OUT_OF_MEMORY)
        if properties.handle_types:
            label = self.labels.new("memory", properties.place, properties.compression)
            physical, offset = Physical(str(label), size), 0
        else:
            if self._shared is None:
                self._shared = Physical("memory", 0)
            physical, offset = self._shared, self._shared.extend(size)
        bank.used += size
        return self.adopt(physical, offset, size, properties, bank)

    def adopt(
        self, physical: Physical, offset: int, size: int, properties: Properties, bank: Bank | None
    ) -> CreatedMemory:
        """Make a handle for ``size`` bytes of a file, from ``offset`` on.

        ``bank``: the bank that counts them; None for memory of another process.
        """
        arenas = self.banks.arenas
        memory = CreatedMemory(arenas, arenas.own(physical), offset, size, properties, bank)
        self.handles.add(memory)
        return memory

    def memory(self, handle: int) -> CreatedMemory:
        return need_a(
            CreatedMemory, self.named(handle), "a handle of a multicast object where physical memory is expected"
        )

    # -- handles, of physical memory and of multicast objects ------------------------------------------------

    def named(self, handle: int) -> Mappable:
        check(handle)
        return need(self.handles.get(handle), "using a memory handle that does not exist: the real driver crashes")

    def named_or_mapped(self, handle: int) -> Mappable:
        """Return the memory of a handle that can be mapped.

        Released memory counts while it is mapped (H200: test_mappings).
        """
        mappings = (one.mapping for one in self.allocations.at.values())
        mapped = (one.memory for one in mappings if one is not None and one.memory.handle == handle)
        return self.handles.get(handle) or next(mapped, None) or self.named(handle)

    def release(self, handle: int) -> None:
        found = need(self.handles.get(handle))
        if found.handles == 1 and isinstance(found, CreatedMemory) and found.tiles:
            raise NotModelled("releasing memory that tiles of an array are mapped to, or will be: unmap them before")
        found.handles -= 1
        if not found.handles:
            del self.handles[handle]
            found.leave()

    def retain(self, found: Mappable) -> int:
        """Add a reference to memory, and return its handle, which stays the same.

        That is possible even if all earlier references were released (H200: test_physical_memory).
        """
        found.handles += 1
        return self.handles.add(found).handle

    # -- addresses -------------------------------------------------------------------------------------------

    def reserve(self, size: int, alignment: int, hint: int) -> int:
        check(size and size % self.profile.page == 0)
        check(alignment & (alignment - 1) == 0 and alignment < 1 << 63)
        alignment = max(alignment, self.profile.page)
        check(hint % alignment == 0)
        possible = max(size, hint) < _LARGEST_ADDRESS and alignment < _LARGEST_ALIGNMENT
        check(possible, Result.CUDA_ERROR_OUT_OF_MEMORY)
        # Small ranges get addresses in the free part of the context's region. When that is full, and for large ranges,
        # the driver takes low addresses (observed on H200: test_physical_memory).
        ranges = (one for one in self.banks.arenas.at.values() if isinstance(one, ReservedRange))
        near = (one.size for one in ranges if not one.is_placed)
        low = max(size, alignment) >= CHUNK or sum(near) + size > max(self.profile.context_free, default=0)
        found = ReservedRange(size, alignment, low=low, hint=hint)
        if hint >= _HIGH and found.base != hint and size >= _TOO_LARGE:
            found.close()
            raise Fault(Result.CUDA_ERROR_OUT_OF_MEMORY)
        return self.banks.arenas.add(found).base

    def free(self, base: int, size: int) -> None:
        found = need(self.range_of(base))
        check((found.base, found.size) == (base, size))
        check(not self.mappings(base, base + size))
        self.banks.arenas.remove(found)

    def range_of(self, address: int) -> ReservedRange | None:
        found = self.banks.arenas.find(address)
        return found if isinstance(found, ReservedRange) else None

    def _segments(self, start: int, end: int) -> list[tuple[ReservedRange, int, int]]:
        """Return the adjacent reservations from ``start`` on, each with its part of the range.

        They reach up to ``end`` or to the first unreserved address.
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

    def map(self, address: int, size: int, offset: int, memory: Mappable) -> None:
        check(address and size)
        memory.check_part(offset, size)  # before the check of the alignment (observed on H200: test_mappings)
        check(address % self.profile.page == 0)
        end = address + size
        segments = self._segments(address, end)
        check(segments and not self.mappings(address, end))
        not_modelled(segments[-1][2] < end, "mapping beyond the end of a reservation: the real driver does not notice")
        not_modelled(memory.properties.tile_pool, "cuMemMap of memory for tiles of arrays")
        mapping = MappedExtent(address, size, memory)
        memory.lead(mapping, False)
        with undo_by(self._clear, mapping):
            for found, start, stop in segments:
                memory.map_at(found, start, stop - start, offset + start - address)
        memory.mappings += 1
        made = self.allocations.add(LiveMemory(address, size, memory.properties.device, None))
        made.mapping = mapping

    def unmap(self, address: int, size: int) -> None:
        """Unmap whole mappings; holes between them are allowed. The call waits for running work.

        Queued work runs later and fails, because its memory is gone (observed on H200: test_mappings).
        """
        end = address + size
        check(size)  # any alignment is accepted (observed on H200: test_mappings)
        self.scheduler.run_down()  # before the look-ups, because other threads may map and unmap during this wait
        segments = self._segments(address, end)
        check(segments and segments[-1][2] == end)
        mappings = self.mappings(address, end)
        check(all(address <= mapping.base and mapping.end <= end for mapping in mappings))
        for mapping in mappings:
            self._clear(mapping)
            self.allocations.remove(self.allocations.at[mapping.base])
            mapping.memory.mappings -= 1
            mapping.memory.leave()

    def _clear(self, mapping: MappedExtent) -> None:
        """Unmap the addresses of a mapping, which stay reserved."""
        for found, start, stop in self._segments(mapping.base, mapping.end):
            found.unmap(start, stop - start)
        mapping.memory.lose_leader(mapping)

    def span(self, address: int, size: int) -> list[MappedExtent]:
        """Return the mappings under a range without holes. Its start and end may lie inside a mapping.

        Gives CUDA_ERROR_INVALID_VALUE if a part of the range is not mapped.
        """
        mappings = self.mappings(address, address + size)
        check(mappings and mappings[0].base <= address and address + size <= mappings[-1].end)
        check(all(one.end == two.base for one, two in itertools.pairwise(mappings)))
        return mappings

    def whole_span(self, address: int, size: int) -> list[MappedExtent]:
        """Return the mappings of a range that begins where a mapping begins and ends where one ends.

        The range may contain holes. Gives CUDA_ERROR_INVALID_VALUE for any other range.
        """
        mappings = self.mappings(address, address + size)
        check(mappings and mappings[0].base == address and mappings[-1].end == address + size)
        return mappings
