"""Devices and their choice by ``CUDA_VISIBLE_DEVICES``, contexts, and events of one or several processes."""

from __future__ import annotations

import os
import re
import string
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamalloc.simulator.allocator import Block
from streamalloc.simulator.banks import Bank, Heap, Regions
from streamalloc.simulator.call_lock import Caller
from streamalloc.simulator.constants import LEGACY_STREAM, PER_THREAD_STREAM, EventFlag, Handles, new_handle
from streamalloc.simulator.errors import Fault, Result, check
from streamalloc.simulator.files import WORD, SharedWords
from streamalloc.simulator.graph_memory import DeviceGraphMemory
from streamalloc.simulator.memory import Physical
from streamalloc.simulator.scheduler import Clock, Mark, Operation, Points, Scheduler, Stream, Until, learn, merge

VISIBLE = "CUDA_VISIBLE_DEVICES"
_IDS = ("GPU-", "MIG-")
_LARGEST = (1 << 63) - 1


def inherited() -> str | None:
    """Return the value that ``CUDA_VISIBLE_DEVICES`` had when this process began; None if it was not set."""
    with open("/proc/self/environ", "rb") as file:
        pairs = (one.partition(b"=") for one in file.read().split(b"\0"))
    return next((os.fsdecode(value) for name, _, value in pairs if name == VISIBLE.encode()), None)


def chosen() -> str | None:
    """Return the value of ``CUDA_VISIBLE_DEVICES`` by which simulated devices are chosen; None: all devices.

    Under :func:`streamalloc.testing.install` the current value is used. Otherwise the value is used only for a machine
    of ``STREAMALLOC_DRIVER``, and only if the program has changed the value, because the initial value is meant for
    real devices.
    """
    given, environ = os.environ.get(VISIBLE), os.environ
    if environ.get("STREAMALLOC_INSTALL"):
        return given
    in_place = environ.get("STREAMALLOC_DRIVER", "").startswith("simulated")
    return given if in_place and given != inherited() else None


def visible(text: str | None, uuids: Sequence[bytes]) -> list[int]:
    """Return the numbers in the machine of the devices that ``text`` chooses, in the order of the text. If ``text`` is
    None, it chooses all. ``uuids``: the 16 bytes of each device's id, by number in the machine.

    The first name without a device ends the list. A repeated device gives CUDA_ERROR_INVALID_DEVICE. The first name
    determines whether all names are read as numbers or as ids (observed on H200: test_two_devices).
    """
    if text is None:
        return list(range(len(uuids)))
    number_of = _with_id if text.startswith(_IDS) else _with_number
    found: list[int] = []
    for name in text.split(","):
        number = number_of(name, uuids)
        if number is None:
            break
        check(number not in found, Result.CUDA_ERROR_INVALID_DEVICE)
        found.append(number)
    return found


def _with_number(name: str, uuids: Sequence[bytes]) -> int | None:
    """Return the device number at the start of ``name``, read like strtol and cut to 32 bits. None if there is no such
    device.

    Any characters may follow the digits.
    """
    read = re.match(r"\s*([+-]?)0*(\d*)", name, re.ASCII)
    if read is None or not read[0].strip("+-" + string.whitespace):
        return None
    number = min(int(read[2][:20] or "0"), _LARGEST) * (-1 if read[1] == "-" else 1) & 0xFFFF_FFFF
    return number if number < len(uuids) else None


def _with_id(name: str, uuids: Sequence[bytes]) -> int | None:
    """Return the number of the device whose id begins with the digits of ``name``. None if no device or several devices
    fit.

    Any characters may follow the digits.
    """
    digits = re.match(r"[0-9a-f-]*", name[4:].lower())
    assert digits is not None
    wanted = digits[0].replace("-", "")[:32]
    fit = [number for number, one in enumerate(uuids) if wanted and one.hex().startswith(wanted)]
    return fit[0] if len(fit) == 1 and name.startswith(_IDS) else None


@dataclass(eq=False)
class SimulatedDevice:
    """Device of a machine, and the memory that its contexts share. ``attributes``: values by the enum name without
    ``CU_DEVICE_ATTRIBUTE_``.
    """

    ordinal: int
    bank: Bank
    uuid: bytes
    attributes: dict[str, int]
    regions: Regions
    heap: Heap
    pinned: Heap
    """Pinned host memory of the contexts of this device."""
    graphs: DeviceGraphMemory
    primary: Context = field(init=False)


@dataclass(eq=False, repr=False)
class Context:
    """Context of a device. ``alive``: whether it exists now. A primary context can be destroyed and made again."""

    device: SimulatedDevice
    _scheduler: Scheduler
    _by_handle: Handles[Stream]
    """The streams of all contexts of the machine."""
    id: int
    primary: bool
    flags: int
    graph_block: Block | None = None
    """Device memory allocated at the first instantiation of a graph (observed on H200: test_plain_memory); None
    before.
    """
    implied_flags: int = 0
    """Flags that ``cuCtxGetFlags`` returns in addition to the flags that were set."""
    handle: int = field(default_factory=new_handle)
    retained: int = 0
    error: Any = None
    """Result code of the work that broke the context. Later calls in the context return this code. None for a working
    context.
    """
    peers: set[int] = field(default_factory=set)
    limits: dict[str, int] = field(default_factory=dict)
    """Limits that the program has set, by enum name without CU_LIMIT_; under ``"cache"`` the cache configuration
    (``cuCtxSetCacheConfig``).
    """
    stacks: int = 0
    """Bytes of device memory that stacks use beyond the initial stacks."""
    awaited: list[tuple[Stream, int]] = field(default_factory=list)
    """Operations that ``cuCtxWaitEvent`` makes the context wait for, each as a tuple of stream and number. Streams that
    are created later wait for them too.
    """
    streams: Handles[Stream] = field(default_factory=Handles)
    retired: Clock = field(default_factory=dict)
    """Clock of the ended streams: for each destroyed stream the number of its last operation, and for other streams the
    number of the last operation that precedes one of these. Entries that nothing awaits are removed.
    """
    _legacy: Stream | None = None
    _per_thread: dict[int, tuple[weakref.ref[Caller], Stream]] = field(default_factory=dict)
    """Per-thread default streams by thread number, each with its thread. The thread is compared, because a later thread
    may have the number of an ended thread.
    """
    _marks: Stream | None = None

    def __post_init__(self) -> None:
        self.alive: bool = not self.primary

    def check(self) -> None:
        """Raise :class:`Fault` with the result code of the work that broke the context. Nothing happens for a working
        context.
        """
        if self.error is not None:
            raise Fault(self.error)

    @property
    def legacy(self) -> Stream:
        if self._legacy is None:
            self._legacy = self._new_stream(LEGACY_STREAM, True, 0)
            self._legacy.legacy = None
            self._legacy.peers = {}
        return self._legacy

    @property
    def per_thread(self) -> Stream:
        """Per-thread default stream of the calling thread, made at the first use. If the thread has the number of an
        ended thread, it gets a new stream.
        """
        caller = self._scheduler.caller
        found = self._per_thread.get(caller.ident)
        if found is not None:
            if found[0]() is caller:
                return found[1]
            self._leave(found[1])
            self._scheduler.retire(found[1])
        stream = self._new_stream(PER_THREAD_STREAM, True, 0)
        self._per_thread[caller.ident] = weakref.ref(caller), stream
        return stream

    @property
    def marks(self) -> Stream:
        """Internal stream for events that are recorded for the whole context (cuCtxRecordEvent). No other work is
        queued on it.
        """
        if self._marks is None:
            self._marks = Stream(self._scheduler, 0, self, False, 0)
        return self._marks

    def create_stream(self, blocking: bool, priority: int) -> Stream:
        return self._by_handle.add(self.streams.add(self._new_stream(new_handle(), blocking, priority)))

    def _new_stream(self, handle: int, blocking: bool, priority: int) -> Stream:
        stream = Stream(self._scheduler, handle, self, blocking, priority)
        if blocking and handle != LEGACY_STREAM:
            stream.legacy = self.legacy
            assert stream.legacy.peers is not None
            stream.legacy.peers[stream] = None
        self.awaited = [(other, seq) for other, seq in self.awaited if other.done < seq]
        stream.barrier = tuple(self.awaited)
        return stream

    def forget(self, stream: Stream) -> None:
        """Remove a stream that is destroyed. Its queued work still runs."""
        del self.streams[stream.handle], self._by_handle[stream.handle]
        self._leave(stream)

    def _leave(self, stream: Stream) -> None:
        """Store the clock of a stream that ends, because later work of the context is ordered after the stream's
        work.
        """
        self.retired[stream.id] = stream.seq
        merge(self.retired, stream.clock)
        if stream.legacy is not None and stream.legacy.peers is not None:
            learn(stream.legacy.clock, stream)
            if stream.operations:
                # Without this operation, the legacy stream would no longer come after the work that is still queued.
                stream.legacy.submit(Operation(), ((stream, stream.seq),))
            del stream.legacy.peers[stream]

    def all_streams(self) -> list[Stream]:
        own = [stream for stream in (self._legacy, self._marks) if stream is not None]
        return [*own, *(stream for _, stream in self._per_thread.values()), *self.streams.values()]

    def clock(self) -> Clock:
        """Return the clock of all work that was ever submitted in the context: the number of the last operation of each
        stream.
        """
        clock = dict(self.retired)
        for stream in self.all_streams():
            merge(clock, stream.clock)
            clock[stream.id] = stream.seq
        return clock

    def unfinished(self) -> Points:
        """Return a tuple of stream and number of its last operation for each stream with unfinished work, also for
        destroyed streams.
        """
        live = self._scheduler.streams
        gone = [(live[number], seq) for number, seq in self.retired.items() if number in live]
        streams = [(stream, stream.seq) for stream in self.all_streams()]
        return tuple((stream, seq) for stream, seq in (*gone, *streams) if stream.done < seq)

    def end(self) -> None:
        """End the context: clear its error, peers, limits and stacks. Its streams must have been destroyed before."""
        self.alive = False
        self.error = None
        self.peers.clear()
        self.limits.clear()
        self.device.bank.used -= self.stacks
        self.stacks = 0
        self.awaited.clear()
        for stream in self.all_streams():
            self._scheduler.retire(stream)
        self._legacy = self._marks = None
        self._per_thread.clear()


# -- events of several processes -------------------------------------------------------------------------------

# A process that shares events keeps them in a *table*, an anonymous file. Processes that open such an event map this
# table. Each record of an event, by any process, takes the event's next number at the call. The number is marked as
# done when the stream reaches the record. A wait is for one number, so a later record does not change the wait. If a
# process dies before it marks a number, the number is not done until the 15th later record, which uses its word again,
# is done; on hardware never (observed on H200, test_sharing: whoever waits for a killed process waits forever).

_SLOT_WORDS = 16
_RING = _SLOT_WORDS - 1
"""Number of records of an event that have a word of their own. An older record counts as done once the newer record
that uses its word is done.
"""
TABLE_EVENTS = 8192
TABLE_BYTES = TABLE_EVENTS * _SLOT_WORDS * WORD


class EventTable(SharedWords):
    """Events that one process shares, in a file that other processes map."""

    def __init__(self, physical: Physical) -> None:
        super().__init__(physical, TABLE_EVENTS * _SLOT_WORDS)
        self.taken: int = 0

    def take(self) -> SharedEvent:
        """Return a new event. The table must not be full.

        The words of a destroyed event are never used again, because its handle can still be opened (observed on H200:
        test_sharing).
        """
        self.taken += 1
        return SharedEvent(self, self.taken - 1)


class SharedEvent:
    """One event in a table: the number of its latest record, and which of its last records are done."""

    def __init__(self, table: EventTable, index: int) -> None:
        self.table = table
        self.index = index
        self._first = index * _SLOT_WORDS

    @property
    def latest(self) -> int:
        """Number of the latest record; 0 if there is none."""
        return self.table.words[self._first]

    def begin(self) -> int:
        """Begin a new record, which is then the latest one. Returns its number."""
        with self.table.locked():
            number = self.latest + 1
            self.table.words[self._first] = number
        return number

    def finish(self, number: int) -> None:
        """Mark the record with this number as done, because its stream has reached it."""
        with self.table.locked():
            word, words = self._word(number), self.table.words
            words[word] = max(words[word], number)

    def happened(self, number: int) -> bool:
        return not number or self.table.words[self._word(number)] >= number

    def _word(self, number: int) -> int:
        return self._first + 1 + number % _RING

    def arrival(self) -> Callable[[], bool]:
        """Return a function that returns whether the record that is the latest now is done.

        Later records do not change what the function returns.
        """
        number = self.latest
        return lambda: self.happened(number)


# -- events ----------------------------------------------------------------------------------------------------


class Record(Operation):
    """Operation that records an event: it stores the stream, its number in the stream, and the time.

    The record of a shared event is also written to the table that other processes map.
    """

    def __init__(self, stream: Stream, shared: SharedEvent | None) -> None:
        self.stream = stream
        self.clock: Clock = {}
        """Clock of the stream at the record. A stream that waits for the event merges this clock into its own."""
        self.ranked: bool = stream.id in stream.scheduler.ranks
        self.others: Points = ()
        """Operations of other streams that the record waits for, if the record itself is no work."""
        self.when: float = 0.0
        self.shared = shared
        self.number: int = shared.begin() if shared is not None else 0
        """Number of the record among the records of the event by all processes; 0 if the event is not shared."""

    def step(self) -> bool:
        self.when = time.perf_counter()
        if self.shared is not None:
            self.shared.finish(self.number)
        return True

    @property
    def complete(self) -> bool:
        return self.stream.done >= self.seq and all(other.done >= seq for other, seq in self.others)


@dataclass(eq=False)
class Event:
    """Event with its latest record, which is in a stream or in a graph under capture."""

    context: Context
    flags: int
    record: Record | None = None
    capture: Any = None
    # If the event was recorded in a capture: the nodes before the record.
    nodes: list[Any] = field(default_factory=list)
    shared: SharedEvent | None = None
    opened: bool = False  # Whether cuIpcOpenEventHandle made the event, from another process's handle.
    handle: int = field(default_factory=new_handle)

    @property
    def complete(self) -> bool:
        if self.shared is not None:
            return self.shared.happened(self.shared.latest)
        return self.record is None or self.record.complete

    @property
    def elsewhere(self) -> SharedEvent | None:
        """The shared event, if another process or another handle made its latest record. None if this object made the
        latest record, if there is no record, and for an event that is not shared.
        """
        if self.shared is None or self.shared.latest == (0 if self.record is None else self.record.number):
            return None
        return self.shared

    def share(self, shared: SharedEvent) -> SharedEvent:
        """Share the event: move it, with its latest record, to ``shared``, a place in a table that other processes can
        map.

        Returns ``shared``.
        """
        self.shared = shared
        if self.record is not None:
            self.record.number = shared.begin()
            if self.record.complete:
                shared.finish(self.record.number)
            else:
                self.record.shared = shared
        return shared

    def make_wait(self, stream: Stream) -> None:
        """Make a stream wait for the latest record of the event (``cuStreamWaitEvent``). An event that was never
        recorded gives no order.
        """
        elsewhere, record = self.elsewhere, self.record
        if elsewhere is not None:
            stream.submit(Until(elsewhere.arrival()))
        elif self.flags & EventFlag.INTERPROCESS:
            # The wait counts as work of the stream even if the event is done or was never recorded. Pools do not use
            # the order that it gives (observed on H200: test_streams, test_placements).
            stream.submit(Operation(), () if record is None else ((record.stream, record.seq), *record.others))
        elif record is not None:
            scheduler = stream.scheduler
            if record.stream is not stream or record.others:
                # A wait for completed work does not order the stream after the legacy stream, unless the waiting stream
                # is the legacy stream itself (observed on H200: test_streams).
                joins = stream.peers is not None or not record.complete
                stream.submit(Mark(), ((record.stream, record.seq), *record.others), joins=joins)
                if record.ranked:
                    scheduler.rank(stream)
            # A record contains the order after the legacy stream's work, even if its own stream does not (observed on
            # H200: test_placements).
            merge(stream.clock, {number: seq for number, seq in record.clock.items() if number in scheduler.streams})

    def record_in(self, stream: Stream, after: Points = ()) -> None:
        """Record the event after all work queued on ``stream``, and after ``after``, operations of other streams."""
        earlier, record = self.record, Record(stream, self.shared)
        shared = self.flags & EventFlag.INTERPROCESS
        if shared and earlier is not None and earlier.stream is not stream:
            # The later one of two records of an event also runs later (observed on H200: test_streams).
            after += ((earlier.stream, earlier.seq),)
            # Pools find earlier frees of the stream before that wait (observed on H200: test_placements).
            stream.submit(Operation())
        # The record of an interprocess event also orders the stream after the legacy stream (observed on H200:
        # test_placements).
        clock = stream.clock if shared or stream.peers is not None else dict(stream.clock)
        untimed = not shared and self.flags & EventFlag.DISABLE_TIMING
        record.counts = record.is_command = not untimed
        if untimed and stream.legacy is not None:
            record.others = stream.catch_up(clock)
        if record.others:
            # The event waits for the legacy stream; its own stream does not (observed on H200: test_streams).
            record.seq = stream.seq
        else:
            record.seq = stream.submit(record, after, clock)
        record.clock = {**clock, stream.id: record.seq}
        self.record, self.capture, self.nodes = record, None, []
