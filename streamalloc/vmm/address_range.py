"""Address ranges and their mappings (``cuMemAddressReserve``, ``cuMemMap``, ``cuMemSetAccess``).

A range owns its mappings: only the range unmaps memory and frees the addresses. A :class:`Mapping` refers to one
mapping and keeps the range alive, so these objects may be dropped in any order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from streamalloc.core.errors import AddressSpaceError, ClosedError, OutOfMemoryError, size_text, undoing
from streamalloc.core.internal import (
    BufferView,
    Device,
    Memory,
    Stream,
    StreamLike,
    as_stream,
    known_location,
    session_for,
)
from streamalloc.core.properties import MemAccess, MemLocation, MemLocationType, checked_number, checked_size
from streamalloc.core.resource import Closes
from streamalloc.core.session import PerDriver, Session, session_of
from streamalloc.driver import Driver
from streamalloc.driver.internal import address_space_limit
from streamalloc.formats.html import Drawn, Html, Row, mib, place, strip, table
from streamalloc.formats.sizes import counted
from streamalloc.vmm.access import Access, After, Place, Rights, rights_of, wait_for_users
from streamalloc.vmm.ownership import GenericAllocation, OwnsNode
from streamalloc.vmm.physical_memory import spec_of
from streamalloc.vmm.properties import MemAllocationProp
from streamalloc.vmm.reservation import MappedBytes, Reservation


class AddressRange(OwnsNode, Drawn):
    """A reserved range of addresses to map memory into (``cuMemAddressReserve``).

    The addresses are the same on all devices and the host. Memory of several devices and of the host can be mapped side
    by side. ``print(range.draw())`` draws the range: ``0`` is memory of device 0, ``H`` memory of the host, ``M`` a
    multicast object, ``.`` a hole. ::

        with vmm.AddressRange(4 << 20) as addresses, vmm.PhysicalMemory(device, 2 << 20) as memory:
            mapping = addresses.map(memory, offset=2 << 20, access=device)
            mapping.fill(7, stream)
            addresses.unmap(after=stream)

    Unmapping is *not* stream-ordered: the driver unmaps at once, and queued work that still uses the memory breaks the
    context of its device. So every operation that unmaps has an argument ``after``: one or several events or streams
    that the host first waits for. ``()`` means none. By default the host waits for all work of the devices with access.
    The operation raises TypeError if ``after`` contains something else, ValueError for an event or stream of another
    driver, ClosedError for a closed one, and CaptureError for a stream that is being captured.

    Only one thread at a time may use a range.

    Parameters
    ----------
    nbytes
        Size in bytes, a multiple of the granularity of device memory (``PhysicalMemory.granularity(device)``). CUDA's
        documentation requires only a multiple of the host's page size, but driver 580 refuses that.
    alignment
        Alignment of the first address in bytes, a power of two; 0 for the driver's choice.
    address
        Preferred first address, a multiple of the same granularity; 0 for none. :attr:`honoured` shows whether the
        driver used this address.
    driver
        The driver to use; default: :func:`streamalloc.driver.default`.

    Raises
    ------
    TypeError, ValueError
        ``nbytes`` or ``address`` is not a multiple of the granularity, ``nbytes`` is 0, ``alignment`` is not a power of
        two, or ``address`` is not a multiple of ``alignment``.
    AddressSpaceError
        The process has no free range of addresses of this size. Physical memory is not the cause.
    """

    def __init__(
        self, nbytes: int | str, *, alignment: int = 0, address: int = 0, driver: Driver | None = None
    ) -> None:
        self._owned = False
        """Whether a buffer, a cache or a :class:`LoneMapping` owns the range, so that only the owner's methods map and
        unmap memory.
        """
        self._session = session_for(None, driver)
        self.driver: Driver = self._session.driver
        """Driver that the range belongs to."""
        self._granularity = granularity(self._session)
        self.nbytes: int = self._multiple("nbytes", nbytes)
        """Size in bytes."""
        if not self.nbytes:
            raise ValueError(f"nbytes=0: allowed are multiples of {size_text(self._granularity)}")
        alignment = checked_number("alignment", alignment)
        if alignment & (alignment - 1):
            raise ValueError(f"alignment={alignment}: allowed are 0 and powers of two")
        self._asked = self._multiple("address", address)
        if alignment and self._asked % alignment:
            raise ValueError(f"address={address:#x} is no multiple of alignment={alignment}")
        self._node: Reservation = Reservation(self._session, self.nbytes)
        self._node.allocations.work()
        try:
            self._node._raw = self._session.call("cuMemAddressReserve", self.nbytes, alignment, self._asked, 0)
        except OutOfMemoryError as error:
            limit = address_space_limit()
            why = f"`ulimit -v` allows {size_text(limit)}" if limit else "a process has 128 TiB; the driver uses some"
            raise AddressSpaceError(
                error.name, error.code, error.call, f"no {size_text(self.nbytes)} of addresses are left: {why}"
            ) from None
        self._node.allocations.reservations[self._node] = None

    @property
    def address(self) -> int:
        """First address of the range.

        Raises
        ------
        ClosedError
            The range was closed.
        """
        return int(self._checked_raw())

    @property
    def honoured(self) -> bool | None:
        """Whether the range begins at the address that the caller asked for; None if it asked for none. Raises
        ClosedError after the close, except for None.
        """
        return self.address == self._asked if self._asked else None

    @property
    def mappings(self) -> tuple[Mapping, ...]:
        """The mappings of the range in the order of addresses; an empty tuple once the range was closed."""
        return tuple(Mapping(self, entry) for entry in self._node.table())

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the range that are mapped."""
        return sum(entry.nbytes for entry in self._node.table())

    @property
    def holes(self) -> tuple[tuple[int, int], ...]:
        """Parts of the range without a mapping, as pairs of offset and size in bytes, in the order of addresses."""
        entries = self._node.table()
        ends = [0, *(entry.stop for entry in entries)]
        starts = [*(entry.offset for entry in entries), self.nbytes]
        return tuple((end, start - end) for end, start in zip(ends, starts, strict=True) if start > end)

    def map(self, memory: GenericAllocation, offset: int = 0, *, access: Access = None) -> Mapping:
        """Map memory at an offset (``cuMemMap``) and set its permissions (``cuMemSetAccess``).

        The driver always maps the whole memory. The mapping stays until it is unmapped, also if the returned object is
        dropped, or ``memory`` is dropped or closed.

        Parameters
        ----------
        memory
            A :class:`PhysicalMemory` or a :class:`~streamalloc.multicast.MulticastObject`, which may have other
            mappings.
        offset
            Offset from the first address of the range in bytes, a multiple of the memory's granularity.
        access
            Permissions: one or several devices or locations, which get read and write access; or a ``dict`` with a
            :class:`MemAccess` for each. By default nobody has access.

        Raises
        ------
        TypeError, ValueError
            The offset is not aligned, the memory does not fit into the range, or other memory is mapped there. Or
            ``memory`` is a tile pool or belongs to another driver, ``access`` names no location of the driver or no
            device of the multicast object, or the range belongs to a buffer.
        ClosedError
            The range or the memory was closed.
        IncompleteTeamError
            Not all devices were added to the multicast object.
        NotSupportedError
            The driver does not grant these permissions, for example the host's on device memory. Nothing is mapped.
        CudaError
            The driver refused a call. Nothing is mapped.
        """
        self._check_own()
        if not isinstance(memory, GenericAllocation):
            raise TypeError(f"memory must be PhysicalMemory or a MulticastObject, not {memory!r}")
        if memory._session is not self._session:
            raise ValueError(f"{memory!r} belongs to another driver than {self!r}")
        memory._check_mappable()
        rights = rights_of(access, self._session)
        memory._check_access(rights)
        (entry,) = self._map((memory,), checked_number("offset", offset), rights)
        return Mapping(self, entry)

    def set_access(
        self,
        who: Access,
        access: MemAccess = MemAccess.READWRITE,
        *,
        start: int = 0,
        stop: int | None = None,
        after: After = None,
    ) -> None:
        """Set permissions of devices and the host on a part of the range (``cuMemSetAccess``). If the call raises, no
        permission has changed.

        Parameters
        ----------
        who
            Devices and locations, as for ``access`` of :meth:`map`.
        access
            Permission for devices and locations that ``who`` gives without a permission. ``MemAccess.NONE`` revokes
            access.
        start, stop
            Offsets of the part in bytes; by default the whole range. The part must consist of whole mappings without a
            hole.
        after
            Events or streams that the host first waits for if a device loses a permission; by default all work of that
            device.

        Raises
        ------
        TypeError, ValueError
            The part has a hole, contains only a piece of a mapping, or is outside of the range. Or ``who`` is no
            location of the driver, ``after`` has something else than events and streams of the driver, or the range
            belongs to a buffer.
        NotSupportedError
            The driver does not grant this permission: the host has access to host memory only.
        ClosedError, CaptureError
            The range was closed, an event or stream of ``after`` was closed, or a stream is being captured.
        CudaError
            The driver refused the call.
        """
        self._checked_raw()
        self._check_own()
        rights = rights_of(who, self._session, access)
        entries = self._node.within(start, stop)
        self._covering(start, self.nbytes if stop is None else stop)
        self._node.set_rights(entries, rights, after)

    def view(self, start: int = 0, stop: int | None = None, *, holes: bool = False) -> RangeView:
        """Return the bytes from ``start`` to ``stop`` as :class:`Memory`. The bytes may be in several adjacent
        mappings.

        Parameters
        ----------
        start, stop
            Offsets in the range in bytes; by default the whole range.
        holes
            Whether the view may contain unmapped parts, for kernels and other libraries that use only the mapped parts.
            Fills and copies raise ValueError unless they use a slice of the view without a hole.

        Raises
        ------
        TypeError, ValueError
            An offset is no integer, or the bytes are outside of the range. Or they have a hole, and ``holes`` is False.
        ClosedError
            The range was closed.
        """
        self._checked_raw()
        begin, end = self._node.bounds(start, stop)
        if not holes:
            self._covering(begin, end)
        return RangeView(self, begin, end, holes)

    def unmap(self, start: int = 0, stop: int | None = None, *, after: After = None) -> None:
        """Unmap all mappings of a part of the range, by default of the whole range (``cuMemUnmap``).

        Parameters
        ----------
        start, stop
            Offsets of the part in bytes.
        after
            Events or streams that the host waits for first; default: all work of the devices with access.

        Raises
        ------
        TypeError, ValueError
            The part contains only a piece of a mapping or is outside of the range, ``after`` has something else than
            events and streams of the driver, or the range belongs to a buffer.
        ClosedError, CaptureError
            An event or stream of ``after`` was closed, or a stream is being captured.
        CudaError
            The driver refused to unmap memory. Other memory of the part may be unmapped already.
        """
        self._check_own()
        entries = self._node.within(start, stop)
        if entries:
            wait_for_users(after, self._session, (mapped.rights for mapped in entries))
            self._node.unmap(entries)

    def close(self) -> None:
        """Free the addresses (``cuMemAddressFree``). Idempotent.

        Raises
        ------
        ValueError
            Memory is mapped in the range: call :meth:`unmap` first. The end of a ``with`` block does both. Or the range
            belongs to a buffer.
        CudaError
            The driver refused. The range stays open.
        """
        if not self.closed:
            self._check_own()
            self._free()

    def _check_own(self) -> None:
        if self._owned:
            raise ValueError(f"{self!r} belongs to a buffer, which alone maps and unmaps it: use the buffer's methods")

    def _free(self) -> None:
        entries = self._node.table()
        if entries:
            raise ValueError(f"{self!r} has {counted(len(entries), 'mapping')}: unmap() before addresses are freed")
        self._node.end()

    def draw(self, width: int = 64) -> str:
        """Return a drawing of the range as text of at most ``width`` characters; :class:`AddressRange` explains the
        characters.

        If several mappings fall within one character, the character shows the first of them.
        """
        width = max(1, min(width, self.nbytes // self._granularity))
        cells = ["."] * width
        for entry in reversed(self._node.table()):
            first = entry.offset * width // self.nbytes
            last = max(first + 1, -(-entry.stop * width // self.nbytes))
            cells[first:last] = entry.mark * (last - first)
        return "".join(cells)

    def _multiple(self, name: str, value: int | str) -> int:
        size = checked_size(name, value)
        if size % self._granularity:
            raise ValueError(f"{name}={value}: allowed are multiples of {size_text(self._granularity)}")
        return size

    # -- for the other modules of this package ---------------------------------------------------------------

    def _map(self, memories: Sequence[GenericAllocation], at: int, rights: Rights) -> list[MappedBytes]:
        """Map ``memories`` side by side from the offset ``at`` (bytes) on (``cuMemMap``), and set their permissions in
        one call (``cuMemSetAccess``). If a call fails, nothing stays mapped. Returns the mappings. Raises ClosedError,
        CudaError, and ValueError if a memory cannot be mapped there.
        """
        ends = itertools.accumulate((memory.nbytes for memory in memories), initial=at)
        return self._node.map(map(self._entry, memories, ends), rights)

    def _entry(self, memory: GenericAllocation, offset: int) -> MappedBytes:
        """Return an entry for a mapping of ``memory`` at ``offset`` (bytes). The caller then makes the mapping. Raises
        ClosedError if the range was closed, and ValueError if the memory cannot be mapped there.
        """
        node, stop, granularity = self._node, offset + memory.nbytes, memory._granularity
        if offset % granularity:
            raise ValueError(f"offset={offset}: allowed are multiples of the granularity, {size_text(granularity)}")
        if self.address % granularity:
            raise ValueError(f"{self!r} is not aligned for {memory!r}: reserve it with alignment={granularity}")
        if stop > self.nbytes:
            raise ValueError(f"offset={offset}: {size_text(memory.nbytes)} end outside of {self!r}")
        for other in node.touching(offset, stop):
            raise ValueError(f"offset={offset}: {other.as_object()!r} is mapped there, in {self!r}")
        entry = MappedBytes(node, offset, stop, {}, memory._spec)
        entry._memory = memory
        return entry

    def _covering(self, start: int, stop: int) -> list[MappedBytes]:
        """Return the mappings that overlap the bytes between two offsets. Raises ValueError if these bytes have a
        hole.
        """
        entries = self._node.touching(start, stop)
        at = start
        for entry in entries:
            if entry.offset > at:
                break
            at = entry.stop
        if at < stop:
            raise ValueError(f"nothing is mapped at offset {at} of {self!r}")
        return entries

    def _about(self) -> Iterator[Row]:
        entries = self._node.table()
        yield "addresses", f"{mib(self.nbytes)} at {self.address:#x}"
        yield "mapped", f"{mib(self.mapped_bytes)}, {len(self.holes)} holes"
        if entries:
            yield "", drawn(self)
            rows = (
                (mib(it.offset), mib(it.stop), place(it.as_object().location), rights_text(it.rights), _handle_of(it))
                for it in entries
            )
            yield "", table(("from", "to", "memory of", "access", "handle"), rows)

    def _leave(self, *, failed: bool) -> None:
        if not self.closed:
            self.unmap()
        self.close()

    def _text(self) -> str:
        return (
            f" of {size_text(self.nbytes)}{', closed' if self.closed else f' at {self.address:#x} [{self.draw(16)}]'}"
        )


def _handle_of(mapped: MappedBytes) -> str:
    return "closed" if mapped.as_object().closed else f"{mapped.as_object().handle:#x}"


def rights_text(rights: Rights) -> str:
    """Return permissions as text for labels, such as ``GPU 0 reads and writes``; ``nobody`` if there are none."""
    names = {MemAccess.READ: "reads", MemAccess.READWRITE: "reads and writes"}
    return ", ".join(f"{place(where)} {names[allowed]}" for where, allowed in rights.items() if allowed) or "nobody"


def drawn(range: AddressRange) -> Html:
    """Return a picture of a range as HTML: a strip to scale, with a tooltip for each mapping."""
    pieces = (
        (one.offset, one.stop - one.offset, one.as_object().location, f"{one.as_object()!r}: {rights_text(one.rights)}")
        for one in range._node.table()
    )
    return strip(range.nbytes, pieces)


class RangeView(Memory):
    """Bytes of an address range in one or several adjacent mappings: the result of :meth:`AddressRange.view`.

    The view is valid while the bytes are mapped. Afterwards its fills, copies and exports raise :class:`ClosedError`.
    With ``holes=True``, exports do not check whether bytes are mapped, and fills and copies of unmapped bytes raise
    ValueError. Operations that name no stream use :attr:`stream`.
    """

    __slots__ = ("__weakref__", "_holes", "_stop", "offset", "range")

    _remedy = ""
    """Text that ends the error message for memory that is not mapped any more."""

    def __init__(self, range: AddressRange, start: int, stop: int, holes: bool = False) -> None:
        self._holes = holes
        self.range: AddressRange = range
        """Address range that the bytes are in."""
        self.offset: int = start
        """Offset of the first byte in the range, in bytes."""
        self._stop = stop

    @property
    def address(self) -> int:
        """Device address of the first byte. Raises ClosedError if the range was closed."""
        return self.range.address + self.offset

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._stop - self.offset

    @property
    def stream(self) -> Stream:
        """Default stream of the device of the first mapping in device memory; without such a mapping, of the first
        device with access, otherwise of device 0. Raises ClosedError if the bytes are not mapped any more.
        """
        entries = self._entries()
        places = [one.as_object().location for one in entries] + [place for one in entries for place in one.rights]
        devices = (place.id for place in places if place.type is MemLocationType.DEVICE and place.seen)
        return Device(next(devices, 0), driver=self.range.driver).default_stream

    @property
    def location(self) -> MemLocation:
        """Location of the memory; if there are several mappings, the location of the first. If there is none, which
        needs ``holes=True``, the location of the device of :attr:`stream`. Raises ClosedError if the bytes are not
        mapped any more.
        """
        entries = self._entries()
        return entries[0].as_object().location if entries else self.stream.device.location

    @property
    def owner(self) -> object:
        """The address range that the bytes are in."""
        return self.range

    @property
    def device_accessible(self) -> bool:
        """Whether the device of :attr:`stream` has access to all mapped bytes, at least to read. True for a view of
        holes alone. Raises ClosedError if the bytes are not mapped any more.
        """
        return all(self._allowed(self.stream.device.location))

    @property
    def host_accessible(self) -> bool:
        """Whether the CPU has access to all mapped bytes, at least to read. True for a view of holes alone. Raises
        ClosedError if the bytes are not mapped any more.
        """
        return all(self._allowed(MemLocation.host()))

    @property
    def _session(self) -> Session:
        return self.range._session

    def __getitem__(self, item: slice) -> BufferView:
        part = super().__getitem__(item)
        if not self._holes:
            return part
        start = self.offset + part.address - self.address
        return BufferView(RangeView(self.range, start, start + part.nbytes, holes=True), 0, part.nbytes)

    def _await_on(self, stream: Stream) -> None:
        # A view with a hole is refused before work is queued: work at an unmapped address breaks the context.
        self.range._covering(self.offset, self._stop)

    def _entries(self) -> Sequence[MappedBytes]:
        if self._holes:
            return self.range._node.touching(self.offset, self._stop)
        try:
            return self.range._covering(self.offset, self._stop)
        except ValueError as error:
            raise ClosedError(f"{self!r} is not mapped any more: {error}{self._remedy}") from None

    def _allowed(self, where: MemLocation) -> list[MemAccess]:
        """Return the permission of the location ``where`` on each mapping of the bytes."""
        return [entry.rights.get(where, MemAccess.NONE) for entry in self._entries()]

    def check_usable(self) -> None:
        for mapped in self._entries():
            if not any(mapped.rights.values()):
                # Driver 580 crashes in copies of host memory without permissions.
                raise ValueError(f"nobody has access to {mapped.as_object()!r}: set_access() gives it")

    def _unreadable(self) -> str:
        return next(filter(None, (mapped.as_object()._unreadable for mapped in self._entries())), "")

    def _read_only(self, on_host: bool) -> bool:
        return MemAccess.READ in self._allowed(MemLocation.host() if on_host else self.stream.device.location)

    def _kernels_may_use(self, blocks: Any, nbytes: int, write: bool) -> bool:
        return not self._holes and super()._kernels_may_use(blocks, nbytes, write)

    def _access_hint(self, stream: Stream) -> str:
        where = stream.device.location
        allowed = self._allowed(where)
        if MemAccess.NONE in allowed:
            return f"{where} has no access to all of {self!r}: set_access(device) gives it"
        return f"{where} may only read from {self!r}" if MemAccess.READ in allowed else ""

    def _text(self) -> str:
        return f" of bytes {self.offset}:{self._stop} of {self.range!r}"


class Mapping(RangeView, Closes):
    """One mapping of physical memory, or of a multicast object, in an address range. :meth:`AddressRange.map` returns
    it.

    The range owns the mapping: if this object is dropped, the memory stays mapped. :meth:`close` unmaps the memory.
    """

    __slots__ = ("_mapped",)

    def __init__(self, range: AddressRange, mapped: MappedBytes) -> None:
        super().__init__(range, mapped.offset, mapped.stop)
        self._mapped = mapped

    @property
    def address(self) -> int:
        """Device address of the mapping's first byte.

        Raises
        ------
        ClosedError
            The memory was unmapped.
        """
        self._entries()
        return super().address

    @property
    def memory(self) -> GenericAllocation:
        """The mapped :class:`PhysicalMemory` or multicast object, which may be closed."""
        return self._mapped.as_object()

    @property
    def closed(self) -> bool:
        """Whether the memory was unmapped. Uses of its addresses then raise :class:`ClosedError`."""
        return self._mapped.gone

    @property
    def rights(self) -> Rights:
        """Dictionary of permissions by location, as this package has set them, also after the unmap. Locations without
        access are absent. The driver is not queried.
        """
        return {where: flags for where, flags in self._mapped.rights.items() if flags}

    def access(self, who: Place) -> MemAccess:
        """Return the permission that the driver reports for a device or location (``cuMemGetAccess``).

        Raises
        ------
        ClosedError
            The memory was unmapped.
        TypeError, ValueError
            ``who`` is no location of the driver.
        """
        location = known_location(self._session, "who", who)
        if location.type is MemLocationType.HOST:
            # For HOST, driver 580 returns the larger of the permissions of the host and of device 0.
            location = MemLocation.host_numa(0)
        self._entries()
        return MemAccess(int(self._session.call("cuMemGetAccess", location.to_driver(), self.address)))

    def set_access(self, who: Access, access: MemAccess = MemAccess.READWRITE, *, after: After = None) -> None:
        """Set permissions of devices and the host on the mapping (``cuMemSetAccess``). ``who``, ``access``, ``after``
        and errors as for :meth:`AddressRange.set_access`. Raises ClosedError if the memory was unmapped, and ValueError
        if the range belongs to a buffer.
        """
        self._check_own()
        rights = rights_of(who, self._session, access)
        self.range._node.set_rights(self._entries(), rights, after)

    def revoke(self, who: Access, *, after: After = None) -> None:
        """Revoke the permissions of ``who``: ``set_access(who, MemAccess.NONE, after=after)``. Errors as for
        :meth:`set_access`.
        """
        self.set_access(who, MemAccess.NONE, after=after)

    def close(self, after: After = None) -> None:
        """Unmap the memory (``cuMemUnmap``) after the host has waited for ``after``. Idempotent. Raises ValueError if
        the range belongs to a buffer, CudaError if the driver refuses, and the errors that :class:`AddressRange` names
        for ``after``.
        """
        if not self._mapped.gone:
            self._check_own()
            wait_for_users(after, self._session, (self._mapped.rights,))
            self.range._node.unmap((self._mapped,))

    def _check_own(self) -> None:
        self.range._check_own()

    def _entries(self) -> Sequence[MappedBytes]:
        if self._mapped.gone:
            raise ClosedError(f"{self!r} was unmapped")
        return (self._mapped,)

    def _check_open(self) -> None:
        self._entries()

    def __eq__(self, other: object) -> bool:
        return self._mapped is other._mapped if isinstance(other, Mapping) else NotImplemented

    def __hash__(self) -> int:
        return hash(id(self._mapped))

    def _text(self) -> str:
        state = ", unmapped" if self._mapped.gone else ""
        return f" of {self._mapped.as_object()!r} at offset {self.offset}{state}"


class LoneMapping(Mapping):
    """A mapping that owns its address range. :meth:`close` unmaps the memory and frees the addresses."""

    __slots__ = ()

    def __init__(self, memory: GenericAllocation, alignment: int, rights: Rights) -> None:
        """Map ``memory`` with the permissions ``rights`` in a new address range, whose address is a multiple of
        ``alignment`` (bytes). Raises ClosedError if the memory was closed, AddressSpaceError if the process has no
        addresses left, CudaError.
        """
        step = granularity(memory._session)
        range = AddressRange(-(-memory.nbytes // step) * step, alignment=alignment, driver=memory.driver)
        range._owned = True
        with undoing(range._free):
            (entry,) = range._map((memory,), 0, rights)
            super().__init__(range, entry)

    def _check_own(self) -> None:
        """Do nothing: unlike other mappings, this object owns its range and may change it."""

    def close(self, after: After = None) -> None:
        """Unmap the memory (``cuMemUnmap``) and free the addresses (``cuMemAddressFree``), after the host has waited
        for ``after``. Idempotent. Raises CudaError if the driver refuses, and the errors that :class:`AddressRange`
        names for ``after``.
        """
        if not self.range.closed:
            super().close(after)
            self.range._free()


class OwnsRange(Memory, Closes):
    """Base class of memory that owns the address range in which it is mapped."""

    def _reserve(self, device: Device, nbytes: int, stream: StreamLike | None) -> None:
        """Reserve ``nbytes`` bytes of addresses, and set the attributes of this class."""
        self.device: Device = device
        """Device of the memory, or the first of several devices. For host memory, the device whose default stream is
        used.
        """
        self._given_stream = None if stream is None else as_stream(stream, session_of(device))
        self.range: AddressRange = AddressRange(nbytes, driver=device.driver)
        """The reserved addresses, where only this object maps and unmaps memory."""
        self.range._owned = True

    @property
    def address(self) -> int:
        """Address of the first byte. It does not change until the object is closed.

        Raises
        ------
        ClosedError
            The object was closed.
        """
        try:
            return self.range.address
        except ClosedError:
            self._check_open()  # Its error names this object, not the range.
            raise

    @property
    def stream(self) -> Stream:
        """Stream of operations that name no stream; by default the device's default stream."""
        return self.device.default_stream if self._given_stream is None else self._given_stream

    @property
    def closed(self) -> bool:
        """Whether the object was closed. Uses then raise :class:`ClosedError`."""
        return self.range.closed

    @property
    def _session(self) -> Session:
        # The session is not taken from `self.stream`: this would make the default stream count as a stream in use.
        return session_of(self.device)


granularity: PerDriver[int] = PerDriver(
    lambda session: spec_of(session, MemAllocationProp(location=MemLocation.device(0))).granularity
)
"""``granularity(session)`` returns the granularity of address ranges in bytes, which is that of device memory without
options.
"""
