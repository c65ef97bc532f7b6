"""Other processes on the GPU under test, which change its free memory and may leave too little.

A test that has read the free memory, or found none, runs again where it fails. If it fails each time, and the free
memory changes while the test process does nothing, it is skipped with that reason. Tests of what this process holds
read no free memory: pools have statistics, and :class:`tests.support.Account` counts physical memory.
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
"""Seconds in which a neighbour may return what it has taken."""
_SAMPLES, _SECONDS = 25, 0.02
"""Readings of the free memory, and the time between two of them."""
_NONE_LEFT = re.compile("OUT_OF_MEMORY|out of memory|CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)")
"""Words of the driver, of PyTorch and of cuBLAS for a device without free memory."""


class FreeMemory:
    """``cuMemGetInfo`` of the real driver, with a count of its calls."""

    calls = 0
    failures = 0
    """Runs of tests that failed and were repeated, or became skipped: what their frames keep is left behind."""

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
    """Run a test of the real driver, and again where neighbours may have made it fail."""
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
