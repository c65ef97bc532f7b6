"""Barriers and signals between streams of different ranks, by counters in device memory. The host never blocks.

The memory of each rank has one counter for each sending rank, each channel and each kind (barrier or signal). Only the
sending rank increases the counter, by ``cuStreamWriteValue32``, which first makes the stream's earlier writes visible
to all devices. A stream of the receiving rank waits for the counter in that rank's own memory, by
``cuStreamWaitValue32``. Counters only increase. So they need no reset, and one rank may be ahead of other ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from streamalloc.core.internal import Fence, Stream
from streamalloc.core.properties import checked_type
from streamalloc.core.session import session_of
from streamalloc.driver.internal import cuda
from streamalloc.multicast.setup.plan import CHANNELS, RankLayout

_BARRIER, _SIGNAL = 0, 1
_WRAP = 1 << 32
"""Counters have 32 bits and wrap to 0 at this value. ``CU_STREAM_WAIT_VALUE_GEQ`` compares cyclically, so a wait is
correct also when its counter wraps.
"""
_AT_LEAST = int(cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
_CAPTURED = "the counters increase at each call, and a graph would write and wait for the same values at each launch"


class Signals:
    """Barriers and signals of the ranks of one process. ``layout`` describes the parts of each rank's memory. ``bases``
    has the address of each rank's memory in this process, by rank.
    """

    def __init__(self, layout: RankLayout, bases: Sequence[int]) -> None:
        self.layout: RankLayout = layout
        self._size = len(bases)
        self._bases = bases
        """Device address of each rank's memory in this process, by rank."""
        self._rounds: defaultdict[int, int] = defaultdict(int)
        """Number of barriers queued so far, by channel."""
        self._sent: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        """Number of signals that ``rank`` has sent to ``peer`` so far, by (rank, peer, channel)."""
        self._awaited: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        """Number of signals from ``peer`` for which ``rank`` has queued a wait, by (rank, peer, channel)."""
        self._latest: dict[tuple[int, int, int, int], Fence] = {}
        """Fence for the last barrier or signal, by (kind, rank, peer, channel); the peer of a barrier is -1.

        The next barrier or signal waits for this fence, so that the counter is written in order.
        """

    def barrier(self, streams: Mapping[int, Stream], channel: int) -> None:
        """Queue a barrier of ``channel`` on ``streams``, which has one stream for each rank of this process, by rank.
        Raises TypeError or ValueError for a wrong ``channel``, CaptureError if a stream is being captured, ClosedError
        if a stream was closed, and CudaError if the driver refuses.

        Each stream increments its rank's counter in the memory of all other ranks (``cuStreamWriteValue32``), then
        waits for the increments of the other ranks (``cuStreamWaitValue32``).
        """
        channel = _checked_channel(channel)
        count = (self._rounds[channel] + 1) % _WRAP
        for rank, stream in streams.items():
            stream.refuse_capture("cuStreamWaitValue32", _CAPTURED)
            self._wait_for_latest(stream, _BARRIER, rank, -1, channel)
        # All writes come before the first wait. Otherwise a stream that serves several ranks would wait for ever, for a
        # write that is queued after the wait.
        for rank, stream in streams.items():
            for other in self._others(rank):
                self._write(stream, other, _BARRIER, channel, rank, count)
        for rank, stream in streams.items():
            for other in self._others(rank):
                self._wait(stream, rank, _BARRIER, channel, other, count)
            self._record_latest(stream, _BARRIER, rank, -1, channel)
        # The barrier is counted after all calls have succeeded, so that after a failure the next barrier writes the
        # same values again. With a higher count on this rank alone, the ranks would wait for different values.
        self._rounds[channel] = count

    def put(self, rank: int, peer: int, stream: Stream, channel: int) -> None:
        """Queue an increment of the counter of ``rank`` in the memory of ``peer``, after the earlier work of ``stream``
        (``cuStreamWriteValue32``). Errors as for :meth:`barrier`; also TypeError if ``peer`` is no integer, and
        ValueError if it is not another rank.
        """
        peer, channel = self._checked(rank, peer, stream, channel, "cuStreamWriteValue32")
        count = (self._sent[rank, peer, channel] + 1) % _WRAP
        self._wait_for_latest(stream, _SIGNAL, rank, peer, channel)
        self._write(stream, peer, _SIGNAL, channel, rank, count)
        self._record_latest(stream, _SIGNAL, rank, peer, channel)
        self._sent[rank, peer, channel] = count

    def wait(self, rank: int, peer: int, stream: Stream, channel: int) -> None:
        """Have later work of ``stream`` wait for the next increment by ``peer`` in the memory of ``rank``
        (``cuStreamWaitValue32``). Errors as for :meth:`put`.
        """
        peer, channel = self._checked(rank, peer, stream, channel, "cuStreamWaitValue32")
        count = (self._awaited[rank, peer, channel] + 1) % _WRAP
        self._wait(stream, rank, _SIGNAL, channel, peer, count)
        self._awaited[rank, peer, channel] = count

    def released(self, rank: int) -> npt.NDArray[np.uint32]:
        """Return a one-dimensional array of values for all counters in the memory of ``rank``. If these values are
        written there, each wait that is queued on the rank's streams ends, so that the device becomes idle without the
        other ranks.
        """
        counters = np.zeros((2, CHANNELS, self._size), np.uint32)
        for channel, count in self._rounds.items():
            # 1 is added, because a barrier that failed was not counted but may have queued waits.
            counters[_BARRIER, channel] = (count + 1) % _WRAP
        for (waiting, peer, channel), count in self._awaited.items():
            if waiting == rank:
                counters[_SIGNAL, channel, peer] = (count + 1) % _WRAP
        return counters.reshape(-1)

    @property
    def used(self) -> bool:
        """Whether a barrier or a wait was queued, so that a stream may wait for a counter."""
        return bool(self._rounds or self._awaited)

    def forget(self) -> None:
        """Drop the references to streams and events. Call this after the memory was released."""
        self._latest.clear()

    def _others(self, rank: int) -> list[int]:
        return [other for other in range(self._size) if other != rank]

    def _checked(self, rank: int, peer: int, stream: Stream, channel: int, call: str) -> tuple[int, int]:
        # The numbers are keys. Another object with ``__index__``, such as a tensor, may be equal to itself only.
        number = checked_type("peer", peer, int)
        if not 0 <= number < self._size or number == rank:
            raise ValueError(f"peer={peer}: allowed are the other ranks of 0 to {self._size - 1}, and this is {rank}")
        found = number, _checked_channel(channel)
        stream.refuse_capture(call, _CAPTURED)
        return found

    def _wait_for_latest(self, stream: Stream, kind: int, rank: int, peer: int, channel: int) -> None:
        """Have ``stream`` wait for the last write of the counter, which may have been queued on another stream. Raises
        CudaError.

        Otherwise the new value could be written first, and the counter would then decrease.
        """
        latest = self._latest.get((kind, rank, peer, channel))
        if latest is not None:
            latest.precede(stream)

    def _record_latest(self, stream: Stream, kind: int, rank: int, peer: int, channel: int) -> None:
        self._latest[kind, rank, peer, channel] = Fence(session_of(stream), [stream])

    def _write(self, stream: Stream, owner: int, kind: int, channel: int, sender: int, count: int) -> None:
        stream.call("cuStreamWriteValue32", self._address(owner, kind, channel, sender), count, 0)

    def _wait(self, stream: Stream, owner: int, kind: int, channel: int, sender: int, count: int) -> None:
        stream.call("cuStreamWaitValue32", self._address(owner, kind, channel, sender), count, _AT_LEAST)

    def _address(self, owner: int, kind: int, channel: int, sender: int) -> int:
        return self._bases[owner] + self.layout.counter(kind, channel, sender, self._size)


def _checked_channel(channel: int) -> int:
    number = checked_type("channel", channel, int)
    if not 0 <= number < CHANNELS:
        raise ValueError(f"channel={channel}: allowed are 0 to {CHANNELS - 1}")
    return number
