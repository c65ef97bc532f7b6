"""Fixtures on top of ``machine`` (see conftest.py): a device of the driver under test, and what is made on it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import streamalloc as sa
from streamalloc.testing import Gate
from tests.support import KEEP

__all__ = ["device", "gate", "peer", "pool", "python", "stream"]

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def device(machine: Any) -> sa.Device:
    """Device 0 of the driver under test."""
    return sa.Device(0)


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
def python(on_cuda: bool) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python code in a new process whose default driver is the kind under test; ``None`` unsets a variable."""

    def run(code: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
        variables: dict[str, str | None] = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "STREAMALLOC_DRIVER": "cuda" if on_cuda else "simulated",
            **environment,
        }
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            env={name: value for name, value in variables.items() if value is not None},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run
