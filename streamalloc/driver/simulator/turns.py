"""One thread at a time in the simulated driver, and what must not come in the middle of a call.

A call of the real driver is C: no Python runs within it. Here it is Python, and three things have to be kept out:

* Other threads: there is one lock, for all machines.
* The garbage collector: finalisers make driver calls of their own. Automatic collections are off while the lock is
  held, and one that is started there all the same (somebody else has turned them on) finds nothing to collect.
* What signal handlers raise: they run in the main thread, between any two bytecodes. So a helper thread makes the main
  thread's calls, in its name, and the main thread waits where no signal is looked at: in C. A call that blocks is
  different: the main thread can be interrupted while it waits, and the call is given up.

Python looks for signals, and from 3.12 on for collections that are due, at function entries, backward jumps, and
*after* calls of C functions. It does not look between the end of an iterator's ``__next__`` in C and the next line.
That is why some functions are called here by ``for _ in iter(function, _NEVER): break``.
"""

from __future__ import annotations

import _thread
import ctypes
import functools
import gc
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Abandoned", "Caller", "enter", "helper", "is_mine", "leave", "run", "sleep"]

_NEVER = object()


def _each_time(function: Callable[[], Any]) -> Iterator[Any]:
    """An iterator that calls a function for each item, and never ends."""
    return iter(function, _NEVER)


_lock = threading.Lock()
"""Held by the thread whose turn it is. One for all machines, as only a whole process can have collections or not."""

_owner = 0  # the thread that has the lock
_depth = 0
_was_on = False
_acquire = _each_time(_lock.acquire)
# At the end of a turn nothing may be made, not even the bound method that a profiler is told of: up to Python 3.11 a
# collection may come where something is made, and its finalisers' calls would wait for this thread.
_release = _each_time(_lock.release)
_is_enabled, _enable, _disable = _each_time(gc.isenabled), _each_time(gc.enable), _each_time(gc.disable)


def enter() -> None:
    """Wait for this thread's turn. In the middle of one, it goes on."""
    global _depth, _owner
    thread = threading.get_ident()
    if _owner == thread:
        _depth += 1
        return
    for _ in _acquire:
        break
    _owner = thread
    # Before the next function begins: a collection may come there, and its finalisers' calls are in the middle of this.
    _depth = 1
    _keep_collections_out()


def leave() -> None:
    """The end of what :func:`enter` began."""
    global _depth, _owner
    if _depth > 1:
        _depth -= 1
        return
    _let_collections_in()
    _owner = _depth = 0
    for _ in _release:
        break


def is_mine(ident: Callable[[], int] = threading.get_ident) -> bool:
    """Whether it is the calling thread's turn."""
    return _owner == ident()


def sleep(until: _thread.LockType, seconds: float) -> None:
    """Let others have their turn until somebody releases the lock ``until``, or the time is over."""
    global _depth, _owner
    thread, depth = _owner, _depth
    _let_collections_in()
    _owner = _depth = 0
    for _ in _release:
        break
    try:
        until.acquire(True, seconds)
    finally:
        for _ in _acquire:
            break
        _owner = thread
        _depth = depth
        _keep_collections_out()


def _keep_collections_out(callbacks: list[Any] = gc.callbacks) -> None:
    global _was_on
    for _was_on in _is_enabled:
        break
    for _ in _disable:
        break
    callbacks.append(_skip)


def _let_collections_in(callbacks: list[Any] = gc.callbacks) -> None:
    if _skip in callbacks:
        callbacks.remove(_skip)
    if _was_on:
        for _ in _enable:
            break


def _skip(phase: str, _info: object, mine: Callable[[], bool] = is_mine) -> None:
    """A collection in the wrong place: it finds nothing, as all objects are put out of its reach meanwhile.

    It is there only while somebody has the lock: what a signal handler raises in the main thread would be lost here.
    """
    if mine():
        (gc.freeze if phase == "start" else gc.unfreeze)()


# -- the main thread's calls -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Caller:
    """A thread that makes calls of a machine, or in whose name a helper makes them."""

    ident: int = field(default_factory=threading.get_ident)
    is_main: bool = field(default_factory=lambda: threading.get_ident() == threading.main_thread().ident)
    contexts: list[Any] = field(default_factory=list)
    """The current one last."""
    capture_mode: int = 0


class Abandoned(BaseException):
    """The thread for which a helper waits has been interrupted."""


# Locks of Python's own, without what it makes of them: waiting goes on when a signal comes. Both calls let go of the
# global lock, so that the other thread has it when it wakes.
_python = ctypes.CDLL(None)
_python.PyThread_allocate_lock.restype = ctypes.c_void_p
_python.PyThread_acquire_lock.argtypes = (ctypes.c_void_p, ctypes.c_int)
_python.PyThread_release_lock.argtypes = (ctypes.c_void_p,)
_python.PyThread_release_lock.restype = None


class _Sign:
    """What one thread gives and another waits for, with no look at signals."""

    def __init__(self) -> None:
        lock = ctypes.c_void_p(_python.PyThread_allocate_lock())
        self.wait: Callable[[], object] = functools.partial(_python.PyThread_acquire_lock, lock, 1)
        self.give: Callable[[], object] = functools.partial(_python.PyThread_release_lock, lock)
        self.wait()


class Helper:
    """A thread that makes calls for the main thread, one at a time; in the middle of one another may be needed."""

    def __init__(self) -> None:
        self.free: bool = True
        """Set by the main thread alone, which may make other calls, out of signal handlers, until it has the answer."""
        self.work: Any = None
        self.answer: Any = None
        self.error: Any = None
        self.blocked: Any = None
        """Held until there is an answer, where that takes long."""
        self.abandoned: bool = False
        go, done, late = _Sign(), _Sign(), _Sign()
        self._go, self._done, self._late = go.wait, done.give, late.give
        self.go: Iterator[Any] = _each_time(go.give)
        self.done: Iterator[Any] = _each_time(done.wait)
        """There is an answer, or it takes long."""
        self.late: Iterator[Any] = _each_time(late.wait)
        """There is an answer that took long."""
        thread = threading.Thread(target=self._serve, name="streamalloc calls of the main thread", daemon=True)
        thread.start()

    def _serve(self) -> None:
        _helpers[threading.get_ident()] = self
        while True:
            self._go()
            self.abandoned, self.blocked = False, None
            try:
                self.answer = self.work()
            except BaseException as error:
                self.error = error
            if self.blocked is None:
                self._done()
            else:
                self.blocked.release()
                self._late()

    def waits(self) -> None:
        """Called before the helper waits for something, again and again: the main thread may be interrupted now."""
        if self.blocked is None:
            self.blocked = _thread.allocate_lock()
            self.blocked.acquire()
            self._done()
        if self.abandoned:
            raise Abandoned


_helpers: dict[int, Helper] = {}
_all: list[Helper] = []


def helper() -> Helper | None:
    """Of which helper this is the thread."""
    return _helpers.get(threading.get_ident())


def run(work: Callable[[], Any]) -> Any:
    """Do something for the main thread, as a whole whatever signals come.

    Handlers of signals that came meanwhile run when the caller has what this returns.
    """
    if is_mine():
        return work()
    for one in _all:
        if one.free:
            break
    else:
        try:
            one = Helper()
        except RuntimeError:  # no new threads while the interpreter exits
            return work()
        _all.append(one)
    one.free = False
    one.work = work
    for _ in one.go:
        break
    for _ in one.done:
        break
    error: Any = None
    if one.blocked is not None:
        try:
            one.blocked.acquire()
        except BaseException as interrupt:
            one.abandoned = True
            error = interrupt
        for _ in one.late:
            break
    # References are dropped by this thread: not by the helper, which must not run what finalisers do.
    answer, failed, one.answer, one.error, one.work = one.answer, one.error, None, None, None
    one.free = True
    if error is not None or failed is not None:
        raise error or failed
    return answer


def _after_fork() -> None:
    global _acquire, _depth, _lock, _owner, _release
    _lock = threading.Lock()  # another thread may have had the old one
    _acquire, _release = _each_time(_lock.acquire), _each_time(_lock.release)
    _helpers.clear()
    _all.clear()
    if _depth:
        _let_collections_in()
    _owner = _depth = 0


os.register_at_fork(after_in_child=_after_fork)
