"""Fixtures that run every test on either driver: ``pytest --driver=simulated`` (default) or ``--driver=cuda``."""

from __future__ import annotations

import functools
import gc
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.core.capabilities import imex_channels
from streamalloc.driver.bindings import BINDINGS_VERSION
from streamalloc.driver.internal import as_asked
from streamalloc.testing import settle
from tests.fixtures import *  # noqa: F403
from tests.support import makes_no_multicast_object


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--driver",
        choices=("simulated", "cuda"),
        default="simulated",
        help="which driver the tests run on (default: simulated)",
    )
    parser.addoption(
        "--one-machine",
        action="store_true",
        help="run all tests on one simulated machine, which keeps what they leave, as GPUs do",
    )
    parser.addoption("--soak", action="store_true", help="run the tests that take minutes, too")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def _real_device_count() -> int:
    driver: Any = sd.real()
    (result,) = driver.cuInit(0)
    if result:
        return 0
    return int(driver.cuDeviceGetCount()[1])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_cuda = config.getoption("--driver") == "cuda"
    present = _real_device_count() if on_cuda else 0
    if on_cuda:
        # They read what a process shows in which nothing has happened yet.
        items.sort(key=lambda item: "facts" not in item.path.parts)
    if not config.getoption("--soak") and "soak" not in config.getoption("markexpr"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("soak")])
        items[:] = [item for item in items if not item.get_closest_marker("soak")]
    for item in items:
        for mark in item.iter_markers():
            reason = _why_skipped(mark, on_cuda, present)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def _why_skipped(mark: pytest.Mark, on_cuda: bool, present: int) -> str | None:
    """Why a test with this mark cannot run here, or None where it can."""
    if mark.name == "bindings" and _version(BINDINGS_VERSION) < _version(mark.args[0]):
        return f"needs cuda-bindings {mark.args[0]}, found {BINDINGS_VERSION}"
    if not on_cuda:
        return None
    if mark.name == "simulated_only":
        return f"simulated only: {mark.args[0]}"
    if mark.name == "gpus" and present < mark.args[0]:
        return f"needs {mark.args[0]} GPUs, found {present}"
    if mark.name == "fabric" and not any(os.access(path, os.R_OK | os.W_OK) for path in imex_channels()):
        return "needs an IMEX channel that this user may open"
    if mark.name == "managed" and os.environ.get("STREAMALLOC_TEST_MANAGED") != "1":
        return "managed allocations run only with STREAMALLOC_TEST_MANAGED=1"
    if mark.name == "multicast" and os.environ.get("STREAMALLOC_TEST_MULTICAST") != "1":
        return "multicast objects are made on real hardware only with STREAMALLOC_TEST_MULTICAST=1"
    return None


@pytest.fixture(scope="session")
def on_cuda(request: pytest.FixtureRequest) -> bool:
    """Whether the real driver is under test (for tests of the door itself; no other test may branch on it)."""
    return bool(request.config.getoption("--driver") == "cuda")


@pytest.fixture(scope="session", autouse=True)
def no_multicast_by_mistake(on_cuda: bool) -> Iterator[None]:
    """On GPUs that others share, a test that forgets its mark must not make a multicast object."""
    with pytest.MonkeyPatch.context() as patch:
        real: Any = sd.real() if on_cuda and os.environ.get("STREAMALLOC_TEST_MULTICAST") != "1" else None
        if hasattr(real, "cuMulticastCreate"):
            patch.setattr(real, "cuMulticastCreate", makes_no_multicast_object(real.cuMulticastCreate))
        yield


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """Collections look at what the tests have made only, not at all that pytest has loaded."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def primary_contexts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keeps the real devices' primary contexts from test to test: making one takes longer than most tests."""
    count = _real_device_count() if request.config.getoption("--driver") == "cuda" else 0
    driver: Any = sd.real() if count else None
    for ordinal in range(count):
        assert driver.cuDevicePrimaryCtxRetain(ordinal)[0] == 0
    yield
    for ordinal in range(count):
        driver.cuDevicePrimaryCtxRelease(ordinal)


_lasting = functools.cache(sd.simulated)


@pytest.fixture
def machine(request: pytest.FixtureRequest, on_cuda: bool, primary_contexts: None) -> Iterator[Any]:
    """The driver under test, as a user would name it; a fresh machine for each test where it is simulated."""
    mark = request.node.get_closest_marker("gpus")
    count = mark.args[0] if mark else 1
    # None: as a real machine without an IMEX channel.
    fabric = True if request.node.get_closest_marker("fabric") else None
    lasting = on_cuda or request.config.getoption("--one-machine")
    simulated = _lasting if lasting else sd.simulated
    # Checked where STREAMALLOC_CHECK says so.
    driver: Any = as_asked(sd.real() if on_cuda else simulated(devices=count, fabric=fabric))
    with sd.use(driver):
        yield driver
    if lasting:
        # What a test dropped must not be freed in the middle of the next one, which may be measuring.
        gc.collect()
        for ordinal in range(sa.Device.count(driver)):
            sa.Device(ordinal, driver=driver).synchronize()
        settle()


@pytest.fixture
def raw(machine: Any) -> Iterator[Any]:
    """The driver under test for raw calls: initialised, with device 0's primary context current here."""
    assert machine.cuInit(0)[0] == 0
    result, context = machine.cuDevicePrimaryCtxRetain(0)
    assert result == 0
    assert machine.cuCtxSetCurrent(context)[0] == 0
    yield machine
    machine.cuCtxSetCurrent(context)
    machine.cuCtxSynchronize()
    machine.cuCtxSetCurrent(machine.CUcontext(0))
    machine.cuDevicePrimaryCtxRelease(0)
