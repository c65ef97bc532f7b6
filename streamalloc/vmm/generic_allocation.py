"""Generic allocations: physical memory and multicast objects.

The same driver calls export, import, map and release both (``CUmemGenericAllocationHandle``).
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


class GenericAllocation(OwnsNode):
    """Owner of a ``CUmemGenericAllocationHandle``, which :meth:`AddressRange.map` maps.

    The subclasses are :class:`PhysicalMemory` and :class:`~streamalloc.multicast.MulticastObject`.
    """

    __slots__ = ("_granularity", "_handle_types", "_session", "nbytes")

    _session: Session
    _node: AllocationHandle
    nbytes: int
    """Size in bytes."""
    _granularity: int
    """Bytes; mapping offsets are multiples of it."""
    _handle_types: MemHandleType
    """Handle types for :meth:`export`."""

    def _prepare(self, session: Session, nbytes: int, kind: Kind) -> None:
        """Make the node that will own the handle."""
        self._session = session
        self.nbytes = nbytes
        self._node = AllocationHandle(allocations_of(session), kind)
        self._node.allocations.work()

    def _create(self, name: str, *args: Any, hint: str = "") -> None:
        """Call the driver function that creates the handle."""
        self._session.create(self._node, "_raw", name, *args, hint=hint)
        self._node.known()

    def _import(self, handle: Fd | int | bytes) -> None:
        """Open a handle that another process exported (``cuMemImportFromShareableHandle``).

        ``handle`` is a file descriptor, which the caller keeps and closes, or the 64 bytes of a fabric handle.
        """
        name = "cuMemImportFromShareableHandle"
        kinds = cuda.CUmemAllocationHandleType
        self._node.state.imported = True
        if isinstance(handle, (bytes, bytearray)):
            # The driver reads the handle by its address, so the struct must live until the call returns.
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
        """Driver handle (``CUmemGenericAllocationHandle``) as a number.

        Raises
        ------
        ClosedError
            It was closed.
        """
        return int(self._checked_raw())

    @property
    def mapping_count(self) -> int:
        """Number of mappings in this process."""
        return sum(not mapping.given_up for mapping in list(self._state.mappings))

    @property
    def exported(self) -> bool:
        """Whether it was exported: other processes may hold it."""
        return self._state.exported

    @property
    def driver(self) -> Driver:
        """Driver that it belongs to."""
        return self._session.driver

    @property
    @abc.abstractmethod
    def location(self) -> MemLocation:
        """Location of the memory."""

    def export(self, handle_type: MemHandleType = MemHandleType.POSIX_FILE_DESCRIPTOR) -> Fd | bytes:
        """Export a handle for other processes (``cuMemExportToShareableHandle``).

        Return an :class:`Fd`, or the 64 bytes of a fabric handle. The driver keeps the memory as long as a handle or an
        importer holds it, also after it was closed here.

        Raises
        ------
        ValueError
            It was not created with this handle type.
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
        """Release the handle (``cuMemRelease``); existing mappings stay usable. Idempotent.

        Memory that is bound to a multicast object keeps its handle until it is unbound.
        """
        if not self.closed:
            self._node.allocations.end(self._node)

    # -- for this package and its neighbours -----------------------------------------------------------------

    @property
    @abc.abstractmethod
    def _mark(self) -> str:
        """One character for the memory in drawings of an address range."""

    @abc.abstractmethod
    def _check_mappable(self) -> None:
        """Raise if it cannot be mapped."""

    @abc.abstractmethod
    def _check_access(self, rights: Rights) -> None:
        """Raise if the driver does not grant these permissions on it."""

    @property
    def _unreadable(self) -> str:
        """Reason why ordinary reads of its mappings are undefined; empty if they are defined."""
        return ""

    @property
    def _state(self) -> AllocationState:
        return self._node.state

    def _handle_text(self) -> str:
        """Describe the handle and its mappings, for ``repr``."""
        state = "closed" if self.closed else f"handle {int(self._node.raw):#x}"
        return f"{state}, mapped {self.mapping_count} times" if self.mapping_count else state
