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
    """Properties of physical memory, as the driver returns them (CUmemAllocationProp)."""

    place: Place
    handle_types: int = 0
    compression: int = 0
    rdma: int = 0
    tile_pool: bool = False
    """Whether the memory is for tiles of sparse arrays. The driver does not return this property (observed on H200:
    test_sparse_arrays).
    """

    @property
    def device(self) -> int | None:
        """Ordinal of the memory's device; None for host memory, -1 for a multicast object, :data:`.HIDDEN` for a device
        that this process does not see.
        """
        return self.place.device


class Mappable:
    """Object that a CUmemGenericAllocationHandle names, with the number of references to its handle and the number of
    its mappings.
    """

    def __init__(self, size: int, properties: Properties) -> None:
        self.handle: int = new_handle()
        self.size = size
        self.properties = properties
        self.handles = 1
        self.mappings = 0
        self.leader: MappedExtent | None = None
        """For RDMA-capable memory: the mapping that determines whether other mappings can be made or get access
        (observed on H200: test_mappings). None if there is no such mapping.

        * Without a leader, the next mapping that is made or gets its first access becomes the leader.
        * A mapping that is unmapped stops being the leader. A mapping that became the leader by access also stops when
          it has lost all access.
        * While a mapping is the leader by access, no other mapping can be made or get its first access.
        """
        self.leads_by_access: bool = False
        """Whether the leader became the leader when it got its first access; False if it became the leader when it was
        made.
        """

    def lead(self, mapping: MappedExtent, by_access: bool) -> None:
        """Make ``mapping`` the leader of RDMA-capable memory if there is none. ``by_access``: whether ``mapping`` gets
        its first access now; False: ``mapping`` is made now.

        Gives CUDA_ERROR_UNKNOWN if another mapping is the leader by access. No effect for other memory.
        """
        if self.properties.rdma:
            check(not self.leads_by_access or self.leader is mapping, Result.CUDA_ERROR_UNKNOWN)
            if self.leader is None:
                self.leader, self.leads_by_access = mapping, by_access

    def lose_leader(self, mapping: MappedExtent) -> None:
        if self.leader is mapping:
            self.leader, self.leads_by_access = None, False

    def check_part(self, offset: int, size: int) -> None:
        """Raise the driver's error unless ``size`` bytes from ``offset`` on can be mapped."""
        raise NotImplementedError

    def map_at(self, found: ReservedRange, start: int, size: int, offset: int) -> None:
        """Map ``size`` bytes of the object, from ``offset`` on, at address ``start`` of the reservation ``found``.

        A multicast object has no bytes of its own, so nothing is mapped for it.
        """

    def leave(self) -> None:
        """Release the memory if neither a handle nor a mapping is left."""
        raise NotImplementedError


class CreatedMemory(Mappable):
    """Physical memory as one handle names it: ``size`` bytes of a file, from ``offset`` on.

    The memory exists until all references to the handle are released, and no mapping or multicast binding is left.
    ``bank``: where its bytes count as used until then; None for memory of another process.
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
        """Number of array tiles to which the memory is mapped, or to which queued work will map it."""

    @functools.cached_property
    def window(self) -> ReservedExtent:
        """Mapping of the whole memory, made at the first use, for work on memory that has no simulated address."""
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
    """Memory mapped at a range of addresses, with the access rights of the mapping."""

    base: int
    size: int
    memory: Mappable
    rights: dict[Place, int] = field(default_factory=dict)
    """Access rights by location, in the order in which they were set. A right that was revoked is removed."""

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
        """Return the access right that a query for HOST returns: that of device 0 or of the host, whichever was set
        last.

        Observed on H200 (test_mappings), even for device memory, which the host can never use. Raises
        :class:`NotModelled` if a device other than 0 has access.
        """
        if any(place.type == Location.DEVICE and place.id for place in self.rights):
            raise NotModelled("cuMemGetAccess for HOST where a device other than 0 has access")
        return next(reversed(self.rights.values()), NO_ACCESS)


def connected(mappings: list[MappedExtent]) -> list[MappedExtent]:
    """Return the mappings before the first hole.

    cuMemSetAccess gives access only to these mappings, and reports no error (observed on H200: test_mappings).
    """
    hole = (at for at, (one, two) in enumerate(itertools.pairwise(mappings), 1) if one.end != two.base)
    return mappings[: next(hole, len(mappings))]


def least_right(mappings: Iterable[MappedExtent], place: Place) -> int:
    """Return the lowest access right that a location has in ``mappings``, which must not be empty."""
    return min(mapping.right(place) for mapping in mappings)
