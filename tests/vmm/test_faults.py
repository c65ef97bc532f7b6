"""Two driver calls fail, in a step and in its undo. That one fails, tests/package/test_sweeps.py has."""

import gc
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from tests.support import Account, read
from tests.vmm.support import PAGE, READWRITE


class TestTwoFaults:
    """The undoing of a failed step fails as well: the first error is told, and the step can be taken again."""

    def failing(self, machine: Any, first: tuple[str, int], later: tuple[str, int]) -> tuple[Account, sa.Device]:
        account = Account(machine)
        driver: Any = account.driver
        for call, nth in (first, later):
            driver = sd.faulty(driver, call, nth, result="CUDA_ERROR_UNKNOWN")
        return account, sa.Device(0, driver=driver)

    @pytest.mark.parametrize(
        ("first", "later"),
        [
            (("cuMemCreate", 3), ("cuMemUnmap", 1)),
            (("cuMemMap", 3), ("cuMemRelease", 2)),
            (("cuMemSetAccess", 2), ("cuMemUnmap", 1)),
            (("cuMemSetAccess", 2), ("cuMemRelease", 3)),
        ],
    )
    @pytest.mark.parametrize("then", ["again", "shrink", "evict", "drop"])
    def test_growing(self, machine: Any, first: tuple[str, int], later: tuple[str, int], then: str) -> None:
        account, device = self.failing(machine, first, later)
        buffer = vmm.GrowableBuffer(device, 8 * PAGE, PAGE, chunk=PAGE)
        buffer.fill(7)
        device.synchronize()
        with pytest.raises(sa.CudaError) as caught:
            buffer.resize(4 * PAGE)
        assert caught.value.call == first[0]
        if later[0] != "cuMemRelease":  # that is tried again later
            assert later[0] in "".join(getattr(caught.value, "__notes__", []))
        assert buffer.nbytes == PAGE and (read(buffer) == 7).all()
        del caught
        if then == "again":
            buffer.resize(4 * PAGE)
        elif then == "shrink":
            buffer.resize(1)
            buffer.resize(4 * PAGE)
        elif then == "evict":
            buffer.evict()
            assert account.mapped == {} and "physical memory" not in account.left
            buffer.restore()
            assert len(account.mapped) == 1
            buffer.resize(4 * PAGE)
        if then not in ("close", "drop"):
            assert len(account.mapped) == 4 and len(account.left["physical memory"]) == 4
            assert [mapping.access(device) for mapping in buffer.mappings] == 4 * [READWRITE]
            if then != "evict":
                assert (read(buffer[: 1 if then == "shrink" else PAGE]) == 7).all()
            buffer.fill(8)
            assert (read(buffer) == 8).all()
        if then != "drop":
            buffer.close()
        del buffer
        gc.collect()
        assert account.left == {}

    def test_mapping(self, machine: Any) -> None:
        """A mapping that could not be unmapped stays in the table, so that it can be unmapped later."""
        account, device = self.failing(machine, ("cuMemSetAccess", 1), ("cuMemUnmap", 1))
        with vmm.AddressRange(PAGE, driver=device.driver) as addresses, vmm.PhysicalMemory(device, PAGE) as memory:
            with pytest.raises(sa.CudaError) as caught:
                addresses.map(memory, access=device)
            assert caught.value.call == "cuMemSetAccess"
            assert "cuMemUnmap" in "".join(getattr(caught.value, "__notes__", []))
            assert [mapping.memory for mapping in addresses.mappings] == [memory]
            addresses.unmap()
            addresses.map(memory, access=device)
        assert account.left == {}

    def test_of_a_block(self, machine: Any) -> None:
        """The block's own error is told, with that of the closing."""
        account, device = self.failing(machine, ("cuMemUnmap", 1), ("cuMemAddressFree", 5))
        with pytest.raises(KeyError, match="the block's own") as caught, vmm.GrowableBuffer(device, PAGE, PAGE):
            raise KeyError("the block's own")
        assert "cuMemUnmap" in "".join(getattr(caught.value, "__notes__", []))
        del caught
        gc.collect()
        assert account.left == {}
