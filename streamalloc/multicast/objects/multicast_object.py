"""Multicast objects: addresses behind which each device of a team has memory of its own (driver API section 6.16).

The object is the owner: it alone unbinds. A :class:`Binding` names one piece that is bound. Whatever is dropped, and in
which order, the driver sees one order: unbind, unmap and release the object, release the memory that was bound, free
the addresses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType

from typing_extensions import Self

from streamalloc.core.arguments import door_of
from streamalloc.core.device import Device
from streamalloc.core.door import Door
from streamalloc.core.errors import CudaError, IncompleteTeamError, NotSupportedError, undo_all, undoing
from streamalloc.core.fd import Fd
from streamalloc.core.memory import Memory
from streamalloc.core.ownership import Closes
from streamalloc.core.properties import MemAccess, MemHandleType, MemLocation, MulticastObjectProp, checked_size
from streamalloc.driver import Driver
from streamalloc.driver.internal import cuda
from streamalloc.multicast.objects.bindable import Member, check_member, member_of
from streamalloc.vmm.access import Access, Rights, rights_of
from streamalloc.vmm.address_range import GRANULARITY, AddressRange, Mapping, MappingEntry, give_up
from streamalloc.vmm.generic_handle import GenericAllocation, import_handle
from streamalloc.vmm.physical_memory import PhysicalMemory
from streamalloc.vmm.waiting import After, accessing, wait

__all__ = ["Binding", "MulticastObject", "MulticastView"]

_Granularity = cuda.CUmulticastGranularity_flags

# What is bound must not be freed before it is unbound, in whatever order the garbage collector ends a cycle that has
# all of it: so it is no part of any cycle.
_anchored: set[BindingEntry] = set()


class BindingEntry:
    """One piece of memory as its multicast object keeps it."""

    __slots__ = ("device", "live", "member", "nbytes", "offset")

    def __init__(self, member: Member, device: int, offset: int, nbytes: int) -> None:
        self.member = member
        self.device = device
        self.offset = offset
        self.nbytes = nbytes
        self.live = True

    @property
    def stop(self) -> int:
        return self.offset + self.nbytes


class MulticastObject(GenericAllocation):
    """A team of devices and the memory that one address stands for on all of them (``cuMulticastCreate``).

    To be done in this order: every device is added; memory of each is bound; the object is mapped, by :meth:`map` or
    into an :class:`~streamalloc.vmm.AddressRange`. A write to the mapping then reaches the memory of every device, and
    the ``multimem`` instructions of PTX reduce over it. Ordinary reads of the mapping mean nothing.

    In several processes, one makes the object and exports it, the others import it (:meth:`from_handle`); each adds
    devices and binds memory of its own. As long as a device is missing the driver does not refuse to bind and to map
    but blocks, so this object refuses; see :meth:`team_complete`.

    **Aliasing.** The mapping of the object and those of the memory bound to it are different addresses of the same
    bytes, and a device does not order accesses by one with those by the other within a kernel: put
    ``fence.proxy.alias`` between them. Between operations of a stream nothing is needed.

    **Order of the end.** Leaving a ``with`` block, and dropping the object, unbinds, then unmaps, then releases it.
    Memory that was bound is not released before that, even where it was closed or dropped earlier. An address range
    that was dropped without being closed, and that maps the object or memory bound to it, keeps its addresses until
    object and memory are gone.

    Not to be used from several threads at once.

    Parameters
    ----------
    nbytes
        Size in bytes: how much of each device can be bound. A multiple of :meth:`granularity`.
    num_devices
        How many devices the team has, in all processes.
    handle_types
        How the object can be shared with other processes. Only memory that can be shared can be bound then.
    round_up
        Round ``nbytes`` up to the granularity instead of refusing it.
    recommended
        Take the granularity with the best performance, not the smallest.
    driver
        The driver to use.

    Raises
    ------
    TypeError, ValueError
        An argument breaks one of these rules.
    NotSupportedError
        No device that is visible supports multicast objects.
    NotPermittedError
        Fabric handles were asked for and this user may open no IMEX channel.
    OutOfMemoryError
        The switches have no room for another object.
    SystemNotReadyError
        The fabric manager is not running.
    """

    __slots__ = ("_bound", "_complete", "_devices", "_dropped", "_loose", "_prop", "_ranges", "_step", "_views")

    _bound: list[BindingEntry]
    _complete: bool
    """Whether somebody said that all devices were added."""
    _devices: list[Device]
    _dropped: bool
    """Whether the finaliser has run and waits for a mapping to go."""
    _loose: list[BindingEntry]
    """What the driver has unbound already, and what is still held."""
    _prop: MulticastObjectProp
    _ranges: weakref.WeakSet[AddressRange]
    """The address ranges that it was mapped into."""
    _step: int
    _views: list[tuple[int, Rights]]
    """Mappings that dropped ranges have left: address and rights."""

    def __init__(
        self,
        nbytes: int,
        num_devices: int,
        *,
        handle_types: MemHandleType = MemHandleType.NONE,
        round_up: bool = False,
        recommended: bool = False,
        driver: Driver | None = None,
    ) -> None:
        prop = MulticastObjectProp(num_devices, nbytes, handle_types)
        door = door_of(None, driver)
        _check_supported(door)
        smallest = _granularity_of(door, prop)
        step = _granularity_of(door, prop, recommended=True) if recommended else smallest
        if round_up:
            prop = dataclasses.replace(prop, size=-(-prop.size // step) * step)
        elif prop.size % step:
            which = "recommended granularity" if recommended else "granularity"
            raise ValueError(
                f"nbytes={nbytes}: allowed are multiples of the {which}, {step} bytes; round_up=True rounds"
            )
        self._open(door, prop, smallest)
        self._raw = door.call("cuMulticastCreate", prop.to_driver())
        self._state.name(int(self._raw))

    def _open(self, door: Door, prop: MulticastObjectProp, step: int) -> None:
        self._bound = []
        self._complete = False
        self._devices = []
        self._dropped = False
        self._loose = []
        self._prop = prop
        self._ranges = weakref.WeakSet()
        self._step = step
        self._views = []
        self._hold(door, prop.size, None)
        self._state.multicast = True

    @staticmethod
    def granularity(
        num_devices: int,
        nbytes: int = GRANULARITY,
        *,
        handle_types: MemHandleType = MemHandleType.NONE,
        recommended: bool = False,
        driver: Driver | None = None,
    ) -> int:
        """What sizes, offsets and addresses must be a multiple of, in bytes (``cuMulticastGetGranularity``).

        ``recommended`` asks for the granularity with the best performance instead of the smallest.
        """
        prop = MulticastObjectProp(num_devices, nbytes, handle_types)
        return _granularity_of(door_of(None, driver), prop, recommended=recommended)

    @classmethod
    def from_handle(
        cls,
        handle: Fd | int | bytes,
        nbytes: int,
        num_devices: int,
        *,
        handle_types: MemHandleType | None = None,
        driver: Driver | None = None,
    ) -> Self:
        """The object that another process has exported (``cuMemImportFromShareableHandle``).

        Parameters
        ----------
        handle
            What :meth:`export` gave there. An :class:`Fd` is this call's from now on, whether or not it succeeds; a
            descriptor given as a number stays the caller's.
        nbytes, num_devices
            As the object was made: the driver does not tell them.
        handle_types
            As it was made; by default the type of ``handle``.
        driver
            The driver to use.

        Raises
        ------
        TypeError, ValueError
            The arguments describe no multicast object, or this is no handle.
        InvalidValueError, CudaError
            The driver refuses the handle.
        """
        try:
            kind = MemHandleType.FABRIC if isinstance(handle, (bytes, bytearray)) else _POSIX
            prop = MulticastObjectProp(num_devices, nbytes, kind if handle_types is None else handle_types)
            door = door_of(None, driver)
            _check_supported(door)
            step = _granularity_of(door, prop)
            if prop.size % step:
                raise ValueError(f"nbytes={nbytes}: allowed are multiples of the granularity, {step} bytes")
            imported = cls.__new__(cls)
            imported._open(door, prop, step)
            imported._raw = import_handle(door, handle)
            imported._state.name(int(imported._raw))
            imported._state.imported = True
            return imported
        finally:
            if isinstance(handle, Fd):
                handle.close()

    @property
    def properties(self) -> MulticastObjectProp:
        """What it was made with."""
        return self._prop

    @property
    def num_devices(self) -> int:
        """How many devices the team has, in all processes."""
        return self._prop.num_devices

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that were added by this object; other processes may have added others."""
        return tuple(self._devices)

    @property
    def complete(self) -> bool:
        """Whether all devices are known to be added: by this object, or as :meth:`team_complete` has said."""
        return self._complete or self._all_here

    @property
    def bindings(self) -> tuple[Binding, ...]:
        """What is bound by this object."""
        return tuple(Binding(self, bound) for bound in self._bound)

    @property
    def location(self) -> MemLocation:
        """NONE: the memory is in several places."""
        return MemLocation.none()

    def add_device(self, device: Device) -> None:
        """Make a device a member of the team (``cuMulticastAddDevice``), for as long as the object lives.

        Raises
        ------
        TypeError, ValueError
            It is no device, one of another driver, was added already, or the team has all its devices.
        NotSupportedError
            The device does not support multicast objects.
        InvalidDeviceError
            The device is not joined by NVLink to the others of the team.
        """
        raw = self._checked_raw()
        if not isinstance(device, Device):
            raise TypeError(f"device must be a Device, not {type(device).__name__} ({device!r})")
        if device._door is not self._door:
            raise ValueError(f"device={device!r} belongs to another driver than {self!r}")
        if device in self._devices:
            raise ValueError(f"device={device!r} was added already: a team has each device once")
        if self._all_here:
            raise ValueError(f"device={device!r} is one too many: {self!r} was made for {self.num_devices}")
        if not device.attribute("MULTICAST_SUPPORTED"):
            raise _unsupported("cuMulticastAddDevice", f"{device!r}")
        self._door.call("cuMulticastAddDevice", raw, device.ordinal)
        self._devices.append(device)

    def team_complete(self) -> None:
        """Say that all devices were added, by this process or others.

        Where other processes add devices, this object cannot know. Call it after a barrier which each process reaches
        once it has added its devices, and only where all of them have succeeded: otherwise whoever binds or maps hangs.
        """
        self._checked_raw()
        self._complete = True

    def bind(
        self,
        memory: PhysicalMemory | Memory,
        offset: int = 0,
        *,
        memory_offset: int = 0,
        nbytes: int | None = None,
        device: Device | None = None,
    ) -> Binding:
        """Put memory behind the object's addresses on one device (``cuMulticastBindMem``, ``cuMulticastBindAddr``).

        The object keeps the memory until it is unbound. It may be closed meanwhile; a buffer of a pool must not be
        freed.

        Parameters
        ----------
        memory
            :class:`PhysicalMemory`, or memory that has an address: what is mapped by hand, in one piece, or a buffer of
            a pool.
        offset
            Where in the object, in bytes.
        memory_offset, nbytes
            Which part of the memory; by default all of it. Like ``offset`` a multiple of the granularity.
        device
            For which device. By default the one that has the memory, and no other can be said for device memory; for
            host memory, which is bound by ``cuMulticastBindMem_v2``, the device that is nearest to its NUMA node.

        Raises
        ------
        IncompleteTeamError
            Not all devices were added: the driver would block.
        TypeError, ValueError
            An offset, a size or the address is not aligned or outside; the memory is of another driver, in several
            pieces, of a device outside the team, or not shareable while the object is; something is bound there.
        ClosedError
            The object or the memory was closed.
        OutOfMemoryError
            The switches have no room left.
        SystemNotReadyError
            The fabric manager is not running, or the system is in a state that is not valid.
        """
        raw = self._checked_raw()
        member = member_of(memory, memory_offset, nbytes, self._door)
        self._check_complete("bind memory")
        start = checked_size("offset", offset)
        if start % self._step:
            raise ValueError(f"offset={offset}: allowed are multiples of the granularity, {self._step} bytes")
        if start + member.nbytes > self.nbytes:
            raise ValueError(f"offset={offset}: {member.nbytes} bytes end outside of {self!r}")
        ordinal = check_member(member, self._step, device, shareable=self._must_be_shareable)
        if self._all_here and all(ordinal != one.ordinal for one in self._devices):
            raise ValueError(f"{memory!r}: device {ordinal} is not in the team of {self!r}, which has {self._named()}")
        for other in self._bound:
            if other.device == ordinal and other.offset < start + member.nbytes and start < other.stop:
                raise ValueError(
                    f"offset={offset}: bytes {other.offset} to {other.stop} of device {ordinal} are bound already"
                )
        bound = BindingEntry(member, ordinal, start, member.nbytes)
        # In the table before it is bound, so that nothing can come between and lose it.
        self._bound.append(bound)
        _anchored.add(bound)
        try:
            name, arguments = member.call(raw, ordinal, start, versioned=device is not None and member.on_host)
            self._door.call(name, *arguments)
        except BaseException:
            self._bound.remove(bound)
            _anchored.discard(bound)
            raise
        if member.state is not None:
            self._state.bind(member.state)
        return Binding(self, bound)

    def map(self, *, access: Access = None) -> MulticastView:
        """Map the whole object at addresses of its own (``cuMemAddressReserve``, ``cuMemMap``, ``cuMemSetAccess``).

        Parameters
        ----------
        access
            Who may use it, as for :meth:`AddressRange.map`; devices of the team.

        Raises
        ------
        IncompleteTeamError
            Not all devices were added: the driver would block.
        ValueError
            A device is not in the team.
        AddressSpaceError
            The process has no such range of addresses left.
        """
        self._check_mappable()
        rights = rights_of(access, self._door)
        self._check_access(rights)
        size = -(-self.nbytes // GRANULARITY) * GRANULARITY
        addresses = AddressRange(size, alignment=max(self._step, GRANULARITY), driver=self.driver)
        with undoing(addresses.close):
            mapping = addresses.map(self, access=rights)
        addresses._owned = True
        return MulticastView(addresses, mapping._mapped)

    def close(self, after: After = None) -> None:
        """Unbind what is bound by this object (``cuMulticastUnbind``) and release it (``cuMemRelease``); idempotent.

        Parameters
        ----------
        after
            What must have passed before, see :class:`AddressRange`: by default all work of the devices that had access
            to mappings which are left.

        Raises
        ------
        ValueError
            It is mapped: close the views, or unmap it from the ranges, first. Leaving a ``with`` block does both.
        """
        if self._raw is None:
            return
        count = self.mapping_count
        if count:
            raise ValueError(f"{self!r} has {count} mapping{'' if count == 1 else 's'}: unmap before it is closed")
        self._end((), after)

    # -- for the package of virtual memory -------------------------------------------------------------------

    @property
    def _handle_types(self) -> MemHandleType:
        return self._prop.handle_types

    @property
    def _granularity(self) -> int:
        return self._step

    @property
    def _mark(self) -> str:
        return "M"

    def _check_mappable(self) -> None:
        self._checked_raw()
        self._check_complete("map it")

    def _check_access(self, rights: Rights) -> None:
        for where, flags in rights.items():
            if flags and where.on_host:
                raise NotSupportedError(
                    "CUDA_ERROR_NOT_SUPPORTED", 801, "cuMemSetAccess", "the host cannot use a multicast object"
                )
            if flags and self._all_here and all(where != device.location for device in self._devices):
                raise ValueError(f"access: {where} is not in the team of {self!r}, which has {self._named()}")

    @property
    def _unreadable(self) -> str:
        return (
            "ordinary reads by the addresses of a multicast object mean nothing: read the memory that is bound, or "
            "reduce over all of it with multimem.ld_reduce in a kernel"
        )

    def _was_mapped(self, range: AddressRange) -> None:
        super()._was_mapped(range)
        self._ranges.add(range)

    def _was_unmapped(self) -> None:
        super()._was_unmapped()
        if self._dropped:
            self._drop()

    def _take_mapping(self, address: int, rights: Rights) -> bool:
        self._views.append((address, rights))
        self._was_unmapped()
        return True

    # -- the end ---------------------------------------------------------------------------------------------

    def _unbind(self, bound: BindingEntry) -> None:
        """Tell the driver; :meth:`_let_go` then drops the memory."""
        self._door.call("cuMulticastUnbind", self._raw, bound.device, bound.offset, bound.nbytes)
        bound.live = False
        self._bound.remove(bound)
        self._loose.append(bound)

    def _let_go(self) -> None:
        """Let go of the memory that is not bound any more."""

        def undos() -> Iterator[Callable[[], None]]:
            while self._loose:
                bound = self._loose.pop()
                _anchored.discard(bound)
                if bound.member.state is not None:
                    yield functools.partial(self._state.unbind, bound.member.state)

        undo_all(undos())

    def _places(self) -> list[tuple[AddressRange, MappingEntry]]:
        return [(range, mapped) for range in self._ranges for mapped in range._at.values() if mapped.memory is self]

    def _wait(self, after: After) -> None:
        """Wait for the work that may use the object: what it reaches goes away at once."""
        rights = [*(mapped.rights for _, mapped in self._places()), *(rights for _, rights in self._views)]
        wait(after, self._door, accessing(rights))

    def _end(self, places: list[tuple[AddressRange, MappingEntry]] | tuple[()], after: After) -> None:
        self._wait(after)
        for bound in tuple(self._bound):
            self._unbind(bound)
        for range, mapped in places:
            range._unmap((mapped,))
        while self._views:
            self._door.call("cuMemUnmap", self._views[-1][0], self.nbytes)
            self._views.pop()
        self._release()

    def _release(self) -> None:
        self._door.call("cuMemRelease", self._raw)
        self._raw = None
        try:
            self._let_go()
        finally:
            self._state.released()

    def _drop(self) -> None:
        # In a cycle the finalisers of the ranges that map the object may come later.
        self._dropped = True
        if not self.mapping_count:
            self._door.outside_captures(self._finish)

    def _finish(self) -> None:
        """The end for the finaliser: never raises."""
        raw, self._raw = self._raw, None
        call = self._door.call
        undos: list[Callable[[], object]] = [
            functools.partial(call, "cuMulticastUnbind", raw, bound.device, bound.offset, bound.nbytes)
            for bound in self._bound
        ]
        undos += [functools.partial(call, "cuMemUnmap", address, self.nbytes) for address, _ in self._views]
        undos.append(functools.partial(call, "cuMemRelease", raw))
        give_up(self._door, "multicast object", accessing(rights for _, rights in self._views), undos)
        for bound in self._bound:
            bound.live = False
        self._loose += self._bound
        self._bound.clear()
        self._views.clear()
        with contextlib.suppress(CudaError):  # memory that was closed before has a finaliser of its own
            self._let_go()
        self._state.released()

    # -- rules -----------------------------------------------------------------------------------------------

    @property
    def _all_here(self) -> bool:
        return len(self._devices) == self.num_devices

    @property
    def _must_be_shareable(self) -> bool:
        return bool(self._prop.handle_types) or self._state.imported

    def _check_complete(self, purpose: str) -> None:
        if not self.complete:
            missing = self.num_devices - len(self._devices)
            raise IncompleteTeamError(
                f"the driver would block: {missing} of the {self.num_devices} devices of {self!r} were not added here. "
                f"Add them before you {purpose}; where other processes add them, call team_complete() once they have"
            )

    def _named(self) -> str:
        return ", ".join(f"device {device.ordinal}" for device in self._devices)

    def __enter__(self) -> Self:
        self._checked_raw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._raw is not None:
            self._end(self._places(), None)

    def __repr__(self) -> str:
        if not hasattr(self, "nbytes"):
            return f"<{type(self).__name__} that could not be made>"
        team = f"{len(self._devices)} of {self.num_devices} devices added here"
        bound = f", {len(self._bound)} bindings" if self._bound else ""
        return f"<{type(self).__name__} of {self.nbytes} bytes, {team}{bound}, {self._said_of_handle()}>"


class Binding(Closes):
    """Memory of one device behind the addresses of a multicast object: made by :meth:`MulticastObject.bind`.

    Dropping it unbinds nothing, for the object owns the binding; :meth:`close` unbinds.
    """

    __slots__ = ("_bound", "multicast")

    multicast: MulticastObject
    """The object that the memory is bound to."""

    def __init__(self, multicast: MulticastObject, bound: BindingEntry) -> None:
        self.multicast = multicast
        self._bound = bound

    @property
    def memory(self) -> PhysicalMemory | Memory:
        """The memory; of what was mapped by hand, the physical memory behind it."""
        return self._bound.member.kept

    @property
    def device(self) -> Device:
        """The device that it is bound for."""
        return Device(self._bound.device, driver=self.multicast.driver)

    @property
    def offset(self) -> int:
        """Where it is bound in the object, in bytes."""
        return self._bound.offset

    @property
    def memory_offset(self) -> int:
        """Where the part that is bound begins in :attr:`memory`, in bytes."""
        return self._bound.member.offset

    @property
    def nbytes(self) -> int:
        """How many bytes are bound."""
        return self._bound.nbytes

    @property
    def closed(self) -> bool:
        """Whether it was unbound."""
        return not self._bound.live

    def close(self, after: After = None) -> None:
        """Unbind it (``cuMulticastUnbind``), once ``after`` has passed; idempotent.

        Unbinding is not in stream order, as unmapping is not; see :class:`AddressRange`. By default all work of the
        devices that have access to mappings of the object is waited for.
        """
        if self._bound.live:
            self.multicast._wait(after)
            self.multicast._unbind(self._bound)
            self.multicast._let_go()

    def unbind(self, after: After = None) -> None:
        """The same as :meth:`close`."""
        self.close(after)

    def __eq__(self, other: object) -> bool:
        return self._bound is other._bound if isinstance(other, Binding) else NotImplemented

    def __hash__(self) -> int:
        return hash(id(self._bound))

    def __repr__(self) -> str:
        state = "" if self._bound.live else ", unbound"
        return (
            f"<Binding of {self.nbytes} bytes of device {self._bound.device} at offset {self.offset} of "
            f"{self.multicast!r}{state}>"
        )


class MulticastView(Mapping):
    """A multicast object mapped at addresses of its own: made by :meth:`MulticastObject.map`.

    :meth:`fill` and :meth:`copy_from` write to the memory of every device. There is nothing to read: ordinary loads are
    not defined here, so that :meth:`copy_to` and the interfaces to other libraries refuse; kernels take
    :attr:`address`, and use ``multimem`` instructions. A kernel that also uses the memory by addresses of its own needs
    ``fence.proxy.alias`` in between, see :class:`MulticastObject`.
    """

    __slots__ = ()

    def set_access(self, access: Access, flags: MemAccess = MemAccess.READWRITE, *, after: After = None) -> None:
        """Set who may use it (``cuMemSetAccess``); see :meth:`AddressRange.set_access`."""
        rights = rights_of(access, self._door, flags)
        pieces = self._entries()
        if rights:
            self.range._set_rights(pieces, rights, after)

    def close(self, after: After = None) -> None:
        """Unmap it and give the addresses back, once ``after`` has passed, see :class:`AddressRange`; idempotent."""
        if self.range.closed:
            return
        if self._mapped.live:
            wait(after, self._door, accessing((self._mapped.rights,)))
            self.range._unmap((self._mapped,))
        self.range._free()


_POSIX = MemHandleType.POSIX_FILE_DESCRIPTOR


def _granularity_of(door: Door, prop: MulticastObjectProp, *, recommended: bool = False) -> int:
    which = (
        _Granularity.CU_MULTICAST_GRANULARITY_RECOMMENDED
        if recommended
        else _Granularity.CU_MULTICAST_GRANULARITY_MINIMUM
    )
    return int(door.call("cuMulticastGetGranularity", prop.to_driver(), which))


def _check_supported(door: Door) -> None:
    """Refuse where no device supports multicast objects, before the driver is asked for one."""
    devices = Device.all(door.driver)
    if not any(device.attribute("MULTICAST_SUPPORTED") for device in devices):
        count = len(devices)
        raise _unsupported("cuMulticastCreate", f"{count} device{'' if count == 1 else 's'} that cannot")


def _unsupported(call: str, found: str) -> NotSupportedError:
    return NotSupportedError(
        "CUDA_ERROR_NOT_SUPPORTED",
        801,
        call,
        "needs GPUs that support multicast objects: at least two, joined by NVSwitch, all visible to this process, and "
        f"a running fabric manager; found {found}",
    )
