"""Names of ``vmm``, beside the public ones, that other areas use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from streamalloc.core.errors import undoing
from streamalloc.core.internal import Fd
from streamalloc.core.session import Session
from streamalloc.driver.internal import cuda
from streamalloc.vmm.access import Access, After, Rights, rights_of, wait
from streamalloc.vmm.address_range import AddressRange, LoneMapping, granularity, mappings_text
from streamalloc.vmm.growable import RemappableBuffer
from streamalloc.vmm.ownership import (
    AllocationHandle,
    AllocationState,
    GenericAllocation,
    HandleNode,
    Kind,
    MappedMemory,
    MappingWatcher,
    Node,
    OwnedHandle,
    Team,
    allocations_of,
    check_exported,
)
from streamalloc.vmm.physical_memory import PhysicalMemory, import_memory, spec_of
from streamalloc.vmm.properties import MemAllocationProp
from streamalloc.vmm.reservation import MappedBytes
from streamalloc.vmm.sleep import Tagged
from streamalloc.vmm.stores.pinned import HostMemory, available_memory, host_segments

_POSIX = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def map_alone(memory: GenericAllocation, alignment: int, rights: Rights) -> tuple[AddressRange, MappedBytes]:
    """Map memory in a separate range; return the arguments of :class:`LoneMapping`."""
    step = granularity(memory._session)
    range = AddressRange(-(-memory.nbytes // step) * step, alignment=alignment, driver=memory.driver)
    range._owned = True
    with undoing(range._free):
        return range, range._map(memory, 0, rights)


class RangePart(NamedTuple):
    """Mapped memory and its offset in the range, in bytes."""

    memory: GenericAllocation
    offset: int


def covering(range: AddressRange, start: int, stop: int) -> list[RangePart]:
    """Return the memory between two offsets of a range, in the order of addresses, with open handles.

    Raises
    ------
    ValueError
        The part has a hole.
    """
    found = []
    for entry in range._covering(start, stop):
        memory = entry.memory
        if memory.closed and isinstance(memory, PhysicalMemory):
            # No open handle is left: open another one by the mapping's address.
            memory = PhysicalMemory.at(range.address + entry.offset, driver=range.driver)
        found.append(RangePart(memory, entry.offset))
    return found


def is_imported(memory: GenericAllocation) -> bool:
    """Whether another process created the memory."""
    return memory._state.imported


def state_of(memory: GenericAllocation) -> AllocationState:
    """Return the state of memory that can be mapped and bound.

    Raises
    ------
    ClosedError
        The memory was closed.
    ValueError
        The memory is a tile pool.
    """
    memory._checked_raw()
    memory._check_mappable()
    return memory._state


def check_mappable(memory: PhysicalMemory) -> None:
    """Check the size of imported memory by mapping it: the driver maps only whole allocations."""
    granularity = memory._spec.granularity
    if memory.nbytes % granularity:
        raise ValueError(f"physical memory of {memory.nbytes} bytes, which are no multiple of {granularity}")
    with AddressRange(memory.nbytes, driver=memory.driver) as addresses:
        addresses.map(memory)


def watch_mappings(session: Session, watcher: MappingWatcher) -> None:
    """Notify a watcher of each mapping on a driver from now on."""
    allocations = allocations_of(session)
    with allocations.lock:
        allocations.watchers += (watcher,)


def unwatch_mappings(session: Session, watcher: MappingWatcher) -> None:
    """Stop notifying a watcher."""
    allocations = allocations_of(session)
    with allocations.lock:
        allocations.watchers = tuple(other for other in allocations.watchers if other is not watcher)


def is_counted(memory: MappedMemory) -> bool:
    """Whether this process created memory that was just mapped, and the memory has no other mapping."""
    if not isinstance(memory, GenericAllocation):
        return True  # a page
    state = memory._state
    ours = memory._node.kind is Kind.MEMORY and not state.imported
    return ours and len(state.mappings) == 1


class ImportedChunk(OwnedHandle):
    """A handle of physical memory that another process exported (``cuMemImportFromShareableHandle``).

    A chunk has no :class:`PhysicalMemory` object, because an import may have many chunks. Its size must be that of the
    exporter's memory, because the driver maps memory as a whole only.
    """

    __slots__ = ("nbytes",)

    def __init__(self, session: Session, fd: Fd, nbytes: int) -> None:
        super().__init__(session)
        self.nbytes: int = nbytes
        """Size of the memory in bytes."""
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
    spec = spec_of(range._session, prop)
    entries: list[MappedBytes] = []
    for chunk in chunks:
        if isinstance(chunk, PhysicalMemory):
            entry = range._map(chunk, offset)
        else:
            entry = MappedBytes(node, offset, offset + chunk.nbytes, {}, spec)
            with node.adding(entry):
                entry.map(chunk._raw)
        entries.append(entry)
        offset = entry.stop
    node.grant(entries, rights)
