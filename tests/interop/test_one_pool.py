"""Several libraries on one pool at once."""

from __future__ import annotations

import contextlib
import gc

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from tests.interop.conftest import Get
from tests.interop.libraries import Library
from tests.support import GROWTH, MiB

NAMES = ("cupy", "torch", "numba", "rmm")


def test_libraries_reserve_less_together(get: Get, device: sa.Device) -> None:
    libraries = [get(name) for name in NAMES[:3]]
    with contextlib.suppress(pytest.skip.Exception):
        libraries.append(get("rmm"))

    def peak(*libraries: Library) -> int:
        with sa.MemoryPool(device, release_threshold=1 << 40) as pool:
            for library in libraries:
                bridge = library.use(pool, callbacks=False)
                arrays = [library.make(GROWTH // 2) for _ in range(4)]
                del arrays
                gc.collect()
                library.finish(bridge)
                device.synchronize()
            return pool.attributes.reserved_mem_high

    each = [peak(library) for library in libraries]
    assert min(each) >= 2 * GROWTH
    assert peak(*libraries) <= max(each) + 2 * GROWTH < sum(each)


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
