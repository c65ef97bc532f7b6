"""Files and signals for other tools: PyTorch's memory viewer, RMM's log, Perfetto and Chrome, and NVTX."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import json
import os
import pickle
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from streamalloc.core.errors import undoing
from streamalloc.core.properties import MemLocationType
from streamalloc.observing.records import Allocation, Happening, Phase

# Step in bytes by which a pool grows: allocations further apart are put into different segments of a snapshot.
_STEP = 32 << 20


# --- PyTorch --------------------------------------------------------------------------------------------------------


def save_pytorch(path: str | Path, history: Sequence[Happening], live: Iterable[Allocation]) -> None:
    """Write :func:`snapshot` to a file, as a pickle. Raises ``OSError`` if the file cannot be written."""
    Path(path).write_bytes(pickle.dumps(snapshot(history, live), protocol=4))


def snapshot(history: Sequence[Happening], live: Iterable[Allocation]) -> dict[str, Any]:
    """Return a snapshot for PyTorch's memory viewer: its ``segments`` of current memory, and its ``device_traces`` by
    device.

    The driver does not report which address ranges a pool has. Therefore a segment is a group of neighbouring
    allocations, live or freed. The gaps between live allocations are inactive blocks. Each current mapping is a
    separate segment. Host memory is left out.
    """
    live = [one for one in live if _device(one) is not None]
    happened = [one for one in history if _device(one.allocation) is not None]
    count = 1 + max((_device(one) or 0 for one in (*live, *(one.allocation for one in happened))), default=-1)
    traces: list[list[dict[str, Any]]] = []
    segments = []
    for ordinal in range(count):
        traces.append([entry for one in happened if _device(one.allocation) == ordinal for entry in _entries(one)])
        here = [one for one in live if _device(one) == ordinal]
        ever = [*here, *(one.allocation for one in happened if one.action != "failure")]
        pooled = [one for one in ever if one.source.kind != "mapping" and _device(one) == ordinal]
        mapped = [one for one in here if one.source.kind == "mapping"]
        for group, gap, expandable in ((pooled, _STEP, False), (mapped, 0, True)):
            for start, stop in _clusters(group, gap):
                blocks = [one for one in here if start <= one.address < stop]
                segments.append(_segment(ordinal, start, stop, blocks, expandable))
    return {"segments": segments, "device_traces": traces, "allocator_settings": {}, "external_annotations": []}


def _device(one: Allocation) -> int | None:
    location = one.source.location
    return location.id if location.type is MemLocationType.DEVICE else None


def _entries(one: Happening) -> Iterator[dict[str, Any]]:
    """Yield the entries of a device's trace, as dictionaries, for one entry of the history: an allocation, free or
    failure.
    """
    allocation = one.allocation
    mapped = allocation.source.kind == "mapping"
    actions = {
        "allocate": ["segment_map"] * mapped + ["alloc"],
        "free": ["free_requested", "free_completed"] + ["segment_unmap"] * mapped,
        "failure": ["oom"],
    }[one.action]
    for action in actions:
        place = {"action": action, "addr": allocation.address, "size": allocation.nbytes, "stream": one.stream}
        entry = {**place, "time_us": one.time // 1000, "frames": _frames(allocation)}
        # The viewer fails without this field, and the free memory of the device is not recorded.
        yield entry | {"device_free": 0} if action == "oom" else entry


def _frames(one: Allocation) -> list[dict[str, Any]]:
    words = [f"{name}: {word}" for name, word in one.names]
    found = [{"filename": site.file, "line": site.line, "name": site.function} for site in one.sites]
    return found + [{"filename": word, "line": 0, "name": ""} for word in words]


def _clusters(allocations: Iterable[Allocation], gap: int) -> list[list[int]]:
    """Return start and end address of each group of allocations. Gaps within a group have at most ``gap`` bytes."""
    found: list[list[int]] = []
    for begin, end in sorted({(one.address, one.address + one.nbytes) for one in allocations}):
        if found and begin - found[-1][1] <= gap:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([begin, end])
    return found


def _segment(ordinal: int, start: int, stop: int, live: Iterable[Allocation], expandable: bool) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    at = start
    for one in sorted(live):
        # The viewer adds up the sizes of blocks to get addresses. Without a block for each gap, later blocks would be
        # misplaced.
        if one.address > at:
            blocks.append(_block(at, one.address - at, 0, "inactive", []))
        blocks.append(_block(one.address, one.nbytes, one.nbytes, "active_allocated", _frames(one)))
        at = one.address + one.nbytes
    if at < stop:
        blocks.append(_block(at, stop - at, 0, "inactive", []))
    active = sum(block["requested_size"] for block in blocks)
    place = {"device": ordinal, "address": start, "total_size": stop - start, "stream": 0}
    sizes = dict.fromkeys(("allocated_size", "active_size", "requested_size"), active)
    kind = {"segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": expandable}
    return {**place, **sizes, **kind, "frames": [], "blocks": blocks}


def _block(address: int, size: int, requested: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames}


# --- RMM ------------------------------------------------------------------------------------------------------------

_ACTIONS = {"allocate": "allocate", "free": "free", "failure": "allocate failure"}


_NAMES = ("pool", "stream", "tag", "phase")
_HEADER = b"Thread,Time,Action,Pointer,Size,Stream,Pool,Stream name,Tag,Phase,Line\n"


class Log:
    """CSV file in the format of RMM's ``LoggingResourceAdaptor``, with further columns for names and the program's
    line.

    The constructor opens the file at ``path``, and raises ``OSError`` if that fails. Writes are not buffered, so that
    the lines are in the file even if the process is killed. A mapping has no stream; its column has stream 0.
    """

    def __init__(self, path: str | Path, *, append: bool = False) -> None:
        # os.fspath() refuses a number. open() would use the number as a file descriptor of the program, and close it at
        # the end.
        self._file = open(os.fspath(path), "ab" if append else "wb", buffering=0)  # noqa: SIM115
        if not append:
            with undoing(self.close):
                self._file.write(_HEADER)

    def write(self, history: Iterable[Happening]) -> None:
        """Append a line for each entry of the history. Raises ``OSError`` if the file cannot be written."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for one in history:
            seconds, rest = divmod(one.time, 10**9)
            clock = f"{time.strftime('%H:%M:%S', time.localtime(seconds))}:{rest // 1000:06}"
            of = one.allocation
            numbers = one.thread, clock, _ACTIONS[one.action], f"{of.address:#x}", of.nbytes, hex(one.stream)
            names = dict(of.names)
            words = (*(names.get(name, "") for name in _NAMES), *map(str, of.sites[:1]))
            writer.writerow([*numbers, *(" ".join(word.split()) for word in words)])
        data = text.getvalue().encode(errors="backslashreplace")  # A path may contain bytes that are not UTF-8.
        while data:  # If the disk becomes full, write() may write only a part of the data.
            data = data[self._file.write(data) :]

    def close(self) -> None:
        """Close the file. Later writes raise ``ValueError``."""
        self._file.close()


def save_rmm(path: str | Path, history: Iterable[Happening]) -> None:
    """Write a history to a file in the format of :class:`Log`. Raises ``OSError`` if the file cannot be written."""
    with contextlib.closing(Log(path)) as log:
        log.write(history)


# --- Chrome and Perfetto --------------------------------------------------------------------------------------------


def save_chrome(
    path: str | Path, history: Sequence[Happening], live: Iterable[Allocation], phases: Iterable[Phase]
) -> None:
    """Write a JSON file in Chrome's trace-event format, with a counter for each source, a slice for each phase, and
    failures.

    Raises ``OSError`` if the file cannot be written.
    """
    process = os.getpid()
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "ts": 0, "args": {"name": "streamalloc"}}
    ]
    totals: Counter[str] = Counter()
    alive = _before(history, live)
    for allocation in alive.values():
        totals[_counter(allocation)] += allocation.nbytes
    for one in history:
        common = {"pid": process, "tid": one.thread, "ts": one.time / 1000}
        if one.action == "failure":
            size = {"requested": one.allocation.nbytes}
            events.append({"ph": "i", "s": "p", "name": "out of memory", "args": size} | common)
            continue
        # A cache and its pool may both allocate this address, so the earlier allocation is replaced.
        gone = alive.pop(one.allocation.address, None)
        come = one.allocation if one.action == "allocate" else None
        if gone is not None:
            totals[_counter(gone)] -= gone.nbytes
        if come is not None:
            alive[come.address] = come
            totals[_counter(come)] += come.nbytes
        for name in dict.fromkeys(_counter(which) for which in (gone, come) if which is not None):
            events.append({"ph": "C", "name": name, "args": {"allocated bytes": totals[name]}} | common)
    for phase in phases:
        if phase.ended is not None:
            args = {name: getattr(phase, name) for name in ("path", "before", "peak", "after")}
            span = {"ts": phase.began / 1000, "dur": (phase.ended - phase.began) / 1000}
            events.append({"ph": "X", "name": phase.name, "pid": process, "tid": phase.thread, "args": args} | span)
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="ascii")


def _counter(one: Allocation) -> str:
    name = f" {one.source.name!r}" if one.source.name else ""
    return f"{one.source.kind}{name} {one.source.location}"


def _before(history: Iterable[Happening], live: Iterable[Allocation]) -> dict[int, Allocation]:
    """Return the allocations that were live before the first entry of the history, by address."""
    first: dict[int, Happening] = {}
    for one in history:
        if one.action != "failure":
            first.setdefault(one.allocation.address, one)
    found = {address: one.allocation for address, one in first.items() if one.action == "free"}
    return found | {one.address: one for one in live if one.address not in first}


# --- NVTX -----------------------------------------------------------------------------------------------------------

_DOMAIN = "streamalloc"


class Profiler:
    """Ranges and a counter of NVTX for an observer.

    Raises
    ------
    ModuleNotFoundError
        ``nvtx`` is not installed.
    """

    def __init__(self) -> None:
        try:
            nvtx = importlib.import_module("nvtx")
        except ModuleNotFoundError:
            raise ModuleNotFoundError("nvtx is not installed: pip install 'streamalloc[nvtx]'", name="nvtx") from None
        self._annotate: Any = nvtx.annotate
        domain = nvtx.get_domain(_DOMAIN)
        # Older versions of nvtx have no counters.
        make = getattr(domain, "get_counter", None)
        self._sample: Any = None if make is None else make("allocated bytes", int).sample

    def range(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Return a context manager for an NVTX range with this name, which lasts for the ``with`` block."""
        return cast("contextlib.AbstractContextManager[object]", self._annotate(message=name, domain=_DOMAIN))

    def sample(self, nbytes: int) -> None:
        """Set the NVTX counter to ``nbytes``, the bytes that are allocated now. Does nothing if the installed ``nvtx``
        has no counters.
        """
        if self._sample is not None:
            self._sample(nbytes)
