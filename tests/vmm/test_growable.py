"""Buffers that grow and shrink in place, and buffers of several devices: address, bytes, access, and memory."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from streamalloc.driver.bindings import cuda
from tests.support import Account, Replaced, each_raises, holds, names, pattern, read
from tests.vmm.support import HOST, NONE, PAGE, READ, READWRITE, each, same, write


@pytest.fixture
def buffer(device: sa.Device) -> Iterator[vmm.GrowableBuffer]:
    """Room for sixteen pages, in pieces of one page; empty."""
    with vmm.GrowableBuffer(device, 16 * PAGE, chunk=PAGE) as buffer:
        yield buffer


def free(device: sa.Device) -> int:
    return device.memory_info().free


class TestMake:
    @pytest.mark.parametrize(
        ("capacity", "nbytes", "reserved", "mapped"),
        [
            (1, 0, PAGE, 0),
            (1, 1, PAGE, PAGE),
            (PAGE, PAGE, PAGE, PAGE),
            (PAGE + 1, PAGE + 1, 2 * PAGE, 2 * PAGE),
            (1 << 40, 3, 1 << 40, PAGE),
        ],
    )
    def test_sizes(self, device: sa.Device, capacity: int, nbytes: int, reserved: int, mapped: int) -> None:
        with vmm.GrowableBuffer(device, capacity, nbytes) as buffer:
            assert (buffer.nbytes, len(buffer)) == (nbytes, nbytes)
            assert (buffer.capacity, buffer.mapped_bytes) == (reserved, mapped)
            assert buffer.range.nbytes == reserved and buffer.range.mapped_bytes == mapped

    @pytest.mark.parametrize("where", [sa.MemLocation.host_numa(0), None], ids=["host", "device"])
    def test_of_the_host(self, device: sa.Device, stream: sa.Stream, where: sa.MemLocation | None) -> None:
        with vmm.GrowableBuffer(device, 8 * PAGE, PAGE, location=where, stream=stream) as buffer:
            on_host = where is not None
            assert buffer.location == (where or device.location) and buffer.host_accessible is on_host
            assert buffer.rights.get(HOST, NONE) == (READWRITE if on_host else NONE) and buffer.device_accessible
            buffer.fill(3)
            buffer.grow(PAGE)
            buffer[PAGE:].fill(4)
            stream.synchronize()
            if on_host:
                assert (buffer.as_array().reshape(2, PAGE) == [[3], [4]]).all()
            with sa.MemoryPool(sa.MemLocation.host(), driver=device.driver) as backup:
                backup.set_access(device, READWRITE)
                buffer.evict(backup)
                buffer.restore()
                assert holds(buffer[:PAGE], 3) and holds(buffer[PAGE:], 4)

    def test_what_it_says(self, device: sa.Device, stream: sa.Stream) -> None:
        with vmm.GrowableBuffer(device, 4 * PAGE, 100, stream=stream) as buffer:
            assert buffer.stream is stream and buffer.device == device and buffer.owner is buffer.range
            assert buffer.address == buffer.range.address and buffer.location == device.location
            assert buffer.device_accessible and not buffer.host_accessible
            assert buffer.rights == {device.location: READWRITE}
            assert not buffer.evicted and buffer.eviction is None and not buffer.closed
            assert buffer.properties == sa.MemAllocationProp(location=device.location)
            assert "100 bytes" in repr(buffer) and "[0...]" in repr(buffer)
            (mapping,) = buffer.mappings
            assert mapping.address == buffer.address and mapping.access(device) == READWRITE

    @pytest.mark.parametrize("capacity", [1 << 47, (1 << 64) - PAGE])
    def test_no_addresses(self, account: Account, capacity: int) -> None:
        with pytest.raises(sa.AddressSpaceError, match="addresses") as caught:
            vmm.GrowableBuffer(account.device, capacity, PAGE)
        assert not isinstance(caught.value, sa.OutOfMemoryError)
        assert account.left == {} and account.calls("cuMemCreate") == []

    def test_no_memory(self, account: Account) -> None:
        """More than the card has, of which there are addresses enough."""
        total = account.device.memory_info().total
        with pytest.raises(sa.OutOfMemoryError, match="physical memory is exhausted") as caught:
            vmm.GrowableBuffer(account.device, 4 * total, 2 * total)
        assert not isinstance(caught.value, sa.AddressSpaceError)
        assert caught.value.total == total and caught.value.requested is not None

    @pytest.mark.supports("compression")
    def test_options(self, device: sa.Device) -> None:
        kind = sa.MemHandleType.POSIX_FILE_DESCRIPTOR
        with vmm.GrowableBuffer(
            device, 2 * PAGE, 1, handle_types=kind, compressible=True, gpu_direct_rdma=False
        ) as buffer:
            assert buffer.properties.requested_handle_types == kind
            buffer.grow(PAGE)
            memories = [mapping.memory for mapping in buffer.mappings]
            assert all(isinstance(memory, vmm.PhysicalMemory) and memory.compressible for memory in memories)
            assert all(memory.properties == buffer.properties for memory in memories)  # type: ignore[attr-defined]


class TestGrow:
    def test_a_step_costs_the_same_at_the_end(self, traced: Any) -> None:
        """Create, map, set access: whatever is there is not touched again."""
        with vmm.GrowableBuffer(sa.Device(0, driver=traced), 64 * PAGE) as buffer:
            for _ in range(64):
                del traced.calls[:]
                buffer.grow(PAGE)
                assert names(traced) == ["cuMemCreate", "cuMemMap", "cuMemSetAccess"]
                assert int(traced.calls[2].args[1]) == PAGE

    def test_by_nothing(self, device: sa.Device) -> None:
        """Releases nothing of what a shrink has kept."""
        with vmm.GrowableBuffer(device, 4 * PAGE, 4 * PAGE, chunk=PAGE) as buffer:
            buffer.resize(PAGE, release=False)
            buffer.grow(0)
            assert (buffer.nbytes, buffer.mapped_bytes) == (PAGE, 4 * PAGE)
            buffer.resize(PAGE)
            assert buffer.mapped_bytes == PAGE

    @pytest.mark.simulated_only("takes all memory of the device")
    def test_out_of_memory(self) -> None:
        """The buffer stays as it was, usable, and grows by less or later."""
        machine: Any = sd.simulated(memory=16 * PAGE)
        account = Account(machine)
        device = account.device
        with vmm.GrowableBuffer(device, 64 * PAGE, 3 * PAGE, chunk=PAGE) as buffer:
            data = write(buffer, pattern(3 * PAGE))
            other = vmm.PhysicalMemory(device, 8 * PAGE)
            with pytest.raises(sa.OutOfMemoryError, match="physical memory is exhausted") as caught:
                buffer.grow(10 * PAGE)
            assert (caught.value.requested, caught.value.total) == (PAGE, 16 * PAGE)
            assert (buffer.nbytes, buffer.mapped_bytes, len(buffer.mappings)) == (3 * PAGE, 3 * PAGE, 3)
            assert free(device) == 5 * PAGE
            assert all(mapping.access(device) == READWRITE for mapping in buffer.mappings)
            assert same(buffer, data)
            buffer.grow(5 * PAGE)
            assert free(device) == 0
            with pytest.raises(sa.OutOfMemoryError):
                buffer.grow(1)
            other.close()
            buffer.resize(16 * PAGE)
            assert same(buffer[: 3 * PAGE], data)
        assert account.left == {} and free(device) == 16 * PAGE


class TestShrink:
    def test_what_is_gone_is_refused(self, buffer: vmm.GrowableBuffer) -> None:
        buffer.resize(4 * PAGE)
        kept, cut, gone = buffer[:PAGE], buffer[PAGE : 3 * PAGE], buffer[3 * PAGE :][8:16]
        mapping = buffer.mappings[3]
        buffer.resize(2 * PAGE)
        kept.fill(1)
        assert holds(kept, 1)
        for view in (cut, gone):
            for use in each(
                lambda view: view.fill(1),
                lambda view: view.copy_to(bytearray(view.nbytes)),
                lambda view: view.copy_from(bytes(view.nbytes)),
                lambda view: view.__cuda_array_interface__,
                lambda view: view.__dlpack__(),
                lambda view: view.address,
            ):
                with pytest.raises(sa.ClosedError, match="shrunk"):
                    use(view)
            assert "BufferView" in repr(view)
        assert mapping.closed
        with pytest.raises(sa.ClosedError):
            mapping.fill(1)
        buffer.resize(4 * PAGE)
        for view in (cut, gone):
            view.fill(2)
            assert holds(view, 2)
        assert mapping.closed

    @pytest.mark.parametrize(
        ("after", "waits"),
        [
            (lambda stream, event: None, ["cuEventSynchronize", "cuMemFree"]),
            (lambda stream, event: (), []),
            (lambda stream, event: stream, ["cuStreamSynchronize"]),
            (lambda stream, event: [event], ["cuEventSynchronize"]),
            (lambda stream, event: (event, stream), ["cuEventSynchronize", "cuStreamSynchronize"]),
        ],
    )
    def test_waits_before_it_unmaps(self, account: Account, after: Callable[..., Any], waits: list[str]) -> None:
        device = account.device
        kinds = ("cuMemFree", "cuStreamSynchronize", "cuEventSynchronize", "cuMemUnmap", "cuMemRelease")
        with (
            device.create_stream() as stream,
            stream.record() as event,
            vmm.GrowableBuffer(device, 4 * PAGE, 2 * PAGE, chunk=PAGE) as buffer,
        ):
            done = len(account.calls(*kinds))
            buffer.resize(PAGE, after=after(stream, event))
            assert account.calls(*kinds)[done:] == [*waits, "cuMemUnmap", "cuMemRelease"]

    def test_memory_that_a_refused_growth_has_left_stays_refused(self, machine: Any) -> None:
        """All bytes of the buffer stay mapped."""
        refused: list[int] = []

        def unmap(at: Any, nbytes: int) -> Any:
            if int(at) in refused:
                return (cuda.CUresult.CUDA_ERROR_UNKNOWN,)
            return machine.cuMemUnmap(at, nbytes)

        def set_access(*arguments: Any) -> Any:
            return (cuda.CUresult.CUDA_ERROR_UNKNOWN,) if refused else machine.cuMemSetAccess(*arguments)

        driver: Any = Replaced(machine, cuMemUnmap=unmap, cuMemSetAccess=set_access)
        with vmm.GrowableBuffer(sa.Device(0, driver=driver), 16 * PAGE, 4 * PAGE, chunk=PAGE) as buffer:
            refused.append(buffer.address + 5 * PAGE)
            for size in (7 * PAGE, 2 * PAGE):
                with pytest.raises(sa.CudaError):
                    buffer.resize(size)
                assert buffer.nbytes == 4 * PAGE
                buffer.fill(1)
            refused.clear()
            buffer.resize(2 * PAGE)
            assert buffer.mapped_bytes == len(buffer.mappings) * PAGE == 2 * PAGE

    @pytest.mark.parametrize("nbytes", [PAGE // 2, PAGE, 3 * PAGE])
    def test_after_what_is_no_work(self, buffer: vmm.GrowableBuffer, nbytes: int) -> None:
        """It is refused also if nothing is to be unmapped."""
        before = buffer.nbytes
        for wrong in ("stream", 3, [None]):
            with pytest.raises(TypeError, match="after must be an Event, a Stream"):
                buffer.resize(nbytes, after=wrong)  # type: ignore[arg-type]
        closed = buffer.stream.record()
        closed.close()
        with pytest.raises(sa.ClosedError, match="after: <Event closed"):
            buffer.resize(nbytes, after=[closed])
        assert buffer.nbytes == before

    def test_in_a_capture(self, buffer: vmm.GrowableBuffer, stream: sa.Stream) -> None:
        buffer.resize(2 * PAGE)
        buffer.fill(1)
        with stream.capture() as graph:
            buffer.resize(PAGE)
            assert buffer.nbytes == buffer.mapped_bytes == PAGE
            buffer.resize(3 * PAGE)
            buffer.resize(2 * PAGE, after=())
        assert graph.nodes == [] and holds(buffer[:PAGE], 1)


class TestUse:
    """It is a buffer like any other."""

    def test_in_a_graph(self, buffer: vmm.GrowableBuffer, stream: sa.Stream) -> None:
        """The address is constant, so that a graph stays valid while the buffer grows."""
        buffer.resize(PAGE)
        with stream.capture() as graph:
            buffer.fill(4, stream)
        buffer.resize(4 * PAGE)
        buffer[PAGE:].fill(0)
        buffer.stream.synchronize()
        with graph:
            graph.launch(stream)
            stream.synchronize()
        found = read(buffer)
        assert (found[:PAGE] == 4).all() and (found[PAGE:] == 0).all()

    @pytest.mark.parametrize(
        "use",
        [
            lambda buffer, memory: buffer.range.close(),
            lambda buffer, memory: buffer.range.unmap(),
            lambda buffer, memory: buffer.range.map(memory, 3 * PAGE),
            lambda buffer, memory: buffer.mappings[0].close(),
            lambda buffer, memory: buffer.mappings[-1].close(()),
        ],
    )
    def test_its_pieces_are_its_own(self, device: sa.Device, use: Callable[..., object]) -> None:
        """Nothing is mapped or unmapped behind its back."""
        with (
            vmm.PhysicalMemory(device, PAGE) as memory,
            vmm.GrowableBuffer(device, 4 * PAGE, 2 * PAGE, chunk=PAGE) as buffer,
        ):
            with pytest.raises((ValueError, sa.InUseError)):
                use(buffer, memory)
            buffer.fill(1)
            assert holds(buffer, 1)
            buffer.resize(4 * PAGE)
            buffer.fill(2)


class TestAccess:
    @pytest.mark.parametrize("nbytes", [0, PAGE])
    def test_of_the_host(self, buffer: vmm.GrowableBuffer, device: sa.Device, nbytes: int) -> None:
        """Refused at once, also while nothing is mapped: later growths must not fail for it."""
        buffer.resize(nbytes)
        with pytest.raises((ValueError, sa.NotSupportedError)):
            buffer.set_access(HOST)
        assert buffer.rights == {device.location: READWRITE}
        buffer.grow(PAGE)
        buffer.fill(1)

    @pytest.mark.gpus(2)
    @pytest.mark.parametrize("flags", [READ, READWRITE])
    def test_of_a_peer_is_kept(self, device: sa.Device, peer: sa.Device, flags: sa.MemAccess) -> None:
        with (
            vmm.GrowableBuffer(device, 4 * PAGE, PAGE, access={peer: flags}, chunk=PAGE) as buffer,
            peer.create_stream() as theirs,
            vmm.GrowableBuffer(peer, 4 * PAGE, stream=theirs) as target,
        ):
            for size in (PAGE, 3 * PAGE, 2 * PAGE, 4 * PAGE):
                buffer.resize(size)
                target.resize(size)
                buffer.fill(size // PAGE)
                device.synchronize()
                assert [mapping.access(peer) for mapping in buffer.mappings] == [flags] * (size // PAGE)
                assert [mapping.access(device) for mapping in buffer.mappings] == [READWRITE] * (size // PAGE)
                target.copy_from(buffer)
                assert holds(target, size // PAGE)
            if flags == READ:
                with pytest.raises(sa.InvalidValueError):
                    buffer.fill(1, theirs)
            else:
                buffer.fill(9, theirs)
                theirs.synchronize()
                assert holds(buffer, 9)


# -- one contiguous buffer with memory of several devices -------------------------------------------------------------


def devices(count: int, driver: Any = None) -> list[sa.Device]:
    return [sa.Device(ordinal, driver=driver) for ordinal in range(count)]


class TestOneDevice:
    @pytest.mark.parametrize(
        ("nbytes", "each"), [(1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE), (5 * PAGE - 7, 5 * PAGE)]
    )
    def test_sizes(self, device: sa.Device, nbytes: int, each: int) -> None:
        with vmm.stripe([device], nbytes) as buffer:
            assert buffer.nbytes == nbytes and buffer.stripe_bytes == buffer.capacity == buffer.mapped_bytes == each
            assert buffer.devices == (device,) and buffer.device == device
            data = write(buffer, pattern(nbytes))
            assert same(buffer, data)

    def test_bad_devices(self, machine: Any, device: sa.Device) -> None:
        for what, error in (([], TypeError), ([0], TypeError), ([device, None], TypeError), ([device] * 2, ValueError)):
            with pytest.raises(error, match="device"):
                vmm.stripe(what, PAGE)  # type: ignore[arg-type]
        each_raises(TypeError, lambda: vmm.stripe(device, PAGE), match="devices must be")  # type: ignore[arg-type]
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
