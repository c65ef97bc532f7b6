"""A trace: which memory a run allocated and freed, when, on which streams; and the file that it is kept in.

The file has a JSON value in each line. The first line is an object that names format and version, says where the trace
comes from, and counts what the recording had beyond what can be replayed. Each other line is an event::

    {"format": "streamalloc trace", "version": 1, "source": "RMM log", "skipped": {"failed allocations": 1}}
    ["allocate", 0, 4096, 0, 0, 1500]
    ["free", 0, 4096, 1, 0, 2750]

The fields of an event are those of :class:`Event`. A file whose name ends in ``.gz`` is compressed.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeAlias

from streamalloc.core.internal import size_text

__all__ = ["FORMAT", "Action", "Event", "Trace", "TraceFormatError", "content", "opened", "read_trace", "text_lines"]

FORMAT = "streamalloc trace"
VERSION = 1
# An event as JSON: action and numbers need no escapes.
_LINE = '["%s", %d, %d, %d, %d, %d]\n'
_LEVEL = 6
_GZIP = b"\x1f\x8b"
# The most bytes of a line of text, and of a compressed file's content for each of its own, and beyond that.
_LONGEST = 1 << 20
_RATIO = 200
_BEYOND = 1 << 22
# What the driver takes: sizes and handles have 64 bits, and nothing has half of that.
_MOST = (1 << 63) - 1

Action: TypeAlias = Literal["allocate", "free"]


class TraceFormatError(ValueError):
    """A file is no trace, or not one that can be replayed; the message names the line."""

    def __init__(self, why: str, file: str = "", line: int | None = None) -> None:
        at = f"line {line}" if line is not None else ""
        place = ", ".join(filter(None, (file, at)))
        super().__init__(f"{place}: {why}" if place else why)
        self.line: int | None = line
        """The line of the file, or the number of the entry where it has no lines; from 1."""


class Event(NamedTuple):
    """One allocation or free. Streams, threads and allocations are numbered from 0 as they first appear."""

    action: Action
    id: int
    """Which allocation; no number is used twice in a trace."""
    nbytes: int
    """Its size as it was asked for; a free repeats it."""
    stream: int
    """The stream that orders it. A free may be on another one than its allocation."""
    thread: int
    """The thread of the host that made the call."""
    time: int
    """Nanoseconds since the recording began, as far as it knows."""


@dataclass(frozen=True)
class Trace:
    """The allocations and frees of a run, in the order in which they were made.

    Parameters
    ----------
    events
        All of them.
    source
        Where they come from, in words.
    skipped
        What the recording had beyond them, by kind and number: allocations that failed, frees of memory that was
        allocated before it began.

    Raises
    ------
    ValueError
        The events are not those of a run: memory is freed twice, or was never allocated.
    """

    events: tuple[Event, ...]
    source: str = ""
    skipped: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rules = _Rules()
        for number, event in enumerate(self.events):
            try:
                rules.take(event)
            except ValueError as error:
                raise ValueError(f"event {number}: {error}") from None

    @property
    def allocations(self) -> int:
        """How many allocations there are."""
        return sum(event.action == "allocate" for event in self.events)

    @property
    def streams(self) -> int:
        """How many streams it needs."""
        return 1 + max((event.stream for event in self.events), default=-1)

    @property
    def threads(self) -> int:
        """How many threads made the calls."""
        return len({event.thread for event in self.events})

    @property
    def peak(self) -> int:
        """The most bytes that are allocated at once, in requested sizes."""
        now = most = 0
        for event in self.events:
            now += event.nbytes if event.action == "allocate" else -event.nbytes
            most = max(most, now)
        return most

    @property
    def seconds(self) -> float:
        """How long the recording took."""
        return (self.events[-1].time - self.events[0].time) / 1e9 if self.events else 0.0

    def save(self, path: str | Path) -> None:
        """Write it to a file; compressed where the name ends in ``.gz``. Equal traces make equal files."""
        path = Path(path)
        header = {"format": FORMAT, "version": VERSION, "source": self.source, "skipped": dict(self.skipped)}
        lines = [json.dumps(header) + "\n", *(_LINE % event for event in self.events)]
        content = "".join(lines).encode("ascii")
        # A compressed file would have the time in it.
        path.write_bytes(gzip.compress(content, _LEVEL, mtime=0) if path.suffix == ".gz" else content)

    def __repr__(self) -> str:
        peak = size_text(self.peak)
        return f"<Trace of {len(self.events):,} events on {self.streams} streams, at most {peak} at once>"


class _Rules:
    """What makes events a trace; they are shown to it one after the other."""

    def __init__(self) -> None:
        self._alive: dict[int, int] = {}
        self._seen: set[int] = set()

    def take(self, event: Event) -> None:
        action, number, nbytes, *_ = event
        if action not in ("allocate", "free"):
            raise ValueError(f"action {action!r}: allowed are 'allocate' and 'free'")
        for value in event[1:]:
            if type(value) is not int or not 0 <= value <= _MOST:
                name = event._fields[1 + [value is one for one in event[1:]].index(True)]
                raise ValueError(f"{name}={value!r}: it has to be an integer from 0 to 2**63 - 1")
        if action == "allocate":
            if number in self._seen:
                raise ValueError(f"allocation {number} was made before")
            self._seen.add(number)
            self._alive[number] = nbytes
            return
        allocated = self._alive.pop(number, None)
        if allocated is None:
            known = number in self._seen
            raise ValueError(f"allocation {number} {'was freed before' if known else 'is unknown'}")
        if nbytes != allocated:
            raise ValueError(f"a free of {nbytes} bytes, but allocation {number} has {allocated}")


def _event_of(value: Any) -> Event:
    """The event that a line of a file says; ``ValueError`` where it is none."""
    if type(value) is not list or len(value) != len(Event._fields):
        raise ValueError(f"an event is a list of {', '.join(Event._fields)}")
    return Event(*value)


def read_trace(lines: Iterable[str], file: str = "") -> Trace:
    """A trace from the lines of its file, the header first."""
    numbered = enumerate(lines, 1)
    header = _header(next(numbered, (1, ""))[1], file)
    rules, events = _Rules(), []
    for number, line in numbered:
        try:
            event = _event_of(json.loads(line))
            rules.take(event)
        except (ValueError, RecursionError) as error:
            raise TraceFormatError(str(error), file, number) from None
        events.append(event)
    return _unchecked(tuple(events), header["source"], header["skipped"])


def _unchecked(events: tuple[Event, ...], source: str, skipped: dict[str, int]) -> Trace:
    """A trace whose events were looked at one by one."""
    trace = Trace.__new__(Trace)
    vars(trace).update(events=events, source=source, skipped=skipped)
    return trace


def _header(line: str, file: str) -> dict[str, Any]:
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if type(header) is not dict or header.get("format") != FORMAT:
        raise TraceFormatError(f'this is no trace: the first line has to be {{"format": "{FORMAT}", ...}}', file, 1)
    if header.get("version") != VERSION:
        raise TraceFormatError(f"version {header.get('version')!r}: only version {VERSION} is known here", file, 1)
    source, skipped = header.get("source", ""), header.get("skipped", {})
    numbers = type(skipped) is dict and all(type(value) is int and value >= 0 for value in skipped.values())
    if type(source) is not str or not numbers:
        raise TraceFormatError("'source' has to be text, and 'skipped' an object of numbers", file, 1)
    return {"source": source, "skipped": skipped}


def opened(path: str | Path) -> IO[bytes]:
    """A file, decompressed where it is compressed, whatever its name."""
    with open(path, "rb") as file:
        compressed = file.read(2) == _GZIP
    return io.BufferedReader(gzip.open(path)) if compressed else open(path, "rb")


def content(file: IO[bytes], name: str) -> bytes:
    """All of a file from :func:`opened`; one that is compressed more than traces are is refused."""
    compressed = isinstance(getattr(file, "raw", None), gzip.GzipFile)
    most = os.fstat(file.fileno()).st_size * _RATIO + _BEYOND if compressed else None
    pieces, length = [], 0
    try:
        while piece := file.read(_LONGEST):
            pieces.append(piece)
            length += len(piece)
            if most is not None and length > most:
                raise TraceFormatError(f"the compressed file has more than {_RATIO} times its size in it", name)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceFormatError(f"the compressed file is damaged: {error}", name) from None
    return b"".join(pieces)


def text_lines(file: IO[bytes], name: str) -> Iterator[str]:
    """The lines of a text file; what is no text is refused with its line, and so is a line longer than 1 MiB."""
    number = 0
    try:
        while line := file.readline(_LONGEST + 1):
            number += 1
            if len(line) > _LONGEST:
                raise TraceFormatError(f"the line is longer than {size_text(_LONGEST)}", name, number)
            yield line.decode("utf-8")
    except UnicodeDecodeError:
        raise TraceFormatError("this is no text", name, number) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceFormatError(f"the compressed file is damaged: {error}", name, number + 1) from None
