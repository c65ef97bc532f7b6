"""Fastest possible replay of a trace on an allocator, with measurements.

One thread makes all calls in recorded order, and queues no other work: the time is the allocator's alone. For a free on
another stream than its allocation's, the other stream waits for the allocation's stream, and the memory is freed on the
other stream. If the allocator cannot do that, the allocation's stream waits for the other stream instead.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from streamalloc.core.internal import Allocator, Device
from streamalloc.driver import traced
from streamalloc.traces.subjects import ALLOCATORS, Subject, of_allocator
from streamalloc.traces.trace import Trace

# Events between two clock readings.
_CHUNK = 8192


class Figures(NamedTuple):
    """Measurements of a replay without times; :class:`Replayed` describes the fields."""

    failures: int
    """Allocations that failed."""
    peak_used: int
    """Most bytes allocated at once."""
    peak_reserved: int | None
    """Most bytes reserved; None if the allocator does not report them."""
    driver_calls: int | None
    """Calls of the driver; None if they cannot be counted."""

    @property
    def reserved_over_used(self) -> float | None:
        """Peak reserved over peak used."""
        return None if self.peak_reserved is None else self.peak_reserved / max(self.peak_used, 1)


@dataclass(frozen=True)
class Replayed:
    """Measurements of a replay.

    :func:`replay` returns it.
    """

    allocator: str
    """Title of the allocator."""
    events: int
    """Number of allocations and frees in the trace."""
    seconds: float
    """Seconds of one replay: median of the rounds after the first."""
    first_seconds: float
    """Seconds of the first replay, in which the allocator reserves its memory."""
    failures: int
    """Failed allocations of the first replay; their frees are skipped."""
    peak_used: int
    """Most bytes allocated at once, in requested sizes."""
    peak_reserved: int | None
    """Most bytes reserved from the driver; None if unknown."""
    driver_calls: int | None
    """Driver calls of the first replay; None if not counted."""

    @property
    def microseconds_per_event(self) -> float:
        """Mean microseconds of an allocation or free."""
        return self.seconds * 1e6 / max(self.events, 1)

    @property
    def reserved_over_used(self) -> float | None:
        """Peak reserved over peak used."""
        return Figures(self.failures, self.peak_used, self.peak_reserved, self.driver_calls).reserved_over_used


class Replay:
    """A trace prepared for an allocator, so that the timed loop does little besides its calls.

    :func:`prepare` makes it; :func:`replay` runs it.
    """

    def __init__(self, trace: Trace, subject: Subject) -> None:
        self._subject = subject
        self._failed = subject.out_of_memory
        streams = dict(zip(dict.fromkeys(event.stream for event in trace.events), subject.streams, strict=False))
        own: dict[int, int] = {}
        steps: list[tuple[int, int, Any]] = []
        for event in trace.events:
            if event.action == "allocate":
                own[event.id] = event.stream
                steps.append((event.nbytes, event.id, streams[event.stream]))
            else:
                # A size of -1 stands for a free; None for its streams stands for the stream of the allocation.
                both = streams[own[event.id]], streams[event.stream]
                steps.append((-1, event.id, None if own[event.id] == event.stream else both))
        # Allocation numbers need not be consecutive.
        slots = {number: slot for slot, number in enumerate(own)}
        self._live: list[Any] = [None] * len(slots)
        self._chunks = [
            [(nbytes, slots[number], stream) for nbytes, number, stream in steps[start : start + _CHUNK]]
            for start in range(0, len(steps), _CHUNK)
        ]
        self.failures: int = 0
        """Failed allocations of the last run."""

    def run(self) -> float:
        """Replay the trace once, then free the remaining allocations. Returns the seconds of the replay alone."""
        self.failures = 0
        self._subject.begin()
        total = 0
        collecting = gc.isenabled()
        gc.disable()
        try:
            for chunk in self._chunks:
                total += self._run(chunk)
        finally:
            if collecting:
                gc.enable()
            self._free_rest()
        return total / 1e9

    def _run(self, steps: list[tuple[int, int, Any]]) -> int:
        subject, failed, live = self._subject, self._failed, self._live
        allocate, free, free_on = subject.allocate, subject.free, subject.free_on
        clock = time.perf_counter_ns
        start = clock()
        for nbytes, slot, stream in steps:
            if nbytes >= 0:
                try:
                    live[slot] = allocate(nbytes, stream)
                except failed:
                    self.failures += 1
            else:
                thing = live[slot]
                live[slot] = None
                if thing is None:
                    continue
                if stream is None:
                    free(thing)
                else:
                    free_on(thing, *stream)
                thing = None
        return clock() - start

    def _free_rest(self) -> None:
        live, free = self._live, self._subject.free
        for slot, thing in enumerate(live):
            if thing is not None:
                live[slot] = None
                free(thing)

    def figures(self) -> Figures:
        """Replay the trace once, and measure the allocator after each allocation."""
        subject, live = self._subject, self._live
        self.failures = 0
        subject.begin()
        used = most_used = most_reserved = calls = 0
        sizes = [0] * len(live)
        for chunk in self._chunks:
            for nbytes, slot, stream in chunk:
                before = subject.calls() if subject.calls else 0
                allocates = nbytes >= 0
                if not allocates and live[slot] is None:
                    continue
                self._run([(nbytes, slot, stream)])
                if subject.calls:
                    calls += subject.calls() - before
                if not allocates:
                    used -= sizes[slot]
                elif live[slot] is not None:
                    sizes[slot] = nbytes
                    used += nbytes
                    most_used = max(most_used, used)
                    if subject.reserved:
                        most_reserved = max(most_reserved, subject.reserved())
        self._free_rest()
        reserved = most_reserved if subject.reserved else None
        return Figures(self.failures, most_used, reserved, calls if subject.calls else None)


@contextlib.contextmanager
def prepare(trace: Trace, on: str | Allocator, device: Device) -> Iterator[Replay]:
    """Prepare a trace for repeated replays on an allocator; a name makes a new allocator.

    :func:`replay` does this, and measures.

    The context of ``device`` is current in the ``with`` block.
    """
    make = ALLOCATORS[on].make if isinstance(on, str) else functools.partial(of_allocator, on)
    with contextlib.ExitStack() as resources:
        resources.enter_context(device.current())
        resources.callback(device.synchronize)
        subject = make(device, trace.streams, resources)
        # All frees have to be complete before the allocator is closed.
        resources.callback(device.synchronize)
        yield Replay(trace, subject)


def figures(trace: Trace, on: str | Allocator, device: Device) -> Figures:
    """Replay a trace once, and measure the allocator after each allocation.

    Examples
    --------
    >>> found = figures(mixed(events=100), pool, device)
    >>> found.peak_reserved >= found.peak_used
    True
    """
    # streamalloc's allocators use the driver of their device, and a traced driver counts calls.
    if isinstance(on, str) and not ALLOCATORS[on].other:
        device = Device(device.ordinal, driver=traced(device.driver))
    with prepare(trace, on, device) as prepared:
        return prepared.figures()


def replay(trace: Trace, on: str | Allocator, device: Device | None = None, *, rounds: int = 3) -> Replayed:
    """Replay a trace on an allocator.

    For a name, two allocators are made: one is measured after each allocation, the other one is timed. A pool of yours
    is measured first and then timed, with the memory that it has reserved.

    Parameters
    ----------
    trace
        The trace to replay.
    on
        A pool, a caching allocator, or a name in :data:`ALLOCATORS`.
    device
        Device of the memory and streams; default: device 0 of the default driver.
    rounds
        Number of timed replays after the first replay.

    Raises
    ------
    ImportError
        The other library is not installed.
    KeyError
        No allocator has this name.
    TypeError, ValueError
        ``trace`` is no trace, or ``rounds`` is less than 1.

    Examples
    --------
    >>> replay(training(), "cached").microseconds_per_event
    """
    if not isinstance(trace, Trace):
        raise TypeError(f"trace must be a Trace, not {type(trace).__name__} ({trace!r}); traces.load() reads one")
    if isinstance(on, str) and on not in ALLOCATORS:
        raise KeyError(f"no allocator has the name {on!r}: there are {', '.join(ALLOCATORS)}")
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: at least one")
    device = Device(0) if device is None else device
    title = ALLOCATORS[on].title if isinstance(on, str) else repr(on)
    found = figures(trace, on, device)
    with prepare(trace, on, device) as prepared:
        seconds = []
        for _ in range(rounds + 1):
            device.synchronize()
            seconds.append(prepared.run())
    return Replayed(title, len(trace.events), statistics.median(seconds[1:]), seconds[0], *found)
