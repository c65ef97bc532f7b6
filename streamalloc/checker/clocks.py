"""The order of operations: vector clocks with one component for each stream and host thread. Pure Python, no driver.

A stream *enters* an operation once everything before the operation is known, usually during the call. If a stream waits
for something that has not happened yet (a value in memory, an event behind such a wait, a host function), its later
operations are queued until then. So operations are checked in a possible order.

All host threads share one clock: threads order each other in many ways that the checker does not record. Work for which
one thread has waited precedes everything that any thread does later.

The driver may order more than the program requests: an allocation runs after the free whose memory it reuses. Clocks do
not contain these choices of the driver. The latest choices are kept in a list, which is searched if an order is
missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from streamalloc.checker.report import Notes

UNORDERED, BY_CHOICE, CERTAIN = range(3)
"""Order of two operations. UNORDERED: none as far as is known. BY_CHOICE: only by a choice that the driver made in this
run. CERTAIN: in every run.
"""

_CHOICES = 256
"""Largest number of the driver's choices that are kept. An order by an older choice counts as :data:`UNORDERED`."""
MOST_WAITS = 8
"""Largest number of waits for events, of each stream and of the host, that reports can name; older ones are dropped."""
_SEARCHES = 2000
"""Largest number of searches through the choices in one run, because each search takes time. After that, an order by
choice counts as :data:`UNORDERED`, with a note.
"""


class Clock:
    """Vector clock of an operation. For each actor (stream or host thread), by its number: time of the actor's last
    operation that precedes the operation.
    """

    __slots__ = ("known",)

    def __init__(self, known: dict[int, int] | None = None) -> None:
        self.known: dict[int, int] = {} if known is None else known

    def copy(self) -> Clock:
        """Return a new clock with the same times."""
        return Clock(self.known.copy())

    def learn(self, other: Clock) -> None:
        """Merge another clock into this clock. If both have a time for one actor, the later time is kept."""
        known = self.known
        get = known.get
        for number, time in other.known.items():
            if get(number, 0) < time:
                known[number] = time

    def common(self, other: Clock) -> Clock:
        """Return the clock of those operations that both clocks contain."""
        get = other.known.get
        return Clock({number: min(time, get(number, 0)) for number, time in self.known.items()})

    def after(self, number: int, time: int) -> bool:
        """Whether the clock contains the operation of actor ``number`` at ``time``."""
        return self.known.get(number, 0) >= time


@dataclass(eq=False, slots=True)
class Actor:
    """Host thread, stream (:class:`TrackedStream`), or stand-in for work of another process. The operations of one
    actor have an order.
    """

    number: int
    name: str
    time: int = field(default=0, init=False)
    """Number of the actor's operations so far."""
    within: TrackedStream | None = field(default=None, init=False)
    """Stream whose host function is running on this thread; None if there is none."""
    is_host: ClassVar[bool] = True

    @property
    def short(self) -> str:
        """Name of the actor without the part that says where it was created."""
        return self.name.partition(" (created")[0]


@dataclass(eq=False, slots=True)
class Obstacle:
    """Condition that streams wait for: the end of queued work, a value in memory, or the return of a host function. The
    obstacle *ends* when the checker records or concludes that the condition is met.
    """

    source: TrackedStream | None = None
    """Stream whose work ends the obstacle; None if the host ends the obstacle, or if the cause is unknown."""
    clock: Clock | None = None
    """Clock of all operations that precede the end of the obstacle; None before the end."""
    waiting: list[TrackedStream] = field(default_factory=list)
    """Streams that wait for this obstacle. :attr:`Timeline.waiting` has those that wait for any obstacle."""


Action: TypeAlias = "Callable[[TrackedStream], None]"


@dataclass(eq=False, slots=True)
class TrackedStream(Actor):
    """Stream, with the clock of its latest operation."""

    context: object
    handle: int
    """The driver's handle of the stream; 1 for a legacy stream, 2 for a per-thread stream, 0 for a stream that only the
    checker has.
    """
    legacy: TrackedStream | None = None
    """The legacy stream of the context if this stream is blocking; None for a non-blocking or legacy stream."""
    clock: Clock = field(default_factory=Clock)
    seen_host: int = -1
    """Version of the host clock (:attr:`Timeline.version`) that was last merged into the stream's clock."""
    seen_legacy: int = 0
    """Time of the legacy stream up to which its work was merged into this stream's clock."""
    peers: dict[TrackedStream, int] | None = None
    """For a legacy stream: its blocking streams, each with the time up to which its work was merged into the legacy
    stream's clock. None for other streams, and for a legacy stream without blocking streams.
    """
    obstacle: Obstacle | None = None
    queue: deque[tuple[Clock | None, Action]] = field(default_factory=deque)
    """Entries queued behind the obstacle, as tuples of clock and action. For an operation: the host clock at its call.
    None for a further wait, and for a mark by which another stream waits for the work before the mark.
    """
    waits: deque[Any] = field(default_factory=lambda: deque(maxlen=MOST_WAITS))
    """The latest waits of the stream for events, see :class:`streamalloc.checker.judge.Wait`."""
    is_host: ClassVar[bool] = False


class Timeline:
    """All streams and host threads of a driver, and the clock of the host."""

    def __init__(self) -> None:
        self.notes: Notes = Notes()
        """Notes on what the checker has not checked."""
        self.host: Clock = Clock()
        self.waiting: dict[TrackedStream, None] = {}
        """Streams that wait for an obstacle."""
        self.version: int = 0
        """Number of changes of the host clock. If it has changed, a stream has to merge the host clock again."""
        self._numbers = 0
        self._streams: dict[TrackedStream, None] = {}
        self.retired: list[TrackedStream] = []
        """Destroyed streams whose work may still run."""
        self.foreign: dict[TrackedStream, None] = {}
        """Streams that other libraries may use, and may order by calls that the checker does not record."""
        self.over: dict[int, int] = {}
        """Time by number of the actor. The actor's operations up to this time count as ordered before everything later:
        the host may have waited for them by a call that the checker does not record.
        """
        self.ended_threads: deque[int] = deque()
        """Numbers of host threads that have ended. Finalisers append to it without taking the lock, which another
        thread may hold.
        """
        self.published: Clock = Clock()
        """Clock of all work whose end other processes can wait for."""
        self.ready: Clock = Clock()
        """Clock of all work of other processes whose end they have announced on their boards (:mod:`.interprocess`)."""
        self._live: set[int] = set()
        """Numbers of the actors that have not ended. All work of an actor that has ended precedes all later work."""
        self._choices: deque[tuple[Clock, int, int]] = deque(maxlen=_CHOICES)
        """Choices of the driver as tuples: clock of the work that came first, number and time of the actor whose
        operation came later.
        """
        self._searches = 0
        self._ready: deque[TrackedStream] = deque()
        self._draining = False

    # -- actors: threads and streams -------------------------------------------------------------------------

    def _number(self) -> int:
        self._numbers += 1
        self._live.add(self._numbers)
        return self._numbers

    def thread(self, name: str) -> Actor:
        """Add a host thread, or an actor that stands for work of another process. Returns the actor."""
        return Actor(self._number(), name)

    def stream(
        self, name: str, context: object = None, legacy: TrackedStream | None = None, handle: int = 0
    ) -> TrackedStream:
        """Add a stream with this name in reports, and return it. ``context``, ``handle``: handle of its context, and
        handle of the stream; None and 0 if unknown. ``legacy``: the legacy stream of the context; None if the new
        stream does not synchronise with the legacy stream.
        """
        made = TrackedStream(self._number(), name, context, handle, legacy)
        self._streams[made] = None
        if legacy is not None:
            if legacy.peers is None:
                legacy.peers = {}
            legacy.peers[made] = 0
        return made

    def retire(self, stream: TrackedStream) -> None:
        """Record that a stream was destroyed. Its queued work may still run."""
        if stream.legacy is not None and stream.legacy.peers is not None and stream.obstacle is None:
            # The legacy stream must stay ordered after its work.
            stream.legacy.clock.learn(stream.clock)
            del stream.legacy.peers[stream]
        self.retired.append(stream)

    # -- order of operations ---------------------------------------------------------------------------------

    def certain(self, clock: Clock, number: int, time: int) -> bool:
        """Whether the operation at ``time`` of the actor ``number`` precedes, in every run, an operation with the clock
        ``clock``.
        """
        # A stream is removed once the host has waited for all its work, so later work comes after it.
        return clock.known.get(number, 0) >= time or number not in self._live or self.over.get(number, 0) >= time

    def is_known(self, number: int, time: int) -> bool:
        """Whether the host is known to have waited for the operation at ``time`` of the actor ``number``."""
        return self.host.after(number, time) or number not in self._live

    def may_be_known(self, number: int, time: int) -> bool:
        """Whether the host has waited for the operation at ``time`` of the actor ``number``, or may have waited by a
        call that the checker does not record.
        """
        return self.certain(self.host, number, time)

    def forget_uses(self, uses: dict[int, Any]) -> None:
        """Remove from ``uses``, a table of operations by actor number, those for which the host has waited, because all
        later work comes after them.
        """
        for number, use in tuple(uses.items()):
            if self.may_be_known(number, use.time):
                del uses[number]

    def may_be_seen(self, mark: Obstacle) -> bool:
        """Whether the host has waited for ``mark``, a result of :meth:`record`, or may have waited by a call that the
        checker does not record.
        """
        clock, source = mark.clock, mark.source
        if clock is None or source is None:
            return False
        number, time = source.number, clock.known[source.number]
        return self.may_be_known(number, time) or any(one.clock.after(number, time) for one in self.foreign)

    def order(self, clock: Clock, number: int, time: int) -> int:
        """Return the order of two operations: UNORDERED, BY_CHOICE or CERTAIN. The earlier one is that of the actor
        ``number`` at ``time``; the later one has the clock ``clock``. After many searches through the driver's choices,
        UNORDERED is returned in place of BY_CHOICE, with a note.
        """
        if self.certain(clock, number, time):
            return CERTAIN
        if not self._choices:
            return UNORDERED
        if self._searches == _SEARCHES:
            self.notes.add("luck")
            return UNORDERED
        self._searches += 1
        return BY_CHOICE if self._is_chosen(clock, number, time) else UNORDERED

    def before_next(self, stream: TrackedStream) -> Clock:
        """Return the clock that the next operation of ``stream`` will have. The stream must not be waiting for an
        obstacle.
        """
        clock = stream.clock.copy()
        clock.learn(self.host)
        for other in (stream.legacy, *(stream.peers or ()), *(self.foreign if stream in self.foreign else ())):
            if other is not None:
                clock.learn(other.clock)
        return clock

    def _is_chosen(self, clock: Clock, number: int, time: int) -> bool:
        """Whether choices of the driver lead, one after another, from the operation at ``time`` of the actor ``number``
        to ``clock``.
        """
        left, ends = list(self._choices), [clock]
        while ends:
            end = ends.pop()
            rest = []
            for choice in left:
                before, later, at = choice
                if not end.after(later, at):
                    rest.append(choice)
                elif before.after(number, time):
                    return True
                else:
                    ends.append(before)
            left = rest
        return False

    def chosen(self, before: Clock, stream: TrackedStream) -> None:
        """Record a choice of the driver: the driver runs the latest operation of ``stream`` after all operations in
        ``before``.
        """
        self._choices.append((before, stream.number, stream.time))

    def submit(self, stream: TrackedStream, action: Action) -> None:
        """Queue an operation of a stream: ``action(stream)`` is called once the stream's clock contains all operations
        that precede the operation.

        The call is made now, unless the stream, or a stream with which it synchronises, waits for an obstacle. Then the
        call is made when the obstacle ends.
        """
        legacy = stream.legacy
        if self.waiting:
            if legacy is not None and legacy.obstacle is not None:
                self._wait(stream, self._mark(legacy))
            for peer in tuple(stream.peers or ()):
                if peer.obstacle is not None:
                    self._wait(stream, self._mark(peer))
            if stream.obstacle is not None:
                stream.queue.append((self.host.copy(), action))
                return
        if stream.seen_host != self.version:
            stream.clock.learn(self.host)
            stream.seen_host = self.version
        self._enter(stream)
        action(stream)

    def _enter(self, stream: TrackedStream) -> None:
        if stream in self.foreign:
            for other in self.foreign:
                stream.clock.learn(other.clock)
        legacy = stream.legacy
        if legacy is not None:
            if stream.seen_legacy < legacy.time:
                stream.clock.learn(legacy.clock)
                stream.seen_legacy = legacy.time
        elif stream.peers:
            for peer, heard in stream.peers.items():
                if heard < peer.time:
                    stream.clock.learn(peer.clock)
                    stream.peers[peer] = peer.time
        self.next(stream)

    def next(self, stream: TrackedStream) -> None:
        """Begin the next operation of ``stream``: the stream's time grows by 1."""
        time = stream.time = stream.time + 1
        stream.clock.known[stream.number] = time

    def _wait(self, stream: TrackedStream, obstacle: Obstacle) -> None:
        """Queue a wait for an obstacle behind the waits that the stream already has."""
        if stream.obstacle is not None:
            stream.queue.append((None, lambda stream: self._meet(stream, obstacle)))
        else:
            self._meet(stream, obstacle)

    def _meet(self, stream: TrackedStream, obstacle: Obstacle) -> None:
        if obstacle.clock is not None:
            stream.clock.learn(obstacle.clock)
        else:
            stream.obstacle = obstacle
            obstacle.waiting.append(stream)
            self.waiting[stream] = None

    def _mark(self, stream: TrackedStream) -> Obstacle:
        """Return an obstacle that ends when the operations that are queued now on ``stream`` have run. The stream waits
        for something already.
        """
        mark = Obstacle(stream)
        stream.queue.append((None, lambda stream: self.end(mark, stream.clock)))
        return mark

    def record(self, stream: TrackedStream) -> Obstacle:
        """Queue a mark on ``stream``. Returns the mark: an obstacle that ends when the work before it has run."""
        mark = Obstacle(stream)
        self.submit(stream, lambda stream: self.end(mark, stream.clock))
        return mark

    def wait(self, stream: TrackedStream, obstacle: Obstacle) -> None:
        """Queue a wait of a stream for an obstacle."""
        self.submit(stream, lambda stream: self._meet(stream, obstacle))

    # -- ends of waits (obstacles) ---------------------------------------------------------------------------

    def end(self, obstacle: Obstacle, clock: Clock) -> None:
        """Record that an obstacle has ended, after the operations in ``clock``.

        The streams that wait for the obstacle continue. A second call for the same obstacle has no effect.
        """
        if obstacle.clock is not None:
            return
        obstacle.clock = clock.copy()
        for stream in obstacle.waiting:
            stream.obstacle = None
            self.waiting.pop(stream, None)
            stream.clock.learn(obstacle.clock)
            self._ready.append(stream)
        obstacle.waiting.clear()
        if not self._draining:
            self._drain()

    def _drain(self) -> None:
        self._draining = True
        try:
            while self._ready:
                stream = self._ready.popleft()
                while stream.obstacle is None and stream.queue:
                    host, action = stream.queue.popleft()
                    if host is not None:
                        stream.clock.learn(host)
                        self._enter(stream)
                    action(stream)
        finally:
            self._draining = False

    def force(self, stream: TrackedStream) -> None:
        """Record that the host has found ``stream`` idle: all obstacles for which the stream waits end, and its queued
        operations run.
        """
        while stream.obstacle is not None:
            self.force_mark(stream.obstacle)

    def force_mark(self, obstacle: Obstacle) -> None:
        """Record that the host has found that an obstacle has ended. If a stream ends it, the obstacles for which this
        stream waits end first. If the cause is unknown, all work queued before counts as done, with a note.
        """
        source = obstacle.source
        while source is not None and obstacle.clock is None and source.obstacle is not None:
            self.force_mark(source.obstacle)
        if obstacle.clock is not None:
            return
        if source is None:
            # The cause is unknown. It may be any work that was queued before, so all that work counts as done.
            self.notes.add("waits")
        self.end(obstacle, self.host if source is not None else self.everything())

    def everything(self) -> Clock:
        """Return the clock of all operations so far, without those that are queued behind obstacles."""
        clock = self.host.copy()
        for stream in self._streams:
            clock.learn(stream.clock)
        return clock

    # -- the host --------------------------------------------------------------------------------------------

    def host_acts(self, thread: Actor) -> None:
        """Begin the next operation of ``thread``, a host thread: the thread's time grows by 1."""
        thread.time += 1
        self.host.known[thread.number] = thread.time
        self.version += 1

    def host_observes(self, clock: Clock) -> None:
        """Record that the host has waited for all operations in ``clock``. If more than 32 threads and streams have
        ended, the threads are removed, and the streams whose work the host has waited for.
        """
        self.host.learn(clock)
        self.version += 1
        if len(self.retired) + len(self.ended_threads) > 32:
            self._forget()

    def _forget(self) -> None:
        """Remove threads that have ended, and destroyed streams whose work the host has waited for."""
        known = self.host.known
        while self.ended_threads:
            self._live.discard(self.ended_threads.popleft())
        over = [one for one in self.retired if not one.queue and known.get(one.number, 0) >= one.time]
        self.retired = [one for one in self.retired if one not in over]
        for stream in over:
            del self._streams[stream]
            self.foreign.pop(stream, None)
            self.over.pop(stream.number, None)
        self.forget({one.number for one in over})

    def forget(self, numbers: set[int]) -> None:
        """Remove actors that have ended from the clocks of the host, of streams and of other processes. ``numbers``:
        the actors that end now. Clocks of single operations, such as event records, keep their times.
        """
        self._live -= numbers
        # Actors that were removed before are removed again, because clocks of older records may have added them again.
        for clock in (self.host, self.published, self.ready, *(stream.clock for stream in self._streams)):
            for number in [one for one in clock.known if one not in self._live]:
                del clock.known[number]
