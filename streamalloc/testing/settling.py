"""Completion of deferred work, for tests that check for leaks."""

from __future__ import annotations

import contextlib
import gc

from streamalloc.core.errors import CudaError
from streamalloc.core.internal import queues


def settle() -> int:
    """Collect garbage and do the deferred work of all drivers that is possible now. Returns the number of remaining
    items.

    A remaining item waits for an importer, a capture, or queued work. Synchronise the device first, so that no item
    waits for queued work.

    Examples
    --------
    >>> buffer.free()
    >>> stream.synchronize()
    >>> settle()
    0
    """
    gc.collect()
    for queue in queues():
        with contextlib.suppress(CudaError):  # of a driver whose calls fail: its items remain
            queue.work()
    return sum(len(queue) for queue in queues())
