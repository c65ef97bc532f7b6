"""Buffers that grow and shrink without moving, and buffers striped over several devices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import starmap
from typing import Any

from streamalloc.core.internal import (
    Device,
    MemAllocationProp,
    MemHandleType,
    PeerAccessError,
    StreamLike,
    check_device,
    checked_size,
    error_from,
    refused,
    session_of,
    size_text,
    undoing,
)
from streamalloc.vmm.access import Access
from streamalloc.vmm.physical_memory import properties_for
from streamalloc.vmm.recycler import MemoryRecycler, RecyclingSpec, spec_for
from streamalloc.vmm.reservation import MappedBytes
from streamalloc.vmm.virtual_buffer import ChunkSpec, VirtualBuffer, device_rights
from streamalloc.vmm.waiting import After, wait_for_users

__all__ = ["GrowableBuffer", "StripedBuffer", "stripe"]


class GrowableBuffer(VirtualBuffer):
    """Device memory that grows and shrinks in place: its address never changes, and nothing is copied.

    Addresses for ``capacity`` bytes are reserved at once, which costs no memory. Each growth creates physical memory,
    maps it behind what is there, and gives the same devices access; it takes as long at the end as at the beginning.

    Parameters
    ----------
    device
        Whose memory it is. The device gets access.
    capacity
        The most bytes that it can have; rounded up to the granularity, as it is only addresses.
    nbytes
        The size to begin with, in bytes.
    access
        Other devices that get access, kept when the buffer grows and when it is restored: a device, several, or a
        ``dict`` that says :class:`MemAccess` of each.
    chunk
        The most bytes of one chunk of physical memory; 0 makes each growth one chunk. Shrinking gives whole chunks
        back, so that smaller ones give back more, and larger ones cost less.
    handle_types, compressible, gpu_direct_rdma
        As for :class:`PhysicalMemory`.
    alignment, address
        As for :class:`AddressRange`.
    stream
        The stream that orders operations which name no other; default: the device's default stream.
    recycler
        Where its physical memory comes from and returns to, of the same device; its properties are the buffer's, and
        none are given beside it. What the buffer shrinks by stays mapped, behind its end, until somebody else takes it
        or the recycler gives it back, so that growing again needs no driver call. The bytes of recycled memory are
        those of whoever had it before.

    Raises
    ------
    AddressSpaceError
        There are no addresses left for ``capacity``.
    OutOfMemoryError
        There is no memory for ``nbytes``.
    TypeError, ValueError
        An argument breaks a rule; the message names it.
    """

    __slots__ = ("_chunk", "_recycler", "_spec")

    def __init__(
        self,
        device: Device,
        capacity: int,
        nbytes: int = 0,
        *,
        access: Access = None,
        chunk: int = 0,
        handle_types: MemHandleType = MemHandleType.NONE,
        compressible: bool = False,
        gpu_direct_rdma: bool = False,
        alignment: int = 0,
        address: int = 0,
        stream: StreamLike | None = None,
        recycler: MemoryRecycler | None = None,
    ) -> None:
        check_device("device", device)
        prop = properties_for(device, handle_types, compressible, gpu_direct_rdma)
        self._spec = spec_for(
            recycler, session_of(device), prop, asked=bool(handle_types or compressible or gpu_direct_rdma)
        )
        self._recycler = self._spec if isinstance(self._spec, RecyclingSpec) else None
        most = checked_size("capacity", capacity)
        if not most:
            raise ValueError("capacity=0: a buffer needs at least one byte of addresses")
        self._chunk = self._spec.round_up(checked_size("chunk", chunk))
        size = self._checked("nbytes", nbytes, most)
        rights = device_rights(access, session_of(device), devices=(device,))
        self._open(device, self._spec.round_up(most), alignment, address, rights, stream)
        if self._recycler is None:
            self.range._node.maker = self._spec
        with undoing(self.close):
            self.resize(size)

    @property
    def properties(self) -> MemAllocationProp:
        """What its physical memory is made with."""
        return self._spec.prop

    def resize(self, nbytes: int, *, after: After = None) -> None:
        """Grow or shrink to ``nbytes``, in place. The bytes that stay keep their values; new ones are undefined.

        Growing needs no order: new memory can be used at once. Shrinking unmaps, which is not in stream order.

        Parameters
        ----------
        nbytes
            The new size in bytes, at most :attr:`capacity`.
        after
            What must have passed before memory is unmapped: events, streams, ``()`` for nothing; by default all work of
            the devices that have access.

        Raises
        ------
        OutOfMemoryError
            There is not enough memory. The buffer is as it was, with its access.
        EvictedError
            Restore it first.
        ValueError
            ``nbytes`` is more than the capacity.
        """
        plain, at = self._plain, self._mapped
        if plain is not None and type(nbytes) is int and nbytes > at:
            session, allocations, handed, node, entries, base, capacity, most, pad, struct, rights, structs, count = (
                plain
            )
            stop = nbytes + -nbytes % pad
            step = stop - at
            if stop <= capacity and step <= most and not (handed or allocations.watchers):
                chunk = MappedBytes(node, at, stop, rights)
                try:
                    entries.append(chunk)
                    answers: list[Any] = []
                    calls = starmap(session.cuMemCreate, ((step, struct, 0),))
                    # The call is made by an operator: Python looks for no signals until the handle is kept.
                    answers += calls
                    result, raw = answers[0]
                    if not result:
                        chunk._raw = raw
                        place = base + at
                        result = session.cuMemMap(place, step, 0, raw, 0)[0]
                        if result:
                            raise error_from(result, "cuMemMap")
                        result = session.cuMemSetAccess(place, step, structs, count)[0]
                        if result:
                            raise error_from(result, "cuMemSetAccess")
                        self._mapped = stop
                        self._nbytes = nbytes
                        return
                    self._spec.refused(result, step)
                    chunk.unmapped()
                except BaseException as first:
                    self._plain = None
                    chunk.undo(first)
                    raise
        self._resize_slowly(nbytes, after)

    def _resize_slowly(self, nbytes: int, after: After) -> None:
        self._plain = None
        node, size = self.range._node, nbytes
        if type(nbytes) is not int or not 0 <= nbytes <= node.nbytes:
            size = self._checked("nbytes", nbytes, node.nbytes)
        if self._evicted is not None or node._raw is None or node.given_up:
            self._check_usable()
        needed = self._spec.round_up(size)
        if self._recycler is not None and needed > self._mapped:
            self._have_back(needed, self._recycler)
        if needed > self._mapped:
            places = range(self._mapped, needed, self._chunk or needed - self._mapped)
            ends = [*places[1:], needed]
            self._put([ChunkSpec(at, end - at, self._spec) for at, end in zip(places, ends, strict=False)])
            self._mapped = needed
        elif needed < self._mapped:
            self._shrink(needed, size, after)
        self._nbytes = size
        if self._recycler is None and self._structs:
            self._plain = self._what_growing_needs()

    def _what_growing_needs(self) -> tuple[Any, ...] | None:
        """What the fast path takes, found beforehand; None where an earlier call has left something mapped."""
        spec, node = self._spec, self.range._node
        allocations, entries = node.allocations, node.table()
        if entries and entries[-1].stop != self._mapped:
            return None
        return (
            spec.session,
            allocations,
            allocations.deferred.submitted,
            node,
            entries,
            int(node._raw),
            self.range.nbytes,
            self._chunk or self.range.nbytes,
            spec.granularity,
            spec.struct,
            self._rights,
            self._structs,
            len(self._structs),
        )

    def grow(self, nbytes: int) -> None:
        """Grow by ``nbytes``: ``resize(self.nbytes + nbytes)``."""
        if type(nbytes) is not int or nbytes < 0:
            nbytes = checked_size("nbytes", nbytes)
        self.resize(self._nbytes + nbytes)

    def _shrink(self, needed: int, size: int, after: After) -> None:
        # A chunk of which something stays cannot be cut.
        spare = [entry for entry in self.range._node.touching(needed, self._mapped) if entry.offset >= needed]
        if not spare:
            return
        wait_for_users(after, self._session, (entry.rights for entry in spare))
        if self._recycler is not None:
            before = self._mapped, self._nbytes
            # First, as others may unmap it as soon as it is offered.
            self._mapped, self._nbytes = spare[0].offset, size
            if self._recycler.offer(spare):
                return
            self._mapped, self._nbytes = before
        self._cut(spare[0].offset, size)

    def _have_back(self, needed: int, recycler: RecyclingSpec) -> None:
        """Take back what was offered when the buffer shrank, and lies where it is to grow."""
        for entry in self.range._node.touching(self._mapped, needed):
            if entry.offset != self._mapped or entry.stop > needed or not recycler.claim(entry.memory._node):
                return
            self._mapped = entry.stop
            recycler.recycled += 1

    def _reclaim(self, entries: Sequence[MappedBytes]) -> Sequence[MappedBytes]:
        if self._recycler is None:
            return entries
        for entry in entries:
            self._recycler.claim(entry.memory._node)
        return [entry for entry in entries if entry.live]

    def _checked(self, name: str, value: int, most: int) -> int:
        size = checked_size(name, value)
        if size > most:
            raise ValueError(f"{name}={size}: the capacity is {size_text(most)}")
        return size


class StripedBuffer(VirtualBuffer):
    """One buffer with memory of several devices side by side: made by :func:`stripe`."""

    __slots__ = ("devices", "stripe_bytes")

    devices: tuple[Device, ...]
    """The devices that have the memory, in the order of addresses."""
    stripe_bytes: int
    """How many bytes each of them has."""


def stripe(
    nbytes: int,
    devices: Sequence[Device],
    *,
    access: Access = None,
    handle_types: MemHandleType = MemHandleType.NONE,
    compressible: bool = False,
    alignment: int = 0,
    address: int = 0,
    stream: StreamLike | None = None,
    recyclers: Sequence[MemoryRecycler] | None = None,
) -> StripedBuffer:
    """One contiguous buffer, an equal part of it on each of several devices, accessible from all of them.

    Parameters
    ----------
    nbytes
        Size in bytes. Each device gives the same amount, rounded up to the granularity, so that the last part may have
        room to spare.
    devices
        Whose memory it is, in the order of addresses; they must reach each other's memory.
    access
        Further devices that get access.
    handle_types, compressible
        As for :class:`PhysicalMemory`.
    alignment, address
        As for :class:`AddressRange`.
    stream
        The stream that orders operations which name no other; default: the first device's default stream.
    recyclers
        Where the physical memory comes from and returns to, one for each device; as for :class:`GrowableBuffer`.

    Raises
    ------
    PeerAccessError
        A device cannot reach another's memory.
    OutOfMemoryError, AddressSpaceError
        A device has no memory, or the process no addresses left. Nothing is left behind.
    """
    devices = tuple(devices)
    if not devices or not all(isinstance(device, Device) for device in devices):
        raise TypeError(f"devices must be one or more Devices, not {devices!r}")
    first = devices[0]
    if len(set(devices)) < len(devices):
        raise ValueError(f"devices={devices!r}: a device is named twice")
    size = checked_size("nbytes", nbytes)
    if not size:
        raise ValueError("nbytes=0: a striped buffer has at least one byte")
    _check_peers(devices)
    given: Sequence[MemoryRecycler | None] = [None] * len(devices) if recyclers is None else recyclers
    if len(given) != len(devices):
        raise ValueError(f"recyclers={recyclers!r}: there must be one for each of {len(devices)} devices")
    specs = [
        spec_for(
            recycler,
            first._session,
            properties_for(device, handle_types, compressible, False),
            asked=bool(handle_types or compressible),
        )
        for device, recycler in zip(devices, given, strict=True)
    ]
    step = max(spec.round_up(-(-size // len(devices))) for spec in specs)
    rights = device_rights(access, first._session, devices=devices)
    buffer = StripedBuffer.__new__(StripedBuffer)
    buffer.devices = devices
    buffer.stripe_bytes = step
    buffer._open(first, step * len(devices), alignment, address, rights, stream)
    with undoing(buffer.close):
        buffer._put([ChunkSpec(place * step, step, spec) for place, spec in enumerate(specs)])
    buffer._mapped = step * len(devices)
    buffer._nbytes = size
    return buffer


def _check_peers(devices: Sequence[Device]) -> None:
    for one in devices:
        for other in devices:
            if not one.can_access(other):
                raise refused(PeerAccessError, "cuMemSetAccess", f"{one!r} cannot reach the memory of {other!r}")
