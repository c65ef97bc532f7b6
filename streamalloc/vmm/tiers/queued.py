"""Queued work with a test for its completion, and batches of copies."""

from __future__ import annotations

import contextlib
import threading
import weakref

import numpy as np
import numpy.typing as npt

from streamalloc.core.errors import LOST, ClosedError, CudaError, InUseError, NotSupportedError
from streamalloc.core.internal import (
    Device,
    Event,
    QueuedWork,
    Stream,
    all_work,
    context_event,
    queue_batch,
    raw_handle,
)
from streamalloc.core.session import session_of
from streamalloc.vmm.access import After, ends_of

PER_THREAD = 2  # handle of the per-thread default stream
_LEGACY = (0, 1)  # handles of the legacy default stream, which takes no batches
_FIRST, _MOST = 32, 128
"""Number of copies in the first batch, and the most in later batches.

While a batch runs, the driver takes the next one. It takes 0.6 us per copy, and a copy of 64 KiB runs for 1.2 us. So
each batch may have 1.5 times as many copies as the one before.
"""


class Work:
    """Queued work of a device, recorded as events after the work. A stream in their place means all its queued work."""

    __slots__ = ("_device", "_ends", "_stream")

    def __init__(self, device: Device, *ends: Event | Stream) -> None:
        self._device = device
        self._ends = ends
        self._stream: weakref.ref[Stream] | None = None
        """Stream of the work; None if the work is on several streams, or on an unknown one."""

    @classmethod
    def of(cls, after: After, device: Device) -> Work:
        """Record the work that an argument names: an event, the queued work of a stream, or None for all work."""
        if after is None:
            return cls(device, *all_work(device))
        ends = ends_of(after, session_of(device))
        return cls(device, *(one if isinstance(one, Event) else one.record() for one in ends))

    @classmethod
    def behind(cls, stream: Stream) -> Work:
        """Record the queued work of a stream; never raises. If the driver refuses the record, the stream itself is
        used.
        """
        end: Event | Stream = stream
        with contextlib.suppress(CudaError, ClosedError):
            end = stream.record()
        work = cls(stream.device, end)
        if int(raw_handle(stream)) != PER_THREAD:  # its object stands for another stream on each thread
            work._stream = weakref.ref(stream)
        return work

    def done(self) -> bool:
        """Whether the work has completed. May be called during a capture."""
        with session_of(self._device).relaxed():
            return self._done()

    def _done(self) -> bool:
        for end in self._ends:
            try:
                if not end.query():
                    return False
            except ClosedError:
                # The owner of the event has closed it. Wait for all present work of the device instead.
                present = context_event(self._device)
                self._ends = self._ends if present is None else (present,)
                return False
            except LOST:
                pass  # no work is left
        return True

    def synchronize(self) -> None:
        """Block the host until it has completed."""
        while not self.done():
            with session_of(self._device).relaxed():
                for end in self._ends:
                    with contextlib.suppress(ClosedError, *LOST):
                        end.synchronize()

    def precede(self, stream: Stream) -> None:
        """Make later work of a stream wait for this work, unless it is on the same stream."""
        if self._stream is not None and self._stream() is stream:
            return
        for end in self._ends:
            try:
                stream.wait(end)
            except ClosedError:
                QueuedWork(session_of(stream)).precede(stream)


class Unfinished(Work):
    """Work that a thread is still queueing. Other threads wait until that thread calls :meth:`finish`."""

    __slots__ = ("_finished", "_thread")

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._finished = threading.Event()
        self._thread = threading.get_ident()

    def done(self) -> bool:
        """Whether it is queued, and has completed."""
        return self._finished.is_set()

    def synchronize(self) -> None:
        """Block the host until the work is queued.

        Raises
        ------
        InUseError
            A signal handler interrupted the thread that queues the work, and called this.
        """
        if self._thread == threading.get_ident() and not self.done():
            raise InUseError("a signal handler has interrupted a call that swaps pages, on its thread")
        self._finished.wait()

    def finish(self) -> None:
        """Record that all is queued; idempotent."""
        self._finished.set()


def copy_batch(
    targets: npt.NDArray[np.int64],
    sources: npt.NDArray[np.int64],
    nbytes: int,
    memory: npt.NDArray[np.int64],
    stream: Stream,
) -> None:
    """Queue copies of equal size, in any order among each other (``cuMemcpyBatchAsync``). Adjacent copies are merged.

    ``memory``: for each copy a number that identifies its allocation, because a merged copy must stay within one
    allocation. Without support for batches, and on the legacy default stream, each copy is one ``cuMemcpyAsync``.
    """
    session, raw = session_of(stream), raw_handle(stream)
    apart = memory[1:] != memory[:-1]
    for side in (targets, sources):
        apart |= side[1:] - side[:-1] != nbytes
    bounds = np.ones(len(targets) + 1, np.bool_)
    bounds[1:-1] = apart
    ends = bounds.nonzero()[0]
    first = ends[:-1]
    sides = targets[first], sources[first], (ends[1:] - first) * nbytes
    done, count = 0, _FIRST
    with stream.device.current():
        if len(first) > 1 and int(raw_handle(stream)) not in _LEGACY:
            with contextlib.suppress(NotSupportedError):
                while done < len(first):
                    queue_batch(session, raw, *(side[done : done + count].tolist() for side in sides))
                    done, count = done + count, min(count * 3 // 2, _MOST)
        for copy in zip(*(side[done:].tolist() for side in sides), strict=True):
            session.call("cuMemcpyAsync", *copy, raw)
