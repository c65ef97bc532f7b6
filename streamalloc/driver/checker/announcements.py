"""What a process tells the checkers of others about memory that it exports while work on it is under way.

Each process that has something to tell has a *board*, a file that all checkers of a user can read, with places of two
kinds: those of *events* that were exported, with a number that counts up at each recording, and *posts*, one for each
export that was not complete, and for each part of exported memory that was written since.

A post says which recordings an importer may wait for; it is taken back once the host of
the exporter knows the work to be done, as that may then have told importers in ways that nobody sees.
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

from streamalloc.driver.checker.open_imports import folder

__all__ = ["Awaited", "Board", "Place", "event_of", "post_of", "posts_of"]

EVENTS, POSTS = 256, 768
COVERS = 4
"""How many recordings a post names."""
# A name; of an event how often it was recorded, of a post how many recordings it names; the part of the memory that was
# written, none where it is the whole; places and numbers of these recordings.
_PLACE = struct.Struct(f"<16s3Q{COVERS}I{COVERS}Q")
_BYTES = _PLACE.size * (EVENTS + POSTS)
_NAME = 16
_EMPTY = bytes(_PLACE.size)


def _digest(name: bytes) -> bytes:
    return hashlib.sha256(name).digest()[:_NAME]


class Place(NamedTuple):
    """A place on the board of another process."""

    board: mmap.mmap
    at: int
    name: bytes
    process: int

    @property
    def number(self) -> int:
        """How often the event here was recorded; 0 where the place has gone to others."""
        name, number = struct.unpack_from("<16sQ", self.board, self.at)
        return int(number) if name == self.name else 0


class Board:
    """What this process tells others."""

    def __init__(self) -> None:
        self._path = _folder() / f"{os.getpid()}-{secrets.token_hex(4)}"
        with open(self._path, "xb+") as file:
            file.truncate(_BYTES)
            self._bytes = mmap.mmap(file.fileno(), _BYTES)
        self._free = list(reversed(range(EVENTS)))
        self._posts = 0
        weakref.finalize(self, _remove, self._path, os.getpid())

    def add_event(self) -> int | None:
        """A place for an event; None where there is none left."""
        return self._free.pop() if self._free else None

    def drop_event(self, place: int) -> None:
        """An event is destroyed: nobody finds it any more. Its number goes on with the next."""
        self._bytes[place * _PLACE.size : place * _PLACE.size + _NAME] = bytes(_NAME)
        self._free.insert(0, place)

    def name_event(self, place: int, name: bytes) -> None:
        """Say what others know an event by."""
        at = place * _PLACE.size
        self._bytes[at : at + _NAME] = _digest(name)

    def record(self, place: int) -> int:
        """An event is recorded; the number of that."""
        number = self.number(place) + 1
        struct.pack_into("<Q", self._bytes, place * _PLACE.size + _NAME, number)
        return number

    def number(self, place: int) -> int:
        """How often an event was recorded."""
        return int(struct.unpack_from("<Q", self._bytes, place * _PLACE.size + _NAME)[0])

    def post(
        self, name: bytes, covers: list[tuple[int, int]], part: tuple[int, int] = (0, 0), at_place: int | None = None
    ) -> int:
        """Say that memory is not complete, and of which events which recordings come after; its place.

        ``at_place``: that of an earlier post, which it replaces.
        """
        place = EVENTS + self._posts % POSTS if at_place is None else at_place
        self._posts += at_place is None
        at = place * _PLACE.size
        covers = covers[:COVERS]
        rest = [0] * (COVERS - len(covers))
        places, numbers = [one for one, _ in covers], [number for _, number in covers]
        self._bytes[at : at + _NAME] = bytes(_NAME)
        form = f"<3Q{COVERS}I{COVERS}Q"
        struct.pack_into(form, self._bytes, at + _NAME, len(covers), *part, *places, *rest, *numbers, *rest)
        # The name at the end, by which the post is found.
        self._bytes[at : at + _NAME] = _digest(name)
        return place

    def take_back(self, place: int) -> None:
        """An export is complete."""
        self._bytes[place * _PLACE.size : (place + 1) * _PLACE.size] = _EMPTY

    def close(self) -> None:
        """Nothing is told any more."""
        _remove(self._path, os.getpid())


def _remove(path: Path, process: int) -> None:
    # A forked child has the objects of its parent.
    if process == os.getpid():
        with contextlib.suppress(OSError):
            path.unlink()


class Awaited(NamedTuple):
    """An import whose contents may not be there yet."""

    post: Place
    covers: tuple[tuple[Place, int], ...]
    """The recordings of which one has to be waited for; none where the library waits for a word."""
    part: tuple[int, int] = (0, 0)
    """The offsets of what was written; both 0 where it is all."""

    @property
    def over(self) -> bool:
        """Whether the exporter has said that it is complete, or is gone."""
        name = self.post.board[self.post.at : self.post.at + _NAME]
        return bytes(name) != self.post.name or not Path(f"/proc/{self.post.process}").exists()


_boards: dict[str, mmap.mmap] = {}
"""The boards of others, by the names of their files."""


def _folder() -> Path:
    found = folder() / "boards"
    found.mkdir(mode=0o700, exist_ok=True)
    return found


def _look() -> None:
    """See whose boards there are; those of processes that have ended are removed."""
    there = set()
    for path in _folder().iterdir():
        process = path.name.partition("-")[0]
        if process == str(os.getpid()):
            continue
        with contextlib.suppress(OSError, ValueError):
            if not Path(f"/proc/{process}").exists():
                path.unlink()
            elif path.name in _boards or path.stat().st_size == _BYTES:
                if path.name not in _boards:
                    with open(path, "rb") as file:
                        _boards[path.name] = mmap.mmap(file.fileno(), _BYTES, access=mmap.ACCESS_READ)
                there.add(path.name)
    for gone in _boards.keys() - there:
        # Places of it may still be looked at.
        del _boards[gone]


def _find(name: bytes, first: int, count: int) -> list[Place]:
    with contextlib.suppress(OSError):
        _look()
    wanted, found = _digest(name), []
    for path, board in _boards.items():
        start, end = first * _PLACE.size, (first + count) * _PLACE.size
        while (at := board.find(wanted, start, end)) >= 0:
            start = at + 1
            if at % _PLACE.size == 0:
                found.append(Place(board, at, wanted, int(path.partition("-")[0])))
    return found


def event_of(name: bytes) -> Place | None:
    """The place of another process's event, by what it was exported as."""
    return next(iter(_find(name, 0, EVENTS)), None)


def posts_of(name: bytes) -> list[Awaited]:
    """What has to be waited for before memory of another process is used."""
    return [_read(found) for found in _find(name, EVENTS, POSTS)]


def post_of(name: bytes) -> Awaited | None:
    """The same of all of the memory; None where nothing is known of that."""
    return next((one for one in posts_of(name) if one.part == (0, 0)), None)


def _read(found: Place) -> Awaited:
    _, count, low, high, *rest = _PLACE.unpack_from(found.board, found.at)
    covers = []
    for place, number in zip(rest[:COVERS], rest[COVERS:], strict=True):
        at = min(place, EVENTS - 1) * _PLACE.size
        covers.append((Place(found.board, at, bytes(found.board[at : at + _NAME]), found.process), number))
    return Awaited(found, tuple(covers[: min(count, COVERS)]), (low, high))
