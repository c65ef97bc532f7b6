"""What the driver gives a generic allocation handle for: physical memory, and multicast objects.

Both are exported, mapped and released by the same calls.
"""

from __future__ import annotations

import abc
from typing import Any

from streamalloc.core.internal import FABRIC_NEEDS, Fd, MemHandleType, MemLocation, Session
from streamalloc.driver import Driver
from streamalloc.driver.internal import cuda, opaque_struct
from streamalloc.vmm.access import Rights
from streamalloc.vmm.allocation_handles import AllocationHandle, AllocationState, OwnsNode, allocations_of
from streamalloc.vmm.release_order import Kind

__all__ = ["GenericAllocation"]


class GenericAllocation(OwnsNode):
    """What has a generic allocation handle (``CUmemGenericAllocationHandle``) and can be mapped.

    That is :class:`PhysicalMemory` or a multicast object: :meth:`AddressRange.map` takes either.
    """

    __slots__ = ("_granularity", "_handle_types", "_session", "nbytes")

    _session: Session
    _node: AllocationHandle
    nbytes: int
    """Size in bytes."""
    _granularity: int
    """What the places of its mappings must be a multiple of, in bytes."""
    _handle_types: MemHandleType
    """What it can be exported as."""

    def _prepare(self, session: Session, nbytes: int, kind: Kind) -> None:
        """Get ready for a handle. An interrupt between the driver's answer and the owner of it then loses nothing."""
        self._session = session
        self.nbytes = nbytes
        self._node = AllocationHandle(allocations_of(session), kind)
        self._node.allocations.work()

    def _create(self, name: str, *args: Any, hint: str = "") -> None:
        """Call the driver function that gives the handle."""
        self._session.create(self._node, "_raw", name, *args, hint=hint)
        self._node.known()

    def _import(self, handle: Fd | int | bytes) -> None:
        """Get the handle of what another process has exported (``cuMemImportFromShareableHandle``).

        ``handle`` is a file descriptor, which stays the caller's, or the 64 bytes of a fabric handle.
        """
        name = "cuMemImportFromShareableHandle"
        kinds = cuda.CUmemAllocationHandleType
        self._node.state.imported = True
        if isinstance(handle, (bytes, bytearray)):
            # The driver reads the handle where it is, so that it has to stay until then.
            struct = opaque_struct("CUmemFabricHandle", bytes(handle))
            hint = f"the owner has given it up or is of another IMEX domain; {FABRIC_NEEDS}"
            self._create(name, int(struct.getPtr()), kinds.CU_MEM_HANDLE_TYPE_FABRIC, hint=hint)
            return
        if isinstance(handle, bool) or not isinstance(handle, (int, Fd)):
            raise TypeError(f"handle must be an Fd, its number or a fabric handle's bytes, not {type(handle).__name__}")
        number = handle.fileno() if isinstance(handle, Fd) else handle
        hint = "this file descriptor is no handle that the driver exported"
        self._create(name, number, kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, hint=hint)

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
    def mapping_count(self) -> int:
        """In how many places of this process it is mapped now."""
        return sum(not mapping.given_up for mapping in list(self._state.mappings))

    @property
    def exported(self) -> bool:
        """Whether it was exported: other processes may hold it, too."""
        return self._state.exported

    @property
    def driver(self) -> Driver:
        """The driver that it belongs to."""
        return self._session.driver

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
        kinds = (MemHandleType.POSIX_FILE_DESCRIPTOR, MemHandleType.FABRIC)
        if not isinstance(handle_type, MemHandleType) or handle_type not in kinds:
            raise ValueError(f"handle_type={handle_type!r}: allowed are POSIX_FILE_DESCRIPTOR and FABRIC")
        raw = self._checked_raw()
        if not self._handle_types & handle_type:
            raise ValueError(f"{self!r} cannot be exported so: make it with handle_types={handle_type!r}")
        kind = cuda.CUmemAllocationHandleType(int(handle_type))
        arguments = ("cuMemExportToShareableHandle", raw, kind, 0)
        if handle_type is MemHandleType.FABRIC:
            exported: Fd | bytes = bytes(self._session.call(*arguments).data)
        else:
            exported = Fd.made_by(self._session, *arguments)
        self._state.exported = True
        return exported

    def close(self) -> None:
        """Give the handle back (``cuMemRelease``); where it is mapped it stays usable. Idempotent.

        Memory that is bound to a multicast object keeps its handle until it is unbound.
        """
        if not self.closed:
            self._node.allocations.end(self._node)

    # -- for this package and its neighbours -----------------------------------------------------------------

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

    @property
    def _state(self) -> AllocationState:
        return self._node.state

    def _said_of_handle(self) -> str:
        """The handle and its mappings, for ``repr``."""
        state = "closed" if self.closed else f"handle {int(self._node.raw):#x}"
        return f"{state}, mapped {self.mapping_count} times" if self.mapping_count else state
