"""Drivers for tests (simulated machines and the real driver), and reports from the processes that a test starts."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing  # This import creates the configuration that `inherited` changes, so it has to come first.
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamalloc import driver as sd
from streamalloc.core.internal import Device
from streamalloc.driver import Driver, set_default, simulated, use
from streamalloc.driver.internal import SETTLERS, VARIABLE, ParentTest, configuration, default_of_threads, imex_channels
from streamalloc.testing.tools import settle

assert multiprocessing.process

lasting: Callable[..., Driver] = functools.cache(simulated)
"""Function that takes settings and returns the simulated machine with these settings. That machine exists until the
process ends.
"""


@contextlib.contextmanager
def by_default(driver: Driver) -> Iterator[None]:
    """Within the ``with`` block, make ``driver`` the default driver of all threads."""
    before = default_of_threads()
    with use(driver):
        set_default(driver)
        try:
            yield
        finally:
            set_default(before)


def rest(driver: Driver) -> None:
    """Synchronise all devices of the driver, and make the deferred releases.

    Otherwise work of this test could still run during the next test.
    """
    gc.collect()
    for ordinal in range(Device.count(driver)):
        Device(ordinal, driver=driver).synchronize()
    settle()
    for end in SETTLERS:
        end()


def real() -> Driver:
    """Return the CUDA driver of this computer. Raises :class:`DriverNotFoundError` if there is no CUDA driver."""
    return sd.real()


def real_devices() -> int:
    """Return the number of GPUs of this computer.

    Raises
    ------
    DriverNotFoundError
        This computer has no CUDA driver.
    """
    driver = real()
    (result,) = driver.cuInit(0)
    return 0 if result else int(driver.cuDeviceGetCount()[1])


def describe_real() -> str:
    """Return the CUDA version of the real driver and the names of the GPUs, as text.

    Raises :class:`DriverNotFoundError` if this computer has no CUDA driver.
    """
    driver = real()
    if not real_devices():
        return "CUDA driver, no GPU"
    _, number = driver.cuDriverGetVersion()
    # The driver's functions are called directly, because a ``Device`` would make a context before the first test.
    found = [driver.cuDeviceGetName(256, ordinal)[1] for ordinal in range(real_devices())]
    names = [name.partition(b"\0")[0].decode(errors="replace") for name in found]
    shown = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"CUDA {number // 1000}.{number % 1000 // 10} driver, {shown}"


def missing_for(devices: int, fabric: bool, managed: bool, multicast: bool) -> str | None:
    """Return why a test with these needs cannot run on this computer's GPUs, as text; None if it can run.

    ``devices``: number of GPUs that the test needs. ``fabric``, ``managed``, ``multicast``: whether the test needs
    fabric handles, managed memory, or multicast objects.
    """
    present = real_devices()
    if present < devices:
        return f"needs {devices} GPUs, found {present}"
    if fabric and not any(os.access(path, os.R_OK | os.W_OK) for path in imex_channels()):
        return "needs an IMEX channel that this user may open"
    if managed and os.environ.get("STREAMALLOC_TEST_MANAGED") != "1":
        return "managed allocations run only with STREAMALLOC_TEST_MANAGED=1"
    if multicast and os.environ.get("STREAMALLOC_TEST_MULTICAST") != "1":
        return "multicast objects are made on real hardware only with STREAMALLOC_TEST_MULTICAST=1"
    return None


@contextlib.contextmanager
def inherited(**values: str) -> Iterator[None]:
    """Set environment variables within the ``with`` block, for processes that are started in it, also by a
    multiprocessing server.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
            patch.setitem(configuration(), name, value)
        yield


@contextlib.contextmanager
def reports(*checks: str) -> Iterator[Callable[..., Iterator[str]]]:
    """Collect the reports of the processes that are started in the ``with`` block.

    ``checks``: kinds of reports that these processes make: ``"check"``, ``"leaks"``, ``"notes"``. The block gets a
    function, which takes kinds of reports and must be called within the block. It yields a text for each report of
    these kinds so far. The first line of the text names the process.
    """

    def found(*kinds: str) -> Iterator[str]:
        for path in sorted(Path(folder).iterdir()):
            process, _, kind = path.name.partition(".")
            if kind in kinds:
                yield f"in process {process}, which the test has started:\n{path.read_text('utf-8').rstrip()}"

    with (
        tempfile.TemporaryDirectory(prefix="streamalloc-", ignore_cleanup_errors=True) as folder,
        inherited(**{VARIABLE: ParentTest(os.getpid(), checks, folder).to_text()}),
    ):
        yield found
