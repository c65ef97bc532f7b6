"""Description of a simulated machine, and a profile for each GPU model, read from a real one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class Limit(NamedTuple):
    """A context limit: default, minimum and maximum."""

    default: int
    least: int
    most: int
    step: int


@dataclass(frozen=True)
class Profile:
    """A kind of device and the host it sits in."""

    name: str
    total_memory: int
    context_overhead: int
    """Bytes of the device's memory that the driver keeps for itself."""
    host_memory: int
    host_pool_addresses: int
    """Bytes of addresses that a pool of the host without a limit has. It is another number from day to day; 9 to 60 GiB
    were seen.
    """
    numa_nodes: int
    driver_version: int
    context_api_version: int
    context_flags: int
    stream_priorities: tuple[int, int]
    """Least and greatest."""
    multicast_granularity: int
    """The recommended one; the smallest is 2 MiB everywhere."""
    attributes: Mapping[str, int] = field(repr=False)
    """Device attributes by enum name without CU_DEVICE_ATTRIBUTE_. A query of another one is CUDA_ERROR_INVALID_VALUE.
    """
    limits: Mapping[str, Limit] = field(repr=False)
    """Limits of contexts by enum name without CU_LIMIT_; those that are not here are not supported."""
    peer_attributes: Mapping[str, int] = field(repr=False)
    """The same between two devices, by enum name without CU_DEVICE_P2P_ATTRIBUTE_."""
    error_strings: Mapping[str, str] = field(repr=False)
    """Answers of cuGetErrorString, by enum name, that are not the name in lower case."""


def _read(name: str) -> Profile:
    """A profile from its file."""
    data = json.loads(Path(__file__).with_name(f"{name}.json").read_text())
    limits = {limit: Limit(*numbers) for limit, numbers in data["limits"].items()}
    return Profile(**{**data, "stream_priorities": tuple(data["stream_priorities"]), "limits": limits})


# Read from an H200 with driver 580.159 (CUDA 13.0), except the multicast granularity: 512 MiB is what H100s told users
# (microsoft/mscclpp, DefaultNvlsBufferSize), and the page size in NVIDIA's kernel module. That 2 MiB will do is known
# from NCCL, which binds as little (NVIDIA/nccl#2077).
PROFILES: Mapping[str, Profile] = {"h200": _read("h200")}


@dataclass(frozen=True)
class MachineSpec:
    """The arguments of :func:`streamalloc.driver.simulated`, which documents them."""

    devices: int = 1
    memory: int | None = None
    profile_name: str = "h200"
    multicast: bool | None = None
    fabric: bool | None = None
    seed: int | None = None
    name: str | None = None
    multicast_slots: int = 128
    patience: float = 10.0
    host: str | None = None

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ValueError(f"devices must be at least 1, got {self.devices}")
        if self.profile_name not in PROFILES:
            raise ValueError(f"profile must be one of {sorted(PROFILES)}, got {self.profile_name!r}")
        if self.memory is not None and self.memory < 1:
            raise ValueError(f"memory must be at least 1 byte, got {self.memory}")

    @property
    def profile(self) -> Profile:
        return PROFILES[self.profile_name]

    @property
    def host_name(self) -> str:
        """Name of the machine in its IMEX domain; "" if it is the only one."""
        return self.host or os.environ.get("STREAMALLOC_HOST", "")

    @property
    def identity(self) -> str:
        """Machines of the same name, or made by the same arguments where they have none, are the same one."""
        named = self.name or os.environ.get("STREAMALLOC_MACHINE")
        return named or (
            f"{self.profile_name} x{self.devices} memory={self.memory} multicast={self.multicast} fabric={self.fabric}"
        )
