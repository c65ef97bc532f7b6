"""A store that this process serves, and its client."""

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest

import streamalloc as sa
from streamalloc import ipc

_numbers = itertools.count()


@pytest.fixture
def name() -> str:
    """A name that no other test has."""
    return f"test-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def server(machine: Any, name: str) -> Iterator[ipc.StoreServer]:
    """A server without limits."""
    with ipc.Store.serve(name) as server:
        yield server


@pytest.fixture
def store(server: ipc.StoreServer, device: sa.Device) -> Iterator[ipc.Store]:
    """A client of the server."""
    with ipc.Store(server.name) as store:
        yield store
    device.synchronize()  # writers whose copies were queued at the commit end here
