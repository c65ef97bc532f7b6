"""Claims: one call at a time changes the mappings of a buffer or an arena, or puts a group to sleep.

A call claims what it changes, and releases it at its end; a call on another thread waits for that and then acts on the
state that it finds. The lock below is held for the check and the claim alone: calls wait for streams, files and other
processes while they have claims, and no lock. A call that is made during another one on the same thread, by a hook or
a signal handler, waits only for claims of a higher level: the others could wait for this thread.

A call is a function that :func:`claiming` calls, and no ``with`` block: an exception of a signal handler may come
between the start of a block written in Python and its body, and claims would stay as long as the traceback.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Collection
from typing import Concatenate, ParamSpec, TypeVar

from streamalloc.core.errors import InUseError

__all__ = ["Claim", "Claimable", "claimed", "claiming"]

P = ParamSpec("P")
T = TypeVar("T")
Self = TypeVar("Self", bound="Claimable")


class Claimable:
    """Object that one call at a time changes."""

    __slots__ = ("_claim",)

    _claim: Claim | None
    """Claim of the last call; None before the first."""


class Claim:
    """The claims of one call; made by :func:`claiming`."""

    __slots__ = ("_end", "_level", "_outer", "_process", "_thread", "ended")

    def __init__(self, outer: Claim | None, level: int) -> None:
        self._outer = outer
        self._level: int = level if outer is None else max(level, outer._level)
        self._process = _process
        self._thread = threading.get_ident()
        self._end = threading.Lock()
        """Locked until the end of the call."""
        self._end.acquire()
        self.ended: bool = False

    def take(self, things: Collection[Claimable], *, wait: bool = True) -> bool:
        """Claim all of these, once no other call has claimed one; without ``wait`` at once or not at all.

        Raises
        ------
        InUseError
            Another call on this thread has claimed one, or has claims of the same level while another thread has one.
        """
        while True:
            with _lock:
                for thing in things:
                    other = thing._claim
                    if other is not None and not other.ended and self._is_before(other):
                        break
                else:
                    for thing in things:
                        thing._claim = self
                    return True
            if not wait:
                return False
            outer = self._outer
            inside = outer is not None and self._is_before(outer) and outer._level >= self._level
            if inside or other._thread == self._thread:
                one = next((thing for thing in things if thing._claim is other), None)
                raise InUseError(f"{one!r} is in use: this is a call of a hook or a signal handler during another call")
            with other._end:  # in C, so that an exception of a signal handler leaves the lock released
                pass

    def _is_before(self, other: Claim) -> bool:
        """Whether another call has not ended; a forked child waits for none of its parent."""
        return other is not self and not other.ended and other._process is _process


class _Thread(threading.local):
    claim: Claim | None = None
    """Claims of the innermost call."""


_thread = _Thread()
_lock = threading.RLock()  # a signal handler may make a claim while its thread makes one
_process = object()


def _forget_after_fork() -> None:
    global _lock, _process
    _lock, _process = threading.RLock(), object()


os.register_at_fork(after_in_child=_forget_after_fork)


def claiming(things: Collection[Claimable], act: Callable[[Claim], T], *, level: int = 0) -> T:
    """Return ``act(claim)`` with a claim of these, which ends with the call.

    ``level``: 0 for groups and buffers, 1 for arenas, whose calls wait for none of the former. A call inside another
    one has at least its level.

    Raises
    ------
    InUseError
        As for :meth:`Claim.take`.
    """
    outer = _thread.claim
    claim = Claim(outer, level)
    try:
        _thread.claim = claim
        claim.take(things)
        return act(claim)
    finally:
        # No call before the last: an exception of a signal handler comes after it.
        _thread.claim = outer
        claim.ended = True
        claim._end.release()


def claimed(method: Callable[Concatenate[Self, P], T]) -> Callable[Concatenate[Self, P], T]:
    """Decorate a method that claims its object."""

    @functools.wraps(method)
    def call(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return claiming((self,), lambda _: method(self, *args, **kwargs))

    return call
