"""What the areas above take of virtual memory beside the public names."""

from __future__ import annotations

from typing import NamedTuple

from streamalloc.core.internal import Session, undoing
from streamalloc.vmm.access import Access, Rights, rights_of
from streamalloc.vmm.address_range import GRANULARITY, AddressRange, LoneMapping, mappings_text
from streamalloc.vmm.allocation_handles import (
    AllocationHandle,
    AllocationState,
    HandleNode,
    MappingWatcher,
    allocations_of,
)
from streamalloc.vmm.backup import Backup, BackupRange, copying
from streamalloc.vmm.generic_allocation import GenericAllocation
from streamalloc.vmm.physical_memory import PhysicalMemory, import_memory
from streamalloc.vmm.release_order import Kind, Node
from streamalloc.vmm.remappable import RemappableBuffer
from streamalloc.vmm.reservation import MappedBytes
from streamalloc.vmm.synchronization import After, wait

__all__ = [
    "GRANULARITY",
    "Access",
    "After",
    "AllocationHandle",
    "AllocationState",
    "Backup",
    "BackupRange",
    "GenericAllocation",
    "HandleNode",
    "Kind",
    "LoneMapping",
    "MappingWatcher",
    "Node",
    "RemappableBuffer",
    "Rights",
    "check_mappable",
    "copying",
    "covering",
    "import_memory",
    "is_counted",
    "is_imported",
    "map_alone",
    "mappings_text",
    "rights_of",
    "state_of",
    "unwatch_mappings",
    "wait",
    "watch_mappings",
]


def map_alone(memory: GenericAllocation, alignment: int, rights: Rights) -> tuple[AddressRange, MappedBytes]:
    """Map memory at addresses of its own, as a :class:`LoneMapping` has it."""
    range = AddressRange(-(-memory.nbytes // GRANULARITY) * GRANULARITY, alignment=alignment, driver=memory.driver)
    range._owned = True
    with undoing(range._free):
        return range, range._map(memory, 0, rights)


class Chunk(NamedTuple):
    """Memory that is mapped in a range."""

    memory: GenericAllocation
    offset: int


def covering(range: AddressRange, start: int, stop: int) -> list[Chunk]:
    """What is mapped between two offsets of a range, in the order of addresses; its memory can be exported.

    Raises
    ------
    ValueError
        The part has a hole.
    """
    found = []
    for entry in range._covering(start, stop):
        memory = entry.memory
        if memory.closed and isinstance(memory, PhysicalMemory):
            # The mapping is all that is left of it, and knows its handle.
            memory = PhysicalMemory.at(range.address + entry.offset, driver=range.driver)
        found.append(Chunk(memory, entry.offset))
    return found


def is_imported(memory: GenericAllocation) -> bool:
    """Whether another process has made it."""
    return memory._state.imported


def state_of(memory: GenericAllocation) -> AllocationState:
    """What is known of its driver handle, of memory that can be mapped and bound.

    Raises
    ------
    ClosedError
        It was closed.
    ValueError
        It only backs sparse arrays.
    """
    memory._checked_raw()
    memory._check_mappable()
    return memory._state


def check_mappable(memory: PhysicalMemory) -> None:
    """Raise where memory has another size than it says, by mapping it: the driver maps it as a whole only."""
    granularity = memory._spec.granularity
    if memory.nbytes % granularity:
        raise ValueError(f"physical memory of {memory.nbytes} bytes, which are no multiple of {granularity}")
    with AddressRange(memory.nbytes, driver=memory.driver) as addresses:
        addresses.map(memory)


def watch_mappings(session: Session, watcher: MappingWatcher) -> None:
    """Tell a watcher of all that is mapped on a driver from now on."""
    allocations_of(session).watchers += (watcher,)


def unwatch_mappings(session: Session, watcher: MappingWatcher) -> None:
    """Tell it no more."""
    allocations = allocations_of(session)
    while True:
        before = allocations.watchers
        after = tuple(other for other in before if other is not watcher)
        # Nothing is called between these two.
        if allocations.watchers is before:
            allocations.watchers = after
            return


def is_counted(memory: GenericAllocation) -> bool:
    """Whether memory that was just mapped is of this process, and mapped in no other place, so that it counts."""
    state = memory._state
    ours = memory._node.kind is Kind.MEMORY and not state.imported
    return ours and len(state.mappings) == 1
