"""The stream-ordered allocator as pure bookkeeping: no memory, no threads, no driver.

A pool is a line of addresses, cut into blocks that follow one another without a hole:

* *used* blocks hold allocations;
* *ready* blocks are backed by physical memory and free for every stream;
* *pending* blocks were freed in a stream and the host has not yet seen that free happen: they carry that
  stream and the sequence number of the free, and who may have them depends on what the asking stream is
  ordered after;
* *void* blocks are addresses without physical memory. The line always ends in one, so growing a pool and
  filling a hole that an earlier release left are the same thing.

Neighbouring free blocks form a *gap*. Gaps are indexed by size, apart for each stream whose pending blocks
they hold, so that a request looks at few of them however many there are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from .blocks import ADDRESS_MASK, READY, SEVERAL, Block, Found, Gap, Kind, State, rank, round_up, runs
from .constants import CHUNK

Reach = Callable[[int], int]
"""Given a stream: the highest sequence number of its frees whose memory the asking stream may have now."""


class Line:
    """The addresses of one pool."""

    def __init__(self, capacity: int, chunk: int = CHUNK) -> None:
        self.capacity = capacity
        self.chunk = chunk
        self.reserved: int = 0
        self._head = Block(0, capacity, State.VOID)
        self._voids: dict[Block, None] = {self._head: None}
        self._roomy: set[Block] = set()  # ready blocks that may hold a whole chunk
        self._pending: dict[int, dict[Block, None]] = {}  # by stream, oldest free first
        self._index: dict[Kind, list[int]] = {}  # ranks of gaps
        self._gaps: dict[int, Gap] = {}  # by address

    # -- asking ----------------------------------------------------------------------------------------------

    def blocks(self) -> Iterator[Block]:
        """Every block in address order."""
        block: Block | None = self._head
        while block is not None:
            yield block
            block = block.next

    def pending_streams(self) -> list[int]:
        return list(self._pending)

    # -- allocating ------------------------------------------------------------------------------------------

    def take(self, size: int, stream: int, reach: Reach, wait: bool = False) -> Block | None:
        """A used block of ``size`` bytes, or None when no free run that ``stream`` may have is large enough.

        Runs are chosen best fit, then lowest address. Memory the stream freed itself, and memory free for
        everyone, come first; what other streams freed counts only when the best of those holds nothing of the
        stream's own (two cases observed on H200: an own 8 MiB hole wins over another stream's completed 5 MiB
        one, while another stream's completed 8 MiB hole wins over a larger segment that was never used).

        With ``wait`` any pending memory will do; the block then says in ``waits`` which frees must be waited
        for.
        """
        if wait:
            found = self._search(size, lambda kind: True, lambda block: True)
        else:
            found = self._search_own(size, stream)
            if len(self._pending) > (stream in self._pending) and not (found and self._holds_own(found, stream)):
                found = self._search_all(size, stream, reach)
        if found is None:
            return None
        return self._carve(found[2], size, stream, reach)

    def _search_own(self, size: int, stream: int) -> Found | None:
        def usable(block: Block) -> bool:
            return block.state is State.READY or block.stream == stream

        return self._search(size, lambda kind: None if kind[0] == SEVERAL[0] else kind[0] in (READY[0], stream), usable)

    def _search_all(self, size: int, stream: int, reach: Reach) -> Found | None:
        limits = {other: reach(other) for other in self._pending}
        limits[stream] = 1 << 63
        whole = {other for other, frees in self._pending.items() if next(reversed(frees)).seq <= limits[other]}
        partly = {other for other, frees in self._pending.items() if next(iter(frees)).seq <= limits[other]}

        def usable(block: Block) -> bool:
            return block.state is State.READY or block.seq <= limits[block.stream]

        def all_of(kind: Kind) -> bool | None:
            if kind[0] in (READY[0], stream) or kind[0] in whole:
                return True
            return None if kind[0] == SEVERAL[0] or kind[0] in partly or kind[1] else False

        return self._search(size, all_of, usable)

    def _search(
        self, size: int, all_of: Callable[[Kind], bool | None], usable: Callable[[Block], bool]
    ) -> Found | None:
        """The best run. ``all_of`` says of a kind of gaps whether such a gap is usable as a whole, or not
        beyond its ready blocks (False), or only its blocks can tell (None).
        """
        best: Found | None = None
        for kind, entries in self._index.items():
            answer = all_of(kind)
            if answer is False and not kind[1]:
                continue
            at = bisect_left(entries, rank(size, 0))
            if answer:
                if at < len(entries):
                    gap = self._gaps[entries[at] & ADDRESS_MASK]
                    if best is None or (gap.size, gap.first.start) < best[:2]:
                        best = (gap.size, gap.first.start, gap.first)
                continue
            for entry in entries[at:]:
                for run in runs(self._gaps[entry & ADDRESS_MASK], usable):
                    if run[0] >= size and (best is None or run[:2] < best[:2]):
                        best = run
        return best

    def _holds_own(self, found: Found, stream: int) -> bool:
        kind = self._gap_of(found[2]).kind
        if kind[0] == READY[0]:
            return False
        if kind[0] != SEVERAL[0]:
            return kind[0] == stream
        block: Block | None = found[2]
        end = found[1] + found[0]
        while block is not None and block.start < end:
            if block.state is State.PENDING and block.stream == stream:
                return True
            block = block.next
        return False

    def _carve(self, first: Block, size: int, stream: int, reach: Reach) -> Block:
        gap = self._gap_of(first)
        self._drop(gap)
        used = Block(first.start, size, State.USED)
        used.prev = first.prev
        left = gap.first
        if left is not first:  # blocks of the gap that lie before the run become a gap of their own
            assert first.prev is not None
            for apart in self._add(left, first.prev):
                gap.count(apart, -1)
        block: Block | None = first
        needed = size
        while needed:
            assert block is not None
            if block.state is State.PENDING and block.stream != stream and block.seq > reach(block.stream):
                used.waits[block.stream] = max(block.seq, used.waits.get(block.stream, 0))
            if block.size > needed:
                gap.size -= needed
                block.start += needed
                block.size -= needed
                break
            gap.count(block, -1)
            needed -= block.size
            following = block.next
            self._forget(block)
            block = following
        self._link(used.prev, used)
        self._link(used, block)
        if gap.size:
            assert block is not None
            gap.first = block
            self._put(gap)
        return used

    # -- freeing ---------------------------------------------------------------------------------------------

    def free(self, block: Block, stream: int, seq: int) -> None:
        """Give back a used block as pending until free ``seq`` of ``stream`` is known to have happened."""
        block.state, block.stream, block.seq = State.PENDING, stream, seq
        self._pending.setdefault(stream, {})[block] = None
        self._join(block)

    def free_ready(self, block: Block) -> None:
        """Give back a used block for everyone at once."""
        block.state = State.READY
        self._join(block)

    def settle(self, stream: int, upto: int) -> bool:
        """The host saw ``stream`` pass ``upto``: what it freed until then is ready. True if that was
        anything.
        """
        frees = self._pending.get(stream)
        if not frees:
            return False
        seen: list[Block] = []
        for block in frees:
            if block.seq > upto:
                break
            seen.append(block)
        for block in seen:
            del frees[block]
        if not frees:
            del self._pending[stream]
        for block in seen:
            block.state = State.READY
        done = -1
        for block in sorted(seen, key=lambda b: b.start):
            if block.start >= done:
                done = self._rebuild(block)
        return bool(seen)

    def _rebuild(self, block: Block) -> int:
        """Merge the ready blocks of the gap around ``block``, count it anew, and return where it ends."""
        first = block
        while first.prev is not None and first.prev.is_free:
            first = first.prev
        assert first.gap is not None
        self._drop(first.gap)
        last = first
        while last.next is not None and last.next.is_free:
            following = last.next
            if last.state is State.READY and following.state is State.READY:
                self._merge(last, following)
            else:
                last = following
        for member in self._add(first, last):
            self._note_roomy(member)
        return last.end

    def _join(self, block: Block) -> None:
        """Put a block that has just become free into the gap it makes with its neighbours."""
        left = block.prev.gap if block.prev is not None and block.prev.is_free else None
        right = block.next.gap if block.next is not None and block.next.is_free else None
        gap = left or right or Gap(block, block)
        for other in (left, right):
            if other is not None:
                self._drop(other)
        gap.count(block)
        if left is not None:
            gap.last = block
            if right is not None:
                gap.last = right.last
                gap.size += right.size
                gap.ready += right.ready
                for stream, blocks in right.pending.items():
                    gap.pending[stream] = gap.pending.get(stream, 0) + blocks
        elif right is not None:
            gap.first = block
        if block.state is State.READY:
            self._note_roomy(block)
            if block.next is not None and block.next.state is State.READY:
                gap.ready -= 1
                if gap.last is block.next:
                    gap.last = block
                self._merge(block, block.next)
            if block.prev is not None and block.prev.state is State.READY:
                gap.ready -= 1
                if gap.last is block:
                    gap.last = block.prev
                self._merge(block.prev, block)
        self._put(gap)

    # -- physical memory -------------------------------------------------------------------------------------

    def plan(self, size: int, stream: int, reach: Reach) -> list[tuple[int, int]]:
        """Which void ranges (address, bytes) to back, lowest first, so that ``size`` bytes can be taken.

        Of the places that could serve, the one that needs the least new memory, then the lowest.
        """
        limits = {other: reach(other) for other in self._pending}
        limits[stream] = 1 << 63

        def usable(block: Block) -> bool:
            return (
                block.state is State.READY
                or block.state is State.VOID
                or (block.state is State.PENDING and block.seq <= limits[block.stream])
            )

        best: tuple[int, int] | None = None
        chosen: list[tuple[int, int]] = []
        for void in sorted(self._voids, key=lambda b: b.start):
            first = void
            while first.prev is not None and usable(first.prev):
                first = first.prev
            needed, block, ranges = size, first, []
            while needed > 0 and usable(block):
                if block.state is State.VOID:
                    ranges.append((block.start, min(block.size, round_up(needed, self.chunk))))
                needed -= block.size
                if block.next is None:
                    break
                block = block.next
            cost = (sum(length for _, length in ranges), first.start)
            if needed <= 0 and (best is None or cost < best):
                best, chosen = cost, ranges
        return chosen

    def tail(self) -> list[tuple[int, int]]:
        """The void that ends the line, as :meth:`plan` would name it."""
        last = max(self._voids, key=lambda b: b.start)
        return [(last.start, last.size)]

    def back(self, start: int, size: int) -> None:
        """Physical memory now lies under the first ``size`` bytes of the void at ``start``."""
        void = next(block for block in self._voids if block.start == start)
        assert size <= void.size and size % self.chunk == 0
        fresh = Block(start, size, State.READY)
        self._link(void.prev, fresh)
        self._link(fresh, void)
        void.start += size
        void.size -= size
        if not void.size:
            del self._voids[void]
            self._link(fresh, void.next)
        self.reserved += size
        self._join(fresh)

    def release(self, may: Callable[[int], bool]) -> list[tuple[int, int]]:
        """Give up whole ready chunks, highest address first, while ``may(reserved)``. Returns the ranges."""
        released: list[tuple[int, int]] = []
        self._roomy = {block for block in self._roomy if block.state is State.READY and block.size >= self.chunk}
        for block in sorted(self._roomy, key=lambda b: -b.start):
            if not may(self.reserved):
                break
            low = round_up(block.start, self.chunk)
            high = block.end // self.chunk * self.chunk
            start = high
            while start > low and may(self.reserved):
                start -= self.chunk
                self.reserved -= self.chunk
            if start < high:
                self._unback(block, start, high)
                released.append((start, high - start))
        return released

    def _unback(self, block: Block, start: int, end: int) -> None:
        gap = self._gap_of(block)
        self._drop(gap)
        void = Block(start, end - start, State.VOID)
        tail_size = block.end - end
        before: Block | None = block
        after = block.next
        if start == block.start:
            before = block.prev
            self._forget(block)
        else:
            block.size = start - block.start
        if tail_size:
            tail = Block(end, tail_size, State.READY)
            self._link(tail, after)
            after = tail
            self._note_roomy(tail)
        self._link(before, void)
        self._link(void, after)
        # what is left of the gap on either side
        if before is not None and before.is_free:
            self._add(gap.first, before)
        if after is not None and after.is_free:
            self._add(after, after if gap.last is block else gap.last)
        self._voids[void] = None
        if after is not None and after.state is State.VOID:
            self._merge(void, after)
        if before is not None and before.state is State.VOID:
            self._merge(before, void)

    # -- gaps and links --------------------------------------------------------------------------------------

    def _link(self, before: Block | None, after: Block | None) -> None:
        """Have one block follow another; None stands for the ends of the line."""
        if before is not None:
            before.next = after
        elif after is not None:
            self._head = after
        if after is not None:
            after.prev = before

    def _gap_of(self, block: Block) -> Gap:
        while block.gap is None:
            assert block.prev is not None
            block = block.prev
        return block.gap

    def _add(self, first: Block, last: Block) -> list[Block]:
        gap = Gap(first, last)
        members = [first]
        while members[-1] is not last:
            following = members[-1].next
            assert following is not None
            members.append(following)
        for block in members:
            gap.count(block)
        self._put(gap)
        return members

    def _put(self, gap: Gap) -> None:
        gap.first.gap = gap.last.gap = gap
        kind = gap.kind = gap.classify()
        entries = self._index.get(kind)
        if entries is None:
            entries = self._index[kind] = []
        insort(entries, rank(gap.size, gap.first.start))
        self._gaps[gap.first.start] = gap

    def _drop(self, gap: Gap) -> None:
        entries = self._index[gap.kind]
        del entries[bisect_left(entries, rank(gap.size, gap.first.start))]
        if not entries:
            del self._index[gap.kind]
        del self._gaps[gap.first.start]
        gap.first.gap = gap.last.gap = None

    def _note_roomy(self, block: Block) -> None:
        if block.size >= self.chunk and block.state is State.READY:
            self._roomy.add(block)

    def _merge(self, block: Block, following: Block) -> None:
        """Append ``following`` to ``block``."""
        block.size += following.size
        self._link(block, following.next)
        self._forget(following)
        if block.state is State.READY:
            self._note_roomy(block)

    def _forget(self, block: Block) -> None:
        if block.state is State.PENDING:
            frees = self._pending[block.stream]
            del frees[block]
            if not frees:
                del self._pending[block.stream]
        elif block.state is State.VOID:
            del self._voids[block]
        else:
            self._roomy.discard(block)
        block.state = State.GONE
        block.gap = None
