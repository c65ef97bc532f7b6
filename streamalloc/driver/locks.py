"""Locks for ``with`` blocks in which a signal handler may raise, and data of threads that finalisers may read.

Since Python 3.12 a handler may raise where a loop jumps back from within an ``if``. This jump is not part of the block
around the loop: the block does not end, and the lock stays held. So a loop with an ``if`` at the end of its body is in
a function that the block calls.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, ClassVar

__all__ = ["Lock", "RLock", "ThreadLocal"]


class ThreadLocal(threading.local):
    """Values of the calling thread.

    A subclass names the function that makes each: ``class Mine(ThreadLocal, a=dict)``.

    A value is made by the thread's first use of it, not by ``__init__``: a finaliser that runs during that would find
    the object without its values.
    """

    _makes: ClassVar[dict[str, Callable[[], Any]]]

    def __init_subclass__(cls, **makes: Callable[[], Any]) -> None:
        cls._makes = makes

    def __getattr__(self, name: str) -> Any:
        make = self._makes.get(name)
        if make is None:
            raise AttributeError(name)
        return self.__dict__.setdefault(name, make())  # A finaliser may have made it meanwhile.


if sys.version_info < (3, 14):
    Lock = threading.Lock
    RLock = threading.RLock
else:
    import _thread

    # Since Python 3.14 a signal handler may raise after `__enter__` of a lock, which is C, and before the block: the
    # lock stays held for ever (CPython issue 148874). After a method written in Python no handler runs before the
    # block. `__exit__` must be C: a handler may raise at the start of a method written in Python.

    def _enter(self: Lock | RLock) -> bool:
        # Unpacking calls `acquire`, since a handler may run after a call in Python code.
        (acquired,) = map(self.acquire, (True,))
        return acquired

    class Lock:
        """Lock that a ``with`` block always releases, also if a signal handler raises."""

        __slots__ = ("__exit__", "acquire", "locked", "release")
        __enter__ = _enter

        def __init__(self) -> None:
            lock = threading.Lock()
            self.acquire, self.locked, self.release = lock.acquire, lock.locked, lock.release
            self.__exit__ = lock.__exit__

    class RLock(_thread.RLock):
        """Reentrant lock that a ``with`` block always releases, also if a signal handler raises."""

        __slots__ = ()
        __enter__ = _enter
