"""Several libraries on one pool at once."""

from __future__ import annotations

import gc

import streamalloc as sa
import streamalloc.driver as sd
from tests.interop.conftest import Get
from tests.support import MiB

NAMES = ("cupy", "torch", "numba", "rmm")


def test_all_of_them_at_once_under_a_checked_driver(get: Get, device: sa.Device) -> None:
    """Each allocates from one pool while the others do; nothing is left, and nothing is freed twice."""
    libraries = [get(name) for name in NAMES[:3]]
    checked = sd.checked(device.driver)
    ours = sa.Device(0, driver=checked)
    with sa.MemoryPool(ours, release_threshold=1 << 40) as pool:
        bridges = [library.use(pool, callbacks=True) for library in libraries]
        streams = [library.stream() for library in libraries]
        for value in range(3):
            arrays = [library.make(MiB, stream) for library, stream in zip(libraries, streams, strict=True)]
            for library, stream, array in zip(libraries, streams, arrays, strict=True):
                library.fill(array, value, stream)
            for library, stream, array in zip(libraries, streams, arrays, strict=True):
                assert library.holds(array, value, stream)
            del array, arrays
        gc.collect()
        for library, bridge in zip(libraries, reversed(bridges), strict=True):
            library.finish(bridge)
        ours.synchronize()
        assert pool.statistics().used == 0
