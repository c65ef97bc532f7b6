"""Other processes: what they have of this one's memory, what they are told, and what they tell."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from streamalloc.driver.checker import announcements, open_imports
from streamalloc.driver.checker.announcements import Awaited, Board, Place
from streamalloc.driver.checker.clocks import Actor, Clock, Obstacle, Stream, Timeline
from streamalloc.driver.checker.events import Event
from streamalloc.driver.checker.hazards import Addresses, Contents, Moment, Piece, Range
from streamalloc.driver.checker.reports import Hazard
from streamalloc.driver.checker.stacks import Stack, here
from streamalloc.driver.checker.wait_values import WaitValues

__all__ = ["Interprocess"]

_LEAVING = 64
_POSTED = 64
"""So many exports that are not complete are known to other processes."""
_KNOWN = 256
"""So many announcements are."""


class _Written:
    """A part of exported memory that was written, and the recordings of events that come after."""

    __slots__ = ("covers", "high", "low", "number", "place", "time")

    def __init__(self, low: int, high: int, actor: Actor) -> None:
        self.low = low
        self.high = high
        self.number = actor.number
        self.time = actor.time
        self.covers: list[tuple[int, int]] = []
        self.place: int | None = None
        """Where other processes are told of it."""


class Interprocess:
    """What has to do with other processes."""

    def __init__(
        self,
        timeline: Timeline,
        addresses: Addresses,
        words: WaitValues,
        events: dict[int, Event],
        found: Callable[[Hazard], None],
    ) -> None:
        self._timeline = timeline
        self._addresses = addresses
        self._values = words
        self._events = events
        self._found = found
        self.exports: dict[bytes, Range] = {}
        self.exported: dict[Range, bytes] = {}
        self.entries: dict[Range, Path] = {}
        """What says that this process has an import, by that."""
        self.leaving: dict[Range, Path] = {}
        """The same where the free was called, and nobody can know that it has run."""
        self.written: dict[Range, list[_Written]] = {}
        """Of memory that was exported for good, what was written since."""
        self.imported: dict[Range, bytes] = {}
        """The memory of other processes, by what it was exported as."""
        self.events: dict[bytes, Event] = {}
        self.board: Board | None = None
        """What other processes are told, once there is something."""
        self.posted: dict[int, tuple[bytes, Callable[[], bool]]] = {}
        """The names of exports that were not complete, and whether they are, by their places on the board."""
        self._settled = 0
        self.announced: dict[bytes, Obstacle] = {}
        """The latest announcements to other processes, and to whoever opens memory in this one."""
        self._recorders: dict[tuple[int, int], tuple[Place, Actor]] = {}
        """What other processes' events are to clocks."""
        self._ready_numbers: dict[Place, int] = {}
        """What their posts are."""

    # -- what is exported and imported -----------------------------------------------------------------------

    def let_go(self, range_: Range) -> None:
        """An import is not there any more: say so."""
        entry = self.entries.pop(range_, None) or self.leaving.pop(range_, None)
        if entry is not None:
            open_imports.close_import(entry)

    def close(self) -> None:
        """Take everything back that others are told."""
        for range_ in (*self.entries, *self.leaving):
            self.let_go(range_)
        if self.board is not None:
            self.board.close()

    def frees(self, range_: Range, what: str, stack: Stack, at_once: bool = False) -> None:
        """Memory is freed, which may have been exported or imported; ``at_once``: by the host."""
        if at_once:
            self.let_go(range_)
        elif range_ in self.entries:
            self.leaving[range_] = self.entries.pop(range_)
            if len(self.leaving) > _LEAVING:
                self.let_go(next(iter(self.leaving)))
        self.imported.pop(range_, None)
        for one in self.written.pop(range_, ()):
            self._forget_written(one)
        exported = self.exported.pop(range_, None)
        if exported is not None:
            self.exports.pop(exported, None)
            others = open_imports.holders(exported)
            if others:
                self._found(
                    Hazard(
                        "free before the importer's",
                        f"{what} of {range_}, which process {', '.join(map(str, others))} has imported and not freed",
                        "free it when every importer has freed its pointer, and say so to this process",
                        range_.base,
                        range_.size,
                        places=(("this call", stack), ("allocated", range_.stack)),
                    )
                )

    def _missing(self, piece: Piece, clock: Clock) -> Moment | None:
        """What has been done to memory and does not come before something with this clock."""
        range_, low, high = piece
        moments: list[Moment] = [] if range_.born is None else [range_.born]
        for memory, start, end in range_.physical(low, high):
            moments += memory.writes(start, end)
        certain = self._timeline.certain
        return next((one for one in moments if not certain(clock, one.actor.number, one.time)), None)

    def export(self, range_: Range, stack: Stack, name: bytes = b"") -> None:
        """Memory was exported; other processes know of nothing but events that come before. ``name``: its data."""
        piece = (range_, range_.base, range_.end)
        missing = self._missing(piece, self._timeline.host)
        if missing is None:
            return
        shared = [one for one in self._events.values() if one.shared and one.mark and one.mark.clock]
        covers = [one for one in shared if self._missing(piece, one.mark.clock) is None]  # type: ignore[union-attr, arg-type]
        if not covers:
            self._incomplete(range_, missing, stack)
        elif name:
            places = [self.place(one) for one in covers]
            if None not in places:
                self._post(name, places, lambda: self._missing(piece, self._timeline.host) is None)  # type: ignore[arg-type]

    def _board(self) -> Board | None:
        if self.board is None:
            with contextlib.suppress(OSError):
                self.board = Board()
        return self.board

    def recorded(self, event: Event) -> int:
        """An event was recorded: tell those who know of it; how often it was."""
        return 0 if event.place is None or self.board is None else self.board.record(event.place)

    def place(self, event: Event) -> int | None:
        """Where other processes are told of the recordings of an event; None where they are not."""
        board = self._board()
        if event.place is None and board is not None:
            event.place = board.add_event()
            if event.place is not None and event.mark is not None:
                board.record(event.place)
        return event.place

    def dropped(self, event: Event) -> None:
        """An event was destroyed."""
        if event.place is not None and self.board is not None:
            self.board.drop_event(event.place)
            event.place = None

    def _post(self, name: bytes, covers: list[int], done: Callable[[], bool]) -> None:
        board = self._board()
        if board is not None:
            for place in [place for place, (known, _) in self.posted.items() if known == name]:
                self._take_back(place)
            place = board.post(name, [(one, board.number(one)) for one in covers])
            self.posted.pop(place, None)
            self.posted[place] = (name, done)
            if len(self.posted) > _POSTED:
                self._take_back(next(iter(self.posted)))

    # -- what is written after the export --------------------------------------------------------------------

    def wrote(self, range_: Range, low: int, high: int, actor: Actor) -> None:
        """A part of memory is written, which other processes may have had open since long."""
        entries, made = self.written[range_], _Written(low - range_.base, high - range_.base, actor)
        kept = []
        for one in entries:
            if made.low <= one.low and one.high <= made.high:
                self._forget_written(one)
            else:
                kept.append(one)
        for one in kept[: -_POSTED + 1]:
            self._forget_written(one)
        self.written[range_] = [*kept[-_POSTED + 1 :], made]

    def _forget_written(self, one: _Written) -> None:
        if one.place is not None and self.board is not None:
            self.board.take_back(one.place)
            one.place = None

    def covers(self, event: Event, clock: Clock, number: int) -> None:
        """A recording of an event, by its number, comes after all of ``clock``: others may wait for it."""
        for range_, entries in self.written.items() if event.place is not None else ():
            for one in entries:
                if clock.after(one.number, one.time) and self.board is not None and event.place is not None:
                    one.covers = [it for it in one.covers if it[0] != event.place] + [(event.place, number)]
                    part = (one.low, one.high)
                    one.place = self.board.post(
                        self.exported[range_], one.covers[-announcements.COVERS :], part, one.place
                    )

    def _settle_written(self) -> None:
        for range_, entries in self.written.items():
            over = [one for one in entries if self._timeline.certain(self._timeline.host, one.number, one.time)]
            for one in over:
                self._forget_written(one)
            if over:
                self.written[range_] = [one for one in entries if one not in over]

    def refresh(self, range_: Range) -> None:
        """Memory of another process is about to be used: see what was written in it meanwhile."""
        name = self.imported.get(range_)
        if name is None:
            return
        found = []
        for one in announcements.posts_of(name):
            if one.covers and one.part != (0, 0):
                low, high = (min(range_.base + at, range_.end) for at in one.part)
                found.append(self._contents(low, high, one))
        range_.awaited = (*(one for one in range_.awaited if not one.step), *found)

    def _contents(self, low: int, high: int, found: Awaited) -> Contents:
        after = [(self._other(place).number, number) for place, number in found.covers]
        whose = f"process {found.post.process}"
        remedy = f"an event that {whose} has recorded (cuIpcOpenEventHandle)"
        return Contents(low, high, after, lambda: found.over, whose, remedy, found.part != (0, 0))

    def _take_back(self, place: int) -> None:
        del self.posted[place]
        if self.board is not None:
            self.board.take_back(place)

    def settle(self) -> None:
        """Take back what other processes were told, where they may have been told that it is over."""
        for range_ in [one for one in self.leaving if one.ended is not None and self._may_be_known(one.ended)]:
            self.let_go(range_)
        if self._settled != self._timeline.version:
            self._settled = self._timeline.version
            for place in [place for place, (_, done) in self.posted.items() if done()]:
                self._take_back(place)
            self._settle_written()

    def _may_be_known(self, moment: Moment) -> bool:
        """Whether the host, or something that other processes can wait for, comes after an operation."""
        number, time = moment.actor.number, moment.time
        return self._values.published.after(number, time) or self._timeline.is_known(number, time)

    def awaited(self, range_: Range, name: bytes) -> None:
        """Memory was imported by its export data: what its exporter has told that a stream may wait for."""
        found = announcements.post_of(name)
        if found is not None and found.covers:
            range_.awaited = (self._contents(range_.base, range_.end, found),)
        self.imported[range_] = name

    def opened(self, stream: Stream | None, address: int, nbytes: int, name: bytes, word: int) -> None:
        """A stream is to wait for a word that memory is ready, which another process has announced by this name.

        None for the stream: the host has waited.
        """
        self._values.know(word)
        ours = self.announced.get(name)
        if ours is not None and stream is not None:
            self._timeline.wait(stream, ours)
        elif ours is not None:
            self._timeline.force_mark(ours)
            self._timeline.host_observes(ours.clock or Clock())
        found = announcements.post_of(name)
        if found is None:
            return
        ready, all_ready = self._ready(found.post), self._values.ready.known
        if stream is None:
            self._timeline.host_observes(Clock({ready: 1}))
            return
        whose, remedy = f"process {found.post.process}", f"{stream.name}, on which it was opened"
        self._timeline.submit(stream, lambda stream: stream.clock.learn(Clock({ready: 1})))
        for range_, low, high in self._addresses.pieces(address, nbytes):
            made = Contents(low, high, [(ready, 1)], lambda: found.over or ready not in all_ready, whose, remedy)
            if not any((one.low, one.high, one.after) == (low, high, made.after) for one in range_.awaited):
                range_.awaited = (*(one for one in range_.awaited if not one.over()), made)

    def share(self, stream: Stream, address: int, nbytes: int, name: bytes) -> None:
        """Other processes are told that memory is ready, after all that a stream has queued; ``name``: by what."""
        stack, pieces = here(), self._addresses.pieces(address, nbytes)
        host = self._timeline.host
        if stream.obstacle is not None or any(self._missing(piece, host) for piece in pieces):
            mark = self.announced[name] = self._timeline.record(stream)
            if len(self.announced) > _KNOWN:
                del self.announced[next(iter(self.announced))]

            def done() -> bool:
                known = 0 if mark.clock is None else mark.clock.known.get(stream.number, 0)
                return known > 0 and self._timeline.certain(host, stream.number, known)

            self._post(name, [], done)

        def share(stream: Stream) -> None:
            for piece in pieces:
                missing = self._missing(piece, stream.clock)
                if missing is not None:
                    self._incomplete(piece[0], missing, stack)
            self._values.published.learn(stream.clock)

        self._timeline.submit(stream, share)

    def _incomplete(self, range_: Range, missing: Moment, stack: Stack) -> None:
        self._found(
            Hazard(
                "export before completion",
                f"{range_} is exported while {missing.what} of {missing.actor.name} may still be under way, for which "
                "importers cannot wait",
                f"synchronise with {missing.actor.name} first, or record an interprocess event there that importers "
                "wait for",
                range_.base,
                range_.size,
                places=(("this call", stack), ("used", missing.stack), ("allocated", range_.stack)),
            )
        )

    # -- what others have recorded ---------------------------------------------------------------------------

    def elsewhere(self, event: Event) -> Clock | None:
        """What may come before a recording that was not seen; None where there is none."""
        if event.foreign and event.mark is None:
            return self._timeline.everything()
        if not event.elsewhere:
            return None
        told = self._values.published.copy()
        told.learn(self._values.ready)
        if event.there is not None and event.there.number:
            told.known[self._other(event.there).number] = event.there.number
        return told

    def _other(self, place: Place) -> Actor:
        """What an event of another process is to clocks."""
        key = (id(place.board), place.at)
        if key not in self._recorders:
            self._recorders[key] = (place, self._timeline.thread(f"process {place.process}"))
        return self._recorders[key][1]

    def _ready(self, post: Place) -> int:
        """What a post of another process is to clocks, at the time 1; of the oldest nothing is known any more."""
        number = self._ready_numbers.get(post)
        if number is None:
            number = self._ready_numbers[post] = self._timeline.thread(f"process {post.process}").number
            self._values.ready.known[number] = 1
        if len(self._ready_numbers) > 2 * _KNOWN:
            oldest = list(self._ready_numbers)[:_KNOWN]
            gone = {self._ready_numbers.pop(one) for one in oldest}
            self._timeline.forget(gone, self._values.ready)
        return number
