"""What the ranks of a symmetric memory tell each other first, and what follows from it: the same on every rank.

Nothing here calls a driver or another rank. Errors that it raises are raised on all ranks, for all know the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from streamalloc.core.arguments import FABRIC_NEEDS
from streamalloc.core.errors import NotSupportedError, refused
from streamalloc.core.properties import MemHandleType
from streamalloc.ipc.internal import by_value, listed

__all__ = ["CHANNELS", "Layout", "Plan", "RankProfile", "decide", "layout_of"]

CHANNELS = 16
"""How many barriers, and how many signals between two ranks, can be under way independently of each other."""

_FORMAT = 1
_LINE = 128
_WORD = 4
_ADDRESS = 8
_KINDS = 2
_FABRIC, _POSIX = MemHandleType.FABRIC, MemHandleType.POSIX_FILE_DESCRIPTOR


@dataclass(frozen=True)
class RankProfile:
    """What one rank was asked for, and what its device can do."""

    nbytes: int
    signal_pad_bytes: int
    multicast: bool | None
    """None: where it works."""
    handle_type: int
    """0: whatever works."""
    host: str
    device: str
    """The device's UUID and name."""
    driver_version: int
    granularity: int
    posix: bool
    fabric: bool
    multicast_supported: bool
    multicast_granularity: dict[str, int]
    """By handle type; empty where multicast is out of the question."""
    format: int = _FORMAT

    def to_bytes(self) -> bytes:
        """For other ranks, which may run another version of this library."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> RankProfile:
        """What another rank said.

        Raises
        ------
        ValueError
            It runs a version of this library that says something else.
        """
        said = json.loads(data)
        if not isinstance(said, dict) or said.get("format") != _FORMAT:
            raise ValueError("the ranks run versions of streamalloc that do not understand each other")
        return cls(**said)


class Layout(NamedTuple):
    """Where things are in each rank's memory, in bytes from its beginning."""

    nbytes: int
    signal_pad: int
    signal_pad_bytes: int
    words: int
    """The counters behind barriers and signals."""
    word_count: int
    buffer_table: int
    signal_table: int
    total: int

    def word(self, kind: int, channel: int, sender: int, size: int) -> int:
        """A counter that ``sender`` raises."""
        return self.words + _WORD * ((kind * CHANNELS + channel) * size + sender)


def layout_of(nbytes: int, signal_pad_bytes: int, size: int) -> Layout:
    """The layout for ``size`` ranks: the user's bytes first, each other part on cache lines of its own."""
    signal_pad = _up(nbytes, _LINE)
    words = _up(signal_pad + signal_pad_bytes, _LINE)
    word_count = _KINDS * CHANNELS * size
    buffer_table = _up(words + _WORD * word_count, _LINE)
    signal_table = _up(buffer_table + _ADDRESS * size, _LINE)
    total = signal_table + _ADDRESS * size
    return Layout(nbytes, signal_pad, signal_pad_bytes, words, word_count, buffer_table, signal_table, total)


class Plan(NamedTuple):
    """What all ranks do."""

    layout: Layout
    multicast: bool
    physical_bytes: dict[MemHandleType, int]
    """The size of each rank's physical memory with the handle types to try, the best one first."""


def decide(profiles: Sequence[RankProfile], *, one_process: bool) -> Plan:
    """What to do, given what all ranks say.

    Raises
    ------
    ValueError
        The ranks were asked for different things; the message names them.
    NotSupportedError
        Multicast or a handle type was asked for and does not work, or no handle type does; the message says why.
    """
    for name in ("nbytes", "signal_pad_bytes", "multicast", "handle_type"):
        _check_same(name, profiles)
    one = profiles[0]
    why_not = _why_no_multicast(profiles)
    if one.multicast and why_not:
        raise refused(NotSupportedError, "cuMulticastCreate", f"needs {why_not}")
    multicast = one.multicast is not False and not why_not
    kinds = (MemHandleType.NONE,) if one_process else _kinds(profiles)
    layout = layout_of(one.nbytes, one.signal_pad_bytes, len(profiles))
    physical_bytes = {}
    for kind in kinds:
        granularities = [profile.granularity for profile in profiles]
        if multicast:
            granularities += [profile.multicast_granularity[str(int(kind))] for profile in profiles]
        physical_bytes[kind] = _up(layout.total, max(granularities))
    return Plan(layout, multicast, physical_bytes)


def _check_same(name: str, profiles: Sequence[RankProfile]) -> None:
    values = [getattr(profile, name) for profile in profiles]
    if any(value != values[0] for value in values):
        given = by_value([_shown(name, value) for value in values], "gave {}")
        raise ValueError(f"{name} must be the same on all ranks: {given}")


def _shown(name: str, value: Any) -> str:
    if value is None or (name == "handle_type" and not value):
        return "'auto'" if name == "multicast" else "none"
    return repr(MemHandleType(value)) if name == "handle_type" else repr(value)


def _kinds(profiles: Sequence[RankProfile]) -> tuple[MemHandleType, ...]:
    asked = MemHandleType(profiles[0].handle_type)
    kinds = []
    reasons = []
    for kind, why_not in ((_FABRIC, _why_no_fabric(profiles)), (_POSIX, _why_no_descriptors(profiles))):
        if asked in (MemHandleType.NONE, kind):
            if why_not:
                reasons.append(why_not)
            else:
                kinds.append(kind)
    if not kinds:
        raise refused(NotSupportedError, "cuMemExportToShareableHandle", "; or else ".join(reasons))
    return tuple(kinds)


def _why_no_multicast(profiles: Sequence[RankProfile]) -> str:
    if len(profiles) < 2:
        return "a team of two devices or more, found one"
    lacking = _ranks(profiles, lambda profile: not profile.multicast_supported)
    if lacking:
        return f"devices that support multicast objects (joined by NVSwitch), found that those of {lacking} do not"
    if len({profile.device for profile in profiles}) < len(profiles):
        return f"a device for each rank, found that some share one: {[profile.device for profile in profiles]}"
    return ""


def _why_no_fabric(profiles: Sequence[RankProfile]) -> str:
    lacking = _ranks(profiles, lambda profile: not profile.fabric)
    return f"{FABRIC_NEEDS}; those of {lacking} offer none" if lacking else ""


def _why_no_descriptors(profiles: Sequence[RankProfile]) -> str:
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


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
