"""Memory of 64 bytes with the values 0 to 63, on the device and on the host."""

from collections.abc import Iterator

import numpy as np
import pytest

import streamalloc as sa


@pytest.fixture
def buffer(pool: sa.MemoryPool, stream: sa.Stream) -> Iterator[sa.Buffer]:
    """64 bytes of device 0 with the values 0 to 63."""
    with pool.allocate(64, stream) as buffer:
        buffer.copy_from(bytes(range(64)))
        yield buffer


@pytest.fixture
def host_pool(device: sa.Device) -> Iterator[sa.MemoryPool]:
    """A pool of host memory."""
    with sa.MemoryPool(sa.MemLocation.host(), driver=device.driver) as pool:
        yield pool


@pytest.fixture
def host(host_pool: sa.MemoryPool, stream: sa.Stream) -> Iterator[sa.Buffer]:
    """64 bytes of host memory with the values 0 to 63."""
    with host_pool.allocate(64, stream) as buffer:
        stream.synchronize()
        buffer.as_array()[:] = np.arange(64, dtype=np.uint8)
        yield buffer
    stream.synchronize()
