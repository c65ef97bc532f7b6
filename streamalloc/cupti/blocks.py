"""Blocks: the memory that PyTorch's and CuPy's allocators give to tensors and arrays without a driver call.

An allocator gets segments from the driver and divides each segment into blocks. A freed block may be given to its next
owner at once: the reuse is ordered only on the stream on which the block was allocated. If another stream still reads
the block, the first kernel of the next owner overwrites it meanwhile: the commonest fault of programs with several
streams.

PyTorch's memory history is read only later. So :class:`Blocks` logs each use together with the clock of its stream: the
operations that surely come before the use. :meth:`Blocks.merge` then judges uses, allocations and frees in the order of
time:

* The first use of a new block by a kernel counts as a write, because nobody reads what nothing has written, unless it
  is known that the kernel does not write the block. Later uses by a kernel count as reads, unless it is known that the
  kernel writes the block. Copies and fills count as what they are.
* The uses by other streams than the block's own must have ended before the first use of the next owner.

Of a block that only its own stream uses, just the first use and the latest ones are kept, because these uses need no
judgement. While only one stream has work, nothing is judged, and older uses are dropped from the log.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import NamedTuple, cast

from streamalloc.checker.clocks import CERTAIN, Clock, TrackedStream
from streamalloc.checker.ranges import Access, AddressMap, Range, RecordedOperation
from streamalloc.checker.state import State
from streamalloc.checker.uses import Part
from streamalloc.cupti.kernels import Kernel
from streamalloc.cupti.operators import Operand
from streamalloc.cupti.subscription import DriverCall
from streamalloc.driver.internal import Stack
from streamalloc.formats.ranges import Extent, RangeMap

ALLOCATED, FREED, SEGMENT = "allocated", "freed", "segment"


class Event(NamedTuple):
    """Act of a library's allocator: it gave out a block, took a block back, or got a segment from the driver."""

    time: int
    """Time of the act, in ns since the epoch."""
    kind: str
    address: int
    nbytes: int
    stream: int
    """Handle of the block's stream. The allocator reuses the block in the order of this stream."""
    owner: str
    """Name of the library that has the allocator, such as "PyTorch"."""
    place: Callable[[], Stack]
    """Function that returns the place in the program. A call takes long, so the function is called only for places that
    are shown.
    """


def kernel_of(launch: DriverCall) -> Kernel:
    """Return the kernel of ``launch``, which must be a kernel launch (its ``kernel`` is then a :class:`Kernel`)."""
    return cast("Kernel", launch.kernel)


def addresses_of(launch: DriverCall) -> tuple[int, ...] | None:
    """Return the addresses among the arguments of a kernel launch.

    If the driver does not report the arguments, returns the first address of each tensor of the PyTorch operator, or
    None if no such tensors are known.
    """
    if launch.pointers is None and launch.operands:
        return tuple(operand[0] for operand in launch.operands)
    return launch.pointers


def parts_of(launch: DriverCall) -> tuple[Part, ...]:
    """Return the parts of memory that a launch uses: start, end, and whether the kernel writes the part (None:
    unknown).

    A part is a tensor of the operator at one of the addresses, or one byte at an address outside of all tensors. If two
    parts overlap, only the first part is returned; written parts come first.
    """
    return _parts(kernel_of(launch), addresses_of(launch) or (), tuple(launch.operands))


@functools.lru_cache(10_000)
def _parts(kernel: Kernel, addresses: tuple[int, ...], operands: tuple[Operand, ...]) -> tuple[Part, ...]:
    written = kernel.written(addresses)
    # If no convention tells which addresses the kernel writes, any of them may be written: None means unknown.
    unknown = False if written else None
    first: dict[int, Operand] = {}
    for operand in operands:
        if operand[2] or operand[0] not in first:
            first[operand[0]] = operand
    parts: list[Part] = []
    for address in dict.fromkeys((*written, *addresses)):
        within = first.get(address) or next((one for one in operands if one[0] <= address < one[1]), None)
        if within is None:
            parts.append((address, address + 1, address in written or unknown))
        else:
            parts.append((*within[:2], address in written) if written else within)
    if operands:
        parts.sort(key=_is_not_written)
    found: list[Part] = []
    for part in parts:
        at = bisect_right(found, part[0], key=_low)
        if (not at or found[at - 1][1] <= part[0]) and (at == len(found) or part[1] <= found[at][0]):
            found.insert(at, part)
    return tuple(sorted(found, key=_is_not_written))


def _is_not_written(part: Part) -> bool:
    return not part[2]


_low = itemgetter(0)


class Run(NamedTuple):
    """Consecutive launches on one stream."""

    stream: TrackedStream
    at: int
    """Number that the first launch has in the order of its stream."""
    clock: dict[int, int]
    """Clock of the first launch: for each stream, by its number, the number of the last operation that comes before."""
    launches: list[DriverCall]

    def uses(self) -> list[Use]:
        """Return one :class:`Use` for each launch of the run."""
        found = []
        for at, one in enumerate(self.launches, self.at):
            what, parts = kernel_of(one).what, parts_of(one)
            found.append(Use(one.time, self.stream, at, self.clock, what, one.place, parts))
        return found


class Use(NamedTuple):
    """One driver call that uses memory, with the clock of its stream (:attr:`clock`)."""

    time: int
    stream: TrackedStream
    at: int
    """Number that the call has in the order of its stream."""
    clock: dict[int, int]
    """Operations that come before the call, in the form of :attr:`Run.clock`."""
    what: str
    place: Stack
    parts: Sequence[Part]
    """Parts of memory that the call uses: start, end, and whether the call writes. Written parts come first."""
    captured: int = 0
    """Time of the stream capture in ns, for a call that runs in a graph; 0 for other calls."""

    def access(self, write: bool) -> Access:
        """Return this use as the :class:`Access` that the checker's judge takes. ``write``: whether the use writes."""
        return Access(self.stream, self.what, self.place, write, time=self.at)


@dataclass(eq=False, slots=True)
class _Block(Extent):
    event: Event
    base: int
    size: int
    stream: TrackedStream | None = None
    """Stream of the block; None until a call uses the block. So are the next two fields unknown until then."""
    previous: list[Range] = field(default_factory=list)
    """Freed blocks that overlap this block's addresses, and that streams other than their own have used."""
    is_fresh: bool = False
    """Whether no call has used the block yet."""
    place: Stack = ()
    """Place in the program of the first call that used the block."""
    wrote: tuple[Use, Part] | None = None
    last: tuple[Use, Part] | None = None
    """Latest write and latest use (each with its part of memory) on the block's own stream; None if there was none."""
    seen: Use | None = None
    """Latest use. It is compared, so that a launch with several addresses in the block counts only once."""
    range: Range | None = None
    """Record of the uses for the checker's judge; None until a stream other than the block's own uses the block."""


class Blocks:
    """Blocks of the allocators of all libraries, and the log of the calls that use these blocks."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._live: RangeMap[_Block] = RangeMap()
        """Live blocks by address."""
        self._streams: dict[int, TrackedStream] = {}
        """Streams by handle. Destroyed streams are kept, because their uses are judged later."""
        self._gone = AddressMap(state.notes)
        """Freed blocks that streams other than their own have used, by address."""
        self._known_from = 0
        """Time in ns up to which uses have been dropped from the log."""
        self.captures: list[tuple[int, int]] = []
        """Time of begin and time of end of each stream capture, in ns; the end is 0 while the capture goes on."""
        self._uses: list[Use | Run] = []
        self._events: list[Event] = []
        self.count = 0
        """Number of logged uses. Each launch of a run counts."""

    def log(self, use: Use | Run) -> None:
        """Add a use, or all uses of a run, to the log."""
        self._uses.append(use)
        self.count += len(use.launches) if isinstance(use, Run) else 1

    def merge(self, events: Iterable[Event], upto: int, is_alone: bool) -> None:
        """Judge the logged uses, and the allocators' ``events`` up to the time ``upto`` (ns), in the order of time.
        Later events are kept for the next call.

        While only one stream has work (``is_alone``), nothing is judged. If the log then has more than 20,000 uses, the
        older half is dropped.
        """
        for one in events:
            self._events.append(one)
            segment = self._state.addresses.find(one.address) if one.kind == SEGMENT else None
            if segment is not None:
                self._state.addresses.divide(segment)
        if is_alone:
            if self.count > _MOST_KEPT:
                self._forget()
            return
        self._events.sort(key=_time)
        at = bisect_right(self._events, upto, key=_time)
        steps: list[Event | Use] = [*self._events[:at]]
        for use in self._uses:
            steps += use.uses() if isinstance(use, Run) else [use]
            if use.stream.handle:
                self._streams[use.stream.handle] = use.stream
        self._events, self._uses, self.count = self._events[at:], [], 0
        for step in sorted(steps, key=_time):
            if isinstance(step, Use):
                self._used(step)
            else:
                self._happened(step)

    def _forget(self) -> None:
        """Drop the older half of the logged uses. Only one stream has had work, so none of these uses can be a
        hazard.
        """
        half = len(self._uses) // 2 or 1
        last = self._uses[half - 1]
        self._known_from = last.launches[-1].time if isinstance(last, Run) else last.time
        del self._uses[:half]
        self.count = sum(len(one.launches) if isinstance(one, Run) else 1 for one in self._uses)
        self._events.sort(key=_time)
        at = bisect_right(self._events, self._known_from, key=_time)
        for event in self._events[:at]:
            self._happened(event)
        del self._events[:at]

    def _stream(self, handle: int) -> TrackedStream:
        return self._streams.get(handle) or self._state.stream(handle)

    def _happened(self, event: Event) -> None:
        if event.kind == ALLOCATED:
            self._live.add(_Block(event, event.address, event.nbytes))
        elif event.kind == FREED and (block := self._live.at.get(event.address)) is not None:
            self._live.remove(block)
            if block.range is not None and block.stream is not None:
                block.range.ended = RecordedOperation(block.stream, f"{event.owner}'s allocator", event.place())
                self._gone.add(block.range)

    def _find(self, address: int) -> _Block | None:
        found = self._live.find(address)
        if found is not None and found.stream is None:
            found.stream, found.is_fresh = self._stream(found.event.stream), found.event.time > self._known_from
            found.previous = self._gone.overlapping(found.base, found.end)
            for one in found.previous:
                self._gone.remove(one)
        return found

    def _used(self, use: Use) -> None:
        for low, high, write in use.parts:
            block = self._find(low)
            if block is None or (block.seen is use and high == low + 1):
                # A part of one byte is an address that lies in no tensor. If the same launch has counted in this block
                # already, the part is skipped, so that each launch counts once. Written parts come first, so the part
                # that counted is a write if any part of the launch is a write.
                continue
            block.seen = use
            if use.captured and use.captured < block.event.time and not self._is_of_graphs(block.event):
                self._is_stale(block, use)
                continue
            if block.is_fresh:
                block.is_fresh, block.place = False, use.place
                write = write is not False
                if block.previous:
                    self._is_given_again(block, use)
            part = low, high, bool(write)
            if block.range is None and use.stream is block.stream:
                block.last = use, part
                if write:
                    block.wrote = block.last
            elif block.range is None or block.range.ended is None:
                self._judge(block, use, part)

    def _is_of_graphs(self, event: Event) -> bool:
        """Whether the block was given out during a stream capture. Such memory belongs to graphs."""
        return any(begin <= event.time and (not end or event.time <= end) for begin, end in self.captures)

    def _is_stale(self, block: _Block, use: Use) -> None:
        """Report that a graph uses memory which has been given to another owner since the capture."""
        event = block.event
        range_ = Range(event.address, event.nbytes, f"{event.owner} block", stack=event.place())
        what = (
            f"{use.what} of a graph uses memory whose owner was dropped after the capture, and which is now {range_}."
        )
        remedy = "keep what a graph uses as long as the graph, and copy new contents into it before a replay."
        self._state.judge.report("use after free", what, remedy, range_, use.place)

    def _judge(self, block: _Block, use: Use, part: Part) -> None:
        """Pass the use to the judge, which compares it with the earlier uses of the block by other streams."""
        if block.range is None:
            event = block.event
            # PyTorch records source lines only from the second stream on. A block allocated earlier has no source line,
            # so the place of its first use is shown instead.
            place = event.place() or block.place
            block.range = Range(event.address, event.nbytes, f"{event.owner} block", stack=place)
            for one in {id(one): one for one in (block.wrote, block.last) if one is not None}.values():
                self._compare(block.range, *one)
        self._compare(block.range, use, part)

    def _compare(self, range_: Range, use: Use, part: Part) -> None:
        low, high, write = part
        piece = range_, low, min(high, range_.end)
        self._state.judge.use(piece, use.access(bool(write)), Clock(use.clock))

    def _is_given_again(self, block: _Block, use: Use) -> None:
        """Report uses by earlier owners of the memory that may still run when the new owner first uses it."""
        judge, clock, previous = self._state.judge, Clock(use.clock), block.previous
        block.previous = []
        for old in previous:
            assert old.ended is not None
            for one in old.last.values():
                if one.actor is use.stream or judge.timeline.order(clock, one.actor.number, one.time) == CERTAIN:
                    continue
                access = use.access(write=True)
                what = f"{old} is dropped and given to its next owner, but nothing orders {access} after {one}."
                remedy = f"call record_stream with {one.actor.short} before the last reference is dropped; otherwise, "
                remedy += judge.missing_order(one, use.stream)
                judge.report("free racing a use", what, remedy, old, old.ended.stack, used=one.stack, reused=use.place)


_time = attrgetter("time")
_MOST_KEPT = 20_000
"""Largest number of uses in the log while only one stream has work. If there are more, the older half is dropped."""
