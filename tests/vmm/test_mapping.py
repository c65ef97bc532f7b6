"""Mappings: where memory can be mapped, aliases, and memory of the host."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
from streamalloc import vmm
from tests.support import holds, names, pattern
from tests.vmm.support import HOST, NONE, PAGE, READ, READWRITE, same


class TestMap:
    def test_what_it_says(self, device: sa.Device, pages: vmm.AddressRange, memory: vmm.PhysicalMemory) -> None:
        mapping = pages.map(memory, 3 * PAGE, access=device)
        assert (mapping.address, mapping.nbytes, mapping.offset) == (pages.address + 3 * PAGE, 2 * PAGE, 3 * PAGE)
        assert mapping.memory is memory and mapping.range is mapping.owner is pages
        assert mapping.location == device.location and mapping.stream.handle == device.default_stream.handle
        assert not mapping.closed and memory.mapping_count == 1
        assert mapping.rights == {device.location: READWRITE}
        assert repr(memory) in repr(mapping) and f"offset {3 * PAGE}" in repr(mapping)

    @pytest.mark.parametrize(
        ("offset", "says"),
        [
            *((offset, f"offset={offset}.*2 MiB") for offset in (1, 4096, PAGE // 2, PAGE - 1, PAGE + 1)),
            *((offset, f"offset={offset}.*outside") for offset in (7 * PAGE, 8 * PAGE, 100 * PAGE, (1 << 64) - PAGE)),
            *((offset, "offset") for offset in (-PAGE, 1.5, "0", None)),
        ],
    )
    def test_wrong_offsets(self, pages: vmm.AddressRange, memory: vmm.PhysicalMemory, offset: Any, says: str) -> None:
        with pytest.raises((TypeError, ValueError), match=says):
            pages.map(memory, offset)

    def test_nothing_reaches_the_driver(self, traced: Any, device: sa.Device) -> None:
        with vmm.AddressRange(2 * PAGE, driver=traced) as pages, vmm.PhysicalMemory(device, PAGE) as memory:
            pages.map(memory)
            del traced.calls[:]
            for offset in (0, 1, 2 * PAGE, -1):
                with pytest.raises(ValueError):
                    pages.map(memory, offset)
            assert names(traced) == []

    @pytest.mark.parametrize("what", [None, 0, b"memory"])
    def test_no_memory(self, pages: vmm.AddressRange, what: Any) -> None:
        with pytest.raises(TypeError, match="PhysicalMemory"):
            pages.map(what)

    def test_a_tile_pool(self, device: sa.Device, pages: vmm.AddressRange) -> None:
        with vmm.PhysicalMemory(device, PAGE, tile_pool=True) as tiles, pytest.raises(ValueError, match="tile pool"):
            pages.map(tiles)


class TestUnmap:
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
    def test_used_where_other_memory_is_mapped_since(
        self, device: sa.Device, pages: vmm.AddressRange, memory: vmm.PhysicalMemory, use: Callable[..., Any]
    ) -> None:
        mapping = pages.map(memory, PAGE, access=device)
        mapping.close()
        pages.map(memory, PAGE, access=device)
        with pytest.raises(sa.ClosedError):
            use(mapping)
        assert "unmapped" in repr(mapping) and mapping.memory is memory


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

    def test_read_only_to_the_host(self, device: sa.Device, pages: vmm.AddressRange, host: vmm.PhysicalMemory) -> None:
        mapping = pages.map(host, access={device: READWRITE, HOST: READ})
        mapping.fill(6)
        device.synchronize()
        array = mapping.as_array()
        assert not array.flags.writeable and (array == 6).all()
        with pytest.raises(ValueError):
            array[0] = 1

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


class TestInterchange:
    @pytest.mark.parametrize(("who", "kind"), [("host", 1), ("both", 3)])
    def test_dlpack_of_the_host(self, device: sa.Device, pages: vmm.AddressRange, who: str, kind: int) -> None:
        with vmm.PhysicalMemory(HOST, PAGE) as host:
            mapping = pages.map(host, access=HOST if who == "host" else [HOST, device])
            assert mapping.__dlpack_device__() == (kind, 0)
            mapping.as_array()[:] = 7
            array = np.from_dlpack(mapping)
            assert array.ctypes.data == mapping.address and (array == 7).all()
