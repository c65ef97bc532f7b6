"""Traces of allocations and frees: their file format, and readers of other recordings.

A file has one JSON value in each line. The first line is an object with the format, the format's version, the source of
the trace, and how many recorded calls cannot be replayed. Each other line is an event::

    {"format": "streamalloc trace", "version": 1, "source": "RMM log", "skipped": {"failed allocations": 1}}
    ["allocate", 0, 4096, 0, 0, 1500]
    ["free", 0, 4096, 1, 0, 2750]

The items of an event are the fields of :class:`Event`, in order. A file whose name ends in ``.gz`` is compressed.

Traces can also be made from the calls of :func:`streamalloc.driver.traced`, from RMM's logs and from PyTorch's
snapshots.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import os
import pickle
import pickletools
import re
import zlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, NamedTuple, TypeAlias, TypeVar, cast

from streamalloc.core.errors import size_text
from streamalloc.core.internal import LEGACY
from streamalloc.driver import Call
from streamalloc.formats.sizes import counted

FORMAT = "streamalloc trace"
VERSION = 1
# An event as JSON, without the slower json.dumps(): an action and numbers need no escapes.
_LINE = '["%s", %d, %d, %d, %d, %d]\n'
_LEVEL = 6  # Of gzip.
_GZIP = b"\x1f\x8b"
_LONGEST = 1 << 20  # The most bytes that a line of text may have.
# A compressed file may expand to 200 times its size plus 4 MiB. Without a limit, a small file could exhaust the memory.
_RATIO = 200
_BEYOND = 1 << 22
_MOST = (1 << 63) - 1  # The largest value of a number in an event.

Action: TypeAlias = Literal["allocate", "free"]


class TraceFormatError(ValueError):
    """A file is not a trace, or is damaged. The message names the file and the line, if they are known. :func:`load`
    raises this error.
    """

    def __init__(self, why: str, file: str = "", line: int | None = None) -> None:
        at = f"line {line}" if line is not None else ""
        where = ", ".join(filter(None, (file, at)))
        super().__init__(f"{where}: {why}" if where else why)
        self.line: int | None = line
        """Number of the line in the file, or of the entry in a snapshot, counted from 1; None if unknown."""


class Event(NamedTuple):
    """Allocation or free. Streams, threads and allocations are numbered from 0 in order of appearance.

    :attr:`Trace.events` lists such objects.
    """

    action: Action
    """``"allocate"`` or ``"free"``."""
    id: int
    """Number of the allocation, unique in a trace."""
    nbytes: int
    """Size in bytes, as requested; a free repeats the size of its allocation."""
    stream: int
    """Number of the stream. A free may be on another stream than its allocation."""
    thread: int
    """Number of the host thread that made the call."""
    time: int
    """Nanoseconds since the first event of the recording. Times may go back, because recorded calls of several
    threads may be slightly out of order. A replay uses the order of the events, not their times.
    """


@dataclass(frozen=True)
class Trace:
    """Allocations and frees of a program's run, in the order of the calls.

    :func:`load`, :func:`from_calls` and generators such as :func:`serving` return traces.

    Parameters
    ----------
    events
        All allocations and frees.
    source
        Description of where the trace comes from, such as ``"RMM log"``.
    skipped
        Number of recorded calls that are not events, by kind: failed allocations, frees of memory that was allocated
        before the recording, and frees that were not recorded.

    Raises
    ------
    ValueError
        An event has an unknown action or a number outside 0 to 2**63 - 1. Or it contradicts earlier events: an
        allocation is made twice, freed twice, freed with another size, or was never made.
    """

    events: tuple[Event, ...]
    source: str = ""
    skipped: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        events: list[Event] = []
        try:
            for event in _checked(self.events):
                events.append(event)
        except ValueError as error:
            raise ValueError(f"event {len(events)}: {error}") from None
        object.__setattr__(self, "events", tuple(events))  # The caller's iterable may be an iterator, used up by now.

    @property
    def allocations(self) -> int:
        """Number of events that are allocations; the other events are frees."""
        return sum(event.action == "allocate" for event in self.events)

    @property
    def streams(self) -> int:
        """Number of different streams in the events."""
        return len({event.stream for event in self.events})

    @property
    def threads(self) -> int:
        """Number of host threads that made the calls."""
        return len({event.thread for event in self.events})

    @property
    def peak(self) -> int:
        """Most bytes allocated at once, as a sum of requested sizes; 0 without events."""
        now = most = 0
        for event in self.events:
            now += event.nbytes if event.action == "allocate" else -event.nbytes
            most = max(most, now)
        return most

    @property
    def seconds(self) -> float:
        """Seconds from the earliest to the latest event; 0 without events."""
        times = [event.time for event in self.events]
        return (max(times) - min(times)) / 1e9 if times else 0.0

    def save(self, path: str | Path) -> None:
        """Write the trace to a file, compressed if the name ends in ``.gz``. Equal traces give equal files.

        Raises ``OSError`` if the file cannot be written.
        """
        path = Path(path)
        skipped = dict(sorted(self.skipped.items()))
        header = {"format": FORMAT, "version": VERSION, "source": self.source, "skipped": skipped}
        lines = [json.dumps(header) + "\n", *(_LINE % event for event in self.events)]
        content = "".join(lines).encode("ascii")
        # Without mtime=0, gzip would store the current time, and equal traces would give different files.
        path.write_bytes(gzip.compress(content, _LEVEL, mtime=0) if path.suffix == ".gz" else content)

    def __repr__(self) -> str:
        events, streams = counted(len(self.events), "event"), counted(self.streams, "stream")
        return f"<Trace of {events} on {streams}, at most {size_text(self.peak)} at once>"


def _checked(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events. Raise ``ValueError`` at an event that contradicts earlier events, such as a second free."""
    alive: dict[int, int] = {}
    seen: set[int] = set()
    for event in events:
        _check_fields(event)
        action, number, nbytes, *_ = event
        if action == "allocate":
            if number in seen:
                raise ValueError(f"allocation {number} was made before")
            seen.add(number)
            alive[number] = nbytes
        else:
            allocated = alive.pop(number, None)
            if allocated is None:
                raise ValueError(f"allocation {number} {'was freed before' if number in seen else 'is unknown'}")
            if nbytes != allocated:
                raise ValueError(f"a free of {nbytes} bytes, but allocation {number} has {allocated}")
        yield event


def _check_fields(event: Event) -> None:
    if event.action not in ("allocate", "free"):
        raise ValueError(f"action {event.action!r}: allowed are 'allocate' and 'free'")
    for name, value in zip(event._fields[1:], event[1:], strict=True):
        if type(value) is not int or not 0 <= value <= _MOST:
            raise ValueError(f"{name}={value!r}: it has to be an integer from 0 to 2**63 - 1")


def read_trace(lines: Iterable[str], file: str = "") -> Trace:
    """Return the trace that the lines of a file contain. ``file``: name of the file, for errors. Raises
    :class:`TraceFormatError` if a line is not as :meth:`Trace.save` writes it, or contradicts earlier lines.
    """
    lines = iter(lines)
    header = _header(next(lines, ""), file)
    number = 1

    def read() -> Iterator[Event]:
        nonlocal number
        for line in lines:
            number += 1
            if not line.isspace():  # An editor may add an empty line.
                yield _event(line)

    try:
        events = tuple(_checked(read()))
    except TraceFormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise TraceFormatError(str(error), file, number) from None
    trace = Trace.__new__(Trace)  # The constructor is not called, because it would check all events a second time.
    vars(trace).update(events=events, **header)
    return trace


def _event(line: str) -> Event:
    value = json.loads(line)
    if type(value) is not list or len(value) != len(Event._fields):
        raise ValueError(f"an event is a list of {', '.join(Event._fields)}")
    return Event(*value)


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
    """Return a context manager that opens a file for reading. A file compressed by gzip is recognised by its content.

    Raises ``OSError`` if the file cannot be read, and :class:`TraceFormatError` if its compressed data is damaged.
    """
    try:
        # The file is opened only once, because it may be a pipe, which can be read only once.
        with open(path, "rb") as file:
            if file.peek(2)[:2] == _GZIP:
                file = io.BufferedReader(gzip.GzipFile(fileobj=file))
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceFormatError(f"the compressed file is damaged: {error}", str(path)) from None


def content(file: IO[bytes], name: str) -> bytes:
    """Return all bytes of a file from :func:`opened`. ``name``: name of the file, for the error.

    Raises :class:`TraceFormatError` if a compressed file expands to more than 200 times its size plus 4 MiB.
    """
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
    """Yield the lines of a text file. ``name``: name of the file, for the error.

    Raises :class:`TraceFormatError` for a line that is not UTF-8, or is longer than 1 MiB.
    """
    number = 0
    try:
        while line := file.readline(_LONGEST + 1):
            number += 1
            if len(line) > _LONGEST:
                raise TraceFormatError(f"the line is longer than {size_text(_LONGEST)}", name, number)
            yield line.decode("utf-8")
    except UnicodeDecodeError:
        raise TraceFormatError("this is no text", name, number) from None


# --- other recordings -----------------------------------------------------------------------------------------------

T = TypeVar("T")
_FAILED = "failed allocations"
_UNKNOWN = "frees of memory that was allocated before"
_UNSEEN = "frees that were not recorded"


class _Recording:
    """Builder of a trace from a recording, whose addresses and handles are replaced by numbers from 0."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._numbers = itertools.count()
        self._alive: dict[object, tuple[int, int]] = {}
        """Number and size in bytes of each live allocation, by address."""
        self._streams: dict[object, int] = {}
        """Number of each stream, by handle."""
        self._threads: dict[object, int] = {}
        """Number of each thread, by the thread's name in the recording."""
        self._began: int | None = None
        """Time of the first event in nanoseconds, which is subtracted from all times; None before the first event."""
        self.skipped: Counter[str] = Counter()
        """Number of recorded calls that are not events, by kind."""

    def is_alive(self, address: object) -> bool:
        """Return whether memory at this address is allocated."""
        return address in self._alive

    def allocate(self, address: object, nbytes: int, stream: object, thread: object, time: int) -> None:
        if address in self._alive:
            raise ValueError(f"memory at {_shown(address)} is allocated again before it was freed")
        number = next(self._numbers)
        self._alive[address] = number, nbytes
        self._add("allocate", number, nbytes, stream, thread, time)

    def free(self, address: object, stream: object, thread: object, time: int) -> None:
        known = self._alive.pop(address, None)
        if known is None:
            self.skipped[_UNKNOWN] += 1
        else:
            self._add("free", *known, stream, thread, time)

    def _add(self, action: Any, number: int, nbytes: int, stream: object, thread: object, time: int) -> None:
        if self._began is None:
            self._began = time
        streams, threads = self._streams, self._threads
        of_stream = streams.setdefault(stream, len(streams))
        of_thread = threads.setdefault(thread, len(threads))
        event = Event(action, number, nbytes, of_stream, of_thread, max(time - self._began, 0))
        _check_fields(event)
        self._events.append(event)

    def trace(self, source: str) -> Trace:
        return Trace(tuple(self._events), source, dict(self.skipped))


def _shown(address: object) -> str:
    return hex(address) if isinstance(address, int) else str(address)


# --- recorded driver calls ------------------------------------------------------------------------------------------

# Indices of the arguments size and stream, by driver function; None: the legacy default stream.
_MAKERS = {"cuMemAllocAsync": (0, 1), "cuMemAllocFromPoolAsync": (0, 2), "cuMemAlloc": (0, None)}
_ENDERS = {"cuMemFreeAsync": 1, "cuMemFree": None}


def from_calls(calls: Iterable[Call]) -> Trace:
    """Return a trace of the calls that a driver of :func:`streamalloc.driver.traced` has recorded (``driver.calls``).

    The trace has the allocations and frees of pools and of ``cuMemAlloc``. Memory that a caching allocator takes from
    its cache needs no driver call, and is not in the trace.
    """
    recording = _Recording()
    for call in calls:
        failed = int(call.answer[0]) != 0
        if call.name in _MAKERS:
            if failed:
                recording.skipped[_FAILED] += 1
                continue
            size, at = _MAKERS[call.name]
            address, stream = int(call.answer[1]), _handle(call.args, at)
            if address and recording.is_alive(address):
                # The earlier memory at this address was freed without a recorded call: by a graph, or with its pool.
                recording.skipped[_UNSEEN] += 1
                recording.free(address, stream, call.thread, call.time)
            # Not of 0 bytes: such an allocation has no address, no call frees it, and it would count as leaked.
            if address:
                recording.allocate(address, int(call.args[size]), stream, call.thread, call.time)
        elif call.name in _ENDERS and not failed and int(call.args[0]):
            recording.free(int(call.args[0]), _handle(call.args, _ENDERS[call.name]), call.thread, call.time)
    return recording.trace("calls of streamalloc.driver.traced")


def _handle(args: Sequence[Any], at: int | None) -> int:
    number = 0 if at is None or args[at] is None else int(args[at])
    return 0 if number == LEGACY else number


# --- RMM ------------------------------------------------------------------------------------------------------------

_RMM_HEADER = "Thread,Time,Action,Pointer,Size,Stream"
_CLOCK = re.compile(r"(\d+):(\d\d):(\d\d)[.:](\d{1,9})")
_DAY = 24 * 3600 * 10**9
_LATE = 60 * 10**9  # Nanoseconds after midnight within which a line from before midnight may still follow.


def _read_rmm(lines: Iterator[str], file: str) -> Trace:
    """Return the trace that a log of RMM's ``LoggingResourceAdaptor`` contains. Columns after the first six are
    ignored.

    Raises :class:`TraceFormatError` at the first line that is no allocation, failed allocation or free.
    """
    if not next(lines, "").startswith(_RMM_HEADER):
        raise TraceFormatError(f"the first line has to begin with {_RMM_HEADER}", file, 1)
    recording = _Recording()
    days = before = 0
    for number, line in enumerate(lines, 2):
        if line.isspace():
            continue
        try:
            fields = line.strip().split(",", 6)[:6]
            if len(fields) < 6:
                raise ValueError(f"{len(fields)} fields, not 6 or more")
            thread, clock, action, pointer, size, stream = (one.strip() for one in fields)
            time = _nanoseconds(clock)
            # A line has the time of day without the date, and lines of several threads may be slightly out of order. A
            # step of half a day back means midnight. A later step of nearly a day forward means a late line from before
            # midnight.
            if days and time > before + _DAY - _LATE:
                time -= _DAY
            else:
                days += time < before - _DAY // 2
                before = time
            time += days * _DAY
            if action == "allocate":
                recording.allocate(pointer.lower(), _natural(size, "size"), stream, thread, time)
            elif action in ("free", "deallocate"):
                _natural(size, "size")
                recording.free(pointer.lower(), stream, thread, time)
            elif action == "allocate failure":
                recording.skipped[_FAILED] += 1
            else:
                raise ValueError(f"action {action!r}: known are allocate, allocate failure and free")
        except ValueError as error:
            raise TraceFormatError(str(error), file, number) from None
    return recording.trace("RMM log")


def _natural(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 19:
        raise ValueError(f"{name} {text[:40]!r} is no number of bytes")
    return int(text)


def _nanoseconds(text: str) -> int:
    found = _CLOCK.fullmatch(text)
    if found:
        hours, minutes, seconds, fraction = found.groups()
        return ((int(hours) * 60 + int(minutes)) * 60 + int(seconds)) * 10**9 + int(fraction.ljust(9, "0"))
    if re.fullmatch(r"\d{1,12}(\.\d{1,9})?", text):
        seconds, _, fraction = text.partition(".")
        return int(seconds) * 10**9 + int(fraction.ljust(9, "0"))
    raise ValueError(f"time {text[:40]!r} is neither HH:MM:SS.ffffff nor seconds")


# --- PyTorch --------------------------------------------------------------------------------------------------------


def _read_pickle(file: IO[bytes], device: int | None, name: str) -> Trace:
    data = content(file, name)
    try:
        snapshot = plain(data)
    except MemoryError:
        raise TraceFormatError("the pickle is damaged", name) from None
    except Exception as error:  # Damaged pickles raise any class.
        raise TraceFormatError(f"no plain pickle: {type(error).__name__}: {error}", name) from None
    return _of_snapshot(snapshot, device, name)


def _of_snapshot(snapshot: Any, device: int | None, file: str) -> Trace:
    traces = snapshot.get("device_traces") if isinstance(snapshot, Mapping) else None
    if type(traces) is not list or any(type(one) is not list for one in traces):
        raise TraceFormatError("no snapshot of PyTorch: it has no 'device_traces'", file)
    recorded = [number for number, one in enumerate(traces) if one]
    if device is None:
        if len(recorded) != 1:
            where = f"{file}: " if file else ""
            if not recorded:
                raise ValueError(f"{where}the snapshot has no history: start it with torch's _record_memory_history()")
            numbers = ", ".join(map(str, recorded))
            raise ValueError(
                f"{where}devices {numbers} have a history: name one for traces.load, such as device={recorded[0]}"
            )
        (device,) = recorded
    elif device not in recorded:
        raise ValueError(f"device={device}: the snapshot has no history of it (of {recorded or 'none'})")
    recording = _Recording()
    for number, entry in enumerate(traces[device], 1):
        try:
            _take_entry(recording, entry)
        except ValueError as error:
            raise TraceFormatError(f"entry {number} of device {device}: {error}", file, number) from None
    return recording.trace(f"PyTorch snapshot of device {device}")


def _take_entry(recording: _Recording, entry: Any) -> None:
    if type(entry) is not dict:
        raise ValueError("it is no dictionary")
    action = _of_type(entry, "action", str)
    if action == "oom":
        recording.skipped[_FAILED] += 1
    elif action in ("alloc", "free_requested", "free_completed", "free"):
        address, stream = _of_type(entry, "addr", int), _of_type(entry, "stream", int)
        time = max(_of_type(entry, "time_us", int, 0), 0) * 1000
        if action == "alloc":
            recording.allocate(address, _of_type(entry, "size", int), stream, 0, time)
        elif action != "free_completed" or recording.is_alive(address):
            # A free has two entries. The second, free_completed, counts only if the first is missing in the history.
            recording.free(address, stream, 0, time)


def _of_type(entry: dict[str, Any], key: str, kind: type[T], default: T | None = None) -> T:
    value = entry.get(key, default)
    if type(value) is not kind:
        raise ValueError(f"{key!r} has to be of type {kind.__name__}, not {type(value).__name__}")
    return value


# A snapshot may come from an untrusted person. The standard library's reader calls functions that a pickle names, and
# in C allocates as much memory as a pickle requests. So this reader is the variant in Python, without the opcodes for
# classes and functions. Its memory use grows only with the length of the data: values are slices of the data, and the
# memo is a dictionary.
_KEY_TYPES = (str, bytes, int, float, bool, type(None))
_PLAIN_OPCODES = frozenset(
    "PROTO FRAME STOP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT "  # noqa: SIM905
    "UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8 "
    "EMPTY_LIST EMPTY_TUPLE EMPTY_DICT LIST TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS "
    "MARK POP POP_MARK DUP PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET MEMOIZE".split()
)
_WITH_KEY_TYPES = {"DICT": slice(None, None, 2), "SETITEM": slice(-2, -1), "SETITEMS": slice(None, None, 2)}
"""Opcodes that fill dictionaries, with the positions of the keys on the reader's stack."""


def _opcode(name: str, load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return the reader's function for an opcode. If plain data does not need the opcode, the function raises an
    error.
    """
    keys = _WITH_KEY_TYPES.get(name)

    def load_with_keys(reader: Any) -> None:
        for key in reader.stack[keys]:
            # Tuples are refused as keys, because the hash of nested tuples can take exponential time.
            if type(key) not in _KEY_TYPES:
                raise pickle.UnpicklingError(f"a key is of type {type(key).__name__}")
        load(reader)

    def refuse(_: Any) -> None:
        why = f"it names more than plain data ({name})"
        raise pickle.UnpicklingError(f"{why}; a snapshot is dictionaries, lists, text and numbers")

    return load if name in _PLAIN_OPCODES else load_with_keys if keys else refuse


_reader: Any = pickle._Unpickler  # type: ignore[attr-defined, unused-ignore]


class _Reader(_reader):  # type: ignore[misc]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        ord(one.code): _opcode(one.name, _reader.dispatch[ord(one.code)]) for one in pickletools.opcodes
    }


def plain(data: bytes) -> Any:
    """Return the value of a pickle that contains only dictionaries, lists, tuples, text, bytes and numbers.

    Raises
    ------
    Exception
        The pickle is damaged, or contains other objects (``UnpicklingError``).
    """
    return _Reader(io.BytesIO(data)).load()


# --- all formats ----------------------------------------------------------------------------------------------------


def load(source: str | Path | Mapping[str, Any], device: int | None = None) -> Trace:
    """Read a trace: a file of :meth:`Trace.save`, a log of RMM or a snapshot of PyTorch, compressed by gzip or not.

    :doc:`/docs/guides/traces` says how to record each kind. A log has the columns of RMM's ``LoggingResourceAdaptor``;
    further columns are ignored. A snapshot is a pickle; classes and functions in it are refused. PyTorch records no
    threads, and no streams of frees. A free gets the time of its request, and the stream of the allocation.

    Parameters
    ----------
    source
        The path of a file, or the result of ``torch.cuda.memory._snapshot()``.
    device
        Ordinal of the device whose history in the snapshot is read. Default: the only device that has one.

    Raises
    ------
    TraceFormatError
        ``source`` has none of these formats, or is damaged.
    OSError
        The file cannot be read.
    ValueError
        ``device`` has no history in the snapshot. Or ``device`` is None, and not exactly one device has a history.
    """
    if isinstance(source, Mapping):
        return _of_snapshot(source, device, "")
    name = str(source)
    with opened(source) as file:
        if cast(Any, file).peek(len(BOM_UTF8))[: len(BOM_UTF8)] == BOM_UTF8:
            file.read(len(BOM_UTF8))  # Some editors write it.
        head = cast(Any, file).peek(1)[:1]
        if head == b"{":
            return read_trace(text_lines(file, name), name)
        if head == b"T":
            return _read_rmm(text_lines(file, name), name)
        if head == b"\x80":
            return _read_pickle(file, device, name)
    known = f"a {FORMAT}, a log of RMM ({_RMM_HEADER}) nor a snapshot of PyTorch (a pickle)"
    raise TraceFormatError(f"neither {known}", name)
