"""What the driver gives a generic allocation handle for: physical memory, and multicast objects.

Both are exported, mapped and released by the same calls. What is dropped without being closed is given back in an order
that the driver can take: memory that is bound to a multicast object after that object, address ranges last.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from streamalloc.core.arguments import FABRIC_NEEDS
from streamalloc.core.door import Door
from streamalloc.core.errors import ClosedError, undo_all
from streamalloc.core.fd import Fd
from streamalloc.core.ownership import Closes
from streamalloc.core.properties import MemHandleType, MemLocation
from streamalloc.driver import Driver
from streamalloc.driver.internal import cuda, opaque_struct

if TYPE_CHECKING:
    from streamalloc.vmm.access import Rights
    from streamalloc.vmm.address_range import AddressRange

__all__ = ["AllocationState", "GenericAllocation", "import_handle", "once_gone"]


class AllocationState:
    """What all objects for one driver handle know of it."""

    __slots__ = (
        "_after",
        "_known",
        "bound_to",
        "ending",
        "exported",
        "handle",
        "holders",
        "imported",
        "mapping_count",
        "members",
        "multicast",
        "peers",
    )

    def __init__(self, known: dict[int, Any]) -> None:
        self._known = known
        """Where it is found by its handle, as long as that is held or mapped."""
        self._after: list[Callable[[], None]] = []
        self.handle = 0
        self.exported = False
        self.imported = False
        """Whether another process made it."""
        self.holders = 1
        """How many objects hold the handle."""
        self.mapping_count = 0
        self.bound_to: list[AllocationState] = []
        """The multicast objects that memory is bound to, one by one for each piece."""
        self.multicast = False
        """Whether it is a multicast object, which has no memory of its own."""
        self.members: list[AllocationState] = []
        """The memory that is bound to a multicast object, in the same way."""
        self.peers: set[AllocationState] = set()
        """All memory that is or was bound to the same multicast object as this memory, itself too, and is held."""
        self.ending: list[GenericAllocation] = []
        """Objects that were closed while the memory was bound."""

    def name(self, handle: int) -> None:
        """Tell the handle, once the driver has given it."""
        self.handle = handle
        self._known[handle] = self

    def released(self) -> None:
        """An object has let go of the handle."""
        self.holders -= 1
        self._forget()
        if not self.holders:
            # Nobody waits for it any more; a range that still maps it waits for its peers.
            for peer in self.peers - {self}:
                peer.peers.discard(self)
            after, self._after = self._after, []
            for undo in after:
                undo()

    def unmapped(self) -> None:
        """A mapping is gone."""
        self.mapping_count -= 1
        self._forget()

    def bind(self, memory: AllocationState) -> None:
        """A piece of ``memory`` was bound to this multicast object."""
        if memory.holders and memory not in self.members:
            team = [one for one in (*self.members, memory) if one.holders]
            memory.peers.update(team)
            for one in team:
                one.peers.add(memory)
        self.members.append(memory)
        memory.bound_to.append(self)

    def unbind(self, memory: AllocationState) -> None:
        """The piece was unbound. Releases what was closed meanwhile."""
        self.members.remove(memory)
        memory.bound_to.remove(self)

        def undos() -> Iterator[Callable[[], None]]:
            while memory.ending and not memory.bound_to:
                # One that fails is tried again when it is dropped.
                yield memory.ending.pop()._release

        undo_all(undos())

    def _forget(self) -> None:
        # The driver uses handles again.
        if not self.holders and not self.mapping_count and self._known.get(self.handle) is self:
            del self._known[self.handle]


def once_gone(states: Iterable[AllocationState], undo: Callable[[], None]) -> None:
    """Make a finaliser's ``undo`` now, or when the last of these handles has been given back."""
    waiting = [state for state in states if state.holders]
    if waiting:
        waiting[0]._after.append(lambda: once_gone(waiting, undo))
    else:
        undo()


class GenericAllocation(Closes):
    """What has a generic allocation handle (``CUmemGenericAllocationHandle``) and can be mapped.

    That is :class:`PhysicalMemory` or a multicast object: :meth:`AddressRange.map` takes either.
    """

    __slots__ = ("__weakref__", "_door", "_ending", "_kept", "_raw", "_state", "nbytes")

    nbytes: int
    """Size in bytes."""
    _state: AllocationState
    _door: Door
    _ending: bool
    """Whether it was closed, but keeps the handle until it is bound to nothing any more."""
    _kept: bool
    """Whether something else releases it, in an order of its own, where it is dropped."""
    _raw: Any

    def _hold(self, door: Door, nbytes: int, raw: Any) -> None:
        """Take over a handle, or get ready for one, so that nothing can come between and lose it."""
        self._raw = raw
        self._door = door
        self.nbytes = nbytes
        self._ending = False
        self._kept = False
        self._state = AllocationState(door.memories)

    @property
    def handle(self) -> int:
        """The driver's handle (``CUmemGenericAllocationHandle``) as a number.

        Raises
        ------
        ClosedError
            It was closed.
        """
        return int(self._checked_raw())

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called; mappings keep the memory nevertheless."""
        return self._raw is None or self._ending

    @property
    def mapping_count(self) -> int:
        """In how many places of this process it is mapped now."""
        return self._state.mapping_count

    @property
    def exported(self) -> bool:
        """Whether it was exported: other processes may hold it, too."""
        return self._state.exported

    @property
    def driver(self) -> Driver:
        """The driver that it belongs to."""
        return self._door.driver

    @property
    @abc.abstractmethod
    def location(self) -> MemLocation:
        """Where it is."""

    def export(self, handle_type: MemHandleType = MemHandleType.POSIX_FILE_DESCRIPTOR) -> Fd | bytes:
        """A handle for other processes (``cuMemExportToShareableHandle``): an :class:`Fd`, or a fabric handle's bytes.

        It stays as long as a handle or an importer holds it, also after it was closed here.

        Raises
        ------
        ValueError
            It was not made with this handle type.
        """
        if not isinstance(handle_type, MemHandleType) or handle_type not in _EXPORTS:
            raise ValueError(f"handle_type={handle_type!r}: allowed are POSIX_FILE_DESCRIPTOR and FABRIC")
        raw = self._checked_raw()
        if not self._handle_types & handle_type:
            raise ValueError(
                f"{self!r} cannot be exported as {handle_type!r}: make it with handle_types={handle_type!r}"
            )
        answer = self._door.call(
            "cuMemExportToShareableHandle", raw, cuda.CUmemAllocationHandleType(int(handle_type)), 0
        )
        self._state.exported = True
        return _EXPORTS[handle_type](answer)

    def close(self) -> None:
        """Give the handle back (``cuMemRelease``); where it is mapped it stays usable. Idempotent.

        Memory that is bound to a multicast object keeps its handle until it is unbound.
        """
        if self.closed:
            return
        if self._state.bound_to:
            self._ending = True
            self._state.ending.append(self)
        else:
            self._release()

    # -- for this package and its neighbours -----------------------------------------------------------------

    @property
    @abc.abstractmethod
    def _handle_types(self) -> MemHandleType:
        """What it can be exported as."""

    @property
    @abc.abstractmethod
    def _granularity(self) -> int:
        """What the places of its mappings must be a multiple of, in bytes."""

    @property
    @abc.abstractmethod
    def _mark(self) -> str:
        """The character that stands for it where an address range is drawn."""

    @abc.abstractmethod
    def _check_mappable(self) -> None:
        """Raise where it cannot be mapped."""

    @abc.abstractmethod
    def _check_access(self, rights: Rights) -> None:
        """Raise where somebody cannot be given this access to it."""

    @property
    def _unreadable(self) -> str:
        """Why ordinary reads of its mappings mean nothing; empty where they do."""
        return ""

    def _was_mapped(self, range: AddressRange) -> None:
        """A range has mapped it."""
        self._state.mapping_count += 1

    def _was_unmapped(self) -> None:
        """A range has unmapped it."""
        self._state.unmapped()

    def _take_mapping(self, address: int, rights: Rights) -> bool:
        """Whether this object unmaps what a dropped range has mapped of it, instead of the range."""
        return False

    def _release(self) -> None:
        self._door.call("cuMemRelease", self._raw)
        self._raw = None
        self._state.released()

    def _checked_raw(self) -> Any:
        if self.closed:
            raise ClosedError(f"{self!r} was closed")
        return self._raw

    def __del__(self) -> None:
        if getattr(self, "_raw", None) is not None and not self._kept and self._door.usable:
            self._drop()

    def _drop(self) -> None:
        """Give the handle back for the finaliser: never raises."""
        if self._state.bound_to:
            # Another object for the same handle was bound.
            self.close()
            return
        self._door.driver.cuMemRelease(self._raw)
        self._raw = None
        self._state.released()

    def _said_of_handle(self) -> str:
        """The handle and its mappings, for ``repr``."""
        state = "closed" if self.closed else f"handle {int(self._raw):#x}"
        return f"{state}, mapped {self.mapping_count} times" if self.mapping_count else state


_EXPORTS: dict[MemHandleType, Callable[[Any], Fd | bytes]] = {
    MemHandleType.POSIX_FILE_DESCRIPTOR: lambda answer: Fd(int(answer)),
    MemHandleType.FABRIC: lambda answer: bytes(answer.data),
}


def import_handle(door: Door, handle: Fd | int | bytes) -> Any:
    """The driver's handle for what another process exported (``cuMemImportFromShareableHandle``).

    ``handle`` is a file descriptor, which stays the caller's, or the 64 bytes of a fabric handle.
    """
    if isinstance(handle, (bytes, bytearray)):
        # The driver reads the handle where it is, so that it has to stay until then.
        struct = opaque_struct("CUmemFabricHandle", bytes(handle))
        return door.call(
            "cuMemImportFromShareableHandle",
            int(struct.getPtr()),
            cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC,
            hint=f"the owner has given it up or is of another IMEX domain; {FABRIC_NEEDS}",
        )
    if isinstance(handle, bool) or not isinstance(handle, (int, Fd)):
        raise TypeError(f"handle must be an Fd, its number or a fabric handle's bytes, not {type(handle).__name__}")
    return door.call(
        "cuMemImportFromShareableHandle",
        handle.fileno() if isinstance(handle, Fd) else handle,
        cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        hint="this file descriptor is no handle that the driver exported",
    )
