"""Checks of each allocation, use and free against the order of earlier operations. Pure Python, no driver."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from streamalloc.checker.clocks import BY_CHOICE, CERTAIN, MOST_WAITS, Actor, Clock, Obstacle, Timeline, TrackedStream
from streamalloc.checker.ranges import MANY_USERS, NEVER, Access, AwaitedPart, Piece, Range, RecordedOperation
from streamalloc.driver.reports import LAUNCHED, Hazard, Launched, Stack, place_of

_WAKES = {"sleep()": ", or wake() before it", "evict()": ", or restore() before it"}
_VERBS = {"unmap": "unmaps", "release": "releases", "": "frees"}


class RecordedEvent(NamedTuple):
    """One record of an event, for reports."""

    stream: TrackedStream
    mark: Obstacle
    """Obstacle that ends when the recorded work has run."""
    stack: Stack


class Wait(NamedTuple):
    """Wait of a stream or of the host for an event, by which reports explain why the wait gives no order."""

    made: str
    """Place in the program where the event was made, as text."""
    recordings: tuple[RecordedEvent, ...]
    """The last record before the wait, and earlier records that it replaced."""
    stack: Stack


class Judge:
    """Compares operations on ranges with the operations before, and reports hazards to ``on_hazard``."""

    def __init__(self, timeline: Timeline, on_hazard: Callable[[Hazard], None], published: Clock | None = None) -> None:
        self.timeline = timeline
        self._on_hazard = on_hazard
        self._published = Clock() if published is None else published
        """Clock of the work for which other processes can wait, and may have waited."""
        self._waits: deque[Wait] = deque(maxlen=MOST_WAITS)
        """The latest waits of the host for events."""
        self.sees_grants: Callable[[], bool] = lambda: True
        """Function that returns whether the checker has recorded all calls that grant access to mappings."""

    def waited(self, actor: Actor, wait: Wait) -> None:
        """Record a wait of ``actor`` for an event, so that a report can explain why the wait gives no order."""
        (actor.waits if isinstance(actor, TrackedStream) else self._waits).append(wait)

    def missing_order(self, before: RecordedOperation, later: Actor) -> str:
        """Return advice on how to order the actor ``later`` after the operation ``before``. The advice names a wait
        that had no effect, if there is one.
        """
        waiting = later if later.within is None else later.within
        waits = waiting.waits if isinstance(waiting, TrackedStream) else self._waits
        vain = (_vain(wait, before, waiting) for wait in reversed(waits) if isinstance(before.actor, TrackedStream))
        return next(filter(None, vain), "") or _missing_order(before, later)

    def _is_open(self, range_: Range, before: RecordedOperation) -> bool:
        """Whether another process may have ordered later work after the operation ``before`` by calls that this checker
        is not told of. If so, a note is added.
        """
        found = range_.bytes.shared and self._published.after(before.actor.number, before.time)
        if found:
            self.timeline.notes.add("shared", str(range_))
        return found

    # -- allocation and free ---------------------------------------------------------------------------------

    def allocate(self, made: Range, stream: TrackedStream) -> None:
        """Record an allocation at the time when its stream runs it. If its addresses were freed in another stream, and
        nothing orders the free before the allocation, the reuse is recorded as a choice of the driver.
        """
        made.born = RecordedOperation(stream, "allocation", made.stack)
        made.pending = False
        for previous in made.previous:
            ended = previous.ended
            if ended is None or ended.actor is stream:
                continue
            if not stream.clock.after(ended.actor.number, ended.time):
                # The driver reuses memory only after its free, so work with the new allocation comes after that free.
                self.timeline.chosen(previous.freed_after or Clock({ended.actor.number: ended.time}), stream)

    def free(
        self, range_: Range, actor: Actor, clock: Clock, what: str, stack: Stack, ending: str = ""
    ) -> Callable[[], None]:
        """Record a free of ``range_``. Report uses and imports of the memory that may not have ended, a missing order
        after the allocation, and a second free, which is not recorded.

        ``clock``: clock of the operations that precede the free. ``what``, ``stack``: name and place of the call.
        ``ending``: ``"unmap"`` or ``"release"`` if the call is no free; the order after the allocation is then not
        checked. Returns a function that undoes the record, for a free that the driver refuses.
        """
        order, before = self.timeline.order, (range_.ended, range_.freed_after)

        def undo() -> None:
            range_.ended, range_.freed_after = before

        born, free = range_.born, RecordedOperation(actor, what, stack)
        if range_.ended is not None:
            what = f"{free} frees {range_} again: {range_.ended} had freed it."
            self.report("double free", what, "free it once.", range_, stack, freed=range_.ended.stack)
            return undo
        reported: Access | None = None
        if born is not None and not ending:
            ordered = CERTAIN if born.actor is actor else order(clock, born.actor.number, born.time)
            if ordered != CERTAIN or range_.pending:
                formerly, more = _formerly(range_)
                where = f"{born.actor.name}{formerly}"
                what = f"{free} frees {range_}, but nothing orders the free after the allocation on {where}."
                # A wait for the last use by the allocating stream would order the allocation, too: one report.
                use = None if born.actor is actor else range_.last.get(born.actor.number)
                if use is not None and order(clock, use.actor.number, use.time) == ordered:
                    reported = use
                remedy = self.missing_order(reported or born, actor)
                self.report("free before allocation", what, remedy, range_, stack, ordered=ordered, **more)
        for use in range_.last.values():
            if use.actor is actor or use is reported:
                continue
            ordered = order(clock, use.actor.number, use.time)
            if ordered != CERTAIN and not self._is_open(range_, use):
                kind = f"{ending} while in use" if ending else "free racing a use"
                what = f"{free} {_VERBS[ending]} {range_}, but nothing orders it after {use}."
                self.report(kind, what, self.missing_order(use, actor), range_, stack, ordered=ordered, used=use.stack)
        for one in range_.imports:
            if one.kind.startswith("import") and not self._import_ended(range_, one.ended, actor, clock):
                what = f"{free} frees {range_}, but nothing orders it after the free of its import at {one.base:#x}."
                order_of = self.missing_order
                remedy = "free the imported pointer first." if one.ended is None else order_of(one.ended, actor)
                self.report("free before the importer's", what, remedy, range_, stack, imported=one.stack)
        range_.ended = free
        range_.freed_after = None if actor.is_host else clock.copy()
        return undo

    def _import_ended(self, range_: Range, over: RecordedOperation | None, actor: Actor, clock: Clock) -> bool:
        if over is None:
            return False
        ordered = over.actor is actor or self.timeline.order(clock, over.actor.number, over.time)
        return bool(ordered) or self._is_open(range_, over)

    # -- rules for uses --------------------------------------------------------------------------------------

    def use(self, piece: Piece, access: Access, clock: Clock, device: int | None = None, races: bool = True) -> None:
        """Record a read or a write of a part of memory. Report missing orders, missing access rights, and uses of freed
        memory, which are not recorded.

        ``clock``: clock of the operations that precede the use. ``device``: ordinal of the device whose access rights
        are checked; None: no check. The driver checks the rights itself, except for kernels. ``races=False``: the use
        is not compared with other uses, because streams order themselves by the value in this memory.
        """
        range_, actor = piece[0], access.actor
        if range_.ended is not None:
            self._after_end(range_, access, clock)
            return
        conflicts = self._conflicts(piece, access, clock) if races else []
        born = range_.born
        if born is not None and (born.actor is not actor or range_.pending):
            ordered = self.timeline.order(clock, born.actor.number, born.time)
            if range_.pending or (ordered != CERTAIN and not self._is_open(range_, born)):
                # A wait for the last use by the allocating stream would order the allocation, too: one report.
                same = [one for one in conflicts if one[0].actor is born.actor is not actor and one[1] == ordered]
                last = max((before for before, _ in same), key=lambda before: before.time, default=born)
                self._before_birth(piece, born, last, access, clock, ordered)
                conflicts = [one for one in conflicts if one not in same]
        if device is not None:
            self._check_rights(range_, access, device)
        for contents in range_.awaited:
            self._await(piece, contents, access, clock)
        range_.last[actor.number] = access
        if len(range_.last) > MANY_USERS:
            self.timeline.forget_uses(range_.last)
        for before, ordered in conflicts:
            self._race(range_, before, access, ordered)

    def _conflicts(self, piece: Piece, access: Access, clock: Clock) -> list[tuple[Access, int]]:
        """Record a use of the bytes of ``piece``. Returns the earlier uses that race with it, as tuples of use and
        order.
        """
        range_, low, high = piece
        return [
            (before, ordered)
            for memory, start, end in range_.physical(low, high)
            for before, ordered in memory.record_access(start, end, access, clock, self.timeline)
            if not (access.atomic and before.atomic) and not self._is_open(range_, before)
        ]

    def _check_rights(self, range_: Range, access: Access, device: int) -> None:
        """Report an access by a device that lacks the right for it."""
        rights = self._rights(range_, device)
        if (3 if access.write else 1) & ~rights:
            did, has = "writes" if access.write else "reads", "only read access" if rights else "no access"
            what = f"{access} {did} {range_}, but device {device} has {has} to it."
            calls = "cuCtxEnablePeerAccess" if range_.context else "cuMemSetAccess, cuMemPoolSetAccess"
            remedy = f"grant device {device} access ({calls})."
            self.report("access without a grant", what, remedy, range_, access.stack)

    def _rights(self, range_: Range, device: int) -> int:
        """Return the access of a device to a range: 0 none, 1 read, 3 read and write.

        If another library may have granted access by a call that the checker does not record, 3 is returned, and a note
        is added.
        """
        rights = 3 if range_.grants is None else range_.grants.get(device, 0)
        if rights < 3 and (self.timeline.foreign if range_.context else not self.sees_grants()):
            self.timeline.notes.add("access", str(range_))
            return 3
        return rights

    def beyond(self, piece: Piece, end: int, access: str, stack: Stack) -> None:
        """Report a use that begins inside a range and goes beyond its end, unless the range was freed. ``piece``: the
        part of the use inside of the range. ``end``: the address at which the use ends. ``access``, ``stack``: name and
        place of the use.
        """
        range_, start, last = piece
        if range_.ended is None:
            what = f"{access} uses {end - start:,} bytes from offset {start - range_.base:,} of {range_}"
            what += f", {end - last:,} bytes more than there are."
            remedy = "use no more bytes than the allocation has; sizes count bytes, not elements."
            self.report("out of bounds", what, remedy, range_, stack)

    def reads_unwritten(self, piece: Piece, access: Access, unseen_upto: int) -> None:
        """Report a read of bytes that were never written; the first such part only. Memory that may have been written
        unseen is left out.

        ``unseen_upto``: highest :attr:`.Bytes.number` of memory that a kernel without declared uses may have written.
        """
        range_, low, high = piece
        # The host may have written the memory through a NumPy array over it. No call shows such a write to the checker.
        if range_.ended is not None or range_.awaited or not range_.grants or range_.viewed:
            return
        for memory, start, end in range_.physical(low, high):
            missing = 0 if memory.shared or memory.number <= unseen_upto else memory.unwritten(start, end)
            if not missing:
                continue
            some = "these bytes" if missing == high - low else f"{missing:,} of the {high - low:,} bytes"
            what = f"{access} reads {range_}, but nothing has written {some}."
            remedy = "write them first, or report the kernel that writes them with used()."
            self.report("uninitialized", what, remedy, range_, access.stack)
            return

    def _await(self, piece: Piece, contents: AwaitedPart, access: Access, clock: Clock) -> None:
        range_, low, high = piece
        if contents.low >= high or low >= contents.high or not (contents.written or access.write):
            return
        if any(clock.after(*one) for one in contents.after):
            return
        if contents.over():
            range_.awaited = tuple(one for one in range_.awaited if one is not contents)
            return
        if access.actor in self.timeline.foreign:
            # Another library has the stream, and may have made it wait for the other process.
            self.timeline.notes.add("shared", str(range_))
            return
        did = "writes" if contents.written else "reads"
        what = f"{access} uses {range_}, but nothing orders it after the {did} of {contents.whose}."
        self.report("race", what, f"{access.actor.name} must wait for {contents.remedy}.", range_, access.stack)

    def _race(self, range_: Range, before: Access, access: Access, ordered: int) -> None:
        if before.actor is access.actor:
            what = f"{access} reads and writes the same bytes of {range_} in no defined order."
            remedy = "separate the source from the target, or use several operations."
            self.report("race", what, remedy, range_, access.stack)
            return
        did, earlier = ("writes" if one.write else "reads" for one in (access, before))
        what = f"{access} {did} {range_}, but nothing orders it after {before}, which {earlier} the same bytes."
        remedy = self.missing_order(before, access.actor)
        self.report("race", what, remedy, range_, access.stack, ordered=ordered, used=before.stack)

    def _after_end(self, range_: Range, access: Access, clock: Clock) -> None:
        ended, actor = range_.ended, access.actor
        assert ended is not None
        queued = range_.last.pop(actor.number, None)
        if queued is not None and queued.time == NEVER:
            return  # This use was queued at the free, so Judge.free has reported it.
        if ended.actor is actor or self.timeline.order(clock, ended.actor.number, ended.time):
            what = f"{access} uses {range_} after {ended} freed it."
            kind, remedy = "use after free", f"call {ended.call} after this use{_WAKES.get(ended.call, '')}."
        else:
            what = f"{access} uses {range_}, but nothing orders it before {ended}, which frees it."
            kind, remedy = "free racing a use", self.missing_order(access, ended.actor)
        self.report(kind, what, remedy, range_, access.stack, freed=ended.stack)

    def _before_birth(
        self,
        piece: Piece,
        born: RecordedOperation,
        last: RecordedOperation,
        access: Access,
        clock: Clock,
        ordered: int,
    ) -> None:
        """Report a use that is not ordered after the allocation ``born``. ``last``: the operation after which the use
        must come, ``born`` or a later one of its stream.
        """
        range_, low, high = piece
        actor = access.actor
        for previous in () if ordered else range_.previous:
            first, ended = previous.born, previous.ended
            if first is None or ended is None or previous.end <= low or high <= previous.base:
                continue
            # If the host had waited for the free before this use, it can only mean the new memory.
            if self.timeline.may_be_known(ended.actor.number, ended.time):
                continue
            if first.actor is actor or self.timeline.order(clock, first.actor.number, first.time):
                where = born.actor.name
                what = f"{access} uses memory that {ended} freed and that is now {range_}, allocated on {where}."
                free_later, wait = self.missing_order(access, ended.actor), self.missing_order(last, actor)
                remedy = f"if the use means the freed memory, free it after the use: {free_later} "
                remedy += f"If it means the new memory: {wait}"
                self.report("reuse race", what, remedy, range_, access.stack, freed=ended.stack)
                return
        formerly, more = _formerly(range_)
        where = f"{born.actor.name}{formerly}"
        what = f"{access} uses {range_}, but nothing orders this use after the allocation on {where}."
        remedy = self.missing_order(last, actor)
        # First, so that reports of the same two operations count as one.
        used = {} if last is born else {"used": last.stack}
        self.report("use before allocation", what, remedy, range_, access.stack, ordered=ordered, **used, **more)

    def report(
        self, kind: str, what: str, remedy: str, range_: Range, call: Stack, *, ordered: int = 0, **places: Stack
    ) -> None:
        """Report a hazard of ``range_``. ``kind``, ``what``, ``remedy``: its kind, description and advice.

        ``call``: place of the operation. ``places``: further places by title. ``ordered``: order that the two
        operations have in this run all the same, a constant of :mod:`.clocks`.
        """
        made = "imported" if range_.kind.startswith("import") else "allocated"
        shown: list[tuple[str, Stack]] = []
        for name, stack in {"this call": call, **places, made: range_.stack}.items():
            shown.append((name, stack))
            if isinstance(stack, Launched):
                shown.append((f"{name}{LAUNCHED}", stack.launch))
        self._on_hazard(Hazard(kind, what, remedy, range_.base, range_.size, ordered != BY_CHOICE, tuple(shown)))


def _formerly(range_: Range) -> tuple[str, dict[str, Stack]]:
    """Return the end of a sentence about the range that had the addresses before, and places in the program by title.
    Both are empty if there was no such range.
    """
    for one in range_.previous:
        if one.ended is not None:
            text = f"; before that {one} was there, until {one.ended} freed it"
            return text, {"allocated before": one.stack, "freed before": one.ended.stack}
    return "", {}


def _vain(wait: Wait, before: RecordedOperation, waiting: Actor) -> str:
    """Return advice if ``wait`` should have ordered ``waiting`` after ``before`` and did not; otherwise an empty
    text.
    """
    operation = f"the {_bare(before)} of {place_of(before.stack)}"
    waits = f"{'the host' if waiting.is_host else waiting.short} waits at {place_of(wait.stack)} for the event"
    if not wait.recordings:
        record = f"record it on {before.actor.short} after {operation}, before the wait."
        return f"{waits} made at {wait.made}, which nothing had recorded by then: {record}"
    covering = [
        one for one in wait.recordings
        if one.mark.clock is None or one.mark.clock.after(before.actor.number, before.time)
    ]  # fmt: skip
    last = wait.recordings[-1]
    if last in covering:
        return ""
    if covering:
        replaced = f"but the recording of {place_of(last.stack)} has replaced that one: use two events."
        return f"{waits} recorded at {place_of(covering[-1].stack)} after {operation}, {replaced}"
    if last.stream is before.actor:
        return f"{waits} recorded at {place_of(last.stack)}, before {operation}: record it after that."
    return ""


def _bare(operation: RecordedOperation) -> str:
    """Return the name of an operation for reports, without its article."""
    return operation.call.removeprefix("a ").removeprefix("an ")


def _missing_order(before: RecordedOperation, later: Actor) -> str:
    its = _bare(before)
    actor, waiting = before.actor.short, later.short
    if later.is_host and later.within is not None and not before.actor.is_host:
        event = f"an event recorded on {actor} after its {its}"
        return f"{later.within.short} must wait for {event}, before the host function is queued."
    if later.is_host:
        return f"the host must synchronise with {actor} after its {its}."
    if before.actor.is_host:
        return f"{actor} must do its {its} before the work of {waiting} is queued."
    if later.name.startswith("graph node"):
        return f"{waiting} must depend on {actor}."
    return f"{waiting} must wait for an event recorded on {actor} after its {its}."
