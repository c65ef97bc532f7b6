"""Choice of the driver that a command runs on."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from streamalloc import driver as sd
from streamalloc.core.internal import Device
from streamalloc.driver import Driver, DriverNotFoundError, default, simulated
from streamalloc.driver.internal import read_choice


class UsageError(Exception):
    """A command cannot run with these arguments; ``main`` prints the message and returns exit code 2."""


KEEP_ALL = 2**64 - 1
"""Release threshold in bytes at which a pool keeps all its memory."""

_DEVICES_WITHOUT_A_GPU = 2
"""Devices of the simulated machine by default: some parts need two."""


def is_simulated(driver: Driver) -> bool:
    """Whether a driver is simulated, or wraps a simulated one."""
    return bool(getattr(driver, "is_simulated", False))


@dataclass(frozen=True)
class Chosen:
    """The driver of a command."""

    driver: Driver
    not_found: str = ""
    """Error text, if the simulated driver replaces a missing CUDA driver."""

    @property
    def is_simulated(self) -> bool:
        """Whether the driver is simulated, or wraps a simulated one."""
        return is_simulated(self.driver)

    @property
    def headline(self) -> str:
        """First line of a command's output: the machine and its driver."""
        devices = Device.all(self.driver)
        names = ", ".join(sorted({device.name for device in devices}))
        if not self.is_simulated:
            several = f" ({len(devices)} GPUs)" if len(devices) > 1 else ""
            return f"running on a GPU: {names}{several}, driver {self.version}"
        machine = f"running on the simulated driver ({plural(len(devices), 'device')} like the {names})"
        return f"no CUDA driver found: {machine}" if self.not_found else machine

    @property
    def version(self) -> str:
        """Version of NVIDIA's kernel module, if known, and the CUDA version that the driver supports."""
        cuda = f"for CUDA {cuda_version(self.driver)}"
        return f"{self.kernel_version} {cuda}" if self.kernel_version else cuda

    @property
    def kernel_version(self) -> str | None:
        """Version of NVIDIA's kernel module; None if unknown, as on a simulated driver."""
        if self.is_simulated:
            return None
        try:
            return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None


def choose(driver: str | None = None, devices: int | None = None) -> Chosen:
    """Return the driver of the first of these that is given.

    1. The argument ``driver``.
    2. A ``with use(...)`` block, or STREAMALLOC_DRIVER.
    3. The machine's own CUDA driver.
    4. A simulated driver.

    Parameters
    ----------
    driver
        A text in the format of STREAMALLOC_DRIVER.
    devices
        Number of devices of the simulated machine.

    Raises
    ------
    DriverNotFoundError
        The machine's driver was requested, and there is none.
    ValueError
        The text is invalid, or ``devices`` was given for the machine's own driver.
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
            # Without the remedy for programs.
            return Chosen(simulated(devices=count), not_found=str(error).partition(" To run ")[0])
        if devices is None:
            return Chosen(found)
    raise ValueError(f"--devices={devices}: only a simulated machine (--driver=simulated) takes a number of devices")


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--json [FILE]``."""
    about = "write JSON to FILE; without FILE print it instead of the table"
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-", help=about)


def cuda_version(driver: Driver) -> str:
    """Return the newest CUDA version that a driver supports (``cuDriverGetVersion``)."""
    _, number = driver.cuDriverGetVersion()
    return f"{number // 1000}.{number % 1000 // 10}"


def plural(count: int, noun: str) -> str:
    """Return ``"1 device"`` or ``"2 devices"``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
