"""End of a pool: the condition under which its driver handle can be destroyed.

The driver documents that a pool may be destroyed while allocations live or frees are pending. Driver 580.159 was seen
to crash in later calls of a process that did so. So a pool is destroyed once nothing of it is in use and every free has
run: then a trim releases all its memory, provided that the host has synchronised with the frees. The host does so here,
without waiting, for frees on all streams that are known (:class:`QueuedWork`). A pool that was closed earlier waits as
an item of the deferred queue.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from streamalloc.core.errors import CudaError, InvalidValueError
from streamalloc.core.internal import HandleEnd, QueuedWork, deferred_queue
from streamalloc.core.properties import MemAllocationType, MemLocation, MemLocationType, bindings_member
from streamalloc.core.session import PerDriver, Session
from streamalloc.driver.internal import cuda
from streamalloc.pool.lost import free_lost, no_collection_is_left, pool_of_address

if TYPE_CHECKING:
    from streamalloc.core.internal import Allocator, Stream

_ATTRIBUTES = cuda.CUmemPool_attribute


class OverPool(Protocol):
    """Cache that holds memory of a pool, and releases it before the pool ends."""

    @property
    def pool(self) -> Allocator: ...

    def close(self) -> None: ...

    def _make_room(self, stream: Stream) -> bool: ...


class Pools:
    """The pools of one driver that this process knows: ``pools_of(session)``."""

    __slots__ = ("alive", "caches", "closed", "current")

    def __init__(self, _: Session) -> None:
        self.alive: weakref.WeakValueDictionary[int, Allocator] = weakref.WeakValueDictionary()
        """Pool objects by driver handle."""
        self.current: weakref.WeakValueDictionary[int, Allocator] = weakref.WeakValueDictionary()
        """Allocators of the current pool, by device ordinal."""
        self.caches: weakref.WeakSet[OverPool] = weakref.WeakSet()
        """Caches over any of the pools."""
        self.closed: set[int] = set()
        """Driver handles of closed pools that the driver has not destroyed yet."""


pools_of: PerDriver[Pools] = PerDriver(Pools)


class PoolEnd(HandleEnd):
    """The end of a pool that was made here; the item owns the handle of the pool from the start."""

    __slots__ = ("_frees", "_in_vain", "_place", "_resigned", "lent", "readers")

    # The driver answers InvalidValueError for a pool whose context is gone.
    gone: ClassVar[tuple[type[CudaError], ...]] = (*HandleEnd.gone, InvalidValueError)

    def __init__(self, session: Session, location: MemLocation, allocation_type: MemAllocationType) -> None:
        super().__init__(session, "cuMemPoolDestroy", None)
        self._place = (location, allocation_type)
        self._resigned = False
        self._frees: QueuedWork | None = None
        """Work with the last frees; None where it is not recorded."""
        self._in_vain = 0
        """Bytes in use when a search for lost allocations has not found them all; 0 before."""
        self.lent: bool = False
        """True once other code has the handle, or the pool was current: anybody may have an allocation of it."""
        self.readers: int = 0
        """Number of threads that read statistics by the handle, which keeps the pool from being destroyed."""

    def close(self) -> None:
        """Mark the pool as closed. If it is current, make the default pool of its location current."""
        if self._raw is not None:
            pools_of(self._session).closed.add(int(self._raw))
        self._resign()

    def attempt(self) -> bool:
        """Destroy the pool (``cuMemPoolDestroy``) if that is safe now: whether it is destroyed."""
        raw = self._raw
        if raw is None:
            return True
        closed = pools_of(self._session).closed
        closed.add(int(raw))
        self._resign()
        if self.readers or not self._unused():
            return False
        # Before the call: the driver may give the handle to a new pool at once.
        closed.discard(int(raw))
        try:
            return super().attempt()
        except CudaError:
            closed.add(int(raw))
            raise

    def forget(self) -> None:
        if self._raw is not None:
            pools_of(self._session).closed.discard(int(self._raw))
        self._raw = None

    def _resign(self) -> None:
        """Make the default pool current if this one is.

        The driver does so when it destroys the pool, which may be later. For locations other than a device, driver 580
        was seen to leave neither this pool nor the default pool current.
        """
        if self._resigned or self._raw is None:
            return
        # Bindings that cannot read the current pool could not make this one current either.
        known = _has_calls_of_its_own(*self._place) or hasattr(self._session.driver, "cuMemGetMemPool")
        if known and int(existing_pool(self._session, "", *self._place)) == int(self._raw):
            set_current_pool(self._session, existing_pool(self._session, "Default", *self._place), *self._place)
        self._resigned = True

    def _unused(self) -> bool:
        if used := self._number(_ATTRIBUTES.CU_MEMPOOL_ATTR_USED_MEM_CURRENT):
            self._free_lost(used)
            return False
        if self._is_empty():
            return True
        if self._frees is None:
            self._frees = QueuedWork(self._session)
        if self._frees.done():
            self._frees = None  # A free that is still pending is on a stream that is not known, or came later.
        return self._is_empty()

    def _free_lost(self, used: int) -> None:
        """Free lost allocations. A buffer keeps its pool's object, and any other owner of an allocation is an item."""
        session = self._session
        if self.lent or used == self._in_vain or pools_of(session).alive.get(int(self._raw)) is not None:
            return
        waiting = deferred_queue(session).memory() if no_collection_is_left() else None
        nobody = waiting is not None and not any(pool_of_address(session, one) == int(self._raw) for one in waiting)
        if nobody and not free_lost(session, self._raw, self._place[0], used):
            self._in_vain = used

    def _is_empty(self) -> bool:
        """Whether a trim leaves the pool without memory: then no free is pending."""
        self._session.call("cuMemPoolTrimTo", self._raw, 0)
        return not self._number(_ATTRIBUTES.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)

    def _number(self, attribute: Any) -> int:
        return int(self._session.call("cuMemPoolGetAttribute", self._raw, attribute))


# -- default and current pools -------------------------------------------------------------------------------


def existing_pool(session: Session, which: str, location: MemLocation, allocation_type: MemAllocationType) -> Any:
    """The driver's handle of a location's default pool (``which`` is ``"Default"``) or current pool (``""``)."""
    if _has_calls_of_its_own(location, allocation_type):
        return session.call(f"cuDeviceGet{which}MemPool", location.id)
    return session.call(f"cuMemGet{which}MemPool", location.to_driver(), _driver_type(allocation_type))


def set_current_pool(session: Session, raw: Any, location: MemLocation, allocation_type: MemAllocationType) -> None:
    """Make a pool the current one of a location."""
    if _has_calls_of_its_own(location, allocation_type):
        session.call("cuDeviceSetMemPool", location.id, raw)
    else:
        session.call("cuMemSetMemPool", location.to_driver(), _driver_type(allocation_type), raw)


def _has_calls_of_its_own(location: MemLocation, allocation_type: MemAllocationType) -> bool:
    """Whether ``cuDevice*``, which all bindings have, and not ``cuMem*`` reads the current and the default pool."""
    return location.type is MemLocationType.DEVICE and allocation_type is MemAllocationType.PINNED


def _driver_type(allocation_type: MemAllocationType) -> Any:
    return bindings_member("CUmemAllocationType", f"CU_MEM_ALLOCATION_TYPE_{allocation_type.name}")
