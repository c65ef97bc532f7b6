"""Who lets go of what was opened and dropped, and of what must not be let go of while the devices are at work."""

from __future__ import annotations

import _thread
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from streamalloc.core.internal import (
    CaptureError,
    CudaError,
    Deferred,
    Session,
    context_events,
    deferred_queue,
    undoing,
    work,
)

__all__ = ["Drops", "OnceIdle"]

# How often a call that may wait for the device is made again where the driver refuses it.
_TRIES = 5
# Seconds until it is looked again whether the devices have nothing to do; and when, after asking.
_IDLE_PAUSE = 0.02
_LOOKS = (0.0, 0.00005, 0.0002)


class Drops:
    """A thread that lets go of imports that were dropped: this process may not come to one of the points of work, and
    the owner of the memory waits."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._queue: SimpleQueue[bool] = SimpleQueue()
        """The only kind of queue that a finaliser may put into."""
        self._watching = False

    def submit(self, dropped: Deferred) -> None:
        """Let go of an import soon. Called by finalisers, which may interrupt anything."""
        deferred_queue(self._session).submit(dropped)
        self._queue.put(True)

    def watch(self) -> None:
        """Have the thread run from now on."""
        if self._watching:
            return
        self._watching = True
        args = (self._queue, weakref.ref(self._session))
        with undoing(lambda: setattr(self, "_watching", False)):
            threading.Thread(target=_let_go_of_the_dropped, args=args, name="streamalloc drops", daemon=True).start()
        weakref.finalize(self, self._queue.put, False).atexit = False


def _let_go_of_the_dropped(dropped: SimpleQueue[bool], reference: weakref.ref[Session]) -> None:
    while dropped.get():
        session = reference()
        if session is None or not session.usable:
            return
        work(session)
        del session


class OnceIdle(Deferred):
    """A call that waits for the devices, made on a thread of its own. A second call of it does nothing.

    While it waits, the driver makes other threads wait that need the context, such as for a new event (driver 580). And
    a stream may wait for what this process has yet to do, or to tell another process: then nobody would ever go on. So
    the call is made at a moment when the devices have nothing to do.
    """

    __slots__ = ("_call", "_session", "_then")

    def __init__(self, session: Session, call: Callable[[], object]) -> None:
        self._session = session
        self._call = call
        self._then = 0.0

    def attempt(self) -> bool:
        """Begin; it comes back where the devices are at work."""
        if time.monotonic() < self._then:
            return False
        self._then = time.monotonic() + _IDLE_PAUSE
        # One C function: threading.Thread.start breaks the thread where a signal handler raises.
        _thread.start_new_thread(self._run, ())
        return True

    def _run(self) -> None:
        for _ in range(_TRIES):
            # Errors of a context that is lost: nothing is left to wait for.
            with contextlib.suppress(CudaError), self._session.relaxed():
                try:
                    idle = self._idle()
                except CaptureError:
                    idle = False
                if not idle:
                    deferred_queue(self._session).submit(self)
                    return
            with contextlib.suppress(CudaError):
                self._call()
                return

    def _idle(self) -> bool:
        """Whether all work that devices have now is done at once."""
        events = context_events(self._session, self._session.ordinals)
        for pause in _LOOKS:
            time.sleep(pause)
            if all(event.query() for event in events):
                return True
        return False
