"""Allocation handles of one driver, and the release of everything that depends on them."""

from __future__ import annotations

import functools
import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, ClassVar, Protocol

from streamalloc.core.internal import (
    ClosedError,
    Closes,
    Deferred,
    DeferredQueue,
    DeviceLostError,
    Drawn,
    InvalidContextError,
    PerDriver,
    QueuedWork,
    Session,
    deferred_queue,
    undo_all,
    work,
)
from streamalloc.vmm.release_order import Kind, Node, ReleaseOrder

__all__ = [
    "AllocationHandle",
    "AllocationState",
    "Allocations",
    "HandleNode",
    "MappingWatcher",
    "OwnsNode",
    "allocations_of",
]


class AllocationState:
    """State of one physical allocation or multicast object, shared by all objects that hold its driver handle."""

    __slots__ = ("bindings", "elsewhere", "exported", "handle", "handles", "imported", "mappings", "teams")

    def __init__(self) -> None:
        self.handle: int = 0
        """Number of the driver handle."""
        self.exported: bool = False
        """True if a shareable handle was exported."""
        self.elsewhere: bool = False
        """True if another driver may use the memory (DMA-BUF)."""
        self.imported: bool = False
        """True if another process created it."""
        self.handles: dict[AllocationHandle, None] = {}
        """One node for each object that holds the handle."""
        self.mappings: dict[Node, None] = {}
        """Mappings in this process."""
        self.bindings: dict[Any, None] = {}
        """Bindings to multicast objects."""
        self.teams: dict[Node, None] = {}
        """Teams of the multicast objects it is, or was, bound to."""


class HandleNode(Node):
    """A node with a driver handle or address that one driver call releases."""

    __slots__ = ("_raw", "allocations")

    def __init__(self, allocations: Allocations, kind: Kind) -> None:
        Node.__init__(self, kind)
        self.allocations: Allocations = allocations
        self._raw: Any = None

    @property
    def raw(self) -> Any:
        """Driver handle or address; None before creation and after release."""
        return self._raw

    def give_back(self, call: str, *args: Any) -> None:
        """Make the driver call that releases the handle, once."""
        try:
            self.allocations.session.release(self, call, *args)
        finally:
            self.gone: bool = self._raw is None


class OwnsNode(Closes, Drawn):
    """Owner of a node. The node is released when the owner is closed, or later if the owner is dropped."""

    __slots__ = ("__weakref__", "_node")

    _node: Any

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        node = self._node
        return node._raw is None or node.given_up

    def _checked_raw(self) -> Any:
        node = self._node
        if node._raw is None or node.given_up:
            raise ClosedError(f"{self!r} was closed")
        return node._raw

    def __del__(self) -> None:
        node: HandleNode | None = getattr(self, "_node", None)
        if node is not None and node.raw is not None and not node.given_up and node.allocations.session.usable:
            node.allocations.drop(node)


class AllocationHandle(HandleNode):
    """The hold of one object on a ``CUmemGenericAllocationHandle``; ``cuMemRelease`` ends it."""

    __slots__ = ("state", "users")

    outlasts_mappings: ClassVar[bool] = False
    """True if it is released after all mappings of the memory."""

    def __init__(self, allocations: Allocations, kind: Kind) -> None:
        super().__init__(allocations, kind)
        self.users: tuple[int, ...] = ()
        """Ordinals of devices that may use it without a mapping."""
        self.state: AllocationState = AllocationState()
        self.state.handles[self] = None

    def known(self) -> None:
        """Join the state of other objects that hold the same driver handle."""
        state = self.state
        state.handle = int(self._raw)
        before = self.allocations.by_handle.setdefault(state.handle, state)
        if before is state:
            return
        before.imported = before.imported or state.imported
        before.mappings.update(state.mappings)
        self.state = before
        order = self.allocations.order
        for other in list(before.handles):
            for first in order.before(other, Kind.BINDING) + order.before(other, Kind.OBJECT):
                order.relate(first, self)
            for team in order.after(other, Kind.TEAM):
                order.relate(self, team)
        before.handles[self] = None

    def give_up(self) -> None:
        """Release it after the work that may use the memory, and release its bindings before it."""
        if not self.given_up:
            order = self.allocations.order
            bindings = order.before(self, Kind.BINDING) if self.kind is Kind.OBJECT else []
            mappings: list[Any] = order.before(self, Kind.OBJECT_MAPPING)
            devices = {*self.users, *(device for mapping in mappings for device in mapping.users)}
            self.allocations.drop_after(devices, [*bindings, self])
            for binding in bindings:
                self.allocations.drop(binding)
        super().give_up()

    def release(self) -> None:
        """Call ``cuMemRelease``."""
        self.give_back("cuMemRelease")

    def forget(self) -> None:
        """Remove it from the state of its driver handle."""
        self.state.handles.pop(self, None)
        self.allocations.forget(self.state)


class WorkNode(Node):
    """Work that was queued when a resource was dropped. The resource is released after it."""

    __slots__ = ("_queued", "_session")

    def __init__(self, session: Session) -> None:
        super().__init__(Kind.QUEUED_WORK)
        self._session = session
        self._queued: QueuedWork | None = None

    def release(self) -> None:
        """Query whether the work has completed. The first attempt records its end."""
        try:
            if self._queued is None:
                self._queued = QueuedWork(self._session)
            self.gone: bool = self._queued.done()
        except (DeviceLostError, InvalidContextError):
            self.gone = True  # no work is left


class MappingWatcher(Protocol):
    """Listener for the mappings of one driver."""

    def to_be_mapped(self, address: int, nbytes: int, /) -> None:
        """Memory is about to be created and mapped at an address. An error propagates to the caller."""

    def mapped(self, address: int, memory: Any, /) -> None:
        """Memory was mapped at an address. After an error it is unmapped, and the error propagates to the caller."""

    def unmapped(self, address: int, /) -> None:
        """The mapping at an address was unmapped. Never raises."""


class Allocations:
    """State of :mod:`streamalloc.vmm` for one driver."""

    def __init__(self, session: Session) -> None:
        self.session: Session = session
        self.recyclers: weakref.WeakSet[Any] = weakref.WeakSet()
        """Recyclers: ``make_room()`` releases their spare memory and returns its size."""
        self.watchers: tuple[MappingWatcher, ...] = ()
        self.specs: dict[object, Any] = {}
        """:class:`MemorySpec` by ``MemAllocationProp``."""
        self.deferred: DeferredQueue = deferred_queue(session)
        self.order: ReleaseOrder = ReleaseOrder()
        self.by_handle: dict[int, AllocationState] = {}
        """States by driver handle. Handles that only a mapping holds are not listed."""
        self.reservations: dict[Any, None] = {}
        """All reserved address ranges."""
        self.lock = threading.RLock()
        """Held while a mapping hands its handle to an object, and while watchers change."""

    def mapped_at(self, address: int, nbytes: int) -> list[AllocationState]:
        """Return the states of the memory that is mapped in ``nbytes`` bytes from ``address``."""
        found = []
        for reservation in list(self.reservations):
            base = reservation.raw
            start = address - int(base or 0)
            if base is not None and start < reservation.nbytes and start + nbytes > 0:
                # Another thread may own the range: use a copy, and skip entries that it has not mapped yet.
                entries = list(reservation.entries)
                for entry in entries[bisect_right(entries, start, key=attrgetter("stop")) :]:
                    if entry.offset >= start + nbytes:
                        break
                    if not entry.gone and (entry._raw is not None or entry._memory is not None):
                        found.append(entry.memory._state)
        return found

    def make_room(self) -> int:
        """Release the spare memory of all recyclers; return its size in bytes."""
        return sum(recycler.make_room() for recycler in tuple(self.recyclers))

    def forget(self, state: AllocationState) -> None:
        """Remove a state that no handle and no mapping uses: the driver reuses handle numbers."""
        if not state.handles and not state.mappings and self.by_handle.get(state.handle) is state:
            self.by_handle.pop(state.handle, None)

    def work(self) -> int:
        """Attempt the deferred releases, see :data:`streamalloc.core.deferred.POINTS`; return how many succeeded."""
        return work(self.session)

    def drop(self, node: Node) -> None:
        """Queue a node for release; for finalisers."""
        self.deferred.submit(_Dropped(self, node))

    def drop_after(self, devices: Iterable[int], nodes: Iterable[Node]) -> None:
        """Keep nodes until devices have completed the work that is queued on them now."""
        if devices:
            queued = WorkNode(self.session)
            # Queued before any node waits for it, so that no node waits for ever.
            self.drop(queued)
            for node in nodes:
                self.order.relate(queued, node)

    def end(self, node: Node) -> None:
        """Release a node now, or as soon as no other node precedes it.

        Raises
        ------
        CudaError
            The driver refused to release the node, which stays usable, or refused to release a node that waited for
            it, which is attempted again later.
        """
        before = node.given_up
        node.given_up = True
        try:
            self.order.attempt(node)
            if node.gone:
                self.settle()
        except BaseException:
            if not node.gone:
                node.given_up = before
            else:
                self.drop(node)  # its next attempt passes on the nodes that waited for it
            raise

    def settle(self) -> None:
        """Release the nodes that have become ready. The queue attempts a node again if the driver refuses it."""
        ready: list[Node] = []

        def take(node: Node) -> None:
            self.drop(node)
            ready.append(node)

        while self.order.ready:
            ready.clear()
            self.order.pass_on(take)
            undo_all(functools.partial(self.order.attempt, node) for node in ready)


class _Dropped(Deferred):
    """The release of a node whose owner was dropped."""

    __slots__ = ("_allocations", "_node")

    def __init__(self, allocations: Allocations, node: Node) -> None:
        self._allocations = allocations
        self._node = node

    def attempt(self) -> bool:
        """Release the node; a node that has to wait for others is queued again when it is ready."""
        self._node.give_up()
        try:
            return self._allocations.order.attempt(self._node)
        finally:
            self._allocations.order.pass_on(self._allocations.drop)

    def forget(self) -> None:
        """Mark the node as released: its context or driver is lost."""
        self._node.gone = True
        self._allocations.order.cut(self._node)
        self._allocations.order.pass_on(self._allocations.drop)


allocations_of: PerDriver[Allocations] = PerDriver(Allocations)
"""State for one driver: ``allocations_of(session)``."""
