"""Private names of ``vmm`` that other areas of the package may import."""

from __future__ import annotations

from collections.abc import Sequence

from streamalloc.core.session import Session
from streamalloc.vmm.access import Access, After, Rights, rights_of, wait_for_users
from streamalloc.vmm.address_range import AddressRange, LoneMapping, rights_text
from streamalloc.vmm.growable import RemappableBuffer
from streamalloc.vmm.members import Tagged
from streamalloc.vmm.ownership import (
    AllocationHandle,
    AllocationState,
    GenericAllocation,
    HandleNode,
    MappedMemory,
    MappingWatcher,
    Node,
    allocations_of,
    check_exported,
)
from streamalloc.vmm.physical_memory import PhysicalMemory, import_memory
from streamalloc.vmm.stores.pinned import HostMemory, available_memory, host_segments


def covering(range: AddressRange, start: int, stop: int) -> list[tuple[GenericAllocation, int]]:
    """Return the memory that is mapped between two offsets of a range: tuples of the memory object and the offset of
    its mapping in the range in bytes, in the order of addresses. If a :class:`PhysicalMemory` was closed, the tuple has
    a new object with an open handle (:meth:`PhysicalMemory.at`).

    Raises
    ------
    ValueError
        The part has a hole, or the range was closed.
    CudaError
        The driver refused a new handle.
    """
    found = []
    for entry in range._covering(start, stop):
        memory = entry.as_object()
        if memory.closed and isinstance(memory, PhysicalMemory):
            # A closed object has no handle to export. The driver gives another by the mapping's address.
            memory = PhysicalMemory.at(range.address + entry.offset, driver=range.driver)
        found.append((memory, entry.offset))
    return found


def is_imported(memory: GenericAllocation) -> bool:
    """Return whether another process created the memory."""
    return memory._state.imported


def state_of(memory: GenericAllocation) -> AllocationState:
    """Return the state of ``memory``, after a check that it can be mapped or bound to a multicast object.

    Raises
    ------
    ClosedError
        The memory was closed.
    ValueError
        The memory is a tile pool.
    IncompleteTeamError
        ``memory`` is a multicast object to which not all devices were added.
    """
    memory._checked_raw()
    memory._check_mappable()
    return memory._state


def check_mappable(memory: PhysicalMemory) -> None:
    """Check the size of imported memory: map the memory at new addresses (``cuMemMap``), and unmap it again. The driver
    maps only whole allocations. Raises ValueError for a size that is no multiple of the granularity, CudaError for
    another wrong size.
    """
    granularity = memory._spec.granularity
    if memory.nbytes % granularity:
        raise ValueError(f"physical memory of {memory.nbytes} bytes, which are no multiple of {granularity}")
    with AddressRange(memory.nbytes, driver=memory.driver) as addresses:
        addresses.map(memory)


def watch_mappings(session: Session, watcher: MappingWatcher) -> None:
    """Notify ``watcher`` from now on of the mappings that this package makes and unmaps on a driver."""
    allocations = allocations_of(session)
    with allocations.lock:
        allocations.watchers += (watcher,)


def unwatch_mappings(session: Session, watcher: MappingWatcher) -> None:
    """Stop notifying ``watcher`` of mappings on a driver. No effect if it is not notified."""
    allocations = allocations_of(session)
    with allocations.lock:
        allocations.watchers = tuple(other for other in allocations.watchers if other is not watcher)


def is_counted(memory: MappedMemory) -> bool:
    """Return whether a watcher should count memory that was just mapped: this process created the memory, and has no
    other mapping of it. Return True for pages of an arena.
    """
    if not isinstance(memory, GenericAllocation):
        return True  # An arena notifies watchers of each page only once.
    state = memory._state
    return not (state.is_object or state.imported) and len(state.mappings) == 1


def map_side_by_side(range: AddressRange, memories: Sequence[GenericAllocation], rights: Rights) -> None:
    """Map ``memories`` side by side from the first address of an empty range on (``cuMemMap``), and set the permissions
    ``rights`` (``cuMemSetAccess``). If a call fails, nothing stays mapped. Raises ClosedError if the range or a memory
    was closed, ValueError if a memory does not fit into the range, CudaError.
    """
    range._map(memories, 0, rights)
