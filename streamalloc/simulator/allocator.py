"""The stream-ordered allocator as pure bookkeeping: no memory, no threads, no driver.

The addresses of a pool form one range, the *line*. It is divided into adjacent blocks without gaps. A block is in one
of three states:

* used;
* *left* by a stream: freed in that stream, and no call has found yet that the free has run;
* free for all streams.

Adjacent blocks that are free for all streams are merged. So are adjacent blocks that the same stream left. The free
blocks of one owner lie on a *shelf*, sorted by size: one shelf for each stream, and one for all streams. An allocation
*carves* its bytes out of a free block: they become a used block, and the rest stays free.

Physical memory is mapped under the addresses in *chunks* of 32 MiB. To *back* a chunk is to map its memory. Each chunk
under a used or left block is backed. Blocks that are free for all streams may lack the memory of some or all of their
chunks. A backed chunk that lies under no used or left block is *spare*: its memory may be released, or moved to other
addresses. The *end of the line* is the last block, if that is free for all streams.

The rules for the address of an allocation were found from recordings of random programs on H200s. :meth:`.Pool._find`
follows them. The allocation takes the first block that is large enough from

1. the blocks that its own stream left;
2. the blocks that are free for all streams and have all their chunks, except the end of the line;
3. with the policy FOLLOW_EVENT_DEPENDENCIES: the blocks that other streams left before an operation which the
   allocating stream is ordered after;
4. the blocks that other streams left and whose free has run; without the policy ALLOW_OPPORTUNISTIC, only those of
   destroyed streams. If none is large enough, all of them become free for all streams;
5. the blocks that are free for all streams, with or without chunks, and last the end of the line;
6. with the policy ALLOW_INTERNAL_DEPENDENCIES, if there is no memory for the block of rule 5: the blocks that other
   streams left. The allocating stream then waits for that free.

Within each group the smallest sufficient block is taken; of equal sizes, the one that came into the group first. Rules
3 and 4 visit the streams in the order of their ranks (:meth:`.scheduler.Scheduler.rank`). Missing chunks are first
taken from other blocks that are free for all streams.

Memory above the threshold is released block by block, beginning with the block that has been free longest. The end of
the line counts as one of these blocks. A block keeps its age when a block behind it is merged into it, and so does the
rest of a block when its first bytes are allocated. A trim begins with the highest addresses.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator

from streamalloc.simulator.constants import CHUNK

USED = -1
"""Value of :attr:`Block.owner` for a block that is in use."""
FREE_FOR_ALL = 0
"""Value of :attr:`Block.owner` for a block that is free for all streams. Any other value is the number of the stream
that left the block.
"""


class Block:
    """Range of addresses in a pool, or in a heap of :mod:`.banks`, linked with the blocks before and after it.

    ``start``: offset in bytes from the first address of the pool or heap. ``owner``: :data:`USED`,
    :data:`FREE_FOR_ALL`, or the number of the stream that left the block. A left block is free once operation ``seq``
    of that stream has run.
    """

    __slots__ = ("next", "owner", "prev", "seq", "since", "size", "stamp", "start")

    def __init__(self, start: int, size: int, owner: int = FREE_FOR_ALL, seq: int = 0) -> None:
        self.start: int = start
        self.size: int = size
        self.owner: int = owner
        self.seq: int = seq
        self.since: int = 0  # Value of the pool's clock when the block was freed.
        # Value of the pool's clock when the block was put on its shelf.
        self.stamp: int = 0
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def end(self) -> int:
        return self.start + self.size

    def split(self, size: int) -> Block:
        """Cut the block after ``size`` bytes. Returns the new block, which has the rest of the addresses."""
        rest = Block(self.start + size, self.size - size, self.owner, self.seq)
        rest.since = self.since
        rest.prev, rest.next, self.next = self, self.next, rest
        if rest.next is not None:
            rest.next.prev = rest
        self.size = size
        return rest

    def merge(self, take_off: Callable[[Block], object]) -> Block:
        """Merge this free block with its neighbours of the same owner. ``take_off`` is called with each neighbour, and
        removes it from its shelf. Returns the merged block.
        """
        before, after = self.prev, self.next
        if after is not None and after.owner == self.owner:
            take_off(after)
            self._absorb(after)
        if before is not None and before.owner == self.owner:
            take_off(before)
            before._absorb(self)
            return before
        return self

    def _absorb(self, following: Block) -> None:
        """Extend this block by the block after it."""
        self.size += following.size
        self.seq = max(self.seq, following.seq)
        self.next = following.next
        if self.next is not None:
            self.next.prev = self


class Shelf:
    """Free blocks of one owner, ordered by size. Blocks of equal size are ordered by their time on the shelf, the
    oldest first.
    """

    def __init__(self) -> None:
        self._sorted: list[tuple[int, int, Block]] = []
        """Tuples of size, stamp and block. No two stamps are equal, so a comparison of tuples never compares blocks."""

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[Block]:
        return (block for _, _, block in self._sorted)

    def put(self, block: Block, stamp: int) -> None:
        block.stamp = stamp
        insort(self._sorted, (block.size, stamp, block))

    def remove(self, block: Block) -> None:
        del self._sorted[bisect_left(self._sorted, (block.size, block.stamp))]

    def best(self, size: int) -> Block | None:
        """Return the smallest block of at least ``size`` bytes; None if there is none.

        Of blocks of equal size, it is the block that has been on the shelf longest.
        """
        return next(self.fitting(size), None)

    def fitting(self, size: int) -> Iterator[Block]:
        """Yield the blocks of at least ``size`` bytes, in the order of the shelf."""
        found = self._sorted
        return (found[at][2] for at in range(bisect_left(found, (size,)), len(found)))


Reach = Callable[[int], int]
"""Function that takes the number of a stream and returns an operation number: blocks that the stream left up to this
operation can be taken.
"""


class PoolAddresses:
    """Addresses of one pool: its blocks, the shelves of the free blocks, and the numbers of the chunks with memory.
    ``capacity``: number of bytes of addresses. ``ranks``: ranks of streams by stream number (:attr:`.Scheduler.ranks`).
    """

    def __init__(self, capacity: int, ranks: dict[int, int]) -> None:
        self.capacity = capacity
        self._last = Block(0, capacity)
        # Blocks that are free for all streams, except the end of the line.
        self._common = Shelf()
        # Blocks that each stream left, by the stream's number.
        self._left: defaultdict[int, Shelf] = defaultdict(Shelf)
        self._ranks = ranks
        self.backed: set[int] = set()
        """Numbers of the chunks that have memory."""
        self._clock = 0  # Clock of the pool: number of times that a block was put on a shelf.

    # -- queries ---------------------------------------------------------------------------------------------

    @property
    def reserved(self) -> int:
        return len(self.backed) * CHUNK

    def pending_streams(self) -> list[int]:
        return [stream for stream, shelf in self._left.items() if shelf]

    # -- allocating ------------------------------------------------------------------------------------------

    # Each method returns the smallest block of at least ``size`` bytes; None if no block is large enough.

    def best_own(self, size: int, stream: int) -> Block | None:
        """Find a block that a stream left (rule 1 of this module)."""
        return self._left[stream].best(size)

    def best_backed(self, size: int) -> Block | None:
        """Find a block that is free for all streams and has all its chunks (rule 2)."""
        return next(filter(self._is_backed, self._common.fitting(size)), None)

    def best_common(self, size: int) -> Block | None:
        """Find a block that is free for all streams, with or without chunks (rule 5)."""
        block = self._common.best(size)
        if block is None and self._last.owner == FREE_FOR_ALL and self._last.size >= size:
            block = self._last
        return block

    def best_left(self, size: int, reach: Reach) -> Block | None:
        """Find a block that a stream left at an operation number up to ``reach(stream)`` (rules 3, 4 and 6). The
        streams are searched in the order of their ranks.
        """
        for stream, shelf in self._shelves():
            limit = reach(stream)
            block = next((one for one in shelf.fitting(size) if one.seq <= limit), None)
            if block is not None:
                return block
        return None

    def carve(self, block: Block, size: int) -> Block:
        """Mark the first ``size`` bytes of a free block as used, and return these bytes as a block. The other bytes
        stay free.
        """
        self._take_off(block)
        if block.size > size:
            rest = block.split(size)
            if block is self._last:
                self._last = rest
            self._put(rest)
        block.owner = USED
        return block

    # -- freeing ---------------------------------------------------------------------------------------------

    def free(self, block: Block, owner: int = FREE_FOR_ALL, seq: int = 0) -> None:
        """Free a block that is on no shelf, and merge it with neighbours of the same owner.

        ``owner``: number of the stream that leaves the block, which is free once operation ``seq`` of the stream has
        run. By default the block is free for all streams.
        """
        block.owner, block.seq, block.since = owner, seq, self._clock
        block = block.merge(self._take_off)
        if block.next is None:
            self._last = block
        self._put(block)

    def free_left(self, reach: Reach) -> bool:
        """Make blocks free for all streams: those that a stream left at an operation number of at most
        ``reach(stream)``. Returns whether there were any.
        """
        changed = False
        for stream, shelf in self._shelves():
            limit = reach(stream)
            found = [one for one in shelf if one.seq <= limit]
            for block in sorted(found, key=lambda block: (block.seq, block.stamp), reverse=True):
                shelf.remove(block)
                self.free(block)
                changed = True
            # A destroyed stream leaves no further blocks, so its empty shelf can be removed.
            if not shelf and stream not in self._ranks:
                del self._left[stream]
        return changed

    # -- chunks with and without memory ----------------------------------------------------------------------

    def missing(self, block: Block, size: int) -> list[int]:
        """Return the numbers of the chunks without physical memory, among those under the first ``size`` bytes of a
        block.
        """
        last = (block.start + size - 1) // CHUNK
        return [chunk for chunk in range(block.start // CHUNK, last + 1) if chunk not in self.backed]

    def spare(self) -> list[int]:
        """Return the numbers of the chunks that have memory and lie under no used or left block. The chunks that have
        been free longest come first, because they are released first.
        """
        found = [(block.since, at) for block in self._common for at in self._inner(block) if at in self.backed]
        if self._last.owner == FREE_FOR_ALL:
            low = -(-self._last.start // CHUNK)
            found += [(self._last.since, at) for at in self.backed if at >= low]
        return [at for _, at in sorted(found)]

    def spare_besides(self, block: Block, size: int) -> list[int]:
        """Return the numbers of the spare chunks that are not under the first ``size`` bytes of a block, lowest number
        first.
        """
        low, high = block.start // CHUNK, (block.start + size - 1) // CHUNK
        return sorted(at for at in self.spare() if not low <= at <= high)

    def _inner(self, block: Block) -> range:
        """Return the numbers of the chunks whose addresses lie entirely within a block."""
        return range(-(-block.start // CHUNK), block.end // CHUNK)

    def _is_backed(self, block: Block) -> bool:
        """Whether every chunk that a block overlaps has memory."""
        return all(at in self.backed for at in range(block.start // CHUNK, (block.end - 1) // CHUNK + 1))

    # -- shelves and links -----------------------------------------------------------------------------------

    def _shelves(self) -> list[tuple[int, Shelf]]:
        """Return a tuple of number and shelf for each stream that left blocks, in the order in which the streams are
        searched.
        """
        return sorted(self._left.items(), key=lambda item: self._ranks.get(item[0], -1))

    def _put(self, block: Block) -> None:
        self._clock += 1
        if block.owner != FREE_FOR_ALL:
            self._left[block.owner].put(block, self._clock)
        elif block is not self._last:
            self._common.put(block, self._clock)

    def _take_off(self, block: Block) -> None:
        if block.owner != FREE_FOR_ALL:
            self._left[block.owner].remove(block)
        elif block is not self._last:
            self._common.remove(block)
