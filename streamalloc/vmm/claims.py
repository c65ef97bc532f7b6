"""Claims let only one call at a time change the mappings of a buffer or an arena, or put a group to sleep.

A call claims the objects that it changes, and ends its claims when it returns. A call on another thread that needs the
same objects waits for this end. The lock ``_lock`` is held only while claims are checked and made. While a call waits
for streams, files or other processes, it has claims and holds no lock.

A hook or a signal handler may make a call during another call on the same thread. Such an inner call raises InUseError
if the outer call has claimed one of its objects. If another thread has, the inner call waits only if its level is
higher than that of the outer call: 0 for groups and buffers, 1 for arenas. On the same level the other thread might be
waiting for this thread, and both would wait for ever, so InUseError is raised.

The work of a call is a function that :func:`claiming` calls, not a ``with`` block. Between the ``__enter__`` of a
context manager written in Python and its block, a signal handler may raise: the claims would then not be ended.
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
    """Base class of objects that a call claims before it changes their mappings."""

    _claim: Claim | None = None
    """Claims of the last call that claimed this object; None before the first."""


class Claim:
    """The claims of one call. :func:`claiming` makes this object."""

    def __init__(self, outer: Claim | None, level: int) -> None:
        self._outer = outer
        """Claims of the call on this thread during which this call was made; None if there is no such call."""
        self._level: int = level if outer is None else max(level, outer._level)
        self._process = _process
        self._thread = get_ident()
        self._end = Lock()
        """Lock that is held until the call ends, so that other threads can wait for its end."""
        self._end.acquire()
        self.ended: bool = False

    def take(self, things: Collection[Claimable], *, wait: bool = True) -> bool:
        """Wait until no other call claims one of ``things``, claim them, and return True. With ``wait=False``, return
        False at once if another call claims one of them.

        Raises
        ------
        InUseError
            Another call on this thread claims one of ``things``. Or this is an inner call whose level is not higher
            than that of the outer call, and another thread claims one of ``things``.
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
            # Wait until the other call ends. The lock is written in C, so `with` also releases it if a signal handler
            # raises.
            with other._end:
                pass

    def _other(self, things: Collection[Claimable]) -> Claim | None:
        """Return the :class:`Claim` of another call that claims one of ``things``; None if there is none."""
        for thing in things:
            other = thing._claim
            if other is not None and self._is_before(other):
                return other
        return None

    def _is_before(self, other: Claim) -> bool:
        """Return whether the call of ``other`` must end before this call can claim its objects. In a forked child,
        calls of the parent never end, and are ignored.
        """
        return other is not self and not other.ended and other._process is _process


_thread = local()
"""Thread-local data. The attribute ``claim`` is the :class:`Claim` of the thread's innermost call."""
_lock = RLock()  # Reentrant, because a signal handler may claim while its thread claims.
_process = object()
"""Object that identifies this process. A forked child replaces it, so that no call in the child waits for a claim of
the parent.
"""


def _forget_after_fork() -> None:
    global _lock, _process
    _lock, _process = RLock(), object()


os.register_at_fork(after_in_child=_forget_after_fork)


def claiming(things: Collection[Claimable], act: Callable[[], T], *, level: int = 0) -> T:
    """Claim ``things``, call ``act``, end the claims, and return the result of ``act``. ``act`` can claim more objects
    by :func:`claim_also`.

    ``level`` is 0 for groups and buffers, 1 for arenas. A call with level 1 does not wait for claims of groups and
    buffers. A call that is made during another call on the same thread has at least the level of the other call.

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
        return act()
    finally:
        # Only the last line calls a function, so no signal handler can raise before the claims are ended.
        _thread.claim = outer
        claim.ended = True
        claim._end.release()


def claim_also(things: Collection[Claimable], *, wait: bool = True) -> bool:
    """Claim ``things`` for the innermost :func:`claiming` call of this thread, until that call ends. Arguments, result
    and errors as for :meth:`Claim.take`.
    """
    claim: Claim = _thread.claim
    return claim.take(things, wait=wait)


def claimed(method: Callable[Concatenate[Self, P], T]) -> Callable[Concatenate[Self, P], T]:
    """Decorator for a method: each call claims the object first (:func:`claiming`). So the method can raise
    InUseError.
    """

    @functools.wraps(method)
    def call(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return claiming((self,), functools.partial(method, self, *args, **kwargs))

    return call
