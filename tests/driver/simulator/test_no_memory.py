"""Allocations of the simulated driver where the system has no memory."""

from __future__ import annotations

import errno
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc.driver.simulator.memory import Reservation
from tests.support import MiB

pytestmark = pytest.mark.simulated_only("it is about the simulated driver")


def test_an_allocation_fails_and_the_next_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    device = sa.Device(0, driver=sd.simulated())
    pool, stream = sa.MemoryPool(device), device.create_stream()

    for code, expected in ((errno.ENOMEM, sa.OutOfMemoryError), (errno.EPERM, OSError)):

        def refuse(*_: object, code: int = code) -> None:
            raise OSError(code, "not permitted or no memory")

        with monkeypatch.context() as patch:
            patch.setattr(Reservation, "map", refuse)
            with pytest.raises(expected):
                pool.allocate(MiB, stream)
    assert pool.statistics()[:3:2] == (0, 0)
    with pool.allocate(MiB, stream) as buffer:
        buffer.fill(7)
        stream.synchronize()
        assert pool.statistics().used == MiB


def test_managed_memory(raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(Reservation, "map", refuse)
    assert raw.cuMemAllocManaged(MiB, 1)[0].name == "CUDA_ERROR_OUT_OF_MEMORY"
