"""Multicast objects: addresses behind which each device of a team has memory of its own (driver API section 6.16).

The object is the owner: it alone unbinds. A :class:`Binding` names one part that is bound. Whatever is dropped, and in
which order, the driver sees one order: unbind, unmap and release the object, release the memory that was bound, free
the addresses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from typing_extensions import Self

from streamalloc.core.allocation_properties import MulticastObjectProp
from streamalloc.core.arguments import check_device, door_of
from streamalloc.core.device import Device
from streamalloc.core.door import Door
from streamalloc.core.errors import (
    CudaError,
    IncompleteTeamError,
    NotSupportedError,
    refused,
    size_text,
    unsupported,
)
from streamalloc.core.fd import Fd
from streamalloc.core.html import Row, mib, place, table
from streamalloc.core.memory import Memory
from streamalloc.core.ownership import Closes
from streamalloc.core.properties import MemHandleType, MemLocation, checked_size
from streamalloc.driver import Driver
from streamalloc.driver.internal import cuda
from streamalloc.multicast.objects.bindable import check_member, member_of
from streamalloc.multicast.objects.bound_bytes import BindingEntry, BoundBytes
from streamalloc.vmm import PhysicalMemory
from streamalloc.vmm.internal import (
    GRANULARITY,
    Access,
    After,
    GenericAllocation,
    Kind,
    LoneMapping,
    Node,
    Rights,
    map_alone,
    mappings_text,
    rights_of,
    wait,
)

__all__ = ["Binding", "MulticastObject", "MulticastView"]


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

    __slots__ = ("_bound", "_complete", "_devices", "_prop", "_team")

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
            allowed = f"multiples of the {which}, {size_text(step)}; round_up=True rounds"
            raise ValueError(f"nbytes={nbytes}: allowed are {allowed}")
        self._open(door, prop, smallest)
        self._create("cuMulticastCreate", prop.to_driver())

    def _open(self, door: Door, prop: MulticastObjectProp, step: int) -> None:
        self._bound: list[BindingEntry] = []
        self._complete = False
        """Whether somebody said that all devices were added."""
        self._devices: list[Device] = []
        self._prop = prop
        self._granularity: int = step
        self._handle_types: MemHandleType = prop.handle_types
        self._team = Node(Kind.TEAM)
        self._team.given_up = True
        self._prepare(door, prop.size, Kind.OBJECT)
        self._node.allocations.order.relate(self._node, self._team)
        self._state.teams[self._team] = None

    def _open_handle(self, door: Door, prop: MulticastObjectProp, step: int, handle: Fd | int | bytes) -> None:
        self._open(door, prop, step)
        self._import(handle)

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
                raise ValueError(f"nbytes={nbytes}: allowed are multiples of the granularity, {size_text(step)}")
            imported = cls.__new__(cls)
            imported._open_handle(door, prop, step, handle)
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
        return tuple(Binding(self, entry) for entry in self._table())

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
        check_device("device", device, self._door)
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
            :class:`PhysicalMemory`, or memory that has an address: what is mapped by hand, in one chunk, or a buffer of
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
            chunks, of a device outside the team, or not shareable while the object is; something is bound there.
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
        if start % self._granularity:
            raise ValueError(
                f"offset={offset}: allowed are multiples of the granularity, {size_text(self._granularity)}"
            )
        if start + member.nbytes > self.nbytes:
            raise ValueError(f"offset={offset}: {size_text(member.nbytes)} end outside of {self!r}")
        ordinal = check_member(
            member, self._granularity, device, shareable=bool(self._handle_types) or self._state.imported
        )
        if self._all_here and ordinal not in [one.ordinal for one in self._devices]:
            raise ValueError(f"{memory!r}: device {ordinal} is not in the team of {self!r}, which has {self._named()}")
        for other in self._table():
            node = other.node
            if node.device == ordinal and node.offset < start + member.nbytes and start < other.stop:
                taken = f"bytes {node.offset} to {other.stop} of device {ordinal}"
                raise ValueError(f"offset={offset}: {taken} are bound already")
        node = BoundBytes(self._node, member, ordinal, start)
        entry = BindingEntry(member, node)
        name, arguments = member.call(
            raw, ordinal, start, versioned=device is not None and member.kept.location.on_host
        )
        try:
            # In the table before it is bound, so that an interrupt between the two loses nothing.
            self._bound.append(entry)
            node.link(self._team, member.kept)
            self._door.call(name, *arguments)
            node.sure = True
        except BaseException as first:
            if isinstance(first, CudaError) and first.call == name:
                node.was_refused()
            self._unbind(entry, ())
            raise
        return Binding(self, entry)

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
        return MulticastView(*map_alone(self, max(self._granularity, GRANULARITY), rights))

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
        if self.closed:
            return
        # What dropped ranges have mapped is the object's to unmap.
        self._node.allocations.work()
        if self.mapping_count:
            raise ValueError(f"{self!r} has {mappings_text(self.mapping_count)}: unmap before it is closed")
        self._end(after)

    # -- for the package of virtual memory -------------------------------------------------------------------

    @property
    def _mark(self) -> str:
        return "M"

    def _check_mappable(self) -> None:
        self._checked_raw()
        self._check_complete("map it")

    def _check_access(self, rights: Rights) -> None:
        for where, flags in rights.items():
            if flags and where.on_host:
                raise refused(NotSupportedError, "cuMemSetAccess", "the host cannot use a multicast object")
            if flags and self._all_here and where not in [device.location for device in self._devices]:
                raise ValueError(f"access: {where} is not in the team of {self!r}, which has {self._named()}")

    @property
    def _unreadable(self) -> str:
        return (
            "ordinary reads of a multicast object mean nothing: read what is bound, or reduce with multimem.ld_reduce"
        )

    # -- the end ---------------------------------------------------------------------------------------------

    def _table(self) -> list[BindingEntry]:
        """What is bound."""
        self._bound = [entry for entry in self._bound if entry.live]
        return self._bound

    def _wait(self, after: After) -> None:
        """Wait for the work that may use the object: what it reaches goes away at once."""
        wait(after, self._door, {device for node in self._mappings() for device in node.users})

    def _mappings(self) -> list[Any]:
        return self._node.allocations.order.before(self._node, Kind.OBJECT_MAPPING)

    def _unbind(self, entry: BindingEntry, after: After) -> None:
        self._wait(after)
        node = entry.node
        try:
            self._node.allocations.end(node)
        finally:
            if node.gone:
                node.part(self._team)
                self._table()
                self._node.allocations.settle()

    def _end(self, after: After) -> None:
        self._wait(after)
        allocations = self._node.allocations
        states = [entry.node.state for entry in self._table()]
        for entry in list(self._bound):
            allocations.end(entry.node)
        for mapping in self._mappings():
            # Its work was waited for already.
            for work in allocations.order.before(mapping, Kind.QUEUED_WORK):
                allocations.order.unrelate(work, mapping)
            allocations.end(mapping)
        try:
            allocations.end(self._node)
        finally:
            self._table()
            # Dropped ranges that map some of it wait for all of the memory.
            if self._node.gone and not allocations.order.after(self._team, Kind.RESERVATION):
                self._team.gone = True
                allocations.order.cut(self._team)
                for state in states:
                    if state is not None:
                        state.teams.pop(self._team, None)

    # -- rules -----------------------------------------------------------------------------------------------

    @property
    def _all_here(self) -> bool:
        return len(self._devices) == self.num_devices

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

    def _leave(self, *, failed: bool) -> None:
        self.end()

    def end(self, after: After = None) -> None:
        """As :meth:`close`, but unmap what maps it, too."""
        if not self.closed:
            self._node.allocations.work()
            self._end(after)

    def _about(self) -> Iterator[Row]:
        yield "size", mib(self.nbytes)
        yield "handle", f"{self.handle:#x}"
        here = ", ".join(place(device.location) for device in self.devices) or "none"
        yield "team", f"{self.num_devices} devices, of which added here: {here}"
        yield "mapped", f"in {self.mapping_count} places"
        bound = [(place(one.device.location), mib(one.offset), mib(one.nbytes)) for one in self.bindings]
        if bound:
            yield "bound", table(("memory of", "at", "size"), bound)

    def __repr__(self) -> str:
        if not hasattr(self, "_node"):
            return f"<{type(self).__name__} that could not be made>"
        team = f"{len(self._devices)} of {self.num_devices} devices added here"
        bound = f", {len(self._table())} bindings" if self._table() else ""
        return f"<{type(self).__name__} of {size_text(self.nbytes)}, {team}{bound}, {self._said_of_handle()}>"


class Binding(Closes):
    """Memory of one device behind the addresses of a multicast object: made by :meth:`MulticastObject.bind`.

    Dropping it unbinds nothing, for the object owns the binding; :meth:`close` unbinds.
    """

    __slots__ = ("_entry", "multicast")

    def __init__(self, multicast: MulticastObject, entry: BindingEntry) -> None:
        self.multicast: MulticastObject = multicast
        """The object that the memory is bound to."""
        self._entry = entry

    @property
    def memory(self) -> PhysicalMemory | Memory:
        """The memory; of what was mapped by hand, the physical memory behind it."""
        return self._entry.member.kept

    @property
    def device(self) -> Device:
        """The device that it is bound for."""
        return Device(self._entry.node.device, driver=self.multicast.driver)

    @property
    def offset(self) -> int:
        """Where it is bound in the object, in bytes."""
        return self._entry.node.offset

    @property
    def memory_offset(self) -> int:
        """Where the part that is bound begins in :attr:`memory`, in bytes."""
        return self._entry.member.offset

    @property
    def nbytes(self) -> int:
        """How many bytes are bound."""
        return self._entry.node.nbytes

    @property
    def closed(self) -> bool:
        """Whether it was unbound."""
        return not self._entry.live

    def close(self, after: After = None) -> None:
        """Unbind it (``cuMulticastUnbind``), once ``after`` has passed; idempotent.

        Unbinding is not in stream order, as unmapping is not; see :class:`AddressRange`. By default all work of the
        devices that have access to mappings of the object is waited for.
        """
        if self._entry.live:
            self.multicast._unbind(self._entry, after)

    def __eq__(self, other: object) -> bool:
        return self._entry is other._entry if isinstance(other, Binding) else NotImplemented

    def __hash__(self) -> int:
        return hash(id(self._entry))

    def __repr__(self) -> str:
        state = "" if self._entry.live else ", unbound"
        part = f"{size_text(self.nbytes)} of device {self._entry.node.device} at offset {self.offset}"
        return f"<Binding of {part} of {self.multicast!r}{state}>"


class MulticastView(LoneMapping):
    """A multicast object mapped at addresses of its own: made by :meth:`MulticastObject.map`.

    :meth:`fill` and :meth:`copy_from` write to the memory of every device. There is nothing to read: ordinary loads are
    not defined here, so that :meth:`copy_to` and the interfaces to other libraries refuse; kernels take
    :attr:`address`, and use ``multimem`` instructions. A kernel that also uses the memory by addresses of its own needs
    ``fence.proxy.alias`` in between, see :class:`MulticastObject`.
    """

    __slots__ = ()


_POSIX = MemHandleType.POSIX_FILE_DESCRIPTOR


def _granularity_of(door: Door, prop: MulticastObjectProp, *, recommended: bool = False) -> int:
    # MINIMUM is 0, RECOMMENDED 1
    which = cuda.CUmulticastGranularity_flags(int(recommended))
    return int(door.call("cuMulticastGetGranularity", prop.to_driver(), which))


def _check_supported(door: Door) -> None:
    """Refuse where no device supports multicast objects, before the driver is asked for one."""
    devices = Device.all(door.driver)
    if not [device for device in devices if device.attribute("MULTICAST_SUPPORTED")]:
        count = len(devices)
        raise _unsupported("cuMulticastCreate", f"{count} device{'' if count == 1 else 's'} that cannot")


def _unsupported(call: str, found: str) -> NotSupportedError:
    needed = "at least two, joined by NVSwitch, all visible to this process, and a running fabric manager"
    return unsupported(call, f"GPUs that support multicast objects: {needed}", found)
