"""Plan for the set-up of symmetric memory. Every rank computes the same plan from the profiles of all ranks.

This module makes no driver call and sends nothing. All ranks have the same profiles, so an error is raised on all
ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from streamalloc.core.errors import NotSupportedError, refused
from streamalloc.core.internal import FABRIC_NEEDS
from streamalloc.core.properties import MemHandleType
from streamalloc.ipc.internal import by_value, listed

CHANNELS = 16
"""Number of independent channels for barriers, and for signals between two ranks."""

_FORMAT = 1
"""Version of the encoded profile. It increases with each change of a field."""
_LINE = 128
"""Size of a GPU cache line in bytes. Each part of the layout begins at a multiple of this size."""
_COUNTER = 4
"""Size in bytes of a counter, which ``cuStreamWriteValue32`` writes."""
_ADDRESS = 8
"""Size in bytes of a device address in a table."""
_KINDS = 2
"""Number of kinds of counters: barrier and signal."""
_FABRIC, _POSIX = MemHandleType.FABRIC, MemHandleType.POSIX_FILE_DESCRIPTOR


@dataclass(frozen=True)
class RankProfile:
    """Profile of one rank, which is sent to all ranks: its arguments, and identity and capabilities of its device."""

    device: str
    """UUID and name of the device."""
    driver_version: int
    granularity: int
    """Recommended granularity of physical memory in bytes."""
    posix: bool
    """Whether the device offers file descriptors (``HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED``)."""
    fabric: bool
    """Whether the device offers fabric handles (``HANDLE_TYPE_FABRIC_SUPPORTED``). Without an IMEX channel, the driver
    still refuses memory with such a handle.
    """
    multicast_supported: bool
    nbytes: int
    signal_pad_bytes: int
    multicast: bool | None
    """Whether to use multicast; None to use it if there are several ranks, each with a device of its own that supports
    it.
    """
    handle_type: int
    """``MemHandleType`` as a number; 0 for any type that works."""
    host: str
    """Text that identifies machine, user and network namespace."""
    multicast_granularity: int
    """Recommended granularity of a multicast object in bytes, the largest for any handle type that the device supports;
    0 if this rank's argument or device excludes multicast, or there is only one rank.
    """
    format: int = _FORMAT

    def to_bytes(self) -> bytes:
        """Return the profile as JSON in UTF-8. Any version of this library can read its field ``format``, and report a
        difference.
        """
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> RankProfile:
        """Return the profile that a rank has encoded as ``data`` (:meth:`to_bytes`).

        Raises
        ------
        ValueError
            The rank runs a version of this library with another format of the profile.
        """
        fields = json.loads(data)
        if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
            raise ValueError("the ranks run incompatible versions of streamalloc")
        return cls(**fields)


class RankLayout(NamedTuple):
    """Parts of each rank's memory: their sizes, and offsets from the start of the rank's memory, all in bytes."""

    nbytes: int
    """Size of the part for the program, which is at offset 0."""
    signal_pad: int
    """Offset of the signal pad, which is memory for signals of the program's own kernels."""
    signal_pad_bytes: int
    counters: int
    """Offset of the counters for barriers and signals."""
    buffer_table: int
    """Offset of the table with the device address of each rank's memory."""
    signal_table: int
    """Offset of the table with the device address of each rank's signal pad."""
    total: int
    """Size of all parts together, not rounded up to the granularity."""

    def counter(self, kind: int, channel: int, sender: int, size: int) -> int:
        """Return the offset, in bytes from the start of a rank's memory, of the counter that rank ``sender`` increments
        there. ``kind`` is 0 for barriers, 1 for signals. ``channel`` is 0 to 15. ``size`` is the number of ranks.
        """
        return self.counters + _COUNTER * ((kind * CHANNELS + channel) * size + sender)


def layout_of(nbytes: int, signal_pad_bytes: int, size: int) -> RankLayout:
    """Return the layout of each rank's memory for ``size`` ranks: ``nbytes`` bytes for the program, a signal pad of
    ``signal_pad_bytes`` bytes, counters, tables. Each part begins at a cache line, so that no cache line has bytes of
    two parts.
    """
    signal_pad = round_up(nbytes, _LINE)
    counters = round_up(signal_pad + signal_pad_bytes, _LINE)
    buffer_table = round_up(counters + _COUNTER * _KINDS * CHANNELS * size, _LINE)
    signal_table = round_up(buffer_table + _ADDRESS * size, _LINE)
    total = signal_table + _ADDRESS * size
    return RankLayout(nbytes, signal_pad, signal_pad_bytes, counters, buffer_table, signal_table, total)


class Plan(NamedTuple):
    """Decisions about symmetric memory that are the same on all ranks: its parts and sizes, multicast, handle types."""

    layout: RankLayout
    multicast: bool
    handle_types: tuple[MemHandleType, ...]
    """Handle types that can be used, the preferred type first; ``NONE`` alone if all ranks are in one process."""
    physical_bytes: int
    """Size in bytes of the physical memory of each rank: all parts, rounded up to the granularity."""


def make_plan(profiles: Sequence[RankProfile], *, one_process: bool) -> Plan:
    """Return the plan for the profiles of all ranks, in the order of ranks. ``one_process``: whether all ranks are in
    this process, so that no handle is exchanged.

    Raises
    ------
    ValueError
        The ranks got different arguments. The message lists the arguments.
    NotSupportedError
        The requested multicast or handle type is not possible, or no handle type is. The message gives the reason.
    """
    for name in ("nbytes", "signal_pad_bytes", "multicast", "handle_type"):
        values = [getattr(profile, name) for profile in profiles]
        if any(value != values[0] for value in values):
            given = by_value([_shown(name, value) for value in values], "gave {}")
            raise ValueError(f"{name} must be the same on all ranks: {given}")
    first = profiles[0]
    obstacle = _multicast_obstacle(profiles)
    if first.multicast and obstacle:
        raise refused(NotSupportedError, "cuMulticastCreate", f"needs {obstacle}")
    multicast = first.multicast is not False and not obstacle
    layout = layout_of(first.nbytes, first.signal_pad_bytes, len(profiles))
    granularity = max(max(profile.granularity, profile.multicast_granularity * multicast) for profile in profiles)
    kinds = (MemHandleType.NONE,) if one_process else _usable_handle_types(profiles)
    return Plan(layout, multicast, kinds, round_up(layout.total, granularity))


def _shown(name: str, value: Any) -> str:
    if value is None or (name == "handle_type" and not value):
        return "'auto'" if name == "multicast" else "none"
    return repr(MemHandleType(value)) if name == "handle_type" else repr(value)


def _usable_handle_types(profiles: Sequence[RankProfile]) -> tuple[MemHandleType, ...]:
    obstacles = {_FABRIC: _fabric_obstacle(profiles), _POSIX: _descriptor_obstacle(profiles)}
    asked = MemHandleType(profiles[0].handle_type)
    if asked is not MemHandleType.NONE:
        obstacles = {asked: obstacles[asked]}
    usable = tuple(kind for kind, obstacle in obstacles.items() if not obstacle)
    if not usable:
        raise refused(NotSupportedError, "cuMemExportToShareableHandle", "; or else ".join(obstacles.values()))
    return usable


def _multicast_obstacle(profiles: Sequence[RankProfile]) -> str:
    if len(profiles) < 2:
        return "a team of two devices or more, found one"
    lacking = _ranks(profiles, lambda profile: not profile.multicast_supported)
    if lacking:
        return f"devices that support multicast objects (joined by NVSwitch), found that those of {lacking} do not"
    if len({profile.device for profile in profiles}) < len(profiles):
        return f"a device for each rank, found that some share one: {[profile.device for profile in profiles]}"
    return ""


def _fabric_obstacle(profiles: Sequence[RankProfile]) -> str:
    lacking = _ranks(profiles, lambda profile: not profile.fabric)
    return f"{FABRIC_NEEDS}; those of {lacking} offer none" if lacking else ""


def _descriptor_obstacle(profiles: Sequence[RankProfile]) -> str:
    lacking = _ranks(profiles, lambda profile: not profile.posix)
    if lacking:
        return f"file descriptors need devices that offer them, and those of {lacking} do not"
    hosts = [profile.host for profile in profiles]
    if len(set(hosts)) == 1:
        return ""
    places = by_value(hosts, "on {}")
    return f"file descriptors need all ranks on one machine, of one user and in one network namespace: {places}"


def _ranks(profiles: Sequence[RankProfile], found: Callable[[RankProfile], bool]) -> str:
    ranks = [rank for rank, profile in enumerate(profiles) if found(profile)]
    return listed(ranks) if ranks else ""


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``number``."""
    return -(-number // multiple) * multiple
