"""What comes before what: vector clocks with one component for each stream and host thread. Pure Python, no driver.

A stream *enters* an operation when all that comes before it is known. Usually that is when the call is made. Where a
stream waits for something that has not been seen yet (a word that nobody has written, an event behind such a wait, a
host function), what follows in it is kept until then, so that operations are judged in an order that is possible.

What one host thread has learned, all threads know from then on: Python gives threads many ways to tell each other, of
which nothing is seen here. What the host has synchronised with comes before all that it does later.

The driver orders more than a program asks for, such as an allocation after the free whose memory it gets. Clocks know
nothing of that: its latest choices are kept apart, and looked through where an order is missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

__all__ = ["BY_CHOICE", "CERTAIN", "UNORDERED", "Actor", "Clock", "Obstacle", "Stream", "Timeline"]

UNORDERED, BY_CHOICE, CERTAIN = range(3)
"""Whether one thing comes before another: no; in this run, as the driver chose; always."""

_CHOICES = 256
"""How many of the driver's choices are kept."""
_SEARCHES = 2000
"""How often they are looked through: a program in which so much is missing has other things to mend first."""


class Clock:
    """All that comes before a point: of each actor, by its number, the time of the last operation."""

    __slots__ = ("known",)

    def __init__(self, known: dict[int, int] | None = None) -> None:
        self.known: dict[int, int] = {} if known is None else known

    def copy(self) -> Clock:
        """The same, for keeping."""
        return Clock(self.known.copy())

    def learn(self, other: Clock) -> None:
        """All that comes before the other comes before this."""
        known = self.known
        get = known.get
        for number, time in other.known.items():
            if get(number, 0) < time:
                known[number] = time

    def common(self, other: Clock) -> Clock:
        """What comes before either of the two, whichever it is."""
        get = other.known.get
        return Clock({number: min(time, get(number, 0)) for number, time in self.known.items()})

    def after(self, number: int, time: int) -> bool:
        """Whether an operation comes before."""
        return self.known.get(number, 0) >= time


class Actor:
    """Whoever does things one after the other: a stream or a host thread."""

    __slots__ = ("name", "number", "time", "within")

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.time: int = 0
        self.within: Stream | None = None
        """The stream that has called the function of the host which a thread is in."""

    def __repr__(self) -> str:
        return f"<{self.name}, {self.time} operations>"


class Obstacle:
    """What streams wait for and nobody has seen yet; over once it was.

    ``source`` is the stream in which it will come about; None where the host brings it about.
    """

    __slots__ = ("clock", "source", "waiters")

    def __init__(self, source: Stream | None = None) -> None:
        self.source = source
        self.clock: Clock | None = None
        """All that comes before what follows; None until it is over."""
        self.waiters: list[Stream] = []

    @property
    def over(self) -> bool:
        """Whether it is no obstacle any more."""
        return self.clock is not None


Action = Callable[["Stream"], None]


class Stream(Actor):
    """A stream, and what comes before its next operation."""

    __slots__ = ("clock", "context", "legacy", "obstacle", "peers", "queue", "seen_host", "seen_legacy")

    def __init__(self, number: int, name: str, context: object) -> None:
        super().__init__(number, name)
        self.context = context
        self.clock: Clock = Clock()
        self.seen_host: int = -1
        """How much of what the host knows it has heard of."""
        self.legacy: Stream | None = None
        """The legacy stream of its context, where the two wait for each other."""
        self.seen_legacy: int = 0
        self.peers: dict[Stream, int] | None = None
        """Of a legacy stream: the streams that wait for it and it for them, and how much it has heard of each."""
        self.obstacle: Obstacle | None = None
        self.queue: deque[tuple[Clock | None, Action]] = deque()
        """What it will do behind the obstacle, and what the host knew when it asked for that."""


class Timeline:
    """All streams, and what the host knows of them."""

    def __init__(self) -> None:
        self.host: Clock = Clock()
        self.held: dict[Stream, None] = {}
        """The streams with an obstacle."""
        self.version: int = 0
        """Goes up with what the host learns."""
        self._numbers = 0
        self._streams: dict[Stream, None] = {}
        self.retired: list[Stream] = []
        """Streams that were destroyed, of which the host does not know that all is done."""
        self.foreign: dict[Stream, None] = {}
        """The streams that other code may have put into any order."""
        self.over: dict[int, int] = {}
        """Of such streams, until when the host may have waited for what they did."""
        self._gone: set[int] = set()
        self._choices: deque[tuple[Clock, int, int]] = deque(maxlen=_CHOICES)
        """What comes before which operation, as the driver has chosen."""
        self._searches = 0
        self._ready: deque[Stream] = deque()
        self._draining = False

    # -- actors ----------------------------------------------------------------------------------------------

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def thread(self, name: str) -> Actor:
        """A host thread, or what another process does."""
        return Actor(self._number(), name)

    def stream(self, name: str, context: object = None, legacy: Stream | None = None) -> Stream:
        """A stream. ``legacy``: the legacy stream that it waits for and that waits for it."""
        made = Stream(self._number(), name, context)
        self._streams[made] = None
        made.legacy = legacy
        if legacy is not None:
            if legacy.peers is None:
                legacy.peers = {}
            legacy.peers[made] = 0
        return made

    def retire(self, stream: Stream) -> None:
        """Nothing will be queued in a stream any more."""
        if stream.legacy is not None and stream.legacy.peers is not None and stream.obstacle is None:
            # All that it did comes before what the legacy stream does next.
            stream.legacy.clock.learn(stream.clock)
            del stream.legacy.peers[stream]
        self.retired.append(stream)

    # -- order -----------------------------------------------------------------------------------------------

    def certain(self, clock: Clock, number: int, time: int) -> bool:
        """Whether an operation of an actor always comes before what has this clock."""
        # A stream is gone when the host knows all that it did, and with it everything that is queued since.
        return clock.known.get(number, 0) >= time or number in self._gone or self.over.get(number, 0) >= time

    def is_known(self, number: int, time: int) -> bool:
        """Whether the host knows of the end of an operation by what was seen."""
        return self.host.after(number, time) or number in self._gone

    def order(self, clock: Clock, number: int, time: int) -> int:
        """Whether an operation of an actor comes before what has this clock: one of the constants of this module."""
        if self.certain(clock, number, time):
            return CERTAIN
        if not self._choices or self._searches == _SEARCHES:
            return UNORDERED
        self._searches += 1
        return BY_CHOICE if self._is_chosen(clock, number, time) else UNORDERED

    def before_next(self, stream: Stream) -> Clock:
        """All that comes before what a stream queues next, unless it waits for something."""
        clock = stream.clock.copy()
        clock.learn(self.host)
        for other in (stream.legacy, *(stream.peers or ()), *(self.foreign if stream in self.foreign else ())):
            if other is not None:
                clock.learn(other.clock)
        return clock

    def _is_chosen(self, clock: Clock, number: int, time: int) -> bool:
        """Whether some of the driver's choices, one after the other, lead from an operation to a clock."""
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

    def chosen(self, before: Clock, stream: Stream) -> None:
        """The driver has chosen that the latest operation of a stream comes after a clock."""
        self._choices.append((before, stream.number, stream.time))

    def submit(self, stream: Stream, action: Action) -> None:
        """Have a stream do something: ``action(stream)`` is called when its clock says all that comes before."""
        legacy = stream.legacy
        if self.held:
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

    def _enter(self, stream: Stream) -> None:
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

    def next(self, stream: Stream) -> None:
        """What a stream does from now on comes after what it has done."""
        time = stream.time = stream.time + 1
        stream.clock.known[stream.number] = time

    def _wait(self, stream: Stream, obstacle: Obstacle) -> None:
        """Have a stream wait, behind what it waits for already."""
        if stream.obstacle is not None:
            stream.queue.append((None, lambda stream: self._meet(stream, obstacle)))
        else:
            self._meet(stream, obstacle)

    def _meet(self, stream: Stream, obstacle: Obstacle) -> None:
        if obstacle.clock is not None:
            stream.clock.learn(obstacle.clock)
        else:
            stream.obstacle = obstacle
            obstacle.waiters.append(stream)
            self.held[stream] = None

    def _mark(self, stream: Stream) -> Obstacle:
        """The end of what a held stream has queued."""
        mark = Obstacle(stream)
        stream.queue.append((None, lambda stream: self.end(mark, stream.clock)))
        return mark

    def record(self, stream: Stream) -> Obstacle:
        """A mark after all that a stream has queued; over when the stream gets there."""
        mark = Obstacle(stream)
        self.submit(stream, lambda stream: self.end(mark, stream.clock))
        return mark

    def wait(self, stream: Stream, obstacle: Obstacle) -> None:
        """Have a stream wait until an obstacle is over."""
        self.submit(stream, lambda stream: self._meet(stream, obstacle))

    # -- obstacles -------------------------------------------------------------------------------------------

    def end(self, obstacle: Obstacle, clock: Clock) -> None:
        """An obstacle is over; what follows comes after all of ``clock``."""
        if obstacle.clock is not None:
            return
        obstacle.clock = clock.copy()
        for stream in obstacle.waiters:
            stream.obstacle = None
            self.held.pop(stream, None)
            stream.clock.learn(obstacle.clock)
            self._ready.append(stream)
        obstacle.waiters.clear()
        if not self._draining:
            self._drain()

    def _drain(self) -> None:
        self._draining = True
        try:
            self._run_ready()
        finally:
            self._draining = False

    def _run_ready(self) -> None:
        while self._ready:
            stream = self._ready.popleft()
            while stream.obstacle is None and stream.queue:
                host, action = stream.queue.popleft()
                if host is not None:
                    stream.clock.learn(host)
                    self._enter(stream)
                action(stream)

    def force(self, stream: Stream, but: Callable[[Obstacle], bool] = lambda obstacle: False) -> None:
        """The host has seen that a stream has nothing left to do, so that whatever it waited for is over."""
        while stream.obstacle is not None and not but(stream.obstacle):
            self._force(stream.obstacle)

    def _force(self, obstacle: Obstacle) -> None:
        source = obstacle.source
        while source is not None and obstacle.clock is None and source.obstacle is not None:
            self._force(source.obstacle)
        # Whoever was behind it that nobody has told of, what was queued before may all have come first.
        self.end(obstacle, self.host if source is not None else self.everything())

    def everything(self) -> Clock:
        """All that any stream has come to."""
        clock = self.host.copy()
        for stream in self._streams:
            clock.learn(stream.clock)
        return clock

    def force_mark(self, obstacle: Obstacle) -> None:
        """The host has seen that an obstacle is over."""
        if obstacle.clock is None:
            self._force(obstacle)

    # -- the host --------------------------------------------------------------------------------------------

    def host_acts(self, thread: Actor) -> None:
        """A host thread does something itself, at its time from now on."""
        thread.time += 1
        self.host.known[thread.number] = thread.time
        self.version += 1

    def host_observes(self, clock: Clock) -> None:
        """The host knows that all of ``clock`` has happened."""
        self.host.learn(clock)
        self.version += 1
        if len(self.retired) > 32:
            self._forget()

    def _forget(self) -> None:
        """Let go of the streams that were destroyed and that the host knows to have nothing left to do."""
        known = self.host.known
        over = [one for one in self.retired if not one.queue and known.get(one.number, 0) >= one.time]
        self.retired = [one for one in self.retired if one not in over]
        numbers = {one.number for one in over}
        self._gone |= numbers
        for stream in over:
            del self._streams[stream]
            self.foreign.pop(stream, None)
        self.forget(numbers)

    def forget(self, numbers: set[int], *others: Clock) -> None:
        """Take out of all clocks, and of ``others``, what nobody asks for any more."""
        for clock in (self.host, *others, *(stream.clock for stream in self._streams)):
            for number in numbers & clock.known.keys():
                del clock.known[number]
