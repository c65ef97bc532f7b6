"""What objects of one driver share: physical memory by its handle, and the order in which all of it is released."""

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
    CudaError,
    Deferred,
    DeferredQueue,
    DeviceLostError,
    Drawn,
    Event,
    InvalidContextError,
    PerDriver,
    Session,
    context_events,
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
    """What all objects for one driver handle know of it."""

    __slots__ = ("bindings", "elsewhere", "exported", "handle", "handles", "imported", "mappings", "teams")

    def __init__(self) -> None:
        self.handle: int = 0
        """The driver's."""
        self.exported: bool = False
        self.elsewhere: bool = False
        """Whether others may use the memory otherwise, without a handle that is known here."""
        self.imported: bool = False
        """Whether another process made it."""
        self.handles: dict[AllocationHandle, None] = {}
        """One for each object that holds it."""
        self.mappings: dict[Node, None] = {}
        self.bindings: dict[Any, None] = {}
        """Where it is bound to multicast objects."""
        self.teams: dict[Node, None] = {}
        """Those of the multicast objects that it is bound to, or was when they were dropped."""


class HandleNode(Node):
    """A node with a handle or an address of the driver, which one call gives back."""

    __slots__ = ("_raw", "allocations")

    def __init__(self, allocations: Allocations, kind: Kind) -> None:
        Node.__init__(self, kind)
        self.allocations: Allocations = allocations
        self._raw: Any = None

    @property
    def raw(self) -> Any:
        """What the driver gave; None before it is made and after it was given back."""
        return self._raw

    def give_back(self, call: str, *args: Any) -> None:
        """Make the driver call that gives it back, once."""
        try:
            self.allocations.session.release(self, call, *args)
        finally:
            self.gone: bool = self._raw is None


class OwnsNode(Closes, Drawn):
    """What owns a node: that is released when this is closed, or later where this was dropped."""

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
    """A generic allocation handle that one object holds: ``cuMemRelease``."""

    __slots__ = ("state", "users")

    outlasts_mappings: ClassVar[bool] = False
    """Whether it is released after all mappings of the memory; else it may go before them."""

    def __init__(self, allocations: Allocations, kind: Kind) -> None:
        super().__init__(allocations, kind)
        self.users: tuple[int, ...] = ()
        """Devices whose work may use it without a mapping."""
        self.state: AllocationState = AllocationState()
        self.state.handles[self] = None

    def known(self) -> None:
        """The driver has given the handle: what is known of it holds for this object, too."""
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
        """Wait for the work that may use the memory: that of multicast objects by their mappings."""
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
        """``cuMemRelease``."""
        self.give_back("cuMemRelease")

    def forget(self) -> None:
        """What is known of the handle, where nobody else holds it or has it mapped."""
        self.state.handles.pop(self, None)
        self.allocations.forget(self.state)


class QueuedWork(Node):
    """The work that devices had when something was dropped that it may use: nothing is unmapped under it."""

    __slots__ = ("_events", "_ordinals", "_session")

    def __init__(self, session: Session, devices: Iterable[int]) -> None:
        super().__init__(Kind.QUEUED_WORK)
        self._session = session
        self._ordinals = sorted(devices)
        self._events: list[Event] | None = None

    def release(self) -> None:
        """Look whether it is done. Events mark it at the first attempt."""
        try:
            if self._events is None:
                self._events = context_events(self._session, self._ordinals)
            self.gone: bool = all(event.query() for event in self._events)
        except (DeviceLostError, InvalidContextError):
            self.gone = True  # no work is left


class KeepsMemory(Protocol):
    """What keeps physical memory for whoever needs some."""

    def make_room(self) -> int:
        """Give back what is kept; how many bytes."""


class MappingWatcher(Protocol):
    """Who wants to know of what is mapped."""

    def to_be_mapped(self, address: int, nbytes: int, /) -> None:
        """Memory is to be made and mapped from an address on. What this raises goes to who asks."""

    def mapped(self, address: int, memory: Any, /) -> None:
        """Memory is mapped at an address. What this raises goes to who asked, once it is unmapped."""

    def unmapped(self, address: int, /) -> None:
        """What was mapped at an address is unmapped. Never raises."""


class Allocations:
    """What :mod:`streamalloc.vmm` keeps for one driver."""

    __slots__ = (
        "adopting",
        "by_handle",
        "deferred",
        "keepers",
        "order",
        "reservations",
        "session",
        "specs",
        "watchers",
    )

    def __init__(self, session: Session) -> None:
        self.session: Session = session
        self.keepers: weakref.WeakSet[KeepsMemory] = weakref.WeakSet()
        self.watchers: tuple[MappingWatcher, ...] = ()
        self.specs: dict[object, Any] = {}
        """How memory is made, by its properties."""
        self.deferred: DeferredQueue = deferred_queue(session)
        self.order: ReleaseOrder = ReleaseOrder()
        self.by_handle: dict[int, AllocationState] = {}
        """What is held or mapped, by the driver's handle; but for what only a mapping holds."""
        self.reservations: dict[Any, None] = {}
        """The ranges of addresses that there are."""
        self.adopting = threading.RLock()
        """Held while an object takes over what a mapping has held."""

    def mapped_at(self, address: int, nbytes: int) -> list[AllocationState]:
        """What is known of the memory that is mapped at these addresses."""
        found = []
        for reservation in list(self.reservations):
            base = reservation.raw
            start = address - int(base or 0)
            if base is not None and start < reservation.nbytes and start + nbytes > 0:
                # A copy, for the range may be another thread's.
                entries = list(reservation.entries)
                for entry in entries[bisect_right(entries, start, key=attrgetter("stop")) :]:
                    if entry.offset >= start + nbytes:
                        break
                    # Nothing that another thread is about to map.
                    if not entry.gone and (entry._raw is not None or entry._memory is not None):
                        found.append(entry.memory._state)
        return found

    def make_room(self) -> int:
        """Give back the physical memory that is kept for whoever needs some; how many bytes."""
        return sum(keeper.make_room() for keeper in tuple(self.keepers))

    def forget(self, state: AllocationState) -> None:
        """Forget what is neither held nor mapped any more: the driver uses handles again."""
        if not state.handles and not state.mappings and self.by_handle.get(state.handle) is state:
            self.by_handle.pop(state.handle, None)

    def work(self) -> int:
        """End what was dropped and can end now, see :data:`streamalloc.core.deferred.POINTS`; how much has ended."""
        return work(self.session)

    def drop(self, node: Node) -> None:
        """Release a node later: for finalisers."""
        self.deferred.submit(_Dropped(self, node))

    def drop_after(self, devices: Iterable[int], nodes: Iterable[Node]) -> None:
        """Keep nodes until devices have done the work that they have now."""
        if devices:
            work = QueuedWork(self.session, devices)
            # Before anything waits for it: a signal handler may raise, and what waits would do so for ever.
            self.drop(work)
            for node in nodes:
                self.order.relate(work, node)

    def end(self, node: Node) -> None:
        """Release a node now, or where others have to go before it when they have gone.

        Raises
        ------
        CudaError
            The driver refused, and it is as it was; or it refused to release what waited for it, which is tried again.
        """
        before = node.given_up
        node.given_up = True
        try:
            self.order.attempt(node)
            if node.gone and self.order.ready:
                self.settle()
        except BaseException as error:
            if not node.gone:
                node.given_up = before
            elif not isinstance(error, CudaError):
                self.drop(node)  # interrupted: what has waited for it has its turn later
            raise

    def settle(self) -> None:
        """Release now what has waited for something that has gone; what the driver refuses is tried again."""
        ready: list[Node] = []

        def take(node: Node) -> None:
            self.drop(node)
            ready.append(node)

        self.order.pass_on(take)
        try:
            undo_all(functools.partial(self.order.attempt, node) for node in ready)
        finally:
            if ready:
                self.settle()


class _Dropped(Deferred):
    """A node whose owner was dropped."""

    __slots__ = ("_allocations", "_node")

    def __init__(self, allocations: Allocations, node: Node) -> None:
        self._allocations = allocations
        self._node = node

    def attempt(self) -> bool:
        """Release the node, or leave it to those that have to go before it."""
        self._node.give_up()
        try:
            return self._allocations.order.attempt(self._node)
        finally:
            self._allocations.order.pass_on(self._allocations.drop)

    def forget(self) -> None:
        """The context is lost, or the driver has ended, and nothing is left to give back."""
        self._node.gone = True
        self._allocations.order.cut(self._node)
        self._allocations.order.pass_on(self._allocations.drop)


allocations_of: PerDriver[Allocations] = PerDriver(Allocations)
"""What is kept for a driver: ``allocations_of(session)``."""
