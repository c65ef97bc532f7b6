"""What can be wrong with a driver as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamalloc.driver.checker.reports import Hazard

__all__ = ["DriverMisuseError", "DriverNotFoundError", "ForkedProcessError"]


class DriverMisuseError(AssertionError):
    """Found by :func:`checked`: a hazard, something that was released twice or never, or a call that broke the return
    convention.

    ``hazard`` is the :class:`Hazard`, None where it is something else.
    """

    def __init__(self, message: str, hazard: Hazard | None = None) -> None:
        super().__init__(message)
        self.hazard = hazard


class DriverNotFoundError(RuntimeError):
    """No usable CUDA driver was found on this machine, and nobody asked for the simulated one."""


class ForkedProcessError(RuntimeError):
    """A forked child used an object of its parent: CUDA does not survive a fork."""
