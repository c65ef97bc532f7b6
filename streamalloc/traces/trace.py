"""Traces of allocations and frees, and their file format.

The file has one JSON value in each line. The first line is an object with the format, its version, the source of the
trace, and the number of recorded calls that cannot be replayed. Each other line is an event::

    {"format": "streamalloc trace", "version": 1, "source": "RMM log", "skipped": {"failed allocations": 1}}
    ["allocate", 0, 4096, 0, 0, 1500]
    ["free", 0, 4096, 1, 0, 2750]

The fields of an event are those of :class:`Event`. A file whose name ends in ``.gz`` is compressed.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeAlias

from streamalloc.core.errors import size_text

FORMAT = "streamalloc trace"
VERSION = 1
# JSON of an event; its action and numbers need no escapes.
_LINE = '["%s", %d, %d, %d, %d, %d]\n'
_LEVEL = 6
_GZIP = b"\x1f\x8b"
_LONGEST = 1 << 20  # bytes of a line of text
# A compressed file may contain 200 times its own bytes, and 4 MiB more.
_RATIO = 200
_BEYOND = 1 << 22
_MOST = (1 << 63) - 1  # largest size, number or time of an event

Action: TypeAlias = Literal["allocate", "free"]


class TraceFormatError(ValueError):
    """A file is no trace, or cannot be replayed; the message names the line.

    :func:`load` raises it.
    """

    def __init__(self, why: str, file: str = "", line: int | None = None) -> None:
        at = f"line {line}" if line is not None else ""
        where = ", ".join(filter(None, (file, at)))
        super().__init__(f"{where}: {why}" if where else why)
        self.line: int | None = line
        """Line of the file from 1, or number of the entry."""


class Event(NamedTuple):
    """One allocation or free. Streams, threads and allocations are numbered from 0 in order of appearance.

    The field ``events`` of :class:`Trace`.
    """

    action: Action
    """``"allocate"`` or ``"free"``."""
    id: int
    """Number of the allocation, unique in a trace."""
    nbytes: int
    """Bytes, as requested; a free repeats them."""
    stream: int
    """Number of the stream; a free may use another stream than its allocation."""
    thread: int
    """Number of the host thread that made the call."""
    time: int
    """Nanoseconds since the recording began."""


@dataclass(frozen=True)
class Trace:
    """The allocations and frees of a run, in the order in which they were made.

    :func:`load`, :func:`from_calls` and :func:`serving` make traces.

    Parameters
    ----------
    events
        All allocations and frees.
    source
        Description of the recording.
    skipped
        Number of recorded calls that are not events, by kind: failed allocations, and frees of memory from before the
        recording.

    Raises
    ------
    ValueError
        The events are inconsistent: an allocation is freed twice, or was never made.
    """

    events: tuple[Event, ...]
    source: str = ""
    skipped: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(self.events))  # once: it may be an iterator
        checked = CheckedTrace()
        for number, event in enumerate(self.events):
            try:
                checked.add(event)
            except ValueError as error:
                raise ValueError(f"event {number}: {error}") from None

    @property
    def allocations(self) -> int:
        """Number of allocations."""
        return sum(event.action == "allocate" for event in self.events)

    @property
    def streams(self) -> int:
        """Number of streams."""
        return len({event.stream for event in self.events})

    @property
    def threads(self) -> int:
        """Number of host threads that made the calls."""
        return len({event.thread for event in self.events})

    @property
    def peak(self) -> int:
        """Most bytes allocated at once, in requested sizes."""
        now = most = 0
        for event in self.events:
            now += event.nbytes if event.action == "allocate" else -event.nbytes
            most = max(most, now)
        return most

    @property
    def seconds(self) -> float:
        """Seconds from the first to the last event."""
        return (self.events[-1].time - self.events[0].time) / 1e9 if self.events else 0.0

    def save(self, path: str | Path) -> None:
        """Write the trace to a file, compressed if its name ends in ``.gz``. Equal traces make equal files."""
        path = Path(path)
        header = {
            "format": FORMAT,
            "version": VERSION,
            "source": self.source,
            "skipped": dict(sorted(self.skipped.items())),
        }
        lines = [json.dumps(header) + "\n", *(_LINE % event for event in self.events)]
        content = "".join(lines).encode("ascii")
        # mtime=0: gzip stores the time in the file otherwise.
        path.write_bytes(gzip.compress(content, _LEVEL, mtime=0) if path.suffix == ".gz" else content)

    def __repr__(self) -> str:
        peak = size_text(self.peak)
        return f"<Trace of {len(self.events):,} events on {self.streams} streams, at most {peak} at once>"


class CheckedTrace:
    """Builder of a trace, which checks each event."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._alive: dict[int, int] = {}
        self._seen: set[int] = set()

    def add(self, event: Event) -> None:
        """Add an event; raises ``ValueError`` if it does not fit those before."""
        self._check(event)
        self._events.append(event)

    def trace(self, source: str, skipped: Mapping[str, int]) -> Trace:
        """The trace of all events, which are not checked again."""
        trace = Trace.__new__(Trace)
        vars(trace).update(events=tuple(self._events), source=source, skipped=skipped)
        return trace

    def _check(self, event: Event) -> None:
        action, number, nbytes, *_ = event
        if action not in ("allocate", "free"):
            raise ValueError(f"action {action!r}: allowed are 'allocate' and 'free'")
        for name, value in zip(event._fields[1:], event[1:], strict=True):
            if type(value) is not int or not 0 <= value <= _MOST:
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


def read_trace(lines: Iterable[str], file: str = "") -> Trace:
    """The trace in the lines of a file."""
    numbered = enumerate(lines, 1)
    header = _header(next(numbered, (1, ""))[1], file)
    checked = CheckedTrace()
    for number, line in numbered:
        try:
            value = json.loads(line)
            if type(value) is not list or len(value) != len(Event._fields):
                raise ValueError(f"an event is a list of {', '.join(Event._fields)}")
            checked.add(Event(*value))
        except (ValueError, RecursionError) as error:
            raise TraceFormatError(str(error), file, number) from None
    return checked.trace(**header)


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


@contextlib.contextmanager
def opened(path: str | Path) -> Iterator[IO[bytes]]:
    """A file for reading in a ``with`` block; decompressed if its content is compressed, whatever its name."""
    try:
        # Opened once: the file may be a pipe.
        with open(path, "rb") as file:
            if file.peek(2)[:2] == _GZIP:
                file = io.BufferedReader(gzip.GzipFile(fileobj=file))
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceFormatError(f"the compressed file is damaged: {error}", str(path)) from None


def content(file: IO[bytes], name: str) -> bytes:
    """The bytes of a file from :func:`opened`. Refuses a file with a higher compression than traces have."""
    compressed = isinstance(getattr(file, "raw", None), gzip.GzipFile)
    most = os.fstat(file.fileno()).st_size * _RATIO + _BEYOND if compressed else None
    pieces, length = [], 0
    while piece := file.read(_LONGEST):
        pieces.append(piece)
        length += len(piece)
        if most is not None and length > most:
            raise TraceFormatError(f"the compressed file has more than {_RATIO} times its size in it", name)
    return b"".join(pieces)


def text_lines(file: IO[bytes], name: str) -> Iterator[str]:
    """The lines of a text file. Refuses a line that is no UTF-8, or longer than 1 MiB."""
    number = 0
    try:
        while line := file.readline(_LONGEST + 1):
            number += 1
            if len(line) > _LONGEST:
                raise TraceFormatError(f"the line is longer than {size_text(_LONGEST)}", name, number)
            yield line.decode("utf-8")
    except UnicodeDecodeError:
        raise TraceFormatError("this is no text", name, number) from None
