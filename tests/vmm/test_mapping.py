"""Mappings: where memory can be mapped, aliases, and memory of the host."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from tests.support import Account, holds, names, pattern, read
from tests.vmm.support import HOST, NONE, PAGE, READ, READWRITE, assert_unique, each, same, write


class TestMap:
    def test_what_it_says(self, device: sa.Device, pages: vmm.AddressRange, memory: vmm.PhysicalMemory) -> None:
        mapping = pages.map(memory, 3 * PAGE, access=device)
        assert (mapping.address, mapping.nbytes, mapping.offset) == (pages.address + 3 * PAGE, 2 * PAGE, 3 * PAGE)
        assert mapping.memory is memory and mapping.range is mapping.owner is pages
        assert mapping.location == device.location and mapping.stream.handle == device.default_stream.handle
        assert not mapping.closed and memory.mapping_count == 1
        assert mapping.rights == {device.location: READWRITE}
        assert repr(memory) in repr(mapping) and f"offset {3 * PAGE}" in repr(mapping)

    @pytest.mark.parametrize("offset", [1, 4096, PAGE // 2, PAGE - 1, PAGE + 1])
    def test_unaligned(
        self, device: sa.Device, pages: vmm.AddressRange, memory: vmm.PhysicalMemory, offset: int
    ) -> None:
        with pytest.raises(ValueError, match=rf"offset={offset}.*2 MiB"):
            pages.map(memory, offset)

    @pytest.mark.parametrize("offset", [7 * PAGE, 8 * PAGE, 100 * PAGE, (1 << 64) - PAGE])
    def test_outside(self, pages: vmm.AddressRange, memory: vmm.PhysicalMemory, offset: int) -> None:
        with pytest.raises(ValueError, match=f"offset={offset}.*outside"):
            pages.map(memory, offset)

    @pytest.mark.parametrize("offset", [-PAGE, 1.5, "0", None])
    def test_no_offset(self, pages: vmm.AddressRange, memory: vmm.PhysicalMemory, offset: Any) -> None:
        with pytest.raises((TypeError, ValueError), match="offset"):
            pages.map(memory, offset)

    @pytest.mark.parametrize("size", [1, 2, 4])
    @pytest.mark.parametrize("offset", range(8))
    def test_over_a_live_mapping(
        self, device: sa.Device, pages: vmm.AddressRange, memory: vmm.PhysicalMemory, size: int, offset: int
    ) -> None:
        pages.map(memory, 3 * PAGE)
        fits = offset + size <= 3 or (offset >= 5 and offset + size <= 8)
        with vmm.PhysicalMemory(device, size * PAGE) as other:
            if fits:
                pages.map(other, offset * PAGE)
            else:
                with pytest.raises(ValueError, match=f"offset={offset * PAGE}"):
                    pages.map(other, offset * PAGE)
            assert (other.mapping_count, len(pages.mappings)) == (fits, 1 + fits)

    def test_nothing_reaches_the_driver(self, machine: Any) -> None:
        driver = sd.traced(machine)
        device = sa.Device(0, driver=driver)
        with vmm.AddressRange(2 * PAGE, driver=driver) as pages, vmm.PhysicalMemory(device, PAGE) as memory:
            pages.map(memory)
            del driver.calls[:]
            for offset in (0, 1, 2 * PAGE, -1):
                with pytest.raises(ValueError):
                    pages.map(memory, offset)
            assert names(driver) == []

    @pytest.mark.parametrize("what", [None, 0, b"memory"])
    def test_no_memory(self, pages: vmm.AddressRange, what: Any) -> None:
        with pytest.raises(TypeError, match="PhysicalMemory"):
            pages.map(what)

    def test_a_tile_pool(self, device: sa.Device, pages: vmm.AddressRange) -> None:
        with vmm.PhysicalMemory(device, PAGE, tile_pool=True) as tiles, pytest.raises(ValueError, match="tile pool"):
            pages.map(tiles)

    def test_of_another_driver(self, machine: Any, pages: vmm.AddressRange) -> None:
        other = sa.Device(0, driver=sd.traced(machine))
        with vmm.PhysicalMemory(other, PAGE) as memory, pytest.raises(ValueError, match="another driver"):
            pages.map(memory)


class TestUnmap:
    def test_once(self, machine: Any) -> None:
        account = Account(machine)
        device = account.device
        with vmm.AddressRange(PAGE, driver=account.driver) as pages, vmm.PhysicalMemory(device, PAGE) as memory:
            mapping = pages.map(memory, access=device)
            mapping.close()
            mapping.close()
            assert mapping.closed and memory.mapping_count == 0 and not pages.mappings
            assert account.calls("cuMemUnmap") == ["cuMemUnmap"]
            with pages.map(memory) as other:
                assert list(pages.mappings) == [other]
            assert other.closed
        assert account.left == {}

    def test_dropping_it_does_not(self, device: sa.Device, pages: vmm.AddressRange, memory: vmm.PhysicalMemory) -> None:
        pages.map(memory, access=device).fill(3)
        gc.collect()
        (mapping,) = pages.mappings
        assert holds(mapping, 3)

    def test_it_is_the_same_in_the_table(self, pages: vmm.AddressRange, memory: vmm.PhysicalMemory) -> None:
        mapping, other = pages.map(memory), pages.map(memory, 2 * PAGE)
        assert pages.mappings[0] == mapping != other and hash(pages.mappings[0]) == hash(mapping)
        assert mapping != 3
        mapping.close()
        again = pages.map(memory)
        assert again != mapping

    @pytest.mark.parametrize(
        "use",
        [
            lambda mapping: mapping.address,
            lambda mapping: mapping.fill(1),
            lambda mapping: mapping.copy_to(np.zeros(2 * PAGE, np.uint8)),
            lambda mapping: mapping.copy_from(np.zeros(2 * PAGE, np.uint8)),
            lambda mapping: mapping[8:16].fill(1),
            lambda mapping: mapping.access(HOST),
            lambda mapping: mapping.set_access(sa.MemLocation.device(0)),
            lambda mapping: mapping.revoke(sa.MemLocation.device(0)),
            lambda mapping: mapping.__cuda_array_interface__,
            lambda mapping: mapping.__dlpack__(),
            lambda mapping: mapping.as_array(),
            lambda mapping: mapping.location,
            lambda mapping: mapping.__enter__(),
        ],
    )
    @pytest.mark.parametrize("again", [False, True])
    def test_used_afterwards(
        self,
        device: sa.Device,
        pages: vmm.AddressRange,
        memory: vmm.PhysicalMemory,
        use: Callable[..., Any],
        again: bool,
    ) -> None:
        """Also where other memory is mapped at its place since."""
        mapping = pages.map(memory, PAGE, access=device)
        mapping.close()
        if again:
            pages.map(memory, PAGE, access=device)
        with pytest.raises(sa.ClosedError):
            use(mapping)
        assert "unmapped" in repr(mapping) and mapping.memory is memory

    def test_by_the_range(self, pages: vmm.AddressRange, memory: vmm.PhysicalMemory) -> None:
        mapping = pages.map(memory)
        pages.unmap()
        assert mapping.closed
        mapping.close()

    def test_refuses_copies(self, pages: vmm.AddressRange, memory: vmm.PhysicalMemory) -> None:
        assert_unique(pages.map(memory))


class TestAliases:
    def test_see_each_other(self, device: sa.Device, pages: vmm.AddressRange, memory: vmm.PhysicalMemory) -> None:
        one, two = (pages.map(memory, offset * PAGE, access=device) for offset in (0, 5))
        assert memory.mapping_count == 2
        data = write(one, pattern(2 * PAGE))
        assert same(two, data)
        two[PAGE : PAGE + 8].fill(9)
        assert read(one)[PAGE : PAGE + 9].tolist() == 8 * [9] + [data[PAGE + 8]]
        one.close()
        assert memory.mapping_count == 1 and read(two)[PAGE] == 9

    def test_have_access_of_their_own(
        self, device: sa.Device, pages: vmm.AddressRange, memory: vmm.PhysicalMemory
    ) -> None:
        one, two = pages.map(memory, access=device), pages.map(memory, 2 * PAGE, access={device: READ})
        assert (one.access(device), two.access(device)) == (READWRITE, READ)
        one.fill(6)
        assert holds(two, 6)
        with pytest.raises(sa.InvalidValueError, match="may only read"):
            two.fill(1)
        assert holds(one, 6)

    def test_unmapped_in_any_order(self, machine: Any) -> None:
        account = Account(machine)
        device, pages = account.device, vmm.AddressRange(6 * PAGE, driver=account.driver)
        for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
            memory = vmm.PhysicalMemory(device, PAGE)
            mappings = [pages.map(memory, offset * PAGE, access=device) for offset in range(3)]
            mappings[order[0]].fill(7)
            memory.close()
            for number in order:
                assert holds(mappings[number], 7)
                mappings[number].close()
            assert account.physical_bytes == 0
        pages.close()


class TestHostMemory:
    @pytest.fixture(params=[HOST, sa.MemLocation.host_numa(0)], ids=["host", "node"])
    def host(self, machine: Any, request: pytest.FixtureRequest) -> Iterator[vmm.PhysicalMemory]:
        with vmm.PhysicalMemory(request.param, PAGE) as memory:
            yield memory

    def test_both_use_it(self, device: sa.Device, pages: vmm.AddressRange, host: vmm.PhysicalMemory) -> None:
        mapping = pages.map(host, access=[device, HOST])
        assert mapping.host_accessible and mapping.device_accessible
        array = mapping.as_array(np.uint32)
        assert array.ctypes.data == mapping.address
        data = pattern(PAGE)
        array[:] = data.view(np.uint32)
        assert same(mapping, data)
        mapping[: PAGE // 2].fill(8)
        device.synchronize()
        assert (array[: PAGE // 8] == 0x08080808).all()
        assert np.array_equal(array[PAGE // 8 :], data.view(np.uint32)[PAGE // 8 :])

    def test_the_host_alone(self, pages: vmm.AddressRange, host: vmm.PhysicalMemory, device: sa.Device) -> None:
        mapping = pages.map(host, access=HOST)
        assert mapping.host_accessible and not mapping.device_accessible
        mapping.as_array()[:] = 5
        assert (mapping.as_array()[-9:] == 5).all()
        assert not hasattr(mapping, "__cuda_array_interface__")
        with pytest.raises(sa.InvalidValueError, match="no access"):
            mapping.fill(1)

    def test_a_device_alone(self, device: sa.Device, pages: vmm.AddressRange, host: vmm.PhysicalMemory) -> None:
        mapping = pages.map(host, access=device)
        assert mapping.device_accessible and not mapping.host_accessible
        mapping.fill(5)
        assert holds(mapping, 5)
        with pytest.raises(ValueError, match=r"host"):
            mapping.as_array()
        assert not hasattr(mapping, "__array_interface__")

    def test_nobody(self, pages: vmm.AddressRange, host: vmm.PhysicalMemory) -> None:
        mapping = pages.map(host)
        assert not mapping.device_accessible and not mapping.host_accessible
        for use in each(mapping.as_array, lambda: mapping.fill(1), lambda: read(mapping)):
            with pytest.raises(ValueError, match="nobody has access"):
                use()

    def test_read_only_to_the_host(self, device: sa.Device, pages: vmm.AddressRange, host: vmm.PhysicalMemory) -> None:
        mapping = pages.map(host, access={device: READWRITE, HOST: READ})
        mapping.fill(6)
        device.synchronize()
        array = mapping.as_array()
        assert not array.flags.writeable and (array == 6).all()
        with pytest.raises(ValueError):
            array[0] = 1

    def test_read_only_to_the_device(
        self, device: sa.Device, pages: vmm.AddressRange, host: vmm.PhysicalMemory
    ) -> None:
        mapping = pages.map(host, access={device: READ, HOST: READWRITE})
        array = mapping.as_array()
        array[:] = 6
        assert mapping.__cuda_array_interface__["data"] == (mapping.address, True)
        with pytest.raises(sa.InvalidValueError, match="may only read"):
            mapping.fill(1)
        assert (array == 6).all()

    @pytest.mark.parametrize("node", [0, None])
    @pytest.mark.parametrize("revoked", [0, None])
    def test_taken_from_the_host(
        self,
        device: sa.Device,
        pages: vmm.AddressRange,
        host: vmm.PhysicalMemory,
        node: int | None,
        revoked: int | None,
    ) -> None:
        """The host and its node are one: what is taken from the one is taken from the other."""
        granted, taken = (HOST if n is None else sa.MemLocation.host_numa(n) for n in (node, revoked))
        mapping = pages.map(host, access=[device, granted])
        assert mapping.access(HOST) == READWRITE and mapping.as_array().flags.writeable
        mapping.revoke(taken)
        assert mapping.access(HOST) == mapping.access(sa.MemLocation.host_numa(0)) == NONE
        assert not mapping.host_accessible
        with pytest.raises(ValueError):
            mapping.as_array()
        mapping.fill(1)

    def test_lowered_under_another_name(
        self, device: sa.Device, pages: vmm.AddressRange, host: vmm.PhysicalMemory
    ) -> None:
        mapping = pages.map(host, access=[device, HOST])
        mapping.set_access(sa.MemLocation.host_numa(0), READ)
        assert mapping.access(HOST) == READ
        assert not mapping.as_array().flags.writeable

    def test_side_by_side_with_device_memory(
        self, device: sa.Device, pages: vmm.AddressRange, host: vmm.PhysicalMemory
    ) -> None:
        with vmm.PhysicalMemory(device, PAGE) as memory:
            pages.map(memory)
            there = pages.map(host, PAGE)
            pages.set_access(device, start=0, stop=2 * PAGE)
            both = pages.view(0, 2 * PAGE)
            both.fill(3)
            assert holds(both, 3) and not both.host_accessible
            with pytest.raises(sa.NotSupportedError, match="host can only be given access to host memory"):
                pages.set_access(HOST, start=0, stop=2 * PAGE)
            assert there.access(HOST) == NONE and not there.host_accessible
            there.set_access(HOST)
            assert (there.as_array() == 3).all()

    def test_a_view_with_holes(self, device: sa.Device, pages: vmm.AddressRange) -> None:
        with pytest.raises(ValueError, match="nothing is mapped at offset 0"):
            pages.view(0, 4 * PAGE)
        view = pages.view(0, 4 * PAGE, holes=True)
        assert (view.address, view.nbytes) == (pages.address, 4 * PAGE)
        with vmm.PhysicalMemory(device, PAGE) as memory:
            pages.map(memory, PAGE, access=device)
        # Kernels take the addresses of all of it.
        assert view.__cuda_array_interface__["data"][0] == pages.address and view.location == device.location
        part = view[PAGE : 2 * PAGE]
        assert part.address == pages.address + PAGE
        part.fill(5)
        assert holds(part, 5) and holds(part[: PAGE // 2], 5)
        for unmapped in (view, view[PAGE + 1 : 2 * PAGE + 1]):
            with pytest.raises(ValueError, match="nothing is mapped at offset"):
                unmapped.fill(1)
            with pytest.raises(ValueError, match="nothing is mapped at offset"):
                unmapped.copy_to(np.zeros(unmapped.nbytes, np.uint8))

    def test_an_array_keeps_it(self, machine: Any) -> None:
        account = Account(machine)
        pages, host = (
            vmm.AddressRange(PAGE, driver=account.driver),
            vmm.PhysicalMemory(HOST, PAGE, driver=account.driver),
        )
        array = pages.map(host, access=HOST).as_array(np.int64, (PAGE // 16, 2))
        array[0, 1] = -7
        del pages, host
        gc.collect()
        assert array[0, 1] == -7 and "address range" in account.left
        del array
        assert account.left == {}


class TestInterchange:
    def test_cuda_array_interface(self, device: sa.Device, pages: vmm.AddressRange, memory: vmm.PhysicalMemory) -> None:
        mapping = pages.map(memory, access=device)
        found = mapping[16:64].__cuda_array_interface__
        assert (found["shape"], found["typestr"], found["version"]) == ((48,), "|u1", 3)
        assert found["data"] == (mapping.address + 16, False) and found["stream"] == 1
        mapping.set_access(device, READ)
        assert mapping.__cuda_array_interface__["data"] == (mapping.address, True)

    @pytest.mark.parametrize(("who", "kind"), [("host", 1), ("both", 3)])
    def test_dlpack_of_the_host(self, device: sa.Device, pages: vmm.AddressRange, who: str, kind: int) -> None:
        with vmm.PhysicalMemory(HOST, PAGE) as host:
            mapping = pages.map(host, access=HOST if who == "host" else [HOST, device])
            assert mapping.__dlpack_device__() == (kind, 0)
            mapping.as_array()[:] = 7
            array = np.from_dlpack(mapping)
            assert array.ctypes.data == mapping.address and (array == 7).all()

    def test_cupy(self, device: sa.Device, pages: vmm.AddressRange, memory: vmm.PhysicalMemory, on_cuda: bool) -> None:
        cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
        if not on_cuda:
            pytest.skip("CuPy uses the real driver")
        mapping = pages.map(memory, access=device)
        for array in (cupy.asarray(mapping), cupy.from_dlpack(mapping)):
            array[:] = 5
            array[3] = 6
            cupy.cuda.get_current_stream().synchronize()
            assert read(mapping)[:5].tolist() == [5, 5, 5, 6, 5]
