"""Buffers of virtual memory that grow in place, are striped over devices, or consist of named chunks.

A buffer has three sizes. ``_nbytes`` is the size that the program asked for. ``_mapped`` bytes from the start of the
range count as mapped: whole chunks, and after ``resize(..., release=False)`` more of them than the size needs. The
mappings themselves are ``range._node.table()``. They end at ``_mapped``, unless a failed call has left memory mapped
behind it. An evicted buffer has no mappings.

A growth (:meth:`GrowableBuffer.resize`, ``grow``) claims the buffer, so that no other call changes it. If the new size
is within ``_mapped``, only ``_nbytes`` changes. Otherwise ``Evictable.create_chunks`` does these steps:

1. *Leftovers.* ``Evictable.release_from`` releases memory behind the end, and ``Allocations.work`` what was dropped.
2. *Watchers* learn which addresses will be mapped.
3. *Create and map* each chunk, one after the other: ``MappedBytes.map`` (``cuMemCreate``, ``cuMemMap``).
4. *Permissions* of all new chunks: ``Reservation.grant`` (one ``cuMemSetAccess``).

If step 3 or 4 fails, ``Reservation.map`` releases the new chunks, and the buffer has its old size.

A shrink (``resize``, or ``close`` for all chunks) claims the buffer, too, and does these steps:

1. *Choose* the chunks after the new size. The driver unmaps only whole chunks. If there are none, or ``release`` is
   False, only ``_nbytes`` changes.
2. *Wait* for the users of these chunks: ``wait_for_users``. By default the host waits for all work of each device with
   access (``await_device``, with driver calls for each known stream); with ``after``, only for its events and streams.
3. *Sizes.* ``Evictable.shrink_to`` releases memory behind the end, and sets ``_mapped`` and ``_nbytes``. If step 4
   fails, it sets the old sizes again.
4. *Unmap*: ``Evictable.release_from``, ``Reservation.unmap`` (one ``cuMemUnmap``).
5. *Release* each chunk: ``MappedBytes.release_handle`` (``cuMemRelease``). If the driver refuses, the chunk's finaliser
   tries again later.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence

from streamalloc.core.errors import PeerAccessError, refused, size_text, undoing
from streamalloc.core.internal import Device, StreamLike, check_device, check_location
from streamalloc.core.properties import MemAccess, MemHandleType, MemLocation, checked_size, checked_type
from streamalloc.core.resource import close_all
from streamalloc.core.session import session_of
from streamalloc.vmm.access import Access, After, Rights, ends_of, wait_for_users
from streamalloc.vmm.claims import claimed
from streamalloc.vmm.evictable import ChunkSpec
from streamalloc.vmm.ownership import GenericAllocation
from streamalloc.vmm.physical_memory import device_first, properties_for, spec_of
from streamalloc.vmm.properties import MemAllocationProp
from streamalloc.vmm.virtual_buffer import VirtualBuffer, device_rights


class GrowableBuffer(VirtualBuffer):
    """Memory that grows and shrinks in place: its address does not change, and no bytes are copied.

    The buffer reserves addresses for ``capacity`` bytes, which needs no memory. Each growth creates physical memory,
    maps it at the end of the buffer and sets the same permissions. The time of a growth does not depend on the buffer's
    size. ::

        with vmm.GrowableBuffer(device, capacity=1 << 40, nbytes=1 << 30) as buffer:
            buffer.grow(1 << 30)           # 2 GiB at the same address
            buffer.resize(1 << 20)         # releases the second GiB: whole chunks only
            buffer.resize(0, release=False)  # keeps its memory for the next growth

    Parameters
    ----------
    device
        Device of the memory. The device has read and write access.
    capacity
        Largest size of the buffer in bytes, rounded up to the granularity. Only addresses are reserved for it.
    nbytes
        Initial size in bytes.
    access
        Permissions of other devices, also for memory added later: one or several devices, or a ``dict`` with a
        :class:`MemAccess` for each.
    location
        Location of the memory if it is not on ``device``. ``MemLocation.host_numa(0)`` gives host memory, to which the
        host also has read and write access.
    chunk
        Largest chunk of physical memory in bytes; 0 makes each growth one chunk. A shrink releases only whole chunks:
        smaller chunks release more memory, larger chunks need fewer driver calls.
    handle_types, compressible, gpu_direct_rdma
        As for :class:`PhysicalMemory`.
    stream
        Stream of operations that name no stream; default: the device's default stream.

    Raises
    ------
    AddressSpaceError
        The process has no addresses left for ``capacity``.
    OutOfMemoryError
        There is not enough memory for ``nbytes``.
    TypeError, ValueError
        ``capacity`` is 0 or less than ``nbytes``. Or another argument is not as above; the message names it.
    ClosedError
        ``stream`` was closed.
    NotSupportedError, NotPermittedError, InvalidValueError
        As for :class:`PhysicalMemory`.
    """

    def __init__(
        self,
        device: Device,
        capacity: int | str,
        nbytes: int | str = 0,
        *,
        access: Access = None,
        location: MemLocation | None = None,
        chunk: int | str = 0,
        handle_types: MemHandleType = MemHandleType.NONE,
        compressible: bool = False,
        gpu_direct_rdma: bool = False,
        stream: StreamLike | None = None,
    ) -> None:
        check_device("device", device)
        session = session_of(device)
        if location is not None:
            checked_type("location", location, MemLocation)
            check_location(session, location)
        place = device.location if location is None else location
        prop = properties_for(place, handle_types, compressible, gpu_direct_rdma)
        self._spec = spec_of(session, prop)
        self.properties: MemAllocationProp = prop
        """Properties of the buffer's physical memory."""
        most = checked_size("capacity", capacity)
        if not most:
            raise ValueError("capacity=0: a buffer needs at least one byte of addresses")
        self._chunk = self._spec.round_up(checked_size("chunk", chunk))
        size = checked_size("nbytes", nbytes)
        self._check_fits(size, most)
        rights = device_rights(access, session, location=place, devices=(device,))
        if place.on_host:
            rights = {MemLocation.host(): MemAccess.READWRITE} | rights
        self._open(device, self._spec.round_up(most), rights, stream, place)
        with undoing(self.close):
            self._resize(size)

    @claimed
    def resize(self, nbytes: int | str, *, after: After = None, release: bool = True) -> None:
        """Grow or shrink to ``nbytes`` in place. Remaining bytes keep their values; new bytes are undefined.

        New memory can be used at once on any stream (``cuMemCreate``, ``cuMemMap``, ``cuMemSetAccess``). A shrink
        unmaps memory, which is not stream-ordered (``cuMemUnmap``, ``cuMemRelease``).

        Parameters
        ----------
        nbytes
            New size in bytes, at most :attr:`capacity`.
        after
            Events or streams that the host waits for before memory is unmapped; ``()`` for none. By default all work of
            the devices with access.
        release
            Whether a shrink releases the unused memory. If False, the memory stays mapped after the buffer's end, and a
            later growth into this memory makes no driver call. ``resize(buffer.nbytes)`` releases this memory later.

        Raises
        ------
        OutOfMemoryError
            There is not enough memory. The buffer is unchanged.
        ClosedError
            The buffer, or an event or stream of ``after``, was closed.
        EvictedError
            The buffer is evicted: :meth:`restore` it first.
        InUseError
            The buffer is frozen, or a signal handler or a hook called this method during another call.
        CaptureError
            A stream of ``after`` is being captured.
        TypeError, ValueError
            ``nbytes`` is not a size, or is more than the capacity. Or ``after`` has something else than events and
            streams of the driver.
        CudaError
            The driver refused a call.
        """
        self._resize(checked_size("nbytes", nbytes), after, release)

    @claimed
    def grow(self, nbytes: int | str) -> None:
        """Grow by ``nbytes`` bytes. Unlike with ``resize(buffer.nbytes + nbytes)``, no other thread can resize the
        buffer in between. Errors as for :meth:`resize`.
        """
        self._resize(self._nbytes + checked_size("nbytes", nbytes), release=False)

    def _resize(self, size: int, after: After = None, release: bool = True) -> None:
        self._check_fits(size, self.capacity)
        self.check_usable()
        self.check_thawed()
        needed = self._spec.round_up(size)
        spare = []
        if release and size <= self._nbytes:
            # The driver unmaps only whole chunks.
            spare = [entry for entry in self.range._node.touching(needed, self._mapped) if entry.offset >= needed]
        if spare:
            wait_for_users(after, self._session, (entry.rights for entry in spare))
            self.shrink_to(spare[0].offset, size)
        elif after is not None:
            list(ends_of(after, self._session))  # Checks the argument; nothing waits.
        if needed > self._mapped:
            most = self._chunk or needed - self._mapped
            starts = range(self._mapped, needed, most)
            self.create_chunks([ChunkSpec(at, min(most, needed - at), self._spec) for at in starts])
            self._mapped = needed
        self._nbytes = size

    @staticmethod
    def _check_fits(size: int, most: int) -> None:
        if size > most:
            raise ValueError(f"nbytes={size}: the capacity is {size_text(most)}")


class StripedBuffer(VirtualBuffer):
    """One buffer with adjacent memory of several devices: the result of :func:`stripe`."""

    devices: tuple[Device, ...]
    """Devices of the memory, in the order of addresses."""
    stripe_bytes: int
    """Bytes of memory on each device, a multiple of the granularity. The sum over the devices may be more than
    :attr:`nbytes`.
    """


def stripe(
    devices: Sequence[Device],
    nbytes: int | str,
    *,
    access: Access = None,
    handle_types: MemHandleType = MemHandleType.NONE,
    compressible: bool = False,
    stream: StreamLike | None = None,
) -> StripedBuffer:
    """Make one contiguous buffer with equal shares on several devices. Every device has access to the whole buffer.

    Parameters
    ----------
    devices
        Devices of the memory, in the order of addresses. Each device must be able to access the memory of all other
        devices.
    nbytes
        Size in bytes. Each device has the same share, rounded up to the granularity, so the last share may be larger
        than needed. The order ``stripe(nbytes, devices)`` is deprecated.
    access
        Permissions of other devices, as for :class:`GrowableBuffer`.
    handle_types, compressible
        As for :class:`PhysicalMemory`.
    stream
        Stream of operations that name none; default: the first device's default stream.

    Raises
    ------
    PeerAccessError
        One of the devices cannot access the memory of another.
    OutOfMemoryError, AddressSpaceError
        A device has too little memory, or the process has no addresses left. All memory and addresses are released.
    TypeError, ValueError
        ``devices`` is empty, names a device twice or has something else than devices. Or ``nbytes`` is 0 or not a size,
        or ``access``, ``handle_types`` or ``stream`` is not as above.
    ClosedError, NotSupportedError, NotPermittedError
        As for :class:`GrowableBuffer`.

    Examples
    --------
    >>> with vmm.stripe([Device(0), Device(1)], 1 << 30) as buffer:
    ...     buffer.fill(0, stream)  # 512 MiB on each device
    """
    devices, nbytes = device_first("stripe", devices, nbytes)
    devices = tuple(checked_type("devices", devices, Iterable))  # type: ignore[type-abstract]
    if not devices or not all(isinstance(device, Device) for device in devices):
        raise TypeError(f"devices must be one or more Devices, not {devices!r}")
    first, session = devices[0], session_of(devices[0])
    if len(set(devices)) < len(devices):
        raise ValueError(f"devices={devices!r}: a device is named twice")
    size = checked_size("nbytes", nbytes)
    if not size:
        raise ValueError("nbytes=0: a striped buffer has at least one byte")
    for one, other in itertools.product(devices, repeat=2):
        if not one.can_access(other):
            raise refused(PeerAccessError, "cuMemSetAccess", f"{one!r} cannot reach the memory of {other!r}")
    specs = [spec_of(session, properties_for(device, handle_types, compressible, False)) for device in devices]
    step = max(spec.round_up(-(-size // len(devices))) for spec in specs)
    rights = device_rights(access, session, devices=devices)
    buffer = StripedBuffer.__new__(StripedBuffer)
    buffer.devices = devices
    buffer.stripe_bytes = step
    buffer._open(first, step * len(devices), rights, stream, first.location)
    with undoing(buffer.close):
        buffer.create_chunks([ChunkSpec(index * step, step, spec) for index, spec in enumerate(specs)])
    buffer._mapped = step * len(devices)
    buffer._nbytes = size
    return buffer


class RemappableBuffer(VirtualBuffer):
    """Memory at a constant address that consists of named chunks, which :meth:`set_chunks` replaces. ``offset`` is the
    number of bytes from the start of the first chunk to the buffer's first byte.
    """

    def __init__(self, device: Device, capacity: int, rights: Rights, stream: StreamLike | None, offset: int) -> None:
        self._offset = offset
        self._names: tuple[Hashable, ...] = ()
        """Names of the mapped chunks, in the order of addresses."""
        self._open(device, capacity, rights, stream, device.location)

    @property
    def address(self) -> int:
        """Address of the buffer's first byte, which is after the start of the first chunk by ``offset`` bytes. Raises
        ClosedError if the buffer was closed.
        """
        return self.range.address + self._offset

    @claimed
    def set_chunks(self, names: Sequence[Hashable], make: Callable[[int], GenericAllocation], nbytes: int) -> None:
        """Map the chunks with these names side by side, and unmap all other chunks. If the call raises, the buffer is
        unchanged.

        Leading chunks with unchanged names stay mapped. Before a chunk is unmapped, the host waits for all work of the
        devices with access, so the caller must hold no lock that another thread needs.

        Parameters
        ----------
        names
            Names of the chunks, in the order of addresses.
        make
            Function that returns the memory of a new chunk; its argument is the chunk's index in ``names``. The buffer
            owns the memory and closes it.
        nbytes
            New size of the buffer in bytes.

        Raises
        ------
        ValueError
            A chunk would begin at an offset that is no multiple of the granularity of its memory, or the chunks exceed
            the capacity.
        ClosedError
            The buffer was closed.
        CudaError
            The driver refused to map or to unmap memory. Errors of ``make`` propagate, too.
        InUseError
            A signal handler or a hook called this method during another call.
        """
        self._check_open()
        wanted = tuple(names)
        made: list[GenericAllocation] = []
        with undoing(lambda: close_all(made)):
            pairs = zip(self._names, wanted, strict=False)
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            for index in range(same, len(wanted)):
                made.append(make(index))
            entries = list(self.range._node.table())
            staying, going = entries[:same], entries[same:]
            if going:
                wait_for_users(None, self._session, (entry.rights for entry in going))
            before = self._names, self._mapped, self._nbytes
            end = staying[-1].stop if staying else 0
            self._names, self._mapped, self._nbytes = wanted[:same], end, min(nbytes, max(end - self._offset, 0))

            def undo() -> None:
                self.range._node.unmap(self.range._node.touching(end, self.range.nbytes))
                self.range._map([entry.as_object() for entry in going], end, self._rights)
                self._names, self._mapped, self._nbytes = before

            with undoing(undo):
                self.range._node.unmap(going)
                entries = self.range._map(made, end, self._rights)
                self._mapped = entries[-1].stop if entries else end
                self._names, self._nbytes = wanted, nbytes
                made.clear()  # The buffer owns the chunks now, so an error below must not close them.
            for entry in going:
                entry.release_handle()
