"""Ends deferred work, for tests that check that nothing is left."""

from __future__ import annotations

import gc

from streamalloc.core.internal import queues


def settle() -> int:
    """Collect garbage and do the deferred work of all drivers that can be done now; the number of items left.

    An item that is left waits for an importer, for a capture, or for queued work. Synchronise the device first, so that
    no item waits for queued work.

    Examples
    --------
    >>> buffer.free()
    >>> stream.synchronize()
    >>> settle()
    0
    """
    gc.collect()
    for queue in queues():
        queue.work()
    return sum(len(queue) for queue in queues())
