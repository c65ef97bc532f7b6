"""Physical memory of another process in many chunks, imported and mapped with few Python objects.

A chunk is a driver handle with one owner, without a :class:`PhysicalMemory` object.
"""

from __future__ import annotations

from collections.abc import Sequence

from streamalloc.core.allocation_properties import MemAllocationProp
from streamalloc.core.internal import Fd
from streamalloc.core.session import Session
from streamalloc.driver.internal import cuda
from streamalloc.vmm.access import Rights
from streamalloc.vmm.address_range import AddressRange
from streamalloc.vmm.physical_memory import PhysicalMemory, spec_of
from streamalloc.vmm.recycler import UnusedHandle
from streamalloc.vmm.reservation import MappedBytes

__all__ = ["ImportedChunk", "map_side_by_side"]

_POSIX = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class ImportedChunk(UnusedHandle):
    """A handle of physical memory that another process exported (``cuMemImportFromShareableHandle``).

    Its size is the exporter's; the driver maps no other.
    """

    __slots__ = ()

    def __init__(self, session: Session, fd: Fd, nbytes: int) -> None:
        super().__init__(session, nbytes)
        hint = "this file descriptor is no handle that the driver exported"
        self._raw = session.call("cuMemImportFromShareableHandle", fd.fileno(), _POSIX, hint=hint)

    def close(self) -> None:
        """Release the handle (``cuMemRelease``); existing mappings stay usable. Idempotent."""
        self.attempt()


def map_side_by_side(
    range: AddressRange, chunks: Sequence[ImportedChunk | PhysicalMemory], prop: MemAllocationProp, rights: Rights
) -> None:
    """Map chunks from the first address of an empty range on, and set their permissions.

    ``prop``: the properties of imported chunks. After an error the caller must unmap the range.
    """
    node, offset = range._node, 0
    node.maker = spec_of(range._session, prop)
    entries: list[MappedBytes] = []
    for chunk in chunks:
        if isinstance(chunk, PhysicalMemory):
            entry = range._map(chunk, offset)
        else:
            entry = MappedBytes(node, offset, offset + chunk.nbytes, {})
            with node.adding(entry):
                entry.map(chunk._raw)
        entries.append(entry)
        offset = entry.stop
    node.grant(entries, rights)
