"""Who uses which bytes when, and what of it has no order. Pure Python over :mod:`.clocks`, no driver.

A :class:`Range` is a range of addresses with its life: an allocation, a mapping, an import. It stands for physical
:class:`Bytes`, which others may stand for as well: mappings of one handle, views, imports in the process that exports,
replicas of a multicast object. Uses are kept with the bytes, as intervals, so that all who reach the same bytes meet.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter

from streamalloc.driver.checker.clocks import BY_CHOICE, CERTAIN, UNORDERED, Actor, Clock, Stream, Timeline
from streamalloc.driver.checker.reports import Hazard
from streamalloc.driver.checker.stacks import Launched, Stack

__all__ = [
    "NEVER",
    "Access",
    "Addresses",
    "Binding",
    "Bytes",
    "Contents",
    "Judge",
    "Moment",
    "Piece",
    "Range",
    "accesses",
    "size_text",
]


NEVER = 1 << 62
"""The time of what nobody can know to be over."""


class Moment:
    """One operation: who, when, what, and where in the program."""

    __slots__ = ("actor", "stack", "time", "what")

    def __init__(self, actor: Actor, what: str, stack: Stack) -> None:
        self.actor = actor
        self.time: int = actor.time
        self.what = what
        self.stack = stack

    def __repr__(self) -> str:
        return f"<{self.what} of {self.actor.name} at {self.time}>"


class Access(Moment):
    """An operation that reads or writes."""

    __slots__ = ("atomic", "write")

    def __init__(
        self, actor: Actor, what: str, stack: Stack, write: bool, atomic: bool = False, time: int | None = None
    ) -> None:
        super().__init__(actor, what, stack)
        if time is not None:
            self.time = time
        self.write = write
        self.atomic = atomic
        """Whether it and others of its kind may come in any order."""


class _Segment:
    """Bytes with the same uses: the last write, and the reads since."""

    __slots__ = ("end", "reads", "start", "write")

    def __init__(self, start: int, end: int, write: Access | None = None) -> None:
        self.start = start
        self.end = end
        self.write = write
        self.reads: dict[int, Access] = {}

    def cut(self, at: int) -> tuple[_Segment, _Segment]:
        """Two in place of it."""
        first, second = _Segment(self.start, at, self.write), _Segment(at, self.end, self.write)
        first.reads, second.reads = self.reads, self.reads.copy()
        return first, second


_start = attrgetter("start")
Order = Callable[[Clock, int, int], int]
_MANY = 64
"""Uses of the same memory by so many streams are looked through for those that do not matter any more."""


class Bytes:
    """Physical memory, and the latest uses of each part."""

    __slots__ = ("_segments", "fresh", "shared")

    def __init__(self) -> None:
        self.shared = False
        """Whether other processes may have it."""
        self.fresh: tuple[tuple[int, int], ...] = ()
        """The parts to which nobody had access yet."""
        # One list alone, so that no interrupt leaves two that differ.
        self._segments: list[_Segment] = []

    def touch(
        self,
        start: int,
        end: int,
        access: Access,
        clock: Clock,
        order: Order,
        forget: Callable[[dict[int, Access]], None] = lambda reads: None,
    ) -> list[tuple[Access, int]]:
        """Note a use of the bytes from ``start`` to ``end``; the uses that do not certainly come before it.

        Those of another :class:`Access` of the same time are another part of the same operation.

        ``forget`` takes out of many reads those that do not matter any more.
        """
        segments = self._segments
        if len(segments) == 1 and segments[0].start == start and segments[0].end == end:
            chosen = segments
        else:
            chosen = self._between(start, end)
        found: dict[Access, int] = {}
        number, write = access.actor.number, access.write
        time = access.time
        for segment in chosen:
            before = segment.write
            if before is not None:
                if before.actor.number != number:
                    ordered = order(clock, before.actor.number, before.time)
                    if ordered != CERTAIN:
                        found[before] = ordered
                elif before.time == time and before is not access:
                    found[before] = UNORDERED  # another part of the same operation
            if write:
                for read in segment.reads.values():
                    if read.actor.number != number:
                        ordered = order(clock, read.actor.number, read.time)
                        if ordered != CERTAIN:
                            found[read] = ordered
                    elif read.time == time and read is not access:
                        found[read] = UNORDERED
                segment.write = access
                if segment.reads:
                    segment.reads = {}
            else:
                segment.reads[number] = access
                if len(segment.reads) > _MANY:
                    forget(segment.reads)
        if write and len(chosen) > 1:
            first = bisect_left(segments, start, key=_start)
            segments[first : first + len(chosen)] = [_Segment(start, end, access)]
        return list(found.items())

    def writes(self, start: int, end: int) -> list[Access]:
        """The latest writes of the bytes from ``start`` to ``end``."""
        return [one.write for one in self._segments if one.write is not None and one.start < end and start < one.end]

    def unwritten(self, start: int, end: int) -> bool:
        """Whether nobody has written any of the bytes from ``start`` to ``end``."""
        return not self.writes(start, end)

    def _between(self, start: int, end: int) -> list[_Segment]:
        """The segments of a range, cut at its ends, with new ones where there were none."""
        segments = self._segments
        at = bisect_right(segments, start, key=_start) - 1
        if at < 0 or segments[at].end <= start:
            at += 1
        elif segments[at].start < start:
            segments[at : at + 1] = segments[at].cut(start)
            at += 1
        first, position = at, start
        while position < end:
            if at == len(segments) or segments[at].start > position:
                upto = end if at == len(segments) else min(end, segments[at].start)
                segments.insert(at, _Segment(position, upto))
            elif segments[at].end > end:
                segments[at : at + 1] = segments[at].cut(end)
            position = segments[at].end
            at += 1
        return segments[first:at]


@dataclass
class Binding:
    """Bytes under a part of a multicast object."""

    offset: int
    size: int
    bytes: Bytes
    start: int
    device: int | None = None
    """Whose replica it is; None where that is not known."""


@dataclass
class Contents:
    """A part of imported memory whose contents its exporter had not finished when they were imported."""

    low: int
    high: int
    after: list[tuple[int, int]]
    """Of which actors and times one has to come before a use."""
    over: Callable[[], bool]
    """Whether the exporter may have told that they are there."""
    whose: str
    remedy: str
    step: bool = False
    """Whether it was written after the export."""


@dataclass(eq=False)
class Range:
    """Addresses that stand for bytes, from their beginning to their end."""

    base: int
    size: int
    kind: str
    """What they are, in words."""
    bytes: Bytes = field(default_factory=Bytes)
    offset: int = 0
    """Where in the bytes they begin."""
    stack: Stack = ()
    born: Moment | None = None
    """The allocation in stream order; None where the host has made it."""
    ended: Moment | None = None
    """The free, or the end of a mapping."""
    freed_after: Clock | None = None
    """What comes before a free in stream order."""
    vacated: bool = False
    """It has ended, and its addresses may be those of ordinary memory by now."""
    pending: bool = False
    """Allocated in a stream that has not come so far, or by a graph that was not launched."""
    last: dict[int, Access] = field(default_factory=dict)
    """The latest use of each actor."""
    previous: tuple[Range, ...] = ()
    """Who had the same memory before."""
    grants: dict[int, int] | None = None
    """What devices may do: 1 read, 3 write; None where anybody may."""
    bindings: list[Binding] | None = None
    """Of a mapping of a multicast object: what is bound to the object."""
    opened: int = 1
    """How often memory of another process was opened."""
    imports: list[Range] = field(default_factory=list)
    """The same memory as other imports in this process have it."""
    context: int = 0
    """The context with which it ends; 0 where that is none."""
    awaited: tuple[Contents, ...] = ()
    """Of an import: what may not be there yet."""

    @property
    def end(self) -> int:
        """Behind the last address."""
        return self.base + self.size

    def physical(self, low: int, high: int) -> list[tuple[Bytes, int, int]]:
        """The bytes behind a part of the addresses."""
        start, end = low - self.base + self.offset, high - self.base + self.offset
        if self.bindings is None:
            return [(self.bytes, start, end)]
        found = []
        for one in self.bindings:
            first, last = max(start, one.offset), min(end, one.offset + one.size)
            if first < last:
                found.append((one.bytes, first - one.offset + one.start, last - one.offset + one.start))
        return found

    def __str__(self) -> str:
        return f"{self.kind} of {size_text(self.size)} at {self.base:#x}"


Piece = tuple[Range, int, int]
"""Addresses of a range: from the first to behind the last."""


def accesses(
    actor: Actor,
    pieces: Iterable[tuple[Piece, bool]],
    what: str,
    stack: Stack,
    atomic: bool = False,
    kernel: bool = False,
) -> Iterator[tuple[Access, Piece]]:
    """What an operation does to pieces: an access for each; of a kernel one for all reads and one for all writes."""
    made: dict[bool, Access] = {}
    for piece, write in pieces:
        access = made.get(write)
        if access is None or not kernel:
            access = made[write] = Access(actor, what, stack, write, atomic)
        yield access, piece


def size_text(nbytes: int) -> str:
    """A size as people read it."""
    for step, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= step and nbytes % step == 0:
            return f"{nbytes // step} {unit}"
    return f"{nbytes} byte{'' if nbytes == 1 else 's'}"


_KEPT = 20_000
"""How many ranges are there before those that have ended are forgotten."""


class Addresses:
    """The ranges of an address space, those that have ended included until others take their place."""

    def __init__(self) -> None:
        self._at: dict[int, Range] = {}
        self._bases: list[int] = []
        self._most = _KEPT

    def add(self, made: Range) -> None:
        """Add a range, in place of what was there; what is left of freed memory beside it stays."""
        same = self._at.get(made.base)
        if same is not None and same.size == made.size and same.ended is not None:
            made.previous, same.previous = (same,), ()
            self._at[made.base] = made
            return
        for old in self.overlapping(made.base, made.end):
            self.remove(old.base)
            if old.ended is None:
                continue
            made.previous += (old,)
            # One generation is enough to tell whose memory it was.
            old.previous = ()
            for low, high in ((old.base, made.base), (made.end, old.end)):
                if low < high:
                    self._insert(replace(old, base=low, size=high - low, offset=old.offset + low - old.base))
        if len(self._at) > self._most:
            for old in [one for one in self._at.values() if one.ended is not None]:
                self.remove(old.base)
            self._most = max(_KEPT, 2 * len(self._at))
        self._insert(made)

    def _insert(self, made: Range) -> None:
        self._at[made.base] = made
        at = bisect_left(self._bases, made.base)
        if self._bases[at : at + 1] != [made.base]:
            self._bases.insert(at, made.base)

    def remove(self, base: int) -> None:
        """Take the range out that begins at an address."""
        # In this order an interrupt leaves a base without a range, which is nothing.
        self._at.pop(base, None)
        at = bisect_left(self._bases, base)
        if self._bases[at : at + 1] == [base]:
            del self._bases[at]

    def find(self, address: int) -> Range | None:
        """The range that an address is in."""
        found = self._at.get(address)
        if found is not None:
            return found
        at = bisect_right(self._bases, address) - 1
        if at < 0:
            return None
        found = self._at.get(self._bases[at])
        return found if found is not None and address < found.end else None

    def overlapping(self, start: int, end: int) -> list[Range]:
        """The ranges that have a byte between two addresses, in order."""
        first = max(bisect_right(self._bases, start) - 1, 0)
        found = []
        for base in self._bases[first : bisect_left(self._bases, end)]:
            one = self._at.get(base)
            if one is not None and one.end > start:
                found.append(one)
        return found

    def pieces(self, start: int, size: int) -> list[Piece]:
        """What is known of some addresses."""
        found = self._at.get(start)
        if found is not None and size <= found.size:
            return [(found, start, start + size)] if size else []
        end = start + size
        return [(one, max(start, one.base), min(end, one.end)) for one in self.overlapping(start, end)]

    def vacate(self, which: Callable[[Range], bool]) -> None:
        """Some of what has ended has left its addresses to others."""
        for one in self._at.values():
            if one.ended is not None and which(one):
                one.vacated = True

    def living(self) -> list[Range]:
        """All that have not ended."""
        return [one for one in self._at.values() if one.ended is None]


class Judge:
    """Notes what is done to ranges, and tells ``found`` of each hazard."""

    def __init__(self, timeline: Timeline, found: Callable[[Hazard], None], told: Clock | None = None) -> None:
        self.timeline = timeline
        self._found = found
        self._told = Clock() if told is None else told
        """What other processes may wait for. They may tell us when they have, in ways that nobody sees."""

    def _is_open(self, range_: Range, before: Moment) -> bool:
        """Whether other processes may have given an order that is not known here."""
        return range_.bytes.shared and self._told.after(before.actor.number, before.time)

    # -- life ------------------------------------------------------------------------------------------------

    def allocate(self, made: Range, stream: Stream) -> None:
        """A stream has come to an allocation."""
        made.born = Moment(stream, "allocation", made.stack)
        made.pending = False
        for previous in made.previous:
            ended = previous.ended
            if ended is None or ended.actor is stream:
                continue
            if not stream.clock.after(ended.actor.number, ended.time):
                # The driver gives memory out only when, or so that, its free comes first.
                self.timeline.chosen(previous.freed_after or Clock({ended.actor.number: ended.time}), stream)

    def free(self, range_: Range, actor: Actor, clock: Clock, what: str, stack: Stack, ending: str = "") -> None:
        """An actor frees or, where ``ending`` says so, unmaps or releases memory."""
        order = self.timeline.order
        born = range_.born
        by_host = not isinstance(actor, Stream)
        if range_.ended is not None:
            self._report(
                "double free",
                f"{what} of {range_}, which {range_.ended.actor.name} had freed already",
                "free it once",
                range_,
                (("this call", stack), ("freed", range_.ended.stack)),
            )
            return
        if born is not None and not ending:
            ordered = CERTAIN if born.actor is actor else order(clock, born.actor.number, born.time)
            if ordered != CERTAIN or range_.pending:
                formerly, more = _formerly(range_)
                self._report(
                    "free before allocation",
                    f"{what} on {actor.name} of {range_}, which does not come after its allocation on "
                    f"{born.actor.name}{formerly}",
                    _edge(born, actor, by_host),
                    range_,
                    (("this call", stack), ("allocated", range_.stack), *more),
                    ordered,
                )
        for use in range_.last.values():
            if use.actor is actor:
                continue
            ordered = order(clock, use.actor.number, use.time)
            if ordered != CERTAIN and not self._is_open(range_, use):
                self._report(
                    f"{ending} while in use" if ending else "free racing a use",
                    f"{what} on {actor.name} of {range_}, which {use.what} of {use.actor.name} may still be using",
                    _edge(use, actor, by_host),
                    range_,
                    (("this call", stack), ("used", use.stack), ("allocated", range_.stack)),
                    ordered,
                )
        for other in range_.imports:
            over = other.ended
            if other.kind.startswith("import") and (
                over is None
                or (
                    over.actor is not actor
                    and not order(clock, over.actor.number, over.time)
                    and not self._is_open(range_, over)
                )
            ):
                self._report(
                    "free before the importer's",
                    f"{what} on {actor.name} of {range_}, which is imported at {other.base:#x} and not freed there",
                    "free the imported pointer first" if over is None else _edge(over, actor, by_host),
                    range_,
                    (("this call", stack), ("imported", other.stack)),
                )
        range_.ended = Moment(actor, what, stack)
        range_.freed_after = None if by_host else clock.copy()

    # -- use -------------------------------------------------------------------------------------------------

    def use(self, pieces: Iterable[Piece], access: Access, clock: Clock, device: int | None = None) -> None:
        """An actor reads or writes addresses. ``device`` is given where nobody else checks its rights."""
        actor, number, order = access.actor, access.actor.number, self.timeline.order
        by_host = not isinstance(actor, Stream)
        for range_, low, high in pieces:
            if range_.ended is not None:
                self._after_end(range_, access, clock)
                continue
            born = range_.born
            if born is not None and (born.actor is not actor or range_.pending):
                ordered = order(clock, born.actor.number, born.time)
                if range_.pending or (ordered != CERTAIN and not self._is_open(range_, born)):
                    self._before_birth((range_, low, high), born, access, clock, ordered)
            needed = 3 if access.write else 1
            if device is not None and range_.grants is not None and needed & ~range_.grants.get(device, 0):
                self._report(
                    "access without a grant",
                    f"{access.what} of {actor.name} {'writes' if access.write else 'reads'} {range_}, to which device "
                    f"{device} has {'only read access' if range_.grants.get(device) else 'no access'}",
                    f"grant device {device} access (cuMemSetAccess, cuMemPoolSetAccess)",
                    range_,
                    (("this call", access.stack), ("allocated", range_.stack)),
                )
            for contents in range_.awaited:
                self._await(range_, low, high, contents, access, clock)
            range_.last[number] = access
            if len(range_.last) > _MANY:
                self._forget(range_.last)
            for memory, start, end in range_.physical(low, high):
                for before, ordered in memory.touch(start, end, access, clock, order, self._forget):
                    if not (access.atomic and before.atomic) and not self._is_open(range_, before):
                        self._race(range_, before, access, by_host, ordered)

    def reads_unwritten(self, piece: Piece, access: Access) -> None:
        """A copy is about to read memory: report it where nobody has written any of that."""
        range_, low, high = piece
        if range_.ended is not None or range_.awaited or not range_.grants:
            return
        parts = range_.physical(low, high)
        if parts and all(memory.unwritten(start, end) and not memory.shared for memory, start, end in parts):
            self._report(
                "uninitialized",
                f"{access.what} of {access.actor.name} reads {range_}, of which nobody has written these bytes",
                "write them before (or tell of the kernel that does: used)",
                range_,
                (("this call", access.stack), ("allocated", range_.stack)),
            )

    def _await(self, range_: Range, low: int, high: int, contents: Contents, access: Access, clock: Clock) -> None:
        if contents.low >= high or low >= contents.high or any(clock.after(*one) for one in contents.after):
            return
        if access.actor in self.timeline.foreign:
            return  # its library may have waited
        if contents.over():
            range_.awaited = tuple(one for one in range_.awaited if one is not contents)
            return
        actor = access.actor
        self._report(
            "race",
            f"{access.what} of {actor.name} uses {range_}, whose contents {contents.whose} may still be writing",
            f"{actor.name} must wait for {contents.remedy}",
            range_,
            (("this call", access.stack), ("imported", range_.stack)),
        )

    def _forget(self, uses: dict[int, Access]) -> None:
        """Take out the uses that come before all that is queued from now on: those that the host knows of."""
        host = self.timeline.host
        for number, use in tuple(uses.items()):
            if self.timeline.order(host, number, use.time) == CERTAIN:
                del uses[number]

    def _race(self, range_: Range, before: Access, access: Access, by_host: bool, ordered: int) -> None:
        actor = access.actor
        if before.actor is actor:
            self._report(
                "race",
                f"{access.what} of {actor.name} reads and writes the same bytes of {range_}, in no order",
                "let what it reads and what it writes not overlap, or make it several operations",
                range_,
                (("this call", access.stack), ("allocated", range_.stack)),
            )
            return
        self._report(
            "race",
            f"{access.what} of {actor.name} {'writes' if access.write else 'reads'} what {before.what} of "
            f"{before.actor.name} {'writes' if before.write else 'reads'}, in no order: {range_}",
            _edge(before, actor, by_host),
            range_,
            (("this call", access.stack), ("used", before.stack), ("allocated", range_.stack)),
            ordered,
        )

    def _after_end(self, range_: Range, access: Access, clock: Clock) -> None:
        ended = range_.ended
        assert ended is not None
        actor = access.actor
        waited = range_.last.pop(actor.number, None)
        if waited is not None and waited.time == NEVER:
            return  # it was told of when the memory was ended
        after = ended.actor is actor or self.timeline.order(clock, ended.actor.number, ended.time)
        places = (("this call", access.stack), ("freed", ended.stack), ("allocated", range_.stack))
        if after:
            self._report(
                "use after free",
                f"{access.what} of {actor.name} uses {range_}, which {ended.what} of {ended.actor.name} ended before",
                f"end the memory ({ended.what}) after this use",
                range_,
                places,
            )
        else:
            self._report(
                "free racing a use",
                f"{access.what} of {actor.name} uses {range_}, which {ended.actor.name} frees at the same time",
                _edge(access, ended.actor, not isinstance(ended.actor, Stream)),
                range_,
                places,
            )

    def _before_birth(self, piece: Piece, born: Moment, access: Access, clock: Clock, ordered: int) -> None:
        range_, low, high = piece
        actor = access.actor
        places = [("this call", access.stack), ("allocated", range_.stack)]
        for previous in () if ordered else range_.previous:
            first, ended = previous.born, previous.ended
            if first is None or ended is None or previous.end <= low or high <= previous.base:
                continue
            if first.actor is actor or self.timeline.order(clock, first.actor.number, first.time):
                self._report(
                    "reuse race",
                    f"{access.what} of {actor.name} uses memory that {ended.actor.name} has freed and that is now "
                    f"{range_}, allocated on {born.actor.name}",
                    f"free it after this use: {_edge(access, ended.actor, not isinstance(ended.actor, Stream))}",
                    range_,
                    (*places, ("freed", ended.stack)),
                )
                return
        formerly, more = _formerly(range_)
        self._report(
            "use before allocation",
            f"{access.what} of {actor.name} uses {range_}, which is allocated on {born.actor.name} in no order with "
            f"that{formerly}",
            _edge(born, actor, not isinstance(actor, Stream)),
            range_,
            (*places, *more),
            ordered,
        )

    def _report(
        self,
        kind: str,
        what: str,
        remedy: str,
        range_: Range,
        places: Iterable[tuple[str, Stack]],
        ordered: int = 0,
    ) -> None:
        shown: list[tuple[str, Stack]] = []
        for name, stack in places:
            shown.append((name, stack))
            if isinstance(stack, Launched):
                shown.append((f"{name}, launched", stack.launch))
        self._found(Hazard(kind, what, remedy, range_.base, range_.size, ordered != BY_CHOICE, tuple(shown)))


def _formerly(range_: Range) -> tuple[str, list[tuple[str, Stack]]]:
    """In words and places: whose the addresses of a range were before."""
    for one in range_.previous:
        if one.ended is not None:
            text = f"; before that {one} was there, which {one.ended.what} of {one.ended.actor.name} has freed"
            return text, [("allocated before", one.stack), ("freed before", one.ended.stack)]
    return "", []


def _edge(before: Moment, later: Actor, by_host: bool) -> str:
    """The missing edge in words."""
    its = before.what.removeprefix("a ")
    if by_host and later.within is not None and isinstance(before.actor, Stream):
        return (
            f"{later.within.name} must wait for an event recorded on {before.actor.name} after its {its}, before the "
            "host function is queued"
        )
    if by_host:
        return f"the host must synchronise with {before.actor.name} after its {its}"
    if not isinstance(before.actor, Stream):
        return f"{before.actor.name} must do its {its} before the work of {later.name} is queued"
    if later.name.startswith("graph node"):
        return f"{later.name} must depend on {before.actor.name}"
    return f"{later.name} must wait for an event recorded on {before.actor.name} after its {its}"
