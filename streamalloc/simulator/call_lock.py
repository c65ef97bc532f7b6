"""The lock that a thread holds during a simulated call. Garbage collections and signal handlers wait for the end of the
call.

A call of the real driver runs no Python code, so the interpreter cannot interrupt it. A simulated call is Python code.
Three kinds of code could interrupt a simulated call and find a state that is half changed, so they have to wait:

* Calls of other threads. One lock serves all machines, because collections and signals belong to the process.
* The garbage collector, since finalisers make driver calls. While a thread holds the lock, the collector's first
  threshold is 0, so that no automatic collection starts. ``gc.disable`` would not do: other threads disable and enable
  collections, too.
* Signal handlers, since a handler can raise. During a call of the main thread, :func:`_record` replaces each Python
  function that handles a signal of :data:`_SIGNALS`. The handler runs after the call. While a call waits, the original
  handlers are in place, and an exception of a handler ends the wait.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal.signal would make enum members of what it returns
import _thread
import atexit
import gc
import os
import signal
import threading
from dataclasses import dataclass, field
from typing import Any

from streamalloc.driver.locks import ThreadLocal

_SIGNALS = [int(getattr(signal, name)) for name in ["SIGHUP", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGTERM"]]
"""Signals whose handlers are delayed. A handler of another signal that raises in a call makes the machine unusable."""


def is_main_thread() -> bool:
    """Whether the calling thread is the main thread.

    ``threading.current_thread`` is not used, because it has a side effect: it registers threads that Python has not
    started, and ended threads whose finalisers run.
    """
    return threading.get_ident() == threading.main_thread().ident


@dataclass(eq=False)
class Caller:
    """State of a thread that makes calls of a machine: its context stack, its capture mode, and whether it runs a
    kernel or a host function.
    """

    ident: int = field(default_factory=threading.get_ident)
    is_main: bool = field(default_factory=is_main_thread)
    contexts: list[Any] = field(default_factory=list)
    """The context stack; the last entry is the current context."""
    capture_mode: int = 0
    in_kernel: bool = False
    in_host_function: bool = False


class Threads(ThreadLocal, caller=Caller):
    """Object with a :class:`Caller` for each thread, made at the thread's first use of the object."""

    caller: Caller
    """The :class:`Caller` of the thread that reads this attribute."""


class WaitEnded(BaseException):
    """Exception that ends the wait of a call, because a signal handler raised ``error``."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


# The lock is reentrant, because a finaliser can make a call on this thread at any bytecode of enter and leave.
_lock = threading.RLock()
_acquire, _release = _lock.acquire, _lock.release
_get_thresholds, _set_threshold = gc.get_threshold, gc.set_threshold
_held = 0  # How often the thread that holds the lock has acquired it without releasing it.
_depth = 0  # Nesting depth of the calls of the thread that holds the lock.
# First threshold of the garbage collector as the program has set it, to be restored after the calls.
_threshold = gc.get_threshold()[0]


def enter(is_main: bool = False) -> None:
    """Wait for the lock and begin a call, which may be nested in another call of this thread. Until :func:`leave`, no
    automatic garbage collection starts.

    ``is_main``: whether this is the main thread. If so, the program's handlers of :data:`_SIGNALS` are delayed until
    :func:`leave`, except during a :func:`sleep`.
    """
    global _depth, _held, _holding, _threshold
    if is_main:
        if not _holding:  # A handler that is not replaced yet may raise here.
            if [*map(_get_handler, _SIGNALS)] != _handlers:
                _remember_handlers()
            for number in _replaced:
                _set_handler(number, _record)
        _holding += 1
    _acquire()
    _held += 1
    if _held == 1:
        _threshold = _get_thresholds()[0]
        _set_threshold(0)
    # Last: a collection that Python 3.12 or newer has scheduled must run before this line, outside of the call.
    _depth += 1


def leave(is_main: bool = False) -> None:
    """End the call that :func:`enter` began. ``is_main`` must have the value that ``enter`` got.

    At the end of the main thread's outermost call, the signals that came during the call are raised again. Their
    handlers run then, and may raise.
    """
    global _depth, _held, _holding
    _depth -= 1
    # If the threshold is not 0, another thread has set it meanwhile, and its value must stay.
    if _held == 1 and not _get_thresholds()[0]:
        _set_threshold(_threshold)
    _held -= 1
    _release()
    if is_main:
        _holding -= 1
        if not _holding:
            for number, handler in _replaced.items():
                _set_handler(number, handler)
            while _late:
                signal.raise_signal(_late.pop(0))


def sleep(until: _thread.LockType, seconds: float) -> None:
    """Release the call lock and wait until another thread releases the lock ``until``, for ``seconds`` at most. Then
    take the call lock again.

    Raises :class:`WaitEnded` if a signal handler raises during the wait.
    """
    global _holding
    is_main = _holding > 0 and is_main_thread()
    depth, holding, error = _depth, _holding, None
    if is_main:
        _holding = depth  # If a finaliser makes this call while another call begins, _holding is larger than the depth.
    try:
        for _ in range(depth):
            leave(is_main)
        until.acquire(True, seconds)
    except BaseException as raised:
        error = raised
    entered = 0
    while entered < depth:
        try:
            enter(is_main)
            entered += 1
        # Raised by a handler of a signal that is not delayed. The caller needs the lock, so the loop goes on.
        except BaseException as raised:
            error = raised
    if is_main:
        _holding = holding
    if error is not None:
        raise WaitEnded(error)


# -- signals ---------------------------------------------------------------------------------------------------

_holding = 0  # Nesting depth of the calls of the main thread. While it is not 0, the handlers of _SIGNALS are replaced.
_get_handler, _set_handler = _signal.getsignal, _signal.signal
_handlers: list[Any] = []  # The handlers of _SIGNALS that the program has installed.
# Handlers that are functions, by signal number: these are replaced.
_replaced: dict[int, Any] = {}
_late: list[int] = []  # Numbers of the signals that came during a call.


def _remember_handlers() -> None:
    """Record the program's handlers of :data:`_SIGNALS`.

    For a signal whose handler is :func:`_record` now, the program's handler that was recorded earlier stays.
    """
    global _handlers, _replaced
    known = _replaced
    pairs = [(number, _get_handler(number)) for number in _SIGNALS]
    found = [known.get(number, signal.SIG_DFL) if handler is _record else handler for number, handler in pairs]
    _replaced = {number: handler for number, handler in zip(_SIGNALS, found, strict=True) if callable(handler)}
    # The variable is set last. If a handler raises before this line, the next call records the handlers anew.
    _handlers = found


def _record(number: int, _frame: object) -> None:
    if _holding:
        _late.append(number)
    else:  # A handler raised while the handlers were being replaced, so the handler of this signal is put back.
        _set_handler(number, _replaced.get(number, signal.SIG_DFL))
        signal.raise_signal(number)


def _after_fork() -> None:
    """Replace the lock in a forked child: a thread that the child does not have may have held it."""
    global _acquire, _depth, _held, _holding, _release, _threshold
    lock = threading.RLock()
    _acquire, _release = lock.acquire, lock.release
    _late.clear()
    in_main, _holding = bool(_holding), min(_holding, 1)
    _acquire()
    if not _held:
        _threshold = gc.get_threshold()[0]
    _held = _depth = 1
    leave(in_main)


os.register_at_fork(after_in_child=_after_fork)


def _keep_at_exit() -> None:
    """Hold the lock from now on, except in :func:`sleep`.

    The interpreter stops daemon threads at exit. A thread that is stopped while it holds the lock would block all later
    calls.
    """
    if _acquire(True, _PATIENCE):
        enter()
        _release()


_PATIENCE = 1.0
"""Longest time in seconds that the exit of the interpreter waits for the lock."""
atexit.register(_keep_at_exit)
