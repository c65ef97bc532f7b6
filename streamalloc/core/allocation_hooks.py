"""Hooks of allocators. Watchers are notified of each allocation and each free; without watchers the hooks cost nothing.

Each allocator has two bound functions, to allocate and to free. While the allocator has watchers, these are the methods
of a :class:`Tap`, which make the same driver calls and notify the watchers; afterwards they are the driver's own
functions. A cache (:mod:`streamalloc.pool.cache`) makes no driver calls for memory of its free lists, and does not
use them while it has watchers.

Finalisers also free memory. They notify watchers, so a watcher only records the event and returns.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any, Protocol

from streamalloc.core.errors import PACKAGE
from streamalloc.core.properties import MemLocation
from streamalloc.core.session import NOT_CALLED, PerDriver, Session, members
from streamalloc.driver.internal import RLock


class Watcher(Protocol):
    """Receiver of notifications of allocations and frees. For mappings the allocator is None."""

    def wants(self, allocator: Any, /) -> bool:
        """Whether this watcher is notified of the calls of an allocator."""

    def asked(self, allocator: Any, nbytes: int, /) -> None:
        """Called before the driver allocates ``nbytes`` bytes. An exception goes to the caller of the allocation."""

    def allocated(self, allocator: Any, address: int, nbytes: int, stream: Any, /) -> None:
        """Called after ``allocator`` has allocated ``nbytes`` bytes at ``address`` on ``stream`` (``CUstream``). If
        this method raises, the memory is freed, and the exception goes to the caller of the allocation.
        """

    def allocation_failed(self, allocator: Any, nbytes: int, stream: Any, /) -> None:
        """Called after the driver has refused ``nbytes`` bytes to ``allocator`` on ``stream`` (``CUstream``)."""

    def freed(self, address: int, stream: Any, /) -> None:
        """Called before the memory at ``address`` is freed on ``stream`` (``CUstream``). The watcher may not have been
        notified of its allocation. Finalisers make this call, so it takes no lock and never raises.
        """

    def free_failed(self, address: int, /) -> None:
        """Called after the driver has refused a free that :meth:`freed` was notified of. Takes no lock and never
        raises.
        """

    def look(self) -> None:
        """Called after a free, to process what :meth:`freed` has noted. Not called from finalisers, so it may take
        locks.
        """

    def holders(self, location: MemLocation, allocators: Collection[object] | None, /) -> list[str]:
        """Return lines for an error text: live allocations in a location, by line of the program. Makes no driver
        call.

        ``allocators``: only allocations of these pools, and of caches over them; None for all.
        """


class Watched(Protocol):
    """The parts of an allocator that hooks use."""

    def _watched_by(self, watchers: tuple[Watcher, ...]) -> None: ...


class Tap:
    """Replacements for the two functions of an allocator. They call the driver and notify the watchers."""

    __slots__ = ("_alloc", "_free", "_owner", "watchers")

    def __init__(self, owner: Watched, alloc: Any, free: Any) -> None:
        self._owner = weakref.ref(owner)
        self._alloc = alloc
        self._free = free
        self.watchers: tuple[Watcher, ...] = ()

    def _without(self, except_for: tuple[Watcher, ...]) -> tuple[Watcher, ...]:
        if not except_for:
            return self.watchers
        return tuple([one for one in self.watchers if one not in except_for])

    def allocate(self, nbytes: int, pool: Any, stream: Any, except_for: tuple[Watcher, ...] = ()) -> Any:
        """Allocate ``nbytes`` bytes from ``pool`` by the driver's function, and notify the watchers before and after.
        Returns the driver's answer: the ``CUresult`` and the pointer. If a watcher raises, the memory is freed.
        ``except_for``: watchers that are not notified (:func:`without_notifying`).
        """
        watchers, owner = self._without(except_for), self._owner()
        for watcher in watchers:
            watcher.asked(owner, nbytes)
        result, ptr = answer = self._alloc(nbytes, pool, stream)
        try:
            if result:
                for watcher in watchers:
                    watcher.allocation_failed(owner, nbytes, stream)
            elif address := int(ptr):
                for watcher in watchers:
                    watcher.allocated(owner, address, nbytes, stream)
        except BaseException:
            # A watcher has raised. No buffer owns the memory yet, so nothing else would free it.
            if not result:
                self.free(ptr, stream, except_for)
            raise
        return answer

    def free(self, ptr: Any, stream: Any, except_for: tuple[Watcher, ...] = ()) -> Any:
        """Notify the watchers, and free the memory at ``ptr`` by the driver's function. Returns the driver's answer. If
        the driver refuses, the watchers are notified of that, too. ``except_for``: watchers that are not notified.
        """
        watchers, address = self._without(except_for), int(ptr)
        # Watchers are notified before the free. After it, another thread may get the same address at once, and the
        # notification of that allocation must come second.
        for watcher in watchers:
            watcher.freed(address, stream)
        refused = False
        try:
            answer = self._free(ptr, stream)
            refused = bool(answer[0])
        except NOT_CALLED:
            refused = True
            raise
        finally:
            if refused:
                for watcher in watchers:
                    watcher.free_failed(address)
        if not refused:
            look(watchers)
        return answer


def look(watchers: tuple[Watcher, ...]) -> None:
    """Let watchers process their notes after a free. If a finaliser of this package made the free, leave the notes for
    later: the watchers take a lock, and a finaliser must not wait for one.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        if frame.f_code.co_name == "__del__":
            return
        frame = frame.f_back
    for watcher in watchers:
        watcher.look()


def tap_of(function: Any) -> Tap | None:
    """Return the :class:`Tap` whose method ``function`` is; None for other functions, such as the driver's."""
    tap = getattr(function, "__self__", None)
    return tap if type(tap) is Tap else None


def without_notifying(function: Any, watchers: tuple[Watcher, ...]) -> Any:
    """Return an allocator's function in a form that does not notify these watchers.

    A cache notifies its own watchers itself. Without this, the pool below it would record the same memory again.
    """
    return functools.partial(function, except_for=watchers) if watchers and tap_of(function) else function


def bare(alloc: Any) -> Any:
    """Return the driver's allocation function behind ``alloc``, which notifies no watchers. For memory of graphs, which
    exists only between launch and free.
    """
    tap = tap_of(alloc)
    return alloc if tap is None else tap._alloc


class Watching:
    """The watchers of the allocators of one driver: ``watching_of(session)``."""

    __slots__ = ("_lock", "_session", "watchers")

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = RLock()
        self.watchers: tuple[Watcher, ...] = ()

    def add(self, watcher: Watcher) -> None:
        """Notify ``watcher`` of the calls of all allocators that it wants, from now on. Idempotent."""
        with self._lock:
            self._notify((*self.watchers, watcher) if watcher not in self.watchers else self.watchers)

    def remove(self, watcher: Watcher) -> None:
        """Stop notifying a watcher. Once none is left, allocators call the driver's own functions again."""
        if self._session.forked:
            return
        with self._lock:
            self._notify(tuple(other for other in self.watchers if other is not watcher))

    def _notify(self, watchers: tuple[Watcher, ...]) -> None:
        self.watchers = watchers
        for allocator in self.allocators():
            self._watch(allocator)

    def bound(self, allocator: Watched) -> None:
        """Have a new allocator, which has just bound its functions, notify the watchers."""
        if self.watchers:
            with self._lock:
                self._watch(allocator)

    def allocators(self) -> list[Any]:
        """The live allocators of the driver: pools, caches, the current pools."""
        return [one for one in members(self._session.bound) if hasattr(one, "_watched_by")]

    def _watch(self, allocator: Watched) -> None:
        allocator._watched_by(tuple(watcher for watcher in self.watchers if watcher.wants(allocator)))


watching_of: PerDriver[Watching] = PerDriver(Watching)
"""The watchers of a driver: ``watching_of(session)``."""


def holders(session: Session, location: MemLocation, allocators: Collection[object] | None = None) -> tuple[str, ...]:
    """Return the lines of all watchers about live allocations in a location, for an out-of-memory error.

    ``allocators``: see :meth:`Watcher.holders`.
    """
    lines = [line for watcher in watching_of(session).watchers for line in watcher.holders(location, allocators)]
    return tuple(dict.fromkeys(lines))  # Several observers may say the same line.


@contextlib.contextmanager
def notify_freed(session: Session, address: int, stream: Any) -> Iterator[None]:
    """Notify watchers of a free of ``address`` on ``stream`` that the ``with`` block makes without the allocator's
    function, such as a deferred free. If the block raises, they are notified that the free failed.
    """
    watchers = watching_of(session).watchers
    for watcher in watchers:
        watcher.freed(address, stream)
    try:
        yield
    except Exception:
        for watcher in watchers:
            watcher.free_failed(address)
        raise
