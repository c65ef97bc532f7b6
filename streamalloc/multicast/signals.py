"""Counters in the ranks' memory by which streams wait for each other: nothing blocks the host.

Each rank has a word in every other rank's memory for each channel and purpose, which it alone raises
(``cuStreamWriteValue32``, which is ordered after the stream's earlier work on the whole system); who waits, waits for a
word of its own memory (``cuStreamWaitValue32``). Words only count up, so they need no reset, and a rank may be ahead.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from streamalloc.core.event import Event
from streamalloc.core.stream import Stream, refuse_capture, stream_call
from streamalloc.driver.internal import cuda
from streamalloc.multicast.setup.agreement import CHANNELS, Layout

__all__ = ["Signals"]

_BARRIER, _SIGNAL = 0, 1
_WRAP = 1 << 32
_AT_LEAST = int(cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)


class Signals:
    """What the ranks of one process have counted so far."""

    __slots__ = ("_awaited", "_bases", "_latest", "_rounds", "_sent", "_size", "layout")

    def __init__(self, layout: Layout, bases: Sequence[int]) -> None:
        self.layout: Layout = layout
        self._size = len(bases)
        self._bases = bases
        """Where each rank's memory begins here."""
        self._rounds: defaultdict[int, int] = defaultdict(int)
        self._sent: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        self._awaited: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        self._latest: dict[tuple[int, int, int, int], tuple[Stream, Event]] = {}

    def barrier(self, streams: Mapping[int, Stream], channel: int) -> None:
        """Let each rank's stream wait for all other ranks; the ranks of this process at once."""
        checked_channel(channel)
        count = (self._rounds[channel] + 1) % _WRAP
        for rank, stream in streams.items():
            refuse_capture(stream, "cuStreamWaitValue32", _CAPTURED)
            self._in_order(stream, _BARRIER, rank, -1, channel)
        # All words are written before any is waited for: one stream may stand for several ranks.
        for rank, stream in streams.items():
            for other in self._others(rank):
                self._write(stream, other, _BARRIER, channel, rank, count)
        for rank, stream in streams.items():
            for other in self._others(rank):
                self._wait(stream, rank, _BARRIER, channel, other, count)
            self._passed(stream, _BARRIER, rank, -1, channel)
        # Only now: what failed half way can be tried again, and writes the same.
        self._rounds[channel] = count

    def put(self, rank: int, peer: int, stream: Stream, channel: int) -> None:
        """Raise ``rank``'s word in ``peer``'s memory."""
        self._check(rank, peer, stream, channel, "cuStreamWriteValue32")
        count = (self._sent[rank, peer, channel] + 1) % _WRAP
        self._in_order(stream, _SIGNAL, rank, peer, channel)
        self._write(stream, peer, _SIGNAL, channel, rank, count)
        self._passed(stream, _SIGNAL, rank, peer, channel)
        self._sent[rank, peer, channel] = count

    def wait(self, rank: int, peer: int, stream: Stream, channel: int) -> None:
        """Wait for ``peer``'s next word in ``rank``'s memory."""
        self._check(rank, peer, stream, channel, "cuStreamWaitValue32")
        count = (self._awaited[rank, peer, channel] + 1) % _WRAP
        self._wait(stream, rank, _SIGNAL, channel, peer, count)
        self._awaited[rank, peer, channel] = count

    def awaited(self, rank: int) -> npt.NDArray[np.uint32]:
        """The words of a rank as they would be if all had come that its streams may wait for."""
        words = np.zeros((2, CHANNELS, self._size), np.uint32)
        for channel, count in self._rounds.items():
            # A barrier that failed half way may have queued its waits.
            words[_BARRIER, channel] = (count + 1) % _WRAP
        for (waiting, peer, channel), count in self._awaited.items():
            if waiting == rank:
                words[_SIGNAL, channel, peer] = (count + 1) % _WRAP
        return words.reshape(-1)

    @property
    def used(self) -> bool:
        """Whether any stream may wait."""
        return bool(self._rounds or self._awaited)

    def forget(self) -> None:
        """Drop the streams that were used last, and their events: the memory is gone."""
        self._latest.clear()

    def _others(self, rank: int) -> list[int]:
        return [other for other in range(self._size) if other != rank]

    def _check(self, rank: int, peer: int, stream: Stream, channel: int, call: str) -> None:
        number = operator.index(peer)
        if not 0 <= number < self._size or number == rank:
            raise ValueError(f"peer={peer}: allowed are the other ranks of 0 to {self._size - 1}, and this is {rank}")
        checked_channel(channel)
        refuse_capture(stream, call, _CAPTURED)

    def _in_order(self, stream: Stream, kind: int, rank: int, peer: int, channel: int) -> None:
        """Let the stream wait for the one that counted here before it: a word must not count down."""
        latest = self._latest.get((kind, rank, peer, channel))
        if latest is not None:
            before, event = latest
            if before.closed or before.device != stream.device or before.handle != stream.handle:
                stream.wait(event)

    def _passed(self, stream: Stream, kind: int, rank: int, peer: int, channel: int) -> None:
        latest = self._latest.get((kind, rank, peer, channel))
        again = latest[1] if latest is not None and latest[1].device == stream.device else None
        self._latest[kind, rank, peer, channel] = stream, stream.record(again)

    def _write(self, stream: Stream, owner: int, kind: int, channel: int, sender: int, count: int) -> None:
        stream_call(stream, "cuStreamWriteValue32", self._word(owner, kind, channel, sender), count, 0)

    def _wait(self, stream: Stream, owner: int, kind: int, channel: int, sender: int, count: int) -> None:
        stream_call(stream, "cuStreamWaitValue32", self._word(owner, kind, channel, sender), count, _AT_LEAST)

    def _word(self, owner: int, kind: int, channel: int, sender: int) -> int:
        return self._bases[owner] + self.layout.word(kind, channel, sender, self._size)


_CAPTURED = "the words count up at each call, and a graph would write and wait for the same ones at each launch"


def checked_channel(channel: int) -> None:
    """Raise for what is no channel."""
    if isinstance(channel, bool) or not isinstance(channel, int):
        raise TypeError(f"channel must be an int, not {type(channel).__name__} ({channel!r})")
    if not 0 <= channel < CHANNELS:
        raise ValueError(f"channel={channel}: allowed are 0 to {CHANNELS - 1}")
