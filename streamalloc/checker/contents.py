"""Contents of memory: types of elements that the host has written, host memory that queued copies read, and values that
streams write and wait for (``cuStreamWriteValue32``, ``cuStreamWaitValue32``).

A copy to the host that reads elements as another type is reported. Types are recorded when work is queued. Work without
a type, such as a fill or a kernel, removes the type.

A host write is reported if it changes memory that a queued copy has still to read. The checker cannot see writes
through NumPy arrays. So it compares two checksums of the source: one of the time of the call, and one of the time right
before the host's next wait or next copy of the same bytes. Streams of other libraries are left out, because a library
may wait for its streams without a call that the checker records. Memory that a kernel without declared uses may write
is left out too, because the kernel may have changed it.
"""

from __future__ import annotations

import ctypes
import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamalloc.checker.clocks import Clock, Obstacle, Timeline, TrackedStream
from streamalloc.checker.judge import Judge
from streamalloc.checker.ranges import AddressMap, Bytes, Piece, Range
from streamalloc.checker.streams import ForeignStreams, is_readable
from streamalloc.driver.bindings import WAIT_COMPARISONS, number_of
from streamalloc.driver.reports import Stack
from streamalloc.formats.ranges import Runs


class Typed(NamedTuple):
    """Type of the elements that a write has stored."""

    dtype: np.dtype[Any]
    stack: Stack
    """Place of the write in the program."""
    unseen: int
    """Number of kernels without declared uses that were launched before the write."""


class ElementTypes:
    """Types of the elements that the host has written to memory of a driver."""

    def __init__(self, addresses: AddressMap, judge: Judge, place: Callable[..., Stack]) -> None:
        self._addresses = addresses
        self._judge = judge
        self._place = place
        self.unseen: int = 0
        """Number of kernels without declared uses so far. Each may have written any memory that existed at its launch.
        """
        self.compared: tuple[int, int] | None = None
        """Address and size of the source of the latest copy, if its target was a NumPy array: :meth:`copied` has
        compared the type. None otherwise.
        """

    def copied(self, target: Any, source: Any, nbytes: int, what: str) -> None:
        """Record a copy of ``nbytes`` bytes. ``what``: name of the copy in reports.

        If the source is a NumPy array, the target gets the type of its elements. If only the target is a NumPy array,
        its type is compared with the recorded types of the source (:meth:`read`). Otherwise the target gets the
        recorded types of the source.
        """
        self.compared = None
        if isinstance(source, np.ndarray):
            self.wrote(number_of(target), nbytes, source.dtype, self._place())
        elif isinstance(target, np.ndarray):
            self.compared = number_of(source), nbytes
            self.read(number_of(source), nbytes, target.dtype, what)
        else:
            for piece, memory, start, end in self._places(number_of(source), nbytes):
                for low, high, one in self._within(memory, start, end):
                    first = piece[1] + low - start - number_of(source) + number_of(target)
                    self.wrote(first, high - low, one.dtype, one.stack)

    def wrote(self, address: int, nbytes: int, dtype: np.dtype[Any], stack: Stack) -> None:
        """Record a write of ``nbytes`` bytes at ``address``, as elements of type ``dtype``. Elements of one byte, and
        elements that are neither numbers nor times, are not recorded.
        """
        if _is_type(dtype):
            for _, memory, start, end in self._places(address, nbytes):
                if memory.types is None:
                    memory.types = Runs(None)
                memory.types.put(start, end, Typed(dtype, stack, self.unseen))

    def read(self, address: int, nbytes: int, dtype: np.dtype[Any], what: str) -> None:
        """Report a read of elements as ``dtype`` that were written as another type; the first such part only. Unsigned
        integers fit any type of the same size, signed integers and times of the same size fit each other, and complex
        numbers fit pairs of floats.

        ``what``: name of the reading operation in reports.
        """
        if not _is_type(dtype):
            return
        for (range_, *_), memory, start, end in self._places(address, nbytes):
            for _, _, one in self._within(memory, start, end):
                if not _fit(one.dtype, dtype):
                    what = f"{what} reads {range_} as {dtype}, but it was written as {one.dtype}."
                    remedy = f"read it as {one.dtype}, or as bytes (uint8) where the pattern is meant."
                    self._judge.report("another type", what, remedy, range_, self._place(), used=one.stack)
                    return

    def forget(self, pieces: Iterable[tuple[Piece, bool]]) -> None:
        """Remove the types of the bytes that an operation writes. ``pieces``: tuples of piece and whether the operation
        writes it.
        """
        for (range_, low, high), write in pieces:
            if write:
                for memory, start, end in range_.physical(low, high):
                    if memory.types is not None:
                        memory.types.put(start, end, None)

    def _within(self, memory: Bytes, start: int, end: int) -> list[tuple[int, int, Typed]]:
        runs = () if memory.types is None else memory.types.over(start, end)
        return [(low, high, one) for low, high, one in runs if one is not None and one.unseen == self.unseen]

    def _places(self, address: int, nbytes: int) -> Iterable[tuple[Piece, Bytes, int, int]]:
        for piece in self._addresses.pieces(address, nbytes):
            if piece[0].ended is None:
                for memory, start, end in piece[0].physical(*piece[1:]):
                    yield piece, memory, start, end


def _is_type(dtype: np.dtype[Any]) -> bool:
    return dtype.itemsize > 1 and dtype.kind in "iufcmM"


def _fit(one: np.dtype[Any], other: np.dtype[Any]) -> bool:
    """Whether elements written as one type may be read as the other type.

    Unsigned integers may stand for any type of the same size, signed integers and times of the same size for each
    other, and complex numbers may be read as pairs of floats.
    """
    kinds = {one.kind, other.kind}
    if one.itemsize == other.itemsize:
        return one.newbyteorder("=") == other.newbyteorder("=") or "u" in kinds or kinds <= {"i", "m", "M"}
    return kinds == {"c", "f"} and max(one.itemsize, other.itemsize) == 2 * min(one.itemsize, other.itemsize)


PAGEABLE = "pageable memory"
HOST_KINDS = ("pinned memory", "registered memory", PAGEABLE)
FLAG = 64
"""Largest size in bytes of a write to host memory that may be a value which the host polls. By polling, the host finds
out without a call that the work before the write has ended.
"""
_MOST_FLAGS = 64
_MOST_COMPARED = 64
"""Largest number of copies, the latest ones, among which a copy of the same bytes is searched."""
_ROW, _FACTOR = 1 << 20, np.uint64(0x9E3779B97F4A7C15)
"""Size of a row in bytes. Of a source larger than one row, a weighted sum of the rows is compared, which takes less
time than a checksum of all bytes.
"""


def is_of_host(range_: Range) -> bool:
    """Whether the host may read and write the memory of ``range_`` without a call that the checker records."""
    # The program has the address of pinned memory, so it may use the memory without a driver call.
    return range_.viewed or range_.kind in HOST_KINDS


@dataclass(eq=False)
class _QueuedSource:
    """A part of host memory that a queued operation reads, with the checksum of its bytes at the call."""

    piece: Piece
    stream: TrackedStream
    what: str
    stack: Stack
    mark: Obstacle
    """Obstacle that ends with the operation."""
    checksum: int | None


class QueuedSources:
    """Sources: memory that queued copies read, and that the host may change without a call. Each source is watched
    until the host has waited for its copy.
    """

    def __init__(self, timeline: Timeline, foreign: ForeignStreams, judge: Judge, place: Callable[..., Stack]) -> None:
        self._timeline = timeline
        self._foreign = foreign
        self._judge = judge
        self._place = place
        self.is_late: bool = False
        """Whether the host has continued since the call that is being recorded, because the checker has recorded the
        call late. The host may then have written sources, so :meth:`check` does nothing.
        """
        self._sources: list[_QueuedSource] = []
        self._flags: deque[tuple[int, int, Obstacle]] = deque(maxlen=_MOST_FLAGS)
        """Ranges of bytes that the host may poll, as tuples of start, end, and the obstacle that ends with the work
        that writes them.
        """
        self._kernels: dict[TrackedStream, tuple[Obstacle, frozenset[Bytes] | None]] = {}
        """For each stream with kernels without declared uses: the obstacle that ends with them, and the memory that
        they may write (None: any).
        """

    def add(self, stream: TrackedStream, pieces: Iterable[tuple[Piece, bool]], what: str, stack: Stack) -> None:
        """Watch the host memory that the latest operation of ``stream`` reads, if the host may change this memory
        without a call that the checker records. ``pieces``: tuples of a part of memory and whether the operation writes
        it. ``what``, ``stack``: name and place of the operation.

        Only a note is added for operations on streams of other libraries, and for memory that other work may still
        write.
        """
        viewed = self.followed(pieces)
        if all(write for _, write in viewed):
            return
        if not self._foreign.is_ours(stream):
            self._timeline.notes.add("sources", f"{what} on {stream.short}")
            return
        written = [piece[0].bytes for piece, write in viewed if write]
        mark = self._timeline.record(stream)
        for piece, write in viewed:
            if not write and piece[0].bytes not in written:
                self._watch(piece, stream, what, stack, mark)

    def queued(self, stream: TrackedStream, pieces: Iterable[tuple[Piece, bool]], what: str, stack: Stack) -> None:
        """Watch the host memory that the latest operation of ``stream`` reads (:meth:`add`), and record the bytes that
        the operation writes and that the host may poll (:meth:`polled`).
        """
        self.add(stream, pieces, what, stack)
        for (range_, low, high), write in pieces:
            if write and high - low <= FLAG and is_of_host(range_):
                self.polled(stream, low, high)

    @staticmethod
    def followed(pieces: Iterable[tuple[Piece, bool]]) -> list[tuple[Piece, bool]]:
        """Return those of ``pieces`` that the host may write without a call that the checker records."""
        return [(piece, write) for piece, write in pieces if is_of_host(piece[0])]

    @staticmethod
    def view(pieces: Iterable[Piece]) -> None:
        """Record that the host has a NumPy array over ``pieces``, and may poll them."""
        for range_, _, _ in pieces:
            range_.viewed = True

    def may_be_written(self, stream: TrackedStream, memory: frozenset[Bytes] | None) -> None:
        """Record that the latest operation of ``stream`` is a kernel that may write ``memory`` without having declared
        it. None: any memory.

        A change of such memory no longer proves a write by the host, so the memory is not watched.
        """
        self._keep(lambda one: memory is not None and one.piece[0].bytes not in memory)
        before = self._kernels.get(stream)
        if memory is not None and before is not None and not self._timeline.may_be_seen(before[0]):
            memory = None if before[1] is None else memory | before[1]
        self._kernels[stream] = (self._timeline.record(stream), memory)

    def _may_be_written(self, memory: Bytes) -> bool:
        seen = self._timeline.may_be_seen
        self._kernels = {stream: one for stream, one in self._kernels.items() if not seen(one[0])}
        return any(named is None or memory in named for _, named in self._kernels.values())

    def polled(self, stream: TrackedStream, start: int, end: int) -> None:
        """Record that the host may poll the bytes from ``start`` up to ``end``, which the latest operation of
        ``stream`` writes.

        A host that reads the new value knows that the earlier work has ended. So the sources of copies before the write
        are no longer watched.
        """
        self._flags.append((start, end, self._timeline.record(stream)))
        clock = stream.clock

        def unknown(mark: Obstacle, number: int) -> bool:
            return mark.clock is None or not clock.after(number, mark.clock.known[number])

        self._keep(lambda one: one.stream is not stream and unknown(one.mark, one.stream.number))

    def seen_by_host(self, start: int, end: int) -> Clock:
        """Return the clock of all work for which the host may have waited before it uses the bytes from ``start`` up to
        ``end``.

        This is the host's clock, and the clocks of writes that the host may have polled (:meth:`polled`). Writes to the
        bytes themselves are left out, because a use does not order itself.
        """
        clock = self._timeline.host.copy()
        for low, high, mark in self._flags:
            if mark.clock is not None and (high <= start or end <= low):
                clock.learn(mark.clock)
        return clock

    def _watch(self, piece: Piece, stream: TrackedStream, what: str, stack: Stack, mark: Obstacle) -> None:
        range_, low, high = piece
        of_host = range_.kind in HOST_KINDS or (range_.kind == "allocation" and range_.grants is not None)
        if not of_host or range_.ended:
            return
        others = range_.queued_write or range_.bytes.shared or self._may_be_written(range_.bytes)
        if not others and all(
            self._timeline.may_be_known(one.actor.number, one.time) for one in range_.written(low, high)
        ):
            checksum = _checksum(piece)
            self._compare_with_last(piece, checksum)
            self._sources.append(_QueuedSource(piece, stream, what, stack, mark, checksum))
        else:
            self._timeline.notes.add("sources", f"{what} on {stream.short}")

    def _compare_with_last(self, piece: Piece, checksum: int | None) -> None:
        """Check the last copy of the same bytes now, because ``checksum`` will replace its checksum.

        The report then names a place closer to the host's write than a check at the next wait would.
        """
        latest = itertools.islice(reversed(self._sources), _MOST_COMPARED)
        before = next((one for one in latest if one.piece == piece), None)
        if before is not None and not self._is_unchanged(before, checksum):
            self._sources.remove(before)

    def _keep(self, which: Callable[[_QueuedSource], bool]) -> None:
        kept = []
        for one in self._sources:
            if which(one):
                kept.append(one)
            elif not self._timeline.may_be_seen(one.mark):
                self._timeline.notes.add("sources", f"{one.what} on {one.stream.short}")
        self._sources = kept

    def forget(self, ranges: Iterable[Range]) -> Callable[[], None]:
        """Stop watching memory that an operation is about to write or free. Returns a function that undoes this."""
        before = self._sources
        if before:
            gone = {id(one.bytes) for one in ranges}
            self._sources = [one for one in before if id(one.piece[0].bytes) not in gone]
        return lambda: self._sources.extend(one for one in before if one not in self._sources)

    def clear(self) -> None:
        """Stop watching all sources, because the host may have waited for the copies by a call that the checker does
        not record.
        """
        self._keep(lambda one: False)

    def check(self) -> None:
        """Report the sources that the host has written since their copies were queued. Called before each wait of the
        host. No effect while :attr:`is_late` is True.
        """
        if self.is_late:
            return
        sources, self._sources = self._sources, []
        self._sources += [one for one in sources if self._is_unchanged(one)]

    def _is_unchanged(self, one: _QueuedSource, checksum: int | None = None) -> bool:
        """Whether a copy has still to read its source, and the source is unchanged. A change of the source is reported.

        ``checksum``: checksum of the bytes now; None: it is computed.
        """
        range_ = one.piece[0]
        if self._timeline.may_be_seen(one.mark) or range_.ended is not None:
            return False
        if not self._foreign.is_ours(one.stream):
            self._timeline.notes.add("sources", f"{one.what} on {one.stream.short}")
            return False
        if one.checksum == (_checksum(one.piece) if checksum is None else checksum):
            return True
        copy = f"{one.what} on {one.stream.name}, which reads the same bytes"
        what = f"the host wrote {range_}, but nothing orders the write after {copy}."
        remedy = f"the host must synchronise with {one.stream.name} after its {one.what}."
        self._judge.report("race", what, remedy, range_, self._place(), used=one.stack)
        return False


def _checksum(piece: Piece) -> int | None:
    """Return a checksum of the bytes of ``piece``; None if they are not readable any more."""
    range_, low, high = piece
    if range_.kind == PAGEABLE and not is_readable(low, high):
        return None
    memory = np.frombuffer(memoryview((ctypes.c_ubyte * (high - low)).from_address(low)), np.uint8)
    rest = len(memory) % _ROW
    rows = memory[rest:].view(np.uint64).reshape(-1, _ROW // 8)
    total: npt.NDArray[np.uint64] = rows[:1].copy()
    for row in rows[1:]:
        total *= _FACTOR  # Without the weights, rows in another order would have the same sum.
        total += row
    return zlib.crc32(total.data, zlib.crc32(memory[:rest].data))


_TYPES: dict[int, Any] = {32: ctypes.c_uint32, 64: ctypes.c_uint64}
_MOST_WRITES, _MOST_ADDRESSES = 16, 10_000
"""Largest number of writes kept for one address, and largest number of addresses with kept writes. The oldest are
dropped, with a note. A wait that a dropped write may have ended is not checked.
"""

_Key = tuple[Bytes | None, int]
"""Location of a value: physical memory and an offset in it. For memory that the checker does not know, None and the
address.
"""


@dataclass(eq=False, slots=True)
class _Waiting(Obstacle):
    """Wait of a stream for a value in memory."""

    key: _Key = (None, 0)
    range: Range | None = None
    accepts: Callable[[int], bool] = bool
    read: Callable[[], int] | None = None
    """Function that reads the value; None if the host cannot read it."""


class WaitValues:
    """Latest values that streams wrote, and the waits for values.

    The checker may not record the write of a value, for example of a write by a kernel. Then the wait lasts until the
    host finds the waiting stream idle, and all earlier work counts as ordered before the wait.
    """

    def __init__(self, timeline: Timeline, addresses: AddressMap, on_host: Callable[[int], bool]) -> None:
        self._timeline = timeline
        self._addresses = addresses
        self._on_host = on_host
        """Function that returns whether the host can read an address outside of all known ranges."""
        self._writes: dict[_Key, list[tuple[int, Clock]]] = {}
        """For each location: the latest values that streams wrote there, as tuples of value and clock of the write."""
        self._ignored: set[_Key] = set()

    def _key(self, address: int) -> tuple[_Key, Range | None]:
        pieces = self._addresses.pieces(address, 4)
        places = pieces[0][0].physical(*pieces[0][1:]) if pieces else []
        return (places[0][0], places[0][1]) if places else (None, address), pieces[0][0] if pieces else None

    def ignore(self, address: int) -> None:
        """Record that this package waits for the value at ``address``. The package itself reports which work of other
        processes the value announces (:meth:`.Interprocess.opened`), so the end of the wait orders no other announced
        work.
        """
        self._ignored.add(self._key(address)[0])

    def write(self, stream: TrackedStream, address: int, value: int) -> None:
        """Queue a write of ``value`` to ``address`` in a stream (``cuStreamWriteValue32``). The waits for a value there
        that accept ``value`` end when the stream runs the write.
        """
        key, range_ = self._key(address)
        shared = range_ is None or range_.bytes.shared

        def write(stream: TrackedStream) -> None:
            writes = self._writes.setdefault(key, [])
            writes.append((value, stream.clock.copy()))
            del writes[:-_MOST_WRITES]
            if len(self._writes) > _MOST_ADDRESSES:
                self._timeline.notes.add("waits", f"for one of more than {_MOST_ADDRESSES:,} values")
                del self._writes[next(iter(self._writes))]
            if shared:
                self._timeline.published.learn(stream.clock)
            for other in tuple(self._timeline.waiting):
                wait = other.obstacle
                if isinstance(wait, _Waiting) and wait.key == key and wait.accepts(value):
                    self._timeline.end(wait, stream.clock)

        self._timeline.submit(stream, write)

    def wait(self, stream: TrackedStream, address: int, value: int, flag: int, bits: int) -> None:
        """Queue a wait of a stream for a value at ``address`` (``cuStreamWaitValue32``).

        ``flag``: number of the comparison with ``value`` (``CUstreamWaitValue_flags``). ``bits``: size of the value, 32
        or 64.
        """
        key, range_ = self._key(address)
        compare = WAIT_COMPARISONS[flag & 3]
        wait = _Waiting(key=key, range=range_, accepts=lambda there: compare(there, value, bits))
        if self._on_host(address) if range_ is None else range_.kind in ("pinned memory", "registered memory"):
            # The host can write this value without making a call, so the value is read repeatedly.
            wait.read = lambda: int(_TYPES[bits].from_address(address).value)

        def meet(stream: TrackedStream) -> None:
            order: Clock | None = None
            writes = self._writes.get(key, [])
            for written, clock in reversed(writes):
                if not wait.accepts(written):
                    break
                # Each of these writes may end the wait, so only the operations that precede all of them certainly
                # precede its end.
                order = clock if order is None else order.common(clock)
            else:
                if len(writes) == _MOST_WRITES:
                    self._timeline.notes.add("waits", f"for a value that {_MOST_WRITES} or more writes can end")
            if order is not None:
                self._timeline.end(wait, order)
            else:
                self._look(wait)

        self._timeline.submit(stream, meet)
        self._timeline.wait(stream, wait)

    def may_be_over(self, stream: TrackedStream) -> bool:
        """Whether a stream waits, directly or through other streams, for a value that the host cannot read. Such a wait
        may have ended without a call that shows this.
        """
        obstacle = stream.obstacle
        while obstacle is not None and obstacle.source is not None and obstacle.source.obstacle is not None:
            obstacle = obstacle.source.obstacle
        return isinstance(obstacle, _Waiting) and obstacle.read is None

    def look(self) -> None:
        """Read the values in host memory that streams wait for, and end the waits that these values satisfy."""
        for stream in tuple(self._timeline.waiting):
            if isinstance(stream.obstacle, _Waiting):
                self._look(stream.obstacle)

    def _look(self, wait: _Waiting) -> None:
        if wait.read is None:
            return
        gone = wait.range is not None and wait.range.ended is not None
        if gone or wait.accepts(wait.read()):
            clock = self._timeline.host.copy()
            if wait.range is None or wait.range.bytes.shared:
                clock.learn(self._timeline.published)
                if wait.key not in self._ignored:
                    clock.learn(self._timeline.ready)
            self._timeline.end(wait, clock)
