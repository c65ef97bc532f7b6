"""DMA-BUF descriptors of device memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import streamalloc as sa
from streamalloc import vmm
from tests.support import is_open
from tests.vmm.support import PAGE


class TestDmaBuf:
    @pytest.fixture(autouse=True)
    def needed(self, device: sa.Device) -> None:
        if not device.supports.dma_buf:
            pytest.skip("the device has no DMA-BUF")

    @pytest.fixture
    def buffer(self, device: sa.Device) -> Iterator[vmm.GrowableBuffer]:
        with vmm.GrowableBuffer(device, 4 * PAGE, 2 * PAGE, chunk=PAGE) as buffer:
            yield buffer

    @pytest.mark.parametrize(
        "part",
        [
            lambda buffer: buffer,
            lambda buffer: buffer[4096:12288],
            lambda buffer: buffer.mappings[1],
            lambda buffer: buffer.range.view(0, 2 * PAGE),
        ],
    )
    def test_of_mapped_memory(self, buffer: vmm.GrowableBuffer, part: Callable[[Any], sa.Memory]) -> None:
        with vmm.dma_buf(part(buffer)) as fd:
            number = fd.fileno()
            assert is_open(number) and not os.get_inheritable(number)
        assert not is_open(number)

    def test_of_a_pool(self, pool: sa.MemoryPool, stream: sa.Stream) -> None:
        with pool.allocate(PAGE, stream) as buffer:
            stream.synchronize()
            vmm.dma_buf(buffer).close()

    @pytest.mark.parametrize(("start", "stop"), [(0, 4095), (1, 4097), (0, 0), (512, 512 + 4096)])
    def test_that_is_no_whole_pages(self, buffer: vmm.GrowableBuffer, start: int, stop: int) -> None:
        with pytest.raises(ValueError, match="pages"):
            vmm.dma_buf(buffer[start:stop])

    def test_over_pcie(self, buffer: vmm.GrowableBuffer) -> None:
        """The device reaches the host by PCIe alone, so that there is no choice."""
        with pytest.raises(sa.NotSupportedError):
            vmm.dma_buf(buffer, pcie=True)

    @pytest.mark.parametrize("what", [None, 0, b"bytes"])
    def test_of_what_is_no_memory(self, what: Any) -> None:
        with pytest.raises(TypeError, match="memory"):
            vmm.dma_buf(what)

    def test_of_memory_that_is_gone(self, buffer: vmm.GrowableBuffer) -> None:
        view = buffer[PAGE:]
        buffer.resize(PAGE)
        with pytest.raises(sa.ClosedError):
            vmm.dma_buf(view)
        buffer.evict()
        with pytest.raises(sa.EvictedError):
            vmm.dma_buf(buffer)
        buffer.close()
        with pytest.raises(sa.ClosedError):
            vmm.dma_buf(buffer)
