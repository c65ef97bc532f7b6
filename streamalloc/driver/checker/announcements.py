"""Announcements of a process to the checkers of other processes about memory that it exports while work is under way.

Each process that announces something has a *board*: a file of fixed entries that all checkers of a user can read. An
entry holds either an exported *event*, with the number of its recordings, or a *post*: an export that is not complete,
or a part of exported memory that was written since.

A post names the recordings that an importer may wait for. It is removed once the host of the exporter has waited for
the work: the host may then notify importers in ways that no checker sees.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import secrets
import struct
import weakref
from pathlib import Path
from typing import NamedTuple

from streamalloc.driver.checker.open_imports import alive, directory

__all__ = ["Announced", "Board", "Entry", "event_of", "post_of", "posts_of"]

EVENTS, POSTS = 256, 768
"""Entries of a board for events, and for posts."""
COVERS = 4
"""Recordings that a post names at most."""
# Name; recordings of an event, or number of recordings that a post names; part of the memory (0, 0 for all); indices of
# the events and numbers of their recordings.
_ENTRY = struct.Struct(f"<16s3Q{COVERS}I{COVERS}Q")
_BYTES = _ENTRY.size * (EVENTS + POSTS)
_NAME = 16
_EMPTY = bytes(_ENTRY.size)


def _digest(name: bytes) -> bytes:
    return hashlib.sha256(name).digest()[:_NAME]


class Entry(NamedTuple):
    """An entry of the board of another process."""

    board: mmap.mmap
    at: int
    name: bytes
    process: int

    @property
    def number(self) -> int:
        """Recordings of the event; 0 where the entry belongs to another event by now."""
        name, number = struct.unpack_from("<16sQ", self.board, self.at)
        return int(number) if name == self.name else 0


class Board:
    """The announcements of this process."""

    def __init__(self) -> None:
        self._path = _folder() / f"{os.getpid()}-{secrets.token_hex(4)}"
        with open(self._path, "xb+") as file:
            file.truncate(_BYTES)
            self._bytes = mmap.mmap(file.fileno(), _BYTES)
        self._free = list(reversed(range(EVENTS)))
        self._posts = 0
        weakref.finalize(self, _unlink, self._path, os.getpid())

    def add_event(self) -> int | None:
        """The index of a new event; None where the board is full."""
        return self._free.pop() if self._free else None

    def drop_event(self, index: int) -> None:
        """Remove the name of a destroyed event; the next event at this index counts on from its number."""
        self._bytes[index * _ENTRY.size : index * _ENTRY.size + _NAME] = bytes(_NAME)
        self._free.insert(0, index)

    def name_event(self, index: int, name: bytes) -> None:
        """Set the name by which other processes find an event."""
        at = index * _ENTRY.size
        self._bytes[at : at + _NAME] = _digest(name)

    def record(self, index: int) -> int:
        """Count a recording of an event; its number."""
        number = self.number(index) + 1
        struct.pack_into("<Q", self._bytes, index * _ENTRY.size + _NAME, number)
        return number

    def number(self, index: int) -> int:
        """The number of recordings of an event."""
        return int(struct.unpack_from("<Q", self._bytes, index * _ENTRY.size + _NAME)[0])

    def post(
        self, name: bytes, covers: list[tuple[int, int]], part: tuple[int, int] = (0, 0), index: int | None = None
    ) -> int:
        """Post that memory is not complete, with the event recordings that come after the work; its index.

        ``index`` is that of an earlier post, which this one replaces.
        """
        if index is None:
            index = EVENTS + self._posts % POSTS
            self._posts += 1
        at = index * _ENTRY.size
        covers = covers[:COVERS]
        rest = [0] * (COVERS - len(covers))
        events, numbers = [one for one, _ in covers], [number for _, number in covers]
        self._bytes[at : at + _NAME] = bytes(_NAME)
        form = f"<3Q{COVERS}I{COVERS}Q"
        struct.pack_into(form, self._bytes, at + _NAME, len(covers), *part, *events, *rest, *numbers, *rest)
        # The name comes last: readers find the post by it.
        self._bytes[at : at + _NAME] = _digest(name)
        return index

    def remove_post(self, index: int) -> None:
        """Remove a post."""
        self._bytes[index * _ENTRY.size : (index + 1) * _ENTRY.size] = _EMPTY

    def close(self) -> None:
        """Remove the board."""
        _unlink(self._path, os.getpid())


def _unlink(path: Path, process: int) -> None:
    # A forked child has the objects of its parent.
    if process == os.getpid():
        with contextlib.suppress(OSError):
            path.unlink()


class Announced(NamedTuple):
    """A post of another process, as this process reads it."""

    post: Entry
    covers: tuple[tuple[Entry, int], ...]
    """Recordings, of which one must be waited for; none where the facade waits for a value."""
    part: tuple[int, int] = (0, 0)
    """Offsets of the written part; both 0 for all of the memory."""

    @property
    def over(self) -> bool:
        """Whether the exporter has removed the post or has ended."""
        name = self.post.board[self.post.at : self.post.at + _NAME]
        return bytes(name) != self.post.name or not alive(self.post.process)


_boards: dict[str, mmap.mmap] = {}
"""Boards of other processes by file name."""


def _folder() -> Path:
    found = directory() / "boards"
    found.mkdir(mode=0o700, exist_ok=True)
    return found


def _look() -> None:
    """Map the boards of all processes; remove those of processes that have ended."""
    there = set()
    for path in _folder().iterdir():
        process = path.name.partition("-")[0]
        if process == str(os.getpid()):
            continue
        with contextlib.suppress(OSError, ValueError):
            if not alive(int(process)):
                path.unlink()
            elif path.name in _boards or path.stat().st_size == _BYTES:
                if path.name not in _boards:
                    with open(path, "rb") as file:
                        _boards[path.name] = mmap.mmap(file.fileno(), _BYTES, access=mmap.ACCESS_READ)
                there.add(path.name)
    for gone in _boards.keys() - there:
        # An entry may still refer to the mapping, which lives as long.
        del _boards[gone]


def _find(name: bytes, first: int, count: int) -> list[Entry]:
    with contextlib.suppress(OSError):
        _look()
    wanted, found = _digest(name), []
    for path, board in _boards.items():
        start, end = first * _ENTRY.size, (first + count) * _ENTRY.size
        while (at := board.find(wanted, start, end)) >= 0:
            start = at + 1
            if at % _ENTRY.size == 0:
                found.append(Entry(board, at, wanted, int(path.partition("-")[0])))
    return found


def event_of(name: bytes) -> Entry | None:
    """The entry of another process's event, by its export data."""
    return next(iter(_find(name, 0, EVENTS)), None)


def posts_of(name: bytes) -> list[Announced]:
    """The posts about memory of other processes, by its export data."""
    return [_read(found) for found in _find(name, EVENTS, POSTS)]


def post_of(name: bytes) -> Announced | None:
    """The post about all of the memory; None where there is none."""
    return next((one for one in posts_of(name) if one.part == (0, 0)), None)


def _read(found: Entry) -> Announced:
    _, count, low, high, *rest = _ENTRY.unpack_from(found.board, found.at)
    covers = []
    for index, number in zip(rest[:COVERS], rest[COVERS:], strict=True):
        at = min(index, EVENTS - 1) * _ENTRY.size
        covers.append((Entry(found.board, at, bytes(found.board[at : at + _NAME]), found.process), number))
    return Announced(found, tuple(covers[: min(count, COVERS)]), (low, high))
