"""End of a pool: the condition under which its driver handle can be destroyed.

The driver documents that a pool may be destroyed while allocations live or frees are pending. Driver 580.159 crashed in
later calls of a process that did so. So a pool is destroyed only once it has no allocations and every free has run. The
test for this is a trim: it releases all memory if the host has synchronised with every free. This module synchronises
with the frees of all known streams without waiting (:class:`Fence`). Until then a closed pool is an item of the
deferred queue.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

from streamalloc.core.errors import CudaError
from streamalloc.core.internal import Fence, HandleEnd
from streamalloc.core.properties import MemAllocationType, MemLocation
from streamalloc.core.session import PerDriver, Session
from streamalloc.driver.internal import cuda
from streamalloc.pool.places import existing_pool, has_calls_of_its_own, pool_locations, set_current_pool

if TYPE_CHECKING:
    from streamalloc.core.internal import Allocator, Stream

_ATTRIBUTES = cuda.CUmemPool_attribute


class PoolCache(Protocol):
    """Cache that holds memory of a pool, and releases it before the pool ends."""

    @property
    def pool(self) -> Allocator: ...

    def close(self) -> None: ...

    def _make_room(self, stream: Stream) -> bool: ...


class KnownPools:
    """The pools of one driver that this process knows: ``pools_of(session)``."""

    def __init__(self, _: Session) -> None:
        self.alive: weakref.WeakValueDictionary[int, Allocator] = weakref.WeakValueDictionary()
        """Pool objects by driver handle."""
        self.current: weakref.WeakValueDictionary[int, Allocator] = weakref.WeakValueDictionary()
        """Allocators of the current pool, by device ordinal."""
        self.caches: weakref.WeakSet[PoolCache] = weakref.WeakSet()
        """Caches over any of the pools."""
        self.closed: set[int] = set()
        """Driver handles of closed pools that the driver has not destroyed yet."""


pools_of: PerDriver[KnownPools] = PerDriver(KnownPools)


class PoolEnd(HandleEnd):
    """The end of a pool that was made here. This item owns the pool's handle from the start."""

    def __init__(self, session: Session, location: MemLocation, allocation_type: MemAllocationType) -> None:
        super().__init__(session, "cuMemPoolDestroy", None)
        self._place = (location, allocation_type)
        self._resigned = False
        self._frees: Fence | None = None
        """Fence behind the last frees; None if it was not recorded."""
        self.readers: int = 0
        """Number of threads that read statistics; the pool is not destroyed meanwhile."""

    def close(self) -> None:
        """List the pool as closed. If it is current, make the default pool of its location current
        (``cuDeviceSetMemPool``, ``cuMemSetMemPool``). Raises CudaError.
        """
        if self._raw is not None:
            pools_of(self._session).closed.add(int(self._raw))
        self._resign()

    def attempt(self) -> bool:
        """Destroy the pool (``cuMemPoolDestroy``) if it has no allocation, no pending free and no reader. Returns
        whether it is destroyed. Raises CudaError.
        """
        raw = self._raw
        if raw is None:
            return True
        closed = pools_of(self._session).closed
        closed.add(int(raw))
        self._resign()
        if self.readers or not self._unused():
            return False
        # Before the pool is destroyed, because the driver may give its handle to a new pool at once.
        closed.discard(int(raw))
        pool_locations(self._session).pop(int(raw), None)
        try:
            return super().attempt()
        except CudaError:
            if self._raw is not None:  # None: the pool is gone, and a new pool may get its handle.
                closed.add(int(raw))
            raise

    def forget(self) -> None:
        if self._raw is not None:
            pools_of(self._session).closed.discard(int(self._raw))
            pool_locations(self._session).pop(int(self._raw), None)
        self._raw = None

    def _resign(self) -> None:
        """Make the default pool current if this pool is current.

        The driver does this when it destroys the pool, which may happen later. For locations other than a device,
        driver 580 left neither pool current.
        """
        if self._resigned or self._raw is None:
            return
        # With bindings that cannot read the current pool, this pool cannot have become current.
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
            # If the pool is still not empty below, a free was made on an unknown stream or after the fence: the next
            # attempt makes a new fence.
            self._frees = None
        return self._is_empty()

    def _is_empty(self) -> bool:
        """Whether a trim releases all memory of the pool, which proves that no free is pending."""
        self._session.call("cuMemPoolTrimTo", self._raw, 0)
        return not self._number(_ATTRIBUTES.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)

    def _number(self, attribute: Any) -> int:
        return int(self._session.call("cuMemPoolGetAttribute", self._raw, attribute))
