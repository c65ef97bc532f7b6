"""How symmetric memory is set up: what all ranks agree on, and the steps that they do together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from streamalloc.core.arguments import door_of
from streamalloc.core.device import Device
from streamalloc.core.door import Door, PerDriver, door_behind
from streamalloc.core.errors import (
    CaptureError,
    InvalidContextError,
    InvalidValueError,
    NotPermittedError,
    NotSupportedError,
    refused,
)
from streamalloc.core.later import HandleEnd, later_of
from streamalloc.core.properties import MemHandleType, checked_size
from streamalloc.driver import Driver
from streamalloc.driver.internal import cuda
from streamalloc.ipc import DriverVersionWarning
from streamalloc.ipc.internal import end_of
from streamalloc.multicast.objects.multicast_object import MulticastObject
from streamalloc.multicast.setup.agreement import Layout, Plan, RankProfile, decide, layout_of
from streamalloc.multicast.setup.participants import SymmetricMemoryError, Team
from streamalloc.multicast.setup.resources import RankResources
from streamalloc.vmm import PhysicalMemory

__all__ = ["Asked", "agree", "check_now", "checked_team", "end_or_none", "set_up"]

_NON_BLOCKING = int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
# What is written from the host, in bytes; more is filled by the device.
_AT_ONCE = 64 << 10
_HANDLE_TYPES = (MemHandleType.FABRIC, MemHandleType.POSIX_FILE_DESCRIPTOR)


class Asked(NamedTuple):
    """Arguments as they were given, to be checked where the other ranks hear of it."""

    nbytes: int
    multicast: bool | str
    handle_type: MemHandleType | None
    signal_pad_bytes: int
    timeout: float | None

    def check(self) -> None:
        """Raise ``TypeError`` or ``ValueError`` for what breaks a rule."""
        if not checked_size("nbytes", self.nbytes):
            raise ValueError("nbytes=0: allowed are 1 byte or more")
        checked_size("signal_pad_bytes", self.signal_pad_bytes)
        if self.multicast not in (True, False, "auto"):
            raise ValueError(f"multicast={self.multicast!r}: allowed are True, False and 'auto'")
        if self.handle_type is not None and self.handle_type not in _HANDLE_TYPES:
            raise ValueError(f"handle_type={self.handle_type!r}: allowed are FABRIC, POSIX_FILE_DESCRIPTOR and None")
        end_of(self.timeout)


def checked_team(communicator: Any, device: Device | None, devices: Sequence[Device], handle_type: object) -> int:
    """How many ranks ``devices`` mean, where one process has all of them."""
    if communicator is not None or device is not None or handle_type is not None:
        raise TypeError(
            "devices= is for one process that has all ranks: it goes with no communicator, device= or handle_type="
        )
    for one in devices:
        if not isinstance(one, Device):
            raise TypeError(f"devices must be Devices, not {type(one).__name__} ({one!r})")
        if door_behind(one) is not door_behind(devices[0]):
            raise ValueError(f"devices: {one!r} belongs to another driver than {devices[0]!r}")
    if not devices:
        raise ValueError("devices: there must be one or more")
    return len(devices)


def end_or_none(timeout: float | None) -> float | None:
    """When a wait of so many seconds ends; None where there is no limit, or the seconds are none."""
    try:
        return end_of(timeout)
    except (TypeError, ValueError):
        # Raised again where the others hear of it.
        return None


def agree(
    team: Team, asked: Asked, given: dict[int, Device], driver: Driver | None, end: float | None
) -> tuple[Plan, dict[int, Device]]:
    """Tell all ranks what was asked for here and what the devices can do, and decide on how to do it."""
    chosen: dict[int, Device] = {}
    mistakes: list[Exception] = []

    def profile(rank: int) -> bytes:
        try:
            asked.check()
            chosen[rank] = _device_for(given.get(rank), driver)
        except (TypeError, ValueError) as error:
            mistakes.append(error)
            raise
        return _profile(team, asked, chosen[rank]).to_bytes()

    try:
        said = team.step("agree", profile, end)
    except SymmetricMemoryError:
        if mistakes:
            raise mistakes[0] from None
        raise
    profiles = [RankProfile.from_bytes(one) for one in said]
    versions = {profile.driver_version for profile in profiles}
    if len(versions) > 1:
        warnings.warn(
            f"the ranks run drivers of different versions, {sorted(versions)}: NVIDIA supports equal ones only",
            DriverVersionWarning,
            stacklevel=3,
        )
    return decide(profiles, one_process=team.communicator is None), chosen


def _device_for(device: object, driver: Driver | None) -> Device:
    if device is not None:
        if not isinstance(device, Device):
            raise TypeError(f"device must be a Device, not {type(device).__name__} ({device!r})")
        door_of(device, driver)
        return device
    door = door_of(None, driver)
    try:
        return Device(int(door.call("cuCtxGetDevice")), driver=door.driver)
    except InvalidContextError:
        count = Device.count(door.driver)
        if count == 1:
            return Device(0, driver=door.driver)
    raise ValueError(f"device: which of {count} devices is this rank's? Give device=, or make its context current")


def _profile(team: Team, asked: Asked, device: Device) -> RankProfile:
    alone = team.communicator is None
    check_now(door_behind(device))
    facts = known_devices(door_behind(device)).facts_of(device)
    granularities: dict[str, int] = {}
    if asked.multicast is not False and facts.multicast_supported and team.size > 1:
        layout = layout_of(asked.nbytes, asked.signal_pad_bytes, team.size)
        offered = ((MemHandleType.POSIX_FILE_DESCRIPTOR, facts.posix), (MemHandleType.FABRIC, facts.fabric))
        kinds = (MemHandleType.NONE,) if alone else (kind for kind, there in offered if there)
        for kind in kinds:
            granularities[str(int(kind))] = MulticastObject.granularity(
                team.size,
                nbytes=-(-layout.total // facts.granularity) * facts.granularity,
                handle_types=kind,
                recommended=True,
                driver=device.driver,
            )
    return RankProfile(
        nbytes=int(asked.nbytes),
        signal_pad_bytes=int(asked.signal_pad_bytes),
        multicast=None if asked.multicast == "auto" else bool(asked.multicast),
        handle_type=int(asked.handle_type or 0),
        host="" if team.communicator is None else team.communicator.host,
        multicast_granularity=granularities,
        **facts._asdict(),
    )


def _attribute(device: Device, name: str) -> int:
    try:
        return device.attribute(name)
    except (InvalidValueError, NotSupportedError):  # a driver, or bindings, that do not know it
        return 0


def set_up(
    team: Team,
    resources: RankResources,
    plan: Plan,
    end: float | None,
    fill: Callable[[int], None] | None = None,
) -> tuple[int, ...]:
    """All steps after the agreement, on all ranks or on none; where each rank's memory begins here.

    ``fill`` puts the contents into a rank's memory where that is not new.
    """
    _create(team, resources, plan, end)
    if team.communicator is not None:
        _exchange(team, resources, plan.multicast, end)

    def once(do: Callable[[], None]) -> Callable[[int], None]:
        return lambda rank: do() if rank == team.here[0] else None

    steps: list[tuple[str, Callable[[int], None]]] = []
    if plan.multicast:
        # A process binds when all ranks have said that they have added their devices: until then the driver blocks.
        steps += [("add", resources.add), ("bind", resources.bind)]
    steps += [
        ("reserve", once(resources.reserve)),
        ("map", once(resources.map)),
        ("access", once(resources.access)),
        # After this one nobody touches memory that is still to be cleared or filled.
        ("fill", fill) if fill is not None else ("clear", lambda rank: _clear(resources, plan.layout, rank)),
    ]
    for name, do in steps:
        team.step(name, do, end)
    return tuple(replica.address for replica in resources.replicas.values())


def _create(team: Team, resources: RankResources, plan: Plan, end: float | None) -> None:
    """Make the memory, with the first handle type that all ranks may use."""
    kinds = list(plan.physical_bytes)
    for kind in kinds:

        def create(rank: int, kind: MemHandleType = kind) -> bytes:
            if kind != kinds[0]:
                resources.attempt()
            resources.kind = kind
            resources.physical_bytes = plan.physical_bytes[kind]
            try:
                resources.create(rank, plan.multicast)
            except (NotPermittedError, NotSupportedError) as error:
                if kind is not MemHandleType.FABRIC:
                    raise
                # As without an IMEX channel: all ranks take something else then.
                return f"{type(error).__name__}: {error}".encode()
            return b""

        refusals = team.step("create", create, end)
        refused = [rank for rank, refusal in enumerate(refusals) if refusal]
        if not refused:
            return
        if kind == kinds[-1]:
            raise SymmetricMemoryError(refused[0], "create", refusals[refused[0]].decode(errors="replace"))


def _exchange(team: Team, resources: RankResources, multicast: bool, end: float | None) -> None:
    """Export, give to all ranks, and import what they have given."""
    exported: list[Any] = []
    team.step("export", lambda rank: exported.extend(resources.export(rank)), end)
    given: Sequence[Sequence[Any]]
    if resources.kind is MemHandleType.FABRIC:
        packets = team.step("exchange", lambda rank: b"".join(exported), end)
        given = [[packet[at : at + 64] for at in range(0, len(packet), 64)] for packet in packets]
    else:
        given = team.exchange("exchange", exported, end)
        resources.keep(*[fd for fds in given for fd in fds])
    team.step("import", lambda rank: resources.import_handles(rank, given, multicast), end)


def _clear(resources: RankResources, layout: Layout, rank: int) -> None:
    """Zero what lies behind the user's bytes, and write the tables."""
    door, device = resources.door, resources.devices[rank]
    bases = np.array([one.address for one in resources.replicas.values()], np.uint64)
    start, first = int(bases[rank]), layout.signal_pad
    # A stream for this alone, which nothing is ordered after: less than a Stream is.
    later, stream = later_of(door), HandleEnd(door, "cuStreamDestroy", None)
    try:
        with device.current():
            door.create(stream, "_raw", "cuStreamCreateWithPriority", _NON_BLOCKING, 0)
            if layout.total - first > _AT_ONCE:
                # A signal pad of the user's size; what is behind it is written from the host.
                door.call("cuMemsetD8Async", start + first, 0, layout.words - first, stream.raw)
                first = layout.words
            image = np.zeros(layout.total - first, np.uint8)
            for table, addresses in (
                (layout.buffer_table, bases),
                (layout.signal_table, bases + np.uint64(layout.signal_pad)),
            ):
                image[table - first :][: addresses.nbytes] = addresses.view(np.uint8)
            door.call("cuMemcpyHtoDAsync", start + first, image.ctypes.data, image.nbytes, stream.raw)
            door.call("cuStreamSynchronize", stream.raw)
        later.end(stream)
    except BaseException:
        later.hand_in(stream)  # perhaps again; it ends once
        raise


class KnownDevices:
    """What is the same each time that memory is set up on the devices of one driver."""

    __slots__ = ("facts",)

    def __init__(self, _: Door) -> None:
        self.facts: dict[int, DeviceFacts] = {}

    def facts_of(self, device: Device) -> DeviceFacts:
        """What a device is and can do."""
        facts = self.facts.get(device.ordinal)
        if facts is None:
            facts = self.facts[device.ordinal] = DeviceFacts(
                f"{device.uuid} ({device.name})",
                int(door_behind(device).call("cuDriverGetVersion")),
                PhysicalMemory.granularity(device, recommended=True),
                bool(_attribute(device, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")),
                bool(_attribute(device, "HANDLE_TYPE_FABRIC_SUPPORTED")),
                bool(_attribute(device, "MULTICAST_SUPPORTED")),
            )
        return facts


class DeviceFacts(NamedTuple):
    """What a device is and can do, as ranks tell each other."""

    device: str
    driver_version: int
    granularity: int
    posix: bool
    fabric: bool
    multicast_supported: bool


known_devices: PerDriver[KnownDevices] = PerDriver(KnownDevices)


def check_now(door: Door) -> None:
    """Raise where devices cannot be synchronised, or the process is a fork of the one whose communicator it is."""
    door.check_process()
    if later_of(door).paused:
        raise refused(
            CaptureError,
            "cuCtxSynchronize",
            "a stream is being captured: end the capture before symmetric memory is made or closed",
        )
