"""Copies whose other side is an object of the host, as the bindings take it."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.core.deferred import work
from streamalloc.core.session import session_of
from streamalloc.interop.loans import Lent


@pytest.mark.parametrize("host", [np.arange(64, dtype=np.uint8), np.ones((8, 1), np.int64)], ids=["bytes", "words"])
def test_arrays_both_ways(machine: Any, host: Any) -> None:
    device = sa.Device(0, driver=sd.checked(machine))
    with device.create_stream() as stream, sa.MemoryPool(device) as pool, pool.allocate(64, stream) as buffer:
        buffer.copy_from(host)
        back = np.zeros_like(host)
        buffer.copy_to(back)
        stream.synchronize()
        assert np.array_equal(back, host)


def test_objects_that_are_no_arrays(machine: Any) -> None:
    driver = sd.checked(machine)
    device = sa.Device(0, driver=driver)
    with device.create_stream() as stream, sa.MemoryPool(device) as pool, pool.allocate(4, stream) as buffer:
        driver.cuMemcpyHtoDAsync(buffer.address, b"abcd", 4, stream.handle)
        back = bytearray(4)
        driver.cuMemcpyDtoHAsync(back, buffer.address, 4, stream.handle)
        stream.synchronize()
        assert back == b"abcd"


@pytest.mark.parametrize("given_back", [True, False])
def test_memory_that_is_freed_while_a_library_has_it(machine: Any, given_back: bool) -> None:
    """Nothing reports the library's kernels. They may run until it returns the memory."""
    driver = sd.checked(machine)
    device = sa.Device(0, driver=driver)
    with device.create_stream() as ours, device.create_stream() as theirs, sa.MemoryPool(device) as pool:
        buffer = pool.allocate(64, ours)
        array = Lent(buffer.view_as(np.uint8), theirs)
        if given_back:
            del array
            gc.collect()
            work(session_of(buffer))  # in which our stream waits for theirs
        buffer.free()
        device.synchronize()
    assert [one.kind for one in driver.hazards] == ([] if given_back else ["free racing a use"])


def test_numpy_takes_pinned_memory_for_itself(machine: Any) -> None:
    """It names no stream, and is no work of the legacy one."""
    driver = sd.checked(machine)
    device = sa.Device(0, driver=driver)
    props = sa.MemPoolProps(location=sa.MemLocation.host())
    with device.create_stream() as stream, sa.MemoryPool(props, driver=driver) as pool:
        pool.set_access(device, sa.MemAccess.READWRITE)
        buffer = pool.allocate(64, stream)
        buffer.fill(3)
        stream.synchronize()
        assert (np.from_dlpack(buffer) == 3).all()
        buffer.free()
        stream.synchronize()
    assert driver.hazards == []
