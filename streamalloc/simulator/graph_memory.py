"""Memory of graphs: each graph has its own addresses, and the graphs of a device share physical memory.

The physical memory consists of *chunks*. A launch reserves a number of chunks, and maps the chunks that it needs at the
addresses of its graph. The launch can take a chunk in which no allocation is live, if the last use of the chunk is done
or precedes the launch. So a graph that frees all its allocations needs its chunks only while a launch runs. Chunks stay
until cuDeviceGraphMemTrim, even after the graphs are destroyed.
"""

from __future__ import annotations

import functools
from collections.abc import Container
from dataclasses import dataclass, field
from typing import NamedTuple

from streamalloc.simulator.banks import Bank, Banks
from streamalloc.simulator.constants import ALIGNMENT, CHUNK, round_up
from streamalloc.simulator.errors import Result, check
from streamalloc.simulator.memory import Physical, ReservedExtent
from streamalloc.simulator.scheduler import Clock, LastUses, Operation, Stream


class GraphChunk:
    """Chunk of a device's physical memory for graphs. Launches map the chunk at addresses of their graphs."""

    def __init__(self, offset: int) -> None:
        self.offset: int = offset
        """Offset of the chunk in bytes in the file with the device's graph memory."""
        self.used: bool = False
        """Whether a launch has ever mapped the chunk. From then on the chunk counts as used."""
        self.owner: GraphHeap | None = None
        """The graph heap that has allocations in this chunk which outlive a launch; None if there is none."""
        self.uses: LastUses = LastUses()

    @property
    def is_live(self) -> bool:
        return self.owner is not None and self.owner.lives_in(self)


@dataclass(eq=False)
class DeviceGraphMemory:
    """Graph memory of a device, with high-water marks in bytes.

    All memory that a launch has ever mapped counts as used (observed on H200: test_graph_memory, test_graph_nodes).
    """

    banks: Banks
    bank: Bank
    used_high: int = 0
    reserved_high: int = 0
    chunks: list[GraphChunk] = field(default_factory=list)
    memories: set[GraphHeap] = field(default_factory=set)
    _set_aside: ReservedExtent | None = None

    def set_aside(self) -> None:
        """Reserve as many addresses as a pool has, when the first graph of the device gets an allocation. So no other
        reservation gets these addresses (observed on H200: test_physical_memory).
        """
        if self._set_aside is None:
            whole = ReservedExtent(round_up(self.bank.addresses, CHUNK), CHUNK, low=True)
            self._set_aside = self.banks.arenas.own(whole)

    def __post_init__(self) -> None:
        self.banks.reserves.append((self.bank, self.trim))

    @functools.cached_property
    def physical(self) -> Physical:
        return self.banks.arenas.own(Physical("graph", 0))

    @property
    def size(self) -> int:
        return len(self.chunks) * CHUNK

    @property
    def used(self) -> int:
        return sum(chunk.used for chunk in self.chunks) * CHUNK

    def take(
        self, reserved: int, mapped: int, clock: Clock, before: Container[GraphChunk], moved: bool
    ) -> list[GraphChunk]:
        """Choose ``mapped`` chunks for a launch that is ordered after ``clock``.

        If fewer than ``reserved`` chunks are usable, the missing chunks are made. For this, unused memory of pools is
        released. Gives CUDA_ERROR_OUT_OF_MEMORY if the bank still has too little memory. The chunks that the graph had
        ``before`` are chosen first, then the oldest chunks, or the newest if chunks were made. With ``moved``, the
        chosen chunks count as the newest from now on (observed on H200: test_graph_memory).
        """
        free = [chunk for chunk in self.chunks if not chunk.is_live and chunk.uses.over_for(clock)]
        missing = max(reserved - len(free), 0)
        check(self.banks.make_room(self.bank, missing * CHUNK), Result.CUDA_ERROR_OUT_OF_MEMORY)
        new = [GraphChunk(self.physical.extend(CHUNK)) for _ in range(missing)]
        self.chunks += new
        self.bank.used += missing * CHUNK
        chosen = sorted([*new, *reversed(free)] if new else free, key=lambda chunk: chunk not in before)[:mapped]
        for chunk in chosen:
            chunk.used = True
        if moved:
            self.chunks = [*(chunk for chunk in self.chunks if chunk not in chosen), *chosen]
        self.used_high = max(self.used_high, self.used)
        self.reserved_high = max(self.reserved_high, self.size)
        return chosen

    def collect(self) -> None:
        """Release the addresses of destroyed graphs that no queued launch and no live allocation uses any more."""
        for memory in list(self.memories):
            memory.close_unless_needed()

    def trim(self) -> None:
        """Release the chunks that no work and no live allocation uses (``cuDeviceGraphMemTrim``)."""
        for chunk in list(self.chunks):
            if not chunk.is_live and not chunk.uses.unfinished():
                self._release(chunk)
        self.collect()

    def _release(self, chunk: GraphChunk) -> None:
        for memory in self.memories:
            memory.lose(chunk)
        self.chunks.remove(chunk)
        self.bank.used -= CHUNK
        self.physical.discard(chunk.offset, CHUNK)


class Hole(NamedTuple):
    """Free range in a graph's addresses, which the free node ``freed_by`` left."""

    size: int
    address: int
    freed_by: object
    earlier: Container[object]
    """The nodes that precede ``freed_by``."""

    @property
    def end(self) -> int:
        return self.address + self.size


class GraphHeap:
    """Addresses of a graph's allocations on one device, and the chunks of the graph's latest launch there."""

    def __init__(self, shared: DeviceGraphMemory) -> None:
        shared.collect()
        shared.set_aside()
        self._shared = shared
        self._reservation = shared.banks.arenas.add(ReservedExtent(round_up(shared.bank.addresses, CHUNK), CHUNK))
        self._size = 0
        self._reserved = 0
        self.holes: list[Hole] = []
        """Free ranges that free nodes left, the oldest first."""
        # Chunks of the latest launch, with the numbers of their places: ranges of CHUNK bytes in the graph's addresses.
        self._places: dict[GraphChunk, int] = {}
        # Chunk that the last finished launch has mapped at each place, by number of the place.
        self._mapped: dict[int, GraphChunk] = {}
        self.uses: LastUses = LastUses()
        self.live: dict[int, int] = {}
        """Sizes in bytes of the allocations that outlived a launch, by address."""
        self.owners: int = 1
        shared.memories.add(self)

    # -- addresses of allocations ----------------------------------------------------------------------------

    def contains(self, address: int) -> bool:
        return 0 <= address - self._reservation.base < self._size

    def place(self, size: int, earlier: Container[object]) -> int:
        """Choose the address of an allocation node. ``earlier``: the nodes that precede it.

        The node gets the address of the smallest sufficient hole that one of these nodes left; of equal holes, the
        oldest. Without such a hole the node gets new addresses (observed on H200: test_graph_memory, test_graph_nodes).
        Gives CUDA_ERROR_OUT_OF_MEMORY if no addresses are left.
        """
        rounded = round_up(size, ALIGNMENT)
        fitting = (hole for hole in self.holes if hole.size >= rounded and hole.freed_by in earlier)
        hole = min(fitting, key=lambda one: one.size, default=None)
        if hole is not None:
            rest = hole._replace(size=hole.size - rounded, address=hole.address + rounded)
            at = self.holes.index(hole)
            self.holes[at : at + 1] = [rest] if rest.size else []
            return hole.address
        # All graphs of a device together have as many addresses as one pool. A lack of memory only shows at the launch
        # (observed on H200: test_graph_nodes).
        taken = sum(memory._size for memory in self._shared.memories)
        check(taken + rounded <= self._reservation.size, Result.CUDA_ERROR_OUT_OF_MEMORY)
        address = self._reservation.base + self._size
        self._size += rounded
        if self._size > self._reserved:
            # The heap grows by the whole size of the allocation, although a part of it may fit into the heap (observed
            # on H200: test_graph_nodes).
            self._reserved += round_up(rounded, CHUNK)
        return address

    def leave(self, address: int, size: int, freed_by: object, earlier: Container[object]) -> None:
        """Make the range of an allocation a hole, because the free node ``freed_by`` frees it.

        ``earlier``: the nodes that precede ``freed_by``.

        The hole is merged with the holes directly below and above it, if earlier nodes left those holes. Only nodes
        after ``freed_by`` can use the merged hole. If there is no order between the nodes of the two neighbours, only
        the hole above is merged here; an H200 merges one of the two, not always the one above (test_graph_nodes).
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
        self.holes = [*(hole for hole in self.holes if hole not in beside), Hole(end - start, start, freed_by, earlier)]

    # -- launches --------------------------------------------------------------------------------------------

    def prepare(self, clock: Clock, outlives: bool, moved: bool) -> dict[GraphChunk, int]:
        """Choose the chunks of memory for a launch that is ordered after ``clock``. Returns the place of each chunk:
        the place n, from 0 on, is the range of ``CHUNK`` bytes that begins at n times ``CHUNK`` in the addresses of the
        heap. Gives CUDA_ERROR_OUT_OF_MEMORY as :meth:`DeviceGraphMemory.take` does.

        ``outlives``: whether an allocation outlives the launch; the heap then owns the chunks. ``moved``: whether the
        launch before was in another stream.
        """
        self._leave_chunks()
        size = round_up(self._size, CHUNK)
        chunks = self._shared.take(self._reserved // CHUNK, size // CHUNK, clock, self._places, moved)
        for chunk in chunks:
            chunk.owner = self if outlives else None
        self._places = {chunk: place for place, chunk in enumerate(chunks)}
        return self._places

    def map(self, places: dict[GraphChunk, int]) -> None:
        """Map chunks at their places. This runs in stream order, because earlier launches may have other chunks mapped
        there.
        """
        for chunk, place in places.items():
            if self._mapped.get(place) is not chunk:
                address = self._reservation.base + place * CHUNK
                self._reservation.map(address, CHUNK, self._shared.physical.fd, chunk.offset)
                self._mapped[place] = chunk

    def in_use(self, stream: Stream, seq: int) -> None:
        """Record that operation ``seq`` is the last operation of ``stream`` that may use the addresses and the chunks
        of the heap.
        """
        self.uses.add(stream, seq)
        for chunk in self._places:
            chunk.uses.add(stream, seq)

    def freed(self, address: int, stream: Stream | None = None) -> None:
        """Record the free of an allocation that outlived its launch.

        ``stream``: the stream in whose order it is freed; this method queues an operation there. None: it is freed at
        once.
        """
        self.live.pop(address, None)
        if stream is not None:
            self.in_use(stream, stream.submit(Operation()))

    def lives_in(self, chunk: GraphChunk) -> bool:
        """Whether a live allocation of this heap has bytes in ``chunk``."""
        start = self._reservation.base + self._places[chunk] * CHUNK
        return any(address < start + CHUNK and start < address + size for address, size in self.live.items())

    # -- the end ---------------------------------------------------------------------------------------------

    def lose(self, chunk: GraphChunk) -> None:
        """Unmap a chunk that the device releases, at each place where this graph has it mapped."""
        self._places.pop(chunk, None)
        for place in [place for place, one in self._mapped.items() if one is chunk]:
            self._reservation.unmap(self._reservation.base + place * CHUNK, CHUNK)
            del self._mapped[place]

    def disown(self) -> None:
        """Record that one graph or instance no longer needs the addresses. When none needs them, they are released; if
        a launch or a live allocation still uses them, by a later :meth:`DeviceGraphMemory.collect`.
        """
        self.owners -= 1
        self.close_unless_needed()

    def close_unless_needed(self) -> None:
        if not (self.owners or self.live or self.uses.unfinished()):
            self.close()

    def close(self) -> None:
        """Release the addresses of the heap, and let other graphs use its chunks."""
        self._shared.memories.discard(self)
        self._shared.banks.arenas.remove(self._reservation)
        self._leave_chunks()

    def _leave_chunks(self) -> None:
        for chunk in self._places:
            if chunk.owner is self:
                chunk.owner = None
