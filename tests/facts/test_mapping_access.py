"""Access to mapped memory: grants, what work checks of them, and what device and host may do with host memory."""

import ctypes
import dataclasses

import numpy as np
import numpy.typing as npt
import pytest

from tests.facts.enums import DEVICE, HOST, HOST_NUMA, HOST_NUMA_CURRENT, LEGACY, NO_ACCESS, NOWHERE, READ, READWRITE
from tests.facts.support import PAGE, UNRESERVED, MiB, Rig, said, value

OWN = (DEVICE, 0, READWRITE)


@pytest.fixture
def start(rig: Rig) -> int:
    """A range of eight pages with three mappings of one page at its begin, and access to none."""
    start = rig.reserve(8 * PAGE)
    for page in range(3):
        rig.map(start + page * PAGE, rig.memory())
    return start


@pytest.fixture
def open_start(rig: Rig, start: int) -> int:
    """The same with access, and full of sevens."""
    assert rig.set_access(start, 3 * PAGE, OWN) == "SUCCESS"
    value(rig.raw.cuMemsetD8(start, 7, 3 * PAGE))
    rig.synchronize()
    return start


class TestGetAccess:
    def test_of_one_mapping(self, rig: Rig, start: int) -> None:
        assert rig.set_access(start, PAGE, OWN) == "SUCCESS"
        assert [rig.get_access(start + at) for at in (0, 77, PAGE)] == [READWRITE, READWRITE, NO_ACCESS]
        assert rig.get_access(start, HOST_NUMA) == NO_ACCESS
        for flags in (NO_ACCESS, READ, READWRITE):
            assert rig.set_access(start, PAGE, (DEVICE, 0, flags)) == "SUCCESS"
            # Asked for the host, the call says what device 0 may do.
            assert [rig.get_access(start, kind) for kind in (DEVICE, HOST)] == [flags, flags]

    def test_of_what_is_none(self, rig: Rig, start: int) -> None:
        places = ((DEVICE, 9), (NOWHERE, 0), (HOST_NUMA_CURRENT, 0))
        assert [rig.get_access(start, kind, id) for kind, id in places] == ["INVALID_DEVICE"] * 3
        assert said(rig.raw.cuMemGetAccess(None, start)) == "INVALID_VALUE"
        assert rig.get_access(start + 5 * PAGE) == rig.get_access(UNRESERVED) == "INVALID_VALUE"


RANGES = {
    "all three": (0, 3 * PAGE, "SUCCESS"),
    "with what is not mapped": (0, 4 * PAGE, "INVALID_VALUE"),
    "what is not mapped": (4 * PAGE, PAGE, "INVALID_VALUE"),
    "half of one": (0, PAGE // 2, "INVALID_VALUE"),
    "64 KiB of one": (0, 1 << 16, "INVALID_VALUE"),
    "4 KiB behind the begin": (4096, PAGE, "INVALID_VALUE"),
    "4 KiB more than one": (0, PAGE + 4096, "INVALID_VALUE"),
    "halves of two": (PAGE // 2, PAGE, "INVALID_VALUE"),
    "no bytes": (0, 0, "INVALID_VALUE"),
}
PLACES = {
    "device that is not there": ((DEVICE, 9, READWRITE), "INVALID_VALUE"),
    "nowhere": ((NOWHERE, 0, READWRITE), "INVALID_VALUE"),
    "host": ((HOST, 0, READWRITE), "NOT_SUPPORTED"),
    "host, none": ((HOST, 0, NO_ACCESS), "SUCCESS"),
    "host NUMA": ((HOST_NUMA, 0, READWRITE), "NOT_SUPPORTED"),
    "current host NUMA": ((HOST_NUMA_CURRENT, 0, READWRITE), "INVALID_VALUE"),
}


class TestSetAccess:
    def test_ranges_and_places(self, rig: Rig, start: int) -> None:
        for name, (at, size, expected) in RANGES.items():
            assert rig.set_access(start + at, size, OWN) == expected, name
        for name, (wanted, expected) in PLACES.items():
            assert rig.set_access(start, PAGE, wanted) == expected, name
            assert rig.set_access(start, PAGE, (DEVICE, 0, READ), wanted) == expected, name
        assert said(rig.raw.cuMemSetAccess(start, PAGE, [], 0)) == "INVALID_VALUE"
        assert said(rig.raw.cuMemSetAccess(start, PAGE, None, 0)) == "INVALID_VALUE"

    def test_what_comes_before_a_refused_place_is_set(self, rig: Rig, start: int) -> None:
        """In the first mapping only."""
        assert rig.set_access(start, PAGE, (DEVICE, 0, READ)) == "SUCCESS"
        assert rig.set_access(start, 2 * PAGE, OWN, (HOST, 0, READWRITE)) == "NOT_SUPPORTED"
        assert [rig.get_access(start + page * PAGE) for page in range(2)] == [READWRITE, NO_ACCESS]

    def test_of_one_device_twice(self, rig: Rig, start: int) -> None:
        """The last one counts."""
        assert rig.set_access(start, PAGE, OWN, (DEVICE, 0, READ)) == "SUCCESS"
        assert rig.get_access(start) == READ


class TestWork:
    """Fills and copies are checked at the call."""

    def test_on_memory_to_read(self, rig: Rig, open_start: int) -> None:
        raw, stream = rig.raw, rig.stream()
        assert rig.set_access(open_start, PAGE, (DEVICE, 0, READ)) == "SUCCESS"
        assert rig.read(open_start, 4) == [7] * 4
        refused = (
            raw.cuMemsetD8(open_start, 8, PAGE),
            raw.cuMemcpyHtoD(open_start, np.ones(8, np.uint8), 8),
            raw.cuMemcpyAsync(open_start, int(rig.pinned(64)), 8, stream),
            raw.cuMemcpyDtoD(open_start, open_start + PAGE, 8),
        )
        assert [said(answer) for answer in refused] == ["INVALID_VALUE"] * 4
        assert rig.read(open_start, 8) == [7] * 8

    def test_on_memory_without_access(self, rig: Rig, open_start: int) -> None:
        raw = rig.raw
        host: npt.NDArray[np.uint8] = np.zeros(8, np.uint8)
        assert rig.set_access(open_start, PAGE, (DEVICE, 0, NO_ACCESS)) == "SUCCESS"
        refused = (
            raw.cuMemsetD8(open_start, 8, PAGE),
            raw.cuMemcpyDtoD(open_start + PAGE, open_start, 8),
            raw.cuMemcpyDtoH(host, open_start, 8),
        )
        assert [said(answer) for answer in refused] == ["INVALID_VALUE"] * 3
        assert rig.set_access(open_start, PAGE, OWN) == "SUCCESS"
        assert rig.read(open_start, 8) == [7] * 8

    def test_over_several_mappings(self, rig: Rig, open_start: int) -> None:
        half, last = PAGE // 2, open_start + 2 * PAGE
        assert said(rig.raw.cuMemsetD8(open_start, 3, 3 * PAGE)) == "SUCCESS"
        assert rig.read(last - 4, 8) == [3] * 8
        value(rig.raw.cuMemsetD8(last, 4, PAGE))
        assert said(rig.raw.cuMemcpyDtoD(open_start + half, open_start + 3 * half, PAGE)) == "SUCCESS"
        assert rig.read(open_start + PAGE - 4, 8) == [3] * 4 + [4] * 4

    def test_where_nothing_is_mapped(self, rig: Rig, open_start: int) -> None:
        raw, last = rig.raw, open_start + 2 * PAGE
        answers = [raw.cuMemsetD8(last, 3, 2 * PAGE), raw.cuMemsetD8(UNRESERVED, 1, 4)]
        answers.append(raw.cuMemcpyHtoD(last, np.ones(2 * PAGE, np.uint8), 2 * PAGE))
        value(raw.cuMemUnmap(open_start + PAGE, PAGE))
        answers.append(raw.cuMemsetD8Async(open_start + PAGE, 3, PAGE, LEGACY))
        assert [said(one) for one in answers] == ["INVALID_VALUE"] * 4
        rig.synchronize()

    def test_it_is_no_allocation(self, rig: Rig, open_start: int) -> None:
        raw = rig.raw
        answers = raw.cuMemFree(open_start), raw.cuMemFreeAsync(open_start, LEGACY), raw.cuIpcGetMemHandle(open_start)
        assert [said(one) for one in answers] == ["INVALID_VALUE"] * 3
        assert rig.read(open_start, 8) == [7] * 8


def test_over_a_hole_only_what_lies_before_it_gets_access(rig: Rig) -> None:
    start, memory = rig.reserve(8 * PAGE), rig.memory()
    for page in (0, 1, 3, 5):
        rig.map(start + page * PAGE, memory)
    assert rig.set_access(start, 6 * PAGE, OWN) == "SUCCESS"
    assert [rig.get_access(start + page * PAGE) for page in (0, 1, 3, 5)] == [
        READWRITE,
        READWRITE,
        NO_ACCESS,
        NO_ACCESS,
    ]


locations = pytest.mark.parametrize("location", [HOST, HOST_NUMA], ids=["host", "host-numa"])


@dataclasses.dataclass(frozen=True)
class Case:
    """The grants of one call, and their effects."""

    wanted: tuple[tuple[int, int, int], ...]
    flags: list[int]  # that cuMemGetAccess reads for the device, the host and its memory node
    fill: str  # what cuMemsetD8 says
    host: bool  # whether the host's own loads and stores work


CASES = {
    "device": Case((OWN,), [3, 3, 0], "SUCCESS", False),
    "host": Case(((HOST, 0, READWRITE),), [0, 3, 3], "INVALID_VALUE", True),
    "host NUMA": Case(((HOST_NUMA, 0, READWRITE),), [0, 3, 3], "INVALID_VALUE", True),
    "both": Case((OWN, (HOST, 0, READWRITE)), [3, 3, 3], "SUCCESS", True),
    "device reads": Case(((DEVICE, 0, READ), (HOST, 0, READWRITE)), [1, 3, 3], "INVALID_VALUE", True),
    "host reads": Case(((HOST, 0, READ), OWN), [3, 3, 1], "SUCCESS", True),
}
cases = pytest.mark.parametrize("name", CASES)


@locations
@cases
class TestGrant:
    def test_effects(self, rig: Rig, location: int, name: str) -> None:
        case = CASES[name]
        address = rig.mapping(PAGE, *case.wanted, location=location)
        assert [rig.get_access(address, kind) for kind in (DEVICE, HOST, HOST_NUMA)] == case.flags
        expected: dict[str, int | str] = {
            "MEMORY_TYPE": 1,
            "DEVICE_POINTER": address if case.flags[0] else "INVALID_VALUE",
            "HOST_POINTER": address if case.host else "INVALID_VALUE",
            "DEVICE_ORDINAL": 0,
            "RANGE_SIZE": PAGE,
            "MAPPED": 1,
            "ACCESS_FLAGS": case.flags[0],
        }
        assert rig.pointer_attributes(address, expected) == expected
        assert said(rig.raw.cuMemsetD8(address, 5, PAGE)) == case.fill
        rig.synchronize()
        if case.host:
            byte = 5 if case.fill == "SUCCESS" else 0
            assert ctypes.string_at(address, PAGE) == bytes([byte]) * PAGE


@locations
@pytest.mark.parametrize("name", ["host", "host NUMA", "both"])
def test_host_and_copies_see_the_same_bytes(rig: Rig, location: int, name: str) -> None:
    address = rig.mapping(PAGE, *CASES[name].wanted, location=location)
    ctypes.memset(address + 1, 77, 1)
    assert rig.read(address, 4) == [0, 77, 0, 0]
    assert said(rig.raw.cuMemcpyHtoD(address, np.full(8, 3, np.uint8), 8)) == "SUCCESS"
    rig.synchronize()
    assert ctypes.string_at(address, 8) == b"\3" * 8


class TestOneAfterTheOther:
    """Grants made by separate calls, to memory that the device already has access to."""

    @pytest.fixture
    def address(self, rig: Rig) -> int:
        return rig.mapping(PAGE, OWN, location=HOST)

    def flags(self, rig: Rig, address: int) -> list[int | str]:
        return [rig.get_access(address, kind) for kind in (DEVICE, HOST, HOST_NUMA)]

    def test_host_too(self, rig: Rig, address: int) -> None:
        value(rig.raw.cuMemsetD8(address, 5, PAGE))
        rig.synchronize()
        assert rig.set_access(address, PAGE, (HOST, 0, READWRITE)) == "SUCCESS"
        assert self.flags(rig, address) == [READWRITE] * 3
        assert ctypes.string_at(address, 4) == b"\5" * 4
        ctypes.memset(address + 1, 77, 1)
        assert rig.read(address, 4) == [5, 77, 5, 5]

    def test_host_flags(self, rig: Rig, address: int) -> None:
        """They are what was granted last; with the host's taken away, they are not none."""
        for wanted, result, host in (
            ((HOST, 0, READWRITE), "SUCCESS", READWRITE),
            ((HOST, 0, READ), "SUCCESS", READ),
            ((HOST_NUMA, 0, READWRITE), "SUCCESS", READWRITE),
            ((HOST_NUMA, 9, READWRITE), "SUCCESS", None),
            ((HOST_NUMA_CURRENT, 0, READWRITE), "INVALID_VALUE", None),
            ((HOST, 0, NO_ACCESS), "SUCCESS", READWRITE),
        ):
            assert rig.set_access(address, PAGE, wanted) == result
            if host is not None:
                assert rig.get_access(address, HOST) == host

    def test_device_reads_only(self, rig: Rig, address: int) -> None:
        assert rig.set_access(address, PAGE, (DEVICE, 0, READ)) == "SUCCESS"
        assert rig.get_access(address) == READ
        assert rig.set_access(address, PAGE, (DEVICE, 0, NO_ACCESS)) == "SUCCESS"


def test_copies_that_the_device_does_need_no_access_of_the_host(rig: Rig) -> None:
    address, target = rig.mapping(PAGE, OWN, location=HOST), rig.plain(2 * MiB)
    value(rig.raw.cuMemsetD8(address, 5, PAGE))
    rig.synchronize()
    assert rig.read(address, 4) == [5] * 4
    assert said(rig.raw.cuMemcpyDtoD(target, address, PAGE)) == "SUCCESS"
    assert rig.read(target, 4) == [5] * 4
    assert said(rig.raw.cuMemcpyAsync(target, address, PAGE, 0)) == "SUCCESS"
    rig.synchronize()


def test_beside_device_memory(rig: Rig) -> None:
    raw, start = rig.raw, rig.reserve(2 * PAGE)
    rig.map(start, rig.memory())
    rig.map(start + PAGE, rig.memory(location=HOST))
    assert rig.set_access(start, 2 * PAGE, OWN) == "SUCCESS"
    assert said(raw.cuMemsetD8(start, 3, 2 * PAGE)) == "SUCCESS"
    rig.synchronize()
    assert rig.set_access(start, 2 * PAGE, (HOST, 0, READWRITE)) == "NOT_SUPPORTED"
    assert rig.set_access(start + PAGE, PAGE, (HOST, 0, READWRITE)) == "SUCCESS"
    assert said(raw.cuMemcpyDtoD(start, start + PAGE, PAGE)) == "SUCCESS"
    assert rig.read(start, 4) == [3] * 4


def test_before_device_memory_it_gets_access_that_this_refuses(rig: Rig) -> None:
    start = rig.reserve(2 * PAGE)
    rig.map(start, rig.memory(location=HOST))
    rig.map(start + PAGE, rig.memory())
    assert rig.set_access(start, 2 * PAGE, OWN, (HOST, 0, READ)) == "NOT_SUPPORTED"
    assert [rig.get_access(start, HOST_NUMA), rig.get_access(start + PAGE)] == [READ, READWRITE]


def test_where_a_range_begins_is_missing(rig: Rig) -> None:
    address = rig.mapping(PAGE, location=HOST_NUMA)
    assert said(rig.raw.cuMemGetAddressRange(address)) == "NOT_FOUND"
    assert rig.set_access(address, PAGE, (DEVICE, 0, READWRITE)) == "SUCCESS"
    base, size = value(rig.raw.cuMemGetAddressRange(address))
    assert (int(base), size) == (0, PAGE)
