"""Streams, their clocks, and the worker thread that runs their operations.

Every stream numbers its operations. What a stream is ordered after is kept as a vector clock: for each other
stream the highest number that certainly comes first. The host has such a clock too, raised by synchronising
calls only.

An operation runs in the thread that submits it when nothing holds its stream; otherwise it is queued, and a
daemon thread carries it out as soon as it may, whether or not the host makes further calls. All state here is
guarded by the lock of :mod:`.call_lock`, which a host function never holds.
"""

from __future__ import annotations

import _thread
import contextlib
import heapq
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from . import call_lock
from .errors import DeadlockError

Clock = dict[int, int]
"""Stream id -> sequence number."""

POLL_SECONDS = 0.0003
"""Seconds between reads of a value in memory that a stream waits for."""
_IDLE_SECONDS = 1.0
"""Seconds without work after which the worker thread ends."""
_NAP_SECONDS = 0.05
"""Seconds; longest sleep before a condition is checked again."""


def merge(clock: Clock, other: Clock) -> None:
    """Raise each entry of ``clock`` to that of ``other``."""
    for stream, seq in other.items():
        if clock.get(stream, 0) < seq:
            clock[stream] = seq


class Operation:
    """Work in a stream. Subclasses say when it may start, and do it in one or several steps."""

    heavy = False
    """Too long for the thread that submits it: the worker does it, with turns for other streams."""
    counts = True
    """The stream counts as busy while this is queued."""
    is_command = True
    """It goes to the device when it is submitted; other operations go together with the next command."""
    polled = False
    """Its condition is polled, because no call announces it."""
    runs = False
    """It uses memory now, on a thread of its own."""
    seq = 0
    after: tuple[tuple[Stream, int], ...] = ()
    """Operations of other streams that must be done first."""

    def held(self) -> bool:
        """Whether a reason other than earlier operations keeps it from running."""
        return False

    def step(self) -> bool:
        """Do some of the work; True when all is done."""
        return True

    def touches(self, start: int, end: int) -> bool:
        """Whether it has a byte of a range of simulated addresses to read or write."""
        return False


class Call(Operation):
    """Work done in one step by a function."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def step(self) -> bool:
        self._function()
        return True


class Wait(Operation):
    """A wait for operations of other streams."""

    counts = is_command = False


class Until(Operation):
    """Holds its stream until a polled condition is true."""

    polled = True

    def __init__(self, condition: Callable[[], bool]) -> None:
        self._condition = condition

    def held(self) -> bool:
        return not self._condition()


class HostFunction(Operation):
    """Runs a function in a thread of its own, and holds its stream until it returns."""

    def __init__(self, timeline: Timeline, function: Callable[[], object]) -> None:
        self._timeline = timeline
        self._function = function
        self._state = "waiting"

    def held(self) -> bool:
        return self._state == "running"

    def step(self) -> bool:
        if self._state == "waiting":
            self._state = "running"
            threading.Thread(target=self._run, name="streamalloc host function", daemon=True).start()
        return self._state == "returned"

    def _run(self) -> None:
        try:
            self._function()
        finally:
            call_lock.enter()
            self._state = "returned"
            self._timeline.announce()
            call_lock.leave()


class Stream:
    """A queue of operations. ``context`` is the owner, which the timeline does not use."""

    def __init__(self, timeline: Timeline, handle: int, context: Any, blocking: bool, priority: int) -> None:
        self.timeline = timeline
        self.id: int = next(timeline.ids)
        self.handle = handle
        self.context = context
        self.blocking = blocking
        self.priority = priority
        self.legacy: Stream | None = None  # the legacy stream that a blocking one takes turns with
        self.peers: dict[Stream, None] | None = None  # of a legacy stream: the blocking streams of its context
        self.queue: deque[Operation] = deque()
        self.seq: int = 0
        self.done: int = 0
        self.last_free: int = 0
        self.marked: int = 0
        """The last command that was reached."""
        self.clock: Clock = {}
        self.capture: Any = None
        self.barrier: tuple[tuple[Stream, int], ...] = ()
        """Operations of other streams that the next operation waits for."""
        self.attributes: dict[int, bytes] = {}
        """Bytes of stream attributes without effect here, by number."""
        self.destroyed = False

    @property
    def idle(self) -> bool:
        """Whether all work is done. For the legacy stream, that of blocking streams counts too."""
        if self.done < self.seq:
            return False
        return self.peers is None or all(peer.done >= peer.seq for peer in self.peers)

    @property
    def known(self) -> int:
        """Up to which of its operations others know that these have happened. A mark tells; it goes out with the next
        command, behind what that waits for. A stream that has nothing left to do needs none (observed on H200:
        test_reuse).
        """
        queue = self.queue
        if not any(operation.counts for operation in queue):
            return self.done
        head = queue[0]
        reached = head.is_command and all(other.done >= seq for other, seq in head.after)
        return self.done if reached else self.marked

    def comes_after(self, other: int) -> int:
        """Sequence number of another stream up to which this stream is ordered after it."""
        return self.clock.get(other, 0)

    def done_with(self) -> Clock:
        """The clock once all work of the stream is done. Other preceding work counts from the next submission on only,
        except in the legacy stream (observed on H200: test_placements).
        """
        if self.peers is not None:
            self.catch_up()
        clock = dict(self.clock)
        clock[self.id] = self.seq
        return clock

    def catch_up(self, clock: Clock | None = None) -> tuple[tuple[Stream, int], ...]:
        """Merge the order that the legacy stream implies into ``clock``, by default the own clock. Returns its
        unfinished operations.
        """
        if clock is None:
            clock = self.clock
        if self.peers is not None:
            others: Iterable[Stream] = self.peers
        elif self.legacy is not None:
            others = (self.legacy,)
        else:
            return ()
        pending = []
        for other in others:
            learn(clock, other)
            if other.done < other.seq:
                pending.append((other, other.seq))
        return tuple(pending)

    def look(self) -> None:
        """Merge the order that the legacy stream implies, without work. In the legacy stream this counts as an
        operation.
        """
        self.catch_up()
        if self.peers is not None:
            self.seq += 1
            if self.queue:
                self.queue[-1].seq = self.seq
            else:
                self.done = self.seq

    def submit(
        self,
        operation: Operation,
        after: tuple[tuple[Stream, int], ...] = (),
        clock: Clock | None = None,
        joins: bool = True,
    ) -> int:
        """Append an operation, which also waits for ``after``; it can run before this returns. The order of the legacy
        stream goes into ``clock`` if given, and applies only with ``joins``.
        """
        if joins and (self.legacy is not None or self.peers is not None):
            works = operation.is_command or bool(after)
            if works and self.legacy is not None and self.legacy.id in self.timeline.ranks:
                self.timeline.rank(self)
            after += self.catch_up(clock)
        if self.barrier:
            after += self.barrier
            self.barrier = ()
        if after:
            after = tuple((other, seq) for other, seq in after if other.done < seq and other is not self)
        self.seq = seq = self.seq + 1
        later = self.queue or after or operation.heavy or self.timeline.seeded
        if not later and not operation.held() and operation.step():
            self.done = seq
            if operation.is_command:
                self.marked = seq
            return seq
        operation.seq = seq
        operation.after = after
        self.queue.append(operation)
        self.timeline.hold(self)
        return seq


def learn(clock: Clock, other: Stream) -> None:
    """Merge the clock of ``other`` and all its operations into ``clock``."""
    if clock.get(other.id, 0) < other.seq:
        merge(clock, other.clock)
        clock[other.id] = other.seq


class Timeline:
    """All streams of a machine, the host's clock, and the worker thread."""

    def __init__(self, seed: int | None) -> None:
        self.host: Clock = {}
        self.on_close: Callable[[], None] | None = None
        self.closed: bool = False
        self._gone: set[int] = set()
        self.caller: call_lock.Caller = call_lock.Caller()
        """Thread that makes the current call."""
        self._asleep: list[_thread.LockType] = []
        """One lock for each thread that waits for a change; released to wake it."""
        self._waiters = 0
        self._busy: dict[int, Stream] = {}
        self.streams: dict[int, Stream] = {}
        self.ranks: dict[int, int] = {}
        """The places of streams, by their numbers: in this order pools look at them. A stream gets the first free place
        when it first uses any pool, also in a capture; one that takes turns with the legacy stream already with its
        first work or wait, where that has a place (observed on H200: test_placements)."""
        self._free_ranks: list[int] = []
        self.ids: Iterator[int] = itertools.count(1)
        self._worker: threading.Thread | None = None
        self._random = None if seed is None else random.Random(seed)
        self.seeded: bool = seed is not None

    def adopt(self, stream: Stream) -> Stream:
        """Register a stream."""
        self.streams[stream.id] = stream
        return stream

    def rank(self, stream: Stream) -> None:
        """Rank a stream at its first use of a pool."""
        if stream.id not in self.ranks:
            self.ranks[stream.id] = heapq.heappop(self._free_ranks) if self._free_ranks else len(self.ranks)

    def executed(self, stream: int) -> int:
        """Sequence number up to which a stream is done; all of it for a destroyed stream."""
        found = self.streams.get(stream)
        return 1 << 62 if found is None else found.known

    def outlived(self, stream: int) -> int:
        """All of a destroyed stream, nothing of a live one: frees of a destroyed stream have happened (H200:
        test_reuse).
        """
        return 0 if stream in self.streams else 1 << 62

    def retire(self, stream: Stream) -> None:
        """Forget a destroyed stream as soon as it has nothing left to do."""
        stream.destroyed = True
        if not stream.queue:
            self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        """Remove a stream whose work is done, also from clocks (:meth:`executed`)."""
        self.streams.pop(stream.id, None)
        rank = self.ranks.pop(stream.id, None)
        if rank is not None:
            heapq.heappush(self._free_ranks, rank)
        self._gone.add(stream.id)
        if len(self._gone) > len(self.streams) + 8:  # now and then: it takes as long as there are streams
            for clock in (self.host, *(other.clock for other in self.streams.values())):
                for number in [number for number in clock if number in self._gone]:
                    del clock[number]
            self._gone.clear()

    # -- progress --------------------------------------------------------------------------------------------

    def hold(self, stream: Stream) -> None:
        """Register a stream with queued work for the worker."""
        self._busy[stream.id] = stream
        if self._worker is None and not self.closed:
            # the thread refers to the timeline only, so it does not keep the driver alive
            worker = threading.Thread(target=self._work, name="streamalloc simulated device", daemon=True)
            with contextlib.suppress(RuntimeError):  # no new threads while the interpreter exits
                worker.start()
                self._worker = worker
        else:
            self.announce()

    def announce(self) -> None:
        """Wake the worker and all waiting threads."""
        asleep, self._asleep = self._asleep, []
        for one in asleep:
            one.release()

    def _sleep(self, seconds: float) -> None:
        """Release the lock until the next :meth:`announce`, or for this time."""
        woken = _thread.allocate_lock()
        woken.acquire()
        self._asleep.append(woken)
        call_lock.sleep(woken, seconds)
        if woken in self._asleep:
            self._asleep.remove(woken)

    def pump(self, heavy: bool = False) -> bool:
        """Run the operations that can run now. True if there was one."""
        progress = False
        again = True
        while again:
            again = False
            for stream in list(self._busy.values()):
                if self._advance(stream, heavy):
                    progress = again = True
            again = again and not heavy
        if progress and self._waiters:
            self.announce()
        return progress

    def run_down(self) -> None:
        """Release the lock and wait until each unfinished operation is held; with a seed, only for those that run."""

        def is_down() -> bool:
            heads = [one.queue[0] for one in self._busy.values() if one.queue]
            return not any(one.runs or (not self.seeded and self._may_run(one)) for one in heads)

        self.wait(is_down)

    def _advance(self, stream: Stream, heavy: bool) -> bool:
        progress = False
        queue = stream.queue
        while queue:
            operation = queue[0]
            if not self._may_run(operation) or (operation.heavy and not heavy):
                break
            if not operation.step():
                progress = progress or operation.heavy
                break
            queue.popleft()
            stream.done = operation.seq
            if operation.is_command:
                stream.marked = operation.seq
            progress = True
            if operation.heavy or self._random is not None:
                break
        if not queue:
            self._busy.pop(stream.id, None)
            if stream.destroyed:
                self._forget(stream)
        return progress

    @staticmethod
    def _may_run(operation: Operation) -> bool:
        return all(other.done >= seq for other, seq in operation.after) and not operation.held()

    def _work(self) -> None:
        quiet_since = time.monotonic()
        call_lock.enter()
        try:
            while not self.closed:
                progress = self.pump(heavy=True) if self._random is None else self._run_random(self._random)
                if progress:
                    quiet_since = time.monotonic()
                    # release the lock for a moment for other threads
                    self._sleep(0.00002)
                elif any(stream.queue and stream.queue[0].polled for stream in self._busy.values()):
                    self._sleep(POLL_SECONDS)
                elif self._busy:
                    self._sleep(_NAP_SECONDS if self._random is None else POLL_SECONDS)
                elif time.monotonic() - quiet_since > _IDLE_SECONDS:
                    break
                else:
                    self._sleep(_IDLE_SECONDS)
            self._worker = None
            if self.closed and self.on_close is not None:
                self.on_close()
        finally:
            call_lock.leave()

    def _run_random(self, chance: random.Random) -> bool:
        """Run one operation of a random stream, or none for a while: each is a legal order."""
        ready = [s for _, s in sorted(self._busy.items()) if s.queue and self._may_run(s.queue[0])]
        if not ready:
            return False
        if chance.random() < 0.3:
            self._sleep(chance.random() * 0.001)
            return False
        progress = self._advance(chance.choice(ready), heavy=True)
        if progress and self._waiters:
            self.announce()
        return progress

    def wait(self, finished: Callable[[], bool], polled: bool = False) -> None:
        """Block the calling thread, with the lock released, until ``finished()``; ``polled``: nobody here announces
        that.
        """
        caller = self.caller
        self._waiters += 1
        try:
            while not finished():
                if self.closed:
                    return
                if caller.in_kernel:
                    raise DeadlockError("a kernel waits for work, which may be its own end")
                if self._random is None and self.pump():
                    continue
                often = polled or any(stream.queue and stream.queue[0].polled for stream in self._busy.values())
                self._sleep(POLL_SECONDS if often else _NAP_SECONDS)
                self.caller = caller
        finally:
            self._waiters -= 1

    def close(self) -> None:
        """Stop; ``on_close`` is called once no operation can run any more."""
        if self.closed:
            return
        self.closed = True
        if self._worker is None:
            if self.on_close is not None:
                self.on_close()
        else:
            self.announce()
