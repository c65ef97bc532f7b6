"""Errors that concern a whole driver: no driver was found, a forked child used a driver, or a program misused one."""

from __future__ import annotations

from streamalloc.driver.reports import Hazard


class DriverMisuseError(AssertionError):
    """A driver of :func:`checked` found a mistake. There are three kinds of mistakes: a hazard, such as a missing order
    or a double release; handles that are not released (``assert_nothing_left``); a result of a driver function that is
    no tuple with a ``CUresult`` first.

    ``hazard`` is the :class:`Hazard`; None for the last two kinds.
    """

    def __init__(self, message: str, hazard: Hazard | None = None) -> None:
        super().__init__(message)
        self.hazard = hazard


class PreventedCallError(DriverMisuseError):
    """A :class:`DriverMisuseError` of a call that the checker has not passed to the driver. Tracebacks show it under
    the name of the base class.
    """


PreventedCallError.__name__ = PreventedCallError.__qualname__ = DriverMisuseError.__name__


class DriverNotFoundError(RuntimeError):
    """No usable CUDA driver was found.

    :func:`real` raises this error, and so does :func:`default` if no other driver was chosen.
    """


class ForkedProcessError(RuntimeError):
    """A forked child process used an object of its parent. CUDA does not work in a child of a fork after the parent's
    first use of CUDA.

    Start processes with multiprocessing's method ``spawn``, as the programs of :doc:`/docs/guides/ipc` do.
    """
