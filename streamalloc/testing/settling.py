"""Tests that look whether anything was left behind."""

from __future__ import annotations

import gc

from streamalloc.core.internal import queues

__all__ = ["settle"]


def settle() -> int:
    """Collect garbage and end what was dropped and can end now, of all drivers; how much has not ended.

    What is left waits: for importers, for a capture, or for queued work. Synchronise the device first where that is not
    meant to count.
    """
    gc.collect()
    for queue in queues():
        queue.work()
    return sum(len(queue) for queue in queues())
