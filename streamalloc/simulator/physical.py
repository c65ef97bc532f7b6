"""Physical memory, its mappings and their access rights."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from streamalloc.formats.ranges import Extent
from streamalloc.simulator.banks import Arenas, Bank
from streamalloc.simulator.constants import NO_ACCESS, Location, Place, new_handle
from streamalloc.simulator.errors import NotModelled, Result, check
from streamalloc.simulator.memory import Physical, ReservedExtent, ReservedRange, window


@dataclass(frozen=True)
class Properties:
    """Properties of physical memory, as the driver returns them."""

    place: Place
    handle_types: int = 0
    compression: int = 0
    rdma: int = 0
    tile_pool: bool = False
    """Memory for tiles of sparse arrays; not reported back (observed on H200: test_sparse_arrays)."""

    @property
    def device(self) -> int | None:
        """Device of the memory; None for host memory."""
        return self.place.device


class Mappable:
    """Object of a CUmemGenericAllocationHandle, with the numbers of its handles and mappings."""

    def __init__(self, size: int, properties: Properties) -> None:
        self.handle: int = new_handle()
        self.size = size
        self.properties = properties
        self.handles = 1
        self.mappings = 0
        self.leader: MappedExtent | None = None
        """For RDMA memory: the mapping that decides whether other mappings can be made or get access (observed on H200:
        test_mappings). None without such a mapping.

        * Without a leader, the next mapping that is made or gets its first access becomes the leader.
        * A mapping that is unmapped stops being the leader. If it became the leader by access, it also stops when it
          has lost all access.
        * While a mapping leads by access, no other mapping can be made or get its first access.
        """
        self.leads_by_access: bool = False
        """Whether the leader became the leader by its first access; False if it did when it was made."""

    def lead(self, mapping: MappedExtent, by_access: bool) -> None:
        """Make a mapping the leader if there is none, because it is new or gets its first access (``by_access``).

        Gives CUDA_ERROR_UNKNOWN if another mapping leads by access.
        """
        if self.properties.rdma:
            check(not self.leads_by_access or self.leader is mapping, Result.CUDA_ERROR_UNKNOWN)
            if self.leader is None:
                self.leader, self.leads_by_access = mapping, by_access

    def lose_leader(self, mapping: MappedExtent) -> None:
        if self.leader is mapping:
            self.leader, self.leads_by_access = None, False

    def check_part(self, offset: int, size: int) -> None:
        """Raise the driver's error unless this range can be mapped."""
        raise NotImplementedError

    def map_at(self, found: ReservedRange, start: int, size: int, offset: int) -> None:
        """Map the bytes from ``offset`` on at address ``start`` of a reservation.

        A multicast object has no bytes of its own, so nothing is mapped for it.
        """

    def leave(self) -> None:
        """Release the memory if no handle and no mapping is left."""
        raise NotImplementedError


class CreatedMemory(Mappable):
    """View that one handle has of physical memory: ``size`` bytes of a file, from ``offset`` on.

    The memory exists until each returned handle is released, and no mapping or multicast binding is left. Then its
    bytes return to ``bank``; None if they came from another process's bank.
    """

    def __init__(
        self, arenas: Arenas, physical: Physical, offset: int, size: int, properties: Properties, bank: Bank | None
    ) -> None:
        super().__init__(size, properties)
        self._arenas = arenas
        self.physical = physical
        self.offset = offset
        self.bank = bank
        self.bindings = 0
        """Number of bindings of the memory to multicast objects."""
        self.tiles = 0
        """Number of array tiles mapped now or by queued work."""

    @functools.cached_property
    def window(self) -> ReservedExtent:
        """Mapping of the whole memory, for work without simulated addresses."""
        return self._arenas.own(window(self.physical.fd, self.offset, self.size))

    def check_part(self, offset: int, size: int) -> None:
        check(size == self.size and not offset, Result.CUDA_ERROR_NOT_SUPPORTED)

    def map_at(self, found: ReservedRange, start: int, size: int, offset: int) -> None:
        found.map(start, size, self.physical.fd, self.offset + offset)

    def leave(self) -> None:
        if self.handles or self.mappings or self.bindings:
            return
        if "window" in vars(self):
            self.window.close()
            del self.window
        if self.bank is None:
            self.physical.close()
        elif self.properties.handle_types:
            self.bank.release(self.physical)
        else:
            self.bank.used -= self.size
            self.physical.discard(self.offset, self.size)


@dataclass(eq=False)
class MappedExtent(Extent):
    """Memory mapped at an address, with its access rights."""

    base: int
    size: int
    memory: Mappable
    rights: dict[Place, int] = field(default_factory=dict)
    """Access rights by location, in the order of setting. Revoked rights are removed."""

    @property
    def is_multicast(self) -> bool:
        return not isinstance(self.memory, CreatedMemory)

    def right(self, place: Place) -> int:
        return self.rights.get(place, NO_ACCESS)

    def grant(self, place: Place, flags: int) -> None:
        had = self.rights.pop(place, None)
        if flags:
            if had is None:
                self.memory.lead(self, True)
            self.rights[place] = flags
        elif self.memory.leads_by_access and not self.rights:
            self.memory.lose_leader(self)

    def right_of_host(self) -> int:
        """Return the access that a query of HOST returns: the right of device 0 or of the host, whichever was set last.

        Observed on H200 (test_mapping_access), even for device memory, which the host can never use. Raises
        :class:`NotModelled` if a device other than 0 has access.
        """
        if any(place.type == Location.DEVICE and place.id for place in self.rights):
            raise NotModelled("cuMemGetAccess for HOST where a device other than 0 has access")
        return next(reversed(self.rights.values()), NO_ACCESS)


def connected(mappings: list[MappedExtent]) -> list[MappedExtent]:
    """Return the mappings before the first hole.

    Only these get access, and the call reports no error (observed on H200: test_mapping_access).
    """
    hole = (at for at, (one, two) in enumerate(itertools.pairwise(mappings), 1) if one.end != two.base)
    return mappings[: next(hole, len(mappings))]


def least_right(mappings: Iterable[MappedExtent], place: Place) -> int:
    """Return the smallest access right that a location has among these mappings, of which there is at least one."""
    return min(mapping.right(place) for mapping in mappings)
