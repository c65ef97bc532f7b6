"""Driver calls on separate threads: releases of dropped imports, and calls that must wait until devices are idle."""

from __future__ import annotations

import _thread
import contextlib
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from streamalloc.core.errors import CudaError
from streamalloc.core.internal import Deferred, QueuedWork, deferred_queue, work
from streamalloc.core.session import Session

# Most attempts of a call that the driver refuses.
_TRIES = 5
# Seconds between two attempts while a device is busy.
_IDLE_PAUSE = 0.02
# Seconds before each query of the devices' work.
_QUERIES = (0.0, 0.00005, 0.0002)


def release_dropped(dropped: SimpleQueue[bool], reference: weakref.ref[Session]) -> None:
    """Thread body: do deferred work after each True in the queue, until a False.

    Without this thread, the process might reach no point of work while a dropped import's owner waits for the release.
    """
    while dropped.get():
        session = reference()
        if session is None or not session.usable:
            return
        work(session)
        del session


class OnceIdle(Deferred):
    """A driver call that waits for the devices, made on its own thread once they are idle.

    While such a call waits, driver 580 blocks all other threads that need the context. If a stream waits for an action
    of this process, the call would never return. ``call`` may run twice.
    """

    __slots__ = ("_call", "_not_before", "_session")

    def __init__(self, session: Session, call: Callable[[], object]) -> None:
        self._session = session
        self._call = call
        self._not_before = 0.0

    def attempt(self) -> bool:
        """Start the thread. It submits this item again if a device is busy."""
        if time.monotonic() < self._not_before:
            return False
        self._not_before = time.monotonic() + _IDLE_PAUSE
        _thread.start_new_thread(self._run, ())
        return True

    def _run(self) -> None:
        for _ in range(_TRIES):
            # After an error of a lost context there is no work to wait for.
            with contextlib.suppress(CudaError), self._session.relaxed():
                if not self._idle():
                    deferred_queue(self._session).submit(self)
                    return
            with contextlib.suppress(CudaError):
                self._call()
                return

    def _idle(self) -> bool:
        """Whether all present work of the devices has completed, within a few short queries."""
        queued = QueuedWork(self._session)
        for pause in _QUERIES:
            time.sleep(pause)
            if queued.done():
                return True
        return False
