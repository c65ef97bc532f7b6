"""Dropped objects end at a point of work, after the work that may use them; buffers that are remapped."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.core.deferred import work
from streamalloc.core.session import session_of
from streamalloc.testing import Gate
from streamalloc.vmm.internal import RemappableBuffer
from streamalloc.vmm.ownership import _fence_since
from tests.support import Account
from tests.vmm.support import PAGE, READWRITE


class TestQueuedWork:
    def test_is_not_waited_for_and_keeps_the_memory(self, account: Account) -> None:
        device = account.device
        stream = device.create_stream()
        buffer: Any = vmm.GrowableBuffer(device, 4 * PAGE, 2 * PAGE, chunk=PAGE)
        with Gate(device) as gate:
            gate.hold(stream)
            buffer.fill(5, stream)
            del buffer
            gc.collect()
            assert "cuMemFree" not in account.calls()
            for _ in range(3):
                vmm.PhysicalMemory(device, PAGE).close()
                assert len(account.mapped) == 2
            gate.open()
        device.synchronize()
        assert account.mapped == {} and "address range" not in account.left
        stream.close()

    def test_is_recorded_once_for_all_that_was_dropped_before(self, machine: Any) -> None:
        """However many streams there are; what is dropped later waits for a record of its own."""
        traced: Any = sd.traced(machine)
        device = sa.Device(0, driver=traced)
        streams = [device.create_stream() for _ in range(5)]

        def mapped() -> int:
            work(session_of(device))
            calls = [call.name for call in traced.calls]
            return calls.count("cuMemMap") - calls.count("cuMemUnmap")

        with Gate(device) as gate:
            gate.hold(streams[0])
            buffers = [vmm.GrowableBuffer(device, 4 * PAGE, PAGE, chunk=PAGE) for _ in range(30)]
            late: Any = vmm.GrowableBuffer(device, 4 * PAGE, PAGE, chunk=PAGE)
            assert mapped() == 31
            buffers.clear()
            gc.collect()
            before = sum(call.name == "cuEventRecord" for call in traced.calls)
            assert mapped() == 31
            records = sum(call.name == "cuEventRecord" for call in traced.calls) - before
            assert records <= 2 * len(streams)
            with Gate(device) as other:
                other.hold(streams[1])
                late.fill(1, streams[1])
                del late
                gc.collect()
                gate.open()
                streams[0].synchronize()
                assert mapped() == 1
                other.open()
        device.synchronize()
        assert mapped() == 0
        for stream in streams:
            stream.close()

    @pytest.mark.simulated_only("memory of a known size")
    def test_that_is_done_lets_memory_that_has_run_out_be_made(self) -> None:
        """Dropped memory is released before an error says that there is none."""
        driver = sd.simulated(memory=64 << 20)
        device = sa.Device(0, driver=driver)
        size = device.memory_info().free // 2 // PAGE * PAGE + PAGE
        for _ in range(3):
            buffer = vmm.GrowableBuffer(device, size, size)
            buffer.fill(1)
            device.default_stream.synchronize()
            del buffer
        with pytest.raises(sa.OutOfMemoryError):
            kept = [vmm.GrowableBuffer(device, size, size) for _ in range(2)]
            del kept


class TestRemapping:
    """All of it, or the buffer stays as it was."""

    @staticmethod
    def make(device: sa.Device) -> Any:
        return lambda _: vmm.PhysicalMemory(device, PAGE)

    def test_maps_what_is_new_and_unmaps_what_is_gone(self, account: Account) -> None:
        device = account.device
        buffer = RemappableBuffer(device, 8 * PAGE, {device.location: READWRITE}, None, 0)
        for names in ("ab", "abc", "a", "axyz", "", "q"):
            staying = [mapping.memory for mapping in buffer.mappings]
            buffer.set_chunks(names, self.make(device), len(names) * PAGE)
            assert buffer.nbytes == buffer.mapped_bytes == len(names) * PAGE == len(account.mapped) * PAGE
            if names and staying and names[0] == "a":
                assert buffer.mappings[0].memory is staying[0]
            buffer.fill(7)
        buffer.close()


def test_items_share_a_fence_that_is_younger(device: sa.Device) -> None:
    session = session_of(device)
    first = _fence_since(session, 0)
    assert _fence_since(session, first.began - 1) is first
    assert _fence_since(session, first.began) is not first
