"""Managed memory as the driver API's documentation has it: no reading, as other processes of a GPU notice its use.

On hardware these tests run only with ``STREAMALLOC_TEST_MANAGED=1``.
"""

import ctypes
from typing import Any

import pytest

from tests.facts.enums import DEVICE, HOST, HOST_NUMA, HOST_NUMA_CURRENT, MANAGED, NOWHERE
from tests.facts.support import MiB, Rig, said, value

pytestmark = [pytest.mark.managed, pytest.mark.bindings("13.0"), pytest.mark.supports("concurrent_managed_access")]

GLOBAL, OF_HOST, SINGLE = 1, 2, 4  # CUmemAttach_flags
SET_READ_MOSTLY, UNSET_READ_MOSTLY, SET_PREFERRED, UNSET_PREFERRED, SET_ACCESSED_BY, UNSET_ACCESSED_BY = range(1, 7)
CPU, NONE = -1, -2
PAGE = 4096


class Managed:
    """Four pages of managed memory."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.raw, self.stream = rig, rig.raw, rig.stream()
        self.at = int(rig.own(value(rig.raw.cuMemAllocManaged(4 * PAGE, GLOBAL)), rig.raw.cuMemFree))

    def prefetch(self, kind: int, id: int = 0, at: int = 0, size: int = 4 * PAGE, flags: int = 0) -> str:
        location = self.rig.location(kind, id)
        return said(self.raw.cuMemPrefetchAsync(self.at + at, size, location, flags, self.stream))

    def advise(self, advice: int, kind: int = HOST, id: int = 0, at: int = 0, size: int = 4 * PAGE) -> str:
        location = self.rig.location(kind, id)
        return said(self.raw.cuMemAdvise(self.at + at, size, self.raw.CUmem_advise(advice), location))

    def read(self, name: str, at: int = 0, size: int = 4 * PAGE, bytes: int = 4) -> Any:
        attribute = getattr(self.raw.CUmem_range_attribute, f"CU_MEM_RANGE_ATTRIBUTE_{name}")
        return value(self.raw.cuMemRangeGetAttribute(bytes, attribute, self.at + at, size))

    def places(self, what: str, at: int = 0, size: int = 4 * PAGE) -> tuple[int, ...]:
        """A location as a device id, as a type, and the id of a device or a node."""
        kind = self.read(f"{what}_TYPE", at, size)
        ids = (self.read(f"{what}_ID", at, size),) if kind in (DEVICE, HOST_NUMA) else ()
        return (self.read(what, at, size), kind, *ids)


@pytest.fixture
def managed(rig: Rig) -> Managed:
    return Managed(rig)


class TestAllocation:
    def test_host_and_device_use_one_address(self, managed: Managed) -> None:
        raw, bytes = managed.raw, (ctypes.c_uint8 * 64).from_address(managed.at)
        value(raw.cuMemsetD8Async(managed.at, 7, 64, managed.stream))
        managed.rig.synchronize()
        assert set(bytes) == {7}
        bytes[3] = 9
        assert managed.rig.read(managed.at, 4) == [7, 7, 7, 9]

    def test_what_is_refused(self, rig: Rig) -> None:
        for size, flags in ((0, GLOBAL), (PAGE, 0), (PAGE, SINGLE), (PAGE, 8)):
            assert said(rig.raw.cuMemAllocManaged(size, flags)) == "INVALID_VALUE"
        rig.own(value(rig.raw.cuMemAllocManaged(PAGE, OF_HOST)), rig.raw.cuMemFree)

    def test_pointer_attributes(self, managed: Managed) -> None:
        at = managed.at + 5
        expected = {"IS_MANAGED": 1, "DEVICE_POINTER": at, "HOST_POINTER": at, "RANGE_START_ADDR": managed.at}
        expected |= {"RANGE_SIZE": 4 * PAGE, "DEVICE_ORDINAL": 0}
        assert managed.rig.pointer_attributes(at, expected) == expected

    def test_no_handle_for_other_processes(self, managed: Managed) -> None:
        assert said(managed.raw.cuIpcGetMemHandle(managed.at)) == "INVALID_VALUE"

    def test_freed_once(self, rig: Rig) -> None:
        pointer = value(rig.raw.cuMemAllocManaged(PAGE, GLOBAL))
        assert [said(rig.raw.cuMemFree(pointer)) for _ in range(2)] == ["SUCCESS", "INVALID_VALUE"]

    @pytest.mark.gpus(2)
    def test_all_devices_use_it(self, managed: Managed) -> None:
        rig = managed.rig
        rig.device_context(1)
        assert said(rig.raw.cuMemsetD8(managed.at, 3, 64)) == "SUCCESS"
        assert said(rig.raw.cuMemcpyDtoD(managed.at + 64, managed.at, 64)) == "SUCCESS"
        rig.use(rig._contexts[0])
        assert rig.read(managed.at + 64, 2) == [3, 3]


class TestPrefetch:
    def test_last_location_of_all_pages(self, managed: Managed) -> None:
        assert managed.places("LAST_PREFETCH_LOCATION") == (NONE, NOWHERE)
        assert managed.prefetch(DEVICE) == "SUCCESS"
        assert managed.places("LAST_PREFETCH_LOCATION") == (0, DEVICE, 0)
        assert managed.prefetch(HOST, 7, at=PAGE, size=1) == "SUCCESS"
        assert managed.places("LAST_PREFETCH_LOCATION", PAGE, PAGE) == (CPU, HOST)
        assert managed.places("LAST_PREFETCH_LOCATION") == (NONE, NOWHERE)
        assert managed.places("LAST_PREFETCH_LOCATION", 2 * PAGE, PAGE) == (0, DEVICE, 0)
        assert managed.prefetch(HOST_NUMA) == managed.prefetch(HOST_NUMA_CURRENT) == "SUCCESS"

    def test_what_is_refused(self, managed: Managed) -> None:
        assert managed.prefetch(DEVICE, 99) == "INVALID_DEVICE"
        for wrong in ({"size": 0}, {"flags": 1}, {"size": 64 * MiB}):
            assert managed.prefetch(DEVICE, **wrong) == "INVALID_VALUE"
        assert managed.prefetch(NOWHERE) == "INVALID_VALUE"

    def test_goes_behind_the_work_of_its_stream(self, managed: Managed) -> None:
        gate = managed.rig.gate()
        gate.hold(managed.stream)
        assert managed.prefetch(DEVICE) == "SUCCESS"
        assert managed.rig.held(managed.stream)
        assert managed.places("LAST_PREFETCH_LOCATION") == (0, DEVICE, 0)  # as it was asked for
        gate.open()
        assert managed.rig.executed(managed.stream)


class TestBatches:
    def call(self, managed: Managed, name: str, *ranges: tuple[int, int], stream: Any = None, **wrong: Any) -> str:
        raw = managed.raw
        pointers, sizes = [raw.CUdeviceptr(managed.at + at) for at, _ in ranges], [size for _, size in ranges]
        places = [managed.rig.location(*place) for place in wrong.get("places", [(DEVICE, 0)])]
        where = () if name == "Discard" else (places, wrong.get("at", [0]), len(places))
        call = getattr(raw, f"cuMem{name}BatchAsync")
        stream = managed.stream if stream is None else stream
        return said(call(pointers, sizes, len(ranges), *where, wrong.get("flags", 0), stream))

    def test_prefetch_to_several_places(self, managed: Managed) -> None:
        ranges = [(number * PAGE, PAGE) for number in range(3)]
        assert self.call(managed, "Prefetch", *ranges, places=[(DEVICE, 0), (HOST, 0)], at=[0, 2]) == "SUCCESS"
        found = [managed.read("LAST_PREFETCH_LOCATION", number * PAGE, PAGE) for number in range(4)]
        assert found == [0, 0, CPU, NONE]

    def test_discard_leaves_what_is_beside(self, managed: Managed) -> None:
        value(managed.raw.cuMemsetD8(managed.at, 5, 4 * PAGE))
        assert self.call(managed, "Discard", (PAGE, PAGE), (3 * PAGE, PAGE)) == "SUCCESS"
        managed.rig.synchronize()
        for at in (0, 2 * PAGE):
            assert set(ctypes.string_at(managed.at + at, PAGE)) == {5}
        value(managed.raw.cuMemsetD8(managed.at + PAGE, 6, PAGE))
        assert managed.rig.read(managed.at + PAGE, 2) == [6, 6]

    @pytest.mark.simulated_only("on hardware what a discarded range reads as is indeterminate")
    def test_discarded_bytes_are_lost_when_the_stream_gets_there(self, managed: Managed) -> None:
        gate = managed.rig.gate()
        value(managed.raw.cuMemsetD8(managed.at, 5, PAGE))
        gate.hold(managed.stream)
        assert self.call(managed, "DiscardAndPrefetch", (0, 64)) == "SUCCESS"
        assert set(ctypes.string_at(managed.at, 64)) == {5}
        gate.open()
        assert managed.rig.executed(managed.stream)
        assert set(ctypes.string_at(managed.at, 64)) == {0xDB} and ctypes.string_at(managed.at + 64, 1) == b"\5"
        assert managed.read("LAST_PREFETCH_LOCATION", 0, 64) == 0

    @pytest.mark.parametrize("name", ["Prefetch", "Discard", "DiscardAndPrefetch"])
    def test_what_is_refused(self, managed: Managed, name: str) -> None:
        assert self.call(managed, name) == "INVALID_VALUE"
        assert self.call(managed, name, (0, 0)) == "INVALID_VALUE"
        assert self.call(managed, name, (0, PAGE), flags=1) == "INVALID_VALUE"
        assert self.call(managed, name, (0, PAGE), (0, 64 * MiB)) == "INVALID_VALUE"
        assert self.call(managed, name, (0, PAGE), stream=0) == "INVALID_VALUE"
        if name != "Discard":
            for at in ([1], [0, 0], [0, 2]):
                places = [(DEVICE, 0)] * len(at)
                assert self.call(managed, name, (0, PAGE), (PAGE, PAGE), places=places, at=at) == "INVALID_VALUE"


class TestAdvice:
    def test_read_mostly(self, managed: Managed) -> None:
        assert managed.advise(SET_READ_MOSTLY, DEVICE, 99) == "SUCCESS"  # the location is ignored
        assert managed.read("READ_MOSTLY") == 1
        assert managed.advise(UNSET_READ_MOSTLY, at=2 * PAGE, size=1) == "SUCCESS"
        assert managed.read("READ_MOSTLY") == 0 and managed.read("READ_MOSTLY", 0, 2 * PAGE) == 1

    def test_preferred_location(self, managed: Managed) -> None:
        assert managed.places("PREFERRED_LOCATION") == (NONE, NOWHERE)
        assert managed.advise(SET_PREFERRED, DEVICE) == "SUCCESS"
        assert managed.places("PREFERRED_LOCATION") == (0, DEVICE, 0)
        assert managed.advise(SET_PREFERRED, HOST, 5) == "SUCCESS"
        assert managed.places("PREFERRED_LOCATION") == (CPU, HOST)
        assert managed.advise(SET_PREFERRED, HOST_NUMA, 0, size=PAGE) == "SUCCESS"
        assert managed.places("PREFERRED_LOCATION", 0, PAGE)[1:] == (HOST_NUMA, 0)
        assert managed.places("PREFERRED_LOCATION") == (NONE, NOWHERE)
        assert managed.advise(UNSET_PREFERRED) == "SUCCESS"
        assert managed.places("PREFERRED_LOCATION") == (NONE, NOWHERE)

    def test_accessed_by(self, managed: Managed) -> None:
        assert managed.advise(SET_ACCESSED_BY, DEVICE) == managed.advise(SET_ACCESSED_BY, HOST) == "SUCCESS"
        assert managed.read("ACCESSED_BY", bytes=12) == [0, CPU, NONE]
        assert managed.read("ACCESSED_BY", bytes=8) == [0, CPU]
        assert managed.advise(UNSET_ACCESSED_BY, HOST, at=PAGE, size=PAGE) == "SUCCESS"
        assert managed.read("ACCESSED_BY", bytes=8) == [0, NONE]
        assert managed.read("ACCESSED_BY", 0, PAGE, bytes=8) == [0, CPU]

    def test_what_is_refused(self, managed: Managed) -> None:
        assert managed.advise(SET_PREFERRED, DEVICE, 99) == "INVALID_DEVICE"
        for kind in (NOWHERE, HOST_NUMA, HOST_NUMA_CURRENT):
            assert managed.advise(SET_ACCESSED_BY, kind) == "INVALID_VALUE"
        assert managed.advise(SET_PREFERRED, NOWHERE) == "INVALID_VALUE"
        for size in (0, 64 * MiB):
            assert managed.advise(SET_READ_MOSTLY, size=size) == "INVALID_VALUE"

    def test_attributes_together(self, managed: Managed) -> None:
        raw, kinds = managed.raw, [1, 4, 3]
        assert managed.prefetch(DEVICE) == managed.advise(SET_READ_MOSTLY) == "SUCCESS"
        attributes = [raw.CUmem_range_attribute(kind) for kind in kinds]
        assert value(raw.cuMemRangeGetAttributes([4, 4, 4], attributes, 3, managed.at, PAGE)) == [1, 0, [NONE]]
        for sizes in ([4, 8, 4], [4, 4, 6]):
            assert said(raw.cuMemRangeGetAttributes(sizes, attributes, 3, managed.at, PAGE)) == "INVALID_VALUE"


class TestAttach:
    def attach(self, managed: Managed, flags: int, at: int = 0, length: int = 0, stream: Any = None) -> str:
        stream = managed.stream if stream is None else stream
        return said(managed.raw.cuStreamAttachMemAsync(stream, managed.at + at, length, flags))

    def test_whole_allocation(self, managed: Managed) -> None:
        for flags in (GLOBAL, OF_HOST, SINGLE):
            assert self.attach(managed, flags) == self.attach(managed, flags, length=4 * PAGE) == "SUCCESS"
        assert self.attach(managed, GLOBAL, stream=0) == "SUCCESS"

    def test_what_is_refused(self, managed: Managed) -> None:
        assert self.attach(managed, GLOBAL, length=PAGE) == "INVALID_VALUE"
        assert self.attach(managed, GLOBAL, at=PAGE) == "INVALID_VALUE"
        assert self.attach(managed, 0) == self.attach(managed, 8) == "INVALID_VALUE"
        assert self.attach(managed, SINGLE, stream=0) == "INVALID_VALUE"


def test_memory_of_a_pool(rig: Rig) -> None:
    pool, stream = value(rig.create_pool(allocation_type=MANAGED)), rig.stream()
    at = rig.allocate(pool, 4 * PAGE, stream)
    rig.synchronize()
    ctypes.memset(at, 3, PAGE)
    assert rig.read(at, 2) == [3, 3]
    location, last = rig.location(DEVICE), rig.raw.CUmem_range_attribute.CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION
    assert said(rig.raw.cuMemPrefetchAsync(at, 4 * PAGE, location, 0, stream)) == "SUCCESS"
    assert value(rig.raw.cuMemRangeGetAttribute(4, last, at, 4 * PAGE)) == 0
    rig.free(at, stream)
