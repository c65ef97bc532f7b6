"""Bindings of memory to a multicast object: the checks, the driver call that binds, and the order of releases.

The unbind (``cuMulticastUnbind``) comes before the release of the multicast object and before the release of the
memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from streamalloc.core.errors import InvalidDeviceError, InvalidValueError, size_text
from streamalloc.core.internal import Buffer, Device, GraphBuffer, Memory, check_device, viewed
from streamalloc.core.properties import MemHandleType, MemLocationType, checked_number, checked_size
from streamalloc.core.session import Session, session_of
from streamalloc.driver.internal import cuda
from streamalloc.pool import MemoryPool
from streamalloc.vmm import AddressRange, PhysicalMemory, RangeView
from streamalloc.vmm.internal import AllocationHandle, AllocationState, HandleNode, covering, state_of


def check_multiple(name: str, value: int, step: int, *, shown: str = "", hint: str = "") -> None:
    """Raise ValueError if ``value`` is no multiple of ``step``, the granularity in bytes. ``name`` is the argument's
    name for the error. In the error, a nonempty ``shown`` replaces the value, and ``hint`` says what to do.
    """
    if value % step:
        raise ValueError(f"{name}={shown or value}: allowed are multiples of the granularity, {size_text(step)}{hint}")


class BindSource(NamedTuple):
    """A range of memory to bind to a multicast object."""

    given: object
    """The argument ``memory`` of ``bind``, for errors."""
    memory: PhysicalMemory | Memory
    """The memory that the binding keeps alive."""
    offset: int
    """Offset of the range in :attr:`memory`, in bytes."""
    nbytes: int
    """Size of the range in bytes."""
    address: int | None
    """Device address of the range; None if the range is bound by the handle of its physical memory."""
    state: AllocationState | None
    """State of the physical memory; None for memory of a pool."""

    @classmethod
    def of(cls, memory: object, memory_offset: int, nbytes: int | str | None, session: Session) -> BindSource:
        """Return the range that the arguments of :meth:`MulticastObject.bind` name. If ``memory`` is mapped, find its
        physical memory. ``session`` is the session of the multicast object.

        Raises
        ------
        TypeError
            ``memory`` is no :class:`PhysicalMemory` or :class:`Memory`, or a number has a wrong type.
        ValueError
            The memory belongs to another driver or a graph, spans several chunks, has a hole, is a multicast object or
            a tile pool, or is smaller than the range. Or the range is empty.
        ClosedError
            The memory was closed or freed.
        CudaError
            The driver refused a new handle for mapped memory whose handle is closed.
        """
        if not isinstance(memory, (PhysicalMemory, Memory)):
            raise TypeError(
                f"memory must be PhysicalMemory, mapped memory or a pool's buffer, "
                f"not {type(memory).__name__} ({memory!r})"
            )
        if session_of(memory) is not session:
            raise ValueError(f"memory={memory!r} belongs to another driver")
        start = checked_number("memory_offset", memory_offset)
        size = max(memory.nbytes - start, 0) if nbytes is None else checked_size("nbytes", nbytes)
        if start + size > memory.nbytes:
            raise ValueError(f"memory_offset={memory_offset}, nbytes={size}: the memory has {size_text(memory.nbytes)}")
        if not size:
            raise ValueError(f"nbytes=0: {size_text(memory.nbytes)} of memory have nothing to bind at offset {start}")
        if isinstance(memory, PhysicalMemory):
            return cls(memory, memory, start, size, None, state_of(memory))
        base, _ = viewed(memory)
        if isinstance(base, GraphBuffer):
            raise ValueError(f"memory={memory!r} belongs to a graph, which frees it: bind memory of a pool")
        if not isinstance(base, RangeView):
            # Mapped memory may be bound without access rights, which ``check_usable`` would require.
            memory.check_usable()
        address = memory.address + start
        if not isinstance(base.owner, AddressRange):
            return cls(memory, memory, start, size, address, None)
        # The binding keeps the physical memory alive, but not the address range: the addresses may be freed before the
        # unbind.
        begin = address - base.owner.address
        chunks = covering(base.owner, begin, begin + size)
        if len(chunks) > 1:
            raise ValueError(
                f"memory={memory!r} spans {len(chunks)} chunks of physical memory, and the driver binds one at a time: "
                "bind each of its mappings"
            )
        ((chunk, at),) = chunks
        if not isinstance(chunk, PhysicalMemory):
            raise ValueError(f"memory={memory!r} is a multicast object itself: bind memory of a device")
        return cls(memory, chunk, begin - at, size, address, state_of(chunk))

    def check(self, granularity: int, device: Device | None, *, shareable: bool) -> int:
        """Check that the driver's rules allow to bind the range, and return the ordinal of the device to bind for.

        Parameters
        ----------
        granularity
            The granularity of the multicast object in bytes.
        device
            The argument of :meth:`MulticastObject.bind`.
        shareable
            Whether the multicast object can be shared. The memory must then be shareable, too, as far as its properties
            are known.

        Raises
        ------
        TypeError
            ``device`` is not a :class:`Device`.
        ValueError
            The range is not aligned, or its memory cannot be shared, or is host memory of no NUMA node. Or ``device``
            is of another driver, is missing for host memory, or is not the device of device memory.
        """
        check_multiple("nbytes", self.nbytes, granularity)
        if self.address is None:
            check_multiple("memory_offset", self.offset, granularity)
        else:
            # `cuMulticastBindAddr` takes no offset in the memory, so the address itself must be aligned.
            check_multiple("address", self.address, granularity, shown=f"{self.address:#x}")
        if shareable and self._handle_types() == MemHandleType.NONE:
            raise ValueError(
                f"memory={self.given!r} cannot be shared, but the multicast object can: "
                "make the memory with handle_types"
            )
        if device is not None:
            check_device("device", device, session_of(self.memory))
        location = self.memory.location
        if location.type is MemLocationType.DEVICE:
            if device is not None and device.location != location:
                raise ValueError(f"device={device!r}: memory of {location} is bound for its own device only")
            return location.id
        if location.type is not MemLocationType.HOST_NUMA:
            raise ValueError(f"memory={self.given!r} is on {location}: allowed are DEVICE and HOST_NUMA")
        if device is None:
            raise ValueError(f"memory={self.given!r} is on {location}: device= must name a device of the team")
        return device.ordinal

    def _handle_types(self) -> MemHandleType | None:
        """Return the handle types that the memory was created with; None if its properties are not known."""
        if isinstance(self.memory, PhysicalMemory):
            return self.memory.properties.requested_handle_types
        base, _ = viewed(self.memory)
        pool = base.owner if isinstance(base, Buffer) else None
        properties = pool.properties if isinstance(pool, MemoryPool) else None
        return None if properties is None else properties.handle_types

    def bind_call(self, raw: Any, ordinal: int, offset: int, device: Device | None) -> tuple[str, tuple[Any, ...]]:
        """Return the name and the arguments of the driver call that binds the range at ``offset`` (bytes) of the
        multicast object with the handle ``raw``, for the device ``ordinal``.

        Host memory is bound for the ``device`` that the caller names. Only the functions with the suffix ``_v2`` take a
        device.
        """
        versioned = device is not None and self.memory.location.on_host
        target = (raw, ordinal, offset) if versioned else (raw, offset)
        suffix = "_v2" if versioned else ""
        if self.address is not None:
            return f"cuMulticastBindAddr{suffix}", (*target, self.address, self.nbytes, 0)
        assert isinstance(self.memory, PhysicalMemory)
        handle = cuda.CUmemGenericAllocationHandle(self.memory.handle)
        return f"cuMulticastBindMem{suffix}", (*target, handle, self.offset, self.nbytes, 0)


class BindingNode(HandleNode):
    """Node of the ownership tree (:mod:`streamalloc.vmm.ownership`) for a binding. :attr:`raw` is the multicast
    object's handle until the unbind.
    """

    def __init__(self, object: AllocationHandle, source: BindSource, device: int, offset: int) -> None:
        super().__init__(object.allocations)
        self.confirmed: bool = False
        """Whether the bind call returned success."""
        self.object: AllocationHandle = object
        self.device: int = device
        """Ordinal of the device that the memory is bound for."""
        self.offset: int = offset
        """Offset of the binding in the multicast object, in bytes."""
        self.source: BindSource = source

    @property
    def stop(self) -> int:
        """Offset of the end of the binding in the multicast object, in bytes."""
        return self.offset + self.source.nbytes

    def link(self) -> None:
        """Set the order of releases: this binding, the multicast object's mappings, the object, the memory, the
        addresses.
        """
        state = self.source.state
        self._raw = self.object.raw
        # The session's tables keep the object's node alive until the object is released. So this reference keeps the
        # garbage collector from dropping, and so releasing, the memory before the unbind.
        self.object.kept[self] = self.source.memory
        if state is not None:
            self.object.members[state] = state.objects[self.object] = state.bindings[self] = None
            for mapping in list(state.mappings):
                if mapping.given_up:
                    # Dropped, but mapped until queued work is done: its range also stays until the object has ended.
                    mapping.reservation.objects[self.object] = None

    def unlink(self) -> None:
        """Drop the reference that keeps the memory alive. Also remove the order between multicast object and memory,
        unless another binding of the object has the same memory.
        """
        state = self.source.state
        self.object.kept.pop(self, None)
        if state is not None and all(other.object is not self.object for other in list(state.bindings)):
            state.objects.pop(self.object, None)
            self.object.members.pop(state, None)

    def release(self) -> None:
        """Unbind the memory (``cuMulticastUnbind``). Raises CudaError. If the bind call was interrupted, a refusal is
        no error: it means that nothing is bound, or that the device is not in the team.
        """
        try:
            self.release_by("cuMulticastUnbind", self.device, self.offset, self.source.nbytes)
        except (InvalidValueError, InvalidDeviceError):
            if self.confirmed:
                raise
            self.was_refused()

    def was_refused(self) -> None:
        """Mark the binding as released without a driver call, because the driver refused the bind or the call was not
        made.
        """
        self._raw = None
        self.gone = True

    def forget(self) -> None:
        """Remove the binding from the state of its memory."""
        super().forget()
        if self.source.state is not None:
            self.source.state.bindings.pop(self, None)
