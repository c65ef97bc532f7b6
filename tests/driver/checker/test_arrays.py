"""Copies whose other side is an object of the host, as the bindings take it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd


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
