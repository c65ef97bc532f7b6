"""Host memory that queued copies read: reports host writes to it before the copy has run.

The checker does not see a write through an array. It compares a checksum of the source at the copy with one right
before the next wait of the host. It compares only copies on streams that no other library has: another library may wait
for its streams in ways that the checker does not see.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from streamalloc.driver.checker.clocks import Stream, Timeline
from streamalloc.driver.checker.judge import Judge
from streamalloc.driver.checker.ranges import Moment, Piece, Range
from streamalloc.driver.checker.stacks import Stack, here
from streamalloc.driver.checker.streams import ForeignStreams

HOST_KINDS = ("pinned memory", "registered memory")
_LARGEST = 16 << 20
"""Bytes of the largest source that is compared: a checksum of it takes about 10 ms."""


@dataclass(eq=False)
class _Source:
    """A part of host memory that a queued operation reads."""

    piece: Piece
    stream: Stream
    what: str
    stack: Stack
    known: Callable[[], bool]
    """Whether the host has waited for the operation."""
    checksum: int


class QueuedSources:
    """The sources of copies that the host has not waited for."""

    def __init__(
        self, timeline: Timeline, foreign: ForeignStreams, judge: Judge, unseen_kernels: Callable[[], bool]
    ) -> None:
        self._timeline = timeline
        self._foreign = foreign
        self._judge = judge
        self._unseen_kernels = unseen_kernels
        """Whether kernels were launched, which may have written anything."""
        self._sources: list[_Source] = []

    def add(self, stream: Stream, pieces: Iterable[tuple[Piece, bool]], what: str, stack: Stack) -> None:
        """Record the host memory that the latest operation of a stream reads."""
        # Code that allocates pinned memory by a call, or registers some, has its address.
        viewed = [(piece, write) for piece, write in pieces if piece[0].viewed or piece[0].kind in HOST_KINDS]
        if not viewed or not self._has_all_writes(stream):
            return
        written = [piece[0].bytes for piece, write in viewed if write]
        mark = self._timeline.record(stream)

        def known() -> bool:
            return mark.clock is not None and self._is_known(stream, mark.clock.known.get(stream.number, 0))

        for piece, write in viewed:
            if not write and piece[0].bytes not in written:
                self._watch(piece, stream, what, stack, known)

    def view(self, pieces: Iterable[Piece]) -> None:
        """Record that the host has an array of memory, and the operations that still read it."""
        for piece in pieces:
            range_, low, high = piece
            range_.viewed = True
            for memory, start, end in range_.physical(low, high):
                for read in memory.reads(start, end):
                    actor, time = read.actor, read.time
                    if isinstance(actor, Stream) and self._has_all_writes(actor) and not self._is_known(actor, time):

                        def known(actor: Stream = actor, time: int = time) -> bool:
                            return self._is_known(actor, time)

                        self._watch(piece, actor, read.what, read.stack, known)

    def _has_all_writes(self, stream: Stream) -> bool:
        """Whether the checker sees all waits for a stream and all writes by devices."""
        return self._foreign.is_ours(stream) and not self._unseen_kernels()

    def _is_known(self, stream: Stream, time: int) -> bool:
        return self._timeline.certain(self._timeline.host, stream.number, time)

    def _watch(self, piece: Piece, stream: Stream, what: str, stack: Stack, known: Callable[[], bool]) -> None:
        range_, low, high = piece
        of_host = range_.kind in HOST_KINDS or (range_.kind == "allocation" and range_.grants is not None)
        if not of_host or range_.held_write or range_.bytes.shared or range_.ended or high - low > _LARGEST:
            return
        before: list[Moment] = [] if range_.born is None else [range_.born]
        for memory, start, end in range_.physical(low, high):
            before += memory.writes(start, end)
        host = self._timeline.host
        if all(self._timeline.certain(host, one.actor.number, one.time) for one in before):
            self._sources.append(_Source(piece, stream, what, stack, known, _checksum(piece)))

    def forget(self, ranges: Iterable[Range]) -> None:
        """Forget memory that an operation is about to write or free."""
        if self._sources:
            gone = {id(one.bytes) for one in ranges}
            self._sources = [one for one in self._sources if id(one.piece[0].bytes) not in gone]

    def clear(self) -> None:
        """Forget all sources, as the host may learn of the copies in a way that the checker does not see."""
        self._sources.clear()

    def check(self) -> None:
        """Report the sources that the host has written since their copies were queued."""
        sources, self._sources = self._sources, []
        for one in sources:
            range_ = one.piece[0]
            if one.known() or range_.ended is not None or not self._has_all_writes(one.stream):
                continue
            if _checksum(one.piece) == one.checksum:
                self._sources.append(one)
                continue
            copy = f"{one.what} on {one.stream.name}, which reads the same bytes"
            what = f"the host wrote {range_}, but nothing orders the write after {copy}."
            remedy = f"the host must synchronise with {one.stream.name} after its {one.what}."
            self._judge.report("race", what, remedy, range_, here(), used=one.stack)


def _checksum(piece: Piece) -> int:
    _, low, high = piece
    return zlib.crc32((ctypes.c_char * (high - low)).from_address(low))
