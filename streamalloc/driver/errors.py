"""What can be wrong with a driver as a whole."""

from __future__ import annotations

__all__ = ["DriverNotFoundError", "ForkedProcessError"]


class DriverNotFoundError(RuntimeError):
    """No usable CUDA driver was found on this machine, and nobody asked for the simulated one."""


class ForkedProcessError(RuntimeError):
    """A forked child used an object of its parent: CUDA does not survive a fork."""
