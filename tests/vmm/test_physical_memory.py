"""Physical memory and address ranges: sizes, places, options, life, and arguments that are refused."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.core.errors import size_text
from streamalloc.driver.bindings import cuda
from streamalloc.driver.wrappers import Wrapper
from tests.support import Account, MiB, each_raises, holds, is_open, names, read
from tests.vmm.support import HOST, PAGE, each

FD = sa.MemHandleType.POSIX_FILE_DESCRIPTOR
FABRIC = sa.MemHandleType.FABRIC
NUMA = sa.MemLocation.host_numa(0)


def free(device: sa.Device) -> int:
    return device.memory_info().free


class TestSize:
    @pytest.mark.parametrize(("asked", "given"), [(1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE), (5 * MiB, 3 * PAGE)])
    def test_rounded_when_asked(self, device: sa.Device, asked: int, given: int) -> None:
        with vmm.PhysicalMemory(device, asked, round_up=True) as memory:
            assert memory.nbytes == given

    def test_size_first_is_deprecated(self, device: sa.Device) -> None:
        old: Any = vmm.PhysicalMemory
        with pytest.warns(DeprecationWarning, match="device first") as warned, old(PAGE, device) as memory:
            assert (memory.nbytes, memory.location) == (PAGE, device.location)
        assert warned[0].filename == __file__
        with vmm.PhysicalMemory(nbytes=PAGE, where=device) as memory:
            assert memory.nbytes == PAGE

    @pytest.mark.parametrize("where", [HOST, NUMA, sa.MemLocation.device(0), None])
    def test_granularity(self, device: sa.Device, where: sa.MemLocation | None) -> None:
        for recommended in (False, True):
            assert vmm.PhysicalMemory.granularity(where or device, recommended=recommended) == PAGE

    @pytest.mark.parametrize("pages", [1, 40])
    def test_of_a_handle_where_addresses_are_few(self, machine: Any, pages: int) -> None:
        class Few(Wrapper):
            def _observe(self, name: str, function: Any, args: tuple[Any, ...]) -> Any:
                if name == "cuMemAddressReserve" and args[0] > 4 << 30:
                    return cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
                return function(*args)

        device = sa.Device(0, driver=Few(machine))
        memory = vmm.PhysicalMemory(device, pages * PAGE, handle_types=FD)
        fd: Any = memory.export()
        with memory, vmm.PhysicalMemory.from_handle(fd, driver=device.driver) as found:
            assert found.nbytes == pages * PAGE

    @pytest.mark.parametrize("nbytes", [1 << 46, 1 << 63, (1 << 64) - PAGE])
    def test_more_than_there_is(self, device: sa.Device, nbytes: int) -> None:
        before = device.memory_info()
        with pytest.raises(sa.OutOfMemoryError, match="physical memory") as caught:
            vmm.PhysicalMemory(device, nbytes)
        error = caught.value
        assert isinstance(error, MemoryError) and error.call == "cuMemCreate"
        assert (error.requested, error.total) == (nbytes, before.total)
        assert error.free == before.free == free(device)


class TestPlace:
    @pytest.mark.parametrize("where", [HOST, NUMA, sa.MemLocation.device(0)])
    def test_location(self, machine: Any, where: sa.MemLocation) -> None:
        with vmm.PhysicalMemory(where, PAGE) as memory:
            assert memory.location == memory.properties.location == where
            # Memory on HOST reads back as on a NUMA node.
            assert memory.query().location == (NUMA if where.on_host else where)

    def test_complete_properties(self, machine: Any) -> None:
        prop = sa.MemAllocationProp(location=sa.MemLocation.device(0), requested_handle_types=FD)
        with vmm.PhysicalMemory(prop, PAGE) as memory:
            assert memory.properties == memory.query() == prop

    def test_of_another_driver(self, machine: Any, device: sa.Device) -> None:
        with pytest.raises(ValueError, match="another driver"):
            vmm.PhysicalMemory(device, PAGE, driver=sd.traced(machine))


class Without:
    """A driver of whose devices one attribute is 0."""

    def __init__(self, driver: Any, attribute: str) -> None:
        self._driver = driver
        # Some attributes have two names, of which bindings of one version know the one as the name, others the other.
        self._attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}")
        self.created = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def cuDeviceGetAttribute(self, attribute: Any, device: Any) -> Any:
        answer = self._driver.cuDeviceGetAttribute(attribute, device)
        return (answer[0], 0) if attribute == self._attribute else answer

    def cuMemCreate(self, *args: Any) -> Any:
        self.created += 1
        return self._driver.cuMemCreate(*args)


class TestOptions:
    @pytest.mark.supports("compression")
    def test_compressible(self, device: sa.Device) -> None:
        with vmm.PhysicalMemory(device, PAGE, compressible=True) as memory, vmm.PhysicalMemory(device, PAGE) as plain:
            assert memory.compressible and not plain.compressible

    @pytest.mark.parametrize("option", ["compressible", "gpu_direct_rdma"])
    def test_flags_beside_properties(self, device: sa.Device, option: str) -> None:
        options: dict[str, Any] = {option: True}
        with pytest.raises(ValueError, match="set them there"):
            vmm.PhysicalMemory(sa.MemAllocationProp(location=device.location), PAGE, **options)

    @pytest.mark.supports("compression", "gpu_direct_rdma_with_vmm")
    def test_compression_that_is_not_given(self, device: sa.Device) -> None:
        """The handle tells what the driver gave: with GPUDirect RDMA it gives none."""
        with vmm.PhysicalMemory(device, PAGE, compressible=True, gpu_direct_rdma=True) as memory:
            assert memory.properties.alloc_flags.compression_type == 1
            assert not memory.compressible
            assert memory.query().alloc_flags.gpu_direct_rdma_capable

    @pytest.mark.parametrize(
        ("attribute", "options", "words"),
        [
            ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", {"compressible": True}, "virtual memory management"),
            ("GENERIC_COMPRESSION_SUPPORTED", {"compressible": True}, "compressible memory"),
            ("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED", {"gpu_direct_rdma": True}, "GPUDirect RDMA"),
            ("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", {"handle_types": FD}, "sharing by file descriptors"),
            ("HANDLE_TYPE_FABRIC_SUPPORTED", {"handle_types": FABRIC}, "sharing by fabric handles"),
            ("SPARSE_CUDA_ARRAY_SUPPORTED", {"tile_pool": True}, "sparse arrays"),
        ],
    )
    def test_that_the_device_does_not_offer(self, machine: Any, attribute: str, options: Any, words: str) -> None:
        driver: Any = Without(machine, attribute)
        device = sa.Device(0, driver=driver)
        with pytest.raises(sa.NotSupportedError, match=f"needs a device with {words}"):
            vmm.PhysicalMemory(device, PAGE, **options)
        assert driver.created == 0
        vmm.PhysicalMemory(device, PAGE).close()

    @pytest.mark.supports("fabric_handles")
    def test_fabric_handles_without_a_channel(self, device: sa.Device) -> None:
        with pytest.raises(sa.NotPermittedError, match="IMEX"):
            vmm.PhysicalMemory(device, PAGE, handle_types=FABRIC)

    def test_a_node_that_there_is_not(self, machine: Any) -> None:
        with pytest.raises(sa.InvalidValueError, match=r"location=HOST_NUMA:99: is there such a NUMA node\?"):
            vmm.PhysicalMemory(sa.MemLocation.host_numa(99), PAGE, driver=machine)

    def test_a_descriptor_for_host_memory(self, traced: Any) -> None:
        """HOST memory cannot be exported, memory of a NUMA node can."""
        with pytest.raises(ValueError, match="HOST"):
            vmm.PhysicalMemory(HOST, PAGE, handle_types=FD, driver=traced)
        assert names(traced, "cuMemCreate") == []
        vmm.PhysicalMemory(NUMA, PAGE, handle_types=FD).close()


def test_memory_stays_while_it_is_mapped(account: Account) -> None:
    device = account.device
    with vmm.AddressRange(PAGE, driver=account.driver) as addresses:
        memory = vmm.PhysicalMemory(device, PAGE)
        mapping = addresses.map(memory, access=device)
        memory.close()
        mapping.fill(7)
        assert holds(mapping, 7)
        assert mapping.memory is memory and memory.mapping_count == 1
        mapping.close()
        assert account.mapped == {} and account.physical_bytes == 0 and memory.mapping_count == 0


class TestAt:
    """Memory found by the address where it is mapped."""

    @pytest.mark.parametrize("offset", [0, 100, PAGE, 2 * PAGE - 1])
    def test_by_any_of_its_addresses(self, device: sa.Device, offset: int) -> None:
        with vmm.AddressRange(4 * PAGE) as addresses, vmm.PhysicalMemory(device, 2 * PAGE) as memory:
            mapping = addresses.map(memory, PAGE, access=device)
            with vmm.PhysicalMemory.at(mapping.address + offset) as found:
                assert (found.nbytes, found.location, found.handle) == (2 * PAGE, device.location, memory.handle)

    @pytest.mark.parametrize("first", [0, 1])
    def test_each_holds_it(self, account: Account, first: int) -> None:
        device = account.device
        with vmm.AddressRange(2 * PAGE, driver=account.driver) as addresses:
            memory = vmm.PhysicalMemory(device, PAGE)
            mapping = addresses.map(memory, access=device)
            mapping.fill(5)
            both = [memory, vmm.PhysicalMemory.at(mapping.address, driver=account.driver)]
            mapping.close()
            both[first].close()
            with addresses.map(both[1 - first], PAGE, access=device) as other:
                assert holds(other, 5)
            both[1 - first].close()
            assert account.physical_bytes == 0

    def test_where_nothing_is_mapped(self, device: sa.Device) -> None:
        with vmm.AddressRange(2 * PAGE) as addresses, vmm.PhysicalMemory(device, PAGE) as memory:
            addresses.map(memory)
            for address in (addresses.address + PAGE, 0x1000):
                with pytest.raises(sa.InvalidValueError, match="no memory is mapped by cuMemMap"):
                    vmm.PhysicalMemory.at(address)


class TestExport:
    def test_not_made_for_it(self, traced: Any) -> None:
        with vmm.PhysicalMemory(sa.Device(0, driver=traced), PAGE) as memory:
            with pytest.raises(ValueError, match=r"make it with handle_types=.*FILE_DESCRIPTOR"):
                memory.export()
            assert not memory.exported
        assert names(traced, "cuMemExportToShareableHandle") == []

    @pytest.mark.parametrize("handle_type", [sa.MemHandleType.NONE, FD | FABRIC, sa.MemHandleType.WIN32, 1, None])
    def test_of_a_kind_that_there_is_not(self, device: sa.Device, handle_type: Any) -> None:
        with (
            vmm.PhysicalMemory(device, PAGE, handle_types=FD) as memory,
            pytest.raises((TypeError, ValueError), match="handle_type"),
        ):
            memory.export(handle_type)

    def test_the_descriptor_keeps_the_memory(self, device: sa.Device) -> None:
        with vmm.PhysicalMemory(device, PAGE), device.current():
            before = free(device)
            memory = vmm.PhysicalMemory(device, 8 * PAGE, handle_types=FD)
            one, two = memory.export(), memory.export()
            assert isinstance(one, sa.Fd) and isinstance(two, sa.Fd)
            assert one.fileno() != two.fileno() and memory.exported
            memory.close()
            assert free(device) == before - 8 * PAGE
            one.close()
            assert free(device) == before - 8 * PAGE
            two.close()
            assert free(device) == before


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


# -- address ranges: where they lie, what is in them, and when they can be given back ---------------------------------


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
    def test_with_memory_mapped(self, device: sa.Device, pages: vmm.AddressRange, memory: vmm.PhysicalMemory) -> None:
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

    def test_used_afterwards(self, device: sa.Device, memory: vmm.PhysicalMemory) -> None:
        pages = vmm.AddressRange(2 * PAGE, address=0x7FFF00000000)
        pages.close()
        each_raises(sa.ClosedError, lambda: pages.address, lambda: pages.honoured, match="was closed")
        uses = (lambda: pages.map(memory), lambda: pages.set_access(device), pages.view, lambda: pages.view(holes=True))
        each_raises(sa.ClosedError, *uses, match="was closed")
        pages.unmap()
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


# -- arguments that are refused, before any addresses are reserved or memory is made ----------------------------------


NOWHERE = sa.MemLocation.device(99)
SWAPPED = np.dtype(np.float32).newbyteorder()
Refused = tuple[dict[str, Any], type[Exception], str]


def _range(device: sa.Device, **arguments: Any) -> Any:
    return vmm.AddressRange(**arguments, driver=device.driver)


def _memory(device: sa.Device, **arguments: Any) -> Any:
    return vmm.PhysicalMemory(**{"where": device, "nbytes": PAGE, **arguments}, driver=device.driver)


def _stripe(device: sa.Device, **arguments: Any) -> Any:
    return vmm.stripe([device], **{"nbytes": PAGE, **arguments})


TABLE: dict[Callable[..., Any], list[Refused]] = {
    _range: [
        ({"nbytes": 0}, ValueError, "nbytes=0"),
        ({"nbytes": PAGE + 4096}, ValueError, f"nbytes={PAGE + 4096}"),
        ({"nbytes": -PAGE}, ValueError, "nbytes"),
        ({"nbytes": 2e6}, TypeError, "nbytes"),
        ({"nbytes": PAGE, "alignment": 3}, ValueError, "alignment=3"),
        ({"nbytes": PAGE, "alignment": 3 * PAGE}, ValueError, "alignment"),
        ({"nbytes": PAGE, "alignment": "2"}, TypeError, "alignment"),
        ({"nbytes": PAGE, "address": 4096}, ValueError, "address"),
        ({"nbytes": PAGE, "address": PAGE, "alignment": 1 << 30}, ValueError, "address"),
    ],
    _memory: [
        *(({"nbytes": size}, ValueError, rf"nbytes={size}.*2 MiB") for size in (1, 4096, PAGE - 1, PAGE + 1, 3 << 20)),
        ({"nbytes": 0}, ValueError, "nbytes=0"),
        ({"nbytes": 0, "round_up": True}, ValueError, "nbytes=0"),
        *(({"where": where}, TypeError, "where") for where in (None, 0.5, "cuda:0")),
        ({"where": NOWHERE}, ValueError, "id=99"),
        ({"where": sa.MemLocation.none()}, ValueError, "location"),
        *(({"where": where, "compressible": True}, ValueError, "compressible") for where in (HOST, NUMA)),
        *(({"where": where, "gpu_direct_rdma": True}, ValueError, "GPUDirect") for where in (HOST, NUMA)),
        ({"tile_pool": True, "compressible": True}, ValueError, "tile pool"),
        ({"tile_pool": True, "handle_types": FD}, ValueError, "tile pool"),
        ({"where": HOST, "handle_types": FD}, ValueError, "HOST"),
    ],
    vmm.GrowableBuffer: [
        ({"capacity": 0}, ValueError, "capacity=0"),
        ({"capacity": -1}, ValueError, "capacity"),
        ({"capacity": 1.5}, TypeError, "capacity"),
        ({"capacity": PAGE, "nbytes": PAGE + 1}, ValueError, f"nbytes={PAGE + 1}.*capacity"),
        ({"capacity": PAGE, "chunk": -1}, ValueError, "chunk"),
        ({"capacity": PAGE, "access": HOST}, ValueError, "access"),
        ({"capacity": PAGE, "access": NOWHERE}, ValueError, "id=99"),
        ({"capacity": PAGE, "handle_types": 1}, TypeError, "handle_types"),
        ({"capacity": PAGE, "handle_types": sa.MemHandleType.WIN32}, ValueError, "WIN32"),
    ],
    _stripe: [
        ({"nbytes": 0}, ValueError, "nbytes=0"),
        ({"nbytes": 1.0}, TypeError, "nbytes"),
        ({"access": HOST}, ValueError, "access"),
        ({"access": NOWHERE}, ValueError, "id=99"),
        ({"handle_types": 1}, TypeError, "handle_types"),
    ],
    vmm.SparseArray: [
        *(({"shape": shape}, ValueError, "shape") for shape in ((1024,), (2, 2, 2, 2), (0, 256))),
        ({"shape": (256.0, 256)}, TypeError, "shape"),
        *(({"shape": (256, 256), "dtype": dtype}, ValueError, "dtype") for dtype in (np.float64, bool)),
        ({"shape": (256, 256), "dtype": SWAPPED}, ValueError, "native byte order"),
        ({"shape": (256, 256), "channels": 3}, ValueError, "channels=3"),
        ({"shape": (256, 256), "layered": True}, ValueError, "layered"),
        ({"shape": (256, 256), "levels": -1}, ValueError, "levels"),
    ],
}
MAKES = ("cuMemAddressReserve", "cuMemCreate", "cuArray3DCreate", "cuMipmappedArrayCreate")


@pytest.mark.parametrize(
    ("make", "arguments", "error", "words"),
    [pytest.param(make, *refused, id=f"{make.__name__} {refused[0]}") for make in TABLE for refused in TABLE[make]],
)
def test_are_refused(
    account: Account, make: Callable[..., Any], arguments: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make(account.device, **arguments)
    assert account.calls(*MAKES) == []
