"""Steps that set up symmetric memory on all ranks together: the ranks agree on a plan, then carry it out.

All ranks do the same steps in this order. Each step ends on all ranks before the next one begins, and a step that fails
on one rank fails on all (:meth:`RankGroup.step`). :class:`SymmetricMemoryError` names the step.

1. ``agree``: the ranks exchange profiles, and each makes the same plan (:func:`agree`).
2. ``create``: each rank creates its memory (``cuMemCreate``), and rank 0 the multicast object (``cuMulticastCreate``).
   If the driver refuses fabric handles on a rank, all ranks repeat the step with the next handle type of the plan.
3. ``export``: each rank exports its handles (``cuMemExportToShareableHandle``).
4. ``exchange``: each rank sends its handles to all ranks.
5. ``import``: each rank imports the handles of the other ranks (``cuMemImportFromShareableHandle``).
6. ``add``: each rank adds its device to the multicast object (``cuMulticastAddDevice``).
7. ``bind``: each rank binds its memory to the object (``cuMulticastBindMem``).
8. ``reserve``: each process reserves addresses (``cuMemAddressReserve``).
9. ``map``: each process maps the memory of all ranks and the multicast object (``cuMemMap``).
10. ``access``: each process gives its devices access (``cuMemSetAccess``).
11. ``clear``: each rank zeroes its signal pad and counters, and writes its address tables (``cuMemcpyHtoDAsync``).

Steps 3 to 5 are left out if one process has all ranks, steps 6 and 7 without a multicast object.

:meth:`SymmetricMemory.close` does two steps before it releases the memory: in ``meet`` the ranks only wait for each
other, in ``finish`` each waits until its devices are idle.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from streamalloc.core.errors import (
    CaptureError,
    InvalidContextError,
    InvalidValueError,
    NotPermittedError,
    NotSupportedError,
    refused,
    warn,
)
from streamalloc.core.internal import Device, check_device, deferred_queue, session_for
from streamalloc.core.properties import MemHandleType, checked_size, checked_type
from streamalloc.core.session import Session, session_of
from streamalloc.driver import Driver
from streamalloc.ipc import DriverVersionWarning
from streamalloc.ipc.internal import deadline_after
from streamalloc.multicast.objects.multicast_object import MulticastObject
from streamalloc.multicast.setup.plan import Plan, RankLayout, RankProfile, layout_of, make_plan, round_up
from streamalloc.multicast.setup.rank_group import RankGroup, SymmetricMemoryError
from streamalloc.multicast.setup.resources import RankResources
from streamalloc.vmm import PhysicalMemory

_FABRIC_HANDLE = 64
"""Size of a ``CUmemFabricHandle`` in bytes."""
_HANDLE_TYPES = (MemHandleType.FABRIC, MemHandleType.POSIX_FILE_DESCRIPTOR)


class Arguments(NamedTuple):
    """Arguments of :class:`SymmetricMemory` on one rank. The first step checks them, so that a wrong argument is an
    error on all ranks.
    """

    nbytes: int | str
    multicast: bool | str
    handle_type: MemHandleType | None
    signal_pad_bytes: int | str
    timeout: float | None

    def sizes(self) -> tuple[int, int]:
        """Check the arguments of this rank, and return the sizes of memory and signal pad in bytes. Raises TypeError,
        ValueError with the argument's name and the allowed values.
        """
        nbytes, pad = checked_size("nbytes", self.nbytes), checked_size("signal_pad_bytes", self.signal_pad_bytes)
        if not nbytes:
            raise ValueError("nbytes=0: allowed are 1 byte or more")
        if self.multicast not in (True, False, "auto"):
            raise ValueError(f"multicast={self.multicast!r}: allowed are True, False and 'auto'")
        if self.handle_type is not None and self.handle_type not in _HANDLE_TYPES:
            raise ValueError(f"handle_type={self.handle_type!r}: allowed are FABRIC, POSIX_FILE_DESCRIPTOR and None")
        deadline_after(self.timeout)
        return nbytes, pad


def check_devices(communicator: Any, device: Device | None, devices: Sequence[Device], handle_type: object) -> None:
    """Check the arguments for one process that has all ranks, one for each of ``devices``. Raises TypeError if one of
    the other arguments is given, because these are for several processes; ValueError if ``devices`` is empty or has
    devices of different drivers.
    """
    if communicator is not None or device is not None or handle_type is not None:
        raise TypeError(
            "devices= is for one process that has all ranks: it goes with no communicator, device= or handle_type="
        )
    if not checked_type("devices", devices, Sequence):  # type: ignore[type-abstract]
        raise ValueError("devices: there must be one or more")
    check_device("devices", devices[0])
    for one in devices:
        check_device("devices", one, session_of(devices[0]))


def deadline_or_none(timeout: float | None) -> float | None:
    """Return the time (``time.monotonic``, seconds) at which ``timeout`` seconds will have passed; None if there is no
    limit.

    An invalid ``timeout`` also gives None. An error here would be one of this rank alone: :meth:`Arguments.sizes`
    reports the invalid value to all ranks.
    """
    with contextlib.suppress(TypeError, ValueError):
        return deadline_after(timeout)
    return None


def agree(
    group: RankGroup, arguments: Arguments, given: dict[int, Device], driver: Driver | None, deadline: float | None
) -> tuple[Plan, dict[int, Device]]:
    """Run the step ``"agree"``: exchange the profiles of all ranks in ``group``. Returns the plan, and the device of
    each rank of this process.

    ``given`` has the devices that the caller has chosen, by rank. ``arguments``, ``driver``, errors and warnings as for
    :class:`SymmetricMemory`. ``deadline`` is the time at which the wait for other ranks ends (``time.monotonic``,
    seconds).
    """
    chosen: dict[int, Device] = {}
    mistakes: list[Exception] = []

    def profile(rank: int) -> bytes:
        try:
            nbytes, pad = arguments.sizes()
            chosen[rank] = _device_for(given.get(rank), driver)
        except (TypeError, ValueError) as error:
            mistakes.append(error)
            raise
        return _profile(group, arguments, nbytes, pad, chosen[rank]).to_bytes()

    try:
        packets = group.step("agree", profile, deadline)
    except SymmetricMemoryError:
        if mistakes:
            raise mistakes.pop(0) from None
        raise
    profiles = [RankProfile.from_bytes(packet) for packet in packets]
    versions = {profile.driver_version for profile in profiles}
    if len(versions) > 1:
        text = f"the ranks run drivers of different versions, {sorted(versions)}: NVIDIA supports equal ones only"
        warn(text, DriverVersionWarning)
    return make_plan(profiles, one_process=group.communicator is None), chosen


def _device_for(device: object, driver: Driver | None) -> Device:
    if device is not None:
        device = checked_type("device", device, Device)
        session_for(device, driver)
        return device
    session = session_for(None, driver)
    try:
        return Device(int(session.call("cuCtxGetDevice")), driver=session.driver)
    except InvalidContextError:
        count = Device.count(session.driver)
        if count == 1:
            return Device(0, driver=session.driver)
    raise ValueError(f"device: which of {count} devices is this rank's? Give device=, or make its context current")


def _profile(group: RankGroup, arguments: Arguments, nbytes: int, pad: int, device: Device) -> RankProfile:
    session = session_of(device)
    check_no_capture(session)
    granularity = PhysicalMemory.granularity(device, recommended=True)
    attributes = ("HANDLE_TYPE_FABRIC_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", "MULTICAST_SUPPORTED")
    fabric, posix, supported = (_has(device, name) for name in attributes)
    multicast_granularity = 0
    if arguments.multicast is not False and supported and group.size > 1:
        whole = round_up(layout_of(nbytes, pad, group.size).total, granularity)
        kinds = [MemHandleType.NONE]
        if group.communicator is not None:
            kinds = [kind for kind, offered in zip(_HANDLE_TYPES, (fabric, posix), strict=True) if offered]
        query = functools.partial(MulticastObject.granularity, recommended=True, driver=device.driver)
        multicast_granularity = max((query(group.size, whole, handle_types=kind) for kind in kinds), default=0)
    return RankProfile(
        device=f"{device.uuid} ({device.name})",
        driver_version=int(session.call("cuDriverGetVersion")),
        granularity=granularity,
        posix=posix,
        fabric=fabric,
        multicast_supported=supported,
        nbytes=nbytes,
        signal_pad_bytes=pad,
        multicast=None if arguments.multicast == "auto" else bool(arguments.multicast),
        handle_type=int(arguments.handle_type or 0),
        host="" if group.communicator is None else group.communicator.host,
        multicast_granularity=multicast_granularity,
    )


def set_up(group: RankGroup, resources: RankResources, plan: Plan, deadline: float | None) -> tuple[int, ...]:
    """Run all steps of ``plan`` after the agreement, and store the created objects in ``resources``. Returns the
    address of each rank's memory in this process, by rank. Raises the errors of :meth:`.rank_group.RankGroup.step`.
    """
    _create(group, resources, plan, deadline)
    if group.communicator is not None:
        _exchange(group, resources, plan.multicast, deadline)

    if plan.multicast:
        # "add" and "bind" are two steps, because the driver blocks in a bind until all ranks have added their devices.
        group.step("add", resources.add_device, deadline)
        group.step("bind", resources.bind, deadline)
    group.step("reserve", lambda rank: resources.reserve(), deadline, once=True)
    group.step("map", lambda rank: resources.map(), deadline, once=True)
    group.step("access", lambda rank: resources.set_access(), deadline, once=True)
    # "clear" is the last step: after it a rank may write to the memory of every other rank, and a later zeroing would
    # destroy such writes.
    group.step("clear", lambda rank: _clear(resources, plan.layout, rank), deadline)
    return tuple(replica.address for replica in resources.replicas.values())


def _create(group: RankGroup, resources: RankResources, plan: Plan, deadline: float | None) -> None:
    """Run the step ``"create"`` with each handle type of the plan, until the driver accepts a type on all ranks. Raises
    SymmetricMemoryError.
    """
    refusals: list[bytes] = []
    for kind in plan.handle_types:
        create = functools.partial(_create_as, resources, kind, plan.multicast, again=bool(refusals))
        refusals = group.step("create", create, deadline)
        if not any(refusals):
            return
    rank = next(rank for rank, refusal in enumerate(refusals) if refusal)
    raise SymmetricMemoryError(rank, "create", refusals[rank].decode(errors="replace"))


def _create_as(resources: RankResources, kind: MemHandleType, multicast: bool, rank: int, *, again: bool) -> bytes:
    """Create the memory of ``rank`` for handles of type ``kind``; with ``multicast``, rank 0 also creates the multicast
    object. Returns the reason as text if the driver refuses fabric handles, otherwise b"". Raises CudaError.

    The driver refuses fabric handles without an IMEX channel. This is an outcome of the step and no error, so that all
    ranks try the next handle type. ``again``: whether another type was tried before.
    """
    if again:
        # Release what was created with the previous type. `release` releases the resources of all ranks of this
        # process, which has only one rank here: if it has all ranks, the plan has only one handle type.
        resources.release()
    try:
        resources.create(rank, kind, multicast)
    except (NotPermittedError, NotSupportedError) as error:
        if kind is not MemHandleType.FABRIC:
            raise
        return f"{type(error).__name__}: {error}".encode()
    return b""


def _exchange(group: RankGroup, resources: RankResources, multicast: bool, deadline: float | None) -> None:
    """Run the steps ``"export"``, ``"exchange"`` and ``"import"``: send this rank's handles to all ranks, and import
    the memory of the others. Raises SymmetricMemoryError.
    """
    exported: list[Any] = []
    group.step("export", lambda rank: exported.extend(resources.export(rank)), deadline)
    received: Sequence[Sequence[Any]]
    if resources.kind is MemHandleType.FABRIC:
        packets = group.step("exchange", lambda rank: b"".join(exported), deadline)
        received = [[data[at : at + _FABRIC_HANDLE] for at in range(0, len(data), _FABRIC_HANDLE)] for data in packets]
    else:
        received = group.exchange("exchange", exported, deadline)
        resources.keep(*[fd for fds in received for fd in fds])
    group.step("import", lambda rank: resources.import_handles(rank, received, multicast), deadline)


def _clear(resources: RankResources, layout: RankLayout, rank: int) -> None:
    """Zero the signal pad and the counters of ``rank``, and write the address tables (one ``cuMemcpyHtoDAsync``).
    Raises CudaError.
    """
    bases = np.array([one.address for one in resources.replicas.values()], np.uint64)
    # All parts are written by one copy: if the driver refused the second of two copies, the first would still be queued
    # on memory that the undo unmaps.
    image = np.zeros(layout.total - layout.signal_pad, np.uint8)
    for table, addresses in ((layout.buffer_table, bases), (layout.signal_table, bases + np.uint64(layout.signal_pad))):
        image[table - layout.signal_pad :][: addresses.nbytes] = addresses.view(np.uint8)
    with resources.devices[rank].create_stream() as stream:
        resources.replicas[rank][layout.signal_pad : layout.total].copy_from(image, stream)
        stream.synchronize()


def _has(device: Device, attribute: str) -> bool:
    """Return whether a device attribute is nonzero; False if the driver or the bindings do not have the attribute."""
    try:
        return bool(device.attribute(attribute))
    except (InvalidValueError, NotSupportedError):
        return False


def check_no_capture(session: Session) -> None:
    """Raise CaptureError if this package captures a stream, because a synchronisation of the device would invalidate
    the capture. Raise ForkedProcessError in a forked child.
    """
    session.check_process()
    if deferred_queue(session).captures:
        why = "a stream is being captured: end the capture before symmetric memory is made or closed"
        raise refused(CaptureError, "cuCtxSynchronize", why)
