"""Memory and events shared with other processes, announcements in both directions, and open files.

Two operations of different processes are ordered if the later operation waits for an interprocess event, or for a value
in shared memory, that comes after the earlier operation. A checker records only the calls of its own process. So each
checker announces the queued uses of shared memory with the event recordings after them, and reads the announcements of
other processes before a use. Where another process may have waited by a call that no checker records, the operations
count as ordered, with a note.

Each announcing process has a *board*: a file of fixed entries in a directory that all checkers of a user share. A
process that finds the board of a process that has ended removes the board. An entry is an *event*, with the number of
its recordings, an open *import* of an allocation, or a *post*. A post announces an export that is not complete, or a
later use of a part of shared memory by the exporter or an importer.

A post names the event recordings that other processes may wait for. It is removed once the host has waited for the
work, because the host may then notify others in ways that no checker records. It is also removed when a stream writes a
value after the work.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import secrets
import select
import stat
import struct
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from streamalloc.checker.capture import TrackedEvent
from streamalloc.checker.clocks import Actor, Clock, Obstacle, Timeline, TrackedStream
from streamalloc.checker.contents import WaitValues
from streamalloc.checker.judge import Judge
from streamalloc.checker.ranges import AddressMap, AwaitedPart, Piece, Range, RecordedOperation
from streamalloc.checker.report import Notes
from streamalloc.driver.processes import alive
from streamalloc.driver.reports import Stack

# -- boards: shared memory with events and posts -------------------------------------------------------------


def _path() -> str:
    return os.path.join(tempfile.gettempdir(), f"streamalloc-checker-{os.getuid()}")


def digest(exported: bytes) -> bytes:
    """Return a name of 32 hexadecimal digits, as bytes, for export data."""
    return hashlib.sha256(exported).hexdigest()[:32].encode()


ENTRIES, POSTS = 1024, 768
"""Numbers of entries on a board: first for events and imports, then for posts."""
IMPORT = b"import"
"""Suffix of the name of an import, after the export data."""
COVERS = 4
"""Largest number of event records that a post names."""
_ENTRY = np.dtype([("name", "S32"), ("number", "u8"), ("part", "u8", 2), ("covers", "u8", (COVERS, 2))])
"""Fields of an entry:

* name: name of the event, import or post (:func:`digest`); empty for a free entry, for an event without export data,
  and while a post is being written
* number: how often events at this index were recorded, earlier events included; in a post, how many recordings it names
* part: in a post, the offsets in bytes of the first used byte and of the end; 0 and 0 for all of the memory
* covers: in a post, for each recording that it names, the event's index on the board and the recording's number
"""


@dataclass(frozen=True)
class BoardEntry:
    """Entry at index ``at`` on the board (file of announcements) of another process."""

    board: Any = field(compare=False)
    at: int
    name: bytes
    process: int

    @property
    def is_there(self) -> bool:
        """Whether the entry still exists: its name is unchanged."""
        return bool(self.board["name"][self.at] == self.name)

    @property
    def number(self) -> int:
        """Number of records of events at the entry so far; 0 if the event was removed."""
        return int(self.board["number"][self.at]) if self.is_there else 0


class Board:
    """Announcements of this process, in a file that is made at the first announcement."""

    def __init__(self, on_full: Callable[[], object] = int) -> None:
        self._on_full = on_full
        """Function that is called if an announcement cannot be made, or if a new announcement replaces one of work that
        may be unfinished.
        """
        self._entries: Any = None
        self._free = list(reversed(range(ENTRIES)))
        self._posts = 0
        self.close: Callable[[], object] = bool
        """Function that removes the board's file; it does nothing before the file is made."""

    def _open(self) -> bool:
        """Make the file of the board, if there is none. Returns False if the directory is not writable, so that other
        processes cannot read announcements.
        """
        if self._entries is None:
            with contextlib.suppress(OSError):
                folder = Path(_path())
                folder.mkdir(mode=0o700, exist_ok=True)
                path = folder / f"{os.getpid()}-{secrets.token_hex(4)}"
                self._entries = np.asarray(np.memmap(path, _ENTRY, "w+", shape=ENTRIES + POSTS))
                self.close = weakref.finalize(self, _unlink, path, os.getpid())
        return self._entries is not None

    def add_entry(self, name: bytes = b"") -> int | None:
        """Add an entry for an event or import, and return its index; None if the board is full or not writable.
        ``name``: export data of the event or import; empty if there is none yet.
        """
        if not self._free or not self._open():
            self._on_full()
            return None
        index = self._free.pop()
        if name:
            self.name_entry(index, name)
        return index

    def drop_entry(self, index: int) -> None:
        """Remove an event or import. The next event at this index continues its number of records."""
        self._entries["name"][index] = b""
        self._free.insert(0, index)

    def name_entry(self, index: int, name: bytes) -> None:
        """Set the name of the entry at ``index``, an event or import. Other processes find the entry by this name: the
        :func:`digest` of the export data ``name``.
        """
        self._entries["name"][index] = digest(name)

    def record(self, index: int) -> int:
        """Count a record of the event at ``index``. Returns the number of the record."""
        self._entries["number"][index] += 1
        return self.number(index)

    def number(self, index: int) -> int:
        """Return how often events at ``index`` were recorded, earlier events included."""
        return int(self._entries["number"][index])

    def post(
        self, name: bytes, covers: list[tuple[int, int]], part: tuple[int, int] = (0, 0), index: int | None = None
    ) -> int | None:
        """Post an export that is not complete, or a use of a part of shared memory. Returns the index of the post; None
        if the board is not writable. A new post replaces the one made :data:`POSTS` posts before it, if that is still
        there.

        ``name``: see :func:`posts_of`. ``covers``: the event records that come after the work, as tuples of the event's
        index and the record's number; the first :data:`COVERS` are posted. ``part``: start and end of the used part as
        offsets in bytes; 0 and 0 for all memory. ``index``: index of an earlier post that is replaced.
        """
        if not self._open():
            self._on_full()
            return None
        if index is None:
            index = ENTRIES + self._posts % POSTS
            self._posts += 1
            if self._entries["name"][index]:
                self._on_full()
        entry = self._entries[index]
        entry["name"] = b""
        entry["number"], entry["part"] = min(len(covers), COVERS), part
        entry["covers"][: len(covers)] = np.reshape(covers[:COVERS], (-1, 2))
        # The name is written last, because other processes look for it.
        entry["name"] = digest(name)
        return index

    def remove_post(self, index: int) -> None:
        """Remove the post at ``index`` from the board. From now on the checkers of other processes do not require that
        a use comes after the post's work.
        """
        self._entries["name"][index] = b""


def _unlink(path: Path, process: int) -> None:
    # A forked child has copies of the parent's objects. Without the test, its exit would remove the parent's board.
    if process == os.getpid():
        with contextlib.suppress(OSError):
            path.unlink()


class Announced(NamedTuple):
    """A post of another process, as this process has read it: the event records after which memory can be used."""

    post: BoardEntry
    covers: tuple[tuple[BoardEntry, int], ...]
    """Event records, as tuples of the event's entry and the number of the record. An importer must wait for one of
    them. There are none if a value in memory shows that the work has ended, or if no event was recorded after a use.
    """
    part: tuple[int, int] = (0, 0)
    """Offsets in bytes of the first used byte and of the end; both 0 for all memory."""

    @property
    def over(self) -> bool:
        """Whether the other process has removed the post, or has ended."""
        return not (self.post.is_there and alive(self.post.process))


_boards: dict[str, Any] = {}
"""Boards of other processes that this process has mapped, by file name."""


def _look() -> None:
    """Map the new boards of live processes, and remove files of processes that have ended.

    A board that is mapped already stays mapped while its file exists, even if its process has ended. Whoever reads it
    checks whether the process is alive (:attr:`Announced.over`).
    """
    folder, there = _path(), set()
    for name in os.listdir(folder):
        if name in _boards:
            there.add(name)
            continue
        with contextlib.suppress(OSError, ValueError):
            process, path = int(name.partition("-")[0]), Path(folder, name)
            if not alive(process):
                path.unlink()
            elif process != os.getpid() and path.stat().st_size == (ENTRIES + POSTS) * _ENTRY.itemsize:
                _boards[name] = np.asarray(np.memmap(path, _ENTRY, "r"))
                there.add(name)
    for gone in _boards.keys() - there:
        # The board's file is gone. The entry goes too, so that the mapping ends with the last BoardEntry that refers to
        # it.
        del _boards[gone]


def _find(names: Iterable[bytes], posts: bool) -> Iterator[tuple[bytes, BoardEntry]]:
    """Yield tuples of name and entry, for the entries with these names on the boards of other processes.

    ``posts``: whether to search the posts; if False, events and imports.
    """
    with contextlib.suppress(OSError):
        _look()
    first, last = (ENTRIES, ENTRIES + POSTS) if posts else (0, ENTRIES)
    for path, board in _boards.items() if names else ():
        process, there = int(path.partition("-")[0]), board["name"][first:last]
        for name in names:
            wanted = digest(name)
            for at in np.flatnonzero(there == wanted).tolist():
                yield name, BoardEntry(board, first + at, wanted, process)


def events_of(name: bytes) -> list[BoardEntry]:
    """Return the entries of other processes for the event whose export data is ``name``."""
    return [found for _, found in _find((name,), posts=False)]


def importers(exported: bytes) -> list[int]:
    """Return the ids of the other live processes that have an open import of the allocation. ``exported``: its export
    data.
    """
    return sorted({one.process for one in events_of(exported + IMPORT) if alive(one.process)})


def posts_of(*names: bytes) -> list[tuple[bytes, Announced]]:
    """Return tuples of name and post, for the posts of other processes with these names.

    The name of posts about writes is the export data of the memory. Posts about reads have ``reads`` after it.
    """
    return [(name, _read(found)) for name, found in _find(names, posts=True)]


def post_of(name: bytes) -> Announced | None:
    """Return a post of another process with this name that is about all of the memory; None if there is none."""
    return next((one for _, one in posts_of(name) if one.part == (0, 0)), None)


def _read(found: BoardEntry) -> Announced:
    board, at = found.board, found.board[found.at]
    covers = [
        (BoardEntry(board, event % ENTRIES, bytes(board["name"][event % ENTRIES]), found.process), number)
        for event, number in at["covers"][: int(at["number"])].tolist()
    ]
    low, high = at["part"].tolist()
    return Announced(found, tuple(covers), (low, high))


# -- exports, imports and announcements ------------------------------------------------------------------------

_MOST_FREES = 64
"""Largest number of queued frees of imports that are followed. Beyond it, the oldest free counts as complete, with a
note.
"""
_MOST_POSTS = 64
"""Largest number of exports with unfinished work on the board that other processes read; also that of the kept uses of
one range. Beyond it, the oldest is dropped, with a note.
"""
_MOST_ANNOUNCEMENTS = 256
"""Largest number of announcements of complete memory (:meth:`Interprocess.share`) that are kept. Beyond it, the oldest
is dropped, with a note.
"""
_MOST_ACTORS = 4096
"""Number of actors at which the actors whose board entry is gone are removed."""


def _named(name: bytes, write: bool) -> bytes:
    """Return the name of the posts about writes to memory; with ``write=False``, of the posts about reads.

    ``name``: export data of the memory.
    """
    return name if write else name + b"reads"


@dataclass(eq=False, slots=True)
class _Use:
    """Use of a part of shared memory, with the event records that come after it."""

    low: int
    high: int
    write: bool
    number: int
    """Number of the actor (a stream) that used the memory."""
    time: int
    covers: list[tuple[int, int]] = field(default_factory=list)
    """Event records after the use, as tuples of the event's index on the board and the number of the record."""
    post: int | None = None
    """Index of the post that announces the use; None if it has no post."""

    def replaces(self, other: _Use) -> bool:
        """Whether an operation that is ordered after this use is always ordered after the use ``other`` too."""
        covers = self.low <= other.low and other.high <= self.high
        return covers and (self.write or (self.number == other.number and not other.write))


@dataclass(eq=False)
class Interprocess:
    """Exports and imports of this process, and the announcements about them to other processes."""

    _timeline: Timeline
    _addresses: AddressMap
    _values: WaitValues
    _events: dict[int, TrackedEvent]
    _judge: Judge
    exports: dict[bytes, Range] = field(default_factory=dict)
    """Memory that this process has exported, by export data."""
    names: dict[Range, bytes] = field(default_factory=dict)
    """Export data of each range that this process has exported or imported."""
    entries: dict[Range, int] = field(default_factory=dict)
    """For each open import: the index of its entry on the board."""
    leaving: dict[Range, TrackedStream] = field(default_factory=dict)
    """For each import that is freed in stream order: the stream of the free. An entry is kept until the host or another
    process may have waited for the free.
    """
    uses: dict[Range, list[_Use]] = field(default_factory=dict)
    """For each range: the uses that other processes may have to wait for."""
    events: dict[bytes, TrackedEvent] = field(default_factory=dict)
    """Exported and opened events, by export data."""
    posted: dict[int, tuple[bytes, Callable[[], bool]]] = field(default_factory=dict)
    """Posts about incomplete exports, by index on the board: tuples of name, and a function that returns whether the
    work is over.
    """
    announced: dict[bytes, Obstacle] = field(default_factory=dict)
    """For each name: the obstacle that ends with the work after which the memory is complete (latest call of
    :meth:`share`).
    """
    _settled: int = 0
    _actors: dict[BoardEntry, Actor] = field(default_factory=dict)
    """Actors that stand for the events and posts of other processes."""
    _room: int = _MOST_ACTORS
    """Number of actors at which actors without a board entry are removed next."""

    def __post_init__(self) -> None:
        self._untold = partial(self._timeline.notes.add, "told")
        """Function that adds the note that no other process can read an announcement: tables are full, or files cannot
        be made.
        """
        self.board: Board = Board(self._untold)
        """Announcements to other processes."""

    # -- exports and imports ---------------------------------------------------------------------------------

    def begins_import(self, range_: Range, exported: bytes) -> None:
        """Announce to other processes that this process has an import open. ``exported``: the import's export data. If
        the board is full or not writable, a note is added instead.
        """
        index = self.board.add_entry(exported + IMPORT)
        if index is not None:
            self.entries[range_] = index

    def import_ended(self, range_: Range) -> None:
        """Remove the entry of an import from the board, so that the exporter's checker allows the free of the memory.
        No effect if the import has no entry.
        """
        self.leaving.pop(range_, None)
        index = self.entries.pop(range_, None)
        if index is not None:
            self.board.drop_entry(index)

    def notifies(self, stream: TrackedStream) -> None:
        """Record that ``stream`` shows other processes the end of its queued work. The entries of imports whose free is
        part of this work are removed from the board.
        """
        for range_ in [one for one, on in self.leaving.items() if on is stream]:
            self.import_ended(range_)

    def close(self) -> None:
        """Remove all announcements of this process."""
        for range_ in tuple(self.entries):
            self.import_ended(range_)
        self.board.close()

    def freed(self, range_: Range, stream: TrackedStream | None = None) -> None:
        """Record a free of memory that may be exported or imported, and remove the posts of its uses. ``stream``: the
        stream of the free; None for a free by the host.

        The entry of an import that ``stream`` frees stays until the host or another process may have waited for the
        free.
        """
        if stream is None:
            self.import_ended(range_)
        elif range_ in self.entries:
            self.leaving[range_] = stream
            if len(self.leaving) > _MOST_FREES:
                self._untold()
                self.import_ended(next(iter(self.leaving)))
        if range_ in self.uses:
            self._keep(range_, [])
            del self.uses[range_]
        self.exports.pop(self.export_of(range_), None)
        self.names.pop(range_, None)

    def export_of(self, range_: Range) -> bytes:
        """Return the export data of the latest export of a range; empty if it was not exported."""
        name = self.names.get(range_, b"")
        return name if self.exports.get(name) is range_ else b""

    def check_importers(self, range_: Range, name: bytes, what: str, stack: Stack) -> None:
        """Report a free of memory that another process has open.

        ``name``: export data of the memory. ``what``: name of the freeing call.
        """
        having = importers(name) if name else []
        if having:
            what = f"{what} frees {range_}, but process {', '.join(map(str, having))} has not freed its import."
            remedy = "free it after every importer has freed its pointer and notified this process."
            self._judge.report("free before the importer's", what, remedy, range_, stack)

    def _missing(self, piece: Piece, clock: Clock) -> RecordedOperation | None:
        """Return an operation that ``clock`` lacks: the allocation of ``piece``, if it is known, or one of the latest
        writes to ``piece``. None if it lacks none.
        """
        range_, low, high = piece
        written, certain = range_.written(low, high), self._timeline.certain
        return next((one for one in written if not certain(clock, one.actor.number, one.time)), None)

    def export(self, range_: Range, stack: Stack, name: bytes = b"") -> None:
        """Check an export of memory whose work may not have ended. If no recorded interprocess event comes after the
        work, a hazard is reported. Otherwise importers can wait for these events, and the events are posted, if all of
        them get an entry on the board.

        ``stack``: place of the export in the program. ``name``: export data, by which other processes find the post;
        empty: nothing is posted.
        """
        piece = (range_, range_.base, range_.end)
        missing = self._missing(piece, self._timeline.host)
        if missing is None:
            return
        recorded = [(one, one.mark.clock) for one in self._events.values() if one.shared and one.mark]
        covers = [one for one, clock in recorded if clock is not None and self._missing(piece, clock) is None]
        if not covers:
            self._incomplete(range_, missing, stack)
        elif name:
            indices = [self.index(one) for one in covers]
            known = [one for one in indices if one is not None]
            if len(known) == len(indices):
                self._post(name, known, lambda: self._missing(piece, self._timeline.host) is None)

    def recorded(self, event: TrackedEvent) -> int:
        """Count a record of an event on the board. Returns the number of the record; 0 if the event has no entry on the
        board.
        """
        return 0 if event.index is None else self.board.record(event.index)

    def index(self, event: TrackedEvent) -> int | None:
        """Return the index of an event's entry on the board. If the event has no entry, one is added. None if the board
        is full or not writable.
        """
        if event.index is None:
            event.index = self.board.add_entry()
            if event.index is not None and event.mark is not None:
                number = self.board.record(event.index)
                if event.mark.clock is not None:
                    self.covers(event, event.mark.clock, number)
        return event.index

    def destroyed(self, event: TrackedEvent) -> None:
        """Remove an event from the board, unless another handle of the event is left."""
        if event in self._events.values():
            return
        self.events.pop(event.name, None)
        if event.index is not None:
            self.board.drop_entry(event.index)
            event.index = None

    def _post(self, name: bytes, covers: list[int], done: Callable[[], bool]) -> None:
        for index in [index for index, (known, _) in self.posted.items() if known == name]:
            self._remove_post(index)
        made = self.board.post(name, [(one, self.board.number(one)) for one in covers])
        if made is None:
            return
        self.posted.pop(made, None)
        self.posted[made] = (name, done)
        if len(self.posted) > _MOST_POSTS:
            self._untold()
            self._remove_post(next(iter(self.posted)))

    def _remove_post(self, index: int) -> None:
        del self.posted[index]
        self.board.remove_post(index)

    # -- uses after the export and the import ------------------------------------------------------------------

    def follow(self, range_: Range) -> None:
        """From now on, announce all uses of ``range_``, which is exported or imported, to other processes."""
        self.uses.setdefault(range_, [])

    def used(self, piece: Piece, actor: TrackedStream, write: bool) -> None:
        """Record a use by the stream ``actor`` of memory that other processes may have open. If another library can use
        the stream, a note is added instead. ``write``: whether the use writes.
        """
        range_, low, high = piece
        if actor in self._timeline.foreign:
            # Another library can use the stream, and may order this use by calls that the checker does not record.
            self._untold()
            return
        made = _Use(low - range_.base, high - range_.base, write, actor.number, actor.time)
        kept = [one for one in self.uses[range_] if not made.replaces(one)]
        if len(kept) >= _MOST_POSTS:
            self._untold()
        self._keep(range_, [*kept[-_MOST_POSTS + 1 :], made])
        self._announce(range_, made)

    def _keep(self, range_: Range, kept: list[_Use]) -> None:
        """Keep only the uses ``kept`` of a range, and remove the posts of other uses."""
        for one in self.uses[range_]:
            if one not in kept and one.post is not None:
                self.board.remove_post(one.post)
        self.uses[range_] = kept

    def _announce(self, range_: Range, one: _Use) -> None:
        name = self.names.get(range_)
        if name is not None:
            latest, part = one.covers[-COVERS:], (one.low, one.high)
            one.post = self.board.post(_named(name, one.write), latest, part, one.post)

    def covers(self, event: TrackedEvent, clock: Clock, number: int) -> None:
        """Announce that the record ``number`` of an event comes after the uses that ``clock`` contains. Do nothing if
        the event is not on the board.
        """
        index = event.index
        if index is None:
            return
        for range_, uses in self.uses.items():
            for one in uses:
                if clock.after(one.number, one.time):
                    one.covers = [it for it in one.covers if it[0] != index] + [(index, number)]
                    self._announce(range_, one)

    def drop_uses(self, is_over: Callable[[int, int], bool]) -> None:
        """Remove the uses for which ``is_over`` is True, and their posts: the host may have waited for these uses, or
        another process by a value in memory. ``is_over`` takes the number of the actor and the time of the use.
        """
        for range_, uses in self.uses.items():
            kept = [one for one in uses if not is_over(one.number, one.time)]
            if len(kept) < len(uses):
                self._keep(range_, kept)

    def refresh(self, range_: Range, write: bool) -> None:
        """Read the announcements of other processes about a range into :attr:`.Range.awaited`, before this process uses
        the range. ``write``: whether the use writes; a read need not wait for reads of other processes.
        """
        name = self.names.get(range_)
        if name is None:
            return
        found = []
        names = [_named(name, written) for written in ((True, False) if write else (True,))]
        for about, one in posts_of(*names):
            if one.part != (0, 0):
                low, high = (min(range_.base + at, range_.end) for at in one.part)
                found.append(self._contents(low, high, one, about == names[0]))
        range_.awaited = (*(one for one in range_.awaited if not one.step), *found)

    def _contents(self, low: int, high: int, found: Announced, written: bool = True) -> AwaitedPart:
        after = [(self._actor(entry).number, number) for entry, number in found.covers]
        whose = f"process {found.post.process}"
        remedy = f"an event that {whose} {'has recorded' if after else 'records after them'} (cuIpcOpenEventHandle)"
        # A third process may have waited for work of this process before it recorded the event.
        after += [(actor.number, 1) for one, actor in self._actors.items() if one.process != found.post.process]
        return AwaitedPart(low, high, after, lambda: found.over, whose, remedy, found.part != (0, 0), written)

    def update_announcements(self) -> None:
        """Remove the announcements of work that has ended by now."""
        for range_ in [one for one in self.leaving if one.ended is not None and self._may_be_known(one.ended)]:
            self.import_ended(range_)
        if self._settled != self._timeline.version:
            self._settled = self._timeline.version
            for index in [index for index, (_, done) in self.posted.items() if done()]:
                self._remove_post(index)
            self.drop_uses(self._timeline.may_be_known)

    def _may_be_known(self, operation: RecordedOperation) -> bool:
        """Whether the host or another process may have waited for ``operation``."""
        number, time = operation.actor.number, operation.time
        return self._timeline.published.after(number, time) or self._timeline.is_known(number, time)

    def awaited(self, range_: Range, name: bytes) -> None:
        """Record an import with the export data ``name``. Uses of the memory must wait for the events that the exporter
        has announced.
        """
        found = post_of(name)
        if found is not None and found.covers:
            range_.awaited = (self._contents(range_.base, range_.end, found),)
        self.names[range_] = name

    # -- announcements of the facade -------------------------------------------------------------------------

    def opened(self, stream: TrackedStream | None, address: int, nbytes: int, name: bytes, word: int) -> None:
        """Record that ``stream`` waits for the exporter's work (:meth:`share`) before it uses ``nbytes`` bytes of
        imported memory at ``address``. ``stream=None``: the host has waited.

        Until the exporter's announcement is over, uses of these bytes must come after a wait of this kind. ``name``:
        name of the announcement. ``word``: address of the 32-bit word for whose value the stream waits.
        """
        self._values.ignore(word)
        ours = self.announced.get(name)
        if ours is not None and stream is not None:
            self._timeline.wait(stream, ours)
        elif ours is not None:
            self._timeline.force_mark(ours)
            self._timeline.host_observes(ours.clock or Clock())
        found = post_of(name)
        if found is None:
            return
        ready, all_ready = self._ready(found.post), self._timeline.ready.known
        if stream is None:
            self._timeline.host_observes(Clock({ready: 1}))
            return
        whose, remedy = f"process {found.post.process}", f"{stream.name}, on which it was opened"
        self._timeline.submit(stream, lambda stream: stream.clock.learn(Clock({ready: 1})))
        for range_, low, high in self._addresses.pieces(address, nbytes):
            made = AwaitedPart(low, high, [(ready, 1)], lambda: found.over or ready not in all_ready, whose, remedy)
            if not any((one.low, one.high, one.after) == (low, high, made.after) for one in range_.awaited):
                range_.awaited = (*(one for one in range_.awaited if not one.over()), made)

    def share(self, stream: TrackedStream, address: int, nbytes: int, name: bytes, stack: Stack) -> None:
        """Announce, under ``name``, that memory is complete once the queued work of ``stream`` is done. Nothing is
        announced if the memory is complete now. A write that may end after this work is reported. ``stack``: place in
        the program.
        """
        pieces = self._addresses.pieces(address, nbytes)
        host = self._timeline.host
        if stream.obstacle is not None or any(self._missing(piece, host) for piece in pieces):
            mark = self.announced[name] = self._timeline.record(stream)
            if len(self.announced) > _MOST_ANNOUNCEMENTS:
                self._untold()
                del self.announced[next(iter(self.announced))]
            self._post(name, [], partial(self._timeline.may_be_seen, mark))

        def share(stream: TrackedStream) -> None:
            for piece in pieces:
                missing = self._missing(piece, stream.clock)
                if missing is not None:
                    self._incomplete(piece[0], missing, stack)
            self._timeline.published.learn(stream.clock)

        self._timeline.submit(stream, share)

    def _incomplete(self, range_: Range, missing: RecordedOperation, stack: Stack) -> None:
        by = missing.actor.name
        work = f"its {missing}" if missing is range_.born else missing
        what = f"{range_} is exported, but nothing lets importers wait for {work}."
        remedy = f"synchronise with {by} first, or record an interprocess event there that importers wait for."
        self._judge.report("export before completion", what, remedy, range_, stack, used=missing.stack)

    # -- recordings of other processes -----------------------------------------------------------------------

    def recorded_elsewhere(self, event: TrackedEvent) -> Clock | None:
        """Return the clock of the work that may precede a record of ``event`` by another process or library. None if
        only this process has the event.

        For an event of another library without a known record, the clock has all work so far, and a note is added.
        """
        if event.foreign and event.mark is None:
            self._timeline.notes.add("waits", "an event or a semaphore of another library")
            return self._timeline.everything()
        if not event.elsewhere:
            return None
        clock = self._timeline.published.copy()
        clock.learn(self._timeline.ready)
        for entry in events_of(event.name):
            if entry.number:
                clock.known[self._actor(entry).number] = entry.number
        return clock

    def _actor(self, entry: BoardEntry) -> Actor:
        """Return the actor of another process's event or post.

        The actor's time is the event's number of records, or 1 for a post.
        """
        found = self._actors.get(entry)
        if found is None:
            if len(self._actors) >= self._room:
                self._actors = {one: actor for one, actor in self._actors.items() if one.is_there}
                self._room = max(_MOST_ACTORS, 2 * len(self._actors))
            found = self._actors[entry] = self._timeline.thread(f"process {entry.process}")
        return found

    def _ready(self, post: BoardEntry) -> int:
        """Return the number of the actor that stands for ``post``, for which this process waits.

        If there are too many such actors, remove the oldest ones.
        """
        number, ready = self._actor(post).number, self._timeline.ready
        ready.known[number] = 1
        if len(ready.known) > 2 * _MOST_ANNOUNCEMENTS:
            self._untold()
            gone = set(list(ready.known)[:_MOST_ANNOUNCEMENTS])
            self._actors = {entry: actor for entry, actor in self._actors.items() if actor.number not in gone}
            self._timeline.forget(gone)
        return number


# -- open files ---------------------------------------------------------------------------------------------

T = TypeVar("T")
_KCMP = {"x86_64": 312, "aarch64": 272}.get(platform.machine())
_syscall = ctypes.CDLL(None).syscall
_EPOLL_TARGET = 7  # KCMP_EPOLL_TFD: compare a file with one in an epoll.
_SLOT = struct.Struct("<III")
_MOST_FILES = 256
"""Largest number of files in each of two tables: one for files with names, one for files without names."""


class OpenFiles(Generic[T]):
    """Table with a value for each open file. The table keeps no file open. A file that cannot be identified has no
    value.

    All handles that a real driver exports are files without names, which ``fstat`` cannot distinguish. An epoll refers
    to an open file without keeping it open, and ``kcmp`` compares a descriptor with a file in an epoll.
    """

    def __init__(self, notes: Notes | None = None) -> None:
        self._notes = Notes() if notes is None else notes
        self._by_inode: dict[tuple[int, int], T] = {}
        self._epoll: select.epoll | None = None
        self._noted: dict[int, T | None] = {}
        """Value by descriptor number; None if several open files had this number."""

    def find(self, number: int) -> T | None:
        """Return the value of the open file with the descriptor ``number``; None if it has none."""
        key = _inode(number)
        if key is not None:
            return self._by_inode.get(key)
        return next((one for noted, one in self._noted.items() if one is not None and self._is(number, noted)), None)

    def note(self, number: int, thing: T) -> None:
        """Set the value of the open file with the descriptor ``number``. Adds a note if a later import of the file may
        not be recognised, or if the table is full and the oldest file is removed.
        """
        key = _inode(number)
        if key is not None:
            self._by_inode.pop(key, None)
            self._by_inode[key] = thing
            if len(self._by_inode) > _MOST_FILES:
                self._notes.add("imports")
                del self._by_inode[next(iter(self._by_inode))]
            return
        try:
            if self._epoll is None:
                self._epoll = select.epoll()
            # If true, another open file is in the epoll under the same descriptor number.
            taken = number in self._noted and f"tfd: {number:8d}" in self._targets()
            self._epoll.register(number, 0)
            self._noted.pop(number, None)
            self._noted[number] = None if taken else thing
            if len(self._noted) > _MOST_FILES or taken or _KCMP is None:
                self._notes.add("imports")
            if len(self._noted) > _MOST_FILES:
                del self._noted[next(iter(self._noted))]
        except (OSError, ValueError):
            self._notes.add("imports")

    def close(self) -> None:
        """Remove all files without names, and close the epoll. Files with names stay."""
        self._noted.clear()
        if self._epoll is not None:
            self._epoll.close()
            self._epoll = None

    def _targets(self) -> str:
        with open(f"/proc/self/fdinfo/{-1 if self._epoll is None else self._epoll.fileno()}") as file:
            return file.read()

    def _is(self, number: int, noted: int) -> bool:
        if _KCMP is None or self._epoll is None:
            return False
        slot = ctypes.create_string_buffer(_SLOT.pack(self._epoll.fileno(), noted, 0), _SLOT.size)
        process = os.getpid()
        call = (_KCMP, process, process, _EPOLL_TARGET, number)
        answer = _syscall(*map(ctypes.c_long, call), ctypes.c_void_p(ctypes.addressof(slot)))
        return bool(answer == 0)


def _inode(number: int) -> tuple[int, int] | None:
    """Return a tuple of ``st_dev`` and inode number for a regular file; None for other files."""
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None
