"""Claims: only one call at a time changes the mappings of a buffer or an arena, or puts a group to sleep.

A call claims the objects that it changes, and ends its claims when it returns. A call on another thread waits, and then
uses the new state. The lock ``_lock`` is held only to check and to claim. While a call waits for streams, files or
other processes, it has claims and holds no lock.

A hook or a signal handler may make a call during another call on the same thread. Such an inner call waits only for
claims of a higher level. The owner of another claim may itself wait for this thread, and both would wait for ever: the
inner call raises InUseError instead.

A call is a function that :func:`claiming` calls, not a ``with`` block. A signal handler may raise between the start of
a block written in Python and its body, and the claims would stay as long as the traceback.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection
from threading import get_ident, local
from typing import Concatenate, ParamSpec, TypeVar

from streamalloc.core.errors import InUseError
from streamalloc.driver.internal import Lock, RLock

P = ParamSpec("P")
T = TypeVar("T")
Self = TypeVar("Self", bound="Claimable")


class Claimable:
    """An object whose mappings only one call at a time changes."""

    _claim: Claim | None = None
    """Claim of the latest call; None before the first."""


class Claim:
    """The claims that one call holds, made by :func:`claiming`."""

    def __init__(self, outer: Claim | None, level: int) -> None:
        self._outer = outer
        """Claims of the call of this thread in which this call was made; None for an outermost call."""
        self._level: int = level if outer is None else max(level, outer._level)
        self._process = _process
        self._thread = get_ident()
        self._end = Lock()
        """Lock that is held until the call ends."""
        self._end.acquire()
        self.ended: bool = False

    def take(self, things: Collection[Claimable], *, wait: bool = True) -> bool:
        """Claim ``things`` once no other call claims one of them; return True. With ``wait=False``, return False at
        once if another call does.

        Raises
        ------
        InUseError
            Another call on this thread has claimed one of them; or it has claims of the same or a higher level, and
            another thread has claimed one of them.
        """
        while True:
            with _lock:
                other = self._other(things)
                if other is None:
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
            # Wait until the other call ends. This lock is written in C: an exception of a signal handler releases it.
            with other._end:
                pass

    def _other(self, things: Collection[Claimable]) -> Claim | None:
        """Return the claim of another call on one of these objects; None if no other call claims one."""
        for thing in things:
            other = thing._claim
            if other is not None and not other.ended and self._is_before(other):
                return other
        return None

    def _is_before(self, other: Claim) -> bool:
        """Whether the call of ``other`` must end before this one. In a forked child, calls of the parent need not: they
        never end there.
        """
        return other is not self and not other.ended and other._process is _process


_thread = local()
"""Attribute ``claim``: the claims of the thread's innermost call."""
_lock = RLock()  # Reentrant, because a signal handler may claim while its thread claims.
_process = object()
"""Stands for this process. A forked child replaces it, so that no call in the child waits for a claim of the parent."""


def _forget_after_fork() -> None:
    global _lock, _process
    _lock, _process = RLock(), object()


os.register_at_fork(after_in_child=_forget_after_fork)


def claiming(things: Collection[Claimable], act: Callable[[Claim], T], *, level: int = 0) -> T:
    """Claim ``things``, call ``act(claim)``, end the claims, and return the result.

    ``level``: 0 for groups and buffers, 1 for arenas. A call of an arena does not wait for claims of groups and
    buffers. An inner call has at least the level of the call that it is made in.

    Raises
    ------
    InUseError
        As for :meth:`Claim.take`.
    """
    outer: Claim | None = getattr(_thread, "claim", None)
    claim = Claim(outer, level)
    try:
        _thread.claim = claim
        claim.take(things)
        return act(claim)
    finally:
        # Only the last line calls a function, so a signal handler cannot raise before the claims are ended.
        _thread.claim = outer
        claim.ended = True
        claim._end.release()


def claimed(method: Callable[Concatenate[Self, P], T]) -> Callable[Concatenate[Self, P], T]:
    """Decorate a method so that it runs under a claim of its object (:func:`claiming`), and so raises InUseError."""

    @functools.wraps(method)
    def call(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return claiming((self,), lambda _: method(self, *args, **kwargs))

    return call
