"""Multicast objects: a write to the mapping of such an object reaches memory of each device of a team.

A :class:`MulticastObject` owns its bindings, and a :class:`Binding` refers to one of them. The order of releases is:
unbind the memory, unmap the object, release the object, release the memory, free the addresses.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import Self

from streamalloc.core.errors import (
    CudaError,
    IncompleteTeamError,
    NotSupportedError,
    refused,
    size_text,
    undoing,
    unsupported,
)
from streamalloc.core.internal import Device, Fd, Memory, check_device, session_for
from streamalloc.core.properties import (
    MemHandleType,
    MemLocation,
    checked_number,
    checked_size,
    checked_type,
    refuse_windows,
)
from streamalloc.core.resource import Closes
from streamalloc.core.session import Session
from streamalloc.driver import Driver
from streamalloc.driver.internal import cuda
from streamalloc.formats.html import Row, mib, place, table
from streamalloc.formats.sizes import counted
from streamalloc.multicast.objects.bindings import BindingNode, BindSource, check_multiple
from streamalloc.vmm import PhysicalMemory
from streamalloc.vmm.internal import Access, After, GenericAllocation, LoneMapping, Rights, rights_of, wait_for_users


@dataclass(frozen=True, slots=True)
class MulticastObjectProp:
    """Properties of a multicast object (``CUmulticastObjectProp``): the value of
    :attr:`multicast.MulticastObject.properties`.

    Attributes
    ----------
    num_devices
        Number of devices in the team, at least 1.
    size
        Bytes that can be bound for each device.
    handle_types
        Handle types for export to other processes.
    flags
        Must be 0.

    Raises
    ------
    TypeError
        A number is no integer, or ``handle_types`` is no :class:`MemHandleType`.
    ValueError
        ``num_devices`` or ``size`` is less than 1, a handle type exists only on Windows, or ``flags`` is not 0.
    """

    num_devices: int
    size: int
    handle_types: MemHandleType = MemHandleType.NONE
    flags: int = 0

    def __post_init__(self) -> None:
        if checked_number("num_devices", self.num_devices) < 1:
            raise ValueError(f"num_devices={self.num_devices}: a team has at least one device")
        if checked_number("size", self.size) < 1:
            raise ValueError("size=0: a multicast object has at least one byte")
        checked_type("handle_types", self.handle_types, MemHandleType)
        refuse_windows("handle_types", self.handle_types)
        if self.flags != 0:
            raise ValueError(f"flags={self.flags!r}: must be 0")

    def to_driver(self) -> Any:
        """Return these properties as the driver's struct, ``CUmulticastObjectProp``."""
        struct = cuda.CUmulticastObjectProp()
        struct.numDevices = self.num_devices
        struct.size = self.size
        struct.handleTypes = int(self.handle_types)
        struct.flags = self.flags
        return struct

    @classmethod
    def from_driver(cls, struct: Any) -> Self:
        """Return the properties in ``struct``, a ``CUmulticastObjectProp``. Raises ValueError if they are invalid."""
        return cls(int(struct.numDevices), int(struct.size), MemHandleType(int(struct.handleTypes)), int(struct.flags))


class MulticastObject(GenericAllocation):
    """Create a multicast object for a team of devices (``cuMulticastCreate``).

    Use it in this order:

    1. Add every device of the team (:meth:`add_device`).
    2. Bind memory of each device (:meth:`bind`).
    3. Map the object: :meth:`map`, or :meth:`streamalloc.vmm.AddressRange.map`.

    A write to the mapping reaches the memory of every device. PTX's ``multimem`` instructions reduce over the memory of
    all devices. Ordinary reads of the mapping have undefined results. ::

        with MulticastObject(2 << 20, len(devices)) as team:
            for device in devices:
                team.add_device(device)
            for device in devices:
                team.bind(PhysicalMemory(device, 2 << 20))
            view = team.map(access=devices)
            view.fill(7, stream)    # writes 2 MiB on every device

    **Several processes.** One process creates the object and exports it (:meth:`export`). The other processes import
    the object (:meth:`from_handle`). Each process adds its devices and binds its memory. While a device is missing, the
    driver would block in bind and map calls, so this class raises :class:`IncompleteTeamError` instead; see
    :meth:`mark_complete`.

    **Aliasing.** The object's mapping and the bound memory's own mapping give the same bytes two addresses. Within a
    kernel, put ``fence.proxy.alias`` between accesses by the two addresses. Separate operations of one stream need no
    fence.

    **Release order.** The end of a ``with`` block unbinds the memory, and unmaps and releases the object. The same
    happens if the object is dropped. Bound memory is released after the object, even if the memory was closed earlier.
    If a dropped address range has mappings of the object or its bound memory, the addresses stay reserved until object
    and memory are released. After the release, methods that need the object raise ClosedError.

    Not thread-safe: call its methods from one thread at a time.

    Parameters
    ----------
    nbytes
        Size in bytes that can be bound on each device; a multiple of :meth:`granularity`.
    num_devices
        Number of devices in the team, over all processes.
    handle_types
        Handle types for export to other processes. If set, only shareable memory can be bound.
    round_up
        Whether to round ``nbytes`` up to a multiple of the granularity.
    recommended
        Whether to use the granularity that the driver recommends for performance, rather than the minimum.
    driver
        The driver to use; default: :func:`streamalloc.driver.default`.

    Raises
    ------
    TypeError
        ``nbytes``, ``num_devices`` or ``handle_types`` has a wrong type.
    ValueError
        ``nbytes`` is 0 or, without ``round_up``, no multiple of the granularity. Or ``num_devices`` is less than 1, or
        a handle type exists only on Windows.
    NotSupportedError
        No visible device supports multicast objects.
    NotPermittedError
        Fabric handles were requested, and this user cannot open an IMEX channel.
    OutOfMemoryError
        The NVSwitches have no resources left for another object.
    SystemNotReadyError
        The fabric manager is not running.
    """

    _mark = "M"
    _unreadable = (
        "ordinary reads of a multicast object are undefined: read the bound memory, or reduce with multimem.ld_reduce"
    )

    def __init__(
        self,
        nbytes: int | str,
        num_devices: int,
        *,
        handle_types: MemHandleType = MemHandleType.NONE,
        round_up: bool = False,
        recommended: bool = False,
        driver: Driver | None = None,
    ) -> None:
        prop = MulticastObjectProp(num_devices, checked_size("nbytes", nbytes), handle_types)
        session = session_for(None, driver)
        _check_supported(session)
        smallest = _granularity_of(session, prop)
        step = _granularity_of(session, prop, recommended=True) if recommended else smallest
        if round_up:
            prop = replace(prop, size=-(-prop.size // step) * step)
        else:
            hint = f"{' (the recommended one)' if recommended else ''}; round_up=True rounds up"
            check_multiple("nbytes", prop.size, step, hint=hint)
        self._open(session, prop, smallest)

    def _open(
        self, session: Session, prop: MulticastObjectProp, step: int, handle: Fd | int | bytes | None = None
    ) -> None:
        self._complete = False
        """Whether :meth:`mark_complete` was called."""
        self.devices: tuple[Device, ...] = ()
        """Devices that this process added; other processes may have added more."""
        self.properties: MulticastObjectProp = prop
        """Properties with which the object was created."""
        self.num_devices: int = prop.num_devices
        """Number of devices in the team, over all processes."""
        self._granularity: int = step
        self._handle_types: MemHandleType = prop.handle_types
        self._prepare(session, prop.size)
        self._state.is_object = True
        if handle is None:
            self._create("cuMulticastCreate", prop.to_driver())
        else:
            self._import(handle)
        self._state.objects[self._node] = None

    @staticmethod
    def granularity(
        num_devices: int,
        nbytes: int | str = 2 << 20,
        *,
        handle_types: MemHandleType = MemHandleType.NONE,
        recommended: bool = False,
        driver: Driver | None = None,
    ) -> int:
        """Return the granularity of a multicast object in bytes (``cuMulticastGetGranularity``). The object's size, and
        sizes, offsets and addresses of its bindings, must be multiples of the minimum granularity.

        Parameters
        ----------
        num_devices, nbytes, handle_types
            Properties of the object, as for :class:`MulticastObject`; ``nbytes`` need not be aligned.
        recommended
            Whether to return the granularity that the driver recommends for performance, rather than the minimum.
        driver
            The driver to use; default: :func:`streamalloc.driver.default`.

        Raises
        ------
        TypeError, ValueError, CudaError
            A property has a wrong type or value (:class:`MulticastObjectProp`), or the driver refused the properties.
        """
        prop = MulticastObjectProp(num_devices, checked_size("nbytes", nbytes), handle_types)
        return _granularity_of(session_for(None, driver), prop, recommended=recommended)

    @classmethod
    def from_handle(
        cls,
        handle: Fd | int | bytes,
        nbytes: int | str,
        num_devices: int,
        *,
        handle_types: MemHandleType | None = None,
        driver: Driver | None = None,
    ) -> Self:
        """Import an object that another process exported (``cuMemImportFromShareableHandle``).

        Parameters
        ----------
        handle
            The result of :meth:`export` in the other process. An :class:`Fd` is closed by this call, even if the call
            fails. A file descriptor given as a number stays open.
        nbytes, num_devices
            Size in bytes and number of devices of the object, which the driver does not report.
        handle_types
            Handle types with which the object was created; default: the type of ``handle``.
        driver
            The driver to use; default: :func:`streamalloc.driver.default`.

        Raises
        ------
        NotSupportedError
            No visible device supports multicast objects.
        TypeError, ValueError
            ``handle`` is certainly no exported handle, ``num_devices`` is less than 1, ``nbytes`` is not a multiple of
            the minimum granularity (:meth:`granularity`), or one of them or ``handle_types`` has a wrong type.
        ClosedError, CudaError
            The :class:`Fd` was closed, or the driver refuses the handle.
        """
        with handle if isinstance(handle, Fd) else contextlib.nullcontext():
            kind = MemHandleType.FABRIC if isinstance(handle, (bytes, bytearray)) else _POSIX
            size, kinds = checked_size("nbytes", nbytes), kind if handle_types is None else handle_types
            prop = MulticastObjectProp(num_devices, size, kinds)
            session = session_for(None, driver)
            _check_supported(session)
            step = _granularity_of(session, prop)
            check_multiple("nbytes", prop.size, step)
            imported = cls.__new__(cls)
            imported._open(session, prop, step, handle)
            return imported

    @property
    def complete(self) -> bool:
        """Whether the team has all its devices: this process has added all of them, or :meth:`mark_complete` was
        called. While False, :meth:`bind` and :meth:`map` raise :class:`IncompleteTeamError`.
        """
        return self._complete or self._all_here

    @property
    def bindings(self) -> tuple[Binding, ...]:
        """Bindings that this process made and that are not closed."""
        return tuple(Binding(self, node) for node in self._node.bound())

    @property
    def location(self) -> MemLocation:
        """``MemLocation.none()``: the memory is on several devices."""
        return MemLocation.none()

    def add_device(self, device: Device) -> None:
        """Add a device to the team (``cuMulticastAddDevice``). The device stays until the object is released.

        Raises
        ------
        ClosedError
            The object was closed.
        TypeError, ValueError
            ``device`` is no device of this driver or was added already, or this process has added all devices.
        NotSupportedError
            The device does not support multicast objects.
        InvalidDeviceError
            The device is not joined by NVLink to the other devices of the team.
        """
        raw = self._checked_raw()
        check_device("device", device, self._session)
        if device in self.devices:
            raise ValueError(f"device={device!r} was added already: a team has each device once")
        if self._all_here:
            raise ValueError(f"device={device!r} is one too many: {self!r} was made for {self.num_devices}")
        if not device.attribute("MULTICAST_SUPPORTED"):
            raise _unsupported("cuMulticastAddDevice", f"{device!r}")
        self._session.call("cuMulticastAddDevice", raw, device.ordinal)
        self.devices += (device,)

    def mark_complete(self) -> None:
        """Declare that all processes have added their devices, so that :attr:`complete` becomes True.

        This call is needed if other processes add devices. Call it after a barrier that each process reaches after it
        has added its devices. Do not call it if a process failed to add a device: the driver would then block in bind
        and map calls for ever. Raises :class:`ClosedError` if the object was closed.
        """
        self._checked_raw()
        self._complete = True

    def team_complete(self) -> None:
        """Call :meth:`mark_complete`. Deprecated: version 0.4 removes this name."""
        warnings.warn("team_complete() is deprecated: call mark_complete()", DeprecationWarning, stacklevel=2)
        self.mark_complete()

    def bind(
        self,
        memory: PhysicalMemory | Memory,
        offset: int = 0,
        *,
        memory_offset: int = 0,
        nbytes: int | str | None = None,
        device: Device | None = None,
    ) -> Binding:
        """Bind memory of one device to a range of the object (``cuMulticastBindMem``, ``cuMulticastBindAddr``).

        The object keeps the memory alive until the unbind. Physical memory may be closed earlier: its release then
        comes after the unbind. A pool's buffer must not be freed earlier.

        Parameters
        ----------
        memory
            A :class:`PhysicalMemory`, a mapping of one chunk of physical memory, or a buffer of a pool.
        offset
            Offset in the object in bytes, a multiple of the granularity.
        memory_offset, nbytes
            Offset and size of the range of ``memory`` to bind, in bytes, multiples of the granularity. Default: the
            bytes from ``memory_offset`` to the end of the memory.
        device
            The device to bind for. Device memory is always bound for its own device, which is the default. For host
            memory, name the device that is nearest to the memory's NUMA node (``cuMulticastBindMem_v2``).

        Raises
        ------
        TypeError, ValueError
            An offset, size or address is unaligned or out of range, or these bytes of the object are bound already. Or
            the memory belongs to another driver or a graph, has several chunks, or cannot be shared although the object
            can. Or ``device`` is missing for host memory, or is not the device of device memory. Or this process has
            added all devices, and the memory is on another device.
        ClosedError, IncompleteTeamError
            The object or the memory was closed, or not all devices were added: the driver would block.
        OutOfMemoryError, SystemNotReadyError
            The NVSwitches have no resources left, or the fabric manager is not running.
        """
        raw = self._checked_raw()
        source = BindSource.of(memory, memory_offset, nbytes, self._session)
        self._check_complete("bind memory")
        start = checked_number("offset", offset)
        check_multiple("offset", start, self._granularity)
        stop = start + source.nbytes
        if stop > self.nbytes:
            raise ValueError(f"offset={offset}: {size_text(source.nbytes)} end outside of {self!r}")
        ordinal = source.check(self._granularity, device, shareable=bool(self._handle_types) or self._state.imported)
        if self._all_here and ordinal not in [one.ordinal for one in self.devices]:
            raise self._outside_team(f"{memory!r}: device {ordinal}")
        for other in self._node.bound():
            if other.device == ordinal and other.offset < stop and start < other.stop:
                taken = f"bytes {other.offset} to {other.stop} of device {ordinal}"
                raise ValueError(f"offset={offset}: {taken} are bound already")
        node = BindingNode(self._node, source, ordinal, start)
        name, arguments = source.bind_call(raw, ordinal, start, device)
        with undoing(lambda: self._unbind(node, ())):
            # Before the call, so that the binding is undone even if a signal handler raises right after it.
            node.link()
            try:
                self._session.call(name, *arguments)
            except CudaError as refusal:
                if refusal.call == name:  # A signal handler may raise the error of another call.
                    node.was_refused()
                raise
            node.confirmed = True
        return Binding(self, node)

    def map(self, *, access: Access = None) -> MulticastView:
        """Map the whole object at new addresses (``cuMemAddressReserve``, ``cuMemMap``, ``cuMemSetAccess``).

        Parameters
        ----------
        access
            Permissions of devices of the team, as for :meth:`AddressRange.map`. By default nobody has access.

        Raises
        ------
        ClosedError, IncompleteTeamError
            The object was closed, or not all devices were added: the driver would block.
        TypeError, ValueError
            ``access`` names something that is no device of this driver. Or this process has added all devices, and
            ``access`` names another one.
        NotSupportedError
            ``access`` names the host, which cannot use the object.
        OutOfMemoryError, AddressSpaceError
            The NVSwitches have no resources left for the object, or the process has no free address range of this size.
        """
        self._check_mappable()
        rights = rights_of(access, self._session)
        self._check_access(rights)
        return MulticastView(self, self._granularity, rights)

    def close(self, after: After = None, *, unmap: bool = False) -> None:
        """Unbind all memory (``cuMulticastUnbind``) and release the object (``cuMemRelease``). Idempotent.

        Parameters
        ----------
        after
            Streams or events that the host first waits for, see :class:`AddressRange`. Default: all work of the devices
            with access to a mapping of the object.
        unmap
            Whether to unmap the object first (``cuMemUnmap``), as the end of a ``with`` block does.

        Raises
        ------
        TypeError, ValueError
            ``after`` names something that is no event or stream of this driver. Or the object is mapped, and ``unmap``
            is False.
        CaptureError
            A stream of ``after`` is being captured. Nothing was released.
        CudaError
            The driver refused a call. Close again to release what is left.
        """
        if self.closed:
            return
        # Mappings of the object in dropped address ranges are unmapped first, so that they do not count below.
        self._node.allocations.work()
        if self.mapping_count and not unmap:
            raise ValueError(f"{self!r} has {counted(self.mapping_count, 'mapping')}: unmap before it is closed")
        self._wait(after)
        try:
            for node in (*self._node.bound(), *self._state.mappings, self._node):
                node.end()
        finally:
            # Otherwise closed memory and addresses that waited for the object's release would stay until another call.
            self._node.allocations.work()

    def end(self, after: After = None) -> None:
        """Call ``close(after, unmap=True)``. Deprecated: version 0.4 removes this name."""
        warnings.warn("end() is deprecated: call close(unmap=True)", DeprecationWarning, stacklevel=2)
        self.close(after, unmap=True)

    # -- hooks of GenericAllocation --------------------------------------------------------------------------

    def _check_mappable(self) -> None:
        self._checked_raw()
        self._check_complete("map it")

    def _check_access(self, rights: Rights) -> None:
        for location, flags in rights.items():
            if flags and location.on_host:
                raise refused(NotSupportedError, "cuMemSetAccess", "the host cannot use a multicast object")
            if flags and self._all_here and location not in [device.location for device in self.devices]:
                raise self._outside_team(f"access: {location}")

    # -- release ---------------------------------------------------------------------------------------------

    def _wait(self, after: After) -> None:
        """Block until work ends that may use the object: unbind and unmap do not wait. Arguments of :meth:`close`."""
        wait_for_users(after, self._session, [node.rights for node in list(self._state.mappings)])

    def _unbind(self, node: BindingNode, after: After) -> None:
        self._wait(after)
        try:
            node.end()
        finally:
            if node.gone:
                node.unlink()
                self._node.allocations.work()  # Releases closed memory that waited for the unbind.

    # -- checks ----------------------------------------------------------------------------------------------

    @property
    def _all_here(self) -> bool:
        return len(self.devices) == self.num_devices

    def _check_complete(self, purpose: str) -> None:
        if not self.complete:
            missing = self.num_devices - len(self.devices)
            raise IncompleteTeamError(
                f"the driver would block: {missing} of the {self.num_devices} devices of {self!r} were not added here. "
                f"Add them before you {purpose}; if other processes add them, call mark_complete() after they have"
            )

    def _outside_team(self, subject: str) -> ValueError:
        members = ", ".join(f"device {device.ordinal}" for device in self.devices)
        return ValueError(f"{subject} is not in the team of {self!r}, which has {members}")

    def _leave(self, *, failed: bool) -> None:
        self.close(unmap=True)

    def _about(self) -> Iterator[Row]:
        yield "size", mib(self.nbytes)
        yield "handle", f"{self.handle:#x}"
        here = ", ".join(place(device.location) for device in self.devices) or "none"
        yield "team", f"{self.num_devices} devices, of which added here: {here}"
        yield "mapped", f"in {self.mapping_count} places"
        bound = [(place(one.device.location), mib(one.offset), mib(one.nbytes)) for one in self.bindings]
        if bound:
            yield "bound", table(("memory of", "at", "size"), bound)

    def _text(self) -> str:
        team = f"{len(self.devices)} of {self.num_devices} devices added here"
        bound = f", {len(self.bindings)} bindings" if self.bindings else ""
        return f" of {size_text(self.nbytes)}, {team}{bound}, {self._handle_text()}"


class Binding(Closes):
    """Memory that is bound to a multicast object for one of its devices: the result of :meth:`MulticastObject.bind`. It
    is memory of that device or of the host.

    :meth:`close` unbinds the memory. If this object is dropped, the memory stays bound, because the multicast object
    owns the binding.
    """

    def __init__(self, multicast: MulticastObject, node: BindingNode) -> None:
        self._node = node
        self.multicast: MulticastObject = multicast
        """Multicast object that the memory is bound to."""
        self.memory: PhysicalMemory | Memory = node.source.memory
        """The bound memory: the physical memory of a mapping if a mapping was bound."""
        self.offset: int = node.offset
        """Offset of the binding in the multicast object, in bytes."""
        self.memory_offset: int = node.source.offset
        """Offset of the bound range in :attr:`memory`, in bytes."""
        self.nbytes: int = node.source.nbytes
        """Size of the bound range in bytes."""

    @property
    def device(self) -> Device:
        """The device that the memory is bound for."""
        return Device(self._node.device, driver=self.multicast.driver)

    @property
    def closed(self) -> bool:
        """Whether the memory was unbound, by :meth:`close` or by the end of the multicast object."""
        return self._node.gone

    def close(self, after: After = None) -> None:
        """Unbind the memory (``cuMulticastUnbind``). Idempotent.

        The unbind is not stream-ordered: the host blocks until the streams or events ``after`` are done, see
        :class:`AddressRange`. Default: all work of the devices with access to a mapping of the object. Raises
        TypeError, ValueError or :class:`CaptureError` for ``after`` as :meth:`MulticastObject.close` does, and
        :class:`CudaError` if the driver refuses.
        """
        if not self._node.gone:
            self.multicast._unbind(self._node, after)

    def __eq__(self, other: object) -> bool:
        return self._node is other._node if isinstance(other, Binding) else NotImplemented

    def __hash__(self) -> int:
        return hash(id(self._node))

    def __repr__(self) -> str:
        state = ", unbound" if self._node.gone else ""
        part = f"{size_text(self.nbytes)} of device {self._node.device} at offset {self.offset}"
        return f"<Binding of {part} of {self.multicast!r}{state}>"


class MulticastView(LoneMapping):
    """A mapping of a multicast object in its own address range: the result of :meth:`MulticastObject.map`.

    :meth:`fill` and :meth:`copy_from` write to the memory of every device. Ordinary reads have undefined results, so
    :meth:`copy_to` raises ValueError, and there are no array interfaces: ``__cuda_array_interface__`` raises
    AttributeError, ``__dlpack__`` BufferError. Kernels use ``multimem`` instructions at :attr:`address`. A kernel that
    also uses the bound memory at the memory's own address needs ``fence.proxy.alias``: see :class:`MulticastObject`.
    """

    __slots__ = ()


_POSIX = MemHandleType.POSIX_FILE_DESCRIPTOR


def _granularity_of(session: Session, prop: MulticastObjectProp, *, recommended: bool = False) -> int:
    # CU_MULTICAST_GRANULARITY_MINIMUM is 0, CU_MULTICAST_GRANULARITY_RECOMMENDED is 1.
    flag = cuda.CUmulticastGranularity_flags(int(recommended))
    return int(session.call("cuMulticastGetGranularity", prop.to_driver(), flag))


def _check_supported(session: Session) -> None:
    """Raise NotSupportedError if no device supports multicast objects. This is checked first, because errors of the
    driver calls do not say what is missing.
    """
    devices = Device.all(session.driver)
    if not any(device.attribute("MULTICAST_SUPPORTED") for device in devices):
        raise _unsupported("cuMulticastCreate", f"{counted(len(devices), 'device')} without that support")


def _unsupported(call: str, found: str) -> NotSupportedError:
    needed = "at least two, joined by NVSwitch, all visible to this process, and a running fabric manager"
    return unsupported(call, f"GPUs that support multicast objects: {needed}", found)
