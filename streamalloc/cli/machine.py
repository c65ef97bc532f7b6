"""The machine on which a command runs: the choice of its driver, and checks of what its devices support."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import streamalloc as sa
from streamalloc import driver as sd
from streamalloc.driver import Driver, simulated
from streamalloc.driver.internal import default_or_simulated, read_choice
from streamalloc.formats.sizes import counted

KEEP_ALL = 2**64 - 1
"""Release threshold in bytes with which a pool keeps all its memory."""
POSIX = sa.MemHandleType.POSIX_FILE_DESCRIPTOR

_DEVICES_WITHOUT_A_GPU = 2
"""Number of devices of a simulated machine that is chosen because there is no GPU. Some commands need two."""


def is_simulated(driver: Driver) -> bool:
    """Whether a driver is simulated, or wraps a simulated one."""
    return bool(getattr(driver, "is_simulated", False))


@dataclass(frozen=True)
class Chosen:
    """Driver on which a command runs."""

    driver: Driver
    not_found: str = ""
    """Text of the error that says why the CUDA driver is missing, if a simulated driver replaces it; otherwise
    empty.
    """

    @property
    def is_simulated(self) -> bool:
        """Whether the driver is simulated, or wraps a simulated one."""
        return is_simulated(self.driver)

    @property
    def headline(self) -> str:
        """First line of the output of a command: the machine and its driver."""
        devices = sa.Device.all(self.driver)
        names = ", ".join(sorted({device.name for device in devices}))
        if not self.is_simulated:
            several = f" ({len(devices)} GPUs)" if len(devices) > 1 else ""
            return f"running on a GPU: {names}{several}, driver {self.version}"
        machine = f"running on the simulated driver ({counted(len(devices), 'device')} like the {names})"
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
    """Return the driver on which a command runs. The first of these that is given or present is used:

    1. the argument ``driver``;
    2. a ``with use(...)`` block, ``set_default``, or STREAMALLOC_DRIVER;
    3. the machine's own CUDA driver;
    4. a simulated driver.

    Parameters
    ----------
    driver
        A text in the format of STREAMALLOC_DRIVER.
    devices
        Number of devices of the simulated machine. It replaces a number that the text has. Default: that of the text,
        or else 1; but 2 if no driver was chosen, and the machine has none.

    Raises
    ------
    DriverNotFoundError
        The machine's own driver was chosen, and there is none.
    ValueError
        The text is invalid; or ``devices`` was given, and the driver is the machine's own, or that of ``set_default``
        or of a ``with use(...)`` block.
    """
    asked = driver or (os.environ.get("STREAMALLOC_DRIVER") if devices is not None else None)
    if asked:
        kind, settings = read_choice(asked, "--driver" if driver else "STREAMALLOC_DRIVER")
        if kind == "simulated":
            return Chosen(simulated(**settings | ({} if devices is None else {"devices": devices})))
        if devices is None:
            return Chosen(sd.real())
    else:
        found, why = default_or_simulated(devices=_DEVICES_WITHOUT_A_GPU if devices is None else devices)
        if why or devices is None:
            # The remedy at the end of the error is for programs, so a command leaves it out.
            return Chosen(found, not_found=why.partition(" To run ")[0])
    raise ValueError(f"--devices={devices}: only a simulated machine (--driver=simulated) takes a number of devices")


def cuda_version(driver: Driver) -> str:
    """Return the newest CUDA version that a driver supports, as text such as ``"13.0"`` (``cuDriverGetVersion``)."""
    _, number = driver.cuDriverGetVersion()
    return f"{number // 1000}.{number % 1000 // 10}"


# --- requirements of parts of the tour and rows of the benchmark ------------------------------------------------------


class Unavailable(Exception):
    """A part of the tour or a row of the benchmark that cannot run on this machine. The message says why."""


def need(condition: object, why: str) -> None:
    """Raise :class:`Unavailable` with the reason ``why`` unless ``condition`` is true."""
    if not condition:
        raise Unavailable(why)


def need_virtual_memory(device: sa.Device) -> None:
    """Raise :class:`Unavailable` if the device has no virtual memory management."""
    need(device.supports.virtual_memory_management, "this device does not support virtual memory management")


def need_gates(device: sa.Device) -> None:
    """Raise :class:`Unavailable` if the device's streams cannot be blocked: they cannot wait for a value
    (``cuStreamWaitValue32``).
    """
    why = "this device's streams cannot wait for memory values, so no step can keep work pending"
    need(device.supports.stream_memory_operations, why)


def need_shared_pools(device: sa.Device) -> None:
    """Raise :class:`Unavailable` if the device has no pools that another process on this machine can open, or if its
    streams cannot be blocked (:func:`need_gates`).
    """
    need_gates(device)
    kinds = device.supports.pool_handle_types or sa.MemHandleType.NONE
    need(POSIX in kinds, "this device's pools cannot be shared with other processes")


def need_host_pool(device: sa.Device) -> sa.MemLocation:
    """Return a location of host memory for a pool that the device can access.

    Raises :class:`Unavailable` without one.
    """
    supports = device.supports
    if supports.host_memory_pools:
        return sa.MemLocation.host()
    need(supports.host_numa_memory_pools, "this device, its driver or these bindings have no pools in host memory")
    return sa.MemLocation.host_numa(max(supports.host_numa_id or 0, 0))


def need_peers(driver: Driver) -> list[sa.Device]:
    """Return two GPUs or more that have access to each other's memory, GPU 0 first.

    Raises :class:`Unavailable` if no other GPU has such access together with GPU 0.
    """
    devices = sa.Device.all(driver)
    need(len(devices) > 1, "this machine has one GPU")
    peers: list[sa.Device] = []
    for device in devices:
        if all(device.can_access(other) and other.can_access(device) for other in peers):
            peers.append(device)
    need(len(peers) > 1, "no other GPU of this machine has access to the memory of GPU 0 and the reverse")
    return peers
