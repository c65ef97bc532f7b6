"""Repetition of tests that fail because other processes use memory of the GPU under test.

A test that fails runs again if it has read the free memory or found no free memory. If it fails each time, and the free
memory changes while the test process does nothing, the test is skipped with that reason. Tests of the memory of this
process alone do not read the free memory: pools have statistics, and :class:`tests.support.Account` counts physical
memory.
"""

import functools
import re
import time
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

import streamalloc.driver as sd

__all__ = ["FreeMemory", "pytest_runtest_protocol"]

_ATTEMPTS = 5
_PAUSE = 1.0
"""Seconds in which another process may release memory."""
_SAMPLES, _SECONDS = 25, 0.02
"""Number of readings of the free memory, and the seconds between two readings."""
_NONE_LEFT = re.compile("OUT_OF_MEMORY|out of memory|CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)")
"""Texts by which the driver, PyTorch and cuBLAS report a device without free memory."""


class FreeMemory:
    """Replacement of the real driver's ``cuMemGetInfo`` that counts the calls in ``FreeMemory.calls``."""

    calls = 0
    failures = 0
    """Number of runs of tests that failed and were repeated or skipped. Objects that the frames of these tests keep are
    still alive.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        functools.update_wrapper(self, function)

    def __call__(self) -> Any:
        FreeMemory.calls += 1
        return self._function()


def _changes() -> bool:
    """Whether the free memory of a device changes while this process does nothing."""
    driver: Any = sd.real()
    context = driver.cuDevicePrimaryCtxRetain(0)[1]
    driver.cuCtxPushCurrent(context)
    readings = set()
    for _ in range(_SAMPLES):
        readings.add(driver.cuMemGetInfo()[1])
        time.sleep(_SECONDS)
    driver.cuCtxPopCurrent()
    driver.cuDevicePrimaryCtxRelease(0)
    return len(readings) > 1


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test of the real driver, and repeat it if other processes may have made it fail: at most five runs."""
    from streamalloc.testing.plugin import driver_under_test

    if driver_under_test(item.config) != "cuda":
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE)
            item._initrequest()  # type: ignore[attr-defined]
        before = FreeMemory.calls
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        failed = [report for report in reports if report.failed]
        # A process that a test has started says it on its standard error stream.
        none_left = any(_NONE_LEFT.search(f"{report.longrepr}{report.capstderr}") for report in failed)
        if not failed or not (none_left or FreeMemory.calls > before):
            break
        FreeMemory.failures += 1
    else:
        if _changes():
            for report in failed:
                report.outcome = "skipped"
                report.longrepr = (str(item.path), 0, "Skipped: other processes change the device's free memory")
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
