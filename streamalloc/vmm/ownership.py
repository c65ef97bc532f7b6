"""The ownership tree of virtual memory, and the order of its release: first mappings, then the handles of memory.

A range owns its mappings. The handle of memory is owned by a mapping or by an object such as :class:`PhysicalMemory`. A
multicast object owns its bindings. Each driver resource is a :class:`Node`, which refers to no public object. A node is
released once its owner was closed or dropped, the work that may use the resource is done, and all nodes of
:meth:`Node.before` are released.

An owner that is closed calls :meth:`Node.end`, an owner that is dropped :meth:`Node.drop`. Both record that the node is
given up, and make an :meth:`~Node.attempt` now or later: if nothing must come first, it makes the driver call
(:meth:`~Node.release`) and removes the node from all tables (:meth:`~Node.forget`).

Driver 580 requires this order for multicast objects, whatever is closed or dropped first: unbind the memory, unmap and
release the multicast object, release the memory that was bound to it, free the addresses. Otherwise the process
crashes, or the addresses cannot be freed. Without multicast, a mapping and the handle of its memory may be released in
any order: the driver keeps the memory until both are released.

``cuMemUnmap`` does not wait for queued work, and work that uses an unmapped address breaks the context of its device.
So a call that closes a range first waits for the work. A finaliser cannot wait: it submits the node to the queue of
:mod:`streamalloc.core.deferred`, which releases the node once the work that was queued at that moment is done.

Physical memory and multicast objects both have a ``CUmemGenericAllocationHandle``. The same driver calls export,
import, map and release them, see :class:`GenericAllocation`.
"""

from __future__ import annotations

import abc
import os
import stat
import time
import weakref
from bisect import bisect_right
from collections.abc import Collection, Sequence
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
from streamalloc.formats.html import Shown
from streamalloc.vmm.access import Rights


class Node(Deferred):
    """One driver resource, such as a mapping or a handle, that will be released. If it cannot be released yet, the node
    is an item of the deferred queue.
    """

    __slots__ = ("_busy", "_dropped", "_fence", "given_up", "gone")

    allocations: Allocations
    """State of the driver."""

    def __init__(self) -> None:
        self.given_up: bool = False
        """Whether the owner has closed or dropped the resource."""
        self.gone: bool = False
        """Whether the resource is released."""
        self._busy = False
        """Whether a thread is trying to release the resource now."""
        self._dropped: int | None = None
        """Time at which the owner was dropped (``time.monotonic_ns``). None if the owner was closed, because a close
        waits for the work that may use the resource.
        """
        self._fence: Fence | None = None
        """Fence for the work that the release waits for if the owner was dropped; None before the first attempt."""

    @property
    def users(self) -> Collection[int]:
        """Ordinals of the devices whose queued work may use the resource."""
        return ()

    def before(self) -> Collection[Node]:
        """Return the nodes that must be released before this node; some may be released already."""
        return ()

    def in_use(self) -> bool:
        """Return whether work may still use the resource, because it was queued when the owner was dropped and is not
        done. Return False if the owner was closed, because the close has waited for the work.
        """
        if self._dropped is None or not self.users:
            return False
        if self._fence is None:
            self._fence = self.allocations.fence_since(self._dropped)
        return not self._fence.done()

    def give_up(self) -> None:
        """Record that the owner was closed or dropped. Idempotent."""
        self.given_up = True

    def drop(self) -> None:
        """Submit the node of a dropped owner to the deferred queue, which releases it after the work that is queued
        now. Takes no lock, so finalisers can call this method.
        """
        self._dropped = time.monotonic_ns()
        # Now, and not in the attempt: an item that is attempted earlier may then release what this node owns.
        self.give_up()
        self.allocations.deferred.submit(self)

    def end(self) -> None:
        """Release the node of a closed owner now. If other nodes must be released first, the deferred queue releases
        this node later.

        Raises
        ------
        CudaError
            The driver refused to release the resource, which stays usable.
        """
        before, self.given_up = self.given_up, True
        try:
            gone = self.attempt()
        except BaseException:
            if not self.gone:
                self.given_up = before
            raise
        if not gone:
            self.allocations.deferred.submit(self)

    def attempt(self) -> bool:
        """Release what this node owns, then the node itself, unless work must finish or other nodes must be released
        first. Returns whether the node is released. Raises CudaError.

        Only one thread at a time does this for a node: two threads would call the driver twice with one handle.
        """
        with self.allocations.lock:
            mine = not (self.gone or self._busy)
            self._busy = self._busy or mine
        if mine:
            try:
                if not self.in_use():
                    # All are attempted: one refusal must not prevent the other releases.
                    undo_all(one.attempt for one in self.owned())
                    if all(node.gone for node in self.before()):
                        self.release()
            finally:
                self._busy = False
        if self.gone:
            self.forget()
        return self.gone

    def owned(self) -> Sequence[Node]:
        """Return the mappings or bindings that this node owns, which are released first, in this order."""
        return ()

    def release(self) -> None:
        """Release the resource and set :attr:`gone`. If the release is not possible yet, leave :attr:`gone` False: the
        release is then tried again. Must not block. Raises CudaError.
        """
        self.gone = True

    def forget(self) -> None:
        """Record that the resource is released or no longer exists: remove the node from the tables that contain it.
        Idempotent.
        """
        self.gone = True


class AllocationState:
    """State of one physical allocation or multicast object, shared by all Python objects that have its driver
    handle. Any thread may change the dictionaries, so readers iterate over copies.
    """

    __slots__ = ("bindings", "exported", "handle", "handles", "imported", "is_object", "mappings", "objects")

    def __init__(self) -> None:
        self.handle: int = 0
        """The driver handle as a number; 0 before an object has the handle."""
        self.exported: bool = False
        """Whether this process has exported a handle of the memory or the object for other processes."""
        self.imported: bool = False
        """Whether another process created the memory or the object."""
        self.is_object: bool = False
        """Whether this is a multicast object."""
        self.handles: dict[AllocationHandle, None] = {}
        """The nodes of all Python objects that have the handle."""
        self.mappings: dict[Any, None] = {}
        """Nodes of the mappings of the memory or multicast object in this process."""
        self.bindings: dict[Any, None] = {}
        """Nodes of the bindings of the memory to multicast objects, and of the sparse arrays that use the memory."""
        self.objects: dict[AllocationHandle, None] = {}
        """Nodes of the multicast objects that the memory is or was bound to, and which are released before it; for the
        state of such an object, the object's own node.
        """


class HandleNode(Node):
    """A node with a driver handle or address that one driver call releases."""

    __slots__ = ("_raw", "allocations")

    def __init__(self, allocations: Allocations) -> None:
        Node.__init__(self)
        self.allocations: Allocations = allocations
        self._raw: Any = None

    @property
    def raw(self) -> Any:
        """Driver handle or address; None before its creation and after its release."""
        return self._raw

    def release_by(self, call: str, *args: Any) -> None:
        """Release the handle at most once, by driver function ``call`` with the handle and ``args``. Raises CudaError;
        the node then keeps the handle, unless the handle no longer exists.
        """
        try:
            self.allocations.session.release(self, call, *args)
        finally:
            self.gone: bool = self._raw is None


class OwnsNode(Closes, Shown):
    """Owner of a :class:`Node`. A close releases the node. If nodes of :meth:`Node.before` must be released before, the
    deferred queue releases the node after them. If the owner is dropped, the release also waits for the work that was
    queued at that moment.
    """

    __slots__ = ("__weakref__", "_node")

    _node: Any

    @property
    def closed(self) -> bool:
        """Whether the object was closed. Calls that need it then raise :class:`ClosedError`."""
        node = self._node
        return node._raw is None or node.given_up

    def _checked_raw(self) -> Any:
        node = self._node
        if node._raw is None or node.given_up:
            raise ClosedError(f"{self!r} was closed")
        return node._raw

    def __del__(self) -> None:
        node: HandleNode | None = getattr(self, "_node", None)
        if node is not None and node._raw is not None and not node.given_up and node.allocations.session.usable:
            node.drop()


class AllocationHandle(HandleNode):
    """One object's reference to a ``CUmemGenericAllocationHandle``, which ``cuMemRelease`` releases."""

    __slots__ = ("borrowed", "kept", "members", "state", "used_unmapped")

    def __init__(self, allocations: Allocations) -> None:
        super().__init__(allocations)
        self.borrowed: bool = False
        """Whether other code releases the handle."""
        self.used_unmapped: tuple[int, ...] = ()
        """Ordinals of devices that may use the memory without a mapping."""
        self.kept: dict[Node, object] = {}
        """Objects that must stay alive: memory that is bound to this multicast object, by the binding's node, or the
        owner of a borrowed handle, by this node.
        """
        self.members: dict[AllocationState, None] = {}
        """States of the memory that is or was bound to this multicast object. Addresses at which the object or this
        memory was mapped are freed after the object and all this memory are released.
        """
        self.state: AllocationState = AllocationState()
        self.state.handles[self] = None

    def join(self) -> None:
        """Share the state of other objects with the same driver handle. Call this after the handle was stored in
        :attr:`raw`.
        """
        state = self.state
        state.handle = int(self._raw)
        before = self.allocations.by_handle.setdefault(state.handle, state)
        if before is state:
            return
        before.imported = before.imported or state.imported
        before.mappings.update(state.mappings)
        self.state = before
        before.handles[self] = None

    @property
    def users(self) -> Collection[int]:
        """Ordinals of the devices that may use the memory without a mapping, or map the multicast object."""
        mappings = list(self.state.mappings) if self.state.is_object else ()
        return {*self.used_unmapped, *(device for mapping in mappings for device in mapping.users)}

    def bound(self) -> list[Any]:
        """Return the bindings of this multicast object that are not released."""
        return [node for node in list(self.kept) if node is not self and not node.gone]

    def before(self) -> Collection[Node]:
        """Return the bindings and mappings of this multicast object, or the bindings and multicast objects of this
        memory.
        """
        if self.state.is_object:
            return [*self.bound(), *list(self.state.mappings)]
        return [*list(self.state.bindings), *list(self.state.objects)]

    def owned(self) -> Sequence[Node]:
        """For the handle of a multicast object, return its bindings, then those of its mappings whose owners were
        closed or dropped.
        """
        if not self.state.is_object:
            return ()
        return [*self.bound(), *(one for one in list(self.state.mappings) if one.given_up)]

    def release(self) -> None:
        """Call ``cuMemRelease``, unless other code releases the handle. Raises CudaError."""
        if self.borrowed:
            self._raw, self.gone = None, True
        else:
            self.release_by("cuMemRelease")

    def forget(self) -> None:
        """Remove this node from the state of its driver handle and of memory that was bound to it, and drop the objects
        in :attr:`kept`.
        """
        super().forget()
        self.kept.clear()
        self.state.handles.pop(self, None)
        for state in list(self.members):
            state.objects.pop(self, None)
        self.allocations.forget(self.state)


class MappedMemory(Protocol):
    """Type of the memory of which a watcher is notified: a :class:`GenericAllocation`, or for one page of an arena the
    arena's :class:`~streamalloc.vmm.pages.places.PhysicalPages`.
    """

    @property
    def nbytes(self) -> int:
        """Size in bytes; for an arena, the size of a page."""

    @property
    def location(self) -> MemLocation:
        """Location of the memory."""


class MappingWatcher(Protocol):
    """Type of an object that is notified of the mappings of one driver."""

    def to_be_mapped(self, address: int, nbytes: int, /) -> None:
        """Called before ``nbytes`` bytes of memory for a buffer, a cache or a page space are created and mapped at
        ``address``. If this method raises, nothing is mapped, and the exception goes to the caller of the mapping.
        """

    def mapped(self, address: int, memory: MappedMemory, /) -> None:
        """Called after ``memory`` was mapped at ``address``. If this method raises, the exception goes to the caller of
        the mapping. Before that, the memory is unmapped; pages of a :meth:`PageSpace.commit` are released, and other
        pages of a space stay committed.
        """

    def unmapped(self, address: int, /) -> None:
        """Called after the mapping at ``address`` was unmapped, or the page of an arena there was released. Never
        raises.
        """


class Allocations:
    """State of :mod:`streamalloc.vmm` for one driver: reservations, handles, arenas and watchers."""

    def __init__(self, session: Session) -> None:
        self.session: Session = session
        self.arenas: weakref.WeakSet[Any] = weakref.WeakSet()
        """The pages of all arenas, and the expandable caches. The method ``make_room()`` of each releases unused memory
        and returns the number of bytes.
        """
        self.watchers: tuple[MappingWatcher, ...] = ()
        """Objects that are notified of each mapping."""
        self.specs: dict[object, Any] = {}
        """:class:`MemorySpec` by ``MemAllocationProp``, and for imported memory by the bytes of the driver's struct."""
        self.deferred: DeferredQueue = deferred_queue(session)
        self.by_handle: dict[int, AllocationState] = {}
        """States by driver handle, without handles that only a mapping has."""
        self.reservations: dict[Any, None] = {}
        """The nodes of all reserved address ranges."""
        self.lock: AbstractContextManager[bool] = RLock()
        """Lock held while a handle is moved from a mapping to an object, while watchers are changed, and while a
        release begins.
        """
        self.latest_fence: Fence | None = None
        """The latest fence for the work of all known streams. Nodes share this fence if their owners were dropped
        before the fence was made. None before the first drop.
        """

    def mapped_at(self, address: int, nbytes: int) -> list[AllocationState]:
        """Return the :class:`AllocationState` of each mapping of this package that overlaps the ``nbytes`` bytes from
        ``address`` on. Memory that is mapped there twice is listed twice. Pages of arenas are left out. If only a
        mapping has the handle, a :class:`PhysicalMemory` is made for it (:meth:`MappedBytes.as_object`).
        """
        found = []
        for reservation in list(self.reservations):
            base = reservation.raw
            start = address - int(base or 0)
            if base is not None and start < reservation.nbytes and start + nbytes > 0:
                # Another thread may change the range: read a copy of its entries, and skip entries that are not mapped
                # yet.
                entries = list(reservation.entries)
                for entry in entries[bisect_right(entries, start, key=attrgetter("stop")) :]:
                    if entry.offset >= start + nbytes:
                        break
                    if not entry.gone and (entry._raw is not None or entry._memory is not None):
                        found.append(entry.as_object()._state)
        return found

    def make_room(self) -> int:
        """Release the unused memory of all arenas and expandable caches (``cuMemRelease``). Returns the number of bytes
        released.
        """
        return sum(pages.make_room() for pages in members(self.arenas))

    def forget(self, state: AllocationState) -> None:
        """Remove ``state`` from the table if no handle and no mapping uses it, because the driver reuses handle
        numbers.
        """
        if not state.handles and not state.mappings and self.by_handle.get(state.handle) is state:
            self.by_handle.pop(state.handle, None)

    def fence_since(self, dropped: int) -> Fence:
        """Return a fence that covers at least the work that was queued on known streams at the time ``dropped``
        (``time.monotonic_ns``).

        All nodes that were dropped before the latest fence was made share this fence, so a thousand nodes need only one
        event per stream.
        """
        latest = self.latest_fence
        if latest is None or latest.began <= dropped:
            self.latest_fence = latest = Fence(self.session)
        return latest

    def work(self) -> int:
        """Attempt the deferred releases (:mod:`streamalloc.core.deferred`). Returns how many were made."""
        return work(self.session)


allocations_of: PerDriver[Allocations] = PerDriver(Allocations)
"""``allocations_of(session)`` returns the :class:`Allocations` of the session's driver."""


def check_exported(number: int) -> int:
    """Return ``number``, a file descriptor, after a cheap check. The driver refuses other wrong descriptors.

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
    """Base class of :class:`PhysicalMemory` and :class:`~streamalloc.multicast.MulticastObject`, which own a
    ``CUmemGenericAllocationHandle``. :meth:`AddressRange.map` maps them.
    """

    __slots__ = ("_granularity", "_handle_types", "_mark", "_session", "nbytes")

    _session: Session
    _node: AllocationHandle
    nbytes: int
    """Size in bytes."""
    _granularity: int
    """Granularity in bytes. The offset of each mapping is a multiple of this size."""
    _handle_types: MemHandleType
    """Handle types that :meth:`export` can use."""
    _mark: str
    """One character for the memory in drawings of an address range."""
    _spec: Any = None
    """:class:`MemorySpec` of physical memory; None for a multicast object."""
    _unreadable: str = ""
    """Reason why ordinary reads of the memory's mappings have undefined results; empty if reads are defined."""

    def _prepare(self, session: Session, nbytes: int) -> None:
        """Set the attributes, and make the node that will own the handle. Also attempt deferred releases, which may
        free memory.
        """
        self._session = session
        self.nbytes = nbytes
        self._node = AllocationHandle(allocations_of(session))
        self._node.allocations.work()

    def _create(self, name: str, *args: Any, hint: str = "") -> None:
        """Create the handle by driver function ``name``. Raises CudaError with ``hint``."""
        self._node._raw = self._session.call(name, *args, hint=hint)
        self._node.join()

    def _import(self, handle: Fd | int | bytes) -> None:
        """Import a handle that another process exported (``cuMemImportFromShareableHandle``). Raises TypeError,
        ValueError, CudaError.

        ``handle`` is a file descriptor, which the caller keeps and closes, or the 64 bytes of a fabric handle.
        """
        name = "cuMemImportFromShareableHandle"
        kinds = cuda.CUmemAllocationHandleType
        self._node.state.imported = True
        if isinstance(handle, (bytes, bytearray)):
            # The driver reads the struct by its address, so the struct must exist until the call returns.
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
        """Number of the memory's mappings that this package has made in this process and not unmapped."""
        return sum(not mapping.given_up for mapping in list(self._state.mappings))

    @property
    def exported(self) -> bool:
        """Whether this process has exported a handle. Other processes may then keep the memory, so an eviction needs
        ``shared=True``.
        """
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

        Returns an :class:`Fd` or a :class:`MemFabricHandle`, as ``handle_type`` says. Even after this object was
        closed, the driver keeps the memory while a returned :class:`Fd` is open or another process has imported the
        memory.

        Raises
        ------
        ValueError
            The memory was not created with this handle type, or ``handle_type`` is not possible on Linux.
        ClosedError
            The object was closed.
        CudaError
            The driver refused the export.
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
        """Release the handle (``cuMemRelease``), unless other code owns it. Existing mappings stay usable. Idempotent.

        The handle of memory that is bound to a multicast object is released after the memory was unbound.

        Raises
        ------
        CudaError
            The driver refused. The object stays open, unless the handle no longer exists.
        """
        if not self.closed:
            self._node.end()

    # -- for this package and its neighbours -----------------------------------------------------------------

    @abc.abstractmethod
    def _check_mappable(self) -> None:
        """Raise an error if the object cannot be mapped: ValueError for a tile pool; for a multicast object ClosedError
        if it was closed, and IncompleteTeamError if not all devices were added.
        """

    @abc.abstractmethod
    def _check_access(self, rights: Rights) -> None:
        """Raise NotSupportedError if the driver cannot grant the host these permissions. For a multicast object, raise
        ValueError if a device is not in its team. Called before any permission is set.
        """

    @property
    def _state(self) -> AllocationState:
        return self._node.state

    def _handle_text(self) -> str:
        """Return a text for ``repr`` about the handle and the number of its mappings."""
        state = "closed" if self.closed else f"handle {int(self._node.raw):#x}"
        return f"{state}, mapped {self.mapping_count} times" if self.mapping_count else state
