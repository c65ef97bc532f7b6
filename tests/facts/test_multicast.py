"""Multicast objects. Unlike the other facts these are no readings: nothing here has run on hardware.

They say what NVIDIA documents, and what the simulated driver therefore does.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.facts.enums import DEVICE, HOST_NUMA, NO_HANDLE, POSIX_FD, READWRITE, WIN32
from tests.facts.support import PAGE, Rig, said, value
from tests.facts.teams import Team, properties, whole
from tests.processes import FD, Descriptor, Kept, Peer

pytestmark = [pytest.mark.multicast, pytest.mark.gpus(2)]


@pytest.fixture
def team(rig: Rig) -> Team:
    """Two devices that were added, and nothing bound yet; room for two pages."""
    return Team(rig, size=2 * PAGE).add_all()


class TestGranularity:
    def granularity(self, rig: Rig, option: int, **props: int) -> int:
        flag = rig.raw.CUmulticastGranularity_flags(option)
        return int(value(rig.raw.cuMulticastGetGranularity(properties(rig.raw, 2, **props), flag)))

    def test_is_that_of_pages_whatever_the_size(self, rig: Rig) -> None:
        assert [self.granularity(rig, 0, size=size) for size in (0, PAGE, 1 << 30)] == [PAGE] * 3
        assert self.granularity(rig, 1) % PAGE == 0
        flag = rig.raw.CUmulticastGranularity_flags(0)
        assert said(rig.raw.cuMulticastGetGranularity(None, flag)) == "INVALID_VALUE"


class TestCreate:
    def test_bad_properties(self, rig: Rig) -> None:
        for wrong in ({"devices": 0}, {"size": 0}, {"size": PAGE + 4096}, {"flags": 1}, {"handle_types": WIN32}):
            props = properties(rig.raw, **{"devices": 2, **wrong})
            assert said(rig.raw.cuMulticastCreate(props)) == "INVALID_VALUE", wrong
        assert said(rig.raw.cuMulticastCreate(None)) == "INVALID_VALUE"

    def test_release(self, rig: Rig) -> None:
        assert rig.release(Team(rig).object) == rig.release(Team(rig).add_all().object) == "SUCCESS"


def test_each_device_is_added_once(rig: Rig) -> None:
    team = Team(rig)
    answers = [team.add(device) for device in (99, 0, 0, 1)]
    assert answers == ["INVALID_DEVICE", "SUCCESS", "INVALID_VALUE", "SUCCESS"]
    Team(rig).add_all()  # of another team, too


class TestBind:
    def test_parts(self, rig: Rig, team: Team) -> None:
        memory = rig.memory(2 * PAGE)
        assert team.bind(memory, offset=0, start=PAGE, size=PAGE) == "SUCCESS"
        assert team.bind(memory, offset=PAGE, start=0, size=PAGE) == "SUCCESS"

    def test_what_is_refused(self, rig: Rig, team: Team) -> None:
        memory = rig.memory(2 * PAGE)
        ranges = [{"offset": 4096, "size": PAGE}, {"start": 4096, "size": PAGE}, {"size": PAGE + 4096}, {"size": 0}]
        for wrong in (*ranges, {"offset": PAGE}, {"start": PAGE}, {"size": 3 * PAGE}, {"flags": 1}):
            assert team.bind(memory, **wrong) == "INVALID_VALUE", wrong
        assert team.bind(rig.memory(2 * PAGE, location=HOST_NUMA)) == "INVALID_VALUE"

    def test_where_something_is_bound(self, rig: Rig, team: Team) -> None:
        memory = rig.memory(2 * PAGE)
        assert team.bind(memory, offset=PAGE, size=PAGE) == "SUCCESS"
        assert team.bind(rig.memory(2 * PAGE)) == "INVALID_VALUE"
        assert team.bind(memory, start=PAGE, size=PAGE) == "SUCCESS"

    def test_what_can_be_shared(self, rig: Rig, team: Team) -> None:
        other, stream = Team(rig, handle_types=POSIX_FD).add_all(), rig.stream()
        assert other.bind(rig.memory(PAGE, handle_types=NO_HANDLE)) == "INVALID_VALUE"
        assert other.bind_address(int(rig.allocate(rig.pool(), PAGE, stream))) == "INVALID_VALUE"
        assert other.bind_address(int(rig.allocate(rig.pool(handle_types=POSIX_FD), PAGE, stream))) == "SUCCESS"
        assert other.bind(rig.memory(PAGE, id=1, handle_types=POSIX_FD)) == "SUCCESS"
        assert team.bind(rig.memory(2 * PAGE, handle_types=POSIX_FD)) == "SUCCESS"

    @pytest.mark.bindings("13.1")
    def test_with_the_device_named(self, rig: Rig, team: Team) -> None:
        bind, memory = rig.raw.cuMulticastBindMem_v2, rig.memory(2 * PAGE, id=1)
        assert said(bind(team.object, 0, 0, memory, 0, PAGE, 0)) == "INVALID_VALUE"
        assert said(bind(team.object, 99, 0, memory, 0, PAGE, 0)) == "INVALID_DEVICE"
        assert said(bind(team.object, 1, 0, memory, 0, PAGE, 0)) == "SUCCESS"


class TestBindAddress:
    def test_of_mappings_and_pools(self, rig: Rig, team: Team) -> None:
        assert team.bind_address(rig.mapping(2 * PAGE, (DEVICE, 0, READWRITE))) == "SUCCESS"
        assert team.unbind(0) == "SUCCESS"
        assert team.bind_address(int(rig.allocate(rig.pool(), 4 * PAGE, rig.stream()))) == "SUCCESS"

    def test_what_is_refused(self, rig: Rig, team: Team) -> None:
        address = rig.mapping(PAGE, (DEVICE, 0, READWRITE))
        assert team.bind_address(int(rig.plain(4 * PAGE)) // PAGE * PAGE + PAGE, size=PAGE) == "INVALID_VALUE"
        assert team.bind_address(rig.reserve(2 * PAGE)) == team.bind_address(address) == "INVALID_VALUE"
        assert team.bind_address(address + 4096, size=PAGE) == "INVALID_VALUE"

    @pytest.mark.bindings("13.1")
    def test_with_the_device_named(self, rig: Rig, team: Team) -> None:
        bind, address = rig.raw.cuMulticastBindAddr_v2, rig.mapping(2 * PAGE, (DEVICE, 0, READWRITE))
        assert said(bind(team.object, 1, 0, address, PAGE, 0)) == "INVALID_VALUE"
        assert said(bind(team.object, 0, 0, address, PAGE, 0)) == "SUCCESS"


class TestUnbind:
    def test_what_was_bound(self, rig: Rig, team: Team) -> None:
        memory = rig.memory(2 * PAGE)
        assert team.bind(memory) == "SUCCESS"
        assert team.unbind(0) == "SUCCESS"
        assert team.bind(memory) == "SUCCESS"

    def test_where_nothing_is_bound(self, rig: Rig, team: Team) -> None:
        assert team.bind(rig.memory(2 * PAGE), offset=PAGE, size=PAGE) == "SUCCESS"
        assert team.unbind(0, size=PAGE) == "INVALID_VALUE"
        assert team.unbind(1, offset=PAGE, size=PAGE) == "INVALID_VALUE"
        assert team.unbind(0, offset=PAGE, size=PAGE) == "SUCCESS"
        assert team.unbind(0, offset=PAGE, size=PAGE) == "INVALID_VALUE"

    def test_bad_ranges(self, team: Team) -> None:
        assert team.unbind(0, offset=4096) == "INVALID_VALUE"
        assert team.unbind(0, size=3 * PAGE) == "INVALID_VALUE"
        assert team.unbind(99) == "INVALID_DEVICE"


class TestMapping:
    def test_more_than_once_in_part_and_before_anything_is_bound(self, rig: Rig) -> None:
        team = Team(rig, size=2 * PAGE).add_all()
        team.map()
        team.bind_all()
        team.map()
        rig.map(rig.reserve(PAGE), team.object, PAGE)

    def test_bad_ranges(self, rig: Rig, team: Team) -> None:
        start = rig.reserve(4 * PAGE)
        for size, offset in ((3 * PAGE, 0), (4096, 0), (PAGE, 4096), (0, 0), (PAGE, 2 * PAGE)):
            assert said(rig.raw.cuMemMap(start, size, offset, team.object, 0)) == "INVALID_VALUE"
        assert said(rig.raw.cuMemMap(start + 4096, PAGE, 0, team.object, 0)) == "INVALID_VALUE"

    def test_access(self, rig: Rig) -> None:
        team, address = whole(rig)
        assert [rig.get_access(address, id=device) for device in (0, 1)] == [3, 0]
        assert rig.set_access(address, team.size, (DEVICE, 1, READWRITE)) == "SUCCESS"
        assert rig.get_access(address, id=1) == 3
        assert rig.set_access(address, team.size, (HOST_NUMA, 0, READWRITE)) == "NOT_SUPPORTED"

    def test_its_range_stays_until_it_is_unmapped(self, rig: Rig) -> None:
        team, address = whole(rig)
        assert rig.free_range(address, team.size) == "INVALID_VALUE"
        assert said(rig.raw.cuMemUnmap(address, team.size)) == "SUCCESS"
        assert rig.free_range(address, team.size) == "SUCCESS"

    @pytest.mark.parametrize("of", ["the object", "the memory"])
    def test_a_mapping_goes_on_without_the_handles(self, rig: Rig, of: str) -> None:
        team, address = whole(rig)
        for handle in [team.object] if of == "the object" else team.memory:
            assert rig.release(handle) == "SUCCESS"
        value(rig.raw.cuMemsetD8(address, 6, team.size))
        assert team.read() == [[6] * 4] * 2

    def test_the_handle_by_the_address(self, rig: Rig) -> None:
        team, address = whole(rig)
        rig.release(team.object)
        team.object = value(rig.keep_memory(rig.raw.cuMemRetainAllocationHandle(address)))
        assert [team.unbind(device) for device in team.devices] == ["SUCCESS"] * 2


class TestWrites:
    def test_fills_reach_every_device(self, rig: Rig) -> None:
        team, address = whole(rig, size=2 * PAGE)
        value(rig.raw.cuMemsetD8(address, 7, 2 * PAGE))
        value(rig.raw.cuMemsetD32(address + PAGE, 0x01020304, 1))
        assert team.read(PAGE - 2) == [[7, 7, 4, 3]] * 2
        assert team.read(2 * PAGE - 4) == [[7] * 4] * 2

    def test_copies_reach_every_device(self, rig: Rig) -> None:
        team, address = whole(rig)
        value(rig.raw.cuMemcpyHtoD(address + 4, np.arange(8, dtype=np.uint8), 8))
        assert team.read(4, 8) == [list(range(8))] * 2
        source = rig.plain(PAGE)
        value(rig.raw.cuMemsetD8(source, 9, PAGE))
        value(rig.raw.cuMemcpyDtoD(address, source, PAGE))
        assert team.read(PAGE - 4) == [[9] * 4] * 2

    def test_need_access(self, rig: Rig) -> None:
        team = Team(rig).add_all().bind_all()
        address = rig.map(rig.reserve(PAGE), team.object)
        assert said(rig.raw.cuMemsetD8(address, 1, 1)) == "INVALID_VALUE"

    def test_come_in_stream_order(self, rig: Rig) -> None:
        team, address = whole(rig)
        stream, gate = rig.stream(), rig.gate()
        value(rig.raw.cuMemsetD8(address, 1, PAGE))
        gate.hold(stream)
        value(rig.raw.cuMemsetD8Async(address, 2, PAGE, stream))
        assert rig.held(stream)
        other: Any = np.zeros(2, np.uint8)
        for device, view in enumerate(team.views):
            value(rig.raw.cuMemcpyDtoHAsync(other[device:], view, 1, rig.stream()))
        assert other.tolist() == [1, 1]
        gate.open()
        value(rig.raw.cuStreamSynchronize(stream))
        assert team.read() == [[2] * 4] * 2

    def test_go_where_each_device_has_bound_the_place(self, rig: Rig) -> None:
        team = Team(rig, size=2 * PAGE).add_all()
        swapped, straight = rig.memory(2 * PAGE, id=0), rig.memory(2 * PAGE, id=1)
        assert team.bind(swapped, offset=0, start=PAGE, size=PAGE) == "SUCCESS"
        assert team.bind(swapped, offset=PAGE, start=0, size=PAGE) == "SUCCESS"
        assert team.bind(straight) == "SUCCESS"
        first, second = team.view(swapped), team.view(straight)
        address = team.map()
        value(rig.raw.cuMemsetD8(address, 1, PAGE))
        value(rig.raw.cuMemsetD8(address + PAGE, 2, PAGE))
        value(rig.raw.cuMemsetD8(address + PAGE - 1, 3, 2))
        assert rig.read(first, 2) + rig.read(first + PAGE - 1, 2) + rig.read(first + 2 * PAGE - 1, 1) == [3, 2, 2, 1, 3]
        assert rig.read(second, 1) + rig.read(second + PAGE - 1, 2) + rig.read(second + 2 * PAGE - 1, 1) == [1, 3, 3, 2]

    def test_reach_memory_that_was_bound_by_its_address(self, rig: Rig) -> None:
        team = Team(rig).add_all()
        stream = rig.stream()
        pooled = int(rig.allocate(rig.pool(), PAGE, stream))
        mapped = rig.mapping(PAGE, (DEVICE, 0, READWRITE), id=1)
        assert team.bind_address(pooled) == team.bind_address(mapped) == "SUCCESS"
        value(rig.raw.cuMemsetD8(team.map(), 8, PAGE))
        assert rig.read(pooled, 2) + rig.read(mapped + PAGE - 2, 2) == [8] * 4


@pytest.mark.parametrize("how", ["unbound", "object gone"])
def test_bound_memory_counts_until_its_binding_ends(rig: Rig, team: Team, how: str) -> None:
    memory = rig.memory(2 * PAGE)
    before = rig.device_free()
    assert team.bind(memory) == "SUCCESS"
    rig.release(memory)
    assert rig.device_free() == before
    assert (team.unbind(0) if how == "unbound" else rig.release(team.object)) == "SUCCESS"
    assert rig.device_free() == before + 2 * PAGE


class TestBetweenProcesses:
    @pytest.fixture
    def peer(self, on_cuda: bool, rig: Rig) -> Iterator[Peer]:
        with Peer(on_cuda, devices=2) as process:
            yield process
            rig.settle()
            process.reset()

    def test_an_object_that_is_not_shareable(self, rig: Rig, team: Team) -> None:
        assert said(rig.export(team.object)) == "INVALID_VALUE"

    def test_each_adds_its_device_and_binds_its_memory(self, rig: Rig, peer: Peer) -> None:
        team = Team(rig, handle_types=POSIX_FD)
        peer.value("cuMemImportFromShareableHandle", Descriptor(rig.exported(team.object)), FD, keep="object")
        assert team.add(0) == "SUCCESS"
        peer.value("cuMulticastAddDevice", Kept("object"), 1)
        mine = rig.memory(PAGE, handle_types=POSIX_FD)
        peer.rig("memory", PAGE, id=1, handle_types=POSIX_FD, keep="memory")
        assert team.bind(mine) == "SUCCESS"
        peer.value("cuMulticastBindMem", Kept("object"), 0, Kept("memory"), 0, PAGE, 0)
        view, there = team.view(mine), peer.rig("reserve", PAGE)
        peer.rig("map", there, Kept("memory"))
        peer.rig("set_access", there, PAGE, (DEVICE, 0, READWRITE))

        value(rig.raw.cuMemsetD8(team.map(), 4, PAGE))
        rig.synchronize()
        assert rig.read(view, 2) + peer.rig("read", there, 2) == [4] * 4

        mapped = peer.rig("reserve", PAGE)
        peer.rig("map", mapped, Kept("object"))
        assert peer.rig("set_access", mapped, PAGE, (DEVICE, 0, READWRITE)) == "SUCCESS"
        peer.value("cuMemsetD8", mapped, 3, PAGE)
        peer.rig("synchronize")
        assert rig.read(view, 2) + peer.rig("read", there, 2) == [3] * 4
