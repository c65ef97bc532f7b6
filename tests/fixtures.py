"""Fixtures on top of ``machine`` (see conftest.py): a device of the driver under test, and what is made on it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from subprocess import CompletedProcess
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.testing import Gate
from tests import processes
from tests.support import KEEP

__all__ = ["collecting", "device", "gate", "peer", "pool", "python", "stream", "traced"]


@pytest.fixture
def collecting() -> Iterator[None]:
    """The collector runs all the time, and threads change places."""
    before, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.freeze()
    gc.set_threshold(20)
    sys.setswitchinterval(1e-5)
    yield
    gc.set_threshold(*before)
    sys.setswitchinterval(interval)
    gc.unfreeze()


@pytest.fixture
def traced(machine: Any) -> Any:
    """The driver under test, with its calls recorded. ``device`` is of it in a test that takes both."""
    return sd.traced(machine)


@pytest.fixture
def device(machine: Any, request: pytest.FixtureRequest) -> sa.Device:
    """Device 0 of the driver under test."""
    return sa.Device(0, driver=request.getfixturevalue("traced") if "traced" in request.fixturenames else None)


@pytest.fixture
def peer(machine: Any) -> sa.Device:
    """Device 1, for tests marked ``gpus(2)``."""
    return sa.Device(1)


@pytest.fixture
def stream(device: sa.Device) -> Iterator[sa.Stream]:
    """A non-blocking stream of device 0."""
    with device.create_stream() as stream:
        yield stream
        if not stream.closed:
            stream.synchronize()


@pytest.fixture
def pool(device: sa.Device) -> Iterator[sa.MemoryPool]:
    """A pool of device 0 that keeps all it reserves."""
    with sa.MemoryPool(device, release_threshold=KEEP) as pool:
        yield pool


@pytest.fixture
def gate(device: sa.Device) -> Iterator[Gate]:
    """A gate that holds streams of device 0; it is open when the test has ended."""
    with Gate(device) as gate:
        yield gate


@pytest.fixture
def python(on_cuda: bool) -> Callable[..., CompletedProcess[str]]:
    """Runs Python code in a new process whose default driver is the kind under test; ``None`` unsets a variable."""

    def run(code: str, **environment: str | None) -> CompletedProcess[str]:
        return processes.finished(processes.python(code), on_cuda, **environment)

    return run
