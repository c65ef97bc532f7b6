"""Announcements between the checkers of several processes: open imports, and work on exported memory that is not
complete. All checkers of a user share one directory.

Each announcing process has a *board*: a file of fixed entries that all checkers of a user can read. The next reader
removes the boards of ended processes. An entry is an *event*, with the number of its recordings, an open *import* of an
allocation, or a *post*. A post announces an export that is not complete, or a later use of a part of shared memory by
the exporter or an importer.

A post names the event recordings that other processes may wait for. It is removed once the host has waited for the
work, because the host may then notify others in ways that no checker sees. It is also removed when a stream writes a
value after the work.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from streamalloc.driver.processes import alive


def _path() -> str:
    return os.path.join(tempfile.gettempdir(), f"streamalloc-checker-{os.getuid()}")


def digest(exported: bytes) -> bytes:
    """A name of 32 characters for export data."""
    return hashlib.sha256(exported).hexdigest()[:32].encode()


ENTRIES, POSTS = 1024, 768
"""Entries of a board for events and imports, and for posts."""
IMPORT = b"import"
"""End of the name of an import, after the export data."""
COVERS = 4
"""Recordings that a post names at most."""
_ENTRY = np.dtype([("name", "S32"), ("number", "u8"), ("part", "u8", 2), ("covers", "u8", (COVERS, 2))])
"""Name; recordings of an event, or number of recordings that a post names; offsets of the part of the memory (0, 0 for
all); index of an event and its number of recordings, for each recording that a post names.
"""


@dataclass(frozen=True)
class BoardEntry:
    """An entry of the board of another process."""

    board: Any = field(compare=False)
    at: int
    name: bytes
    process: int

    @property
    def is_there(self) -> bool:
        """Whether the entry still has its name."""
        return bool(self.board["name"][self.at] == self.name)

    @property
    def number(self) -> int:
        """Recordings of the event; 0 if the entry now belongs to another event."""
        return int(self.board["number"][self.at]) if self.is_there else 0


class Board:
    """The announcements of this process. Its file is made by the first :meth:`is_open`."""

    def __init__(self, on_full: Callable[[], object] = int) -> None:
        self._on_full = on_full
        """Called if a post replaces one that is not complete."""
        self._entries: Any = None
        self._free = list(reversed(range(ENTRIES)))
        self._posts = 0
        self.close: Callable[[], object] = bool
        """Removes the board."""

    def is_open(self) -> bool:
        """Whether other processes can read the board; False if the directory is not writable."""
        if self._entries is None:
            with contextlib.suppress(OSError):
                folder = Path(_path())
                folder.mkdir(mode=0o700, exist_ok=True)
                path = folder / f"{os.getpid()}-{secrets.token_hex(4)}"
                self._entries = np.asarray(np.memmap(path, _ENTRY, "w+", shape=ENTRIES + POSTS))
                self.close = weakref.finalize(self, _unlink, path, os.getpid())
        return self._entries is not None

    def add_entry(self) -> int | None:
        """Return the index of a new event or import; None if the board is full."""
        return self._free.pop() if self._free else None

    def drop_entry(self, index: int) -> None:
        """Remove an event or import. The next event at this index continues the number of recordings."""
        self._entries["name"][index] = b""
        self._free.insert(0, index)

    def name_entry(self, index: int, name: bytes) -> None:
        """Set the name by which other processes look up an event or import."""
        self._entries["name"][index] = digest(name)

    def record(self, index: int) -> int:
        """Count a recording of an event; its number."""
        self._entries["number"][index] += 1
        return self.number(index)

    def number(self, index: int) -> int:
        """The number of recordings of an event."""
        return int(self._entries["number"][index])

    def post(
        self, name: bytes, covers: list[tuple[int, int]], part: tuple[int, int] = (0, 0), index: int | None = None
    ) -> int:
        """Post that memory is not complete, with the event recordings that come after the work. Returns the post's
        index.

        ``index``: index of an earlier post to replace.
        """
        if index is None:
            index = ENTRIES + self._posts % POSTS
            self._posts += 1
            if self._entries["name"][index]:
                self._on_full()
        entry = self._entries[index]
        entry["name"] = b""
        entry["number"], entry["part"] = min(len(covers), COVERS), part
        entry["covers"][: len(covers)] = np.reshape(covers[:COVERS], (-1, 2))
        # Write the name last, because readers look for it.
        entry["name"] = digest(name)
        return index

    def remove_post(self, index: int) -> None:
        """Remove a post."""
        self._entries["name"][index] = b""


def _unlink(path: Path, process: int) -> None:
    # A forked child has the objects of its parent.
    if process == os.getpid():
        with contextlib.suppress(OSError):
            path.unlink()


class Announced(NamedTuple):
    """A post of another process, as read by this process."""

    post: BoardEntry
    covers: tuple[tuple[BoardEntry, int], ...]
    """Recordings of which one must be waited for; none for values."""
    part: tuple[int, int] = (0, 0)
    """Offsets of the written part; both 0 for all memory."""

    @property
    def over(self) -> bool:
        """Whether the exporter has removed the post or has ended."""
        return not (self.post.is_there and alive(self.post.process))


_boards: dict[str, Any] = {}
"""Boards of other processes by file name."""


def _look() -> None:
    """Map the boards of other live processes, and remove those of ended processes."""
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
        # An entry may still refer to the mapping, and keeps it alive.
        del _boards[gone]


def _find(names: Iterable[bytes], posts: bool) -> Iterator[tuple[bytes, BoardEntry]]:
    """Yield the entries with these names on the boards of other processes."""
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
    """Entries of other processes for an event, found by its export data."""
    return [found for _, found in _find((name,), posts=False)]


def importers(exported: bytes) -> list[int]:
    """The other processes that have an import of this export data."""
    return sorted({one.process for one in events_of(exported + IMPORT) if alive(one.process)})


def posts_of(*names: bytes) -> list[tuple[bytes, Announced]]:
    """Posts of other processes with these names. A name is export data, or derived from it."""
    return [(name, _read(found)) for name, found in _find(names, posts=True)]


def post_of(name: bytes) -> Announced | None:
    """The post about the whole memory; None if there is none."""
    return next((one for _, one in posts_of(name) if one.part == (0, 0)), None)


def _read(found: BoardEntry) -> Announced:
    board, at = found.board, found.board[found.at]
    covers = [
        (BoardEntry(board, event % ENTRIES, bytes(board["name"][event % ENTRIES]), found.process), number)
        for event, number in at["covers"][: int(at["number"])].tolist()
    ]
    low, high = at["part"].tolist()
    return Announced(found, tuple(covers), (low, high))
