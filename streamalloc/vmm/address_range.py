"""Address ranges and what is mapped in them (``cuMemAddressReserve``, ``cuMemMap``, ``cuMemSetAccess``).

The range is the owner: it alone unmaps and frees. A :class:`Mapping` names one piece of it and keeps it alive, so that
no order of dropping things frees addresses that are mapped, or memory that is used.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from streamalloc.core.arguments import door_of, location_of
from streamalloc.core.capabilities import address_space_limit
from streamalloc.core.device import Device
from streamalloc.core.door import Door
from streamalloc.core.errors import AddressSpaceError, ClosedError, CudaError, OutOfMemoryError, attach
from streamalloc.core.memory import Memory
from streamalloc.core.ownership import Closes
from streamalloc.core.properties import MemAccess, MemLocation, MemLocationType, checked_size
from streamalloc.core.stream import Stream
from streamalloc.driver import Driver
from streamalloc.vmm.access import Access, Place, Rights, rights_of, structs_of
from streamalloc.vmm.generic_handle import AllocationState, GenericAllocation, once_gone
from streamalloc.vmm.waiting import After, accessing, wait

if TYPE_CHECKING:
    from streamalloc.vmm.physical_memory import PhysicalMemory

__all__ = ["AddressRange", "Mapping", "MappingEntry", "RangeView"]

# What driver 580 wants the size, the hint and the places of mappings in a range to be multiples of, wherever the memory
# is; memory says its own granularity when it is mapped.
GRANULARITY = 2 << 20

# Answers that mean that there is nothing left to give back.
_GONE = ("CUDA_ERROR_DEINITIALIZED", "CUDA_ERROR_NOT_INITIALIZED")


class MappingEntry:
    """One mapping as its range keeps it."""

    __slots__ = ("live", "memory", "offset", "rights")

    def __init__(self, memory: GenericAllocation, offset: int) -> None:
        self.memory = memory
        self.offset = offset
        self.rights: Rights = {}
        self.live = True

    @property
    def stop(self) -> int:
        return self.offset + self.memory.nbytes


class AddressRange(Closes):
    """A range of addresses, reserved for memory that is mapped into it (``cuMemAddressReserve``).

    All devices and the host see the same addresses. The range holds memory of any device and of the host side by side;
    ``print(range)`` draws it, a character for each part: ``0`` for memory of device 0, ``H`` for the host's, ``M`` for
    a multicast object, ``.`` for a hole.

    Unmapping is *not* in stream order: the driver does it at once, and work that is queued and uses the memory then
    breaks its device's context. Whatever unmaps therefore takes ``after``: an event, a stream or several of them which
    the host waits for; ``()`` for nothing; by default all work of the devices that have access.

    Not to be used from several threads at once.

    Parameters
    ----------
    nbytes
        Size in bytes, a multiple of 2 MiB.
    alignment
        What the address is a multiple of: a power of two, in bytes; 0 leaves it to the driver.
    address
        Where to put it if that is free, a multiple of 2 MiB; :attr:`honoured` says whether it was. 0 asks for nothing.
    driver
        The driver to use.

    Raises
    ------
    TypeError, ValueError
        An argument breaks one of these rules.
    AddressSpaceError
        The process has no such range of addresses left; this is not about memory.
    """

    __slots__ = ("__weakref__", "_address", "_asked", "_at", "_door", "_offsets", "_owned", "nbytes")

    nbytes: int
    """Size in bytes."""

    def __init__(self, nbytes: int, *, alignment: int = 0, address: int = 0, driver: Driver | None = None) -> None:
        self._address: int | None = None
        self._owned = False
        self.nbytes = _multiple("nbytes", nbytes)
        if not self.nbytes:
            raise ValueError(f"nbytes=0: allowed are multiples of {GRANULARITY} bytes")
        alignment = checked_size("alignment", alignment)
        if alignment & (alignment - 1):
            raise ValueError(f"alignment={alignment}: allowed are 0 and powers of two")
        self._asked = _multiple("address", address)
        if alignment and self._asked % alignment:
            raise ValueError(f"address={address:#x} is no multiple of alignment={alignment}")
        self._door = door_of(None, driver)
        self._offsets: list[int] = []
        self._at: dict[int, MappingEntry] = {}
        try:
            self._address = int(self._door.call("cuMemAddressReserve", self.nbytes, alignment, self._asked, 0))
        except OutOfMemoryError as error:
            limit = address_space_limit()
            why = f"`ulimit -v` allows {limit} bytes" if limit else "a process has 128 TiB, and the driver uses some"
            raise AddressSpaceError(
                error.name, error.code, error.call, f"no {nbytes} bytes of addresses are left: {why}"
            ) from None

    @property
    def address(self) -> int:
        """Where the range begins.

        Raises
        ------
        ClosedError
            The range was closed.
        """
        if self._address is None:
            raise ClosedError(f"this address range of {self.nbytes} bytes was closed")
        return self._address

    @property
    def closed(self) -> bool:
        """Whether the addresses were given back."""
        return self._address is None

    @property
    def honoured(self) -> bool | None:
        """Whether the range is at the address that was asked for; None if none was."""
        return self.address == self._asked if self._asked else None

    @property
    def driver(self) -> Driver:
        """The driver that the range belongs to."""
        return self._door.driver

    @property
    def mappings(self) -> tuple[Mapping, ...]:
        """What is mapped, in the order of addresses."""
        return tuple(Mapping(self, self._at[offset]) for offset in self._offsets)

    @property
    def mapped_bytes(self) -> int:
        """How much of the range is mapped, in bytes."""
        return sum(mapped.memory.nbytes for mapped in self._at.values())

    @property
    def holes(self) -> tuple[tuple[int, int], ...]:
        """Where nothing is mapped: pairs of offset and size in bytes."""
        ends = [0, *(self._at[offset].stop for offset in self._offsets)]
        starts = [*self._offsets, self.nbytes]
        return tuple((end, start - end) for end, start in zip(ends, starts, strict=True) if start > end)

    def map(self, memory: GenericAllocation, offset: int = 0, *, access: Access = None) -> Mapping:
        """Map memory at an offset (``cuMemMap``), and give access to it (``cuMemSetAccess``).

        The driver maps memory as a whole only. The range keeps what is mapped until it is unmapped, whether or not the
        returned object, or ``memory``, is kept or closed.

        Parameters
        ----------
        memory
            :class:`PhysicalMemory` or a :class:`~streamalloc.multicast.MulticastObject`; it may be mapped elsewhere as
            well.
        offset
            Where in the range, in bytes, so that the address is a multiple of the memory's granularity.
        access
            Who may use it: a device, a location, several, or a ``dict`` that says :class:`MemAccess` of each. Nobody
            may by default.

        Raises
        ------
        TypeError, ValueError
            The offset is not aligned, the memory does not fit there, something is mapped there already, or the memory
            is a tile pool or of another driver.
        ClosedError
            Range or memory was closed.
        IncompleteTeamError
            Not all devices were added to the multicast object.
        NotSupportedError
            The driver does not give this access, such as the host's to device memory. Nothing is mapped then.
        """
        self._check_own()
        if not isinstance(memory, GenericAllocation):
            raise TypeError(
                f"memory must be PhysicalMemory or a MulticastObject, not {type(memory).__name__} ({memory!r})"
            )
        if memory._door is not self._door:
            raise ValueError(f"{memory!r} belongs to another driver than {self!r}")
        memory._check_mappable()
        rights = rights_of(access, self._door)
        memory._check_access(rights)
        mapped = self._map(memory, checked_size("offset", offset))
        if rights:
            try:
                self._grant((mapped,), rights, structs_of(rights))
            except BaseException as error:
                self._undo_map((mapped,), error)
                raise
        return Mapping(self, mapped)

    def set_access(
        self,
        access: Access,
        flags: MemAccess = MemAccess.READWRITE,
        *,
        start: int = 0,
        stop: int | None = None,
        after: After = None,
    ) -> None:
        """Set who may use the mappings of a part of the range, all or none of them (``cuMemSetAccess``).

        Parameters
        ----------
        access
            As for :meth:`map`; ``MemAccess.NONE`` revokes.
        flags
            The access of those for whom ``access`` says none.
        start, stop
            The part, in bytes; it consists of whole mappings without a hole. By default the whole range.
        after
            Where access is taken away: what must have passed before. By default all work of the device that loses it.

        Raises
        ------
        ValueError
            The part cuts a mapping or has a hole.
        NotSupportedError
            The driver does not give this access: the host reaches host memory only.
        """
        self._check_own()
        rights = rights_of(access, self._door, flags)
        pieces = self._whole(start, self.nbytes if stop is None else stop)
        if rights and pieces:
            self._set_rights(pieces, rights, after)

    def view(self, start: int = 0, stop: int | None = None) -> RangeView:
        """The bytes from ``start`` to ``stop`` as :class:`Memory`, which may lie in several mappings without a hole.

        Raises
        ------
        ValueError
            The part is outside the range, or not all of it is mapped.
        """
        end = self.nbytes if stop is None else checked_size("stop", stop)
        begin = checked_size("start", start)
        if not begin <= end <= self.nbytes:
            raise ValueError(f"start={begin}, stop={end}: the range has {self.nbytes} bytes")
        self._covering(begin, end)
        return RangeView(self, begin, end)

    def unmap(self, start: int = 0, stop: int | None = None, *, after: After = None) -> None:
        """Unmap everything in a part of the range, by default in all of it (``cuMemUnmap``).

        Raises
        ------
        ValueError
            The part cuts a mapping.
        """
        self._check_own()
        end = self.nbytes if stop is None else stop
        pieces = self._within(start, end)
        if pieces:
            wait(after, self._door, accessing(mapped.rights for mapped in pieces))
            self._unmap(pieces)

    def close(self) -> None:
        """Give the addresses back (``cuMemAddressFree``); idempotent.

        Raises
        ------
        ValueError
            Something is mapped: :meth:`unmap` it first. Leaving a ``with`` block does both.
        """
        if self._address is None:
            return
        self._check_own()
        self._free()

    def _check_own(self) -> None:
        if self._owned:
            raise ValueError(f"{self!r} belongs to a buffer, which alone maps and unmaps it: use the buffer's methods")

    def _free(self) -> None:
        if self._offsets:
            count = len(self._offsets)
            raise ValueError(
                f"{self!r} has {count} mapping{'' if count == 1 else 's'}: unmap() before the addresses are freed"
            )
        self._door.call("cuMemAddressFree", self._address, self.nbytes)
        self._address = None

    def draw(self, width: int = 64) -> str:
        """The range as ``width`` characters, one for what is mapped there, as the class says."""
        width = max(1, min(width, self.nbytes // GRANULARITY))
        cells = []
        for cell in range(width):
            mapped = self._find((2 * cell + 1) * self.nbytes // (2 * width))
            cells.append("." if mapped is None else mapped.memory._mark)
        return "".join(cells)

    # -- for the other modules of this package ---------------------------------------------------------------

    def _map(self, memory: GenericAllocation, offset: int) -> MappingEntry:
        address = self.address
        raw = memory._checked_raw()
        granularity = memory._granularity
        if offset % granularity:
            raise ValueError(f"offset={offset}: allowed are multiples of the granularity, {granularity} bytes")
        if address % granularity:
            raise ValueError(
                f"{self!r} begins at no multiple of the granularity of {memory!r}: reserve it with "
                f"alignment={granularity}"
            )
        end = offset + memory.nbytes
        if end > self.nbytes:
            raise ValueError(
                f"offset={offset}: {memory.nbytes} bytes end outside of the range, which has {self.nbytes} bytes"
            )
        place = bisect_left(self._offsets, offset)
        if place < len(self._offsets) and self._offsets[place] < end:
            raise ValueError(f"offset={offset}: {self._at[self._offsets[place]].memory!r} is mapped at {self!r} there")
        if place and self._at[self._offsets[place - 1]].stop > offset:
            raise ValueError(
                f"offset={offset}: {self._at[self._offsets[place - 1]].memory!r} is mapped at {self!r} there"
            )
        mapped = MappingEntry(memory, offset)
        # In the table before it is mapped, so that nothing can come between and lose it.
        self._offsets.insert(place, offset)
        self._at[offset] = mapped
        try:
            self._door.call("cuMemMap", address + offset, memory.nbytes, 0, raw, 0)
        except BaseException:
            del self._offsets[place], self._at[offset]
            raise
        memory._was_mapped(self)
        return mapped

    def _grant(self, pieces: Sequence[MappingEntry], rights: Rights, structs: list[object]) -> None:
        """Set access of mappings that lie side by side."""
        start = pieces[0].offset
        self._door.call("cuMemSetAccess", self.address + start, pieces[-1].stop - start, structs, len(structs))
        for mapped in pieces:
            mapped.rights.update(rights)

    def _set_rights(self, pieces: tuple[MappingEntry, ...], rights: Rights, after: After) -> None:
        for mapped in pieces:
            mapped.memory._check_access(rights)
        losing = accessing(
            {where: had for where, had in mapped.rights.items() if had & ~rights.get(where, had)} for mapped in pieces
        )
        if losing:
            wait(after, self._door, losing)
        try:
            self._grant(pieces, rights, structs_of(rights))
        except BaseException as first:
            # Driver 580 may have set some of what it refuses as a whole.
            for mapped in pieces:
                before = {where: mapped.rights.get(where, MemAccess.NONE) for where in rights}
                try:
                    self._grant((mapped,), before, structs_of(before))
                except CudaError as later:
                    attach(first, later)
            raise

    def _unmap(self, pieces: Iterable[MappingEntry]) -> None:
        """Unmap mappings in one call for each run of them without a hole."""
        run: list[MappingEntry] = []
        for mapped in pieces:
            if run and run[-1].stop != mapped.offset:
                self._unmap_run(run)
                run = []
            run.append(mapped)
        if run:
            self._unmap_run(run)

    def _unmap_run(self, run: list[MappingEntry]) -> None:
        start = run[0].offset
        self._door.call("cuMemUnmap", self.address + start, run[-1].stop - start)
        for mapped in run:
            mapped.live = False
            del self._at[mapped.offset]
            mapped.memory._was_unmapped()
        place = bisect_left(self._offsets, start)
        del self._offsets[place : place + len(run)]

    def _undo_map(self, pieces: Iterable[MappingEntry], first: BaseException) -> None:
        """Unmap what was just mapped, which nobody used yet, because of ``first``."""
        try:
            self._unmap(pieces)
        except CudaError as later:
            attach(first, later)

    def _find(self, offset: int) -> MappingEntry | None:
        place = bisect_right(self._offsets, offset) - 1
        if place < 0:
            return None
        mapped = self._at[self._offsets[place]]
        return mapped if offset < mapped.stop else None

    def _within(self, start: int, stop: int) -> tuple[MappingEntry, ...]:
        """The mappings between two offsets, none of which is cut."""
        begin, end = checked_size("start", start), checked_size("stop", stop)
        if not begin <= end <= self.nbytes:
            raise ValueError(f"start={begin}, stop={end}: the range has {self.nbytes} bytes")
        first = bisect_left(self._offsets, begin)
        last = bisect_left(self._offsets, end)
        pieces = tuple(self._at[offset] for offset in self._offsets[first:last])
        before = self._find(begin) if begin < end else None
        if (before and before.offset < begin) or (pieces and pieces[-1].stop > end):
            raise ValueError(f"start={begin}, stop={end} cuts a mapping: the driver takes whole ones only")
        return pieces

    def _whole(self, start: int, stop: int) -> tuple[MappingEntry, ...]:
        """The same, without a hole between or around them."""
        pieces = self._within(start, stop)
        self._covering(start, stop)
        return pieces

    def _covering(self, start: int, stop: int) -> Iterator[MappingEntry]:
        """Every mapping that a part touches; ``ValueError`` where it has a hole."""
        found = []
        at = start
        while at < stop:
            mapped = self._find(at)
            if mapped is None:
                raise ValueError(f"nothing is mapped at offset {at} of {self!r}")
            found.append(mapped)
            at = mapped.stop
        return iter(found)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._address is not None:
            self.unmap()
        self.close()

    def __del__(self) -> None:
        address = getattr(self, "_address", None)
        if address is None or not self._door.usable:
            return
        pieces = list(self._at.values())
        self._at.clear()
        self._address = None
        self._door.outside_captures(functools.partial(_give_up, self._door, address, self.nbytes, pieces))

    def __repr__(self) -> str:
        if getattr(self, "_address", None) is None:
            return f"<{type(self).__name__} of {getattr(self, 'nbytes', 0)} bytes, closed>"
        return f"<{type(self).__name__} of {self.nbytes} bytes at {self._address:#x} [{self.draw()}]>"


class RangeView(Memory):
    """Bytes of an address range that are mapped, in one piece of physical memory or in several side by side.

    It is valid while they are mapped. Operations that name no stream go to the default stream of the device whose
    memory comes first.
    """

    __slots__ = ("__weakref__", "_start", "_stop", "range")

    range: AddressRange
    """The range that the bytes belong to."""

    def __init__(self, range: AddressRange, start: int, stop: int) -> None:
        self.range = range
        self._start = start
        self._stop = stop

    @property
    def address(self) -> int:
        """Where the bytes begin."""
        return self.range.address + self._start

    @property
    def offset(self) -> int:
        """Where they begin in the range, in bytes."""
        return self._start

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._stop - self._start

    @property
    def stream(self) -> Stream:
        """The default stream of the device that has the memory, else of the first that may use it."""
        pieces = self._entries()
        for location in (
            *(mapped.memory.location for mapped in pieces),
            *(where for m in pieces for where in m.rights),
        ):
            if location.type is MemLocationType.DEVICE and location.seen:
                return Device(location.id, driver=self.range.driver).default_stream
        return Device(0, driver=self.range.driver).default_stream

    @property
    def location(self) -> MemLocation:
        """Where the memory is; of several pieces, the first."""
        pieces = self._entries()
        return pieces[0].memory.location if pieces else self.stream.device.location

    @property
    def owner(self) -> object:
        """The address range."""
        return self.range

    @property
    def device_accessible(self) -> bool:
        """Whether the stream's device may use all of it."""
        where = self.stream.device.location
        return all(mapped.rights.get(where, MemAccess.NONE) for mapped in self._entries())

    @property
    def host_accessible(self) -> bool:
        """Whether the CPU may use all of it."""
        return all(_host_rights(mapped) for mapped in self._entries())

    @property
    def _door(self) -> Door:
        return self.range._door

    def _entries(self) -> tuple[MappingEntry, ...]:
        try:
            return tuple(self.range._covering(self._start, self._stop))
        except ValueError as error:
            raise ClosedError(f"{self!r} is not mapped any more: {error}") from None

    def _check_usable(self) -> None:
        for mapped in self._entries():
            if not any(mapped.rights.values()):
                # Driver 580 crashes in copies of host memory that nobody may use.
                raise ValueError(f"nobody has access to {mapped.memory!r}: set_access() gives it")

    def _unreadable(self) -> str:
        return next(filter(None, (mapped.memory._unreadable for mapped in self._entries())), "")

    def _read_only(self, on_host: bool) -> bool:
        where = self.stream.device.location
        return any(
            (_host_rights(mapped) if on_host else mapped.rights.get(where)) == MemAccess.READ
            for mapped in self._entries()
        )

    def _access_hint(self, stream: Stream) -> str:
        where = stream.device.location
        rights = [mapped.rights.get(where, MemAccess.NONE) for mapped in self._entries()]
        if MemAccess.NONE in rights:
            return f"{where} has no access to all of {self!r}: set_access(device) gives it"
        return f"{where} may only read from {self!r}" if MemAccess.READ in rights else ""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of bytes {self._start}:{self._stop} of {self.range!r}>"


class Mapping(RangeView):
    """Physical memory mapped at one place of an address range: made by :meth:`AddressRange.map`.

    Dropping the object unmaps nothing, for the range owns the mapping; :meth:`close` unmaps.
    """

    __slots__ = ("_mapped",)

    def __init__(self, range: AddressRange, mapped: MappingEntry) -> None:
        super().__init__(range, mapped.offset, mapped.stop)
        self._mapped = mapped

    @property
    def address(self) -> int:
        """Where it is mapped.

        Raises
        ------
        ClosedError
            It was unmapped.
        """
        self._entries()
        return super().address

    @property
    def memory(self) -> PhysicalMemory | Any:
        """The :class:`PhysicalMemory` or multicast object, which may have been closed since."""
        return self._mapped.memory

    @property
    def closed(self) -> bool:
        """Whether it was unmapped."""
        return not self._mapped.live

    @property
    def rights(self) -> Rights:
        """Who was given which access, by this object or its range."""
        return {where: flags for where, flags in self._mapped.rights.items() if flags}

    def access(self, who: Place) -> MemAccess:
        """What a device or location may do here, as the driver says (``cuMemGetAccess``).

        Raises
        ------
        ClosedError
            It was unmapped.
        """
        location = location_of("who", who)
        if location.type is MemLocationType.HOST:
            # Of HOST, driver 580 tells the larger of the host's access and device 0's.
            location = MemLocation.host_numa(0)
        self._entries()
        return MemAccess(int(self._door.call("cuMemGetAccess", location.to_driver(), self.address)))

    def set_access(self, access: Access, flags: MemAccess = MemAccess.READWRITE, *, after: After = None) -> None:
        """Set who may use it (``cuMemSetAccess``); see :meth:`AddressRange.set_access`."""
        self.range._check_own()
        rights = rights_of(access, self._door, flags)
        pieces = self._entries()
        if rights:
            self.range._set_rights(pieces, rights, after)

    def revoke(self, access: Access, *, after: After = None) -> None:
        """Take access away: ``set_access(access, MemAccess.NONE)``."""
        self.set_access(access, MemAccess.NONE, after=after)

    def close(self, after: After = None) -> None:
        """Unmap it (``cuMemUnmap``) once ``after`` has passed, see :class:`AddressRange`; idempotent."""
        if self._mapped.live:
            self.range._check_own()
            wait(after, self._door, accessing((self._mapped.rights,)))
            self.range._unmap((self._mapped,))

    def _entries(self) -> tuple[MappingEntry, ...]:
        if not self._mapped.live:
            raise ClosedError(f"{self!r} was unmapped")
        return (self._mapped,)

    def __enter__(self) -> Self:
        self._entries()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __eq__(self, other: object) -> bool:
        return self._mapped is other._mapped if isinstance(other, Mapping) else NotImplemented

    def __hash__(self) -> int:
        return hash(id(self._mapped))

    def __repr__(self) -> str:
        state = "" if self._mapped.live else ", unmapped"
        return f"<{type(self).__name__} of {self._mapped.memory!r} at offset {self._start}{state}>"


def _multiple(name: str, value: int) -> int:
    size = checked_size(name, value)
    if size % GRANULARITY:
        raise ValueError(f"{name}={value}: allowed are multiples of {GRANULARITY} bytes")
    return size


def _host_rights(mapped: MappingEntry) -> MemAccess:
    return max((flags for where, flags in mapped.rights.items() if where.on_host), default=MemAccess.NONE)


def _give_up(door: Door, address: int, nbytes: int, pieces: list[MappingEntry]) -> None:
    """Unmap and free a range that nobody holds any more. Called by finalisers: never raises.

    A multicast object that is involved goes first, then the memory that was bound to it, and the addresses last.
    """
    what = f"address range at {address:#x}"
    free = functools.partial(door.call, "cuMemAddressFree", address, nbytes)
    objects: list[AllocationState] = []
    members: list[AllocationState] = []
    # An object that unmaps for itself must not be kept here: it may have waited for this range only.
    for mapped in tuple(pieces):
        state = mapped.memory._state
        objects += state.bound_to
        members += (*state.members, *state.peers)
        if mapped.memory._take_mapping(address + mapped.offset, mapped.rights):
            objects.append(state)
            pieces.remove(mapped)

    def let_go() -> None:
        for mapped in pieces:
            mapped.memory._was_unmapped()
        pieces.clear()

    def unmap() -> None:
        undos: list[Callable[[], object]] = [
            functools.partial(door.call, "cuMemUnmap", address + mapped.offset, mapped.memory.nbytes)
            for mapped in pieces
        ]
        undos.append(let_go)
        if not members:
            undos.append(free)
        give_up(door, what, accessing(mapped.rights for mapped in pieces), undos)
        let_go()
        if members:
            once_gone(members, lambda: give_up(door, what, (), [free]))

    once_gone(objects, lambda: door.outside_captures(unmap))


def give_up(door: Door, what: str, devices: Iterable[int], undos: Iterable[Callable[[], object]]) -> None:
    """Make what gives things back, once ``devices`` have done their work, whatever fails. Never raises."""
    errors: list[CudaError] = []

    def attempt(call: Callable[..., object], *arguments: object) -> None:
        try:
            call(*arguments)
        except CudaError as error:
            errors.append(error)

    with contextlib.suppress(CudaError), door.relaxed():
        # Work may be queued that uses the memory, and unmapping under it is worse than a wait. Where the wait fails the
        # context is lost, and no work is left.
        attempt(wait, None, door, devices)
        for undo in undos:
            attempt(undo)
    if any(error.name not in _GONE for error in errors):
        warnings.warn(f"a dropped {what} could not be freed: {errors[0]}", ResourceWarning, stacklevel=2)
