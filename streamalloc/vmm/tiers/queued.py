"""Ends that arguments name, and batches of copies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from streamalloc.core.errors import NotSupportedError
from streamalloc.core.internal import Device, Event, Stream, all_work, queue_batch, raw_handle
from streamalloc.core.session import session_of
from streamalloc.vmm.access import After, ends_of

PER_THREAD = 2  # handle of the per-thread default stream
_LEGACY = (0, 1)  # handles of the legacy default stream, which takes no batches
_FIRST, _MOST = 32, 128
"""Number of copies in the first batch, and the most in later batches.

While a batch runs, the driver takes the next one. It takes 0.6 us per copy, and a copy of 64 KiB runs for 1.2 us. So
each batch may have 1.5 times as many copies as the one before.
"""


def ends_or_all(after: After, device: Device) -> Iterable[Event | Stream]:
    """The events and streams that an argument names; for None an event after all work of the device."""
    return all_work(device) if after is None else ends_of(after, session_of(device))


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
