"""Mappings: where memory can be mapped, aliases, memory of the host, and access to them."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamalloc as sa
import streamalloc.driver as sd
from streamalloc import vmm
from tests.support import Account, Replaced, each_raises, holds, in_threads, names, pattern, read
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

    def test_the_host_alone(self, pages: vmm.AddressRange, host: vmm.PhysicalMemory) -> None:
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


@pytest.mark.parametrize(("who", "kind"), [("host", 1), ("both", 3)])
def test_dlpack_of_the_host(device: sa.Device, pages: vmm.AddressRange, who: str, kind: int) -> None:
    with vmm.PhysicalMemory(HOST, PAGE) as host:
        mapping = pages.map(host, access=HOST if who == "host" else [HOST, device])
        assert mapping.__dlpack_device__() == (kind, 0)
        mapping.as_array()[:] = 7
        array = np.from_dlpack(mapping)
        assert array.ctypes.data == mapping.address and (array == 7).all()


# -- access to mappings: granting, lowering and revoking, all or nothing, and the work that comes before --------------


NUMA = sa.MemLocation.host_numa(0)


@pytest.fixture
def bare(device: sa.Device) -> Iterator[vmm.AddressRange]:
    """Four pages of addresses, of which the first three are mapped and nobody has access: ``000.``."""
    with vmm.AddressRange(4 * PAGE) as addresses:
        for place in range(3):
            with vmm.PhysicalMemory(device, PAGE) as memory:
                addresses.map(memory, place * PAGE)
        yield addresses


class TestGrant:
    def test_nobody_has_it_by_itself(self, device: sa.Device, bare: vmm.AddressRange) -> None:
        mapping = bare.mappings[0]
        assert mapping.rights == {} and mapping.access(device) == NONE
        assert not mapping.device_accessible and not mapping.host_accessible
        each_raises(
            ValueError,
            lambda: mapping.fill(1),
            lambda: read(mapping),
            lambda: mapping.__dlpack__(),
            lambda: mapping.__cuda_array_interface__,
            match=r"nobody has access.*set_access",
        )

    @pytest.mark.parametrize(
        ("access", "expected"),
        [
            (lambda device: device, READWRITE),
            (lambda device: device.location, READWRITE),
            (lambda device: [device], READWRITE),
            (lambda device: (device.location, device), READWRITE),
            (lambda device: {device: READ}, READ),
            (lambda device: {device.location: READWRITE}, READWRITE),
            (lambda device: {device: NONE}, NONE),
            (lambda device: iter([device]), READWRITE),
            (lambda device: None, NONE),
            (lambda device: [], NONE),
            (lambda device: {}, NONE),
        ],
    )
    def test_how_to_say_it(self, device: sa.Device, access: Callable[[sa.Device], Any], expected: sa.MemAccess) -> None:
        with vmm.AddressRange(2 * PAGE) as addresses, vmm.PhysicalMemory(device, PAGE) as memory:
            one, two = addresses.map(memory, access=access(device)), addresses.map(memory, PAGE)
            two.set_access(access(device))
            for mapping in (one, two):
                assert mapping.access(device) == mapping.access(device.location) == expected
                assert mapping.rights == ({device.location: expected} if expected else {})
                assert mapping.device_accessible is bool(expected)

    @pytest.mark.parametrize(
        ("access", "error", "words"),
        [
            (0, TypeError, "access"),
            ("device", TypeError, "access"),
            ([0.5], TypeError, "access"),
            ({sa.MemLocation.device(0): 3}, TypeError, "MemAccess"),
            ({sa.MemLocation.device(0): None}, TypeError, "MemAccess"),
            (sa.MemLocation.device(99), ValueError, "id=99"),
            ([sa.MemLocation.device(0), sa.MemLocation.device(99)], ValueError, "id=99"),
        ],
    )
    def test_bad_arguments(
        self, traced: Any, device: sa.Device, access: Any, error: type[Exception], words: str
    ) -> None:
        with vmm.AddressRange(2 * PAGE, driver=traced) as addresses, vmm.PhysicalMemory(device, PAGE) as memory:
            mapping = addresses.map(memory)
            each_raises(
                error,
                lambda: mapping.set_access(access),
                lambda: addresses.map(memory, PAGE, access=access),
                lambda: addresses.set_access(access, stop=PAGE),
                match=words,
            )
            assert len(addresses.mappings) == 1 and memory.mapping_count == 1
        assert names(traced, "cuMemSetAccess") == [] and len(names(traced, "cuMemMap")) == 1

    def test_devices_of_another_driver(self, device: sa.Device, bare: vmm.AddressRange) -> None:
        other = sa.Device(0, driver=sd.simulated())
        with vmm.PhysicalMemory(device, PAGE) as memory:
            each_raises(
                ValueError,
                lambda: bare.mappings[0].access(other),
                lambda: bare.mappings[0].set_access(other),
                lambda: bare.map(memory, 3 * PAGE, access={other: READ}),
                match="belongs to another driver",
            )

    @pytest.mark.parametrize("who", [HOST, NUMA])
    @pytest.mark.parametrize("flags", [READ, READWRITE])
    def test_the_host_gets_no_device_memory(
        self, device: sa.Device, bare: vmm.AddressRange, who: sa.MemLocation, flags: sa.MemAccess
    ) -> None:
        first = bare.mappings[0]
        with pytest.raises(sa.NotSupportedError, match="host can only be given access to host memory"):
            first.set_access(who, flags)
        assert first.rights == {} and first.access(who) == NONE
        with vmm.PhysicalMemory(device, PAGE) as memory:
            asked: list[Any] = [{who: flags}, {device: READWRITE, who: flags}]
            for access in asked:
                with pytest.raises(sa.NotSupportedError):
                    bare.map(memory, 3 * PAGE, access=access)
                assert bare.draw() == "000." and memory.mapping_count == 0
            bare.map(memory, 3 * PAGE, access=device)

    def test_all_or_nothing(self, device: sa.Device, bare: vmm.AddressRange) -> None:
        bare.set_access(device, READ, stop=3 * PAGE)
        with pytest.raises(sa.NotSupportedError):
            bare.set_access({device: READWRITE, HOST: READWRITE}, stop=3 * PAGE)
        for mapping in bare.mappings:
            assert mapping.access(device) == READ and mapping.rights == {device.location: READ}


def test_what_was_set_before_a_refusal_is_taken_back(machine: Any) -> None:
    """A driver may refuse access as a whole when it has set some of it, as driver 580 does."""
    fails: list[bool] = []

    def halfway(address: Any, nbytes: int, *access: Any) -> Any:
        if not fails:
            return machine.cuMemSetAccess(address, nbytes, *access)
        fails.clear()
        assert nbytes == 3 * PAGE and not machine.cuMemSetAccess(address, PAGE, *access)[0]
        return (machine.CUresult.CUDA_ERROR_UNKNOWN,)

    driver: Any = Replaced(machine, cuMemSetAccess=halfway)
    device = sa.Device(0, driver=driver)
    with vmm.AddressRange(3 * PAGE, driver=driver) as addresses:
        for place in range(3):
            with vmm.PhysicalMemory(device, PAGE) as memory:
                addresses.map(memory, place * PAGE)
        addresses.set_access(device)
        fails.append(True)
        with pytest.raises(sa.CudaError, match="cuMemSetAccess answered"):
            addresses.set_access(device, READ)
        assert [mapping.access(device) for mapping in addresses.mappings] == [READWRITE] * 3


class TestPart:
    def test_of_a_range(self, device: sa.Device, bare: vmm.AddressRange) -> None:
        bare.set_access(device, start=PAGE, stop=3 * PAGE)
        assert [mapping.access(device) for mapping in bare.mappings] == [NONE, READWRITE, READWRITE]
        bare.set_access(device, READ, start=2 * PAGE, stop=3 * PAGE)
        assert [mapping.access(device) for mapping in bare.mappings] == [NONE, READWRITE, READ]
        part = bare.view(2 * PAGE, 3 * PAGE).view_as("float32")
        each_raises(BufferError, lambda: part.__dlpack__(stream=-1), match="readonly")
        bare.set_access({device: NONE}, stop=2 * PAGE)
        assert [mapping.access(device) for mapping in bare.mappings] == [NONE, NONE, READ]

    @pytest.mark.parametrize(
        ("part", "says"),
        [
            *(
                (part, "nothing is mapped")
                for part in [(0, None), (2 * PAGE, 4 * PAGE), (3 * PAGE, 4 * PAGE), (0, 4 * PAGE)]
            ),
            *((part, "cuts a mapping") for part in [(0, PAGE + 1), (1, 2 * PAGE), (0, PAGE // 2), (PAGE - 1, PAGE)]),
        ],
    )
    def test_that_is_none(self, device: sa.Device, bare: vmm.AddressRange, part: tuple[Any, Any], says: str) -> None:
        with pytest.raises(ValueError, match=says):
            bare.set_access(device, start=part[0], stop=part[1])
        assert all(mapping.access(device) == NONE for mapping in bare.mappings)

    def test_of_mappings_with_different_access(self, device: sa.Device, bare: vmm.AddressRange) -> None:
        """The least that any of them allows is what the whole allows."""
        for mapping, flags in zip(bare.mappings, (READWRITE, READ, READWRITE), strict=True):
            mapping.set_access(device, flags)
        whole, last = bare.view(0, 3 * PAGE), bare.view(2 * PAGE, 3 * PAGE)
        last.fill(4)
        with pytest.raises(sa.InvalidValueError, match="may only read"):
            whole.fill(1)
        assert whole.__cuda_array_interface__["data"][1] and not last.__cuda_array_interface__["data"][1]
        assert (read(whole)[2 * PAGE :] == 4).all()
        bare.mappings[1].revoke(device)
        with pytest.raises(ValueError, match="nobody has access"):
            whole.fill(1)


def test_a_read_only_mapping_is_read_and_not_written(device: sa.Device, bare: vmm.AddressRange) -> None:
    one, two, _ = bare.mappings
    for mapping in (one, two):
        mapping.set_access(device)
        mapping.fill(7)
    one.set_access(device, READ)
    two.copy_from(one)
    each_raises(
        sa.InvalidValueError,
        lambda: one.fill(1),
        lambda: one.copy_from(two),
        lambda: one[8:12].fill(1, width=4),
        match=f"{device.location} may only read",
    )
    assert holds(one, 7)
    one.set_access(device)
    one.fill(8)
    assert holds(one, 8)


class TestWaiting:
    """Work that uses the memory has to pass before access to it is taken away."""

    WAITS = ("cuMemFree", "cuStreamSynchronize", "cuEventSynchronize")

    @pytest.mark.parametrize(
        ("before", "now", "waits"),
        [
            (READWRITE, NONE, ["cuMemFree"]),
            (READWRITE, READ, ["cuMemFree"]),
            (READ, NONE, ["cuMemFree"]),
            (READ, READWRITE, []),
            (READWRITE, READWRITE, []),
            (NONE, READWRITE, []),
            (NONE, NONE, []),
        ],
    )
    def test_only_if_taken(self, account: Account, before: sa.MemAccess, now: sa.MemAccess, waits: list[str]) -> None:
        device = account.device
        with vmm.AddressRange(PAGE, driver=account.driver) as addresses, vmm.PhysicalMemory(device, PAGE) as memory:
            mapping = addresses.map(memory, access={device: before})
            done = len(account.calls(*self.WAITS))
            mapping.set_access(device, now)
            assert account.calls(*self.WAITS)[done:] == waits
            assert mapping.access(device) == now

    def test_for_what_it_is_told(self, account: Account) -> None:
        device = account.device
        with (
            device.create_stream() as stream,
            stream.record() as event,
            vmm.AddressRange(PAGE, driver=account.driver) as addresses,
            vmm.PhysicalMemory(device, PAGE) as memory,
        ):
            mapping = addresses.map(memory)
            for after, waits in (
                ((), []),
                ([], []),
                (stream, ["cuStreamSynchronize"]),
                (event, ["cuEventSynchronize"]),
                ([stream, event], ["cuStreamSynchronize", "cuEventSynchronize"]),
                (iter([event]), ["cuEventSynchronize"]),
                ({stream}, ["cuStreamSynchronize"]),
                (None, ["cuEventSynchronize", "cuMemFree"]),
            ):
                mapping.set_access(device)
                done = len(account.calls(*self.WAITS))
                mapping.revoke(device, after=after)
                assert account.calls(*self.WAITS)[done:] == waits

    @pytest.mark.parametrize("after", [3, "stream", [None], [3]])
    def test_for_what_is_none(self, device: sa.Device, bare: vmm.AddressRange, after: Any) -> None:
        mapping = bare.mappings[0]
        mapping.set_access(device)
        each_raises(TypeError, lambda: mapping.revoke(device, after=after), lambda: mapping.close(after))
        assert mapping.access(device) == READWRITE

    @pytest.mark.parametrize(
        "use",
        [
            lambda mapping, device: mapping.close(),
            lambda mapping, device: mapping.revoke(device),
            lambda mapping, device: mapping.range.unmap(),
        ],
    )
    def test_for_all_work_in_a_capture(
        self, device: sa.Device, bare: vmm.AddressRange, stream: sa.Stream, use: Callable[..., None]
    ) -> None:
        """The device is waited for without a call that the capture forbids, and the capture goes on."""
        mapping = bare.mappings[0]
        mapping.set_access(device)
        with stream.capture() as graph:
            use(mapping, device)
            assert mapping.closed or mapping.access(device) == NONE
        assert graph.nodes == []
        graph.close()

    @pytest.mark.parametrize("mode", ["THREAD_LOCAL", "GLOBAL"])
    @pytest.mark.parametrize(
        "tier",
        [
            pytest.param(lambda device, folder: None, id="host"),
            pytest.param(lambda device, folder: vmm.HostTier(device, check=True), id="checked"),
            pytest.param(vmm.DiskTier, id="disk"),
        ],
    )
    def test_beside_a_capture_of_an_unknown_stream(
        self, raw: Any, device: sa.Device, tmp_path: Path, tier: Callable[..., Any], mode: str
    ) -> None:
        """The host waits for the device without a call that ends captures of the context."""
        in_mode = getattr(raw.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{mode}")
        _, theirs = raw.cuStreamCreate(1)
        with (
            vmm.GrowableBuffer(device, 2 * PAGE, PAGE) as buffer,
            vmm.SleepGroup(device, backup=tier(device, tmp_path)) as group,
        ):
            group.add(buffer)
            assert raw.cuStreamBeginCapture(theirs, in_mode)[0] == 0
            for end in (group.sleep, group.wake, group.freeze, group.thaw, group.sleep, group.wake, buffer.close):
                in_threads(end)
            ended, graph = raw.cuStreamEndCapture(theirs)
            assert (ended, int(graph) != 0) == (0, True)
            raw.cuGraphDestroy(graph)
        raw.cuStreamDestroy(theirs)


@pytest.mark.gpus(2)
class TestTwoDevices:
    def test_side_by_side(self, device: sa.Device, peer: sa.Device, pages: vmm.AddressRange) -> None:
        for place, owner in enumerate((device, peer)):
            with vmm.PhysicalMemory(owner, PAGE) as memory:
                pages.map(memory, place * PAGE)
        pages.set_access([device, peer], stop=2 * PAGE)
        whole, (mine, theirs) = pages.view(0, 2 * PAGE), pages.mappings
        assert (mine.location, theirs.location) == (device.location, peer.location)
        assert (mine.stream.device, theirs.stream.device) == (device, peer)
        with peer.create_stream() as stream:
            whole.fill(3, stream)  # across the seam, by the one that has the second half
            stream.synchronize()
        assert holds(mine, 3) and holds(theirs, 3) and holds(whole, 3)
        whole[PAGE - 8 : PAGE + 8].fill(4)
        device.synchronize()
        assert read(mine)[-9:].tolist() == [3] + 8 * [4] and read(theirs)[:9].tolist() == 8 * [4] + [3]

    def test_host_memory_for_one(self, peer: sa.Device, pages: vmm.AddressRange) -> None:
        with vmm.PhysicalMemory(sa.MemLocation.host_numa(0), PAGE, driver=peer.driver) as memory:
            assert pages.map(memory, access=peer).stream.device == peer

    def test_taken_from_one(self, account: Account) -> None:
        """Only the device that loses access is waited for."""
        one, two = (sa.Device(ordinal, driver=account.driver) for ordinal in (0, 1))
        with vmm.AddressRange(PAGE, driver=account.driver) as addresses, vmm.PhysicalMemory(one, PAGE) as memory:
            mapping = addresses.map(memory, access=[one, two])
            recorded = len(account.calls("cuMemFree"))
            mapping.revoke(two)
            assert len(account.calls("cuMemFree")) == recorded + 1
            assert mapping.rights == {one.location: READWRITE}
            assert (mapping.access(one), mapping.access(two)) == (READWRITE, NONE)
            mapping.fill(1)
