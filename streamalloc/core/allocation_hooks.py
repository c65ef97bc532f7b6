"""Hooks that notify watchers, such as an observer, of each allocation and each free. Without watchers they cost
nothing.

Each allocator has two bound functions, one to allocate and one to free. While the allocator has watchers, these are the
methods of a :class:`Tap`, which make the same driver calls and notify the watchers. Without watchers they are the
driver's own functions. A cache (:mod:`streamalloc.pool.cache`) serves requests from its free lists without a driver
call, so a cache notifies its watchers itself.

Finalisers also free memory and notify watchers. So a watcher's ``freed`` only records the event and returns.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any, Protocol

from streamalloc.core.errors import PACKAGE, CudaError, undoing
from streamalloc.core.properties import MemLocation
from streamalloc.core.session import NOT_CALLED, PerDriver, Session, members
from streamalloc.driver.internal import RLock


class Watcher(Protocol):
    """Receiver of notifications of allocations and frees, such as an observer. :meth:`Watching.add` adds it."""

    def wants(self, allocator: Any, /) -> bool:
        """Return whether this watcher is to be notified of the calls of ``allocator``."""

    def asked(self, allocator: Any, nbytes: int, /) -> None:
        """Called before ``allocator`` allocates ``nbytes`` bytes. An exception goes to the caller of the allocation."""

    def allocated(self, allocator: Any, address: int, nbytes: int, stream: Any, /) -> None:
        """Called after ``allocator`` has allocated ``nbytes`` bytes at ``address`` on ``stream`` (``CUstream``). If
        this method raises, the memory is freed, and the exception goes to the caller of the allocation.
        """

    def allocation_failed(self, allocator: Any, nbytes: int, stream: Any, /) -> None:
        """Called after the driver has refused to allocate ``nbytes`` bytes for ``allocator`` on ``stream``
        (``CUstream``).
        """

    def freed(self, address: int, stream: Any, /) -> None:
        """Called before the memory at ``address`` is freed on ``stream`` (``CUstream``; None for the stream of the
        allocation). The memory may have been allocated before the watcher was added. Finalisers call this method, so it
        takes no lock and never raises.
        """

    def free_failed(self, address: int, /) -> None:
        """Called if the driver has refused a free for which :meth:`freed` was called. Takes no lock and never
        raises.
        """

    def look(self) -> None:
        """Called after a free, to process what :meth:`freed` has recorded. Finalisers do not call this method, so it
        may take locks.
        """

    def holders(self, location: MemLocation, allocators: Collection[object] | None, /) -> list[str]:
        """Return texts for an error message about live allocations in ``location``, one for each line of the program.
        Makes no driver call.

        ``allocators`` limits the texts to allocations of these pools and of caches over these pools; None for all.
        """


class Tap:
    """Replacements for the two bound functions of an allocator, which call the driver and notify the watchers."""

    __slots__ = ("_alloc", "_free", "_owner", "watchers")

    def __init__(self, owner: Any, alloc: Any, free: Any) -> None:
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
        Returns the tuple of the driver: the ``CUresult`` and the pointer. If a watcher raises, the memory is freed.
        ``except_for``: watchers that are not notified (:func:`without_notifying`).
        """
        watchers, owner = self._without(except_for), self._owner()
        for watcher in watchers:
            watcher.asked(owner, nbytes)
        try:
            result, ptr = answer = self._alloc(nbytes, pool, stream)
        except CudaError:  # An allocator without a pool raises, and returns no result code.
            for watcher in watchers:
                watcher.allocation_failed(owner, nbytes, stream)
            raise
        # If a watcher raises, no buffer owns the memory yet, so nothing else would free it.
        with undoing(lambda: None if result else self.free(ptr, stream, except_for)):
            if result:
                for watcher in watchers:
                    watcher.allocation_failed(owner, nbytes, stream)
            elif address := int(ptr):
                for watcher in watchers:
                    watcher.allocated(owner, address, nbytes, stream)
        return answer

    def free(self, ptr: Any, stream: Any, except_for: tuple[Watcher, ...] = ()) -> Any:
        """Notify the watchers, and free the memory at ``ptr`` by the driver's function. Returns the driver's tuple with
        the ``CUresult``. If the driver refuses, the watchers are notified of the failure, too. ``except_for``: watchers
        that are not notified.
        """
        watchers, address = self._without(except_for), int(ptr)
        # Watchers are notified before the free. After the free, another thread may get the same address at once, and
        # the notification of that allocation must come second.
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
    """Call :meth:`Watcher.look` of the watchers after a free, unless a finaliser of this package made the free: the
    watchers take a lock, and a finaliser must not wait for a lock.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        if frame.f_code.co_name == "__del__":
            return
        frame = frame.f_back
    for watcher in watchers:
        watcher.look()


def tap_of(function: Any) -> Tap | None:
    """Return the :class:`Tap` of which ``function`` is a method; None for other functions, such as the driver's."""
    tap = getattr(function, "__self__", None)
    return tap if type(tap) is Tap else None


def without_notifying(function: Any, watchers: tuple[Watcher, ...]) -> Any:
    """Return an allocator's bound function in a form that does not notify ``watchers``; the function itself if it
    notifies none of them.

    A cache notifies its watchers itself. If the pool below the cache notified them, too, they would record the same
    memory twice.
    """
    return functools.partial(function, except_for=watchers) if watchers and tap_of(function) else function


def bare(alloc: Any) -> Any:
    """Return the driver's allocation function behind ``alloc``, which notifies no watchers. For memory of graphs: the
    call only adds a node, and the memory exists from a launch to its free.
    """
    tap = tap_of(alloc)
    return alloc if tap is None else tap._alloc


class Watching:
    """The watchers of the allocators of one driver (``watching_of(session)``)."""

    __slots__ = ("_lock", "_session", "watchers")

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = RLock()
        self.watchers: tuple[Watcher, ...] = ()

    def add(self, watcher: Watcher) -> None:
        """Notify ``watcher`` from now on of the calls of each allocator for which its ``wants`` returns True.
        Idempotent.
        """
        with self._lock:
            self._notify((*self.watchers, watcher) if watcher not in self.watchers else self.watchers)

    def remove(self, watcher: Watcher) -> None:
        """Stop notifying ``watcher``. Once no watcher is left, allocators call the driver's own functions again."""
        if self._session.forked:
            return
        with self._lock:
            self._notify(tuple(other for other in self.watchers if other is not watcher))

    def _notify(self, watchers: tuple[Watcher, ...]) -> None:
        self.watchers = watchers
        for allocator in self.allocators():
            self._watch(allocator)

    def bound(self, allocator: Any) -> None:
        """Have a new allocator, which has just bound its functions, notify the watchers that were added before."""
        if self.watchers:
            with self._lock:
                self._watch(allocator)

    def allocators(self) -> list[Any]:
        """Return the existing allocators of the driver: pools, caches, allocators outside of pools, and those of the
        devices' current pools.
        """
        return [one for one in members(self._session.bound) if hasattr(one, "_watched_by")]

    def _watch(self, allocator: Any) -> None:
        allocator._watched_by(tuple(watcher for watcher in self.watchers if watcher.wants(allocator)))


watching_of: PerDriver[Watching] = PerDriver(Watching)
"""``watching_of(session)`` returns the :class:`Watching` of the session's driver."""


def holders(session: Session, location: MemLocation, allocators: Collection[object] | None = None) -> tuple[str, ...]:
    """Return the texts of all watchers about live allocations in a location, for an out-of-memory error.

    ``allocators``: see :meth:`Watcher.holders`.
    """
    lines = [line for watcher in watching_of(session).watchers for line in watcher.holders(location, allocators)]
    return tuple(dict.fromkeys(lines))  # Several observers may give the same line.


@contextlib.contextmanager
def notify_freed(session: Session, address: int, stream: Any) -> Iterator[None]:
    """Return a context manager for a free that is made without the allocator's bound function, such as a deferred free.
    It notifies watchers of the free of ``address`` on ``stream`` (``CUstream``). If the block raises, it notifies them
    that the free failed.
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
