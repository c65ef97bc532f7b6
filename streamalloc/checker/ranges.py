"""Address ranges, the physical bytes behind them, and the latest uses of each byte. Pure Python, no driver.

A :class:`Range` is an allocation, a mapping or an import, from its start to its free, unmap or close. A range refers to
physical :class:`Bytes`. Several ranges can refer to the same bytes: mappings of one handle, imports in the exporting
process, and replicas of a multicast object. The bytes record their uses as intervals, so that uses by different ranges
are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

from streamalloc.checker.clocks import CERTAIN, UNORDERED, Actor, Clock, Timeline
from streamalloc.checker.report import Notes
from streamalloc.driver.reports import Stack, function_of
from streamalloc.formats.ranges import Extent, Intervals, RangeMap, Runs
from streamalloc.formats.sizes import size_text

NEVER = 1 << 62
"""Time of an operation that has not run yet."""
MANY_USERS = 64
"""Number of uses in a table at which the uses for which the host has waited are removed."""
_MANY_RANGES = 20_000
"""Number of recorded ranges at which freed ranges are removed."""


class RecordedOperation:
    """An operation: its actor, its time, its name, and its place in the program."""

    __slots__ = ("actor", "stack", "time", "what")

    def __init__(self, actor: Actor, what: str, stack: Stack) -> None:
        self.actor: Actor = actor
        self.time: int = actor.time
        self.what: str = what
        self.stack: Stack = stack

    def __str__(self) -> str:
        if self.actor.name.startswith("graph node"):
            return self.actor.name  # Contains the call, which would otherwise be shown twice.
        call = f"{self.what} in {self.call}" if self.call != self.what else self.what
        return f"{call} {'by' if self.actor.is_host else 'on'} {self.actor.name}"

    @property
    def call(self) -> str:
        """Name of the call that the program made. For a driver call of this package: the name of the public function
        that made it.
        """
        function = function_of(self.stack) if self.what.startswith("cu") else ""
        return f"{function}()" if function else self.what


class Access(RecordedOperation):
    """Operation that reads or writes memory."""

    __slots__ = ("atomic", "write")

    def __init__(
        self, actor: Actor, what: str, stack: Stack, write: bool, atomic: bool = False, time: int | None = None
    ) -> None:
        super().__init__(actor, what, stack)
        if time is not None:
            self.time = time
        self.write: bool = write
        self.atomic: bool = atomic
        """Whether the operation is atomic, so that it does not race with other atomic operations."""


class _Uses(NamedTuple):
    """Uses that some bytes have in common."""

    write: Access | None
    """The last write."""
    reads: dict[int, Access]
    """The reads after it, by actor number. A further read makes a new dictionary."""


@dataclass(eq=False, slots=True)
class Bytes:
    """Physical memory, with the latest uses of each of its bytes, by offset."""

    number: int = field(default_factory=count().__next__)
    """Number of the memory. Memory that was made later has a higher number."""
    shared: bool = False
    """Whether other processes may have the memory mapped."""
    fresh: Intervals | None = None
    """Parts of the memory to which no device has had access yet; None if that is unknown."""
    types: Runs[Any] | None = None
    """Types of the elements, see :mod:`streamalloc.checker.contents`; None if no types were recorded."""
    uses: Runs[_Uses] = field(default_factory=lambda: Runs(_Uses(None, {})))

    def record_access(
        self, start: int, end: int, access: Access, clock: Clock, timeline: Timeline
    ) -> list[tuple[Access, int]]:
        """Record a use of the bytes from ``start`` up to ``end``. Returns the earlier uses that conflict and have no
        certain order.

        The result has tuples of an earlier use and its order, a constant of :mod:`.clocks`. Several :class:`Access`
        objects of one actor and time belong to one operation, and are not ordered.
        """
        found: dict[Access, int] = {}
        number, time, written = access.actor.number, access.time, _Uses(access, {})

        def record(before: _Uses) -> _Uses:
            earlier = [] if before.write is None else [before.write]
            if access.write:
                earlier += before.reads.values()
            for one in earlier:
                if one.actor.number != number:
                    ordered = timeline.order(clock, one.actor.number, one.time)
                    if ordered != CERTAIN:
                        found[one] = ordered
                elif one.time == time and one is not access:
                    found[one] = UNORDERED
            if access.write:
                return written
            reads = {**before.reads, number: access}
            if len(reads) > MANY_USERS:
                timeline.forget_uses(reads)
            return _Uses(before.write, reads)

        self.uses.change(start, end, record)
        return list(found.items())

    def writes(self, start: int, end: int) -> list[Access]:
        """Return the latest writes of the bytes from ``start`` up to ``end``."""
        return [one.write for _, _, one in self.uses.over(start, end) if one.write is not None]

    def reads(self, start: int, end: int) -> list[Access]:
        """Return the reads of the bytes from ``start`` up to ``end`` since their latest writes."""
        return [read for _, _, one in self.uses.over(start, end) for read in one.reads.values()]

    def is_unused(self, at: int) -> bool:
        """Whether no recorded use has read or written the byte at offset ``at``."""
        return not (self.writes(at, at + 1) or self.reads(at, at + 1))

    def unwritten(self, start: int, end: int) -> int:
        """Return the number of bytes from ``start`` up to ``end`` that were never written."""
        return sum(high - low for low, high, one in self.uses.over(start, end) if one.write is None)


@dataclass
class BoundBytes:
    """Part of physical memory, ``size`` bytes from ``start`` on, that is bound at ``offset`` of a multicast object."""

    offset: int
    size: int
    bytes: Bytes
    start: int
    device: int | None = None
    """Device of the replica; None if unknown."""


@dataclass
class AwaitedPart:
    """Part of shared memory that another process may still be using. A use in this process that conflicts with this use
    must come after one operation of ``after``.
    """

    low: int
    high: int
    after: list[tuple[int, int]]
    """Tuples of actor number and time: event records of the other process that come after its work."""
    over: Callable[[], bool]
    """Function that returns whether the other process's work may have finished."""
    whose: str
    """Name of the other process in reports."""
    remedy: str
    """End of the advice in reports, after "a stream must wait for"."""
    step: bool = False
    """Whether an announcement names this part. The announcements of other processes are read anew before each use in
    this process (:class:`.Board`). False for work that was queued when the memory was shared.
    """
    written: bool = True
    """Whether the other process writes the part; False if it only reads it."""


@dataclass(eq=False)
class Range(Extent):
    """Addresses that refer to physical bytes, from an allocation, mapping or import until its end."""

    base: int
    size: int
    kind: str
    """Kind of the memory, for reports and for rules."""
    bytes: Bytes = field(default_factory=Bytes)
    offset: int = 0
    """Offset in ``bytes`` of the byte at the first address."""
    stack: Stack = ()
    born: RecordedOperation | None = None
    """The stream-ordered allocation of the range; None for memory that was allocated otherwise."""
    ended: RecordedOperation | None = None
    """The free, unmap or release that ended the range; None before."""
    freed_after: Clock | None = None
    """Clock of the stream at a free in stream order; None before the free, and after a free by the host."""
    vacated: bool = False
    """Whether other memory may have these addresses now."""
    pending: bool = False
    """Whether the allocation is queued and has not run yet."""
    last: dict[int, Access] = field(default_factory=dict)
    """Latest use by each actor, by actor number."""
    previous: tuple[Range, ...] = ()
    """Ranges that had the same addresses before."""
    grants: dict[int, int] | None = None
    """Access of devices by ordinal: 1 read, 3 read and write; None: all devices have access. Ranges of one pool or
    context share the dictionary.
    """
    bindings: list[BoundBytes] | None = None
    """Bytes bound to the multicast object that the range maps; None for all other memory."""
    opened: int = 1
    """Number of ``cuIpcOpenMemHandle`` calls that returned the address of this range and were not closed; 1 for memory
    that was not opened by such a call, and after the last close.
    """
    imports: list[Range] = field(default_factory=list)
    """Ranges by which this process has imported the same memory."""
    context: int = 0
    """Handle of the context whose end frees the range; 0 if no context does."""
    awaited: tuple[AwaitedPart, ...] = ()
    """Parts of the range that another process may still be using or writing."""
    deferred: bool = False
    """Whether a missing free is no leak: the driver call is made later, or the range ends together with its module."""
    viewed: bool = False
    """Whether the host has a NumPy array over the range, and so may read and write the range without a call."""
    queued_write: bool = False
    """Whether a write to the range was queued on a waiting stream."""
    released: Stack | None = None
    """Place in the program where the range was released although its memory stays mapped; None while the program may
    write the range.
    """
    divided: bool = False
    """Whether an allocator gives out blocks of the range, which are checked in its place."""

    def physical(self, low: int, high: int) -> list[tuple[Bytes, int, int]]:
        """Return the bytes at the addresses from ``low`` up to ``high``, as tuples of memory, first offset and end.
        There is one tuple; for a multicast object one for each part that is bound there.
        """
        start, end = low - self.base + self.offset, high - self.base + self.offset
        if self.bindings is None:
            return [(self.bytes, start, end)]
        found = []
        for one in self.bindings:
            first, last = max(start, one.offset), min(end, one.offset + one.size)
            if first < last:
                found.append((one.bytes, first - one.offset + one.start, last - one.offset + one.start))
        return found

    def written(self, low: int, high: int) -> list[RecordedOperation]:
        """Return the allocation of the range, if known, and the latest writes of the bytes from ``low`` up to
        ``high``.
        """
        found: list[RecordedOperation] = [] if self.born is None else [self.born]
        for memory, start, end in self.physical(low, high):
            found += memory.writes(start, end)
        return found

    def __str__(self) -> str:
        return f"{self.kind} of {size_text(self.size)} at {self.base:#x}"


Piece = tuple[Range, int, int]
"""Part of a range, as a tuple: the range, first address, end address."""
Pieces = list[tuple[Piece, bool]]
"""Parts of ranges, as tuples: the part, and whether it is written."""


class AddressMap(RangeMap[Range]):
    """Ranges in an address space. A freed range stays recorded until another range gets its addresses, or until too
    many ranges are recorded.
    """

    def __init__(self, notes: Notes | None = None) -> None:
        super().__init__()
        self._notes = Notes() if notes is None else notes
        self._verdicts: dict[tuple[int, ...], bool] = {}
        """Results of :meth:`any_whole` since the ranges last changed, because programs launch the same kernels
        repeatedly.
        """
        self._most = _MANY_RANGES

    def add(self, made: Range) -> Range:
        """Add a range, and return it. The ranges that it overlaps are removed, except for the parts of freed ranges
        outside of the new range. If there are too many ranges, the freed ones are removed, with a note.
        """
        self._verdicts.clear()
        same = self.at.get(made.base)
        if same is not None and same.size == made.size and same.ended is not None:
            made.previous, same.previous = (same,), ()
            self.at[made.base] = made
            return made
        for old in self.overlapping(made.base, made.end):
            self.remove(old)
            if old.ended is None:
                continue
            made.previous += (old,)
            # A report names only one earlier range. Without this line the chain would grow without end.
            old.previous = ()
            for low, high in ((old.base, made.base), (made.end, old.end)):
                if low < high:
                    super().add(replace(old, base=low, size=high - low, offset=old.offset + low - old.base))
        if len(self.at) > self._most:
            self._notes.add("freed")
            for old in [one for one in self.at.values() if one.ended is not None]:
                self.remove(old)
            self._most = max(_MANY_RANGES, 2 * len(self.at))
        return super().add(made)

    def remove(self, extent: Range) -> None:
        super().remove(extent)
        self._verdicts.clear()

    def divide(self, segment: Range) -> None:
        """Record that an allocator gives out blocks of ``segment``. From now on the blocks are checked in its place."""
        segment.divided = True
        self._verdicts.clear()

    def whole(self, address: int) -> Range | None:
        """Return the live range that contains an address. None if there is none, or if it is divided into blocks."""
        found = self.find(address)
        return None if found is None or found.divided or found.ended is not None else found

    def any_whole(self, addresses: tuple[int, ...]) -> bool:
        """Whether one of these addresses is in a live range that is not divided into blocks.

        The result is kept until a range is added or removed, so a range that was freed meanwhile may still count as
        live.
        """
        found = self._verdicts.get(addresses)
        if found is None:
            if len(self._verdicts) > _MANY_RANGES:
                self._verdicts.clear()
            found = self._verdicts[addresses] = any(map(self.whole, addresses))
        return found

    def pieces(self, start: int, size: int) -> list[Piece]:
        """Return the parts of ranges, also of freed ranges, at ``size`` addresses from ``start`` on, in the order of
        addresses. Addresses that are in no range are left out.
        """
        if not size:
            return []
        found = self.at.get(start)
        if found is not None and size <= found.size:
            return [(found, start, start + size)]
        end = start + size
        return [(one, max(start, one.base), min(end, one.end)) for one in self.overlapping(start, end)]

    def vacate(self, which: Callable[[Range], bool]) -> None:
        """Record that the driver may reuse the addresses of the freed ranges for which ``which`` returns True."""
        for one in self.at.values():
            if one.ended is not None and which(one):
                one.vacated = True

    def living(self) -> list[Range]:
        """Return the ranges that are not freed."""
        return [one for one in self.at.values() if one.ended is None]
