"""Errors that concern a whole driver: none was found, a forked child used one, or a program misused one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamalloc.driver.reports import Hazard


class DriverMisuseError(AssertionError):
    """A hazard, double release, leak, or broken return convention, found by :func:`checked`.

    ``hazard`` is the :class:`Hazard`; None for other causes.
    """

    def __init__(self, message: str, hazard: Hazard | None = None) -> None:
        super().__init__(message)
        self.hazard = hazard


class DriverNotFoundError(RuntimeError):
    """No usable CUDA driver was found, and the simulated driver was not chosen.

    :func:`real` and :func:`default` raise it.
    """


class ForkedProcessError(RuntimeError):
    """A forked child used an object of its parent, which CUDA does not support.

    Start processes by ``spawn``, as the programs of :doc:`/docs/guides/ipc` do.
    """
