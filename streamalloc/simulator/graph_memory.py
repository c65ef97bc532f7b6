"""Memory of graphs: each graph has its own addresses, and the graphs of a device share physical memory.

A graph that frees all its allocations needs memory only while a launch runs. Such launches share one slab of physical
memory if each is ordered after the previous one, or that is done. A launch that could run concurrently with another
gets a different slab. If allocations outlive a launch, their graph has a slab of its own while they live. Slabs stay
until cuDeviceGraphMemTrim, even after the graphs are destroyed.
"""

from __future__ import annotations

import itertools
from collections.abc import Container
from dataclasses import dataclass, field
from typing import NamedTuple

from streamalloc.simulator.banks import Bank, Banks
from streamalloc.simulator.constants import ALIGNMENT, CHUNK, round_up
from streamalloc.simulator.errors import Result, check
from streamalloc.simulator.memory import Physical, Reservation
from streamalloc.simulator.scheduler import Clock, Operation, Points, Queue


class LastUses:
    """The last use of memory, as an operation number per stream."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[Queue, int]] = {}

    def add(self, stream: Queue, seq: int) -> None:
        self._last[stream.id] = (stream, seq)

    def unfinished(self) -> Points:
        self._last = {number: (stream, seq) for number, (stream, seq) in self._last.items() if stream.done < seq}
        return tuple(self._last.values())

    def over_for(self, clock: Clock) -> bool:
        """Whether all uses are done, or precede all work that is ordered after ``clock``."""
        return all(clock.get(stream.id, 0) >= seq for stream, seq in self.unfinished())


@dataclass(eq=False)
class DeviceGraphMemory:
    """Graph memory of a device, with high-water marks. All memory that is mapped at addresses counts as used (observed
    on H200: test_graph_memory, test_graph_nodes).
    """

    banks: Banks
    bank: Bank
    size: int = 0
    used: int = 0
    used_high: int = 0
    reserved_high: int = 0
    slabs: list[Slab] = field(default_factory=list)
    memories: set[GraphHeap] = field(default_factory=set)
    _set_aside: Reservation | None = None

    def set_aside(self) -> None:
        """Reserve the addresses for all graphs, as many as a pool has (observed on H200: test_address_ranges)."""
        if self._set_aside is None:
            self._set_aside = Reservation(round_up(self.bank.addresses, CHUNK), CHUNK, low=True)

    def __post_init__(self) -> None:
        self.banks.reserves.append((self.bank, self.trim))

    def resize(self, change: int, used: int) -> None:
        self.bank.used += change
        self.size += change
        self.used += used
        self.used_high = max(self.used_high, self.used)
        self.reserved_high = max(self.reserved_high, self.size)

    def collect(self) -> None:
        """Release the addresses of graphs that were destroyed while a launch was queued."""
        for memory in list(self.memories):
            memory.close_unless_needed()

    def trim(self) -> None:
        """Release unused slabs, and unused ends of slabs."""
        for slab in list(self.slabs):
            if slab.idle:
                for memory in self.memories:
                    memory.lose(slab)
                slab.close()
            elif slab.owner is not None and not slab.uses.unfinished():
                slab.shrink(slab.owner.chunks_in_use() * CHUNK)
        self.collect()

    def close(self) -> None:
        for memory in list(self.memories):
            memory.close()
        for slab in list(self.slabs):
            slab.close()
        if self._set_aside is not None:
            self._set_aside.close()


class Slab:
    """Physical memory under graphs of one device."""

    def __init__(self, shared: DeviceGraphMemory) -> None:
        self._shared = shared
        self.owner: GraphHeap | None = None
        """The graph with exclusive use while its allocations outlive launches."""
        self.size: int = 0
        self.used: int = 0
        self.uses: LastUses = LastUses()
        self.physical: Physical = Physical("graph", round_up(shared.bank.total, CHUNK))
        shared.slabs.append(self)

    def grow(self, size: int, used: int) -> None:
        """Grow to ``size`` bytes, ``used`` of them with addresses. Bytes of other slabs without addresses are taken
        first.
        """
        missing, more = max(size - self.size, 0), max(used - self.used, 0)
        for slab in self._shared.slabs:
            if slab is not self:
                spare = min(slab.size - slab.used, missing)
                slab.size -= spare
                self.size += spare
                missing -= spare
        bank = self._shared.bank
        check(self._shared.banks.make_room(bank, missing), Result.CUDA_ERROR_OUT_OF_MEMORY)
        self._shared.resize(missing, more)
        self.size += missing
        self.used += more

    def split(self, size: int, used: int) -> None:
        """Release bytes beyond ``size``, and addresses beyond ``used``, for other graphs."""
        if self.size > size:
            rest = Slab(self._shared)
            rest.size, rest.used = self.size - size, max(self.used - used, 0)
            self.size, self.used = size, min(self.used, used)
            for stream, seq in self.uses.unfinished():
                rest.uses.add(stream, seq)

    def shrink(self, size: int) -> None:
        less, unused = max(self.size - size, 0), max(self.used - size, 0)
        self._shared.resize(-less, -unused)
        self.size -= less
        self.used -= unused

    @property
    def idle(self) -> bool:
        return not self.uses.unfinished() and not (self.owner is not None and self.owner.live)

    def close(self) -> None:
        self._shared.resize(-self.size, -self.used)
        self._shared.slabs.remove(self)
        self.physical.close()


class Hole(NamedTuple):
    """A range that a node of the graph freed."""

    size: int
    address: int
    freed_by: object
    earlier: Container[object]
    """The nodes before that node."""

    @property
    def end(self) -> int:
        return self.address + self.size


class GraphHeap:
    """The addresses of a graph's allocations on one device, and the slab of its latest launch there."""

    def __init__(self, shared: DeviceGraphMemory) -> None:
        shared.collect()
        shared.set_aside()
        self._shared = shared
        self._reservation = Reservation(round_up(shared.bank.addresses, CHUNK), CHUNK)
        shared.banks.arenas.add(self._reservation)
        self._size = 0
        self._reserved = 0
        self.holes: list[Hole] = []
        """Holes in the order of their frees."""
        self._slab: Slab | None = None
        self._mapped: tuple[Slab, int] | None = None  # in stream order, for launches that are queued
        self.uses: LastUses = LastUses()
        self.live: dict[int, int] = {}
        """Sizes of the allocations that outlived a launch, by address."""
        self.owners: int = 1
        shared.memories.add(self)

    # -- addresses -------------------------------------------------------------------------------------------

    def holds(self, address: int) -> bool:
        return 0 <= address - self._reservation.base < self._size

    def place(self, size: int, earlier: Container[object]) -> int:
        """Choose the address of an allocation node: the smallest sufficient hole left by ``earlier`` nodes, of equal
        ones the oldest, else new addresses (observed on H200: test_graph_memory, test_graph_nodes).
        """
        rounded = round_up(size, ALIGNMENT)
        fitting = (hole for hole in self.holes if hole.size >= rounded and hole.freed_by in earlier)
        hole = min(fitting, key=lambda one: one.size, default=None)
        if hole is not None:
            rest = hole._replace(size=hole.size - rounded, address=hole.address + rounded)
            at = self.holes.index(hole)
            self.holes[at : at + 1] = [rest] if rest.size else []
            return hole.address
        # The graphs of a device share as many addresses as a pool has. A lack of memory shows only at the launch
        # (observed on H200: test_graph_nodes).
        taken = sum(memory._size for memory in self._shared.memories)
        check(taken + rounded <= self._reservation.size, Result.CUDA_ERROR_OUT_OF_MEMORY)
        address = self._reservation.base + self._size
        self._size += rounded
        if self._size > self._reserved:
            # grows by the whole allocation, not only by its excess (observed on H200: test_graph_nodes)
            self._reserved += round_up(rounded, CHUNK)
        return address

    def leave(self, address: int, size: int, freed_by: object, earlier: Container[object]) -> None:
        """Free the range of a node. It is merged with adjacent holes that ``earlier`` nodes left, and only later nodes
        can reuse the merged hole. Of two adjacent holes whose nodes have no order it is merged with the following one
        (observed on H200: test_graph_nodes).
        """
        start, end = address, address + round_up(size, ALIGNMENT)
        earlier_holes = [hole for hole in self.holes if hole.freed_by in earlier]
        beside = [hole for hole in earlier_holes if hole.end == start or hole.address == end]
        if len(beside) == 2:
            before, behind = sorted(beside, key=lambda hole: hole.address)
            if before.freed_by not in behind.earlier and behind.freed_by not in before.earlier:
                beside = [behind]
        start = min([start, *(hole.address for hole in beside)])
        end = max([end, *(hole.end for hole in beside)])
        kept = [hole for hole in self.holes if hole not in beside]
        self.holes = [*kept, Hole(end - start, start, freed_by, earlier)]

    # -- launches --------------------------------------------------------------------------------------------

    def prepare(self, clock: Clock, outlives: bool) -> Slab:
        """Choose the slab for a launch that is ordered after ``clock``. ``outlives``: its allocations outlive it."""
        slabs = [slab for slab in self._shared.slabs if slab.owner in (None, self) or not slab.owner.live]
        usable = [slab for slab in slabs if slab.uses.over_for(clock)]
        # memory that no other graph has mapped is taken first (observed on H200: test_graph_memory)
        held = {memory._slab for memory in self._shared.memories if memory is not self}
        slab = max(usable, key=lambda one: (one is self._slab, one not in held, one.size), default=None)
        spare = sum(one.size - one.used for one in self._shared.slabs)
        if slab is None or (slab in held and slab is not self._slab and spare >= self._reserved):
            slab = Slab(self._shared)
        slab.owner = self if outlives else None
        slab.grow(self._reserved, round_up(self._size, CHUNK))
        if outlives:
            slab.split(self._reserved, round_up(self._size, CHUNK))
        self._slab = slab
        return slab

    def map(self, slab: Slab) -> None:
        """Map the slab at the addresses. Runs in stream order, because earlier launches may use another slab."""
        size = round_up(self._size, CHUNK)
        if self._mapped != (slab, size):
            self._reservation.map(self._reservation.base, size, slab.physical.fd, 0)
            self._mapped = (slab, size)

    def in_use(self, stream: Queue, seq: int) -> None:
        """Record that a stream may use the memory until its operation ``seq`` has run."""
        self.uses.add(stream, seq)
        if self._slab is not None:
            self._slab.uses.add(stream, seq)

    def freed(self, address: int, stream: Queue | None = None) -> None:
        """Record the free of an allocation that outlived its launch."""
        self.live.pop(address, None)
        if stream is not None:
            self.in_use(stream, stream.submit(Operation()))

    def chunks_in_use(self) -> int:
        """The number of chunks with a part of a live allocation."""
        base = self._reservation.base
        touched = (
            range((address - base) // CHUNK, (address - base + size - 1) // CHUNK + 1)
            for address, size in self.live.items()
        )
        return len(set(itertools.chain.from_iterable(touched)))

    # -- the end ---------------------------------------------------------------------------------------------

    def lose(self, slab: Slab) -> None:
        """Release the slab."""
        if self._mapped is not None and self._mapped[0] is slab:
            self._reservation.unmap(self._reservation.base, self._mapped[1])
            self._mapped = None
        if self._slab is slab:
            self._slab = None

    def keep_only_live(self) -> None:
        """Give other graphs the chunks without a live allocation. They still count as used (observed on H200:
        test_graph_memory).
        """
        if self.live and self._slab is not None:
            size = self.chunks_in_use() * CHUNK
            self._slab.split(size, size)

    def disown(self) -> None:
        """Drop a reference to the addresses, as its graph or executable graph was destroyed."""
        self.owners -= 1
        self.close_unless_needed()

    def close_unless_needed(self) -> None:
        if not (self.owners or self.live or self.uses.unfinished()):
            self.close()

    def close(self) -> None:
        """Release the addresses, and give the slab to other graphs."""
        self._shared.memories.discard(self)
        self._shared.banks.arenas.remove(self._reservation)
        self._reservation.close()
        for slab in self._shared.slabs:
            if slab.owner is self:
                slab.owner = None
