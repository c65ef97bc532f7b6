"""One contiguous buffer with memory of several devices."""

from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from tests.support import Account, Replaced, holds, pattern, read
from tests.vmm.support import HOST, PAGE, READWRITE, same, write


def devices(count: int, driver: Any = None) -> list[sa.Device]:
    return [sa.Device(ordinal, driver=driver) for ordinal in range(count)]


class TestOneDevice:
    @pytest.mark.parametrize(
        ("nbytes", "each"), [(1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE), (5 * PAGE - 7, 5 * PAGE)]
    )
    def test_sizes(self, device: sa.Device, nbytes: int, each: int) -> None:
        with vmm.stripe([device], nbytes) as buffer:
            assert (buffer.nbytes, buffer.stripe_bytes, buffer.capacity, buffer.mapped_bytes) == (
                nbytes,
                each,
                each,
                each,
            )
            assert buffer.devices == (device,) and buffer.device == device
            data = write(buffer, pattern(nbytes))
            assert same(buffer, data)

    def test_bad_devices(self, machine: Any, device: sa.Device) -> None:
        for what, error in (([], TypeError), ([0], TypeError), ([device, None], TypeError), ([device] * 2, ValueError)):
            with pytest.raises(error, match="device"):
                vmm.stripe(what, PAGE)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            vmm.stripe(device, PAGE)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="another driver"):
            vmm.stripe([device, sa.Device(0, driver=sd.traced(machine))], PAGE)

    def test_size_first_is_deprecated(self, device: sa.Device) -> None:
        old: Any = vmm.stripe
        with pytest.warns(DeprecationWarning, match="device first") as warned, old(PAGE, [device]) as buffer:
            assert (buffer.nbytes, buffer.devices) == (PAGE, (device,))
        assert warned[0].filename == __file__


@pytest.mark.gpus(2)
class TestTwoDevices:
    @pytest.mark.parametrize(("nbytes", "each"), [(1, 1), (2 * PAGE, 1), (2 * PAGE + 1, 2), (7 * PAGE, 4)])
    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_where_it_lies(self, machine: Any, nbytes: int, each: int, order: tuple[int, int]) -> None:
        """The same amount of each device, side by side in the order given."""
        chosen = [sa.Device(ordinal) for ordinal in order]
        with vmm.stripe(chosen, nbytes) as buffer:
            assert (buffer.nbytes, buffer.stripe_bytes, buffer.capacity) == (nbytes, each * PAGE, 2 * each * PAGE)
            assert [mapping.location.id for mapping in buffer.mappings] == list(order)
            assert [mapping.offset for mapping in buffer.mappings] == [0, each * PAGE]
            assert buffer.device == chosen[0] and buffer.location == chosen[0].location
            assert buffer.range.draw() == str(order[0]) * each + str(order[1]) * each
            for device in chosen:
                assert [mapping.access(device) for mapping in buffer.mappings] == [READWRITE, READWRITE]
            data = write(buffer, pattern(nbytes))
            assert same(buffer, data)

    def test_each_device_uses_all_of_it(self, device: sa.Device, peer: sa.Device) -> None:
        with vmm.stripe([device, peer], 2 * PAGE) as buffer, peer.create_stream() as theirs:
            for value, stream in ((3, device.default_stream), (4, theirs)):
                buffer.fill(value, stream)
                stream.synchronize()
                assert holds(buffer, value)
            seam = buffer[PAGE - 4 : PAGE + 4]
            seam.fill(9, theirs)
            theirs.synchronize()
            assert read(buffer)[PAGE - 5 : PAGE + 5].tolist() == [4, *8 * [9], 4]

    def test_evicted(self, device: sa.Device, peer: sa.Device) -> None:
        """Each device restores the memory that it had."""
        with sa.MemoryPool(HOST) as host, vmm.stripe([peer, device], 4 * PAGE - 5) as buffer:
            for one in (device, peer):
                host.set_access(one, READWRITE)
            data = write(buffer, pattern(4 * PAGE - 5))
            buffer.evict(host)
            assert buffer.mapped_bytes == 0
            buffer.restore()
            buffer.stream.synchronize()
            assert [mapping.location.id for mapping in buffer.mappings] == [1, 0]
            assert same(buffer, data)
            for one in (device, peer):
                assert [mapping.access(one) for mapping in buffer.mappings] == [READWRITE, READWRITE]

    def test_devices_that_are_no_peers(self, machine: Any) -> None:
        driver = Replaced(machine, cuDeviceCanAccessPeer=lambda one, other: (machine.CUresult.CUDA_SUCCESS, 0))
        with pytest.raises(sa.PeerAccessError, match="cannot reach"):
            vmm.stripe(devices(2, driver), PAGE)

    @pytest.mark.simulated_only("takes all memory of a device")
    @pytest.mark.parametrize("full", [0, 1])
    def test_one_of_them_has_no_memory(self, full: int) -> None:
        account = Account(sd.simulated(devices=2, memory=4 * PAGE))
        both = devices(2, account.driver)
        with vmm.PhysicalMemory(both[full], 3 * PAGE):
            with pytest.raises(sa.OutOfMemoryError) as caught:
                vmm.stripe(both, 4 * PAGE)
            assert (caught.value.requested, caught.value.free) == (2 * PAGE, PAGE)
            assert both[1 - full].memory_info().free == 4 * PAGE
            with vmm.stripe(both, 2 * PAGE) as buffer:
                buffer.fill(1)
                assert holds(buffer, 1)
        assert account.left == {}


@pytest.mark.gpus(4)
def test_over_four_devices(machine: Any) -> None:
    with vmm.stripe(devices(4), 8 * PAGE - 1) as buffer:
        assert buffer.range.draw() == "00112233"
        data = write(buffer, pattern(8 * PAGE - 1))
        assert same(buffer, data)
