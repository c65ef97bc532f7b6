"""Watching allocators: who wants to know is told of each allocation and each free, and costs nothing while nobody does.

An allocator calls two functions that it has bound. While somebody watches, those are the methods of a :class:`Tap`,
which make the same calls and tell the watchers; at the end the driver's own functions are back. A cache, which makes no
calls on its fast path, leaves that path meanwhile (:mod:`streamalloc.pool.cache`).

Finalisers free memory, too. A watcher is told of that inside of the finaliser, so it hands the news in and returns.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from itertools import starmap
from types import FrameType
from typing import Any, Protocol

from streamalloc.core.session import PerDriver, Session
from streamalloc.driver import DriverMisuseError, ForkedProcessError

__all__ = [
    "Tap",
    "Watched",
    "Watcher",
    "Watching",
    "bare",
    "besides",
    "look",
    "tap_of",
    "tell_freed",
    "was_asked",
    "watch",
    "watching_of",
]

_CALLED = object()
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


class Watcher(Protocol):
    """Who wants to know of allocations and frees; of mappings the allocator is None."""

    def wants(self, allocator: Any, /) -> bool:
        """Whether it wants to know of those of an allocator."""

    def asked(self, allocator: Any, nbytes: int, /) -> None:
        """Memory is asked for, and the driver was not asked yet. What this raises goes to who asks."""

    def allocated(self, allocator: Any, address: int, nbytes: int, stream: Any, /) -> None:
        """Memory was allocated. What this raises goes to who allocates, once the memory is given back."""

    def failed(self, allocator: Any, nbytes: int, stream: Any, /) -> None:
        """Memory was asked for, and the driver has refused it."""

    def freed(self, address: int, stream: Any, /) -> None:
        """Memory is about to be freed; perhaps it was allocated before anybody watched. Takes no lock, never raises."""

    def kept(self, address: int, /) -> None:
        """What :meth:`freed` has said did not happen: the driver has refused. Takes no lock, never raises."""

    def look(self) -> None:
        """A free was made, and not by a finaliser."""


class Watched(Protocol):
    """An allocator, as far as watching goes."""

    _alloc: Any
    _free: Any
    _session: Session

    def _watched_by(self, watchers: tuple[Watcher, ...]) -> None: ...


class Tap:
    """What stands in for the two functions of one allocator."""

    __slots__ = ("_alloc", "_free", "_owner", "_under_way", "watchers")

    def __init__(self, owner: Watched, alloc: Any, free: Any) -> None:
        self._owner = weakref.ref(owner)
        self._alloc = alloc
        self._free = free
        self._under_way: dict[int, tuple[Any, list[Any], tuple[Watcher, ...]]] = {}
        """Frees that are being made, by the identity of the pointer: that, how far they have come, and who is told."""
        self.watchers: tuple[Watcher, ...] = ()

    @property
    def functions(self) -> tuple[Any, Any]:
        """What it stands in for."""
        return self._alloc, self._free

    def _told(self, besides: tuple[Watcher, ...]) -> tuple[Watcher, ...]:
        if not besides:
            return self.watchers
        return tuple([one for one in self.watchers if one not in besides])

    def allocate(self, nbytes: int, pool: Any, stream: Any, besides: tuple[Watcher, ...] = ()) -> Any:
        """Allocate, in place of the driver's function; see :func:`besides`."""
        watchers, owner = self._told(besides), self._owner()
        for watcher in watchers:
            watcher.asked(owner, nbytes)
        answers: list[Any] = []
        try:
            answers.extend(starmap(self._alloc, ((nbytes, pool, stream),)))
            result, ptr = answers[0]
            if result:
                for watcher in watchers:
                    watcher.failed(owner, nbytes, stream)
            elif address := int(ptr):
                for watcher in watchers:
                    watcher.allocated(owner, address, nbytes, stream)
        except BaseException:
            # Nobody has the memory yet.
            if answers and not answers[0][0]:
                self.free(answers[0][1], stream, besides)
            raise
        return answers[0]

    def free(self, ptr: Any, stream: Any, besides: tuple[Watcher, ...] = ()) -> Any:
        """Free, in place of the driver's function. Where this raises, :func:`was_asked` says how far it has come."""
        answers: list[Any] = []
        watchers = self._told(besides)
        self._under_way[id(ptr)] = ptr, answers, watchers
        calls = starmap(self._free, ((ptr, stream),))
        address = int(ptr)
        told = False
        try:
            # Before it is free: another thread may be given the same memory at once, and tells of that.
            for watcher in watchers:
                watcher.freed(address, stream)
            told = True
        finally:
            # Nothing comes between these two.
            answers += (_CALLED,)
            answers += calls
            if not told:
                for watcher in watchers:
                    watcher.freed(address, stream)
        if answers[1][0]:
            for watcher in watchers:
                watcher.kept(address)
        else:
            look(watchers)
        del self._under_way[id(ptr)]
        return answers[1]

    def was_asked(self, ptr: Any) -> bool:
        """Whether the driver was asked to free memory by a :meth:`free` that has raised, and has not refused."""
        _, answers, watchers = self._under_way.pop(id(ptr), (ptr, [], self.watchers))
        asked = bool(answers) and not (len(answers) > 1 and answers[1][0])
        if not asked:
            for watcher in watchers:
                watcher.kept(int(ptr))
        return asked


def look(watchers: tuple[Watcher, ...]) -> None:
    """A free was made: tell watchers, unless a finaliser of the package makes it, in which nobody may wait."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        if frame.f_code.co_name == "__del__":
            return
        frame = frame.f_back
    for watcher in watchers:
        watcher.look()


def tap_of(allocator: Watched) -> Tap | None:
    """What stands in for the functions of an allocator; None where nobody watches."""
    # Of a closed pool the other function is another one.
    tap = getattr(allocator._free, "__self__", None)
    return tap if type(tap) is Tap else None


def besides(function: Any, watchers: tuple[Watcher, ...]) -> Any:
    """A function that an allocator has bound, which notifies none of these watchers.

    An allocator over another one notifies those itself that watch both: an allocation is one, whoever makes it.
    """
    tap = getattr(function, "__self__", None)
    return functools.partial(function, besides=watchers) if watchers and type(tap) is Tap else function


def bare(alloc: Any) -> Any:
    """The function that allocates without telling anybody: for memory that belongs to graphs."""
    tap = getattr(alloc, "__self__", None)
    return tap.functions[0] if type(tap) is Tap else alloc


def was_asked(allocator: Watched, ptr: Any, error: BaseException) -> bool:
    """Whether the driver was asked to free memory by a call that has raised."""
    tap = tap_of(allocator)
    return not isinstance(error, (DriverMisuseError, ForkedProcessError)) if tap is None else tap.was_asked(ptr)


class Watching:
    """Who watches the allocators of one driver: ``watching_of(session)``."""

    __slots__ = ("_lock", "_session", "watchers")

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.RLock()
        self.watchers: tuple[Watcher, ...] = ()

    def add(self, watcher: Watcher) -> None:
        """Tell a watcher of the allocators that it wants to know of, from now on."""
        with self._lock:
            if watcher not in self.watchers:
                self.watchers += (watcher,)
            for allocator in self.allocators():
                self._watch(allocator)

    def remove(self, watcher: Watcher) -> None:
        """Tell a watcher nothing any more. Where it was the last, allocators have their own functions again."""
        if self._session.forked:
            return
        with self._lock:
            self.watchers = tuple(other for other in self.watchers if other is not watcher)
            for allocator in self.allocators():
                self._watch(allocator)

    def bound(self, allocator: Watched) -> None:
        """An allocator has bound its functions, and the session knows of it."""
        if self.watchers:
            with self._lock:
                self._watch(allocator)

    def allocators(self) -> list[Any]:
        """The allocators that are alive."""
        return [one for one in self._session.holders() if hasattr(one, "_watched_by")]

    def _watch(self, allocator: Watched) -> None:
        allocator._watched_by(tuple(watcher for watcher in self.watchers if watcher.wants(allocator)))


watching_of: PerDriver[Watching] = PerDriver(Watching)
"""Who watches the allocators of a driver: ``watching_of(session)``."""


@contextlib.contextmanager
def tell_freed(session: Session, address: int, stream: Any) -> Iterator[None]:
    """A block that frees memory by another way than the allocator's function: what was left for later."""
    watchers = watching_of(session).watchers
    for watcher in watchers:
        watcher.freed(address, stream)
    try:
        yield
    except Exception:
        for watcher in watchers:
            watcher.kept(address)
        raise


def watch(allocator: Watched, watchers: tuple[Watcher, ...]) -> None:
    """Tell these of each call of an allocator's functions; with none, give it its own back."""
    tap = tap_of(allocator)
    if tap is None:
        if watchers and not allocator._session.forked:
            tap = Tap(allocator, allocator._alloc, allocator._free)
            tap.watchers = watchers
            alloc, free = tap.allocate, tap.free
            # Nothing is called between these.
            allocator._alloc = alloc
            allocator._free = free
        return
    tap.watchers = watchers
    if not watchers:
        alloc, free = tap.functions
        mine = getattr(allocator._alloc, "__self__", None) is tap
        # Those of a pool that was closed meanwhile, and what a fork has put there, stay.
        allocator._free = free
        if mine:
            allocator._alloc = alloc
