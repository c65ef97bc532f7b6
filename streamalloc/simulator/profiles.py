"""Profiles of machines: readings of real machines as JSON, and the description of a simulated machine.

``streamalloc profile`` writes a profile. Fields that a profile leaves out are taken from its ``base``, a profile of the
package. So values that could not be read on one machine are those of another machine. ``h200.json`` has every field.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from streamalloc.formats.sizes import size_in
from streamalloc.simulator.constants import ALIGNMENT, BLOCK, CHUNK

FORMAT, VERSION = "streamalloc profile", 1
BASE = "h200"
"""Name of the complete profile from which values are taken that a reading lacks."""
HANDLE_TYPES = {"NONE": 0, "POSIX_FILE_DESCRIPTOR": 1, "FABRIC": 8}
"""Handle types that Linux supports, with their numbers (``CUmemAllocationHandleType``)."""
_MOST_BYTES = 1 << 18
"""Largest size of a profile file in bytes. A profile of eight devices needs 30 KiB."""
_KiB, _GiB, _TiB = 1 << 10, 1 << 30, 1 << 40
MOST_OVERHEAD = 64 * _GiB
"""Largest size in bytes of the device memory that a driver itself uses."""


class Limit(NamedTuple):
    """Context limit: default, minimum, maximum and step. A minimum of None means that the range could not be read."""

    default: int
    least: int | None = None
    most: int = 0
    step: int = 1


class Granularity(NamedTuple):
    """Granularities in bytes. Sizes and addresses must be multiples of ``minimum``."""

    minimum: int
    recommended: int


@dataclass(frozen=True)
class Link:
    """Whether a device has access to the memory of another device, and the attributes of this pair of devices."""

    access: bool
    attributes: Mapping[str, int | None]
    """Values of the pair's attributes, by enum name without ``CU_DEVICE_P2P_ATTRIBUTE_``; None for a value that was not
    read.
    """


# -- reading a file ------------------------------------------------------------------------------------------


class ProfileError(ValueError):
    """A profile that cannot be used. The message of :func:`load` names the file or the profile, and, if the file could
    be read as a profile, the field at fault.
    """


Check = Callable[[str, Any], Any]
"""Function that gets the name of a field and its value. It returns the value, perhaps converted, or raises
:class:`ProfileError`.
"""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:56]} ..."


def _whole(least: int, most: int) -> Check:
    one_of = f"a whole number from {least} to {most}" if least < most else f"{least}, the only one that is simulated"

    def check(at: str, value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise ProfileError(f"{at} must be {one_of}, got {_shown(value)}")
        return value

    return check


def _text(at: str, value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) < 256 or not (value.isascii() and value.isprintable()):
        raise ProfileError(f"{at} must be a line of 1 to 255 ASCII characters, got {_shown(value)}")
    return value


def _list(one: Check, least: int = 0, most: int = 64) -> Check:
    def check(at: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise ProfileError(f"{at} must be a list of {least} to {most} entries, got {_shown(value)}")
        return tuple(one(f"{at}[{number}]", item) for number, item in enumerate(value))

    return check


def _table(one: Check) -> Check:
    """Make the check of a JSON object whose keys are names of the driver.

    ``one`` checks each value except null. Null marks a name that the driver does not know.
    """

    def check(at: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > 1024:
            raise ProfileError(f"{at} must be an object of up to 1024 entries, got {_shown(value)}")
        for name in value:
            if not re.fullmatch(r"[A-Z0-9_]{1,64}", name):
                raise ProfileError(f"{at} has the key {_shown(name)}, which is no name of the driver")
        return {name: None if item is None else one(f"{at}.{name}", item) for name, item in value.items()}

    return check


def _priorities(at: str, value: Any) -> tuple[int, int]:
    least, greatest = _list(_whole(-1000, 1000), 2, 2)(at, value)
    if least < greatest:
        raise ProfileError(f"{at} must be the least and the greatest, which is the smaller number, got {value}")
    return least, greatest


def _granularity(at: str, value: Any) -> Granularity:
    found = Granularity(*_list(_whole(4 * _KiB, _GiB), 2, 2)(at, value))
    if any(size & (size - 1) for size in found) or found.minimum > found.recommended:
        raise ProfileError(f"{at} must be two powers of two, the minimum and the recommended one, got {value}")
    return found


def _limit(at: str, value: Any) -> Limit:
    if isinstance(value, list) and len(value) == 1:
        return Limit(_int64(f"{at}[0]", value[0]))
    found = Limit(*_list(_int64, 4, 4)(at, value))
    assert found.least is not None
    if not found.least <= found.default <= found.most or not found.step:
        raise ProfileError(f"{at} must be the default, minimum, maximum and step, got {value}")
    return found


def _link(at: str, value: Any) -> tuple[tuple[int, int], Link]:
    if not isinstance(value, dict) or value.keys() != _LINK.keys():
        raise ProfileError(f"{at} must be an object of {', '.join(_LINK)}, got {_shown(value)}")
    one, two, access, attributes = (check(f"{at}.{name}", value[name]) for name, check in _LINK.items())
    return (one, two), Link(bool(access), attributes)


def _links(at: str, value: Any) -> dict[tuple[int, int], Link]:
    given = _list(_link, 0, 64 * 63)(at, value)
    found = dict(given)
    if len(found) < len(given) or any(one == two for one, two in found):
        raise ProfileError(f"{at} has a link of a device to itself, or two of one pair of devices")
    return found


_int32, _int64 = _whole(-(1 << 31), (1 << 31) - 1), _whole(0, (1 << 63) - 1)
_numbers = _table(_int32)
_LINK = {"from": _whole(0, 63), "to": _whole(0, 63), "access": _whole(0, 1), "attributes": _numbers}


def _read(check: Check, repr: bool = True) -> Any:
    """Declare a field of :class:`Profile` that a profile's file can have. ``check`` checks and converts its value."""
    return field(repr=repr, metadata={"check": check})


@dataclass(frozen=True)
class Profile:
    """Description of a GPU model and its host. In a table by names of the driver, None marks a name that the driver
    does not know.
    """

    source: str = _read(_text)
    """Text that names the machine on which the profile was read."""
    name: str = _read(_text)
    driver_version: int = _read(_whole(11000, 99990))
    total_memory: int = _read(_whole(_GiB, 4 * _TiB))
    context_overhead: int = _read(_whole(0, MOST_OVERHEAD))
    """Size in bytes of the device memory that the driver itself uses."""
    context_free: tuple[int, ...] = _read(_list(_whole(0, 32 << 20), 0, 4))
    """Free bytes in each region of addresses that begins with memory of the context itself."""
    host_memory: int = _read(_whole(_GiB, 16 * _TiB))
    host_pool_addresses: int = _read(_whole(CHUNK, 16 * _TiB))
    """Bytes of addresses that a host pool without ``max_size`` reserves; on the H200 machine twice the memory of the
    NUMA node.
    """
    numa_nodes: int = _read(_whole(1, 64))
    imex_channel: int = _read(_whole(0, 1))
    """1 if the user may open an IMEX channel, which fabric handles need; otherwise 0."""
    context_api_version: int = _read(_whole(0, 99999))
    context_flags: int = _read(_whole(0, 255))
    stream_priorities: tuple[int, int] = _read(_priorities)
    """Least and greatest priority of a stream. The greatest priority is the smaller number."""
    pitch: int = _read(_whole(1, 1 << 20))
    """Alignment of row pitches of ``cuMemAllocPitch``, in bytes."""
    pool_chunk: int = _read(_whole(CHUNK, CHUNK))
    """Size in bytes by which pools grow. This field and the next two have the same values in all profiles."""
    pool_alignment: int = _read(_whole(ALIGNMENT, ALIGNMENT))
    plain_block: int = _read(_whole(BLOCK, BLOCK))
    """Size in bytes of the blocks that small cuMemAlloc allocations share."""
    granularities: Mapping[str, Mapping[str, Granularity | None]] = _read(_table(_table(_granularity)), repr=False)
    """Granularities by location type (DEVICE, HOST, HOST_NUMA) or MULTICAST, then by handle type."""
    attributes: Mapping[str, int | None] = _read(_numbers, repr=False)
    """Device attributes by enum name without CU_DEVICE_ATTRIBUTE_."""
    limits: Mapping[str, Limit | None] = _read(_table(_limit), repr=False)
    """Context limits by enum name without CU_LIMIT_. A limit that is missing here is not supported by the driver."""
    devices: tuple[Mapping[str, int | None], ...] = _read(_list(_numbers, 1), repr=False)
    """For each device of the machine that was read, by ordinal: the attributes that differ from ``attributes``."""
    links: Mapping[tuple[int, int], Link] = _read(_links, repr=False)
    """Links between devices, by tuple of two ordinals: the accessing device, and the owner of the memory."""
    error_strings: Mapping[str, str | None] = _read(_table(_text), repr=False)
    """Results of cuGetErrorString by enum name. For errors that are missing here, or None, the driver refuses the call
    with CUDA_ERROR_INVALID_VALUE.
    """
    identity: str = ""
    """Name of a built-in profile, or digest of the profile's file. Equal profiles have equal identities."""

    def granularity(self, place: str = "DEVICE", handle_types: int = 0) -> Granularity | None:
        """Return the granularity of memory that can be exported by all of ``handle_types``. None if the driver refuses
        such memory.

        ``place``: DEVICE, HOST, HOST_NUMA or MULTICAST. ``handle_types``: bits of :data:`HANDLE_TYPES`.
        """
        table = self.granularities[place]
        kinds = [name for name, bit in HANDLE_TYPES.items() if handle_types & bit]
        found = [table.get(name) for name in kinds or ["NONE"]]
        known = [one for one in found if one is not None]
        return Granularity(*map(max, zip(*known, strict=True))) if len(known) == len(found) else None

    @functools.cached_property
    def page(self) -> int:
        """Minimum granularity of device memory in bytes. Address ranges and mappings are multiples of it."""
        return min((one.minimum for one in self.granularities["DEVICE"].values() if one), default=BLOCK)

    @functools.cached_property
    def team_page(self) -> int:
        """Minimum granularity of multicast objects in bytes; :attr:`page` if the driver has no such objects. Their
        sizes, offsets and addresses are multiples of it.
        """
        of_teams = self.granularity("MULTICAST")
        return of_teams.minimum if of_teams else self.page

    def device_attributes(self, ordinal: int) -> dict[str, int]:
        """Return the attributes of a device by name, without those that its driver does not know.

        A device beyond those of the profile has the attributes of the profile's last device, but a PCI device number of
        its own.
        """
        read = self.devices[min(ordinal, len(self.devices) - 1)]
        found = {name: number for name, number in {**self.attributes, **read}.items() if number is not None}
        found["PCI_DEVICE_ID"] += max(ordinal - len(self.devices) + 1, 0)
        return found

    def link(self, source: int, target: int) -> Link | None:
        """Return the link between two devices; None if it is unknown.

        If all links of the profile are equal, devices that were not read have the same link.
        """
        found = self.links.get((source, target))
        others = list(self.links.values())
        same = others and all(one == others[0] for one in others)
        return found or (others[0] if same else None)


_FIELDS: dict[str, Check] = {one.name: one.metadata["check"] for one in fields(Profile) if one.metadata}
_MERGED = ("granularities", "attributes", "limits", "error_strings")
"""Tables whose entries replace the entries of the base profile one by one."""
_NEEDED = {
    "granularities": ("DEVICE", "HOST", "HOST_NUMA", "MULTICAST"),
    "attributes": (
        *("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MULTIPROCESSOR_COUNT"),
        *("MAX_THREADS_PER_MULTIPROCESSOR", "MAX_THREADS_PER_BLOCK", "MAX_SHARED_MEMORY_PER_BLOCK"),
        *("TOTAL_CONSTANT_MEMORY", "WARP_SIZE", "MAX_PITCH", "MAX_REGISTERS_PER_BLOCK", "CLOCK_RATE"),
        *("TEXTURE_ALIGNMENT", "PCI_DOMAIN_ID", "PCI_BUS_ID", "PCI_DEVICE_ID"),
        *(f"MAX_{kind}_DIM_{axis}" for kind in ("BLOCK", "GRID") for axis in "XYZ"),
    ),
}
"""Entries that these tables must have. The attributes among them must not be negative."""


def _parsed(data: bytes) -> dict[str, Any]:
    """Return the fields in a profile's file as JSON values, without those of its base.

    Raises :class:`ProfileError` if the bytes are no profile of this version.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"it is no JSON: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ProfileError(f"format must be {FORMAT!r}: `streamalloc profile -o FILE` makes such a file")
    if type(found.get("version")) is not int or found["version"] != VERSION:
        raise ProfileError(f"version must be {VERSION}, got {_shown(found.get('version'))}")
    unknown = [name for name in found if name not in (*_FIELDS, "format", "version", "base")]
    if unknown:
        raise ProfileError(f"{_shown(unknown[0])} is no field of version {VERSION}")
    return found


def parse(data: bytes, identity: str) -> Profile:
    """Return the profile in the bytes of a file. ``identity``: value of :attr:`Profile.identity`.

    Raises
    ------
    ProfileError
        The bytes are no JSON of this format and version, or a field is missing, unknown, or of another type or size
        than a machine can have; the message names the field.
    """
    given = _parsed(data)
    values: dict[str, Any] = {}
    if "base" in given:
        if given["base"] not in BUILT_IN:
            raise ProfileError(f"base must be one of {sorted(BUILT_IN)}, got {_shown(given['base'])}")
        base = built_in(given["base"])
        values = {one.name: getattr(base, one.name) for one in fields(base) if one.name != "identity"}
    for name, check in _FIELDS.items():
        if name in given:
            value = check(name, given[name])
            values[name] = _merged(values[name], value) if name in _MERGED and name in values else value
        elif name not in values:
            raise ProfileError(f"{name} is missing, and no base is named")
    _check_together(values)
    return Profile(**values, identity=identity)


def _merged(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Merge two tables of one field: entries of ``given`` replace entries of ``base``. Inner tables are merged entry by
    entry.

    A limit without a range keeps the limit of ``base``, range included, if both have the same default.
    """
    found = dict(base)
    for name, one in given.items():
        there = base.get(name)
        if isinstance(one, dict) and isinstance(there, dict):
            found[name] = {**there, **one}
        # A limit without a range keeps the range of the base profile, if both have the same default.
        elif not (isinstance(one, Limit) and there and one == Limit(there.default)):
            found[name] = one
    return found


def _check_together(values: dict[str, Any]) -> None:
    for table, names in _NEEDED.items():
        for name in names:
            found = values[table].get(name)
            if found is None or (table == "attributes" and found < 0):
                raise ProfileError(f"{table}.{name} is needed, and {'negative' if found is not None else 'missing'}")
    for number, device in enumerate(values["devices"]):
        for name in _NEEDED["attributes"]:
            if (device.get(name, 0) or 0) < 0 or device.get(name, 0) is None:
                raise ProfileError(f"devices[{number}].{name} must not be negative or null")
    if values["context_overhead"] >= values["total_memory"]:
        raise ProfileError("context_overhead must be less than total_memory")
    beyond = [pair for pair in values["links"] if max(pair) >= max(len(values["devices"]), 2)]
    if beyond:
        raise ProfileError(f"links has one of devices {beyond[0][0]} and {beyond[0][1]}, which devices does not have")


BUILT_IN = ("h100", "h200")
"""Profiles of the package. All values were read, except the recommended granularity of multicast objects: 512 MiB as
reported for H100 (microsoft/mscclpp, DefaultNvlsBufferSize), which is the page size in NVIDIA's kernel module. 2 MiB
are enough: NCCL binds as little (NVIDIA/nccl#2077).
"""


@functools.cache
def built_in(name: str) -> Profile:
    return parse(Path(__file__).with_name(f"{name}.json").read_bytes(), name)


def load(name: str) -> Profile:
    """Return the profile ``name``: a name of :data:`BUILT_IN`, or the path of a ``.json`` file.

    Raises
    ------
    ProfileError
        There is no such profile or file, or the file cannot be read or is no valid profile.
    """
    if name in BUILT_IN:
        return built_in(name)
    path = Path(name)
    if path.suffix != ".json" and path.name == name:
        raise ProfileError(f"profile must be one of {sorted(BUILT_IN)} or a .json file, got {name!r}")
    try:
        if not path.is_file():  # Without this check, opening a pipe would block.
            raise FileNotFoundError("there is no such file")
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path.
        raise ProfileError(f"profile={name!r} cannot be read: {error}") from None
    if len(data) > _MOST_BYTES:
        raise ProfileError(f"profile={name!r} has more than {_MOST_BYTES} bytes")
    try:
        return parse(data, f"profile {hashlib.sha256(data).hexdigest()[:16]}")
    except ProfileError as error:
        raise ProfileError(f"profile={name!r}: {error}") from None


# -- a machine -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MachineSpec:
    """Arguments of :func:`streamalloc.driver.simulated`. The fields are documented there.

    Raises ``ValueError`` for a number, a text or a choice that is not allowed, and :class:`ProfileError` if the profile
    cannot be used.
    """

    devices: int = 1
    memory: int | None = None
    """Number of bytes. Text such as ``"64MiB"`` is converted to it."""
    profile_name: str = BASE
    multicast: bool | None = None
    fabric: bool | None = None
    seed: int | None = None
    name: str | None = None
    multicast_slots: int = 128
    patience: float = 10.0
    kernels: str = "refuse"
    host: str | None = None
    profile: Profile = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given: Any = self.memory
        if isinstance(given, str):
            try:
                object.__setattr__(self, "memory", size_in(given))
            except ValueError as error:
                raise ValueError(f"memory={error}") from None
        for name in ("devices", "memory", "multicast_slots"):
            value = getattr(self, name)
            if value is not None and not hasattr(value, "__index__"):
                raise TypeError(f"{name} must be an integer, not {type(value).__name__} ({value!r})")
        for name, text in (("name", self.name), ("host", self.host), ("profile", self.profile_name)):
            if text and "," in os.fspath(text):
                raise ValueError(f"{name}={text!r}: a comma ends a setting of STREAMALLOC_DRIVER, for child processes")
        if self.devices < 1:
            raise ValueError(f"devices must be at least 1, got {self.devices}")
        if self.kernels not in ("refuse", "ignore"):
            raise ValueError(f"kernels must be 'refuse' or 'ignore', got {self.kernels!r}")
        if self.memory is not None and self.memory < 1:
            raise ValueError(f"memory must be at least 1 byte, got {self.memory}")
        if self.multicast_slots < 0 or not self.patience >= 0:  # `not >=` refuses NaN, too.
            given = f"multicast_slots={self.multicast_slots}, patience={self.patience}"
            raise ValueError(f"multicast_slots and patience must be at least 0, got {given}")
        object.__setattr__(self, "profile", load(os.fspath(self.profile_name)))

    @functools.cached_property
    def given_name(self) -> str:
        """Name that the user gave to the machine, as an argument or by ``STREAMALLOC_MACHINE``; empty if there is
        none.
        """
        return self.name or os.environ.get("STREAMALLOC_MACHINE", "")

    @property
    def host_name(self) -> str:
        """Name of the machine in its IMEX domain, from the argument or from ``STREAMALLOC_HOST``; empty if it is in
        none.
        """
        return self.host or os.environ.get("STREAMALLOC_HOST", "")

    @property
    def identity(self) -> str:
        """Name of the machine, or its arguments as text if it has no name. Equal identities stand for one machine."""
        return self.given_name or (
            f"{self.profile.identity} x{self.devices} memory={self.memory} multicast={self.multicast} "
            f"fabric={self.fabric}"
        )
