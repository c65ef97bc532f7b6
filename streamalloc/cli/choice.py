"""Which driver a command runs on, and how that is said."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from streamalloc import driver as sd
from streamalloc.core.device import Device
from streamalloc.core.properties import MemLocation
from streamalloc.driver import Driver, DriverNotFoundError, default, simulated
from streamalloc.driver.internal import read_choice

__all__ = ["KEEP_ALL", "Chosen", "choose", "cuda_version", "host_pool_location", "is_simulated", "plural"]

KEEP_ALL = 2**64 - 1
"""The release threshold of a pool that gives nothing back by itself."""

# Enough for the parts of a command that need two.
_DEVICES_WITHOUT_A_GPU = 2


def is_simulated(driver: Driver) -> bool:
    """Whether a driver is a simulated one, or a wrapper of one."""
    return bool(getattr(driver, "is_simulated", False))


@dataclass(frozen=True)
class Chosen:
    """The driver of a command."""

    driver: Driver
    not_found: str = ""
    """Why the machine's own driver is not used, where the simulated one had to stand in; else empty."""

    @property
    def is_simulated(self) -> bool:
        """Whether it is a simulated driver, or a wrapper of one."""
        return is_simulated(self.driver)

    @property
    def headline(self) -> str:
        """The first line of a command's output: what it runs on."""
        devices = Device.all(self.driver)
        names = ", ".join(sorted({device.name for device in devices}))
        if not self.is_simulated:
            several = f" ({len(devices)} GPUs)" if len(devices) > 1 else ""
            return f"running on a GPU: {names}{several}, driver {self.version}"
        machine = f"running on the simulated driver ({plural(len(devices), 'device')} like the {names})"
        return f"no CUDA driver found: {machine}" if self.not_found else machine

    @property
    def version(self) -> str:
        """The driver's version: the kernel module's where there is one, and the CUDA version it is made for."""
        cuda = f"for CUDA {cuda_version(self.driver)}"
        return f"{self.kernel_version} {cuda}" if self.kernel_version else cuda

    @property
    def kernel_version(self) -> str | None:
        """The version of NVIDIA's kernel module; None where it cannot be told, as on a simulated driver."""
        if self.is_simulated:
            return None
        try:
            return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None


def choose(driver: str | None = None, devices: int | None = None) -> Chosen:
    """The driver that the arguments ask for, else the one of a ``with use(...)`` block or STREAMALLOC_DRIVER, else the
    machine's, else a simulated one.

    Parameters
    ----------
    driver
        A text as STREAMALLOC_DRIVER has it.
    devices
        How many devices the machine has; only a simulated one has as many as it is asked for.

    Raises
    ------
    DriverNotFoundError
        The machine's driver was asked for, and there is none.
    ValueError
        Something unknown was asked for, or a number of devices of the machine's own driver.
    """
    asked = driver or (os.environ.get("STREAMALLOC_DRIVER") if devices is not None else None)
    if asked:
        kind, settings = read_choice(asked, "--driver" if driver else "STREAMALLOC_DRIVER")
        if kind == "simulated":
            return Chosen(simulated(**settings | ({} if devices is None else {"devices": devices})))
        if devices is None:
            return Chosen(sd.real())
    else:
        try:
            found = default()
        except DriverNotFoundError as error:
            if os.environ.get("STREAMALLOC_DRIVER"):
                raise
            count = _DEVICES_WITHOUT_A_GPU if devices is None else devices
            return Chosen(simulated(devices=count), not_found=str(error))
        if devices is None:
            return Chosen(found)
    why = "only a simulated machine (--driver=simulated) has as many as it is asked for"
    raise ValueError(f"--devices={devices}: {why}")


def cuda_version(driver: Driver) -> str:
    """The newest CUDA version that a driver supports (``cuDriverGetVersion``)."""
    _, number = driver.cuDriverGetVersion()
    return f"{number // 1000}.{number % 1000 // 10}"


def host_pool_location(device: Device) -> MemLocation | None:
    """Where a pool in host memory can be that the device reaches; None where there can be none."""
    supports = device.supports
    if supports.host_memory_pools:
        return MemLocation.host()
    if supports.host_numa_memory_pools:
        return MemLocation.host_numa(max(supports.host_numa_id or 0, 0))
    return None


def plural(count: int, noun: str) -> str:
    """``"1 device"``, ``"2 devices"``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
