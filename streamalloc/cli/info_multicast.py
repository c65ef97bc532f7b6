"""What the machine offers for multicast objects, as far as can be asked.

Nothing is tried: every multicast object takes room in switches that all processes share.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import streamalloc as sa
from streamalloc.cli.choice import plural
from streamalloc.cli.terminal import Terminal, mib
from streamalloc.core.capabilities import missing_for
from streamalloc.multicast import MulticastObject

__all__ = ["Granularity", "Multicast", "multicast_report", "query_multicast", "show_multicast"]

_ADMINISTRATOR = (
    "ask the administrator whether the fabric manager (nvidia-fabricmanager, in the driver's version) runs on the "
    "host, and whether `nvidia-smi -q` shows the fabric's state of each GPU as completed"
)


class Granularity(NamedTuple):
    """What the size of a multicast object, and all offsets, have to be a multiple of."""

    handle_type: str
    """How the object is shared, by the name of the :class:`MemHandleType`."""
    minimum: int | None
    """In bytes; None where the driver refuses to tell."""
    recommended: int | None
    """With the best performance, in bytes."""
    found: str
    """The refusal, if there was one."""


class Multicast(NamedTuple):
    """The answers of all devices that this process sees."""

    supported: dict[int, bool | None]
    """By the ordinal of the device; None where bindings or driver do not know."""
    largest_team: int
    """The most devices that a team within this process can have; 0 where there can be none."""
    granularity: list[Granularity]
    """For the largest team, by handle type."""
    needs: list[str]
    """What is missing, or may be, and who can change it."""


def query_multicast(devices: list[sa.Device]) -> Multicast:
    """Ask the devices of one driver, and the driver where there can be a team (``cuMulticastGetGranularity``)."""
    supported = {device.ordinal: device.supports.multicast for device in devices}
    team = [device for device in devices if supported[device.ordinal]]
    if len(team) < 2:
        return Multicast(supported, 0, [], _needs(devices, []))
    kinds = [sa.MemHandleType.NONE]
    if all(device.supports.posix_file_descriptors for device in team):
        kinds.append(sa.MemHandleType.POSIX_FILE_DESCRIPTOR)
    if all(device.supports.fabric_handles for device in team):
        kinds.append(sa.MemHandleType.FABRIC)
    return Multicast(supported, len(team), [_granularity(team, kind) for kind in kinds], _needs(devices, team))


def _granularity(team: list[sa.Device], kind: sa.MemHandleType) -> Granularity:
    driver = team[0].driver
    minimum = recommended = None
    found = ""
    try:
        minimum = MulticastObject.granularity(len(team), handle_types=kind, driver=driver)
        recommended = MulticastObject.granularity(len(team), handle_types=kind, recommended=True, driver=driver)
    except sa.CudaError as error:
        found = f"refused: {error.name}"
    return Granularity(kind.name or "", minimum, recommended, found)


def _needs(devices: list[sa.Device], team: list[sa.Device]) -> list[str]:
    lines = {line for device in devices for line in missing_for(device.supports) if line.startswith("multicast: ")}
    if any(device.supports.multicast is None for device in devices):
        lines.add("multicast: these bindings or this driver do not know whether the devices support it")
    if team:
        lines.add(f"multicast: where making an object fails although devices support it, {_ADMINISTRATOR}")
    elif len(devices) > 1:
        # One GPU that is alone never supports it, whoever runs the machine.
        lines.add(f"multicast: where the GPUs are joined by NVSwitch, {_ADMINISTRATOR}")
    return sorted(lines)


def multicast_report(found: Multicast) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "devices": [{"ordinal": ordinal, "supported": answer} for ordinal, answer in found.supported.items()],
        "largest_team": found.largest_team,
        "granularity": [one._asdict() for one in found.granularity],
        "needs": found.needs,
    }


_ANSWERS = {True: "yes", False: "no", None: "unknown"}
_SHARED = {
    "NONE": "within this process",
    "POSIX_FILE_DESCRIPTOR": "by file descriptors, on this machine",
    "FABRIC": "by fabric handles, also between machines",
}


def show_multicast(found: Multicast, terminal: Terminal) -> None:
    """The answers as tables."""
    terminal.heading("Multicast")
    colours = {True: terminal.good, False: terminal.dim, None: terminal.odd}
    terminal.table(
        (
            (f"device {ordinal}", colours[answer](_ANSWERS[answer]), "supports multicast objects")
            for ordinal, answer in found.supported.items()
        )
    )
    if found.largest_team:
        terminal.line()
        terminal.table(
            (
                (
                    _SHARED[one.handle_type],
                    "" if one.minimum is None else mib(one.minimum),
                    "" if one.recommended is None else mib(one.recommended),
                    terminal.odd(one.found) if one.found else "",
                )
                for one in found.granularity
            ),
            header=(f"shared, {plural(found.largest_team, 'device')}", "granularity", "recommended", ""),
            align="lrrl",
        )
        terminal.line()
        terminal.paragraph(
            f"A team has up to {found.largest_team} devices in this process, and those that other processes add; with "
            "fabric handles (see IMEX channels) also processes on other machines. For how many objects the switches "
            "have room the driver does not tell, and nothing was made here to find out."
        )
    for line in found.needs:
        terminal.paragraph(line)
