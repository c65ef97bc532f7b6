"""Address ranges: where they lie, what is in them, and when they can be given back."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.core.errors import size_text
from tests.support import Account, each_raises, names, read
from tests.vmm.support import HOST, PAGE, each

GiB = 1 << 30
TiB = 1 << 40


class TestReserve:
    @pytest.mark.parametrize("nbytes", [PAGE, 3 * PAGE, GiB, TiB])
    def test_size(self, machine: Any, nbytes: int) -> None:
        with vmm.AddressRange(nbytes) as addresses:
            assert (addresses.nbytes, addresses.address % PAGE, addresses.honoured) == (nbytes, 0, None)
            assert (addresses.mappings, addresses.mapped_bytes, addresses.holes) == ((), 0, ((0, nbytes),))

    @pytest.mark.parametrize("alignment", [0, 1, 4096, PAGE, 2 * PAGE, GiB, 16 * GiB])
    def test_alignment(self, machine: Any, alignment: int) -> None:
        with vmm.AddressRange(PAGE, alignment=alignment) as addresses:
            assert addresses.address % max(alignment, PAGE) == 0

    @pytest.mark.simulated_only("no GPU at hand has another granularity")
    def test_granularity_is_the_drivers(self, tmp_path: Path) -> None:
        step = 1 << 16
        sizes = {kind: [step, step] for kind in ("NONE", "POSIX_FILE_DESCRIPTOR", "FABRIC")}
        changed = {"granularities": dict.fromkeys(("DEVICE", "HOST", "HOST_NUMA"), sizes)}
        profile = {"format": "streamalloc profile", "version": 1, "base": "h200", **changed}
        (tmp_path / "small.json").write_text(json.dumps(profile))
        driver = sd.simulated(profile=str(tmp_path / "small.json"))
        with vmm.AddressRange(3 * step, driver=driver) as addresses, pytest.raises(ValueError, match="of 64 KiB"):
            addresses.map(vmm.PhysicalMemory(sa.Device(0, driver=driver), step), step)
            vmm.AddressRange(step + 4096, driver=driver)

    def test_at_an_address_that_is_taken(self, machine: Any) -> None:
        with vmm.AddressRange(PAGE) as one, vmm.AddressRange(PAGE, address=one.address) as other:
            assert other.honoured is False and other.address != one.address

    def test_whether_an_address_was_honoured(self, machine: Any) -> None:
        """A free address may be refused on hardware; the range says which it was."""
        found = vmm.AddressRange(PAGE)
        address = found.address
        found.close()
        with vmm.AddressRange(PAGE, address=address) as addresses:
            assert addresses.honoured is (addresses.address == address)

    @pytest.mark.parametrize("nbytes", [1 << 47, 1 << 60, (1 << 64) - PAGE])
    def test_more_than_there_are(self, machine: Any, nbytes: int) -> None:
        """It says that addresses have run out, which is no lack of memory."""
        with pytest.raises(sa.AddressSpaceError, match=f"no {size_text(nbytes)} of addresses") as caught:
            vmm.AddressRange(nbytes)
        assert isinstance(caught.value, MemoryError) and not isinstance(caught.value, sa.OutOfMemoryError)
        assert (caught.value.call, caught.value.name) == ("cuMemAddressReserve", "CUDA_ERROR_OUT_OF_MEMORY")

    @pytest.mark.simulated_only("the real driver needs more addresses for itself")
    def test_a_limit_is_named(self, python: Callable[..., CompletedProcess[str]]) -> None:
        done = python(f"""
import resource, streamalloc as sa
from streamalloc import vmm
vmm.AddressRange({PAGE}).close()
resource.setrlimit(resource.RLIMIT_AS, ({8 * GiB}, {8 * GiB}))
try: vmm.AddressRange({16 * GiB})
except sa.AddressSpaceError as error: print("ulimit -v" in str(error) and "8 GiB" in str(error))
""")
        assert (done.stdout, done.stderr) == ("True\n", "")


class TestClose:
    def test_with_something_mapped(
        self, device: sa.Device, pages: vmm.AddressRange, memory: vmm.PhysicalMemory
    ) -> None:
        mapping = pages.map(memory, PAGE, access=device)
        with pytest.raises(ValueError, match=r"1 mapping: unmap\(\)"):
            pages.close()
        mapping.fill(1)
        assert not pages.closed and (read(mapping) == 1).all()
        pages.unmap()
        pages.close()

    def test_a_block_unmaps(self, account: Account) -> None:
        memory = vmm.PhysicalMemory(account.device, PAGE)
        with vmm.AddressRange(4 * PAGE, driver=account.driver) as addresses:
            first, last = addresses.map(memory), addresses.map(memory, 3 * PAGE)
        assert first.closed and last.closed and addresses.closed
        memory.close()

    def test_used_afterwards(self, memory: vmm.PhysicalMemory) -> None:
        pages = vmm.AddressRange(2 * PAGE, address=0x7FFF00000000)
        pages.close()
        each_raises(
            sa.ClosedError, lambda: pages.address, lambda: pages.honoured, lambda: pages.map(memory), match="closed"
        )
        assert memory.mapping_count == 0


class TestContents:
    def test_drawing(self, pages: vmm.AddressRange, memory: vmm.PhysicalMemory) -> None:
        with vmm.PhysicalMemory(HOST, PAGE) as host:
            assert pages.draw() == "........"
            pages.map(memory, PAGE)
            pages.map(host, 7 * PAGE)
            assert pages.draw() == ".00....H" and "[.00....H]" in repr(pages)
            assert pages.draw(1) in ".0" and len(pages.draw(4)) == 4
            pages.unmap(0, 4 * PAGE)
            assert pages.draw() == ".......H"

    def test_a_long_drawing_is_shortened(self, memory: vmm.PhysicalMemory) -> None:
        with vmm.AddressRange(TiB) as addresses:
            addresses.map(memory, TiB // 2)
            assert len(addresses.draw()) == 64 and len(addresses.draw(10)) == 10
            assert len(addresses.draw(0)) == 1

    @pytest.mark.gpus(2)
    def test_a_drawing_of_two_devices(self, device: sa.Device, peer: sa.Device, pages: vmm.AddressRange) -> None:
        with vmm.PhysicalMemory(device, PAGE) as mine, vmm.PhysicalMemory(peer, PAGE) as theirs:
            for offset, memory in enumerate((theirs, mine, theirs)):
                pages.map(memory, offset * PAGE)
            assert pages.draw() == "101....."


class TestUnmap:
    @pytest.mark.parametrize(("start", "stop"), [(0, 9 * PAGE), (4 * PAGE, PAGE), (-PAGE, PAGE), (9 * PAGE, None)])
    def test_outside(self, pages: vmm.AddressRange, memory: vmm.PhysicalMemory, start: int, stop: int | None) -> None:
        pages.map(memory, PAGE)
        with pytest.raises(ValueError):
            pages.unmap(start, stop)
        assert pages.draw() == ".00....."

    def test_nothing(self, traced: Any) -> None:
        with vmm.AddressRange(PAGE, driver=traced) as addresses:
            addresses.unmap()
        assert names(traced, "cuMemUnmap", "cuMemFree") == []


class TestView:
    def test_across_mappings(self, device: sa.Device, pages: vmm.AddressRange) -> None:
        with vmm.PhysicalMemory(device, PAGE) as one, vmm.PhysicalMemory(device, PAGE) as two:
            first, second = pages.map(one, PAGE, access=device), pages.map(two, 2 * PAGE, access=device)
            view = pages.view(PAGE, 3 * PAGE)
            assert (view.address, view.nbytes, view.offset) == (pages.address + PAGE, 2 * PAGE, PAGE)
            assert view.owner is pages and view.location == device.location
            assert view.device_accessible and not view.host_accessible
            seam = pages.view(2 * PAGE - 8, 2 * PAGE + 8)
            view.fill(1)
            seam.fill(2)
            assert read(first)[-9:].tolist() == [1] + 8 * [2]
            assert read(second)[:9].tolist() == 8 * [2] + [1]
            assert seam[4:12].address == seam.address + 4

    def test_over_a_hole(self, device: sa.Device, pages: vmm.AddressRange, memory: vmm.PhysicalMemory) -> None:
        pages.map(memory, PAGE, access=device)
        for start, stop in ((0, 2 * PAGE), (PAGE, 4 * PAGE), (4 * PAGE, 5 * PAGE), (0, None)):
            with pytest.raises(ValueError, match="nothing is mapped"):
                pages.view(start, stop)

    @pytest.mark.parametrize(("start", "stop"), [(0, 9 * PAGE), (2 * PAGE, PAGE), (9 * PAGE, 9 * PAGE), (-1, PAGE)])
    def test_outside(self, pages: vmm.AddressRange, start: int, stop: int) -> None:
        with pytest.raises(ValueError):
            pages.view(start, stop)

    def test_that_was_unmapped(self, device: sa.Device, pages: vmm.AddressRange, memory: vmm.PhysicalMemory) -> None:
        pages.map(memory, access=device)
        view, inner = pages.view(0, 2 * PAGE), pages.view(8, 16)[2:6]
        pages.unmap()
        for gone in (view, inner):
            for use in each(lambda gone: gone.fill(1), lambda gone: gone.copy_to(bytearray(gone.nbytes))):
                with pytest.raises(sa.ClosedError, match="not mapped any more"):
                    use(gone)
            with pytest.raises(sa.ClosedError):
                assert gone.__cuda_array_interface__
        assert repr(view)
        pages.map(memory, access=device)
        view.fill(3)
        assert (read(view) == 3).all()
