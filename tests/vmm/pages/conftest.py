"""An arena and a space of sixteen pages."""

from collections.abc import Iterator

import pytest

import streamalloc as sa
from streamalloc import vmm
from streamalloc.testing import Gate
from tests.vmm.support import PAGE

PAGES = 16


@pytest.fixture
def arena(device: sa.Device) -> Iterator[vmm.PageArena]:
    """An arena of device 0."""
    with vmm.PageArena(device) as arena:
        yield arena


@pytest.fixture
def space(arena: vmm.PageArena, stream: sa.Stream) -> Iterator[vmm.PageSpace]:
    """A space of sixteen pages, whose stream is ``stream``."""
    with arena.space(PAGES * PAGE, stream=stream) as space:
        yield space


@pytest.fixture
def other(device: sa.Device, gate: Gate) -> Iterator[sa.Stream]:
    """Another stream of device 0, which the gate may hold."""
    with device.create_stream() as stream:
        yield stream
        gate.open()
        stream.synchronize()
