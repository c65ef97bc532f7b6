"""What can be bound to a multicast object: which driver call binds it, and the rules for it."""

from __future__ import annotations

from typing import Any, NamedTuple

from streamalloc.core.arguments import check_device
from streamalloc.core.buffer import Buffer, GraphBuffer
from streamalloc.core.device import Device
from streamalloc.core.door import Door, door_behind
from streamalloc.core.errors import size_text
from streamalloc.core.memory import Memory, check_usable, viewed
from streamalloc.core.properties import MemHandleType, MemLocationType, checked_size
from streamalloc.driver.internal import cuda
from streamalloc.pool import MemoryPool
from streamalloc.vmm import AddressRange, PhysicalMemory, RangeView
from streamalloc.vmm.internal import AllocationState, covering, state_of

__all__ = ["Member", "check_member", "member_of"]


class Member(NamedTuple):
    """A part of some memory that is to be bound."""

    given: object
    """What was passed, for errors."""
    kept: PhysicalMemory | Memory
    """What is kept while it is bound."""
    offset: int
    """Where the part begins in that."""
    nbytes: int
    address: int | None
    """Where it is mapped; None where it is bound by its handle."""
    state: AllocationState | None
    """The handle behind it; None for pool memory."""

    @property
    def handle_types(self) -> MemHandleType | None:
        """What it can be shared as; None where that is not known."""
        if isinstance(self.kept, PhysicalMemory):
            return self.kept.properties.requested_handle_types
        base, _ = viewed(self.kept)
        pool = base.owner if isinstance(base, Buffer) else None
        properties = pool.properties if isinstance(pool, MemoryPool) else None
        return None if properties is None else properties.handle_types

    def call(self, raw: Any, ordinal: int, offset: int, *, versioned: bool) -> tuple[str, tuple[Any, ...]]:
        """The driver function that binds it, and its arguments; the version that names the device if ``versioned``."""
        where = (raw, ordinal, offset) if versioned else (raw, offset)
        if self.address is not None:
            name = "cuMulticastBindAddr_v2" if versioned else "cuMulticastBindAddr"
            return name, (*where, self.address, self.nbytes, 0)
        assert isinstance(self.kept, PhysicalMemory)
        name = "cuMulticastBindMem_v2" if versioned else "cuMulticastBindMem"
        return name, (*where, cuda.CUmemGenericAllocationHandle(self.kept.handle), self.offset, self.nbytes, 0)


def member_of(memory: object, memory_offset: int, nbytes: int | None, door: Door) -> Member:
    """The part of ``memory`` that the arguments of ``bind`` mean.

    Raises
    ------
    TypeError, ValueError
        It is nothing that can be bound, of another driver, in several chunks, or has no such part.
    """
    if not isinstance(memory, (PhysicalMemory, Memory)):
        raise TypeError(
            f"memory must be PhysicalMemory, mapped memory or a pool's buffer, not {type(memory).__name__} ({memory!r})"
        )
    if door_behind(memory) is not door:
        raise ValueError(f"memory={memory!r} belongs to another driver")
    start = checked_size("memory_offset", memory_offset)
    size = max(memory.nbytes - start, 0) if nbytes is None else checked_size("nbytes", nbytes)
    if start + size > memory.nbytes:
        raise ValueError(f"memory_offset={memory_offset}, nbytes={size}: the memory has {size_text(memory.nbytes)}")
    if not size:
        raise ValueError(f"nbytes=0: there is nothing to bind from {start} on in {size_text(memory.nbytes)} of memory")
    if isinstance(memory, PhysicalMemory):
        return Member(memory, memory, start, size, None, state_of(memory))
    base, _ = viewed(memory)
    if isinstance(base, GraphBuffer):
        raise ValueError(f"memory={memory!r} belongs to a graph, which frees it: bind memory of a pool")
    if not isinstance(base, RangeView):
        # What is mapped may be bound whether or not somebody has access.
        check_usable(memory)
    address = memory.address + start
    if not isinstance(base.owner, AddressRange):
        return Member(memory, memory, start, size, address, None)
    # What is kept is the physical memory, as addresses may be given back while it is bound.
    begin = address - base.owner.address
    chunks = covering(base.owner, begin, begin + size)
    if len(chunks) > 1:
        raise ValueError(
            f"memory={memory!r} lies in {len(chunks)} chunks of physical memory, and the driver binds one at a time: "
            "bind each of its mappings"
        )
    kept = chunks[0].memory
    if not isinstance(kept, PhysicalMemory):
        raise ValueError(f"memory={memory!r} is a multicast object itself: bind memory of a device")
    return Member(memory, kept, begin - chunks[0].offset, size, address, state_of(kept))


def check_member(member: Member, granularity: int, device: Device | None, *, shareable: bool) -> int:
    """The ordinal of the device that it is bound for, if it keeps the rules of binding."""
    given = member.given
    for name, value in (("memory_offset", member.offset), ("nbytes", member.nbytes), ("address", member.address)):
        # What is bound by its address may begin anywhere in its own memory.
        if value is not None and value % granularity and not (name == "memory_offset" and member.address is not None):
            shown = f"{value:#x}" if name == "address" else value
            raise ValueError(f"{name}={shown}: allowed are multiples of the granularity, {size_text(granularity)}")
    if shareable and member.handle_types == MemHandleType.NONE:
        why = "and only memory that can is bound to a multicast object that can: make it with handle_types"
        raise ValueError(f"memory={given!r} cannot be shared, {why}")
    if device is not None:
        check_device("device", device, door_behind(member.kept))
    location = member.kept.location
    if location.type is MemLocationType.DEVICE:
        if device is not None and device.location != location:
            raise ValueError(f"device={device!r}: memory of {location} is bound for its own device only")
        return location.id
    if location.type is not MemLocationType.HOST_NUMA:
        raise ValueError(f"memory={given!r} is on {location}: allowed are DEVICE and HOST_NUMA")
    if device is None:
        raise ValueError(f"memory={given!r} is on {location}: say by device= for which device of the team")
    if device.attribute("HOST_NUMA_ID") != location.id:
        nearest = device.attribute("HOST_NUMA_ID")
        raise ValueError(
            f"device={device!r}: memory of {location} is bound for devices nearest to it, not to {nearest}"
        )
    return device.ordinal
