"""The stream-ordered allocator as pure bookkeeping: no memory, no threads, no driver.

A pool is a line of addresses, cut into blocks that follow one another without a hole. A block is used, or free for
everybody, or *left*: freed in a stream, and nobody has seen yet that this has happened. Neighbours that are free for
everybody are one block, and so are neighbours that the same stream left.

Under the addresses lie *chunks* of memory. There is one under each address of blocks that are used or left; blocks
that are free for everybody may lack some, or all.

Where an allocation goes was found from recordings of random programs on H200s. It takes the first block that is large
enough of

1. those that its own stream left;
2. those free for everybody that have memory under all of them, without the end of the line;
3. those that other streams left before something that the allocating stream comes after, where the policy
   FOLLOW_EVENT_DEPENDENCIES says so;
4. those that other streams left and that are free by now, where ALLOW_OPPORTUNISTIC says so. All of these are then free
   for everybody if none is large enough;
5. those free for everybody, whether there is memory under them or not, and last the end of the line.

Within each the best fit comes first, and of equal ones that which has been free longest; 3 and 4 go from stream to
stream, in the order of their places (:meth:`.timeline.Timeline.rank`). What memory is missing then is first taken from
under other addresses that are free for everybody.

Memory is given up from block to block, from that which has been free longest on; the end of the line is one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from .blocks import HEAP, USED, Block, Shelf
from .constants import CHUNK

_ALL = 1 << 64


def _when_left(block: Block) -> tuple[int, int]:
    return block.seq, block.stamp


Reach = Callable[[int], int]
"""Maps a stream to a sequence number: blocks that it left up to there can be taken."""


class Line:
    """The addresses of one pool."""

    def __init__(self, capacity: int, chunk: int = CHUNK, ranks: dict[int, int] | None = None) -> None:
        self.capacity = capacity
        self.chunk = chunk
        self._head = self._last = Block(0, capacity)
        self._heap = Shelf()  # without the end of the line
        self._left: dict[int, Shelf] = {}  # by stream
        self._ranks = ranks
        self._backed: set[int] = set()  # the chunks, by number
        self._clock = 0

    # -- asking ----------------------------------------------------------------------------------------------

    @property
    def reserved(self) -> int:
        return len(self._backed) * self.chunk

    def blocks(self) -> Iterator[Block]:
        """Every block in address order."""
        block: Block | None = self._head
        while block is not None:
            yield block
            block = block.next

    def pending_streams(self) -> list[int]:
        return [stream for stream, shelf in self._left.items() if shelf]

    # -- allocating ------------------------------------------------------------------------------------------

    def find_at_hand(self, size: int, stream: int) -> Block | None:
        """The block by rules 1 and 2, which ignore the blocks that other streams left; None if none is large enough."""
        left = self._left.get(stream)
        own = (self._shelf(stream) if left is None else left).best(size)
        return self._heap.best(size, self._is_backed) if own is None else own

    def find_further(self, size: int, ordered: Reach | None, done: Reach) -> Block | None:
        """The block by rules 3 to 5, after those; None if none is large enough.

        ``ordered``: what the stream comes after, if that counts. ``done``: what is free by now as far as that counts.
        """
        block = None if ordered is None else self._best_left(size, ordered)
        if block is None:
            block = self._best_left(size, done)
        if block is None:
            self.settle(done)
            block = self._heap.best(size)
        if block is None and self._last.owner == HEAP and self._last.size >= size:
            block = self._last
        return block

    def find_left(self, size: int) -> Block | None:
        """The block that rule 4 would choose of those that streams left, if all of them were free by now."""
        return self._best_left(size, lambda stream: _ALL)

    def _best_left(self, size: int, reach: Reach) -> Block | None:
        for stream, shelf in self._shelves():
            if shelf:
                limit = reach(stream)
                block = shelf.best(size, lambda block, limit=limit: block.seq <= limit)  # type: ignore[misc]
                if block is not None:
                    return block
        return None

    def carve(self, block: Block, size: int) -> Block:
        """A used block: the first ``size`` bytes of a free one."""
        self._take_off(block)
        if block.size > size:
            rest = Block(block.start + size, block.size - size, block.owner, block.seq)
            self._link(rest, block.next)
            self._link(block, rest)
            block.size = size
            self._put(rest)
        block.owner = USED
        return block

    # -- freeing ---------------------------------------------------------------------------------------------

    def free(self, block: Block, owner: int = HEAP, seq: int = 0) -> None:
        """Free a block that is on no shelf: for everybody, or once operation ``seq`` of stream ``owner`` is done. It
        becomes one with neighbours of the same owner.
        """
        block.owner, block.seq = owner, seq
        before, after = block.prev, block.next
        if after is not None and after.owner == owner:
            self._take_off(after)
            self._absorb(block, after)
        if before is not None and before.owner == owner:
            self._take_off(before)
            self._absorb(before, block)
            block = before
        self._put(block)

    def settle(self, reach: Reach) -> bool:
        """Make the blocks that streams left up to ``reach`` free for everybody. True if there was one."""
        changed = False
        for stream, shelf in self._shelves():
            if shelf:
                limit = reach(stream)
                found = [one for one in shelf if one.seq <= limit]
                for block in sorted(found, key=_when_left, reverse=True):
                    shelf.remove(block)
                    self.free(block)
                    changed = True
        return changed

    # -- memory ----------------------------------------------------------------------------------------------

    def missing(self, block: Block, size: int) -> list[int]:
        """The chunks without memory under the first ``size`` bytes of a block."""
        last = (block.start + size - 1) // self.chunk
        return [chunk for chunk in range(block.start // self.chunk, last + 1) if chunk not in self._backed]

    def spare(self) -> list[int]:
        """The chunks of memory that are free for everybody, in the order of their release."""
        found = [(block.stamp, at) for block in self._heap for at in self._inner(block) if at in self._backed]
        if self._last.owner == HEAP:
            low = -(-self._last.start // self.chunk)
            found += [(self._last.stamp, at) for at in self._backed if at >= low]
        return [at for _, at in sorted(found)]

    def spare_besides(self, block: Block, size: int) -> list[int]:
        """The spare chunks that are not under the first ``size`` bytes of a block, lowest first."""
        low, high = block.start // self.chunk, (block.start + size - 1) // self.chunk
        return sorted(at for at in self.spare() if not low <= at <= high)

    def back(self, chunks: Iterable[int]) -> None:
        """Record that these chunks have memory."""
        self._backed.update(chunks)

    def unback(self, chunks: Iterable[int]) -> None:
        """Record that these chunks have no memory."""
        self._backed.difference_update(chunks)

    def unback_all(self) -> None:
        self._backed.clear()

    def _inner(self, block: Block) -> range:
        """The chunks that are entirely inside a block."""
        return range(-(-block.start // self.chunk), block.end // self.chunk)

    def _is_backed(self, block: Block) -> bool:
        """Whether there is memory under all of a block."""
        return all(at in self._backed for at in range(block.start // self.chunk, (block.end - 1) // self.chunk + 1))

    # -- shelves and links -----------------------------------------------------------------------------------

    def _shelf(self, stream: int) -> Shelf:
        """A shelf for a stream that has none. Those of streams that are gone and left nothing are dropped."""
        ranks = self._ranks
        if ranks is not None and len(self._left) > 2 * len(ranks) + 8:
            for gone in [number for number, shelf in self._left.items() if not shelf and number not in ranks]:
                del self._left[gone]
        shelf = self._left[stream] = Shelf()
        return shelf

    def _shelves(self) -> list[tuple[int, Shelf]]:
        """The shelf of each stream, in search order."""
        ranks = self._ranks
        if ranks is None or len(self._left) < 2:
            return list(self._left.items())
        return sorted(self._left.items(), key=lambda item: ranks.get(item[0], -1))

    def _put(self, block: Block) -> None:
        self._clock += 1
        if block.owner != HEAP:
            shelf = self._left.get(block.owner)
            (self._shelf(block.owner) if shelf is None else shelf).put(block, self._clock)
        elif block is not self._last:
            self._heap.put(block, self._clock)
        else:
            block.stamp = self._clock

    def _take_off(self, block: Block) -> None:
        if block.owner != HEAP:
            self._left[block.owner].remove(block)
        elif block is not self._last:
            self._heap.remove(block)

    def _absorb(self, block: Block, following: Block) -> None:
        block.size += following.size
        block.seq = max(block.seq, following.seq)
        self._link(block, following.next)

    def _link(self, before: Block, after: Block | None) -> None:
        """Make ``after`` the successor of ``before``; None marks the end of the line."""
        before.next = after
        if after is None:
            self._last = before
        else:
            after.prev = before
