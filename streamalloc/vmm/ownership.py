"""The ownership tree of virtual memory, and its release: first ``unmap``, then ``release``.

A range owns its mappings; a mapping owns the handle of its memory, or an object does. A multicast object owns its
bindings. Each driver resource is a :class:`Node`, which refers to no object of a user. A node is released once its
owner has closed or dropped it, the work that may use it has completed, and all nodes of :attr:`Node.first` are gone.

Driver 580 requires this order for multicast objects, whatever is closed or dropped first: unbind the memory, unmap and
release the object, release the memory that was bound to it, free the addresses. Otherwise the process crashes, or the
addresses cannot be freed. A mapping of physical memory alone needs no order to its handle: the driver keeps the memory
until both are gone.

``cuMemUnmap`` does not wait for queued work, and work that uses an unmapped address breaks the context of its device.
So a call that closes a range waits for the work first. A finaliser cannot wait: it submits the node to the queue of
:mod:`streamalloc.core.deferred`, which releases the node once the work that was queued at that moment has completed.

The same driver calls export, import, map and release physical memory and multicast objects
(``CUmemGenericAllocationHandle``), see :class:`GenericAllocation`.
"""

from __future__ import annotations

import abc
import enum
import functools
import os
import stat
import time
import weakref
from bisect import bisect_right
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, Protocol

from streamalloc.core.errors import ClosedError, undo_all
from streamalloc.core.internal import FABRIC_NEEDS, Deferred, DeferredQueue, Fd, Fence, deferred_queue, work
from streamalloc.core.properties import MemFabricHandle, MemHandleType, MemLocation
from streamalloc.core.resource import Closes, Shareable
from streamalloc.core.session import PerDriver, Session, members
from streamalloc.driver import Driver
from streamalloc.driver.internal import RLock, cuda
from streamalloc.formats.html import Drawn
from streamalloc.vmm.access import Rights


class Kind(enum.Enum):
    """Kind of the driver resource that a :class:`Node` releases."""

    BINDING = enum.auto()
    """Memory bound to a multicast object."""
    OBJECT_MAPPING = enum.auto()
    """A mapping of a multicast object."""
    OBJECT = enum.auto()
    """The handle of a multicast object or a sparse array."""
    MAPPING = enum.auto()
    """A mapping of physical memory."""
    MEMORY = enum.auto()
    """The handle of physical memory."""
    TEAM = enum.auto()
    """A multicast object together with all memory bound to it."""
    RANGE = enum.auto()
    """A reserved range of addresses."""


def _fence_since(session: Session, dropped: int) -> Fence:
    """Return a fence behind all work that known streams had queued at the time ``dropped`` (``time.monotonic_ns``). It
    may include later work.

    Nodes that were dropped before the latest fence was made share that fence, so a thousand nodes need one record per
    stream.
    """
    allocations = allocations_of(session)
    latest = allocations.latest_fence
    if latest is None or latest.began <= dropped:
        allocations.latest_fence = latest = Fence(session)
    return latest


class Node:
    """One driver resource to release."""

    __slots__ = ("_busy", "_dropped", "_fence", "first", "given_up", "gone", "kind")

    def __init__(self, kind: Kind) -> None:
        self.kind: Kind = kind
        self.given_up: bool = False
        """Whether the owner has closed or dropped the resource."""
        self.gone: bool = False
        """Whether the resource is released."""
        self.first: dict[Node, None] = {}
        """Nodes that must be released before this node. Any thread may add a node, so readers iterate over a copy."""
        self._busy = False
        """Whether a thread attempts the release now."""
        self._dropped: int | None = None
        """Time at which the owner was dropped, in nanoseconds of the monotonic clock. None if the owner was closed,
        which happens after the work that may use the resource.
        """
        self._fence: Fence | None = None
        """Fence behind the work that the release of a dropped owner waits for; None before the first attempt."""

    @property
    def users(self) -> Collection[int]:
        """Ordinals of the devices whose queued work may use the resource."""
        return ()

    def preceding(self, kind: Kind) -> list[Any]:
        """List the nodes of a kind that are released before this one."""
        return [node for node in list(self.first) if node.kind is kind and not node.gone]

    @property
    def waits(self) -> bool:
        """Whether a node must be released before this one."""
        for node in list(self.first):
            if not node.gone:
                return True
            self.first.pop(node, None)
        return False

    def in_use(self, session: Session) -> bool:
        """Whether work may still use the resource: work that was queued when the owner was dropped, and is not done.
        False after a close, which waits for the work before.
        """
        if self._dropped is None or not self.users:
            return False
        if self._fence is None:
            self._fence = _fence_since(session, self._dropped)
        return not self._fence.done()

    def give_up(self) -> None:
        """Record that the owner has closed or dropped the resource; idempotent."""
        self.given_up = True

    def unmap_owned(self) -> None:
        """Release the mappings or bindings that this node owns, as far as possible now. Must not block. Raises
        CudaError.
        """

    def release(self) -> None:
        """Release the resource and set :attr:`gone`; leave it unset if a later attempt is needed. Must not block.
        Raises CudaError.
        """
        self.gone = True

    def forget(self) -> None:
        """Remove the node from the tables that list it, after its release; idempotent."""


class Team(Node):
    """A multicast object together with all memory that is bound to it. It has no resource of its own.

    Addresses at which the object or the memory was mapped are freed after all of these are released.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(Kind.TEAM)

    @property
    def gone(self) -> bool:
        """Whether the object and the memory are released."""
        return not self.waits

    @gone.setter
    def gone(self, value: bool) -> None:
        """Ignored, because the value is derived."""


class AllocationState:
    """State of one physical allocation or multicast object, shared by all objects that hold its driver handle."""

    __slots__ = ("bindings", "exported", "handle", "handles", "imported", "mappings", "teams")

    def __init__(self) -> None:
        self.handle: int = 0
        """Number of the driver handle."""
        self.exported: bool = False
        """Whether a shareable handle was exported."""
        self.imported: bool = False
        """Whether another process created the memory or the object."""
        self.handles: dict[AllocationHandle, None] = {}
        """A node for each object that holds the handle."""
        self.mappings: dict[Node, None] = {}
        """Mappings of the memory or the object in this process."""
        self.bindings: dict[Any, None] = {}
        """Bindings of the memory to multicast objects."""
        self.teams: dict[Node, None] = {}
        """Teams of all multicast objects that the memory is bound to."""


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

    def release_by(self, call: str, *args: Any) -> None:
        """Release the handle by driver function ``call`` with the further arguments ``args``, at most once. Raises
        CudaError; the node then keeps the handle, unless it is gone.
        """
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
        """Whether the object was closed."""
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
    """One object's reference to a ``CUmemGenericAllocationHandle``; ``cuMemRelease`` ends it."""

    __slots__ = ("borrowed", "kept", "state", "used_unmapped")

    def __init__(self, allocations: Allocations, kind: Kind) -> None:
        super().__init__(allocations, kind)
        self.borrowed: bool = False
        """Whether other code releases the handle."""
        self.used_unmapped: tuple[int, ...] = ()
        """Ordinals of devices that may use the memory without a mapping."""
        self.kept: dict[Node, object] = {}
        """Objects of the user that must live as long as a multicast object's binding to them, by binding."""
        self.state: AllocationState = AllocationState()
        self.state.handles[self] = None

    def known(self) -> None:
        """Share the state of other objects with the same driver handle; called once the handle is known. This node is
        then released after the same nodes as theirs.
        """
        state = self.state
        state.handle = int(self._raw)
        before = self.allocations.by_handle.setdefault(state.handle, state)
        if before is state:
            return
        before.imported = before.imported or state.imported
        before.mappings.update(state.mappings)
        self.state = before
        for other in list(before.handles):
            for first in other.preceding(Kind.BINDING) + other.preceding(Kind.OBJECT):
                self.first[first] = None
        for team in list(before.teams):
            team.first[self] = None
        before.handles[self] = None

    @property
    def users(self) -> Collection[int]:
        """Ordinals of the devices that may use the memory without a mapping, or map the multicast object."""
        mappings = self.preceding(Kind.OBJECT_MAPPING)
        return {*self.used_unmapped, *(device for mapping in mappings for device in mapping.users)}

    def unmap_owned(self) -> None:
        """Unbind the memory of a multicast object, then unmap the object's mappings whose owner has given them up."""
        if self.kind is Kind.OBJECT:
            self.allocations.attempt_all(self.preceding(Kind.BINDING))
            self.allocations.attempt_all([one for one in self.preceding(Kind.OBJECT_MAPPING) if one.given_up])

    def release(self) -> None:
        """Call ``cuMemRelease`` unless other code releases the handle."""
        if self.borrowed:
            self._raw, self.gone = None, True
        else:
            self.release_by("cuMemRelease")

    def forget(self) -> None:
        """Remove this node from the state of its driver handle."""
        self.kept.clear()
        self.state.handles.pop(self, None)
        self.allocations.forget(self.state)


class MappedMemory(Protocol):
    """Mapped memory: a :class:`GenericAllocation`, or a page of an arena."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    @property
    def location(self) -> MemLocation:
        """Location of the memory."""


class MappingWatcher(Protocol):
    """Listener for the mappings of one driver."""

    def to_be_mapped(self, address: int, nbytes: int, /) -> None:
        """Called before ``nbytes`` bytes of memory are created and mapped at ``address``. An exception goes to the
        caller of the mapping, and nothing is mapped.
        """

    def mapped(self, address: int, memory: MappedMemory, /) -> None:
        """Called after ``memory`` was mapped at ``address``. If this method raises, the memory is unmapped, and the
        exception goes to the caller of the mapping.
        """

    def unmapped(self, address: int, /) -> None:
        """Called after the mapping at ``address`` was unmapped. Never raises."""


class Allocations:
    """State of :mod:`streamalloc.vmm` for one driver: reservations, handles, arenas and watchers."""

    def __init__(self, session: Session) -> None:
        self.session: Session = session
        self.arenas: weakref.WeakSet[Any] = weakref.WeakSet()
        """Page stocks of all arenas. ``make_room()`` releases the unused pages of a stock and returns their bytes."""
        self.watchers: tuple[MappingWatcher, ...] = ()
        """Objects that are notified of each mapping."""
        self.specs: dict[object, Any] = {}
        """:class:`MemorySpec` by ``MemAllocationProp``."""
        self.imported: tuple[bytes, Any] | None = None
        """Cache for imports, as the chunks of a range are alike: the bytes of the last imported memory's
        ``CUmemAllocationProp``, and its :class:`MemorySpec`.
        """
        self.deferred: DeferredQueue = deferred_queue(session)
        self.by_handle: dict[int, AllocationState] = {}
        """States by driver handle. Handles that only a mapping holds are not listed."""
        self.reservations: dict[Any, None] = {}
        """All reserved address ranges."""
        self.lock: AbstractContextManager[bool] = RLock()
        """Held to move a handle from a mapping to an object, to change the watchers, and to begin a release."""
        self.latest_fence: Fence | None = None
        """The latest fence behind all known streams. Nodes whose owners were dropped before it share this fence."""

    def mapped_at(self, address: int, nbytes: int) -> list[AllocationState]:
        """Return the states of all memory mapped within ``nbytes`` bytes from ``address``."""
        found = []
        for reservation in list(self.reservations):
            base = reservation.raw
            start = address - int(base or 0)
            if base is not None and start < reservation.nbytes and start + nbytes > 0:
                # Another thread may change the range: read a copy of its entries, and skip those not mapped yet.
                entries = list(reservation.entries)
                for entry in entries[bisect_right(entries, start, key=attrgetter("stop")) :]:
                    if entry.offset >= start + nbytes:
                        break
                    if not entry.gone and (entry._raw is not None or entry._memory is not None):
                        found.append(entry.memory._state)
        return found

    def make_room(self) -> int:
        """Release the unused memory of all arenas and expandable caches (``cuMemRelease``); return its bytes."""
        return sum(pages.make_room() for pages in members(self.arenas))

    def forget(self, state: AllocationState) -> None:
        """Remove a state that no handle and no mapping uses: the driver reuses handle numbers."""
        if not state.handles and not state.mappings and self.by_handle.get(state.handle) is state:
            self.by_handle.pop(state.handle, None)

    def work(self) -> int:
        """Attempt the deferred releases, see :mod:`streamalloc.core.deferred`; return how many succeeded."""
        return work(self.session)

    def drop(self, node: Node) -> None:
        """Submit a node to the queue, which releases it after the work that is queued now. Takes no lock, so finalisers
        call it.
        """
        node._dropped = time.monotonic_ns()
        self.deferred.submit(_Later(self, node))

    def end(self, node: Node) -> None:
        """Release a node now, or by an item of the queue once the nodes that precede it are gone.

        Raises
        ------
        CudaError
            The driver refused to release the node, which stays usable.
        """
        before, node.given_up = node.given_up, True
        try:
            gone = self.attempt(node)
        except BaseException:
            if not node.gone:
                node.given_up = before
            raise
        if not gone:
            self.deferred.submit(_Later(self, node))

    def attempt(self, node: Node) -> bool:
        """Unmap the nodes that a node owns, then release it, unless work or other nodes must come first. Returns
        whether it is released.

        One thread at a time attempts a node: two would call the driver twice with one handle.
        """
        with self.lock:
            mine = not (node.gone or node._busy)
            node._busy = node._busy or mine
        if mine:
            try:
                if not node.in_use(self.session):
                    node.unmap_owned()
                    if not node.waits:
                        node.release()
            finally:
                node._busy = False
        if node.gone:
            node.forget()
        return node.gone

    def attempt_all(self, nodes: Iterable[Node]) -> None:
        """Attempt all of these nodes, also after the driver has refused to release one. Raises the first CudaError,
        with later ones attached.
        """
        undo_all(functools.partial(self.attempt, node) for node in nodes)


class _Later(Deferred):
    """Queue item for a node whose owner was dropped, or which other nodes precede."""

    __slots__ = ("_allocations", "_node")

    def __init__(self, allocations: Allocations, node: Node) -> None:
        self._allocations = allocations
        self._node = node

    def attempt(self) -> bool:
        """Release the node if possible now."""
        self._node.give_up()
        return self._allocations.attempt(self._node)

    def forget(self) -> None:
        """Mark the node as released, because its context or driver is gone."""
        self._node.gone = True
        self._node.forget()


allocations_of: PerDriver[Allocations] = PerDriver(Allocations)
"""State for one driver: ``allocations_of(session)``."""


def check_exported(number: int) -> int:
    """Return the number of a file descriptor after a cheap check. Other wrong descriptors are refused by the driver.

    Raises
    ------
    ValueError
        The descriptor is certainly not a driver's handle: it is closed, a directory, a socket, a pipe, or a file with a
        name.
    """
    try:
        found = os.fstat(number)
    except (OSError, OverflowError) as error:
        raise ValueError(f"handle={number} is no open file descriptor of this process") from error
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a pipe"}
    kind = kinds.get(stat.S_IFMT(found.st_mode), "a file" if stat.S_ISREG(found.st_mode) and found.st_nlink else "")
    if kind:
        raise ValueError(f"handle={number} is {kind}, and no handle that the driver exported")
    return number


class GenericAllocation(OwnsNode, Shareable):
    """Owner of a ``CUmemGenericAllocationHandle`` that :meth:`AddressRange.map` can map.

    The subclasses are :class:`PhysicalMemory` and :class:`~streamalloc.multicast.MulticastObject`.
    """

    __slots__ = ("_granularity", "_handle_types", "_mark", "_session", "nbytes")

    _session: Session
    _node: AllocationHandle
    nbytes: int
    """Size in bytes."""
    _granularity: int
    """Granularity in bytes. Each offset of a mapping is a multiple of the granularity."""
    _handle_types: MemHandleType
    """Handle types for :meth:`export`."""
    _mark: str
    """One character for the memory in drawings of an address range."""
    _unreadable: str = ""
    """Reason why ordinary reads of the memory's mappings are undefined; empty if such reads are defined."""

    def _prepare(self, session: Session, nbytes: int, kind: Kind) -> None:
        """Set the attributes, make the node that will own the handle, and attempt deferred releases, which may free
        memory.
        """
        self._session = session
        self.nbytes = nbytes
        self._node = AllocationHandle(allocations_of(session), kind)
        self._node.allocations.work()

    def _create(self, name: str, *args: Any, hint: str = "") -> None:
        """Create the handle by driver function ``name``. Raises CudaError with ``hint``."""
        self._node._raw = self._session.call(name, *args, hint=hint)
        self._node.known()

    def _import(self, handle: Fd | int | bytes) -> None:
        """Import a handle that another process exported (``cuMemImportFromShareableHandle``). Raises TypeError,
        ValueError, CudaError.

        ``handle`` is a file descriptor, which the caller keeps and closes, or the 64 bytes of a fabric handle.
        """
        name = "cuMemImportFromShareableHandle"
        kinds = cuda.CUmemAllocationHandleType
        self._node.state.imported = True
        if isinstance(handle, (bytes, bytearray)):
            # The driver reads the struct by its address, so the struct must live until the call returns.
            struct = MemFabricHandle(handle).to_driver()
            hint = f"the owner has given it up or is of another IMEX domain; {FABRIC_NEEDS}"
            self._create(name, int(struct.getPtr()), kinds.CU_MEM_HANDLE_TYPE_FABRIC, hint=hint)
            return
        if isinstance(handle, bool) or not isinstance(handle, (int, Fd)):
            raise TypeError(f"handle must be an Fd, its number or a fabric handle's bytes, not {type(handle).__name__}")
        number = check_exported(handle.fileno() if isinstance(handle, Fd) else handle)
        hint = "this file descriptor is no handle that the driver exported"
        self._create(name, number, kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, hint=hint)

    @property
    def handle(self) -> int:
        """Driver handle (``CUmemGenericAllocationHandle``) as a number.

        Raises
        ------
        ClosedError
            The object was closed.
        """
        return int(self._checked_raw())

    @property
    def mapping_count(self) -> int:
        """Number of mappings in this process."""
        return sum(not mapping.given_up for mapping in list(self._state.mappings))

    @property
    def exported(self) -> bool:
        """Whether a handle was exported: other processes may hold the memory."""
        return self._state.exported

    @property
    def driver(self) -> Driver:
        """Driver that the object belongs to."""
        return self._session.driver

    @property
    @abc.abstractmethod
    def location(self) -> MemLocation:
        """Location of the memory."""

    def export(self, handle_type: MemHandleType = MemHandleType.POSIX_FILE_DESCRIPTOR) -> Fd | MemFabricHandle:
        """Export a handle for other processes (``cuMemExportToShareableHandle``).

        Returns an :class:`Fd` or a :class:`MemFabricHandle`. The driver keeps the memory while the handle is open or an
        importer has the memory, even after this object was closed.

        Raises
        ------
        ValueError
            The memory was not created with this handle type, or ``handle_type`` is not one that Linux has.
        ClosedError
            The object was closed.
        """
        kinds = (MemHandleType.POSIX_FILE_DESCRIPTOR, MemHandleType.FABRIC)
        if not isinstance(handle_type, MemHandleType) or handle_type not in kinds:
            raise ValueError(f"handle_type={handle_type!r}: allowed are POSIX_FILE_DESCRIPTOR and FABRIC")
        raw = self._checked_raw()
        if not self._handle_types & handle_type:
            raise ValueError(f"{self!r} cannot be exported so: make it with handle_types={handle_type!r}")
        kind = cuda.CUmemAllocationHandleType(int(handle_type))
        arguments = ("cuMemExportToShareableHandle", raw, kind, 0)
        if handle_type is MemHandleType.FABRIC:
            exported: Fd | MemFabricHandle = MemFabricHandle.from_driver(self._session.call(*arguments))
        else:
            exported = Fd.made_by(self._session, *arguments)
        self._state.exported = True
        return exported

    def close(self) -> None:
        """Release the handle (``cuMemRelease``); existing mappings stay usable. Idempotent.

        Memory that is bound to a multicast object keeps its handle until it is unbound.
        """
        if not self.closed:
            self._node.allocations.end(self._node)

    # -- for this package and its neighbours -----------------------------------------------------------------

    @abc.abstractmethod
    def _check_mappable(self) -> None:
        """Raise if the object cannot be mapped: ValueError for a tile pool, IncompleteTeamError for a multicast object
        without all its devices.
        """

    @abc.abstractmethod
    def _check_access(self, rights: Rights) -> None:
        """Raise NotSupportedError if the driver does not grant these permissions on this memory, before any of them is
        set.
        """

    @property
    def _state(self) -> AllocationState:
        return self._node.state

    def _handle_text(self) -> str:
        """Describe the handle and its mappings, for ``repr``."""
        state = "closed" if self.closed else f"handle {int(self._node.raw):#x}"
        return f"{state}, mapped {self.mapping_count} times" if self.mapping_count else state
