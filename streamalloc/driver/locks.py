"""Locks for ``with`` blocks in which a signal handler may raise, and thread-local data that finalisers may read.

On Python 3.12 and newer a signal handler may raise at the point where a loop jumps back from within an ``if``. Python
does not count this jump as part of the ``with`` block around the loop: the block's exit does not run, and the lock
stays held. So no loop with an ``if`` at the end of its body is written directly in such a block; it is in a function
that the block calls.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, ClassVar

__all__ = ["Lock", "RLock", "ThreadLocal"]


class ThreadLocal(threading.local):
    """Thread-local values, which are made on first use.

    A subclass names a function that makes each value: ``class Mine(ThreadLocal, a=dict)``.

    A value is made when the thread first reads it, not by ``__init__``: a finaliser that runs during ``__init__`` would
    find the object without its values.
    """

    _makes: ClassVar[dict[str, Callable[[], Any]]]

    def __init_subclass__(cls, **makes: Callable[[], Any]) -> None:
        cls._makes = makes

    def __getattr__(self, name: str) -> Any:
        make = self._makes.get(name)
        if make is None:
            raise AttributeError(name)
        return self.__dict__.setdefault(name, make())  # A finaliser may have made the value meanwhile.


if sys.version_info < (3, 14):
    Lock = threading.Lock
    RLock = threading.RLock
else:
    import _thread

    # Since Python 3.14 a signal handler may raise after a lock's `__enter__`, which is written in C, and before the
    # block begins: the lock then stays held for ever (CPython issue 148874). After an `__enter__` in Python, no handler
    # runs before the block begins. `__exit__` must be in C: a handler may raise at the start of a method in Python.

    def _enter(self: Lock | RLock) -> bool:
        # `acquire` is called by the unpacking of `map`, in C: after a call in Python code, a handler could raise.
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
