"""Streams as queues of operations, their clocks, and the worker thread that runs the operations.

Every stream (:class:`Stream`) numbers its operations. Each stream has a vector clock: for each other stream, the
highest number of an operation that certainly runs before the stream's next operation. The host also has such a clock,
which only synchronising calls advance. These say how far a stream has come, or must have come; pools read the last five
by the rules of :mod:`.allocator`:

=============  ======================================================  =================================================
Name           Grows                                                   Read by
=============  ======================================================  =================================================
``seq``        when an operation is submitted                          the clocks of those that wait for the stream
``done``       when an operation has finished                          operations that wait for it, and queries
``marked``     when a command has finished                             ``known``
``known``      is ``done`` if a mark shows that, otherwise ``marked``  rule 4
``clock``      when the stream is ordered after another one            rule 3
``last_free``  when memory of a pool is freed in the stream            rule 6: what the allocating stream waits for
rank           not: it is given once, until the stream ends            rules 3, 4, 6: the order of the streams
=============  ======================================================  =================================================

An operation runs on the submitting thread if nothing delays its stream. Otherwise it is queued, and a daemon thread
runs it as soon as possible, even if the host makes no further calls. All state here is guarded by the lock of
:mod:`.call_lock`, which host functions never hold.
"""

from __future__ import annotations

import _thread
import contextlib
import heapq
import itertools
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from streamalloc.simulator import call_lock
from streamalloc.simulator.errors import DeadlockError, Result, check, code_of

Clock = dict[int, int]
"""Vector clock of a stream or of the host: for each stream, by its number, the highest number of an operation that
certainly precedes the owner's next operation.
"""
Points: TypeAlias = "tuple[tuple[Stream, int], ...]"
"""Operations, each as a tuple of its stream and its number in the stream."""

ALL = 1 << 62
"""Number that is larger than the number of any operation."""
POLL_SECONDS = 0.0003
"""Seconds between two reads of a memory value for which a stream waits."""
_IDLE_SECONDS = 1.0
"""Seconds without work after which the worker thread ends."""
_NAP_SECONDS = 0.05
"""Longest time in seconds that a thread sleeps until it checks a condition again."""


def merge(clock: Clock, other: Clock) -> None:
    """Raise each entry of ``clock`` to at least the entry of ``other`` for the same stream."""
    for stream, seq in other.items():
        if clock.get(stream, 0) < seq:
            clock[stream] = seq


class Operation:
    """Work in a stream. Subclasses define when the work can start, and do it in one or several steps."""

    heavy = False
    """Whether the operation takes too long for the submitting thread. If so, the worker thread runs it in steps, and
    operations of other streams between these steps.
    """
    counts = True
    """Whether the stream counts as busy while this operation is queued."""
    is_command = True
    """Whether the operation is sent to the device at once. Otherwise it is sent together with the stream's next
    command.
    """
    polled = False
    """Whether :meth:`is_blocked` must be called repeatedly, because no call announces a change of its result."""
    runs = False
    """Whether the operation uses memory now, on a separate thread."""
    seq = 0
    """Number of the operation in its stream, from 1 on."""
    after: Points = ()
    """Operations of other streams that must finish before this operation starts."""

    def is_blocked(self) -> bool:
        """Whether something other than earlier operations delays this operation."""
        return False

    def step(self) -> bool:
        """Do a part of the work. Returns True once all work is done."""
        return True

    def touches(self, start: int, end: int) -> bool:
        """Whether the operation has still to read or write a part of a range of simulated addresses."""
        return False


class QueuedCall(Operation):
    """Operation whose work is one call of a function."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def step(self) -> bool:
        self._function()
        return True


class Mark(Operation):
    """Operation without work: a wait for other streams, or the point from which on the stream can use an allocation."""

    counts = is_command = False


class Until(Operation):
    """Operation that delays its stream until a condition is true. The scheduler checks the condition repeatedly."""

    polled = True

    def __init__(self, condition: Callable[[], bool]) -> None:
        self._condition = condition

    def is_blocked(self) -> bool:
        return not self._condition()


def start_thread(function: Callable[[], None], name: str) -> threading.Thread | None:
    """Start a daemon thread and return it. None if the process may not start one now. While the interpreter exits, a
    new thread would not run.
    """
    thread = threading.Thread(target=function, name=name, daemon=True)
    with contextlib.suppress(RuntimeError):
        if not sys.is_finalizing():
            thread.start()
            return thread
    return None


class HostFunction(Operation):
    """Operation that runs a function on a separate thread, and delays its stream until the function returns."""

    def __init__(self, scheduler: Scheduler, function: Callable[[], object]) -> None:
        self._scheduler = scheduler
        self._function = function
        self._state = "waiting"
        self.ident: int = 0
        """``threading.get_ident()`` of the thread that runs the function; 0 before that thread begins."""

    def is_blocked(self) -> bool:
        return self._state == "running"

    def step(self) -> bool:
        # If the process may not start a thread now, the next call of this method tries again.
        if self._state == "waiting" and start_thread(self._run, "streamalloc host function") is not None:
            self._state = "running"
        return self._state == "returned"

    def _run(self) -> None:
        self.ident = threading.get_ident()
        try:
            self._function()
        finally:
            call_lock.enter()
            self._state = "returned"
            self._scheduler.announce()
            call_lock.leave()


class Stream:
    """Stream of a context: a queue of operations. An operation that fails breaks the context."""

    def __init__(self, scheduler: Scheduler, handle: int, context: Any, blocking: bool, priority: int) -> None:
        self.scheduler = scheduler
        self.id: int = next(scheduler.ids)
        self.handle = handle
        self.context = context
        self.blocking = blocking
        self.priority = priority
        # The legacy stream with which this blocking stream synchronises; None for other streams.
        self.legacy: Stream | None = None
        # For a legacy stream: the blocking streams of its context. None for other streams.
        self.peers: dict[Stream, None] | None = None
        self.operations: deque[Operation] = deque()
        """Operations that have not finished, in their order."""
        self.seq: int = 0
        """Number of the operation that was submitted last."""
        self.done: int = 0
        """Number up to which all operations of the stream have finished."""
        self.last_free: int = 0
        """Number of the latest operation in this stream that freed memory of a pool."""
        self.marked: int = 0
        """Number of the stream's latest command (:attr:`Operation.is_command`) that has run."""
        self.clock: Clock = {}
        self.capture: Any = None
        self.barrier: Points = ()
        """Operations of other streams that the next operation of this stream waits for."""
        self.attributes: dict[int, bytes] = {}
        """Bytes of stream attributes that are only stored, by attribute number."""
        self.destroyed = False
        scheduler.streams[self.id] = self

    @property
    def idle(self) -> bool:
        """Whether all work of the stream is done. For the legacy stream, this includes the work of blocking streams."""
        if self.done < self.seq:
            return False
        return self.peers is None or all(peer.done >= peer.seq for peer in self.peers)

    @property
    def known(self) -> int:
        """Number up to which pools treat the operations of this stream as done, when they look for memory for other
        streams.

        The driver finds it by a mark that the stream writes. The stream sends a mark only with its next command, after
        the operations that this command waits for. So operations at the end of a queue can be done although no mark
        shows it. For an idle stream no mark is needed: all its operations count as done (observed on H200:
        test_placements).
        """
        queue = self.operations
        if not any(operation.counts for operation in queue):
            return self.done
        head = queue[0]
        reached = head.is_command and all(other.done >= seq for other, seq in head.after)
        return self.done if reached else self.marked

    def done_with(self) -> Clock:
        """Return the clock of a host that has waited for all work of the stream.

        For the legacy stream the clock contains the work of the blocking streams. The clock of a blocking stream gets
        the legacy stream's work only at its next submission (observed on H200: test_placements).
        """
        if self.peers is not None:
            self.catch_up()
        clock = dict(self.clock)
        clock[self.id] = self.seq
        return clock

    def catch_up(self, clock: Clock | None = None) -> Points:
        """Merge the order that the legacy stream implies into ``clock``; None: into the clock of this stream.

        Returns the unfinished operations of the streams that this stream synchronises with: the legacy stream, or the
        blocking streams.
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

    def note_order(self) -> None:
        """Merge the order that the legacy stream implies into this stream's clock, without an operation.

        In the legacy stream this takes an operation number: ``seq`` grows by 1.
        """
        self.catch_up()
        if self.peers is not None:
            self.seq += 1
            if self.operations:
                self.operations[-1].seq = self.seq
            else:
                self.done = self.seq

    def submit(self, operation: Operation, after: Points = (), clock: Clock | None = None, joins: bool = True) -> int:
        """Submit an operation, which also waits for ``after``. Returns its number. The operation may run before this
        method returns.

        ``clock``: the clock into which the order of the legacy stream is merged; None: the clock of this stream.
        ``joins``: whether the order of the legacy stream applies at all.
        """
        if joins and (self.legacy is not None or self.peers is not None):
            works = operation.is_command or bool(after)
            if works and self.legacy is not None and self.legacy.id in self.scheduler.ranks:
                self.scheduler.rank(self)
            after += self.catch_up(clock)
        if self.barrier:
            after += self.barrier
            self.barrier = ()
        if after:
            after = tuple((other, seq) for other, seq in after if other.done < seq and other is not self)
        self.seq = seq = self.seq + 1
        later = self.operations or after or operation.heavy or self.scheduler.seeded
        if not later and not operation.is_blocked() and self.step(operation):
            self.done = seq
            if operation.is_command:
                self.marked = seq
            return seq
        operation.seq = seq
        operation.after = after
        self.operations.append(operation)
        self.scheduler.add_busy(self)
        return seq

    def step(self, operation: Operation) -> bool:
        """Do a part of the work of an operation. Returns True once all work is done, or if the operating system refuses
        something. A refusal breaks the context.
        """
        try:
            return operation.step()
        except OSError as error:
            self.context.error = self.context.error or code_of(error)
            return True


def learn(clock: Clock, other: Stream) -> None:
    """Merge the clock of ``other``, and the number of its last operation, into ``clock``."""
    if clock.get(other.id, 0) < other.seq:
        merge(clock, other.clock)
        clock[other.id] = other.seq


class LastUses:
    """Last uses of some memory: for each stream that uses it, the number of the stream's last operation on the
    memory.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[Stream, int]] = {}

    def add(self, stream: Stream, seq: int) -> None:
        if stream.id not in self._last:
            self.unfinished()  # Otherwise the streams of a long program would stay here for ever.
        self._last[stream.id] = (stream, seq)

    def unfinished(self) -> Points:
        self._last = {number: (stream, seq) for number, (stream, seq) in self._last.items() if stream.done < seq}
        return tuple(self._last.values())

    def over_for(self, clock: Clock) -> bool:
        """Whether every use is done, or is among the operations that ``clock`` contains (which precede the work with
        this clock).
        """
        return all(clock.get(stream.id, 0) >= seq for stream, seq in self.unfinished())


class Scheduler:
    """Streams of one machine, the vector clock of the host, and the thread that runs queued operations."""

    def __init__(self, seed: int | None) -> None:
        self.host: Clock = {}
        self.on_close: Callable[[], None] = lambda: None
        self.closed: bool = False
        self._gone: set[int] = set()
        self.caller: call_lock.Caller = call_lock.Caller()
        """State of the thread whose call of the machine is running."""
        self._asleep: list[_thread.LockType] = []
        """One lock for each thread that waits. Releasing the lock wakes the thread."""
        self._waiters = 0
        self._busy: dict[int, Stream] = {}
        self.streams: dict[int, Stream] = {}
        self.ranks: dict[int, int] = {}
        """Ranks of streams by stream number. Pools search the memory that streams left in the order of their ranks. A
        stream gets the lowest free rank at its first use of any pool, even in a capture, at its first launch of a graph
        with allocations, or when it waits for an event that a ranked stream recorded. If the legacy stream has a rank,
        a blocking stream already gets a rank with its first work or wait (observed on H200: test_placements).
        """
        self._free_ranks: list[int] = []
        self.ids: Iterator[int] = itertools.count(1)
        self._worker: threading.Thread | None = None
        self._random = None if seed is None else random.Random(seed)
        self.seeded: bool = seed is not None

    def rank(self, stream: Stream) -> None:
        """Give a stream the lowest free rank, unless it has a rank. Pools search the memory that streams left in
        ascending order of the streams' ranks.
        """
        if stream.id not in self.ranks:
            self.ranks[stream.id] = heapq.heappop(self._free_ranks) if self._free_ranks else len(self.ranks)

    def executed(self, stream: int) -> int:
        """Return the number up to which the operations of a stream count as done (:attr:`Stream.known`). ``stream``:
        its number. :data:`ALL` for a stream that was removed.
        """
        found = self.streams.get(stream)
        return ALL if found is None else found.known

    def outlived(self, stream: int) -> int:
        """Return :data:`ALL` for a stream that was removed, because its frees count as run (observed on H200:
        test_placements); 0 for every other stream.
        """
        return 0 if stream in self.streams else ALL

    def retire(self, stream: Stream) -> None:
        """Record that a stream was destroyed, and remove it once it is idle."""
        stream.destroyed = True
        if not stream.operations:
            self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        """Remove an idle stream. Clocks need no entry for this stream any more, because all its operations count as
        done.
        """
        self.streams.pop(stream.id, None)
        rank = self.ranks.pop(stream.id, None)
        if rank is not None:
            heapq.heappush(self._free_ranks, rank)
        self._gone.add(stream.id)
        # This is done only now and then, because the time that it takes grows with the number of streams.
        if len(self._gone) > len(self.streams) + 8:
            for clock in (self.host, *(other.clock for other in self.streams.values())):
                for number in [number for number in clock if number in self._gone]:
                    del clock[number]
            self._gone.clear()

    # -- progress of queued work -----------------------------------------------------------------------------

    def add_busy(self, stream: Stream) -> None:
        """Make the worker thread run the queued operations of a stream. The thread is started if none runs."""
        self._busy[stream.id] = stream
        if self._worker is None and not self.closed:
            # The thread refers only to the scheduler. So the driver can be collected when the program drops its last
            # reference to it.
            self._worker = start_thread(self._work, "streamalloc simulated device")
        else:
            self.announce()

    def announce(self) -> None:
        """Wake the worker thread and all threads that wait."""
        asleep, self._asleep = self._asleep, []
        for one in asleep:
            one.release()

    def _sleep(self, seconds: float) -> None:
        """Release the call lock until the next :meth:`announce`, for ``seconds`` at most."""
        woken = _thread.allocate_lock()
        woken.acquire()
        self._asleep.append(woken)
        call_lock.sleep(woken, seconds)
        if woken in self._asleep:
            self._asleep.remove(woken)

    def pump(self, heavy: bool = False) -> bool:
        """Run the operations that can run now. Returns whether there were any.

        ``heavy``: make only one pass, with one step of each heavy operation. Otherwise heavy operations are left to the
        worker thread.
        """
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
        """Release the lock and wait until no queued operation can run.

        With a seed, it waits only for operations that are running already.
        """

        def is_down() -> bool:
            heads = [one.operations[0] for one in self._busy.values() if one.operations]
            return not any(one.runs or (not self.seeded and self._may_run(one)) for one in heads)

        self.wait(is_down)

    def _advance(self, stream: Stream, heavy: bool) -> bool:
        progress = False
        queue = stream.operations
        while queue:
            operation = queue[0]
            if not self._may_run(operation) or (operation.heavy and not heavy):
                break
            if not stream.step(operation):
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
        return all(other.done >= seq for other, seq in operation.after) and not operation.is_blocked()

    def _work(self) -> None:
        quiet_since = time.monotonic()
        call_lock.enter()
        try:
            while not self.closed:
                progress = self.pump(heavy=True) if self._random is None else self._run_random(self._random)
                if progress:
                    quiet_since = time.monotonic()
                    # The lock is released after each pass, so that calls of other threads need not wait for all work.
                    self._sleep(0.00002)
                elif self._polls():
                    self._sleep(POLL_SECONDS)
                elif self._busy:
                    self._sleep(_NAP_SECONDS if self._random is None else POLL_SECONDS)
                elif time.monotonic() - quiet_since > _IDLE_SECONDS:
                    break
                else:
                    self._sleep(_IDLE_SECONDS)
            if self.closed:
                self.on_close()
        finally:
            self._worker = None  # After an error too, because otherwise the next operation would start no thread.
            call_lock.leave()

    def _polls(self) -> bool:
        """Whether a stream waits for a condition that no call announces."""
        return any(one.operations and one.operations[0].polled for one in self._busy.values())

    def _run_random(self, chance: random.Random) -> bool:
        """Run an operation of a random stream, or none for a short time: each choice is an order that the streams
        allow.
        """
        ready = [s for _, s in sorted(self._busy.items()) if s.operations and self._may_run(s.operations[0])]
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
        """Run queued operations, or sleep without the lock, until ``finished()`` is true or the scheduler is closed.

        ``polled``: call ``finished`` often, because nothing announces the change. Raises :class:`DeadlockError` in a
        kernel. Gives CUDA_ERROR_DEINITIALIZED while the interpreter exits, if no operation can run.
        """
        caller = self.caller
        self._waiters += 1
        try:
            while not finished():
                if self.closed:
                    return
                if caller.in_kernel:
                    raise DeadlockError("a kernel waits for work, which may be its own end")
                # If no worker thread runs, for example at the exit of the interpreter, this thread runs the queued
                # operations.
                exiting = sys.is_finalizing()
                alone = exiting or self._worker is None
                if (alone or self._random is None) and self.pump(heavy=alone):
                    continue
                # No other thread could end the wait.
                check(not exiting, Result.CUDA_ERROR_DEINITIALIZED)
                often = polled or self._polls()
                self._sleep(POLL_SECONDS if often else _NAP_SECONDS)
                self.caller = caller
        finally:
            self._waiters -= 1

    def close(self) -> None:
        """Stop the worker thread. ``on_close`` is called once no operation can run any more: now, or by the worker
        thread if it is running. Idempotent.
        """
        if self.closed:
            return
        self.closed = True
        if self._worker is None:
            self.on_close()
        else:
            self.announce()
