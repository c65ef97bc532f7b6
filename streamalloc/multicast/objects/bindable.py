"""What can be bound to a multicast object: which driver call binds it, and the rules for it."""

from __future__ import annotations

from typing import Any, NamedTuple

from streamalloc.core.buffer import Buffer, GraphBuffer
from streamalloc.core.device import Device
from streamalloc.core.door import Door
from streamalloc.core.errors import size_text
from streamalloc.core.memory import BufferView, Memory
from streamalloc.core.properties import MemHandleType, MemLocation, MemLocationType, checked_size
from streamalloc.driver.internal import cuda
from streamalloc.pool import MemoryPool
from streamalloc.vmm import AddressRange, PhysicalMemory, RangeView
from streamalloc.vmm.internal import AllocationState, check_not_tile_pool, covering, state_of

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
    location: MemLocation
    handle_types: MemHandleType | None
    """What it can be shared as; None where that is not known."""
    state: AllocationState | None
    """The handle behind it; None for pool memory."""
    door: Door

    @property
    def on_host(self) -> bool:
        """Whether it is host memory."""
        return self.location.on_host

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
    if memory._door is not door:
        raise ValueError(f"memory={memory!r} belongs to another driver")
    start = checked_size("memory_offset", memory_offset)
    size = max(memory.nbytes - start, 0) if nbytes is None else checked_size("nbytes", nbytes)
    if start + size > memory.nbytes:
        raise ValueError(f"memory_offset={memory_offset}, nbytes={size}: the memory has {size_text(memory.nbytes)}")
    if not size:
        raise ValueError(f"nbytes=0: there is nothing to bind from {start} on in {size_text(memory.nbytes)} of memory")
    if isinstance(memory, PhysicalMemory):
        return _of_handle(memory, memory, start, size, None, door)
    base: Memory = memory
    while isinstance(base, BufferView):
        base = base._parent
    if isinstance(base, GraphBuffer):
        raise ValueError(f"memory={memory!r} belongs to a graph, which frees it: bind memory of a pool")
    if not isinstance(base, RangeView):
        # What is mapped may be bound whether or not somebody has access.
        memory._check_usable()
    address = memory.address + start
    if isinstance(base.owner, AddressRange):
        return _of_range(memory, base.owner, address, size, door)
    known = _pool_handle_types(base)
    return Member(memory, memory, start, size, address, memory.location, known, None, door)


def _of_handle(given: object, memory: PhysicalMemory, start: int, size: int, address: int | None, door: Door) -> Member:
    types = memory.properties.requested_handle_types
    return Member(given, memory, start, size, address, memory.location, types, state_of(memory), door)


def _of_range(given: Memory, range: AddressRange, address: int, size: int, door: Door) -> Member:
    """Mapped memory: what is kept is the physical memory, as addresses may be given back while it is bound."""
    start = address - range.address
    chunks = covering(range, start, start + size)
    if len(chunks) > 1:
        raise ValueError(
            f"memory={given!r} lies in {len(chunks)} chunks of physical memory, and the driver binds one at a time: "
            "bind each of its mappings"
        )
    memory = chunks[0].memory
    if not isinstance(memory, PhysicalMemory):
        raise ValueError(f"memory={given!r} is a multicast object itself: bind memory of a device")
    return _of_handle(given, memory, start - chunks[0].offset, size, address, door)


def _pool_handle_types(base: Memory) -> MemHandleType | None:
    owner = base.owner if isinstance(base, Buffer) else None
    properties = owner.properties if isinstance(owner, MemoryPool) else None
    return None if properties is None else properties.handle_types


def check_member(member: Member, granularity: int, device: Device | None, *, shareable: bool) -> int:
    """The ordinal of the device that it is bound for, if it keeps the rules of binding."""
    given = member.given
    for name, value in (("memory_offset", member.offset), ("nbytes", member.nbytes), ("address", member.address)):
        # What is bound by its address may begin anywhere in its own memory.
        if value is not None and value % granularity and not (name == "memory_offset" and member.address is not None):
            shown = f"{value:#x}" if name == "address" else value
            raise ValueError(f"{name}={shown}: allowed are multiples of the granularity, {size_text(granularity)}")
    if isinstance(member.kept, PhysicalMemory):
        check_not_tile_pool(member.kept)
    if shareable and member.handle_types == MemHandleType.NONE:
        raise ValueError(
            f"memory={given!r} cannot be shared, and only memory that can is bound to a multicast object that can: "
            "make it with handle_types"
        )
    if device is not None and not isinstance(device, Device):
        raise TypeError(f"device must be a Device, not {type(device).__name__} ({device!r})")
    if device is not None and device._door is not member.door:
        raise ValueError(f"device={device!r} belongs to another driver")
    location = member.location
    if location.type is MemLocationType.DEVICE:
        if device is not None and device.location != location:
            raise ValueError(f"device={device!r}: memory of {location} is bound for its own device only")
        return location.id
    if location.type is not MemLocationType.HOST_NUMA:
        raise ValueError(f"memory={given!r} is on {location}: allowed are DEVICE and HOST_NUMA")
    if device is None:
        raise ValueError(f"memory={given!r} is on {location}: say by device= for which device of the team")
    if device.attribute("HOST_NUMA_ID") != location.id:
        raise ValueError(
            f"device={device!r}: memory of {location} is bound for devices that are nearest to this NUMA node, and its "
            f"own is {device.attribute('HOST_NUMA_ID')}"
        )
    return device.ordinal
