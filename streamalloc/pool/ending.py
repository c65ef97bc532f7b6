"""End of a pool: the conditions for the destruction of its driver handle.

By the driver's documentation, a pool may be destroyed while it has allocations or pending frees. With driver 580.159,
later calls of a process that did so crashed. So a pool is destroyed only once it has no allocations and every free has
run. The test for this is a trim, which releases all memory of the pool if the host has synchronised with every free.
This module synchronises with the frees on all known streams without waiting (:class:`Fence`). Until the pool can be
destroyed, its end is an item of the deferred queue.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from streamalloc.core.errors import CudaError
from streamalloc.core.internal import Fence, HandleEnd, unless_busy
from streamalloc.core.properties import MemAllocationType, MemLocation
from streamalloc.core.session import PerDriver, Session
from streamalloc.driver.internal import Lock, RLock, cuda
from streamalloc.pool.places import existing_pool, has_calls_of_its_own, pool_locations, set_current_pool

if TYPE_CHECKING:
    from streamalloc.core.internal import Allocator

_ATTRIBUTES = cuda.CUmemPool_attribute


class KnownPools:
    """The pools of one driver with an object in this process, and the caches over them. ``pools_of(session)`` returns
    it.
    """

    def __init__(self, _: Session) -> None:
        self.alive: weakref.WeakValueDictionary[int, Allocator] = weakref.WeakValueDictionary()
        """Pool objects by driver handle."""
        self.current: weakref.WeakValueDictionary[int, Allocator] = weakref.WeakValueDictionary()
        """Allocators of :func:`streamalloc.allocate`, which use the current pool of a device, by device ordinal."""
        self.caches: weakref.WeakSet[Any] = weakref.WeakSet()
        """Caches over these pools. The close of a pool closes its caches, so that they return their memory."""
        self.closed: set[int] = set()
        """Driver handles of closed pools that are not destroyed yet."""
        self.adopting = RLock()
        """Lock held while an object for a pool of other code is listed, so that two threads make no two owners."""


pools_of: PerDriver[KnownPools] = PerDriver(KnownPools)


class PoolEnd(HandleEnd):
    """Queue item that destroys a pool of this process. It owns the pool's handle from the creation of the pool."""

    def __init__(self, session: Session, location: MemLocation, allocation_type: MemAllocationType) -> None:
        super().__init__(session, "cuMemPoolDestroy", None)
        self._place = (location, allocation_type)
        self._resigned = False
        self._frees: Fence | None = None
        """Fence after all frees that were queued when it was made; None if no fence was made."""
        self.readers: int = 0
        """Number of calls in progress with the pool's handle, without allocations. While it is not 0, the pool is not
        destroyed.
        """
        self._in_use = Lock()
        """Lock that the thread holds which closes the pool or attempts to destroy it."""

    def close(self) -> None:
        """List the pool as closed. If it is the current pool, make the default pool of its location current
        (``cuDeviceSetMemPool``, ``cuMemSetMemPool``). Raises CudaError.
        """
        unless_busy(self._close, None, self._in_use)

    def _close(self) -> None:
        if self._raw is not None:
            pools_of(self._session).closed.add(int(self._raw))
        self._resign()

    def attempt(self) -> bool:
        """Destroy the pool (``cuMemPoolDestroy``) if it has no allocation, no pending free and no reader. Returns
        whether the pool is destroyed. Raises CudaError.
        """
        # Two threads may close the pool, or a close may come beside a point of work. Without the lock, one thread would
        # call the driver with the handle of a pool that the other one has destroyed, which may crash.
        return unless_busy(self._attempt, False, self._in_use)

    def _attempt(self) -> bool:
        raw = self._raw
        if raw is None:
            return True
        closed = pools_of(self._session).closed
        closed.add(int(raw))
        self._resign()
        if self.readers or not self._unused():
            return False
        # The handle is removed before the pool is destroyed, because the driver may give the handle to a new pool at
        # once.
        closed.discard(int(raw))
        pool_locations(self._session).pop(int(raw), None)
        try:
            return super().attempt()
        except CudaError:
            if self._raw is not None:  # With None, a new pool may have the handle.
                closed.add(int(raw))
            raise

    def forget(self) -> None:
        if self._raw is not None:
            pools_of(self._session).closed.discard(int(self._raw))
            pool_locations(self._session).pop(int(self._raw), None)
        self._raw = None

    def _resign(self) -> None:
        """Make the location's default pool current if this pool is the current pool.

        The driver does this only when it destroys the pool, which may be later. For locations other than a device,
        driver 580 then left no pool current.
        """
        if self._resigned or self._raw is None:
            return
        # If the bindings cannot read the current pool, they cannot set it either: this pool is not current.
        known = has_calls_of_its_own(*self._place) or hasattr(self._session.driver, "cuMemGetMemPool")
        if known and int(existing_pool(self._session, "", *self._place)) == int(self._raw):
            set_current_pool(self._session, existing_pool(self._session, "Default", *self._place), *self._place)
        self._resigned = True

    def _unused(self) -> bool:
        if self._number(_ATTRIBUTES.CU_MEMPOOL_ATTR_USED_MEM_CURRENT):
            return False
        if self._is_empty():
            return True
        if self._frees is None:
            self._frees = Fence(self._session)
        if self._frees.done():
            # If the pool is still not empty below, a free was queued on an unknown stream or after the fence was made.
            # The next attempt makes a new fence.
            self._frees = None
        return self._is_empty()

    def _is_empty(self) -> bool:
        """Trim the pool, and return whether this released all its memory, which proves that no free is pending."""
        self._session.call("cuMemPoolTrimTo", self._raw, 0)
        return not self._number(_ATTRIBUTES.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)

    def _number(self, attribute: Any) -> int:
        return int(self._session.call("cuMemPoolGetAttribute", self._raw, attribute))
