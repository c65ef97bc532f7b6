"""Physical memory: sizes, places and options, what it takes, how long it stays, and its DMA-BUF descriptors."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.driver.bindings import cuda
from streamalloc.driver.wrappers import Wrapper
from tests.support import Account, MiB, holds, is_open, names
from tests.vmm.support import HOST, PAGE

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


class TestLife:
    def test_stays_while_it_is_mapped(self, account: Account) -> None:
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
